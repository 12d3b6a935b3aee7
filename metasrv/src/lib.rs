//! A peer of lake's metadata cluster.
//!
//! A replicated, versioned, ordered map: a pure state machine, fed by a Raft log that every peer keeps on its own disk.
//! What it does is fixed in "What the metadata does, exactly" (docs/); the sections quoted here are that text's.
//!
//! Invariants:
//! - the map changes by committed log entries only, and the state machine is a pure function of them;
//! - nothing is acknowledged before it is synced to the disks of a quorum;
//! - a peer that cannot vouch for what it acknowledged does not vote as itself;
//! - nothing here knows tables, files or rows: no arrow, datafusion, iceberg, parquet or object store.
//!
//! In reading order:
//! - [`state`]: the map and its transactions, pure;
//! - [`log`]: the log on disk, the durable mark, the thread that writes both;
//! - [`snapshot`]: the whole state in a file;
//! - [`directory`]: the data directory that holds these;
//! - [`raft`]: openraft's types, storage and network on top of them;
//! - [`peer`]: a peer's life: fresh, founded, serving; reads, transactions, listings;
//! - [`http`], [`metrics`]: what a peer says of itself to probes and Prometheus;
//! - [`services`], [`server`]: the same over gRPC, [`accepting`] connections; [`embedded`]: the same inside one process;
//! - [`rescue`]: saved snapshots, directories of stopped peers, and clusters that have lost their majority;
//! - [`planted`]: bugs on purpose, in builds that are to have one;
//! - [`config`], [`error`]: what goes in, and why it does not start; [`files`], [`blocking`]: a few helpers around the disk.
#![warn(clippy::disallowed_methods)]

pub mod accepting;
pub mod blocking;
pub mod config;
pub mod directory;
pub mod embedded;
pub mod error;
pub mod files;
#[doc(hidden)]
pub mod fuzzing;
pub mod http;
pub mod log;
pub mod metrics;
pub mod peer;
pub mod planted;
pub mod raft;
pub mod rescue;
pub mod server;
pub mod services;
pub mod snapshot;
pub mod state;

pub use config::{Config, Options};
pub use embedded::EmbeddedStore;
pub use error::Error;
pub use server::Server;

// Whole peers, as tests/it has them, also for the unit tests: those alone are built with points at which a leader dies.
#[cfg(test)]
extern crate self as lake_metasrv;
#[cfg(test)]
#[allow(clippy::disallowed_methods, dead_code, reason = "tests/it uses the rest, and reads any clock")]
#[path = "../tests/it/support/mod.rs"]
mod support;
