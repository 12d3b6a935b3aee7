//! A transaction over several tables: what its statements have read and changed so far, and the one commit of all of it.
//!
//! ```text
//! first use of a table -> its pointer is pinned; all pinned pointers are of one revision
//! a change             -> files, manifest and list are written; the table as the transaction sees it is one snapshot on
//! COMMIT               -> metadata of each changed table; all pointers swapped in one transaction, with the operation's record
//!   | lost the race    -> snapshot isolation: do the changes hold on what is there now? built anew on it, and again
//!   |                     serialisable: a conflict
//!   | no answer        -> the record tells whether it was done; without one, the same again
//! ROLLBACK             -> what was written is removed
//! ```
//! A change stands on the snapshot that the one before it has left, which nobody else sees: it reads that one's files, and names,
//! replaces or removes them as it does those of the pinned version. Their paths stay what they are when the changes are built anew on
//! another version, and so does the order of their sequence numbers, though not the numbers. Rows are therefore changed as outside
//! of a transaction, by copy-on-write or by merge-on-read:
//! - Delete files apply to the data files of earlier changes, since their sequence number is greater.
//! - What is deleted from a data file is named again by each change that deletes more of it, in the place of what an earlier one has
//!   written ([`super::deletes`]). The snapshots in between keep theirs; the last one has one deletion vector for a data file.
//! - At COMMIT each change is checked by itself, against what others have done since the pinned version: a data file of which it deletes
//!   rows must still be there, and nobody else may have deleted any row of it. That goes for every DELETE, which by itself would put up
//!   with others that delete the same row: what the transaction writes elsewhere may rest on having deleted it. Files that an earlier
//!   change has added nobody else has seen; only a delete file that does not say whose rows it names counts as if it named theirs.
//!
//! One revision: a pointer that was last changed at `mod_revision`, and was still so at `valid_through`, holds for all
//! revisions between. There is one for all pinned pointers if the latest change is not after the earliest
//! `valid_through`. The first statement has the metadata hold its state for a while, and pointers are read there. Where that is
//! no longer held, or could not be had, a table that is named for the first time brings a look at all of them as they are
//! now; if two have changed so that there is no such revision any more, the statement is a conflict.
//!
//! Isolation: under snapshot isolation, what a change removes must still be there ([`super::conflict`]); plain appends
//! never conflict. Serialisable: every pointer that was read must be as it was read, changed or not.
//!
//! Every attempt carries the record of the transaction, with compare-absent: at most one is ever applied. Afterwards what is
//! staged belongs to the tables; after an outcome that could not be found out, it stays for the orphan sweep.
//!
//! Bounds: [`MAX_TABLES`], [`MAX_CHANGES`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iceberg::spec::{MetadataLog, Operation, TableMetadata};
use lake_client::catalog::{CatalogError, TableChange, TableIdent, TablePointer, Versioned};
use lake_client::metadata::MetadataWriter;
use lake_client::store::{Applied, Error as StoreError, Snapshot};
use lake_proto::kv::Revision;
use tokio::sync::Mutex;

use super::conflict::{self, Isolation, Reads};
use super::queue::Turn;
use super::scope::{OPERATION_NOTE, Once, Outcome, TRANSACTION_NOTE};
use super::version::{self, Change, Removed};
use super::writer::DataFiles;
use super::{Loaded, Table, Tables, catalog_error, check_writable};
use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::storage::io::LakeIo;

/// Most tables that a transaction may name.
pub const MAX_TABLES: usize = 100;
/// Most changes that it may make.
pub const MAX_CHANGES: usize = 1_000;
/// How long letting go of a snapshot of the metadata may take.
const LET_GO_WITHIN: Duration = Duration::from_secs(5);
/// Pauses after lost races: the first, and the longest.
const BACKOFF: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(80)];

/// What a transaction has read and changed.
#[derive(Debug)]
pub struct Staged {
    isolation: Isolation,
    /// What makes its commit happen once: the transaction itself, and the operation that its client calls it.
    records: Vec<Arc<Once>>,
    held: Mutex<BTreeMap<TableIdent, Held>>,
    /// The state of the metadata that tables are pinned in.
    moment: Mutex<Moment>,
    /// A commit is under way, or was broken off: what is held may be the tables' already.
    open_ended: AtomicBool,
}

impl Drop for Staged {
    /// What may have been committed stays; [`DataFiles`] removes the rest.
    fn drop(&mut self) {
        if *self.open_ended.get_mut() {
            keep(self.held.get_mut());
        }
    }
}

fn keep(held: &mut BTreeMap<TableIdent, Held>) {
    std::mem::take(held).into_values().filter_map(|held| held.files).for_each(DataFiles::keep);
}

#[derive(Debug, Clone, Copy, Default)]
enum Moment {
    #[default]
    NotYet,
    Held(Snapshot),
    /// Not any more, or it could not be had.
    Gone,
}

/// A table of the transaction.
#[derive(Debug)]
struct Held {
    /// As it was when it was first named.
    base: Table,
    /// As the transaction sees it.
    table: Table,
    /// The revision up to which `base` is known to have been current.
    valid_through: Revision,
    changes: Vec<Part>,
    /// Metadata files that fall out of the log.
    expired: Vec<MetadataLog>,
    /// Everything written.
    files: Option<DataFiles>,
}

#[derive(Debug)]
struct Part {
    change: Change,
    /// What the change rests on, of the pinned version.
    reads: Option<Reads>,
}

/// One attempt's part of one table.
struct Made {
    swap: TableChange,
    metadata: Arc<TableMetadata>,
    bytes: usize,
    expired: Vec<MetadataLog>,
}

/// What a look at the tables says of a commit.
enum Look {
    /// An attempt whose answer was lost was applied.
    Done,
    /// The pointers to build on; none was applied, nor will be unless all that it compares with is as it was.
    Base(BTreeMap<TableIdent, Versioned<TablePointer>>),
    /// Nobody could say whether an attempt was applied.
    Unanswered,
}

/// How an attempt ended.
enum Ended {
    Done(Vec<Versioned<TablePointer>>),
    /// Not applied, for a reason that another attempt may not meet.
    Lost,
    /// Another has claimed the next turn for this table.
    Turn(TableIdent, Revision),
    InDoubt(CatalogError),
}

impl Staged {
    pub fn new(isolation: Isolation, records: Vec<Arc<Once>>) -> Self {
        Self {
            isolation,
            records,
            held: Mutex::default(),
            moment: Mutex::default(),
            open_ended: AtomicBool::new(false),
        }
    }

    /// What makes its commit happen once.
    pub fn records(&self) -> &[Arc<Once>] {
        &self.records
    }

    /// What the summaries of its snapshots say.
    pub fn notes(&self) -> HashMap<String, String> {
        let note = |once: &Arc<Once>| {
            let name = if once.domain() == super::TRANSACTIONS { TRANSACTION_NOTE } else { OPERATION_NOTE };
            (name.to_owned(), once.id().to_owned())
        };
        self.records.iter().map(note).collect()
    }

    /// Whether it has changed anything.
    pub async fn has_changes(&self) -> bool {
        self.held.lock().await.values().any(|held| !held.changes.is_empty())
    }

    /// The tables of a statement, as the transaction sees them; those that it has not named before are pinned.
    pub(super) async fn load(&self, tables: &Tables, idents: &[TableIdent], deadline: Instant) -> Result<Loaded> {
        let mut held = self.held.lock().await;
        let new: Vec<TableIdent> = idents.iter().filter(|ident| !held.contains_key(*ident)).cloned().collect();
        if !new.is_empty() {
            let new = self.pin_then(tables, &mut held, new, deadline).await?;
            pin_now(tables, &mut held, new, deadline).await?;
        }
        let found = idents.iter().map(|ident| held.get(ident).map(|held| held.table.clone()));
        Ok(Loaded { tables: found.collect(), stale: None, age: None })
    }

    /// Pins tables as they were when the first statement began. Returns those that it cannot tell of any more.
    async fn pin_then(
        &self,
        tables: &Tables,
        held: &mut BTreeMap<TableIdent, Held>,
        new: Vec<TableIdent>,
        deadline: Instant,
    ) -> Result<Vec<TableIdent>> {
        if held.len() + new.len() > MAX_TABLES {
            return Err(Error::exhausted(format!("a transaction names at most {MAX_TABLES} tables")));
        }
        let mut moment = self.moment.lock().await;
        if let Moment::NotYet = *moment {
            *moment = match tables.metadata.open_snapshot(deadline).await {
                Ok(snapshot) => Moment::Held(snapshot),
                Err(error) => {
                    tracing::debug!(%error, "a transaction has no snapshot of the metadata");
                    Moment::Gone
                }
            };
        }
        let Moment::Held(snapshot) = *moment else { return Ok(new) };
        let pointers = match tables.metadata.read_tables_at(snapshot, &new, deadline).await {
            Ok(pointers) => pointers,
            Err(CatalogError::Store(StoreError::SnapshotExpired { .. })) => {
                *moment = Moment::Gone;
                return Ok(new);
            }
            Err(error) => return Err(catalog_error("looking up the tables of a transaction", error)),
        };
        let found = new.iter().zip(pointers).filter_map(|(ident, pointer)| Some((ident, pointer?)));
        hold(tables, held, found.collect(), deadline).await?;
        Ok(Vec::new())
    }

    /// Lets go of the state of the metadata that tables were pinned in.
    async fn let_go(&self, tables: &Tables) {
        if let Moment::Held(snapshot) = std::mem::replace(&mut *self.moment.lock().await, Moment::Gone) {
            let metadata = tables.metadata.clone();
            tables.tasks.spawn(async move {
                let by = Instant::now() + LET_GO_WITHIN;
                if let Err(error) = metadata.close_snapshot(snapshot, by).await {
                    tracing::debug!(%error, "a transaction's snapshot of the metadata is let go by its time");
                }
            });
        }
    }

    /// Makes a change of the transaction's own: the statements after it see it.
    pub(super) async fn stage(
        &self,
        tables: &Tables,
        table: &Table,
        operation: Operation,
        files: DataFiles,
        removed: Removed,
        reads: Option<Reads>,
    ) -> Result<()> {
        let mut all = self.held.lock().await;
        if all.values().map(|held| held.changes.len()).sum::<usize>() >= MAX_CHANGES {
            return Err(Error::exhausted(format!("a transaction makes at most {MAX_CHANGES} changes")));
        }
        let held = all.get_mut(&table.ident).filter(|held| held.table.pointer == table.pointer);
        let held = held.ok_or_else(|| {
            Error::conflict(format!("table {} is not as this statement of the transaction has read it", table.ident))
        })?;
        let io = LakeIo::new(tables.storage.clone());
        let mut change = version::write_files(&io, &table.metadata, operation, &files, removed).await?;
        change.notes.extend(self.notes());
        let mut written = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
        written.absorb(files);
        change.manifests().for_each(|manifest| written.add_object(manifest.manifest_path.clone()));
        let base_location = &held.base.pointer.value.metadata_location;
        let base_location = held.changes.is_empty().then_some(base_location.as_str());
        let mut objects = Vec::new();
        let next = version::next_metadata(
            &io,
            &tables.cache,
            &table.metadata,
            base_location,
            None,
            Some(&change),
            &mut objects,
        )
        .await;
        objects.into_iter().for_each(|object| written.add_object(object));
        let (metadata, expired) =
            next?.ok_or_else(|| Error::internal("a change inside of a transaction makes no version"))?;
        held.expired.extend(expired);
        match &mut held.files {
            Some(files) => files.absorb(written),
            None => held.files = Some(written),
        }
        // Told from the version before, also by those who keep something by its location.
        let location = version::metadata_location(metadata.location(), Some(&table.pointer.value.metadata_location));
        held.table.pointer.value.metadata_location = location;
        held.table.metadata = Arc::new(metadata);
        let reads = reads.map(|reads| Reads {
            snapshot: held.base.metadata.current_snapshot_id(),
            isolation: Isolation::Snapshot,
            // Two that move one row would both have it moved.
            only_deletes: false,
            ..reads
        });
        held.changes.push(Part { change, reads });
        Ok(())
    }

    /// Commits everything in one transaction of the metadata. Afterwards nothing is staged any more; after an error all of it
    /// still is, but for `Unknown`.
    ///
    /// # Errors
    /// `Conflict`: another writer was in the way. `Unknown`: whether it was committed could not be found out. Others, after
    /// which nothing was committed.
    pub async fn commit(&self, tables: &Tables, deadline: Instant) -> Result<()> {
        let mut all = self.held.lock().await;
        if !all.values().any(|held| !held.changes.is_empty()) {
            all.clear();
            self.let_go(tables).await;
            return Ok(());
        }
        let turns = turns(tables, &all, deadline).await?;
        let mut commit = Commit { tables, staged: self, doubts: false, deadline, turns };
        self.open_ended.store(true, Ordering::Relaxed);
        let outcome = commit.run(&mut all).await;
        if outcome.is_ok() || commit.doubts {
            keep(&mut all);
            self.let_go(tables).await;
        }
        self.open_ended.store(false, Ordering::Relaxed);
        outcome
    }

    /// Removes everything that was written.
    pub async fn roll_back(&self, tables: &Tables) {
        self.let_go(tables).await;
        let mut held = self.held.lock().await;
        if self.open_ended.load(Ordering::Relaxed) {
            return keep(&mut held);
        }
        let held = std::mem::take(&mut *held);
        for files in held.into_values().filter_map(|held| held.files) {
            files.discard().await;
        }
    }
}

/// Pins tables that are named for the first time as they are now: with those that are pinned already, at one revision.
async fn pin_now(
    tables: &Tables,
    held: &mut BTreeMap<TableIdent, Held>,
    new: Vec<TableIdent>,
    deadline: Instant,
) -> Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    let idents: Vec<TableIdent> = held.keys().cloned().chain(new).collect();
    let pointers = tables.metadata.read_tables(&idents, deadline).await;
    let pointers = pointers.map_err(|e| catalog_error("looking up the tables of a transaction", e))?;
    let known = held.len();
    for (held, now) in held.values_mut().zip(&pointers) {
        if let Some(now) = now.as_ref().filter(|now| now.mod_revision == held.base.pointer.mod_revision) {
            held.valid_through = held.valid_through.max(now.valid_through);
        }
    }
    let new = idents.iter().zip(pointers).skip(known);
    let found: Vec<(&TableIdent, Versioned<TablePointer>)> =
        new.filter_map(|(ident, pointer)| Some((ident, pointer?))).collect();
    let earliest = held.iter().min_by_key(|(_, held)| held.valid_through);
    if let Some((other, earliest)) = earliest
        && let Some((ident, _)) = found.iter().find(|(_, pointer)| pointer.mod_revision > earliest.valid_through)
    {
        return Err(Error::conflict(format!(
            "table {ident} has been changed since this transaction has read table {other}, which has changed as well: there is no \
             moment of which it could see both; ROLLBACK, and name the tables in one statement at its beginning"
        )));
    }
    hold(tables, held, found, deadline).await
}

/// Loads the versions that pointers name, and holds them.
async fn hold(
    tables: &Tables,
    held: &mut BTreeMap<TableIdent, Held>,
    found: Vec<(&TableIdent, Versioned<TablePointer>)>,
    deadline: Instant,
) -> Result<()> {
    let loads = found.iter().map(|(ident, pointer)| tables.load_version(ident, pointer.clone(), deadline));
    let loaded = futures::future::try_join_all(loads).await?;
    for ((ident, pointer), table) in found.into_iter().zip(loaded) {
        let Some(table) = table.filter(|table| table.pointer.value == pointer.value) else {
            return Err(Error::conflict(format!(
                "the version of table {ident} that this transaction would see is there no longer; ROLLBACK, and run it again"
            )));
        };
        let (base, valid_through) = (table.clone(), pointer.valid_through);
        let new = Held { base, table, valid_through, changes: Vec::new(), expired: Vec::new(), files: None };
        held.insert(ident.clone(), new);
    }
    Ok(())
}

/// This node's turns for all changed tables, entered in one order by everybody.
async fn turns(
    tables: &Tables,
    all: &BTreeMap<TableIdent, Held>,
    deadline: Instant,
) -> Result<BTreeMap<uuid::Uuid, Turn>> {
    let changed = all.values().filter(|held| !held.changes.is_empty());
    let mut waiting: Vec<_> = changed.map(|held| (held.base.metadata.uuid(), &held.base.ident)).collect();
    waiting.sort();
    let mut turns = BTreeMap::new();
    for (uuid, ident) in waiting {
        let turn = tables.queues.enter(uuid, deadline).await.ok_or_else(|| {
            Error::deadline(format!(
                "committing the transaction: other writers of table {ident} were before it until the deadline; nothing was \
                 committed"
            ))
        })?;
        turns.insert(uuid, turn);
    }
    Ok(turns)
}

/// A commit on its way.
struct Commit<'a> {
    tables: &'a Tables,
    staged: &'a Staged,
    /// An attempt's answer was lost.
    doubts: bool,
    deadline: Instant,
    turns: BTreeMap<uuid::Uuid, Turn>,
}

impl Commit<'_> {
    async fn run(&mut self, all: &mut BTreeMap<TableIdent, Held>) -> Result<()> {
        let mut backoff = BACKOFF[0];
        let mut bases: BTreeMap<TableIdent, Versioned<TablePointer>> =
            all.iter().map(|(ident, held)| (ident.clone(), held.base.pointer.clone())).collect();
        let unchanged: Vec<(TableIdent, Revision)> = match self.staged.isolation {
            Isolation::Snapshot => Vec::new(),
            Isolation::Serializable => all
                .iter()
                .filter(|(_, held)| held.changes.is_empty())
                .map(|(ident, held)| (ident.clone(), held.base.pointer.mod_revision))
                .collect(),
        };
        let mut writer = self.tables.metadata.writer();
        for once in &self.staged.records {
            writer = writer.within(once.record(None)?);
        }
        loop {
            let mut objects = Vec::new();
            let made = self.make(all, &bases, &mut objects).await;
            let made = match made {
                Ok(made) => made,
                Err(error) => {
                    self.tables.storage.discard(&objects).await;
                    return Err(self.failed(error.kind, error));
                }
            };
            let ended = match self.attempt(&writer, &made, &unchanged).await {
                Ok(ended) => ended,
                Err(error) => {
                    self.tables.storage.discard(&objects).await;
                    return Err(error);
                }
            };
            match ended {
                Ended::Done(pointers) => {
                    self.done(made, pointers).await;
                    return Ok(());
                }
                Ended::Lost if self.staged.isolation == Isolation::Serializable && !self.doubts => {
                    self.tables.storage.discard(&objects).await;
                    return Err(self.failed(Kind::Conflict, "another writer has changed a table that it has read"));
                }
                Ended::Lost => self.tables.storage.discard(&objects).await,
                Ended::Turn(ident, claim) => {
                    self.tables.storage.discard(&objects).await;
                    self.await_turn(all, &ident, claim).await?;
                }
                Ended::InDoubt(error) => {
                    self.doubts = true;
                    if self.was_done().await? == Some(true) {
                        self.done_unseen(&made);
                        return Ok(());
                    }
                    if Instant::now() >= self.deadline {
                        return Err(self.failed(Kind::Unknown, error));
                    }
                }
            }
            bases = loop {
                let pause = rand::random_range(backoff / 2..=backoff);
                backoff = (backoff * 2).min(BACKOFF[1]);
                if Instant::now() + pause >= self.deadline {
                    let why = "other writers were first, again and again until the deadline";
                    return Err(self.failed(Kind::Conflict, why));
                }
                tokio::time::sleep(pause).await;
                match self.look(all).await? {
                    Look::Base(now) => break now,
                    Look::Done => {
                        self.done_unseen(&made);
                        return Ok(());
                    }
                    Look::Unanswered => {}
                }
            };
        }
    }

    /// An attempt was applied whose answer was lost: what is known of the tables is from before.
    fn done_unseen(&self, made: &[Made]) {
        made.iter().for_each(|made| self.tables.metadata.invalidate(&made.swap.table));
    }

    /// Writes what each changed table becomes of the version at its pointer in `bases`.
    async fn make(
        &self,
        all: &BTreeMap<TableIdent, Held>,
        bases: &BTreeMap<TableIdent, Versioned<TablePointer>>,
        objects: &mut Vec<String>,
    ) -> Result<Vec<Made>> {
        let mut made = Vec::new();
        for (ident, held) in all.iter().filter(|(_, held)| !held.changes.is_empty()) {
            let base = bases.get(ident).ok_or_else(|| Error::internal("a table of the transaction has no version"))?;
            let base_location = &base.value.metadata_location;
            let (metadata, expired) = match base.mod_revision == held.base.pointer.mod_revision {
                true => (held.table.metadata.as_ref().clone(), held.expired.clone()),
                false => self.rebase(held, base, objects).await?,
            };
            let location = version::metadata_location(metadata.location(), Some(base_location));
            let bytes = version::write_metadata(&self.tables.storage, &metadata, &location, objects).await?;
            let new = TablePointer {
                uuid: base.value.uuid,
                metadata_location: location,
                previous_location: Some(base_location.clone()),
            };
            let swap = TableChange { table: ident.clone(), expected: Some(base.mod_revision), new };
            made.push(Made { swap, metadata: Arc::new(metadata), bytes, expired });
        }
        Ok(made)
    }

    /// The changes of a table, made anew on another version than they were staged on.
    async fn rebase(
        &self,
        held: &Held,
        base: &Versioned<TablePointer>,
        objects: &mut Vec<String>,
    ) -> Result<(TableMetadata, Vec<MetadataLog>)> {
        let (tables, ident) = (self.tables, &held.base.ident);
        let doing = |e: Error| e.while_doing(format_args!("table {ident}"));
        let current = tables.cache.table(&base.value.metadata_location).await.map_err(doing)?;
        check_writable(ident, &current)?;
        if current.current_schema_id() != held.base.metadata.current_schema_id() {
            return Err(Error::conflict(format!("the columns of table {ident} were changed meanwhile")));
        }
        for part in &held.changes {
            conflict::check_deletes(&current, &part.change).map_err(doing)?;
            if let Some(reads) = &part.reads {
                conflict::validate(&tables.cache, &current, Some(&part.change), reads).await.map_err(doing)?;
            }
        }
        let io = LakeIo::new(tables.storage.clone());
        let mut metadata = current.as_ref().clone();
        let mut location = Some(base.value.metadata_location.as_str());
        let mut expired = Vec::new();
        for part in &held.changes {
            let next = version::next_metadata(
                &io,
                &tables.cache,
                &metadata,
                location.take(),
                None,
                Some(&part.change),
                objects,
            );
            let (next, fell_out) =
                next.await.map_err(doing)?.ok_or_else(|| Error::internal("a change makes no version"))?;
            metadata = next;
            expired.extend(fell_out);
        }
        Ok((metadata, expired))
    }

    async fn attempt(
        &self,
        writer: &MetadataWriter,
        made: &[Made],
        unchanged: &[(TableIdent, Revision)],
    ) -> Result<Ended> {
        let swaps: Vec<TableChange> = made.iter().map(|made| made.swap.clone()).collect();
        let changed = match planted::has(Bug::TablesApart) {
            false => writer.change_tables_while(&swaps, unchanged, self.deadline).await,
            true => self.one_by_one(writer, &swaps).await,
        };
        Ok(match changed {
            Ok(pointers) => Ended::Done(pointers),
            Err(error) if error.applied() == Applied::Unknown => Ended::InDoubt(error),
            Err(CatalogError::Conflict { .. }) => Ended::Lost,
            Err(CatalogError::NotYourTurn { table, turn, .. }) => Ended::Turn(table, turn),
            // By an attempt of this commit whose answer was lost, or by somebody else under the same id.
            Err(CatalogError::AlreadyDone(_)) if self.doubts => Ended::InDoubt(already_done()),
            Err(error @ CatalogError::AlreadyDone(_)) => return Err(self.failed(Kind::Conflict, error)),
            Err(error) => {
                let error = catalog_error("committing the transaction", error);
                return Err(self.failed(error.kind, error));
            }
        })
    }

    /// A bug that is planted.
    async fn one_by_one(
        &self,
        writer: &MetadataWriter,
        swaps: &[TableChange],
    ) -> Result<Vec<Versioned<TablePointer>>, CatalogError> {
        let (first, others) = swaps.split_at(1.min(swaps.len()));
        let mut pointers = writer.change_tables_while(first, &[], self.deadline).await?;
        for swap in others {
            tokio::time::sleep(BACKOFF[1]).await;
            let writer = self.tables.metadata.writer();
            pointers.extend(writer.change_tables_while(std::slice::from_ref(swap), &[], self.deadline).await?);
        }
        Ok(pointers)
    }

    async fn done(&mut self, made: Vec<Made>, pointers: Vec<Versioned<TablePointer>>) {
        for (made, pointer) in made.into_iter().zip(pointers) {
            if let Some(turn) = self.turns.get_mut(&made.swap.new.uuid) {
                turn.leave(pointer, false);
            }
            let location = &made.swap.new.metadata_location;
            self.tables.cache.put_table(location, made.metadata.clone(), made.bytes).await;
            super::commit::remove_expired(self.tables, &made.metadata, made.expired);
        }
    }

    /// Whether an attempt in doubt was applied: its record tells. `None`: there was no answer.
    async fn was_done(&self) -> Result<Option<bool>> {
        let Some(once) = self.staged.records.first() else { return Ok(None) };
        match self.tables.writer.outcome(once.domain(), once.id(), self.deadline).await {
            Ok(None) => Ok(Some(false)),
            Ok(Some(kept)) => match Outcome::read(once.id(), &kept)? {
                outcome if once.left(&outcome) && outcome.refusal.is_none() => Ok(Some(true)),
                _ => Err(Error::conflict(
                    "committing the transaction: it was ended by somebody else meanwhile; nothing was committed",
                )),
            },
            Err(error) if Instant::now() < self.deadline => {
                tracing::debug!(%error, "looking after a commit in doubt failed");
                Ok(None)
            }
            Err(error) => Err(self.failed(Kind::Unknown, error)),
        }
    }

    /// What to build on next.
    async fn look(&mut self, all: &BTreeMap<TableIdent, Held>) -> Result<Look> {
        let changed: Vec<TableIdent> =
            all.iter().filter(|(_, held)| !held.changes.is_empty()).map(|(ident, _)| ident.clone()).collect();
        let pointers = self.tables.metadata.read_tables(&changed, self.deadline).await.map_err(|e| {
            let error = catalog_error("committing the transaction", e);
            self.failed(error.kind, error)
        })?;
        // Asked after the pointers were read: where one has moved and there is no record, the attempt can never be applied.
        if self.doubts {
            match self.was_done().await? {
                Some(true) => return Ok(Look::Done),
                Some(false) => {}
                // Then a pointer that has moved may have been moved by the attempt.
                None => return Ok(Look::Unanswered),
            }
        }
        let mut bases = BTreeMap::new();
        for (ident, pointer) in changed.into_iter().zip(pointers) {
            let pinned = all.get(&ident).map(|held| &held.base.pointer);
            let uuid = pinned.map(|pinned| pinned.value.uuid);
            let Some(pointer) = pointer.filter(|pointer| Some(pointer.value.uuid) == uuid) else {
                self.doubts = false;
                return Err(self.failed(
                    Kind::Conflict,
                    format_args!("table {ident} was dropped, or replaced by another, meanwhile"),
                ));
            };
            let moved = pinned.is_none_or(|pinned| pinned.mod_revision != pointer.mod_revision);
            if moved && self.staged.isolation == Isolation::Serializable {
                self.doubts = false;
                return Err(self.failed(Kind::Conflict, format_args!("another writer has changed table {ident}")));
            }
            bases.insert(ident, pointer);
        }
        Ok(Look::Base(bases))
    }

    async fn await_turn(&self, all: &BTreeMap<TableIdent, Held>, ident: &TableIdent, claim: Revision) -> Result<()> {
        let Some(table) = all.get(ident).map(|held| held.base.metadata.uuid()) else { return Ok(()) };
        match super::commit::await_turn(self.tables, table, claim, self.deadline).await {
            true => Ok(()),
            false => Err(self.failed(Kind::Conflict, format_args!("it was the turn of other writers of {ident}"))),
        }
    }

    /// The error that ends this commit, with what is known of its outcome.
    fn failed(&self, kind: Kind, why: impl std::fmt::Display) -> Error {
        let next = match kind {
            Kind::Unavailable | Kind::Deadline => "COMMIT again, or ROLLBACK",
            _ => "ROLLBACK, and run it again",
        };
        match self.doubts {
            false => Error::new(kind, format!("committing the transaction: {why}; nothing was committed: {next}")),
            true => Error::unknown(format!(
                "committing the transaction: {why}; whether it was committed is unknown: COMMIT again tells, on any node"
            )),
        }
    }
}

fn already_done() -> CatalogError {
    CatalogError::AlreadyDone(bytes::Bytes::new())
}
