//! Planning a query for few of very many data files. There are no such files: planning reads what manifests say of them.
//!
//! Each table has files in many partitions, written by a number of commits: `clustered`, where each commit has files of partitions of
//! its own, as data comes that is partitioned by time, and `scattered`, where each has files of partitions all over. EXPLAIN is timed, of one partition: cold
//! on a node that has just been started (the operating system still has the metadata's files), and then warm.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use datafusion::common::TableReference;
use datafusion::logical_expr::{col, lit};
use datafusion::prelude::SessionContext;
use iceberg::spec::{DataContentType, DataFile, DataFileBuilder, DataFileFormat, Datum, Literal, Struct};
use lake_query::scan::plan;
use lake_query::scan::prune::Pruning;
use lake_query::sql::catalog::ident;
use lake_query::table::writer::DataFiles;
use lake_query::table::{Table, Tables};
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{Bench, Report, TIMEOUT, median, query, timed};

const MAX_FILES: u32 = 10_000_000;
const MAX_COMMITS: u32 = 10_000;
/// Partitions of scattered files that follow each other are so far apart: primes, of which no number of partitions that can be has both.
const STRIDES: [u32; 2] = [7919, 7907];
/// EXPLAINs of a round with warm caches.
const WARM: usize = 10;
/// What each file is said to hold.
const ROWS: u64 = 100_000;
const BYTES: u64 = 64 << 20;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Data files of a table
    #[arg(long, default_value_t = 100_000)]
    files: u32,
    /// Of them, those that the query is for: as many as a partition has
    #[arg(long, default_value_t = 10)]
    wanted: u32,
    /// Commits that have added them
    #[arg(long, default_value_t = 50)]
    commits: u32,
}

/// Which partitions the files of a commit are of.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Clustered,
    Scattered,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Clustered => "clustered",
            Layout::Scattered => "scattered",
        }
    }

    /// The partition of a file, by its number.
    fn partition(self, file: u32, args: &Args) -> u32 {
        match self {
            Layout::Clustered => file / args.wanted,
            Layout::Scattered => {
                let partitions = args.files / args.wanted;
                let stride = STRIDES.into_iter().find(|stride| !partitions.is_multiple_of(*stride)).unwrap_or(1);
                (u64::from(file) * u64::from(stride) % u64::from(partitions)) as u32
            }
        }
    }
}

pub async fn run(bench: &mut Bench, args: &Args) -> Result<Report> {
    ensure!((1..=MAX_FILES).contains(&args.files), "--files: 1 to {MAX_FILES} can be");
    ensure!((1..=args.files).contains(&args.wanted), "--wanted: 1 to {} can be", args.files);
    ensure!(
        args.files.is_multiple_of(args.wanted),
        "--files is no multiple of --wanted: partitions would differ in size"
    );
    ensure!(
        (1..=MAX_COMMITS.min(args.files)).contains(&args.commits),
        "--commits: 1 to {MAX_COMMITS}, and no more than files"
    );
    let mut figures = Vec::new();
    for layout in [Layout::Clustered, Layout::Scattered] {
        figures.push(measure(bench, layout, args).await.with_context(|| format!("the {} table", layout.name()))?);
    }
    let lines: Vec<String> = figures.iter().map(|figure| figure.text(args, bench.rounds)).collect();
    let json = figures.iter().map(|figure| figure.json(args, bench.rounds)).collect();
    Ok(Report { text: lines.join("\n"), json: Value::Array(json) })
}

/// The figures of one table.
struct Figure {
    layout: Layout,
    manifests: usize,
    manifest_bytes: i64,
    cold_ms: f64,
    warm_ms: f64,
}

impl Figure {
    fn text(&self, args: &Args, rounds: usize) -> String {
        format!(
            "plan {}: {} files of {} wanted, {} manifests of {} bytes, medians of {rounds} rounds: cold {:.1} ms, warm {:.1} ms",
            self.layout.name(),
            args.wanted,
            args.files,
            self.manifests,
            self.manifest_bytes,
            self.cold_ms,
            self.warm_ms,
        )
    }

    fn json(&self, args: &Args, rounds: usize) -> Value {
        json!({
            "layout": self.layout.name(),
            "files": args.files,
            "wanted": args.wanted,
            "commits": args.commits,
            "rounds": rounds,
            "manifests": self.manifests,
            "manifest_bytes": self.manifest_bytes,
            "cold_ms": self.cold_ms,
            "warm_ms": self.warm_ms,
        })
    }
}

async fn measure(bench: &mut Bench, layout: Layout, args: &Args) -> Result<Figure> {
    let name = format!("planned_{}", layout.name());
    let create = format!("CREATE TABLE {name} (p INT, id BIGINT, day DATE, name VARCHAR) PARTITIONED BY (p)");
    query(&bench.client().await?, &create).await?;
    fill(bench, &name, layout, args).await?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    let partitions = args.files / args.wanted;
    for round in 0..bench.rounds {
        bench.fresh_node().await?;
        let sql = bench.client().await?;
        for nth in 0..=WARM {
            // Another one each time: what is cached is what all of them need.
            let of = u32::try_from(round * (WARM + 1) + nth)? * 7919 % partitions;
            let explain = format!("EXPLAIN SELECT count(*), sum(id) FROM {name} WHERE p = {of}");
            let (_, took) = timed(query(&sql, &explain)).await?;
            if nth == 0 { cold.push(took) } else { warm.push(took) }
        }
    }
    let (manifests, manifest_bytes) = check(bench, &name, args, partitions / 2).await?;
    Ok(Figure { layout, manifests, manifest_bytes, cold_ms: median(cold), warm_ms: median(warm) })
}

/// Adds the files.
async fn fill(bench: &Bench, name: &str, layout: Layout, args: &Args) -> Result<()> {
    let tables = bench.node.engine().tables();
    for commit in 0..args.commits {
        let table = load(tables, name).await?;
        let mut files = DataFiles::new(tables.storage.clone(), TaskTracker::new());
        for file in part(args.files, args.commits, commit) {
            files.files.push(made_up(&table, file, layout.partition(file, args))?);
            files.rows += ROWS;
        }
        tables.append(&table, files, Instant::now() + TIMEOUT).await?;
    }
    Ok(())
}

/// The numbers of the files of a commit.
fn part(files: u32, commits: u32, commit: u32) -> std::ops::Range<u32> {
    let end = |commit: u32| u32::try_from(u64::from(files) * u64::from(commit) / u64::from(commits)).unwrap_or(files);
    end(commit)..end(commit + 1)
}

async fn load(tables: &Tables, name: &str) -> Result<Table> {
    let loaded = tables.load_now(&[ident(&TableReference::bare(name))?], Instant::now() + TIMEOUT).await?;
    loaded.tables.into_iter().next().flatten().with_context(|| format!("there is no table {name}"))
}

/// A data file as a manifest describes it, with all that lake writes of one.
fn made_up(table: &Table, number: u32, partition: u32) -> Result<DataFile> {
    let metadata = &table.metadata;
    let columns: Vec<i32> = metadata.current_schema().as_struct().fields().iter().map(|field| field.id).collect();
    let [p, id, day, text] = columns[..] else { bail!("the table has {} columns, and 4 were made", columns.len()) };
    let partition = i32::try_from(partition)?;
    let first = i64::from(number) * i64::try_from(ROWS)?;
    let counts = |count: u64| HashMap::from([p, id, day, text].map(|column| (column, count)));
    let bounds = |of_id: i64, word: &str| {
        let of_day = Datum::date(i32::try_from(of_id / 1_000_000).unwrap_or(i32::MAX));
        let (of_p, of_id) = (Datum::int(partition), Datum::long(of_id));
        HashMap::from([(p, of_p), (id, of_id), (day, of_day), (text, Datum::string(word))])
    };
    let mut file = DataFileBuilder::default();
    file.content(DataContentType::Data)
        .file_path(format!("{}/data/{}.parquet", metadata.location(), Uuid::now_v7()))
        .file_format(DataFileFormat::Parquet)
        .partition(Struct::from_iter([Some(Literal::int(partition))]))
        .partition_spec_id(metadata.default_partition_spec_id())
        .record_count(ROWS)
        .file_size_in_bytes(BYTES)
        .column_sizes(counts(BYTES / 4))
        .value_counts(counts(ROWS))
        .null_value_counts(counts(0))
        .lower_bounds(bounds(first, "aardvark"))
        .upper_bounds(bounds(first + 99_999, "zyzzyva"))
        .split_offsets(Some(vec![4]));
    file.build().context("making a data file up")
}

/// That a plan for one partition has its files and no others. Gives how many manifests there are, and their size.
async fn check(bench: &Bench, name: &str, args: &Args, partition: u32) -> Result<(usize, i64)> {
    let tables = bench.node.engine().tables();
    let table = load(tables, name).await?;
    let snapshot = table.metadata.current_snapshot().context("nothing was added")?;
    let filter = col("p").eq(lit(i32::try_from(partition)?));
    let pruning = Pruning::new(&SessionContext::new().state(), &table.arrow_schema()?, &[filter])?;
    let planned = plan::files(&tables.cache, &table, Some(snapshot.as_ref()), pruning.as_ref()).await?;
    let found = planned.files.len();
    ensure!(found == args.wanted as usize, "{found} files are planned for a partition of {}", args.wanted);
    let list = tables.cache.manifest_list(&table.metadata, snapshot).await?;
    Ok((list.entries().len(), list.entries().iter().map(|manifest| manifest.manifest_length).sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_partition_has_as_many_files_as_are_wanted() {
        let args = Args { files: 60, wanted: 3, commits: 7 };
        let all: Vec<u32> = (0..args.commits).flat_map(|commit| part(args.files, args.commits, commit)).collect();
        assert_eq!(all, (0..60).collect::<Vec<_>>());
        for layout in [Layout::Clustered, Layout::Scattered] {
            let mut counts = [0; 20];
            all.iter().for_each(|file| counts[layout.partition(*file, &args) as usize] += 1);
            assert_eq!(counts, [3; 20], "{}", layout.name());
        }
    }

    #[test]
    fn each_commit_of_the_scattered_table_is_of_partitions_all_over() {
        let args = Args { files: 100_000, wanted: 10, commits: 50 };
        for commit in 0..args.commits {
            let of = || part(args.files, args.commits, commit).map(|file| Layout::Scattered.partition(file, &args));
            let (first, last) = (of().min().unwrap(), of().max().unwrap());
            assert!(first < 100 && last >= 9_900, "commit {commit} has {first} to {last} of 10,000");
        }
    }
}
