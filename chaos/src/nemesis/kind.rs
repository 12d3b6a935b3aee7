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
    QueryKill,
    QueryPause,
    QueryPartition,
    StoreSlow,
    StoreRefuse,
    StoreThrottle,
    StoreLate,
    StorePartition,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 27] = [
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
        Kind::QueryKill,
        Kind::QueryPause,
        Kind::QueryPartition,
        Kind::StoreSlow,
        Kind::StoreRefuse,
        Kind::StoreThrottle,
        Kind::StoreLate,
        Kind::StorePartition,
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
            Kind::QueryKill => "query-kill",
            Kind::QueryPause => "query-pause",
            Kind::QueryPartition => "query-partition",
            Kind::StoreSlow => "store-slow",
            Kind::StoreRefuse => "store-refuse",
            Kind::StoreThrottle => "store-throttle",
            Kind::StoreLate => "store-late",
            Kind::StorePartition => "store-partition",
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

    /// Whether it is done to query nodes, not to peers.
    pub fn is_of_query_nodes(self) -> bool {
        matches!(self, Kind::QueryKill | Kind::QueryPause | Kind::QueryPartition | Kind::StorePartition)
    }

    /// Whether it is done to the object store, which only query nodes go to, or to their way to it.
    pub fn is_of_the_store(self) -> bool {
        let kinds = [Kind::StoreSlow, Kind::StoreRefuse, Kind::StoreThrottle, Kind::StoreLate, Kind::StorePartition];
        kinds.contains(&self)
    }

    /// Whom it may be asked to be done to.
    fn targets(self) -> &'static [Target] {
        use Target::{All, Leader, Majority, Minority, One};
        match self {
            Kind::Kill | Kind::Pause | Kind::Restart => &[Leader, One, Minority, Majority, All],
            Kind::Slow | Kind::Lossy | Kind::Reorder | Kind::Endpoint => &[Leader, One, Minority, Majority, All],
            Kind::Clock | Kind::Disk | Kind::Sync | Kind::Power => &[Leader, One, Minority, Majority, All],
            Kind::Snapshot => &[Leader, One, Minority],
            Kind::Membership | Kind::Wipe | Kind::Corrupt | Kind::Loss => &[Leader, One],
            Kind::QueryKill | Kind::QueryPause | Kind::QueryPartition | Kind::StorePartition => &[One, All],
            Kind::Partition | Kind::Rejoin | Kind::Transfer => &[],
            Kind::StoreSlow | Kind::StoreRefuse | Kind::StoreThrottle | Kind::StoreLate => &[],
        }
    }

    /// What may stand behind its colon, and why nothing else does.
    fn takes(self) -> String {
        let targets = self.targets().iter().map(|target| target.name()).collect::<Vec<_>>().join(", ");
        match self {
            Kind::Partition => {
                format!("{}, which say who is cut off", partition::KINDS.map(partition::Kind::name).join(", "))
            }
            Kind::Rejoin => "nothing: it is about the leader, and then about all others".to_owned(),
            Kind::Transfer => "nothing: it is the leader that hands over".to_owned(),
            Kind::Snapshot => format!("{targets}: the others must go on meanwhile"),
            Kind::Membership => format!("{targets}: one voter goes at a time"),
            Kind::Wipe | Kind::Corrupt | Kind::Loss => format!("{targets}: the others make good what one has lost"),
            kind if kind.is_of_query_nodes() => format!("{targets}: it is done to query nodes, which nobody leads"),
            kind if kind.is_of_the_store() => "nothing: there is one object store".to_owned(),
            _ => targets,
        }
    }
}

/// Which peers, or query nodes, a fault is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    Leader,
    One,
    Minority,
    Majority,
    All,
}

impl Target {
    const ALL: [Target; 5] = [Target::Leader, Target::One, Target::Minority, Target::Majority, Target::All];

    fn name(self) -> &'static str {
        match self {
            Target::Leader => "leader",
            Target::One => "one",
            Target::Minority => "minority",
            Target::Majority => "majority",
            Target::All => "all",
        }
    }
}

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
        self.target.map_or(Ok(()), |target| write!(f, ":{}", target.name()))?;
        self.partition.map_or(Ok(()), |kind| write!(f, ":{}", kind.name()))
    }
}

/// Why a word asks for no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchFault {
    #[error("no nemesis is named {name:?}; there are: {}", Kind::ALL.map(Kind::name).join(", "))]
    Name { name: String },
    #[error("the nemesis {kind} cannot be done to {detail:?}; behind its colon it takes {takes}")]
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
        let target = Target::ALL.into_iter().find(|target| target.name() == detail);
        let partition = partition::KINDS.into_iter().find(|kind| kind.name() == detail);
        if target.is_some_and(|target| kind.targets().contains(&target)) {
            requested.target = target;
        } else if kind == Kind::Partition && partition.is_some() {
            requested.partition = partition;
        } else {
            return Err(NoSuchFault::Detail { kind: kind.name(), detail: detail.to_owned(), takes: kind.takes() });
        }
        Ok(requested)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_written() {
        let words = [
            "kill",
            "kill:leader",
            "pause:majority",
            "partition:one-way",
            "power:all",
            "wipe",
            "slow:all",
            "query-kill:all",
        ];
        for word in words {
            let requested: Requested = word.parse().unwrap();
            assert_eq!((requested.to_string().as_str(), requested.label()), (word, word.replace(':', "-")));
        }
        let wrong = [
            ("kil", "there are: kill, pause"),
            ("kill:ring", "takes leader, one"),
            ("wipe:all", "takes leader, one: the others"),
            ("snapshot:majority", "takes leader, one, minority: the others"),
            ("transfer:leader", "takes nothing"),
            ("partition:leader", "takes halves, leader-alone"),
            ("query-kill:leader", "takes one, all: it is done to query nodes"),
            ("store-late:all", "takes nothing: there is one"),
            ("store-partition:leader", "takes one, all: it is done to query nodes"),
        ];
        for (word, says) in wrong {
            let message = word.parse::<Requested>().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn whatever_may_be_named_is_read_and_nothing_else() {
        for kind in Kind::ALL {
            for target in Target::ALL {
                let read = format!("{}:{}", kind.name(), target.name()).parse::<Requested>();
                assert_eq!(read.is_ok(), kind.targets().contains(&target), "{read:?}");
            }
        }
    }
}
