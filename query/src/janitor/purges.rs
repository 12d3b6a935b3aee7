//! Purges of dropped tables, by a janitor: what the leader does with them in a metadata cluster, and its workers
//! ([`lake_client::procedures::purge`] has the steps; [`crate::chores::purge`] does a part of one, the same in both).
//!
//! ```text
//!   seen: the retention begins --- over ---> check --- part, part ---> delete --- part, part ---> done
//!     `- the table is there: cancelled          `- refused: failed                `- in doubt: failed
//! ```
//! The retention is counted on the clock of the store that holds the tables, which each janitor finds where the one before has left it, also
//! one that comes once an hour and ends. A leader counts on the cluster's clock: a record that is taken over from a cluster, or
//! by one, begins to wait anew.
//!
//! Invariants:
//! - what came of a part is committed before the next one begins, on the record as it was read and with the janitor's guard: so what was
//!   undropped meanwhile is not gone on with, nor is anything by a janitor that was replaced;
//! - a part is begun only while the lease is certainly held, and given up when that ends: it is done again by whoever comes next.
//!
//! Limits: one part at a time; a round ends after [`ROUND`], and the next one goes on. What has failed is tried again after [`FIRST_RETRY`], up to
//! [`LONGEST_RETRY`], for ever: its note says why, and there is nobody to clear it. Those that have ended are remembered for [`HISTORY`], and
//! [`MOST_ENDED`] of them at most. Failure cases: a store that cannot be reached ends the round; a record that this build does not
//! understand is left alone.

use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use lake_client::procedures::purge::{Answer, CHECK, DELETE, PURGE_TABLE, Purge, RETAIN, Task};
use lake_client::procedures::{MAX_PROCEDURES, Procedure, Record, State, kept, note};

use crate::chores::{PART, purge};
use crate::error::{Error, Result};
use crate::table::{Tables, catalog_error, steps};
use crate::upkeep::Claim;

/// How long a round may take, and a part of a step.
const ROUND: Duration = Duration::from_secs(600);
/// How long what is asked of the metadata may take.
const ASK: Duration = Duration::from_secs(10);
/// How long a purge that has failed is left alone, twice as long with each failure in a row ...
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// ... and at most.
const LONGEST_RETRY: Duration = Duration::from_secs(60 * 60);
/// How long those that have ended are remembered ...
const HISTORY: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// ... and how many.
const MOST_ENDED: usize = 1000;

/// What a round has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Tables whose files are gone by now.
    pub done: usize,
    /// Purges of which a part failed, or that were given up.
    pub failed: usize,
}

/// What is to be done for a purge.
#[derive(Debug, PartialEq)]
enum Turn {
    Nothing,
    /// This is to be committed.
    Commit(Box<Record>),
    /// A part of its step is to be done.
    Work,
    Forget,
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// What comes next.
fn turn(record: &Record, now_ms: u64, retention: Duration) -> Turn {
    let is_over = |since: u64, time: Duration| now_ms >= since.saturating_add(millis(time));
    if record.state == State::Poisoned {
        // In a cluster, and there it is cleared.
        return Turn::Nothing;
    }
    if record.state.is_ended() {
        return if is_over(record.changed_unix_ms, HISTORY) { Turn::Forget } else { Turn::Nothing };
    }
    let Some(seen) = record.seen_unix_ms else {
        return Turn::Commit(Box::new(Record { seen_unix_ms: Some(now_ms), ..record.clone() }));
    };
    let waits = [RETAIN, CHECK].contains(&record.step.as_str());
    if record.cancel {
        let decided = Record { cancel: false, ..record.clone() };
        return Turn::Commit(Box::new(match waits {
            true => ended(decided, State::Cancelled, "cancelled"),
            false => Record { note: "not cancelled: files have been deleted".to_owned(), ..decided },
        }));
    }
    if record.failures > 0 && !is_over(record.changed_unix_ms, retry(record.failures)) {
        return Turn::Nothing;
    }
    match record.step.as_str() {
        RETAIN if is_over(seen, retention) => {
            Turn::Commit(Box::new(Record { step: CHECK.to_owned(), steps: record.steps + 1, ..record.clone() }))
        }
        CHECK | DELETE => Turn::Work,
        _ => Turn::Nothing,
    }
}

/// How long one is left alone after so many failures in a row.
fn retry(failures: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(LONGEST_RETRY)
}

fn ended(record: Record, state: State, why: &str) -> Record {
    Record { state, note: note(why), ..record }
}

/// What a part of a step makes of the record. `None`: nothing, the record is another by now.
fn after(record: &Record, answer: Result<Answer>) -> Option<Record> {
    let advanced = |purge: &Purge| {
        let (data, said) = (kept(purge), note(purge.so_far()));
        Record { steps: record.steps + 1, failures: 0, data, note: said, ..record.clone() }
    };
    let next = match answer {
        Ok(Answer::Part(purge)) => advanced(&purge),
        Ok(Answer::Done(purge)) if record.step == CHECK => Record { step: DELETE.to_owned(), ..advanced(&purge) },
        Ok(Answer::Done(purge)) => Record { state: State::Done, ..advanced(&purge) },
        Ok(Answer::Refused(why) | Answer::Doubtful(why)) => ended(record.clone(), State::Failed, &why),
        Ok(Answer::Over) => return None,
        Err(error) => Record { failures: record.failures + 1, note: note(error.to_string()), ..record.clone() },
    };
    // Tried again, it would come to the same.
    Some(match next.validate() {
        Ok(()) => next,
        Err(invalid) => ended(record.clone(), State::Failed, &invalid.to_string()),
    })
}

/// Goes through all purges once, and does what is due.
///
/// # Errors
/// They cannot be listed, the store's clock cannot be read, or nothing can be committed. What fails of one purge is counted.
pub async fn round(tables: &Arc<Tables>, claim: &dyn Claim, retention: Duration) -> Result<Purged> {
    let all = tables.metadata.procedures(Instant::now() + ASK).await;
    let all = all.map_err(|e| Error::unavailable(format!("looking for dropped tables: {e}")))?;
    let purges: Vec<Procedure> = all.into_iter().filter(|procedure| procedure.record.kind == PURGE_TABLE).collect();
    let mut purged = Purged::default();
    if purges.is_empty() {
        return Ok(purged);
    }
    let began = Instant::now();
    let clock = tables.storage.clock(tables.storage.warehouse()).await?;
    let clock = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = || millis(clock + began.elapsed());
    let surplus = surplus(&purges);
    for procedure in purges.into_iter().take(MAX_PROCEDURES) {
        if began.elapsed() >= ROUND {
            break;
        }
        if procedure.record.state.is_ended() && procedure.record.changed_unix_ms < surplus {
            forget(tables, claim, &procedure).await?;
            continue;
        }
        match see_to(tables, claim, procedure, &now_ms, began + ROUND, retention).await? {
            State::Done => purged.done += 1,
            State::Failed => purged.failed += 1,
            _ => {}
        }
    }
    Ok(purged)
}

/// Those that ended before this are more than are remembered.
fn surplus(purges: &[Procedure]) -> u64 {
    let ended = purges.iter().filter(|procedure| procedure.record.state.is_ended());
    let mut changed: Vec<u64> = ended.map(|procedure| procedure.record.changed_unix_ms).collect();
    changed.sort_unstable();
    changed.len().checked_sub(MOST_ENDED).map_or(0, |oldest| changed[oldest])
}

/// Does what is due for one. Says to which end it has come here; [`State::Failed`] also if a part of it failed, and is tried again.
async fn see_to(
    tables: &Arc<Tables>,
    claim: &dyn Claim,
    mut procedure: Procedure,
    now_ms: &(dyn Fn() -> u64 + Sync),
    until: Instant,
    retention: Duration,
) -> Result<State> {
    loop {
        let purge: Purge = match procedure.record.data() {
            Ok(purge) => purge,
            Err(why) => {
                tracing::debug!(id = procedure.id, "a purge that this build does not understand is left alone: {why}");
                return Ok(State::Active);
            }
        };
        let uuid = purge.uuid;
        let next = match turn(&procedure.record, now_ms(), retention) {
            Turn::Nothing => return Ok(State::Active),
            Turn::Forget => {
                forget(tables, claim, &procedure).await?;
                return Ok(State::Active);
            }
            Turn::Commit(next) if procedure.record.seen_unix_ms.is_none() => first_seen(tables, &purge, *next).await?,
            Turn::Commit(next) => *next,
            Turn::Work => {
                if claim.guard(uuid).is_none() || Instant::now() >= until {
                    return Ok(State::Active);
                }
                let task = Task { id: procedure.id.clone(), step: procedure.record.step.clone(), purge };
                let answer = tokio::select! {
                    answer = purge::part(tables, task, Instant::now() + PART) => answer,
                    // Whoever comes next does it again.
                    () = claim.lost(uuid) => return Ok(State::Active),
                };
                match after(&procedure.record, answer) {
                    Some(next) => next,
                    None => return Ok(State::Active),
                }
            }
        };
        let Some(guard) = claim.guard(uuid) else { return Ok(State::Active) };
        let next = Record { changed_unix_ms: now_ms(), ..next };
        let writer = tables.recording()?.guarded(guard.compares);
        let committed = writer.change_procedure(&procedure, &next, Instant::now() + ASK).await;
        let committed = committed
            .map_err(|e| catalog_error(&format!("purging table {}, as procedure {}", next.subject, procedure.id), e))?;
        // It was undropped meanwhile, say.
        let Some(committed) = committed else { return Ok(State::Active) };
        steps::reached("purge-committed");
        let has_failed = next.failures > procedure.record.failures;
        let (id, subject, note) = (&committed.id, &next.subject, &next.note);
        if next.state != State::Active {
            tracing::info!(id, subject, state = next.state.as_str(), "a purge has ended: {note}");
            return Ok(next.state);
        }
        if has_failed {
            tracing::warn!(id, subject, failures = next.failures, "a part of a purge has failed: {note}");
            return Ok(State::Failed);
        }
        procedure = committed;
    }
}

/// One that waits from now on; or its table is there again, of which whoever undropped it could not tell any more.
async fn first_seen(tables: &Tables, purge: &Purge, next: Record) -> Result<Record> {
    let Some(ident) = purge.ident() else { return Ok(next) };
    let there = tables.metadata.read_table(&ident, Instant::now() + ASK).await;
    let there = there.map_err(|e| catalog_error(&format!("looking up table {ident}, which was dropped"), e))?;
    Ok(match there {
        Some(there) if there.value.uuid == purge.uuid => ended(next, State::Cancelled, "the table is there"),
        _ => next,
    })
}

async fn forget(tables: &Tables, claim: &dyn Claim, procedure: &Procedure) -> Result<()> {
    // Of no table: that is long gone.
    let Some(guard) = claim.guard(uuid::Uuid::nil()) else { return Ok(()) };
    let writer = tables.recording()?.guarded(guard.compares);
    let forgotten = writer.forget_procedure(procedure, Instant::now() + ASK).await;
    forgotten.map_err(|e| catalog_error(&format!("forgetting procedure {}", procedure.id), e))
}

#[cfg(test)]
mod tests {
    use lake_client::catalog::{TableIdent, TablePointer};
    use lake_client::procedures::purge::of_drop;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn dropped() -> Record {
        let table = TableIdent::new("a".parse().unwrap(), "t").unwrap();
        let pointer = TablePointer { uuid: uuid::Uuid::nil(), metadata_location: "m".into(), previous_location: None };
        // What a leader has dated means nothing here.
        Record { accepted_ms: Some(5), due_ms: Some(6), ..of_drop(&table, &pointer, 3, 7).1 }
    }

    fn committed(turn: Turn) -> Record {
        match turn {
            Turn::Commit(record) => *record,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn it_waits_from_when_it_was_seen_and_goes_on_where_it_was() {
        let start = 1_000_000;
        let seen = committed(turn(&dropped(), start, DAY));
        assert_eq!((seen.seen_unix_ms, seen.step.as_str()), (Some(start), RETAIN));
        let over = start + millis(DAY);
        assert_eq!(turn(&seen, over - 1, DAY), Turn::Nothing);
        let checked = committed(turn(&seen, over, DAY));
        assert_eq!((checked.step.as_str(), turn(&checked, over, DAY)), (CHECK, Turn::Work));
        let purge: Purge = checked.data().unwrap();
        let part = after(&checked, Ok(Answer::Part(Box::new(purge.clone())))).unwrap();
        assert_eq!((part.step.as_str(), part.steps), (CHECK, 2));
        let deletes = after(&part, Ok(Answer::Done(Box::new(purge.clone())))).unwrap();
        assert_eq!(deletes.step, DELETE);
        let some = Box::new(Purge { deleted: 3, ..purge });
        let done = after(&deletes, Ok(Answer::Done(some))).unwrap();
        assert_eq!((done.state, done.note.as_str()), (State::Done, "3 files are deleted"));
        let done = Record { changed_unix_ms: over, ..done };
        let old = over + millis(HISTORY);
        assert_eq!((turn(&done, old - 1, DAY), turn(&done, old, DAY)), (Turn::Nothing, Turn::Forget));
        assert_eq!(after(&deletes, Ok(Answer::Over)), None);
        for answer in [Answer::Refused("no".into()), Answer::Doubtful("no".into())] {
            assert_eq!(after(&deletes, Ok(answer)).unwrap().state, State::Failed);
        }
    }

    #[test]
    fn what_fails_is_tried_again_and_what_is_too_late_is_said() {
        let seen = Record { seen_unix_ms: Some(0), step: CHECK.to_owned(), ..dropped() };
        let failed = after(&seen, Err(Error::unavailable("no answer"))).unwrap();
        let failed = Record { changed_unix_ms: 500, ..failed };
        assert_eq!((failed.state, failed.failures), (State::Active, 1));
        assert_eq!((turn(&failed, 1499, DAY), turn(&failed, 1500, DAY)), (Turn::Nothing, Turn::Work));
        assert_eq!((retry(2), retry(u32::MAX)), (2 * FIRST_RETRY, LONGEST_RETRY));
        let cancel =
            |step: &str| committed(turn(&Record { cancel: true, step: step.to_owned(), ..seen.clone() }, 0, DAY));
        assert_eq!(cancel(CHECK).state, State::Cancelled);
        assert_eq!((cancel(DELETE).state, cancel(DELETE).cancel), (State::Active, false));
        for other in
            [Record { state: State::Poisoned, ..seen.clone() }, Record { step: "later".into(), ..seen.clone() }]
        {
            assert_eq!(turn(&other, u64::MAX, DAY), Turn::Nothing);
        }
    }

    #[test]
    fn there_is_a_bound_on_what_is_remembered() {
        let at = |changed_unix_ms: u64| {
            let record = Record { state: State::Done, changed_unix_ms, ..dropped() };
            Procedure { id: format!("purge-{changed_unix_ms}"), mod_revision: 1, record }
        };
        let most = MOST_ENDED as u64;
        let few: Vec<Procedure> = (1..most).map(at).collect();
        assert_eq!(surplus(&few), 0);
        let many: Vec<Procedure> = (1..=most + 2).map(at).collect();
        assert_eq!(many.iter().filter(|one| one.record.changed_unix_ms < surplus(&many)).count(), 2);
    }
}
