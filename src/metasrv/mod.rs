//! `lake metasrv`: one peer of the metadata cluster, as it runs on a server.

use std::time::Duration;

use anyhow::Result;
use lake_metasrv::config::{Config, Options};
use lake_metasrv::error::Error;
use lake_metasrv::server::Server;

use crate::service::{self, Service, ServiceArgs};

/// Options of `lake metasrv`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    service: ServiceArgs,
}

impl Service for Server {
    type Error = Error;

    const STOP_WITHIN: Duration = Duration::from_secs(8);

    fn failed(&self) -> impl Future<Output = Error> + Send {
        Server::failed(self)
    }

    async fn shutdown(self) {
        Server::shutdown(self).await;
    }
}

/// Serves until asked to stop.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(args: Args) -> Result<()> {
    let config = Config::load(args.options)?;
    let stop = args.service.begin(&config.dir)?;
    service::serve(Server::start(config), stop).await
}
