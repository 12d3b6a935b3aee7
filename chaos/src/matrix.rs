//! Which workloads meet which faults in `lake chaos matrix`, the most telling first, and how long each has.
//!
//! Each pair is a run of its own (`lake chaos run`), so that one that goes wrong takes no other with it.

use std::time::Duration;

use crate::history::Workload;
use crate::hosts::Hosts;
use crate::nemesis::kind::{Kind, Requested};
use crate::nemesis::{clock, disk};
use crate::run::hosts::verbs;
use crate::run::settings::MAX_TIME;

/// What a run takes besides the time in which clients are at it, about: starting, healing, reading everything, judging.
pub const BESIDE: Duration = Duration::from_secs(15);
/// The shortest time in which clients see each of two or three faults more than once.
pub const LEAST: Duration = Duration::from_secs(30);

/// A workload under faults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    pub workload: Workload,
    /// As on the command line.
    pub nemeses: &'static [&'static str],
    /// Operations per second, all clients together: what a machine with two cores serves.
    pub rate: u32,
    pub clients: u32,
}

/// The priority list: where time is short, those at its end are left out.
pub const PAIRS: &[Pair] = &[
    pair(Workload::Table, &["query-kill:one", "kill:leader"], 10, 5),
    pair(Workload::MultiTable, &["query-kill:one", "query-partition:one"], 8, 4),
    pair(Workload::Catalog, &["query-kill:one", "kill:leader"], 12, 5),
    pair(Workload::Cached, &["query-partition:one", "query-kill:one"], 20, 6),
    pair(Workload::Hot, &["query-kill:one", "kill:leader"], 30, 12),
    pair(Workload::Table, &["store-late", "store-throttle"], 10, 5),
    pair(Workload::Register, &["kill:leader", "partition"], 150, 8),
    pair(Workload::Idempotency, &["kill:leader", "endpoint:minority"], 100, 6),
    pair(Workload::Lock, &["pause:one", "kill:leader"], 100, 6),
    pair(Workload::Table, &["query-partition:one", "query-pause:one"], 10, 5),
    pair(Workload::Set, &["power:all", "sync:minority"], 200, 4),
    pair(Workload::Watch, &["partition", "lossy"], 100, 6),
    pair(Workload::Bank, &["slow:leader", "pause:one"], 150, 6),
    pair(Workload::Append, &["kill:leader", "partition"], 100, 6),
    pair(Workload::MultiTable, &["store-late", "store-refuse"], 8, 4),
    pair(Workload::Table, &["store-partition:one", "query-kill:one"], 10, 5),
    pair(Workload::MultiTable, &["query-pause:one", "partition"], 8, 4),
    pair(Workload::Catalog, &["query-partition:one", "partition"], 12, 5),
    pair(Workload::Upkeep, &["query-kill:one", "query-pause:one"], 12, 6),
    pair(Workload::Upkeep, &["query-partition:one", "kill:leader"], 12, 6),
    pair(Workload::Hot, &["store-refuse", "store-slow"], 20, 8),
    pair(Workload::Session, &["transfer", "kill:one"], 100, 4),
    pair(Workload::Register, &["snapshot", "restart"], 150, 8),
    pair(Workload::Set, &["wipe", "lossy:all"], 100, 4),
    pair(Workload::Append, &["membership:leader", "transfer"], 100, 6),
    pair(Workload::Watch, &["corrupt", "loss"], 100, 6),
    pair(Workload::Lock, &["clock", "pause:leader"], 100, 6),
    pair(Workload::Set, &["rejoin", "reorder"], 100, 4),
    pair(Workload::Register, &["disk", "clock"], 100, 4),
];

const fn pair(workload: Workload, nemeses: &'static [&'static str], rate: u32, clients: u32) -> Pair {
    Pair { workload, nemeses, rate, clients }
}

impl Pair {
    /// As `--only` names it: `table/query-kill:one+kill:leader`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.workload, self.nemeses.join("+"))
    }

    /// As its directory is called, behind its number.
    pub fn directory(&self) -> String {
        self.name().replace(|c: char| !c.is_ascii_alphanumeric(), "-")
    }

    /// What of its faults can be had on a cluster that is there already, by its operator's commands; or why none can.
    ///
    /// # Errors
    /// It speaks SQL, and there is no query node; no fault can be had; or the one cannot without which the workload shows nothing.
    pub fn on(&self, hosts: &Hosts) -> Result<Vec<&'static str>, String> {
        if self.workload.is_sql() && hosts.query_nodes.is_empty() {
            return Err("the file names no query nodes".to_owned());
        }
        let can = |word: &&'static str| {
            let asked = word.parse::<Requested>().ok();
            asked.and_then(|asked| verbs(&asked)).is_some_and(|(verbs, _)| verbs.iter().all(|verb| hosts.can(*verb)))
        };
        let had: Vec<&str> = self.nemeses.iter().copied().filter(can).collect();
        let is_of = |word: &&str, kind| word.parse::<Requested>().is_ok_and(|asked| asked.kind == kind);
        if self.workload == Workload::Cached && !had.iter().any(|word| is_of(word, Kind::QueryPartition)) {
            return Err(
                "no answer says how old it is without query-partition, which takes commands partition and heal"
                    .to_owned(),
            );
        }
        if had.is_empty() { Err("none of its faults can be had by commands".to_owned()) } else { Ok(had) }
    }

    /// Whether it takes an object store.
    pub fn is_of_the_store(&self) -> bool {
        let asked = self.nemeses.iter().filter_map(|word| word.parse::<Requested>().ok());
        asked.map(|asked| asked.kind).any(Kind::is_of_the_store)
    }

    /// Why this machine cannot have it; `None` if it can. Such a run would be unknown, whatever the cluster does.
    pub fn missing(&self) -> Option<String> {
        let asked: Vec<Requested> = self.nemeses.iter().filter_map(|word| word.parse().ok()).collect();
        let clock = asked.iter().any(|asked| asked.kind == Kind::Clock) && clock::library().is_none();
        match disk::needed(&asked).then(crate::disk::missing).flatten() {
            Some(missing) => Some(format!("faults of disks: {missing}")),
            None => clock.then(|| "faults of clocks: the package libfaketime is not there".to_owned()),
        }
    }
}

/// What is run.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// Each with its place in the list, from 1.
    pub runs: Vec<(usize, &'static Pair)>,
    /// Those that are not run, and why.
    pub left_out: Vec<(&'static Pair, String)>,
    /// How long clients are at it in each run.
    pub time: Duration,
}

/// What of the list is run in about so much time. `only`: workloads or pairs by name; all of them if there is none. `missing`: why a
/// pair cannot be had here.
///
/// # Errors
/// Nothing is named so, there is nothing to run, or too little time for one.
pub fn choose(time: Duration, only: &[String], missing: impl Fn(&Pair) -> Option<String>) -> Result<Chosen, String> {
    let is_named = |pair: &Pair, word: &String| *word == pair.workload.name() || *word == pair.name();
    if let Some(word) = only.iter().find(|word| !PAIRS.iter().any(|pair| is_named(pair, word))) {
        let names = PAIRS.iter().map(Pair::name).collect::<Vec<_>>().join(", ");
        return Err(format!("the matrix has no {word:?}; there are the workloads by their names, and {names}"));
    }
    let mut left_out = Vec::new();
    let mut runs: Vec<(usize, &'static Pair)> = Vec::new();
    for (at, pair) in PAIRS.iter().enumerate() {
        if !only.is_empty() && !only.iter().any(|word| is_named(pair, word)) {
            continue;
        }
        match missing(pair) {
            Some(why) => left_out.push((pair, why)),
            None => runs.push((at + 1, pair)),
        }
    }
    let each = LEAST + BESIDE;
    let most = usize::try_from(time.as_secs() / each.as_secs()).unwrap_or(usize::MAX);
    if runs.is_empty() {
        let why: Vec<String> = left_out.iter().map(|(pair, why)| format!("{}: {why}", pair.name())).collect();
        return Err(format!("there is nothing to run here ({})", why.join("; ")));
    }
    if most == 0 {
        return Err(format!("one run takes {} s at least: ask for more --minutes", each.as_secs()));
    }
    let late = runs.drain(most.min(runs.len())..);
    left_out.extend(late.map(|(_, pair)| (pair, "there is no time for it".to_owned())));
    let part = time / u32::try_from(runs.len()).unwrap_or(u32::MAX);
    let time = Duration::from_secs(part.saturating_sub(BESIDE).as_secs()).clamp(LEAST, MAX_TIME);
    Ok(Chosen { runs, left_out, time })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn all_pairs_can_be_asked_for_and_each_is_there_once() {
        let names: BTreeSet<String> = PAIRS.iter().map(Pair::directory).collect();
        assert_eq!(names.len(), PAIRS.len());
        for pair in PAIRS {
            for word in pair.nemeses {
                let asked = word.parse::<Requested>().unwrap_or_else(|e| panic!("{e}"));
                assert!(!asked.kind.is_of_query_nodes() || pair.workload.is_sql(), "{}", pair.name());
            }
        }
        let workloads: Vec<Workload> = PAIRS.iter().map(|pair| pair.workload).collect();
        assert!(Workload::ALL.iter().all(|workload| workloads.contains(workload)), "a workload is in no pair");
        let words = PAIRS.iter().flat_map(|pair| pair.nemeses);
        let kinds: BTreeSet<Kind> = words.map(|word| word.parse::<Requested>().unwrap().kind).collect();
        let never: Vec<&str> = Kind::ALL.iter().filter(|kind| !kinds.contains(kind)).map(|kind| kind.name()).collect();
        assert!(never.is_empty(), "in no pair: {never:?}");
    }

    #[test]
    fn each_has_its_part_of_the_time_and_the_last_are_left_out_where_it_is_short() {
        let all = choose(60 * MINUTE, &[], |_| None).unwrap();
        assert_eq!((all.runs.len(), all.left_out.len()), (PAIRS.len(), 0));
        let part = 60 * MINUTE / u32::try_from(PAIRS.len()).unwrap();
        assert_eq!(all.time.as_secs(), (part - BESIDE).as_secs());
        let few = choose(3 * MINUTE, &[], |_| None).unwrap();
        assert_eq!((few.runs.len(), few.time), (4, LEAST));
        assert_eq!(few.runs[0], (1, &PAIRS[0]));
        assert!(few.left_out.iter().all(|(_, why)| why.contains("no time")));
        assert_eq!(few.left_out.len(), PAIRS.len() - 4);
        assert!(choose(LEAST, &[], |_| None).unwrap_err().contains("45 s"));
    }

    #[test]
    fn on_hosts_a_pair_has_what_the_commands_can_do_and_none_is_run_that_can_only_be_unknown() {
        let on = |pair: &Pair, commands: &str| {
            let query_nodes = "[[query_nodes]]\nid = 1\naddress = \"db1:9393\"\n";
            let text = format!("{query_nodes}[[peers]]\nid = 1\naddress = \"db1:9191\"\n[commands]\n{commands}");
            pair.on(&toml::from_str(&text).unwrap())
        };
        let cached = PAIRS.iter().find(|pair| pair.workload == Workload::Cached).unwrap();
        let processes = "kill = \"k\"\nstart = \"s\"\n";
        assert!(on(cached, processes).unwrap_err().contains("without query-partition"));
        let all = format!("{processes}partition = \"p\"\nheal = \"h\"\n");
        assert_eq!(on(cached, &all), Ok(cached.nemeses.to_vec()));
        assert_eq!(on(&PAIRS[1], processes), Ok(vec!["query-kill:one"]));
        assert_eq!(on(&PAIRS[1], &all), Ok(PAIRS[1].nemeses.to_vec()));
        assert!(
            on(&PAIRS[5], &all).unwrap_err().contains("none of its faults"),
            "there is no store that could be hurt"
        );
    }

    #[test]
    fn some_are_chosen_by_workload_or_by_name_and_what_cannot_be_had_is_told() {
        let only = ["bank".to_owned(), PAIRS[0].name()];
        let chosen = choose(10 * MINUTE, &only, |_| None).unwrap();
        let names: Vec<String> = chosen.runs.iter().map(|(_, pair)| pair.name()).collect();
        assert_eq!(names, ["table/query-kill:one+kill:leader", "bank/slow:leader+pause:one"]);
        assert!(choose(MINUTE, &["banks".to_owned()], |_| None).unwrap_err().contains("has no \"banks\""));
        let missing = |pair: &Pair| (pair.workload == Workload::Bank).then(|| "no root".to_owned());
        let chosen = choose(10 * MINUTE, &only, missing).unwrap();
        assert_eq!((chosen.runs.len(), chosen.left_out[0].1.as_str()), (1, "no root"));
        assert!(choose(10 * MINUTE, &["bank".to_owned()], missing).unwrap_err().contains("no root"));
    }
}
