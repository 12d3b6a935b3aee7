//! What is done to the cluster of a simulation, and when it is over.
//!
//! A fault must be seen to take effect. A crash meets a peer that runs, or waits for one; a cut lasts until something was sent
//! on a way that it has cut, and is made anew, now around the leader, if that is not for a while; slowness lasts until
//! messages were sent meanwhile; clocks and disks are in [`super::lasting`]. What has had no effect once the time for that is
//! up is in `without_effect`, and makes the verdict unknown. Changes of the membership may be refused for good reasons, and
//! are only counted.
//!
//! A link that several cuts are about is cut by the first of them, and by the next one once that is over.

use std::time::Duration;

use super::super::host::{self, Place};
use super::super::invariants::Broken;
use super::super::load::Change;
use super::super::net::Way;
use super::super::plan::{Fault, LEAST_VOTERS, Who};
use super::{CLIENTS, Host, Simulation};

/// How long peers are down that crash just before they meet a leader that was cut off.
const DOWN_MS: u64 = 10;
/// Messages that must be sent while messages are slow: each takes as long as chance has it, and few of so many are quick.
const SLOW_MESSAGES: u64 = 20;
/// How long a cut whose time is up may go on without anything having met it: then it is made anew.
const ANEW_AFTER_MS: u64 = 1_000;

/// A fault that was begun.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) kind: &'static str,
    /// For people.
    pub(super) what: String,
}

/// Links that are cut, until when.
pub(super) struct Cut {
    asked: Asked,
    /// For making it anew.
    fault: Fault,
    until_ms: u64,
    /// All that it is about, and of that what it has cut itself: the rest was cut already.
    pairs: Vec<(String, String)>,
    own: Vec<(String, String)>,
    how: How,
    /// All ways that it is about, and how much had met a cut on them before.
    ways: Vec<Way>,
    met_before: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Lost,
    Held,
    /// Only from the first to the second.
    OneWay,
}

impl How {
    fn ways(self, pairs: &[(String, String)]) -> Vec<Way> {
        let back = |(one, other): &Way| (self != How::OneWay).then(|| (other.clone(), one.clone()));
        pairs.iter().flat_map(|pair| std::iter::once(pair.clone()).chain(back(pair))).collect()
    }
}

/// A crash that waits for somebody who runs.
pub(super) struct Crash {
    asked: Asked,
    whom: Whom,
    for_ms: u64,
}

#[derive(Clone, Copy)]
enum Whom {
    One(Who),
    All,
}

/// Messages that are slow.
pub(super) struct Slow {
    asked: Asked,
    until_ms: u64,
    latency_ms: u64,
    sent_before: u64,
}

impl Simulation {
    /// A fault was seen to take effect.
    pub(super) fn took_effect(&mut self, asked: &Asked) {
        self.effects.entry(asked.kind.to_owned()).or_default().took_effect += 1;
    }

    /// A change of the membership was made.
    pub(super) fn changed(&mut self, change: Change) {
        let kind = match change {
            Change::Transfer => Fault::Transfer.kind(),
            Change::Promote(id) => Fault::Join { id }.kind(),
            Change::Remove(id) => Fault::Remove { who: Who::Peer(id) }.kind(),
            // That counts once the peer that it replaces was refused.
            Change::Replace { .. } => return,
        };
        self.effects.entry(kind.to_owned()).or_default().took_effect += 1;
    }

    /// Something waits for its effect.
    pub(super) fn waits_for_effects(&self) -> bool {
        let unmet = self.cuts.iter().any(|cut| self.met(cut) == 0) || self.slow.iter().any(|slow| !self.was_slow(slow));
        unmet || !(self.crashes.is_empty() && self.ahead.is_empty() && self.filled.is_empty())
    }

    pub(super) fn begin(&mut self, fault: &Fault) {
        let asked = Asked { kind: fault.kind(), what: fault.to_string() };
        self.effects.entry(asked.kind.to_owned()).or_default().begun += 1;
        self.told(&asked.what);
        self.strike(asked, fault);
    }

    fn strike(&mut self, asked: Asked, fault: &Fault) {
        let now = self.now_ms();
        let until = move |for_ms: u64| now + for_ms;
        let ids: Vec<u64> = self.hosts.keys().copied().collect();
        let around = |id: u64| {
            let others = ids.iter().filter(move |other| **other != id);
            others.map(|other| (host::name(id), host::name(*other))).collect::<Vec<_>>()
        };
        let how = |held: bool| if held { How::Held } else { How::Lost };
        match *fault {
            Fault::Crash { who, for_ms } => self.crash_whom(Crash { asked, whom: Whom::One(who), for_ms }),
            Fault::CrashAll { for_ms } => self.crash_whom(Crash { asked, whom: Whom::All, for_ms }),
            Fault::Isolate { who, held, for_ms } => {
                self.cut((asked, fault), around(self.running(who)), how(held), until(for_ms));
            }
            Fault::Depose { for_ms } => {
                let id = self.running(Who::Leader);
                self.cut((asked, fault), around(id), How::Lost, until(for_ms));
                let others = ids.iter().copied().filter(|other| *other != id).collect();
                self.due.push((until(for_ms.saturating_sub(DOWN_MS)), others, DOWN_MS));
            }
            Fault::Mute { who, for_ms } => {
                self.cut((asked, fault), around(self.running(who)), How::OneWay, until(for_ms))
            }
            Fault::Split { ref side, held, for_ms } => {
                let pairs = self.between(side);
                self.cut((asked, fault), pairs, how(held), until(for_ms));
            }
            Fault::Strand { held, for_ms } => {
                let leader = self.running(Who::Leader);
                let stays = |id: &u64| self.hosts.get(id).is_some_and(|host| !host.leaving);
                let minority = ids.iter().filter(|id| stays(id)).count().saturating_sub(1) / 2;
                let followers = ids.iter().copied().filter(|id| *id != leader && stays(id));
                let here: Vec<u64> = std::iter::once(leader).chain(followers).take(minority.max(1)).collect();
                let pairs = self.between(&here);
                self.cut((asked, fault), pairs, how(held), until(for_ms));
            }
            Fault::CutClients { who, for_ms } => {
                let pairs = vec![(host::name(self.running(who)), CLIENTS.to_owned())];
                self.cut((asked, fault), pairs, How::Lost, until(for_ms));
            }
            Fault::Slow { latency_ms, for_ms } => {
                let sent_before = self.ways.sent();
                self.slow.push(Slow { asked, until_ms: until(for_ms), latency_ms, sent_before });
                self.set_latency();
            }
            Fault::Transfer => self.change(Change::Transfer),
            Fault::Join { id } => {
                self.welcome(id);
                self.change(Change::Promote(id));
            }
            Fault::Clock { who, others, jump_ms, faster_percent, for_ms } => {
                self.put_ahead(asked, (who, others), (jump_ms, faster_percent), until(for_ms));
            }
            Fault::Full { who, for_ms } => self.fill(asked, self.running(who), until(for_ms)),
            Fault::Lose { who, by, for_ms } => {
                let id = self.running(who);
                match self.lose(id, for_ms) {
                    Ok(()) => {
                        self.lost = Some((id, asked));
                        self.welcome(by);
                        self.change(Change::Replace { lost: id, by });
                    }
                    Err(why) => self.without_effect.push(format!("{}: {why}", asked.what)),
                }
            }
            Fault::Remove { who } => {
                let id = self.who(who);
                let staying = self.hosts.values().filter(|host| !host.leaving).count();
                let host = self.hosts.get_mut(&id).filter(|host| !host.leaving && staying > LEAST_VOTERS);
                if let Some(host) = host {
                    host.leaving = true;
                    self.roster.remove(id);
                    self.change(Change::Remove(id));
                } else {
                    self.told(&format!("peer {id} stays: it has left already, or too few would be left"));
                }
            }
        }
    }

    fn who(&self, who: Who) -> u64 {
        match who {
            Who::Leader => self.leader().unwrap_or(1),
            Who::Peer(id) => id,
        }
    }

    /// The peer that is meant, or, if it is down or has left, the first one that runs; if there is one.
    fn runs(&self, who: Who) -> Option<u64> {
        let id = self.who(who);
        let runs = |host: &Host| host.back_at_ms.is_none() && !host.leaving && host.place.ended().is_none();
        let first = || self.hosts.iter().find(|(_, host)| runs(host)).map(|(id, _)| *id);
        if self.hosts.get(&id).is_some_and(runs) { Some(id) } else { first() }
    }

    /// The same, or, if nobody runs, the first one that stays.
    pub(super) fn running(&self, who: Who) -> u64 {
        let stays = || self.hosts.iter().find(|(_, host)| !host.leaving).map(|(id, _)| *id);
        self.runs(who).or_else(stays).unwrap_or_else(|| self.who(who))
    }

    /// All pairs of one on this side and one on the other. On each side there is somebody who stays.
    fn between(&self, side: &[u64]) -> Vec<(String, String)> {
        let staying: Vec<u64> = self.hosts.iter().filter(|(_, host)| !host.leaving).map(|(id, _)| *id).collect();
        let is_split = staying.iter().any(|id| side.contains(id)) && !staying.iter().all(|id| side.contains(id));
        let one = [self.running(Who::Leader)];
        let side = if is_split { side } else { &one[..] };
        let (here, there): (Vec<u64>, Vec<u64>) = self.hosts.keys().copied().partition(|id| side.contains(id));
        let pairs = there.iter().flat_map(|other| here.iter().map(move |id| (host::name(*id), host::name(*other))));
        pairs.collect()
    }

    /// A fresh peer starts, which joins by itself.
    fn welcome(&mut self, id: u64) {
        let place = Place::new(id, &self.plan, &[], self.ways.clone(), self.eyes.clone());
        let host = Host::start(&mut self.sim, place);
        self.hosts.insert(id, host);
        self.roster.add(id, host::endpoint(id));
    }

    fn change(&self, change: Change) {
        // Its task ends only with the simulation.
        let _ = self.changes.send(change);
    }

    // ---- crashes ----------------------------------------------------------------------------------------------

    /// Crashes those who are meant and run; if nobody does, it waits for one.
    fn crash_whom(&mut self, crash: Crash) {
        let ids: Vec<u64> = match crash.whom {
            Whom::One(who) => self.runs(who).into_iter().collect(),
            Whom::All => self.hosts.keys().copied().collect(),
        };
        let crashed = ids.into_iter().filter(|id| self.crash(*id, crash.for_ms)).count();
        if crashed > 0 { self.took_effect(&crash.asked) } else { self.crashes.push(crash) }
    }

    /// Whether it ran, and runs no more.
    pub(super) fn crash(&mut self, id: u64, for_ms: u64) -> bool {
        let (back_at_ms, name) = (self.now_ms() + for_ms, host::name(id));
        let Some(host) = self.hosts.get_mut(&id) else { return false };
        if host.back_at_ms.is_some() || host.place.ended().is_some() {
            return false;
        }
        let ran = self.sim.is_host_running(name.as_str());
        self.sim.crash(name.as_str());
        let (written, lost) = host.place.disk.crash();
        host.back_at_ms = Some(back_at_ms);
        host.led = None;
        let is_down = !self.sim.is_host_running(name) && host.place.peer().is_none();
        self.told(&format!("peer {id} crashes and loses {lost} of {written} changes that were not synced"));
        ran && is_down
    }

    // ---- the network ------------------------------------------------------------------------------------------

    /// Cuts those of the links that are not cut already.
    fn cut(&mut self, (asked, fault): (Asked, &Fault), pairs: Vec<(String, String)>, how: How, until_ms: u64) {
        let ways = how.ways(&pairs);
        let met_before = self.ways.met(&ways);
        let (fault, own) = (fault.clone(), Vec::new());
        self.cuts.push(Cut { asked, fault, until_ms, pairs, own, how, ways, met_before });
        self.cut_what_is_whole();
    }

    /// Has every link cut that some cut is about.
    fn cut_what_is_whole(&mut self) {
        let same = |a: &(String, String), b: &(String, String)| a == b || (&a.1, &a.0) == (&b.0, &b.1);
        for at in 0..self.cuts.len() {
            let is_cut =
                |pair: &(String, String)| self.cuts.iter().any(|cut| cut.own.iter().any(|other| same(pair, other)));
            let Cut { pairs, how, .. } = &self.cuts[at];
            let (how, whole): (How, Vec<_>) = (*how, pairs.iter().filter(|pair| !is_cut(pair)).cloned().collect());
            for (one, other) in &whole {
                match how {
                    How::Lost => self.sim.partition(one.as_str(), other.as_str()),
                    How::Held => self.sim.hold(one.as_str(), other.as_str()),
                    How::OneWay => self.sim.partition_oneway(one.as_str(), other.as_str()),
                }
            }
            how.ways(&whole).iter().for_each(|way| self.ways.cut(way, true));
            self.cuts[at].own.extend(whole);
        }
    }

    fn join(&self, cut: &Cut) {
        for (one, other) in &cut.own {
            match cut.how {
                How::Lost => self.sim.repair(one.as_str(), other.as_str()),
                How::Held => self.sim.release(one.as_str(), other.as_str()),
                How::OneWay => self.sim.repair_oneway(one.as_str(), other.as_str()),
            }
        }
        cut.how.ways(&cut.own).iter().for_each(|way| self.ways.cut(way, false));
    }

    /// Messages that met it.
    fn met(&self, cut: &Cut) -> u64 {
        self.ways.met(&cut.ways) - cut.met_before
    }

    fn was_slow(&self, slow: &Slow) -> bool {
        self.ways.sent() - slow.sent_before >= SLOW_MESSAGES
    }

    /// Messages take as long as the newest of the faults that make them slow has it.
    fn set_latency(&self) {
        let latency_ms = self.slow.last().map_or(self.plan.latency_ms, |slow| slow.latency_ms);
        self.sim.set_max_message_latency(Duration::from_millis(latency_ms));
    }

    // ---- their ends -------------------------------------------------------------------------------------------

    /// Ends what is over by now.
    pub(super) fn end_faults(&mut self) {
        let now = self.now_ms();
        self.end_of_cuts(now);
        let due = std::mem::take(&mut self.due);
        let (due, later): (Vec<_>, Vec<_>) = due.into_iter().partition(|(at_ms, ..)| *at_ms <= now);
        self.due = later;
        for (_, ids, for_ms) in due {
            ids.into_iter().for_each(|id| {
                self.crash(id, for_ms);
            });
        }
        self.end_of_slowness(now);
        self.end_of_clocks(now);
        self.end_of_full_disks(now);
        let down = self.hosts.iter().filter(|(_, host)| host.back_at_ms.is_some_and(|at| at <= now));
        let back: Vec<u64> = down.map(|(id, _)| *id).collect();
        for id in back {
            self.sim.bounce(host::name(id));
            if let Some(host) = self.hosts.get_mut(&id) {
                host.back_at_ms = None;
            }
            self.told(&format!("peer {id} is back"));
        }
        for crash in std::mem::take(&mut self.crashes) {
            if self.healing { self.without_effect.push(crash.asked.what) } else { self.crash_whom(crash) }
        }
    }

    fn end_of_cuts(&mut self, now: u64) {
        let cuts = std::mem::take(&mut self.cuts);
        let is_over = |cut: &Cut| {
            let waited = now.saturating_sub(cut.until_ms) >= ANEW_AFTER_MS;
            cut.until_ms <= now && (self.healing || waited || self.met(cut) > 0)
        };
        let (over, cuts): (Vec<Cut>, Vec<Cut>) = cuts.into_iter().partition(is_over);
        self.cuts = cuts;
        let mut anew = Vec::new();
        for cut in over {
            self.join(&cut);
            let met = self.met(&cut);
            self.told(&format!("{} links are whole again, {met} messages met the cut", cut.own.len()));
            if met > 0 {
                self.took_effect(&cut.asked);
            } else if self.healing {
                self.without_effect.push(cut.asked.what);
            } else {
                anew.push((cut.asked, cut.fault.at_the_leader()));
            }
        }
        self.cut_what_is_whole();
        for (asked, fault) in anew {
            self.told(&format!("once more: {fault}"));
            self.strike(asked, &fault);
        }
    }

    fn end_of_slowness(&mut self, now: u64) {
        let slow = std::mem::take(&mut self.slow);
        let is_over = |slow: &Slow| slow.until_ms <= now && (self.healing || self.was_slow(slow));
        let (over, slow): (Vec<Slow>, Vec<Slow>) = slow.into_iter().partition(is_over);
        self.slow = slow;
        for over in over {
            self.set_latency();
            let sent = self.ways.sent() - over.sent_before;
            self.told(&format!("messages are as quick as before, {sent} were sent meanwhile"));
            if self.was_slow(&over) { self.took_effect(&over.asked) } else { self.without_effect.push(over.asked.what) }
        }
    }

    /// Ends all faults.
    pub(super) fn heal(&mut self) -> Result<(), Broken> {
        let now = self.now_ms();
        self.healing = true;
        self.due.clear();
        self.ahead.iter_mut().for_each(|ahead| ahead.until_ms = now);
        self.filled.iter_mut().for_each(|filled| filled.until_ms = now);
        self.cuts.iter_mut().for_each(|cut| cut.until_ms = now);
        self.slow.iter_mut().for_each(|slow| slow.until_ms = now);
        for host in self.hosts.values_mut() {
            host.back_at_ms = host.back_at_ms.map(|_| now);
        }
        self.end_faults();
        self.told("all faults have ended");
        self.step()
    }
}
