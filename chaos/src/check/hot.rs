//! Appends of many writers to one table, which nodes commit together and for each other: is each there once, and whole?
//!
//! - A read shows of each append all rows or none: never part of them (*half*), more of them (*twice*), or others (*torn*); and of none
//!   that failed, was not begun, or that nobody made (*unexpected*).
//! - It shows what its own node has acknowledged before it, and what any node has acknowledged [`FRESH_NS`] before, or as long before as the
//!   answer says that it is old (*stale*; *lost* if nothing later shows it either).
//! - What a node has shown it goes on to show (*node went back*): nothing is ever removed.
//! - What it is made of is there (*file gone*): whatever upkeep deletes, nothing that is read. That is no proof where the version that was read may
//!   have expired: a node that is cut off goes on with what it had. A snapshot expires that is older than [`EXPIRES_BEYOND_S`] at least
//!   and not among the newest [`RETAINED`]. What a node is certainly past is what it has acknowledged or shown itself, so its version may
//!   have expired only if the newest of that was begun longer ago than that, and [`RETAINED`] snapshots may have come since: an append makes
//!   one, and each lets one more be made by packing.
//! - It has no row that no append leaves (*impossible*).
//! - The snapshot that there was when an append had been acknowledged is there for as long as it is to be kept, counted from when that was asked for
//!   (*expired early*), with its files (*file gone*), and has the append (*lost*). A read that fails later, or for another reason, is no proof. How
//!   many were answered is told.
//!
//! The verdict is unknown where no read had to show anything, or every append that is there, of whatever outcome, has made a snapshot of its own:
//! nothing was committed together. With upkeep
//! it is where no table was read after each of its [`CHORES`], and whatever else was tried of that kind, had changed something there.
//!
//! Cost: reads times the appends to their table.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use super::table::FRESH_NS;
use super::{Verdict, answers};
use crate::history::{Action, Call, Chore, History, Hot, Key, Outcome as End, Table};

/// Its name in results, and with upkeep.
pub const NAME: &str = "appends";
pub const UPKEEP: &str = "upkeep";
/// How the error of a read begins that did not find a file.
pub const GONE: &str = "a file of the table is gone";
/// The same of one that did not find its snapshot.
pub const EXPIRED: &str = "a snapshot is gone";
/// What a read has for an append whose rows are as many as they should be, and not those.
pub const TORN: i64 = -1;

/// How much older than any statement can be, in seconds, a snapshot is at least that expires.
pub const EXPIRES_BEYOND_S: u64 = 3;
/// So many snapshots are kept however old they are: after a time in which nobody could commit the newest ones are old, and still read.
pub const RETAINED: usize = 10;

/// What must have been done to a table, with effect, before a read of it shows that they do it no harm.
const CHORES: [Chore; 2] = [Chore::Pack, Chore::Expire];

/// A read that succeeded.
struct Read<'a> {
    call: &'a Call,
    seen: HashSet<i64>,
    odd: Vec<(i64, i64)>,
    node: Option<u64>,
    /// What was acknowledged so long before it must be in it.
    fresh_ns: u64,
}

impl<'a> Read<'a> {
    fn new(call: &'a Call, whole: &[i64], odd: &BTreeMap<Key, i64>, node: Option<u64>, fresh_ns: u64) -> Self {
        let number = |key: &Key| match key {
            Key::Number(number) => Some(*number),
            Key::Name(_) => None,
        };
        let odd: Vec<(i64, i64)> = odd.iter().filter_map(|(key, rows)| Some((number(key)?, *rows))).collect();
        let seen = whole.iter().copied().chain(odd.iter().map(|(number, _)| *number)).collect();
        Self { call, seen, odd, node, fresh_ns }
    }
}

/// What was done to one table.
#[derive(Default)]
struct One<'a> {
    /// Those that did not fail.
    appends: HashMap<i64, &'a Call>,
    failed: HashMap<i64, &'a Call>,
    /// By invocation.
    reads: Vec<Read<'a>>,
    snapshots: Option<u64>,
    /// Those that changed something, and where they had ended.
    chores: Vec<(Chore, usize)>,
    /// Reads that did not find a file, and how they said so.
    gone: Vec<(&'a Call, &'a str)>,
    /// Reads of what was there after an append, with that one's number.
    past: Vec<(i64, Read<'a>)>,
    /// Those that failed since that is gone: the append, how long that was to be kept, in nanoseconds, and how they said so.
    passed: Vec<(i64, u64, &'a Call, &'a str)>,
}

impl One<'_> {
    fn has_done(&self, wanted: Chore, before: usize) -> bool {
        self.chores.iter().any(|(what, ended)| *what == wanted && *ended < before)
    }

    fn is_kept_up(&self, wanted: &[Chore]) -> bool {
        self.reads.iter().any(|read| wanted.iter().all(|wanted| self.has_done(*wanted, read.call.invoked)))
    }

    fn acknowledged(&self) -> usize {
        self.appends.values().filter(|call| call.outcome == End::Ok).count()
    }

    /// How many appends are there, as far as that was seen: each may have made a snapshot, also one of unknown outcome.
    fn there(&self) -> usize {
        self.reads.iter().map(|read| read.seen.len()).fold(self.acknowledged(), usize::max)
    }
}

/// Judges every table of a history.
pub fn check(history: &History) -> Outcome {
    fn of(action: &Action) -> Option<&Hot> {
        if let Action::Hot(hot) = action { Some(hot) } else { None }
    }
    judge(history, NAME, of)
}

/// The same with upkeep beside.
pub fn check_upkeep(history: &History) -> Outcome {
    fn of(action: &Action) -> Option<&Hot> {
        if let Action::Upkeep(hot) = action { Some(hot) } else { None }
    }
    judge(history, UPKEEP, of)
}

fn judge(history: &History, name: &str, of: fn(&Action) -> Option<&Hot>) -> Outcome {
    let mut findings = Findings::default();
    let kind_of = |action: &Action| match of(action)? {
        Hot::Append { .. } => Some("half"),
        _ => Some(answers::IMPOSSIBLE),
    };
    answers::judge(history, kind_of, &mut findings);
    let tables = tables(history, of);
    let is_tried = |wanted: &Chore| {
        let mut calls = history.calls().iter();
        calls.any(|call| matches!(of(history.action(call)), Some(Hot::Chore { what, .. }) if what == wanted))
    };
    let wanted: Vec<Chore> =
        CHORES.into_iter().chain([Chore::Sweep, Chore::Purge].into_iter().filter(is_tried)).collect();
    let (mut appends, mut unknown, mut reads, mut telling) = (0, 0, 0, 0);
    // Of tables whose snapshots were counted.
    let (mut snapshots, mut counted) = (0, 0);
    let (mut expired, mut past) = (0, 0);
    for (key, one) in &tables {
        let judge = Judge { history, key, one };
        telling += judge.reads(&mut findings);
        judge.nodes(&mut findings);
        expired += judge.gone(name == UPKEEP, &mut findings);
        judge.past(&mut findings);
        past += one.past.len();
        let acknowledged = one.acknowledged();
        appends += acknowledged;
        unknown += one.appends.len() - acknowledged;
        reads += one.reads.len();
        if let Some(count) = one.snapshots {
            snapshots += usize::try_from(count).unwrap_or(usize::MAX);
            counted += one.there();
        }
    }
    let otherwise = match (appends, reads) {
        (0, _) => Verdict::Unknown("no append succeeded".into()),
        (_, 0) => Verdict::Unknown("no table was read".into()),
        _ if telling == 0 => Verdict::Unknown("no table was read after an append that it had to show".into()),
        _ if name == UPKEEP && !tables.values().any(|one| one.is_kept_up(&wanted)) => Verdict::Unknown(
            "no table was read after its files had been packed, its snapshots had expired, and what else was tried had changed \
             something"
                .into(),
        ),
        _ if name == UPKEEP => Verdict::Valid,
        _ if counted == 0 => Verdict::Unknown("no table's snapshots were counted".into()),
        _ if snapshots >= counted => Verdict::Unknown("no two appends became one snapshot: nothing was merged".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(name, otherwise)
        .with("tables", tables.len())
        .with("appends", appends)
        .with("unknown appends", unknown)
        .with("reads", reads)
        .with("snapshots", snapshots)
        .with("appends in tables whose snapshots were counted", counted)
        .with("chores", tables.values().map(|one| one.chores.len()).sum())
        .with("reads of what may have expired", expired)
        .with("late reads that were answered", past)
}

fn tables<'a>(history: &'a History, of: fn(&Action) -> Option<&Hot>) -> BTreeMap<&'a Key, One<'a>> {
    let mut tables: BTreeMap<&Key, One<'_>> = BTreeMap::new();
    for call in history.calls() {
        let Some(action) = of(history.action(call)) else { continue };
        match action {
            Hot::Append { table, number } => {
                let one = tables.entry(table).or_default();
                let of = if call.outcome == End::Fail { &mut one.failed } else { &mut one.appends };
                of.insert(*number, call);
            }
            Hot::Read { table, whole: Some(whole), odd, stale_ms } if call.outcome == End::Ok => {
                // The age is told in whole milliseconds.
                let stale_ns = stale_ms.map_or(0, |ms| ms.saturating_add(1).saturating_mul(1_000_000));
                let node = history.end(call).and_then(|end| end.peer);
                let read = Read::new(call, whole, odd, node, FRESH_NS.max(stale_ns));
                tables.entry(table).or_default().reads.push(read);
            }
            Hot::Past { table, number, whole: Some(whole), odd, .. } if call.outcome == End::Ok => {
                // It is of no node's newest version, and nothing else has to be in it.
                let read = Read::new(call, whole, odd, None, u64::MAX);
                tables.entry(table).or_default().past.push((*number, read));
            }
            Hot::Past { table, number, kept_ms, .. } => {
                let error = history.end(call).and_then(|end| end.error.as_deref());
                let passed = error.filter(|error| error.starts_with(GONE) || error.starts_with(EXPIRED));
                let kept_ns = kept_ms.saturating_mul(1_000_000);
                tables.entry(table).or_default().passed.extend(passed.map(|error| (*number, kept_ns, call, error)));
            }
            Hot::Snapshots { table, count } if call.outcome == End::Ok => {
                let one = tables.entry(table).or_default();
                one.snapshots = one.snapshots.max(*count);
            }
            Hot::Read { table, .. } => {
                let error = history.end(call).and_then(|end| end.error.as_deref());
                let gone = error.filter(|error| error.starts_with(GONE)).map(|error| (call, error));
                tables.entry(table).or_default().gone.extend(gone);
            }
            Hot::Chore { table, what } => {
                let ended = call.ended.filter(|_| call.outcome == End::Ok);
                tables.entry(table).or_default().chores.extend(ended.map(|ended| (*what, ended)));
            }
            // [`super::fences`]' to judge.
            Hot::Snapshots { .. } | Hot::Fences { .. } | Hot::Worked { .. } => {}
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

    /// Every read by itself. Of one append the first of a kind tells it all. Gives how many had to show something.
    fn reads(&self, findings: &mut Findings) -> usize {
        let (key, one) = (self.key, self.one);
        let mut telling = 0;
        let mut told: HashSet<(i64, &str)> = HashSet::new();
        for read in one.reads.iter().chain(one.past.iter().map(|(_, read)| read)) {
            for (number, rows) in &read.odd {
                let kind = match *rows {
                    TORN => "torn",
                    rows if rows > Table::PARTS as i64 => "twice",
                    _ => "half",
                };
                if told.insert((*number, kind)) {
                    let what = match *rows {
                        TORN => format!("table {key} has other rows of append {number}"),
                        rows => format!("table {key} has {rows} rows of append {number} instead of {}", Table::PARTS),
                    };
                    let by = one.appends.get(number).or_else(|| one.failed.get(number)).copied();
                    self.found(findings, kind, what, &by.into_iter().chain([read.call]).collect::<Vec<_>>());
                }
            }
            let mut seen: Vec<i64> = read.seen.iter().copied().collect();
            seen.sort_unstable();
            for number in seen {
                let is_begun = |by: &&Call| read.call.ended.is_none_or(|ended| by.invoked < ended);
                if one.appends.get(&number).is_some_and(is_begun) || !told.insert((number, "unexpected")) {
                    continue;
                }
                let failed = one.failed.get(&number).copied();
                let why = if failed.is_some() { "which failed" } else { "which nobody had begun" };
                let calls: Vec<&Call> = failed.into_iter().chain([read.call]).collect();
                self.found(findings, "unexpected", format!("table {key} shows append {number}, {why}"), &calls);
            }
            telling += usize::from(self.missing(read, &mut told, findings));
        }
        telling
    }

    /// What a read had to show and does not. Gives whether there was anything that it had to show.
    fn missing(&self, read: &Read<'_>, told: &mut HashSet<(i64, &str)>, findings: &mut Findings) -> bool {
        let began_ns = self.history.invocation(read.call).time_ns;
        let mut missing: Vec<(i64, &Call)> = Vec::new();
        let mut is_telling = false;
        for (number, by) in &self.one.appends {
            let Some(end) = self.history.end(by).filter(|_| by.outcome == End::Ok) else { continue };
            let is_before = by.ended.is_some_and(|ended| ended < read.call.invoked);
            let is_own = end.peer.is_some() && end.peer == read.node;
            let is_known = is_own || end.time_ns.saturating_add(read.fresh_ns) <= began_ns;
            let must_show = is_before && is_known;
            is_telling |= must_show;
            if must_show && !read.seen.contains(number) {
                missing.push((*number, *by));
            }
        }
        missing.sort_unstable_by_key(|(number, _)| *number);
        for (number, by) in missing {
            let shows = |later: &&Read<'_>| later.call.invoked > read.call.invoked && later.seen.contains(&number);
            let later = self.one.reads.iter().find(shows).map(|later| later.call);
            let (kind, then) = match later {
                Some(_) => ("stale", "; a later one does"),
                None => ("lost", ", and no later one does"),
            };
            if told.insert((number, kind)) {
                let what =
                    format!("a read of table {} does not show append {number}, which was acknowledged{then}", self.key);
                self.found(findings, kind, what, &[by, read.call].into_iter().chain(later).collect::<Vec<_>>());
            }
        }
        is_telling
    }

    /// Reads that did not find a file. Gives how many show nothing by that: with upkeep, the version that they were of may have expired.
    fn gone(&self, expires: bool, findings: &mut Findings) -> usize {
        let mut may_have = 0;
        for (read, error) in &self.one.gone {
            if expires && self.may_have_expired(read) {
                may_have += 1;
            } else {
                let what = format!("table {} cannot be read: {error}", self.key);
                self.found(findings, "file gone", what, &[*read]);
            }
        }
        may_have
    }

    /// Reads of what was there a while before.
    fn past(&self, findings: &mut Findings) {
        let key = self.key;
        for (number, read) in self.one.past.iter().filter(|(number, read)| !read.seen.contains(number)) {
            let what = format!("a snapshot of table {key} that was there after append {number} does not have it");
            let by = self.one.appends.get(number).copied();
            self.found(findings, "lost", what, &by.into_iter().chain([read.call]).collect::<Vec<_>>());
        }
        for (number, kept_ns, read, error) in &self.one.passed {
            let Some(by) = self.one.appends.get(number).copied() else { continue };
            let Some(end) = self.history.end(read) else { continue };
            let age_ns = end.time_ns.saturating_sub(self.history.invocation(by).time_ns);
            if age_ns < *kept_ns {
                let kind = if error.starts_with(EXPIRED) { "expired early" } else { "file gone" };
                let [age_ms, kept_ms] = [age_ns, *kept_ns].map(|ns| ns / 1_000_000);
                let what = format!(
                    "what table {key} had after append {number} cannot be read {age_ms} ms after that was asked for, though it is \
                     kept for {kept_ms} ms: {error}"
                );
                self.found(findings, kind, what, &[by, *read]);
            }
        }
    }

    fn may_have_expired(&self, read: &Call) -> bool {
        let Some(end) = self.history.end(read) else { return false };
        let node = end.peer;
        let is_before = |call: &Call| call.ended.is_some_and(|ended| ended < read.invoked);
        let is_own = |by: Option<u64>| by.is_some() && by == node;
        let shown = self.one.reads.iter().filter(|other| is_before(other.call) && is_own(other.node));
        let shown: HashSet<i64> = shown.flat_map(|other| &other.seen).copied().collect();
        let (mut newest_ns, mut since) = (0, 0);
        for (number, &by) in &self.one.appends {
            let acknowledged = self.history.end(by).filter(|_| by.outcome == End::Ok && is_before(by));
            if shown.contains(number) || acknowledged.is_some_and(|end| is_own(end.peer)) {
                newest_ns = newest_ns.max(self.history.invocation(by).time_ns);
            } else if read.ended.is_none_or(|ended| by.invoked < ended) {
                since += 1;
            }
        }
        since >= RETAINED / 2 && end.time_ns.saturating_sub(newest_ns) > EXPIRES_BEYOND_S * 1_000_000_000
    }

    /// What each query node shows, one read after the other.
    fn nodes(&self, findings: &mut Findings) {
        let mut by_end: Vec<&Read<'_>> = self.one.reads.iter().collect();
        by_end.sort_by_key(|read| read.call.ended);
        let mut ended = by_end.into_iter().peekable();
        let mut known: HashMap<u64, BTreeMap<i64, &Call>> = HashMap::new();
        for read in &self.one.reads {
            while let Some(before) = ended.next_if(|before| before.call.ended.is_some_and(|at| at < read.call.invoked))
            {
                let Some(node) = before.node else { continue };
                let known = known.entry(node).or_default();
                for number in &before.seen {
                    known.entry(*number).or_insert(before.call);
                }
            }
            let mut shown = read.node.and_then(|node| known.get(&node)).into_iter().flatten();
            if let Some((number, before)) = shown.find(|(number, _)| !read.seen.contains(*number)) {
                let what =
                    format!("a query node has shown append {number} to table {}, and does not any more", self.key);
                self.found(findings, "node went back", what, &[before, read.call]);
            }
        }
    }
}
