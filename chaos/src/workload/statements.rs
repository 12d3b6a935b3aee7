//! What workloads that speak SQL share: their statements are sent, and answers lost, in one way.

use std::ops::Range;
use std::time::{Duration, Instant};

use rand::Rng;

use super::access::Access;
use crate::history::Action;
use crate::run::recorder::Scribe;
use crate::sql::{Answer, Failure, Value};

/// The schema of all tables of such a workload.
pub(super) const SCHEMA: &str = "chaos";
/// Before something is sent again, unless its answer was lost on purpose.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// How often each read in the end is tried.
pub(super) const TRIES: usize = 5;

/// Runs a statement at a query node, until `by`. `lost`: its answer is not waited for longer than some of so many milliseconds; the
/// statement may have its effect.
///
/// # Errors
/// As [`Access::run`]; unknown where the answer was not waited for.
pub(super) async fn send(
    node: u64,
    sql: &str,
    operation: Option<&str>,
    by: Instant,
    lost: Option<Range<u64>>,
    access: &mut Access,
) -> Result<Answer, Failure> {
    let Some(too_short_ms) = lost else { return access.run(node, sql, operation, by).await };
    let patience = Duration::from_millis(access.rng.random_range(too_short_ms));
    let sent = tokio::time::timeout(patience, access.run(node, sql, operation, by)).await;
    sent.unwrap_or_else(|_| Err(Failure::unanswered(patience)))
}

/// How many rows a statement has changed.
pub(super) fn count_of(answer: &Answer) -> Option<i64> {
    answer.rows.first()?.first()?.int()
}

/// How old the rows of an answer may be, as it says, in whole milliseconds.
pub(super) fn stale_ms(answer: &Answer) -> Option<u64> {
    answer.stale.map(|stale| u64::try_from(stale.as_millis()).unwrap_or(u64::MAX))
}

/// A read was answered. `foreign`: a row of the answer that no statement of the workload can have left, so that the answer is wrong
/// whatever the others show.
pub(super) fn told(scribe: &Scribe, answer: Action, revision: Option<u64>, node: u64, foreign: Option<&[Value]>) {
    match foreign {
        None => scribe.ok(answer, revision, Some(node)),
        Some(row) => scribe.amiss(answer, revision, Some(node), &format!("it has a row that cannot be there: {row:?}")),
    }
}

/// A query node that answers whatever it is asked with the same rows, and a client's way to it.
#[cfg(test)]
pub(super) mod canned {
    use std::sync::Arc;
    use std::time::Duration;

    use async_trait::async_trait;
    use lake_client::dial::Dialer;

    use crate::run::clients::Reach;
    use crate::sql::{Answer, Failure, Front, Session, Statement, Value};
    use crate::workload::access::{Access, Door, Roster};

    #[derive(Debug, Clone)]
    struct Canned(Answer);

    #[async_trait]
    impl Front for Canned {
        async fn connect(&self, _: &str) -> Result<Box<dyn Session>, Failure> {
            Ok(Box::new(self.clone()))
        }
    }

    #[async_trait]
    impl Session for Canned {
        async fn run(&mut self, _: &Statement) -> Result<Answer, Failure> {
            Ok(self.0.clone())
        }

        fn transaction(&self) -> Option<String> {
            None
        }

        fn set_transaction(&mut self, _: Option<String>) {}
    }

    /// To node 1. Of the metadata there is nothing.
    pub(in crate::workload) fn access(rows: &[&[Value]]) -> Access {
        let rows = rows.iter().map(|row| row.to_vec()).collect();
        let nodes = Roster::new(vec![(1, "nowhere".to_owned())]);
        let reach = Reach {
            roster: Roster::default(),
            ledger: Arc::default(),
            endpoints: vec!["127.0.0.1:1".to_owned()],
            timeout: Duration::from_secs(10),
            seed: 1,
            dialer: Dialer::default(),
            door: Some(Door { front: Arc::new(Canned(Answer { rows, stale: None })), nodes }),
        };
        reach.access(0).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_how_many_rows_and_how_old() {
        let answer = |rows, stale| Answer { rows, stale };
        let counted = answer(vec![vec![Value::Int(3)]], Some(Duration::from_micros(2_900)));
        assert_eq!((count_of(&counted), stale_ms(&counted)), (Some(3), Some(2)));
        assert_eq!((count_of(&answer(vec![], None)), stale_ms(&answer(vec![], None))), (None, None));
    }
}
