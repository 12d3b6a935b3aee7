//! Tables on an S3 service, and what happens on the way to it.

use super::s3::{ACCESS_KEY, S3, SECRET_KEY};
use super::{Phase, Run, assert_code, proofs, shown};

/// What a run is told of the store.
fn store(run: &Run, s3: &S3) -> String {
    let keys = [("access", ACCESS_KEY), ("secret", SECRET_KEY)].map(|(name, key)| {
        let file = run.dir.path().join(name);
        std::fs::write(&file, key).unwrap();
        format!("--query-arg --s3-{name}-key-file --query-arg {}", file.display())
    });
    format!("--warehouse s3://lake-chaos/tables --s3-endpoint {} {}", s3.endpoint, keys.join(" "))
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_there_once_and_whole_whatever_the_object_store_does() {
    let s3 = S3::start("lake-chaos").await;
    let run = tokio::task::spawn_blocking(Run::new).await.unwrap();
    let store = store(&run, &s3);
    let faults = ["store-slow", "store-refuse", "store-throttle", "store-late", "store-partition:one"];
    let holds = move || {
        let history = run.holds(&format!("--workload table --time 45s --rate 10 --clients 6 {store}"), &faults);
        let expected = [("store-throttle", "were told to slow down"), ("store-late", "answers were held")];
        for (fault, end) in expected.into_iter().chain([("store-partition-one", "times")]) {
            assert!(proofs(&history, fault).iter().all(|proof| proof.ends_with(end)), "{fault}");
        }
        let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "tables").unwrap();
        assert!(judged.figures["writes"] > 3 && judged.figures["reads"] > 3, "{judged:?}");
    };
    tokio::task::spawn_blocking(holds).await.unwrap();
}

/// Without other faults: while all requests are refused, or a node is cut off, none may arrive late.
#[tokio::test(flavor = "multi_thread")]
async fn rows_are_there_once_and_whole_though_requests_arrive_when_their_senders_have_given_up() {
    let s3 = S3::start("lake-chaos").await;
    let run = tokio::task::spawn_blocking(Run::new).await.unwrap();
    let store = store(&run, &s3);
    let holds = move || {
        let history = run.holds(&format!("--workload table --time 25s --rate 10 --clients 6 {store}"), &["store-late"]);
        // The last tells of all before it.
        let late = shown(&history, Phase::Stop, "store-late").pop().unwrap();
        let overdue =
            late.strip_suffix(" arrived after their senders had given up").and_then(|told| told.rsplit(' ').next());
        assert!(overdue.unwrap().parse::<u64>().unwrap() > 0, "{late}");
    };
    tokio::task::spawn_blocking(holds).await.unwrap();
}

#[test]
fn a_fault_of_the_object_store_takes_one() {
    let run = Run::new();
    let output = run.go("--workload table --nemesis store-late --time 5s");
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--s3-endpoint"));
}
