use super::*;
use crate::history::file;

/// Transactions, one a line: what is invoked, and what is answered after `=>`, or `fail` or `info`. Lines are one after
/// the other in time unless they are joined by `||`: then they begin together.
fn history(text: &str) -> History {
    let mut edn = String::new();
    let mut process = 0;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let calls: Vec<(&str, &str)> = line.split("||").map(|call| call.split_once("=>").unwrap()).collect();
        for (i, (invoked, _)) in calls.iter().enumerate() {
            edn += &format!("{{:type :invoke, :f :txn, :value [{invoked}], :process {}}}\n", process + i);
        }
        for (i, (invoked, answer)) in calls.iter().enumerate() {
            let (kind, value) = match answer.trim() {
                "ok" => ("ok", invoked),
                "fail" => ("fail", invoked),
                "info" => ("info", invoked),
                _ => ("ok", answer),
            };
            edn += &format!("{{:type :{kind}, :f :txn, :value [{value}], :process {}}}\n", process + i);
        }
        process += calls.len();
    }
    file::parse(&edn, None).unwrap().1
}

fn kinds(text: &str) -> Vec<String> {
    let outcome = check(&history(text), Model::StrictSerializable);
    assert_eq!(outcome.findings.is_empty(), outcome.verdict == Verdict::Valid, "{:?}", outcome.verdict);
    outcome.findings.into_iter().map(|finding| finding.kind).collect()
}

#[test]
fn what_is_in_order_is_valid() {
    let valid = "[:append :x 1] [:r :y nil] => [:append :x 1] [:r :y []]
                 [:r :x nil] [:append :x 2] [:r :x nil] => [:r :x [1]] [:append :x 2] [:r :x [1 2]]
                 [:append :x 3] => info
                 [:append :x 4] => fail
                 [:append :x 5] [:r :x nil] => [:append :x 5] [:r :x [1 2 5]]
                 [:r :x nil] [:append :x 6] => [:r :x [1 2 5]] [:append :x 6]
                 [:r :z nil] => [:r :z []]";
    assert!(kinds(valid).is_empty());
    // The unknown one may come at any time.
    assert!(kinds(&format!("{valid}\n[:r :x nil] => [:r :x [1 2 5 6 3]]")).is_empty());
}

#[test]
fn every_class_is_named() {
    let cases = [
        ("G1a", "[:append :x 1] => fail \n [:r :x nil] => [:r :x [1]]"),
        ("G1b", "[:append :x 1] [:append :x 2] => ok || [:r :x nil] => [:r :x [1]] \n [:r :x nil] => [:r :x [1 2]]"),
        ("unwritten", "[:r :x nil] => [:r :x [1]]"),
        ("internal", "[:append :x 1] [:r :x nil] => [:append :x 1] [:r :x []]"),
        ("internal", "[:r :x nil] [:r :x nil] => [:r :x []] [:r :x [1]] || [:append :x 1] => ok"),
        ("appended twice", "[:append :x 1] => ok \n [:r :x nil] => [:r :x [1 1]]"),
        (
            "incompatible order",
            "[:append :x 1] => ok || [:append :x 2] => ok \n [:r :x nil] => [:r :x [1]] || [:r :x nil] => [:r :x [2 1]]",
        ),
        (
            "G0",
            "[:append :x 1] [:append :y 1] => ok || [:append :x 2] [:append :y 2] => ok
             [:r :x nil] [:r :y nil] => [:r :x [1 2]] [:r :y [2 1]]",
        ),
        (
            "G1c",
            "[:append :x 1] [:r :y nil] => [:append :x 1] [:r :y [1]] || [:append :y 1] [:r :x nil] => [:append :y 1] [:r :x [1]]",
        ),
        (
            "G-single",
            "[:append :x 1] [:append :y 1] => ok || [:r :x nil] [:r :y nil] => [:r :x [1]] [:r :y []]
             [:r :y nil] => [:r :y [1]]",
        ),
        (
            "G2",
            "[:r :x nil] [:append :y 1] => [:r :x []] [:append :y 1] || [:r :y nil] [:append :x 1] => [:r :y []] [:append :x 1]
             [:r :x nil] [:r :y nil] => [:r :x [1]] [:r :y [1]]",
        ),
        ("G0-realtime", "[:append :x 1] => ok \n [:append :x 2] => ok \n [:r :x nil] => [:r :x [2 1]]"),
        ("G1c-realtime", "[:r :x nil] => [:r :x [1]] \n [:append :x 1] => ok"),
        ("G-single-realtime", "[:append :x 1] => ok \n [:r :x nil] => [:r :x []] \n [:r :x nil] => [:r :x [1]]"),
        // Never read at all, and yet it must come after what was read.
        ("G-single-realtime", "[:append :x 1] => ok \n [:append :x 2] => ok \n [:r :x nil] => [:r :x [1]]"),
        ("G-single-realtime", "[:append :x 1] => ok \n [:r :x nil] [:append :x 2] => [:r :x []] [:append :x 2]"),
    ];
    for (kind, text) in cases {
        assert_eq!(kinds(text).first().map(String::as_str), Some(kind), "{text}");
    }
}

#[test]
fn write_skew_of_appends_that_nobody_read_is_found() {
    let skew = "[:r :x nil] [:append :y 1] => [:r :x []] [:append :y 1] || [:r :y nil] [:append :x 1] => [:r :y []] [:append :x 1]";
    assert_eq!(kinds(skew), ["G2"]);
    // Both read what both append to: one must have seen the other.
    let lost = "[:r :x nil] [:append :x 1] => [:r :x []] [:append :x 1] || [:r :x nil] [:append :x 2] => [:r :x []] [:append :x 2]";
    assert_eq!(kinds(lost), ["G2"]);
}

#[test]
fn a_circle_is_explained_edge_by_edge() {
    let text = "[:append :x 1] => ok \n [:r :x nil] => [:r :x []] \n [:r :x nil] => [:r :x [1]]";
    let mut finding = check(&history(text), Model::StrictSerializable).findings.remove(0);
    let mut explanation = finding.explanation.split_off(1);
    explanation.sort();
    assert_eq!(
        explanation,
        [
            "T1 (process 0) ended before T2 (process 1) began (realtime).",
            "T2 (process 1) read key x without 1, which T1 (process 0) appended (rw).",
        ]
    );
    assert_eq!(finding.bars.len(), 2);
}

#[test]
fn serializability_alone_knows_no_time() {
    let stale = history("[:append :x 1] => ok \n [:r :x nil] => [:r :x []] \n [:r :x nil] => [:r :x [1]]");
    assert_eq!(check(&stale, Model::Serializable).verdict, Verdict::Valid);
}

/// A read before anything was there.
const UNSEEN: &str = "[:r :x nil] => [:r :x []] \n [:append :x 1] => ok";

#[test]
fn values_that_are_not_unique_and_histories_without_reads_are_not_valid() {
    for text in ["[:append :x 1] => ok \n [:append :x 1] => ok", "[:append :x 1] => ok", "[:r :x nil] => info", UNSEEN]
    {
        let verdict = check(&history(text), Model::default()).verdict;
        assert!(matches!(verdict, Verdict::Unknown(_)), "{text}: {verdict:?}");
    }
}
