//! Clients that have lost a race come back in turn. Their connection is what they are known by.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::wire::{TABLES, main_is, set_main, snapshot, with_table};
use crate::{cluster, rest};

/// A turn lasts a second. What was answered within this time was within it.
const IN_TIME: Duration = Duration::from_millis(800);
/// How often it is tried, and how often at most until one answer was in time.
const ROUNDS: usize = 20;
const MOST_ROUNDS: usize = 200;

/// An append to a version; to the first one of a table, if there is none.
fn append(id: i64, base: Option<&Value>) -> Value {
    let number = |name: &str| base.and_then(|base| base["metadata"][name].as_i64());
    let (parent, last) = (number("current-snapshot-id"), number("last-sequence-number").unwrap_or(0));
    json!({"requirements": [main_is(parent)], "updates": [snapshot(id, parent, last + 1), set_main(id)]})
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_lost_and_loads_again_is_next() {
    let cluster = cluster(2).await;
    let nodes = [rest(&cluster, 0), rest(&cluster, 1)];
    with_table(&nodes[0]).await;
    let table = format!("{TABLES}/t");
    nodes[0].post(&table, append(1, None)).await.expect(200);
    let mut in_time = 0;
    for round in 1..=MOST_ROUNDS {
        if round > ROUNDS && in_time > 0 {
            break;
        }
        let mut back = nodes[0].session().await;
        back.post(&table, append(99, None)).await.refused(409, "CommitFailedException");
        let began = Instant::now();
        let loaded = back.get(&table).await.expect(200).json();
        // Another, on this node or the next, builds on the same version and does not have to ask for it first.
        let (rival, at, theirs) =
            (nodes[round % 2].clone(), table.clone(), append(1_000 + round as i64, Some(&loaded)));
        let rival = tokio::spawn(async move { rival.post(&at, theirs).await.status });
        tokio::task::yield_now().await;
        let mine = back.post(&table, append(2_000 + round as i64, Some(&loaded))).await.status;
        let took = began.elapsed();
        let theirs = rival.await.unwrap();
        assert!([(200, 409), (409, 200)].contains(&(mine, theirs)), "{mine} and {theirs}: one of them is made");
        if took < IN_TIME {
            in_time += 1;
            assert_eq!(mine, 200, "it was its turn, {took:?} after it asked");
        }
    }
    assert!(in_time > 0, "a machine too slow to tell");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_not_used_passes() {
    let cluster = cluster(2).await;
    let nodes = [rest(&cluster, 0), rest(&cluster, 1)];
    with_table(&nodes[0]).await;
    let table = format!("{TABLES}/t");
    nodes[0].post(&table, append(1, None)).await.expect(200);
    for head in [1, 2] {
        let mut sessions = Vec::new();
        for _ in 0..2 {
            let mut back = nodes[0].session().await;
            back.post(&table, append(99, None)).await.refused(409, "CommitFailedException");
            sessions.push(back);
        }
        // The second is in line until the first one's turn has passed, and then does not come, either.
        for back in &mut sessions {
            back.get(&table).await.expect(200);
        }
        let now = nodes[0].get(&table).await.expect(200).json();
        nodes[head % 2].post(&table, append(1 + head as i64, Some(&now))).await.expect(200);
    }
    // What conflicts with nothing is made, whoever has the turn; and it is a turn for one table.
    let mut back = nodes[1].session().await;
    back.post(&table, append(99, None)).await.refused(409, "CommitFailedException");
    back.get(&table).await.expect(200);
    let set = json!({"updates": [{"action": "set-properties", "updates": {"a": "b"}}]});
    nodes[0].post(&table, set.clone()).await.expect(200);
    back.get(&table).await.expect(200);
    back.post(&table, set).await.expect(200);
}
