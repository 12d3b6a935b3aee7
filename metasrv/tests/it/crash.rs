//! Peers as processes of their own, killed with SIGKILL: nothing acknowledged is lost, and the rest goes on soon.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::processes::Processes;
use crate::support::{PATIENCE, eventually};
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::config::StorageConfig;
use lake_metasrv::directory::{self, DirectoryOptions};
use lake_metasrv::files::FreeSpace;
use lake_metasrv::log::SkipSync;
use lake_metasrv::raft::types::{LogId, Payload};
use lake_metasrv::state::FEATURE_LEVEL;
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;

/// Writers that count, each on its own keys, until told to stop. What they were told is acknowledged.
struct Load {
    stop: Arc<AtomicBool>,
    last_success_ms: Arc<AtomicU64>,
    longest_gap_ms: Arc<AtomicU64>,
    acknowledged: Arc<AtomicU64>,
    writers: Vec<tokio::task::JoinHandle<Vec<String>>>,
    began: Instant,
}

impl Load {
    fn start(store: Arc<dyn MetaStore>, writers: usize, run: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (last_success_ms, longest_gap_ms) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let acknowledged_count = Arc::new(AtomicU64::new(0));
        let began = Instant::now();
        let writers = (0..writers)
            .map(|w| {
                let (store, stop, run) = (store.clone(), stop.clone(), run.to_owned());
                let (last, longest) = (last_success_ms.clone(), longest_gap_ms.clone());
                let count = acknowledged_count.clone();
                tokio::spawn(async move {
                    let mut acknowledged = Vec::new();
                    for n in 0u64.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let key = format!("/kv/{run}/{w}/{n:06}");
                        let deadline = Instant::now() + PATIENCE;
                        let committed = store.cas(&key, None, "v".into(), deadline).await.unwrap();
                        assert!(committed.result.succeeded || committed.resent, "{key} was there already");
                        acknowledged.push(key);
                        count.fetch_add(1, Ordering::SeqCst);
                        let now = began.elapsed().as_millis() as u64;
                        let before = last.swap(now, Ordering::SeqCst);
                        longest.fetch_max(now.saturating_sub(before), Ordering::SeqCst);
                    }
                    acknowledged
                })
            })
            .collect();
        Self { stop, last_success_ms, longest_gap_ms, acknowledged: acknowledged_count, writers, began }
    }

    async fn goes_on(&self) {
        let since = self.began.elapsed().as_millis() as u64;
        eventually("the load to go on", async || (self.last_success_ms.load(Ordering::SeqCst) > since).then_some(()))
            .await;
    }

    async fn grows_by(&self, n: u64) {
        let wanted = self.acknowledged.load(Ordering::SeqCst) + n;
        eventually("more acknowledged writes", async || {
            (self.acknowledged.load(Ordering::SeqCst) >= wanted).then_some(())
        })
        .await;
    }

    async fn finish(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for writer in self.writers {
            all.extend(writer.await.unwrap());
        }
        all
    }
}

/// Work on scopes, leased to procedures, and keys that come and go, beside a load. Its failures are nobody's business: what
/// it did or did not do must be the same on every peer.
async fn busy_with_scopes(store: Arc<dyn MetaStore>, stop: Arc<AtomicBool>, worker: u64) {
    let owner = ScopeOwner::Procedure(format!("worker {worker}"));
    for n in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        // Two workers contend for each.
        let path = format!("/tables/{}", (n + worker) % 3);
        let key = |n: u64| format!("/kv/comes-and-goes/{worker}/{}", n % 20);
        let take = Txn {
            when: vec![Compare::scope_free(path.clone(), Some(owner.clone()))],
            then: vec![
                Op::AcquireScope { path: path.clone(), owner: owner.clone() },
                Op::put(key(n), vec![7; (n % 50) as usize]),
                Op::delete(key(n + 7)),
            ],
            otherwise: vec![Op::put(format!("/kv/comes-and-goes/{worker}/waited"), "")],
        };
        let give = Txn { then: vec![Op::ReleaseScope { path, owner: owner.clone() }], ..Txn::default() };
        for txn in [take, give] {
            let _ = store.commit(txn, Instant::now() + Duration::from_secs(5)).await;
        }
    }
}

/// What the directories of peers that are down hold, put together: at every index that two have in common their states are
/// equal, whatever mix of snapshot and log each has come to it by.
async fn same_states(dir: &Path) {
    let mut histories = Vec::new();
    for id in 1..=3u64 {
        let options = DirectoryOptions {
            peer_id: Some(id),
            storage: StorageConfig { disk_reserve_bytes: 0, ..StorageConfig::default() },
            free_space: FreeSpace::default(),
            feature_level: FEATURE_LEVEL,
            skip_sync: SkipSync::default(),
        };
        let contents = directory::open(&dir.join(format!("peer-{id}")), options).unwrap();
        let begun = contents.state_machine.published().current();
        let from = begun.last.map_or(0, |id| id.index + 1);
        let mut state = begun.state.clone();
        // The log id of each index from the snapshot on, and the state it leads to.
        let mut history: BTreeMap<u64, (LogId, u128)> = BTreeMap::new();
        history.extend(begun.last.map(|id| (id.index, (id, state.digest()))));
        for entry in contents.log.read(from.., usize::MAX).await.unwrap() {
            match &entry.payload {
                Payload::Blank => {}
                Payload::Normal(command) => drop(state.apply(entry.log_id.leader_id.term, command.command().unwrap())),
                Payload::Membership(members) => {
                    state.set_members(members.nodes().map(|(id, member)| (*id, member.incarnation.as_str())));
                }
            }
            history.insert(entry.log_id.index, (entry.log_id, state.digest()));
        }
        contents.log.close().await;
        println!("peer {id}: a snapshot at {:?}, {} entries behind it", begun.last, history.len());
        histories.push(history);
    }
    let mut last_shared = None;
    for (n, history) in histories.iter().enumerate() {
        // Every one that two of them share, not only the last.
        for (at, (id, digest)) in history {
            for other in &histories[n + 1..] {
                if let Some((other_id, other_digest)) = other.get(at)
                    && other_id == id
                {
                    assert_eq!(digest, other_digest, "the states at {id} differ");
                    last_shared = last_shared.max(Some(*at));
                }
            }
        }
    }
    // One may have been left behind by the others' snapshots; what was acknowledged, two have.
    println!("the states are equal up to index {}", last_shared.expect("an index that two of them have"));
}

async fn all_there(store: &Arc<dyn MetaStore>, run: &str, acknowledged: Vec<String>) {
    let deadline = Instant::now() + PATIENCE;
    let found = store.list_all(&format!("/kv/{run}/"), ReadOptions::default(), deadline).await.unwrap().value;
    let found: std::collections::HashSet<String> = found.into_iter().map(|e| e.key).collect();
    let lost: Vec<_> = acknowledged.iter().filter(|key| !found.contains(*key)).collect();
    assert!(lost.is_empty(), "{} of {} acknowledged writes are lost: {lost:?}", lost.len(), acknowledged.len());
    println!("{run}: all {} acknowledged writes are there", acknowledged.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_are_killed_under_load() {
    let mut processes = Processes::founded(300).await;
    let store: Arc<dyn MetaStore> = Arc::new(processes.store());
    let load = Load::start(store.clone(), 8, "leaders");
    load.goes_on().await;
    let mut gaps = Vec::new();
    for _ in 0..5 {
        let leader = processes.leader().await;
        load.goes_on().await;
        load.longest_gap_ms.store(0, Ordering::SeqCst);
        processes.kill(leader);
        load.goes_on().await;
        gaps.push(load.longest_gap_ms.load(Ordering::SeqCst));
        processes.spawn(leader);
        eventually("the old leader to be back", async || {
            let status = processes.cluster(leader).status(v1::StatusRequest {}).await.ok()?.into_inner();
            (status.stage() == v1::status_response::Stage::Member).then_some(())
        })
        .await;
    }
    gaps.sort_unstable();
    println!("milliseconds without a commit per killed leader: {gaps:?}");
    all_there(&store, "leaders", load.finish().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_peers_are_killed_at_once_under_load() {
    let mut processes = Processes::founded(300).await;
    let store: Arc<dyn MetaStore> = Arc::new(processes.store());
    let load = Load::start(store.clone(), 8, "all");
    let busy: Vec<_> =
        (0..2).map(|worker| tokio::spawn(busy_with_scopes(store.clone(), load.stop.clone(), worker))).collect();
    for _ in 0..3 {
        // Over a snapshot and a purge each time.
        load.grows_by(500).await;
        for id in 1..=3 {
            processes.kill(id);
        }
        for id in 1..=3 {
            processes.spawn(id);
        }
    }
    load.goes_on().await;
    all_there(&store, "all", load.finish().await).await;
    futures::future::join_all(busy).await;
    for id in 1..=3 {
        processes.kill(id);
    }
    same_states(processes.root()).await;
}
