//! The stores that are lake's own do what every store does.

use std::sync::Arc;

use crate::support::TestCluster;
use lake_client::conformance;
use lake_metasrv::EmbeddedStore;

#[tokio::test(flavor = "multi_thread")]
async fn a_store_in_this_process_does_what_a_store_does() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    conformance::run(store.clone()).await;
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_does_what_a_store_does() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    conformance::run(Arc::new(cluster.client())).await;
    cluster.stop_all().await;
}
