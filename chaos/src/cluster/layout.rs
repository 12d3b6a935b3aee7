//! What runs where: directories, ports, addresses, pids and command lines. Keeps `cluster.json`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{DEFAULT_PEERS, MAX_PROCESSES_PER_ROLE, Spec};
use crate::dirlock::DirLock;
use crate::manifest::Entry;
use crate::net::{Network, Node, namespaces};
use crate::ports::Port;
use crate::process::{Launch, ProcessName, Role};
use crate::{Error, IoContext, Result, manifest, ports};

/// The log of a child, in its directory.
const LOG_FILE: &str = "lake.log";
/// What a child writes to its standard output and error.
const OUTPUT_FILE: &str = "output.log";

/// Shared by the cluster and the tasks of its processes.
#[derive(Debug)]
pub(super) struct Layout {
    spec: Spec,
    /// Peers up to this id are founded together.
    founders: u64,
    places: Mutex<BTreeMap<ProcessName, Place>>,
    /// Held until the last process's task has ended.
    _lock: DirLock,
}

#[derive(Debug)]
struct Place {
    data_dir: PathBuf,
    /// Where this process reaches it.
    host: String,
    pid: Option<u32>,
    ports: BTreeMap<&'static str, Port>,
}

/// What a process of this role serves. The first is where clients go.
fn services(role: Role) -> &'static [&'static str] {
    match role {
        Role::Metasrv => &["grpc", "raft", "http"],
        Role::Query => &["flight", "rest"],
    }
}

/// How many peers to run: what the directory holds decides, if it holds any.
pub(super) fn peer_count(spec: &Spec) -> Result<u64> {
    let held = (1..=MAX_PROCESSES_PER_ROLE)
        .take_while(|id| spec.dir.join(ProcessName::metasrv(*id).to_string()).is_dir())
        .count() as u64;
    let wrong = |problem: String| Err(Error::Directory { dir: spec.dir.clone(), problem });
    match (spec.peers, held) {
        (Some(asked), _) if !(1..=MAX_PROCESSES_PER_ROLE).contains(&asked) => {
            wrong(format!("{asked} peers were asked for; 1 to {MAX_PROCESSES_PER_ROLE} can be"))
        }
        // Whoever prepares spare peers may have made their directories.
        (Some(asked), held) if ![0, asked, asked + spec.spare_peers].contains(&held) => wrong(format!(
            "holds a cluster of {held} metadata peers, and {asked} were asked for: start it with --peers {held}, or \
             choose another directory with --dir"
        )),
        (Some(asked), _) => Ok(asked),
        (None, 0) => Ok(DEFAULT_PEERS),
        (None, held) => Ok(held),
    }
}

impl Layout {
    pub(super) fn new(
        spec: Spec,
        names: impl Iterator<Item = ProcessName>,
        previous: &[Entry],
        lock: DirLock,
    ) -> Result<Self> {
        let mut places = BTreeMap::new();
        for name in names {
            let data_dir = spec.dir.join(name.to_string());
            fs::create_dir_all(&data_dir).doing(|| format!("making the directory {}", data_dir.display()))?;
            let before = previous.iter().find(|e| e.name() == name);
            let mut ports = BTreeMap::new();
            for service in services(name.role) {
                let port = match before.and_then(|e| port_of(e.addresses.get(*service)?)) {
                    Some(number) => ports::reserve_exactly(number)?,
                    None => None,
                };
                ports.insert(*service, port.map_or_else(ports::reserve, Ok)?);
            }
            let host = match spec.network {
                Some(Network::Namespaces(_)) if name.role == Role::Metasrv => namespaces::control_host(name.id),
                _ => Ipv4Addr::LOCALHOST.to_string(),
            };
            places.insert(name, Place { data_dir, host, pid: None, ports });
        }
        let peers = places.keys().filter(|name: &&ProcessName| name.role == Role::Metasrv).count() as u64;
        let founders = peers.saturating_sub(spec.spare_peers);
        let layout = Self { spec, founders, places: Mutex::new(places), _lock: lock };
        layout.write(&layout.places())?;
        layout.direct_links(&layout.places());
        Ok(layout)
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<ProcessName, Place>> {
        // What is under the lock is whole after each statement.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.places().iter().map(|(name, place)| place.entry(*name)).collect()
    }

    pub(super) fn entry(&self, name: ProcessName) -> Option<Entry> {
        self.places().get(&name).map(|place| place.entry(name))
    }

    pub(super) fn endpoints(&self, role: Role) -> Vec<String> {
        endpoints(&self.places(), role)
    }

    pub(super) fn endpoint(&self, name: ProcessName) -> Option<String> {
        self.places().get(&name).and_then(|place| place.address(services(name.role)[0]))
    }

    /// What the process wrote before it had a log, and its log.
    pub(super) fn logs(&self, name: ProcessName) -> [PathBuf; 2] {
        [self.output(name), self.spec.dir.join(name.to_string()).join(LOG_FILE)]
    }

    fn output(&self, name: ProcessName) -> PathBuf {
        match &self.spec.logs {
            Some(logs) => logs.join(format!("{name}.log")),
            None => self.spec.dir.join(name.to_string()).join(OUTPUT_FILE),
        }
    }

    pub(super) fn set_pid(&self, name: ProcessName, pid: Option<u32>) {
        let mut places = self.places();
        if let Some(place) = places.get_mut(&name) {
            place.pid = pid;
        }
        if let (Role::Query, Some(network)) = (name.role, &self.spec.network) {
            network.set_process(name.id, pid);
        }
        if let Err(error) = self.write(&places) {
            tracing::error!(%error, "cluster.json does not say what runs");
        }
    }

    /// Gives new ports to a process that is down, for those that somebody else has taken meanwhile. Says whether others
    /// have to be told; behind proxies they reach it where they did. Only the ports of this process's own network are known:
    /// in a namespace of its own nobody takes a peer's.
    pub(super) fn renew_taken_ports(&self, name: ProcessName) -> Result<bool> {
        let mut places = self.places();
        let Some(place) = places.get_mut(&name) else { return Err(Error::UnknownProcess(name)) };
        let mut moved = false;
        for port in place.ports.values_mut().filter(|p| !p.is_free()) {
            *port = ports::reserve()?;
            moved = true;
        }
        self.direct_links(&places);
        Ok(moved && self.spec.network.is_none())
    }

    /// Tells the network where the peers listen.
    fn direct_links(&self, places: &BTreeMap<ProcessName, Place>) {
        let Some(network) = &self.spec.network else { return };
        for (name, place) in places.iter().filter(|(name, _)| name.role == Role::Metasrv) {
            if let (Some(grpc), Some(raft)) = (place.address("grpc"), place.address("raft")) {
                network.set_targets(name.id, &grpc, &raft);
            }
        }
    }

    /// Whether the process is a peer that is started only when it is asked for.
    pub(super) fn is_spare(&self, name: ProcessName) -> bool {
        name.role == Role::Metasrv && name.id > self.founders
    }

    pub(super) fn launch(&self, name: ProcessName) -> Launch {
        let places = self.places();
        let dir = self.spec.dir.join(name.to_string());
        let mut args = match name.role {
            Role::Metasrv => self.metasrv_args(&places, name, &dir),
            Role::Query => {
                let file = || format!("file://{}", self.spec.dir.join("warehouse").display());
                let warehouse = self.spec.warehouse.clone().unwrap_or_else(file);
                let meta = self.peers_of_clients(&places);
                query_args(&places, name, &dir, &meta, &warehouse)
            }
        };
        args.push("--exit-with-parent".to_owned());
        if self.spec.logs.is_some() {
            args.push("--log-stderr".to_owned());
        }
        if let Some(level) = &self.spec.log_level {
            args.extend(["--log-level".to_owned(), level.clone()]);
        }
        args.extend_from_slice(match name.role {
            Role::Metasrv => &self.spec.metasrv_args,
            Role::Query => &self.spec.query_args,
        });
        let mut program = self.spec.binary.clone();
        if let (Some(Network::Namespaces(_)), Role::Metasrv) = (&self.spec.network, name.role) {
            let [enter, namespace, separator] = namespaces::enter(name.id);
            args.splice(0..0, [namespace, separator, program.display().to_string()]);
            program = enter.into();
        }
        Launch {
            program,
            args: args.into_iter().map(Into::into).collect(),
            env: match name.role {
                Role::Metasrv => &self.spec.metasrv_env,
                Role::Query => &self.spec.query_env,
            }
            .iter()
            .map(|(variable, value)| (variable.clone(), of_process(value, name.id)))
            .collect(),
            output: self.output(name),
            append: self.spec.logs.is_some(),
        }
    }

    /// Where whoever is no peer reaches the peers.
    fn peers_of_clients(&self, places: &BTreeMap<ProcessName, Place>) -> Vec<String> {
        let peers = places.iter().filter(|(name, _)| name.role == Role::Metasrv);
        let reached = peers.filter_map(|(name, place)| {
            let network = self.spec.network.as_ref();
            let through = network.and_then(|network| network.address(Node::Clients, Node::Peer(name.id)));
            through.or_else(|| place.address("grpc"))
        });
        reached.collect()
    }

    fn metasrv_args(&self, places: &BTreeMap<ProcessName, Place>, name: ProcessName, dir: &Path) -> Vec<String> {
        let network = self.spec.network.as_ref();
        let in_namespace = matches!(network, Some(Network::Namespaces(_)));
        let address = |service| {
            let place = places.get(&name)?;
            // In its namespace a peer has several addresses.
            if in_namespace {
                Some(format!("0.0.0.0:{}", place.ports.get(service)?.number()))
            } else {
                place.address(service)
            }
        };
        let address = |service| address(service).unwrap_or_default();
        let own = Node::Peer(name.id);
        let peers: Vec<String> = places
            .iter()
            .filter(|(name, _)| name.role == Role::Metasrv)
            .filter_map(|(name, place)| {
                let through = network.and_then(|network| network.address(own, Node::Peer(name.id)));
                Some(format!("{}={}", name.id, through.or_else(|| place.address("raft"))?))
            })
            .collect();
        let mut args = [
            "metasrv",
            "--id",
            &name.id.to_string(),
            "--dir",
            &dir.display().to_string(),
            "--listen",
            &address("grpc"),
            "--raft-listen",
            &address("raft"),
            "--http-listen",
            &address("http"),
            "--peers",
            &peers.join(","),
        ]
        .map(str::to_owned)
        .to_vec();
        if let Some(advertise) = network.and_then(|network| network.address(Node::Clients, own)) {
            args.extend(["--advertise".to_owned(), advertise]);
        }
        if let Some(advertise) = network.filter(|_| in_namespace).and_then(|network| network.address(own, own)) {
            args.extend(["--raft-advertise".to_owned(), advertise, "--insecure-open-network".to_owned()]);
        }
        if self.is_spare(name) {
            let known = places.iter().filter(|(other, _)| other.role == Role::Metasrv && other.id != name.id);
            let known = known.filter_map(|(other, place)| {
                let through = network.and_then(|network| network.address(Node::Clients, Node::Peer(other.id)));
                through.or_else(|| place.address("grpc"))
            });
            args.extend(["--join".to_owned(), known.collect::<Vec<_>>().join(",")]);
        }
        args
    }

    fn write(&self, places: &BTreeMap<ProcessName, Place>) -> Result<()> {
        let entries: Vec<Entry> = places.iter().map(|(name, place)| place.entry(*name)).collect();
        manifest::write(&self.spec.dir, &entries)
    }
}

impl Place {
    fn address(&self, service: &str) -> Option<String> {
        self.ports.get(service).map(|port| format!("{}:{}", self.host, port.number()))
    }

    fn entry(&self, name: ProcessName) -> Entry {
        Entry {
            role: name.role,
            id: name.id,
            pid: self.pid,
            log_file: self.data_dir.join(LOG_FILE),
            data_dir: self.data_dir.clone(),
            addresses: self.ports.keys().filter_map(|s| Some(((*s).to_owned(), self.address(s)?))).collect(),
        }
    }
}

fn endpoints(places: &BTreeMap<ProcessName, Place>, role: Role) -> Vec<String> {
    let of_role = places.iter().filter(|(name, _)| name.role == role);
    of_role.filter_map(|(_, place)| place.address(services(role)[0])).collect()
}

fn query_args(
    places: &BTreeMap<ProcessName, Place>,
    name: ProcessName,
    dir: &Path,
    meta: &[String],
    warehouse: &str,
) -> Vec<String> {
    let address = |service| places.get(&name).and_then(|p| p.address(service)).unwrap_or_default();
    [
        "query",
        "--id",
        &name.to_string(),
        "--dir",
        &dir.display().to_string(),
        "--listen",
        &address("flight"),
        "--rest-listen",
        &address("rest"),
        "--meta",
        &meta.join(","),
        "--warehouse",
        warehouse,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// A value in which `{id}` stands for the peer's id.
fn of_process(value: &OsStr, id: u64) -> OsString {
    value.to_str().map_or_else(|| value.to_owned(), |text| text.replace("{id}", &id.to_string()).into())
}

fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn layout(dir: &Path, previous: &[Entry]) -> Layout {
        let spec = Spec::new("/bin/lake", dir);
        let names = [ProcessName::metasrv(1), ProcessName::metasrv(2), ProcessName::query(1)];
        Layout::new(spec, names.into_iter(), previous, DirLock::take(dir).unwrap()).unwrap()
    }

    fn arguments(launch: &Launch) -> String {
        launch.args.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_same_ports_are_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        // In between somebody else may take one, which is rare.
        let again = (0..10).find_map(|_| {
            let first = layout(dir.path(), &[]).entries();
            assert_eq!(manifest::read(dir.path()).unwrap(), Some(first.clone()));
            let second = layout(dir.path(), &first);
            (second.entries() == first).then_some(second)
        });
        let second = again.expect("the ports of the first are taken by the second");
        second.set_pid(ProcessName::metasrv(2), Some(7));
        let written = manifest::read(dir.path()).unwrap().unwrap();
        assert_eq!(written.iter().map(|e| e.pid).collect::<Vec<_>>(), [None, Some(7), None]);
    }

    #[test]
    fn a_taken_port_is_renewed_and_everyone_is_told_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let layout = layout(dir.path(), &[]);
        let name = ProcessName::metasrv(1);
        let raft = layout.entry(name).unwrap().addresses["raft"].clone();
        assert!(!layout.renew_taken_ports(name).unwrap());
        let _somebody = TcpListener::bind(&raft).unwrap();
        assert!(layout.renew_taken_ports(name).unwrap());
        let renewed = layout.entry(name).unwrap().addresses["raft"].clone();
        assert_ne!(renewed, raft);
        let other = arguments(&layout.launch(ProcessName::metasrv(2)));
        assert!(other.contains(&format!("--peers 1={renewed},2=")), "{other}");
        let node = arguments(&layout.launch(ProcessName::query(1)));
        let peers = layout.endpoints(Role::Metasrv).join(",");
        assert!(node.contains(&format!("--meta {peers} --warehouse file://{}", dir.path().display())), "{node}");
        assert!(node.contains("--exit-with-parent"), "{node}");
    }

    #[test]
    fn the_directory_decides_how_many_peers_there_are() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = Spec::new("/bin/lake", dir.path());
        assert_eq!(peer_count(&spec).unwrap(), DEFAULT_PEERS);
        spec.peers = Some(0);
        assert!(peer_count(&spec).is_err());
        fs::create_dir(dir.path().join("metasrv-1")).unwrap();
        spec.peers = None;
        assert_eq!(peer_count(&spec).unwrap(), 1);
        spec.peers = Some(3);
        let message = peer_count(&spec).unwrap_err().to_string();
        assert!(message.contains("cluster of 1 metadata peers") && message.contains("--peers 1"), "{message}");
    }
}
