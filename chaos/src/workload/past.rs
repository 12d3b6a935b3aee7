//! Reads that come late: of the snapshot that a table had when an append was acknowledged, some seconds afterwards. Meanwhile files are packed and
//! snapshots expire, all but those that are too young, as this one is: it must be there, with all of its files.
//!
//! The node is the one that has acknowledged the append, so that none is asked that does not know the snapshot yet.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use rand::Rng;

use super::access::Access;
use super::hot::{COUNTED, Shared, append, appends, expired_age_s, name};
use super::statements::{SCHEMA, count_of, told};
use crate::check::hot::{EXPIRED, GONE};
use crate::history::Hot;
use crate::run::recorder::Scribe;
use crate::sql::Failure;

/// The probability that an operation is an append with such a read: its client does nothing in between.
pub(super) const LOOKS_BACK: f64 = 0.012;
/// How long that is, in milliseconds, and half as long as snapshots are kept at most.
const LATER_MS: RangeInclusive<u64> = 1_000..=5_000;
/// What clocks may differ by.
const SKEW_MS: u64 = 1_000;
/// How errors of queries that find no file tell its name.
const FILES: [&str; 3] = [".parquet", ".avro", ".metadata.json"];
/// How those of queries whose version has expired since they were planned say so.
const EXPIRED_VERSION: &str = "is gone: it has expired";

/// One append, and later a read of the snapshot that there was then.
pub(super) async fn look_back(shared: &Shared, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) {
    let Some(number) = append(shared, table, node, access, scribe).await else { return };
    let newest =
        format!("SELECT snapshot_id FROM {SCHEMA}.\"hot_{table}$snapshots\" ORDER BY sequence_number DESC LIMIT 1");
    let listed = access.run(node, &newest, None, access.deadline()).await;
    let Some(snapshot) = listed.ok().as_ref().and_then(count_of) else { return };
    let kept_ms = (1_000 * expired_age_s(access.timeout)).saturating_sub(SKEW_MS);
    let later_ms = access.rng.random_range(LATER_MS).min(kept_ms / 2);
    tokio::time::sleep(Duration::from_millis(later_ms)).await;
    let action = |whole, odd| shared.action(Hot::Past { table: table.into(), number, kept_ms, whole, odd });
    let sql = format!("{COUNTED} FROM {} FOR VERSION AS OF {snapshot} GROUP BY id", name(table));
    let by = access.deadline();
    scribe.invoke(action(None, BTreeMap::new()));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let (whole, odd, foreign) = appends(&answer);
            told(scribe, action(Some(whole), odd), None, node, foreign);
        }
        Err(failure) => {
            let failure = expired(failure);
            scribe.query_failed(action(None, BTreeMap::new()), &failure, node);
        }
    }
}

/// Says so if a read has failed since its snapshot, or a file of it, is not there any more.
fn expired(failure: Failure) -> Failure {
    match failure.kind == "not-found" && failure.message.contains("has no version") {
        true => Failure { message: format!("{EXPIRED}: {}", failure.message), ..failure },
        false => gone(failure),
    }
}

/// Says so if a read has failed since what it reads is not there any more.
pub(super) fn gone(failure: Failure) -> Failure {
    let is_gone = match failure.kind.as_str() {
        "not-found" | "corrupt" => FILES.iter().any(|file| failure.message.contains(file)),
        "conflict" => failure.message.contains(EXPIRED_VERSION),
        _ => false,
    };
    match is_gone {
        true => Failure { message: format!("{GONE}: {}", failure.message), ..failure },
        false => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::What;

    #[test]
    fn an_error_tells_what_is_gone() {
        let told = |kind: &str, message: &str| {
            let (kind, message) = (kind.to_owned(), message.to_owned());
            expired(Failure { what: What::Refused, kind, message }).message
        };
        let none = "table chaos.hot_0 has no version 7: there is no such snapshot, or it has expired";
        assert_eq!(told("not-found", none), format!("{EXPIRED}: {none}"));
        assert!(told("not-found", "reading /w/data/1.parquet: it is not there").starts_with(GONE));
        let planned = "the version of table chaos.hot_0 that the query was planned on is gone: it has expired, or the table was dropped";
        assert!(told("conflict", planned).starts_with(GONE));
        assert_eq!(told("unavailable", "no peer answers"), "no peer answers");
    }
}
