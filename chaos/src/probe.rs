//! Asking processes: does it serve, what does it know, who leads. Every question has a deadline.

use std::time::Duration;

use lake_client::remote::admin;
use lake_client::secret::Secret;
use lake_proto::v1::StatusResponse;
use lake_proto::v1::status_response::Stage;
use tokio::time::{Instant, sleep};
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::{Error, Result};

/// How long one question may take.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// From one question to the next while waiting.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// What the peer at `grpc_address` knows.
///
/// # Errors
/// It did not answer in time; the message says why.
pub async fn peer(grpc_address: &str) -> Result<StatusResponse, String> {
    peer_of(grpc_address, None).await
}

/// The same of a cluster that may have a secret.
///
/// # Errors
/// As [`peer`].
pub async fn peer_of(grpc_address: &str, secret: Option<&Secret>) -> Result<StatusResponse, String> {
    admin::peer_status(grpc_address, secret, ASK_TIMEOUT).await.map_err(|e| e.to_string())
}

/// Whether the gRPC server at `address` says that it serves.
///
/// # Errors
/// It did not answer in time, or does not serve; the message says which.
pub async fn serves(address: &str) -> Result<(), String> {
    let ask = async {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|e| e.to_string())?;
        let channel = endpoint.connect_timeout(ASK_TIMEOUT).connect().await.map_err(|e| format!("{address}: {e}"))?;
        let answer = HealthClient::new(channel)
            .check(HealthCheckRequest { service: String::new() })
            .await
            .map_err(|e| format!("{address}: {}", e.message()))?;
        match answer.into_inner().status() {
            ServingStatus::Serving => Ok(()),
            other => Err(format!("{address} says {}", other.as_str_name())),
        }
    };
    tokio::time::timeout(ASK_TIMEOUT, ask).await.unwrap_or_else(|_| Err(format!("{address} does not answer")))
}

/// The peer that leads, of those that answered: it says so itself, and nobody does in a higher term.
pub fn leader(answers: &[StatusResponse]) -> Option<&StatusResponse> {
    answers
        .iter()
        .filter(|a| a.stage() == Stage::Member)
        .filter(|a| matches!((&a.leader, &a.self_), (Some(leader), Some(own)) if leader.id == own.id))
        .max_by_key(|a| a.term)
        .filter(|best| answers.iter().all(|a| a.leader.is_none() || a.term <= best.term))
}

/// Asks again and again until `check` has an answer. Its errors say what was seen instead.
///
/// # Errors
/// [`Error::Timeout`] with the last thing seen.
pub async fn until<T, F>(what: &str, timeout: Duration, mut check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T, String>>,
{
    let started = Instant::now();
    let mut last = "no answer yet".to_owned();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        match tokio::time::timeout(left, check()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(seen)) => last = seen,
            Err(_) => {}
        }
        if started.elapsed() >= timeout {
            return Err(Error::Timeout { what: what.to_owned(), waited: started.elapsed(), last });
        }
        sleep(ASK_AGAIN.min(timeout.saturating_sub(started.elapsed()))).await;
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::v1::Member;

    use super::*;

    fn says(id: u64, term: u64, leader: Option<u64>) -> StatusResponse {
        let member = |id| Member { id, ..Member::default() };
        StatusResponse {
            self_: Some(member(id)),
            stage: Stage::Member as i32,
            term,
            leader: leader.map(member),
            ..StatusResponse::default()
        }
    }

    #[test]
    fn the_leader_says_so_itself_in_the_highest_term() {
        let of = |answers: &[StatusResponse]| leader(answers).and_then(|a| a.self_.as_ref()).map(|m| m.id);
        assert_eq!(of(&[says(1, 4, Some(1)), says(2, 5, Some(2)), says(3, 5, Some(2))]), Some(2));
        assert_eq!(of(&[says(1, 4, Some(1)), says(3, 5, Some(2))]), None);
        assert_eq!(of(&[says(2, 5, None), says(3, 5, None)]), None);
        assert_eq!(of(&[]), None);
    }

    #[tokio::test]
    async fn waiting_ends_with_what_was_seen_last() {
        let mut asked = 0;
        let third = until("the third answer", Duration::from_secs(10), || {
            asked += 1;
            let answer = if asked == 3 { Ok(asked) } else { Err(format!("answer {asked}")) };
            async move { answer }
        });
        assert_eq!(third.await.unwrap(), 3);
        let never = until("a sign", Duration::from_millis(60), || async { Err::<(), _>("silence".to_owned()) });
        let message = never.await.unwrap_err().to_string();
        assert!(message.contains("a sign") && message.contains("silence"), "{message}");
        let hung = until("a hung one", Duration::from_millis(60), std::future::pending::<Result<(), String>>);
        assert!(matches!(hung.await, Err(Error::Timeout { .. })));
    }

    #[tokio::test]
    async fn a_port_without_a_server_does_not_serve() {
        let port = crate::ports::reserve().unwrap();
        assert!(serves(&port.loopback()).await.unwrap_err().contains(&port.loopback()));
        let mute = std::net::TcpListener::bind(port.loopback()).unwrap();
        assert!(serves(&port.loopback()).await.is_err());
        drop(mute);
    }
}
