//! The fault that only query nodes have: cut off from the metadata cluster. What is stateless must lose nothing by it.

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, called, named_as};
use super::kind::Target;
use super::{Done, Nemesis};
use crate::net::condition::Cut;
use crate::net::{Node, Path, partition};
use crate::process::Role;

/// What the cut is filed under.
const CUT: &str = "query-partition";

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
        self.claimed = match field.claim_of(Role::Query, self.target, rng).await {
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
        let target = format!("{} from all peers", named_as(called(Role::Query), &self.claimed));
        match field.disturb_each(CUT, partition::cut(&of_each.concat(), how), &of_each).await {
            Ok(met) => {
                Done::installed(target, format!("{} bytes and connections met the cut", met.values().sum::<u64>()))
            }
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let calmed = field.calm(CUT).await;
        field.release_of(Role::Query, &std::mem::take(&mut self.claimed));
        match calmed {
            Ok(()) => Done::installed("all query nodes", "nothing is cut"),
            Err(e) => Done::failed("all query nodes", e),
        }
    }
}
