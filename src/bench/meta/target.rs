//! What a load is run against: lake's metadata cluster through lake-client, or an etcd through its own gRPC API.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use lake_client::store::{Consistency, MetaStore, ReadOptions};
use lake_proto::etcd;
use lake_proto::etcd::kv_client::KvClient;
use lake_proto::etcd::watch_client::WatchClient;
use lake_proto::kv::{Compare, Op, Txn};
use tonic::transport::{Channel, Endpoint};

/// One connection to a store.
#[async_trait]
pub trait Target: Send + Sync + 'static {
    fn name(&self) -> &'static str;
    /// Writes a key. Gives the revision.
    async fn put(&self, key: String, value: Bytes, deadline: Instant) -> Result<u64>;
    /// Writes several in one transaction. Gives the revision.
    async fn put_many(&self, entries: Vec<(String, Bytes)>, deadline: Instant) -> Result<u64>;
    /// Deletes several in one transaction.
    async fn delete_many(&self, keys: Vec<String>, deadline: Instant) -> Result<()>;
    /// Writes keys, each of which must be at a revision. Gives the new one.
    async fn cas(&self, writes: Vec<(String, u64, Bytes)>, deadline: Instant) -> Result<u64>;
    /// Reads a key that is there.
    async fn get(&self, key: String, consistency: Consistency, deadline: Instant) -> Result<()>;
    /// Watches a key. Gives the revisions at which it is changed from now on, once the watch is on.
    async fn watch(&self, key: String, deadline: Instant) -> Result<Revisions>;
}

/// The revisions at which something that is watched was changed.
pub type Revisions = BoxStream<'static, Result<u64>>;

/// lake's metadata cluster.
pub struct LakeTarget {
    store: RemoteStore,
}

impl LakeTarget {
    /// # Errors
    /// An endpoint is none.
    pub fn connect(endpoints: Vec<String>, secret: Option<Secret>) -> Result<Self> {
        Ok(Self { store: RemoteStore::connect(RemoteConfig { endpoints, secret })? })
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<u64> {
        let result = self.store.commit(txn, deadline).await?.result;
        ensure!(result.succeeded, "a compare failed: is another load running on the same keys?");
        Ok(result.revision)
    }
}

#[async_trait]
impl Target for LakeTarget {
    fn name(&self) -> &'static str {
        "lake"
    }

    async fn put(&self, key: String, value: Bytes, deadline: Instant) -> Result<u64> {
        self.put_many(vec![(key, value)], deadline).await
    }

    async fn put_many(&self, entries: Vec<(String, Bytes)>, deadline: Instant) -> Result<u64> {
        let then = entries.into_iter().map(|(key, value)| Op::put(key, value)).collect();
        self.commit(Txn { then, ..Txn::default() }, deadline).await
    }

    async fn delete_many(&self, keys: Vec<String>, deadline: Instant) -> Result<()> {
        let then = keys.into_iter().map(Op::delete).collect();
        self.commit(Txn { then, ..Txn::default() }, deadline).await.map(drop)
    }

    async fn cas(&self, writes: Vec<(String, u64, Bytes)>, deadline: Instant) -> Result<u64> {
        let mut txn = Txn::default();
        for (key, revision, value) in writes {
            txn.when.push(Compare::mod_revision(key.clone(), revision));
            txn.then.push(Op::put(key, value));
        }
        self.commit(txn, deadline).await
    }

    async fn get(&self, key: String, consistency: Consistency, deadline: Instant) -> Result<()> {
        let read = self.store.get(&key, ReadOptions { consistency, ..ReadOptions::default() }, deadline).await?;
        ensure!(read.value.is_some(), "{key} is not there");
        Ok(())
    }

    async fn watch(&self, key: String, deadline: Instant) -> Result<Revisions> {
        let mut watch = self.store.watch(&key, 0)?;
        // The first message says from where it was on.
        let first = tokio::time::timeout_at(deadline.into(), watch.next()).await?;
        first.context("the watch ended")??;
        let revisions = watch.map(|message| message.map(|m| m.changes.into_iter().map(|change| Ok(change.revision))));
        Ok(revisions.map_ok(futures::stream::iter).map_err(anyhow::Error::from).try_flatten().boxed())
    }
}

/// An etcd.
pub struct EtcdTarget {
    kv: KvClient<Channel>,
    channel: Channel,
}

impl EtcdTarget {
    /// # Errors
    /// Nothing answers at the address.
    pub async fn connect(address: &str) -> Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
        let channel = endpoint.connect().await.with_context(|| format!("connecting to etcd at {address}"))?;
        Ok(Self { kv: KvClient::new(channel.clone()), channel })
    }

    async fn txn(&self, request: etcd::TxnRequest, deadline: Instant) -> Result<u64> {
        let mut kv = self.kv.clone();
        let response = tokio::time::timeout_at(deadline.into(), kv.txn(request)).await??.into_inner();
        ensure!(response.succeeded, "a compare failed: is another load running on the same keys?");
        revision(response.header)
    }
}

fn revision(header: Option<etcd::ResponseHeader>) -> Result<u64> {
    match header {
        Some(header) => Ok(u64::try_from(header.revision)?),
        None => bail!("the answer has no header"),
    }
}

fn put(key: String, value: Bytes) -> etcd::RequestOp {
    let put = etcd::PutRequest { key: key.into(), value, ..etcd::PutRequest::default() };
    etcd::RequestOp { request: Some(etcd::request_op::Request::RequestPut(put)) }
}

fn delete(key: String) -> etcd::RequestOp {
    let delete = etcd::DeleteRangeRequest { key: key.into(), ..etcd::DeleteRangeRequest::default() };
    etcd::RequestOp { request: Some(etcd::request_op::Request::RequestDeleteRange(delete)) }
}

#[async_trait]
impl Target for EtcdTarget {
    fn name(&self) -> &'static str {
        "etcd"
    }

    async fn put(&self, key: String, value: Bytes, deadline: Instant) -> Result<u64> {
        let mut kv = self.kv.clone();
        let request = etcd::PutRequest { key: key.into(), value, ..etcd::PutRequest::default() };
        revision(tokio::time::timeout_at(deadline.into(), kv.put(request)).await??.into_inner().header)
    }

    async fn put_many(&self, entries: Vec<(String, Bytes)>, deadline: Instant) -> Result<u64> {
        let success = entries.into_iter().map(|(key, value)| put(key, value)).collect();
        self.txn(etcd::TxnRequest { success, ..etcd::TxnRequest::default() }, deadline).await
    }

    async fn delete_many(&self, keys: Vec<String>, deadline: Instant) -> Result<()> {
        let success = keys.into_iter().map(delete).collect();
        self.txn(etcd::TxnRequest { success, ..etcd::TxnRequest::default() }, deadline).await.map(drop)
    }

    async fn cas(&self, writes: Vec<(String, u64, Bytes)>, deadline: Instant) -> Result<u64> {
        use etcd::compare::{CompareResult, CompareTarget, TargetUnion};
        let mut request = etcd::TxnRequest::default();
        for (key, revision, value) in writes {
            request.compare.push(etcd::Compare {
                result: CompareResult::Equal as i32,
                target: CompareTarget::Mod as i32,
                key: key.clone().into(),
                target_union: Some(TargetUnion::ModRevision(i64::try_from(revision)?)),
                ..etcd::Compare::default()
            });
            request.success.push(put(key, value));
        }
        self.txn(request, deadline).await
    }

    async fn get(&self, key: String, consistency: Consistency, deadline: Instant) -> Result<()> {
        let mut kv = self.kv.clone();
        let serializable = match consistency {
            Consistency::Linearizable => false,
            Consistency::Local => true,
            Consistency::Bounded(_) => {
                bail!("etcd has no reads that may be so old and no older: take get, or get-local")
            }
        };
        let request = etcd::RangeRequest { key: key.into(), serializable, ..etcd::RangeRequest::default() };
        let response = tokio::time::timeout_at(deadline.into(), kv.range(request)).await??.into_inner();
        ensure!(response.kvs.len() == 1, "a key is not there");
        Ok(())
    }

    async fn watch(&self, key: String, deadline: Instant) -> Result<Revisions> {
        let create = etcd::WatchCreateRequest { key: key.into(), ..etcd::WatchCreateRequest::default() };
        let request =
            etcd::WatchRequest { request_union: Some(etcd::watch_request::RequestUnion::CreateRequest(create)) };
        // The stream of requests stays open: its end would end the watch.
        let requests = futures::stream::once(async { request }).chain(futures::stream::pending());
        let mut watch = WatchClient::new(self.channel.clone());
        let mut stream = tokio::time::timeout_at(deadline.into(), watch.watch(requests)).await??.into_inner();
        let first = tokio::time::timeout_at(deadline.into(), stream.message()).await??.context("the watch ended")?;
        ensure!(first.created && !first.canceled, "the watch was refused: {}", first.cancel_reason);
        let revisions = stream.map_err(anyhow::Error::from).and_then(async |message| {
            ensure!(!message.canceled, "the watch was ended: {}", message.cancel_reason);
            let revisions = message.events.into_iter().filter_map(|event| event.kv);
            let revisions: Vec<Result<u64>> = revisions.map(|kv| Ok(u64::try_from(kv.mod_revision)?)).collect();
            Ok(futures::stream::iter(revisions))
        });
        Ok(revisions.try_flatten().boxed())
    }
}
