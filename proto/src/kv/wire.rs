//! To and from the wire.

use super::{Compare, Condition, Invalid, KeyValue, Op, OpResult, Reduced, Txn, TxnResult};
use crate::coordination::ScopeOwner;
use crate::v1;

impl From<KeyValue> for v1::KeyValue {
    fn from(e: KeyValue) -> Self {
        v1::KeyValue {
            key: e.key,
            value: e.value,
            version: e.version,
            create_revision: e.create_revision,
            mod_revision: e.mod_revision,
            lease: e.lease.unwrap_or(0),
        }
    }
}

impl From<v1::KeyValue> for KeyValue {
    fn from(e: v1::KeyValue) -> Self {
        KeyValue {
            key: e.key,
            value: e.value,
            version: e.version,
            create_revision: e.create_revision,
            mod_revision: e.mod_revision,
            lease: Some(e.lease).filter(|lease| *lease != 0),
        }
    }
}

impl From<Compare> for v1::Compare {
    fn from(c: Compare) -> Self {
        use v1::compare::Condition as Wire;
        let condition = match c.condition {
            Condition::Absent => Wire::Absent(true),
            Condition::ModRevision(r) => Wire::ModRevision(r),
            Condition::CreateRevision(r) => Wire::CreateRevision(r),
            Condition::Version(v) => Wire::Version(v),
            Condition::Value(v) => Wire::Value(v),
            Condition::PrefixEmpty => Wire::PrefixEmpty(true),
            Condition::PrefixUnchangedSince(r) => Wire::PrefixUnchangedSince(r),
            Condition::EntryTerm(t) => Wire::EntryTerm(t),
            Condition::LeaseAlive(lease) => Wire::LeaseAlive(lease),
            Condition::ScopeFree(owner) => Wire::ScopeFree(v1::ScopeFree { owner: owner.map(Into::into) }),
        };
        v1::Compare { key: c.key, condition: Some(condition) }
    }
}

impl TryFrom<v1::Compare> for Compare {
    type Error = Invalid;

    fn try_from(c: v1::Compare) -> Result<Self, Invalid> {
        use v1::compare::Condition as Wire;
        let condition = match c.condition.ok_or(Invalid::Missing("compare's condition"))? {
            Wire::Absent(true) => Condition::Absent,
            Wire::PrefixEmpty(true) => Condition::PrefixEmpty,
            Wire::Absent(false) | Wire::PrefixEmpty(false) => return Err(Invalid::Missing("compare's condition")),
            Wire::ModRevision(r) => Condition::ModRevision(r),
            Wire::CreateRevision(r) => Condition::CreateRevision(r),
            Wire::Version(v) => Condition::Version(v),
            Wire::Value(v) => Condition::Value(v),
            Wire::PrefixUnchangedSince(r) => Condition::PrefixUnchangedSince(r),
            Wire::EntryTerm(t) => Condition::EntryTerm(t),
            Wire::LeaseAlive(lease) => Condition::LeaseAlive(lease),
            Wire::ScopeFree(free) => Condition::ScopeFree(free.owner.map(TryInto::try_into).transpose()?),
        };
        Ok(Compare { key: c.key, condition })
    }
}

impl From<Op> for v1::Op {
    fn from(op: Op) -> Self {
        use v1::op::Op as Wire;
        let op = match op {
            Op::Put { key, value, return_previous, lease } => {
                Wire::Put(v1::op::Put { key, value, return_previous, lease: lease.unwrap_or(0) })
            }
            Op::Delete { key, return_previous } => Wire::Delete(v1::op::Delete { key, return_previous }),
            Op::Get { key } => Wire::Get(v1::op::Get { key }),
            Op::List { prefix, limit } => Wire::List(v1::op::List { prefix, limit }),
            Op::AcquireScope { path, owner } => {
                Wire::AcquireScope(v1::op::AcquireScope { path, owner: Some(owner.into()) })
            }
            Op::ReleaseScope { path, owner } => {
                Wire::ReleaseScope(v1::op::ReleaseScope { path, owner: Some(owner.into()) })
            }
        };
        v1::Op { op: Some(op) }
    }
}

impl TryFrom<v1::Op> for Op {
    type Error = Invalid;

    fn try_from(op: v1::Op) -> Result<Self, Invalid> {
        use v1::op::Op as Wire;
        Ok(match op.op.ok_or(Invalid::Missing("operation"))? {
            Wire::Put(p) => Op::Put {
                key: p.key,
                value: p.value,
                return_previous: p.return_previous,
                lease: Some(p.lease).filter(|lease| *lease != 0),
            },
            Wire::Delete(d) => Op::Delete { key: d.key, return_previous: d.return_previous },
            Wire::Get(g) => Op::Get { key: g.key },
            Wire::List(l) => Op::List { prefix: l.prefix, limit: l.limit },
            Wire::AcquireScope(a) => Op::AcquireScope { path: a.path, owner: ScopeOwner::required(a.owner)? },
            Wire::ReleaseScope(r) => Op::ReleaseScope { path: r.path, owner: ScopeOwner::required(r.owner)? },
        })
    }
}

impl From<Txn> for v1::Txn {
    fn from(t: Txn) -> Self {
        v1::Txn {
            when: t.when.into_iter().map(Into::into).collect(),
            then: t.then.into_iter().map(Into::into).collect(),
            otherwise: t.otherwise.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::Txn> for Txn {
    type Error = Invalid;

    /// Reads the structure only; limits are for [`Txn::validate`].
    fn try_from(t: v1::Txn) -> Result<Self, Invalid> {
        Ok(Txn {
            when: t.when.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            then: t.then.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            otherwise: t.otherwise.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
        })
    }
}

impl From<OpResult> for v1::OpResult {
    fn from(r: OpResult) -> Self {
        use v1::op_result::{self as wire, Result as Wire};
        let result = match r {
            OpResult::Put { previous } => Wire::Put(wire::Put { previous: previous.map(Into::into) }),
            OpResult::Delete { deleted, previous } => {
                Wire::Delete(wire::Delete { deleted, previous: previous.map(Into::into) })
            }
            OpResult::Get { entry } => Wire::Get(wire::Get { entry: entry.map(Into::into) }),
            OpResult::List { entries, more } => {
                Wire::List(wire::List { entries: entries.into_iter().map(Into::into).collect(), more })
            }
            OpResult::AcquireScope { fence } => Wire::AcquireScope(wire::AcquireScope { fence }),
            OpResult::ReleaseScope { released } => Wire::ReleaseScope(wire::ReleaseScope { released }),
        };
        v1::OpResult { result: Some(result) }
    }
}

impl TryFrom<v1::OpResult> for OpResult {
    type Error = Invalid;

    fn try_from(r: v1::OpResult) -> Result<Self, Invalid> {
        use v1::op_result::Result as Wire;
        Ok(match r.result.ok_or(Invalid::Missing("operation's result"))? {
            Wire::Put(p) => OpResult::Put { previous: p.previous.map(Into::into) },
            Wire::Delete(d) => OpResult::Delete { deleted: d.deleted, previous: d.previous.map(Into::into) },
            Wire::Get(g) => OpResult::Get { entry: g.entry.map(Into::into) },
            Wire::List(l) => OpResult::List { entries: l.entries.into_iter().map(Into::into).collect(), more: l.more },
            Wire::AcquireScope(a) => OpResult::AcquireScope { fence: a.fence },
            Wire::ReleaseScope(r) => OpResult::ReleaseScope { released: r.released },
        })
    }
}

impl TryFrom<v1::TxnResponse> for TxnResult {
    type Error = Invalid;

    fn try_from(r: v1::TxnResponse) -> Result<Self, Invalid> {
        Ok(TxnResult {
            revision: r.revision,
            succeeded: r.succeeded,
            results: r.results.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            observed: r.observed.into_iter().map(Into::into).collect(),
            conflicts: r.conflicts.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            reduced: r.reduced.then_some(Reduced { mod_revisions: r.mod_revisions }),
        })
    }
}

impl TxnResult {
    /// The answer as it goes over the wire.
    pub fn into_response(self, header: Option<v1::ResponseHeader>) -> v1::TxnResponse {
        v1::TxnResponse {
            header,
            revision: self.revision,
            succeeded: self.succeeded,
            results: self.results.into_iter().map(Into::into).collect(),
            observed: self.observed.into_iter().map(Into::into).collect(),
            conflicts: self.conflicts.into_iter().map(Into::into).collect(),
            reduced: self.reduced.is_some(),
            mod_revisions: self.reduced.unwrap_or_default().mod_revisions,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owner() -> impl Strategy<Value = ScopeOwner> {
        prop_oneof![any::<u64>().prop_map(ScopeOwner::Lease), ".*".prop_map(ScopeOwner::Procedure)]
    }

    fn condition() -> impl Strategy<Value = Condition> {
        prop_oneof![
            Just(Condition::Absent),
            any::<u64>().prop_map(Condition::ModRevision),
            any::<u64>().prop_map(Condition::CreateRevision),
            any::<u64>().prop_map(Condition::Version),
            any::<Vec<u8>>().prop_map(|v| Condition::Value(v.into())),
            Just(Condition::PrefixEmpty),
            any::<u64>().prop_map(Condition::PrefixUnchangedSince),
            any::<u64>().prop_map(Condition::EntryTerm),
            any::<u64>().prop_map(Condition::LeaseAlive),
            prop::option::of(owner()).prop_map(Condition::ScopeFree),
        ]
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (".*", any::<Vec<u8>>(), any::<bool>(), prop::option::of(1..u64::MAX)).prop_map(
                |(key, value, return_previous, lease)| Op::Put { key, value: value.into(), return_previous, lease }
            ),
            (".*", owner()).prop_map(|(path, owner)| Op::AcquireScope { path, owner }),
            (".*", owner()).prop_map(|(path, owner)| Op::ReleaseScope { path, owner }),
            (".*", any::<bool>()).prop_map(|(key, return_previous)| Op::Delete { key, return_previous }),
            ".*".prop_map(|key| Op::Get { key }),
            (".*", any::<u32>()).prop_map(|(prefix, limit)| Op::List { prefix, limit }),
        ]
    }

    proptest! {
        #[test]
        fn a_transaction_survives_the_wire(
            when in prop::collection::vec((".*", condition()).prop_map(|(key, condition)| Compare { key, condition }), 0..4),
            then in prop::collection::vec(op(), 0..4),
            otherwise in prop::collection::vec(op(), 0..4),
        ) {
            use prost::Message;
            let txn = Txn { when, then, otherwise };
            let bytes = v1::Txn::from(txn.clone()).encode_to_vec();
            let back = Txn::try_from(v1::Txn::decode(&bytes[..]).unwrap()).unwrap();
            prop_assert_eq!(txn, back);
        }
    }
}
