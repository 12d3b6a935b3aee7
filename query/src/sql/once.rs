//! Statements that are made once, by their operation id: asked for again, on any node, they return the first outcome.
//!
//! ```text
//! is there an outcome of this id? -> of this statement: it is the answer; of another: refused
//!   none -> run it; what it commits leaves the outcome in the same transaction
//!             committed                 -> done
//!             nothing to commit         -> the outcome is left by itself
//!             refused                   -> left by itself as well: asked again, it is refused again
//!             unknown, unavailable, ... -> none is left by this; if there is one, that is the answer
//!             refused, and not left     -> unknown: another attempt may have done it
//! ```
//! Whatever is left first is the outcome: every attempt demands that none is there (semantics, section 4). Outcomes are kept
//! for at least [`crate::outcomes::LIFETIME`].

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::metadata::MetadataWriter;

use super::Engine;
use super::bound::Bound;
use crate::error::{Error, Kind, Result};
use crate::outcomes::fingerprint;
use crate::table::catalog_error;
use crate::table::scope::{Once, Outcome, Scope};

/// What the outcomes are filed under.
pub const DOMAIN: &str = "sql";
/// What those of statements are filed under that have no id but their ticket's.
pub const TICKETS: &str = "ticket";
/// Longest operation id, in bytes.
pub const MAX_ID_BYTES: usize = 200;

/// # Errors
/// `Invalid` for what cannot be an operation id.
pub fn check_id(id: &str) -> Result<()> {
    let why = if id.is_empty() || id.len() > MAX_ID_BYTES {
        "it has 1 to 200 bytes"
    } else if id.contains('/') || id.chars().any(char::is_control) {
        "it holds no '/' and no control characters"
    } else {
        return Ok(());
    };
    Err(Error::invalid(format!("the operation id {id:?} cannot be used: {why}; nothing was done")))
}

/// What tells a statement from another: its text, without what is around it.
pub fn statement(sql: &str) -> u64 {
    fingerprint(&[sql.trim().trim_end_matches(';').trim_end().as_bytes()])
}

/// Makes a change once, by `id`. Returns how many rows the first attempt that was committed has changed.
///
/// # Errors
/// The statement's; `Invalid` if the id was used for another statement.
pub async fn run(
    engine: &Engine,
    (domain, id): (&'static str, &str),
    bound: &Bound,
    timeout: Option<Duration>,
) -> Result<u64> {
    check_id(id)?;
    let deadline = engine.write_deadline(timeout);
    let writer = &engine.tables().writer;
    let once = Arc::new(Once::new(domain, id, bound.fingerprint()?));
    if let Some(first) = find(writer, &once, deadline).await? {
        return answer(&once, &first);
    }
    let tables = engine.tables().within(Scope::Once(once.clone()));
    let changed = async {
        let planned = engine.plan_in(bound, timeout, &tables).await?;
        engine.change(planned).await
    };
    settle(writer, &once, changed.await, deadline).await
}

/// The outcome that was left of an operation.
///
/// # Errors
/// The metadata's.
pub async fn find(writer: &MetadataWriter, once: &Once, deadline: Instant) -> Result<Option<Outcome>> {
    let kept = writer.outcome(once.domain(), once.id(), deadline).await;
    let kept = kept.map_err(|e| catalog_error("looking up the outcome of an operation", e))?;
    kept.map(|kept| Outcome::read(once.id(), &kept)).transpose()
}

/// What an outcome that was left by another attempt means for this one.
///
/// # Errors
/// The refusal that is kept; `Invalid` for an outcome of another statement.
pub fn answer(once: &Once, first: &Outcome) -> Result<u64> {
    if first.statement != once.statement() {
        return Err(Error::invalid(format!(
            "operation id {} has been used for another statement; nothing was done: choose another id",
            once.id()
        )));
    }
    match &first.refusal {
        Some((kind, message)) => Err(Error::new(Kind::named(kind), message)),
        None => Ok(first.count),
    }
}

/// What an attempt has come to is the outcome, if none was left before.
///
/// # Errors
/// That of the first outcome.
pub async fn settle(writer: &MetadataWriter, once: &Once, changed: Result<u64>, deadline: Instant) -> Result<u64> {
    let refusal = match &changed {
        Ok(count) => {
            once.will_answer(*count);
            None
        }
        Err(error) if is_final(error.kind) => Some((error.kind.as_str().to_owned(), error.message.clone())),
        // Perhaps done by another attempt, or by this one after all.
        Err(_) => {
            return match find(writer, once, deadline).await {
                Ok(Some(first)) => answer(once, &first),
                Ok(None) | Err(_) => changed,
            };
        }
    };
    match writer.leave_outcome(&once.record(refusal)?, deadline).await {
        Ok(kept) => match Outcome::read(once.id(), &kept)? {
            first if once.left(&first) => changed,
            first => answer(once, &first),
        },
        // What was committed is in the metadata with it.
        Err(error) => {
            tracing::debug!(operation = once.id(), %error, "the outcome of an operation could not be left");
            changed.map_err(|refusal| unsettled(once.id(), refusal, &error))
        }
    }
}

/// A refusal that is not known to be the outcome, for this reason: another attempt under the id may have done it, or may yet.
pub fn unsettled(id: &str, refusal: Error, why: &impl fmt::Display) -> Error {
    // Whoever tries it is refused the same; or it says already what is not known.
    if matches!(refusal.kind, Kind::Invalid | Kind::NotSupported | Kind::Unknown) {
        return refusal;
    }
    let message = format!(
        "this attempt of operation {id} changed nothing ({}), and whether another one has, or will, could not be found out: {why}; \
         ask for it again under this id",
        refusal.message
    );
    Error::unknown(message).at(refusal.position)
}

/// Whether an error is an outcome: the same statement would be refused again, or was answered with a reason to run it anew.
fn is_final(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Invalid | Kind::NotSupported | Kind::NotFound | Kind::AlreadyExists | Kind::Denied | Kind::Conflict
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_checked_and_statements_told_apart() {
        assert!(check_id("order 4711: tea").is_ok());
        for wrong in ["", "a/b", "a\nb", &"x".repeat(MAX_ID_BYTES + 1)] {
            assert_eq!(check_id(wrong).unwrap_err().kind, Kind::Invalid, "{wrong:?}");
        }
        assert_eq!(statement("INSERT INTO t VALUES (1) ;\n"), statement("INSERT INTO t VALUES (1)"));
        assert_ne!(statement("INSERT INTO t VALUES (1)"), statement("INSERT INTO t VALUES (2)"));
    }

    #[test]
    fn a_refusal_that_could_not_be_left_may_not_be_the_outcome() {
        let refused = |kind| unsettled("a", Error::new(kind, "another writer was first"), &"nobody answers");
        for kind in [Kind::Conflict, Kind::NotFound, Kind::AlreadyExists] {
            let error = refused(kind);
            assert_eq!(error.kind, Kind::Unknown);
            let said = ["another writer was first", "nobody answers", "ask for it again"];
            assert!(said.iter().all(|words| error.message.contains(words)), "{error}");
        }
        assert_eq!(refused(Kind::Invalid).kind, Kind::Invalid);
        assert_eq!(refused(Kind::Unknown).message, "another writer was first");
    }

    #[test]
    fn an_outcome_is_of_one_statement() {
        let once = Once::new(DOMAIN, "a", 1);
        once.will_answer(5);
        assert_eq!(answer(&once, &once.outcome(None)), Ok(5));
        let refusal = Some((Kind::NotFound.as_str().to_owned(), "table t does not exist".to_owned()));
        assert_eq!(answer(&once, &once.outcome(refusal)).unwrap_err().kind, Kind::NotFound);
        let other = Once::new(DOMAIN, "a", 2);
        assert!(answer(&other, &once.outcome(None)).unwrap_err().message.contains("another statement"));
        assert!(!other.left(&once.outcome(None)));
    }
}
