//! Commits: swapping the pointers of one table, of several, or of a view, and the turns by which writers take them
//! fairly.
//!
//! Compare-and-set alone is not fair: of two writers, the one that builds on its own last commit is always a little
//! quicker, and the other may lose for ever. So a writer that has lost may claim the next turn ([`Catalog::claim_turn`]).
//! A swap needs that nobody else has; the claimant's own ends its claim in the same transaction. Nothing that matters
//! rests on it: the compare on the pointer decides as before, and a claim that outlives its claimant is ended by whoever
//! waits for it.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use lake_proto::kv::{Compare, Op, Revision, Txn};
use uuid::Uuid;

use super::appends::Settling;
use super::error::Result;
use super::names::named_key;
use super::pointers::{encode, find, observed, written};
use super::registering::{name_is, name_seen};
use super::{Catalog, CatalogError, MAX_RACES, TableIdent, TablePointer, Versioned, claimed};
use crate::store::{ReadOptions, Token};

/// One table's part of a change of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    pub table: TableIdent,
    /// The revision that its pointer must still have; `None`: the table is created.
    pub expected: Option<Revision>,
    pub new: TablePointer,
}

impl Catalog {
    /// Swaps a table's pointer, if its `mod_revision` is still `expected` and the next turn is nobody else's: unclaimed,
    /// or the caller's own claim `turn`, which ends with it.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, `NotYourTurn`, or the store's.
    pub async fn swap_table(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.swap_table_settling(table, expected, new, turn, &Settling::default(), deadline).await
    }

    /// The same, and makes these appends, at most [`MAX_SETTLED`](super::appends::MAX_SETTLED).
    ///
    /// # Errors
    /// As [`Catalog::swap_table`]; `Conflict` with the pointer that was expected if one of the appends has an outcome, or is
    /// no longer handed over as it was: look at both again.
    pub async fn swap_table_settling(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        settling: &Settling,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let (key, turn_key) = (table.key(), turn_key(new.uuid));
        let mut txn = settling.transaction(new.uuid)?;
        txn.when.push(Compare::mod_revision(&key, expected));
        txn.then.push(Op::put(&key, encode(new, &key)?));
        txn.when.push(match turn {
            None => Compare::absent(&turn_key),
            Some(claim) => {
                txn.then.push(Op::delete(&turn_key));
                Compare::mod_revision(&turn_key, claim)
            }
        });
        let committed = self.commit(txn, deadline).await?;
        let in_doubt = self.is_in_doubt(&committed);
        let (result, resent) = (committed.result, committed.resent);
        if result.succeeded {
            return Ok(written(new, result.revision));
        }
        match observed(table, &result, &key).map_err(|error| error.after_doubt(in_doubt))? {
            // The metadata location is ours alone: an earlier attempt of this call was applied.
            Some(current) if current.value == *new => Ok(current),
            Some(current) if current.mod_revision == expected => {
                let held = find(&result.observed, &turn_key).map(|e| e.mod_revision);
                match held == turn && !settling.is_empty() {
                    true => {
                        let table = table.clone();
                        Err(CatalogError::Conflict { table, current: Some(current), resent: in_doubt })
                    }
                    false => Err(CatalogError::NotYourTurn { table: table.clone(), turn: held.unwrap_or(0), resent }),
                }
            }
            current => Err(CatalogError::Conflict { table: table.clone(), current, resent: in_doubt }),
        }
    }

    /// Swaps a view's pointer, if its `mod_revision` is still `expected`.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, or the store's.
    pub async fn swap_view(
        &self,
        view: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let key = view.view_key();
        let txn = Txn {
            when: vec![Compare::mod_revision(&key, expected)],
            then: vec![Op::put(&key, encode(new, &key)?)],
            otherwise: vec![],
        };
        let committed = self.commit(txn, deadline).await?;
        let resent = self.is_in_doubt(&committed);
        let result = committed.result;
        if result.succeeded {
            return Ok(written(new, result.revision));
        }
        match observed(view, &result, &key).map_err(|error| error.after_doubt(resent))? {
            Some(current) if current.value == *new => Ok(current),
            current => Err(CatalogError::Conflict { table: view.clone(), current, resent }),
        }
    }

    /// Creates tables and swaps pointers, all in one transaction: all of it is done, or nothing. The next turn of none of
    /// them may be another's.
    ///
    /// # Errors
    /// `Conflict` or `NotYourTurn` for the first table that is not as expected; for one that is created as
    /// [`Catalog::create_table`]; the store's.
    pub async fn change_tables(
        &self,
        changes: &[TableChange],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        self.change_tables_while(changes, &[], deadline).await
    }

    /// The same, if the pointers of `unchanged` are still at these revisions as well.
    ///
    /// # Errors
    /// As [`Catalog::change_tables`]; `Conflict` also for one of `unchanged`.
    pub async fn change_tables_while(
        &self,
        changes: &[TableChange],
        unchanged: &[(TableIdent, Revision)],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        let mut in_doubt = false;
        let changed = self.change_noting(changes, unchanged, &mut in_doubt, deadline).await;
        changed.map_err(|error| error.after_doubt(in_doubt))
    }

    /// The same. Says whether an attempt whose answer was lost may have been applied.
    async fn change_noting(
        &self,
        changes: &[TableChange],
        unchanged: &[(TableIdent, Revision)],
        in_doubt: &mut bool,
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        changes.iter().filter(|change| change.expected.is_none()).try_for_each(|change| change.table.check_new())?;
        let multi_key = self.store.capabilities().multi_key;
        if let ([TableChange { table, expected: None, new }], [], false) = (changes, unchanged, multi_key) {
            return Ok(vec![self.create_table(table, new, deadline).await?]);
        }
        let mut uuids = HashMap::new();
        for TableChange { table, new, .. } in changes {
            if let Some(other) = uuids.insert(new.uuid, table) {
                return Err(CatalogError::Registered(other.clone()));
            }
        }
        if changes.iter().any(|change| change.expected.is_none()) {
            self.see_to_names(deadline).await?;
        }
        let mut stale: HashMap<Uuid, Revision> = HashMap::new();
        // An attempt that was not applied may still be, once the turn is free.
        let mut was_resent = false;
        for _ in 0..MAX_RACES {
            let (mut when, mut then) = (Vec::new(), Vec::new());
            when.extend(unchanged.iter().map(|(table, revision)| Compare::mod_revision(table.key(), *revision)));
            let mut namespaces = BTreeMap::new();
            for TableChange { table, expected, new } in changes {
                let key = table.key();
                then.push(Op::put(&key, encode(new, &key)?));
                match expected {
                    Some(expected) => {
                        when.push(Compare::mod_revision(&key, *expected));
                        when.push(Compare::absent(turn_key(new.uuid)));
                    }
                    None => {
                        when.push(Compare::absent(&key));
                        when.push(Compare::absent(table.view_key()));
                        let name = named_key(new.uuid);
                        when.push(name_is(&name, stale.get(&new.uuid).copied()));
                        then.push(Op::put(&name, key));
                        when.extend(self.unclaimed(table.scope_path()));
                        let revision = self.namespace_revision(&table.namespace, deadline).await?;
                        namespaces.insert(table.namespace.key(), revision);
                    }
                }
            }
            when.extend(namespaces.into_iter().map(|(key, revision)| Compare::mod_revision(key, revision)));
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            let is_in_doubt = self.is_in_doubt(&committed);
            let (result, resent) = (committed.result, committed.resent);
            if result.succeeded {
                return Ok(changes.iter().map(|change| written(&change.new, result.revision)).collect());
            }
            was_resent |= resent;
            // Of one that was expected, and is as it was, all is known: all of it is done, or nothing.
            let is_as_before = |TableChange { table, expected, .. }: &TableChange| {
                expected.is_some() && find(&result.observed, &table.key()).map(|e| e.mod_revision) == *expected
            };
            *in_doubt |= is_in_doubt && !changes.iter().any(is_as_before);
            let current = |table: &TableIdent| observed(table, &result, &table.key());
            let now: Vec<_> = changes.iter().map(|change| current(&change.table)).collect::<Result<_>>()?;
            // The metadata locations are ours alone, and so are the uuids of what is created: an earlier attempt of this call was applied.
            let is_ours = |(change, now): (&TableChange, &Option<Versioned<TablePointer>>)| {
                let created = *in_doubt && change.expected.is_none();
                let same = |now: &TablePointer| *now == change.new || created && now.uuid == change.new.uuid;
                now.as_ref().is_some_and(|now| same(&now.value))
            };
            if changes.iter().zip(&now).all(is_ours) {
                return Ok(now.into_iter().flatten().collect());
            }
            for (table, revision) in unchanged {
                let now = current(table)?;
                if now.as_ref().is_none_or(|now| now.mod_revision != *revision) {
                    return Err(CatalogError::Conflict { table: table.clone(), current: now, resent: *in_doubt });
                }
            }
            for (TableChange { table, expected, new }, now) in changes.iter().zip(now) {
                let table = table.clone();
                match (expected, now) {
                    (Some(expected), Some(now)) if now.mod_revision == *expected => {
                        if let Some(turn) = find(&result.observed, &turn_key(new.uuid)) {
                            let turn = turn.mod_revision;
                            return Err(CatalogError::NotYourTurn { table, turn, resent: was_resent });
                        }
                    }
                    (Some(_), current) => {
                        return Err(CatalogError::Conflict { table, current, resent: *in_doubt });
                    }
                    (None, Some(current)) if *in_doubt => {
                        return Err(CatalogError::Conflict { table, current: Some(current), resent: true });
                    }
                    (None, Some(_)) => return Err(CatalogError::TableExists(table)),
                    (None, None) if find(&result.observed, &table.view_key()).is_some() => {
                        return Err(CatalogError::ViewExists(table));
                    }
                    (None, None) => {}
                }
            }
            claimed(&result).map_err(|error| error.after_doubt(was_resent))?;
            if let (true, Some(one)) = (*in_doubt, changes.first()) {
                // They may have been made, and be gone or elsewhere by now: they are not made a second time.
                return Err(CatalogError::TableNotFound(one.table.clone()));
            }
            for TableChange { table, new, .. } in changes.iter().filter(|change| change.expected.is_none()) {
                let known = stale.remove(&new.uuid);
                let now = match name_seen(&result.observed, &named_key(new.uuid)) == known {
                    true => known,
                    false => self.stale_name(table, new.uuid, deadline).await?,
                };
                stale.extend(now.map(|revision| (new.uuid, revision)));
            }
        }
        Err(self.raced("changing several tables".to_owned()))
    }

    /// Claims the next turn to swap the pointer of the table with this uuid, for `claimant`, whose id is its own.
    /// Returns the claim; `None` if it is another's turn, or the store changes one key at a time: nobody has turns there.
    ///
    /// # Errors
    /// The store's.
    pub async fn claim_turn(&self, table: Uuid, claimant: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        if !self.store.capabilities().multi_key {
            return Ok(None);
        }
        let key = turn_key(table);
        let committed = self.store.cas(&key, None, claimant.to_string().into(), deadline).await?;
        if committed.result.succeeded {
            return Ok(Some(committed.result.revision));
        }
        let held = find(&committed.result.observed, &key).filter(|e| e.value == claimant.to_string());
        Ok(held.map(|e| e.mod_revision))
    }

    /// The claim on the next turn, if there is one.
    ///
    /// # Errors
    /// The store's.
    pub async fn turn(&self, table: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        let read = self.store.get(&turn_key(table), ReadOptions::default(), deadline).await?;
        Ok(read.value.map(|e| e.mod_revision))
    }

    /// Ends a claim, if it is still that one.
    ///
    /// # Errors
    /// The store's.
    pub async fn end_turn(&self, table: Uuid, claim: Revision, deadline: Instant) -> Result<()> {
        self.store.cas_delete(&turn_key(table), Token::at(claim), deadline).await.map(drop).map_err(Into::into)
    }
}

fn turn_key(table: Uuid) -> String {
    format!("/lake/turn/{table}")
}
