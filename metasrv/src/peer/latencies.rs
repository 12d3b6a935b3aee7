//! How long what took on this peer, for whoever reads metrics: histograms with a fixed number of buckets. They start empty
//! with the process.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, exponential_buckets};

/// The first bucket ends here, in seconds; each further one at twice the one before.
const FIRST_BUCKET: f64 = 0.000_125;
/// The last one ends at 16 s; what takes longer is counted, and no more.
const BUCKETS: usize = 18;

fn histogram(name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
    let buckets = exponential_buckets(FIRST_BUCKET, 2.0, BUCKETS)?;
    Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))
}

/// How long the log's writes take until they are durable.
#[derive(Debug, Clone)]
pub struct LogLatencies {
    /// A batch in the journal: what an acknowledged write waits for.
    pub journal: Histogram,
    /// Everything in sled, and the mark: when the journal is full, and for what is too large for it.
    pub entries: Histogram,
}

impl LogLatencies {
    /// Empty.
    ///
    /// # Errors
    /// A name that Prometheus does not take, which is a defect.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            journal: histogram("journal_sync_seconds", "Writing a batch into the journal and syncing it")?,
            entries: histogram(
                "log_sync_seconds",
                "Syncing sled and the mark: when the journal is full, and for large batches",
            )?,
        })
    }

    /// All of them.
    pub fn all(&self) -> [&Histogram; 2] {
        [&self.journal, &self.entries]
    }
}

/// The histograms.
#[derive(Debug)]
pub struct Latencies {
    /// From a command's arrival at the leader to its answer, of those that were answered.
    pub commit: Histogram,
    /// What a linearizable read waits until its leader is confirmed, of those that were.
    pub read_index: Histogram,
}

impl Latencies {
    /// Empty.
    ///
    /// # Errors
    /// A name that Prometheus does not take, which is a defect.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            commit: histogram("commit_seconds", "From a command's arrival here to its answer, of those answered")?,
            read_index: histogram(
                "read_index_seconds",
                "How long linearizable reads waited for the confirmation of the leader, of those confirmed",
            )?,
        })
    }

    /// All of them.
    pub fn all(&self) -> [&Histogram; 2] {
        [&self.commit, &self.read_index]
    }
}

/// Notes one.
pub fn note(histogram: &Histogram, took: Duration) {
    histogram.observe(took.as_secs_f64());
}
