//! Clients of lake's metadata. In reading order:
//!
//! - [`clock`], [`dial`]: the clocks that are read and the connections that are made, here and in lake-metasrv;
//! - [`store`]: the [`store::MetaStore`] trait that everything above the metadata talks to, and its errors;
//! - [`memory`]: the store for tests, and the reference of what a store does;
//! - [`conformance`]: what every store is held to, as a program;
//! - [`remote`]: the Raft cluster as a store: finds the leader, follows hints, retries within the deadline; watches;
//! - `object` (feature `store-object`): an object store or a local directory as a store, one key at a time;
//! - `etcd` (feature `store-etcd`): an etcd as a store;
//! - [`nodes`], [`shards`]: query nodes as the cluster knows them, and which does the upkeep of which tables; [`drains`]: which are to do
//!   none;
//! - [`janitor`]: one janitor at a time, over a store without leases;
//! - [`procedures`]: work that outlives one transaction;
//! - [`secret`]: the cluster secret, read from a file and never shown;
//! - [`catalog`]: namespaces and table pointers, typed, over any store;
//! - [`warehouse`]: namespaces whose tables live in a place of their own;
//! - [`follow`]: all there is under a prefix and every change after it, over any store that watches;
//! - `transfer` (feature `transfer`): everything that a store holds, into a data file and out of one into any other store;
//! - `cache` (feature `cache`): table pointers cached with moka, so that a query needs no metadata call;
//! - `metadata` (feature `cache`): one handle to all of it, which the components of a process share.
//!
//! Invariants: every call ends by its deadline; every error says whether the change may have been made; nothing here
//! depends on metasrv or query.
#![warn(clippy::disallowed_methods)]

mod backoff;
#[cfg(feature = "cache")]
pub mod cache;
pub mod catalog;
pub mod clock;
pub mod conformance;
pub mod dial;
pub mod drains;
#[cfg(feature = "store-etcd")]
pub mod etcd;
#[cfg(test)]
mod faulty;
pub mod follow;
pub mod janitor;
pub mod memory;
#[cfg(feature = "cache")]
pub mod metadata;
pub mod nodes;
#[cfg(feature = "store-object")]
pub mod object;
pub mod procedures;
pub mod remote;
pub mod secret;
pub mod shards;
pub mod store;
#[cfg(feature = "transfer")]
pub mod transfer;
pub mod warehouse;

pub use catalog::Catalog;
pub use store::{Applied, Consistency, Error, MetaStore, ReadOptions, SharedStore};
