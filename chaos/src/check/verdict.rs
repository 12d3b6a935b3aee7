//! The three verdicts, and the exit codes that stand for them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The exit code when the run itself went wrong, so that there is nothing to judge.
pub const HARNESS_ERROR: u8 = 3;

/// What a checker concludes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "verdict", content = "reason")]
pub enum Verdict {
    /// There was something to judge, and all of it held.
    Valid,
    /// Neither is shown; with the reason. Never to be taken for valid.
    Unknown(String),
    /// The promise was broken; with the short of it.
    Violation(String),
}

impl Verdict {
    /// The exit code of a run that ends with this verdict.
    pub fn exit_code(&self) -> u8 {
        match self {
            Verdict::Valid => 0,
            Verdict::Violation(_) => 1,
            Verdict::Unknown(_) => 2,
        }
    }

    /// One word.
    pub fn word(&self) -> &'static str {
        match self {
            Verdict::Valid => "valid",
            Verdict::Unknown(_) => "unknown",
            Verdict::Violation(_) => "violation",
        }
    }

    /// Why it is not valid.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Verdict::Valid => None,
            Verdict::Unknown(reason) | Verdict::Violation(reason) => Some(reason),
        }
    }

    /// The worse of two: a violation is worse than unknown, which is worse than valid; the first of equals.
    #[must_use]
    pub fn worse(self, other: Verdict) -> Verdict {
        let severity = |verdict: &Verdict| match verdict {
            Verdict::Valid => 0,
            Verdict::Unknown(_) => 1,
            Verdict::Violation(_) => 2,
        };
        if severity(&other) > severity(&self) { other } else { self }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            None => f.write_str(self.word()),
            Some(reason) => write!(f, "{}: {reason}", self.word()),
        }
    }
}
