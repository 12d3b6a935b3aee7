//! The kind `purge_warehouse`: a warehouse goes with all that is in it, and the files of its tables.
//!
//! | step     | who    | what                                                                                              |
//! |----------|--------|---------------------------------------------------------------------------------------------------|
//! | `drop`   | leader | drops up to [`AT_ONCE`] tables and views of a namespace in one transaction, in which each table's purge is submitted as a child; with nothing in it a nested namespace goes, the deepest first |
//! | `purges` | leader | waits until its children have ended, and so have all purges of what was dropped before: workers reach the files as the warehouse says |
//! | `remove` | leader | the warehouse goes, and its namespace                                                               |
//!
//! What a step does to the map and the record that says so are one transaction, so that each is done once. The scope on the warehouse's
//! namespace is held to the end, so nothing comes into it; commits to its tables go on until they are gone. What was dropped is not had back.
//!
//! Here are pure functions of what the map holds ([`Entries`]).

use std::collections::BTreeMap;

use lake_proto::kv::{Compare, Op, Revision, Txn};
use serde::{Deserialize, Serialize};

use super::drop_namespace::{AT_ONCE, Comes, DROP, Dropped, Entries, PURGES, Planned, delete, drop_table};
use super::purge::Purge;
use super::{Record, kept};
use crate::catalog::Namespace;
use crate::warehouse::{self, Profile};

/// The kind's name.
pub const PURGE_WAREHOUSE: &str = "purge_warehouse";
/// The last step; those before are [`DROP`] and [`PURGES`].
pub const REMOVE: &str = "remove";

/// What the procedure keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarehousePurge {
    pub warehouse: String,
    /// Tables, views and nested namespaces that were dropped.
    #[serde(default)]
    pub dropped: u64,
    /// Purges that were submitted.
    #[serde(default)]
    pub purges: u64,
    /// Tables of which nobody knows the files.
    #[serde(default)]
    pub lost: u64,
}

/// The procedure that purges a warehouse, where what is kept of all is as it was read at `revision`: its id, and its record.
///
/// # Errors
/// It is the name of none.
pub fn of_warehouse(
    name: &str,
    revision: Revision,
    now_unix_ms: u64,
) -> Result<(String, Record), crate::catalog::CatalogError> {
    let namespace = Namespace::new([name])?;
    let purge = WarehousePurge { warehouse: name.to_owned(), dropped: 0, purges: 0, lost: 0 };
    let record = Record::new(PURGE_WAREHOUSE, name, DROP, kept(&purge), now_unix_ms);
    // The revision is that of all warehouses, so that two of them may be purged at one revision and in one millisecond.
    let whose = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let id = format!("purge-warehouse-{revision}-{now_unix_ms}-{whose:016x}");
    Ok((id, Record { scopes: vec![namespace.scope_path()], ..record }))
}

impl WarehousePurge {
    fn namespace(&self) -> Result<Namespace, String> {
        Namespace::new([&self.warehouse]).map_err(|e| e.to_string())
    }

    /// How the files of the warehouse are reached, if it is there and can be read.
    pub fn profile(&self, map: &dyn Entries) -> Option<Profile> {
        let profiles = serde_json::from_slice::<BTreeMap<String, Profile>>(&map.get(warehouse::KEY)?.value);
        profiles.ok()?.remove(&self.warehouse)
    }

    /// Whether the files of a table that is purged are reached as the warehouse says, whose profile is this one: the table was in it when it
    /// was dropped, or its files are.
    pub fn reaches(&self, table: &Purge, profile: Option<&Profile>) -> bool {
        let was_in_it = match table.namespace.first() {
            Some(first) => *first == self.warehouse,
            // Of before levels were kept.
            None => table.table.split('.').next() == Some(self.warehouse.as_str()),
        };
        was_in_it || profile.is_some_and(|profile| profile.holds(&table.metadata_location))
    }

    /// The next part of dropping what is in the warehouse; its own namespace stays until the end.
    ///
    /// # Errors
    /// What is there makes no sense.
    pub fn drop_some(&self, id: &str, map: &dyn Entries, now_unix_ms: u64) -> Result<Planned<Self>, String> {
        let own = self.namespace()?;
        let mut deepest = own.clone();
        while let Some(nested) = map.list(&deepest.nested_prefix(), 1).pop() {
            deepest = Namespace::from_key(&nested.key).map_err(|e| e.to_string())?;
        }
        let tables = map.list(&deepest.table_prefix(), AT_ONCE);
        let views = map.list(&deepest.view_prefix(), AT_ONCE - tables.len());
        let (mut now, mut txn) = (self.clone(), Txn::default());
        if tables.is_empty() && views.is_empty() {
            if deepest == own {
                return Ok(Planned { txn, releases: false, now, comes: Comes::Step(PURGES) });
            }
            txn.when = deepest.contents().into_iter().map(Compare::prefix_empty).collect();
            // It was listed.
            if let Some(there) = map.get(&deepest.key()) {
                delete(&mut txn, &there);
            }
            now.dropped += 1;
            return Ok(Planned { txn, releases: false, now, comes: Comes::Step(DROP) });
        }
        for view in &views {
            delete(&mut txn, view);
            now.dropped += 1;
        }
        for table in &tables {
            now.dropped += 1;
            match drop_table(&mut txn, map, table, Some(id), now_unix_ms) {
                Dropped::Purged => now.purges += 1,
                Dropped::Kept => {}
                Dropped::Unreadable => now.lost += 1,
            }
        }
        Ok(Planned { txn, releases: false, now, comes: Comes::Step(DROP) })
    }

    /// Removes the warehouse, with nothing in it any more.
    ///
    /// # Errors
    /// What is there makes no sense.
    pub fn remove(&self, map: &dyn Entries) -> Result<Planned<Self>, String> {
        let own = self.namespace()?;
        let mut txn = Txn::default();
        if own.contents().iter().any(|prefix| !map.list(prefix, 1).is_empty()) {
            return Ok(Planned { txn, releases: false, now: self.clone(), comes: Comes::Step(DROP) });
        }
        txn.when = own.contents().into_iter().map(Compare::prefix_empty).collect();
        if let Some(there) = map.get(&own.key()) {
            delete(&mut txn, &there);
        }
        if let Some(there) = map.get(warehouse::KEY) {
            let profiles: Result<BTreeMap<String, Profile>, _> = serde_json::from_slice(&there.value);
            let mut profiles = profiles.map_err(|e| format!("the warehouses cannot be read: {e}"))?;
            if profiles.remove(&self.warehouse).is_some() {
                let left = serde_json::to_vec(&profiles).map_err(|e| e.to_string())?;
                txn.when.push(Compare::mod_revision(warehouse::KEY, there.mod_revision));
                txn.then.push(Op::put(warehouse::KEY, left));
            }
        }
        Ok(Planned { txn, releases: true, now: self.clone(), comes: Comes::End })
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::drop_namespace::tests::Map;
    use super::*;
    use crate::catalog::{TableIdent, TablePointer, encode};

    #[test]
    fn all_of_a_warehouse_goes_and_none_else() {
        let mut map = Map::default();
        let profile = |root: &str| Profile::new(root, None).unwrap();
        let profiles = BTreeMap::from([("w", profile("file:///w")), ("x", profile("file:///x"))]);
        map.put(warehouse::KEY.to_owned(), encode(&profiles, "w").unwrap());
        let mut uuid = 0;
        for name in ["w", "w.a", "w.a.b", "w.c", "wa", "x"] {
            let namespace: Namespace = name.parse().unwrap();
            map.put(namespace.key(), "{}");
            for n in 0..=AT_ONCE {
                uuid += 1;
                let ident = TableIdent::new(namespace.clone(), format!("t{n}")).unwrap();
                let uuid = Uuid::from_u128(uuid);
                let metadata_location = format!("file:///{ident}");
                map.put(
                    ident.key(),
                    encode(&TablePointer { uuid, metadata_location, previous_location: None }, "t").unwrap(),
                );
            }
            let view = TableIdent::new(namespace, "v").unwrap();
            map.put(view.view_key(), "a view");
        }
        let (id, record) = of_warehouse("w", 1, 0).unwrap();
        super::super::validate_id(&id).unwrap();
        assert!(id.starts_with(super::super::purge::IDS), "the purges of tables are not looked for under another name");
        assert_eq!((record.scopes.as_slice(), record.step.as_str()), (["/catalog/w".to_owned()].as_slice(), DROP));
        let mut now: WarehousePurge = record.data().unwrap();
        let early = now.remove(&map).unwrap();
        assert_eq!((early.comes, early.txn), (Comes::Step(DROP), Txn::default()), "something is in it");
        loop {
            let planned = now.drop_some(&id, &map, 1).unwrap();
            map.run(&planned.txn);
            now = planned.now;
            if planned.comes == Comes::Step(PURGES) {
                break;
            }
        }
        let tables = 4 * (AT_ONCE as u64 + 1);
        assert_eq!((now.dropped, now.purges, now.lost), (tables + 4 + 3, tables, 0));
        assert_eq!(map.children(&id).len() as u64, tables);
        let own: Namespace = "w".parse().unwrap();
        assert!(map.get(&own.key()).is_some(), "its files are reached as it says");
        // Nor does it go before the purges of what was dropped earlier, or has its files there.
        let profile = now.profile(&map);
        let reaches = |ident: &str, metadata_location: &str| {
            let (namespace, name) = ident.rsplit_once('.').unwrap();
            let ident = TableIdent::new(namespace.parse().unwrap(), name).unwrap();
            let pointer = TablePointer {
                uuid: Uuid::nil(),
                metadata_location: metadata_location.into(),
                previous_location: None,
            };
            let purge: Purge = super::super::purge::of_drop(&ident, &pointer, 1, 0).1.data().unwrap();
            let unnamed = Purge { namespace: Vec::new(), ..purge.clone() };
            let both = [&purge, &unnamed].map(|purge| now.reaches(purge, profile.as_ref()));
            assert_eq!(both[0], both[1], "{ident}");
            both[0]
        };
        assert!(reaches("w.t", "file:///elsewhere/1") && reaches("w.a.t", "file:///elsewhere/1"));
        assert!(reaches("x.t", "file:///w/1") && !reaches("x.t", "file:///wa/1") && !reaches("wa.t", "file:///x/1"));
        let planned = now.remove(&map).unwrap();
        assert!(planned.releases && planned.comes == Comes::End);
        map.run(&planned.txn);
        let left: Vec<&str> = map.0.keys().map(String::as_str).filter(|key| key.contains("/w")).collect();
        assert_eq!(left.iter().filter(|key| **key != warehouse::KEY && !key.contains("/wa")).count(), 0, "{left:?}");
        let profiles: BTreeMap<String, Profile> =
            serde_json::from_slice(&map.get(warehouse::KEY).unwrap().value).unwrap();
        assert_eq!(profiles.keys().collect::<Vec<_>>(), ["x"]);
        for other in ["wa", "x"] {
            let other: Namespace = other.parse().unwrap();
            assert_eq!(map.list(&other.table_prefix(), usize::MAX).len(), AT_ONCE + 1);
        }
    }
}
