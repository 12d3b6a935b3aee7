//! `table_upkeep` as the leader runs it: it chooses a worker, and asks that one until it has ended (`lake_client::procedures::upkeep` has
//! the steps). A worker that goes is replaced.
//!
//! Nothing is committed while it runs: the record is what the worker's commit is fenced by.

use std::time::Duration;

use async_trait::async_trait;
use lake_client::procedures::upkeep::{Answer, PLACE, RUN, TABLE_UPKEEP, TableUpkeep, Task};
use lake_client::procedures::{Procedure, Record, kept};

use super::kinds::Kind;
use super::machine::{Cancel, Outcome, Pace, Terms};
use super::workers::{NotAnswered, WORKER};
use crate::peer::member::Member;
use crate::peer::placement::routes;

/// How long a worker may take to say how it is: it does within a fraction of that.
const PART: Duration = Duration::from_secs(60);

/// The kind.
#[derive(Debug)]
pub struct Upkeep;

#[async_trait]
impl Kind for Upkeep {
    fn name(&self) -> &'static str {
        TABLE_UPKEEP
    }

    fn terms(&self, _: &Record, _: &Pace) -> Terms {
        Terms::default()
    }

    fn cancel(&self, _: &Record) -> Cancel {
        // What the worker would commit is fenced by the record, and it gives up once it sees that.
        Cancel::Now
    }

    async fn execute(&self, member: &Member, procedure: &Procedure) -> Outcome {
        let record = &procedure.record;
        let upkeep: TableUpkeep = match record.data() {
            Ok(upkeep) => upkeep,
            Err(why) => return Outcome::Doubtful(why),
        };
        match (record.step.as_str(), upkeep.node.clone()) {
            (PLACE, _) => {
                let workers = member.fit_workers();
                let shards = routes(&member.published.current().state);
                let leads = shards.of(upkeep.uuid).map(|fenced| fenced.route.node.clone());
                let leads = leads.filter(|node| workers.contains(node));
                placed(upkeep, leads.or_else(|| member.procedures.in_hand.least(workers)))
            }
            // One that is drained since ends what it has begun.
            (RUN, Some(node)) if member.nodes.connected_as(WORKER).contains(&node) => {
                let task = Task { id: procedure.id.clone(), node: node.clone() };
                match member.have_done_by(vec![node], TABLE_UPKEEP, task.to_bytes(), PART).await {
                    Ok(answer) => outcome(record, upkeep, Answer::of(&answer)),
                    // As it was: a note that is another one would be committed.
                    Err(NotAnswered::Nobody(_)) => Outcome::Wait(record.note.clone()),
                    Err(NotAnswered::Failed(why)) => Outcome::Retry(why),
                }
            }
            (RUN, node) => {
                let note = format!("{} is gone: another worker is chosen", node.as_deref().unwrap_or("its worker"));
                Outcome::Next { step: PLACE, data: kept(&TableUpkeep { node: None, ..upkeep }), note }
            }
            (other, _) => Outcome::Doubtful(format!("there is no step {other}")),
        }
    }
}

fn placed(upkeep: TableUpkeep, node: Option<String>) -> Outcome {
    match node {
        Some(node) => {
            let note = format!("runs at {node}");
            Outcome::Next { step: RUN, data: kept(&TableUpkeep { node: Some(node), ..upkeep }), note }
        }
        None => Outcome::Wait("no worker is connected".to_owned()),
    }
}

fn outcome(record: &Record, upkeep: TableUpkeep, answer: Result<Answer, String>) -> Outcome {
    match answer {
        Ok(Answer::Running) => Outcome::Wait(record.note.clone()),
        Ok(Answer::Done(count)) => {
            let note = format!("done: CALL would answer {count}");
            Outcome::Done { data: kept(&TableUpkeep { count: Some(count), ..upkeep }), note }
        }
        Ok(Answer::Failed(why)) => Outcome::Retry(why),
        Ok(Answer::Refused(why)) => Outcome::Failed(why),
        Ok(Answer::Over) => Outcome::Retry("the worker found that it is not its own".to_owned()),
        Err(why) => Outcome::Retry(format!("the worker's answer: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use lake_client::catalog::TableIdent;
    use lake_client::procedures::upkeep::{What, of_table};

    use super::*;

    #[test]
    fn nothing_is_committed_while_it_runs() {
        let table = TableIdent::new("a".parse().unwrap(), "t").unwrap();
        let (_, record) = of_table(What::ExpireSnapshots, &table, uuid::Uuid::nil(), 1);
        let upkeep: TableUpkeep = record.data().unwrap();
        assert!(matches!(placed(upkeep.clone(), None), Outcome::Wait(_)));
        let Outcome::Next { step: RUN, data, note } = placed(upkeep, Some("n".to_owned())) else { panic!() };
        // Also after an attempt that failed, whose note is another one.
        for note in [note, "a failure".to_owned()] {
            let record = Record { step: RUN.to_owned(), data: data.clone(), note, ..record.clone() };
            let upkeep: TableUpkeep = record.data().unwrap();
            assert_eq!(upkeep.node.as_deref(), Some("n"));
            let waits = outcome(&record, upkeep.clone(), Ok(Answer::Running));
            assert_eq!(super::super::machine::after(&record, waits, 5, &Pace::default()), None);
            let Outcome::Done { data, .. } = outcome(&record, upkeep.clone(), Ok(Answer::Done(3))) else { panic!() };
            assert_eq!(Record { data, ..record.clone() }.data::<TableUpkeep>().unwrap().count, Some(3));
            assert!(matches!(outcome(&record, upkeep.clone(), Ok(Answer::Refused("no".into()))), Outcome::Failed(_)));
            assert!(matches!(outcome(&record, upkeep, Err("odd".into())), Outcome::Retry(_)));
        }
    }
}
