//! Workers that do things in name only, and what tests ask of procedures.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use lake_client::catalog::{TableIdent, TablePointer};
use lake_client::procedures::calls::{self, Submitted};
use lake_client::procedures::purge::{Answer, CHECK, DELETE, PURGE_TABLE, Purge, Task, of_drop};
use lake_client::procedures::upkeep::{self, RUN, TABLE_UPKEEP, What};
use lake_client::procedures::{Procedure, Record};
use lake_client::remote::RemoteStore;
use lake_client::remote::node::Node;
use lake_client::shards::{LEAVE_SHARD, Moving, WARM_SHARD};
use lake_proto::v1;
use tokio::sync::{Notify, Semaphore};

use super::{PATIENCE, eventually};

/// What is purged has so many files, of which a part deletes one.
pub const FILES: u64 = 12;

pub fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A worker that deletes nothing, and says that it did. What it does with a table its name says.
#[derive(Debug)]
pub struct Worker {
    /// Parts that may be done of those that wait for it.
    pub may: Semaphore,
    /// What was deleted: of which table, and the how manyth file.
    deleted: Mutex<BTreeSet<(String, u64)>>,
    /// The shards that it was told that it is about to be given.
    pub warmed: Mutex<BTreeSet<u32>>,
    pub dying: Dying,
}

/// Where a worker dies.
#[allow(dead_code, reason = "it is the unit tests that use it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// With an instruction of this step in hand.
    pub step: &'static str,
    /// Once it has done what it was told.
    pub afterwards: bool,
}

/// That a worker is to die, and that it did.
#[derive(Debug, Default)]
pub struct Dying {
    /// Where, and how many instructions are to come to it still.
    at: Mutex<Option<(Death, usize)>>,
    died: Notify,
}

impl Dying {
    /// It is to die there, the next time that it comes to it.
    #[allow(dead_code, reason = "it is the unit tests that use it")]
    pub fn dies_at(&self, death: Death) {
        self.dies_with(death, 1);
    }

    /// It is to die there once it has come to it with so many instructions.
    #[allow(dead_code, reason = "it is the unit tests that use it")]
    pub fn dies_with(&self, death: Death, instructions: usize) {
        *self.at.lock().unwrap() = Some((death, instructions));
    }

    /// Waits until it has come to where it dies: from there on it says nothing more of those instructions, and whoever keeps it
    /// registered is to be dropped.
    #[allow(dead_code, reason = "it is the unit tests that use it")]
    pub async fn died(&self) {
        tokio::time::timeout(PATIENCE, self.died.notified()).await.expect("the worker to come to where it dies");
    }

    async fn dies_if_meant(&self, step: &str, afterwards: bool) {
        if let Some(is_last) = self.came_to(step, afterwards) {
            if is_last {
                self.died.notify_one();
            }
            std::future::pending::<()>().await;
        }
    }

    /// Whether the last one has come to where it dies; nothing elsewhere.
    fn came_to(&self, step: &str, afterwards: bool) -> Option<bool> {
        let mut at = self.at.lock().unwrap();
        let (_, left) = at.as_mut().filter(|(at, _)| at.step == step && at.afterwards == afterwards)?;
        *left -= 1;
        let is_last = *left == 0;
        if is_last {
            *at = None;
        }
        Some(is_last)
    }
}

impl Worker {
    pub fn new() -> Arc<Self> {
        let (deleted, warmed) = (Mutex::default(), Mutex::default());
        Arc::new(Self { may: Semaphore::new(0), deleted, warmed, dying: Dying::default() })
    }

    pub fn deleted_of(&self, table: &str) -> BTreeSet<u64> {
        let deleted = self.deleted.lock().unwrap();
        deleted.iter().filter(|(of, _)| of.ends_with(table)).map(|(_, n)| *n).collect()
    }
}

#[async_trait]
impl Node for Worker {
    fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo { roles: vec!["worker".to_owned()], ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String> {
        if [WARM_SHARD, LEAVE_SHARD].contains(&kind) {
            let shard = Moving::of(&payload)?.shard;
            self.dying.dies_if_meant(kind, false).await;
            if kind == WARM_SHARD {
                self.warmed.lock().unwrap().insert(shard);
            }
            return Ok(Bytes::new());
        }
        assert_eq!(kind, PURGE_TABLE);
        let Task { step, mut purge, .. } = Task::of(&payload)?;
        let table = purge.table.clone();
        self.dying.dies_if_meant(&step, false).await;
        let answer = match step.as_str() {
            CHECK if table.ends_with("shared") => Answer::Refused("another table lives there".to_owned()),
            CHECK => Answer::Done(Box::new(purge)),
            DELETE if table.ends_with("damaged") => return Err("a file cannot be deleted".to_owned()),
            DELETE if table.ends_with("odd") => Answer::Doubtful("it is not what it was".to_owned()),
            DELETE => {
                if table.contains("slow") {
                    self.may.acquire().await.map_err(|e| e.to_string())?.forget();
                }
                self.deleted.lock().unwrap().insert((table, purge.deleted));
                purge.deleted += 1;
                let boxed = Box::new(purge);
                if boxed.deleted == FILES { Answer::Done(boxed) } else { Answer::Part(boxed) }
            }
            other => Answer::Doubtful(format!("no step {other}")),
        };
        self.dying.dies_if_meant(&step, true).await;
        Ok(answer.to_bytes())
    }
}

/// What a [`Runner`] says in the end.
pub const COUNT: u64 = 7;

/// A worker that runs upkeep: it says twice that it is running, or for ever, and then that it is done.
#[derive(Debug)]
pub struct Runner {
    /// How often it was asked.
    pub asked: AtomicU64,
    ends: bool,
    pub dying: Dying,
}

impl Runner {
    pub fn new(ends: bool) -> Arc<Self> {
        Arc::new(Self { asked: AtomicU64::new(0), ends, dying: Dying::default() })
    }
}

#[async_trait]
impl Node for Runner {
    fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo { roles: vec!["worker".to_owned()], ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String> {
        if [WARM_SHARD, LEAVE_SHARD].contains(&kind) {
            return Ok(Bytes::new());
        }
        assert_eq!(kind, TABLE_UPKEEP);
        upkeep::Task::of(&payload)?;
        self.dying.dies_if_meant(RUN, false).await;
        let before = self.asked.fetch_add(1, Ordering::SeqCst);
        if !self.ends || before < 2 {
            return Ok(upkeep::Answer::Running.to_bytes());
        }
        self.dying.dies_if_meant(RUN, true).await;
        Ok(upkeep::Answer::Done(COUNT).to_bytes())
    }
}

/// Has this done to a table.
pub async fn submit_upkeep(store: &RemoteStore, id: &str, what: What) {
    let ident = TableIdent::new("a".parse().unwrap(), "t").unwrap();
    let (_, record) = upkeep::of_table(what, &ident, uuid::Uuid::new_v4(), 1);
    let submitted = calls::submit(store, id, &record, soon()).await.unwrap();
    assert!(matches!(submitted, Submitted::New(_)), "{submitted:?}");
}

/// The purge of a table of this name, with a scope.
pub fn purge(table: &str) -> (String, Record) {
    let ident = TableIdent::new("a".parse().unwrap(), table).unwrap();
    let pointer = TablePointer { uuid: uuid::Uuid::new_v4(), metadata_location: "m".into(), previous_location: None };
    let (id, record) = of_drop(&ident, &pointer, 1, 0);
    (id, Record { scopes: vec![format!("/catalog/a/{table}")], ..record })
}

pub async fn submit(store: &RemoteStore, table: &str) -> String {
    let (id, record) = purge(table);
    let submitted = calls::submit(store, &id, &record, soon()).await.unwrap();
    assert!(matches!(submitted, Submitted::New(_)), "{submitted:?}");
    id
}

pub async fn until(store: &RemoteStore, id: &str, is: impl Fn(&Record) -> bool) -> Procedure {
    eventually("a procedure to come so far", async || {
        let found = calls::get(store, id, soon()).await.ok()??;
        is(&found.record).then_some(found)
    })
    .await
}

pub fn deleted(record: &Record) -> u64 {
    record.data::<Purge>().unwrap().deleted
}
