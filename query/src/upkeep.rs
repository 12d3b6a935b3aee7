//! Upkeep: what is done to tables from time to time by whoever has them (docs/src/placement.md).
//!
//! ```text
//!   every interval: all tables --- those that this process has ---> those whose properties ask for it ---> one statement each
//!                                   by its shards, or as the janitor                                       `-- guarded
//! ```
//! What a table may ask for: [`COMPACT`] = `true` has its small files rewritten (`CALL system.rewrite_data_files`),
//! [`EXPIRE`](crate::table::expiry::EXPIRE) = `true` has its snapshots expire (`CALL system.expire_snapshots`), also if nobody appends to it, and
//! [`REMOVE_ORPHANS`] = `true` has files removed once a day that nothing refers to (`CALL system.remove_orphan_files`).
//!
//! What a process may be given soon ([`Claim::follows`]) is in its cache by then.
//!
//! Invariants:
//! - every commit carries the guard of the claim under which it was begun ([`Claim::guard`]): what is another's by then is not changed. A sweep for
//!   orphans commits nothing: it looks at the guard before each few files;
//! - a snapshot that a worker makes says under which fence: [`FENCE_NOTE`], [`SHARD_NOTE`] and [`WORKER_NOTE`] in its summary, from the
//!   very fence that its commit carries. So along a table's line fences never fall, and each is of one worker;
//! - a worker's log says the same of what makes no snapshot ([`WorkerChore`], at the level `debug`): what was changed under a fence was sent
//!   before anything is begun under a later one;
//! - a statement is begun only while the claim is certainly held by this process's clock, and is given up when that ends.
//!
//! A table whose name means another one in SQL, as that of a namespace with a point in a level does, is left alone.
//!
//! Limits: one statement at a time, of at most [`STATEMENT`]; a pause behind each table whose metadata had to be read
//! ([`pause_after`]), also to follow it, so that a look through many that have changed does not take a processor from who waits for an
//! answer; a table that failed is left alone for [`FAILED_PAUSE`], and at most [`MAX_REMEMBERED`] of those are remembered. Failure cases: what fails is logged, and tried again in a later round.

pub(crate) mod works;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::cache::Want;
use lake_client::catalog::{Namespace, TableIdent, TablePointer, Versioned};
use lake_client::metadata::Metadata;
use lake_client::remote::node::Tenures;
use lake_client::shards::{Fence, WorkerChore};
use lake_proto::kv::Compare;
use uuid::Uuid;

use self::works::Works;
use crate::chores::moves::Moves;
use crate::error::{Kind as ErrorKind, Result};
use crate::planted::{self, Bug};
use crate::sql::Engine;
use crate::sql::bound::Bound;
use crate::table::expiry;
use crate::table::{Table, Tables, catalog_error};

/// The table property that has small files rewritten.
pub const COMPACT: &str = "lake.compaction.enabled";
/// The table property that has files removed that nothing refers to.
pub const REMOVE_ORPHANS: &str = "lake.remove-orphan-files.enabled";
/// Where the summary of a worker's snapshot says the revision of the route that its commit was guarded by ...
pub const FENCE_NOTE: &str = "lake.fence";
/// ... of which shard that is the route ...
pub const SHARD_NOTE: &str = "lake.shard";
/// ... and which node the worker is.
pub const WORKER_NOTE: &str = "lake.worker";
/// The procedure, in SQL's sense, that does so.
const SWEEP: &str = "remove_orphan_files";
/// From one look for such files of a table to the next one. It lists all there is in the table's location.
const SWEEP_EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// From one round to the next, unless told otherwise.
pub const INTERVAL: Duration = Duration::from_secs(30);
/// How long one statement may take.
const STATEMENT: Duration = Duration::from_secs(600);
/// How long looking through the tables may take.
const LOOK: Duration = Duration::from_secs(60);
/// Tables whose pointers are looked up at once.
const AT_ONCE: usize = 256;
/// Loading a table that took less than this took nothing but what is cached.
const LOADED: Duration = Duration::from_micros(500);
/// How many times as long as loading a table took nothing is done after it ...
const GIVES_WAY: u32 = 3;
/// ... and at most. What takes longer waits for a store, and not for a processor.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// How long a table is left alone whose upkeep failed.
const FAILED_PAUSE: Duration = Duration::from_secs(300);
/// Tables that are remembered because their upkeep failed, or found nothing to do.
const MAX_REMEMBERED: usize = 100_000;

/// What every commit of a statement carries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Guard {
    /// They hold when it is made, or it is not.
    pub compares: Vec<Compare>,
    /// What the summary of its snapshot says of that, by property.
    pub notes: BTreeMap<&'static str, String>,
}

impl From<Vec<Compare>> for Guard {
    fn from(compares: Vec<Compare>) -> Self {
        Self { compares, notes: BTreeMap::new() }
    }
}

/// What a process may do the upkeep of.
#[async_trait]
pub trait Claim: Send + Sync {
    /// What every commit for a table carries, if the table is certainly this process's now.
    fn guard(&self, table: Uuid) -> Option<Guard>;

    /// Whether the table may come to this process soon: it is made ready for that.
    fn follows(&self, _: Uuid) -> bool {
        false
    }

    /// Whether there is anything at all.
    fn is_any(&self) -> bool;

    /// Waits until the table is not certainly this process's any more. Cancel-safe.
    async fn lost(&self, table: Uuid);

    /// Something is about to be done to this table, if it is this process's then.
    fn begins(&self, _: Uuid) {}

    /// It has ended. Said once for each begin.
    fn ended(&self, _: Uuid) {}

    /// What is known by now of a chore under a worker's guard: said when it begins, whenever the guard has held, and before [`Claim::ended`].
    fn says(&self, _: &WorkerChore) {}
}

/// A worker's: the tables of the shards that it leads.
#[derive(Debug)]
pub struct Worker {
    pub node: String,
    pub tenures: Tenures,
    pub metadata: Metadata,
    pub moves: Arc<Moves>,
}

/// How often a worker looks whether a shard was given to another while its tables are worked on.
const SHARD_LOOK: Duration = Duration::from_millis(200);

impl Worker {
    fn fence(&self, table: Uuid) -> Option<Fence> {
        let tenure = self.tenures.now()?;
        let shards = self.metadata.shards()?;
        let shard = shards.routes.shard(table)?;
        let fenced = shards.routes.routes.get(&shard)?;
        let fence = self.moves.fence(&self.node, tenure.lease, shard, fenced);
        if planted::has(Bug::UpkeepUnfenced) { once_held(shard, fence) } else { fence }
    }
}

/// A bug that is planted: what this process has held once is its own for ever.
fn once_held(shard: u32, now: Option<Fence>) -> Option<Fence> {
    static HELD: Mutex<BTreeMap<u32, Fence>> = Mutex::new(BTreeMap::new());
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    match now {
        Some(fence) => Some(*held.entry(shard).or_insert(fence)),
        None => held.get(&shard).copied(),
    }
}

#[async_trait]
impl Claim for Worker {
    fn guard(&self, table: Uuid) -> Option<Guard> {
        let fence = self.fence(table)?;
        let notes = [
            (FENCE_NOTE, fence.revision.to_string()),
            (SHARD_NOTE, fence.shard.to_string()),
            (WORKER_NOTE, self.node.clone()),
        ];
        let compares = if planted::has(Bug::UpkeepUnfenced) { Vec::new() } else { fence.compares() };
        Some(Guard { compares, notes: notes.into() })
    }

    fn follows(&self, table: Uuid) -> bool {
        let shards = self.metadata.shards().filter(|_| self.tenures.now().is_some());
        shards.is_some_and(|shards| {
            shards.routes.of(table).is_some_and(|fenced| fenced.route.followers.contains(&self.node))
        })
    }

    fn is_any(&self) -> bool {
        let Some((tenure, shards)) = self.tenures.now().zip(self.metadata.shards()) else { return false };
        let routes = &shards.routes;
        routes.held_by(&self.node, tenure.lease).next().is_some()
            || routes.routes.values().any(|fenced| fenced.route.followers.contains(&self.node))
    }

    async fn lost(&self, table: Uuid) {
        while let Some(fence) = self.fence(table) {
            tokio::select! {
                () = self.tenures.over(fence.lease) => {}
                () = tokio::time::sleep(SHARD_LOOK) => {}
            }
        }
    }

    fn begins(&self, table: Uuid) {
        self.moves.begins(table);
    }

    fn ended(&self, table: Uuid) {
        self.moves.ended(table);
    }

    fn says(&self, chore: &WorkerChore) {
        tracing::debug!("{}", chore.to_line());
    }
}

/// A kind of upkeep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Expire,
    Compact,
    Sweep,
}

impl Kind {
    /// In SQL's sense.
    fn procedure(self) -> &'static str {
        match self {
            Kind::Expire => "expire_snapshots",
            Kind::Compact => "rewrite_data_files",
            Kind::Sweep => SWEEP,
        }
    }

    fn statement(self, table: &TableIdent) -> String {
        statement(self.procedure(), table)
    }
}

/// The CALL of a procedure, in SQL's sense, for a table, that does what it says.
pub(crate) fn statement(procedure: &str, table: &TableIdent) -> String {
    let part = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let name = format!("{}.{}", part(&table.namespace.to_string()), part(&table.name));
    // By itself it only counts what it would remove.
    let really = if procedure == SWEEP { ", dry_run => false" } else { "" };
    format!("CALL system.{procedure}(table => '{}'{really})", name.replace('\'', "''"))
}

/// Whether SQL means this table by its name: a schema with a point in the name of a level is another's name there, and what is done
/// would be done to that one's table.
pub(crate) fn can_be_named(table: &TableIdent) -> bool {
    table.namespace.to_string().parse::<Namespace>().is_ok_and(|meant| meant == table.namespace)
}

/// Loads a table, and then does nothing for a while if more than the cache was needed.
async fn giving_way<T>(load: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let loaded = load.await;
    if let Some(pause) = pause_after(began.elapsed()) {
        tokio::time::sleep(pause).await;
    }
    loaded
}

/// How long nothing is done after a table was loaded in this time.
fn pause_after(took: Duration) -> Option<Duration> {
    (took >= LOADED).then(|| took.saturating_mul(GIVES_WAY).min(LONGEST_PAUSE))
}

/// What a table asks for.
fn asks_for(table: &Table) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if expiry::is_due(&table.metadata) {
        kinds.push(Kind::Expire);
    }
    let asks =
        |property| table.metadata.properties().get(property).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if asks(COMPACT) && table.metadata.current_snapshot_id().is_some() {
        kinds.push(Kind::Compact);
    }
    if asks(REMOVE_ORPHANS) {
        kinds.push(Kind::Sweep);
    }
    kinds
}

/// What a round has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Round {
    /// Tables that are this process's.
    pub tables: usize,
    /// Statements that changed something.
    pub changed: usize,
    /// Statements that failed.
    pub failed: usize,
    /// Tables that may come to this process soon, and whose metadata is in its cache now.
    pub warmed: usize,
    /// Dropped tables whose files are gone by now: a janitor's.
    pub purged: usize,
}

/// The versions of tables in which compaction found nothing to do: it finds nothing again.
#[derive(Debug, Default)]
struct Settled(HashMap<Uuid, String>);

impl Settled {
    fn is_settled(&self, table: Uuid, version: &str) -> bool {
        self.0.get(&table).is_some_and(|settled| settled == version)
    }

    fn note(&mut self, table: Uuid, version: &str) {
        if self.0.len() < MAX_REMEMBERED || self.0.contains_key(&table) {
            self.0.insert(table, version.to_owned());
        }
    }

    /// Only these tables are there.
    fn keep(&mut self, tables: &HashSet<Uuid>) {
        self.0.retain(|table, _| tables.contains(table));
    }
}

/// The upkeep of one process.
pub struct Upkeep {
    engine: Arc<Engine>,
    claim: Arc<dyn Claim>,
    /// Until when a table is left alone.
    failed: HashMap<Uuid, Instant>,
    compact: Settled,
    /// Until when a table is not swept again.
    swept: HashMap<Uuid, Instant>,
    /// This round has swept a table, or tried to.
    sweeping: bool,
}

impl std::fmt::Debug for Upkeep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upkeep").field("failed", &self.failed.len()).finish_non_exhaustive()
    }
}

impl Upkeep {
    /// Nothing has been looked at yet.
    pub fn new(engine: Arc<Engine>, claim: Arc<dyn Claim>) -> Self {
        Self {
            engine,
            claim,
            failed: HashMap::new(),
            compact: Settled::default(),
            swept: HashMap::new(),
            sweeping: false,
        }
    }

    /// Goes on until it is dropped.
    pub async fn run(mut self, interval: Duration) -> Infallible {
        // Nodes that were started together do not look together.
        let mut pause = interval.mul_f64(rand::random_range(0.1..1.0));
        loop {
            tokio::time::sleep(pause).await;
            pause = interval;
            if !self.claim.is_any() {
                continue;
            }
            match self.round().await {
                Ok(round) if round.changed + round.failed > 0 => tracing::info!(?round, "upkeep"),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "tables could not be looked through for upkeep"),
            }
        }
    }

    /// Looks through all tables once, and does what is due.
    ///
    /// # Errors
    /// The tables cannot be listed. What fails of one table is counted.
    pub async fn round(&mut self) -> Result<Round> {
        let deadline = Instant::now() + LOOK;
        let tables = self.engine.tables().clone();
        let listed = tables.list(deadline).await?;
        let idents: Vec<TableIdent> = listed.into_iter().flat_map(|(_, tables)| tables).collect();
        let mut round = Round::default();
        let mut there = HashSet::new();
        self.failed.retain(|_, until| Instant::now() < *until);
        self.swept.retain(|_, until| Instant::now() < *until);
        self.sweeping = false;
        for some in idents.chunks(AT_ONCE) {
            let pointers = tables.metadata.tables(some, Want::by(Instant::now() + LOOK)).await;
            let pointers = pointers.map_err(|e| catalog_error("looking up tables", e))?;
            for (ident, resolved) in some.iter().zip(pointers).filter(|(ident, _)| can_be_named(ident)) {
                let Some(pointer) = resolved.pointer() else { continue };
                let uuid = pointer.value.uuid;
                there.insert(uuid);
                if self.claim.guard(uuid).is_none() {
                    if self.claim.follows(uuid) {
                        round.warmed += usize::from(giving_way(warm(&tables, ident, pointer)).await);
                    }
                    continue;
                }
                if self.failed.contains_key(&uuid) {
                    continue;
                }
                round.tables += 1;
                let loaded = giving_way(tables.load_version(ident, pointer.clone(), Instant::now() + LOOK)).await;
                let done = match loaded {
                    Ok(Some(table)) => self.look_after(&table, &mut round).await,
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                };
                if let Err(error) = done {
                    // Another writer was faster, or the shard was given away: nothing is wrong with the table.
                    if error.kind == ErrorKind::Conflict {
                        tracing::debug!(table = %ident, %error, "upkeep lost a race");
                        continue;
                    }
                    tracing::warn!(table = %ident, %error, "upkeep failed; it is tried again later");
                    round.failed += 1;
                    if self.failed.len() < MAX_REMEMBERED {
                        self.failed.insert(uuid, Instant::now() + FAILED_PAUSE);
                    }
                }
            }
        }
        self.compact.keep(&there);
        Ok(round)
    }

    async fn look_after(&mut self, table: &Table, round: &mut Round) -> Result<()> {
        let uuid = table.pointer.value.uuid;
        let version = &table.pointer.value.metadata_location;
        for kind in asks_for(table) {
            let is_done = match kind {
                Kind::Expire => false,
                Kind::Compact => self.compact.is_settled(uuid, version),
                // Each reads the metadata of all other tables: the rest of the upkeep has its turn in between.
                Kind::Sweep => self.sweeping || self.swept.contains_key(&uuid),
            };
            if is_done {
                continue;
            }
            // Said before the guard is looked at: whoever ends the claim meanwhile finds this, or nothing is begun.
            let works = Works::on(&self.claim, uuid);
            let Some(guard) = self.claim.guard(uuid) else { return Ok(()) };
            works.begun(&guard, &table.ident, kind.procedure());
            self.sweeping |= kind == Kind::Sweep;
            let guarded = self.engine.tables().under(guard, works);
            let statement = Bound::from(kind.statement(&table.ident).as_str());
            let work = async {
                let planned = self.engine.plan_in(&statement, Some(STATEMENT), &guarded).await?;
                self.engine.change(planned).await
            };
            let count = tokio::select! {
                done = work => done?,
                () = self.claim.lost(uuid) => {
                    tracing::info!(table = %table.ident, "upkeep was given up: the table is another's by now");
                    return Ok(());
                }
            };
            // More tables than are remembered are swept with each round.
            if kind == Kind::Sweep && self.swept.len() < MAX_REMEMBERED {
                self.swept.insert(uuid, Instant::now() + SWEEP_EVERY);
            }
            if count > 0 {
                round.changed += 1;
            } else if kind == Kind::Compact {
                self.compact.note(uuid, version);
            }
        }
        Ok(())
    }
}

/// Has the cache hold what the upkeep of a shard's tables begins with, until `deadline` and of `most` of them at most. Says of how many.
///
/// # Errors
/// The tables cannot be listed, or not in time.
pub(crate) async fn warm_shard(tables: &Tables, shard: u32, most: usize, deadline: Instant) -> Result<usize> {
    let listed = tables.list(deadline).await?;
    let idents: Vec<TableIdent> = listed.into_iter().flat_map(|(_, tables)| tables).collect();
    let mut warmed = 0;
    for some in idents.chunks(AT_ONCE) {
        let pointers = tables.metadata.tables(some, Want::by(deadline)).await;
        let pointers = pointers.map_err(|e| catalog_error("looking up tables", e))?;
        let routes = tables.metadata.shards();
        let is_its = |table| routes.as_ref().and_then(|shards| shards.routes.shard(table)) == Some(shard);
        let found = some.iter().zip(&pointers).filter_map(|(ident, resolved)| Some((ident, resolved.pointer()?)));
        let found: Vec<_> = found.filter(|(_, pointer)| is_its(pointer.value.uuid)).collect();
        for (ident, pointer) in found {
            let reads = tokio::time::timeout_at(deadline.into(), giving_way(warm(tables, ident, pointer)));
            let Ok(is_warm) = reads.await else { return Ok(warmed) };
            warmed += usize::from(is_warm);
            if warmed == most {
                return Ok(warmed);
            }
        }
    }
    Ok(warmed)
}

/// Has the cache hold what its upkeep begins with. What fails is found again by whoever needs it.
async fn warm(tables: &Tables, ident: &TableIdent, pointer: &Versioned<TablePointer>) -> bool {
    let loaded = tables.load_version(ident, pointer.clone(), Instant::now() + LOOK).await;
    let Ok(Some(table)) = loaded else { return false };
    match table.metadata.current_snapshot() {
        Some(snapshot) => tables.cache.manifest_list(&table.metadata, snapshot).await.is_ok(),
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_of_tables_goes_with_them() {
        let mut settled = Settled::default();
        let [first, last] = [0, MAX_REMEMBERED as u128].map(Uuid::from_u128);
        (0..=MAX_REMEMBERED as u128).for_each(|table| settled.note(Uuid::from_u128(table), "1"));
        assert!(settled.is_settled(first, "1") && !settled.is_settled(last, "1"), "there is a bound");
        settled.note(first, "2");
        assert!(settled.is_settled(first, "2") && !settled.is_settled(first, "1"));
        settled.keep(&HashSet::from([first]));
        settled.note(last, "1");
        assert!(settled.is_settled(first, "2") && settled.is_settled(last, "1"));
    }

    #[test]
    fn a_look_through_many_tables_leaves_most_of_a_processor_to_others() {
        assert_eq!(pause_after(LOADED / 2), None, "nothing was read");
        let took = Duration::from_millis(2);
        assert_eq!(pause_after(took), Some(took * 3));
        assert_eq!(pause_after(Duration::MAX), Some(LONGEST_PAUSE));
    }

    #[test]
    fn a_statement_names_its_table_whatever_that_is_called() {
        let plain = TableIdent::new("sales".parse().unwrap(), "orders").unwrap();
        let call = "CALL system.expire_snapshots(table => '\"sales\".\"orders\"')";
        assert_eq!(Kind::Expire.statement(&plain), call);
        let pointed = TableIdent::new(Namespace::new(["a.b"]).unwrap(), "t").unwrap();
        let nested = TableIdent::new("a.b".parse().unwrap(), "t").unwrap();
        assert!(can_be_named(&plain) && can_be_named(&nested) && !can_be_named(&pointed));
        let call = "CALL system.remove_orphan_files(table => '\"sales\".\"orders\"', dry_run => false)";
        assert_eq!(Kind::Sweep.statement(&plain), call);
        let odd = TableIdent::new("a.b".parse().unwrap(), "it's \"X\"").unwrap();
        let call = "CALL system.rewrite_data_files(table => '\"a.b\".\"it''s \"\"X\"\"\"')";
        assert_eq!(Kind::Compact.statement(&odd), call);
    }
}
