//! Random sequences of statements, against the same sequence played on rows in memory by plain DataFusion.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Schema};
use datafusion::datasource::MemTable;
use datafusion::prelude::{SessionConfig, SessionContext};
use lake_client::memory::MemoryStore;
use lake_query::Options;
use lake_query::client::SqlClient;

use crate::common::*;

const MERGE_ON_READ: &str = "'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read', \
     'write.merge.mode' = 'merge-on-read'";

/// Rows in memory. Each statement is a query over the rows of before.
struct Model {
    rows: Vec<RecordBatch>,
}

const COLUMNS: &str = "CAST(id AS BIGINT) AS id, CAST(a AS INT) AS a, CAST(b AS VARCHAR) AS b, CAST(f AS DOUBLE) AS f";

impl Model {
    async fn new() -> Self {
        let mut model = Self { rows: Vec::new() };
        let empty = format!("SELECT {COLUMNS} FROM (SELECT 1 AS id, 1 AS a, 'x' AS b, 1e0 AS f)");
        let rows = SessionContext::new().sql(&empty).await.unwrap().collect().await.unwrap();
        let nullable = |field: &Arc<Field>| field.as_ref().clone().with_nullable(true);
        let schema = Schema::new(rows[0].schema().fields().iter().map(nullable).collect::<Vec<_>>());
        model.rows = vec![RecordBatch::new_empty(Arc::new(schema))];
        model
    }

    async fn query(&self, sql: &str) -> Vec<RecordBatch> {
        // In one part, so that rows are numbered the same each time.
        let context = SessionContext::new_with_config(SessionConfig::new().with_target_partitions(1));
        let table = MemTable::try_new(self.rows[0].schema(), vec![self.rows.clone()]).unwrap();
        context.register_table("t", Arc::new(table)).unwrap();
        let rows = context.sql(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}")).collect().await;
        rows.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// The rows are now those of a query.
    async fn set(&mut self, sql: &str) {
        let schema = self.rows[0].schema();
        let rows = self.query(&format!("SELECT {COLUMNS} FROM ({sql})")).await;
        let cast = |batch: &RecordBatch| RecordBatch::try_new(schema.clone(), batch.columns().to_vec()).unwrap();
        self.rows = rows.iter().map(cast).collect();
        if self.rows.is_empty() {
            self.rows = vec![RecordBatch::new_empty(schema)];
        }
    }

    async fn insert(&mut self, rows: &str) {
        self.set(&format!("SELECT * FROM t UNION ALL SELECT * FROM (VALUES {rows}) AS v(id, a, b, f)")).await;
    }
}

/// A small generator: the sequence of a seed is always the same.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len() as u64) as usize]
    }

    fn rows(&mut self) -> String {
        let count = 1 + self.below(6);
        let rows: Vec<String> = (0..count)
            .map(|_| {
                let id = match self.below(12) {
                    0 => "NULL".to_owned(),
                    _ => self.below(30).to_string(),
                };
                let a = self.pick(&["NULL", "0", "1", "-5", "7"]);
                let b = self.pick(&[
                    "NULL",
                    "''",
                    "'x'",
                    "'yy'",
                    "'a long text that is cut in no bound at all, whatever its length may be, or so'",
                ]);
                let f = self.pick(&["NULL", "CAST('NaN' AS DOUBLE)", "5e-1", "-1e10", "1e300"]);
                format!("({id}, {a}, {b}, {f})")
            })
            .collect();
        rows.join(", ")
    }

    fn condition(&mut self) -> String {
        let (low, high) = (self.below(30), self.below(30));
        let simple = [
            format!("id = {low}"),
            format!("id BETWEEN {low} AND {high}"),
            format!("NOT (id > {low})"),
            "a IS NULL".to_owned(),
            "a < 1 OR b = 'x'".to_owned(),
            format!("f > 1e-1 AND id < {high}"),
            "b LIKE 'a long%'".to_owned(),
            format!("id % 5 = {}", low % 5),
            "id IN (SELECT id + 1 FROM t WHERE a = 7)".to_owned(),
            format!("EXISTS (SELECT 1 FROM t AS u WHERE u.id = t.id + {low})"),
            "f = 'NaN'".to_owned(),
            "coalesce(b, 'none') <> 'yy'".to_owned(),
        ];
        simple[self.below(simple.len() as u64) as usize].clone()
    }
}

/// Begins a transaction of the first client, or commits it: made anew on what the other one has added meanwhile.
async fn begin_or_commit(
    clients: &[SqlClient; 2],
    open: &mut bool,
    model: &mut Model,
    random: &mut Random,
) -> Vec<String> {
    *open = !*open;
    if *open {
        run(&clients[0], "BEGIN").await;
        return vec!["BEGIN".to_owned()];
    }
    let rows = random.rows();
    let insert = format!("INSERT INTO t VALUES {rows}");
    run(&clients[1], &insert).await;
    run(&clients[0], "COMMIT").await;
    model.insert(&rows).await;
    vec![format!("{insert} (by the other client)"), "COMMIT".to_owned()]
}

async fn play(seed: u64, steps: usize, properties: &str, in_transactions: bool) {
    // Every pointer is looked at anew, so that a node sees what the other has just done.
    let store = Arc::new(MemoryStore::new());
    let cluster = Cluster::over(store, 2, |options| Options { pointer_ttl_ms: Some(0), ..options }).await;
    let clients = [cluster.client(0).await, cluster.client(1).await];
    run(&clients[0], &format!("CREATE TABLE t (id BIGINT, a INT, b VARCHAR, f DOUBLE) {properties}")).await;
    let mut model = Model::new().await;
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut played = Vec::new();
    let mut open = false;
    for _ in 0..steps {
        if in_transactions && random.below(4) == 0 {
            played.extend(begin_or_commit(&clients, &mut open, &mut model, &mut random).await);
        }
        let sql = match random.below(17) {
            0..=5 => {
                let rows = random.rows();
                model.insert(&rows).await;
                format!("INSERT INTO t VALUES {rows}")
            }
            6..=8 => {
                let condition = random.condition();
                // Rows found, by number, are left out.
                model
                    .set(&format!(
                        "WITH n AS (SELECT *, row_number() OVER () AS n FROM t), gone AS (SELECT n FROM n AS t WHERE {condition}) \
                         SELECT id, a, b, f FROM n WHERE n.n NOT IN (SELECT n FROM gone)"
                    ))
                    .await;
                format!("DELETE FROM t WHERE {condition}")
            }
            9..=11 => {
                let condition = random.condition();
                let set = [("a", "coalesce(a, 0) + 1"), ("b", "concat(b, 'z')"), ("id", "id + 1"), ("f", "NULL")];
                let (column, value) = set[random.below(4) as usize];
                let columns: Vec<String> = ["id", "a", "b", "f"]
                    .iter()
                    .map(|name| match *name == column {
                        true => format!("CASE WHEN found.n IS NOT NULL THEN {value} ELSE {name} END AS {name}"),
                        false => (*name).to_owned(),
                    })
                    .collect();
                model
                    .set(&format!(
                        "WITH n AS (SELECT *, row_number() OVER () AS n FROM t), found AS (SELECT n FROM n AS t WHERE {condition}) \
                         SELECT {} FROM n LEFT JOIN found ON n.n = found.n",
                        columns.join(", ")
                    ))
                    .await;
                format!("UPDATE t SET {column} = {value} WHERE {condition}")
            }
            12..=13 => {
                let ids: std::collections::BTreeSet<u64> = (0..4).map(|_| random.below(40)).collect();
                let rows: Vec<String> = ids.iter().map(|id| format!("({id}, {})", random.below(9))).collect();
                let source = format!("(VALUES {}) AS s(id, a)", rows.join(", "));
                model
                    .set(&format!(
                        "SELECT t.id, CASE WHEN s.id IS NOT NULL THEN s.a + coalesce(t.a, 0) ELSE t.a END AS a, b, f FROM t LEFT \
                         JOIN {source} ON t.id = s.id WHERE s.id IS NULL OR s.a % 3 <> 0 \
                         UNION ALL SELECT s.id, s.a, NULL, NULL FROM {source} WHERE s.id NOT IN (SELECT id FROM t WHERE id IS NOT NULL)"
                    ))
                    .await;
                format!(
                    "MERGE INTO t USING {source} ON t.id = s.id WHEN MATCHED AND s.a % 3 = 0 THEN DELETE \
                     WHEN MATCHED THEN UPDATE SET a = s.a + coalesce(t.a, 0) WHEN NOT MATCHED THEN INSERT (id, a) VALUES (s.id, s.a)"
                )
            }
            14 => {
                model.set("SELECT * FROM t WHERE id < 20").await;
                "INSERT OVERWRITE t SELECT * FROM t WHERE id < 20".to_owned()
            }
            // Inside of a transaction it is refused.
            15 if !open => "CALL system.rewrite_data_files('t', 2)".to_owned(),
            _ => {
                let kept = random.below(4) > 0;
                model.set(&format!("SELECT * FROM t WHERE {kept}")).await;
                match kept {
                    true => "DELETE FROM t WHERE false".to_owned(),
                    false => "TRUNCATE TABLE t".to_owned(),
                }
            }
        };
        let client = &clients[if open { 0 } else { random.below(2) as usize }];
        run(client, &sql).await;
        played.push(sql);
        let mut expected = rows_of(&model.query("SELECT * FROM t").await);
        expected.sort();
        let mut found = text(client, "SELECT * FROM t").await;
        found.sort();
        assert_eq!(found, expected, "seed {seed} {properties}, after\n{}", played.join(";\n"));
        let count = number(client, "SELECT count(*) FROM t").await;
        assert_eq!(count as usize, expected.len(), "seed {seed} {properties}, after\n{}", played.join(";\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_statements_leave_what_they_leave_in_memory() {
    for (seed, properties) in [
        (1, String::new()),
        (2, "WITH ('format-version' = '3')".to_owned()),
        (3, format!("WITH ({MERGE_ON_READ})")),
        (4, format!("WITH ({MERGE_ON_READ}, 'write.delete.granularity' = 'partition')")),
        (5, format!("WITH ({MERGE_ON_READ}, 'format-version' = '3')")),
    ] {
        play(seed, 40, &properties, false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_transactions_leave_what_they_leave_in_memory() {
    for (seed, properties) in [
        (6, String::new()),
        (7, format!("WITH ({MERGE_ON_READ})")),
        (8, format!("WITH ({MERGE_ON_READ}, 'write.delete.granularity' = 'partition')")),
        (9, format!("WITH ({MERGE_ON_READ}, 'format-version' = '3')")),
    ] {
        play(seed, 40, &properties, true).await;
    }
}
