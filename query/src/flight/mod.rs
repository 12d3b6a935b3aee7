//! Arrow Flight SQL: how statements come in and rows go out.
//!
//! - A query: GetFlightInfo plans it and returns a ticket, DoGet runs it. The ticket holds the statement itself and the versions
//!   of its tables, signed ([`ticket`], [`keys`]), so any query node can redeem it. [`crate::client`] writes a ticket of its
//!   own, with the statement alone, and saves the first round trip.
//! - A change: GetFlightInfo changes nothing (drivers send DML through it); DoGet runs it, once per ticket however often that is
//!   redeemed, and answers with one row, `count`. DoPut runs it and answers with the count. What one node is asked for
//!   again it knows ([`operations`]).
//! - A query that is polled: PollFlightInfo begins it, and its rows are kept until they are fetched ([`polls`], [`spool`]).
//! - Prepared statements, with values bound to their parameters ([`prepared`]), and bulk ingest ([`ingest`]).
//! - Cancelling, by what GetFlightInfo has answered, at any node ([`running`]).
//! - An operation id in the header `lake-operation-id`: the change is made once by it, whichever node is asked
//!   ([`crate::sql::once`]).
//! - Transactions: BeginTransaction and EndTransaction, and statements with a transaction's id. It names its node; others send on
//!   what concerns it ([`transactions`]). For an ingest that names none, a cookie does ([`cookies`]).
//! - Deadlines: the header `lake-timeout-ms`, else `grpc-timeout` less a margin, so that our words reach the client and
//!   not the transport's; else the configuration's. A client that goes away stops its query; a change goes on to its end, once
//!   all of the request is there: one that breaks off is no whole one ([`whole`]).
//! - Errors: a status whose code says what can be done ([`status`]), with `lake-error-position` where there is a place.
//! - Rows from pointers that are old because the metadata cluster is away: the header `lake-stale-ms`.
//! - With a secret configured, every call needs `authorization: Bearer <secret>`; only the health service does not.

pub mod answering;
pub mod cookies;
pub mod info;
pub mod ingest;
pub mod keys;
pub mod listing;
pub mod metrics;
pub mod operations;
pub mod polls;
pub mod prepared;
pub mod rows;
pub mod running;
pub mod served;
pub mod service;
pub mod spool;
pub mod status;
pub mod ticket;
pub mod transactions;
pub mod whole;

use std::time::Duration;

use tonic::metadata::MetadataMap;

/// Asks for a deadline, in milliseconds from now.
pub const TIMEOUT_HEADER: &str = "lake-timeout-ms";
/// The age in milliseconds of the oldest table pointer used because the metadata cluster is away.
pub const STALE_HEADER: &str = "lake-stale-ms";
/// `line:column` of the place in the statement that an error is about.
pub const POSITION_HEADER: &str = "lake-error-position";
/// The kind of an error, finer than its code.
pub const KIND_HEADER: &str = "lake-error-kind";
/// The operation id of a change, or of the transaction that is begun: it is made once.
pub const OPERATION_HEADER: &str = "lake-operation-id";
/// `serializable` or `snapshot`: the isolation of an INSERT, or of the transaction that is begun.
pub const ISOLATION_HEADER: &str = "lake-isolation";
/// Says that another node has sent this on: it is not sent on again.
pub const FORWARDED_HEADER: &str = "lake-forwarded";
/// Says that only the schema of an answer is asked for: nothing is to be fetched.
pub const SCHEMA_HEADER: &str = "lake-schema-only";
/// Largest message taken from a client: a batch of rows, which drivers send as their users have made it.
pub const MAX_REQUEST_BYTES: usize = 64 << 20;

/// How long the client gives a statement, if it says so.
pub fn timeout_of(headers: &MetadataMap) -> Option<Duration> {
    statement_timeout(headers).or_else(|| call_timeout(headers))
}

/// How long the client gives a statement that outlives the call, if it says so.
pub fn statement_timeout(headers: &MetadataMap) -> Option<Duration> {
    let millis = headers.get(TIMEOUT_HEADER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// How long the call may take, if the client says so, less what the answer needs on its way.
pub fn call_timeout(headers: &MetadataMap) -> Option<Duration> {
    let timeout = parse_grpc_timeout(headers.get("grpc-timeout")?.to_str().ok()?)?;
    let margin = (timeout / 10).clamp(Duration::from_millis(20), Duration::from_millis(500));
    Some(timeout.saturating_sub(margin).max(timeout / 2))
}

/// `100m`: a number of at most eight digits and a unit.
fn parse_grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_deadline_comes_before_the_transports() {
        let with = |name: &'static str, value: &'static str| {
            let mut headers = MetadataMap::new();
            headers.insert(name, value.parse().unwrap());
            timeout_of(&headers)
        };
        assert_eq!(with("grpc-timeout", "10S"), Some(Duration::from_millis(9500)));
        assert_eq!(with("grpc-timeout", "100m"), Some(Duration::from_millis(80)));
        assert_eq!(with("grpc-timeout", "ü"), None);
        assert_eq!(with(TIMEOUT_HEADER, "1500"), Some(Duration::from_millis(1500)));
        assert_eq!(timeout_of(&MetadataMap::new()), None);
    }
}
