//! What came of appending, as text or JSON.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::Way;
use super::rows::Verdict;

/// The first and the last part of a measurement that are compared, in seconds.
const PART_SECONDS: usize = 60;

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// Appends that ended in one second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Second {
    pub acknowledged: u64,
    pub failed: u64,
}

/// The figures of one way of committing.
#[derive(Debug)]
pub struct Report {
    way: Way,
    nodes: usize,
    clients: usize,
    pub latencies_us: Histogram<u64>,
    pub seconds: Vec<Second>,
    pub last_error: Option<String>,
    /// How often an acknowledged row was looked for at once, and how often it was not there.
    pub looks: u64,
    pub unseen: u64,
    /// Rows there are in the end, and what is wrong with them.
    pub rows: u64,
    pub verdict: Verdict,
}

impl Report {
    pub fn new(way: Way, nodes: usize, clients: usize, seconds: u64, latencies_us: Histogram<u64>) -> Self {
        Self {
            way,
            nodes,
            clients,
            latencies_us,
            seconds: vec![Second::default(); seconds as usize],
            last_error: None,
            looks: 0,
            unseen: 0,
            rows: 0,
            verdict: Verdict::default(),
        }
    }

    fn rate(seconds: &[Second]) -> f64 {
        let acknowledged: u64 = seconds.iter().map(|second| second.acknowledged).sum();
        acknowledged as f64 / seconds.len().max(1) as f64
    }

    /// Acknowledged appends a second: all of the time, its first and its last part, which are a minute or half of it.
    fn rates(&self) -> [f64; 3] {
        let part = PART_SECONDS.min(self.seconds.len().div_ceil(2));
        let last = self.seconds.len() - part;
        [&self.seconds[..], &self.seconds[..part], &self.seconds[last..]].map(Self::rate)
    }

    fn failed(&self) -> u64 {
        self.seconds.iter().map(|second| second.failed).sum()
    }

    fn success_rate(&self) -> f64 {
        let acknowledged = self.latencies_us.len();
        acknowledged as f64 / (acknowledged + self.failed()).max(1) as f64
    }

    /// What must not be.
    pub fn wrong(&self) -> Option<String> {
        let Verdict { missing, doubled, unasked } = self.verdict;
        match missing + doubled + unasked + self.unseen {
            0 => None,
            _ => Some(format!(
                "{}: {missing} acknowledged rows are missing, {doubled} are there more than once, {unasked} should not be \
                 there, {} were not seen when they were acknowledged",
                self.way.name(),
                self.unseen
            )),
        }
    }

    fn text(&self) -> String {
        let [rate, first, last] = self.rates();
        let ms = |quantile| self.latencies_us.value_at_quantile(quantile) as f64 / 1000.0;
        let part = PART_SECONDS.min(self.seconds.len().div_ceil(2));
        let mut text = format!(
            "append {}: {} clients over {} nodes, {} s: {rate:.1} acknowledged per second (first {part} s {first:.1}, last \
             {last:.1}), {:.2}% succeeded, p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms; {} rows, {} missing, {} doubled, {} \
             unasked; {} of {} looks saw what was just acknowledged",
            self.way.name(),
            self.clients,
            self.nodes,
            self.seconds.len(),
            self.success_rate() * 100.0,
            ms(0.5),
            ms(0.99),
            self.latencies_us.max() as f64 / 1000.0,
            self.rows,
            self.verdict.missing,
            self.verdict.doubled,
            self.verdict.unasked,
            self.looks - self.unseen,
            self.looks,
        );
        if let Some(error) = &self.last_error {
            text.push_str(&format!("; {} failed, the last one: {error}", self.failed()));
        }
        text
    }

    fn json(&self) -> Value {
        let [rate, first, last] = self.rates();
        let ms = |quantile| self.latencies_us.value_at_quantile(quantile) as f64 / 1000.0;
        json!({
            "way": self.way.name(),
            "clients": self.clients,
            "nodes": self.nodes,
            "seconds": self.seconds.len(),
            "acknowledged_per_second": rate,
            "first_part_per_second": first,
            "last_part_per_second": last,
            "success_rate": self.success_rate(),
            "failed": self.failed(),
            "last_error": self.last_error,
            "p50_ms": ms(0.5),
            "p99_ms": ms(0.99),
            "max_ms": self.latencies_us.max() as f64 / 1000.0,
            "rows": self.rows,
            "missing": self.verdict.missing,
            "doubled": self.verdict.doubled,
            "unasked": self.verdict.unasked,
            "looks": self.looks,
            "unseen": self.unseen,
        })
    }
}

/// All ways, as they are printed.
pub fn format(reports: &[Report], format: Format) -> String {
    match format {
        Format::Json => Value::Array(reports.iter().map(Report::json).collect()).to_string(),
        Format::Text => {
            let mut lines: Vec<String> = reports.iter().map(Report::text).collect();
            let rate = |way| reports.iter().find(|report| report.way == way).map(|report| report.rates()[0]);
            if let (Some(together), Some(alone)) = (rate(Way::Together), rate(Way::OneByOne)) {
                lines.push(format!("together makes {:.1} times as many as one by one", together / alone.max(0.001)));
            }
            lines.join("\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_a_minute_or_half_of_the_time() {
        let report = |rates: &[u64]| {
            let mut report = Report::new(Way::Together, 2, 4, rates.len() as u64, Histogram::new(3).unwrap());
            report.seconds.iter_mut().zip(rates).for_each(|(second, rate)| second.acknowledged = *rate);
            report.rates()
        };
        assert_eq!(report(&[2, 4, 6]), [4.0, 3.0, 5.0]);
        assert_eq!(report(&[vec![10; 60], vec![1; 60], vec![4; 60]].concat()), [5.0, 10.0, 4.0]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let mut report = Report::new(Way::Together, 2, 4, 1, Histogram::new(3).unwrap());
        assert_eq!(report.wrong(), None);
        report.verdict.doubled = 2;
        assert!(report.wrong().unwrap().contains("2 are there more than once"));
        assert!(format(&[report], Format::Json).contains("\"doubled\":2"));
    }
}
