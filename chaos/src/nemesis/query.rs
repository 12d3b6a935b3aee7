//! Faults of query nodes: killed, paused, and cut off from the metadata cluster. What is stateless must lose nothing by them.

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, named_as};
use super::kind::Target;
use super::process::{killed, seen_in};
use super::{Done, Nemesis};
use crate::net::condition::Cut;
use crate::net::{Node, Path, partition};
use crate::process::ProcessName;

/// As nodes are named to people.
const NODE: &str = "query node";
/// What the cut is filed under.
const CUT: &str = "query-partition";

/// SIGKILL, and a start when it is over.
pub struct Kill {
    target: Option<Target>,
    killed: Vec<u64>,
}

impl Kill {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, killed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Kill {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.killed = match field.claim_query(self.target, rng) {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.killed {
            let gone = match field.cluster.process(ProcessName::query(*id)) {
                Ok(process) => killed(process).await,
                Err(e) => Err(e),
            };
            came.push((*id, gone.map(|pid| format!("process {pid} is gone")).map_err(|e| e.to_string())));
        }
        Done::of_all(NODE, &came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let nodes = std::mem::take(&mut self.killed);
        let starting = nodes.iter().map(|id| field.start_query(*id));
        let started = futures::future::try_join_all(starting).await;
        field.release_query(&nodes);
        match started {
            Ok(_) => Done::installed(named_as(NODE, &nodes), "all serve"),
            Err(e) => Done::failed(named_as(NODE, &nodes), e),
        }
    }
}

/// SIGSTOP, and SIGCONT when it is over.
pub struct Pause {
    target: Option<Target>,
    paused: Vec<u64>,
}

impl Pause {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, paused: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Pause {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.paused = match field.claim_query(self.target, rng) {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.paused {
            let stopped = async {
                let process = field.cluster.process(ProcessName::query(*id))?;
                process.pause().await?;
                seen_in(process, "to stand still", |state| state == 'T').await
            };
            let stopped = stopped.await.map(|pid| format!("process {pid} is stopped"));
            came.push((*id, stopped.map_err(|e| e.to_string())));
        }
        Done::of_all(NODE, &came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let nodes = std::mem::take(&mut self.paused);
        let mut came = Vec::new();
        for id in &nodes {
            let resumed = async {
                let process = field.cluster.process(ProcessName::query(*id))?;
                process.resume().await?;
                seen_in(process, "to go on", |state| state != 'T').await
            };
            let resumed = resumed.await.map(|pid| format!("process {pid} goes on"));
            came.push((*id, resumed.map_err(|e| e.to_string())));
        }
        field.release_query(&nodes);
        Done::of_all(NODE, &came)
    }
}

/// Nothing passes between a query node and any peer. Its clients reach it, and it reaches the warehouse.
pub struct Partition {
    target: Option<Target>,
    claimed: Vec<u64>,
}

impl Partition {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, claimed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Partition {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        // One that is killed or stands still has nothing to say, which would show no cut.
        self.claimed = match field.claim_query(self.target, rng) {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let how = if rng.random_bool(0.7) { Cut::Silent } else { Cut::Reset };
        let peers = field.roster.ids();
        let ways_of = |id: u64| -> Vec<Path> {
            let both = |peer: &u64| [(Node::Query(id), Node::Peer(*peer)), (Node::Peer(*peer), Node::Query(id))];
            peers.iter().flat_map(both).collect()
        };
        let of_each: Vec<Vec<Path>> = self.claimed.iter().map(|id| ways_of(*id)).collect();
        let target = format!("{} from all peers", named_as(NODE, &self.claimed));
        match field.disturb_each(CUT, partition::cut(&of_each.concat(), how), &of_each).await {
            Ok(met) => {
                Done::installed(target, format!("{} bytes and connections met the cut", met.values().sum::<u64>()))
            }
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        field.release_query(&std::mem::take(&mut self.claimed));
        match field.calm(CUT).await {
            Ok(()) => Done::installed("all query nodes", "nothing is cut"),
            Err(e) => Done::failed("all query nodes", e),
        }
    }
}
