//! `lake meta members` and `lake meta transfer-leader`: who belongs to the cluster, and who leads it.
//!
//! A fresh peer is named by the address at which it is reached from here: it says itself which id, addresses and incarnation it
//! has. Every change may be asked for again; one that was made before is answered as such.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lake_client::remote::{RemoteStore, admin};
use lake_client::store::{Applied, Error};
use lake_proto::v1::{Member, PromoteResponse, StatusResponse};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{FormatArgs, escaped, or_dash};
use super::peers::{STATUS_TIMEOUT, ask_all, leader, unanswered};
use super::status::known_lag;
use super::{EXIT_NO, EXIT_UNKNOWN};
use crate::columns::columns;

/// How long a change may take unless told otherwise: a new peer has to get the whole state.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often a learner is asked after again.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// The commands of `lake meta members`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The members, as the leader knows them
    List(ListArgs),
    /// Take in a fresh peer as a learner
    Add(AddArgs),
    /// Make a learner a voter, once it has caught up
    Promote(PromoteArgs),
    /// Take a member out for good
    Remove(RemoveArgs),
    /// Put a fresh peer in the place of a voter
    Replace(ReplaceArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  lake meta members list --format json")]
pub struct ListArgs {
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The peer has an empty data directory and an id that the cluster has never used, and waits: it was started without --join. It
gets the state and the log, and does not vote before it is promoted.

Examples:
  lake metasrv --id 4 --dir /data/lake --listen 10.0.0.4:9191 --raft-listen 10.0.0.4:9192 --secret-file secret &
  lake meta members add 10.0.0.4:9191
  lake meta members add 10.0.0.4:9191 --promote")]
pub struct AddArgs {
    /// Where the fresh peer is reached by clients
    #[arg(value_name = "HOST:PORT")]
    peer: String,
    /// Then make it a voter, as `promote` does
    #[arg(long)]
    promote: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A learner votes once it lacks at most 1,000 entries of the log; it is waited for (--timeout-secs).

Exit codes: 0 it votes, 3 it has not caught up yet, 1 not done.

Example:
  lake meta members promote 4")]
pub struct PromoteArgs {
    /// The learner's id
    id: u64,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Its id is never used again. Removing a voter is refused when the voters that stay and answer would be no majority, since
nothing could be written then; --force does it all the same. The last voter is never removed. The process of the removed peer
ends by itself.

Example:
  lake meta members remove 3")]
pub struct RemoveArgs {
    /// The member's id
    id: u64,
    /// Also when the voters that stay and answer would be no majority
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The fresh peer is taken in, gets the state and the log, and the two are swapped in one change. For a voter whose machine or
data directory is lost; the lost one need not answer.

Example:
  lake meta members replace 3 --by 10.0.0.4:9191")]
pub struct ReplaceArgs {
    /// The voter's id
    id: u64,
    /// Where the fresh peer is reached by clients
    #[arg(long, value_name = "HOST:PORT")]
    by: String,
    #[command(flatten)]
    format: FormatArgs,
}

/// Options of `lake meta transfer-leader`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A leader that is stopped in order does this by itself.

Examples:
  lake meta transfer-leader
  lake meta transfer-leader 2")]
pub struct TransferArgs {
    /// The voter that is to lead [default: the one that has most of the log]
    id: Option<u64>,
    #[command(flatten)]
    format: FormatArgs,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        matches!(self, Self::List(_))
    }
}

/// Does what was asked.
///
/// # Errors
/// As every change of the membership.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::List(args) => list(cluster, args).await,
        Command::Add(args) => add(cluster, args).await,
        Command::Promote(args) => promote(cluster, args).await,
        Command::Remove(args) => remove(cluster, args).await,
        Command::Replace(args) => replace(cluster, args).await,
    }
}

/// Has another voter lead.
///
/// # Errors
/// As every change of the membership.
pub async fn transfer_leader(cluster: &Cluster, args: TransferArgs) -> Result<u8> {
    let answer = cluster.store()?.transfer_leader(args.id, cluster.deadline_or(TIMEOUT)).await?;
    let leader =
        answer.leader.context("it was done, and the answer does not say who leads now: see `lake meta status`")?;
    args.format.print(
        || format!("peer {} at {} leads term {}\n", leader.id, leader.grpc_address, answer.term),
        || json!({ "leader": leader.id, "address": leader.grpc_address, "term": answer.term }),
    )?;
    Ok(0)
}

async fn list(cluster: &Cluster, args: ListArgs) -> Result<u8> {
    let answers = ask_all(cluster.endpoints()?, cluster.secret()?.as_ref()).await;
    let Some(leader) = leader(&answers) else {
        bail!(
            "no peer leads, and only the leader knows who is a member; `lake meta status` shows what each peer knows"
        );
    };
    let members = members(&leader);
    args.format.print(|| table(&members), || json!({ "term": leader.term, "members": as_json(&members) }))?;
    Ok(0)
}

/// A member, and what the leader knows of it.
#[derive(Debug)]
struct Listed {
    member: Member,
    role: &'static str,
    /// Entries of the leader's log that it lacks, and whether it answers. `None` where the leader has not heard of it yet.
    lag_entries: Option<u64>,
    answers: bool,
}

fn members(leader: &StatusResponse) -> Vec<Listed> {
    let own = leader.self_.as_ref().map(|m| m.id);
    let voters = leader.voters.iter().map(|member| (member, if Some(member.id) == own { "leader" } else { "voter" }));
    let learners = leader.learners.iter().map(|member| (member, "learner"));
    let mut members: Vec<Listed> = voters
        .chain(learners)
        .map(|(member, role)| {
            let progress = leader.progress.iter().find(|p| p.id == member.id);
            let (lag_entries, answers) = match progress {
                _ if Some(member.id) == own => (Some(0), true),
                Some(progress) => (known_lag(progress), progress.answers),
                None => (None, false),
            };
            Listed { member: member.clone(), role, lag_entries, answers }
        })
        .collect();
    members.sort_by_key(|listed| listed.member.id);
    members
}

fn table(members: &[Listed]) -> String {
    let mut rows = vec![["PEER", "ROLE", "CLIENTS", "PEERS", "LAG", "ANSWERS", "INCARNATION"].map(str::to_owned)];
    rows.extend(members.iter().map(|listed| {
        [
            listed.member.id.to_string(),
            listed.role.to_owned(),
            escaped(&listed.member.grpc_address),
            escaped(&listed.member.raft_address),
            or_dash(listed.lag_entries),
            if listed.answers { "yes" } else { "no" }.to_owned(),
            escaped(&listed.member.incarnation),
        ]
    }));
    columns(rows)
}

fn as_json(members: &[Listed]) -> Value {
    let member = |listed: &Listed| {
        json!({
            "id": listed.member.id,
            "role": listed.role,
            "grpc_address": listed.member.grpc_address,
            "raft_address": listed.member.raft_address,
            "incarnation": listed.member.incarnation,
            "lag_entries": listed.lag_entries,
            "answers": listed.answers,
        })
    };
    members.iter().map(member).collect()
}

/// What a fresh peer says of itself.
async fn fresh(cluster: &Cluster, endpoint: &str) -> Result<Member> {
    let status = match admin::peer_status(endpoint, cluster.secret()?.as_ref(), STATUS_TIMEOUT).await {
        Ok(status) => status,
        // Nothing else is refused of this question.
        Err(Error::Refused { message, .. }) => bail!(
            "{endpoint}: {message}. That peer was started with another secret than this command was given, or either of them \
             with none: start it with the cluster's own (--secret-file), then ask again; nothing was changed"
        ),
        Err(error) => bail!("{}; start the peer, then ask again", unanswered(endpoint, error)),
    };
    status.self_.with_context(|| format!("{endpoint} does not say who it is"))
}

async fn add(cluster: &Cluster, args: AddArgs) -> Result<u8> {
    let (store, deadline) = (cluster.store()?, cluster.deadline_or(TIMEOUT));
    let member = fresh(cluster, &args.peer).await?;
    let id = member.id;
    let joined = store.join(member, deadline).await?.joined;
    let promoted = match args.promote {
        true => Some(until_promoted(&store, id, deadline).await),
        false => None,
    };
    args.format.print(
        || {
            let joined = if joined { "is taken in as a learner" } else { "was a member before" };
            let promoted = promoted.as_ref().and_then(|p| p.as_ref().ok()).map(|promoted| promotion(id, promoted));
            format!("peer {id} {joined}\n{}", promoted.unwrap_or_default())
        },
        || {
            let voter = promoted.as_ref().map(|promoted| promoted.as_ref().is_ok_and(|p| p.voter));
            json!({ "id": id, "joined": joined, "voter": voter })
        },
    )?;
    Ok(match promoted {
        None => 0,
        Some(Ok(promoted)) if promoted.voter => 0,
        Some(Ok(_)) => EXIT_NO,
        // It is a member now, whatever became of the rest.
        Some(Err(error)) => {
            eprintln!(
                "lake: peer {id} is a member, and was not promoted: {error}; ask again with `members promote {id}`"
            );
            if error.applied() == Applied::Unknown { EXIT_UNKNOWN } else { EXIT_NO }
        }
    })
}

async fn promote(cluster: &Cluster, args: PromoteArgs) -> Result<u8> {
    let promoted = until_promoted(&cluster.store()?, args.id, cluster.deadline_or(TIMEOUT)).await?;
    args.format.answer(
        promoted.voter,
        || promotion(args.id, &promoted),
        || {
            json!({
                "id": args.id,
                "voter": promoted.voter,
                "lag_entries": promoted.lag_entries,
                "lag_limit_entries": promoted.lag_limit_entries,
            })
        },
    )
}

/// Asks until the learner votes, or the time is up: then the last answer.
async fn until_promoted(store: &RemoteStore, id: u64, deadline: Instant) -> Result<PromoteResponse, Error> {
    let mut last = None;
    loop {
        let answer = match (store.promote(id, deadline).await, last) {
            (Ok(answer), _) => answer,
            // The time was up while it was asked once more.
            (Err(error), Some(last)) if error.is_unavailable() && error.applied() == Applied::No => return Ok(last),
            (Err(error), _) => return Err(error),
        };
        if answer.voter || Instant::now() + ASK_AGAIN >= deadline {
            return Ok(answer);
        }
        last = Some(answer);
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

fn promotion(id: u64, promoted: &PromoteResponse) -> String {
    match promoted.voter {
        true => format!("peer {id} votes\n"),
        false => format!(
            "peer {id} does not vote yet: it lacks {} entries of the log, of which it may lack {}, or does not answer; ask \
             again\n",
            promoted.lag_entries, promoted.lag_limit_entries
        ),
    }
}

async fn remove(cluster: &Cluster, args: RemoveArgs) -> Result<u8> {
    let removed = cluster.store()?.remove(args.id, args.force, cluster.deadline_or(TIMEOUT)).await?.removed;
    args.format.print(
        || format!("peer {} {}\n", args.id, if removed { "is removed" } else { "was removed before" }),
        || json!({ "id": args.id, "removed": removed }),
    )?;
    Ok(0)
}

async fn replace(cluster: &Cluster, args: ReplaceArgs) -> Result<u8> {
    let by = fresh(cluster, &args.by).await?;
    let new = by.id;
    let replaced = cluster.store()?.replace(args.id, by, cluster.deadline_or(TIMEOUT)).await?.replaced;
    args.format.print(
        || {
            let when = if replaced { "is" } else { "was before" };
            format!("peer {} {when} replaced by peer {new}\n", args.id)
        },
        || json!({ "id": args.id, "by": new, "replaced": replaced }),
    )?;
    Ok(0)
}
