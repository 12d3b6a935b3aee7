//! `lake meta`: the operator's tool for the metadata cluster.
//!
//! Each command is a module with its options, its help and what it does, over the calls of lake-client; none has a way of its
//! own into the cluster.
//!
//! - [`status`], [`settings`], [`members`], [`init`]: the cluster itself;
//! - [`get`], [`list`] with [`entries`], [`write`], [`txn`] with [`txn_document`], [`watch`]: the map;
//! - [`lease`], [`scope`], [`nodes`], [`shards`], [`proc`]: coordination; [`warehouse`]: where tables live;
//! - [`transfer`]: everything from one store to another; [`snapshot`]: saving and restoring; [`offline`] with [`listing`], [`recover`]: directories of stopped peers; [`summary`]: how
//!   a state is told;
//! - [`cluster`]: which cluster, which peer, how long; [`peers`]: asking each peer; [`value`]: what is given; [`output`]:
//!   what is printed.
//!
//! How a command ended is for scripts to know:
//!
//! | exit code        | meaning                                                                                    |
//! |------------------|--------------------------------------------------------------------------------------------|
//! | 0                | done                                                                                       |
//! | [`EXIT_FAILED`]  | not done: it was refused, or the cluster does not answer; nothing was changed              |
//! | 2                | the command line means nothing                                                             |
//! | [`EXIT_NO`]      | the answer is no: a key that is not there, a compare that failed                           |
//! | [`EXIT_UNKNOWN`] | a change may have been made, or may still be: an answer was lost, and it is not safe to go on |

mod cluster;
mod entries;
mod get;
mod init;
mod lease;
mod list;
mod listing;
mod members;
mod nodes;
mod offline;
mod output;
mod peers;
mod proc;
mod recover;
mod scope;
mod settings;
mod shards;
mod snapshot;
mod status;
mod summary;
mod transfer;
mod txn;
mod txn_document;
mod value;
mod warehouse;
mod watch;
mod write;

use std::time::Duration;

use anyhow::Result;
use lake_client::catalog::CatalogError;
use lake_client::store::{Applied, Error};
use lake_client::warehouse::WarehouseError;

use self::cluster::Cluster;
use crate::endpoints::At;
use crate::signals::{EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupts, Termination};

/// Not done, and nothing was changed.
const EXIT_FAILED: u8 = 1;
/// The answer is no.
const EXIT_NO: u8 = 3;
/// A change may have been made.
const EXIT_UNKNOWN: u8 = 4;

/// Options of `lake meta`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 done; 1 not done, nothing was changed; 2 the command line is wrong; 3 the answer is no (no such key, a compare
that failed, ...); 4 it is unknown whether a change was made.

Example:
  lake meta status --at 127.0.0.1:9191")]
pub struct Args {
    #[command(flatten)]
    at: At,
    /// How long the command may take, in seconds [default: 10; 20 to found a cluster, 60 to change its members]
    #[arg(long, value_name = "SECS", global = true, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_secs: Option<u64>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// What each peer knows, and what is wrong
    Status(status::Args),
    /// Found a cluster of the fresh peers named by --at; safe to repeat
    Init(init::Args),
    /// Print keys with their values
    Get(get::Args),
    /// Print keys
    List(list::Args),
    /// Put a value under a key
    Put(write::PutArgs),
    /// Put a value under a key if the key is as expected
    Cas(write::CasArgs),
    /// Delete a key
    Delete(write::DeleteArgs),
    /// Run a transaction
    Txn(txn::Args),
    /// Print changes as they happen
    Watch(watch::Args),
    /// Leases
    #[command(subcommand)]
    Lease(lease::Command),
    /// Scopes: claims on paths
    #[command(subcommand)]
    Scope(scope::Command),
    /// The query nodes, as the leader knows them
    Nodes(nodes::Args),
    /// Procedures: what the leader does in steps
    #[command(subcommand)]
    Proc(proc::Command),
    /// Which worker does the upkeep of which tables
    #[command(subcommand)]
    Shards(shards::Command),
    /// The members of the cluster
    #[command(subcommand)]
    Members(members::Command),
    /// Have another voter lead
    TransferLeader(members::TransferArgs),
    /// Quotas and the feature level
    #[command(subcommand)]
    Settings(settings::Command),
    /// Places for tables, besides the one that query nodes are configured with
    #[command(subcommand)]
    Warehouse(warehouse::Command),
    /// Write everything that a store holds to a data file, or to another store
    Export(transfer::ExportArgs),
    /// Fill a store from a data file, or from another store; safe to repeat after it was stopped
    Import(transfer::ImportArgs),
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

/// Does what was asked. Gives the exit code.
///
/// # Errors
/// Nothing was changed: no endpoint is known, the cluster does not answer, or it refuses.
pub async fn run(args: Args) -> Result<u8> {
    let only_reads = args.command.only_reads();
    match dispatch(args).await {
        // Whoever reads the output has had enough.
        Err(error) if crate::output::is_unread(&error) => Ok(0),
        Err(error) if crate::output::is_unprinted(&error) && !only_reads => {
            eprintln!(
                "lake: {error:#}\nWhat was to be printed may already have been done: look before you do it again."
            );
            Ok(EXIT_UNKNOWN)
        }
        Err(error) => match error.downcast_ref::<Error>() {
            None if is_in_doubt(&error) => {
                eprintln!("lake: {error:#}");
                Ok(EXIT_UNKNOWN)
            }
            Some(e) if e.applied() == Applied::Unknown => {
                eprintln!("lake: {error:#}\nWhether it was done is unknown: look before you do it again.");
                Ok(EXIT_UNKNOWN)
            }
            Some(e) if e.is_unavailable() => {
                eprintln!("lake: {error:#}\nNothing was changed: it is safe to try again.");
                Ok(EXIT_FAILED)
            }
            Some(_) | None => Err(error),
        },
        code => code,
    }
}

/// Whether the catalog says that what it was to do may have been done.
fn is_in_doubt(error: &anyhow::Error) -> bool {
    let catalog = match error.downcast_ref::<WarehouseError>() {
        Some(WarehouseError::Catalog(error)) => Some(error),
        _ => error.downcast_ref::<CatalogError>(),
    };
    catalog.is_some_and(|error| error.applied() == Applied::Unknown)
}

impl Command {
    /// Whether it changes nothing, neither in the cluster nor in a file.
    fn only_reads(&self) -> bool {
        match self {
            Self::Status(_)
            | Self::Get(_)
            | Self::List(_)
            | Self::Watch(_)
            | Self::Nodes(_)
            | Self::Inspect(_)
            | Self::Verify(_) => true,
            Self::Lease(command) => command.only_reads(),
            Self::Scope(command) => command.only_reads(),
            Self::Proc(command) => command.only_reads(),
            Self::Shards(command) => command.only_reads(),
            Self::Members(command) => command.only_reads(),
            Self::Settings(command) => command.only_reads(),
            Self::Warehouse(command) => command.only_reads(),
            Self::Snapshot(command) => command.only_reads(),
            Self::Init(_)
            | Self::Export(_)
            | Self::Import(_)
            | Self::Put(_)
            | Self::Cas(_)
            | Self::Delete(_)
            | Self::Txn(_)
            | Self::TransferLeader(_)
            | Self::Recover(_) => false,
        }
    }
}

/// What is told when the process is to stop before the end.
const REMOVED: &str = "what was begun is removed";
const STAYS: &str = "a file that was begun is removed; what was written to a store stays, and the same command goes on from \
     there";

/// Does something that makes a file or a directory. If the process is to stop before the end, what was begun goes with it.
async fn until_told(then: &str, work: impl Future<Output = Result<u8>>) -> Result<u8> {
    let (mut interrupts, mut termination) = (Interrupts::listen()?, Termination::listen()?);
    let code = tokio::select! {
        done = work => return done,
        () = interrupts.next() => EXIT_INTERRUPTED,
        () = termination.next() => EXIT_TERMINATED,
    };
    eprintln!("lake: told to stop; {then}");
    Ok(code)
}

async fn dispatch(args: Args) -> Result<u8> {
    let cluster = Cluster::new(args.at, args.timeout_secs.map(Duration::from_secs));
    let done = on(&cluster, args.command).await;
    cluster.leave().await;
    done
}

async fn on(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Status(args) => status::run(cluster, args).await,
        Command::Init(args) => init::run(cluster, args).await,
        Command::Get(args) => get::run(cluster, args).await,
        Command::List(args) => list::run(cluster, args).await,
        Command::Put(args) => write::put(cluster, args).await,
        Command::Cas(args) => write::cas(cluster, args).await,
        Command::Delete(args) => write::delete(cluster, args).await,
        Command::Txn(args) => txn::run(cluster, args).await,
        Command::Watch(args) => watch::run(cluster, args).await,
        Command::Lease(command) => lease::run(cluster, command).await,
        Command::Scope(command) => scope::run(cluster, command).await,
        Command::Nodes(args) => nodes::run(cluster, args).await,
        Command::Proc(command) => proc::run(cluster, command).await,
        Command::Shards(command) => shards::run(cluster, command).await,
        Command::Members(command) => members::run(cluster, command).await,
        Command::TransferLeader(args) => members::transfer_leader(cluster, args).await,
        Command::Settings(command) => settings::run(cluster, command).await,
        Command::Warehouse(command) => warehouse::run(cluster, command).await,
        Command::Export(args) => until_told(STAYS, transfer::export(cluster, args)).await,
        Command::Import(args) => until_told(STAYS, transfer::import(cluster, args)).await,
        Command::Snapshot(command) => until_told(REMOVED, snapshot::run(cluster, command)).await,
        Command::Inspect(args) => offline::inspect(args).await,
        Command::Verify(args) => offline::verify(args).await,
        Command::Recover(args) => until_told(REMOVED, recover::run(args)).await,
    }
}

#[cfg(test)]
mod tests {
    use clap::Args;

    fn without_example(command: &clap::Command, path: &str) -> Vec<String> {
        let own = command.get_after_help().is_none_or(|help| !help.to_string().contains("Example"));
        let children = command.get_subcommands().flat_map(|c| without_example(c, &format!("{path} {}", c.get_name())));
        let own = own && command.get_subcommands().next().is_none();
        own.then(|| path.to_owned()).into_iter().chain(children).collect()
    }

    #[test]
    fn every_command_has_an_example_and_every_option_its_words() {
        let tool = super::Args::augment_args(clap::Command::new("meta"));
        tool.clone().debug_assert();
        assert_eq!(without_example(&tool, "meta"), Vec::<String>::new());
        let mut open: Vec<&clap::Command> = vec![&tool];
        while let Some(command) = open.pop() {
            let silent = command.get_arguments().find(|arg| arg.get_help().is_none());
            assert!(silent.is_none(), "{}: {silent:?} has no help", command.get_name());
            assert!(command.get_about().is_some() || command.get_name() == tool.get_name(), "{}", command.get_name());
            open.extend(command.get_subcommands());
        }
    }
}
