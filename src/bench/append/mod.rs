//! `lake bench append`: clients that append one small file each, again and again, to one table over all query nodes.
//!
//! ```text
//! create the table -> warm-up -> measured, each client waiting for its answer before it asks again
//!                                every now and then: is what was just acknowledged there?
//!                  -> all rows read: is every acknowledged one there, and none twice?
//! ```
//! Each way of committing is measured in turn, on a table of its own ([`Way`]): appends that wait together in one snapshot, as
//! it is usual, and one by one with optimistic retries, by the table property `lake.merge-appends.enabled`. A client numbers its
//! rows, so that each row says who has appended it; an append whose outcome is not known may be there or not.
//!
//! - [`report`]: what came of it; [`rows`]: what was acknowledged, and what is there.
//!
//! Limits: [`MAX_CLIENTS`] clients, [`MAX_SECONDS`]. An append that fails is counted, and its client goes on with the next; rows
//! that are missing, doubled or not seen make the run fail.

mod report;
mod rows;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use futures::StreamExt;
use hdrhistogram::Histogram;
use lake_chaos::{Cluster, Role, Spec};
use lake_client::secret::Secret;
use lake_query::Kind;
use lake_query::client::SqlClient;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::report::{Format, Report, Second};
use self::rows::{Appended, Found};
use crate::endpoints::At;

/// Most clients of one run.
const MAX_CLIENTS: usize = 1024;
/// Longest measurement, in seconds.
const MAX_SECONDS: u64 = 24 * 3600;
/// How long one append may take.
const APPEND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long reading all rows may take.
const READ_TIMEOUT: Duration = Duration::from_secs(3600);
/// The longest latency that is told apart, in microseconds.
const MAX_LATENCY_US: u64 = 120_000_000;

/// Options of `lake bench append`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    at: At,
    /// Start three peers and two query nodes in this directory, which must not exist yet, and remove it afterwards
    #[arg(long, value_name = "DIR", conflicts_with = "at")]
    start: Option<PathBuf>,
    /// Clients, spread over the query nodes
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Seconds measured
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seconds measured one by one, for comparison; 0: not at all
    #[arg(long, default_value_t = 20)]
    one_by_one_seconds: u64,
    /// Seconds before either
    #[arg(long, default_value_t = 3)]
    warmup: u64,
    /// Seconds from one look for what was just acknowledged to the next
    #[arg(long, default_value_t = 15)]
    look_every: u64,
    /// Seconds for which the table's snapshots are kept
    #[arg(long, default_value_t = 10)]
    snapshot_seconds: u64,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// How appends are committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Together,
    OneByOne,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Together => "together",
            Way::OneByOne => "one-by-one",
        }
    }

    fn create_table(self, table: &str, snapshot_seconds: u64) -> String {
        let merged = self == Way::Together;
        let age_ms = snapshot_seconds * 1000;
        format!(
            "CREATE TABLE {table} (client BIGINT, number BIGINT) WITH ('lake.merge-appends.enabled' = '{merged}', \
             'lake.expire-snapshots.enabled' = 'true', 'history.expire.max-snapshot-age-ms' = '{age_ms}', \
             'lake.expire-snapshots.held-ms' = '{age_ms}')"
        )
    }
}

/// Measures both ways and prints what came of it.
///
/// # Errors
/// The cluster cannot be reached; rows are missing, doubled, or not seen when they were acknowledged.
pub async fn run(args: Args) -> Result<()> {
    ensure!((1..=MAX_CLIENTS).contains(&args.clients), "--clients: 1 to {MAX_CLIENTS} can be");
    ensure!((1..=MAX_SECONDS).contains(&args.seconds), "--seconds: 1 to {MAX_SECONDS} can be");
    ensure!(args.one_by_one_seconds <= MAX_SECONDS, "--one-by-one-seconds: at most {MAX_SECONDS} can be");
    ensure!(args.look_every > 0 && args.snapshot_seconds > 0, "--look-every and --snapshot-seconds: at least 1");
    let Some(dir) = &args.start else {
        return measure_all(&args, &args.at.endpoints(Role::Query)?, args.at.secret()?).await;
    };
    ensure!(!dir.exists(), "--start: {} is there already; name a directory that is not", dir.display());
    let cluster = start(dir).await?;
    let measured = measure_all(&args, &cluster.endpoints(Role::Query), None).await;
    cluster.shutdown().await;
    tokio::fs::remove_dir_all(dir).await.with_context(|| format!("removing {}", dir.display()))?;
    measured
}

async fn start(dir: &Path) -> Result<Cluster> {
    let binary = std::env::current_exe().context("finding out which program this is")?;
    let spec = Spec { query_nodes: 2, log_level: Some("warn".to_owned()), ..Spec::new(binary, dir) };
    Ok(Cluster::start(spec).await?)
}

async fn measure_all(args: &Args, nodes: &[String], secret: Option<Secret>) -> Result<()> {
    let mut reports = Vec::new();
    for (way, seconds) in [(Way::OneByOne, args.one_by_one_seconds), (Way::Together, args.seconds)] {
        if seconds > 0 {
            let measured = measure(args, way, seconds, nodes, secret.as_ref()).await;
            reports.push(measured.with_context(|| format!("appending {}", way.name()))?);
        }
    }
    println!("{}", report::format(&reports, args.format));
    let wrong: Vec<String> = reports.iter().filter_map(Report::wrong).collect();
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// What the clients of a measurement share.
struct Shared {
    table: String,
    from: Instant,
    until: Instant,
    /// The last append that was acknowledged: by which node, and which row.
    last: watch::Sender<Option<(usize, i64, i64)>>,
}

/// One client's figures.
struct Counted {
    appended: Appended,
    latencies_us: Histogram<u64>,
    seconds: Vec<Second>,
    last_error: Option<String>,
}

async fn measure(args: &Args, way: Way, seconds: u64, nodes: &[String], secret: Option<&Secret>) -> Result<Report> {
    let connect = async |node: usize| SqlClient::connect(std::slice::from_ref(&nodes[node]), secret).await;
    let table = format!("bench_append_{}", uuid::Uuid::new_v4().simple());
    let mut sql = Vec::new();
    for node in 0..nodes.len() {
        sql.push(connect(node).await?);
    }
    let Some(first) = sql.first() else { bail!("no query node is known") };
    first.query(&way.create_table(&table, args.snapshot_seconds), Some(APPEND_TIMEOUT)).await?;
    let from = Instant::now() + Duration::from_secs(args.warmup);
    let until = from + Duration::from_secs(seconds);
    let shared = Arc::new(Shared { table: table.clone(), from, until, last: watch::Sender::new(None) });
    let mut clients = JoinSet::new();
    for n in 0..args.clients {
        let node = n % nodes.len();
        clients.spawn(client(connect(node).await?, node, n as i64, seconds, shared.clone()));
    }
    let looking = tokio::spawn(look(sql.clone(), Duration::from_secs(args.look_every), shared.clone()));
    let mut report = Report::new(way, nodes.len(), args.clients, seconds, histogram()?);
    let mut appended = Vec::new();
    while let Some(counted) = clients.join_next().await {
        let counted = counted.context("a client ended")??;
        report.latencies_us.add(&counted.latencies_us)?;
        for (sum, second) in report.seconds.iter_mut().zip(&counted.seconds) {
            sum.acknowledged += second.acknowledged;
            sum.failed += second.failed;
        }
        report.last_error = counted.last_error.or(report.last_error);
        appended.push(counted.appended);
    }
    (report.looks, report.unseen) = looking.await.context("looking for acknowledged rows ended")??;
    let found = read(first, &table).await.context("reading all rows")?;
    (report.rows, report.verdict) = rows::judge(&appended, &found);
    first.query(&format!("DROP TABLE {table}"), Some(APPEND_TIMEOUT)).await?;
    Ok(report)
}

fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, MAX_LATENCY_US, 3)?)
}

async fn client(sql: SqlClient, node: usize, client: i64, seconds: u64, shared: Arc<Shared>) -> Result<Counted> {
    let mut counted = Counted {
        appended: Appended::new(client),
        latencies_us: histogram()?,
        seconds: vec![Second::default(); usize::try_from(seconds)?],
        last_error: None,
    };
    loop {
        let started = Instant::now();
        if started >= shared.until {
            return Ok(counted);
        }
        let number = counted.appended.next();
        let insert = format!("INSERT INTO {} VALUES ({client}, {number})", shared.table);
        let done = sql.query(&insert, Some(APPEND_TIMEOUT)).await;
        let ended = Instant::now();
        let at = ended.checked_duration_since(shared.from).map(|since| since.as_secs() as usize);
        let second = at.and_then(|at| counted.seconds.get_mut(at));
        match done {
            Ok(_) => {
                counted.appended.acknowledged();
                shared.last.send_replace(Some((node, client, number)));
                if let Some(second) = second {
                    second.acknowledged += 1;
                    let us = (ended - started).as_micros().min(u128::from(MAX_LATENCY_US)) as u64;
                    counted.latencies_us.record(us.max(1))?;
                }
            }
            Err(error) => {
                counted.appended.failed(error.kind == Kind::Unknown);
                counted.last_error = Some(error.message);
                if let Some(second) = second {
                    second.failed += 1;
                }
            }
        }
    }
}

/// Looks, again and again, for the row that was acknowledged last, at the node that has acknowledged it. Gives how often,
/// and how often it was not there.
async fn look(sql: Vec<SqlClient>, every: Duration, shared: Arc<Shared>) -> Result<(u64, u64)> {
    let mut last = shared.last.subscribe();
    let (mut looks, mut unseen) = (0, 0);
    loop {
        tokio::time::sleep(every).await;
        if Instant::now() + every >= shared.until && looks > 0 {
            return Ok((looks, unseen));
        }
        last.mark_unchanged();
        let next = tokio::time::timeout_at(shared.until.into(), last.changed()).await;
        if !matches!(next, Ok(Ok(()))) {
            return Ok((looks, unseen));
        }
        let Some((node, client, number)) = *last.borrow() else { continue };
        let query = format!("SELECT count(*) FROM {} WHERE client = {client} AND number = {number}", shared.table);
        let rows = sql[node].query(&query, Some(READ_TIMEOUT)).await?;
        let seen: i64 = rows.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values()).sum();
        looks += 1;
        unseen += u64::from(seen != 1);
    }
}

/// Reads all rows.
async fn read(sql: &SqlClient, table: &str) -> Result<Found> {
    let mut rows = sql.execute(&format!("SELECT client, number FROM {table}"), Some(READ_TIMEOUT)).await?;
    let mut found = Found::default();
    while let Some(batch) = rows.next().await {
        let batch = batch?;
        let column = |i: usize| batch.column(i).as_primitive::<Int64Type>().values();
        for (client, number) in column(0).iter().zip(column(1)) {
            found.add(*client, *number);
        }
    }
    Ok(found)
}
