//! `lake meta recover`: a new cluster from what survived, when a majority of the voters is gone for good.

use std::path::PathBuf;

use anyhow::{Result, bail};
use lake_metasrv::rescue::recover::{self, Plan, Survivor};
use serde_json::{Value, json};

use super::Format;
use super::offline::{findings_json, findings_table};
use super::snapshot::{made_json, made_table, next_steps};
use super::summary::{log_id, log_id_json, print, print_json, state_json};
use crate::columns::columns;

/// Options of `lake meta recover`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The data directory of a peer that survived, and is stopped; each that there is
    #[arg(long = "dir", value_name = "PATH", required = true)]
    dirs: Vec<PathBuf>,
    /// The new peer's data directory; nothing may be there yet
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// The new peer's id
    #[arg(long, default_value_t = 1)]
    id: u64,
    /// Make the new cluster. Without this, what would be lost is told, and nothing is made
    #[arg(long)]
    accept_losing_acknowledged_writes: bool,
    /// Also if the directories given are those of a majority, which should be started instead
    #[arg(long)]
    even_with_a_majority: bool,
    /// How it is printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Compares the survivors, and makes the new cluster if that was asked for.
///
/// # Errors
/// They do not fit together, or are a majority; the word that was needed is missing; the directory cannot be made.
pub async fn run(args: Args) -> Result<u8> {
    if args.out.symlink_metadata().is_ok() {
        return Err(lake_metasrv::Error::Exists { path: args.out }.into());
    }
    let plan = recover::plan(&args.dirs).await?;
    if args.format == Format::Table {
        print(&table(&plan))?;
    }
    let refusal = if plan.is_majority() && !args.even_with_a_majority {
        Some(
            "these are a majority of the voters: start them as they are, and they go on as the same cluster, without losing \
             anything (--even-with-a-majority makes a new cluster of them all the same)",
        )
    } else if !args.accept_losing_acknowledged_writes {
        Some("nothing was made: --accept-losing-acknowledged-writes says that the above is understood")
    } else {
        None
    };
    if let Some(refusal) = refusal {
        if args.format == Format::Json {
            print_json(&as_json(&plan))?;
        }
        bail!("{refusal}");
    }
    let made = plan.carry_out(&args.out, args.id).await?;
    let old = &plan.taken().cluster_id;
    match args.format {
        Format::Table => print(&format!("\n{}", made_table(old, &made)))?,
        Format::Json => {
            let mut all = as_json(&plan);
            all["made"] = made_json(old, &made);
            print_json(&all)?;
        }
    }
    eprintln!("{}; never start the old directories again", next_steps(&made));
    Ok(0)
}

fn table(plan: &Plan) -> String {
    let mut rows =
        vec![["", "PEER", "VOTE", "LOG ENDS AT", "COMMITTED TO", "REVISION", "KEYS", "DIRECTORY"].map(str::to_owned)];
    for (n, survivor) in plan.survivors.iter().enumerate() {
        let state = |of: fn(&lake_metasrv::rescue::Summary) -> u64| {
            survivor.state.as_ref().map_or_else(|| "-".to_owned(), |state| of(state).to_string())
        };
        let chosen = match (n == plan.taken, survivor.whole) {
            (true, true) => "taken",
            (true, false) => "taken, damaged",
            (false, true) => "",
            (false, false) => "damaged",
        };
        rows.push([
            chosen.to_owned(),
            survivor.peer_id.map_or_else(|| "unknown".to_owned(), |id| id.to_string()),
            survivor.vote.map_or_else(|| "none".to_owned(), |vote| format!("term {}", vote.leader_id.term)),
            log_id(survivor.last),
            survivor.committed.map_or_else(|| "-".to_owned(), |index| format!("index {index}")),
            state(|s| s.revision),
            state(|s| s.keys),
            survivor.dir.display().to_string(),
        ]);
    }
    let mut text = format!("cluster {}\n{}", plan.taken().cluster_id, columns(rows));
    for survivor in &plan.survivors {
        text.push_str(&findings_table(&survivor.findings));
    }
    text.push('\n');
    for warning in plan.warnings() {
        text.push_str(&format!("- {warning}\n"));
    }
    text
}

fn as_json(plan: &Plan) -> Value {
    let survivor = |s: &Survivor| {
        json!({
            "dir": s.dir,
            "peer_id": s.peer_id,
            "vote_term": s.vote.map(|vote| vote.leader_id.term),
            "last_log_id": log_id_json(s.last),
            "acknowledged": log_id_json(s.acknowledged),
            "committed_index": s.committed,
            "state": s.state.as_ref().map(state_json),
            "whole": s.whole,
            "findings": findings_json(&s.findings),
        })
    };
    json!({
        "cluster_id": plan.taken().cluster_id,
        "survivors": plan.survivors.iter().map(survivor).collect::<Vec<_>>(),
        "taken": plan.taken,
        "voters": plan.quorums.voters,
        "absent_voters": plan.quorums.absent,
        "warnings": plan.warnings(),
    })
}
