//! Property test: [`State`] against the reference of what a store does, lake-client's memory store.

use futures::executor::block_on;
use lake_client::clock;
use lake_client::memory::MemoryStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Condition, KeyValue, Op, Txn};
use proptest::prelude::*;

use super::State;

fn key() -> impl Strategy<Value = String> {
    "/kv/[ab]{0,2}".prop_map(String::from)
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 0..2)
}

fn condition() -> impl Strategy<Value = Condition> {
    prop_oneof![
        Just(Condition::Absent),
        (0u64..20).prop_map(Condition::ModRevision),
        (0u64..20).prop_map(Condition::CreateRevision),
        (0u64..4).prop_map(Condition::Version),
        value().prop_map(|v| Condition::Value(v.into())),
        Just(Condition::PrefixEmpty),
        (0u64..20).prop_map(Condition::PrefixUnchangedSince),
        (0u64..3).prop_map(Condition::EntryTerm),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (key(), value(), any::<bool>())
            .prop_map(|(key, value, return_previous)| Op::Put { key, value: value.into(), return_previous, lease: None }),
        2 => (key(), any::<bool>()).prop_map(|(key, return_previous)| Op::Delete { key, return_previous }),
        1 => key().prop_map(|key| Op::Get { key }),
        1 => (key(), 1u32..4).prop_map(|(prefix, limit)| Op::List { prefix, limit }),
    ]
}

fn txn() -> impl Strategy<Value = Txn> {
    (
        prop::collection::vec((key(), condition()).prop_map(|(key, condition)| Compare { key, condition }), 0..3),
        prop::collection::vec(op(), 0..4),
        prop::collection::vec(op(), 0..4),
    )
        .prop_map(|(when, then, otherwise)| Txn { when, then, otherwise })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn the_state_does_what_the_reference_does(txns in prop::collection::vec(txn(), 1..30)) {
        let mut state = State::default();
        let reference = MemoryStore::new();
        let under = |prefix: &str| -> (u64, Vec<KeyValue>) {
            let read = block_on(reference.list_all(prefix, ReadOptions::default(), clock::now())).unwrap();
            (read.revision, read.value)
        };
        for txn in txns {
            let before = state.clone();
            let held = before.iter().collect::<Vec<_>>();
            let expected = block_on(reference.commit(txn.clone(), clock::now())).unwrap().result;
            prop_assert_eq!(state.run(MemoryStore::TERM, &txn), expected);
            let (revision, entries) = under("");
            let bytes: usize = entries.iter().map(|e| e.key.len() + e.value.len()).sum();
            prop_assert_eq!(state.iter().collect::<Vec<_>>(), entries);
            prop_assert_eq!(state.revision(), revision);
            prop_assert_eq!(state.bytes(), bytes as u64);
            prop_assert_eq!(before.iter().collect::<Vec<_>>(), held, "a clone never changes");
        }
        let mut paged = vec![];
        let mut after: Option<String> = None;
        loop {
            let page = state.list("/kv/a", after.as_deref(), 2, usize::MAX);
            after = page.entries.last().map(|e| e.key.clone());
            paged.extend(page.entries);
            if !page.more { break }
        }
        prop_assert_eq!(paged, under("/kv/a").1);
    }
}
