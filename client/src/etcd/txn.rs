//! Transactions and lists as etcd has them, and its answers as a store's.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use lake_proto::etcd as wire;
use lake_proto::etcd::compare::{CompareResult, CompareTarget, TargetUnion};
use lake_proto::etcd::request_op::Request as WireRequest;
use lake_proto::etcd::response_op::Response as WireResponse;
use lake_proto::kv::{Compare, Condition, Op, OpResult, Txn, TxnResult};
use lake_proto::limits::MAX_PAGE_ENTRIES;

use super::EtcdStore;
use super::answers::{entry, signed};
use crate::store::Error;

impl EtcdStore {
    /// etcd's compares for one of ours.
    pub(super) fn compare(&self, compare: &Compare) -> Result<Vec<wire::Compare>, Error> {
        let on = |key: Bytes, result: CompareResult, target: CompareTarget, value: TargetUnion| wire::Compare {
            result: result as i32,
            target: target as i32,
            key,
            target_union: Some(value),
            range_end: Bytes::new(),
        };
        let exists = |key: Bytes| on(key, CompareResult::Greater, CompareTarget::Version, TargetUnion::Version(0));
        let key = self.key(&compare.key);
        let equal = |target, value| vec![exists(key.clone()), on(key.clone(), CompareResult::Equal, target, value)];
        Ok(match &compare.condition {
            Condition::Absent => {
                vec![on(key, CompareResult::Equal, CompareTarget::Version, TargetUnion::Version(0))]
            }
            Condition::ModRevision(r) => equal(CompareTarget::Mod, TargetUnion::ModRevision(signed(*r))),
            Condition::CreateRevision(r) => equal(CompareTarget::Create, TargetUnion::CreateRevision(signed(*r))),
            Condition::Version(v) => equal(CompareTarget::Version, TargetUnion::Version(signed(*v))),
            Condition::Value(v) => equal(CompareTarget::Value, TargetUnion::Value(v.clone())),
            Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                let since = match compare.condition {
                    Condition::PrefixUnchangedSince(r) => signed(r.saturating_add(1)),
                    _ => 1,
                };
                let (from, range_end) = self.under(&compare.key);
                let less = on(from, CompareResult::Less, CompareTarget::Mod, TargetUnion::ModRevision(since));
                vec![wire::Compare { range_end, ..less }]
            }
            Condition::LeaseAlive(id) => vec![exists(self.lease_key(*id))],
            Condition::EntryTerm(_) | Condition::ScopeFree(_) => {
                let what = format!("etcd cannot tell {:?}", compare.condition);
                return Err(Error::cannot("running a transaction".to_owned(), &what));
            }
        })
    }

    pub(super) fn request(&self, op: &Op) -> Result<wire::RequestOp, Error> {
        let request = match op {
            Op::Put { key, value, return_previous, lease } => WireRequest::RequestPut(wire::PutRequest {
                key: self.key(key),
                value: value.clone(),
                lease: lease.map_or(0, signed),
                prev_kv: *return_previous,
            }),
            Op::Delete { key, return_previous } => WireRequest::RequestDeleteRange(wire::DeleteRangeRequest {
                key: self.key(key),
                range_end: Bytes::new(),
                prev_kv: *return_previous,
            }),
            Op::Get { key } => {
                WireRequest::RequestRange(wire::RangeRequest { key: self.key(key), ..Default::default() })
            }
            Op::List { prefix, limit } => WireRequest::RequestRange(self.list_request(prefix, i64::from(*limit))),
            Op::AcquireScope { .. } | Op::ReleaseScope { .. } => {
                return Err(Error::cannot("running a transaction".to_owned(), "etcd has no scopes"));
            }
        };
        Ok(wire::RequestOp { request: Some(request) })
    }

    pub(super) fn list_request(&self, prefix: &str, limit: i64) -> wire::RangeRequest {
        let (key, range_end) = self.under(prefix);
        wire::RangeRequest { key, range_end, limit, ..Default::default() }
    }

    /// What is read when a compare fails: what it looked at.
    pub(super) fn look(&self, compare: &Compare) -> Option<wire::RequestOp> {
        let range = match compare.condition {
            Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                self.list_request(&compare.key, MAX_PAGE_ENTRIES as i64)
            }
            Condition::EntryTerm(_) | Condition::LeaseAlive(_) | Condition::ScopeFree(_) => return None,
            _ => wire::RangeRequest { key: self.key(&compare.key), ..Default::default() },
        };
        Some(wire::RequestOp { request: Some(WireRequest::RequestRange(range)) })
    }

    fn op_result(&self, op: &Op, response: wire::ResponseOp) -> Result<OpResult, String> {
        let one = |found: Option<wire::KeyValue>| found.map(|found| entry(&self.root, found)).transpose();
        Ok(match (op, response.response.ok_or("an operation has no answer")?) {
            (Op::Put { .. }, WireResponse::ResponsePut(put)) => OpResult::Put { previous: one(put.prev_kv)? },
            (Op::Delete { .. }, WireResponse::ResponseDeleteRange(gone)) => {
                OpResult::Delete { deleted: gone.deleted > 0, previous: one(gone.prev_kvs.into_iter().next())? }
            }
            (Op::Get { .. }, WireResponse::ResponseRange(range)) => {
                OpResult::Get { entry: one(range.kvs.into_iter().next())? }
            }
            (Op::List { .. }, WireResponse::ResponseRange(range)) => {
                let entries = range.kvs.into_iter().map(|found| entry(&self.root, found)).collect::<Result<_, _>>()?;
                OpResult::List { entries, more: range.more }
            }
            _ => return Err("an operation's answer is of another kind".to_owned()),
        })
    }

    pub(super) fn result(&self, txn: &Txn, response: wire::TxnResponse) -> Result<TxnResult, String> {
        let revision = response.header.ok_or("the answer has no header")?.revision;
        let revision = u64::try_from(revision).map_err(|_| "the revision lies below 0")?;
        let branch = if response.succeeded { &txn.then } else { &txn.otherwise };
        let mut responses: VecDeque<_> = response.responses.into();
        let mut results = Vec::with_capacity(branch.len());
        for op in branch {
            results.push(self.op_result(op, responses.pop_front().ok_or("an operation has no answer")?)?);
        }
        let mut observed = BTreeMap::new();
        for looked_at in responses {
            let Some(WireResponse::ResponseRange(range)) = looked_at.response else {
                return Err("an operation's answer is of another kind".to_owned());
            };
            for found in range.kvs {
                let found = entry(&self.root, found)?;
                observed.insert(found.key.clone(), found);
            }
        }
        let observed = observed.into_values().collect();
        Ok(TxnResult { revision, succeeded: response.succeeded, results, observed, ..TxnResult::default() })
    }
}
