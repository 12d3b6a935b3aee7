//! Listeners, connections, and the pumps that carry bytes.
//!
//! One task per link accepts; one task per connection runs two pumps, one each way. A pump reads chunks into a bounded
//! queue with the time at which each may arrive, and writes them out at that time, in order, once the path is not cut. The
//! end of one side is a chunk like any other: it cannot be seen through a cut path.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::condition::{Cut, HELD_BACK};
use super::counts::Counts;
use super::frames::Frames;
use super::owners::Owners;
use super::{Conditions, Node, Path};

/// Most connections on one link; further ones are reset.
pub const MAX_CONNECTIONS: usize = 256;
/// Most bytes in one chunk.
pub const CHUNK_BYTES: usize = 64 << 10;
/// Chunks on their way, per direction of a connection.
pub const QUEUE_CHUNKS: usize = 64;
/// How long connecting to the node behind a link may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// What happened on a path.
#[derive(Debug, Default)]
pub struct Counters {
    passed_bytes: AtomicU64,
    held_bytes: AtomicU64,
    late_chunks: AtomicU64,
    lost_chunks: AtomicU64,
    overtaken_chunks: AtomicU64,
    held_connections: AtomicU64,
    resets: AtomicU64,
    breaks: AtomicU64,
    cut_messages: AtomicU64,
    /// Chunks that have arrived, of all connections: who is held back waits for others to arrive.
    arrived: watch::Sender<u64>,
}

impl Counters {
    pub(super) fn read(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            passed_bytes: of(&self.passed_bytes),
            held_bytes: of(&self.held_bytes),
            late_chunks: of(&self.late_chunks),
            lost_chunks: of(&self.lost_chunks),
            overtaken_chunks: of(&self.overtaken_chunks),
            held_connections: of(&self.held_connections),
            resets: of(&self.resets),
            breaks: of(&self.breaks),
            cut_messages: of(&self.cut_messages),
        }
    }
}

fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

/// One link, as its tasks see it.
#[derive(Clone)]
pub(super) struct Link {
    pub path: Path,
    pub target: watch::Receiver<Option<String>>,
    pub conditions: watch::Receiver<Arc<Conditions>>,
    /// Of all paths.
    pub counters: Arc<BTreeMap<Path, Arc<Counters>>>,
    pub owners: Arc<Owners>,
    pub seed: u64,
}

impl Link {
    /// The path that this connection is on: query nodes come by the clients' link. `None`: nobody knows.
    fn path_of(&self, near: &TcpStream) -> Option<Path> {
        let from = match self.path.0 {
            Node::Clients => self.owners.of(near.peer_addr().ok()?, near.local_addr().ok()?)?,
            from => from,
        };
        Some((from, self.path.1))
    }

    /// One way of a connection.
    fn way(&self, path: Path, rng: StdRng, frames: Frames) -> Way {
        let counters = self.counters.get(&path).cloned().unwrap_or_default();
        Way { path, conditions: self.conditions.clone(), counters, rng, frames }
    }

    fn refuses(&self) -> bool {
        self.conditions.borrow().get(&self.path).is_some_and(|condition| condition.cut == Some(Cut::Refuse))
    }
}

/// Accepts connections until told to stop, and ends them then. While the path refuses, nobody listens.
pub(super) async fn listen(listener: TcpListener, link: Link, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    let mut made = 0u64;
    let mut changes = link.conditions.clone();
    let address = listener.local_addr();
    let mut listening = Some(listener);
    while !stop.is_cancelled() {
        if link.refuses() {
            listening = None;
        } else if listening.is_none() {
            match &address {
                Ok(address) => {
                    listening = TcpListener::bind(address).await.map_err(|e| cannot(&link, "listen", &e)).ok()
                }
                Err(e) => cannot(&link, "listen again", e),
            }
        }
        let accepting = async {
            match &listening {
                Some(listener) => listener.accept().await,
                None if link.refuses() => std::future::pending().await,
                None => Err(std::io::ErrorKind::AddrNotAvailable.into()),
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            changed = changes.changed() => if changed.is_err() { break },
            accepted = accepting => match accepted {
                Ok((near, _)) if connections.len() < MAX_CONNECTIONS => {
                    made += 1;
                    let rng = StdRng::seed_from_u64(link.seed ^ made.rotate_left(32));
                    connections.spawn(connection(near, link.clone(), rng, stop.clone()));
                }
                Ok((near, _)) => {
                    tracing::warn!(from = %link.path.0, to = %link.path.1, "more than {MAX_CONNECTIONS} connections");
                    // It goes away either way.
                    let _ = near.set_zero_linger();
                }
                // Out of file descriptors, or a connection that went away while it was accepted.
                Err(e) => {
                    cannot(&link, "accept", &e);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listening);
    while connections.join_next().await.is_some() {}
}

fn cannot(link: &Link, what: &str, e: &std::io::Error) {
    tracing::warn!(from = %link.path.0, to = %link.path.1, "the proxy cannot {what}: {e}");
}

async fn connection(mut near: TcpStream, link: Link, rng: StdRng, stop: CancellationToken) {
    let Some(path) = link.path_of(&near) else {
        tracing::warn!(to = %link.path.1, "whose a connection is, the kernel does not say: it is reset");
        // It goes away either way.
        let _ = near.set_zero_linger();
        return;
    };
    let mut there = link.way(path, rng, Frames::of_a_client());
    let back_rng = StdRng::from_rng(&mut there.rng);
    let mut back = link.way((path.1, path.0), back_rng, Frames::of_a_server());
    let target = link.target.borrow().clone();
    let carried = tokio::select! {
        () = stop.cancelled() => return,
        carried = carry(&mut near, target, &mut there, &mut back) => carried,
    };
    if carried == End::Reset {
        let _ = near.set_zero_linger();
    }
}

/// How one direction of a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Everything arrived, and so did the end.
    Closed,
    Reset,
}

async fn carry(near: &mut TcpStream, target: Option<String>, there: &mut Way, back: &mut Way) -> End {
    // The first packets of a connection travel both ways.
    if there.pass(Held::Connection).await == End::Reset || back.pass(Held::Connection).await == End::Reset {
        return End::Reset;
    }
    let Some(target) = target else { return End::Reset };
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&target));
    let Ok(Ok(mut far)) = connecting.await else { return End::Reset };
    // Refused by the kernel only for sockets that are closed already.
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let (near_read, near_write) = near.split();
    let (far_read, far_write) = far.split();
    let mut reset_there = there.clone();
    let mut reset_back = back.clone();
    let ended = {
        let both = async {
            let there = pump(near_read, far_write, there);
            let back = pump(far_read, near_write, back);
            tokio::pin!(there, back);
            // A reset, once it arrives, ends both ways.
            tokio::select! {
                end = &mut there => if end == End::Reset { end } else { back.await },
                end = &mut back => if end == End::Reset { end } else { there.await },
            }
        };
        tokio::select! {
            end = both => end,
            () = reset_there.until_reset() => End::Reset,
            () = reset_back.until_reset() => End::Reset,
        }
    };
    if ended == End::Reset {
        let _ = far.set_zero_linger();
    }
    ended
}

/// What waits at a cut.
#[derive(Debug, Clone, Copy)]
enum Held {
    Bytes(usize),
    Connection,
    End,
}

/// One direction of one connection.
#[derive(Clone)]
struct Way {
    path: Path,
    conditions: watch::Receiver<Arc<Conditions>>,
    counters: Arc<Counters>,
    rng: StdRng,
    frames: Frames,
}

impl Way {
    /// Waits while the path is cut silently. Reset: it is cut so that both sides are told.
    async fn pass(&mut self, what: Held) -> End {
        let mut counted = false;
        loop {
            match self.conditions.borrow_and_update().get(&self.path).and_then(|c| c.cut) {
                None => return End::Closed,
                Some(cut) if cut.is_told() => {
                    count(&self.counters.resets, 1);
                    return End::Reset;
                }
                Some(_) => {}
            }
            if !std::mem::replace(&mut counted, true) {
                match what {
                    Held::Bytes(n) => count(&self.counters.held_bytes, n),
                    Held::Connection => count(&self.counters.held_connections, 1),
                    Held::End => {}
                }
            }
            if self.conditions.changed().await.is_err() {
                return End::Reset;
            }
        }
    }

    async fn until_reset(&mut self) {
        let path = self.path;
        let reset = |c: &Arc<Conditions>| c.get(&path).is_some_and(|c| c.cut.is_some_and(Cut::is_told));
        if self.conditions.wait_for(reset).await.is_err() {
            // The fabric is gone, and so is the connection soon.
            std::future::pending::<()>().await;
        }
        count(&self.counters.resets, 1);
    }

    /// How much of a chunk that was read now still arrives if the connection breaks at a message in it.
    fn cut_at_message(&mut self, chunk: &[u8]) -> Option<usize> {
        let at = self.conditions.borrow().get(&self.path).and_then(|condition| condition.at_message);
        let rng = &mut self.rng;
        let end = self.frames.cut(chunk, || at.filter(|at| rng.random::<f64>() < at.chance).map(|at| at.when))?;
        count(&self.counters.cut_messages, 1);
        Some(end)
    }

    /// When a chunk that was read now may arrive, and whether others go first; `None`: the connection is reset instead.
    /// `before`: when the one before it may.
    fn due(&mut self, bytes: usize, before: Instant) -> Option<(Instant, bool)> {
        let now = Instant::now();
        // What was on its way has been let through when something changed.
        let before = if self.conditions.has_changed().unwrap_or(true) { now } else { before };
        let condition = self.conditions.borrow_and_update().get(&self.path).cloned();
        let Some(condition) = condition else { return Some((now, false)) };
        let Some(fate) = condition.fate(bytes, || self.rng.random()) else {
            count(&self.counters.breaks, 1);
            return None;
        };
        count(&self.counters.late_chunks, usize::from(!fate.slowed.is_zero()));
        count(&self.counters.lost_chunks, usize::from(fate.lost));
        // What a slow line carries queues up; what is merely late travels side by side.
        let start = if condition.bytes_per_s.is_some() { now.max(before) } else { now };
        Some((start + fate.late(), fate.held_back))
    }

    /// Waits until a chunk may arrive, and no longer than it could take as things are: a path that is sound again owes
    /// nothing to what was wrong with it.
    async fn travel(&mut self, mut due: Instant) {
        loop {
            let longest = match self.conditions.borrow_and_update().get(&self.path) {
                None => Some(Duration::ZERO),
                Some(condition) => condition.longest(),
            };
            due = longest.map_or(due, |longest| due.min(Instant::now() + longest));
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(due) => return,
                changed = self.conditions.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Lets a chunk of another connection pass, if one comes soon and the path still reorders.
    async fn let_pass(&mut self) {
        let mut arrived = self.counters.arrived.subscribe();
        let path = self.path;
        let in_order = |c: &Arc<Conditions>| c.get(&path).is_none_or(|c| c.reorder == 0.0);
        tokio::select! {
            biased;
            // The sender is in `self.counters`.
            passed = arrived.changed() => count(&self.counters.overtaken_chunks, usize::from(passed.is_ok())),
            () = tokio::time::sleep(HELD_BACK) => {}
            _ = self.conditions.wait_for(in_order) => {}
        }
    }
}

/// What the reading half of a pump hands to the writing half.
enum Item {
    Chunk {
        due: Instant,
        held_back: bool,
        bytes: Vec<u8>,
    },
    /// The sender has closed its side, in order or not.
    End(Instant, End),
}

async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, way: &mut Way) -> End {
    let (queue, mut items) = mpsc::channel(QUEUE_CHUNKS);
    let mut timing = way.clone();
    let reading = async move {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut last = Instant::now();
        loop {
            let mut cut = None;
            let item = match from.read(&mut buffer).await {
                Ok(0) => Item::End(last, End::Closed),
                Err(_) => Item::End(last, End::Reset),
                Ok(n) => {
                    cut = timing.cut_at_message(&buffer[..n]);
                    match timing.due(n, last) {
                        Some((due, held_back)) => {
                            last = due;
                            Item::Chunk { due, held_back, bytes: buffer[..cut.unwrap_or(n)].to_vec() }
                        }
                        None => Item::End(last, End::Reset),
                    }
                }
            };
            let ends = matches!(item, Item::End(..));
            if queue.send(item).await.is_err() || ends {
                return;
            }
            if cut.is_some() {
                // Whoever is gone needs no telling.
                let _ = queue.send(Item::End(last, End::Reset)).await;
                return;
            }
        }
    };
    let writing = async {
        // Whoever is over there has gone; what comes back from there says so, or does not.
        let mut gone = false;
        while let Some(item) = items.recv().await {
            let (due, held_back, held) = match &item {
                Item::Chunk { due, held_back, bytes } => (*due, *held_back, Held::Bytes(bytes.len())),
                Item::End(due, _) => (*due, false, Held::End),
            };
            way.travel(due).await;
            if held_back {
                way.let_pass().await;
            }
            if way.pass(held).await == End::Reset {
                return End::Reset;
            }
            match item {
                Item::Chunk { bytes, .. } if !gone => {
                    gone = to.write_all(&bytes).await.is_err();
                    count(&way.counters.passed_bytes, bytes.len());
                    way.counters.arrived.send_modify(|arrived| *arrived += 1);
                }
                Item::Chunk { .. } => {}
                Item::End(_, End::Closed) => {
                    // Already closed is closed.
                    let _ = to.shutdown().await;
                    return End::Closed;
                }
                Item::End(_, End::Reset) => return End::Reset,
            }
        }
        End::Reset
    };
    tokio::pin!(reading, writing);
    tokio::select! {
        end = &mut writing => end,
        () = &mut reading => writing.await,
    }
}
