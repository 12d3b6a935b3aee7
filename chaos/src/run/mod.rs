//! `lake chaos run`: a cluster behind links that can be cut, clients that write down what they saw, and a plan of faults.
//!
//! ```text
//!   found the cluster, prepare the workload
//!     clients at their rate  |  faults as planned  |  samples of every peer      until the time is up, or Ctrl-C
//!   end every fault, end the clients
//!   one leader again?  ->  read everything  ->  do all peers have the same state?
//!   stop the cluster, write the record, judge it
//! ```
//! In the run's directory: `history.edn`, `results.json`, `report.html`, `samples.jsonl`, `run.json` (what was asked for, and
//! with what), `logs/` (each process's whole log), `cluster/` (what is left of their data, and the warehouse of
//! query nodes).
//!
//! - [`settings`]: what is asked for; [`recorder`]: the history under way; [`clients`]; [`attack`]: the faults, as planned;
//! - [`ground`]: the cluster, wherever it runs; [`hosts`]: one that is there already, with the run's own [`schemas`]: [`whose`] its query
//!   nodes are, and how long its [`ending`] takes;
//! - [`sampler`]: looks at the peers; [`deaths`]: those that end by themselves; [`heal`]: what is found afterwards, by a
//!   machine that has the time ([`pulse`]); [`ledger`]: what must be there then.
//!
//! Whatever happens, faults are ended and children stopped. A run that was cut short is recorded, and never valid.

pub mod attack;
pub mod clients;
pub mod deaths;
pub mod ending;
pub mod ground;
pub mod heal;
pub mod hosts;
pub mod ledger;
pub mod pulse;
pub mod recorder;
pub mod sampler;
mod schemas;
pub mod settings;
mod whose;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lake_client::dial::Dialer;
use lake_client::remote::{RemoteConfig, RemoteStore};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::attack::InForce;
use self::clients::{Clients, Reach};
use self::deaths::Deaths;
use self::ground::Ground;
use self::ledger::{Ledger, Looked};
use self::pulse::Pulse;
use self::recorder::{MAX_BYTES, MAX_OPERATIONS, Recorder, Scribe, Tally};
use self::sampler::{Live, Sampler};
pub use self::settings::{ObjectStore, Place, Settings};
use crate::check::Death;
use crate::check::convergence::Facts;
use crate::cluster::{Cluster, Spec};
use crate::history::{Operation, Workload};
use crate::nemesis::disk::{self, Disks};
use crate::nemesis::field::Field;
use crate::nemesis::kind::{Kind, Requested};
use crate::nemesis::{self, Nemesis, SNAPSHOT_ARGUMENTS, clock, schedule};
use crate::net::namespaces::Namespaces;
use crate::net::objects::Objects;
use crate::net::{Fabric, Network, Node};
use crate::process::{Policy, ProcessName, Role};
use crate::report::Record;
use crate::workload::Frame;
use crate::workload::access::{Door, Roster};
use crate::workload::rest::Rest;
use crate::{Error, Result, workload};

/// How long an operation may take beyond its timeout before it is left as it is.
const GRACE: Duration = Duration::from_secs(2);
/// How long each operation before and after the run may take.
const CALM_TIMEOUT: Duration = Duration::from_secs(10);
/// How long all that is read after a run may take.
const READ_WITHIN: Duration = Duration::from_secs(600);
/// How long that may still take once somebody has asked for the end: what was recorded is to be judged by what is there.
const HURRIED_READ_WITHIN: Duration = Duration::from_secs(60);
/// A peer that died by itself is started again after about this long.
const RESTART_AFTER: Duration = Duration::from_millis(300);

/// What peers are started with, so that purges do not wait for a day.
const PURGE_ARGUMENTS: [&str; 2] = ["--purge-retention-secs", "1"];
/// What query nodes are started with, so that workers look after tables all the time.
const UPKEEP_ARGUMENTS: [&str; 2] = ["--upkeep-interval-secs", "1"];
/// Names their log level, where no argument does.
const LOG_LEVEL: &str = "LAKE_LOG";
/// What they log besides: the chores of workers.
const CHORES_LOGGED: &str = "lake_query::upkeep=debug";

/// What a run has brought.
#[derive(Debug)]
pub struct Ran {
    pub operations: Vec<Operation>,
    pub tally: Tally,
    /// How often operations ended in which error.
    pub errors: BTreeMap<String, u64>,
    /// When the clients ended, in the history's time.
    pub load_ended_ns: u64,
    /// What was found once every fault had ended; none if they could not be ended.
    pub facts: Option<Facts>,
    /// Peers that ended without having been told to; none if this program has not started them.
    pub deaths: Option<Vec<Death>>,
    /// Why the run was not what was asked for.
    pub problems: Vec<String>,
}

impl Ran {
    /// Why it ended before it was done, if it did.
    pub fn ended_early(&self) -> Option<String> {
        (!self.problems.is_empty()).then(|| self.problems.join("; "))
    }
}

/// The record of a run that has ended.
pub fn record(settings: &Settings, ran: &Ran, command: Vec<String>, began_unix_ms: u64) -> Record {
    let mut faults: Vec<String> = settings.nemeses.iter().map(Requested::label).collect();
    faults.sort_unstable();
    faults.dedup();
    Record {
        command,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        began_unix_ms,
        workload: settings.workload,
        nemeses: settings.nemeses.iter().map(ToString::to_string).collect(),
        faults,
        peers: settings.peers,
        query_nodes: settings.query_nodes,
        clients: settings.clients as u64,
        rate: settings.rate,
        time_ms: u64::try_from(settings.time.as_millis()).unwrap_or(u64::MAX),
        seed: settings.seed,
        load_ended_ns: ran.load_ended_ns,
        facts: ran.facts.clone(),
        errors: ran.errors.clone(),
        deaths: ran.deaths.clone(),
        interrupted: ran.ended_early(),
    }
}

/// Runs what is asked for, until its time is up or `interrupt` says so.
///
/// # Errors
/// The harness's own: the cluster does not start, a file cannot be written. What the cluster does wrong is in the record.
pub async fn run(settings: &Settings, live: watch::Sender<Live>, interrupt: CancellationToken) -> Result<Ran> {
    if let Some((hosts, cluster_id)) = &settings.hosts {
        return hosts::run(settings, (hosts, cluster_id), live, interrupt).await;
    }
    settings.make_directory()?;
    let plan = schedule::plan(&settings.nemeses, settings.time, settings.seed);
    let spares = plan.iter().map(|planned| settings.nemeses[planned.which].kind.spare_peers()).sum::<u64>();
    let ids: Vec<u64> = (1..=settings.peers + spares).collect();
    let query_nodes: Vec<u64> = (1..=settings.query_nodes).collect();
    let network = match settings.place {
        Place::Loopback => Network::Proxies(Fabric::open_with(&ids, &query_nodes, settings.seed).await?),
        Place::Namespaces => Network::Namespaces(Namespaces::open(&ids).await?),
    };
    let prepared = prepare(settings, &ids, spares, &network);
    let field = match prepared.await {
        Ok(field) => Arc::new(field),
        Err(e) => {
            network.close().await;
            return Err(e);
        }
    };
    let recorder = Recorder::new();
    let deaths = Deaths::watch(field.clone(), recorder.clone());
    let nemeses = settings.nemeses.iter().map(nemesis::of).collect();
    let ran = under_attack(settings, (&plan, nemeses), &field, &recorder, live, &interrupt).await;
    let deaths = deaths.stop(&field).await;
    end(field).await;
    network.close().await;
    ran.map(|ran| Ran { deaths: Some(deaths), ..ran })
}

/// The cluster, started and founded, with all that can be done to it.
async fn prepare(settings: &Settings, ids: &[u64], spares: u64, network: &Network) -> Result<Field> {
    let dir = settings.out.join("cluster");
    let data_dir = |id| dir.join(ProcessName::metasrv(id).to_string());
    let disks = Disks::prepare(&settings.nemeses, ids, &settings.out.join("disks"), data_dir)?;
    let asked = |kind| settings.nemeses.iter().any(|requested| requested.kind == kind);
    let library = if asked(Kind::Clock) { clock::library() } else { None };
    let clocks = library.as_ref().map(|_| settings.out.join("clocks"));
    let environment = match (&library, &clocks) {
        (Some(library), Some(clocks)) => clock::environment(library, clocks, ids)?,
        _ => Vec::new(),
    };
    let objects = match &settings.objects {
        Some(store) => Some(network.open_objects(&store.address).await?),
        None => None,
    };
    let mut query_args = settings.query_args.clone();
    query_args.extend(objects.iter().flat_map(Objects::arguments));
    let mut arguments = settings.metasrv_args.clone();
    if asked(Kind::Snapshot) {
        arguments.extend(SNAPSHOT_ARGUMENTS.map(str::to_owned));
    }
    let mut query_env = Vec::new();
    if settings.workload == Workload::Upkeep {
        arguments.extend(PURGE_ARGUMENTS.map(str::to_owned));
        query_args.extend(UPKEEP_ARGUMENTS.map(str::to_owned));
        let level = std::env::var(LOG_LEVEL).unwrap_or_else(|_| "info".to_owned());
        query_env.push((LOG_LEVEL.into(), format!("{level},{CHORES_LOGGED}").into()));
    }
    if disks.exist() {
        arguments.extend(disk::RESERVE_ARGUMENTS.map(str::to_owned));
    }
    let spec = Spec {
        peers: Some(settings.peers),
        spare_peers: spares,
        query_nodes: settings.query_nodes,
        query_args,
        query_env,
        warehouse: settings.objects.as_ref().map(|store| store.warehouse.clone()),
        metasrv_args: arguments,
        metasrv_env: environment,
        logs: Some(settings.out.join("logs")),
        network: Some(network.clone()),
        policy: Policy { min_backoff: RESTART_AFTER, max_backoff: RESTART_AFTER * 4, ..Policy::default() },
        ..Spec::new(&settings.binary, &dir)
    };
    let cluster = Cluster::start(spec).await?;
    let store = RemoteStore::connect(RemoteConfig { endpoints: cluster.endpoints(Role::Metasrv), secret: None });
    let store = store.map_err(|e| Error::Founding(e.to_string()))?;
    let founders = ids.iter().take(settings.peers as usize);
    let endpoint = |id: &u64| Some((*id, network.address(Node::Clients, Node::Peer(*id))?));
    let roster = Roster::new(founders.filter_map(endpoint).collect());
    let spare_ids = ids.iter().skip(settings.peers as usize).copied().collect();
    let mut field = Field::new(cluster, network.clone(), store, roster, disks, clocks, spare_ids);
    field.objects = objects;
    Ok(field)
}

/// Clients at a cluster, while it is hurt as planned. Who has died is for the caller to say.
async fn under_attack<F: Ground>(
    settings: &Settings,
    (plan, nemeses): (&[schedule::Planned], Vec<Box<dyn Nemesis<F>>>),
    field: &Arc<F>,
    recorder: &Arc<Recorder>,
    live: watch::Sender<Live>,
    interrupt: &CancellationToken,
) -> Result<Ran> {
    let failed = |doing: &str| {
        let doing = doing.to_owned();
        move |e: lake_client::Error| Error::Founding(format!("{doing}: {e}"))
    };
    let roster = field.roster().clone();
    let reach = Reach {
        endpoints: roster.peers().into_iter().map(|(_, endpoint)| endpoint).collect(),
        roster,
        ledger: Arc::new(Ledger::default()),
        timeout: settings.operation_timeout,
        seed: settings.seed,
        secret: field.secret(),
        dialer: Dialer::default(),
        door: settings.front.clone().map(|front| Door {
            front,
            nodes: field.query_nodes().clone(),
            warehouse: field.warehouse(),
            logs: settings.hosts.is_none().then(|| settings.out.join("logs")),
            is_own: settings.hosts.is_none(),
        }),
    };
    let calm = Reach { timeout: CALM_TIMEOUT, ..reach.clone() };
    let rest = settings.rest.as_ref().map(|rest| Rest { nodes: field.rest_nodes(), ..rest.clone() });
    let workload::Plan { actors, mut frame } = workload::plan(settings.workload, settings.clients, rest.as_ref());
    let mut own = calm.access(u64::MAX).map_err(failed("connecting to the cluster"))?;
    let mut scribe = recorder.scribe();
    tokio::select! {
        prepared = frame.prepare(&mut own, &mut scribe) => prepared.map_err(failed("preparing the workload"))?,
        // The load ends with its beginning then, and says why. What was being prepared may have been begun: nobody says how it ended.
        () = interrupt.cancelled() => scribe = recorder.scribe(),
    }

    let in_force = InForce::default();
    let clients = Clients::start(actors, settings.rate, &reach, recorder);
    let mut clients = clients.map_err(failed("connecting to the cluster"))?;
    // From here on everything that was begun is ended, whatever goes wrong.
    let sampler = Sampler::start(field.clone(), recorder.clone(), in_force.clone(), &settings.out, live);
    let mut problems = Vec::new();

    let over = CancellationToken::new();
    let (asked, seed) = (&settings.nemeses, settings.seed);
    let attacking = attack::attack(field.as_ref(), nemeses, asked, plan, seed, (recorder.as_ref(), &in_force), &over);
    let waiting = async {
        tokio::select! {
            () = sleep(settings.time) => {}
            () = interrupt.cancelled() => problems.push("it was interrupted".to_owned()),
            () = recorder.full() => problems.push(format!(
                "its history was full: at most {MAX_OPERATIONS} events or {} MiB are kept; ask for less --time or --rate",
                MAX_BYTES >> 20
            )),
        }
        over.cancel();
    };
    tokio::join!(attacking, waiting);
    clients.stop_paced(Instant::now() + settings.operation_timeout + GRACE).await;
    let load_ended_ns = recorder.now_ns();

    let own_disk = settings.out.join("cluster");
    let pulse = Pulse::start(settings.hosts.is_none().then_some(own_disk.as_path()));
    let facts = match field.calm().await {
        Ok(()) => Some(field.heal(&pulse).await),
        Err(e) => {
            problems.push(format!("not every fault could be taken back: {e}"));
            None
        }
    };
    let healing = pulse.lost();
    let has_leader = facts.as_ref().is_some_and(|facts| facts.leader_after_ms.is_some());
    // Of those that were told at first, perhaps nobody belongs to the cluster any more.
    let endpoints = calm.roster.peers().into_iter().map(|(_, endpoint)| endpoint).collect();
    let looked = match has_leader {
        true => read_all(&Reach { endpoints, ..calm }, frame.as_mut(), &mut scribe, interrupt).await,
        false => Err("there was no leader to read from".to_owned()),
    };
    problems.extend(clients.stop_waiting().await);
    let facts = match facts {
        Some(mut facts) => {
            let reading = pulse.lost();
            field.compare(&mut facts, &pulse).await;
            let Looked { looked_for, not_found } = looked.as_ref().cloned().unwrap_or_default();
            // What was read in between waits for itself.
            let stood_still = healing + pulse.lost().saturating_sub(reading);
            let stood_still_ms = u64::try_from(stood_still.as_millis()).unwrap_or(u64::MAX);
            Some(Facts { looked_for, not_found, stood_still_ms, ..facts })
        }
        None => None,
    };
    drop(pulse);
    problems.extend(looked.err().map(|why| format!("not everything could be read at the end: {why}")));
    problems.extend(sampler.stop().await.err().map(|e| e.to_string()));
    let tally = recorder.tally();
    let (operations, errors) = recorder.take();
    Ok(Ran { operations, tally, errors, load_ended_ns, facts, deaths: None, problems })
}

/// Reads everything there is, for the checkers and for the ledger, as far as that can be done in time: each read is bounded, and there
/// may be very many. Once it is interrupted, or was before, it has [`HURRIED_READ_WITHIN`].
async fn read_all(
    reach: &Reach,
    frame: &mut dyn Frame,
    scribe: &mut Scribe,
    interrupt: &CancellationToken,
) -> Result<Looked, String> {
    let mut own = reach.access(u64::MAX).map_err(|e| e.to_string())?;
    let reading = async {
        frame.finish(&mut own, scribe).await?;
        reach.ledger.look(&own.store).await
    };
    let hurry = async {
        interrupt.cancelled().await;
        sleep(HURRIED_READ_WITHIN).await;
    };
    tokio::select! {
        looked = timeout(READ_WITHIN, reading) => match looked {
            Ok(looked) => looked.map_err(|e| e.to_string()),
            Err(_) => Err(format!("it took longer than {} s; ask for less --time or --rate", READ_WITHIN.as_secs())),
        },
        () = hurry => Err(format!("it was interrupted, and took longer than {} s", HURRIED_READ_WITHIN.as_secs())),
    }
}

/// Stops every process; then disks are unmounted.
async fn end(field: Arc<Field>) {
    match Arc::try_unwrap(field) {
        Ok(field) => {
            let Field { cluster, disks, objects, .. } = field;
            cluster.shutdown().await;
            if let Some(objects) = objects {
                objects.close().await;
            }
            tokio::task::block_in_place(|| drop(disks));
        }
        Err(_) => tracing::warn!("a task still holds the cluster; its processes end with this one"),
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::workload::access::Access;

    /// Reads and reads.
    struct Endless;

    #[async_trait]
    impl Frame for Endless {
        async fn finish(&mut self, _: &mut Access, _: &mut Scribe) -> std::result::Result<(), lake_client::Error> {
            loop {
                sleep(CALM_TIMEOUT).await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_ends_also_where_there_is_more_to_read_than_there_is_time_for() {
        let reach = Reach {
            roster: Roster::default(),
            ledger: Arc::default(),
            endpoints: vec!["127.0.0.1:1".to_owned()],
            timeout: CALM_TIMEOUT,
            seed: 1,
            secret: None,
            dialer: Dialer::default(),
            door: None,
        };
        let mut scribe = Recorder::new().scribe();
        let mut endless = Endless;
        let interrupt = CancellationToken::new();
        let read = read_all(&reach, &mut endless, &mut scribe, &interrupt);
        let ended = timeout(2 * READ_WITHIN, read).await.expect("it is still reading");
        assert!(ended.unwrap_err().contains("longer than 600 s"));
        // Ctrl-C while it reads.
        let began = Instant::now();
        let later = async {
            sleep(CALM_TIMEOUT).await;
            interrupt.cancel();
        };
        let (ended, ()) = tokio::join!(read_all(&reach, &mut endless, &mut scribe, &interrupt), later);
        assert!(ended.unwrap_err().contains("interrupted"));
        assert!(began.elapsed() < CALM_TIMEOUT + HURRIED_READ_WITHIN + CALM_TIMEOUT);
    }
}
