//! Snapshots that expire by themselves, so that a table which is appended to all the time keeps metadata of bounded size.
//!
//! With the table property [`EXPIRE`] = `true`, appends that are committed together also take those snapshots out of the history
//! that no tag or branch needs, that are older than Iceberg's own properties say
//! (`history.expire.max-snapshot-age-ms`, 5 days by default, and `history.expire.min-snapshots-to-keep`) and that nobody can be reading
//! ([`maintenance::HELD_FOR`]), in the same commit, and once the oldest of them is past by [`EVERY`]: so at most that often. Afterwards what only they needed is removed:
//! - While rows were only added since the oldest of them, and all snapshots are in one line of descent, no data file can have
//!   become unused: then only manifest lists and manifests are compared, those of the snapshots that went with those of their
//!   neighbours that stayed. A manifest that leaves the list does not come back, so the neighbours tell.
//! - Else everything that is still reachable is looked through, as `expire_snapshots` does, and that is done once the oldest
//!   is past by [`EVERY_WITH_REMOVALS`].
//!
//! Removing that fails, or does not come to it because the node dies, leaves files that the sweep for orphans finds.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use iceberg::spec::{Operation, Snapshot, SnapshotRef, TableMetadata, TableMetadataBuilder};
use lake_client::catalog::{TableIdent, TablePointer, Versioned};

use super::maintenance::{self, ancestors};
use super::version::{Edit, now_ms};
use super::{Table, Tables};
use crate::error::Result;

/// The table property that has snapshots expire by themselves.
pub const EXPIRE: &str = "lake.expire-snapshots.enabled";
/// How often, at most.
pub const EVERY: Duration = Duration::from_secs(2);
/// How often where files may have become unused.
pub const EVERY_WITH_REMOVALS: Duration = Duration::from_secs(60);

/// How long removing what has become unused may take.
const CLEANED_WITHIN: Duration = Duration::from_secs(600);

/// What an edit has taken out, and the version that it was taken out of.
type Gone = Arc<Mutex<Option<(Vec<Snapshot>, TableMetadata)>>>;

/// The expiry of one table's snapshots.
#[derive(Debug, Default)]
pub struct Expiring {
    not_before: Option<Instant>,
    gone: Option<Gone>,
}

impl Expiring {
    /// What the next commit is to take out, if it is time for that.
    pub async fn edit(&mut self, tables: &Tables, table: &Table) -> Option<Edit> {
        self.gone = None;
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        // The one that the commit will most likely follow.
        let metadata = tables.cache.table(&table.pointer.value.metadata_location).await.ok()?;
        if !is_due(&metadata) {
            return None;
        }
        let gone = Gone::default();
        self.gone = Some(gone.clone());
        Some(Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
            let (past, builder) = maintenance::retained(base, None, None)?.remove_others(base, builder);
            *gone.lock().unwrap_or_else(PoisonError::into_inner) = Some((past, base.clone()));
            Ok(builder)
        }))
    }

    /// The commit was made: removes what it has left behind, in a task that shutdown waits for.
    pub fn committed(&mut self, tables: &Arc<Tables>, ident: &TableIdent, pointer: &Versioned<TablePointer>) {
        let gone = self.gone.take();
        let gone = gone.and_then(|gone| gone.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some((gone, base)) = gone else { return };
        if gone.is_empty() {
            // What is past is needed by tags or branches.
            self.not_before = Some(Instant::now() + EVERY_WITH_REMOVALS);
            return;
        }
        let (owner, tables, ident) = (tables.clone(), tables.clone(), ident.clone());
        let location = pointer.value.metadata_location.clone();
        owner.tasks.spawn(async move {
            let removed = async {
                let current = tables.cache.table(&location).await?;
                // An attempt that lost its race, or was made by another node, has taken out nothing.
                if gone.iter().any(|snapshot| current.snapshot_by_id(snapshot.snapshot_id()).is_some()) {
                    return Ok(());
                }
                clean(&tables, &base, &current, &gone).await
            };
            if let Err(error) = removed.await {
                tracing::warn!(table = %ident, %error, "expired snapshots' files stay; the orphan sweep will find them");
            }
        });
    }
}

/// Whether snapshots expire by themselves, and one is past for long enough.
pub fn is_due(metadata: &TableMetadata) -> bool {
    if !metadata.properties().get(EXPIRE).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return false;
    }
    let any_past = |by: Duration| {
        let then = now_ms().saturating_sub(by.as_millis() as i64);
        let cutoff = then.saturating_sub(maintenance::snapshot_age_ms(metadata));
        let mut old = metadata.snapshots().filter(|snapshot| snapshot.timestamp_ms() < cutoff).peekable();
        old.peek().is_some() && {
            let held = maintenance::held(metadata, then);
            old.any(|snapshot| !held.contains(&snapshot.snapshot_id()))
        }
    };
    match any_past(EVERY) {
        true if only_added(metadata, metadata.snapshots()) => true,
        due => due && any_past(EVERY_WITH_REMOVALS),
    }
}

/// Whether these snapshots have only added files, and all of the version's are ancestors of the current one.
fn only_added<'a>(base: &TableMetadata, mut snapshots: impl Iterator<Item = &'a SnapshotRef>) -> bool {
    snapshots.all(|snapshot| snapshot.summary().operation == Operation::Append)
        && ancestors(base, base.current_snapshot_id()).count() == base.snapshots().len()
}

/// Removes what the snapshots `gone` of `base` refer to and no snapshot of `current` does.
async fn clean(tables: &Tables, base: &TableMetadata, current: &TableMetadata, gone: &[Snapshot]) -> Result<()> {
    let oldest = gone.iter().map(Snapshot::sequence_number).min().unwrap_or_default();
    let since = base.snapshots().filter(|snapshot| snapshot.sequence_number() >= oldest);
    if !only_added(base, since) {
        let deadline = Instant::now() + CLEANED_WITHIN;
        return maintenance::remove_unreferenced(tables, base, current, gone, deadline).await;
    }
    let went: HashSet<i64> = gone.iter().map(Snapshot::snapshot_id).collect();
    let line: Vec<&SnapshotRef> = ancestors(base, base.current_snapshot_id()).collect();
    let has_gone = |at: usize| line.get(at).is_some_and(|snapshot| went.contains(&snapshot.snapshot_id()));
    let (mut lost, mut kept) = (HashSet::new(), HashSet::new());
    for (at, snapshot) in line.iter().enumerate() {
        let beside_gone = has_gone(at + 1) || at.checked_sub(1).is_some_and(has_gone);
        let locations = match has_gone(at) {
            true => &mut lost,
            false if beside_gone => &mut kept,
            false => continue,
        };
        locations.insert(snapshot.manifest_list().to_owned());
        let list = tables.cache.manifest_list(base, snapshot).await?;
        locations.extend(list.entries().iter().map(|manifest| manifest.manifest_path.clone()));
    }
    // What lies elsewhere is not the table's own.
    let own = format!("{}/", base.location());
    let unused = lost.difference(&kept).filter(|location| location.starts_with(&own));
    tables.storage.discard(&unused.cloned().collect::<Vec<_>>()).await;
    Ok(())
}
