//! `lake meta shards`: which worker does the upkeep of which tables.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use lake_client::drains;
use lake_client::remote::RemoteStore;
use lake_client::shards::{ShardListing, ShardMove, ShardStatus};
use serde_json::{Value, json};

use super::EXIT_NO;
use super::cluster::Cluster;
use super::output::{FormatArgs, escaped, or_dash};
use crate::columns::columns;

/// The commands of `lake meta shards`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The shards, and who has them
    List(ListArgs),
    /// Give a shard to a node
    Move(MoveArgs),
    /// Move shards from the workers with the most to those with the fewest
    Balance(BalanceArgs),
    /// Give all shards of a node away, and nothing to it from then on
    Drain(DrainArgs),
    /// Begin or end maintenance mode, in which nothing is moved unless somebody asks for it
    Maintenance(MaintenanceArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A shard is `held` while the lease of its node lives, and `lost` once that has ended: then another worker gets it, as soon as the
node's silence, or that it has left, shows that it will not come back by itself. Suspicion is how surely it is lost: from 8 on it counts
as lost. The fence is the revision of the route.

Exit codes: 0 every shard is held, 3 one is not.

Example:
  lake meta shards list")]
pub struct ListArgs {
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The node must be a worker that lives. Before the move it may read what it will need, for 2 s; from the new route on nothing is committed by
the node that had the shard, which is told to end what it does for it, and waited for, for 5 s. This also works in maintenance mode; outside
of it, the shard may be moved again for balance.

Example:
  lake meta shards move 17 query-2")]
pub struct MoveArgs {
    /// The shard's number
    shard: u32,
    /// The node that gets it
    node: String,
    /// Only say whether it would be moved
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The leader does the same by itself, outside of maintenance mode, when workers differ by much and have been there for a while.

Exit codes: 0 balanced, 3 a shard was not moved, or not for certain: run it again.

Example:
  lake meta shards balance --dry-run")]
pub struct BalanceArgs {
    /// Only say what would be moved
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A node that is drained goes on serving statements. Its shards go to other workers, as soon as there are some and outside of maintenance mode,
and it is given neither shards nor steps of procedures, also when it is started again, until --end. Without a node: which are drained. A name
that no node has is taken for a mistyped one; --unregistered drains a node that is stopped, or yet to come.

Examples:
  lake meta shards drain query-2
  lake meta shards drain query-2 --end")]
pub struct DrainArgs {
    /// The node
    node: Option<String>,
    /// It is not drained any more
    #[arg(long, requires = "node")]
    end: bool,
    /// Only say which shards would be given away
    #[arg(long, requires = "node", conflicts_with = "end")]
    dry_run: bool,
    /// Also a name that no registered node has
    #[arg(long, requires = "node", conflicts_with = "end")]
    unregistered: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
In maintenance mode shards of a node that is lost stay with it: their tables have no upkeep until it is back or they are moved by
hand. A node that comes back keeps its shards.

Examples:
  lake meta shards maintenance on --dry-run
  lake meta shards maintenance on")]
pub struct MaintenanceArgs {
    /// Whether it begins or ends
    #[arg(value_enum)]
    mode: Mode,
    /// Only say what would change
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    On,
    Off,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        match self {
            Self::List(_) => true,
            Self::Balance(args) => args.dry_run,
            Self::Drain(args) => args.dry_run || args.node.is_none(),
            Self::Maintenance(args) => args.dry_run,
            Self::Move(_) => false,
        }
    }
}

/// Does what was asked.
///
/// # Errors
/// As every call.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    let (store, deadline) = (cluster.store()?, cluster.deadline());
    match command {
        Command::List(args) => {
            let read = store.shards(deadline).await?;
            let listing = read.value;
            let drained = drains::list(&store, deadline).await?;
            args.format.print(|| table(&listing, &drained), || listing_json(read.revision, &listing, &drained))?;
            let held = listing.shards.iter().filter(|shard| shard.remaining.is_some()).count();
            Ok(if held == listing.count as usize { 0 } else { EXIT_NO })
        }
        Command::Move(args) => {
            let moved = store.move_shard(args.shard, &args.node, args.dry_run, deadline).await?;
            args.format.print(|| moves_table(std::slice::from_ref(&moved), args.dry_run), || move_json(&moved))?;
            Ok(0)
        }
        Command::Balance(args) => {
            let moves = store.balance_shards(args.dry_run, deadline).await?;
            args.format.print(
                || moves_table(&moves, args.dry_run),
                || json!({ "dry_run": args.dry_run, "moves": moves.iter().map(move_json).collect::<Value>() }),
            )?;
            let left = !args.dry_run && moves.iter().any(|moved| moved.fence.is_none());
            Ok(if left { EXIT_NO } else { 0 })
        }
        Command::Drain(args) => drain(&store, args, deadline).await,
        Command::Maintenance(args) => {
            let begins = args.mode == Mode::On;
            if args.dry_run {
                let listing = store.shards(deadline).await?.value;
                if listing.count == 0 {
                    bail!("{NO_SHARDS}; nothing would be done");
                }
                let told = || would_maintain(&listing, begins);
                let lost = listing.shards.iter().filter(|shard| shard.remaining.is_none()).count();
                let changes = listing.maintenance != begins;
                let would = || json!({ "dry_run": true, "maintenance": begins, "changes": changes, "lost": lost });
                args.format.print(told, would)?;
                return Ok(0);
            }
            store.maintain_shards(begins, deadline).await?;
            Ok(0)
        }
    }
}

async fn drain(store: &RemoteStore, args: DrainArgs, deadline: Instant) -> Result<u8> {
    let Some(node) = args.node else {
        let drained = drains::list(store, deadline).await?;
        let lines = || drained.iter().map(|node| format!("{}\n", escaped(node))).collect();
        args.format.print(lines, || json!({ "drained": drained }))?;
        return Ok(0);
    };
    let listing = store.shards(deadline).await?.value;
    let led: Vec<u32> =
        listing.shards.iter().filter(|shard| shard.route.node == node).map(|shard| shard.shard).collect();
    if !args.end && !args.unregistered && led.is_empty() {
        let nodes = store.nodes(deadline).await?.value;
        if !nodes.iter().any(|listed| listed.node == node) {
            let mut names: Vec<String> = nodes.iter().take(NAMED).map(|listed| escaped(&listed.node)).collect();
            match nodes.len() {
                0 => names.push("none".to_owned()),
                n if n > NAMED => names.push("...".to_owned()),
                _ => {}
            }
            bail!(
                "no node {} is registered (registered: {}); nothing was done. --unregistered drains one that is stopped, or yet \
                 to come",
                escaped(&node),
                names.join(", ")
            );
        }
    }
    let (name, many, count) = (escaped(&node), led.len(), listing.count);
    if args.dry_run {
        let line = || format!("{many} of {count} shards would be given away\n");
        args.format.print(line, || json!({ "dry_run": true, "shards": led }))?;
        return Ok(0);
    }
    let changes = drains::set(store, &node, !args.end, deadline).await?;
    let line = || match (args.end, changes) {
        (false, true) => format!("{name} is drained: {many} of {count} shards go to other workers\n"),
        (false, false) => format!("{name} was drained already; it has {many} of {count} shards\n"),
        (true, true) => format!("{name} is drained no more\n"),
        (true, false) => format!("{name} was not drained\n"),
    };
    args.format.print(line, || json!({ "node": node, "drained": !args.end, "changed": changes, "shards": led }))?;
    Ok(0)
}

/// What beginning maintenance mode, or ending it, would change.
fn would_maintain(listing: &ShardListing, begins: bool) -> String {
    let lost = listing.shards.iter().filter(|shard| shard.remaining.is_none()).count();
    let of = format!("{lost} of {} shards, whose nodes are lost or late,", listing.count);
    match (listing.maintenance, begins) {
        (true, true) => "Maintenance mode is on already: nothing would change.\n".to_owned(),
        (false, false) => "Maintenance mode is off already: nothing would change.\n".to_owned(),
        (false, true) => format!("Maintenance mode would begin: {of} would stay as they are.\n"),
        (true, false) => format!("Maintenance mode would end: {of} could be moved again.\n"),
    }
}

/// Nodes that an error names, of those that there are.
const NAMED: usize = 10;
const NO_SHARDS: &str = "The cluster has no shards yet: it gets them with its first worker";

fn table(listing: &ShardListing, drained: &[String]) -> String {
    if listing.count == 0 {
        return format!("{NO_SHARDS}.\n");
    }
    let heading = ["SHARD", "STATE", "NODE", "FOLLOWERS", "FENCE", "LEASE LEFT", "SUSPICION", "WHY THERE"];
    let mut rows = vec![heading.map(str::to_owned)];
    rows.extend(listing.shards.iter().map(|shard| {
        [
            shard.shard.to_string(),
            state(shard).to_owned(),
            named(&shard.route.node, drained),
            or_dash(Some(shard.route.followers.join(",")).filter(|text| !text.is_empty()).map(|text| escaped(&text))),
            shard.fence.to_string(),
            or_dash(shard.remaining.map(|left| format!("{:.1} s", left.as_secs_f64()))),
            or_dash(shard.suspicion.map(|suspicion| format!("{suspicion:.1}"))),
            escaped(&shard.route.reason),
        ]
    }));
    let mut text = columns(rows);
    let missing = listing.count as usize - listing.shards.len().min(listing.count as usize);
    if missing > 0 {
        text.push_str(&format!("{missing} of {} shards have not been given to anybody yet.\n", listing.count));
    }
    if listing.maintenance {
        text.push_str("Maintenance mode: nothing is moved unless somebody asks for it.\n");
    }
    text
}

/// A node, and whether it is drained.
fn named(node: &str, drained: &[String]) -> String {
    let is_drained = drained.iter().any(|drained| drained == node);
    format!("{}{}", escaped(node), if is_drained { " (drained)" } else { "" })
}

fn state(shard: &ShardStatus) -> &'static str {
    if shard.remaining.is_some() { "held" } else { "lost" }
}

fn listing_json(revision: u64, listing: &ShardListing, drained: &[String]) -> Value {
    let shard_json = |shard: &ShardStatus| {
        json!({
            "shard": shard.shard,
            "state": state(shard),
            "node": shard.route.node,
            "lease": shard.route.lease,
            "followers": shard.route.followers,
            "fence": shard.fence,
            "lease_left_ms": shard.remaining.map(millis),
            "suspicion": shard.suspicion,
            "reason": shard.route.reason,
        })
    };
    json!({
        "revision": revision,
        "count": listing.count,
        "maintenance": listing.maintenance,
        "drained": drained,
        "shards": listing.shards.iter().map(shard_json).collect::<Value>(),
    })
}

fn moves_table(moves: &[ShardMove], dry_run: bool) -> String {
    if moves.is_empty() {
        return "Nothing is to be moved.\n".to_owned();
    }
    let mut rows = vec![["SHARD", "FROM", "TO", "FENCE"].map(str::to_owned)];
    rows.extend(moves.iter().map(|moved| {
        let fence = match moved.fence {
            Some(fence) => fence.to_string(),
            None if dry_run => "dry run".to_owned(),
            None => "not moved, or not for certain".to_owned(),
        };
        [moved.shard.to_string(), or_dash(moved.from.as_deref().map(escaped)), escaped(&moved.to), fence]
    }));
    columns(rows)
}

fn move_json(moved: &ShardMove) -> Value {
    json!({ "shard": moved.shard, "from": moved.from, "to": moved.to, "fence": moved.fence })
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}
