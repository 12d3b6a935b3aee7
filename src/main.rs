//! `lake`: a lakehouse whose metadata lives in its own Raft group. One binary; each command is a module:
//!
//! - [`up`], [`standalone`]: a cluster on this machine, for trying it out ([`local`]: what they share);
//! - [`metasrv`], [`query`]: the parts, as they run on servers ([`service`]: what they share); [`janitor`]: upkeep without a metadata
//!   cluster;
//! - [`sql`]: the shell; [`meta`]: the operator's tool; [`bench`]: the load generators behind the figures in docs/;
//!   [`chaos`]: fault runs, and what judges them;
//! - [`shell`], [`console`], [`columns`], [`endpoints`], [`logging`], [`output`], [`place`], [`signals`]: what the commands are made of.
//!
//! Without the feature `query` only the commands of the metadata cluster are there, and a few helpers have no user.
#![cfg_attr(not(feature = "query"), allow(dead_code))]

mod bench;
mod chaos;
mod columns;
#[cfg(feature = "query")]
mod console;
mod endpoints;
#[cfg(feature = "query")]
mod janitor;
#[cfg(feature = "query")]
mod local;
mod logging;
mod meta;
mod metasrv;
mod output;
mod place;
#[cfg(feature = "query")]
mod query;
mod service;
#[cfg(feature = "query")]
mod shell;
mod signals;
#[cfg(feature = "query")]
mod sql;
#[cfg(feature = "query")]
mod standalone;
#[cfg(feature = "query")]
mod up;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Small allocations that come on one thread and go on another are most of what a metasrv peer does between two syncs:
/// docs/, "Measuring", has what this saves.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long threads that are still busy may take when everything else has ended.
const RUNTIME_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Plans of large statements recurse deeply.
const THREAD_STACK_BYTES: usize = 32 << 20;

/// A lakehouse whose metadata lives in its own Raft group
#[derive(Debug, Parser)]
#[command(name = "lake", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A whole cluster on this machine, with sample tables and an SQL prompt
    #[cfg(feature = "query")]
    Up(Box<up::Args>),
    /// The same in one process
    #[cfg(feature = "query")]
    Standalone(Box<standalone::Args>),
    /// A peer of the metadata cluster
    Metasrv(Box<metasrv::Args>),
    /// A query node
    #[cfg(feature = "query")]
    Query(Box<query::Args>),
    /// Upkeep of tables whose metadata is in no cluster of lake's
    #[cfg(feature = "query")]
    Janitor(Box<janitor::Args>),
    /// The SQL shell
    #[cfg(feature = "query")]
    Sql(sql::Args),
    /// Look into the metadata cluster, and operate it
    Meta(meta::Args),
    /// Load generators
    Bench(bench::Args),
    /// Fault runs with a verdict, and histories judged
    Chaos(chaos::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    match start(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lake: {}", output::told(&error));
            ExitCode::FAILURE
        }
    }
}

/// Prints help, or what is wrong with the arguments. To `lake chaos` 2 is a verdict, which wrong arguments are not.
fn refused(error: &clap::Error) -> ExitCode {
    // Where nothing can be printed, the exit code is all there is.
    let _ = error.print();
    let chaos = std::env::args().nth(1).is_some_and(|command| command == "chaos");
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if chaos => ExitCode::from(lake_chaos::check::HARNESS_ERROR),
        _ => ExitCode::from(2),
    }
}

fn start(command: Command) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
        .context("starting the threads of this process")?;
    let result = runtime.block_on(run(command));
    runtime.shutdown_timeout(RUNTIME_STOP_TIMEOUT);
    result
}

async fn run(command: Command) -> Result<u8> {
    match command {
        #[cfg(feature = "query")]
        Command::Up(args) => up::run(*args).await,
        #[cfg(feature = "query")]
        Command::Standalone(args) => standalone::run(*args).await,
        Command::Metasrv(args) => metasrv::run(*args).await.map(|()| 0),
        #[cfg(feature = "query")]
        Command::Query(args) => query::run(*args).await.map(|()| 0),
        #[cfg(feature = "query")]
        Command::Janitor(args) => janitor::run(*args).await.map(|()| 0),
        #[cfg(feature = "query")]
        Command::Sql(args) => sql::run(args).await.map(local::exit_code),
        Command::Meta(args) => meta::run(args).await,
        Command::Bench(args) => bench::run(args).await.map(|()| 0),
        Command::Chaos(args) => Ok(chaos::run(args).await),
    }
}
