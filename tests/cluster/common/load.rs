//! Clients that insert rows as fast as they are acknowledged, and the verdict on what they left.
//!
//! Each INSERT has two rows, so that half of one would be seen. A client numbers its own inserts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_chaos::Role;
use tokio::task::JoinSet;

use super::{PATIENCE, Sql, TestCluster, numbers, until};

/// The pause after an INSERT that failed.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);

/// How an INSERT ended for its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Acknowledged,
    Failed { message: String },
}

/// One INSERT.
#[derive(Debug, Clone)]
pub struct Insert {
    pub client: i64,
    pub number: i64,
    pub outcome: Outcome,
    pub ended: Instant,
    pub took: Duration,
}

/// Clients under way.
pub struct Load {
    log: Arc<Mutex<Vec<Insert>>>,
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

impl Load {
    /// Starts `clients`, spread over the query nodes, each statement with this deadline.
    pub async fn start(cluster: &TestCluster, clients: usize, deadline: Duration) -> Self {
        cluster.sql(0).await.run("CREATE TABLE load (client BIGINT, number BIGINT, half BIGINT)").await.unwrap();
        let (log, stop) = (Arc::default(), Arc::default());
        let mut load = Self { log, stop, clients: JoinSet::new() };
        let nodes = cluster.processes.endpoints(Role::Query).len();
        for client in 0..clients {
            let sql = cluster.sql(client % nodes).await;
            load.clients.spawn(insert(client as i64, sql, deadline, load.log.clone(), load.stop.clone()));
        }
        load
    }

    fn acknowledged(&self) -> Vec<Instant> {
        let log = self.log.lock().unwrap();
        let mut times: Vec<_> = log.iter().filter(|i| i.outcome == Outcome::Acknowledged).map(|i| i.ended).collect();
        times.sort();
        times
    }

    /// Waits for so many more acknowledgements.
    pub async fn until_acknowledged(&self, more: usize) {
        let goal = self.acknowledged().len() + more;
        until("more inserts to be acknowledged", PATIENCE, || async {
            let last = self.log.lock().unwrap().last().map(|i| format!("{:?}", i.outcome));
            let have = self.acknowledged().len();
            if have >= goal { Ok(()) } else { Err(format!("{have} of {goal}; the last one: {last:?}")) }
        })
        .await;
    }

    /// The longest time without an acknowledgement that began or went on after `moment`.
    pub fn pause_around(&self, moment: Instant) -> Duration {
        let times = self.acknowledged();
        let gaps = times.windows(2).filter(|w| w[1] > moment).map(|w| w[1] - w[0]);
        gaps.max().unwrap_or_default()
    }

    /// Lets every client finish its statement.
    pub async fn stop(mut self) -> Vec<Insert> {
        self.stop.store(true, Ordering::Release);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

async fn insert(client: i64, sql: Sql, deadline: Duration, log: Arc<Mutex<Vec<Insert>>>, stop: Arc<AtomicBool>) {
    let mut number = 0;
    while !stop.load(Ordering::Acquire) {
        let statement = format!("INSERT INTO load VALUES ({client}, {number}, 0), ({client}, {number}, 1)");
        let started = Instant::now();
        let outcome = match sql.run_within(&statement, deadline).await {
            Ok(_) => Outcome::Acknowledged,
            Err(e) => Outcome::Failed { message: e.message },
        };
        let ended = Instant::now();
        if outcome != Outcome::Acknowledged {
            // A node that is down refuses at once.
            tokio::time::sleep(REFUSED_PAUSE).await;
        }
        log.lock().unwrap().push(Insert { client, number, outcome, ended, took: ended - started });
        number += 1;
    }
}

/// What the table holds: rows and the sum of their halves, per insert.
pub type Found = BTreeMap<(i64, i64), (i64, i64)>;

/// Reads the table.
pub async fn rows(sql: &Sql) -> Found {
    let query = "SELECT client, number, count(*), sum(half) FROM load GROUP BY client, number";
    let batches = sql.run(query).await.unwrap().batches;
    let column = |i| numbers(&batches, i);
    let keys = column(0).into_iter().zip(column(1));
    keys.zip(column(2).into_iter().zip(column(3))).collect()
}

/// Whether the rows found are those that the outcomes promise.
pub fn judge(outcomes: &[Insert], found: &Found) -> Result<(), String> {
    let whole = (2, 1);
    let known: BTreeMap<_, _> = outcomes.iter().map(|o| ((o.client, o.number), &o.outcome)).collect();
    if let Some((key, rows)) = found.iter().find(|(_, rows)| **rows != whole) {
        return Err(format!("insert {key:?} is there with (rows, sum) {rows:?} instead of {whole:?}"));
    }
    if let Some(key) = found.keys().find(|key| !known.contains_key(key)) {
        return Err(format!("insert {key:?} is there, and nobody made it"));
    }
    for (key, outcome) in known {
        match (outcome, found.contains_key(&key)) {
            (Outcome::Acknowledged, false) => return Err(format!("insert {key:?} was acknowledged and is lost")),
            (Outcome::Failed { message }, true) if message.contains("nothing was committed") => {
                return Err(format!("insert {key:?} is there though the client was told: {message}"));
            }
            _ => {}
        }
    }
    Ok(())
}

#[test]
fn the_verdict_finds_what_is_wrong() {
    let insert = |number, outcome| Insert { client: 0, number, outcome, ended: Instant::now(), took: Duration::ZERO };
    let failed = |message: &str| Outcome::Failed { message: message.to_owned() };
    let outcomes = [
        insert(0, Outcome::Acknowledged),
        insert(1, failed("whether the rows were committed is unknown")),
        insert(2, failed("the disk is full; nothing was committed")),
    ];
    let found = |rows: &[(i64, (i64, i64))]| rows.iter().map(|(n, r)| ((0, *n), *r)).collect::<Found>();
    assert_eq!(judge(&outcomes, &found(&[(0, (2, 1))])), Ok(()));
    assert_eq!(judge(&outcomes, &found(&[(0, (2, 1)), (1, (2, 1))])), Ok(()));
    for wrong in [
        &[][..],
        &[(0, (1, 0))],
        &[(0, (4, 2))],
        &[(0, (2, 1)), (1, (1, 1))],
        &[(0, (2, 1)), (2, (2, 1))],
        &[(0, (2, 1)), (9, (2, 1))],
    ] {
        assert!(judge(&outcomes, &found(wrong)).is_err(), "{wrong:?}");
    }
}
