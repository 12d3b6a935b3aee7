//! Saving a running cluster's state: the bytes of a snapshot file, as one peer sends them.
//!
//! Failure cases: a stream that breaks, or ends early. What came then is no snapshot: the file's own end is missing, and
//! whoever keeps the bytes must look for it.

use std::time::Duration;

use bytes::Bytes;
use lake_proto::v1;
use lake_proto::v1::snapshots_client::SnapshotsClient;
use tonic::{Status, Streaming};

use super::admin::call;
use super::connections::{connection, request};
use super::wire_options;
use crate::secret::Secret;
use crate::store::{Applied, Consistency, Error, ReadOptions};

/// How long a peer may send nothing.
pub const MAX_STALL: Duration = Duration::from_secs(30);

/// A snapshot that is on its way. Dropping it ends the call.
#[derive(Debug)]
pub struct Saving {
    endpoint: String,
    stream: Streaming<v1::SaveResponse>,
}

/// Has the peer at `endpoint` send its state, as fresh as is asked for. `timeout` is for the first answer.
///
/// # Errors
/// `Unavailable` if the peer does not answer in time or cannot vouch for the state; its refusal, also while it sends one to
/// somebody else.
pub async fn save(
    endpoint: &str,
    secret: Option<&Secret>,
    consistency: Consistency,
    timeout: Duration,
) -> Result<Saving, Error> {
    let options = ReadOptions { consistency, ..ReadOptions::default() };
    let stream = call(endpoint, DOING, timeout, async {
        let connection = connection(endpoint).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let mut client = SnapshotsClient::new(connection.connect_lazy());
        let message = v1::SaveRequest { options: Some(wire_options(options)) };
        Ok(client.save(request(message, timeout, secret)?).await?.into_inner())
    })
    .await
    .map_err(changed_nothing)?;
    Ok(Saving { endpoint: endpoint.to_owned(), stream })
}

const DOING: &str = "saving a snapshot";

impl Saving {
    /// The next bytes of the file; `None` at the end of what the peer sends.
    ///
    /// # Errors
    /// The stream broke, or nothing came for [`MAX_STALL`]: begin again, there or at another peer.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        call(&self.endpoint, DOING, MAX_STALL, async {
            Ok(self.stream.message().await?.map(|response| response.chunk))
        })
        .await
        .map_err(changed_nothing)
    }
}

fn changed_nothing(error: Error) -> Error {
    match error {
        Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, .. } => {
            Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, applied: Applied::No }
        }
        error => error,
    }
}
