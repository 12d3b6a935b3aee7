//! Iceberg tables: creating, loading, appending to and dropping them.
//!
//! A table is a pointer in the metadata cluster and immutable objects in the warehouse:
//! ```text
//! pointer -> <location>/metadata/00007-<uuid>.metadata.json     one version: schema, snapshots, properties
//!              -> <location>/metadata/snap-<id>-<uuid>.avro     the snapshot's manifest list
//!                   -> <location>/metadata/<uuid>-m0.avro       a manifest: data files with counts and bounds
//!                        -> <location>/data/<uuid>.parquet      rows
//! ```
//! The location is `<root of the warehouse>/<namespace>/<name>-<table uuid>` ([`warehouses`]), so that a table created under a name used before
//! shares nothing with the old one.
//!
//! A change writes new objects, makes them durable, and then swaps the pointer by compare-and-set ([`commit`]). A
//! reader sees the old version or the new one.
//!
//! In reading order: [`types`] (Arrow and Iceberg types), [`sound`] (what metadata must be that comes in), [`numbers`] (what is
//! rounded), [`layout`] (partitions and order of rows), [`writer`], [`memory`], `parquet_file`, `checksums`, `style`, `bloom` and
//! [`stats`] (data files), [`deletes`] (delete files), [`version`] (manifests, lists, metadata.json), [`conflict`] (does a change hold on a
//! newer version), [`commit`] (the swap, lost races, unknown outcomes), [`queue`] (one writer of a node at a time per table),
//! [`append`] (appends that wait together are one commit), [`handing`] (and those of several nodes), [`scope`] (on whose behalf),
//! [`staged`] (transactions over several tables), [`expiry`] (snapshots that expire by themselves), [`history`] and [`maintenance`]
//! (snapshots, manifests), [`orphans`], [`steps`] (where tests have a node die), `undrop` (dropped tables come back), [`view`]
//! (views), [`pins`] (the versions of a query that is run later), [`warehouses`] (where tables live),
//! and [`Tables`] here, which is what the rest of the crate uses.
//!
//! What is written: format version 2, and 3 where a table is created or upgraded so, or another engine has made it. What cannot be written is
//! refused by name ([`Table::check_writable`]), never half written.

pub mod append;
mod bloom;
mod checksums;
pub mod commit;
pub mod conflict;
pub mod deletes;
pub mod expiry;
pub mod handing;
pub mod history;
pub mod layout;
pub mod maintenance;
pub mod memory;
pub mod numbers;
pub mod orphans;
mod parquet_file;
pub mod pins;
pub mod queue;
pub mod scope;
pub mod sound;
pub mod staged;
pub mod stats;
pub(crate) mod steps;
mod style;
pub mod types;
mod undrop;
pub mod version;
pub mod view;
pub mod warehouses;
pub mod writer;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::{Schema as ArrowSchema, SchemaRef};
use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{FormatVersion, Literal, MAIN_BRANCH, Operation, TableMetadata, TableMetadataBuilder};
use lake_client::cache::Want;
use lake_client::catalog::{CatalogError, Namespace, TableIdent, TablePointer, Versioned};
use lake_client::metadata::{Metadata, MetadataWriter};
use lake_client::procedures::State;
use lake_client::procedures::purge::ids_of;
use lake_client::store::Applied;
use lake_proto::kv::Compare;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::scan::deletes::DeleteCache;
use crate::storage::Storage;
use crate::storage::cache::MetadataCache;
use crate::storage::io::LakeIo;
use crate::upkeep::Guard;
use crate::upkeep::works::{Works, machine_ms};
use append::Appends;
use commit::Proposal;
use conflict::Reads;
use handing::Handing;
use layout::Layout;
use pins::Pins;
use queue::CommitQueues;
use scope::Scope;
use version::{Edit, Removed};
use warehouses::{LastLook, Place};
use writer::{DataFiles, DataWriter};

/// Metadata files beyond this many versions are removed after a commit, by the properties that new tables get.
const PREVIOUS_VERSIONS: &str = "100";

/// The property by which a table is created in another format version than 2, and upgraded.
pub const FORMAT_VERSION: &str = "format-version";

/// Namespaces listed at a time.
const LISTINGS_IN_FLIGHT: usize = 8;

/// How often pointers are read anew because the metadata that they named was gone by the time it was read.
const REREADS: usize = 8;

/// What the outcomes of transactions are filed under.
pub const TRANSACTIONS: &str = "transaction";

/// Everything about tables that a node shares between statements, and on whose behalf it is used. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tables {
    pub storage: Arc<Storage>,
    pub cache: MetadataCache,
    /// What delete files say.
    pub deletes: DeleteCache,
    pub metadata: Metadata,
    pub(crate) writer: MetadataWriter,
    pub(crate) queues: CommitQueues,
    pub(crate) appends: Appends,
    pub(crate) handing: Arc<Handing>,
    /// Commits and clean-ups under way; shutdown waits for them.
    pub(crate) tasks: TaskTracker,
    target_file_bytes: usize,
    last_look: LastLook,
    pub(crate) scope: Scope,
    /// What the summary of every snapshot says besides.
    notes: Arc<BTreeMap<&'static str, String>>,
    /// Upkeep that this is used for.
    works: Option<Arc<Works>>,
}

/// One version of a table, as a statement sees it.
#[derive(Debug, Clone)]
pub struct Table {
    pub ident: TableIdent,
    pub pointer: Versioned<TablePointer>,
    pub metadata: Arc<TableMetadata>,
}

/// What resolving the tables of a statement found.
#[derive(Debug, Default)]
pub struct Loaded {
    /// In the order asked for; `None` where there is no such table.
    pub tables: Vec<Option<Table>>,
    /// The age of the oldest pointer used because the metadata cluster is away.
    pub stale: Option<Duration>,
    /// The age of the oldest pointer, where pointers were looked up.
    pub age: Option<Duration>,
}

impl Tables {
    pub fn new(
        storage: Arc<Storage>,
        metadata_cache_bytes: u64,
        metadata: Metadata,
        target_file_bytes: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            // The last quarter is for the footers of data files.
            cache: MetadataCache::new(storage.clone(), metadata_cache_bytes / 2),
            deletes: DeleteCache::new(metadata_cache_bytes / 4),
            storage,
            writer: metadata.writer(),
            metadata,
            queues: CommitQueues::default(),
            appends: Appends::default(),
            handing: Arc::default(),
            tasks: TaskTracker::new(),
            target_file_bytes,
            last_look: LastLook::default(),
            scope: Scope::Plain,
            notes: Arc::default(),
            works: None,
        })
    }

    /// The same on somebody's behalf.
    pub fn within(&self, scope: Scope) -> Arc<Self> {
        Arc::new(Self { scope, ..self.clone() })
    }

    /// The same, where no table's change is made unless these compares hold when it is.
    pub fn guarded(&self, guards: Vec<Compare>) -> Arc<Self> {
        Arc::new(Self { writer: self.writer.guarded(guards), ..self.clone() })
    }

    /// The same, under a guard of upkeep: its snapshots say which. Whatever goes on with it, a commit say, is work.
    pub(crate) fn under(&self, guard: Guard, works: Arc<Works>) -> Arc<Self> {
        let Guard { compares, notes } = guard;
        let (writer, notes) = (self.writer.guarded(compares), Arc::new(notes));
        Arc::new(Self { writer, notes, works: Some(works), ..self.clone() })
    }

    /// Before something is sent that is made, or answered, only if the guard of upkeep holds: what [`Tables::held`] is told then.
    pub(crate) fn asks(&self) -> Option<u64> {
        self.works.as_ref().and_then(|_| machine_ms())
    }

    /// It was made: the guard has held after it was asked for.
    pub(crate) fn held(&self, asked: Option<u64>) {
        if let Some(works) = &self.works {
            works.held(asked);
        }
    }

    /// What changes are made with: where they are one operation, its outcome is left with the first.
    ///
    /// # Errors
    /// `Invalid` if the operation's id cannot be one; `NotSupported` inside of a transaction, which makes its changes itself.
    pub(crate) fn recording(&self) -> Result<MetadataWriter> {
        match &self.scope {
            Scope::Plain | Scope::Pinned(_) => Ok(self.writer.clone()),
            Scope::Once(_) if planted::has(Bug::OutcomeApart) => Ok(self.writer.clone()),
            Scope::Once(once) => Ok(self.writer.within(once.record(None)?)),
            Scope::Within(_) => {
                Err(Error::not_supported("inside of a transaction this statement is not supported; nothing was done"))
            }
        }
    }

    /// What the statement will answer, said before it commits: it is kept with the outcome of its operation.
    pub(crate) fn will_answer(&self, count: u64) {
        if let Scope::Once(once) = &self.scope {
            once.will_answer(count);
        }
    }

    /// Loads the tables of one statement, their pointers all at once.
    pub async fn load(&self, idents: &[TableIdent], deadline: Instant) -> Result<Loaded> {
        self.load_since(idents, 0, deadline).await
    }

    /// The same with pointers that are current now, for a statement that changes what it reads: on an older version it
    /// would conflict with what was done before it.
    pub async fn load_now(&self, idents: &[TableIdent], deadline: Instant) -> Result<Loaded> {
        let Some(first) = idents.first().filter(|_| !matches!(self.scope, Scope::Within(_))) else {
            return self.load_since(idents, 0, deadline).await;
        };
        let read = self.metadata.read_table(first, deadline).await;
        let now = read.map_err(|e| catalog_error("looking up tables", e))?.map_or(0, |pointer| pointer.valid_through);
        self.load_since(idents, now, deadline).await
    }

    async fn load_since(&self, idents: &[TableIdent], revision: u64, deadline: Instant) -> Result<Loaded> {
        if idents.is_empty() {
            return Ok(Loaded::default());
        }
        if let Scope::Within(staged) = &self.scope {
            return staged.load(self, idents, deadline).await;
        }
        if let Scope::Pinned(pins) = &self.scope {
            return self.load_pinned(pins, idents, deadline).await;
        }
        self.load_pointed(idents, revision, deadline).await
    }

    /// Loads the versions that were settled before. Names that were not are of no table of the query's, or lead to listings.
    async fn load_pinned(&self, pins: &Pins, idents: &[TableIdent], deadline: Instant) -> Result<Loaded> {
        let others: Vec<TableIdent> = idents.iter().filter(|ident| pins.table(ident).is_none()).cloned().collect();
        let mut others = match others.is_empty() {
            true => Vec::new(),
            false => self.load_pointed(&others, 0, deadline).await?.tables,
        }
        .into_iter();
        let mut tables = Vec::with_capacity(idents.len());
        for ident in idents {
            tables.push(match pins.table(ident) {
                Some(pin) => Some(pin.load(self, deadline).await?),
                None => others.next().flatten(),
            });
        }
        Ok(Loaded { tables, ..Loaded::default() })
    }

    /// Loads what pointers of one moment name. Where the metadata of one is gone, because newer versions have long replaced it, all
    /// are read anew, of one revision again: that table alone would be of a later moment than the others.
    async fn load_pointed(&self, idents: &[TableIdent], revision: u64, deadline: Instant) -> Result<Loaded> {
        let failed = |e| catalog_error("looking up tables", e);
        let resolved = self.metadata.tables(idents, Want::by(deadline).at_least(revision)).await.map_err(failed)?;
        let mut stale =
            resolved.iter().filter(|r| r.metasrv_away && !planted::has(Bug::AgeUntold)).map(|r| r.age).max();
        let mut age = resolved.iter().map(|r| r.age).max();
        let mut pointers: Vec<_> = resolved.iter().map(|resolved| resolved.pointer().cloned()).collect();
        for _ in 0..=REREADS {
            let loads = idents.iter().zip(&pointers).map(|(ident, pointer)| async move {
                let Some(pointer) = pointer else { return Ok::<_, Error>(Ok(None)) };
                Ok(self.load_at(ident, pointer, deadline).await?.map(Some))
            });
            let found: Vec<Result<Option<Table>, Gone>> = futures::future::try_join_all(loads).await?;
            if found.iter().all(Result::is_ok) {
                return Ok(Loaded { tables: found.into_iter().filter_map(Result::ok).collect(), stale, age });
            }
            let now = self.metadata.read_tables(idents, deadline).await.map_err(failed)?;
            for ((found, ident), (then, now)) in found.into_iter().zip(idents).zip(pointers.iter().zip(&now)) {
                if let (Err(gone), Some(then), Some(now)) = (found, then, now) {
                    gone.unless_replaced(ident, &then.value, &now.value)?;
                }
            }
            (stale, age) = (None, Some(Duration::ZERO));
            pointers = now;
        }
        let names: Vec<String> = idents.iter().map(ToString::to_string).collect();
        Err(too_fast(&names.join(", ")))
    }

    /// A view's pointer, as it is now or as it was settled before.
    ///
    /// # Errors
    /// The metadata's.
    pub async fn load_view(&self, view: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        if let Scope::Pinned(pins) = &self.scope
            && let Some(pinned) = pins.view(view)
        {
            return Ok(Some(pinned));
        }
        self.metadata.load_view(view, deadline).await.map_err(|e| catalog_error("looking up views", e))
    }

    /// All namespaces with their tables.
    pub async fn list(&self, deadline: Instant) -> Result<Vec<(Namespace, Vec<TableIdent>)>> {
        let failed = |e| catalog_error("listing namespaces and tables", e);
        let namespaces = self.metadata.list_namespaces(deadline).await.map_err(failed)?;
        futures::stream::iter(namespaces)
            .map(|namespace| async move {
                let names = match self.metadata.list_tables(&namespace, deadline).await {
                    Ok(names) => names,
                    // Dropped in between.
                    Err(CatalogError::NamespaceNotFound(_)) => Vec::new(),
                    Err(error) => return Err(failed(error)),
                };
                let idents = names.into_iter().map(|name| TableIdent::new(namespace.clone(), name));
                let idents = idents.collect::<Result<_, _>>().map_err(failed)?;
                Ok((namespace, idents))
            })
            .buffered(LISTINGS_IN_FLIGHT)
            .try_collect()
            .await
    }

    /// The views of all namespaces, by name.
    pub async fn list_views(&self, deadline: Instant) -> Result<Vec<TableIdent>> {
        let failed = |e| catalog_error("listing views", e);
        let namespaces = self.metadata.list_namespaces(deadline).await.map_err(failed)?;
        let lists = futures::stream::iter(namespaces).map(|namespace| async move {
            let names = match self.metadata.list_views(&namespace, deadline).await {
                Ok(names) => names,
                // Dropped in between.
                Err(CatalogError::NamespaceNotFound(_)) => Vec::new(),
                Err(error) => return Err(failed(error)),
            };
            let idents = names.into_iter().map(|name| TableIdent::new(namespace.clone(), name));
            idents.collect::<Result<Vec<_>, _>>().map_err(failed)
        });
        let listed: Vec<Vec<TableIdent>> = lists.buffered(LISTINGS_IN_FLIGHT).try_collect().await?;
        Ok(listed.concat())
    }

    /// Loads the version that `pointer` names. If its metadata is gone because newer versions have long replaced it,
    /// the pointer is read anew: the version may be a later one, and of another moment than other tables.
    pub(crate) async fn load_version(
        &self,
        ident: &TableIdent,
        pointer: Versioned<TablePointer>,
        deadline: Instant,
    ) -> Result<Option<Table>> {
        let mut pointer = pointer;
        for _ in 0..=REREADS {
            let gone = match self.load_at(ident, &pointer, deadline).await? {
                Ok(table) => return Ok(Some(table)),
                Err(gone) => gone,
            };
            let current = self.metadata.read_table(ident, deadline).await;
            match current.map_err(|e| catalog_error("looking up a table", e))? {
                None => return Ok(None),
                Some(current) => {
                    gone.unless_replaced(ident, &pointer.value, &current.value)?;
                    // Another may follow before it is read.
                    pointer = current;
                }
            }
        }
        Err(too_fast(&ident.to_string()))
    }

    /// Loads just the version that `pointer` names, if its metadata is there.
    async fn load_at(
        &self,
        ident: &TableIdent,
        pointer: &Versioned<TablePointer>,
        deadline: Instant,
    ) -> Result<Result<Table, Gone>> {
        let loading = |e: Error| e.while_doing(format_args!("loading table {ident}"));
        self.find_bucket(&pointer.value.metadata_location, deadline).await.map_err(loading)?;
        match self.cache.table(&pointer.value.metadata_location).await {
            Ok(metadata) => Ok(Ok(Table { ident: ident.clone(), pointer: pointer.clone(), metadata })),
            Err(error) if error.kind == Kind::NotFound => Ok(Err(Gone(error))),
            Err(error) => Err(loading(error)),
        }
    }

    /// A table that nothing points at yet, with these columns and, besides those of every new table, these properties.
    ///
    /// # Errors
    /// `Invalid` for a format version that is not written, and what cannot be laid out so.
    pub fn plan_create(
        &self,
        place: &Place,
        schema: &ArrowSchema,
        layout: &Layout,
        more: impl IntoIterator<Item = (String, String)>,
    ) -> Result<TableMetadata> {
        let schema = types::iceberg_schema(schema)?;
        let (spec, order) = (layout.spec(&schema)?, layout.order(&schema)?);
        let uuid = Uuid::new_v4();
        let mut properties = new_table_properties();
        properties.extend(more);
        let version = match properties.remove(FORMAT_VERSION).as_deref() {
            None | Some("2") => FormatVersion::V2,
            Some("3") => FormatVersion::V3,
            Some(other) => return Err(Error::invalid(format!("{FORMAT_VERSION} is {other:?}, and must be 2 or 3"))),
        };
        let built = TableMetadataBuilder::new(schema, spec, order, place.of(uuid), version, properties)?
            .assign_uuid(uuid)
            .build()?;
        sound::check(&built.metadata, None)?;
        Ok(built.metadata)
    }

    /// What a table becomes that is replaced by one with these columns, and the edit that makes it so. It keeps its uuid, its
    /// location, its properties (with `more`) and its history; columns have ids that none had before.
    pub fn plan_replace(
        &self,
        table: &Table,
        schema: &ArrowSchema,
        layout: &Layout,
        more: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(TableMetadata, Edit)> {
        let last_column_id = table.metadata.last_column_id();
        let schema = types::iceberg_schema_after(schema, last_column_id)?;
        let (spec, order) = (layout.spec(&schema)?, layout.order(&schema)?);
        let properties: HashMap<String, String> = more.into_iter().collect();
        if properties.contains_key(FORMAT_VERSION) {
            return Err(Error::invalid("a table that is replaced keeps its format version"));
        }
        let edit: Edit = Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
            if base.last_column_id() != last_column_id {
                return Err(Error::conflict("another writer has meanwhile added columns or replaced it; run it again"));
            }
            let mut builder = builder
                .set_properties(properties.clone())?
                .remove_ref(MAIN_BRANCH)
                .add_current_schema(schema.clone())?
                .add_default_partition_spec(spec.clone())?;
            if order != **base.default_sort_order() {
                builder = builder.add_sort_order(order.clone())?.set_default_sort_order(-1)?;
            }
            Ok(builder)
        });
        let metadata = edit(&table.metadata, table.metadata.as_ref().clone().into_builder(None))?.build()?.metadata;
        sound::check(&metadata, Some(&table.metadata))?;
        Ok((metadata, edit))
    }

    /// At which size a data file of a table ends.
    pub fn target_file_bytes(&self, metadata: &TableMetadata) -> usize {
        let asked =
            metadata.properties().get("write.target-file-size-bytes").and_then(|text| text.parse::<usize>().ok());
        asked.map_or(self.target_file_bytes, |asked| asked.min(self.target_file_bytes))
    }

    /// A writer of data files for a version of a table.
    pub fn data_writer(&self, metadata: &TableMetadata) -> Result<DataWriter> {
        DataWriter::new(self.storage.clone(), self.tasks.clone(), metadata, self.target_file_bytes(metadata))
    }

    /// Appends data files to a table, together with what else is appended to it at the same time unless the table says
    /// otherwise. Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// See [`commit`]; the error's kind and words say whether something was or may have been committed.
    pub async fn append(self: &Arc<Self>, table: &Table, files: DataFiles, deadline: Instant) -> Result<()> {
        // An operation's outcome is a part of its own commit, and a transaction makes its changes itself. What is merged is
        // settled with the pointer, which takes several keys.
        let merges = matches!(self.scope, Scope::Plain)
            && self.metadata.capabilities().multi_key
            && append::merges(&table.metadata);
        match (files.files.is_empty(), merges) {
            (true, _) => Ok(()),
            (false, true) => self.appends.append(self, table, files, deadline).await,
            (false, false) => self.change(table, Operation::Append, files, Removed::Nothing, None, deadline).await,
        }
    }

    /// Adds data files to a table and removes others, as one snapshot; `reads` is what the statement has read of the table.
    /// Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// As [`Tables::append`]; `Conflict` if another writer has done in between what the statement should have seen.
    pub async fn change(
        self: &Arc<Self>,
        table: &Table,
        operation: Operation,
        files: DataFiles,
        removed: Removed,
        reads: Option<Reads>,
        deadline: Instant,
    ) -> Result<()> {
        let (tables, table) = (self.clone(), table.clone());
        self.owned(async move {
            if let Scope::Within(staged) = &tables.scope {
                return staged.stage(&tables, &table, operation, files, removed, reads).await;
            }
            let io = LakeIo::new(tables.storage.clone());
            let mut change = version::write_files(&io, &table.metadata, operation, &files, removed).await?;
            change.notes.extend(tables.scope.notes());
            let proposal = Proposal::change(change, reads, &table.metadata);
            commit::commit(&tables, &table, proposal, files, deadline).await.map(drop)
        })
        .await
    }

    /// Changes a table's metadata besides its snapshots. Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// Those of the edit, and of a commit.
    pub async fn edit(self: &Arc<Self>, table: &Table, edit: Edit, deadline: Instant) -> Result<()> {
        let (tables, table) = (self.clone(), table.clone());
        self.owned(async move {
            let files = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
            commit::commit(&tables, &table, Proposal::edit(edit), files, deadline).await.map(drop)
        })
        .await
    }

    /// Creates a table from [`Tables::plan_create`]'s metadata, with data files or without. Runs to its end even if the
    /// caller goes away.
    ///
    /// # Errors
    /// `AlreadyExists`, `NotFound` (the namespace), and those of a commit.
    pub async fn create(
        self: &Arc<Self>,
        ident: &TableIdent,
        metadata: TableMetadata,
        files: Option<DataFiles>,
        deadline: Instant,
    ) -> Result<()> {
        let tables = self.clone();
        let ident = ident.clone();
        let files = files.unwrap_or_else(|| DataFiles::new(self.storage.clone(), self.tasks.clone()));
        self.owned(async move { commit::create(&tables, &ident, metadata, files, deadline).await }).await
    }

    /// Replaces a table as [`Tables::plan_replace`] has planned it, with data files or without; `reads` is what of the table the
    /// new rows come from. Runs to its end even if the caller goes away.
    ///
    /// # Errors
    /// Those of a commit; `Conflict` if another writer has done in between what the statement should have seen.
    pub async fn replace(
        self: &Arc<Self>,
        table: &Table,
        metadata: TableMetadata,
        edit: Edit,
        files: Option<DataFiles>,
        reads: Option<Reads>,
        deadline: Instant,
    ) -> Result<()> {
        let (tables, table) = (self.clone(), table.clone());
        let files = files.unwrap_or_else(|| DataFiles::new(self.storage.clone(), self.tasks.clone()));
        self.owned(async move {
            let mut proposal = Proposal { reads, ..Proposal::edit(edit) };
            if !files.files.is_empty() {
                let io = LakeIo::new(tables.storage.clone());
                let operation = Operation::Append;
                let mut change =
                    version::write_change(&io, &metadata, operation, &files.files, Removed::Nothing).await?;
                change.notes.extend(tables.scope.notes());
                proposal.change = Some(change);
            }
            commit::commit(&tables, &table, proposal, files, deadline).await.map(drop)
        })
        .await
    }

    /// Drops a table. Its objects stay where they are; with `purge` the metadata cluster's leader, or without one the janitor, has them
    /// deleted after a while.
    ///
    /// # Errors
    /// `NotFound`; those of a commit.
    pub async fn drop_table(self: &Arc<Self>, ident: &TableIdent, purge: bool, deadline: Instant) -> Result<()> {
        let tables = self.clone();
        let ident = ident.clone();
        self.owned(async move { commit::drop_table(&tables, &ident, purge, deadline).await }).await
    }

    /// Whether what was to be dropped, and is gone, was dropped so, where our own attempt may have done it or another: with `purge` its
    /// files are to be deleted as well.
    ///
    /// # Errors
    /// `NotFound`: it was another's drop, and they stay; `Unknown`: nobody could say.
    pub(crate) async fn check_dropped(
        &self,
        ident: &TableIdent,
        uuid: Uuid,
        purge: bool,
        deadline: Instant,
    ) -> Result<()> {
        if !purge {
            return Ok(());
        }
        let (purges, _) = self.metadata.procedures_of(&ids_of(uuid), deadline).await.map_err(|e| {
            Error::unknown(format!(
                "dropping table {ident}: it is dropped, and whether its files will be deleted is unknown: {e}; \
                 system.procedures lists that"
            ))
        })?;
        match purges.iter().any(|purge| purge.record.state != State::Cancelled) {
            true => Ok(()),
            // The drop that may have been ours could not submit it.
            false if !self.metadata.capabilities().multi_key => Err(Error::unknown(format!(
                "dropping table {ident}: it is gone, by this statement or another's, and its files stay"
            ))),
            false => Err(Error::not_found(format!(
                "table {ident} was dropped by somebody else meanwhile, without a purge: its files stay"
            ))),
        }
    }

    /// Refuses to make a table of metadata that is being purged. What it is made with is to carry the guards that are returned, so
    /// that no purge begins meanwhile; there are none where one key is changed at a time, and there the retention has to be longer than
    /// whoever makes it may take.
    ///
    /// # Errors
    /// `Conflict`; `Unavailable` if that cannot be found out.
    pub(crate) async fn check_not_purged(&self, uuid: Uuid, deadline: Instant) -> Result<Vec<Compare>> {
        let purges = self.metadata.procedures_of(&ids_of(uuid), deadline).await;
        let (purges, unchanged) =
            purges.map_err(|e| Error::unavailable(format!("looking for a purge of the table: {e}")))?;
        match purges.into_iter().find(|purge| !purge.record.state.is_ended()) {
            None if !self.metadata.capabilities().multi_key => Ok(Vec::new()),
            None => Ok(vec![unchanged]),
            Some(purge) => Err(Error::conflict(format!(
                "the table was dropped with PURGE, and its files are to be deleted by procedure {id}: while that has not begun, UNDROP \
                 TABLE has it back, and in a metadata cluster `lake meta proc cancel {id}` keeps them",
                id = purge.id
            ))),
        }
    }

    /// Runs `work` in a task that shutdown waits for and that nobody cancels.
    pub(crate) async fn owned<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let task = self.tasks.spawn(work);
        task.await.unwrap_or_else(|e| {
            Err(Error::unknown(format!("a commit ended unexpectedly ({e}); whether anything was committed is unknown")))
        })
    }

    /// Waits for commits under way; afterwards none begins, and nothing is renewed any more.
    pub async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.storage.close().await;
        self.metadata.close().await;
    }
}

/// The metadata that a pointer names is not there.
struct Gone(Error);

impl Gone {
    /// # Errors
    /// `Corrupt`: the table still points at it.
    fn unless_replaced(self, ident: &TableIdent, then: &TablePointer, now: &TablePointer) -> Result<()> {
        match then == now {
            true => Err(Error::corrupt(self.0.message).while_doing(format_args!("loading table {ident}"))),
            false => Ok(()),
        }
    }
}

/// Each time the metadata was gone before it was read.
fn too_fast(tables: &str) -> Error {
    Error::conflict(format!(
        "loading {tables}: newer versions replaced what was to be read {REREADS} times in a row; run it again, or let the table property \
         write.metadata.previous-versions-max keep more of them"
    ))
}

impl Table {
    /// The Arrow schema of the current columns.
    pub fn arrow_schema(&self) -> Result<SchemaRef> {
        types::arrow_schema(self.metadata.current_schema())
            .map_err(|e| e.while_doing(format_args!("table {}", self.ident)))
    }

    /// # Errors
    /// `NotSupported`, naming what about the table lake cannot write yet.
    pub fn check_writable(&self) -> Result<()> {
        check_writable(&self.ident, &self.metadata)
    }
}

/// The properties that a new table has unless whoever creates it says otherwise.
pub(crate) fn new_table_properties() -> HashMap<String, String> {
    HashMap::from([
        ("write.parquet.compression-codec".to_owned(), "zstd".to_owned()),
        ("write.metadata.delete-after-commit.enabled".to_owned(), "true".to_owned()),
        ("write.metadata.previous-versions-max".to_owned(), PREVIOUS_VERSIONS.to_owned()),
    ])
}

fn check_writable(ident: &TableIdent, metadata: &TableMetadata) -> Result<()> {
    let refused = |what: String| Err(Error::not_supported(format!("table {ident} cannot be written yet: {what}")));
    if metadata.format_version() < FormatVersion::V2 {
        return refused(format!(
            "it has format version 1, and 2 and 3 are written; ALTER TABLE ... SET TBLPROPERTIES ('{FORMAT_VERSION}' = '2') upgrades it, \
             for good"
        ));
    }
    let fields = metadata.current_schema().as_struct().fields();
    if let Some(odd) =
        fields.iter().find(|field| matches!(&field.write_default, Some(l) if !matches!(l, Literal::Primitive(_))))
    {
        return refused(format!("the default of column {} is nested", odd.name));
    }
    if let Some(why) = layout::unsupported(metadata) {
        return refused(why);
    }
    if metadata.properties().contains_key("encryption.key-id") {
        return refused("it is encrypted".into());
    }
    Ok(())
}

/// A catalog error outside a commit, where nothing was to be changed or the change is all there is.
pub(crate) fn catalog_error(doing: &str, error: CatalogError) -> Error {
    let unknown = error.applied() == Applied::Unknown;
    match &error {
        CatalogError::InvalidName { .. } => Error::invalid(error),
        CatalogError::NamespaceNotFound(_) | CatalogError::TableNotFound(_) | CatalogError::ViewNotFound(_) => {
            Error::not_found(error)
        }
        CatalogError::NamespaceExists(_)
        | CatalogError::TableExists(_)
        | CatalogError::ViewExists(_)
        | CatalogError::Registered(_) => Error::already_exists(error),
        CatalogError::Fenced { .. } if unknown => Error::unknown(error),
        CatalogError::ScopeHeld { .. } | CatalogError::AlreadyDone(_) | CatalogError::Fenced { .. } => {
            Error::conflict(error)
        }
        CatalogError::NamespaceNotEmpty(_) | CatalogError::IsWarehouse(_) => Error::invalid(error),
        CatalogError::Conflict { .. } | CatalogError::NotYourTurn { .. } if unknown => Error::unknown(error),
        CatalogError::Conflict { .. } | CatalogError::NotYourTurn { .. } => Error::conflict(error),
        CatalogError::InDoubt { .. } => Error::unknown(format!("{doing}: {error}")),
        CatalogError::Damaged { .. } => Error::corrupt(error),
        CatalogError::Behind { .. } | CatalogError::TooOld { .. } => Error::unavailable(format!("{doing}: {error}")),
        CatalogError::Store(_) if unknown => {
            Error::unknown(format!("{doing}: {error}; whether it was done is unknown: look before doing it again"))
        }
        CatalogError::Store(store) if store.is_unavailable() => {
            let words = unreachable_words(&error);
            // The cache of pointers says what it was doing in the same words.
            let told = words.strip_prefix(doing).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&words);
            Error::unavailable(format!("{doing}: {told}; nothing was committed"))
        }
        CatalogError::Store(_) => Error::internal(format!("{doing}: {error}; nothing was committed")),
    }
}

/// What a store says about being unreachable, beginning with those words.
pub(crate) fn unreachable_words(error: &CatalogError) -> String {
    let text = error.to_string();
    match text.contains("the metadata cluster is unreachable") {
        true => text,
        false => format!("the metadata cluster is unreachable: {text}"),
    }
}

/// Creates a namespace unless it is there.
pub(crate) async fn ensure_namespace(writer: &MetadataWriter, namespace: &Namespace, deadline: Instant) -> Result<()> {
    match writer.create_namespace(namespace, Default::default(), deadline).await {
        Ok(()) | Err(CatalogError::NamespaceExists(_)) => Ok(()),
        Err(e) => Err(catalog_error(&format!("creating namespace {namespace}"), e)),
    }
}
