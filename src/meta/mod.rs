//! `lake meta`: the operator's tool for the metadata cluster.
//!
//! [`snapshot`]: saving and restoring; [`offline`] with [`listing`], [`recover`]: directories of stopped peers; [`summary`]: how
//! a state is told.

mod listing;
mod offline;
mod recover;
mod snapshot;
mod summary;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::join_all;
use lake_chaos::{Role, probe};
use lake_client::remote::admin;
use lake_client::secret::Secret;
use lake_proto::v1::status_response::Stage;
use lake_proto::v1::{Member, StatusResponse};
use serde_json::json;

use crate::columns::columns;
use crate::endpoints::At;

/// How long a peer may take to say what it knows.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long founding may take.
const INIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Options of `lake meta`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    at: At,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// What each peer knows; exit code 1 if none leads
    Status {
        /// How it is printed
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Found a cluster of the fresh peers named by --at; safe to repeat
    Init,
    /// Save the state of the cluster in a file, look into one, or make a new cluster from it
    #[command(subcommand)]
    Snapshot(snapshot::Command),
    /// What the directory of a stopped peer holds
    Inspect(offline::Inspect),
    /// Whether the directory of a stopped peer is as it was written; exit code 1 if it is damaged
    Verify(offline::Verify),
    /// When a majority of the voters is lost for good: a new cluster from those that survived. Acknowledged writes may be
    /// lost: read the page on it first
    Recover(recover::Args),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
}

/// What a peer answered, or why it did not.
struct Answer {
    endpoint: String,
    status: Result<StatusResponse, String>,
}

/// Does what was asked. Gives the exit code.
///
/// # Errors
/// No endpoint is known, or the founding is refused.
pub async fn run(args: Args) -> Result<u8> {
    let at = args.at;
    let online = || Ok::<_, anyhow::Error>((at.endpoints(Role::Metasrv)?, at.secret()?));
    match args.command {
        Command::Status { format } => {
            let (endpoints, secret) = online()?;
            let answers = ask_all(endpoints, secret.as_ref()).await;
            let statuses: Vec<StatusResponse> = answers.iter().filter_map(|a| a.status.clone().ok()).collect();
            let leader = probe::leader(&statuses).and_then(|l| l.self_.as_ref()).map(|m| m.id);
            match format {
                Format::Table => print!("{}", table(&answers, leader)),
                Format::Json => println!("{}", serde_json::to_string_pretty(&as_json(&answers, leader))?),
            }
            Ok(u8::from(leader.is_none()))
        }
        Command::Init => {
            let (endpoints, secret) = online()?;
            init(endpoints, secret.as_ref()).await.map(|()| 0)
        }
        Command::Snapshot(command) => snapshot::run(command, &at).await,
        Command::Inspect(args) => offline::inspect(args).await,
        Command::Verify(args) => offline::verify(args).await,
        Command::Recover(args) => recover::run(args).await,
    }
}

/// Asks the peers named, and then those that they name.
async fn ask_all(endpoints: Vec<String>, secret: Option<&Secret>) -> Vec<Answer> {
    let mut answers = ask(endpoints, secret).await;
    let mut named: Vec<String> = Vec::new();
    for member in answers.iter().filter_map(|a| a.status.as_ref().ok()).flat_map(|s| s.voters.iter().chain(&s.learners))
    {
        let answered = answers.iter().any(|a| id(a) == Some(member.id) || a.endpoint == member.grpc_address);
        if !answered && !named.contains(&member.grpc_address) {
            named.push(member.grpc_address.clone());
        }
    }
    answers.extend(ask(named, secret).await);
    answers.sort_by_key(|a| (id(a).is_none(), id(a)));
    answers
}

async fn ask(endpoints: Vec<String>, secret: Option<&Secret>) -> Vec<Answer> {
    join_all(endpoints.into_iter().map(|endpoint| async {
        let status = admin::peer_status(&endpoint, secret, STATUS_TIMEOUT).await.map_err(|e| e.to_string());
        Answer { endpoint, status }
    }))
    .await
}

fn id(answer: &Answer) -> Option<u64> {
    answer.status.as_ref().ok().and_then(|s| s.self_.as_ref()).map(|m| m.id)
}

/// What a peer is, in the field's words.
fn role(status: &StatusResponse, leader: Option<u64>) -> &'static str {
    let own = status.self_.as_ref().map(|m| m.id);
    let among = |members: &[Member]| members.iter().any(|m| Some(m.id) == own);
    match status.stage() {
        Stage::Fresh => "fresh",
        Stage::Recovering => "recovering",
        Stage::Stopped => "stopped",
        Stage::Member | Stage::Unspecified if own.is_some() && own == leader => "leader",
        Stage::Member | Stage::Unspecified if among(&status.voters) => "follower",
        Stage::Member | Stage::Unspecified if among(&status.learners) => "learner",
        Stage::Member | Stage::Unspecified => "no member",
    }
}

fn table(answers: &[Answer], leader: Option<u64>) -> String {
    let header =
        ["PEER", "ADDRESS", "ROLE", "TERM", "LAST LOG", "APPLIED", "SNAPSHOT", "PURGED", "REVISION", "KEYS", ""];
    let mut rows = vec![header.map(str::to_owned)];
    for answer in answers {
        rows.push(match &answer.status {
            Ok(s) => [
                id(answer).unwrap_or_default().to_string(),
                answer.endpoint.clone(),
                role(s, leader).to_owned(),
                s.term.to_string(),
                s.last_log_index.to_string(),
                s.applied_index.to_string(),
                s.snapshot_index.to_string(),
                s.purged_index.to_string(),
                s.revision.to_string(),
                s.keys.to_string(),
                s.problem.clone(),
            ],
            Err(why) => {
                let mut row = ["-"; 11].map(str::to_owned);
                (row[1], row[2], row[10]) = (answer.endpoint.clone(), "unreachable".to_owned(), why.clone());
                row
            }
        });
    }
    let clusters: Vec<&str> =
        answers.iter().filter_map(|a| a.status.as_ref().ok()).map(|s| s.cluster_id.as_str()).collect();
    let unknown = if clusters.is_empty() { "unknown: no peer answers" } else { "not founded yet" };
    let cluster = clusters.iter().find(|id| !id.is_empty()).unwrap_or(&unknown);
    format!("cluster {cluster}\n{}", columns(rows))
}

fn as_json(answers: &[Answer], leader: Option<u64>) -> serde_json::Value {
    let peers = answers.iter().map(|answer| match &answer.status {
        Ok(s) => json!({
            "id": id(answer),
            "address": answer.endpoint,
            "role": role(s, leader),
            "cluster_id": s.cluster_id,
            "term": s.term,
            "last_log_index": s.last_log_index,
            "applied_index": s.applied_index,
            "snapshot_index": s.snapshot_index,
            "purged_index": s.purged_index,
            "revision": s.revision,
            "keys": s.keys,
            "problem": s.problem,
            "version": s.version,
        }),
        Err(why) => json!({ "address": answer.endpoint, "role": "unreachable", "problem": why }),
    });
    serde_json::Value::Array(peers.collect())
}

async fn init(endpoints: Vec<String>, secret: Option<&Secret>) -> Result<()> {
    let answers = ask(endpoints, secret).await;
    let mut founders: Vec<Member> = Vec::new();
    for answer in &answers {
        match &answer.status {
            Ok(StatusResponse { self_: Some(member), .. }) => founders.push(member.clone()),
            Ok(_) => bail!("{} does not say who it is", answer.endpoint),
            Err(why) => bail!("every founder has to answer: {why}"),
        }
    }
    let at = answers.first().context("no founder is named")?;
    let founded = admin::init(&at.endpoint, founders, secret, INIT_TIMEOUT).await?;
    match founded.founded {
        true => eprintln!("founded the cluster {} of {} peers", founded.cluster_id, answers.len()),
        false => eprintln!("the cluster {} was founded before, of the same peers", founded.cluster_id),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_who_leads_and_who_is_away() {
        let member = Member { id: 2, ..Member::default() };
        let status = StatusResponse {
            self_: Some(member.clone()),
            cluster_id: "c1".into(),
            stage: Stage::Member as i32,
            term: 7,
            voters: vec![member],
            ..StatusResponse::default()
        };
        let answers = [
            Answer { endpoint: "a:1".into(), status: Ok(status.clone()) },
            Answer { endpoint: "b:1".into(), status: Err("no answer".into()) },
        ];
        let text = table(&answers, Some(2));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "cluster c1");
        assert!(lines[2].starts_with("2     a:1      leader       7"), "{text}");
        assert!(lines[3].contains("unreachable") && lines[3].ends_with("no answer"), "{text}");
        assert_eq!(role(&status, Some(1)), "follower");
        assert_eq!(as_json(&answers, Some(2))[1]["role"], "unreachable");
    }
}
