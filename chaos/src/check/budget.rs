//! How much a search may cost.

use std::time::{Duration, Instant};

/// Steps between two looks at the clock.
const STEPS_PER_LOOK: u64 = 1 << 12;

/// How many steps each search of a check may take, and until when all of them must be done.
#[derive(Debug, Clone)]
pub struct Budget {
    each: u64,
    left: u64,
    until: Instant,
}

impl Budget {
    /// Steps of each search unless told otherwise.
    pub const STEPS: u64 = 1 << 21;
    /// How long all searches may take unless told otherwise.
    pub const TIME: Duration = Duration::from_secs(60);

    /// So many steps for each search, and no longer than this for all.
    pub fn new(steps: u64, time: Duration) -> Self {
        Budget { each: steps, left: steps, until: Instant::now() + time }
    }

    /// The budget of the next search: as many steps, and the same end.
    #[must_use]
    pub fn next_search(&self) -> Self {
        Budget { left: self.each, ..self.clone() }
    }

    /// Takes one step; false if none is left.
    pub fn step(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        if self.left.is_multiple_of(STEPS_PER_LOOK) && Instant::now() >= self.until {
            self.left = 0;
            return false;
        }
        self.left -= 1;
        true
    }
}

impl Default for Budget {
    /// Some hundred megabytes and a minute at worst.
    fn default() -> Self {
        Budget::new(Budget::STEPS, Budget::TIME)
    }
}
