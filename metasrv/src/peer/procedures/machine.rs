//! What comes next for a procedure, and what a step that was carried out makes of it: pure functions of its record,
//! and of what the cluster's clock shows.
//!
//! ```text
//!   not accepted --> Accept --> Wait until it is due --> Execute --> what came of it --> Execute ...
//!   asked to be cancelled, its kind allows it --> cancelled;   its deadline passed --> poisoned
//!   ended --> Date (when) --> Wait until its history is old --> Forget
//! ```

use std::time::Duration;

use lake_client::procedures::{Kept, Record, State, note};
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Op, Revision, Txn};

use super::clock::millis;

/// The times and counts that procedures keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// How long what was dropped is kept before it is purged.
    pub retention: Duration,
    /// How long after a failure a step is tried again; twice as long after each further one ...
    pub first_retry: Duration,
    /// ... but not longer than this.
    pub longest_retry: Duration,
    /// So many failures of a step in a row poison the procedure.
    pub max_failures: u32,
    /// How long those that have ended are remembered ...
    pub history: Duration,
    /// ... and how many of them, at most.
    pub most_ended: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            retention: Duration::from_secs(24 * 60 * 60),
            first_retry: Duration::from_secs(1),
            longest_retry: Duration::from_secs(5 * 60),
            // About two hours.
            max_failures: 30,
            history: Duration::from_secs(7 * 24 * 60 * 60),
            most_ended: 1000,
        }
    }
}

impl Pace {
    /// The longest retention: ten years.
    pub const LONGEST_RETENTION: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

    /// With another retention than the usual one.
    pub fn retaining(secs: u64) -> Self {
        Self { retention: Duration::from_secs(secs), ..Self::default() }
    }

    /// How long to wait after so many failures, at the least half of what it could be. The same id waits equally long
    /// each time: nothing random is asked for, and yet no two procedures that failed together come back together.
    pub fn retry(&self, id: &str, failures: u32) -> Duration {
        let ceiling = self.first_retry.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(self.longest_retry);
        let hash = crc32fast::hash(format!("{id} {failures}").as_bytes());
        ceiling.mul_f64(0.5 + 0.5 * f64::from(hash) / f64::from(u32::MAX))
    }
}

/// What a kind says of a procedure that is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terms {
    /// Nothing is done before so long.
    pub delay: Duration,
    /// And all is to be done within so long after that.
    pub within: Option<Duration>,
}

/// What a kind says of a procedure that is to be cancelled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cancel {
    /// Nothing was done yet that has to be undone.
    Now,
    /// What was done is undone from this step on.
    Back(&'static str),
    /// It goes on, for this reason.
    TooLate(&'static str),
}

/// What came of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// It is done, or a part of it is: this step comes next, with what is kept from now on, and what people are told.
    Next { step: &'static str, data: Kept, note: String },
    /// All is done.
    Done { data: Kept, note: String },
    /// Nothing is wrong, and nothing can be done now.
    Wait(String),
    /// It did not work, or nobody knows; it is to be tried again.
    Retry(String),
    /// It cannot be done, and nothing is in doubt.
    Failed(String),
    /// What is outside is not what it should be.
    Doubtful(String),
    /// What was done is undone: it ends as cancelled.
    Undone { data: Kept, note: String },
    /// This came of it, and it is committed together with something else, or not at all.
    Together(Box<Together>, Box<Outcome>),
}

/// What is committed together with what came of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Together {
    pub txn: Txn,
    /// Its scopes go, although it goes on.
    pub releases: bool,
}

impl Outcome {
    /// What came of it, and what is committed together with that.
    pub fn apart(self) -> (Self, Option<Together>) {
        match self {
            Outcome::Together(together, outcome) => (*outcome, Some(*together)),
            outcome => (outcome, None),
        }
    }
}

/// The transaction that puts `next` in the place of what was read at `revision`, and what is committed together with that; and the record
/// as it then is. One that is poisoned, as by what it has to keep, changes nothing else.
pub fn committed(id: &str, revision: Revision, next: Record, together: Option<Together>) -> (Txn, Record) {
    let Some(together) = together.filter(|_| next.state != State::Poisoned) else {
        return (next.change(id, revision), next);
    };
    let mut next = next;
    let released = if together.releases { std::mem::take(&mut next.scopes) } else { Vec::new() };
    let mut txn = next.change(id, revision);
    txn.when.extend(together.txn.when);
    txn.then.extend(together.txn.then);
    let owner = ScopeOwner::Procedure(id.to_owned());
    txn.then.extend(released.into_iter().map(|path| Op::ReleaseScope { path, owner: owner.clone() }));
    (txn, next)
}

/// What is to be done for a procedure now.
#[derive(Debug, Clone, PartialEq)]
pub enum Turn {
    /// Nothing, until the cluster's clock shows this, or it is changed.
    Wait(Option<u64>),
    /// The clock is to be saved first, and [`accepted`] be committed then.
    Accept,
    /// This is to be committed.
    Commit(Box<Record>),
    /// The step is to be carried out.
    Execute,
    /// It is to be deleted.
    Forget,
}

/// What comes next. `cancel` is asked only where somebody wants the procedure to be cancelled.
pub fn turn(record: &Record, now_ms: u64, pace: &Pace, cancel: impl FnOnce() -> Cancel) -> Turn {
    if record.state == State::Poisoned {
        return Turn::Wait(None);
    }
    if record.state.is_ended() {
        let Some(ended) = record.ended_ms else {
            return Turn::Commit(Box::new(Record { ended_ms: Some(now_ms), ..record.clone() }));
        };
        let until = ended.saturating_add(millis(pace.history));
        return if now_ms >= until { Turn::Forget } else { Turn::Wait(Some(until)) };
    }
    if record.accepted_ms.is_none() {
        return Turn::Accept;
    }
    if record.cancel {
        let decided = Record { cancel: false, ..record.clone() };
        return Turn::Commit(Box::new(match cancel() {
            Cancel::Now => ended(decided, State::Cancelled, "cancelled", now_ms),
            Cancel::Back(step) => Record { step: step.to_owned(), failures: 0, due_ms: None, ..decided },
            Cancel::TooLate(why) => Record { note: note(format!("not cancelled: {why}")), ..decided },
        }));
    }
    if record.deadline_ms.is_some_and(|deadline| now_ms >= deadline) {
        let why = format!("it had not ended by its deadline, at step {}: {}", record.step, record.note);
        return Turn::Commit(Box::new(poisoned(record.clone(), &why)));
    }
    match record.due_ms.filter(|due| now_ms < *due) {
        Some(due) => Turn::Wait(Some(due)),
        None => Turn::Execute,
    }
}

/// A procedure that the leader has seen.
pub fn accepted(record: &Record, terms: Terms, now_ms: u64) -> Record {
    let due = now_ms.saturating_add(millis(terms.delay));
    Record {
        accepted_ms: Some(now_ms),
        due_ms: Some(due),
        deadline_ms: terms.within.map(|within| due.saturating_add(millis(within))),
        ..record.clone()
    }
}

/// What a step makes of the record. `None`: nothing that is worth a commit.
pub fn after(record: &Record, outcome: Outcome, now_ms: u64, pace: &Pace) -> Option<Record> {
    let advanced = |data: Kept| Record { steps: record.steps + 1, failures: 0, data, ..record.clone() };
    let next = match outcome {
        Outcome::Next { step, data, note: said } => {
            Record { step: step.to_owned(), note: note(said), ..advanced(data) }
        }
        Outcome::Done { data, note } => ended(advanced(data), State::Done, &note, now_ms),
        Outcome::Undone { data, note } => ended(advanced(data), State::Cancelled, &note, now_ms),
        Outcome::Together(_, outcome) => return after(record, *outcome, now_ms, pace),
        Outcome::Wait(why) if record.note == note(why.as_str()) => return None,
        Outcome::Wait(why) => Record { note: note(why), ..record.clone() },
        Outcome::Retry(why) => {
            let failures = record.failures + 1;
            let failed = Record { failures, note: note(why.as_str()), ..record.clone() };
            match failures >= pace.max_failures {
                true => poisoned(failed, &format!("step {} has failed {failures} times: {why}", record.step)),
                false => failed,
            }
        }
        Outcome::Failed(why) => ended(record.clone(), State::Failed, &why, now_ms),
        Outcome::Doubtful(why) => poisoned(record.clone(), &why),
    };
    // Tried again, it would come to the same: that is for somebody to see.
    Some(match next.validate() {
        Ok(()) => next,
        Err(invalid) => poisoned(record.clone(), &format!("step {}: {invalid}", record.step)),
    })
}

fn ended(record: Record, state: State, why: &str, now_ms: u64) -> Record {
    Record { state, note: note(why), ended_ms: Some(now_ms), ..record }
}

fn poisoned(record: Record, why: &str) -> Record {
    Record { state: State::Poisoned, note: note(why), ..record }
}

#[cfg(test)]
mod tests {
    use lake_client::procedures::kept;

    use super::*;

    fn pace() -> Pace {
        Pace { max_failures: 3, ..Pace::default() }
    }

    fn fresh() -> Record {
        Record::new("k", "s", "first", kept(&1), 0)
    }

    fn never() -> Cancel {
        panic!("nobody asked")
    }

    #[test]
    fn a_procedure_goes_from_step_to_step_and_is_forgotten() {
        let (pace, terms) = (pace(), Terms { delay: Duration::from_secs(5), within: Some(Duration::from_secs(60)) });
        assert_eq!(turn(&fresh(), 100, &pace, never), Turn::Accept);
        let record = accepted(&fresh(), terms, 100);
        assert_eq!(turn(&record, 5099, &pace, never), Turn::Wait(Some(5100)));
        assert_eq!(turn(&record, 5100, &pace, never), Turn::Execute);
        let next = Outcome::Next { step: "second", data: kept(&2), note: "half".into() };
        let record = after(&Record { failures: 2, ..record }, next, 5100, &pace).unwrap();
        assert_eq!((record.step.as_str(), record.steps, record.failures), ("second", 1, 0));
        assert_eq!(record.data::<u64>(), Ok(2));
        let done = after(&record, Outcome::Done { data: kept(&3), note: "all".into() }, 6000, &pace).unwrap();
        assert_eq!((done.state, done.ended_ms, done.steps), (State::Done, Some(6000), 2));
        let old = 6000 + millis(pace.history);
        assert_eq!(turn(&done, old - 1, &pace, never), Turn::Wait(Some(old)));
        assert_eq!(turn(&done, old, &pace, never), Turn::Forget);
        // One that somebody else has ended is dated by the leader.
        let Turn::Commit(dated) = turn(&Record { ended_ms: None, ..done }, 7000, &pace, never) else { panic!() };
        assert_eq!(dated.ended_ms, Some(7000));
        // One that does not come to its end is there to be seen.
        let Turn::Commit(late) = turn(&record, 65_100, &pace, never) else { panic!() };
        assert!(late.state == State::Poisoned && late.note.contains("second: half"), "{late:?}");
        assert_eq!(turn(&late, u64::MAX, &pace, never), Turn::Wait(None));
    }

    #[test]
    fn failures_are_counted_and_poison() {
        let pace = pace();
        let mut record = accepted(&fresh(), Terms::default(), 0);
        for failures in 1..pace.max_failures {
            record = after(&record, Outcome::Retry("no answer".into()), 0, &pace).unwrap();
            assert_eq!((record.state, record.failures, record.steps), (State::Active, failures, 0));
        }
        let poisoned = after(&record, Outcome::Retry("no answer".into()), 0, &pace).unwrap();
        assert_eq!(poisoned.state, State::Poisoned);
        assert!(poisoned.note.contains("3 times: no answer"), "{}", poisoned.note);
        assert_eq!(after(&record, Outcome::Doubtful("gone".into()), 0, &pace).unwrap().state, State::Poisoned);
        let failed = after(&record, Outcome::Failed("it cannot".into()), 9, &pace).unwrap();
        assert_eq!((failed.state, failed.ended_ms), (State::Failed, Some(9)));
        // What cannot be kept would be done again for ever.
        let large = kept(&"x".repeat(lake_client::procedures::MAX_RECORD_BYTES));
        let large =
            after(&record, Outcome::Next { step: "second", data: large, note: String::new() }, 0, &pace).unwrap();
        assert_eq!((large.state, &large.step, &large.data), (State::Poisoned, &record.step, &record.data));
        assert!(large.note.contains("may have at most"), "{}", large.note);
        // Waiting is no failure, and told once.
        let waits = after(&record, Outcome::Wait("nobody is there".into()), 0, &pace).unwrap();
        assert_eq!(waits.failures, record.failures);
        assert_eq!(after(&waits, Outcome::Wait("nobody is there".into()), 0, &pace), None);
    }

    #[test]
    fn whether_it_can_be_cancelled_is_its_kinds_to_say() {
        let record = Record { cancel: true, ..accepted(&fresh(), Terms::default(), 0) };
        let asked = |answer| match turn(&record, 1, &pace(), || answer) {
            Turn::Commit(record) => *record,
            other => panic!("{other:?}"),
        };
        let cancelled = asked(Cancel::Now);
        assert_eq!((cancelled.state, cancelled.ended_ms), (State::Cancelled, Some(1)));
        let goes_on = asked(Cancel::TooLate("it is nearly done"));
        assert_eq!((goes_on.state, goes_on.cancel), (State::Active, false));
        assert_eq!(goes_on.note, "not cancelled: it is nearly done");
        assert_eq!(asked(Cancel::Back("undo")).step, "undo");
    }

    #[test]
    fn what_is_committed_together_is_so_or_not_at_all() {
        let record = Record { scopes: vec!["/catalog/a".to_owned()], ..fresh() };
        let together =
            |releases| Some(Together { txn: Txn::cas("/lake/x", lake_proto::kv::Expected::Absent, "1"), releases });
        for (releases, scopes, operations) in [(false, 1, 2), (true, 0, 3)] {
            let (txn, next) = committed("p", 7, record.clone(), together(releases));
            txn.validate().unwrap();
            assert_eq!((next.scopes.len(), txn.when.len(), txn.then.len()), (scopes, 2, operations));
        }
        let (txn, next) = committed("p", 7, Record { state: State::Poisoned, ..record.clone() }, together(true));
        assert_eq!((next.scopes, txn.then.len()), (record.scopes.clone(), 1));
        // One that is undone ends as cancelled, and its scopes go as with every end.
        let (undone, apart) = Outcome::Undone { data: kept(&2), note: "undone".into() }.apart();
        assert_eq!(apart, None);
        let undone = after(&record, undone, 9, &pace()).unwrap();
        assert_eq!((undone.state, undone.ended_ms), (State::Cancelled, Some(9)));
        assert_eq!(committed("p", 7, undone, None).0.then.len(), 2);
    }

    #[test]
    fn retries_come_later_and_later_up_to_a_bound() {
        let pace = Pace { first_retry: Duration::from_secs(1), longest_retry: Duration::from_secs(60), ..pace() };
        for (failures, least, most) in
            [(1, 0.5, 1.0), (2, 1.0, 2.0), (5, 8.0, 16.0), (30, 30.0, 60.0), (u32::MAX, 30.0, 60.0)]
        {
            let wait = pace.retry("p", failures).as_secs_f64();
            assert!((least..=most).contains(&wait), "{failures}: {wait}");
        }
        let waits: Vec<_> = (0..20).map(|n| pace.retry(&format!("p-{n}"), 3)).collect();
        assert!(waits.iter().any(|wait| *wait != waits[0]), "not all at once: {waits:?}");
    }
}
