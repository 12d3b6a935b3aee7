//! What one checker found.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bars::{Bar, Edge};
use super::verdict::Verdict;

/// Findings that are kept whole; more are only counted.
pub const MAX_FINDINGS: usize = 10;

/// One proof that a promise was broken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What kind it is: `G-single`, `lost`, `stale read`.
    pub kind: String,
    /// Sentences for people, the first the most important.
    pub explanation: Vec<String>,
    /// The operations that prove it, in the order of their invocation.
    pub bars: Vec<Bar>,
    /// What orders them, where that is the proof.
    pub edges: Vec<Edge>,
}

impl Finding {
    /// A finding in one sentence, without edges.
    pub fn new(kind: &str, explanation: impl Into<String>, bars: Vec<Bar>) -> Self {
        Finding { kind: kind.to_owned(), explanation: vec![explanation.into()], bars, edges: Vec::new() }
    }
}

/// What one checker found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub checker: String,
    #[serde(flatten)]
    pub verdict: Verdict,
    /// What was counted, by name.
    pub figures: BTreeMap<String, u64>,
    /// At most [`MAX_FINDINGS`].
    pub findings: Vec<Finding>,
}

impl Outcome {
    /// An outcome without findings.
    pub fn new(checker: &str, verdict: Verdict) -> Self {
        Outcome { checker: checker.to_owned(), verdict, figures: BTreeMap::new(), findings: Vec::new() }
    }

    /// The same with a figure.
    #[must_use]
    pub fn with(mut self, name: &str, figure: usize) -> Self {
        self.figures.insert(name.to_owned(), figure as u64);
        self
    }
}

/// Collects what a checker finds, and draws the conclusion.
#[derive(Debug, Default)]
pub struct Findings {
    kept: Vec<Finding>,
    count: usize,
    kinds: BTreeMap<String, u64>,
}

impl Findings {
    /// Adds one; it is built only if there is room to keep it.
    pub fn add(&mut self, kind: &str, build: impl FnOnce() -> Finding) {
        self.count += 1;
        *self.kinds.entry(kind.to_owned()).or_default() += 1;
        // One of each kind is kept, whatever came before it.
        if self.kept.len() < MAX_FINDINGS || self.kinds[kind] == 1 {
            self.kept.push(build());
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The outcome: a violation if anything was found, else `otherwise`.
    pub fn conclude(self, checker: &str, otherwise: Verdict) -> Outcome {
        let verdict = match self.kept.first() {
            None => otherwise,
            Some(first) => Verdict::Violation(match self.count {
                1 => first.explanation[0].clone(),
                count => format!("{} (one of {count} findings)", first.explanation[0]),
            }),
        };
        let mut kept = self.kept;
        // The newest kind takes the place of one of the many of an older kind.
        while kept.len() > MAX_FINDINGS {
            let double = (1..kept.len()).rev().find(|&i| kept[..i].iter().any(|f| f.kind == kept[i].kind));
            kept.remove(double.unwrap_or(kept.len() - 1));
        }
        Outcome { findings: kept, figures: self.kinds, ..Outcome::new(checker, verdict) }
    }
}
