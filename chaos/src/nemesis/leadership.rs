//! The leadership moves, in order.

use std::time::Instant;

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, PROOF_WITHIN};
use super::{Done, Nemesis};

/// Another voter is asked to lead.
pub struct Transfer;

#[async_trait]
impl Nemesis for Transfer {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let before = field.leader().await;
        let others: Vec<u64> = field.roster.ids().into_iter().filter(|id| Some(*id) != before).collect();
        if others.is_empty() {
            return Done::skipped("nobody", "there is no other peer to lead");
        }
        let to = others[rng.random_range(0..others.len())];
        let target = format!("from {} to peer {to}", before.map_or("nobody".to_owned(), |id| format!("peer {id}")));
        match field.store.transfer_leader(Some(to), Instant::now() + PROOF_WITHIN).await {
            Ok(now) if now.leader.as_ref().is_some_and(|leader| leader.id == to) => {
                Done::installed(target, format!("it leads in term {}", now.term))
            }
            Ok(now) => {
                let leads = now.leader.map_or("nobody".to_owned(), |leader| format!("peer {}", leader.id));
                Done::failed(target, format!("{leads} leads in term {}", now.term))
            }
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, _: &Field) -> Done {
        Done::installed("the leader", "it stays where it is")
    }
}
