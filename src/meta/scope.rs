//! `lake meta scope`: claims on paths, taken, shown and released by hand.
//!
//! Taking and releasing are transactions like any other: all paths or none.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::coordination::{LeaseId, Scope, ScopeOwner, validate_scope_path};
use lake_proto::kv::{Compare, Op, OpResult, Txn};
use serde_json::{Value, json};

use super::cluster::{Cluster, ReadArgs, of_one_state};
use super::output::{Format, FormatArgs, escaped, moment, owner_json, print, print_json, scope_json};
use super::{EXIT_NO, EXIT_UNKNOWN};
use crate::columns::columns;

/// Leases whose holders are looked up for one table.
const MAX_HOLDERS: usize = 100;

/// The commands of `lake meta scope`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The live scopes
    List(ListArgs),
    /// Who holds a path, a part of it or one above it
    Show(ShowArgs),
    /// Claim paths: all of them, or none
    #[command(after_help = ACQUIRE_HELP)]
    Acquire(ChangeArgs),
    /// Let claimed paths go
    #[command(after_help = RELEASE_HELP)]
    Release(ChangeArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lake meta scope list\n  lake meta scope list /catalog/sales --format json")]
pub struct ListArgs {
    /// What the paths begin with; empty: all of them
    #[arg(default_value = "")]
    prefix: String,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Shown is what would stand in the way of claiming the path: whoever holds it, an ancestor or a descendant of it.

Exit codes: 0 somebody does, 3 nobody does.

Example:
  lake meta scope show /catalog/sales/orders")]
pub struct ShowArgs {
    /// The path
    path: String,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

const ACQUIRE_HELP: &str = "\
The owner is a lease, with which the scope ends, or a procedure, whose scope stays until it is released. Who holds what stands
in the way is printed. The fence is the revision at which the owner got the path: it rises with each new owner.

Exit codes: 0 claimed, 3 something stands in the way, 1 not claimed, 4 it is unknown whether it was claimed.

Example:
  lake meta scope acquire /catalog/sales /catalog/old-sales --lease 17";

const RELEASE_HELP: &str = "\
A scope is released in the name of its owner; `lake meta scope show` says who that is. A holder that still works under it is
not stopped by that. If it holds a lease, revoking the lease stops it (`lake meta lease revoke`).

Exit codes: 0 released, 3 the owner holds none of the paths, 1 not released, 4 it is unknown whether it was released.

Example:
  lake meta scope release /catalog/sales --procedure rename-1f0c";

#[derive(Debug, clap::Args)]
pub struct ChangeArgs {
    /// The paths
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
    #[command(flatten)]
    owner: OwnerArgs,
    #[command(flatten)]
    format: FormatArgs,
}

/// In whose name.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct OwnerArgs {
    /// The lease that owns them
    #[arg(long, value_name = "LEASE")]
    lease: Option<u64>,
    /// The procedure that owns them
    #[arg(long, value_name = "ID")]
    procedure: Option<String>,
}

impl OwnerArgs {
    fn owner(&self) -> ScopeOwner {
        match (&self.lease, &self.procedure) {
            (Some(lease), _) => ScopeOwner::Lease(*lease),
            (None, procedure) => ScopeOwner::Procedure(procedure.clone().unwrap_or_default()),
        }
    }
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
        Command::List(args) => list(cluster, args).await,
        Command::Show(args) => show(cluster, args).await,
        Command::Acquire(args) => acquire(cluster, args).await,
        Command::Release(args) => release(cluster, args).await,
    }
}

async fn list(cluster: &Cluster, args: ListArgs) -> Result<u8> {
    let (store, options) = args.read.open(cluster).await?;
    let read = store.all_scopes(&args.prefix, options, cluster.deadline()).await?;
    print_scopes(cluster, &store, options, args.format, &read.value).await?;
    Ok(0)
}

async fn show(cluster: &Cluster, args: ShowArgs) -> Result<u8> {
    validate_scope_path(&args.path)?;
    let (store, options) = args.read.open(cluster).await?;
    let mut scopes = of_one_state(&store, options, cluster.deadline(), async |options| {
        // Whatever is above the path, or below it, begins with its first part, or is the root.
        let mut scopes = store.all_scopes(first_part(&args.path), options, cluster.deadline()).await?.value;
        if args.path != "/" {
            let root = store.list_scopes("/", "", 1, options, cluster.deadline()).await?.value;
            scopes.extend(root.items.into_iter().filter(|scope| scope.path == "/"));
        }
        Ok(scopes)
    })
    .await?;
    scopes.retain(|scope| related(&scope.path, &args.path));
    scopes.sort_by(|a, b| a.path.cmp(&b.path));
    print_scopes(cluster, &store, options, args.format, &scopes).await?;
    if scopes.is_empty() && args.format.format == Format::Table {
        eprintln!("lake: nobody holds {:?}, a part of it or one above it", args.path);
    }
    Ok(if scopes.is_empty() { EXIT_NO } else { 0 })
}

async fn acquire(cluster: &Cluster, args: ChangeArgs) -> Result<u8> {
    let owner = args.owner.owner();
    let when = args.paths.iter().map(|path| Compare::scope_free(path.clone(), Some(owner.clone()))).collect();
    let then = args.paths.iter().map(|path| Op::AcquireScope { path: path.clone(), owner: owner.clone() }).collect();
    let store = cluster.store()?;
    let committed = store.commit(Txn { when, then, otherwise: vec![] }, cluster.deadline()).await?;
    let result = &committed.result;
    let fences: BTreeMap<&str, u64> = args
        .paths
        .iter()
        .zip(&result.results)
        .filter_map(|(path, result)| match result {
            OpResult::AcquireScope { fence } => Some((path.as_str(), *fence)),
            _ => None,
        })
        .collect();
    if args.format.format == Format::Json {
        print_json(&json!({
            "succeeded": result.succeeded,
            "revision": result.revision,
            "owner": owner_json(&owner),
            "fences": fences,
            "conflicts": result.conflicts.iter().map(scope_json).collect::<Value>(),
        }))?;
    } else if result.succeeded {
        let line = |(path, fence): (&&str, &u64)| format!("{}: held by {owner} with fence {fence}\n", escaped(path));
        print(&fences.iter().map(line).collect::<String>())?;
    } else if result.conflicts.is_empty() {
        print(&format!("not claimed: {owner} is over\n"))?;
    } else {
        print("not claimed; this stands in the way:\n")?;
        // Whose leases they are helps, and is not what was asked.
        let holders = holders(cluster, &store, ReadOptions::default(), &result.conflicts).await.unwrap_or_default();
        print(&table(&result.conflicts, &holders))?;
    }
    Ok(if result.succeeded { 0 } else { EXIT_NO })
}

async fn release(cluster: &Cluster, args: ChangeArgs) -> Result<u8> {
    let owner = args.owner.owner();
    let then = args.paths.iter().map(|path| Op::ReleaseScope { path: path.clone(), owner: owner.clone() }).collect();
    let committed = cluster.store()?.commit(Txn { then, ..Txn::default() }, cluster.deadline()).await?;
    let released: BTreeMap<&str, bool> = args
        .paths
        .iter()
        .zip(&committed.result.results)
        .map(|(path, result)| (path.as_str(), matches!(result, OpResult::ReleaseScope { released: true })))
        .collect();
    let line = |(path, released): (&&str, &bool)| match released {
        true => format!("{}: released\n", escaped(path)),
        false => format!("{}: {owner} does not hold it\n", escaped(path)),
    };
    args.format.print(
        || released.iter().map(line).collect(),
        || json!({ "revision": committed.result.revision, "owner": owner_json(&owner), "released": released }),
    )?;
    Ok(match (released.values().any(|released| *released), committed.resent) {
        (true, _) => 0,
        (false, false) => EXIT_NO,
        // A first attempt, whose answer was lost, may have released them.
        (false, true) => EXIT_UNKNOWN,
    })
}

/// `/a` of `/a/b/c`.
fn first_part(path: &str) -> &str {
    match path.strip_prefix('/').and_then(|rest| rest.find('/')) {
        Some(end) => &path[..=end],
        None => path,
    }
}

/// Whether two paths are equal, or one is the other's ancestor.
fn related(one: &str, other: &str) -> bool {
    let above = |above: &str, path: &str| {
        above == "/" || path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    above(one, other) || above(other, one)
}

async fn print_scopes(
    cluster: &Cluster,
    store: &RemoteStore,
    options: ReadOptions,
    format: FormatArgs,
    scopes: &[Scope],
) -> Result<()> {
    match format.format {
        Format::Json => print_json(&json!({ "scopes": scopes.iter().map(scope_json).collect::<Value>() })),
        Format::Table => print(&table(scopes, &holders(cluster, store, options, scopes).await?)),
    }
}

/// Who holds the leases that own scopes, as far as they are alive and not too many.
async fn holders(
    cluster: &Cluster,
    store: &RemoteStore,
    options: ReadOptions,
    scopes: &[Scope],
) -> Result<BTreeMap<LeaseId, String>> {
    let mut holders = BTreeMap::new();
    for scope in scopes {
        if let ScopeOwner::Lease(id) = scope.owner
            && !holders.contains_key(&id)
            && holders.len() < MAX_HOLDERS
        {
            let lease = store.lease(id, options, cluster.deadline()).await?.value;
            holders.insert(id, lease.map_or_else(|| "over".to_owned(), |lease| lease.holder));
        }
    }
    Ok(holders)
}

fn table(scopes: &[Scope], holders: &BTreeMap<LeaseId, String>) -> String {
    let mut rows = vec![["PATH", "OWNER", "HOLDER", "FENCE", "SINCE", "FOR"].map(str::to_owned)];
    rows.extend(scopes.iter().map(|scope| {
        let holder = match &scope.owner {
            ScopeOwner::Lease(id) => holders.get(id).map_or("-", String::as_str),
            ScopeOwner::Procedure(_) => "-",
        };
        [
            escaped(&scope.path),
            escaped(&scope.owner.to_string()),
            escaped(holder),
            scope.fence.to_string(),
            moment(scope.acquired_unix_ms),
            age(scope.acquired_unix_ms),
        ]
    }));
    columns(rows)
}

/// How long ago that was, by this machine's clock.
fn age(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_millis(unix_ms));
    humantime::format_duration(Duration::from_secs(age.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_the_way_of_a_path_is_above_or_below_it() {
        for (one, other) in [("/a/b", "/a/b"), ("/a", "/a/b"), ("/a/b/c", "/a/b"), ("/", "/a"), ("/a", "/")] {
            assert!(related(one, other), "{one} {other}");
            assert!(one == "/" || other == "/" || one.starts_with(first_part(other)), "{one} {other}");
        }
        for (one, other) in [("/a/bc", "/a/b"), ("/a/c", "/a/b"), ("/ab", "/a"), ("/b", "/a/b")] {
            assert!(!related(one, other), "{one} {other}");
        }
        assert_eq!(["/", "/a", "/a/b", "/a/b/c"].map(first_part), ["/", "/a", "/a", "/a"]);
    }
}
