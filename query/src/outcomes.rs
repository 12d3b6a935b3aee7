//! What is kept in the metadata of operations that a client may ask for again: what they have in common, whether they came
//! by REST ([`crate::rest::once`]) or as SQL ([`crate::sql::once`]). Semantics, section 4.
//!
//! An outcome is a JSON object in which `at_ms` says when it was left. It is kept for at least [`LIFETIME`], and forgotten
//! after twice that.

use std::convert::Infallible;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lake_client::metadata::MetadataWriter;
use serde::Deserialize;

/// How long a client may ask for an operation again.
pub const LIFETIME: Duration = Duration::from_secs(60 * 60);
/// From one look for outcomes that have been kept long enough to the next.
const SWEEP_EVERY: Duration = Duration::from_secs(10 * 60);
/// How long one may take.
const SWEEP_WITHIN: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Left {
    at_ms: u64,
}

/// Forgets outcomes of these domains that have been kept for twice `lifetime`, until it is dropped.
pub async fn sweep(writer: &MetadataWriter, domains: &[&str], lifetime: Duration) -> Infallible {
    // Nodes that were started together do not look together.
    let mut pause = SWEEP_EVERY.mul_f64(rand::random_range(0.1..1.0));
    let kept_for_ms = 2 * u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX / 2);
    let old = |kept: &[u8]| {
        serde_json::from_slice::<Left>(kept).is_ok_and(|left| now_ms().saturating_sub(left.at_ms) > kept_for_ms)
    };
    loop {
        tokio::time::sleep(pause).await;
        pause = SWEEP_EVERY;
        for domain in domains {
            match writer.forget_outcomes(domain, old, Instant::now() + SWEEP_WITHIN).await {
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
    fn a_fingerprint_stays_and_tells_requests_apart() {
        assert_eq!(fingerprint(&[b"POST", b"/v1/lake/namespaces", b"{}"]), 0x8983_e203_e574_729d);
        assert_ne!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"a", b"bc"]));
    }
}
