//! Whose the query nodes of a file are. A wrong address in it must hurt nobody: nothing is done to a node of which it is not known that it
//! is of the cluster that was named.
//!
//! A node says it by SQL: `system.nodes` lists the processes that the leader of its cluster knows, and some of these are in the registry of
//! the cluster that was named (`/lake/node/`). A process's name is drawn by chance and never used again: two clusters have none in common.
//!
//! ```text
//!   before a run      every node must say that it is of that cluster. One that is of another, or does not say, is refused by name, and
//!                     nothing was done at all. That they were of it is noted in the cluster: /kv/chaos/query-nodes/ID, the address
//!   in its end        all are mended: they were looked at
//!   lake chaos heal   peers go first: only where all of them serve, and are of that cluster, query nodes are looked at. Then, of each:
//!     says that it is of that cluster                                   it is mended
//!     says that it is of another, or refuses to be asked (a secret)     it is left alone, and named
//!     says nothing, as what faults do has it (down, standing still, cut off)
//!       and a run has noted that address, or the registry has it        it is mended: it was that cluster's, and is nobody else's by now
//!       and neither                                                     it is left alone, and named
//! ```
//! What is mended is harmless where there is nothing to mend. Nothing is asked of a node that changes anything, a schema to be dropped for
//! one, before it has said that it is of that cluster.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::nodes::{NODES, Record};
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{KeyValue, Op};

use crate::sql::{self, Answer, Failure, Front, Value, What};
use crate::workload::PREFIX;
use crate::workload::access::Roster;
use crate::{Error, Result, probe};

/// What a node that reaches the leader of its cluster has an answer to, and no other.
pub(super) const WHO_IS_THERE: &str = "SELECT process FROM system.nodes";
/// How long one question may take.
pub(super) const ASK_WITHIN: Duration = Duration::from_secs(3);
/// How long a query node may take until it says whose it is: a new leader hears nodes one after the other.
pub(super) const KNOWN_WITHIN: Duration = Duration::from_secs(20);
/// Under it a run notes which query nodes were of the cluster when it began.
const NOTED: &str = "query-nodes/";

/// Whose a query node is, as far as it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Said {
    Ours,
    /// It is not, and how that shows.
    Others(String),
    /// It does not say, and why.
    Nothing(String),
}

/// Asks query nodes, and the cluster that was named.
pub(super) struct Whose<'a> {
    pub front: Option<&'a Arc<dyn Front>>,
    pub store: &'a RemoteStore,
}

/// What the cluster knows of query nodes.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Registered now, or before what is registered under the same name now.
    registered: Vec<Record>,
    /// Numbers and addresses that a run has noted.
    noted: Vec<(u64, String)>,
}

impl Known {
    fn of(registry: &[KeyValue], notes: &[KeyValue]) -> Self {
        let note = |entry: &KeyValue| {
            let id = entry.key.rsplit('/').next()?.parse().ok()?;
            Some((id, String::from_utf8_lossy(&entry.value).into_owned()))
        };
        Self {
            registered: registry.iter().filter_map(Record::of).collect(),
            noted: notes.iter().filter_map(note).collect(),
        }
    }

    /// Whose a node is that knows these processes.
    fn judge(&self, processes: &[String]) -> Said {
        let is_ours = |process: &String| {
            self.registered.iter().any(|node| node.process == *process || node.superseded.contains(process))
        };
        match processes {
            [] => Said::Nothing("it knows of no nodes yet".to_owned()),
            processes if processes.iter().any(is_ours) => Said::Ours,
            _ => Said::Others("it is of another cluster: the nodes that it knows are not this one's".to_owned()),
        }
    }

    /// Whether a node that says nothing was the cluster's.
    fn was_there(&self, id: u64, address: &str) -> bool {
        self.noted.iter().any(|(noted, at)| *noted == id && at == address)
            || self.registered.iter().any(|node| node.flight_address == address)
    }

    /// Whether a node may be mended.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn may_be_mended(&self, id: u64, address: &str, said: Said) -> Result<(), String> {
        match said {
            Said::Ours => Ok(()),
            Said::Nothing(_) if self.was_there(id, address) => Ok(()),
            Said::Others(why) => Err(why),
            Said::Nothing(why) => {
                Err(format!("it does not say whose it is ({why}), and the cluster knows of no node at that address"))
            }
        }
    }
}

impl Whose<'_> {
    /// Looks whether all of these are of the cluster.
    ///
    /// # Errors
    /// Some are not, or do not say so in time: they are named, and nothing was done.
    pub(super) async fn all_are_ours(&self, nodes: &Roster) -> Result<()> {
        let asking = nodes.peers().into_iter().map(|(id, address)| async move {
            match self.said_in_time(&address).await {
                Said::Ours => None,
                Said::Others(why) => Some(format!("query node {id} at {address} is refused: {why}")),
                Said::Nothing(why) => {
                    Some(format!("query node {id} at {address} is refused, it does not say whose it is: {why}"))
                }
            }
        });
        let refused: Vec<String> = futures::future::join_all(asking).await.into_iter().flatten().collect();
        match refused.is_empty() {
            true => Ok(()),
            false => Err(Error::Founding(format!("{}: nothing was done", refused.join("; ")))),
        }
    }

    /// What a node says, as soon as it says anything.
    pub(super) async fn said_in_time(&self, address: &str) -> Said {
        if self.front.is_none() {
            return self.said(address).await;
        }
        let asked = probe::until("it to say whose it is", KNOWN_WITHIN, || async {
            match self.said(address).await {
                Said::Nothing(why) => Err(why),
                said => Ok(said),
            }
        });
        asked.await.unwrap_or_else(|e| Said::Nothing(e.to_string()))
    }

    /// What a node says now.
    pub(super) async fn said(&self, address: &str) -> Said {
        let processes = match self.processes(address).await {
            Ok(processes) => processes,
            Err(e) if e.what == What::Refused => return Said::Others(format!("it refuses to be asked: {e}")),
            Err(e) => return Said::Nothing(e.to_string()),
        };
        // After the node was asked: whatever its leader knew then is registered by now, or was superseded.
        match self.known().await {
            Ok(known) => known.judge(&processes),
            Err(e) => Said::Nothing(e.to_string()),
        }
    }

    async fn processes(&self, address: &str) -> Result<Vec<String>, Failure> {
        let front = self.front.ok_or_else(|| {
            Failure::unreached("this lake was built without SQL, by which query nodes are asked: use one that has it")
        })?;
        let Answer { rows, .. } = sql::ask(front.as_ref(), address, WHO_IS_THERE, ASK_WITHIN).await?;
        let text = |value: Value| if let Value::Text(process) = value { Some(process) } else { None };
        Ok(rows.into_iter().flatten().filter_map(text).collect())
    }

    /// What the cluster knows of query nodes.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) async fn known(&self) -> Result<Known> {
        let list = async |prefix: &str| {
            let by = Instant::now() + ASK_WITHIN;
            let listed = self.store.list_all(prefix, ReadOptions::default(), by).await;
            Ok::<_, Error>(listed.map_err(|e| Error::Founding(format!("listing {prefix}: {e}")))?.value)
        };
        Ok(Known::of(&list(NODES).await?, &list(&format!("{PREFIX}{NOTED}")).await?))
    }
}

/// Notes that these are of the cluster.
pub(super) fn notes(nodes: &Roster) -> Vec<Op> {
    let note = |(id, address): (u64, String)| Op::put(format!("{PREFIX}{NOTED}{id}"), address);
    nodes.peers().into_iter().map(note).collect()
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use lake_client::nodes;
    use lake_client::remote::RemoteConfig;
    use lake_proto::v1;

    use super::*;
    use crate::sql::Session;

    const AT: &str = "10.0.0.1:9393";

    fn entry(key: String, value: &[u8]) -> KeyValue {
        KeyValue { key, value: value.to_vec().into(), version: 1, create_revision: 1, mod_revision: 1, lease: None }
    }

    /// A cluster with one node, at [`AT`], whose process is `now` and was `before`, and what a run has noted.
    fn known(notes: &[(u64, &str)]) -> Known {
        let info = v1::NodeInfo { flight_address: AT.to_owned(), ..v1::NodeInfo::default() };
        let before = Record::next("before", 1, &info, None);
        let now = Record::next("now", 2, &info, Some((before, 1)));
        let registry = [entry(nodes::key("n"), &now.to_bytes()), entry(nodes::key("odd"), b"up")];
        let note = |(id, at): &(u64, &str)| entry(format!("{PREFIX}{NOTED}{id}"), at.as_bytes());
        Known::of(&registry, &notes.iter().map(note).collect::<Vec<_>>())
    }

    #[test]
    fn a_node_is_of_the_cluster_whose_processes_it_knows() {
        let judge =
            |processes: &[&str]| known(&[]).judge(&processes.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(judge(&["other", "now"]), Said::Ours);
        assert_eq!(judge(&["before"]), Said::Ours, "its cluster knew that one a moment ago");
        assert!(matches!(judge(&["other"]), Said::Others(why) if why.contains("another cluster")));
        assert!(matches!(judge(&[]), Said::Nothing(_)));
    }

    #[test]
    fn a_node_that_says_nothing_is_mended_only_where_the_cluster_knows_it() {
        let may = |id, at, said| known(&[(2, "db2:9393")]).may_be_mended(id, at, said);
        let nothing = || Said::Nothing("no answer".to_owned());
        assert_eq!(may(7, "10.0.0.9:9393", Said::Ours), Ok(()));
        assert_eq!(may(1, AT, nothing()), Ok(()), "it is registered");
        assert_eq!(may(2, "db2:9393", nothing()), Ok(()), "a run has noted it");
        for (id, at) in [(3, "db2:9393"), (2, "db3:9393"), (1, "10.0.0.2:9393")] {
            assert!(may(id, at, nothing()).unwrap_err().contains("knows of no node at that address"), "{id} {at}");
        }
        // Whatever was there before.
        assert!(may(1, AT, Said::Others("another".to_owned())).is_err());
    }

    #[derive(Debug)]
    struct Denying(What);

    #[async_trait]
    impl Front for Denying {
        async fn connect(&self, _: &str) -> Result<Box<dyn Session>, Failure> {
            Err(Failure { what: self.0, kind: "denied".to_owned(), message: "no".to_owned() })
        }
    }

    #[tokio::test]
    async fn who_refuses_to_be_asked_is_somebody_elses_and_who_cannot_be_asked_says_nothing() {
        let config = RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None };
        let store = RemoteStore::connect(config).unwrap();
        let said = async |front: Option<Arc<dyn Front>>| Whose { front: front.as_ref(), store: &store }.said(AT).await;
        assert!(matches!(said(Some(Arc::new(Denying(What::Refused)))).await, Said::Others(_)));
        assert!(matches!(said(Some(Arc::new(Denying(What::NotServed)))).await, Said::Nothing(_)));
        assert!(matches!(said(None).await, Said::Nothing(why) if why.contains("built without SQL")));
        let whose = Whose { front: None, store: &store };
        assert!(whose.all_are_ours(&Roster::default()).await.is_ok());
        let refused = whose.all_are_ours(&Roster::new(vec![(4, AT.to_owned())])).await.unwrap_err().to_string();
        assert!(refused.contains("query node 4 at 10.0.0.1:9393") && refused.contains("nothing was done"), "{refused}");
    }
}
