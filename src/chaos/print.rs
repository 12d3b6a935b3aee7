//! Verdicts and findings for the terminal.

use std::fmt::Write;

use anyhow::Result;
use lake_chaos::check::bars::End;
use lake_chaos::check::{self, Bar, Finding, Outcome};
use lake_chaos::history::Workload;
use serde_json::json;

use crate::columns::columns;

/// Findings of one checker that are printed.
const MAX_FINDINGS: usize = 3;
/// Operations of one finding that are printed.
const MAX_BARS: usize = 20;

/// How a verdict is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// Prints what was concluded. Gives the exit code.
///
/// # Errors
/// The results cannot be written as JSON.
pub fn verdict(workload: Workload, outcomes: &[Outcome], format: Format) -> Result<u8> {
    let verdict = check::verdict(outcomes);
    match format {
        Format::Text => println!("{}{verdict}", text(outcomes)),
        Format::Json => {
            let mut results = serde_json::to_value(&verdict)?;
            results["exit_code"] = json!(verdict.exit_code());
            results["workload"] = json!(workload);
            results["checks"] = serde_json::to_value(outcomes)?;
            println!("{}", serde_json::to_string_pretty(&results)?);
        }
    }
    Ok(verdict.exit_code())
}

fn text(outcomes: &[Outcome]) -> String {
    let mut rows = vec![["CHECK", "VERDICT", "FIGURES"].map(str::to_owned)];
    for outcome in outcomes {
        let figures: Vec<String> = outcome.figures.iter().map(|(name, figure)| format!("{name} {figure}")).collect();
        rows.push([outcome.checker.clone(), outcome.verdict.word().to_owned(), figures.join(", ")]);
    }
    let mut text = columns(rows);
    for outcome in outcomes {
        for finding in outcome.findings.iter().take(MAX_FINDINGS) {
            describe(&mut text, finding);
        }
        let more = outcome.findings.len().saturating_sub(MAX_FINDINGS);
        if more > 0 {
            let _ = writeln!(text, "\n... and {more} more of {}", outcome.checker);
        }
    }
    text.push('\n');
    text
}

fn describe(text: &mut String, finding: &Finding) {
    let _ = writeln!(text, "\n{}:", finding.kind);
    for sentence in &finding.explanation {
        let _ = writeln!(text, "  {sentence}");
    }
    if finding.bars.is_empty() {
        return;
    }
    let mut rows = vec![["  FROM", "TO", "PROCESS", "OPERATION", "", ""].map(str::to_owned)];
    rows.extend(finding.bars.iter().take(MAX_BARS).map(row));
    text.push_str(&columns(rows));
    let more = finding.bars.len().saturating_sub(MAX_BARS);
    if more > 0 {
        let _ = writeln!(text, "  ... and {more} more");
    }
}

fn row(bar: &Bar) -> [String; 6] {
    let outcome = match bar.outcome {
        End::Ok => "ok",
        End::Fail => "failed",
        End::Unknown => "unknown",
    };
    let mut facts: Vec<String> = Vec::new();
    facts.extend(bar.peer.map(|peer| format!("peer {peer}")));
    facts.extend(bar.revision.map(|revision| format!("revision {revision}")));
    facts.extend(bar.error.clone());
    [
        format!("  {}", bar.invoked),
        bar.ended.map_or_else(|| "...".to_owned(), |ended| ended.to_string()),
        bar.process.to_string(),
        bar.label.clone(),
        outcome.to_owned(),
        facts.join(", "),
    ]
}
