//! A way to an S3 service that can be hurt: every connection of query nodes to it passes through a listener of this process.
//!
//! | trouble | what happens |
//! |---|---|
//! | [`Trouble::Slow`] | each piece of a request or an answer arrives [`SLOWED`] late |
//! | [`Trouble::Refusing`] | connections are reset, also those that are open |
//! | [`Trouble::Throttling`] | open connections are reset, and of new ones every other is told `503 Slow Down` |
//! | [`Trouble::Late`] | every other request that changes something arrives [`HELD`] late, when its sender has given up ([`REQUEST_TIMEOUT`]) and sent it again; all others arrive and have their effect, and answers are held until the trouble ends, and then half of them come and half of the connections are reset |
//!
//! One query node alone can be cut off ([`Objects::cut_off`]): silently, so that what is sent on either way waits until that ends, or by reset. Whose a
//! connection is the kernel says (`owners`); one of which it does not is reset while anybody is cut off.
//!
//! Bytes pass as they are, so that requests stay as they were signed, the `Host` header included.
//!
//! Limits: [`MAX_CONNECTIONS`], [`CHUNK_BYTES`] on each way of a connection, and [`HELD_BYTES`] of a request that is held.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Node;
use super::condition::Cut;
use super::owners::Owners;
use crate::ports::{self, Port};
use crate::{IoContext, Result};

/// How late each piece is.
pub const SLOWED: Duration = Duration::from_millis(150);
/// How long query nodes wait for an answer of the service: less than a fault lasts, so that they give up in the middle of one.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How late a request arrives that is held: its sender has given up by then, and sent it again.
pub const HELD: Duration = Duration::from_secs(3);
const _: () = assert!(HELD.as_millis() > REQUEST_TIMEOUT.as_millis());
/// Most bytes of a request that is held; of a longer one the rest arrives behind these, if it still comes.
pub const HELD_BYTES: usize = 1 << 20;
/// How long the answer to a request whose sender has given up is waited for.
const ARRIVES_WITHIN: Duration = Duration::from_secs(5);
/// Most connections; further ones are reset.
pub const MAX_CONNECTIONS: usize = 1_024;
/// Most bytes in one piece.
pub const CHUNK_BYTES: usize = 64 << 10;
/// How long connecting to the service, and telling somebody to slow down, may take.
const WITHIN: Duration = Duration::from_secs(2);
/// Most bytes of a request that is told to slow down.
const REQUEST_BYTES: u64 = 64 << 20;
const SLOW_DOWN: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>SlowDown</Code><Message>Please reduce your request \
                         rate.</Message></Error>";

/// What is wrong with the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    Slow,
    Refusing,
    Throttling,
    Late,
}

impl Trouble {
    /// What it has done to connections, for people: behind a number.
    pub fn done(self) -> &'static str {
        match self {
            Trouble::Slow => "pieces were late",
            Trouble::Refusing => "connections were reset",
            Trouble::Throttling => "requests were told to slow down",
            Trouble::Late => "requests or answers were held",
        }
    }
}

/// All that is wrong.
#[derive(Debug, Clone, Default)]
struct Troubles {
    /// For everybody.
    of_all: BTreeSet<Trouble>,
    /// Query nodes that are cut off, and how.
    cut_off: BTreeMap<u64, Cut>,
}

impl Troubles {
    fn contains(&self, trouble: &Trouble) -> bool {
        self.of_all.contains(trouble)
    }
}

/// How often each trouble was met.
#[derive(Debug, Default)]
struct Met {
    of_all: [AtomicU64; 4],
    /// By the query node that is cut off.
    cuts: Mutex<BTreeMap<u64, u64>>,
    /// Requests that change something, since some are late.
    changes: AtomicU64,
    /// Requests that are held, or that the service has not answered since.
    held: AtomicU64,
    /// Requests that the service has answered when their senders had given up.
    overdue: AtomicU64,
}

impl Met {
    fn count(&self, trouble: Trouble) {
        self.of_all[trouble as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the next request that changes something is held.
    fn holds_next(&self) -> bool {
        self.changes.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)
    }

    fn count_cut(&self, node: u64) {
        *self.cuts.lock().unwrap_or_else(PoisonError::into_inner).entry(node).or_default() += 1;
    }
}

/// The way to the service.
#[derive(Debug)]
pub struct Objects {
    port: Port,
    troubles: watch::Sender<Troubles>,
    met: Arc<Met>,
    stop: CancellationToken,
    listening: tokio::sync::Mutex<JoinSet<()>>,
}

impl Objects {
    /// A way to the service at `target` (`HOST:PORT`), which is sound at first.
    ///
    /// # Errors
    /// No port is free, or it cannot be listened on.
    pub async fn open(target: &str) -> Result<Self> {
        Self::open_for(target, Arc::default()).await
    }

    /// The same for query nodes that are these processes: each can be cut off by itself.
    pub(super) async fn open_for(target: &str, owners: Arc<Owners>) -> Result<Self> {
        let port = ports::reserve()?;
        let address = port.loopback();
        let listener = TcpListener::bind(&address)
            .await
            .doing(|| format!("listening on {address} for the way to the object store"))?;
        let (troubles, met, stop) =
            (watch::Sender::new(Troubles::default()), Arc::new(Met::default()), CancellationToken::new());
        let (subscribed, met_by) = (troubles.subscribe(), met.clone());
        let way = Way { target: target.to_owned(), troubles: subscribed, met: met_by, owners, node: None };
        let mut listening = JoinSet::new();
        listening.spawn(listen(listener, way, stop.clone()));
        Ok(Self { port, troubles, met, stop, listening: tokio::sync::Mutex::new(listening) })
    }

    /// The endpoint that query nodes are told of.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.port.loopback())
    }

    /// What query nodes are started with.
    pub fn arguments(&self) -> [String; 4] {
        let within = REQUEST_TIMEOUT.as_millis().to_string();
        ["--s3-endpoint".to_owned(), self.endpoint(), "--s3-request-timeout-ms".to_owned(), within]
    }

    /// This is wrong from now on, too.
    pub fn begin(&self, trouble: Trouble) {
        self.troubles.send_modify(|troubles| {
            troubles.of_all.insert(trouble);
        });
    }

    /// This is not wrong any more.
    pub fn end(&self, trouble: Trouble) {
        self.troubles.send_modify(|troubles| {
            troubles.of_all.remove(&trouble);
        });
    }

    /// These query nodes do not reach it from now on; others do as before.
    pub fn cut_off(&self, nodes: &[u64], how: Cut) {
        self.troubles.send_modify(|troubles| troubles.cut_off.extend(nodes.iter().map(|node| (*node, how))));
    }

    /// They do again.
    pub fn let_back(&self, nodes: &[u64]) {
        self.troubles.send_modify(|troubles| troubles.cut_off.retain(|node, _| !nodes.contains(node)));
    }

    /// How often a query node has met that it is cut off so far.
    pub fn cuts_met(&self, node: u64) -> u64 {
        self.met.cuts.lock().unwrap_or_else(PoisonError::into_inner).get(&node).copied().unwrap_or_default()
    }

    /// Nothing is wrong any more.
    pub fn calm(&self) {
        self.troubles.send_replace(Troubles::default());
    }

    /// How often a trouble was met so far.
    pub fn met(&self, trouble: Trouble) -> u64 {
        self.met.of_all[trouble as usize].load(Ordering::Relaxed)
    }

    /// How many requests are held now, or have been and are not answered yet.
    pub fn held(&self) -> u64 {
        self.met.held.load(Ordering::Relaxed)
    }

    /// How many requests have arrived, and were answered, when their senders had given up.
    pub fn overdue(&self) -> u64 {
        self.met.overdue.load(Ordering::Relaxed)
    }

    /// Closes every connection, and waits for their tasks.
    pub async fn close(&self) {
        self.stop.cancel();
        let mut listening = self.listening.lock().await;
        while listening.join_next().await.is_some() {}
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[derive(Debug, Clone)]
struct Way {
    target: String,
    troubles: watch::Receiver<Troubles>,
    met: Arc<Met>,
    owners: Arc<Owners>,
    /// Of a connection: the query node that has made it, as far as the kernel says.
    node: Option<u64>,
}

impl Way {
    /// Finds out whose the connection is. False: nobody knows, and it might be one's that is cut off.
    fn is_known(&mut self, near: &TcpStream) -> bool {
        let ends = near.peer_addr().ok().zip(near.local_addr().ok());
        match ends.and_then(|(far, own)| self.owners.of(far, own)) {
            Some(Node::Query(node)) => self.node = Some(node),
            Some(_) => {}
            None => return self.troubles.borrow().cut_off.is_empty(),
        }
        true
    }

    fn cut(&mut self) -> Option<(u64, Cut)> {
        let node = self.node?;
        let how = self.troubles.borrow_and_update().cut_off.get(&node).copied();
        how.map(|how| (node, how))
    }

    /// Waits while its node is cut off silently. False: it is cut off so that it is told, or the way is closed.
    async fn passes(&mut self) -> bool {
        let mut is_counted = false;
        while let Some((node, how)) = self.cut() {
            if !std::mem::replace(&mut is_counted, true) {
                self.met.count_cut(node);
            }
            if how.is_told() || self.troubles.changed().await.is_err() {
                return false;
            }
        }
        true
    }
}

async fn listen(listener: TcpListener, way: Way, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    let mut made = 0u64;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((near, _)) if connections.len() < MAX_CONNECTIONS => {
                    made += 1;
                    let (way, stop, is_odd) = (way.clone(), stop.clone(), made % 2 == 1);
                    connections.spawn(async move {
                        tokio::select! {
                            () = stop.cancelled() => {}
                            () = connection(near, way, is_odd) => {}
                        }
                    });
                }
                Ok((near, _)) => reset(&near),
                // Out of file descriptors, or a connection that went away while it was accepted.
                Err(e) => {
                    tracing::warn!("the way to the object store cannot accept: {e}");
                    sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}

/// It ends as a connection does whose other end has died.
fn reset(near: &TcpStream) {
    // It goes away either way.
    let _ = near.set_zero_linger();
}

async fn connection(mut near: TcpStream, mut way: Way, is_odd: bool) {
    if !way.is_known(&near) || !way.passes().await {
        return reset(&near);
    }
    let troubles = way.troubles.borrow_and_update().clone();
    if troubles.contains(&Trouble::Refusing) {
        way.met.count(Trouble::Refusing);
        return reset(&near);
    }
    if troubles.contains(&Trouble::Throttling) && is_odd {
        way.met.count(Trouble::Throttling);
        // Who does not listen to it needs no more of it.
        let _ = timeout(WITHIN, slow_down(&mut near)).await;
        return;
    }
    let Ok(Ok(mut far)) = timeout(WITHIN, TcpStream::connect(&way.target)).await else { return reset(&near) };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let is_broken = {
        let (near_read, near_write) = near.split();
        let (far_read, far_write) = far.split();
        let exchange = Exchange::default();
        let there = pump(near_read, far_write, way.clone(), Carries::Requests(&exchange));
        let back = pump(far_read, near_write, way.clone(), Carries::Answers(&exchange, is_odd));
        let both = async { tokio::try_join!(there, back) };
        tokio::select! {
            carried = both => carried.is_err(),
            () = breaking(way.clone()) => true,
        }
    };
    if is_broken {
        reset(&near);
        reset(&far);
    }
}

/// Waits for a trouble that ends connections which are open.
async fn breaking(mut way: Way) {
    let known = way.troubles.borrow_and_update().clone();
    loop {
        if way.troubles.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let now = way.troubles.borrow_and_update().clone();
        let begun = |trouble: &Trouble| now.contains(trouble) && !known.contains(trouble);
        if begun(&Trouble::Refusing) {
            return way.met.count(Trouble::Refusing);
        }
        if begun(&Trouble::Throttling) {
            return;
        }
        if let Some(node) = way.node.filter(|node| now.cut_off.get(node).is_some_and(|how| how.is_told())) {
            return way.met.count_cut(node);
        }
    }
}

/// What is under way on a connection: one request at a time, as HTTP/1.1 without pipelining has it.
#[derive(Debug, Default)]
struct Exchange {
    /// A request has begun, and nothing of its answer has come.
    is_asked: AtomicBool,
    /// Its sender had given up before it arrived.
    is_overdue: AtomicBool,
}

/// What goes a way.
#[derive(Debug, Clone, Copy)]
enum Carries<'a> {
    Requests(&'a Exchange),
    /// And whether those that are held never come.
    Answers(&'a Exchange, bool),
}

/// A request that was held.
#[derive(Debug)]
struct Held<'a> {
    /// What has come of it meanwhile.
    more: Vec<u8>,
    is_given_up: bool,
    met: &'a Met,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.met.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets [`HELD`] pass, whatever the sender does.
async fn hold<'a>(from: &mut (impl AsyncRead + Unpin), met: &'a Met) -> Held<'a> {
    met.count(Trouble::Late);
    met.held.fetch_add(1, Ordering::Relaxed);
    let mut held = Held { more: Vec::new(), is_given_up: false, met };
    let until = Instant::now() + HELD;
    let mut buffer = vec![0; CHUNK_BYTES];
    while held.more.len() < HELD_BYTES {
        match timeout_at(until, from.read(&mut buffer)).await {
            Ok(Ok(read)) if read > 0 => held.more.extend_from_slice(&buffer[..read]),
            Ok(_) => {
                held.is_given_up = true;
                break;
            }
            Err(_) => break,
        }
    }
    sleep_until(until).await;
    held
}

/// Whether a request that begins so changes something.
fn is_change(begins: &[u8]) -> bool {
    [b"PUT ".as_slice(), b"POST ", b"DELETE "].iter().any(|method| begins.starts_with(method))
}

/// Carries one way. Broken off: an error.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut way: Way,
    carries: Carries<'_>,
) -> std::io::Result<()> {
    let met = way.met.clone();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        let troubles = way.troubles.borrow_and_update().clone();
        if troubles.contains(&Trouble::Slow) {
            met.count(Trouble::Slow);
            let is_over = way.troubles.wait_for(|troubles| !troubles.contains(&Trouble::Slow));
            // Over, or late enough.
            let _ = timeout(SLOWED, is_over).await;
        }
        let is_late = troubles.contains(&Trouble::Late);
        let mut held = None;
        match carries {
            Carries::Requests(exchange) => {
                let begins = !exchange.is_asked.swap(true, Ordering::Relaxed);
                if begins && is_late && is_change(&buffer[..read]) && met.holds_next() {
                    let request = held.insert(hold(&mut from, &met).await);
                    exchange.is_overdue.store(request.is_given_up, Ordering::Relaxed);
                }
            }
            Carries::Answers(exchange, never) => {
                exchange.is_asked.store(false, Ordering::Relaxed);
                if exchange.is_overdue.load(Ordering::Relaxed) {
                    met.overdue.fetch_add(1, Ordering::Relaxed);
                    // Nobody waits for it.
                    return Err(std::io::ErrorKind::ConnectionAborted.into());
                }
                if is_late {
                    met.count(Trouble::Late);
                    let is_over = way.troubles.wait_for(|troubles| !troubles.contains(&Trouble::Late)).await.is_ok();
                    if never || !is_over {
                        return Err(std::io::ErrorKind::ConnectionReset.into());
                    }
                }
            }
        }
        if !way.passes().await {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        to.write_all(&buffer[..read]).await?;
        if let Some(request) = held {
            to.write_all(&request.more).await?;
            if request.is_given_up {
                // A service that sees that nobody waits may leave what it is doing.
                sleep(ARRIVES_WITHIN).await;
                return Err(std::io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Tells the first request of a connection to slow down.
async fn slow_down(near: &mut TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < CHUNK_BYTES {
        let read = near.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        head.extend_from_slice(&buffer[..read]);
    }
    let answer = format!(
        "HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{SLOW_DOWN}",
        SLOW_DOWN.len()
    );
    near.write_all(answer.as_bytes()).await?;
    near.shutdown().await?;
    // What is not read by then would take the answer back.
    tokio::io::copy(&mut near.take(REQUEST_BYTES), &mut tokio::io::sink()).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service that answers each line with itself.
    async fn service() -> (String, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                connections.spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        (address, task)
    }

    async fn said(objects: &Objects, request: &str) -> std::io::Result<String> {
        let address = objects.endpoint().trim_start_matches("http://").to_owned();
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.shutdown().await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn each_trouble_is_met_and_ends() {
        let (address, task) = service().await;
        let objects = Arc::new(Objects::open(&address).await.unwrap());
        let request = "GET / HTTP/1.1\r\n\r\n";
        assert_eq!(said(&objects, request).await.unwrap(), request);

        objects.begin(Trouble::Slow);
        assert_eq!(said(&objects, request).await.unwrap(), request);
        assert!(objects.met(Trouble::Slow) >= 2, "both ways");
        objects.end(Trouble::Slow);

        objects.begin(Trouble::Refusing);
        assert!(said(&objects, request).await.is_err());
        assert!(objects.met(Trouble::Refusing) >= 1);
        objects.end(Trouble::Refusing);

        objects.begin(Trouble::Throttling);
        let answers = [said(&objects, request).await.unwrap(), said(&objects, request).await.unwrap()];
        assert_eq!(
            answers.iter().filter(|answer| answer.starts_with("HTTP/1.1 503 Slow Down")).count(),
            1,
            "{answers:?}"
        );
        assert_eq!(objects.met(Trouble::Throttling), 1);
        objects.end(Trouble::Throttling);

        objects.begin(Trouble::Late);
        let late: Vec<_> = (0..2)
            .map(|_| {
                let objects = objects.clone();
                tokio::spawn(async move { said(&objects, request).await })
            })
            .collect();
        let held = || async {
            match objects.met(Trouble::Late) {
                2 => Ok(()),
                n => Err(format!("{n} answers are held")),
            }
        };
        crate::probe::until("both answers to be held", Duration::from_secs(20), held).await.unwrap();
        objects.end(Trouble::Late);
        let mut came = 0;
        for late in late {
            came += usize::from(late.await.unwrap().is_ok_and(|answer| answer == request));
        }
        assert_eq!(came, 1, "one comes late, and one never");
        objects.close().await;
        task.abort();
    }

    #[tokio::test]
    async fn a_change_arrives_when_its_sender_has_given_up_and_sent_it_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let objects = Objects::open(&listener.local_addr().unwrap().to_string()).await.unwrap();
        let address = objects.endpoint().trim_start_matches("http://").to_owned();
        let change = b"PUT /b/x HTTP/1.1\r\nContent-Length: 4\r\n\r\nlake";
        objects.begin(Trouble::Late);
        let mut first = TcpStream::connect(&address).await.unwrap();
        first.write_all(&change[..20]).await.unwrap();
        let is_held = || async { (objects.held() == 1).then_some(()).ok_or_else(String::new) };
        crate::probe::until("it to be held", WITHIN, is_held).await.unwrap();
        first.write_all(&change[20..]).await.unwrap();
        let (mut held, _) = listener.accept().await.unwrap();
        drop(first);
        let given_up = Instant::now();

        let mut again = TcpStream::connect(&address).await.unwrap();
        again.write_all(change).await.unwrap();
        let (mut at_once, _) = listener.accept().await.unwrap();
        let mut arrived = vec![0; change.len()];
        at_once.read_exact(&mut arrived).await.unwrap();
        assert_eq!((arrived.as_slice(), given_up.elapsed() < HELD), (change.as_slice(), true));
        objects.end(Trouble::Late);
        at_once.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        again.read_exact(&mut [0; 4]).await.unwrap();
        assert_eq!((objects.held(), objects.overdue()), (1, 0), "also when the trouble has ended");

        let mut arrived = vec![0; change.len()];
        held.read_exact(&mut arrived).await.unwrap();
        assert_eq!(arrived, change, "whole");
        held.write_all(b"HTTP/1.1 412 Precondition Failed\r\n\r\n").await.unwrap();
        assert!(!held.read(&mut [0; 1]).await.is_ok_and(|read| read > 0), "nobody waits for that");
        assert_eq!((objects.held(), objects.overdue()), (0, 1));
        objects.close().await;
    }

    #[tokio::test]
    async fn one_node_is_cut_off_and_others_are_not() {
        let (address, task) = service().await;
        let owners = Arc::new(Owners::default());
        let objects = Arc::new(Objects::open_for(&address, owners.clone()).await.unwrap());
        let request = "GET / HTTP/1.1\r\n\r\n";
        owners.set(1, Some(std::process::id()));
        objects.cut_off(&[2], Cut::Reset);
        assert_eq!(said(&objects, request).await.unwrap(), request, "it is node 2 that is cut off");

        objects.cut_off(&[1], Cut::Reset);
        assert!(said(&objects, request).await.is_err());
        assert_eq!((objects.cuts_met(1), objects.cuts_met(2)), (1, 0));
        objects.let_back(&[1]);
        assert_eq!(said(&objects, request).await.unwrap(), request);

        objects.cut_off(&[1], Cut::Silent);
        let held = {
            let objects = objects.clone();
            tokio::spawn(async move { said(&objects, request).await })
        };
        let is_held = || async {
            match objects.cuts_met(1) {
                2 => Ok(()),
                n => Err(format!("{n} times it was met")),
            }
        };
        crate::probe::until("the request to be held", Duration::from_secs(20), is_held).await.unwrap();
        assert!(!held.is_finished());
        objects.calm();
        assert_eq!(held.await.unwrap().unwrap(), request, "it comes late");
        objects.close().await;
        task.abort();
    }
}
