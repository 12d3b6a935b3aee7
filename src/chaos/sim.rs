//! `lake chaos sim`: the metadata cluster in one process, decided by a seed.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lake_chaos::check::{HARNESS_ERROR, Verdict};
use lake_chaos::history::Workload;
use lake_chaos::sim::children::{self, Children};
use lake_chaos::sim::plan::{MAX_TIME, Plan, Profile};
use lake_chaos::sim::report::{Effect, Report};

use super::run::duration;
use crate::output;
use crate::signals::{Interrupts, Termination};

/// How often it is told how far it is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Options of `lake chaos sim`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which seeds: a number, or two with dots between, both included
    #[arg(long, default_value = "1..100", value_name = "FROM..TO", value_parser = seeds_of)]
    seeds: RangeInclusive<u64>,
    /// Which faults: crash, partition, membership, snapshot, clock, disk; none for no fault. Of each that is named, one must have
    /// taken effect in some seed [default: any]
    #[arg(long, value_name = "NAME,...")]
    profile: Option<Profile>,
    /// What the clients do, drawn from these: register, set, append, bank, watch, lock, idempotency, session. Each that is named
    /// must be in some seed [default: any]
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    workload: Vec<Workload>,
    /// How long the clients are at it, in simulated time
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = duration)]
    time: Duration,
    /// Begin no more seeds after this long, of real time
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Option<Duration>,
    /// How many simulations at once [default: as many as there are processors]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Simulate this plan instead: a file that an earlier simulation has left
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "profile", "workload", "time", "budget"])]
    plan: Option<PathBuf>,
    /// Write the whole trace to this file: with a single seed, or a plan
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Where the plans of failing seeds go, made smaller: seed-N.json
    #[arg(long, default_value = ".", value_name = "DIR")]
    out: PathBuf,
    /// Simulations that making a failing seed smaller may take; 0: it stays as it is
    #[arg(long, default_value_t = 60, value_name = "N")]
    attempts: u32,
    /// Be the process of one simulation
    #[arg(long, hide = true)]
    child: bool,
}

/// Simulates. Gives the exit code: 0 all valid, 1 a violation, 2 something unknown.
///
/// # Errors
/// The command's own: a simulation that does not come to an end, a file that cannot be written.
pub async fn run(args: Args) -> Result<u8> {
    if args.child {
        let done = tokio::task::spawn_blocking(move || children::child(args.trace)).await?;
        let report = done.map_err(|e| anyhow!(e))?;
        output::print(&serde_json::to_string(&report)?)?;
        return Ok(0);
    }
    if args.time > MAX_TIME {
        bail!("a simulation takes up to {} s, not {}", MAX_TIME.as_secs(), args.time.as_secs_f64());
    }
    let program = std::env::current_exe().context("finding out which program this is")?;
    let children = Arc::new(Children::new(program));
    let mut interrupts = Interrupts::listen()?;
    let mut termination = Termination::listen()?;
    let (simulating, of) = (children.clone(), Arc::new(args));
    let mut done = tokio::task::spawn_blocking(move || simulate(&of, &simulating));
    loop {
        tokio::select! {
            done = &mut done => return done?,
            () = interrupts.next() => children.stop(),
            () = termination.next() => children.stop(),
        }
    }
}

fn simulate(args: &Args, children: &Children) -> Result<u8> {
    let workloads = if args.workload.is_empty() { Workload::OF_KEYS.to_vec() } else { args.workload.clone() };
    if let Some(sql) = workloads.iter().find(|workload| workload.is_sql()) {
        bail!("the workload {sql} needs query nodes, which a simulation has not: use lake chaos run");
    }
    let draw = |seed| Plan::draw(seed, args.profile.unwrap_or(Profile::ALL), &workloads, args.time);
    let single = match &args.plan {
        Some(path) => Some(read(path)?),
        None if args.seeds.start() == args.seeds.end() => Some(draw(*args.seeds.start())),
        None => None,
    };
    let wanted = if single.is_some() { 1 } else { seeds_in(&args.seeds) };
    let tally = Mutex::new(Tally::new(wanted, args.profile, args.workload.clone()));
    let locked = || tally.lock().unwrap_or_else(PoisonError::into_inner);
    match (single, &args.trace) {
        (Some(plan), trace) => {
            let trace =
                trace.as_ref().map(std::path::absolute).transpose().context("finding out where the trace goes")?;
            let report = children.simulate(&plan, trace.as_deref());
            if !(report.is_err() && children.stopped()) {
                locked().take(plan.seed, report);
            }
        }
        (None, Some(_)) => bail!("a trace is of one simulation: name a single seed, or a plan"),
        (None, None) => {
            let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
            let until = args.budget.map(|budget| Instant::now() + budget);
            children.all(args.seeds.clone(), jobs, until, draw, |seed, report| locked().take(seed, report));
        }
    }
    let mut tally = std::mem::take(&mut *locked());
    // What comes later only cuts short how what failed is made smaller.
    tally.interrupted = children.stopped() && tally.ended() < tally.wanted;
    for report in &tally.failed {
        fail(report, args, children)?;
    }
    for (seed, why) in &tally.unknown {
        output::print(&format!("seed {seed}: unknown: {why}\n"))?;
    }
    for (seed, why) in &tally.harness {
        output::print(&format!("seed {seed}: no verdict: {why}\n"))?;
    }
    for name in tally.not_shown() {
        output::print(&format!(
            "unknown: no fault of the profile {name} took effect; simulate more seeds, or longer\n"
        ))?;
    }
    for workload in &tally.missing {
        output::print(&format!("unknown: no simulation had the workload {workload}; simulate more seeds\n"))?;
    }
    if tally.interrupted {
        output::print(&format!("unknown: interrupted after {} of {} seeds\n", tally.ended(), tally.wanted))?;
    }
    output::print(&format!("{}\n", tally.sum()))?;
    Ok(tally.exit_code())
}

fn read(path: &Path) -> Result<Plan> {
    let text = std::fs::read(path).with_context(|| format!("reading the plan {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("reading the plan {}", path.display()))
}

/// Tells of a failing seed, after it was made smaller.
fn fail(report: &Report, args: &Args, children: &Children) -> Result<()> {
    let seed = report.plan.seed;
    output::print(&format!("seed {seed}: {}\n", report.verdict))?;
    let smaller = if args.attempts == 0 { None } else { children.minimise(report, args.attempts) };
    let told = smaller.as_ref().map_or(report, |smaller| &smaller.result);
    let file = args.out.join(format!("seed-{seed}.json"));
    let plan = serde_json::to_string_pretty(&told.plan)?;
    std::fs::write(&file, plan).with_context(|| format!("writing the plan {}", file.display()))?;
    let attempts = smaller.as_ref().map(|smaller| smaller.attempts);
    output::print(&describe(report, told, attempts, &file))
}

fn describe(first: &Report, told: &Report, attempts: Option<u32>, file: &Path) -> String {
    let mut text = String::new();
    let Plan { peers, workload, clients, faults, .. } = &told.plan;
    if let Some(attempts) = attempts {
        let _ = writeln!(
            text,
            "made smaller in {attempts} simulations: {} of {} faults, {} of {} operations, {clients} of {} clients\n{}",
            faults.len(),
            first.plan.faults.len(),
            told.operations,
            first.operations,
            first.plan.clients,
            told.verdict
        );
    }
    let _ = writeln!(text, "{peers} peers, {workload}, {clients} clients; the plan's faults, since the clients began:");
    lines(&mut text, faults);
    let _ = writeln!(text, "what was done, and came of it, since the simulation began:");
    lines(&mut text, &told.faults);
    if !told.findings.is_empty() {
        let _ = writeln!(text, "found:");
        lines(&mut text, &told.findings);
    }
    let _ = writeln!(text, "the trace's last {} of {} lines:", told.tail.len(), told.lines);
    lines(&mut text, &told.tail);
    let _ = writeln!(text, "again, with all of the trace: lake chaos sim --plan {} --trace FILE\n", file.display());
    text
}

fn lines(text: &mut String, lines: &[impl Display]) {
    for line in lines {
        let _ = writeln!(text, "  {line}");
    }
}

/// What the simulations so far came to.
#[derive(Default)]
struct Tally {
    wanted: u64,
    /// It was told to stop before all of them had ended.
    interrupted: bool,
    /// The faults that were asked for by name.
    asked: Option<Profile>,
    /// The workloads that were asked for by name and that no simulation has had so far.
    missing: Vec<Workload>,
    begun: Option<Instant>,
    told: Option<Instant>,
    valid: u64,
    unknown: Vec<(u64, String)>,
    failed: Vec<Report>,
    harness: Vec<(u64, String)>,
    effects: BTreeMap<String, Effect>,
    operations: u64,
    applied: u64,
    simulated_ms: u64,
    /// Of a single one.
    hash: Option<String>,
}

impl Tally {
    fn new(wanted: u64, asked: Option<Profile>, workloads: Vec<Workload>) -> Self {
        let now = Some(Instant::now());
        Self { wanted, asked, missing: workloads, begun: now, told: now, ..Self::default() }
    }

    /// What was asked for by name, and took no effect in any simulation.
    fn not_shown(&self) -> impl Iterator<Item = &'static str> {
        let took_effect = |kind: &&str| self.effects.get(*kind).is_some_and(|effect| effect.took_effect > 0);
        let asked = self.asked.into_iter().flat_map(Profile::shown_by);
        asked.filter(move |(_, kinds)| !kinds.iter().any(took_effect)).map(|(name, _)| name)
    }

    fn ended(&self) -> u64 {
        self.valid + (self.unknown.len() + self.failed.len() + self.harness.len()) as u64
    }

    fn take(&mut self, seed: u64, report: Result<Report, String>) {
        match report {
            Err(why) => self.harness.push((seed, why)),
            Ok(report) => {
                self.missing.retain(|workload| *workload != report.plan.workload);
                for (kind, effect) in &report.effects {
                    let sum = self.effects.entry(kind.clone()).or_default();
                    sum.begun += effect.begun;
                    sum.took_effect += effect.took_effect;
                }
                self.operations += report.operations;
                self.applied += report.applied;
                self.simulated_ms += report.simulated_ms;
                self.hash = Some(report.hash.clone());
                match &report.verdict {
                    Verdict::Valid => self.valid += 1,
                    Verdict::Unknown(why) => self.unknown.push((seed, why.clone())),
                    Verdict::Violation(what) => {
                        eprintln!("seed {seed}: violation: {what}");
                        self.failed.push(report);
                    }
                }
            }
        }
        if self.told.is_some_and(|told| told.elapsed() >= TELL_EVERY) {
            self.told = Some(Instant::now());
            eprintln!("{} of {} seeds, {} violations", self.ended(), self.wanted, self.failed.len());
        }
    }

    fn sum(&self) -> String {
        let took = self.begun.map(|begun| begun.elapsed()).unwrap_or_default();
        let mut sum = format!(
            "{} seeds: {} valid, {} unknown, {} violations; {} operations, {} entries, {} s simulated in {:.1} s",
            self.ended(),
            self.valid,
            self.unknown.len(),
            self.failed.len(),
            self.operations,
            self.applied,
            self.simulated_ms / 1000,
            took.as_secs_f64()
        );
        if !self.harness.is_empty() {
            let _ = write!(sum, "; {} came to no verdict", self.harness.len());
        }
        let effects = self.effects.iter();
        let effects = effects.map(|(kind, effect)| format!("{kind} {} of {}", effect.took_effect, effect.begun));
        let effects = effects.collect::<Vec<_>>().join(", ");
        if !effects.is_empty() {
            let _ = write!(sum, "; faults that took effect: {effects}");
        }
        if self.ended() == 1 {
            let _ = write!(sum, "; trace {}", self.hash.as_deref().unwrap_or("none"));
        }
        sum
    }

    fn exit_code(&self) -> u8 {
        if !self.failed.is_empty() {
            1
        } else if !self.harness.is_empty() || (self.ended() == 0 && !self.interrupted) {
            HARNESS_ERROR
        } else if self.interrupted
            || !self.unknown.is_empty()
            || self.not_shown().next().is_some()
            || !self.missing.is_empty()
        {
            2
        } else {
            0
        }
    }
}

fn seeds_in(seeds: &RangeInclusive<u64>) -> u64 {
    (seeds.end() - seeds.start()).saturating_add(1)
}

/// `1..1000`, both included; `1..=1000`; `7`.
fn seeds_of(word: &str) -> Result<RangeInclusive<u64>, String> {
    let number =
        |word: &str| word.parse::<u64>().map_err(|_| "write a seed, or two with dots between: 1..1000".to_owned());
    let Some((from, to)) = word.split_once("..") else {
        let seed = number(word)?;
        return Ok(seed..=seed);
    };
    let (from, to) = (number(from)?, number(to.strip_prefix('=').unwrap_or(to))?);
    if from > to { Err(format!("there is no seed from {from} to {to}")) } else { Ok(from..=to) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_by_name_and_never_came_makes_the_verdict_unknown() {
        let after = |profile: Option<&str>, kinds: &[(&str, u64)]| {
            let mut tally = Tally::new(1, profile.map(|profile| profile.parse().unwrap()), vec![]);
            let effect = |took_effect| Effect { begun: 2, took_effect };
            tally.effects = kinds.iter().map(|(kind, took)| ((*kind).to_owned(), effect(*took))).collect();
            tally.valid = 1;
            (tally.exit_code(), tally.not_shown().collect::<Vec<_>>())
        };
        assert_eq!(after(Some("crash,partition"), &[("crash", 1), ("split", 2)]), (0, vec![]));
        assert_eq!(after(Some("crash,partition"), &[("crash", 1)]), (2, vec!["partition"]));
        assert_eq!(after(Some("membership"), &[("transfer", 0), ("crash", 1)]), (2, vec!["membership"]));
        assert_eq!(after(Some("snapshot"), &[("crash", 1)]), (2, vec!["snapshot"]));
        assert_eq!(after(Some("none"), &[]), (0, vec![]));
        assert_eq!(after(None, &[("crash", 1)]), (0, vec![]), "nothing was asked for by name");
        let tally = Tally { valid: 1, ..Tally::new(1, None, vec![Workload::Lock]) };
        assert_eq!(tally.exit_code(), 2, "nobody has locked anything");
    }

    #[test]
    fn what_was_interrupted_is_unknown_unless_something_is_broken() {
        let after = |interrupted, valid, harness: &[(u64, String)]| {
            Tally { wanted: 9, interrupted, valid, harness: harness.to_vec(), ..Tally::default() }.exit_code()
        };
        assert_eq!(after(true, 4, &[]), 2, "the others were not looked at");
        assert_eq!(after(true, 0, &[]), 2);
        assert_eq!(after(false, 4, &[]), 0, "as many as a budget had time for");
        assert_eq!(after(false, 0, &[]), 3, "and if it had time for none");
        assert_eq!(after(true, 4, &[(5, "it died".to_owned())]), 3);
    }

    #[test]
    fn seeds_are_read() {
        assert_eq!((seeds_in(&(7..=7)), seeds_in(&(1..=1000)), seeds_in(&(0..=u64::MAX))), (1, 1000, u64::MAX));
        assert_eq!(seeds_of("1..1000"), Ok(1..=1000));
        assert_eq!(seeds_of("1..=3"), Ok(1..=3));
        assert_eq!(seeds_of("7"), Ok(7..=7));
        assert!(seeds_of("7..").is_err() && seeds_of("9..2").is_err() && seeds_of("all").is_err());
    }
}
