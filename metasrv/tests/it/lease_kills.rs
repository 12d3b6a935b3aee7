//! Leases when the leader is killed, or paused and woken again. Peers are processes of their own here.

use std::time::{Duration, Instant};

use crate::support::processes::Processes;
use crate::support::{PATIENCE, eventually};
use lake_client::remote::RemoteStore;
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::leases_client::LeasesClient;
use rustix::process::Signal;

/// Peers, and a client of theirs.
struct Peers {
    processes: Processes,
    store: RemoteStore,
}

impl Peers {
    async fn founded() -> Self {
        Self::founded_by(3).await
    }

    async fn founded_by(count: u64) -> Self {
        let processes = Processes::founded_by(count, 100_000).await;
        let store = processes.store();
        Self { processes, store }
    }

    async fn hang(&self, key: &str, lease: u64) {
        let txn = Txn {
            when: vec![Compare::lease_alive(lease)],
            then: vec![Op::put_leased(key, "v", lease)],
            otherwise: vec![],
        };
        let done = eventually("a commit", async || self.store.commit(txn.clone(), soon()).await.ok()).await;
        assert!(done.result.succeeded);
    }

    async fn is_there(&self, key: &str) -> bool {
        self.store.get(key, ReadOptions::default(), soon()).await.unwrap().value.is_some()
    }

    async fn remaining_ms(&self, at: u64, lease: u64) -> Option<u64> {
        let list = LeasesClient::new(self.processes.channel(at))
            .list(v1::ListLeasesRequest::default())
            .await
            .ok()?
            .into_inner();
        list.leases.into_iter().find(|l| l.id == lease)?.remaining_ms
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_ends_no_lease_early_and_saves_none_for_ever() {
    let mut peers = Peers::founded().await;
    let ttl = Duration::from_secs(8);
    let silent = peers.store.grant_lease(ttl, "silent", soon()).await.unwrap();
    peers.hang("/kv/silent", silent.id).await;
    let kept = peers.store.grant_lease(ttl * 3, "kept", soon()).await.unwrap();
    peers.hang("/kv/kept", kept.id).await;
    let keeper = LeaseKeeper::start(peers.store.clone(), kept);
    let leader = eventually("half of its time to pass", async || {
        let leader = peers.processes.leader().await;
        peers.remaining_ms(leader, silent.id).await.filter(|left| *left < 4000).map(|_| leader)
    })
    .await;
    let killed = Instant::now();
    peers.processes.kill(leader);
    eventually("the silent lease to end", async || (!peers.is_there("/kv/silent").await).then_some(())).await;
    let lived = killed.elapsed();
    println!("the silent lease of {ttl:?} ended {lived:?} after its leader was killed");
    assert!(lived >= ttl, "the new leader did not give it its full time");
    assert!(keeper.is_held() && peers.is_there("/kv/kept").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_paused_and_woke_ends_nothing_that_its_successor_keeps() {
    let peers = Peers::founded().await;
    let lease = peers.store.grant_lease(Duration::from_secs(12), "kept", soon()).await.unwrap();
    peers.hang("/kv/kept", lease.id).await;
    let keeper = LeaseKeeper::start(peers.store.clone(), lease);
    let old = peers.processes.leader().await;
    let term = eventually("its term", async || peers.processes.status(old).await).await.term;
    peers.processes.signal(old, Signal::STOP);
    // As the old leader counts, the lease is over when it wakes.
    let over = Instant::now() + lease.ttl;
    peers.processes.leader_besides(&[old]).await;
    eventually("renewals by the new leader", async || (keeper.held_until() > over + lease.ttl).then_some(())).await;
    peers.processes.signal(old, Signal::CONT);
    eventually("the old leader to learn of it", async || {
        let asked = peers.processes.cluster(old).leader(v1::LeaderRequest::default()).await.ok()?.into_inner();
        (asked.term > term).then_some(())
    })
    .await;
    let later = Instant::now() + lease.ttl;
    eventually("more renewals", async || (keeper.held_until() > later).then_some(())).await;
    assert!(keeper.is_held() && peers.is_there("/kv/kept").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_paused_and_not_deposed_gives_every_lease_its_full_time() {
    // Nobody else can lead.
    let peers = Peers::founded_by(1).await;
    let ttl = Duration::from_millis(6000);
    let lease = peers.store.grant_lease(ttl, "silent", soon()).await.unwrap();
    peers.hang("/kv/silent", lease.id).await;
    peers.processes.signal(1, Signal::STOP);
    let over = Instant::now() + ttl + Duration::from_millis(200);
    eventually("the lease's time to be over", async || (Instant::now() > over).then_some(())).await;
    let woken = Instant::now();
    peers.processes.signal(1, Signal::CONT);
    assert!(peers.is_there("/kv/silent").await, "whoever kept it alive meanwhile could not be heard");
    eventually("the lease to end", async || (!peers.is_there("/kv/silent").await).then_some(())).await;
    let lived = woken.elapsed();
    assert!(lived >= ttl, "it ended {lived:?} after its leader woke");
}
