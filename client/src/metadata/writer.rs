//! Changes of the metadata, by compare-and-set, and what the cache learns of each: what was done is seen here from then on;
//! what may have been done, or lost to somebody else's change, is looked at again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, Revision};
use uuid::Uuid;

use super::{Metadata, Result};
use crate::backoff::Backoff;
use crate::catalog::appends::{Handed, Outcome, Settling};
use crate::catalog::{
    Catalog, CatalogError, Keeping, MAX_RACES, Namespace, Operation, TableChange, TableIdent, TablePointer, Versioned,
};
use crate::clock;
use crate::procedures::drop_namespace::{DROP, RESTORE};
use crate::procedures::{Procedure, State, calls};
use crate::store::{Applied, Capabilities, Lease};

/// How long another's claim on the next turn is waited for, before it counts as left behind.
pub(super) const TURN_LIMIT: Duration = Duration::from_secs(1);

/// How often there is a look whether a namespace is gone that is dropped in steps.
const DROP_LOOK: Duration = Duration::from_millis(100);

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

/// The metadata, for changing it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MetadataWriter {
    pub(super) metadata: Metadata,
}

impl MetadataWriter {
    pub(super) fn new(metadata: Metadata) -> Self {
        Self { metadata }
    }

    pub(super) fn catalog(&self) -> &Catalog {
        &self.metadata.catalog
    }

    /// [`Catalog::within`].
    pub fn within(&self, operation: Operation) -> Self {
        let catalog = self.catalog().within(operation);
        Self { metadata: Metadata { catalog, ..self.metadata.clone() } }
    }

    /// [`Catalog::guarded`].
    #[must_use]
    pub fn guarded(&self, guards: Vec<Compare>) -> Self {
        let catalog = self.catalog().guarded(guards);
        Self { metadata: Metadata { catalog, ..self.metadata.clone() } }
    }

    /// [`Catalog::check_guards`].
    ///
    /// # Errors
    /// Its.
    pub async fn check_guards(&self, deadline: Instant) -> Result<()> {
        self.catalog().check_guards(deadline).await
    }

    /// [`Catalog::outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn outcome(&self, domain: &str, id: &str, deadline: Instant) -> Result<Option<Bytes>> {
        self.catalog().outcome(domain, id, deadline).await
    }

    /// [`Catalog::leave_outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn leave_outcome(&self, operation: &Operation, deadline: Instant) -> Result<Bytes> {
        self.catalog().leave_outcome(operation, deadline).await
    }

    /// [`Catalog::forget_outcomes`].
    ///
    /// # Errors
    /// Its.
    pub async fn forget_outcomes(&self, domain: &str, old: impl Fn(&[u8]) -> bool, deadline: Instant) -> Result<usize> {
        self.catalog().forget_outcomes(domain, old, deadline).await
    }

    /// [`Catalog::forget_kept`].
    ///
    /// # Errors
    /// Its.
    pub async fn forget_kept(&self, keeping: &mut Keeping, least: Duration, deadline: Instant) -> Result<usize> {
        self.catalog().forget_kept(keeping, least, deadline).await
    }

    /// What the store can do.
    pub fn capabilities(&self) -> Capabilities {
        self.metadata.capabilities()
    }

    /// [`Catalog::hands_over`].
    pub fn hands_over(&self) -> bool {
        self.catalog().hands_over()
    }

    /// A lease of this process, alive for at least half of `ttl` from now on: `held` renewed if that is needed, or a new one.
    ///
    /// # Errors
    /// The store's.
    pub async fn lease(&self, held: Option<Lease>, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease> {
        let store = self.catalog().store();
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
        self.catalog().hand_over(table, id, value, lease, deadline).await
    }

    /// [`Catalog::handed`].
    ///
    /// # Errors
    /// Its.
    pub async fn handed(&self, table: Uuid, most: u32, deadline: Instant) -> Result<Vec<Handed>> {
        self.catalog().handed(table, most, deadline).await
    }

    /// [`Catalog::append_outcome`].
    ///
    /// # Errors
    /// Its.
    pub async fn append_outcome(&self, id: Uuid, deadline: Instant) -> Result<Option<Outcome>> {
        self.catalog().append_outcome(id, deadline).await
    }

    /// [`Catalog::withdraw`].
    ///
    /// # Errors
    /// Its.
    pub async fn withdraw(&self, table: Uuid, id: Uuid, outcome: Bytes, deadline: Instant) -> Result<Bytes> {
        self.catalog().withdraw(table, id, outcome, deadline).await
    }

    /// [`Catalog::forget_appends`].
    ///
    /// # Errors
    /// Its.
    pub async fn forget_appends(&self, read: &[(Uuid, Revision)], deadline: Instant) -> Result<()> {
        self.catalog().forget_appends(read, deadline).await
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
        self.catalog().create_view(view, new, deadline).await
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
        self.catalog().swap_view(view, expected, new, deadline).await
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
        self.catalog().rename_view(from, to, deadline).await
    }

    /// [`Catalog::drop_view`].
    ///
    /// # Errors
    /// Its.
    pub async fn drop_view(&self, view: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.catalog().drop_view(view, expected, deadline).await
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
        let changed = self.catalog().change_tables_while(changes, unchanged, deadline).await;
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
        self.catalog().create_namespace(namespace, properties, deadline).await
    }

    /// [`Catalog::drop_namespace`].
    ///
    /// # Errors
    /// Its.
    pub async fn drop_namespace(&self, namespace: &Namespace, deadline: Instant) -> Result<()> {
        self.catalog().drop_namespace(namespace, deadline).await
    }

    /// [`Catalog::drop_namespace_and_contents`]; reading here sees it from now on.
    ///
    /// # Errors
    /// Its.
    pub async fn drop_namespace_and_contents(
        &self,
        namespace: &Namespace,
        purged_at_unix_ms: Option<u64>,
        deadline: Instant,
    ) -> Result<u64> {
        let tables = self.catalog().list_tables(namespace, deadline).await?;
        let dropped = self.catalog().drop_namespace_and_contents(namespace, purged_at_unix_ms, deadline).await;
        self.see_again(namespace, tables);
        dropped
    }

    /// Reading these tables here sees what became of them.
    fn see_again(&self, namespace: &Namespace, tables: Vec<String>) {
        // What is none of lake's names is not cached.
        for table in tables.into_iter().filter_map(|name| TableIdent::new(namespace.clone(), name).ok()) {
            self.metadata.pointers.invalidate(&table);
        }
    }

    /// [`Catalog::submit_namespace_drop`], and waits until the namespace is gone, or nothing more comes of it, up to the deadline. Returns
    /// the procedure's id, and it as it was seen last; reading here sees what it did from then on.
    ///
    /// # Errors
    /// Those of the submission.
    pub async fn drop_namespace_in_steps(
        &self,
        namespace: &Namespace,
        purge: bool,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<(String, Option<Procedure>)> {
        let tables = self.catalog().list_tables(namespace, deadline).await?;
        let id = self.catalog().submit_namespace_drop(namespace, purge, now_unix_ms, deadline).await?;
        let mut last = None;
        // That it cannot be looked up changes nothing of it.
        while let Ok(Some(seen)) = calls::get(self.catalog().store().as_ref(), &id, deadline).await {
            let goes_on = seen.record.state == State::Active && [DROP, RESTORE].contains(&seen.record.step.as_str());
            last = Some(seen);
            if !goes_on || clock::now() + DROP_LOOK >= deadline {
                break;
            }
            tokio::time::sleep(DROP_LOOK).await;
        }
        self.see_again(namespace, tables);
        Ok((id, last))
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
        self.catalog().update_namespace(namespace, removals, updates, deadline).await
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
        let created = self.catalog().create_table(table, new, deadline).await;
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
        self.swap_table_settling(table, expected, new, turn, &Settling::default(), deadline).await
    }

    /// [`Catalog::swap_table_settling`]; reading here sees the same of it.
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
        let swapped = self.catalog().swap_table_settling(table, expected, new, turn, settling, deadline).await;
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
        let renamed = self.catalog().rename_table(from, to, deadline).await;
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
        match self.catalog().drop_table(table, expected, deadline).await {
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
            let had = deadline.saturating_duration_since(clock::now());
            match self.metadata.turn(table, deadline).await {
                Ok(turn) if turn != Some(claim) => return Ok(true),
                Ok(_) => {}
                Err(CatalogError::Store(e)) if e.is_of_a_last_look(had) => return Ok(false),
                Err(e) => return Err(e),
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
        self.catalog().claim_turn(table, claimant, deadline).await
    }

    /// [`Catalog::end_turn`].
    ///
    /// # Errors
    /// Its.
    pub async fn end_turn(&self, table: Uuid, claim: Revision, deadline: Instant) -> Result<()> {
        self.catalog().end_turn(table, claim, deadline).await
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
