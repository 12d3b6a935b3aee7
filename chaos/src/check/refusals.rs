//! Refusals that should not have been: a compare that did not hold, though just what it expected is there. A client sees that by
//! what comes with the refusal, and says so in the history.

use super::bars::{Bar, label};
use super::outcome::{Finding, Findings};
use crate::history::{History, Outcome};

/// Why a change was refused: as the history says it.
pub const WRONGLY: &str = "a compare failed, and what it expected is there";

/// Adds each of them.
pub(super) fn judge(history: &History, findings: &mut Findings) {
    let is_wrong = |call: &crate::history::Call| {
        call.outcome == Outcome::Fail && history.end(call).is_some_and(|end| end.refusal.as_deref() == Some(WRONGLY))
    };
    for call in history.calls().iter().filter(|call| is_wrong(call)) {
        findings.add("refused wrongly", || {
            let what = format!(
                "{} (process {}) was refused, and what it expected is there",
                label(history.action(call)),
                call.process
            );
            Finding::new("refused wrongly", what, Bar::all(history, [call]))
        });
    }
}
