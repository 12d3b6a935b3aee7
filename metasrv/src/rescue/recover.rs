//! When a majority of the voters is gone for good: a new cluster from what the survivors hold (semantics, section 10).
//!
//! The survivors' directories are read, whole, and compared. The one whose log ends at the highest (term, index) is taken:
//! by Raft's rules it holds every committed entry that any survivor holds. Its log is applied to its end, also entries that
//! were never committed: whether they were, no survivor can tell. What it gives becomes a new cluster of one ([`super::found`]).
//!
//! What may be lost is told before anything is made ([`Plan::warnings`]): entries that only the absent voters held. If every
//! quorum of the voters has a survivor in it that reads whole, nothing that was acknowledged is lost. If the survivors are a
//! majority, they should be started instead ([`Plan::is_majority`]).
//!
//! A survivor that is damaged counts with what can be proven: the log up to the damage, or its newest snapshot that reads.
//!
//! Failure cases, each refused with what contradicts what: directories of several clusters, or of none; one peer twice; a
//! survivor that knows as committed what the log taken does not reach, or that has another state at the same place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::Summary;
use super::found::{NewCluster, found};
use super::reading::{self, Finding, Reading, shown};
use crate::directory::DirectoryLock;
use crate::error::Error;
use crate::raft::state_machine::Applied;
use crate::raft::types::{LogId, Vote};

/// One of the directories given.
#[derive(Debug)]
pub struct Survivor {
    pub dir: PathBuf,
    /// None if its mark is lost.
    pub peer_id: Option<u64>,
    pub incarnation: Option<String>,
    pub cluster_id: String,
    pub vote: Option<Vote>,
    /// Where what reads of it ends.
    pub last: Option<LogId>,
    /// Up to where it is known to have acknowledged entries.
    pub acknowledged: Option<LogId>,
    /// Up to where it knew that everything is committed.
    pub committed: Option<u64>,
    /// What all of its log gives.
    pub state: Option<Summary>,
    /// Everything that it ever acknowledged reads.
    pub whole: bool,
    pub findings: Vec<Finding>,
    hashes: BTreeMap<u64, u128>,
    _lock: Option<DirectoryLock>,
}

impl Survivor {
    fn of(reading: Reading) -> (Self, Option<Applied>) {
        let (committed, vote, whole) = (reading.committed_index(), reading.vote(), reading.is_whole());
        let acknowledged = reading.acknowledged();
        let (lock, mut reading) = reading.into_lock();
        let applied = reading.replayed.take();
        let mark = reading.mark.as_ref();
        let this = Self {
            peer_id: mark.map(|m| m.peer_id),
            incarnation: mark.map(|m| m.incarnation.clone()),
            vote,
            last: applied.as_ref().and_then(|a| a.last),
            acknowledged,
            committed,
            state: applied.as_ref().map(Summary::from),
            whole,
            dir: reading.dir,
            cluster_id: reading.cluster_id,
            findings: reading.findings,
            hashes: reading.hashes,
            _lock: lock,
        };
        (this, applied)
    }

    /// Who it is, for people.
    pub fn name(&self) -> String {
        match self.peer_id {
            Some(id) => format!("peer {id} ({})", self.dir.display()),
            None => format!("an unknown peer ({})", self.dir.display()),
        }
    }
}

/// What the survivors hold, and which of them is taken. Their directories stay held.
#[derive(Debug)]
pub struct Plan {
    pub survivors: Vec<Survivor>,
    /// Which of them.
    pub taken: usize,
    pub quorums: Quorums,
    old: Applied,
}

/// The voters, and what the survivors among them are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quorums {
    pub voters: BTreeSet<u64>,
    /// Those that are not among the survivors, or do not read whole.
    pub absent: BTreeSet<u64>,
    /// The others can elect a leader by themselves.
    pub majority: bool,
    /// The absent ones could not, so that nothing was acknowledged without one of the others.
    pub complete: bool,
}

/// Reads and compares the survivors' directories.
///
/// # Errors
/// A directory cannot be read or is in use; they do not fit together; none of them gives a state.
pub async fn plan(dirs: &[PathBuf]) -> Result<Plan, Error> {
    let snapshots: BTreeSet<u64> = dirs.iter().flat_map(|dir| reading::snapshot_indexes(dir)).collect();
    let mut survivors: Vec<Survivor> = Vec::new();
    // Only the best one's state is kept.
    let mut best: Option<(usize, Applied)> = None;
    for dir in dirs {
        let (survivor, applied) = Survivor::of(reading::read(dir, snapshots.clone()).await?);
        if let Some(applied) = applied
            && best.as_ref().is_none_or(|(taken, _)| rank(&survivor) > rank(&survivors[*taken]))
        {
            best = Some((survivors.len(), applied));
        }
        survivors.push(survivor);
    }
    check(&survivors)?;
    let Some((taken, old)) = best else {
        let of: Vec<String> = survivors.iter().map(Survivor::name).collect();
        return Err(Error::Unrecoverable(format!("no state can be put together from {}", of.join(", "))));
    };
    check_taken(&survivors, taken)?;
    let configs = old.membership.membership().get_joint_config();
    let incarnation = |id: u64| old.membership.membership().get_node(&id).map(|member| member.incarnation.as_str());
    let whole = survivors.iter().filter(|s| s.whole).filter_map(|s| Some((s.peer_id?, s.incarnation.as_deref()?)));
    let whole = whole.filter(|(id, own)| incarnation(*id) == Some(*own)).map(|(id, _)| id).collect();
    let quorums = quorums(configs, &whole);
    Ok(Plan { survivors, taken, quorums, old })
}

/// The highest (term, index) is taken; of equals one that is undamaged.
fn rank(survivor: &Survivor) -> (Option<LogId>, bool) {
    (survivor.last, survivor.whole)
}

fn check(survivors: &[Survivor]) -> Result<(), Error> {
    let refused = |what: String| Err(Error::Unrecoverable(what));
    for (n, survivor) in survivors.iter().enumerate() {
        if survivor.cluster_id.is_empty() {
            return refused(format!("{} belongs to no cluster: leave it out", survivor.name()));
        }
        let Some(before) = survivors[..n].iter().find(|other| {
            other.cluster_id != survivor.cluster_id
                || (other.incarnation.is_some() && other.incarnation == survivor.incarnation)
        }) else {
            continue;
        };
        return if before.cluster_id == survivor.cluster_id {
            refused(format!("{} and {} are the same peer: give one of them", before.name(), survivor.name()))
        } else {
            refused(format!(
                "{} is of cluster {}, and {} of cluster {}: give directories of one cluster",
                before.name(),
                before.cluster_id,
                survivor.name(),
                survivor.cluster_id
            ))
        };
    }
    Ok(())
}

/// What a survivor knew to be committed has to be in what is taken.
fn check_taken(survivors: &[Survivor], taken: usize) -> Result<(), Error> {
    let taken = &survivors[taken];
    for other in survivors {
        if other.committed > taken.last.map(|id| id.index) {
            return Err(Error::Unrecoverable(format!(
                "{} ends at {}, the highest term of all, but {} knows that entries up to index {} are committed: these are \
                 not directories of one history. Leave out the one that is wrong, or that is damaged, if you know which",
                taken.name(),
                shown(taken.last),
                other.name(),
                other.committed.unwrap_or_default()
            )));
        }
        let differs = other
            .hashes
            .iter()
            .filter(|(index, _)| Some(**index) <= other.committed)
            .find(|(index, hash)| taken.hashes.get(index).is_some_and(|own| own != *hash));
        if let Some((index, _)) = differs {
            return Err(Error::Unrecoverable(format!(
                "at index {index} {} has another state than {}: one of them is wrong. Leave that one out, if you know which",
                other.name(),
                taken.name()
            )));
        }
    }
    Ok(())
}

/// `whole`: the survivors that read whole.
fn quorums(configs: &[BTreeSet<u64>], whole: &BTreeSet<u64>) -> Quorums {
    let voters: BTreeSet<u64> = configs.iter().flatten().copied().collect();
    let here = |config: &BTreeSet<u64>| config.intersection(whole).count();
    let quorum = |config: &BTreeSet<u64>| config.len() / 2 + 1;
    Quorums {
        absent: voters.difference(whole).copied().collect(),
        // While the voters are being changed entries may have been acknowledged before, during and after that.
        majority: !configs.is_empty() && configs.iter().all(|c| here(c) >= quorum(c)),
        complete: !configs.is_empty() && configs.iter().all(|c| c.len() - here(c) < quorum(c)),
        voters,
    }
}

impl Plan {
    /// The survivor whose log is taken.
    pub fn taken(&self) -> &Survivor {
        &self.survivors[self.taken]
    }

    /// Whether the survivors could go on by themselves, without losing anything.
    pub fn is_majority(&self) -> bool {
        self.quorums.majority
    }

    /// What may be lost, and what may become true that never was acknowledged, each with the reason.
    pub fn warnings(&self) -> Vec<String> {
        let taken = self.taken();
        let last = shown(taken.last);
        let mut warnings = Vec::new();
        if self.quorums.complete {
            warnings.push(format!(
                "no acknowledged write is lost: every quorum of the voters {:?} has one of these survivors in it",
                self.quorums.voters
            ));
        } else {
            warnings.push(format!(
                "acknowledged writes behind {last} may be lost: the voters {:?} are absent or do not read whole, and could \
                 acknowledge without any of the others; how many writes that is, nobody can tell",
                self.quorums.absent
            ));
            let term = taken.last.map_or(0, |id| id.leader_id.term);
            for survivor in &self.survivors {
                if let Some(vote) = survivor.vote.filter(|vote| vote.leader_id.term > term) {
                    warnings.push(format!(
                        "{} has taken part in an election of term {}, and no survivor has an entry of a term above {term}: \
                         whoever won it may have acknowledged writes that are lost",
                        survivor.name(),
                        vote.leader_id.term
                    ));
                }
            }
        }
        for survivor in self.survivors.iter().filter(|s| !s.whole) {
            warnings.push(format!(
                "{} is damaged: it had acknowledged {} or more, and only {} can be proven",
                survivor.name(),
                shown(survivor.acknowledged),
                shown(survivor.last)
            ));
        }
        let committed = self.survivors.iter().filter_map(|s| s.committed).max();
        let index = taken.last.map(|id| id.index);
        if committed < index {
            warnings.push(format!(
                "entries {} to {} may never have been acknowledged, and become part of the new cluster all the same: to \
                 whoever sent them their outcome is unknown",
                committed.map_or(0, |index| index + 1),
                index.unwrap_or_default()
            ));
        }
        warnings
    }

    /// Makes the new cluster, whose only peer is `peer_id`, in a directory that is not there yet.
    ///
    /// # Errors
    /// As [`found`].
    pub async fn carry_out(&self, dir: &Path, peer_id: u64) -> Result<NewCluster, Error> {
        let terms =
            self.survivors.iter().flat_map(|s| [s.vote.map(|v| v.leader_id.term), s.last.map(|id| id.leader_id.term)]);
        found(dir, peer_id, &self.old, terms.flatten().max().unwrap_or_default()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::types::log_id;

    fn survivor(id: u64, last: (u64, u64), committed: u64) -> Survivor {
        Survivor {
            dir: format!("/data/{id}").into(),
            peer_id: Some(id),
            incarnation: Some(format!("{id:032}")),
            cluster_id: "c".into(),
            vote: None,
            last: Some(log_id(last.0, last.1)),
            acknowledged: Some(log_id(last.0, last.1)),
            committed: Some(committed),
            state: None,
            whole: true,
            findings: Vec::new(),
            hashes: BTreeMap::new(),
            _lock: None,
        }
    }

    fn plan(survivors: Vec<Survivor>, configs: &[&[u64]]) -> Plan {
        let taken = (0..survivors.len()).max_by_key(|n| rank(&survivors[*n])).unwrap();
        let configs: Vec<BTreeSet<u64>> = configs.iter().map(|c| c.iter().copied().collect()).collect();
        let whole = survivors.iter().filter(|s| s.whole).filter_map(|s| s.peer_id).collect();
        Plan { taken, quorums: quorums(&configs, &whole), survivors, old: Applied::default() }
    }

    #[test]
    fn the_higher_term_wins_over_the_longer_log() {
        let plan = plan(vec![survivor(1, (4, 900), 100), survivor(2, (5, 300), 200)], &[&[1, 2, 3, 4, 5]]);
        assert_eq!(plan.taken().peer_id, Some(2));
        check_taken(&plan.survivors, plan.taken).unwrap();
        let said = plan.warnings().join("\n");
        assert!(said.contains("{3, 4, 5} are absent") && said.contains("entries 201 to 300"), "{said}");
    }

    #[test]
    fn of_equals_the_undamaged_one_is_taken() {
        let damaged = Survivor { whole: false, acknowledged: Some(log_id(4, 12)), ..survivor(1, (4, 9), 5) };
        let plan = plan(vec![damaged, survivor(2, (4, 9), 5)], &[&[1, 2, 3, 4, 5]]);
        assert_eq!(plan.taken().peer_id, Some(2));
        let said = plan.warnings().join("\n");
        assert!(said.contains("peer 1 (/data/1) is damaged: it had acknowledged index 12 of term 4 or more"), "{said}");
    }

    #[test]
    fn what_a_quorum_cannot_have_done_without_a_survivor_is_not_lost() {
        let of = |ids: &[u64], configs: &[&[u64]]| {
            let quorums = plan(ids.iter().map(|id| survivor(*id, (1, 1), 1)).collect(), configs).quorums;
            (quorums.majority, quorums.complete)
        };
        assert_eq!(of(&[1], &[&[1, 2, 3]]), (false, false));
        assert_eq!(of(&[1, 2], &[&[1, 2, 3]]), (true, true));
        assert_eq!(of(&[1], &[&[1]]), (true, true));
        assert_eq!(of(&[1, 2], &[&[1, 2, 3, 4]]), (false, true), "neither half can do without the other");
        assert_eq!(of(&[1, 2], &[&[1, 2, 3, 4, 5]]), (false, false));
        assert_eq!(of(&[4, 5], &[&[1, 2, 3]]), (false, false), "learners are no voters");
        assert_eq!(of(&[1, 2], &[&[1, 2, 3], &[1, 4, 5]]), (false, false), "the new voters may have gone on alone");
        assert_eq!(of(&[1, 2, 4], &[&[1, 2, 3], &[1, 4, 5]]), (true, true));
    }

    #[test]
    fn an_election_that_nobody_tells_of_is_a_sign() {
        let voted = Survivor { vote: Some(Vote::new(9, 3)), ..survivor(1, (4, 9), 5) };
        let said = plan(vec![voted], &[&[1, 2, 3]]).warnings().join("\n");
        assert!(said.contains("election of term 9"), "{said}");
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let refusal = |survivors: Vec<Survivor>| {
            let plan = plan(survivors, &[&[1, 2, 3]]);
            check(&plan.survivors).and_then(|()| check_taken(&plan.survivors, plan.taken)).unwrap_err().to_string()
        };
        let other = Survivor { cluster_id: "d".into(), ..survivor(2, (1, 1), 1) };
        assert!(refusal(vec![survivor(1, (1, 1), 1), other]).contains("directories of one cluster"));
        assert!(refusal(vec![survivor(1, (1, 1), 1), survivor(1, (1, 1), 1)]).contains("the same peer"));
        let fresh = Survivor { cluster_id: String::new(), ..survivor(1, (1, 1), 1) };
        assert!(refusal(vec![fresh]).contains("belongs to no cluster"));
        let said = refusal(vec![survivor(1, (5, 10), 10), survivor(2, (4, 30), 20)]);
        assert!(said.contains("not directories of one history") && said.contains("up to index 20"), "{said}");
        let at = |id, hash| Survivor { hashes: BTreeMap::from([(5, hash)]), ..survivor(id, (1, 9), 5) };
        assert!(refusal(vec![at(1, 7), at(2, 8)]).contains("at index 5"));
    }
}
