//! How surely a node is lost, by how long it has been silent: the phi accrual failure detector (Hayashibara and others, 2004), as a
//! pure value. One detector a node; [`Detectors`] has those of one term.
//!
//! `phi` is the negative decimal logarithm of the chance that a heartbeat comes even later than now, given how regularly the last
//! ones came: at 1 one suspicion in ten is wrong, at 8 one in a hundred million. The intervals count as normally distributed, whose
//! tail is taken from the logistic approximation of Bowling and others (2009).
//!
//! ```text
//!   unknown --- heard, or resumed from a route ---> watched --- phi > THRESHOLD ---> suspected --- heard ---> watched
//! ```
//!
//! Invariants:
//! - a detector that has heard nothing yet expects the interval that nodes are told to keep, give or take a quarter of it;
//! - the silence that ended in a suspicion teaches nothing: one long pause does not make the next one look usual;
//! - a look that comes more than [`LATE`] after the one before counts for no silence, nor for the time that this peer has led: it
//!   slept, and heard nobody meanwhile. So does the first one after [`ALONE`] in which no quorum confirmed it;
//! - since when a node is heard counts anew with another process, and after a suspicion;
//! - detectors belong to one term, and a new leader has none. Nodes that routes name and that it has not heard of are watched from
//!   the begin of its term, but not suspected before the warm-up is over.
//!
//! Nothing here is needed for safety: a shard is moved only once the lease of its node has ended. No clock is read here.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use lake_client::nodes::Rhythm;

/// Above it a node is suspected.
pub const THRESHOLD: f64 = 8.0;
/// Intervals that a detector learns from.
const WINDOW: usize = 100;
/// A look this much after the one before comes late.
pub const LATE: Duration = Duration::from_secs(1);
/// Without a quorum for so long, heartbeats were left without an answer.
const ALONE: Duration = Duration::from_secs(2);

/// What a detector expects of every node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expects {
    /// Between two heartbeats.
    pub interval: Duration,
    /// Silence beyond the usual that is no sign of anything: a heartbeat that is lost, and sent again elsewhere.
    pub pause: Duration,
    /// The least that intervals are taken to vary by: a machine that was idle until now may be busy next.
    pub least_deviation: Duration,
}

impl From<Rhythm> for Expects {
    fn from(rhythm: Rhythm) -> Self {
        Self { interval: rhythm.interval, pause: rhythm.timeout(), least_deviation: rhythm.interval / 5 }
    }
}

/// One node's detector.
#[derive(Debug, Clone)]
pub struct Phi {
    expects: Expects,
    /// In seconds.
    intervals: VecDeque<f64>,
    last: Instant,
}

impl Phi {
    /// Watches from `now` on.
    pub fn new(expects: Expects, now: Instant) -> Self {
        let (mean, deviation) = (expects.interval.as_secs_f64(), expects.interval.as_secs_f64() / 4.0);
        // Two that have this mean and this deviation.
        Self { expects, intervals: [mean - deviation, mean + deviation].into(), last: now }
    }

    /// A heartbeat came. Says whether the node was suspected until then.
    pub fn heard(&mut self, now: Instant) -> bool {
        let interval = now.saturating_duration_since(self.last);
        let suspected = self.phi(now) > THRESHOLD;
        if !suspected && !interval.is_zero() {
            if self.intervals.len() == WINDOW {
                self.intervals.pop_front();
            }
            self.intervals.push_back(interval.as_secs_f64());
        }
        self.last = self.last.max(now);
        suspected
    }

    /// Nobody could be heard for so long, until now.
    pub fn forgive(&mut self, pause: Duration, now: Instant) {
        self.last = (self.last + pause).min(now);
    }

    /// How surely it is lost.
    pub fn phi(&self, now: Instant) -> f64 {
        let count = self.intervals.len() as f64;
        let mean = self.intervals.iter().sum::<f64>() / count;
        let variance = self.intervals.iter().map(|i| (i - mean) * (i - mean)).sum::<f64>() / count;
        let deviation = variance.sqrt().max(self.expects.least_deviation.as_secs_f64());
        let silent = now.saturating_duration_since(self.last).as_secs_f64();
        let y = (silent - mean - self.expects.pause.as_secs_f64()) / deviation;
        // The chance of more than y is about 1 / (1 + e^a).
        let a = y * (1.5976 + 0.070_566 * y * y);
        // ln(1 + e^a), also where e^a is beyond all numbers.
        let ln = if a > 0.0 { a + (-a).exp().ln_1p() } else { a.exp().ln_1p() };
        ln / std::f64::consts::LN_10
    }
}

/// The detectors of one term.
#[derive(Debug, Default)]
pub struct Detectors {
    /// 0: this peer is not on duty.
    term: u64,
    /// What is expected, and when the term began here.
    leading: Option<(Expects, Instant)>,
    nodes: HashMap<String, Watched>,
    looked: Option<Instant>,
    /// No quorum confirmed it when it looked last.
    alone: bool,
}

#[derive(Debug)]
struct Watched {
    phi: Phi,
    /// The process that was heard last, and its first heartbeat since it was not suspected any more; `None`: only a route has told of
    /// the node.
    heard: Option<(String, Instant)>,
}

impl Detectors {
    /// This peer is on duty in `term` from now on, and has heard of nobody.
    pub fn lead(&mut self, term: u64, expects: Expects, now: Instant) {
        *self = Self { term, leading: Some((expects, now)), nodes: HashMap::new(), looked: Some(now), alone: false };
    }

    /// It is no longer.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// A heartbeat of a node's process came.
    pub fn heard(&mut self, term: u64, node: &str, process: &str, now: Instant) {
        let Some((expects, _)) = self.leading.filter(|_| term != 0 && term == self.term) else { return };
        let known = self.nodes.get_mut(node).filter(|watched| watched.may_be(process));
        let Some(watched) = known else {
            let watched = Watched { phi: Phi::new(expects, now), heard: Some((process.to_owned(), now)) };
            self.nodes.insert(node.to_owned(), watched);
            return;
        };
        if watched.phi.heard(now) {
            watched.heard = None;
        }
        watched.heard.get_or_insert_with(|| (process.to_owned(), now));
    }

    /// Routes name these nodes, and no others: those that have not been heard are watched, as if they had been heard when the term
    /// began. One that has not been heard and that no route names any more is not.
    pub fn resume<'a>(&mut self, nodes: impl Iterator<Item = &'a str>) {
        let Some((expects, began)) = self.leading else { return };
        let named: HashSet<&str> = nodes.collect();
        self.nodes.retain(|node, watched| watched.heard.is_some() || named.contains(node.as_str()));
        for node in named {
            if !self.nodes.contains_key(node) {
                let watched = Watched { phi: Phi::new(expects, began), heard: None };
                self.nodes.insert(node.to_owned(), watched);
            }
        }
    }

    /// How long this peer has been on duty, awake and confirmed.
    pub fn led_for(&self, now: Instant) -> Duration {
        self.leading.map_or(Duration::ZERO, |(_, began)| now.saturating_duration_since(began))
    }

    /// The process is registered no more.
    pub fn left(&mut self, node: &str, process: &str) {
        if self.nodes.get(node).is_some_and(|watched| watched.may_be(process)) {
            self.nodes.remove(node);
        }
    }

    /// To be told before the detectors are asked, again and again: a look that comes late counts for no silence. One of a leader that
    /// no quorum has confirmed lately is none: it may not answer heartbeats then.
    pub fn look(&mut self, now: Instant, confirmed: bool) {
        if !confirmed {
            self.alone = true;
            return;
        }
        let late = if std::mem::take(&mut self.alone) { ALONE } else { LATE };
        let since = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        if since > late {
            self.nodes.values_mut().for_each(|watched| watched.phi.forgive(since, now));
            if let Some((_, began)) = &mut self.leading {
                *began = (*began + since).min(now);
            }
        }
        self.looked = Some(now);
    }

    /// How surely a node is lost; `None`: it is not watched.
    pub fn phi(&self, node: &str, now: Instant) -> Option<f64> {
        self.nodes.get(node).map(|watched| watched.phi.phi(now))
    }

    /// Since when this process of it has been heard in this term, if it has.
    pub fn heard_since(&self, node: &str, process: &str) -> Option<Instant> {
        let (heard, since) = self.nodes.get(node)?.heard.as_ref()?;
        (heard == process).then_some(*since)
    }
}

impl Watched {
    /// Whether no other process was heard.
    fn may_be(&self, process: &str) -> bool {
        self.heard.as_ref().is_none_or(|(heard, _)| heard == process)
    }
}

#[cfg(test)]
mod tests {
    use lake_client::clock;
    use proptest::prelude::*;

    use super::*;

    fn expects() -> Expects {
        Rhythm::default().into()
    }

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// After heartbeats with these intervals, how long the node must be silent until it is suspected, to 50 ms.
    fn suspected_after(intervals_ms: impl IntoIterator<Item = u64>) -> Duration {
        let mut now = clock::now();
        let mut phi = Phi::new(expects(), now);
        for ms in intervals_ms {
            now += MS(ms);
            phi.heard(now);
        }
        let mut silent = Duration::ZERO;
        while phi.phi(now + silent) <= THRESHOLD {
            silent += MS(50);
        }
        silent
    }

    #[test]
    fn phi_is_the_chance_of_being_late_as_its_logarithm() {
        let now = clock::now();
        let expects = Expects { interval: MS(1000), pause: Duration::ZERO, least_deviation: MS(100) };
        let phi = Phi::new(expects, now);
        // On time: as likely later as earlier. One, two and three deviations of 250 ms late: as tables of the normal distribution
        // have it, to five hundredths.
        for (late_ms, chance) in [(0, 0.5_f64), (250, 0.158_655), (500, 0.022_750), (750, 0.001_350)] {
            let (said, is) = (phi.phi(now + MS(1000 + late_ms)), -chance.log10());
            assert!((said - is).abs() < 0.05, "{late_ms} ms late: {said}, and it is {is}");
        }
        assert!(phi.phi(now + Duration::from_secs(1 << 30)).is_finite());
        assert_eq!(phi.phi(now), phi.phi(now - MS(5)), "a clock that is read late");
    }

    #[test]
    fn a_node_that_is_killed_is_detected_within_ten_seconds_at_the_median() {
        // It dies at any time between two heartbeats, half an interval after the last at the median.
        let median = |silent: Duration| silent - Rhythm::default().interval / 2;
        let fresh = suspected_after([]);
        let regular = suspected_after([3000; 200]);
        let jittery = suspected_after((0..200).map(|n| 3000 + (n * 7919) % 900));
        for silent in [fresh, regular, jittery] {
            assert!(median(silent) < Duration::from_secs(10), "{silent:?}");
            // Nor is one heartbeat that is lost a reason.
            assert!(silent > Rhythm::default().interval * 2, "{silent:?}");
        }
        assert!(regular < fresh && regular < jittery);
    }

    #[test]
    fn a_long_pause_teaches_nothing() {
        let mut now = clock::now();
        let mut phi = Phi::new(expects(), now);
        let usual = suspected_after([]);
        for _ in 0..20 {
            now += Duration::from_secs(60);
            assert!(phi.phi(now) > THRESHOLD);
            phi.heard(now);
            assert!(phi.phi(now) < 1.0, "it is heard again");
        }
        assert!(phi.phi(now + usual) > THRESHOLD, "and would be missed as soon as before");
    }

    proptest! {
        /// A heartbeat of a loaded machine: nearly always up to a second late, and now and then lost, so that the next one comes
        /// after the timeout.
        #[test]
        fn no_node_of_a_loaded_machine_is_suspected(
            beats in proptest::collection::vec((0_u64..1000, 0_u8..20), 600),
        ) {
            let mut now = clock::now();
            let mut phi = Phi::new(expects(), now);
            for (late_ms, lost) in beats {
                let lost_ms = if lost == 0 { 2000 } else { 0 };
                now += MS(3000 + late_ms + lost_ms);
                prop_assert!(phi.phi(now) <= THRESHOLD, "phi {} after {} ms", phi.phi(now), 3000 + late_ms + lost_ms);
                phi.heard(now);
            }
        }

        #[test]
        fn phi_rises_with_silence(intervals in proptest::collection::vec(1_u64..20_000, 0..200)) {
            let mut now = clock::now();
            let mut phi = Phi::new(expects(), now);
            for ms in intervals {
                now += MS(ms);
                phi.heard(now);
            }
            let mut before = phi.phi(now);
            prop_assert!(before < THRESHOLD);
            for step in 1..400_u64 {
                let next = phi.phi(now + MS(step * 500));
                prop_assert!(next >= before && next.is_finite());
                before = next;
            }
            prop_assert!(before > THRESHOLD, "whatever it has learnt, it ends in suspicion");
        }
    }

    #[test]
    fn detectors_belong_to_one_term_and_resume_from_routes() {
        let (mut detectors, began) = (Detectors::default(), clock::now());
        detectors.heard(0, "a", "p", began);
        assert_eq!(detectors.phi("a", began), None, "nobody is on duty");
        detectors.lead(3, expects(), began);
        detectors.heard(2, "a", "p", began);
        assert_eq!(detectors.phi("a", began), None, "of another term");
        detectors.heard(3, "a", "p", began + MS(500));
        detectors.resume(["a", "b"].into_iter());
        assert_eq!((detectors.heard_since("a", "p"), detectors.heard_since("b", "p")), (Some(began + MS(500)), None));
        let later = began + MS(9900);
        let mut looks = began;
        while looks < later {
            looks += MS(500);
            detectors.look(looks, true);
        }
        assert!(detectors.phi("b", later) > Some(THRESHOLD), "it was watched from the begin");
        detectors.heard(3, "b", "p", later);
        assert!(detectors.phi("b", later) < Some(1.0) && detectors.heard_since("b", "p") == Some(later));
        detectors.resume(["a", "c"].into_iter());
        assert!(detectors.phi("b", later).is_some() && detectors.phi("c", later).is_some());
        detectors.resume(["a"].into_iter());
        assert_eq!(detectors.phi("c", later), None, "no route names it, and it never was heard");
        assert!(detectors.phi("b", later).is_some(), "this one was");
        detectors.left("a", "of before");
        assert!(detectors.phi("a", later).is_some());
        detectors.left("a", "p");
        assert_eq!(detectors.phi("a", later), None);
        detectors.lead(4, expects(), later);
        assert_eq!(detectors.phi("b", later), None);
        detectors.stop();
        detectors.heard(4, "b", "p", later);
        assert_eq!(detectors.phi("b", later), None);
    }

    /// After so many looks, 400 ms one after the other.
    fn look_on(detectors: &mut Detectors, mut now: Instant, looks: u32, confirmed: bool) -> Instant {
        for _ in 0..looks {
            now += MS(400);
            detectors.look(now, confirmed);
        }
        now
    }

    #[test]
    fn a_leader_that_slept_or_was_alone_takes_nobody_for_silent() {
        for sleeps in [true, false] {
            let (mut detectors, mut now) = (Detectors::default(), clock::now());
            detectors.lead(3, expects(), now);
            detectors.heard(3, "a", "p", now);
            now += MS(900);
            detectors.look(now, true);
            now = match sleeps {
                true => now + Duration::from_secs(60),
                false => look_on(&mut detectors, now, 150, false),
            };
            detectors.look(now, true);
            assert!(detectors.phi("a", now) < Some(1.0), "it heard nobody itself");
            // Nor does it count as time in which nodes might have come.
            detectors.resume(["b"].into_iter());
            assert!(detectors.phi("b", now) < Some(1.0) && detectors.led_for(now) < MS(1000));
            now = look_on(&mut detectors, now, 24, true);
            assert!(detectors.phi("a", now) > Some(THRESHOLD), "and looks in time since");
            assert!(detectors.phi("b", now) > Some(THRESHOLD) && detectors.led_for(now) > MS(9000));
        }
    }

    #[test]
    fn a_quorum_that_is_missed_now_and_then_hides_no_silence() {
        let (mut detectors, mut now) = (Detectors::default(), clock::now());
        detectors.lead(3, expects(), now);
        detectors.heard(3, "a", "p", now);
        for _ in 0..10 {
            now = look_on(&mut detectors, now, 2, false);
            now = look_on(&mut detectors, now, 1, true);
        }
        assert!(detectors.phi("a", now) > Some(THRESHOLD));
    }

    #[test]
    fn a_process_is_heard_since_its_own_first_heartbeat_and_anew_after_a_suspicion() {
        let (mut detectors, began) = (Detectors::default(), clock::now());
        detectors.lead(3, expects(), began);
        let mut now = began;
        for _ in 0..10 {
            detectors.heard(3, "a", "first", now);
            now += MS(3000);
        }
        assert_eq!(detectors.heard_since("a", "first"), Some(began));
        assert_eq!(detectors.heard_since("a", "second"), None, "it has not been heard yet");
        detectors.heard(3, "a", "second", now);
        assert_eq!((detectors.heard_since("a", "first"), detectors.heard_since("a", "second")), (None, Some(now)));
        let silent = now + Duration::from_secs(60);
        detectors.heard(3, "a", "second", silent);
        assert_eq!(detectors.heard_since("a", "second"), Some(silent));
        detectors.heard(3, "a", "second", silent + MS(3000));
        assert_eq!(detectors.heard_since("a", "second"), Some(silent));
    }
}
