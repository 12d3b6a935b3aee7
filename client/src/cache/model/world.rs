//! What the cache is held to: the whole history, which answers of the cache it allows, and the store that answers when it is
//! told to.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_proto::kv::{KeyValue, Revision, Txn};
use lake_proto::watch::{Change, Changes, Event};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::super::{CacheConfig, Resolved};
use crate::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use crate::clock;
use crate::store::{Applied, Capabilities, ChangeStream, Committed, Error, Leader, MetaStore, Page, Read, ReadOptions};

pub(super) const TABLES: usize = 4;
pub(super) const CONFIG: CacheConfig = CacheConfig {
    max_tables: 100,
    refresh_after: Duration::from_millis(500),
    fresh_for: Duration::from_secs(1),
    absent_for: Duration::from_millis(200),
    keep_for: Duration::from_secs(3600),
    away_patience: Duration::from_secs(2),
    stale_limit: Duration::from_secs(5),
};

/// A change of one table; its revision is its place, from 1 on.
#[derive(Debug, Clone)]
pub(super) struct Past {
    pub(super) table: usize,
    pub(super) at: Instant,
    pub(super) pointer: Option<TablePointer>,
}

/// What the store is asked and has not answered.
pub(super) enum Asked {
    Read { keys: Vec<String>, read: Option<Read<Vec<KeyValue>>>, answer: oneshot::Sender<Answer<Read<Vec<KeyValue>>>> },
    Commit { table: usize, drop: bool, done: Option<Versioned<Option<TablePointer>>>, answer: CommitAnswer },
    Watch { from: Revision, answer: oneshot::Sender<Answer<ChangeStream>> },
}

pub(super) type Answer<T> = Result<T, Error>;
pub(super) type CommitAnswer = oneshot::Sender<Answer<Versioned<Option<TablePointer>>>>;

/// The answer of one call of the cache, and what was so when it began.
pub(super) struct Ended {
    pub(super) tables: Vec<usize>,
    pub(super) began: Instant,
    pub(super) ended: Instant,
    pub(super) min_revision: Revision,
    /// What had been waited for.
    pub(super) awaited: Revision,
    /// By table: what had been shown.
    pub(super) shown: [Revision; TABLES],
    /// By table: when it had last been doubted.
    pub(super) doubted: [Option<Instant>; TABLES],
    pub(super) outcome: Result<Vec<Resolved>, CatalogError>,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) history: Vec<Past>,
    pub(super) asked: Vec<Asked>,
    pub(super) watching: Option<(Revision, mpsc::UnboundedSender<Answer<Changes>>)>,
    pub(super) ended: Vec<Ended>,
    /// By table: the revision of the latest state that was shown or committed here.
    pub(super) shown: [Revision; TABLES],
    /// By table: when it was last doubted.
    pub(super) doubted: [Option<Instant>; TABLES],
    /// The latest revision up to which somebody has waited for changes, and not in vain.
    pub(super) awaited: Revision,
    pub(super) calls: usize,
}

impl World {
    pub(super) fn revision(&self) -> Revision {
        self.history.len() as Revision
    }

    /// The table's state at a revision: since when it has been so, and what it is.
    pub(super) fn state(&self, table: usize, revision: Revision) -> (Revision, Option<&TablePointer>) {
        let past = self.history[..revision as usize].iter().enumerate().rev().find(|(_, past)| past.table == table);
        past.map_or((0, None), |(at, past)| (at as Revision + 1, past.pointer.as_ref()))
    }

    /// When the state that has been so since this revision ended.
    fn next(&self, table: usize, since: Revision) -> Option<(Revision, Instant)> {
        let later = self.history.iter().enumerate().skip(since as usize).find(|(_, past)| past.table == table);
        later.map(|(at, past)| (at as Revision + 1, past.at))
    }

    fn entry(&self, table: usize, revision: Revision) -> Option<KeyValue> {
        let (since, pointer) = self.state(table, revision);
        let value = serde_json::to_vec(pointer?).unwrap().into();
        let key = ident(table).key();
        Some(KeyValue { key, value, version: 1, create_revision: since, mod_revision: since, lease: None })
    }

    pub(super) fn change(&mut self, table: usize, drop: bool) -> Versioned<Option<TablePointer>> {
        let revision = self.revision() + 1;
        let there = self.state(table, revision - 1).1.is_some();
        let pointer = (!drop || !there).then(|| TablePointer {
            uuid: Uuid::from_u128(table as u128),
            metadata_location: revision.to_string(),
            previous_location: None,
        });
        self.history.push(Past { table, at: clock::now(), pointer: pointer.clone() });
        Versioned { value: pointer, mod_revision: revision, valid_through: revision }
    }

    pub(super) fn read(&self, keys: &[String], revision: Revision) -> Read<Vec<KeyValue>> {
        let tables = (0..TABLES).filter(|table| keys.contains(&ident(*table).key()));
        Read { revision, value: tables.filter_map(|table| self.entry(table, revision)).collect() }
    }

    pub(super) fn changes(&self, told: Revision, upto: Revision) -> Changes {
        let change = |revision: Revision| {
            let past = &self.history[revision as usize - 1];
            let event = Event { key: ident(past.table).key(), entry: self.entry(past.table, revision) };
            Change { revision, events: vec![event] }
        };
        Changes { changes: (told + 1..=upto).map(change).collect(), progress: upto }
    }

    /// What is wrong with an answer.
    pub(super) fn judge(&self, call: &Ended, lagged: bool) -> Result<(), String> {
        let resolved = match &call.outcome {
            Ok(resolved) => resolved,
            Err(CatalogError::Store(Error::Unavailable { .. }) | CatalogError::TooOld { .. }) => return Ok(()),
            Err(CatalogError::Behind { .. }) if lagged => return Ok(()),
            Err(error) => return Err(format!("an error that nothing explains: {error}")),
        };
        let (mut latest_begin, mut first_end) = (0, Revision::MAX);
        for (&table, resolved) in call.tables.iter().zip(resolved) {
            let wrong = |what: String| Err(format!("table {table}: {what}; {resolved:?}"));
            if resolved.valid_through > self.revision() {
                return wrong(format!("valid through a revision after {}, the last", self.revision()));
            }
            let (since, pointer) = self.state(table, resolved.valid_through);
            let shown = resolved.pointer();
            if shown.map(|pointer| &pointer.value) != pointer || shown.is_some_and(|p| p.mod_revision != since) {
                return wrong(format!(
                    "at the revision it is said to be valid through it is {pointer:?} since {since}"
                ));
            }
            if since < call.shown[table] {
                return wrong(format!(
                    "backwards: since {since}, and {} had been shown or committed",
                    call.shown[table]
                ));
            }
            if resolved.valid_through < call.min_revision {
                return wrong(format!("not of revision {}", call.min_revision));
            }
            if resolved.valid_through < call.awaited {
                return wrong(format!("not of revision {}, which had been waited for", call.awaited));
            }
            let end = self.next(table, since);
            latest_begin = latest_begin.max(since);
            first_end = first_end.min(end.map_or(Revision::MAX, |(revision, _)| revision));
            let Some((_, until)) = end.filter(|_| !lagged) else { continue };
            if until < call.ended - resolved.age {
                return wrong(format!("said to have been current {:?} ago, and was not", resolved.age));
            }
            if !resolved.metasrv_away && call.doubted[table].is_some_and(|doubted| until < doubted) {
                return wrong(format!("ended {:?} before the call, and was doubted since", call.began - until));
            }
            let bound = match (resolved.metasrv_away, shown) {
                (true, _) => CONFIG.stale_limit,
                (false, Some(_)) => CONFIG.fresh_for,
                (false, None) => CONFIG.absent_for,
            };
            if until + bound < call.began {
                return wrong(format!("ended {:?} before the call, the bound is {bound:?}", call.began - until));
            }
        }
        let away = resolved.iter().any(|resolved| resolved.metasrv_away);
        if !away && latest_begin >= first_end {
            return Err(format!("tables {:?} are not of one moment: {resolved:?}", call.tables));
        }
        Ok(())
    }
}

#[derive(Clone)]
pub(super) struct Script(pub(super) Arc<Mutex<World>>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

pub(super) fn unavailable() -> Error {
    Error::Unavailable {
        doing: "test".into(),
        endpoints: vec![],
        attempts: 1,
        elapsed: Duration::ZERO,
        leader: Leader::Without,
        last: "the schedule".into(),
        applied: Applied::Unknown,
    }
}

impl Script {
    pub(super) async fn ask<T>(&self, asked: impl FnOnce(oneshot::Sender<Answer<T>>) -> Asked) -> Answer<T> {
        let (answer, answered) = oneshot::channel();
        self.0.lock().unwrap().asked.push(asked(answer));
        answered.await.unwrap_or_else(|_| Err(unavailable()))
    }
}

#[async_trait]
impl MetaStore for Script {
    fn capabilities(&self) -> Capabilities {
        Capabilities { snapshots: false, leases: false, ..Capabilities::CLUSTER }
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Answer<Read<Option<KeyValue>>> {
        let mut read = self.batch_get(&[key.to_owned()], options, by).await?;
        Ok(Read { revision: read.revision, value: read.value.pop() })
    }

    async fn batch_get(&self, keys: &[String], _: ReadOptions, _: Instant) -> Answer<Read<Vec<KeyValue>>> {
        self.ask(|answer| Asked::Read { keys: keys.to_vec(), read: None, answer }).await
    }

    async fn list(&self, _: &str, _: Option<&str>, _: u32, _: ReadOptions, _: Instant) -> Answer<Read<Page>> {
        Err(Error::cannot("listing".into(), "the cache lists nothing"))
    }

    async fn commit(&self, _: Txn, _: Instant) -> Answer<Committed> {
        Err(Error::cannot("committing".into(), "the cache commits nothing"))
    }

    async fn watch(&self, _: &str, from: Revision, _: Instant) -> Answer<ChangeStream> {
        self.ask(|answer| Asked::Watch { from, answer }).await
    }
}

pub(super) fn ident(table: usize) -> TableIdent {
    TableIdent::new("n".parse().unwrap(), format!("t{table}")).unwrap()
}
