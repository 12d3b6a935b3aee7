//! Accounts in several tables, between which money moves in transactions of SQL: does every read show a state between two of
//! them?
//!
//! - Each read, at any query node and however old its versions are, has all accounts, none overdrawn, and the total that they
//!   began with, each once (*total*, *accounts*, *overdrawn*, *impossible*): a transaction shows in all of its tables or in none.
//! - What a read shows of an account is what it began with, and every transfer that the read has to show, some of those that it
//!   may show, and no others (*balance*): lost, repeated and refused transfers show. It has to show those that are as old as
//!   [`super::table`] says of rows.
//! - The versions that reads show are of one line: of two reads neither is older in one table and newer in another (*crossed*);
//!   with the same versions they show the same (*other balances*); and what one node shows does not go back (*node went back*).
//!
//! Where no read had to show a transfer, or none tells its versions, the verdict is unknown.
//!
//! Cost: reads times transfers.

use std::collections::BTreeMap;

use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use super::table::FRESH_NS;
use super::{Verdict, answers};
use crate::history::{Accounts, Action, Call, History, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "accounts";
/// Transfers shown with an impossible balance.
const SHOWN: usize = 8;

/// Balances of accounts, or versions of tables.
type Numbers = BTreeMap<Key, i64>;

/// A read that succeeded.
struct Read<'a> {
    call: &'a Call,
    balances: &'a Numbers,
    versions: Option<&'a Numbers>,
    node: Option<u64>,
    /// What was acknowledged so long before it must be in it.
    fresh_ns: u64,
}

impl Read<'_> {
    fn ended(&self) -> usize {
        self.call.ended.unwrap_or(usize::MAX)
    }
}

/// A transfer that did not fail.
struct Transfer<'a> {
    call: &'a Call,
    from: &'a Key,
    to: &'a Key,
    amount: i64,
}

impl Transfer<'_> {
    /// What it adds to an account.
    fn gives(&self, key: &Key) -> i128 {
        let amount = i128::from(self.amount);
        i128::from(self.to == key) * amount - i128::from(self.from == key) * amount
    }
}

/// Judges all reads of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let kind_of = |action: &Action| matches!(action, Action::Accounts(_)).then_some(answers::IMPOSSIBLE);
    answers::judge(history, kind_of, &mut findings);
    let mut opened: Option<&Numbers> = None;
    let mut transfers: Vec<Transfer<'_>> = Vec::new();
    let mut reads: Vec<Read<'_>> = Vec::new();
    for call in history.calls() {
        let Action::Accounts(action) = history.action(call) else { continue };
        match action {
            Accounts::Open { balances } if call.outcome == End::Ok => opened = opened.or(Some(balances)),
            Accounts::Move { from, to, amount } if call.outcome != End::Fail => {
                transfers.push(Transfer { call, from, to, amount: *amount });
            }
            Accounts::Read { balances: Some(balances), versions, stale_ms } if call.outcome == End::Ok => {
                // The age is told in whole milliseconds.
                let stale_ns = stale_ms.map_or(0, |ms| ms.saturating_add(1).saturating_mul(1_000_000));
                reads.push(Read {
                    call,
                    balances,
                    versions: versions.as_ref(),
                    node: history.end(call).and_then(|end| end.peer),
                    fresh_ns: FRESH_NS.max(stale_ns),
                });
            }
            _ => {}
        }
    }
    if let Some(opened) = opened {
        for read in &reads {
            judge(history, opened, &transfers, read, &mut findings);
        }
    }
    order(history, &reads, &mut findings);
    let moved = transfers.iter().filter(|transfer| transfer.call.outcome == End::Ok).count();
    let is_telling = |read: &Read<'_>| transfers.iter().any(|transfer| must_show(history, read, transfer));
    let otherwise = match (opened, moved, reads.len()) {
        (None, ..) => Verdict::Unknown("what the accounts began with is not told".into()),
        (_, 0, _) => Verdict::Unknown("no transfer succeeded".into()),
        (_, _, 0) => Verdict::Unknown("the accounts were never read".into()),
        _ if !reads.iter().any(is_telling) => {
            Verdict::Unknown("the accounts were never read after a transfer that they had to show".into())
        }
        _ if reads.iter().all(|read| read.versions.is_none_or(Numbers::is_empty)) => {
            Verdict::Unknown("no read tells which versions it is of".into())
        }
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("transfers", moved)
        .with("unknown transfers", transfers.len() - moved)
        .with("reads", reads.len())
}

/// One read by itself.
fn judge(history: &History, opened: &Numbers, transfers: &[Transfer<'_>], read: &Read<'_>, findings: &mut Findings) {
    let mut add = |kind: &str, what: String, calls: &[&Call]| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, calls.iter().copied())));
    };
    if !opened.keys().eq(read.balances.keys()) {
        add("accounts", "a read does not have just the accounts that there are".into(), &[read.call]);
        return;
    }
    let total = |balances: &Numbers| balances.values().map(|balance| i128::from(*balance)).sum::<i128>();
    let (was, is) = (total(opened), total(read.balances));
    if was != is {
        add("total", format!("the accounts together hold {is}, and began with {was}"), &[read.call]);
    }
    let may_show = transfers.iter().filter(|transfer| transfer.call.invoked < read.ended());
    let (must, may): (Vec<&Transfer<'_>>, Vec<&Transfer<'_>>) =
        may_show.partition(|transfer| must_show(history, read, transfer));
    for (key, balance) in read.balances {
        if *balance < 0 {
            add("overdrawn", format!("account {key} holds {balance}"), &[read.call]);
        }
        let sure = i128::from(opened[key]) + must.iter().map(|transfer| transfer.gives(key)).sum::<i128>();
        let least = sure + may.iter().map(|transfer| transfer.gives(key).min(0)).sum::<i128>();
        let most = sure + may.iter().map(|transfer| transfer.gives(key).max(0)).sum::<i128>();
        if !(least..=most).contains(&i128::from(*balance)) {
            let of_it = must.iter().chain(&may).rev().filter(|transfer| transfer.gives(key) != 0).take(SHOWN);
            let calls: Vec<&Call> = of_it.map(|transfer| transfer.call).chain([read.call]).collect();
            let what = format!("account {key} is read as {balance}, and can hold {least} to {most} only");
            add("balance", what, &calls);
        }
    }
}

/// Whether a read has to show a transfer: its own node acknowledged it before, or another one long enough before.
fn must_show(history: &History, read: &Read<'_>, transfer: &Transfer<'_>) -> bool {
    let Some(end) = history.end(transfer.call).filter(|_| transfer.call.outcome == End::Ok) else { return false };
    let is_before = transfer.call.ended.is_some_and(|ended| ended < read.call.invoked);
    let is_own = end.peer.is_some() && end.peer == read.node;
    let began_ns = history.invocation(read.call).time_ns;
    is_before && (is_own || end.time_ns.saturating_add(read.fresh_ns) <= began_ns)
}

/// A read with its versions, and how many changes all of them together have had: in a line that rises with it.
#[derive(Clone, Copy)]
struct Placed<'a> {
    read: &'a Read<'a>,
    versions: &'a Numbers,
    changes: i64,
}

/// Reads beside each other, by the versions that they show.
fn order(history: &History, reads: &[Read<'_>], findings: &mut Findings) {
    let placed = reads.iter().filter_map(|read| {
        let versions = read.versions?;
        Some(Placed { read, versions, changes: versions.values().sum() })
    });
    let mut line: Vec<Placed<'_>> = placed.collect();
    let mut by_end = line.clone();
    by_end.sort_by_key(|placed| placed.read.ended());
    let mut add = |kind: &str, what: String, one: &Read<'_>, other: &Read<'_>| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, [one.call, other.call])));
    };
    let mut ended = by_end.into_iter().peekable();
    let mut newest: BTreeMap<u64, Placed<'_>> = BTreeMap::new();
    // They are by invocation.
    for placed in &line {
        while let Some(before) = ended.next_if(|before| before.read.ended() < placed.read.call.invoked) {
            let Some(node) = before.read.node else { continue };
            let known = newest.entry(node).or_insert(before);
            if before.changes > known.changes {
                *known = before;
            }
        }
        let before = placed.read.node.and_then(|node| newest.get(&node));
        if let Some(before) = before.filter(|before| before.changes > placed.changes) {
            add("node went back", "a query node showed older versions than before".into(), before.read, placed.read);
        }
    }
    line.sort_by_key(|placed| (placed.changes, placed.read.call.invoked));
    for pair in line.windows(2) {
        let (one, other) = (pair[0], pair[1]);
        let is_ahead = |(table, version): (&Key, &i64)| other.versions.get(table).is_some_and(|newer| version > newer);
        if one.versions.iter().any(is_ahead) {
            let what = "of two reads each shows a newer version of some table".into();
            add("crossed", what, one.read, other.read);
        } else if one.versions == other.versions && one.read.balances != other.read.balances {
            let what = "two reads of the same versions show other balances".into();
            add("other balances", what, one.read, other.read);
        }
    }
}
