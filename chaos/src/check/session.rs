//! What a session may rely on when it reads from any peer: its own writes, and never to go back in time.
//!
//! Judged by revisions, which order all changes of a key. Per session and key, a read must show a change at least as
//! new as
//! - the newest that the session wrote before the read began (*own write not read*), and
//! - the newest that it read before (*went back*).
//!
//! And a value that two answers show at one revision is the same value. Where no session ever read a key of which it knew
//! anything, nothing was shown.

use std::collections::HashMap;

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, History, Key, Outcome as End, Session};

/// Its name in results.
pub const NAME: &str = "sessions";

/// A change that a session must not forget, and the call by which it knows it.
#[derive(Clone, Copy)]
struct Known<'a> {
    call: &'a Call,
    revision: u64,
    by_writing: bool,
}

/// Judges all reads of all sessions.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let mut known: HashMap<(u64, &Key), Vec<Known<'_>>> = HashMap::new();
    let mut values: HashMap<(&Key, u64), (i64, &Call)> = HashMap::new();
    let (mut writes, mut reads, mut without_revision) = (0, 0, 0);
    // Reads of what the session had written or read before.
    let mut telling = 0;
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let Action::Session(action) = history.action(call) else { continue };
        let (session, key, value, by_writing) = match action {
            Session::Write { session, key, value } => (*session, key, Some(*value), true),
            Session::Read { session, key, value } => (*session, key, *value, false),
        };
        let revision = match (value, history.revision(call)) {
            (Some(_), None) => {
                without_revision += 1;
                continue;
            }
            (Some(_), Some(revision)) => revision,
            (None, _) => 0,
        };
        let before = known.entry((session, key)).or_default();
        // A session may have several calls in flight: what counts is what had ended.
        let newest = before.iter().filter(|k| k.call.ended.is_some_and(|ended| ended < call.invoked));
        let newest = newest.max_by_key(|k| (k.revision, k.by_writing)).copied();
        if by_writing {
            writes += 1;
        } else {
            reads += 1;
            telling += usize::from(newest.is_some_and(|newest| newest.revision > 0));
            if let Some(newest) = newest.filter(|newest| newest.revision > revision) {
                let kind = if newest.by_writing { "own write not read" } else { "went back" };
                findings.add(kind, || {
                    let saw = match value {
                        Some(_) => format!("revision {revision}"),
                        None => "nothing".into(),
                    };
                    let did = if newest.by_writing { "written" } else { "read" };
                    let what = format!(
                        "session {session} read {saw} of key {key} after it had {did} revision {}",
                        newest.revision
                    );
                    Finding::new(kind, what, Bar::all(history, [newest.call, call]))
                });
            }
        }
        // Whatever begins later has that one to look back to, and not yet what is in flight.
        before.retain(|k| newest.is_none_or(|newest| k.revision >= newest.revision));
        before.push(Known { call, revision, by_writing });
        if let Some(value) = value {
            let (other, shown_by) = *values.entry((key, revision)).or_insert((value, call));
            if other != value {
                findings.add("two values at one revision", || {
                    let what = format!("key {key} was {other} and {value} at revision {revision}");
                    Finding::new("two values at one revision", what, Bar::all(history, [shown_by, call]))
                });
            }
        }
    }
    let otherwise = match (writes, reads) {
        _ if without_revision > 0 => {
            Verdict::Unknown(format!("{without_revision} answers carry no :revision, by which sessions are judged"))
        }
        (0, _) => Verdict::Unknown("no session wrote anything".into()),
        (_, 0) => Verdict::Unknown("no session read anything".into()),
        _ if telling == 0 => Verdict::Unknown("no session read a key that it had written or read before".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("writes", writes)
        .with("reads", reads)
        .with("reads of what was known", telling)
}
