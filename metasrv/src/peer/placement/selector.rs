//! Which worker gets a shard, as pure functions.
//!
//! ```text
//!   workers --- never those forbidden ---> not those to be avoided, the preferred first ---> as the selector orders them
//!                                            `-- too few are left --> all of them: again, without affinity
//! ```
//! Affinity is a wish: which nodes are better avoided (those that have the shard already in another part), and which are preferred
//! (those that have its tables in their caches). Where it leaves fewer nodes than are wanted, the choice is made again without it. What
//! is forbidden stays so.

use std::collections::BTreeSet;
use std::time::Duration;

use lake_proto::coordination::LeaseId;
use serde::Deserialize;

/// How workers are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Selector {
    /// One after the other, in the order of their names.
    RoundRobin,
    /// Those that were heard last first: the longest part of their leases is left.
    Lease,
    /// Those with the least to do first: shards that they lead, processor time, statements.
    #[default]
    Load,
}

/// A worker that may be given a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub node: String,
    pub lease: LeaseId,
    /// How long until its lease ends unless it is heard.
    pub remaining: Duration,
    /// The shards that it leads.
    pub shards: usize,
    /// Thousandths of a core that it uses, of each that it has.
    pub cpu_permille: u32,
    pub running_statements: u32,
}

/// Wishes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affinity {
    /// Not these; this is no wish.
    pub forbidden: BTreeSet<String>,
    /// Better not these.
    pub avoided: BTreeSet<String>,
    /// These first, the first of them first.
    pub preferred: Vec<String>,
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selected {
    /// At most as many as were wanted, the best first.
    pub nodes: Vec<String>,
    /// There were too few to heed the wishes.
    pub without_affinity: bool,
}

/// Leases of which at least so much of the longest is left are taken for equal: they differ by when heartbeats come.
const LEASE_STEPS: u32 = 4;

impl Selector {
    /// Chooses `wanted` of the candidates, fewer if there are not so many. `turn` goes on with each choice.
    pub fn select(self, candidates: &[Candidate], wanted: usize, affinity: &Affinity, turn: &mut usize) -> Selected {
        let allowed: Vec<&Candidate> =
            candidates.iter().filter(|candidate| !affinity.forbidden.contains(&candidate.node)).collect();
        let wished: Vec<&Candidate> =
            allowed.iter().copied().filter(|candidate| !affinity.avoided.contains(&candidate.node)).collect();
        let without_affinity = wished.len() < wanted && wished.len() < allowed.len();
        let (from, preferred) = match without_affinity {
            true => (allowed, &[][..]),
            false => (wished, affinity.preferred.as_slice()),
        };
        let mut ordered = self.order(from, *turn);
        let place = |candidate: &&Candidate| {
            preferred.iter().position(|node| *node == candidate.node).unwrap_or(preferred.len())
        };
        // Stable: those that are not preferred keep their order.
        ordered.sort_by_key(place);
        ordered.truncate(wanted);
        *turn = turn.wrapping_add(ordered.len());
        Selected { nodes: ordered.into_iter().map(|candidate| candidate.node.clone()).collect(), without_affinity }
    }

    fn order(self, mut candidates: Vec<&Candidate>, turn: usize) -> Vec<&Candidate> {
        candidates.sort_by(|a, b| a.node.cmp(&b.node));
        match self {
            Selector::RoundRobin => {
                let first = if candidates.is_empty() { 0 } else { turn % candidates.len() };
                candidates.rotate_left(first);
            }
            Selector::Lease => {
                let longest = candidates.iter().map(|candidate| candidate.remaining).max().unwrap_or_default();
                let step = (longest / LEASE_STEPS).as_millis().max(1);
                let spent = |candidate: &&Candidate| (longest - candidate.remaining).as_millis() / step;
                candidates.sort_by_key(|candidate| (spent(candidate), candidate.shards));
            }
            Selector::Load => candidates.sort_by_key(|candidate| candidate.load()),
        }
        candidates
    }
}

impl Candidate {
    /// How much it has to do: shards count most, because the load of those that it was just given does not show yet.
    fn load(&self) -> (usize, u32) {
        // A core that is busy all the time counts as eight shards.
        (self.shards + self.cpu_permille as usize / 125, self.running_statements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(node: &str) -> Candidate {
        Candidate {
            node: node.into(),
            lease: 1,
            remaining: Duration::from_secs(8),
            shards: 0,
            cpu_permille: 0,
            running_statements: 0,
        }
    }

    fn three() -> Vec<Candidate> {
        ["c", "a", "b"].map(candidate).into()
    }

    fn chosen(selector: Selector, from: &[Candidate], wanted: usize, affinity: &Affinity) -> (String, bool) {
        let selected = selector.select(from, wanted, affinity, &mut 0);
        (selected.nodes.join(""), selected.without_affinity)
    }

    fn set(nodes: &[&str]) -> BTreeSet<String> {
        nodes.iter().map(|node| (*node).to_owned()).collect()
    }

    #[test]
    fn turns_go_round() {
        let (mut turn, wishes) = (0, Affinity::default());
        let mut next = |wanted| Selector::RoundRobin.select(&three(), wanted, &wishes, &mut turn).nodes.join("");
        assert_eq!([next(1), next(1), next(1), next(2), next(2)], ["a", "b", "c", "ab", "ca"]);
        assert_eq!(Selector::RoundRobin.select(&[], 1, &wishes, &mut 7), Selected::default());
    }

    #[test]
    fn the_node_with_the_freshest_lease_comes_first_unless_they_are_about_the_same() {
        let mut from = three();
        from[1].remaining = Duration::from_millis(7500);
        from[1].shards = 1;
        from[2].remaining = Duration::from_secs(2);
        // c and a were heard in the last heartbeat's time: c has fewer shards.
        assert_eq!(chosen(Selector::Lease, &from, 3, &Affinity::default()).0, "cab");
        from[0].shards = 2;
        assert_eq!(chosen(Selector::Lease, &from, 3, &Affinity::default()).0, "acb");
    }

    #[test]
    fn the_node_with_the_least_to_do_comes_first() {
        let mut from = three();
        from[0].shards = 3;
        from[1].cpu_permille = 900;
        from[2].running_statements = 64;
        assert_eq!(chosen(Selector::Load, &from, 3, &Affinity::default()).0, "bca");
    }

    #[test]
    fn wishes_are_heeded_unless_too_few_are_left() {
        let affinity =
            Affinity { avoided: set(&["a"]), preferred: vec!["c".into(), "zz".into()], ..Affinity::default() };
        for selector in [Selector::RoundRobin, Selector::Lease, Selector::Load] {
            assert_eq!(chosen(selector, &three(), 2, &affinity), ("cb".into(), false), "{selector:?}");
            assert_eq!(chosen(selector, &three(), 3, &affinity), ("abc".into(), true), "{selector:?}");
            // What is forbidden stays so, and nobody is made up.
            let affinity = Affinity { forbidden: set(&["b", "c"]), ..affinity.clone() };
            assert_eq!(chosen(selector, &three(), 2, &affinity), ("a".into(), true), "{selector:?}");
            let affinity = Affinity { forbidden: set(&["a", "b", "c"]), ..affinity };
            assert_eq!(chosen(selector, &three(), 1, &affinity), (String::new(), false), "{selector:?}");
        }
    }
}
