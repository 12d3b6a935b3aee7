//! `lake chaos heal`: takes back whatever a run on an operator's own cluster has done, also if that run has died.

use std::path::PathBuf;

use anyhow::{Context, Result};
use lake_chaos::check::HARNESS_ERROR;
use lake_chaos::hosts::Hosts;
use lake_chaos::run::hosts;

use crate::output;

/// Options of `lake chaos heal`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file that says where the cluster is, and how things are done to it: that of --cluster hosts:FILE
    file: PathBuf,
    /// The cluster's id, as `lake meta status` says it: another one is left alone
    #[arg(long, value_name = "ID")]
    cluster_id: String,
    /// Where commands.log is kept
    #[arg(long, default_value = ".", value_name = "DIR")]
    out: PathBuf,
}

/// Heals, resumes and starts every process, waits until all of them serve, and removes what runs have written. Query nodes of which nobody knows
/// that they are that cluster's are left alone, and told of. Gives 0 if all of that was done.
///
/// # Errors
/// The file is wrong, or it is another cluster: nothing was done.
pub async fn run(args: &Args) -> Result<u8> {
    let file = Hosts::read(&args.file)?;
    let out = std::path::absolute(&args.out).context("finding out where commands.log is kept")?;
    let front = super::run::front(file.secret()?);
    let wrong = hosts::mend(&file, &args.cluster_id, front.as_ref(), &out).await?;
    for wrong in &wrong {
        eprintln!("lake: {wrong}");
    }
    if wrong.is_empty() {
        output::print("every process serves, and nothing of a run is left\n")?;
    }
    Ok(if wrong.is_empty() { 0 } else { HARNESS_ERROR })
}
