//! The calls on one key, as the search sees them.

use std::collections::HashMap;

use crate::history::{Call, History, Outcome};

/// The value of an absent key.
pub(super) const ABSENT: u32 = 0;

/// What a call does to a register. `None` is the value of an absent key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Touch {
    Read(Option<i64>),
    Write(i64),
    Cas(Option<i64>, i64),
}

/// The same with numbers for values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Read(u32),
    Write(u32),
    Cas(u32, u32),
}

impl Effect {
    /// The value that it needs to find.
    pub fn observes(self) -> Option<u32> {
        match self {
            Effect::Read(value) | Effect::Cas(value, _) => Some(value),
            Effect::Write(_) => None,
        }
    }

    /// The value that it leaves behind, if it changes anything.
    pub fn leaves(self) -> Option<u32> {
        match self {
            Effect::Write(value) | Effect::Cas(_, value) => Some(value),
            Effect::Read(_) => None,
        }
    }
}

/// One call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// Which of the key's calls it is.
    pub call: usize,
    /// The place in the history after which it takes effect.
    pub invoked: usize,
    /// The place before which it must have taken effect; `usize::MAX` if it never needs to.
    pub deadline: usize,
    pub effect: Effect,
}

/// The calls on one key that may have happened, or some of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Part {
    /// Those that happened, by invocation.
    pub required: Vec<Step>,
    /// Those that may have happened, by invocation. All of them leave a value that some step observes.
    pub optional: Vec<Step>,
    /// By number; the first stands for [`ABSENT`].
    values: Vec<Option<i64>>,
}

impl Part {
    /// The calls on one key, given by invocation.
    pub fn of(history: &History, calls: &[&Call]) -> Part {
        let mut part = Part { values: vec![None], ..Part::default() };
        let mut numbers: HashMap<i64, u32> = HashMap::new();
        let values = &mut part.values;
        let mut number = |value: Option<i64>| match value {
            None => ABSENT,
            Some(value) => *numbers.entry(value).or_insert_with(|| {
                values.push(Some(value));
                values.len() as u32 - 1
            }),
        };
        for (index, call) in calls.iter().enumerate() {
            let Some((_, touch)) = super::register(history, call) else { continue };
            let effect = match touch {
                Touch::Read(value) => Effect::Read(number(value)),
                Touch::Write(value) => Effect::Write(number(Some(value))),
                Touch::Cas(from, to) => Effect::Cas(number(from), number(Some(to))),
            };
            let step = |deadline| Step { call: index, invoked: call.invoked, deadline, effect };
            match (call.outcome, call.happened_before()) {
                (Outcome::Ok, Some(ended)) => part.required.push(step(ended)),
                // Nobody knows what such a read saw.
                (Outcome::Unknown, _) if effect.leaves().is_some() => part.optional.push(step(usize::MAX)),
                _ => {}
            }
        }
        part.pruned()
    }

    /// The value that a number stands for.
    pub fn value(&self, number: u32) -> Option<i64> {
        self.values[number as usize]
    }

    /// How many values there are.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// All steps.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.required.iter().chain(&self.optional)
    }

    /// How many steps observe each value.
    pub fn observers(&self) -> Vec<u32> {
        let mut observers = vec![0; self.values.len()];
        self.steps().filter_map(|step| step.effect.observes()).for_each(|value| observers[value as usize] += 1);
        observers
    }

    /// What was known at a place of the history: calls that had not ended are unknown, later ones are left out.
    pub fn until(&self, place: usize) -> Part {
        let mut part = Part { values: self.values.clone(), ..Part::default() };
        for step in self.steps().filter(|step| step.invoked <= place) {
            if step.deadline <= place {
                part.required.push(*step);
            } else if step.effect.leaves().is_some() {
                part.optional.push(Step { deadline: usize::MAX, ..*step });
            }
        }
        part.optional.sort_by_key(|step| step.invoked);
        part.pruned()
    }

    /// Without some of its steps.
    pub fn without(&self, removed: impl Fn(&Step) -> bool) -> Part {
        let kept = |steps: &[Step]| steps.iter().filter(|step| !removed(step)).copied().collect();
        Part { required: kept(&self.required), optional: kept(&self.optional), values: self.values.clone() }.pruned()
    }

    /// With some of its compare-and-sets taken for writes, which may happen whatever they find.
    pub fn weakened(&self, weaker: impl Fn(&Step) -> bool) -> Part {
        let mut part = self.clone();
        for step in part.required.iter_mut().chain(&mut part.optional).filter(|step| weaker(step)) {
            if let Effect::Cas(_, to) = step.effect {
                step.effect = Effect::Write(to);
            }
        }
        part.pruned()
    }

    /// Without the optional steps whose value nobody observes: in whatever order they stand, the order without them
    /// is as good, since nothing looks at the key between them and the next write.
    fn pruned(mut self) -> Part {
        let mut observers = self.observers();
        loop {
            let before = self.optional.len();
            self.optional.retain(|step| {
                let own = step.effect.observes().filter(|value| step.effect.leaves() == Some(*value));
                let value = step.effect.leaves().unwrap_or(ABSENT) as usize;
                let needed = observers[value] > u32::from(own.is_some());
                if let (false, Some(value)) = (needed, step.effect.observes()) {
                    observers[value as usize] -= 1;
                }
                needed
            });
            if self.optional.len() == before {
                return self;
            }
        }
    }
}
