//! Property test: [`State`] against the plainest model that could be right.

use std::collections::BTreeMap;

use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Txn, TxnResult};
use proptest::prelude::*;

use super::State;

#[derive(Default, Clone)]
struct Model {
    map: BTreeMap<String, KeyValue>,
    revision: u64,
}

impl Model {
    fn under(&self, prefix: &str) -> Vec<KeyValue> {
        self.map.values().filter(|e| e.key.starts_with(prefix)).cloned().collect()
    }

    fn apply(&mut self, term: u64, txn: &Txn) -> TxnResult {
        let holds = |c: &Compare| {
            let e = self.map.get(&c.key);
            match &c.condition {
                Condition::Absent => e.is_none(),
                Condition::ModRevision(r) => e.is_some_and(|e| e.mod_revision == *r),
                Condition::CreateRevision(r) => e.is_some_and(|e| e.create_revision == *r),
                Condition::Version(v) => e.is_some_and(|e| e.version == *v),
                Condition::Value(v) => e.is_some_and(|e| e.value == *v),
                Condition::PrefixEmpty => self.under(&c.key).is_empty(),
                Condition::PrefixUnchangedSince(r) => self.under(&c.key).iter().all(|e| e.mod_revision <= *r),
                Condition::EntryTerm(t) => *t == term,
            }
        };
        let succeeded = txn.when.iter().all(holds);
        let mut observed = BTreeMap::new();
        if !succeeded {
            for c in &txn.when {
                let entries = match c.condition {
                    Condition::EntryTerm(_) => vec![],
                    Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => self.under(&c.key),
                    _ => self.map.get(&c.key).cloned().into_iter().collect(),
                };
                observed.extend(entries.into_iter().map(|e| (e.key.clone(), e)));
            }
        }
        let next = self.revision + 1;
        let mut changed = false;
        let mut results = vec![];
        for op in if succeeded { &txn.then } else { &txn.otherwise } {
            results.push(match op.clone() {
                Op::Put { key, value, return_previous } => {
                    changed = true;
                    let previous = self.map.get(&key).cloned();
                    let (version, create_revision) =
                        previous.as_ref().map_or((1, next), |p| (p.version + 1, p.create_revision));
                    let entry = KeyValue { key: key.clone(), value, version, create_revision, mod_revision: next };
                    self.map.insert(key, entry);
                    OpResult::Put { previous: previous.filter(|_| return_previous) }
                }
                Op::Delete { key, return_previous } => {
                    let previous = self.map.remove(&key);
                    changed |= previous.is_some();
                    OpResult::Delete { deleted: previous.is_some(), previous: previous.filter(|_| return_previous) }
                }
                Op::Get { key } => OpResult::Get { entry: self.map.get(&key).cloned() },
                Op::List { prefix, limit } => {
                    let all = self.under(&prefix);
                    let more = all.len() > limit as usize;
                    OpResult::List { entries: all.into_iter().take(limit as usize).collect(), more }
                }
            });
        }
        if changed {
            self.revision = next;
        }
        TxnResult { revision: self.revision, succeeded, results, observed: observed.into_values().collect() }
    }
}

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
            .prop_map(|(key, value, return_previous)| Op::Put { key, value: value.into(), return_previous }),
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
    fn the_state_does_what_the_model_does(txns in prop::collection::vec((0u64..3, txn()), 1..30)) {
        let mut state = State::default();
        let mut model = Model::default();
        for (term, txn) in txns {
            let before = state.clone();
            let held = before.iter().collect::<Vec<_>>();
            prop_assert_eq!(state.apply(term, &txn), model.apply(term, &txn));
            prop_assert_eq!(state.iter().collect::<Vec<_>>(), model.map.values().cloned().collect::<Vec<_>>());
            prop_assert_eq!(state.revision(), model.revision);
            let bytes: usize = model.map.values().map(|e| e.key.len() + e.value.len()).sum();
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
        prop_assert_eq!(paged, model.under("/kv/a"));
    }
}
