//! Who carries out the steps that touch objects: one of the workers that are connected, the one with the least in hand.
//!
//! Limits: [`MAX_IN_HAND`] steps of procedures at one worker.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use lake_client::clock;

use crate::log::lock;
use crate::peer::member::Member;
use crate::peer::nodes::mailbox::NotDone;
use crate::peer::placement::is_drained;
use crate::peer::shares::Caller;

/// The role of the nodes that are asked.
pub const WORKER: &str = "worker";
/// Steps of procedures that one worker has in hand.
pub const MAX_IN_HAND: usize = 4;

/// What each worker has in hand of this leader's.
#[derive(Debug, Default)]
pub struct InHand(Mutex<HashMap<String, usize>>);

/// A place at a worker, until it is dropped.
#[derive(Debug)]
struct Place<'a> {
    all: &'a InHand,
    node: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        if let Some(count) = all.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.node);
            }
        }
    }
}

/// Why no worker has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotAnswered {
    /// None was asked.
    Nobody(String),
    /// One was: it has failed, or went, or is late. Whether it was done is unknown.
    Failed(String),
}

impl InHand {
    /// Which of these has the least in hand; the first in order of names among several.
    pub fn least(&self, workers: Vec<String>) -> Option<String> {
        let all = lock(&self.0);
        workers.into_iter().min_by_key(|node| all.get(node).copied().unwrap_or(0))
    }

    /// A place at the worker that has the least in hand; the first in order of names among several.
    fn place(&self, workers: Vec<String>) -> Option<Place<'_>> {
        let mut all = lock(&self.0);
        let in_hand = |all: &HashMap<String, usize>, node: &String| all.get(node).copied().unwrap_or(0);
        let node = workers.into_iter().min_by_key(|node| in_hand(&all, node))?;
        let count = all.entry(node.clone()).or_insert(0);
        if *count >= MAX_IN_HAND {
            return None;
        }
        *count += 1;
        Some(Place { all: self, node })
    }
}

impl Member {
    /// Has a worker carry out an instruction, and gives its answer.
    pub(super) async fn have_done(&self, kind: &str, payload: Bytes, within: Duration) -> Result<Bytes, NotAnswered> {
        let workers = self.fit_workers();
        if workers.is_empty() {
            return Err(NotAnswered::Nobody("no worker is connected".to_owned()));
        }
        self.have_done_by(workers, kind, payload, within).await
    }

    /// The workers that are connected, and not drained.
    pub(super) fn fit_workers(&self) -> Vec<String> {
        let mut workers = self.nodes.connected_as(WORKER);
        let applied = self.published.current();
        workers.retain(|node| !is_drained(&applied.state, node));
        workers
    }

    /// The same, by one of these.
    pub(super) async fn have_done_by(
        &self,
        workers: Vec<String>,
        kind: &str,
        payload: Bytes,
        within: Duration,
    ) -> Result<Bytes, NotAnswered> {
        let Some(place) = self.procedures.in_hand.place(workers) else {
            return Err(NotAnswered::Nobody(format!("every worker has {MAX_IN_HAND} steps in hand")));
        };
        // One that was deposed without knowing it tells nobody anything.
        if let Err(failure) = self.confirmed_on_duty(&Caller::own()).await {
            return Err(NotAnswered::Nobody(failure.message));
        }
        let answer = self.nodes.mailbox.ask(&place.node, kind, payload, clock::now() + within).await;
        answer.map_err(|not_done| match not_done {
            NotDone::NotConnected { .. } | NotDone::Full { .. } => NotAnswered::Nobody(not_done.to_string()),
            NotDone::Gone { .. } | NotDone::Late { .. } | NotDone::Refused { .. } => {
                NotAnswered::Failed(not_done.to_string())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_with_the_least_in_hand_is_asked_and_there_is_a_bound() {
        let in_hand = InHand::default();
        let both = || vec!["a".to_owned(), "b".to_owned()];
        assert!(in_hand.place(vec![]).is_none());
        let mut places: Vec<_> = (0..2 * MAX_IN_HAND).map(|_| in_hand.place(both()).unwrap()).collect();
        assert_eq!(places.iter().filter(|place| place.node == "a").count(), MAX_IN_HAND);
        assert!(in_hand.place(both()).is_none());
        assert_eq!(in_hand.place(vec!["c".to_owned()]).unwrap().node, "c");
        let b = places.iter().position(|place| place.node == "b").unwrap();
        places.remove(b);
        assert_eq!(in_hand.place(both()).unwrap().node, "b");
        places.clear();
        assert!(lock(&in_hand.0).is_empty());
    }
}
