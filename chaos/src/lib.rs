//! Clusters of lake processes on one machine: started, watched, hurt and stopped.
//!
//! `lake up` is this crate with a prompt in front; the integration tests and the fault runs are this crate with a
//! workload beside. In reading order:
//!
//! - [`ports`]: ports that no two supervisors on a machine take at the same time;
//! - [`dirlock`]: one supervisor per directory;
//! - [`manifest`]: `cluster.json`, what runs where, for tools and tests;
//! - [`process`]: one child process: spawned, signalled, restarted when it dies by itself; `guard`: so that none is left standing
//!   still;
//! - [`peers`]: peers as plain child processes, for tests that kill and start them by hand;
//! - [`probe`]: asking a process whether it serves, and the peers who leads;
//! - [`net`]: links between them that can be cut, slowed and made lossy;
//! - [`cluster`]: peers and query nodes together: founded, awaited, readdressed;
//! - [`disk`]: disks that fill up, take their time, or lose what was not flushed;
//! - [`hosts`]: a cluster that is there already, and the commands with which things are done to it;
//! - [`sql`]: what a fault run needs of a client of query nodes, which it is given;
//! - [`workload`], [`nemesis`], [`run`]: fault runs: what clients do, what is done to the cluster, and both together; [`matrix`]:
//!   which of them, one after the other;
//! - [`history`]: what the clients of a fault run saw, and its file; [`check`]: whether that is what was promised;
//!   [`report`]: what is left of it for people and machines;
//! - `sim` (feature `sim`): the same with peers, clients, network, disks and time in one process, decided by a seed.
//!
//! Invariants: no child outlives its supervisor, however that ends; every wait is bounded; readiness is asked for, never
//! slept for; `cluster.json` is never half written. Nothing here knows what a child does with its data, and SQL is only text here:
//! neither Flight SQL nor Arrow is a dependency.

pub mod check;
pub mod cluster;
pub mod dirlock;
pub mod disk;
mod error;
mod guard;
pub mod history;
pub mod hosts;
pub mod manifest;
pub mod matrix;
pub mod nemesis;
pub mod net;
pub mod peers;
pub mod ports;
pub mod probe;
pub mod process;
pub mod report;
pub mod run;
#[cfg(feature = "sim")]
pub mod sim;
pub mod sql;
pub mod workload;

pub use cluster::{Cluster, Spec};
pub use error::Error;
pub use process::{Event, ProcessName, Role};

pub(crate) use error::IoContext;

/// What the fallible functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
