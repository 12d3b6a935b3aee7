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
    let (log, join) = (args.service.log_told(&config.dir), config.join.join(","));
    service::serve(Server::start(config), stop, |server| log.map(|log| told(server, &join, &log))).await
}

/// Who serves where, and what is to be done if it belongs to no cluster yet; `join`: whom it asks to be taken in.
fn told(server: &Server, join: &str, log: &str) -> String {
    let peer = server.peer();
    let cluster = match (peer.member(), join) {
        (Some(member), _) => format!("of cluster {}", member.cluster_id),
        (None, "") => format!(
            "fresh: found a cluster of all its peers with `lake meta init --at {},...`",
            peer.identity.grpc_address
        ),
        (None, join) => format!("fresh: asks {join} to be taken in"),
    };
    let http = server.http_address().map(|address| format!(", probes at {address}")).unwrap_or_default();
    let (clients, peers) = (server.grpc_address(), server.raft_address());
    format!("lake metasrv: peer {}, {cluster}; clients at {clients}, peers at {peers}{http}; {log}", peer.identity.id)
}
