//! Library mode: tables whose metadata is in a directory or a bucket, and no process of lake's that has to run.

use std::path::Path;
use std::process::Output;

use crate::common::{LAKE, Scratch};

/// Tables, as a process finds them that knows of nobody else.
pub struct Library {
    meta: String,
    warehouse: String,
    variables: Vec<(String, String)>,
}

impl Library {
    pub fn new(meta: impl Into<String>, warehouse: impl Into<String>) -> Self {
        Self { meta: meta.into(), warehouse: warehouse.into(), variables: Vec::new() }
    }

    /// The same, with these environment variables for each process.
    pub fn with(mut self, variables: &[(&str, &str)]) -> Self {
        self.variables.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// What a process comes to that runs these statements.
    async fn run(&self, statements: &str) -> Output {
        let mut command = tokio::process::Command::new(LAKE);
        command.args([
            "sql",
            "--meta",
            &self.meta,
            "--warehouse",
            &self.warehouse,
            "--format",
            "csv",
            "-c",
            statements,
        ]);
        command.envs(self.variables.iter().cloned()).kill_on_drop(true);
        command.output().await.unwrap()
    }

    /// What it prints, without the line that names the columns.
    async fn done(&self, statements: &str) -> Vec<String> {
        let output = self.run(statements).await;
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{statements}: {told}");
        String::from_utf8(output.stdout).unwrap().lines().skip(1).map(str::to_owned).collect()
    }

    /// What a process comes to that runs a file.
    async fn run_file(&self, file: &Path) -> Output {
        let mut command = tokio::process::Command::new(LAKE);
        command.args(["sql", "--meta", &self.meta, "--warehouse", &self.warehouse, "-f"]).arg(file);
        command.envs(self.variables.iter().cloned()).kill_on_drop(true);
        command.output().await.unwrap()
    }

    async fn refused(&self, statement: &str, why: &str) {
        let output = self.run(statement).await;
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(why), "{statement}: {told}");
    }

    pub async fn holds_what_processes_write_that_know_of_nobody(&self) {
        const WRITERS: usize = 3;
        self.done("CREATE SCHEMA s; CREATE TABLE s.t (writer BIGINT, n BIGINT);").await;
        let writers = (0..WRITERS).map(|writer| async move {
            let inserts: String = (0..4).map(|n| format!("INSERT INTO s.t VALUES ({writer}, {n});")).collect();
            self.done(&inserts).await;
        });
        futures::future::join_all(writers).await;
        let rows = self.done("SELECT writer, count(*), sum(n) FROM s.t GROUP BY writer ORDER BY writer;").await;
        assert_eq!(rows, (0..WRITERS).map(|writer| format!("{writer},4,6")).collect::<Vec<_>>());
        self.done("DELETE FROM s.t WHERE writer = 1; CREATE TABLE s.u AS SELECT * FROM s.t;").await;
        assert_eq!(self.done("SELECT count(*) FROM s.u JOIN s.t USING (writer, n);").await, ["8"]);
        self.refused("ALTER TABLE s.t RENAME TO s.v;", "one key at a time").await;
        self.refused("DROP SCHEMA s CASCADE;", "drop the tables in it").await;
        self.refused("BEGIN; SELECT 1;", "a transaction needs a cluster").await;
        self.refused("SET lake.operation_id = 'a';", "an operation id needs a cluster").await;
        self.done("DROP TABLE s.t;").await;
        self.refused("SELECT * FROM s.t;", "s.t").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_need_no_process() {
    let scratch = Scratch::new();
    let url = |name: &str| format!("file://{}", scratch.path(name).display());
    Library::new(url("meta"), url("tables")).holds_what_processes_write_that_know_of_nobody().await;
    let library = Library::new(url("meta"), url("tables"));
    let (outer, inner) = (scratch.path("outer.sql"), scratch.path("inner.sql"));
    std::fs::write(&outer, format!("\\x\n\\i {}\nSELECT 3;\n", inner.display())).unwrap();
    std::fs::write(
        &inner,
        "CREATE TABLE told (a INT COMMENT 'first') PARTITIONED BY (a);\n\\d told\nSELECT 1;\nSELECT a,\n  nope FROM told;\n",
    )
    .unwrap();
    let output = library.run_file(&outer).await;
    let (out, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && told.contains(&format!("{}:5:   nope FROM told", inner.display())), "{told}");
    assert!(out.contains("comment     | first\n") && out.contains("default-partition-spec: a\n"), "{out}");
    assert!(out.ends_with("-[ 1 ]-\n1 | 1\n"), "what follows an error is not run: {out}");
    let nowhere = Library::new("nowhere", url("tables"));
    nowhere.refused("SELECT 1;", "meta: ").await;
}
