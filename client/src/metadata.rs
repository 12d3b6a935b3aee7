//! One handle to the metadata, which the components of a process share.
//!
//! ```text
//!   Metadata ------ table pointers: the cache ----------------------.
//!    |    `-------- namespaces, nodes: copies that follow changes --+--> store
//!    |                                                               |
//!   MetadataWriter: changes, by compare-and-set ---- every reply ----'
//!                                                        |
//!                                                        `--> its revision, to the cache: `notice`
//! ```
//! Reading waits for nothing that is known: [`Metadata::cached`], [`Metadata::namespaces`] and [`Metadata::nodes`] look at what is
//! in memory.
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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision, Txn};
use tokio::sync::watch;
use uuid::Uuid;

use self::copies::{Namespaces, Nodes, follow};
use crate::backoff::Backoff;
use crate::cache::counters::{Counters, Counting, Reason};
use crate::cache::{CacheConfig, PointerCache, Resolved, Want};
use crate::catalog::appends::{Handed, Outcome, Settling};
use crate::catalog::{
    Catalog, CatalogError, Namespace, Operation, TableChange, TableIdent, TablePointer, Versioned, one_key,
};
use crate::clock;
use crate::follow::Follower;
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Error, Lease, MetaStore, Page, Read, ReadOptions, SharedStore,
    Snapshot,
};
use crate::warehouse::Warehouses;

/// How often a change is made again on what another one left, before the deadline ends it.
const MAX_RACES: u32 = 64;
/// How long another's claim on the next turn is waited for, before it counts as left behind.
const TURN_LIMIT: Duration = Duration::from_secs(1);

type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// The metadata, for reading. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Metadata {
    pointers: PointerCache,
    catalog: Catalog,
    namespaces: Arc<ArcSwapOption<Namespaces>>,
    nodes: Arc<ArcSwapOption<Nodes>>,
}

/// Why [`MetadataWriter::read_modify_write`] made no change.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(clippy::large_enum_variant, reason = "how large the closure's own is depends on the closure")]
pub enum ModifyError<E> {
    /// The closure's own.
    #[error("{0}")]
    Refused(E),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}

impl Metadata {
    /// Inside a tokio runtime.
    pub fn new(store: SharedStore, config: CacheConfig) -> Self {
        let store = one_key::over(store);
        let counting = Arc::new(Counting::default());
        let pointers = PointerCache::build(store.clone(), config, counting.clone(), rand::random());
        let noticing = Noticing { store, pointers: pointers.downgrade(), counting };
        let noticing: SharedStore = Arc::new(noticing);
        let (namespaces, nodes) = (Arc::new(ArcSwapOption::empty()), Arc::new(ArcSwapOption::empty()));
        if noticing.capabilities().watch {
            pointers.spawn(follow(noticing.clone(), namespaces.clone()));
            pointers.spawn(follow(noticing.clone(), nodes.clone()));
        }
        Self { pointers, catalog: Catalog::new(noticing), namespaces, nodes }
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
        let at = clock::now();
        let read = self.catalog.load_tables(std::slice::from_ref(table), ReadOptions::default(), deadline).await;
        let (revision, mut pointers) = read?;
        let pointer = pointers.pop().flatten();
        match &pointer {
            Some(pointer) => self.pointers.note_committed(table, pointer.clone(), at),
            None => self.pointers.note_dropped(table, revision, at),
        }
        Ok(pointer)
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

    /// The handle for changes.
    pub fn writer(&self) -> MetadataWriter {
        MetadataWriter { metadata: self.clone() }
    }

    /// Ends what runs in the background, and waits for it. What is cached can still be read.
    pub async fn close(&self) {
        self.pointers.close().await;
    }
}

/// The metadata, for changing it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MetadataWriter {
    metadata: Metadata,
}

impl MetadataWriter {
    /// [`Catalog::within`].
    pub fn within(&self, operation: Operation) -> Self {
        let catalog = self.metadata.catalog.within(operation);
        Self { metadata: Metadata { catalog, ..self.metadata.clone() } }
    }

    /// [`Catalog::outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn outcome(&self, domain: &str, id: &str, deadline: Instant) -> Result<Option<Bytes>> {
        self.metadata.catalog.outcome(domain, id, deadline).await
    }

    /// [`Catalog::leave_outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn leave_outcome(&self, operation: &Operation, deadline: Instant) -> Result<Bytes> {
        self.metadata.catalog.leave_outcome(operation, deadline).await
    }

    /// [`Catalog::forget_outcomes`].
    ///
    /// # Errors
    /// Its.
    pub async fn forget_outcomes(&self, domain: &str, old: impl Fn(&[u8]) -> bool, deadline: Instant) -> Result<usize> {
        self.metadata.catalog.forget_outcomes(domain, old, deadline).await
    }

    /// [`Catalog::hands_over`].
    pub fn hands_over(&self) -> bool {
        self.metadata.catalog.hands_over()
    }

    /// A lease of this process, alive for at least half of `ttl` from now on: `held` renewed if that is needed, or a new one.
    ///
    /// # Errors
    /// The store's.
    pub async fn lease(&self, held: Option<Lease>, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease> {
        let store = self.metadata.catalog.store();
        if let Some(lease) = held {
            if lease.held_until > clock::now() + ttl / 2 {
                return Ok(lease);
            }
            if let Some(lease) = store.renew_lease(lease, deadline).await? {
                return Ok(lease);
            }
        }
        Ok(store.grant_lease(ttl, holder, deadline).await?)
    }

    /// [`Catalog::hand_over`].
    ///
    /// # Errors
    /// Its.
    pub async fn hand_over(
        &self,
        table: Uuid,
        id: Uuid,
        value: Bytes,
        lease: LeaseId,
        deadline: Instant,
    ) -> Result<Option<Revision>> {
        self.metadata.catalog.hand_over(table, id, value, lease, deadline).await
    }

    /// [`Catalog::handed`].
    ///
    /// # Errors
    /// Its.
    pub async fn handed(&self, table: Uuid, most: u32, deadline: Instant) -> Result<Vec<Handed>> {
        self.metadata.catalog.handed(table, most, deadline).await
    }

    /// [`Catalog::append_outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn append_outcome(&self, id: Uuid, deadline: Instant) -> Result<Option<Outcome>> {
        self.metadata.catalog.append_outcome(id, deadline).await
    }

    /// [`Catalog::withdraw`].
    ///
    /// # Errors
    /// Its.
    pub async fn withdraw(&self, table: Uuid, id: Uuid, outcome: Bytes, deadline: Instant) -> Result<Bytes> {
        self.metadata.catalog.withdraw(table, id, outcome, deadline).await
    }

    /// [`Catalog::forget_appends`].
    ///
    /// # Errors
    /// Its.
    pub async fn forget_appends(&self, read: &[(Uuid, Revision)], deadline: Instant) -> Result<()> {
        self.metadata.catalog.forget_appends(read, deadline).await
    }

    /// [`Catalog::swap_table_settling`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn swap_table_settling(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        settling: &Settling,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let at = clock::now();
        let catalog = &self.metadata.catalog;
        let swapped = catalog.swap_table_settling(table, expected, new, turn, settling, deadline).await;
        self.note(table, swapped, at)
    }

    /// [`Catalog::create_view`].
    ///
    /// # Errors
    /// Its.
    pub async fn create_view(
        &self,
        view: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.metadata.catalog.create_view(view, new, deadline).await
    }

    /// [`Catalog::swap_view`].
    ///
    /// # Errors
    /// Its.
    pub async fn swap_view(
        &self,
        view: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.metadata.catalog.swap_view(view, expected, new, deadline).await
    }

    /// [`Catalog::rename_view`].
    ///
    /// # Errors
    /// Its.
    pub async fn rename_view(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.metadata.catalog.rename_view(from, to, deadline).await
    }

    /// [`Catalog::drop_view`].
    ///
    /// # Errors
    /// Its.
    pub async fn drop_view(&self, view: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.metadata.catalog.drop_view(view, expected, deadline).await
    }

    /// [`Catalog::change_tables`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn change_tables(
        &self,
        changes: &[TableChange],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        self.change_tables_while(changes, &[], deadline).await
    }

    /// [`Catalog::change_tables_while`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn change_tables_while(
        &self,
        changes: &[TableChange],
        unchanged: &[(TableIdent, Revision)],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        let at = clock::now();
        let changed = self.metadata.catalog.change_tables_while(changes, unchanged, deadline).await;
        match &changed {
            Ok(pointers) => {
                for (change, pointer) in changes.iter().zip(pointers) {
                    self.metadata.pointers.note_committed(&change.table, pointer.clone(), at);
                }
            }
            Err(_) => changes.iter().for_each(|change| self.metadata.pointers.invalidate(&change.table)),
        }
        changed
    }

    /// [`Catalog::create_namespace`].
    ///
    /// # Errors
    /// Its.
    pub async fn create_namespace(
        &self,
        namespace: &Namespace,
        properties: BTreeMap<String, String>,
        deadline: Instant,
    ) -> Result<()> {
        self.metadata.catalog.create_namespace(namespace, properties, deadline).await
    }

    /// [`Catalog::drop_namespace`].
    ///
    /// # Errors
    /// Its.
    pub async fn drop_namespace(&self, namespace: &Namespace, deadline: Instant) -> Result<()> {
        self.metadata.catalog.drop_namespace(namespace, deadline).await
    }

    /// [`Catalog::drop_namespace_and_contents`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn drop_namespace_and_contents(&self, namespace: &Namespace, deadline: Instant) -> Result<u64> {
        let tables = self.metadata.catalog.list_tables(namespace, deadline).await?;
        let dropped = self.metadata.catalog.drop_namespace_and_contents(namespace, deadline).await;
        for name in tables {
            self.metadata.pointers.invalidate(&TableIdent::new(namespace.clone(), name)?);
        }
        dropped
    }

    /// [`Catalog::update_namespace`].
    ///
    /// # Errors
    /// Its.
    pub async fn update_namespace(
        &self,
        namespace: &Namespace,
        removals: &BTreeSet<String>,
        updates: &BTreeMap<String, String>,
        deadline: Instant,
    ) -> Result<BTreeSet<String>> {
        self.metadata.catalog.update_namespace(namespace, removals, updates, deadline).await
    }

    /// [`Catalog::create_table`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn create_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let at = clock::now();
        let created = self.metadata.catalog.create_table(table, new, deadline).await;
        self.note(table, created, at)
    }

    /// [`Catalog::register_table`]; reading here sees it from now on. It waits for its turn, as
    /// [`MetadataWriter::read_modify_write`] does.
    ///
    /// # Errors
    /// Its.
    pub async fn register_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        expected: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        for _ in 0..MAX_RACES {
            let at = clock::now();
            let registered = self.metadata.catalog.register_table(table, new, expected, deadline).await;
            match &registered {
                Err(CatalogError::NotYourTurn { turn, resent: false, .. })
                    if self.await_turn(new.uuid, *turn, deadline).await? => {}
                _ => return self.note(table, registered, at),
            }
        }
        Err(CatalogError::NotYourTurn { table: table.clone(), turn: 0, resent: false })
    }

    /// [`Catalog::swap_table`]; reading here sees it from now on, and the winner's pointer if the race was lost.
    ///
    /// # Errors
    /// Its.
    pub async fn swap_table(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let at = clock::now();
        let swapped = self.metadata.catalog.swap_table(table, expected, new, turn, deadline).await;
        self.note(table, swapped, at)
    }

    /// [`Catalog::rename_table`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn rename_table(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let at = clock::now();
        let renamed = self.metadata.catalog.rename_table(from, to, deadline).await;
        self.metadata.pointers.invalidate(from);
        match &renamed {
            Ok(pointer) => self.metadata.pointers.note_committed(to, pointer.clone(), at),
            Err(_) => self.metadata.pointers.invalidate(to),
        }
        renamed
    }

    /// [`Catalog::drop_table`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn drop_table(&self, table: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        let at = clock::now();
        match self.metadata.catalog.drop_table(table, expected, deadline).await {
            Ok(revision) => {
                self.metadata.pointers.note_dropped(table, revision, at);
                Ok(revision)
            }
            Err(error) => {
                self.note_failed(table, &error, at);
                Err(error)
            }
        }
    }

    /// Changes a table's pointer to what `change` makes of it; `Ok(None)` leaves it as it is. `change` runs again whenever
    /// another writer was first, on what that one left, and before it has the last word on a pointer that was cached, on
    /// one that is read. Returns the pointer as it then is. It waits for its turn if another writer has claimed the next
    /// one, and ends a claim that stays for a second.
    ///
    /// # Errors
    /// `TableNotFound`; the closure's own; those of [`Catalog::swap_table`], `Conflict` or `NotYourTurn` if others were
    /// first until the deadline.
    pub async fn read_modify_write<E>(
        &self,
        table: &TableIdent,
        deadline: Instant,
        mut change: impl FnMut(&TablePointer) -> std::result::Result<Option<TablePointer>, E>,
    ) -> std::result::Result<Versioned<TablePointer>, ModifyError<E>> {
        // What is cached is good enough to begin with: the swap compares.
        let cached = self.metadata.cached(table).and_then(|resolved| resolved.pointer().cloned());
        let mut was_read = cached.is_none();
        let mut current = match cached {
            Some(pointer) => Some(pointer),
            None => self.metadata.read_table(table, deadline).await?,
        };
        let mut backoff = Backoff::default();
        let mut races = 0;
        loop {
            let Some(base) = current else { return Err(CatalogError::TableNotFound(table.clone()).into()) };
            let next = match change(&base.value) {
                Ok(Some(next)) => next,
                // It may be so no longer.
                _ if !was_read => {
                    current = self.metadata.read_table(table, deadline).await?;
                    was_read = true;
                    continue;
                }
                Ok(None) => return Ok(base),
                Err(error) => return Err(ModifyError::Refused(error)),
            };
            races += 1;
            let error = match self.swap_table(table, base.mod_revision, &next, None, deadline).await {
                Ok(pointer) => return Ok(pointer),
                Err(error) => error,
            };
            let goes_on = races < MAX_RACES
                && match &error {
                    CatalogError::Conflict { resent: false, .. } => backoff.wait(deadline).await,
                    CatalogError::NotYourTurn { turn, resent: false, .. } => {
                        self.await_turn(next.uuid, *turn, deadline).await?
                    }
                    _ => false,
                };
            current = match error {
                CatalogError::Conflict { current, .. } if goes_on => current,
                CatalogError::NotYourTurn { .. } if goes_on => Some(base),
                error => return Err(error.into()),
            };
            // The swap has shown that it is, or was so a moment ago.
            was_read = true;
        }
    }

    /// Waits until another's claim has ended, and ends it if it stays too long. False: the deadline comes first.
    async fn await_turn(&self, table: Uuid, claim: Revision, deadline: Instant) -> Result<bool> {
        let until = clock::now() + TURN_LIMIT;
        let mut backoff = Backoff::default();
        loop {
            if !backoff.wait(deadline).await {
                return Ok(false);
            }
            if self.metadata.turn(table, deadline).await? != Some(claim) {
                return Ok(true);
            }
            if clock::now() >= until {
                self.end_turn(table, claim, deadline).await?;
                return Ok(true);
            }
        }
    }

    /// [`Catalog::claim_turn`].
    ///
    /// # Errors
    /// Its.
    pub async fn claim_turn(&self, table: Uuid, claimant: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        self.metadata.catalog.claim_turn(table, claimant, deadline).await
    }

    /// [`Catalog::end_turn`].
    ///
    /// # Errors
    /// Its.
    pub async fn end_turn(&self, table: Uuid, claim: Revision, deadline: Instant) -> Result<()> {
        self.metadata.catalog.end_turn(table, claim, deadline).await
    }

    fn note(
        &self,
        table: &TableIdent,
        outcome: Result<Versioned<TablePointer>>,
        at: Instant,
    ) -> Result<Versioned<TablePointer>> {
        match &outcome {
            Ok(pointer) => self.metadata.pointers.note_committed(table, pointer.clone(), at),
            Err(error) => self.note_failed(table, error, at),
        }
        outcome
    }

    fn note_failed(&self, table: &TableIdent, error: &CatalogError, at: Instant) {
        match error {
            CatalogError::Conflict { current: Some(current), .. } => {
                self.metadata.pointers.note_committed(table, current.clone(), at);
            }
            CatalogError::Conflict { .. }
            | CatalogError::TableExists(_)
            | CatalogError::ViewExists(_)
            | CatalogError::TableNotFound(_) => {
                self.metadata.pointers.invalidate(table);
            }
            // It may have been done.
            error if error.applied() == Applied::Unknown => self.metadata.pointers.invalidate(table),
            _ => {}
        }
    }
}

/// A store that tells the cache of every revision it is told of, and counts.
#[derive(Debug)]
struct Noticing {
    store: SharedStore,
    pointers: crate::cache::Noticed,
    counting: Arc<Counting>,
}

impl Noticing {
    fn noticed<T>(
        &self,
        reason: Reason,
        revision: impl Fn(&T) -> Revision,
        answer: Result<T, Error>,
    ) -> Result<T, Error> {
        self.counting.call(reason);
        if let Ok(answer) = &answer {
            self.pointers.notice(revision(answer));
        }
        answer
    }
}

#[async_trait]
impl MetaStore for Noticing {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        let read = self.store.get(key, options, by).await;
        self.noticed(Reason::Read, |read| read.revision, read)
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        let read = self.store.batch_get(keys, options, by).await;
        self.noticed(Reason::Read, |read| read.revision, read)
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        let read = self.store.list(prefix, page, limit, options, by).await;
        self.noticed(Reason::List, |read| read.revision, read)
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        let read = self.store.open_snapshot(options, by).await;
        self.noticed(Reason::Read, |read| read.revision, read)
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        self.store.close_snapshot(snapshot, by).await
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let committed = self.store.commit(txn, by).await;
        self.noticed(Reason::Write, |committed| committed.result.revision, committed)
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        self.counting.call(Reason::Watch);
        self.store.watch(prefix, from, by).await
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, by: Instant) -> Result<Lease, Error> {
        self.store.grant_lease(ttl, holder, by).await
    }

    async fn renew_lease(&self, lease: Lease, by: Instant) -> Result<Option<Lease>, Error> {
        self.store.renew_lease(lease, by).await
    }

    async fn revoke_lease(&self, id: LeaseId, by: Instant) -> Result<bool, Error> {
        self.store.revoke_lease(id, by).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::faulty::{FaultyStore, soon};
    use crate::memory::MemoryStore;
    use crate::nodes::Record;
    use crate::store::Token;
    use lake_proto::v1::NodeInfo;

    fn pointer(location: &str) -> TablePointer {
        TablePointer { uuid: Uuid::nil(), metadata_location: location.to_owned(), previous_location: None }
    }

    fn table() -> TableIdent {
        TableIdent::new("n".parse().unwrap(), "t").unwrap()
    }

    /// A node of its own over the store.
    async fn node(store: &SharedStore) -> Metadata {
        let metadata = Metadata::new(store.clone(), CacheConfig::default());
        while metadata.namespaces().is_none() {
            tokio::task::yield_now().await;
        }
        metadata
    }

    #[tokio::test(start_paused = true)]
    async fn what_one_node_does_it_sees_at_once_and_others_are_told() {
        let store = MemoryStore::shared();
        let (one, two) = (node(&store).await, node(&store).await);
        let namespace: Namespace = "n".parse().unwrap();
        one.writer().create_namespace(&namespace, Default::default(), soon()).await.unwrap();
        let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
        for metadata in [&one, &two] {
            metadata.wait_for_version(created.mod_revision, soon()).await.unwrap();
            while !metadata.namespaces().unwrap().names.contains(&namespace) {
                tokio::task::yield_now().await;
            }
            let resolved = metadata.table(&table(), Want::by(soon())).await.unwrap();
            assert_eq!(resolved.pointer().unwrap().value, pointer("1"));
        }
        let swapped =
            one.writer().swap_table(&table(), created.mod_revision, &pointer("2"), None, soon()).await.unwrap();
        assert_eq!(one.cached(&table()).unwrap().pointer().unwrap().value, pointer("2"));
        assert_eq!(two.wait_for_version(swapped.mod_revision, soon()).await.unwrap(), two.seen());
        assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, pointer("2"));
        let counters = two.counters();
        assert_eq!((counters.calls(Reason::Miss), counters.calls(Reason::Write)), (1, 0));

        let error = two.wait_for_version(1000, clock::now() + Duration::from_secs(1)).await.unwrap_err();
        assert!(error.to_string().contains("told up to revision 3"), "{error}");
        let dropped = two.writer().drop_table(&table(), swapped.mod_revision, soon()).await.unwrap();
        assert_eq!(two.table(&table(), Want::by(soon())).await.unwrap().pointer(), None);
        one.wait_for_version(dropped, soon()).await.unwrap();
        assert_eq!(one.table(&table(), Want::by(soon())).await.unwrap().pointer(), None);
        one.close().await;
        two.close().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_runs_again_on_what_the_winner_left() {
        let store = MemoryStore::shared();
        let (one, two) = (node(&store).await, node(&store).await);
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        one.writer().create_table(&table(), &pointer("a"), soon()).await.unwrap();
        two.table(&table(), Want::by(soon())).await.unwrap();
        let base = one.read_table(&table(), soon()).await.unwrap().unwrap();
        // The watch has not come: what this node has cached is what lost.
        one.writer().swap_table(&table(), base.mod_revision, &pointer("ab"), None, soon()).await.unwrap();
        let mut seen = Vec::new();
        let append = |current: &TablePointer| {
            seen.push(current.metadata_location.clone());
            Ok::<_, String>(Some(pointer(&format!("{}c", current.metadata_location))))
        };
        let changed = two.writer().read_modify_write(&table(), soon(), append).await.unwrap();
        assert_eq!(changed.value, pointer("abc"));
        assert_eq!(seen.last().unwrap(), "ab");
        let refused = two.writer().read_modify_write(&table(), soon(), |_| Err("no")).await.unwrap_err();
        assert_eq!(refused, ModifyError::Refused("no"));
        let kept = two.writer().read_modify_write(&table(), soon(), |_| Ok::<_, String>(None)).await.unwrap();
        assert_eq!(kept.mod_revision, changed.mod_revision);
    }

    #[tokio::test(start_paused = true)]
    async fn what_changes_elsewhere_leaves_the_set_of_namespaces_as_it_is() {
        let store = MemoryStore::shared();
        let one = node(&store).await;
        let at = async |revision: Revision| loop {
            match one.namespaces() {
                Some(namespaces) if namespaces.revision >= revision => return namespaces,
                _ => tokio::task::yield_now().await,
            }
        };
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        let before = at(one.seen()).await;
        let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
        let after = at(created.mod_revision).await;
        assert!(Arc::ptr_eq(&before.names, &after.names) && after.names.len() == 1);
        one.writer().create_namespace(&"m".parse().unwrap(), Default::default(), soon()).await.unwrap();
        assert_eq!((at(one.seen()).await.names.len(), after.names.len()), (2, 1), "a copy that somebody has stays");
    }

    #[tokio::test(start_paused = true)]
    async fn too_many_namespaces_are_not_kept_and_fewer_are_again() {
        let store = MemoryStore::shared();
        let catalog = Catalog::new(store.clone());
        let copy: Arc<ArcSwapOption<Namespaces>> = Arc::default();
        let names: [Namespace; 3] = ["a", "b", "c"].map(|name| name.parse().unwrap());
        let following = tokio::spawn(copies::follow_at_most(store, copy.clone(), 2));
        let has = async |many: Option<usize>| {
            while copy.load().as_ref().map(|namespaces| namespaces.names.len()) != many {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        for (name, many) in names.iter().zip([Some(1), Some(2), None]) {
            catalog.create_namespace(name, Default::default(), soon()).await.unwrap();
            has(many).await;
        }
        catalog.drop_namespace(&names[0], soon()).await.unwrap();
        has(Some(2)).await;
        following.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_are_seen_as_they_register_and_go() {
        let store = MemoryStore::shared();
        let one = node(&store).await;
        let put = async |name: &str, token: Option<Token>, value: Bytes| {
            let key = format!("/lake/node/{name}");
            store.cas(&key, token, value, soon()).await.unwrap().result.revision
        };
        let info = NodeInfo { flight_address: "a:1".to_owned(), ..NodeInfo::default() };
        let at = async |revision| loop {
            match one.nodes() {
                Some(nodes) if nodes.revision >= revision => return nodes,
                _ => tokio::task::yield_now().await,
            }
        };
        let record = Record::next("p", 7, &info, None);
        let first = put("n", None, record.to_bytes()).await;
        let nodes = at(first).await;
        let known = nodes.nodes["n"].clone();
        assert_eq!((known.record.flight_address.as_str(), known.epoch), ("a:1", first));
        assert_eq!(known.record, record);
        // Something that no registry wrote is no node; another process is.
        let other = put("other", None, "up".into()).await;
        let after = at(other).await;
        assert!(Arc::ptr_eq(&nodes.nodes, &after.nodes) && after.nodes.len() == 1, "nothing of it has changed");
        let next = Record::next("q", 8, &info, Some((record, known.epoch)));
        let again = put("n", Some(Token::at(first)), next.to_bytes()).await;
        let later = at(again).await.nodes["n"].clone();
        assert_eq!((later.record, later.epoch), (next, again));
        let key = "/lake/node/n";
        let gone = store.cas_delete(key, Token::at(again), soon()).await.unwrap().result.revision;
        assert!(at(gone).await.nodes.is_empty());
        one.close().await;
    }

    #[cfg(feature = "store-object")]
    #[tokio::test]
    async fn over_a_directory_every_question_is_a_read_and_changes_are_seen_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let store: SharedStore = Arc::new(crate::object::ObjectMetaStore::local(dir.path()).unwrap());
            Metadata::new(store, CacheConfig::default())
        };
        let (one, two) = (open(), open());
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
        for at in 2..6 {
            let add = |now: &TablePointer| Ok::<_, String>(Some(pointer(&format!("{}{at}", now.metadata_location))));
            let writer = if at % 2 == 0 { &two } else { &one };
            writer.writer().read_modify_write(&table(), soon(), add).await.unwrap();
        }
        let missing = TableIdent::new("n".parse().unwrap(), "missing").unwrap();
        for metadata in [&one, &two] {
            assert!(metadata.cached(&table()).is_none());
            let want = Want::by(soon()).at_least(created.mod_revision);
            let resolved = metadata.tables(&[table(), missing.clone()], want).await.unwrap();
            let pointer = resolved[0].pointer().unwrap();
            assert_eq!(pointer.value.metadata_location, "12345");
            assert_eq!(resolved[0].valid_through, pointer.mod_revision);
            assert!(resolved[1].pointer().is_none() && !resolved[0].metasrv_away);
            let read = metadata.read_table(&table(), soon()).await.unwrap().unwrap();
            assert_eq!((&read.value, metadata.seen()), (&pointer.value, 0));
            assert!(metadata.namespaces().is_none() && metadata.wait_for_version(1, soon()).await.is_err());
            metadata.close().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_was_left_behind_is_ended() {
        let store = MemoryStore::shared();
        let one = node(&store).await;
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        one.writer().create_table(&table(), &pointer("a"), soon()).await.unwrap();
        // Whoever claimed it is gone.
        one.writer().claim_turn(Uuid::nil(), Uuid::new_v4(), soon()).await.unwrap().unwrap();
        let change = |_: &TablePointer| Ok::<_, String>(Some(pointer("b")));
        let at_once = clock::now() + TURN_LIMIT / 2;
        let error = one.writer().read_modify_write(&table(), at_once, change).await.unwrap_err();
        assert!(matches!(error, ModifyError::Catalog(CatalogError::NotYourTurn { .. })), "{error}");
        let changed = one.writer().read_modify_write(&table(), soon(), change).await.unwrap();
        assert_eq!(changed.value, pointer("b"));
        assert_eq!(one.turn(Uuid::nil(), soon()).await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_pointer_does_not_decide_that_nothing_is_to_be_done() {
        // Nothing is told here: watches are refused.
        let shared: SharedStore = Arc::new(FaultyStore::default());
        let (one, two) = (
            Metadata::new(shared.clone(), CacheConfig::default()),
            Metadata::new(shared.clone(), CacheConfig::default()),
        );
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        let mut last = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
        type Decline = fn(&TablePointer) -> std::result::Result<Option<TablePointer>, &'static str>;
        let declines: [Decline; 2] = [|_| Ok(None), |_| Err("not of this one")];
        for decline in declines {
            let old = two.table(&table(), Want::by(soon())).await.unwrap().pointer().unwrap().value.clone();
            let next = pointer(&format!("{}1", old.metadata_location));
            one.writer().swap_table(&table(), last.mod_revision, &next, None, soon()).await.unwrap();
            assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, old, "it is cached still");
            let change = |now: &TablePointer| match now == &old {
                true => decline(now),
                false => Ok(Some(pointer(&format!("{}2", now.metadata_location)))),
            };
            last = two.writer().read_modify_write(&table(), soon(), change).await.unwrap();
            assert_eq!(last.value.metadata_location, format!("{}2", next.metadata_location));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_revision_in_any_reply_has_what_is_older_renewed() {
        // Nothing is told here: watches are refused.
        let store = Arc::new(FaultyStore::default());
        let shared: SharedStore = store.clone();
        let (one, two) = (
            Metadata::new(shared.clone(), CacheConfig::default()),
            Metadata::new(shared.clone(), CacheConfig::default()),
        );
        one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
        let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
        two.table(&table(), Want::by(soon())).await.unwrap();
        one.writer().swap_table(&table(), created.mod_revision, &pointer("2"), None, soon()).await.unwrap();
        // Young enough to be used, and nothing is known of a change.
        tokio::time::advance(Duration::from_millis(150)).await;
        assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, pointer("1"));
        assert_eq!(two.counters().refreshes, 0);
        two.list_namespaces(soon()).await.unwrap();
        let by = clock::now() + Duration::from_millis(200);
        while two.cached(&table()).unwrap().pointer().unwrap().value != pointer("2") {
            assert!(clock::now() < by, "the pointer was not renewed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(two.counters().calls(Reason::Refresh), 1);
        store.away.store(true, Ordering::SeqCst);
        assert!(two.list_namespaces(soon()).await.is_err());
    }
}
