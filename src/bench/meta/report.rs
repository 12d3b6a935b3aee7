//! What came of a load, as text or JSON.

use hdrhistogram::Histogram;
use serde_json::json;

use crate::output::counted;

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// The figures of one run.
#[derive(Debug)]
pub struct Report {
    pub target: &'static str,
    pub load: &'static str,
    pub clients: usize,
    pub connections: usize,
    pub keys: usize,
    pub value_bytes: usize,
    /// How long calls were counted.
    pub seconds: f64,
    /// Of the calls that began and ended in that time.
    pub latencies_us: Histogram<u64>,
    /// The longest time in which no call of any client succeeded.
    pub longest_gap_us: u64,
    pub errors: u64,
    pub last_error: Option<String>,
}

impl Report {
    /// Calls per second.
    pub fn rate(&self) -> f64 {
        self.latencies_us.len() as f64 / self.seconds
    }

    /// As it is printed.
    pub fn format(&self, format: Format) -> String {
        let ms = |quantile| self.latencies_us.value_at_quantile(quantile) as f64 / 1000.0;
        let (p50, p99, max) = (ms(0.5), ms(0.99), self.latencies_us.max() as f64 / 1000.0);
        let gap = self.longest_gap_us as f64 / 1000.0;
        match format {
            Format::Text => format!(
                "{} {}: {} on {}, {} of {} B, {} s: {:.0} per second, p50 {p50:.2} ms, p99 {p99:.2} ms, max {max:.2} ms, longest without a success {gap:.0} ms, {} errors",
                self.target,
                self.load,
                counted(self.clients, "client"),
                counted(self.connections, "connection"),
                counted(self.keys, "key"),
                self.value_bytes,
                self.seconds,
                self.rate(),
                self.errors
            ),
            Format::Json => json!({
                "target": self.target,
                "load": self.load,
                "clients": self.clients,
                "connections": self.connections,
                "keys": self.keys,
                "value_bytes": self.value_bytes,
                "seconds": self.seconds,
                "per_second": self.rate(),
                "p50_ms": p50,
                "p99_ms": p99,
                "max_ms": max,
                "longest_gap_ms": gap,
                "errors": self.errors,
            })
            .to_string(),
        }
    }
}
