//! Appends that one node hands to another: the record, the lease it hangs on, and what is left to tidy up.
//!
//! ```text
//!  the giver                                          the node that commits
//!  ---------                                          ---------------------
//!  data files and manifest, durable
//!  puts the record, under its lease ----------------> lists records, before each commit of its own
//!  waits, at most TAKEN_WITHIN                        list and metadata with the manifests of both
//!                                                     one transaction: pointer swapped, record gone, outcome left
//!  reads the outcome, acknowledges <------------------'
//!  or: no outcome in time: commits by itself, as the same append
//! ```
//! The record names a manifest, so that whoever takes it along reads no data file and no manifest: it only puts one more line
//! into its manifest list. The manifest has neither snapshot id nor sequence number in it; both are inherited from the list
//! (Iceberg, "Sequence Number Inheritance"), so that it fits into any snapshot.
//!
//! Who may die when:
//! - the giver before it has put the record: nothing was committed, its files are orphans;
//! - the giver with the record there: somebody takes it along while the giver's lease lives (at most [`LEASE_TTL`]), or
//!   nobody ever does; its client has lost the connection and was told nothing;
//! - the giver after the outcome is there: it is committed, and was not acknowledged;
//! - the node that commits, before its transaction: the record stays, and the giver commits by itself;
//! - the node that commits, after its transaction: the giver reads the outcome;
//! - the metadata's leader: every transaction is one request of a session, made once.
//!
//! Nothing is made twice, since every transaction that makes an append demands that it has no outcome and leaves one
//! ([`lake_client::catalog::appends`]). A giver removes its files only if it knows that nobody makes its append any more:
//! because it never handed it over, or because it has withdrawn it, which leaves an outcome too.
//!
//! Outcomes are forgotten by their givers once read, [`FORGET_AT`] at a time, and by any node that has seen them for an hour.
//!
//! Limits: a record has at most [`MAX_RECORD_BYTES`], else its append is not handed over; a commit takes along at most
//! [`MAX_TAKEN`] appends of others; those left wait for the next commit, or for their own patience to end.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use iceberg::spec::{FieldSummary, ManifestContentType, ManifestFile, TableMetadata};
use lake_client::catalog::CatalogError;
use lake_client::catalog::appends::{self, Handed, Settled, Settling};
use lake_client::metadata::MetadataWriter;
use lake_client::store::{Applied, Lease};
use lake_proto::kv::Revision;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Tables;
use super::version::{Change, Tally, now_ms};
use crate::error::{Error, Result};
use crate::outcomes::FirstSeen;
use crate::planted::{self, Bug};

/// How long what is handed over outlives its giver.
pub const LEASE_TTL: Duration = Duration::from_secs(10);
/// How long a giver waits for another node's commit before it commits by itself.
pub const TAKEN_WITHIN: Duration = Duration::from_millis(400);
/// How often it looks, unless it is told of a commit before.
pub const TAKEN_POLL: Duration = Duration::from_millis(20);
/// How long withdrawing may take, beyond the deadline of its statements.
pub const WITHDRAW_WITHIN: Duration = Duration::from_millis(500);
/// Largest record.
pub const MAX_RECORD_BYTES: usize = 64 << 10;
/// Most appends of others that one commit takes along.
pub const MAX_TAKEN: usize = 64;
/// Outcomes that are forgotten together.
const FORGET_AT: usize = 250;
/// How long an outcome is kept that nobody has read.
const KEPT_FOR: Duration = Duration::from_secs(3600);
/// From one look for those to the next.
const SWEEP_EVERY: Duration = Duration::from_secs(600);
/// How long tidying up may take.
const TIDY_WITHIN: Duration = Duration::from_secs(30);
/// Most tables of which it is remembered that another node commits for this one.
const MAX_GIVING: usize = 10_000;
/// Not yet given by a manifest list.
const UNASSIGNED: i64 = -1;

/// Appends as another node could make them.
#[derive(Debug, Clone)]
pub struct Batch {
    pub id: Uuid,
    pub record: Bytes,
}

/// A manifest of added data files, as it is handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    manifest: String,
    manifest_bytes: i64,
    schema: i32,
    spec: i32,
    files: u32,
    rows: u64,
    bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partitions: Option<Vec<Bounds>>,
}

/// What a manifest list says of a partition field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Bounds {
    null: bool,
    nan: Option<bool>,
    lower: Option<Vec<u8>>,
    upper: Option<Vec<u8>>,
}

/// What is left of an append.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Left {
    at_ms: i64,
    /// The metadata that it is in; `None`: it was withdrawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    location: Option<String>,
}

impl Batch {
    /// The appends that `change` adds to a table, under a new id.
    ///
    /// # Errors
    /// `Internal`: it cannot be written down.
    pub fn new(metadata: &TableMetadata, change: &Change) -> Result<Self> {
        let added = change.added.as_ref().ok_or_else(|| Error::internal("an append without files"))?;
        let bounds = |summary: &FieldSummary| Bounds {
            null: summary.contains_null,
            nan: summary.contains_nan,
            lower: summary.lower_bound.as_ref().map(|bound| bound.to_vec()),
            upper: summary.upper_bound.as_ref().map(|bound| bound.to_vec()),
        };
        let record = Record {
            manifest: added.manifest_path.clone(),
            manifest_bytes: added.manifest_length,
            schema: metadata.current_schema_id(),
            spec: added.partition_spec_id,
            files: added.added_files_count.unwrap_or_default(),
            rows: change.added_tally.rows,
            bytes: change.added_tally.bytes,
            partitions: added.partitions.as_ref().map(|summaries| summaries.iter().map(bounds).collect()),
        };
        let record = serde_json::to_vec(&record);
        let record = record.map_err(|e| Error::internal(format!("writing down an append: {e}")))?;
        Ok(Self { id: Uuid::now_v7(), record: record.into() })
    }
}

impl Record {
    fn fits(&self, metadata: &TableMetadata) -> bool {
        self.schema == metadata.current_schema_id() && self.spec == metadata.default_partition_spec_id()
    }

    /// As a manifest list of this snapshot has it.
    fn manifest(self, snapshot_id: i64) -> ManifestFile {
        let summary = |bounds: Bounds| FieldSummary {
            contains_null: bounds.null,
            contains_nan: bounds.nan,
            lower_bound: bounds.lower.map(Into::into),
            upper_bound: bounds.upper.map(Into::into),
        };
        ManifestFile {
            manifest_path: self.manifest,
            manifest_length: self.manifest_bytes,
            partition_spec_id: self.spec,
            content: ManifestContentType::Data,
            sequence_number: UNASSIGNED,
            min_sequence_number: UNASSIGNED,
            added_snapshot_id: snapshot_id,
            added_files_count: Some(self.files),
            existing_files_count: Some(0),
            deleted_files_count: Some(0),
            added_rows_count: Some(self.rows),
            existing_rows_count: Some(0),
            deleted_rows_count: Some(0),
            partitions: self.partitions.map(|all| all.into_iter().map(summary).collect()),
            key_metadata: None,
            first_row_id: None,
        }
    }
}

/// What one attempt of a commit makes: its own appends, and those of others that it takes along.
#[derive(Debug, Default)]
pub struct Joined {
    appends: Vec<Settled>,
    /// The change with what others have added; `None`: nothing was taken along.
    pub change: Option<Change>,
}

impl Joined {
    /// Own appends, which another node may have in its list (`handed`), and with those of `others` that fit into `metadata`.
    pub fn new(
        batch: &Batch,
        own: &Change,
        metadata: &TableMetadata,
        handed: Option<Revision>,
        others: &[Handed],
    ) -> Self {
        let mut joined = Self { appends: vec![Settled { id: batch.id, handed }], change: None };
        for other in others.iter().filter(|other| other.id != batch.id).take(MAX_TAKEN) {
            let record = match serde_json::from_slice::<Record>(&other.value) {
                Ok(record) => record,
                Err(error) => {
                    tracing::warn!(append = %other.id, %error, "an append that was handed over cannot be understood and is left");
                    continue;
                }
            };
            // Its giver is told by its own attempt what does not fit.
            if !record.fits(metadata) {
                continue;
            }
            let change = joined.change.get_or_insert_with(|| own.clone());
            change.added_tally += Tally { files: record.files.into(), rows: record.rows, bytes: record.bytes };
            change.taken.push(record.manifest(own.snapshot_id));
            if !planted::has(Bug::AppendUnsettled) {
                joined.appends.push(Settled { id: other.id, handed: Some(other.revision) });
            }
        }
        joined
    }

    /// What the swap to the metadata at `location` settles.
    pub fn settling(&self, location: &str) -> Settling {
        let left = match self.appends.is_empty() {
            true => Bytes::new(),
            false => left(Some(location)),
        };
        Settling { appends: self.appends.clone(), outcome: left }
    }
}

fn left(location: Option<&str>) -> Bytes {
    let left = Left { at_ms: now_ms(), location: location.map(str::to_owned) };
    // Numbers and text are always JSON.
    serde_json::to_vec(&left).unwrap_or_default().into()
}

/// The metadata that an append is in, by its outcome; `None`: it was withdrawn.
///
/// # Errors
/// `Corrupt`: the outcome is damaged.
pub fn made_in(outcome: &[u8]) -> Result<Option<String>> {
    let left = serde_json::from_slice::<Left>(outcome);
    left.map(|left| left.location).map_err(|e| Error::corrupt(format!("the outcome of an append is damaged: {e}")))
}

/// What became of handing over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// The record is not there, and will not be.
    No,
    /// It may be there.
    Perhaps,
    /// It is, in this state, unless it was taken along or its lease is over.
    Yes(Revision),
}

/// What a node has to do with handing over: its lease, and outcomes to be forgotten.
#[derive(Debug, Default)]
pub struct Handing {
    lease: tokio::sync::Mutex<Option<Lease>>,
    /// Tables whose last batch another node has taken along: the next is handed over without being tried.
    giving: Mutex<HashSet<Uuid>>,
    tidy: Mutex<Tidy>,
    /// Outcomes that nobody has read.
    seen: FirstSeen,
}

#[derive(Debug, Default)]
struct Tidy {
    read: Vec<(Uuid, Revision)>,
    swept: Option<Instant>,
}

impl Handing {
    /// Whether another node takes this one's appends to a table along.
    pub fn is_giving(&self, table: Uuid) -> bool {
        self.giving.lock().unwrap_or_else(PoisonError::into_inner).contains(&table)
    }

    /// Another node has taken this one's appends to a table along, or has not.
    pub fn set_giving(&self, table: Uuid, taken: bool) {
        let mut giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        if !taken {
            giving.remove(&table);
            return;
        }
        if giving.len() >= MAX_GIVING {
            giving.clear();
        }
        giving.insert(table);
    }

    /// Hands a batch over.
    pub async fn give(&self, writer: &MetadataWriter, table: Uuid, batch: &Batch, deadline: Instant) -> Given {
        if batch.record.len() > MAX_RECORD_BYTES {
            return Given::No;
        }
        let lease = {
            let mut held = self.lease.lock().await;
            match writer.lease(*held, LEASE_TTL, "lake query: appends", deadline).await {
                Ok(lease) => held.insert(lease).id,
                Err(error) => {
                    *held = None;
                    tracing::debug!(%error, "no lease for handing over appends");
                    return Given::No;
                }
            }
        };
        match writer.hand_over(table, batch.id, batch.record.clone(), lease, deadline).await {
            Ok(Some(revision)) => Given::Yes(revision),
            Ok(None) => {
                // It may be renewed in vain otherwise.
                self.lease.lock().await.take();
                Given::No
            }
            Err(error) => {
                tracing::debug!(%error, "handing over appends failed");
                match error.applied() {
                    Applied::No => Given::No,
                    Applied::Unknown => Given::Perhaps,
                }
            }
        }
    }

    /// Withdraws a batch. `None`: it is, and nobody makes it any more; else the metadata that it is in.
    ///
    /// # Errors
    /// The catalog's: neither is known.
    pub async fn withdraw(writer: &MetadataWriter, table: Uuid, batch: &Batch) -> Result<Option<String>, CatalogError> {
        let deadline = Instant::now() + WITHDRAW_WITHIN;
        let outcome = writer.withdraw(table, batch.id, left(None), deadline).await?;
        made_in(&outcome).map_err(|e| CatalogError::Damaged { what: format!("append {}", batch.id), why: e.message })
    }

    /// Takes away the record of a batch that is made and may have stayed, and then, if it is of no use any more, forgets the outcome,
    /// which was left at this revision.
    pub fn take_back(tables: &Tables, table: Uuid, id: Uuid, forget: Option<Revision>) {
        let writer = tables.writer.clone();
        tables.tasks.spawn(async move {
            let by = Instant::now() + TIDY_WITHIN;
            let taken = async {
                writer.withdraw(table, id, left(None), by).await?;
                let read: Vec<_> = forget.into_iter().map(|revision| (id, revision)).collect();
                writer.forget_appends(&read, by).await
            };
            if let Err(error) = taken.await {
                tracing::debug!(%error, append = %id, "the record of an append that was made stays until its lease is over");
            }
        });
    }

    /// The outcome of a batch has been read, and is of no use to anybody any more.
    pub fn forget(tables: &Tables, id: Uuid, revision: Revision) {
        let (read, sweep) = {
            let mut tidy = tables.handing.tidy.lock().unwrap_or_else(PoisonError::into_inner);
            tidy.read.push((id, revision));
            let sweep = tidy.swept.is_none_or(|at| at.elapsed() >= SWEEP_EVERY);
            if sweep {
                tidy.swept = Some(Instant::now());
            }
            let read = if tidy.read.len() >= FORGET_AT { std::mem::take(&mut tidy.read) } else { Vec::new() };
            (read, sweep)
        };
        if read.is_empty() && !sweep {
            return;
        }
        let (writer, handing) = (tables.writer.clone(), tables.handing.clone());
        tables.tasks.spawn(async move {
            let by = Instant::now() + TIDY_WITHIN;
            if let Err(error) = writer.forget_appends(&read, by).await {
                tracing::debug!(%error, "outcomes of appends stay until they are old");
            }
            if sweep {
                handing.seen.begin_look();
                let is_old = |kept: &[u8]| handing.seen.is_older(kept, KEPT_FOR);
                if let Err(error) = writer.forget_outcomes(appends::DOMAIN, is_old, by).await {
                    tracing::debug!(%error, "outcomes of appends could not be looked through");
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_the_manifest_again() {
        let manifest = ManifestFile {
            manifest_path: "file:///t/metadata/m0.avro".into(),
            manifest_length: 77,
            partition_spec_id: 3,
            content: ManifestContentType::Data,
            sequence_number: UNASSIGNED,
            min_sequence_number: UNASSIGNED,
            added_snapshot_id: 9,
            added_files_count: Some(2),
            existing_files_count: Some(0),
            deleted_files_count: Some(0),
            added_rows_count: Some(5),
            existing_rows_count: Some(0),
            deleted_rows_count: Some(0),
            partitions: Some(vec![FieldSummary {
                contains_null: true,
                contains_nan: None,
                lower_bound: Some(vec![1, 255].into()),
                upper_bound: None,
            }]),
            key_metadata: None,
            first_row_id: None,
        };
        let bounds = Bounds { null: true, nan: None, lower: Some(vec![1, 255]), upper: None };
        let record = Record {
            manifest: manifest.manifest_path.clone(),
            manifest_bytes: 77,
            schema: 0,
            spec: 3,
            files: 2,
            rows: 5,
            bytes: 10,
            partitions: Some(vec![bounds]),
        };
        let json = serde_json::to_vec(&record).unwrap();
        assert_eq!(serde_json::from_slice::<Record>(&json).unwrap().manifest(9), manifest);
    }

    #[test]
    fn an_outcome_says_where_or_that_it_was_withdrawn() {
        assert_eq!(made_in(&left(Some("file:///m"))).unwrap().as_deref(), Some("file:///m"));
        assert_eq!(made_in(&left(None)).unwrap(), None);
        assert!(made_in(b"x").is_err());
    }
}
