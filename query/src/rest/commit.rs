//! A commit of a client, made current.
//!
//! ```text
//!           +-> requirements hold? -> updates applied -> metadata written -> swap the pointer
//!           |      no: 409            no: 400                                  | done: 200
//!           +-- lost the race: on what the winner left  <---------------------+
//!           +-- no answer: read the pointer; ours is in it? done: 200  <------+
//! ```
//! So a commit that lost its race is not bounced: as long as its requirements hold on what others have left, it is applied
//! there. Only a requirement that no longer holds, or a snapshot whose sequence number was passed, is a 409. And that only if the
//! version does not hold the commit's own snapshots: then it was made before, and was sent again by a client, or something on
//! the way, that got no answer.
//!
//! An attempt without an answer is in doubt until the current version tells: its metadata file is the current one or in
//! the metadata log (done), or the pointer has moved past it otherwise (impossible). What was written for it stays until
//! then. Only a doubt that remains is a 500.
//!
//! Commits of one node to one table queue up ([`crate::table::queue`]); one that has lost twice claims the table's next turn, as
//! SQL's do. A client that comes back after a 409 may have the turn already ([`super::comeback`]): its commit is made past the
//! queue, in which others wait for that turn to end. Those that cannot be made whoever is first are told so before they wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use bytes::Bytes;
use iceberg::spec::TableMetadata;
use lake_client::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use lake_client::store::Applied;
use uuid::Uuid;

use super::comeback::Held;
use super::error::{RestError, Result, kind};
use super::evolve::{Change, Evolved, Next};
use super::request::Call;
use super::{Rest, answered};
use crate::error::Kind;
use crate::planted::{self, Bug};
use crate::table::commit::{TURN_LIMIT, remove_expired};
use crate::table::{Tables, version};

/// First and longest pause after a lost race.
const BACKOFF: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(80)];
/// A commit that has lost this often claims the next turn.
const LOSSES_BEFORE_CLAIM: u32 = 2;

/// What a commit made current.
#[derive(Debug)]
pub struct Committed {
    pub location: String,
    pub metadata: Arc<TableMetadata>,
}

/// An attempt whose answer did not come.
#[derive(Debug)]
pub struct Doubt {
    /// The pointer's revision that it expected; 0: no table.
    pub expected: u64,
    pub base_location: String,
    /// Where the metadata is that it was to make current.
    pub location: String,
}

/// What a table's current version says about an attempt in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It was made.
    Done,
    /// It may still be.
    Open,
    /// It was not, and can no longer be.
    Never,
    /// The metadata log no longer reaches back to it.
    Untold,
}

/// What a table's current version says about an attempt in doubt.
pub fn verdict(current: &Versioned<TablePointer>, metadata: &TableMetadata, doubt: &Doubt) -> Verdict {
    let was_current = |wanted: &String| {
        *wanted == current.value.metadata_location
            || metadata.metadata_log().iter().any(|entry| entry.metadata_file == *wanted)
    };
    match () {
        () if was_current(&doubt.location) => Verdict::Done,
        () if doubt.expected >= current.mod_revision => Verdict::Open,
        () if was_current(&doubt.base_location) => Verdict::Never,
        () => Verdict::Untold,
    }
}

struct Commit<'a> {
    rest: &'a Rest,
    call: &'a Call,
    tables: &'a Tables,
    ident: &'a TableIdent,
    change: &'a Change,
    /// Of the answer, if all goes well.
    status: StatusCode,
    deadline: Instant,
    doubts: Vec<(Doubt, Committed)>,
    losses: u32,
    backoff: Backoff,
    /// The claim on the next turn, if this commit has it.
    turn: Option<(Uuid, u64)>,
}

/// The pauses after lost races.
#[derive(Debug)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(BACKOFF[0])
    }
}

impl Backoff {
    /// Waits a little.
    ///
    /// # Errors
    /// 409: the deadline is too near.
    pub async fn pause(&mut self, deadline: Instant) -> Result<()> {
        let pause = rand::random_range(self.0 / 2..=self.0);
        self.0 = (self.0 * 2).min(BACKOFF[1]);
        if Instant::now() + pause >= deadline {
            return Err(RestError::lost("other writers were first, again and again until the deadline"));
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Commits a change to a table that there is. The answer will have this status.
///
/// # Errors
/// As the module says.
pub async fn commit(
    rest: &Rest,
    call: &Call,
    ident: &TableIdent,
    change: &Change,
    status: StatusCode,
) -> Result<Committed> {
    let (tables, deadline) = (&*rest.tables, call.deadline);
    let cached = tables.metadata.cached(ident).and_then(|resolved| resolved.pointer().cloned());
    let known = match cached {
        Some(pointer) => pointer,
        None => tables.metadata.read_table(ident, deadline).await?.ok_or_else(|| no_such_table(ident))?,
    };
    let commit = Commit {
        rest,
        call,
        tables,
        ident,
        change,
        status,
        deadline,
        doubts: Vec::new(),
        losses: 0,
        backoff: Backoff::default(),
        turn: None,
    };
    let outcome = match rest.comebacks.turn(call.client, ident) {
        Some(held) if held.table == known.value.uuid => commit.in_turn(&held, known).await,
        _ => commit.queued(known).await,
    };
    if outcome.as_ref().is_err_and(|error| error.kind == kind::COMMIT_FAILED) {
        rest.comebacks.lost(call.client, ident);
    }
    outcome
}

/// The answer to who asks for a table that there is not.
pub fn no_such_table(ident: &TableIdent) -> RestError {
    RestError::not_found(kind::NO_SUCH_TABLE, format!("table {ident} does not exist"))
}

impl Commit<'_> {
    /// Commits while nobody else may.
    async fn in_turn(mut self, held: &Held, known: Versioned<TablePointer>) -> Result<Committed> {
        self.turn = Some((held.table, held.claim));
        let outcome = self.run(Some(known)).await;
        self.give_up_turn();
        outcome.map(|(made, _)| made)
    }

    /// Commits once those who were before it have.
    async fn queued(mut self, known: Versioned<TablePointer>) -> Result<Committed> {
        let (table, comebacks) = (known.value.uuid, &self.rest.comebacks);
        // A snapshot rests on the one before it: behind others it is probably passed already, and a look costs less than an attempt.
        let is_behind = || comebacks.is_awaited(table) || self.tables.queues.is_taken(table);
        if comebacks.claim(table).is_some() || (self.change.tells() && is_behind()) {
            self.refuse_what_is_lost().await?;
        }
        let Some(mut turn) = self.tables.queues.enter(table, self.deadline).await else {
            return Err(RestError::unavailable(format!(
                "committing to table {}: other commits of this node were before it until the deadline; nothing was committed",
                self.ident
            )));
        };
        let mut hint = if turn.contended() { None } else { turn.hint().or(Some(known)) };
        if let Some(claim) = comebacks.claim(table) {
            await_turn(self.tables, table, claim, self.deadline).await?;
            hint = None;
        }
        let outcome = self.run(hint).await;
        self.give_up_turn();
        let (made, pointer) = outcome?;
        if let Some(pointer) = pointer {
            turn.leave(pointer, self.losses > 0);
        }
        Ok(made)
    }

    /// What does not hold on the newest version will not hold on a later one, but for a race that somebody undoes.
    async fn refuse_what_is_lost(&self) -> Result<()> {
        let now = self.read().await?;
        let metadata = answered(self.deadline, self.tables.cache.table(&now.value.metadata_location)).await;
        // The commit itself tells what is wrong.
        let Ok(metadata) = metadata else { return Ok(()) };
        match self.change.check(Some(&metadata)).and_then(|()| self.change.in_order(&metadata)) {
            Err(error) if !self.change.is_made(&metadata) => Err(error),
            _ => Ok(()),
        }
    }

    async fn run(
        &mut self,
        mut known: Option<Versioned<TablePointer>>,
    ) -> Result<(Committed, Option<Versioned<TablePointer>>)> {
        loop {
            // What is known is good enough to build on, since the swap compares; not to refuse anything.
            let (base, fresh) = match known.take() {
                Some(pointer) => (pointer, false),
                None => (self.read().await?, true),
            };
            let location = base.value.metadata_location.clone();
            let metadata = match answered(self.deadline, self.tables.cache.table(&location)).await {
                Ok(metadata) => metadata,
                // The version is so old that its metadata was removed.
                Err(error) if error.kind == Kind::NotFound && !fresh => continue,
                Err(error) => return Err(self.ended(RestError::of_a_change(error))),
            };
            if let Some(made) = self.settle(&base, &metadata).await? {
                return Ok((made, None));
            }
            let evolved = self.change.check(Some(&metadata)).and_then(|()| self.change.apply(&metadata, &location));
            let next = match evolved {
                Err(_) if !fresh => continue,
                Err(error) if error.kind == kind::COMMIT_FAILED && self.change.is_made(&metadata) => {
                    return self.done_already(location, metadata, base).await;
                }
                Err(error) => return Err(self.ended(error)),
                Ok(Evolved::Unchanged) if !fresh => continue,
                Ok(Evolved::Unchanged) => return self.done_already(location, metadata, base).await,
                Ok(Evolved::Next(next)) => next,
            };
            match self.rest.check(&next.metadata, Some(&metadata), self.deadline).await {
                Err(_) if !fresh => continue,
                checked => checked.map_err(|e| self.ended(e))?,
            }
            match self.attempt(&base, *next).await? {
                Attempt::Done(made, pointer) => return Ok((made, Some(pointer))),
                Attempt::Again(pointer) => known = pointer,
            }
        }
    }

    /// There is nothing to do, or nothing any more.
    async fn done_already(
        &self,
        location: String,
        metadata: Arc<TableMetadata>,
        base: Versioned<TablePointer>,
    ) -> Result<(Committed, Option<Versioned<TablePointer>>)> {
        let kept = (self.status == StatusCode::OK).then_some(location.as_str());
        self.rest.leave_done(self.call, self.status, kept).await?;
        Ok((Committed { location, metadata }, Some(base)))
    }

    async fn read(&self) -> Result<Versioned<TablePointer>> {
        let read = self.tables.metadata.read_table(self.ident, self.deadline).await;
        read.map_err(|e| self.ended(e.into()))?.ok_or_else(|| self.ended(no_such_table(self.ident)))
    }

    async fn attempt(&mut self, base: &Versioned<TablePointer>, next: Next) -> Result<Attempt> {
        let base_location = &base.value.metadata_location;
        let location = version::metadata_location(next.metadata.location(), Some(base_location));
        let json = version::to_json(&next.metadata).map_err(|e| self.ended(RestError::of_a_change(e)))?;
        let json = Bytes::from(json);
        let written = answered(self.deadline, self.tables.storage.write_new(&location, json.clone())).await;
        written.map_err(|e| self.ended(RestError::of_a_change(e)))?;
        let pointer = TablePointer {
            uuid: base.value.uuid,
            metadata_location: location.clone(),
            previous_location: Some(base_location.clone()),
        };
        let claim = self.turn.map(|(_, claim)| claim);
        let kept = (self.status == StatusCode::OK).then_some(location.as_str());
        let writer = self.rest.writer(self.call, self.status, kept)?;
        let swapped = writer.swap_table(self.ident, base.mod_revision, &pointer, claim, self.deadline).await;
        let made = Committed { location, metadata: Arc::new(next.metadata) };
        match swapped {
            Ok(pointer) => {
                // Ended by the swap itself.
                self.turn = None;
                for (_, made) in std::mem::take(&mut self.doubts) {
                    self.discard(&made).await;
                }
                self.tables.cache.put_table(&made.location, made.metadata.clone(), json.len()).await;
                self.rest.rendered.keep(&made.location, json);
                remove_expired(self.tables, &made.metadata, next.expired);
                Ok(Attempt::Done(made, pointer))
            }
            Err(CatalogError::Conflict { .. }) if planted::has(Bug::RestRaceIgnored) => {
                Ok(Attempt::Done(made, base.clone()))
            }
            Err(CatalogError::Conflict { current, resent, .. }) => {
                self.lost(base, made, resent).await;
                self.losses += 1;
                self.claim_turn(base.value.uuid).await;
                if self.turn.is_none() {
                    self.backoff.pause(self.deadline).await.map_err(|e| self.ended(e))?;
                }
                Ok(Attempt::Again(current.filter(|_| !resent)))
            }
            Err(CatalogError::NotYourTurn { turn, resent, .. }) => {
                self.lost(base, made, resent).await;
                self.turn = None;
                await_turn(self.tables, base.value.uuid, turn, self.deadline).await.map_err(|e| self.ended(e))?;
                Ok(Attempt::Again(None))
            }
            // Perhaps by an attempt of this very commit that is in doubt.
            Err(error @ CatalogError::AlreadyDone(_)) => {
                self.discard(&made).await;
                Err(error.into())
            }
            Err(error) => {
                let unknown = error.applied() == Applied::Unknown;
                self.lost(base, made, unknown).await;
                match unknown && Instant::now() < self.deadline {
                    true => Ok(Attempt::Again(None)),
                    false => Err(self.ended(error.into())),
                }
            }
        }
    }

    /// An attempt did not go through, or it is not known whether it did.
    async fn lost(&mut self, base: &Versioned<TablePointer>, made: Committed, unknown: bool) {
        match unknown {
            true => {
                let (expected, base_location) = (base.mod_revision, base.value.metadata_location.clone());
                self.doubts.push((Doubt { expected, base_location, location: made.location.clone() }, made));
            }
            false => self.discard(&made).await,
        }
    }

    /// What the current version says about the attempts in doubt: one of them made it, or none of them ever can.
    async fn settle(
        &mut self,
        current: &Versioned<TablePointer>,
        metadata: &TableMetadata,
    ) -> Result<Option<Committed>> {
        let mut open = Vec::new();
        let mut doubts = std::mem::take(&mut self.doubts).into_iter();
        while let Some((doubt, made)) = doubts.next() {
            match verdict(current, metadata, &doubt) {
                Verdict::Done => {
                    for (_, other) in open.into_iter().chain(doubts) {
                        self.discard(&other).await;
                    }
                    return Ok(Some(made));
                }
                Verdict::Open => open.push((doubt, made)),
                Verdict::Never => self.discard(&made).await,
                Verdict::Untold => {
                    self.doubts.push((doubt, made));
                    return Err(self.ended(RestError::lost("others have committed since")));
                }
            }
        }
        self.doubts = open;
        Ok(None)
    }

    async fn discard(&self, made: &Committed) {
        self.tables.storage.discard(std::slice::from_ref(&made.location)).await;
    }

    /// Claims the next turn, if this commit has lost often enough. Without an answer it goes on as before.
    async fn claim_turn(&mut self, table: Uuid) {
        if self.losses < LOSSES_BEFORE_CLAIM || self.turn.is_some() {
            return;
        }
        let deadline = self.deadline.min(Instant::now() + TURN_LIMIT);
        match self.tables.writer.claim_turn(table, Uuid::new_v4(), deadline).await {
            Ok(claim) => self.turn = claim.map(|claim| (table, claim)),
            Err(error) => tracing::debug!(table = %self.ident, %error, "claiming the next turn failed"),
        }
    }

    /// Ends a claim that this commit has and will not use.
    fn give_up_turn(&mut self) {
        let Some((table, claim)) = self.turn.take() else { return };
        let writer = self.tables.writer.clone();
        self.tables.tasks.spawn(async move {
            if let Err(error) = writer.end_turn(table, claim, Instant::now() + TURN_LIMIT).await {
                tracing::debug!(%table, %error, "ending an unused claim failed");
            }
        });
    }

    /// The error that ends this commit, with what is known of its outcome.
    fn ended(&self, error: RestError) -> RestError {
        match self.doubts.is_empty() {
            true => error,
            false => RestError::unknown(format!(
                "committing to table {}: an answer of the metadata was lost, and then: {}; whether it was committed is \
                 unknown: look before doing it again",
                self.ident, error.message
            )),
        }
    }
}

/// Waits until another's claim on a table's next turn has ended.
///
/// # Errors
/// 409: not by the deadline.
pub async fn await_turn(tables: &Tables, table: Uuid, claim: u64, deadline: Instant) -> Result<()> {
    match crate::table::commit::await_turn(tables, table, claim, deadline).await {
        true => Ok(()),
        false => Err(RestError::lost("it was the turn of other writers until the deadline")),
    }
}

enum Attempt {
    Done(Committed, Versioned<TablePointer>),
    /// On this pointer, or on what is current.
    Again(Option<Versioned<TablePointer>>),
}
