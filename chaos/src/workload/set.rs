//! Sets that only grow: one key per element, created once; a set is read as a listing, some of it in small pages, as the leader
//! or any other peer has it.

use std::time::Instant;

use async_trait::async_trait;
use lake_client::clock;
use lake_client::remote::RemoteStore;
use lake_client::store::{Error, MetaStore, Read, ReadOptions};
use lake_proto::kv::KeyValue;
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, place};
use crate::check::refusals;
use crate::history::{Action, Set, Workload};
use crate::run::recorder::Scribe;

/// Operations on one set.
const USES: u64 = 400;
/// In a small page.
const PAGE_ENTRIES: std::ops::Range<u32> = 10..80;
/// A peer that is named is asked until the deadline: the parts of the time for an operation that it has.
const PEERS_PART: u32 = 3;

pub(super) fn plan(clients: usize) -> Plan {
    let sets = Rotation::new((clients / 3).max(1), USES);
    let elements = Unique::default();
    let client = |_| Client { sets: sets.clone(), elements: elements.clone() };
    Plan::of(clients, client, Final { sets: sets.clone() })
}

struct Client {
    sets: Rotation,
    elements: Unique,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let key = self.sets.pick(&mut access.rng);
        if access.chance(0.15) {
            let from = if access.chance(0.5) { access.any_peer() } else { None };
            // How it ended is in the history.
            let _ = read(key, from, access, scribe).await;
            return;
        }
        let element = self.elements.next();
        let action = Action::Set(Set::Add { key: key.into(), element });
        let place = format!("{}/{element}", place(Workload::Set, &key.into()));
        scribe.invoke(action.clone());
        match access.store.cas(&place, None, element.to_string().into(), access.deadline()).await {
            // An element is added by one client only: if it is there, an earlier sending has done it.
            Ok(done) if done.result.succeeded || done.resent => {
                let first = done.result.observed.first().map(|entry| entry.mod_revision);
                let revision = first.unwrap_or(done.result.revision);
                scribe.ok(action, Some(revision), None);
                access.ledger.put(&place, revision);
            }
            // It was there before anybody added it.
            Ok(_) => scribe.refused(action, refusals::WRONGLY),
            Err(error) => scribe.change_failed(action, &error),
        }
    }
}

async fn read(key: i64, from: Option<(u64, String)>, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let prefix = format!("{}/", place(Workload::Set, &key.into()));
    let action = |elements| Action::Set(Set::Read { key: key.into(), elements });
    let pages_of = if access.chance(0.3) { Some(access.rng.random_range(PAGE_ENTRIES)) } else { None };
    let (store, deadline) = match &from {
        Some((_, at)) => (access.store.reading_at(at)?, clock::now() + access.timeout / PEERS_PART),
        None => (access.store.clone(), access.deadline()),
    };
    let peer = from.map(|(id, _)| id);
    scribe.invoke(action(None));
    let listed = match pages_of {
        Some(entries) => list_in_pages(&prefix, entries, &store, deadline).await,
        None => store.list_all(&prefix, ReadOptions::default(), deadline).await,
    };
    match listed {
        Ok(read) => {
            let elements = read.value.iter().filter_map(|entry| entry.key.strip_prefix(&prefix)?.parse().ok());
            scribe.ok(action(Some(elements.collect())), Some(read.revision), peer);
            Ok(())
        }
        Err(error) => {
            scribe.read_failed(action(None), &error, peer);
            Err(error)
        }
    }
}

/// A page after the other, all of one revision. If that is no longer held by the peer that was asked, all of it at once.
async fn list_in_pages(
    prefix: &str,
    entries: u32,
    store: &RemoteStore,
    deadline: Instant,
) -> Result<Read<Vec<KeyValue>>, Error> {
    let (mut all, mut page) = (Vec::new(), None::<String>);
    loop {
        match store.list(prefix, page.as_deref(), entries, ReadOptions::default(), deadline).await {
            Ok(read) => {
                all.extend(read.value.entries);
                page = read.value.next;
                if page.is_none() {
                    return Ok(Read { revision: read.revision, value: all });
                }
            }
            Err(Error::SnapshotExpired { .. }) => {
                return store.list_all(prefix, ReadOptions::default(), deadline).await;
            }
            Err(error) => return Err(error),
        }
    }
}

struct Final {
    sets: Rotation,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        for key in self.sets.all() {
            read(key, None, access, scribe).await?;
        }
        Ok(())
    }
}
