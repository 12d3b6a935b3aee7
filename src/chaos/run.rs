//! `lake chaos run`: a fault run from beginning to verdict.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use lake_chaos::check::Options;
use lake_chaos::history::{Workload, file};
use lake_chaos::hosts::{Hosts, told};
use lake_chaos::nemesis::disk::{self, PRIVATE_MOUNTS};
use lake_chaos::nemesis::kind::Requested;
use lake_chaos::nemesis::schedule;
use lake_chaos::net::namespaces::{self, PRIVATE_NETWORK};
use lake_chaos::report::{self, page, record};
use lake_chaos::run::ending;
use lake_chaos::run::hosts::{FAULTS, verbs};
use lake_chaos::run::sampler::Live;
use lake_chaos::run::{self, ObjectStore, Place, Settings};
use lake_chaos::workload::access::Roster;
use lake_chaos::workload::rest::Rest;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[cfg(feature = "query")]
pub(super) use super::front::front;
use super::print::{self, Format};
use crate::output;
use crate::signals::{ORPHAN_GRACE, StopRequests};

/// Characters of the faults in force that a terminal's line has: it is written over and must not wrap.
const TERMINAL_FAULTS: usize = 80;
/// How long an operation may take unless told otherwise, and one of SQL.
const TIMEOUT: Duration = Duration::from_secs(3);
const SQL_TIMEOUT: Duration = Duration::from_secs(10);
/// Query nodes of a run that speaks SQL.
const QUERY_NODES: u64 = 2;

/// Options of `lake chaos run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to run it on: local:N, N peers on this machine behind links that can be cut; netns:N, the same with each in a
    /// network namespace of its own (root, and the packages iproute2 and nftables); hosts:FILE, a cluster of yours, hurt by the
    /// commands in that file
    #[arg(long, default_value = "local:3", value_name = "KIND:N", value_parser = cluster)]
    cluster: Where,
    /// With hosts:FILE: the id of that cluster, as `lake meta status` says it; another one is left alone
    #[arg(long, value_name = "ID")]
    cluster_id: Option<String>,
    /// With hosts:FILE: say what would be done, and when; nothing is, and nobody is asked
    #[arg(long)]
    dry_run: bool,
    /// How many query nodes run beside the peers, over a warehouse in the run's directory (local:N only) [default: 2 for workloads that speak SQL]
    #[arg(long, value_name = "N")]
    query_nodes: Option<u64>,
    /// What the clients do: register, set, append, bank, watch, lock, idempotency or session; through SQL: table, multi-table, catalog, cached, hot or upkeep
    #[arg(long, default_value = "register", value_name = "NAME")]
    workload: Workload,
    /// Faults: kill, pause, restart, snapshot, partition, slow, lossy, reorder, endpoint, rejoin, transfer, membership, wipe,
    /// corrupt, loss, clock, disk, sync, power; of query nodes query-kill, query-pause, query-partition; of the
    /// object store (--warehouse) store-slow, store-refuse, store-throttle, store-late, store-partition; none for no fault. Whom chance decides, or a name behind a colon: kill:leader,
    /// slow:minority, clock:all; of a partition its kind, partition:ring
    #[arg(long, default_value = "kill,partition", value_delimiter = ',', value_name = "NAME,...")]
    nemesis: Vec<String>,
    /// How long the clients are at it
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = duration)]
    time: Duration,
    /// Operations per second, all clients together
    #[arg(long, default_value_t = 200.0, value_name = "N")]
    rate: f64,
    /// How many clients
    #[arg(long, default_value_t = 10, value_name = "N")]
    clients: usize,
    /// Of the workload table: so many of the clients are PyIceberg, and go through REST
    #[arg(long, default_value_t = 0, value_name = "N")]
    rest_clients: usize,
    /// The Python of those, which has pyiceberg[pyarrow]
    #[arg(long, default_value = "python3", value_name = "PATH")]
    python: PathBuf,
    /// What the faults and the clients' choices follow from [default: by chance, and told]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long one operation may take [default: 3s; 10s for workloads that speak SQL]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    operation_timeout: Option<Duration>,
    /// Where everything is kept: a directory that is empty or not there yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Where tables live, with --s3-endpoint: s3://BUCKET/PREFIX, and what is written there stays [default: in the run's directory]
    #[arg(long, value_name = "URI", requires = "s3_endpoint")]
    warehouse: Option<String>,
    /// The S3 service behind --warehouse, http://HOST:PORT, which query nodes reach by a way that can be hurt. Where its keys are is told
    /// them: --query-arg --s3-access-key-file --query-arg FILE, and so on
    #[arg(long, value_name = "URL", requires = "warehouse", value_parser = endpoint)]
    s3_endpoint: Option<String>,
    /// One more argument for every peer; may be given several times
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    metasrv_arg: Vec<String>,
    /// One more argument for every query node; may be given several times
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    query_arg: Vec<String>,
    /// End in order at the end of standard input: whoever started this has ended
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// The flag of that option.
pub(super) const EXIT_WITH_PARENT: &str = "--exit-with-parent";

/// Runs it and judges it. Gives the exit code: 0 valid, 1 violation, 2 unknown.
///
/// # Errors
/// The harness's own: the cluster does not start, the directory cannot be written.
pub async fn run(args: Args) -> Result<u8> {
    let nemeses = args.nemesis.iter().filter(|word| !matches!(word.as_str(), "" | "none"));
    let nemeses = nemeses.map(|word| word.parse()).collect::<Result<Vec<Requested>, _>>()?;
    let seed = args.seed.unwrap_or_else(rand::random);
    let (place, peers, hosts) = match &args.cluster {
        Where::Own(place, peers) => {
            enter_namespaces(*place, &nemeses)?;
            (*place, *peers, None)
        }
        Where::Hosts(file) => {
            let hosts = Hosts::read(file)?;
            (Place::Loopback, hosts.peers.len() as u64, Some(hosts))
        }
    };
    if hosts.is_none() && (args.dry_run || args.cluster_id.is_some()) {
        bail!("--dry-run and --cluster-id are about a cluster of yours: ask for --cluster hosts:FILE");
    }
    let hosts = match (hosts, args.cluster_id) {
        (Some(hosts), _) if args.dry_run => {
            output::print(&would_do(&hosts, &nemeses, args.time, seed, &args.out)?)?;
            return Ok(0);
        }
        (Some(hosts), Some(cluster_id)) => Some((hosts, cluster_id)),
        (Some(_), None) => {
            bail!("say which cluster is to be hurt, with --cluster-id ID: lake meta status tells its id")
        }
        (None, _) => None,
    };
    let operation_timeout = args.operation_timeout.unwrap_or(operation_timeout(args.workload));
    // Whatever has become of who started it: what it has done to a cluster of others is taken back first.
    let grace = match &hosts {
        Some((hosts, _)) => ending::ends_within(hosts, operation_timeout),
        None => ORPHAN_GRACE,
    };
    let mut stop = StopRequests::listen_within(args.exit_with_parent.then_some(grace))?;
    let query_nodes = match &hosts {
        Some((hosts, _)) => hosts.query_nodes.len() as u64,
        None => args.query_nodes.unwrap_or(if args.workload.is_sql() { QUERY_NODES } else { 0 }),
    };
    let secret = hosts.as_ref().map_or(Ok(None), |(hosts, _)| hosts.secret())?;
    let settings = Settings {
        binary: std::env::current_exe().context("finding out which program this is")?,
        out: std::path::absolute(&args.out).context("finding out where the run's directory is")?,
        place,
        peers,
        query_nodes,
        objects: args.warehouse.zip(args.s3_endpoint).map(|(warehouse, address)| ObjectStore { warehouse, address }),
        hosts,
        front: front(secret),
        workload: args.workload,
        nemeses,
        time: args.time,
        rate: args.rate,
        clients: args.clients,
        rest: (args.rest_clients > 0).then(|| Rest {
            python: args.python,
            clients: args.rest_clients,
            nodes: Roster::default(),
        }),
        seed,
        operation_timeout,
        metasrv_args: args.metasrv_arg,
        query_args: args.query_arg,
    };
    settings.validate().map_err(|problem| anyhow!(problem))?;
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    output::print(&format!(
        "{} on {} peers{}, {} clients, {} operations/s, {:.0} s, faults: {}, seed {seed}; in {}\n",
        settings.workload,
        settings.peers,
        match settings.query_nodes {
            0 => String::new(),
            nodes => format!(" and {nodes} query nodes"),
        },
        settings.clients,
        settings.rate,
        settings.time.as_secs_f64(),
        if args.nemesis.is_empty() { "none".to_owned() } else { args.nemesis.join(", ") },
        settings.out.display()
    ))?;
    let (live, watching) = watch::channel(Live::default());
    let telling = tokio::spawn(tell(watching));
    let interrupt = CancellationToken::new();
    let running = run::run(&settings, live, interrupt.clone());
    tokio::pin!(running);
    let ran = loop {
        tokio::select! {
            ran = &mut running => break ran,
            // The end of a parent is told again and again.
            _ = stop.next(), if !interrupt.is_cancelled() => interrupt.cancel(),
        }
    };
    telling.abort();
    if std::io::stdout().is_terminal() {
        // It may have hung up, which is no reason to lose what was recorded.
        let _ = output::print("\n");
    }
    let ran = ran?;
    let drawn = args.seed.is_none().then(|| ["--seed".to_owned(), seed.to_string()]);
    let typed = std::env::args().filter(|word| word != EXIT_WITH_PARENT);
    let command = typed.chain(drawn.into_iter().flatten());
    let began_unix_ms = u64::try_from(began.as_millis()).unwrap_or(u64::MAX);
    record::write(&settings.out, &run::record(&settings, &ran, command.collect(), began_unix_ms))?;
    let history = settings.out.join(file::FILE_NAME);
    file::write(&history, &ran.operations).with_context(|| format!("writing {}", history.display()))?;
    let results = report::build(&settings.out, &Options::default())?;
    // Those that are not excused are among the findings.
    let deaths = results.run.iter().flat_map(|record| record.deaths.iter().flatten());
    for death in deaths.filter(|death| death.excused.is_some()) {
        output::print(&format!("{}\n", death.told()))?;
    }
    let code = print::verdict(results.workload, &results.checks, Format::Text)?;
    output::print(&format!("{}\n", settings.out.join(page::FILE_NAME).display()))?;
    Ok(code)
}

/// The client of query nodes: there is none in a build without SQL.
#[cfg(not(feature = "query"))]
pub(super) fn front(_: Option<lake_client::secret::Secret>) -> Option<std::sync::Arc<dyn lake_chaos::sql::Front>> {
    None
}

/// How long an operation may take unless told otherwise.
pub(super) fn operation_timeout(workload: Workload) -> Duration {
    if workload.is_sql() { SQL_TIMEOUT } else { TIMEOUT }
}

/// The cluster that is hurt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Where {
    /// One that is made for it, of so many peers.
    Own(Place, u64),
    /// One that is there, as this file says.
    Hosts(PathBuf),
}

/// What a run on hosts would do, and when.
fn would_do(hosts: &Hosts, nemeses: &[Requested], time: Duration, seed: u64, out: &Path) -> Result<String> {
    let mut faults = Vec::new();
    for asked in nemeses {
        let (verbs, role) = verbs(asked).ok_or_else(|| anyhow!("on hosts there is no {asked}; there are {FAULTS}"))?;
        faults.push((asked.to_string(), verbs, role));
    }
    let mut text = String::new();
    for planned in schedule::plan(nemeses, time, seed) {
        let (begins, ends) = (planned.begins.as_secs_f64(), planned.ends.as_secs_f64());
        let _ = writeln!(text, "{begins:>6.1} s to {ends:>6.1} s  {}", nemeses[planned.which]);
    }
    let out = std::path::absolute(out).context("finding out where the run's directory is")?;
    Ok(text + &told(hosts, &faults, &out))
}

/// `local:3`: where peers run, and how many; `hosts:FILE`.
pub(super) fn cluster(word: &str) -> Result<Where, String> {
    if let Some(file) = word.strip_prefix("hosts:").filter(|file| !file.is_empty()) {
        return Ok(Where::Hosts(file.into()));
    }
    let (kind, peers) = word.split_once(':').unwrap_or((word, ""));
    let place = match kind {
        "local" => Some(Place::Loopback),
        "netns" => Some(Place::Namespaces),
        _ => None,
    };
    let said = place.and_then(|place| Some(Where::Own(place, peers.parse().ok()?)));
    said.ok_or_else(|| {
        "write local:N for N peers on this machine, netns:N for N peers in network namespaces of their own, or hosts:FILE for a \
         cluster of yours"
            .to_owned()
    })
}

/// Where `http://HOST:PORT` is.
pub(super) fn endpoint(url: &str) -> Result<String, String> {
    let address = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
    let is_address =
        |address: &&str| !address.contains('/') && address.rsplit_once(':').is_some_and(|(host, _)| !host.is_empty());
    let said = address.filter(is_address).map(str::to_owned);
    said.ok_or_else(|| "write http://HOST:PORT: the way to it carries no TLS".to_owned())
}

/// `60s`, `2m`, `500ms`.
pub(super) fn duration(word: &str) -> Result<Duration, String> {
    let digits = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    let (number, unit) = word.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "write a number and its unit, as 60s".to_owned())?;
    let millis = match unit {
        "ms" => 1,
        "s" | "" => 1_000,
        "m" => 60_000,
        _ => return Err(format!("{unit:?} is no unit of time; there are ms, s and m")),
    };
    number.checked_mul(millis).map(Duration::from_millis).ok_or_else(|| "that is too long".to_owned())
}

/// Starts this program again in namespaces of its own, if it takes them: one of mounts if faults of disks were asked for and
/// can be had, and one of the network as well if peers are to have some. Whatever is made there is gone with the run,
/// however that ends.
fn enter_namespaces(place: Place, nemeses: &[Requested]) -> Result<()> {
    let network = place == Place::Namespaces;
    if network && let Some(missing) = namespaces::missing() {
        bail!("{missing}");
    }
    let mounts = disk::needed(nemeses) && lake_chaos::disk::missing().is_none();
    let has = |variable: &str| std::env::var_os(variable).is_some();
    if (!network || has(PRIVATE_NETWORK)) && (!(mounts || network) || has(PRIVATE_MOUNTS)) {
        return Ok(());
    }
    let program = std::env::current_exe().context("finding out which program this is")?;
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]).env(PRIVATE_MOUNTS, "1");
    if network {
        command.arg("--net").env(PRIVATE_NETWORK, namespaces::own()?);
    }
    command.arg("--").arg(program).args(std::env::args_os().skip(1).collect::<Vec<OsString>>());
    let error = command.exec();
    bail!("starting this program in namespaces of its own: {error}");
}

/// One line on a terminal, over and over; elsewhere a line every ten seconds, and when other faults are in force.
async fn tell(mut live: watch::Receiver<Live>) {
    let terminal = std::io::stdout().is_terminal();
    let mut lines = 0u64;
    let mut in_force = Vec::new();
    while live.changed().await.is_ok() {
        let (line, faults) = {
            let live = live.borrow_and_update();
            (describe(&live, if terminal { TERMINAL_FAULTS } else { usize::MAX }), live.faults.clone())
        };
        let is_due = lines.is_multiple_of(10) || faults != in_force;
        in_force = faults;
        let mut out = std::io::stdout().lock();
        // Nobody may be looking.
        let _ = match terminal {
            true => write!(out, "\r\x1b[2K{line}").and_then(|()| out.flush()),
            false if is_due => writeln!(out, "{line}"),
            false => Ok(()),
        };
        lines += 1;
    }
}

/// The faults are cut at so many characters.
fn describe(live: &Live, longest: usize) -> String {
    let leader = live.leader.map_or_else(|| "no leader".to_owned(), |id| format!("leader {id}"));
    let faults = if live.faults.is_empty() { "no fault".to_owned() } else { live.faults.join(", ") };
    format!(
        "{:>5.0} s  {:>6.0} ok/s  {} ok, {} unknown, {} refused, {} failed  {leader}, term {}  {}",
        live.elapsed.as_secs_f64(),
        live.rate,
        live.tally.ok,
        live.tally.unknown,
        live.tally.refused,
        live.tally.failed,
        live.term,
        faults.chars().take(longest).collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_and_times_are_read() {
        assert_eq!(cluster("local:5"), Ok(Where::Own(Place::Loopback, 5)));
        assert_eq!(cluster("netns:3"), Ok(Where::Own(Place::Namespaces, 3)));
        assert_eq!(cluster("hosts:my/file.toml"), Ok(Where::Hosts("my/file.toml".into())));
        assert!(cluster("hosts:").is_err());
        assert!(cluster("5").is_err() && cluster("local:").is_err() && cluster("cloud:3").is_err());
        assert_eq!(endpoint("http://10.0.0.1:9000/"), Ok("10.0.0.1:9000".to_owned()));
        assert!(endpoint("https://s3.example.org:443").is_err() && endpoint("http://10.0.0.1").is_err());
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(
            duration("fast").is_err() && duration("3 weeks").is_err() && duration("99999999999999999999s").is_err()
        );
    }

    #[test]
    fn the_line_says_how_it_goes() {
        let live = Live { leader: Some(2), term: 7, faults: vec!["kill (peer 2)".to_owned()], ..Live::default() };
        let line = describe(&live, TERMINAL_FAULTS);
        assert!(line.contains("leader 2, term 7  kill (peer 2)"), "{line}");
        let live = Live { faults: vec!["kill (peer 2)".to_owned(); 20], ..live };
        assert!(describe(&live, usize::MAX).ends_with(", kill (peer 2)"), "all of it, where a line may be long");
        assert!(describe(&live, TERMINAL_FAULTS).len() < 200, "one line of a terminal");
    }
}
