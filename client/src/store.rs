//! The [`MetaStore`] trait: what everything above the metadata talks to, and the errors it can meet.
//!
//! A store is a versioned, ordered map with transactions (semantics, sections 1 to 3). Every call carries a deadline;
//! an error says whether the change may have been made ([`Error::applied`]).
//!
//! Not every store can do everything: what it can is a value ([`Capabilities`]), and what it cannot is refused, with
//! nothing done. [`crate::conformance`] is what all of them are held to.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Expected, Invalid, KeyValue, Revision, Txn, TxnResult};
use lake_proto::limits::{MAX_TXN_BYTES, MAX_TXN_OPS};
use lake_proto::watch::Changes;

/// A store that anything may share.
pub type SharedStore = Arc<dyn MetaStore>;

/// What a store can do beyond changing one key by compare-and-set, reading, and listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Transactions over several keys, compares of prefixes, and lists inside transactions. Without it, all compares and
    /// operations of a transaction are about one key.
    pub multi_key: bool,
    /// Every page of one listing sees one revision, and revisions are the store's: the same for all keys, and rising.
    /// Without it a revision is one key's own count of changes, 0 for what is about several, and
    /// [`ReadOptions::min_revision`] is refused.
    pub consistent_listing: bool,
    /// [`MetaStore::open_snapshot`].
    pub snapshots: bool,
    /// [`MetaStore::watch`].
    pub watch: bool,
    /// [`MetaStore::grant_lease`], keys that hang on leases, and compares that one is alive.
    pub leases: bool,
    /// Compares that no scope is in the way.
    pub scopes: bool,
    /// Most operations in one transaction, and most compares.
    pub txn_ops: usize,
    /// Most bytes of keys and values in one transaction.
    pub txn_bytes: usize,
}

impl Capabilities {
    /// All of it, within the limits of the contract (semantics, section 1): what the metadata cluster can.
    pub const CLUSTER: Self = Self {
        multi_key: true,
        consistent_listing: true,
        snapshots: true,
        watch: true,
        leases: true,
        scopes: true,
        txn_ops: MAX_TXN_OPS,
        txn_bytes: MAX_TXN_BYTES,
    };
}

/// Which state of a key compare-and-set expects, as the store told it with what was read or written. Opaque: what is in it
/// (a revision, a count of changes) is the store's, it means nothing at another store, and it is never the same for two
/// states of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(Revision);

impl Token {
    /// Of the entry's state.
    pub fn of(entry: &KeyValue) -> Self {
        Self(entry.mod_revision)
    }

    /// Of the state that a change left which ran at this revision, as its result says.
    pub fn at(revision: Revision) -> Self {
        Self(revision)
    }
}

/// What compare-and-set expects of a key, as a transaction says it.
fn expected(token: Option<Token>) -> Expected {
    token.map_or(Expected::Absent, |token| Expected::ModRevision(token.0))
}

/// How fresh a read must be (semantics, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Consistency {
    /// Confirmed against a quorum.
    #[default]
    Linearizable,
    /// Whatever the peer asked has applied.
    Local,
    /// Local, if the peer was confirmed at most this long ago.
    Bounded(Duration),
}

/// Options of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadOptions {
    pub consistency: Consistency,
    /// Wait, up to the deadline, until this revision has been applied. 0: no wait.
    pub min_revision: Revision,
    /// Read from this snapshot; the other options do not count then.
    pub snapshot: Option<Snapshot>,
}

/// A state that is held for a bounded time, so that several reads see one revision: [`MetaStore::open_snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Snapshot(std::num::NonZeroU64);

impl Snapshot {
    /// The snapshot that a peer names so; 0 names none.
    pub fn from_wire(id: u64) -> Option<Self> {
        std::num::NonZeroU64::new(id).map(Self)
    }

    /// As a peer names it.
    pub fn to_wire(self) -> u64 {
        self.0.get()
    }
}

impl ReadOptions {
    /// Reads from a snapshot.
    pub fn at(snapshot: Snapshot) -> Self {
        Self { snapshot: Some(snapshot), ..Self::default() }
    }
}

/// A read's value, and the revision of the state it was read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read<T> {
    pub revision: Revision,
    pub value: T,
}

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    pub entries: Vec<KeyValue>,
    /// What to ask for next; `None` on the last page. Opaque.
    pub next: Option<String>,
}

/// A lease that was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Its fence, too: what [`Compare::lease_alive`](lake_proto::kv::Compare::lease_alive) takes.
    pub id: LeaseId,
    pub ttl: Duration,
    /// Until when it is certainly alive, by this process's monotonic clock: counted from when it was asked for.
    pub held_until: Instant,
}

/// Changes as they happen. It ends after its first error.
pub type ChangeStream = BoxStream<'static, Result<Changes, Error>>;

/// What a commit did, and whether it was asked for more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub result: TxnResult,
    /// An earlier attempt of this same call may have been applied before the one that answered. A failed compare may
    /// then be the call's own doing: look whether the observed value is the one it wanted to write. Never of a store that
    /// makes requests exactly once, except while the cluster refuses it a session.
    pub resent: bool,
}

/// Metadata: an ordered, versioned map with transactions.
#[async_trait]
pub trait MetaStore: Debug + Send + Sync + 'static {
    /// What this store can do.
    fn capabilities(&self) -> Capabilities;

    /// One entry, or `None`.
    async fn get(&self, key: &str, options: ReadOptions, deadline: Instant) -> Result<Read<Option<KeyValue>>, Error>;

    /// The entries of those `keys` that exist, at one revision, in the order asked for.
    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error>;

    /// One page of at most `limit` entries under `prefix`; `page` is `None` or what the page before said comes next.
    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Page>, Error>;

    /// Has the state held for a bounded time: reads with [`ReadOptions::at`] what this returns see one revision. Once it
    /// is no longer held, or the peer that held it no longer answers: SnapshotExpired, start again.
    async fn open_snapshot(&self, _options: ReadOptions, _deadline: Instant) -> Result<Read<Snapshot>, Error> {
        Err(Error::cannot("opening a snapshot".to_owned(), "this store has none"))
    }

    /// Lets a snapshot go before its time. False: it is no longer held, or the peer that held it no longer answers.
    async fn close_snapshot(&self, _snapshot: Snapshot, _deadline: Instant) -> Result<bool, Error> {
        Ok(false)
    }

    /// Runs a transaction. A failed compare is an answer (`succeeded == false`), not an error.
    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error>;

    /// Puts `value` if `key` is in the state expected; `None`: if there is no such key.
    async fn cas(&self, key: &str, token: Option<Token>, value: Bytes, deadline: Instant) -> Result<Committed, Error> {
        self.commit(Txn::cas(key, expected(token), value), deadline).await
    }

    /// Deletes `key` if it is in the state expected.
    async fn cas_delete(&self, key: &str, token: Token, deadline: Instant) -> Result<Committed, Error> {
        self.commit(Txn::cas_delete(key, token.0), deadline).await
    }

    /// Watches every change under `prefix` from a revision on; 0: from now on (semantics, section 7). The deadline is the
    /// first answer's.
    async fn watch(&self, prefix: &str, _from: Revision, _deadline: Instant) -> Result<ChangeStream, Error> {
        Err(Error::cannot(format!("watching {prefix:?}"), "this store does not tell of changes: list again"))
    }

    /// Grants a lease (semantics, section 5).
    async fn grant_lease(&self, _ttl: Duration, _holder: &str, _deadline: Instant) -> Result<Lease, Error> {
        Err(Error::cannot("granting a lease".to_owned(), "this store has none"))
    }

    /// Renews a lease for another time to live from now on. `None`: it is over.
    async fn renew_lease(&self, lease: Lease, _deadline: Instant) -> Result<Option<Lease>, Error> {
        Err(Error::cannot(format!("renewing lease {}", lease.id), "this store has none"))
    }

    /// Ends a lease, and deletes the keys that hang on it. Says whether there was one.
    async fn revoke_lease(&self, id: LeaseId, _deadline: Instant) -> Result<bool, Error> {
        Err(Error::cannot(format!("revoking lease {id}"), "this store has none"))
    }

    /// Every entry under `prefix`, at one revision if the store's listings are; starts again if the pages expire in the
    /// middle, unless they are those of a snapshot that was given.
    async fn list_all(
        &self,
        prefix: &str,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        let mut backoff = Backoff::default();
        'start: loop {
            let mut entries = Vec::new();
            let mut page: Option<String> = None;
            loop {
                let limit = lake_proto::limits::MAX_PAGE_ENTRIES as u32;
                let read = match self.list(prefix, page.as_deref(), limit, options, deadline).await {
                    Err(e @ Error::SnapshotExpired { .. }) if options.snapshot.is_none() => {
                        match backoff.wait(deadline).await {
                            true => continue 'start,
                            false => return Err(e),
                        }
                    }
                    other => other?,
                };
                entries.extend(read.value.entries);
                match read.value.next {
                    Some(next) => page = Some(next),
                    None => return Ok(Read { revision: read.revision, value: entries }),
                }
            }
        }
    }
}

/// A look with no more time than this may come too late without anybody being away.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// Whether a failed change may have been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// Certainly not: retry as a new request if you like.
    No,
    /// It may have been, or may still be.
    Unknown,
}

/// Who leads, as far as a call that failed has shown. Written as what a message has behind the time that was spent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leader {
    /// The last one known.
    Known(KnownLeader),
    /// None is. The highest term that was heard of; 0: none was.
    Unknown { term: u64 },
    /// There is none to know of, or nobody asked for it.
    Without,
}

/// A leader, and the term it leads in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownLeader {
    /// Its peer id.
    pub id: u64,
    /// Where it is reached, `host:port`.
    pub address: String,
    pub term: u64,
}

impl std::fmt::Display for Leader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Known(KnownLeader { id, address, term }) => {
                write!(f, ", last known leader: peer {id} at {address} in term {term}")
            }
            Self::Unknown { term: 0 } => f.write_str(", no leader known"),
            Self::Unknown { term } => write!(f, ", no leader known in term {term}"),
            Self::Without => Ok(()),
        }
    }
}

/// Where a store was tried to be reached, in brackets; nothing where nobody knows.
fn reached(endpoints: &[String]) -> String {
    match endpoints.is_empty() {
        true => String::new(),
        false => format!(" ({})", endpoints.join(", ")),
    }
}

/// Why a call to a store failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The request breaks a limit or rule of the contract. Nothing was proposed.
    #[error("invalid request: {0}")]
    Invalid(#[from] Invalid),
    /// The request was refused for what it asks, with the server's words.
    #[error("{doing}: the metadata store refused: {message}")]
    Refused { doing: String, message: String },
    /// No answer within the deadline.
    #[error("{doing}: the metadata cluster is unreachable{}: {last} ({attempts} attempts in {:.1} s{leader})", reached(.endpoints), .elapsed.as_secs_f64())]
    Unavailable {
        doing: String,
        endpoints: Vec<String>,
        attempts: u32,
        elapsed: Duration,
        leader: Leader,
        /// The last attempt's error.
        last: String,
        applied: Applied,
    },
    /// An earlier attempt may have been applied, and whether it was cannot be found out any more: the session that it was a
    /// request of is over, or the peer that answers now knows nothing of it.
    #[error("{doing}: whether it was done is unknown: an answer was lost, and then: {last} ({attempts} attempts in {:.1} s{leader}); look at what is there before you repeat it", .elapsed.as_secs_f64())]
    InDoubt {
        doing: String,
        attempts: u32,
        elapsed: Duration,
        leader: Leader,
        /// What the last attempt was told.
        last: String,
    },
    /// Too much waits in this process already. Nothing was sent.
    #[error("{doing}: {message}; nothing was done: make it again when less is under way")]
    Overloaded { doing: String, message: String },
    /// The session that the request was one of is over. Nothing ran.
    #[error("{doing}: {message}")]
    SessionExpired { doing: String, message: String },
    /// The snapshot that was being read, or that the pages of a listing come from, is no longer held.
    #[error("{doing}: {message}")]
    SnapshotExpired { doing: String, message: String },
    /// The changes asked for are no longer kept; `oldest` is the first that can be watched from.
    #[error("{doing}: {message}")]
    Compacted { doing: String, oldest: Revision, message: String },
    /// A defect or damaged data.
    #[error("{doing}: {message}")]
    Internal { doing: String, message: String, applied: Applied },
}

impl Error {
    /// Whether the change that failed may have been made.
    pub fn applied(&self) -> Applied {
        match self {
            Error::Invalid(_)
            | Error::Refused { .. }
            | Error::Overloaded { .. }
            | Error::SessionExpired { .. }
            | Error::SnapshotExpired { .. }
            | Error::Compacted { .. } => Applied::No,
            Error::InDoubt { .. } => Applied::Unknown,
            Error::Unavailable { applied, .. } | Error::Internal { applied, .. } => *applied,
        }
    }

    /// What a store refuses because it cannot do it.
    pub fn cannot(doing: String, why: &str) -> Self {
        Error::Refused { doing, message: why.to_owned() }
    }

    /// What a store in this process says when a snapshot, or the pages of a listing, are no longer held.
    pub fn snapshot_expired(doing: &str) -> Self {
        let message = "the snapshot that was being read is no longer held; start again".to_owned();
        Error::SnapshotExpired { doing: doing.to_owned(), message }
    }

    /// What a store in this process says when the changes asked for are no longer kept.
    pub fn compacted(doing: &str, oldest: Revision) -> Self {
        let message = format!(
            "the changes asked for are no longer kept, the first that can be watched from is {oldest}; list again, and watch from \
             the revision after the listing's"
        );
        Error::Compacted { doing: doing.to_owned(), oldest, message }
    }

    /// The same error, where it says whether the change may have been made; the others' kinds say it.
    pub(crate) fn with_applied(mut self, now: Applied) -> Self {
        if let Error::Unavailable { applied, .. } | Error::Internal { applied, .. } = &mut self {
            *applied = now;
        }
        self
    }

    /// Whether the cluster could not be reached, rather than having answered.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::Unavailable { .. })
    }

    /// Whether it is that of the last of many looks at something, which had so little time until its deadline, `had`, that it
    /// says nothing of the store: what was seen before stands.
    pub fn is_of_a_last_look(&self, had: Duration) -> bool {
        self.is_unavailable() && had <= LAST_LOOK
    }
}

/// The attempts of a call that ended without a result: what its error is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InVain {
    pub doing: String,
    pub attempts: u32,
    /// Since the first one.
    pub elapsed: Duration,
    pub leader: Leader,
    /// What the last one failed with.
    pub last: String,
}

impl InVain {
    /// What the last one failed with, and how many there were, in which time, and who leads.
    pub fn told(&self) -> String {
        let Self { attempts, elapsed, leader, last, .. } = self;
        format!("{last} ({attempts} attempts in {:.1} s{leader})", elapsed.as_secs_f64())
    }

    /// Nobody at these endpoints has answered.
    pub fn unavailable(self, endpoints: Vec<String>, applied: Applied) -> Error {
        let Self { doing, attempts, elapsed, leader, last } = self;
        Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, applied }
    }

    /// What became of an earlier attempt cannot be found out any more.
    pub fn in_doubt(self) -> Error {
        let Self { doing, attempts, elapsed, leader, last } = self;
        Error::InDoubt { doing, attempts, elapsed, leader, last }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::clock;
    use crate::faulty::{FaultyStore, soon};

    #[test]
    fn an_error_tells_the_leader_where_there_is_one() {
        let told = |leader| {
            let vain = InVain {
                doing: "reading /kv/a".into(),
                attempts: 3,
                elapsed: Duration::from_millis(1200),
                leader,
                last: "refused".into(),
            };
            vain.unavailable(vec!["a:1".into()], Applied::No).to_string()
        };
        let known = Leader::Known(KnownLeader { id: 2, address: "b:2".into(), term: 5 });
        let begin = "reading /kv/a: the metadata cluster is unreachable (a:1): refused (3 attempts in 1.2 s";
        assert_eq!(told(known), format!("{begin}, last known leader: peer 2 at b:2 in term 5)"));
        assert_eq!(told(Leader::Unknown { term: 6 }), format!("{begin}, no leader known in term 6)"));
        assert_eq!(told(Leader::Unknown { term: 0 }), format!("{begin}, no leader known)"));
        assert_eq!(told(Leader::Without), format!("{begin})"));
        let (elapsed, leader) = (Duration::ZERO, Leader::Without);
        let vain = InVain { doing: "reading".into(), attempts: 1, elapsed, leader, last: "no answer".into() };
        let nowhere = vain.unavailable(vec![], Applied::No).to_string();
        assert_eq!(nowhere, "reading: the metadata cluster is unreachable: no answer (1 attempts in 0.0 s)");
    }

    #[tokio::test]
    async fn a_snapshot_that_is_gone_is_not_asked_for_again() {
        let store = FaultyStore::default();
        store.forgets_listings.store(true, Ordering::SeqCst);
        let options = ReadOptions::at(Snapshot::from_wire(7).unwrap());
        let error = store.list_all("/kv/", options, soon()).await.unwrap_err();
        assert!(matches!(error, Error::SnapshotExpired { .. }), "{error}");
        assert_eq!(store.calls.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_that_expires_all_the_time_is_begun_again_with_pauses() {
        let store = FaultyStore::default();
        store.forgets_listings.store(true, Ordering::SeqCst);
        let by = clock::now() + Duration::from_millis(300);
        let error = store.list_all("/kv/", ReadOptions::default(), by).await.unwrap_err();
        assert!(matches!(error, Error::SnapshotExpired { .. }), "{error}");
        // Ten pauses or so fit into that time.
        assert!((2..100).contains(&store.calls.load(Ordering::SeqCst)), "{store:?}");
    }
}
