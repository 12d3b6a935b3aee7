//! `lake metasrv`: one peer of the metadata cluster, as it runs on a server.

use std::time::Duration;

use anyhow::{Result, anyhow};
use lake_metasrv::config::{Config, Options};
use lake_metasrv::server::Server;

use crate::logging::{self, LogArgs};
use crate::signals::StopRequests;

/// How long stopping may take before the process just ends. Nothing acknowledged depends on it.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// Options of `lake metasrv`.
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
    let config = Config::load(args.options)?;
    logging::start(&args.log, &config.dir)?;
    let mut stop = StopRequests::listen(args.exit_with_parent)?;
    let starting = Server::start(config);
    let server = tokio::select! {
        started = starting => started.map_err(logged)?,
        why = stop.next() => {
            tracing::info!(why, "stopped while starting");
            return Ok(());
        }
    };
    let failed = tokio::select! {
        error = server.failed() => Some(logged(error)),
        why = stop.next() => {
            tracing::info!(why, "stopping");
            None
        }
    };
    if tokio::time::timeout(STOP_TIMEOUT, server.shutdown()).await.is_err() {
        tracing::warn!("not stopped in order after {} s: ending", STOP_TIMEOUT.as_secs());
    }
    failed.map_or(Ok(()), Err)
}

fn logged(error: lake_metasrv::error::Error) -> anyhow::Error {
    tracing::error!(%error, "ends");
    anyhow!(error)
}
