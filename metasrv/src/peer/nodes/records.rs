//! The nodes' entries as they were read last. Every heartbeat and every look of the supervisor at all nodes asks for them, and they hardly ever
//! change: one is read again only where it was changed, which its revision says.
//!
//! Limits: as many as nodes are in the map, and those that were deleted since the last [`Records::forget`].

use std::collections::HashMap;
use std::sync::Arc;

use lake_client::nodes::{Record, key};
use lake_proto::kv::Revision;

use super::has_lease;
use crate::state::State;

/// What was read.
#[derive(Debug, Default)]
pub struct Records {
    by_node: HashMap<String, (Revision, Arc<Record>)>,
}

impl Records {
    /// The record of a node in a state, and the epoch of its process. A lease that does not live, or was granted to somebody else (the
    /// entry may have been brought here from another cluster), is none: 0.
    pub fn of(&mut self, state: &State, node: &str) -> Option<(Arc<Record>, Revision)> {
        let (mut record, changed) = self.read(state, node)?;
        let epoch = record.epoch(changed);
        if record.lease != 0 && !has_lease(state, node, record.lease) {
            Arc::make_mut(&mut record).lease = 0;
        }
        Some((record, epoch))
    }

    fn read(&mut self, state: &State, node: &str) -> Option<(Arc<Record>, Revision)> {
        let key = key(node);
        let changed = state.mod_revision(&key)?;
        if let Some((_, record)) = self.by_node.get(node).filter(|(read, _)| *read == changed) {
            return Some((record.clone(), changed));
        }
        let record = Arc::new(Record::of(&state.get(&key)?)?);
        self.by_node.insert(node.to_owned(), (changed, record.clone()));
        Some((record, changed))
    }

    /// Forgets those of nodes that are in the map no more.
    pub fn forget(&mut self, state: &State) {
        self.by_node.retain(|node, _| state.mod_revision(&key(node)).is_some());
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.by_node.clear();
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use lake_proto::kv::{Op, Txn};
    use lake_proto::v1;

    use super::*;
    use crate::state::command::{Action, Outcome};

    fn put(state: &mut State, node: &str, value: impl Into<Bytes>) {
        let txn = Txn { then: vec![Op::put(key(node), value.into())], ..Txn::default() };
        assert!(state.run(1, &txn).succeeded);
    }

    #[test]
    fn what_is_told_of_a_node_is_what_the_state_says() {
        let (mut state, mut records) = (State::default(), Records::default());
        assert!(records.of(&state, "n").is_none());
        let grant = |holder: &str| Action::GrantLease { ttl_ms: 1000, holder: holder.to_owned() }.unstamped();
        let granted = |outcome| if let Outcome::Granted { id } = outcome { id } else { panic!("{outcome:?}") };
        let lease = granted(state.apply(1, &grant("node n")));
        let entry = |process: &str, lease| Record::next(process, lease, &v1::NodeInfo::default(), None).to_bytes();
        put(&mut state, "n", entry("a", lease));
        let earlier = state.clone();
        let (first, epoch) = records.of(&state, "n").unwrap();
        assert_eq!((first.process.as_str(), first.lease, epoch), ("a", lease, state.revision()));
        let (again, _) = records.of(&state, "n").unwrap();
        assert!(Arc::ptr_eq(&first, &again), "it was not changed, and is not read again");

        put(&mut state, "n", entry("b", lease));
        let told = |records: &mut Records, state: &State| {
            let (record, epoch) = records.of(state, "n").unwrap();
            (record.process.clone(), record.lease, epoch)
        };
        let now = ("b".to_owned(), lease, state.revision());
        assert_eq!(told(&mut records, &state), now);
        assert_eq!(told(&mut records, &earlier), ("a".to_owned(), lease, epoch), "a look at an earlier state");
        assert_eq!(told(&mut records, &state), now);
        state.apply(1, &Action::RevokeLease { lease }.unstamped());
        assert_eq!(
            told(&mut records, &state),
            ("b".to_owned(), 0, now.2),
            "the lease has ended, the entry is as it was"
        );

        let others = granted(state.apply(1, &grant("node m")));
        put(&mut state, "n", entry("c", others));
        assert_eq!(told(&mut records, &state).1, 0, "that lease is another node's");
        put(&mut state, "n", "no record");
        assert!(records.of(&state, "n").is_none());
        put(&mut state, "m", entry("d", others));
        assert!(records.of(&state, "m").is_some_and(|(record, _)| record.lease == others));
        assert!(state.run(1, &Txn { then: vec![Op::delete(key("m"))], ..Txn::default() }).succeeded);
        assert!(records.of(&state, "m").is_none());
        records.forget(&state);
        assert_eq!(records.by_node.keys().collect::<Vec<_>>(), ["n"]);
    }
}
