//! The upkeep that workers do by themselves: is there one on a shard at a time?
//!
//! A snapshot that a worker makes says under which fence, the revision of its shard's route ([`Fenced`]), and its commit was
//! made only if the route was still at that revision. So along a table's line, by sequence numbers:
//! - fences of a shard never fall (*fence fell*): whoever commits under an older one went on when the shard was another's;
//! - a fence is of one worker (*two workers*), in whichever table;
//! - whoever lists a snapshot, under one sequence number it is the same (*two snapshots*).
//!
//! Of upkeep that makes no snapshot, as expiry and sweeps, the logs of workers tell ([`Worked`]), where all are of one machine, by whose clock
//! times are then. A fence is of one worker in them as well, and:
//! - nothing was changed under a fence of a shard that was sent after a chore had begun under a later one (*went on*): a change is made only
//!   while the route is still at that revision, so it was sent before the route was changed, and who begins has seen that it was.
//!
//! A chore that is begun under an old fence, or goes on beside one under a new fence, and changes nothing does no harm: a worker hears of a move after it
//! was made, and may stand still for as long as it likes. So that is counted, and no finding.
//!
//! Snapshots expire: those of all listings are taken together, so that what was listed in between is judged, too. Of logs it is the last reading, which
//! has all that those before had. The verdict is unknown where no snapshot of a worker's was ever listed.
//!
//! Cost: linear in what was listed.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, Fenced, History, Hot, Key, Outcome as End, Worked};

/// Its name in results.
pub const NAME: &str = "fences of upkeep";

/// A snapshot, and the listing that showed it first.
type Seen<'a> = (&'a Fenced, &'a Call);
/// A chore, the table that it was about, and the reading that told of it.
type Told<'a> = (&'a Worked, &'a Key, &'a Call);

/// What is found, and who was seen to have which fence of which shard.
struct Judge<'a> {
    history: &'a History,
    findings: Findings,
    holders: BTreeMap<(u64, u64), (&'a str, &'a Call)>,
}

impl<'a> Judge<'a> {
    fn found(&mut self, kind: &str, what: String, calls: [&Call; 2]) {
        self.findings.add(kind, || Finding::new(kind, what, Bar::all(self.history, calls)));
    }

    /// A worker has done something under a fence.
    fn holds(&mut self, (shard, fence): (u64, u64), worker: &'a str, call: &'a Call) {
        let (known, first) = *self.holders.entry((shard, fence)).or_insert((worker, call));
        if known != worker {
            let what = format!("under the fence {fence} of shard {shard} both {known} and {worker} have done upkeep");
            self.found("two workers", what, [first, call]);
        }
    }
}

/// Judges every table of a history.
pub fn check(history: &History) -> Outcome {
    let mut judge = Judge { history, findings: Findings::default(), holders: BTreeMap::new() };
    let mut lines: BTreeMap<&Key, BTreeMap<u64, Seen<'_>>> = BTreeMap::new();
    let mut logs: BTreeMap<&Key, (&[Worked], &Call)> = BTreeMap::new();
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let (table, line) = match history.action(call) {
            Action::Upkeep(Hot::Fences { table, line: Some(line) }) => (table, line),
            Action::Upkeep(Hot::Worked { table, chores: Some(chores) }) => {
                logs.insert(table, (chores, call));
                continue;
            }
            _ => continue,
        };
        for fenced in line {
            match lines.entry(table).or_default().entry(fenced.sequence) {
                Entry::Vacant(new) => {
                    new.insert((fenced, call));
                }
                Entry::Occupied(known) if known.get().0 != fenced => {
                    let what = format!("table {table} has two snapshots with the sequence number {}", fenced.sequence);
                    judge.found("two snapshots", what, [known.get().1, call]);
                }
                Entry::Occupied(_) => continue,
            }
            judge.holds((fenced.shard, fenced.fence), &fenced.worker, call);
        }
    }
    for (table, line) in &lines {
        fell(table, line, &mut judge);
    }
    let mut by_shard: BTreeMap<u64, Vec<Told<'_>>> = BTreeMap::new();
    for (&table, &(chores, call)) in &logs {
        for chore in chores {
            judge.holds((chore.shard, chore.fence), &chore.worker, call);
            by_shard.entry(chore.shard).or_default().push((chore, table, call));
        }
    }
    let beside: usize = by_shard.into_values().map(|chores| went_on(chores, &mut judge)).sum();
    let snapshots: usize = lines.values().map(BTreeMap::len).sum();
    let workers: BTreeSet<&str> = judge.holders.values().map(|(worker, _)| *worker).collect();
    let otherwise = match snapshots {
        0 => Verdict::Unknown("no snapshot was listed that a worker's own upkeep had made".into()),
        _ => Verdict::Valid,
    };
    let chores = || logs.values().flat_map(|(chores, _)| chores.iter());
    judge
        .findings
        .conclude(NAME, otherwise)
        .with("snapshots of workers", snapshots)
        .with("fences", judge.holders.len())
        .with("workers", workers.len())
        .with("chores", chores().count())
        .with("chores that changed something", chores().filter(|chore| chore.acted_ms.is_some()).count())
        .with("chores that went on beside one of a later fence", beside)
}

/// Along a table's line.
fn fell(table: &Key, line: &BTreeMap<u64, Seen<'_>>, judge: &mut Judge<'_>) {
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
                judge.found("fence fell", what, [first, call]);
            }
            _ => {
                highest.insert(fenced.shard, (fenced, call));
            }
        }
    }
}

/// The chores of one shard. Says how many had not ended when one was begun under a later fence.
fn went_on(mut chores: Vec<Told<'_>>, judge: &mut Judge<'_>) -> usize {
    chores.sort_unstable_by_key(|(chore, ..)| Reverse(chore.fence));
    let mut beside = 0;
    // Of those under later fences, the one that was begun first.
    let mut later: Option<Told<'_>> = None;
    for same in chores.chunk_by(|(one, ..), (other, ..)| one.fence == other.fence) {
        for &(chore, table, call) in same {
            let Some((next, other, told)) = later else { continue };
            beside += usize::from(chore.ended_ms.is_some_and(|ended| ended > next.began_ms));
            let Some(acted_ms) = chore.acted_ms.filter(|acted| *acted > next.began_ms) else { continue };
            let what = format!(
                "{} has changed table {table} under the fence {} of shard {} ({}), {} ms after {} had begun with table {other} under {} \
                 ({}): it went on when the shard was another's",
                chore.worker,
                chore.fence,
                chore.shard,
                chore.what,
                acted_ms - next.began_ms,
                next.worker,
                next.fence,
                next.what
            );
            judge.found("went on", what, [told, call]);
        }
        let first = same.iter().copied().chain(later).min_by_key(|(chore, ..)| chore.began_ms);
        later = first;
    }
    beside
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Kind, Operation, Process};

    /// Of one shard: the fence, by whom, and when it was begun, changed something and ended.
    type Of = (u64, &'static str, u64, Option<u64>, Option<u64>);

    fn judged(chores: &[Of]) -> Outcome {
        let worked = |&(fence, worker, began_ms, acted_ms, ended_ms): &Of| Worked {
            shard: 7,
            fence,
            worker: worker.to_owned(),
            what: "expire_snapshots".to_owned(),
            began_ms,
            acted_ms,
            ended_ms,
        };
        let all = chores.iter().map(worked).collect();
        // Another shard's are nobody's here.
        let other = Worked { shard: 8, ..worked(&(1, "c", 0, Some(1_000), Some(1_000))) };
        let line = vec![Fenced { sequence: 1, shard: 7, fence: 10, worker: "a".to_owned() }];
        let told = [
            Hot::Fences { table: 9.into(), line: Some(line) },
            Hot::Worked { table: 9.into(), chores: Some(all) },
            Hot::Worked { table: 8.into(), chores: Some(vec![other]) },
        ];
        let asked = [
            Hot::Fences { table: 9.into(), line: None },
            Hot::Worked { table: 9.into(), chores: None },
            Hot::Worked { table: 8.into(), chores: None },
        ];
        let event = |kind, at, hot| Operation::new(Process::Client(1), kind, at, Action::Upkeep(hot));
        let events =
            asked.into_iter().zip(told).zip(1..).flat_map(|((asked, told), at)| {
                [event(Kind::Invoke, 10 * at, asked), event(Kind::Ok, 10 * at + 1, told)]
            });
        check(&History::new(events.collect()).unwrap())
    }

    fn kinds(chores: &[Of]) -> Vec<String> {
        judged(chores).findings.iter().map(|finding| finding.kind.clone()).collect()
    }

    #[test]
    fn what_is_changed_under_an_old_fence_is_found() {
        let later = (11, "b", 100, None, Some(500));
        // It had begun before, or after; the later fence is known by the first chore under any that follows.
        for began in [50, 150] {
            let old = (10, "a", began, Some(160), Some(170));
            assert_eq!(kinds(&[old, later]), ["went on"]);
            assert_eq!(kinds(&[(12, "a", 300, None, None), later, old]), ["went on"]);
        }
        assert_eq!(
            kinds(&[(10, "a", 150, Some(150), None), (12, "a", 100, None, None), (11, "b", 200, None, None)]),
            ["went on"]
        );
        assert_eq!(judged(&[later]).verdict, Verdict::Valid);
    }

    #[test]
    fn what_changes_nothing_any_more_is_counted_and_not_found() {
        let later = (11, "b", 100, Some(400), Some(500));
        // Sent before the shard was another's; the answer came late. Begun late, and refused. Killed.
        for (old, beside) in [
            ((10, "a", 50, Some(90), Some(450)), 1),
            ((10, "a", 50, Some(100), Some(100)), 0),
            ((10, "a", 150, None, Some(200)), 1),
            ((10, "a", 50, Some(60), None), 0),
        ] {
            let outcome = judged(&[later, old]);
            assert_eq!(outcome.verdict, Verdict::Valid);
            assert_eq!(outcome.figures["chores that went on beside one of a later fence"], beside, "{old:?}");
        }
    }

    #[test]
    fn a_fence_is_of_one_worker_in_logs_and_in_snapshots() {
        assert_eq!(kinds(&[(11, "b", 100, None, None), (11, "a", 200, None, None)]), ["two workers"]);
        assert_eq!(kinds(&[(10, "b", 100, None, None)]), ["two workers"]);
    }
}
