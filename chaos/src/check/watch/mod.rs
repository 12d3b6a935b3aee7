//! Watches: does every watcher see every change, in order, once, each transaction whole?
//!
//! The truth is what writers and watchers together know: at which revision what was changed ([`truth`]). A watcher's
//! stretches then are compared with it: from where it opened or listed, over every delivery and mark of progress, none
//! of the revisions in between may be left out, and each delivery lies beyond the one before it. A stretch that ends
//! before the last change says nothing about the rest: if a watcher never gets there, the verdict is not valid.
//!
//! At the end a watcher's own copy, built from what it was given, must equal what is read there.

mod truth;

use std::collections::BTreeMap;

use self::truth::{Changes, Truth};
use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, History, Key, Outcome as End, Watch};

/// Its name in results.
pub const NAME: &str = "watches";
/// Missing changes of one gap that are reported one by one.
const MAX_MISSING_SHOWN: usize = 3;

/// One watcher, as far as it was followed.
#[derive(Default)]
struct Watcher<'a> {
    /// Everything up to this revision was given to it or lies before its beginning.
    position: Option<u64>,
    last: Option<&'a Call>,
    /// Its copy at the revision of the last read of everything; `None` if its beginning is not known.
    copy: Option<BTreeMap<&'a Key, i64>>,
    deliveries: usize,
    resumes: usize,
}

/// What everything was compared with at the end.
struct Last<'a> {
    call: &'a Call,
    revision: u64,
    entries: &'a BTreeMap<Key, i64>,
}

/// Judges all watchers of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let truth = Truth::of(history, &mut findings);
    let last = last(history);
    // Also those that never came to anything.
    let mut watchers: BTreeMap<u64, Watcher<'_>> =
        history.calls().iter().filter_map(|call| Some((watcher(history.action(call))?, Watcher::default()))).collect();
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let Action::Watch(action) = history.action(call) else { continue };
        let copied_up_to = last.as_ref().map_or(u64::MAX, |last| last.revision);
        let follow = Follow { history, truth: &truth, copied_up_to, call };
        let revision = history.revision(call);
        match (action, revision) {
            (Watch::Open { watcher, after }, _) => follow.open(*after, watchers.entry(*watcher).or_default()),
            (Watch::Next { watcher, changes }, Some(revision)) => {
                let state = watchers.entry(*watcher).or_default();
                follow.next(*watcher, changes.as_ref(), revision, state, &mut findings);
            }
            (Watch::List { watcher, entries: Some(entries) }, Some(revision)) => {
                follow.list(entries, revision, watchers.entry(*watcher).or_default());
            }
            _ => {}
        }
    }
    let end = truth.last_revision().max(last.as_ref().map(|last| last.revision));
    let mut behind = None;
    for (number, watcher) in &watchers {
        if watcher.position < end {
            behind.get_or_insert((*number, watcher.position.unwrap_or(0)));
        } else if let Some(last) = &last {
            compare(history, *number, watcher, last, &mut findings);
        }
    }
    let deliveries: usize = watchers.values().map(|watcher| watcher.deliveries).sum();
    let otherwise = match (truth.acknowledged, deliveries, behind) {
        _ if truth.without_revision > 0 => Verdict::Unknown(format!(
            "{} answers carry no :revision, by which watches are judged",
            truth.without_revision
        )),
        (0, ..) => Verdict::Unknown("no change succeeded".into()),
        (_, 0, _) => Verdict::Unknown("nothing was delivered to any watcher".into()),
        (_, _, Some((watcher, position))) => Verdict::Unknown(format!(
            "watcher {watcher} was last heard of at revision {position}, and the last change came at {}",
            end.unwrap_or(0)
        )),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("changes", truth.acknowledged)
        .with("watchers", watchers.len())
        .with("deliveries", deliveries)
        .with("resumes", watchers.values().map(|watcher| watcher.resumes).sum())
}

/// Whose action it is, if a watcher's.
fn watcher(action: &Action) -> Option<u64> {
    match action {
        Action::Watch(Watch::Open { watcher, .. } | Watch::Next { watcher, .. } | Watch::List { watcher, .. }) => {
            Some(*watcher)
        }
        _ => None,
    }
}

/// The last read of everything.
fn last(history: &History) -> Option<Last<'_>> {
    history.calls().iter().rev().filter(|call| call.outcome == End::Ok).find_map(|call| match history.action(call) {
        Action::Watch(Watch::Final { entries: Some(entries) }) => {
            Some(Last { call, revision: history.revision(call)?, entries })
        }
        _ => None,
    })
}

/// One event of one watcher.
struct Follow<'a, 'b> {
    history: &'a History,
    truth: &'b Truth<'a>,
    copied_up_to: u64,
    call: &'a Call,
}

impl<'a> Follow<'a, '_> {
    fn open(&self, after: u64, watcher: &mut Watcher<'a>) {
        match watcher.position {
            // Nothing was there, if nobody had begun to change anything.
            None => watcher.copy = (self.truth.first_invoked >= self.call.invoked).then(BTreeMap::new),
            Some(position) => {
                watcher.resumes += 1;
                watcher.copy = watcher.copy.take().filter(|_| after <= position);
            }
        }
        watcher.position = Some(after);
        watcher.last = Some(self.call);
    }

    fn list(&self, entries: &'a BTreeMap<Key, i64>, revision: u64, watcher: &mut Watcher<'a>) {
        watcher.position = Some(revision);
        watcher.last = Some(self.call);
        watcher.copy = Some(entries.iter().map(|(key, value)| (key, *value)).collect());
    }

    fn next(
        &self,
        number: u64,
        changes: Option<&'a Changes>,
        revision: u64,
        watcher: &mut Watcher<'a>,
        findings: &mut Findings,
    ) {
        let Some(position) = watcher.position else {
            findings.add("never opened", || {
                let what = format!("watcher {number} was given something before it had opened or listed");
                Finding::new("never opened", what, vec![Bar::of(self.history, self.call)])
            });
            return;
        };
        let is_mark = changes.is_none_or(BTreeMap::is_empty);
        watcher.deliveries += usize::from(!is_mark);
        let bars =
            |more: Option<&Call>| Bar::all(self.history, watcher.last.into_iter().chain(more).chain([self.call]));
        if revision < position || (revision == position && !is_mark) {
            findings.add("out of order or twice", || {
                let what = format!("watcher {number} was given revision {revision} after it had got to {position}");
                Finding::new("out of order or twice", what, bars(None))
            });
            return;
        }
        // A delivery at a revision stands for it; a mark of progress must have been preceded by it.
        let missing = self.truth.between(position, if is_mark { revision + 1 } else { revision });
        for (at, call) in missing.take(MAX_MISSING_SHOWN) {
            findings.add("missing", || {
                let what = format!(
                    "watcher {number} was never given the change at revision {at}: it went from {position} to {revision}"
                );
                Finding::new("missing", what, bars(Some(call)))
            });
        }
        watcher.position = Some(revision);
        watcher.last = Some(self.call);
        if let Some(copy) = watcher.copy.as_mut().filter(|_| revision <= self.copied_up_to) {
            for (key, value) in changes.into_iter().flatten() {
                match value {
                    Some(value) => copy.insert(key, *value),
                    None => copy.remove(key),
                };
            }
        }
    }
}

fn compare(history: &History, number: u64, watcher: &Watcher<'_>, last: &Last<'_>, findings: &mut Findings) {
    let Some(copy) = &watcher.copy else { return };
    let shown = |value: Option<&i64>| value.map_or_else(|| "nothing".to_owned(), i64::to_string);
    let differs = copy.keys().copied().chain(last.entries.keys()).find(|key| copy.get(key) != last.entries.get(key));
    if let Some(key) = differs {
        findings.add("another final state", || {
            let what = format!(
                "watcher {number} holds {} under key {key} in the end, and {} is there",
                shown(copy.get(key)),
                shown(last.entries.get(key))
            );
            Finding::new("another final state", what, Bar::all(history, watcher.last.into_iter().chain([last.call])))
        });
    }
}
