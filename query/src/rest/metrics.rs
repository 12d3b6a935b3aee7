//! What this node has served, in Prometheus' text format. Names begin with `lake_query_rest_`.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, TextEncoder};

use super::endpoint::Endpoint;
use crate::error::{Error, Result};

/// Upper ends of the buckets that times are counted in, in seconds.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// The figures.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
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
            Ok(Self { registry, requests, seconds })
        };
        made().map_err(|e| Error::internal(format!("making the metrics: {e}")))
    }

    /// Counts a request; `None`: it was for nothing that is served.
    pub fn count(&self, endpoint: Option<&Endpoint>, status: StatusCode, took: Duration) {
        let endpoint = endpoint.map_or_else(|| "none".to_owned(), |endpoint| endpoint.operation.name());
        self.requests.with_label_values(&[endpoint.as_str(), outcome(status)]).inc();
        self.seconds.with_label_values(&[endpoint.as_str()]).observe(took.as_secs_f64());
    }

    pub fn report(&self) -> Response {
        match TextEncoder::new().encode_to_string(&self.registry.gather()) {
            Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
            Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("gathering the metrics: {e}\n")).into_response(),
        }
    }
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
