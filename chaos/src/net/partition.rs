//! Which paths a partition cuts. Clients still reach every peer: what a peer tells them that has lost the others is the
//! question.

use rand::Rng;
use rand::seq::SliceRandom;

use super::condition::{Condition, Cut};
use super::{Conditions, Node, Path};

/// The kinds of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A majority and a minority, at random.
    Halves,
    /// The leader has lost everybody.
    LeaderAlone,
    /// Nothing that the leader says arrives; it hears the others.
    OneWay,
    /// Everybody sees a majority, and no two see the same.
    Ring,
    /// Two sides that only one peer in the middle can reach, who does not lead.
    Bridge,
}

/// All of them.
pub const KINDS: [Kind; 5] = [Kind::Halves, Kind::LeaderAlone, Kind::OneWay, Kind::Ring, Kind::Bridge];

impl Kind {
    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Halves => "halves",
            Kind::LeaderAlone => "leader-alone",
            Kind::OneWay => "one-way",
            Kind::Ring => "ring",
            Kind::Bridge => "bridge",
        }
    }
}

impl Kind {
    /// How many peers it takes at least.
    pub fn least_peers(self) -> usize {
        match self {
            Kind::Halves | Kind::LeaderAlone | Kind::OneWay => 2,
            Kind::Ring | Kind::Bridge => 3,
        }
    }

    /// Whether it is about the leader.
    pub fn is_of_the_leader(self) -> bool {
        matches!(self, Kind::LeaderAlone | Kind::OneWay)
    }
}

/// The paths between `peers` that are cut. Of three peers whoever sees a majority sees all but one: a ring is a bridge then.
pub fn paths(kind: Kind, peers: &[u64], leader: Option<u64>, rng: &mut impl Rng) -> Vec<Path> {
    let mut shuffled = peers.to_vec();
    shuffled.shuffle(rng);
    if peers.len() < kind.least_peers() {
        return Vec::new();
    }
    let someone = leader.filter(|id| peers.contains(id)).or(shuffled.first().copied());
    let majority = peers.len() / 2 + 1;
    match (kind, someone) {
        (_, None) => Vec::new(),
        (Kind::Halves, _) => {
            // Of two peers neither side is a majority.
            let (one, other) = shuffled.split_at(majority.min(peers.len() - 1));
            both_ways(one, other)
        }
        (Kind::LeaderAlone, Some(leader)) => {
            let others: Vec<u64> = peers.iter().copied().filter(|id| *id != leader).collect();
            both_ways(&[leader], &others)
        }
        (Kind::OneWay, Some(mute)) => {
            let others = peers.iter().copied().filter(|id| *id != mute);
            others.map(|id| (Node::Peer(mute), Node::Peer(id))).collect()
        }
        (Kind::Ring, _) if peers.len() > 3 => {
            let n = shuffled.len();
            // Each sees itself and those next to it, as many as make a majority.
            let reach = majority / 2;
            let apart = |i: usize, j: usize| (i + n - j) % n > reach && (j + n - i) % n > reach;
            let pairs = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| apart(*i, *j));
            pairs.map(|(i, j)| (Node::Peer(shuffled[i]), Node::Peer(shuffled[j]))).collect()
        }
        (Kind::Ring | Kind::Bridge, Some(someone)) => {
            // A leader stands on a side: between two followers there is little to cut.
            let middle = shuffled.iter().position(|id| *id != someone).unwrap_or(0);
            shuffled.swap_remove(middle);
            let (one, other) = shuffled.split_at(shuffled.len() / 2);
            both_ways(one, other)
        }
    }
}

/// Those paths, cut.
pub fn cut(paths: &[Path], how: Cut) -> Conditions {
    paths.iter().map(|path| (*path, Condition::cut(how))).collect()
}

fn both_ways(one: &[u64], other: &[u64]) -> Vec<Path> {
    let pairs = one.iter().flat_map(|a| other.iter().map(move |b| (Node::Peer(*a), Node::Peer(*b))));
    pairs.flat_map(|(a, b)| [(a, b), (b, a)]).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    /// How many peers each peer can exchange messages with, itself among them.
    fn seen(peers: &[u64], cut: &[Path]) -> Vec<usize> {
        let sound = |a: u64, b: u64| !cut.contains(&(Node::Peer(a), Node::Peer(b)));
        peers.iter().map(|a| peers.iter().filter(|b| a == *b || (sound(*a, **b) && sound(**b, *a))).count()).collect()
    }

    #[test]
    fn each_kind_cuts_what_it_says() {
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            for n in [3, 5, 7] {
                let peers: Vec<u64> = (1..=n).collect();
                let majority = peers.len() / 2 + 1;
                let minority = peers.len() - majority;
                let mut halves = seen(&peers, &paths(Kind::Halves, &peers, Some(1), &mut rng));
                halves.sort_unstable();
                assert_eq!((halves[0], halves[peers.len() - 1]), (minority, majority));
                let alone = paths(Kind::LeaderAlone, &peers, Some(2), &mut rng);
                assert_eq!(seen(&peers, &alone)[1], 1);
                assert_eq!(alone.len(), 2 * (peers.len() - 1));
                let mute = paths(Kind::OneWay, &peers, Some(3), &mut rng);
                assert!(mute.iter().all(|(from, _)| *from == Node::Peer(3)) && mute.len() == peers.len() - 1);
                let ring = seen(&peers, &paths(Kind::Ring, &peers, None, &mut rng));
                assert!(ring.iter().all(|count| *count >= majority), "{ring:?}");
                assert_eq!(ring.contains(&peers.len()), n == 3, "{ring:?}");
                let bridge = seen(&peers, &paths(Kind::Bridge, &peers, Some(1), &mut rng));
                assert_eq!(bridge.iter().filter(|count| **count == peers.len()).count(), 1);
                assert!(bridge[0] < peers.len(), "the leader is not the one in the middle");
            }
        }
    }

    #[test]
    fn two_peers_can_only_lose_each_other() {
        let mut rng = StdRng::seed_from_u64(1);
        for kind in KINDS {
            let cut = paths(kind, &[1, 2], Some(1), &mut rng);
            let expected = match kind {
                Kind::Halves | Kind::LeaderAlone => 2,
                Kind::OneWay => 1,
                Kind::Ring | Kind::Bridge => 0,
            };
            assert_eq!(cut.len(), expected, "{kind:?}");
        }
    }

    #[test]
    fn one_peer_has_nothing_to_lose() {
        let mut rng = StdRng::seed_from_u64(1);
        for kind in KINDS {
            assert!(paths(kind, &[1], Some(1), &mut rng).is_empty(), "{kind:?}");
            assert!(paths(kind, &[], None, &mut rng).is_empty());
        }
    }
}
