//! Keys that are used for a while and then left for fresh ones, so that a checker has many short histories to look at
//! instead of a long one.

use std::sync::{Arc, Mutex, PoisonError};

use rand::Rng;

/// Some keys in use at a time. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Rotation {
    slots: Arc<Mutex<Slots>>,
    /// A key is left after so many uses.
    uses: u64,
}

#[derive(Debug)]
struct Slots {
    /// Each with how often it was used.
    in_use: Vec<(i64, u64)>,
    next: i64,
}

impl Rotation {
    pub(super) fn new(in_use: usize, uses: u64) -> Self {
        let slots = Slots { in_use: (0..in_use as i64).map(|key| (key, 0)).collect(), next: in_use as i64 };
        Self { slots: Arc::new(Mutex::new(slots)), uses }
    }

    /// One of the keys in use.
    pub(super) fn pick(&self, rng: &mut impl Rng) -> i64 {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let n = rng.random_range(0..slots.in_use.len());
        let (key, used) = slots.in_use[n];
        slots.in_use[n].1 += 1;
        if used + 1 >= self.uses {
            slots.in_use[n] = (slots.next, 0);
            slots.next += 1;
        }
        key
    }

    /// Every key that was ever in use.
    pub(super) fn all(&self) -> std::ops::Range<i64> {
        0..self.slots.lock().unwrap_or_else(PoisonError::into_inner).next
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn a_key_is_left_after_its_uses() {
        let rotation = Rotation::new(3, 10);
        let mut rng = StdRng::seed_from_u64(1);
        let mut used = std::collections::HashMap::new();
        for _ in 0..1000 {
            *used.entry(rotation.pick(&mut rng)).or_insert(0) += 1;
        }
        assert!(used.values().all(|n| *n <= 10));
        assert!(used.values().filter(|n| **n < 10).count() <= 3);
        assert!(used.keys().all(|key| rotation.all().contains(key)));
    }
}
