//! States that are held, so that several reads see one revision (semantics, section 3): listings that are under way, and
//! snapshots that a caller has opened.
//!
//! The first page of a listing that has more puts the state it was read from here; a later page names it. A snapshot is
//! the same for any key and prefix. Clones of the state are cheap, but they keep alive what is deleted meanwhile, so they
//! are bounded: [`MAX_HELD`] listings, where the caller's oldest goes for a new one, and [`MAX_SNAPSHOTS`] snapshots, beyond which
//! none is opened until one is closed or ends; of both each caller has its part ([`super::shares`]). A snapshot is held for
//! [`crate::config::Config::page_life`]; a listing for as long since its last page was asked for, and for [`LIVES`] times that in
//! all, so that one takes the time it needs and an abandoned one goes soon. After that: SnapshotExpired, and the client starts
//! again.
//!
//! A page's token is `id/last key`: asking for the same page twice gives the same page.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_client::store::Snapshot;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::{MAX_PAGE_BYTES, page_limit};
use lake_proto::v1::error_detail::Kind;

use super::failure::Failure;
use super::shares::{self, Caller, Pool, Refused, Resource};
use crate::log::lock;
use crate::raft::state_machine::Applied;

/// Listings held at once; one more lets the oldest go.
pub const MAX_HELD: usize = 256;
/// Snapshots held at once.
pub const MAX_SNAPSHOTS: usize = 256;
/// A listing whose pages are asked for one after the other is held for so many times the life of one that is not: an hour.
const LIVES: u32 = 60;

struct Held {
    applied: Arc<Applied>,
    /// Of the listing; `None` for a snapshot.
    prefix: Option<String>,
    since: Instant,
    /// When a page of it was last asked for. A snapshot does not live longer for being used.
    used: Instant,
    share: shares::Held,
}

impl Held {
    fn new(applied: Arc<Applied>, prefix: Option<String>, share: shares::Held) -> Self {
        let now = clock::now();
        Self { applied, prefix, since: now, used: now, share }
    }

    fn is_alive(&self, life: Duration) -> bool {
        clock::since(self.used) <= life && clock::since(self.since) <= life * LIVES
    }
}

type Table = HashMap<u64, Held>;

/// What names a later page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token<'a> {
    /// Of the listing or snapshot.
    id: u64,
    /// The last key of the page before.
    after: &'a str,
}

impl<'a> Token<'a> {
    fn parse(token: &'a str) -> Option<Self> {
        let (id, after) = token.split_once('/')?;
        Some(Self { id: u64::from_str_radix(id, 16).ok()?, after })
    }
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}/{}", self.id, self.after)
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
    listings: Pool,
    snapshots: Pool,
}

impl Pages {
    /// None held; each will live for `life`.
    pub fn new(life: Duration) -> Self {
        let listings = Pool::new(Resource::Listings, MAX_HELD);
        let snapshots = Pool::new(Resource::Snapshots, MAX_SNAPSHOTS);
        Self { life, held: Mutex::default(), listings, snapshots }
    }

    /// The first page under `prefix` of the state `applied`, for a caller that may ask for more.
    pub fn first(&self, applied: Arc<Applied>, prefix: &str, limit: u32, caller: &Caller) -> Page {
        let id = rand::random::<u64>();
        let page = page(id, &applied, prefix, None, limit);
        if page.next.is_some() {
            let mut held = lock(&self.held);
            let share = loop {
                match self.listings.take(caller, 1) {
                    Ok(share) => break Some(share),
                    Err(_) if let_go(&mut held, caller) => {}
                    Err(_) => break None,
                }
            };
            if let Some(share) = share {
                held.insert(id, Held::new(applied, Some(prefix.to_owned()), share));
            }
        }
        page
    }

    /// Holds a state for reads to come.
    ///
    /// # Errors
    /// Overloaded.
    pub fn open_snapshot(&self, applied: Arc<Applied>, caller: &Caller) -> Result<Snapshot, Failure> {
        let mut held = lock(&self.held);
        let snapshot = (0..64).map(|_| rand::random::<u64>()).find_map(Snapshot::from_wire);
        let overloaded = |refused| {
            let what = format!(
                "{refused} has as many snapshots as it may have, of {MAX_SNAPSHOTS}; close some, or try again when the first of \
                 them end, within {} s",
                self.life.as_secs_f64()
            );
            Failure::new(Kind::Overloaded, what)
        };
        let share = self.snapshots.take(caller, 1).map_err(overloaded)?;
        let snapshot = snapshot.ok_or_else(|| overloaded(Refused::Full))?;
        held.insert(snapshot.to_wire(), Held::new(applied, None, share));
        Ok(snapshot)
    }

    /// Lets a snapshot go. False: it is not held, or too old.
    pub fn close_snapshot(&self, snapshot: Snapshot) -> bool {
        let mut table = lock(&self.held);
        let id = snapshot.to_wire();
        let Some(held) = table.get(&id).filter(|held| held.prefix.is_none()) else { return false };
        let alive = held.is_alive(self.life);
        table.remove(&id);
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
        let mut held = lock(&self.held);
        let held = held.get_mut(&id).filter(|held| held.is_alive(self.life))?;
        if held.prefix.is_some() {
            held.used = clock::now();
        }
        Some((held.applied.clone(), wanted(held.prefix.as_deref())))
    }

    /// A later page.
    ///
    /// # Errors
    /// SnapshotExpired when the listing is no longer held here, InvalidArgument when the token is none of this listing, or the
    /// listing is older than `min_revision`.
    pub fn next(&self, token: &str, prefix: &str, limit: u32, min_revision: Revision) -> Result<Page, Failure> {
        let invalid = || Failure::invalid("the page is not one that this listing gave");
        let Token { id, after } = Token::parse(token).ok_or_else(invalid)?;
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
        let too_old = |_: &u64, held: &mut Held| !held.is_alive(self.life);
        let gone: Vec<(u64, Held)> = lock(&self.held).extract_if(too_old).collect();
        // What only these versions of the state still had goes here, and nobody waits for that.
        drop(gone);
    }

    /// How many listings and snapshots are held.
    pub fn held(&self) -> usize {
        lock(&self.held).len()
    }
}

/// Lets the oldest listing go for a new one of this caller: the oldest of its own, else of its host's, else of all. False: there
/// is none.
fn let_go(table: &mut Table, caller: &Caller) -> bool {
    let oldest = |wanted: &dyn Fn(&shares::Held) -> bool| {
        let listings = table.iter().filter(|(_, held)| held.prefix.is_some() && wanted(&held.share));
        listings.min_by_key(|(_, held)| held.used).map(|(id, _)| *id)
    };
    let of_caller = oldest(&|share| share.is_of(caller, false));
    let of_host = || oldest(&|share| share.is_of(caller, true));
    match of_caller.or_else(of_host).or_else(|| oldest(&|_| true)) {
        Some(id) => table.remove(&id).is_some(),
        None => false,
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
    let next = listing.entries.last().filter(|_| listing.more).map(|last| Token { id, after: &last.key }.to_string());
    Page { revision: applied.state.revision(), entries: listing.entries, next }
}

/// The page that a token names, of so many entries, if these entries are held under its id: for fuzzing.
///
/// # Errors
/// As [`Pages::next`].
pub(crate) fn follow(token: &str, prefix: &str, limit: u32, entries: Applied) -> Result<Page, Failure> {
    let pages = Pages::new(Duration::from_secs(60));
    if let Some(parsed) = Token::parse(token) {
        assert_eq!(Token::parse(&parsed.to_string()), Some(parsed));
        let share = pages.listings.note(&Caller::own(), 1);
        lock(&pages.held).insert(parsed.id, Held::new(Arc::new(entries), Some(prefix.to_owned()), share));
    }
    pages.next(token, prefix, limit, 0)
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
        let first = pages.first(state.clone(), "/kv/", 10, &Caller::own());
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
        let first = pages.first(state.clone(), "/kv/", 1, &Caller::own()).next.unwrap();
        for _ in 0..MAX_HELD {
            pages.first(state.clone(), "/kv/", 1, &Caller::own());
        }
        assert_eq!(pages.held(), MAX_HELD);
        assert_eq!(pages.next(&first, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);

        let short = Pages::new(Duration::ZERO);
        let token = short.first(state.clone(), "/kv/", 1, &Caller::own()).next.unwrap();
        assert_eq!(short.next(&token, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);
        short.expire();
        assert_eq!(short.held(), 0);
        assert!(pages.first(state, "/kv/", 0, &Caller::own()).next.is_none(), "a listing of one page is not held");
    }

    #[test]
    fn a_snapshot_serves_any_read_at_one_revision_and_is_bounded() {
        let pages = Pages::new(Duration::from_secs(60));
        let snapshot = pages.open_snapshot(applied(25), &Caller::own()).unwrap();
        assert_eq!(pages.snapshot(snapshot, 0).unwrap().state.revision(), 25);
        let first = pages.first_of(snapshot, "/kv/", 20, 0).unwrap();
        let second = pages.next(&first.next.unwrap(), "/kv/", 20, 0).unwrap();
        assert_eq!((second.entries.len(), second.revision, second.next), (5, 25, None));
        let other = pages.first_of(snapshot, "/kv/0001", 1, 0).unwrap().next.unwrap();
        assert_eq!(pages.next(&other, "/kv/0002", 1, 0).unwrap_err().kind, Kind::InvalidArgument);

        let listing = pages.first(applied(3), "/kv/", 1, &Caller::own()).next.unwrap();
        for _ in 1..MAX_SNAPSHOTS {
            pages.open_snapshot(applied(0), &Caller::own()).unwrap();
        }
        assert_eq!(pages.open_snapshot(applied(0), &Caller::own()).unwrap_err().kind, Kind::Overloaded);
        let no_snapshot = Snapshot::from_wire(u64::from_str_radix(&listing[..16], 16).unwrap()).unwrap();
        assert!(!pages.close_snapshot(no_snapshot), "a listing is none");
        for _ in 0..MAX_HELD {
            pages.first(applied(3), "/kv/", 1, &Caller::own());
        }
        assert!(pages.snapshot(snapshot, 0).is_ok(), "listings do not push snapshots out");
        assert!(pages.close_snapshot(snapshot) && !pages.close_snapshot(snapshot));
        assert_eq!(pages.snapshot(snapshot, 0).unwrap_err().kind, Kind::SnapshotExpired);
        let another = pages.open_snapshot(applied(0), &Caller::own()).unwrap();
        assert_eq!(
            pages.open_snapshot(applied(0), &Caller::own()).unwrap_err().kind,
            Kind::Overloaded,
            "one went, one came"
        );
        assert!(pages.close_snapshot(another));
        assert_eq!(pages.next(&listing, "/kv/", 1, 0).unwrap_err().kind, Kind::SnapshotExpired);

        let short = Pages::new(Duration::ZERO);
        let snapshot = short.open_snapshot(applied(1), &Caller::own()).unwrap();
        assert_eq!(short.snapshot(snapshot, 0).unwrap_err().kind, Kind::SnapshotExpired);
        short.expire();
        assert_eq!(short.held(), 0);
        assert!(!short.close_snapshot(snapshot), "it has ended");
        let no_listing = Snapshot::from_wire(u64::from_str_radix(&listing[..16], 16).unwrap()).unwrap();
        assert!(pages.snapshot(no_listing, 0).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_that_goes_on_is_held_and_not_for_ever() {
        let life = Duration::from_secs(60);
        let pages = Pages::new(life);
        let listing = || pages.first(applied(3), "/kv/", 1, &Caller::own()).next.unwrap();
        let next = |token: &str| pages.next(token, "/kv/", 1, 0).map(drop).map_err(|e| e.kind);
        let (used, left, snapshot) = (listing(), listing(), pages.open_snapshot(applied(3), &Caller::own()).unwrap());
        for _ in 0..LIVES {
            tokio::time::advance(life - Duration::from_millis(1)).await;
            pages.expire();
            assert_eq!(next(&used), Ok(()));
            // Used, too, and for nothing.
            let _ = pages.snapshot(snapshot, 0);
        }
        assert_eq!(next(&left), Err(Kind::SnapshotExpired));
        assert_eq!(pages.snapshot(snapshot, 0).map(drop).unwrap_err().kind, Kind::SnapshotExpired);
        tokio::time::advance(life / 2).await;
        assert_eq!(next(&used), Err(Kind::SnapshotExpired), "it has been held for long enough");
    }

    #[test]
    fn what_is_held_is_refused_to_who_has_seen_a_newer_state() {
        let pages = Pages::new(Duration::from_secs(60));
        let snapshot = pages.open_snapshot(applied(10), &Caller::own()).unwrap();
        let token = pages.first(applied(10), "/kv/", 1, &Caller::own()).next.unwrap();
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
    fn who_holds_much_keeps_nobody_else_out() {
        let (pages, callers) = (Pages::new(Duration::from_secs(60)), shares::Callers::default());
        let at = |host: u8, port| callers.at(Some(([10, 0, 0, host], port).into()));
        let (modest, greedy, elsewhere) = (at(1, 1), at(1, 2), at(2, 1));
        let listing = |caller: &Caller| pages.first(applied(3), "/kv/", 1, caller).next.unwrap();
        let is_held = |token: &str| pages.next(token, "/kv/", 1, 0).is_ok();
        let (of_modest, first) = (listing(&modest), listing(&greedy));
        (0..2 * MAX_HELD).for_each(|_| drop(listing(&greedy)));
        assert!(is_held(&of_modest) && !is_held(&first), "its own go first");
        assert!(is_held(&listing(&elsewhere)) && is_held(&listing(&modest)) && is_held(&of_modest));

        let mut taken = 0;
        while pages.open_snapshot(applied(1), &greedy).is_ok() {
            taken += 1;
        }
        assert!((20..=MAX_SNAPSHOTS / 3).contains(&taken), "{taken}");
        let refused = pages.open_snapshot(applied(1), &greedy).unwrap_err();
        assert!(refused.kind == Kind::Overloaded && refused.message.starts_with("this connection"), "{refused:?}");
        assert!(
            pages.open_snapshot(applied(1), &modest).is_ok() && pages.open_snapshot(applied(1), &elsewhere).is_ok()
        );
    }

    #[test]
    fn a_token_of_another_listing_is_refused() {
        let pages = Pages::new(Duration::from_secs(60));
        let token = pages.first(applied(3), "/kv/", 1, &Caller::own()).next.unwrap();
        assert_eq!(pages.next(&token, "/kv/0", 1, 0).unwrap_err().kind, Kind::InvalidArgument);
        assert_eq!(pages.next("nonsense", "/kv/", 1, 0).unwrap_err().kind, Kind::InvalidArgument);
    }
}
