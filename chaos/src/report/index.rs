//! `index.html`: the runs of a matrix on one page, which links each run's own.

use std::fmt::Write;
use std::path::Path;

use super::attacks::Came;
use super::results::Results;
use super::svg::Escaped;
use super::{Error, page};
use crate::check::HARNESS_ERROR;

/// Its name in a matrix's directory.
pub const FILE_NAME: &str = "index.html";

const STYLE: &str = include_str!("page.css");

/// One run of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub workload: String,
    /// The faults that were asked for.
    pub nemeses: String,
    /// The run's directory, below the matrix's; plain letters, digits and hyphens.
    pub directory: String,
    /// What the run has printed, beside its directory.
    pub log: String,
    pub seconds: u64,
    /// What came of it, or why there is nothing to judge.
    pub came: Result<Box<Results>, String>,
}

impl Entry {
    /// What the run ended with, as [`crate::check::Verdict::exit_code`] has it.
    pub fn exit_code(&self) -> u8 {
        self.came.as_ref().map_or(HARNESS_ERROR, |results| results.verdict.exit_code())
    }

    /// `valid`, `violation`, `unknown`, or `error` where nothing was judged.
    pub fn word(&self) -> &'static str {
        self.came.as_ref().map_or("error", |results| results.verdict.word())
    }

    /// Why it is not valid.
    pub fn reason(&self) -> Option<&str> {
        self.came.as_ref().map_or_else(|why| Some(why.as_str()), |results| results.verdict.reason())
    }

    /// Operations that succeeded, and all that were begun.
    pub fn operations(&self) -> (u64, u64) {
        let counts = self.came.iter().flat_map(|results| results.operations.values());
        counts.fold((0, 0), |(ok, all), n| (ok + n.ok, all + n.ok + n.refused + n.failed + n.unknown))
    }

    /// Faults that took effect, and those that did not.
    pub fn faults(&self) -> (usize, usize) {
        let faults = || self.came.iter().flat_map(|results| &results.faults);
        let installed = faults().filter(|fault| fault.came == Came::Installed).count();
        (installed, faults().count() - installed)
    }
}

/// What a matrix ends with: its worst run. A proof that a promise was broken is worse than a run that could not be judged, and that is
/// worse than one that has shown too little.
pub fn exit_code(codes: impl IntoIterator<Item = u8>) -> u8 {
    let severity = |code: &u8| match *code {
        0 => 0,
        2 => 1,
        1 => 3,
        _ => 2,
    };
    codes.into_iter().max_by_key(severity).unwrap_or(HARNESS_ERROR)
}

/// Writes the page of a matrix into its directory.
///
/// # Errors
/// It cannot be written.
pub fn write(dir: &Path, about: &str, entries: &[Entry], left_out: &[(String, String)]) -> Result<(), Error> {
    super::put(&dir.join(FILE_NAME), page_of(about, entries, left_out).as_bytes())
}

/// The whole page. `about`: what was asked for; `left_out`: what was not run, and why.
fn page_of(about: &str, entries: &[Entry], left_out: &[(String, String)]) -> String {
    let code = exit_code(entries.iter().map(Entry::exit_code));
    let word = match code {
        0 => "valid",
        1 => "violation",
        2 => "unknown",
        _ => "error",
    };
    let valid = entries.iter().filter(|entry| entry.exit_code() == 0).count();
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>lake chaos matrix: {word}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>lake chaos matrix</h1>\n\
         <div class=\"verdict {word}\"><b>{word}</b> {valid} of {} runs valid</div>\n<p class=\"faint\">{}</p>\n",
        entries.len(),
        Escaped(about)
    );
    let header =
        ["workload", "nemesis", "verdict", "why", "operations ok", "of", "faults in effect", "not", "seconds", ""];
    let header: String = header.iter().map(|name| format!("<th>{name}</th>")).collect();
    let _ = writeln!(html, "<table>\n<tr>{header}</tr>");
    for entry in entries {
        let ((ok, all), (installed, skipped)) = (entry.operations(), entry.faults());
        let report = match &entry.came {
            Ok(_) => format!("<a href=\"{}/{}\">report</a> ", entry.directory, page::FILE_NAME),
            Err(_) => String::new(),
        };
        let _ = writeln!(
            html,
            "<tr><td>{}</td><td>{}</td><td class=\"{2}\">{2}</td><td>{3}</td><td class=\"number\">{ok}</td>\
             <td class=\"number\">{all}</td><td class=\"number\">{installed}</td><td class=\"number\">{skipped}</td>\
             <td class=\"number\">{4}</td><td>{report}<a href=\"{5}\">log</a></td></tr>",
            Escaped(&entry.workload),
            Escaped(&entry.nemeses),
            entry.word(),
            Escaped(entry.reason().unwrap_or_default()),
            entry.seconds,
            entry.log
        );
    }
    html.push_str("</table>\n");
    if !left_out.is_empty() {
        html.push_str("<h2>Not run</h2>\n<ul>\n");
        for (name, why) in left_out {
            let _ = writeln!(html, "<li>{}: {}</li>", Escaped(name), Escaped(why));
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</body>\n</html>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Outcome, Verdict};
    use crate::history::{History, Workload};

    fn entry(verdict: Option<Verdict>) -> Entry {
        let results = |verdict| {
            let checks = vec![Outcome::new("sets", verdict)];
            Box::new(Results::new(Workload::Set, &History::default(), None, checks))
        };
        Entry {
            workload: "set".into(),
            nemeses: "kill:leader, <wipe>".into(),
            directory: "01-set-kill-leader".into(),
            log: "01-set-kill-leader.log".into(),
            seconds: 47,
            came: verdict.map(results).ok_or_else(|| "no free port & no way".into()),
        }
    }

    #[test]
    fn a_matrix_is_as_bad_as_its_worst_run() {
        assert_eq!([vec![0, 2, 0], vec![2, 3, 0], vec![3, 1, 2], vec![0, 0]].map(exit_code), [2, 3, 1, 0]);
        assert_eq!(exit_code([]), HARNESS_ERROR, "nothing was judged");
    }

    #[test]
    fn the_page_links_each_run_and_loads_nothing() {
        let entries = [entry(Some(Verdict::Valid)), entry(Some(Verdict::Unknown("<too> little".into()))), entry(None)];
        let left_out = [("set/disk".to_owned(), "not <root>".to_owned())];
        let page = page_of("seed 7", &entries, &left_out);
        for part in [
            "<b>error</b> 1 of 3 runs valid",
            "<a href=\"01-set-kill-leader/report.html\">report</a>",
            "<a href=\"01-set-kill-leader.log\">log</a>",
            "kill:leader, &lt;wipe&gt;",
            "sets: &lt;too&gt; little",
            "no free port &amp; no way",
            "<li>set/disk: not &lt;root&gt;</li>",
            "seed 7",
        ] {
            assert!(page.contains(part), "{part} is missing: {page}");
        }
        assert_eq!(page.matches("report.html").count(), 2, "there is none of a run that was not judged");
        for markup in ["<script", "src=", "@import", "http"] {
            assert!(!page.contains(markup), "the page has {markup}");
        }
    }
}
