//! The life of a cluster, on the leader's side: peers join as learners, become voters, are removed or replaced, and the
//! leadership moves (semantics, sections 8 and 9).
//!
//! ```text
//!   fresh --- join: Identity, Adopt, one entry ---> learner --- promote: one entry ---> voter
//!   voter A, learner B --- replace: a joint membership, then its end ---> voter B, A removed
//!   voter or learner --- remove: one entry ---> removed, for ever
//! ```
//!
//! Invariants:
//! - one change at a time ([`Changes::claim`]): a second is told at once what is under way;
//! - a change begins only when the leader has applied an entry of its own term and the membership before is committed and
//!   applied; it is proposed on the condition that this is still the newest membership, so that changes that raced, here or
//!   with another leader, are refused instead of mixed;
//! - an id is used by one incarnation and never again: whoever was a member once is known to the state machine for ever
//!   ([`crate::state::roster`]);
//! - a peer votes only once it has nearly all of the log ([`MAX_LAG_ENTRIES`]);
//! - a peer that cannot apply the feature level in force is not taken in, and the level is not raised while one is
//!   ([`Changes::level_turn`]): a member that meets an entry it does not know stops;
//! - a change that would leave no majority that answers is refused, unless a removal is asked for in so many words;
//! - no joint membership stays behind: every leader that finds one ends it ([`Changes::finish_left_behind`]).
//!
//! Everything here may be asked for again: a change that was made before is answered as such. The caller's deadline limits
//! it; when the caller goes away, what was proposed still happens, and nothing else.
//!
//! Failure cases: no leader, no quorum, a peer that does not answer: Unavailable, ask again; the leadership moved: NotLeader
//! with a hint, ask there; proposed and not committed in time: unknown, ask again and see.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::raft::Precondition;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::address::{Addresses, MAX_ADDRESS_BYTES};
use super::failure::Failure;
use super::membership::{Plan, Unfit, finished, is_joint};
use super::view::{Replicated, View};
use crate::files;
use crate::log::lock;
use crate::raft::network::{Client, Network};
use crate::raft::state_machine::Published;
use crate::raft::types::{Member, Membership, Payload, StoredMembership, TypeConfig};
use crate::state::roster::MAX_KNOWN_PEERS;

/// A learner that lacks no more entries than this, and needs no snapshot for them, may become a voter, and a voter lead.
pub const MAX_LAG_ENTRIES: u64 = 1_000;
/// A member that has answered the leader within this time is alive.
pub const ALIVE: Duration = Duration::from_secs(2);
/// How long a peer that is to join may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a voter may take to show that it is there.
const REACH: Duration = Duration::from_secs(1);
/// How long the leadership may take to move.
const TRANSFER: Duration = Duration::from_secs(3);
/// How often conditions that are waited for are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How often a leader looks for a joint membership that was left behind, and how long ending it may take.
const FINISH_EVERY: Duration = Duration::from_millis(250);
const FINISH: Duration = Duration::from_secs(5);

/// Changes the membership. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Changes {
    cluster_id: String,
    view: View,
    network: Network,
    published: Arc<Published>,
    addresses: Addresses,
    running: Arc<Mutex<Option<Running>>>,
    /// One permit: see [`Changes::level_turn`].
    levels: Arc<Semaphore>,
    /// Why nothing is written any more, if that is so.
    alarm: watch::Receiver<Option<String>>,
}

/// The change under way.
#[derive(Debug)]
struct Running {
    what: String,
    since: Instant,
}

/// The right to change the membership. Dropping it lets others in.
struct Claim {
    running: Arc<Mutex<Option<Running>>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        *lock(&self.running) = None;
    }
}

/// A peer is a member.
#[derive(Debug, Clone, PartialEq)]
pub struct Joined {
    pub member: v1::Member,
    /// False: it was one before.
    pub joined: bool,
}

/// How far a learner is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promoted {
    pub voter: bool,
    /// Entries of the leader's log that it is not known to have.
    pub lag_entries: u64,
}

/// What the leader knows of another member.
#[derive(Debug, Clone, Copy)]
struct Progress {
    replicated: Replicated,
    alive: bool,
}

impl Progress {
    fn caught_up(self) -> bool {
        self.alive && self.replicated.from_log && self.replicated.lag_entries <= MAX_LAG_ENTRIES
    }

    fn describe(self) -> String {
        let entries = self.replicated.lag_entries;
        let mut lag = format!("lacks {entries} entries of the log, of which it may lack {MAX_LAG_ENTRIES}");
        if !self.replicated.from_log {
            lag.push_str(", and is to get a snapshot first");
        }
        if self.alive { lag } else { format!("has not answered for {} s, and {lag}", ALIVE.as_secs()) }
    }
}

impl Changes {
    /// Of this peer's cluster.
    pub fn new(
        cluster_id: String,
        view: View,
        network: Network,
        published: Arc<Published>,
        addresses: Addresses,
    ) -> Self {
        let levels = Arc::new(Semaphore::new(1));
        let (_, alarm) = watch::channel(None);
        Self { cluster_id, view, network, published, addresses, running: Arc::default(), levels, alarm }
    }

    /// The same, which changes nothing once there is an alarm.
    pub fn unless(self, alarm: watch::Receiver<Option<String>>) -> Self {
        Self { alarm, ..self }
    }

    // ---- what can be asked for --------------------------------------------------------------------------------

    /// Adds a fresh peer as a learner.
    ///
    /// # Errors
    /// WrongIdentity for an id or a directory that the cluster has known before, or a peer of another cluster; Unavailable
    /// if it does not answer at its address; and those of every change.
    pub async fn join(&self, wanted: v1::Member, deadline: Instant) -> Result<Joined, Failure> {
        self.lead()?;
        check_record(&wanted)?;
        let _claim = self.claim(format!("adding peer {}", wanted.id))?;
        self.admit(wanted, deadline).await
    }

    /// Makes a learner a voter, if it has caught up. How far it is, is an answer.
    ///
    /// # Errors
    /// InvalidArgument for a peer that is no member; and those of every change.
    pub async fn promote(&self, id: u64, deadline: Instant) -> Result<Promoted, Failure> {
        self.lead()?;
        let _claim = self.claim(format!("promoting peer {id}"))?;
        let (before, plan) = self.settled(deadline).await?;
        if plan.voters().contains(&id) {
            return Ok(Promoted { voter: true, lag_entries: self.progress(id).replicated.lag_entries });
        }
        let promoted = plan.promote(id).map_err(|e| self.unfit(e))?;
        let progress = self.progress(id);
        if !progress.caught_up() {
            return Ok(Promoted { voter: false, lag_entries: progress.replicated.lag_entries });
        }
        self.append(&before, promoted.uniform(), deadline).await?;
        tracing::info!(peer = id, lag = progress.replicated.lag_entries, "a learner votes now");
        Ok(Promoted { voter: true, lag_entries: progress.replicated.lag_entries })
    }

    /// Takes a voter or learner out for good. False: it was taken out before. A leader that is to be removed hands over
    /// and says who leads now.
    ///
    /// # Errors
    /// UnsafeChange for the last voter, always, and unless `force` is given when the voters that stay and answer would be
    /// no majority; InvalidArgument for a peer that never was a member; and those of every change.
    pub async fn remove(&self, id: u64, force: bool, deadline: Instant) -> Result<bool, Failure> {
        self.lead()?;
        let _claim = self.claim(format!("removing peer {id}"))?;
        let (before, plan) = self.settled(deadline).await?;
        if plan.member(id).is_none() && self.removed_before(id) {
            return Ok(false);
        }
        let voter = plan.voters().contains(&id);
        let without = plan.remove(id).map_err(|e| self.unfit(e))?;
        if voter && !force {
            self.check_majority(&without, &format!("removing peer {id}")).await?;
        }
        if id == self.view.id() {
            return Err(self.led_away(deadline).await);
        }
        self.append(&before, without.uniform(), deadline).await?;
        tracing::info!(peer = id, voter, "a member was removed");
        Ok(true)
    }

    /// Puts a fresh peer in a voter's place: joins it, waits until it has caught up, and swaps the two. False: that was
    /// done before.
    ///
    /// # Errors
    /// As [`Changes::join`] and [`Changes::remove`]; Unavailable if it has not caught up by the deadline.
    pub async fn replace(&self, old: u64, by: v1::Member, deadline: Instant) -> Result<bool, Failure> {
        self.lead()?;
        check_record(&by)?;
        let new = by.id;
        if old == new {
            return Err(Failure::invalid(format!(
                "peer {old} cannot be replaced by itself: a fresh peer needs a new id"
            )));
        }
        let _claim = self.claim(format!("replacing peer {old} by peer {new}"))?;
        let (_, plan) = self.settled(deadline).await?;
        if plan.member(old).is_none() && self.removed_before(old) && plan.voters().contains(&new) {
            return Ok(false);
        }
        if !plan.voters().contains(&old) {
            return Err(self.unfit(if plan.member(old).is_some() {
                Unfit::NoVoter(old)
            } else {
                Unfit::NoMember(old)
            }));
        }
        if old == self.view.id() {
            return Err(self.led_away(deadline).await);
        }
        self.admit(by, deadline).await?;
        // From here on something was changed: it is a learner.
        self.caught_up(new, deadline).await.map_err(Failure::after_all)?;
        let (before, plan) = self.settled(deadline).await.map_err(Failure::after_all)?;
        let swapped = plan.clone().swap(old, new).map_err(|e| self.unfit(e).after_all())?;
        let doing = format!("replacing peer {old} by peer {new}");
        self.check_majority(&swapped, &doing).await.map_err(Failure::after_all)?;
        self.append(&before, swapped.joint(&plan), deadline).await?;
        // The swap is decided: its end follows here, or by whoever leads next.
        self.settled(deadline).await.map_err(Failure::after_all)?;
        tracing::info!(old, new, "a voter was replaced");
        Ok(true)
    }

    /// Has another voter lead: the one named, or whichever has most of the log. Returns the term and the leader.
    ///
    /// # Errors
    /// InvalidArgument for a peer that does not vote, Unavailable for one that does not answer, lacks too much of the log,
    /// or has not taken over in time.
    pub async fn transfer(&self, to: Option<u64>, deadline: Instant) -> Result<(u64, v1::Member), Failure> {
        self.lead()?;
        let own = self.view.id();
        let successors = self.view.successors();
        let successor = match to {
            Some(id) if id == own => return self.leader(),
            Some(id) if !successors.contains(&id) => return Err(self.unfit(Unfit::NoVoter(id))),
            Some(id) => id,
            None => {
                let fit = successors.iter().find(|id| self.progress(**id).caught_up());
                *fit.or(successors.first()).ok_or_else(|| {
                    let what = format!("peer {own} is the only voter: there is nobody else to lead");
                    Failure::new(Kind::UnsafeChange, what)
                })?
            }
        };
        let progress = self.progress(successor);
        if !progress.caught_up() {
            let what = format!("peer {successor} cannot lead now: it {}; ask again", progress.describe());
            return Err(Failure::unavailable(what));
        }
        let ended =
            |e: &dyn std::fmt::Display| Failure::unavailable(format!("peer {own}: the consensus core ended: {e}"));
        tracing::info!(successor, "handing the leadership over, as asked");
        self.view.raft().trigger().transfer_leader(successor).await.map_err(|e| ended(&e))?;
        let until = deadline.min(clock::now() + TRANSFER);
        loop {
            match self.view.leader_id() {
                Some(leader) if leader == successor || (to.is_none() && leader != own) => return self.leader(),
                _ if clock::now() >= until => {
                    let what = format!(
                        "peer {successor} has not taken the leadership over within {} ms; ask again",
                        TRANSFER.as_millis()
                    );
                    return Err(Failure {
                        term: self.view.term(),
                        leader: self.view.leader(),
                        ..Failure::unavailable(what)
                    });
                }
                _ => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Ends joint memberships that an earlier leader left behind, until it is cancelled.
    pub(super) async fn finish_left_behind(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.keep_finishing() => {}
        }
    }

    async fn keep_finishing(&self) {
        loop {
            tokio::time::sleep(FINISH_EVERY).await;
            if self.lead().is_err() || !is_joint(self.view.metrics().membership_config.membership()) {
                continue;
            }
            let Ok(_claim) = self.claim("ending a change of the voters".to_owned()) else { continue };
            match self.settled(clock::now() + FINISH).await {
                Ok((_, plan)) => {
                    tracing::info!(voters = ?plan.voters(), "ended a change of the voters that was left behind")
                }
                Err(failure) => tracing::warn!("ending a change of the voters: {}", failure.message),
            }
        }
    }

    // ---- steps ------------------------------------------------------------------------------------------------

    fn lead(&self) -> Result<(), Failure> {
        if self.view.leader_id() == Some(self.view.id()) { Ok(()) } else { Err(self.view.not_leader()) }
    }

    fn leader(&self) -> Result<(u64, v1::Member), Failure> {
        let leader = self.view.leader();
        let leader = leader.ok_or_else(|| Failure::unavailable("the leadership is moving; ask again"))?;
        Ok((self.view.term(), leader))
    }

    fn claim(&self, what: String) -> Result<Claim, Failure> {
        if let Some(alarm) = &*self.alarm.borrow() {
            return Err(Failure::unavailable(format!("peer {}: {what}: {alarm}", self.view.id())));
        }
        let mut running = lock(&self.running);
        if let Some(running) = &*running {
            let what = format!(
                "peer {}: {what} has to wait: {} has been under way for {:.1} s, and the membership is changed by one at a \
                 time; ask again once that has ended",
                self.view.id(),
                running.what,
                clock::since(running.since).as_secs_f64()
            );
            return Err(Failure::new(Kind::ChangeUnderWay, what));
        }
        *running = Some(Running { what, since: clock::now() });
        Ok(Claim { running: self.running.clone() })
    }

    /// The membership that a change may begin from: committed, applied here, and with one set of voters. Ends a joint one.
    async fn settled(&self, deadline: Instant) -> Result<(StoredMembership, Plan), Failure> {
        loop {
            self.lead()?;
            let metrics = self.view.metrics();
            let membership = &metrics.membership_config;
            let applied = self.published.current();
            let of_own_term = applied.last.is_some_and(|id| id.leader_id.term == metrics.current_term);
            if of_own_term
                && metrics.committed_membership_config.log_id() == membership.log_id()
                && applied.membership.log_id() == membership.log_id()
            {
                let Some(end) = finished(membership.membership()) else {
                    return Ok((StoredMembership::clone(membership), Plan::of(membership.membership())));
                };
                self.append(membership, Some(end), deadline).await?;
            }
            if clock::now() >= deadline {
                let what = format!(
                    "peer {}: the membership at log entry {} is not committed and applied yet; ask again",
                    self.view.id(),
                    membership.log_id().map_or(0, |id| id.index)
                );
                return Err(Failure::unavailable(what));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Replaces the membership `before`; returns once that is committed and applied here.
    async fn append(
        &self,
        before: &StoredMembership,
        next: Option<Membership>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let next = next.ok_or_else(|| Failure::new(Kind::Internal, "a membership without voters; this is a defect"))?;
        let work = async {
            let _turn = self.addresses.turn().await?;
            let unchanged = Precondition::LastMembershipLogId { last_membership_log_id: *before.log_id() };
            let appended = self.view.raft().append_membership(next, Payload::Blank, [unchanged]).await;
            appended.map(drop).map_err(|e| self.failure(&e))
        };
        tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| {
            let what = format!("peer {}: the new membership was not committed within the deadline", self.view.id());
            Err(Failure::unknown(format!("{what}; ask again to see what became of it")))
        })
    }

    /// Held by who takes a member in, from looking at the feature level in force until the member is one; and by who raises
    /// the level, from asking the members until the entry is applied, or this peer leads no more. What an earlier leader
    /// proposed is applied before either begins. `None`: the other one has it.
    pub(super) fn level_turn(&self) -> Option<OwnedSemaphorePermit> {
        self.levels.clone().try_acquire_owned().ok()
    }

    async fn next_level_turn(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, Failure> {
        match tokio::time::timeout_at(deadline.into(), self.levels.clone().acquire_owned()).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) | Err(_) => {
                let what = format!("peer {}: the feature level is being raised; ask again", self.view.id());
                Err(Failure::unavailable(what))
            }
        }
    }

    /// Makes a peer a learner unless it is a member.
    async fn admit(&self, wanted: v1::Member, deadline: Instant) -> Result<Joined, Failure> {
        let id = wanted.id;
        let _levels = self.next_level_turn(deadline).await?;
        self.settled(deadline).await?;
        if !wanted.incarnation.is_empty()
            && let Some(member) = self.known(id, &wanted.incarnation)?
        {
            return Ok(Joined { member, joined: false });
        }
        let found =
            self.ask(&wanted, |mut client| async move { client.identity(v1::IdentityRequest {}).await }).await?;
        let at = &wanted.raft_address;
        if found.peer_id != id || (!wanted.incarnation.is_empty() && found.incarnation != wanted.incarnation) {
            let what = format!(
                "at {at} there is peer {} with incarnation {:?}, not peer {id}{}: correct the address or the id",
                found.peer_id,
                found.incarnation,
                if wanted.incarnation.is_empty() {
                    String::new()
                } else {
                    format!(" with incarnation {:?}", wanted.incarnation)
                }
            );
            return Err(Failure::invalid(what));
        }
        if let Some(member) = self.known(id, &found.incarnation)? {
            return Ok(Joined { member, joined: false });
        }
        if !found.cluster_id.is_empty() && found.cluster_id != self.cluster_id {
            let what = format!(
                "peer {id} belongs to cluster {} and cannot join {}; start it with an empty data directory",
                found.cluster_id, self.cluster_id
            );
            return Err(Failure::new(Kind::WrongIdentity, what));
        }
        let level = self.published.current().state.feature_level();
        let supported = found.supported_feature_level.max(1);
        if supported < level {
            let what = format!(
                "peer {id} supports feature level {supported}, and cluster {} is at {level}: start it with the build that \
                 the leader runs",
                self.cluster_id
            );
            return Err(Failure::invalid(what));
        }
        // A peer that began embedded stands in the membership without addresses, and the new one must find its leader.
        let own = self.view.identity().to_wire();
        if self.view.own_record() != Some(Member::from(own.clone())) {
            self.addresses.replace(own, deadline).await?;
        }
        let (before, plan) = self.settled(deadline).await?;
        let record = Member { incarnation: found.incarnation.clone(), ..Member::from(wanted.clone()) };
        let joined = plan.join(id, record.clone()).map_err(|e| self.unfit(e))?;
        let adopt =
            v1::AdoptRequest { cluster_id: self.cluster_id.clone(), to_id: id, to_incarnation: found.incarnation };
        self.ask(&wanted, |mut client| async move { client.adopt(adopt).await }).await?;
        self.append(&before, joined.uniform(), deadline).await?;
        tracing::info!(
            peer = id,
            raft = record.raft_address,
            grpc = record.grpc_address,
            "a peer has joined as a learner"
        );
        Ok(Joined { member: record.to_wire(id), joined: true })
    }

    /// The member of this id and incarnation, if there is one.
    ///
    /// # Errors
    /// WrongIdentity if the id is, or was, another's, or the directory has had another id.
    fn known(&self, id: u64, incarnation: &str) -> Result<Option<v1::Member>, Failure> {
        let wrong = |what: String| Err(Failure::new(Kind::WrongIdentity, what));
        let state = &self.published.current().state;
        if let Some(known) = state.known_peer(id) {
            if known.removed {
                return wrong(removed(id, &self.cluster_id, self.next_id()));
            }
            if *known.incarnation != *incarnation {
                return wrong(format!(
                    "peer {id} is a member of cluster {} with incarnation {:?}, and this one has {incarnation:?}: it has \
                     lost its data directory, and with it what it promised. It cannot come back as itself: {}. The next \
                     free id is {}",
                    self.cluster_id,
                    known.incarnation,
                    files::REJOIN,
                    self.next_id()
                ));
            }
            return Ok(self.view.member(id));
        }
        if let Some((other, _)) = state.known_peers().find(|(_, known)| *known.incarnation == *incarnation) {
            return wrong(format!("the data directory of peer {id} has been peer {other}'s: start with an empty one"));
        }
        if state.known_peers().count() >= MAX_KNOWN_PEERS {
            return wrong(format!("cluster {} has had {MAX_KNOWN_PEERS} peers, which is the most", self.cluster_id));
        }
        Ok(None)
    }

    fn next_id(&self) -> u64 {
        self.published.current().state.next_peer_id()
    }

    fn removed_before(&self, id: u64) -> bool {
        self.published.current().state.known_peer(id).is_some_and(|known| known.removed)
    }

    /// Asks those who would vote whether they are there: what a leader heard last says nothing of a peer that just died, and
    /// a change that no majority can commit stops every write.
    async fn check_majority(&self, plan: &Plan, doing: &str) -> Result<(), Failure> {
        let asked = plan.voters().iter().filter_map(|id| plan.member(*id).map(|member| self.answers(*id, member)));
        let alive: BTreeSet<u64> = futures::future::join_all(asked).await.into_iter().flatten().collect();
        if plan.has_majority(&alive) {
            return Ok(());
        }
        let what = format!(
            "{doing} would leave the voters {:?}, of which only {alive:?} answer: no majority, and nothing could be written. \
             Bring others back first, or remove those that are gone for good",
            plan.voters()
        );
        Err(Failure::new(Kind::UnsafeChange, what))
    }

    async fn answers(&self, id: u64, member: &Member) -> Option<u64> {
        if id == self.view.id() {
            return Some(id);
        }
        let mut client = self.network.transport.client(id, &member.raft_address).ok()?;
        let answer = tokio::time::timeout(REACH, client.identity(v1::IdentityRequest {})).await.ok()?.ok()?;
        (answer.into_inner().incarnation == member.incarnation).then_some(id)
    }

    /// What this leader knows of the other members; nothing unless this peer leads.
    pub fn progress_of_others(&self) -> Vec<v1::Progress> {
        if self.lead().is_err() {
            return Vec::new();
        }
        let (voters, learners) = self.view.members();
        let others = voters.into_iter().chain(learners).map(|member| member.id).filter(|id| *id != self.view.id());
        let told = others.map(|id| {
            let progress = self.progress(id);
            v1::Progress {
                id,
                lag_entries: progress.replicated.lag_entries,
                needs_snapshot: !progress.replicated.from_log,
                answers: progress.alive,
                unheard: !progress.replicated.known,
            }
        });
        told.collect()
    }

    fn progress(&self, id: u64) -> Progress {
        Progress { replicated: self.view.replicated(id), alive: self.view.alive(ALIVE).contains(&id) }
    }

    async fn caught_up(&self, id: u64, deadline: Instant) -> Result<(), Failure> {
        loop {
            self.lead()?;
            let progress = self.progress(id);
            if progress.caught_up() {
                return Ok(());
            }
            if clock::now() >= deadline {
                let what =
                    format!("peer {id} is a learner and has not caught up: it {}; ask again", progress.describe());
                return Err(Failure::unavailable(what));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// This leader is to go: has another lead, and says who.
    async fn led_away(&self, deadline: Instant) -> Failure {
        match self.transfer(None, deadline).await {
            Ok(_) => self.view.not_leader(),
            Err(failure) => failure,
        }
    }

    async fn ask<T, F>(&self, member: &v1::Member, call: impl FnOnce(Client) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let transport = &self.network.transport;
        let at = transport.resolve(member.id, &member.raft_address).to_owned();
        let client = transport.client(member.id, &member.raft_address).map_err(Failure::invalid)?;
        let what = match tokio::time::timeout(ANSWER, call(client)).await {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => match lake_proto::status::detail(&status) {
                Some(detail) => {
                    return Err(Failure::new(
                        detail.kind(),
                        format!("peer {} at {at}: {}", member.id, status.message()),
                    ));
                }
                None => status.message().to_owned(),
            },
            Err(_) => format!("no answer within {} s", ANSWER.as_secs()),
        };
        Err(Failure::unavailable(format!("peer {} at {at}: {what}; start it, then ask again", member.id)))
    }

    fn unfit(&self, unfit: Unfit) -> Failure {
        match unfit {
            Unfit::LastVoter(_) => Failure::new(Kind::UnsafeChange, unfit.to_string()),
            Unfit::NoMember(id) if self.removed_before(id) => {
                Failure::new(Kind::WrongIdentity, removed(id, &self.cluster_id, self.next_id()))
            }
            unfit => Failure::invalid(unfit),
        }
    }

    fn failure(&self, error: &RaftError<TypeConfig, ClientWriteError<TypeConfig>>) -> Failure {
        let what = format!("peer {}: changing the membership: {error}", self.view.id());
        match error {
            RaftError::APIError(ClientWriteError::ForwardToLeader(_)) => self.view.not_leader(),
            RaftError::APIError(ClientWriteError::LogEntryDiscarded(_)) | RaftError::Fatal(_) => Failure::unknown(what),
            RaftError::APIError(
                ClientWriteError::PreconditionFailed(_)
                | ClientWriteError::ChangeMembershipError(
                    ChangeMembershipError::InProgress(_) | ChangeMembershipError::UncommittedLeaderLog(_),
                ),
            ) => Failure::new(Kind::ChangeUnderWay, what),
            RaftError::APIError(ClientWriteError::ChangeMembershipError(_)) => Failure::new(Kind::Internal, what),
        }
    }
}

/// What a peer is told that was removed.
pub(super) fn removed(id: u64, cluster_id: &str, next_id: u64) -> String {
    format!(
        "peer {id} was removed from cluster {cluster_id}, and its id is never used again; to bring this machine back, start \
         a fresh peer with an empty data directory and an id that the cluster has not used yet (from {next_id} on), and \
         have it join"
    )
}

fn check_record(member: &v1::Member) -> Result<(), Failure> {
    let id = member.id;
    if id == 0 {
        return Err(Failure::invalid("a peer's id is above 0"));
    }
    for address in [&member.raft_address, &member.grpc_address] {
        if address.is_empty() || address.len() > MAX_ADDRESS_BYTES {
            return Err(Failure::invalid(format!(
                "peer {id}: both addresses are needed, of 1 to {MAX_ADDRESS_BYTES} bytes"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learner_that_answers_may_lack_a_thousand_entries_and_not_one_more() {
        let progress = |lag_entries, from_log, alive| {
            let known = true;
            Progress { replicated: Replicated { lag_entries, from_log, known }, alive }
        };
        for lag in [0, MAX_LAG_ENTRIES] {
            assert!(progress(lag, true, true).caught_up(), "{lag}");
            assert!(!progress(lag, false, true).caught_up(), "{lag}, which it cannot have without a snapshot");
            assert!(!progress(lag, true, false).caught_up(), "{lag}, which it had when it was last heard of");
        }
        for lag in [MAX_LAG_ENTRIES + 1, u64::MAX] {
            let behind = progress(lag, true, true);
            assert!(!behind.caught_up(), "{lag}");
            assert_eq!(behind.describe(), format!("lacks {lag} entries of the log, of which it may lack 1000"));
        }
    }
}
