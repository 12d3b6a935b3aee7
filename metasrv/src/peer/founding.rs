//! Founding: how fresh peers become one cluster, once (semantics, section 9).
//!
//! Any founder may be asked, and asked again. It
//! 1. asks every founder who it is, and so collects the incarnations;
//! 2. derives the cluster's id from these random incarnations, so that founders asked at the same time, or again after a
//!    crash, come to the same id without agreeing first;
//! 3. has every founder note that id durably (`Adopt`), which a peer of another cluster refuses;
//! 4. gives its own consensus core the founders as first membership; the rest is Raft.
//!
//! A static list of addresses alone founds nothing: a founder that lost its directory comes back with another incarnation
//! while others have a log already, and is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use openraft::errors::{InitializeError, RaftError};

use super::Peer;
use super::failure::Failure;
use crate::raft::types::Member as RaftMember;

/// Founders at most: more voters make a cluster slower, not safer.
pub const MAX_FOUNDERS: usize = 7;
/// How long one founder may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// What founding came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Founded {
    pub cluster_id: String,
    /// False: the same founders had founded it before.
    pub founded: bool,
}

/// A founder and what it said of itself.
struct Founder {
    member: v1::Member,
    answer: v1::IdentityResponse,
}

impl Peer {
    /// Who this peer is, for a founder that asks.
    pub fn identity_answer(&self) -> v1::IdentityResponse {
        v1::IdentityResponse {
            peer_id: self.identity.id,
            incarnation: self.identity.incarnation.clone(),
            cluster_id: self.log.mark().cluster_id,
            has_log: self.log.bounds().1.is_some(),
            supported_feature_level: self.settings.feature_level,
        }
    }

    /// Founds the cluster of `founders`.
    ///
    /// # Errors
    /// InvalidArgument for a list that makes no sense, WrongIdentity when some founder cannot be one, Unavailable when one
    /// does not answer: nothing is lost, ask again.
    pub async fn init(&self, founders: Vec<v1::Member>) -> Result<Founded, Failure> {
        self.check_list(&founders)?;
        let ids: BTreeSet<u64> = founders.iter().map(|f| f.id).collect();
        if let Some(answer) = self.founded_before(&ids)? {
            return Ok(answer);
        }
        let founders = self.ask_all(founders).await?;
        let cluster_id = cluster_id(&founders);
        check_founders(&founders, &cluster_id)?;
        for founder in founders.iter().filter(|f| f.member.id != self.identity.id) {
            self.have_adopt(founder, &cluster_id).await?;
        }
        let member = self.adopt(&cluster_id).await?;
        if founders.iter().any(|f| f.answer.has_log) {
            return Ok(Founded { cluster_id, founded: false });
        }
        let nodes: BTreeMap<u64, RaftMember> = founders
            .into_iter()
            .map(|f| (f.member.id, RaftMember { incarnation: f.answer.incarnation, ..f.member.into() }))
            .collect();
        match member.raft().initialize(nodes).await {
            Ok(()) => {
                tracing::info!(cluster = cluster_id, founders = ?ids, "founded the cluster");
                Ok(Founded { cluster_id, founded: true })
            }
            // Another founder was asked at the same time and was quicker.
            Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(Founded { cluster_id, founded: false }),
            Err(e) => Err(Failure::unavailable(format!("peer {}: founding the cluster: {e}", self.identity.id))),
        }
    }

    fn check_list(&self, founders: &[v1::Member]) -> Result<(), Failure> {
        if founders.is_empty() || founders.len() > MAX_FOUNDERS {
            return Err(Failure::invalid(format!(
                "{} founders were given; a cluster has 1 to {MAX_FOUNDERS}",
                founders.len()
            )));
        }
        let mut ids = BTreeSet::new();
        for founder in founders {
            if founder.id == 0 || !ids.insert(founder.id) {
                return Err(Failure::invalid(format!(
                    "founder id {}: every founder needs its own, above 0",
                    founder.id
                )));
            }
            if founder.raft_address.is_empty() || founder.grpc_address.is_empty() {
                return Err(Failure::invalid(format!("founder {}: both of its addresses are needed", founder.id)));
            }
        }
        if !ids.contains(&self.identity.id) {
            return Err(Failure::invalid(format!(
                "peer {} is asked to found a cluster that it is no founder of; ask one of the founders",
                self.identity.id
            )));
        }
        Ok(())
    }

    /// The answer for a peer that has a membership already.
    fn founded_before(&self, ids: &BTreeSet<u64>) -> Result<Option<Founded>, Failure> {
        let Some(member) = self.member() else { return Ok(None) };
        let (voters, _) = member.view.members();
        if voters.is_empty() {
            return Ok(None);
        }
        let voters: BTreeSet<u64> = voters.into_iter().map(|m| m.id).collect();
        if voters == *ids {
            return Ok(Some(Founded { cluster_id: member.cluster_id.clone(), founded: false }));
        }
        Err(Failure::new(
            Kind::WrongIdentity,
            format!(
                "peer {} belongs to cluster {} with the voters {voters:?}; change its membership instead of founding it again",
                self.identity.id, member.cluster_id
            ),
        ))
    }

    async fn ask_all(&self, founders: Vec<v1::Member>) -> Result<Vec<Founder>, Failure> {
        let asked = founders.into_iter().map(|member| async move {
            if member.id == self.identity.id {
                return Ok(Founder { member, answer: self.identity_answer() });
            }
            let answer = self.call(&member, |mut client| async move { client.identity(v1::IdentityRequest {}).await });
            let answer = answer.await?;
            if answer.peer_id != member.id {
                return Err(Failure::invalid(format!(
                    "at {} there is peer {}, not founder {}",
                    member.raft_address, answer.peer_id, member.id
                )));
            }
            Ok(Founder { member, answer })
        });
        let mut founders = futures::future::try_join_all(asked).await?;
        founders.sort_by_key(|f| f.member.id);
        Ok(founders)
    }

    async fn have_adopt(&self, founder: &Founder, cluster_id: &str) -> Result<(), Failure> {
        let request = v1::AdoptRequest {
            cluster_id: cluster_id.to_owned(),
            to_id: founder.member.id,
            to_incarnation: founder.answer.incarnation.clone(),
        };
        self.call(&founder.member, |mut client| async move { client.adopt(request).await }).await.map(drop)
    }

    async fn call<T, F>(
        &self,
        member: &v1::Member,
        call: impl FnOnce(crate::raft::network::Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let id = member.id;
        let at = self.transport.resolve(id, &member.raft_address).to_owned();
        let client = self.transport.client(id, &member.raft_address).map_err(Failure::invalid)?;
        match tokio::time::timeout(ANSWER, call(client)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => {
                let kind = lake_proto::status::detail(&status).map_or(Kind::Unavailable, |d| d.kind());
                Err(Failure::new(kind, format!("founder {id} at {at}: {}", status.message())))
            }
            Err(_) => Err(Failure::unavailable(format!(
                "founder {id} at {at} does not answer within {} s; start it, then ask again",
                ANSWER.as_secs()
            ))),
        }
    }
}

/// Whether all of them can be founders of this cluster.
fn check_founders(founders: &[Founder], cluster_id: &str) -> Result<(), Failure> {
    let past = founders.iter().find(|f| f.answer.has_log);
    let fresh = founders.iter().find(|f| f.answer.cluster_id.is_empty());
    if let (Some(past), Some(fresh)) = (past, fresh) {
        let what = format!(
            "peer {} is fresh, but peer {} belongs to cluster {}, which is founded: a peer whose directory was lost \
             cannot come back as itself; start it with a new id and join it",
            fresh.member.id, past.member.id, past.answer.cluster_id
        );
        return Err(Failure::new(Kind::WrongIdentity, what));
    }
    let other = founders.iter().find(|f| !f.answer.cluster_id.is_empty() && f.answer.cluster_id != cluster_id);
    let Some(other) = other else { return Ok(()) };
    let what = format!(
        "peer {} belongs to another cluster, {}; found the new one with an empty data directory there",
        other.member.id, other.answer.cluster_id
    );
    Err(Failure::new(Kind::WrongIdentity, what))
}

/// The id of the cluster that exactly these directories found: as random as their incarnations.
fn cluster_id(founders: &[Founder]) -> String {
    let folded = founders.iter().fold(0u128, |id, founder| {
        // An incarnation that is no number is refused by its owner's own start; it counts as 0 here.
        let incarnation = u128::from_str_radix(&founder.answer.incarnation, 16).unwrap_or(0);
        id.rotate_left(41) ^ incarnation.rotate_left((founder.member.id % 128) as u32)
    });
    uuid::Builder::from_random_bytes(folded.to_be_bytes()).into_uuid().simple().to_string()
}

/// Founds a cluster of one in this process: what an embedded store does.
pub(crate) async fn found_alone(peer: &Peer) -> Result<Arc<super::member::Member>, Failure> {
    if let Some(member) = peer.member()
        && peer.log.bounds().1.is_some()
    {
        return Ok(member);
    }
    let member = peer.identity.to_wire();
    let founder = Founder { answer: peer.identity_answer(), member };
    let cluster_id = match founder.answer.cluster_id.as_str() {
        "" => cluster_id(std::slice::from_ref(&founder)),
        known => known.to_owned(),
    };
    let serving = peer.adopt(&cluster_id).await?;
    let nodes = BTreeMap::from([(founder.member.id, RaftMember::from(founder.member))]);
    match serving.raft().initialize(nodes).await {
        Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(serving),
        Err(e) => Err(Failure::unavailable(format!("founding a cluster of one: {e}"))),
    }
}
