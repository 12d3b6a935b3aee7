//! How a peer is configured: [`Options`] as they are written, [`Config`] as it is used.
//!
//! Order of precedence: flags, then environment, then the TOML file, then defaults. [`Config::load`] puts them together
//! and rejects wrong values, and values that contradict each other, with the field's name.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use lake_client::nodes::Rhythm;
use lake_client::remote::MAX_ENDPOINTS;
use lake_client::secret::Secret;
use lake_client::shards::{MAX_FOLLOWERS, MAX_SHARDS};
use serde::Deserialize;

use crate::files::FreeSpace;
use crate::peer::placement::Placement;
use crate::peer::placement::selector::Selector;
use crate::peer::procedures::machine::Pace;
use crate::state::FEATURE_LEVEL;

/// The environment variable that may hold the cluster secret itself, instead of a file.
pub const SECRET_VARIABLE: &str = "LAKE_METASRV_SECRET";
/// How long the pages of a listing are held after the last one was asked for, and snapshots that callers open.
pub const PAGE_LIFE: Duration = Duration::from_secs(60);

/// A peer's options as flags, environment variables and TOML give them. All are optional here.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// A TOML file with these options (flags and environment variables win over it)
    #[arg(long, env = "LAKE_METASRV_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// The peer's id: a number above 0, never used before in this cluster
    #[arg(long, env = "LAKE_METASRV_ID")]
    pub id: Option<u64>,
    /// The data directory
    #[arg(long, env = "LAKE_METASRV_DIR", value_name = "PATH")]
    pub dir: Option<PathBuf>,
    /// Where to listen for clients [default: 127.0.0.1:9191]
    #[arg(long, env = "LAKE_METASRV_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Where to listen for the other peers [default: 127.0.0.1:9192]
    #[arg(long, env = "LAKE_METASRV_RAFT_LISTEN", value_name = "HOST:PORT")]
    pub raft_listen: Option<String>,
    /// Where to listen for probes and Prometheus: /live, /ready, /metrics [default: nowhere]
    #[arg(long, env = "LAKE_METASRV_HTTP_LISTEN", value_name = "HOST:PORT")]
    pub http_listen: Option<String>,
    /// Where clients reach this peer [default: the address it listens on]
    #[arg(long, env = "LAKE_METASRV_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// Where the other peers reach this peer [default: the address it listens on]
    #[arg(long, env = "LAKE_METASRV_RAFT_ADVERTISE", value_name = "HOST:PORT")]
    pub raft_advertise: Option<String>,
    /// Where to reach other peers, if not where the membership says: 1=host:port,2=host:port
    #[arg(long, env = "LAKE_METASRV_PEERS", value_name = "ID=HOST:PORT,...")]
    pub peers: Option<String>,
    /// Ask to join the cluster that these peers belong to, if this one is fresh: addresses for clients, of any of them
    #[arg(long, env = "LAKE_METASRV_JOIN", value_delimiter = ',', value_name = "HOST:PORT,...")]
    #[serde(default)]
    pub join: Vec<String>,
    /// A file that holds the cluster secret
    #[arg(long, env = "LAKE_METASRV_SECRET_FILE", value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Listen on other addresses than loopback without a cluster secret
    #[arg(long, env = "LAKE_METASRV_INSECURE_OPEN_NETWORK", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub insecure_open_network: Option<bool>,
    /// How often a leader sends heartbeats, in milliseconds [default: 80]
    #[arg(long, env = "LAKE_METASRV_HEARTBEAT_MS", value_name = "MS")]
    pub heartbeat_ms: Option<u64>,
    /// Shortest wait before an election, behind the leader's lease, in milliseconds [default: 200]
    #[arg(long, env = "LAKE_METASRV_ELECTION_TIMEOUT_MIN_MS", value_name = "MS")]
    pub election_timeout_min_ms: Option<u64>,
    /// Longest wait before an election, and the length of the leader's lease, in milliseconds [default: 320]
    #[arg(long, env = "LAKE_METASRV_ELECTION_TIMEOUT_MAX_MS", value_name = "MS")]
    pub election_timeout_max_ms: Option<u64>,
    /// A snapshot is taken after this many log entries, once they have cost a quarter of what it would [default: 100000]
    #[arg(long, env = "LAKE_METASRV_SNAPSHOT_ENTRIES", value_name = "N")]
    pub snapshot_entries: Option<u64>,
    /// The same after this many bytes of log entries [default: 67108864]
    #[arg(long, env = "LAKE_METASRV_SNAPSHOT_BYTES", value_name = "BYTES")]
    pub snapshot_bytes: Option<u64>,
    /// Log entries kept behind a snapshot, for followers that are a little late, up to 32 MiB of them [default: 10000]
    #[arg(long, env = "LAKE_METASRV_PURGE_MARGIN_ENTRIES", value_name = "N")]
    pub purge_margin_entries: Option<u64>,
    /// Below this many free bytes on the disk nothing is written [default: 67108864]
    #[arg(long, env = "LAKE_METASRV_DISK_RESERVE_BYTES", value_name = "BYTES")]
    pub disk_reserve_bytes: Option<u64>,
    /// Size of each half of the journal, which is written in full when a data directory is made [default: 8388608]
    #[arg(long, env = "LAKE_METASRV_JOURNAL_BYTES", value_name = "BYTES")]
    pub journal_bytes: Option<u64>,
    /// How often query nodes send heartbeats to the leader, in milliseconds [default: 3000]
    #[arg(long, env = "LAKE_METASRV_NODE_HEARTBEAT_MS", value_name = "MS")]
    pub node_heartbeat_ms: Option<u64>,
    /// How long a query node may be silent before what it owns is another's, in milliseconds [default: 10000]
    #[arg(long, env = "LAKE_METASRV_NODE_LEASE_MS", value_name = "MS")]
    pub node_lease_ms: Option<u64>,
    /// How long the files of a table that was dropped with PURGE are kept, in seconds [default: 86400]
    #[arg(long, env = "LAKE_METASRV_PURGE_RETENTION_SECS", value_name = "SECS")]
    pub purge_retention_secs: Option<u64>,
    /// How many shards a cluster gets with its first worker; it keeps them [default: 64]
    #[arg(long, env = "LAKE_METASRV_SHARDS", value_name = "N")]
    pub shards: Option<u32>,
    /// Followers of each shard: workers that take it over first [default: 1]
    #[arg(long, env = "LAKE_METASRV_SHARD_FOLLOWERS", value_name = "N")]
    pub shard_followers: Option<usize>,
    /// Which worker gets a shard [default: load]
    #[arg(long, env = "LAKE_METASRV_SHARD_SELECTOR", value_name = "SELECTOR")]
    pub shard_selector: Option<Selector>,
}

/// Smallest half of a journal: about fifteen small batches.
pub const JOURNAL_BYTES_MIN: u64 = 64 << 10;
/// Largest half of a journal: all that is in it is read, and given to the log, at a start.
pub const JOURNAL_BYTES_MAX: u64 = 256 << 20;

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{field}: {problem}")]
    Field { field: &'static str, problem: String },
    #[error("the configuration file {}: {problem}", .path.display())]
    File { path: PathBuf, problem: String },
}

fn wrong(field: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Field { field, problem: problem.into() }
}

/// A checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub id: u64,
    pub dir: PathBuf,
    pub listen: SocketAddr,
    pub raft_listen: SocketAddr,
    pub http_listen: Option<SocketAddr>,
    /// `None`: the address that is bound.
    pub advertise: Option<String>,
    pub raft_advertise: Option<String>,
    /// Raft addresses that win over those of the membership.
    pub peers: HashMap<u64, String>,
    /// Peers of the cluster that this one asks to join while it is fresh; empty: it waits.
    pub join: Vec<String>,
    pub secret: Option<Secret>,
    pub insecure_open_network: bool,
    pub timing: Timing,
    pub storage: StorageConfig,
    /// The times that query nodes keep.
    pub rhythm: Rhythm,
    /// The times that procedures keep.
    pub pace: Pace,
    /// How shards are placed.
    pub placement: Placement,
    /// As [`PAGE_LIFE`]. No option: a seam for tests, as is the next.
    pub page_life: Duration,
    pub free_space: FreeSpace,
    /// The highest feature level that the peer says it can apply. No option either.
    pub feature_level: u32,
}

/// Raft's clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub heartbeat: Duration,
    /// A follower that hears nothing for `election_timeout_max` (the leader's lease) waits for a random time between the
    /// two and then stands for election.
    pub election_timeout_min: Duration,
    pub election_timeout_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(80),
            election_timeout_min: Duration::from_millis(200),
            election_timeout_max: Duration::from_millis(320),
        }
    }
}

/// When snapshots are taken, and how much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageConfig {
    pub snapshot_entries: u64,
    pub snapshot_bytes: u64,
    pub purge_margin_entries: u64,
    pub disk_reserve_bytes: u64,
    /// Size of each half of the journal of a directory that is made.
    pub journal_bytes: u64,
}

impl Default for StorageConfig {
    fn default() -> Self {
        Self {
            snapshot_entries: 100_000,
            snapshot_bytes: 64 << 20,
            purge_margin_entries: 10_000,
            disk_reserve_bytes: 64 << 20,
            journal_bytes: 8 << 20,
        }
    }
}

impl Options {
    /// Reads options from TOML.
    ///
    /// # Errors
    /// When it is not TOML, or names an option that there is not.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|e| e.to_string())
    }

    /// These options, and where they say nothing, those of `base`.
    #[must_use]
    pub fn over(self, base: Options) -> Options {
        Options {
            config: self.config.or(base.config),
            id: self.id.or(base.id),
            dir: self.dir.or(base.dir),
            listen: self.listen.or(base.listen),
            raft_listen: self.raft_listen.or(base.raft_listen),
            http_listen: self.http_listen.or(base.http_listen),
            advertise: self.advertise.or(base.advertise),
            raft_advertise: self.raft_advertise.or(base.raft_advertise),
            peers: self.peers.or(base.peers),
            join: if self.join.is_empty() { base.join } else { self.join },
            secret_file: self.secret_file.or(base.secret_file),
            insecure_open_network: self.insecure_open_network.or(base.insecure_open_network),
            heartbeat_ms: self.heartbeat_ms.or(base.heartbeat_ms),
            election_timeout_min_ms: self.election_timeout_min_ms.or(base.election_timeout_min_ms),
            election_timeout_max_ms: self.election_timeout_max_ms.or(base.election_timeout_max_ms),
            snapshot_entries: self.snapshot_entries.or(base.snapshot_entries),
            snapshot_bytes: self.snapshot_bytes.or(base.snapshot_bytes),
            purge_margin_entries: self.purge_margin_entries.or(base.purge_margin_entries),
            disk_reserve_bytes: self.disk_reserve_bytes.or(base.disk_reserve_bytes),
            journal_bytes: self.journal_bytes.or(base.journal_bytes),
            node_heartbeat_ms: self.node_heartbeat_ms.or(base.node_heartbeat_ms),
            node_lease_ms: self.node_lease_ms.or(base.node_lease_ms),
            purge_retention_secs: self.purge_retention_secs.or(base.purge_retention_secs),
            shards: self.shards.or(base.shards),
            shard_followers: self.shard_followers.or(base.shard_followers),
            shard_selector: self.shard_selector.or(base.shard_selector),
        }
    }
}

impl Config {
    /// A configuration with defaults: loopback, free ports.
    pub fn new(id: u64, dir: impl Into<PathBuf>) -> Self {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            id,
            dir: dir.into(),
            listen: any_port,
            raft_listen: any_port,
            http_listen: None,
            advertise: None,
            raft_advertise: None,
            peers: HashMap::new(),
            join: Vec::new(),
            secret: None,
            insecure_open_network: false,
            timing: Timing::default(),
            storage: StorageConfig::default(),
            rhythm: Rhythm::default(),
            pace: Pace::default(),
            placement: Placement::default(),
            page_life: PAGE_LIFE,
            free_space: FreeSpace::default(),
            feature_level: FEATURE_LEVEL,
        }
    }

    /// Puts flags and environment (already in `options`), the TOML file they name, and defaults together, and checks
    /// the result. The secret is read from its file, or from [`SECRET_VARIABLE`].
    ///
    /// # Errors
    /// Names the field or the file.
    pub fn load(options: Options) -> Result<Self, ConfigError> {
        let options = match options.config.clone() {
            None => options,
            Some(path) => {
                let problem = |problem: String| ConfigError::File { path: path.clone(), problem };
                let text = std::fs::read_to_string(&path).map_err(|e| problem(e.to_string()))?;
                options.over(Options::from_toml(&text).map_err(problem)?)
            }
        };
        let secret = match (&options.secret_file, std::env::var(SECRET_VARIABLE)) {
            (Some(path), _) => Some(Secret::from_file(path).map_err(|e| wrong("secret_file", e))?),
            (None, Ok(text)) => Some(Secret::new(text.trim()).map_err(|e| wrong(SECRET_VARIABLE, e))?),
            (None, Err(_)) => None,
        };
        let timing = Timing::default();
        let storage = StorageConfig::default();
        let rhythm = Rhythm::default();
        let placement = Placement::default();
        let millis = |value: Option<u64>, default: Duration| value.map_or(default, Duration::from_millis);
        let config = Self {
            id: options.id.ok_or_else(|| wrong("id", "every peer needs one, a number above 0"))?,
            dir: options.dir.ok_or_else(|| wrong("dir", "say where the peer keeps its data"))?,
            listen: address("listen", options.listen.as_deref().unwrap_or("127.0.0.1:9191"))?,
            raft_listen: address("raft_listen", options.raft_listen.as_deref().unwrap_or("127.0.0.1:9192"))?,
            http_listen: options.http_listen.as_deref().map(|listen| address("http_listen", listen)).transpose()?,
            advertise: options.advertise,
            raft_advertise: options.raft_advertise,
            peers: options.peers.as_deref().map_or(Ok(HashMap::new()), parse_peers)?,
            join: options.join,
            secret,
            insecure_open_network: options.insecure_open_network.unwrap_or(false),
            timing: Timing {
                heartbeat: millis(options.heartbeat_ms, timing.heartbeat),
                election_timeout_min: millis(options.election_timeout_min_ms, timing.election_timeout_min),
                election_timeout_max: millis(options.election_timeout_max_ms, timing.election_timeout_max),
            },
            storage: StorageConfig {
                snapshot_entries: options.snapshot_entries.unwrap_or(storage.snapshot_entries),
                snapshot_bytes: options.snapshot_bytes.unwrap_or(storage.snapshot_bytes),
                purge_margin_entries: options.purge_margin_entries.unwrap_or(storage.purge_margin_entries),
                disk_reserve_bytes: options.disk_reserve_bytes.unwrap_or(storage.disk_reserve_bytes),
                journal_bytes: options.journal_bytes.unwrap_or(storage.journal_bytes),
            },
            rhythm: Rhythm {
                interval: millis(options.node_heartbeat_ms, rhythm.interval),
                lease: millis(options.node_lease_ms, rhythm.lease),
            },
            pace: options.purge_retention_secs.map_or_else(Pace::default, Pace::retaining),
            placement: Placement {
                shards: options.shards.unwrap_or(placement.shards),
                followers: options.shard_followers.unwrap_or(placement.followers),
                selector: options.shard_selector.unwrap_or(placement.selector),
            },
            page_life: PAGE_LIFE,
            free_space: FreeSpace::default(),
            feature_level: FEATURE_LEVEL,
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks what must hold between the fields.
    ///
    /// # Errors
    /// Names the field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.id == 0 {
            return Err(wrong("id", "must be above 0"));
        }
        let t = &self.timing;
        if t.heartbeat < Duration::from_millis(10) {
            return Err(wrong("heartbeat_ms", "must be at least 10"));
        }
        if t.election_timeout_min < t.heartbeat * 2 {
            return Err(wrong("election_timeout_min_ms", "must be at least twice heartbeat_ms"));
        }
        if t.election_timeout_max <= t.election_timeout_min {
            return Err(wrong("election_timeout_max_ms", "must be above election_timeout_min_ms"));
        }
        if t.election_timeout_max > Duration::from_secs(60) {
            return Err(wrong("election_timeout_max_ms", "must be at most 60000"));
        }
        if self.rhythm.interval < Rhythm::LEAST_INTERVAL {
            return Err(wrong("node_heartbeat_ms", format!("must be at least {}", Rhythm::LEAST_INTERVAL.as_millis())));
        }
        self.rhythm.check().map_err(|problem| wrong("node_lease_ms", problem))?;
        if self.pace.retention > Pace::LONGEST_RETENTION {
            let most = Pace::LONGEST_RETENTION.as_secs();
            return Err(wrong("purge_retention_secs", format!("must be at most {most}")));
        }
        if !(1..=MAX_SHARDS).contains(&self.placement.shards) {
            return Err(wrong("shards", format!("must be 1 to {MAX_SHARDS}")));
        }
        if self.placement.followers > MAX_FOLLOWERS {
            return Err(wrong("shard_followers", format!("must be at most {MAX_FOLLOWERS}")));
        }
        if self.storage.snapshot_entries == 0 {
            return Err(wrong("snapshot_entries", "must be above 0"));
        }
        if self.storage.snapshot_bytes < 1 << 20 {
            return Err(wrong("snapshot_bytes", "must be at least 1048576"));
        }
        if !(JOURNAL_BYTES_MIN..=JOURNAL_BYTES_MAX).contains(&self.storage.journal_bytes) {
            return Err(wrong("journal_bytes", format!("must be {JOURNAL_BYTES_MIN} to {JOURNAL_BYTES_MAX}")));
        }
        if self.join.len() > MAX_ENDPOINTS {
            return Err(wrong("join", format!("{} peers are named; {MAX_ENDPOINTS} can be", self.join.len())));
        }
        for endpoint in &self.join {
            check_host_port("join", endpoint)?;
        }
        let http = self.http_listen.map(|listen| ("http_listen", listen));
        let addresses = [("listen", self.listen), ("raft_listen", self.raft_listen)].into_iter().chain(http);
        for (field, listen) in addresses {
            if !listen.ip().is_loopback() && self.secret.is_none() && !self.insecure_open_network {
                let problem = format!(
                    "{listen} can be reached from other machines, and there is no cluster secret: give every peer the same \
                     secret_file, or say insecure_open_network if anyone on that network may read and change everything"
                );
                return Err(wrong(field, problem));
            }
        }
        for (field, advertise, listen) in
            [("advertise", &self.advertise, self.listen), ("raft_advertise", &self.raft_advertise, self.raft_listen)]
        {
            match advertise {
                Some(address) => check_host_port(field, address)?,
                None if listen.ip().is_unspecified() => {
                    return Err(wrong(
                        field,
                        format!("needed, because {listen} is not an address that others can use"),
                    ));
                }
                None => {}
            }
        }
        Ok(())
    }
}

fn address(field: &'static str, text: &str) -> Result<SocketAddr, ConfigError> {
    text.parse().map_err(|_| wrong(field, format!("{text:?} is not an IP address with a port, like 127.0.0.1:9191")))
}

fn check_host_port(field: &'static str, text: &str) -> Result<(), ConfigError> {
    let port =
        text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(port) if port > 0 => Ok(()),
        _ => Err(wrong(field, format!("{text:?} is not a host with a port, like meta1.example:9191"))),
    }
}

fn parse_peers(text: &str) -> Result<HashMap<u64, String>, ConfigError> {
    let mut peers = HashMap::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (id, address) = part
            .split_once('=')
            .and_then(|(id, address)| Some((id.trim().parse().ok()?, address.trim())))
            .ok_or_else(|| wrong("peers", format!("{part:?} is not an id, =, and an address, like 1=host:9192")))?;
        check_host_port("peers", address)?;
        if peers.insert(id, address.to_owned()).is_some() {
            return Err(wrong("peers", format!("peer {id} is there twice")));
        }
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimal() -> Options {
        Options { id: Some(1), dir: Some("d".into()), ..Options::default() }
    }

    fn error(options: Options) -> String {
        Config::load(options).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_loopback() {
        let config = Config::load(minimal()).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:9191");
        assert_eq!(config.raft_listen.to_string(), "127.0.0.1:9192");
        assert_eq!(config.timing, Timing::default());
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("peer.toml");
        std::fs::write(
            &file,
            "id = 7\nlisten = \"127.0.0.1:1\"\nheartbeat_ms = 50\npeers = \"1=a:1, 2=b:2\"\n\
             join = [\"a:3\", \"b:3\"]\n",
        )
        .unwrap();
        let flags = Options { config: Some(file.clone()), id: Some(1), dir: Some("d".into()), ..Options::default() };
        let config = Config::load(flags.clone()).unwrap();
        assert_eq!((config.id, config.listen.port()), (1, 1));
        assert_eq!(config.timing.heartbeat, Duration::from_millis(50));
        assert_eq!(config.peers[&2], "b:2");
        assert_eq!(config.join, ["a:3", "b:3"]);
        let flags_join = Options { join: vec!["c:3".into()], ..flags.clone() };
        assert_eq!(Config::load(flags_join).unwrap().join, ["c:3"]);

        std::fs::write(&file, "identity = 7\n").unwrap();
        let said = error(flags);
        assert!(said.contains("peer.toml") && said.contains("identity"), "{said}");
    }

    #[test]
    fn wrong_values_are_named() {
        let with = |change: fn(&mut Options)| {
            let mut options = minimal();
            change(&mut options);
            error(options)
        };
        assert!(error(Options::default()).starts_with("id:"));
        assert!(with(|o| o.id = Some(0)).starts_with("id:"));
        assert!(with(|o| o.dir = None).starts_with("dir:"));
        assert!(with(|o| o.listen = Some("localhost".into())).starts_with("listen:"));
        assert!(with(|o| o.advertise = Some("host".into())).starts_with("advertise:"));
        assert!(with(|o| o.peers = Some("1:2".into())).starts_with("peers:"));
        assert!(with(|o| o.join = vec!["host".into()]).starts_with("join:"));
        assert!(with(|o| o.heartbeat_ms = Some(300)).starts_with("election_timeout_min_ms:"));
        assert!(with(|o| o.election_timeout_max_ms = Some(100)).starts_with("election_timeout_max_ms:"));
        assert!(with(|o| o.node_heartbeat_ms = Some(50)).starts_with("node_heartbeat_ms:"));
        assert!(with(|o| o.node_heartbeat_ms = Some(4000)).starts_with("node_lease_ms:"));
        assert!(with(|o| o.node_lease_ms = Some(60_001)).starts_with("node_lease_ms:"));
        assert!(with(|o| o.purge_retention_secs = Some(u64::MAX)).starts_with("purge_retention_secs:"));
        assert!(with(|o| o.shards = Some(0)).starts_with("shards:"));
        assert!(with(|o| o.shards = Some(MAX_SHARDS + 1)).starts_with("shards:"));
        assert!(with(|o| o.shard_followers = Some(MAX_FOLLOWERS + 1)).starts_with("shard_followers:"));
        assert!(with(|o| o.snapshot_entries = Some(0)).starts_with("snapshot_entries:"));
        assert!(with(|o| o.journal_bytes = Some(4096)).starts_with("journal_bytes:"));
        assert!(with(|o| o.secret_file = Some("/does/not/exist".into())).starts_with("secret_file:"));
    }

    #[test]
    fn an_open_network_needs_a_secret_or_the_explicit_word() {
        let open = Options { listen: Some("0.0.0.0:9191".into()), advertise: Some("h:9191".into()), ..minimal() };
        assert!(error(open.clone()).starts_with("listen:"));
        assert!(Config::load(Options { insecure_open_network: Some(true), ..open.clone() }).is_ok());

        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "0123456789abcdef\n").unwrap();
        let config = Config::load(Options { secret_file: Some(file.clone()), ..open.clone() }).unwrap();
        assert_eq!(config.secret, Some(Secret::new("0123456789abcdef").unwrap()));
        assert!(!format!("{config:?}").contains("0123456789abcdef"), "a secret is never printed");
        assert!(
            error(Options { secret_file: Some(file.clone()), advertise: None, ..open.clone() })
                .starts_with("advertise:")
        );
        std::fs::write(&file, "short").unwrap();
        assert!(error(Options { secret_file: Some(file), ..open }).starts_with("secret_file:"));
    }
}
