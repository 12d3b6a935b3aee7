//! Peers in network namespaces: each has addresses of its own, and what is wrong between them is done by the kernel to real
//! packets.
//!
//! ```text
//!   this process, in a network namespace of its own
//!     bridge lake-data 10.77.0.254 --- veth --- data 10.77.0.1   peer 1's namespace
//!        (peers and clients)      \--- veth --- data 10.77.0.2   peer 2's namespace
//!     bridge lake-ctl  10.77.1.254 --- veth --- ctl 10.77.1.1 ...   for this process's own questions: never hurt
//! ```
//! A path is cut, or loses packets, by rules of nftables in the namespace where it ends, which also count what they meet; it
//! is slow by `tc netem` where it begins, if the kernel has that.
//!
//! Nothing of it is outside: this process has a network and a mount namespace of its own ([`is_private`]), in which the peers'
//! namespaces have their names. The kernel takes all of it away once the last process in it has ended, however that ends,
//! so that several runs do not meet, and a run that was killed leaves nothing to clean up.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::condition::{Condition, Cut};
use super::{Conditions, Counts, Node, Path};
use crate::{Error, IoContext, Result};

/// Set in a process that was started in a network and a mount namespace of its own: to those that it was started from.
pub const PRIVATE_NETWORK: &str = "LAKE_CHAOS_PRIVATE_NETWORK";
/// How long one of the programs may take.
const PROGRAM_WITHIN: Duration = Duration::from_secs(10);
/// Where namespaces have their names.
const NAMES: &str = "/run/netns";
/// This process's place on both bridges.
const OWN: u64 = 254;
/// Most peers: their ids are parts of addresses and of class ids.
const MAX_ID: u64 = 200;
/// The programs, and the Debian packages that have them.
const PROGRAMS: [(&str, &str, &str); 6] = [
    ("ip", "-V", "iproute2"),
    ("tc", "-V", "iproute2"),
    ("nft", "--version", "nftables"),
    ("nsenter", "-V", "util-linux"),
    ("unshare", "-V", "util-linux"),
    ("mount", "-V", "mount"),
];

/// What this machine lacks for peers in namespaces, and what to do about it; none if it has everything.
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("peers in network namespaces need root: run this as root, or use --cluster local:N".to_owned());
    }
    PROGRAMS.into_iter().find_map(|(program, version, package)| {
        let mut command = std::process::Command::new(program);
        let ran = command.arg(version).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        ran.err().map(|e| {
            format!(
                "peers in network namespaces need the program {program} ({e}): install the package {package} \
                 (apt-get install {package}), or use --cluster local:N"
            )
        })
    })
}

/// Which namespaces this process is in: what [`PRIVATE_NETWORK`] is set to for one that is to be in others.
///
/// # Errors
/// There is no `/proc`.
pub fn own() -> Result<String> {
    let of = |kind: &str| std::fs::read_link(format!("/proc/self/ns/{kind}"));
    let both = of("net").and_then(|net| Ok(format!("{} {}", net.display(), of("mnt")?.display())));
    both.doing(|| "finding out the namespaces of this process".to_owned())
}

/// Whether this process has a network and a mount namespace other than those that it was started from.
pub fn is_private() -> bool {
    let Some(before) = std::env::var_os(PRIVATE_NETWORK).and_then(|before| before.into_string().ok()) else {
        return false;
    };
    let Ok(now) = own() else { return false };
    before.split(' ').count() == 2 && before.split(' ').zip(now.split(' ')).all(|(before, now)| before != now)
}

/// The namespaces of all peers, and what is wrong between them.
#[derive(Debug)]
pub struct Namespaces {
    peers: Vec<u64>,
    /// On which ports each peer serves clients and peers.
    ports: Mutex<BTreeMap<u64, (String, String)>>,
    /// Why there is no netem, if there is none.
    no_netem: Option<String>,
    /// Rules are replaced by one at a time. The peers that are slow now.
    slow: tokio::sync::Mutex<BTreeSet<u64>>,
}

/// Peer `id`'s address for the questions of this process.
pub fn control_host(id: u64) -> String {
    format!("10.77.1.{id}")
}

fn data_host(id: u64) -> String {
    format!("10.77.0.{id}")
}

fn name(id: u64) -> String {
    format!("lake-peer-{id}")
}

/// The program and the arguments that start another program in peer `id`'s namespace.
pub fn enter(id: u64) -> [String; 3] {
    ["nsenter".to_owned(), format!("--net={NAMES}/{}", name(id)), "--".to_owned()]
}

impl Namespaces {
    /// Makes the namespaces of these peers and the bridges between them.
    ///
    /// # Errors
    /// This process is not in namespaces of its own, or the kernel cannot have them.
    pub async fn open(peers: &[u64]) -> Result<Arc<Self>> {
        if !is_private() || peers.iter().any(|id| *id > MAX_ID) {
            let what = format!("making network namespaces for peers {peers:?}");
            let why = format!("this process has none of its own, or an id is above {MAX_ID}");
            return Err(Error::Io { doing: what, source: std::io::Error::other(why) });
        }
        // Names are files: in a file system of this mount namespace's own they go with it.
        std::fs::create_dir_all(NAMES).doing(|| format!("making {NAMES}"))?;
        run("mount", &["-t", "tmpfs", "lake-chaos", NAMES], None).await?;
        let mut links = String::from("link set lo up\n");
        for (bridge, host) in [("lake-data", data_host(OWN)), ("lake-ctl", control_host(OWN))] {
            let _ = writeln!(links, "link add {bridge} type bridge\naddr add {host}/24 dev {bridge}");
            let _ = writeln!(links, "link set {bridge} up");
        }
        for id in peers {
            run("ip", &["netns", "add", &name(*id)], None).await?;
            for device in ["data", "ctl"] {
                let _ = writeln!(links, "link add {device}-{id} type veth peer name {device} netns {}", name(*id));
                let _ = writeln!(links, "link set {device}-{id} master lake-{device} up");
            }
        }
        run("ip", &["-batch", "-"], Some(links)).await?;
        for id in peers {
            let mut own = String::from("link set lo up\n");
            for (device, host) in [("data", data_host(*id)), ("ctl", control_host(*id))] {
                let _ = writeln!(own, "addr add {host}/24 dev {device}\nlink set {device} up");
            }
            run("ip", &["-n", &name(*id), "-batch", "-"], Some(own)).await?;
        }
        let probed = run("tc", &["qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], None).await;
        let no_netem = match probed {
            Ok(_) => {
                run("tc", &["qdisc", "del", "dev", "lo", "root"], None).await?;
                None
            }
            Err(e) => Some(format!("this kernel has no netem, which delays packets (CONFIG_NET_SCH_NETEM): {e}")),
        };
        Ok(Arc::new(Self {
            peers: peers.to_vec(),
            ports: Mutex::default(),
            no_netem,
            slow: tokio::sync::Mutex::default(),
        }))
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<u64, (String, String)>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where `from` reaches a peer.
    pub fn address(&self, from: Node, to: Node) -> Option<String> {
        let Node::Peer(id) = to else { return None };
        let ports = self.ports();
        let (for_clients, for_peers) = ports.get(&id)?;
        let port = if from == Node::Clients { for_clients } else { for_peers };
        Some(format!("{}:{port}", data_host(id)))
    }

    /// Peer `id` serves clients and other peers on the ports of these addresses.
    pub fn set_targets(&self, id: u64, for_clients: &str, for_peers: &str) {
        let port = |address: &str| address.rsplit_once(':').map_or(address, |(_, port)| port).to_owned();
        self.ports().insert(id, (port(for_clients), port(for_peers)));
    }

    /// Why packets cannot have this done to them here, if they cannot.
    pub fn lacks(&self, condition: &Condition) -> Option<String> {
        if condition.reorder > 0.0 {
            return Some("packets in network namespaces are not reordered; --cluster local:N does it".to_owned());
        }
        if condition.at_message.is_some() {
            return Some("packets in network namespaces are not read; --cluster local:N does it".to_owned());
        }
        if is_slow(condition) { self.no_netem.clone() } else { None }
    }

    /// What is wrong from now on, instead of what was.
    ///
    /// # Errors
    /// A program fails; what was wrong before may be wrong still.
    pub async fn set(&self, conditions: Conditions) -> Result<()> {
        let mut slow = self.slow.lock().await;
        let rules = self.peers.iter().map(|id| {
            let script = rules(*id, &conditions);
            async move { within(*id, "nft", &["-f", "-"], Some(script)).await }
        });
        futures::future::try_join_all(rules).await?;
        for id in &self.peers {
            let queues = queues(*id, &conditions);
            if slow.remove(id) {
                within(*id, "tc", &["qdisc", "del", "dev", "data", "root"], None).await?;
            }
            if !queues.is_empty() {
                slow.insert(*id);
                within(*id, "tc", &["-batch", "-"], Some(queues)).await?;
            }
        }
        Ok(())
    }

    /// What rules and queues have met so far.
    ///
    /// # Errors
    /// A program fails, or says what cannot be read.
    pub async fn counts(&self) -> Result<BTreeMap<Path, Counts>> {
        let slow = self.slow.lock().await;
        let mut all: BTreeMap<Path, Counts> = BTreeMap::new();
        for id in &self.peers {
            // Before anything was wrong there is no table to ask for.
            let text = within(*id, "nft", &["-j", "list", "counters"], None).await?;
            let listed: Listed = parsed("nft", &text)?;
            for counter in listed.nftables.into_iter().filter_map(|item| item.counter) {
                let Some((what, path)) = path_of(&counter.name, *id) else { continue };
                let counts = all.entry(path).or_default();
                match what {
                    "cut" => counts.held_bytes += counter.bytes,
                    "reset" => counts.resets += counter.packets,
                    "lost" => counts.lost_chunks += counter.packets,
                    "broken" => counts.breaks += counter.packets,
                    _ => {}
                }
            }
            if slow.contains(id) {
                let text = within(*id, "tc", &["-s", "-j", "qdisc", "show", "dev", "data"], None).await?;
                let queues: Vec<Queue> = parsed("tc", &text)?;
                for queue in queues.into_iter().filter(|queue| queue.kind == "netem") {
                    let Some(to) = queue.parent.as_deref().and_then(peer_of_class) else { continue };
                    all.entry((Node::Peer(*id), Node::Peer(to))).or_default().late_chunks += queue.packets;
                }
            }
        }
        Ok(all)
    }
}

fn is_slow(condition: &Condition) -> bool {
    !condition.delay.is_zero() || !condition.jitter.is_zero() || condition.bytes_per_s.is_some()
}

/// The rules in peer `id`'s namespace: of the paths that end there, and of the one from there to the clients. Counters stay
/// when rules go.
fn rules(id: u64, conditions: &Conditions) -> String {
    let mut script = String::from(
        "add table inet lake\n\
         add chain inet lake in { type filter hook input priority 0; policy accept; }\n\
         add chain inet lake out { type filter hook output priority 0; policy accept; }\n\
         flush chain inet lake in\nflush chain inet lake out\n",
    );
    for ((from, to), condition) in conditions {
        let (chain, matches, end) = match (from, to) {
            (Node::Peer(from), Node::Peer(to)) if *to == id => ("in", format!("ip saddr {}", data_host(*from)), *from),
            (Node::Clients, Node::Peer(to)) if *to == id => ("in", format!("ip saddr {}", data_host(OWN)), OWN),
            (Node::Peer(from), Node::Clients) if *from == id => ("out", format!("ip daddr {}", data_host(OWN)), OWN),
            _ => continue,
        };
        let mut rule = |what: &str, also: &str, then: &str| {
            let counter = format!("{what}_{chain}_{end}");
            let _ = writeln!(script, "add counter inet lake {counter}");
            let _ = writeln!(script, "add rule inet lake {chain} {matches} {also} counter name \"{counter}\" {then}");
        };
        match condition.cut {
            Some(Cut::Silent) => rule("cut", "", "drop"),
            // What is reset while it is being made is refused.
            Some(Cut::Reset | Cut::Refuse) => rule("reset", "meta l4proto tcp", "reject with tcp reset"),
            None => {}
        }
        let per_mille = |probability: f64| format!("numgen random mod 1000 < {}", (probability * 1000.0).ceil());
        if condition.loss > 0.0 {
            rule("lost", &per_mille(condition.loss), "drop");
        }
        if condition.reset > 0.0 {
            let also = format!("meta l4proto tcp {}", per_mille(condition.reset));
            rule("broken", &also, "reject with tcp reset");
        }
    }
    script
}

/// The queues of peer `id`: one for each peer that it is slow towards. Empty: none.
fn queues(id: u64, conditions: &Conditions) -> String {
    let mut script = String::new();
    for ((from, to), condition) in conditions {
        let (Node::Peer(from), Node::Peer(to)) = (from, to) else { continue };
        if *from != id || !is_slow(condition) {
            continue;
        }
        if script.is_empty() {
            // What no filter matches goes out at once.
            script.push_str("qdisc add dev data root handle 1: htb\n");
        }
        let (class, host) = (class_of_peer(*to), data_host(*to));
        let half = condition.jitter / 2;
        let (delay, jitter) = ((condition.delay + half).as_micros(), half.as_micros());
        let rate = condition.bytes_per_s.map_or_else(String::new, |bytes| format!(" rate {}bit", bytes * 8));
        let _ = writeln!(script, "class add dev data parent 1: classid 1:{class} htb rate 10gbit");
        let _ = writeln!(
            script,
            "qdisc add dev data parent 1:{class} handle {class}: netem limit 100000 delay {delay}us {jitter}us{rate}"
        );
        let _ = writeln!(
            script,
            "filter add dev data parent 1: protocol ip prio 1 u32 match ip dst {host}/32 flowid 1:{class}"
        );
    }
    script
}

/// Minor numbers are hexadecimal; the root has the first.
fn class_of_peer(id: u64) -> String {
    format!("{:x}", 0x100 + id)
}

fn peer_of_class(parent: &str) -> Option<u64> {
    u64::from_str_radix(parent.strip_prefix("1:")?, 16).ok()?.checked_sub(0x100)
}

/// What a counter in peer `id`'s namespace counts, and of which path.
fn path_of(counter: &str, id: u64) -> Option<(&str, Path)> {
    let mut parts = counter.split('_');
    let (what, chain, end) = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?);
    let end = if end == OWN { Node::Clients } else { Node::Peer(end) };
    let own = Node::Peer(id);
    Some((what, if chain == "in" { (end, own) } else { (own, end) }))
}

#[derive(Deserialize)]
struct Listed {
    nftables: Vec<ListedItem>,
}

#[derive(Deserialize)]
struct ListedItem {
    counter: Option<Counter>,
}

#[derive(Deserialize)]
struct Counter {
    name: String,
    packets: u64,
    bytes: u64,
}

#[derive(Deserialize)]
struct Queue {
    kind: String,
    parent: Option<String>,
    #[serde(default)]
    packets: u64,
}

fn parsed<'a, T: Deserialize<'a>>(program: &str, text: &'a str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::Io {
        doing: format!("reading what {program} says: {}", text.chars().take(200).collect::<String>()),
        source: e.into(),
    })
}

/// Runs a program in a peer's namespace.
async fn within(id: u64, program: &str, arguments: &[&str], input: Option<String>) -> Result<String> {
    let [enter, namespace, separator] = enter(id);
    let arguments: Vec<&str> =
        [namespace.as_str(), separator.as_str(), program].into_iter().chain(arguments.iter().copied()).collect();
    run(&enter, &arguments, input).await
}

/// Runs a program to its end; gives what it printed.
async fn run(program: &str, arguments: &[&str], input: Option<String>) -> Result<String> {
    let doing = || format!("running {program} {}", arguments.join(" "));
    let ran = async {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), &input) {
            // One that does not read to the end says why.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(PROGRAM_WITHIN, ran).await;
    let output = output
        .unwrap_or_else(|_| Err(std::io::Error::other(format!("not done within {} s", PROGRAM_WITHIN.as_secs()))))
        .doing(doing)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(Error::Io {
                doing: doing(),
                source: std::io::Error::other(format!("{}: {}", output.status, said.trim())),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO_1: Path = (Node::Peer(2), Node::Peer(1));
    const TO_CLIENTS: Path = (Node::Peer(1), Node::Clients);

    #[test]
    fn rules_stand_where_a_path_ends() {
        let lossy = Condition { loss: 0.1, reset: 0.005, ..Condition::default() };
        let conditions = Conditions::from([
            (TO_1, Condition::cut(Cut::Silent)),
            (TO_CLIENTS, Condition::cut(Cut::Reset)),
            ((Node::Clients, Node::Peer(1)), lossy),
        ]);
        let rules = rules(1, &conditions);
        for rule in [
            "in ip saddr 10.77.0.2  counter name \"cut_in_2\" drop",
            "out ip daddr 10.77.0.254 meta l4proto tcp counter name \"reset_out_254\" reject with tcp reset",
            "in ip saddr 10.77.0.254 numgen random mod 1000 < 100 counter name \"lost_in_254\" drop",
            "in ip saddr 10.77.0.254 meta l4proto tcp numgen random mod 1000 < 5 counter name \"broken_in_254\"",
        ] {
            assert!(rules.contains(rule), "{rule}\n{rules}");
        }
        assert!(!super::rules(2, &conditions).contains("add rule"), "nothing ends at peer 2");
        assert_eq!(path_of("cut_in_2", 1), Some(("cut", TO_1)));
        assert_eq!(path_of("reset_out_254", 1), Some(("reset", TO_CLIENTS)));
        assert_eq!(path_of("somebody's", 1), None);
    }

    #[test]
    fn queues_stand_where_a_path_begins() {
        let slow = Condition {
            delay: Duration::from_millis(10),
            jitter: Duration::from_millis(4),
            bytes_per_s: Some(200_000),
            ..Condition::default()
        };
        let conditions = Conditions::from([(TO_1, slow), (TO_CLIENTS, Condition::cut(Cut::Silent))]);
        let queues = queues(2, &conditions);
        assert!(queues.contains("netem limit 100000 delay 12000us 2000us rate 1600000bit"), "{queues}");
        assert!(queues.contains("match ip dst 10.77.0.1/32 flowid 1:101"), "{queues}");
        assert_eq!(peer_of_class("1:101"), Some(1));
        assert!(super::queues(1, &conditions).is_empty());
    }
}
