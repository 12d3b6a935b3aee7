//! Asking each peer what it knows of itself.

use std::time::Duration;

use futures::future::join_all;
use lake_chaos::probe;
use lake_client::remote::admin;
use lake_client::secret::Secret;
use lake_client::store::Error;
use lake_proto::v1::status_response::Stage;
use lake_proto::v1::{Member, StatusResponse};

/// How long a peer may take to say what it knows.
pub const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// What a peer answered, or why it did not.
#[derive(Debug, Clone)]
pub struct Answer {
    pub endpoint: String,
    pub status: Result<StatusResponse, String>,
}

impl Answer {
    /// The id of the peer that answered.
    pub fn id(&self) -> Option<u64> {
        self.status.as_ref().ok().and_then(|s| s.self_.as_ref()).map(|m| m.id)
    }
}

/// Asks the peers named, and then those that they name. In order of their ids, those that do not answer last.
pub async fn ask_all(endpoints: Vec<String>, secret: Option<&Secret>) -> Vec<Answer> {
    let mut answers = ask(endpoints, secret).await;
    let mut named: Vec<String> = Vec::new();
    for member in statuses(&answers).flat_map(|s| s.voters.iter().chain(&s.learners)) {
        let answered = answers.iter().any(|a| a.id() == Some(member.id) || a.endpoint == member.grpc_address);
        if !answered && !named.contains(&member.grpc_address) {
            named.push(member.grpc_address.clone());
        }
    }
    answers.extend(ask(named, secret).await);
    answers.sort_by_key(|a| (a.id().is_none(), a.id()));
    answers
}

/// Asks the peers named, at once.
pub async fn ask(endpoints: Vec<String>, secret: Option<&Secret>) -> Vec<Answer> {
    join_all(endpoints.into_iter().map(|endpoint| async {
        let status = ask_one(&endpoint, secret).await;
        Answer { endpoint, status }
    }))
    .await
}

/// Asks one peer.
///
/// # Errors
/// Why it did not answer.
pub async fn ask_one(endpoint: &str, secret: Option<&Secret>) -> Result<StatusResponse, String> {
    admin::peer_status(endpoint, secret, STATUS_TIMEOUT).await.map_err(|error| unanswered(endpoint, error))
}

/// Why a peer did not answer.
pub fn unanswered(endpoint: &str, error: Error) -> String {
    match error {
        Error::Unavailable { last, .. } => format!("{endpoint} does not answer: {last}"),
        error => error.to_string(),
    }
}

/// The answers that there are.
pub fn statuses(answers: &[Answer]) -> impl Iterator<Item = &StatusResponse> {
    answers.iter().filter_map(|a| a.status.as_ref().ok())
}

/// What the peer says that leads.
pub fn leader(answers: &[Answer]) -> Option<StatusResponse> {
    let statuses: Vec<StatusResponse> = statuses(answers).cloned().collect();
    probe::leader(&statuses).cloned()
}

/// What a peer is, in the field's words.
pub fn role(status: &StatusResponse, leader: Option<u64>) -> &'static str {
    let own = status.self_.as_ref().map(|m| m.id);
    let among = |members: &[Member]| members.iter().any(|m| Some(m.id) == own);
    match status.stage() {
        Stage::Fresh => "fresh",
        Stage::Recovering => "recovering",
        Stage::Stopped => "stopped",
        Stage::Member | Stage::Unspecified if own.is_some() && own == leader => "leader",
        Stage::Member | Stage::Unspecified if among(&status.voters) => "follower",
        Stage::Member | Stage::Unspecified if among(&status.learners) => "learner",
        Stage::Member | Stage::Unspecified => "no member",
    }
}
