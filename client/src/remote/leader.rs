//! Who leads, as a pure value: what [`ask_leader`](super) learns from answers and hints, and when the asking is over.
//!
//! The answer with the highest term wins, because a term has at most one leader. An older answer never replaces a
//! newer one; a leader that failed is forgotten, and believed again only if somebody names it anew.
//!
//! One that fails again soon after it was named anew is gone, and the peers do not know it yet: they are asked to answer
//! when they know of another one ([`View::question`]), instead of being asked again and again.

use std::time::{Duration, Instant};

use lake_proto::v1::{LeaderResponse, Member};

use crate::store::{KnownLeader, Leader};
/// How long a failure counts: what fails again later has failed for another reason.
const SUSPECTED_FOR: Duration = Duration::from_secs(2);
/// How long peers are asked to wait for a leader that can be reached: longer than an election takes.
pub const AWAITED_FOR: Duration = Duration::from_secs(1);

/// What is known of the leader at this moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    term: u64,
    leader: Option<KnownLeader>,
    /// When the leader was named.
    named: Option<Instant>,
    failed: Option<Failed>,
    /// When a question was last answered by nobody who knows a leader.
    in_vain: Option<Instant>,
}

/// A leader that was forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failed {
    id: u64,
    term: u64,
    /// In a row.
    times: u32,
    at: Instant,
}

/// What the peers are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// How long a peer may wait until it knows better.
    pub wait: Duration,
    /// Id and term of a leader that is not waited for.
    pub besides: Option<(u64, u64)>,
}

impl View {
    /// The leader to talk to, if one is known.
    pub fn leader(&self) -> Option<&KnownLeader> {
        self.leader.as_ref()
    }

    /// Takes in what a peer says of the leader in `term`.
    pub fn learn(&mut self, term: u64, leader: Option<&Member>) {
        if term < self.term {
            return;
        }
        if term > self.term {
            self.term = term;
            self.leader = None;
        }
        if let Some(m) = leader.filter(|m| !m.grpc_address.is_empty()) {
            self.leader = Some(KnownLeader { id: m.id, address: m.grpc_address.clone(), term });
        }
    }

    /// The same, at that time: whoever is named now is tried anew.
    pub fn learn_at(&mut self, now: Instant, term: u64, leader: Option<&Member>) {
        let before = self.leader.clone();
        self.learn(term, leader);
        if self.leader != before {
            self.named = self.leader.is_some().then_some(now);
        }
    }

    /// An attempt that began at `began` shows at `now` that the leader at `address` cannot be reached, or that it does not
    /// lead. If it was named after the attempt began, it still has to be tried.
    pub fn forget(&mut self, address: &str, began: Instant, now: Instant) {
        if self.named.is_some_and(|named| named > began) {
            return;
        }
        let Some(gone) = self.leader.take_if(|l| l.address == address) else { return };
        let before = self.failed.take().filter(|f| (f.id, f.term) == (gone.id, gone.term) && is_recent(f.at, now));
        let times = before.map_or(1, |f| f.times.saturating_add(1));
        self.failed = Some(Failed { id: gone.id, term: gone.term, times, at: now });
    }

    /// Nobody who was asked knows a leader.
    pub fn asked_in_vain(&mut self, now: Instant) {
        self.in_vain = Some(now);
    }

    /// What to ask the peers at `now`. The first time they answer at once: a connection may have broken by chance, or the
    /// other peers may know already.
    pub fn question(&self, now: Instant) -> Question {
        let besides = self.failed.as_ref().filter(|f| f.times > 1 && is_recent(f.at, now)).map(|f| (f.id, f.term));
        let waits = besides.is_some() || self.in_vain.is_some_and(|at| is_recent(at, now));
        Question { wait: if waits { AWAITED_FOR } else { Duration::ZERO }, besides }
    }

    /// Id and term of the leader that was forgotten last.
    pub fn lost(&self) -> Option<(u64, u64)> {
        self.failed.as_ref().map(|failed| (failed.id, failed.term))
    }

    /// For errors: who leads, as far as is known.
    pub fn leading(&self) -> Leader {
        self.leader.clone().map_or(Leader::Unknown { term: self.term }, Leader::Known)
    }
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < SUSPECTED_FOR
}

/// One round of asking every endpoint.
#[derive(Debug)]
pub struct Round {
    asked: usize,
    answered: usize,
    best: View,
    /// How many answers named the best leader.
    agreeing: usize,
    /// The members that the best answer listed.
    members: Vec<Member>,
}

impl Round {
    /// A round that asks this many endpoints.
    pub fn new(asked: usize) -> Self {
        Self { asked, answered: 0, best: View::default(), agreeing: 0, members: vec![] }
    }

    /// Takes in one endpoint's answer; `None` if it gave none.
    pub fn answer(&mut self, answer: Option<LeaderResponse>) {
        self.answered += 1;
        let Some(answer) = answer else { return };
        let before = self.best.leader.clone();
        self.best.learn(answer.term, answer.leader.as_ref());
        if self.best.leader != before {
            self.agreeing = 0;
            self.members = answer.members;
        }
        let named = answer.leader.map(|l| (l.id, answer.term));
        if named.is_some() && named == self.best.leader.as_ref().map(|l| (l.id, l.term)) {
            self.agreeing += 1;
        }
    }

    /// Whether a leader has been named at all.
    pub fn has_leader(&self) -> bool {
        self.best.leader.is_some()
    }

    /// Nothing that can still come would change the outcome: all have answered, or a majority names one leader.
    pub fn decided(&self) -> bool {
        self.answered >= self.asked || self.agreeing > self.asked / 2
    }

    /// The outcome, and the members that were named with it.
    pub fn finish(self) -> (View, Vec<Member>) {
        (self.best, self.members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn member(id: u64) -> Member {
        Member { id, grpc_address: format!("127.0.0.1:{id}"), ..Member::default() }
    }

    fn says(term: u64, leader: Option<u64>) -> Option<LeaderResponse> {
        Some(LeaderResponse { term, leader: leader.map(member), members: vec![member(1)], ..LeaderResponse::default() })
    }

    #[test]
    fn the_highest_term_wins_whatever_the_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let answers = [says(4, Some(1)), says(5, Some(2)), says(4, Some(1))];
            let mut round = Round::new(3);
            for i in order {
                round.answer(answers[i].clone());
            }
            assert_eq!(round.finish().0.leader().map(|l| (l.id, l.term)), Some((2, 5)));
        }
    }

    #[test]
    fn a_majority_decides_without_the_black_holed_rest() {
        let mut round = Round::new(3);
        round.answer(says(5, Some(2)));
        assert!(round.has_leader() && !round.decided());
        round.answer(says(5, Some(2)));
        assert!(round.decided());
    }

    #[test]
    fn a_higher_term_without_a_leader_unseats_the_older_one() {
        let mut round = Round::new(3);
        round.answer(says(4, Some(1)));
        round.answer(says(5, None));
        round.answer(None);
        assert!(round.decided() && !round.has_leader());
    }

    #[test]
    fn old_news_changes_nothing_and_a_failed_leader_is_forgotten() {
        let mut view = View::default();
        view.learn(5, Some(&member(2)));
        view.learn(4, Some(&member(1)));
        assert_eq!(view.leader().map(|l| l.id), Some(2));
        view.learn(5, None);
        assert_eq!(view.leader().map(|l| l.id), Some(2));
        let now = clock::now();
        view.forget("127.0.0.1:1", now, now);
        assert!(view.leader().is_some());
        view.forget("127.0.0.1:2", now, now);
        assert_eq!(view.leader(), None);
        view.learn(6, None);
        assert_eq!(view.leading(), Leader::Unknown { term: 6 });
    }

    #[test]
    fn a_leader_that_fails_again_is_not_waited_for() {
        let start = clock::now();
        let at = |n: u64| start + Duration::from_millis(n);
        let mut view = View::default();
        let at_once = Question { wait: Duration::ZERO, besides: None };
        assert_eq!(view.question(at(0)), at_once);
        view.learn_at(at(0), 5, Some(&member(2)));
        view.forget("127.0.0.1:2", at(10), at(20));
        assert_eq!(view.question(at(20)), at_once, "the connection may have broken by chance");
        view.learn_at(at(30), 5, Some(&member(2)));
        // Others that had waited for the same answer as the first one.
        view.forget("127.0.0.1:2", at(10), at(40));
        assert!(view.leader().is_some(), "it was named after they had begun");
        view.forget("127.0.0.1:2", at(31), at(50));
        assert_eq!(view.question(at(60)), Question { wait: AWAITED_FOR, besides: Some((2, 5)) });
        assert_eq!(view.question(at(60) + SUSPECTED_FOR), at_once);
        view.learn_at(at(70), 6, Some(&member(1)));
        view.forget("127.0.0.1:1", at(80), at(80));
        assert_eq!(view.question(at(90)), at_once, "that is another one");
        view.asked_in_vain(at(90));
        assert_eq!(view.question(at(100)), Question { wait: AWAITED_FOR, besides: None });
    }
}
