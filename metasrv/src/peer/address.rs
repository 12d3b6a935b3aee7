//! Where members are reached: records in the membership that follow their peers.
//!
//! Founding notes both addresses of every peer. A peer that is started with others has its record corrected: it asks the
//! leader ([`Addresses::keep_own`]), which replaces that one record by a membership entry ([`Addresses::replace`]). Until
//! then others reach it only where they were told to look (`peers`): a leader that was not told calls where nobody is, and the
//! peer hears of no leader. So it asks every other member then, of which one leads.
//!
//! Invariants:
//! - only the addresses change: voters, learners and incarnations stay as they are;
//! - a peer speaks for itself only. An address at which another peer answers does no harm: every call names the incarnation
//!   it is meant for (semantics, section 9).
//!
//! Limits: one replacement at a time in a leader, one request at a time from a peer, of [`ANSWER`] at most, and
//! [`FIRST_RETRY`] to [`LAST_RETRY`] between them, to [`LAST_SEARCH`] while it hears of no leader.
//! Failure cases: no leader, no quorum, another membership change under way: the peer asks again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};
use lake_client::clock;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use openraft::ChangeMembers;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::raft::Precondition;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::failure::Failure;
use super::view::View;
use crate::raft::network::Network;
use crate::raft::types::{Member, TypeConfig};

/// Longest address that a record takes.
pub const MAX_ADDRESS_BYTES: usize = 512;
/// How often a peer looks at its record.
const EVERY: Duration = Duration::from_millis(250);
/// How long the leader may take to replace it.
const ANSWER: Duration = Duration::from_secs(5);
/// How long to wait before asking again, at first and at most.
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(5);
/// The most where no leader is known.
const LAST_SEARCH: Duration = Duration::from_secs(1);

/// Corrects records. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Addresses {
    view: View,
    network: Network,
    /// openraft refuses a membership change while another is under way; peers that start together are queued instead.
    turn: Arc<Semaphore>,
}

impl Addresses {
    /// For this peer.
    pub fn new(view: View, network: Network) -> Self {
        Self { view, network, turn: Arc::new(Semaphore::new(1)) }
    }

    // ---- the peer's side --------------------------------------------------------------------------------------

    /// Has this peer's own record corrected whenever it is wrong, until it is cancelled.
    /// It does not wait for the peer to have recovered: that takes a leader, which may not find it before.
    pub(super) async fn keep_own(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.keep() => {}
        }
    }

    async fn keep(&self) {
        let mut retry = FIRST_RETRY;
        loop {
            if !self.outdated() {
                retry = FIRST_RETRY;
                tokio::time::sleep(EVERY).await;
                continue;
            }
            match self.view.leader_id() {
                None => match self.ask_everybody().await {
                    Ok(()) => retry = FIRST_RETRY,
                    Err(why) => {
                        tracing::debug!("asking every member for this peer's addresses to be corrected: {why}");
                        retry = (retry * 2).min(LAST_SEARCH);
                    }
                },
                Some(leader) => match self.ask(leader).await {
                    // This peer may learn of it a little later than the leader.
                    Ok(()) => retry = FIRST_RETRY,
                    Err(why) if retry == LAST_RETRY => {
                        tracing::warn!(leader, "the membership does not know where this peer is reached: {why}");
                    }
                    Err(why) => {
                        tracing::debug!(leader, "asking for this peer's addresses to be corrected: {why}");
                        retry = (retry * 2).min(LAST_RETRY);
                    }
                },
            }
            tokio::time::sleep(retry).await;
        }
    }

    /// Whether this peer is reached elsewhere than its record says. A peer that runs embedded is reached nowhere.
    fn outdated(&self) -> bool {
        let own = Member::from(self.view.identity().to_wire());
        let embedded = own.raft_address.is_empty();
        !embedded && self.view.own_record().is_some_and(|r| r.incarnation == own.incarnation && r != own)
    }

    /// Done once any of the other members has done it.
    async fn ask_everybody(&self) -> Result<(), String> {
        let (voters, learners) = self.view.members();
        let others = voters.iter().chain(&learners).map(|member| member.id).filter(|id| *id != self.view.id());
        let mut asking: FuturesUnordered<_> = others.map(|id| self.ask(id)).collect();
        let mut why = Vec::new();
        while let Some(answer) = asking.next().await {
            match answer {
                Ok(()) => return Ok(()),
                Err(other) => why.push(other),
            }
        }
        Err(why.join("; "))
    }

    async fn ask(&self, leader: u64) -> Result<(), String> {
        let own = self.view.identity().to_wire();
        if leader == own.id {
            return self.replace(own, clock::now() + ANSWER).await.map_err(|f| f.message);
        }
        let known = self.view.member(leader).ok_or("the leader is not in the membership known here")?;
        let header = self.network.sender.header(leader, &Member::from(known.clone()));
        let mut client = self.network.transport.client(leader, &known.raft_address).map_err(|e| e.to_string())?;
        let mut request = tonic::Request::new(v1::ReaddressRequest { header: Some(header), self_: Some(own) });
        request.set_timeout(ANSWER);
        match tokio::time::timeout(ANSWER, client.readdress(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err(format!("peer {leader} does not answer within {} s", ANSWER.as_secs())),
        }
    }

    // ---- the leader's side ------------------------------------------------------------------------------------

    /// Replaces the addresses in a member's record; returns once that is committed. Nothing happens if they are there.
    ///
    /// # Errors
    /// NotLeader with a hint, InvalidArgument, WrongIdentity for a member that is none: nothing was proposed. Unavailable
    /// while another change is under way, or without a quorum.
    pub async fn replace(&self, wanted: v1::Member, deadline: Instant) -> Result<(), Failure> {
        for address in [&wanted.raft_address, &wanted.grpc_address] {
            if address.is_empty() || address.len() > MAX_ADDRESS_BYTES {
                let what = format!("peer {}: an address has 1 to {MAX_ADDRESS_BYTES} bytes", wanted.id);
                return Err(Failure::invalid(what));
            }
        }
        match tokio::time::timeout_at(deadline.into(), self.replace_in_turn(wanted)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::unknown(format!(
                "peer {}: the member's new addresses were not committed within the deadline",
                self.view.id()
            ))),
        }
    }

    /// The right to propose a membership; dropping it lets others in.
    pub(super) async fn turn(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.turn.clone().acquire_owned().await.map_err(|_| Failure::unavailable("the peer is stopping"))
    }

    async fn replace_in_turn(&self, wanted: v1::Member) -> Result<(), Failure> {
        let _turn = self.turn().await?;
        if self.view.leader_id() != Some(self.view.id()) {
            return Err(self.view.not_leader());
        }
        let id = wanted.id;
        let wanted = Member::from(wanted);
        let metrics = self.view.metrics();
        let membership = metrics.membership_config;
        match membership.membership().get_node(&id) {
            Some(known) if *known == wanted => return Ok(()),
            Some(known) if known.incarnation == wanted.incarnation => {}
            _ => {
                let what = format!("peer {id} with incarnation {:?} is no member", wanted.incarnation);
                return Err(Failure::new(Kind::WrongIdentity, what));
            }
        }
        // Any change to a joint membership would also end it, and so change the voters.
        if membership.membership().get_joint_config().len() > 1
            || metrics.committed_membership_config.log_id() != membership.log_id()
        {
            return Err(Failure::unavailable(format!("peer {}: a membership change is under way", self.view.id())));
        }
        let unchanged = Precondition::LastMembershipLogId { last_membership_log_id: *membership.log_id() };
        let change = ChangeMembers::SetNodes(BTreeMap::from([(id, wanted.clone())]));
        self.view.raft().change_membership_if(change, true, [unchanged]).await.map_err(|e| self.failure(&e))?;
        self.network.moved(id, &wanted.raft_address);
        tracing::info!(
            peer = id,
            raft = wanted.raft_address,
            grpc = wanted.grpc_address,
            "a member is reached elsewhere"
        );
        Ok(())
    }

    fn failure(&self, error: &RaftError<TypeConfig, ClientWriteError<TypeConfig>>) -> Failure {
        let what = format!("peer {}: replacing a member's addresses: {error}", self.view.id());
        match error {
            RaftError::APIError(ClientWriteError::ForwardToLeader(_)) => self.view.not_leader(),
            RaftError::APIError(ClientWriteError::LogEntryDiscarded(_)) | RaftError::Fatal(_) => Failure::unknown(what),
            RaftError::APIError(_) => Failure::unavailable(what),
        }
    }
}
