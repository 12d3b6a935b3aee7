//! `purge_table` as the leader runs it: it waits, and has workers do the rest (`lake_client::procedures::purge` has
//! the steps).

use std::time::Duration;

use async_trait::async_trait;
use lake_client::procedures::purge::{Answer, CHECK, DELETE, PURGE_TABLE, Purge, RETAIN, Task};
use lake_client::procedures::{Procedure, Record, kept};

use super::kinds::Kind;
use super::machine::{Cancel, Outcome, Pace, Terms};
use super::workers::NotAnswered;
use crate::peer::member::Member;

/// How long a worker may take for a part of a step. It does what it can in a fraction of that.
const PART: Duration = Duration::from_secs(60);

/// The kind.
#[derive(Debug)]
pub struct PurgeTable;

#[async_trait]
impl Kind for PurgeTable {
    fn name(&self) -> &'static str {
        PURGE_TABLE
    }

    fn terms(&self, _: &Record, pace: &Pace) -> Terms {
        Terms { delay: pace.retention, within: None }
    }

    fn cancel(&self, record: &Record) -> Cancel {
        match record.step.as_str() {
            RETAIN | CHECK => Cancel::Now,
            _ => Cancel::TooLate("files have been deleted"),
        }
    }

    async fn execute(&self, member: &Member, procedure: &Procedure) -> Outcome {
        let purge: Purge = match procedure.record.data() {
            Ok(purge) => purge,
            Err(why) => return Outcome::Doubtful(why),
        };
        let step = match procedure.record.step.as_str() {
            RETAIN => {
                let note = String::new();
                return Outcome::Next { step: CHECK, data: kept(&purge), note };
            }
            CHECK => CHECK,
            DELETE => DELETE,
            other => return Outcome::Doubtful(format!("there is no step {other}")),
        };
        let task = Task { id: procedure.id.clone(), step: step.to_owned(), purge };
        let answer = match member.have_done(PURGE_TABLE, task.to_bytes(), PART).await {
            Ok(answer) => answer,
            Err(NotAnswered::Nobody(why)) => return Outcome::Wait(why),
            Err(NotAnswered::Failed(why)) => return Outcome::Retry(why),
        };
        match Answer::of(&answer) {
            Ok(answer) => outcome(step, answer),
            Err(why) => Outcome::Retry(format!("the worker's answer: {why}")),
        }
    }
}

/// What a worker's answer means.
fn outcome(step: &'static str, answer: Answer) -> Outcome {
    match (step, answer) {
        (_, Answer::Part(purge)) => Outcome::Next { step, note: purge.so_far(), data: kept(&purge) },
        (CHECK, Answer::Done(purge)) => Outcome::Next { step: DELETE, note: purge.so_far(), data: kept(&purge) },
        (_, Answer::Done(purge)) => Outcome::Done { note: purge.so_far(), data: kept(&purge) },
        (CHECK, Answer::Refused(why)) => Outcome::Failed(why),
        // Files have gone already.
        (_, Answer::Refused(why)) | (_, Answer::Doubtful(why)) => Outcome::Doubtful(why),
        (_, Answer::Over) => Outcome::Retry("the worker found the procedure at another step".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use lake_client::catalog::{TableIdent, TablePointer};
    use lake_client::procedures::purge::of_drop;

    use super::*;

    fn record(step: &str) -> Record {
        let table = TableIdent::new("a".parse().unwrap(), "t").unwrap();
        let pointer = TablePointer { uuid: uuid::Uuid::nil(), metadata_location: "m".into(), previous_location: None };
        Record { step: step.to_owned(), ..of_drop(&table, &pointer, 3, 0).1 }
    }

    #[test]
    fn it_can_be_cancelled_until_something_is_deleted() {
        assert_eq!(PurgeTable.cancel(&record(RETAIN)), Cancel::Now);
        assert_eq!(PurgeTable.cancel(&record(CHECK)), Cancel::Now);
        assert!(matches!(PurgeTable.cancel(&record(DELETE)), Cancel::TooLate(_)));
        let pace = Pace::default();
        assert_eq!(PurgeTable.terms(&record(RETAIN), &pace).delay, pace.retention);
    }

    #[test]
    fn an_answer_counts_for_the_step_that_was_asked_for() {
        let purge: Purge = record(CHECK).data().unwrap();
        let some = Box::new(Purge { deleted: 1200, outside: 2, ..purge });
        assert!(matches!(outcome(CHECK, Answer::Part(some.clone())), Outcome::Next { step: CHECK, .. }));
        assert!(matches!(outcome(CHECK, Answer::Done(some.clone())), Outcome::Next { step: DELETE, .. }));
        assert!(matches!(outcome(CHECK, Answer::Refused("no".into())), Outcome::Failed(_)));
        assert!(matches!(outcome(DELETE, Answer::Refused("no".into())), Outcome::Doubtful(_)), "something is gone");
        let Outcome::Done { note, .. } = outcome(DELETE, Answer::Done(some)) else { panic!() };
        assert_eq!(note, "1200 files are deleted; 2 stay: outside of its location");
    }
}
