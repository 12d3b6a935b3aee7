//! Histories made by hand: the file's name tells the verdict (`register-stale-read.violation.edn`), and a line
//! `; finds: KIND` the finding that there must be.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lake_chaos::check::{self, Options, judge_history};
use lake_chaos::history::{Workload, file};

#[test]
fn every_history_has_the_verdict_in_its_name() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/histories");
    let mut verdicts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let expected = name.strip_suffix(".edn").unwrap().rsplit_once('.').unwrap().1;
        let (workload, history) = file::read(&path, None).unwrap_or_else(|e| panic!("{e}"));
        assert!(name.starts_with(workload.name()), "{name} is taken for one of {workload}");
        let outcomes = judge_history(workload, &history, &Options::default());
        let verdict = check::verdict(&outcomes);
        assert_eq!(verdict.word(), expected, "{name}: {verdict}");
        let text = fs::read_to_string(&path).unwrap();
        let finds = text.lines().find_map(|line| line.strip_prefix("; finds: "));
        let found: Vec<&str> = outcomes.iter().flat_map(|o| o.findings.iter().map(|f| f.kind.as_str())).collect();
        assert!(finds.is_none_or(|kind| found.contains(&kind)), "{name}: {finds:?} is not among {found:?}");
        assert_eq!(finds.is_some(), expected == "violation", "{name} says what it finds if it is a violation");
        verdicts.entry(workload.name()).or_default().push(expected.to_owned());
    }
    for workload in Workload::ALL {
        for verdict in ["valid", "violation", "unknown"] {
            let of = verdicts.get(workload.name()).into_iter().flatten();
            assert!(of.into_iter().any(|other| other == verdict), "{workload} has no history that is {verdict}");
        }
    }
}
