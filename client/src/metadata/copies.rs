//! Copies of what is small and asked for often: the namespaces, the nodes that are registered, and the routes of the shards. Each is
//! what the store held at one revision, and every change after it ([`Follower`]).
//!
//! A copy has a maximum ([`MAX_NAMESPACES`], [`MAX_NODES`], [`MAX_SHARDS`]): where there are more, there is none, and nothing of them is kept; they
//! are looked at again every [`TOO_MANY_PAUSE`]. Nor is there one while its watch is refused, which is tried again every [`REFUSED_PAUSE`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::watch::{Changes, Event};

use crate::catalog::{NAMESPACES, Namespace};
use crate::follow::{Follower, Told};
use crate::nodes::{MAX_NODES, NODES, Record};
use crate::shards::{MAX_SHARDS, ROUTES, Routes};
use crate::store::{Error, SharedStore};

/// Most namespaces that a process keeps a copy of.
pub const MAX_NAMESPACES: usize = 100_000;
/// The pause after a copy's watch was lost.
const FOLLOW_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a store that watches has refused to.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// The pause after there was too much for a copy.
const TOO_MANY_PAUSE: Duration = Duration::from_secs(60);

/// What a process keeps a copy of.
pub(super) trait Copied: Clone + Default + Send + Sync + 'static {
    /// Its keys begin so.
    const PREFIX: &'static str;
    /// Most entries.
    const MOST: usize;

    fn len(&self) -> usize;

    /// All of it, in the place of what there is.
    fn reset(&mut self, revision: Revision, entries: &[KeyValue]);

    /// One change. Cheap for one that leaves what is copied as it is.
    fn change(&mut self, event: Event);

    /// Every change up to this revision was told.
    fn progress(&mut self, revision: Revision);
}

/// Keeps a copy until it is dropped.
pub(super) async fn follow<C: Copied>(store: SharedStore, copy: Arc<ArcSwapOption<C>>) {
    follow_at_most(store, copy, C::MOST).await;
}

/// The same of at most so much.
pub(super) async fn follow_at_most<C: Copied>(store: SharedStore, copy: Arc<ArcSwapOption<C>>, most: usize) {
    let mut follower = Follower::new(store.clone(), C::PREFIX);
    let mut now = C::default();
    loop {
        match follower.next().await {
            Ok(told) => {
                match told {
                    Told::Reset(all) => now.reset(all.revision, &all.value),
                    Told::Changes(Changes { changes, progress }) => {
                        changes.into_iter().flat_map(|change| change.events).for_each(|event| now.change(event));
                        now.progress(progress);
                    }
                }
                if now.len() > most {
                    tracing::warn!(prefix = C::PREFIX, most, "there is more than this process keeps a copy of");
                    copy.store(None);
                    (now, follower) = (C::default(), Follower::new(store.clone(), C::PREFIX));
                    tokio::time::sleep(TOO_MANY_PAUSE).await;
                    continue;
                }
                copy.store(Some(Arc::new(now.clone())));
            }
            Err(Error::Refused { message, .. }) => {
                // Nobody tells of changes for now: a copy would grow old unnoticed.
                tracing::warn!(prefix = C::PREFIX, "no copy is kept while its watch is refused: {message}");
                copy.store(None);
                (now, follower) = (C::default(), Follower::new(store.clone(), C::PREFIX));
                tokio::time::sleep(REFUSED_PAUSE).await;
            }
            Err(error) => {
                tracing::debug!(%error, prefix = C::PREFIX, "a copy's watch was lost");
                tokio::time::sleep(FOLLOW_PAUSE).await;
            }
        }
    }
}

/// All namespaces, as they were at one revision.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Namespaces {
    pub revision: Revision,
    /// The same set for as long as none is created or dropped.
    pub names: Arc<BTreeSet<Namespace>>,
}

impl Copied for Namespaces {
    const PREFIX: &'static str = NAMESPACES;
    const MOST: usize = MAX_NAMESPACES;

    fn len(&self) -> usize {
        self.names.len()
    }

    fn reset(&mut self, revision: Revision, entries: &[KeyValue]) {
        self.revision = revision;
        // A key that is none of lake's names no namespace.
        self.names = Arc::new(entries.iter().filter_map(|entry| Namespace::from_key(&entry.key).ok()).collect());
    }

    fn change(&mut self, event: Event) {
        let Ok(namespace) = Namespace::from_key(&event.key) else { return };
        // Properties that change leave the set as it is.
        if event.entry.is_some() == self.names.contains(&namespace) {
            return;
        }
        let names = Arc::make_mut(&mut self.names);
        match event.entry {
            Some(_) => names.insert(namespace),
            None => names.remove(&namespace),
        };
    }

    fn progress(&mut self, revision: Revision) {
        self.revision = revision;
    }
}

/// The query nodes that are registered, as they were at one revision: what the map keeps of each. Whether one lives is its
/// leader's to say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nodes {
    pub revision: Revision,
    /// By their names; the same for as long as none of them changes.
    pub nodes: Arc<BTreeMap<String, Node>>,
}

/// A node that is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub record: Record,
    /// Of its process: the revision of its registration.
    pub epoch: Revision,
}

impl Node {
    /// What an entry says; `None`: nothing that a registry wrote.
    fn of(entry: &KeyValue) -> Option<Self> {
        let record = Record::of(entry)?;
        let epoch = record.epoch(entry.mod_revision);
        Some(Self { record, epoch })
    }
}

impl Copied for Nodes {
    const PREFIX: &'static str = NODES;
    const MOST: usize = MAX_NODES;

    fn len(&self) -> usize {
        self.nodes.len()
    }

    fn reset(&mut self, revision: Revision, entries: &[KeyValue]) {
        self.revision = revision;
        let node = |entry: &KeyValue| Some((entry.key.strip_prefix(NODES)?.to_owned(), Node::of(entry)?));
        self.nodes = Arc::new(entries.iter().filter_map(node).collect());
    }

    fn change(&mut self, event: Event) {
        let Some(name) = event.key.strip_prefix(NODES) else { return };
        match event.entry.as_ref().and_then(Node::of) {
            Some(node) if self.nodes.get(name) == Some(&node) => {}
            Some(node) => drop(Arc::make_mut(&mut self.nodes).insert(name.to_owned(), node)),
            None if self.nodes.contains_key(name) => drop(Arc::make_mut(&mut self.nodes).remove(name)),
            None => {}
        }
    }

    fn progress(&mut self, revision: Revision) {
        self.revision = revision;
    }
}

/// The routes of the shards, as they were at one revision.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shards {
    pub revision: Revision,
    /// The same for as long as none of them changes.
    pub routes: Arc<Routes>,
}

impl Copied for Shards {
    const PREFIX: &'static str = ROUTES;
    const MOST: usize = MAX_SHARDS as usize;

    fn len(&self) -> usize {
        self.routes.routes.len()
    }

    fn reset(&mut self, revision: Revision, entries: &[KeyValue]) {
        self.revision = revision;
        let mut routes = Routes::default();
        entries.iter().for_each(|entry| routes.learn(&entry.key, Some(entry)));
        self.routes = Arc::new(routes);
    }

    fn change(&mut self, event: Event) {
        Arc::make_mut(&mut self.routes).learn(&event.key, event.entry.as_ref());
    }

    fn progress(&mut self, revision: Revision) {
        self.revision = revision;
    }
}
