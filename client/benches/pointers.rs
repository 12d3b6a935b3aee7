//! What a hit in the pointer cache costs, and how much memory 100,000 tables take.
//!
//! `cargo bench --profile dist -p lake-client --features cache`. Before criterion's timings it prints what a hit takes and
//! allocates, and the bytes that are allocated for all tables, each with its limit. If one is broken it fails in the end.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use lake_client::cache::{CacheConfig, PointerCache, Want};
use lake_client::catalog::{Catalog, Namespace, TableIdent, TablePointer};
use lake_client::memory::MemoryStore;
use uuid::Uuid;

const TABLES: usize = 100_000;
const MAX_BYTES: u64 = 100_000_000;
const MAX_NANOSECONDS: f64 = 500.0;
/// Runs of so many hits each: together so many that the cache's own upkeep has its turns among them.
const RUNS: usize = 100;
const HITS: u32 = 10_000;
/// So few hits that moka's own upkeep, which it does once for some hundred of them, is in few of the runs.
const FEW: u32 = 10;
/// Allocations in a thousand hits, at most: the upkeep's, since a hit has none.
const MAX_UPKEEP: f64 = 10.0;

/// The system's allocator, counted.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Names and locations as long as a query node's are.
fn table(namespace: &Namespace, at: usize) -> TableIdent {
    TableIdent::new(namespace.clone(), format!("orders_of_customer_{at:06}")).unwrap()
}

fn pointer(table: &TableIdent, version: u32) -> TablePointer {
    let uuid = Uuid::new_v4();
    let location = |version: u32| {
        format!(
            "s3://warehouse-of-the-team/analytics/{}-{uuid}/metadata/{version:05}-{}.metadata.json",
            table.name,
            Uuid::new_v4()
        )
    };
    TablePointer { uuid, metadata_location: location(version), previous_location: Some(location(version - 1)) }
}

/// Nanoseconds that a hit takes: of many runs the one in the middle, so that what else the machine does counts little.
fn nanoseconds(mut hit: impl FnMut()) -> f64 {
    let run = |_| {
        let began = Instant::now();
        (0..HITS).for_each(|_| hit());
        began.elapsed().as_secs_f64() * 1e9 / f64::from(HITS)
    };
    let mut runs: Vec<f64> = (0..RUNS).map(run).collect();
    runs.sort_unstable_by(f64::total_cmp);
    runs[RUNS / 2]
}

/// Says whether a limit holds, and keeps it if it does not.
fn limit(broken: &mut Vec<String>, what: &str, is: f64, most: f64) {
    let told = format!("{what}: {is:.2}, the limit is {most}");
    println!("{told}{}", if is <= most { "" } else { ": BROKEN" });
    if is > most {
        broken.push(told);
    }
}

fn hits(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _entered = runtime.enter();
    let store = MemoryStore::shared();
    let namespace: Namespace = "analytics".parse().unwrap();
    let tables: Vec<TableIdent> = (0..TABLES).map(|at| table(&namespace, at)).collect();
    let catalog = Catalog::new(store.clone());
    runtime.block_on(async {
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        for table in &tables {
            catalog.create_table(table, &pointer(table, 1), soon()).await.unwrap();
        }
    });
    // They are fresh for as long as it takes.
    let hour = Duration::from_secs(3600);
    let config =
        CacheConfig { max_tables: TABLES as u64, refresh_after: hour, fresh_for: hour, ..CacheConfig::default() };
    let before = BYTES.load(Ordering::Relaxed);
    let cache = PointerCache::new(store, config);
    runtime.block_on(async {
        for some in tables.chunks(1000) {
            cache.resolve(some, Want::by(soon())).await.unwrap();
        }
    });
    let held = cache.len();
    let bytes = BYTES.load(Ordering::Relaxed) - before;
    assert_eq!(held, TABLES as u64, "what is measured is all of them");
    println!("{held} tables, {} bytes each", bytes / held);
    let mut broken = Vec::new();
    limit(&mut broken, "megabytes of all tables", bytes as f64 / 1e6, MAX_BYTES as f64 / 1e6);

    let hot = &tables[TABLES / 2];
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let one = nanoseconds(|| drop(black_box(cache.cached(black_box(hot)).unwrap())));
    let allocations = (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64;
    limit(&mut broken, "allocations in 1,000 hits", allocations * 1000.0 / (RUNS as f64 * f64::from(HITS)), MAX_UPKEEP);
    let few = || {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..FEW).for_each(|_| drop(black_box(cache.cached(black_box(hot)).unwrap())));
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    let with_any = (0..HITS).filter(|_| few() > 0).count();
    // Were it the hits that allocate, each run would.
    limit(&mut broken, "runs of 10 hits with an allocation, in %", with_any as f64 * 100.0 / f64::from(HITS), 20.0);
    let mut at = 0;
    let in_turn = nanoseconds(|| {
        at = (at + 7919) % TABLES;
        drop(black_box(cache.cached(black_box(&tables[at])).unwrap()));
    });
    println!("nanoseconds of a hit, all tables in turn, none of them in the processor's cache: {in_turn:.0}");
    // Without it this is no measurement, but `cargo test`, of what was not compiled to be quick.
    if std::env::args().any(|argument| argument == "--bench") {
        limit(&mut broken, "nanoseconds of a hit, with --profile dist", one, MAX_NANOSECONDS);
    }

    let mut group = criterion.benchmark_group("pointers");
    group.bench_function("hit, one table", |b| b.iter(|| black_box(cache.cached(black_box(hot)).unwrap())));
    let mut at = 0;
    group.bench_function("hit, 100,000 tables in turn", |b| {
        b.iter(|| {
            at = (at + 7919) % TABLES;
            black_box(cache.cached(black_box(&tables[at])).unwrap())
        });
    });
    group.bench_function("three tables of one moment", |b| {
        b.iter(|| runtime.block_on(cache.resolve(black_box(&tables[10..13]), Want::by(soon()))).unwrap());
    });
    group.finish();
    assert!(broken.is_empty(), "beyond the limits: {broken:#?}");
}

criterion_group!(benches, hits);
criterion_main!(benches);
