//! Registers, and those that locks guard: is each key linearizable?
//!
//! Linearizability is local (Herlihy and Wing 1990): a history is linearizable if what it says of each key is. Per key
//! the calls become [`part::Part`]s, [`search`] looks for an order of them (Wing and Gong 1993, with Lowe's memory of
//! what was tried), and if there is none [`shrink`] leaves out what the contradiction does not need.
//!
//! Unknown outcomes: such a write may take effect at any time after its invocation, or never. Only those whose value
//! somebody saw are tried, so that most of them cost nothing.

mod part;
mod search;
mod shrink;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::part::{Effect, Part, Touch};
use self::search::{Answer, Stuck};
use super::bars::{Bar, label};
use super::outcome::{Finding, Findings, Outcome};
use super::{Budget, Verdict, refusals};
use crate::history::{Action, Call, History, Key, Lock, Outcome as End, Register};

/// Its name in results.
pub const NAME: &str = "linearizable registers";

/// Judges every key of a register history.
pub fn check(history: &History, budget: &Budget) -> Outcome {
    let mut findings = Findings::default();
    let mut undecided: Vec<&Key> = Vec::new();
    let keys = by_key(history);
    let succeeded = |is_meant: fn(Touch) -> bool| {
        let done = history.calls().iter().filter(|call| call.outcome == End::Ok);
        done.filter(|call| register(history, call).is_some_and(|(_, touch)| is_meant(touch))).count()
    };
    let judged = succeeded(|_| true);
    // Any order of blind writes will do.
    let observed = succeeded(|touch| matches!(touch, Touch::Read(_) | Touch::Cas(..)));
    let changed = succeeded(|touch| matches!(touch, Touch::Read(Some(_)) | Touch::Cas(Some(_), _)));
    refusals::judge(history, &mut findings);
    for (key, calls) in &keys {
        let part = Part::of(history, calls);
        match search::search(&part, budget.next_search()) {
            Answer::Linearizable => {}
            Answer::OutOfBudget => undecided.push(key),
            Answer::Impossible(stuck) => {
                findings.add("not linearizable", || explain(history, key, calls, &part.until(stuck.horizon), budget));
            }
        }
    }
    let otherwise = match undecided.first() {
        _ if judged == 0 => Verdict::Unknown("no operation on a register succeeded".into()),
        _ if observed == 0 => Verdict::Unknown("nothing that succeeded has looked at a register".into()),
        _ if changed == 0 => Verdict::Unknown("no register was ever seen to be changed".into()),
        Some(first) => Verdict::Unknown(format!(
            "{} of {} keys could not be decided within the bounds of the search, the first of them {first}: \
             fewer operations per key, or fewer clients at once, make it easier",
            undecided.len(),
            keys.len()
        )),
        None => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("keys", keys.len())
        .with("operations", judged)
        .with("undecided keys", undecided.len())
}

/// What a call does to a register, by key: what it needs to find, and what it leaves.
fn register<'a>(history: &'a History, call: &Call) -> Option<(&'a Key, Touch)> {
    Some(match history.action(call) {
        Action::Register(Register::Read { key, value }) => (key, Touch::Read(*value)),
        Action::Register(Register::Write { key, value }) => (key, Touch::Write(*value)),
        Action::Register(Register::Cas { key, from, to }) => (key, Touch::Cas(*from, *to)),
        Action::Lock(Lock::Read { lock, value }) => (lock, Touch::Read(*value)),
        Action::Lock(Lock::Write { lock, value, .. }) => (lock, Touch::Write(*value)),
        _ => return None,
    })
}

/// The calls that may have happened, by key, each list in the order of invocation.
fn by_key(history: &History) -> BTreeMap<&Key, Vec<&Call>> {
    let mut keys: BTreeMap<&Key, Vec<&Call>> = BTreeMap::new();
    for call in history.calls().iter().filter(|call| call.outcome != End::Fail) {
        if let Some((key, _)) = register(history, call) {
            keys.entry(key).or_default().push(call);
        }
    }
    keys
}

fn explain(history: &History, key: &Key, calls: &[&Call], part: &Part, budget: &Budget) -> Finding {
    let small = shrink::shrink(part, budget);
    let shown = |call: usize| {
        let call = calls[call];
        format!("{} (process {})", label(history.action(call)), call.process)
    };
    let mut explanation = vec![format!(
        "key {key} is not linearizable: no order of these {} operations explains what was read",
        small.steps().count()
    )];
    if let Answer::Impossible(Stuck { order, state, blocked, .. }) = search::trace(&small, budget.next_search()) {
        let holds = |value: u32| small.value(value).map_or_else(|| "nothing".to_owned(), |value| value.to_string());
        explanation.push(match order.as_slice() {
            [] => format!("At first the key holds {}.", holds(state)),
            order => {
                let order: Vec<String> = order.iter().map(|&call| shown(call)).collect();
                format!("An order that goes as far as any: {}. Then the key holds {}.", order.join("; "), holds(state))
            }
        });
        for step in blocked {
            let why = match step.effect {
                Effect::Read(value) => format!("it read {}", holds(value)),
                Effect::Cas(from, _) => format!("it expected {}", holds(from)),
                Effect::Write(_) => "whatever comes after it cannot".to_owned(),
            };
            explanation.push(format!("{} must come next, but cannot: {why}.", shown(step.call)));
        }
    }
    let bars = Bar::all(history, small.steps().map(|step| calls[step.call]));
    Finding { kind: "not linearizable".into(), explanation, bars, edges: Vec::new() }
}
