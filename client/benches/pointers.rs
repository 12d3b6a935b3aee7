//! What a hit in the pointer cache costs, and how much memory 100,000 tables take.
//!
//! `cargo bench --profile dist -p lake-client --features cache`. Before the timings it prints the bytes that are allocated per
//! table and in all, and fails if they are beyond 100 MB, or if a hit allocates.

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
/// Hits of which none may allocate: so many that the cache's own upkeep has its turns among them.
const HITS: u32 = 1_000_000;

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
    println!("{held} tables in {:.1} MB, {} bytes each", bytes as f64 / 1e6, bytes / held);
    assert!(held == TABLES as u64 && bytes <= MAX_BYTES, "the limit is {MAX_BYTES} bytes");

    let hot = &tables[TABLES / 2];
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..HITS {
        black_box(cache.cached(black_box(hot)).unwrap());
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    println!("{allocations} allocations in {HITS} hits");
    assert!(allocations < u64::from(HITS) / 1000, "a hit allocates");

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
}

criterion_group!(benches, hits);
criterion_main!(benches);
