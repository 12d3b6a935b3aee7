//! A query node's side of the coordination: it registers, sends heartbeats to whoever leads, and carries out what the leader asks
//! for (docs/src/coordination.md).
//!
//! ```text
//!   unregistered --- registered ---> held (until the last answered heartbeat was SENT + the lease's life)
//!        ^                             |
//!        `--- the lease is over, or nothing was answered in time
//!   any --- another process was registered as this node since ---> superseded, for good
//! ```
//!
//! What a node owns it owns under the lease of its tenure ([`Tenure`]). A process that loses the lease registers again: it keeps its
//! epoch and gets another lease. As with any lease, that belief protects nothing by itself: what matters carries the compare
//! that the lease is alive (semantics, section 5).
//!
//! One task, ended with its [`NodeKeeper`]. It has one stream, to the leader; when that breaks, or a heartbeat is not answered
//! in time, it finds the leader again. A thousand nodes that lose the same leader are no herd: where nobody has named the next one, each
//! waits for a random time ([`Rhythm::before_asking`]) and then asks one peer; where somebody has, they come to it spread over a
//! third of the interval. Calls of the process do not wait for that: they find the leader for themselves, and for this task.
//!
//! The stream has a connection of its own, which is not probed: heartbeats and their answers do that.
//!
//! Limits: one heartbeat under way; [`MAX_INSTRUCTIONS`] instructions in hand, beyond which they are refused; answers wait in
//! order for the stream, and go with it.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::Revision;
use lake_proto::v1;
use lake_proto::v1::heartbeat_answer::Outcome as Answered;
use lake_proto::v1::instruction_answer::Outcome as Done;
use lake_proto::v1::leader_message::Message as FromLeader;
use lake_proto::v1::node_message::Message as ToLeader;
use lake_proto::v1::nodes_client::NodesClient;
use rand::Rng;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::attempts::{Attempts, classify, describe};
use super::{RemoteStore, revision};
use crate::backoff::Backoff;
use crate::clock;
use crate::nodes::{NodeStatus, Rhythm, new_process};
use crate::store::{Error, Read};

/// Instructions in hand at once.
pub const MAX_INSTRUCTIONS: usize = 64;
/// Answers and a heartbeat that wait for the stream to take them.
const OUTGOING: usize = MAX_INSTRUCTIONS + 2;
/// How long the first heartbeat of a process may take to be answered: it registers.
const REGISTERS_WITHIN: Duration = Duration::from_secs(5);
/// How long one search for the leader may take before its failure is told.
const LOOKS_FOR: Duration = Duration::from_secs(5);
/// The longest pause after a failure: nobody is helped by a heartbeat later than that.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a node is, and does.
#[async_trait]
pub trait Node: Debug + Send + Sync + 'static {
    /// What does not change while the process runs.
    fn info(&self) -> v1::NodeInfo;

    /// What does.
    fn load(&self) -> v1::NodeLoad;

    /// Carries out an instruction of a kind, if there is such a kind. It may be asked for more than once.
    ///
    /// # Errors
    /// Why it was not done, for the one who asked.
    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String>;
}

/// What a process holds as its node, since a heartbeat was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenure {
    /// Of the process: the revision of its registration.
    pub epoch: Revision,
    pub lease: LeaseId,
    /// Until when the lease is certainly alive, unless it is revoked.
    pub held_until: Instant,
}

#[derive(Debug, Clone, Default)]
struct Known {
    tenure: Option<Tenure>,
    /// Why the process is over.
    superseded: Option<String>,
    /// What the last attempt failed with.
    last: Option<String>,
}

impl Known {
    fn held(&self) -> Option<Tenure> {
        self.tenure.filter(|tenure| self.superseded.is_none() && clock::now() < tenure.held_until)
    }
}

/// What a process holds as its node at any moment. Cheap to clone; once the [`NodeKeeper`] has ended, the last tenure runs out.
#[derive(Debug, Clone)]
pub struct Tenures {
    known: watch::Receiver<Known>,
}

impl Tenures {
    /// What is certainly held now, unless it is revoked.
    pub fn now(&self) -> Option<Tenure> {
        self.known.borrow().held()
    }

    /// Waits until this lease is no longer held, by what is known here and this process's clock. Cancel-safe.
    pub async fn over(&self, lease: LeaseId) {
        let mut known = self.known.clone();
        loop {
            // Marked as seen with the same look: what changes right after it wakes.
            let held = known.borrow_and_update().held();
            let Some(tenure) = held.filter(|tenure| tenure.lease == lease) else { return };
            tokio::select! {
                () = tokio::time::sleep_until(tenure.held_until.into()) => {}
                // Its end leaves what is known as it is.
                Ok(()) = known.changed() => {}
            }
        }
    }
}

/// Keeps a process registered as a node until it is dropped.
#[derive(Debug)]
pub struct NodeKeeper {
    process: String,
    known: watch::Receiver<Known>,
    leave: CancellationToken,
    task: JoinHandle<()>,
}

impl NodeKeeper {
    /// Begins to register this process as the node of this name. Needs a tokio runtime.
    pub fn start(store: RemoteStore, name: &str, node: Arc<dyn Node>) -> Self {
        let (sender, known) = watch::channel(Known::default());
        let leave = CancellationToken::new();
        let process = new_process();
        let keeping = Keeping {
            store,
            name: name.to_owned(),
            process: process.clone(),
            node,
            known: sender,
            epoch: 0,
            lease: 0,
            rhythm: Rhythm::default(),
            told_to_leave: leave.clone(),
        };
        Self { process, known, leave, task: tokio::spawn(keeping.run()) }
    }

    /// The name of this process among those of its node.
    pub fn process(&self) -> &str {
        &self.process
    }

    /// What is certainly held now, unless it is revoked.
    pub fn tenure(&self) -> Option<Tenure> {
        self.tenures().now()
    }

    /// The same for others to ask.
    pub fn tenures(&self) -> Tenures {
        Tenures { known: self.known.clone() }
    }

    /// Waits until something is held. `None`: the process is superseded, or does not run any more.
    pub async fn held(&self) -> Option<Tenure> {
        let mut known = self.known.clone();
        loop {
            let held = known.wait_for(|known| known.tenure.is_some() || known.superseded.is_some()).await.ok()?.clone();
            if held.superseded.is_some() {
                return None;
            }
            match held.tenure.filter(|tenure| clock::now() < tenure.held_until) {
                Some(tenure) => return Some(tenure),
                None => known.changed().await.ok()?,
            }
        }
    }

    /// Waits until another process is registered as this node, and says so. Cancel-safe.
    pub async fn superseded(&self) -> String {
        let mut known = self.known.clone();
        let why = known.wait_for(|known| known.superseded.is_some()).await.ok().and_then(|k| k.superseded.clone());
        match why {
            Some(why) => why,
            // The keeper ends before this can.
            None => std::future::pending().await,
        }
    }

    /// Why the last attempt failed, if nothing has been answered since.
    pub fn last_failure(&self) -> Option<String> {
        self.known.borrow().last.clone()
    }

    /// Takes the node out of the registry, if the leader answers within `patience`, and ends. Without it, the node's lease ends
    /// by itself.
    pub async fn leave(mut self, patience: Duration) {
        self.leave.cancel();
        if tokio::time::timeout(patience, &mut self.task).await.is_err() {
            tracing::info!("the leader did not answer in time that this node leaves: its lease ends by itself");
        }
    }
}

impl Drop for NodeKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Keeping {
    store: RemoteStore,
    name: String,
    process: String,
    node: Arc<dyn Node>,
    known: watch::Sender<Known>,
    /// 0: not registered yet.
    epoch: Revision,
    /// 0: none.
    lease: LeaseId,
    /// As the leader said last.
    rhythm: Rhythm,
    told_to_leave: CancellationToken,
}

/// The heartbeats of one stream.
#[derive(Debug)]
struct Beats {
    sequence: u64,
    /// Those that are not answered yet, with when they were sent: the one before the one that says that the node leaves may
    /// still be under way.
    under_way: VecDeque<(u64, Instant)>,
    last_sent: Instant,
    said_leaving: bool,
}

impl Beats {
    fn none_sent() -> Self {
        Self { sequence: 0, under_way: VecDeque::new(), last_sent: clock::now(), said_leaving: false }
    }
}

/// Why a stream ended.
enum Ended {
    /// For good.
    Over,
    /// The peer at this address, spoken to since then, did not answer, or does not lead.
    Failed(String, Instant, Status),
    NoLeader(String),
}

/// What an answer means for the stream that it came on.
enum Next {
    GoOn,
    /// The lease is over: another heartbeat at once.
    Again,
    Over,
}

impl Keeping {
    async fn run(mut self) {
        let mut backoff = Backoff::default();
        loop {
            let before = self.held_until();
            let ended = self.one_stream().await;
            let worked = self.held_until() > before;
            if worked {
                backoff = Backoff::default();
            }
            let (last, redirected, led) = match ended {
                Ended::Over => return,
                Ended::NoLeader(why) => (why, false, None),
                Ended::Failed(address, began, status) => {
                    let failure = classify(status);
                    self.store.inner.after_failure(&address, began, &failure);
                    (format!("{address}: {}", describe(&failure.status)), failure.redirected, Some(address))
                }
            };
            tracing::debug!(node = self.name, "keeping the node registered: {last}");
            self.known.send_modify(|known| known.last = Some(last));
            let chance = rand::rng().random_range(0.0..1.0);
            // It worked until now, for all the nodes of that leader. One that leaves is waited for.
            let one_of_many = worked && !self.told_to_leave.is_cancelled() && !self.knows_a_leader();
            if let Some(led) = led.filter(|_| one_of_many) {
                let left =
                    self.held_until().map_or(Duration::ZERO, |until| until.saturating_duration_since(clock::now()));
                self.pause(self.rhythm.before_asking(left, chance)).await;
                self.store.inner.ask_in_turn(&led, &self.told_to_leave).await;
                continue;
            }
            let pause = match worked {
                true => (self.rhythm.interval / 3).mul_f64(chance),
                false if redirected => Duration::ZERO,
                false => backoff.next_wait() * 4,
            };
            self.pause(pause.min(LONGEST_PAUSE)).await;
        }
    }

    /// Waits, but not when the node is told to leave.
    async fn pause(&self, pause: Duration) {
        let sleep = tokio::time::sleep(pause);
        match self.told_to_leave.is_cancelled() {
            true => sleep.await,
            false => tokio::select! {
                () = sleep => {}
                () = self.told_to_leave.cancelled() => {}
            },
        }
    }

    fn knows_a_leader(&self) -> bool {
        self.store.inner.lock().view.leader().is_some()
    }

    fn held_until(&self) -> Option<Instant> {
        self.known.borrow().tenure.map(|tenure| tenure.held_until)
    }

    async fn one_stream(&mut self) -> Ended {
        let mut attempts = Attempts::new("keeping the node registered", clock::now() + LOOKS_FOR);
        let Some(address) = self.store.leader_address(&mut attempts).await else {
            return Ended::NoLeader(attempts.last);
        };
        // Not before it was known who leads: what fails then says nothing of whoever was named since.
        let began = clock::now();
        match self.beat_at(&address).await {
            Ok(()) => Ended::Over,
            Err(status) => Ended::Failed(address, began, status),
        }
    }

    /// Ends well when the process is superseded, or has left.
    async fn beat_at(&mut self, address: &str) -> Result<(), Status> {
        let (sender, outgoing) = mpsc::channel(OUTGOING);
        let mut beats = Beats::none_sent();
        let channel = self.store.inner.unprobed_channel(address)?;
        self.send(&sender, &mut beats)?;
        let mut timeout = if self.lease == 0 { REGISTERS_WITHIN } else { self.rhythm.timeout() };
        let mut messages = in_time(beats.last_sent + timeout, self.open(channel.clone(), outgoing)).await?;
        let mut in_hand = FuturesUnordered::new();
        loop {
            // What is waited for: the answer to the heartbeat that was sent, and then the time for the next one.
            let waits_for = beats.under_way.front().map(|(_, sent)| *sent);
            let until = waits_for.map_or(beats.last_sent + self.rhythm.interval, |sent| sent + timeout);
            tokio::select! {
                () = tokio::time::sleep_until(until.into()) => match waits_for {
                    Some(_) => return Err(Status::deadline_exceeded("a heartbeat was not answered in time")),
                    None => self.send(&sender, &mut beats)?,
                },
                () = self.told_to_leave.cancelled(), if !beats.said_leaving => self.send(&sender, &mut beats)?,
                Some(done) = in_hand.next(), if !in_hand.is_empty() => answer(&sender, done)?,
                message = messages.message() => match message?.and_then(|message| message.message) {
                    Some(FromLeader::Instruction(instruction)) if in_hand.len() < MAX_INSTRUCTIONS => {
                        in_hand.push(carry_out(self.node.clone(), instruction));
                    }
                    Some(FromLeader::Instruction(instruction)) => {
                        let full = format!("the node has {MAX_INSTRUCTIONS} instructions in hand, which is the most");
                        answer(&sender, (instruction.id, Err(full)))?;
                    }
                    Some(FromLeader::Answer(given)) => {
                        let Some((_, sent)) = beats.under_way.pop_front().filter(|(n, _)| *n == given.sequence) else {
                            let what = format!("the peer answered heartbeat {}, which is not its turn", given.sequence);
                            return Err(Status::internal(what));
                        };
                        timeout = self.rhythm.timeout();
                        match self.learn(given.outcome, sent)? {
                            Next::Over => return Ok(()),
                            Next::GoOn => {}
                            Next::Again => {
                                self.send(&sender, &mut beats)?;
                                timeout = REGISTERS_WITHIN;
                            }
                        }
                    }
                    None => return Err(Status::unavailable("the peer closed the stream")),
                },
            }
        }
    }

    /// Takes in the answer to a heartbeat sent at `sent`.
    fn learn(&mut self, outcome: Option<Answered>, sent: Instant) -> Result<Next, Status> {
        match outcome {
            Some(Answered::Tenure(tenure)) => {
                let ms = Duration::from_millis;
                let rhythm = Rhythm { interval: ms(tenure.interval_ms), lease: ms(tenure.lease_ms) };
                rhythm
                    .check()
                    .map_err(|why| Status::internal(format!("the leader's times do not go together: {why}")))?;
                self.rhythm = rhythm;
                if (self.epoch, self.lease) != (tenure.epoch, tenure.lease) {
                    tracing::info!(node = self.name, epoch = tenure.epoch, lease = tenure.lease, "registered");
                }
                (self.epoch, self.lease) = (tenure.epoch, tenure.lease);
                let held = Tenure { epoch: tenure.epoch, lease: tenure.lease, held_until: sent + rhythm.lease };
                self.known.send_modify(|known| {
                    known.tenure = Some(held);
                    known.last = None;
                });
                Ok(Next::GoOn)
            }
            Some(Answered::LeaseOver(_)) => {
                tracing::warn!(node = self.name, lease = self.lease, "the node's lease is over: registering again");
                self.lease = 0;
                self.known.send_modify(|known| known.tenure = None);
                Ok(Next::Again)
            }
            Some(Answered::Superseded(why)) => {
                tracing::error!(node = self.name, "{why}");
                self.known.send_modify(|known| {
                    known.tenure = None;
                    known.superseded = Some(why);
                });
                Ok(Next::Over)
            }
            Some(Answered::Left(_)) => {
                self.known.send_modify(|known| known.tenure = None);
                Ok(Next::Over)
            }
            None => Err(Status::internal("the peer's answer says nothing")),
        }
    }

    fn send(&self, outgoing: &mpsc::Sender<v1::NodeMessage>, beats: &mut Beats) -> Result<(), Status> {
        let now = clock::now();
        let leaving = self.told_to_leave.is_cancelled();
        beats.sequence += 1;
        beats.said_leaving |= leaving;
        beats.last_sent = now;
        beats.under_way.push_back((beats.sequence, now));
        let beat = v1::Heartbeat {
            node: self.name.clone(),
            process: self.process.clone(),
            epoch: self.epoch,
            lease: self.lease,
            sequence: beats.sequence,
            info: Some(self.node.info()),
            load: Some(self.node.load()),
            leaving,
        };
        outgoing
            .try_send(v1::NodeMessage { message: Some(ToLeader::Heartbeat(beat)) })
            .map_err(|_| Status::unavailable("the connection does not take heartbeats"))
    }

    async fn open(
        &self,
        channel: Channel,
        outgoing: mpsc::Receiver<v1::NodeMessage>,
    ) -> Result<Streaming<v1::LeaderMessage>, Status> {
        let messages = futures::stream::unfold(outgoing, |mut outgoing| async move {
            outgoing.recv().await.map(|message| (message, outgoing))
        });
        // The stream has no end of its own.
        let request = self.store.inner.untimed(messages)?;
        Ok(NodesClient::new(channel).heartbeat(request).await?.into_inner())
    }
}

async fn in_time<T>(until: Instant, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    match tokio::time::timeout_at(until.into(), answer).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded("the stream to the leader was not opened in time")),
    }
}

type Carried = (u64, Result<Bytes, String>);

async fn carry_out(node: Arc<dyn Node>, instruction: v1::Instruction) -> Carried {
    let done = node.carry_out(&instruction.kind, instruction.payload).await;
    if let Err(why) = &done {
        tracing::debug!(kind = instruction.kind, "an instruction was not carried out: {why}");
    }
    (instruction.id, done)
}

/// Answers an instruction, if that is wanted.
fn answer(outgoing: &mpsc::Sender<v1::NodeMessage>, (id, done): Carried) -> Result<(), Status> {
    if id == 0 {
        return Ok(());
    }
    let outcome = match done {
        Ok(answer) => Done::Done(answer),
        Err(why) => Done::Failed(why),
    };
    let answer = v1::InstructionAnswer { id, outcome: Some(outcome) };
    outgoing
        .try_send(v1::NodeMessage { message: Some(ToLeader::Answer(answer)) })
        .map_err(|_| Status::unavailable("the connection does not take answers"))
}

impl RemoteStore {
    /// The nodes that are registered, in order of their names, as the leader knows them.
    ///
    /// # Errors
    /// As every read.
    pub async fn nodes(&self, deadline: Instant) -> Result<Read<Vec<NodeStatus>>, Error> {
        let rules = super::attempts::Rules::READ;
        let (answer, _) = self
            .on_leader("listing the nodes", deadline, rules, async |address, timeout| {
                let request = self.inner.request(v1::ListNodesRequest {}, timeout)?;
                let client = NodesClient::new(self.inner.channel(&address)?);
                Ok(client.max_decoding_message_size(usize::MAX).list(request).await?.into_inner())
            })
            .await?;
        let value = answer.nodes.into_iter().map(Into::into).collect();
        Ok(Read { revision: revision(answer.header), value })
    }

    /// Has the leader send an instruction to a node, and waits for the answer; `one_way`: only until it is sent, and without a name to all
    /// nodes that are connected.
    ///
    /// # Errors
    /// As every call. It is not sent again by this call once it may have been carried out.
    pub async fn instruct(
        &self,
        node: &str,
        kind: &str,
        payload: Bytes,
        one_way: bool,
        deadline: Instant,
    ) -> Result<Bytes, Error> {
        let message = v1::InstructRequest { node: node.to_owned(), kind: kind.to_owned(), payload, one_way };
        let doing = format!("instructing node {node}");
        let rules = super::attempts::Rules { attempt: None, ..super::attempts::Rules::ONCE };
        let (answer, _) = self
            .on_leader(&doing, deadline, rules, async |address, timeout| {
                let request = self.inner.request(message.clone(), timeout)?;
                Ok(NodesClient::new(self.inner.channel(&address)?).instruct(request).await?.into_inner())
            })
            .await?;
        Ok(answer.answer)
    }
}
