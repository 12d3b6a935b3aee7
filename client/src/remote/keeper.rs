//! Keeps one lease alive, and knows until when it is certainly held.
//!
//! ```text
//!   held (until the last answered keep-alive was SENT + time to live) --- nothing answered in time, or over ---> lost
//! ```
//!
//! The leader counts the same silence from when a keep-alive arrives, which is later than when it was sent: the lease ends
//! there after the holder has stopped to believe in it. The holder is told a little before that ([`told_before`]), so that
//! it can stop while the lease still stands. Both clocks are monotonic; none is compared with the other. That
//! belief protects nothing by itself, since a process may be paused between looking and acting: what matters carries the
//! compare that the lease is alive (semantics, section 5).
//!
//! One task, ended with its [`LeaseKeeper`]. It sends three keep-alives per time to live on a stream to the leader, and
//! when that breaks, or is silent for as long, it opens another one. A silence shorter than other calls bear says nothing of
//! the connection, nor of the leader, which all clones of the store share: after a second one the peers are asked who
//! leads, and nothing is given up. Losing the lease is final.

use std::time::{Duration, Instant};

use lake_proto::coordination::LeaseId;
use lake_proto::kv::Compare;
use lake_proto::v1;
use lake_proto::v1::leases_client::LeasesClient;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::RemoteStore;
use super::attempts::{Attempts, Failure, classify, describe};
use super::coordination::Lease;
use crate::backoff::Backoff;
use crate::clock;

/// Keep-alives per time to live.
const PER_TTL: u32 = 3;

/// How long before a lease may end its holder is told so, if it has not been renewed by then: longer than it takes to wake
/// a task on a busy machine.
fn told_before(ttl: Duration) -> Duration {
    (ttl / 20).max(Duration::from_millis(50))
}

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

    /// The fence: what a transaction carries that is to take effect only while the lease is alive.
    pub fn compare(&self) -> Compare {
        Compare::lease_alive(self.id)
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

    /// Waits until the lease is lost, and says why: a little before it may end, so that the holder can stop in time.
    pub async fn lost(&self) -> String {
        let mut held = self.held.clone();
        match held.wait_for(|held| held.lost.is_some()).await {
            Ok(held) => held.lost.clone().unwrap_or_default(),
            Err(_) => "nobody keeps it alive any more".to_owned(),
        }
    }

    /// Does something for as long as the lease is certainly held: it is dropped, wherever it is, a little before the lease may
    /// end.
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
    Failed(String, Failure),
    /// It did not answer in the time that a keep-alive has, which is less than other calls give it.
    Silent(String, Failure),
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

    /// When the lease counts as lost, unless it is renewed.
    fn last_moment(&self) -> Instant {
        self.until().checked_sub(told_before(self.lease.ttl)).unwrap_or_else(clock::now)
    }

    /// Stream after stream, until the lease is lost.
    async fn keep(&mut self) -> String {
        let id = self.lease.id;
        let mut backoff = Backoff::default();
        let mut last = "no keep-alive was sent in time".to_owned();
        // Streams in a row that were silent.
        let mut silent = 0;
        while clock::now() < self.last_moment() {
            let (before, began) = (self.until(), clock::now());
            let ended = self.one_stream().await;
            if self.until() > before {
                backoff = Backoff::default();
                silent = 0;
            }
            let redirected = match ended {
                Ended::Over => return format!("lease {id} is over, as the leader says"),
                Ended::NoLeader(why) => {
                    last = why;
                    false
                }
                Ended::Failed(address, failure) => {
                    last = format!("{address}: {}", describe(&failure.status));
                    self.store.inner.after_failure(&address, began, &failure);
                    failure.redirected
                }
                Ended::Silent(address, failure) => {
                    last = format!("{address}: {}", describe(&failure.status));
                    silent += 1;
                    if failure.broken {
                        self.store.inner.after_failure(&address, began, &failure);
                    } else if silent > 1 {
                        // Another one may lead by now. Whoever does is believed, and nobody is forgotten.
                        let asked = self.store.inner.ask();
                        let _ = tokio::time::timeout_at(self.last_moment().into(), asked).await;
                    }
                    false
                }
            };
            tracing::debug!(lease = id, "keeping a lease alive: {last}");
            if !redirected {
                let until = self.last_moment().min(clock::now() + backoff.next_wait());
                tokio::time::sleep_until(until.into()).await;
            }
        }
        format!("lease {id} was not renewed within its {:.1} s: {last}", self.lease.ttl.as_secs_f64())
    }

    /// Renews the lease on one stream to the leader for as long as that works.
    async fn one_stream(&mut self) -> Ended {
        let mut attempts = Attempts::new("keeping a lease alive", self.last_moment());
        let Some(address) = self.store.leader_address(&mut attempts).await else {
            return Ended::NoLeader(attempts.last);
        };
        match self.renew_at(&address).await {
            Ok(()) => Ended::Over,
            Err(Unanswered::Told(status)) => Ended::Failed(address, classify(status)),
            Err(Unanswered::Silent(within)) => Ended::Silent(address, Failure::silent(within)),
        }
    }

    /// Ends well when the lease is over.
    async fn renew_at(&mut self, address: &str) -> Result<(), Unanswered> {
        let between = self.lease.ttl / PER_TTL;
        let (sender, requests) = mpsc::channel(1);
        let mut sent = self.send(&sender)?;
        let mut answers = self.in_time(sent, self.open(address, requests)).await?;
        loop {
            let answer = self.in_time(sent, answers.message()).await?;
            let answer = answer.ok_or_else(|| Status::unavailable("the peer closed the stream"))?;
            if answer.tag != self.tag {
                return Err(Status::internal(format!("answer {} came to keep-alive {}", answer.tag, self.tag)).into());
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
                    return Err(ended.err().unwrap_or_else(|| Status::unavailable("the peer closed the stream")).into());
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

    /// Waits for the answer to what was sent then: no longer than until the next keep-alive is due, nor than the lease is held.
    async fn in_time<T>(
        &self,
        sent: Instant,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Unanswered> {
        let limit = (sent + self.lease.ttl / PER_TTL).min(self.last_moment());
        match tokio::time::timeout_at(limit.into(), answer).await {
            Ok(answer) => Ok(answer?),
            // The time that it was given: a process that was not woken in time has not listened for longer.
            Err(_) => Err(Unanswered::Silent(limit.saturating_duration_since(sent))),
        }
    }
}

/// Why a keep-alive brought no answer.
enum Unanswered {
    Told(Status),
    /// Nothing came for so long.
    Silent(Duration),
}

impl From<Status> for Unanswered {
    fn from(status: Status) -> Self {
        Self::Told(status)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use lake_proto::v1::leases_server::{Leases, LeasesServer};
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::{Request, Response};

    use super::*;
    use crate::remote::RemoteConfig;

    /// How long a keep-alive's answer takes.
    const ANSWER_AFTER: Duration = Duration::from_millis(500);

    /// A leader that is slow to answer keep-alives, or answers no more than so many.
    #[derive(Clone, Default)]
    struct Slow {
        arrived: Arc<Mutex<Vec<Instant>>>,
        answers: usize,
    }

    #[tonic::async_trait]
    impl Leases for Slow {
        type KeepAliveStream = ReceiverStream<Result<v1::KeepAliveResponse, Status>>;

        async fn keep_alive(
            &self,
            request: Request<Streaming<v1::KeepAliveRequest>>,
        ) -> Result<Response<Self::KeepAliveStream>, Status> {
            let (sender, answers) = mpsc::channel(1);
            let (mut requests, this) = (request.into_inner(), self.clone());
            tokio::spawn(async move {
                while let Ok(Some(message)) = requests.message().await {
                    let nth = {
                        let mut arrived = this.arrived.lock().unwrap();
                        arrived.push(clock::now());
                        arrived.len()
                    };
                    if nth > this.answers {
                        continue;
                    }
                    tokio::time::sleep(ANSWER_AFTER).await;
                    let answer = v1::KeepAliveResponse { tag: message.tag, alive: message.ids, ..Default::default() };
                    if sender.send(Ok(answer)).await.is_err() {
                        return;
                    }
                }
            });
            Ok(Response::new(ReceiverStream::new(answers)))
        }

        async fn grant(&self, _: Request<v1::GrantLeaseRequest>) -> Result<Response<v1::GrantLeaseResponse>, Status> {
            unreachable!()
        }

        async fn revoke(
            &self,
            _: Request<v1::RevokeLeaseRequest>,
        ) -> Result<Response<v1::RevokeLeaseResponse>, Status> {
            unreachable!()
        }

        async fn list(&self, _: Request<v1::ListLeasesRequest>) -> Result<Response<v1::ListLeasesResponse>, Status> {
            unreachable!()
        }
    }

    /// A store whose leader is this one.
    async fn led_by(leader: Slow) -> (RemoteStore, JoinHandle<Result<(), tonic::transport::Error>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tonic::transport::Server::builder().add_service(LeasesServer::new(leader));
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let config = RemoteConfig { endpoints: vec![address.clone()], secret: None };
        let store = RemoteStore::connect(config).unwrap();
        let member = v1::Member { id: 1, grpc_address: address, ..v1::Member::default() };
        store.inner.lock().view.learn(5, Some(&member));
        (store, server)
    }

    fn lease(ttl: Duration) -> Lease {
        Lease { id: 7, ttl, held_until: clock::now() + ttl }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lease_counts_from_when_its_keep_alive_was_sent() {
        let leader = Slow { answers: 1, ..Slow::default() };
        let (store, server) = led_by(leader.clone()).await;
        let lease = lease(Duration::from_secs(60));
        let keeper = LeaseKeeper::start(store, lease);
        let until = keeper.renewed().await.expect("it is renewed");
        let arrived = leader.arrived.lock().unwrap()[0];
        assert!(until > lease.held_until, "it was renewed");
        assert!(until <= arrived + lease.ttl, "it counts from when the answer came: {:?}", until - arrived);
        server.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_silence_that_is_short_for_others_takes_neither_leader_nor_connection() {
        let leader = Slow::default();
        let (store, server) = led_by(leader.clone()).await;
        let keeper = LeaseKeeper::start(store.clone(), lease(Duration::from_secs(9)));
        let told = keeper.lost().await;
        assert!(told.contains("no answer within"), "{told}");
        assert!(leader.arrived.lock().unwrap().len() > 1, "it is tried on another stream");
        let view = &store.inner.lock().view;
        assert_eq!(view.leader().map(|leader| leader.id), Some(1));
        assert_eq!(view.question(clock::now()).besides, None, "nobody says that it failed");
        server.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_was_not_woken_in_time_takes_nobody_for_silent() {
        let config = RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None };
        let store = RemoteStore::connect(config).unwrap();
        let lease = lease(Duration::from_secs(9));
        let (held, _) = watch::channel(Held { until: lease.held_until, lost: None });
        let keeping = Keeping { store, lease, held, tag: 0 };
        let sent = clock::now();
        tokio::time::advance(Duration::from_secs(5)).await;
        let answer = keeping.in_time(sent, std::future::pending::<Result<(), Status>>()).await;
        let Err(Unanswered::Silent(within)) = answer else { panic!("nothing answers") };
        assert_eq!(within, lease.ttl / PER_TTL);
        assert!(!Failure::silent(within).broken);
    }

    #[tokio::test(start_paused = true)]
    async fn the_holder_is_told_before_the_lease_may_end() {
        // Nobody listens there.
        let config = RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None };
        let store = RemoteStore::connect(config).unwrap();
        for ttl in [1, 2, 60].map(Duration::from_secs) {
            let lease = lease(ttl);
            let keeper = LeaseKeeper::start(store.clone(), lease);
            keeper.while_held(std::future::pending::<()>()).await.unwrap_err();
            let left = lease.held_until.saturating_duration_since(clock::now());
            assert!(left >= told_before(ttl) / 2 && left <= told_before(ttl), "{left:?} of {ttl:?} were left");
            assert!(!keeper.is_held());
        }
    }
}
