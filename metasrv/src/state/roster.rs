//! Every peer that is, or ever was, a member of the cluster (semantics, section 9): so that an id is never used again, and
//! a removed peer is known as such for ever.
//!
//! Nothing proposes to it: it follows the membership entries of the log as they are applied, so that whatever changes the
//! membership, and however, cannot forget to say so; and like the rest of the state it is in snapshots and in the hash. It
//! only grows: by a peer for each that joins, which joining bounds ([`MAX_KNOWN_PEERS`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use imbl::OrdMap;

use super::State;
use super::hash::{self, StateHash};

/// Peers that a cluster can have in its whole life.
pub const MAX_KNOWN_PEERS: usize = 10_000;

/// What is known of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPeer {
    /// Of its data directory.
    pub incarnation: Arc<str>,
    /// It was a member once, and will never be one again.
    pub removed: bool,
}

/// The peers by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Roster {
    peers: OrdMap<u64, KnownPeer>,
}

impl Roster {
    fn set(&mut self, id: u64, peer: KnownPeer, hash: &mut StateHash) {
        hash.add(hash::peer(id, &peer.incarnation, peer.removed));
        if let Some(before) = self.peers.insert(id, peer) {
            hash.remove(hash::peer(id, &before.incarnation, before.removed));
        }
    }
}

impl State {
    /// The members are these from now on, each with its incarnation.
    pub fn set_members<'a>(&mut self, members: impl IntoIterator<Item = (u64, &'a str)>) {
        let members: BTreeMap<u64, &str> = members.into_iter().collect();
        let gone: Vec<_> = self
            .known_peers()
            .filter(|(id, peer)| !peer.removed && !members.contains_key(id))
            .map(|(id, peer)| (id, KnownPeer { removed: true, ..peer.clone() }))
            .collect();
        let new = members
            .into_iter()
            .filter(|(id, incarnation)| {
                self.known_peer(*id).is_none_or(|known| known.removed || *known.incarnation != **incarnation)
            })
            .map(|(id, incarnation)| (id, KnownPeer { incarnation: incarnation.into(), removed: false }));
        for (id, peer) in gone.into_iter().chain(new.collect::<Vec<_>>()) {
            self.roster.set(id, peer, &mut self.hash);
        }
    }

    pub(super) fn restore_peer(&mut self, id: u64, peer: KnownPeer) {
        self.roster.set(id, peer, &mut self.hash);
    }

    /// A peer that is, or was, a member.
    pub fn known_peer(&self, id: u64) -> Option<&KnownPeer> {
        self.roster.peers.get(&id)
    }

    /// All of them, by id.
    pub fn known_peers(&self) -> impl Iterator<Item = (u64, &KnownPeer)> {
        self.roster.peers.iter().map(|(id, peer)| (*id, peer))
    }

    /// From which id on none was ever a peer's.
    pub fn next_peer_id(&self) -> u64 {
        self.known_peers().map(|(id, _)| id).max().unwrap_or(0).saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_peer_stays_known_and_is_part_of_the_hash() {
        let mut state = State::default();
        let empty = state.digest();
        state.set_members([(1, "a"), (2, "b")]);
        let both = state.clone();
        assert_ne!(state.digest(), empty);
        state.set_members([(1, "a"), (2, "b")]);
        assert_eq!(state, both);

        state.set_members([(1, "a"), (3, "c")]);
        let known: Vec<_> = state.known_peers().map(|(id, p)| (id, &*p.incarnation, p.removed)).collect();
        assert_eq!(known, [(1, "a", false), (2, "b", true), (3, "c", false)]);
        assert_ne!(state.digest(), both.digest());
        assert_eq!(state.revision(), 0, "who is a member is no change of the map");
        state.set_members([(1, "a"), (3, "c")]);
        assert!(state.known_peer(2).is_some_and(|p| p.removed), "it is remembered over later changes");

        let mut other = State::default();
        other.set_members([(1, "a"), (2, "b")]);
        other.set_members([(1, "a"), (3, "c")]);
        assert_eq!(other.digest(), state.digest());
    }
}
