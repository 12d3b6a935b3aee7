//! The names of the faults, and what they may be done to.

use std::fmt;
use std::str::FromStr;

use crate::net::partition;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Kill,
    Pause,
    Restart,
    Snapshot,
    Partition,
    Slow,
    Lossy,
    Reorder,
    Endpoint,
    Rejoin,
    Transfer,
    Membership,
    Wipe,
    Corrupt,
    Loss,
    Clock,
    Disk,
    Sync,
    Power,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 19] = [
        Kind::Kill,
        Kind::Pause,
        Kind::Restart,
        Kind::Snapshot,
        Kind::Partition,
        Kind::Slow,
        Kind::Lossy,
        Kind::Reorder,
        Kind::Endpoint,
        Kind::Rejoin,
        Kind::Transfer,
        Kind::Membership,
        Kind::Wipe,
        Kind::Corrupt,
        Kind::Loss,
        Kind::Clock,
        Kind::Disk,
        Kind::Sync,
        Kind::Power,
    ];

    /// As it is written on the command line and in histories.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Kill => "kill",
            Kind::Pause => "pause",
            Kind::Restart => "restart",
            Kind::Snapshot => "snapshot",
            Kind::Partition => "partition",
            Kind::Slow => "slow",
            Kind::Lossy => "lossy",
            Kind::Reorder => "reorder",
            Kind::Endpoint => "endpoint",
            Kind::Rejoin => "rejoin",
            Kind::Transfer => "transfer",
            Kind::Membership => "membership",
            Kind::Wipe => "wipe",
            Kind::Corrupt => "corrupt",
            Kind::Loss => "loss",
            Kind::Clock => "clock",
            Kind::Disk => "disk",
            Kind::Sync => "sync",
            Kind::Power => "power",
        }
    }

    /// Peers that one such fault uses up: each needs a fresh one in place of what it destroys.
    pub fn spare_peers(self) -> u64 {
        u64::from(matches!(self, Kind::Membership | Kind::Wipe | Kind::Corrupt | Kind::Loss))
    }

    /// Whether it is over as soon as it has been done.
    pub fn is_momentary(self) -> bool {
        matches!(self, Kind::Restart | Kind::Transfer | Kind::Wipe)
    }

    /// Whether beginning or ending it takes a cluster that can decide: it is the only fault then.
    pub fn stands_alone(self) -> bool {
        let kinds = [Kind::Restart, Kind::Snapshot, Kind::Rejoin, Kind::Transfer];
        kinds.contains(&self) || self.spare_peers() > 0
    }

    fn takes_a_target(self) -> bool {
        matches!(self, Kind::Kill | Kind::Pause | Kind::Disk | Kind::Power)
    }
}

/// Which peers a fault is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    Leader,
    One,
    Minority,
    Majority,
    All,
}

const TARGETS: [(&str, Target); 5] = [
    ("leader", Target::Leader),
    ("one", Target::One),
    ("minority", Target::Minority),
    ("majority", Target::Majority),
    ("all", Target::All),
];

/// A fault as it is asked for: `kill`, `kill:leader`, `partition:ring`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Requested {
    pub kind: Kind,
    /// `None`: by chance, each time.
    pub target: Option<Target>,
    /// The kind of partition; `None`: by chance, each time.
    pub partition: Option<partition::Kind>,
}

impl Requested {
    /// By chance in everything.
    pub fn any(kind: Kind) -> Self {
        Self { kind, target: None, partition: None }
    }

    /// As histories call it: `kill`, `kill-leader`. What was asked for with a detail must take effect with it.
    pub fn label(&self) -> String {
        self.to_string().replace(':', "-")
    }
}

impl fmt::Display for Requested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some((name, _)) = TARGETS.iter().find(|(_, target)| Some(*target) == self.target) {
            write!(f, ":{name}")?;
        }
        self.partition.map_or(Ok(()), |kind| write!(f, ":{}", kind.name()))
    }
}

/// Why a word asks for no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchFault {
    #[error("no nemesis is named {name:?}; there are: {}", Kind::ALL.map(Kind::name).join(", "))]
    Name { name: String },
    #[error("the nemesis {kind} cannot be done to {detail:?}; it takes {takes}")]
    Detail { kind: &'static str, detail: String, takes: String },
}

impl FromStr for Requested {
    type Err = NoSuchFault;

    fn from_str(word: &str) -> Result<Self, NoSuchFault> {
        let (name, detail) = word.split_once(':').map_or((word, None), |(name, detail)| (name, Some(detail)));
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
        let kind = kind.ok_or_else(|| NoSuchFault::Name { name: name.to_owned() })?;
        let mut requested = Requested::any(kind);
        let Some(detail) = detail else { return Ok(requested) };
        let target = TARGETS.iter().find(|(name, _)| *name == detail).map(|(_, target)| *target);
        let partition = partition::KINDS.into_iter().find(|kind| kind.name() == detail);
        if kind.takes_a_target() && target.is_some() {
            requested.target = target;
        } else if kind == Kind::Partition && partition.is_some() {
            requested.partition = partition;
        } else {
            let takes = match kind {
                Kind::Partition => partition::KINDS.map(partition::Kind::name).join(", "),
                kind if kind.takes_a_target() => TARGETS.map(|(name, _)| name).join(", "),
                _ => "nothing after a colon".to_owned(),
            };
            return Err(NoSuchFault::Detail { kind: kind.name(), detail: detail.to_owned(), takes });
        }
        Ok(requested)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_written() {
        for word in ["kill", "kill:leader", "pause:majority", "partition:one-way", "power:all", "wipe"] {
            let requested: Requested = word.parse().unwrap();
            assert_eq!((requested.to_string().as_str(), requested.label()), (word, word.replace(':', "-")));
        }
        for (word, says) in [("kil", "there are: kill, pause"), ("kill:ring", "takes leader"), ("wipe:one", "nothing")]
        {
            let message = word.parse::<Requested>().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
    }
}
