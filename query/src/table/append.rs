//! Appends to one table that wait at the same time become one snapshot.
//!
//! ```text
//!   append --> line of its table --> batch: one manifest of all their files --> commit ([`super::commit`]) --> each is told
//!              (bounded)             (bounded)                                   alone, or with what other nodes
//!                                                                                hand over ([`super::handing`])
//! ```
//! A line has one task while anybody is in it: it makes one batch at a time, of all that wait; what comes meanwhile waits for
//! the next. So the number of commits does not grow with the number of writers. Before it begins it waits a moment, if the
//! last batch had several appends, for as many to come again.
//!
//! What holds:
//! - An append is acknowledged only when its snapshot is current, and this node's pointer cache knows of it.
//! - A batch fails as a whole or not at all. What one append's files may be the reason of is tried again one by one, so that nobody
//!   fails for another's reason; one whose own deadline is not over yet when that of its batch is goes back into the line.
//! - The data files of an append that fails are removed, if it is certain that they were not committed.
//! - The batch's deadline is the earliest of its appends'.
//!
//! Limits: [`MAX_WAITING`] appends wait per table, more are refused at once; a batch has at most [`MAX_BATCH`] appends and,
//! unless one alone has more, [`MAX_BATCH_FILES`] files.
//!
//! The table property [`MERGE_APPENDS`] = `false` switches all of it off: then each append is a commit of its own, which is
//! tried again when another one was first.

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use iceberg::spec::{DataFile, Operation, TableMetadata};
use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

use super::commit::{self, Proposal};
use super::expiry::Expiring;
use super::handing::Batch;
use super::version::{self, Removed};
use super::writer::DataFiles;
use super::{Table, Tables};
use crate::error::{Error, Kind, Result, words_of_panic};
use crate::storage::io::LakeIo;

/// The table property that says whether appends that wait together are committed together; `true` unless it says `false`.
pub const MERGE_APPENDS: &str = "lake.merge-appends.enabled";
/// Most appends that wait for one table.
pub const MAX_WAITING: usize = 4096;
/// Most appends of one batch.
pub const MAX_BATCH: usize = 1024;
/// Most files of one batch, unless one append alone has more.
pub const MAX_BATCH_FILES: usize = 4096;
/// How long a line waits for as many appends as the last batch had.
const GATHER: Duration = Duration::from_millis(20);

/// Whether a table's appends are committed together.
pub fn merges(metadata: &TableMetadata) -> bool {
    metadata.properties().get(MERGE_APPENDS).is_none_or(|value| !value.eq_ignore_ascii_case("false"))
}

/// The lines of this node, by table. A table nobody appends to has none.
#[derive(Debug, Clone, Default)]
pub struct Appends {
    lines: Arc<Mutex<HashMap<Uuid, Line>>>,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<Waiting>,
    arrived: Arc<Notify>,
}

/// One append.
#[derive(Debug)]
struct Waiting {
    table: Table,
    files: DataFiles,
    deadline: Instant,
    done: oneshot::Sender<Result<()>>,
}

impl Appends {
    /// Appends `files` to a table together with others. Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// Those of a commit; `Exhausted` if too many wait.
    pub async fn append(&self, tables: &Arc<Tables>, table: &Table, files: DataFiles, deadline: Instant) -> Result<()> {
        let id = table.metadata.uuid();
        let (done, told) = oneshot::channel();
        let waiting = Waiting { table: table.clone(), files, deadline, done };
        let refused = {
            let mut lines = self.lock();
            let is_new = !lines.contains_key(&id);
            let line = lines.entry(id).or_default();
            match line.waiting.len() < MAX_WAITING {
                true => {
                    line.waiting.push_back(waiting);
                    line.arrived.notify_one();
                    if is_new {
                        tables.tasks.spawn(Runner::new(tables.clone(), self.clone(), id).run());
                    }
                    None
                }
                false => Some(waiting),
            }
        };
        if let Some(waiting) = refused {
            waiting.files.discard().await;
            return Err(Error::exhausted(format!(
                "writing table {}: {MAX_WAITING} appends wait for it on this node already; nothing was committed, try again \
                 later",
                table.ident
            )));
        }
        told.await.unwrap_or_else(|_| {
            Err(Error::unknown("a commit ended unexpectedly; whether anything was committed is unknown"))
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task of one line.
struct Runner {
    tables: Arc<Tables>,
    appends: Appends,
    id: Uuid,
    /// How many appends the last batch had.
    last: usize,
    expiring: Expiring,
}

impl Runner {
    fn new(tables: Arc<Tables>, appends: Appends, id: Uuid) -> Self {
        Self { tables, appends, id, last: 1, expiring: Expiring::default() }
    }

    /// Makes batches until nobody waits.
    async fn run(mut self) {
        // A panic must leave no line behind that nobody works on.
        let _end = EndLine { appends: self.appends.clone(), id: self.id };
        loop {
            self.gather().await;
            let Some(batch) = self.take() else { return };
            self.last = batch.len();
            self.make(batch).await;
        }
    }

    /// Waits a moment for as many appends as the last batch had.
    async fn gather(&self) {
        let until = Instant::now() + GATHER;
        loop {
            let arrived = {
                let lines = self.appends.lock();
                let Some(line) = lines.get(&self.id) else { return };
                if line.waiting.len() >= self.last.max(1) || (self.last <= 1 && line.waiting.is_empty()) {
                    return;
                }
                line.arrived.clone()
            };
            if tokio::time::timeout_at(until.into(), arrived.notified()).await.is_err() {
                return;
            }
        }
    }

    /// The next batch; `None`: nobody waits, and the line is gone.
    fn take(&self) -> Option<Vec<Waiting>> {
        let mut lines = self.appends.lock();
        let line = lines.get_mut(&self.id)?;
        let fits = |one: &Waiting, first: &Waiting| layout_of(one) == layout_of(first);
        let mut batch: Vec<Waiting> = Vec::new();
        let mut files = 0;
        while batch.len() < MAX_BATCH
            && let Some(next) = line.waiting.front()
            && batch.first().is_none_or(|first| fits(next, first) && files + next.files.files.len() <= MAX_BATCH_FILES)
        {
            files += next.files.files.len();
            batch.extend(line.waiting.pop_front());
        }
        if batch.is_empty() {
            lines.remove(&self.id);
            return None;
        }
        Some(batch)
    }

    /// Commits a batch, and tells each of its appends.
    async fn make(&mut self, batch: Vec<Waiting>) {
        match self.prepare(&batch).await {
            Ok((table, proposal, files, deadline)) => {
                let made = AssertUnwindSafe(commit::commit(&self.tables, &table, proposal, files, deadline));
                let made = made.catch_unwind().await.unwrap_or_else(|panic| {
                    let words = words_of_panic(panic.as_ref());
                    tracing::error!(table = %table.ident, panic = words, "a commit of appends panicked");
                    Err(Error::unknown(format!(
                        "writing table {}: a commit failed inside lake: {words}; whether the rows were committed is unknown; \
                         please report this",
                        table.ident
                    )))
                });
                if let Ok(pointer) = &made {
                    self.expiring.committed(&self.tables, &table.ident, pointer);
                }
                self.tell(batch, made.map(drop), deadline).await;
            }
            Err(error) if batch.len() == 1 || !may_be_of_one(error.kind) => {
                let deadline = batch.iter().map(|one| one.deadline).min().unwrap_or_else(Instant::now);
                self.tell(batch, Err(error), deadline).await;
            }
            Err(_) => {
                for one in batch {
                    // Those before it may have taken their time.
                    match one.deadline <= Instant::now() {
                        true => {
                            let (late, deadline) = (late(&one.table), one.deadline);
                            self.tell(vec![one], Err(late), deadline).await;
                        }
                        false => Box::pin(self.make(vec![one])).await,
                    }
                }
            }
        }
    }

    /// Writes the manifest of a batch.
    async fn prepare(&mut self, batch: &[Waiting]) -> Result<(Table, Proposal, DataFiles, Instant)> {
        let newest = batch.iter().max_by_key(|one| one.table.pointer.mod_revision);
        let (Some(newest), Some(deadline)) = (newest, batch.iter().map(|one| one.deadline).min()) else {
            return Err(Error::internal("an empty batch of appends"));
        };
        let mut table = newest.table.clone();
        let io = LakeIo::new(self.tables.storage.clone());
        let files: Vec<DataFile> = batch.iter().flat_map(|one| one.files.files.iter().cloned()).collect();
        let change = version::write_change(&io, &table.metadata, Operation::Append, &files, Removed::Nothing).await?;
        let mut proposal = Proposal::change(change, None, &table.metadata);
        if let Some(change) = &proposal.change {
            proposal.batch = Some(Batch::new(&table.metadata, change)?);
        }
        // The freshest that is known is most likely to be current.
        if let Some(resolved) = self.tables.metadata.cached(&table.ident)
            && let Some(pointer) = resolved.pointer().filter(|p| p.mod_revision > table.pointer.mod_revision)
            && pointer.value.uuid == self.id
        {
            table.pointer = pointer.clone();
        }
        proposal.edit = self.expiring.edit(&self.tables, &table).await;
        let own = DataFiles::new(self.tables.storage.clone(), self.tables.tasks.clone());
        Ok((table, proposal, own, deadline))
    }

    /// Tells each append of a batch how it ended. One that has time left goes back into the line, if it was only that.
    async fn tell(&self, batch: Vec<Waiting>, made: Result<()>, deadline: Instant) {
        let now = Instant::now();
        let in_time = |kind| matches!(kind, Kind::Deadline | Kind::Conflict | Kind::Unavailable) && now >= deadline;
        for one in batch {
            let outcome = match &made {
                Err(error) if in_time(error.kind) && one.deadline > now + GATHER => {
                    let mut lines = self.appends.lock();
                    lines.entry(self.id).or_default().waiting.push_back(one);
                    continue;
                }
                Err(error) if error.kind != Kind::Unknown => {
                    one.files.discard().await;
                    Err(error.clone())
                }
                other => {
                    one.files.keep();
                    other.clone()
                }
            };
            // Nobody may be there to be told.
            let _ = one.done.send(outcome);
        }
    }
}

/// Whether what failed may be the matter of one append's files, and not of all of a batch: a store that cannot be reached is asked once
/// for all of them, since each would wait for it as long again.
fn may_be_of_one(kind: Kind) -> bool {
    !matches!(kind, Kind::Storage | Kind::Unavailable | Kind::Deadline | Kind::Exhausted | Kind::Denied)
}

fn late(table: &Table) -> Error {
    Error::deadline(format!(
        "writing table {}: other appends of this node were before it until the deadline; nothing was committed",
        table.ident
    ))
}

/// What the files of one manifest have in common.
fn layout_of(one: &Waiting) -> (i32, i32) {
    (one.table.metadata.current_schema_id(), one.table.metadata.default_partition_spec_id())
}

/// Takes a line away that its task has left, also by a panic: those in it are told that they are.
struct EndLine {
    appends: Appends,
    id: Uuid,
}

impl Drop for EndLine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.appends.lock().remove(&self.id);
        }
    }
}
