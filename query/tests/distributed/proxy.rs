//! A way to a node that can be cut.

use std::net::SocketAddr;
use std::pin::pin;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    /// Connections stay, and nothing comes through.
    Silent,
    /// They end, and so do new ones.
    Cut,
}

/// Passes bytes on until it is silenced or cut.
pub struct Proxy {
    pub address: SocketAddr,
    way: watch::Sender<Way>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn to(node: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (way, is) = watch::channel(Way::Open);
        let task = tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                tokio::spawn(pass_on(from, node, is.clone()));
            }
        });
        Self { address, way, task }
    }

    pub fn silence(&self) {
        self.way.send_replace(Way::Silent);
    }

    pub fn cut(&self) {
        self.way.send_replace(Way::Cut);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass_on(mut from: TcpStream, node: SocketAddr, mut way: watch::Receiver<Way>) {
    let mut passing = pin!(async {
        let Ok(mut to) = TcpStream::connect(node).await else { return };
        // However it ends, it has ended.
        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
    });
    tokio::select! {
        biased;
        _ = way.wait_for(|way| *way != Way::Open) => {}
        () = &mut passing => return,
    }
    // Both ends are held until it is cut.
    let _ = way.wait_for(|way| *way == Way::Cut).await;
}
