//! What must hold at every step of a simulation, whatever is done to the cluster. Pure: observations in, the first promise
//! that was broken out.
//!
//! - Election safety: a term has one leader.
//! - Log matching: entries of the same index and term are the same, in every log, and so are the entries before them.
//! - Committed never changes: what one peer has applied at an index, no peer ever applies otherwise; and each applies one
//!   entry after the other.
//! - State: peers that have applied the same have the same state, also those that begin from a snapshot, and no snapshot takes
//!   a running peer back.
//! - Revisions: no command raises the revision by more than one, and none takes it back.
//! - Exactly once: a request of a session that has had its effect has none when it comes again.
//! - Leases: nothing that asks for a live lease goes through once the lease is over; and none is over before its time to
//!   live has passed since it was granted, and since the leader that ends it began to lead, on that leader's clock. With it
//!   go the keys that hang on it, and the scopes that it owns.
//! - Scopes: no two owners hold conflicting paths, and a takeover's fence is the revision of the takeover.
//! - Commands: each does, and answers, what the contract says, to the last number ([`super::model`]).
//! - Lost disks: a peer that comes back on an empty disk under its old id takes no part: it gets no entry and no state, and
//!   leads nothing.
//!
//! All about commands look at them as they are applied for the first time, and keep account of leases, scopes and requests by
//! themselves, from what commands ask for and are answered: they do not believe the state that they check.

use std::collections::{BTreeMap, BTreeSet};

use lake_proto::coordination::{LeaseId, ScopeOwner, SessionId};

/// A promise that was broken, and by what.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {what}")]
pub struct Broken {
    pub invariant: &'static str,
    pub what: String,
}

/// The first finding.
pub fn broken<T>(invariant: &'static str, what: String) -> Result<T, Broken> {
    Err(Broken { invariant, what })
}

/// Something that was seen of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// It starts, with what is on its disk.
    Started {
        peer: u64,
    },
    /// It believes to lead.
    Leads {
        peer: u64,
        term: u64,
    },
    /// Its disk says whom it follows: `leader` is known to have won the term.
    Follows {
        peer: u64,
        term: u64,
        leader: u64,
    },
    /// An entry is durable in its log, behind the one before it.
    Appended {
        peer: u64,
        index: u64,
        term: u64,
        entry: u64,
    },
    /// Its log ends with this index, or is empty.
    Truncated {
        peer: u64,
        last: Option<u64>,
    },
    Purged {
        peer: u64,
        upto: u64,
    },
    Applied {
        peer: u64,
        applied: Applied,
    },
    /// Its state is that of a snapshot.
    Installed {
        peer: u64,
        index: u64,
        state: u128,
    },
    /// Its disk is gone.
    Lost {
        peer: u64,
    },
    /// It is the first to have applied an entry, and has done something else than the contract says ([`super::model`]).
    Differs {
        peer: u64,
        index: u64,
        what: String,
    },
}

impl Seen {
    fn peer(&self) -> u64 {
        match *self {
            Seen::Started { peer }
            | Seen::Leads { peer, .. }
            | Seen::Follows { peer, .. }
            | Seen::Appended { peer, .. }
            | Seen::Truncated { peer, .. }
            | Seen::Purged { peer, .. }
            | Seen::Applied { peer, .. }
            | Seen::Installed { peer, .. }
            | Seen::Lost { peer }
            | Seen::Differs { peer, .. } => peer,
        }
    }
}

/// An entry that was applied, and what came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    pub index: u64,
    pub term: u64,
    /// A hash of the entry's contents.
    pub entry: u64,
    /// A hash of the state behind it, and its revision.
    pub state: u128,
    pub revision: u64,
    /// Which request of which session it is.
    pub stamp: Option<(SessionId, u64)>,
    pub refused: bool,
    pub effects: Vec<Effect>,
}

/// What a command did, as its answer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    LeaseBegan {
        lease: LeaseId,
        ttl_ms: u64,
    },
    LeaseEnded(LeaseId),
    /// The leader ended it: nobody kept it alive.
    LeaseExpired(LeaseId),
    /// The lease has just ended, and this key hangs on it still, or it owns this scope.
    LeftBehind {
        lease: LeaseId,
        what: String,
    },
    /// A transaction went through that asked for this lease to be alive.
    UnderLease(LeaseId),
    Acquired {
        path: String,
        owner: ScopeOwner,
        fence: u64,
    },
    Released {
        path: String,
        owner: ScopeOwner,
    },
}

/// Everything that was seen so far, as far as later things are judged by it.
#[derive(Debug, Default)]
pub struct Invariants {
    leaders: BTreeMap<u64, u64>,
    /// Of every entry that any log ever had, by index and term: a hash, and the term of the entry before it.
    entries: BTreeMap<(u64, u64), (u64, Option<u64>)>,
    /// By peer: the term at each index of its log.
    logs: BTreeMap<u64, BTreeMap<u64, u64>>,
    /// Term and hash of what was applied at an index.
    committed: BTreeMap<u64, (u64, u64)>,
    states: BTreeMap<u64, u128>,
    /// By peer: the index that it must apply next.
    next: BTreeMap<u64, u64>,
    lost: BTreeSet<u64>,
    account: Account,
}

/// What the peers' clocks show, in milliseconds.
type Clocks = BTreeMap<u64, u64>;

#[derive(Debug)]
struct Granted {
    ttl_ms: u64,
    at: Clocks,
}

/// What the commands that were applied amount to.
#[derive(Debug, Default)]
struct Account {
    revision: u64,
    had_effect: BTreeSet<(SessionId, u64)>,
    leases: BTreeMap<LeaseId, Granted>,
    clocks: Clocks,
    /// A step before: of what was seen now it is only known that it came after that.
    clocks_before: Clocks,
    /// Who leads a term, and what its clock showed when that was seen first.
    leading: BTreeMap<u64, (u64, u64)>,
    scopes: BTreeMap<String, (ScopeOwner, u64)>,
}

impl Invariants {
    /// How many entries were applied.
    pub fn applied(&self) -> u64 {
        self.committed.len() as u64
    }

    /// What is seen from now on has happened since this was last called; the peers' clocks show this now, in milliseconds.
    pub fn at(&mut self, clocks: BTreeMap<u64, u64>) {
        self.account.clocks_before = std::mem::replace(&mut self.account.clocks, clocks);
    }

    /// Takes in one more thing.
    ///
    /// # Errors
    /// The promise that it breaks.
    pub fn see(&mut self, seen: &Seen) -> Result<(), Broken> {
        let peer = seen.peer();
        if self.lost.contains(&peer) && !matches!(seen, Seen::Started { .. } | Seen::Lost { .. }) {
            return broken("lost disks", format!("peer {peer} has lost its disk, and takes part: {seen:?}"));
        }
        match *seen {
            Seen::Lost { peer } => {
                self.lost.insert(peer);
                Ok(())
            }
            Seen::Leads { peer, term } => {
                let shows = self.account.clocks_before.get(&peer).copied().unwrap_or_default();
                self.account.leading.entry(term).or_insert((peer, shows));
                self.leads(term, peer)
            }
            Seen::Started { peer } => {
                self.next.insert(peer, 0);
                Ok(())
            }
            Seen::Follows { term, leader, .. } => self.leads(term, leader),
            Seen::Appended { peer, index, term, entry } => self.appended(peer, index, term, entry),
            Seen::Truncated { peer, last } => {
                self.logs.entry(peer).or_default().split_off(&last.map_or(0, |last| last + 1));
                Ok(())
            }
            Seen::Purged { peer, upto } => {
                let log = self.logs.entry(peer).or_default();
                *log = log.split_off(&(upto + 1));
                Ok(())
            }
            Seen::Applied { peer, ref applied } => self.was_applied(peer, applied),
            Seen::Installed { peer, index, state } => {
                let next = self.next.insert(peer, index + 1).unwrap_or(0);
                if next > index + 1 {
                    let what = format!("a snapshot at {index} takes peer {peer} back from entry {}", next - 1);
                    return broken("state", what);
                }
                self.has_state(peer, index, state)
            }
            Seen::Differs { peer, index, ref what } => {
                broken("commands", format!("with entry {index} applied by peer {peer}, {what}"))
            }
        }
    }

    fn leads(&mut self, term: u64, leader: u64) -> Result<(), Broken> {
        let first = *self.leaders.entry(term).or_insert(leader);
        if first != leader {
            return broken("election safety", format!("both peer {first} and peer {leader} lead term {term}"));
        }
        Ok(())
    }

    fn appended(&mut self, peer: u64, index: u64, term: u64, entry: u64) -> Result<(), Broken> {
        let log = self.logs.entry(peer).or_default();
        let before = index.checked_sub(1).and_then(|before| log.get(&before).copied());
        log.insert(index, term);
        let (known, known_before) = self.entries.entry((index, term)).or_insert((entry, before));
        if *known != entry {
            let what = format!("peer {peer} has another entry {index} of term {term} than a peer before it");
            return broken("log matching", what);
        }
        match (*known_before, before) {
            (Some(one), Some(other)) if one != other => {
                let what = format!(
                    "before entry {index} of term {term}, peer {peer} has an entry of term {other}, and a peer before it \
                     one of term {one}"
                );
                broken("log matching", what)
            }
            (None, Some(_)) => {
                *known_before = before;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn was_applied(&mut self, peer: u64, applied: &Applied) -> Result<(), Broken> {
        let Applied { index, term, entry, state, .. } = *applied;
        let next = self.next.entry(peer).or_insert(0);
        if *next != index {
            return broken("committed", format!("peer {peer} applies entry {index} when entry {next} is next"));
        }
        *next = index + 1;
        let first = !self.committed.contains_key(&index);
        let (known_term, known) = *self.committed.entry(index).or_insert((term, entry));
        if (known_term, known) != (term, entry) {
            let what = format!(
                "peer {peer} applies an entry {index} of term {term}; a peer before it applied another one there, of term \
                 {known_term}"
            );
            return broken("committed", what);
        }
        self.has_state(peer, index, state)?;
        if first { self.account.take(applied) } else { Ok(()) }
    }

    fn has_state(&mut self, peer: u64, index: u64, state: u128) -> Result<(), Broken> {
        let known = *self.states.entry(index).or_insert(state);
        if known != state {
            let what = format!("with entry {index} applied, peer {peer} has another state than a peer before it");
            return broken("state", what);
        }
        Ok(())
    }
}

impl Account {
    fn take(&mut self, applied: &Applied) -> Result<(), Broken> {
        let (before, after, index) = (self.revision, applied.revision, applied.index);
        if after < before || after > before + 1 {
            return broken("revisions", format!("entry {index} takes the revision from {before} to {after}"));
        }
        self.revision = after;
        if let Some(stamp) = applied.stamp
            && !applied.refused
            && !self.had_effect.insert(stamp)
        {
            let (session, sequence) = stamp;
            if after != before {
                let what = format!("request {sequence} of session {session} has an effect once more, in entry {index}");
                return broken("exactly once", what);
            }
            // Its answer is the first one's.
            return Ok(());
        }
        applied.effects.iter().try_for_each(|effect| self.note(effect, applied))
    }

    fn ended(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
        self.scopes.retain(|_, (owner, _)| *owner != ScopeOwner::Lease(lease));
    }

    /// Whether the leader waited for long enough, on its clock.
    fn expired(&self, lease: LeaseId, applied: &Applied) -> Result<(), Broken> {
        // One that has ended already, and a leader that was never seen to lead: what it did was seen too late to be timed.
        let Some(Granted { ttl_ms, at }) = self.leases.get(&lease) else { return Ok(()) };
        let Some((leader, began)) = self.leading.get(&applied.term) else { return Ok(()) };
        let Some(now) = self.clocks.get(leader) else { return Ok(()) };
        let granted = at.get(leader).copied().unwrap_or_default();
        let silent = now.saturating_sub(granted.max(*began));
        if silent < *ttl_ms {
            let what = format!(
                "entry {} ends lease {lease} after {silent} ms of peer {leader}'s leading and the lease's {ttl_ms} ms",
                applied.index
            );
            return broken("leases", what);
        }
        Ok(())
    }

    fn note(&mut self, effect: &Effect, applied: &Applied) -> Result<(), Broken> {
        let index = applied.index;
        match effect {
            Effect::LeaseBegan { lease, ttl_ms } => {
                let granted = Granted { ttl_ms: *ttl_ms, at: self.clocks_before.clone() };
                if *lease != applied.revision || self.leases.insert(*lease, granted).is_some() {
                    let what = format!("entry {index} grants lease {lease} at revision {}", applied.revision);
                    return broken("leases", what);
                }
            }
            Effect::LeaseEnded(lease) => self.ended(*lease),
            Effect::LeaseExpired(lease) => {
                self.expired(*lease, applied)?;
                self.ended(*lease);
            }
            Effect::LeftBehind { lease, what } => {
                return broken("leases", format!("entry {index} ends lease {lease}, and leaves {what} behind"));
            }
            Effect::UnderLease(lease) if !self.leases.contains_key(lease) => {
                return broken("leases", format!("entry {index} goes through under lease {lease}, which is over"));
            }
            Effect::UnderLease(_) => {}
            Effect::Acquired { path, owner, fence } => {
                let other = self.scopes.iter().find(|(held, (holder, _))| conflict(held, path) && holder != owner);
                if let Some((held, (holder, _))) = other {
                    let what = format!("entry {index} gives {path} to {owner:?} while {holder:?} holds {held}");
                    return broken("scopes", what);
                }
                let expected = self.scopes.get(path).map_or(applied.revision, |(_, fence)| *fence);
                if *fence != expected {
                    let what = format!("entry {index} gives {path} out with fence {fence}, not {expected}");
                    return broken("scopes", what);
                }
                self.scopes.insert(path.clone(), (owner.clone(), *fence));
            }
            Effect::Released { path, owner } => {
                if self.scopes.get(path).is_some_and(|(holder, _)| holder == owner) {
                    self.scopes.remove(path);
                }
            }
        }
        Ok(())
    }
}

/// Whether one path is the other, or lies above it.
fn conflict(one: &str, other: &str) -> bool {
    let above = |a: &str, b: &str| b.strip_prefix(a).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    above(one, other) || above(other, one)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The invariant that the last of these breaks; none before it may.
    #[track_caller]
    fn breaks(seen: Vec<Seen>) -> &'static str {
        let mut invariants = Invariants::default();
        let (last, sound) = seen.split_last().unwrap();
        for seen in sound {
            invariants.see(seen).unwrap();
        }
        invariants.see(last).unwrap_err().invariant
    }

    fn holds(seen: Vec<Seen>) {
        let mut invariants = Invariants::default();
        seen.iter().for_each(|seen| invariants.see(seen).unwrap());
    }

    fn entry(index: u64, term: u64) -> Applied {
        Applied { index, term, entry: 10 * index + term, state: u128::from(index), ..Applied::default() }
    }

    fn applied(peer: u64, applied: Applied) -> Seen {
        Seen::Applied { peer, applied }
    }

    /// Applied by peer 1, one after the other, each with a revision of its own.
    fn commands(effects: Vec<Vec<Effect>>) -> Vec<Seen> {
        let command = |(index, effects)| {
            let index = index as u64;
            applied(1, Applied { revision: index + 1, effects, ..entry(index, 1) })
        };
        effects.into_iter().enumerate().map(command).collect()
    }

    fn began(lease: LeaseId) -> Effect {
        Effect::LeaseBegan { lease, ttl_ms: 1000 }
    }

    #[test]
    fn a_lease_lives_for_its_time_on_the_clock_of_the_leader_that_ends_it() {
        let expires = |ahead_ms: u64, granted_at: u64, leads_at: u64, expires_at: u64| {
            let mut invariants = Invariants::default();
            let mut at = |ms: u64, seen: Seen| {
                for ms in [ms, ms] {
                    invariants.at(BTreeMap::from([(1, ms), (2, ms + ahead_ms * ms / 1000)]));
                }
                invariants.see(&seen).err().map(|broken| broken.invariant)
            };
            let command = |index, term, effect| {
                applied(1, Applied { revision: index + 1, effects: vec![effect], ..entry(index, term) })
            };
            assert_eq!(at(granted_at, command(0, 1, began(1))), None);
            assert_eq!(at(leads_at, Seen::Leads { peer: 2, term: 2 }), None);
            at(expires_at, command(1, 2, Effect::LeaseExpired(1)))
        };
        assert_eq!(expires(0, 100, 100, 1100), None);
        assert_eq!(expires(0, 100, 100, 1099), Some("leases"));
        assert_eq!(expires(0, 100, 700, 1500), Some("leases"), "a new leader counts anew");
        assert_eq!(expires(0, 100, 700, 1700), None);
        assert_eq!(expires(1000, 100, 100, 600), None, "its clock goes twice as fast");
        assert_eq!(expires(1000, 100, 100, 590), Some("leases"));
    }

    #[test]
    fn a_lease_takes_its_keys_along() {
        let left = Effect::LeftBehind { lease: 1, what: "/kv/a".into() };
        holds(commands(vec![vec![began(1)], vec![Effect::LeaseEnded(1)]]));
        assert_eq!(breaks(commands(vec![vec![began(1)], vec![Effect::LeaseEnded(1), left]])), "leases");
    }

    #[test]
    fn a_command_does_what_the_contract_says() {
        let differs = Seen::Differs { peer: 2, index: 7, what: "it answers 3, and not 4".to_owned() };
        assert_eq!(breaks(vec![differs]), "commands");
    }

    #[test]
    fn a_peer_that_lost_its_disk_takes_no_part() {
        let appended = Seen::Appended { peer: 2, index: 0, term: 1, entry: 1 };
        holds(vec![appended.clone(), Seen::Lost { peer: 2 }, Seen::Started { peer: 2 }]);
        assert_eq!(breaks(vec![Seen::Lost { peer: 2 }, Seen::Started { peer: 2 }, appended]), "lost disks");
        assert_eq!(breaks(vec![Seen::Lost { peer: 2 }, Seen::Leads { peer: 2, term: 4 }]), "lost disks");
    }

    #[test]
    fn a_snapshot_takes_no_running_peer_back() {
        let installed = |index| Seen::Installed { peer: 1, index, state: u128::from(index) };
        holds(vec![installed(4), installed(4), installed(9), Seen::Started { peer: 1 }, installed(4)]);
        assert_eq!(breaks(vec![installed(9), installed(4)]), "state");
    }

    #[test]
    fn a_term_has_one_leader() {
        let leads = |peer, term| Seen::Leads { peer, term };
        holds(vec![leads(1, 1), leads(2, 2), leads(1, 3), Seen::Follows { peer: 2, term: 3, leader: 1 }, leads(1, 1)]);
        assert_eq!(breaks(vec![leads(1, 1), leads(2, 1)]), "election safety");
        assert_eq!(breaks(vec![leads(1, 4), Seen::Follows { peer: 3, term: 4, leader: 2 }]), "election safety");
    }

    #[test]
    fn logs_that_share_an_entry_share_all_before_it() {
        let appended = |peer, index, term| Seen::Appended { peer, index, term, entry: 10 * index + term };
        let log = |peer| vec![appended(peer, 0, 1), appended(peer, 1, 1), appended(peer, 2, 3)];
        holds([log(1), log(2)].concat());
        let other = vec![appended(2, 0, 1), appended(2, 1, 2), appended(2, 2, 3)];
        assert_eq!(breaks([log(1), other].concat()), "log matching");
        let changed = vec![appended(2, 0, 1), Seen::Appended { peer: 2, index: 1, term: 1, entry: 99 }];
        assert_eq!(breaks([log(1), changed].concat()), "log matching");
        // What was truncated is no part of a log any more; what was purged is not known any more.
        let truncated = vec![appended(2, 0, 1), appended(2, 1, 2), Seen::Truncated { peer: 2, last: Some(0) }];
        holds([log(1), truncated, vec![appended(2, 1, 1), appended(2, 2, 3)]].concat());
        let purged = vec![appended(2, 0, 1), appended(2, 1, 2), Seen::Purged { peer: 2, upto: 1 }, appended(2, 2, 3)];
        holds([log(1), purged].concat());
    }

    #[test]
    fn what_was_applied_stays_and_comes_in_order() {
        holds(vec![applied(1, entry(0, 1)), applied(2, entry(0, 1)), applied(2, entry(1, 2)), applied(1, entry(1, 2))]);
        assert_eq!(breaks(vec![applied(1, entry(0, 1)), applied(2, entry(0, 2))]), "committed");
        let other = Applied { entry: 99, ..entry(0, 1) };
        assert_eq!(breaks(vec![applied(1, entry(0, 1)), applied(2, other)]), "committed");
        assert_eq!(breaks(vec![applied(1, entry(0, 1)), applied(1, entry(2, 1))]), "committed");
        assert_eq!(breaks(vec![applied(1, entry(0, 1)), applied(1, entry(0, 1))]), "committed");
        holds(vec![applied(1, entry(0, 1)), Seen::Started { peer: 1 }, applied(1, entry(0, 1))]);
    }

    #[test]
    fn the_same_entries_make_the_same_state() {
        let other = Applied { state: 77, ..entry(0, 1) };
        assert_eq!(breaks(vec![applied(1, entry(0, 1)), applied(2, other)]), "state");
        let installed = |state| Seen::Installed { peer: 2, index: 1, state };
        let two = vec![applied(1, entry(0, 1)), applied(1, entry(1, 1))];
        holds([two.clone(), vec![installed(1), applied(2, entry(2, 1))]].concat());
        assert_eq!(breaks([two, vec![installed(2)]].concat()), "state");
    }

    #[test]
    fn a_command_raises_the_revision_by_one_at_most() {
        let at = |index, revision| applied(1, Applied { revision, ..entry(index, 1) });
        holds(vec![at(0, 1), at(1, 1), at(2, 2)]);
        assert_eq!(breaks(vec![at(0, 1), at(1, 3)]), "revisions");
        assert_eq!(breaks(vec![at(0, 1), at(1, 0)]), "revisions");
    }

    #[test]
    fn a_request_has_its_effect_once() {
        let request = |index, revision, sequence, refused| {
            applied(1, Applied { revision, stamp: Some((7, sequence)), refused, ..entry(index, 1) })
        };
        holds(vec![request(0, 1, 1, false), request(1, 1, 1, false), request(2, 2, 2, false)]);
        holds(vec![request(0, 0, 1, true), request(1, 1, 1, false), request(2, 1, 1, false)]);
        assert_eq!(breaks(vec![request(0, 1, 1, false), request(1, 2, 1, false)]), "exactly once");
    }

    #[test]
    fn nothing_goes_through_under_a_lease_that_is_over() {
        let under = Effect::UnderLease(1);
        holds(commands(vec![vec![began(1)], vec![under.clone()], vec![Effect::LeaseEnded(1)]]));
        let late = vec![vec![began(1)], vec![Effect::LeaseEnded(1)], vec![under.clone()]];
        assert_eq!(breaks(commands(late)), "leases");
        assert_eq!(breaks(commands(vec![vec![under]])), "leases");
        assert_eq!(breaks(commands(vec![vec![began(5)]])), "leases", "an id is the revision");
    }

    #[test]
    fn conflicting_scopes_have_one_owner_and_fences_rise() {
        let acquired = |path: &str, lease, fence| {
            vec![Effect::Acquired { path: path.to_owned(), owner: ScopeOwner::Lease(lease), fence }]
        };
        let released =
            |path: &str, lease| vec![Effect::Released { path: path.to_owned(), owner: ScopeOwner::Lease(lease) }];
        holds(commands(vec![acquired("/a/b", 1, 1), acquired("/a/bc", 2, 2), acquired("/a/b", 1, 1)]));
        holds(commands(vec![acquired("/a", 1, 1), released("/a", 1), acquired("/a/b", 2, 3)]));
        holds(commands(vec![acquired("/a", 1, 1), vec![Effect::LeaseEnded(1)], acquired("/a/b", 2, 3)]));
        for other in ["/a", "/a/b", "/a/b/c"] {
            assert_eq!(breaks(commands(vec![acquired("/a/b", 1, 1), acquired(other, 2, 2)])), "scopes", "{other}");
        }
        let not_his = vec![acquired("/a", 1, 1), released("/a", 2), acquired("/a", 2, 3)];
        assert_eq!(breaks(commands(not_his)), "scopes");
        assert_eq!(breaks(commands(vec![acquired("/a", 1, 1), released("/a", 1), acquired("/a", 2, 1)])), "scopes");
    }
}
