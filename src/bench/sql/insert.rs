//! INSERT of TPC-H's lineitem, whose rows are made as they are read, beside DataFusion's COPY of the same rows to Parquet files.
//!
//! Both write zstd of level 3 and row groups of at most 1,048,576 rows, which is what each does by itself. A table's files are durable
//! when INSERT is answered; nobody syncs those of COPY.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use datafusion::prelude::ParquetReadOptions;
use serde_json::json;

use super::{Bench, MAX_SCALE, Report, both, compare, median, plain_query, query};

/// What the rows of both are compared by.
const SUMS: &str = "SELECT count(*), sum(l_orderkey), sum(l_partkey), sum(l_suppkey), sum(l_linenumber), sum(l_quantity), \
                    sum(l_extendedprice), sum(l_discount), sum(l_tax), min(l_shipdate), max(l_receiptdate), \
                    sum(character_length(l_comment)) FROM";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// TPC-H's scale factor: 1 is 6 million rows
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
}

pub async fn run(bench: &Bench, args: &Args) -> Result<Report> {
    ensure!(args.scale > 0.0 && args.scale <= MAX_SCALE, "--scale: above 0 and at most {MAX_SCALE} can be");
    let (sql, plain) = (bench.client().await?, bench.plain(false)?);
    let source = format!("SELECT * FROM tpch('lineitem', {})", args.scale);
    let (mut lake_times, mut plain_times, mut rows) = (Vec::new(), Vec::new(), 0);
    let (mut lake_made, mut plain_made) = (Made::default(), Made::default());
    for round in 0..=bench.rounds {
        let table = format!("inserted_{round}");
        let dir = bench.dir.join(&table);
        query(&sql, &format!("CREATE TABLE {table} AS {source} LIMIT 0")).await?;
        let insert = format!("INSERT INTO {table} {source}");
        let copy = format!("COPY ({source}) TO '{}/' STORED AS PARQUET", dir.display());
        let (lake, copied) = both(round, query(&sql, &insert), plain_query(&plain, &copy)).await?;
        plain.register_parquet(table.as_str(), format!("{}/", dir.display()), ParquetReadOptions::default()).await?;
        let sums = format!("{SUMS} {table}");
        let sums_of_plain = plain_query(&plain, &sums).await?;
        compare("the rows that were inserted", &query(&sql, &sums).await?, &sums_of_plain)?;
        rows = number(&sums_of_plain)?;
        let files = bench.files(&sql, &table).await?;
        lake_made = Made::of(files.iter().map(|file| file.as_path()))?;
        plain_made = made_in(&dir)?;
        plain.deregister_table(table.as_str())?;
        for written in files.iter().filter_map(|file| file.parent()).take(1).chain([dir.as_path()]) {
            // What was written would fill the disk: it is needed no more, and the table is not read again.
            std::fs::remove_dir_all(written).with_context(|| format!("removing {}", written.display()))?;
        }
        if round > 0 {
            lake_times.push(lake.1);
            plain_times.push(copied.1);
        }
    }
    let rate = |times| f64::from(u32::try_from(rows).unwrap_or(u32::MAX)) / median(times) * 1000.0;
    let (lake, plain) = (rate(lake_times), rate(plain_times));
    let text = format!(
        "insert at scale {}, {rows} rows, medians of {} rounds: INSERT {lake:.0} rows per second ({} files, {} bytes), COPY of DataFusion \
         {plain:.0} ({} files, {} bytes), {:.2} times; the sums of both were the same",
        args.scale,
        bench.rounds,
        lake_made.files,
        lake_made.bytes,
        plain_made.files,
        plain_made.bytes,
        lake / plain,
    );
    let json = json!({
        "scale": args.scale,
        "rounds": bench.rounds,
        "rows": rows,
        "lake_rows_per_second": lake,
        "lake_files": lake_made.files,
        "lake_bytes": lake_made.bytes,
        "datafusion_rows_per_second": plain,
        "datafusion_files": plain_made.files,
        "datafusion_bytes": plain_made.bytes,
        "ratio": lake / plain,
    });
    Ok(Report { text, json })
}

/// What was written last.
#[derive(Debug, Clone, Copy, Default)]
struct Made {
    files: usize,
    bytes: u64,
}

impl Made {
    fn of<'a>(files: impl Iterator<Item = &'a Path>) -> Result<Self> {
        let mut made = Self::default();
        for file in files {
            let metadata = std::fs::metadata(file).with_context(|| format!("looking at {}", file.display()))?;
            made.files += 1;
            made.bytes += metadata.len();
        }
        Ok(made)
    }
}

fn made_in(dir: &Path) -> Result<Made> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Made::of(paths.iter().map(|path| path.as_path()))
}

/// The first number of the first row.
fn number(rows: &[RecordBatch]) -> Result<i64> {
    let first = rows.iter().find(|batch| batch.num_rows() > 0).context("no row was counted")?;
    Ok(first.column(0).as_primitive::<Int64Type>().value(0))
}
