//! Writers that go on while a cluster changes under them, and what they were told is acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lake_client::store::{MetaStore, ReadOptions};

use super::{PATIENCE, eventually};

/// How long a client waits for one write.
pub const DEADLINE: Duration = PATIENCE;

/// Writers, each on its own keys, until told to stop. An error ends the test.
pub struct Load {
    store: Arc<dyn MetaStore>,
    run: String,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    slowest_us: Arc<AtomicU64>,
    writers: Vec<tokio::task::JoinHandle<Vec<String>>>,
}

impl Load {
    pub fn start(store: Arc<dyn MetaStore>, writers: usize, run: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (acknowledged, slowest_us) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let spawn = |writer: usize| {
            let (store, stop, run) = (store.clone(), stop.clone(), run.to_owned());
            let (count, slowest) = (acknowledged.clone(), slowest_us.clone());
            tokio::spawn(async move {
                let mut keys = Vec::new();
                for n in 0u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = format!("/kv/{run}/{writer}/{n:06}");
                    let began = Instant::now();
                    let committed = store.cas(&key, None, "v".into(), began + DEADLINE).await.unwrap();
                    // A write that was sent twice finds its own first attempt, and nothing else.
                    assert!(committed.result.succeeded || committed.resent, "{key} was there already");
                    slowest.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                    keys.push(key);
                    count.fetch_add(1, Ordering::Relaxed);
                }
                keys
            })
        };
        let writers = (0..writers).map(spawn).collect();
        Self { store, run: run.to_owned(), stop, acknowledged, slowest_us, writers }
    }

    /// Waits for so many more acknowledged writes.
    pub async fn grows_by(&self, n: u64) {
        let wanted = self.acknowledged.load(Ordering::Relaxed) + n;
        eventually("more acknowledged writes", async || {
            (self.acknowledged.load(Ordering::Relaxed) >= wanted).then_some(())
        })
        .await;
    }

    /// The slowest write since the last look.
    pub fn slowest(&self) -> Duration {
        Duration::from_micros(self.slowest_us.swap(0, Ordering::Relaxed))
    }

    /// Stops the writers; every write that they were told of is there, exactly once.
    pub async fn finish(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let mut acknowledged = Vec::new();
        for writer in self.writers {
            acknowledged.extend(writer.await.unwrap());
        }
        let prefix = format!("/kv/{}/", self.run);
        let all = self.store.list_all(&prefix, ReadOptions::default(), Instant::now() + PATIENCE).await.unwrap().value;
        let found: std::collections::HashMap<_, _> = all.into_iter().map(|e| (e.key, e.version)).collect();
        for key in &acknowledged {
            assert_eq!(found.get(key), Some(&1), "{key} was acknowledged");
        }
        println!("{}: all {} acknowledged writes are there, once", self.run, acknowledged.len());
        acknowledged.len()
    }
}
