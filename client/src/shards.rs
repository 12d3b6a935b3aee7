//! Shards: which node does the upkeep of which tables, as the map says it. docs/src/placement.md has the whole of it.
//!
//! ```text
//!   table --- hash of its uuid, modulo the number of shards ---> shard --- its route ---> leader worker, followers
//!                                                                            `--- the entry's revision: the fence
//! ```
//! A cluster has a fixed number of shards, chosen when its first worker is registered. A shard holds no data: it is its route,
//! one key, and moving it is one transaction. What a leader worker commits for a shard carries the compares of its [`Fence`], so that
//! nothing is committed for a shard that was given to somebody else, or under a lease that has ended, whatever a worker believes.
//!
//! Pure values. The leader's side is lake-metasrv's `peer::placement`, a worker's lake-query's `upkeep`.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, KeyValue, Revision};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Under it lies all there is of placement.
pub const ROUTES: &str = "/lake/route/";
/// The number of shards, and whether they are moved.
pub const SETTINGS: &str = "/lake/route/settings";
/// Under it lies one route for each shard.
pub const SHARDS: &str = "/lake/route/shard/";
/// Most shards of a cluster.
pub const MAX_SHARDS: u32 = 1024;
/// Shards of a cluster unless it is told otherwise.
pub const DEFAULT_SHARDS: u32 = 64;
/// Most followers of a shard.
pub const MAX_FOLLOWERS: usize = 8;
/// The role of a node that may be given shards.
pub const WORKER: &str = "worker";
/// The instruction that has a worker read into its cache what the upkeep of a shard's tables begins with, since it is about to be given the
/// shard. Its payload is a [`Moving`], as that of [`LEAVE_SHARD`].
pub const WARM_SHARD: &str = "warm_shard";
/// The instruction that has a worker end what it does for a shard that it was, and is not any more, given. It answers once that has ended.
pub const LEAVE_SHARD: &str = "leave_shard";
/// How long a worker may take to be warmed.
pub const WARM_WITHIN: Duration = Duration::from_secs(2);
/// How long a worker may take to end what it does.
pub const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// Which move an instruction is about. JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    pub shard: u32,
    /// The revision of the route: before the move for who gets the shard (0: there is none), after it for who had it.
    pub fence: Revision,
}

impl Moving {
    /// What a payload says.
    ///
    /// # Errors
    /// It is none.
    pub fn of(payload: &[u8]) -> Result<Self, String> {
        let moving: Self = serde_json::from_slice(payload).map_err(|e| format!("it names no move of a shard: {e}"))?;
        if moving.shard >= MAX_SHARDS {
            return Err(format!("there is no shard {}: they are 0 to {} at most", moving.shard, MAX_SHARDS - 1));
        }
        Ok(moving)
    }

    /// As a payload.
    pub fn to_bytes(self) -> Bytes {
        // A struct of numbers cannot fail to be written.
        serde_json::to_vec(&self).unwrap_or_default().into()
    }
}

/// What a worker's log says of a chore that it does by itself, again whenever more of it is known: [`WorkerChore::SAYS`], and this as JSON.
///
/// Times are those of the machine ([`WorkerChore::began_ms`]): what processes of one machine say can be compared, and of several cannot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerChore {
    /// The node.
    pub worker: String,
    pub shard: u32,
    /// The revision of the shard's route, under which it was begun.
    pub fence: Revision,
    pub table: String,
    /// The procedure that was called, in SQL's sense.
    pub what: String,
    /// When it was begun, after its fence was looked up: in milliseconds since the machine was started.
    pub began_ms: u64,
    /// The last time before a commit that carried the fence was sent and made, or before the fence was looked at and held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acted_ms: Option<u64>,
    /// When all of it had ended, with what it left running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
}

impl WorkerChore {
    /// What stands before it in a log.
    pub const SAYS: &str = "a chore: ";

    /// As a log says it.
    pub fn to_line(&self) -> String {
        // A struct of numbers and texts cannot fail to be written.
        format!("{}{}", Self::SAYS, serde_json::to_string(self).unwrap_or_default())
    }

    /// What a line of a log says of one, if it does.
    pub fn of_line(line: &str) -> Option<Self> {
        let (_, json) = line.split_once(Self::SAYS)?;
        serde_json::from_str(json.trim_end()).ok()
    }
}

/// What holds for all shards, under [`SETTINGS`]. JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// How many there are; it does not change.
    pub shards: u32,
    /// Nothing is moved unless somebody asks for it.
    #[serde(default)]
    pub maintenance: bool,
}

impl Settings {
    /// What an entry holds. `None`: nothing that placement wrote.
    pub fn of(entry: &KeyValue) -> Option<Self> {
        let settings: Self = serde_json::from_slice(&entry.value).ok()?;
        (1..=MAX_SHARDS).contains(&settings.shards).then_some(settings)
    }

    /// As they are kept.
    pub fn to_bytes(self) -> Bytes {
        // A struct of numbers cannot fail to be written.
        serde_json::to_vec(&self).unwrap_or_default().into()
    }
}

/// Who has a shard, under [`key`]. JSON. The fence is the revision of the entry: every change of a route makes a new one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Route {
    /// The leader worker.
    pub node: String,
    /// Its lease: it has the shard for as long as that lives.
    pub lease: LeaseId,
    /// Nodes that are to have the shard's tables in their caches, and are preferred when the leader worker is lost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub followers: Vec<String>,
    /// Why the node was given it, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Route {
    /// What an entry holds. `None`: nothing that placement wrote.
    pub fn of(entry: &KeyValue) -> Option<Self> {
        serde_json::from_slice(&entry.value).ok()
    }

    /// As it is kept.
    pub fn to_bytes(&self) -> Bytes {
        // A struct of strings and numbers cannot fail to be written.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// The leader worker, then the followers.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.node).chain(&self.followers).map(String::as_str)
    }
}

/// Where the route of a shard is.
pub fn key(shard: u32) -> String {
    format!("{SHARDS}{shard:04}")
}

/// The shard whose route is under this key.
pub fn shard_of_key(key: &str) -> Option<u32> {
    let shard = key.strip_prefix(SHARDS)?;
    let number = shard.parse().ok()?;
    (number < MAX_SHARDS && shard.len() == 4).then_some(number)
}

/// The shard of the table with this uuid, where there are `shards` (at least one). The same on every machine and in every version:
/// FNV-1a of the uuid's bytes, its halves folded together.
pub fn shard_of(table: Uuid, shards: u32) -> u32 {
    let hash = table
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let folded = (hash >> 32) ^ (hash & u64::from(u32::MAX));
    // Less than `shards`, which is a u32.
    (folded % u64::from(shards.max(1))) as u32
}

/// What a commit for a shard carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    pub shard: u32,
    /// The revision of the route.
    pub revision: Revision,
    /// The lease of the node that has it.
    pub lease: LeaseId,
}

impl Fence {
    /// The route is still that one, and the lease alive.
    pub fn compares(&self) -> Vec<Compare> {
        vec![Compare::mod_revision(key(self.shard), self.revision), Compare::lease_alive(self.lease)]
    }
}

/// A route, and its fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fenced {
    pub route: Route,
    /// The revision of the entry.
    pub revision: Revision,
}

/// All routes, as the map had them at one revision.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routes {
    pub settings: Option<Settings>,
    /// By their shards.
    pub routes: BTreeMap<u32, Fenced>,
}

impl Routes {
    /// Takes in an entry under [`ROUTES`], or that there is none any more. What somebody else has put there is no route.
    pub fn learn(&mut self, key: &str, entry: Option<&KeyValue>) {
        if key == SETTINGS {
            self.settings = entry.and_then(Settings::of);
        } else if let Some(shard) = shard_of_key(key) {
            match entry.and_then(|entry| Some(Fenced { route: Route::of(entry)?, revision: entry.mod_revision })) {
                Some(fenced) => drop(self.routes.insert(shard, fenced)),
                None => drop(self.routes.remove(&shard)),
            }
        }
    }

    /// The shard of a table; `None`: there are no shards yet.
    pub fn shard(&self, table: Uuid) -> Option<u32> {
        self.settings.map(|settings| shard_of(table, settings.shards))
    }

    /// The route of a table; `None`: nobody was given its shard.
    pub fn of(&self, table: Uuid) -> Option<&Fenced> {
        self.routes.get(&self.shard(table)?)
    }

    /// The shards that a node has under its lease, with their fences. Whether the lease lives is the node's own to know.
    pub fn held_by<'a>(&'a self, node: &'a str, lease: LeaseId) -> impl Iterator<Item = Fence> + 'a {
        let own = move |(_, fenced): &(&u32, &Fenced)| fenced.route.node == node && fenced.route.lease == lease;
        self.routes.iter().filter(own).map(move |(shard, fenced)| Fence {
            shard: *shard,
            revision: fenced.revision,
            lease,
        })
    }
}

/// A shard as the leader tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardStatus {
    pub shard: u32,
    pub route: Route,
    /// The revision of the route.
    pub fence: Revision,
    /// How long until the lease ends unless the node is heard; `None`: it has ended.
    pub remaining: Option<Duration>,
    /// How surely the node is lost, by its silence: the negative decimal logarithm of the chance that it is only late. `None`: the
    /// leader has not heard of it.
    pub suspicion: Option<f64>,
}

/// The shards of a cluster as the leader tells of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ShardListing {
    /// How many there are; 0: no worker has been registered yet.
    pub count: u32,
    pub maintenance: bool,
    /// Those that somebody was given.
    pub shards: Vec<ShardStatus>,
}

/// A shard that was, or would be, given to another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardMove {
    pub shard: u32,
    /// Who had it.
    pub from: Option<String>,
    pub to: String,
    /// The new fence; `None`: it was not moved, or nobody knows whether it was.
    pub fence: Option<Revision>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: Bytes, mod_revision: Revision) -> KeyValue {
        KeyValue { key: key.to_owned(), value, version: 1, create_revision: 1, mod_revision, lease: None }
    }

    fn route(node: &str, lease: LeaseId) -> Route {
        Route { node: node.into(), lease, followers: vec!["f".into()], reason: String::new() }
    }

    #[test]
    fn a_table_has_the_same_shard_for_ever() {
        let of = |n: u128| shard_of(Uuid::from_u128(n), 64);
        // Written down once: a change of these moves the upkeep of every table there is.
        assert_eq!([of(0), of(1), of(2), of(u128::MAX)], [28, 11, 6, 29]);
        assert!((0..1000).all(|n| shard_of(Uuid::from_u128(n), 1) == 0));
    }

    #[test]
    fn tables_are_spread_over_all_shards() {
        let mut tables = [0_u32; 64];
        for n in 0..6400_u128 {
            tables[shard_of(Uuid::from_u128(n), 64) as usize] += 1;
        }
        let (least, most) = (tables.iter().min().unwrap(), tables.iter().max().unwrap());
        assert!((50..=100).contains(least) && (100..=160).contains(most), "{tables:?}");
    }

    #[test]
    fn keys_lead_to_their_shards_and_others_to_none() {
        for shard in [0, 7, 63, MAX_SHARDS - 1] {
            assert_eq!(shard_of_key(&key(shard)), Some(shard));
        }
        for other in
            [SETTINGS, "/lake/route/shard/", "/lake/route/shard/7", "/lake/route/shard/1024", "/lake/node/0007"]
        {
            assert_eq!(shard_of_key(other), None, "{other}");
        }
    }

    #[test]
    fn routes_are_learnt_and_forgotten() {
        let mut routes = Routes::default();
        assert_eq!(routes.of(Uuid::nil()), None);
        let settings = Settings { shards: 2, maintenance: false };
        routes.learn(SETTINGS, Some(&entry(SETTINGS, settings.to_bytes(), 1)));
        routes.learn(&key(0), Some(&entry(&key(0), route("a", 7).to_bytes(), 5)));
        routes.learn(&key(1), Some(&entry(&key(1), route("b", 8).to_bytes(), 6)));
        assert_eq!(routes.settings, Some(settings));
        assert_eq!(routes.held_by("a", 7).collect::<Vec<_>>(), [Fence { shard: 0, revision: 5, lease: 7 }]);
        assert_eq!(routes.held_by("a", 6).count(), 0, "not under another lease");
        let shard = routes.shard(Uuid::nil()).unwrap();
        assert_eq!(routes.of(Uuid::nil()).unwrap().route.node, ["a", "b"][shard as usize]);
        assert_eq!(routes.routes[&0].route.nodes().collect::<Vec<_>>(), ["a", "f"]);
        // What is no route is none.
        routes.learn(&key(0), Some(&entry(&key(0), "up".into(), 9)));
        assert_eq!(routes.held_by("a", 7).count(), 0);
        routes.learn(&key(1), None);
        assert!(routes.routes.is_empty());
        for wrong in ["{}", "{\"shards\":0}", "{\"shards\":1025}"] {
            routes.learn(SETTINGS, Some(&entry(SETTINGS, wrong.into(), 1)));
            assert_eq!(routes.settings, None, "{wrong}");
        }
    }

    #[test]
    fn a_fence_is_the_route_and_the_lease() {
        let fence = Fence { shard: 3, revision: 9, lease: 4 };
        let compares = [Compare::mod_revision("/lake/route/shard/0003", 9), Compare::lease_alive(4)];
        assert_eq!(fence.compares(), compares);
    }
}
