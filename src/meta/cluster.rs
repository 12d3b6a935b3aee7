//! The cluster that a command talks to: where it is, how long it may take, which peer answers reads.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lake_chaos::Role;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use lake_client::store::{Consistency, MetaStore, ReadOptions};
use lake_proto::v1::status_response::Stage;

use super::peers;
use crate::endpoints::At;

/// How long a command may take unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Where the cluster is, and how long a command may take.
#[derive(Debug)]
pub struct Cluster {
    at: At,
    timeout: Option<Duration>,
    /// Made when a command first needs it.
    store: OnceLock<RemoteStore>,
}

impl Cluster {
    /// As the options say.
    pub fn new(at: At, timeout: Option<Duration>) -> Self {
        Self { at, timeout, store: OnceLock::new() }
    }

    /// Where peers are reached.
    ///
    /// # Errors
    /// None is known.
    pub fn endpoints(&self) -> Result<Vec<String>> {
        self.at.endpoints(Role::Metasrv)
    }

    /// The cluster's secret, if one is given.
    ///
    /// # Errors
    /// Its file cannot be read.
    pub fn secret(&self) -> Result<Option<Secret>> {
        self.at.secret()
    }

    /// The client's way to the cluster, one for all of a command.
    ///
    /// # Errors
    /// No endpoint is known, or one is none.
    pub fn store(&self) -> Result<RemoteStore> {
        if let Some(store) = self.store.get() {
            return Ok(store.clone());
        }
        let store = RemoteStore::connect(RemoteConfig { endpoints: self.endpoints()?, secret: self.secret()? })?;
        Ok(self.store.get_or_init(|| store).clone())
    }

    /// The command is over: what the cluster keeps for it ends as well, unless the cluster does not answer.
    pub async fn leave(&self) {
        if let Some(store) = self.store.get() {
            store.leave().await;
        }
    }

    /// How long the command may take, if that is not told.
    pub fn timeout_or(&self, usual: Duration) -> Duration {
        self.timeout.unwrap_or(usual)
    }

    /// When the command has to be done.
    pub fn deadline(&self) -> Instant {
        self.deadline_or(TIMEOUT)
    }

    /// The same for one that usually takes so long at most.
    pub fn deadline_or(&self, usual: Duration) -> Instant {
        Instant::now() + self.timeout_or(usual)
    }
}

/// How and where something is read.
#[derive(Debug, Clone, clap::Args)]
pub struct ReadArgs {
    /// How fresh the answer must be: linearizable (confirmed against a quorum), bounded:MS (confirmed at most so many
    /// milliseconds ago), or local (whatever a peer has applied)
    #[arg(long, value_name = "CONSISTENCY", default_value = "linearizable", value_parser = consistency)]
    consistency: Consistency,
    /// The peer that answers, by its id or as HOST:PORT [default: the leader; unless linearizable, the first that serves]
    #[arg(long, value_name = "PEER")]
    peer: Option<String>,
    /// Wait until the peer that answers has applied this revision
    #[arg(long, value_name = "REVISION", default_value_t = 0)]
    min_revision: u64,
}

impl ReadArgs {
    /// The store to read from, and how.
    ///
    /// # Errors
    /// The peer asked for cannot be found.
    pub async fn open(&self, cluster: &Cluster) -> Result<(RemoteStore, ReadOptions)> {
        let options =
            ReadOptions { consistency: self.consistency, min_revision: self.min_revision, ..ReadOptions::default() };
        let store = cluster.store()?;
        let store = match &self.peer {
            None if self.consistency == Consistency::Linearizable => store,
            None => match serving(cluster).await? {
                Some(endpoint) => store.reading_at(&endpoint)?,
                // None serves now: the leader is looked for until the time is up, and the error says what is missing.
                None => store,
            },
            Some(peer) => store.reading_at(&endpoint(cluster, peer).await?)?,
        };
        Ok((store, options))
    }
}

/// Reads from one state, which a peer holds meanwhile.
///
/// # Errors
/// As every read; SnapshotExpired if it takes longer than the state is held.
pub async fn of_one_state<T>(
    store: &RemoteStore,
    options: ReadOptions,
    deadline: Instant,
    read: impl AsyncFnOnce(ReadOptions) -> Result<T>,
) -> Result<T> {
    let snapshot = store.open_snapshot(options, deadline).await?.value;
    let read = read(ReadOptions::at(snapshot)).await;
    // One that is not closed ends by itself.
    let _ = store.close_snapshot(snapshot, deadline).await;
    read
}

fn consistency(text: &str) -> Result<Consistency, String> {
    match (text, text.strip_prefix("bounded:").map(str::parse)) {
        ("linearizable", _) => Ok(Consistency::Linearizable),
        ("local", _) => Ok(Consistency::Local),
        (_, Some(Ok(ms))) => Ok(Consistency::Bounded(Duration::from_millis(ms))),
        _ => Err("it is linearizable, bounded:MILLISECONDS, or local".to_owned()),
    }
}

/// A peer that serves, the first of those given if it does.
async fn serving(cluster: &Cluster) -> Result<Option<String>> {
    let endpoints = cluster.endpoints()?;
    let answers = peers::ask(endpoints, cluster.secret()?.as_ref()).await;
    let serves = |answer: &peers::Answer| answer.status.as_ref().is_ok_and(|s| s.stage() == Stage::Member);
    Ok(answers.into_iter().find(serves).map(|answer| answer.endpoint))
}

/// Where the peer that somebody names is reached.
async fn endpoint(cluster: &Cluster, peer: &str) -> Result<String> {
    if peer.contains(':') {
        return Ok(peer.to_owned());
    }
    let id: u64 = peer.parse().with_context(|| format!("--peer {peer}: neither a peer's id nor HOST:PORT"))?;
    let answers = peers::ask_all(cluster.endpoints()?, cluster.secret()?.as_ref()).await;
    match answers.iter().find(|answer| answer.id() == Some(id)) {
        Some(answer) => Ok(answer.endpoint.clone()),
        None => bail!("peer {id} does not answer, or is no member; `lake meta status` shows those that do"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consistencies_have_names() {
        assert_eq!(consistency("linearizable"), Ok(Consistency::Linearizable));
        assert_eq!(consistency("local"), Ok(Consistency::Local));
        assert_eq!(consistency("bounded:250"), Ok(Consistency::Bounded(Duration::from_millis(250))));
        for wrong in ["", "bounded", "bounded:", "bounded:-1", "Local", "bounded:1s"] {
            assert!(consistency(wrong).is_err(), "{wrong}");
        }
    }
}
