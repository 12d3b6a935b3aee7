//! The schemas that a run makes on a cluster that is there already. None of them may be there before, and all are dropped in the end, with
//! their tables; these tables' files are for the cluster to purge.
//!
//! The key [`MARK`] is there for as long as such schemas may be: without it one that is called so is somebody else's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::KeyValue;

use crate::sql::{self, Front};
use crate::workload::access::Roster;
use crate::{Error, Result, probe};

/// Among a run's keys: it goes once the schemas are dropped.
pub(super) const MARK: &str = "/kv/chaos/schemas";
/// The schemas of a cluster.
const SCHEMAS: &str = "/lake/catalog/";
/// Joins the levels of a schema in a key.
const LEVELS: char = '\u{1f}';
/// The name of the workloads' schema, and what the names of the others begin with.
const OWN: &str = "chaos";
const OWN_PREFIX: &str = "chaos_";
/// How long one question may take.
pub(super) const ASK_WITHIN: Duration = Duration::from_secs(20);
/// How long dropping all of them may take: scopes that clients held on them end with their leases.
pub(super) const DROPPED_WITHIN: Duration = Duration::from_secs(90);

/// A cluster's schemas.
pub(super) struct Schemas<'a> {
    pub front: &'a Arc<dyn Front>,
    pub nodes: &'a Roster,
    pub store: &'a RemoteStore,
}

impl Schemas<'_> {
    /// Looks whether a run may make its schemas.
    ///
    /// # Errors
    /// One is there: nothing was done.
    pub(super) async fn look(&self) -> Result<()> {
        match self.there().await?.first() {
            None => Ok(()),
            Some(schema) => Err(Error::Founding(format!(
                "there is a schema {schema}, and runs need the names {OWN} and {OWN_PREFIX}...: nothing was done"
            ))),
        }
    }

    /// Drops all of them.
    ///
    /// # Errors
    /// Some are left.
    pub(super) async fn drop_all(&self) -> Result<()> {
        probe::until("the run's schemas to be dropped", DROPPED_WITHIN, || async {
            let there = self.there().await.map_err(|e| e.to_string())?;
            // Those within others go first.
            for schema in there.iter().rev() {
                self.ask_any(&format!("DROP SCHEMA IF EXISTS \"{schema}\" CASCADE PURGE")).await?;
            }
            if there.is_empty() { Ok(()) } else { Err(format!("{} were there", there.join(", "))) }
        })
        .await
    }

    /// Those that there are, outer ones first.
    async fn there(&self) -> Result<Vec<String>> {
        Ok(self.list(SCHEMAS).await?.into_iter().filter_map(|entry| own(&entry.key)).collect())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<KeyValue>> {
        let listed = self.store.list_all(prefix, ReadOptions::default(), Instant::now() + ASK_WITHIN).await;
        Ok(listed.map_err(|e| Error::Founding(format!("listing {prefix}: {e}")))?.value)
    }

    /// Asks query nodes, one after the other, until one answers.
    async fn ask_any(&self, sql: &str) -> Result<(), String> {
        let mut last = "there is no query node".to_owned();
        for (_, address) in self.nodes.peers() {
            match self.ask(&address, sql).await {
                Ok(()) => return Ok(()),
                Err(why) => last = why,
            }
        }
        Err(last)
    }

    async fn ask(&self, address: &str, sql: &str) -> Result<(), String> {
        let asked = sql::ask(self.front.as_ref(), address, sql, ASK_WITHIN).await;
        asked.map(drop).map_err(|e| format!("{address}: {e}"))
    }
}

/// The name of the schema of a key, if runs make such.
fn own(key: &str) -> Option<String> {
    let levels = key.strip_prefix(SCHEMAS)?;
    let outer = levels.split(LEVELS).next()?;
    (outer == OWN || outer.starts_with(OWN_PREFIX)).then(|| levels.replace(LEVELS, "."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_schemas_with_the_names_that_runs_use_are_theirs() {
        let own = |name: &str| own(&format!("{SCHEMAS}{name}"));
        assert_eq!(own("chaos"), Some("chaos".to_owned()));
        assert_eq!(own("chaos_0\u{1f}in"), Some("chaos_0.in".to_owned()));
        for others in ["chaosreport", "default", "sales\u{1f}chaos", "chao"] {
            assert_eq!(own(others), None, "{others}");
        }
    }
}
