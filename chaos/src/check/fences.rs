//! The upkeep that workers do by themselves: is there one on a shard at a time?
//!
//! A snapshot that a worker makes says under which fence, the revision of its shard's route ([`Fenced`]), and its commit was
//! made only if the route was still at that revision. So along a table's line, by sequence numbers:
//! - fences of a shard never fall (*fence fell*): whoever commits under an older one went on when the shard was another's;
//! - a fence is of one worker (*two workers*), in whichever table;
//! - whoever lists a snapshot, under one sequence number it is the same (*two snapshots*).
//!
//! Snapshots expire: those of all listings are taken together, so that what was listed in between is judged, too. Nothing is said of upkeep
//! that makes no snapshot. The verdict is unknown where no snapshot of a worker's was ever listed.
//!
//! Cost: linear in what was listed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, Fenced, History, Hot, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "fences of upkeep";

/// A snapshot, and the listing that showed it first.
type Seen<'a> = (&'a Fenced, &'a Call);

/// Judges every table of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let mut found = |kind: &str, what: String, calls: [&Call; 2]| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, calls)));
    };
    let mut lines: BTreeMap<&Key, BTreeMap<u64, Seen<'_>>> = BTreeMap::new();
    let mut holders: BTreeMap<(u64, u64), Seen<'_>> = BTreeMap::new();
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let Action::Upkeep(Hot::Fences { table, line: Some(line) }) = history.action(call) else { continue };
        for fenced in line {
            match lines.entry(table).or_default().entry(fenced.sequence) {
                Entry::Vacant(new) => {
                    new.insert((fenced, call));
                }
                Entry::Occupied(known) if known.get().0 != fenced => {
                    let what = format!("table {table} has two snapshots with the sequence number {}", fenced.sequence);
                    found("two snapshots", what, [known.get().1, call]);
                }
                Entry::Occupied(_) => continue,
            }
            match holders.entry((fenced.shard, fenced.fence)) {
                Entry::Vacant(new) => {
                    new.insert((fenced, call));
                }
                Entry::Occupied(known) if known.get().0.worker != fenced.worker => {
                    let (Fenced { shard, fence, worker, .. }, first) = *known.get();
                    let what = format!(
                        "under the fence {fence} of shard {shard} both {worker} and {} have committed upkeep",
                        fenced.worker
                    );
                    found("two workers", what, [first, call]);
                }
                Entry::Occupied(_) => {}
            }
        }
    }
    for (table, line) in &lines {
        let mut highest: BTreeMap<u64, Seen<'_>> = BTreeMap::new();
        for &(fenced, call) in line.values() {
            match highest.get(&fenced.shard) {
                Some(&(before, first)) if before.fence > fenced.fence => {
                    let what = format!(
                        "{} has committed upkeep of table {table} as snapshot {} under the fence {}, after {} had as snapshot {} under \
                         {}: it went on when the shard {} was another's",
                        fenced.worker,
                        fenced.sequence,
                        fenced.fence,
                        before.worker,
                        before.sequence,
                        before.fence,
                        fenced.shard
                    );
                    found("fence fell", what, [first, call]);
                }
                _ => {
                    highest.insert(fenced.shard, (fenced, call));
                }
            }
        }
    }
    let snapshots: usize = lines.values().map(BTreeMap::len).sum();
    let workers: BTreeSet<&str> = holders.values().map(|(fenced, _)| fenced.worker.as_str()).collect();
    let otherwise = match snapshots {
        0 => Verdict::Unknown("no snapshot was listed that a worker's own upkeep had made".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("snapshots of workers", snapshots)
        .with("fences", holders.len())
        .with("workers", workers.len())
}
