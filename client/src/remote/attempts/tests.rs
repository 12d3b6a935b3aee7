//! What a failed attempt means, and what follows from it.

use std::sync::atomic::{AtomicU32, Ordering};

use lake_proto::v1;

use super::*;
use crate::remote::RemoteConfig;
use crate::store::Leader;

#[test]
fn what_another_attempt_can_mend_is_tried_again_and_nothing_else() {
    let failed = |kind, applied| classify(status::status(kind, applied, "why"));
    for kind in [Kind::NotLeader, Kind::Unavailable, Kind::Overloaded] {
        assert!(failed(kind, WireApplied::NotApplied).retry, "{kind:?}");
    }
    for kind in [
        Kind::InvalidArgument,
        Kind::LimitReached,
        Kind::QuotaExceeded,
        Kind::SessionExpired,
        Kind::SnapshotExpired,
        Kind::Compacted,
    ] {
        let failure = failed(kind, WireApplied::NotApplied);
        assert!(!failure.retry && failure.applied == Applied::No, "{kind:?}");
        let error = ended(vain(&failure), &failure, false);
        let typed = match kind {
            Kind::SessionExpired => matches!(error, Error::SessionExpired { .. }),
            Kind::SnapshotExpired => matches!(error, Error::SnapshotExpired { .. }),
            Kind::Compacted => matches!(error, Error::Compacted { .. }),
            _ => matches!(error, Error::Refused { .. }),
        };
        assert!(typed && error.applied() == Applied::No, "{error}");
        let told = error.to_string();
        assert!(told.contains("why (3 attempts in 1.2 s, no leader known in term 6)"), "{told}");
    }
    assert_eq!(failed(Kind::Unavailable, WireApplied::Unknown).applied, Applied::Unknown);
    let proxy = classify(Status::unavailable("a proxy said so"));
    assert!(proxy.retry && proxy.broken && proxy.applied == Applied::Unknown);
    let elsewhere = classify(Status::unimplemented(""));
    assert!(!elsewhere.retry && elsewhere.applied == Applied::No, "nothing there ran it");
    let error = ended(vain(&elsewhere), &elsewhere, false).to_string();
    assert!(error.contains("something else than a metadata peer"), "{error}");
    assert!(error.contains("3 attempts in 1.2 s, no leader known in term 6"), "{error}");
}

/// Three attempts, of which the last one ended so.
fn vain(failure: &Failure) -> InVain {
    InVain {
        doing: "a test".to_owned(),
        attempts: 3,
        elapsed: Duration::from_millis(1200),
        leader: Leader::Unknown { term: 6 },
        last: describe(&failure.status),
    }
}

#[test]
fn a_caller_in_a_hurry_does_not_take_the_connection_from_the_others() {
    let hurried = Failure::silent(Duration::from_millis(50));
    assert!(!hurried.broken && hurried.retry && hurried.applied == Applied::Unknown);
    assert!(Failure::silent(ATTEMPT_TIMEOUT).broken);
    for (within, broken) in [(Duration::from_millis(50), false), (ATTEMPT_TIMEOUT, true)] {
        let unsent = classify(NotSent(within).into());
        assert!(unsent.retry && unsent.applied == Applied::No && unsent.broken == broken, "{within:?}");
    }
}

#[tokio::test]
async fn peers_that_name_each_other_are_not_asked_without_end() {
    let endpoints = vec!["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
    let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
    let member = |id: u64| v1::Member { id, grpc_address: format!("127.0.0.1:{id}"), ..v1::Member::default() };
    store.inner.lock().view.learn(5, Some(&member(1)));
    let asked = AtomicU32::new(0);
    let send = async |address: String, _| {
        asked.fetch_add(1, Ordering::SeqCst);
        let other = if address.ends_with(":1") { 2 } else { 1 };
        let hint = v1::ErrorDetail {
            kind: Kind::NotLeader as i32,
            term: 5,
            leader: Some(member(other)),
            ..Default::default()
        };
        Err::<(), _>(status::with_detail(hint, "another peer leads"))
    };
    let deadline = clock::now() + Duration::from_millis(300);
    let error = store.on_leader("a test", deadline, Rules::RESENDABLE, send).await.unwrap_err();
    assert!(error.is_unavailable() && error.applied() == Applied::No, "{error}");
    // Ten pauses or so fit into that time.
    assert!(asked.load(Ordering::SeqCst) < 100, "{asked:?}");
}

#[tokio::test]
async fn a_leader_that_has_too_much_to_do_is_not_asked_about() {
    let endpoints = vec!["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
    let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
    let member = v1::Member { id: 1, grpc_address: "127.0.0.1:1".to_owned(), ..v1::Member::default() };
    store.inner.lock().view.learn(5, Some(&member));
    let asked = AtomicU32::new(0);
    let send = async |address: String, _| {
        assert!(address.ends_with(":1"), "{address}");
        match asked.fetch_add(1, Ordering::SeqCst) {
            0..3 => Err(status::status(Kind::Overloaded, WireApplied::NotApplied, "too much")),
            _ => Ok(()),
        }
    };
    let deadline = clock::now() + Duration::from_secs(30);
    let (_, in_doubt) = store.on_leader("a test", deadline, Rules::STAMPED, send).await.unwrap();
    assert!(!in_doubt && asked.load(Ordering::SeqCst) == 4);
    let view = &store.inner.lock().view;
    assert_eq!(view.leader().map(|leader| leader.id), Some(1));
    assert_eq!(view.question(clock::now()).wait, Duration::ZERO);
}

/// What comes of an operation whose attempts fail so, one after the other. What a quota refuses, the state machine keeps.
async fn after(rules: Rules, failures: &[(Kind, WireApplied)]) -> Error {
    let store = RemoteStore::connect(RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None });
    let store = store.unwrap();
    let member = v1::Member { id: 1, grpc_address: "127.0.0.1:1".to_owned(), ..v1::Member::default() };
    let asked = AtomicU32::new(0);
    let send = async |_, _| {
        let n = asked.fetch_add(1, Ordering::SeqCst) as usize;
        let (kind, applied) = failures[n];
        // What failed is asked again all the same.
        store.inner.lock().view.learn(5 + n as u64, Some(&member));
        let detail = v1::ErrorDetail {
            kind: kind as i32,
            applied: applied as i32,
            kept: kind == Kind::QuotaExceeded,
            term: 6 + n as u64,
            leader: Some(v1::Member { grpc_address: "127.0.0.1:2".to_owned(), ..member.clone() }),
            ..Default::default()
        };
        Err::<(), _>(status::with_detail(detail, "why"))
    };
    store.inner.lock().view.learn(4, Some(&member));
    store.on_leader("a test", clock::now() + Duration::from_secs(60), rules, send).await.unwrap_err()
}

#[tokio::test]
async fn a_refusal_after_a_lost_answer_leaves_the_doubt() {
    use WireApplied::{NotApplied, Unknown};
    for kind in [Kind::SessionExpired, Kind::InvalidArgument, Kind::WrongIdentity, Kind::LimitReached] {
        let error = after(Rules::STAMPED, &[(Kind::Unavailable, Unknown), (kind, NotApplied)]).await;
        assert!(matches!(error, Error::InDoubt { attempts: 2, .. }), "{kind:?}: {error:?}");
        assert_eq!(error.applied(), Applied::Unknown);
    }
    let once = after(Rules::ONCE, &[(Kind::Unavailable, Unknown)]).await;
    assert!(once.is_unavailable() && once.applied() == Applied::Unknown, "{once:?}");
}

#[tokio::test]
async fn a_read_whose_answer_was_lost_leaves_no_doubt() {
    use WireApplied::{NotApplied, Unknown};
    // A page's snapshot is held by the peer that gave the page before, which died.
    let expired = after(Rules::READ, &[(Kind::Unavailable, Unknown), (Kind::SnapshotExpired, NotApplied)]).await;
    assert!(matches!(expired, Error::SnapshotExpired { .. }), "{expired:?}");
    let refused = after(Rules::READ, &[(Kind::Unavailable, Unknown), (Kind::InvalidArgument, NotApplied)]).await;
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
}

#[tokio::test]
async fn a_refusal_that_is_the_first_result_of_a_stamped_request_leaves_none() {
    let failures = [(Kind::Unavailable, WireApplied::Unknown), (Kind::QuotaExceeded, WireApplied::NotApplied)];
    let stamped = after(Rules::STAMPED, &failures).await;
    assert!(matches!(stamped, Error::Refused { .. }), "{stamped:?}");
    let unstamped = after(Rules::RESENDABLE, &failures).await;
    assert_eq!(unstamped.applied(), Applied::Unknown, "{unstamped:?}");
}
