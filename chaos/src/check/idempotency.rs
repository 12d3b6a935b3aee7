//! Changes that are sent again when their answer is lost: is each made at most once, and once if it was acknowledged?
//!
//! All sendings of one id are one change. It was made if any sending succeeded; nobody knows, if none did and the
//! outcome of one is unknown; it was not made if all failed. Then:
//! - all answers to one id name the same revision, and answers to two ids two revisions;
//! - a count of a key's changes is not below those that were surely made before it began (*lost*), and not above those
//!   that may have been made before it ended (*made twice*). With one change a key that is exact;
//! - a count is never below an earlier one;
//! - no session is over, unless clocks were made to differ, as long as its client had an answer for which it had to live
//!   longer (*over early*): who asked says so in the history.
//!
//! Where no change was sent again and each was answered there is nothing that could have been made twice, and where none of those was
//! answered twice, or counted afterwards, it would not have been seen: nothing was shown.

use std::collections::{BTreeMap, HashMap};

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, History, Idempotency, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "exactly once";

/// Why a change was refused that should not have been: as the history says it.
pub const OVER_EARLY: &str = "the session is over, and had been heard of within its time to live";

/// One change, however often it was sent.
#[derive(Default)]
struct Change<'a> {
    sendings: Vec<&'a Call>,
}

impl<'a> Change<'a> {
    /// From when it was surely made: the first end of a sending that succeeded.
    fn made(&self) -> Option<usize> {
        self.sendings.iter().filter(|call| call.outcome == End::Ok).filter_map(|call| call.ended).min()
    }

    /// How many sendings were answered: all answers are compared.
    fn answers(&self) -> usize {
        self.sendings.iter().filter(|call| call.outcome == End::Ok).count()
    }

    /// Whether there was an occasion to make it twice: it was sent again, or somebody may have done so whom it was not answered.
    fn is_telling(&self) -> bool {
        self.sendings.len() > 1 || self.sendings.iter().any(|call| call.outcome == End::Unknown)
    }

    /// Since when it may have been made; none if all failed.
    fn may_be_made(&self) -> Option<usize> {
        self.sendings.iter().filter(|call| call.outcome != End::Fail).map(|call| call.invoked).min()
    }
}

#[derive(Default)]
struct Counted<'a> {
    changes: BTreeMap<i64, Change<'a>>,
    counts: Vec<(&'a Call, u64)>,
}

impl Counted<'_> {
    /// Whether one of its changes, made twice, would show: by two answers, or by a count after its last sending.
    fn is_telling(&self) -> bool {
        let counted = self.counts.iter().map(|(call, _)| call.invoked).max();
        let sent = |change: &Change<'_>| change.sendings.iter().map(|call| call.invoked).max();
        self.changes.values().any(|change| change.is_telling() && (change.answers() > 1 || sent(change) < counted))
    }
}

/// Judges all changes of a history. Where clocks were made to differ (`drift`), a session may be over early.
pub fn check(history: &History, drift: bool) -> Outcome {
    let mut findings = Findings::default();
    let mut keys: BTreeMap<&Key, Counted<'_>> = BTreeMap::new();
    for call in history.calls() {
        match history.action(call) {
            Action::Idempotency(Idempotency::Apply { key, id }) => {
                keys.entry(key).or_default().changes.entry(*id).or_default().sendings.push(call);
            }
            Action::Idempotency(Idempotency::Count { key, count: Some(count) }) if call.outcome == End::Ok => {
                keys.entry(key).or_default().counts.push((call, *count));
            }
            _ => {}
        }
    }
    if !drift {
        judge_refusals(history, &mut findings);
    }
    judge_revisions(history, &keys, &mut findings);
    keys.iter().for_each(|(key, counted)| judge_counts(history, key, counted, &mut findings));
    let changes = || keys.values().flat_map(|counted| counted.changes.values());
    let made = changes().filter(|change| change.made().is_some()).count();
    let counts: usize = keys.values().map(|counted| counted.counts.len()).sum();
    let otherwise = match (made, counts) {
        (0, _) => Verdict::Unknown("no change was acknowledged".into()),
        (_, 0) => Verdict::Unknown("no key's changes were counted".into()),
        _ if !changes().any(|change| change.is_telling()) => {
            Verdict::Unknown("each change was sent once and answered: none could have been made twice".into())
        }
        _ if !keys.values().any(Counted::is_telling) => {
            Verdict::Unknown("no change that was sent again was answered twice, or counted after that".into())
        }
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("changes acknowledged", made)
        .with("changes sent again", changes().filter(|change| change.sendings.len() > 1).count())
        .with("changes answered more than once", changes().filter(|change| change.answers() > 1).count())
        .with("counts", counts)
}

fn judge_refusals(history: &History, findings: &mut Findings) {
    let is_early = |call: &&Call| history.end(call).is_some_and(|end| end.refusal.as_deref() == Some(OVER_EARLY));
    for call in history.calls().iter().filter(is_early) {
        let Action::Idempotency(Idempotency::Apply { key, id }) = history.action(call) else { continue };
        findings.add("over early", || {
            let what = format!("change {id} of key {key} was refused since its session was over, which had to be open");
            Finding::new("over early", what, Bar::all(history, [call]))
        });
    }
}

fn judge_revisions(history: &History, keys: &BTreeMap<&Key, Counted<'_>>, findings: &mut Findings) {
    let mut by_revision: HashMap<u64, (i64, &Call)> = HashMap::new();
    for (key, counted) in keys {
        for (id, change) in &counted.changes {
            let answered = change.sendings.iter().filter(|call| call.outcome == End::Ok);
            let mut answers = answered.filter_map(|call| Some((*call, history.revision(call)?)));
            let Some((first, revision)) = answers.next() else { continue };
            if let Some((other, again)) = answers.find(|(_, again)| *again != revision) {
                findings.add("made twice", || {
                    let what =
                        format!("change {id} of key {key} was answered with revision {revision} and with {again}");
                    Finding::new("made twice", what, Bar::all(history, [first, other]))
                });
            }
            if let Some((other_id, other)) = by_revision.insert(revision, (*id, first)) {
                findings.add("one revision for two", || {
                    let what = format!("changes {other_id} and {id} were both answered with revision {revision}");
                    Finding::new("one revision for two", what, Bar::all(history, [other, first]))
                });
            }
        }
    }
}

fn judge_counts(history: &History, key: &Key, counted: &Counted<'_>, findings: &mut Findings) {
    let sorted = |mut places: Vec<usize>| {
        places.sort_unstable();
        places
    };
    let made = sorted(counted.changes.values().filter_map(Change::made).collect());
    let possible = sorted(counted.changes.values().filter_map(Change::may_be_made).collect());
    let mut highest: Option<(&Call, u64)> = None;
    // By end, so that the highest of those that ended before one begins is known.
    let mut ended: Vec<(&Call, u64)> = counted.counts.clone();
    ended.sort_unstable_by_key(|(call, _)| call.ended);
    let mut ended = ended.into_iter().peekable();
    for (call, count) in &counted.counts {
        let Some(end) = call.ended else { continue };
        while let Some(before) = ended.next_if(|(before, _)| before.ended.is_some_and(|end| end < call.invoked)) {
            highest = highest.filter(|(_, most)| *most >= before.1).or(Some(before));
        }
        let least = made.partition_point(|place| *place < call.invoked) as u64;
        let most = possible.partition_point(|place| *place < end) as u64;
        let relevant = || {
            let sent = counted.changes.values().flat_map(|change| change.sendings.iter().copied());
            let last: Vec<&Call> = sent.filter(|sent| sent.outcome != End::Fail && sent.invoked < end).collect();
            Bar::all(history, last.into_iter().rev().take(12).chain([*call]))
        };
        if *count < least {
            findings.add("lost", || {
                let what = format!("key {key} counts {count} changes, but {least} had been acknowledged");
                Finding::new("lost", what, relevant())
            });
        } else if *count > most {
            findings.add("made twice", || {
                let what = format!("key {key} counts {count} changes, but only {most} can have been made");
                Finding::new("made twice", what, relevant())
            });
        } else if let Some((before, most)) = highest.filter(|(_, most)| most > count) {
            findings.add("went back", || {
                let what = format!("key {key} counts {count} changes after it had counted {most}");
                Finding::new("went back", what, Bar::all(history, [before, *call]))
            });
        }
    }
}
