//! Sessions over three peers: a mutation that is sent twice happens once, whoever leads.

use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster, eventually, kind};
use futures::StreamExt;
use lake_proto::coordination::Stamp;
use lake_proto::kv::{Op, Txn};
use lake_proto::limits::SESSION_WINDOW;
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::sessions_client::SessionsClient;
use tonic::{Request, Status};

/// A machine may be busy with other things for half of it.
const TTL: Duration = Duration::from_secs(10);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A blind put that says what it replaced: sent twice without a stamp it would do something else the second time.
fn put(key: &str, value: &str, session: u64, sequence: u64, lowest_unanswered: u64) -> v1::TxnRequest {
    let op = Op::Put { key: key.into(), value: value.to_owned().into(), return_previous: true, lease: None };
    let txn = Txn { then: vec![op], ..Txn::default() };
    let stamp = Stamp { session, sequence, lowest_unanswered };
    v1::TxnRequest { txn: Some(txn.into()), stamp: Some(stamp.into()) }
}

/// Sends a request until somebody has answered it or refused it for what it is. A stamped one may be sent again.
async fn send(cluster: &TestCluster, request: v1::TxnRequest) -> Result<v1::TxnResponse, Status> {
    let deadline = soon();
    loop {
        let mut heard = Vec::new();
        for id in cluster.running.keys() {
            let mut request = Request::new(request.clone());
            // A leader that lost its quorum keeps what was proposed for as long as it may.
            request.set_timeout(Duration::from_secs(3));
            match cluster.kv(*id).txn(request).await {
                Ok(response) => return Ok(v1::TxnResponse { header: None, ..response.into_inner() }),
                Err(status) if !elsewhere(&status) => return Err(status),
                Err(status) => heard.push(format!("peer {id}: {:?}: {}", status.code(), status.message())),
            }
        }
        assert!(Instant::now() < deadline, "waited in vain for an answer: {heard:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether another peer may answer, or this one later.
fn elsewhere(status: &Status) -> bool {
    lake_proto::status::detail(status).is_none_or(|detail| matches!(detail.kind(), Kind::NotLeader | Kind::Unavailable))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_sent_again_to_the_next_leader_gets_the_first_answer() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let session = store.open_session(TTL * 12, "a test", soon()).await.unwrap();
    let leader = cluster.leader().await;
    assert!(send(&cluster, put("/kv/n", "1", session, 1, 1)).await.unwrap().succeeded);
    let first = send(&cluster, put("/kv/n", "2", session, 2, 1)).await.unwrap();
    cluster.stop(leader).await;
    let next = cluster.leader().await;
    assert_ne!(next, leader);
    let again = send(&cluster, put("/kv/n", "2", session, 2, 1)).await.unwrap();
    assert_eq!(again, first);
    let entry = cluster.get(next, "/kv/n").await.unwrap();
    assert_eq!((&entry.value[..], entry.version, entry.mod_revision), (&b"2"[..], 2, first.revision));

    let third = send(&cluster, put("/kv/n", "3", session, 3, 3)).await.unwrap();
    assert!(third.revision > first.revision);
    let answered = send(&cluster, put("/kv/n", "2", session, 2, 1)).await.unwrap_err();
    assert_eq!(kind(&answered), Kind::InvalidArgument, "the client has said that it knows the answer");
    assert_eq!(&cluster.get(next, "/kv/n").await.unwrap().value[..], b"3");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_window_refuses_and_goes_on_once_something_is_answered() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let session = cluster.client().open_session(TTL * 12, "", soon()).await.unwrap();
    // A few at a time: each opens connections of its own, and a storm of them would unseat the leader.
    let sending = (1..=SESSION_WINDOW).map(|n| send(&cluster, put("/kv/n", "1", session, n, 1)));
    let mut sending = futures::stream::iter(sending).buffer_unordered(8);
    while let Some(sent) = sending.next().await {
        assert!(sent.unwrap().succeeded);
    }
    drop(sending);
    let over = SESSION_WINDOW + 1;
    let refused = send(&cluster, put("/kv/n", "1", session, over, 1)).await.unwrap_err();
    let detail = lake_proto::status::detail(&refused).unwrap();
    assert_eq!((detail.kind(), detail.applied()), (Kind::LimitReached, Applied::NotApplied));
    assert!(refused.message().contains("256"), "{}", refused.message());
    assert!(send(&cluster, put("/kv/n", "1", session, over, 2)).await.unwrap().succeeded);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_session_ends_and_one_that_speaks_does_not() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let opened = Instant::now();
    let silent = store.open_session(TTL, "silent", soon()).await.unwrap();
    let speaks = store.open_session(TTL, "speaks", soon()).await.unwrap();
    let kept = store.open_session(TTL, "kept alive", soon()).await.unwrap();
    let mut sequence = 0;
    // Nothing else raises the revision by two with one mutation: a session has ended.
    let mut before = None;
    let ended = loop {
        sequence += 1;
        let revision = send(&cluster, put("/kv/n", "1", speaks, sequence, sequence)).await.unwrap().revision;
        let alive = keep_alive(&cluster, vec![kept]).await;
        assert_eq!(alive.alive, [kept]);
        if before.is_some_and(|before| revision > before + 1) {
            break Instant::now();
        }
        before = Some(revision);
        assert!(opened.elapsed() < PATIENCE, "waited in vain for a session to end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(ended - opened >= TTL, "it ended after {:?}", ended - opened);
    let expired = send(&cluster, put("/kv/n", "late", silent, 1, 1)).await.unwrap_err();
    assert_eq!(kind(&expired), Kind::SessionExpired);
    assert_eq!(&cluster.get(1, "/kv/n").await.unwrap().value[..], b"1", "nothing ran");
    for (session, sequence) in [(speaks, sequence + 1), (kept, 1)] {
        assert!(send(&cluster, put("/kv/n", "2", session, sequence, sequence)).await.unwrap().succeeded);
    }
    assert!(store.close_session(kept, soon()).await.unwrap());
    assert!(!store.close_session(kept, soon()).await.unwrap());
    let answer = keep_alive(&cluster, vec![speaks, kept, silent]).await;
    assert_eq!((answer.alive, answer.expired), (vec![speaks], vec![kept, silent]));
    cluster.stop_all().await;
}

/// One message to whoever leads, on a stream of its own.
async fn keep_alive(cluster: &TestCluster, ids: Vec<u64>) -> v1::KeepAliveResponse {
    let ask = async |at: u64| {
        let messages = tokio_stream::iter([v1::KeepAliveRequest { ids: ids.clone(), tag: 1 }]);
        let mut answers = SessionsClient::new(cluster.channel(at)).keep_alive(messages).await?.into_inner();
        answers.message().await
    };
    eventually("a keep-alive's answer", async || {
        for id in cluster.running.keys() {
            if let Ok(answer) = ask(*id).await {
                return Some(answer.expect("one message, one answer"));
            }
        }
        None
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_granted_and_revoked_twice_under_one_stamp_is_one() {
    use lake_proto::v1::leases_client::LeasesClient;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let session = cluster.client().open_session(TTL * 12, "", soon()).await.unwrap();
    let leader = cluster.leader().await;
    let stamp = |sequence| Some(v1::Stamp { session, sequence, lowest_unanswered: 1 });
    let grant = v1::GrantLeaseRequest { ttl_ms: 60_000, holder: "twice".into(), stamp: stamp(1) };
    let grant_once = async |cluster: &TestCluster| {
        eventually("a grant", async || {
            for id in cluster.running.keys() {
                let granted = LeasesClient::new(cluster.channel(*id)).grant(grant.clone()).await;
                if let Ok(granted) = granted {
                    return Some(granted.into_inner().id);
                }
            }
            None
        })
        .await
    };
    let granted = grant_once(&cluster).await;
    cluster.stop(leader).await;
    assert_eq!(grant_once(&cluster).await, granted);
    let next = cluster.leader().await;
    let list = v1::ListLeasesRequest::default();
    let list = LeasesClient::new(cluster.channel(next)).list(list).await.unwrap().into_inner().leases;
    assert_eq!(list.iter().map(|lease| lease.id).collect::<Vec<_>>(), [granted]);
    for _ in 0..2 {
        let revoked = eventually("a revocation", async || {
            for id in cluster.running.keys() {
                let revoke = v1::RevokeLeaseRequest { id: granted, stamp: stamp(2) };
                if let Ok(revoked) = LeasesClient::new(cluster.channel(*id)).revoke(revoke).await {
                    return Some(revoked.into_inner());
                }
            }
            None
        })
        .await;
        assert!(revoked.existed, "the first answer, both times");
    }
    cluster.stop_all().await;
}
