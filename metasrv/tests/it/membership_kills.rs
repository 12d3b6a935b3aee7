//! Peers as processes of their own, killed and paused while the cluster changes: no joint membership stays behind, no
//! acknowledged write is lost, a snapshot cut off in the middle is sent again, and a leader that slept through its own
//! deposition serves nothing old.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::processes::Processes;
use crate::support::{PATIENCE, eventually};
use lake_client::remote::RemoteStore;
use lake_client::store::{Error, MetaStore};
use lake_proto::kv::{Expected, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::status_response::Stage;
use rustix::process::Signal;
use tonic::Request;
use tonic::transport::Channel;

/// How long a change may take with peers being killed around it.
const CHANGE: Duration = Duration::from_secs(120);

/// Waits until a peer serves, and has applied as much as the leader had.
async fn serves(processes: &Processes, id: u64) {
    let leader = processes.leader().await;
    let revision = eventually("the leader's status", async || processes.status(leader).await).await.revision;
    eventually(&format!("peer {id} to have everything"), async || {
        processes.status(id).await.filter(|s| s.stage() == Stage::Member && s.revision >= revision)
    })
    .await;
}

/// What is in a peer's directory of snapshots while it receives one.
fn receiving(processes: &Processes, id: u64) -> Option<PathBuf> {
    let entries = std::fs::read_dir(processes.dir(id).join("snapshots")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("receiving-"))
            && path.metadata().is_ok_and(|m| m.len() > 0)
    })
}

/// Resident memory.
fn resident_mib(processes: &Processes, id: u64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", processes.peers.pid(id).unwrap())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() >> 10
}

fn ids(members: &[v1::Member]) -> BTreeSet<u64> {
    members.iter().map(|m| m.id).collect()
}

async fn put(store: &RemoteStore, key: &str, value: Vec<u8>) {
    let txn = Txn { then: vec![Op::put(key, value)], ..Txn::default() };
    let until = Instant::now() + PATIENCE;
    loop {
        // The same value however often: a lost answer does no harm.
        match store.commit(txn.clone(), until).await {
            Ok(_) => return,
            Err(error) => assert!(error.is_unavailable() && Instant::now() < until, "{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_are_killed_while_voters_are_swapped() {
    let mut processes = Processes::founded(300).await;
    let mut voters: BTreeSet<u64> = (1..=3).collect();
    let mut caught_in_the_middle = 0;
    let mut total = 0;
    for (round, fresh) in (4..=8u64).enumerate() {
        processes.spawn(fresh);
        let load = Load::start(Arc::new(processes.store()), 4, &format!("swap-{round}"));
        load.grows_by(30).await;
        let leader = processes.leader().await;
        let old = *voters.iter().find(|id| **id != leader).unwrap();
        let (store, by) = (processes.store(), processes.named(fresh));
        let swap = tokio::spawn(async move {
            let until = Instant::now() + CHANGE;
            loop {
                match store.replace(old, by.clone(), until).await {
                    Ok(_) => return,
                    Err(error) => assert!(Instant::now() < until, "{error}"),
                }
            }
        });
        // As soon as the leader says that the voters are being changed, or that they were; each round a little later.
        eventually("the swap to begin", async || {
            let status = processes.status(leader).await?;
            (status.changing_voters || ids(&status.voters).contains(&fresh)).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(round as u64)).await;
        processes.kill(leader);
        for id in processes.peers.running() {
            caught_in_the_middle += u64::from(processes.status(id).await.is_some_and(|s| s.changing_voters));
        }
        if !tokio::time::timeout(CHANGE, swap).await.is_ok_and(|ended| ended.is_ok()) {
            let mut seen = Vec::new();
            for id in processes.peers.running() {
                seen.push((id, processes.status(id).await));
            }
            panic!("the swap of {old} for {fresh} does not end: {seen:#?}");
        }
        processes.spawn(leader);
        voters.remove(&old);
        voters.insert(fresh);
        for id in &voters {
            eventually(&format!("peer {id} to see the voters {voters:?}"), async || {
                let status = processes.status(*id).await?;
                (ids(&status.voters) == voters && status.learners.is_empty() && !status.changing_voters).then_some(())
            })
            .await;
        }
        // The one that was swapped out is told, and ends.
        processes.peers.ended(old, PATIENCE).await.unwrap_or_else(|e| panic!("{e}"));
        load.grows_by(30).await;
        total += load.finish().await;
    }
    println!("five swaps, {caught_in_the_middle} looks at a survivor in the middle of one, {total} writes");
}

/// Whether the answer came at last; another change under way, or a leader that is gone, is asked again.
fn at_last<T>(answer: Result<T, Error>, until: Instant) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(error) => {
            assert!(Instant::now() < until, "{error}");
            None
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_are_killed_while_peers_join_are_promoted_and_removed() {
    let mut processes = Processes::founded(300).await;
    let fresh = 4;
    processes.spawn(fresh);
    let load = Load::start(Arc::new(processes.store()), 4, "growth");
    load.grows_by(30).await;
    let mut removed = 0;
    // Each change begins at a leader that is killed as soon as that shows; it is asked for until it is done.
    for change in ["join", "promote", "remove"] {
        let leader = processes.leader().await;
        if change == "remove" {
            removed = (1..=3).find(|id| *id != leader).unwrap();
        }
        let (store, named) = (processes.store(), processes.named(fresh));
        let changing = tokio::spawn(async move {
            let until = Instant::now() + CHANGE;
            loop {
                let done = match change {
                    "join" => at_last(store.join(named.clone(), until).await, until).map(drop),
                    // That it has not caught up is an answer, too.
                    "promote" => at_last(store.promote(fresh, until).await, until).filter(|p| p.voter).map(drop),
                    _ => at_last(store.remove(removed, false, until).await, until).map(drop),
                };
                if done.is_some() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        eventually(&format!("the {change} to show at the leader"), async || {
            let status = processes.status(leader).await?;
            let shows = match change {
                "join" => ids(&status.learners).contains(&fresh),
                "promote" => ids(&status.voters).contains(&fresh),
                _ => !ids(&status.voters).contains(&removed),
            };
            shows.then_some(())
        })
        .await;
        processes.kill(leader);
        let ended = tokio::time::timeout(CHANGE, changing).await;
        assert!(ended.is_ok_and(|ended| ended.is_ok()), "the {change} does not end");
        processes.spawn(leader);
        load.grows_by(30).await;
    }
    let voters: BTreeSet<u64> = (1..=4).filter(|id| *id != removed).collect();
    for id in &voters {
        eventually(&format!("peer {id} to see the voters {voters:?}"), async || {
            let status = processes.status(*id).await?;
            (ids(&status.voters) == voters && status.learners.is_empty() && !status.changing_voters).then_some(())
        })
        .await;
    }
    // The one that was removed is told, and ends.
    processes.peers.ended(removed, PATIENCE).await.unwrap_or_else(|e| panic!("{e}"));
    load.grows_by(30).await;
    load.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_slept_through_its_deposition_serves_nothing_old() {
    let processes = Processes::founded(300).await;
    let store = processes.store();
    let load = Load::start(Arc::new(processes.store()), 4, "zombie");
    load.grows_by(30).await;
    let mut answered = 0;
    for round in 0..3u32 {
        let zombie = processes.leader().await;
        put(&store, "/kv/zombie", format!("old {round}").into_bytes()).await;
        let term = eventually("its term", async || processes.status(zombie).await).await.term;
        processes.signal(zombie, Signal::STOP);
        let leader = processes.leader_besides(&[zombie]).await;
        println!("peer {leader} leads instead of {zombie}");
        let new = format!("new {round}");
        put(&store, "/kv/zombie", new.clone().into_bytes()).await;

        // These wait at its door, and are what it sees first when it wakes.
        let kv = KvClient::new(processes.channel(zombie));
        let read = async |kv: &mut KvClient<Channel>| {
            let mut request = Request::new(v1::GetRequest { key: "/kv/zombie".into(), options: None });
            request.set_timeout(Duration::from_secs(5));
            kv.get(request).await.ok().and_then(|answer| answer.into_inner().entry)
        };
        let waiting: Vec<_> = (0..8)
            .map(|_| {
                let mut kv = kv.clone();
                tokio::spawn(async move {
                    let mut request = Request::new(v1::GetRequest { key: "/kv/zombie".into(), options: None });
                    request.set_timeout(Duration::from_secs(10));
                    kv.get(request).await.ok().and_then(|answer| answer.into_inner().entry)
                })
            })
            .collect();
        let key = format!("/kv/from-zombie/{round}");
        let write = {
            let (mut kv, txn) = (kv.clone(), Txn::cas(&key, Expected::Absent, "z"));
            tokio::spawn(async move {
                let mut request = Request::new(v1::TxnRequest { txn: Some(txn.into()), stamp: None });
                request.set_timeout(Duration::from_secs(10));
                kv.txn(request).await
            })
        };
        tokio::time::sleep(Duration::from_millis(50)).await;
        processes.signal(zombie, Signal::CONT);
        for entry in futures::future::join_all(waiting).await.into_iter().flat_map(Result::unwrap) {
            assert_eq!(entry.value, new.as_bytes(), "a stale read from the old leader");
            answered += 1;
        }
        // What it acknowledges is there; what it refuses as not applied is not.
        let written = write.await.unwrap();
        let there = store.get(&key, Default::default(), Instant::now() + PATIENCE).await.unwrap().value.is_some();
        match &written {
            Ok(answer) => assert!(there && answer.get_ref().succeeded, "an acknowledged write is lost"),
            Err(status) => {
                let applied = lake_proto::status::detail(status).map(|detail| detail.applied());
                let refused = applied == Some(v1::error_detail::Applied::NotApplied);
                assert!(!(refused && there), "refused, and yet applied: {status:?}");
            }
        }
        eventually("the old leader to follow", async || {
            let status = processes.status(zombie).await?;
            (status.term > term && status.leader.is_some_and(|l| l.id != zombie || status.term > term + 1))
                .then_some(())
        })
        .await;
        assert_eq!(eventually("a read from the old leader", async || read(&mut kv.clone()).await).await.value, new);
        println!("peer {zombie} slept, peer {leader} led; the write sent to the sleeper: {:?}", written.map(drop));
        load.grows_by(30).await;
    }
    assert!(answered > 0, "no read was answered at the old leader's door");
    println!("{answered} of 24 reads that waited at the old leader's door were answered, none with anything old");
    load.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_cut_off_in_the_middle_is_sent_again() {
    const KEYS: usize = 40;
    let mut processes = Processes::founded(16).await;
    let store = processes.store();
    let leader = processes.leader().await;
    let behind = (1..=3).find(|id| *id != leader).unwrap();
    let mut generation = 0u8;
    // The receiver is killed, then the sender.
    for kill_sender in [false, true] {
        let mut attempts = 0;
        loop {
            attempts += 1;
            assert!(attempts <= 10, "no snapshot was ever seen on its way");
            let had = processes.status(behind).await.map_or(0, |status| status.last_log_index);
            processes.kill(behind);
            generation += 1;
            for key in 0..KEYS {
                put(&store, &format!("/kv/{key:02}"), vec![generation; 1 << 20]).await;
            }
            let last = generation;
            // What it lacks has gone from the log. A snapshot may wait for its turn before.
            let leads = processes.leader_besides(&[behind]).await;
            eventually("the log to be purged", async || {
                put(&store, "/kv/more", vec![0]).await;
                (processes.status(leads).await?.purged_index > had).then_some(())
            })
            .await;
            processes.spawn(behind);
            let until = Instant::now() + Duration::from_secs(10);
            let seen = loop {
                if let Some(path) = receiving(&processes, behind) {
                    break Some(path);
                }
                if Instant::now() > until {
                    break None;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            };
            let Some(path) = seen else { continue };
            let victim = if kill_sender { processes.leader_besides(&[behind]).await } else { behind };
            let arrived = path.metadata().map(|file| file.len()).ok();
            processes.kill(victim);
            println!(
                "killed peer {victim} ({}), {arrived:?} bytes of {} MiB and more had arrived at peer {behind}",
                if kill_sender { "sending" } else { "receiving" },
                KEYS
            );
            if kill_sender {
                serves(&processes, behind).await;
                processes.spawn(victim);
            } else {
                processes.spawn(victim);
                serves(&processes, behind).await;
            }
            let mut kv = KvClient::new(processes.channel(behind)).max_decoding_message_size(64 << 20);
            for key in 0..KEYS {
                let options = v1::ReadOptions {
                    consistency: v1::read_options::Consistency::Local as i32,
                    ..v1::ReadOptions::default()
                };
                let request = v1::GetRequest { key: format!("/kv/{key:02}"), options: Some(options) };
                let value = kv.get(request).await.unwrap().into_inner().entry.unwrap().value;
                assert!(value.len() == 1 << 20 && value.iter().all(|b| *b == last), "key {key} is torn or old");
            }
            eventually("what was cut off to be gone", async || (!path.exists()).then_some(())).await;
            if arrived.is_some() {
                break;
            }
        }
    }
    for id in 1..=3 {
        serves(&processes, id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_is_down_for_long_does_not_grow_the_leader() {
    // Nobody else leads meanwhile: it is one process that is measured.
    let mut processes = Processes::calm(32).await;
    let store = processes.store();
    let leader = processes.leader().await;
    let down = (1..=3).find(|id| *id != leader).unwrap();
    processes.kill(down);
    let write = async |mebibytes: u64| {
        for n in 0..mebibytes {
            put(&store, &format!("/kv/{}", n % 8), vec![n as u8; 1 << 20]).await;
        }
    };
    // Until everything that is bounded (kept changes, the log's tail, its cache) is full.
    write(160).await;
    let before = resident_mib(&processes, leader);
    write(240).await;
    let after = resident_mib(&processes, leader);
    println!("the leader's memory: {before} MiB after 160 MiB of writes, {after} MiB after 240 MiB more");
    assert_eq!(processes.leader().await, leader, "the leader is the same throughout");
    assert!(after < before + 120, "the leader grew from {before} to {after} MiB while a follower was down");
    processes.spawn(down);
    serves(&processes, down).await;
}
