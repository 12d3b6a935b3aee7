//! A way to a node that can be cut.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Passes bytes on until it is cut; then every connection is, and new ones end at once.
pub struct Proxy {
    pub address: SocketAddr,
    cut: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn to(node: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, is_cut) = watch::channel(false);
        let task = tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                tokio::spawn(pass_on(from, node, is_cut.clone()));
            }
        });
        Self { address, cut, task }
    }

    pub fn cut(&self) {
        self.cut.send_replace(true);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass_on(mut from: TcpStream, node: SocketAddr, mut is_cut: watch::Receiver<bool>) {
    let passing = async {
        let Ok(mut to) = TcpStream::connect(node).await else { return };
        // However it ends, it has ended.
        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
    };
    tokio::select! {
        biased;
        _ = is_cut.wait_for(|cut| *cut) => {}
        () = passing => {}
    }
}
