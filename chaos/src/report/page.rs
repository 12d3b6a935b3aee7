//! `report.html`: what came of a run, on one page.

use std::fmt::Write;

use super::attacks::{Attack, Came};
use super::charts::Timeline;
use super::diagram::{MAX_BARS, diagram};
use super::record::Record;
use super::results::Results;
use super::sample::Sample;
use super::svg::Escaped;
use crate::check::{Finding, Outcome, Verdict};
use crate::history::History;

/// Its name in a run's directory.
pub const FILE_NAME: &str = "report.html";

const STYLE: &str = include_str!("page.css");
/// The head of an arrow, which all pictures share.
const ARROW: &str = "<svg width=\"0\" height=\"0\" style=\"position:absolute;min-width:0\"><defs><marker id=\"arrow\" \
     viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\"/>\
     </marker></defs></svg>\n";

/// The whole page.
pub fn page(results: &Results, history: &History, samples: &[Sample]) -> String {
    let title = format!("lake chaos: {}, {}", results.workload, results.verdict.word());
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{ARROW}<h1>lake chaos: {}</h1>\n",
        Escaped(&title),
        results.workload
    );
    let parts = [
        verdict(&results.verdict),
        results.run.as_ref().map_or_else(String::new, run),
        checks(&results.checks),
        findings(&results.checks),
        timeline(&Timeline::of(history, samples)),
        faults(&results.faults),
        operations(results),
    ];
    parts.iter().for_each(|part| page.push_str(part));
    page.push_str("</body>\n</html>\n");
    page
}

fn verdict(verdict: &Verdict) -> String {
    let meaning = match verdict {
        Verdict::Valid => "Every promise that was judged was kept.",
        Verdict::Unknown(_) => "Nothing is shown either way; this run must not be taken for a valid one.",
        Verdict::Violation(_) => "A promise was broken; the operations below prove it.",
    };
    format!(
        "<div class=\"verdict {0}\"><b>{0}</b> {1}<div class=\"faint\">{meaning}</div></div>\n",
        verdict.word(),
        Escaped(verdict.reason().unwrap_or_default())
    )
}

fn run(record: &Record) -> String {
    let named = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let mut html = format!(
        "<p>{} peers{}, {} clients, {} operations per second for {} s; faults asked for: {}; seed {}; lake {}; began {}.</p>\n",
        record.peers,
        match record.query_nodes {
            0 => String::new(),
            nodes => format!(", {nodes} query nodes"),
        },
        record.clients,
        record.rate,
        record.time_ms as f64 / 1000.0,
        Escaped(named(&record.nemeses)),
        record.seed,
        Escaped(&record.version),
        utc(record.began_unix_ms)
    );
    let mut paragraph = |text: String| {
        let _ = writeln!(html, "<p>{}</p>", Escaped(text));
    };
    record.interrupted.iter().for_each(|why| paragraph(format!("The run ended early: {why}")));
    // Those that are not excused are among the findings.
    for death in record.deaths.iter().flatten().filter(|death| death.excused.is_some()) {
        paragraph(format!("Of its own, {}.", death.told()));
    }
    let errors: Vec<String> = record.errors.iter().map(|(error, times)| format!("{error}: {times}")).collect();
    if !errors.is_empty() {
        paragraph(format!("Operations that were not served, by error: {}.", errors.join(", ")));
    }
    let command = record.command_line();
    let _ = writeln!(html, "<p class=\"faint\">To repeat it:</p>\n<pre>{}</pre>", Escaped(command));
    html
}

/// Milliseconds since 1970 as a date and a time of day.
fn utc(unix_ms: u64) -> String {
    let (days, seconds) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Years begin in March here, so that the leap day is a year's last, and eras of 400 years are alike.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn checks(checks: &[Outcome]) -> String {
    let mut html =
        String::from("<h2>Checks</h2>\n<table>\n<tr><th>check</th><th>verdict</th><th>why</th><th>figures</th></tr>\n");
    for outcome in checks {
        let figures: Vec<String> = outcome.figures.iter().map(|(name, figure)| format!("{name}: {figure}")).collect();
        let _ = writeln!(
            html,
            "<tr><td>{}</td><td class=\"{1}\">{1}</td><td>{2}</td><td class=\"faint\">{3}</td></tr>",
            Escaped(&outcome.checker),
            outcome.verdict.word(),
            Escaped(outcome.verdict.reason().unwrap_or_default()),
            Escaped(figures.join(", "))
        );
    }
    html.push_str("</table>\n");
    html
}

fn findings(checks: &[Outcome]) -> String {
    let mut html = String::new();
    for outcome in checks.iter().filter(|outcome| !outcome.findings.is_empty()) {
        let _ = writeln!(html, "<h2>Found: {}</h2>", Escaped(&outcome.checker));
        outcome.findings.iter().for_each(|finding| html.push_str(&self::finding(finding)));
    }
    html
}

fn finding(finding: &Finding) -> String {
    let mut html = format!("<div class=\"finding\">\n<h3>{}</h3>\n<ul>\n", Escaped(&finding.kind));
    for sentence in &finding.explanation {
        let _ = writeln!(html, "<li>{}</li>", Escaped(sentence));
    }
    html.push_str("</ul>\n");
    if let Some(diagram) = diagram(finding) {
        let more = finding.bars.len().saturating_sub(MAX_BARS);
        let more = if more > 0 { format!(" {more} more operations are in results.json.") } else { String::new() };
        let _ = writeln!(
            html,
            "<figure>{diagram}<figcaption>Time goes to the right, not to scale. Dashed: the outcome is unknown, and it may \
             take effect at any later time.{more} Point at a bar for times, peer and revision.</figcaption></figure>"
        );
    }
    html.push_str("</div>\n");
    html
}

fn timeline(timeline: &Timeline<'_>) -> String {
    let mut html = String::from("<h2>Over time</h2>\n");
    let mut figure = |svg: Option<String>, caption: &str| {
        if let Some(svg) = svg {
            let _ = writeln!(html, "<figure><figcaption>{caption}</figcaption>{svg}</figure>");
        }
    };
    let key = |class: &str, name: &str| format!("<span class=\"key {class}\"></span>{name}");
    figure(timeline.faults(), "Faults in force");
    let ends = ["ok", "refused", "failed", "unknown"].map(|end| key(end, end)).concat();
    figure(Some(timeline.throughput()), &format!("Operations per second {ends}"));
    let quantiles = key("p50", "p50") + &key("p99", "p99");
    figure(Some(timeline.latency()), &format!("Latency of what succeeded {quantiles}"));
    figure(timeline.leader(), "Leader @ term");
    let peers: String = timeline.peers().iter().map(|(id, class)| key(class, &format!("peer {id}"))).collect();
    figure(timeline.lag(), &format!("Log entries yet to be applied, by peer {peers}"));
    html
}

/// Every fault, with what came of it.
fn faults(attacks: &[Attack]) -> String {
    if attacks.is_empty() {
        return String::new();
    }
    let header = ["fault", "done to", "from", "to", "", "shown by, or why not", "then without success"];
    let header: String = header.iter().map(|name| format!("<th>{name}</th>")).collect();
    let mut html = format!("<h2>Faults</h2>\n<table>\n<tr>{header}</tr>\n");
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1000.0);
    for attack in attacks {
        let end = attack.end.iter().map(|(came, why)| match came {
            Came::Installed => format!("; in the end: {why}"),
            Came::Skipped | Came::Failed => format!("; its end {}: {why}", came.word()),
        });
        let without = match (attack.to_ms, attack.without_success_ms) {
            (None, _) => String::new(),
            (Some(_), None) => "to the end of the run".to_owned(),
            (Some(_), Some(ms)) => format!("{ms} ms"),
        };
        let because: String = std::iter::once(attack.because.clone()).chain(end).collect();
        let cells = [
            attack.name.clone(),
            attack.target.clone(),
            seconds(attack.from_ms),
            attack.to_ms.map(seconds).unwrap_or_default(),
            attack.came.word().to_owned(),
            because,
            without,
        ];
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", Escaped(cell))).collect();
        let _ = writeln!(html, "<tr>{cells}</tr>");
    }
    html.push_str("</table>\n");
    html
}

fn operations(results: &Results) -> String {
    let header = ["ok", "refused", "failed", "unknown", "p50 ms", "p99 ms", "max ms"];
    let header: String = header.iter().map(|name| format!("<th class=\"number\">{name}</th>")).collect();
    let mut html = format!("<h2>Operations</h2>\n<table>\n<tr><th>operation</th>{header}</tr>\n");
    for (name, counts) in &results.operations {
        let _ = write!(html, "<tr><td>{}</td>", Escaped(name));
        for count in [counts.ok, counts.refused, counts.failed, counts.unknown] {
            let _ = write!(html, "<td class=\"number\">{count}</td>");
        }
        for us in [counts.p50_us, counts.p99_us, counts.max_us] {
            let _ = write!(html, "<td class=\"number\">{:.2}</td>", us as f64 / 1000.0);
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_796_007_599_000), "2026-11-30 02:59:59 UTC");
        assert_eq!(utc(4_107_542_400_000), "2100-03-01 00:00:00 UTC");
    }
}
