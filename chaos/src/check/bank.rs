//! Accounts between which money moves: does every read show a state between two transfers?
//!
//! - The total is what it was at first, all accounts are there and none is overdrawn.
//! - Each account holds what it held at first, changed by every transfer that was acknowledged at a revision up to that
//!   of the read, by some of those whose outcome or revision is unknown, and by no others: transfers that are lost or made
//!   twice show.
//! - A read that was to be fresh, or no staler than it asked for, shows what had been acknowledged by then: whoever read says in
//!   the answer that it does not (*stale*).
//!
//! - A transfer replaced just the balances that it had compared with: whoever made it says in the answer if it did not
//!   (*another value before*).
//!
//! A run whose reads all began before the first transfer had ended has shown nothing of transfers; nor has one whose accounts were opened
//! and whose reads carry no revision.
//!
//! Without a [`Bank::Open`] the first read tells the total and the accounts, and balances are not judged; nor are they
//! of reads without a revision.

use std::collections::{BTreeMap, HashMap};

use super::bars::{Bar, label};
use super::outcome::{Finding, Findings, Outcome};
use super::{Verdict, refusals};
use crate::history::{Action, Bank, Call, History, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "bank";
/// What is wrong about an answer: as the history says it.
pub const TOO_STALE: &str = "it lacks what was acknowledged before it may have been stale";
/// The same of a transfer.
pub const OTHER_PREVIOUS: &str = "it has replaced other balances than those that it had compared with";
/// Transfers shown with an impossible balance that had ended before it was read.
const SETTLED_SHOWN: usize = 8;

/// What transfers did to one account.
#[derive(Default)]
struct Ledger<'a> {
    changes: Vec<Change<'a>>,
    /// By revision: the sums up to there of what was taken and of what was given.
    acknowledged: Vec<(u64, i128, i128)>,
    /// The same of changes without a revision, by the place where they began.
    uncertain: Vec<(u64, i128, i128)>,
}

struct Change<'a> {
    call: &'a Call,
    amount: i64,
    /// Of an acknowledged change.
    revision: Option<u64>,
}

impl Ledger<'_> {
    fn sum_up(&mut self) {
        let known = self.changes.iter().filter_map(|change| Some((change.revision?, change.amount)));
        let unknown = self.changes.iter().filter(|change| change.revision.is_none());
        self.uncertain = sums(unknown.map(|change| (change.call.invoked as u64, change.amount)));
        self.acknowledged = sums(known);
    }

    /// The least and the most that the account may have gained up to a revision, in what a read saw.
    fn gains(&self, read: &Call, revision: u64) -> (i128, i128) {
        let (taken, given) = below(&self.acknowledged, revision + 1);
        let (may_be_taken, may_be_given) = below(&self.uncertain, read.ended.map_or(u64::MAX, |ended| ended as u64));
        (taken + given + may_be_taken, taken + given + may_be_given)
    }
}

fn sums(changes: impl Iterator<Item = (u64, i64)>) -> Vec<(u64, i128, i128)> {
    let mut changes: Vec<(u64, i64)> = changes.collect();
    changes.sort_unstable();
    let (mut taken, mut given) = (0, 0);
    let sum = |(place, amount): (u64, i64)| {
        taken += i128::from(amount.min(0));
        given += i128::from(amount.max(0));
        (place, taken, given)
    };
    changes.into_iter().map(sum).collect()
}

fn below(sums: &[(u64, i128, i128)], place: u64) -> (i128, i128) {
    let count = sums.partition_point(|(at, ..)| *at < place);
    count.checked_sub(1).map_or((0, 0), |last| (sums[last].1, sums[last].2))
}

/// Judges every read of the accounts.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    refusals::judge(history, &mut findings);
    let mut first: Option<(&Call, &BTreeMap<Key, i64>)> = None;
    let mut opened = false;
    let mut ledgers: HashMap<&Key, Ledger<'_>> = HashMap::new();
    let (mut transfers, mut reads) = (0, Vec::new());
    // Where the first transfer had ended.
    let mut moved = usize::MAX;
    for call in history.calls().iter().filter(|call| call.outcome != End::Fail) {
        match history.action(call) {
            Action::Bank(Bank::Open { balances }) => {
                first.get_or_insert((call, balances));
                opened = true;
            }
            Action::Bank(Bank::Transfer { from, to, amount }) => {
                transfers += usize::from(call.outcome == End::Ok);
                if let (End::Ok, Some(ended)) = (call.outcome, call.ended) {
                    moved = moved.min(ended);
                }
                if history.end(call).is_some_and(|end| end.error.as_deref() == Some(OTHER_PREVIOUS)) {
                    let what = format!("{} has replaced what it had not compared with", label(history.action(call)));
                    findings.add("another value before", || {
                        Finding::new("another value before", what.clone(), Bar::all(history, [call]))
                    });
                }
                let revision = history.revision(call).filter(|_| call.outcome == End::Ok);
                for (key, amount) in [(from, amount.saturating_neg()), (to, *amount)] {
                    ledgers.entry(key).or_default().changes.push(Change { call, amount, revision });
                }
            }
            Action::Bank(Bank::Read { balances: Some(balances) }) if call.outcome == End::Ok => {
                first.get_or_insert((call, balances));
                reads.push((call, balances));
            }
            _ => {}
        }
    }
    ledgers.values_mut().for_each(Ledger::sum_up);
    let otherwise = match (transfers, reads.len()) {
        (0, _) => Verdict::Unknown("no transfer succeeded".into()),
        (_, 0) => Verdict::Unknown("the accounts were never read".into()),
        _ if reads.iter().all(|(read, _)| read.invoked < moved) => {
            Verdict::Unknown("the accounts were never read after a transfer".into())
        }
        _ if opened && reads.iter().all(|(read, _)| history.revision(read).is_none()) => {
            Verdict::Unknown("no read carries a :revision, by which each account is judged".into())
        }
        _ => Verdict::Valid,
    };
    if let Some((first_call, first)) = first {
        for (call, balances) in &reads {
            if history.end(call).is_some_and(|end| end.error.as_deref() == Some(TOO_STALE)) {
                let revision = history.revision(call).unwrap_or_default();
                let what = format!("a read of revision {revision} lacks transfers that it had to show");
                findings.add("stale", || Finding::new("stale", what.clone(), Bar::all(history, [*call])));
            }
            judge_total(history, (first_call, first), (call, balances), &mut findings);
            if opened {
                judge_balances(history, first, (call, balances), &ledgers, &mut findings);
            }
        }
    }
    findings.conclude(NAME, otherwise).with("transfers", transfers).with("reads", reads.len())
}

fn total(balances: &BTreeMap<Key, i64>) -> i128 {
    balances.values().map(|balance| i128::from(*balance)).sum()
}

fn judge_total(
    history: &History,
    (first_call, first): (&Call, &BTreeMap<Key, i64>),
    (call, balances): (&Call, &BTreeMap<Key, i64>),
    findings: &mut Findings,
) {
    let mut add = |kind: &str, what: String| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, [first_call, call])));
    };
    if !first.keys().eq(balances.keys()) {
        let missing = first.keys().find(|key| !balances.contains_key(key));
        let what = match (missing, balances.keys().find(|key| !first.contains_key(key))) {
            (Some(key), _) => format!("account {key} is missing"),
            (None, Some(key)) => format!("there is an account {key} that was never made"),
            (None, None) => return,
        };
        add("other accounts", what);
        return;
    }
    let (expected, found) = (total(first), total(balances));
    if expected != found {
        add("wrong total", format!("the accounts together hold {found}, not {expected}"));
    }
    if let Some((key, balance)) = balances.iter().find(|(_, balance)| **balance < 0) {
        add("overdrawn", format!("account {key} holds {balance}"));
    }
}

fn judge_balances(
    history: &History,
    first: &BTreeMap<Key, i64>,
    (read, balances): (&Call, &BTreeMap<Key, i64>),
    ledgers: &HashMap<&Key, Ledger<'_>>,
    findings: &mut Findings,
) {
    let Some(revision) = history.revision(read) else { return };
    for (key, balance) in balances {
        let Some(at_first) = first.get(key) else { continue };
        let nothing = Ledger::default();
        let ledger = ledgers.get(key).unwrap_or(&nothing);
        let (least, most) = ledger.gains(read, revision);
        let (least, most) = (i128::from(*at_first) + least, i128::from(*at_first) + most);
        if !(least..=most).contains(&i128::from(*balance)) {
            findings.add("impossible balance", || {
                let expected = match least == most {
                    true => least.to_string(),
                    false => format!("between {least} and {most}, whichever of the transfers shown it saw"),
                };
                let what = format!("account {key} holds {balance}; with every transfer made once it is {expected}");
                // What may have gone wrong: those that the read need not have seen, and the last of the others.
                let changes = || ledger.changes.iter().filter(|change| Some(change.call.invoked) < read.ended);
                let open = changes().filter(|change| change.revision.is_none()).map(|change| change.call);
                let mut settled: Vec<(u64, &Call)> =
                    changes().filter_map(|c| Some((c.revision.filter(|r| *r <= revision)?, c.call))).collect();
                settled.sort_unstable_by_key(|(revision, _)| *revision);
                let last = settled.into_iter().rev().take(SETTLED_SHOWN).map(|(_, call)| call);
                let shown = last.chain(open).chain([read]);
                Finding::new("impossible balance", what, Bar::all(history, shown))
            });
        }
    }
}
