//! Rows of a table that is written through SQL at several query nodes and read whole at any of them.
//!
//! What one write does to the rows under an id is all or nothing, and an id is written by one client at a time: so its states
//! are numbered, from "absent" on. What is promised (docs/src/sql.md, *Freshness*; semantics, section 11), and judged:
//! - A read shows of every id one of its states, whole: never rows of a write that failed, was not begun, or is there in part or
//!   twice (*half*, *twice*, *torn*, *unexpected*).
//! - A read at a query node shows what that node has acknowledged before the read began; and what any other node has
//!   acknowledged [`FRESH_NS`] before it, or as long before as the answer says that it is stale (*stale*; *lost* if nothing later
//!   shows it either). That, and not more: reads are not linearizable.
//! - The versions of a table are one line: each sequence number has one snapshot with the same rows for everybody, each snapshot
//!   follows the one before it, and from one to the next no id goes back (*fork*, *off the line*, *other rows*, *back*). What one node shows
//!   never goes back either (*node went back*).
//! - No answer has a row that no statement leaves (*impossible*).
//! - An operation id stands in one snapshot at most, and in none if its write was refused (*made twice*, *refused and made*).
//!
//! Rows that are nobody's own are judged beside that, by [`super::shared`].
//!
//! Where no read had to show a write, none was of a snapshot that was listed in the end, or shared rows were changed and no read had to show that,
//! the verdict is unknown.
//!
//! An id that is written on after an unknown outcome, or by two at once, has no numbered states: it is counted, and its rows
//! are only looked at for being whole.
//!
//! Cost: reads times the ids of their table.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use super::{Verdict, answers, shared};
use crate::history::{Action, Call, Change, History, Key, Outcome as End, Snapshot, Table};

/// Its name in results.
pub const NAME: &str = "tables";
/// How old a version a query node may show though others have committed since, in nanoseconds: its `--pointer-ttl-ms` at the default.
pub const FRESH_NS: u64 = 1_000_000_000;

/// A write that happened, or may have.
struct Step<'a> {
    call: &'a Call,
    change: Change,
    number: i64,
}

/// A read that succeeded.
struct Read<'a> {
    call: &'a Call,
    rows: &'a BTreeMap<i64, Vec<i64>>,
    snapshot: Option<i64>,
    sequence: Option<u64>,
    node: Option<u64>,
    /// What was acknowledged so long before it must be in it.
    fresh_ns: u64,
}

impl Read<'_> {
    fn ended(&self) -> usize {
        self.call.ended.unwrap_or(usize::MAX)
    }
}

/// What was done to one table.
#[derive(Default)]
struct One<'a> {
    /// By id, those that did not fail.
    steps: BTreeMap<i64, Vec<Step<'a>>>,
    /// By number.
    failed: HashMap<i64, &'a Call>,
    /// By invocation.
    reads: Vec<Read<'a>>,
    /// The last that was listed.
    line: Option<(&'a Call, &'a [Snapshot])>,
}

/// Judges every table of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    answers::judge(history, kind_of, &mut findings);
    let tables = tables(history);
    let (mut writes, mut reads, mut listed, mut recovered, mut unordered) = (0, 0, 0, 0, 0);
    let (mut telling, mut placed) = (0, 0);
    for (key, one) in &tables {
        let judge = Judge { history, key, one };
        judge.reads(&mut findings);
        judge.versions(&mut findings);
        judge.nodes(&mut findings);
        placed += judge.line(&mut findings);
        telling += judge.telling();
        reads += one.reads.len();
        listed += usize::from(one.line.is_some());
        for (id, steps) in &one.steps {
            writes += steps.iter().filter(|step| step.call.outcome == End::Ok).count();
            unordered += usize::from(!is_ordered(steps));
            let seen = |number: i64| one.reads.iter().any(|read| shown(read, *id) == Some(Some(number)));
            let in_doubt = steps.iter().filter(|step| step.call.outcome == End::Unknown);
            recovered += in_doubt.filter(|step| seen(step.number)).count();
        }
    }
    let together = shared::judge(history, &mut findings);
    let otherwise = match (writes, reads, listed) {
        (0, ..) => Verdict::Unknown("no write succeeded".into()),
        (_, 0, _) => Verdict::Unknown("no table was read".into()),
        (_, _, 0) => Verdict::Unknown("no table's snapshots were listed".into()),
        _ if telling == 0 => Verdict::Unknown("no table was read after a write that it had to show".into()),
        _ if placed == 0 => Verdict::Unknown("no table was read at a snapshot that was listed".into()),
        _ if together.changes > 0 && together.telling == 0 => {
            Verdict::Unknown("no rows that clients share were read after a change that they had to show".into())
        }
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("tables", tables.len())
        .with("writes", writes)
        .with("reads", reads)
        .with("unknown writes that were seen", recovered)
        .with("ids without an order of their writes", unordered)
        .with("changes of shared rows", together.changes)
        .with("of these, under way with another one", together.met)
        .with("reads of shared rows", together.reads)
}

/// What an answer is that cannot be.
fn kind_of(action: &Action) -> Option<&'static str> {
    match action {
        Action::Table(Table::Write(_)) => Some("half"),
        Action::Table(_) => Some(answers::IMPOSSIBLE),
        _ => None,
    }
}

fn tables(history: &History) -> BTreeMap<&Key, One<'_>> {
    let mut tables: BTreeMap<&Key, One<'_>> = BTreeMap::new();
    for call in history.calls() {
        let Action::Table(action) = history.action(call) else { continue };
        match action {
            Table::Write(write) => {
                let one = tables.entry(&write.table).or_default();
                if call.outcome == End::Fail {
                    one.failed.insert(write.number, call);
                    continue;
                }
                one.steps.entry(write.id).or_default().push(Step { call, change: write.change, number: write.number });
            }
            Table::Read { table, rows: Some(rows), snapshot, stale_ms } if call.outcome == End::Ok => {
                // The age is told in whole milliseconds.
                let stale_ns = stale_ms.map_or(0, |ms| ms.saturating_add(1).saturating_mul(1_000_000));
                tables.entry(table).or_default().reads.push(Read {
                    call,
                    rows,
                    snapshot: *snapshot,
                    sequence: history.revision(call),
                    node: history.end(call).and_then(|end| end.peer),
                    fresh_ns: FRESH_NS.max(stale_ns),
                });
            }
            Table::Line { table, snapshots: Some(line) } if call.outcome == End::Ok => {
                tables.entry(table).or_default().line = Some((call, line));
            }
            // [`super::shared`]'s to judge.
            Table::Push { .. } | Table::Turn { .. } | Table::Shared { .. } => {}
            Table::Read { .. } | Table::Line { .. } => {}
        }
    }
    tables
}

/// Each was begun after the one before it had succeeded.
fn is_ordered(steps: &[Step<'_>]) -> bool {
    let follows = |one: &Step<'_>, next: &Step<'_>| one.call.happened_before().is_some_and(|at| at < next.call.invoked);
    steps.windows(2).all(|pair| follows(&pair[0], &pair[1]))
}

/// The state of an id after so many of its writes: the number of the write that its rows are of; `None`: there are none.
fn state(steps: &[Step<'_>], after: usize) -> Option<i64> {
    let last = steps.get(after.checked_sub(1)?)?;
    (last.change != Change::Delete).then_some(last.number)
}

/// The state that a read shows of an id; `None` if it is none that one write has left.
fn shown(read: &Read<'_>, id: i64) -> Option<Option<i64>> {
    match read.rows.get(&id) {
        None => Some(None),
        Some(values) => Table::number(values).map(Some),
    }
}

/// What is wrong about rows that no single write has left.
fn unsound(values: &[i64]) -> &'static str {
    let distinct: HashSet<&i64> = values.iter().collect();
    match values.len() {
        _ if distinct.len() < values.len() => "twice",
        n if n < Table::PARTS => "half",
        _ => "torn",
    }
}

/// One table, being judged.
struct Judge<'a> {
    history: &'a History,
    key: &'a Key,
    one: &'a One<'a>,
}

impl<'a> Judge<'a> {
    fn found(&self, findings: &mut Findings, kind: &str, what: String, calls: &[&Call]) {
        findings.add(kind, || Finding::new(kind, what, Bar::all(self.history, calls.iter().copied())));
    }

    /// Every read by itself.
    fn reads(&self, findings: &mut Findings) {
        // Of one id the first of a kind tells it all.
        let mut told: HashSet<(i64, &str)> = HashSet::new();
        for read in &self.one.reads {
            let ids: HashSet<i64> = self.one.steps.keys().chain(read.rows.keys()).copied().collect();
            let mut ids: Vec<i64> = ids.into_iter().collect();
            ids.sort_unstable();
            for id in ids {
                if let Some((kind, what, calls)) = self.wrong_with(read, id)
                    && told.insert((id, kind))
                {
                    self.found(findings, kind, what, &calls);
                }
            }
        }
    }

    /// What a read shows of an id and must not.
    fn wrong_with(&self, read: &Read<'a>, id: i64) -> Option<(&'static str, String, Vec<&'a Call>)> {
        let (key, one) = (self.key, self.one);
        let steps = one.steps.get(&id).map_or(&[][..], Vec::as_slice);
        let Some(state_shown) = shown(read, id) else {
            let values = &read.rows[&id];
            let what = format!("table {key} has the rows {values:?} under {id}, which no single write leaves");
            let by = steps.iter().map(|step| step.call).chain([read.call]);
            return Some((unsound(values), what, by.collect()));
        };
        if let Some(number) = state_shown
            && !steps.iter().any(|step| step.number == number && step.change != Change::Delete)
        {
            return Some(match one.failed.get(&number) {
                Some(failed) => {
                    let what = format!("table {key} shows write {number} under {id}, which failed");
                    ("unexpected", what, vec![*failed, read.call])
                }
                None => {
                    let what = format!("table {key} shows write {number} under {id}, which nobody made");
                    ("unexpected", what, vec![read.call])
                }
            });
        }
        if !is_ordered(steps) {
            return None;
        }
        let most = steps.iter().take_while(|step| step.call.invoked < read.ended()).count();
        let least = steps.iter().take_while(|step| self.must_show(read, step)).count();
        if (least..=most).any(|after| state(steps, after) == state_shown) {
            return None;
        }
        let shown_after = (0..=steps.len()).rev().find(|after| state(steps, *after) == state_shown)?;
        if shown_after > most {
            let what = format!("table {key} shows of {id} what was written only after it was read");
            return Some(("unexpected", what, vec![steps[shown_after - 1].call, read.call]));
        }
        let newest = steps[least - 1].call;
        let shows = |later: &&Read<'_>| {
            let state_later = shown(later, id);
            (least..=steps.len()).any(|after| Some(state(steps, after)) == state_later)
        };
        let later = one.reads.iter().filter(|later| later.call.invoked > read.call.invoked).find(shows);
        let lacks = format!("a read of table {key} shows {id} as it was before a write that it had to show");
        Some(match later {
            Some(later) => ("stale", format!("{lacks}; a later one does"), vec![newest, read.call, later.call]),
            None => ("lost", format!("{lacks}, and no later one does"), vec![newest, read.call]),
        })
    }

    /// How many reads had to show a write.
    fn telling(&self) -> usize {
        let must_show_any = |read: &&Read<'_>| self.one.steps.values().flatten().any(|step| self.must_show(read, step));
        self.one.reads.iter().filter(must_show_any).count()
    }

    /// Whether a read has to show a write: its own node acknowledged it before, or another one long enough before.
    fn must_show(&self, read: &Read<'_>, step: &Step<'_>) -> bool {
        let Some(end) = self.history.end(step.call).filter(|_| step.call.outcome == End::Ok) else { return false };
        let began_ns = self.history.invocation(read.call).time_ns;
        let is_before = step.call.ended.is_some_and(|ended| ended < read.call.invoked);
        let is_own = end.peer.is_some() && end.peer == read.node;
        is_before && (is_own || end.time_ns.saturating_add(read.fresh_ns) <= began_ns)
    }

    /// Reads in the order of the versions that they show.
    fn versions(&self, findings: &mut Findings) {
        let mut reads: Vec<(u64, &Read<'_>)> =
            self.one.reads.iter().filter_map(|read| Some((read.sequence?, read))).collect();
        reads.sort_by_key(|(sequence, read)| (*sequence, read.call.invoked));
        for pair in reads.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            let ((sequence, one), (_, other)) = (pair[0], pair[1]);
            if one.snapshot != other.snapshot {
                let what = format!("table {} has two snapshots with the sequence number {sequence}", self.key);
                self.found(findings, "fork", what, &[one.call, other.call]);
            } else if one.rows != other.rows {
                let what = format!("two reads of one snapshot of table {} show other rows", self.key);
                self.found(findings, "other rows", what, &[one.call, other.call]);
            }
        }
        for (id, steps) in self.one.steps.iter().filter(|(_, steps)| is_ordered(steps)) {
            let mut last: (usize, Option<&Read<'_>>) = (0, None);
            for (_, read) in &reads {
                let Some(seen) = shown(read, *id) else { continue };
                let after = (0..=steps.len()).filter(|after| state(steps, *after) == seen);
                match (after.clone().find(|after| *after >= last.0), after.max(), last.1) {
                    (Some(after), ..) if after > last.0 || last.1.is_none() => last = (after, Some(read)),
                    (None, Some(_), Some(before)) => {
                        let what = format!("a newer version of table {} shows an older state of {id}", self.key);
                        self.found(findings, "back", what, &[before.call, read.call]);
                        break;
                    }
                    _ => {}
                }
            }
        }
    }

    /// What each query node shows, one read after the other.
    fn nodes(&self, findings: &mut Findings) {
        let mut by_end: Vec<&Read<'_>> = self.one.reads.iter().collect();
        by_end.sort_by_key(|read| read.ended());
        let mut ended = by_end.into_iter().peekable();
        let mut newest: HashMap<u64, (u64, &Read<'_>)> = HashMap::new();
        for read in &self.one.reads {
            while let Some(before) = ended.next_if(|before| before.ended() < read.call.invoked) {
                let (Some(node), Some(sequence)) = (before.node, before.sequence) else { continue };
                let known = newest.entry(node).or_insert((sequence, before));
                if sequence > known.0 {
                    *known = (sequence, before);
                }
            }
            let (Some(node), Some(sequence)) = (read.node, read.sequence) else { continue };
            if let Some((_, before)) = newest.get(&node).filter(|(known, _)| *known > sequence) {
                let what = format!("query node {node} showed an older version of table {} than before", self.key);
                self.found(findings, "node went back", what, &[before.call, read.call]);
            }
        }
    }

    /// The snapshots that there are in the end. Gives how many reads are of one of them.
    fn line(&self, findings: &mut Findings) -> usize {
        let Some((listed, line)) = self.one.line else { return 0 };
        let mut placed = 0;
        for pair in line.windows(2) {
            if pair[1].parent != Some(pair[0].id) || pair[1].sequence <= pair[0].sequence {
                let (one, next) = (pair[0].sequence, pair[1].sequence);
                let what = format!("snapshot {next} of table {} does not follow snapshot {one}", self.key);
                self.found(findings, "fork", what, &[listed]);
            }
        }
        let by_sequence: HashMap<u64, i64> = line.iter().map(|snapshot| (snapshot.sequence, snapshot.id)).collect();
        let (first, last) = (line.first().map_or(1, |s| s.sequence), line.last().map_or(0, |s| s.sequence));
        for read in &self.one.reads {
            let (Some(sequence), Some(snapshot)) = (read.sequence, read.snapshot) else { continue };
            let is_there = by_sequence.get(&sequence) == Some(&snapshot);
            placed += usize::from(is_there);
            // The listing is of a version as well, which may be as old as any; and older ones than its oldest are not kept.
            let read_ns = self.history.end(read.call).map_or(u64::MAX, |end| end.time_ns);
            let is_listed = read_ns.saturating_add(FRESH_NS) <= self.history.invocation(listed).time_ns;
            let is_in_range = sequence >= first && (sequence <= last || is_listed);
            if is_in_range && !is_there {
                let what = format!("snapshot {sequence} of table {} was read, and is not in its line", self.key);
                self.found(findings, "off the line", what, &[read.call, listed]);
            }
        }
        let mut made: HashSet<i64> = HashSet::new();
        for number in line.iter().filter_map(|snapshot| snapshot.number) {
            if !made.insert(number) {
                let by = self.one.steps.values().flatten().find(|step| step.number == number);
                let what = format!("write {number} of table {} was made twice under one operation id", self.key);
                let calls: Vec<&Call> = by.map(|step| step.call).into_iter().chain([listed]).collect();
                self.found(findings, "made twice", what, &calls);
            }
            if let Some(failed) = self.one.failed.get(&number) {
                let what = format!("write {number} of table {} failed, and has a snapshot", self.key);
                self.found(findings, "refused and made", what, &[*failed, listed]);
            }
        }
        placed
    }
}
