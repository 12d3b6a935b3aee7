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

mod world;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use lake_proto::kv::Revision;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc;

use self::world::{Asked, CONFIG, Ended, Script, TABLES, World, ident, unavailable};
use super::{PointerCache, Want};
use crate::catalog::{TableIdent, Versioned};
use crate::clock;
use crate::store::Error;

const STEPS: u32 = 300;

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
