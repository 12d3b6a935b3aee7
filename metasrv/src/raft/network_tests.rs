//! Connections to the other peers: how many there are, and how a snapshot goes over one.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body as _;
use lake_client::dial::Connection;
use tokio::sync::{Notify, mpsc};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use super::*;

/// A peer that takes nothing of a stream until it is told to, and then all of it.
#[derive(Clone)]
struct HeldBack {
    goes_on: Arc<Notify>,
    /// How many bytes it has taken, in the end.
    taken: mpsc::UnboundedSender<u64>,
}

impl NamedService for HeldBack {
    const NAME: &'static str = "lake.v1.Raft";
}

impl Service<http::Request<Body>> for HeldBack {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            this.goes_on.notified().await;
            let (mut body, mut bytes) = (request.into_body(), 0);
            while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                bytes += frame.unwrap().data_ref().map_or(0, Bytes::len) as u64;
            }
            this.taken.send(bytes).unwrap();
            Ok(Status::unimplemented("it only takes").into_http())
        })
    }
}

/// How long a transfer may go on that has a chunk accepted every `every`, `chunks` times, and then is `whole` or stands.
async fn given_up_after(chunks: u32, every: Duration, whole: bool) -> Duration {
    let (accepted, progress) = watch::channel(0);
    let began = tokio::time::Instant::now();
    let stalled = tokio::spawn(stalled(progress));
    for _ in 0..chunks {
        tokio::time::sleep(every).await;
        accepted.send_modify(|chunks| *chunks += 1);
    }
    let accepted = (!whole).then_some(accepted);
    stalled.await.unwrap();
    drop(accepted);
    Duration::from_secs(began.elapsed().as_secs())
}

#[tokio::test]
async fn connections_are_bounded_whoever_is_asked_for() {
    let transport = Transport::new(HashMap::new(), None);
    let known = || lock(&transport.inner.channels).len();
    for id in 1..=10 * MAX_CHANNELS as u64 {
        transport.client(id, "127.0.0.1:1").unwrap();
        assert!(known() <= MAX_CHANNELS);
    }
    let before = known();
    transport.client(10 * MAX_CHANNELS as u64, "127.0.0.1:1").unwrap();
    assert_eq!(known(), before, "one that is there is taken again");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_may_take_as_long_as_it_moves_on() {
    let slow = SNAPSHOT_STALL / 2;
    let hours = 720 * slow;
    assert_eq!(given_up_after(720, slow, true).await, hours + SNAPSHOT_INSTALL);
    assert_eq!(given_up_after(720, slow, false).await, hours + SNAPSHOT_STALL);
    assert_eq!(given_up_after(0, slow, false).await, SNAPSHOT_STALL);
}

// The clock is paused: it moves on only once nothing is left to be done, also by threads that read the disk.
#[tokio::test(start_paused = true)]
async fn a_sender_of_a_snapshot_reads_no_further_than_its_receiver_has_room() {
    const CHUNKS: u64 = 64;
    let (near, far) = tokio::io::duplex(64 << 10);
    let near = Mutex::new(Some(near));
    let dialer = Dialer::new(move |_| {
        let near = lock(&near).take().ok_or_else(|| io::Error::other("there is one connection"));
        async move { near.map(|near| Box::new(near) as Box<dyn Connection>) }.boxed()
    });
    let goes_on = Arc::new(Notify::new());
    let (told, mut taken) = mpsc::unbounded_channel();
    let incoming = futures::stream::iter([Ok::<_, io::Error>(far)]).chain(futures::stream::pending());
    let peer = HeldBack { goes_on: goes_on.clone(), taken: told };
    let serving = tokio::spawn(crate::server::builder(PING_EVERY).add_service(peer).serve_with_incoming(incoming));

    let file = tempfile::tempfile().unwrap();
    file.set_len(CHUNKS * SNAPSHOT_CHUNK_BYTES as u64).unwrap();
    let (accepted, progress) = watch::channel(0);
    let messages = snapshot_messages(v1::SnapshotHeader::default(), file, accepted);
    let mut client = Transport::new(HashMap::new(), None).dialing(dialer).client(2, "127.0.0.1:1").unwrap();
    let sending = tokio::spawn(async move { client.snapshot(messages).await });

    let mut read = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if std::mem::replace(&mut read, *progress.borrow()) == read && read > 0 {
            break;
        }
    }
    // Those that the receiver has room for (4 MiB), and those in hand.
    assert!(read <= 8, "{read} of {CHUNKS} chunks are in memory");
    goes_on.notify_one();
    assert!(taken.recv().await.unwrap() > CHUNKS * SNAPSHOT_CHUNK_BYTES as u64);
    assert_eq!(*progress.borrow(), CHUNKS);
    sending.await.unwrap().unwrap_err();
    serving.abort();
}
