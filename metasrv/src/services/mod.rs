//! The gRPC services: they turn messages into calls on a [`crate::peer::Peer`] and back, and hold no logic of their own.
//!
//! - [`kv`] with [`pipeline`], [`watch`], [`cluster`], [`snapshots`]: for clients; [`raft`]: for the other peers;
//! - [`leases`], [`sessions`] with [`keep_alive`], [`scopes`], [`quotas`]: for clients, too;
//! - [`nodes`], [`shards`]: for query nodes, and who has which shard;
//! - [`streams`]: who serves a stream of answers, and for how long; [`framed`]: how large messages go out on one; [`counting`]: what
//!   of answers is on its way;
//! - this file: the secret's check, who calls and until when, and the member that serves.

pub mod cluster;
pub mod counting;
pub mod framed;
pub mod keep_alive;
pub mod kv;
pub mod leases;
pub mod nodes;
pub mod pipeline;
pub mod quotas;
pub mod raft;
pub mod scopes;
pub mod sessions;
pub mod shards;
pub mod snapshots;
pub mod streams;
pub mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_proto::status::status;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::{CLUSTER_METADATA_KEY, SECRET_METADATA_KEY};
use tonic::metadata::MetadataMap;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use lake_client::clock;
use lake_client::secret::Secret;

use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::Call;

/// A call without a deadline gets this one.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);
/// The longest a call may wait.
pub const MAX_DEADLINE: Duration = Duration::from_secs(300);
/// Answered this much before the caller's deadline, so that the answer, which says more, comes first.
const ANSWER_EARLY: Duration = Duration::from_millis(50);

/// Refuses calls without the cluster secret, if there is one.
#[derive(Debug, Clone)]
pub struct CheckSecret {
    expected: Option<Secret>,
}

impl CheckSecret {
    /// Checks for this secret; lets everything pass without one.
    pub fn new(secret: Option<&Secret>) -> Self {
        Self { expected: secret.cloned() }
    }
}

impl Interceptor for CheckSecret {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(expected) = &self.expected else { return Ok(request) };
        let given = request.metadata().get(SECRET_METADATA_KEY).map(|value| value.as_bytes());
        match given {
            Some(given) if expected.matches_bearer(given) => Ok(request),
            Some(_) => Err(refuse("the cluster secret is wrong: use the one that the peers were given")),
            None => Err(refuse("this cluster has a secret: give the one that the peers were given")),
        }
    }
}

fn refuse(message: &str) -> Status {
    status(Kind::Unauthenticated, Applied::NotApplied, message)
}

/// The member that serves, if the caller means its cluster.
///
/// # Errors
/// Unavailable while the peer is fresh, WrongIdentity if the caller means another cluster.
pub fn serving(peer: &Peer, metadata: &MetadataMap) -> Result<Arc<Member>, Failure> {
    let member = peer.serving()?;
    match metadata.get(CLUSTER_METADATA_KEY) {
        Some(meant) if meant.as_bytes() != member.cluster_id.as_bytes() => {
            let what = format!(
                "the request is for cluster {}, and peer {} belongs to cluster {}: correct the endpoints",
                String::from_utf8_lossy(meant.as_bytes()),
                member.identity.id,
                member.cluster_id
            );
            Err(Failure::new(Kind::WrongIdentity, what))
        }
        _ => Ok(member),
    }
}

/// Who makes a call, and when it has to be answered.
pub fn call<T>(peer: &Peer, request: &Request<T>) -> Call {
    Call { caller: peer.callers.at(request.remote_addr()), deadline: deadline(request.metadata()) }
}

/// When a call has to be answered: a little before its `grpc-timeout`.
pub fn deadline(metadata: &MetadataMap) -> Instant {
    let asked = metadata.get("grpc-timeout").and_then(|v| v.to_str().ok()).and_then(parse_timeout);
    let timeout = asked.unwrap_or(DEFAULT_DEADLINE).min(MAX_DEADLINE);
    clock::now() + timeout.saturating_sub(ANSWER_EARLY.min(timeout / 4))
}

/// The value of a `grpc-timeout` header: up to 8 digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("3S"), Some(Duration::from_secs(3)));
        assert_eq!(parse_timeout("99999999u"), Some(Duration::from_micros(99_999_999)));
        for bad in ["", "m", "12", "1x", "123456789m", "-1S", "1é"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_the_secret_itself_opens_the_door() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let with = |value: Option<&str>| {
            let mut request = Request::new(());
            if let Some(value) = value {
                request.metadata_mut().insert(SECRET_METADATA_KEY, value.parse().unwrap());
            }
            CheckSecret::new(Some(&secret)).call(request).map(drop).map_err(|status| status.code())
        };
        assert_eq!(with(Some("Bearer 0123456789abcdef")), Ok(()));
        for wrong in [None, Some("Bearer 0123456789abcdeF"), Some("0123456789abcdef"), Some("Bearer ")] {
            assert_eq!(with(wrong), Err(tonic::Code::Unauthenticated));
        }
        assert!(CheckSecret::new(None).call(Request::new(())).is_ok());
    }
}
