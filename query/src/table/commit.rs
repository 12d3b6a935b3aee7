//! Making a version current: the compare-and-set of a table's pointer.
//!
//! ```text
//!           +-> does it hold on the current version? -> write list and metadata on it -> swap the pointer
//!           |                                                                               | done
//!           +-- lost the race: a moment, with jitter  <-------------------------------------+
//!           +-- no answer: read the pointer; ours is in it? done  <-------------------------+
//! ```
//! What is to be committed is a [`Proposal`]. Whether it holds on a version that its statement has not read is decided by
//! [`super::conflict`]; an edit of the metadata decides for itself.
//!
//! A commit has one snapshot id for all its attempts, and each attempt a metadata location of its own, which stays in the
//! metadata log of the versions that follow. After an attempt whose answer was lost, the current metadata is
//! looked at before anything is done again: if the snapshot is in it, the commit is done. If it is not, and the pointer
//! has moved past what that attempt expected, the attempt can never be applied any more. Until one of the two is known
//! the commit is in doubt, and what it wrote stays.
//!
//! A commit that has lost twice claims the table's next turn, so that no writer is passed over for ever; others wait for
//! a claim at most [`TURN_LIMIT`], then end it.
//!
//! Appends that wait together ([`super::append`]) are a [`Batch`] besides: every attempt takes along what other nodes have handed
//! over, and leaves an outcome for each append in its transaction, by which doubts are settled instead. One that has lost
//! hands its batch over, waits, and commits by itself if nobody has taken it along ([`super::handing`]).
//!
//! Only at the deadline, or for a reason that trying again cannot mend, is an error returned. It says "nothing was
//! committed", and then the files are removed; or that this is unknown, and then they stay for the orphan sweep.

use std::fmt;
use std::time::{Duration, Instant};

use iceberg::spec::{MetadataLog, Operation, TableMetadata};
use lake_client::catalog::appends::Outcome;
use lake_client::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use lake_client::procedures;
use lake_client::store::{self, Applied};

use super::conflict::{self, Reads};
use super::handing::{self, Batch, Given, Handing, Joined};
use super::queue::Turn;
use super::version::{self, Change, Edit, NextVersion, Removed};
use super::writer::DataFiles;
use super::{Table, Tables, catalog_error, check_writable, steps, unreachable_words};
use crate::error::{Error, Kind, Result};
use crate::outcomes;
use crate::storage::io::LakeIo;

/// First pause after a lost race.
const BACKOFF_FIRST: Duration = Duration::from_millis(5);
/// Longest pause after lost races.
const BACKOFF_MOST: Duration = Duration::from_millis(80);
/// A commit that has lost this often claims the next turn.
const LOSSES_BEFORE_CLAIM: u32 = 2;
/// How long another's claim is respected. A commit takes a few milliseconds; a claimant that takes this long is gone.
pub(crate) const TURN_LIMIT: Duration = Duration::from_secs(1);
/// How often a writer that waits for a claim to end looks.
pub(crate) const TURN_POLL: Duration = Duration::from_millis(5);

/// What is to be committed.
pub struct Proposal {
    /// The files that come and go.
    pub change: Option<Change>,
    /// What else becomes of the metadata, before that.
    pub edit: Option<Edit>,
    /// What the change rests on. `None`: it holds on every version.
    pub reads: Option<Reads>,
    /// The schema that the added rows were written with, which must still be the current one.
    pub schema_id: Option<i32>,
    /// The change as another node could make it.
    pub batch: Option<Batch>,
}

impl Proposal {
    /// Rows that are added by a statement which has read `metadata`, whatever others do.
    pub fn change(change: Change, reads: Option<Reads>, metadata: &TableMetadata) -> Self {
        Self { change: Some(change), edit: None, reads, schema_id: Some(metadata.current_schema_id()), batch: None }
    }

    /// A change of the metadata alone.
    pub fn edit(edit: Edit) -> Self {
        Self { change: None, edit: Some(edit), reads: None, schema_id: None, batch: None }
    }

    fn snapshot_id(&self) -> Option<i64> {
        self.change.as_ref().map(|change| change.snapshot_id)
    }
}

/// An attempt without an answer: what it wrote, and the revision it expected.
#[derive(Debug)]
struct Doubt {
    expected: u64,
    metadata_location: String,
    objects: Vec<String>,
}

/// A commit on its way.
struct Commit<'a> {
    tables: &'a Tables,
    table: &'a Table,
    proposal: &'a Proposal,
    /// This commit's alone: by it claims are told apart.
    claimant: uuid::Uuid,
    deadline: Instant,
    doubts: Vec<Doubt>,
    attempts: u32,
    backoff: Duration,
    /// Another node was seen to commit to the table.
    contended: bool,
    losses: u32,
    /// The claim on the next turn, if this commit has it.
    turn: Option<u64>,
    /// Whether the batch is handed over.
    given: Given,
    /// It has been tried, and is not again.
    gave: bool,
    /// Nothing of others is taken along any more: what they have handed over was in the way.
    alone: bool,
    /// The own record is not there any more.
    record_gone: bool,
    /// An attempt was made that may have left the own record behind: it goes before the outcome is forgotten.
    left_behind: bool,
    /// Why it ended.
    why: Option<(Kind, String)>,
}

/// What the current version says about a commit.
enum Look {
    /// It is in: done by an attempt whose answer was lost.
    Done(Versioned<TablePointer>),
    /// Build on this.
    Base(Versioned<TablePointer>, std::sync::Arc<TableMetadata>),
}

/// Commits `proposal` to `table`. `files` are the data files that it adds, for those to be removed if nothing comes of it.
/// Returns the pointer as it then is.
pub async fn commit(
    tables: &Tables,
    table: &Table,
    mut proposal: Proposal,
    mut files: DataFiles,
    deadline: Instant,
) -> Result<Versioned<TablePointer>> {
    if let Some(change) = &mut proposal.change {
        change.notes.extend(tables.notes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    }
    for added in proposal.change.iter().flat_map(Change::manifests) {
        files.add_object(added.manifest_path.clone());
    }
    let Some(mut turn) = tables.queues.enter(table.metadata.uuid(), deadline).await else {
        files.discard().await;
        return Err(Error::deadline(format!(
            "writing table {}: other writers of this node were before it until the deadline; nothing was committed",
            table.ident
        )));
    };
    let mut commit = Commit {
        tables,
        table,
        proposal: &proposal,
        claimant: uuid::Uuid::new_v4(),
        deadline,
        doubts: Vec::new(),
        attempts: 0,
        backoff: BACKOFF_FIRST,
        contended: false,
        losses: 0,
        turn: None,
        given: Given::No,
        gave: false,
        alone: false,
        record_gone: false,
        left_behind: false,
        why: None,
    };
    let mut outcome = commit.run(&mut turn).await;
    commit.give_up_turn();
    if let (Err(error), Some(batch)) = (&outcome, &proposal.batch)
        && commit.in_doubt()
    {
        outcome = commit.withdraw(batch, error.clone()).await;
    }
    match outcome {
        Ok(pointer) => {
            files.keep();
            turn.leave(pointer.clone(), commit.contended);
            Ok(pointer)
        }
        Err(error) if !commit.in_doubt() => {
            files.discard().await;
            Err(error)
        }
        Err(error) => {
            files.keep();
            Err(error)
        }
    }
}

impl Commit<'_> {
    async fn run(&mut self, turn: &mut Turn) -> Result<Versioned<TablePointer>> {
        if self.tables.handing.is_giving(self.table.metadata.uuid())
            && let Some(pointer) = self.give().await?
        {
            return Ok(pointer);
        }
        let hint = turn.hint();
        // With others at work a look costs less than an attempt that is bound to fail.
        let mut known = match turn.contended() {
            true => None,
            false if self.given != Given::No => None,
            false => hint.clone().or_else(|| Some(self.table.pointer.clone())),
        };
        loop {
            self.attempts += 1;
            let (base, metadata) = match self.look(known.take()).await? {
                Look::Done(pointer) => return Ok(pointer),
                Look::Base(base, metadata) => (base, metadata),
            };
            self.contended |= hint.as_ref().is_some_and(|hint| hint.mod_revision != base.mod_revision);
            let proposal = self.proposal;
            if let Some(reads) = &proposal.reads {
                let change = proposal.change.as_ref();
                let holds = conflict::validate(&self.tables.cache, &metadata, change, reads).await;
                holds.map_err(|e| self.failed(e.kind, e))?;
            }
            let joined = self.join(&metadata).await;
            let next = version::write_next(
                &self.tables.storage,
                &self.tables.cache,
                &metadata,
                Some(&base.value.metadata_location),
                proposal.edit.as_ref(),
                joined.change.as_ref().or(proposal.change.as_ref()),
            )
            .await
            .map_err(|e| self.failed(e.kind, e))?;
            if joined.change.is_some() {
                steps::reached("version-written");
            }
            // As it is to be already.
            let Some(next) = next else { return Ok(base) };
            let pointer = TablePointer {
                uuid: base.value.uuid,
                metadata_location: next.location.clone(),
                previous_location: Some(base.value.metadata_location.clone()),
            };
            let writer = self.tables.recording().map_err(|e| self.failed(e.kind, e))?;
            let (ident, expected) = (&self.table.ident, base.mod_revision);
            let settling = joined.settling(&next.location);
            let asked = self.tables.asks();
            let swap = writer.swap_table_settling(ident, expected, &pointer, self.turn, &settling, self.deadline);
            let swapped = swap.await;
            match swapped {
                Ok(committed) => {
                    self.tables.held(asked);
                    if joined.change.is_some() {
                        steps::reached("swapped");
                    }
                    if let Some(batch) = &proposal.batch {
                        self.forget(batch, committed.mod_revision);
                    }
                    // Ended by the swap itself.
                    self.turn = None;
                    self.settle(Some(&next.location)).await;
                    self.tables.cache.put_table(&next.location, next.metadata.clone(), next.metadata_bytes).await;
                    remove_expired(self.tables, &next.metadata, next.expired);
                    return Ok(committed);
                }
                Err(CatalogError::Conflict { current, resent, .. }) => {
                    self.lost(&next, base.mod_revision, resent).await;
                    known = current;
                    if known.is_none() && !resent {
                        // Gone. The look says so, or finds what was created in its place.
                        continue;
                    }
                    if known.as_ref().is_some_and(|known| known.mod_revision == expected) {
                        // What was handed over is not there any more, or was made before: with nothing of others in it, the own
                        // record.
                        self.record_gone |= joined.change.is_none();
                        self.alone = true;
                    }
                    self.losses += 1;
                    if let Some(pointer) = self.give().await? {
                        return Ok(pointer);
                    }
                    if self.given != Given::No {
                        // Others have gone on meanwhile.
                        known = None;
                    }
                    self.claim_turn().await;
                    if self.turn.is_none() {
                        self.pause().await?;
                    }
                }
                Err(CatalogError::NotYourTurn { turn, resent, .. }) => {
                    self.lost(&next, base.mod_revision, resent).await;
                    self.turn = None;
                    self.await_turn(turn).await?;
                }
                Err(error) => {
                    let unknown = error.applied() == Applied::Unknown;
                    self.lost(&next, base.mod_revision, unknown).await;
                    if !unknown {
                        return Err(self.catalog_failed(error));
                    }
                    if Instant::now() >= self.deadline {
                        return Err(self.catalog_failed(error));
                    }
                }
            }
        }
    }

    /// Reads the version to build on, and settles what is in doubt if that version can tell.
    async fn look(&mut self, known: Option<Versioned<TablePointer>>) -> Result<Look> {
        let ident = &self.table.ident;
        // A hint is good enough to build on, since the swap compares; not to settle a doubt, unless it is newer.
        let mut pointer = known;
        let mut missing: Option<String> = None;
        loop {
            let current = match pointer.take() {
                Some(pointer) => Some(pointer),
                None => match self.tables.metadata.read_table(ident, self.deadline).await {
                    Ok(current) => current,
                    Err(error) => return Err(self.catalog_failed(error)),
                },
            };
            let Some(current) = current else {
                return Err(self.failed(Kind::NotFound, format_args!("table {ident} was dropped meanwhile")));
            };
            if current.value.uuid != self.table.metadata.uuid() {
                return Err(
                    self.failed(Kind::Conflict, format_args!("table {ident} was replaced by another meanwhile"))
                );
            }
            let metadata = match self.tables.cache.table(&current.value.metadata_location).await {
                Ok(metadata) => metadata,
                // The version is so old that its metadata was removed: look at the current one, which another may follow before
                // that is read.
                Err(error) if error.kind == Kind::NotFound => {
                    let gone = Some(current.value.metadata_location.clone());
                    if missing == gone {
                        return Err(self.failed(
                            Kind::Corrupt,
                            format_args!("the current metadata of table {ident} does not exist"),
                        ));
                    }
                    missing = gone;
                    continue;
                }
                Err(error) => return Err(self.failed(error.kind, error)),
            };
            if let Some(made) = self.made_before(&current).await? {
                return Ok(Look::Done(made));
            }
            let location = &current.value.metadata_location;
            let is_ours = |location: &str| self.doubts.iter().any(|doubt| doubt.metadata_location == location);
            let committed_as = match is_ours(location) {
                true => Some(location.clone()),
                false => {
                    let log = metadata.metadata_log().iter();
                    log.map(|entry| &entry.metadata_file).find(|location| is_ours(location)).cloned()
                }
            };
            let has_snapshot = self.proposal.snapshot_id().is_some_and(|id| metadata.snapshot_by_id(id).is_some());
            if committed_as.is_some() || has_snapshot {
                self.settle(committed_as.as_deref()).await;
                return Ok(Look::Done(current));
            }
            self.rule_out(current.mod_revision).await;
            self.check(&metadata)?;
            return Ok(Look::Base(current, metadata));
        }
    }

    /// What this attempt makes: the batch and what others have handed over, if there is a batch.
    async fn join(&mut self, metadata: &TableMetadata) -> Joined {
        let (Some(batch), Some(own)) = (&self.proposal.batch, &self.proposal.change) else { return Joined::default() };
        if !self.tables.writer.hands_over() {
            return Joined::new(batch, own, metadata, None, &[]);
        }
        // One more, which may be the own one.
        let most = handing::MAX_TAKEN as u32 + 1;
        let handed = self.tables.writer.handed(self.table.metadata.uuid(), most, self.deadline).await;
        let is_whole = handed.as_ref().is_ok_and(|handed| handed.len() < most as usize);
        let handed = handed.unwrap_or_else(|error| {
            tracing::debug!(table = %self.table.ident, %error, "looking for what other nodes have handed over failed");
            Vec::new()
        });
        let seen = handed.iter().find(|handed| handed.id == batch.id).map(|handed| handed.revision);
        let own_record = seen.or(match self.given {
            // Not seen, it may be there all the same.
            Given::Yes(revision) if !is_whole && !self.record_gone => Some(revision),
            _ => None,
        });
        self.left_behind |= self.given != Given::No && own_record.is_none() && !is_whole && !self.record_gone;
        let others = if self.alone { &[][..] } else { &handed[..] };
        let joined = Joined::new(batch, own, metadata, own_record, others);
        if joined.change.is_some() {
            steps::reached("joined");
        }
        joined
    }

    /// Hands the batch over, once, and waits for another node to take it along. `None`: nobody has, or there was no way.
    async fn give(&mut self) -> Result<Option<Versioned<TablePointer>>> {
        let Some(batch) = &self.proposal.batch else { return Ok(None) };
        if self.gave || !self.doubts.is_empty() || !self.tables.writer.hands_over() {
            return Ok(None);
        }
        self.gave = true;
        let until = self.deadline.min(Instant::now() + handing::TAKEN_WITHIN);
        let table = self.table.metadata.uuid();
        steps::reached("append-written");
        self.given = self.tables.handing.give(&self.tables.writer, table, batch, until).await;
        if self.given == Given::No {
            return Ok(None);
        }
        steps::reached("handed");
        let mut revisions = self.tables.metadata.subscribe();
        loop {
            let asked_by = self.deadline.min(until + handing::TAKEN_WITHIN);
            match self.tables.writer.append_outcome(batch.id, asked_by).await {
                Ok(Some(outcome)) => {
                    let made = self.made(batch, &outcome).await?;
                    steps::reached("taken");
                    self.tables.handing.set_giving(table, true);
                    return Ok(Some(made));
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(table = %self.table.ident, %error, "asking for the outcome of an append failed")
                }
            }
            let now = Instant::now();
            if now >= until {
                self.tables.handing.set_giving(table, false);
                return Ok(None);
            }
            let look_again = until.min(now + handing::TAKEN_POLL);
            // Woken by the change of a pointer, of this table as a rule.
            if let Ok(Err(_)) = tokio::time::timeout_at(look_again.into(), revisions.changed()).await {
                tokio::time::sleep_until(look_again.into()).await;
            }
        }
    }

    /// The pointer, if the batch was made by an attempt of this commit or by another node; `current` was read before.
    async fn made_before(&mut self, current: &Versioned<TablePointer>) -> Result<Option<Versioned<TablePointer>>> {
        let Some(batch) = self.proposal.batch.as_ref().filter(|_| self.attempts > 1 || self.gave) else {
            return Ok(None);
        };
        let outcome = match self.tables.writer.append_outcome(batch.id, self.deadline).await {
            Ok(outcome) => outcome,
            Err(error) => return Err(self.catalog_failed(error)),
        };
        match outcome {
            Some(outcome) if outcome.revision <= current.mod_revision => {
                self.made(batch, &outcome).await?;
                Ok(Some(current.clone()))
            }
            Some(outcome) => self.made(batch, &outcome).await.map(Some),
            None => Ok(None),
        }
    }

    /// The batch is in: the pointer as it is now, so that a reader here sees it.
    async fn made(&mut self, batch: &Batch, outcome: &Outcome) -> Result<Versioned<TablePointer>> {
        let location = handing::made_in(&outcome.value)?;
        self.settle(location.as_deref()).await;
        self.forget(batch, outcome.revision);
        self.given = Given::No;
        match self.tables.metadata.read_table(&self.table.ident, self.deadline).await {
            Ok(Some(current)) => Ok(current),
            // Dropped since, or out of reach: what was asked for is done.
            Ok(None) | Err(_) => Ok(self.table.pointer.clone()),
        }
    }

    /// The outcome is of no use any more, unless handing the batch over may still come late: then it must be found.
    fn forget(&self, batch: &Batch, revision: u64) {
        let is_of_no_use = self.given != Given::Perhaps;
        match self.left_behind {
            true => {
                let table = self.table.metadata.uuid();
                Handing::take_back(self.tables, table, batch.id, is_of_no_use.then_some(revision));
            }
            false if is_of_no_use => Handing::forget(self.tables, batch.id, revision),
            false => {}
        }
    }

    /// Ends a batch that failed and may still be made: so that it cannot be, if that can be reached.
    async fn withdraw(&mut self, batch: &Batch, error: Error) -> Result<Versioned<TablePointer>> {
        let table = self.table.metadata.uuid();
        match Handing::withdraw(&self.tables.writer, table, batch).await {
            Ok(None) => {
                for doubt in std::mem::take(&mut self.doubts) {
                    self.tables.storage.discard(&doubt.objects).await;
                }
                self.given = Given::No;
                let (kind, why) = self.why.take().unwrap_or((error.kind, error.message));
                Err(self.failed(kind, why))
            }
            Ok(Some(location)) => {
                self.settle(Some(&location)).await;
                self.given = Given::No;
                self.tables.metadata.invalidate(&self.table.ident);
                Ok(self.table.pointer.clone())
            }
            Err(withdrawing) => {
                tracing::debug!(table = %self.table.ident, error = %withdrawing, "appends could not be withdrawn");
                Err(error)
            }
        }
    }

    /// Whether it may be, or may still come to be, committed.
    fn in_doubt(&self) -> bool {
        !self.doubts.is_empty() || self.given != Given::No
    }

    /// Whether the rows, as they were written, fit this version.
    fn check(&mut self, metadata: &TableMetadata) -> Result<()> {
        let ident = &self.table.ident;
        if self.proposal.schema_id.is_some() {
            check_writable(ident, metadata).map_err(|e| self.failed(e.kind, e))?;
        }
        if self.proposal.schema_id.is_some_and(|id| id != metadata.current_schema_id()) {
            return Err(self.failed(
                Kind::Conflict,
                format_args!("the columns of table {ident} were changed meanwhile; run the statement again"),
            ));
        }
        let Some(change) = &self.proposal.change else { return Ok(()) };
        conflict::check_deletes(metadata, change).map_err(|e| self.failed(e.kind, e))
    }

    /// An attempt did not go through, or it is not known whether it did.
    async fn lost(&mut self, next: &NextVersion, expected: u64, unknown: bool) {
        match unknown {
            true => self.doubts.push(Doubt {
                expected,
                metadata_location: next.location.clone(),
                objects: next.objects.clone(),
            }),
            false => self.tables.storage.discard(&next.objects).await,
        }
    }

    /// The pointer is at `revision` without our snapshot: attempts that expected an older one are impossible now.
    async fn rule_out(&mut self, revision: u64) {
        for doubt in self.doubts.extract_if(.., |doubt| doubt.expected < revision).collect::<Vec<_>>() {
            self.tables.storage.discard(&doubt.objects).await;
        }
    }

    /// The commit is in. If it is known as which version, no other attempt can be, and what those wrote goes.
    async fn settle(&mut self, committed_as: Option<&str>) {
        for doubt in std::mem::take(&mut self.doubts) {
            if committed_as.is_some_and(|location| doubt.metadata_location != location) {
                self.tables.storage.discard(&doubt.objects).await;
            }
        }
    }

    /// Claims the next turn, if this commit has lost often enough. Without an answer it goes on as before.
    async fn claim_turn(&mut self) {
        if self.losses < LOSSES_BEFORE_CLAIM || self.turn.is_some() {
            return;
        }
        let deadline = self.deadline.min(Instant::now() + TURN_LIMIT);
        match self.tables.writer.claim_turn(self.table.metadata.uuid(), self.claimant, deadline).await {
            Ok(claim) => self.turn = claim,
            Err(error) => tracing::debug!(table = %self.table.ident, %error, "claiming the next turn failed"),
        }
    }

    async fn await_turn(&mut self, claim: u64) -> Result<()> {
        match await_turn(self.tables, self.table.metadata.uuid(), claim, self.deadline).await {
            true => Ok(()),
            false => {
                let ident = &self.table.ident;
                Err(self.failed(Kind::Conflict, format_args!("it was the turn of other writers of {ident}")))
            }
        }
    }

    /// Ends a claim that this commit has and will not use. Whoever waits for it would do so in the end.
    fn give_up_turn(&mut self) {
        let Some(claim) = self.turn.take() else { return };
        let (writer, table) = (self.tables.writer.clone(), self.table.metadata.uuid());
        self.tables.tasks.spawn(async move {
            if let Err(error) = writer.end_turn(table, claim, Instant::now() + TURN_LIMIT).await {
                tracing::debug!(%table, %error, "ending an unused claim failed");
            }
        });
    }

    /// Waits a little after a lost race.
    async fn pause(&mut self) -> Result<()> {
        let pause = rand::random_range(self.backoff / 2..=self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF_MOST);
        let attempts = self.attempts;
        if Instant::now() + pause >= self.deadline {
            return Err(self.failed(
                Kind::Conflict,
                format_args!(
                    "other writers of table {} were first, {} times until the deadline",
                    self.table.ident, attempts
                ),
            ));
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    fn catalog_failed(&mut self, error: CatalogError) -> Error {
        match &error {
            CatalogError::Store(store) if store.is_unavailable() => {
                self.failed(Kind::Unavailable, unreachable_words(&error))
            }
            CatalogError::TableNotFound(_) => self.failed(Kind::NotFound, error),
            CatalogError::AlreadyDone(_) | CatalogError::Fenced { .. } => self.failed(Kind::Conflict, error),
            CatalogError::Damaged { .. } => self.failed(Kind::Corrupt, error),
            _ => self.failed(Kind::Internal, error),
        }
    }

    /// The error that ends this commit, with what is known about its outcome.
    fn failed(&mut self, kind: Kind, why: impl fmt::Display) -> Error {
        let ident = &self.table.ident;
        self.why = Some((kind, why.to_string()));
        match (!self.in_doubt(), self.proposal.snapshot_id()) {
            (true, _) => Error::new(kind, format!("writing table {ident}: {why}; nothing was committed")),
            (false, Some(snapshot)) => Error::unknown(format!(
                "writing table {ident}: {why}; whether the rows were committed is unknown: look for snapshot {snapshot} \
                 before writing them again"
            )),
            (false, None) => Error::unknown(format!(
                "writing table {ident}: {why}; whether the change was committed is unknown: look at the table before making it \
                 again"
            )),
        }
    }
}

/// Waits until another's claim on a table's next turn has ended, and ends it if that takes too long. `false`: the deadline
/// came first.
pub(crate) async fn await_turn(tables: &Tables, table: uuid::Uuid, claim: u64, deadline: Instant) -> bool {
    let until = Instant::now() + TURN_LIMIT;
    let mut seen = Some(claim);
    while seen == Some(claim) && claim != 0 {
        if Instant::now() >= deadline {
            return false;
        }
        // Before either, so that a store that refuses at once is not asked without a pause.
        tokio::time::sleep(TURN_POLL).await;
        let looked = match Instant::now() >= until {
            true => tables.writer.end_turn(table, claim, deadline).await.map(|()| None),
            false => tables.metadata.turn(table, deadline).await,
        };
        match looked {
            Ok(now) => seen = now,
            // Without an answer the claim counts as it was, until the deadline above.
            Err(error) => tracing::debug!(%table, %error, "looking after another's claim failed"),
        }
    }
    true
}

/// Metadata files that fell out of the log are removed, if the table is set up so: its own, and no others. A log that somebody else
/// has written may name anything.
pub(crate) fn remove_expired(tables: &Tables, metadata: &TableMetadata, expired: Vec<MetadataLog>) {
    let enabled = metadata.properties().get("write.metadata.delete-after-commit.enabled").is_some_and(|v| v == "true");
    if !enabled || expired.is_empty() {
        return;
    }
    let storage = tables.storage.clone();
    let own = format!("{}/metadata/", metadata.location());
    let expired = expired.into_iter().map(|entry| entry.metadata_file).filter(|file| file.starts_with(&own));
    let expired: Vec<String> = expired.collect();
    tables.tasks.spawn(async move { storage.discard(&expired).await });
}

/// Creates a table with `files`.
pub async fn create(
    tables: &Tables,
    ident: &TableIdent,
    metadata: TableMetadata,
    mut files: DataFiles,
    deadline: Instant,
) -> Result<()> {
    let uuid = metadata.uuid();
    let written = async {
        let change = match files.files.is_empty() {
            true => None,
            false => {
                let io = LakeIo::new(tables.storage.clone());
                let operation = Operation::Append;
                let mut change =
                    version::write_change(&io, &metadata, operation, &files.files, Removed::Nothing).await?;
                change.notes.extend(tables.scope.notes());
                change.added.iter().for_each(|manifest| files.add_object(manifest.manifest_path.clone()));
                Some(change)
            }
        };
        version::write_next(&tables.storage, &tables.cache, &metadata, None, None, change.as_ref()).await
    };
    let next = written.await.map_err(|e| e.while_doing(format_args!("creating table {ident}")))?;
    let next = next.ok_or_else(|| Error::internal(format!("creating table {ident}: its first version is empty")))?;
    for object in &next.objects {
        files.add_object(object.clone());
    }
    let pointer = TablePointer { uuid, metadata_location: next.location.clone(), previous_location: None };
    let mut created = tables.recording()?.create_table(ident, &pointer, deadline).await;
    if matches!(&created, Err(e) if e.applied() == Applied::Unknown) {
        // The uuid is ours alone. While the table is not there, the lost attempt may still be on its way; if another one is, ours may
        // have been renamed.
        if let Ok(Some(current)) = tables.metadata.read_table(ident, deadline).await
            && current.value.uuid == uuid
        {
            created = Ok(current);
        }
    }
    match created {
        Ok(_) => {
            files.keep();
            tables.cache.put_table(&next.location, next.metadata, next.metadata_bytes).await;
            Ok(())
        }
        Err(error) => {
            match error.applied() {
                Applied::No => files.discard().await,
                Applied::Unknown => files.keep(),
            }
            Err(catalog_error(&format!("creating table {ident}"), error))
        }
    }
}

/// A table was dropped, and where that was no part of it its purge was not submitted.
pub fn unsubmitted(ident: &TableIdent, error: &store::Error) -> Error {
    Error::unknown(format!(
        "dropping table {ident}: it is dropped, and whether its files will be deleted is unknown: {error}; they stay unless SHOW DROPPED \
         TABLES lists it, and it comes back by CALL system.register_table of its newest metadata file"
    ))
}

/// Drops a table; with `purge` the same transaction submits the purge of its files, or the next one where one key is changed at a time.
pub async fn drop_table(tables: &Tables, ident: &TableIdent, purge: bool, deadline: Instant) -> Result<()> {
    let doing = format!("dropping table {ident}");
    let now_ms = outcomes::now_ms();
    // What is to be dropped, and whether an attempt before may have done it.
    let mut doomed: Option<(uuid::Uuid, bool)> = None;
    let failed = |error: CatalogError, doomed: Option<(uuid::Uuid, bool)>| {
        catalog_error(&doing, error.after_doubt(matches!(doomed, Some((_, true)))))
    };
    loop {
        let current = tables.metadata.read_table(ident, deadline).await.map_err(|error| failed(error, doomed))?;
        let Some(current) = current else {
            return match doomed {
                // Our own attempt, or another's drop, did it.
                Some((before, true)) => tables.check_dropped(ident, before, purge, deadline).await,
                _ => Err(Error::not_found(format!("table {ident} does not exist"))),
            };
        };
        let uuid = current.value.uuid;
        if let Some((before, true)) = doomed
            && before != uuid
        {
            // What was to be dropped is gone; another table has its name.
            return tables.check_dropped(ident, before, purge, deadline).await;
        }
        let writer = tables.recording()?;
        let (writer, submitted) = match purge {
            false => (writer, None),
            true => {
                let (writer, submitted) = writer.purging(ident, &current, now_ms);
                (writer, Some(submitted))
            }
        };
        match writer.drop_table(ident, current.mod_revision, deadline).await {
            Ok(_) => {
                if purge {
                    let submitted = writer.purge_dropped(ident, &current, now_ms, deadline).await;
                    submitted.map_err(|e| unsubmitted(ident, &e))?;
                }
                let metadata = &current.value.metadata_location;
                tracing::info!(table = %ident, %uuid, %metadata, purge, "dropped a table");
                return Ok(());
            }
            // The submission of an attempt of ours, which was made after all.
            Err(CatalogError::AlreadyDone(left)) if submitted.as_ref() == Some(&left) => return Ok(()),
            // Another's purge of this very version.
            Err(CatalogError::AlreadyDone(left)) if submitted.is_some() && procedures::is_record(&left) => {
                doomed = Some((uuid, matches!(doomed, Some((_, true)))));
            }
            Err(CatalogError::Conflict { resent, .. }) => {
                doomed = Some((uuid, resent || matches!(doomed, Some((_, true)))));
            }
            Err(CatalogError::TableNotFound(_)) => doomed = Some((uuid, matches!(doomed, Some((_, true))))),
            Err(error) if error.applied() == Applied::Unknown && Instant::now() < deadline => {
                doomed = Some((uuid, true));
            }
            Err(error) => return Err(failed(error, doomed)),
        }
        if Instant::now() >= deadline {
            let why = format!("{doing}: other writers changed it again and again until the deadline");
            return Err(match doomed {
                Some((_, true)) => Error::unknown(format!("{why}; whether it was dropped is unknown")),
                _ => Error::conflict(format!("{why}; it was not dropped")),
            });
        }
    }
}
