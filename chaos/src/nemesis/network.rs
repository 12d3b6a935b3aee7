//! Faults of the network: cut apart, slow, lossy, and peers that clients cannot reach.

use std::time::Duration;

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{self, Field};
use super::{Done, Nemesis};
use crate::net::condition::{Condition, Cut};
use crate::net::partition::{self, KINDS};
use crate::net::{Conditions, Node, Path};

/// Peers that cannot hear each other.
pub struct Partition {
    kind: Option<partition::Kind>,
}

impl Partition {
    pub fn new(kind: Option<partition::Kind>) -> Self {
        Self { kind }
    }
}

#[async_trait]
impl Nemesis for Partition {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let peers = field.roster.ids();
        let kinds: Vec<partition::Kind> = KINDS.into_iter().filter(|kind| kind.least_peers() <= peers.len()).collect();
        let kind = match (self.kind, kinds.as_slice()) {
            (Some(kind), _) => kind,
            (None, []) => return Done::skipped("nobody", "there is only one peer"),
            (None, kinds) => kinds[rng.random_range(0..kinds.len())],
        };
        if peers.len() < kind.least_peers() {
            let why = format!("it takes {} peers, there are {}", kind.least_peers(), peers.len());
            return Done::skipped(kind.name(), why);
        }
        let leader = match kind.is_of_the_leader() {
            true => match field.await_leader().await {
                Ok(leader) => Some(leader),
                Err(why) => return Done::failed(kind.name(), why),
            },
            false => field.leader().await,
        };
        let paths = partition::paths(kind, &peers, leader, rng);
        let how = if rng.random_bool(0.7) { Cut::Silent } else { Cut::Reset };
        let target = format!("{}: {}", kind.name(), told(&paths));
        // A leader speaks to everybody all the time; others need have nothing to say to each other.
        let answering = field.statuses().await;
        let runs =
            |node: Node| answering.iter().any(|a| a.self_.as_ref().is_some_and(|own| node == Node::Peer(own.id)));
        let of_leader = |(from, to): &&Path| leader.is_some_and(|id| *from == Node::Peer(id)) && runs(*to);
        let must_meet: Vec<Path> = paths.iter().filter(of_leader).copied().collect();
        match field.disturb_all("partition", partition::cut(&paths, how), &must_meet).await {
            Ok(hurt) => {
                let ways: Vec<Path> = hurt.keys().copied().collect();
                let met: u64 = hurt.values().sum();
                Done::installed(target, format!("{met} bytes and connections met the cut, on {}", told(&ways)))
            }
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "partition", "all paths", "nothing is cut").await
    }
}

fn told(ways: &[Path]) -> String {
    ways.iter().map(field::for_people).collect::<Vec<_>>().join(", ")
}

/// Takes back what a fault has made wrong.
async fn calmed(field: &Field, by: &'static str, target: &str, now: &str) -> Done {
    match field.calm(by).await {
        Ok(()) => Done::installed(target, now),
        Err(e) => Done::failed(target, e),
    }
}

/// Every path between some peer and the others, or between all of them.
fn around(field: &Field, whom: Option<u64>, condition: &Condition) -> Conditions {
    let peers = field.roster.ids();
    let pairs = peers.iter().flat_map(|from| peers.iter().map(move |to| (*from, *to)));
    let meant = |(from, to): &(u64, u64)| from != to && whom.is_none_or(|id| *from == id || *to == id);
    pairs.filter(meant).map(|(from, to)| ((Node::Peer(from), Node::Peer(to)), condition.clone())).collect()
}

fn around_whom(field: &Field, rng: &mut StdRng) -> Option<u64> {
    let peers = field.roster.ids();
    (rng.random_bool(0.5) && !peers.is_empty()).then(|| peers[rng.random_range(0..peers.len())])
}

fn for_people(whom: Option<u64>, condition: &Condition) -> String {
    whom.map_or_else(|| format!("all peers: {condition}"), |id| format!("around peer {id}: {condition}"))
}

/// Latency, its jitter, and sometimes little bandwidth.
#[derive(Default)]
pub struct Slow {}

#[async_trait]
impl Nemesis for Slow {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition {
            delay: Duration::from_millis(rng.random_range(5..120)),
            jitter: Duration::from_millis(rng.random_range(0..80)),
            bytes_per_s: rng.random_bool(0.3).then_some(200_000),
            ..Condition::default()
        };
        let whom = around_whom(field, rng);
        let target = for_people(whom, &condition);
        if let Some(why) = field.lacks(&condition) {
            return Done::skipped(target, why);
        }
        match field.disturb("slow", around(field, whom, &condition)).await {
            Ok(_) => Done::installed(target, "messages were late"),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "slow", "all paths", "nothing is late").await
    }
}

/// Packets that have to be sent again, and connections that break.
#[derive(Default)]
pub struct Lossy {}

#[async_trait]
impl Nemesis for Lossy {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition {
            loss: rng.random_range(0.05..0.3),
            reset: if rng.random_bool(0.5) { 0.005 } else { 0.0 },
            ..Condition::default()
        };
        let whom = around_whom(field, rng);
        let target = for_people(whom, &condition);
        match field.disturb("lossy", around(field, whom, &condition)).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} messages were lost, or connections with them")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "lossy", "all paths", "nothing is lost").await
    }
}

/// Bytes of one connection that are held back until another one's have passed them.
#[derive(Default)]
pub struct Reorder {}

#[async_trait]
impl Nemesis for Reorder {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition { reorder: rng.random_range(0.05..0.5), ..Condition::default() };
        let whom = around_whom(field, rng);
        let target = for_people(whom, &condition);
        if let Some(why) = field.lacks(&condition) {
            return Done::skipped(target, why);
        }
        let mut conditions = around(field, whom, &condition);
        // Clients have many connections.
        for id in field.roster.ids().into_iter().filter(|id| whom.is_none_or(|whom| whom == *id)) {
            let paths = [(Node::Clients, Node::Peer(id)), (Node::Peer(id), Node::Clients)];
            conditions.extend(paths.map(|path| (path, condition.clone())));
        }
        match field.disturb("reorder", conditions).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} messages were overtaken")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "reorder", "all paths", "nothing is held back").await
    }
}

/// A peer that serves its cluster, and that no client reaches; or whose answers do not arrive.
#[derive(Default)]
pub struct Endpoint {}

#[async_trait]
impl Nemesis for Endpoint {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let peers = field.roster.ids();
        let leader = field.leader().await.filter(|_| rng.random_bool(0.5));
        let Some(id) = leader.or_else(|| peers.get(rng.random_range(0..peers.len().max(1))).copied()) else {
            return Done::failed("nobody", "there is no peer");
        };
        let (there, back) = ((Node::Clients, Node::Peer(id)), (Node::Peer(id), Node::Clients));
        let (what, cut) = match rng.random_range(0..3) {
            0 => ("connections are reset", partition::cut(&[there, back], Cut::Reset)),
            1 => ("nothing arrives", partition::cut(&[there, back], Cut::Silent)),
            _ => ("no answer arrives", partition::cut(&[back], Cut::Silent)),
        };
        let target = format!("clients of peer {id}: {what}");
        match field.disturb("endpoint", cut).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} bytes and connections met the cut")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "endpoint", "all clients", "nothing is cut").await
    }
}
