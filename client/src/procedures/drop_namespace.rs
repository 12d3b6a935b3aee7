//! The kind `drop_namespace`: a namespace goes with all that is in it, however much that is.
//!
//! | step      | who    | what                                                                                             |
//! |-----------|--------|--------------------------------------------------------------------------------------------------|
//! | `drop`    | leader | drops up to [`AT_ONCE`] tables and views in one transaction; with a purge each table's is submitted in it, as a child. With the last one the namespace goes, and the scope on it |
//! | `purges`  | leader | waits until its children have ended                                                              |
//! | `restore` | leader | undoes it after a cancel: what still waits to be purged is there again, its purge is cancelled   |
//!
//! What a step does to the map and the record that says so are one transaction, so that each is done once. While the namespace is being
//! dropped nothing comes into it: the scope sees to that; commits to its tables go on until they are gone.
//!
//! Here are pure functions of what the map holds ([`Entries`]). Limits: [`AT_ONCE`], [`VIEW_BYTES`], [`PROPERTY_BYTES`].

use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, KeyValue, Op, Revision, Txn};
use serde::{Deserialize, Serialize};

use super::purge::{CHECK, PURGE_TABLE, Purge, RETAIN, of_drop};
use super::{Procedure, Record, State, kept, key};
use crate::catalog::{Namespace, TableIdent, TablePointer, encode, named_key};

/// The kind's name.
pub const DROP_NAMESPACE: &str = "drop_namespace";
/// The steps.
pub const DROP: &str = "drop";
pub const PURGES: &str = "purges";
pub const RESTORE: &str = "restore";
/// Most tables and views of one transaction.
pub const AT_ONCE: usize = 100;
/// Views that were dropped are remembered up to so many bytes of them; with more it cannot be undone.
pub const VIEW_BYTES: usize = 128 << 10;
/// Properties of the namespace that are remembered, in bytes; more are gone when it is undone.
pub const PROPERTY_BYTES: usize = 32 << 10;

/// What the procedure keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDrop {
    /// The namespace's levels.
    pub namespace: Vec<String>,
    /// Whether the tables' files go as well.
    pub purge: bool,
    /// Tables and views that were dropped.
    #[serde(default)]
    pub dropped: u64,
    /// Purges that were submitted.
    #[serde(default)]
    pub purges: u64,
    /// Views that were dropped, by their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub views: Vec<(String, TablePointer)>,
    /// What was dropped and is remembered nowhere.
    #[serde(default)]
    pub lost: u64,
    /// What was kept of the namespace, once that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub was: Option<String>,
    /// Tables and views that are there again.
    #[serde(default)]
    pub restored: u64,
}

/// What the map holds, at one revision.
pub trait Entries {
    fn get(&self, key: &str) -> Option<KeyValue>;

    /// The entries under a prefix, in order of their keys, and so many at most.
    fn list(&self, prefix: &str, limit: usize) -> Vec<KeyValue>;
}

/// What comes after a part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comes {
    /// This step.
    Step(&'static str),
    /// Nothing: all is done.
    End,
    /// Nothing: all is undone that can be.
    Undone,
}

/// A part of a step: what it changes, and what is kept then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned<Kept = NamespaceDrop> {
    pub txn: Txn,
    /// The scope goes with it.
    pub releases: bool,
    pub now: Kept,
    pub comes: Comes,
}

/// The procedure that drops a namespace that is as it was read at `revision`: its id, and its record.
pub fn of_namespace(namespace: &Namespace, revision: Revision, purge: bool, now_unix_ms: u64) -> (String, Record) {
    let dropping = NamespaceDrop {
        namespace: namespace.levels().to_vec(),
        purge,
        dropped: 0,
        purges: 0,
        views: Vec::new(),
        lost: 0,
        was: None,
        restored: 0,
    };
    let record = Record::new(DROP_NAMESPACE, namespace.to_string(), DROP, kept(&dropping), now_unix_ms);
    // The time tells attempts apart: one that was cancelled has left the namespace as it was.
    (format!("drop-namespace-{revision}-{now_unix_ms}"), Record { scopes: vec![namespace.scope_path()], ..record })
}

/// Whether a procedure is a purge that can still be cancelled.
fn is_restorable(record: &Record) -> bool {
    let waits = [RETAIN, CHECK].contains(&record.step.as_str());
    record.kind == PURGE_TABLE && record.state == State::Active && waits
}

impl NamespaceDrop {
    fn namespace(&self) -> Result<Namespace, String> {
        Namespace::new(self.namespace.iter().cloned()).map_err(|e| e.to_string())
    }

    /// Whether what was dropped can be had back: all of it is remembered, here or by its purge.
    pub fn can_be_undone(&self) -> bool {
        self.lost == 0 && (self.purge || self.dropped == self.views.len() as u64)
    }

    /// The next part of dropping what is in the namespace, and at last the namespace.
    ///
    /// # Errors
    /// Why it cannot be done.
    pub fn drop_some(&self, id: &str, map: &dyn Entries, now_unix_ms: u64) -> Result<Planned, String> {
        let namespace = self.namespace()?;
        let Some(own) = map.get(&namespace.key()) else { return Err(format!("schema {namespace} is not there")) };
        if !map.list(&namespace.nested_prefix(), 1).is_empty() {
            return Err(format!("schema {namespace} has schemas nested in it"));
        }
        let tables = map.list(&namespace.table_prefix(), AT_ONCE);
        let views = map.list(&namespace.view_prefix(), AT_ONCE - tables.len());
        let mut now = self.clone();
        let mut txn = Txn::default();
        if tables.is_empty() && views.is_empty() {
            txn.when = namespace.contents().into_iter().map(Compare::prefix_empty).collect();
            delete(&mut txn, &own);
            now.was = String::from_utf8(own.value.to_vec()).ok().filter(|was| was.len() <= PROPERTY_BYTES);
            let comes = if now.purges > 0 { Comes::Step(PURGES) } else { Comes::End };
            return Ok(Planned { txn, releases: true, now, comes });
        }
        let mut view_bytes = kept(&now.views).to_string().len();
        for view in &views {
            delete(&mut txn, view);
            now.dropped += 1;
            let name = view.key[namespace.view_prefix().len()..].to_owned();
            view_bytes += view.value.len() + name.len() + 16;
            match serde_json::from_slice(&view.value) {
                Ok(pointer) if view_bytes <= VIEW_BYTES => now.views.push((name, pointer)),
                _ => now.lost += 1,
            }
        }
        for table in &tables {
            now.dropped += 1;
            match drop_table(&mut txn, map, table, self.purge.then_some(id), now_unix_ms) {
                Dropped::Purged => now.purges += 1,
                Dropped::Kept => {}
                Dropped::Unreadable => now.lost += 1,
            }
        }
        Ok(Planned { txn, releases: false, now, comes: Comes::Step(DROP) })
    }

    /// The next part of having back what was dropped. `children` are the procedures that this one is the parent of. What has another's
    /// name by now, or is being deleted, stays dropped.
    ///
    /// # Errors
    /// What is kept makes no sense.
    pub fn restore_some(
        &self,
        id: &str,
        map: &dyn Entries,
        children: &[Procedure],
        now_unix_ms: u64,
    ) -> Result<Planned, String> {
        let namespace = self.namespace()?;
        let mut now = self.clone();
        let mut txn = Txn::default();
        let is_free = |ident: &TableIdent| map.get(&ident.key()).is_none() && map.get(&ident.view_key()).is_none();
        let mut restored = 0;
        for child in children.iter().filter(|child| is_restorable(&child.record)) {
            let Some((ident, purge)) =
                child.record.data::<Purge>().ok().and_then(|purge| Some((purge.ident()?, purge)))
            else {
                continue;
            };
            let name = named_key(purge.uuid);
            let named = map.get(&name);
            if ident.namespace != namespace
                || !is_free(&ident)
                || named.as_ref().is_some_and(|n| n.value != ident.key())
            {
                continue;
            }
            if restored == AT_ONCE {
                break;
            }
            let pointer =
                TablePointer { uuid: purge.uuid, metadata_location: purge.metadata_location, previous_location: None };
            put_free(&mut txn, &ident, ident.key(), &pointer)?;
            if named.is_none() {
                create(&mut txn, name, ident.key());
            }
            let cancelled = Record {
                state: State::Cancelled,
                cancel: false,
                note: "the drop of its schema was cancelled".to_owned(),
                changed_unix_ms: now_unix_ms,
                ..child.record.clone()
            };
            let change = cancelled.change(&child.id, child.mod_revision);
            txn.when.extend(change.when);
            txn.then.extend(change.then);
            restored += 1;
        }
        while restored < AT_ONCE
            && let Some((name, pointer)) = now.views.pop()
        {
            let ident = TableIdent::new(namespace.clone(), name).map_err(|e| e.to_string())?;
            if is_free(&ident) {
                put_free(&mut txn, &ident, ident.view_key(), &pointer)?;
                restored += 1;
            }
        }
        if restored == 0 {
            return Ok(Planned { txn: Txn::default(), releases: false, now, comes: Comes::Undone });
        }
        now.restored += restored as u64;
        match map.get(&namespace.key()) {
            Some(there) => txn.when.push(Compare::mod_revision(there.key, there.mod_revision)),
            None => {
                let parent = namespace.parent().map(|parent| (map.get(&parent.key()), parent));
                match parent {
                    Some((None, parent)) => {
                        let left = format!("schema {parent}, in which it was, is not there any more");
                        return Err(left);
                    }
                    Some((Some(there), _)) => txn.when.push(Compare::mod_revision(there.key, there.mod_revision)),
                    None => {}
                }
                let was = match &self.was {
                    Some(was) => was.clone().into_bytes(),
                    None => Namespace::without_properties(&namespace.key()).map_err(|e| e.to_string())?,
                };
                create(&mut txn, namespace.key(), was);
            }
        }
        txn.when.push(Compare::scope_free(namespace.scope_path(), Some(ScopeOwner::Procedure(id.to_owned()))));
        Ok(Planned { txn, releases: false, now, comes: Comes::Step(RESTORE) })
    }
}

/// What becomes of the files of a table that is dropped.
pub(super) enum Dropped {
    /// They are purged.
    Purged,
    Kept,
    /// Nobody knows which they are.
    Unreadable,
}

/// Drops the table of this entry; its purge is submitted as a child of `parent`, if there is one.
pub(super) fn drop_table(
    txn: &mut Txn,
    map: &dyn Entries,
    table: &KeyValue,
    parent: Option<&str>,
    now_unix_ms: u64,
) -> Dropped {
    delete(txn, table);
    let read = serde_json::from_slice::<TablePointer>(&table.value).ok().zip(TableIdent::from_key(&table.key));
    let Some((pointer, ident)) = read else { return Dropped::Unreadable };
    if let Some(name) = map.get(&named_key(pointer.uuid)).filter(|name| name.value == table.key) {
        delete(txn, &name);
    }
    let Some(parent) = parent else { return Dropped::Kept };
    let (child, record) = of_drop(&ident, &pointer, table.mod_revision, now_unix_ms);
    let record = Record { parent: Some(parent.to_owned()), ..record };
    create(txn, key(&child), record.to_bytes());
    Dropped::Purged
}

pub(super) fn delete(txn: &mut Txn, entry: &KeyValue) {
    txn.when.push(Compare::mod_revision(&entry.key, entry.mod_revision));
    txn.then.push(Op::delete(&entry.key));
}

fn create(txn: &mut Txn, key: String, value: impl Into<bytes::Bytes>) {
    txn.when.push(Compare::absent(&key));
    txn.then.push(Op::put(key, value));
}

/// Puts a pointer where nothing has its name.
fn put_free(txn: &mut Txn, ident: &TableIdent, key: String, pointer: &TablePointer) -> Result<(), String> {
    let other = if key == ident.key() { ident.view_key() } else { ident.key() };
    txn.when.push(Compare::absent(other));
    let value = encode(pointer, &key).map_err(|e| e.to_string())?;
    create(txn, key, value);
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use lake_proto::kv::Condition;
    use uuid::Uuid;

    use super::*;

    /// A map that runs transactions.
    #[derive(Default)]
    pub(in crate::procedures) struct Map(pub BTreeMap<String, KeyValue>, Revision);

    impl Entries for Map {
        fn get(&self, key: &str) -> Option<KeyValue> {
            self.0.get(key).cloned()
        }

        fn list(&self, prefix: &str, limit: usize) -> Vec<KeyValue> {
            self.0.values().filter(|entry| entry.key.starts_with(prefix)).take(limit).cloned().collect()
        }
    }

    impl Map {
        pub fn run(&mut self, txn: &Txn) {
            txn.validate().unwrap();
            for compare in &txn.when {
                let there = self.0.get(&compare.key);
                let holds = match &compare.condition {
                    Condition::Absent => there.is_none(),
                    Condition::ModRevision(revision) => there.is_some_and(|entry| entry.mod_revision == *revision),
                    Condition::PrefixEmpty => !self.0.keys().any(|key| key.starts_with(&compare.key)),
                    Condition::ScopeFree(_) => true,
                    other => panic!("{other:?}"),
                };
                assert!(holds, "{compare:?}");
            }
            self.1 += 1;
            for op in &txn.then {
                match op {
                    Op::Put { key, value, .. } => {
                        let mod_revision = self.1;
                        let (key, value) = (key.clone(), value.clone());
                        let entry = KeyValue { key, value, version: 1, create_revision: 1, mod_revision, lease: None };
                        self.0.insert(entry.key.clone(), entry);
                    }
                    Op::Delete { key, .. } => drop(self.0.remove(key)),
                    _ => {}
                }
            }
        }

        pub fn put(&mut self, key: String, value: impl Into<bytes::Bytes>) {
            let mut txn = Txn::default();
            create(&mut txn, key, value);
            self.run(&txn);
        }

        pub fn children(&self, id: &str) -> Vec<Procedure> {
            let all = self.list(super::super::PROCEDURES, usize::MAX);
            let children = all.iter().filter_map(Procedure::of);
            children.filter(|child| child.record.parent.as_deref() == Some(id)).collect()
        }

        /// All that is in the catalog.
        fn catalog(&self) -> BTreeMap<String, bytes::Bytes> {
            let in_it = |key: &str| !key.starts_with(super::super::PROCEDURES);
            self.0.iter().filter(|(key, _)| in_it(key)).map(|(key, entry)| (key.clone(), entry.value.clone())).collect()
        }
    }

    const TABLES: usize = 250;

    /// A schema with 250 tables and a view, beside another one whose name begins with its.
    fn full() -> (Map, Namespace) {
        let mut map = Map::default();
        let namespace: Namespace = "a".parse().unwrap();
        for name in ["a", "ab"] {
            map.put(name.parse::<Namespace>().unwrap().key(), r#"{"properties":{"x":"y"}}"#);
        }
        let pointer = |n: usize| TablePointer {
            uuid: Uuid::from_u128(n as u128 + 1),
            metadata_location: format!("file:///t{n}/0.json"),
            previous_location: None,
        };
        for n in 0..TABLES {
            let ident = TableIdent::new(namespace.clone(), format!("t{n}")).unwrap();
            map.put(ident.key(), encode(&pointer(n), "t").unwrap());
            map.put(named_key(pointer(n).uuid), ident.key());
        }
        let other = TableIdent::new("ab".parse().unwrap(), "t").unwrap();
        map.put(other.key(), encode(&pointer(TABLES), "t").unwrap());
        let view = TableIdent::new(namespace.clone(), "v").unwrap();
        map.put(view.view_key(), encode(&pointer(TABLES + 1), "v").unwrap());
        (map, namespace)
    }

    fn dropping(namespace: &Namespace, purge: bool) -> (String, NamespaceDrop) {
        let (id, record) = of_namespace(namespace, 7, purge, 0);
        super::super::validate_id(&id).unwrap();
        assert_eq!(record.scopes, ["/catalog/a"]);
        (id, record.data().unwrap())
    }

    /// Drops until something else comes.
    fn dropped(map: &mut Map, id: &str, mut now: NamespaceDrop) -> (NamespaceDrop, Comes) {
        loop {
            let planned = now.drop_some(id, map, 1).unwrap();
            assert_eq!(planned.releases, planned.comes != Comes::Step(DROP));
            map.run(&planned.txn);
            now = planned.now;
            if planned.comes != Comes::Step(DROP) {
                return (now, planned.comes);
            }
        }
    }

    #[test]
    fn all_of_it_goes_and_none_else() {
        let (mut map, namespace) = full();
        let (id, now) = dropping(&namespace, false);
        let (now, comes) = dropped(&mut map, &id, now);
        assert_eq!((now.dropped, now.purges, comes), (TABLES as u64 + 1, 0, Comes::End));
        assert!(!now.can_be_undone(), "nobody remembers the tables");
        let left: Vec<String> = map.0.keys().cloned().collect();
        let other = "ab".parse::<Namespace>().unwrap();
        assert_eq!(left, [other.key(), TableIdent::new(other, "t").unwrap().key()]);
        assert!(now.drop_some(&id, &map, 1).unwrap_err().contains("is not there"));
    }

    #[test]
    fn what_is_purged_with_it_is_its_child_and_comes_back() {
        let (mut map, namespace) = full();
        let before = map.catalog();
        let (id, now) = dropping(&namespace, true);
        let (mut now, comes) = dropped(&mut map, &id, now);
        assert_eq!((now.purges, comes), (TABLES as u64, Comes::Step(PURGES)));
        assert!(now.can_be_undone());
        assert_eq!(map.children(&id).len(), TABLES);
        loop {
            let planned = now.restore_some(&id, &map, &map.children(&id), 2).unwrap();
            map.run(&planned.txn);
            now = planned.now;
            if planned.comes == Comes::Undone {
                break;
            }
        }
        assert_eq!((now.restored, map.catalog()), (TABLES as u64 + 1, before));
        assert!(map.children(&id).iter().all(|child| child.record.state == State::Cancelled));
    }

    #[test]
    fn what_is_anothers_by_now_or_is_being_deleted_stays_dropped() {
        let (mut map, namespace) = full();
        let (id, now) = dropping(&namespace, true);
        let (now, _) = dropped(&mut map, &id, now);
        map.put(namespace.key(), "{}");
        map.put(TableIdent::new(namespace.clone(), "t1").unwrap().key(), "another's");
        let mut children = map.children(&id);
        children.retain(|child| ["a.t1", "a.t2", "a.t3"].contains(&child.record.subject.as_str()));
        for child in &mut children {
            if child.record.subject == "a.t2" {
                child.record.step = super::super::purge::DELETE.to_owned();
            }
        }
        let planned = now.restore_some(&id, &map, &children, 2).unwrap();
        map.run(&planned.txn);
        assert_eq!(planned.now.restored, 2, "t3, and the view");
        assert_eq!(map.get(&namespace.key()).unwrap().value, "{}");
        let again = planned.now.restore_some(&id, &map, &children[..2], 2).unwrap();
        assert_eq!((again.comes, again.txn), (Comes::Undone, Txn::default()));
    }

    #[test]
    fn one_with_others_nested_in_it_stays() {
        let (mut map, namespace) = full();
        map.put("a.b".parse::<Namespace>().unwrap().key(), "{}");
        let (id, now) = dropping(&namespace, false);
        assert!(now.drop_some(&id, &map, 1).unwrap_err().contains("nested"));
    }
}
