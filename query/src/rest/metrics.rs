//! What this node has served, and what it has asked the metadata, in Prometheus' text format.
//!
//! `lake_query_rest_`: requests, counted here as they end, and connections. `lake_query_pointer_cache_` and `lake_query_metadata_calls_total`: what
//! the node's [`Metadata`] has counted by the time it is asked.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use lake_client::cache::counters::REASONS;
use lake_client::metadata::Metadata;
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

use super::endpoint::Endpoint;
use crate::error::{Error, Result};

/// Upper ends of the buckets that times are counted in, in seconds.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// The connections.
#[derive(Debug, Clone)]
pub struct ConnectionFigures {
    pub open: IntGauge,
    pub accepted: IntCounter,
    pub waited: IntCounter,
    /// By what took too long, or why.
    pub closed: IntCounterVec,
}

impl ConnectionFigures {
    fn new(registry: &Registry) -> prometheus::Result<Self> {
        let open = IntGauge::new("connections", "Connections that are open")?;
        let accepted = IntCounter::new("connections_total", "Connections that got a place")?;
        let waited =
            IntCounter::new("connections_waited_total", "Connections that had to wait for a place: all were taken")?;
        let closed = IntCounterVec::new(
            Opts::new(
                "connections_closed_total",
                "Connections closed since their client took too long with a head or was idle, or to make room",
            ),
            &["reason"],
        )?;
        registry.register(Box::new(open.clone()))?;
        registry.register(Box::new(accepted.clone()))?;
        registry.register(Box::new(waited.clone()))?;
        registry.register(Box::new(closed.clone()))?;
        Ok(Self { open, accepted, waited, closed })
    }
}

/// The figures.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub connections: ConnectionFigures,
    requests: IntCounterVec,
    seconds: HistogramVec,
}

impl Metrics {
    /// # Errors
    /// Two figures of one name, which is a defect.
    pub fn new() -> Result<Self> {
        let made = || -> prometheus::Result<Self> {
            let registry = Registry::new_custom(Some("lake_query_rest".to_owned()), None)?;
            let requests = IntCounterVec::new(
                Opts::new("requests_total", "Requests served, by endpoint and outcome"),
                &["endpoint", "outcome"],
            )?;
            let seconds = HistogramVec::new(
                HistogramOpts::new("request_seconds", "From a request's head to its answer, by endpoint")
                    .buckets(BUCKETS.to_vec()),
                &["endpoint"],
            )?;
            registry.register(Box::new(requests.clone()))?;
            registry.register(Box::new(seconds.clone()))?;
            let connections = ConnectionFigures::new(&registry)?;
            Ok(Self { registry, connections, requests, seconds })
        };
        made().map_err(|e| Error::internal(format!("making the metrics: {e}")))
    }

    /// Counts a request; `None`: it was for nothing that is served.
    pub fn count(&self, endpoint: Option<&Endpoint>, status: StatusCode, took: Duration) {
        let endpoint = endpoint.map_or_else(|| "none".to_owned(), |endpoint| endpoint.operation.name());
        self.requests.with_label_values(&[endpoint.as_str(), outcome(status)]).inc();
        self.seconds.with_label_values(&[endpoint.as_str()]).observe(took.as_secs_f64());
    }

    pub fn report(&self, metadata: &Metadata) -> Response {
        let told = of_metadata(metadata).and_then(|families| {
            let mut all = self.registry.gather();
            all.extend(families);
            TextEncoder::new().encode_to_string(&all)
        });
        match told {
            Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
            Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("gathering the metrics: {e}\n")).into_response(),
        }
    }
}

/// What the metadata of a node counts, as it is now.
fn of_metadata(metadata: &Metadata) -> prometheus::Result<Vec<MetricFamily>> {
    let registry = Registry::new_custom(Some("lake_query".to_owned()), None)?;
    let counters = metadata.counters();
    for (name, help, count) in [
        ("hits", "Table pointers given from the cache without a wait", counters.hits),
        (
            "misses",
            "Table pointers that were not cached, or not fit for use, and had to be waited for",
            counters.misses,
        ),
        ("refreshes", "Renewals in the background, of one pointer or of all that the watch covers", counters.refreshes),
        ("stale", "Table pointers given although they were too old: the metadata could not be reached", counters.stale),
        ("told", "Changes of cached pointers that the watch brought", counters.told),
        ("refused", "Answers that were not used: something later was known", counters.refused),
    ] {
        let counter = IntCounter::new(format!("pointer_cache_{name}_total"), help)?;
        counter.inc_by(count);
        registry.register(Box::new(counter))?;
    }
    let tables = IntGauge::new("pointer_cache_tables", "Table pointers that are cached")?;
    tables.set(i64::try_from(metadata.cached_tables()).unwrap_or(i64::MAX));
    registry.register(Box::new(tables))?;
    let calls = IntCounterVec::new(
        Opts::new("metadata_calls_total", "Calls to the metadata, by reason; one that is tried again is several"),
        &["reason"],
    )?;
    for reason in REASONS {
        calls.with_label_values(&[reason.name()]).inc_by(counters.calls(reason));
    }
    registry.register(Box::new(calls))?;
    Ok(registry.gather())
}

/// How a request ended, in words that stay few.
fn outcome(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=399 => "done",
        401 | 403 => "denied",
        404 => "missing",
        409 => "conflict",
        400..=499 => "refused",
        503 => "unavailable",
        _ => "failed",
    }
}
