//! `lake chaos`: does the metadata cluster keep its promises while it is being hurt?
//!
//! - [`run`]: a fault run from beginning to verdict; [`matrix`]: several, one after the other;
//! - [`check`]: judges a history, wherever it comes from; [`report`]: judges a run anew and makes its page again;
//! - [`heal`]: takes back what a run on an operator's own cluster has done;
//! - [`sim`] (feature `sim`): simulations of the whole cluster, decided by seeds;
//! - [`front`] (feature `query`): the client of query nodes that runs use;
//! - [`print`]: verdicts and findings for the terminal.
//!
//! Exit codes of all of them: 0 valid, 1 violation, 2 unknown, 3 the command itself went wrong.

mod check;
#[cfg(feature = "query")]
mod front;
mod heal;
mod matrix;
mod print;
mod report;
mod run;
#[cfg(feature = "sim")]
mod sim;

use anyhow::Result;
use lake_chaos::check::HARNESS_ERROR;

use crate::output;

/// Options of `lake chaos`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Start a cluster, have clients at it, hurt it, and judge what the clients saw
    Run(Box<run::Args>),
    /// Run one workload after the other under the faults that tell most of it, and sum up what came of each
    Matrix(matrix::Args),
    /// Take back whatever a run on hosts:FILE has done, and remove what it has written
    Heal(heal::Args),
    /// Judge a history: of a run, or of another tool in Jepsen's format
    Check(check::Args),
    /// Judge a run again, and make its page again
    Report(report::Args),
    /// Simulate peers, clients, network, disks and time in one process, decided by a seed
    #[cfg(feature = "sim")]
    Sim(Box<sim::Args>),
}

/// Does what was asked. Gives the exit code; what goes wrong is printed, so that it cannot be taken for a verdict.
pub async fn run(args: Args) -> u8 {
    let done: Result<u8> = match args.command {
        Command::Run(args) => run::run(*args).await,
        Command::Matrix(args) => matrix::run(&args).await,
        Command::Heal(args) => heal::run(&args).await,
        Command::Check(args) => check::run(&args),
        Command::Report(args) => report::run(&args),
        #[cfg(feature = "sim")]
        Command::Sim(args) => sim::run(*args).await,
    };
    done.unwrap_or_else(|error| {
        eprintln!("lake: {}", output::told(&error));
        HARNESS_ERROR
    })
}
