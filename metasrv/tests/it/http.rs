//! What probes and Prometheus are told.

use std::collections::BTreeMap;
use std::io::ErrorKind::WouldBlock;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::support::purging::{Worker, purge, soon, until};
use crate::support::{TestCluster, eventually, figure, http, http_get as get};
use lake_client::catalog::{Catalog, TableIdent, TablePointer};
use lake_client::procedures::calls;
use lake_client::procedures::{Record, State};
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::remote::node::NodeKeeper;
use lake_client::secret::Secret;
use lake_client::store::MetaStore;
use lake_client::warehouse::Profile;
use lake_metasrv::http::MAX_CONNECTIONS;
use lake_metasrv::peer::procedures::machine::Pace;
use lake_metasrv::state::FEATURE_LEVEL;
use lake_proto::coordination::{LeaseId, ScopeOwner};
use lake_proto::kv::{Compare, Op, Txn};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread")]
async fn live_and_ready_are_told_apart() {
    let mut cluster =
        TestCluster::fresh(3, |config| config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)))).await;
    let address = |cluster: &TestCluster, id: u64| cluster.running[&id].http_address().unwrap();
    assert_eq!(get(address(&cluster, 1), "/live").await.0, 200);
    let (code, why) = get(address(&cluster, 1), "/ready").await;
    assert!(code == 503 && why.contains("belongs to no cluster"), "{code} {why}");
    let supported = format!("lake_metasrv_supported_feature_level {FEATURE_LEVEL}");
    let (_, fresh) = get(address(&cluster, 1), "/metrics").await;
    assert!(fresh.lines().any(|line| line == supported), "{fresh}");

    cluster.init(1).await.unwrap();
    let leader = cluster.leader().await;
    for id in 1..=3 {
        eventually("every peer to be ready", async || {
            (get(address(&cluster, id), "/ready").await.0 == 200).then_some(())
        })
        .await;
    }
    cluster.put("/kv/a", "1").await;
    for id in 1..=3 {
        let in_force = format!("lake_metasrv_feature_level {FEATURE_LEVEL}");
        eventually("every peer to say at which feature level it is", async || {
            let metrics = get(address(&cluster, id), "/metrics").await.1;
            (metrics.lines().any(|line| line == in_force) && metrics.lines().any(|l| l == supported)).then_some(())
        })
        .await;
    }
    let (code, metrics) = get(address(&cluster, leader), "/metrics").await;
    assert_eq!(code, 200);
    for line in ["lake_metasrv_is_leader 1", "lake_metasrv_voters 3", "lake_metasrv_keys 1", "lake_metasrv_failed 0"] {
        assert!(metrics.lines().any(|l| l == line), "{line} is missing from:\n{metrics}");
    }
    assert!(metrics.contains("# TYPE lake_metasrv_leases_granted_total counter"), "{metrics}");
    assert!(metrics.contains("lake_metasrv_lag_entries{peer="), "{metrics}");
    cluster.get(leader, "/kv/a").await;
    let (_, after) = get(address(&cluster, leader), "/metrics").await;
    for what in ["commit_seconds", "read_index_seconds", "journal_sync_seconds"] {
        let name = format!("lake_metasrv_{what}_count");
        let count = after.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse::<f64>().ok());
        assert!(count.is_some_and(|count| count >= 1.0), "{name}: {count:?} in\n{after}");
    }
    assert!(after.contains("lake_metasrv_commit_seconds_bucket{le=\"0.001\"}"), "{after}");
    assert_eq!(get(address(&cluster, leader), "/else").await.0, 404);

    // Whoever only connects keeps no other probe out for long: it has its part, and what is more is closed.
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(TcpStream::connect(address(&cluster, leader)).await.unwrap());
    }
    eventually("more than a host's part to be closed", async || {
        let open = |connection: &TcpStream| connection.try_read(&mut [0; 1]).is_err_and(|e| e.kind() == WouldBlock);
        (idle.iter().filter(|connection| open(connection)).count() <= MAX_CONNECTIONS / 2).then_some(())
    })
    .await;
    drop(idle);
    eventually("probes to be answered again", async || {
        let answered = tokio::spawn(get(address(&cluster, leader), "/live")).await;
        answered.is_ok_and(|(code, _)| code == 200).then_some(())
    })
    .await;

    // Without a quorum a peer is alive, and not ready: a restart would not help it.
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    eventually("the peer that is left to know of no leader", async || {
        let (code, why) = get(address(&cluster, leader), "/ready").await;
        (code == 503 && why.contains("no leader")).then_some(())
    })
    .await;
    assert_eq!(get(address(&cluster, leader), "/live").await, (200, "live\n".to_owned()));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_of_scopes_and_fences_is_counted() {
    let mut cluster =
        TestCluster::founded(3, |config| config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)))).await;
    let store = cluster.client();
    let counted = async || {
        // Counted where it was proposed: the lead may move.
        let names = ["acquired_total", "acquired_seconds_total", "contended_total", "taken_total"];
        let names = names.map(|name| format!("lake_metasrv_scopes_{name}")).into_iter();
        let mut sums = Vec::new();
        for name in names.chain(["lake_metasrv_fences_refused_total".to_owned()]) {
            let mut sum = 0.0;
            for server in cluster.running.values() {
                sum += figure(server.http_address().unwrap(), &name).await;
            }
            sums.push(sum);
        }
        sums
    };
    assert_eq!(counted().await, [0.0; 5]);

    let acquire = async |owner: LeaseId| {
        let owner = ScopeOwner::Lease(owner);
        let free = Compare::scope_free("/catalog/a", Some(owner.clone()));
        let then = vec![Op::AcquireScope { path: "/catalog/a".to_owned(), owner }];
        let txn = Txn { when: vec![free], then, ..Txn::default() };
        store.commit(txn, soon()).await.unwrap().result.succeeded
    };
    let grant = async |ttl: u64| store.grant_lease(Duration::from_secs(ttl), "a test", soon()).await.unwrap();
    let holder = grant(4).await;
    let over = holder.id;
    let keeper = LeaseKeeper::start(store.clone(), holder);
    let heir = grant(60).await;
    assert!(acquire(over).await);
    let [acquired, took, contended, taken, refused] = counted().await[..] else { panic!("five figures") };
    // What is asked for again behind a lost answer is counted again.
    assert!(acquired >= 1.0 && took > 0.0, "{acquired} scopes in {took} s");
    assert_eq!([contended, taken, refused], [0.0; 3]);

    assert!(!acquire(heir.id).await, "it is another's");
    let now = counted().await;
    assert!(now[2] >= 1.0 && now[3..] == [0.0; 2], "{now:?}");

    // It is taken from its holder when that falls silent, whoever comes next.
    keeper.stop().await;
    eventually("the scope to be taken", async || (counted().await[3] >= 1.0).then_some(())).await;
    assert!(acquire(heir.id).await);
    let zombie = Txn { when: vec![Compare::lease_alive(over)], then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
    assert!(!store.commit(zombie, soon()).await.unwrap().result.succeeded);
    let now = counted().await;
    assert!(now[0] > acquired && now[1] > took && now[4] >= 1.0, "{now:?}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_and_change_what_is_coordinated() {
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut cluster = TestCluster::founded(3, |config| {
        config.http_listen = Some(any_port);
        config.pace = Pace { first_retry: Duration::from_millis(10), max_failures: 2, ..Pace::retaining(0) };
    })
    .await;
    let leader = cluster.leader().await;
    let address = |id: u64| cluster.running[&id].http_address().unwrap();
    let ask = async |method: &str, path: &str| http(address(leader), method, path, "").await;
    let store = cluster.client();
    // Before there are shards a dry run is refused as what it is one of.
    eventually("it to be refused", async || {
        let (code, why) = ask("POST", "/v1/shards/maintenance/on?dry_run=true").await;
        (code == 400 && why.contains("no shards yet")).then_some(())
    })
    .await;
    let worker = NodeKeeper::start(cluster.client(), "w", Worker::new());
    let other_worker = NodeKeeper::start(cluster.client(), "x", Worker::new());

    // Where there is a secret, not without it; and never for a page that a browser shows.
    let listener = TcpListener::bind(any_port).await.unwrap();
    let (guarded, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
    let secret = Secret::new("0123456789abcdef").unwrap();
    let peer = cluster.running[&leader].peer().clone();
    let serving = tokio::spawn(lake_metasrv::http::serve(peer, listener, Some(secret.clone()), stop.clone()));
    let bearer = format!("Authorization: {}\r\n", secret.bearer());
    let page = format!("{bearer}Origin: http://elsewhere\r\n");
    let wrong = "Authorization: Bearer 0123456789abcdeF\r\n";
    for (headers, code) in [("", 401), (wrong, 401), (page.as_str(), 403), (bearer.as_str(), 200)] {
        for (method, path) in [("GET", "/v1/nodes"), ("GET", "/v1/procedures")] {
            assert_eq!(http(guarded, method, path, headers).await.0, code, "{headers}");
        }
        assert_eq!(http(guarded, "GET", "/live", headers).await.0, 200);
    }
    assert_eq!(http(guarded, "POST", "/v1/shards/maintenance/on", wrong).await.0, 401);
    assert_eq!(http(address(leader), "POST", "/v1/shards/balance", "Origin: http://elsewhere\r\n").await.0, 403);
    stop.cancel();
    serving.await.unwrap().unwrap();
    // Another peer says who leads.
    let other = (1..=3).find(|id| *id != leader).unwrap();
    let (code, told) = get(address(other), "/v1/nodes").await;
    assert!(code == 421 && told.contains(&cluster.configs[&leader].listen.to_string()), "{code} {told}");
    assert_eq!(ask("GET", "/v1/shards?dry=1").await.0, 400);

    let listed = eventually("both nodes to be up", async || {
        let (code, listed) = ask("GET", "/v1/nodes").await;
        (code == 200 && listed.matches("\"state\":\"up\"").count() == 2).then_some(listed)
    })
    .await;
    assert!(listed.contains("\"node\":\"w\"") && listed.contains("\"roles\":[\"worker\"]"), "{listed}");
    assert_eq!(ask("GET", "/v1/nodes/w").await.0, 200);
    assert_eq!(ask("GET", "/v1/nodes/nobody").await.0, 404);

    // Where "w" and "x" have halves, one goes by hand.
    let halves = eventually("each to have its half", async || {
        ask("POST", "/v1/shards/balance?dry_run=false").await;
        let (_, listed) = ask("GET", "/v1/shards").await;
        let of = |node: &str| listed.matches(&format!("\"node\":\"{node}\"")).count();
        (of("w") > 0 && of("w") == of("x")).then_some(listed)
    })
    .await;
    assert!(halves.contains("\"maintenance\":false"), "{halves}");
    // All of them, where that is asked for.
    let (code, would) = ask("POST", "/v1/nodes/x/drain/on?dry_run=true").await;
    assert!(code == 200 && !would.contains("\"shards\":[]"), "{code} {would}");
    assert_eq!(ask("POST", "/v1/nodes/nobody/drain/on").await.0, 404);
    assert!(ask("GET", "/v1/drained").await.1.contains("\"drained\":[]"));
    assert_eq!(ask("POST", "/v1/nodes/x/drain/on").await.0, 200);
    eventually("x to have none", async || {
        let (_, listed) = ask("GET", "/v1/shards").await;
        (!listed.contains("\"node\":\"x\"")).then_some(())
    })
    .await;
    let (code, refused) = ask("POST", "/v1/shards/0/move/x").await;
    assert!(code == 400 && refused.contains("is drained"), "{code} {refused}");
    assert!(ask("GET", "/v1/drained").await.1.contains("\"drained\":[\"x\"]"));
    assert_eq!(ask("POST", "/v1/nodes/x/drain/off").await.0, 200);
    let (code, would) = ask("POST", "/v1/shards/maintenance/on?dry_run=true").await;
    assert!(code == 200 && would.contains("\"would_change\":true"), "{code} {would}");
    assert_eq!(ask("POST", "/v1/shards/maintenance/on").await.0, 200);
    let (_, would) = ask("POST", "/v1/shards/maintenance/on?dry_run=true").await;
    assert!(would.contains("\"would_change\":false") && would.contains("\"revision\":null"), "{would}");
    let (_, first) = ask("GET", "/v1/shards/0").await;
    let to = if first.contains("\"node\":\"w\"") { "x" } else { "w" };
    let path = format!("/v1/shards/0/move/{to}");
    let (code, would) = ask("POST", &format!("{path}?dry_run=true")).await;
    assert!(code == 200 && would.contains("\"dry_run\":true") && would.contains("\"fence\":null"), "{code} {would}");
    let has = async || ask("GET", "/v1/shards/0").await.1.contains(&format!("\"node\":\"{to}\""));
    assert!(!has().await, "it was only told");
    let (code, moved) = ask("POST", &path).await;
    assert!(code == 200 && !moved.contains("\"fence\":null") && has().await, "{code} {moved}");
    assert_eq!(ask("POST", "/v1/shards/balance?dry_run=true").await.0, 200);
    assert_eq!(ask("POST", "/v1/shards/0/move/nobody").await.0, 400);
    assert_eq!(ask("GET", "/v1/shards/4000").await.0, 404);

    // A procedure that is poisoned is looked into, and given up.
    let (id, record) = purge("damaged");
    calls::submit(&store, &id, &record, soon()).await.unwrap();
    until(&store, &id, |record| record.state == State::Poisoned).await;
    let (_, listed) = ask("GET", "/v1/procedures?active=true").await;
    assert!(listed.contains(&id) && listed.contains("\"state\":\"poisoned\""), "{listed}");
    let one = format!("/v1/procedures/{id}");
    assert!(ask("GET", &one).await.1.contains("cannot be deleted"));
    let (_, would) = ask("POST", &format!("{one}/cancel?dry_run=true")).await;
    assert!(would.contains("\"accepted\":false") && would.contains("it is poisoned"), "{would}");
    let (_, would) = ask("POST", &format!("{one}/clear/give-up?dry_run=true")).await;
    assert!(would.contains("\"accepted\":true") && would.contains("1 scopes go"), "{would}");
    assert_eq!(calls::get(&store, &id, soon()).await.unwrap().unwrap().record.state, State::Poisoned);
    let (code, given_up) = ask("POST", &format!("{one}/clear/give-up")).await;
    assert!(code == 200 && given_up.contains("\"state\":\"failed\""), "{code} {given_up}");

    // One that has not begun to delete is cancelled.
    let later = Record { due_ms: Some(u64::MAX), accepted_ms: Some(0), ..purge("later").1 };
    calls::submit(&store, "later", &later, soon()).await.unwrap();
    let (_, would) = ask("POST", "/v1/procedures/later/cancel?dry_run=true").await;
    assert!(would.contains("\"accepted\":true") && would.contains("ends as cancelled"), "{would}");
    assert_eq!(ask("POST", "/v1/procedures/later/cancel").await.0, 200);
    until(&store, "later", |record| record.state == State::Cancelled).await;
    assert_eq!(ask("GET", "/v1/procedures/nothing").await.0, 404);

    // Upkeep of a table; nobody is left who would do it.
    drop((worker, other_worker));
    let catalog = Catalog::new(Arc::new(cluster.client()));
    let table = TableIdent::new("a".parse().unwrap(), "t").unwrap();
    let uuid = uuid::Uuid::new_v4();
    let pointer = TablePointer { uuid, metadata_location: "file:///t".to_owned(), previous_location: None };
    catalog.create_namespace(&table.namespace, BTreeMap::new(), soon()).await.unwrap();
    catalog.create_table(&table, &pointer, soon()).await.unwrap();
    let path = "/v1/procedures/start/expire-snapshots/a/t";
    let (code, would) = ask("POST", &format!("{path}?dry_run=true")).await;
    assert!(code == 200 && would.contains("\"procedure\":null"), "{code} {would}");
    assert!(!ask("GET", "/v1/procedures").await.1.contains("expire_snapshots a.t"), "it was only told");
    let (code, started) = ask("POST", path).await;
    assert!(code == 200 && started.contains("expire_snapshots a.t"), "{code} {started}");
    // Another peer does nothing of that, and says who would.
    let listen = cluster.configs[&leader].listen.to_string();
    for change in ["start/expire-snapshots/a/t", "later/cancel", "later/clear/retry"] {
        let path = format!("/v1/procedures/{change}");
        let (code, told) = http(address(other), "POST", &path, "").await;
        assert!(code == 421 && told.contains(&listen), "{path}: {code} {told}");
        assert_eq!(http(address(other), "POST", &format!("{path}?dry_run=true"), "").await.0, 200, "{path}");
    }
    assert_eq!(http(address(other), "POST", "/v1/nodes/x/drain/on", "").await.0, 421);
    for (path, code) in
        [("start/expire-snapshots/a/u", 404), ("start/drop/a/t", 400), ("start/expire-snapshots/a//t", 404)]
    {
        assert_eq!(ask("POST", &format!("/v1/procedures/{path}")).await.0, code, "{path}");
    }

    // A warehouse goes, with nothing in it.
    catalog.create_warehouse("old", &Profile::new("file:///old", None).unwrap(), soon()).await.unwrap();
    let path = "/v1/procedures/purge-warehouse/old";
    let (code, would) = ask("POST", &format!("{path}?dry_run=true")).await;
    let nothing = "\"would_drop\":{\"namespaces\":0,\"tables\":0,\"views\":0}";
    assert!(code == 200 && would.contains("\"procedure\":null") && would.contains(nothing), "{code} {would}");
    assert!(catalog.warehouses(soon()).await.unwrap().profiles.contains_key("old"), "it was only told");
    assert_eq!(http(address(other), "POST", path, "").await.0, 421);
    let (code, begun) = ask("POST", path).await;
    assert!(code == 200 && begun.contains("\"kind\":\"purge_warehouse\""), "{code} {begun}");
    eventually("the warehouse to go", async || {
        (!catalog.warehouses(soon()).await.ok()?.profiles.contains_key("old")).then_some(())
    })
    .await;
    assert_eq!(ask("POST", path).await.0, 404);
    cluster.stop_all().await;
}
