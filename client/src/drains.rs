//! Nodes that are drained: they go on serving, and are given no shard and no step of a procedure any more, until somebody has it
//! otherwise (docs/src/placement.md). An entry under [`DRAINS`] says so of one, and outlasts the node's processes.
//!
//! On any store; what comes of it is the leader's to do.

use std::time::Instant;

use lake_proto::kv::{Expected, Txn};

use crate::nodes::validate_node;
use crate::store::{Error, MetaStore, ReadOptions};

/// Under it lies one entry for each node that is drained.
pub const DRAINS: &str = "/lake/drain/";

/// Where the entry of a node is.
pub fn key(node: &str) -> String {
    format!("{DRAINS}{node}")
}

/// Has a node be drained, or not any more. It need not be registered. Says whether that was to be changed; if not, it was so.
///
/// # Errors
/// `Refused` for what cannot be the name of a node; the store's.
pub async fn set(store: &dyn MetaStore, node: &str, drained: bool, deadline: Instant) -> Result<bool, Error> {
    let doing = || format!("draining node {node}");
    validate_node(node).map_err(|e| Error::Refused { doing: doing(), message: e.to_string() })?;
    let key = key(node);
    let mut changes = false;
    loop {
        let there = store.get(&key, ReadOptions::default(), deadline).await?.value;
        let txn = match (there, drained) {
            (None, true) => Txn::cas(&key, Expected::Absent, "drained"),
            (Some(entry), false) => Txn::cas_delete(&key, entry.mod_revision),
            _ => return Ok(changes),
        };
        changes = true;
        // Whoever was faster has left something that is looked at again.
        store.commit(txn, deadline).await?;
    }
}

/// The nodes that are drained, in order of their names.
///
/// # Errors
/// The store's.
pub async fn list(store: &dyn MetaStore, deadline: Instant) -> Result<Vec<String>, Error> {
    let read = store.list_all(DRAINS, ReadOptions::default(), deadline).await?;
    Ok(read.value.iter().filter_map(|entry| entry.key.strip_prefix(DRAINS)).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::faulty::{FaultyStore, soon};

    #[tokio::test]
    async fn a_node_is_drained_until_it_is_not() {
        let store = FaultyStore::default();
        let mut before = false;
        for drained in [true, true, false, false, true] {
            store.lose_answers.store(1, Ordering::SeqCst);
            assert_eq!(set(&store, "n", drained, soon()).await.unwrap(), drained != before);
            before = drained;
            assert_eq!(list(&store, soon()).await.unwrap(), if drained { vec!["n"] } else { vec![] });
            store.lose_answers.store(0, Ordering::SeqCst);
        }
        assert!(matches!(set(&store, "a/b", true, soon()).await, Err(Error::Refused { .. })));
    }
}
