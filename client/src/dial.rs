//! How connections are made: over TCP, or, in a simulation, over its network.

use std::fmt;
use std::io;
use std::sync::Arc;

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint, Uri};

/// Bytes to and from somebody.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// A connection that is being made.
pub type Connecting = BoxFuture<'static, io::Result<Box<dyn Connection>>>;

/// Makes connections. Cheap to clone; over TCP by default.
#[derive(Clone, Default)]
pub struct Dialer {
    dial: Option<Arc<dyn Fn(String) -> Connecting + Send + Sync>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("tcp", &self.is_tcp()).finish()
    }
}

impl Dialer {
    /// Connects to a `host:port` by this function.
    pub fn new(dial: impl Fn(String) -> Connecting + Send + Sync + 'static) -> Self {
        Self { dial: Some(Arc::new(dial)) }
    }

    /// Whether connections are made by the system, and not by a simulation.
    pub(crate) fn is_tcp(&self) -> bool {
        self.dial.is_none()
    }

    /// A channel that connects when it is first used, and again when that broke.
    pub fn channel(&self, endpoint: &Endpoint) -> Channel {
        let Some(dial) = self.dial.clone() else { return endpoint.connect_lazy() };
        endpoint.connect_with_connector_lazy(tower::service_fn(move |uri: Uri| {
            let connecting = dial(uri.authority().map(ToString::to_string).unwrap_or_default());
            async move { connecting.await.map(TokioIo::new) }
        }))
    }
}
