//! The cache against a reference, under interleavings that a seed decides.
//!
//! The store here keeps the whole history of every table, and answers when the schedule says so: a question is read at one
//! step and answered at a later one, or fails, or hangs; the watch tells late, is cut, or has lost what was asked for. Time is
//! the paused clock's. Some schedules have peers that lag: they answer from the past and ignore what revision was asked
//! for, which no linearizable read does.
//!
//! Of every answer of the cache it is known from the history what it may be:
//! - true: the state is the one at the revision that it claims to be valid through, and it was current at the age reported;
//! - not backwards: not older than what any call showed, or this node committed, that ended before this one began;
//! - fresh: current when the call began, or at most the bound before (unless metasrv is away, or a peer lagged);
//! - not of before a doubt (`invalidate`) that was there when the call began (unless metasrv is away, or a peer lagged);
//! - of one moment, several at once (unless metasrv is away);
//! - not earlier than the revision asked for, nor than one that was waited for before it began.
//!
//! At the end everything heals, and the cache has to show what is.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use lake_proto::kv::{KeyValue, Revision, Txn};
use lake_proto::watch::{Change, Changes, Event};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::{CacheConfig, PointerCache, Resolved, Want};
use crate::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use crate::clock;
use crate::store::{Applied, Capabilities, ChangeStream, Committed, Error, Leader, MetaStore, Page, Read, ReadOptions};

const TABLES: usize = 4;
const STEPS: u32 = 300;
const CONFIG: CacheConfig = CacheConfig {
    max_tables: 100,
    refresh_after: Duration::from_millis(500),
    fresh_for: Duration::from_secs(1),
    absent_for: Duration::from_millis(200),
    keep_for: Duration::from_secs(3600),
    away_patience: Duration::from_secs(2),
    stale_limit: Duration::from_secs(5),
};

/// A change of one table; its revision is its place, from 1 on.
#[derive(Debug, Clone)]
struct Past {
    table: usize,
    at: Instant,
    pointer: Option<TablePointer>,
}

/// What the store is asked and has not answered.
enum Asked {
    Read { keys: Vec<String>, read: Option<Read<Vec<KeyValue>>>, answer: oneshot::Sender<Answer<Read<Vec<KeyValue>>>> },
    Commit { table: usize, drop: bool, done: Option<Versioned<Option<TablePointer>>>, answer: CommitAnswer },
    Watch { from: Revision, answer: oneshot::Sender<Answer<ChangeStream>> },
}

type Answer<T> = Result<T, Error>;
type CommitAnswer = oneshot::Sender<Answer<Versioned<Option<TablePointer>>>>;

/// The answer of one call of the cache, and what was so when it began.
struct Ended {
    tables: Vec<usize>,
    began: Instant,
    ended: Instant,
    min_revision: Revision,
    /// What had been waited for.
    awaited: Revision,
    /// By table: what had been shown.
    shown: [Revision; TABLES],
    /// By table: when it had last been doubted.
    doubted: [Option<Instant>; TABLES],
    outcome: Result<Vec<Resolved>, CatalogError>,
}

#[derive(Default)]
struct World {
    history: Vec<Past>,
    asked: Vec<Asked>,
    watching: Option<(Revision, mpsc::UnboundedSender<Answer<Changes>>)>,
    ended: Vec<Ended>,
    /// By table: the revision of the latest state that was shown or committed here.
    shown: [Revision; TABLES],
    /// By table: when it was last doubted.
    doubted: [Option<Instant>; TABLES],
    /// The latest revision up to which somebody has waited for changes, and not in vain.
    awaited: Revision,
    calls: usize,
}

impl World {
    fn revision(&self) -> Revision {
        self.history.len() as Revision
    }

    /// The table's state at a revision: since when it has been so, and what it is.
    fn state(&self, table: usize, revision: Revision) -> (Revision, Option<&TablePointer>) {
        let past = self.history[..revision as usize].iter().enumerate().rev().find(|(_, past)| past.table == table);
        past.map_or((0, None), |(at, past)| (at as Revision + 1, past.pointer.as_ref()))
    }

    /// When the state that has been so since this revision ended.
    fn next(&self, table: usize, since: Revision) -> Option<(Revision, Instant)> {
        let later = self.history.iter().enumerate().skip(since as usize).find(|(_, past)| past.table == table);
        later.map(|(at, past)| (at as Revision + 1, past.at))
    }

    fn entry(&self, table: usize, revision: Revision) -> Option<KeyValue> {
        let (since, pointer) = self.state(table, revision);
        let value = serde_json::to_vec(pointer?).unwrap().into();
        let key = ident(table).key();
        Some(KeyValue { key, value, version: 1, create_revision: since, mod_revision: since, lease: None })
    }

    fn change(&mut self, table: usize, drop: bool) -> Versioned<Option<TablePointer>> {
        let revision = self.revision() + 1;
        let there = self.state(table, revision - 1).1.is_some();
        let pointer = (!drop || !there).then(|| TablePointer {
            uuid: Uuid::from_u128(table as u128),
            metadata_location: revision.to_string(),
            previous_location: None,
        });
        self.history.push(Past { table, at: clock::now(), pointer: pointer.clone() });
        Versioned { value: pointer, mod_revision: revision, valid_through: revision }
    }

    fn read(&self, keys: &[String], revision: Revision) -> Read<Vec<KeyValue>> {
        let tables = (0..TABLES).filter(|table| keys.contains(&ident(*table).key()));
        Read { revision, value: tables.filter_map(|table| self.entry(table, revision)).collect() }
    }

    fn changes(&self, told: Revision, upto: Revision) -> Changes {
        let change = |revision: Revision| {
            let past = &self.history[revision as usize - 1];
            let event = Event { key: ident(past.table).key(), entry: self.entry(past.table, revision) };
            Change { revision, events: vec![event] }
        };
        Changes { changes: (told + 1..=upto).map(change).collect(), progress: upto }
    }

    /// What is wrong with an answer.
    fn judge(&self, call: &Ended, lagged: bool) -> Result<(), String> {
        let resolved = match &call.outcome {
            Ok(resolved) => resolved,
            Err(CatalogError::Store(Error::Unavailable { .. }) | CatalogError::TooOld { .. }) => return Ok(()),
            Err(CatalogError::Behind { .. }) if lagged => return Ok(()),
            Err(error) => return Err(format!("an error that nothing explains: {error}")),
        };
        let (mut latest_begin, mut first_end) = (0, Revision::MAX);
        for (&table, resolved) in call.tables.iter().zip(resolved) {
            let wrong = |what: String| Err(format!("table {table}: {what}; {resolved:?}"));
            if resolved.valid_through > self.revision() {
                return wrong(format!("valid through a revision after {}, the last", self.revision()));
            }
            let (since, pointer) = self.state(table, resolved.valid_through);
            let shown = resolved.pointer();
            if shown.map(|pointer| &pointer.value) != pointer || shown.is_some_and(|p| p.mod_revision != since) {
                return wrong(format!(
                    "at the revision it is said to be valid through it is {pointer:?} since {since}"
                ));
            }
            if since < call.shown[table] {
                return wrong(format!(
                    "backwards: since {since}, and {} had been shown or committed",
                    call.shown[table]
                ));
            }
            if resolved.valid_through < call.min_revision {
                return wrong(format!("not of revision {}", call.min_revision));
            }
            if resolved.valid_through < call.awaited {
                return wrong(format!("not of revision {}, which had been waited for", call.awaited));
            }
            let end = self.next(table, since);
            latest_begin = latest_begin.max(since);
            first_end = first_end.min(end.map_or(Revision::MAX, |(revision, _)| revision));
            let Some((_, until)) = end.filter(|_| !lagged) else { continue };
            if until < call.ended - resolved.age {
                return wrong(format!("said to have been current {:?} ago, and was not", resolved.age));
            }
            if !resolved.metasrv_away && call.doubted[table].is_some_and(|doubted| until < doubted) {
                return wrong(format!("ended {:?} before the call, and was doubted since", call.began - until));
            }
            let bound = match (resolved.metasrv_away, shown) {
                (true, _) => CONFIG.stale_limit,
                (false, Some(_)) => CONFIG.fresh_for,
                (false, None) => CONFIG.absent_for,
            };
            if until + bound < call.began {
                return wrong(format!("ended {:?} before the call, the bound is {bound:?}", call.began - until));
            }
        }
        let away = resolved.iter().any(|resolved| resolved.metasrv_away);
        if !away && latest_begin >= first_end {
            return Err(format!("tables {:?} are not of one moment: {resolved:?}", call.tables));
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Script(Arc<Mutex<World>>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

fn unavailable() -> Error {
    Error::Unavailable {
        doing: "test".into(),
        endpoints: vec![],
        attempts: 1,
        elapsed: Duration::ZERO,
        leader: Leader::Without,
        last: "the schedule".into(),
        applied: Applied::Unknown,
    }
}

impl Script {
    async fn ask<T>(&self, asked: impl FnOnce(oneshot::Sender<Answer<T>>) -> Asked) -> Answer<T> {
        let (answer, answered) = oneshot::channel();
        self.0.lock().unwrap().asked.push(asked(answer));
        answered.await.unwrap_or_else(|_| Err(unavailable()))
    }
}

#[async_trait]
impl MetaStore for Script {
    fn capabilities(&self) -> Capabilities {
        Capabilities { snapshots: false, leases: false, ..Capabilities::CLUSTER }
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Answer<Read<Option<KeyValue>>> {
        let mut read = self.batch_get(&[key.to_owned()], options, by).await?;
        Ok(Read { revision: read.revision, value: read.value.pop() })
    }

    async fn batch_get(&self, keys: &[String], _: ReadOptions, _: Instant) -> Answer<Read<Vec<KeyValue>>> {
        self.ask(|answer| Asked::Read { keys: keys.to_vec(), read: None, answer }).await
    }

    async fn list(&self, _: &str, _: Option<&str>, _: u32, _: ReadOptions, _: Instant) -> Answer<Read<Page>> {
        Err(Error::cannot("listing".into(), "the cache lists nothing"))
    }

    async fn commit(&self, _: Txn, _: Instant) -> Answer<Committed> {
        Err(Error::cannot("committing".into(), "the cache commits nothing"))
    }

    async fn watch(&self, _: &str, from: Revision, _: Instant) -> Answer<ChangeStream> {
        self.ask(|answer| Asked::Watch { from, answer }).await
    }
}

fn ident(table: usize) -> TableIdent {
    TableIdent::new("n".parse().unwrap(), format!("t{table}")).unwrap()
}

struct Schedule {
    rng: StdRng,
    world: Arc<Mutex<World>>,
    cache: PointerCache,
    /// Some peers answer from the past.
    lags: bool,
}

impl Schedule {
    fn resolve(&mut self, tables: Vec<usize>) {
        let mut world = self.world.lock().unwrap();
        let min_revision = match self.rng.random_bool(0.2) {
            true => self.rng.random_range(0..=world.revision()),
            false => 0,
        };
        world.calls += 1;
        let (cache, world) = (self.cache.clone(), self.world.clone());
        tokio::spawn(async move {
            let began = clock::now();
            let (awaited, shown, doubted) = {
                let world = world.lock().unwrap();
                (world.awaited, world.shown, world.doubted)
            };
            let idents: Vec<TableIdent> = tables.iter().map(|table| ident(*table)).collect();
            let want = Want::by(began + Duration::from_secs(4)).at_least(min_revision);
            let outcome = match &idents[..] {
                [one] => cache.get(one, want).await.map(|resolved| vec![resolved]),
                several => cache.resolve(several, want).await,
            };
            let mut world = world.lock().unwrap();
            for (&table, resolved) in tables.iter().zip(outcome.iter().flatten()) {
                let through = resolved.valid_through.min(world.revision());
                world.shown[table] = world.shown[table].max(world.state(table, through).0);
            }
            world.calls -= 1;
            let ended = clock::now();
            world.ended.push(Ended { tables, began, ended, min_revision, awaited, shown, doubted, outcome });
        });
    }

    /// Waits until changes have been told.
    fn wait(&mut self) {
        let mut world = self.world.lock().unwrap();
        let revision = self.rng.random_range(0..=world.revision());
        world.calls += 1;
        let (cache, world) = (self.cache.clone(), self.world.clone());
        tokio::spawn(async move {
            let told = cache.wait_for_version(revision, clock::now() + Duration::from_secs(1)).await;
            let mut world = world.lock().unwrap();
            if told.is_ok() {
                world.awaited = world.awaited.max(revision);
            }
            world.calls -= 1;
        });
    }

    fn commit(&mut self, table: usize, drop: bool) {
        let (cache, world) = (self.cache.clone(), self.world.clone());
        tokio::spawn(async move {
            let at = clock::now();
            let script = Script(world.clone());
            let done = script.ask(|answer| Asked::Commit { table, drop, done: None, answer }).await;
            let since = done.as_ref().map_or(0, |done| done.mod_revision);
            match done {
                Ok(Versioned { value: Some(value), mod_revision, valid_through }) => {
                    cache.note_committed(&ident(table), Versioned { value, mod_revision, valid_through }, at);
                }
                Ok(Versioned { value: None, mod_revision, .. }) => cache.note_dropped(&ident(table), mod_revision, at),
                Err(_) => {
                    cache.invalidate(&ident(table));
                    world.lock().unwrap().doubted[table] = Some(clock::now());
                    return;
                }
            }
            let mut world = world.lock().unwrap();
            world.shown[table] = world.shown[table].max(since);
        });
    }

    /// Reads for a question, or answers it.
    fn go_on(&mut self, at: usize, fail: bool) {
        let world = &mut *self.world.lock().unwrap();
        let now = world.revision();
        let mut asked = world.asked.swap_remove(at);
        match &mut asked {
            Asked::Read { keys, read: read @ None, .. } if !fail => {
                let lagging = self.lags && self.rng.random_bool(0.3);
                let revision = if lagging { self.rng.random_range(0..=now) } else { now };
                *read = Some(world.read(keys, revision));
                return world.asked.push(asked);
            }
            Asked::Commit { table, drop, done: done @ None, .. } if !fail => {
                *done = Some(world.change(*table, *drop));
                return world.asked.push(asked);
            }
            _ => {}
        }
        // Whoever asked may be gone.
        match asked {
            Asked::Read { read, answer, .. } => drop(answer.send(read.filter(|_| !fail).ok_or_else(unavailable))),
            Asked::Commit { done, answer, .. } => drop(answer.send(done.filter(|_| !fail).ok_or_else(unavailable))),
            Asked::Watch { from, answer } => {
                let (sender, receiver) = mpsc::unbounded_channel();
                let stream = futures::stream::unfold(receiver, |mut messages| async move {
                    messages.recv().await.map(|message| (message, messages))
                });
                let opened = match self.rng.random_range(0..10) {
                    0 if fail => Err(Error::compacted("test", now + 1)),
                    _ if fail => Err(unavailable()),
                    _ => Ok(stream.boxed()),
                };
                if opened.is_ok() {
                    world.watching = Some((from - 1, sender));
                }
                drop(answer.send(opened));
            }
        }
    }

    /// The watch tells up to a revision, or ends.
    fn tell(&mut self, upto: Option<Revision>) {
        let world = &mut *self.world.lock().unwrap();
        let Some((told, sender)) = world.watching.take() else { return };
        match upto {
            Some(upto) if upto >= told => {
                if sender.send(Ok(world.changes(told, upto))).is_ok() {
                    world.watching = Some((upto, sender));
                }
            }
            Some(_) => world.watching = Some((told, sender)),
            None => {
                let oldest = world.revision() + 1;
                let compacted = Error::compacted("test", oldest);
                drop(sender.send(Err(if self.rng.random_bool(0.5) { compacted } else { unavailable() })));
            }
        }
    }

    fn step(&mut self) {
        let (revision, asked) = {
            let world = self.world.lock().unwrap();
            (world.revision(), world.asked.len())
        };
        let table = self.rng.random_range(0..TABLES);
        match self.rng.random_range(0..100) {
            0..22 => {
                let tables = self.rng.random_range(1..=3);
                let tables = (0..TABLES).choose_multiple(&mut self.rng, tables);
                self.resolve(tables);
            }
            22..32 => drop(self.world.lock().unwrap().change(table, self.rng.random_bool(0.3))),
            32..40 => {
                let dropped = self.rng.random_bool(0.3);
                self.commit(table, dropped);
            }
            40..72 if asked > 0 => {
                let at = self.rng.random_range(0..asked);
                self.go_on(at, false);
            }
            72..75 if asked > 0 => {
                let at = self.rng.random_range(0..asked);
                self.go_on(at, true);
            }
            75..84 => {
                let upto = self.rng.random_range(0..=revision);
                self.tell(Some(upto.max(revision.saturating_sub(2))));
            }
            84..85 => self.tell(None),
            85..89 => self.cache.evict(&ident(table)),
            89..91 => {
                self.cache.invalidate(&ident(table));
                self.world.lock().unwrap().doubted[table] = Some(clock::now());
            }
            91..92 => self.cache.notice(revision),
            92..94 => self.wait(),
            _ => {}
        }
    }

    async fn run_tasks(&mut self, most: u32) {
        for _ in 0..self.rng.random_range(0..=most) {
            tokio::task::yield_now().await;
        }
    }

    fn check(&self) -> Result<(), String> {
        let world = &mut *self.world.lock().unwrap();
        let ended = std::mem::take(&mut world.ended);
        ended.iter().try_for_each(|call| world.judge(call, self.lags))
    }

    async fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.step();
            self.run_tasks(8).await;
            if self.rng.random_bool(0.3) {
                let most = if self.rng.random_bool(0.05) { 6000 } else { 150 };
                tokio::time::advance(Duration::from_millis(self.rng.random_range(0..most))).await;
            }
            self.check()?;
        }
        self.heal().await
    }

    /// Everything answers from now on: nothing hangs, and what is shown is what is.
    async fn heal(&mut self) -> Result<(), String> {
        self.lags = false;
        let answer = async |schedule: &mut Self| {
            for _ in 0..3000 {
                let (asked, calls, revision) = {
                    let world = schedule.world.lock().unwrap();
                    (world.asked.len(), world.calls, world.revision())
                };
                if calls == 0 && asked == 0 {
                    return Ok(());
                }
                if asked > 0 {
                    schedule.go_on(0, false);
                }
                schedule.tell(Some(revision));
                for _ in 0..8 {
                    tokio::task::yield_now().await;
                }
                tokio::time::advance(Duration::from_millis(2)).await;
            }
            Err("calls do not end although everything answers".to_owned())
        };
        answer(self).await?;
        // What ended before was perhaps answered by a peer that lagged.
        self.world.lock().unwrap().ended.clear();
        for _ in 0..2 {
            tokio::time::advance(CONFIG.fresh_for).await;
            self.resolve((0..TABLES).collect());
            answer(self).await?;
            let world = self.world.lock().unwrap();
            let call = world.ended.last().ok_or("the last call has not ended")?;
            let resolved = call.outcome.as_ref().map_err(|error| format!("although all is well: {error}"))?;
            if resolved.iter().any(|resolved| resolved.metasrv_away) {
                continue;
            }
            for (table, resolved) in resolved.iter().enumerate() {
                let (_, pointer) = world.state(table, world.revision());
                if resolved.pointer().map(|pointer| &pointer.value) != pointer {
                    return Err(format!("table {table} is {pointer:?} at the end, and shown as {resolved:?}"));
                }
            }
            return Ok(());
        }
        Err("metasrv still counts as away although everything answers".to_owned())
    }
}

/// Runs one schedule.
fn run(seed: u64, lags: bool) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world: Arc<Mutex<World>> = Arc::default();
        let cache = PointerCache::build(Arc::new(Script(world.clone())), CONFIG, Arc::default(), seed);
        let mut schedule = Schedule { rng: StdRng::seed_from_u64(seed), world, cache: cache.clone(), lags };
        schedule.run().await?;
        // Nobody answers any more.
        cache.close().await;
        match cache.shared.lock().is_idle() {
            true => Ok(()),
            false => Err("loads were left behind".to_owned()),
        }
    })
}

/// Seeds from `LAKE_CACHE_SEED` on, or from 0.
fn run_all(lags: bool) {
    let from: u64 = std::env::var("LAKE_CACHE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for seed in from..from + 400 {
        if let Err(what) = run(seed, lags) {
            panic!("seed {seed} (again: LAKE_CACHE_SEED={seed}): {what}");
        }
    }
}

#[test]
fn every_answer_is_one_that_the_history_allows() {
    run_all(false);
}

#[test]
fn a_peer_that_lags_takes_no_table_backwards() {
    run_all(true);
}
