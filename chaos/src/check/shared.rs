//! Rows that any client changes by single statements, each of which rests on what it has read; part of what is judged of [`super::table`].
//!
//! - No row is there twice, and no list has a number twice (*twice*).
//! - A list has no number of a statement that failed, was not begun, or that nobody made, and no row is there that nobody has added (*unexpected*).
//! - Whatever was acknowledged before a number of the list was asked for is in it (*lost update*), and before that (*out of order*).
//! - Lists only grow: from one version to the next, by their sequence numbers, the beginning stays (*other beginning*).
//! - A read shows what its own node has acknowledged before, and any node long enough before, as with other rows (*stale*, *lost*).
//! - Once one of the lamps was on, some lamp is: only a statement that has seen another one turns one off (*none on*).
//!
//! Cost: reads times the numbers that were put in their table.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bars::Bar;
use super::outcome::{Finding, Findings};
use super::table::FRESH_NS;
use crate::history::{Action, Call, History, Key, Outcome as End, Table};

/// What there was to judge.
#[derive(Debug, Default)]
pub(super) struct Judged {
    /// Changes that succeeded, and of these, how many were under way with another one of the same table.
    pub(super) changes: usize,
    pub(super) met: usize,
    pub(super) reads: usize,
    /// Reads that had to show a change.
    pub(super) telling: usize,
}

/// A read that succeeded.
struct Read<'a> {
    call: &'a Call,
    rows: &'a BTreeMap<i64, Vec<Vec<i64>>>,
    sequence: Option<u64>,
    node: Option<u64>,
    /// What was acknowledged so long before it must be in it.
    fresh_ns: u64,
}

impl Read<'_> {
    /// Whether a list of a row has a number.
    fn has(&self, row: i64, number: i64) -> bool {
        self.rows.get(&row).into_iter().flatten().any(|list| list.contains(&number))
    }

    fn is_lit(&self) -> bool {
        self.rows.range(Table::LAMPS..).next().is_some()
    }
}

/// What was done to one table.
#[derive(Default)]
struct One<'a> {
    /// By row and number, those that did not fail.
    pushes: BTreeMap<i64, BTreeMap<i64, &'a Call>>,
    failed: HashMap<i64, &'a Call>,
    /// By lamp, those that may have turned it on.
    lit: BTreeMap<i64, Vec<&'a Call>>,
    /// Changes that succeeded, in the order of their invocation.
    changes: Vec<&'a Call>,
    reads: Vec<Read<'a>>,
}

/// Judges every such table of a history.
pub(super) fn judge(history: &History, findings: &mut Findings) -> Judged {
    let mut judged = Judged::default();
    for (key, one) in &tables(history) {
        let judge = Judge { history, key, one };
        let mut told = HashSet::new();
        for read in &one.reads {
            judge.read(read, &mut told, findings);
            judged.telling += usize::from(judge.had_to_show(read));
        }
        judge.lamps(findings);
        judge.versions(findings);
        judged.changes += one.changes.len();
        let meets = |pair: &&[&Call]| pair[0].ended.is_none_or(|ended| pair[1].invoked < ended);
        judged.met += one.changes.windows(2).filter(meets).count();
        judged.reads += one.reads.len();
    }
    judged
}

fn tables(history: &History) -> BTreeMap<&Key, One<'_>> {
    let mut tables: BTreeMap<&Key, One<'_>> = BTreeMap::new();
    for call in history.calls() {
        let Action::Table(action) = history.action(call) else { continue };
        match action {
            Table::Push { table, row, number } => {
                let one = tables.entry(table).or_default();
                match call.outcome {
                    End::Fail => drop(one.failed.insert(*number, call)),
                    _ => drop(one.pushes.entry(*row).or_default().insert(*number, call)),
                }
                one.changes.extend((call.outcome == End::Ok).then_some(call));
            }
            Table::Turn { table, row, on } => {
                let one = tables.entry(table).or_default();
                if *on && call.outcome != End::Fail {
                    one.lit.entry(*row).or_default().push(call);
                }
                one.changes.extend((call.outcome == End::Ok).then_some(call));
            }
            Table::Shared { table, rows: Some(rows), stale_ms } if call.outcome == End::Ok => {
                // The age is told in whole milliseconds.
                let stale_ns = stale_ms.map_or(0, |ms| ms.saturating_add(1).saturating_mul(1_000_000));
                tables.entry(table).or_default().reads.push(Read {
                    call,
                    rows,
                    sequence: history.revision(call),
                    node: history.end(call).and_then(|end| end.peer),
                    fresh_ns: FRESH_NS.max(stale_ns),
                });
            }
            _ => {}
        }
    }
    tables
}

/// One table, being judged.
struct Judge<'a> {
    history: &'a History,
    key: &'a Key,
    one: &'a One<'a>,
}

impl Judge<'_> {
    fn found(&self, findings: &mut Findings, kind: &str, what: String, calls: &[&Call]) {
        findings.add(kind, || Finding::new(kind, what, Bar::all(self.history, calls.iter().copied())));
    }

    /// What one read shows by itself. Of one number, or lamp, the first of a kind tells it all.
    fn read(&self, read: &Read<'_>, told: &mut HashSet<(i64, i64, &'static str)>, findings: &mut Findings) {
        let (key, none) = (self.key, BTreeMap::new());
        for (row, lists) in read.rows {
            if lists.len() > 1 && told.insert((*row, 0, "twice")) {
                let what = format!("row {row} of table {key} is there {} times", lists.len());
                self.found(findings, "twice", what, &[read.call]);
            }
            if *row >= Table::LAMPS {
                let mut added = self.one.lit.get(row).into_iter().flatten();
                if !added.any(|by| is_begun(by, read.call)) && told.insert((*row, 0, "unexpected")) {
                    let what = format!("row {row} of table {key} is there, and nobody had asked for it");
                    self.found(findings, "unexpected", what, &[read.call]);
                }
                continue;
            }
            let pushes = self.one.pushes.get(row).unwrap_or(&none);
            for list in lists {
                self.list(read, (*row, list.as_slice()), pushes, told, findings);
            }
        }
        for (row, pushes) in &self.one.pushes {
            for (number, by) in pushes {
                if !read.has(*row, *number)
                    && let Some((kind, then, other)) = self.lacks(read, *row, by, *number)
                    && told.insert((*row, *number, kind))
                {
                    let what = format!("row {row} of table {key} lacks {number}, which was acknowledged{then}");
                    self.found(
                        findings,
                        kind,
                        what,
                        &[Some(*by), Some(read.call), other].into_iter().flatten().collect::<Vec<_>>(),
                    );
                }
            }
        }
    }

    /// The numbers of one list by themselves, and beside each other.
    fn list(
        &self,
        read: &Read<'_>,
        (row, list): (i64, &[i64]),
        pushes: &BTreeMap<i64, &Call>,
        told: &mut HashSet<(i64, i64, &'static str)>,
        findings: &mut Findings,
    ) {
        let key = self.key;
        let mut seen: HashSet<i64> = HashSet::new();
        // Of what stands behind, what was acknowledged first.
        let mut earliest: Option<(usize, &Call, i64)> = None;
        for number in list.iter().rev() {
            if !seen.insert(*number) && told.insert((row, *number, "twice")) {
                let what = format!("row {row} of table {key} has {number} twice");
                let calls: Vec<&Call> = pushes.get(number).copied().into_iter().chain([read.call]).collect();
                self.found(findings, "twice", what, &calls);
            }
            let Some(by) = pushes.get(number).copied().filter(|by| is_begun(by, read.call)) else {
                if told.insert((row, *number, "unexpected")) {
                    let failed = self.one.failed.get(number).copied();
                    let why = if failed.is_some() { "which failed" } else { "which nobody had begun" };
                    let calls: Vec<&Call> = failed.into_iter().chain([read.call]).collect();
                    self.found(findings, "unexpected", format!("row {row} of table {key} has {number}, {why}"), &calls);
                }
                continue;
            };
            if let Some((ended, behind, later)) = earliest
                && ended < by.invoked
                && told.insert((row, *number, "out of order"))
            {
                let what = format!(
                    "row {row} of table {key} has {later} behind {number}, which was asked for after that was acknowledged"
                );
                self.found(findings, "out of order", what, &[behind, by, read.call]);
            }
            if let Some(ended) = by.happened_before()
                && earliest.is_none_or(|(first, ..)| ended < first)
            {
                earliest = Some((ended, by, *number));
            }
        }
    }

    /// Why a read may not lack a number, if it may not: of which kind that is, how it goes on, and what else shows it.
    fn lacks(
        &self,
        read: &Read<'_>,
        row: i64,
        by: &Call,
        number: i64,
    ) -> Option<(&'static str, String, Option<&Call>)> {
        let ended = by.happened_before()?;
        let pushes = self.one.pushes.get(&row)?;
        let mut there = read.rows.get(&row).into_iter().flatten().flatten();
        let is_later = |number: &&i64| pushes.get(*number).is_some_and(|later| ended < later.invoked);
        if let Some(later) = there.find(is_later) {
            return Some((
                "lost update",
                format!(" before {later} was asked for, which it has"),
                pushes.get(later).copied(),
            ));
        }
        if !self.must_show(read, by) {
            return None;
        }
        let mut reads = self.one.reads.iter().filter(|later| later.call.invoked > read.call.invoked);
        Some(match reads.find(|later| later.has(row, number)) {
            Some(later) => ("stale", "; a later read has it".to_owned(), Some(later.call)),
            None => ("lost", ", and so does every later read".to_owned(), None),
        })
    }

    /// Whether a read has to show a change: its own node acknowledged it before, or another one long enough before.
    fn must_show(&self, read: &Read<'_>, by: &Call) -> bool {
        let Some(end) = self.history.end(by).filter(|_| by.outcome == End::Ok) else { return false };
        let began_ns = self.history.invocation(read.call).time_ns;
        let is_before = by.ended.is_some_and(|ended| ended < read.call.invoked);
        let is_own = end.peer.is_some() && end.peer == read.node;
        is_before && (is_own || end.time_ns.saturating_add(read.fresh_ns) <= began_ns)
    }

    fn had_to_show(&self, read: &Read<'_>) -> bool {
        self.one.changes.iter().any(|by| self.must_show(read, by))
    }

    /// Reads without a lamp that is on.
    fn lamps(&self, findings: &mut Findings) {
        for read in self.one.reads.iter().filter(|read| !read.is_lit()) {
            let mut lit = self.one.lit.values().flatten().copied();
            let before = |other: &&Read<'_>| {
                other.is_lit() && other.sequence.zip(read.sequence).is_some_and(|(other, own)| other <= own)
            };
            let shown = self.one.reads.iter().find(before).map(|other| other.call);
            if let Some(by) = lit.find(|by| self.must_show(read, by)).or(shown) {
                let what = format!("no lamp of table {} is on, and nobody has turned off the last one", self.key);
                self.found(findings, "none on", what, &[by, read.call]);
                return;
            }
        }
    }

    /// Reads in the order of the versions that they show.
    fn versions(&self, findings: &mut Findings) {
        let mut reads: Vec<(u64, &Read<'_>)> =
            self.one.reads.iter().filter_map(|read| Some((read.sequence?, read))).collect();
        reads.sort_by_key(|(sequence, read)| (*sequence, read.call.invoked));
        for row in self.one.pushes.keys() {
            // A row that is there twice is told as that.
            let of = |read: &Read<'_>| match read.rows.get(row).map(Vec::as_slice) {
                None => Some(Vec::new()),
                Some([list]) => Some(list.clone()),
                Some(_) => None,
            };
            let mut lists = reads.iter().filter_map(|&(_, read)| Some((of(read)?, read.call)));
            let Some(mut last) = lists.next() else { continue };
            for (list, call) in lists {
                if !list.starts_with(&last.0) {
                    let what = format!("a newer version of table {} has another beginning of row {row}", self.key);
                    self.found(findings, "other beginning", what, &[last.1, call]);
                    break;
                }
                last = (list, call);
            }
        }
    }
}

/// Whether a change was asked for before a read had ended.
fn is_begun(by: &Call, read: &Call) -> bool {
    read.ended.is_none_or(|ended| by.invoked < ended)
}
