//! The `Nodes` service: a stream for each query node, on which heartbeats come and instructions go.
//!
//! One task serves one stream, and holds no logic: a heartbeat at a time is handled ([`crate::peer::nodes::heartbeat`]) and answered,
//! instructions go out in between, and their answers are handed to the mailbox.
//!
//! It ends when the process is superseded or has left, with the first heartbeat that fails, when this peer is no longer on duty in the
//! term in which it accepted the last one (with NotLeader, so that the node moves at once), when nothing is heard for a
//! lease's time, when the caller goes, and when the server stops. What came over it goes with it, and nothing else.

use std::sync::Arc;

use lake_client::clock;
use lake_proto::v1;
use lake_proto::v1::heartbeat_answer::Outcome;
use lake_proto::v1::leader_message::Message as ToNode;
use lake_proto::v1::node_message::Message as FromNode;
use lake_proto::v1::nodes_server::Nodes;
use tokio::sync::{mpsc, watch};
use tonic::{Request, Response, Status, Streaming};

use super::streams::{Answers, Messages, Streams};
use super::{call, serving};
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::nodes::heartbeat::Line;
use crate::peer::nodes::mailbox::MAX_UNSENT;
use crate::peer::shares::Caller;

/// Serves the nodes of one peer's cluster.
pub struct NodesService {
    peer: Arc<Peer>,
    streams: Streams,
}

impl NodesService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>, streams: Streams) -> Self {
        Self { peer, streams }
    }
}

#[tonic::async_trait]
impl Nodes for NodesService {
    type HeartbeatStream = Answers<v1::LeaderMessage>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::NodeMessage>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let member = serving(&self.peer, request.metadata())?;
        let caller = self.peer.callers.at(request.remote_addr());
        let messages = request.into_inner();
        Ok(Response::new(self.streams.open(&caller.clone(), |answers| serve(member, caller, messages, answers))?))
    }

    async fn list(&self, request: Request<v1::ListNodesRequest>) -> Result<Response<v1::ListNodesResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let (revision, nodes) = member.list_nodes(&call).await?;
        Ok(Response::new(v1::ListNodesResponse { header: Some(member.header(revision)), nodes }))
    }

    async fn instruct(&self, request: Request<v1::InstructRequest>) -> Result<Response<v1::InstructResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let answer = member.instruct(&request.node, &request.kind, request.payload, request.one_way, &call).await?;
        let header = Some(member.header(member.published.current().state.revision()));
        Ok(Response::new(v1::InstructResponse { header, answer }))
    }
}

/// Serves one stream.
async fn serve(
    member: Arc<Member>,
    caller: Caller,
    messages: Streaming<v1::NodeMessage>,
    answers: Messages<v1::LeaderMessage>,
) {
    let (outgoing, instructions) = mpsc::channel(MAX_UNSENT);
    let mut line = Line::new(member.nodes.next_stream(), caller, outgoing);
    let ended = carry(&member, &mut line, messages, instructions, &answers).await;
    if let Some(node) = line.node() {
        member.nodes.closed(node, line.stream());
    }
    if let Err(failure) = ended {
        answers.end(failure);
    }
}

/// Carries messages until the stream is over; says why, if its caller is to know.
async fn carry(
    member: &Arc<Member>,
    line: &mut Line,
    mut messages: Streaming<v1::NodeMessage>,
    mut instructions: mpsc::Receiver<v1::Instruction>,
    answers: &Messages<v1::LeaderMessage>,
) -> Result<(), Failure> {
    let mut on_duty = member.duties.term();
    loop {
        let accepted_in = line.term();
        let message = tokio::select! {
            () = answers.stopped() => {
                let id = member.identity.id;
                return Err(Failure::unavailable(format!("peer {id} is stopping: ask the leader")));
            }
            () = moved_on(&mut on_duty, accepted_in) => return Err(member.view.not_leader()),
            Some(instruction) = instructions.recv() => {
                if !send(answers, ToNode::Instruction(instruction)).await {
                    return Ok(());
                }
                continue;
            }
            message = tokio::time::timeout(member.nodes.rhythm.lease, messages.message()) => message,
        };
        let Ok(message) = message else {
            let (id, ms) = (member.identity.id, member.nodes.rhythm.lease.as_millis());
            return Err(Failure::unavailable(format!("peer {id}: no heartbeat came for {ms} ms")));
        };
        match message.ok().flatten().and_then(|message| message.message) {
            Some(FromNode::Heartbeat(beat)) => {
                let answer = member.heartbeat(line, beat, clock::now()).await?;
                let goes_on = matches!(answer.outcome, Some(Outcome::Tenure(_) | Outcome::LeaseOver(_)));
                if !send(answers, ToNode::Answer(answer)).await || !goes_on {
                    return Ok(());
                }
            }
            Some(FromNode::Answer(answer)) => {
                if let Some(node) = line.node() {
                    let id = answer.id;
                    if !member.nodes.mailbox.answered(node, line.stream(), answer) {
                        tracing::debug!(node, id, "an answer that nobody waits for is dropped");
                    }
                }
            }
            None => return Ok(()),
        }
    }
}

/// Resolves once this peer is not on duty any more in the term in which it accepted a heartbeat.
async fn moved_on(on_duty: &mut watch::Receiver<u64>, accepted_in: u64) {
    // An error is the end of the member, and of this task with it.
    let _ = on_duty.wait_for(|term| accepted_in != 0 && *term != accepted_in).await;
}

async fn send(answers: &Messages<v1::LeaderMessage>, message: ToNode) -> bool {
    answers.send(v1::LeaderMessage { message: Some(message) }).await
}
