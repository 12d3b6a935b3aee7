//! The leadership moves, in order.

use std::time::Instant;

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, PROOF_WITHIN};
use super::{Done, Nemesis};
use crate::probe;

/// Another voter is asked to lead.
pub struct Transfer;

#[async_trait]
impl Nemesis for Transfer {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let answers = field.statuses().await;
        let before = probe::leader(&answers).and_then(|answer| Some((answer.self_.as_ref()?.id, answer.term)));
        let Some((from, old_term)) = before else {
            return Done::failed("nobody", "nobody leads, so that nothing can be handed over");
        };
        let others: Vec<u64> = field.roster.ids().into_iter().filter(|id| *id != from).collect();
        if others.is_empty() {
            return Done::skipped("nobody", "there is no other peer to lead");
        }
        let to = others[rng.random_range(0..others.len())];
        match field.store.transfer_leader(Some(to), Instant::now() + PROOF_WITHIN).await {
            Ok(now) => handed_over((from, old_term), to, now.leader.map(|leader| leader.id), now.term),
            Err(e) => Done::failed(format!("from peer {from} to peer {to}"), e),
        }
    }

    async fn stop(&mut self, _: &Field) -> Done {
        Done::installed("the leader", "it stays where it is")
    }
}

/// What came of it: who led before, in which term, and who leads now.
fn handed_over((from, old_term): (u64, u64), to: u64, leads: Option<u64>, term: u64) -> Done {
    let target = format!("from peer {from} to peer {to}");
    let leader = leads.map_or("nobody".to_owned(), |id| format!("peer {id}"));
    match leads == Some(to) && term > old_term {
        true => Done::installed(target, format!("it leads in term {term}")),
        false => Done::failed(target, format!("{leader} leads in term {term}, and peer {from} did in term {old_term}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_that_very_peer_in_a_new_term_shows_that_it_was_handed_over() {
        assert!(handed_over((1, 4), 2, Some(2), 5).is_installed());
        for (leads, term) in [(Some(2), 4), (Some(1), 5), (Some(3), 5), (None, 5)] {
            assert!(!handed_over((1, 4), 2, leads, term).is_installed(), "{leads:?} in term {term}");
        }
    }
}
