//! `lake up`: a whole cluster on this machine, with sample tables and a prompt.
//!
//! Peers and query nodes are child processes; `lake_chaos::cluster` starts, watches and stops them. However this
//! process ends, they end too.

use anyhow::{Context, Result};
use lake_chaos::{Cluster, Event, Role, Spec};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::console::Console;
use crate::local::LocalArgs;
use crate::logging;
use crate::output::counted;
use crate::signals::{EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupts, Termination};

/// Options of `lake up`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many metadata peers [default: 3, or as many as the directory holds]
    #[arg(long, value_name = "N")]
    peers: Option<u64>,
    /// How many query nodes
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    query_nodes: u64,
    #[command(flatten)]
    local: LocalArgs,
}

/// Runs the cluster until the user has had enough of it. Gives the exit code.
///
/// # Errors
/// The directory is in use, a process does not come up, the sample cannot be loaded.
pub async fn run(args: Args) -> Result<u8> {
    let mut interrupts = Interrupts::listen()?;
    let mut termination = Termination::listen()?;
    let console = Console::default();
    let binary = std::env::current_exe().context("finding out which program this is")?;
    let spec = Spec {
        peers: args.peers,
        query_nodes: args.query_nodes,
        log_level: Some(args.local.log.log_level.clone()),
        ..Spec::new(binary, &args.local.dir)
    };
    let cluster = tokio::select! {
        opened = Cluster::open(spec) => opened?,
        () = interrupts.next() => return Ok(EXIT_INTERRUPTED),
        () = termination.next() => return Ok(EXIT_TERMINATED),
    };
    logging::start(&args.local.log, cluster.dir())?;
    let reporting = tokio::spawn(report(cluster.events(), console.clone()));
    let outcome = tokio::select! {
        outcome = session(&cluster, &args.local, &console, &mut interrupts) => outcome,
        () = termination.next() => Ok(if args.local.no_shell { 0 } else { EXIT_TERMINATED }),
    };
    let progress = console.progress();
    progress.step("stopping the cluster");
    cluster.shutdown().await;
    drop(progress);
    reporting.abort();
    outcome
}

async fn session(cluster: &Cluster, args: &LocalArgs, console: &Console, interrupts: &mut Interrupts) -> Result<u8> {
    let start = async {
        let progress = console.progress();
        let count = |role| cluster.endpoints(role).len();
        progress.step(format!(
            "starting {} and {} in {}",
            counted(count(Role::Metasrv), "metadata peer"),
            counted(count(Role::Query), "query node"),
            cluster.dir().display()
        ));
        cluster.start_all().await
    };
    tokio::select! {
        started = start => started?,
        () = interrupts.next() => return Ok(EXIT_INTERRUPTED),
    }
    args.serve(|| cluster.entries(), cluster.endpoints(Role::Query), console, interrupts).await
}

/// Tells the user of what happens by itself.
async fn report(mut events: broadcast::Receiver<Event>, console: Console) {
    loop {
        match events.recv().await {
            Ok(Event::Started { restart: false, .. }) => {}
            Ok(event) => console.say(event.to_string()),
            Err(RecvError::Lagged(missed)) => console.say(format!("{missed} more events, see lake.log")),
            Err(RecvError::Closed) => return,
        }
    }
}
