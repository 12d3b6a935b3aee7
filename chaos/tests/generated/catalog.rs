//! Generated histories of the workload `catalog`: a catalog that keeps its promises is valid whatever its clients do, and the same with
//! one broken promise is not.

use std::collections::{BTreeMap, BTreeSet};

use lake_chaos::check::Verdict;
use lake_chaos::history::{Action, Catalog, Ddl, History, Key, Kind, Operation, Process, Workload};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::{assert_found, judged, read_back};

const CLIENTS: usize = 6;
const STEPS: usize = 1_200;
const SEEDS: u64 = 24;

/// What became of a request that is under way.
#[derive(Clone)]
enum Fate {
    Waiting,
    Done(Catalog, Option<u64>),
    Refused,
}

struct Client {
    process: u64,
    asked: Option<(Catalog, Fate)>,
    /// The path that it holds a scope on.
    claims: Option<String>,
}

struct Sim {
    rng: StdRng,
    operations: Vec<Operation>,
    clients: Vec<Client>,
    next_process: u64,
    next_number: i64,
    revision: u64,
    schemas: BTreeSet<String>,
    tables: BTreeMap<String, i64>,
    purged: Vec<(String, i64)>,
}

fn key(name: &str) -> Key {
    name.into()
}

fn schema_of(place: &str) -> &str {
    place.rsplit_once('/').unwrap().0
}

fn path(name: &str) -> String {
    format!("{}/", name.replace('.', "/"))
}

impl Sim {
    fn new(seed: u64) -> Self {
        let client = |process| Client { process, asked: None, claims: None };
        Self {
            rng: StdRng::seed_from_u64(seed),
            operations: Vec::new(),
            clients: (0..CLIENTS as u64).map(client).collect(),
            next_process: CLIENTS as u64,
            next_number: 1,
            revision: 1,
            schemas: BTreeSet::new(),
            tables: BTreeMap::new(),
            purged: Vec::new(),
        }
    }

    fn event(&mut self, process: u64, kind: Kind, action: Catalog, revision: Option<u64>) {
        let time_ns = self.operations.len() as u64 * 1_000_000;
        let operation = Operation::new(Process::Client(process), kind, time_ns, Action::Catalog(action));
        self.operations.push(Operation { revision, ..operation });
    }

    fn schema(&mut self) -> String {
        let outer = self.rng.random_range(0..2);
        if self.rng.random_bool(0.4) { format!("s{outer}.in") } else { format!("s{outer}") }
    }

    fn place(&mut self) -> String {
        let there: Vec<String> = self.tables.keys().cloned().collect();
        match there.choose(&mut self.rng) {
            Some(place) if self.rng.random_bool(0.8) => place.clone(),
            _ => format!("{}/seat{}", self.schema(), self.rng.random_range(0..2)),
        }
    }

    fn any(&mut self) -> Catalog {
        let ddl = match self.rng.random_range(0..100) {
            0..30 => return Catalog::Tree { schemas: None, tables: None },
            30..35 => return Catalog::Claim { path: key(&self.schema().replace('.', "/")) },
            35..45 => Ddl::CreateSchema { schema: key(&self.schema()) },
            45..52 => Ddl::DropSchema { schema: key(&self.schema()), cascade: self.rng.random_bool(0.5) },
            52..65 => Ddl::Drop { table: key(&self.place()), purge: self.rng.random_bool(0.5) },
            65..82 => Ddl::Rename { from: key(&self.place()), to: key(&self.place()) },
            82..87 => match self.purged.last().cloned() {
                Some((place, _)) => Ddl::Undrop { table: key(&place) },
                None => Ddl::Undrop { table: key(&self.place()) },
            },
            _ => {
                let number = self.next_number;
                self.next_number += 1;
                Ddl::Create { table: key(&format!("{}/t{number}", self.schema())), number }
            }
        };
        Catalog::Ddl(ddl)
    }

    fn is_claimed(&self, by_others_than: usize, changed: &str) -> bool {
        let changed = path(changed);
        self.clients.iter().enumerate().filter(|(at, _)| *at != by_others_than).any(|(_, client)| {
            client.claims.as_ref().is_some_and(|claimed| {
                let claimed = path(claimed);
                claimed.starts_with(&changed) || changed.starts_with(&claimed)
            })
        })
    }

    /// Does what was asked for, or refuses it. Everything is of one moment.
    fn apply(&mut self, at: usize, asked: &Catalog) -> Fate {
        let done = match asked {
            Catalog::Tree { .. } => {
                let schemas = Some(self.schemas.iter().map(|schema| key(schema)).collect());
                let tables = Some(self.tables.iter().map(|(place, number)| (key(place), *number)).collect());
                return Fate::Done(Catalog::Tree { schemas, tables }, Some(self.revision));
            }
            Catalog::Claim { path } => {
                let path = path.to_string();
                let is_free = !self.is_claimed(at, &path);
                if is_free {
                    self.clients[at].claims = Some(path);
                }
                is_free
            }
            Catalog::Unclaim { .. } => self.clients[at].claims.take().is_some(),
            Catalog::Ddl(ddl) => self.change(at, ddl),
        };
        self.revision += u64::from(done);
        if done { Fate::Done(asked.clone(), None) } else { Fate::Refused }
    }

    fn change(&mut self, at: usize, ddl: &Ddl) -> bool {
        let named: Vec<String> = match ddl {
            Ddl::CreateSchema { schema } | Ddl::DropSchema { schema, .. } => vec![schema.to_string()],
            Ddl::Create { table, .. } | Ddl::Drop { table, .. } | Ddl::Undrop { table } => vec![table.to_string()],
            Ddl::Rename { from, to } => vec![from.to_string(), to.to_string()],
        };
        if named.iter().any(|name| self.is_claimed(at, name)) {
            return false;
        }
        let name = &named[0];
        let is_free = |place: &String| self.schemas.contains(schema_of(place)) && !self.tables.contains_key(place);
        match ddl {
            Ddl::CreateSchema { .. } => {
                let parent = name.rsplit_once('.').map(|(parent, _)| parent);
                parent.is_none_or(|parent| self.schemas.contains(parent)) && self.schemas.insert(name.clone())
            }
            Ddl::DropSchema { cascade, .. } => {
                let nested = self.schemas.iter().any(|other| other.starts_with(&format!("{name}.")));
                let inside: Vec<String> = self.tables.keys().filter(|p| schema_of(p) == name).cloned().collect();
                if nested || (!*cascade && !inside.is_empty()) || !self.schemas.remove(name) {
                    return false;
                }
                self.tables.retain(|place, _| !inside.contains(place));
                true
            }
            Ddl::Create { number, .. } => {
                let is_free = is_free(name);
                if is_free {
                    self.tables.insert(name.clone(), *number);
                }
                is_free
            }
            Ddl::Rename { .. } => {
                let can = is_free(&named[1]) && self.tables.contains_key(name);
                if can && let Some(number) = self.tables.remove(name) {
                    self.tables.insert(named[1].clone(), number);
                }
                can
            }
            Ddl::Drop { purge, .. } => {
                let number = self.tables.remove(name);
                if *purge {
                    self.purged.extend(number.map(|number| (name.clone(), number)));
                }
                number.is_some()
            }
            Ddl::Undrop { .. } => {
                let last = self.purged.iter().rposition(|(place, _)| place == name);
                let can = last.filter(|_| is_free(name));
                if let Some(last) = can {
                    let (place, number) = self.purged.remove(last);
                    self.tables.insert(place, number);
                }
                can.is_some()
            }
        }
    }

    /// One thing that happens to one client.
    fn step(&mut self) {
        let at = self.rng.random_range(0..CLIENTS);
        let process = self.clients[at].process;
        match self.clients[at].asked.take() {
            None => {
                let asked = match &self.clients[at].claims {
                    Some(held) if self.rng.random_bool(0.3) => Catalog::Unclaim { path: key(held) },
                    Some(_) => Catalog::Tree { schemas: None, tables: None },
                    None => self.any(),
                };
                self.event(process, Kind::Invoke, asked.clone(), None);
                self.clients[at].asked = Some((asked, Fate::Waiting));
            }
            Some((asked, Fate::Waiting)) => {
                let is_lost = matches!(asked, Catalog::Ddl(_)) && self.rng.random_bool(0.1);
                let reaches = !is_lost || self.rng.random_bool(0.5);
                let fate = if reaches { self.apply(at, &asked) } else { Fate::Refused };
                if is_lost {
                    self.event(process, Kind::Info, asked, None);
                    self.clients[at].process = self.next_process;
                    self.next_process += 1;
                } else {
                    self.clients[at].asked = Some((asked, fate));
                }
            }
            Some((_, Fate::Done(answer, revision))) => self.event(process, Kind::Ok, answer, revision),
            Some((asked, Fate::Refused)) => self.event(process, Kind::Fail, asked, None),
        }
    }

    /// Asks for something that is done at once, whatever the others are at.
    fn told(&mut self, asked: Catalog) {
        let process = self.next_process;
        self.next_process += 1;
        self.event(process, Kind::Invoke, asked.clone(), None);
        // By nobody who holds a scope.
        let Fate::Done(answer, revision) = self.apply(usize::MAX, &asked) else { panic!("{asked:?} was refused") };
        self.event(process, Kind::Ok, answer, revision);
    }

    fn tree(&mut self) {
        self.told(Catalog::Tree { schemas: None, tables: None });
    }

    fn run(mut self, steps: usize) -> History {
        (0..steps).for_each(|_| self.step());
        self.tree();
        History::new(self.operations).unwrap()
    }
}

/// A table in a schema of its own, which nobody else knows of.
struct Own {
    schema: String,
    place: String,
    number: i64,
}

fn own(sim: &mut Sim) -> Own {
    let number = sim.next_number;
    sim.next_number += 1;
    let schema = format!("own{number}");
    let place = format!("{schema}/t{number}");
    sim.told(Catalog::Ddl(Ddl::CreateSchema { schema: key(&schema) }));
    sim.told(Catalog::Ddl(Ddl::Create { table: key(&place), number }));
    sim.tree();
    Own { schema, place, number }
}

type Break = fn(&mut Sim, &Own);

/// Broken promises, by what must be found.
const BROKEN: [(&str, Break); 9] = [
    ("lost", |sim, own| drop_silently(sim, &own.place)),
    ("doubled", |sim, own| put(sim, &format!("{}/x", own.schema), own.number)),
    ("moved", |sim, own| {
        drop_silently(sim, &own.place);
        put(sim, &format!("{}/x", own.schema), own.number);
    }),
    ("orphan", |sim, own| {
        sim.schemas.remove(&own.schema);
        sim.revision += 1;
    }),
    ("came back", |sim, own| {
        sim.told(Catalog::Ddl(Ddl::Drop { table: key(&own.place), purge: false }));
        sim.tree();
        put(sim, &own.place, own.number);
    }),
    ("not done", |sim, own| {
        sim.told(Catalog::Ddl(Ddl::Drop { table: key(&own.place), purge: false }));
        put(sim, &own.place, own.number);
    }),
    ("unexpected", |sim, own| put(sim, &format!("{}/x", own.schema), 0)),
    ("schema lost", |sim, own| {
        drop_silently(sim, &own.place);
        sim.schemas.remove(&own.schema);
    }),
    ("under a claim", |sim, own| {
        let holder = sim.next_process;
        sim.next_process += 1;
        let (claim, unclaim) = (Catalog::Claim { path: key(&own.schema) }, Catalog::Unclaim { path: key(&own.schema) });
        sim.event(holder, Kind::Invoke, claim.clone(), None);
        sim.event(holder, Kind::Ok, claim, None);
        sim.told(Catalog::Ddl(Ddl::Rename { from: key(&own.place), to: key(&format!("{}/x", own.schema)) }));
        sim.event(holder, Kind::Invoke, unclaim.clone(), None);
        sim.event(holder, Kind::Ok, unclaim, None);
    }),
];

fn put(sim: &mut Sim, place: &str, number: i64) {
    sim.tables.insert(place.to_owned(), number);
    sim.revision += 1;
}

fn drop_silently(sim: &mut Sim, place: &str) {
    sim.tables.remove(place);
    sim.revision += 1;
}

#[test]
fn a_catalog_that_keeps_its_promises_is_valid_and_judged_the_same_from_its_file() {
    for seed in 0..SEEDS {
        let history = Sim::new(seed).run(STEPS);
        assert_eq!(judged(Workload::Catalog, &history), Verdict::Valid, "seed {seed}");
        assert_eq!(read_back(&history), (Workload::Catalog, history));
    }
}

#[test]
fn every_broken_promise_is_found_and_named() {
    for (name, break_it) in BROKEN {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(seed);
            (0..20 * seed as usize).for_each(|_| sim.step());
            let own = own(&mut sim);
            break_it(&mut sim, &own);
            sim.tree();
            assert_found(name, seed, Workload::Catalog, &sim.run(STEPS / 4));
        }
    }
}
