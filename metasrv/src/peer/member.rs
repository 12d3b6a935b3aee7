//! A peer that belongs to a cluster: its consensus core runs, and it serves reads and transactions.
//!
//! - Reads take the newest published state once their consistency allows it; nothing is served before the peer has
//!   recovered what it had applied before a restart.
//! - Commands are validated, counted against the limits on what is in flight, proposed, and answered with what they did.
//!   An error says whether the command may have been applied.
//!
//! Limits: [`MAX_PROPOSALS`] commands of [`MAX_PROPOSED_BYTES`] in flight, of which each caller has its part
//! ([`super::shares`]); beyond: Overloaded.

use std::sync::Arc;
use std::time::Duration;

use lake_client::clock;
use lake_client::store::{Consistency, ReadOptions, Snapshot};
use lake_proto::coordination::Stamp;
use lake_proto::kv::{KeyValue, Txn, TxnResult, validate_key, validate_keys, validate_prefix};
use lake_proto::limits::MAX_TXN_BYTES;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use openraft::errors::{ClientWriteError, ForwardReason, ForwardToLeader};
use openraft::metrics::WaitError;
use openraft::{Config as RaftConfig, SnapshotPolicy};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::address::Addresses;
use super::agreement::Agreement;
use super::changes::Changes;
use super::counters::{Counters, Guards};
use super::duties::{self, Duties};
use super::failure::Failure;
use super::latencies::{self, Latencies};
use super::nodes::Nodes;
use super::pages::{Page, Pages};
use super::placement::Placement;
use super::procedures::{self, Procedures};
use super::reads::{self, ReadIndex};
use super::shares::{Call, Held, Pool, Refused, Resource};
use super::snapshot_turns::SnapshotTurns;
use super::standing::{Inquiry, Standing};
use super::succession::Succession;
use super::view::View;
use super::watchdog::Watchdog;
use super::watches::{Watcher, Watches};
use super::{Ends, Identity, Settings};
use crate::error::Error;
use crate::log::{Health, Log};
use crate::planted::{self, Bug};
use crate::raft::log_store::LogStore;
use crate::raft::network::{Network, Sender, Transport};
use crate::raft::state_machine::{Applied, Published, StateMachine};
use crate::raft::types::{Answer, Command, Raft, Reply, TypeConfig};
use crate::snapshot::SnapshotStore;
use crate::state::command::{self as state, Action, Outcome};

/// Commands in flight at once.
pub const MAX_PROPOSALS: usize = 4096;
/// Bytes of commands in flight at once.
pub const MAX_PROPOSED_BYTES: usize = 256 << 20;
/// How long a leader that stops waits for another to take over.
const HANDOVER: Duration = Duration::from_millis(500);
/// How long that other may take to show that it can be reached, and how often it is asked again.
const REACH: Duration = Duration::from_millis(100);
/// How long a peer that stops waits for the end of a snapshot that is being written.
const GIVE_UP: Duration = Duration::from_secs(3);

/// A peer that belongs to a cluster.
pub struct Member {
    pub identity: Arc<Identity>,
    pub cluster_id: String,
    pub view: View,
    pub log: Log,
    pub network: Network,
    pub published: Arc<Published>,
    pub pages: Arc<Pages>,
    pub reads: Arc<ReadIndex>,
    pub watches: Arc<Watches>,
    pub addresses: Addresses,
    pub changes: Changes,
    pub standing: Arc<Standing>,
    pub succession: Succession,
    pub snapshots: SnapshotStore,
    pub snapshot_turns: SnapshotTurns,
    pub duties: Duties,
    pub nodes: Nodes,
    pub procedures: Procedures,
    pub placement: Placement,
    pub counters: Counters,
    pub latencies: Latencies,
    /// The highest feature level that this peer can apply.
    pub feature_level: u32,
    recovered: watch::Receiver<bool>,
    /// Why nothing is proposed any more, if that is so.
    alarm: watch::Receiver<Option<String>>,
    proposals: Pool,
    proposed_bytes: Pool,
    stop: CancellationToken,
    tasks: std::sync::Mutex<JoinSet<()>>,
}

impl Member {
    /// Starts the consensus core and the tasks around it. Problems that end the peer go to `ends`.
    pub(super) async fn start(
        identity: Arc<Identity>,
        cluster_id: String,
        settings: &Settings,
        transport: Transport,
        log: Log,
        state_machine: StateMachine,
        ends: Ends,
    ) -> Result<Arc<Self>, Error> {
        let alarm = ends.verdicts.alarm()?;
        let latencies = Latencies::new().map_err(|e| Error::Stopped(format!("preparing the metrics: {e}")))?;
        let published = state_machine.published();
        let snapshots = state_machine.snapshots();
        let sender =
            Sender { cluster_id: cluster_id.clone(), id: identity.id, incarnation: identity.incarnation.clone() };
        let network = Network::new(transport, sender);
        let config = raft_config(&cluster_id, settings)?;
        let raft = Raft::new(identity.id, Arc::new(config), network.clone(), LogStore::new(log.clone()), state_machine)
            .await
            .map_err(|e| Error::Stopped(format!("starting the consensus core: {e}")))?;
        let view = View::new(raft, identity.clone(), settings.timing.election_timeout_max);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();

        let (reads, rounds) = ReadIndex::new(view.clone(), network.clone(), stop.clone());
        tasks.spawn(rounds);
        let (succession, asking) = Succession::new(view.clone(), settings.timing.election_timeout_max, stop.clone());
        tasks.spawn(asking);
        let pages = Arc::new(Pages::new(settings.page_life));
        let watches = Watches::new(published.clone(), view.clone(), cluster_id.clone(), &stop);
        tasks.spawn(watches.clone().run());
        let (recovered_sender, recovered) = watch::channel(false);
        tasks.spawn(recover(view.clone(), recovered_sender, stop.clone()));
        let addresses = Addresses::new(view.clone(), network.clone());
        tasks.spawn(addresses.clone().keep_own(stop.clone()));
        if let Some(alarm) = &alarm {
            tracing::error!("{alarm}");
        }
        let (alarm_sender, alarm) = watch::channel(alarm);
        let changes =
            Changes::new(cluster_id.clone(), view.clone(), network.clone(), published.clone(), addresses.clone())
                .unless(alarm.clone());
        tasks.spawn(changes.clone().finish_left_behind(stop.clone()));
        let standing = Standing::new();
        let inquiry = Inquiry {
            standing: standing.clone(),
            cluster_id: cluster_id.clone(),
            view: view.clone(),
            network: network.clone(),
            published: published.clone(),
            failed: ends.failed.clone(),
        };
        tasks.spawn(inquiry.run(stop.clone()));
        let agreement = Agreement {
            view: view.clone(),
            network: network.clone(),
            published: published.clone(),
            standing: standing.clone(),
            ends: ends.clone(),
            alarm: alarm_sender,
        };
        tasks.spawn(agreement.run(stop.clone()));
        let snapshot_turns = SnapshotTurns::new(view.clone(), network.clone(), published.clone(), settings.storage);
        tasks.spawn(snapshot_turns.clone().run(stop.clone()));
        let watchdog = Watchdog {
            view: view.clone(),
            log: log.clone(),
            snapshot_turns: snapshot_turns.clone(),
            pages: pages.clone(),
            failed: ends.failed,
        };
        tasks.spawn(watchdog.run(stop.clone()));
        let member = Arc::new(Self {
            identity,
            cluster_id,
            view,
            log,
            network,
            published,
            pages,
            reads,
            watches,
            addresses,
            changes,
            standing,
            succession,
            snapshots,
            snapshot_turns,
            duties: Duties::default(),
            nodes: Nodes::new(settings.rhythm),
            procedures: Procedures::new(settings.pace),
            placement: settings.placement,
            counters: Counters::default(),
            latencies,
            feature_level: settings.feature_level,
            recovered,
            alarm,
            proposals: Pool::new(Resource::Commands, MAX_PROPOSALS),
            proposed_bytes: Pool::new(Resource::CommandBytes, MAX_PROPOSED_BYTES),
            stop,
            tasks: std::sync::Mutex::new(tasks),
        });
        let leading = duties::run(Arc::downgrade(&member), member.stop.clone());
        crate::log::lock(&member.tasks).spawn(leading);
        let running = procedures::run(Arc::downgrade(&member), member.stop.clone());
        crate::log::lock(&member.tasks).spawn(running);
        Ok(member)
    }

    /// The consensus core.
    pub fn raft(&self) -> &Raft {
        self.view.raft()
    }

    /// Whether the peer has recovered and serves.
    pub fn recovered(&self) -> watch::Receiver<bool> {
        self.recovered.clone()
    }

    /// The header of an answer from the state at `revision`.
    pub fn header(&self, revision: u64) -> v1::ResponseHeader {
        v1::ResponseHeader {
            cluster_id: self.cluster_id.clone(),
            peer_id: self.identity.id,
            term: self.view.term(),
            revision,
            membership: self.view.membership(),
        }
    }

    // ---- reads ------------------------------------------------------------------------------------------------

    /// The state that a read may be answered from.
    ///
    /// # Errors
    /// Unavailable when that takes longer than the deadline allows.
    pub async fn read(&self, options: ReadOptions, call: &Call) -> Result<Arc<Applied>, Failure> {
        let late = || Failure {
            term: self.view.term(),
            leader: self.view.leader(),
            ..Failure::unavailable(format!(
                "peer {}: the read could not be answered within its deadline{}",
                self.identity.id,
                self.why_slow(options.consistency)
            ))
        };
        tokio::time::timeout_at(call.deadline.into(), self.read_when_ready(options, call))
            .await
            .unwrap_or_else(|_| Err(late()))
    }

    fn why_slow(&self, asked: Consistency) -> String {
        if let Some(problem) = self.problem() {
            return format!(": {problem}");
        }
        if !*self.recovered.borrow() {
            return ": it is still recovering what it had applied before it was started".to_owned();
        }
        match self.view.leader_id() {
            None => ": no leader is known".to_owned(),
            Some(_) => match (asked, self.reads.staleness()) {
                (Consistency::Bounded(max), Some(staleness)) if staleness > max => format!(
                    ": what it has was confirmed {} ms ago, and may be {} ms old at most; let it be older, or ask another peer",
                    staleness.as_millis(),
                    max.as_millis()
                ),
                _ => String::new(),
            },
        }
    }

    async fn read_when_ready(&self, options: ReadOptions, call: &Call) -> Result<Arc<Applied>, Failure> {
        if let Some(snapshot) = options.snapshot {
            return self.pages.snapshot(snapshot, options.min_revision);
        }
        let mut place = None;
        let stopping = || Failure::unavailable(format!("peer {} is stopping", self.identity.id));
        if !*self.recovered.borrow() {
            place = Some(self.reads.wait(&call.caller)?);
            self.recovered.clone().wait_for(|recovered| *recovered).await.map_err(|_| stopping())?;
        }
        let mut confirmed = false;
        // A wait, or a confirmation that took its time, makes older what was as new as asked: whatever took time is followed by
        // another look.
        loop {
            let is_as_asked = match options.consistency {
                Consistency::Local => true,
                Consistency::Linearizable => confirmed,
                Consistency::Bounded(max) => self.is_at_most(max),
            };
            let current = self.published.current();
            let has_come = current.state.revision() >= options.min_revision;
            if is_as_asked && has_come {
                return Ok(current);
            }
            // Whoever waits has a place, also for what may never come.
            let taken = match place.take() {
                Some(taken) => taken,
                None => self.reads.wait(&call.caller)?,
            };
            if has_come || (options.consistency == Consistency::Linearizable && !confirmed) {
                if confirmed {
                    tokio::time::sleep(reads::RETRY).await;
                }
                self.confirm(call, &taken).await?;
                confirmed = true;
            } else {
                let come = |applied: &Arc<Applied>| applied.state.revision() >= options.min_revision;
                self.published.subscribe().wait_for(come).await.map_err(|_| stopping())?;
            }
            place = Some(taken);
        }
    }

    /// Whether what this peer has is no older than this.
    fn is_at_most(&self, max: Duration) -> bool {
        planted::has(Bug::StaleReads) || self.reads.staleness().is_some_and(|staleness| staleness <= max)
    }

    /// One read-index round, and what it asks for applied.
    async fn confirm(&self, call: &Call, place: &Held) -> Result<(), Failure> {
        if planted::has(Bug::StaleReads) {
            return Ok(());
        }
        let began = clock::now();
        let point = loop {
            match self.reads.round_for(place).await {
                Ok(point) => break point,
                Err(f) if f.kind == Kind::Unavailable && clock::now() < call.deadline && self.goes_on() => {
                    // Whatever the reason, the next try is one for other tasks, too.
                    tokio::time::sleep(reads::RETRY).await;
                }
                Err(f) => return Err(f),
            }
        };
        latencies::note(&self.latencies.read_index, clock::since(began));
        self.published
            .subscribe()
            .wait_for(|applied| applied.last.is_some_and(|id| id.index >= point.index))
            .await
            .map_err(|_| Failure::unavailable("the peer is stopping"))?;
        self.reads.confirm(point);
        Ok(())
    }

    /// Whether trying again can help.
    fn goes_on(&self) -> bool {
        !self.stop.is_cancelled() && self.problem().is_none()
    }

    /// One entry, and the revision it was read at.
    pub async fn get(&self, key: &str, options: ReadOptions, call: &Call) -> Result<(u64, Option<KeyValue>), Failure> {
        validate_key(key).map_err(Failure::invalid)?;
        let applied = self.read(options, call).await?;
        Ok((applied.state.revision(), applied.state.get(key)))
    }

    /// Those entries that exist, in the order asked for, and the revision they were read at.
    pub async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        call: &Call,
    ) -> Result<(u64, Vec<KeyValue>), Failure> {
        validate_keys(keys).map_err(Failure::invalid)?;
        let applied = self.read(options, call).await?;
        let mut entries = Vec::new();
        let mut bytes = 0;
        for entry in keys.iter().filter_map(|key| applied.state.get(key)) {
            bytes += entry.key.len() + entry.value.len();
            if bytes > MAX_TXN_BYTES {
                let what =
                    format!("the entries asked for have more than {MAX_TXN_BYTES} bytes; ask for fewer keys at once");
                return Err(Failure::invalid(what));
            }
            entries.push(entry);
        }
        Ok((applied.state.revision(), entries))
    }

    /// One page of a listing.
    pub async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        call: &Call,
    ) -> Result<Page, Failure> {
        validate_prefix(prefix).map_err(Failure::invalid)?;
        match (page, options.snapshot) {
            (Some(token), _) => self.pages.next(token, prefix, limit, options.min_revision),
            (None, Some(snapshot)) => self.pages.first_of(snapshot, prefix, limit, options.min_revision),
            (None, None) => Ok(self.pages.first(self.read(options, call).await?, prefix, limit, &call.caller)),
        }
    }

    /// Has the state held, so that several reads see one revision: says which that is.
    ///
    /// # Errors
    /// As [`Member::read`]; Overloaded when too many are held.
    pub async fn open_snapshot(&self, options: ReadOptions, call: &Call) -> Result<(u64, Snapshot), Failure> {
        if options.snapshot.is_some() {
            return Err(Failure::invalid("a snapshot cannot be opened from another one"));
        }
        let applied = self.read(options, call).await?;
        let revision = applied.state.revision();
        Ok((revision, self.pages.open_snapshot(applied, &call.caller)?))
    }

    /// Watches a prefix, once the peer has recovered.
    ///
    /// # Errors
    /// Unavailable when that takes longer than the deadline allows; as [`Watches::watch`].
    pub async fn watch(&self, prefix: &str, from: u64, call: &Call) -> Result<Watcher, Failure> {
        // Who waits has its share already.
        let share = self.watches.share(&call.caller)?;
        let mut recovered = self.recovered.clone();
        let recovered = tokio::time::timeout_at(call.deadline.into(), recovered.wait_for(|recovered| *recovered)).await;
        if !matches!(recovered, Ok(Ok(_))) {
            let what =
                format!("peer {}: the watch could not begin{}", self.identity.id, self.why_slow(Consistency::Local));
            return Err(Failure::unavailable(what));
        }
        self.watches.watch(prefix, from, share)
    }

    // ---- commands ---------------------------------------------------------------------------------------------

    /// Runs a transaction through the log.
    ///
    /// # Errors
    /// As [`Member::propose`]; Overloaded also when the caller has its part of all scopes; and the refusals of the contract, after
    /// which nothing was changed.
    pub async fn commit(&self, txn: Txn, stamp: Option<Stamp>, call: &Call) -> Result<TxnResult, Failure> {
        txn.validate().map_err(Failure::invalid)?;
        let guards = Guards::of(&txn);
        let ledgers = &self.duties.ledgers;
        let scopes = ledgers.scopes_of(&txn, &call.caller, || self.published.current())?;
        match self.propose(Action::Txn(txn), stamp, call).await? {
            Outcome::Txn(result) => {
                self.counters.transaction(&guards, &result, &self.published.current().state);
                if let Some(scopes) = scopes {
                    scopes.done(&result, ledgers);
                }
                Ok(result)
            }
            other => Err(misanswered(&other)),
        }
    }

    /// Runs a command through the log. A refusal is an error here.
    ///
    /// # Errors
    /// NotLeader with a hint, InvalidArgument, Overloaded, and a [`Refusal`]: nothing was changed. Unavailable says
    /// whether the command may have been applied.
    pub async fn propose(&self, action: Action, stamp: Option<Stamp>, call: &Call) -> Result<Outcome, Failure> {
        let arrived = clock::now();
        if let Some(stamp) = stamp {
            stamp.validate().map_err(Failure::invalid)?;
        }
        if let Health::Held(what) | Health::Failed(what) = &*self.log.health().borrow() {
            return Err(Failure::new(Kind::Overloaded, format!("peer {}: {what}", self.identity.id)));
        }
        if let Some(alarm) = &*self.alarm.borrow() {
            return Err(Failure::unavailable(format!("peer {}: {alarm}", self.identity.id)));
        }
        let command = Command::new(state::Command { stamp, proposed_unix_ms: unix_ms(), action });
        let overloaded = |refused: Refused| {
            self.counters.overloaded.add(1);
            let what = format!(
                "peer {}: {refused} has as many commands in flight as it may have, of {MAX_PROPOSALS} and {} MiB; wait \
                 for some of them, then ask again",
                self.identity.id,
                MAX_PROPOSED_BYTES >> 20
            );
            Failure::new(Kind::Overloaded, what)
        };
        // The proposal goes on when its caller gives up, and counts until it has ended.
        let counted = [
            self.proposals.take(&call.caller, 1).map_err(overloaded)?,
            self.proposed_bytes.take(&call.caller, command.encoded().len()).map_err(overloaded)?,
        ];
        let (reply, answer) = Reply::new(counted);
        let answer = async {
            self.raft().client_write_ff(command, Some(reply)).await.map_err(|e| self.core_ended(&e))?;
            // Dropped unanswered only with the core.
            answer.await.map_err(|_| self.core_ended(&"it dropped the command"))
        };
        match tokio::time::timeout_at(call.deadline.into(), answer).await {
            Ok(Ok(Ok(response))) => {
                latencies::note(&self.latencies.commit, clock::since(arrived));
                if let Some(stamp) = stamp {
                    // As a keep-alive does.
                    self.duties.session_spoke(stamp.session, arrived);
                }
                match response.data {
                    Answer(Some(Outcome::Refused(refusal))) => Err(Failure::refused(&refusal)),
                    Answer(Some(outcome)) => Ok(outcome),
                    Answer(None) => Err(Failure {
                        kind: Kind::Internal,
                        ..Failure::unknown("the command was answered with nothing; this is a defect")
                    }),
                }
            }
            Ok(Ok(Err(e))) => Err(self.write_failure(e)),
            Ok(Err(ended)) => Err(ended),
            Err(_) => Err(Failure {
                term: self.view.term(),
                leader: self.view.leader(),
                ..Failure::unknown(format!(
                    "peer {}: the command was proposed and not committed within its deadline",
                    self.identity.id
                ))
            }),
        }
    }

    fn core_ended(&self, error: &dyn std::fmt::Display) -> Failure {
        let why = self.problem().unwrap_or_else(|| error.to_string());
        Failure::unknown(format!("peer {}: the consensus core ended: {why}", self.identity.id))
    }

    fn write_failure(&self, error: ClientWriteError<TypeConfig>) -> Failure {
        match error {
            ClientWriteError::ForwardToLeader(forward) => self.not_leader(&forward),
            ClientWriteError::LogEntryDiscarded(_) => Failure {
                term: self.view.term(),
                leader: self.view.leader(),
                ..Failure::unknown(format!(
                    "peer {} lost the leadership while the command was under way",
                    self.identity.id
                ))
            },
            e => Failure::unavailable(format!("peer {}: {e}", self.identity.id)),
        }
    }

    /// What a peer says that does not lead.
    pub fn not_leader(&self, forward: &ForwardToLeader<TypeConfig>) -> Failure {
        let term = self.view.term();
        if forward.reason == ForwardReason::LeaseExpired {
            let what = format!("peer {} leads term {term}, but no quorum has confirmed it lately", self.identity.id);
            return Failure { term, ..Failure::unavailable(what) };
        }
        Failure::not_leader(self.identity.id, term, forward.leader_id.and_then(|id| self.view.member(id)))
    }

    // ---- state and end ----------------------------------------------------------------------------------------

    /// Why this peer proposes nothing any more, if that is so.
    pub fn alarm(&self) -> Option<String> {
        self.alarm.borrow().clone()
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.proposals.taken()
    }

    /// What keeps this peer from working, if anything does.
    pub fn problem(&self) -> Option<String> {
        if let Some(why) = self.standing.over() {
            return Some(why.to_owned());
        }
        if let Health::Held(what) | Health::Failed(what) = &*self.log.health().borrow() {
            return Some(what.clone());
        }
        self.view.metrics().running_state.err().map(|e| e.to_string())
    }

    /// Runs what must not end with whoever asked for it; stopping the member waits for it.
    /// Once it stops, nothing is begun any more.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = crate::log::lock(&self.tasks);
        if self.stop.is_cancelled() {
            return;
        }
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Ends the core and its tasks. The log stays open.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        // The core, and what waits for it, may wait for a disk that is full.
        self.log.hold_no_more();
        let mut tasks = std::mem::take(&mut *crate::log::lock(&self.tasks));
        while tasks.join_next().await.is_some() {}
        if let Err(e) = self.raft().shutdown().await {
            tracing::warn!("ending the consensus core: {e}");
        }
        // It has been told to give up, and does after the piece that it is at.
        let given_up = async {
            while self.published.writes_snapshot() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(GIVE_UP, given_up).await.is_err() {
            let secs = GIVE_UP.as_secs();
            tracing::warn!(
                "stopping though a snapshot is being written: the disk has taken more than {secs} s for a piece"
            );
        }
    }

    /// Has another voter lead, if this peer leads now and one can be reached; waits a little for that.
    pub async fn hand_over(&self) {
        if self.view.leader_id() != Some(self.identity.id) || self.standing.over().is_some() {
            return;
        }
        let successors = self.view.successors();
        if successors.is_empty() {
            return;
        }
        let reached = futures::future::join_all(successors.iter().map(|id| self.reaches(*id))).await;
        let Some(successor) = successors.into_iter().zip(reached).find_map(|(id, reached)| reached.then_some(id))
        else {
            tracing::info!("no other voter can be reached: stopping without handing the leadership over");
            return;
        };
        tracing::info!(successor, "handing the leadership over");
        // A core that waits for its disk takes no orders.
        match tokio::time::timeout(HANDOVER, self.raft().trigger().transfer_leader(successor)).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return tracing::warn!("handing the leadership over: {e}"),
            Err(_) => {
                return tracing::warn!(
                    successor,
                    "the consensus core is busy: stopping without handing the leadership over"
                );
            }
        }
        let id = self.identity.id;
        let other_leads = |metrics: &openraft::RaftMetrics<TypeConfig>| metrics.current_leader.is_some_and(|l| l != id);
        let wait = self.raft().wait(Some(HANDOVER));
        tokio::select! {
            waited = wait.metrics(other_leads, "another peer leads") => match waited {
                Ok(_) => {}
                // The error itself would print all of openraft's metrics.
                Err(WaitError::Timeout(..)) => tracing::warn!(
                    successor, millis = HANDOVER.as_millis() as u64, "no other peer has taken the leadership over"
                ),
                Err(WaitError::ShuttingDown) => tracing::debug!("handing the leadership over: the core has ended"),
            },
            () = self.until_gone(successor) => {
                tracing::info!(successor, "the peer that was to lead is gone: stopping without handing the leadership over");
            }
        }
    }

    /// Whether another member answers, as itself, right now.
    async fn reaches(&self, id: u64) -> bool {
        let Some(member) = self.view.member(id) else { return false };
        let Ok(mut client) = self.network.transport.client(id, &member.raft_address) else { return false };
        match tokio::time::timeout(REACH, client.identity(v1::IdentityRequest {})).await {
            Ok(Ok(answer)) => answer.into_inner().incarnation == member.incarnation,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    async fn until_gone(&self, id: u64) {
        while self.reaches(id).await {
            tokio::time::sleep(REACH).await;
        }
    }
}

/// A command's answer was of another command's kind.
pub fn misanswered(outcome: &Outcome) -> Failure {
    let what = format!("the command was answered with {outcome:?}; this is a defect");
    Failure { kind: Kind::Internal, ..Failure::unknown(what) }
}

/// The wall clock, in milliseconds since 1970.
pub(super) fn unix_ms() -> u64 {
    clock::wall().as_millis() as u64
}

async fn recover(view: View, recovered: watch::Sender<bool>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        result = view.raft().wait_for_recovery(None) => match result {
            Ok(metrics) => {
                tracing::info!(applied = metrics.last_applied.map(|id| id.index), "recovered: serving reads");
                recovered.send_replace(true);
            }
            Err(e) => tracing::debug!("waiting for recovery ended: {e}"),
        },
    }
    // Readers that wait for recovery are told by their deadline, not by this task's end.
    stop.cancelled().await;
}

fn raft_config(cluster_id: &str, settings: &Settings) -> Result<RaftConfig, Error> {
    let millis = |d: Duration| d.as_millis() as u64;
    let storage = &settings.storage;
    let config = RaftConfig {
        cluster_name: cluster_id.to_owned(),
        heartbeat_interval: millis(settings.timing.heartbeat),
        election_timeout_min: millis(settings.timing.election_timeout_min),
        election_timeout_max: millis(settings.timing.election_timeout_max),
        enable_pre_vote: Some(true),
        enable_leader_restore: Some(false),
        // The watchdog says when: by more than the number of entries.
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: storage.purge_margin_entries,
        purge_batch_size: (storage.snapshot_entries / 10).clamp(1, 1000),
        replication_lag_threshold: storage.snapshot_entries.max(storage.purge_margin_entries).saturating_mul(2),
        max_payload_entries: 1024,
        // The network has its own, longer limits for snapshots.
        install_snapshot_timeout: 600_000,
        api_channel_size: Some(2 * MAX_PROPOSALS as u64),
        // A peer that comes back is tried again soon.
        backoff: "50ms 100ms 200ms ..400ms".to_owned(),
        ..RaftConfig::default()
    };
    config.validate().map_err(|e| Error::Stopped(format!("openraft refuses its configuration: {e}")))
}
