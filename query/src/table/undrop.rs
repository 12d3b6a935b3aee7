//! Tables that were dropped with PURGE come back: the pointer is written again in the transaction that cancels the
//! purge, while that has not begun to delete. Where one key is changed at a time: while the purge waits anew.

use std::time::Instant;

use lake_client::catalog::{CatalogError, TableIdent, TablePointer};
use lake_client::procedures::purge::{CHECK, PURGE_TABLE, Purge, RETAIN, dropped_at};
use lake_client::procedures::{self, Procedure, State};

use super::{Tables, catalog_error};
use crate::error::{Error, Result};
use crate::outcomes::now_ms;

impl Tables {
    /// Has the table of this name that was dropped last be there again.
    ///
    /// # Errors
    /// `NotFound` if none is about to be purged; `Conflict` if files of it were deleted; `AlreadyExists`; those of
    /// creating a table.
    pub async fn undrop_table(&self, ident: &TableIdent, deadline: Instant) -> Result<()> {
        let doing = format!("undropping table {ident}");
        loop {
            let (procedure, purge) = self.last_purge(ident, deadline).await?;
            if ![RETAIN, CHECK].contains(&procedure.record.step.as_str()) {
                return Err(Error::conflict(format!(
                    "{doing}: its files are being deleted, by procedure {}",
                    procedure.id
                )));
            }
            let pointer =
                TablePointer { uuid: purge.uuid, metadata_location: purge.metadata_location, previous_location: None };
            match self.recording()?.undrop_table(ident, &procedure, &pointer, now_ms(), deadline).await {
                Ok(true) => {
                    let (uuid, procedure) = (pointer.uuid, &procedure.id);
                    tracing::info!(table = %ident, %uuid, procedure, "a dropped table is there again");
                    return Ok(());
                }
                // The purge has gone on since it was read, or by an attempt of ours it is cancelled.
                Ok(false) => {}
                Err(CatalogError::AlreadyDone(left)) if left.is_empty() || procedures::is_record(&left) => {}
                Err(CatalogError::NamespaceNotFound(schema)) => {
                    return Err(Error::not_found(format!(
                        "{doing}: schema {schema} does not exist any more; CREATE SCHEMA {schema} makes it, and then the table can be \
                         undropped"
                    )));
                }
                Err(error) => return Err(catalog_error(&doing, error)),
            }
            if Instant::now() >= deadline {
                return Err(Error::conflict(format!(
                    "{doing}: procedure {} went on again and again until the deadline; nothing was done",
                    procedure.id
                )));
            }
        }
    }

    /// The purge of the table of this name that was dropped last.
    async fn last_purge(&self, ident: &TableIdent, deadline: Instant) -> Result<(Procedure, Purge)> {
        let all = self.metadata.procedures(deadline).await;
        let all = all.map_err(|e| Error::unavailable(format!("looking for dropped tables: {e}")))?;
        let purges = all.into_iter().filter_map(|procedure| {
            let record = &procedure.record;
            let waits = record.kind == PURGE_TABLE && record.state == State::Active;
            let purge = waits.then(|| record.data::<Purge>().ok()).flatten()?;
            purge.is_of(ident).then_some((procedure, purge))
        });
        // By what no clock tells: of tables of one name, what was dropped later was changed later.
        let last = purges.max_by_key(|(procedure, purge)| dropped_at(&procedure.id, purge.uuid));
        last.ok_or_else(|| {
            Error::not_found(format!(
                "no table {ident} waits to be purged: only one that was dropped with PURGE can be undropped, while its \
                 files are there (SHOW DROPPED TABLES); one that was dropped without has all of its files, and comes back by CALL \
                 system.register_table of its newest metadata file"
            ))
        })
    }
}
