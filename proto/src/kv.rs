//! The map's vocabulary as plain values: what a caller builds, what the log carries, what an answer holds.
//!
//! A [`Txn`] is checked in one place, [`Txn::validate`], by the client before it sends and by the peer before it
//! proposes, so that nothing invalid ever reaches the log.

mod wire;

use bytes::Bytes;

use crate::coordination::{LeaseId, Scope, ScopeOwner, validate_scope_path};
use crate::limits::*;

/// The cluster-wide counter, raised once by every command that changes anything.
pub type Revision = u64;

/// One key with its value and the revisions it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    pub key: String,
    pub value: Bytes,
    /// 1 at creation, +1 per change. Information only: never compare-and-set on it.
    pub version: u64,
    pub create_revision: Revision,
    /// What compare-and-set expects; never used twice, so that a recreated key is not taken for the old one.
    pub mod_revision: Revision,
    /// The lease the key hangs on.
    pub lease: Option<LeaseId>,
}

/// One condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compare {
    /// The key looked at; the prefix for the `Prefix*` conditions; the path for [`Condition::ScopeFree`]; empty for
    /// [`Condition::EntryTerm`] and [`Condition::LeaseAlive`].
    pub key: String,
    pub condition: Condition,
}

/// What a [`Compare`] demands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    Absent,
    ModRevision(Revision),
    CreateRevision(Revision),
    Version(u64),
    Value(Bytes),
    /// No key under the prefix.
    PrefixEmpty,
    /// No key under the prefix has a `mod_revision` above this one.
    PrefixUnchangedSince(Revision),
    /// The log entry that carries the transaction was proposed in this term.
    EntryTerm(u64),
    /// The lease is alive. Its id is its fence (semantics, section 5).
    LeaseAlive(LeaseId),
    /// No live scope of another owner conflicts with the path, and the owner, if it is a lease, is alive. Without an
    /// owner every scope is another's (semantics, section 6).
    ScopeFree(Option<ScopeOwner>),
}

impl Compare {
    pub fn absent(key: impl Into<String>) -> Self {
        Self { key: key.into(), condition: Condition::Absent }
    }

    pub fn mod_revision(key: impl Into<String>, revision: Revision) -> Self {
        Self { key: key.into(), condition: Condition::ModRevision(revision) }
    }

    pub fn lease_alive(lease: LeaseId) -> Self {
        Self { key: String::new(), condition: Condition::LeaseAlive(lease) }
    }

    pub fn scope_free(path: impl Into<String>, owner: Option<ScopeOwner>) -> Self {
        Self { key: path.into(), condition: Condition::ScopeFree(owner) }
    }

    pub fn prefix_empty(prefix: impl Into<String>) -> Self {
        Self { key: prefix.into(), condition: Condition::PrefixEmpty }
    }

    /// Compare-and-set's own condition.
    pub fn expected(key: impl Into<String>, expected: Expected) -> Self {
        match expected {
            Expected::Absent => Self::absent(key),
            Expected::ModRevision(r) => Self::mod_revision(key, r),
        }
    }
}

/// What compare-and-set expects of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Absent,
    ModRevision(Revision),
}

/// One operation of a transaction's branch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Put {
        key: String,
        value: Bytes,
        return_previous: bool,
        /// The lease the key hangs on from now on; covered by [`Condition::LeaseAlive`].
        lease: Option<LeaseId>,
    },
    Delete {
        key: String,
        return_previous: bool,
    },
    Get {
        key: String,
    },
    /// At most `limit` entries under the prefix (at most [`MAX_PAGE_ENTRIES`]).
    List {
        prefix: String,
        limit: u32,
    },
    /// Covered by [`Condition::ScopeFree`] with the same path and owner. Held by this owner already: it stays as it is.
    AcquireScope {
        path: String,
        owner: ScopeOwner,
    },
    /// Nothing happens if this owner does not hold it.
    ReleaseScope {
        path: String,
        owner: ScopeOwner,
    },
}

impl Op {
    pub fn put(key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        Self::Put { key: key.into(), value: value.into(), return_previous: false, lease: None }
    }

    /// A put of a key that is to hang on a lease.
    pub fn put_leased(key: impl Into<String>, value: impl Into<Bytes>, lease: LeaseId) -> Self {
        Self::Put { key: key.into(), value: value.into(), return_previous: false, lease: Some(lease) }
    }

    pub fn delete(key: impl Into<String>) -> Self {
        Self::Delete { key: key.into(), return_previous: false }
    }

    /// The key the operation is about; the prefix for a list, the path for a scope.
    pub fn key(&self) -> &str {
        match self {
            Op::Put { key, .. } | Op::Delete { key, .. } | Op::Get { key } => key,
            Op::List { prefix, .. } => prefix,
            Op::AcquireScope { path, .. } | Op::ReleaseScope { path, .. } => path,
        }
    }

    /// Whether the operation can change the map.
    pub fn is_write(&self) -> bool {
        matches!(self, Op::Put { .. } | Op::Delete { .. })
    }
}

/// All or nothing, at one revision: `then` if every compare holds, else `otherwise`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    pub when: Vec<Compare>,
    pub then: Vec<Op>,
    pub otherwise: Vec<Op>,
}

/// The result of one [`Op`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpResult {
    Put { previous: Option<KeyValue> },
    Delete { deleted: bool, previous: Option<KeyValue> },
    Get { entry: Option<KeyValue> },
    List { entries: Vec<KeyValue>, more: bool },
    AcquireScope { fence: Revision },
    ReleaseScope { released: bool },
}

/// What a transaction did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TxnResult {
    /// The revision it ran at: a new one if it changed anything.
    pub revision: Revision,
    /// `then` ran.
    pub succeeded: bool,
    pub results: Vec<OpResult>,
    /// When a compare failed: the entries that the compares looked at and that exist.
    pub observed: Vec<KeyValue>,
    /// When a [`Condition::ScopeFree`] failed: the scopes in the way.
    pub conflicts: Vec<Scope>,
    /// A repeated request's first answer, when that was too large to keep: `results`, `observed` and `conflicts` are gone.
    pub reduced: Option<Reduced>,
}

/// What is kept of an answer that was too large (semantics, section 4).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reduced {
    /// Of the entries the answer held, in order, as far as they were kept.
    pub mod_revisions: Vec<Revision>,
}

/// A message off the wire, or a transaction about to be sent, that the contract does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("the key {key:?} has {len} bytes; a key has 1 to {MAX_KEY_BYTES}")]
    KeyLength { key: String, len: usize },
    #[error("the value of key {key:?} has {len} bytes; a value has at most {MAX_VALUE_BYTES}")]
    ValueLength { key: String, len: usize },
    #[error("the transaction has {count} {what}; it may have at most {MAX_TXN_OPS}")]
    TxnOps { what: &'static str, count: usize },
    #[error("the transaction has {bytes} bytes of keys and values; it may have at most {MAX_TXN_BYTES}")]
    TxnBytes { bytes: usize },
    #[error("{count} keys were asked for at once; at most {MAX_BATCH_GET_KEYS} can be")]
    BatchKeys { count: usize },
    #[error("a list asks for {limit} entries; it may ask for 1 to {MAX_PAGE_ENTRIES}")]
    ListLimit { limit: u32 },
    #[error(
        "key {key:?} is lake's own: a write to it must stand in `then`, covered by a compare of absent or mod_revision on that key"
    )]
    BlindWrite { key: String },
    #[error("key {key:?} lies neither under {GUARDED_PREFIX} nor under {USER_PREFIX}")]
    OutsideNamespaces { key: String },
    #[error("key {key:?} is to hang on lease {lease}: a compare that the lease is alive must cover that")]
    UnguardedLease { key: String, lease: LeaseId },
    #[error("scope {path:?} is to be acquired for {owner}: a compare that it is free for that owner must cover that")]
    UnguardedScope { path: String, owner: ScopeOwner },
    #[error("scope operations stand in `then` only")]
    ScopeInOtherwise,
    #[error("one transaction acquires scopes for one owner, and here are {one} and {other}")]
    ScopeOwners { one: ScopeOwner, other: ScopeOwner },
    #[error("{path:?} is no scope path: it begins with `/`, has no empty part and at most {MAX_SCOPE_DEPTH} parts")]
    ScopePath { path: String },
    #[error("{id:?} is no procedure id: it has 1 to {MAX_HOLDER_BYTES} bytes")]
    ProcedureId { id: String },
    #[error("{what} has {len} bytes; it may have at most {MAX_HOLDER_BYTES}")]
    Holder { what: &'static str, len: usize },
    #[error("the time to live of a {what} is {ttl_ms} ms; it may be {min_ms} to {max_ms} ms")]
    Ttl { what: &'static str, ttl_ms: u64, min_ms: u64, max_ms: u64 },
    #[error(
        "a stamp has session {session}, sequence {sequence} and lowest unanswered {lowest}; 0 < lowest <= sequence"
    )]
    Stamp { session: u64, sequence: u64, lowest: u64 },
    #[error("log entry {index} holds a command that this build cannot read: {what}")]
    UnknownCommand { index: u64, what: String },
    #[error("the message lacks its {0}")]
    Missing(&'static str),
}

/// Checks a key's length. The start of the key is quoted in the error, not all of it.
pub fn validate_key(key: &str) -> Result<(), Invalid> {
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        return Err(Invalid::KeyLength { key: key.chars().take(64).collect(), len: key.len() });
    }
    Ok(())
}

/// Checks the keys that are read at once: how many, and each one's length.
pub fn validate_keys(keys: &[String]) -> Result<(), Invalid> {
    if keys.len() > MAX_BATCH_GET_KEYS {
        return Err(Invalid::BatchKeys { count: keys.len() });
    }
    keys.iter().try_for_each(|key| validate_key(key))
}

/// Checks a prefix's length.
pub fn validate_prefix(prefix: &str) -> Result<(), Invalid> {
    if prefix.len() > MAX_KEY_BYTES {
        return Err(Invalid::KeyLength { key: prefix.chars().take(64).collect(), len: prefix.len() });
    }
    Ok(())
}

impl Txn {
    /// The common case: put `value` if `key` is as expected.
    pub fn cas(key: impl Into<String>, expected: Expected, value: impl Into<Bytes>) -> Self {
        let key = key.into();
        Self {
            when: vec![Compare::expected(key.clone(), expected)],
            then: vec![Op::put(key, value)],
            otherwise: vec![],
        }
    }

    /// Delete `key` if it is as expected.
    pub fn cas_delete(key: impl Into<String>, expected: Revision) -> Self {
        let key = key.into();
        Self {
            when: vec![Compare::mod_revision(key.clone(), expected)],
            then: vec![Op::delete(key)],
            otherwise: vec![],
        }
    }

    /// Checks every limit and the rule against blind writes under `/lake/` (semantics, sections 1 and 2).
    ///
    /// # Errors
    /// The first thing found that the contract does not allow.
    pub fn validate(&self) -> Result<(), Invalid> {
        for (what, count) in [("compares", self.when.len()), ("operations", self.then.len() + self.otherwise.len())] {
            if count > MAX_TXN_OPS {
                return Err(Invalid::TxnOps { what, count });
            }
        }
        let mut bytes = 0;
        for compare in &self.when {
            bytes += compare.key.len();
            match &compare.condition {
                Condition::EntryTerm(_) | Condition::LeaseAlive(_) => {}
                Condition::ScopeFree(owner) => {
                    validate_scope_path(&compare.key)?;
                    owner.as_ref().map_or(Ok(()), ScopeOwner::validate)?;
                }
                Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => validate_prefix(&compare.key)?,
                Condition::Value(v) => {
                    validate_key(&compare.key)?;
                    bytes += v.len();
                    if v.len() > MAX_VALUE_BYTES {
                        return Err(Invalid::ValueLength { key: compare.key.clone(), len: v.len() });
                    }
                }
                _ => validate_key(&compare.key)?,
            }
        }
        for op in self.then.iter().chain(&self.otherwise) {
            bytes += op.key().len();
            match op {
                Op::List { prefix, limit } => {
                    validate_prefix(prefix)?;
                    if *limit == 0 || *limit as usize > MAX_PAGE_ENTRIES {
                        return Err(Invalid::ListLimit { limit: *limit });
                    }
                }
                Op::Put { key, value, .. } => {
                    validate_key(key)?;
                    bytes += value.len();
                    if value.len() > MAX_VALUE_BYTES {
                        return Err(Invalid::ValueLength { key: key.clone(), len: value.len() });
                    }
                }
                Op::Delete { key, .. } | Op::Get { key } => validate_key(key)?,
                Op::AcquireScope { path, owner } | Op::ReleaseScope { path, owner } => {
                    validate_scope_path(path)?;
                    owner.validate()?;
                }
            }
        }
        if bytes > MAX_TXN_BYTES {
            return Err(Invalid::TxnBytes { bytes });
        }
        self.validate_covered()?;
        self.validate_no_blind_write()
    }

    /// What hangs on a lease, or is claimed, is covered by a compare, so that no operation of a branch can fail.
    fn validate_covered(&self) -> Result<(), Invalid> {
        // Two owners could each find free what the other is about to take.
        let mut owners = self.then.iter().filter_map(|op| match op {
            Op::AcquireScope { owner, .. } => Some(owner),
            _ => None,
        });
        if let Some(one) = owners.next()
            && let Some(other) = owners.find(|other| *other != one)
        {
            return Err(Invalid::ScopeOwners { one: one.clone(), other: other.clone() });
        }
        let covers = |wanted: &dyn Fn(&Compare) -> bool| self.when.iter().any(wanted);
        for (op, in_then) in self.then.iter().map(|op| (op, true)).chain(self.otherwise.iter().map(|op| (op, false))) {
            match op {
                Op::Put { key, lease: Some(lease), .. }
                    if !in_then || !covers(&|c| c.condition == Condition::LeaseAlive(*lease)) =>
                {
                    return Err(Invalid::UnguardedLease { key: key.clone(), lease: *lease });
                }
                Op::AcquireScope { .. } | Op::ReleaseScope { .. } if !in_then => return Err(Invalid::ScopeInOtherwise),
                Op::AcquireScope { path, owner }
                    if !covers(&|c| {
                        c.key == *path && matches!(&c.condition, Condition::ScopeFree(Some(o)) if o == owner)
                    }) =>
                {
                    return Err(Invalid::UnguardedScope { path: path.clone(), owner: owner.clone() });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn validate_no_blind_write(&self) -> Result<(), Invalid> {
        let covered: std::collections::HashSet<&str> = self
            .when
            .iter()
            .filter(|c| matches!(c.condition, Condition::Absent | Condition::ModRevision(_)))
            .map(|c| c.key.as_str())
            .collect();
        let writes =
            |ops: &'_ [Op]| ops.iter().filter(|o| o.is_write()).map(|o| o.key().to_owned()).collect::<Vec<_>>();
        for key in writes(&self.then) {
            if key.starts_with(GUARDED_PREFIX) {
                if !covered.contains(key.as_str()) {
                    return Err(Invalid::BlindWrite { key });
                }
            } else if !key.starts_with(USER_PREFIX) {
                return Err(Invalid::OutsideNamespaces { key });
            }
        }
        for key in writes(&self.otherwise) {
            if key.starts_with(GUARDED_PREFIX) {
                return Err(Invalid::BlindWrite { key });
            } else if !key.starts_with(USER_PREFIX) {
                return Err(Invalid::OutsideNamespaces { key });
            }
        }
        Ok(())
    }
}

impl TxnResult {
    /// What is kept of this answer when it is too large to keep whole (semantics, section 4).
    pub fn reduce(&self, max_mod_revisions: usize) -> Self {
        let in_results = self.results.iter().flat_map(|result| match result {
            OpResult::Put { previous } | OpResult::Delete { previous, .. } => previous.as_slice(),
            OpResult::Get { entry } => entry.as_slice(),
            OpResult::List { entries, .. } => entries.as_slice(),
            OpResult::AcquireScope { .. } | OpResult::ReleaseScope { .. } => &[],
        });
        let mod_revisions =
            in_results.chain(&self.observed).map(|entry| entry.mod_revision).take(max_mod_revisions).collect();
        Self {
            revision: self.revision,
            succeeded: self.succeeded,
            reduced: Some(Reduced { mod_revisions }),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_under_lake_needs_a_compare_on_that_key() {
        let blind = Txn { then: vec![Op::put("/lake/a", "1")], ..Txn::default() };
        assert_eq!(blind.validate(), Err(Invalid::BlindWrite { key: "/lake/a".into() }));

        let other_key = Txn { when: vec![Compare::absent("/lake/b")], ..blind.clone() };
        assert_eq!(other_key.validate(), Err(Invalid::BlindWrite { key: "/lake/a".into() }));

        let by_version =
            Txn { when: vec![Compare { key: "/lake/a".into(), condition: Condition::Version(1) }], ..blind.clone() };
        assert_eq!(by_version.validate(), Err(Invalid::BlindWrite { key: "/lake/a".into() }));

        assert_eq!(Txn::cas("/lake/a", Expected::Absent, "1").validate(), Ok(()));
        assert_eq!(Txn::cas_delete("/lake/a", 4).validate(), Ok(()));

        let in_otherwise =
            Txn { when: vec![Compare::absent("/lake/a")], then: vec![], otherwise: vec![Op::delete("/lake/a")] };
        assert_eq!(in_otherwise.validate(), Err(Invalid::BlindWrite { key: "/lake/a".into() }));
    }

    #[test]
    fn users_keys_may_be_written_blindly_and_others_not_at_all() {
        let put = |key: &str| Txn { then: vec![Op::put(key, "1")], ..Txn::default() };
        assert_eq!(put("/kv/a").validate(), Ok(()));
        assert_eq!(put("elsewhere").validate(), Err(Invalid::OutsideNamespaces { key: "elsewhere".into() }));
    }

    #[test]
    fn what_hangs_on_a_lease_or_is_claimed_is_covered_by_a_compare() {
        let leased = Txn { then: vec![Op::put_leased("/kv/a", "1", 7)], ..Txn::default() };
        assert_eq!(leased.validate(), Err(Invalid::UnguardedLease { key: "/kv/a".into(), lease: 7 }));
        let other = Txn { when: vec![Compare::lease_alive(8)], ..leased.clone() };
        assert_eq!(other.validate(), Err(Invalid::UnguardedLease { key: "/kv/a".into(), lease: 7 }));
        assert_eq!(Txn { when: vec![Compare::lease_alive(7)], ..leased }.validate(), Ok(()));

        let mine = ScopeOwner::Lease(7);
        let path = "/catalog/a".to_owned();
        let acquire =
            Txn { then: vec![Op::AcquireScope { path: path.clone(), owner: mine.clone() }], ..Txn::default() };
        assert!(matches!(acquire.validate(), Err(Invalid::UnguardedScope { .. })));
        let others = Txn { when: vec![Compare::scope_free(path.clone(), None)], ..acquire.clone() };
        assert!(matches!(others.validate(), Err(Invalid::UnguardedScope { .. })));
        assert_eq!(
            Txn { when: vec![Compare::scope_free(path.clone(), Some(mine))], ..acquire.clone() }.validate(),
            Ok(())
        );
        assert_eq!(Txn { otherwise: acquire.then, ..Txn::default() }.validate(), Err(Invalid::ScopeInOtherwise));

        // Each finds its path free, and together they would conflict.
        let both = [("/a", ScopeOwner::Lease(7)), ("/a/b", ScopeOwner::Lease(8))];
        let both = Txn {
            when: both.iter().map(|(path, owner)| Compare::scope_free(*path, Some(owner.clone()))).collect(),
            then: both.map(|(path, owner)| Op::AcquireScope { path: path.into(), owner }).into(),
            otherwise: vec![],
        };
        assert!(matches!(both.validate(), Err(Invalid::ScopeOwners { .. })));
    }

    #[test]
    fn limits_are_named() {
        let long = format!("/kv/{}", "k".repeat(MAX_KEY_BYTES));
        let put = |key: &str, len: usize| Txn { then: vec![Op::put(key, vec![0; len])], ..Txn::default() };
        assert!(matches!(put(&long, 1).validate(), Err(Invalid::KeyLength { .. })));
        assert!(matches!(put("", 1).validate(), Err(Invalid::KeyLength { .. })));
        assert_eq!(put("/kv/a", MAX_VALUE_BYTES).validate(), Ok(()));
        assert!(matches!(put("/kv/a", MAX_VALUE_BYTES + 1).validate(), Err(Invalid::ValueLength { .. })));
        let many = |n: usize, len: usize| Txn {
            then: (0..n).map(|i| Op::put(format!("/kv/{i}"), vec![0; len])).collect(),
            ..Txn::default()
        };
        assert_eq!(many(MAX_TXN_OPS, 1).validate(), Ok(()));
        assert!(matches!(many(MAX_TXN_OPS + 1, 1).validate(), Err(Invalid::TxnOps { what: "operations", .. })));
        let both = Txn { otherwise: many(1, 1).then, ..many(MAX_TXN_OPS, 1) };
        assert!(matches!(both.validate(), Err(Invalid::TxnOps { what: "operations", .. })), "over both branches");
        let guarded = |compares: usize| Txn {
            when: (0..compares).map(|i| Compare::absent(format!("/kv/{i}"))).collect(),
            ..many(MAX_TXN_OPS, 1)
        };
        assert_eq!(
            guarded(MAX_TXN_OPS).validate(),
            Ok(()),
            "each of as many operations as there can be, with its compare"
        );
        assert!(matches!(guarded(MAX_TXN_OPS + 1).validate(), Err(Invalid::TxnOps { what: "compares", .. })));
        assert!(matches!(many(9, MAX_VALUE_BYTES).validate(), Err(Invalid::TxnBytes { .. })));
        let list = |limit| Txn { then: vec![Op::List { prefix: "/kv/".into(), limit }], ..Txn::default() };
        assert!(matches!(list(0).validate(), Err(Invalid::ListLimit { .. })));
        assert!(matches!(list(1001).validate(), Err(Invalid::ListLimit { .. })));
    }
}
