//! Schemas and tables that are made, renamed and dropped through SQL at any query node, while others hold scopes on some of them.
//!
//! A table is made under a name of its own, which its files' location keeps, so that a pointer tells which table it is wherever it has
//! come to. Renames bring tables into any schema, half of them to a few names that many are after. Schemas are made and dropped all the
//! time, some with all that is in them; two levels of them. Some drops are with PURGE, which submits a procedure, and some tables
//! come back by UNDROP, which cancels it.
//!
//! A tree is read from the metadata: all keys of it, at one revision.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lake_client::catalog::TablePointer;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, KeyValue, Op, OpResult, Txn};
use rand::Rng;

use super::access::Access;
use super::statements::{PAUSE, TRIES};
use super::{Actor, Frame, Plan, Unique};
use crate::history::{Action, Catalog, Ddl, Key};
use crate::run::recorder::Scribe;
use crate::sql::{Failure, What};

/// What the names of the workload's schemas begin with.
const PREFIX: &str = "chaos_";
/// Schemas of the first level; each may have one in it.
const SCHEMAS: u32 = 3;
/// Names that renames are after, in each schema.
const SEATS: u32 = 4;
/// With so many tables no more are made, so that a schema can be dropped with all of them at once.
const MOST_TABLES: usize = 60;
/// How long a scope is held.
const HELD_MS: std::ops::Range<u64> = 100..800;
const LEASE_TTL: Duration = Duration::from_secs(10);
/// Everything of the catalog is under it.
const LAKE: &str = "/lake/";
/// Joins the levels of a schema in a key.
const LEVELS: char = '\u{1f}';

pub(super) fn plan(clients: usize) -> Plan {
    let shared = Arc::new(Shared::default());
    let client = |_| Client { shared: shared.clone() };
    Plan::of(clients, client, Whole { shared: shared.clone() })
}

/// What clients know together.
#[derive(Debug, Default)]
struct Shared {
    numbers: Unique,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where tables were when the tree was last read, and those that were made since.
    places: Vec<String>,
    /// Where tables were that were dropped with PURGE.
    purged: Vec<String>,
    acknowledged: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Client {
    shared: Arc<Shared>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        match access.rng.random_range(0..100) {
            0..25 => {
                // How it ended is in the history.
                let _ = read(&self.shared, access, scribe).await;
            }
            25..32 => claim(&self.shared, access, scribe).await,
            _ => {
                let ddl = self.any(access);
                self.change(ddl, access, scribe).await;
            }
        }
    }
}

impl Client {
    fn any(&self, access: &mut Access) -> Ddl {
        let schema = any_schema(access);
        let known = any_of(&self.shared.state().places, access);
        let purged = any_of(&self.shared.state().purged, access);
        let is_full = self.shared.state().places.len() >= MOST_TABLES;
        match (access.rng.random_range(0..100), known, purged) {
            (0..10, ..) => Ddl::CreateSchema { schema: schema.as_str().into() },
            (10..14, ..) => Ddl::DropSchema { schema: schema.as_str().into(), cascade: false },
            (14..20, ..) => Ddl::DropSchema { schema: schema.as_str().into(), cascade: true },
            (20..28, _, Some(table)) => Ddl::Undrop { table: table.as_str().into() },
            (28..42, Some(table), _) => Ddl::Drop { table: table.as_str().into(), purge: access.chance(0.5) },
            (42..75, Some(from), _) => {
                let name = match access.chance(0.5) {
                    true => format!("seat{}", access.rng.random_range(0..SEATS)),
                    false => name_of(&from).to_owned(),
                };
                let to = format!("{schema}/{name}");
                match to == from {
                    true => Ddl::Drop { table: from.as_str().into(), purge: true },
                    false => Ddl::Rename { from: from.as_str().into(), to: to.as_str().into() },
                }
            }
            (_, Some(table), _) if is_full => Ddl::Drop { table: table.as_str().into(), purge: false },
            _ => {
                let number = self.shared.numbers.next();
                Ddl::Create { table: format!("{schema}/t{number}").as_str().into(), number }
            }
        }
    }

    async fn change(&self, ddl: Ddl, access: &mut Access, scribe: &mut Scribe) {
        let Some(node) = access.any_node() else { return };
        let action = Action::Catalog(Catalog::Ddl(ddl.clone()));
        let (sql, by) = (statement(&ddl), access.deadline());
        scribe.invoke(action.clone());
        match access.run(node, &sql, None, by).await {
            Ok(_) => {
                scribe.ok(action, None, Some(node));
                let mut state = self.shared.state();
                state.acknowledged += 1;
                state.purged.truncate(MOST_TABLES);
                match ddl {
                    Ddl::Create { table, .. } | Ddl::Rename { to: table, .. } => state.places.push(table.to_string()),
                    Ddl::Drop { table, purge: true } => state.purged.push(table.to_string()),
                    Ddl::Undrop { table } => {
                        let table = table.to_string();
                        state.purged.retain(|purged| *purged != table);
                    }
                    _ => {}
                }
            }
            // There is none of that name, or another one: an answer.
            Err(failure) if failure.what == What::Refused => scribe.refused(action, &failure.message),
            Err(failure) => scribe.statement_failed(action, &failure, node),
        }
    }
}

fn any_of(all: &[String], access: &mut Access) -> Option<String> {
    if all.is_empty() { None } else { all.get(access.rng.random_range(0..all.len())).cloned() }
}

fn any_schema(access: &mut Access) -> String {
    let schema = format!("{PREFIX}{}", access.rng.random_range(0..SCHEMAS));
    if access.chance(0.4) { format!("{schema}.in") } else { schema }
}

/// All schemas that there may be, outer ones first.
fn all_schemas() -> impl Iterator<Item = String> {
    let outer = (0..SCHEMAS).map(|n| format!("{PREFIX}{n}"));
    outer.flat_map(|schema| [schema.clone(), format!("{schema}.in")])
}

fn name_of(place: &str) -> &str {
    place.rsplit_once('/').map_or(place, |(_, name)| name)
}

fn statement(ddl: &Ddl) -> String {
    // `schema/name` as SQL has it.
    let quoted = |key: &Key| key.to_string().split('/').map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(".");
    match ddl {
        Ddl::CreateSchema { schema } => format!("CREATE SCHEMA {}", quoted(schema)),
        Ddl::DropSchema { schema, cascade } => {
            format!("DROP SCHEMA {}{}", quoted(schema), if *cascade { " CASCADE" } else { "" })
        }
        Ddl::Create { table, .. } => format!("CREATE TABLE {} (id BIGINT)", quoted(table)),
        Ddl::Rename { from, to } => format!("ALTER TABLE {} RENAME TO {}", quoted(from), quoted(to)),
        Ddl::Drop { table, purge } => format!("DROP TABLE {}{}", quoted(table), if *purge { " PURGE" } else { "" }),
        Ddl::Undrop { table } => format!("UNDROP TABLE {}", quoted(table)),
    }
}

/// Reads the whole tree.
async fn read(shared: &Shared, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = |schemas, tables| Action::Catalog(Catalog::Tree { schemas, tables });
    scribe.invoke(action(None, None));
    match access.store.list_all(LAKE, ReadOptions::default(), access.deadline()).await {
        Ok(read) => {
            let (schemas, tables) = tree(&read.value);
            shared.state().places = tables.keys().map(ToString::to_string).collect();
            scribe.ok(action(Some(schemas), Some(tables)), Some(read.revision), None);
            Ok(())
        }
        Err(error) => {
            scribe.read_failed(action(None, None), &error, None);
            Err(error)
        }
    }
}

/// The schemas and tables of the workload among all that the metadata holds.
fn tree(entries: &[KeyValue]) -> (Vec<Key>, BTreeMap<Key, i64>) {
    let (mut schemas, mut tables) = (Vec::new(), BTreeMap::new());
    for entry in entries {
        let parts = entry.key.strip_prefix(LAKE).and_then(|key| key.split_once('/'));
        let (kind, name) = parts.unwrap_or_default();
        if !name.starts_with(PREFIX) {
            continue;
        }
        let name = name.replace(LEVELS, ".");
        match kind {
            "catalog" => schemas.push(name.as_str().into()),
            "table" => drop(tables.insert(name.as_str().into(), number_of(&entry.value).unwrap_or(0))),
            _ => {}
        }
    }
    (schemas, tables)
}

/// The number of the table that a pointer leads to: it is in the name that the table was made with.
fn number_of(pointer: &[u8]) -> Option<i64> {
    let pointer: TablePointer = serde_json::from_slice(pointer).ok()?;
    let end = format!("-{}", pointer.uuid);
    let made_as = pointer.metadata_location.split('/').find_map(|part| part.strip_suffix(&end))?;
    made_as.strip_prefix('t')?.parse().ok()
}

/// Holds a scope on a schema or a table for a while.
async fn claim(shared: &Shared, access: &mut Access, scribe: &mut Scribe) {
    let table = any_of(&shared.state().places, access).filter(|_| access.chance(0.5));
    let path = table.unwrap_or_else(|| any_schema(access)).replace('.', "/");
    // A lease is nothing to anybody yet.
    let Ok(lease) = access.store.grant_lease(LEASE_TTL, "chaos", access.deadline()).await else { return };
    let (scope, owner) = (format!("/catalog/{path}"), ScopeOwner::Lease(lease.id));
    let action = Action::Catalog(Catalog::Claim { path: path.as_str().into() });
    let taken = Txn {
        when: vec![Compare::lease_alive(lease.id), Compare::scope_free(scope.clone(), Some(owner.clone()))],
        then: vec![Op::AcquireScope { path: scope.clone(), owner: owner.clone() }],
        otherwise: vec![],
    };
    scribe.invoke(action.clone());
    let is_held = match access.store.commit(taken, access.deadline()).await {
        Ok(done) if done.result.succeeded => {
            scribe.ok(action, Some(done.result.revision), None);
            true
        }
        Ok(done) if done.resent => {
            scribe.unknown(action, "sent twice, and the second compare failed");
            false
        }
        Ok(_) => {
            scribe.refused(action, "somebody holds it, or a part of it");
            false
        }
        Err(error) => {
            scribe.change_failed(action, &error);
            false
        }
    };
    if is_held {
        tokio::time::sleep(Duration::from_millis(access.rng.random_range(HELD_MS))).await;
        let action = Action::Catalog(Catalog::Unclaim { path: path.as_str().into() });
        let let_go = Txn {
            when: vec![Compare::lease_alive(lease.id)],
            then: vec![Op::ReleaseScope { path: scope, owner }],
            otherwise: vec![],
        };
        scribe.invoke(action.clone());
        match access.store.commit(let_go, access.deadline()).await {
            // It was held until now.
            Ok(done) if done.result.results.first() == Some(&OpResult::ReleaseScope { released: true }) => {
                scribe.ok(action, Some(done.result.revision), None);
            }
            Ok(_) => scribe.unknown(action, "it was not held to the end, or this was sent twice"),
            Err(error) => scribe.change_failed(action, &error),
        }
    }
    // If it fails it ends by itself.
    let _ = access.store.revoke_lease(lease.id, access.deadline()).await;
}

struct Whole {
    shared: Arc<Shared>,
}

#[async_trait]
impl Frame for Whole {
    async fn prepare(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let node = access.any_node().ok_or_else(|| Failure::unreached("there is no query node"))?;
        for schema in all_schemas() {
            let ddl = Ddl::CreateSchema { schema: schema.as_str().into() };
            let action = Action::Catalog(Catalog::Ddl(ddl.clone()));
            scribe.invoke(action.clone());
            if let Err(failure) = access.run(node, &statement(&ddl), None, access.deadline()).await {
                scribe.statement_failed(action, &failure, node);
                return Err(failure.into());
            }
            scribe.ok(action, None, Some(node));
        }
        Ok(())
    }

    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let mut tried = read(&self.shared, access, scribe).await;
        for _ in 1..TRIES {
            if tried.is_ok() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            tried = read(&self.shared, access, scribe).await;
        }
        tried?;
        access.ledger.looked_for_elsewhere(self.shared.state().acknowledged);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_name_schemas_by_their_levels() {
        let (from, to) = ("chaos_0.in/t7".into(), "chaos_1/seat2".into());
        let rename = statement(&Ddl::Rename { from, to });
        assert_eq!(rename, "ALTER TABLE \"chaos_0.in\".\"t7\" RENAME TO \"chaos_1\".\"seat2\"");
        let drop = Ddl::DropSchema { schema: "chaos_0.in".into(), cascade: true };
        assert_eq!(statement(&drop), "DROP SCHEMA \"chaos_0.in\" CASCADE");
    }

    #[test]
    fn a_pointer_tells_which_table_it_is_wherever_it_is() {
        let entry = |key: &str, value: &str| KeyValue {
            key: key.to_owned(),
            value: value.to_owned().into(),
            create_revision: 1,
            mod_revision: 1,
            version: 1,
            lease: None,
        };
        let uuid = "6d3f0c1e-7f7e-4c52-9a0e-2f8a4c1d5b60";
        let location = format!("file:///w/chaos_0/t12-{uuid}/metadata/00000-a.metadata.json");
        let pointer = format!("{{\"uuid\":\"{uuid}\",\"metadata_location\":\"{location}\"}}");
        let entries = [
            entry("/lake/catalog/chaos_0", "{}"),
            entry("/lake/catalog/chaos_0\u{1f}in", "{}"),
            entry("/lake/catalog/default", "{}"),
            entry("/lake/clock", "1"),
            entry("/lake/table/chaos_0\u{1f}in/seat1", &pointer),
            entry("/lake/table/chaos_0/x", "{}"),
        ];
        let (schemas, tables) = tree(&entries);
        assert_eq!(schemas, [Key::from("chaos_0"), Key::from("chaos_0.in")]);
        assert_eq!(tables, BTreeMap::from([(Key::from("chaos_0.in/seat1"), 12), (Key::from("chaos_0/x"), 0)]));
    }
}
