//! `lake meta put`, `cas` and `delete`: one key changed, and what was found where that was not done.

use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use lake_client::store::{Committed, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Expected, KeyValue, Op, OpResult, Revision, Txn};
use lake_proto::limits::MAX_PAGE_ENTRIES;
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{FormatArgs, committed_json, entries_table, entry_json, escaped};
use super::value::ValueArgs;
use super::{EXIT_NO, EXIT_UNKNOWN};

/// What belongs to whoever writes it.
const FREE: &str = "/kv/";
/// Keys that go by their prefix unless told otherwise; in one transaction.
const DELETED_AT_MOST: u64 = 1000;
const DELETED_AT_ONCE: usize = 100;

/// Options of `lake meta put`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Keys under /kv/ only: lake's own change by compare-and-set (`lake meta cas`).

Exit codes: 0 written, 3 the lease is over, 1 not written, 4 it is unknown whether it was written.

Examples:
  lake meta put /kv/greeting hello
  lake meta put /kv/photo --file photo.jpg
  date | lake meta put /kv/now --file -")]
pub struct PutArgs {
    #[command(flatten)]
    write: WriteArgs,
}

/// Options of `lake meta cas`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A revision is never used twice: a key that was deleted and made again is not taken for the old one.

Exit codes: 0 written, 3 something else was found (it is printed), 1 not written, 4 it is unknown whether it was written.

Examples:
  lake meta cas /kv/config --expect absent '{\"a\": 1}'
  lake meta cas /kv/config --expect 17 --file config.json")]
pub struct CasArgs {
    #[command(flatten)]
    write: WriteArgs,
    /// What the key must be at: a revision (`revision` of `lake meta get`), or absent
    #[arg(long, value_name = "REVISION|absent")]
    expect: Expect,
}

/// What is put where.
#[derive(Debug, clap::Args)]
struct WriteArgs {
    /// The key
    key: String,
    #[command(flatten)]
    value: ValueArgs,
    /// The lease that the key hangs on from now on: it goes when that ends
    #[arg(long, value_name = "LEASE")]
    lease: Option<u64>,
    /// Print what was there before
    #[arg(long)]
    previous: bool,
    #[command(flatten)]
    format: FormatArgs,
}

/// Options of `lake meta delete`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Without --expect keys under /kv/ only. With --prefix all keys that begin so, up to --limit of them, a hundred in a transaction: where there
are more nothing is deleted.

Exit codes: 0 deleted, 3 it was not there, or at another revision (it is printed), 1 not deleted, 4 it is unknown whether it
was deleted, or some were and the same command goes on.

Examples:
  lake meta delete /kv/greeting
  lake meta delete --prefix /kv/bench/ --limit 10000 --dry-run
  lake meta delete /kv/config --expect 18 --previous --format json")]
pub struct DeleteArgs {
    /// The key
    #[arg(required_unless_present = "prefix")]
    key: Option<String>,
    /// Delete all keys that begin so
    #[arg(long, value_name = "PREFIX", conflicts_with_all = ["key", "expect", "previous"])]
    prefix: Option<String>,
    /// With --prefix: most keys that are deleted [default: 1000]
    #[arg(long, value_name = "N", requires = "prefix", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    limit: Option<u64>,
    /// With --prefix: only say how many keys would be deleted
    #[arg(long, requires = "prefix")]
    dry_run: bool,
    /// The revision that the key must be at
    #[arg(long, value_name = "REVISION")]
    expect: Option<u64>,
    /// Print what was there before
    #[arg(long)]
    previous: bool,
    #[command(flatten)]
    format: FormatArgs,
}

/// [`Expected`] as an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Expect(Expected);

impl FromStr for Expect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("absent", _) => Ok(Self(Expected::Absent)),
            (_, Ok(revision)) => Ok(Self(Expected::ModRevision(revision))),
            _ => Err("it is a revision, or the word absent".to_owned()),
        }
    }
}

/// Puts a value under a key, whatever was there.
///
/// # Errors
/// As every change.
pub async fn put(cluster: &Cluster, args: PutArgs) -> Result<u8> {
    write(cluster, args.write, None).await
}

/// Puts a value under a key if it is as expected.
///
/// # Errors
/// As every change.
pub async fn cas(cluster: &Cluster, args: CasArgs) -> Result<u8> {
    let Expect(expected) = args.expect;
    write(cluster, args.write, Some(expected)).await
}

async fn write(cluster: &Cluster, args: WriteArgs, expected: Option<Expected>) -> Result<u8> {
    let value = args.value.read()?;
    let put = Op::Put { key: args.key.clone(), value, return_previous: args.previous, lease: args.lease };
    let change = Change { key: args.key, expected, lease: args.lease, verb: "written" };
    commit(cluster, change, put, args.format).await
}

/// Deletes a key, or does so if it is as expected.
///
/// # Errors
/// As every change.
pub async fn delete(cluster: &Cluster, args: DeleteArgs) -> Result<u8> {
    let key = match (args.key, args.prefix) {
        (_, Some(prefix)) => return delete_prefix(cluster, &prefix, args.limit, args.dry_run, args.format).await,
        (Some(key), None) => key,
        (None, None) => bail!("say which key is to be deleted, or --prefix"),
    };
    let delete = Op::Delete { key: key.clone(), return_previous: args.previous };
    let expected = args.expect.map(Expected::ModRevision);
    let change = Change { key, expected, lease: None, verb: "deleted" };
    commit(cluster, change, delete, args.format).await
}

/// Deletes all keys that begin so, unless they are more than the limit.
async fn delete_prefix(
    cluster: &Cluster,
    prefix: &str,
    limit: Option<u64>,
    dry_run: bool,
    format: FormatArgs,
) -> Result<u8> {
    let shown = escaped(prefix);
    ensure!(
        prefix.starts_with(FREE),
        "{shown}: keys under {FREE} only are deleted by their prefix; nothing was deleted"
    );
    let (store, deadline) = (cluster.store()?, cluster.deadline());
    let limit = limit.unwrap_or(DELETED_AT_MOST);
    let mut keys: Vec<String> = Vec::new();
    let mut page: Option<String> = None;
    loop {
        let options = ReadOptions::default();
        let read = store.list(prefix, page.as_deref(), MAX_PAGE_ENTRIES as u32, options, deadline).await?.value;
        keys.extend(read.entries.into_iter().map(|entry| entry.key));
        ensure!(
            keys.len() as u64 <= limit,
            "more than {limit} keys begin with {shown}; nothing was deleted: --limit allows more"
        );
        page = read.next;
        if page.is_none() {
            break;
        }
    }
    if dry_run {
        let line = || format!("{shown}: {} keys would be deleted\n", keys.len());
        return format.answer(!keys.is_empty(), line, || json!({ "dry_run": true, "keys": keys.len() }));
    }
    let mut deleted = 0;
    for batch in keys.chunks(DELETED_AT_ONCE) {
        let then = batch.iter().cloned().map(Op::delete).collect();
        match store.commit(Txn { then, ..Txn::default() }, deadline).await {
            // One that has gone meanwhile is nobody's loss.
            Ok(_) => deleted += batch.len(),
            Err(error) if deleted == 0 => return Err(error.into()),
            Err(error) => {
                eprintln!("lake: {error}\n{deleted} of {} keys are deleted: the same command goes on.", keys.len());
                return Ok(EXIT_UNKNOWN);
            }
        }
    }
    format.answer(deleted > 0, || format!("{shown}: {deleted} keys deleted\n"), || json!({ "deleted": deleted }))
}

/// What is to be done to one key.
struct Change {
    key: String,
    expected: Option<Expected>,
    lease: Option<u64>,
    /// What has been done to the key then.
    verb: &'static str,
}

/// Does it, under the compares that the change asks for.
async fn commit(cluster: &Cluster, change: Change, op: Op, format: FormatArgs) -> Result<u8> {
    let expected = change.expected.map(|expected| Compare::expected(change.key.clone(), expected));
    let when = expected.into_iter().chain(change.lease.map(Compare::lease_alive)).collect();
    let txn = Txn { when, then: vec![op], otherwise: vec![] };
    let committed = cluster.store()?.commit(txn, cluster.deadline()).await?;
    let outcome = Outcome::of(&committed);
    format.print(
        || change.text(&committed, outcome),
        || {
            let mut json = committed_json(&committed);
            json.insert("key".to_owned(), json!(change.key));
            json.insert("previous".to_owned(), previous(&committed).map_or(Value::Null, entry_json));
            Value::Object(json)
        },
    )?;
    Ok(outcome.code())
}

/// How a change ended that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// There was nothing to delete.
    Nothing,
    /// A compare failed.
    Refused,
    /// A compare failed, maybe because an earlier attempt of the same call, whose answer was lost, was applied.
    Unknown,
}

impl Outcome {
    fn of(committed: &Committed) -> Self {
        match (committed.result.succeeded, committed.resent, committed.result.results.first()) {
            (false, true, _) => Self::Unknown,
            (false, false, _) => Self::Refused,
            (true, _, Some(OpResult::Delete { deleted: false, .. })) => Self::Nothing,
            (true, ..) => Self::Done,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Nothing | Self::Refused => EXIT_NO,
            Self::Unknown => EXIT_UNKNOWN,
        }
    }
}

fn previous(committed: &Committed) -> Option<&KeyValue> {
    match committed.result.results.first()? {
        OpResult::Put { previous } | OpResult::Delete { previous, .. } => previous.as_ref(),
        _ => None,
    }
}

impl Change {
    fn text(&self, committed: &Committed, outcome: Outcome) -> String {
        let (key, verb) = (escaped(&self.key), self.verb);
        match outcome {
            Outcome::Done => {
                let mut text = format!("{key}: {verb} at revision {}\n", committed.result.revision);
                if let Some(previous) = previous(committed) {
                    text.push_str("before that:\n");
                    text.push_str(&entries_table(std::slice::from_ref(previous)));
                }
                text
            }
            Outcome::Nothing => format!("{key}: there is no such key\n"),
            Outcome::Refused => format!("{key}: not {verb}: {}", self.found(&committed.result.observed)),
            Outcome::Unknown => format!(
                "{key}: an answer was lost and the change was sent again; whether it was the first attempt that changed what \
                 is there is unknown: {}",
                self.found(&committed.result.observed)
            ),
        }
    }

    /// Why a compare failed.
    fn found(&self, observed: &[KeyValue]) -> String {
        let found = observed.iter().find(|entry| entry.key == self.key);
        let holds = match (self.expected, found) {
            (None, _) => true,
            (Some(Expected::Absent), found) => found.is_none(),
            (Some(Expected::ModRevision(revision)), found) => found.is_some_and(|e| e.mod_revision == revision),
        };
        match (found, self.lease) {
            (_, Some(lease)) if holds => format!("lease {lease} is over\n"),
            (None, _) => format!("{} was expected, and there is no such key\n", describe(self.expected)),
            (Some(entry), _) => format!(
                "{} was expected, and it is at revision {}:\n{}",
                describe(self.expected),
                entry.mod_revision,
                entries_table(std::slice::from_ref(entry))
            ),
        }
    }
}

fn describe(expected: Option<Expected>) -> String {
    let revision = |revision: Revision| format!("revision {revision}");
    match expected {
        None => "anything".to_owned(),
        Some(Expected::Absent) => "no such key".to_owned(),
        Some(Expected::ModRevision(r)) => revision(r),
    }
}
