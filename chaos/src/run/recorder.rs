//! Takes down what happens, in one order.
//!
//! An event's place in the list is taken under the lock that also reads the clock: what ended before something else began
//! stands before it. An invocation is recorded before anything is sent, an end after the answer is here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lake_client::clock;
use lake_client::store::{Applied, Error};
use tokio_util::sync::CancellationToken;

use crate::history::{
    Accounts, Action, Append, Bank, Cached, Catalog, Fault, Hot, Kind, Operation, Process, Set, Table, Watch,
};
use crate::sql::{Failure, What};

/// Most events of one run. They are held in memory until the end.
pub const MAX_OPERATIONS: usize = 4_000_000;
/// Most bytes that all events together may take: a read of a long list takes more than others.
pub const MAX_BYTES: usize = 1 << 30;
/// What an event takes besides what was read or written.
const EVENT_BYTES: usize = 200;

/// How many operations have ended how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub ok: u64,
    pub unknown: u64,
    /// The system said no, as it should: a compare that found another value, for one.
    pub refused: u64,
    /// Not served, and surely not done.
    pub failed: u64,
}

impl Tally {
    /// All that have ended.
    pub fn ended(&self) -> u64 {
        self.ok + self.unknown + self.refused + self.failed
    }
}

#[derive(Debug, Default)]
struct Taken {
    operations: Vec<Operation>,
    bytes: usize,
    tally: Tally,
    /// Errors by the first words of their text.
    errors: BTreeMap<String, u64>,
}

/// The history under way.
#[derive(Debug)]
pub struct Recorder {
    started: Instant,
    taken: Mutex<Taken>,
    next_process: AtomicU64,
    full: CancellationToken,
}

impl Recorder {
    /// Time begins now. Processes are numbered from 0.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            started: clock::now(),
            taken: Mutex::default(),
            next_process: AtomicU64::new(0),
            full: CancellationToken::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since time began.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Since time began.
    pub fn elapsed(&self) -> std::time::Duration {
        clock::since(self.started)
    }

    /// Another client of the history.
    pub fn scribe(self: &Arc<Self>) -> Scribe {
        let process = self.next_process.fetch_add(1, Ordering::Relaxed);
        Scribe { recorder: self.clone(), process }
    }

    /// What the nemesis did.
    pub fn fault(&self, fault: Fault) {
        self.record(Process::Nemesis, Kind::Info, Action::Fault(fault), |operation| operation);
    }

    /// How many client operations have ended so far.
    pub fn tally(&self) -> Tally {
        self.lock().tally
    }

    /// The events behind the first `seen`.
    pub fn since(&self, seen: usize) -> Vec<Operation> {
        self.lock().operations.get(seen..).unwrap_or_default().to_vec()
    }

    /// Whether there is no room for more: clients end then, and so does the run.
    pub fn is_full(&self) -> bool {
        self.full.is_cancelled()
    }

    /// Returns once there is no room for more.
    pub async fn full(&self) {
        self.full.cancelled().await;
    }

    /// All events so far, and how often operations ended in which error.
    pub fn take(&self) -> (Vec<Operation>, BTreeMap<String, u64>) {
        let mut taken = self.lock();
        (std::mem::take(&mut taken.operations), taken.errors.clone())
    }

    fn record(&self, process: Process, kind: Kind, action: Action, facts: impl FnOnce(Operation) -> Operation) {
        let mut taken = self.lock();
        let mut operation = facts(Operation::new(process, kind, self.now_ns(), action));
        operation.index = taken.operations.len() as u64;
        if matches!(process, Process::Client(_)) {
            match kind {
                Kind::Ok => taken.tally.ok += 1,
                Kind::Fail if operation.refusal.is_some() => taken.tally.refused += 1,
                Kind::Fail => taken.tally.failed += 1,
                Kind::Info => taken.tally.unknown += 1,
                Kind::Invoke => {}
            }
        }
        taken.bytes += bytes_of(&operation.action);
        taken.operations.push(operation);
        // What is under way still has its place.
        if taken.operations.len() >= MAX_OPERATIONS || taken.bytes >= MAX_BYTES {
            self.full.cancel();
        }
    }
}

/// About what an event takes, in memory and in the file.
fn bytes_of(action: &Action) -> usize {
    /// Of one number in a list, and of one entry in a map.
    const NUMBER: usize = 8;
    const ENTRY: usize = 40;
    let list = |list: &Option<Vec<i64>>| list.as_ref().map_or(0, |list| list.len() * NUMBER);
    EVENT_BYTES
        + match action {
            Action::Set(Set::Read { elements, .. }) => list(elements),
            Action::Append(steps) => steps
                .iter()
                .map(|step| match step {
                    Append::Append { .. } => ENTRY,
                    Append::Read { list: read, .. } => ENTRY + list(read),
                })
                .sum(),
            Action::Bank(Bank::Open { balances } | Bank::Read { balances: Some(balances) }) => balances.len() * ENTRY,
            Action::Watch(Watch::Change { changes } | Watch::Next { changes: Some(changes), .. }) => {
                changes.len() * ENTRY
            }
            Action::Table(Table::Read { rows: Some(rows), .. }) => {
                rows.values().map(|values| ENTRY + values.len() * NUMBER).sum()
            }
            Action::Table(Table::Shared { rows: Some(rows), .. }) => {
                rows.values().flatten().map(|list| ENTRY + list.len() * NUMBER).sum()
            }
            Action::Accounts(Accounts::Read { balances: Some(balances), .. }) => balances.len() * ENTRY,
            Action::Table(Table::Line { snapshots: Some(line), .. }) => line.len() * ENTRY,
            Action::Catalog(Catalog::Tree { tables: Some(tables), .. }) => tables.len() * ENTRY,
            Action::Cached(Cached::Read { values: Some(values), .. }) => values.len() * ENTRY,
            Action::Hot(Hot::Worked { chores: Some(chores), .. })
            | Action::Upkeep(Hot::Worked { chores: Some(chores), .. }) => chores.len() * 2 * ENTRY,
            Action::Hot(Hot::Fences { line: Some(line), .. })
            | Action::Upkeep(Hot::Fences { line: Some(line), .. }) => line.len() * ENTRY,
            Action::Hot(Hot::Read { whole, odd, .. } | Hot::Past { whole, odd, .. })
            | Action::Upkeep(Hot::Read { whole, odd, .. } | Hot::Past { whole, odd, .. }) => {
                list(whole) + odd.len() * ENTRY
            }
            Action::Watch(Watch::List { entries: Some(entries), .. } | Watch::Final { entries: Some(entries) }) => {
                entries.len() * ENTRY
            }
            _ => 0,
        }
}

/// What one client writes down. After an unknown outcome it goes on under a new process number.
#[derive(Debug)]
pub struct Scribe {
    recorder: Arc<Recorder>,
    process: u64,
}

impl Scribe {
    /// Another client of the same history, for what this one does at the same time.
    pub fn beside(&self) -> Scribe {
        self.recorder.scribe()
    }

    /// An operation begins.
    pub fn invoke(&self, action: Action) {
        self.record(Kind::Invoke, action, |operation| operation);
    }

    /// It happened. `revision`: of the change or of the entry; `peer`: who answered, if that is known.
    pub fn ok(&self, action: Action, revision: Option<u64>, peer: Option<u64>) {
        self.record(Kind::Ok, action, |operation| Operation { revision, peer, ..operation });
    }

    /// It happened, and the answer shows something that must not be: `what`.
    pub fn amiss(&self, action: Action, revision: Option<u64>, peer: Option<u64>, what: &str) {
        self.record(Kind::Ok, action, |operation| Operation { revision, peer, ..operation }.because(what));
    }

    /// It was refused, as it should be: it did not happen, and never will.
    pub fn refused(&self, action: Action, why: &str) {
        self.record(Kind::Fail, action, |operation| operation.refused(why));
    }

    /// It was not served: it did not happen, and never will.
    fn failed(&self, action: Action, why: &str, peer: Option<u64>) {
        self.record(Kind::Fail, action, |operation| Operation { peer, ..operation }.because(shortened(why)));
    }

    /// Nobody knows whether it happened, or will yet.
    pub fn unknown(&mut self, action: Action, why: &str) {
        self.record(Kind::Info, action, |operation| operation.because(shortened(why)));
        self.process = self.recorder.next_process.fetch_add(1, Ordering::Relaxed);
    }

    /// A change that ended in an error: as the client's error says.
    pub fn change_failed(&mut self, action: Action, error: &Error) {
        self.count_error(error);
        match error.applied() {
            Applied::No => self.failed(action, &error.to_string(), None),
            Applied::Unknown => self.unknown(action, &error.to_string()),
        }
    }

    /// A read that ended in an error has done nothing.
    pub fn read_failed(&self, action: Action, error: &Error, peer: Option<u64>) {
        self.count_error(error);
        self.failed(action, &error.to_string(), peer);
    }

    /// A statement that changes something ended in an error: as that says. `peer`: the query node that was asked.
    pub fn statement_failed(&mut self, action: Action, failure: &Failure, peer: u64) {
        self.count_failure(failure);
        match failure.what {
            What::Conflict => self.record(Kind::Fail, action, |operation| {
                Operation { peer: Some(peer), ..operation }.refused(shortened(&failure.message))
            }),
            What::Refused | What::NotServed => self.failed(action, &failure.message, Some(peer)),
            What::Unknown => self.unknown(action, &failure.message),
        }
    }

    /// A query that ended in an error has done nothing.
    pub fn query_failed(&self, action: Action, failure: &Failure, peer: u64) {
        self.count_failure(failure);
        self.failed(action, &failure.message, Some(peer));
    }

    fn count_failure(&self, failure: &Failure) {
        *self.recorder.lock().errors.entry(format!("sql: {}", failure.kind)).or_default() += 1;
    }

    fn count_error(&self, error: &Error) {
        let kind = match error {
            Error::Invalid(_) => "invalid",
            Error::Refused { .. } => "refused",
            Error::Overloaded { .. } => "overloaded",
            Error::InDoubt { .. } => "in doubt",
            Error::SessionExpired { .. } => "session expired",
            Error::Unavailable { applied: Applied::No, .. } => "unavailable, not applied",
            Error::Unavailable { applied: Applied::Unknown, .. } => "unavailable, outcome unknown",
            Error::SnapshotExpired { .. } => "snapshot expired",
            Error::Compacted { .. } => "compacted",
            Error::Internal { .. } => "internal",
        };
        *self.recorder.lock().errors.entry(kind.to_owned()).or_default() += 1;
    }

    fn record(&self, kind: Kind, action: Action, facts: impl FnOnce(Operation) -> Operation) {
        self.recorder.record(Process::Client(self.process), kind, action, facts);
    }
}

fn shortened(error: &str) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
}

/// More of an error's text is not kept.
const MAX_ERROR_CHARS: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{History, Register};

    fn read(value: Option<i64>) -> Action {
        Action::Register(Register::Read { key: 1.into(), value })
    }

    #[test]
    fn a_recorder_is_full_when_what_it_holds_is_much() {
        let recorder = Recorder::new();
        let scribe = recorder.scribe();
        let long = Action::Set(Set::Read { key: 1.into(), elements: Some(vec![7; MAX_BYTES / 8 / 4]) });
        scribe.invoke(long.clone());
        assert!(!recorder.is_full());
        for _ in 0..4 {
            scribe.ok(long.clone(), None, None);
        }
        assert!(recorder.is_full());
    }

    #[test]
    fn a_process_is_spent_by_an_unknown_outcome_and_the_history_is_well_formed() {
        let recorder = Recorder::new();
        let (mut one, two) = (recorder.scribe(), recorder.scribe());
        one.invoke(read(None));
        two.invoke(read(None));
        one.unknown(read(None), "lost");
        two.ok(read(Some(3)), Some(7), Some(2));
        one.invoke(read(None));
        one.refused(read(None), "no");
        two.invoke(read(None));
        assert_eq!(recorder.tally(), Tally { ok: 1, unknown: 1, refused: 1, failed: 0 });
        let history = History::new(recorder.take().0).unwrap();
        let processes: Vec<u64> = history.calls().iter().map(|call| call.process).collect();
        assert_eq!(processes, [0, 1, 2, 1]);
        assert_eq!((history.operations()[3].revision, history.operations()[3].peer), (Some(7), Some(2)));
        assert!(history.operations().windows(2).all(|pair| pair[0].time_ns <= pair[1].time_ns));
    }
}
