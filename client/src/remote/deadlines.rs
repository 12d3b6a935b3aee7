//! Every call ends by its deadline, also where somebody takes connections and never says anything.

use futures::FutureExt;
use futures::future::{LocalBoxFuture, join_all};

use super::scope::ScopeGuard;
use super::*;
use crate::store::Token;

/// What a call may take, and how long one is waited for that takes more.
const SHORT: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test]
async fn every_call_ends_by_its_deadline_and_nothing_was_applied() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = silent.local_addr().unwrap().to_string();
    let remote = RemoteStore::connect(RemoteConfig { endpoints: vec![endpoint.clone()], secret: None }).unwrap();
    let store: &dyn MetaStore = &remote;
    let (fresh, by) = (ReadOptions::default(), clock::now() + SHORT);
    let keys = ["/kv/a".to_owned(), "/kv/b".to_owned()];
    let lease = Lease { id: 7, ttl: Duration::from_secs(5), held_until: by };
    let snapshot = Snapshot::from_wire(7).unwrap();
    let paths = || vec!["/a".to_owned()];
    let blind = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
    let calls: Vec<(&str, LocalBoxFuture<'_, Option<Error>>)> = vec![
        ("get", store.get("/kv/a", fresh, by).map(Result::err).boxed_local()),
        ("batch_get", store.batch_get(&keys, fresh, by).map(Result::err).boxed_local()),
        ("list", store.list("/kv/", None, 0, fresh, by).map(Result::err).boxed_local()),
        ("list_all", store.list_all("/kv/", fresh, by).map(Result::err).boxed_local()),
        ("open_snapshot", store.open_snapshot(fresh, by).map(Result::err).boxed_local()),
        ("close_snapshot", store.close_snapshot(snapshot, by).map(Result::err).boxed_local()),
        ("commit", store.commit(blind, by).map(Result::err).boxed_local()),
        ("cas", store.cas("/kv/a", None, "1".into(), by).map(Result::err).boxed_local()),
        ("cas_delete", store.cas_delete("/kv/a", Token::at(7), by).map(Result::err).boxed_local()),
        ("watch from now on", store.watch("/kv/", 0, by).map(Result::err).boxed_local()),
        ("watch", store.watch("/kv/", 7, by).map(Result::err).boxed_local()),
        ("grant_lease", store.grant_lease(lease.ttl, "a test", by).map(Result::err).boxed_local()),
        ("renew_lease", store.renew_lease(lease, by).map(Result::err).boxed_local()),
        ("revoke_lease", store.revoke_lease(7, by).map(Result::err).boxed_local()),
        ("ask_leader", remote.ask_leader(by).map(Result::err).boxed_local()),
        ("all_leases", remote.all_leases(fresh, by).map(Result::err).boxed_local()),
        ("open_session", remote.open_session(lease.ttl, "a test", by).map(Result::err).boxed_local()),
        ("close_session", remote.close_session(7, by).map(Result::err).boxed_local()),
        ("all_scopes", remote.all_scopes("/a", fresh, by).map(Result::err).boxed_local()),
        ("acquiring", ScopeGuard::acquire(&remote, paths(), lease.ttl, "a test", by).map(Result::err).boxed_local()),
        ("waiting", ScopeGuard::wait_for(&remote, paths(), lease.ttl, "a test", by).map(Result::err).boxed_local()),
        ("set_quota", remote.set_quota("/kv/", Some(1), by).map(Result::err).boxed_local()),
        ("quotas", remote.quotas(fresh, by).map(Result::err).boxed_local()),
        ("shards", remote.shards(by).map(Result::err).boxed_local()),
        ("join", remote.join(v1::Member::default(), by).map(Result::err).boxed_local()),
        ("transfer_leader", remote.transfer_leader(None, by).map(Result::err).boxed_local()),
    ];
    let ended = calls.into_iter().map(async |(what, call)| (what, tokio::time::timeout(PATIENCE, call).await));
    for (what, ended) in join_all(ended).await {
        let error = ended.unwrap_or_else(|_| panic!("{what} does not end")).expect(what);
        assert!(error.is_unavailable() && error.applied() == Applied::No, "{what}: {error:?}");
        assert!(error.to_string().contains(&endpoint), "{what}: {error}");
    }
}
