//! The upkeep of a table that somebody has asked for ([`lake_client::procedures::upkeep`]): a statement that this node runs to its end, and
//! tells of whenever the leader asks.
//!
//! ```text
//!   asked, and it is this node's --- begun under the record's revision ---> running ---> done, failed
//!                                         ^                                   |
//!                                         '--- asked under another one -------'--- the record is another one: given up
//! ```
//! Its commit carries the compare that the record is still at that revision, so one that is given up, or that nobody waits for any more,
//! commits nothing.
//!
//! Limits: [`super::AT_ONCE`] at a time with the other chores; a statement takes [`STATEMENT`] at most. It ends with the node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use lake_client::procedures::Procedure;
use lake_client::procedures::upkeep::{Answer, TableUpkeep, Task, fence, is_for};
use lake_proto::kv::Revision;
use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

use super::ASK;
use crate::error::{Error, Kind, Result};
use crate::sql::Engine;
use crate::sql::bound::Bound;
use crate::upkeep::{can_be_named, statement};

/// How long the statement may take.
const STATEMENT: Duration = Duration::from_secs(3600);
/// How many run, wait for their turn, or have ended and were not asked for since. Others begin when there are fewer.
const MOST_RUNNING: usize = 64;
/// How often there is a look whether it still is this node's to do.
const LOOK: Duration = Duration::from_secs(2);

type Outcome = Shared<BoxFuture<'static, Result<u64>>>;

/// What runs, by its procedure's id, and since which revision of that.
#[derive(Debug, Default)]
pub struct Running(Mutex<HashMap<String, (Revision, Outcome)>>);

impl Running {
    /// The ids.
    pub fn ids(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Since which revision it runs, if it does.
    fn since(&self, id: &str) -> Option<Revision> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).map(|(since, _)| *since)
    }

    /// Forgets the one that runs since this revision, and none that was begun in its place.
    fn forget(&self, id: &str, since: Option<Revision>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.get(id).map(|(since, _)| *since) == since {
            all.remove(id);
        }
    }

    /// Begins it, or finds that it was begun, and waits for its end until `until`.
    ///
    /// # Errors
    /// The procedure cannot be looked up.
    pub async fn part(
        &self,
        engine: &Arc<Engine>,
        turns: &Arc<Semaphore>,
        task: Task,
        until: Instant,
    ) -> Result<Answer> {
        let Task { id, node } = task;
        // What begins while the procedure is looked up, has been looked up as well.
        let before = self.since(&id);
        let found = engine.tables().metadata.procedure(&id, Instant::now() + ASK).await;
        let found = found.map_err(|e| Error::unavailable(e).while_doing(format_args!("looking up procedure {id}")))?;
        let Some(procedure) = found.filter(|procedure| is_for(procedure, &node)) else {
            self.forget(&id, before);
            return Ok(Answer::Over);
        };
        let since = procedure.mod_revision;
        let Some(outcome) = self.begun(engine, turns, procedure, &node) else { return Ok(Answer::Running) };
        let Ok(outcome) = tokio::time::timeout_at(until.into(), outcome).await else { return Ok(Answer::Running) };
        self.forget(&id, Some(since));
        Ok(match outcome {
            Ok(count) => Answer::Done(count),
            Err(error) if [Kind::NotFound, Kind::NotSupported, Kind::Invalid].contains(&error.kind) => {
                Answer::Refused(error.message)
            }
            Err(error) => Answer::Failed(error.message),
        })
    }

    fn begun(&self, engine: &Arc<Engine>, turns: &Arc<Semaphore>, procedure: Procedure, node: &str) -> Option<Outcome> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let revision = procedure.mod_revision;
        match all.get(&procedure.id) {
            Some((since, outcome)) if *since == revision => return Some(outcome.clone()),
            // Whoever asks has looked the procedure up before it was what runs now.
            Some((since, _)) if *since > revision => return None,
            _ => {}
        }
        if all.len() >= MOST_RUNNING {
            // Cancelled, or another node's by now: nobody has come for what became of them.
            all.retain(|_, (_, outcome)| outcome.clone().now_or_never().is_none());
        }
        if all.len() >= MOST_RUNNING {
            return None;
        }
        let (id, engine, turns, node) = (procedure.id.clone(), engine.clone(), turns.clone(), node.to_owned());
        let work = async move {
            let _turn = turns.acquire_owned().await;
            run(&engine, &procedure, &node).await
        };
        // Ended with the last who holds it: this node, or who was waiting for it.
        let work = AbortOnDropHandle::new(tokio::spawn(work));
        let ended =
            |e: JoinError| -> Result<u64> { Err(Error::internal(format!("the statement ended unexpectedly: {e}"))) };
        let outcome = async move { work.await.unwrap_or_else(ended) }.boxed().shared();
        // One that was begun before is given up.
        all.insert(id, (revision, outcome.clone()));
        Some(outcome)
    }
}

async fn run(engine: &Arc<Engine>, procedure: &Procedure, node: &str) -> Result<u64> {
    let upkeep: TableUpkeep = procedure.record.data().map_err(Error::internal)?;
    let table = upkeep.ident().map_err(Error::invalid)?;
    let doing = |e: Error| e.while_doing(format_args!("{} of table {table}", upkeep.what));
    if !can_be_named(&table) {
        return Err(doing(Error::not_supported("SQL means another table by its name")));
    }
    let tables = engine.tables();
    let pointers = tables.metadata.read_tables(std::slice::from_ref(&table), Instant::now() + ASK).await;
    let pointers = pointers.map_err(|e| doing(crate::table::catalog_error("looking it up", e)))?;
    if !pointers.iter().flatten().any(|pointer| pointer.value.uuid == upkeep.uuid) {
        return Err(doing(Error::not_found("it is not there any more")));
    }
    let guarded = tables.guarded(vec![fence(procedure)]);
    let statement = Bound::from(statement(upkeep.what.as_str(), &table).as_str());
    let work = async {
        let planned = engine.plan_in(&statement, Some(STATEMENT), &guarded).await?;
        engine.change(planned).await
    };
    let moved_on = async {
        loop {
            tokio::time::sleep(LOOK).await;
            // While the metadata is away it may still be.
            let Ok(now) = tables.metadata.procedure(&procedure.id, Instant::now() + ASK).await else { continue };
            let is_so = |now: &Procedure| now.mod_revision == procedure.mod_revision && is_for(now, node);
            if !now.as_ref().is_some_and(is_so) {
                return;
            }
        }
    };
    tokio::select! {
        done = work => done.map_err(doing),
        () = moved_on => Err(doing(Error::conflict("given up: it was cancelled, or is another node's by now"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_forgotten_and_nothing_that_was_begun_since() {
        let running = Running::default();
        let begin = |since: Revision| {
            let outcome = std::future::pending::<Result<u64>>().boxed().shared();
            running.0.lock().unwrap().insert("p".to_owned(), (since, outcome));
        };
        begin(5);
        let before = running.since("p");
        begin(7);
        running.forget("p", before);
        assert_eq!(running.since("p"), Some(7), "another run took its place meanwhile");
        running.forget("p", None);
        assert_eq!(running.ids(), ["p"], "nothing ran when it was looked up");
        running.forget("p", Some(7));
        assert_eq!(running.ids(), Vec::<String>::new());
    }
}
