//! What the reads tell: the order in which each list grew, and what no order allows.

use std::collections::{HashMap, HashSet};

use super::super::bars::Bar;
use super::super::outcome::{Finding, Findings};
use crate::history::{Action, Append, Call, History, Key, Outcome};

/// A transaction that happened.
#[derive(Debug)]
pub(super) struct Transaction<'a> {
    pub call: &'a Call,
    /// What it appended to which key, in order.
    pub appends: Vec<(u32, i64)>,
    /// For each key that it read, once: what was there before its own appends.
    pub reads: Vec<(u32, &'a [i64])>,
}

/// All transactions that happened, and how the lists grew.
#[derive(Debug)]
pub(super) struct Observed<'a> {
    pub history: &'a History,
    pub transactions: Vec<Transaction<'a>>,
    /// By number.
    pub keys: Vec<&'a Key>,
    /// By key: the longest list that was read.
    pub orders: Vec<&'a [i64]>,
    /// Which transaction appended what.
    pub writers: HashMap<(u32, i64), usize>,
    /// How many reads were compared.
    pub reads: usize,
}

/// Everything that was appended, by whom, whether or not it happened.
type Attempts<'a> = HashMap<(u32, i64), (&'a Call, bool)>;

impl<'a> Observed<'a> {
    /// Joins reads and appends, and adds what no order of the transactions allows.
    ///
    /// # Errors
    /// Why nothing can be told from this history.
    pub fn of(history: &'a History, findings: &mut Findings) -> Result<Self, String> {
        let mut keys = Keys::default();
        let attempts = attempts(history, &mut keys)?;
        let mut observed = Observed {
            history,
            transactions: Vec::new(),
            keys: Vec::new(),
            orders: Vec::new(),
            writers: HashMap::new(),
            reads: 0,
        };
        let mut lists: Vec<Vec<(&'a Call, &'a [i64])>> = Vec::new();
        let mut unknown = Vec::new();
        for call in history.calls() {
            let Action::Append(steps) = history.action(call) else { continue };
            match call.outcome {
                Outcome::Fail => {}
                Outcome::Unknown => {
                    unknown.push(Transaction { call, appends: appends(steps, &mut keys), reads: vec![] })
                }
                Outcome::Ok => {
                    let transaction = read_through(history, call, steps, &mut keys, &mut lists, findings);
                    observed.transactions.push(transaction);
                }
            }
        }
        observed.reads = lists.iter().map(Vec::len).sum();
        lists.resize_with(keys.names.len(), Vec::new);
        observed.orders =
            lists.iter().enumerate().map(|(key, lists)| order(history, keys.names[key], lists, findings)).collect();
        let seen: HashSet<(u32, i64)> = observed
            .orders
            .iter()
            .enumerate()
            .flat_map(|(k, order)| order.iter().map(move |v| (k as u32, *v)))
            .collect();
        observed
            .transactions
            .extend(unknown.into_iter().filter(|t| t.appends.iter().any(|append| seen.contains(append))));
        observed.transactions.sort_by_key(|transaction| transaction.call.invoked);
        observed.writers = (observed.transactions.iter().enumerate())
            .flat_map(|(at, transaction)| transaction.appends.iter().map(move |append| (*append, at)))
            .collect();
        observed.keys = keys.names;
        for (key, lists) in lists.iter().enumerate() {
            observed.judge_elements(key as u32, lists, &attempts, findings);
        }
        observed.judge_halves(&attempts, findings);
        Ok(observed)
    }

    /// How many transactions succeeded for sure.
    pub fn succeeded(&self) -> usize {
        self.transactions.iter().filter(|transaction| transaction.call.outcome == Outcome::Ok).count()
    }

    fn finding(&self, kind: &str, what: String, calls: &[&Call]) -> Finding {
        Finding::new(kind, what, Bar::all(self.history, calls.iter().copied()))
    }

    /// Elements that nobody appended, that a failed transaction appended, or of which others are missing.
    fn judge_elements(
        &self,
        key: u32,
        lists: &[(&'a Call, &'a [i64])],
        attempts: &Attempts<'a>,
        findings: &mut Findings,
    ) {
        let name = self.keys[key as usize];
        // Every list is a prefix of the longest, or was reported: looking at each element once is enough.
        let mut looked_at: HashSet<i64> = HashSet::new();
        for (reader, list) in lists {
            for value in list.iter().filter(|value| looked_at.insert(**value)) {
                match attempts.get(&(key, *value)) {
                    None => findings.add("unwritten", || {
                        let what = format!("{value} was read in key {name}, and nobody appended it");
                        self.finding("unwritten", what, &[reader])
                    }),
                    Some((writer, _)) if writer.outcome == Outcome::Fail => findings.add("G1a", || {
                        let what =
                            format!("{value} was read in key {name}, but the transaction that appended it failed");
                        self.finding("G1a", what, &[writer, reader])
                    }),
                    Some(_) => {}
                }
            }
        }
    }

    /// Reads of what a transaction appended to a key before it appended more.
    fn judge_halves(&self, attempts: &Attempts<'a>, findings: &mut Findings) {
        for transaction in &self.transactions {
            for (key, list) in &transaction.reads {
                let Some(value) = list.last() else { continue };
                let Some((writer, false)) = attempts.get(&(*key, *value)) else { continue };
                findings.add("G1b", || {
                    let name = self.keys[*key as usize];
                    let what = format!(
                        "key {name} was read up to {value}, and the transaction that appended it appended more to it"
                    );
                    self.finding("G1b", what, &[writer, transaction.call])
                });
            }
        }
    }
}

/// Keys by number, in the order of their first appearance.
#[derive(Debug, Default)]
struct Keys<'a> {
    numbers: HashMap<&'a Key, u32>,
    names: Vec<&'a Key>,
}

impl<'a> Keys<'a> {
    fn number(&mut self, key: &'a Key) -> u32 {
        *self.numbers.entry(key).or_insert_with(|| {
            self.names.push(key);
            self.names.len() as u32 - 1
        })
    }
}

/// Who appended what, and whether it was the last that the transaction appended to that key.
fn attempts<'a>(history: &'a History, keys: &mut Keys<'a>) -> Result<Attempts<'a>, String> {
    let mut attempts = Attempts::new();
    for call in history.calls() {
        let Action::Append(steps) = history.action(call) else { continue };
        let appends = appends(steps, keys);
        for (i, (key, value)) in appends.iter().enumerate() {
            let last = appends[i + 1..].iter().all(|(other, _)| other != key);
            if attempts.insert((*key, *value), (call, last)).is_some() {
                return Err(format!(
                    "{value} is appended twice to key {}: values must be unique, or nothing can be told from reads",
                    keys.names[*key as usize]
                ));
            }
        }
    }
    Ok(attempts)
}

fn appends<'a>(steps: &'a [Append], keys: &mut Keys<'a>) -> Vec<(u32, i64)> {
    let append = |step: &'a Append| match step {
        Append::Append { key, value } => Some((keys.number(key), *value)),
        Append::Read { .. } => None,
    };
    steps.iter().filter_map(append).collect()
}

/// Follows a transaction step by step: its reads must agree with each other and with its own appends.
fn read_through<'a>(
    history: &'a History,
    call: &'a Call,
    steps: &'a [Append],
    keys: &mut Keys<'a>,
    lists: &mut Vec<Vec<(&'a Call, &'a [i64])>>,
    findings: &mut Findings,
) -> Transaction<'a> {
    let mut transaction = Transaction { call, appends: Vec::new(), reads: Vec::new() };
    for step in steps {
        let (key, list) = match step {
            Append::Append { key, value } => {
                transaction.appends.push((keys.number(key), *value));
                continue;
            }
            Append::Read { list: None, .. } => continue,
            Append::Read { key, list: Some(list) } => (keys.number(key), list.as_slice()),
        };
        let own: Vec<i64> = transaction.appends.iter().filter(|(k, _)| *k == key).map(|(_, value)| *value).collect();
        let before = transaction.reads.iter().find(|(k, _)| *k == key).map(|(_, list)| *list);
        match list.strip_suffix(own.as_slice()) {
            Some(external) if before.is_none_or(|before| before == external) => {
                if before.is_none() {
                    transaction.reads.push((key, external));
                }
                lists.resize_with(lists.len().max(key as usize + 1), Vec::new);
                lists[key as usize].push((call, list));
            }
            _ => findings.add("internal", || {
                let name = keys.names[key as usize];
                let what = format!("a transaction read key {name}, and not what it had read or appended itself before");
                Finding::new("internal", what, vec![Bar::of(history, call)])
            }),
        }
    }
    transaction
}

/// The order in which a list grew: the longest that was read. The others must be its beginnings.
fn order<'a>(history: &History, key: &Key, lists: &[(&'a Call, &'a [i64])], findings: &mut Findings) -> &'a [i64] {
    let Some((longest_call, longest)) = lists.iter().max_by_key(|(_, list)| list.len()) else { return &[] };
    for (call, _) in lists.iter().filter(|(_, list)| !longest.starts_with(list)) {
        findings.add("incompatible order", || {
            let what = format!("key {key} was read as two lists of which neither is the beginning of the other");
            Finding::new("incompatible order", what, Bar::all(history, [*longest_call, *call]))
        });
    }
    let mut once = HashSet::new();
    if let Some(value) = longest.iter().find(|value| !once.insert(**value)) {
        findings.add("appended twice", || {
            let what = format!("key {key} was read with {value} in it twice, and it was appended once");
            Finding::new("appended twice", what, vec![Bar::of(history, longest_call)])
        });
    }
    longest
}
