//! The smallest part of a contradiction that is one by itself.
//!
//! Steps are left out as long as no order explains the rest. Only such steps are left out as make it easier to find an
//! order: reads, and writes whose value no step that is left observes. (Put such a write back into an order of the rest,
//! and nothing in between notices.) A compare-and-set is taken for a plain write where what it found does not matter.
//! So the rest is never contradictory by what was left out of it.

use super::super::Budget;
use super::part::{Effect, Part, Step};
use super::search::{Answer, search};

/// Most searches that one contradiction is worth.
const MAX_SEARCHES: usize = 4000;

/// Leaves out what the contradiction does not need. Gives the part itself if the bounds allow no more.
pub(super) fn shrink(part: &Part, budget: &Budget) -> Part {
    let mut searches = 0;
    let mut still_impossible = |part: &Part| {
        searches += 1;
        searches <= MAX_SEARCHES && matches!(search(part, budget.next_search()), Answer::Impossible(_))
    };
    let mut small = part.clone();
    let mut chunk_size = small.steps().count().div_ceil(2);
    loop {
        let mut changed = false;
        let mut start = 0;
        loop {
            let chunk = chunk(&small, start, chunk_size);
            if chunk.is_empty() {
                break;
            }
            let removable = removable(&small, &chunk);
            let smaller = small.without(|step| removable.contains(&step.call));
            if !removable.is_empty() && still_impossible(&smaller) {
                (small, changed) = (smaller, true);
                // What was kept of the chunk is passed over; what was removed, the next steps have taken the place of.
                start += chunk.len() - removable.len();
                continue;
            }
            let compares = |step: &Step| matches!(step.effect, Effect::Cas(..)) && holds(&chunk, step);
            if small.steps().any(compares) {
                let weaker = small.weakened(compares);
                if still_impossible(&weaker) {
                    (small, changed) = (weaker, true);
                }
            }
            start += chunk.len();
        }
        match chunk_size {
            0 | 1 if !changed => return small,
            _ => chunk_size = chunk_size.div_ceil(2).max(1),
        }
    }
}

fn holds(chunk: &[Step], step: &Step) -> bool {
    chunk.iter().any(|other| other.call == step.call)
}

/// Some steps, counted by invocation.
fn chunk(part: &Part, start: usize, count: usize) -> Vec<Step> {
    let mut steps: Vec<Step> = part.steps().copied().collect();
    steps.sort_by_key(|step| step.invoked);
    steps.into_iter().skip(start).take(count).collect()
}

/// Those of a chunk, as calls, that may be left out together.
fn removable(part: &Part, chunk: &[Step]) -> Vec<usize> {
    let mut observers = part.observers();
    let mut removable: Vec<usize> = Vec::new();
    // From the last: what observed a value is gone before the step that left it is looked at.
    for step in chunk.iter().rev() {
        let observed = step.effect.observes().map(|value| value as usize);
        observed.into_iter().for_each(|value| observers[value] -= 1);
        match step.effect.leaves() {
            Some(value) if observers[value as usize] > 0 => {
                observed.into_iter().for_each(|value| observers[value] += 1);
            }
            _ => removable.push(step.call),
        }
    }
    removable
}
