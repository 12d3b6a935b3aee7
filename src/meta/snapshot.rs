//! `lake meta snapshot`: the state of a running cluster in one file, and a new cluster from it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use lake_client::remote::snapshots;
use lake_client::secret::Secret;
use lake_client::store::Consistency;
use lake_metasrv::rescue::found::NewCluster;
use lake_metasrv::rescue::restore::restore;
use lake_metasrv::rescue::saved::{self, Saved, Writing};
use serde_json::{Value, json};

use super::cluster::{Cluster, TIMEOUT};
use super::output::{Format, print, print_json};
use super::summary::{rows, state_json};
use crate::columns::columns;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Save the state of the running cluster in a file; peers are asked one after the other until one has sent it
    #[command(after_help = "\
Each peer may take --timeout-secs to begin: it waits until it has applied what was acknowledged before.

Example:\n  lake meta snapshot save monday.snapshot")]
    Save {
        /// The file; nothing may be there yet
        file: PathBuf,
        /// Whatever the peer has applied, also if it has no majority behind it
        #[arg(long)]
        local: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Check a saved snapshot, whole, and print what is in it
    #[command(after_help = "Example:\n  lake meta snapshot show monday.snapshot --format json")]
    Show {
        /// The file
        file: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Make the data directory of a new cluster of one peer from a saved snapshot
    #[command(after_help = "Example:\n  lake meta snapshot restore monday.snapshot --dir /data/lake")]
    Restore {
        /// The file
        file: PathBuf,
        /// The new peer's data directory; nothing may be there yet
        #[arg(long, value_name = "PATH")]
        dir: PathBuf,
        /// The new peer's id
        #[arg(long, default_value_t = 1)]
        id: u64,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, clap::Args)]
pub struct Output {
    /// How it is printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl Command {
    /// Whether it makes nothing.
    pub fn only_reads(&self) -> bool {
        matches!(self, Self::Show { .. })
    }
}

/// Does what was asked.
///
/// # Errors
/// No peer sends the snapshot, the file cannot be used, or what is to be made exists or cannot be written.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Save { file, local, output } => {
            let consistency = if local { Consistency::Local } else { Consistency::Linearizable };
            let saved = save(cluster, consistency, &file).await?;
            tell(output.format, &file, &saved)?;
        }
        Command::Show { file, output } => {
            let path = file.clone();
            let saved = tokio::task::spawn_blocking(move || saved::read(&path)).await??;
            tell(output.format, &file, &saved)?;
        }
        Command::Restore { file, dir, id, output } => {
            let (saved, made) = restore(&file, &dir, id).await?;
            match output.format {
                Format::Table => print(&made_table(&saved.cluster_id, &made))?,
                Format::Json => print_json(&made_json(&saved.cluster_id, &made))?,
            }
            eprintln!("{}", next_steps(&made));
        }
    }
    Ok(0)
}

/// Saves from the first peer that sends all of it.
async fn save(cluster: &Cluster, consistency: Consistency, file: &Path) -> Result<Saved> {
    let secret = cluster.secret()?;
    let begin = cluster.timeout_or(TIMEOUT);
    let mut failures = Vec::new();
    for endpoint in &cluster.endpoints()? {
        // Made anew each time: what a peer began is of no use to the next.
        let writing = Writing::begin(file)?;
        match save_from(endpoint, secret.as_ref(), consistency, begin, writing).await? {
            Ok(saved) => return Ok(saved),
            Err(failure) => failures.push(failure),
        }
    }
    Err(anyhow!("no peer has sent its state; nothing was written:\n  {}", failures.join("\n  ")))
}

/// The outer error is this machine's, the inner one the peer's.
async fn save_from(
    endpoint: &str,
    secret: Option<&Secret>,
    consistency: Consistency,
    begin: Duration,
    mut writing: Writing,
) -> Result<Result<Saved, String>> {
    let mut saving = match snapshots::save(endpoint, secret, consistency, begin).await {
        Ok(saving) => saving,
        Err(e) => return Ok(Err(e.to_string())),
    };
    loop {
        match saving.next().await {
            Ok(Some(chunk)) => {
                writing = tokio::task::spawn_blocking(move || writing.add(&chunk).map(|()| writing)).await??;
            }
            Ok(None) => break,
            Err(e) => return Ok(Err(e.to_string())),
        }
    }
    match tokio::task::spawn_blocking(move || writing.finish()).await.context("checking what was saved")? {
        Ok(saved) => Ok(Ok(saved)),
        Err(lake_metasrv::Error::Saved { what, .. }) => {
            Ok(Err(format!("{endpoint}: what came is no snapshot: {what}")))
        }
        Err(e) => Err(e.into()),
    }
}

fn tell(format: Format, file: &Path, saved: &Saved) -> Result<()> {
    let state = saved.summary();
    match format {
        Format::Table => {
            let mut all = vec![
                ["file".to_owned(), format!("{} ({} bytes)", file.display(), saved.bytes)],
                ["cluster".to_owned(), saved.cluster_id.clone()],
            ];
            all.extend(rows(&state));
            print(&columns(all))
        }
        Format::Json => {
            let told = json!({
                "file": file,
                "file_bytes": saved.bytes,
                "cluster_id": saved.cluster_id,
                "state": state_json(&state),
            });
            print_json(&told)
        }
    }
}

/// A new cluster, and what it does not take over.
pub fn made_table(old_cluster: &str, made: &NewCluster) -> String {
    let dropped = made.dropped;
    let mut all = vec![
        ["directory".to_owned(), made.dir.display().to_string()],
        ["cluster".to_owned(), format!("{} (from {old_cluster})", made.cluster_id)],
        ["peer".to_owned(), made.peer_id.to_string()],
    ];
    all.extend(rows(&made.state));
    all.push([
        "dropped".to_owned(),
        format!(
            "{} sessions, {} leases with {} keys and {} scopes",
            dropped.sessions, dropped.leases, dropped.keys, dropped.scopes
        ),
    ]);
    columns(all)
}

/// The same as JSON.
pub fn made_json(old_cluster: &str, made: &NewCluster) -> Value {
    json!({
        "dir": made.dir,
        "cluster_id": made.cluster_id,
        "from_cluster_id": old_cluster,
        "peer_id": made.peer_id,
        "state": state_json(&made.state),
        "dropped": {
            "sessions": made.dropped.sessions,
            "leases": made.dropped.leases,
            "keys": made.dropped.keys,
            "scopes": made.dropped.scopes,
        },
    })
}

/// How a cluster that was made is started.
pub fn next_steps(made: &NewCluster) -> String {
    format!(
        "start it with `lake metasrv --id {} --dir {} ...`, and join fresh peers to it with `lake metasrv --join ...`",
        made.peer_id,
        made.dir.display()
    )
}
