//! What the leader remembers of the nodes that it has heard of, as a pure value.
//!
//! Invariants:
//! - it belongs to one term: what is told of another one changes nothing, and a new leader begins with nothing;
//! - of one node it holds one process, the one that was heard last and was not superseded;
//! - a stream that closes takes with it only what came over that very stream.
//!
//! Nothing here is needed for safety: epochs are in the map, and leases in the state machine. No clock is read here.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lake_proto::v1;

/// What was heard of a process.
#[derive(Debug, Clone, PartialEq)]
pub struct Presence {
    pub process: String,
    /// The stream that it was heard on, while that is open.
    pub stream: Option<u64>,
    pub heard: Instant,
    pub info: v1::NodeInfo,
    pub load: v1::NodeLoad,
}

/// The nodes of one term.
#[derive(Debug, Default)]
pub struct Registry {
    /// 0: this peer is not on duty.
    term: u64,
    nodes: HashMap<String, Presence>,
}

impl Registry {
    /// This peer is on duty in `term` from now on, and has heard of nobody.
    pub fn lead(&mut self, term: u64) {
        *self = Self { term, nodes: HashMap::new() };
    }

    /// It is no longer.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// A heartbeat was accepted in `term`. False: that is not the registry's.
    pub fn heard(&mut self, term: u64, node: &str, presence: Presence) -> bool {
        if term == 0 || term != self.term {
            return false;
        }
        match self.nodes.get_mut(node) {
            Some(known) => *known = presence,
            None => {
                self.nodes.insert(node.to_owned(), presence);
            }
        }
        true
    }

    /// A stream has closed. Says whether the node was heard on it last.
    pub fn closed(&mut self, node: &str, stream: u64) -> bool {
        match self.nodes.get_mut(node) {
            Some(known) if known.stream == Some(stream) => {
                known.stream = None;
                true
            }
            _ => false,
        }
    }

    /// The node is registered no more.
    pub fn left(&mut self, node: &str, process: &str) {
        if self.nodes.get(node).is_some_and(|known| known.process == process) {
            self.nodes.remove(node);
        }
    }

    /// Forgets the nodes that are not in the map any more; says which, and the processes that were heard of them.
    pub fn forget(&mut self, is_registered: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let gone = self.nodes.extract_if(|node, _| !is_registered(node));
        gone.map(|(node, known)| (node, known.process)).collect()
    }

    /// What was heard of this process of a node.
    pub fn of(&self, node: &str, process: &str) -> Option<&Presence> {
        self.nodes.get(node).filter(|known| known.process == process)
    }

    /// The nodes of a role that have a stream that is open, in order of their names.
    pub fn connected_as(&self, role: &str) -> Vec<String> {
        let is = |known: &Presence| known.stream.is_some() && known.info.roles.iter().any(|has| has == role);
        let mut nodes: Vec<String> =
            self.nodes.iter().filter(|(_, known)| is(known)).map(|(node, _)| node.clone()).collect();
        nodes.sort_unstable();
        nodes
    }

    /// How many nodes have a stream that is open.
    pub fn connected(&self) -> usize {
        self.nodes.values().filter(|known| known.stream.is_some()).count()
    }
}

impl Presence {
    /// How long ago it was heard.
    pub fn silent(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }
}

#[cfg(test)]
mod tests {
    use lake_client::clock;

    use super::*;

    fn heard_on(process: &str, stream: u64) -> Presence {
        Presence {
            process: process.to_owned(),
            stream: Some(stream),
            heard: clock::now(),
            info: v1::NodeInfo::default(),
            load: v1::NodeLoad::default(),
        }
    }

    #[test]
    fn a_stream_that_closes_takes_only_what_came_over_it() {
        let mut registry = Registry::default();
        registry.lead(3);
        assert!(registry.heard(3, "n", heard_on("a", 1)));
        assert!(registry.heard(3, "n", heard_on("a", 2)), "it came back before its old stream was seen to end");
        assert!(!registry.closed("n", 1));
        assert_eq!(registry.connected(), 1);
        assert!(registry.heard(3, "n", heard_on("b", 3)), "another process took over");
        assert!(!registry.closed("n", 2) && registry.of("n", "a").is_none());
        registry.left("n", "a");
        assert_eq!(registry.connected(), 1);
        let info = v1::NodeInfo { roles: vec!["worker".to_owned()], ..v1::NodeInfo::default() };
        assert!(registry.heard(3, "n", Presence { info, ..heard_on("b", 3) }));
        assert_eq!((registry.connected_as("worker"), registry.connected_as("query")), (vec!["n".to_owned()], vec![]));
        assert!(registry.closed("n", 3));
        assert_eq!((registry.connected(), registry.of("n", "b").is_some()), (0, true));
        assert!(registry.connected_as("worker").is_empty());
        registry.left("n", "b");
        assert!(registry.of("n", "b").is_none());
        // What is deleted by hand does not say that it leaves.
        assert!(registry.heard(3, "n", heard_on("b", 4)) && registry.heard(3, "deleted", heard_on("c", 5)));
        assert_eq!(registry.forget(|node| node != "deleted"), [("deleted".to_owned(), "c".to_owned())]);
        assert!(registry.of("n", "b").is_some() && registry.of("deleted", "c").is_none());
    }

    #[test]
    fn what_is_told_of_another_term_changes_nothing() {
        let mut registry = Registry::default();
        assert!(!registry.heard(0, "n", heard_on("a", 1)), "nobody is on duty");
        registry.lead(3);
        assert!(!registry.heard(2, "n", heard_on("a", 1)));
        assert!(registry.heard(3, "n", heard_on("a", 1)));
        registry.lead(4);
        assert_eq!((registry.connected(), registry.of("n", "a").is_none()), (0, true));
        registry.stop();
        assert!(!registry.heard(4, "n", heard_on("a", 1)));
    }
}
