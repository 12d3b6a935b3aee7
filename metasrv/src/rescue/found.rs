//! The directory of a new cluster of one, made from a state.
//!
//! It is made as a peer's directory is that received a snapshot and has no log yet: a snapshot of the state
//! ([`State::reborn`](crate::state::State::reborn)) with the one new peer as its only voter, and a log that begins behind it.
//! Terms and indexes go on from those of the old cluster; cluster id and incarnation are new, so that a peer of the old
//! cluster is refused by the new one, and the other way round. The peer has no address: it notes its own when it is started,
//! and others are joined to it.
//!
//! Everything is written under another name beside the directory, opened again as a start would, and renamed when it is
//! durable.
//!
//! Failure cases: something is there already; the disk: nothing is left of what was begun.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Summary, blocking};
use crate::config::StorageConfig;
use crate::directory::{self, Contents, DirectoryOptions};
use crate::error::Error;
use crate::files::{self, FreeSpace};
use crate::log::SkipSync;
use crate::raft::state_machine::Applied;
use crate::raft::types::{LogId, Member, Membership, StoredMembership, Vote, log_id};
use crate::state::rebirth::Dropped;
use crate::state::{FEATURE_LEVEL, State};

/// A cluster that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCluster {
    pub dir: PathBuf,
    pub cluster_id: String,
    pub peer_id: u64,
    /// What it holds.
    pub state: Summary,
    /// What it does not take over.
    pub dropped: Dropped,
}

/// Makes the directory of a cluster of one, peer `peer_id`. `term`: the highest that the old cluster is known to have had.
///
/// # Errors
/// `dir` exists; it cannot be written; the state is none that can be gone on from.
pub async fn found(dir: &Path, peer_id: u64, old: &Applied, term: u64) -> Result<NewCluster, Error> {
    if peer_id == 0 {
        return Err(Error::Unrecoverable("a peer's id is a number above 0".to_owned()));
    }
    let (state, dropped) = old.state.reborn().map_err(|what| Error::Unrecoverable(what.to_owned()))?;
    let building = Building::beside(dir)?;
    let doing = || format!("making the data directory {}", dir.display());
    let contents = open(&building.path, Some(peer_id)).await?;
    let cluster_id = uuid::Uuid::new_v4().simple().to_string();
    let made = match first_state(state, old.last, peer_id, &contents.log.mark().incarnation) {
        Ok(applied) => {
            let filled = fill(&contents, &applied, &cluster_id, term.max(old_term(old))).await;
            filled.map(|()| applied).map_err(Error::io(doing()))
        }
        Err(e) => Err(e),
    };
    // Whatever came of it: what writes there has ended before it is removed.
    contents.log.close().await;
    let applied = made?;

    let contents = open(&building.path, Some(peer_id)).await?;
    let read = Summary::from(&*contents.state_machine.published().current());
    contents.log.close().await;
    if read != Summary::from(&applied) {
        return Err(Error::Damaged(format!("{}: what was written does not read as it was", building.path.display())));
    }
    building.finish(dir)?;
    Ok(NewCluster { dir: dir.to_owned(), cluster_id, peer_id, state: read, dropped })
}

fn old_term(old: &Applied) -> u64 {
    old.last.map_or(1, |id| id.leader_id.term)
}

/// What the new cluster has applied when it begins.
fn first_state(mut state: State, last: Option<LogId>, peer_id: u64, incarnation: &str) -> Result<Applied, Error> {
    state.set_members([(peer_id, incarnation)]);
    // A cluster that was founded has at least its founding in its log.
    let last = last.unwrap_or(log_id(1, 0));
    let member = Member { incarnation: incarnation.to_owned(), ..Member::default() };
    let membership = Membership::new(vec![[peer_id].into()], BTreeMap::from([(peer_id, member)]))
        .map_err(|e| Error::Unrecoverable(format!("the new cluster's membership: {e}")))?;
    let membership = StoredMembership::new(Some(last), membership);
    Ok(Applied { last: Some(last), membership, state, ..Applied::default() })
}

/// In the order in which a received snapshot is put in place.
async fn fill(contents: &Contents, applied: &Applied, cluster_id: &str, term: u64) -> std::io::Result<()> {
    let mark = contents.log.mark();
    contents.log.adopt(cluster_id.to_owned()).await?;
    // The next term is above every one of the old cluster.
    contents.log.save_vote(Vote::new(term, mark.peer_id)).await?;
    let (store, applied, cluster_id) = (contents.state_machine.snapshots(), applied.clone(), cluster_id.to_owned());
    let last = applied.last;
    let write = move || store.write(&applied.snapshot_meta(), &cluster_id, &applied.state);
    tokio::task::spawn_blocking(write).await.map_err(std::io::Error::other)??;
    if let Some(last) = last {
        contents.log.note_snapshot(last).await?;
        contents.log.purge(last).await?;
    }
    Ok(())
}

async fn open(dir: &Path, peer_id: Option<u64>) -> Result<Contents, Error> {
    let dir = dir.to_owned();
    let options = DirectoryOptions {
        peer_id,
        storage: StorageConfig::default(),
        free_space: FreeSpace::default(),
        skip_sync: SkipSync::default(),
        feature_level: FEATURE_LEVEL,
    };
    blocking(move || directory::open(&dir, options)).await?
}

/// A directory under another name, which goes unless it is finished.
struct Building {
    path: PathBuf,
    parent: PathBuf,
    finished: bool,
}

impl Building {
    fn beside(dir: &Path) -> Result<Self, Error> {
        if dir.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: dir.to_owned() });
        }
        let doing = || format!("making the data directory {}", dir.display());
        let absolute = std::path::absolute(dir).map_err(Error::io(doing()))?;
        let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Err(Error::Exists { path: dir.to_owned() });
        };
        let name = format!("{}.building-{}", name.display(), uuid::Uuid::new_v4().simple());
        let path = parent.join(name);
        std::fs::create_dir_all(parent).and_then(|()| std::fs::create_dir(&path)).map_err(Error::io(doing()))?;
        Ok(Self { path, parent: parent.to_owned(), finished: false })
    }

    fn finish(mut self, dir: &Path) -> Result<(), Error> {
        // Somebody may have made it meanwhile.
        if dir.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: dir.to_owned() });
        }
        std::fs::rename(&self.path, dir)
            .and_then(|()| files::sync_dir(&self.parent))
            .map_err(Error::io(format!("naming the data directory {}", dir.display())))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed stays under a name that says what it is.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
