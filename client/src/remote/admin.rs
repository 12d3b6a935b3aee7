//! For operators' tools and supervisors: calls to one named peer (its status, founding a cluster), and changes of the
//! membership, which go to whoever leads.
//!
//! A change may be asked for again, and is, until the deadline: while nobody leads, or what it needs is not there. The
//! cluster's refusals end it, also that another change is under way, except for a join, which waits its turn.

use std::time::{Duration, Instant};

use lake_proto::v1;
use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::v1::error_detail::Kind;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::RemoteStore;
use super::attempts::{Failure, Rules, classify, describe};
use super::connections::{connection, request};
use crate::clock;
use crate::dial::Dialer;
use crate::secret::Secret;
use crate::store::{Applied, Error, InVain, Leader};

/// What the peer at `endpoint` knows.
///
/// # Errors
/// `Unavailable` if it does not answer within `timeout`, or the peer's refusal.
pub async fn peer_status(
    endpoint: &str,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<v1::StatusResponse, Error> {
    peer_status_by(&Dialer::default(), endpoint, secret, timeout).await
}

/// The same, with a connection that is made by this dialer.
///
/// # Errors
/// As [`peer_status`].
pub async fn peer_status_by(
    dialer: &Dialer,
    endpoint: &str,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<v1::StatusResponse, Error> {
    call(endpoint, "asking for its status", Applied::No, timeout, async {
        let mut client = client(dialer, endpoint)?;
        Ok(client.status(request(v1::StatusRequest {}, timeout, secret)?).await?.into_inner())
    })
    .await
}

/// Founds a cluster of `founders` through the fresh peer at `endpoint`. Safe to repeat with the same founders.
///
/// # Errors
/// `Unavailable` if it does not answer within `timeout`, or the peer's refusal.
pub async fn init(
    endpoint: &str,
    founders: Vec<v1::Member>,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<v1::InitResponse, Error> {
    call(endpoint, "founding the cluster", Applied::Unknown, timeout, async {
        let mut client = client(&Dialer::default(), endpoint)?;
        Ok(client.init(request(v1::InitRequest { founders }, timeout, secret)?).await?.into_inner())
    })
    .await
}

impl RemoteStore {
    /// Has a fresh peer taken in as a learner. Without an incarnation: whichever fresh peer with that id is at the address.
    ///
    /// # Errors
    /// `Refused` for a peer that the cluster must not take in; `Unavailable` if the deadline comes first.
    pub async fn join(&self, member: v1::Member, deadline: Instant) -> Result<v1::JoinResponse, Error> {
        let doing = format!("joining peer {}", member.id);
        let message = v1::JoinRequest { member: Some(member) };
        self.on_leading_peer(&doing, deadline, Rules::QUEUED_CHANGE, message, async |mut client, request| {
            client.join(request).await
        })
        .await
    }

    /// Makes a learner a voter, if it has caught up: the answer says whether, and how far it is.
    ///
    /// # Errors
    /// `Refused` for a peer that is no member, or while another change is under way; `Unavailable` if the deadline comes
    /// first.
    pub async fn promote(&self, id: u64, deadline: Instant) -> Result<v1::PromoteResponse, Error> {
        let message = v1::PromoteRequest { id };
        let doing = format!("promoting peer {id}");
        self.on_leading_peer(&doing, deadline, Rules::CHANGE, message, async |mut client, request| {
            client.promote(request).await
        })
        .await
    }

    /// Takes a voter or learner out for good.
    ///
    /// # Errors
    /// `Refused` for the last voter, without `force` if the voters that stay and answer would be no majority, or while
    /// another change is under way; `Unavailable` if the deadline comes first.
    pub async fn remove(&self, id: u64, force: bool, deadline: Instant) -> Result<v1::RemoveResponse, Error> {
        let message = v1::RemoveRequest { id, force };
        let doing = format!("removing peer {id}");
        self.on_leading_peer(&doing, deadline, Rules::CHANGE, message, async |mut client, request| {
            client.remove(request).await
        })
        .await
    }

    /// Puts a fresh peer in a voter's place, once it has caught up.
    ///
    /// # Errors
    /// As for joining and removing; `Unavailable` if it has not caught up by the deadline: ask again.
    pub async fn replace(&self, old_id: u64, by: v1::Member, deadline: Instant) -> Result<v1::ReplaceResponse, Error> {
        let doing = format!("replacing peer {old_id} by peer {}", by.id);
        let message = v1::ReplaceRequest { old_id, by: Some(by) };
        self.on_leading_peer(&doing, deadline, Rules::CHANGE, message, async |mut client, request| {
            client.replace(request).await
        })
        .await
    }

    /// Has another voter lead; `None`: whichever has most of the log.
    ///
    /// # Errors
    /// `Refused` for a peer that does not vote; `Unavailable` if it does not take over by the deadline.
    pub async fn transfer_leader(
        &self,
        to: Option<u64>,
        deadline: Instant,
    ) -> Result<v1::TransferLeadershipResponse, Error> {
        let message = v1::TransferLeadershipRequest { to: to.unwrap_or(0) };
        self.on_leading_peer("moving the leadership", deadline, Rules::CHANGE, message, async |mut client, request| {
            client.transfer_leadership(request).await
        })
        .await
    }

    /// One call on whoever leads, until it is answered, refused, or the deadline is over.
    async fn on_leading_peer<Q: Clone, A>(
        &self,
        doing: &str,
        deadline: Instant,
        rules: Rules,
        message: Q,
        send: impl AsyncFn(ClusterClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, Error> {
        let attempt = async |address: String, timeout| {
            let request = self.inner.request(message.clone(), timeout)?;
            Ok(send(ClusterClient::new(self.inner.channel(&address)?), request).await?.into_inner())
        };
        self.on_leader(doing, deadline, rules, attempt).await.map(|(answer, _)| answer)
    }
}

fn client(dialer: &Dialer, endpoint: &str) -> Result<ClusterClient<tonic::transport::Channel>, Status> {
    let connection = connection(endpoint).map_err(|e| Status::invalid_argument(e.to_string()))?;
    Ok(ClusterClient::new(dialer.channel(&connection)))
}

/// One call, once. `unanswered`: what a call that is not answered may have done.
pub(super) async fn call<T>(
    endpoint: &str,
    doing: &str,
    unanswered: Applied,
    timeout: Duration,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, Error> {
    let started = clock::now();
    let doing = format!("{endpoint}: {doing}");
    let failure = match tokio::time::timeout(timeout, answer).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(status)) => classify(status),
        Err(_) => Failure::silent(timeout),
    };
    let last = describe(&failure.status);
    let in_vain = InVain { doing, attempts: 1, elapsed: clock::since(started), leader: Leader::Without, last };
    let applied = if unanswered == Applied::No { Applied::No } else { failure.applied };
    match failure.kind() {
        None | Some(Kind::Unavailable) => Err(in_vain.unavailable(vec![endpoint.to_owned()], applied)),
        Some(_) if applied == Applied::Unknown => {
            Err(Error::Internal { message: in_vain.told(), doing: in_vain.doing, applied })
        }
        Some(_) => Err(Error::Refused { message: in_vain.told(), doing: in_vain.doing }),
    }
}
