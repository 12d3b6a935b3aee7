//! One turn at a time for each node: its requests are handled one after the other, whichever streams they come on.
//!
//! Limits: as many entries as nodes whose requests are being handled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedMutexGuard;

use crate::log::lock;

type Waiting = Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>;

/// The turns of all nodes.
#[derive(Debug, Default)]
pub struct Turns {
    nodes: Waiting,
}

/// A turn; it ends when this is dropped.
#[derive(Debug)]
pub struct Turn {
    node: String,
    held: Option<OwnedMutexGuard<()>>,
    nodes: Waiting,
}

impl Turns {
    /// Waits for the turn of a node, behind those that came before.
    pub async fn take(&self, node: &str) -> Turn {
        let turn = lock(&self.nodes).entry(node.to_owned()).or_default().clone();
        // Made first, so that it also tidies up if the wait is given up.
        let mut waiting = Turn { node: node.to_owned(), held: None, nodes: self.nodes.clone() };
        waiting.held = Some(turn.lock_owned().await);
        waiting
    }

    /// How many nodes have a request in hand.
    pub fn len(&self) -> usize {
        lock(&self.nodes).len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut nodes = lock(&self.nodes);
        self.held = None;
        // Whoever waits has a share of it, and takes it under this lock.
        if nodes.get(&self.node).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            nodes.remove(&self.node);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn turns_come_one_after_the_other_and_leave_nothing_behind() {
        let turns = Arc::new(Turns::default());
        let (a, other) = (turns.take("a").await, turns.take("b").await);
        let second = tokio::spawn({
            let turns = turns.clone();
            async move { drop(turns.take("a").await) }
        });
        let given_up = tokio::time::timeout(Duration::from_secs(1), turns.take("a")).await;
        assert!(given_up.is_err() && !second.is_finished(), "one at a time");
        drop((a, other));
        second.await.unwrap();
        assert!(turns.is_empty());
        drop(turns.take("a").await);
        assert!(turns.is_empty());
    }
}
