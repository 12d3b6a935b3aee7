//! `lake meta proc`: what the leader does in steps, and what it has done lately.

use std::sync::Arc;

use anyhow::{Result, bail};
use lake_client::Catalog;
use lake_client::catalog::TableIdent;
use lake_client::procedures::calls::{self, Asked, Clear, Submitted};
use lake_client::procedures::upkeep::{What, of_table};
use lake_client::procedures::{Procedure, Record, State, validate_id};
use lake_metasrv::peer::procedures::kinds;
use serde_json::{Value, json};

use super::EXIT_NO;
use super::cluster::{Cluster, ReadArgs};
use super::output::{FormatArgs, escaped, moment};
use crate::columns::columns;

/// The commands of `lake meta proc`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The procedures that there are, and those that have ended lately
    List(ListArgs),
    /// All that is kept of one
    Show(ShowArgs),
    /// Have something done to a table's files and history
    Start(StartArgs),
    /// Wait until one has ended, or is poisoned
    Wait(WaitArgs),
    /// Have one not go on, if that can be
    Cancel(CancelArgs),
    /// Have a poisoned one go on, or end, once it was looked into
    Clear(ClearArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A procedure is `active` until it is `done`, has `failed` (nothing is in doubt), or was `cancelled`. One is `poisoned` if
what it has done outside of the metadata is in doubt: it keeps its scopes until it is cleared.

Exit codes: 0 none is poisoned, 3 one is.

Examples:
  lake meta proc list
  lake meta proc list --active --format json")]
pub struct ListArgs {
    /// Only those that have not ended
    #[arg(long)]
    active: bool,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 it is there, 3 there is none of this id.

Example:
  lake meta proc show purge-6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60-1742")]
pub struct ShowArgs {
    /// Its id
    id: String,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
A worker does what `CALL system.` does with its usual arguments (remove-orphan-files does remove them): the one that has the table's shard, if that is connected. It goes on
whoever has asked for it having gone; `wait` waits for it. Submitted again under the same id, a procedure is what it was.

Exit codes: 0 it is submitted, or would be with --dry-run, 3 there is no such table.

Examples:
  lake meta proc start remove-orphan-files sales.orders --dry-run
  lake meta proc start remove-orphan-files sales.orders")]
pub struct StartArgs {
    /// What is done
    what: WhatArg,
    /// To which table: its schema and its name
    table: String,
    /// The procedure's id, if not one of its own
    #[arg(long)]
    id: Option<String>,
    /// Only say what would be submitted
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WhatArg {
    ExpireSnapshots,
    RewriteDataFiles,
    RewriteManifests,
    RemoveOrphanFiles,
}

impl From<WhatArg> for What {
    fn from(what: WhatArg) -> Self {
        match what {
            WhatArg::ExpireSnapshots => What::ExpireSnapshots,
            WhatArg::RewriteDataFiles => What::RewriteDataFiles,
            WhatArg::RewriteManifests => What::RewriteManifests,
            WhatArg::RemoveOrphanFiles => What::RemoveOrphanFiles,
        }
    }
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 it is done, 3 it has ended otherwise, is poisoned, is not there, or was still active when the time was up.

Example:
  lake meta proc wait purge-6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60-1742 --timeout-secs 600")]
pub struct WaitArgs {
    /// Its id
    id: String,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
It is the leader who decides, by what was done already: the purge of a table can be cancelled until files are deleted.
The command waits until it has decided.

Exit codes: 0 it is cancelled, or would be with --dry-run, 3 it is not: it goes on, has ended, or is not there.

Examples:
  lake meta proc cancel purge-6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60-1742 --dry-run
  lake meta proc cancel purge-6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60-1742")]
pub struct CancelArgs {
    /// Its id
    id: String,
    /// Only say what the leader would decide
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Look into what its note says first, and at what it was about to do: `lake meta proc show`.

Exit codes: 0 cleared, or it would be with --dry-run, 3 it is not poisoned, or not there.

Example:
  lake meta proc clear purge-6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60-1742 --retry")]
pub struct ClearArgs {
    /// Its id
    id: String,
    #[command(flatten)]
    how: HowArgs,
    /// Only say what would come of it
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct HowArgs {
    /// It goes on with the step at which it stands
    #[arg(long)]
    retry: bool,
    /// It ends as failed, and its scopes go
    #[arg(long)]
    give_up: bool,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        match self {
            Self::List(_) | Self::Show(_) | Self::Wait(_) => true,
            Self::Start(args) => args.dry_run,
            Self::Cancel(args) => args.dry_run,
            Self::Clear(args) => args.dry_run,
        }
    }
}

/// Does what was asked.
///
/// # Errors
/// As every call.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::List(args) => list(cluster, args).await,
        Command::Show(args) => {
            let found = calls::get(&cluster.store()?, &args.id, cluster.deadline()).await?;
            tell(args.format, &args.id, found.as_ref(), found.is_some())
        }
        Command::Start(args) => start(cluster, args).await,
        Command::Wait(args) => {
            let found = calls::wait(&cluster.store()?, &args.id, cluster.deadline()).await?;
            let done = found.as_ref().is_some_and(|p| p.record.state == State::Done);
            tell(args.format, &args.id, found.as_ref(), done)
        }
        Command::Cancel(args) => cancel(cluster, args).await,
        Command::Clear(args) => {
            let how = if args.how.retry { Clear::Retry } else { Clear::GiveUp };
            if args.dry_run {
                return would(cluster, args.format, &args.id, |record| kinds::would_clear(record, how)).await;
            }
            let asked = calls::clear(&cluster.store()?, &args.id, how, cluster.deadline()).await?;
            let cleared = matches!(asked, Asked::Now(_));
            tell(args.format, &args.id, found(asked).as_ref(), cleared)
        }
    }
}

async fn list(cluster: &Cluster, args: ListArgs) -> Result<u8> {
    let (store, options) = args.read.open(cluster).await?;
    let read = calls::list(&store, options, cluster.deadline()).await?;
    let shown: Vec<&Procedure> = read.value.iter().filter(|p| !args.active || !p.record.state.is_ended()).collect();
    args.format.print(
        || table(&shown),
        || {
            let procedures: Value = shown.iter().map(|p| procedure_json(p)).collect();
            json!({ "revision": read.revision, "procedures": procedures })
        },
    )?;
    Ok(if read.value.iter().any(|p| p.record.state == State::Poisoned) { EXIT_NO } else { 0 })
}

async fn start(cluster: &Cluster, args: StartArgs) -> Result<u8> {
    let (store, deadline) = (cluster.store()?, cluster.deadline());
    let Some((namespace, name)) = args.table.rsplit_once('.') else {
        bail!("{:?} names no table: write its schema and its name, as in sales.orders", args.table);
    };
    let table = TableIdent::new(namespace.parse()?, name)?;
    let Some(pointer) = Catalog::new(Arc::new(store.clone())).load_table(&table, deadline).await? else {
        return args.format.answer(false, || format!("there is no table {}\n", escaped(&args.table)), || Value::Null);
    };
    let (usual, record) = of_table(args.what.into(), &table, pointer.value.uuid, calls::unix_ms());
    let id = args.id.unwrap_or(usual);
    validate_id(&id)?;
    if args.dry_run {
        let known = calls::get(&store, &id, deadline).await?;
        let told = || match &known {
            Some(known) => format!("it is there already, and nothing would be submitted\n{}", detail(known)),
            None => {
                let counts = match args.what {
                    WhatArg::RemoveOrphanFiles => "; which files would go, CALL system.remove_orphan_files counts",
                    _ => "",
                };
                format!("{} would be submitted as {}{counts}\n", escaped(&record.subject), escaped(&id))
            }
        };
        let uuid = pointer.value.uuid.to_string();
        let would = || json!({ "dry_run": true, "id": id, "would_submit": known.is_none(), "table_uuid": uuid });
        return args.format.answer(true, told, would);
    }
    let submitted = calls::submit(&store, &id, &record, deadline).await?;
    if let Submitted::Taken(scopes) = submitted {
        bail!("submitting {id}: {} scopes stand in its way; nothing was done", scopes.len());
    }
    let found = calls::get(&store, &id, deadline).await?;
    tell(args.format, &id, found.as_ref(), true)
}

/// Asks, and waits for what the leader says.
async fn cancel(cluster: &Cluster, args: CancelArgs) -> Result<u8> {
    if args.dry_run {
        return would(cluster, args.format, &args.id, kinds::would_cancel).await;
    }
    let (store, deadline) = (cluster.store()?, cluster.deadline());
    let mut seen = match calls::cancel(&store, &args.id, deadline).await? {
        Asked::Now(seen) => Some(*seen),
        other => found(other),
    };
    while seen.as_ref().is_some_and(|p| p.record.cancel && p.record.state == State::Active) {
        if std::time::Instant::now() >= deadline {
            bail!("procedure {} is asked to be cancelled, and no leader has decided about it yet", args.id);
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        seen = calls::get(&store, &args.id, deadline).await?;
    }
    let cancelled = seen.as_ref().is_some_and(|p| p.record.state == State::Cancelled);
    tell(args.format, &args.id, seen.as_ref(), cancelled)
}

/// Says what would come of a change of a procedure.
async fn would(
    cluster: &Cluster,
    format: FormatArgs,
    id: &str,
    judge: impl Fn(&Record) -> (bool, String),
) -> Result<u8> {
    let Some(procedure) = calls::get(&cluster.store()?, id, cluster.deadline()).await? else {
        return tell(format, id, None, false);
    };
    let (accepted, would) = judge(&procedure.record);
    let line =
        || format!("{}: {}: {would}\n", escaped(id), if accepted { "would be done" } else { "would not be done" });
    format.answer(accepted, line, || json!({ "dry_run": true, "id": id, "would_accept": accepted, "would": would }))
}

fn found(asked: Asked) -> Option<Procedure> {
    match asked {
        Asked::Now(procedure) | Asked::NotNow(procedure) => Some(*procedure),
        Asked::NotFound => None,
    }
}

/// Prints one, or that there is none.
fn tell(format: FormatArgs, id: &str, procedure: Option<&Procedure>, yes: bool) -> Result<u8> {
    format.answer(
        yes,
        || match procedure {
            Some(procedure) => detail(procedure),
            None => format!("there is no procedure {}, or none any more\n", escaped(id)),
        },
        || procedure.map_or(Value::Null, procedure_json),
    )
}

fn table(procedures: &[&Procedure]) -> String {
    let heading = ["ID", "KIND", "SUBJECT", "STATE", "STEP", "STEPS", "FAILURES", "CHANGED", "NOTE"];
    let mut rows = vec![heading.map(str::to_owned)];
    rows.extend(procedures.iter().map(|Procedure { id, record, .. }| {
        [
            escaped(id),
            escaped(&record.kind),
            escaped(&record.subject),
            record.state.as_str().to_owned(),
            escaped(&record.step),
            record.steps.to_string(),
            record.failures.to_string(),
            moment(record.changed_unix_ms),
            escaped(&record.note),
        ]
    }));
    columns(rows)
}

fn detail(procedure: &Procedure) -> String {
    let Procedure { id, record, mod_revision } = procedure;
    let lines = [
        ("id", escaped(id)),
        ("kind", escaped(&record.kind)),
        ("subject", escaped(&record.subject)),
        ("state", record.state.as_str().to_owned()),
        ("step", escaped(&record.step)),
        ("steps", record.steps.to_string()),
        ("failures", record.failures.to_string()),
        ("parent", record.parent.as_deref().map_or_else(|| "-".to_owned(), escaped)),
        ("scopes", if record.scopes.is_empty() { "-".to_owned() } else { escaped(&record.scopes.join(" ")) }),
        ("submitted", moment(record.submitted_unix_ms)),
        ("changed", moment(record.changed_unix_ms)),
        ("revision", mod_revision.to_string()),
        ("note", escaped(&record.note)),
        ("data", escaped(&record.data.to_string())),
    ];
    columns(lines.into_iter().map(|(name, value)| [name.to_owned(), value]).collect())
}

fn procedure_json(procedure: &Procedure) -> Value {
    let mut value = serde_json::to_value(&procedure.record).unwrap_or_default();
    if let Value::Object(object) = &mut value {
        object.insert("id".to_owned(), json!(procedure.id));
        object.insert("mod_revision".to_owned(), json!(procedure.mod_revision));
        object.insert("changed".to_owned(), json!(moment(procedure.record.changed_unix_ms)));
    }
    value
}
