//! Listings that are under way: every page of one sees one revision (semantics, section 3).
//!
//! The first page of a listing that has more puts the state it was read from here; a later page names it. Clones of the
//! state are cheap, but they keep alive what is deleted meanwhile, so they are bounded: [`MAX_HELD`] of them, each for
//! [`crate::config::Config::page_life`]. After that: SnapshotExpired, and the client starts again.
//!
//! A page's token is `id.revision/last key`: asking for the same page twice gives the same page.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_proto::kv::KeyValue;
use lake_proto::limits::{MAX_PAGE_BYTES, MAX_PAGE_ENTRIES};
use lake_proto::v1::error_detail::Kind;

use super::failure::Failure;
use crate::log::lock;
use crate::raft::state_machine::Applied;

/// Listings held at once; one more lets the oldest go.
pub const MAX_HELD: usize = 256;

struct Held {
    applied: Arc<Applied>,
    prefix: String,
    since: Instant,
}

/// One page and what to ask for next.
#[derive(Debug)]
pub struct Page {
    pub revision: u64,
    pub entries: Vec<KeyValue>,
    pub next: Option<String>,
}

/// The listings of one peer.
pub struct Pages {
    life: Duration,
    held: Mutex<HashMap<u64, Held>>,
}

impl Pages {
    /// None held; each will live for `life`.
    pub fn new(life: Duration) -> Self {
        Self { life, held: Mutex::new(HashMap::new()) }
    }

    /// The first page under `prefix` of the state `applied`.
    pub fn first(&self, applied: Arc<Applied>, prefix: &str, limit: u32) -> Page {
        let id = rand::random::<u64>();
        let page = page(id, &applied, prefix, None, limit);
        if page.next.is_some() {
            let mut held = lock(&self.held);
            if held.len() >= MAX_HELD
                && let Some(oldest) = held.iter().min_by_key(|(_, h)| h.since).map(|(id, _)| *id)
            {
                held.remove(&oldest);
            }
            held.insert(id, Held { applied, prefix: prefix.to_owned(), since: Instant::now() });
        }
        page
    }

    /// A later page.
    ///
    /// # Errors
    /// SnapshotExpired when the listing is no longer held here, InvalidArgument when the token is none of this listing.
    pub fn next(&self, token: &str, prefix: &str, limit: u32) -> Result<Page, Failure> {
        let invalid = || Failure::invalid("the page is not one that this listing gave");
        let (id, after) = token.split_once('/').ok_or_else(invalid)?;
        let id = u64::from_str_radix(id, 16).map_err(|_| invalid())?;
        let expired = || {
            Failure::new(
                Kind::SnapshotExpired,
                format!("the pages of the listing of {prefix:?} are no longer held by this peer; start again"),
            )
        };
        let applied = {
            let held = lock(&self.held);
            let held = held.get(&id).ok_or_else(expired)?;
            if held.since.elapsed() > self.life {
                return Err(expired());
            }
            if held.prefix != prefix {
                return Err(invalid());
            }
            held.applied.clone()
        };
        Ok(page(id, &applied, prefix, Some(after), limit))
    }

    /// Lets go of listings that are too old.
    pub fn expire(&self) {
        lock(&self.held).retain(|_, held| held.since.elapsed() <= self.life);
    }

    /// How many listings are held.
    pub fn held(&self) -> usize {
        lock(&self.held).len()
    }
}

fn page(id: u64, applied: &Applied, prefix: &str, after: Option<&str>, limit: u32) -> Page {
    let limit = if limit == 0 { MAX_PAGE_ENTRIES } else { (limit as usize).min(MAX_PAGE_ENTRIES) };
    let listing = applied.state.list(prefix, after, limit, MAX_PAGE_BYTES);
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
        let again: Vec<_> = (0..2).map(|_| pages.next(&token, "/kv/", 10).unwrap().entries).collect();
        assert_eq!(again[0], again[1]);
        let last = pages.next(&pages.next(&token, "/kv/", 10).unwrap().next.unwrap(), "/kv/", 10).unwrap();
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
        assert_eq!(pages.next(&first, "/kv/", 1).unwrap_err().kind, Kind::SnapshotExpired);

        let short = Pages::new(Duration::ZERO);
        let token = short.first(state.clone(), "/kv/", 1).next.unwrap();
        assert_eq!(short.next(&token, "/kv/", 1).unwrap_err().kind, Kind::SnapshotExpired);
        short.expire();
        assert_eq!(short.held(), 0);
        assert!(pages.first(state, "/kv/", 0).next.is_none(), "a listing of one page is not held");
    }

    #[test]
    fn a_token_of_another_listing_is_refused() {
        let pages = Pages::new(Duration::from_secs(60));
        let token = pages.first(applied(3), "/kv/", 1).next.unwrap();
        assert_eq!(pages.next(&token, "/kv/0", 1).unwrap_err().kind, Kind::InvalidArgument);
        assert_eq!(pages.next("nonsense", "/kv/", 1).unwrap_err().kind, Kind::InvalidArgument);
    }
}
