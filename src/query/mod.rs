//! `lake query`: one query node, as it runs on a server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::SharedStore;
use lake_query::{Config, Error, Options, QueryNode};

use crate::output::told;
use crate::place::Place;
use crate::service::{self, Service, ServiceArgs};

/// How long a metadata store is tried that is not a cluster.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

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

/// Starts a node over the metadata that is at a place, with the node's own settings for a bucket.
///
/// # Errors
/// That is wrong or cannot be reached; as [`QueryNode::start`].
pub async fn over(config: Config, place: Place) -> Result<QueryNode, Error> {
    let store = store_at(&config, place).await?;
    QueryNode::start(config, store).await
}

/// The store at a place, with the node's own settings for a bucket.
///
/// # Errors
/// That is wrong or cannot be reached.
pub async fn store_at(config: &Config, place: Place) -> Result<SharedStore, Error> {
    let invalid = |e: String| Error::invalid(format!("meta: {e}"));
    let store: SharedStore = match &place {
        #[cfg(feature = "store-object")]
        Place::Bucket { bucket, root } => {
            let settings = lake_query::storage::s3_settings(&config.s3);
            let by = std::time::Instant::now() + OPEN_WITHIN;
            let store = lake_client::object::ObjectMetaStore::s3_as(settings, bucket, root, by).await;
            Arc::new(store.map_err(|e| invalid(e.to_string()))?)
        }
        place => place.open(config.secret.clone(), OPEN_WITHIN).await.map_err(|e| invalid(told(&e)))?,
    };
    Ok(store)
}

/// Serves until asked to stop.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(args: Args) -> Result<()> {
    let mut config = Config::new(args.options)?;
    let stop = args.service.begin(&config.dir)?;
    let log = args.service.log_told(&config.dir);
    let line = |node: &QueryNode| log.map(|log| started(node, &log));
    if config.meta.is_empty() {
        bail!("meta: say where the metadata peers are, as --meta host:port,host:port");
    }
    match Place::of_list(&config.meta).map_err(|e| anyhow!("meta: {e}"))? {
        Place::Cluster(endpoints) => config.meta = endpoints,
        place => return service::serve(over(config, place), stop, line).await,
    }
    let remote = RemoteConfig { endpoints: config.meta.clone(), secret: config.secret.clone() };
    let store = RemoteStore::connect(remote).context("meta")?;
    service::serve(QueryNode::start_in_cluster(config, store), stop, line).await
}

/// Who serves where.
fn started(node: &QueryNode, log: &str) -> String {
    let also = [("REST", node.rest_address()), ("probes", node.http_address())];
    let also = also.into_iter().filter_map(|(what, address)| Some(format!(", {what} at {}", address?)));
    format!("lake query: SQL at {}{}; {log}", node.flight_address(), also.collect::<String>())
}
