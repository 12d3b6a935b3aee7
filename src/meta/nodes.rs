//! `lake meta nodes`: the query nodes, as the leader knows them.

use std::time::Duration;

use anyhow::Result;
use lake_client::drains;
use lake_client::nodes::{NodeState, NodeStatus};
use serde_json::{Value, json};

use super::EXIT_NO;
use super::cluster::Cluster;
use super::output::{FormatArgs, escaped, or_dash, size};
use crate::columns::columns;

/// Options of `lake meta nodes`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A node is `up` while its lease lives and its stream to the leader is open, `silent` while only its lease lives (for a few seconds
after a change of the leader, or when it is cut off), and `down` once its lease has ended. What a node does is told by its last
heartbeat; `-` where this leader has not had one. A node that is drained (`lake meta shards drain`) is said to be.

Exit codes: 0 every node is up or silent, 3 one is down.

Example:
  lake meta nodes")]
pub struct Args {
    #[command(flatten)]
    format: FormatArgs,
}

/// Does what was asked.
///
/// # Errors
/// As every call.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let (store, deadline) = (cluster.store()?, cluster.deadline());
    let read = store.nodes(deadline).await?;
    let drained = drains::list(&store, deadline).await?;
    let nodes = || read.value.iter().map(|node| node_json(node, &drained)).collect::<Value>();
    args.format.print(
        || table(&read.value, &drained),
        || json!({ "revision": read.revision, "nodes": nodes(), "drained": drained }),
    )?;
    Ok(if read.value.iter().any(|node| node.state() == NodeState::Down) { EXIT_NO } else { 0 })
}

fn table(nodes: &[NodeStatus], drained: &[String]) -> String {
    let heading = ["NODE", "STATE", "ROLES", "FLIGHT", "EPOCH", "LEASE LEFT", "HEARD", "STATEMENTS", "CPU", "CACHE"];
    let mut rows = vec![heading.map(str::to_owned)];
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    rows.extend(nodes.iter().map(|node| {
        let load = node.load.as_ref();
        [
            escaped(&node.node),
            format!("{}{}", node.state().as_str(), if drained.contains(&node.node) { ", drained" } else { "" }),
            escaped(&node.info.roles.join(",")),
            escaped(&node.info.flight_address),
            node.epoch.to_string(),
            or_dash(node.remaining.map(seconds)),
            or_dash(node.silent.map(|silent| format!("{} ago", seconds(silent)))),
            or_dash(load.map(|load| format!("{}/{}", load.running_statements, node.info.max_statements))),
            or_dash(load.map(|load| format!("{:.2}", f64::from(load.cpu_millicores) / 1000.0))),
            or_dash(load.map(|load| size(load.cache_bytes))),
        ]
    }));
    let mut text = columns(rows);
    let gone: Vec<String> =
        drained.iter().filter(|name| nodes.iter().all(|node| node.node != **name)).map(|name| escaped(name)).collect();
    if !gone.is_empty() {
        text.push_str(&format!("Drained, and not registered: {}\n", gone.join(", ")));
    }
    text
}

fn node_json(node: &NodeStatus, drained: &[String]) -> Value {
    let load = node.load.as_ref();
    json!({
        "node": node.node,
        "state": node.state().as_str(),
        "drained": drained.contains(&node.node),
        "process": node.process,
        "epoch": node.epoch,
        "lease": node.lease,
        "lease_left_ms": node.remaining.map(millis),
        "silent_ms": node.silent.map(millis),
        "connected": node.connected,
        "roles": node.info.roles,
        "flight_address": node.info.flight_address,
        "rest_address": node.info.rest_address,
        "version": node.info.version,
        "cores": load.map(|_| node.info.cores),
        "memory_bytes": load.map(|_| node.info.memory_bytes),
        "max_statements": load.map(|_| node.info.max_statements),
        "running_statements": load.map(|load| load.running_statements),
        "cpu_millicores": load.map(|load| load.cpu_millicores),
        "cache_bytes": load.map(|load| load.cache_bytes),
        "observed_revision": load.map(|load| load.observed_revision),
        "procedures": load.map(|load| &load.procedures),
    })
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}
