//! What statements have come to on this node, in Prometheus' text format, and the log of slow ones. Names begin with
//! `lake_query_`.
//!
//! A statement is counted once, when it has ended: a query when its last row was taken, or its client went away (then its outcome is
//! `cancelled`); a change when it was answered. What is only described or prepared is not counted.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use futures::{Stream, StreamExt};
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

use crate::error::{Error, Kind, Result};
use crate::sql::Engine;
use crate::sql::statement::Command;

/// Upper ends of the buckets that times are counted in, in seconds.
const BUCKETS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0];
/// Longest text of a statement in the log, in characters.
const LONGEST_LOGGED: usize = 2_000;

/// The figures.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    statements: IntCounterVec,
    seconds: HistogramVec,
    rows: IntCounterVec,
    running: IntGauge,
    waiting: IntGauge,
    memory: IntGauge,
    cache: IntGauge,
    parts: IntGauge,
    distributed: IntCounter,
    fallen_back: IntCounter,
    /// Statements that took as long are logged.
    slow: Option<Duration>,
}

impl Metrics {
    /// # Errors
    /// Two figures of one name, which is a defect.
    pub fn new(slow: Option<Duration>) -> Result<Self> {
        let made = || -> prometheus::Result<Self> {
            let registry = Registry::new_custom(Some("lake_query".to_owned()), None)?;
            let vec = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntCounterVec> {
                let made = IntCounterVec::new(Opts::new(name, help), labels)?;
                registry.register(Box::new(made.clone()))?;
                Ok(made)
            };
            let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
                let made = IntGauge::new(name, help)?;
                registry.register(Box::new(made.clone()))?;
                Ok(made)
            };
            let counter = |name: &str, help: &str| -> prometheus::Result<IntCounter> {
                let made = IntCounter::new(name, help)?;
                registry.register(Box::new(made.clone()))?;
                Ok(made)
            };
            let seconds = HistogramVec::new(
                HistogramOpts::new("statement_seconds", "From a statement's arrival to its end, by command")
                    .buckets(BUCKETS.to_vec()),
                &["command"],
            )?;
            registry.register(Box::new(seconds.clone()))?;
            Ok(Self {
                statements: vec(
                    "statements_total",
                    "Statements that have ended, by command and outcome",
                    &["command", "outcome"],
                )?,
                seconds,
                rows: vec("statement_rows_total", "Rows returned by queries, and changed by others", &["command"])?,
                running: gauge("statements_running", "Statements that run now")?,
                waiting: gauge("statements_waiting", "Statements that wait for others to end")?,
                memory: gauge("memory_held_bytes", "Memory that statements hold")?,
                cache: gauge("metadata_cache_bytes", "Memory of cached table metadata")?,
                parts: gauge("distributed_parts", "Parts of queries that other nodes coordinate, in hand now")?,
                distributed: counter("distributed_queries_total", "Queries that were spread over several nodes")?,
                fallen_back: counter(
                    "distributed_fallbacks_total",
                    "Queries of these that failed there and ran on this node instead",
                )?,
                registry,
                slow,
            })
        };
        made().map_err(|e| Error::internal(format!("making the metrics: {e}")))
    }

    /// A statement begins.
    pub fn begin(self: &Arc<Self>, command: Command, sql: &str) -> Measured {
        let sql = self.slow.map(|_| sql.chars().take(LONGEST_LOGGED).collect());
        Measured { metrics: self.clone(), command, sql, began: Instant::now(), rows: 0, outcome: None }
    }

    /// In Prometheus' text format.
    ///
    /// # Errors
    /// `Internal`: a defect.
    pub fn text(&self, engine: &Engine) -> Result<String> {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.running.set(number(engine.running()));
        self.waiting.set(number(engine.waiting()));
        self.memory.set(number(engine.memory_held()));
        self.cache.set(i64::try_from(engine.tables().cache.bytes()).unwrap_or(i64::MAX));
        if let Some(distributed) = engine.distributed() {
            self.parts.set(number(distributed.parts().in_hand()));
            let (queries, fallen_back) = distributed.counts();
            self.distributed.inc_by(queries.saturating_sub(self.distributed.get()));
            self.fallen_back.inc_by(fallen_back.saturating_sub(self.fallen_back.get()));
        }
        let text = TextEncoder::new().encode_to_string(&self.registry.gather());
        text.map_err(|e| Error::internal(format!("gathering the metrics: {e}")))
    }
}

/// A statement that runs; it is counted when this is dropped.
#[derive(Debug)]
pub struct Measured {
    metrics: Arc<Metrics>,
    command: Command,
    /// If it may have to be logged.
    sql: Option<String>,
    began: Instant,
    rows: u64,
    outcome: Option<&'static str>,
}

impl Measured {
    /// It has ended so.
    pub fn end<T>(mut self, result: &Result<T>, rows: impl FnOnce(&T) -> u64) {
        match result {
            Ok(done) => {
                self.rows = rows(done);
                self.outcome = Some("done");
            }
            Err(error) => self.outcome = Some(error.kind.as_str()),
        }
    }

    /// Its rows, which are counted as they go; it has ended with the last of them.
    pub fn rows(
        self,
        rows: impl Stream<Item = Result<RecordBatch>> + Send + 'static,
    ) -> impl Stream<Item = Result<RecordBatch>> + Send + 'static {
        let (mut rows, mut measured) = (Box::pin(rows), self);
        futures::stream::poll_fn(move |context| {
            // All of it: the closure would take numbers out one by one, and the rest be dropped at once.
            let measured = &mut measured;
            let next = rows.poll_next_unpin(context);
            match &next {
                Poll::Ready(Some(Ok(batch))) => measured.rows += batch.num_rows() as u64,
                Poll::Ready(Some(Err(error))) => measured.outcome = Some(error.kind.as_str()),
                Poll::Ready(None) if measured.outcome.is_none() => measured.outcome = Some("done"),
                Poll::Ready(None) | Poll::Pending => {}
            }
            next
        })
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        let (command, took) = (self.command.as_str(), self.began.elapsed());
        let outcome = self.outcome.unwrap_or(Kind::Cancelled.as_str());
        let metrics = &self.metrics;
        metrics.statements.with_label_values(&[command, outcome]).inc();
        metrics.seconds.with_label_values(&[command]).observe(took.as_secs_f64());
        metrics.rows.with_label_values(&[command]).inc_by(self.rows);
        if let (Some(sql), Some(slow)) = (&self.sql, metrics.slow)
            && took >= slow
        {
            let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(command, outcome, milliseconds, rows = self.rows, %sql, "a slow statement");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_statement_is_counted_once_it_has_ended() {
        let metrics = Arc::new(Metrics::new(Some(Duration::ZERO)).unwrap());
        let count = |outcome: &str| metrics.statements.with_label_values(&["SELECT", outcome]).get();
        let batch = || RecordBatch::new_empty(Arc::new(arrow::datatypes::Schema::empty()));
        let begin = || metrics.begin(Command::Select, "SELECT 1");
        let all: Vec<_> = begin().rows(futures::stream::iter([Ok(batch()), Ok(batch())])).collect().await;
        assert_eq!((all.len(), count("done")), (2, 1));
        let failing = futures::stream::iter([Ok(batch()), Err(Error::deadline("too long"))]);
        let _: Vec<_> = begin().rows(failing).collect().await;
        assert_eq!(count(Kind::Deadline.as_str()), 1);
        drop(begin().rows(futures::stream::pending()));
        assert_eq!(count("cancelled"), 1);
        begin().end(&Ok(7), |rows| *rows);
        begin().end(&Err::<u64, _>(Error::conflict("")), |rows| *rows);
        assert_eq!((count("done"), count(Kind::Conflict.as_str())), (2, 1));
        assert_eq!(metrics.rows.with_label_values(&["SELECT"]).get(), 7);
    }
}
