//! Chores: what the metadata cluster's leader has this node do to objects, as a worker. A step of a procedure comes as
//! an instruction ([`lake_client::remote::node`]), a bounded part of it is done, and the answer says where the next
//! one begins.
//!
//! - [`purge`]: the files of a dropped table are deleted;
//! - [`upkeep`]: what CALL does to a table, asked for by whoever does not wait for it;
//! - [`moves`]: no part of a procedure: a shard is about to be this node's, or is not any more.
//!
//! What holds:
//! - a chore looks its procedure up before it changes anything, and does nothing for one that is not at that step any
//!   more;
//! - a part that was begun runs to its end, whatever becomes of the stream that it came on; shutdown waits for it;
//! - of one procedure a node does one part at a time. A statement of upkeep is one part, and outlasts the instructions that ask for it.
//!
//! Limits: [`AT_ONCE`] parts at a time, the others wait; a part ends by itself after [`PART`], and some while.

pub mod moves;
pub mod purge;
pub mod upkeep;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_client::procedures::purge::{PURGE_TABLE, Task};
use lake_client::procedures::upkeep::{TABLE_UPKEEP, Task as UpkeepTask};
use lake_client::shards::{LEAVE_SHARD, Moving, WARM_SHARD};
use tokio::sync::Semaphore;

use self::moves::Moves;
use self::upkeep::Running;
use crate::sql::Engine;

/// Parts that are done at a time.
pub const AT_ONCE: usize = 2;
/// Procedures that a heartbeat names; it may name ten times as many (`lake_client::nodes`).
const MOST_TOLD: usize = 100;
/// After so long a part ends where it can.
pub const PART: Duration = Duration::from_secs(10);
/// How long what a part asks the metadata may take.
const ASK: Duration = Duration::from_secs(10);

/// The chores of a node.
#[derive(Debug)]
pub struct Chores {
    engine: Arc<Engine>,
    turns: Arc<Semaphore>,
    /// Of upkeep that was asked for, which may take an hour and shall not hold up purges.
    statements: Arc<Semaphore>,
    in_hand: Arc<Mutex<BTreeSet<String>>>,
    running: Running,
    moves: Arc<Moves>,
}

/// A procedure that this node has in hand, until it is dropped.
#[derive(Debug)]
struct InHand {
    all: Arc<Mutex<BTreeSet<String>>>,
    id: String,
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Chores {
    /// Of a node whose statements this runs.
    pub fn new(engine: Arc<Engine>) -> Self {
        let [turns, statements] = [AT_ONCE; 2].map(|most| Arc::new(Semaphore::new(most)));
        let (in_hand, moves) = (Arc::default(), Arc::default());
        Self { engine, turns, statements, in_hand, running: Running::default(), moves }
    }

    /// What this node's own upkeep goes by, as the leader has told of moves.
    pub fn moves(&self) -> &Arc<Moves> {
        &self.moves
    }

    /// The ids of the procedures in hand.
    pub fn in_hand(&self) -> Vec<String> {
        let in_hand = self.in_hand.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids: Vec<String> = in_hand.iter().cloned().collect();
        drop(in_hand);
        ids.extend(self.running.ids());
        // A heartbeat that names too many is refused, and its node lost.
        ids.truncate(MOST_TOLD);
        ids
    }

    /// Carries out an instruction of a kind; `None`: that is none of these.
    ///
    /// # Errors
    /// Why it was not done. It may be asked for again.
    pub async fn carry_out(&self, kind: &str, payload: &[u8]) -> Option<Result<Bytes, String>> {
        match kind {
            PURGE_TABLE => Some(match Task::of(payload) {
                Ok(task) => self.purge(task).await,
                Err(why) => Err(why),
            }),
            TABLE_UPKEEP => Some(match UpkeepTask::of(payload) {
                Ok(task) => {
                    let part = self.running.part(&self.engine, &self.statements, task, Instant::now() + PART).await;
                    part.map(|answer| answer.to_bytes()).map_err(|e| e.to_string())
                }
                Err(why) => Err(why),
            }),
            WARM_SHARD => Some(match Moving::of(payload) {
                Ok(moving) => moves::warm(self.engine.tables(), moving).await,
                Err(why) => Err(why),
            }),
            LEAVE_SHARD => Some(match Moving::of(payload) {
                Ok(moving) => self.leave_shard(moving).await.map(|()| Bytes::new()),
                Err(why) => Err(why),
            }),
            _ => None,
        }
    }

    async fn leave_shard(&self, moving: Moving) -> Result<(), String> {
        let metadata = &self.engine.tables().metadata;
        self.moves.leave(moving, |table| metadata.shards()?.routes.shard(table)).await
    }

    async fn purge(&self, task: Task) -> Result<Bytes, String> {
        let in_hand = self.take(&task.id)?;
        let (tables, turns) = (self.engine.tables().clone(), self.turns.clone());
        let part = async move {
            let _in_hand = in_hand;
            let _turn = turns.acquire_owned().await;
            purge::part(&tables, task, Instant::now() + PART).await
        };
        self.engine.tables().owned(part).await.map(|answer| answer.to_bytes()).map_err(|e| e.to_string())
    }

    fn take(&self, id: &str) -> Result<InHand, String> {
        let mut all = self.in_hand.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.insert(id.to_owned()) {
            return Err(format!("procedure {id} is in hand here already"));
        }
        Ok(InHand { all: self.in_hand.clone(), id: id.to_owned() })
    }
}
