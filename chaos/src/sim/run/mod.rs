//! One simulation, from the founding of the cluster to a verdict.
//!
//! Between two steps of a millisecond, faults begin and end, and everything that was seen of the peers is held against the
//! invariants; the first broken one ends the simulation. Once the clients have stopped, every fault ends, and the peers must
//! come to the same state by themselves; then everything is read, and the history is judged as that of a fault run is.
//!
//! Limits: each phase has its own, in simulated time; what is not done by then is a finding.
//!
//! - [`faults`], [`lasting`]: what is done to the cluster, and whether it took effect; [`look`]: what is seen of it;
//!   [`verdict`]: what came of it.

mod faults;
mod lasting;
mod look;
mod verdict;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lake_metasrv::blocking;
use tokio::sync::{mpsc, watch};

use self::faults::{Asked, Crash, Cut, Slow};
use self::lasting::{Ahead, Filled};
use super::host::{self, Place};
use super::invariants::{Broken, Invariants, Seen, broken};
use super::load::{self, Brought, Change, Phase};
use super::net::Ways;
use super::observer::Eyes;
use super::plan::Plan;
use super::report::{Effect, Report};
use super::trace::Trace;
use super::{chance, clock};
use crate::run::clients::Reach;
use crate::run::ledger::Ledger;
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
/// How long after its end a fault may still take effect.
const EFFECT_WITHIN_MS: u64 = 10_000;
/// How often it is looked whether something runs beside the simulation.
const COUNT_THREADS_EVERY_MS: u64 = 100;
/// The stack of the thread that all of it runs on.
const STACK_BYTES: usize = 256 << 20;
/// What one connection holds in each direction, in messages.
const CONNECTION_MESSAGES: usize = 1 << 14;

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
    ways: Ways,
    cuts: Vec<Cut>,
    /// Peers that are to crash, when, and for how long.
    due: Vec<(u64, Vec<u64>, u64)>,
    /// Crashes that nobody was there for so far.
    crashes: Vec<Crash>,
    /// The newest is last.
    slow: Vec<Slow>,
    ahead: Vec<Ahead>,
    filled: Vec<Filled>,
    /// Who has lost its disk, by which fault.
    lost: Option<(u64, Asked)>,
    /// Faults that were to be seen to take effect, and were not.
    without_effect: Vec<String>,
    /// How many faults of each kind there were, and took effect.
    effects: BTreeMap<String, Effect>,
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
        let ways = Ways::default();
        let reach = Reach {
            roster: roster.clone(),
            ledger: Arc::new(Ledger::default()),
            endpoints: ids.iter().map(|id| host::endpoint(*id)).collect(),
            timeout: OPERATION_TIMEOUT,
            seed: plan.seed,
            secret: None,
            dialer: ways.dialer(CLIENTS),
            door: None,
        };
        let (eyes, brought) = (Eyes::default(), Brought::default());
        let (phase, phases) = watch::channel(Phase::Founding);
        let (changes, wanted) = mpsc::unbounded_channel();
        let mut hosts = BTreeMap::new();
        for id in &ids {
            hosts.insert(*id, Host::start(&mut sim, Place::new(*id, &plan, &ids, ways.clone(), eyes.clone())));
        }
        sim.client(CLIENTS, load::clients(plan.clone(), reach.clone(), phases, brought.clone()));
        let reach = Reach { dialer: ways.dialer(CHANGES), ..reach };
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
            ways,
            cuts: Vec::new(),
            due: Vec::new(),
            crashes: Vec::new(),
            slow: Vec::new(),
            ahead: Vec::new(),
            filled: Vec::new(),
            lost: None,
            without_effect: Vec::new(),
            effects: BTreeMap::new(),
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
            || (self.waits_for_effects() && self.now_ms() - self.began_ms < self.plan.time_ms + EFFECT_WITHIN_MS)
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
        let Some((id, asked)) = self.lost.clone() else { return Ok(()) };
        self.until("replacing a peer that has lost its disk", HEALED_WITHIN_MS, |this| {
            this.brought.lock().replaced.contains(&id)
        })?;
        self.until("the end of a peer that has lost its disk", HEALED_WITHIN_MS, |this| {
            this.hosts.get(&id).is_none_or(|host| host.place.ended().is_some())
        })?;
        let why = self.hosts.get(&id).and_then(|host| host.place.ended()).unwrap_or_default();
        self.told(&format!("peer {id} was refused: {why}"));
        self.took_effect(&asked);
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
}

impl Host {
    fn start(sim: &mut turmoil::Sim<'static>, place: Place) -> Self {
        let living = place.clone();
        sim.host(host::name(place.id), move || living.clone().live());
        Self { place, back_at_ms: None, leaving: false, led: None }
    }
}
