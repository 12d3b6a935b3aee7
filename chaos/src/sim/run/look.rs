//! What is seen of a simulation between two steps: it goes into the trace, and is held against the invariants.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use lake_proto::v1;

use super::super::invariants::{Broken, Seen, broken};
use super::super::load::Came;
use super::super::observer;
use super::super::plan::SNAPSHOT;
use super::{PANICS, Simulation};
use crate::history::Operation;

impl Simulation {
    pub(super) fn look(&mut self) -> Result<(), Broken> {
        let panic = PANICS.lock().unwrap_or_else(PoisonError::into_inner).first().cloned();
        if let Some(panic) = panic {
            return broken("no panic", panic);
        }
        let now = self.now_ms();
        self.invariants.at(self.hosts.iter().map(|(id, host)| (*id, now + host.place.ahead_ms())).collect());
        let mut seen = std::mem::take(&mut self.seen);
        for (id, host) in &mut self.hosts {
            seen.extend(host.place.disk.take_news().iter().filter_map(|change| observer::on_disk(*id, change)));
            let peer = host.place.peer();
            let leads = peer.and_then(|peer| peer.member()).and_then(|member| member.view.leading_term());
            if leads != host.led {
                host.led = leads;
                seen.extend(leads.map(|term| Seen::Leads { peer: *id, term }));
            }
        }
        seen.extend(self.eyes.take());
        for seen in seen {
            if let Some(line) = line(&seen) {
                self.line(&line);
            }
            if matches!(seen, Seen::Installed { .. }) && self.plan.has_snapshots() {
                let effect = self.effects.entry(SNAPSHOT.to_owned()).or_default();
                (effect.begun, effect.took_effect) = (effect.begun + 1, effect.took_effect + 1);
            }
            self.invariants.see(&seen)?;
        }
        let changes = std::mem::take(&mut self.brought.lock().changes);
        for Came { change, done, told } in changes {
            self.told(&told);
            if done {
                self.changed(change);
            }
        }
        for operation in self.new_operations() {
            self.line(&line_of(&operation));
        }
        let ended = self.hosts.iter().find(|(_, host)| !host.leaving && host.place.ended().is_some());
        if let Some((id, host)) = ended {
            return broken("running", format!("peer {id} ended: {}", host.place.ended().unwrap_or_default()));
        }
        Ok(())
    }

    fn new_operations(&mut self) -> Vec<Operation> {
        let recorder = self.brought.lock().recorder.clone();
        let operations = recorder.map(|recorder| recorder.since(self.traced)).unwrap_or_default();
        self.traced += operations.len();
        operations
    }

    /// Whoever leads the newest term.
    pub(super) fn leader(&self) -> Option<u64> {
        let leading = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_none());
        leading.filter_map(|(id, host)| host.led.map(|term| (term, *id))).max().map(|(_, id)| id)
    }

    pub(super) fn statuses(&self) -> BTreeMap<u64, v1::StatusResponse> {
        let running = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_none());
        running.filter_map(|(id, host)| Some((*id, host.place.peer()?.status()))).collect()
    }

    /// From now on clients ask members only: a peer whose joining came to nothing answers nobody.
    pub(super) fn forget_strangers(&self) {
        let statuses = self.statuses();
        let Some(leader) = self.leader().and_then(|id| statuses.get(&id)) else { return };
        let is_member = |id: u64| leader.voters.iter().chain(&leader.learners).any(|member| member.id == id);
        for id in self.roster.ids() {
            if !is_member(id) {
                self.roster.remove(id);
            }
        }
    }

    /// The last index, if there is a leader and every member has applied the same up to there.
    pub(super) fn agreed_at(&self) -> Option<u64> {
        let statuses = self.statuses();
        let leader = statuses.get(&self.leader()?)?;
        let same = |status: &v1::StatusResponse| {
            status.applied_index == leader.last_log_index && status.state_hash == leader.state_hash
        };
        let members = leader.voters.iter().chain(&leader.learners);
        let all = members.map(|member| statuses.get(&member.id)).all(|status| status.is_some_and(same));
        (all && !leader.changing_voters).then_some(leader.last_log_index)
    }

    /// Where every peer stands, for people.
    pub(super) fn standing(&self) -> String {
        let ids =
            |members: &[v1::Member]| members.iter().map(|member| member.id.to_string()).collect::<Vec<_>>().join(" ");
        let told = self.statuses().into_iter().map(|(id, status)| {
            let leader = status.leader.as_ref().map_or(0, |leader| leader.id);
            format!(
                "peer {id}: term {}, leader {leader}, log up to {}, applied up to {}, voters {}, learners {}{}{}",
                status.term,
                status.last_log_index,
                status.applied_index,
                ids(&status.voters),
                ids(&status.learners),
                if status.problem.is_empty() { "" } else { ": " },
                status.problem
            )
        });
        told.collect::<Vec<_>>().join("; ")
    }
}

/// What the trace says of something that was seen.
fn line(seen: &Seen) -> Option<String> {
    Some(match seen {
        Seen::Started { peer } => format!("p{peer} starts"),
        Seen::Leads { peer, term } => format!("p{peer} leads term {term}"),
        Seen::Follows { peer, term, leader } => format!("p{peer} follows p{leader} in term {term}"),
        Seen::Appended { peer, index, term, entry } => {
            format!("p{peer} has entry {index} of term {term}: {entry:016x}")
        }
        Seen::Truncated { peer, last } => format!("p{peer} truncates its log after {last:?}"),
        Seen::Purged { peer, upto } => format!("p{peer} purges its log up to {upto}"),
        Seen::Applied { peer, applied } => format!(
            "p{peer} applies entry {} of term {}: revision {}, state {:032x}",
            applied.index, applied.term, applied.revision, applied.state
        ),
        Seen::Lost { peer } => format!("p{peer} has lost its disk"),
        Seen::Differs { peer, index, what } => format!("p{peer} has done with entry {index} what it must not: {what}"),
        Seen::Installed { peer, index, state } => {
            format!("p{peer} begins from a snapshot at {index}: state {state:032x}")
        }
    })
}

fn line_of(operation: &Operation) -> String {
    let Operation { process, kind, action, revision, peer, refusal, error, .. } = operation;
    let mut line = format!("client {process} {kind:?} {action:?}");
    line.extend(revision.map(|revision| format!(" at revision {revision}")));
    line.extend(peer.map(|peer| format!(" from p{peer}")));
    line.extend(refusal.iter().chain(error).map(|why| format!(" ({why})")));
    line
}
