//! What a new cluster begins with when it is made from an old one's state (semantics, section 10).
//!
//! Keys, values and their revisions stay, and so do quotas, the feature level, and scopes that procedures own. What somebody
//! had been promised by the old cluster ends: sessions; leases, with the keys that hang on them and the scopes they own, as
//! if they had expired. The old cluster may have gone on after this state, so that whatever it may have handed out since must
//! not be taken for the new one's: revisions go on [`REVISION_GAP`] above, and watches from before that are Compacted.

use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::Revision;

use super::State;
use super::restore::{Numbers, Part, StateBuilder};

/// How far the revision is raised: more than any cluster can have gone on by unnoticed.
pub const REVISION_GAP: Revision = 1_000_000_000;

/// What the new cluster does not take over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    pub sessions: usize,
    pub leases: usize,
    /// Keys that hung on leases.
    pub keys: usize,
    /// Scopes that leases owned.
    pub scopes: usize,
}

impl State {
    /// The state of a new cluster, which has no members yet.
    ///
    /// # Errors
    /// A state that no cluster can have come to, in words.
    pub fn reborn(&self) -> Result<(State, Dropped), &'static str> {
        let numbers = self.numbers();
        let revision = numbers.revision.checked_add(REVISION_GAP).ok_or("its revision is too high to be raised")?;
        let mut builder = StateBuilder::new(Numbers { revision, compacted: revision, ..numbers });
        let (leases, _, sessions) = self.counts();
        let mut dropped = Dropped { sessions, leases, ..Dropped::default() };
        for part in self.parts() {
            match part {
                Part::Entry(entry) if entry.lease.is_some() => dropped.keys += 1,
                Part::Scope(scope) if matches!(scope.owner, ScopeOwner::Lease(_)) => dropped.scopes += 1,
                kept @ (Part::Entry(_) | Part::Scope(_) | Part::Quota { .. }) => builder.add(kept)?,
                Part::Lease { .. } | Part::Session { .. } | Part::Event { .. } | Part::Peer { .. } => {}
            }
        }
        Ok((builder.build(), dropped))
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::coordination::Stamp;
    use lake_proto::kv::{Compare, Op, Txn};

    use super::*;
    use crate::state::command::{Action, Command, Outcome};

    fn granted(state: &mut State, action: Action) -> u64 {
        match state.apply(1, &action.unstamped()) {
            Outcome::Granted { id } => id,
            other => panic!("{other:?}"),
        }
    }

    fn scope(path: &str, owner: ScopeOwner) -> Txn {
        let when = vec![Compare::scope_free(path.to_owned(), Some(owner.clone()))];
        Txn { when, then: vec![Op::AcquireScope { path: path.to_owned(), owner }], ..Txn::default() }
    }

    #[test]
    fn keys_stay_and_promises_end() {
        let mut state = State::default();
        let lease = granted(&mut state, Action::GrantLease { ttl_ms: 1000, holder: "a".into() });
        let session = granted(&mut state, Action::OpenSession { ttl_ms: 1000, holder: "b".into() });
        state.run(1, &Txn { then: vec![Op::put("/kv/stays", "1")], ..Txn::default() });
        let leased = Op::put_leased("/kv/hangs", "2", lease);
        state.run(1, &Txn { when: vec![Compare::lease_alive(lease)], then: vec![leased], ..Txn::default() });
        state.run(1, &scope("/a", ScopeOwner::Lease(lease)));
        state.run(1, &scope("/b", ScopeOwner::Procedure("drop".into())));
        state.apply(1, &Action::SetQuota { prefix: "/kv/".into(), bytes: Some(100) }.unstamped());
        state.set_members([(1, "a"), (2, "b")]);
        let stamp = Some(Stamp { session, sequence: 1, lowest_unanswered: 1 });
        let txn = Txn { then: vec![Op::put("/kv/stamped", "3")], ..Txn::default() };
        state.apply(1, &Command { stamp, ..Action::Txn(txn).unstamped() });
        let before = state.clone();

        let (mut new, dropped) = state.reborn().unwrap();
        assert_eq!(state, before);
        assert_eq!(dropped, Dropped { sessions: 1, leases: 1, keys: 1, scopes: 1 });
        assert_eq!(new.revision(), before.revision() + REVISION_GAP);
        assert_eq!((new.get("/kv/stays"), new.get("/kv/hangs")), (before.get("/kv/stays"), None));
        assert_eq!(new.counts(), (0, 1, 0));
        assert_eq!(new.scopes("", "").map(|s| s.path).collect::<Vec<_>>(), ["/b"]);
        let kept = (new.get("/kv/stays").unwrap(), new.get("/kv/stamped").unwrap());
        let used = (kept.0.key.len() + kept.0.value.len() + kept.1.key.len() + kept.1.value.len()) as u64;
        let quota = new.quotas().find(|(prefix, _)| *prefix == "/kv/").unwrap().1;
        assert_eq!((quota.limit_bytes, quota.used_bytes), (100, used), "what hung on the lease no longer counts");
        assert_eq!(new.known_peers().count(), 0);
        assert_eq!(new.feature_level(), before.feature_level());
        for old in [1, before.revision(), before.revision() + 1, new.revision()] {
            assert!(new.changes().from(old).is_err(), "a watch from {old}");
        }
        assert_eq!(new.changes().from(new.revision() + 1).unwrap().count(), 0);

        // The next write comes right behind, and its revision was never handed out.
        let next = new.run(1, &Txn { then: vec![Op::put("/kv/next", "4")], ..Txn::default() });
        assert_eq!(next.revision, before.revision() + REVISION_GAP + 1);
        assert_eq!(new.changes().from(next.revision).unwrap().count(), 1);
        let zombie =
            Txn { when: vec![Compare::lease_alive(lease)], then: vec![Op::put("/kv/x", "")], ..Txn::default() };
        assert!(!new.run(1, &zombie).succeeded, "its lease is over");
    }

    #[test]
    fn the_hash_is_that_of_a_state_made_the_same_way() {
        let mut one = State::default();
        one.run(1, &Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() });
        let mut other = one.clone();
        granted(&mut other, Action::OpenSession { ttl_ms: 1000, holder: "b".into() });
        let (one, other) = (one.reborn().unwrap().0, other.reborn().unwrap().0);
        assert_ne!(one.digest(), other.digest(), "their revisions differ");
        assert_eq!(one.reborn().unwrap().0.digest(), one.reborn().unwrap().0.digest());
    }
}
