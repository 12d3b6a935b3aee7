//! What `lake metasrv` and `lake query` have in common: they start, run until they are asked to stop or cannot go on, and stop
//! in order, within a bounded time.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::logging::{self, LogArgs};
use crate::output;
use crate::signals::StopRequests;

/// A server that this process is there for.
pub trait Service: Sized {
    /// Why it does not start, or cannot go on.
    type Error: std::error::Error + Send + Sync + 'static;

    /// How long stopping may take before the process just ends. Nothing acknowledged depends on it.
    const STOP_WITHIN: Duration;

    /// Resolves once it cannot go on.
    fn failed(&self) -> impl Future<Output = Self::Error> + Send;

    /// Stops it.
    fn shutdown(self) -> impl Future<Output = ()> + Send;
}

/// Options of every server.
#[derive(Debug, clap::Args)]
pub struct ServiceArgs {
    #[command(flatten)]
    log: LogArgs,
    /// Stop at the end of standard input, which is the end of the process that started this one
    #[arg(long)]
    exit_with_parent: bool,
}

impl ServiceArgs {
    /// Starts the log, and listens for requests to stop from now on.
    ///
    /// # Errors
    /// The log cannot be written, or the system refuses.
    pub fn begin(&self, dir: &Path) -> Result<StopRequests> {
        logging::start(&self.log, dir)?;
        StopRequests::listen(self.exit_with_parent)
    }

    /// Where the log is, for the line that people are told at the start. `None`: who started this process tells them.
    pub fn log_told(&self, dir: &Path) -> Option<String> {
        match (self.exit_with_parent, self.log.log_stderr) {
            (true, _) => None,
            (false, true) => Some("the log goes to standard error".to_owned()),
            (false, false) => Some(format!("the log is {}", dir.join(logging::FILE_NAME).display())),
        }
    }
}

/// Serves until asked to stop. Once it has started, `told` is a line on standard output, if any: what serves where, and its log.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn serve<S: Service>(
    starting: impl Future<Output = Result<S, S::Error>>,
    mut stop: StopRequests,
    told: impl FnOnce(&S) -> Option<String>,
) -> Result<()> {
    let service = tokio::select! {
        started = starting => started.map_err(logged)?,
        why = stop.next() => {
            tracing::info!(why, "stopped while starting");
            return Ok(());
        }
    };
    if let Some(line) = told(&service)
        && let Err(error) = output::print(&format!("{line}\n"))
    {
        // It serves all the same.
        tracing::warn!(error = %output::told(&error), "the line that says so cannot be printed");
    }
    let failed = tokio::select! {
        error = service.failed() => Some(logged(error)),
        why = stop.next() => {
            tracing::info!(why, "stopping");
            None
        }
    };
    if tokio::time::timeout(S::STOP_WITHIN, service.shutdown()).await.is_err() {
        tracing::warn!("not stopped in order after {} s: ending", S::STOP_WITHIN.as_secs());
    }
    failed.map_or(Ok(()), Err)
}

fn logged(error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Error {
    tracing::error!(%error, "ends");
    anyhow!(error)
}
