//! Calls to one named peer: its status, and founding a cluster. For operators' tools and supervisors.

use std::time::Duration;

use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::{status, v1};
use tonic::Status;

use super::{connection, describe, request};
use crate::secret::Secret;
use crate::store::{Applied, Error};

/// What the peer at `endpoint` knows.
///
/// # Errors
/// `Unavailable` if it does not answer within `timeout`, or the peer's refusal.
pub async fn peer_status(
    endpoint: &str,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<v1::StatusResponse, Error> {
    call(endpoint, "asking for its status", timeout, async {
        let mut client = client(endpoint)?;
        Ok(client.status(request(v1::StatusRequest {}, timeout, secret)?).await?.into_inner())
    })
    .await
}

/// Founds a cluster of `founders` through the fresh peer at `endpoint`. Safe to repeat with the same founders.
///
/// # Errors
/// `Unavailable` if it does not answer within `timeout`, or the peer's refusal.
pub async fn init(
    endpoint: &str,
    founders: Vec<v1::Member>,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<v1::InitResponse, Error> {
    call(endpoint, "founding the cluster", timeout, async {
        let mut client = client(endpoint)?;
        Ok(client.init(request(v1::InitRequest { founders }, timeout, secret)?).await?.into_inner())
    })
    .await
}

fn client(endpoint: &str) -> Result<ClusterClient<tonic::transport::Channel>, Status> {
    let connection = connection(endpoint).map_err(|e| Status::invalid_argument(e.to_string()))?;
    Ok(ClusterClient::new(connection.connect_lazy()))
}

async fn call<T>(
    endpoint: &str,
    doing: &str,
    timeout: Duration,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, Error> {
    let started = std::time::Instant::now();
    let doing = format!("{endpoint}: {doing}");
    let (last, refused) = match tokio::time::timeout(timeout, answer).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(s)) => {
            (describe(&s), status::detail(&s).is_some_and(|d| d.kind() != v1::error_detail::Kind::Unavailable))
        }
        Err(_) => (format!("no answer within {:.1} s", timeout.as_secs_f64()), false),
    };
    if refused {
        return Err(Error::Refused { doing, message: last });
    }
    Err(Error::Unavailable {
        doing,
        endpoints: vec![endpoint.to_owned()],
        attempts: 1,
        elapsed: started.elapsed(),
        leader: "no leader asked for".to_owned(),
        last,
        applied: Applied::Unknown,
    })
}
