//! For when a cluster is not simply running: saved snapshots, directories of stopped peers, and a majority that is gone.
//!
//! ```text
//!   running peer -- Snapshots.Save --> FILE -- restore --> directory of a new cluster of one
//!   stopped peer's directory -- read --> what it holds (inspect), what is wrong with it (verify)
//!   survivors' directories -- recover: the highest (term, index) --> directory of a new cluster of one
//! ```
//!
//! - [`saved`]: a snapshot in a file of its own;
//! - [`held`]: a stopped peer's directory, held and never written; [`reading`] with
//!   `replay`: all that it holds, and what is wrong with it;
//! - [`found`]: the directory of a new cluster; [`restore`]: from a saved snapshot; [`recover`]: from survivors, after a
//!   comparison;
//! - this file: what is told of a state.
//!
//! Invariants: nothing here changes a directory that was there before; a directory that is made is whole when it has its
//! name; a new cluster is never the old one: it has another id, and a revision that the old one has not reached.

pub mod found;
pub mod held;
pub mod reading;
pub mod recover;
mod replay;
pub mod restore;
pub mod saved;

use crate::error::Error;
use crate::raft::state_machine::Applied;
use crate::raft::types::{LogId, Member, Membership};

/// What is told of a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The last log entry applied.
    pub last: Option<LogId>,
    pub revision: u64,
    /// The first revision that can be watched from.
    pub oldest_watch: u64,
    pub keys: u64,
    /// Of keys and values.
    pub bytes: u64,
    pub leases: usize,
    pub scopes: usize,
    pub sessions: usize,
    pub feature_level: u32,
    pub hash: u128,
    pub voters: Vec<(u64, Member)>,
    pub learners: Vec<(u64, Member)>,
}

impl From<&Applied> for Summary {
    fn from(applied: &Applied) -> Self {
        let state = &applied.state;
        let (leases, scopes, sessions) = state.counts();
        let (voters, learners) = members(applied.membership.membership());
        Self {
            last: applied.last,
            revision: state.revision(),
            oldest_watch: state.changes().oldest(),
            keys: state.len() as u64,
            bytes: state.bytes(),
            leases,
            scopes,
            sessions,
            feature_level: state.feature_level(),
            hash: state.digest(),
            voters,
            learners,
        }
    }
}

type Members = Vec<(u64, Member)>;

/// Voters and learners, by id.
fn members(membership: &Membership) -> (Members, Members) {
    let all = membership.nodes().map(|(id, member)| (*id, member.clone()));
    let voters: std::collections::BTreeSet<u64> = membership.voter_ids().collect();
    all.partition(|(id, _)| voters.contains(id))
}

/// Runs what waits for the disk off the async threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::Stopped(format!("a disk task ended: {e}")))
}
