//! `lake janitor`: the upkeep of tables whose metadata is in an object store or an etcd, and so in no cluster whose leader could see to
//! it. Any number may run: one at a time works.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use lake_chaos::dirlock::DirLock;
#[cfg(feature = "store-object")]
use lake_client::object::ObjectMetaStore;
use lake_query::janitor::{self, Options as Janitor};
use lake_query::{Config, Options};
use tokio_util::sync::CancellationToken;

use crate::output::counted;
use crate::place::Place;
use crate::query::store_at;
use crate::service::ServiceArgs;

/// Ten years, as with `lake metasrv`.
const LONGEST_RETENTION_SECS: u64 = 10 * 366 * 24 * 60 * 60;
/// What it takes.
const STORES: &str = "etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX or file:///DIR (a metadata cluster's own workers do what a janitor does)";

/// Options of `lake janitor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
What a table gets is what its properties ask for: lake.expire-snapshots.enabled, lake.compaction.enabled,
lake.remove-orphan-files.enabled. The files of a table that was dropped with PURGE are
deleted after a while; until then UNDROP TABLE has it back. A janitor that is gone is
replaced by another one that runs once the lease has been seen unchanged for its whole time. A metadata cluster needs none of this:
its query nodes with the role worker do the same.

Example:
  lake janitor --store s3://bucket/meta --warehouse s3://bucket/tables")]
pub struct Args {
    /// Where the metadata is: etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX, file:///DIR
    #[arg(long, value_name = "URL")]
    store: String,
    /// Where tables live: file:///dir or s3://bucket/prefix
    #[arg(long, env = "LAKE_QUERY_WAREHOUSE", value_name = "URI")]
    warehouse: String,
    /// Directory for spill files and logs, of this process alone
    #[arg(long, value_name = "DIR", default_value = "./lake-janitor")]
    dir: PathBuf,
    /// S3 endpoint, for other services than AWS
    #[arg(long, env = "LAKE_QUERY_S3_ENDPOINT", value_name = "URL")]
    s3_endpoint: Option<String>,
    /// S3 region [default: AWS_REGION, else us-east-1]
    #[arg(long, env = "LAKE_QUERY_S3_REGION", value_name = "REGION")]
    s3_region: Option<String>,
    /// File that holds the S3 access key id [default: AWS_ACCESS_KEY_ID or the instance's role]
    #[arg(long, env = "LAKE_QUERY_S3_ACCESS_KEY_FILE", value_name = "FILE")]
    s3_access_key_file: Option<PathBuf>,
    /// File that holds the S3 secret access key [default: AWS_SECRET_ACCESS_KEY or the instance's role]
    #[arg(long, env = "LAKE_QUERY_S3_SECRET_KEY_FILE", value_name = "FILE")]
    s3_secret_key_file: Option<PathBuf>,
    /// How long the lease lives without a sign of its holder, in seconds
    #[arg(long, value_name = "SECS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(3..=3600))]
    lease_secs: u64,
    /// From one look at all tables to the next, in seconds
    #[arg(long, value_name = "SECS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval_secs: u64,
    /// How long the files of a table that was dropped with PURGE are kept, in seconds, from when a janitor has seen that
    #[arg(long, value_name = "SECS", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(..=LONGEST_RETENTION_SECS))]
    purge_retention_secs: u64,
    /// Look once, and end
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

/// Works until asked to stop.
///
/// # Errors
/// It cannot start, or its directory is another process's; with `--once`, the round failed.
pub async fn run(args: Args) -> Result<()> {
    let config = Config::new(Options {
        dir: Some(args.dir),
        warehouse: Some(args.warehouse),
        s3_endpoint: args.s3_endpoint,
        s3_region: args.s3_region,
        s3_access_key_file: args.s3_access_key_file,
        s3_secret_key_file: args.s3_secret_key_file,
        ..Options::default()
    })?;
    // Another janitor with this directory would begin by removing the files of this one.
    let _lock = DirLock::take(&config.dir)?;
    let mut stop = args.service.begin(&config.dir)?;
    let place = args.store.parse::<Place>().map_err(|_| anyhow!("store: {:?} is none of {STORES}", args.store))?;
    if let Place::Cluster(_) = place {
        bail!("store: {place} is a metadata cluster: its query nodes with the role worker see to its tables");
    }
    check_is_there(&place)?;
    let store = store_at(&config, place).await.context("store")?;
    let engine = janitor::engine(&config, store.clone()).await?;
    let options = Janitor {
        ttl: Duration::from_secs(args.lease_secs),
        interval: Duration::from_secs(args.interval_secs),
        retention: Duration::from_secs(args.purge_retention_secs),
        once: args.once,
        waits,
    };
    let told = CancellationToken::new();
    let working = janitor::run(engine.clone(), store, options, &told);
    tokio::pin!(working);
    let done = tokio::select! {
        done = &mut working => done,
        why = stop.next() => {
            tracing::info!(why, "stopping");
            told.cancel();
            working.await
        }
    };
    engine.close();
    engine.tables().close().await;
    if let Some(round) = done?.filter(|_| args.once) {
        let (tables, changes) = (counted(round.tables, "table"), counted(round.changed, "change"));
        let purged =
            if round.purged > 0 { format!(", {} purged", counted(round.purged, "table")) } else { String::new() };
        println!("{tables}, {changes}, {}{purged}", counted(round.failed, "failure"));
        if round.failed > 0 {
            bail!("the upkeep of {} failed, or a purge; the log says why", counted(round.failed, "table"));
        }
    }
    Ok(())
}

/// To open a directory is to make a store of it, with nothing to be done in: a name that was mistyped would look like work well done.
fn check_is_there(place: &Place) -> Result<()> {
    #[cfg(feature = "store-object")]
    if let Place::Directory(dir) = place
        && !ObjectMetaStore::is_in(dir)
    {
        bail!(
            "store: {place} holds no metadata: nothing was made there; check the path, or create a table first (lake sql --meta {place})"
        );
    }
    let _ = place;
    Ok(())
}

/// Tells that another one's turn has to end first.
fn waits(at_most: Duration) {
    eprintln!(
        "another janitor holds the lease: waiting since {} until it ends, or has shown no life for {} s",
        humantime::format_rfc3339_seconds(SystemTime::now()),
        at_most.as_secs_f64().ceil()
    );
}
