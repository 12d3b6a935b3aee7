//! The keys that tickets are signed with, so that any query node knows a ticket which another one has made.
//!
//! They are kept in the metadata, under [`KEY`]: whoever reads that can make tickets, and has the cluster's secret already.
//!
//! ```text
//! no key, or the newest is older than [`ROTATE_AFTER`] -> a node adds one by compare-and-set, and drops those past [`KEPT_FOR`]
//! signing      -> the newest; one that could not be replaced in time signs on for as long as it is sure to be known, and who signs
//!                 with it does not wait for those that try to replace it
//! a ticket of a key that is not known here  -> the keys are read again, at most once in [`LOOK_EVERY`]: all that wait for it
//!                 have what was there after they came
//! ```
//! In the steady state nobody is asked. Ages are by the nodes' clocks, which may differ by hours: a key is kept for a day longer
//! than it signs, and a ticket lives for minutes.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_client::catalog::CatalogError;
use lake_client::store::{ReadOptions, SharedStore, Token};
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::outcomes::now_ms;
use crate::table::catalog_error;

/// Where the keys are.
pub const KEY: &str = "/lake/ticketkeys";
/// How long a key signs.
pub const ROTATE_AFTER: Duration = Duration::from_secs(24 * 60 * 60);
/// How long it is known, from when it was made.
pub const KEPT_FOR: Duration = Duration::from_secs(3 * 24 * 60 * 60);
/// From one look for new keys to the next, however many unknown ones are met.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long replacing a key may take that can sign on ...
const RENEW_WITHIN: Duration = Duration::from_secs(2);
/// ... and when that is tried again.
const RENEW_AGAIN: Duration = Duration::from_secs(10);
/// How often a change is tried again that another node was first with.
const MAX_RACES: usize = 8;

const ID_BYTES: usize = 8;
const TAG_BYTES: usize = 32;

/// A key as it is kept.
#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    id: u64,
    secret: [u8; 32],
    made_ms: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Ring {
    /// The newest is the last.
    keys: Vec<Kept>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("id", &self.id).field("made_ms", &self.made_ms).finish_non_exhaustive()
    }
}

impl Kept {
    fn new(now_ms: u64) -> Self {
        Self { id: rand::random(), secret: rand::random(), made_ms: now_ms }
    }

    fn age(&self, now_ms: u64) -> Duration {
        Duration::from_millis(now_ms.saturating_sub(self.made_ms))
    }

    fn signs(&self, now_ms: u64) -> bool {
        self.age(now_ms) < ROTATE_AFTER
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.secret)
    }
}

/// The keys, as this node knows them.
#[derive(Debug)]
pub struct TicketKeys {
    store: SharedStore,
    known: Mutex<Arc<Ring>>,
    /// Whoever reads or renews them holds it.
    last: tokio::sync::Mutex<Last>,
}

/// What was done with the keys last.
#[derive(Debug, Default)]
struct Last {
    /// When the last reading of them began.
    read: Option<Instant>,
    /// When they could not be renewed.
    failed: Option<Instant>,
}

impl TicketKeys {
    /// Knows none yet: they are read when one is first needed.
    pub fn new(store: SharedStore) -> Self {
        Self { store, known: Mutex::default(), last: tokio::sync::Mutex::default() }
    }

    /// Signs a message: it follows the key's id and its tag.
    ///
    /// # Errors
    /// The metadata's, where there is no key yet that may sign.
    pub async fn sign(&self, message: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        let key = self.signing(deadline).await?;
        let tag = hmac::sign(&key.key(), message);
        Ok([&key.id.to_be_bytes()[..], tag.as_ref(), message].concat())
    }

    /// The message that was signed.
    ///
    /// # Errors
    /// `Invalid`: it was not signed with a key that is known.
    pub async fn verify<'a>(&self, signed: &'a [u8], deadline: Instant) -> Result<&'a [u8]> {
        let unknown = || Error::invalid("the ticket was not made by this lake, or too long ago: plan the query again");
        let (id, rest) = signed.split_first_chunk::<ID_BYTES>().ok_or_else(unknown)?;
        let (tag, message) = rest.split_first_chunk::<TAG_BYTES>().ok_or_else(unknown)?;
        let id = u64::from_be_bytes(*id);
        let known = |ring: &Ring| ring.keys.iter().find(|key| key.id == id).cloned();
        let key = match known(&self.known()) {
            Some(key) => key,
            None => {
                let ring = self.look(deadline).await?;
                known(&ring).ok_or_else(unknown)?
            }
        };
        hmac::verify(&key.key(), message, tag).map_err(|_| unknown())?;
        Ok(message)
    }

    fn known(&self) -> Arc<Ring> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, ring: Ring) -> Arc<Ring> {
        let ring = Arc::new(ring);
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = ring.clone();
        ring
    }

    /// The key to sign with.
    async fn signing(&self, deadline: Instant) -> Result<Kept> {
        let newest = |ring: &Ring| ring.keys.last().cloned();
        let known = newest(&self.known());
        if let Some(key) = known.as_ref().filter(|key| key.signs(now_ms())) {
            return Ok(key.clone());
        }
        // Every node still knows it for long enough.
        let lasts = known.filter(|key| key.age(now_ms()) < 2 * ROTATE_AFTER);
        let mut last = match &lasts {
            None => self.turn(deadline).await?,
            Some(key) => match self.last.try_lock() {
                Ok(last) if last.failed.is_none_or(|at| at.elapsed() >= RENEW_AGAIN) => last,
                _ => return Ok(key.clone()),
            },
        };
        // Somebody may have renewed them meanwhile.
        if let Some(key) = newest(&self.known()).filter(|key| key.signs(now_ms())) {
            return Ok(key);
        }
        let began = Instant::now();
        let by = if lasts.is_some() { deadline.min(began + RENEW_WITHIN) } else { deadline };
        match (self.renew(by).await, lasts) {
            (Ok(key), _) => {
                *last = Last { read: Some(began), failed: None };
                Ok(key)
            }
            (Err(error), Some(key)) => {
                tracing::warn!(%error, "the key that signs tickets could not be replaced, and is used on");
                last.failed = Some(Instant::now());
                Ok(key)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Reads the keys, and adds one if the newest is too old.
    async fn renew(&self, deadline: Instant) -> Result<Kept> {
        let doing = "making a key to sign tickets with";
        for _ in 0..MAX_RACES {
            let (mut ring, token) = self.read(deadline).await?;
            let now_ms = now_ms();
            if let Some(key) = ring.keys.last().filter(|key| key.signs(now_ms)).cloned() {
                self.note(ring);
                return Ok(key);
            }
            ring.keys.retain(|key| key.age(now_ms) < KEPT_FOR);
            let key = Kept::new(now_ms);
            ring.keys.push(key.clone());
            let value = serde_json::to_vec(&ring).map_err(|e| Error::internal(format!("{doing}: {e}")))?;
            let done = self.store.cas(KEY, token, Bytes::from(value), deadline).await;
            let done = done.map_err(|e| catalog_error(doing, CatalogError::Store(e)))?;
            if done.result.succeeded {
                self.note(ring);
                return Ok(key);
            }
        }
        Err(Error::unavailable(format!("{doing}: other nodes were first all the time; try again")))
    }

    /// Reads the keys again, so that what was there before the call is found.
    async fn look(&self, deadline: Instant) -> Result<Arc<Ring>> {
        let came = Instant::now();
        let mut last = self.turn(deadline).await?;
        if let Some(at) = last.read {
            if at >= came {
                return Ok(self.known());
            }
            tokio::time::sleep_until((at + LOOK_EVERY).into()).await;
        }
        let began = Instant::now();
        let (ring, _) = self.read(deadline).await?;
        last.read = Some(began);
        Ok(self.note(ring))
    }

    /// Waits until nobody else reads or renews the keys.
    async fn turn(&self, deadline: Instant) -> Result<tokio::sync::MutexGuard<'_, Last>> {
        let turn = tokio::time::timeout_at(deadline.into(), self.last.lock()).await;
        turn.map_err(|_| {
            Error::unavailable(
                "the keys that tickets are signed with could not be read in time; nothing was done: try again",
            )
        })
    }

    async fn read(&self, deadline: Instant) -> Result<(Ring, Option<Token>)> {
        let doing = "reading the keys that sign tickets";
        let read = self.store.get(KEY, ReadOptions::default(), deadline).await;
        let read = read.map_err(|e| catalog_error(doing, CatalogError::Store(e)))?;
        match read.value {
            None => Ok((Ring::default(), None)),
            Some(entry) => {
                let ring = serde_json::from_slice(&entry.value)
                    .map_err(|e| Error::corrupt(format!("{doing}: {KEY} in the metadata is damaged: {e}")))?;
                Ok((ring, Some(Token::of(&entry))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use lake_client::memory::MemoryStore;

    use super::*;
    use crate::error::Kind;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[tokio::test]
    async fn what_one_node_signs_another_knows() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let (one, other) = (TicketKeys::new(store.clone()), TicketKeys::new(store.clone()));
        let signed = one.sign(b"message", soon()).await.unwrap();
        assert_eq!(other.verify(&signed, soon()).await, Ok(&b"message"[..]));
        assert_eq!(one.sign(b"", soon()).await.unwrap().len(), ID_BYTES + TAG_BYTES);
        for place in 0..signed.len() {
            let mut wrong = signed.clone();
            wrong[place] ^= 1;
            assert_eq!(one.verify(&wrong, soon()).await.unwrap_err().kind, Kind::Invalid, "{place}");
            assert_eq!(other.verify(&signed[..place], soon()).await.unwrap_err().kind, Kind::Invalid, "{place}");
        }
        let shown = format!("{:?}", one.known());
        assert!(shown.contains("made_ms") && !shown.contains("secret"), "{shown}");
    }

    #[tokio::test]
    async fn a_key_that_was_made_a_moment_after_a_look_is_found() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let (one, other) = (TicketKeys::new(store.clone()), TicketKeys::new(store));
        let nobodys = [7; ID_BYTES + TAG_BYTES];
        assert_eq!(other.verify(&nobodys, soon()).await.unwrap_err().kind, Kind::Invalid);
        let signed = one.sign(b"message", soon()).await.unwrap();
        assert_eq!(other.verify(&signed, soon()).await, Ok(&b"message"[..]));
    }

    #[tokio::test]
    async fn a_key_that_can_sign_on_waits_for_nobody() {
        let keys = TicketKeys::new(Arc::new(MemoryStore::new()));
        let known = |hours: u64| {
            let made_ms = now_ms() - hours * 3_600_000;
            keys.note(Ring { keys: vec![Kept { made_ms, ..Kept::new(0) }] }).keys[0].id.to_be_bytes()
        };
        let old = known(25);
        let mut last = keys.last.lock().await;
        let signed = keys.sign(b"m", soon()).now_or_never().expect("it waits for another who renews").unwrap();
        assert_eq!(signed[..ID_BYTES], old);
        known(49);
        assert_eq!(keys.sign(b"m", Instant::now()).await.unwrap_err().kind, Kind::Unavailable);
        let old = known(25);
        last.failed = Some(Instant::now());
        drop(last);
        assert_eq!(keys.sign(b"m", soon()).await.unwrap()[..ID_BYTES], old, "that was tried a moment ago");
        keys.last.lock().await.failed = None;
        assert_ne!(keys.sign(b"m", soon()).await.unwrap()[..ID_BYTES], old);
    }

    #[tokio::test]
    async fn a_key_is_replaced_and_known_on() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let old = |age: Duration| Kept { made_ms: now_ms() - u64::try_from(age.as_millis()).unwrap(), ..Kept::new(0) };
        let hour = Duration::from_secs(3600);
        let ring = Ring { keys: vec![old(KEPT_FOR + hour), old(ROTATE_AFTER + hour)] };
        let value = serde_json::to_vec(&ring).unwrap();
        store.cas(KEY, None, value.into(), soon()).await.unwrap();
        let keys = TicketKeys::new(store.clone());
        let signed = |key: &Kept| {
            let tag = hmac::sign(&key.key(), b"m");
            [&key.id.to_be_bytes()[..], tag.as_ref(), &b"m"[..]].concat()
        };
        assert_eq!(keys.verify(&signed(&ring.keys[1]), soon()).await, Ok(&b"m"[..]));
        let new = keys.sign(b"m", soon()).await.unwrap();
        assert_ne!(new, signed(&ring.keys[1]), "the old key signs no more");
        let (kept, _) = keys.read(soon()).await.unwrap();
        assert_eq!(kept.keys.iter().map(|key| key.id).collect::<Vec<_>>()[..1], [ring.keys[1].id]);
        assert_eq!(kept.keys.len(), 2, "the oldest was dropped, one was added");
        let fresh = TicketKeys::new(store);
        assert_eq!(fresh.verify(&signed(&ring.keys[1]), soon()).await, Ok(&b"m"[..]));
        assert_eq!(fresh.verify(&new, soon()).await, Ok(&b"m"[..]));
        assert_eq!(fresh.verify(&signed(&ring.keys[0]), soon()).await.unwrap_err().kind, Kind::Invalid);
    }
}
