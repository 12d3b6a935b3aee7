//! What hurts a cluster, and mends it again.
//!
//! A [`Nemesis`] begins a fault and ends it; [`schedule`] says which, when and for how long. Each beginning and each end is
//! reported as installed, with what shows that it took effect; skipped, with what this machine lacks for it; or failed. What
//! was asked for and never took effect has tested nothing, and the run's verdict says so.
//!
//! - [`kind`]: the names, and what each is done to; [`field`]: the cluster as nemeses see it;
//! - [`schedule`]: the plan of a run, a function of its seed;
//! - [`process`]: the faults of processes; [`network`], [`leadership`], [`members`], [`files`], [`clock`], [`disk`]: the others of
//!   peers; [`query`]: that of query nodes; [`objects`]: those of the object store, and of the way of some query nodes to it.
//!
//! Invariant: a peer is under one fault of its process or disk at a time, and a query node under one. Every wait is bounded.

pub mod clock;
pub mod disk;
pub mod field;
mod files;
pub mod kind;
mod leadership;
mod members;
mod network;
mod objects;
mod process;
mod query;
pub mod schedule;

use async_trait::async_trait;
use rand::rngs::StdRng;

use self::field::{Field, called, named_as};
use self::kind::{Kind, Requested};
pub use self::process::SNAPSHOT_ARGUMENTS;
use crate::history::Installation;
use crate::net::objects::Trouble;
use crate::process::Role;

/// What came of beginning or ending a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// What it was done to, for people.
    pub target: String,
    pub installation: Installation,
}

impl Done {
    pub(crate) fn installed(target: impl Into<String>, proof: impl Into<String>) -> Self {
        Self { target: target.into(), installation: Installation::Installed(proof.into()) }
    }

    pub(crate) fn skipped(target: impl Into<String>, why: impl Into<String>) -> Self {
        Self { target: target.into(), installation: Installation::Skipped(why.into()) }
    }

    pub(crate) fn failed(target: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self { target: target.into(), installation: Installation::Failed(why.to_string()) }
    }

    /// The same was done to several peers: what shows it of each, or why nothing does. It took effect if it did on all.
    fn of_each(came: &[(u64, Result<String, String>)]) -> Self {
        Self::of_all(called(Role::Metasrv), came)
    }

    /// The same of what is called by this name.
    pub(crate) fn of_all(name: &str, came: &[(u64, Result<String, String>)]) -> Self {
        let target = named_as(name, &came.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        let told = came.iter().map(|(id, came)| match came {
            Ok(proof) => format!("{name} {id}: {proof}"),
            Err(why) => format!("{name} {id}: no effect, {why}"),
        });
        let told = told.collect::<Vec<_>>().join("; ");
        match came {
            [] => Self::failed(target, format!("there was no {name} to do it to")),
            came if came.iter().all(|(_, came)| came.is_ok()) => Self::installed(target, told),
            _ => Self::failed(target, told),
        }
    }

    fn is_installed(&self) -> bool {
        matches!(self.installation, Installation::Installed(_))
    }
}

/// One kind of fault, on a cluster as it is seen by `F`. It is begun, and then ended, before it is begun again.
#[async_trait]
pub trait Nemesis<F: Sync = Field>: Send {
    /// Begins the fault.
    async fn start(&mut self, field: &F, rng: &mut StdRng) -> Done;

    /// Ends it. Also if beginning it was skipped or failed half-way: nothing of it is left.
    async fn stop(&mut self, field: &F) -> Done;
}

/// The nemesis of that kind.
pub fn of(requested: &Requested) -> Box<dyn Nemesis> {
    match requested.kind {
        Kind::Kill => Box::new(process::Kill::new(Role::Metasrv, requested.target)),
        Kind::Pause => Box::new(process::Pause::new(Role::Metasrv, requested.target)),
        Kind::Restart => Box::new(process::RollingRestart::new(requested.target)),
        Kind::Snapshot => Box::new(process::LeftBehind::new(requested.target)),
        Kind::Partition => Box::new(network::Partition::new(requested.partition)),
        Kind::Slow => Box::new(network::Slow::new(requested.target)),
        Kind::Lossy => Box::new(network::Lossy::new(requested.target)),
        Kind::Reorder => Box::new(network::Reorder::new(requested.target)),
        Kind::Endpoint => Box::new(network::Endpoint::new(requested.target)),
        Kind::Rejoin => Box::new(process::Rejoin::default()),
        Kind::Transfer => Box::new(leadership::Transfer),
        Kind::Membership => Box::new(members::Churn::new(requested.target)),
        Kind::Wipe => Box::new(members::Wipe::new(requested.target)),
        Kind::Corrupt => Box::new(files::Damage::new(files::What::Flip, requested.target)),
        Kind::Loss => Box::new(files::Damage::new(files::What::Remove, requested.target)),
        Kind::Clock => Box::new(clock::Jump::new(requested.target)),
        Kind::Disk => Box::new(disk::Full::new(requested.target)),
        Kind::Sync => Box::new(disk::SlowSync::new(requested.target)),
        Kind::Power => Box::new(disk::PowerLoss::new(requested.target)),
        Kind::QueryKill => Box::new(process::Kill::new(Role::Query, requested.target)),
        Kind::QueryPause => Box::new(process::Pause::new(Role::Query, requested.target)),
        Kind::QueryPartition => Box::new(query::Partition::new(requested.target)),
        Kind::StoreSlow => Box::new(objects::Troubled(Trouble::Slow)),
        Kind::StoreRefuse => Box::new(objects::Troubled(Trouble::Refusing)),
        Kind::StoreThrottle => Box::new(objects::Troubled(Trouble::Throttling)),
        Kind::StoreLate => Box::new(objects::Troubled(Trouble::Late)),
        Kind::StorePartition => Box::new(objects::CutOff::new(requested.target)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_effect_on_some_peers_only_has_failed_and_says_on_which() {
        let gone = |pid: u32| Ok(format!("process {pid} is gone"));
        let both = Done::of_each(&[(1, gone(7)), (3, gone(8))]);
        assert_eq!(both, Done::installed("peer 1, peer 3", "peer 1: process 7 is gone; peer 3: process 8 is gone"));
        let one = Done::of_each(&[(1, gone(7)), (3, Err("it had no process".into()))]);
        let told = "peer 1: process 7 is gone; peer 3: no effect, it had no process";
        assert_eq!(one, Done::failed("peer 1, peer 3", told));
        assert!(!Done::of_each(&[]).is_installed());
    }
}
