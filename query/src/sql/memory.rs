//! The memory that statements share.
//!
//! Each statement has a pool of its own over the one they share: within it DataFusion shares fairly among the operators
//! that can spill, and an operator that gets no more spills, or fails and names itself. Among statements: as long as there
//! is room everybody gets it. A statement that holds more than its part (the whole, divided by those that hold any) leaves the
//! last quarter to the others, so that a large one does not make the small ones fail.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation, TrackConsumersPool, human_readable_size,
};

/// Operators that an error names as those that hold the most.
const NAMED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4);

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
        Arc::new(StatementMemory { shared: self.clone(), operators, own: Mutex::default() })
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
        self.operators.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
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
        if let Err(left) = self.take(additional, false) {
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{} of this statement needs {} more, and of the {} that all statements share {} are left to it",
                reservation.consumer().name(),
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
}
