//! Memberships as values: what the next one is, and whether it may be. No consensus core, no clock.
//!
//! A voter joins or leaves alone: one log entry, since majorities that differ by one voter always meet. Only a swap of two
//! voters takes a joint membership, in which a majority of the old voters and one of the new ones are needed, and a second
//! entry that ends it ([`finished`]).

use std::collections::{BTreeMap, BTreeSet};

use super::founding::MAX_FOUNDERS;
use crate::raft::types::{Member, Membership, members};

/// Voters at most: more of them make a cluster slower, not safer.
pub const MAX_VOTERS: usize = MAX_FOUNDERS;
/// Voters and learners at most.
pub const MAX_MEMBERS: usize = 32;

/// Why a membership cannot be changed like that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("peer {0} is no member")]
    NoMember(u64),
    #[error("peer {0} is no voter")]
    NoVoter(u64),
    #[error("there are {MAX_MEMBERS} members already, which is the most: remove one first")]
    TooManyMembers,
    #[error("there are {MAX_VOTERS} voters already, which is the most: remove one first")]
    TooManyVoters,
    #[error("peer {0} is the last voter: a cluster without one has lost everything it keeps")]
    LastVoter(u64),
}

/// A membership with one set of voters: those of `membership`, or those it is changing to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    voters: BTreeSet<u64>,
    members: BTreeMap<u64, Member>,
}

impl Plan {
    /// The voters that a membership has, or changes to. What only voted before the change is no member of it.
    pub fn of(membership: &Membership) -> Self {
        let voters = membership.get_joint_config().last().cloned().unwrap_or_default();
        let mut members = members(membership);
        let leaving: Vec<u64> = membership.voter_ids().filter(|id| !voters.contains(id)).collect();
        members.retain(|id, _| !leaving.contains(id));
        Self { voters, members }
    }

    /// The voters.
    pub fn voters(&self) -> &BTreeSet<u64> {
        &self.voters
    }

    /// A voter or learner.
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.get(&id)
    }

    /// With another learner.
    pub fn join(mut self, id: u64, member: Member) -> Result<Self, Unfit> {
        if self.members.len() >= MAX_MEMBERS && !self.members.contains_key(&id) {
            return Err(Unfit::TooManyMembers);
        }
        self.members.entry(id).or_insert(member);
        Ok(self)
    }

    /// With a learner as a voter.
    pub fn promote(mut self, id: u64) -> Result<Self, Unfit> {
        if !self.members.contains_key(&id) {
            return Err(Unfit::NoMember(id));
        }
        if self.voters.len() >= MAX_VOTERS && !self.voters.contains(&id) {
            return Err(Unfit::TooManyVoters);
        }
        self.voters.insert(id);
        Ok(self)
    }

    /// Without a voter or learner.
    pub fn remove(mut self, id: u64) -> Result<Self, Unfit> {
        if self.members.remove(&id).is_none() {
            return Err(Unfit::NoMember(id));
        }
        if self.voters.remove(&id) && self.voters.is_empty() {
            return Err(Unfit::LastVoter(id));
        }
        Ok(self)
    }

    /// With the learner `new` as the voter instead of `old`.
    pub fn swap(mut self, old: u64, new: u64) -> Result<Self, Unfit> {
        if !self.voters.remove(&old) {
            return Err(Unfit::NoVoter(old));
        }
        self.members.remove(&old);
        self.promote(new)
    }

    /// Whether those voters of this plan that are alive are a majority of it.
    pub fn has_majority(&self, alive: &BTreeSet<u64>) -> bool {
        self.voters.intersection(alive).count() > self.voters.len() / 2
    }

    /// The membership.
    pub fn uniform(self) -> Option<Membership> {
        Membership::new(vec![self.voters], self.members).ok()
    }

    /// The membership that leads from `before` to this plan: a majority of both is needed while it lasts.
    pub fn joint(self, before: &Plan) -> Option<Membership> {
        let mut all = before.members.clone();
        all.extend(self.members);
        Membership::new(vec![before.voters.clone(), self.voters], all).ok()
    }
}

/// Whether the voters are being changed.
pub fn is_joint(membership: &Membership) -> bool {
    membership.get_joint_config().len() > 1
}

/// What ends a change of the voters that was left in the middle: the membership it was going to. `None`: none is under way.
pub fn finished(membership: &Membership) -> Option<Membership> {
    is_joint(membership).then(|| Plan::of(membership).uniform()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set<const N: usize>(ids: [u64; N]) -> BTreeSet<u64> {
        BTreeSet::from(ids)
    }

    fn membership(voters: &[&[u64]], members: &[u64]) -> Membership {
        let members = members.iter().map(|id| (*id, Member { incarnation: format!("{id}"), ..Member::default() }));
        let configs = voters.iter().map(|v| v.iter().copied().collect()).collect();
        Membership::new(configs, members.collect::<BTreeMap<_, _>>()).unwrap()
    }

    fn ids(membership: &Membership) -> (Vec<BTreeSet<u64>>, BTreeSet<u64>) {
        (membership.get_joint_config().clone(), membership.nodes().map(|(id, _)| *id).collect())
    }

    #[test]
    fn a_cluster_grows_and_shrinks_by_one() {
        let one = membership(&[&[1]], &[1]);
        let joined = Plan::of(&one).join(2, Member::default()).unwrap();
        assert_eq!(ids(&joined.clone().uniform().unwrap()), (vec![set([1])], set([1, 2])));
        let two = joined.promote(2).unwrap();
        assert_eq!(ids(&two.clone().uniform().unwrap()), (vec![set([1, 2])], set([1, 2])));
        assert_eq!(ids(&two.clone().remove(1).unwrap().uniform().unwrap()), (vec![set([2])], set([2])));
        assert_eq!(two.remove(1).unwrap().remove(2), Err(Unfit::LastVoter(2)));
        assert_eq!(Plan::of(&one).promote(2), Err(Unfit::NoMember(2)));
        assert_eq!(Plan::of(&one).remove(2), Err(Unfit::NoMember(2)));
    }

    #[test]
    fn numbers_are_limited() {
        let all: Vec<u64> = (1..=MAX_MEMBERS as u64).collect();
        let plan = Plan::of(&membership(&[&all[..MAX_VOTERS]], &all));
        assert_eq!(plan.clone().join(99, Member::default()), Err(Unfit::TooManyMembers));
        assert_eq!(plan.clone().join(1, Member::default()), Ok(plan.clone()));
        assert_eq!(plan.clone().promote(MAX_VOTERS as u64 + 1), Err(Unfit::TooManyVoters));
        assert_eq!(plan.clone().promote(1), Ok(plan));
    }

    #[test]
    fn a_swap_goes_through_a_joint_membership_whose_end_is_known() {
        let before = Plan::of(&membership(&[&[1, 2, 3]], &[1, 2, 3, 4, 9]));
        let after = before.clone().swap(3, 4).unwrap();
        assert_eq!(before.clone().swap(9, 4), Err(Unfit::NoVoter(9)));
        assert_eq!(before.clone().swap(3, 5), Err(Unfit::NoMember(5)));
        let joint = after.clone().joint(&before).unwrap();
        assert_eq!(ids(&joint), (vec![set([1, 2, 3]), set([1, 2, 4])], set([1, 2, 3, 4, 9])));
        let end = finished(&joint).unwrap();
        assert_eq!(ids(&end), (vec![set([1, 2, 4])], set([1, 2, 4, 9])));
        assert_eq!(Plan::of(&joint), after, "a change left in the middle counts as made");
        assert_eq!(finished(&end), None);
    }

    #[test]
    fn a_majority_is_of_the_voters_only() {
        let plan = Plan::of(&membership(&[&[1, 2, 3]], &[1, 2, 3, 4]));
        assert!(plan.has_majority(&set([1, 2])));
        assert!(!plan.has_majority(&set([1, 4])));
        let two = plan.remove(3).unwrap();
        assert!(!two.has_majority(&set([1])) && two.has_majority(&set([1, 2])));
    }
}
