//! Schemas and tables that are made, renamed and dropped: does the tree stay a tree, and is every change in it somebody's?
//!
//! Trees are read whole at one revision, and stand in the order of their revisions.
//!
//! - In each tree every table is in a schema, and every schema in the one that it is nested in (*orphan*); no table has two places
//!   (*doubled*).
//! - From one tree to the next a table goes only where a rename may have taken it (*moved*), and is gone only if a DROP may have been
//!   of it (*lost*). One that is gone comes back only by UNDROP (*came back*), and there is none that nobody has made (*unexpected*).
//!   The same of schemas (*schema lost*, *schema unexpected*). What failed explains nothing.
//! - What was acknowledged shows in trees that are read afterwards, unless something else explains why not (*not done*, *lost*).
//! - While a scope is held, nothing below it, or above it, is changed by anybody (*under a claim*).
//!
//! A statement explains what it may have been about wherever its table may have been then: where chance has several at one table at
//! a time, one may excuse another.
//!
//! Cost: trees times the tables that have changed between two, times the statements under way then.

use std::collections::{BTreeMap, BTreeSet};

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, Catalog, Ddl, History, Key, Outcome as End};

/// Its name in results.
pub const NAME: &str = "catalog";

/// All there was at one revision.
struct Tree<'a> {
    call: &'a Call,
    ended: usize,
    schemas: BTreeSet<&'a Key>,
    tables: &'a BTreeMap<Key, i64>,
    /// By their numbers.
    places: BTreeMap<i64, &'a Key>,
}

/// A statement that did not fail.
#[derive(Clone, Copy)]
struct Change<'a> {
    call: &'a Call,
    ddl: &'a Ddl,
}

impl Change<'_> {
    /// When it had its effect at the latest, if it had one.
    fn ended(&self) -> Option<usize> {
        self.call.happened_before()
    }

    /// Whether it may have had its effect in this time. Both ends are places in the history.
    fn is_within(&self, (from, to): (usize, usize)) -> bool {
        self.call.invoked < to && self.ended().is_none_or(|ended| ended > from)
    }
}

/// The schema of a place.
fn schema_of(place: &Key) -> Option<Key> {
    let Key::Name(name) = place else { return None };
    name.rsplit_once('/').map(|(schema, _)| schema.into())
}

/// The schema that a schema is nested in.
fn parent_of(schema: &Key) -> Option<Key> {
    let Key::Name(name) = schema else { return None };
    name.rsplit_once('.').map(|(parent, _)| parent.into())
}

/// A schema or a place as a path of scopes.
fn path_of(key: &Key) -> String {
    format!("{}/", key.to_string().replace('.', "/"))
}

/// The statements that may explain something, and what they explain.
struct Changes<'a>(Vec<Change<'a>>);

impl<'a> Changes<'a> {
    fn within(&self, time: (usize, usize)) -> impl Iterator<Item = &Change<'a>> {
        // They are by invocation.
        let until = self.0.partition_point(|change| change.call.invoked < time.1);
        self.0[..until].iter().filter(move |change| change.is_within(time))
    }

    /// Where a table may have been at some moment of this time that was at a place at first.
    fn reachable(&self, place: &Key, time: (usize, usize)) -> BTreeSet<Key> {
        let renames: Vec<(&Key, &Key)> = self
            .within(time)
            .filter_map(|change| match change.ddl {
                Ddl::Rename { from, to } => Some((from, to)),
                _ => None,
            })
            .collect();
        let mut places = BTreeSet::from([place.clone()]);
        loop {
            let more: Vec<Key> = renames
                .iter()
                .filter(|(from, to)| places.contains(*from) && !places.contains(*to))
                .map(|(_, to)| (*to).clone())
                .collect();
            if more.is_empty() {
                return places;
            }
            places.extend(more);
        }
    }

    /// Whether one of them may have removed a table that was at a place at first.
    fn removed(&self, place: &Key, time: (usize, usize)) -> bool {
        let places = self.reachable(place, time);
        let schemas: BTreeSet<Key> = places.iter().filter_map(schema_of).collect();
        self.within(time).any(|change| match change.ddl {
            Ddl::Drop { table, .. } => places.contains(table),
            Ddl::DropSchema { schema, cascade: true } => schemas.contains(schema),
            _ => false,
        })
    }

    /// Whether one of them may have brought some table to a place.
    fn brought(&self, place: &Key, time: (usize, usize)) -> bool {
        self.within(time).any(|change| match change.ddl {
            Ddl::Rename { to, .. } => to == place,
            Ddl::Undrop { table } | Ddl::Create { table, .. } => table == place,
            _ => false,
        })
    }

    /// Whether a table may be at a place again after UNDROP.
    fn undropped(&self, place: &Key, time: (usize, usize)) -> bool {
        let back = self.within(time).filter_map(|change| match change.ddl {
            Ddl::Undrop { table } => Some(table),
            _ => None,
        });
        let back: Vec<&Key> = back.collect();
        back.into_iter().any(|table| self.reachable(table, time).contains(place))
    }

    fn made_schema(&self, name: &Key, time: (usize, usize)) -> bool {
        self.within(time).any(|change| matches!(change.ddl, Ddl::CreateSchema { schema } if schema == name))
    }

    fn dropped_schema(&self, name: &Key, time: (usize, usize)) -> bool {
        self.within(time).any(|change| matches!(change.ddl, Ddl::DropSchema { schema, .. } if schema == name))
    }
}

/// Judges all trees of a history.
pub fn check(history: &History) -> Outcome {
    let mut findings = Findings::default();
    let mut changes = Vec::new();
    let mut trees: Vec<Tree<'_>> = Vec::new();
    for call in history.calls() {
        let Action::Catalog(action) = history.action(call) else { continue };
        match action {
            Catalog::Ddl(ddl) if call.outcome != End::Fail => changes.push(Change { call, ddl }),
            Catalog::Tree { schemas: Some(schemas), tables: Some(tables) } if call.outcome == End::Ok => {
                let Some(ended) = call.ended else { continue };
                let places = tables.iter().map(|(place, number)| (*number, place)).collect();
                trees.push(Tree { call, ended, schemas: schemas.iter().collect(), tables, places });
            }
            _ => {}
        }
    }
    let acknowledged = changes.iter().filter(|change| change.call.outcome == End::Ok).count();
    let made = changes.iter().filter(|change| matches!(change.ddl, Ddl::Create { .. }));
    let made: Vec<&Call> = made.map(|change| change.call).filter(|call| call.outcome == End::Ok).collect();
    let first_made = made.iter().filter_map(|call| call.ended).min();
    let is_shown = trees.iter().any(|tree| Some(tree.call.invoked) > first_made);
    let tables = made.len();
    let changes = Changes(changes);
    // Without revisions, as they were answered.
    trees.sort_by_key(|tree| (history.revision(tree.call), tree.ended));
    for tree in &trees {
        alone(history, tree, &mut findings);
    }
    steps(history, &trees, &changes, &mut findings);
    acknowledgements(history, &trees, &changes, &mut findings);
    let claims = claims(history, &changes, &mut findings);
    let otherwise = match (tables, trees.len()) {
        (0, _) => Verdict::Unknown("no table was made".into()),
        (_, 0) => Verdict::Unknown("the tree was never read".into()),
        _ if !is_shown => Verdict::Unknown("the tree was never read after a table had been made".into()),
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("trees", trees.len())
        .with("changes", acknowledged)
        .with("unknown changes", changes.0.len() - acknowledged)
        .with("claims", claims)
}

/// One tree by itself.
fn alone(history: &History, tree: &Tree<'_>, findings: &mut Findings) {
    let mut add = |kind: &str, what: String| {
        findings.add(kind, || Finding::new(kind, what, Bar::all(history, [tree.call])));
    };
    for place in tree.tables.keys() {
        if schema_of(place).is_some_and(|schema| !tree.schemas.contains(&schema)) {
            add("orphan", format!("table {place} is in a schema that is not there"));
        }
    }
    for schema in &tree.schemas {
        if parent_of(schema).is_some_and(|parent| !tree.schemas.contains(&parent)) {
            add("orphan", format!("schema {schema} is nested in one that is not there"));
        }
    }
    for (place, number) in tree.tables {
        let other = tree.places.get(number).filter(|other| **other != place && *number != 0);
        if let Some(other) = other {
            add("doubled", format!("table number {number} is at {place} and at {other}"));
        }
    }
}

/// From each tree to the next.
fn steps(history: &History, trees: &[Tree<'_>], changes: &Changes<'_>, findings: &mut Findings) {
    let made: BTreeMap<i64, Change<'_>> = changes
        .0
        .iter()
        .filter_map(|change| match change.ddl {
            Ddl::Create { number, .. } => Some((*number, *change)),
            _ => None,
        })
        .collect();
    let mut seen: BTreeSet<i64> = BTreeSet::new();
    let mut known: BTreeSet<&Key> = BTreeSet::new();
    for (at, tree) in trees.iter().enumerate() {
        let before = at.checked_sub(1).map(|at| &trees[at]);
        // Before the first one there was nothing.
        let time = (before.map_or(0, |before| before.call.invoked), tree.ended);
        let mut add = |kind: &str, what: String| {
            let calls = before.map(|before| before.call).into_iter().chain([tree.call]);
            findings.add(kind, || Finding::new(kind, what, Bar::all(history, calls)));
        };
        for (number, place) in &tree.places {
            match before.and_then(|before| before.places.get(number)) {
                Some(was) if was == place => {}
                Some(was) => {
                    let back = || changes.removed(was, time) && changes.undropped(place, time);
                    if !changes.reachable(was, time).contains(*place) && !back() {
                        add(
                            "moved",
                            format!("table number {number} was at {was} and is at {place}: nobody has moved it"),
                        );
                    }
                }
                None => match made.get(number) {
                    None => add("unexpected", format!("{place} is a table that nobody has made, number {number}")),
                    Some(create) => {
                        let Ddl::Create { table, .. } = create.ddl else { continue };
                        let is_new = !seen.contains(number) && create.is_within(time);
                        let there = is_new && changes.reachable(table, time).contains(*place);
                        if !there && !changes.undropped(place, time) {
                            let what = format!("table number {number} is at {place}, after it was gone");
                            add("came back", what);
                        }
                    }
                },
            }
        }
        seen.extend(tree.places.keys());
        for (number, was) in before.iter().flat_map(|before| &before.places) {
            if !tree.places.contains_key(number) && *number != 0 && !changes.removed(was, time) {
                add("lost", format!("table number {number} was at {was} and is gone: nobody has dropped it"));
            }
        }
        for schema in &tree.schemas {
            let was = before.is_some_and(|before| before.schemas.contains(*schema));
            if !was && !changes.made_schema(schema, time) {
                add("schema unexpected", format!("schema {schema} is there, and nobody has made it"));
            }
        }
        for schema in known.iter().filter(|schema| !tree.schemas.contains(**schema)) {
            if !changes.dropped_schema(schema, time) {
                add("schema lost", format!("schema {schema} is gone, and nobody has dropped it"));
            }
        }
        known.clone_from(&tree.schemas);
    }
}

/// What was acknowledged, by the trees right before and right after it.
fn acknowledgements(history: &History, trees: &[Tree<'_>], changes: &Changes<'_>, findings: &mut Findings) {
    let mut by_end: Vec<&Tree<'_>> = trees.iter().collect();
    by_end.sort_by_key(|tree| tree.ended);
    let mut by_invocation: Vec<&Tree<'_>> = trees.iter().collect();
    by_invocation.sort_by_key(|tree| tree.call.invoked);
    for change in &changes.0 {
        let Some(ended) = change.ended() else { continue };
        let before = by_end[..by_end.partition_point(|tree| tree.ended < change.call.invoked)].last();
        let Some(after) = by_invocation.get(by_invocation.partition_point(|tree| tree.call.invoked < ended)) else {
            continue;
        };
        let time = (change.call.invoked, after.ended);
        let mut add = |kind: &str, what: String| {
            let calls = before.map(|before| before.call).into_iter().chain([change.call, after.call]);
            findings.add(kind, || Finding::new(kind, what, Bar::all(history, calls)));
        };
        // At one place in both trees, though it must have left meanwhile: unless it, or another one, came there.
        let stayed = |place: &Key, number: i64| {
            let since = before.map_or(0, |before| before.call.invoked);
            let was = before.and_then(|before| before.tables.get(place)) == Some(&number);
            was && after.tables.get(place) == Some(&number) && !changes.brought(place, (since, after.ended))
        };
        match change.ddl {
            Ddl::Create { table, number } => {
                if !after.places.contains_key(number) && !changes.removed(table, time) {
                    add("lost", format!("table {table}, number {number}, was made and is gone: nobody has dropped it"));
                }
            }
            Ddl::CreateSchema { schema } => {
                if !after.schemas.contains(schema) && !changes.dropped_schema(schema, time) {
                    add("schema lost", format!("schema {schema} was made and is gone: nobody has dropped it"));
                }
            }
            Ddl::DropSchema { schema, cascade } => {
                if after.schemas.contains(schema) && !changes.made_schema(schema, time) {
                    add("not done", format!("schema {schema} was dropped and is there"));
                }
                for (place, number) in after.tables.iter().filter(|_| *cascade) {
                    if schema_of(place).as_ref() == Some(schema) && stayed(place, *number) {
                        add("not done", format!("schema {schema} was dropped with all in it, and {place} is there"));
                    }
                }
            }
            Ddl::Rename { from: place, .. } | Ddl::Drop { table: place, .. } => {
                if let Some(number) = after.tables.get(place).filter(|number| stayed(place, **number)) {
                    add("not done", format!("table number {number} is still at {place}"));
                }
            }
            Ddl::Undrop { .. } => {}
        }
    }
}

/// Statements that were done while somebody else had a scope in their way. Gives how many scopes were held to the end.
fn claims(history: &History, changes: &Changes<'_>, findings: &mut Findings) -> usize {
    let mut held: BTreeMap<u64, (&Call, &Key)> = BTreeMap::new();
    let mut claims = 0;
    for call in history.calls() {
        let Action::Catalog(action) = history.action(call) else { continue };
        match action {
            Catalog::Claim { path } if call.outcome == End::Ok => drop(held.insert(call.process, (call, path))),
            Catalog::Unclaim { path } => {
                let Some((claim, of)) = held.remove(&call.process) else { continue };
                if call.outcome != End::Ok || of != path {
                    continue;
                }
                claims += 1;
                let (Some(from), to) = (claim.ended, call.invoked) else { continue };
                let during = changes.0.iter().filter(|change| {
                    change.call.invoked > from
                        && change.ended().is_some_and(|ended| ended < to)
                        && touches(change.ddl, path)
                });
                for change in during {
                    findings.add("under a claim", || {
                        let what = format!("{path} was held by somebody else, and this was done");
                        Finding::new("under a claim", what, Bar::all(history, [claim, change.call, call]))
                    });
                }
            }
            _ => {}
        }
    }
    claims
}

/// Whether a statement changes something that a scope on a path forbids.
fn touches(ddl: &Ddl, path: &Key) -> bool {
    let claimed = path_of(path);
    let meets = |key: &Key| {
        let changed = path_of(key);
        changed.starts_with(&claimed) || claimed.starts_with(&changed)
    };
    match ddl {
        // Its answer may be about one that was there as asked for.
        Ddl::CreateSchema { .. } => false,
        Ddl::DropSchema { schema, .. } => meets(schema),
        Ddl::Create { table, .. } | Ddl::Drop { table, .. } | Ddl::Undrop { table } => meets(table),
        Ddl::Rename { from, to } => meets(from) || meets(to),
    }
}
