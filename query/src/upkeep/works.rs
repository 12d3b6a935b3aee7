//! What is being done to a table, from its begin until all of it has ended, and what is told of that.
//!
//! Under a worker's guard it is a [`WorkerChore`]: its claim is told when it begins, whenever the guard has held since, and when it has ended
//! ([`Claim::says`]). Fault runs read in that whether one worker at a time does the upkeep of a shard (docs/src/chaos.md).

use std::sync::{Arc, Mutex, PoisonError};

use lake_client::catalog::TableIdent;
use lake_client::shards::WorkerChore;
use uuid::Uuid;

use super::{Claim, FENCE_NOTE, Guard, SHARD_NOTE, WORKER_NOTE};

/// Something is being done to a table, until it is dropped: by the last who does it, as a commit that was begun goes on where its statement is
/// given up.
pub(crate) struct Works {
    claim: Arc<dyn Claim>,
    table: Uuid,
    /// As its claim was told last; `None`: it is no worker's, or is not begun.
    chore: Mutex<Option<WorkerChore>>,
}

impl Works {
    /// It is about to be begun.
    pub fn on(claim: &Arc<dyn Claim>, table: Uuid) -> Arc<Self> {
        claim.begins(table);
        Arc::new(Self { claim: claim.clone(), table, chore: Mutex::default() })
    }

    /// It begins now, by this procedure and under this guard.
    pub fn begun(&self, guard: &Guard, table: &TableIdent, what: &str) {
        *self.chore.lock().unwrap_or_else(PoisonError::into_inner) = Self::chore(guard, table, what);
        self.tell(|_| {});
    }

    /// Nothing unless a worker does it for its shard.
    fn chore(guard: &Guard, table: &TableIdent, what: &str) -> Option<WorkerChore> {
        let note = |name: &str| guard.notes.get(name);
        Some(WorkerChore {
            worker: note(WORKER_NOTE)?.clone(),
            shard: note(SHARD_NOTE)?.parse().ok()?,
            fence: note(FENCE_NOTE)?.parse().ok()?,
            table: table.to_string(),
            what: what.to_owned(),
            began_ms: machine_ms()?,
            acted_ms: None,
            ended_ms: None,
        })
    }

    /// The guard has held: by a commit with it that was sent, or a look at it that was begun, at `asked_ms` of the machine's time.
    pub fn held(&self, asked_ms: Option<u64>) {
        self.tell(|chore| chore.acted_ms = chore.acted_ms.max(asked_ms));
    }

    fn tell(&self, learn: impl FnOnce(&mut WorkerChore)) {
        let mut chore = self.chore.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chore) = chore.as_mut() {
            learn(chore);
            self.claim.says(chore);
        }
    }
}

impl Drop for Works {
    fn drop(&mut self) {
        self.tell(|chore| chore.ended_ms = machine_ms());
        self.claim.ended(self.table);
    }
}

impl std::fmt::Debug for Works {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Works").field("table", &self.table).finish_non_exhaustive()
    }
}

/// How long the machine has been up, in milliseconds and to a hundredth of a second, by the one clock that all its processes have and nobody
/// sets; `None` where the system does not tell (`/proc/uptime`, which Linux has).
pub(crate) fn machine_ms() -> Option<u64> {
    uptime_ms(&std::fs::read_to_string("/proc/uptime").ok()?)
}

fn uptime_ms(uptime: &str) -> Option<u64> {
    let (seconds, hundredths) = uptime.split_ascii_whitespace().next()?.split_once('.')?;
    let hundredths: u64 = hundredths.get(..2)?.parse().ok()?;
    seconds.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(10 * hundredths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_s_time_is_read_to_a_hundredth_of_a_second() {
        assert_eq!(uptime_ms("350735.47 234388.90\n"), Some(350_735_470));
        assert_eq!(uptime_ms("0.05 0.00\n"), Some(50));
        assert_eq!(["", "x", "7", "7.", "7.x 1"].map(uptime_ms), [None; 5]);
        let before = machine_ms().unwrap();
        assert!(before > 0 && machine_ms().unwrap() >= before);
    }
}
