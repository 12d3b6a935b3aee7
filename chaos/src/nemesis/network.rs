//! Faults of the network: cut apart, slow, lossy, and peers that clients cannot reach.

use std::time::Duration;

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, named, told};
use super::kind::Target;
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
        let running = running(field).await;
        let of_leader = |(from, to): &&Path| {
            leader.is_some_and(|id| *from == Node::Peer(id)) && running.iter().any(|id| *to == Node::Peer(*id))
        };
        let must_meet: Vec<Vec<Path>> = paths.iter().filter(of_leader).map(|way| vec![*way]).collect();
        match field.disturb_each("partition", partition::cut(&paths, how), &must_meet).await {
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

/// Peers that answer.
async fn running(field: &Field) -> Vec<u64> {
    field.statuses().await.iter().filter_map(|answer| Some(answer.self_.as_ref()?.id)).collect()
}

/// Takes back what a fault has made wrong.
async fn calmed(field: &Field, by: &'static str, target: &str, now: &str) -> Done {
    match field.calm(by).await {
        Ok(()) => Done::installed(target, now),
        Err(e) => Done::failed(target, e),
    }
}

/// Around whom the network is made bad.
struct Whom {
    /// None: around all.
    peers: Option<Vec<u64>>,
    /// They were asked for, so that each must be seen to be hurt.
    asked_for: bool,
}

impl Whom {
    async fn choose(field: &Field, target: Option<Target>, rng: &mut StdRng) -> Result<Self, String> {
        let Some(target) = target else {
            let peers = field.roster.ids();
            let one = rng.random_bool(0.5) && !peers.is_empty();
            let peers = one.then(|| vec![peers[rng.random_range(0..peers.len())]]);
            return Ok(Self { peers, asked_for: false });
        };
        Ok(Self { peers: Some(field.pick(target, rng).await?), asked_for: true })
    }

    fn is_meant(&self, id: u64) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.contains(&id))
    }

    /// Every path between those who are meant and other peers, both ways.
    fn between_peers(&self, field: &Field, condition: &Condition) -> Conditions {
        let peers = field.roster.ids();
        let pairs = peers.iter().flat_map(|from| peers.iter().map(move |to| (*from, *to)));
        let meant = |(from, to): &(u64, u64)| from != to && (self.is_meant(*from) || self.is_meant(*to));
        pairs.filter(meant).map(|(from, to)| ((Node::Peer(from), Node::Peer(to)), condition.clone())).collect()
    }

    /// Of each that was asked for and runs, the ways of which one must be seen to be hurt.
    async fn must_meet(&self, field: &Field, conditions: &Conditions) -> Vec<Vec<Path>> {
        let asked_for = self.peers.iter().flatten().filter(|_| self.asked_for);
        let running = running(field).await;
        let of = |id: u64| {
            let touches = move |(from, to): &&Path| [*from, *to].contains(&Node::Peer(id));
            conditions.keys().filter(touches).copied().collect()
        };
        asked_for.filter(|id| running.contains(id)).map(|id| of(*id)).collect()
    }

    /// Makes these conditions so until they are seen to hurt; gives how often.
    async fn disturb(&self, field: &Field, by: &'static str, conditions: Conditions) -> crate::Result<u64> {
        let must_meet = self.must_meet(field, &conditions).await;
        field.disturb_each(by, conditions, &must_meet).await.map(|hurt| hurt.values().sum())
    }

    fn told(&self, condition: &Condition) -> String {
        match &self.peers {
            None => format!("all peers: {condition}"),
            Some(peers) => format!("around {}: {condition}", named(peers)),
        }
    }
}

/// Latency, its jitter, and sometimes little bandwidth.
pub struct Slow {
    target: Option<Target>,
}

impl Slow {
    pub fn new(target: Option<Target>) -> Self {
        Self { target }
    }
}

#[async_trait]
impl Nemesis for Slow {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition {
            delay: Duration::from_millis(rng.random_range(5..120)),
            jitter: Duration::from_millis(rng.random_range(0..80)),
            bytes_per_s: rng.random_bool(0.3).then_some(200_000),
            ..Condition::default()
        };
        let whom = match Whom::choose(field, self.target, rng).await {
            Ok(whom) => whom,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = whom.told(&condition);
        if let Some(why) = field.lacks(&condition) {
            return Done::skipped(target, why);
        }
        match whom.disturb(field, "slow", whom.between_peers(field, &condition)).await {
            Ok(_) => Done::installed(target, "messages were late"),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "slow", "all paths", "nothing is late").await
    }
}

/// Packets that have to be sent again, and connections that break.
pub struct Lossy {
    target: Option<Target>,
}

impl Lossy {
    pub fn new(target: Option<Target>) -> Self {
        Self { target }
    }
}

#[async_trait]
impl Nemesis for Lossy {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition {
            loss: rng.random_range(0.05..0.3),
            reset: if rng.random_bool(0.5) { 0.005 } else { 0.0 },
            ..Condition::default()
        };
        let whom = match Whom::choose(field, self.target, rng).await {
            Ok(whom) => whom,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = whom.told(&condition);
        match whom.disturb(field, "lossy", whom.between_peers(field, &condition)).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} messages were lost, or connections with them")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "lossy", "all paths", "nothing is lost").await
    }
}

/// Bytes of one connection that are held back until another one's have passed them.
pub struct Reorder {
    target: Option<Target>,
}

impl Reorder {
    pub fn new(target: Option<Target>) -> Self {
        Self { target }
    }
}

#[async_trait]
impl Nemesis for Reorder {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let condition = Condition { reorder: rng.random_range(0.05..0.5), ..Condition::default() };
        let whom = match Whom::choose(field, self.target, rng).await {
            Ok(whom) => whom,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = whom.told(&condition);
        if let Some(why) = field.lacks(&condition) {
            return Done::skipped(target, why);
        }
        let mut conditions = whom.between_peers(field, &condition);
        // Clients have many connections.
        for id in field.roster.ids().into_iter().filter(|id| whom.is_meant(*id)) {
            let paths = [(Node::Clients, Node::Peer(id)), (Node::Peer(id), Node::Clients)];
            conditions.extend(paths.map(|path| (path, condition.clone())));
        }
        match whom.disturb(field, "reorder", conditions).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} messages were overtaken")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "reorder", "all paths", "nothing is held back").await
    }
}

/// Peers that serve their cluster, and that no client reaches; or whose answers do not arrive. One of them, unless others were
/// asked for.
pub struct Endpoint {
    target: Option<Target>,
}

impl Endpoint {
    pub fn new(target: Option<Target>) -> Self {
        Self { target }
    }

    async fn whom(&self, field: &Field, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        if let Some(target) = self.target {
            return field.pick(target, rng).await;
        }
        let peers = field.roster.ids();
        let leader = field.leader().await.filter(|_| rng.random_bool(0.5));
        let one = leader.or_else(|| peers.get(rng.random_range(0..peers.len().max(1))).copied());
        one.map(|id| vec![id]).ok_or_else(|| "there is no peer".to_owned())
    }
}

#[async_trait]
impl Nemesis for Endpoint {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let ids = match self.whom(field, rng).await {
            Ok(ids) => ids,
            Err(why) => return Done::failed("nobody", why),
        };
        let there = ids.iter().map(|id| (Node::Clients, Node::Peer(*id)));
        let back = ids.iter().map(|id| (Node::Peer(*id), Node::Clients));
        let both: Vec<Path> = there.chain(back.clone()).collect();
        let (what, cut) = match rng.random_range(0..3) {
            0 => ("connections are reset", partition::cut(&both, Cut::Reset)),
            1 => ("nothing arrives", partition::cut(&both, Cut::Silent)),
            _ => ("no answer arrives", partition::cut(&back.collect::<Vec<_>>(), Cut::Silent)),
        };
        let target = format!("clients of {}: {what}", named(&ids));
        let whom = Whom { peers: Some(ids), asked_for: true };
        match whom.disturb(field, "endpoint", cut).await {
            Ok(hurt) => Done::installed(target, format!("{hurt} bytes and connections met the cut")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        calmed(field, "endpoint", "all clients", "nothing is cut").await
    }
}
