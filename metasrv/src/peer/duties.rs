//! What only the leader does (semantics, section 8): it ends leases and sessions that have been silent, raises the feature
//! level, warns of quotas that are nearly full, and looks after the shards ([`super::placement`]).
//!
//! ```text
//!   follows --- leads, and has applied everything before its own term's first entry ---> on duty (in that term)
//!      ^                                                                                    |  ^
//!      |                              no quorum within the leader's lease: proposes nothing +--+
//!      +------------------------------ no longer leads that term ---------------------------+
//! ```
//!
//! One task per member, which ends with it. It counts silence with [`Countdowns`]; commands of [`super::coordination`] and
//! keep-alives tell those at once what began, spoke or ended, and the task adds whatever else was granted since it last
//! looked. An expiry names the term: the state machine ignores it in an entry of another one.
//!
//! Limits: [`MAX_UNDER_WAY`] proposals at a time, of at most 1,000 ids each.
//! Failure cases: a proposal that fails, or of which nobody knows, is made again after [`PROPOSE_AGAIN`]; ending what is
//! gone changes nothing. Time without a quorum counts as a late look: see [`Countdowns`].

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use lake_client::clock;
use lake_proto::coordination::SessionId;
use lake_proto::kv::Revision;
use lake_proto::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::countdowns::{Countdowns, LONGEST_SLEEP};
use super::failure::Failure;
use super::ledger::{Ledger, Ledgers};
use super::member::Member;
use super::placement;
use super::shares::{Call, Caller};
use crate::log::lock;
use crate::state::command::{Action, Outcome};
use crate::state::{MAX_HANGING, State};

/// Proposals to end something that are under way at once.
const MAX_UNDER_WAY: usize = 4;
/// How long such a proposal may take.
const PROPOSAL: Duration = Duration::from_secs(5);
/// How long until a failed one is made again.
const PROPOSE_AGAIN: Duration = Duration::from_millis(200);
/// How long a new leader may take to apply what came before its term, until it tries again.
const BEGIN: Duration = Duration::from_secs(5);
/// How long the proposal of a feature level may take.
const AS_LONG_AS_IT_LEADS: Duration = Duration::from_secs(86_400);
/// How often feature levels and quotas are looked at.
const LOOK_AROUND: Duration = Duration::from_secs(1);
/// How long another peer may take to say which feature level it supports.
const ASK: Duration = Duration::from_millis(500);

/// What has a time to live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mortal {
    Lease,
    Session,
}

impl Mortal {
    /// The time to live, if it is alive.
    pub fn ttl(self, state: &State, id: Revision) -> Option<Duration> {
        let ttl_ms = match self {
            Mortal::Lease => state.lease_ttl(id),
            Mortal::Session => state.session_ttl(id),
        };
        ttl_ms.map(Duration::from_millis)
    }

    fn began_after(self, state: &State, after: Revision) -> Vec<(Revision, Duration)> {
        let in_time = |(id, ttl_ms)| (id, Duration::from_millis(ttl_ms));
        match self {
            Mortal::Lease => state.lease_ttls(after).map(in_time).collect(),
            Mortal::Session => state.session_ttls(after).map(in_time).collect(),
        }
    }

    /// How many scopes go with these.
    fn scopes_of(self, state: &State, ids: &[Revision]) -> usize {
        match self {
            Mortal::Lease => ids.iter().map(|id| state.lease_scopes(*id)).sum(),
            Mortal::Session => 0,
        }
    }

    /// Those that may end with one command, and the rest: not more goes with them than may go with one of them.
    fn at_once(self, state: &State, mut ids: Vec<Revision>) -> (Vec<Revision>, Vec<Revision>) {
        let mut hanging = 0;
        let fit = ids.iter().take_while(|id| {
            let more = match self {
                Mortal::Lease => state.lease_hanging(**id),
                Mortal::Session => 0,
            };
            let fits = hanging == 0 || hanging + more <= MAX_HANGING;
            hanging += more;
            fits
        });
        let fit = fit.count();
        let later = ids.split_off(fit);
        (ids, later)
    }

    fn expire(self, ids: Vec<Revision>, term: u64) -> Action {
        match self {
            Mortal::Lease => Action::ExpireLeases { leases: ids, term },
            Mortal::Session => Action::ExpireSessions { sessions: ids, term },
        }
    }
}

/// Where a member's duties and its services meet.
#[derive(Debug)]
pub struct Duties {
    leases: Mutex<Countdowns>,
    sessions: Mutex<Countdowns>,
    /// Who has what of what this leader knows.
    pub(super) ledgers: Ledgers,
    /// The term in which this peer is on duty; 0: it is not.
    term: watch::Sender<u64>,
}

impl Default for Duties {
    fn default() -> Self {
        let ledgers = Ledgers::default();
        Self { leases: Mutex::default(), sessions: Mutex::default(), ledgers, term: watch::Sender::new(0) }
    }
}

impl Duties {
    /// The countdowns of one kind. Not to be held for long, and never across an await.
    pub fn of(&self, kind: Mortal) -> &Mutex<Countdowns> {
        match kind {
            Mortal::Lease => &self.leases,
            Mortal::Session => &self.sessions,
        }
    }

    /// Who has what of one kind.
    pub(super) fn ledger(&self, kind: Mortal) -> &Ledger<Revision> {
        match kind {
            Mortal::Lease => &self.ledgers.leases,
            Mortal::Session => &self.ledgers.sessions,
        }
    }

    /// Something has ended: nothing counts for it any more.
    pub(super) fn ended(&self, kind: Mortal, id: Revision) {
        lock(self.of(kind)).ended(id);
        self.ledger(kind).ended(&id);
    }

    /// The term in which this peer is on duty, and every later one; 0: it is not.
    pub fn term(&self) -> watch::Receiver<u64> {
        self.term.subscribe()
    }

    /// A session's mutation that arrived at `arrived` was answered.
    pub fn session_spoke(&self, session: SessionId, arrived: Instant) {
        lock(&self.sessions).heard(session, arrived);
    }

    fn begin(&self, term: u64, state: &State) {
        let now = clock::now();
        // What was put down since this peer led last.
        self.ledgers.clear();
        for kind in [Mortal::Lease, Mortal::Session] {
            let alive = kind.began_after(state, 0);
            lock(self.of(kind)).lead(term, now, alive.into_iter());
        }
        self.term.send_replace(term);
    }

    fn end(&self) {
        self.term.send_replace(0);
        for kind in [Mortal::Lease, Mortal::Session] {
            lock(self.of(kind)).stop();
        }
        self.ledgers.clear();
    }
}

/// The task: does the duties whenever this peer leads, until it is cancelled.
pub(super) async fn run(member: Weak<Member>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = whenever_it_leads(&member) => {}
    }
    if let Some(member) = member.upgrade() {
        end(&member);
    }
}

fn end(member: &Member) {
    member.duties.end();
    member.nodes.stop();
}

/// Ends with the member, which is held for one look at a time.
async fn whenever_it_leads(member: &Weak<Member>) {
    while let Some(leading) = member.upgrade() {
        if let Some(term) = leading.view.confirmed_term()
            && let Some(seen) = begin(&leading, term).await
        {
            drop(leading);
            tracing::debug!(term, "on duty as the leader");
            let leads = Lead { term, seen, warned: HashSet::new(), looked_around: None }.run(member);
            tokio::select! {
                () = leads => {}
                () = placement::supervise(member, term) => {}
            }
            if let Some(member) = member.upgrade() {
                end(&member);
            }
        }
        tokio::time::sleep(LONGEST_SLEEP / 2).await;
    }
}

/// Goes on duty, once everything before the term's first entry is applied. Says from which revision on.
async fn begin(member: &Member, term: u64) -> Option<Revision> {
    let point = member.reads.next_round(&Caller::own()).await.ok()?;
    if point.term != term {
        return None;
    }
    let mut applied = member.published.subscribe();
    let caught_up = applied.wait_for(|applied| applied.last.is_some_and(|id| id.index >= point.index));
    let state = match tokio::time::timeout(BEGIN, caught_up).await {
        Ok(Ok(applied)) => applied.state.clone(),
        Ok(Err(_)) | Err(_) => return None,
    };
    // Before the term is told: whoever waits for it finds the registry ready.
    member.nodes.lead(term);
    member.duties.begin(term, &state);
    Some(state.revision())
}

/// One leadership.
struct Lead {
    term: u64,
    /// Whatever was granted up to this revision counts down.
    seen: Revision,
    /// The prefixes whose quotas have been warned of.
    warned: HashSet<String>,
    looked_around: Option<Instant>,
}

/// A chore that has come to its end.
enum Done {
    /// What, and how many scopes went with it.
    Expired(Mortal, Vec<Revision>, Result<usize, Failure>),
    LookedAtLevels,
}

type Chores = FuturesUnordered<BoxFuture<'static, Done>>;

impl Lead {
    async fn run(mut self, member: &Weak<Member>) {
        let mut chores = Chores::new();
        let mut raising = false;
        let mut next_look = clock::now();
        loop {
            let done = tokio::select! {
                () = tokio::time::sleep_until(next_look.into()) => None,
                Some(done) = chores.next() => Some(done),
            };
            let Some(member) = member.upgrade() else { return };
            match done {
                Some(Done::Expired(kind, ids, result)) => expired(&member, kind, &ids, result),
                Some(Done::LookedAtLevels) => raising = false,
                None => {}
            }
            let view = &member.view;
            if view.led_term() != Some(self.term) {
                return;
            }
            if view.confirmed_term() != Some(self.term) {
                next_look = clock::now() + LONGEST_SLEEP / 2;
                continue;
            }
            let now = clock::now();
            self.expire(&member, now, &mut chores);
            if self.looked_around.is_none_or(|at| now >= at + LOOK_AROUND) {
                self.looked_around = Some(now);
                let applied = member.published.current();
                self.warn_of_quotas(&applied.state);
                if !raising && applied.state.feature_level() < member.feature_level {
                    raising = true;
                    chores.push(Box::pin(raise_feature_level(member.clone(), self.term)));
                }
            }
            let next_of = |kind| lock(member.duties.of(kind)).next_look(now);
            next_look = next_of(Mortal::Lease).min(next_of(Mortal::Session));
        }
    }

    /// Proposes the end of whatever has been silent for too long.
    fn expire(&mut self, member: &Arc<Member>, now: Instant, chores: &mut Chores) {
        let applied = member.published.current();
        let state = &applied.state;
        for kind in [Mortal::Lease, Mortal::Session] {
            let began = kind.began_after(state, self.seen);
            let mut countdowns = lock(member.duties.of(kind));
            for (id, ttl) in began {
                countdowns.began(id, ttl, now);
            }
            while chores.len() < MAX_UNDER_WAY {
                let due = countdowns.due(now);
                if due.is_empty() {
                    break;
                }
                let (alive, gone): (Vec<_>, Vec<_>) = due.into_iter().partition(|id| kind.ttl(state, *id).is_some());
                for id in gone {
                    countdowns.ended(id);
                    member.duties.ledger(kind).ended(&id);
                }
                let (alive, later) = kind.at_once(state, alive);
                // They are due still.
                countdowns.again(&later, now);
                if !alive.is_empty() {
                    chores.push(Box::pin(propose_end(member.clone(), kind, alive, self.term)));
                }
            }
        }
        self.seen = self.seen.max(state.revision());
    }

    /// Each quota once, when it comes to be nearly full.
    fn warn_of_quotas(&mut self, state: &State) {
        let mut nearly_full = HashSet::new();
        for (prefix, quota) in state.quotas().filter(|(_, quota)| quota.is_nearly_full()) {
            nearly_full.insert(prefix.to_owned());
            if !self.warned.contains(prefix) {
                tracing::warn!(
                    prefix,
                    used_bytes = quota.used_bytes,
                    limit_bytes = quota.limit_bytes,
                    "a quota is nearly full: delete something, or raise it; once it is full, writes under the prefix are refused"
                );
            }
        }
        self.warned = nearly_full;
    }
}

/// What came of a proposal to end something.
fn expired(member: &Member, kind: Mortal, ids: &[Revision], result: Result<usize, Failure>) {
    match result {
        Ok(scopes) => {
            tracing::info!(?kind, count = ids.len(), first = ids.first(), "silent for too long: ended");
            let counters = &member.counters;
            counters.scopes_taken.add(scopes as u64);
            match kind {
                Mortal::Lease => counters.leases_expired.add(ids.len() as u64),
                Mortal::Session => counters.sessions_expired.add(ids.len() as u64),
            }
            ids.iter().for_each(|id| member.duties.ended(kind, *id));
        }
        Err(failure) => {
            tracing::debug!(?kind, count = ids.len(), "proposing an end again: {}", failure.message);
            lock(member.duties.of(kind)).again(ids, clock::now() + PROPOSE_AGAIN);
        }
    }
}

async fn propose_end(member: Arc<Member>, kind: Mortal, ids: Vec<Revision>, term: u64) -> Done {
    let scopes = kind.scopes_of(&member.published.current().state, &ids);
    let action = kind.expire(ids.clone(), term);
    let result = member.propose(action, None, &Call::own(clock::now() + PROPOSAL)).await;
    Done::Expired(kind, ids, result.map(|_| scopes))
}

/// Raises the feature level to what every member supports, if that is higher (semantics, section 1). A member that does
/// not answer keeps it where it is, and so does one that is being taken in.
async fn raise_feature_level(member: Arc<Member>, term: u64) -> Done {
    let Some(_turn) = member.changes.level_turn() else { return Done::LookedAtLevels };
    // Behind it, whoever was to be taken in before stands in the membership, also where the caller has given up.
    if member.reads.next_round(&Caller::own()).await.is_err() {
        return Done::LookedAtLevels;
    }
    let (voters, learners) = member.view.members();
    let others = voters.into_iter().chain(learners).filter(|other| other.id != member.identity.id);
    let supported = futures::future::join_all(others.map(|other| supported_by(&member, other))).await;
    let everybody = supported.into_iter().try_fold(member.feature_level, |lowest, level| Some(lowest.min(level?)));
    let in_force = member.published.current().state.feature_level();
    if let Some(level) = everybody.filter(|level| *level > in_force) {
        // The turn is not given up before it is known what became of it; an end of the leadership ends the waiting.
        match member
            .propose(Action::SetFeatureLevel { level, term }, None, &Call::own(clock::now() + AS_LONG_AS_IT_LEADS))
            .await
        {
            Ok(Outcome::Set { .. }) => {
                tracing::info!(from = in_force, to = level, "every member supports it: the feature level is raised")
            }
            Ok(_) => {
                tracing::info!(level, "raising the feature level: the members were asked in another term; asking again")
            }
            Err(failure) => tracing::warn!(level, "raising the feature level: {}; trying again", failure.message),
        }
    }
    Done::LookedAtLevels
}

/// The feature level that another member supports, if it answers as itself.
async fn supported_by(member: &Member, other: v1::Member) -> Option<u32> {
    let mut client = member.network.transport.client(other.id, &other.raft_address).ok()?;
    let answer = tokio::time::timeout(ASK, client.identity(v1::IdentityRequest {})).await.ok()?.ok()?.into_inner();
    (answer.incarnation == other.incarnation).then(|| answer.supported_feature_level.max(1))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::log::memory::MemoryDisk;
    use crate::peer::{Opened, Peer, Settings, founding};
    use crate::raft::network::Transport;
    use crate::raft::state_machine::{Applied, Observe};
    use crate::raft::types::{Answer, Entry};

    /// Holds up the applying of what comes behind an index.
    #[derive(Debug)]
    struct Gate {
        upto: AtomicU64,
    }

    impl Observe for Gate {
        fn applied(&self, entry: &Entry, _: &Answer, _: &State) {
            tokio::task::block_in_place(|| {
                while entry.log_id.index > self.upto.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }

        fn installed(&self, _: &Applied) {}
    }

    async fn until(what: &str, look: impl Fn() -> bool) {
        let patience = clock::now() + Duration::from_secs(30);
        while !look() {
            assert!(clock::now() < patience, "waited in vain for {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_leader_begins_its_duties_once_everything_before_its_term_is_applied() {
        let (dir, settings) = (tempfile::tempdir().unwrap(), Settings::default());
        let disk = MemoryDisk::new(1, "ab".repeat(16), 1, Duration::from_millis(2));
        let gate = Arc::new(Gate { upto: AtomicU64::new(u64::MAX) });
        let start = async || {
            let opened = Opened::in_memory(&disk, dir.path().to_owned(), &settings, gate.clone()).unwrap();
            let transport = Transport::new(HashMap::new(), None);
            Peer::start(opened, String::new(), String::new(), settings.clone(), transport).await.unwrap()
        };
        let peer = start().await;
        let member = founding::found_alone(&peer).await.unwrap();
        member.recovered().wait_for(|recovered| *recovered).await.unwrap();
        let call = &Call::own(clock::now() + Duration::from_secs(30));
        // Longer than a machine is busy with other things before the peer stops: it would end before that.
        let ttl = Duration::from_secs(4);
        let lease = member.grant_lease(4000, String::new(), None, call).await.unwrap();
        let granted = member.log.bounds().1.unwrap().index;
        // Something behind it, so that the lease itself is applied.
        member.propose(Action::SetQuota { prefix: "/kv/".into(), bytes: Some(1 << 20) }, None, call).await.unwrap();
        peer.shutdown().await;
        drop((member, peer));

        gate.upto.store(granted, Ordering::SeqCst);
        let peer = start().await;
        let member = peer.member().unwrap();
        until("it to lead", || member.view.confirmed_term().is_some()).await;
        let (leads_since, proposed) = (clock::now(), member.log.bounds().1);
        until("the lease's time to be over", || clock::since(leads_since) > ttl + ttl / 4).await;
        assert_eq!(*member.duties.term().borrow(), 0, "it is not on duty");
        assert_eq!(member.log.bounds().1, proposed, "it has proposed something");

        let opened = clock::now();
        gate.upto.store(u64::MAX, Ordering::SeqCst);
        until("its duties to begin", || *member.duties.term().borrow() != 0).await;
        until("the lease to end", || !member.published.current().state.has_lease(lease)).await;
        assert!(clock::since(opened) >= ttl, "it had its full time: {:?}", clock::since(opened));
        peer.shutdown().await;
    }
}
