//! Values that only grow, one in each of several tables, read at query nodes that may be cut off from the metadata: do answers never go
//! back in time, and is the age that they state true?
//!
//! - A read shows whatever was acknowledged [`FRESH_NS`] before it began (*older than allowed*), or so long before as it says that it
//!   is old (*older than told*). Both show what their own node has acknowledged.
//! - What a node shows of a table is never older than what it has shown (*went back*), whether it is cut off, or starts anew.
//! - No answer says that it is older than it can be (*younger than told*): what a node has once known of a table to be so at some time, it
//!   knows from then on, to be so at that time or later. Of one that did not say that it is old the node has known that it was so
//!   [`FRESH_NS`] before it was asked for, or later; of one that did, as long before as it said. So a later age is not larger than what
//!   has passed since then. A node that is started anew knows nothing until it has asked, which is later still; one that was cut off for so
//!   long that changes are no longer kept (100,000 of them) may have forgotten, which no run comes to. Tables that a node has not shown
//!   before are not judged.
//! - There is no value that nobody has written, or that was refused (*unexpected*), none is missing, and none is beside another one
//!   (*impossible*).
//!
//! Where no answer says how old it is, no node has answered without the metadata, and nothing was shown.
//!
//! Cost: reads times the logarithm of the writes.

use std::collections::{BTreeMap, HashMap};

use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use super::table::FRESH_NS;
use super::{Verdict, answers};
use crate::history::{Action, Cached, Call, History, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "cached reads";
/// What is read of a table that has no value.
pub const MISSING: i64 = -1;
/// What each table has at first.
pub const FIRST: i64 = 0;

/// What part of a time the clocks of two machines may differ by in it: twice what a clock is slewed by at most.
const DRIFT: i128 = 1_000;

/// The largest number acknowledged up to a point: of time in nanoseconds, or of the history.
#[derive(Default)]
struct Line<'a>(Vec<(u64, i64, &'a Call)>);

impl<'a> Line<'a> {
    /// Points come in order.
    fn add(&mut self, at: u64, number: i64, call: &'a Call) {
        let (number, call) = match self.0.last() {
            Some(&(_, newest, by)) if newest >= number => (newest, by),
            _ => (number, call),
        };
        self.0.push((at, number, call));
    }

    fn up_to(&self, at: u64) -> Option<(i64, &'a Call)> {
        let behind = self.0.partition_point(|(point, ..)| *point <= at);
        self.0[..behind].last().map(|(_, number, call)| (*number, *call))
    }
}

/// What was written to one table.
#[derive(Default)]
struct One<'a> {
    /// By the time of their answers.
    anywhere: Line<'a>,
    /// By the query node that has acknowledged them, and their answers' places.
    at_node: BTreeMap<u64, Line<'a>>,
    /// Those that did not fail.
    written: HashMap<i64, &'a Call>,
}

/// Judges all reads of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let kind_of = |action: &Action| matches!(action, Action::Cached(_)).then_some(answers::IMPOSSIBLE);
    answers::judge(history, kind_of, &mut findings);
    let mut tables: BTreeMap<&Key, One<'_>> = BTreeMap::new();
    let mut acknowledged: Vec<(usize, &Call, &Key, i64)> = Vec::new();
    for call in history.calls() {
        let Action::Cached(Cached::Write { table, number }) = history.action(call) else { continue };
        if call.outcome != End::Fail {
            tables.entry(table).or_default().written.insert(*number, call);
        }
        acknowledged.extend(call.ended.filter(|_| call.outcome == End::Ok).map(|at| (at, call, table, *number)));
    }
    acknowledged.sort_unstable_by_key(|(at, ..)| *at);
    for &(at, call, table, number) in &acknowledged {
        let one = tables.entry(table).or_default();
        let Some(end) = history.end(call) else { continue };
        one.anywhere.add(end.time_ns, number, call);
        if let Some(node) = end.peer {
            one.at_node.entry(node).or_default().add(at as u64, number, call);
        }
    }
    let (mut reads, mut told, mut telling) = (0, 0, 0);
    let mut ended: Vec<(usize, u64, &Call)> = Vec::new();
    for call in history.calls() {
        let Action::Cached(Cached::Read { values: Some(values), stale_ms }) = history.action(call) else { continue };
        let (true, Some(at)) = (call.outcome == End::Ok, call.ended) else { continue };
        let Some(node) = history.end(call).and_then(|end| end.peer) else { continue };
        reads += 1;
        told += usize::from(stale_ms.is_some());
        ended.push((at, node, call));
        for (table, value) in values {
            let read = (table, *value, *stale_ms);
            telling += usize::from(one(history, call, node, read, tables.get(table), &mut findings));
        }
    }
    one_after_another(history, ended, &mut findings);
    let otherwise = match (acknowledged.len(), reads) {
        (0, _) => Verdict::Unknown("no write succeeded".into()),
        (_, 0) => Verdict::Unknown("nothing was read".into()),
        _ if telling == 0 => Verdict::Unknown("no table was read after a write that it had to show".into()),
        _ if told == 0 => Verdict::Unknown("no answer says how old it is: no node was seen to be cut off".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("writes", acknowledged.len())
        .with("reads", reads)
        .with("reads that say how old they are", told)
}

/// What one read shows of one table. Gives whether there was a write that it had to show.
fn one(
    history: &History,
    call: &Call,
    node: u64,
    (table, value, stale_ms): (&Key, i64, Option<u64>),
    one: Option<&One<'_>>,
    findings: &mut Findings,
) -> bool {
    let mut add = |kind: &str, what: String, other: Option<&Call>| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, other.into_iter().chain([call]))));
    };
    let by = one.and_then(|one| one.written.get(&value));
    let is_written = by.is_some_and(|by| call.ended.is_none_or(|ended| by.invoked < ended));
    if value != FIRST && !is_written {
        let what = match value {
            MISSING => format!("table {table} has no value"),
            value => format!("table {table} is read as {value}, which nobody has written, or was refused"),
        };
        add("unexpected", what, by.copied());
    }
    let Some(one) = one else { return false };
    let may_be_ns = FRESH_NS.max(stale_ms.map_or(0, at_most_ns));
    let began_ns = history.invocation(call).time_ns;
    let known = began_ns.checked_sub(may_be_ns).and_then(|at| one.anywhere.up_to(at));
    let own = one.at_node.get(&node).zip(call.invoked.checked_sub(1));
    let own = own.and_then(|(line, before)| line.up_to(before as u64));
    let newest = known.into_iter().chain(own).max_by_key(|(number, _)| *number);
    if let Some((number, by)) = newest.filter(|(number, _)| value < *number) {
        let (kind, may) = match stale_ms {
            Some(ms) => ("older than told", format!("it says that it is {ms} ms old")),
            None => ("older than allowed", "it does not say that it is old".to_owned()),
        };
        let what = format!("table {table} is read as {value} at node {node}, after {number} was acknowledged; {may}");
        add(kind, what, Some(by));
    }
    newest.is_some()
}

/// How old what is shown is at most. The age is told in whole milliseconds, and is that of the oldest.
fn at_most_ns(stale_ms: u64) -> u64 {
    stale_ms.saturating_add(1).saturating_mul(1_000_000)
}

/// Reads at one node, each beside those that had ended before it.
fn one_after_another(history: &History, mut ended: Vec<(usize, u64, &Call)>, findings: &mut Findings) {
    let by_invocation: Vec<(u64, &Call)> = ended.iter().map(|(_, node, call)| (*node, *call)).collect();
    ended.sort_unstable_by_key(|(at, ..)| *at);
    let shown = |call: &Call| match history.action(call) {
        Action::Cached(Cached::Read { values: Some(values), stale_ms }) => Some((values, *stale_ms)),
        _ => None,
    };
    let mut newest: BTreeMap<(u64, &Key), (i64, &Call)> = BTreeMap::new();
    // When it was certainly known to be so, at the latest that answers tell: perhaps before the history.
    let mut known: BTreeMap<(u64, &Key), (i128, &Call)> = BTreeMap::new();
    let mut before = ended.into_iter().peekable();
    for (node, call) in by_invocation {
        while let Some((_, node, by)) = before.next_if(|(at, ..)| *at < call.invoked) {
            let Some((values, stale_ms)) = shown(by) else { continue };
            let old_ns = stale_ms.map_or(FRESH_NS, at_most_ns);
            let since = i128::from(history.invocation(by).time_ns) - i128::from(old_ns);
            for (table, value) in values {
                later(newest.entry((node, table)).or_insert((*value, by)), *value, by);
                later(known.entry((node, table)).or_insert((since, by)), since, by);
            }
        }
        let Some((values, stale_ms)) = shown(call) else { continue };
        for (table, value) in values {
            let Some((newer, by)) = newest.get(&(node, table)).filter(|(newer, _)| value < newer) else { continue };
            findings.add("went back", || {
                let what = format!("node {node} has shown {newer} of table {table}, and then {value}");
                Finding::new("went back", what, Bar::all(history, [*by, call]))
            });
        }
        let of_each: Option<Vec<(i128, &Call)>> =
            values.keys().map(|table| known.get(&(node, table)).copied()).collect();
        let oldest = of_each.and_then(|of_each| of_each.into_iter().min_by_key(|(since, _)| *since));
        let (Some(ms), Some((since, by)), Some(end)) = (stale_ms, oldest, history.end(call)) else { continue };
        let passed_ns = i128::from(end.time_ns) - since;
        let can_be_ms = (passed_ns + passed_ns / DRIFT) / 1_000_000;
        if i128::from(ms) > can_be_ms {
            findings.add("younger than told", || {
                let what = format!(
                    "node {node} says that what it shows is {ms} ms old; by what it has answered before it is {can_be_ms} ms at most"
                );
                Finding::new("younger than told", what, Bar::all(history, [by, call]))
            });
        }
    }
}

/// The larger one of the two, and whose it is.
fn later<'a, T: PartialOrd>(known: &mut (T, &'a Call), other: T, by: &'a Call) {
    if other > known.0 {
        *known = (other, by);
    }
}
