//! `lake meta lease`: leases, granted, shown, kept alive and ended by hand.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use lake_client::remote::RemoteStore;
use lake_client::remote::coordination::{Lease, LiveLease};
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::store::ReadOptions;
use lake_proto::coordination::{LeaseId, ScopeOwner};
use serde_json::{Value, json};

use super::EXIT_NO;
use super::cluster::{Cluster, ReadArgs, of_one_state};
use super::output::{Format, FormatArgs, escaped, or_dash, stream};
use crate::columns::columns;
use crate::signals::{Interrupts, Termination};

/// From one question to the next while a new leader does not count yet.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The commands of `lake meta lease`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Grant a lease
    Grant(GrantArgs),
    /// The live leases
    List(ListArgs),
    /// One lease, and the scopes that it owns
    Show(ShowArgs),
    /// End a lease, with its keys and scopes
    Revoke(RevokeArgs),
    /// Keep a lease alive until Ctrl-C
    KeepAlive(KeepAliveArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A lease that is not kept alive ends after its time to live, and with it the keys that hang on it and its scopes. Its id is its
fence: it is never given twice.

Examples:
  lake meta lease grant --ttl-secs 30 --holder backup
  L=$(lake meta lease grant --format json | jq .id)")]
pub struct GrantArgs {
    /// How long it lives unless it is renewed, in seconds: 1 to 60
    #[arg(long, value_name = "SECS", default_value_t = 30)]
    ttl_secs: u64,
    /// Who holds it, for people
    #[arg(long, value_name = "NAME", default_value = "lake meta")]
    holder: String,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
How long a lease has left is measured by the leader; `-` where another peer answers.

Example:
  lake meta lease list")]
pub struct ListArgs {
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 it is alive, 3 there is no such lease.\n\nExample:\n  lake meta lease show 17")]
pub struct ShowArgs {
    /// The lease
    lease: u64,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 ended, 3 there was no such lease, 1 not ended, 4 it is unknown whether it was ended.

Example:
  lake meta lease revoke 17")]
pub struct RevokeArgs {
    /// The lease
    lease: u64,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Three times per time to live the lease is renewed, whoever leads; each renewal is a line. It goes on until Ctrl-C, after which
the lease ends by itself, or until the lease is lost.

Exit codes: 0 it ended as asked, 3 the lease is over or was lost.

Examples:
  lake meta lease keep-alive 17
  lake meta lease keep-alive 17 --once")]
pub struct KeepAliveArgs {
    /// The lease
    lease: u64,
    /// Renew it once, and end
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    format: FormatArgs,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        matches!(self, Self::List(_) | Self::Show(_))
    }
}

/// Does what was asked.
///
/// # Errors
/// As every call.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Grant(args) => grant(cluster, args).await,
        Command::List(args) => list(cluster, args).await,
        Command::Show(args) => show(cluster, args).await,
        Command::Revoke(args) => revoke(cluster, args).await,
        Command::KeepAlive(args) => keep_alive(cluster, args).await,
    }
}

async fn grant(cluster: &Cluster, args: GrantArgs) -> Result<u8> {
    let ttl = Duration::from_secs(args.ttl_secs);
    let lease = cluster.store()?.grant_lease(ttl, &args.holder, cluster.deadline()).await?;
    args.format.print(
        || format!("lease {} was granted for {} s\n", lease.id, args.ttl_secs),
        || json!({ "id": lease.id, "ttl_ms": millis(ttl), "holder": args.holder }),
    )?;
    Ok(0)
}

async fn list(cluster: &Cluster, args: ListArgs) -> Result<u8> {
    let (store, options) = args.read.open(cluster).await?;
    let read = store.all_leases(options, cluster.deadline()).await?;
    args.format.print(
        || table(&read.value),
        || json!({ "revision": read.revision, "leases": read.value.iter().map(lease_json).collect::<Value>() }),
    )?;
    Ok(0)
}

async fn show(cluster: &Cluster, args: ShowArgs) -> Result<u8> {
    let (store, options) = args.read.open(cluster).await?;
    // One that ends meanwhile is not shown without what it owned.
    let (lease, mut scopes) = of_one_state(&store, options, cluster.deadline(), async |options| {
        let lease = store.lease(args.lease, options, cluster.deadline()).await?.value;
        let scopes = match &lease {
            Some(_) => store.all_scopes("", options, cluster.deadline()).await?.value,
            None => Vec::new(),
        };
        Ok((lease, scopes))
    })
    .await?;
    let Some(lease) = lease else { return no_such_lease(args.lease) };
    let owner = ScopeOwner::Lease(args.lease);
    scopes.retain(|scope| scope.owner == owner);
    let paths: Vec<String> = scopes.into_iter().map(|scope| scope.path).collect();
    args.format.print(
        || {
            let mut text = table(std::slice::from_ref(&lease));
            text.extend(paths.iter().map(|path| format!("owns the scope {}\n", escaped(path))));
            text
        },
        || {
            let mut json = lease_json(&lease);
            json["scopes"] = json!(paths);
            json
        },
    )?;
    Ok(0)
}

async fn revoke(cluster: &Cluster, args: RevokeArgs) -> Result<u8> {
    let existed = cluster.store()?.revoke_lease(args.lease, cluster.deadline()).await?;
    args.format.answer(
        existed,
        || match existed {
            true => format!("lease {} was ended\n", args.lease),
            false => format!("there was no lease {}\n", args.lease),
        },
        || json!({ "id": args.lease, "existed": existed }),
    )
}

async fn keep_alive(cluster: &Cluster, args: KeepAliveArgs) -> Result<u8> {
    let (mut interrupts, mut termination) = (Interrupts::listen()?, Termination::listen()?);
    let store = cluster.store()?;
    let Some(lease) = held(cluster, &store, args.lease).await? else {
        return no_such_lease(args.lease);
    };
    let keeper = LeaseKeeper::start(store, lease);
    loop {
        tokio::select! {
            renewed = keeper.renewed() => {
                let Some(until) = renewed else { break };
                let left = until.saturating_duration_since(Instant::now());
                match args.format.format {
                    Format::Table => {
                        stream(format!("lease {}: held for {:.1} s\n", lease.id, left.as_secs_f64()).as_bytes())?;
                    }
                    Format::Json => {
                        stream(format!("{}\n", json!({ "id": lease.id, "held_ms": millis(left) })).as_bytes())?;
                    }
                }
                if args.once {
                    return Ok(0);
                }
            }
            () = interrupts.next() => return Ok(0),
            () = termination.next() => return Ok(0),
        }
    }
    eprintln!("lake: {}", keeper.lost().await);
    Ok(EXIT_NO)
}

/// A lease that somebody else was granted, as far as it is certainly held: for as long as the leader gives it still, counted
/// from before it was asked.
async fn held(cluster: &Cluster, store: &RemoteStore, id: LeaseId) -> Result<Option<Lease>> {
    let deadline = cluster.deadline();
    loop {
        let asked = Instant::now();
        let Some(lease) = store.lease(id, ReadOptions::default(), deadline).await?.value else { return Ok(None) };
        if let Some(remaining) = lease.remaining {
            return Ok(Some(Lease { id, ttl: lease.ttl, held_until: asked + remaining }));
        }
        if Instant::now() + ASK_AGAIN >= deadline {
            bail!("lease {id}: no leader counts how long it has left; nothing was renewed, try again");
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

fn no_such_lease(id: LeaseId) -> Result<u8> {
    eprintln!("lake: there is no lease {id}: it is over, or was never granted");
    Ok(EXIT_NO)
}

fn table(leases: &[LiveLease]) -> String {
    let mut rows = vec![["LEASE", "HOLDER", "TTL", "LEFT", "KEYS"].map(str::to_owned)];
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    rows.extend(leases.iter().map(|lease| {
        [
            lease.id.to_string(),
            escaped(&lease.holder),
            seconds(lease.ttl),
            or_dash(lease.remaining.map(seconds)),
            lease.keys.to_string(),
        ]
    }));
    columns(rows)
}

fn lease_json(lease: &LiveLease) -> Value {
    json!({
        "id": lease.id,
        "holder": lease.holder,
        "ttl_ms": millis(lease.ttl),
        "remaining_ms": lease.remaining.map(millis),
        "keys": lease.keys,
    })
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}
