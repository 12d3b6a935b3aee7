//! Connections over the simulated network, for the client's and the server's ends, and an account of what is sent on them.
//!
//! [`Ways`] counts what is given to the network on each way from one host to another, and how much of that while the way was
//! cut: so a cut shows that it met something, and not only that it was asked for.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::Stream;
use lake_client::dial::{Connection, Dialer};
use lake_metasrv::server::Listening;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;
use turmoil::net::{TcpListener, TcpStream};

/// From one host to another, by their names.
pub type Way = (String, String);

/// What was sent on each way. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Ways {
    ways: Arc<Mutex<BTreeMap<Way, Arc<Traffic>>>>,
    /// Messages on all of them.
    sent: Arc<AtomicU64>,
}

/// On one way.
#[derive(Debug, Default)]
struct Traffic {
    is_cut: AtomicBool,
    /// Messages that were sent while it was cut, and attempts to connect among them.
    met: AtomicU64,
}

impl Ways {
    fn traffic(&self, way: &Way) -> Arc<Traffic> {
        let mut ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        ways.entry(way.clone()).or_default().clone()
    }

    fn from(&self, from: &str, to: &str) -> Sender {
        Sender { traffic: self.traffic(&(from.to_owned(), to.to_owned())), sent: self.sent.clone() }
    }

    /// Whether a way is cut from now on.
    pub fn cut(&self, way: &Way, is_cut: bool) {
        self.traffic(way).is_cut.store(is_cut, Ordering::Relaxed);
    }

    /// Messages that met a cut on these ways so far.
    pub fn met<'a>(&self, ways: impl IntoIterator<Item = &'a Way>) -> u64 {
        ways.into_iter().map(|way| self.traffic(way).met.load(Ordering::Relaxed)).sum()
    }

    /// Messages that were sent so far, on all ways.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Connects the host of this name to others of the simulation, by their names.
    pub fn dialer(&self, own: &str) -> Dialer {
        let (ways, own) = (self.clone(), own.to_owned());
        Dialer::new(move |to| {
            let sender = ways.from(&own, to.split_once(':').map_or(to.as_str(), |(host, _)| host));
            Box::pin(async move {
                sender.count();
                let stream = TcpStream::connect(to).await?;
                Ok(Box::new(Wire { stream, sender }) as Box<dyn Connection>)
            })
        })
    }

    /// Listens on the current host, which has this name.
    ///
    /// # Errors
    /// The port is taken.
    pub async fn listen(
        &self,
        own: String,
        port: u16,
    ) -> io::Result<Listening<impl Stream<Item = io::Result<Wire>> + Send + 'static + use<>>> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?;
        let address = listener.local_addr()?;
        let ways = self.clone();
        let incoming = futures::stream::unfold((listener, ways, own), |(listener, ways, own)| async move {
            let accepted = listener.accept().await.map(|(stream, from)| {
                let who = turmoil::reverse_lookup(from.ip()).unwrap_or_else(|| from.ip().to_string());
                Wire { stream, sender: ways.from(&own, &who) }
            });
            Some((accepted, (listener, ways, own)))
        });
        Ok(Listening { address, incoming })
    }
}

/// Counts what is sent on one way.
#[derive(Debug)]
struct Sender {
    traffic: Arc<Traffic>,
    sent: Arc<AtomicU64>,
}

impl Sender {
    fn count(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
        if self.traffic.is_cut.load(Ordering::Relaxed) {
            self.traffic.met.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    sender: Sender,
}

impl Connected for Wire {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if matches!(written, Poll::Ready(Ok(bytes)) if bytes > 0) {
            self.sender.count();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_sent_while_a_way_is_cut_has_met_the_cut() {
        let ways = Ways::default();
        let (there, back) = (("p1".to_owned(), "p2".to_owned()), ("p2".to_owned(), "p1".to_owned()));
        let (one, other) = (ways.from("p1", "p2"), ways.from("p2", "p1"));
        one.count();
        ways.cut(&there, true);
        one.count();
        other.count();
        assert_eq!((ways.met([&there]), ways.met([&back]), ways.met([&there, &back]), ways.sent()), (1, 0, 1, 3));
        ways.cut(&there, false);
        one.count();
        assert_eq!(ways.met([&there]), 1);
        // A connection that was made before knows of a cut that comes later.
        ways.cut(&back, true);
        other.count();
        assert_eq!(ways.met([&back]), 1);
    }
}
