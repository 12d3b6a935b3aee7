//! Moves of shards, as a worker hears of them from the leader ([`lake_client::shards`]; docs/src/placement.md): one that it is about to be
//! given it is made ready for, and for one that it was given before it ends what it does.
//!
//! What holds: once a worker has answered that it has left a shard, its upkeep does nothing for the shard under a route of before,
//! whatever its copy of the routes says: the statement was given up, and a commit that it had begun, with what that removes afterwards, has
//! ended. What was asked for as a procedure is not its upkeep, and is not fenced by the route.
//!
//! Limits: of a shard [`MOST_WARMED`] tables are read; what is remembered is one revision for each shard, and the tables that something is
//! done to. Failure cases: what has not ended after [`LEAVE_WITHIN`] is not waited for, and the answer says so; its fence stops it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use lake_client::shards::{Fence, Fenced, LEAVE_WITHIN, Moving, WARM_WITHIN};
use lake_proto::coordination::LeaseId;
use lake_proto::kv::Revision;
use tokio::sync::watch;
use uuid::Uuid;

use crate::table::Tables;
use crate::upkeep;

/// Tables of a shard that a worker is made ready for before it is given it.
const MOST_WARMED: usize = 1000;

/// What a worker's upkeep knows of the moves of its shards.
#[derive(Debug, Default)]
pub struct Moves {
    /// By shards: routes of before this revision are over.
    over: Mutex<BTreeMap<u32, Revision>>,
    /// What something is done to, and in how many ways: a commit may end after the statement that has begun it.
    at: watch::Sender<BTreeMap<Uuid, usize>>,
}

impl Moves {
    /// Whether a route of this revision is over, as far as the leader has said so.
    pub fn is_over(&self, shard: u32, revision: Revision) -> bool {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        over.get(&shard).is_some_and(|fence| revision < *fence)
    }

    /// What a commit for a shard carries, if the node has it under this lease, as far as it knows.
    pub fn fence(&self, node: &str, lease: LeaseId, shard: u32, fenced: &Fenced) -> Option<Fence> {
        let own = fenced.route.node == node && fenced.route.lease == lease;
        let own = own && !self.is_over(shard, fenced.revision);
        own.then_some(Fence { shard, revision: fenced.revision, lease })
    }

    /// Something is done to a table from now on.
    pub fn begins(&self, table: Uuid) {
        self.at.send_modify(|at| *at.entry(table).or_default() += 1);
    }

    /// It has ended.
    pub fn ended(&self, table: Uuid) {
        self.at.send_modify(|at| {
            if let Some(more) = at.remove(&table).and_then(|ways| ways.checked_sub(1)).filter(|more| *more > 0) {
                at.insert(table, more);
            }
        });
    }

    /// Nothing is done any more for a shard under a route of before this one, and waits until what was begun has ended.
    ///
    /// # Errors
    /// It has not ended in time.
    pub async fn leave(&self, moving: Moving, shard_of: impl Fn(Uuid) -> Option<u32>) -> Result<(), String> {
        let Moving { shard, fence } = moving;
        {
            let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
            let known = over.entry(shard).or_insert(fence);
            *known = fence.max(*known);
        }
        let mut at = self.at.subscribe();
        let elsewhere = at.wait_for(|tables| tables.keys().all(|table| shard_of(*table) != Some(shard)));
        // Its sender is here, so that waiting ends with that or with the time.
        if tokio::time::timeout(LEAVE_WITHIN, elsewhere).await.is_ok() {
            return Ok(());
        }
        Err(format!("what is done for shard {shard} has not ended after {} s", LEAVE_WITHIN.as_secs()))
    }
}

/// Reads into the cache what the upkeep of a shard's tables begins with. Says of how many.
///
/// # Errors
/// The tables could not be listed in time.
pub async fn warm(tables: &Tables, moving: Moving) -> Result<Bytes, String> {
    // The answer is to come in time.
    let deadline = Instant::now() + WARM_WITHIN * 3 / 4;
    let warmed = upkeep::warm_shard(tables, moving.shard, MOST_WARMED, deadline).await;
    warmed.map(|warmed| warmed.to_string().into()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lake_client::shards::Route;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_leaves_a_shard_has_ended_what_it_did_for_it() {
        let moves = Arc::new(Moves::default());
        let [of_seven, of_eight] = [7, 8].map(Uuid::from_u128);
        let shard_of = |table: Uuid| u32::try_from(table.as_u128()).ok();
        let leaves = |shard, fence| {
            let moves = moves.clone();
            tokio::spawn(async move { moves.leave(Moving { shard, fence }, shard_of).await })
        };
        let route = Route { node: "n".to_owned(), lease: 3, ..Route::default() };
        let has = |node: &str, lease| {
            let fenced = Fenced { route: route.clone(), revision: 5 };
            moves.fence(node, lease, 7, &fenced) == Some(Fence { shard: 7, revision: 5, lease })
        };
        assert!(has("n", 3) && !has("m", 3) && !has("n", 4));
        // The statement, and a commit of its.
        (0..2).for_each(|_| moves.begins(of_seven));
        // Another shard's work is not waited for.
        assert_eq!(leaves(8, 3).await.unwrap(), Ok(()));
        let waits = leaves(7, 6);
        tokio::task::yield_now().await;
        assert!(!has("n", 3), "whatever the copy of the routes says");
        assert!(moves.is_over(7, 5) && !moves.is_over(7, 6) && !moves.is_over(9, 1));
        assert!(!waits.is_finished());
        moves.ended(of_seven);
        moves.begins(of_eight);
        tokio::task::yield_now().await;
        assert!(!waits.is_finished(), "the commit goes on");
        moves.ended(of_seven);
        assert_eq!(waits.await.unwrap(), Ok(()));
        // One that comes late says nothing new.
        assert_eq!(leaves(7, 4).await.unwrap(), Ok(()));
        assert!(moves.is_over(7, 5));
        let ends = leaves(8, 4).await.unwrap().unwrap_err();
        assert!(ends.contains("shard 8 has not ended"), "{ends}");
        moves.ended(of_eight);
        assert_eq!(leaves(8, 4).await.unwrap(), Ok(()));
    }
}
