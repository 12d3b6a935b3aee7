//! Procedures as the components of a process see them.

use std::time::Instant;

use bytes::Bytes;
use lake_proto::kv::{Compare, Condition, Op, Txn};

use super::{Metadata, MetadataWriter};
use crate::catalog::{CatalogError, Operation, TableIdent, TablePointer, Versioned};
use crate::procedures::purge::{CHECK, RETAIN, of_drop};
use crate::procedures::{Procedure, Record, State, calls, key};
use crate::store::{Error, ReadOptions};

impl Metadata {
    /// Whether the metadata has a leader who runs procedures of all kinds. Without one a janitor sees to purges of tables, and nobody to
    /// others.
    pub fn runs_procedures(&self) -> bool {
        self.capabilities().scopes
    }

    /// All procedures, in order of their ids.
    ///
    /// # Errors
    /// The store's.
    pub async fn procedures(&self, deadline: Instant) -> Result<Vec<Procedure>, Error> {
        Ok(calls::list(self.catalog.store().as_ref(), ReadOptions::default(), deadline).await?.value)
    }

    /// Those whose id begins so, and the compare that holds until one of them goes on or another comes.
    ///
    /// # Errors
    /// The store's.
    pub async fn procedures_of(&self, ids: &str, deadline: Instant) -> Result<(Vec<Procedure>, Compare), Error> {
        let key = crate::procedures::key(ids);
        let read = self.catalog.store().list_all(&key, ReadOptions::default(), deadline).await?;
        let unchanged = Compare { key, condition: Condition::PrefixUnchangedSince(read.revision) };
        Ok((read.value.iter().filter_map(Procedure::of).collect(), unchanged))
    }

    /// One of them.
    ///
    /// # Errors
    /// The store's.
    pub async fn procedure(&self, id: &str, deadline: Instant) -> Result<Option<Procedure>, Error> {
        calls::get(self.catalog.store().as_ref(), id, deadline).await
    }
}

impl MetadataWriter {
    fn is_one_key(&self) -> bool {
        !self.metadata.capabilities().multi_key
    }

    /// A writer whose drop of this table, at this pointer, also submits its purge; and the record of that, which an
    /// attempt leaves whose answer was lost. Over a store that changes one key at a time it only drops, and then
    /// [`MetadataWriter::purge_dropped`] is called.
    pub fn purging(&self, table: &TableIdent, pointer: &Versioned<TablePointer>, now_unix_ms: u64) -> (Self, Bytes) {
        let (id, record) = of_drop(table, &pointer.value, pointer.mod_revision, now_unix_ms);
        let writer = if self.is_one_key() { self.clone() } else { self.within(Operation::submitting(&id, &record)) };
        (writer, record.to_bytes())
    }

    /// Submits the purge of a table that this writer has dropped, at this pointer, where that was no part of the drop. Asked for again, it
    /// changes nothing.
    ///
    /// Not before the drop: whoever ends between the two leaves files that stay, and never the purge of a table that lives on, and that
    /// somebody may drop later in order to keep its files.
    ///
    /// # Errors
    /// The store's: the files stay, or nobody knows.
    pub async fn purge_dropped(
        &self,
        table: &TableIdent,
        pointer: &Versioned<TablePointer>,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<(), Error> {
        if !self.is_one_key() {
            return Ok(());
        }
        let (id, record) = of_drop(table, &pointer.value, pointer.mod_revision, now_unix_ms);
        calls::submit(self.catalog().store().as_ref(), &id, &record, deadline).await.map(drop)
    }

    /// Has a table that was dropped be there again, at this pointer, and cancels its purge, if that has not begun to delete. False: it has
    /// gone on since it was read, and nothing was done.
    ///
    /// Over a store that changes one key at a time these are three changes: the retention begins anew, so that nothing is deleted
    /// meanwhile; the table is made; the purge is cancelled. Whoever ends in between leaves a table that can be undropped still, or one that
    /// is there, and whose purge is refused.
    ///
    /// # Errors
    /// Those of [`MetadataWriter::create_table`]; `AlreadyDone` if the purge has gone on, which says no more than false.
    pub async fn undrop_table(
        &self,
        table: &TableIdent,
        purge: &Procedure,
        pointer: &TablePointer,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<bool, CatalogError> {
        if !waits(&purge.record) {
            return Ok(false);
        }
        if !self.is_one_key() {
            let cancels = Operation::changing(&purge.id, purge.mod_revision, &undropped(&purge.record, now_unix_ms));
            return self.within(cancels).create_table(table, pointer, deadline).await.map(|_| true);
        }
        let there = self.catalog().load_table(table, deadline).await?;
        let made = match there {
            // By somebody who has ended before the purge was cancelled.
            Some(there) if there.value.uuid == pointer.uuid => None,
            Some(_) => return Err(CatalogError::TableExists(table.clone())),
            None => {
                let anew = Record {
                    step: RETAIN.to_owned(),
                    accepted_ms: None,
                    due_ms: None,
                    seen_unix_ms: None,
                    changed_unix_ms: now_unix_ms,
                    ..purge.record.clone()
                };
                if self.change_procedure(purge, &anew, deadline).await?.is_none() {
                    return Ok(false);
                }
                Some(self.create_table(table, pointer, deadline).await?)
            }
        };
        loop {
            let now = calls::get(self.catalog().store().as_ref(), &purge.id, deadline).await?;
            let Some(now) = now.filter(|now| !has_ended_in_time(&now.record)) else { return Ok(true) };
            if !waits(&now.record) {
                // The retention was over before the table was there: shorter than a statement may take.
                if let Some(made) = &made {
                    self.drop_table(table, made.mod_revision, deadline).await?;
                }
                return Ok(false);
            }
            if self.change_procedure(&now, &undropped(&now.record, now_unix_ms), deadline).await?.is_some() {
                return Ok(true);
            }
        }
    }

    /// Puts a record in the place of the one that was read, if that is still there and the guards of this writer hold; over a store that
    /// changes one key at a time those are looked up right before. `None`: it is another by now.
    ///
    /// # Errors
    /// `Fenced` if a guard does not hold; the store's.
    pub async fn change_procedure(
        &self,
        before: &Procedure,
        next: &Record,
        deadline: Instant,
    ) -> Result<Option<Procedure>, CatalogError> {
        let result = self.catalog().commit(next.change(&before.id, before.mod_revision), deadline).await?.result;
        if result.succeeded {
            let (id, mod_revision) = (before.id.clone(), result.revision);
            return Ok(Some(Procedure { id, mod_revision, record: next.clone() }));
        }
        let own = key(&before.id);
        let there = result.observed.iter().find(|entry| entry.key == own).and_then(Procedure::of);
        // By an attempt whose answer was lost.
        Ok(there.filter(|there| there.record == *next))
    }

    /// Forgets a procedure, if it is as it was read and the guards of this writer hold.
    ///
    /// # Errors
    /// As [`MetadataWriter::change_procedure`].
    pub async fn forget_procedure(&self, read: &Procedure, deadline: Instant) -> Result<(), CatalogError> {
        let own = key(&read.id);
        let when = vec![Compare::mod_revision(&own, read.mod_revision)];
        let txn = Txn { when, then: vec![Op::delete(&own)], otherwise: vec![] };
        self.catalog().commit(txn, deadline).await.map(drop)
    }
}

/// Whether a purge has deleted nothing yet.
fn waits(purge: &Record) -> bool {
    purge.state == State::Active && [RETAIN, CHECK].contains(&purge.step.as_str())
}

/// Whether a purge has ended, and had deleted nothing.
fn has_ended_in_time(purge: &Record) -> bool {
    let is_early = purge.state == State::Cancelled || [RETAIN, CHECK].contains(&purge.step.as_str());
    purge.state.is_ended() && is_early
}

fn undropped(purge: &Record, now_unix_ms: u64) -> Record {
    Record {
        state: State::Cancelled,
        cancel: false,
        note: "the table was undropped".to_owned(),
        changed_unix_ms: now_unix_ms,
        ..purge.clone()
    }
}
