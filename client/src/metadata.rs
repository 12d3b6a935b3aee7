//! One handle to the metadata, which the components of a process share.
//!
//! ```text
//!   Metadata ------ table pointers: the cache ----------------------.
//!    |    `-- namespaces, nodes, routes: copies that follow changes -+--> store
//!    |                                                               |
//!   MetadataWriter: changes, by compare-and-set ---- every reply ----'
//!                                                        |
//!                                                        `--> its revision, to the cache: `notice`
//! ```
//! Reading waits for nothing that is known: [`Metadata::cached`], [`Metadata::namespaces`], [`Metadata::nodes`] and
//! [`Metadata::shards`] look at what is in memory.
//! Changing is the narrower handle's, [`Metadata::writer`]: what it did, this process sees from then on.
//!
//! Whatever revision a reply mentions, the cache learns of it ([`PointerCache::notice`]); so a change that somebody else
//! made is not missed for long, also without a watch, and nobody polls.
//!
//! The copies are what the store held at one revision ([`copies`]). All of it ends with the last handle, or with
//! [`Metadata::close`].
//!
//! Over a store whose revisions are each key's own (library mode) nothing is kept: every question is a read.

pub mod copies;
mod noticing;
mod procedures;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use lake_proto::kv::Revision;
use tokio::sync::watch;
use uuid::Uuid;

use self::copies::{Namespaces, Nodes, Shards, follow};
use self::noticing::{Noticing, UnderWay};
pub use self::writer::{MetadataWriter, ModifyError};
use crate::cache::counters::{Counters, Counting};
use crate::cache::{CacheConfig, PointerCache, Resolved, Want};
use crate::catalog::{Catalog, CatalogError, Namespace, TableIdent, TablePointer, Versioned, one_key};
use crate::clock;
use crate::follow::Follower;
use crate::store::{Capabilities, ReadOptions, SharedStore, Snapshot};
use crate::warehouse::Warehouses;

type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// The metadata, for reading. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Metadata {
    pointers: PointerCache,
    catalog: Catalog,
    namespaces: Arc<ArcSwapOption<Namespaces>>,
    nodes: Arc<ArcSwapOption<Nodes>>,
    shards: Arc<ArcSwapOption<Shards>>,
    under_way: Arc<UnderWay>,
}

impl Metadata {
    /// Inside a tokio runtime.
    pub fn new(store: SharedStore, config: CacheConfig) -> Self {
        let store = one_key::over(store);
        let counting = Arc::new(Counting::default());
        let pointers = PointerCache::build(store.clone(), config, counting.clone(), rand::random());
        let under_way = Arc::<UnderWay>::default();
        let noticing = Noticing::new(store, pointers.downgrade(), counting, under_way.clone());
        let noticing: SharedStore = Arc::new(noticing);
        let (namespaces, nodes) = (Arc::new(ArcSwapOption::empty()), Arc::new(ArcSwapOption::empty()));
        let shards = Arc::new(ArcSwapOption::empty());
        if noticing.capabilities().watch {
            pointers.spawn(follow(noticing.clone(), namespaces.clone()));
            pointers.spawn(follow(noticing.clone(), nodes.clone()));
            pointers.spawn(follow(noticing.clone(), shards.clone()));
        }
        Self { pointers, catalog: Catalog::new(noticing), namespaces, nodes, shards, under_way }
    }

    /// A table's pointer, if it is cached and fit for use: without a wait.
    pub fn cached(&self, table: &TableIdent) -> Option<Resolved> {
        self.pointers.cached(table)
    }

    /// A table's pointer, cached or read.
    ///
    /// # Errors
    /// [`PointerCache::get`]'s.
    pub async fn table(&self, table: &TableIdent, want: Want) -> Result<Resolved> {
        self.pointers.get(table, want).await
    }

    /// The pointers of several tables, all of one moment.
    ///
    /// # Errors
    /// [`PointerCache::resolve`]'s.
    pub async fn tables(&self, tables: &[TableIdent], want: Want) -> Result<Vec<Resolved>> {
        self.pointers.resolve(tables, want).await
    }

    /// A table's pointer as it is now; the cache learns of it. `None`: there is no such table.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn read_table(&self, table: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        let mut pointers = self.read_tables(std::slice::from_ref(table), deadline).await?;
        Ok(pointers.pop().flatten())
    }

    /// The pointers of several tables as they are now, all of one revision, in the order asked for; the cache learns of them.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn read_tables(
        &self,
        tables: &[TableIdent],
        deadline: Instant,
    ) -> Result<Vec<Option<Versioned<TablePointer>>>> {
        let at = clock::now();
        let (revision, pointers) = self.catalog.load_tables(tables, ReadOptions::default(), deadline).await?;
        for (table, pointer) in tables.iter().zip(&pointers) {
            match pointer {
                Some(pointer) => self.pointers.note_committed(table, pointer.clone(), at),
                None => self.pointers.note_dropped(table, revision, at),
            }
        }
        Ok(pointers)
    }

    /// Holds the present state for a while, for [`Metadata::read_tables_at`]. Whoever opens it closes it.
    ///
    /// # Errors
    /// The store's; it may have no snapshots.
    pub async fn open_snapshot(&self, deadline: Instant) -> Result<Snapshot> {
        Ok(self.catalog.store().open_snapshot(ReadOptions::default(), deadline).await?.value)
    }

    /// Lets go of what [`Metadata::open_snapshot`] holds, before its time.
    ///
    /// # Errors
    /// The store's.
    pub async fn close_snapshot(&self, snapshot: Snapshot, deadline: Instant) -> Result<()> {
        self.catalog.store().close_snapshot(snapshot, deadline).await.map(drop).map_err(Into::into)
    }

    /// The pointers of several tables as they were when this snapshot was opened, in the order asked for. The cache learns
    /// nothing of them.
    ///
    /// # Errors
    /// `Store(SnapshotExpired)` if it is no longer held; the catalog's.
    pub async fn read_tables_at(
        &self,
        snapshot: Snapshot,
        tables: &[TableIdent],
        deadline: Instant,
    ) -> Result<Vec<Option<Versioned<TablePointer>>>> {
        Ok(self.catalog.load_tables(tables, ReadOptions::at(snapshot), deadline).await?.1)
    }

    /// A view's pointer as it is now; `None`: there is no such view.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn load_view(&self, view: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        self.catalog.load_view(view, deadline).await
    }

    /// The names of a namespace's views as they are now, sorted.
    ///
    /// # Errors
    /// `NamespaceNotFound`, or the store's.
    pub async fn list_views(&self, namespace: &Namespace, deadline: Instant) -> Result<Vec<String>> {
        self.catalog.list_views(namespace, deadline).await
    }

    /// Forgets a table: what is cached was found to be no longer so.
    pub fn invalidate(&self, table: &TableIdent) {
        self.pointers.invalidate(table);
    }

    /// All namespaces as the changes were told, without a wait; `None` before the first telling, or if there is no copy.
    pub fn namespaces(&self) -> Option<Arc<Namespaces>> {
        self.namespaces.load_full()
    }

    /// The query nodes that are registered, as the changes were told, without a wait; `None` before the first telling, or if
    /// there is no copy.
    pub fn nodes(&self) -> Option<Arc<Nodes>> {
        self.nodes.load_full()
    }

    /// The routes of the shards, as the changes were told, without a wait; `None` before the first telling, or if there is no copy.
    pub fn shards(&self) -> Option<Arc<Shards>> {
        self.shards.load_full()
    }

    /// All namespaces as they are now, in key order.
    ///
    /// # Errors
    /// The store's.
    pub async fn list_namespaces(&self, deadline: Instant) -> Result<Vec<Namespace>> {
        self.catalog.list_namespaces(deadline).await
    }

    /// A namespace's properties as they are now; `None` if there is no such namespace.
    ///
    /// # Errors
    /// The store's.
    pub async fn namespace_properties(
        &self,
        namespace: &Namespace,
        deadline: Instant,
    ) -> Result<Option<BTreeMap<String, String>>> {
        self.catalog.namespace_properties(namespace, deadline).await
    }

    /// Whether there is such a namespace now.
    ///
    /// # Errors
    /// The store's.
    pub async fn namespace_exists(&self, namespace: &Namespace, deadline: Instant) -> Result<bool> {
        self.catalog.namespace_exists(namespace, deadline).await
    }

    /// The names of a namespace's tables as they are now, sorted.
    ///
    /// # Errors
    /// `NamespaceNotFound`, or the store's.
    pub async fn list_tables(&self, namespace: &Namespace, deadline: Instant) -> Result<Vec<String>> {
        self.catalog.list_tables(namespace, deadline).await
    }

    /// What the store can do.
    pub fn capabilities(&self) -> Capabilities {
        self.catalog.store().capabilities()
    }

    /// The warehouses that there are now.
    ///
    /// # Errors
    /// The store's; `Damaged`.
    pub async fn warehouses(&self, deadline: Instant) -> Result<Warehouses> {
        self.catalog.warehouses(deadline).await
    }

    /// Tells when the warehouses change; `None` over a store that does not watch.
    pub fn follow_warehouses(&self) -> Option<Follower> {
        let store = self.catalog.store();
        store.capabilities().watch.then(|| Follower::new(store.clone(), crate::warehouse::KEY))
    }

    /// Who is next to swap a table's pointer, if somebody has claimed that.
    ///
    /// # Errors
    /// The store's.
    pub async fn turn(&self, table: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        self.catalog.turn(table, deadline).await
    }

    /// Somebody has told that the metadata has this revision: what is cached of an earlier one is renewed when it is next used.
    pub fn notice(&self, revision: Revision) {
        self.pointers.notice(revision);
    }

    /// The latest revision that this process knows of.
    pub fn seen(&self) -> Revision {
        self.pointers.seen()
    }

    /// The revision up to which changes of table pointers have been told; it wakes whoever waits for it.
    pub fn subscribe(&self) -> watch::Receiver<Revision> {
        self.pointers.subscribe()
    }

    /// Waits until every change of a table pointer up to this revision has been told, so that reading sees it.
    ///
    /// # Errors
    /// `Unavailable` if the watch has not come so far by the deadline: ask with [`Want::at_least`].
    pub async fn wait_for_version(&self, revision: Revision, deadline: Instant) -> Result<Revision> {
        self.pointers.wait_for_version(revision, deadline).await
    }

    /// What has been done so far: hits, misses, and calls by reason.
    pub fn counters(&self) -> Counters {
        self.pointers.counters()
    }

    /// How long that call has waited for the store's answer which waits longest, what the cache reads apart; `None`: none waits.
    pub fn waiting(&self) -> Option<Duration> {
        self.under_way.longest()
    }

    /// Tables whose pointers are cached now, or nearly so many.
    pub fn cached_tables(&self) -> u64 {
        self.pointers.len()
    }

    /// The handle for changes.
    pub fn writer(&self) -> MetadataWriter {
        MetadataWriter::new(self.clone())
    }

    /// Ends what runs in the background, and waits for it. What is cached can still be read.
    pub async fn close(&self) {
        self.pointers.close().await;
    }
}
