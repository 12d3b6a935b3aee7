//! `lake standalone`: a query node with its metadata in the same process.
//!
//! ```text
//! <dir>/lock, cluster.json, sample.json, lake.log, warehouse     as with `lake up`
//! <dir>/metasrv-1      the embedded peer; `lake up` on the directory starts it as a process
//! <dir>/query-1        spill files
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lake_chaos::dirlock::DirLock;
use lake_chaos::manifest::{self, Entry};
use lake_chaos::{ProcessName, Role, ports};
use lake_metasrv::embedded::EmbeddedStore;
use lake_query::{Config, Options, QueryNode};

use crate::console::Console;
use crate::local::LocalArgs;
use crate::logging;
use crate::signals::{EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupts, Termination};

/// How long stopping waits for the node to leave the registry.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);

/// Options of `lake standalone`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    local: LocalArgs,
}

/// Runs until the user has had enough of it. Gives the exit code.
///
/// # Errors
/// The directory is in use or holds a larger cluster, the node does not start, the sample cannot be loaded.
pub async fn run(args: Args) -> Result<u8> {
    let mut interrupts = Interrupts::listen()?;
    let mut termination = Termination::listen()?;
    let dir = std::path::absolute(&args.local.dir)
        .with_context(|| format!("finding out the absolute path of {}", args.local.dir.display()))?;
    let _lock = DirLock::take(&dir)?;
    if dir.join(ProcessName::metasrv(2).to_string()).exists() {
        bail!(
            "{} holds a cluster of several metadata peers: start it with `lake up`, or choose another directory with --dir",
            dir.display()
        );
    }
    logging::start(&args.local.log, &dir)?;
    let store = EmbeddedStore::open(dir.join(ProcessName::metasrv(1).to_string())).await?;
    let outcome = with_store(&args.local, &dir, &store, &mut interrupts, &mut termination).await;
    store.shutdown().await;
    outcome
}

async fn with_store(
    args: &LocalArgs,
    dir: &Path,
    store: &std::sync::Arc<EmbeddedStore>,
    interrupts: &mut Interrupts,
    termination: &mut Termination,
) -> Result<u8> {
    let name = ProcessName::query(1);
    let flight = reserve_port(dir, name, "flight")?;
    let rest = reserve_port(dir, name, "rest")?;
    let options = Options {
        id: Some(name.to_string()),
        dir: Some(dir.join(name.to_string())),
        listen: Some(flight.loopback()),
        rest_listen: Some(rest.loopback()),
        warehouse: Some(format!("file://{}", dir.join("warehouse").display())),
        ..Options::default()
    };
    let node = tokio::select! {
        started = QueryNode::start(Config::new(options)?, store.clone()) => started?,
        () = interrupts.next() => return Ok(EXIT_INTERRUPTED),
        () = termination.next() => return Ok(EXIT_TERMINATED),
    };
    let worker = store.serve_node(&name.to_string(), node.as_node());
    let endpoint = node.flight_address().to_string();
    let entry = Entry {
        role: Role::Query,
        id: name.id,
        pid: Some(std::process::id()),
        log_file: dir.join(logging::FILE_NAME),
        data_dir: dir.to_owned(),
        addresses: BTreeMap::from([("flight".to_owned(), endpoint.clone()), ("rest".to_owned(), rest.loopback())]),
    };
    let outcome = match manifest::write(dir, std::slice::from_ref(&entry)) {
        Ok(()) => {
            let console = Console::default();
            let store_failed = store.failed();
            tokio::select! {
                outcome = args.serve(|| vec![entry.clone()], vec![endpoint], &console, interrupts) => outcome,
                () = termination.next() => Ok(if args.no_shell { 0 } else { EXIT_TERMINATED }),
                error = node.failed() => Err(error.into()),
                error = store_failed => Err(error.into()),
            }
        }
        Err(e) => Err(e.into()),
    };
    worker.leave(LEAVE_PATIENCE).await;
    node.shutdown().await;
    let down = manifest::write(dir, &[Entry { pid: None, ..entry }]);
    outcome.and_then(|code| Ok(down.map(|()| code)?))
}

/// The same port as last time for what is served, if it is free.
fn reserve_port(dir: &Path, name: ProcessName, service: &str) -> Result<ports::Port> {
    let previous = manifest::read(dir)?.unwrap_or_default();
    let address = previous.iter().find(|e| e.name() == name).and_then(|e| e.addresses.get(service));
    let number = address.and_then(|a| a.rsplit_once(':')?.1.parse().ok());
    let port = number.map(ports::reserve_exactly).transpose()?.flatten();
    Ok(port.map_or_else(ports::reserve, Ok)?)
}
