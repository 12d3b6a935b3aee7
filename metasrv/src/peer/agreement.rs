//! Whether the peers still hold the same state (semantics, section 1).
//!
//! At every [`CHECK_EVERY`]th applied index each peer notes the hash of its state. One task per member takes the newest
//! note, asks the other voters for theirs at the same index, and [`judge`]s:
//!
//! | what the voters say                        | what this peer does                                   |
//! |--------------------------------------------|-------------------------------------------------------|
//! | a majority has this peer's hash            | nothing                                               |
//! | a majority has another one                 | it stops voting and serving at once and for good, and its process says so |
//! | no hash can reach a majority any more      | an alarm, and this peer proposes nothing any more, nor changes of the members |
//! | too few have answered                      | it asks again, and gives up after [`PATIENCE`]        |
//!
//! The second and the third outlive the process ([`super::verdicts`]): the odd one is not started again from its directory,
//! and after an alarm nothing is proposed either.
//!
//! Limits: [`KEPT`] notes, one comparison at a time and at most one every [`EVERY`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use imbl::Vector;
use lake_client::clock;
use lake_proto::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::standing::Standing;
use super::verdicts::{ALARM, ODD};
use super::view::View;
use super::{Ends, note_end};
use crate::blocking::blocking;
use crate::raft::network::Network;
use crate::raft::state_machine::Published;
use crate::raft::types::Member;

/// Hashes are compared at multiples of this index.
pub const CHECK_EVERY: u64 = 1_000;
/// Notes that are kept, for peers that come to an index later or earlier.
const KEPT: usize = 1_024;
/// How often hashes are compared, at most.
const EVERY: Duration = Duration::from_secs(1);
/// How often peers that have not come to the index yet are asked again.
const AGAIN: Duration = Duration::from_millis(250);
/// How long until the next note is looked at instead.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(1);
/// How long keeping a verdict may take.
const KEEPING: Duration = Duration::from_secs(2);

/// The hash of a state that has applied everything up to an index, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Note {
    pub index: u64,
    pub hash: u128,
}

/// The newest notes, oldest first. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Notes {
    notes: Vector<Note>,
}

impl Notes {
    /// Whether a note is due after an entry.
    pub fn due(index: u64) -> bool {
        index.is_multiple_of(CHECK_EVERY)
    }

    /// Adds the newest.
    pub fn add(&mut self, note: Note) {
        self.notes.push_back(note);
        if self.notes.len() > KEPT {
            self.notes.pop_front();
        }
    }

    /// The newest.
    pub fn newest(&self) -> Option<Note> {
        self.notes.last().copied()
    }

    /// The hash at an index, if it is still, or already, noted.
    pub fn at(&self, index: u64) -> Option<u128> {
        let found = self.notes.binary_search_by_key(&index, |note| note.index).ok()?;
        self.notes.get(found).map(|note| note.hash)
    }
}

/// What the voters' hashes mean for this peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Agrees,
    OddOneOut,
    NoMajority,
    Undecided,
}

/// Judges this peer's own hash by those of the voters that have answered, which may include this peer.
pub fn judge(own: u128, voters: &BTreeSet<u64>, answered: &BTreeMap<u64, u128>) -> Verdict {
    let majority = voters.len() / 2 + 1;
    let mut counts: BTreeMap<u128, usize> = BTreeMap::new();
    for hash in voters.iter().filter_map(|id| answered.get(id)) {
        *counts.entry(*hash).or_default() += 1;
    }
    let silent = voters.iter().filter(|id| !answered.contains_key(id)).count();
    match counts.iter().max_by_key(|(_, count)| **count) {
        Some((hash, count)) if *count >= majority && *hash == own => Verdict::Agrees,
        Some((_, count)) if *count >= majority => Verdict::OddOneOut,
        best if best.map_or(0, |(_, count)| *count) + silent >= majority => Verdict::Undecided,
        _ => Verdict::NoMajority,
    }
}

/// The task's parts.
pub(super) struct Agreement {
    pub view: View,
    pub network: Network,
    pub published: Arc<Published>,
    pub standing: Arc<Standing>,
    /// Ends the peer, with why.
    pub ends: Ends,
    /// Stops proposals, with why.
    pub alarm: watch::Sender<Option<String>>,
}

impl Agreement {
    /// Compares until it is cancelled, or this peer is the odd one out.
    pub(super) async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.compare() => {}
        }
    }

    async fn compare(&self) {
        let mut judged = 0;
        loop {
            tokio::time::sleep(EVERY).await;
            let Some(note) = self.published.current().notes.newest().filter(|note| note.index > judged) else {
                continue;
            };
            judged = note.index;
            match self.verdict(note).await {
                Verdict::Agrees => {}
                Verdict::Undecided => {
                    tracing::debug!(index = note.index, "too few voters could be asked for the hash of their state");
                }
                Verdict::OddOneOut => {
                    let what = format!(
                        "the state of peer {} at log index {} is not what a majority of the voters has there: its memory or \
                         its disk has changed what it held, or this is a defect. It has stopped so that it can harm nothing; {}",
                        self.view.id(),
                        note.index,
                        crate::files::REJOIN
                    );
                    tracing::error!("{what}");
                    self.stop(what).await;
                    return;
                }
                Verdict::NoMajority => {
                    let what = format!(
                        "no majority of the voters has the same state at log index {}: nothing is written any more. Compare \
                         the peers with `lake meta status`, keep copies of their directories, and recover from the ones \
                         that agree",
                        note.index
                    );
                    tracing::error!("{what}");
                    self.alarm.send_replace(Some(what.clone()));
                    self.keep(ALARM, what).await;
                }
            }
        }
    }

    /// Ends what this peer does in its cluster. The leadership is not handed over: what decides to whom is not to be trusted.
    async fn stop(&self, what: String) {
        // Every call is refused from here on, those of the other peers included.
        self.standing.end(&what);
        self.keep(ODD, what.clone()).await;
        note_end(&self.ends.failed, what);
        if let Err(e) = self.view.raft().shutdown().await {
            tracing::warn!("ending the consensus core: {e}");
        }
    }

    /// Has a verdict outlive the process. A disk that hangs does not keep the peer from stopping.
    async fn keep(&self, name: &'static str, what: String) {
        let verdicts = self.ends.verdicts.clone();
        let noting = blocking(move || verdicts.note(name, &what));
        match tokio::time::timeout(KEEPING, noting).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::error!(
                "keeping that in the file {name} of the data directory: {e}; a restart does not know it"
            ),
            Err(_) => {
                tracing::error!("keeping that in the file {name} of the data directory: the disk does not answer")
            }
        }
    }

    async fn verdict(&self, note: Note) -> Verdict {
        let until = clock::now() + PATIENCE;
        let mut answered = BTreeMap::from([(self.view.id(), note.hash)]);
        loop {
            let (voters, _) = self.view.members();
            let silent = voters.iter().filter(|voter| !answered.contains_key(&voter.id));
            let asked = join_all(silent.map(|voter| self.ask(voter, note.index))).await;
            answered.extend(asked.into_iter().flatten());
            let ids = voters.iter().map(|voter| voter.id).collect();
            let verdict = judge(note.hash, &ids, &answered);
            if verdict != Verdict::Undecided || clock::now() >= until {
                return verdict;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Another voter's hash at an index, if it has come there and answers.
    async fn ask(&self, voter: &v1::Member, index: u64) -> Option<(u64, u128)> {
        let mut client = self.network.transport.client(voter.id, &voter.raft_address).ok()?;
        let header = self.network.sender.header(voter.id, &Member::from(voter.clone()));
        let request = v1::StateHashRequest { header: Some(header), index };
        let answer = tokio::time::timeout(ANSWER, client.state_hash(request)).await.ok()?.ok()?.into_inner();
        let hash = <[u8; 16]>::try_from(&*answer.hash?).ok()?;
        Some((voter.id, u128::from_be_bytes(hash)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(own: u128, answered: &[(u64, u128)], voters: u64) -> Verdict {
        judge(own, &(1..=voters).collect(), &answered.iter().copied().collect())
    }

    #[test]
    fn the_majority_names_the_odd_one() {
        let one_differs = [(1, 7), (2, 7), (3, 9)];
        assert_eq!(verdict(7, &one_differs, 3), Verdict::Agrees);
        assert_eq!(verdict(9, &one_differs, 3), Verdict::OddOneOut);
        assert_eq!(verdict(9, &[(1, 7), (2, 7), (3, 7), (4, 9)], 3), Verdict::OddOneOut, "a learner is judged, too");
    }

    #[test]
    fn without_a_majority_writes_stop_as_soon_as_there_can_be_none() {
        assert_eq!(verdict(7, &[(1, 7), (2, 8), (3, 9)], 3), Verdict::NoMajority);
        assert_eq!(verdict(7, &[(1, 7), (2, 8)], 2), Verdict::NoMajority);
        assert_eq!(verdict(7, &[(1, 7), (2, 7), (3, 8), (4, 8)], 4), Verdict::NoMajority);
        assert_eq!(verdict(7, &[(1, 7), (2, 8), (3, 9)], 5), Verdict::Undecided, "two more may agree with one of them");
        assert_eq!(verdict(7, &[(1, 7), (2, 8), (3, 9), (4, 10)], 5), Verdict::NoMajority);
    }

    #[test]
    fn those_that_are_away_decide_nothing() {
        assert_eq!(verdict(7, &[(1, 7)], 3), Verdict::Undecided);
        assert_eq!(verdict(7, &[(1, 7), (2, 8)], 3), Verdict::Undecided);
        assert_eq!(verdict(7, &[(1, 7)], 1), Verdict::Agrees);
    }

    #[test]
    fn notes_are_bounded_and_found_by_their_index() {
        let mut notes = Notes::default();
        for n in 1..=KEPT as u64 + 5 {
            notes.add(Note { index: n * CHECK_EVERY, hash: u128::from(n) });
        }
        assert_eq!(notes.newest().map(|note| note.hash), Some(KEPT as u128 + 5));
        assert_eq!((notes.at(5 * CHECK_EVERY), notes.at(6 * CHECK_EVERY)), (None, Some(6)));
        assert_eq!(notes.at(6 * CHECK_EVERY + 1), None);
        assert!(Notes::due(2_000) && !Notes::due(2_001));
    }
}
