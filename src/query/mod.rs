//! `lake query`: one query node, as it runs on a server.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_query::{Config, Error, Options, QueryNode};

use crate::service::{self, Service, ServiceArgs};

/// Options of `lake query`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    service: ServiceArgs,
}

impl Service for QueryNode {
    type Error = Error;

    /// Longer than the node's own patience, twice, and what it takes to leave the cluster.
    const STOP_WITHIN: Duration = Duration::from_secs(25);

    async fn failed(&self) -> Error {
        QueryNode::failed(self).await
    }

    async fn shutdown(self) {
        QueryNode::shutdown(self).await;
    }
}

/// Serves until asked to stop.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(args: Args) -> Result<()> {
    let config = Config::new(args.options)?;
    let stop = args.service.begin(&config.dir)?;
    if config.meta.is_empty() {
        bail!("meta: say where the metadata peers are, as --meta host:port,host:port");
    }
    let remote = RemoteConfig { endpoints: config.meta.clone(), secret: config.secret.clone() };
    let store = RemoteStore::connect(remote).context("meta")?;
    service::serve(QueryNode::start_in_cluster(config, store), stop).await
}
