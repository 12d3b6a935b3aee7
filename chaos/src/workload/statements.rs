//! What workloads that speak SQL share: their statements are sent, and answers lost, in one way.

use std::ops::Range;
use std::time::{Duration, Instant};

use rand::Rng;

use super::access::Access;
use crate::sql::{Answer, Failure};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::Value;

    #[test]
    fn an_answer_says_how_many_rows_and_how_old() {
        let answer = |rows, stale| Answer { rows, stale };
        let counted = answer(vec![vec![Value::Int(3)]], Some(Duration::from_micros(2_900)));
        assert_eq!((count_of(&counted), stale_ms(&counted)), (Some(3), Some(2)));
        assert_eq!((count_of(&answer(vec![], None)), stale_ms(&answer(vec![], None))), (None, None));
    }
}
