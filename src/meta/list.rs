//! `lake meta list`: the keys under a prefix.

use anyhow::Result;

use super::cluster::{Cluster, ReadArgs};
use super::entries::{Detail, LimitArgs, More, Printer, print_prefix};
use super::output::FormatArgs;

/// Options of `lake meta list`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
What is printed is of one revision, over all pages; the peer holds a listing for a minute. `lake meta get --prefix` prints
the values as well.

Examples:
  lake meta list /lake/table/
  lake meta list /kv/ --limit 0 --format json
  lake meta list / --consistency local --peer 3")]
pub struct Args {
    /// What the keys begin with; empty: all keys
    #[arg(default_value = "")]
    prefix: String,
    #[command(flatten)]
    limit: LimitArgs,
    /// Go on with this page, as an earlier listing of the same prefix said
    #[arg(long, value_name = "PAGE")]
    page: Option<String>,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

/// Lists.
///
/// # Errors
/// As every read.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let (store, options) = args.read.open(cluster).await?;
    let mut printer = Printer::begin(args.format.format, Detail::Key)?;
    let deadline = || cluster.deadline();
    let next = print_prefix(&mut printer, &store, &args.prefix, args.page, args.limit.limit, options, deadline).await?;
    printer.end(next.map(More::Page), &[])?;
    Ok(0)
}
