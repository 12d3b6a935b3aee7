//! One commit of a node at a time per table, first come, first served: writers of one node never lose races against
//! each other, and each starts from the version that the one before it left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use lake_client::catalog::{TablePointer, Versioned};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

/// What one commit leaves for the next.
#[derive(Debug, Default)]
struct Slot {
    /// The version that this node's last commit made.
    last: Option<Versioned<TablePointer>>,
    /// Others have committed in between lately: what is remembered is probably not current.
    contended: bool,
}

/// The queues, by table. A table nobody waits for has none.
#[derive(Debug, Clone, Default)]
pub struct CommitQueues {
    slots: Arc<Mutex<HashMap<Uuid, Arc<tokio::sync::Mutex<Slot>>>>>,
}

/// The right to commit to one table, until dropped.
#[derive(Debug)]
pub struct Turn {
    queues: CommitQueues,
    table: Uuid,
    slot: Option<OwnedMutexGuard<Slot>>,
}

impl CommitQueues {
    /// Waits for the turn; `None` if it does not come before the deadline.
    pub async fn enter(&self, table: Uuid, deadline: Instant) -> Option<Turn> {
        let slot = self.lock().entry(table).or_default().clone();
        // Made first, so that the queue is tidied up however this ends.
        let mut turn = Turn { queues: self.clone(), table, slot: None };
        turn.slot = Some(tokio::time::timeout_at(deadline.into(), slot.lock_owned()).await.ok()?);
        Some(turn)
    }

    /// Whether somebody has the turn of a table.
    pub fn is_taken(&self, table: Uuid) -> bool {
        self.lock().get(&table).is_some_and(|slot| slot.try_lock().is_err())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Uuid, Arc<tokio::sync::Mutex<Slot>>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// The version to build on, if this node made the last one, for all that is known.
    pub fn hint(&self) -> Option<Versioned<TablePointer>> {
        self.slot.as_ref().and_then(|slot| slot.last.clone())
    }

    /// Whether other nodes are committing to the table too.
    pub fn contended(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.contended)
    }

    /// Leaves word for the next.
    pub fn leave(&mut self, last: Versioned<TablePointer>, contended: bool) {
        if let Some(slot) = &mut self.slot {
            **slot = Slot { last: Some(last), contended };
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.slot.take();
        let mut slots = self.queues.lock();
        if slots.get(&self.table).is_some_and(|slot| Arc::strong_count(slot) == 1) {
            slots.remove(&self.table);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn turns_come_in_order_and_leave_nothing_behind() {
        let queues = CommitQueues::default();
        let table = Uuid::new_v4();
        let far = Instant::now() + Duration::from_secs(60);
        let first = queues.enter(table, far).await.unwrap();
        assert!(queues.enter(table, Instant::now()).await.is_none(), "taken");
        assert!(queues.is_taken(table) && !queues.is_taken(Uuid::nil()));
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for i in 0..4 {
            let (queues, order) = (queues.clone(), order.clone());
            let mut enter = Box::pin(async move {
                let _turn = queues.enter(table, far).await.unwrap();
                order.lock().unwrap().push(i);
            });
            assert!(futures::poll!(&mut enter).is_pending());
            waiting.push(enter);
        }
        drop(first);
        futures::future::join_all(waiting).await;
        assert!(!queues.is_taken(table));
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
        assert!(queues.lock().is_empty());
    }
}
