//! Structural work on tables and views that is one transaction: creating, renaming and dropping them.
//!
//! Each demands that nobody holds a scope on what it touches, and that the name it takes is free in its namespace, whose
//! revision it compares: a namespace that is dropped meanwhile has the transaction fail.

use std::time::Instant;

use lake_proto::kv::{Compare, Op, Revision, Txn};

use super::error::Result;
use super::names::named_key;
use super::pointers::{Kind, encode, find, observed, pointer, written};
use super::registering::{name_is, name_seen};
use super::{Catalog, CatalogError, MAX_RACES, TableIdent, TablePointer, Versioned, claimed, stands};
use crate::store::ReadOptions;

impl Catalog {
    /// Creates a table that points at `new`.
    ///
    /// # Errors
    /// `TableExists`, `ViewExists`, `NamespaceNotFound`, `InvalidName`, `ScopeHeld`, `Registered` if another table has its uuid, or the store's.
    pub async fn create_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        table.check_new()?;
        match self.store.capabilities().multi_key {
            true => self.create(Kind::Table, table, new, deadline).await,
            false => self.make_in_steps(table, new, None, deadline).await,
        }
    }

    /// Creates a view that points at `new`.
    ///
    /// # Errors
    /// As [`Catalog::create_table`], but `Registered`.
    pub async fn create_view(
        &self,
        view: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        view.check_new()?;
        self.create(Kind::View, view, new, deadline).await
    }

    /// Creates one; a table with the name of its uuid, where that can be done at once.
    pub(super) async fn create(
        &self,
        kind: Kind,
        table: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let mut in_doubt = false;
        let created = self.create_noting(kind, table, new, &mut in_doubt, deadline).await;
        created.map_err(|error| error.after_doubt(in_doubt))
    }

    /// The same. Says whether an attempt whose answer was lost may have been applied.
    async fn create_noting(
        &self,
        kind: Kind,
        table: &TableIdent,
        new: &TablePointer,
        in_doubt: &mut bool,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let (key, other_key) = (kind.key(table), kind.other().key(table));
        let value = encode(new, &key)?;
        if kind == Kind::Table {
            self.see_to_names(deadline).await?;
        }
        let name = (kind == Kind::Table && self.store.capabilities().multi_key).then(|| named_key(new.uuid));
        let mut stale: Option<Revision> = None;
        for _ in 0..MAX_RACES {
            let namespace = self.namespace_revision(&table.namespace, deadline).await?;
            let mut when = vec![
                Compare::absent(&key),
                Compare::absent(&other_key),
                Compare::mod_revision(table.namespace.key(), namespace),
            ];
            when.extend(self.unclaimed(table.scope_path()));
            let mut then = vec![Op::put(&key, value.clone())];
            if let Some(name) = &name {
                when.push(name_is(name, stale));
                then.push(Op::put(name, key.clone()));
            }
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            if committed.result.succeeded {
                return Ok(written(new, committed.result.revision));
            }
            *in_doubt |= self.is_in_doubt(&committed);
            if let Some(current) = observed(table, &committed.result, &key)? {
                // The uuid tells: the table was created by this call, whatever was committed to it since.
                return match current.value.uuid == new.uuid {
                    true if *in_doubt => Ok(current),
                    false if *in_doubt => {
                        Err(CatalogError::Conflict { table: table.clone(), current: Some(current), resent: true })
                    }
                    _ => Err(kind.exists(table)),
                };
            }
            if find(&committed.result.observed, &other_key).is_some() {
                return Err(kind.other().exists(table));
            }
            claimed(&committed.result)?;
            if *in_doubt {
                // It may have been made, and be gone or elsewhere by now: it is not made a second time.
                return Err(kind.missing(table));
            }
            if let Some(name) = &name
                && name_seen(&committed.result.observed, name) != stale
            {
                stale = self.stale_name(table, new.uuid, deadline).await?;
            }
        }
        Err(self.raced(format!("creating {table}")))
    }

    /// Gives a table another name, in the same namespace or another one, whatever is committed to it meanwhile.
    ///
    /// # Errors
    /// `TableNotFound`, `NamespaceNotFound` (the new one), `InvalidName`, `TableExists`, `ViewExists`, `ScopeHeld`, or the store's; `Conflict` if it has
    /// left `from` after an attempt whose answer was lost, and is not at `to`: that may have moved it, and others since.
    pub async fn rename_table(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.rename(Kind::Table, from, to, deadline).await
    }

    /// Gives a view another name, as [`Catalog::rename_table`] does.
    ///
    /// # Errors
    /// As it.
    pub async fn rename_view(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.rename(Kind::View, from, to, deadline).await
    }

    async fn rename(
        &self,
        kind: Kind,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        to.check_new()?;
        let keys = [kind.key(from), kind.key(to), kind.other().key(to), to.namespace.key()];
        for _ in 0..MAX_RACES {
            let read = self.store.batch_get(&keys, ReadOptions::default(), deadline).await?;
            let Some(entry) = find(&read.value, &keys[0]) else {
                return Err(kind.missing(from));
            };
            let current = pointer(from, entry, read.revision)?;
            if find(&read.value, &keys[1]).is_some() {
                return Err(kind.exists(to));
            }
            if find(&read.value, &keys[2]).is_some() {
                return Err(kind.other().exists(to));
            }
            let Some(namespace) = find(&read.value, &keys[3]) else {
                return Err(CatalogError::NamespaceNotFound(to.namespace.clone()));
            };
            let mut when = vec![
                Compare::mod_revision(&keys[0], entry.mod_revision),
                Compare::absent(&keys[1]),
                Compare::absent(&keys[2]),
                Compare::mod_revision(&keys[3], namespace.mod_revision),
            ];
            when.extend(self.unclaimed(from.scope_path()));
            when.extend(self.unclaimed(to.scope_path()));
            let then = vec![Op::delete(&keys[0]), Op::put(&keys[1], entry.value.clone())];
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            let result = &committed.result;
            // It has left its name, by an attempt of this call whose answer was lost, or by another's renaming or drop: where it is by
            // now tells; if it is nowhere, or back, nothing does, and it is not moved a second time.
            let may_have_left = self.is_in_doubt(&committed) && !stands(result, &keys[0], entry.mod_revision);
            let moved = match may_have_left {
                true => {
                    let there = observed(to, result, &keys[1]).ok().flatten();
                    there.filter(|there| there.value.uuid == current.value.uuid)
                }
                false => result.succeeded.then(|| written(&current.value, result.revision)),
            };
            if let Some(moved) = moved {
                if kind == Kind::Table {
                    self.move_name(current.value.uuid, from, to, deadline).await;
                }
                return Ok(moved);
            }
            if may_have_left {
                return Err(CatalogError::Conflict { table: from.clone(), current: None, resent: true });
            }
            claimed(result).map_err(|error| error.after_doubt(committed.resent))?;
        }
        // Each time it stood where it was.
        Err(self.raced(format!("renaming {from} to {to}")))
    }

    /// Drops a table, if its `mod_revision` is still `expected`. Returns a revision at which it is gone.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, `TableNotFound`, `ScopeHeld`, or the store's.
    pub async fn drop_table(&self, table: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.remove(Kind::Table, table, expected, deadline).await
    }

    /// Drops a view, if its `mod_revision` is still `expected`. Returns a revision at which it is gone.
    ///
    /// # Errors
    /// As [`Catalog::drop_table`].
    pub async fn drop_view(&self, view: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.remove(Kind::View, view, expected, deadline).await
    }

    async fn remove(&self, kind: Kind, table: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        let key = kind.key(table);
        let there = match kind {
            // One that cannot be read can be dropped all the same.
            Kind::Table => self.load_table(table, deadline).await.ok().flatten(),
            Kind::View => None,
        };
        let gone: Vec<_> = there.map(|there| (key.clone(), there.value.uuid)).into_iter().collect();
        let mut when = vec![Compare::mod_revision(&key, expected)];
        when.extend(self.unclaimed(table.scope_path()));
        let txn = Txn { when, then: vec![Op::delete(&key)], otherwise: vec![] };
        let committed = self.commit(txn, deadline).await?;
        if committed.result.succeeded {
            self.forget_names(&gone, deadline).await;
            return Ok(committed.result.revision);
        }
        let in_doubt = self.is_in_doubt(&committed) && !stands(&committed.result, &key, expected);
        match observed(table, &committed.result, &key).map_err(|error| error.after_doubt(in_doubt))? {
            // The entry expected is gone, and an attempt whose answer was lost may have removed it: unless what it is a part of was not
            // done, as when another has dropped it.
            None if in_doubt => {
                self.forget_names(&gone, deadline).await;
                Ok(committed.result.revision)
            }
            None => Err(kind.missing(table)),
            Some(current) if current.mod_revision == expected => {
                claimed(&committed.result).map_err(|error| error.after_doubt(committed.resent))?;
                Err(CatalogError::Conflict { table: table.clone(), current: Some(current), resent: false })
            }
            current => Err(CatalogError::Conflict { table: table.clone(), current, resent: in_doubt }),
        }
    }
}
