//! `lake sql`: the shell, on a cluster that runs already, or on tables whose metadata needs no process (`--meta`).

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use lake_chaos::Role;
use lake_client::secret::Secret;
use lake_query::{Config, Options, QueryNode};

use crate::console::Console;
use crate::endpoints::At;
use crate::place::{PLACES, Place};
use crate::query;
use crate::shell::{Ended, Shell, ShellArgs};
use crate::signals::Interrupts;

/// Options of `lake sql`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    at: At,
    /// No query node: read and write tables here, whose metadata is at file:///DIR, s3://BUCKET/PREFIX or etcd://HOST:PORT,.../ROOT
    #[arg(long, value_name = "STORE", requires = "warehouse", conflicts_with = "at")]
    meta: Option<String>,
    /// With --meta: where the tables are, file:///dir or s3://bucket/prefix; settings of S3 from AWS_* variables
    #[arg(long, value_name = "URI", requires = "meta")]
    warehouse: Option<String>,
    #[command(flatten)]
    shell: ShellArgs,
}

/// Runs statements, or a prompt.
///
/// # Errors
/// No query node can be reached, or none can be run here, or what is to be run cannot be read.
pub async fn run(args: Args) -> Result<Ended> {
    let mut interrupts = Interrupts::listen()?;
    if let Some(meta) = args.meta {
        return in_this_process(meta, args.warehouse, &args.shell, &mut interrupts).await;
    }
    let endpoints = args.at.endpoints(Role::Query)?;
    let secret = args.at.secret()?;
    let mut shell = tokio::select! {
        shell = Shell::connect(endpoints, secret, args.shell.format) => shell?,
        () = interrupts.next() => return Ok(Ended::Interrupted),
    };
    shell.run(&args.shell, &Console::default(), &mut interrupts).await
}

/// Spill files of this process; removed with it.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays is the operating system's to remove.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The same with a query node of its own, on a port of this machine and with a secret that nobody else knows.
async fn in_this_process(
    meta: String,
    warehouse: Option<String>,
    args: &ShellArgs,
    interrupts: &mut Interrupts,
) -> Result<Ended> {
    let scratch = Scratch(std::env::temp_dir().join(format!("lake-sql-{}", std::process::id())));
    let place = match Place::of_list(&[meta]).map_err(|e| anyhow!("meta: {e}"))? {
        Place::Cluster(_) => bail!("meta: a cluster has query nodes, which are reached with --at; {PLACES}"),
        place => place,
    };
    let options = Options {
        dir: Some(scratch.0.clone()),
        listen: Some("127.0.0.1:0".to_owned()),
        warehouse,
        s3_endpoint: std::env::var("AWS_ENDPOINT_URL").ok(),
        ..Options::default()
    };
    let mut config = Config::new(options)?;
    let secret = Secret::new(format!("{:032x}", rand::random::<u128>())).map_err(anyhow::Error::msg)?;
    config.secret = Some(secret.clone());
    let node: QueryNode = tokio::select! {
        node = query::over(config, place) => node.context("running a query node in this process")?,
        () = interrupts.next() => return Ok(Ended::Interrupted),
    };
    let endpoint = node.flight_address().to_string();
    let outcome = async {
        let mut shell = Shell::connect(vec![endpoint], Some(secret), args.format).await?;
        shell.run(args, &Console::default(), interrupts).await
    };
    let outcome = outcome.await;
    node.shutdown().await;
    drop(scratch);
    outcome
}
