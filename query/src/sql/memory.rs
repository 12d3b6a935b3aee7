//! The memory that statements share.
//!
//! Each statement has a pool of its own over the one they share: within it DataFusion shares fairly among the operators
//! that can spill, and an operator that gets no more spills, or fails and names itself. Among statements: as long as there
//! is room everybody gets it. A statement that holds more than its part (the whole, divided by those that hold any) leaves the
//! last quarter to the others, so that a large one does not make the small ones fail.
//!
//! A sort that has spilled merges as many of its runs at once as it is given memory for, and gives none back until it is done. Beside it
//! another one, or the writer that the rows go to, would have nothing: beyond what each must have, merges leave half of the statement's
//! memory. With less of it a sort merges fewer runs at once, and goes over its rows once more.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation, TrackConsumersPool, human_readable_size,
};

/// Operators that an error names as those that hold the most.
const NAMED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4);

/// What merges of a sort's runs are called.
const MERGE: &str = "ExternalSorterMerge";
/// What a merge may have in any case: what a sort sets aside for it before it has read anything (DataFusion's
/// `sort_spill_reservation_bytes`).
const MERGE_BYTES: usize = 10 << 20;

/// The memory of all statements.
#[derive(Debug)]
pub struct SharedMemory {
    limit: usize,
    /// What one statement may have of it.
    statement_limit: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Statements that hold any.
    statements: usize,
}

/// The memory of one statement.
#[derive(Debug)]
pub struct StatementMemory {
    shared: Arc<SharedMemory>,
    operators: TrackConsumersPool<FairSpillPool>,
    /// Merges that there are.
    merges: AtomicUsize,
    /// Changed while the shared lock is held.
    own: Mutex<usize>,
}

impl SharedMemory {
    pub fn new(limit: usize, statement_limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, statement_limit: statement_limit.min(limit), held: Mutex::default() })
    }

    /// A statement's part.
    pub fn statement(self: &Arc<Self>) -> Arc<dyn MemoryPool> {
        let operators = TrackConsumersPool::new(FairSpillPool::new(self.statement_limit), NAMED);
        Arc::new(StatementMemory {
            shared: self.clone(),
            operators,
            merges: AtomicUsize::new(0),
            own: Mutex::default(),
        })
    }

    /// How much is held, and how much may be.
    pub fn figures(&self) -> (usize, usize) {
        (self.lock().bytes, self.limit)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StatementMemory {
    fn own(&self) -> MutexGuard<'_, usize> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a merge that gets so much more leaves enough of the statement's memory, or has less than its part.
    fn leaves_enough(&self, merge: &MemoryReservation, additional: usize) -> bool {
        let half = self.shared.statement_limit / 2;
        let part = (half / self.merges.load(Ordering::Relaxed).max(1)).max(MERGE_BYTES);
        merge.size() + additional <= part || self.operators.reserved() + additional <= half
    }

    /// Takes from what is shared; `forced`: whether there is any left or not.
    fn take(&self, bytes: usize, forced: bool) -> Result<(), usize> {
        let shared = &self.shared;
        let mut held = shared.lock();
        let mut own = self.own();
        let statements = held.statements + usize::from(*own == 0);
        let part = shared.limit / statements.max(1);
        let limit = if *own + bytes > part { shared.limit - shared.limit / 4 } else { shared.limit };
        // Alone it has everything.
        let limit = if statements == 1 { shared.limit } else { limit };
        if !forced && held.bytes + bytes > limit {
            return Err(limit.saturating_sub(held.bytes));
        }
        if bytes > 0 {
            held.statements = statements;
        }
        *own += bytes;
        held.bytes += bytes;
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        let mut held = self.shared.lock();
        let mut own = self.own();
        let had = *own;
        *own = own.saturating_sub(bytes);
        held.bytes = held.bytes.saturating_sub(bytes);
        if had > 0 && *own == 0 {
            held.statements = held.statements.saturating_sub(1);
        }
    }
}

fn is_merge(consumer: &MemoryConsumer) -> bool {
    consumer.name().starts_with(MERGE)
}

impl fmt::Display for StatementMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "statement({})", self.operators)
    }
}

impl MemoryPool for StatementMemory {
    fn name(&self) -> &str {
        "statement"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        if is_merge(consumer) {
            self.merges.fetch_add(1, Ordering::Relaxed);
        }
        self.operators.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        if is_merge(consumer) {
            self.merges.fetch_sub(1, Ordering::Relaxed);
        }
        self.operators.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        // Forced: it does not fail.
        let _ = self.take(additional, true);
        self.operators.grow(reservation, additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.operators.shrink(reservation, shrink);
        self.give_back(shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> DfResult<()> {
        let name = reservation.consumer().name();
        if is_merge(reservation.consumer()) && !self.leaves_enough(reservation, additional) {
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{name} of this statement has {} and needs {} more, and merges leave half of the {} of a statement to what else it does",
                human_readable_size(reservation.size()),
                human_readable_size(additional),
                human_readable_size(self.shared.statement_limit)
            )));
        }
        if let Err(left) = self.take(additional, false) {
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{} of this statement needs {} more, and of the {} that all statements share {} are left to it",
                name,
                human_readable_size(additional),
                human_readable_size(self.shared.limit),
                human_readable_size(left)
            )));
        }
        self.operators.try_grow(reservation, additional).inspect_err(|_| self.give_back(additional))
    }

    fn reserved(&self) -> usize {
        self.operators.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.shared.statement_limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(pool: &Arc<dyn MemoryPool>, name: &str) -> MemoryReservation {
        MemoryConsumer::new(name).register(pool)
    }

    #[test]
    fn a_large_statement_leaves_room_for_small_ones() {
        let shared = SharedMemory::new(1000, 1000);
        let (large, small) = (shared.statement(), shared.statement());
        let join = operator(&large, "HashJoinInput");
        join.try_grow(700).unwrap();
        let sort = operator(&small, "ExternalSorter");
        sort.try_grow(50).unwrap();
        let error = join.try_grow(100).unwrap_err().to_string();
        assert!(error.contains("HashJoinInput") && !error.contains("ExternalSorter"), "{error}");
        sort.try_grow(200).unwrap();
        assert_eq!(shared.figures(), (950, 1000));
        sort.free();
        join.try_grow(300).unwrap();
        assert_eq!(shared.figures(), (1000, 1000));
        drop((join, sort));
        assert_eq!(shared.figures(), (0, 1000));
    }

    #[test]
    fn a_statement_has_a_limit_of_its_own() {
        let shared = SharedMemory::new(1000, 400);
        let pool = shared.statement();
        let join = operator(&pool, "HashJoinInput");
        let error = join.try_grow(401).unwrap_err().to_string();
        assert!(error.contains("HashJoinInput"), "{error}");
        assert_eq!(shared.figures(), (0, 1000), "what was not given is not held");
        join.try_grow(400).unwrap();
    }

    #[test]
    fn merges_leave_half_to_each_other_and_to_others() {
        const MIB: usize = 1 << 20;
        let pool = SharedMemory::new(96 * MIB, 96 * MIB).statement();
        let merge = |part: usize| MemoryConsumer::new(format!("ExternalSorterMerge[{part}]")).register(&pool);
        let (first, second) = (merge(0), merge(1));
        first.try_grow(10 * MIB).unwrap();
        second.try_grow(10 * MIB).unwrap();
        // Nobody else wants it.
        first.try_grow(28 * MIB).unwrap();
        let error = first.try_grow(MIB).unwrap_err().to_string();
        assert!(error.contains("ExternalSorterMerge[0]") && error.contains("leave half of the 96.0 MB"), "{error}");
        second.try_grow(14 * MIB).unwrap();
        second.try_grow(MIB).unwrap_err();
        MemoryConsumer::new("a data file").register(&pool).try_grow(34 * MIB).unwrap();
        drop(first);
        second.try_grow(MIB).unwrap();
    }
}
