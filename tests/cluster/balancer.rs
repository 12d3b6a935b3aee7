//! A load balancer as small as can be: connections go to whichever node takes them.
//!
//! ```text
//!   a connection --> the next node in turn that accepts one within CONNECT_WITHIN, asked for up to PATIENCE
//!                      `-- bytes both ways until one side ends; then both are closed
//! ```
//! It knows nothing of HTTP, so what is under way when a node dies is cut, for the client to see.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::common::PATIENCE;

const CONNECT_WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

/// Serves until it is dropped.
pub struct Balancer {
    pub address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Balancer {
    pub async fn start(nodes: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (nodes, turn) = (Arc::new(nodes), Arc::new(AtomicUsize::new(0)));
        let serving = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let (mut client, _) = accepted.unwrap();
                        let (nodes, turn) = (nodes.clone(), turn.clone());
                        connections.spawn(async move {
                            if let Some(mut node) = next(&nodes, &turn).await {
                                let _ = tokio::io::copy_bidirectional(&mut client, &mut node).await;
                            }
                        });
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Self { address, serving }
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// A connection to the next node that takes one.
async fn next(nodes: &[String], turn: &AtomicUsize) -> Option<TcpStream> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let first = turn.fetch_add(1, Ordering::Relaxed);
        for i in 0..nodes.len() {
            let connecting = TcpStream::connect(&nodes[(first + i) % nodes.len()]);
            if let Ok(Ok(node)) = tokio::time::timeout(CONNECT_WITHIN, connecting).await {
                return Some(node);
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    None
}
