//! Is there an order of the steps that explains them?
//!
//! Depth first over configurations: which steps have taken effect, and what the key holds then. Next may come any step
//! that was invoked before the [`horizon`](Stuck::horizon), the first end of a required step that has not taken effect.
//! A configuration is looked at once. Two shortcuts, both without loss:
//! - a read that fits takes effect at once: it changes nothing, and later it could only fit worse;
//! - an optional step is tried only while some step that has not taken effect observes its value.
//!
//! Required steps are held as a window of bits that begins at the first word with a step still to come, so that a
//! configuration is as large as the clients are many, not as the history is long.

use std::collections::HashSet;

use super::super::Budget;
use super::part::{ABSENT, Effect, Part, Step};

/// Whether an order was found.
#[derive(Debug)]
pub(super) enum Answer {
    Linearizable,
    /// There is none; with how far the search came.
    Impossible(Stuck),
    /// The budget ended first.
    OutOfBudget,
}

/// How far a search came that found nothing.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// No order explains what had ended at this place of the history; up to any earlier place there is one.
    pub horizon: usize,
    /// Of [`trace`] only: an order, as calls, that explains as many steps as any.
    pub order: Vec<usize>,
    /// What the key holds after it.
    pub state: u32,
    /// The required steps of which one would have to come next.
    pub blocked: Vec<Step>,
}

/// Looks for an order.
pub(super) fn search(part: &Part, budget: Budget) -> Answer {
    Search::new(part, false).run(budget)
}

/// The same, and remembers the orders it tried: for small parts.
pub(super) fn trace(part: &Part, budget: Budget) -> Answer {
    Search::new(part, true).run(budget)
}

const WORD: usize = u64::BITS as usize;

#[derive(Debug, Clone)]
struct Configuration {
    state: u32,
    /// How many required steps have taken effect.
    done: usize,
    /// All required steps before this word have.
    first_word: usize,
    /// From `first_word` on; missing words are empty.
    window: Vec<u64>,
    /// Over the optional steps.
    used: Vec<u64>,
    /// Where its order ends, in [`Search::trail`].
    trail: usize,
}

impl Configuration {
    fn has(&self, required: usize) -> bool {
        let word = required / WORD;
        word < self.first_word
            || self.window.get(word - self.first_word).is_some_and(|bits| bits >> (required % WORD) & 1 == 1)
    }

    fn set(&mut self, required: usize) {
        let word = required / WORD - self.first_word;
        if self.window.len() <= word {
            self.window.resize(word + 1, 0);
        }
        self.window[word] |= 1 << (required % WORD);
        self.done += 1;
        let full = self.window.iter().take_while(|bits| **bits == u64::MAX).count();
        self.window.drain(..full);
        self.first_word += full;
    }

    fn has_used(&self, optional: usize) -> bool {
        self.used[optional / WORD] >> (optional % WORD) & 1 == 1
    }

    fn key(&self) -> Box<[u64]> {
        let start = [u64::from(self.state) << 32 | self.first_word as u64];
        start.iter().chain(&self.used).chain(&self.window).copied().collect()
    }
}

struct Search<'a> {
    part: &'a Part,
    /// The steps that observe each value: required by their place, optional by their place after all required.
    observers: Vec<Vec<usize>>,
    seen: HashSet<Box<[u64]>>,
    /// Each entry is a call and the entry before it; the first is the empty order. Empty unless tracing.
    trail: Vec<(usize, usize)>,
    tracing: bool,
    farthest: Stuck,
    most_done: usize,
}

impl<'a> Search<'a> {
    fn new(part: &'a Part, tracing: bool) -> Self {
        let mut observers = vec![Vec::new(); part.value_count()];
        for (place, step) in part.steps().enumerate() {
            if let Some(value) = step.effect.observes() {
                observers[value as usize].push(place);
            }
        }
        let (farthest, trail) = (Stuck::default(), vec![(usize::MAX, 0)]);
        Search { part, observers, seen: HashSet::new(), trail, tracing, farthest, most_done: 0 }
    }

    fn run(mut self, mut budget: Budget) -> Answer {
        let mut stack = vec![Configuration {
            state: ABSENT,
            done: 0,
            first_word: 0,
            window: Vec::new(),
            used: vec![0; self.part.optional.len().div_ceil(WORD)],
            trail: 0,
        }];
        while let Some(mut configuration) = stack.pop() {
            if !budget.step() {
                return Answer::OutOfBudget;
            }
            let horizon = self.take_reads(&mut configuration);
            if configuration.done == self.part.required.len() {
                return Answer::Linearizable;
            }
            if self.seen.insert(configuration.key()) {
                self.remember(&configuration, horizon);
                self.push_next(&configuration, horizon, &mut stack);
            }
        }
        Answer::Impossible(self.farthest)
    }

    /// The first end of a required step that has not taken effect.
    fn horizon(&self, configuration: &Configuration) -> usize {
        self.open(configuration).map(|(_, step)| step.deadline).min().unwrap_or(usize::MAX)
    }

    /// The required steps that may come next: those open that were invoked before the first end among them.
    fn open(&self, configuration: &Configuration) -> impl Iterator<Item = (usize, &'a Step)> {
        let mut horizon = usize::MAX;
        let from = configuration.first_word * WORD;
        self.part.required[from.min(self.part.required.len())..]
            .iter()
            .enumerate()
            .map(move |(offset, step)| (from + offset, step))
            .filter(|(place, _)| !configuration.has(*place))
            .take_while(move |(_, step)| {
                let may = step.invoked < horizon;
                horizon = horizon.min(step.deadline);
                may
            })
    }

    /// Lets every read that fits take effect. Gives the horizon after that.
    fn take_reads(&mut self, configuration: &mut Configuration) -> usize {
        loop {
            let fits = Effect::Read(configuration.state);
            let reads: Vec<usize> =
                self.open(configuration).filter(|(_, s)| s.effect == fits).map(|(place, _)| place).collect();
            if reads.is_empty() {
                return self.horizon(configuration);
            }
            for place in reads {
                configuration.set(place);
                configuration.trail = self.extended(configuration.trail, &self.part.required[place]);
            }
        }
    }

    fn push_next(&mut self, configuration: &Configuration, horizon: usize, stack: &mut Vec<Configuration>) {
        let part = self.part;
        let fits = |step: &Step| match step.effect {
            Effect::Read(_) => false,
            Effect::Write(_) => true,
            Effect::Cas(from, _) => from == configuration.state,
        };
        // The last that is pushed is tried first: required before optional steps, and the most urgent of them.
        for (place, step) in part.optional.iter().enumerate().take_while(|(_, step)| step.invoked < horizon) {
            if fits(step) && !configuration.has_used(place) && self.is_needed(configuration, place, step) {
                let mut next = configuration.clone();
                next.used[place / WORD] |= 1 << (place % WORD);
                self.enter(next, step, stack);
            }
        }
        let mut required: Vec<(usize, &Step)> = self.open(configuration).filter(|(_, step)| fits(step)).collect();
        required.sort_by_key(|(_, step)| std::cmp::Reverse(step.deadline));
        for (place, step) in required {
            let mut next = configuration.clone();
            next.set(place);
            self.enter(next, step, stack);
        }
    }

    fn enter(&mut self, mut next: Configuration, step: &Step, stack: &mut Vec<Configuration>) {
        next.state = step.effect.leaves().unwrap_or(next.state);
        next.trail = self.extended(next.trail, step);
        stack.push(next);
    }

    /// Whether a step that has not taken effect, another than this optional one, observes the value it leaves.
    fn is_needed(&self, configuration: &Configuration, optional: usize, step: &Step) -> bool {
        let required = self.part.required.len();
        let value = step.effect.leaves().unwrap_or(ABSENT);
        self.observers[value as usize].iter().any(|&place| match place.checked_sub(required) {
            None => !configuration.has(place),
            Some(other) => other != optional && !configuration.has_used(other),
        })
    }

    fn extended(&mut self, trail: usize, step: &Step) -> usize {
        if !self.tracing {
            return 0;
        }
        self.trail.push((step.call, trail));
        self.trail.len() - 1
    }

    fn remember(&mut self, configuration: &Configuration, horizon: usize) {
        let first = self.seen.len() == 1;
        self.farthest.horizon = self.farthest.horizon.max(horizon);
        if !self.tracing || !(first || configuration.done > self.most_done) {
            return;
        }
        self.most_done = configuration.done;
        self.farthest.state = configuration.state;
        self.farthest.blocked = self.open(configuration).map(|(_, step)| *step).collect();
        let (mut order, mut at) = (Vec::new(), configuration.trail);
        while at != 0 {
            let (call, before) = self.trail[at];
            order.push(call);
            at = before;
        }
        order.reverse();
        self.farthest.order = order;
    }
}
