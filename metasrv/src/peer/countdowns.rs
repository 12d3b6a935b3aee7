//! The leader's measurement of silence (semantics, sections 4 and 5), as a pure value: one of these for leases, one for
//! sessions.
//!
//! ```text
//!   began -> running --- silent for its time to live ---> proposed --- committed ---> gone
//!               ^ |                                          ^  |
//!               +-+ renewed, or all restarted                +--+ the proposal failed: proposed again
//! ```
//!
//! Invariants:
//! - nothing becomes due before it has been silent for its whole time to live, counted from the last renewal, from the
//!   begin of this peer's term as leader, or from a late look;
//! - once its expiry was proposed in a term, nothing is renewed in that term: whether the proposal will be committed is not
//!   in the leader's hands any more;
//! - a look that comes more than [`LATE`] after it was planned restarts every running countdown: whoever kept something
//!   alive meanwhile may not have been heard.
//!
//! Ids are revisions: greater ones began later, and none comes twice.
//!
//! No clock is read here: the caller says when it is. A renewal costs one look-up; the order of deadlines is mended when an
//! old one comes up, at most once per time to live.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use lake_proto::limits::MAX_IDS;

/// A look this much after it was planned is late.
pub const LATE: Duration = Duration::from_secs(1);
/// Looks are planned at most this far ahead, so that a pause of the whole process is noticed.
pub const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Looks are planned at least this far ahead.
const SHORTEST_SLEEP: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    /// Its expiry was proposed, and the proposal is under way.
    Proposed,
    /// Its expiry was proposed, that failed, and it is to be proposed again at the deadline.
    Again,
}

#[derive(Debug, Clone)]
struct Countdown {
    ttl: Duration,
    deadline: Instant,
    stage: Stage,
}

/// What came of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    Alive,
    /// Its expiry was proposed.
    Over,
    /// The countdowns are not, or no longer, those of that term.
    OtherTerm,
}

/// The countdowns of one kind of thing.
#[derive(Debug, Clone, Default)]
pub struct Countdowns {
    /// The term in which this peer leads and counts; 0: none.
    term: u64,
    by_id: HashMap<u64, Countdown>,
    /// For each countdown that is not [`Stage::Proposed`] an instant at or before its deadline. Entries of what is gone
    /// are left until they come up.
    order: BinaryHeap<Reverse<(Instant, u64)>>,
    /// When the next look is due.
    planned: Option<Instant>,
}

impl Countdowns {
    /// This peer leads `term` from now on: everything alive (with its time to live) counts down anew. What was proposed in
    /// this very term stays proposed.
    pub fn lead(&mut self, term: u64, now: Instant, alive: impl Iterator<Item = (u64, Duration)>) {
        let before = std::mem::take(&mut self.by_id);
        let proposed = |id: &u64| self.term == term && before.get(id).is_some_and(|c| c.stage != Stage::Running);
        self.by_id = alive
            .map(|(id, ttl)| {
                let (stage, deadline) = if proposed(&id) { (Stage::Again, now) } else { (Stage::Running, now + ttl) };
                (id, Countdown { ttl, deadline, stage })
            })
            .collect();
        self.term = term;
        self.planned = Some(now);
        self.reorder();
    }

    /// This peer does not lead any more: nothing counts.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// How many count down, or wait for their end.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Something began. Nothing happens if it is known, or if this peer does not lead.
    pub fn began(&mut self, id: u64, ttl: Duration, now: Instant) {
        if self.term == 0 || self.by_id.contains_key(&id) {
            return;
        }
        let deadline = now + ttl;
        self.by_id.insert(id, Countdown { ttl, deadline, stage: Stage::Running });
        self.order.push(Reverse((deadline, id)));
    }

    /// A sign of life that arrived at `arrived`, of something that is alive, for a keep-alive confirmed in `term`.
    pub fn renew(&mut self, term: u64, id: u64, ttl: Duration, arrived: Instant) -> Renewal {
        if term == 0 || self.term != term {
            return Renewal::OtherTerm;
        }
        self.began(id, ttl, arrived);
        self.heard(id, arrived)
    }

    /// A sign of life of something that may be unknown here.
    pub fn heard(&mut self, id: u64, arrived: Instant) -> Renewal {
        match self.by_id.get_mut(&id) {
            Some(c) if c.stage == Stage::Running => {
                c.deadline = c.deadline.max(arrived + c.ttl);
                Renewal::Alive
            }
            Some(_) => Renewal::Over,
            None => Renewal::OtherTerm,
        }
    }

    /// Something has ended.
    pub fn ended(&mut self, id: u64) {
        self.by_id.remove(&id);
        if self.order.len() > 2 * self.by_id.len() + MAX_IDS {
            self.reorder();
        }
    }

    /// The proposal to end these failed; it is to be made again at `at`.
    pub fn again(&mut self, ids: &[u64], at: Instant) {
        for id in ids {
            if let Some(c) = self.by_id.get_mut(id).filter(|c| c.stage == Stage::Proposed) {
                c.stage = Stage::Again;
                c.deadline = at;
                self.order.push(Reverse((at, *id)));
            }
        }
    }

    /// What has been silent for its time to live: its expiry counts as proposed from now on. At most [`MAX_IDS`] at a time;
    /// ask again until there is none.
    pub fn due(&mut self, now: Instant) -> Vec<u64> {
        if self.term == 0 {
            return Vec::new();
        }
        self.look(now);
        let mut ids = Vec::new();
        while ids.len() < MAX_IDS
            && let Some(Reverse((at, id))) = self.order.peek().copied()
            && at <= now
        {
            self.order.pop();
            match self.by_id.get_mut(&id) {
                Some(c) if c.stage == Stage::Proposed => {}
                Some(c) if c.deadline > now => self.order.push(Reverse((c.deadline, id))),
                Some(c) => {
                    c.stage = Stage::Proposed;
                    ids.push(id);
                }
                None => {}
            }
        }
        ids
    }

    /// When to look next. A later look counts as late.
    pub fn next_look(&mut self, now: Instant) -> Instant {
        self.look(now);
        let latest = now + LONGEST_SLEEP;
        let first = self.order.peek().map_or(latest, |Reverse((at, _))| *at);
        let next = first.clamp(now + SHORTEST_SLEEP, latest);
        self.planned = Some(next);
        next
    }

    /// How long until something expires if nothing is heard of it.
    pub fn remaining(&self, id: u64, now: Instant) -> Option<Duration> {
        self.by_id.get(&id).map(|c| match c.stage {
            Stage::Running => c.deadline.saturating_duration_since(now),
            Stage::Proposed | Stage::Again => Duration::ZERO,
        })
    }

    fn look(&mut self, now: Instant) {
        let planned = self.planned.replace(now);
        if planned.is_none_or(|planned| now <= planned + LATE) {
            return;
        }
        for c in self.by_id.values_mut().filter(|c| c.stage == Stage::Running) {
            c.deadline = now + c.ttl;
        }
        self.reorder();
    }

    fn reorder(&mut self) {
        let waiting = self.by_id.iter().filter(|(_, c)| c.stage != Stage::Proposed);
        self.order = waiting.map(|(id, c)| Reverse((c.deadline, *id))).collect();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lake_client::clock;
    use proptest::prelude::*;

    use super::*;

    const NONE: [u64; 0] = [];

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn leading(now: Instant, alive: &[(u64, u64)]) -> Countdowns {
        let mut countdowns = Countdowns::default();
        countdowns.lead(1, now, alive.iter().map(|(id, ttl)| (*id, ms(*ttl))));
        countdowns
    }

    #[test]
    fn silence_is_due_and_a_sign_of_life_puts_it_off() {
        let t = clock::now();
        let mut c = leading(t, &[(1, 1000), (2, 1000)]);
        assert_eq!(c.due(t + ms(999)), NONE);
        assert_eq!(c.renew(1, 2, ms(1000), t + ms(900)), Renewal::Alive);
        assert_eq!(c.due(t + ms(1000)), [1]);
        assert_eq!(c.due(t + ms(1800)), NONE);
        assert_eq!(c.due(t + ms(1900)), [2]);
    }

    #[test]
    fn what_was_proposed_is_never_renewed_in_that_term() {
        let t = clock::now();
        let mut c = leading(t, &[(1, 1000)]);
        assert_eq!(c.due(t + ms(1000)), [1]);
        assert_eq!(c.renew(1, 1, ms(1000), t + ms(1000)), Renewal::Over);
        c.again(&[1], t + ms(1100));
        assert_eq!(c.renew(1, 1, ms(1000), t + ms(1050)), Renewal::Over);
        assert_eq!(c.due(t + ms(1099)), NONE);
        assert_eq!(c.due(t + ms(1100)), [1]);
        c.again(&[1], t + ms(1200));
        // The same term begun again, as after a short loss of the quorum.
        c.lead(1, t + ms(1150), [(1, ms(1000))].into_iter());
        assert_eq!(c.renew(1, 1, ms(1000), t + ms(1150)), Renewal::Over);
        assert_eq!(c.due(t + ms(1150)), [1]);
        // In another term the old proposal means nothing.
        c.lead(2, t + ms(1200), [(1, ms(1000))].into_iter());
        assert_eq!(c.renew(2, 1, ms(1000), t + ms(1200)), Renewal::Alive);
        assert_eq!(c.renew(1, 1, ms(1000), t + ms(1200)), Renewal::OtherTerm);
    }

    #[test]
    fn a_new_leader_and_a_late_look_restart_in_full() {
        let t = clock::now();
        let mut c = leading(t, &[(1, 1500)]);
        let planned = c.next_look(t);
        assert!(planned <= t + LONGEST_SLEEP);
        let late = planned + LATE + ms(500);
        assert_eq!(c.due(late), NONE, "nobody could be heard meanwhile");
        assert_eq!(c.due(late + ms(999)), NONE);
        c.next_look(late + ms(999));
        assert_eq!(c.due(late + ms(1500)), [1]);
        c.lead(3, late + ms(1500), [(1, ms(1500))].into_iter());
        assert_eq!(c.remaining(1, late + ms(1500)), Some(ms(1500)));
    }

    #[test]
    fn nothing_counts_while_this_peer_does_not_lead() {
        let t = clock::now();
        let mut c = leading(t, &[(1, 1000)]);
        c.stop();
        c.began(2, ms(1000), t);
        assert_eq!(c.due(t + ms(60_000)), NONE);
        assert_eq!(c.renew(1, 1, ms(1000), t), Renewal::OtherTerm);
        assert_eq!(c.renew(0, 1, ms(1000), t), Renewal::OtherTerm);
        assert!(c.is_empty());
    }

    #[test]
    fn much_coming_and_going_leaves_nothing_behind_and_proposals_are_bounded() {
        let t = clock::now();
        let mut c = leading(t, &[]);
        for id in 1..=100_000 {
            c.began(id, ms(60_000), t);
            c.ended(id);
        }
        assert!(c.order.len() <= MAX_IDS + 1, "{}", c.order.len());
        let many: Vec<_> = (1..=2500).map(|id| (id, 1000)).collect();
        let mut c = leading(t, &many);
        let sizes: Vec<_> = (0..4).map(|_| c.due(t + ms(1000)).len()).collect();
        assert_eq!(sizes, [1000, 1000, 500, 0]);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Began(u64, u64),
        Renew(u64, u64),
        Ended(u64),
        Again(u64),
        Lead(bool),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1..12u64, 1000..4000u64).prop_map(|(id, ttl)| Step::Began(id, ttl)),
            4 => (1..12u64, 0..300u64).prop_map(|(id, ago)| Step::Renew(id, ago)),
            1 => (1..12u64).prop_map(Step::Ended),
            2 => (1..12u64).prop_map(Step::Again),
            1 => any::<bool>().prop_map(Step::Lead),
            8 => prop_oneof![6 => 0..400u64, 1 => 900..2000u64].prop_map(Step::Wait),
        ]
    }

    /// Time to live, deadline, and whether it was proposed and is to be proposed.
    type Naive = BTreeMap<u64, (u64, u64, bool, bool)>;

    proptest! {
        #[test]
        fn it_does_what_a_naive_one_does(steps in prop::collection::vec(step(), 1..120)) {
            let start = clock::now();
            let at = |n: u64| start + ms(n);
            let (mut now, mut term, mut planned) = (10_000u64, 1, 10_000u64);
            let mut c = Countdowns::default();
            c.lead(term, at(now), std::iter::empty());
            let mut naive = Naive::new();
            for step in steps {
                match step {
                    Step::Began(id, ttl) => {
                        c.began(id, ms(ttl), at(now));
                        naive.entry(id).or_insert((ttl, now + ttl, false, true));
                    }
                    Step::Renew(id, ago) => {
                        let ttl = naive.get(&id).map_or(1500, |n| n.0);
                        let n = naive.entry(id).or_insert((ttl, now - ago + ttl, false, true));
                        if !n.2 {
                            n.1 = n.1.max(now - ago + n.0);
                        }
                        let expected = if n.2 { Renewal::Over } else { Renewal::Alive };
                        prop_assert_eq!(c.renew(term, id, ms(ttl), at(now - ago)), expected);
                    }
                    Step::Ended(id) => {
                        c.ended(id);
                        naive.remove(&id);
                    }
                    Step::Again(id) => {
                        c.again(&[id], at(now + 50));
                        if let Some(n) = naive.get_mut(&id).filter(|n| n.2 && !n.3) {
                            (n.1, n.3) = (now + 50, true);
                        }
                    }
                    Step::Lead(same) => {
                        term += u64::from(!same);
                        c.lead(term, at(now), naive.iter().map(|(id, n)| (*id, ms(n.0))));
                        for n in naive.values_mut() {
                            n.2 &= same;
                            n.1 = if n.2 { now } else { now + n.0 };
                            n.3 = true;
                        }
                        planned = now;
                    }
                    Step::Wait(passed) => {
                        now += passed;
                        if now > planned + 1000 {
                            for n in naive.values_mut().filter(|n| !n.2) {
                                n.1 = now + n.0;
                            }
                        }
                        let mut expected = Vec::new();
                        for (id, n) in naive.iter_mut().filter(|(_, n)| n.3 && n.1 <= now) {
                            (n.2, n.3) = (true, false);
                            expected.push(*id);
                        }
                        let mut due = c.due(at(now));
                        due.sort_unstable();
                        prop_assert_eq!(due, expected);
                        planned = (c.next_look(at(now)) - start).as_millis() as u64;
                        prop_assert!(planned > now && planned <= now + 100);
                    }
                }
                for (id, n) in &naive {
                    let left = if n.2 { 0 } else { n.1.saturating_sub(now) };
                    prop_assert_eq!(c.remaining(*id, at(now)), Some(ms(left)));
                }
            }
        }
    }
}
