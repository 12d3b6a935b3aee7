//! `lake bench sql`: SQL of a query node beside plain DataFusion of the same version, in one run.
//!
//! ```text
//! three peers, each a process -> a query node in this process, asked over Flight SQL on loopback
//!                             -> DataFusion in this process, with as many partitions and as much memory
//!                             -> rounds, in which the two take turns; what they answer must be the same
//! ```
//! The node is in this process so that what it counts can be read. Figures are medians over the rounds.
//!
//! - [`tpch`]: the 22 queries on the very same Parquet files; [`compare-with-duckdb.py`](compare-with-duckdb.py) runs them in DuckDB;
//! - [`plan`]: planning a query on very many data files;
//! - [`points`]: queries for one row each, and how often they ask the metadata cluster;
//! - [`insert`]: INSERT of very many rows, beside COPY to plain Parquet.
//!
//! Limits: [`MAX_ROUNDS`], and those of each part. An answer that differs ends the run with an error; a figure that is missed does not.

mod insert;
mod plan;
mod points;
mod tpch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use arrow::array::RecordBatch;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
use lake_chaos::{Cluster, Role, Spec};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_query::client::SqlClient;
use lake_query::sql::tpch::TpchFunction;
use lake_query::{Config, Options, QueryNode};
use serde_json::Value;

/// Most rounds of one run.
const MAX_ROUNDS: usize = 1000;
/// Largest scale factor of TPC-H: more would not fit where this is run.
const MAX_SCALE: f64 = 100.0;
/// How long one statement may take.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// Options of `lake bench sql`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    part: Part,
    /// Directory for everything, which must not exist yet; removed afterwards
    #[arg(long, value_name = "DIR", default_value = "lake-bench-sql", global = true)]
    dir: PathBuf,
    /// The directory stays
    #[arg(long, global = true)]
    keep: bool,
    /// Rounds measured, behind one that is not
    #[arg(long, default_value_t = 3, global = true)]
    rounds: usize,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t = Format::Text, global = true)]
    format: Format,
}

#[derive(Debug, clap::Subcommand)]
enum Part {
    /// The 22 queries of TPC-H, on the same files
    Tpch(tpch::Args),
    /// EXPLAIN of a query for few of very many data files, with caches that are empty and that are warm
    Plan(plan::Args),
    /// Queries for one row each, over warm caches
    Points(points::Args),
    /// INSERT of TPC-H's lineitem, beside COPY to plain Parquet
    Insert(insert::Args),
}

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

/// What came of a part.
pub struct Report {
    text: String,
    json: Value,
}

/// Measures a part and prints what came of it.
///
/// # Errors
/// Something does not start, a statement fails, or answers differ.
pub async fn run(args: Args) -> Result<()> {
    ensure!((1..=MAX_ROUNDS).contains(&args.rounds), "--rounds: 1 to {MAX_ROUNDS} can be");
    let dir = std::path::absolute(&args.dir)
        .with_context(|| format!("finding out the absolute path of {}", args.dir.display()))?;
    ensure!(!dir.exists(), "--dir: {} is there already; name a directory that is not", dir.display());
    let measured = measure(&args, &dir).await;
    if !args.keep && dir.exists() {
        tokio::fs::remove_dir_all(&dir).await.with_context(|| format!("removing {}", dir.display()))?;
    }
    let report = measured?;
    match args.format {
        Format::Text => println!("{}", report.text),
        Format::Json => println!("{}", report.json),
    }
    Ok(())
}

async fn measure(args: &Args, dir: &Path) -> Result<Report> {
    let mut bench = Bench::start(args, dir).await?;
    let measured = match &args.part {
        Part::Tpch(part) => tpch::run(&bench, part).await,
        Part::Plan(part) => plan::run(&mut bench, part).await,
        Part::Points(part) => points::run(&bench, part).await,
        Part::Insert(part) => insert::run(&bench, part).await,
    };
    bench.stop().await;
    measured
}

/// What is measured, running.
pub struct Bench {
    dir: PathBuf,
    keep: bool,
    rounds: usize,
    peers: Cluster,
    node: QueryNode,
    config: Config,
    /// Nodes that were started.
    nodes: u64,
}

impl Bench {
    async fn start(args: &Args, dir: &Path) -> Result<Self> {
        let binary = std::env::current_exe().context("finding out which program this is")?;
        let spec = Spec { query_nodes: 0, log_level: Some("warn".to_owned()), ..Spec::new(binary, dir) };
        let peers = Cluster::start(spec).await?;
        match start_node(dir, &peers, 1).await {
            Ok((node, config)) => {
                let (keep, rounds) = (args.keep, args.rounds);
                Ok(Self { dir: dir.to_owned(), keep, rounds, peers, node, config, nodes: 1 })
            }
            Err(error) => {
                peers.shutdown().await;
                Err(error)
            }
        }
    }

    async fn stop(self) {
        self.node.shutdown().await;
        self.peers.shutdown().await;
    }

    /// Another node takes the place of this one. Its caches are empty.
    async fn fresh_node(&mut self) -> Result<()> {
        self.nodes += 1;
        let (node, config) = start_node(&self.dir, &self.peers, self.nodes).await?;
        self.config = config;
        std::mem::replace(&mut self.node, node).shutdown().await;
        Ok(())
    }

    /// A connection to the node.
    async fn client(&self) -> Result<SqlClient> {
        Ok(SqlClient::connect(&[self.node.flight_address().to_string()], None).await?)
    }

    /// DataFusion as it comes, but for what the node is configured for; with `pushdown_filters` it looks at filters while it decodes, as
    /// the node does.
    fn plain(&self, pushdown_filters: bool) -> Result<SessionContext> {
        let mut session = SessionConfig::new().with_target_partitions(self.config.target_partitions);
        // As the node reads SQL, so that answers can be compared digit by digit.
        session.options_mut().sql_parser.parse_float_as_decimal = true;
        session.options_mut().execution.parquet.pushdown_filters = pushdown_filters;
        session.options_mut().execution.parquet.reorder_filters = pushdown_filters;
        let runtime = RuntimeEnvBuilder::new().with_memory_limit(self.config.memory_limit_bytes, 1.0).build_arc()?;
        let context = SessionContext::new_with_config_rt(session, runtime);
        context.register_udtf("tpch", Arc::new(TpchFunction));
        Ok(context)
    }

    /// The data files of a table, as paths.
    async fn files(&self, sql: &SqlClient, table: &str) -> Result<Vec<PathBuf>> {
        let listed = query(sql, &format!("SELECT file_path FROM \"{table}$files\"")).await?;
        let path = |row: Vec<String>| {
            let location = row.into_iter().next().unwrap_or_default();
            let path = location.strip_prefix("file://").map(PathBuf::from);
            path.with_context(|| format!("the data file {location} of {table} is no local one"))
        };
        rows_of(&listed)?.into_iter().map(path).collect()
    }

    /// Has DataFusion read the very files of a table, under the table's name.
    ///
    /// # Errors
    /// The table has none, or there are others beside them.
    async fn register(&self, sql: &SqlClient, plain: &SessionContext, table: &str) -> Result<Vec<PathBuf>> {
        let files = self.files(sql, table).await?;
        let dir = files.first().and_then(|file| file.parent());
        let dir = dir.with_context(|| format!("{table} has no data files"))?;
        let there = std::fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?.count();
        ensure!(there == files.len(), "{} has {there} files, of which {table} has {}", dir.display(), files.len());
        plain.register_parquet(table, format!("{}/", dir.display()), ParquetReadOptions::default()).await?;
        Ok(files)
    }
}

async fn start_node(dir: &Path, peers: &Cluster, number: u64) -> Result<(QueryNode, Config)> {
    let options = Options {
        id: Some(format!("bench-{number}")),
        // Upkeep of the tables would be measured as well.
        roles: Some(vec!["query".to_owned()]),
        dir: Some(dir.join(format!("query-{number}"))),
        listen: Some("127.0.0.1:0".to_owned()),
        warehouse: Some(format!("file://{}", dir.join("warehouse").display())),
        read_timeout_secs: Some(TIMEOUT.as_secs()),
        write_timeout_secs: Some(TIMEOUT.as_secs()),
        ..Options::default()
    };
    let config = Config::new(options)?;
    let store = RemoteStore::connect(RemoteConfig { endpoints: peers.endpoints(Role::Metasrv), secret: None })?;
    Ok((QueryNode::start_in_cluster(config.clone(), store).await?, config))
}

/// What the node answers.
async fn query(sql: &SqlClient, statement: &str) -> Result<Vec<RecordBatch>> {
    sql.query(statement, Some(TIMEOUT)).await.with_context(|| format!("the query node, asked: {statement}"))
}

/// What DataFusion answers; in a task, as the node's own are.
async fn plain_query(context: &SessionContext, statement: &str) -> Result<Vec<RecordBatch>> {
    let (context, text) = (context.clone(), statement.to_owned());
    let answer = tokio::spawn(async move { context.sql(&text).await?.collect().await }).await?;
    answer.with_context(|| format!("DataFusion, asked: {statement}"))
}

/// What something gives, and how long it takes, in milliseconds.
async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<(T, f64)> {
    let started = Instant::now();
    let done = work.await?;
    Ok((done, started.elapsed().as_secs_f64() * 1000.0))
}

/// The node's answer and DataFusion's, one after the other, each with its time. Who is first changes with `turn`.
async fn both<A, B>(
    turn: usize,
    lake: impl Future<Output = Result<A>>,
    plain: impl Future<Output = Result<B>>,
) -> Result<((A, f64), (B, f64))> {
    match turn.is_multiple_of(2) {
        true => {
            let lake = timed(lake).await?;
            Ok((lake, timed(plain).await?))
        }
        false => {
            let plain = timed(plain).await?;
            Ok((timed(lake).await?, plain))
        }
    }
}

/// The rows as text, in an order of their own: where a query leaves theirs open they may come in any.
fn rows_of(batches: &[RecordBatch]) -> Result<Vec<Vec<String>>> {
    let options = FormatOptions::default().with_null("NULL");
    let mut rows = Vec::new();
    for batch in batches {
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &options));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        for row in 0..batch.num_rows() {
            rows.push(columns.iter().map(|column| column.value(row).to_string()).collect::<Vec<_>>());
        }
    }
    rows.sort();
    Ok(rows)
}

/// # Errors
/// The two have not answered the same.
fn compare(what: &str, lake: &[RecordBatch], plain: &[RecordBatch]) -> Result<()> {
    let (lake, plain) = (rows_of(lake)?, rows_of(plain)?);
    if let Some((ours, theirs)) = lake.iter().zip(&plain).find(|(ours, theirs)| ours != theirs) {
        bail!("{what}: the query node answers {ours:?}, and DataFusion {theirs:?}");
    }
    ensure!(
        lake.len() == plain.len(),
        "{what}: the query node answers {} rows, and DataFusion {}",
        lake.len(),
        plain.len()
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len().is_multiple_of(2)) {
        (None, _) => 0.0,
        (Some(value), false) => *value,
        (Some(value), true) => (values[middle - 1] + value) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};

    use super::*;

    #[test]
    fn what_differs_is_told() {
        let rows = |values: Vec<i64>| {
            let column: ArrayRef = Arc::new(Int64Array::from(values));
            vec![RecordBatch::try_from_iter([("a", column)]).unwrap()]
        };
        assert!(compare("Q1", &rows(vec![2, 1]), &rows(vec![1, 2])).is_ok());
        let other = compare("Q1", &rows(vec![1, 2]), &rows(vec![1, 3])).unwrap_err().to_string();
        assert!(other.contains("Q1: the query node answers [\"2\"], and DataFusion [\"3\"]"), "{other}");
        assert!(compare("Q1", &rows(vec![1]), &rows(vec![1, 2])).unwrap_err().to_string().contains("1 rows"));
    }

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0]), median(Vec::new())), (2.0, 2.5, 0.0));
    }
}
