//! The `Kv` service: reads on any peer, transactions on the leader.

use std::sync::Arc;
use std::time::Duration;

use lake_client::store::{Consistency, ReadOptions};
use lake_proto::kv::Txn;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::kv_server::Kv;
use lake_proto::{CLUSTER_METADATA_KEY, v1};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::deadline;
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::member::Member;

/// Serves one peer's map.
pub struct KvService {
    peer: Arc<Peer>,
}

impl KvService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }

    /// The member that serves, if the caller means its cluster.
    fn member(&self, metadata: &MetadataMap) -> Result<Arc<Member>, Failure> {
        let member = self.peer.serving()?;
        match metadata.get(CLUSTER_METADATA_KEY) {
            Some(meant) if meant.as_bytes() != member.cluster_id.as_bytes() => {
                let what = format!(
                    "the request is for cluster {}, and peer {} belongs to cluster {}: correct the endpoints",
                    String::from_utf8_lossy(meant.as_bytes()),
                    member.identity.id,
                    member.cluster_id
                );
                Err(Failure::new(Kind::WrongIdentity, what))
            }
            _ => Ok(member),
        }
    }
}

fn read_options(options: Option<v1::ReadOptions>) -> Result<ReadOptions, Failure> {
    use v1::read_options::Consistency as Wire;
    let options = options.unwrap_or_default();
    let consistency = match Wire::try_from(options.consistency) {
        Ok(Wire::Linearizable) => Consistency::Linearizable,
        Ok(Wire::Local) => Consistency::Local,
        Ok(Wire::Bounded) => Consistency::Bounded(Duration::from_millis(options.max_staleness_ms)),
        Err(_) => return Err(Failure::invalid(format!("there is no consistency {}", options.consistency))),
    };
    Ok(ReadOptions { consistency, min_revision: options.min_revision })
}

#[tonic::async_trait]
impl Kv for KvService {
    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let deadline = deadline(request.metadata());
        let member = self.member(request.metadata())?;
        let request = request.into_inner();
        let (revision, entry) = member.get(&request.key, read_options(request.options)?, deadline).await?;
        Ok(Response::new(v1::GetResponse { header: Some(member.header(revision)), entry: entry.map(Into::into) }))
    }

    async fn batch_get(&self, request: Request<v1::BatchGetRequest>) -> Result<Response<v1::BatchGetResponse>, Status> {
        let deadline = deadline(request.metadata());
        let member = self.member(request.metadata())?;
        let request = request.into_inner();
        let (revision, entries) = member.batch_get(&request.keys, read_options(request.options)?, deadline).await?;
        let entries = entries.into_iter().map(Into::into).collect();
        Ok(Response::new(v1::BatchGetResponse { header: Some(member.header(revision)), entries }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let deadline = deadline(request.metadata());
        let member = self.member(request.metadata())?;
        let request = request.into_inner();
        let token = Some(request.page.as_str()).filter(|page| !page.is_empty());
        let options = read_options(request.options)?;
        let page = member.list(&request.prefix, token, request.limit, options, deadline).await?;
        Ok(Response::new(v1::ListResponse {
            header: Some(member.header(page.revision)),
            entries: page.entries.into_iter().map(Into::into).collect(),
            next_page: page.next.unwrap_or_default(),
        }))
    }

    async fn txn(&self, request: Request<v1::TxnRequest>) -> Result<Response<v1::TxnResponse>, Status> {
        let deadline = deadline(request.metadata());
        let member = self.member(request.metadata())?;
        let txn = request.into_inner().txn.ok_or_else(|| Failure::invalid("the request has no transaction"))?;
        let txn = Txn::try_from(txn).map_err(Failure::invalid)?;
        let result = member.commit(txn, deadline).await?;
        let header = member.header(result.revision);
        Ok(Response::new(result.into_response(header)))
    }
}
