//! `lake bench meta`: a closed loop against a running metadata cluster.
//!
//! Each client makes one call at a time, so that the number of clients is the number of calls in flight. Keys are
//! written once before the measurement and deleted after it; every client then works on keys of its own, so that a compare-and-set never loses
//! and what is measured is the store. The first part of the time ([`Args::warmup`]) is not counted.
//!
//! - [`target`]: what a load is run against; [`report`]: what came of it.
//!
//! Limits: [`MAX_CLIENTS`] clients, [`MAX_KEYS`] keys. A call that fails is counted and makes the run fail in the end.

mod report;
mod target;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use lake_chaos::Role;
use lake_client::store::Consistency;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use tokio::task::JoinSet;

use self::report::{Format, Report};
use self::target::{EtcdTarget, LakeTarget, Revisions, Target};
use crate::endpoints::At;

/// Most clients of one run.
const MAX_CLIENTS: usize = 4096;
/// Most keys of one run.
const MAX_KEYS: usize = 20_000_000;
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How old a bounded read may be.
const BOUNDED_BY: Duration = Duration::from_secs(1);
/// Keys written in one transaction before the measurement.
const LOAD_BATCH: usize = 100;
/// Such transactions in flight.
const LOAD_CLIENTS: usize = 16;
/// The longest latency that is told apart, in microseconds.
const MAX_LATENCY_US: u64 = 60_000_000;

/// What every key begins with.
const PREFIX: &str = "/kv/bench/";

/// Options of `lake bench meta`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The keys are /kv/bench/00000000 and so on. They are deleted at the end, unless --keep-keys says otherwise; what a run leaves that was
interrupted goes with `lake meta delete --prefix /kv/bench/ --limit N`.")]
pub struct Args {
    #[command(flatten)]
    at: At,
    /// Run against an etcd instead, reached at these addresses
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',')]
    etcd: Vec<String>,
    /// What each client does
    #[arg(long, value_enum, default_value_t = Load::Cas)]
    load: Load,
    /// Calls in flight
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// Connections that the clients share [default: one per 64 clients, at most 4]
    #[arg(long)]
    connections: Option<usize>,
    /// Bytes of a value
    #[arg(long, default_value_t = 256)]
    value_bytes: usize,
    /// Keys worked on
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// Seconds measured
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Seconds before that
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Leave the keys that were worked on
    #[arg(long)]
    keep_keys: bool,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// What a client does over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// Write a key
    Put,
    /// Write a key if nobody else has
    Cas,
    /// Two compares, two writes
    Txn,
    /// Read a key, confirmed by a quorum
    Get,
    /// Read a key that is at most a second old
    GetBounded,
    /// Read a key from whatever the peer has
    GetLocal,
    /// Write a key, and wait until a watch on it has told of that
    Watch,
    /// Nine reads to one compare-and-set
    Mixed,
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Load::Put => "put",
            Load::Cas => "cas",
            Load::Txn => "txn",
            Load::Get => "get",
            Load::GetBounded => "get-bounded",
            Load::GetLocal => "get-local",
            Load::Watch => "watch",
            Load::Mixed => "mixed",
        }
    }
}

/// Runs the load and prints what came of it.
///
/// # Errors
/// The cluster cannot be reached, or a call failed.
pub async fn run(args: Args) -> Result<()> {
    ensure!((1..=MAX_CLIENTS).contains(&args.clients), "--clients: 1 to {MAX_CLIENTS} can be");
    ensure!((args.clients..=MAX_KEYS).contains(&args.keys), "--keys: as many as clients, to {MAX_KEYS}, can be");
    ensure!(args.value_bytes <= lake_proto::limits::MAX_VALUE_BYTES, "--value-bytes: a value has at most 1 MiB");
    ensure!(args.seconds > 0.0 && args.warmup >= 0.0, "--seconds and --warmup: they cannot be negative");
    let connections = args.connections.unwrap_or(args.clients.div_ceil(64).min(4)).max(1);
    let mut targets: Vec<Arc<dyn Target>> = Vec::new();
    for n in 0..connections {
        targets.push(if args.etcd.is_empty() {
            Arc::new(LakeTarget::connect(args.at.endpoints(Role::Metasrv)?, args.at.secret()?)?)
        } else {
            Arc::new(EtcdTarget::connect(&args.etcd[n % args.etcd.len()]).await?)
        });
    }
    let loaded = load_keys(&targets, &args).await;
    let revisions = loaded.with_context(|| format!("writing the keys that the load works on, under {PREFIX}"))?;
    let measured = measure(&targets, &args, revisions).await;
    let deleted = match args.keep_keys {
        true => Ok(()),
        false => delete_keys(&targets, args.keys).await,
    };
    let report = measured?;
    println!("{}", report.format(args.format));
    deleted.with_context(|| format!("deleting the keys under {PREFIX}, of which some are left"))?;
    if report.errors > 0 {
        bail!("{} calls failed; the last one: {}", report.errors, report.last_error.unwrap_or_default());
    }
    Ok(())
}

fn key(n: usize) -> String {
    format!("{PREFIX}{n:08}")
}

fn value(rng: &mut SmallRng, bytes: usize) -> Bytes {
    let mut value = vec![0; bytes];
    rng.fill_bytes(&mut value);
    value.into()
}

/// Writes every key. Gives the revision of each, for compare-and-set.
async fn load_keys(targets: &[Arc<dyn Target>], args: &Args) -> Result<Vec<u64>> {
    let batches: Vec<Vec<usize>> =
        (0..args.keys).collect::<Vec<_>>().chunks(LOAD_BATCH).map(<[usize]>::to_vec).collect();
    let lanes: Vec<_> = (0..LOAD_CLIENTS)
        .map(|lane| {
            let target = &targets[lane % targets.len()];
            let batches = &batches;
            async move {
                let mut rng = SmallRng::seed_from_u64(lane as u64);
                let mut done = Vec::new();
                for batch in batches.iter().skip(lane).step_by(LOAD_CLIENTS) {
                    let entries = batch.iter().map(|n| (key(*n), value(&mut rng, args.value_bytes))).collect();
                    let revision = target.put_many(entries, Instant::now() + CALL_TIMEOUT).await?;
                    done.extend(batch.iter().map(|n| (*n, revision)));
                }
                anyhow::Ok(done)
            }
        })
        .collect();
    let mut revisions = vec![0; args.keys];
    for (n, revision) in try_join_all(lanes).await?.into_iter().flatten() {
        revisions[n] = revision;
    }
    Ok(revisions)
}

/// Deletes every key.
async fn delete_keys(targets: &[Arc<dyn Target>], keys: usize) -> Result<()> {
    let batches: Vec<Vec<usize>> = (0..keys).collect::<Vec<_>>().chunks(LOAD_BATCH).map(<[usize]>::to_vec).collect();
    let lanes: Vec<_> = (0..LOAD_CLIENTS)
        .map(|lane| {
            let target = &targets[lane % targets.len()];
            let batches = &batches;
            async move {
                for batch in batches.iter().skip(lane).step_by(LOAD_CLIENTS) {
                    target.delete_many(batch.iter().copied().map(key).collect(), Instant::now() + CALL_TIMEOUT).await?;
                }
                anyhow::Ok(())
            }
        })
        .collect();
    try_join_all(lanes).await.map(drop)
}

/// When counting begins and ends.
#[derive(Debug, Clone, Copy)]
struct Window {
    from: Instant,
    until: Instant,
}

/// What the clients of a run share.
struct Shared {
    window: Window,
    stop: AtomicBool,
    /// When a call last succeeded, in microseconds since the window began, and the longest time between two successes.
    last_success_us: AtomicU64,
    longest_gap_us: AtomicU64,
}

impl Shared {
    fn succeeded(&self, at: Instant) {
        let now = at.saturating_duration_since(self.window.from).as_micros() as u64;
        let before = self.last_success_us.fetch_max(now, Ordering::Relaxed);
        self.longest_gap_us.fetch_max(now.saturating_sub(before), Ordering::Relaxed);
    }
}

/// One client's figures.
struct Counted {
    latencies_us: Histogram<u64>,
    errors: u64,
    last_error: Option<String>,
}

async fn measure(targets: &[Arc<dyn Target>], args: &Args, revisions: Vec<u64>) -> Result<Report> {
    let from = Instant::now() + Duration::from_secs_f64(args.warmup);
    let window = Window { from, until: from + Duration::from_secs_f64(args.seconds) };
    let shared = Arc::new(Shared {
        window,
        stop: AtomicBool::new(false),
        last_success_us: AtomicU64::new(0),
        longest_gap_us: AtomicU64::new(0),
    });
    let mut clients = JoinSet::new();
    for n in 0..args.clients {
        let own: Vec<(usize, u64)> = (n..args.keys).step_by(args.clients).map(|key| (key, revisions[key])).collect();
        let target = targets[n % targets.len()].clone();
        clients.spawn(client(target, args.load, own, args.value_bytes, n as u64, shared.clone()));
    }
    let mut latencies_us = histogram()?;
    let (mut errors, mut last_error) = (0, None);
    while let Some(counted) = clients.join_next().await {
        let counted = counted.context("a client of the load ended")??;
        latencies_us.add(&counted.latencies_us)?;
        errors += counted.errors;
        last_error = counted.last_error.or(last_error);
    }
    shared.succeeded(window.until);
    Ok(Report {
        target: targets[0].name(),
        load: args.load.name(),
        clients: args.clients,
        connections: targets.len(),
        keys: args.keys,
        value_bytes: args.value_bytes,
        seconds: args.seconds,
        latencies_us,
        longest_gap_us: shared.longest_gap_us.load(Ordering::Relaxed),
        errors,
        last_error,
    })
}

fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, MAX_LATENCY_US, 3)?)
}

async fn client(
    target: Arc<dyn Target>,
    load: Load,
    mut own: Vec<(usize, u64)>,
    value_bytes: usize,
    seed: u64,
    shared: Arc<Shared>,
) -> Result<Counted> {
    let window = shared.window;
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut counted = Counted { latencies_us: histogram()?, errors: 0, last_error: None };
    let mut watch = None;
    if load == Load::Watch {
        own.truncate(1);
        watch = Some(target.watch(key(own[0].0), Instant::now() + CALL_TIMEOUT).await.context("opening a watch")?);
    }
    loop {
        let started = Instant::now();
        if started >= window.until || shared.stop.load(Ordering::Relaxed) {
            return Ok(counted);
        }
        let deadline = started + CALL_TIMEOUT;
        let at = rng.random_range(0..own.len());
        let (n, revision) = own[at];
        let load = match load {
            Load::Mixed if rng.random_range(0..10) == 0 => Load::Cas,
            Load::Mixed => Load::Get,
            load => load,
        };
        let done = match load {
            Load::Put => target.put(key(n), value(&mut rng, value_bytes), deadline).await,
            Load::Cas => target.cas(vec![(key(n), revision, value(&mut rng, value_bytes))], deadline).await,
            Load::Txn => {
                let other = (at + 1) % own.len();
                let (m, other_revision) = own[other];
                let mut writes = vec![(key(n), revision, value(&mut rng, value_bytes))];
                if other != at {
                    writes.push((key(m), other_revision, value(&mut rng, value_bytes)));
                }
                let done = target.cas(writes, deadline).await;
                if let Ok(revision) = done {
                    own[other].1 = revision;
                }
                done
            }
            Load::Get | Load::Mixed => target.get(key(n), Consistency::Linearizable, deadline).await.map(|()| revision),
            Load::Watch => {
                write_and_see(&*target, watch.as_mut(), key(n), value(&mut rng, value_bytes), deadline).await
            }
            Load::GetBounded => target.get(key(n), Consistency::Bounded(BOUNDED_BY), deadline).await.map(|()| revision),
            Load::GetLocal => target.get(key(n), Consistency::Local, deadline).await.map(|()| revision),
        };
        let ended = Instant::now();
        match done {
            Ok(revision) => {
                own[at].1 = revision;
                if started >= window.from && ended <= window.until {
                    let us = (ended - started).as_micros().min(u128::from(MAX_LATENCY_US)) as u64;
                    counted.latencies_us.record(us.max(1))?;
                    shared.succeeded(ended);
                }
            }
            Err(e) => {
                counted.errors += 1;
                counted.last_error = Some(format!("{e:#}"));
                // What such a client works on is not known any more: one that fails stops the run.
                shared.stop.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Writes a key that is watched, and waits until the watch tells of it.
async fn write_and_see(
    target: &dyn Target,
    watch: Option<&mut Revisions>,
    key: String,
    value: Bytes,
    deadline: Instant,
) -> Result<u64> {
    let watch = watch.context("nothing is watched")?;
    let revision = target.put(key.clone(), value, deadline).await?;
    let seen = async {
        loop {
            let told = watch.next().await.context("the watch ended")??;
            ensure!(told <= revision, "the watch on {key} missed revision {revision} and tells of {told}");
            if told == revision {
                return Ok(revision);
            }
        }
    };
    tokio::time::timeout_at(deadline.into(), seen).await.context("waiting for the watch to tell of a write")?
}
