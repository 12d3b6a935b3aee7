//! What the clients of a run do.
//!
//! A workload is a [`Plan`]: something to prepare, one [`Actor`] per client, and what to read once all is healed. An actor
//! does one operation at a time and writes down how it began and ended; its errors are outcomes, not failures of the run.
//! Reads are spread over all peers, and say which one answered: that is how stale ones are found.
//!
//! All keys are under [`PREFIX`]; values are unique within a run wherever two changes have to be told apart.
//!
//! - [`register`], [`set`], [`append`], [`bank`], [`watch`], [`lock`], [`idempotency`], [`session`]: one file each;
//!   [`table`] (with [`shared`]), [`accounts`], [`catalog`], [`cached`], [`hot`]: the same through SQL, with what they share in [`statements`],
//!   [`swept`], [`past`] and [`tended`];
//!   [`rest`]: a client of tables that is PyIceberg;
//! - [`rotation`]: keys that are used for a while and then left;
//! - [`access`]: a client's way to the cluster.

pub mod access;
mod accounts;
mod append;
mod bank;
mod cached;
mod catalog;
mod hot;
mod idempotency;
mod lock;
mod past;
mod register;
pub mod rest;
mod rotation;
mod session;
mod set;
mod shared;
mod statements;
mod swept;
mod table;
mod tended;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use async_trait::async_trait;
use lake_client::store::Error;

use self::access::Access;
use self::rest::Rest;
use crate::history::{Key, Workload};
use crate::run::recorder::Scribe;

/// Where the keys of all workloads are.
pub const PREFIX: &str = "/kv/chaos/";

/// One client.
#[async_trait]
pub trait Actor: Send {
    /// Does one operation.
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe);

    /// Whether it keeps to the rate that was asked for, and stops when the time is up. One that waits for what others do
    /// does not: it goes on until all is read at the end.
    fn is_paced(&self) -> bool {
        true
    }
}

/// What happens before and after.
#[async_trait]
pub trait Frame: Send {
    /// Before any client begins.
    async fn prepare(&mut self, _access: &mut Access, _scribe: &mut Scribe) -> Result<(), Error> {
        Ok(())
    }

    /// Once everything is healed: reads everything there is, so that the checkers see what became of it.
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error>;
}

/// All of a workload.
pub struct Plan {
    pub actors: Vec<Box<dyn Actor>>,
    pub frame: Box<dyn Frame>,
}

impl Plan {
    /// So many clients that are alike; each is told its number.
    fn of<A: Actor + 'static>(clients: usize, mut actor: impl FnMut(usize) -> A, frame: impl Frame + 'static) -> Self {
        let actors = (0..clients).map(|n| Box::new(actor(n)) as Box<dyn Actor>).collect();
        Self { actors, frame: Box::new(frame) }
    }
}

/// What so many clients do for a workload. `rest`: how some of them go through REST, of tables only.
pub fn plan(workload: Workload, clients: usize, rest: Option<&Rest>) -> Plan {
    match workload {
        Workload::Register => register::plan(clients),
        Workload::Set => set::plan(clients),
        Workload::Append => append::plan(clients),
        Workload::Bank => bank::plan(clients),
        Workload::Watch => watch::plan(clients),
        Workload::Lock => lock::plan(clients),
        Workload::Idempotency => idempotency::plan(clients),
        Workload::Session => session::plan(clients),
        Workload::Table => table::plan(clients, rest),
        Workload::MultiTable => accounts::plan(clients),
        Workload::Catalog => catalog::plan(clients),
        Workload::Cached => cached::plan(clients),
        Workload::Hot => hot::plan(clients),
        Workload::Upkeep => hot::plan_with_upkeep(clients),
    }
}

/// Numbers that are never given twice. Cheap to clone.
#[derive(Debug, Clone, Default)]
struct Unique(Arc<AtomicI64>);

impl Unique {
    /// From 1.
    fn next(&self) -> i64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Where a key of a workload is.
fn place(workload: Workload, key: &Key) -> String {
    format!("{PREFIX}{workload}/{key}")
}

/// A number as it is stored.
fn number_of(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// Numbers as they are stored.
fn numbers_of(value: &[u8]) -> Vec<i64> {
    let text = String::from_utf8_lossy(value);
    text.split(',').filter_map(|number| number.parse().ok()).collect()
}

fn numbers_to(numbers: &[i64]) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}
