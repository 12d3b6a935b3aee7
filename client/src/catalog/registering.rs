//! A table has one name: none is made under the uuid of another. Two would change it without each other's knowledge, and what one of
//! them refers to would be an orphan to the other.
//!
//! `/lake/named/<uuid>` says which table has a uuid: the key of its pointer. A table is made together with it, so one lookup tells of
//! another. It counts while that table has that uuid; one that is left behind, by a process that ended or a table that was renamed,
//! counts as none once a listing has shown that no table has the uuid. Tables from before there were names have none. So whoever is the
//! first to make a table looks through all there are, gives those theirs, and leaves word that it is done.
//!
//! ```text
//!   a transaction:      name and pointer together --- there is a name ---> its table, or any, has the uuid: `Registered`
//!                                `----------------------------------------- none has: in its place
//!   one key at a time:  name -> pointer -> is it the name still? yes: made
//!                                            `--- no: the pointer goes again, `Registered`
//! ```
//! So over a store that changes one key at a time at most one of those who make tables of one uuid at the same moment is told that it
//! has. A process that ends before its last look may leave a second table, if another took its name meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use lake_proto::kv::{Compare, Expected, KeyValue, Op, Revision, Txn};
use uuid::Uuid;

use super::error::Result;
use super::names::{ALL_NAMED, TABLES, named_key};
use super::pointers::{Kind, encode, find, observed, written};
use super::{Catalog, CatalogError, MAX_RACES, TableIdent, TablePointer, Versioned, claimed};
use crate::store::{Applied, ReadOptions, Token};

/// Names that are given in one transaction.
const NAMED_AT_A_TIME: usize = 50;

impl Catalog {
    /// Creates a table of metadata that is there already, or puts it in the place of what `table` is at the revision
    /// `expected`. No table of another name may have its uuid.
    ///
    /// # Errors
    /// `Registered`, those of [`Catalog::create_table`] or [`Catalog::swap_table`].
    pub async fn register_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        expected: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let Some(expected) = expected else { return self.create_table(table, new, deadline).await };
        let there = self.load_table(table, deadline).await?;
        match there.filter(|there| there.mod_revision == expected && there.value.uuid != new.uuid) {
            Some(old) => self.replace(table, &old, new, deadline).await,
            // Another version of the same table; or not what was expected, and then this says what is there.
            None => self.swap_table(table, expected, new, None, deadline).await,
        }
    }

    /// Puts a table of another uuid in the place of `old`.
    async fn replace(
        &self,
        table: &TableIdent,
        old: &Versioned<TablePointer>,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        if !self.store.capabilities().multi_key {
            return self.make_in_steps(table, new, Some(old), deadline).await;
        }
        self.see_to_names(deadline).await?;
        let (key, name) = (table.key(), named_key(new.uuid));
        let gone = [(key.clone(), old.value.uuid)];
        let mut stale = self.stale_name(table, new.uuid, deadline).await?;
        for _ in 0..MAX_RACES {
            let mut txn = Txn {
                when: vec![Compare::mod_revision(&key, old.mod_revision), name_is(&name, stale)],
                then: vec![Op::put(&key, encode(new, &key)?), Op::put(&name, key.clone())],
                otherwise: vec![],
            };
            // One table goes, and another comes.
            txn.when.extend(self.unclaimed(table.scope_path()));
            let committed = self.commit(txn, deadline).await?;
            let resent = self.is_in_doubt(&committed);
            let result = committed.result;
            if result.succeeded {
                self.forget_names(&gone, deadline).await;
                return Ok(written(new, result.revision));
            }
            match observed(table, &result, &key).map_err(|error| error.after_doubt(resent))? {
                // By an attempt of this call whose answer was lost.
                Some(current) if current.value == *new => {
                    self.forget_names(&gone, deadline).await;
                    return Ok(current);
                }
                Some(current) if current.mod_revision == old.mod_revision => {}
                current => return Err(CatalogError::Conflict { table: table.clone(), current, resent }),
            }
            claimed(&result)?;
            stale = self.stale_name(table, new.uuid, deadline).await?;
        }
        Err(self.raced(format!("registering {table}")))
    }

    /// Makes a table where one key is changed at a time.
    pub(super) async fn make_in_steps(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        old: Option<&Versioned<TablePointer>>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let key = table.key();
        let taken = self.take_name(table, new.uuid, deadline).await?;
        let made = match old {
            None => self.create(Kind::Table, table, new, deadline).await,
            Some(old) => self.swap_table(table, old.mod_revision, new, None, deadline).await,
        };
        let made = match made {
            Ok(made) => made,
            Err(error) => {
                if error.applied() == Applied::No {
                    self.give_name_back(table, new.uuid, taken, deadline).await;
                }
                return Err(error);
            }
        };
        let unknown = || CatalogError::Conflict { table: table.clone(), current: None, resent: true };
        let read = self.store.get(&named_key(new.uuid), ReadOptions::default(), deadline).await;
        let name = read.map_err(|_| unknown())?.value;
        if name.as_ref().is_some_and(|name| name.value == key) {
            if let Some(old) = old {
                self.forget_names(&[(key, old.value.uuid)], deadline).await;
            }
            return Ok(made);
        }
        let undo = match old {
            None => self.store.cas_delete(&key, Token::at(made.mod_revision), deadline).await,
            Some(old) => {
                let value = Bytes::from(encode(&old.value, &key)?);
                self.store.cas(&key, Some(Token::at(made.mod_revision)), value, deadline).await
            }
        };
        match undo {
            Ok(undone) if undone.result.succeeded => {
                let other = name.and_then(|name| named(&name.value)).unwrap_or_else(|| table.clone());
                Err(CatalogError::Registered(other))
            }
            _ => Err(unknown()),
        }
    }

    /// Takes the name of a uuid that no other table has. Returns the revision at which it is taken.
    async fn take_name(&self, table: &TableIdent, uuid: Uuid, deadline: Instant) -> Result<Revision> {
        self.see_to_names(deadline).await?;
        let (key, name) = (table.key(), named_key(uuid));
        let mut stale: Option<Revision> = None;
        for _ in 0..MAX_RACES {
            let value = Bytes::from(key.clone());
            let result = self.store.cas(&name, stale.map(Token::at), value, deadline).await?.result;
            if !result.succeeded {
                stale = self.stale_name(table, uuid, deadline).await?;
                continue;
            }
            // Whoever had it may have made a table after the look, and have seen that it had it still.
            if stale.is_some()
                && let Some(other) = self.table_with(uuid, &[], deadline).await?.filter(|other| other != table)
            {
                let value = Bytes::from(other.key());
                // Where it stays as it is, it is one that is left behind.
                let _ = self.store.cas(&name, Some(Token::at(result.revision)), value, deadline).await;
                return Err(CatalogError::Registered(other));
            }
            return Ok(result.revision);
        }
        Err(self.raced(format!("making {table}")))
    }

    /// Lets a name go again that was taken for a table that was not made.
    async fn give_name_back(&self, table: &TableIdent, uuid: Uuid, taken: Revision, deadline: Instant) {
        let Ok(there) = self.load_table(table, deadline).await else { return };
        if there.is_none_or(|there| there.value.uuid != uuid) {
            let _ = self.store.cas_delete(&named_key(uuid), Token::at(taken), deadline).await;
        }
    }

    /// Sees to it that every table's uuid has its name: what is made under the uuid of one that has none would be taken for the
    /// first. It is a look through all tables once for a store, later a look for the word that it is done, once for a process.
    ///
    /// # Errors
    /// The store's; none says that anything may have been made, since names are no tables.
    pub(super) async fn see_to_names(&self, deadline: Instant) -> Result<()> {
        if self.all_named.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.store.get(ALL_NAMED, ReadOptions::default(), deadline).await?.value.is_none() {
            let read = self.store.list_all(TABLES, ReadOptions::default(), deadline).await?;
            let name = |entry: &KeyValue| {
                let there = serde_json::from_slice::<TablePointer>(&entry.value).ok()?;
                Some((named_key(there.uuid), entry.key.clone()))
            };
            let names: BTreeMap<String, String> = read.value.iter().filter_map(name).collect();
            let names: Vec<(String, String)> = names.into_iter().collect();
            for some in names.chunks(NAMED_AT_A_TIME) {
                self.give_names(some, deadline).await?;
            }
            if !names.is_empty() {
                // Without the word the next process looks again.
                let _ = self.store.cas(ALL_NAMED, None, Bytes::from_static(b"all"), deadline).await;
            }
        }
        self.all_named.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Gives tables, by the names of their uuids, those that they have not. Where a table is renamed or dropped meanwhile the name
    /// is one that is left behind.
    async fn give_names(&self, tables: &[(String, String)], deadline: Instant) -> Result<()> {
        let names: Vec<String> = tables.iter().map(|(name, _)| name.clone()).collect();
        for _ in 0..MAX_RACES {
            let read = self.store.batch_get(&names, ReadOptions::default(), deadline).await?;
            let mut missing = tables.iter().filter(|(name, _)| find(&read.value, name).is_none());
            let given: Vec<_> = match self.store.capabilities().multi_key {
                true => missing.collect(),
                false => missing.next().into_iter().collect(),
            };
            if given.is_empty() {
                return Ok(());
            }
            let when = given.iter().map(|(name, _)| Compare::absent(name)).collect();
            let then = given.iter().map(|(name, key)| Op::put(name, key.clone())).collect();
            // What it did the next look tells.
            if let Err(error) = self.store.commit(Txn { when, then, otherwise: vec![] }, deadline).await
                && error.applied() == Applied::No
            {
                return Err(error.into());
            }
        }
        Err(self.raced("naming the tables that are there".to_owned()))
    }

    /// The revision of a name that is left behind, or is of `table` itself; `None`: there is none.
    ///
    /// # Errors
    /// `Registered`: it is another table's; the store's.
    pub(super) async fn stale_name(
        &self,
        table: &TableIdent,
        uuid: Uuid,
        deadline: Instant,
    ) -> Result<Option<Revision>> {
        let read = self.store.get(&named_key(uuid), ReadOptions::default(), deadline).await?;
        let Some(name) = read.value else { return Ok(None) };
        match self.table_with(uuid, &name.value, deadline).await? {
            Some(other) if other != *table => Err(CatalogError::Registered(other)),
            _ => Ok(Some(name.mod_revision)),
        }
    }

    /// The table that has this uuid: the one that its name says, or whichever it is.
    async fn table_with(&self, uuid: Uuid, name: &[u8], deadline: Instant) -> Result<Option<TableIdent>> {
        // A damaged one does not say whose it is, and is not what keeps another from being brought back.
        let has = |value: &[u8]| serde_json::from_slice::<TablePointer>(value).is_ok_and(|there| there.uuid == uuid);
        if let Some(table) = named(name) {
            let read = self.store.get(&table.key(), ReadOptions::default(), deadline).await?;
            if read.value.is_some_and(|entry| has(&entry.value)) {
                return Ok(Some(table));
            }
        }
        let read = self.store.list_all(TABLES, ReadOptions::default(), deadline).await?;
        let found = read.value.iter().find(|entry| has(&entry.value));
        Ok(found.and_then(|entry| TableIdent::from_key(&entry.key)))
    }

    /// Lets the names of tables go that are gone, by their keys and uuids. One that stays counts as none.
    pub(super) async fn forget_names(&self, gone: &[(String, Uuid)], deadline: Instant) {
        if gone.is_empty() {
            return;
        }
        let gone: HashMap<String, &String> = gone.iter().map(|(key, uuid)| (named_key(*uuid), key)).collect();
        let names: Vec<String> = gone.keys().cloned().collect();
        let Ok(read) = self.store.batch_get(&names, ReadOptions::default(), deadline).await else { return };
        let theirs = read.value.into_iter().filter(|name| gone.get(&name.key).is_some_and(|key| name.value == **key));
        let theirs: Vec<(String, Revision)> = theirs.map(|name| (name.key, name.mod_revision)).collect();
        let _ = self.forget(&theirs, deadline).await;
    }

    /// Has the name of a table's uuid follow a renaming, or gives it one. One that does not follow is found by a listing.
    pub(super) async fn move_name(&self, uuid: Uuid, from: &TableIdent, to: &TableIdent, deadline: Instant) {
        let name = named_key(uuid);
        let Ok(read) = self.store.get(&name, ReadOptions::default(), deadline).await else { return };
        if read.value.as_ref().is_none_or(|there| there.value == from.key()) {
            let _ = self.store.cas(&name, read.value.as_ref().map(Token::of), Bytes::from(to.key()), deadline).await;
        }
    }
}

/// Demands that a name is the one that is left behind, or is not there.
pub(super) fn name_is(name: &str, stale: Option<Revision>) -> Compare {
    Compare::expected(name, stale.map_or(Expected::Absent, Expected::ModRevision))
}

/// The revision of a name among what a transaction observed.
pub(super) fn name_seen(observed: &[KeyValue], name: &str) -> Option<Revision> {
    find(observed, name).map(|entry| entry.mod_revision)
}

/// The table that a name says.
fn named(value: &[u8]) -> Option<TableIdent> {
    TableIdent::from_key(std::str::from_utf8(value).ok()?)
}
