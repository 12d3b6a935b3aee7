//! Faults of disks: full, slow to flush, and without power. Each peer then has a disk of its own, made for the run.
//!
//! | asked for      | each peer's disk                                                                          |
//! |----------------|-------------------------------------------------------------------------------------------|
//! | `sync`, `power`| [`VolatileDisk`]: its flushes can be slow, and what was not flushed is lost with the power |
//! | only `disk`    | [`SmallDisk`], in memory                                                                  |
//!
//! All of it needs root and [`PRIVATE_MOUNTS`]; where that is missing, these faults are skipped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lake_proto::v1::StatusResponse;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::field::{Field, PROOF_WITHIN, named};
use super::kind::{Kind, Requested, Target};
use super::{Done, Nemesis, process};
use crate::disk::small::SmallDisk;
use crate::disk::volatile::{Flushes, VolatileDisk, empty_file_system};
use crate::history::Installation;
use crate::process::ProcessName;
use crate::{Error, IoContext, Result, probe};

/// Set in a process that has a mount namespace of its own.
pub const PRIVATE_MOUNTS: &str = "LAKE_CHAOS_PRIVATE_MOUNTS";
/// Bytes of a peer's disk. Two copies of a volatile one are held in memory.
const DISK_BYTES: u64 = 256 << 20;
/// What peers are started with on such disks: the reserve that they keep free.
pub const RESERVE_ARGUMENTS: [&str; 2] = ["--disk-reserve-bytes", "33554432"];
/// The same in bytes.
const RESERVE_BYTES: u64 = 32 << 20;
/// How a peer begins to say that it waits for room.
const SAYS_FULL: &str = "disk full";
/// A full disk has about so much left: less than the reserve, and enough for the file system's own needs.
const LEFT_BYTES: u64 = 8 << 20;
const FILLER: &str = "filler";

/// Whether any of these faults needs peers to have disks of their own.
pub fn needed(requested: &[Requested]) -> bool {
    requested.iter().any(|r| matches!(r.kind, Kind::Disk | Kind::Sync | Kind::Power))
}

enum Kept {
    Small { _disk: SmallDisk },
    Volatile(VolatileDisk),
}

/// The disks of all peers. Empty if none of their faults was asked for, or they cannot be had.
#[derive(Default)]
pub struct Disks {
    by_peer: Mutex<BTreeMap<u64, Kept>>,
    /// Where the drives' files are.
    work: PathBuf,
    missing: Option<String>,
}

impl Disks {
    /// Makes the disks of these peers, mounted where their data will be: `data_dir` says where.
    ///
    /// # Errors
    /// The system refuses, though it has all that is needed.
    pub fn prepare(
        requested: &[Requested],
        peers: &[u64],
        work: &Path,
        data_dir: impl Fn(u64) -> PathBuf,
    ) -> Result<Self> {
        let mut disks = Self { work: work.to_owned(), ..Self::default() };
        if !needed(requested) {
            return Ok(disks);
        }
        disks.missing = crate::disk::missing();
        if disks.missing.is_none() && std::env::var_os(PRIVATE_MOUNTS).is_none() {
            disks.missing = Some("not in a mount namespace of its own".to_owned());
        }
        if disks.missing.is_some() {
            return Ok(disks);
        }
        std::fs::create_dir_all(work).doing(|| format!("making {} for the peers' disks", work.display()))?;
        let volatile = requested.iter().any(|r| matches!(r.kind, Kind::Sync | Kind::Power));
        let image = if volatile { empty_file_system(work, DISK_BYTES)? } else { Vec::new() };
        for id in peers {
            let at = data_dir(*id);
            let kept = match volatile {
                true => Kept::Volatile(VolatileDisk::mount_at(&disks.drive(*id), &at, image.clone(), Flushes::Honest)?),
                false => Kept::Small { _disk: SmallDisk::mount_at(&at, DISK_BYTES)? },
            };
            disks.lock().insert(*id, kept);
        }
        Ok(disks)
    }

    /// Whether peers have disks of their own.
    pub fn exist(&self) -> bool {
        !self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Kept>> {
        self.by_peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drive(&self, id: u64) -> PathBuf {
        self.work.join(format!("drive-{id}"))
    }

    fn why_missing(&self) -> String {
        let why = self.missing.as_deref().unwrap_or("no peer has a disk of its own");
        format!("it needs root, /dev/fuse, loop devices and mkfs.ext4: {why}")
    }

    /// What is looked at or done to one peer's volatile disk.
    fn with<T>(&self, id: u64, look: impl FnOnce(&VolatileDisk) -> T) -> Option<T> {
        match self.lock().get(&id) {
            Some(Kept::Volatile(disk)) => Some(look(disk)),
            _ => None,
        }
    }

    /// Cuts the power of one peer's disk, whose process is dead, and gives it power again. Says how many sectors were lost of
    /// how many that were not flushed.
    fn cut_power(&self, id: u64, seed: u64) -> Result<(usize, usize)> {
        let gone = || Error::Founding(format!("peer {id} has no disk that could lose its power"));
        let Some(Kept::Volatile(disk)) = self.lock().remove(&id) else { return Err(gone()) };
        let mut rng = StdRng::seed_from_u64(seed);
        // Sometimes nothing of the rest survives, and sometimes nearly all.
        let odds: f64 = rng.random_range(0.0..1.0);
        let (volatile, at) = (disk.volatile_sectors(), disk.path().to_owned());
        let mut lost = 0;
        let image = disk.cut_power(|| {
            let survives = rng.random_bool(odds);
            lost += usize::from(!survives);
            survives
        });
        let disk = VolatileDisk::mount_at(&self.drive(id), &at, image, Flushes::Honest)?;
        self.lock().insert(id, Kept::Volatile(disk));
        Ok((lost, volatile))
    }
}

/// Peers whose disk is full but for less than their reserve.
pub struct Full {
    target: Option<Target>,
    full: Vec<u64>,
}

impl Full {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, full: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Full {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        if !field.disks.exist() {
            return Done::skipped("nobody", field.disks.why_missing());
        }
        self.full = match field.claim(self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.full {
            let filled = async {
                let dir = field.cluster.entry(ProcessName::metasrv(*id))?.data_dir;
                blocking(move || fill(&dir)).await
            };
            came.push((*id, filled.await.map_err(|e| e.to_string()).and_then(less_than_reserved)));
        }
        let done = Done::of_each(&came);
        if !done.is_installed() {
            return done;
        }
        // Not each need have something to write: with the leader's disk full, others get nothing.
        let waits = || async {
            let waiting = waiting_for_room(field, &self.full).await;
            if waiting.is_empty() { Err("none of them says that it waits for room".to_owned()) } else { Ok(waiting) }
        };
        let what = format!("{} to wait for room", done.target);
        match (probe::until(&what, PROOF_WITHIN, waits).await, done.installation) {
            (Ok(waiting), Installation::Installed(proof)) => {
                Done::installed(done.target, format!("{proof}; waiting for room: {}", named(&waiting)))
            }
            (Ok(_), installation) => Done { target: done.target, installation },
            (Err(e), _) => Done::failed(done.target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let peers = std::mem::take(&mut self.full);
        let mut came = Vec::new();
        for id in &peers {
            let freed = async {
                let dir = field.cluster.entry(ProcessName::metasrv(*id))?.data_dir;
                blocking(move || empty(&dir)).await
            };
            let freed = freed.await.map(|left| format!("has {} KiB again", left >> 10));
            came.push((*id, freed.map_err(|e| e.to_string())));
        }
        let go_on = probe::until("peers with room again to go on", PROOF_WITHIN, || async {
            let waiting = waiting_for_room(field, &peers).await;
            if waiting.is_empty() { Ok(()) } else { Err(format!("still waiting for room: {}", named(&waiting))) }
        });
        let go_on = go_on.await;
        field.release(&peers);
        match (Done::of_each(&came), go_on) {
            (done, Err(e)) if done.is_installed() => Done::failed(done.target, e),
            (done, _) => done,
        }
    }
}

fn less_than_reserved(left: u64) -> Result<String, String> {
    let told = format!("{} KiB left", left >> 10);
    if left < RESERVE_BYTES { Ok(told) } else { Err(format!("{told}, more than its reserve")) }
}

/// Of these peers, those that say so.
async fn waiting_for_room(field: &Field, peers: &[u64]) -> Vec<u64> {
    let answers = field.statuses().await;
    let says = |id: &u64| {
        let of_it = |answer: &&StatusResponse| answer.self_.as_ref().is_some_and(|own| own.id == *id);
        answers.iter().find(of_it).is_some_and(|answer| answer.problem.starts_with(SAYS_FULL))
    };
    peers.iter().copied().filter(says).collect()
}

/// Writes a file that takes all but [`LEFT_BYTES`]; gives what is left.
fn fill(dir: &Path) -> Result<u64> {
    let path = dir.join(FILLER);
    let doing = || format!("filling the disk with {}", path.display());
    let free = |dir: &Path| free_bytes(dir).doing(doing);
    let mut file = File::create(&path).doing(doing)?;
    let zeros = vec![0; 1 << 20];
    while free(dir)? > LEFT_BYTES + zeros.len() as u64 {
        file.write_all(&zeros).doing(doing)?;
    }
    file.sync_all().doing(doing)?;
    free(dir)
}

/// Removes that file, for good: a disk that loses its power next must not have it again. Gives what there is then.
fn empty(dir: &Path) -> Result<u64> {
    let path = dir.join(FILLER);
    let doing = || format!("removing {}", path.display());
    std::fs::remove_file(&path).doing(doing)?;
    File::open(dir).and_then(|dir| dir.sync_all()).doing(doing)?;
    free_bytes(dir).doing(doing)
}

fn free_bytes(dir: &Path) -> rustix::io::Result<u64> {
    rustix::fs::statvfs(dir).map(|s| s.f_bavail * s.f_frsize)
}

/// Disks take their time to flush: one peer's, or those that were asked for; now and then so much that it counts as hanging.
pub struct SlowSync {
    target: Option<Target>,
    slow: Vec<u64>,
    /// Who led when it began.
    led: Option<u64>,
}

impl SlowSync {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, slow: Vec::new(), led: None }
    }
}

/// What has become of the lead of one whose disk was slow: a leader gives it up after two seconds.
fn lead_of(slow: &[u64], led: Option<u64>, leads: Option<u64>) -> String {
    match (led.filter(|led| slow.contains(led)), leads) {
        (None, _) => String::new(),
        (Some(led), Some(leads)) if led == leads => format!("; peer {led} leads still"),
        (Some(led), Some(leads)) => format!("; peer {led} led, and peer {leads} does now"),
        (Some(led), None) => format!("; peer {led} led, and nobody does now"),
    }
}

#[async_trait]
impl Nemesis for SlowSync {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        if !field.disks.exist() {
            return Done::skipped("nobody", field.disks.why_missing());
        }
        let drawn = if rng.random_bool(0.5) { Target::Leader } else { Target::One };
        let claimed = match self.target {
            Some(target) => field.claim(Some(target), rng).await,
            None => match field.claim(Some(drawn), rng).await {
                Err(_) if drawn == Target::Leader => field.claim_one(None, rng).await.map(|one| vec![one]),
                claimed => claimed,
            },
        };
        self.slow = match claimed {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        self.led = field.leader().await;
        let mut slowed = Vec::new();
        for id in &self.slow {
            let millis = if rng.random_bool(0.25) { rng.random_range(2_000..3_000) } else { rng.random_range(20..400) };
            let before = field.disks.with(*id, |disk| {
                disk.slow_down(Duration::from_millis(millis));
                disk.slow_flushes()
            });
            slowed.push((*id, millis, before));
        }
        let mut came = Vec::new();
        for (id, millis, before) in slowed {
            let flushed = || async {
                let now = field.disks.with(id, VolatileDisk::slow_flushes);
                if now > before { Ok(()) } else { Err("nothing was flushed".to_owned()) }
            };
            let seen = probe::until("a slow flush", PROOF_WITHIN * 2, flushed).await;
            came.push((id, seen.map(|()| format!("flushes took {millis} ms")).map_err(|e| e.to_string())));
        }
        Done::of_each(&came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let slow = std::mem::take(&mut self.slow);
        if slow.is_empty() {
            return Done::skipped("nobody", "no disk was slow");
        }
        let leads = field.leader().await;
        for id in &slow {
            field.disks.with(*id, |disk| disk.slow_down(Duration::ZERO));
        }
        field.release(&slow);
        Done::installed(named(&slow), format!("as quick as before{}", lead_of(&slow, self.led, leads)))
    }
}

/// Peers that lose their power, and with it what their disks had not flushed; they start again when it is back.
pub struct PowerLoss {
    target: Option<Target>,
    dark: Vec<u64>,
}

impl PowerLoss {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, dark: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for PowerLoss {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        if !field.disks.exist() {
            return Done::skipped("nobody", field.disks.why_missing());
        }
        // The whole rack goes dark as often as a single machine.
        let claimed = match self.target {
            Some(target) => field.claim(Some(target), rng).await,
            None => field.claim_drawn(rng.random_bool(0.4).then_some(Target::All), rng).await,
        };
        self.dark = match claimed {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        // At the same time, whatever becomes of each.
        let dying = self.dark.iter().map(|id| async { (*id, process::kill(field, *id).await) });
        let mut came = Vec::new();
        let mut lost_sectors = 0;
        for (id, killed) in futures::future::join_all(dying).await {
            let seed = rng.random();
            let cut = match killed {
                Err(e) => Err(e.to_string()),
                Ok(_) => tokio::task::block_in_place(|| field.disks.cut_power(id, seed)).map_err(|e| {
                    // That it has no disk any more is this program's doing.
                    field.lose(id, &format!("its disk was not given back after its power had been cut: {e}"));
                    e.to_string()
                }),
            };
            lost_sectors += cut.as_ref().map_or(0, |(lost, _)| *lost);
            came.push((id, cut.map(|(lost, volatile)| format!("lost {lost} of {volatile} unflushed sectors"))));
        }
        match Done::of_each(&came) {
            done if done.is_installed() && lost_sectors == 0 => {
                Done::failed(done.target, "all was flushed, or survived: nothing was lost")
            }
            done => done,
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let peers = std::mem::take(&mut self.dark);
        let have_disks: Vec<u64> = peers.iter().copied().filter(|id| field.loss_of(*id).is_none()).collect();
        let done = process::start_all(field, &have_disks).await;
        field.release(&peers);
        done
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let ended = |e| Error::Io { doing: "waiting for a disk".to_owned(), source: std::io::Error::other(e) };
    tokio::task::spawn_blocking(work).await.map_err(ended)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_whether_a_leader_with_a_slow_disk_has_lost_the_lead() {
        assert_eq!(lead_of(&[1, 2], Some(3), Some(1)), "");
        assert_eq!(lead_of(&[2], Some(2), Some(2)), "; peer 2 leads still");
        assert_eq!(lead_of(&[2], Some(2), Some(3)), "; peer 2 led, and peer 3 does now");
        assert_eq!(lead_of(&[2], Some(2), None), "; peer 2 led, and nobody does now");
    }

    #[test]
    fn a_disk_is_full_once_less_is_left_than_its_peer_keeps() {
        assert_eq!(RESERVE_ARGUMENTS[1].parse(), Ok(RESERVE_BYTES));
        assert_eq!(less_than_reserved(9 << 20), Ok("9216 KiB left".into()));
        assert!(less_than_reserved(RESERVE_BYTES).is_err());
    }
}
