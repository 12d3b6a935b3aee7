//! The names of the workloads.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What the clients of a run do, and with it which checkers judge its history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    Register,
    Set,
    Append,
    Bank,
    Watch,
    Lock,
    Idempotency,
    Session,
    Table,
    #[serde(rename = "multi-table")]
    MultiTable,
    Catalog,
    Cached,
    Hot,
    Upkeep,
}

impl Workload {
    /// All of them.
    pub const ALL: [Workload; 14] = [
        Workload::Register,
        Workload::Set,
        Workload::Append,
        Workload::Bank,
        Workload::Watch,
        Workload::Lock,
        Workload::Idempotency,
        Workload::Session,
        Workload::Table,
        Workload::MultiTable,
        Workload::Catalog,
        Workload::Cached,
        Workload::Hot,
        Workload::Upkeep,
    ];
    /// Those whose clients speak to the metadata peers: they need no query nodes.
    pub const OF_KEYS: [Workload; 8] = [
        Workload::Register,
        Workload::Set,
        Workload::Append,
        Workload::Bank,
        Workload::Watch,
        Workload::Lock,
        Workload::Idempotency,
        Workload::Session,
    ];

    /// Whether its clients speak SQL to query nodes.
    pub fn is_sql(self) -> bool {
        !Self::OF_KEYS.contains(&self)
    }

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Register => "register",
            Workload::Set => "set",
            Workload::Append => "append",
            Workload::Bank => "bank",
            Workload::Watch => "watch",
            Workload::Lock => "lock",
            Workload::Idempotency => "idempotency",
            Workload::Session => "session",
            Workload::Table => "table",
            Workload::MultiTable => "multi-table",
            Workload::Catalog => "catalog",
            Workload::Cached => "cached",
            Workload::Hot => "hot",
            Workload::Upkeep => "upkeep",
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// There is no such workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no workload is named {0:?}; there are: {names}", names = Workload::ALL.map(Workload::name).join(", "))]
pub struct NoSuchWorkload(String);

impl FromStr for Workload {
    type Err = NoSuchWorkload;

    fn from_str(name: &str) -> Result<Self, NoSuchWorkload> {
        Workload::ALL.into_iter().find(|w| w.name() == name).ok_or_else(|| NoSuchWorkload(name.to_owned()))
    }
}
