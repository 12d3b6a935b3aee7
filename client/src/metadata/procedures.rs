//! Procedures as the components of a process see them.

use std::time::Instant;

use bytes::Bytes;
use lake_proto::kv::{Compare, Condition};

use super::{Metadata, MetadataWriter};
use crate::catalog::{Operation, TableIdent, TablePointer, Versioned};
use crate::procedures::purge::of_drop;
use crate::procedures::{Procedure, Record, State, calls};
use crate::store::{Error, ReadOptions};

impl Metadata {
    /// Whether the metadata has a leader who runs procedures.
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
    /// A writer whose drop of this table, at this pointer, also submits its purge; and the record of that, which an
    /// attempt leaves whose answer was lost.
    pub fn purging(&self, table: &TableIdent, pointer: &Versioned<TablePointer>, now_unix_ms: u64) -> (Self, Bytes) {
        let (id, record) = of_drop(table, &pointer.value, pointer.mod_revision, now_unix_ms);
        (self.within(Operation::submitting(&id, &record)), record.to_bytes())
    }

    /// A writer whose next change also cancels a purge, if that is still as it was read.
    pub fn undropping(&self, purge: &Procedure, now_unix_ms: u64) -> Self {
        let cancelled = Record {
            state: State::Cancelled,
            cancel: false,
            note: "the table was undropped".to_owned(),
            changed_unix_ms: now_unix_ms,
            ..purge.record.clone()
        };
        self.within(Operation::changing(&purge.id, purge.mod_revision, &cancelled))
    }
}
