//! One simulation, from the founding of the cluster to a verdict.
//!
//! Between two steps of a millisecond, faults begin and end, and everything that was seen of the peers is held against the
//! invariants; the first broken one ends the simulation. Once the clients have stopped, every fault ends, and the peers must
//! come to the same state by themselves; then everything is read, and the history is judged as that of a fault run is.
//!
//! Limits: each phase has its own, in simulated time; what is not done by then is a finding.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lake_metasrv::blocking;
use lake_proto::v1;
use tokio::sync::{mpsc, watch};

use super::host::{self, Place};
use super::invariants::{Broken, Invariants, Seen, broken};
use super::load::{self, Brought, Change, Phase};
use super::observer::{self, Eyes};
use super::plan::{Fault, LEAST_VOTERS, Plan, Who};
use super::report::Report;
use super::trace::Trace;
use super::{chance, clock, net};
use crate::check::{self, Options, Outcome, Verdict, judge_history};
use crate::history::{History, Kind, Operation};
use crate::run::clients::Reach;
use crate::run::ledger::{Ledger, Looked};
use crate::workload::access::Roster;

const TICK: Duration = Duration::from_millis(1);
/// When every simulation begins: seconds since 1970.
const EPOCH: Duration = Duration::from_secs(1_700_000_000);
const CLIENTS: &str = "clients";
const CHANGES: &str = "changes";
/// How long one operation may take.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the cluster may take to be founded and serve.
const FOUNDED_WITHIN_MS: u64 = 30_000;
/// How long clients may take to end what they are at.
const ENDED_WITHIN_MS: u64 = 30_000;
/// How long the peers may take to agree once all faults have ended.
const HEALED_WITHIN_MS: u64 = 60_000;
/// How long reading everything may take.
const READ_WITHIN_MS: u64 = 120_000;
/// How often peers are compared then, and for how long they must agree.
const COMPARE_EVERY_MS: u64 = 50;
const AGREE_FOR_MS: u64 = 1_000;
/// How long peers are down that crash just before they meet a leader that was cut off.
const DOWN_MS: u64 = 10;
/// How long after its end a fault may still take effect.
const EFFECT_WITHIN_MS: u64 = 10_000;
/// How often it is looked whether something runs beside the simulation.
const COUNT_THREADS_EVERY_MS: u64 = 100;
/// Operations that must succeed, if clients begin so many: with fewer nothing is shown.
const LEAST_SUCCESSES: u64 = 20;
/// The stack of the thread that all of it runs on.
const STACK_BYTES: usize = 256 << 20;
/// What one connection holds in each direction, in messages.
const CONNECTION_MESSAGES: usize = 1 << 14;
/// Checkers' sentences that are told.
const MAX_SENTENCES: usize = 12;

/// Panics, wherever they were caught.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// When the simulation began, on its clocks.
static BEGAN: OnceLock<Instant> = OnceLock::new();

/// Simulates a plan in this process, which must do nothing else from now on: chance, time and threads are the
/// simulation's. The current directory is where snapshots are written.
///
/// # Errors
/// The simulation's own: a file cannot be made, a history makes no sense.
pub fn alone(plan: Plan, trace: Option<PathBuf>) -> Result<Report, String> {
    chance::follow(plan.seed);
    blocking::inline();
    // A peer's wall clock goes as its own clock does.
    lake_client::clock::set_wall(|| {
        let now = lake_client::clock::now();
        EPOCH + BEGAN.get().map(|began| now.saturating_duration_since(*began)).unwrap_or_default()
    });
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.lock().unwrap_or_else(PoisonError::into_inner).push(panic.to_string());
        before(panic);
    }));
    let thread = std::thread::Builder::new().name("sim".into()).stack_size(STACK_BYTES);
    let simulating = move || {
        clock::follow(EPOCH)?;
        let _ = BEGAN.set(Instant::now());
        simulate(plan, trace)
    };
    let simulating = thread.spawn(simulating).map_err(|e| format!("starting a thread: {e}"))?;
    simulating.join().unwrap_or_else(|_| {
        let panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
        Err(format!("the simulation panicked: {}", panics.last().map_or("nobody knows why", String::as_str)))
    })
}

fn simulate(plan: Plan, trace: Option<PathBuf>) -> Result<Report, String> {
    let trace = match trace {
        Some(path) => Trace::into_file(&path).map_err(|e| format!("making {}: {e}", path.display()))?,
        None => Trace::default(),
    };
    let threads = threads()?;
    let mut simulation = Simulation::new(plan, trace);
    let ran = simulation.run();
    if simulation.most_threads > threads {
        return Err(
            "something ran on a thread beside the simulation: what came of it was left to the system".to_owned()
        );
    }
    simulation.conclude(ran)
}

/// How many threads this process has.
fn threads() -> Result<usize, String> {
    let listed = std::fs::read_dir("/proc/self/task").map_err(|e| format!("counting this process's threads: {e}"))?;
    Ok(listed.count())
}

/// Links that are cut, until when.
struct Cut {
    until_ms: u64,
    pairs: Vec<(String, String)>,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Lost,
    Held,
    /// Only from the first to the second.
    OneWay,
}

/// Clocks that were put ahead.
struct Ahead {
    what: String,
    until_ms: u64,
    faster_percent: u64,
    /// Whose, by how much at least, and how far ahead each was before.
    peers: BTreeMap<u64, u64>,
    at_least_ms: u64,
}

/// A disk without room.
struct Filled {
    what: String,
    id: u64,
    until_ms: u64,
    /// Batches that had waited for room before, and have ended.
    waited: u64,
}

struct Host {
    place: Place,
    /// While it is down.
    back_at_ms: Option<u64>,
    /// It was asked to leave: it may end by itself.
    leaving: bool,
    /// The term that it was last seen to lead.
    led: Option<u64>,
}

struct Simulation {
    plan: Plan,
    sim: turmoil::Sim<'static>,
    hosts: BTreeMap<u64, Host>,
    eyes: Eyes,
    invariants: Invariants,
    trace: Trace,
    brought: Brought,
    roster: Roster,
    phase: watch::Sender<Phase>,
    changes: mpsc::UnboundedSender<Change>,
    cuts: Vec<Cut>,
    /// Peers that are to crash, when, and for how long.
    due: Vec<(u64, Vec<u64>, u64)>,
    /// Until when messages are slow.
    slow_until_ms: Option<u64>,
    ahead: Vec<Ahead>,
    filled: Vec<Filled>,
    /// Who has lost its disk.
    lost: Option<u64>,
    /// Faults that were to be seen to take effect, and were not.
    without_effect: Vec<String>,
    /// The attack is over, and with it what has had no effect so far.
    healing: bool,
    /// When the clients began.
    began_ms: u64,
    /// Threads of this process, at most.
    most_threads: usize,
    /// What was done to peers since it was last looked at them.
    seen: Vec<Seen>,
    /// Operations that are in the trace.
    traced: usize,
    /// What was done, with the times.
    done: Vec<String>,
}

impl Simulation {
    fn new(plan: Plan, trace: Trace) -> Self {
        let mut sim = turmoil::Builder::new()
            .rng_seed(plan.seed)
            .epoch(SystemTime::UNIX_EPOCH + EPOCH)
            .simulation_duration(Duration::from_secs(24 * 3600))
            .tick_duration(TICK)
            .min_message_latency(Duration::ZERO)
            .max_message_latency(Duration::from_millis(plan.latency_ms))
            .ephemeral_ports(1024..=9_000)
            .tcp_capacity(CONNECTION_MESSAGES)
            .enable_random_order()
            .build();
        let ids: Vec<u64> = (1..=plan.peers).collect();
        let roster = Roster::new(ids.iter().map(|id| (*id, host::endpoint(*id))).collect());
        let reach = Reach {
            roster: roster.clone(),
            ledger: Arc::new(Ledger::default()),
            endpoints: ids.iter().map(|id| host::endpoint(*id)).collect(),
            timeout: OPERATION_TIMEOUT,
            seed: plan.seed,
            dialer: net::dialer(),
        };
        let (eyes, brought) = (Eyes::default(), Brought::default());
        let (phase, phases) = watch::channel(Phase::Founding);
        let (changes, wanted) = mpsc::unbounded_channel();
        let mut hosts = BTreeMap::new();
        for id in &ids {
            hosts.insert(*id, Host::start(&mut sim, Place::new(*id, &plan, &ids, eyes.clone())));
        }
        sim.client(CLIENTS, load::clients(plan.clone(), reach.clone(), phases, brought.clone()));
        sim.client(CHANGES, load::changes(reach, wanted, brought.clone()));
        Self {
            plan,
            sim,
            hosts,
            eyes,
            invariants: Invariants::default(),
            trace,
            brought,
            roster,
            phase,
            changes,
            cuts: Vec::new(),
            due: Vec::new(),
            slow_until_ms: None,
            ahead: Vec::new(),
            filled: Vec::new(),
            lost: None,
            without_effect: Vec::new(),
            healing: false,
            began_ms: 0,
            most_threads: 0,
            seen: Vec::new(),
            traced: 0,
            done: Vec::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.sim.elapsed().as_millis() as u64
    }

    fn line(&mut self, what: &str) {
        let now = self.now_ms();
        self.trace.line(now, what);
    }

    /// Something is done to the cluster.
    fn told(&mut self, what: &str) {
        let now = self.now_ms();
        self.done.push(format!("{:>3}.{:03} s  {what}", now / 1000, now % 1000));
        self.line(&format!("-- {what}"));
    }

    fn run(&mut self) -> Result<(), Broken> {
        self.until("founding the cluster", FOUNDED_WITHIN_MS, |this| this.leader().is_some())?;
        self.phase.send_replace(Phase::Attacked);
        self.until("the clients' beginning", FOUNDED_WITHIN_MS, |this| this.brought.lock().begun)?;
        self.began_ms = self.now_ms();
        self.attack()?;
        self.phase.send_replace(Phase::Ending);
        self.until("the clients' end", ENDED_WITHIN_MS, |this| this.brought.lock().ended)?;
        self.heal()?;
        self.replaced()?;
        self.agree()?;
        self.forget_strangers();
        self.phase.send_replace(Phase::Healed);
        self.until("reading everything at the end", READ_WITHIN_MS, |this| this.brought.lock().read.is_some())
    }

    fn attack(&mut self) -> Result<(), Broken> {
        let mut faults = self.plan.faults.clone().into_iter().peekable();
        // What lasts until it has taken effect is given some more time for that.
        while self.now_ms() - self.began_ms < self.plan.time_ms
            || (!(self.ahead.is_empty() && self.filled.is_empty())
                && self.now_ms() - self.began_ms < self.plan.time_ms + EFFECT_WITHIN_MS)
        {
            let elapsed = self.now_ms() - self.began_ms;
            while let Some(timed) = faults.next_if(|timed| timed.at_ms <= elapsed) {
                self.begin(&timed.fault);
            }
            self.step()?;
        }
        Ok(())
    }

    /// Steps until something is so.
    fn until(&mut self, what: &str, within_ms: u64, is_so: impl Fn(&Self) -> bool) -> Result<(), Broken> {
        let deadline = self.now_ms() + within_ms;
        while !is_so(self) {
            if self.now_ms() >= deadline {
                return broken("recovery", format!("{what} takes more than {within_ms} ms; {}", self.standing()));
            }
            self.step()?;
        }
        Ok(())
    }

    /// All peers that belong to the cluster have the same, and keep it.
    fn agree(&mut self) -> Result<(), Broken> {
        let deadline = self.now_ms() + HEALED_WITHIN_MS;
        let mut since: Option<(u64, u64)> = None;
        loop {
            let now = self.now_ms();
            if now.is_multiple_of(COMPARE_EVERY_MS) {
                since = match (self.agreed_at(), since) {
                    (Some(index), Some((same, at))) if index == same => Some((same, at)),
                    (Some(index), _) => Some((index, now)),
                    (None, _) => None,
                };
                if since.is_some_and(|(_, at)| now - at >= AGREE_FOR_MS) {
                    return Ok(());
                }
                if now >= deadline {
                    let what = format!(
                        "the peers do not come to the same state within {HEALED_WITHIN_MS} ms after the last fault; {}",
                        self.standing()
                    );
                    return broken("recovery", what);
                }
            }
            self.step()?;
        }
    }

    /// Whoever has lost its disk was refused, and another peer is in its place.
    fn replaced(&mut self) -> Result<(), Broken> {
        let Some(id) = self.lost else { return Ok(()) };
        self.until("replacing a peer that has lost its disk", HEALED_WITHIN_MS, |this| {
            this.brought.lock().replaced.contains(&id)
        })?;
        self.until("the end of a peer that has lost its disk", HEALED_WITHIN_MS, |this| {
            this.hosts.get(&id).is_none_or(|host| host.place.ended().is_some())
        })?;
        let why = self.hosts.get(&id).and_then(|host| host.place.ended()).unwrap_or_default();
        self.told(&format!("peer {id} was refused: {why}"));
        Ok(())
    }

    fn step(&mut self) -> Result<(), Broken> {
        self.end_faults();
        clock::set(self.sim.elapsed());
        if let Err(e) = self.sim.step() {
            return broken("running", format!("a host ended: {e}"));
        }
        if self.now_ms().is_multiple_of(COUNT_THREADS_EVERY_MS) {
            self.most_threads = self.most_threads.max(threads().unwrap_or(usize::MAX));
        }
        self.look()
    }

    // ---- what is seen -----------------------------------------------------------------------------------------

    fn look(&mut self) -> Result<(), Broken> {
        let panic = PANICS.lock().unwrap_or_else(PoisonError::into_inner).first().cloned();
        if let Some(panic) = panic {
            return broken("no panic", panic);
        }
        let now = self.now_ms();
        self.invariants.at(self.hosts.iter().map(|(id, host)| (*id, now + host.place.ahead_ms())).collect());
        let mut seen = std::mem::take(&mut self.seen);
        for (id, host) in &mut self.hosts {
            seen.extend(host.place.disk.take_news().iter().filter_map(|change| observer::on_disk(*id, change)));
            let peer = host.place.peer();
            let leads = peer.and_then(|peer| peer.member()).and_then(|member| member.view.leading_term());
            if leads != host.led {
                host.led = leads;
                seen.extend(leads.map(|term| Seen::Leads { peer: *id, term }));
            }
        }
        seen.extend(self.eyes.take());
        for seen in seen {
            if let Some(line) = line(&seen) {
                self.line(&line);
            }
            self.invariants.see(&seen)?;
        }
        let changes = std::mem::take(&mut self.brought.lock().changes);
        for change in changes {
            self.told(&change);
        }
        for operation in self.new_operations() {
            self.line(&line_of(&operation));
        }
        let ended = self.hosts.iter().find(|(_, host)| !host.leaving && host.place.ended().is_some());
        if let Some((id, host)) = ended {
            return broken("running", format!("peer {id} ended: {}", host.place.ended().unwrap_or_default()));
        }
        Ok(())
    }

    fn new_operations(&mut self) -> Vec<Operation> {
        let recorder = self.brought.lock().recorder.clone();
        let operations = recorder.map(|recorder| recorder.since(self.traced)).unwrap_or_default();
        self.traced += operations.len();
        operations
    }

    /// Whoever leads the newest term.
    fn leader(&self) -> Option<u64> {
        let leading = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_none());
        leading.filter_map(|(id, host)| host.led.map(|term| (term, *id))).max().map(|(_, id)| id)
    }

    fn statuses(&self) -> BTreeMap<u64, v1::StatusResponse> {
        let running = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_none());
        running.filter_map(|(id, host)| Some((*id, host.place.peer()?.status()))).collect()
    }

    /// From now on clients ask members only: a peer whose joining came to nothing answers nobody.
    fn forget_strangers(&self) {
        let statuses = self.statuses();
        let Some(leader) = self.leader().and_then(|id| statuses.get(&id)) else { return };
        let is_member = |id: u64| leader.voters.iter().chain(&leader.learners).any(|member| member.id == id);
        for id in self.roster.ids() {
            if !is_member(id) {
                self.roster.remove(id);
            }
        }
    }

    /// The last index, if there is a leader and every member has applied the same up to there.
    fn agreed_at(&self) -> Option<u64> {
        let statuses = self.statuses();
        let leader = statuses.get(&self.leader()?)?;
        let same = |status: &v1::StatusResponse| {
            status.applied_index == leader.last_log_index && status.state_hash == leader.state_hash
        };
        let members = leader.voters.iter().chain(&leader.learners);
        let all = members.map(|member| statuses.get(&member.id)).all(|status| status.is_some_and(same));
        (all && !leader.changing_voters).then_some(leader.last_log_index)
    }

    /// Where every peer stands, for people.
    fn standing(&self) -> String {
        let ids =
            |members: &[v1::Member]| members.iter().map(|member| member.id.to_string()).collect::<Vec<_>>().join(" ");
        let told = self.statuses().into_iter().map(|(id, status)| {
            let leader = status.leader.as_ref().map_or(0, |leader| leader.id);
            format!(
                "peer {id}: term {}, leader {leader}, log up to {}, applied up to {}, voters {}, learners {}{}{}",
                status.term,
                status.last_log_index,
                status.applied_index,
                ids(&status.voters),
                ids(&status.learners),
                if status.problem.is_empty() { "" } else { ": " },
                status.problem
            )
        });
        told.collect::<Vec<_>>().join("; ")
    }

    // ---- what is done -----------------------------------------------------------------------------------------

    fn who(&self, who: Who) -> u64 {
        match who {
            Who::Leader => self.leader().unwrap_or(1),
            Who::Peer(id) => id,
        }
    }

    fn begin(&mut self, fault: &Fault) {
        let now = self.now_ms();
        let until = move |for_ms: u64| now + for_ms;
        let ids: Vec<u64> = self.hosts.keys().copied().collect();
        let others = |id: u64| ids.iter().copied().filter(move |other| *other != id);
        let hosts = |id: u64, other: u64| (host::name(id), host::name(other));
        let how = |held: bool| if held { How::Held } else { How::Lost };
        let what = fault.to_string();
        self.told(&what);
        match *fault {
            Fault::Crash { who, for_ms } => self.crash(self.who(who), for_ms),
            Fault::CrashAll { for_ms } => ids.iter().for_each(|id| self.crash(*id, for_ms)),
            Fault::Isolate { who, held, for_ms } => {
                let id = self.who(who);
                let pairs = others(id).map(|other| hosts(id, other)).collect();
                self.cut(pairs, how(held), until(for_ms));
            }
            Fault::Depose { for_ms } => {
                let id = self.who(Who::Leader);
                let pairs = others(id).map(|other| hosts(id, other)).collect();
                self.cut(pairs, How::Lost, until(for_ms));
                self.due.push((until(for_ms.saturating_sub(DOWN_MS)), others(id).collect(), DOWN_MS));
            }
            Fault::Mute { who, for_ms } => {
                let id = self.who(who);
                let pairs = others(id).map(|other| hosts(id, other)).collect();
                self.cut(pairs, How::OneWay, until(for_ms));
            }
            Fault::Split { ref side, held, for_ms } => {
                let (here, there): (Vec<u64>, Vec<u64>) = ids.iter().copied().partition(|id| side.contains(id));
                let pairs = here.iter().flat_map(|id| there.iter().map(move |other| hosts(*id, *other))).collect();
                self.cut(pairs, how(held), until(for_ms));
            }
            Fault::Strand { held, for_ms } => {
                let leader = self.who(Who::Leader);
                let stays = |id: &u64| self.hosts.get(id).is_some_and(|host| !host.leaving);
                let minority = ids.iter().filter(|id| stays(id)).count().saturating_sub(1) / 2;
                let followers = others(leader).filter(stays);
                let here: Vec<u64> = std::iter::once(leader).chain(followers).take(minority.max(1)).collect();
                let there = ids.iter().filter(|id| !here.contains(id));
                let pairs = there.flat_map(|other| here.iter().map(move |id| hosts(*id, *other))).collect();
                self.cut(pairs, how(held), until(for_ms));
            }
            Fault::CutClients { who, for_ms } => {
                let pairs = vec![(host::name(self.who(who)), CLIENTS.to_owned())];
                self.cut(pairs, How::Lost, until(for_ms));
            }
            Fault::Slow { latency_ms, for_ms } => {
                self.slow_until_ms = Some(until(for_ms));
                self.sim.set_max_message_latency(Duration::from_millis(latency_ms));
            }
            Fault::Transfer => self.change(Change::Transfer),
            Fault::Join { id } => {
                self.welcome(id);
                self.change(Change::Promote(id));
            }
            Fault::Clock { who, others: all_others, jump_ms, faster_percent, for_ms } => {
                let id = self.running(who);
                let is_meant = |other: &u64| (*other == id) != all_others;
                let hosts = self.hosts.iter().filter(|(other, host)| is_meant(other) && !host.leaving);
                let peers: BTreeMap<_, _> = hosts.map(|(id, host)| (*id, host.place.ahead_ms())).collect();
                for host in peers.keys().filter_map(|id| self.hosts.get(id)) {
                    host.place.put_ahead(jump_ms, faster_percent);
                }
                let at_least_ms = jump_ms.max(1);
                self.ahead.push(Ahead { what, until_ms: until(for_ms), faster_percent, peers, at_least_ms });
            }
            Fault::Full { who, for_ms } => self.fill(what, self.running(who), until(for_ms)),
            Fault::Lose { who, by, for_ms } => {
                let id = self.running(who);
                match self.lose(id, for_ms) {
                    Ok(()) => {
                        self.lost = Some(id);
                        self.welcome(by);
                        self.change(Change::Replace { lost: id, by });
                    }
                    Err(why) => self.without_effect.push(format!("{what}: {why}")),
                }
            }
            Fault::Remove { who } => {
                let id = self.who(who);
                let staying = self.hosts.values().filter(|host| !host.leaving).count();
                let host = self.hosts.get_mut(&id).filter(|host| !host.leaving && staying > LEAST_VOTERS);
                if let Some(host) = host {
                    host.leaving = true;
                    self.roster.remove(id);
                    self.change(Change::Remove(id));
                }
            }
        }
    }

    /// The peer that is meant, or, if it is down or has left, the first one that runs, or that stays.
    fn running(&self, who: Who) -> u64 {
        let id = self.who(who);
        let runs = |host: &Host| host.back_at_ms.is_none() && !host.leaving;
        if self.hosts.get(&id).is_some_and(runs) {
            return id;
        }
        let first = |is_so: &dyn Fn(&Host) -> bool| self.hosts.iter().find(|(_, host)| is_so(host)).map(|(id, _)| *id);
        first(&runs).or_else(|| first(&|host| !host.leaving)).unwrap_or(id)
    }

    fn fill(&mut self, what: String, id: u64, until_ms: u64) {
        let Some(host) = self.hosts.get(&id) else { return };
        let disk = &host.place.disk;
        // What waits already, because of another fault, waits because of this one, too.
        let waited = disk.waited() - u64::from(disk.is_waiting());
        disk.fill();
        self.filled.push(Filled { what, id, until_ms, waited });
    }

    /// A fresh peer starts, which joins by itself.
    fn welcome(&mut self, id: u64) {
        let place = Place::new(id, &self.plan, &[], self.eyes.clone());
        let host = Host::start(&mut self.sim, place);
        self.hosts.insert(id, host);
        self.roster.add(id, host::endpoint(id));
    }

    fn lose(&mut self, id: u64, for_ms: u64) -> Result<(), String> {
        if let Some(other) = self.lost {
            return Err(format!("peer {other} has lost its disk already: two could be a majority"));
        }
        self.crash(id, for_ms);
        let down = self.hosts.get_mut(&id).filter(|host| host.back_at_ms.is_some() && !host.leaving);
        let host = down.ok_or_else(|| format!("peer {id} is gone"))?;
        host.place.lose().map_err(|e| format!("removing the snapshots of peer {id}: {e}"))?;
        // It is refused, and ends.
        host.leaving = true;
        self.seen.push(Seen::Lost { peer: id });
        self.roster.remove(id);
        Ok(())
    }

    fn change(&self, change: Change) {
        // Its task ends only with the simulation.
        let _ = self.changes.send(change);
    }

    fn crash(&mut self, id: u64, for_ms: u64) {
        let back_at_ms = self.now_ms() + for_ms;
        let Some(host) = self.hosts.get_mut(&id) else { return };
        if host.back_at_ms.is_some() || host.place.ended().is_some() {
            return;
        }
        self.sim.crash(host::name(id));
        let (written, lost) = host.place.disk.crash();
        host.back_at_ms = Some(back_at_ms);
        host.led = None;
        self.told(&format!("peer {id} crashes and loses {lost} of {written} changes that were not synced"));
    }

    /// Cuts those of the links that are not cut already.
    fn cut(&mut self, pairs: Vec<(String, String)>, how: How, until_ms: u64) {
        let same = |a: &(String, String), b: &(String, String)| a == b || (&a.1, &a.0) == (&b.0, &b.1);
        let is_cut =
            |pair: &(String, String)| self.cuts.iter().any(|cut| cut.pairs.iter().any(|other| same(pair, other)));
        let pairs: Vec<_> = pairs.into_iter().filter(|pair| !is_cut(pair)).collect();
        for (one, other) in &pairs {
            match how {
                How::Lost => self.sim.partition(one.as_str(), other.as_str()),
                How::Held => self.sim.hold(one.as_str(), other.as_str()),
                How::OneWay => self.sim.partition_oneway(one.as_str(), other.as_str()),
            }
        }
        self.cuts.push(Cut { until_ms, pairs, how });
    }

    fn join(&self, cut: &Cut) {
        for (one, other) in &cut.pairs {
            match cut.how {
                How::Lost => self.sim.repair(one.as_str(), other.as_str()),
                How::Held => self.sim.release(one.as_str(), other.as_str()),
                How::OneWay => self.sim.repair_oneway(one.as_str(), other.as_str()),
            }
        }
    }

    /// Ends what is over by now.
    fn end_faults(&mut self) {
        let now = self.now_ms();
        let cuts = std::mem::take(&mut self.cuts);
        let (over, cuts): (Vec<Cut>, Vec<Cut>) = cuts.into_iter().partition(|cut| cut.until_ms <= now);
        self.cuts = cuts;
        for cut in over {
            self.join(&cut);
            self.told(&format!("{} links are whole again", cut.pairs.len()));
        }
        let due = std::mem::take(&mut self.due);
        let (due, later): (Vec<_>, Vec<_>) = due.into_iter().partition(|(at_ms, ..)| *at_ms <= now);
        self.due = later;
        for (_, ids, for_ms) in due {
            ids.into_iter().for_each(|id| self.crash(id, for_ms));
        }
        if self.slow_until_ms.is_some_and(|until| until <= now) {
            self.slow_until_ms = None;
            self.sim.set_max_message_latency(Duration::from_millis(self.plan.latency_ms));
            self.told("messages are quick again");
        }
        self.end_of_clocks(now);
        self.end_of_full_disks(now);
        let down = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_some_and(|at| at <= now));
        let back: Vec<u64> = down.map(|(id, _)| *id).collect();
        for id in back {
            self.sim.bounce(host::name(id));
            if let Some(host) = self.hosts.get_mut(&id) {
                host.back_at_ms = None;
            }
            self.told(&format!("peer {id} is back"));
        }
    }

    /// Clocks go as they should once their time is over and all were put ahead, but for those of peers that have left.
    fn end_of_clocks(&mut self, now: u64) {
        let hosts = &self.hosts;
        let took_effect = |ahead: &Ahead| {
            let grew = |(id, before): (&u64, &u64)| {
                hosts.get(id).is_some_and(|host| host.place.ahead_ms() >= before + ahead.at_least_ms)
            };
            let left = |id: &u64| hosts.get(id).is_none_or(|host| host.leaving);
            ahead.peers.iter().any(grew) && ahead.peers.iter().all(|(id, before)| grew((id, before)) || left(id))
        };
        let clocks = std::mem::take(&mut self.ahead);
        let (over, going) = clocks
            .into_iter()
            .partition::<Vec<_>, _>(|ahead| ahead.until_ms <= now && (self.healing || took_effect(ahead)));
        let (done, not_done): (Vec<_>, Vec<_>) = over.iter().partition(|ahead| took_effect(ahead));
        self.without_effect.extend(not_done.iter().map(|ahead| ahead.what.clone()));
        self.ahead = going;
        for ahead in done.into_iter().chain(not_done) {
            for host in ahead.peers.keys().filter_map(|id| self.hosts.get(id)) {
                host.place.slow_down(ahead.faster_percent);
            }
        }
        for ahead in &over {
            let peers: Vec<u64> = ahead.peers.keys().copied().collect();
            self.told(&format!("the clocks of peers {peers:?} go like the others again"));
        }
    }

    /// Whether a peer needs a snapshot, since the leader has not any more what comes next in its log.
    fn needs_a_snapshot(&self, id: u64) -> bool {
        let statuses = self.statuses();
        let leader = self.leader().and_then(|leader| statuses.get(&leader));
        let own = statuses.get(&id);
        leader.zip(own).is_some_and(|(leader, own)| own.last_log_index < leader.purged_index)
    }

    /// There is room on a disk again once its time is over and something had to wait for that: entries, or a snapshot, which
    /// is not received without room. Of a peer that leaves before, nothing waits any more: another one's disk is full then.
    fn end_of_full_disks(&mut self, now: u64) {
        for filled in std::mem::take(&mut self.filled) {
            let Some(host) = self.hosts.get(&filled.id) else { continue };
            let waited = host.place.disk.waited() - filled.waited;
            let is_over = filled.until_ms <= now;
            let of_a_snapshot = waited == 0 && is_over && self.needs_a_snapshot(filled.id);
            let took_effect = waited > 0 || of_a_snapshot;
            let leaves = host.leaving && !took_effect && !self.healing;
            if !leaves && (!is_over || (!took_effect && !self.healing)) {
                self.filled.push(filled);
                continue;
            }
            host.place.disk.make_room();
            let what = if of_a_snapshot { "a snapshot".to_owned() } else { format!("{waited} batches") };
            self.told(&format!("peer {} has room on its disk again, which {what} waited for", filled.id));
            if leaves {
                self.fill(filled.what, self.running(Who::Leader), filled.until_ms);
            } else if !took_effect {
                self.without_effect.push(filled.what);
            }
        }
        // Another fault may go on about the same disk.
        for filled in &self.filled {
            if let Some(host) = self.hosts.get(&filled.id) {
                host.place.disk.fill();
            }
        }
    }

    /// Ends all faults.
    fn heal(&mut self) -> Result<(), Broken> {
        let now = self.now_ms();
        self.healing = true;
        self.due.clear();
        self.ahead.iter_mut().for_each(|ahead| ahead.until_ms = now);
        self.filled.iter_mut().for_each(|filled| filled.until_ms = now);
        self.cuts.iter_mut().for_each(|cut| cut.until_ms = now);
        self.slow_until_ms = self.slow_until_ms.map(|_| now);
        for host in self.hosts.values_mut() {
            host.back_at_ms = host.back_at_ms.map(|_| now);
        }
        self.end_faults();
        self.told("all faults have ended");
        self.step()
    }

    // ---- what came of it --------------------------------------------------------------------------------------

    fn conclude(mut self, ran: Result<(), Broken>) -> Result<Report, String> {
        let (recorder, read) = {
            let mut brought = self.brought.lock();
            (brought.recorder.take(), brought.read.take())
        };
        let tally = recorder.as_ref().map(|recorder| recorder.tally()).unwrap_or_default();
        let operations = recorder.map(|recorder| recorder.take().0).unwrap_or_default();
        let begun = operations.iter().filter(|operation| operation.kind == Kind::Invoke).count() as u64;
        let mut findings = Vec::new();
        let (verdict, broke) = match ran {
            Err(Broken { invariant, what }) => {
                (Verdict::Violation(format!("{invariant}: {what}")), Some(invariant.to_owned()))
            }
            Ok(()) => self.judge(operations, read, tally.ok, &mut findings)?,
        };
        self.line(&format!("-- {verdict}"));
        Ok(Report {
            verdict,
            broke,
            findings,
            faults: self.done,
            tail: self.trace.tail(),
            lines: self.trace.lines(),
            hash: format!("{:016x}", self.trace.hash()),
            operations: begun,
            succeeded: tally.ok,
            applied: self.invariants.applied(),
            simulated_ms: self.sim.elapsed().as_millis() as u64,
            plan: self.plan,
        })
    }

    /// What the history says of it.
    fn judge(
        &self,
        operations: Vec<Operation>,
        read: Option<Result<Looked, String>>,
        succeeded: u64,
        findings: &mut Vec<String>,
    ) -> Result<(Verdict, Option<String>), String> {
        let looked_for = match read {
            Some(Ok(looked)) if looked.not_found.is_empty() => looked.looked_for,
            Some(Ok(looked)) => {
                findings.extend(looked.not_found);
                let what = "acknowledged: something that was acknowledged is not there at the end".to_owned();
                return Ok((Verdict::Violation(what), Some("acknowledged".to_owned())));
            }
            Some(Err(e)) => {
                let what = format!("recovery: not everything could be read at the end: {e}");
                return Ok((Verdict::Violation(what), Some("recovery".to_owned())));
            }
            None => return Err("nothing was read at the end".to_owned()),
        };
        let history = History::new(operations).map_err(|e| format!("the history: {e}"))?;
        let drift = self.plan.has(|fault| matches!(fault, Fault::Clock { .. }));
        let options = Options { drift, ..Options::default() };
        let outcomes = judge_history(self.plan.workload, &history, &options);
        let is_broken = |outcome: &&Outcome| matches!(outcome.verdict, Verdict::Violation(_));
        let broke = outcomes.iter().find(is_broken).map(|outcome| outcome.checker.clone());
        for finding in outcomes.iter().flat_map(|outcome| &outcome.findings) {
            findings.extend(finding.explanation.iter().map(|sentence| format!("{}: {sentence}", finding.kind)));
        }
        findings.truncate(MAX_SENTENCES);
        let mut verdict = check::verdict(&outcomes);
        if let Some(what) = self.without_effect.first() {
            verdict = verdict.worse(Verdict::Unknown(format!("a fault took no effect: {what}")));
        }
        let needed = LEAST_SUCCESSES.min(self.plan.operations);
        if succeeded < needed {
            let too_few = format!("only {succeeded} operations succeeded, {needed} are needed");
            verdict = verdict.worse(Verdict::Unknown(too_few));
        }
        if looked_for == 0 {
            let nothing = "nothing that was acknowledged could be looked for at the end".to_owned();
            verdict = verdict.worse(Verdict::Unknown(nothing));
        }
        Ok((verdict, broke))
    }
}

impl Host {
    fn start(sim: &mut turmoil::Sim<'static>, place: Place) -> Self {
        let living = place.clone();
        sim.host(host::name(place.id), move || living.clone().live());
        Self { place, back_at_ms: None, leaving: false, led: None }
    }
}

/// What the trace says of something that was seen.
fn line(seen: &Seen) -> Option<String> {
    Some(match seen {
        Seen::Started { peer } => format!("p{peer} starts"),
        Seen::Leads { peer, term } => format!("p{peer} leads term {term}"),
        Seen::Follows { peer, term, leader } => format!("p{peer} follows p{leader} in term {term}"),
        Seen::Appended { peer, index, term, entry } => {
            format!("p{peer} has entry {index} of term {term}: {entry:016x}")
        }
        Seen::Truncated { peer, last } => format!("p{peer} truncates its log after {last:?}"),
        Seen::Purged { peer, upto } => format!("p{peer} purges its log up to {upto}"),
        Seen::Applied { peer, applied } => format!(
            "p{peer} applies entry {} of term {}: revision {}, state {:032x}",
            applied.index, applied.term, applied.revision, applied.state
        ),
        Seen::Lost { peer } => format!("p{peer} has lost its disk"),
        Seen::Installed { peer, index, state } => {
            format!("p{peer} begins from a snapshot at {index}: state {state:032x}")
        }
    })
}

fn line_of(operation: &Operation) -> String {
    let Operation { process, kind, action, revision, peer, refusal, error, .. } = operation;
    let mut line = format!("client {process} {kind:?} {action:?}");
    line.extend(revision.map(|revision| format!(" at revision {revision}")));
    line.extend(peer.map(|peer| format!(" from p{peer}")));
    line.extend(refusal.iter().chain(error).map(|why| format!(" ({why})")));
    line
}
