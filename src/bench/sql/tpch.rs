//! The 22 queries of TPC-H: through the query node, and by DataFusion on the data files of the same tables.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use datafusion::prelude::SessionContext;
use lake_query::client::SqlClient;
use lake_query::sql::tpch::{TABLES, queries};
use serde_json::{Value, json};

use super::{Bench, MAX_SCALE, Report, both, compare, median, plain_query, query, rows_of};

/// Under which name the directory that is kept says what was measured, for `compare-with-duckdb.py`.
const KEPT: &str = "tpch.json";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// TPC-H's scale factor
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// DataFusion looks at filters while it decodes, which it does not by itself: shows what that is worth
    #[arg(long)]
    pushdown_filters: bool,
}

pub async fn run(bench: &Bench, args: &Args) -> Result<Report> {
    ensure!(args.scale > 0.0 && args.scale <= MAX_SCALE, "--scale: above 0 and at most {MAX_SCALE} can be");
    let (sql, plain) = (bench.client().await?, bench.plain(args.pushdown_filters)?);
    let mut files = BTreeMap::new();
    for table in TABLES {
        query(&sql, &format!("CREATE TABLE {table} AS SELECT * FROM tpch('{table}', {})", args.scale)).await?;
        files.insert(table, bench.register(&sql, &plain, table).await?);
    }
    let queries = queries();
    let mut times = vec![(Vec::new(), Vec::new()); queries.len()];
    for round in 0..=bench.rounds {
        for (number, text) in queries.iter().enumerate() {
            let (lake, plain) = both(round + number, query(&sql, text), plain_query(&plain, text)).await?;
            compare(&format!("Q{}", number + 1), &lake.0, &plain.0)?;
            if round > 0 {
                times[number].0.push(lake.1);
                times[number].1.push(plain.1);
            }
        }
    }
    let times: Vec<(f64, f64)> = times.into_iter().map(|(lake, plain)| (median(lake), median(plain))).collect();
    let report = report(args, bench.rounds, &times);
    let kept = json!({ "files": files, "queries": queries, "report": report.json });
    let path = bench.dir.join(KEPT);
    std::fs::write(&path, kept.to_string()).with_context(|| format!("writing {}", path.display()))?;
    if bench.keep {
        explain(bench, &sql, &plain, &queries).await?;
    }
    Ok(report)
}

/// Leaves beside the figures where the time of each query goes, of both.
async fn explain(bench: &Bench, sql: &SqlClient, plain: &SessionContext, queries: &[String]) -> Result<()> {
    for (number, text) in queries.iter().enumerate() {
        let analyze = format!("EXPLAIN ANALYZE {text}");
        let (lake, plain) = (query(sql, &analyze).await?, plain_query(plain, &analyze).await?);
        for (who, rows) in [("lake", lake), ("datafusion", plain)] {
            let path = bench.dir.join(format!("Q{}-{who}.txt", number + 1));
            let text = rows_of(&rows)?.concat().join("\n");
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(())
}

/// `times`: of each query, in milliseconds, through the node and by DataFusion.
fn report(args: &Args, rounds: usize, times: &[(f64, f64)]) -> Report {
    let Args { scale, pushdown_filters } = args;
    let (lake, plain) = times.iter().fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    let row =
        |name: &str, (lake, plain): (f64, f64)| format!("{name:<6}{lake:>10.1}{plain:>12.1}{:>8.2}", lake / plain);
    let mut lines = vec![
        format!(
            "tpch at scale {scale}, medians of {rounds} rounds, in ms{}; all answers were the same",
            if *pushdown_filters { ", DataFusion with pushdown_filters" } else { "" }
        ),
        format!("{:<6}{:>10}{:>12}{:>8}", "", "lake", "datafusion", "ratio"),
    ];
    lines.extend(times.iter().enumerate().map(|(number, of)| row(&format!("Q{}", number + 1), *of)));
    lines.push(row("total", (lake, plain)));
    let queries: Vec<Value> = times
        .iter()
        .map(|(lake, plain)| json!({ "lake_ms": lake, "datafusion_ms": plain, "ratio": lake / plain }))
        .collect();
    let json = json!({
        "scale": scale,
        "rounds": rounds,
        "pushdown_filters": pushdown_filters,
        "lake_ms": lake,
        "datafusion_ms": plain,
        "ratio": lake / plain,
        "queries": queries,
    });
    Report { text: lines.join("\n"), json }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_of_all_queries() {
        let report = report(&Args { scale: 1.0, pushdown_filters: false }, 3, &[(30.0, 20.0), (10.0, 20.0)]);
        assert_eq!(report.json["ratio"], 1.0);
        assert_eq!(report.json["queries"][0]["ratio"], 1.5);
        let last = report.text.lines().next_back().unwrap();
        assert_eq!(last.split_whitespace().collect::<Vec<_>>(), ["total", "40.0", "40.0", "1.00"]);
    }
}
