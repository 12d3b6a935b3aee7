//! Which query nodes there are to spread a query over, and which of them a file prefers.
//!
//! In a metadata cluster they are those that the leader has as up, of this node's own version: plans are written by one and read
//! by the others. Elsewhere they are those that the configuration names. The list is asked for when a query is large enough to
//! be spread, and kept for [`FRESH_FOR`]; a query that is not asks nobody.
//!
//! Where a query takes fewer nodes than there are, the nodes of the shard of its largest table come first, the leader worker before its
//! followers: they have the table's metadata in their caches, since they do its upkeep.
//!
//! Which node reads which file is settled by rendezvous hashing: each node has a score for each file, and the highest gets it. So
//! a file is read by the same node again, where its footer and its deletes are cached, and a node that comes or goes moves
//! only its own files. A node that has its part already, and a quarter more, gets no further ones: they go to the next.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lake_client::metadata::Metadata;
use lake_client::nodes::NodeState;
use lake_client::remote::RemoteStore;
use url::Url;
use uuid::Uuid;

use crate::config::NodeRole;
use crate::error::{Error, Result};

/// How long a list of nodes is used.
const FRESH_FOR: Duration = Duration::from_secs(5);
/// How long a query waits for it; without it, it runs where it is.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub struct Peers {
    cluster: Option<RemoteStore>,
    named: Mutex<Arc<[Url]>>,
    known: tokio::sync::Mutex<Option<(Instant, Arc<[Url]>)>>,
    metadata: Metadata,
}

impl Peers {
    /// Those of a metadata cluster, or those that are named (`host:port`). The metadata tells of shards.
    ///
    /// # Errors
    /// `Invalid`: a name is no address.
    pub fn new(cluster: Option<RemoteStore>, named: &[String], metadata: Metadata) -> Result<Self> {
        let named = urls(named)?;
        Ok(Self { cluster, named: Mutex::new(named), known: tokio::sync::Mutex::default(), metadata })
    }

    /// From now on these, whatever the cluster says.
    ///
    /// # Errors
    /// As [`Peers::new`].
    pub fn name(&self, nodes: &[String]) -> Result<()> {
        *self.named.lock().unwrap_or_else(PoisonError::into_inner) = urls(nodes)?;
        Ok(())
    }

    /// Whether there may be others than this node, without asking anybody.
    pub fn may_be_some(&self) -> bool {
        self.cluster.is_some() || !self.named.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The nodes that take part in queries now, in order of their addresses.
    ///
    /// # Errors
    /// `Unavailable`: the leader does not say.
    pub async fn now(&self, deadline: Instant) -> Result<Arc<[Url]>> {
        let named = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let cluster = match &self.cluster {
            Some(cluster) if named.is_empty() => cluster,
            _ => return Ok(named),
        };
        let deadline = deadline.min(Instant::now() + ASK_WITHIN);
        let late = |_| Error::unavailable("listing the query nodes took too long");
        let mut known = tokio::time::timeout_at(deadline.into(), self.known.lock()).await.map_err(late)?;
        if let Some((when, nodes)) = known.as_ref()
            && when.elapsed() < FRESH_FOR
        {
            return Ok(nodes.clone());
        }
        let listed = cluster.nodes(deadline).await;
        let listed = listed.map_err(|e| Error::unavailable(format!("listing the query nodes: {e}")))?.value;
        let serves = |roles: &[String]| roles.iter().any(|role| role == NodeRole::Query.as_str());
        let up = listed.iter().filter(|node| {
            let info = &node.info;
            node.state() == NodeState::Up && info.version == env!("CARGO_PKG_VERSION") && serves(&info.roles)
        });
        let nodes = urls(&up.map(|node| node.info.flight_address.clone()).collect::<Vec<_>>())?;
        *known = Some((Instant::now(), nodes.clone()));
        Ok(nodes)
    }

    /// The nodes of a table's shard, the leader worker first, as the watches have told of them: it asks nobody.
    pub fn of_shard(&self, table: Option<Uuid>) -> Vec<Url> {
        let (Some(table), Some(shards), Some(nodes)) = (table, self.metadata.shards(), self.metadata.nodes()) else {
            return Vec::new();
        };
        let Some(fenced) = shards.routes.of(table) else { return Vec::new() };
        let there = fenced.route.nodes().filter_map(|name| nodes.nodes.get(name));
        there.filter_map(|node| url(&node.record.flight_address).ok()).collect()
    }
}

fn urls(addresses: &[String]) -> Result<Arc<[Url]>> {
    let mut urls = Vec::with_capacity(addresses.len());
    for address in addresses {
        urls.push(url(address)?);
    }
    urls.sort();
    urls.dedup();
    Ok(urls.into())
}

fn url(address: &str) -> Result<Url> {
    let url = Url::parse(&format!("http://{address}"));
    url.map_err(|e| Error::invalid(format!("{address} is no address of a query node: {e}")))
}

/// How much a node is to have something. The same on every node of a version.
fn score(node: &Url, of: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node.as_str(), of).hash(&mut hasher);
    hasher.finish()
}

/// At most so many of the nodes: those of `first` that are among them, in their order, then those that are to have it the most.
pub fn preferred(nodes: &[Url], first: &[Url], of: &str, most: usize) -> Vec<Url> {
    let mut nodes = nodes.to_vec();
    let place = |node: &Url| first.iter().position(|other| other == node).unwrap_or(first.len());
    nodes.sort_by_cached_key(|node| (place(node), Reverse(score(node, of))));
    nodes.truncate(most);
    nodes
}

/// Gives parts of files, with their names and sizes, to nodes: for each node, which. Each part is given once.
pub fn shared_out(nodes: &[Url], parts: &[(&str, u64)]) -> Vec<Vec<usize>> {
    let mut given = vec![Vec::new(); nodes.len()];
    if nodes.is_empty() {
        return given;
    }
    let total: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    let part = total.div_ceil(nodes.len() as u64);
    let most = part + part / 4;
    let mut held = vec![0u64; nodes.len()];
    let mut order: Vec<usize> = (0..parts.len()).collect();
    // The largest first; equal ones in the order they came.
    order.sort_by_key(|index| Reverse(parts[*index].1));
    for index in order {
        let (name, bytes) = parts[index];
        let mut ranked: Vec<usize> = (0..nodes.len()).collect();
        ranked.sort_by_cached_key(|node| Reverse(score(&nodes[*node], name)));
        let least = (0..nodes.len()).min_by_key(|node| held[*node]);
        let fits = ranked.into_iter().find(|node| held[*node] + bytes <= most);
        let Some(node) = fits.or(least) else { continue };
        held[node] += bytes;
        given[node].push(index);
    }
    given
}

#[cfg(test)]
mod tests {
    use lake_client::cache::CacheConfig;
    use lake_client::memory::MemoryStore;
    use lake_client::nodes::Record;
    use lake_client::shards::{self, Route, SETTINGS, Settings};
    use lake_proto::v1;

    use super::*;

    fn nodes(count: usize) -> Vec<Url> {
        (0..count).map(|i| Url::parse(&format!("http://10.0.0.{i}:9393")).unwrap()).collect()
    }

    #[test]
    fn every_part_is_given_once_and_no_node_gets_much_more_than_its_share() {
        let names: Vec<String> = (0..100).map(|i| format!("s3://b/t/{i}.parquet")).collect();
        for count in 1..5 {
            let parts: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 10)).collect();
            let given = shared_out(&nodes(count), &parts);
            let mut all: Vec<usize> = given.iter().flatten().copied().collect();
            all.sort_unstable();
            assert_eq!(all, (0..100).collect::<Vec<_>>());
            assert!(given.iter().all(|of_node| of_node.len() <= 100usize.div_ceil(count) * 5 / 4 + 1), "{given:?}");
        }
        assert!(shared_out(&[], &[("a", 1)]).is_empty());
        assert_eq!(shared_out(&nodes(2), &[]), [Vec::<usize>::new(), Vec::new()]);
        let one = shared_out(&nodes(3), &[("large", 1 << 40)]);
        assert_eq!(one.iter().flatten().count(), 1);
    }

    #[test]
    fn a_node_that_goes_moves_few_files_but_its_own() {
        let names: Vec<String> = (0..1000).map(|i| format!("s3://b/t/{i}.parquet")).collect();
        let parts: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 10)).collect();
        let all = nodes(4);
        let before = shared_out(&all, &parts);
        assert_eq!(before, shared_out(&all, &parts), "the same again");
        let after = shared_out(&all[..3], &parts);
        let moved = (0..3).map(|node| before[node].iter().filter(|part| !after[node].contains(part)).count());
        assert!(moved.sum::<usize>() < 100);
        assert_eq!(preferred(&all, &[], "t", 2), preferred(&all, &[], "t", 4)[..2]);
    }

    #[tokio::test]
    async fn the_nodes_of_a_tables_shard_come_first() {
        let deadline = Instant::now() + Duration::from_secs(60);
        let store = MemoryStore::shared();
        let table = Uuid::from_u128(7);
        let followers = ["gone", "c"].map(str::to_owned).to_vec();
        let route = Route { node: "b".to_owned(), lease: 1, followers, ..Route::default() };
        let settings = Settings { shards: 4, maintenance: false };
        let mut entries = vec![(SETTINGS.to_owned(), settings.to_bytes())];
        entries.push((shards::key(shards::shard_of(table, settings.shards)), route.to_bytes()));
        let all = nodes(4);
        for (name, node) in [("a", &all[3]), ("b", &all[2]), ("c", &all[0])] {
            let flight_address = node.authority().to_owned();
            let info = v1::NodeInfo { flight_address, ..v1::NodeInfo::default() };
            entries.push((lake_client::nodes::key(name), Record::next("process", 1, &info, None).to_bytes()));
        }
        for (key, value) in entries {
            assert!(store.cas(&key, None, value, deadline).await.unwrap().result.succeeded);
        }
        let peers = Peers::new(None, &[], Metadata::new(store, CacheConfig::default())).unwrap();
        while peers.of_shard(Some(table)).is_empty() {
            assert!(Instant::now() < deadline, "the watches tell of it");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let first = peers.of_shard(Some(table));
        assert_eq!(first, [all[2].clone(), all[0].clone()], "the leader worker, then who follows it and is there");
        for of in ["t", "u", "v"] {
            let chosen = preferred(&all, &first, of, 3);
            assert_eq!((&chosen[..2], chosen.len()), (&first[..], 3));
            assert_eq!(preferred(&all[..2], &first, of, 3)[0], all[0], "one that takes no part is passed over");
        }
        assert_eq!(peers.of_shard(None), Vec::<Url>::new());
    }

    #[test]
    fn addresses_are_in_order_and_each_once() {
        let named = ["b:2", "a:1", "b:2"].map(str::to_owned);
        let urls = urls(&named).unwrap();
        assert_eq!(urls.iter().map(Url::as_str).collect::<Vec<_>>(), ["http://a:1/", "http://b:2/"]);
        assert!(super::urls(&["a b".to_owned()]).is_err());
    }
}
