//! What a run is asked for.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::hosts::{FAULTS, verbs};
use super::recorder::MAX_OPERATIONS;
use crate::history::Workload;
use crate::hosts::Hosts;
use crate::nemesis::kind::{Kind, Requested};
use crate::sql::Front;
use crate::workload::rest::{MAX_REST_CLIENTS, Rest};
use crate::{Error, IoContext, Result};

/// Most peers of a run.
pub const MAX_PEERS: u64 = 9;
/// Most query nodes.
pub const MAX_QUERY_NODES: u64 = 8;
/// Most clients.
pub const MAX_CLIENTS: usize = 200;
/// Most operations per second, all clients together.
pub const MAX_RATE: f64 = 20_000.0;
/// Longest run.
pub const MAX_TIME: Duration = Duration::from_secs(3600);

/// Where peers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On loopback, behind proxies of this process.
    Loopback,
    /// Each in a network namespace of its own. This process must have been started in one
    /// ([`crate::net::namespaces::is_private`]).
    Namespaces,
}

/// An S3 service, which query nodes reach by a way that can be hurt. What else they need to know of it is among their arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStore {
    /// `s3://BUCKET/PREFIX`.
    pub warehouse: String,
    /// Where it listens, without TLS: `HOST:PORT`.
    pub address: String,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The `lake` binary.
    pub binary: PathBuf,
    /// The run's directory, absolute; made, and empty before.
    pub out: PathBuf,
    pub place: Place,
    pub peers: u64,
    pub query_nodes: u64,
    /// Where tables live, if not in the run's directory.
    pub objects: Option<ObjectStore>,
    /// A cluster that is there already, and the id that it must have; then peers and query nodes are those.
    pub hosts: Option<(Hosts, String)>,
    /// How query nodes are spoken to; workloads that speak SQL need it.
    pub front: Option<Arc<dyn Front>>,
    pub workload: Workload,
    /// None: nothing is hurt.
    pub nemeses: Vec<Requested>,
    /// How long clients are at it.
    pub time: Duration,
    /// Operations per second, all clients together.
    pub rate: f64,
    pub clients: usize,
    /// How some of them go through REST; where, the run knows.
    pub rest: Option<Rest>,
    /// What the plan of faults and the clients' choices follow from.
    pub seed: u64,
    /// How long one operation may take.
    pub operation_timeout: Duration,
    /// More arguments for every peer.
    pub metasrv_args: Vec<String>,
    /// More arguments for every query node.
    pub query_args: Vec<String>,
}

impl Settings {
    /// Checks the limits.
    ///
    /// # Errors
    /// Names what is beyond which limit.
    pub fn validate(&self) -> Result<(), String> {
        self.hosts.as_ref().map_or(Ok(()), |(hosts, _)| self.validate_on(hosts))?;
        let checks = [
            ((1..=MAX_PEERS).contains(&self.peers), format!("a run has 1 to {MAX_PEERS} peers, not {}", self.peers)),
            (
                self.query_nodes <= MAX_QUERY_NODES,
                format!("a run has up to {MAX_QUERY_NODES} query nodes, not {}", self.query_nodes),
            ),
            (
                !self.workload.is_sql() || (self.query_nodes > 0 && self.front.is_some()),
                format!("the workload {} speaks SQL: it needs query nodes, and a lake with SQL", self.workload),
            ),
            (
                self.query_nodes == 0 || self.place == Place::Loopback,
                "query nodes run beside peers on loopback only: ask for --cluster local:N".to_owned(),
            ),
            (
                self.query_nodes > 0 || !self.nemeses.iter().any(|asked| asked.kind.is_of_query_nodes()),
                "there is no query node that could be hurt: ask for some, as with --query-nodes 2".to_owned(),
            ),
            (
                self.objects.is_some() || !self.nemeses.iter().any(|asked| asked.kind.is_of_the_store()),
                "there is no object store that could be hurt: ask for one, with --warehouse s3://BUCKET/PREFIX and --s3-endpoint"
                    .to_owned(),
            ),
            (
                self.objects.is_none() || (self.query_nodes > 0 && self.hosts.is_none()),
                "only query nodes of local:N go to an object store: ask for some, as with --query-nodes 2".to_owned(),
            ),
            (
                (1..=MAX_CLIENTS).contains(&self.clients),
                format!("a run has 1 to {MAX_CLIENTS} clients, not {}", self.clients),
            ),
            (
                self.rest.is_none() || self.workload == Workload::Table,
                format!("only clients of the workload table go through REST, not those of {}", self.workload),
            ),
            (
                self.rest.as_ref().is_none_or(|rest| (1..=MAX_REST_CLIENTS.min(self.clients)).contains(&rest.clients)),
                format!("of the clients up to {MAX_REST_CLIENTS} go through REST, and no more than there are"),
            ),
            (
                self.rate > 0.0 && self.rate <= MAX_RATE,
                format!("a run makes up to {MAX_RATE} operations per second, not {}", self.rate),
            ),
            (
                self.time >= Duration::from_secs(1) && self.time <= MAX_TIME,
                format!("a run takes 1 to {} s, not {}", MAX_TIME.as_secs(), self.time.as_secs_f64()),
            ),
            (
                2.0 * self.rate * self.time.as_secs_f64() <= MAX_OPERATIONS as f64,
                format!(
                    "{} operations per second for {} s are more than the {} that one history holds: ask for less",
                    self.rate,
                    self.time.as_secs_f64(),
                    MAX_OPERATIONS / 2
                ),
            ),
        ];
        checks.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, problem)| Err(problem))
    }

    /// Checks what cannot be had on an existing cluster.
    fn validate_on(&self, hosts: &Hosts) -> Result<(), String> {
        if self.rest.is_some() {
            return Err(
                "clients through REST are of local:N: the file of hosts does not say where query nodes serve it"
                    .to_owned(),
            );
        }
        if !self.metasrv_args.is_empty() || !self.query_args.is_empty() {
            return Err(
                "processes on hosts are started by your own commands: give them their arguments there".to_owned()
            );
        }
        if self.workload == Workload::Upkeep && self.nemeses.iter().any(|asked| asked.kind == Kind::Clock) {
            return Err("upkeep goes by the clocks of query nodes, which may be those of peers on the same host: clock is not to be had with it"
                .to_owned());
        }
        for asked in &self.nemeses {
            let (verbs, _) = verbs(asked).ok_or_else(|| format!("on hosts there is no {asked}; there are {FAULTS}"))?;
            if let Some(verb) = verbs.iter().find(|verb| !hosts.can(**verb)) {
                return Err(format!("{asked} takes a command {}, which the file of hosts does not have", verb.name()));
            }
        }
        Ok(())
    }

    /// Makes the run's directory.
    ///
    /// # Errors
    /// There is something in it.
    pub fn make_directory(&self) -> Result<()> {
        let logs = self.out.join("logs");
        let doing = || format!("making the run's directory {}", self.out.display());
        let taken = self.out.exists() && std::fs::read_dir(&self.out).doing(doing)?.next().is_some();
        if taken {
            let problem = "is not empty: choose another directory for this run, or remove what is in it".to_owned();
            return Err(Error::Directory { dir: self.out.clone(), problem });
        }
        std::fs::create_dir_all(&logs).doing(doing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::access::Roster;

    #[test]
    fn what_one_history_cannot_hold_is_refused_before_it_begins() {
        let settings = Settings {
            binary: "lake".into(),
            out: "run".into(),
            place: Place::Loopback,
            peers: 3,
            query_nodes: 0,
            objects: None,
            hosts: None,
            front: None,
            workload: Workload::Register,
            nemeses: vec![],
            time: Duration::from_secs(3600),
            rate: 500.0,
            clients: 10,
            rest: None,
            seed: 1,
            operation_timeout: Duration::from_secs(3),
            metasrv_args: vec![],
            query_args: vec![],
        };
        assert_eq!(settings.validate(), Ok(()));
        let much = Settings { rate: 600.0, ..settings.clone() };
        assert!(much.validate().unwrap_err().contains("one history holds"));
        let hurts = Settings { nemeses: vec!["query-kill".parse().unwrap()], ..settings.clone() };
        assert!(hurts.validate().unwrap_err().contains("no query node"));
        assert_eq!(Settings { query_nodes: 2, ..hurts }.validate(), Ok(()));
        let stored = Settings { nemeses: vec!["store-late".parse().unwrap()], query_nodes: 2, ..settings.clone() };
        assert!(stored.validate().unwrap_err().contains("no object store"));
        let store = ObjectStore { warehouse: "s3://b/w".into(), address: "127.0.0.1:9".into() };
        assert_eq!(Settings { objects: Some(store), ..stored }.validate(), Ok(()));
        let apart = Settings { query_nodes: 2, place: Place::Namespaces, ..settings.clone() };
        assert!(apart.validate().unwrap_err().contains("local:N"));
        let rest = Rest { python: "python3".into(), clients: 2, nodes: Roster::default() };
        let others = Settings { rest: Some(rest), ..settings.clone() };
        assert!(others.validate().unwrap_err().contains("only clients of the workload table"));
        let nobody = Settings { clients: 0, ..settings };
        assert!(nobody.validate().unwrap_err().contains("clients"));
    }
}
