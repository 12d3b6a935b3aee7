//! `lake meta get`: entries by their keys, or all under prefixes.

use anyhow::{Result, ensure};
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::KeyValue;
use lake_proto::limits::MAX_BATCH_GET_KEYS;

use super::EXIT_NO;
use super::cluster::{Cluster, ReadArgs, of_one_state};
use super::entries::{Detail, LimitArgs, More, Printer, print_prefix};
use super::output::{Format, FormatArgs, escaped, or_dash, shown, stream};

/// Options of `lake meta get`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Up to 1,024 keys are read at once, at one revision, and so is what lies under one prefix. Several prefixes are read one after
the other: `revision` is null then, unless --revision-consistent reads them from one state, which a peer holds for a minute.

Exit codes: 0 all is there, 3 a key is not there, 1 it could not be read.

Examples:
  lake meta get /kv/greeting
  lake meta get /kv/a /kv/b --format json
  lake meta get /kv/photo --raw > photo.jpg
  lake meta get --prefix /lake/table/ --limit 20
  lake meta get --prefix /kv/a/ /kv/b/ --revision-consistent --consistency bounded:500")]
pub struct Args {
    /// The keys; with --prefix what they begin with
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,
    /// Print everything whose key begins so
    #[arg(long)]
    prefix: bool,
    #[command(flatten)]
    limit: LimitArgs,
    /// Go on with this page, as an earlier listing of the same prefix said; it is of that listing's state
    #[arg(long, value_name = "PAGE", requires = "prefix", conflicts_with = "revision_consistent")]
    page: Option<String>,
    /// Read everything from one state
    #[arg(long)]
    revision_consistent: bool,
    /// Print the value of one key and nothing else, byte for byte
    #[arg(long, conflicts_with_all = ["prefix", "format"])]
    raw: bool,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

/// Reads and prints.
///
/// # Errors
/// As every read.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    ensure!(!args.raw || args.keys.len() == 1, "--raw prints the value of one key, and {} are given", args.keys.len());
    ensure!(args.page.is_none() || args.keys.len() == 1, "--page goes on with one prefix, and several are given");
    let (store, options) = args.read.open(cluster).await?;
    match args.revision_consistent {
        true => {
            of_one_state(&store, options, cluster.deadline(), async |options| {
                read(cluster, &store, options, args).await
            })
            .await
        }
        false => read(cluster, &store, options, args).await,
    }
}

async fn read(cluster: &Cluster, store: &RemoteStore, options: ReadOptions, args: Args) -> Result<u8> {
    if args.prefix {
        let mut printer = Printer::begin(args.format.format, Detail::Value)?;
        let (limit, mut page, mut more) = (args.limit.limit, args.page, None);
        for prefix in &args.keys {
            let left = limit.saturating_sub(printer.printed());
            if limit > 0 && left == 0 {
                // Whether there is anything under the others has not been looked at.
                more = Some(More::Elsewhere);
                break;
            }
            let deadline = || cluster.deadline();
            let next = print_prefix(&mut printer, store, prefix, page.take(), left, options, deadline).await?;
            // A state that was held for this command goes with it, and its pages too.
            let can_go_on = args.keys.len() == 1 && options.snapshot.is_none();
            more = next.map(|page| if can_go_on { More::Page(page) } else { More::Elsewhere });
        }
        printer.end(more, &[])?;
        return Ok(0);
    }
    if args.raw {
        let read = store.get(&args.keys[0], options, cluster.deadline()).await?;
        return match read.value {
            Some(entry) => stream(&entry.value).map(|()| 0),
            None => {
                eprintln!("lake: there is no key {:?}", args.keys[0]);
                Ok(EXIT_NO)
            }
        };
    }
    let mut printer = Printer::begin(args.format.format, Detail::Value)?;
    let mut missing = Vec::new();
    for keys in args.keys.chunks(MAX_BATCH_GET_KEYS) {
        let read = store.batch_get(keys, options, cluster.deadline()).await?;
        missing.extend(keys.iter().filter(|key| read.value.iter().all(|entry| entry.key != **key)).cloned());
        match args.format.format {
            Format::Json => printer.entries(read.revision, &read.value)?,
            Format::Table => stream(read.value.iter().map(whole).collect::<Vec<_>>().join("\n").as_bytes())?,
        }
    }
    printer.end(None, &missing)?;
    Ok(if missing.is_empty() { 0 } else { EXIT_NO })
}

/// An entry with all of its value, for people.
fn whole(entry: &KeyValue) -> String {
    format!(
        "key       {}\nvalue     {}\nrevision  {}\ncreated   {}\nversion   {}\nlease     {}\n",
        escaped(&entry.key),
        shown(&entry.value),
        entry.mod_revision,
        entry.create_revision,
        entry.version,
        or_dash(entry.lease),
    )
}
