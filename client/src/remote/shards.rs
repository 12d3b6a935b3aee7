//! The shards of the cluster, as its leader knows and moves them ([`crate::shards`]).
//!
//! A request that is sent again does no harm: a shard that a node has already is not moved to it, and what is balanced stays. A move has
//! all the time of its caller, since workers are waited for before it and after it.

use std::time::{Duration, Instant};

use lake_proto::v1;
use lake_proto::v1::shards_client::ShardsClient;

use super::attempts::Rules;
use super::{RemoteStore, revision};
use crate::shards::{Route, ShardListing, ShardMove, ShardStatus};
use crate::store::{Error, Read};

impl RemoteStore {
    /// The shards in order, as the leader knows them.
    ///
    /// # Errors
    /// As every read.
    pub async fn shards(&self, deadline: Instant) -> Result<Read<ShardListing>, Error> {
        let (answer, _) = self
            .on_leader("listing the shards", deadline, Rules::READ, async |address, timeout| {
                let request = self.inner.request(v1::ListShardsRequest {}, timeout)?;
                let client = ShardsClient::new(self.inner.channel(&address)?);
                Ok(client.max_decoding_message_size(usize::MAX).list(request).await?.into_inner())
            })
            .await?;
        let shards = answer.shards.into_iter().map(Into::into).collect();
        let value = ShardListing { count: answer.count, maintenance: answer.maintenance, shards };
        Ok(Read { revision: revision(answer.header), value })
    }

    /// Gives a shard to a node, also in maintenance mode, or with `dry_run` only says whether it would be given. Nothing changes if it has it.
    ///
    /// # Errors
    /// `Refused` for a node that is no worker, or not heard; as every call.
    pub async fn move_shard(
        &self,
        shard: u32,
        node: &str,
        dry_run: bool,
        deadline: Instant,
    ) -> Result<ShardMove, Error> {
        let doing = format!("moving shard {shard} to {node}");
        let (answer, _) = self
            .on_leader(&doing, deadline, Rules::CHANGE, async |address, timeout| {
                let message = v1::MoveShardRequest { shard, node: node.to_owned(), dry_run };
                let request = self.inner.request(message, timeout)?;
                Ok(ShardsClient::new(self.inner.channel(&address)?).move_shard(request).await?.into_inner())
            })
            .await?;
        Ok(answer.moved.unwrap_or_default().into())
    }

    /// Moves shards from the workers with the most to those with the fewest, or with `dry_run` only says which.
    ///
    /// # Errors
    /// As every call.
    pub async fn balance_shards(&self, dry_run: bool, deadline: Instant) -> Result<Vec<ShardMove>, Error> {
        let (answer, _) = self
            .on_leader("balancing the shards", deadline, Rules::CHANGE, async |address, timeout| {
                let request = self.inner.request(v1::BalanceShardsRequest { dry_run }, timeout)?;
                Ok(ShardsClient::new(self.inner.channel(&address)?).balance(request).await?.into_inner())
            })
            .await?;
        Ok(answer.moves.into_iter().map(Into::into).collect())
    }

    /// Begins or ends maintenance mode, in which no shard is moved unless somebody asks for it.
    ///
    /// # Errors
    /// `Refused` where there are no shards yet; as every call.
    pub async fn maintain_shards(&self, maintenance: bool, deadline: Instant) -> Result<(), Error> {
        let doing = format!("{} maintenance mode", if maintenance { "beginning" } else { "ending" });
        self.on_leader(&doing, deadline, Rules::RESENDABLE, async |address, timeout| {
            let request = self.inner.request(v1::MaintainShardsRequest { maintenance }, timeout)?;
            Ok(ShardsClient::new(self.inner.channel(&address)?).maintain(request).await?.into_inner())
        })
        .await
        .map(drop)
    }
}

impl From<v1::ShardStatus> for ShardStatus {
    fn from(status: v1::ShardStatus) -> Self {
        Self {
            shard: status.shard,
            route: Route { node: status.node, lease: status.lease, followers: status.followers, reason: status.reason },
            fence: status.fence,
            remaining: status.remaining_ms.map(Duration::from_millis),
            suspicion: status.suspicion,
        }
    }
}

impl From<v1::ShardMove> for ShardMove {
    fn from(told: v1::ShardMove) -> Self {
        Self {
            shard: told.shard,
            from: Some(told.from).filter(|from| !from.is_empty()),
            to: told.to,
            fence: Some(told.fence).filter(|fence| *fence != 0),
        }
    }
}
