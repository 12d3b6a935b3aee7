//! `lake chaos`: fault runs, and their verdicts.

mod run;

use anyhow::Result;

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
}

/// Gives the exit code: 0 valid, 1 violation, 2 unknown, 3 the harness's own error.
pub async fn run(args: Args) -> Result<u8> {
    let done = match args.command {
        Command::Run(args) => run::run(*args).await,
    };
    Ok(done.unwrap_or_else(|error| {
        eprintln!("lake: {error:#}");
        lake_chaos::check::HARNESS_ERROR
    }))
}
