use std::fs;

use super::*;
use crate::check::convergence::{Facts, Peer, State};
use crate::check::{Death, Verdict};
use crate::process::Role;

const STALE: &str = "{:type :info, :f :start-kill, :value {:target \"leader (2)\", :outcome :installed, :because \"pid 9 is gone\"}, :process :nemesis, :time 1000000}
{:type :invoke, :f :write, :value [7 1], :process 0, :time 2000000}
{:type :ok, :f :write, :value [7 1], :process 0, :time 3000000, :peer 2, :revision 5}
{:type :invoke, :f :read, :value [7 nil], :process 1, :time 4000000}
{:type :ok, :f :read, :value [7 nil], :process 1, :time 5000000, :peer 1}
{:type :invoke, :f :cas, :value [7 [1 2]], :process 1, :time 6000000}
{:type :info, :f :cas, :value [7 [1 2]], :process 1, :time 7000000, :error \"</title><script>alert(1)</script> & 'more'\"}
{:type :info, :f :stop-kill, :value {:target \"2\", :outcome :installed, :because \"it serves\"}, :process :nemesis, :time 8000000}
";

fn record() -> Record {
    let peer = |id| Peer { id, state: Ok(State { applied: 7, hash: "ab".into() }), excused: None };
    let words = ["lake", "chaos", "run", "--seed", "7", "--out", "my 'run'"];
    Record {
        command: words.map(str::to_owned).into(),
        version: "0.1.0".into(),
        began_unix_ms: 1_796_007_600_000,
        workload: Workload::Register,
        nemeses: vec!["kill:leader".into(), "clock".into()],
        faults: vec!["kill".into(), "clock".into()],
        peers: 3,
        query_nodes: 0,
        clients: 2,
        rate: 100.0,
        time_ms: 8000,
        seed: 7,
        load_ended_ns: 8_000_000,
        facts: Some(Facts {
            leader_after_ms: Some(10),
            watched_ms: 10,
            stood_still_ms: 20,
            peers: vec![peer(1), peer(2)],
            query_nodes_away: vec![],
            looked_for: 1,
            not_found: vec![],
        }),
        errors: [("unavailable, outcome unknown".to_owned(), 1)].into(),
        deaths: Some(vec![death(2, None), death(3, Some("bit 1 of byte 9 of log/0 was flipped"))]),
        interrupted: None,
    }
}

fn death(peer: u64, excused: Option<&str>) -> Death {
    Death {
        peer,
        role: Role::Metasrv,
        time_ns: 7_000_000,
        how: "ended with exit code 101".into(),
        signal: None,
        last_lines: vec!["thread 'raft' panicked at <here>".into()],
        excused: excused.map(str::to_owned),
    }
}

fn directory(record: Option<&Record>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(file::FILE_NAME), STALE).unwrap();
    if let Some(record) = record {
        record::write(dir.path(), record).unwrap();
        let peer = |id, applied| PeerSample { id, stage: "member".into(), term: 3, applied, last: applied };
        let sample = |n: u64| Sample {
            time_ns: n * 1_000_000,
            leader: (n != 4).then_some(n / 5 + 1),
            term: 3 + n / 5,
            peers: vec![peer(1, 10 * n), peer(2, 8 * n)],
        };
        let lines: Vec<String> = (0..9).map(|n| serde_json::to_string(&sample(n)).unwrap()).collect();
        fs::write(dir.path().join(sample::FILE_NAME), lines.join("\n")).unwrap();
    }
    dir
}

#[test]
fn a_report_is_made_from_the_files_of_a_run() {
    let dir = directory(Some(&record()));
    let results = build(dir.path(), &Options::default()).unwrap();
    assert!(matches!(results.verdict, Verdict::Violation(_)), "{:?}", results.verdict);
    assert_eq!(results.exit_code, 1);
    let checkers: Vec<&str> = results.checks.iter().map(|outcome| outcome.checker.as_str()).collect();
    assert_eq!(checkers, ["linearizable registers", "availability", "faults", "peers", "convergence"]);
    assert_eq!((results.operations["write"].ok, results.operations["cas"].unknown), (1, 1));
    let json = fs::read_to_string(dir.path().join(results::FILE_NAME)).unwrap();
    assert!(json.contains("\"verdict\": \"violation\"") && json.contains("panicked at <here>"), "{json}");
    assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), results);
    // Made again, it is the same.
    let page = fs::read_to_string(dir.path().join(page::FILE_NAME)).unwrap();
    build(dir.path(), &Options::default()).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join(page::FILE_NAME)).unwrap(), page);
    for part in [
        "read 7 = nil",
        "Faults in force",
        "Operations per second",
        "class=\"band\"",
        "Latency of what succeeded",
        "Leader @ term",
        "Log entries yet to be applied, by peer",
        "peer 1 leads, term 3",
        "nobody known to lead",
        "lake chaos run --seed 7 --out &#39;my &#39;\\&#39;&#39;run&#39;\\&#39;&#39;&#39;",
        "clock (never tried)",
        "peer 2 ended with exit code 101 at 0.0 s, without having been told to",
        "thread &#39;raft&#39; panicked at &lt;here&gt;",
        "peer 3 ended with exit code 101 at 0.0 s, as it may: bit 1 of byte 9",
        "kill:leader",
        "kill: 0.0 s to 0.0 s",
        "<td>installed</td><td>pid 9 is gone; in the end: it serves</td><td>to the end of the run</td>",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
}

#[test]
fn what_comes_from_a_run_cannot_become_markup_and_the_page_loads_nothing() {
    let mut record = record();
    record.nemeses.push("<img onerror=alert(1)>".into());
    let dir = directory(Some(&record));
    let bad = STALE
        .replace("[7 1]", "[\"<b>\" 1]")
        .replace("[7 nil]", "[\"<b>\" nil]")
        .replace("[7 [1 2]]", "[\"<b>\" [1 2]]");
    fs::write(dir.path().join(file::FILE_NAME), bad).unwrap();
    build(dir.path(), &Options::default()).unwrap();
    let page = fs::read_to_string(dir.path().join(page::FILE_NAME)).unwrap();
    for markup in ["<script", "<b>\u{20}:=", "<img", "src=", "href=", "@import", "http"] {
        assert!(!page.contains(markup), "the page has {markup}");
    }
    assert!(page.contains("&lt;img onerror=alert(1)&gt;") && page.contains("read &lt;b&gt; = nil"), "{page}");
}

/// Processes that others supervise may end and start again: of that nothing is known, and nothing is said.
#[test]
fn where_nobody_would_have_noticed_a_death_no_check_says_that_there_was_none() {
    let dir = directory(Some(&Record { deaths: None, ..record() }));
    let results = build(dir.path(), &Options::default()).unwrap();
    assert!(results.checks.iter().all(|outcome| outcome.checker != "peers"), "{:?}", results.checks);
    assert_eq!(record::read(dir.path()).unwrap().unwrap().deaths, None);
}

#[test]
fn a_history_alone_is_judged_by_itself() {
    let dir = directory(None);
    let results = build(dir.path(), &Options::default()).unwrap();
    assert_eq!(results.checks.len(), 1);
    assert_eq!(results.run, None);
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = |dir: &std::path::Path| build(dir, &Options::default()).unwrap_err().to_string();
    assert!(message(dir.path()).contains("history.edn"));
    fs::write(dir.path().join(sample::FILE_NAME), "\n{\"time_ns\": 1}").unwrap();
    assert!(message(dir.path()).contains("samples.jsonl, line 2"), "{}", message(dir.path()));
}
