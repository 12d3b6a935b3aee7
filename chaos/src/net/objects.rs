//! A way to an S3 service that can be hurt: every connection of query nodes to it passes through a listener of this process.
//!
//! | trouble | what happens |
//! |---|---|
//! | [`Trouble::Slow`] | each piece of a request or an answer arrives [`SLOWED`] late |
//! | [`Trouble::Refusing`] | connections are reset, also those that are open |
//! | [`Trouble::Throttling`] | open connections are reset, and of new ones every other is told `503 Slow Down` |
//! | [`Trouble::Late`] | requests arrive and have their effect; answers are held until the trouble ends, and then half of them come and half of the connections are reset |
//!
//! Bytes pass as they are, so that requests stay as they were signed, the `Host` header included.
//!
//! Limits: [`MAX_CONNECTIONS`], and [`CHUNK_BYTES`] on each way of a connection.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::ports::{self, Port};
use crate::{IoContext, Result};

/// How late each piece is.
pub const SLOWED: Duration = Duration::from_millis(150);
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
            Trouble::Late => "answers were held",
        }
    }
}

type Troubles = BTreeSet<Trouble>;

/// How often each trouble was met.
#[derive(Debug, Default)]
struct Met([AtomicU64; 4]);

impl Met {
    fn count(&self, trouble: Trouble) {
        self.0[trouble as usize].fetch_add(1, Ordering::Relaxed);
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
        let port = ports::reserve()?;
        let address = port.loopback();
        let listener = TcpListener::bind(&address)
            .await
            .doing(|| format!("listening on {address} for the way to the object store"))?;
        let (troubles, met, stop) =
            (watch::Sender::new(Troubles::new()), Arc::new(Met::default()), CancellationToken::new());
        let way = Way { target: target.to_owned(), troubles: troubles.subscribe(), met: met.clone() };
        let mut listening = JoinSet::new();
        listening.spawn(listen(listener, way, stop.clone()));
        Ok(Self { port, troubles, met, stop, listening: tokio::sync::Mutex::new(listening) })
    }

    /// The endpoint that query nodes are told of.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.port.loopback())
    }

    /// This is wrong from now on, too.
    pub fn begin(&self, trouble: Trouble) {
        self.troubles.send_modify(|troubles| {
            troubles.insert(trouble);
        });
    }

    /// This is not wrong any more.
    pub fn end(&self, trouble: Trouble) {
        self.troubles.send_modify(|troubles| {
            troubles.remove(&trouble);
        });
    }

    /// Nothing is wrong any more.
    pub fn calm(&self) {
        self.troubles.send_modify(Troubles::clear);
    }

    /// How often a trouble was met so far.
    pub fn met(&self, trouble: Trouble) -> u64 {
        self.met.0[trouble as usize].load(Ordering::Relaxed)
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
        let there = pump(near_read, far_write, way.clone(), None);
        let back = pump(far_read, near_write, way.clone(), Some(is_odd));
        let both = async { tokio::try_join!(there, back) };
        let mut troubles = way.troubles.clone();
        tokio::select! {
            carried = both => carried.is_err(),
            trouble = breaking(&mut troubles) => {
                if trouble == Trouble::Refusing {
                    way.met.count(Trouble::Refusing);
                }
                true
            }
        }
    };
    if is_broken {
        reset(&near);
        reset(&far);
    }
}

/// Waits for a trouble that ends connections which are open.
async fn breaking(troubles: &mut watch::Receiver<Troubles>) -> Trouble {
    let known = troubles.borrow_and_update().clone();
    loop {
        if troubles.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let now = troubles.borrow_and_update().clone();
        let begun = |trouble: &Trouble| now.contains(trouble) && !known.contains(trouble);
        if let Some(trouble) = [Trouble::Refusing, Trouble::Throttling].into_iter().find(begun) {
            return trouble;
        }
    }
}

/// Carries one way. `answers`: they are held while they are to be late, and whether they never come then. Broken off: an error.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut way: Way,
    answers: Option<bool>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        let troubles = way.troubles.borrow_and_update().clone();
        if troubles.contains(&Trouble::Slow) {
            way.met.count(Trouble::Slow);
            let is_over = way.troubles.wait_for(|troubles| !troubles.contains(&Trouble::Slow));
            // Over, or late enough.
            let _ = timeout(SLOWED, is_over).await;
        }
        if let Some(never) = answers
            && troubles.contains(&Trouble::Late)
        {
            way.met.count(Trouble::Late);
            let is_over = way.troubles.wait_for(|troubles| !troubles.contains(&Trouble::Late)).await.is_ok();
            if never || !is_over {
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
        }
        to.write_all(&buffer[..read]).await?;
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
}
