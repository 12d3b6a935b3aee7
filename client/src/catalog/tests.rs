//! The catalog over a store in memory that loses answers when it is told to.

mod doubts;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use lake_proto::kv::{Expected, Txn};
use uuid::Uuid;

use super::*;
use crate::clock;
use crate::faulty::{FaultyStore, soon};
use crate::store::{Applied, MetaStore, ReadOptions};

fn pointer() -> TablePointer {
    let uuid = Uuid::new_v4();
    TablePointer { uuid, metadata_location: format!("file:///t-{uuid}/metadata/0.json"), previous_location: None }
}

fn setup() -> (Arc<FaultyStore>, Catalog, Namespace, TableIdent) {
    let store = Arc::new(FaultyStore::default());
    let namespace: Namespace = "a.b".parse().unwrap();
    let table = TableIdent::new(namespace.clone(), "t").unwrap();
    let catalog = Catalog::new(store.clone());
    // Not a call of the first that makes a table.
    catalog.all_named.store(true, Ordering::SeqCst);
    (store, catalog, namespace, table)
}

/// The table, in its namespaces.
async fn created(catalog: &Catalog, table: &TableIdent) -> Versioned<TablePointer> {
    for n in ["a", "a.b"] {
        catalog.create_namespace(&n.parse().unwrap(), BTreeMap::new(), soon()).await.unwrap();
    }
    catalog.create_table(table, &pointer(), soon()).await.unwrap()
}

#[tokio::test]
async fn nothing_new_is_called_as_a_path_goes_up() {
    let (store, catalog, namespace, table) = setup();
    let there = created(&catalog, &table).await;
    let is_refused = |error: CatalogError| {
        assert!(matches!(&error, CatalogError::InvalidName { .. }) && error.applied() == Applied::No, "{error}");
    };
    for name in [".", ".."] {
        let named = TableIdent::new(namespace.clone(), name).unwrap();
        for namespace in [Namespace::new([name]).unwrap(), Namespace::new(["a", name]).unwrap()] {
            is_refused(catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap_err());
        }
        is_refused(catalog.create_table(&named, &pointer(), soon()).await.unwrap_err());
        is_refused(catalog.create_view(&named, &pointer(), soon()).await.unwrap_err());
        is_refused(catalog.register_table(&named, &pointer(), None, soon()).await.unwrap_err());
        is_refused(catalog.rename_table(&table, &named, soon()).await.unwrap_err());
        let change = |table: &TableIdent, expected| TableChange { table: table.clone(), expected, new: pointer() };
        let changes = [change(&table, Some(there.mod_revision)), change(&named, None)];
        is_refused(catalog.change_tables(&changes, soon()).await.unwrap_err());

        // What has such a name from before is read, gets another, or goes.
        let value = Bytes::from(serde_json::to_vec(&pointer()).unwrap());
        let old = async || {
            store.cas(&named.key(), None, value.clone(), soon()).await.unwrap();
            assert_eq!(catalog.list_tables(&namespace, soon()).await.unwrap(), [name, "t"]);
            catalog.load_table(&named, soon()).await.unwrap().unwrap()
        };
        let other = TableIdent::new(namespace.clone(), "u").unwrap();
        let (old_value, moved) = (old().await.value, catalog.rename_table(&named, &other, soon()).await.unwrap());
        assert_eq!(moved.value, old_value);
        catalog.drop_table(&other, moved.mod_revision, soon()).await.unwrap();
        catalog.drop_table(&named, old().await.mod_revision, soon()).await.unwrap();
    }
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, there.value);
}

#[tokio::test]
async fn a_tree_of_namespaces_stays_a_tree() {
    let (_, catalog, nested, table) = setup();
    let parent: Namespace = "a".parse().unwrap();
    let create = |n: &Namespace| {
        let (catalog, n) = (catalog.clone(), n.clone());
        async move { catalog.create_namespace(&n, BTreeMap::new(), soon()).await }
    };
    assert_eq!(create(&nested).await, Err(CatalogError::NamespaceNotFound(parent.clone())));
    create(&parent).await.unwrap();
    create(&nested).await.unwrap();
    assert_eq!(create(&nested).await, Err(CatalogError::NamespaceExists(nested.clone())));
    catalog.create_table(&table, &pointer(), soon()).await.unwrap();
    assert_eq!(catalog.list_namespaces(soon()).await.unwrap(), [parent.clone(), nested.clone()]);
    assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
    assert_eq!(catalog.list_tables(&parent, soon()).await.unwrap(), [""; 0]);

    let drop = |n: &Namespace| {
        let (catalog, n) = (catalog.clone(), n.clone());
        async move { catalog.drop_namespace(&n, soon()).await }
    };
    assert_eq!(drop(&parent).await, Err(CatalogError::NamespaceNotEmpty(parent.clone())));
    assert_eq!(drop(&nested).await, Err(CatalogError::NamespaceNotEmpty(nested.clone())));
    let loaded = catalog.load_table(&table, soon()).await.unwrap().unwrap();
    catalog.drop_table(&table, loaded.mod_revision, soon()).await.unwrap();
    drop(&nested).await.unwrap();
    assert_eq!(drop(&nested).await, Err(CatalogError::NamespaceNotFound(nested.clone())));
    drop(&parent).await.unwrap();
    let orphan = catalog.create_table(&table, &pointer(), soon()).await;
    assert_eq!(orphan, Err(CatalogError::NamespaceNotFound(nested)));
}

#[tokio::test]
async fn a_namespace_is_dropped_with_all_that_is_in_it() {
    let (_, catalog, namespace, table) = setup();
    created(&catalog, &table).await;
    let view = TableIdent::new(namespace.clone(), "v").unwrap();
    catalog.create_view(&view, &pointer(), soon()).await.unwrap();
    let parent: Namespace = "a".parse().unwrap();
    let nested = catalog.drop_namespace_and_contents(&parent, None, soon()).await;
    assert_eq!(nested, Err(CatalogError::NamespaceNotEmpty(parent.clone())));
    assert_eq!(catalog.drop_namespace_and_contents(&namespace, None, soon()).await, Ok(2));
    assert_eq!(catalog.load_table(&table, soon()).await, Ok(None));
    assert_eq!(catalog.load_view(&view, soon()).await, Ok(None));
    assert_eq!(catalog.drop_namespace_and_contents(&parent, None, soon()).await, Ok(0));
    let gone = catalog.drop_namespace_and_contents(&parent, None, soon()).await;
    assert_eq!(gone, Err(CatalogError::NamespaceNotFound(parent)));
}

#[tokio::test]
async fn several_pointers_change_while_others_stay() {
    let (_, catalog, namespace, table) = setup();
    let first = created(&catalog, &table).await;
    let read = TableIdent::new(namespace, "read").unwrap();
    let seen = catalog.create_table(&read, &pointer(), soon()).await.unwrap();
    let change = |expected, new| TableChange { table: table.clone(), expected: Some(expected), new };
    let changes = [change(first.mod_revision, pointer())];
    let guards = [(read.clone(), seen.mod_revision)];
    let changed = catalog.change_tables_while(&changes, &guards, soon()).await.unwrap();
    let moved = catalog.swap_table(&read, seen.mod_revision, &pointer(), None, soon()).await.unwrap();
    let late = [change(changed[0].mod_revision, pointer())];
    let refused = catalog.change_tables_while(&late, &guards, soon()).await;
    assert_eq!(refused, Err(CatalogError::Conflict { table: read, current: Some(moved), resent: false }));
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, changes[0].new);
    // Of two operations that a change is a part of, either stops it.
    let operation = |id: &str| Operation::new("test", id, id.to_owned()).unwrap();
    let once = catalog.within(operation("a")).within(operation("b"));
    once.change_tables(&late, soon()).await.unwrap();
    let again = catalog.within(operation("c")).within(operation("b")).change_tables(&late, soon()).await;
    assert_eq!(again, Err(CatalogError::AlreadyDone("b".into())));
    assert_eq!(catalog.outcome("test", "c", soon()).await.unwrap(), None);
}

#[tokio::test]
async fn a_lost_race_returns_what_won() {
    let (_, catalog, _, table) = setup();
    let first = created(&catalog, &table).await;
    assert_eq!(catalog.create_table(&table, &pointer(), soon()).await, Err(CatalogError::TableExists(table.clone())));
    let won = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await.unwrap();
    let lost = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await;
    assert_eq!(lost, Err(CatalogError::Conflict { table: table.clone(), current: Some(won.clone()), resent: false }));
    assert!(catalog.drop_table(&table, first.mod_revision, soon()).await.is_err());
    catalog.drop_table(&table, won.mod_revision, soon()).await.unwrap();
    assert_eq!(catalog.drop_table(&table, won.mod_revision, soon()).await, Err(CatalogError::TableNotFound(table)));
}

#[tokio::test]
async fn a_lost_answer_is_not_taken_for_a_lost_race() {
    let (store, catalog, nested, table) = setup();
    let lose = || store.lose_answers.store(1, Ordering::SeqCst);
    catalog.create_namespace(&"a".parse().unwrap(), BTreeMap::new(), soon()).await.unwrap();
    lose();
    catalog.create_namespace(&nested, BTreeMap::new(), soon()).await.unwrap();
    lose();
    let created = catalog.create_table(&table, &pointer(), soon()).await.unwrap();
    lose();
    let swapped = catalog.swap_table(&table, created.mod_revision, &pointer(), None, soon()).await.unwrap();
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, swapped.value);
    lose();
    catalog.drop_table(&table, swapped.mod_revision, soon()).await.unwrap();
    lose();
    catalog.drop_namespace(&nested, soon()).await.unwrap();
}

#[tokio::test]
async fn anothers_drop_is_not_taken_for_one_that_is_a_part_of_more() {
    let (store, catalog, _, table) = setup();
    let first = created(&catalog, &table).await;
    let part = catalog.within(Operation::new("test", "1", "done").unwrap());
    let theirs = Txn::cas_delete(table.key(), first.mod_revision);
    *store.overtakes.lock().unwrap() = Some(theirs);
    let dropped = part.drop_table(&table, first.mod_revision, soon()).await;
    assert_eq!(dropped, Err(CatalogError::TableNotFound(table.clone())), "what goes with the drop was not done");
    assert_eq!(catalog.outcome("test", "1", soon()).await.unwrap(), None);
    let again = catalog.create_table(&table, &pointer(), soon()).await.unwrap();
    store.lose_answers.store(1, Ordering::SeqCst);
    part.drop_table(&table, again.mod_revision, soon()).await.unwrap();
    assert!(catalog.outcome("test", "1", soon()).await.unwrap().is_some());
    for (resent, word) in [(false, "nothing was changed"), (true, "is unknown")] {
        assert!(CatalogError::Fenced { resent }.to_string().ends_with(word));
    }
}

#[tokio::test]
async fn a_table_is_renamed_once() {
    let (store, catalog, nested, table) = setup();
    let first = created(&catalog, &table).await;
    let parent: Namespace = "a".parse().unwrap();
    let to = |namespace: &Namespace, name: &str| TableIdent::new(namespace.clone(), name).unwrap();
    let rename = async |from: &TableIdent, to: &TableIdent| catalog.rename_table(from, to, soon()).await;

    let moved = to(&parent, "u");
    store.lose_answers.store(1, Ordering::SeqCst);
    let renamed = rename(&table, &moved).await.unwrap();
    assert_eq!(renamed.value, first.value);
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap(), None);
    assert_eq!(catalog.load_table(&moved, soon()).await.unwrap().unwrap().value, first.value);
    assert_eq!(rename(&table, &moved).await, Err(CatalogError::TableNotFound(table.clone())));
    assert_eq!(rename(&moved, &moved).await, Err(CatalogError::TableExists(moved.clone())));
    catalog.create_table(&table, &pointer(), soon()).await.unwrap();
    assert_eq!(rename(&moved, &table).await, Err(CatalogError::TableExists(table.clone())));
    let nowhere: Namespace = "nowhere".parse().unwrap();
    assert_eq!(rename(&moved, &to(&nowhere, "t")).await, Err(CatalogError::NamespaceNotFound(nowhere)));
    // What was the table's under its old name is no longer to be had there.
    let late = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await;
    assert!(matches!(late, Err(CatalogError::Conflict { .. })), "{late:?}");
    assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
}

#[tokio::test]
async fn what_somebody_puts_beside_it_names_nothing() {
    let (store, catalog, nested, table) = setup();
    created(&catalog, &table).await;
    for key in ["/lake/catalog/", "/lake/catalog/a/b", "/lake/table/a\u{1f}b/", "/lake/table/a\u{1f}b/t/u"] {
        store.cas(key, None, "x".into(), soon()).await.unwrap();
    }
    let names: Vec<_> = catalog.list_namespaces(soon()).await.unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["a", "a.b"]);
    assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
    assert!(matches!(catalog.drop_namespace(&nested, soon()).await, Err(CatalogError::NamespaceNotEmpty(_))));
}

#[tokio::test]
async fn a_renaming_in_doubt_is_not_said_to_have_been_refused() {
    let (store, catalog, nested, table) = setup();
    let to = TableIdent::new(nested, "u").unwrap();
    let rename = async || catalog.rename_table(&table, &to, soon()).await;
    let first = created(&catalog, &table).await;
    let drop_it = Txn::cas_delete(table.key(), first.mod_revision);
    // It may have been renamed, and dropped under its new name.
    *store.overtakes.lock().unwrap() = Some(drop_it);
    let unknown = rename().await.unwrap_err();
    assert_eq!(unknown.applied(), Applied::Unknown, "{unknown:?}");
    assert_eq!(rename().await, Err(CatalogError::TableNotFound(table.clone())), "nothing is in doubt");

    catalog.create_table(&table, &pointer(), soon()).await.unwrap();
    let other = serde_json::to_vec(&pointer()).unwrap();
    *store.overtakes.lock().unwrap() = Some(Txn::cas(to.key(), Expected::Absent, other));
    assert_eq!(rename().await, Err(CatalogError::TableExists(to.clone())), "it has never left its name");
}

#[tokio::test]
async fn tables_and_views_share_their_names() {
    let (store, catalog, nested, table) = setup();
    let first = created(&catalog, &table).await;
    let view = TableIdent::new(nested.clone(), "v").unwrap();
    assert_eq!(catalog.create_view(&table, &pointer(), soon()).await, Err(CatalogError::TableExists(table.clone())));
    store.lose_answers.store(1, Ordering::SeqCst);
    let made = catalog.create_view(&view, &pointer(), soon()).await.unwrap();
    assert_eq!(catalog.create_table(&view, &pointer(), soon()).await, Err(CatalogError::ViewExists(view.clone())));
    assert_eq!(catalog.rename_table(&table, &view, soon()).await, Err(CatalogError::ViewExists(view.clone())));
    assert_eq!(catalog.rename_view(&view, &table, soon()).await, Err(CatalogError::TableExists(table.clone())));
    assert_eq!(catalog.list_views(&nested, soon()).await.unwrap(), ["v"]);
    assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
    store.lose_answers.store(1, Ordering::SeqCst);
    let swapped = catalog.swap_view(&view, made.mod_revision, &pointer(), soon()).await.unwrap();
    let stale = catalog.swap_view(&view, made.mod_revision, &pointer(), soon()).await;
    assert!(matches!(stale, Err(CatalogError::Conflict { resent: false, .. })), "{stale:?}");
    assert_eq!(catalog.load_view(&view, soon()).await.unwrap().unwrap().value, swapped.value);
    assert!(matches!(catalog.drop_namespace(&nested, soon()).await, Err(CatalogError::NamespaceNotEmpty(_))));
    catalog.drop_view(&view, swapped.mod_revision, soon()).await.unwrap();
    assert_eq!(catalog.drop_view(&view, swapped.mod_revision, soon()).await, Err(CatalogError::ViewNotFound(view)));
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, first.value);
}

#[tokio::test]
async fn several_tables_change_together() {
    let (store, catalog, nested, table) = setup();
    let first = created(&catalog, &table).await;
    let other = TableIdent::new(nested, "u").unwrap();
    let change = |table: &TableIdent, expected, new: &TablePointer| TableChange {
        table: table.clone(),
        expected,
        new: new.clone(),
    };
    let (a, b) = (TablePointer { uuid: first.value.uuid, ..pointer() }, pointer());
    store.lose_answers.store(1, Ordering::SeqCst);
    let both = [change(&table, Some(first.mod_revision), &a), change(&other, None, &b)];
    let made = catalog.change_tables(&both, soon()).await.unwrap();
    assert_eq!((&made[0].value, &made[1].value), (&a, &b));
    assert_eq!(made[0].mod_revision, made[1].mod_revision, "one transaction");

    let next = TablePointer { uuid: b.uuid, ..pointer() };
    let late = [change(&other, Some(made[1].mod_revision), &next), change(&table, Some(first.mod_revision), &a)];
    let lost = catalog.change_tables(&late, soon()).await.unwrap_err();
    assert!(matches!(&lost, CatalogError::Conflict { table: t, resent: false, .. } if *t == table), "{lost:?}");
    assert_eq!(catalog.load_table(&other, soon()).await.unwrap().unwrap().value, b, "nothing of it was done");
    let there = catalog.change_tables(&[change(&other, None, &next)], soon()).await;
    assert_eq!(there, Err(CatalogError::TableExists(other.clone())));
    let claim = catalog.claim_turn(b.uuid, Uuid::new_v4(), soon()).await.unwrap().unwrap();
    let early = catalog.change_tables(&[change(&other, Some(made[1].mod_revision), &next)], soon()).await;
    assert_eq!(early, Err(CatalogError::NotYourTurn { table: other, turn: claim, resent: false }));
}

#[tokio::test]
async fn an_operation_is_done_once() {
    let (store, catalog, _, table) = setup();
    let first = created(&catalog, &table).await;
    let operation = |id: &str| Operation::new("test", id, format!("outcome of {id}")).unwrap();
    let swap = |id: &str, expected, new: &TablePointer| {
        let (catalog, table, new) = (catalog.within(operation(id)), table.clone(), new.clone());
        async move { catalog.swap_table(&table, expected, &new, None, soon()).await }
    };
    let mut next = [pointer(), pointer(), pointer()];
    next.iter_mut().for_each(|next| next.uuid = first.value.uuid);
    let made = swap("1", first.mod_revision, &next[0]).await.unwrap();
    let outcome = catalog.outcome("test", "1", soon()).await.unwrap();
    assert_eq!(outcome.as_deref(), Some(&b"outcome of 1"[..]));
    let again = swap("1", made.mod_revision, &next[1]).await;
    assert_eq!(again, Err(CatalogError::AlreadyDone("outcome of 1".into())));
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, next[0]);
    // An answer that is lost is not taken for another's.
    store.lose_answers.store(1, Ordering::SeqCst);
    let made = swap("4", made.mod_revision, &next[1]).await.unwrap();
    assert_eq!(made.value, next[1]);
    // What is not done leaves nothing.
    assert!(matches!(swap("2", first.mod_revision, &next[2]).await, Err(CatalogError::Conflict { .. })));
    assert_eq!(catalog.outcome("test", "2", soon()).await.unwrap(), None);

    store.lose_answers.store(1, Ordering::SeqCst);
    assert_eq!(catalog.leave_outcome(&operation("3"), soon()).await.unwrap(), "outcome of 3");
    let other = Operation::new("test", "3", "another").unwrap();
    assert_eq!(catalog.leave_outcome(&other, soon()).await.unwrap(), "outcome of 3");
    assert!(Operation::new("test", "a/b", "").is_err());
    assert_eq!(catalog.forget_outcomes("test", |kept| kept.ends_with(b"3"), soon()).await.unwrap(), 1);
    assert_eq!(catalog.outcome("test", "3", soon()).await.unwrap(), None);
    assert!(catalog.outcome("test", "1", soon()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn outcomes_go_when_they_were_kept_for_long_though_no_process_lives_for_long() {
    const LEAST: Duration = Duration::from_secs(7200);
    const MARK: &str = "/lake/op/kept/test";
    let (store, catalog, _, _) = setup();
    let look = async |keeping: &mut Keeping| {
        tokio::time::advance(LEAST / 48).await;
        catalog.forget_kept(keeping, LEAST, soon()).await.unwrap()
    };
    let leave = async |id: &str| {
        let operation = Operation::new("test", id, "outcome").unwrap();
        catalog.leave_outcome(&operation, soon()).await.unwrap();
        clock::now()
    };
    let is_kept = async |id: &str| catalog.outcome("test", id, soon()).await.unwrap().is_some();
    let mark = async || store.get(MARK, ReadOptions::default(), soon()).await.unwrap().value;

    assert_eq!(look(&mut Keeping::new("test")).await, 0);
    assert_eq!(mark().await, None, "there is nothing to look after");
    let old = leave("old").await;
    // A mark from another store, where that revision was long ago.
    let since = store.get("/lake/op/test/old", ReadOptions::default(), soon()).await.unwrap().revision;
    let copied = format!(r#"{{"version":7,"since":{since},"passed_ms":100000000}}"#);
    store.cas(MARK, None, copied.into(), soon()).await.unwrap();
    let mut first = Keeping::new("test");
    assert_eq!((look(&mut first).await, look(&mut first).await), (0, 0));
    leave("young").await;

    // Two at a time look after them, and neither for longer than it takes to look twice.
    let (mut looks, mut forgotten) = (0, Vec::new());
    while forgotten.len() < 2 {
        let mut both = [Keeping::new("test"), Keeping::new("test")];
        for _ in 0..2 {
            for keeping in &mut both {
                if look(keeping).await > 0 {
                    forgotten.push(clock::now());
                    assert!(!is_kept("old").await && is_kept("young").await == (forgotten.len() == 1));
                }
            }
        }
        looks += 1;
        assert!(looks < 200, "something stays: {forgotten:?}, {:?}", mark().await);
    }
    assert!(forgotten[0] - old >= LEAST && forgotten[1] - forgotten[0] >= LEAST);
    assert_eq!(mark().await, None, "nothing is left to look after");
}

#[tokio::test]
async fn properties_of_a_namespace_change_one_by_one() {
    let (store, catalog, _, _) = setup();
    let namespace: Namespace = "a".parse().unwrap();
    let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    };
    let names = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|n| (*n).to_owned()).collect() };
    let missing = catalog.update_namespace(&namespace, &names(&[]), &map(&[("k", "v")]), soon()).await;
    assert_eq!(missing, Err(CatalogError::NamespaceNotFound(namespace.clone())));
    assert_eq!(catalog.namespace_properties(&namespace, soon()).await.unwrap(), None);
    catalog.create_namespace(&namespace, map(&[("a", "1"), ("b", "2")]), soon()).await.unwrap();
    store.lose_answers.store(1, Ordering::SeqCst);
    let removed = catalog.update_namespace(&namespace, &names(&["a", "x"]), &map(&[("b", "3")]), soon()).await;
    assert_eq!(removed.unwrap(), names(&["a"]));
    assert_eq!(catalog.namespace_properties(&namespace, soon()).await.unwrap(), Some(map(&[("b", "3")])));
}

#[tokio::test]
async fn a_claimed_turn_is_the_claimants() {
    let (_, catalog, _, table) = setup();
    let first = created(&catalog, &table).await;
    let uuid = first.value.uuid;
    let next = || TablePointer { uuid, ..pointer() };
    let [mine, theirs] = [Uuid::new_v4(), Uuid::new_v4()];
    let claim = catalog.claim_turn(uuid, mine, soon()).await.unwrap().unwrap();
    assert_eq!(catalog.claim_turn(uuid, mine, soon()).await.unwrap(), Some(claim), "asked for again");
    assert_eq!(catalog.claim_turn(uuid, theirs, soon()).await.unwrap(), None);
    let early = catalog.swap_table(&table, first.mod_revision, &next(), None, soon()).await;
    assert_eq!(early, Err(CatalogError::NotYourTurn { table: table.clone(), turn: claim, resent: false }));
    let swapped = catalog.swap_table(&table, first.mod_revision, &next(), Some(claim), soon()).await.unwrap();
    assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), None, "the claim ends with the swap");

    // One that its claimant leaves behind is ended by who waits for it, and then does not count any more.
    let left = catalog.claim_turn(uuid, mine, soon()).await.unwrap().unwrap();
    assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), Some(left));
    catalog.end_turn(uuid, left, soon()).await.unwrap();
    let late = catalog.swap_table(&table, swapped.mod_revision, &next(), Some(left), soon()).await;
    assert!(matches!(late, Err(CatalogError::NotYourTurn { turn: 0, .. })), "{late:?}");
    catalog.swap_table(&table, swapped.mod_revision, &next(), None, soon()).await.unwrap();
}

#[tokio::test]
async fn more_tables_than_one_read_takes_are_loaded_at_one_revision() {
    let (_, catalog, nested, table) = setup();
    let first = created(&catalog, &table).await;
    let mut tables: Vec<_> = (0..3000).map(|n| TableIdent::new(nested.clone(), format!("t{n}")).unwrap()).collect();
    tables.push(table);
    let (revision, pointers) = catalog.load_tables(&tables, ReadOptions::default(), soon()).await.unwrap();
    assert_eq!((revision, pointers.len()), (first.mod_revision, tables.len()));
    assert_eq!(pointers.iter().flatten().collect::<Vec<_>>(), [&first]);
}

#[tokio::test]
async fn what_is_guarded_changes_nothing_once_a_guard_does_not_hold() {
    let store = crate::memory::MemoryStore::shared();
    let catalog = Catalog::new(store.clone());
    let table: TableIdent = TableIdent::new("n".parse().unwrap(), "t").unwrap();
    catalog.create_namespace(&table.namespace, BTreeMap::new(), soon()).await.unwrap();
    let pointer =
        |n: u32| TablePointer { uuid: Uuid::nil(), metadata_location: format!("m{n}"), previous_location: None };
    let mut at = catalog.create_table(&table, &pointer(0), soon()).await.unwrap().mod_revision;
    let put = async |token, value: &'static str| {
        let put = store.cas("/lake/route/shard/0000", token, value.into(), soon()).await.unwrap().result;
        (put.succeeded, put.revision)
    };
    let (_, route) = put(None, "a").await;
    let guard = Compare::mod_revision("/lake/route/shard/0000", route);
    let guarded = catalog.guarded(vec![guard.clone()]);
    catalog.check_guards(soon()).await.unwrap();
    guarded.check_guards(soon()).await.unwrap();
    at = guarded.swap_table(&table, at, &pointer(1), None, soon()).await.unwrap().mod_revision;
    // Another writer is in the way as ever.
    let lost = guarded.swap_table(&table, at - 1, &pointer(2), None, soon()).await.unwrap_err();
    assert!(matches!(lost, CatalogError::Conflict { .. }), "{lost}");
    // Of a lease nothing is observed: that everything else holds shows it.
    let leased = catalog.guarded(vec![guard, Compare::lease_alive(7)]);
    let fenced = leased.swap_table(&table, at, &pointer(2), None, soon()).await.unwrap_err();
    assert_eq!(fenced, CatalogError::Fenced { resent: false });
    assert_eq!(leased.check_guards(soon()).await, Err(fenced));
    let lost = leased.swap_table(&table, at - 1, &pointer(2), None, soon()).await.unwrap_err();
    assert!(matches!(lost, CatalogError::Conflict { .. }), "{lost}");
    // And another route is seen, whatever else is in the way.
    at = guarded.swap_table(&table, at, &pointer(3), None, soon()).await.unwrap().mod_revision;
    assert!(put(Some(crate::store::Token::at(route)), "b").await.0);
    assert_eq!(guarded.check_guards(soon()).await, Err(CatalogError::Fenced { resent: false }));
    for expected in [at, at - 1] {
        let fenced = guarded.swap_table(&table, expected, &pointer(4), None, soon()).await.unwrap_err();
        assert_eq!((fenced.applied(), fenced), (Applied::No, CatalogError::Fenced { resent: false }));
    }
    assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, pointer(3));
}

#[tokio::test]
async fn metadata_has_one_name() {
    let (store, catalog, _, table) = setup();
    let first = created(&catalog, &table).await;
    let uuid = first.value.uuid;
    let twin = TableIdent::new(table.namespace.clone(), "twin").unwrap();
    let older = TablePointer { uuid, ..pointer() };
    let there = Err(CatalogError::Registered(table.clone()));
    assert_eq!(catalog.register_table(&twin, &older, None, soon()).await, there);
    let other = catalog.create_table(&twin, &pointer(), soon()).await.unwrap();
    assert_eq!(catalog.register_table(&twin, &older, Some(other.mod_revision), soon()).await, there);

    // Under its own name it takes another version, and under another once it is dropped; also when an answer is lost.
    let back = catalog.register_table(&table, &older, Some(first.mod_revision), soon()).await.unwrap();
    let same = catalog.register_table(&table, &older, Some(first.mod_revision), soon()).await.unwrap();
    assert_eq!((same.mod_revision, catalog.turn(uuid, soon()).await.unwrap()), (back.mod_revision, None));
    assert_eq!(
        catalog.register_table(&table, &older, None, soon()).await,
        Err(CatalogError::TableExists(table.clone()))
    );
    catalog.drop_table(&table, back.mod_revision, soon()).await.unwrap();
    store.lose_answers.store(1, Ordering::SeqCst);
    let moved = catalog.register_table(&twin, &older, Some(other.mod_revision), soon()).await.unwrap();
    assert_eq!(moved.value, older);
    let early = catalog.register_table(&twin, &other.value, Some(first.mod_revision), soon()).await;
    assert!(matches!(early, Err(CatalogError::Conflict { resent: false, .. })), "{early:?}");

    // Two at the same time.
    catalog.drop_table(&twin, moved.mod_revision, soon()).await.unwrap();
    let both = tokio::join!(
        catalog.register_table(&table, &older, None, soon()),
        catalog.register_table(&twin, &older, None, soon())
    );
    assert_ne!(both.0.is_ok(), both.1.is_ok(), "{both:?}");
}

/// What says which table has a uuid.
async fn name_of(catalog: &Catalog, uuid: Uuid) -> Option<String> {
    let read = catalog.store().get(&format!("/lake/named/{uuid}"), ReadOptions::default(), soon()).await.unwrap();
    read.value.map(|entry| String::from_utf8(entry.value.to_vec()).unwrap())
}

#[tokio::test]
async fn what_a_uuid_is_called_follows_its_table() {
    let (store, catalog, namespace, table) = setup();
    let first = created(&catalog, &table).await;
    let uuid = first.value.uuid;
    let ident = |name: &str| TableIdent::new(namespace.clone(), name).unwrap();
    assert_eq!(name_of(&catalog, uuid).await, Some(table.key()));
    store.lose_answers.store(1, Ordering::SeqCst);
    let moved = catalog.rename_table(&table, &ident("u"), soon()).await.unwrap();
    assert_eq!(name_of(&catalog, uuid).await, Some(ident("u").key()));
    // Another table in its place: the one's name goes, and the other's comes.
    let other = pointer();
    catalog.register_table(&ident("u"), &other, Some(moved.mod_revision), soon()).await.unwrap();
    assert_eq!((name_of(&catalog, uuid).await, name_of(&catalog, other.uuid).await), (None, Some(ident("u").key())));
    let there = catalog.load_table(&ident("u"), soon()).await.unwrap().unwrap();
    catalog.drop_table(&ident("u"), there.mod_revision, soon()).await.unwrap();
    assert_eq!(name_of(&catalog, other.uuid).await, None);

    let [a, b] = [pointer(), pointer()];
    let change = |name: &str, new: &TablePointer| TableChange { table: ident(name), expected: None, new: new.clone() };
    let twice = catalog.change_tables(&[change("a", &a), change("b", &a)], soon()).await;
    assert_eq!(twice, Err(CatalogError::Registered(ident("a"))));
    catalog.change_tables(&[change("a", &a), change("b", &b)], soon()).await.unwrap();
    let twin = catalog.change_tables(&[change("c", &pointer()), change("d", &b)], soon()).await;
    assert_eq!(twin, Err(CatalogError::Registered(ident("b"))));
    assert_eq!(catalog.load_table(&ident("c"), soon()).await.unwrap(), None, "nothing of it was done");
    assert_eq!(catalog.create_table(&ident("d"), &a, soon()).await, Err(CatalogError::Registered(ident("a"))));
    catalog.drop_namespace_and_contents(&namespace, None, soon()).await.unwrap();
    assert_eq!((name_of(&catalog, a.uuid).await, name_of(&catalog, b.uuid).await), (None, None));
}

#[tokio::test]
async fn metadata_is_registered_by_one_lookup_and_a_name_that_is_left_behind_counts_as_none() {
    let (store, catalog, namespace, table) = setup();
    let first = created(&catalog, &table).await;
    let ident = |name: &str| TableIdent::new(namespace.clone(), name).unwrap();
    // A listing would be asked for again and again until the deadline.
    store.forgets_listings.store(true, Ordering::SeqCst);
    let new = pointer();
    catalog.register_table(&ident("new"), &new, None, soon()).await.unwrap();
    for (there, uuid) in [(ident("new"), new.uuid), (table.clone(), first.value.uuid)] {
        let twin = catalog.register_table(&ident("twin"), &TablePointer { uuid, ..pointer() }, None, soon()).await;
        assert_eq!(twin, Err(CatalogError::Registered(there)));
    }
    store.forgets_listings.store(false, Ordering::SeqCst);

    let put = async |uuid: Uuid, ident: &TableIdent| {
        let (name, key) = (format!("/lake/named/{uuid}"), ident.key());
        let there = catalog.store().get(&name, ReadOptions::default(), soon()).await.unwrap().value;
        let token = there.as_ref().map(crate::store::Token::of);
        assert!(catalog.store().cas(&name, token, key.into(), soon()).await.unwrap().result.succeeded);
    };
    // It says a table that there is not, and one that has another uuid.
    for left in [ident("nothing"), table.clone()] {
        let (made, together, instead) = (pointer(), pointer(), pointer());
        for uuid in [made.uuid, together.uuid, instead.uuid] {
            put(uuid, &left).await;
        }
        let at = catalog.create_table(&ident("a"), &made, soon()).await.unwrap().mod_revision;
        assert_eq!(name_of(&catalog, made.uuid).await, Some(ident("a").key()));
        let change = TableChange { table: ident("b"), expected: None, new: together.clone() };
        let other = TableChange { table: ident("c"), expected: None, new: pointer() };
        let both = catalog.change_tables(&[change, other], soon()).await.unwrap();
        assert_eq!(name_of(&catalog, together.uuid).await, Some(ident("b").key()));
        catalog.register_table(&ident("a"), &instead, Some(at), soon()).await.unwrap();
        assert_eq!(name_of(&catalog, instead.uuid).await, Some(ident("a").key()));
        // It says another table than the one that has the uuid: a listing finds that.
        put(together.uuid, &left).await;
        let twin = catalog.create_table(&ident("d"), &together, soon()).await;
        assert_eq!(twin, Err(CatalogError::Registered(ident("b"))));
        let there = catalog.load_table(&ident("a"), soon()).await.unwrap().unwrap();
        catalog.drop_table(&ident("a"), there.mod_revision, soon()).await.unwrap();
        for (name, made) in ["b", "c"].into_iter().zip(both) {
            catalog.drop_table(&ident(name), made.mod_revision, soon()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn tables_from_before_there_were_names_get_theirs_before_another_is_made() {
    let (store, catalog, namespace, table) = setup();
    let ident = |name: &str| TableIdent::new(namespace.clone(), name).unwrap();
    let first = created(&catalog, &table).await;
    let mut old = vec![(table.clone(), first)];
    for n in 0..120 {
        let table = ident(&format!("t{n}"));
        let made = catalog.create_table(&table, &pointer(), soon()).await.unwrap();
        old.push((table, made));
    }
    for (_, made) in &old {
        let name = format!("/lake/named/{}", made.value.uuid);
        let there = store.get(&name, ReadOptions::default(), soon()).await.unwrap().value.unwrap();
        let gone = store.cas_delete(&name, crate::store::Token::of(&there), soon()).await.unwrap();
        assert!(gone.result.succeeded, "{name}");
    }
    let of = |at: usize| TablePointer { uuid: old[at].1.value.uuid, ..pointer() };
    // One that is renamed or dropped before anybody has looked.
    catalog.rename_table(&old[1].0, &ident("renamed"), soon()).await.unwrap();
    assert_eq!(name_of(&catalog, old[1].1.value.uuid).await, Some(ident("renamed").key()));
    catalog.drop_table(&old[2].0, old[2].1.mod_revision, soon()).await.unwrap();

    let late = Catalog::new(store.clone());
    // The answer to naming some of them is lost.
    store.lose_answers.store(1, Ordering::SeqCst);
    let twin = late.register_table(&ident("twin"), &of(0), None, soon()).await;
    assert_eq!(twin, Err(CatalogError::Registered(table.clone())));
    for (table, made) in &old[3..] {
        assert_eq!(name_of(&catalog, made.value.uuid).await, Some(table.key()));
    }
    // It is done for all who come: they do not list.
    store.forgets_listings.store(true, Ordering::SeqCst);
    let later = || Catalog::new(store.clone());
    let change = TableChange { table: ident("twin"), expected: None, new: of(1) };
    assert_eq!(later().change_tables(&[change], soon()).await, Err(CatalogError::Registered(ident("renamed"))));
    let place = later().create_table(&ident("place"), &pointer(), soon()).await.unwrap();
    let instead = later().register_table(&ident("place"), &of(119), Some(place.mod_revision), soon()).await;
    assert_eq!(instead, Err(CatalogError::Registered(old[119].0.clone())));
    later().register_table(&ident("twin"), &of(2), None, soon()).await.unwrap();
}
