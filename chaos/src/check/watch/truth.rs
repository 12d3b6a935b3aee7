//! At which revision what was changed, by the answers to writers and by what watchers were given.

use std::collections::{BTreeMap, HashMap};

use super::super::bars::Bar;
use super::super::outcome::{Finding, Findings};
use crate::history::{Action, Call, History, Key, Outcome, Watch};

/// What one transaction changed.
pub(super) type Changes = BTreeMap<Key, Option<i64>>;

/// All changes that are known to have happened.
pub(super) struct Truth<'a> {
    /// By revision: what was changed, and the call that shows it.
    changes: BTreeMap<u64, (&'a Changes, &'a Call)>,
    /// How many writers were told so.
    pub acknowledged: usize,
    /// Answers that should carry a revision and do not.
    pub without_revision: usize,
    /// Where the first change began.
    pub first_invoked: usize,
}

/// What writers asked for.
#[derive(Default)]
struct Attempts<'a> {
    by_value: HashMap<(&'a Key, i64), &'a Call>,
    /// Those that only delete.
    deletes: Vec<&'a Call>,
    /// By the place of its invocation: where one of unknown outcome turned out to have happened.
    found_at: HashMap<usize, u64>,
}

impl<'a> Truth<'a> {
    /// Joins what writers and watchers know, and adds what contradicts itself.
    pub fn of(history: &'a History, findings: &mut Findings) -> Truth<'a> {
        let mut truth =
            Truth { changes: BTreeMap::new(), acknowledged: 0, without_revision: 0, first_invoked: usize::MAX };
        let mut attempts = Attempts::default();
        for call in history.calls() {
            let Action::Watch(Watch::Change { changes }) = history.action(call) else { continue };
            truth.first_invoked = truth.first_invoked.min(call.invoked);
            attempts.add(call, changes);
            if call.outcome == Outcome::Ok {
                truth.acknowledge(history, call, changes, findings);
            }
        }
        for call in history.calls().iter().filter(|call| call.outcome == Outcome::Ok) {
            let revision = history.revision(call);
            match (history.action(call), revision) {
                (Action::Watch(Watch::Next { changes: Some(changes), .. }), Some(revision)) if !changes.is_empty() => {
                    truth.deliver(history, &mut attempts, call, changes, revision, findings);
                }
                (Action::Watch(Watch::Next { .. } | Watch::List { .. } | Watch::Final { .. }), None) => {
                    truth.without_revision += 1;
                }
                _ => {}
            }
        }
        truth
    }

    /// The changes after one revision and before another, with a call that shows each.
    pub fn between(&self, after: u64, before: u64) -> impl Iterator<Item = (u64, &'a Call)> {
        let range = (after < before).then(|| self.changes.range(after + 1..before));
        range.into_iter().flatten().map(|(revision, (_, call))| (*revision, *call))
    }

    /// The revision of the last change.
    pub fn last_revision(&self) -> Option<u64> {
        self.changes.keys().next_back().copied()
    }

    fn acknowledge(&mut self, history: &History, call: &'a Call, changes: &'a Changes, findings: &mut Findings) {
        self.acknowledged += 1;
        let Some(revision) = history.revision(call) else {
            self.without_revision += 1;
            return;
        };
        if let Some((_, other)) = self.changes.insert(revision, (changes, call)) {
            findings.add("one revision for two", || {
                let what = format!("two changes were answered with revision {revision}");
                Finding::new("one revision for two", what, Bar::all(history, [other, call]))
            });
        }
    }

    /// A delivery must be what was asked for, whole, and the same for every watcher.
    fn deliver(
        &mut self,
        history: &'a History,
        attempts: &mut Attempts<'a>,
        call: &'a Call,
        changes: &'a Changes,
        revision: u64,
        findings: &mut Findings,
    ) {
        let mut add = |kind: &str, what: String, other: Option<&Call>| {
            findings.add(kind, || Finding::new(kind, what, Bar::all(history, other.into_iter().chain([call]))));
        };
        if let Some((known, shown_by)) = self.changes.get(&revision) {
            if *known != changes {
                let what = format!("what was delivered for revision {revision} is not what was changed there");
                add("torn or changed", what, Some(shown_by));
            }
            return;
        }
        let Some(attempt) = attempts.of(history, changes) else {
            add("unexpected", format!("revision {revision} was delivered with changes that nobody made"), None);
            return;
        };
        let asked = history.action(attempt);
        match attempt.outcome {
            _ if !matches!(asked, Action::Watch(Watch::Change { changes: asked }) if asked == changes) => {
                let what = format!("revision {revision} was delivered with only a part of its transaction, or more");
                add("torn or changed", what, Some(attempt));
            }
            Outcome::Fail => {
                add("unexpected", format!("revision {revision} was delivered, but the change failed"), Some(attempt));
            }
            Outcome::Ok => {
                let answered = history.revision(attempt).unwrap_or(0);
                let what = format!("a change was delivered for revision {revision} and answered with {answered}");
                add("another revision", what, Some(attempt));
            }
            Outcome::Unknown if changes.values().any(Option::is_some) => {
                let found = *attempts.found_at.entry(attempt.invoked).or_insert(revision);
                if found != revision {
                    let what = format!("one change was delivered for revision {found} and for {revision}");
                    add("another revision", what, Some(attempt));
                }
            }
            Outcome::Unknown => {}
        }
        self.changes.insert(revision, (changes, call));
    }
}

impl<'a> Attempts<'a> {
    fn add(&mut self, call: &'a Call, changes: &'a Changes) {
        let values = changes.iter().filter_map(|(key, value)| Some((key, (*value)?)));
        let before = self.by_value.len();
        self.by_value.extend(values.map(|value| (value, call)));
        if self.by_value.len() == before {
            self.deletes.push(call);
        }
    }

    /// Who asked for these changes, or for some of them.
    fn of(&self, history: &History, changes: &Changes) -> Option<&'a Call> {
        let by_value = |(key, value): (&Key, &Option<i64>)| self.by_value.get(&(key, (*value)?)).copied();
        let same = |call: &&&Call| matches!(history.action(call), Action::Watch(Watch::Change { changes: asked }) if asked == changes);
        changes.iter().find_map(by_value).or_else(|| {
            let unknown = self.deletes.iter().filter(|call| call.outcome == Outcome::Unknown);
            unknown.chain(&self.deletes).find(same).copied()
        })
    }
}
