//! Answers that no state can have given: a row that nobody wrote, or fewer changes than were asked for. Their client says so in the history,
//! by the `:error` of what succeeded.

use super::bars::{Bar, label};
use super::outcome::{Finding, Findings};
use crate::history::{Action, History, Outcome};

/// Rows that cannot be there, in results.
pub(super) const IMPOSSIBLE: &str = "impossible";

/// Adds each of them. `kind_of`: what kind it is, by what was asked for; `None`: it is for others to judge.
pub(super) fn judge(history: &History, kind_of: impl Fn(&Action) -> Option<&'static str>, findings: &mut Findings) {
    for call in history.calls().iter().filter(|call| call.outcome == Outcome::Ok) {
        let Some(error) = history.end(call).and_then(|end| end.error.as_deref()) else { continue };
        let Some(kind) = kind_of(history.action(call)) else { continue };
        findings.add(kind, || {
            let what = format!("{} (process {}) was answered, and {error}", label(history.action(call)), call.process);
            Finding::new(kind, what, Bar::all(history, [call]))
        });
    }
}
