//! Sets that only grow: is everything in them that must be, and nothing else?
//!
//! An element is there for sure from when its adding succeeded, or a read that saw it ended. Of every read that begins
//! later it must be part. One that is missing there is *stale* if a later read sees it, *lost* if none does. An element
//! that nobody added, whose adding failed or had not begun, is *unexpected*. An unknown adding that a read saw is
//! *recovered*, which is as it should be. An adding that is refused since the element was there is *refused wrongly*: it is
//! added once.
//!
//! Cost: the elements of all reads together.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use super::{Verdict, refusals};
use crate::history::{Action, Call, History, Key, Outcome as End, Set};

/// Its name in results.
pub const NAME: &str = "sets";

/// One element of one set.
struct Element<'a> {
    add: Option<&'a Call>,
    /// The call that shows that it is there, and its end: the first of them.
    known: Option<(usize, &'a Call)>,
    /// The last read that saw it, by invocation.
    last_seen: Option<&'a Call>,
}

/// What was done to one set.
#[derive(Default)]
struct One<'a> {
    elements: HashMap<i64, Element<'a>>,
    /// Reads that succeeded, by invocation, with what they saw.
    reads: Vec<(&'a Call, &'a [i64])>,
}

/// Judges every set of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    refusals::judge(history, &mut findings);
    let (mut adds, mut reads, mut recovered, mut unread) = (0, 0, 0, 0);
    for (key, one) in &sets(history) {
        judge(history, key, one, &mut findings);
        reads += one.reads.len();
        for element in one.elements.values() {
            let outcome = element.add.map(|add| add.outcome);
            adds += usize::from(outcome == Some(End::Ok));
            recovered += usize::from(outcome == Some(End::Unknown) && element.known.is_some());
            let read_later =
                |(ended, _): (usize, &Call)| one.reads.last().is_some_and(|(read, _)| read.invoked > ended);
            unread += usize::from(outcome == Some(End::Ok) && !element.known.is_some_and(read_later));
        }
    }
    let otherwise = match (adds, reads) {
        (0, _) => Verdict::Unknown("no element was added".into()),
        (_, 0) => Verdict::Unknown("no set was read".into()),
        _ if unread == adds => Verdict::Unknown("no set was read after an element had been added".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("added", adds)
        .with("reads", reads)
        .with("recovered", recovered)
        .with("never read after they were added", unread)
}

fn sets(history: &History) -> BTreeMap<&Key, One<'_>> {
    let mut sets: BTreeMap<&Key, One<'_>> = BTreeMap::new();
    for call in history.calls() {
        match history.action(call) {
            Action::Set(Set::Add { key, element }) => {
                let known = (call.outcome == End::Ok).then_some(call.ended).flatten().map(|ended| (ended, call));
                let element_of = || Element { add: None, known: None, last_seen: None };
                let element = sets.entry(key).or_default().elements.entry(*element).or_insert_with(element_of);
                element.known = first(element.known, known);
                // Of several attempts the first that may have worked counts.
                if element.add.is_none_or(|add| add.outcome == End::Fail) {
                    element.add = Some(call);
                }
            }
            Action::Set(Set::Read { key, elements: Some(elements) }) if call.outcome == End::Ok => {
                sets.entry(key).or_default().reads.push((call, elements));
            }
            _ => {}
        }
    }
    for one in sets.values_mut() {
        for (read, elements) in &one.reads {
            for element in *elements {
                let unexpected = || Element { add: None, known: None, last_seen: None };
                let element = one.elements.entry(*element).or_insert_with(unexpected);
                element.known = first(element.known, read.ended.map(|ended| (ended, *read)));
                element.last_seen = Some(read);
            }
        }
    }
    sets
}

fn first<'a>(one: Option<(usize, &'a Call)>, other: Option<(usize, &'a Call)>) -> Option<(usize, &'a Call)> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.0 < one.0 { other } else { one }),
        (one, other) => one.or(other),
    }
}

fn judge(history: &History, key: &Key, one: &One<'_>, findings: &mut Findings) {
    let add = |findings: &mut Findings, kind: &str, what: String, calls: &[&Call]| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, calls.iter().copied())));
    };
    let mut by_known: Vec<(usize, i64, &Element<'_>)> =
        one.elements.iter().filter_map(|(value, e)| e.known.map(|(ended, _)| (ended, *value, e))).collect();
    by_known.sort_unstable_by_key(|(ended, value, _)| (*ended, *value));
    let mut missing: HashSet<i64> = HashSet::new();
    let mut judged: HashSet<i64> = HashSet::new();
    for (read, elements) in &one.reads {
        let mut seen: HashSet<i64> = HashSet::with_capacity(elements.len());
        for value in *elements {
            if !seen.insert(*value) {
                add(findings, "twice", format!("{value} is twice in one read of set {key}"), &[read]);
            }
            let element = &one.elements[value];
            match element.add {
                None if judged.insert(*value) => {
                    add(findings, "unexpected", format!("{value} is in set {key}, and nobody added it"), &[read]);
                }
                Some(call) if call.outcome == End::Fail && judged.insert(*value) => {
                    let what = format!("{value} is in set {key}, but its adding failed");
                    add(findings, "unexpected", what, &[call, read]);
                }
                Some(call) if read.ended.is_some_and(|ended| ended < call.invoked) => {
                    let what = format!("{value} was read in set {key} before its adding began");
                    add(findings, "unexpected", what, &[call, read]);
                }
                _ => {}
            }
        }
        for (_, value, element) in by_known.iter().take_while(|(ended, ..)| *ended < read.invoked) {
            if seen.contains(value) || !missing.insert(*value) {
                continue;
            }
            let Some((_, shows)) = element.known else { continue };
            match element.last_seen.filter(|last| last.invoked > read.invoked) {
                Some(later) => {
                    let what = format!("a read of set {key} misses {value}, which was there before and after it");
                    add(findings, "stale", what, &[shows, read, later]);
                }
                None => {
                    let what = format!("{value} was in set {key}, and no later read sees it");
                    add(findings, "lost", what, &[shows, read]);
                }
            }
        }
    }
}
