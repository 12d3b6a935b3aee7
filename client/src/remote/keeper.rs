//! Keeps one lease alive, and knows until when it is certainly held.
//!
//! ```text
//!   held (until the last answered keep-alive was SENT + time to live) --- nothing answered in time, or over ---> lost
//! ```
//!
//! The leader counts the same silence from when a keep-alive arrives, which is later than when it was sent: the lease ends
//! there after the holder has stopped to believe in it. Both clocks are monotonic; none is compared with the other. That
//! belief protects nothing by itself, since a process may be paused between looking and acting: what matters carries the
//! compare that the lease is alive (semantics, section 5).
//!
//! One task, ended with its [`LeaseKeeper`]. It sends three keep-alives per time to live on a stream to the leader, and
//! when that breaks, or is silent for as long, it finds the leader again and goes on. Losing the lease is final.

use std::time::Instant;

use lake_proto::coordination::LeaseId;
use lake_proto::v1;
use lake_proto::v1::leases_client::LeasesClient;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::RemoteStore;
use super::attempts::{Attempts, classify, describe};
use super::coordination::Lease;
use crate::backoff::Backoff;
use crate::clock;

/// Keep-alives per time to live.
const PER_TTL: u32 = 3;

#[derive(Debug, Clone)]
struct Held {
    until: Instant,
    lost: Option<String>,
}

/// Keeps a lease alive until it is dropped. The lease is not revoked by that: it ends after its time to live, or by
/// [`RemoteStore::revoke_lease`].
#[derive(Debug)]
pub struct LeaseKeeper {
    id: LeaseId,
    held: watch::Receiver<Held>,
    task: JoinHandle<()>,
}

impl LeaseKeeper {
    /// Begins to keep a lease alive. Needs a tokio runtime.
    pub fn start(store: RemoteStore, lease: Lease) -> Self {
        let (sender, held) = watch::channel(Held { until: lease.held_until, lost: None });
        let keeping = Keeping { store, lease, held: sender, tag: 0 };
        Self { id: lease.id, held, task: tokio::spawn(keeping.run()) }
    }

    /// The lease.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Until when the lease is certainly alive, unless it is revoked.
    pub fn held_until(&self) -> Instant {
        self.held.borrow().until
    }

    /// Whether the lease is certainly alive now, unless it is revoked.
    pub fn is_held(&self) -> bool {
        let held = self.held.borrow();
        held.lost.is_none() && clock::now() < held.until
    }

    /// Waits until the lease is renewed after this call, and says until when it is held then. `None`: it is lost.
    pub async fn renewed(&self) -> Option<Instant> {
        let mut held = self.held.clone();
        let before = held.borrow_and_update().until;
        let held = held.wait_for(|held| held.until > before || held.lost.is_some()).await.ok()?;
        held.lost.is_none().then_some(held.until)
    }

    /// Waits until the lease is lost, and says why.
    pub async fn lost(&self) -> String {
        let mut held = self.held.clone();
        match held.wait_for(|held| held.lost.is_some()).await {
            Ok(held) => held.lost.clone().unwrap_or_default(),
            Err(_) => "nobody keeps it alive any more".to_owned(),
        }
    }

    /// Does something for as long as the lease is certainly held: it is dropped, wherever it is, once the lease may be lost.
    /// What it has sent by then may still take effect, unless it carries the compare that the lease is alive.
    ///
    /// # Errors
    /// Why the lease may be lost.
    pub async fn while_held<T>(&self, work: impl Future<Output = T>) -> Result<T, String> {
        tokio::select! {
            biased;
            why = self.lost() => Err(why),
            done = work => Ok(done),
        }
    }

    /// Stops keeping the lease alive, and waits until that has stopped.
    pub async fn stop(mut self) {
        self.task.abort();
        // Cancelled, as was just asked.
        let _ = (&mut self.task).await;
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Keeping {
    store: RemoteStore,
    lease: Lease,
    held: watch::Sender<Held>,
    tag: u64,
}

/// Why a stream ended.
enum Ended {
    /// The lease is over, as the leader says.
    Over,
    /// The peer at this address did not answer, or does not lead.
    Failed(String, Status),
    /// No leader was found in time.
    NoLeader(String),
}

impl Keeping {
    async fn run(mut self) {
        let why = self.keep().await;
        tracing::debug!(lease = self.lease.id, "lost: {why}");
        self.held.send_modify(|held| held.lost = Some(why));
    }

    fn until(&self) -> Instant {
        self.held.borrow().until
    }

    /// Stream after stream, until the lease is lost.
    async fn keep(&mut self) -> String {
        let id = self.lease.id;
        let mut backoff = Backoff::default();
        let mut last = "no keep-alive was sent in time".to_owned();
        while clock::now() < self.until() {
            let (before, began) = (self.until(), clock::now());
            let ended = self.one_stream().await;
            if self.until() > before {
                backoff = Backoff::default();
            }
            let redirected = match ended {
                Ended::Over => return format!("lease {id} is over, as the leader says"),
                Ended::NoLeader(why) => {
                    last = why;
                    false
                }
                Ended::Failed(address, status) => {
                    let failure = classify(status);
                    last = format!("{address}: {}", describe(&failure.status));
                    self.store.inner.after_failure(&address, began, &failure);
                    failure.redirected
                }
            };
            tracing::debug!(lease = id, "keeping a lease alive: {last}");
            if !redirected {
                let until = self.until().min(clock::now() + backoff.next_wait());
                tokio::time::sleep_until(until.into()).await;
            }
        }
        format!("lease {id} was not renewed within its {:.1} s: {last}", self.lease.ttl.as_secs_f64())
    }

    /// Renews the lease on one stream to the leader for as long as that works.
    async fn one_stream(&mut self) -> Ended {
        let mut attempts = Attempts::new("keeping a lease alive", self.until());
        let Some(address) = self.store.leader_address(&mut attempts).await else {
            return Ended::NoLeader(attempts.last);
        };
        match self.renew_at(&address).await {
            Ok(()) => Ended::Over,
            Err(status) => Ended::Failed(address, status),
        }
    }

    /// Ends well when the lease is over.
    async fn renew_at(&mut self, address: &str) -> Result<(), Status> {
        let between = self.lease.ttl / PER_TTL;
        let (sender, requests) = mpsc::channel(1);
        let mut sent = self.send(&sender)?;
        let mut answers = self.in_time(sent + between, self.open(address, requests)).await?;
        loop {
            let answer = self.in_time(sent + between, answers.message()).await?;
            let answer = answer.ok_or_else(|| Status::unavailable("the peer closed the stream"))?;
            if answer.tag != self.tag {
                return Err(Status::internal(format!("answer {} came to keep-alive {}", answer.tag, self.tag)));
            }
            if !answer.alive.contains(&self.lease.id) {
                return Ok(());
            }
            let until = sent + self.lease.ttl;
            self.held.send_modify(|held| held.until = until);
            tokio::select! {
                () = tokio::time::sleep_until((sent + between).into()) => {}
                // Nothing was asked: the peer stops, or the connection broke.
                ended = answers.message() => {
                    return Err(ended.err().unwrap_or_else(|| Status::unavailable("the peer closed the stream")));
                }
            }
            sent = self.send(&sender)?;
        }
    }

    fn send(&mut self, requests: &mpsc::Sender<v1::KeepAliveRequest>) -> Result<Instant, Status> {
        self.tag += 1;
        let now = clock::now();
        requests
            .try_send(v1::KeepAliveRequest { ids: vec![self.lease.id], tag: self.tag })
            .map_err(|_| Status::unavailable("the connection does not take keep-alives"))?;
        Ok(now)
    }

    async fn open(
        &self,
        address: &str,
        requests: mpsc::Receiver<v1::KeepAliveRequest>,
    ) -> Result<Streaming<v1::KeepAliveResponse>, Status> {
        let messages = futures::stream::unfold(requests, |mut requests| async move {
            requests.recv().await.map(|message| (message, requests))
        });
        let inner = &self.store.inner;
        // The stream has no end of its own.
        let request = inner.untimed(messages)?;
        Ok(LeasesClient::new(inner.channel(address)?).keep_alive(request).await?.into_inner())
    }

    /// Waits no longer than until `limit`, nor than the lease is held.
    async fn in_time<T>(&self, limit: Instant, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let limit = limit.min(self.until());
        match tokio::time::timeout_at(limit.into(), answer).await {
            Ok(answer) => answer,
            Err(_) => Err(Status::deadline_exceeded("a keep-alive was not answered in time")),
        }
    }
}
