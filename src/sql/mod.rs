//! `lake sql`: the shell, on a cluster that runs already.

use anyhow::Result;
use lake_chaos::Role;

use crate::console::Console;
use crate::endpoints::At;
use crate::shell::{Ended, Shell, ShellArgs};
use crate::signals::Interrupts;

/// Options of `lake sql`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    shell: ShellArgs,
}

/// Runs statements, or a prompt.
///
/// # Errors
/// No query node can be reached, or what is to be run cannot be read.
pub async fn run(args: Args) -> Result<Ended> {
    let mut interrupts = Interrupts::listen()?;
    let endpoints = args.at.endpoints(Role::Query)?;
    let secret = args.at.secret()?;
    let mut shell = tokio::select! {
        shell = Shell::connect(endpoints, secret, args.shell.format) => shell?,
        () = interrupts.next() => return Ok(Ended::Interrupted),
    };
    shell.run(&args.shell, &Console::default(), &mut interrupts).await
}
