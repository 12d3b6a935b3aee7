//! `lake query`: one query node, as it runs on a server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_query::{Config, Options, QueryNode};

use crate::logging::{self, LogArgs};
use crate::signals::StopRequests;

/// How long stopping may take: longer than the node's own patience, twice.
const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// Options of `lake query`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    log: LogArgs,
    /// Stop at the end of standard input, which is the end of the process that started this one
    #[arg(long)]
    exit_with_parent: bool,
}

/// Serves until asked to stop.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(args: Args) -> Result<()> {
    let config = Config::new(args.options)?;
    logging::start(&args.log, &config.dir)?;
    let mut stop = StopRequests::listen(args.exit_with_parent)?;
    if config.meta.is_empty() {
        bail!("meta: say where the metadata peers are, as --meta host:port,host:port");
    }
    let remote = RemoteConfig { endpoints: config.meta.clone(), secret: config.secret.clone() };
    let store = RemoteStore::connect(remote).context("meta")?;
    let node = tokio::select! {
        started = QueryNode::start(config, Arc::new(store)) => started.map_err(logged)?,
        why = stop.next() => {
            tracing::info!(why, "stopped while starting");
            return Ok(());
        }
    };
    let failed = tokio::select! {
        error = node.failed() => Some(logged(error)),
        why = stop.next() => {
            tracing::info!(why, "stopping");
            None
        }
    };
    if tokio::time::timeout(STOP_TIMEOUT, node.shutdown()).await.is_err() {
        tracing::warn!("not stopped in order after {} s: ending", STOP_TIMEOUT.as_secs());
    }
    failed.map_or(Ok(()), Err)
}

fn logged(error: lake_query::Error) -> anyhow::Error {
    tracing::error!(%error, "ends");
    anyhow!(error)
}
