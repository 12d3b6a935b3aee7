//! Appends that one node hands to another, and what became of them.
//!
//! Keys:
//! ```text
//! /lake/append/<table uuid>/<id>   an append that is handed over: whoever commits to the table next may take it along
//! /lake/op/append/<id>             what became of it (semantics, section 4)
//! ```
//! What is handed over hangs on a lease of the giver: once that is over, nobody takes the append along any more.
//!
//! An append is made at most once, since each transaction that may make it demands that it has no outcome and leaves one:
//! the giver's own swap, and that of a node which takes it along; the latter demands as well that the record is the one it
//! has read, and deletes it. Handing over demands the same, so that a handing over that comes late, after its append was
//! made or withdrawn, is refused. So an append is withdrawn by leaving an outcome that says so.
//!
//! No record may stay behind its outcome: it would be made again once that is forgotten. So withdrawing takes it away, and a giver
//! names the record in its own swap.

use std::time::Instant;

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, Op, Revision, Txn};
use uuid::Uuid;

use super::error::Result;
use super::operations::operation_key;
use super::{Catalog, CatalogError, find};
use crate::store::{Error, ReadOptions};

/// Keys of appends that are handed over begin so.
const HANDED: &str = "/lake/append/";
/// What outcomes of appends are filed under.
pub const DOMAIN: &str = "append";
/// Most appends that one swap settles: each takes two compares and two operations of its transaction.
pub const MAX_SETTLED: usize = 200;

/// An append that its node has handed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handed {
    pub id: Uuid,
    /// What it is; the catalog does not look into it.
    pub value: Bytes,
    /// The record's state.
    pub revision: Revision,
}

/// An append that a swap makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    pub id: Uuid,
    /// The record's state, if it was handed over.
    pub handed: Option<Revision>,
}

/// The appends that a swap makes, and what is left as the outcome of each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settling {
    pub appends: Vec<Settled>,
    pub outcome: Bytes,
}

impl Settling {
    pub fn is_empty(&self) -> bool {
        self.appends.is_empty()
    }

    /// The part of a swap's transaction that makes them.
    pub(super) fn transaction(&self, table: Uuid) -> Result<Txn> {
        if self.appends.len() > MAX_SETTLED {
            return Err(CatalogError::Store(Error::Refused {
                doing: format!("making {} appends in one swap", self.appends.len()),
                message: format!("one transaction makes at most {MAX_SETTLED}; nothing was committed"),
            }));
        }
        let mut txn = Txn::default();
        for append in &self.appends {
            let key = outcome_key(append.id)?;
            txn.when.push(Compare::absent(&key));
            txn.then.push(Op::put(key, self.outcome.clone()));
            if let Some(revision) = append.handed {
                let key = handed_key(table, append.id);
                txn.when.push(Compare::mod_revision(&key, revision));
                txn.then.push(Op::delete(key));
            }
        }
        Ok(txn)
    }
}

/// What became of an append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub value: Bytes,
    pub revision: Revision,
}

impl Catalog {
    /// Whether appends can be handed over: it takes leases, and transactions over several keys.
    pub fn hands_over(&self) -> bool {
        let can = self.store.capabilities();
        can.leases && can.multi_key
    }

    /// Hands an append over, for as long as the lease lives. `None`: the lease is over, or the append has an outcome.
    ///
    /// # Errors
    /// The store's. If that leaves open whether it was done, the append must be withdrawn before it is given up.
    pub async fn hand_over(
        &self,
        table: Uuid,
        id: Uuid,
        value: Bytes,
        lease: LeaseId,
        deadline: Instant,
    ) -> Result<Option<Revision>> {
        let key = handed_key(table, id);
        let outcome = outcome_key(id)?;
        let when = vec![Compare::absent(&key), Compare::absent(outcome), Compare::lease_alive(lease)];
        let then = vec![Op::put_leased(&key, value, lease)];
        let committed = self.store.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
        match committed.result.succeeded {
            true => Ok(Some(committed.result.revision)),
            // The id is this append's alone: by an attempt of this call whose answer was lost.
            false => Ok(find(&committed.result.observed, &key).map(|there| there.mod_revision)),
        }
    }

    /// The appends to a table that are handed over, at most `most` of them, by id.
    ///
    /// # Errors
    /// The store's.
    pub async fn handed(&self, table: Uuid, most: u32, deadline: Instant) -> Result<Vec<Handed>> {
        let prefix = format!("{HANDED}{table}/");
        let read = self.store.list(&prefix, None, most, ReadOptions::default(), deadline).await?;
        let entries = read.value.entries.into_iter();
        let handed = entries.filter_map(|entry| {
            let id = Uuid::try_parse(entry.key.strip_prefix(&prefix)?).ok()?;
            Some(Handed { id, value: entry.value, revision: entry.mod_revision })
        });
        Ok(handed.collect())
    }

    /// What became of an append; `None`: nothing yet.
    ///
    /// # Errors
    /// The store's.
    pub async fn append_outcome(&self, id: Uuid, deadline: Instant) -> Result<Option<Outcome>> {
        let key = outcome_key(id)?;
        let read = self.store.get(&key, ReadOptions::default(), deadline).await?;
        Ok(read.value.map(|entry| Outcome { value: entry.value, revision: entry.mod_revision }))
    }

    /// Gives an append up, so that nobody can make it any more: leaves `outcome`, which says so, unless there is one, and takes its
    /// record away: one that stayed would be made again once its outcome is forgotten. Returns the outcome that is there then.
    ///
    /// # Errors
    /// The store's.
    pub async fn withdraw(&self, table: Uuid, id: Uuid, outcome: Bytes, deadline: Instant) -> Result<Bytes> {
        let (key, record) = (outcome_key(id)?, handed_key(table, id));
        loop {
            let there = self.store.get(&record, ReadOptions::default(), deadline).await?.value;
            let mut txn = Txn {
                when: vec![Compare::absent(&key)],
                then: vec![Op::put(&key, outcome.clone())],
                otherwise: vec![],
            };
            match &there {
                Some(there) => {
                    txn.when.push(Compare::mod_revision(&record, there.mod_revision));
                    txn.then.push(Op::delete(&record));
                }
                None => txn.when.push(Compare::absent(&record)),
            }
            let result = self.store.commit(txn, deadline).await?.result;
            if result.succeeded {
                return Ok(outcome);
            }
            // Else the record has come or gone in between, each of which it does once.
            if let Some(left) = find(&result.observed, &key) {
                if let Some(there) = there {
                    self.store.commit(Txn::cas_delete(&record, there.mod_revision), deadline).await?;
                }
                return Ok(left.value.clone());
            }
        }
    }

    /// Forgets outcomes that were read by the only ones who may ask for them. What is no longer as it was read stays.
    ///
    /// # Errors
    /// The store's.
    pub async fn forget_appends(&self, read: &[(Uuid, Revision)], deadline: Instant) -> Result<()> {
        let outcomes: Vec<_> =
            read.iter().map(|(id, revision)| Ok((outcome_key(*id)?, *revision))).collect::<Result<_>>()?;
        self.forget(&outcomes, deadline).await
    }
}

/// The key of what became of an append.
fn outcome_key(id: Uuid) -> Result<String> {
    operation_key(DOMAIN, &id.to_string())
}

fn handed_key(table: Uuid, id: Uuid) -> String {
    format!("{HANDED}{table}/{id}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Namespace, TableIdent, TablePointer};
    use super::*;
    use crate::faulty::{FaultyStore, soon};

    /// A record that is handed over, put without a lease: the store in memory has none.
    async fn hand(catalog: &Catalog, table: Uuid, id: Uuid) -> Revision {
        let committed = catalog.store.cas(&handed_key(table, id), None, "files".into(), soon()).await.unwrap();
        committed.result.revision
    }

    #[tokio::test]
    async fn an_append_is_made_once_whoever_makes_it() {
        let store = Arc::new(FaultyStore::default());
        let catalog = Catalog::new(store.clone());
        assert!(!catalog.hands_over());
        let namespace: Namespace = "n".parse().unwrap();
        catalog.create_namespace(&namespace, Default::default(), soon()).await.unwrap();
        let table = TableIdent::new(namespace, "t").unwrap();
        let uuid = Uuid::new_v4();
        let pointer = |n: u32| TablePointer { uuid, metadata_location: n.to_string(), previous_location: None };
        let first = catalog.create_table(&table, &pointer(0), soon()).await.unwrap();
        let [mine, theirs, late] = [Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3)];
        let at = hand(&catalog, uuid, theirs).await;
        assert_eq!(catalog.handed(uuid, 9, soon()).await.unwrap().iter().map(|h| h.id).collect::<Vec<_>>(), [theirs]);
        let settling = |appends: &[(Uuid, Option<Revision>)]| Settling {
            appends: appends.iter().map(|(id, handed)| Settled { id: *id, handed: *handed }).collect(),
            outcome: "made".into(),
        };
        let swap = async |expected, n, appends: &[(Uuid, Option<Revision>)]| {
            catalog.swap_table_settling(&table, expected, &pointer(n), None, &settling(appends), soon()).await
        };
        // An answer that is lost is found again.
        store.lose_answers.store(1, std::sync::atomic::Ordering::SeqCst);
        let made = swap(first.mod_revision, 1, &[(mine, None), (theirs, Some(at))]).await.unwrap();
        assert_eq!(catalog.handed(uuid, 9, soon()).await.unwrap(), []);
        let outcome = catalog.append_outcome(theirs, soon()).await.unwrap().unwrap();
        assert_eq!(outcome, Outcome { value: "made".into(), revision: made.mod_revision });
        // Its giver comes too late to make it, and to withdraw it.
        let again = swap(made.mod_revision, 2, &[(theirs, None)]).await.unwrap_err();
        assert_eq!(again, CatalogError::Conflict { table: table.clone(), current: Some(made.clone()), resent: false });
        assert_eq!(catalog.withdraw(uuid, theirs, "withdrawn".into(), soon()).await.unwrap(), "made");
        // What is withdrawn is made by nobody.
        let at = hand(&catalog, uuid, late).await;
        assert_eq!(catalog.withdraw(uuid, late, "withdrawn".into(), soon()).await.unwrap(), "withdrawn");
        assert!(matches!(swap(made.mod_revision, 3, &[(late, Some(at))]).await, Err(CatalogError::Conflict { .. })));
        assert_eq!(catalog.handed(uuid, 9, soon()).await.unwrap(), []);
        // A record that stayed behind its outcome goes as well.
        hand(&catalog, uuid, late).await;
        assert_eq!(catalog.withdraw(uuid, late, "again".into(), soon()).await.unwrap(), "withdrawn");
        assert_eq!(catalog.handed(uuid, 9, soon()).await.unwrap(), []);
        catalog.forget_appends(&[(mine, outcome.revision)], soon()).await.unwrap();
        assert_eq!(catalog.append_outcome(mine, soon()).await.unwrap(), None);
        let many: Vec<_> = (0..=MAX_SETTLED as u128).map(|n| (Uuid::from_u128(100 + n), None)).collect();
        let refused = swap(made.mod_revision, 5, &many).await.unwrap_err();
        assert!(refused.to_string().contains("at most 200; nothing was committed"), "{refused}");
        let claim = catalog.claim_turn(uuid, Uuid::new_v4(), soon()).await.unwrap().unwrap();
        let early = swap(made.mod_revision, 4, &[(Uuid::from_u128(4), None)]).await.unwrap_err();
        assert_eq!(early, CatalogError::NotYourTurn { table, turn: claim, resent: false });
    }
}
