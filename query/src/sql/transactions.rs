//! The transactions that are open on this node.
//!
//! ```text
//! BEGIN -> open --- a statement fails ---> aborted
//!           |  `--- COMMIT: conflict ----->   |
//!           |                                 | ROLLBACK
//!           | COMMIT, ROLLBACK                v
//!           `-----------------------------> ended <---- idle for [`IDLE_LIMIT`], or open for [`LIFE_LIMIT`]
//! ```
//! What a transaction has read and changed is in memory here ([`Staged`]), so it belongs to this node, which its handle names.
//! Its statements run one at a time. Whatever becomes of the node, COMMIT has one outcome: it is a record under the
//! transaction's id, in the commit's own transaction, and where a transaction is no longer known, whoever is asked to end it
//! leaves the record that it was rolled back. Either is found by all that ask later.
//!
//! Drivers ask for a change and fetch its answer apart. What was asked for is remembered until then, and COMMIT refused: the client
//! may take for made what never ran.
//!
//! Bounds: [`MAX_OPEN`] transactions, their life, [`MAX_STATEMENTS`], [`MAX_UNFETCHED`], and those of what is staged
//! ([`crate::table::staged`]). What is over is told by name.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::once;
use crate::error::{Error, Kind, Result};
use crate::outcomes::fingerprint;
use crate::table::conflict::Isolation;
use crate::table::scope::{Once, Outcome, Scope};
use crate::table::staged::Staged;
use crate::table::{TRANSACTIONS, Tables, catalog_error};

/// Most transactions open on a node.
pub const MAX_OPEN: usize = 256;
/// A transaction without a statement for so long is rolled back.
pub const IDLE_LIMIT: Duration = Duration::from_secs(5 * 60);
/// A transaction that has been open for so long is rolled back.
pub const LIFE_LIMIT: Duration = Duration::from_secs(60 * 60);
/// Most statements of a transaction.
pub const MAX_STATEMENTS: u32 = 1_000;
/// Most changes of a transaction that were asked for and whose answers were not fetched.
pub const MAX_UNFETCHED: usize = 100;
/// Most characters of a statement in an error.
const LONGEST_SHOWN: usize = 100;
/// From one look for those that have been open too long to the next.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How many transactions that have ended are remembered.
const ENDED_REMEMBERED: usize = 1_000;

/// A transaction, as its client names it: `<id>@<address of its node>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    pub id: Uuid,
    pub node: String,
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.node)
    }
}

impl std::str::FromStr for Handle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::invalid("this is no transaction of lake's");
        let (id, node) = text.split_once('@').ok_or_else(wrong)?;
        Ok(Self { id: Uuid::try_parse(id).map_err(|_| wrong())?, node: node.to_owned() })
    }
}

/// How a transaction is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Commit,
    RollBack,
}

/// The open transactions of a node.
#[derive(Debug)]
pub struct Transactions {
    tables: Arc<Tables>,
    /// This node's, as clients know it.
    node: String,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    open: HashMap<Uuid, Arc<Open>>,
    /// How those that were open last have ended.
    ended: VecDeque<(Uuid, End)>,
}

#[derive(Debug)]
pub(super) struct Open {
    id: Uuid,
    staged: Arc<Staged>,
    /// The operation that the client calls it, whose statements are those of the transaction.
    operation: Option<Arc<Once>>,
    began: Instant,
    /// Why it is aborted: also while one of its statements is running, as another's rows may fail then.
    failed: Mutex<Option<String>>,
    /// Changes that were asked for and whose answers were not handed out: the ids of their tickets, and what they are.
    unfetched: Mutex<Vec<(Uuid, String)>>,
    state: Arc<tokio::sync::Mutex<State>>,
}

#[derive(Debug)]
struct State {
    last_used: Instant,
    statements: u32,
    /// Of all its statements so far.
    fingerprint: u64,
}

impl Open {
    pub(super) fn new(isolation: Isolation, operation: Option<Arc<Once>>) -> Self {
        let id = Uuid::new_v4();
        let mut records = vec![Arc::new(Once::new(TRANSACTIONS, &id.to_string(), 0))];
        records.extend(operation.clone());
        let now = Instant::now();
        let state = State { last_used: now, statements: 0, fingerprint: 0 };
        let staged = Arc::new(Staged::new(isolation, records));
        let (failed, state) = (Mutex::default(), Arc::new(tokio::sync::Mutex::new(state)));
        Self { id, staged, operation, began: now, failed, unfetched: Mutex::default(), state }
    }

    fn failed(&self) -> MutexGuard<'_, Option<String>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `Invalid`: it is aborted.
    fn check(&self) -> Result<()> {
        self.failed().as_deref().map_or(Ok(()), |why| Err(aborted(why)))
    }

    fn unfetched(&self) -> MutexGuard<'_, Vec<(Uuid, String)>> {
        self.unfetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts it if the answer of a change was not fetched.
    ///
    /// # Errors
    /// `Invalid`, naming the first of them.
    fn check_fetched(&self) -> Result<()> {
        let Some((why, more)) = self
            .unfetched()
            .split_first()
            .map(|((_, sql), rest)| (format!("the answer of a change was never fetched: {sql}"), rest.len()))
        else {
            return Ok(());
        };
        self.failed().get_or_insert_with(|| why.clone());
        let others = if more > 0 { format!(" (and of {more} more)") } else { String::new() };
        Err(Error::invalid(format!(
            "{why}{others}; nothing was committed, and only ROLLBACK ends the transaction: then run it again, and fetch what each \
             statement returns before COMMIT (in ADBC: fetchall() after execute(), or executemany())"
        )))
    }

    /// The tables as the transaction sees them.
    pub(super) fn tables(&self, tables: &Tables) -> Arc<Tables> {
        tables.within(Scope::Within(self.staged.clone()))
    }

    fn enter(&self) -> Result<OwnedMutexGuard<State>> {
        self.state.clone().try_lock_owned().map_err(|_| {
            Error::conflict("another statement of this transaction is running; nothing was done: wait for it to end")
        })
    }

    fn is_due(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => state.last_used.elapsed() > IDLE_LIMIT || self.began.elapsed() > LIFE_LIMIT,
            // One of its statements is running, or it is ending.
            Err(_) => false,
        }
    }

    /// Commits; the operation's outcome is the answer, if it was done before.
    pub(super) async fn commit(&self, tables: &Tables, statements: u64, deadline: Instant) -> Result<()> {
        let Some(operation) = &self.operation else { return self.staged.commit(tables, deadline).await };
        operation.set_statement(statements);
        match self.staged.commit(tables, deadline).await {
            Err(error) if matches!(error.kind, Kind::Conflict | Kind::Unknown) => {
                let first = match once::find(&tables.writer, operation, deadline).await {
                    Ok(Some(first)) => first,
                    Ok(None) => return Err(error),
                    Err(why) => return Err(once::unsettled(operation.id(), error, &why)),
                };
                if !operation.left(&first) {
                    self.staged.roll_back(tables).await;
                }
                once::answer(operation, &first).map(drop)
            }
            Err(error) => Err(error),
            Ok(()) => once::settle(&tables.writer, operation, Ok(0), deadline).await.map(drop),
        }
    }
}

impl Transactions {
    pub fn new(tables: Arc<Tables>, node: String) -> Self {
        Self { tables, node, known: Mutex::default() }
    }

    /// The address of this node, as handles name it.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Begins one. With an operation id, the whole transaction is made once by it.
    ///
    /// # Errors
    /// `Exhausted`: there are [`MAX_OPEN`] already. `Invalid`: the operation id.
    pub fn begin(&self, isolation: Isolation, operation: Option<&str>) -> Result<Handle> {
        if !self.tables.metadata.capabilities().multi_key {
            return Err(Error::not_supported(
                "a transaction needs a cluster: the metadata of library mode changes one key at a time; nothing was done: send each \
                 statement by itself",
            ));
        }
        let operation = match operation {
            Some(id) => {
                once::check_id(id)?;
                Some(Arc::new(Once::new(once::DOMAIN, id, 0)))
            }
            None => None,
        };
        let open = Arc::new(Open::new(isolation, operation));
        let id = open.id;
        let mut known = self.lock();
        if known.open.len() >= MAX_OPEN {
            return Err(Error::exhausted(format!(
                "{MAX_OPEN} transactions are open on this node already; nothing was done: try again, or at another node"
            )));
        }
        known.open.insert(id, open);
        Ok(Handle { id, node: self.node.clone() })
    }

    /// Whether it is open here.
    pub fn has(&self, handle: &Handle) -> bool {
        self.lock().open.contains_key(&handle.id)
    }

    /// Runs one of its statements, which this number tells from others, on the tables as the transaction sees them. An error aborts the transaction.
    ///
    /// # Errors
    /// The statement's; `NotFound`: there is no such transaction; `Invalid`: it is aborted; `Conflict`: another of its
    /// statements is running; `Exhausted`.
    pub async fn statement<T, F>(
        &self,
        handle: &Handle,
        fingerprint: u64,
        run: impl FnOnce(Arc<Tables>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.run(handle, Some(fingerprint), run).await
    }

    /// The same for what only looks, and is none of its statements.
    ///
    /// # Errors
    /// As [`Transactions::statement`].
    pub async fn look<T, F>(&self, handle: &Handle, run: impl FnOnce(Arc<Tables>) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.run(handle, None, run).await
    }

    async fn run<T, F>(&self, handle: &Handle, statement: Option<u64>, run: impl FnOnce(Arc<Tables>) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let open = self.find(handle)?;
        // Also while what is given up has not ended yet.
        open.check()?;
        let mut state = open.enter()?;
        open.check()?;
        if let Some(statement) = statement {
            if state.statements >= MAX_STATEMENTS {
                return Err(Error::exhausted(format!(
                    "a transaction has at most {MAX_STATEMENTS} statements; COMMIT or ROLLBACK ends it"
                )));
            }
            state.statements += 1;
            let before = state.fingerprint.to_le_bytes();
            state.fingerprint = fingerprint(&[&before, &statement.to_le_bytes()]);
        }
        state.last_used = Instant::now();
        let result = run(open.tables(&self.tables)).await;
        state.last_used = Instant::now();
        result.map_err(|mut error| {
            open.failed().get_or_insert_with(|| error.message.clone());
            error.message.push_str("; the transaction is aborted, and only ROLLBACK ends it");
            error
        })
    }

    /// A change was planned, and its ticket is about to be handed out: COMMIT is refused until [`Transactions::fetched`] is told of this
    /// id. One whose ticket was lost on the way to the client stays, though the client may have asked for it again: two that read
    /// the same may be two changes.
    ///
    /// # Errors
    /// `NotFound` and `Invalid` as [`Transactions::statement`]; `Exhausted`: there are [`MAX_UNFETCHED`], which aborts it.
    pub fn asked(&self, handle: &Handle, id: Uuid, sql: &str) -> Result<()> {
        let open = self.find(handle)?;
        open.check()?;
        let mut unfetched = open.unfetched();
        if unfetched.len() < MAX_UNFETCHED {
            unfetched.push((id, shortened(sql)));
            return Ok(());
        }
        drop(unfetched);
        let error = Error::exhausted(format!(
            "the answers of {MAX_UNFETCHED} changes of this transaction were not fetched; nothing was done, and the transaction is \
             aborted: only ROLLBACK ends it; then run it again, and fetch what each statement returns"
        ));
        self.fail(handle, &error);
        Err(error)
    }

    /// A change has been made, and its client is told.
    pub fn fetched(&self, handle: &Handle, id: Uuid) {
        if let Ok(open) = self.find(handle) {
            open.unfetched().retain(|(asked, _)| *asked != id);
        }
    }

    /// One of its statements has failed elsewhere than in [`Transactions::statement`]: it is aborted.
    pub fn fail(&self, handle: &Handle, error: &Error) {
        if let Ok(open) = self.find(handle) {
            open.failed().get_or_insert_with(|| error.message.clone());
        }
    }

    /// One of its statements begins to change something.
    pub(super) fn changing<'a>(&'a self, handle: &'a Handle) -> Changing<'a> {
        Changing { transactions: self, handle, ended: false }
    }

    /// Ends a transaction. Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// Of a commit: `Invalid` if it is aborted, or the answer of a change was not fetched, and those of [`Staged::commit`]; after `Unavailable` and `Deadline` it is open
    /// as before, after others it is aborted. `NotFound`: it is gone, and was not committed.
    pub async fn end(self: &Arc<Self>, handle: &Handle, end: End, deadline: Instant) -> Result<()> {
        let (transactions, handle) = (self.clone(), handle.clone());
        self.tables.owned(async move { transactions.end_now(&handle, end, deadline).await }).await
    }

    async fn end_now(&self, handle: &Handle, end: End, deadline: Instant) -> Result<()> {
        let Ok(open) = self.find(handle) else { return self.settle(handle, end, deadline).await };
        let failed = open.check();
        let mut state = match (end, failed) {
            (End::Commit, failed) => {
                failed?;
                open.enter()?
            }
            // What was given up of it ends soon.
            (End::RollBack, Err(_)) => {
                let ended = tokio::time::timeout_at(deadline.into(), open.state.clone().lock_owned()).await;
                ended.or_else(|_| open.enter())?
            }
            (End::RollBack, Ok(())) => open.enter()?,
        };
        if end == End::RollBack {
            open.staged.roll_back(&self.tables).await;
            self.forget(open.id, end);
            return Ok(());
        }
        open.check()?;
        open.check_fetched()?;
        match open.commit(&self.tables, state.fingerprint, deadline).await {
            Ok(()) => {
                self.forget(open.id, end);
                Ok(())
            }
            // COMMIT again looks for its record.
            Err(error) if error.kind == Kind::Unknown => {
                self.lock().open.remove(&open.id);
                Err(error)
            }
            Err(error) if matches!(error.kind, Kind::Unavailable | Kind::Deadline) => {
                state.last_used = Instant::now();
                Err(error)
            }
            Err(error) => {
                open.failed().get_or_insert_with(|| error.message.clone());
                Err(error)
            }
        }
    }

    /// Ends one that is not open here: by what is kept of it, or by leaving that it was rolled back.
    pub async fn settle(&self, handle: &Handle, end: End, deadline: Instant) -> Result<()> {
        let remembered = self.lock().ended.iter().find(|(id, _)| *id == handle.id).map(|(_, end)| *end);
        let committed = match remembered {
            Some(ended) => ended == End::Commit,
            None => {
                let once = Once::new(TRANSACTIONS, &handle.id.to_string(), 0);
                let gone = Some((Kind::NotFound.as_str().to_owned(), "rolled back".to_owned()));
                let kept = self.tables.writer.leave_outcome(&once.record(gone)?, deadline).await;
                let kept = kept.map_err(|e| catalog_error("looking up how a transaction has ended", e))?;
                Outcome::read(once.id(), &kept)?.refusal.is_none()
            }
        };
        match (end, committed) {
            (End::Commit, true) | (End::RollBack, false) => Ok(()),
            (End::Commit, false) => Err(gone(handle)),
            (End::RollBack, true) => {
                Err(Error::invalid(format!("transaction {} was committed, and cannot be rolled back", handle.id)))
            }
        }
    }

    /// Rolls back what has been open or idle for too long, until it is dropped.
    pub async fn watch(&self) -> Infallible {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let due: Vec<Arc<Open>> = self.lock().open.values().filter(|open| open.is_due()).cloned().collect();
            for open in due {
                tracing::info!(transaction = %open.id, "a transaction was idle or open for too long and is rolled back");
                self.roll_back(&open).await;
            }
        }
    }

    /// Rolls back all of them: the node stops.
    pub async fn close(&self) {
        let open: Vec<Arc<Open>> = self.lock().open.values().cloned().collect();
        for open in open {
            self.roll_back(&open).await;
        }
    }

    /// Rolls back one without a statement that runs.
    async fn roll_back(&self, open: &Open) {
        if let Ok(_state) = open.enter() {
            *open.failed() = Some("it was rolled back, having been open for too long".to_owned());
            open.staged.roll_back(&self.tables).await;
            self.forget(open.id, End::RollBack);
        }
    }

    fn find(&self, handle: &Handle) -> Result<Arc<Open>> {
        self.lock().open.get(&handle.id).cloned().ok_or_else(|| gone(handle))
    }

    fn forget(&self, id: Uuid, end: End) {
        let mut known = self.lock();
        known.open.remove(&id);
        known.ended.push_back((id, end));
        if known.ended.len() > ENDED_REMEMBERED {
            known.ended.pop_front();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A statement that changes something in a transaction. If it is given up before it has ended, as when its client cancels it, the
/// transaction is aborted: a part of what it does may be staged.
#[derive(Debug)]
pub(super) struct Changing<'a> {
    transactions: &'a Transactions,
    handle: &'a Handle,
    ended: bool,
}

impl Changing<'_> {
    /// It has, with whatever.
    pub fn ended(mut self) {
        self.ended = true;
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.transactions.fail(self.handle, &Error::cancelled("a statement of it was cancelled"));
        }
    }
}

/// The beginning of a statement, for errors.
pub(crate) fn shortened(sql: &str) -> String {
    let sql = sql.trim();
    match sql.char_indices().nth(LONGEST_SHOWN) {
        Some((end, _)) => format!("{}...", &sql[..end]),
        None => sql.to_owned(),
    }
}

fn aborted(why: &str) -> Error {
    Error::invalid(format!(
        "the transaction is aborted, and only ROLLBACK ends it; nothing of it was committed (what had failed: {why})"
    ))
}

fn gone(handle: &Handle) -> Error {
    Error::not_found(format!(
        "transaction {} is not open at {}: it was ended, was idle for more than {} minutes or open for more than {}, or its node \
         was stopped; unless COMMIT ended it, nothing of it was committed: run it again, and prepare again what was prepared in it",
        handle.id,
        handle.node,
        IDLE_LIMIT.as_secs() / 60,
        LIFE_LIMIT.as_secs() / 60
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_names_its_node() {
        let handle = Handle { id: Uuid::new_v4(), node: "10.0.0.1:9201".to_owned() };
        assert_eq!(handle.to_string().parse::<Handle>().unwrap(), handle);
        for wrong in ["", "x@y", &Uuid::new_v4().to_string()] {
            assert!(wrong.parse::<Handle>().is_err(), "{wrong}");
        }
    }
}
