//! A run on a cluster that is there already ([`crate::hosts`]). What is done to it, the operator's commands do; whether it took
//! effect is seen by asking the processes.
//!
//! ```text
//!   every peer answers and is of the cluster that was named?  is nothing left of an earlier run?   else nothing is done at all
//!     the run, as on any cluster
//!   mend everything: heal, resume, start of every process  ->  what the run has made is removed  ->  logs are collected
//! ```
//! The last line happens however the run ends, but with the death of this process: [`mend`] does it alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
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
use super::{Ran, heal, under_attack};
use crate::check::convergence::Facts;
use crate::hosts::{Hosts, Shell, Verb, clock_off_s};
use crate::nemesis::clock::{self, Ahead, MOVED_MS, RIGHT_MS};
use crate::nemesis::field::{called, choose, is_as_asked};
use crate::nemesis::kind::{Kind, Requested, Target};
use crate::nemesis::{Done, Nemesis, schedule};
use crate::net::partition;
use crate::process::{ProcessName, Role};
use crate::sql::Front;
use crate::workload::PREFIX;
use crate::workload::access::Roster;
use crate::{Error, Result, probe};

/// How long a fault may take to show: an election, and a connection that is given up.
const SEEN_WITHIN: Duration = Duration::from_secs(15);
/// How long a process may take until it serves again.
const SERVES_WITHIN: Duration = Duration::from_secs(60);
/// How long reading and removing what a run has written may take.
const CLEAN_WITHIN: Duration = Duration::from_secs(60);
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
        _ => None,
    }
}

/// The faults that can be asked for on hosts.
pub const FAULTS: &str = "kill, pause, restart, clock, partition, partition:leader-alone, query-kill, query-pause";

/// The cluster.
struct Site {
    shell: Shell,
    secret: Option<Secret>,
    roster: Roster,
    query_nodes: Roster,
    /// Processes that are under a fault.
    hurt: Mutex<BTreeSet<ProcessName>>,
}

impl Site {
    fn new(hosts: Hosts, out: &Path) -> Result<Self> {
        let secret = hosts.secret()?;
        let roster = |role| Roster::new(hosts.of(role).iter().map(|host| (host.id, host.address.clone())).collect());
        let (peers, query_nodes) = (roster(Role::Metasrv), roster(Role::Query));
        let shell = Shell::new(hosts, out.to_owned());
        Ok(Self { shell, secret, roster: peers, query_nodes, hurt: Mutex::default() })
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
            Role::Query => {
                let nodes = self.query_nodes.peers();
                let known = nodes.iter().find(|(known, _)| *known == name.id);
                let (_, address) = known.ok_or_else(|| format!("there is no {name}"))?;
                probe::serves(address).await
            }
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

    /// Has everything run again.
    ///
    /// # Errors
    /// Not all of it could be done: something may be wrong with the cluster still.
    async fn mend(&self) -> Result<()> {
        let wrong = self.shell.mend().await;
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
        // One that is away already would show nothing.
        site.serves(name).await.map_err(|why| format!("it did not serve before: {why}"))?;
        if verb == Verb::Clock {
            self.clocks.insert(name, site.clock(name).await?);
        }
        site.shell.run(verb, name).await.map_err(|e| e.to_string())?;
        self.seen(site, name).await.map_err(|e| e.to_string())
    }

    async fn end(&mut self, site: &Site, verb: Verb, name: ProcessName) -> Result<String, String> {
        site.shell.run(verb, name).await.map_err(|e| e.to_string())?;
        if let Some(before) = self.clocks.remove(&name) {
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
        serves.map(|()| "it serves".to_owned()).map_err(|e| e.to_string())
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
            if is_rolling && !is_done {
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
            came.push((name.id, self.end(site, ends, *name).await));
        }
        site.release(&claimed);
        Done::of_all(called(role), &came)
    }
}

/// Runs what is asked for on those hosts.
///
/// # Errors
/// The harness's own; and it is another cluster than the one named, not all of it serves, or something is left of an earlier run:
/// then nothing was done.
pub async fn run(
    settings: &Settings,
    (hosts, cluster_id): (&Hosts, &str),
    live: watch::Sender<Live>,
    interrupt: CancellationToken,
) -> Result<Ran> {
    settings.make_directory()?;
    let site = Arc::new(Site::new(hosts.clone(), &settings.out)?);
    is_that_cluster(&site, cluster_id).await?;
    let store = store(&site)?;
    let left = keys(&store).await?.len();
    if left > 0 {
        return Err(Error::Founding(format!(
            "{left} keys under {PREFIX} are of an earlier run, or somebody else's: nothing was done; lake chaos heal removes them"
        )));
    }
    let schemas = match &settings.front {
        Some(front) if settings.workload.is_sql() => Some(Schemas { front, nodes: &site.query_nodes, store: &store }),
        _ => None,
    };
    if let Some(schemas) = &schemas {
        schemas.begin().await?;
    }
    let plan = schedule::plan(&settings.nemeses, settings.time, settings.seed);
    let nemesis = |requested: &Requested| {
        Box::new(ByCommand { requested: *requested, claimed: Vec::new(), clocks: BTreeMap::new() })
            as Box<dyn Nemesis<Site>>
    };
    let nemeses = settings.nemeses.iter().map(nemesis).collect();
    let ran = under_attack(settings, (&plan, nemeses), &site, &Recorder::new(), live, &interrupt).await;
    if ran.is_err() {
        // It says itself what it could not do; what is told of the run is why it did not begin.
        let _ = site.mend().await;
    }
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

/// Mends everything on those hosts, whatever state they are in, and removes what runs have written; with a `front` schemas, too.
/// Gives what went wrong.
///
/// # Errors
/// It is another cluster than the one named: nothing was done.
pub async fn mend(hosts: &Hosts, cluster_id: &str, front: Option<&Arc<dyn Front>>, out: &Path) -> Result<Vec<String>> {
    let site = Site::new(hosts.clone(), out)?;
    // Some may be down; those that answer must be of it.
    let others = foreign(&site.statuses().await, cluster_id);
    if let Some(other) = others.first() {
        return Err(Error::Founding(format!("{other}: nothing was done")));
    }
    let mut wrong = site.shell.mend().await;
    let whole = probe::until("all of the cluster to serve", SERVES_WITHIN, || async {
        is_that_cluster(&site, cluster_id).await.map_err(|e| e.to_string())
    });
    let cleaned = match whole.await {
        Ok(()) => remove_all(&site, front).await,
        Err(e) => Err(e),
    };
    wrong.extend(cleaned.err().map(|e| e.to_string()));
    Ok(wrong)
}

/// Removes what runs have written, whichever runs they were.
async fn remove_all(site: &Site, front: Option<&Arc<dyn Front>>) -> Result<()> {
    let store = store(site)?;
    if keys(&store).await?.iter().any(|(key, _)| key == MARK) {
        let front = front.ok_or_else(|| {
            Error::Founding(
                "the run has made schemas, and this lake was built without SQL: use one that has it".to_owned(),
            )
        })?;
        Schemas { front, nodes: &site.query_nodes, store: &store }.drop_all().await?;
    }
    clean(&store).await
}

/// Every peer serves, and is of the cluster that was named.
async fn is_that_cluster(site: &Site, cluster_id: &str) -> Result<()> {
    let answers = site.statuses().await;
    if let Some(other) = foreign(&answers, cluster_id).first() {
        return Err(Error::Founding(format!("{other}: nothing was done")));
    }
    for name in site.shell.hosts().all() {
        if let Err(why) = site.serves(name).await {
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
