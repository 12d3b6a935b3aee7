//! A part of the purge of a table that was dropped ([`lake_client::procedures::purge`]; semantics, section 13).
//!
//! What is deleted is what the table's own metadata reaches, inside of its own location, and no live table refers to:
//! - checking looks through every live table: one that lives in the location, or is the same table, has the purge
//!   refused; what another one refers to in there stays;
//! - deleting goes from what nothing else is found by to what the rest is found by: data and delete files, manifests,
//!   manifest lists and statistics, metadata files, and the metadata that the pointer led to at the very end. The next
//!   kind begins only once it is committed that the one before is done; so what is left of a part that was cut short
//!   can always be found again.
//!
//! Uploads to the location that were not completed are aborted. Where files are in directories, those that are left empty inside of the location go, too.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{ManifestFile, TableMetadata};
use lake_client::catalog::{TableIdent, TablePointer, Versioned};
use lake_client::procedures::State;
use lake_client::procedures::purge::{Answer, CHECK, DELETE, MAX_KEPT, Part, Purge, Task};

use super::ASK;
use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::storage::canonical;
use crate::table::{Tables, catalog_error, steps};

/// Live tables that are looked at before the time is.
const TABLES_AT_A_TIME: usize = 32;
/// Live tables that are looked at together.
const TABLES_IN_FLIGHT: usize = 4;
/// Files that are deleted before the time is looked at.
const FILES_AT_A_TIME: usize = 500;
/// Requests to the store at a time.
const REQUESTS: usize = 16;

/// Does a part of the step, until about `until`.
///
/// # Errors
/// What could not be read or deleted: it may be tried again.
pub async fn part(tables: &Tables, task: Task, until: Instant) -> Result<Answer> {
    let Task { id, step, purge } = task;
    let doing = |e: Error| e.while_doing(format_args!("purging table {}", purge.table));
    let procedure = tables.metadata.procedure(&id, Instant::now() + ASK).await;
    let procedure =
        procedure.map_err(|e| Error::unavailable(e).while_doing(format_args!("looking up procedure {id}")))?;
    // Told by a leader that did not know that it was none any more, or that was asked to cancel it.
    let is_so = procedure.is_some_and(|p| p.record.state == State::Active && p.record.step == step && !p.record.cancel);
    if !is_so {
        return Ok(Answer::Over);
    }
    let metadata = match tables.cache.table(&purge.metadata_location).await {
        Ok(metadata) => metadata,
        // It goes last.
        Err(error) if error.kind == Kind::NotFound && step == DELETE && purge.cursor.part == Part::Metadata => {
            return Ok(Answer::Done(Box::new(purge)));
        }
        Err(error) if error.kind == Kind::NotFound => {
            let why = format!("its metadata {} is gone, and with it what its files were", purge.metadata_location);
            return Ok(if step == CHECK { Answer::Refused(why) } else { Answer::Doubtful(why) });
        }
        Err(error) => return Err(doing(error)),
    };
    match step.as_str() {
        CHECK => check(tables, &metadata, purge.clone(), until).await.map_err(doing),
        DELETE => delete(tables, &metadata, purge.clone(), until).await.map_err(doing),
        other => Err(Error::not_supported(format!("this node knows no step {other} of a purge"))),
    }
}

/// The directory of a table's location. Here all locations are compared in their one spelling.
fn directory(metadata: &TableMetadata) -> String {
    format!("{}/", canonical(metadata.location().trim_end_matches('/')))
}

// ---- checking -------------------------------------------------------------------------------------------------

async fn check(tables: &Tables, metadata: &TableMetadata, mut purge: Purge, until: Instant) -> Result<Answer> {
    let own = directory(metadata);
    if own.trim_end_matches('/').ends_with(':') || tables.storage.resolve(&own)?.path.as_ref().is_empty() {
        return Ok(Answer::Refused(format!("its location {own} is the root of a store")));
    }
    // Linearizable, and after the drop: a table that comes later is a table of another location.
    let mut live: Vec<TableIdent> = tables.list(Instant::now() + ASK).await?.into_iter().flat_map(|(_, t)| t).collect();
    live.sort_unstable();
    let position = |ident: &TableIdent| (ident.namespace.levels().to_vec(), ident.name.clone());
    let rest = match &purge.cursor.after {
        Some(after) => live.partition_point(|ident| position(ident) <= *after),
        None => 0,
    };
    for some in live[rest..].chunks(TABLES_AT_A_TIME) {
        let pointers = tables.metadata.read_tables(some, Instant::now() + ASK).await;
        let pointers = pointers.map_err(|e| catalog_error("looking up the live tables", e))?;
        let this = &purge;
        let found: Vec<Found> = futures::stream::iter(some.iter().cloned().zip(pointers))
            .map(|(ident, pointer)| look_at(tables, this, &own, ident, pointer))
            .buffered(TABLES_IN_FLIGHT)
            .try_collect()
            .await?;
        for found in found {
            match found {
                Found::Uses(files) => purge.kept.extend(files),
                Found::LivesThere(why) => return Ok(Answer::Refused(why)),
            }
        }
        purge.kept.sort_unstable();
        purge.kept.dedup();
        if purge.kept.len() > MAX_KEPT {
            let why = format!("other tables refer to more than {MAX_KEPT} of its files: nothing was deleted");
            return Ok(Answer::Refused(why));
        }
        purge.cursor.after = some.last().map(position);
        if Instant::now() >= until {
            return Ok(Answer::Part(Box::new(purge)));
        }
    }
    purge.cursor.after = None;
    steps::reached("purge-checked");
    Ok(Answer::Done(Box::new(purge)))
}

enum Found {
    /// It refers to these files in the location.
    Uses(Vec<String>),
    LivesThere(String),
}

/// What a live table has to do with the location of the one that is purged.
async fn look_at(
    tables: &Tables,
    purge: &Purge,
    own: &str,
    ident: TableIdent,
    pointer: Option<Versioned<TablePointer>>,
) -> Result<Found> {
    // Dropped since the listing.
    let Some(pointer) = pointer else { return Ok(Found::Uses(Vec::new())) };
    let pointer = pointer.value;
    if pointer.uuid == purge.uuid {
        return Ok(Found::LivesThere(format!("table {ident} is the same table: it was registered again")));
    }
    let doing = |e: Error| e.while_doing(format_args!("looking for files in {own} that table {ident} refers to"));
    let metadata = tables.cache.table(&pointer.metadata_location).await.map_err(doing)?;
    let theirs = directory(&metadata);
    if canonical(&pointer.metadata_location).starts_with(own) || theirs.starts_with(own) || own.starts_with(&theirs) {
        return Ok(Found::LivesThere(format!("table {ident} lives in {theirs}, and this one in {own}")));
    }
    let mut used: Vec<String> = Vec::new();
    let mut note = |location: &str| {
        let location = canonical(location);
        if location.starts_with(own) && used.len() <= MAX_KEPT {
            used.push(location);
        }
    };
    beside_snapshots(&metadata).for_each(&mut note);
    metadata.snapshots().for_each(|snapshot| note(snapshot.manifest_list()));
    for manifest in manifests(tables, &metadata).await.map_err(doing)?.values() {
        note(&manifest.manifest_path);
        let entries = tables.cache.manifest(manifest).await.map_err(doing)?;
        entries.entries().iter().for_each(|entry| note(entry.file_path()));
    }
    Ok(Found::Uses(used))
}

/// The metadata and statistics files that a table's metadata names.
fn beside_snapshots(metadata: &TableMetadata) -> impl Iterator<Item = &str> {
    let older = metadata.metadata_log().iter().map(|entry| entry.metadata_file.as_str());
    older.chain(statistics(metadata))
}

fn statistics(metadata: &TableMetadata) -> impl Iterator<Item = &str> {
    let statistics = metadata.statistics_iter().map(|file| file.statistics_path.as_str());
    statistics.chain(metadata.partition_statistics_iter().map(|file| file.statistics_path.as_str()))
}

/// All manifests of all snapshots, by their locations.
async fn manifests(tables: &Tables, metadata: &TableMetadata) -> Result<BTreeMap<String, ManifestFile>> {
    let mut all = BTreeMap::new();
    for snapshot in metadata.snapshots() {
        let list = tables.cache.manifest_list(metadata, snapshot).await?;
        for file in list.entries().iter().filter(|file| !all.contains_key(&file.manifest_path)).collect::<Vec<_>>() {
            all.insert(file.manifest_path.clone(), file.clone());
        }
    }
    Ok(all)
}

// ---- deleting -------------------------------------------------------------------------------------------------

/// What may be deleted, and what was.
struct Deleting<'a> {
    tables: &'a Tables,
    own: String,
    kept: HashSet<String>,
    purge: Purge,
}

async fn delete(tables: &Tables, metadata: &Arc<TableMetadata>, purge: Purge, until: Instant) -> Result<Answer> {
    let kept = purge.kept.iter().cloned().collect();
    let mut this = Deleting { tables, own: directory(metadata), kept, purge };
    let of_metadata = this.purge.metadata_location.clone();
    match this.purge.cursor.part {
        Part::Files => {
            let manifests = manifests(tables, metadata).await?;
            if !this.delete_files(&manifests, until).await? {
                return Ok(Answer::Part(Box::new(this.purge)));
            }
            this.goes_on_with(Part::Manifests);
        }
        Part::Manifests => {
            let manifests = manifests(tables, metadata).await?;
            let done = this.purge.cursor.manifests as usize;
            let names: Vec<&str> = manifests.keys().skip(done).map(String::as_str).collect();
            for some in names.chunks(FILES_AT_A_TIME) {
                this.delete(some).await?;
                steps::reached("purge-manifests");
                this.purge.cursor.manifests += some.len() as u64;
                if Instant::now() >= until {
                    return Ok(Answer::Part(Box::new(this.purge)));
                }
            }
            this.goes_on_with(Part::Lists);
        }
        Part::Lists => {
            let lists = metadata.snapshots().map(|snapshot| snapshot.manifest_list());
            let lists: Vec<&str> = lists.filter(|list| !list.is_empty()).chain(statistics(metadata)).collect();
            this.delete(&lists).await?;
            steps::reached("purge-lists");
            this.goes_on_with(Part::Metadata);
        }
        Part::Metadata => {
            if !abort_uploads(tables, &this.own, until).await {
                return Ok(Answer::Part(Box::new(this.purge)));
            }
            let older = metadata.metadata_log().iter().map(|entry| entry.metadata_file.as_str());
            let older: Vec<&str> = older.filter(|file| *file != of_metadata).collect();
            this.delete(&older).await?;
            this.delete(&[&of_metadata]).await?;
            steps::reached("purge-metadata");
            return Ok(Answer::Done(Box::new(this.purge)));
        }
    }
    Ok(Answer::Part(Box::new(this.purge)))
}

/// Nobody completes what was being written to the table. Says whether it is done with: what cannot be listed or aborted stays.
async fn abort_uploads(tables: &Tables, own: &str, until: Instant) -> bool {
    let mut aborted = 0;
    let abort = async {
        let uploads = tables.storage.abandoned_uploads(own, None).await?;
        for some in uploads.chunks(FILES_AT_A_TIME) {
            aborted += tables.storage.abort_uploads(own, some, Instant::now() + ASK).await?;
            if Instant::now() >= until {
                // Those that are gone are not listed the next time. With a store that aborts none there is none.
                return Ok(aborted == 0);
            }
        }
        Ok(true)
    };
    abort.await.unwrap_or_else(|error: Error| {
        tracing::warn!(location = own, %error, "uploads that were not completed, if there are any, stay");
        true
    })
}

impl Deleting<'_> {
    fn goes_on_with(&mut self, part: Part) {
        let cursor = &mut self.purge.cursor;
        (cursor.part, cursor.manifests, cursor.entries) = (part, 0, 0);
    }

    /// Deletes what the manifests name, from the cursor on. Says whether that was all of it.
    async fn delete_files(&mut self, manifests: &BTreeMap<String, ManifestFile>, until: Instant) -> Result<bool> {
        let mut pending: Vec<String> = Vec::new();
        let done = self.purge.cursor.manifests as usize;
        for manifest in manifests.values().skip(done) {
            let manifest = self.tables.cache.manifest(manifest).await?;
            let skipped = std::mem::take(&mut self.purge.cursor.entries);
            let mut entries = skipped;
            for entry in manifest.entries().iter().skip(skipped as usize) {
                pending.push(entry.file_path().to_owned());
                entries += 1;
                if pending.len() >= FILES_AT_A_TIME {
                    self.delete(&pending).await?;
                    steps::reached("purge-files");
                    pending.clear();
                    if Instant::now() >= until {
                        self.purge.cursor.entries = entries;
                        return Ok(false);
                    }
                }
            }
            self.purge.cursor.manifests += 1;
            if Instant::now() >= until {
                self.delete(&pending).await?;
                return Ok(false);
            }
        }
        self.delete(&pending).await?;
        Ok(true)
    }

    /// Deletes those of these that are the table's own; one that is not there any more is fine.
    async fn delete(&mut self, locations: &[impl AsRef<str>]) -> Result<()> {
        let mut own: Vec<&str> = Vec::new();
        for location in locations.iter().map(AsRef::as_ref) {
            let spelled = canonical(location);
            match spelled.starts_with(&self.own) || planted::has(Bug::PurgedBorrowed) {
                false => self.purge.outside += 1,
                true if self.kept.contains(&spelled) => {}
                true => own.push(location),
            }
        }
        let storage = &self.tables.storage;
        let deletions: Vec<_> = own.iter().map(|location| storage.delete(location)).collect();
        futures::stream::iter(deletions)
            .buffer_unordered(REQUESTS)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await?;
        self.purge.deleted += own.len() as u64;
        storage.remove_empty_directories(&own, self.own.trim_end_matches('/')).await
    }
}
