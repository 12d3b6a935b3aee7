//! A node in the same process as the store: it is registered, heard and told what to do by the same handlers as any
//! other, without a stream between.
//!
//! One task, ended with [`EmbeddedNode::leave`] or when that is dropped. A heartbeat that fails closes what stands for
//! the stream, and another one is opened a little later.
//!
//! Limits: [`MAX_INSTRUCTIONS`] in hand; what comes beyond waits in the mailbox, which is bounded.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lake_client::clock;
use lake_client::nodes::new_process;
use lake_client::remote::node::{MAX_INSTRUCTIONS, Node};
use lake_proto::v1;
use lake_proto::v1::heartbeat_answer::Outcome;
use lake_proto::v1::instruction_answer::Outcome as Done;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::EmbeddedStore;
use crate::peer::member::Member;
use crate::peer::nodes::heartbeat::Line;
use crate::peer::nodes::mailbox::MAX_UNSENT;
use crate::peer::shares::Caller;

/// How long until another try after a heartbeat that failed.
const AGAIN: Duration = Duration::from_millis(500);

/// Keeps a node registered until it is dropped.
#[derive(Debug)]
pub struct EmbeddedNode {
    leave: CancellationToken,
    task: JoinHandle<()>,
}

impl EmbeddedNode {
    /// Takes the node out of the registry, if that is done within `patience`, and ends.
    pub async fn leave(mut self, patience: Duration) {
        self.leave.cancel();
        if tokio::time::timeout(patience, &mut self.task).await.is_err() {
            tracing::info!("the node did not leave in time: its lease ends by itself");
        }
    }
}

impl Drop for EmbeddedNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl EmbeddedStore {
    /// Registers this process as the node of this name, too. Needs a tokio runtime.
    pub fn serve_node(&self, name: &str, node: Arc<dyn Node>) -> EmbeddedNode {
        let leave = CancellationToken::new();
        let (name, process) = (name.to_owned(), new_process());
        let keeping = Keeping {
            member: self.member.clone(),
            caller: self.caller.clone(),
            name,
            process,
            node,
            epoch: 0,
            lease: 0,
        };
        EmbeddedNode { leave: leave.clone(), task: tokio::spawn(keeping.run(leave)) }
    }
}

struct Keeping {
    member: Arc<Member>,
    caller: Caller,
    name: String,
    process: String,
    node: Arc<dyn Node>,
    epoch: u64,
    lease: u64,
}

/// Why what stands for a stream has ended.
enum Ended {
    /// For good.
    Over,
    Failed,
}

impl Keeping {
    async fn run(mut self, leave: CancellationToken) {
        loop {
            let (outgoing, instructions) = mpsc::channel(MAX_UNSENT);
            let stream = self.member.nodes.next_stream();
            let line = Line::new(stream, self.caller.clone(), outgoing);
            let ended = self.one_stream(line, instructions, &leave).await;
            self.member.nodes.closed(&self.name, stream);
            match ended {
                Ended::Over => return,
                Ended::Failed if leave.is_cancelled() => return,
                Ended::Failed => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    async fn one_stream(
        &mut self,
        mut line: Line,
        mut instructions: mpsc::Receiver<v1::Instruction>,
        leave: &CancellationToken,
    ) -> Ended {
        let mut in_hand = FuturesUnordered::new();
        let mut beats = tokio::time::interval(self.member.nodes.rhythm.interval);
        let mut sequence = 0;
        loop {
            tokio::select! {
                () = leave.cancelled() => {
                    let _ = self.beat(&mut line, sequence + 1, true).await;
                    return Ended::Over;
                }
                _ = beats.tick() => {
                    sequence += 1;
                    match self.beat(&mut line, sequence, false).await {
                        Ok(true) => {}
                        // Its lease is over, or it was registered under another one: at once, not after an interval.
                        Ok(false) => beats.reset_immediately(),
                        Err(ended) => return ended,
                    }
                }
                Some(instruction) = instructions.recv(), if in_hand.len() < MAX_INSTRUCTIONS => {
                    in_hand.push(carry_out(self.node.clone(), instruction));
                }
                Some(answer) = in_hand.next() => {
                    let answer: v1::InstructionAnswer = answer;
                    if answer.id != 0 {
                        self.member.nodes.mailbox.answered(&self.name, line.stream(), answer);
                    }
                }
            }
        }
    }

    /// One heartbeat. False: the lease is over.
    async fn beat(&mut self, line: &mut Line, sequence: u64, leaving: bool) -> Result<bool, Ended> {
        let beat = v1::Heartbeat {
            node: self.name.clone(),
            process: self.process.clone(),
            epoch: self.epoch,
            lease: self.lease,
            sequence,
            info: Some(self.node.info()),
            load: Some(self.node.load()),
            leaving,
        };
        let answer = self.member.heartbeat(line, beat, clock::now()).await.map_err(|failure| {
            tracing::debug!(node = self.name, "keeping the node registered: {}", failure.message);
            Ended::Failed
        })?;
        match answer.outcome {
            Some(Outcome::Tenure(tenure)) => {
                (self.epoch, self.lease) = (tenure.epoch, tenure.lease);
                Ok(true)
            }
            Some(Outcome::LeaseOver(_)) => {
                self.lease = 0;
                Ok(false)
            }
            Some(Outcome::Superseded(why)) => {
                tracing::error!(node = self.name, "{why}");
                Err(Ended::Over)
            }
            Some(Outcome::Left(_)) => Err(Ended::Over),
            None => Err(Ended::Failed),
        }
    }
}

async fn carry_out(node: Arc<dyn Node>, instruction: v1::Instruction) -> v1::InstructionAnswer {
    let done: Result<Bytes, String> = node.carry_out(&instruction.kind, instruction.payload).await;
    let outcome = match done {
        Ok(answer) => Done::Done(answer),
        Err(why) => Done::Failed(why),
    };
    v1::InstructionAnswer { id: instruction.id, outcome: Some(outcome) }
}
