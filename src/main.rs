//! `lake`: a lakehouse whose metadata lives in its own Raft group. One binary; each command is a module:
//!
//! - [`up`], [`standalone`]: a cluster on this machine, for trying it out ([`local`]: what they share);
//! - [`metasrv`], [`query`]: the parts, as they run on servers;
//! - [`sql`]: the shell; [`meta`]: the operator's tool;
//! - [`shell`], [`console`], [`endpoints`], [`logging`], [`signals`]: what the commands are made of.

mod console;
mod endpoints;
mod local;
mod logging;
mod meta;
mod metasrv;
mod query;
mod shell;
mod signals;
mod sql;
mod standalone;
mod up;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

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
    Up(Box<up::Args>),
    /// The same in one process
    Standalone(Box<standalone::Args>),
    /// A peer of the metadata cluster
    Metasrv(Box<metasrv::Args>),
    /// A query node
    Query(Box<query::Args>),
    /// The SQL shell
    Sql(sql::Args),
    /// Look at the metadata cluster, or found one
    Meta(meta::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match start(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lake: {error:#}");
            ExitCode::FAILURE
        }
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
        Command::Up(args) => up::run(*args).await,
        Command::Standalone(args) => standalone::run(*args).await,
        Command::Metasrv(args) => metasrv::run(*args).await.map(|()| 0),
        Command::Query(args) => query::run(*args).await.map(|()| 0),
        Command::Sql(args) => sql::run(args).await.map(local::exit_code),
        Command::Meta(args) => meta::run(args).await,
    }
}
