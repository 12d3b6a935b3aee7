//! A run on a cluster that is there already ([`crate::hosts`]). What is done to it, the operator's commands do; whether it took
//! effect is seen by asking the processes.
//!
//! ```text
//!   every peer and query node serves and is of the cluster that was named ([`whose`](super::whose))?
//!   is nothing left of an earlier run?                                     else nothing is done at all
//!     the run, as on any cluster
//!   mend everything: heal, resume, start of every process  ->  what the run has made is removed  ->  logs are collected
//! ```
//! The last line happens however the run ends, also by a bug of this program, but with the death of this process: [`mend`] does it alone.
//!
//! Once the run is interrupted no fault is begun any more, nor is one waited for, or ended by itself: the command that is under way is the
//! last before everything is mended. So the end has a bound, [`ends_within`](super::ending::ends_within), and nobody who waits for it, or has
//! it end with its parent, may end it before.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1::StatusResponse;
use lake_proto::v1::status_response::Stage;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::ground::Ground;
use super::pulse::Pulse;
use super::recorder::Recorder;
use super::sampler::Live;
use super::schemas::{MARK, Schemas};
use super::settings::Settings;
use super::whose::{self, Known, Said, WHO_IS_THERE, Whose};
use super::{Ran, heal, under_attack};
use crate::check::convergence::Facts;
use crate::hosts::{Hosts, Shell, Verb, clock_off_s};
use crate::nemesis::clock::{self, Ahead, MOVED_MS, RIGHT_MS};
use crate::nemesis::field::{called, choose, is_as_asked};
use crate::nemesis::kind::{Kind, Requested, Target};
use crate::nemesis::{Done, Nemesis, schedule};
use crate::net::partition;
use crate::process::{ProcessName, Role};
use crate::sql::{self, Front};
use crate::workload::PREFIX;
use crate::workload::access::Roster;
use crate::{Error, Result, probe};

/// How long a fault may take to show: an election, and a connection that is given up.
const SEEN_WITHIN: Duration = Duration::from_secs(15);
/// How long a process may take until it serves again.
pub(super) const SERVES_WITHIN: Duration = Duration::from_secs(60);
/// How long reading and removing what a run has written may take.
pub(super) const CLEAN_WITHIN: Duration = Duration::from_secs(60);
/// Keys removed at once.
const KEYS_AT_ONCE: usize = 200;

/// The verbs that a fault takes, in the order in which they are used, and whom it is done to; `None`: it cannot be had so.
pub fn verbs(requested: &Requested) -> Option<(&'static [Verb], Role)> {
    let about_leader = [None, Some(partition::Kind::LeaderAlone)].contains(&requested.partition);
    match requested.kind {
        Kind::Kill => Some((&[Verb::Kill, Verb::Start], Role::Metasrv)),
        Kind::Pause => Some((&[Verb::Pause, Verb::Resume], Role::Metasrv)),
        Kind::Restart => Some((&[Verb::Stop, Verb::Start], Role::Metasrv)),
        Kind::Clock => Some((&[Verb::Clock, Verb::Heal], Role::Metasrv)),
        Kind::Partition if about_leader => Some((&[Verb::Partition, Verb::Heal], Role::Metasrv)),
        Kind::QueryKill => Some((&[Verb::Kill, Verb::Start], Role::Query)),
        Kind::QueryPause => Some((&[Verb::Pause, Verb::Resume], Role::Query)),
        Kind::QueryPartition => Some((&[Verb::Partition, Verb::Heal], Role::Query)),
        _ => None,
    }
}

/// The faults that can be asked for on hosts.
pub const FAULTS: &str =
    "kill, pause, restart, clock, partition, partition:leader-alone, query-kill, query-pause, query-partition";

/// The cluster.
struct Site {
    shell: Shell,
    secret: Option<Secret>,
    /// How query nodes are asked; a build without SQL has none.
    front: Option<Arc<dyn Front>>,
    roster: Roster,
    query_nodes: Roster,
    /// Processes that are under a fault.
    hurt: Mutex<BTreeSet<ProcessName>>,
    /// Cancelled once the run is to end before its time.
    interrupt: CancellationToken,
}

impl Site {
    fn new(hosts: Hosts, front: Option<Arc<dyn Front>>, out: &Path, interrupt: CancellationToken) -> Result<Self> {
        let secret = hosts.secret()?;
        let roster = |role| Roster::new(hosts.of(role).iter().map(|host| (host.id, host.address.clone())).collect());
        let (peers, query_nodes) = (roster(Role::Metasrv), roster(Role::Query));
        let shell = Shell::new(hosts, out.to_owned());
        Ok(Self { shell, secret, front, roster: peers, query_nodes, hurt: Mutex::default(), interrupt })
    }

    /// Where a query node is.
    fn query_address(&self, id: u64) -> Result<String, String> {
        let known = self.query_nodes.peers().into_iter().find(|(known, _)| *known == id);
        known.map(|(_, address)| address).ok_or_else(|| format!("there is no query node {id}"))
    }

    /// Asks a query node something.
    async fn ask(&self, id: u64, sql: &str) -> Result<(), String> {
        let address = self.query_address(id)?;
        let front = self.front.as_ref().ok_or("this lake was built without SQL, by which query nodes are asked")?;
        let asked = sql::ask(front.as_ref(), &address, sql, whose::ASK_WITHIN).await;
        asked.map(drop).map_err(|e| e.to_string())
    }

    /// Whether a query node serves, and does not reach the leader of the peers, whom all others reach meanwhile.
    async fn is_cut_off(&self, id: u64) -> Result<String, String> {
        let term = async || probe::leader(&self.statuses().await).map(|leads| leads.term);
        let before = term().await.ok_or("the peers have no leader")?;
        let Err(why) = self.ask(id, WHO_IS_THERE).await else { return Err("it reaches the leader".to_owned()) };
        // One that does not answer at all is not cut off from the peers alone; and where nobody leads nobody is reached.
        self.ask(id, "SELECT 1").await.map_err(|e| format!("it does not serve: {e}"))?;
        match term().await {
            Some(after) if after == before => Ok(format!("it serves, and does not reach the leader: {why}")),
            _ => Err("the peers had no leader meanwhile, or another one".to_owned()),
        }
    }

    /// Waits, unless the run is interrupted: what is waited for is mended then, whatever became of it.
    async fn unless_interrupted<T>(&self, waiting: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        tokio::select! {
            biased;
            () = self.interrupt.cancelled() => Err("the run was interrupted".to_owned()),
            waited = waiting => waited,
        }
    }

    async fn status(&self, id: u64) -> Result<StatusResponse, String> {
        let peers = self.roster.peers();
        let known = peers.iter().find(|(known, _)| *known == id);
        let (_, address) = known.ok_or_else(|| format!("there is no peer {id}"))?;
        probe::peer_of(address, self.secret.as_ref()).await
    }

    /// What a peer's wall clock shows.
    async fn clock(&self, name: ProcessName) -> Result<Ahead, String> {
        clock::shown(async { self.status(name.id).await.ok() }).await
    }

    /// Whether a process serves.
    async fn serves(&self, name: ProcessName) -> Result<(), String> {
        match name.role {
            Role::Metasrv => match self.status(name.id).await? {
                status if status.stage() == Stage::Member => Ok(()),
                status => Err(format!("{name} says {}", status.stage().as_str_name())),
            },
            Role::Query => probe::serves(&self.query_address(name.id)?).await,
        }
    }

    async fn leader(&self) -> Option<u64> {
        let answers = self.statuses().await;
        probe::leader(&answers).and_then(|answer| Some(answer.self_.as_ref()?.id))
    }

    /// Chooses processes of a role that are under no fault, and notes that they are now.
    async fn claim(&self, role: Role, target: Option<Target>, rng: &mut StdRng) -> Result<Vec<ProcessName>, String> {
        let leader = if role == Role::Metasrv { self.leader().await } else { None };
        let mut hurt = self.hurt.lock().unwrap_or_else(PoisonError::into_inner);
        let all = match role {
            Role::Metasrv => self.roster.ids(),
            Role::Query => self.query_nodes.ids(),
        };
        let name = |id| ProcessName { role, id };
        let mut free: Vec<u64> = all.iter().copied().filter(|id| !hurt.contains(&name(*id))).collect();
        free.shuffle(rng);
        let chosen = choose(target.unwrap_or(Target::One), all.len(), &free, leader);
        if chosen.is_empty() || target.is_some_and(|target| !is_as_asked(target, all.len(), &chosen, leader)) {
            return Err(format!("of {} some are under another fault, or nobody leads", all.len()));
        }
        let chosen: Vec<ProcessName> = chosen.into_iter().map(name).collect();
        hurt.extend(&chosen);
        Ok(chosen)
    }

    fn release(&self, names: &[ProcessName]) {
        let mut hurt = self.hurt.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            hurt.remove(name);
        }
    }

    /// Has everything run again. Whose all of it is has been looked at.
    ///
    /// # Errors
    /// Not all of it could be done: something may be wrong with the cluster still.
    async fn mend(&self) -> Result<()> {
        let wrong = self.shell.mend(&self.shell.hosts().all()).await;
        for wrong in &wrong {
            tracing::warn!("{wrong}");
        }
        match wrong.first() {
            None => Ok(()),
            Some(first) => {
                let source = std::io::Error::other(format!("{first}; lake chaos heal does it again"));
                Err(Error::Io { doing: "taking back what was done".to_owned(), source })
            }
        }
    }
}

#[async_trait]
impl Ground for Site {
    fn roster(&self) -> &Roster {
        &self.roster
    }

    fn query_nodes(&self) -> &Roster {
        &self.query_nodes
    }

    fn secret(&self) -> Option<Secret> {
        self.secret.clone()
    }

    async fn statuses(&self) -> Vec<StatusResponse> {
        let peers = self.roster.peers();
        let asking = peers.iter().map(|(_, address)| probe::peer_of(address, self.secret.as_ref()));
        futures::future::join_all(asking).await.into_iter().flatten().collect()
    }

    async fn calm(&self) -> Result<()> {
        self.mend().await
    }

    async fn heal(&self, pulse: &Pulse) -> Facts {
        let (leader_after_ms, watched_ms) = heal::one_leader(self, &self.roster.ids(), pulse).await;
        let nodes = self.query_nodes.ids().into_iter().map(ProcessName::query);
        let coming = nodes.map(|name| probe::until("a query node to serve", SERVES_WITHIN, move || self.serves(name)));
        let away = futures::future::join_all(coming).await.into_iter().filter_map(Result::err);
        let query_nodes_away = away.map(|e| e.to_string()).collect();
        Facts { leader_after_ms, watched_ms, query_nodes_away, ..Facts::default() }
    }

    async fn compare(&self, facts: &mut Facts, pulse: &Pulse) {
        let ids = self.roster.ids();
        let answers = heal::settled(self, &ids, facts.leader_after_ms.is_some(), pulse).await;
        facts.peers = ids.into_iter().map(|id| heal::peer(&answers, id, None)).collect();
    }
}

/// A fault that commands make.
struct ByCommand {
    requested: Requested,
    claimed: Vec<ProcessName>,
    /// What the clocks showed of those whose clock is wrong, before it was.
    clocks: BTreeMap<ProcessName, Ahead>,
}

impl ByCommand {
    /// Waits until a process is seen to be hurt.
    async fn seen(&self, site: &Site, name: ProcessName) -> Result<String> {
        if let Some(before) = self.clocks.get(&name) {
            let far = MOVED_MS * clock_off_s(name.id).signum();
            let jumped = || async {
                match site.clock(name).await?.since(*before) {
                    moved if moved.is_beyond(far) => Ok(format!("its clock is {moved}")),
                    moved => Err(format!("its clock is {moved}")),
                }
            };
            return probe::until("its clock to jump", SEEN_WITHIN, jumped).await;
        }
        if self.requested.kind == Kind::QueryPartition {
            let cut_off = || site.is_cut_off(name.id);
            return probe::until("it to lose the peers", SEEN_WITHIN, cut_off).await;
        }
        if self.requested.kind != Kind::Partition {
            let silent = || async { site.serves(name).await.map_or(Ok(()), |()| Err("it answers".to_owned())) };
            probe::until("it to answer no more", SEEN_WITHIN, silent).await?;
            return Ok("it does not answer any more".to_owned());
        }
        let cut_off = || async {
            let own = site.status(name.id).await?;
            let others = site.statuses().await;
            let other_leads = probe::leader(&others).is_some_and(|leads| leads.term > own.term);
            match own.leader {
                None => Ok("it knows of no leader".to_owned()),
                Some(_) if other_leads => Ok("the others have a leader of whom it does not know".to_owned()),
                Some(_) => Err("it knows the leader".to_owned()),
            }
        };
        probe::until("it to lose the others", SEEN_WITHIN, cut_off).await
    }

    async fn begin(&mut self, site: &Site, verb: Verb, name: ProcessName) -> Result<String, String> {
        let before = async {
            // One that is away already would show nothing.
            site.serves(name).await.map_err(|why| format!("it did not serve before: {why}"))?;
            if verb == Verb::Clock {
                self.clocks.insert(name, site.clock(name).await?);
            }
            if self.requested.kind == Kind::QueryPartition {
                self.reaches(site, name).await?;
            }
            Ok(())
        };
        site.unless_interrupted(before).await?;
        site.shell.run(verb, name).await.map_err(|e| e.to_string())?;
        let seen = async { self.seen(site, name).await.map_err(|e| e.to_string()) };
        site.unless_interrupted(seen).await
    }

    /// Waits until a query node reaches the peers.
    async fn reaches(&self, site: &Site, name: ProcessName) -> Result<(), String> {
        let reaching = probe::until("it to reach the peers", SEEN_WITHIN, || site.ask(name.id, WHO_IS_THERE));
        reaching.await.map_err(|e| e.to_string())
    }

    async fn end(&mut self, site: &Site, verb: Verb, name: ProcessName) -> Result<String, String> {
        site.shell.run(verb, name).await.map_err(|e| e.to_string())?;
        let before = self.clocks.remove(&name);
        site.unless_interrupted(self.is_over(site, name, before)).await
    }

    /// Waits until nothing of a fault is seen of a process any more.
    async fn is_over(&self, site: &Site, name: ProcessName, before: Option<Ahead>) -> Result<String, String> {
        if let Some(before) = before {
            // Not as this machine's clock is, but as it was: the two may differ for good.
            let is_right = || async {
                match site.clock(name).await?.since(before) {
                    moved if moved.is_beyond(RIGHT_MS) || moved.is_beyond(-RIGHT_MS) => {
                        Err(format!("its clock is {moved}"))
                    }
                    _ => Ok(()),
                }
            };
            probe::until("its clock to be as before", SEEN_WITHIN, is_right).await.map_err(|e| e.to_string())?;
        }
        let serves = probe::until("it to serve again", SERVES_WITHIN, || site.serves(name)).await;
        serves.map_err(|e| e.to_string())?;
        if self.requested.kind == Kind::QueryPartition {
            self.reaches(site, name).await?;
            return Ok("it reaches the peers".to_owned());
        }
        Ok("it serves".to_owned())
    }
}

#[async_trait]
impl Nemesis<Site> for ByCommand {
    async fn start(&mut self, site: &Site, rng: &mut StdRng) -> Done {
        let Some((&[begins, ends], role)) = verbs(&self.requested) else {
            return Done::skipped("nobody", format!("on hosts there are {FAULTS}"));
        };
        let is_rolling = self.requested.kind == Kind::Restart;
        let target = match self.requested.partition {
            Some(_) => Some(Target::Leader),
            None if is_rolling => Some(self.requested.target.unwrap_or(Target::All)),
            None => self.requested.target,
        };
        self.claimed = match site.claim(role, target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for name in self.claimed.clone() {
            let begun = match self.begin(site, begins, name).await {
                // One after the other: the others serve meanwhile.
                Ok(seen) if is_rolling => self.end(site, ends, name).await.map(|then| format!("{seen}; {then}")),
                begun => begun,
            };
            let is_done = begun.is_ok();
            came.push((name.id, begun));
            if (is_rolling && !is_done) || site.interrupt.is_cancelled() {
                break;
            }
        }
        Done::of_all(called(role), &came)
    }

    async fn stop(&mut self, site: &Site) -> Done {
        let Some((&[_, ends], role)) = verbs(&self.requested) else {
            return Done::skipped("nobody", "it was not begun");
        };
        let claimed = std::mem::take(&mut self.claimed);
        let mut came = Vec::new();
        for name in &claimed {
            if site.interrupt.is_cancelled() {
                site.release(&claimed);
                return Done::skipped(called(role), "the run was interrupted: everything is mended at once");
            }
            came.push((name.id, self.end(site, ends, *name).await));
        }
        site.release(&claimed);
        Done::of_all(called(role), &came)
    }
}

/// Runs what is asked for on those hosts.
///
/// # Errors
/// The harness's own; and it is another cluster than the one named, or a query node is, not all of it serves, or something is left of an
/// earlier run: then nothing was done.
pub async fn run(
    settings: &Settings,
    (hosts, cluster_id): (&Hosts, &str),
    live: watch::Sender<Live>,
    interrupt: CancellationToken,
) -> Result<Ran> {
    settings.make_directory()?;
    let site = Arc::new(Site::new(hosts.clone(), settings.front.clone(), &settings.out, interrupt.clone())?);
    is_that_cluster(&site, cluster_id, &hosts.all()).await?;
    let store = store(&site)?;
    let left = keys(&store).await?.len();
    if left > 0 {
        return Err(Error::Founding(format!(
            "{left} keys under {PREFIX} are of an earlier run, or somebody else's: nothing was done; lake chaos heal removes them"
        )));
    }
    let whose = Whose { front: settings.front.as_ref(), store: &store };
    whose.all_are_ours(&site.query_nodes).await?;
    let schemas = match &settings.front {
        Some(front) if settings.workload.is_sql() => Some(Schemas { front, nodes: &site.query_nodes, store: &store }),
        _ => None,
    };
    if let Some(schemas) = &schemas {
        schemas.look().await?;
    }
    mark(&store, schemas.is_some(), &site.query_nodes).await?;
    let plan = schedule::plan(&settings.nemeses, settings.time, settings.seed);
    let nemesis = |requested: &Requested| {
        Box::new(ByCommand { requested: *requested, claimed: Vec::new(), clocks: BTreeMap::new() })
            as Box<dyn Nemesis<Site>>
    };
    let nemeses = settings.nemeses.iter().map(nemesis).collect();
    let recorder = Recorder::new();
    let running = under_attack(settings, (&plan, nemeses), &site, &recorder, live, &interrupt);
    let ran = or_mended(&site, running).await;
    let dropped = match &schemas {
        Some(schemas) => schemas.drop_all().await,
        None => Ok(()),
    };
    let cleaned = match dropped {
        Ok(()) => clean(&store).await,
        // Their mark stays, so that they can be removed later.
        Err(e) => Err(e),
    };
    for name in hosts.all() {
        if let Err(e) = site.shell.run(Verb::Collect, name).await {
            tracing::warn!("{e}");
        }
    }
    let mut ran = ran?;
    ran.problems.extend(cleaned.err().map(|e| format!("what it has written could not be removed: {e}")));
    Ok(ran)
}

/// Mends everything if the run fails, also by a panic, which is an error then.
async fn or_mended<T>(site: &Site, running: impl Future<Output = Result<T>>) -> Result<T> {
    let ran = AssertUnwindSafe(running).catch_unwind().await.unwrap_or_else(|panic| Err(Error::Bug(told(&*panic))));
    if ran.is_err() {
        // It says itself what it could not do; what is told of the run is why it did not begin, or go on.
        let _ = site.mend().await;
    }
    ran
}

/// What somebody has panicked with.
fn told(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

/// Notes what [`mend`] has to know should this process die: which query nodes are the cluster's, and that there may be schemas.
async fn mark(store: &RemoteStore, has_schemas: bool, nodes: &Roster) -> Result<()> {
    let then: Vec<Op> = has_schemas.then(|| Op::put(MARK, "1")).into_iter().chain(whose::notes(nodes)).collect();
    if then.is_empty() {
        return Ok(());
    }
    let when = then.iter().map(|op| Compare::absent(op.key())).collect();
    let marked = store.commit(Txn { when, then, otherwise: vec![] }, std::time::Instant::now() + CLEAN_WITHIN).await;
    match marked {
        Ok(marked) if marked.result.succeeded || marked.resent => Ok(()),
        Ok(_) => Err(Error::Founding("another run has just begun on this cluster: nothing was done".to_owned())),
        Err(e) => Err(Error::Founding(format!("noting that a run begins: {e}"))),
    }
}

/// Mends everything on those hosts, whatever state they are in, and removes what runs have written; with a `front` schemas, too. A query node
/// that is not, or may not be, of that cluster is left alone ([`whose`](super::whose)). Gives what went wrong.
///
/// # Errors
/// It is another cluster than the one named: nothing was done.
pub async fn mend(hosts: &Hosts, cluster_id: &str, front: Option<&Arc<dyn Front>>, out: &Path) -> Result<Vec<String>> {
    let site = Site::new(hosts.clone(), front.cloned(), out, CancellationToken::new())?;
    // Some may be down; those that answer must be of it.
    let others = foreign(&site.statuses().await, cluster_id);
    if let Some(other) = others.first() {
        return Err(Error::Founding(format!("{other}: nothing was done")));
    }
    let peers: Vec<ProcessName> = site.roster.ids().into_iter().map(ProcessName::metasrv).collect();
    let mut wrong = site.shell.mend(&peers).await;
    let serving = probe::until("all peers to serve", SERVES_WITHIN, || async {
        is_that_cluster(&site, cluster_id, &peers).await.map_err(|e| e.to_string())
    });
    if let Err(e) = serving.await {
        let left = if hosts.query_nodes.is_empty() { "" } else { "; query nodes were left alone" };
        wrong.push(format!("{e}{left}"));
        return Ok(wrong);
    }
    let store = store(&site)?;
    let whose = Whose { front, store: &store };
    let ours = match whose.known().await {
        Ok(known) => may_be_mended(&site, &whose, &known, &mut wrong).await,
        Err(e) => {
            wrong.push(format!("{e}; query nodes were left alone"));
            return Ok(wrong);
        }
    };
    let names: Vec<ProcessName> = ours.iter().map(|(id, _)| ProcessName::query(*id)).collect();
    wrong.extend(site.shell.mend(&names).await);
    let (site, whose) = (&site, &whose);
    let serving = ours.iter().map(|(id, address)| async move {
        let name = ProcessName::query(*id);
        probe::until("a query node to serve", SERVES_WITHIN, || site.serves(name)).await.map_err(|e| e.to_string())?;
        match (front, whose.said_in_time(address).await) {
            // Nothing more is asked of it then.
            (_, Said::Ours) | (None, _) => Ok(()),
            (_, Said::Others(why) | Said::Nothing(why)) => Err(format!("query node {id} at {address}: {why}")),
        }
    });
    let away: Vec<String> = futures::future::join_all(serving).await.into_iter().filter_map(Result::err).collect();
    // Once what the run has noted is gone nobody knows any more which nodes were the cluster's.
    match away.is_empty() {
        true => wrong.extend(remove_all(&store, front, &Roster::new(ours)).await.err().map(|e| e.to_string())),
        false => wrong.extend(away),
    }
    Ok(wrong)
}

/// The query nodes that may be mended. Others are told of.
async fn may_be_mended(site: &Site, whose: &Whose<'_>, known: &Known, wrong: &mut Vec<String>) -> Vec<(u64, String)> {
    let asking = site.query_nodes.peers().into_iter().map(|(id, address)| async move {
        let said = match whose.said(&address).await {
            // A new leader may not have heard it yet.
            Said::Nothing(_) if known.may_be_mended(id, &address, Said::Nothing(String::new())).is_err() => {
                whose.said_in_time(&address).await
            }
            said => said,
        };
        let may = known.may_be_mended(id, &address, said);
        may.map(|()| (id, address.clone())).map_err(|why| format!("query node {id} at {address} was left alone: {why}"))
    });
    let mut ours = Vec::new();
    for may in futures::future::join_all(asking).await {
        match may {
            Ok(node) => ours.push(node),
            Err(why) => wrong.push(why),
        }
    }
    ours
}

/// Removes what runs have written, whichever runs they were. The query nodes are of the cluster.
async fn remove_all(store: &RemoteStore, front: Option<&Arc<dyn Front>>, nodes: &Roster) -> Result<()> {
    if keys(store).await?.iter().any(|(key, _)| key == MARK) {
        let front = front.ok_or_else(|| {
            Error::Founding(
                "the run has made schemas, and this lake was built without SQL: use one that has it".to_owned(),
            )
        })?;
        Schemas { front, nodes, store }.drop_all().await?;
    }
    clean(store).await
}

/// Every peer is of the cluster that was named, and these serve.
async fn is_that_cluster(site: &Site, cluster_id: &str, names: &[ProcessName]) -> Result<()> {
    let answers = site.statuses().await;
    if let Some(other) = foreign(&answers, cluster_id).first() {
        return Err(Error::Founding(format!("{other}: nothing was done")));
    }
    for name in names {
        if let Err(why) = site.serves(*name).await {
            return Err(Error::Founding(format!("{name} does not serve ({why}): a run begins with a whole cluster")));
        }
    }
    let answering: BTreeSet<u64> = answers.iter().filter_map(|answer| Some(answer.self_.as_ref()?.id)).collect();
    let named: BTreeSet<u64> = site.roster.ids().into_iter().collect();
    match answering == named {
        true => Ok(()),
        false => Err(Error::Founding(format!("peers {answering:?} answer where the file has {named:?}"))),
    }
}

/// Peers that are of another cluster.
fn foreign(answers: &[StatusResponse], cluster_id: &str) -> Vec<String> {
    let other = answers.iter().filter(|answer| answer.cluster_id != cluster_id);
    let told = other.map(|answer| {
        let id = answer.self_.as_ref().map_or(0, |member| member.id);
        format!("peer {id} is of the cluster {:?}, and {cluster_id:?} was named", answer.cluster_id)
    });
    told.collect()
}

fn store(site: &Site) -> Result<RemoteStore> {
    let endpoints = site.roster.peers().into_iter().map(|(_, address)| address).collect();
    let config = RemoteConfig { endpoints, secret: site.secret.clone() };
    RemoteStore::connect(config).map_err(|e| Error::Founding(e.to_string()))
}

/// What runs have written, with the revisions of what is there.
async fn keys(store: &RemoteStore) -> Result<Vec<(String, u64)>> {
    let by = std::time::Instant::now() + CLEAN_WITHIN;
    let listed = store.list_all(PREFIX, ReadOptions::default(), by).await;
    let listed = listed.map_err(|e| Error::Founding(format!("looking for what runs have written: {e}")))?;
    Ok(listed.value.into_iter().map(|entry| (entry.key, entry.mod_revision)).collect())
}

/// Removes what runs have written, and nothing else.
async fn clean(store: &RemoteStore) -> Result<()> {
    let by = std::time::Instant::now() + CLEAN_WITHIN;
    loop {
        let all = keys(store).await?;
        if all.is_empty() {
            return Ok(());
        }
        if std::time::Instant::now() >= by {
            let left = format!("{} keys under {PREFIX} are there after {} s", all.len(), CLEAN_WITHIN.as_secs());
            return Err(Error::Founding(format!(
                "{left}: somebody still writes there; lake chaos heal removes the rest"
            )));
        }
        for some in all.chunks(KEYS_AT_ONCE) {
            let txn = Txn {
                when: some.iter().map(|(key, revision)| Compare::mod_revision(key.clone(), *revision)).collect(),
                then: some.iter().map(|(key, _)| Op::delete(key.clone())).collect(),
                otherwise: vec![],
            };
            // If one of them has changed meanwhile, or gone with its lease, they are listed anew.
            let removed = store.commit(txn, by).await;
            removed.map_err(|e| Error::Founding(format!("removing what the run has written: {e}")))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::LOG_FILE;

    const FILE: &str = r#"
        [[peers]]
        id = 1
        address = "127.0.0.1:1"
        [[query_nodes]]
        id = 1
        address = "127.0.0.1:1"
        [commands]
        kill = "echo kill"
        start = "echo start {role}"
        partition = "echo cut {role} {others}"
        heal = "echo heal {role}"
    "#;

    fn site(out: &Path, interrupt: CancellationToken) -> Site {
        Site::new(toml::from_str(FILE).unwrap(), None, out, interrupt).unwrap()
    }

    fn commands(out: &Path) -> String {
        std::fs::read_to_string(out.join(LOG_FILE)).unwrap_or_default()
    }

    #[tokio::test]
    async fn a_bug_of_this_program_does_not_leave_a_cluster_hurt() {
        let dir = tempfile::tempdir().unwrap();
        let site = site(dir.path(), CancellationToken::new());
        assert_eq!(or_mended(&site, async { Ok(7) }).await.unwrap(), 7);
        assert_eq!(commands(dir.path()), "");
        let broken = or_mended(&site, async { if dir.path().exists() { panic!("on purpose") } else { Ok(()) } }).await;
        assert!(matches!(broken, Err(Error::Bug(why)) if why == "on purpose"));
        let mended = commands(dir.path());
        for command in ["heal metasrv", "start metasrv", "heal query", "start query"] {
            assert!(mended.contains(&format!("$ echo {command}\n")), "{command}: {mended}");
        }
    }

    #[tokio::test]
    async fn an_interrupted_run_neither_begins_a_fault_nor_waits_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let interrupt = CancellationToken::new();
        let site = site(dir.path(), interrupt.clone());
        let requested = "query-partition:one".parse().unwrap();
        let mut fault = ByCommand { requested, claimed: Vec::new(), clocks: BTreeMap::new() };
        let mut rng = rand::SeedableRng::seed_from_u64(7);
        // It waits for what never comes, as long as nobody asks for the end.
        let waiting = site.unless_interrupted(std::future::pending::<Result<(), String>>());
        let later = async { interrupt.cancel() };
        assert!(tokio::join!(waiting, later).0.unwrap_err().contains("interrupted"));
        let begun = format!("{:?}", fault.start(&site, &mut rng).await);
        assert!(begun.contains("interrupted"), "{begun}");
        let ended = format!("{:?}", fault.stop(&site).await);
        assert!(ended.contains("mended at once"), "{ended}");
        assert_eq!(commands(dir.path()), "", "everything is mended once, after that");
        assert!(site.hurt.lock().unwrap().is_empty());
    }
}
