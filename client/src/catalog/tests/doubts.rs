//! Every change of the catalog whose first sending was lost, or was applied and not answered, while others do something before the
//! second: what the caller is told is true, and nothing is done twice.

use bytes::Bytes;

use super::*;
use crate::faulty::{First, Theirs};
use crate::procedures::{Record, kept};
use crate::warehouse::{KEY, Profile, WarehouseError};

const OPERATIONS: [&str; 20] = [
    "create table",
    "create view",
    "create namespace",
    "create warehouse",
    "rename table",
    "rename view",
    "drop table",
    "drop view",
    "drop namespace",
    "drop contents",
    "submit drop",
    "submit purge",
    "remove warehouse",
    "change warehouse",
    "update namespace",
    "swap table",
    "swap view",
    "change several",
    "create several",
    "replace table",
];

/// Those that make a table or a view of some name.
const MADE: [&str; 5] = ["create table", "create view", "create several", "rename table", "rename view"];

fn ident(name: &str) -> TableIdent {
    TableIdent::new("a.b".parse().unwrap(), name).unwrap()
}

fn namespaces() -> Vec<String> {
    ["a", "a.b", "a.e", "a.n", "w", "x"].iter().map(|name| name.parse::<Namespace>().unwrap().key()).collect()
}

/// What others may do meanwhile.
fn interferences() -> Vec<(&'static str, Vec<Theirs>)> {
    let theirs = || Bytes::from(serde_json::to_vec(&pointer()).unwrap());
    let keys = |names: &[&str]| -> Vec<String> {
        names.iter().flat_map(|name| [ident(name).key(), ident(name).view_key()]).collect()
    };
    let all = |keys: Vec<String>, change: fn(String) -> Theirs| keys.into_iter().map(change).collect::<Vec<_>>();
    let claim = || all(["a", "w", "x"].map(|name| format!("/catalog/{name}")).to_vec(), Theirs::Claim);
    let touch = || all([namespaces(), vec![KEY.to_owned()]].concat(), Theirs::Touch);
    let commit = || [all(keys(&["t", "v", "new"]), Theirs::Touch), touch()].concat();
    let drop = || [all(keys(&["t", "v", "new"]), Theirs::Delete), touch()].concat();
    let drop_all = || [drop(), all(namespaces()[1..4].to_vec(), Theirs::Delete)].concat();
    let away = || all(keys(&["new"]), |key| Theirs::Move(key.clone(), key.replace("/new", "/elsewhere"))).into_iter();
    let turn = format!("/lake/turn/{}", Uuid::from_u128(1));
    vec![
        ("nothing", vec![]),
        ("a scope is taken", claim()),
        ("it is undone", vec![Theirs::Undo]),
        ("it is undone, and a scope is taken", [vec![Theirs::Undo], claim()].concat()),
        ("the name is another's", vec![Theirs::Put(ident("new").key(), theirs())]),
        ("a view has the name", vec![Theirs::Put(ident("new").view_key(), theirs())]),
        ("another's, and a scope", [vec![Theirs::Put(ident("new").key(), theirs())], claim()].concat()),
        ("all is written again", touch()),
        ("others commit", commit()),
        ("others commit, and take a scope", [commit(), claim()].concat()),
        ("others drop", drop()),
        ("others drop, and take a scope", [drop(), claim()].concat()),
        ("the namespaces are dropped", drop_all()),
        ("it is renamed", away().collect()),
        ("it is renamed, and a scope is taken", away().chain(claim()).collect()),
        ("it is renamed, and nobody answers", away().chain(touch()).chain([Theirs::Away]).collect()),
        ("others commit, and nobody answers", [commit(), vec![Theirs::Away]].concat()),
        ("another has the turn", vec![Theirs::Put(turn, "x".into())]),
    ]
}

/// Whether it may have been done, and what it said.
type Failed = (Applied, String);

fn failed(error: CatalogError) -> Failed {
    (error.applied(), error.to_string())
}

fn refused(error: WarehouseError) -> Failed {
    match error {
        WarehouseError::Catalog(error) => failed(error),
        error @ WarehouseError::Refused { .. } => (Applied::No, error.to_string()),
    }
}

struct World {
    store: Arc<FaultyStore>,
    catalog: Catalog,
    table: Versioned<TablePointer>,
    view: Versioned<TablePointer>,
}

async fn world() -> World {
    let (store, catalog, _, _) = setup();
    for name in ["a", "a.b", "a.e"] {
        catalog.create_namespace(&name.parse().unwrap(), BTreeMap::new(), soon()).await.unwrap();
    }
    let profile = Profile::new("s3://b/w", None).unwrap();
    catalog.create_warehouse("w", &profile, soon()).await.unwrap();
    let first = TablePointer { uuid: Uuid::from_u128(1), ..pointer() };
    let table = catalog.create_table(&ident("t"), &first, soon()).await.unwrap();
    let view = catalog.create_view(&ident("v"), &pointer(), soon()).await.unwrap();
    World { store, catalog, table, view }
}

async fn run(operation: &str, world: &World) -> Result<(), Failed> {
    let World { catalog, table, view, .. } = world;
    let namespace = |name: &str| name.parse::<Namespace>().unwrap();
    let [t, v, new] = ["t", "v", "new"].map(ident);
    let next = TablePointer { uuid: table.value.uuid, ..pointer() };
    let other = Profile::new("s3://b/x", None).unwrap();
    let created = TableChange { table: new.clone(), expected: None, new: pointer() };
    let swapped = TableChange { table: t.clone(), expected: Some(table.mod_revision), new: next.clone() };
    let by = soon();
    let done = match operation {
        "create table" => catalog.create_table(&new, &pointer(), by).await.map(drop),
        "create view" => catalog.create_view(&new, &pointer(), by).await.map(drop),
        "create namespace" => catalog.create_namespace(&namespace("a.n"), BTreeMap::new(), by).await,
        "create warehouse" => return catalog.create_warehouse("x", &other, by).await.map_err(refused),
        "change warehouse" => return catalog.change_warehouse("w", &other, by).await.map_err(refused),
        "remove warehouse" => return catalog.remove_warehouse("w", by).await.map_err(refused),
        "rename table" => catalog.rename_table(&t, &new, by).await.map(drop),
        "rename view" => catalog.rename_view(&v, &new, by).await.map(drop),
        "drop table" => catalog.drop_table(&t, table.mod_revision, by).await.map(drop),
        "drop view" => catalog.drop_view(&v, view.mod_revision, by).await.map(drop),
        "drop namespace" => catalog.drop_namespace(&namespace("a.e"), by).await,
        "drop contents" => catalog.drop_namespace_and_contents(&namespace("a.b"), None, by).await.map(drop),
        "submit drop" => catalog.submit_namespace_drop(&namespace("a.b"), false, 1, by).await.map(drop),
        "submit purge" => return catalog.submit_warehouse_purge("w", 1, by).await.map(drop).map_err(refused),
        "update namespace" => {
            let properties = [("k".to_owned(), "v".to_owned())].into();
            catalog.update_namespace(&namespace("a.b"), &BTreeSet::new(), &properties, by).await.map(drop)
        }
        "swap table" => catalog.swap_table(&t, table.mod_revision, &next, None, by).await.map(drop),
        "swap view" => catalog.swap_view(&v, view.mod_revision, &pointer(), by).await.map(drop),
        "change several" => catalog.change_tables(&[swapped, created], by).await.map(drop),
        "create several" => {
            let more = TableChange { table: ident("more"), expected: None, new: pointer() };
            catalog.change_tables(&[created, more], by).await.map(drop)
        }
        "replace table" => catalog.register_table(&t, &pointer(), Some(table.mod_revision), by).await.map(drop),
        other => panic!("{other}"),
    };
    done.map_err(failed)
}

#[tokio::test]
async fn what_is_told_of_a_change_is_what_became_of_it() {
    for operation in OPERATIONS {
        // That a procedure was submitted is not undone: its record stays.
        let is_possible = |theirs: &[Theirs]| {
            !operation.starts_with("submit") || !theirs.iter().any(|theirs| matches!(theirs, Theirs::Undo))
        };
        for (name, theirs) in interferences().into_iter().filter(|(_, theirs)| is_possible(theirs)) {
            for first in [First::None, First::Lost, First::Applied] {
                let world = world().await;
                *world.store.interferes.lock().unwrap() = Some((first, theirs.clone()));
                world.store.made.store(0, Ordering::SeqCst);
                let ended = run(operation, &world).await;
                let made = world.store.made.load(Ordering::SeqCst);
                let case = format!("{operation}; meanwhile {name}; first sending: {first:?}; made {made}: {ended:?}");
                match &ended {
                    // What was dropped by others is dropped.
                    Ok(()) => assert!(made > 0 || operation.starts_with("drop"), "{case}"),
                    Err((Applied::No, _)) => assert_eq!(made, 0, "{case}"),
                    Err((Applied::Unknown, text)) => {
                        assert!(first != First::None, "nothing is in doubt: {case}");
                        assert!(!text.contains("nothing was"), "{case}");
                    }
                }
                assert!(made <= 1, "{case}");
                // Who is still there was not moved, and who was moved is found.
                let moves = operation.starts_with("drop") || operation.starts_with("rename");
                let told = ended.as_ref().map_err(|(applied, _)| *applied);
                match (name, first) {
                    ("nothing", _) | ("all is written again", First::None) => assert_eq!(told, Ok(&()), "{case}"),
                    // Its uuid tells.
                    ("others commit", First::Applied) if MADE.contains(&operation) => {
                        assert_eq!(told, Ok(&()), "{case}");
                    }
                    ("a scope is taken", First::None) => {
                        let is_structure = !operation.starts_with("swap") && operation != "update namespace";
                        assert_eq!(told.is_err(), is_structure, "{case}");
                    }
                    // It was not, and still can be: the first sending may be late, and the scope be released by then.
                    ("a scope is taken", First::Lost) if moves || operation == "change several" => {
                        assert_eq!(told, Err(Applied::Unknown), "{case}");
                    }
                    ("a scope is taken", First::Applied) if moves => assert_eq!(told, Ok(&()), "{case}"),
                    _ => {}
                }
            }
        }
    }
}

#[tokio::test]
async fn a_drop_whose_purge_has_gone_on_is_not_said_to_be_anothers() {
    for (first, expected) in [(First::Applied, Applied::Unknown), (First::None, Applied::No)] {
        let world = world().await;
        let record = Record::new("k", "s", "first", kept(&()), 1);
        let purging = world.catalog.within(Operation::submitting("p", &record));
        // The leader has taken it on.
        let gone_on = Record { accepted_ms: Some(1), ..record };
        let theirs =
            vec![Theirs::Put(crate::procedures::key("p"), gone_on.to_bytes()), Theirs::Delete(ident("t").key())];
        *world.store.interferes.lock().unwrap() = Some((first, theirs));
        let error = purging.drop_table(&ident("t"), world.table.mod_revision, soon()).await.unwrap_err();
        assert_eq!(error.applied(), expected, "{error}");
    }
    // What an operation has left says that it is done.
    let left = CatalogError::AlreadyDone("done".into());
    assert_eq!(left.clone().after_doubt(true), left);
}
