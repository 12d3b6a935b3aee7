//! Rows of a table through REST, as PyIceberg reads and writes them: each such client has a Python process (`rest.py`), which is told what
//! to do and tells what came of it, a line of JSON each.
//!
//! The process ends with its standard input, and is killed when whoever holds it goes. No request of it takes longer than it is told;
//! one that does not answer in time is killed, and nobody knows what became of what it was at. Of its processes there are
//! [`MAX_REST_CLIENTS`] at most.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lake_client::clock;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::access::Roster;
use crate::history::{Change, Table, Write};
use crate::sql::{Failure, Value, What};

/// Most clients of a run that have a Python each.
pub const MAX_REST_CLIENTS: usize = 8;
/// How long Python may take to have PyIceberg ready: on a machine that is busy, from a disk that is cold.
const STARTS_WITHIN: Duration = Duration::from_secs(120);
/// How much longer than it is told it may take with what takes no request.
const GRACE: Duration = Duration::from_secs(2);
const SCRIPT: &str = include_str!("rest.py");

/// How clients speak REST. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Rest {
    /// A Python that has PyIceberg.
    pub python: PathBuf,
    /// So many of a run's clients do.
    pub clients: usize,
    /// Where query nodes serve it.
    pub nodes: Roster,
}

impl Rest {
    /// Whether its Python has PyIceberg.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub async fn check(&self) -> Result<(), Failure> {
        started(&self.python, SCRIPT).await.map(drop)
    }
}

/// Processes that nobody has taken yet: they are started before clients begin. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Ready(Arc<Mutex<Vec<Running>>>);

impl Ready {
    fn waiting(&self) -> MutexGuard<'_, Vec<Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one for each client there is to be.
    ///
    /// # Errors
    /// As [`PyIceberg::start`].
    pub(super) async fn fill(&self, rest: &Rest) -> Result<(), Failure> {
        let starting = (0..rest.clients).map(|_| started(&rest.python, SCRIPT));
        let all = futures::future::try_join_all(starting).await?;
        self.waiting().extend(all);
        Ok(())
    }
}

/// One client's process.
#[derive(Debug)]
pub(super) struct PyIceberg {
    rest: Rest,
    ready: Ready,
    /// What Python is to run.
    script: String,
    /// Taken out for as long as it is asked: who is not waited for any longer is killed.
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    /// Killed when dropped.
    _child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

#[derive(Debug, Serialize)]
struct Asked<'a> {
    op: &'a str,
    uri: String,
    table: &'a str,
    id: i64,
    values: Vec<i64>,
    /// In seconds.
    within: f64,
}

/// What it says first.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum First {
    /// The version of PyIceberg.
    Hello(String),
    Missing(String),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Told {
    Done { count: i64 },
    Rows(Shown),
    Failed { what: String, kind: String, message: String },
}

#[derive(Debug, Deserialize)]
struct Shown {
    /// Ids and values.
    rows: Vec<(Option<i64>, Option<i64>)>,
    snapshot: Option<i64>,
    sequence: Option<u64>,
}

/// All rows of a table.
#[derive(Debug)]
pub(super) struct Read {
    /// The values of each id, in order.
    pub rows: BTreeMap<i64, Vec<i64>>,
    /// A row without one or the other.
    pub foreign: Option<Vec<Value>>,
    pub snapshot: Option<i64>,
    pub sequence: Option<u64>,
}

impl PyIceberg {
    /// It has none yet.
    pub(super) fn new(rest: Rest, ready: Ready) -> Self {
        Self { rest, ready, script: SCRIPT.to_owned(), running: None }
    }

    /// Takes a process that is ready, or starts one, unless it has one.
    ///
    /// # Errors
    /// There is no such Python, or it has no PyIceberg; nothing was sent.
    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        if self.running.is_none() {
            self.running = self.ready.waiting().pop();
        }
        if self.running.is_none() {
            self.running = Some(started(&self.rest.python, &self.script).await?);
        }
        Ok(())
    }

    /// Makes a write at a query node, until `by`. Gives how many rows it changed.
    ///
    /// # Errors
    /// It was not made, or nobody knows.
    pub(super) async fn write(&mut self, table: &str, write: &Write, node: u64, by: Instant) -> Result<i64, Failure> {
        let op = match write.change {
            Change::Insert => "insert",
            Change::Update => "update",
            Change::Merge => "merge",
            Change::Delete => "delete",
        };
        let values = Table::values(write.number);
        match self.ask((op, table, write.id, values), node, by).await? {
            Told::Done { count } => Ok(count),
            told => Err(amiss(&told)),
        }
    }

    /// Reads a table at a query node, until `by`.
    ///
    /// # Errors
    /// It was not read.
    pub(super) async fn read(&mut self, table: &str, node: u64, by: Instant) -> Result<Read, Failure> {
        match self.ask(("read", table, 0, Vec::new()), node, by).await? {
            Told::Rows(Shown { rows: all, snapshot, sequence }) => {
                let mut rows = BTreeMap::<i64, Vec<i64>>::new();
                let mut foreign = None;
                for row in all {
                    match row {
                        (Some(id), Some(value)) => rows.entry(id).or_default().push(value),
                        (id, value) => foreign = Some([id, value].map(|n| n.map_or(Value::Null, Value::Int)).to_vec()),
                    }
                }
                rows.values_mut().for_each(|values| values.sort_unstable());
                Ok(Read { rows, foreign, snapshot, sequence })
            }
            told => Err(amiss(&told)),
        }
    }

    async fn ask(
        &mut self,
        (op, table, id, values): (&str, &str, i64, Vec<i64>),
        node: u64,
        by: Instant,
    ) -> Result<Told, Failure> {
        let known = self.rest.nodes.peers().into_iter().find(|(known, _)| *known == node);
        let (_, address) = known.ok_or_else(|| Failure::unreached(format!("query node {node} serves no REST")))?;
        let mut running = self.running.take().ok_or_else(|| Failure::unreached("PyIceberg was not started"))?;
        let within = by.saturating_duration_since(clock::now());
        let uri = format!("http://{address}");
        let asked = Asked { op, uri, table, id, values, within: within.as_secs_f64() };
        let line = serde_json::to_string(&asked).map_err(|e| Failure::unreached(e.to_string()))? + "\n";
        let answering = async {
            running.input.write_all(line.as_bytes()).await?;
            running.input.flush().await?;
            running.output.next_line().await
        };
        let ended = |why: String| Failure { what: What::Unknown, kind: "python".to_owned(), message: why };
        let line = match timeout(within + GRACE, answering).await {
            Err(_) => return Err(Failure::unanswered(within + GRACE)),
            Ok(Err(e)) => return Err(ended(format!("speaking to PyIceberg: {e}"))),
            Ok(Ok(None)) => return Err(ended("PyIceberg has ended by itself".to_owned())),
            Ok(Ok(Some(line))) => line,
        };
        self.running = Some(running);
        match serde_json::from_str(&line) {
            Ok(Told::Failed { what, kind, message }) => Err(Failure { what: what_of(&what), kind, message }),
            Ok(told) => Ok(told),
            Err(e) => Err(ended(format!("PyIceberg says {line:?}: {e}"))),
        }
    }
}

/// Starts a process, and waits until it has PyIceberg.
async fn started(python: &Path, script: &str) -> Result<Running, Failure> {
    let unusable = |why: String| {
        Failure::unreached(format!(
            "starting PyIceberg by {}: {why}; install pyiceberg[pyarrow] for a Python, as in a venv, and name that with --python",
            python.display()
        ))
    };
    let mut command = Command::new(python);
    command.args(["-c", script]).env("PYICEBERG_MAX_WORKERS", "2");
    // Query nodes are on this machine, whatever else is behind a proxy.
    command.env("NO_PROXY", "*").env("no_proxy", "*");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    // Of its own group: Ctrl-C on a terminal ends the run, which ends this.
    let mut child = command.process_group(0).kill_on_drop(true).spawn().map_err(|e| unusable(e.to_string()))?;
    let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(unusable("it has no standard input and output".to_owned()));
    };
    let mut running = Running { _child: child, input, output: BufReader::new(output).lines() };
    let late = |_| unusable(format!("it is not ready after {} s", STARTS_WITHIN.as_secs()));
    let said = timeout(STARTS_WITHIN, running.output.next_line()).await.map_err(late)?;
    let said = said.map_err(|e| unusable(e.to_string()))?;
    let said = said.ok_or_else(|| unusable("it ended without a word".to_owned()))?;
    match serde_json::from_str(&said) {
        Ok(First::Hello(version)) => {
            tracing::info!(%version, "PyIceberg is ready");
            Ok(running)
        }
        Ok(First::Missing(what)) => Err(unusable(what)),
        Err(_) => Err(unusable(format!("it says {said:?}"))),
    }
}

fn what_of(word: &str) -> What {
    match word {
        "conflict" => What::Conflict,
        "refused" => What::Refused,
        "not served" => What::NotServed,
        _ => What::Unknown,
    }
}

fn amiss(told: &Told) -> Failure {
    Failure { what: What::Unknown, kind: "python".to_owned(), message: format!("PyIceberg answers {told:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(python: &str, script: &str) -> PyIceberg {
        let nodes = Roster::new(vec![(1, "127.0.0.1:1".to_owned())]);
        let rest = Rest { python: python.into(), clients: 1, nodes };
        PyIceberg { script: script.to_owned(), ..PyIceberg::new(rest, Ready::default()) }
    }

    #[tokio::test]
    async fn what_is_missing_is_told_with_what_to_do() {
        for (python, why) in [("/nowhere/python3", "No such file"), ("/bin/true", "ended without a word")] {
            let mut client = by(python, SCRIPT);
            assert!(client.rest.check().await.unwrap_err().message.contains(why));
            let failure = client.start().await.unwrap_err();
            assert_eq!(failure.what, What::NotServed);
            assert!(failure.message.contains(python) && failure.message.contains(why), "{failure}");
            assert!(failure.message.contains("--python"), "{failure}");
        }
    }

    /// A shell in its place, which answers as it would.
    #[tokio::test]
    async fn what_it_says_is_what_came_of_a_write() {
        let said = [
            r#"{"hello": "1"}"#,
            r#"{"done": {"count": 3}}"#,
            r#"{"failed": {"what": "conflict", "kind": "CommitFailedException", "message": "late"}}"#,
            r#"{"rows": {"rows": [[7, 22], [null, 1], [7, 21]], "snapshot": 5, "sequence": 2}}"#,
        ];
        // It answers each line that it is told, and ends with the last one.
        let answers = said.map(|line| format!("echo '{line}'\n")).join("read line\n");
        let mut client = by("sh", &answers);
        client.start().await.unwrap();
        let deadline = clock::now() + Duration::from_secs(20);
        let write = Write { change: Change::Insert, table: 1.into(), id: 7, number: 7, once: false };
        assert_eq!(client.write("chaos.t", &write, 1, deadline).await.unwrap(), 3);
        let lost = client.write("chaos.t", &write, 1, deadline).await.unwrap_err();
        assert_eq!((lost.what, lost.kind.as_str()), (What::Conflict, "CommitFailedException"));
        let read = client.read("chaos.t", 1, deadline).await.unwrap();
        assert_eq!((read.rows[&7].as_slice(), read.snapshot, read.sequence), (&[21, 22][..], Some(5), Some(2)));
        assert_eq!(read.foreign, Some(vec![Value::Null, Value::Int(1)]));
        assert_eq!(client.read("chaos.t", 2, deadline).await.unwrap_err().what, What::NotServed);
        // It has ended; and what is not there any more is not asked.
        assert_eq!(client.read("chaos.t", 1, deadline).await.unwrap_err().what, What::Unknown);
        assert_eq!(client.read("chaos.t", 1, deadline).await.unwrap_err().what, What::NotServed);
    }
}
