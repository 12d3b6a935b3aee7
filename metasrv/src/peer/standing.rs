//! How a peer learns that it was removed, and what it does then (semantics, section 9).
//!
//! The others stop talking to a removed peer, often before it has the entry that removed it. So a peer that follows, and has
//! been called by no leader for [`SILENCE`], asks every other member that it knows what it is to the cluster. One that has
//! applied the removal says so; that is final, since ids are never used again. The peer then ends its consensus core, answers
//! every call with the reason, and has its process end with it.
//!
//! A removed peer does no harm before it knows: the others refuse its calls, and pre-votes raise no term.
//!
//! Limits: one round of questions at a time, of [`ANSWER`] at most, [`AGAIN`] apart.
//! Failure cases: nobody answers: it asks again for as long as it hears of no leader.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lake_proto::v1;
use lake_proto::v1::standing_response::Standing as Answer;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::changes::removed;
use super::note_end;
use super::view::View;
use crate::raft::network::Network;
use crate::raft::state_machine::Published;
use crate::raft::types::Member;

/// A follower that hears nothing for this long asks.
pub const SILENCE: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_millis(250);
const ANSWER: Duration = Duration::from_millis(500);
const AGAIN: Duration = Duration::from_secs(1);

/// What a peer knows of its own standing.
#[derive(Debug)]
pub struct Standing {
    /// Why this peer must not serve any more.
    over: OnceLock<String>,
}

impl Standing {
    /// As a member, as far as it knows.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { over: OnceLock::new() })
    }

    /// Why this peer must not serve any more, if it was removed, or holds another state than the majority
    /// ([`super::agreement`]).
    pub fn over(&self) -> Option<&str> {
        self.over.get().map(String::as_str)
    }

    /// From now on it must not. The first word counts.
    pub(super) fn end(&self, why: &str) {
        let _ = self.over.set(why.to_owned());
    }
}

/// The task that finds it out.
pub(super) struct Inquiry {
    pub standing: Arc<Standing>,
    pub cluster_id: String,
    pub view: View,
    pub network: Network,
    pub published: Arc<Published>,
    pub failed: watch::Sender<Option<String>>,
}

impl Inquiry {
    pub(super) async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.until_removed() => {}
        }
    }

    async fn until_removed(&self) {
        // Those that have removed it may have taken in others since.
        let mut next = self.view.id().saturating_add(1);
        loop {
            tokio::time::sleep(EVERY).await;
            if self.applied_removal() {
                break;
            }
            let silent = self.view.silence() >= SILENCE;
            if !silent || self.view.leader_id() == Some(self.view.id()) {
                continue;
            }
            if let Some(theirs) = self.ask_all().await {
                next = next.max(theirs);
                break;
            }
            tokio::time::sleep(AGAIN).await;
        }
        let next = next.max(self.published.current().state.next_peer_id());
        let what = removed(self.view.id(), &self.cluster_id, next);
        tracing::error!("{what}");
        // Whoever sees the core ended is to find the reason there.
        self.standing.end(&what);
        note_end(&self.failed, what);
        if let Err(e) = self.view.raft().shutdown().await {
            tracing::warn!("ending the consensus core: {e}");
        }
    }

    /// Whether this peer has applied its own removal.
    fn applied_removal(&self) -> bool {
        let applied = self.published.current();
        applied.state.known_peer(self.view.id()).is_some_and(|known| known.removed)
    }

    /// From which id on none was ever a peer's, if somebody says that this one was removed.
    async fn ask_all(&self) -> Option<u64> {
        let (voters, learners) = self.view.members();
        let others = voters.into_iter().chain(learners).filter(|member| member.id != self.view.id());
        let asked = others.map(|member| self.ask(member));
        let answers = futures::future::join_all(asked).await.into_iter().flatten();
        answers.filter(|answer| answer.standing() == Answer::Removed).map(|answer| answer.next_peer_id).max()
    }

    async fn ask(&self, member: v1::Member) -> Option<v1::StandingResponse> {
        let header = self.network.sender.header(member.id, &Member::from(member.clone()));
        let mut client = self.network.transport.client(member.id, &member.raft_address).ok()?;
        let request = v1::StandingRequest { header: Some(header) };
        let answer = tokio::time::timeout(ANSWER, client.standing(request)).await.ok()?.ok()?;
        Some(answer.into_inner())
    }
}
