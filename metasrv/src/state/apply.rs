//! Transactions: compares against the state as it was before, then one branch, all at one revision.
//!
//! Bounds on what an answer may hold are part of the function, since every peer must compute the same: the entries
//! observed by failed compares and those of list operations are cut at [`MAX_ANSWER_BYTES`] over the whole answer, and
//! lists say that there is more.

use std::collections::BTreeMap;
use std::sync::Arc;

use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Txn, TxnResult};
use lake_proto::limits::{MAX_PAGE_ENTRIES, MAX_TXN_BYTES};

use super::{Entry, MAX_LIST_BYTES, State, compact};

/// Observed and listed entries of one answer hold about this many bytes at most.
const MAX_ANSWER_BYTES: usize = MAX_TXN_BYTES;

impl State {
    /// Runs a transaction that a log entry of `term` carries.
    pub fn apply(&mut self, term: u64, txn: &Txn) -> TxnResult {
        let succeeded = txn.when.iter().all(|compare| self.holds(term, compare));
        let observed = if succeeded { Vec::new() } else { self.observe(&txn.when) };
        let ops = if succeeded { &txn.then } else { &txn.otherwise };

        let mut run = Run { next_revision: self.revision + 1, changed: false, bytes_left: MAX_ANSWER_BYTES };
        let results = ops.iter().map(|op| run.op(self, op)).collect();
        if run.changed {
            self.revision = run.next_revision;
        }
        TxnResult { revision: self.revision, succeeded, results, observed }
    }

    fn holds(&self, term: u64, compare: &Compare) -> bool {
        let entry = || self.entries.get(compare.key.as_str());
        match &compare.condition {
            Condition::Absent => entry().is_none(),
            Condition::ModRevision(r) => entry().is_some_and(|e| e.mod_revision == *r),
            Condition::CreateRevision(r) => entry().is_some_and(|e| e.create_revision == *r),
            Condition::Version(v) => entry().is_some_and(|e| e.version == *v),
            Condition::Value(v) => entry().is_some_and(|e| e.value == *v),
            Condition::PrefixEmpty => self.under(&compare.key, None).next().is_none(),
            Condition::PrefixUnchangedSince(r) => self.under(&compare.key, None).all(|(_, e)| e.mod_revision <= *r),
            Condition::EntryTerm(t) => *t == term,
        }
    }

    /// The entries that exist among those the compares name, each once, in key order.
    fn observe(&self, when: &[Compare]) -> Vec<KeyValue> {
        let mut seen: BTreeMap<&str, &Entry> = BTreeMap::new();
        let mut bytes = 0;
        for compare in when {
            match compare.condition {
                Condition::EntryTerm(_) => {}
                Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                    for (key, entry) in self.under(&compare.key, None).take(MAX_PAGE_ENTRIES) {
                        if bytes >= MAX_ANSWER_BYTES {
                            break;
                        }
                        if seen.insert(key, entry).is_none() {
                            bytes += key.len() + entry.value.len();
                        }
                    }
                }
                _ => {
                    if bytes < MAX_ANSWER_BYTES
                        && let Some((key, entry)) = self.entries.get_key_value(compare.key.as_str())
                        && seen.insert(key, entry).is_none()
                    {
                        bytes += key.len() + entry.value.len();
                    }
                }
            }
        }
        seen.into_iter().map(|(key, entry)| entry.key_value(key)).collect()
    }
}

/// One branch under way: each operation sees what those before it did.
struct Run {
    next_revision: u64,
    changed: bool,
    bytes_left: usize,
}

impl Run {
    fn op(&mut self, state: &mut State, op: &Op) -> OpResult {
        match op {
            Op::Put { key, value, return_previous } => {
                self.changed = true;
                let (shared_key, previous) = match state.entries.get_key_value(key.as_str()) {
                    Some((shared_key, entry)) => (shared_key.clone(), Some(entry.clone())),
                    None => (Arc::from(key.as_str()), None),
                };
                let entry = Entry {
                    value: compact(value),
                    version: previous.as_ref().map_or(1, |p| p.version + 1),
                    create_revision: previous.as_ref().map_or(self.next_revision, |p| p.create_revision),
                    mod_revision: self.next_revision,
                };
                state.insert(shared_key, entry);
                OpResult::Put { previous: previous.filter(|_| *return_previous).map(|p| p.key_value(key)) }
            }
            Op::Delete { key, return_previous } => {
                let previous = state.remove(key);
                let deleted = previous.is_some();
                self.changed |= deleted;
                let previous = previous.filter(|_| *return_previous).map(|p| p.key_value(key));
                OpResult::Delete { deleted, previous }
            }
            Op::Get { key } => OpResult::Get { entry: state.get(key) },
            Op::List { prefix, limit } => {
                let listing = state.list(prefix, None, *limit as usize, MAX_LIST_BYTES.min(self.bytes_left));
                let bytes: usize = listing.entries.iter().map(|e| e.key.len() + e.value.len()).sum();
                self.bytes_left = self.bytes_left.saturating_sub(bytes);
                OpResult::List { entries: listing.entries, more: listing.more }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::Expected;

    use super::*;

    fn put(key: &str, value: &'static str) -> Txn {
        Txn { then: vec![Op::put(key, value)], ..Txn::default() }
    }

    #[test]
    fn a_deleted_and_recreated_key_is_not_the_old_one() {
        let mut state = State::default();
        let first = state.apply(1, &Txn::cas("/lake/a", Expected::Absent, "1"));
        assert!(first.succeeded);
        assert!(state.apply(1, &Txn::cas_delete("/lake/a", first.revision)).succeeded);
        let second = state.apply(1, &Txn::cas("/lake/a", Expected::Absent, "1"));
        assert!(second.succeeded && second.revision > first.revision);
        let stale = state.apply(1, &Txn::cas("/lake/a", Expected::ModRevision(first.revision), "2"));
        assert!(!stale.succeeded);
        assert_eq!(stale.observed[0].mod_revision, second.revision);
        assert_eq!(stale.observed[0].version, 1, "a new life of the key starts again at version 1");
    }

    #[test]
    fn a_command_that_changes_nothing_raises_no_revision() {
        let mut state = State::default();
        state.apply(1, &put("/kv/a", "1"));
        assert_eq!(state.apply(1, &Txn { then: vec![Op::delete("/kv/none")], ..Txn::default() }).revision, 1);
        assert_eq!(state.apply(1, &Txn { then: vec![Op::Get { key: "/kv/a".into() }], ..Txn::default() }).revision, 1);
        assert_eq!(state.apply(1, &put("/kv/a", "1")).revision, 2, "a put is a change, also to the same value");
    }

    #[test]
    fn operations_see_those_before_them_and_share_one_revision() {
        let mut state = State::default();
        let result = state.apply(
            1,
            &Txn {
                then: vec![
                    Op::put("/kv/a", "1"),
                    Op::Put { key: "/kv/a".into(), value: "2".into(), return_previous: true },
                    Op::put("/kv/b", "3"),
                    Op::List { prefix: "/kv/".into(), limit: 1 },
                    Op::delete("/kv/b"),
                    Op::Get { key: "/kv/b".into() },
                ],
                ..Txn::default()
            },
        );
        assert_eq!(result.revision, 1);
        let OpResult::Put { previous: Some(previous) } = &result.results[1] else { panic!("{result:?}") };
        assert_eq!((&previous.value[..], previous.version, previous.mod_revision), (&b"1"[..], 1, 1));
        let OpResult::List { entries, more: true } = &result.results[3] else { panic!("{result:?}") };
        assert_eq!((entries.len(), &entries[0].value[..]), (1, &b"2"[..]));
        assert_eq!(result.results[4], OpResult::Delete { deleted: true, previous: None });
        assert_eq!(result.results[5], OpResult::Get { entry: None });
        assert_eq!(state.get("/kv/a").map(|e| (e.version, e.create_revision)), Some((2, 1)));
    }

    #[test]
    fn prefix_compares_and_the_entry_term() {
        let mut state = State::default();
        let when = |key: &str, condition| Txn {
            when: vec![Compare { key: key.into(), condition }],
            then: vec![Op::put("/kv/x", "x")],
            otherwise: vec![],
        };
        assert!(state.clone().apply(1, &when("/kv/t/", Condition::PrefixEmpty)).succeeded);
        state.apply(1, &put("/kv/t/a", "1"));
        state.apply(1, &put("/kv/tb", "1"));
        let failed = state.clone().apply(1, &when("/kv/t/", Condition::PrefixEmpty));
        assert!(!failed.succeeded);
        assert_eq!(failed.observed.len(), 1, "/kv/tb does not lie under /kv/t/");
        assert!(state.clone().apply(1, &when("/kv/t/", Condition::PrefixUnchangedSince(1))).succeeded);
        assert!(!state.clone().apply(1, &when("/kv/t", Condition::PrefixUnchangedSince(1))).succeeded);
        assert!(state.clone().apply(7, &when("", Condition::EntryTerm(7))).succeeded);
        assert!(!state.clone().apply(8, &when("", Condition::EntryTerm(7))).succeeded);
    }

    #[test]
    fn lists_in_a_transaction_are_bounded_in_bytes() {
        let mut state = State::default();
        for i in 0..20 {
            let big = vec![0u8; 1 << 20];
            state.apply(1, &Txn { then: vec![Op::put(format!("/kv/{i:02}"), big)], ..Txn::default() });
        }
        let lists = vec![Op::List { prefix: "/kv/".into(), limit: 1000 }; 20];
        let result = state.apply(1, &Txn { then: lists, ..Txn::default() });
        let held: usize = result
            .results
            .iter()
            .map(|r| match r {
                OpResult::List { entries, more: true } => entries.len(),
                other => panic!("every list must say that there is more: {other:?}"),
            })
            .sum();
        assert!((20..=28).contains(&held), "{held} entries of 1 MiB; one per list is always returned");
    }
}
