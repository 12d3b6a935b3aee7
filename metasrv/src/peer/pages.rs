//! States that are held, so that several reads see one revision (semantics, section 3): listings that are under way, and
//! snapshots that a caller has opened.
//!
//! The first page of a listing that has more puts the state it was read from here; a later page names it. A snapshot is
//! the same for any key and prefix. Clones of the state are cheap, but they keep alive what is deleted meanwhile, so they
//! are bounded: [`MAX_HELD`] listings, of which the oldest goes for a new one, and [`MAX_SNAPSHOTS`] snapshots, beyond which
//! none is opened until one is closed or ends; each for [`crate::config::Config::page_life`]. After that: SnapshotExpired,
//! and the client starts again.
//!
//! A page's token is `id/last key`: asking for the same page twice gives the same page.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_client::store::Snapshot;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::{MAX_PAGE_BYTES, page_limit};
use lake_proto::v1::error_detail::Kind;

use super::failure::Failure;
use crate::log::lock;
use crate::raft::state_machine::Applied;

/// Listings held at once; one more lets the oldest go.
pub const MAX_HELD: usize = 256;
/// Snapshots held at once.
pub const MAX_SNAPSHOTS: usize = 256;

struct Held {
    applied: Arc<Applied>,
    /// Of the listing; `None` for a snapshot.
    prefix: Option<String>,
    since: Instant,
}

#[derive(Default)]
struct Table {
    held: HashMap<u64, Held>,
    snapshots: usize,
}

impl Table {
    fn insert(&mut self, id: u64, held: Held) {
        self.snapshots += usize::from(held.prefix.is_none());
        self.held.insert(id, held);
    }

    fn listings(&self) -> usize {
        self.held.len() - self.snapshots
    }
}

/// One page and what to ask for next.
#[derive(Debug)]
pub struct Page {
    pub revision: u64,
    pub entries: Vec<KeyValue>,
    pub next: Option<String>,
}

/// The listings and snapshots of one peer.
pub struct Pages {
    life: Duration,
    held: Mutex<Table>,
}

impl Pages {
    /// None held; each will live for `life`.
    pub fn new(life: Duration) -> Self {
        Self { life, held: Mutex::default() }
    }

    /// The first page under `prefix` of the state `applied`.
    pub fn first(&self, applied: Arc<Applied>, prefix: &str, limit: u32) -> Page {
        let id = rand::random::<u64>();
        let page = page(id, &applied, prefix, None, limit);
        if page.next.is_some() {
            let mut held = lock(&self.held);
            let listings = held.held.iter().filter(|(_, held)| held.prefix.is_some());
            if held.listings() >= MAX_HELD
                && let Some(oldest) = listings.min_by_key(|(_, held)| held.since).map(|(id, _)| *id)
            {
                held.held.remove(&oldest);
            }
            held.insert(id, Held { applied, prefix: Some(prefix.to_owned()), since: clock::now() });
        }
        page
    }

    /// Holds a state for reads to come.
    ///
    /// # Errors
    /// Overloaded.
    pub fn open_snapshot(&self, applied: Arc<Applied>) -> Result<Snapshot, Failure> {
        let mut held = lock(&self.held);
        let snapshot = (0..64).map(|_| rand::random::<u64>()).find_map(Snapshot::from_wire);
        let Some(snapshot) = snapshot.filter(|_| held.snapshots < MAX_SNAPSHOTS) else {
            let what = format!(
                "{MAX_SNAPSHOTS} snapshots are held, which is the most; try again when the first of them end, within {} s",
                self.life.as_secs_f64()
            );
            return Err(Failure::new(Kind::Overloaded, what));
        };
        held.insert(snapshot.to_wire(), Held { applied, prefix: None, since: clock::now() });
        Ok(snapshot)
    }

    /// Lets a snapshot go. False: it is not held, or too old.
    pub fn close_snapshot(&self, snapshot: Snapshot) -> bool {
        let mut table = lock(&self.held);
        let id = snapshot.to_wire();
        let Some(held) = table.held.get(&id).filter(|held| held.prefix.is_none()) else { return false };
        let alive = clock::since(held.since) <= self.life;
        table.held.remove(&id);
        table.snapshots -= 1;
        alive
    }

    /// The state that a snapshot is of, for a read that wants no older one than of `min_revision`.
    ///
    /// # Errors
    /// SnapshotExpired; InvalidArgument when it is older than that.
    pub fn snapshot(&self, snapshot: Snapshot, min_revision: Revision) -> Result<Arc<Applied>, Failure> {
        match self.find(snapshot.to_wire(), |prefix| prefix.is_none()) {
            Some((applied, true)) => at_least(applied, min_revision, "the snapshot"),
            _ => Err(Failure::new(
                Kind::SnapshotExpired,
                "the snapshot is no longer held by this peer; open another one",
            )),
        }
    }

    /// The first page under `prefix` of a snapshot. Its later pages live as long as that.
    ///
    /// # Errors
    /// As [`Pages::snapshot`].
    pub fn first_of(
        &self,
        snapshot: Snapshot,
        prefix: &str,
        limit: u32,
        min_revision: Revision,
    ) -> Result<Page, Failure> {
        Ok(page(snapshot.to_wire(), &*self.snapshot(snapshot, min_revision)?, prefix, None, limit))
    }

    /// What is held under an id, if it is not too old, and whether it is of the wanted kind.
    fn find(&self, id: u64, wanted: impl Fn(Option<&str>) -> bool) -> Option<(Arc<Applied>, bool)> {
        let held = lock(&self.held);
        let held = held.held.get(&id).filter(|held| clock::since(held.since) <= self.life)?;
        Some((held.applied.clone(), wanted(held.prefix.as_deref())))
    }

    /// A later page.
    ///
    /// # Errors
    /// SnapshotExpired when the listing is no longer held here, InvalidArgument when the token is none of this listing, or the
    /// listing is older than `min_revision`.
    pub fn next(&self, token: &str, prefix: &str, limit: u32, min_revision: Revision) -> Result<Page, Failure> {
        let invalid = || Failure::invalid("the page is not one that this listing gave");
        let (id, after) = token.split_once('/').ok_or_else(invalid)?;
        let id = u64::from_str_radix(id, 16).map_err(|_| invalid())?;
        let expired = || {
            Failure::new(
                Kind::SnapshotExpired,
                format!("the pages of the listing of {prefix:?} are no longer held by this peer; start again"),
            )
        };
        let of_this = |held: Option<&str>| held.is_none_or(|held| held == prefix);
        let (applied, of_this) = self.find(id, of_this).ok_or_else(expired)?;
        if !of_this || !after.starts_with(prefix) {
            return Err(invalid());
        }
        let applied = at_least(applied, min_revision, "the listing")?;
        Ok(page(id, &applied, prefix, Some(after), limit))
    }

    /// Lets go of what is too old.
    pub fn expire(&self) {
        let mut table = lock(&self.held);
        table.held.retain(|_, held| clock::since(held.since) <= self.life);
        table.snapshots = table.held.values().filter(|held| held.prefix.is_none()).count();
    }

    /// How many listings and snapshots are held.
    pub fn held(&self) -> usize {
        lock(&self.held).held.len()
    }
}

/// A state that is held does not get any newer: waiting cannot help.
fn at_least(applied: Arc<Applied>, min_revision: Revision, what: &str) -> Result<Arc<Applied>, Failure> {
    let revision = applied.state.revision();
    if revision < min_revision {
        return Err(Failure::invalid(format!(
            "{what} is of revision {revision}, and the read asks for {min_revision} or later; begin another one"
        )));
    }
    Ok(applied)
}

fn page(id: u64, applied: &Applied, prefix: &str, after: Option<&str>, limit: u32) -> Page {
    let listing = applied.state.list(prefix, after, page_limit(limit), MAX_PAGE_BYTES);
    let next = listing.entries.last().filter(|_| listing.more).map(|last| format!("{id:016x}/{}", last.key));
    Page { revision: applied.state.revision(), entries: listing.entries, next }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;

    fn applied(keys: u32) -> Arc<Applied> {
        let mut applied = Applied::default();
        for i in 0..keys {
            applied.state.run(1, &Txn { then: vec![Op::put(format!("/kv/{i:05}"), "v")], ..Txn::default() });
        }
        Arc::new(applied)
    }

    #[test]
    fn all_pages_see_one_revision_and_can_be_asked_for_twice() {
        let pages = Pages::new(Duration::from_secs(60));
        let state = applied(25);
        let first = pages.first(state.clone(), "/kv/", 10);
        let token = first.next.unwrap();
        let again: Vec<_> = (0..2).map(|_| pages.next(&token, "/kv/", 10, 0).unwrap().entries).collect();
        assert_eq!(again[0], again[1]);
        let last = pages.next(&pages.next(&token, "/kv/", 10, 0).unwrap().next.unwrap(), "/kv/", 10, 0).unwrap();
        assert_eq!((last.entries.len(), last.next, last.revision), (5, None, 25));
    }

    #[test]
    fn held_listings_are_bounded_in_number_and_time() {
        let pages = Pages::new(Duration::from_secs(60));
        let state = applied(3);
        let first = pages.first(state.clone(), "/kv/", 1).next.unwrap();
        for _ in 0..MAX_HELD {
            pages.first(state.clone(), "/kv/", 1);
        }
        assert_eq!(pages.held(), MAX_HELD);
        assert_eq!(pages.next(&first, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);

        let short = Pages::new(Duration::ZERO);
        let token = short.first(state.clone(), "/kv/", 1).next.unwrap();
        assert_eq!(short.next(&token, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);
        short.expire();
        assert_eq!(short.held(), 0);
        assert!(pages.first(state, "/kv/", 0).next.is_none(), "a listing of one page is not held");
    }

    #[test]
    fn a_snapshot_serves_any_read_at_one_revision_and_is_bounded() {
        let pages = Pages::new(Duration::from_secs(60));
        let snapshot = pages.open_snapshot(applied(25)).unwrap();
        assert_eq!(pages.snapshot(snapshot, 0).unwrap().state.revision(), 25);
        let first = pages.first_of(snapshot, "/kv/", 20, 0).unwrap();
        let second = pages.next(&first.next.unwrap(), "/kv/", 20, 0).unwrap();
        assert_eq!((second.entries.len(), second.revision, second.next), (5, 25, None));
        let other = pages.first_of(snapshot, "/kv/0001", 1, 0).unwrap().next.unwrap();
        assert_eq!(pages.next(&other, "/kv/0002", 1, 0).unwrap_err().kind, Kind::InvalidArgument);

        let listing = pages.first(applied(3), "/kv/", 1).next.unwrap();
        for _ in 1..MAX_SNAPSHOTS {
            pages.open_snapshot(applied(0)).unwrap();
        }
        assert_eq!(pages.open_snapshot(applied(0)).unwrap_err().kind, Kind::Overloaded);
        let no_snapshot = Snapshot::from_wire(u64::from_str_radix(&listing[..16], 16).unwrap()).unwrap();
        assert!(!pages.close_snapshot(no_snapshot), "a listing is none");
        for _ in 0..MAX_HELD {
            pages.first(applied(3), "/kv/", 1);
        }
        assert!(pages.snapshot(snapshot, 0).is_ok(), "listings do not push snapshots out");
        assert!(pages.close_snapshot(snapshot) && !pages.close_snapshot(snapshot));
        assert_eq!(pages.snapshot(snapshot, 0).unwrap_err().kind, Kind::SnapshotExpired);
        let another = pages.open_snapshot(applied(0)).unwrap();
        assert_eq!(pages.open_snapshot(applied(0)).unwrap_err().kind, Kind::Overloaded, "one went, one came");
        assert!(pages.close_snapshot(another));
        assert_eq!(pages.next(&listing, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);

        let short = Pages::new(Duration::ZERO);
        let snapshot = short.open_snapshot(applied(1)).unwrap();
        assert_eq!(short.snapshot(snapshot, 0).unwrap_err().kind, Kind::SnapshotExpired);
        short.expire();
        assert_eq!(short.held(), 0);
        assert!(!short.close_snapshot(snapshot), "it has ended");
        let no_listing = Snapshot::from_wire(u64::from_str_radix(&listing[..16], 16).unwrap()).unwrap();
        assert!(pages.snapshot(no_listing, 0).is_err());
    }

    #[test]
    fn what_is_held_is_refused_to_who_has_seen_a_newer_state() {
        let pages = Pages::new(Duration::from_secs(60));
        let snapshot = pages.open_snapshot(applied(10)).unwrap();
        let token = pages.first(applied(10), "/kv/", 1).next.unwrap();
        let newer = [
            pages.snapshot(snapshot, 11).map(drop),
            pages.first_of(snapshot, "/kv/", 1, 11).map(drop),
            pages.next(&token, "/kv/", 1, 11).map(drop),
        ];
        for refused in newer {
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind, Kind::InvalidArgument);
            assert!(refused.message.contains("revision 10") && refused.message.contains("11 or later"), "{refused:?}");
        }
        assert!(pages.snapshot(snapshot, 10).is_ok() && pages.next(&token, "/kv/", 1, 10).is_ok());
    }

    #[test]
    fn a_token_of_another_listing_is_refused() {
        let pages = Pages::new(Duration::from_secs(60));
        let token = pages.first(applied(3), "/kv/", 1).next.unwrap();
        assert_eq!(pages.next(&token, "/kv/0", 1, 0).unwrap_err().kind, Kind::InvalidArgument);
        assert_eq!(pages.next("nonsense", "/kv/", 1, 0).unwrap_err().kind, Kind::InvalidArgument);
    }
}
