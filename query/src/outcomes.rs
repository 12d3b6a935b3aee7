//! What is kept in the metadata of operations that a client may ask for again: what they have in common, whether they came
//! by REST ([`crate::rest::once`]) or as SQL ([`crate::sql::once`]). Semantics, section 4.
//!
//! An outcome is a JSON object in which `at_ms` says when it was left. It is kept for twice the [`LIFETIME`] at least, by a count of
//! time that nodes take over from each other ([`Keeping`]), and goes within four times that and what is not counted: the time in
//! which no node lives for about ten minutes. Where revisions are not the store's, a node forgets what it has seen itself for twice
//! the lifetime ([`FirstSeen`]). What the clocks of nodes show plays no part.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lake_client::catalog::Keeping;
use lake_client::metadata::MetadataWriter;

/// How long a client may ask for an operation again.
pub const LIFETIME: Duration = Duration::from_secs(60 * 60);
/// From one look for outcomes that have been kept long enough to the next.
const SWEEP_EVERY: Duration = Duration::from_secs(10 * 60);
/// From the start to the first.
const FIRST_SWEEP: Duration = Duration::from_secs(60);
/// How long one may take.
const SWEEP_WITHIN: Duration = Duration::from_secs(60);
/// Most outcomes of which a node remembers since when it has seen them; others have their time from a later look on.
const MAX_SEEN: usize = 200_000;

/// Since when this process has seen what is kept. A clock that is set, or that differs from another node's, makes nothing older.
#[derive(Debug, Default)]
pub struct FirstSeen(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    look: u64,
    /// By the fingerprint of what is kept: when it was first seen, and at which look last.
    all: HashMap<u64, (Instant, u64)>,
}

impl FirstSeen {
    /// A look at all that is kept begins. What was not there at the last one is not remembered any more.
    pub fn begin_look(&self) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = seen.look;
        seen.all.retain(|_, (_, look)| *look == last);
        seen.look += 1;
    }

    /// Whether this has been seen for so long; if it was not before, it is from now on.
    pub fn is_older(&self, kept: &[u8], than: Duration) -> bool {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (look, is_full) = (seen.look, seen.all.len() >= MAX_SEEN);
        let key = fingerprint(&[kept]);
        match seen.all.get_mut(&key) {
            Some((first, last)) => {
                *last = look;
                first.elapsed() >= than
            }
            None if is_full => false,
            None => {
                seen.all.insert(key, (Instant::now(), look));
                false
            }
        }
    }
}

/// Forgets outcomes of these domains that were kept for twice `lifetime`, until it is dropped.
pub async fn sweep(writer: &MetadataWriter, domains: &[&str], lifetime: Duration) -> Infallible {
    // Nodes that were started together do not look together.
    let mut pause = FIRST_SWEEP.mul_f64(rand::random_range(0.1..1.0));
    let mut kept: Vec<_> = domains.iter().map(|domain| (*domain, Keeping::new(domain), FirstSeen::default())).collect();
    let counts = writer.capabilities().consistent_listing;
    loop {
        tokio::time::sleep(pause).await;
        pause = SWEEP_EVERY;
        for (domain, keeping, seen) in &mut kept {
            let domain: &str = domain;
            let by = Instant::now() + SWEEP_WITHIN;
            let forgotten = if counts {
                writer.forget_kept(keeping, lifetime * 2, by).await
            } else {
                seen.begin_look();
                writer.forget_outcomes(domain, |kept| seen.is_older(kept, lifetime * 2), by).await
            };
            match forgotten {
                Ok(0) => {}
                Ok(forgotten) => tracing::debug!(domain, forgotten, "outcomes were kept long enough"),
                Err(error) => tracing::debug!(domain, %error, "outcomes could not be looked through"),
            }
        }
    }
}

/// What tells a request from another: FNV-1a, with the parts' lengths; the same on every node and in every release.
pub fn fingerprint(parts: &[&[u8]]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut take = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    for part in parts {
        (part.len() as u64).to_le_bytes().into_iter().for_each(&mut take);
        part.iter().copied().for_each(&mut take);
    }
    hash
}

/// Milliseconds since 1970, by this node's clock.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_as_old_as_it_has_been_seen() {
        let seen = FirstSeen::default();
        seen.begin_look();
        assert!(!seen.is_older(b"a", Duration::ZERO), "seen for the first time");
        seen.begin_look();
        assert!(
            seen.is_older(b"a", Duration::ZERO) && !seen.is_older(b"a", LIFETIME) && !seen.is_older(b"b", LIFETIME)
        );
        seen.begin_look();
        assert!(seen.is_older(b"b", Duration::ZERO));
        seen.begin_look();
        assert!(!seen.is_older(b"a", Duration::ZERO), "was not there at the look before");
    }

    #[test]
    fn a_fingerprint_stays_and_tells_requests_apart() {
        assert_eq!(fingerprint(&[b"POST", b"/v1/lake/namespaces", b"{}"]), 0x8983_e203_e574_729d);
        assert_ne!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"a", b"bc"]));
    }
}
