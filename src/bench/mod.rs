//! `lake bench`: the load generators behind the figures in docs/.
//!
//! - [`meta`]: a metadata cluster, lake's own or an etcd;
//! - [`append`]: small appends of many clients to one table;
//! - [`sql`]: queries and INSERT, beside plain DataFusion.

#[cfg(feature = "query")]
mod append;
mod meta;
#[cfg(feature = "query")]
mod sql;

use anyhow::Result;

/// Options of `lake bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Load on a running metadata cluster, each client waiting for its answer before it asks again
    Meta(meta::Args),
    /// Many clients that append to one table, together and one by one
    #[cfg(feature = "query")]
    Append(append::Args),
    /// Queries and INSERT of a query node, beside plain DataFusion in the same run
    #[cfg(feature = "query")]
    Sql(sql::Args),
}

/// Runs a load and prints what came of it.
///
/// # Errors
/// The cluster cannot be reached, or refuses what the load needs.
pub async fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Meta(args) => meta::run(args).await,
        #[cfg(feature = "query")]
        Command::Append(args) => append::run(args).await,
        #[cfg(feature = "query")]
        Command::Sql(args) => sql::run(args).await,
    }
}
