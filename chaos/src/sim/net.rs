//! Connections over the simulated network, for the client's and the server's ends.

use std::io;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use lake_client::dial::{Connection, Dialer};
use lake_metasrv::server::Listening;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;
use turmoil::net::{TcpListener, TcpStream};

/// Connects to hosts of the simulation by their names.
pub fn dialer() -> Dialer {
    Dialer::new(|to| {
        Box::pin(async move {
            let stream = TcpStream::connect(to).await?;
            Ok(Box::new(stream) as Box<dyn Connection>)
        })
    })
}

/// Listens on the current host.
///
/// # Errors
/// The port is taken.
pub async fn listen(port: u16) -> io::Result<Listening<impl Stream<Item = io::Result<Accepted>> + Send + 'static>> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?;
    let address = listener.local_addr()?;
    let incoming = futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Accepted(stream));
        Some((accepted, listener))
    });
    Ok(Listening { address, incoming })
}

/// A connection that somebody made to a peer.
#[derive(Debug)]
pub struct Accepted(TcpStream);

impl Connected for Accepted {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Accepted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
