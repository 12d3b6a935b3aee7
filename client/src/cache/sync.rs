//! The three tasks that keep what is cached current: one follows the watch, one confirms, one renews what neither covers.
//!
//! | the watch                             | what follows                                                                 |
//! |---------------------------------------|------------------------------------------------------------------------------|
//! | begins, or what it missed is not kept | a linearizable read says from which revision on; entries from before are not covered |
//! | tells of changes                      | they replace the entries of tables that are cached                           |
//! | is lost                               | the cover stays as it was and grows old; the watch goes on where it was       |
//! | is nothing the store can do           | no cover: each entry is renewed by itself                                    |
//! | is refused                            | the same, and another try after a while                                      |
//!
//! A confirmation is one small linearizable read. It is made when entries are used that the watch covers and that have
//! become old enough to be renewed, and while metasrv is away, to find out when it is back: one at a time, and with a pause
//! after each that failed.
//!
//! What the watch does not cover is renewed table by table when it is used, many in one read, and one read at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use lake_proto::kv::Revision;
use lake_proto::watch::{Change, Changes};
use tokio::sync::mpsc;

use super::Shared;
use super::counters::{Reason, count};
use super::cover::Entry;
use super::load::{Load, unanswered, unavailable};
use crate::backoff::Backoff;
use crate::catalog::{self, CatalogError, TABLES, TableIdent};
use crate::clock;
use crate::store::{Error, ReadOptions};

/// What a confirmation reads. There is no such key.
const NOTHING: &str = "/lake/table";

const CONFIRMING: &str = "confirming table pointers";

/// The pause after a store that watches has refused to.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// Tables renewed by one read, at most.
const RENEWED_AT_ONCE: usize = 256;

/// Follows the watch until the cache is closed.
pub(super) async fn follow(shared: Arc<Shared>) {
    if !shared.store.capabilities().watch {
        return;
    }
    let mut backoff = shared.backoff();
    loop {
        let error = followed(&shared, &mut backoff).await;
        shared.update_cover(|cover| cover.live = false);
        tracing::debug!(%error, "the watch of table pointers was lost");
        match error {
            Error::Refused { .. } => tokio::time::sleep(REFUSED_PAUSE).await,
            Error::Compacted { .. } => shared.update_cover(|cover| *cover = Default::default()),
            _ => {}
        }
        tokio::time::sleep(backoff.next_wait()).await;
    }
}

/// Follows one watch for as long as that goes well.
async fn followed(shared: &Shared, backoff: &mut Backoff) -> Error {
    let cover = shared.cover();
    let progress = match cover.from {
        Some(_) => cover.progress,
        None => {
            let at = clock::now();
            let revision = match shared.confirm().await {
                Ok(revision) => revision,
                Err(error) => return error,
            };
            shared.update_cover(|cover| cover.begin(revision, at));
            revision
        }
    };
    shared.counting.call(Reason::Watch);
    let until = clock::now() + shared.config.away_patience;
    let mut stream = match shared.store.watch(TABLES, progress + 1, until).await {
        Ok(stream) => stream,
        Err(error) => return error,
    };
    shared.update_cover(|cover| cover.live = true);
    loop {
        match stream.next().await {
            Some(Ok(changes)) => {
                backoff.reset();
                shared.take(changes);
            }
            Some(Err(error)) => return error,
            None => return unavailable("watching table pointers", "the watch ended", Duration::ZERO),
        }
    }
}

/// Renews the tables that come through `wanted`, until the cache is closed.
pub(super) async fn renew(shared: Arc<Shared>, mut wanted: mpsc::Receiver<TableIdent>) {
    let mut tables = Vec::with_capacity(RENEWED_AT_ONCE);
    while wanted.recv_many(&mut tables, RENEWED_AT_ONCE).await > 0 {
        let load = Load { reason: Reason::Refresh, min_revision: 0 };
        let until = || clock::now() + shared.config.away_patience;
        let batch = std::mem::take(&mut tables);
        let outcome = shared.begin_load(batch.clone(), load).outcome(until()).await;
        match outcome {
            Err(CatalogError::Damaged { .. }) if batch.len() > 1 => {
                // One of them; the others are not to suffer from it.
                for table in batch {
                    let _ = shared.begin_load(vec![table], load).outcome(until()).await;
                }
            }
            Err(error) => tracing::debug!(%error, "renewing table pointers failed"),
            Ok(_) => {}
        }
    }
}

/// Confirms whenever that is wanted, until the cache is closed.
pub(super) async fn confirm(shared: Arc<Shared>) {
    let mut backoff = shared.backoff();
    loop {
        shared.confirm_wanted.notified().await;
        // While the progress has not reached the last one, another says no more.
        if shared.cover().awaited.is_none() || shared.is_away() {
            match shared.confirm().await {
                Ok(_) => backoff.reset(),
                Err(error) => {
                    tracing::debug!(%error, "confirming table pointers failed");
                    tokio::time::sleep(backoff.next_wait()).await;
                }
            }
        }
        shared.confirming.store(false, Ordering::Release);
    }
}

impl Shared {
    /// The revision of a linearizable read that begins now.
    async fn confirm(&self) -> Result<Revision, Error> {
        let at = clock::now();
        let until = at + self.config.away_patience;
        self.counting.call(Reason::Confirm);
        let seen = self.lock().seen();
        let options = ReadOptions { min_revision: seen, ..ReadOptions::default() };
        let read = tokio::time::timeout_at(until.into(), self.store.get(NOTHING, options, until)).await;
        let read = read.unwrap_or_else(|_| Err(unanswered(CONFIRMING, clock::since(at))));
        self.note_reached(read.as_ref().is_err_and(Error::is_unavailable));
        let revision = read?.revision;
        if revision < seen {
            count(&self.counting.refused);
            let last = format!("the answer is from revision {revision}, and revision {seen} has been seen");
            return Err(unavailable(CONFIRMING, &last, clock::since(at)));
        }
        self.notice(revision);
        self.update_cover(|cover| cover.confirmed(revision, at));
        Ok(revision)
    }

    fn take(&self, told: Changes) {
        for change in told.changes {
            self.apply(change);
        }
        self.lock().see(told.progress);
        self.update_cover(|cover| cover.progressed(told.progress));
        self.version.send_if_modified(|version| {
            let later = *version < told.progress;
            *version = told.progress.max(*version);
            later
        });
    }

    /// Puts one transaction's changes in the place of what is cached of their tables.
    fn apply(&self, change: Change) {
        let mut ledger = self.lock();
        for event in change.events {
            let Some(table) = TableIdent::from_key(&event.key) else { continue };
            ledger.raise(&table, change.revision);
            let Some(cached) = self.peek(&table) else { continue };
            if cached.revision >= change.revision {
                continue;
            }
            count(&self.counting.told);
            let pointer = match event.entry.map(|entry| catalog::pointer(&table, &entry, change.revision)).transpose() {
                Ok(pointer) => pointer,
                Err(error) => {
                    // Whoever asks for it reads it, and is told.
                    tracing::warn!(%error, "a change of a table pointer cannot be read");
                    self.entries.invalidate(&table);
                    continue;
                }
            };
            // It is not known when it happened; what it replaces was current no later than that.
            let doubted = cached.doubted;
            let read_at = self.cover().know(cached).as_of;
            self.entries.insert(table, Arc::new(Entry { doubted, ..Entry::new(pointer, change.revision, read_at) }));
        }
    }
}
