//! Queries for one row each, over warm caches: how many a second, and how often they ask the metadata cluster. Confirmations, by which a
//! node knows that none of its pointers is too old, are told apart: there are as many with one query as with all. Counting begins behind
//! the first query of a round: nobody confirms while nobody asks (DataFusion's turn), and who comes then has to ask.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use datafusion::prelude::SessionContext;
use hdrhistogram::Histogram;
use lake_client::cache::counters::{Counters, REASONS, Reason};
use lake_query::client::SqlClient;
use serde_json::json;
use tokio::task::JoinSet;

use super::{Bench, Report, both, median, plain_query, query};

const TABLE: &str = "points";
const MAX_QUERIES: u64 = 10_000_000;
const MAX_CLIENTS: u64 = 1024;
const MAX_ROWS: u64 = 1_000_000_000;
/// What the second column is of the first.
const FACTOR: i64 = 7;
/// Rows that are asked for one after the other are so far apart: it divides no number of rows that people name.
const STRIDE: u64 = 611_953;
/// The longest latency that is told apart, in microseconds.
const MAX_LATENCY_US: u64 = 60_000_000;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Queries of a round
    #[arg(long, default_value_t = 10_000)]
    queries: u64,
    /// Clients, each of which waits for its answer before it asks again
    #[arg(long, default_value_t = 8)]
    clients: u64,
    /// Rows of the table
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
}

/// Whom one client asks.
#[derive(Clone)]
enum Asked {
    Lake(Box<SqlClient>),
    Plain(SessionContext),
}

impl Asked {
    async fn ask(&self, statement: &str) -> Result<Vec<RecordBatch>> {
        match self {
            Asked::Lake(sql) => query(sql, statement).await,
            Asked::Plain(context) => plain_query(context, statement).await,
        }
    }
}

pub async fn run(bench: &Bench, args: &Args) -> Result<Report> {
    ensure!((1..=MAX_QUERIES).contains(&args.queries), "--queries: 1 to {MAX_QUERIES} can be");
    ensure!((1..=MAX_CLIENTS).contains(&args.clients), "--clients: 1 to {MAX_CLIENTS} can be");
    ensure!((1..=MAX_ROWS).contains(&args.rows), "--rows: 1 to {MAX_ROWS} can be");
    let (sql, plain) = (bench.client().await?, bench.plain(false)?);
    let rows = args.rows;
    let create = format!(
        "CREATE TABLE {TABLE} AS SELECT value AS id, value * {FACTOR} AS other FROM generate_series(1, {rows}) ORDER BY id"
    );
    query(&sql, &create).await?;
    bench.register(&sql, &plain, TABLE).await?;
    let mut lake = Vec::new();
    for _ in 0..args.clients {
        lake.push(Asked::Lake(Box::new(bench.client().await?)));
    }
    let plain = vec![Asked::Plain(plain); lake.len()];
    let metadata = &bench.node.engine().tables().metadata;
    let (mut lake_rates, mut plain_rates) = (Vec::new(), Vec::new());
    let mut latencies_us = Histogram::new_with_bounds(1, MAX_LATENCY_US, 3)?;
    let mut calls: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut hits, mut rounds) = (0, Duration::ZERO);
    for round in 0..=bench.rounds {
        let of_lake = async {
            query(&sql, &format!("SELECT other FROM {TABLE} WHERE id = 1")).await?;
            let before = metadata.counters();
            let measured = ask_all(&lake, args).await.context("the query node")?;
            Ok((before, measured, metadata.counters()))
        };
        let of_plain = async { ask_all(&plain, args).await.context("DataFusion") };
        let (((before, measured, after), _), (of_plain, _)) = both(round, of_lake, of_plain).await?;
        if round > 0 {
            lake_rates.push(measured.per_second(args.queries));
            plain_rates.push(of_plain.per_second(args.queries));
            latencies_us.add(&measured.latencies_us)?;
            add_calls(&mut calls, &before, &after);
            hits += after.hits - before.hits;
            rounds += measured.took;
        }
    }
    let (lake, plain) = (median(lake_rates), median(plain_rates));
    let confirmations = calls.remove(Reason::Confirm.name()).unwrap_or(0);
    let of_queries: u64 = calls.values().sum();
    let ms = |quantile| latencies_us.value_at_quantile(quantile) as f64 / 1000.0;
    let text = format!(
        "points: {} rounds of {} queries, {} clients, {rows} rows: {lake:.0} per second, p50 {:.2} ms, p99 {:.2} ms; DataFusion in this \
         process {plain:.0} per second; in {:.1} s {of_queries} metasrv calls ({}) besides {confirmations} confirmations of all pointers, \
         {hits} pointers from the cache; all answers were right",
        bench.rounds,
        args.queries,
        args.clients,
        ms(0.5),
        ms(0.99),
        rounds.as_secs_f64(),
        told(&calls),
    );
    let json = json!({
        "rounds": bench.rounds,
        "queries": args.queries,
        "clients": args.clients,
        "rows": rows,
        "lake_per_second": lake,
        "p50_ms": ms(0.5),
        "p99_ms": ms(0.99),
        "datafusion_per_second": plain,
        "metasrv_calls": of_queries,
        "metasrv_calls_by_reason": calls,
        "confirmations": confirmations,
        "seconds": rounds.as_secs_f64(),
        "hits": hits,
    });
    Ok(Report { text, json })
}

/// Calls to the metadata cluster between two moments, by reason; those that there were none of are left out.
fn add_calls(calls: &mut BTreeMap<&'static str, u64>, before: &Counters, after: &Counters) {
    for reason in REASONS {
        let made = after.calls(reason).saturating_sub(before.calls(reason));
        if made > 0 {
            *calls.entry(reason.name()).or_default() += made;
        }
    }
}

fn told(calls: &BTreeMap<&str, u64>) -> String {
    match calls.is_empty() {
        true => "of no kind".to_owned(),
        false => calls.iter().map(|(reason, calls)| format!("{reason} {calls}")).collect::<Vec<_>>().join(", "),
    }
}

/// One round of one of the two.
struct Measured {
    took: Duration,
    latencies_us: Histogram<u64>,
}

impl Measured {
    fn per_second(&self, queries: u64) -> f64 {
        queries as f64 / self.took.as_secs_f64()
    }
}

/// Asks all queries of a round, spread over the clients.
async fn ask_all(clients: &[Asked], args: &Args) -> Result<Measured> {
    let started = Instant::now();
    let mut asking = JoinSet::new();
    for (client, asked) in (0..).zip(clients.iter().cloned()) {
        let numbers = (client..args.queries).step_by(clients.len());
        let rows = args.rows;
        asking.spawn(async move {
            let mut latencies_us = Histogram::<u64>::new_with_bounds(1, MAX_LATENCY_US, 3)?;
            for number in numbers {
                let id = i64::try_from(number.wrapping_mul(STRIDE) % rows)? + 1;
                let began = Instant::now();
                let answer = asked.ask(&format!("SELECT other FROM {TABLE} WHERE id = {id}")).await?;
                let us = began.elapsed().as_micros().min(u128::from(MAX_LATENCY_US)) as u64;
                latencies_us.record(us.max(1))?;
                let found: Vec<i64> = answer
                    .iter()
                    .flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec())
                    .collect();
                ensure!(found == [id * FACTOR], "row {id} has {} and was answered as {found:?}", id * FACTOR);
            }
            Ok::<_, anyhow::Error>(latencies_us)
        });
    }
    let mut latencies_us = Histogram::new_with_bounds(1, MAX_LATENCY_US, 3)?;
    while let Some(counted) = asking.join_next().await {
        latencies_us.add(&counted.context("a client ended")??)?;
    }
    Ok(Measured { took: started.elapsed(), latencies_us })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_by_reason() {
        let mut calls = BTreeMap::new();
        assert_eq!(told(&calls), "of no kind");
        add_calls(&mut calls, &Counters::default(), &Counters::default());
        assert!(calls.is_empty());
        calls.insert("refresh", 2);
        calls.insert("miss", 1);
        assert_eq!(told(&calls), "miss 1, refresh 2");
    }
}
