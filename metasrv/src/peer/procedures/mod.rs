//! Procedures, as the leader runs them (semantics, section 12). docs/src/procedures.md has states, limits and failure
//! cases.
//!
//! - [`machine`]: what comes next, and what a step makes of a record: pure;
//! - [`book`]: the procedures that there are, and which are in hand: a value;
//! - [`clock`]: the time that they wait for;
//! - [`kinds`], [`purge`], [`drop_namespace`], [`purge_warehouse`], [`upkeep`]: what they do; [`workers`]: who carries out what touches objects;
//! - [`failpoints`]: where tests have a leader die;
//! - here: the task that puts these together.
//!
//! ```text
//!   not on duty --- on duty in a term ---> look, begin, commit, ... (while a quorum confirms that this peer leads
//!   that term)
//!        ^                                   |
//!        '--------- the term has ended ------'   (what is in hand is dropped)
//! ```
//!
//! Invariants:
//! - a step is carried out only by a leader that is confirmed, and what came of it is committed, with the compare on
//!   the term and on the record's own revision, before the next one begins: so a deposed leader, and one that was
//!   overtaken by a cancel, changes nothing;
//! - nothing is remembered of a procedure but what is in the map: whoever leads next goes on from there.
//!
//! Limits: [`MAX_AT_ONCE`] in hand, [`MAX_PROCEDURES`] looked at and the parents of these, [`FORGOTTEN_AT_ONCE`] forgotten in one transaction.
//! Failure cases: a commit that fails, or of which nobody knows, has the procedure read again after [`AGAIN`]; its
//! step bears to be carried out again. So long after a failure nothing else is tried again either, the clock and the history
//! included.

pub mod book;
pub mod clock;
pub mod drop_namespace;
pub mod failpoints;
#[cfg(test)]
mod kills;
pub mod kinds;
pub mod machine;
pub mod purge;
pub mod purge_warehouse;
pub mod upkeep;
pub mod workers;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use lake_client::clock as time;
use lake_client::procedures::calls::unix_ms;
use lake_client::procedures::{MAX_PROCEDURES, PROCEDURES, Procedure, Record, State, key};
use lake_proto::kv::{Compare, Condition, Op, Revision, Txn};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::book::{Book, Now};
use self::clock::ClusterClock;
use self::failpoints::{Point, reached};
use self::machine::{Cancel, Outcome, Pace, Terms, Together, Turn};
use self::workers::InHand;
use super::counters::Counter;
use super::failure::Failure;
use super::member::Member;
use super::shares::Call;
use crate::state;

/// Procedures in hand at once.
pub const MAX_AT_ONCE: usize = 16;
/// Deleted in one transaction.
const FORGOTTEN_AT_ONCE: usize = 200;
/// With more than so many the leader looks only that often, and not also whenever something has ended.
const FEW: usize = 1000;
/// How often there is a look for what has changed, or is due.
const LOOK: Duration = Duration::from_millis(100);
/// How long a commit may take.
const COMMIT: Duration = Duration::from_secs(5);
/// How long until a procedure is tried again whose commit failed, or for which nothing can be done now.
const AGAIN: Duration = Duration::from_millis(500);
/// How often the cluster's clock is saved while something waits for it.
const SAVE_CLOCK: Duration = Duration::from_secs(60);
/// A procedure is accepted by a clock that was seen in the map at most so long ago, so that its waiting does not begin anew
/// with each leader.
const SAVED_LATELY: Duration = Duration::from_secs(1);

/// What a member knows of procedures.
#[derive(Debug)]
pub struct Procedures {
    pace: Pace,
    in_hand: InHand,
    active: AtomicU64,
    poisoned: AtomicU64,
    /// Steps that this peer has committed.
    pub steps: Counter,
}

impl Procedures {
    /// Nothing is known yet.
    pub fn new(pace: Pace) -> Self {
        let (active, poisoned) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { pace, in_hand: InHand::default(), active, poisoned, steps: Counter::default() }
    }

    /// How many are active, and how many poisoned, if this peer leads; else none.
    pub fn counts(&self) -> (u64, u64) {
        (self.active.load(Ordering::Relaxed), self.poisoned.load(Ordering::Relaxed))
    }

    fn note(&self, (active, poisoned): (u64, u64)) {
        self.active.store(active, Ordering::Relaxed);
        self.poisoned.store(poisoned, Ordering::Relaxed);
    }
}

/// The task: runs procedures whenever this peer is on duty, until it is cancelled.
pub(super) async fn run(member: Weak<Member>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = whenever_on_duty(&member) => {}
    }
}

/// Ends with the member, which is held for one look at a time.
async fn whenever_on_duty(member: &Weak<Member>) {
    let Some(mut on_duty) = member.upgrade().map(|member| member.duties.term()) else { return };
    loop {
        let Ok(term) = on_duty.wait_for(|term| *term != 0).await.map(|term| *term) else { return };
        tokio::select! {
            () = moved_on(&mut on_duty, term) => {}
            () = lead(member, term) => {}
        }
        let Some(member) = member.upgrade() else { return };
        member.procedures.note((0, 0));
    }
}

/// Resolves once this peer is not on duty any more in that term.
async fn moved_on(on_duty: &mut watch::Receiver<u64>, term: u64) {
    // An error is the end of the member, and of this task with it.
    let _ = on_duty.wait_for(|now| *now != term).await;
}

/// A chore of which there is one at a time. One that came to nothing is not begun again at once: what it asked may be refused without a
/// wait, by a disk that is full.
#[derive(Debug, Default)]
struct Single {
    under_way: bool,
    not_before: Option<Instant>,
}

impl Single {
    /// Whether it is to be begun now.
    fn begin(&mut self, now: Instant) -> bool {
        if self.under_way || self.not_before.is_some_and(|until| now < until) {
            return false;
        }
        self.under_way = true;
        true
    }

    fn ended(&mut self, well: bool, now: Instant) {
        *self = Self { under_way: false, not_before: (!well).then(|| now + AGAIN) };
    }
}

/// How long a procedure is left alone that was committed so: until it is tried again after a failure, or what it waits for may be there.
fn pause(id: &str, record: &Record, waits: bool, pace: &Pace) -> Option<Duration> {
    match record.failures {
        0 => waits.then_some(AGAIN),
        failures => Some(pace.retry(id, failures)),
    }
}

/// Something that was in hand, at its end.
enum Done {
    /// It was committed so; whether that is that it waits.
    Committed(Box<Procedure>, bool),
    /// Nothing was to be committed; it is tried again.
    Unchanged(Box<Procedure>),
    /// Nobody knows, or somebody else was first.
    Unknown(String),
    Saved(Option<ClusterClock>),
    Forgotten(Option<Vec<(String, Revision)>>),
}

type Chores = FuturesUnordered<BoxFuture<'static, Done>>;

/// One leadership.
async fn lead(member: &Weak<Member>, term: u64) {
    let Some(leading) = member.upgrade() else { return };
    let mut this = Leading::new(&leading, term);
    drop(leading);
    let mut chores = Chores::new();
    loop {
        let done = tokio::select! {
            () = tokio::time::sleep(LOOK) => None,
            Some(done) = chores.next() => Some(done),
        };
        let Some(member) = member.upgrade() else { return };
        let only_one_ended = done.is_some();
        if let Some(done) = done {
            this.take_back(&member, done);
        }
        // With many of them not each end is worth a look at all.
        if only_one_ended && this.book.len() > FEW {
            continue;
        }
        if member.view.confirmed_term() == Some(term) {
            this.look(&member, &mut chores);
        }
    }
}

struct Leading {
    term: u64,
    book: Book,
    clock: ClusterClock,
    saving: Single,
    forgetting: Single,
    /// The revision up to which the book was read; `None`: it has to be read.
    read: Option<Revision>,
    read_at: Option<Instant>,
}

impl Leading {
    fn new(member: &Member, term: u64) -> Self {
        let clock = ClusterClock::from_entry(member.published.current().state.get(clock::KEY).as_ref(), time::now());
        let (saving, forgetting) = (Single::default(), Single::default());
        Self { term, book: Book::default(), clock, saving, forgetting, read: None, read_at: None }
    }

    fn take_back(&mut self, member: &Member, done: Done) {
        let (now, pace) = (time::now(), &member.procedures.pace);
        match done {
            Done::Committed(procedure, waits) => {
                let Procedure { id, mod_revision, record } = *procedure;
                let until = pause(&id, &record, waits, pace).map(|pause| now + pause);
                self.book.put_back(&id, mod_revision, record, until);
                // It may have been changed since, and seen.
                self.read = None;
            }
            Done::Unchanged(procedure) => {
                let Procedure { id, mod_revision, record } = *procedure;
                self.book.put_back(&id, mod_revision, record, Some(now + AGAIN));
                self.read = None;
            }
            Done::Unknown(id) => {
                self.book.put_back_unknown(&id, now + AGAIN);
                self.read = None;
            }
            Done::Saved(saved) => {
                self.saving.ended(saved.is_some(), now);
                match saved {
                    Some(clock) => self.clock = clock,
                    // Somebody else's, or nobody knows: what is counted goes on from what is there, which is no more.
                    None => {
                        let entry = member.published.current().state.get(clock::KEY);
                        self.clock = ClusterClock::from_entry(entry.as_ref(), now);
                    }
                }
            }
            Done::Forgotten(forgotten) => {
                self.forgetting.ended(forgotten.is_some(), now);
                match forgotten {
                    Some(ids) => self.book.forgotten(&ids),
                    None => self.read = None,
                }
            }
        }
    }

    /// Reads the book again if there is something new, and not more often than there is a look.
    fn read_again(&mut self, member: &Member, now: Instant) {
        if self.read_at.is_some_and(|at| now.saturating_duration_since(at) < LOOK) {
            return;
        }
        let applied = member.published.current();
        let state = &applied.state;
        if self.read.is_none_or(|read| was_touched(state, read)) {
            let listed = state.list(PROCEDURES, None, MAX_PROCEDURES, usize::MAX).entries;
            self.book.read(listed, |id| state.get(&key(id)));
        }
        self.read = Some(state.revision());
        self.read_at = Some(now);
    }

    /// Begins what can be begun.
    fn look(&mut self, member: &Arc<Member>, chores: &mut Chores) {
        let at = time::now();
        self.read_again(member, at);
        let saved_lately = self.clock.was_saved_within(SAVED_LATELY, at);
        let room = MAX_AT_ONCE.saturating_sub(chores.len());
        let now = Now { at, clock_ms: self.clock.now_ms(at), accepts: saved_lately, room };
        let cancel = |record: &Record| kinds::of(record).map_or(Cancel::Now, |kind| kind.cancel(record));
        let waits = |record: &Record| kinds::of(record).is_some_and(|kind| kind.waits_for_children(record));
        let holds = |record: &Record| kinds::of(record).is_some_and(|kind| kind.holds_children(record));
        let look = self.book.look(now, &member.procedures.pace, cancel, waits, holds);
        member.procedures.note(self.book.counts());
        let save = look.accepts || look.waits_for_clock && self.clock.unsaved(at) >= SAVE_CLOCK;
        if save && self.saving.begin(at) {
            chores.push(Box::pin(save_clock(member.clone(), self.term, self.clock)));
        }
        if !look.forget.is_empty() && self.forgetting.begin(at) {
            let ids = look.forget.into_iter().take(FORGOTTEN_AT_ONCE).collect();
            chores.push(Box::pin(forget(member.clone(), self.term, ids)));
        }
        for (procedure, turn) in look.begin {
            self.book.take(&procedure.id);
            chores.push(Box::pin(take_turn(member.clone(), self.term, self.clock, procedure, turn)));
        }
    }
}

/// Whether something under the prefix was changed behind a revision.
fn was_touched(state: &state::State, read: Revision) -> bool {
    if state.revision() == read {
        return false;
    }
    match state.changes().from(read + 1) {
        Ok(mut changes) => {
            changes.any(|change| change.events().iter().any(|event| event.key().starts_with(PROCEDURES)))
        }
        Err(_) => true,
    }
}

/// Does what is to be done for a procedure, and commits what came of it.
async fn take_turn(member: Arc<Member>, term: u64, clock: ClusterClock, procedure: Procedure, turn: Turn) -> Done {
    let pace = member.procedures.pace;
    let before = &procedure.record;
    let Some(kind) = kinds::of(before) else {
        let id = procedure.id.as_str();
        tracing::debug!(id, kind = before.kind, "a procedure of a kind that this build does not know is left alone");
        return Done::Unchanged(Box::new(procedure));
    };
    reached(Point::Begin, before).await;
    let mut waits = false;
    let mut together = None;
    let next = match turn {
        Turn::Accept => {
            let Terms { delay, within } = kind.terms(before, &pace);
            Some(machine::accepted(before, Terms { delay, within }, clock.now_ms(time::now())))
        }
        Turn::Commit(record) => Some(*record),
        Turn::Execute => {
            let (outcome, with) = kind.execute(&member, &procedure).await.apart();
            together = with;
            waits = matches!(outcome, Outcome::Wait(_));
            machine::after(before, outcome, clock.now_ms(time::now()), &pace)
        }
        Turn::Wait(_) | Turn::Forget => None,
    };
    let Some(next) = next else { return Done::Unchanged(Box::new(procedure)) };
    commit(&member, term, procedure, next, together, waits).await
}

async fn commit(
    member: &Member,
    term: u64,
    procedure: Procedure,
    next: Record,
    together: Option<Together>,
    waits: bool,
) -> Done {
    let Procedure { id, mod_revision, record: before } = procedure;
    reached(Point::Uncommitted, &before).await;
    let next = Record { changed_unix_ms: unix_ms(), ..next };
    let (txn, next) = machine::committed(&id, mod_revision, next, together);
    let committed = commit_in(member, term, txn).await;
    match committed {
        Ok(Some(revision)) => {
            reached(Point::Committed, &before).await;
            let steps = next.steps.saturating_sub(before.steps);
            member.procedures.steps.add(steps);
            told(&id, &before, &next);
            Done::Committed(Box::new(Procedure { id, mod_revision: revision, record: next }), waits)
        }
        Ok(None) => Done::Unknown(id),
        Err(failure) => {
            tracing::debug!(id, "a step of a procedure was not committed: {}", failure.message);
            Done::Unknown(id)
        }
    }
}

/// Says what people may want to know.
fn told(id: &str, before: &Record, now: &Record) {
    let (kind, subject, note) = (&now.kind, &now.subject, &now.note);
    match now.state {
        State::Poisoned => {
            tracing::warn!(
                id,
                kind,
                subject,
                "a procedure is poisoned: {note}. `lake meta proc clear` once it is looked into"
            );
        }
        state if state != before.state => tracing::info!(id, kind, subject, state = state.as_str(), "{note}"),
        _ if now.failures > before.failures => {
            tracing::info!(id, kind, subject, step = now.step, failures = now.failures, "a step has failed: {note}");
        }
        _ => tracing::debug!(id, kind, step = now.step, steps = now.steps, "{note}"),
    }
}

async fn save_clock(member: Arc<Member>, term: u64, clock: ClusterClock) -> Done {
    let (txn, saved) = clock.save(time::now());
    match commit_in(&member, term, txn).await {
        Ok(Some(revision)) => Done::Saved(Some(saved(revision, time::now()))),
        Ok(None) => Done::Saved(None),
        Err(failure) => {
            tracing::debug!("the cluster's clock was not saved: {}", failure.message);
            Done::Saved(None)
        }
    }
}

async fn forget(member: Arc<Member>, term: u64, ids: Vec<(String, Revision)>) -> Done {
    let keys = || ids.iter().map(|(id, revision)| (key(id), *revision));
    let when = keys().map(|(key, revision)| Compare::mod_revision(key, revision)).collect();
    let then = keys().map(|(key, _)| Op::delete(key)).collect();
    match commit_in(&member, term, Txn { when, then, otherwise: vec![] }).await {
        Ok(Some(_)) => Done::Forgotten(Some(ids)),
        Ok(None) | Err(_) => Done::Forgotten(None),
    }
}

/// Commits what only the leader of this term may. Says at which revision; `None`: one of its compares did not hold.
async fn commit_in(member: &Member, term: u64, mut txn: Txn) -> Result<Option<Revision>, Failure> {
    txn.when.push(Compare { key: String::new(), condition: Condition::EntryTerm(term) });
    let result = member.commit(txn, None, &Call::own(time::now() + COMMIT)).await?;
    Ok(result.succeeded.then_some(result.revision))
}

#[cfg(test)]
mod tests {
    use lake_client::procedures::kept;

    use super::*;

    #[test]
    fn what_came_to_nothing_is_not_begun_again_at_once() {
        let (mut chore, now) = (Single::default(), time::now());
        assert!(chore.begin(now) && !chore.begin(now + AGAIN), "one at a time");
        chore.ended(false, now);
        assert!(!chore.begin(now) && !chore.begin(now + AGAIN / 2));
        assert!(chore.begin(now + AGAIN));
        chore.ended(true, now + AGAIN);
        assert!(chore.begin(now + AGAIN), "unless it went well");
    }

    #[test]
    fn what_waits_or_has_failed_is_left_alone_for_a_while() {
        let (pace, fresh) = (Pace::default(), Record::new("k", "s", "first", kept(&()), 0));
        assert_eq!(pause("p", &fresh, false, &pace), None, "the next step comes at once");
        assert_eq!(pause("p", &fresh, true, &pace), Some(AGAIN));
        let failed = Record { failures: 3, ..fresh };
        assert_eq!(pause("p", &failed, false, &pace), Some(pace.retry("p", 3)));
    }
}
