//! `lake meta init`: founds a cluster.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use lake_client::remote::admin;
use lake_proto::v1::{Member, StatusResponse};
use serde_json::json;

use super::cluster::Cluster;
use super::output::FormatArgs;
use super::peers;

/// How long founding may take unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Options of `lake meta init`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  lake meta init --at 10.0.0.1:9191,10.0.0.2:9191,10.0.0.3:9191")]
pub struct Args {
    #[command(flatten)]
    format: FormatArgs,
}

/// Founds a cluster of the peers that are named, all of which have to answer.
///
/// # Errors
/// One does not answer, or refuses.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let secret = cluster.secret()?;
    let answers = peers::ask(cluster.endpoints()?, secret.as_ref()).await;
    let mut founders: Vec<Member> = Vec::new();
    for answer in &answers {
        match &answer.status {
            Ok(StatusResponse { self_: Some(member), .. }) => founders.push(member.clone()),
            Ok(_) => bail!("{} does not say who it is", answer.endpoint),
            Err(why) => bail!("every founder has to answer: {why}"),
        }
    }
    let at = answers.first().context("no founder is named")?;
    let timeout = cluster.timeout_or(TIMEOUT);
    let founded = admin::init(&at.endpoint, founders, secret.as_ref(), timeout).await?;
    let peers = answers.len();
    let text = match founded.founded {
        true => format!("founded the cluster {} of {peers} peers\n", founded.cluster_id),
        false => format!("the cluster {} was founded before, of the same peers\n", founded.cluster_id),
    };
    args.format.print(|| text, || json!({ "cluster_id": founded.cluster_id, "founded": founded.founded }))?;
    Ok(0)
}
