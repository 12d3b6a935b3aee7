//! What a simulation does: a value that follows from a seed, can be written down, and made smaller.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::history::Workload;

/// Longest time that clients are at it.
pub const MAX_TIME: Duration = Duration::from_secs(120);
/// Faults end this long before the clients do, at the latest.
const QUIET_MS: u64 = 1_000;
/// Voters that faults of the membership leave.
pub const LEAST_VOTERS: usize = 3;

/// Which faults there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Profile {
    /// Peers that crash and come back, alone or all at once.
    pub crash: bool,
    /// Links that are cut or slow.
    pub partition: bool,
    /// Peers that join and leave, and leaders that hand over.
    pub membership: bool,
    /// Snapshots often, and a short log, so that a peer that was away needs one.
    pub snapshot: bool,
    /// Clocks that jump, or do not go like the others.
    pub clock: bool,
    /// Disks that are full, and one that is lost.
    pub disk: bool,
}

impl Profile {
    /// All of them.
    pub const ALL: Profile =
        Profile { crash: true, partition: true, membership: true, snapshot: true, clock: true, disk: true };

    /// Those that are in it, by name, each with the kinds of faults that show it.
    pub fn shown_by(self) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
        let all: [(bool, &str, &[&str]); 6] = [
            (self.crash, "crash", &["crash", "crash-all", "depose"]),
            (self.partition, "partition", &["isolate", "mute", "split", "strand", "cut-clients", "slow"]),
            (self.membership, "membership", &["transfer", "join", "remove"]),
            (self.snapshot, "snapshot", &[SNAPSHOT]),
            (self.clock, "clock", &["clock"]),
            (self.disk, "disk", &["full", "lose"]),
        ];
        all.into_iter().filter_map(|(is_in, name, kinds)| is_in.then_some((name, kinds)))
    }
}

/// As what it counts that a peer began, or went on, from a snapshot.
pub const SNAPSHOT: &str = "snapshot";
/// A snapshot after so many entries is one that no simulation comes to.
const NO_SNAPSHOTS: u64 = 100_000;

/// A profile that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no profile {0:?}; there are crash, partition, membership, snapshot, clock and disk, several with commas, and \
     none"
)]
pub struct NoSuchProfile(String);

impl FromStr for Profile {
    type Err = NoSuchProfile;

    fn from_str(words: &str) -> Result<Self, NoSuchProfile> {
        let mut profile = Profile::default();
        for word in words.split(',').map(str::trim) {
            match word {
                "crash" => profile.crash = true,
                "partition" => profile.partition = true,
                "membership" => profile.membership = true,
                "snapshot" => profile.snapshot = true,
                "clock" => profile.clock = true,
                "disk" => profile.disk = true,
                "none" => {}
                other => return Err(NoSuchProfile(other.to_owned())),
            }
        }
        Ok(profile)
    }
}

/// Which peer something is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// Whoever leads then; the first peer if nobody does.
    Leader,
    Peer(u64),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Leader => f.write_str("the leader"),
            Who::Peer(id) => write!(f, "peer {id}"),
        }
    }
}

/// Something that is done to the cluster. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// It loses what it has not synced, but for a beginning that chance leaves, and comes back.
    Crash { who: Who, for_ms: u64 },
    /// All at once, as when the power fails.
    CrashAll { for_ms: u64 },
    /// Between it and the other peers nothing passes. `held`: what was sent arrives when it is over, else it is lost.
    Isolate { who: Who, held: bool, for_ms: u64 },
    /// What it sends to the other peers is lost; what they send arrives.
    Mute { who: Who, for_ms: u64 },
    /// The leader is cut off until the others have another; they crash, and all meet again at once.
    Depose { for_ms: u64 },
    /// Two sides that do not reach each other; clients reach both.
    Split { side: Vec<u64>, held: bool, for_ms: u64 },
    /// The leader and as many followers as leave the others a majority do not reach these; clients reach all. Followers that
    /// go on asking a leader that is none any more are at its side.
    Strand { held: bool, for_ms: u64 },
    /// Between it and the clients nothing passes.
    CutClients { who: Who, for_ms: u64 },
    /// Messages take up to this long.
    Slow { latency_ms: u64, for_ms: u64 },
    /// The leader hands over.
    Transfer,
    /// A fresh peer with this id joins, and becomes a voter.
    Join { id: u64 },
    /// A peer leaves for good.
    Remove { who: Who },
    /// Its clocks jump ahead, and then go faster; or those of all other peers do, so that it falls behind them. Each peer's
    /// jump comes when it runs.
    Clock { who: Who, others: bool, jump_ms: u64, faster_percent: u64, for_ms: u64 },
    /// Its disk has no room for entries, for so long and until some had to wait for that.
    Full { who: Who, for_ms: u64 },
    /// It loses its disk, is started on an empty one, is refused, and is replaced by a fresh peer.
    Lose { who: Who, by: u64, for_ms: u64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = |held: &bool| if *held { "held back" } else { "lost" };
        match self {
            Fault::Crash { who, for_ms } => write!(f, "crash {who}, back after {for_ms} ms"),
            Fault::CrashAll { for_ms } => write!(f, "crash all peers, back after {for_ms} ms"),
            Fault::Isolate { who, held, for_ms } => {
                write!(f, "isolate {who} from the other peers for {for_ms} ms, messages {}", lost(held))
            }
            Fault::Mute { who, for_ms } => write!(f, "lose what {who} sends to the other peers for {for_ms} ms"),
            Fault::Depose { for_ms } => {
                write!(f, "cut the leader off for {for_ms} ms; then the others crash, and all meet again")
            }
            Fault::Split { side, held, for_ms } => {
                write!(f, "cut {side:?} off from the other peers for {for_ms} ms, messages {}", lost(held))
            }
            Fault::Strand { held, for_ms } => {
                write!(f, "cut the leader off with a minority for {for_ms} ms, messages {}", lost(held))
            }
            Fault::CutClients { who, for_ms } => write!(f, "cut {who} off from the clients for {for_ms} ms"),
            Fault::Slow { latency_ms, for_ms } => write!(f, "messages take up to {latency_ms} ms, for {for_ms} ms"),
            Fault::Transfer => f.write_str("the leader hands over"),
            Fault::Join { id } => write!(f, "peer {id} joins"),
            Fault::Remove { who } => write!(f, "{who} is removed"),
            Fault::Clock { who, others, jump_ms, faster_percent, for_ms } => {
                let whose = if *others { "of all peers but" } else { "of" };
                write!(
                    f,
                    "the clocks {whose} {who} jump by {jump_ms} ms, and go {faster_percent} % faster for {for_ms} ms"
                )
            }
            Fault::Full { who, for_ms } => write!(f, "the disk of {who} is full for {for_ms} ms"),
            Fault::Lose { who, by, for_ms } => {
                write!(f, "{who} loses its disk, is back after {for_ms} ms, and peer {by} takes its place")
            }
        }
    }
}

/// A fault, and when it begins: milliseconds since the clients did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timed {
    pub at_ms: u64,
    pub fault: Fault,
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>3}.{:03} s  {}", self.at_ms / 1000, self.at_ms % 1000, self.fault)
    }
}

/// All that a simulation follows from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Of everything that is left to chance: latencies, syncs, election timeouts, what clients choose.
    pub seed: u64,
    pub peers: u64,
    pub workload: Workload,
    pub clients: usize,
    /// Operations per second, all clients together.
    pub rate: f64,
    /// How many operations there are at most.
    pub operations: u64,
    /// How long clients are at it.
    pub time_ms: u64,
    /// Messages take up to this long.
    pub latency_ms: u64,
    /// Syncs take up to this long.
    pub sync_ms: u64,
    /// A snapshot is taken after so many entries, and so many are kept behind it.
    pub snapshot_entries: u64,
    pub kept_entries: u64,
    /// In the order of their times.
    pub faults: Vec<Timed>,
}

impl Plan {
    /// What follows from a seed.
    pub fn draw(seed: u64, profile: Profile, workloads: &[Workload], time: Duration) -> Plan {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let workload = workloads[rng.random_range(0..workloads.len())];
        let peers = if rng.random_bool(0.7) { 3 } else { 5 };
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (snapshot_entries, kept_entries) = match profile.snapshot {
            true => (rng.random_range(20..200), rng.random_range(0..60)),
            false => (NO_SNAPSHOTS, 10_000),
        };
        let mut plan = Plan {
            seed,
            peers,
            workload,
            clients: rng.random_range(3..10),
            rate: (50.0 * 2f64.powf(rng.random_range(0.0..3.5))).round(),
            operations: u64::MAX,
            time_ms,
            latency_ms: rng.random_range(1..8),
            sync_ms: rng.random_range(1..25),
            snapshot_entries,
            kept_entries,
            faults: Vec::new(),
        };
        let last = time_ms.saturating_sub(QUIET_MS).max(1);
        let many = (time_ms / 1500).max(2);
        let mut next_peer = peers + 1;
        let mut voters = peers as usize;
        let mut may_lose = true;
        for _ in 0..rng.random_range(many / 2..=many * 3 / 2) {
            let at_ms = rng.random_range(0..last);
            if let Some(fault) = Fault::draw(profile, &plan, &mut next_peer, &mut voters, &mut may_lose, rng) {
                plan.faults.push(Timed { at_ms, fault });
            }
        }
        plan.faults.sort_by_key(|timed| timed.at_ms);
        plan
    }

    /// Whether logs are cut.
    pub fn has_snapshots(&self) -> bool {
        self.snapshot_entries < NO_SNAPSHOTS
    }

    /// Whether faults of some kind are in it.
    pub fn has(&self, kind: impl Fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(|timed| kind(&timed.fault))
    }
}

impl Fault {
    /// The name of its kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Crash { .. } => "crash",
            Fault::CrashAll { .. } => "crash-all",
            Fault::Isolate { .. } => "isolate",
            Fault::Mute { .. } => "mute",
            Fault::Depose { .. } => "depose",
            Fault::Split { .. } => "split",
            Fault::Strand { .. } => "strand",
            Fault::CutClients { .. } => "cut-clients",
            Fault::Slow { .. } => "slow",
            Fault::Transfer => "transfer",
            Fault::Join { .. } => "join",
            Fault::Remove { .. } => "remove",
            Fault::Clock { .. } => "clock",
            Fault::Full { .. } => "full",
            Fault::Lose { .. } => "lose",
        }
    }

    /// The same, at the leader where it is one peer that is cut off: something is sent to it and from it all the time.
    pub fn at_the_leader(&self) -> Fault {
        let mut fault = self.clone();
        if let Fault::Isolate { who, .. } | Fault::Mute { who, .. } | Fault::CutClients { who, .. } = &mut fault {
            *who = Who::Leader;
        }
        fault
    }

    fn draw(
        profile: Profile,
        plan: &Plan,
        next_peer: &mut u64,
        voters: &mut usize,
        may_lose: &mut bool,
        rng: &mut StdRng,
    ) -> Option<Fault> {
        let Profile { crash, partition, membership, snapshot, clock, disk } = profile;
        let kinds = [(crash, 0), (snapshot, 0), (partition, 1), (membership, 2), (clock, 3), (disk, 4)];
        let kinds: Vec<u8> = kinds.into_iter().filter_map(|(wanted, kind)| wanted.then_some(kind)).collect();
        let kind = *kinds.get(rng.random_range(0..kinds.len().max(1)))?;
        let who = if rng.random_bool(0.5) { Who::Leader } else { Who::Peer(rng.random_range(1..=plan.peers)) };
        let for_ms = if rng.random_bool(0.5) { rng.random_range(20..400) } else { rng.random_range(400..3_000) };
        let held = rng.random_bool(0.5);
        Some(match (kind, rng.random_range(0..10)) {
            (0, 0..2) if partition => Fault::Depose { for_ms: rng.random_range(600..2_000) },
            (0, 0..7) => Fault::Crash { who, for_ms },
            (0, _) => Fault::CrashAll { for_ms },
            (1, 0..4) => Fault::Isolate { who, held, for_ms },
            (1, 4..5) => Fault::Mute { who, for_ms },
            (1, 5..7) if rng.random_bool(0.5) => Fault::Strand { held, for_ms: rng.random_range(800..3_000) },
            (1, 5..7) => {
                let mut side: Vec<u64> = (1..=plan.peers).filter(|_| rng.random_bool(0.5)).collect();
                if side.is_empty() || side.len() as u64 == plan.peers {
                    side = vec![rng.random_range(1..=plan.peers)];
                }
                Fault::Split { side, held, for_ms }
            }
            (1, 7..9) => Fault::CutClients { who, for_ms },
            (1, _) => Fault::Slow { latency_ms: rng.random_range(20..150), for_ms },
            (3, how) => {
                let jump_ms = if how % 2 == 0 { rng.random_range(50..4_000) } else { 0 };
                let faster_percent = if how < 7 { 5 * rng.random_range(1..=20) } else { 0 };
                let jump_ms = if faster_percent == 0 { jump_ms.max(50) } else { jump_ms };
                Fault::Clock { who, others: rng.random_bool(0.3), jump_ms, faster_percent, for_ms }
            }
            (4, 0..4) if std::mem::take(may_lose) => {
                let by = *next_peer;
                *next_peer += 1;
                Fault::Lose { who, by, for_ms }
            }
            (4, _) => Fault::Full { who, for_ms },
            (_, 0..4) => Fault::Transfer,
            (_, 4..7) => {
                let id = *next_peer;
                *next_peer += 1;
                *voters += 1;
                Fault::Join { id }
            }
            _ if *voters > LEAST_VOTERS => {
                *voters -= 1;
                Fault::Remove { who }
            }
            _ => Fault::Transfer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_follows_from_its_seed_and_survives_being_written_down() {
        let draw = |seed| Plan::draw(seed, Profile::ALL, &Workload::OF_KEYS, Duration::from_secs(10));
        for seed in 0..200 {
            let plan = draw(seed);
            assert_eq!(plan, draw(seed));
            assert!(plan.faults.windows(2).all(|pair| pair[0].at_ms <= pair[1].at_ms));
            let written = serde_json::to_string(&plan).unwrap();
            assert_eq!(serde_json::from_str::<Plan>(&written).unwrap(), plan);
        }
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn every_fault_of_a_profile_is_drawn_and_none_of_another() {
        let draw = |profile: &str| {
            let profile = profile.parse().unwrap();
            let plans = (0..300).map(|seed| Plan::draw(seed, profile, &Workload::OF_KEYS, Duration::from_secs(10)));
            plans.collect::<Vec<_>>()
        };
        let any = |plans: &[Plan], kind: fn(&Fault) -> bool| plans.iter().any(|plan| plan.has(kind));
        let crash = draw("crash");
        assert!(any(&crash, |f| matches!(f, Fault::CrashAll { .. })));
        assert!(!any(&crash, |f| !matches!(f, Fault::Crash { .. } | Fault::CrashAll { .. })));
        let others = draw("partition,membership");
        assert!(!any(&others, |f| matches!(f, Fault::Crash { .. } | Fault::CrashAll { .. })));
        assert!(any(&others, |f| matches!(f, Fault::Remove { .. })));
        assert!(any(&others, |f| matches!(f, Fault::Mute { .. })));
        assert!(any(&others, |f| matches!(f, Fault::Strand { .. })));
        let (clock, disk) = (draw("clock"), draw("disk"));
        assert!(!any(&clock, |f| !matches!(f, Fault::Clock { .. })));
        assert!(any(&clock, |f| matches!(f, Fault::Clock { others: true, .. })));
        assert!(!any(&clock, |f| matches!(f, Fault::Clock { jump_ms: 0, faster_percent: 0, .. })));
        assert!(any(&disk, |f| matches!(f, Fault::Lose { .. })));
        assert!(any(&disk, |f| matches!(f, Fault::Full { .. })));
        let losses = |plan: &Plan| plan.faults.iter().filter(|timed| matches!(timed.fault, Fault::Lose { .. })).count();
        assert!(disk.iter().all(|plan| losses(plan) <= 1));
        assert!(draw("none").iter().all(|plan| plan.faults.is_empty()));
        assert!("crash,fire".parse::<Profile>().is_err());
    }
}
