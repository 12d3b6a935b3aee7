//! Faults of clocks and disks, which last until they are seen to have taken effect.

use std::collections::BTreeMap;

use super::super::invariants::Seen;
use super::super::plan::Who;
use super::Simulation;
use super::faults::Asked;

/// Clocks that were put ahead.
pub(super) struct Ahead {
    asked: Asked,
    pub(super) until_ms: u64,
    faster_percent: u64,
    /// Whose, by how much at least, and how far ahead each was before.
    peers: BTreeMap<u64, u64>,
    at_least_ms: u64,
}

/// A disk without room.
pub(super) struct Filled {
    asked: Asked,
    id: u64,
    pub(super) until_ms: u64,
    /// Batches that had waited for room before, and have ended.
    waited: u64,
}

impl Simulation {
    /// The clocks of a peer, or of all others, are put ahead.
    pub(super) fn put_ahead(
        &mut self,
        asked: Asked,
        (who, others): (Who, bool),
        (jump_ms, faster_percent): (u64, u64),
        until_ms: u64,
    ) {
        let id = self.running(who);
        let is_meant = |other: &u64| (*other == id) != others;
        let hosts = self.hosts.iter().filter(|(other, host)| is_meant(other) && !host.leaving);
        let peers: BTreeMap<_, _> = hosts.map(|(id, host)| (*id, host.place.ahead_ms())).collect();
        for host in peers.keys().filter_map(|id| self.hosts.get(id)) {
            host.place.put_ahead(jump_ms, faster_percent);
        }
        self.ahead.push(Ahead { asked, until_ms, faster_percent, peers, at_least_ms: jump_ms.max(1) });
    }

    pub(super) fn fill(&mut self, asked: Asked, id: u64, until_ms: u64) {
        let Some(host) = self.hosts.get(&id) else { return };
        let disk = &host.place.disk;
        // What waits already, because of another fault, waits because of this one, too.
        let waited = disk.waited() - u64::from(disk.is_waiting());
        disk.fill();
        self.filled.push(Filled { asked, id, until_ms, waited });
    }

    pub(super) fn lose(&mut self, id: u64, for_ms: u64) -> Result<(), String> {
        if let Some((other, _)) = &self.lost {
            return Err(format!("peer {other} has lost its disk already: two could be a majority"));
        }
        self.crash(id, for_ms);
        let down = self.hosts.get_mut(&id).filter(|host| host.back_at_ms.is_some() && !host.leaving);
        let host = down.ok_or_else(|| format!("peer {id} is gone"))?;
        host.place.lose().map_err(|e| format!("removing the snapshots of peer {id}: {e}"))?;
        // It is refused, and ends.
        host.leaving = true;
        self.seen.push(Seen::Lost { peer: id });
        self.roster.remove(id);
        Ok(())
    }

    /// Clocks go as they should once their time is over and all were put ahead, but for those of peers that have left.
    pub(super) fn end_of_clocks(&mut self, now: u64) {
        let hosts = &self.hosts;
        let took_effect = |ahead: &Ahead| {
            let grew = |(id, before): (&u64, &u64)| {
                hosts.get(id).is_some_and(|host| host.place.ahead_ms() >= before + ahead.at_least_ms)
            };
            let left = |id: &u64| hosts.get(id).is_none_or(|host| host.leaving);
            ahead.peers.iter().any(grew) && ahead.peers.iter().all(|(id, before)| grew((id, before)) || left(id))
        };
        let clocks = std::mem::take(&mut self.ahead);
        let (over, going) = clocks
            .into_iter()
            .partition::<Vec<_>, _>(|ahead| ahead.until_ms <= now && (self.healing || took_effect(ahead)));
        let (done, not_done): (Vec<_>, Vec<_>) = over.iter().partition(|ahead| took_effect(ahead));
        let took: Vec<Asked> = done.iter().map(|ahead| ahead.asked.clone()).collect();
        took.iter().for_each(|asked| self.took_effect(asked));
        self.without_effect.extend(not_done.iter().map(|ahead| ahead.asked.what.clone()));
        self.ahead = going;
        for ahead in done.into_iter().chain(not_done) {
            for host in ahead.peers.keys().filter_map(|id| self.hosts.get(id)) {
                host.place.slow_down(ahead.faster_percent);
            }
        }
        for ahead in &over {
            let peers: Vec<u64> = ahead.peers.keys().copied().collect();
            self.told(&format!("the clocks of peers {peers:?} go like the others again"));
        }
    }

    /// Whether a peer needs a snapshot, since the leader has not any more what comes next in its log.
    fn needs_a_snapshot(&self, id: u64) -> bool {
        let statuses = self.statuses();
        let leader = self.leader().and_then(|leader| statuses.get(&leader));
        let own = statuses.get(&id);
        leader.zip(own).is_some_and(|(leader, own)| own.last_log_index < leader.purged_index)
    }

    /// There is room on a disk again once its time is over and something had to wait for that: entries, or a snapshot, which
    /// is not received without room. Of a peer that leaves before, nothing waits any more: another one's disk is full then.
    pub(super) fn end_of_full_disks(&mut self, now: u64) {
        for filled in std::mem::take(&mut self.filled) {
            let Some(host) = self.hosts.get(&filled.id) else { continue };
            let waited = host.place.disk.waited() - filled.waited;
            let is_over = filled.until_ms <= now;
            let of_a_snapshot = waited == 0 && is_over && self.needs_a_snapshot(filled.id);
            let took_effect = waited > 0 || of_a_snapshot;
            let leaves = host.leaving && !took_effect && !self.healing;
            if !leaves && (!is_over || (!took_effect && !self.healing)) {
                self.filled.push(filled);
                continue;
            }
            host.place.disk.make_room();
            let what = if of_a_snapshot { "a snapshot".to_owned() } else { format!("{waited} batches") };
            self.told(&format!("peer {} has room on its disk again, which {what} waited for", filled.id));
            if leaves {
                self.fill(filled.asked, self.running(Who::Leader), filled.until_ms);
            } else if took_effect {
                self.took_effect(&filled.asked);
            } else {
                self.without_effect.push(filled.asked.what);
            }
        }
        // Another fault may go on about the same disk.
        for filled in &self.filled {
            if let Some(host) = self.hosts.get(&filled.id) {
                host.place.disk.fill();
            }
        }
    }
}
