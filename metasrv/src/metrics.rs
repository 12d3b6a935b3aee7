//! A peer's figures in Prometheus' text format, gathered when they are asked for.
//!
//! Names begin with `lake_metasrv_`; times are in seconds, sizes in bytes. What is about the cluster (revision, keys, leases)
//! is what this peer has applied. docs/ lists them.

use std::time::Duration;

use prometheus::{Counter, Gauge, IntCounter, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::peer::Peer;
use crate::peer::member::Member;

type Result<T> = std::result::Result<T, prometheus::Error>;

/// Everything, as text.
///
/// # Errors
/// Two figures of one name, which is a defect.
pub fn text(peer: &Peer) -> Result<String> {
    let figures = Figures { registry: Registry::new_custom(Some("lake_metasrv".to_owned()), None)? };
    figures.gauge("peer_id", "The id of this peer", peer.identity.id)?;
    figures.gauge("failed", "1 once the peer has to stop", u64::from(peer.failed().borrow().is_some()))?;
    figures.gauge(
        "supported_feature_level",
        "The highest feature level that this build can apply",
        u64::from(peer.supported_feature_level()),
    )?;
    figures.gauge("member", "1 once the peer belongs to a cluster", u64::from(peer.member().is_some()))?;
    figures.counter(
        "leader_questions_total",
        "Questions who leads that this peer was asked",
        peer.leader_questions.get(),
    )?;
    figures.gauge(
        "answer_bytes_untaken",
        "Bytes of answers that their callers have not taken yet",
        peer.untaken.bytes() as u64,
    )?;
    for latency in peer.log.latencies().all() {
        figures.registry.register(Box::new(latency.clone()))?;
    }
    if let Some(member) = peer.member() {
        raft(&figures, peer, &member)?;
        state(&figures, &member)?;
        counts(&figures, &member)?;
        for latency in member.latencies.all() {
            figures.registry.register(Box::new(latency.clone()))?;
        }
    }
    TextEncoder::new().encode_to_string(&figures.registry.gather())
}

struct Figures {
    registry: Registry,
}

impl Figures {
    fn gauge(&self, name: &str, help: &str, value: u64) -> Result<()> {
        let gauge = IntGauge::new(name, help)?;
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        self.registry.register(Box::new(gauge))
    }

    /// A time, in seconds.
    fn time(&self, name: &str, help: &str, value: Duration) -> Result<()> {
        let gauge = Gauge::new(name, help)?;
        gauge.set(value.as_secs_f64());
        self.registry.register(Box::new(gauge))
    }

    fn counter(&self, name: &str, help: &str, value: u64) -> Result<()> {
        let counter = IntCounter::new(name, help)?;
        counter.inc_by(value);
        self.registry.register(Box::new(counter))
    }
}

fn raft(figures: &Figures, peer: &Peer, member: &Member) -> Result<()> {
    let metrics = member.view.metrics();
    let leader = member.view.leader_id();
    let (purged, last) = peer.log.bounds();
    figures.gauge(
        "recovered",
        "1 once the peer serves what it had applied before its start",
        u64::from(*member.recovered().borrow()),
    )?;
    figures.gauge(
        "problem",
        "1 while something keeps the peer from working: a full disk, an ended core",
        u64::from(member.problem().is_some()),
    )?;
    figures.gauge(
        "alarm",
        "1 once no majority of the voters holds the same state: nothing is written any more",
        u64::from(member.alarm().is_some()),
    )?;
    figures.gauge("has_leader", "1 while a leader is known", u64::from(leader.is_some()))?;
    figures.gauge(
        "is_leader",
        "1 while this peer leads, confirmed by a quorum",
        u64::from(leader == Some(member.identity.id)),
    )?;
    figures.gauge("term", "The Raft term", metrics.current_term)?;
    figures.gauge("voters", "Voters in the membership", metrics.membership_config.voter_ids().count() as u64)?;
    figures.gauge("learners", "Learners in the membership", member.view.members().1.len() as u64)?;
    figures.gauge("log_last_index", "The last entry of the log", last.map_or(0, |id| id.index))?;
    figures.gauge("log_purged_index", "The last entry removed from the log", purged.map_or(0, |id| id.index))?;
    figures.gauge(
        "snapshot_index",
        "The last entry that the newest snapshot covers",
        metrics.snapshot.map_or(0, |id| id.index),
    )?;
    figures.gauge(
        "log_bytes_since_snapshot",
        "Bytes of entries applied since the last snapshot was begun",
        member.published.since_snapshot().bytes,
    )?;
    figures.time(
        "disk_busy_seconds",
        "How long the write to the log that is under way has taken so far",
        member.log.busy_for(),
    )?;
    figures.gauge("commands_in_flight", "Commands proposed here and not answered yet", member.in_flight() as u64)?;
    figures.counter(
        "read_index_rounds_total",
        "Rounds in which a quorum confirmed the leader for the reads and keep-alives that waited here",
        member.reads.rounds(),
    )?;
    if let Some(staleness) = member.reads.staleness() {
        figures.time(
            "read_index_age_seconds",
            "Since the start of the last read-index round that this peer completed and applied",
            staleness,
        )?;
    }
    let lags =
        IntGaugeVec::new(Opts::new("lag_entries", "Entries that another peer has yet to acknowledge"), &["peer"])?;
    for (id, matched) in metrics.replication.into_iter().flatten().filter(|(id, _)| *id != member.identity.id) {
        let lag = last.map_or(0, |last| last.index).saturating_sub(matched.map_or(0, |id| id.index));
        lags.with_label_values(&[&id.to_string()]).set(i64::try_from(lag).unwrap_or(i64::MAX));
    }
    figures.registry.register(Box::new(lags))
}

fn state(figures: &Figures, member: &Member) -> Result<()> {
    let applied = member.published.current();
    let (leases, scopes, sessions) = applied.state.counts();
    figures.gauge("applied_index", "The last entry applied", applied.last.map_or(0, |id| id.index))?;
    figures.gauge("revision", "The revision of the map", applied.state.revision())?;
    figures.gauge(
        "oldest_revision",
        "The first revision that can be watched from",
        applied.state.changes().oldest(),
    )?;
    figures.gauge("keys", "Keys in the map", applied.state.len() as u64)?;
    figures.gauge("bytes", "Bytes of all keys and values", applied.state.bytes())?;
    figures.gauge("leases", "Live leases", leases as u64)?;
    figures.gauge("scopes", "Live scopes", scopes as u64)?;
    figures.gauge("sessions", "Open sessions", sessions as u64)?;
    figures.gauge("feature_level", "The feature level in force", u64::from(applied.state.feature_level()))?;
    let full = applied.state.quotas().filter(|(_, quota)| quota.is_nearly_full()).count();
    figures.gauge("quotas_nearly_full", "Quotas of which four fifths are used", full as u64)
}

fn counts(figures: &Figures, member: &Member) -> Result<()> {
    let c = &member.counters;
    figures.counter("leases_granted_total", "Leases granted here", c.leases_granted.get())?;
    figures.counter("leases_revoked_total", "Leases revoked here", c.leases_revoked.get())?;
    figures.counter(
        "leases_expired_total",
        "Leases that this peer ended as the leader, being silent",
        c.leases_expired.get(),
    )?;
    figures.counter("sessions_opened_total", "Sessions opened here", c.sessions_opened.get())?;
    figures.counter("sessions_closed_total", "Sessions closed here", c.sessions_closed.get())?;
    figures.counter(
        "sessions_expired_total",
        "Sessions that this peer ended as the leader, being silent",
        c.sessions_expired.get(),
    )?;
    figures.counter("renewed_total", "Leases and sessions renewed by keep-alives", c.renewed.get())?;
    figures.counter("not_renewed_total", "Leases and sessions in keep-alives that were over", c.not_renewed.get())?;
    figures.counter("scopes_acquired_total", "Scopes acquired", c.scopes_acquired.get())?;
    let acquiring =
        Counter::new("scopes_acquired_seconds_total", "Time that the transactions took which acquired them")?;
    acquiring.inc_by(Duration::from_micros(c.scopes_acquired_micros.get()).as_secs_f64());
    figures.registry.register(Box::new(acquiring))?;
    figures.counter(
        "scopes_taken_total",
        "Scopes that this peer took from holders that fell silent, as the leader, whether or not anybody acquires them then",
        c.scopes_taken.get(),
    )?;
    figures.counter(
        "scopes_contended_total",
        "Transactions that found another's scope in the way",
        c.scopes_contended.get(),
    )?;
    figures.counter(
        "fences_refused_total",
        "Transactions refused because a lease that they named was over",
        c.fences_refused.get(),
    )?;
    figures.counter(
        "commands_overloaded_total",
        "Commands refused because their caller had its part of what may be in flight",
        c.overloaded.get(),
    )?;
    figures.gauge("watches", "Watches that are open here", member.watches.watchers() as u64)?;
    figures.gauge("nodes_connected", "Query nodes whose stream is open here", member.nodes.connected() as u64)?;
    figures.counter("nodes_registered_total", "Processes registered here as query nodes", c.nodes_registered.get())?;
    figures.counter(
        "nodes_superseded_total",
        "Processes told that another one was registered as their node since",
        c.nodes_superseded.get(),
    )?;
    figures.counter(
        "shards_failed_over_total",
        "Shards given to another worker here because theirs was lost or has left",
        c.shards_failed_over.get(),
    )?;
    figures.counter(
        "shards_moved_total",
        "Shards moved here for balance or because it was asked for",
        c.shards_moved.get(),
    )?;
    let (active, poisoned) = member.procedures.counts();
    figures.gauge("procedures_active", "Procedures that have not ended; of the leader only", active)?;
    figures.gauge("procedures_poisoned", "Procedures that an operator has to clear; of the leader only", poisoned)?;
    figures.counter(
        "procedure_steps_total",
        "Steps of procedures that this peer has committed as the leader",
        member.procedures.steps.get(),
    )
}
