//! `lake chaos matrix`: several fault runs, one after the other, and one page over them.
//!
//! Each run is a process of its own, `lake chaos run`, in a process group of its own: a Ctrl-C reaches this one alone, which has the
//! run end in order. However this one ends, the run's standard input ends with it, and so does the run. On a cluster of others it takes as
//! long for that as it needs to take back what it has done: it is killed after that only.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lake_chaos::history::Workload;
use lake_chaos::hosts::Hosts;
use lake_chaos::matrix::{self, Chosen, Pair};
use lake_chaos::report::index::{self, Entry};
use lake_chaos::report::results;
use lake_chaos::run::{ObjectStore, Place, ending};
use lake_chaos::workload::access::Roster;
use lake_chaos::workload::rest::{MAX_REST_CLIENTS, Rest};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::sleep;

use super::run::{self, EXIT_WITH_PARENT, Where};
use crate::columns::columns;
use crate::output;
use crate::signals::StopRequests;

/// Longest matrix, in minutes.
const MAX_MINUTES: f64 = 24.0 * 60.0;
/// How much longer than its clients a run may take. Everything in it is bounded; this is for what is not.
const BEYOND: Duration = Duration::from_secs(1_200);
/// How long a run of a cluster of its own may take to end in order once that is past, or it was interrupted.
const ORDERLY: Duration = Duration::from_secs(180);
/// Characters of an error that the table has.
const MAX_ERROR_CHARS: usize = 200;

/// Options of `lake chaos matrix`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long all of it takes, in minutes, about. Each run has its part, 45 s at least: the last of the list are left out if
    /// there are too few
    #[arg(long, default_value_t = 30.0, value_name = "M")]
    minutes: f64,
    /// Where everything is kept: a directory that is empty or not there yet [default: chaos-matrix-SEED]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// What the seeds of the runs follow from [default: by chance, and told]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// What to run it on: local:N, netns:N, or hosts:FILE, a cluster of yours, with those faults that its commands can make
    #[arg(long, default_value = "local:3", value_name = "KIND:N")]
    cluster: String,
    /// With hosts:FILE: the id of that cluster, as `lake meta status` says it; another one is left alone
    #[arg(long, value_name = "ID")]
    cluster_id: Option<String>,
    /// Where tables live, with --s3-endpoint, as of `lake chaos run`: each run's in a place of its own below s3://BUCKET/PREFIX, and what is
    /// written there stays. Without it no fault of an object store is run [default: in the runs' directories]
    #[arg(long, value_name = "URI", requires = "s3_endpoint")]
    warehouse: Option<String>,
    /// The S3 service behind --warehouse, http://HOST:PORT, which query nodes reach by a way that can be hurt
    #[arg(long, value_name = "URL", requires = "warehouse", value_parser = run::endpoint)]
    s3_endpoint: Option<String>,
    /// One more argument for every query node; may be given several times
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    query_arg: Vec<String>,
    /// Of each run of the workload table: so many of the clients are PyIceberg, as of `lake chaos run`
    #[arg(long, default_value_t = 0, value_name = "N")]
    rest_clients: usize,
    /// The Python of those, which has pyiceberg[pyarrow]
    #[arg(long, default_value = "python3", value_name = "PATH")]
    python: PathBuf,
    /// Only these: a workload, or a workload and its faults as --dry-run lists them
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Say what would be run, and what not; nothing is
    #[arg(long)]
    dry_run: bool,
}

/// Runs all of it. Gives the exit code of the worst run: a violation before an error, before one that is unknown.
///
/// # Errors
/// Nothing can be run, or the directory cannot be written.
pub async fn run(args: &Args) -> Result<u8> {
    let minutes = args.minutes;
    ensure!(minutes.is_finite() && (0.0..=MAX_MINUTES).contains(&minutes), "--minutes is up to {MAX_MINUTES}");
    let seed = args.seed.unwrap_or_else(rand::random);
    let objects = args.warehouse.clone().zip(args.s3_endpoint.clone());
    let objects = objects.map(|(warehouse, address)| ObjectStore { warehouse, address });
    let ground = Ground {
        objects,
        query_args: args.query_arg.clone(),
        rest: (args.rest_clients, args.python.clone()),
        ..Ground::new(&args.cluster, args.cluster_id.clone())?
    };
    ensure!(
        ground.hosts.is_none() || (ground.objects.is_none() && ground.query_args.is_empty() && args.rest_clients == 0),
        "--warehouse, --query-arg and --rest-clients are about query nodes of local:N: those of a cluster of yours are started by your own commands"
    );
    let time = Duration::from_secs_f64(minutes * 60.0);
    let chosen = matrix::choose(time, &args.only, |pair| ground.missing(pair)).map_err(|problem| anyhow!(problem))?;
    ground.check_rest(&chosen)?;
    if args.dry_run {
        output::print(&planned(&ground, &chosen, seed))?;
        return Ok(0);
    }
    if ground.hosts.is_some() && ground.cluster_id.is_none() {
        bail!("say which cluster is to be hurt, with --cluster-id ID: lake meta status tells its id");
    }
    if args.rest_clients > 0 {
        let rest = Rest { python: args.python.clone(), clients: args.rest_clients, nodes: Roster::default() };
        rest.check().await.map_err(|failure| anyhow!("{failure}"))?;
    }
    let mut stop = StopRequests::listen(false)?;
    let out = args.out.clone().unwrap_or_else(|| format!("chaos-matrix-{seed}").into());
    let out = std::path::absolute(&out).context("finding out where the matrix's directory is")?;
    make_directory(&out)?;
    let about = format!("{} runs of {} s each, seed {seed}", chosen.runs.len(), chosen.time.as_secs());
    output::print(&format!("{about}; in {}\n", out.display()))?;
    let mut left_out: Vec<(String, String)> =
        chosen.left_out.iter().map(|(pair, why)| (pair.name(), why.clone())).collect();
    let mut entries = Vec::new();
    let mut is_stopped = false;
    for (place, pair) in &chosen.runs {
        if is_stopped {
            left_out.push((pair.name(), "it was interrupted before".to_owned()));
            continue;
        }
        output::print(&format!("{} of {}: {}\n", entries.len() + 1, chosen.runs.len(), pair.name()))?;
        let run = Planned { place: *place, pair, time: chosen.time, seed: seed_of(seed, *place) };
        let entry = one(&ground, &run, &out, (&mut stop, &mut is_stopped)).await?;
        output::print(&format!("  {} after {} s\n", entry.word(), entry.seconds))?;
        entries.push(entry);
        // Whoever looks meanwhile sees what there is.
        index::write(&out, &about, &entries, &left_out)?;
    }
    index::write(&out, &about, &entries, &left_out)?;
    output::print(&told(&entries, &left_out))?;
    output::print(&format!("{}\n", out.join(index::FILE_NAME).display()))?;
    // What was not run has shown nothing.
    let unshown = is_stopped.then_some(2);
    Ok(index::exit_code(entries.iter().map(Entry::exit_code).chain(unshown)))
}

/// What the runs are on.
struct Ground {
    /// As on the command line.
    cluster: String,
    cluster_id: Option<String>,
    hosts: Option<Hosts>,
    place: Place,
    /// Where tables live, if not in the runs' directories.
    objects: Option<ObjectStore>,
    /// More arguments for every query node.
    query_args: Vec<String>,
    /// So many clients of tables go through REST, by this Python.
    rest: (usize, PathBuf),
}

impl Ground {
    fn new(cluster: &str, cluster_id: Option<String>) -> Result<Self> {
        let (place, hosts) = match run::cluster(cluster).map_err(|problem| anyhow!(problem))? {
            Where::Own(place, _) => (place, None),
            Where::Hosts(file) => (Place::Loopback, Some(Hosts::read(&file)?)),
        };
        ensure!(
            hosts.is_some() || cluster_id.is_none(),
            "--cluster-id is about a cluster of yours: ask for --cluster hosts:FILE"
        );
        Ok(Self {
            cluster: cluster.to_owned(),
            cluster_id,
            hosts,
            place,
            objects: None,
            query_args: Vec::new(),
            rest: (0, PathBuf::new()),
        })
    }

    /// Whether every run that is to have clients through REST can have so many: one that cannot would be refused when its turn comes.
    fn check_rest(&self, chosen: &Chosen) -> Result<()> {
        let (clients, _) = self.rest;
        let of_tables = chosen.runs.iter().filter(|(_, pair)| pair.workload == Workload::Table);
        let least = of_tables.map(|(_, pair)| pair.clients as usize).min();
        match least.map(|least| least.min(MAX_REST_CLIENTS)) {
            _ if clients == 0 => Ok(()),
            None => bail!("no run of the workload table is chosen, and only its clients go through REST"),
            Some(most) => {
                ensure!(clients <= most, "of the clients of table up to {most} go through REST, not {clients}");
                Ok(())
            }
        }
    }

    /// Why this program or machine, or that cluster, cannot have a pair.
    fn missing(&self, pair: &Pair) -> Option<String> {
        let is_sql = pair.workload.is_sql();
        match &self.hosts {
            _ if is_sql && !cfg!(feature = "query") => Some("this lake was built without SQL".to_owned()),
            Some(hosts) => pair.on(hosts).err(),
            None if is_sql && self.place != Place::Loopback => Some("query nodes run on local:N only".to_owned()),
            None if pair.is_of_the_store() && self.objects.is_none() => {
                Some("there is no object store: name one with --warehouse and --s3-endpoint".to_owned())
            }
            None => pair.missing(),
        }
    }

    /// How long a run may take to end in order.
    fn orderly(&self, pair: &Pair) -> Duration {
        let hosts = self.hosts.as_ref();
        hosts.map_or(ORDERLY, |hosts| ending::ends_within(hosts, run::operation_timeout(pair.workload)))
    }

    /// The faults of a pair that can be had.
    fn nemeses(&self, pair: &Pair) -> Vec<&'static str> {
        self.hosts.as_ref().and_then(|hosts| pair.on(hosts).ok()).unwrap_or_else(|| pair.nemeses.to_vec())
    }
}

/// One run of the matrix.
struct Planned<'a> {
    /// In the list, from 1.
    place: usize,
    pair: &'a Pair,
    /// How long clients are at it.
    time: Duration,
    seed: u64,
}

impl Planned<'_> {
    /// As its directory is called.
    fn directory(&self) -> String {
        format!("{:02}-{}", self.place, self.pair.directory())
    }
}

/// What each run follows from: the same whatever else is run.
fn seed_of(seed: u64, place: usize) -> u64 {
    seed.wrapping_add(place as u64 - 1)
}

fn arguments(ground: &Ground, run: &Planned<'_>) -> Vec<String> {
    let Pair { workload, rate, clients, .. } = run.pair;
    let (nemeses, seconds) = (ground.nemeses(run.pair).join(","), run.time.as_secs());
    let words = format!("chaos run --workload {workload} --nemesis {nemeses} --time {seconds}s");
    let words = format!("{words} --rate {rate} --clients {clients} --seed {} --cluster", run.seed);
    let id = ground.cluster_id.iter().flat_map(|id| ["--cluster-id", id.as_str()]);
    let mut arguments: Vec<String> =
        words.split(' ').chain([ground.cluster.as_str()]).chain(id).map(str::to_owned).collect();
    let (rest_clients, python) = &ground.rest;
    if *workload == Workload::Table && *rest_clients > 0 {
        let rest = ["--rest-clients".to_owned(), rest_clients.to_string()];
        arguments.extend(rest.into_iter().chain(["--python".to_owned(), python.display().to_string()]));
    }
    if workload.is_sql() {
        if let Some(ObjectStore { warehouse, address }) = &ground.objects {
            // Another matrix may have been there before.
            let own = format!("{}/{}-{}", warehouse.trim_end_matches('/'), run.directory(), run.seed);
            arguments.extend(["--warehouse".to_owned(), own, "--s3-endpoint".to_owned(), format!("http://{address}")]);
        }
        arguments.extend(ground.query_args.iter().flat_map(|word| ["--query-arg".to_owned(), word.clone()]));
    }
    arguments
}

fn planned(ground: &Ground, chosen: &Chosen, seed: u64) -> String {
    let mut text = String::new();
    for (place, pair) in &chosen.runs {
        let run = Planned { place: *place, pair, time: chosen.time, seed: seed_of(seed, *place) };
        text.push_str(&format!("{}\n  lake {}\n", pair.name(), arguments(ground, &run).join(" ")));
    }
    for (pair, why) in &chosen.left_out {
        text.push_str(&format!("not run: {}: {why}\n", pair.name()));
    }
    text
}

fn make_directory(out: &Path) -> Result<()> {
    let doing = || format!("making the matrix's directory {}", out.display());
    let taken = out.exists() && std::fs::read_dir(out).with_context(doing)?.next().is_some();
    ensure!(
        !taken,
        "{} is not empty: choose another directory for this matrix, or remove what is in it",
        out.display()
    );
    std::fs::create_dir_all(out).with_context(doing)
}

/// One run, from beginning to end.
async fn one(
    ground: &Ground,
    run: &Planned<'_>,
    out: &Path,
    (stop, is_stopped): (&mut StopRequests, &mut bool),
) -> Result<Entry> {
    let directory = run.directory();
    let log = format!("{directory}.log");
    let path = out.join(&log);
    let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    let mut command = Command::new(std::env::current_exe().context("finding out which program this is")?);
    command.args(arguments(ground, run)).arg(EXIT_WITH_PARENT);
    command.arg("--out").arg(out.join(&directory));
    command.stdin(Stdio::piped()).stdout(file.try_clone().context("writing a run's log")?).stderr(file);
    // One on a cluster of others ends with its standard input: killed, it would leave that as it is.
    command.process_group(0).kill_on_drop(ground.hosts.is_none());
    let began = Instant::now();
    let mut child = command.spawn().context("starting a run")?;
    // Its end is the run's.
    let _parent = child.stdin.take();
    let ended = tokio::select! {
        ended = child.wait() => Some(ended),
        () = sleep(run.time + BEYOND) => None,
        _ = stop.next() => {
            *is_stopped = true;
            None
        }
    };
    let code = match ended {
        Some(ended) => ended.context("waiting for a run")?.code(),
        None => end(&mut child, ground.orderly(run.pair)).await?,
    };
    let came = judged(&out.join(&directory), &path, code);
    Ok(Entry {
        workload: run.pair.workload.name().to_owned(),
        nemeses: ground.nemeses(run.pair).join(", "),
        directory,
        log,
        seconds: began.elapsed().as_secs(),
        came,
    })
}

/// Has a run end in order within that time, or else at once.
async fn end(child: &mut Child, orderly: Duration) -> Result<Option<i32>> {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
        // It may have ended just now.
        let _ = kill_process(pid, Signal::INT);
    }
    tokio::select! {
        ended = child.wait() => return Ok(ended.context("waiting for a run")?.code()),
        () = sleep(orderly) => {}
    }
    child.kill().await.context("killing a run that does not end")?;
    Ok(None)
}

/// What a run has left: its results, or why there are none.
fn judged(dir: &Path, log: &Path, code: Option<i32>) -> Result<Box<results::Results>, String> {
    let path = dir.join(results::FILE_NAME);
    match code {
        Some(0..=2) => {
            let text = std::fs::read(&path).map_err(|e| format!("reading {}: {e}", path.display()))?;
            serde_json::from_slice(&text).map(Box::new).map_err(|e| format!("reading {}: {e}", path.display()))
        }
        Some(code) => Err(last_line(log).unwrap_or_else(|| format!("the run ended with exit code {code}"))),
        None => Err("the run was killed".to_owned()),
    }
}

/// What a run has said last: its error, if it had one.
fn last_line(log: &Path) -> Option<String> {
    let text = std::fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.chars().take(MAX_ERROR_CHARS).collect())
}

fn told(entries: &[Entry], left_out: &[(String, String)]) -> String {
    let header = ["WORKLOAD", "NEMESIS", "VERDICT", "OPERATIONS", "FAULTS", "SECONDS", "PATH"];
    let mut rows = vec![header.map(str::to_owned)];
    for entry in entries {
        let ((ok, all), (installed, skipped)) = (entry.operations(), entry.faults());
        rows.push([
            entry.workload.clone(),
            entry.nemeses.clone(),
            entry.word().to_owned(),
            format!("{ok} ok of {all}"),
            format!("{installed} in effect, {skipped} not"),
            entry.seconds.to_string(),
            entry.directory.clone(),
        ]);
    }
    let mut text = format!("\n{}\n", columns(rows));
    for entry in entries {
        if let Some(why) = entry.reason() {
            text.push_str(&format!("{}: {}: {why}\n", entry.directory, entry.word()));
        }
    }
    for (name, why) in left_out {
        text.push_str(&format!("not run: {name}: {why}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_asked_for_as_anybody_would_ask() {
        let ground = Ground::new("local:5", None).unwrap();
        let run = Planned { place: 3, pair: &matrix::PAIRS[0], time: Duration::from_secs(40), seed: seed_of(7, 3) };
        assert_eq!(
            arguments(&ground, &run).join(" "),
            "chaos run --workload table --nemesis query-kill:one,kill:leader --time 40s --rate 10 --clients 5 --seed 9 \
             --cluster local:5"
        );
        let objects = ObjectStore { warehouse: "s3://b/w/".to_owned(), address: "127.0.0.1:9".to_owned() };
        let stored =
            Ground { objects: Some(objects), query_args: vec!["--x".to_owned()], rest: (2, "py".into()), ..ground };
        assert!(
            arguments(&stored, &run).join(" ").ends_with(
                " --cluster local:5 --rest-clients 2 --python py --warehouse s3://b/w/03-table-query-kill-one-kill-leader-9 --s3-endpoint http://127.0.0.1:9 \
                 --query-arg --x"
            )
        );
        let chosen = |only: &str| matrix::choose(Duration::from_secs(60), &[only.to_owned()], |_| None).unwrap();
        let with = |clients| Ground { rest: (clients, "py".into()), ..Ground::new("local:3", None).unwrap() };
        let (tables, pair) = (chosen("table/query-kill:one+kill:leader"), matrix::PAIRS[0].clients as usize);
        assert!(with(0).check_rest(&chosen("session")).is_ok() && with(pair).check_rest(&tables).is_ok());
        assert!(with(pair + 1).check_rest(&tables).unwrap_err().to_string().contains("up to 5"));
        assert!(
            with(1).check_rest(&chosen("session")).unwrap_err().to_string().contains("no run of the workload table")
        );
        assert!(Ground::new("local:3", Some("id".to_owned())).is_err() && Ground::new("cloud:3", None).is_err());
        assert_eq!(seed_of(u64::MAX, 2), 0);
    }

    #[test]
    fn an_error_is_told_by_the_last_line_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let (dir, log) = (dir.path(), dir.path().join("log"));
        std::fs::write(&log, "register on 3 peers\nlake: no free port found\n\n").unwrap();
        assert_eq!(judged(dir, &log, Some(3)).unwrap_err(), "lake: no free port found");
        assert!(judged(dir, &log, Some(0)).unwrap_err().contains("results.json"));
        assert_eq!(judged(dir, &log, None).unwrap_err(), "the run was killed");
    }
}
