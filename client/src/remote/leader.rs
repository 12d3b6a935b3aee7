//! Who leads, as a pure value: what [`ask_leader`](super) learns from answers and hints, and when the asking is over.
//!
//! The answer with the highest term wins, because a term has at most one leader. An older answer never replaces a
//! newer one; a leader that failed is forgotten, and believed again only if somebody names it anew.

use lake_proto::v1::{LeaderResponse, Member};

use crate::store::{KnownLeader, Leader};

/// What is known of the leader at this moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    term: u64,
    leader: Option<KnownLeader>,
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

    /// The leader at `address` could not be reached, or says that it does not lead.
    pub fn forget(&mut self, address: &str) {
        self.leader.take_if(|l| l.address == address);
    }

    /// For errors: who leads, as far as is known.
    pub fn leading(&self) -> Leader {
        self.leader.clone().map_or(Leader::Unknown { term: self.term }, Leader::Known)
    }
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
        view.forget("127.0.0.1:1");
        assert!(view.leader().is_some());
        view.forget("127.0.0.1:2");
        assert_eq!(view.leader(), None);
        view.learn(6, None);
        assert_eq!(view.leading(), Leader::Unknown { term: 6 });
    }
}
