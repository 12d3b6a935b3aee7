//! Damage to the files of one peer: a bit flipped, or a file gone. The peer must find it, or be none the worse for it; if it
//! cannot go on it is replaced, as an operator would.
//!
//! Damage that the peer never meets shows nothing. It has met a flipped bit if the kernel says that it read the file since
//! (inotify: of a file, not of a byte), and a file that is gone if it made that anew; or if it ends by itself. If it has met
//! none, another file is damaged, a few times.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use lake_proto::v1::status_response::Stage;
use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::inotify;

use super::field::{Field, named};
use super::kind::Target;
use super::{Done, Nemesis, members, process};
use crate::process::ProcessName;
use crate::{Error, IoContext, Result, probe};

/// How long a peer may take to serve with its damage, before it is taken for lost.
const SERVES_WITHIN: Duration = Duration::from_secs(8);
/// And how long it then has to go on serving.
const GOES_ON: Duration = Duration::from_secs(1);
/// How often a byte that is not zero is looked for in a file.
const TRIES: usize = 1000;
/// Files that are damaged until the peer meets one.
const MOST_FILES: usize = 4;
/// Bytes of events that are read from the kernel at once.
const EVENT_BYTES: usize = 4096;

/// What is done to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// One bit is another.
    Flip,
    /// It is gone.
    Remove,
}

/// Damages a file of one peer that it then meets.
pub struct Damage {
    what: What,
    target: Option<Target>,
    damaged: Option<u64>,
}

impl Damage {
    pub fn new(what: What, target: Option<Target>) -> Self {
        Self { what, target, damaged: None }
    }

    /// Damages one file after the other, until the peer meets it. Says how it did, or what it never met.
    async fn until_met(&self, field: &Field, id: u64, rng: &mut StdRng) -> Result<std::result::Result<String, String>> {
        let name = ProcessName::metasrv(id);
        let (dir, process) = (field.cluster.entry(name)?.data_dir, field.cluster.process(name)?);
        let mut damaged: Vec<PathBuf> = Vec::new();
        let mut told = Vec::new();
        while damaged.len() < MOST_FILES {
            process::kill(field, id).await?;
            let Some(damage) = damage(&dir, self.what, &damaged, rng)? else { break };
            told.push(damage.told.clone());
            // It must not go on as if nothing had happened, and may refuse to go on at all.
            field.lose(id, &told.join("; "));
            let reads = Reads::of(&damage.path)?;
            let deaths = process.state().deaths;
            // Started now, so that it meets the damage while the others are under load. It may refuse.
            let serves = field.cluster.start_one(name).await.is_ok();
            let traces = Traces {
                serves,
                ended: process.state().deaths > deaths,
                was_read: reads.is_some_and(|reads| reads.any()),
                is_there: damage.is_there(),
            };
            if let Some(how) = traces.met(self.what) {
                return Ok(Ok(format!("{}; {how}", damage.told)));
            }
            damaged.push(damage.path);
        }
        Ok(Err(format!("it met none of the damage: {}", told.join("; "))))
    }
}

/// What a peer left behind after it was started on a damaged file.
struct Traces {
    serves: bool,
    /// It ended by itself.
    ended: bool,
    /// The file was read.
    was_read: bool,
    /// The flipped bit is there, or the file that was removed.
    is_there: bool,
}

impl Traces {
    /// How it met the damage, if it did.
    fn met(&self, what: What) -> Option<String> {
        let then = if self.serves { "it started" } else { "it does not start" };
        match what {
            _ if self.ended => Some(format!("it ended by itself; {then}")),
            What::Flip if self.was_read && self.is_there => {
                Some(format!("it read the file, which is as it was; {then}"))
            }
            What::Flip if self.was_read => Some(format!("it read the file, and wrote over the bit; {then}")),
            What::Remove if self.is_there => Some(format!("it made the file anew; {then}")),
            What::Flip | What::Remove => None,
        }
    }
}

/// What the kernel says of reads of one file, from the beginning of this value on.
struct Reads(OwnedFd);

impl Reads {
    /// `None`: there is no such file.
    fn of(path: &Path) -> Result<Option<Self>> {
        let doing = || format!("watching who reads {}", path.display());
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let events = inotify::init(flags).map_err(io::Error::from).doing(doing)?;
        match inotify::add_watch(&events, path, inotify::WatchFlags::ACCESS) {
            Ok(_) => Ok(Some(Self(events))),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(io::Error::from(e)).doing(doing),
        }
    }

    /// Whether there were any.
    fn any(&self) -> bool {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut events = inotify::Reader::new(&self.0, &mut buffer);
        // The first is enough; without one the kernel says that reading would block.
        events.next().is_ok_and(|event| event.events().contains(inotify::ReadFlags::ACCESS))
    }
}

#[async_trait]
impl Nemesis for Damage {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let id = match field.claim_one(self.target, rng).await {
            Ok(id) => id,
            Err(why) => return Done::failed("nobody", why),
        };
        self.damaged = Some(id);
        match self.until_met(field, id, rng).await {
            Ok(Ok(proof)) => Done::installed(named(&[id]), proof),
            Ok(Err(why)) => Done::failed(named(&[id]), why),
            Err(e) => Done::failed(named(&[id]), e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let Some(id) = self.damaged.take() else { return Done::skipped("nobody", "nothing was damaged") };
        let name = ProcessName::metasrv(id);
        let done = match goes_on(field, name).await {
            Ok(()) => {
                field.goes_on(id);
                Done::installed(named(&[id]), "it goes on")
            }
            Err(why) => {
                // Supervision would start it again and again.
                let replaced = async {
                    field.cluster.process(name)?.stop().await?;
                    members::replace(field, id).await
                };
                match replaced.await {
                    Ok(by) => Done::installed(named(&[id]), format!("it is lost ({why}), peer {by} is in its place")),
                    Err(e) => Done::failed(named(&[id]), e),
                }
            }
        };
        field.release(&[id]);
        done
    }
}

/// Whether the peer serves as a member, and dies no more.
async fn goes_on(field: &Field, name: ProcessName) -> Result<()> {
    let serves = || async {
        match field.status(name.id).await {
            Some(status) if status.stage() == Stage::Member => Ok(()),
            Some(status) => Err(format!("{} {}", status.stage().as_str_name(), status.problem)),
            None => Err("it does not answer".to_owned()),
        }
    };
    probe::until("a damaged peer to serve", SERVES_WITHIN, serves).await?;
    let process = field.cluster.process(name)?;
    let deaths = process.state().deaths;
    let mut watch = process.watch();
    let died = watch.wait_for(|state| state.deaths > deaths);
    match tokio::time::timeout(GOES_ON, died).await {
        Err(_) => Ok(()),
        Ok(_) => Err(Error::Founding("it served, and died again".to_owned())),
    }
}

/// A file that was damaged.
struct Damaged {
    path: PathBuf,
    /// For people.
    told: String,
    /// Where a bit was flipped, and what the byte is since.
    byte: Option<(u64, u8)>,
}

impl Damaged {
    /// Whether the flipped bit is still there, or the file that was removed is again.
    fn is_there(&self) -> bool {
        let Some((at, flipped)) = self.byte else { return self.path.exists() };
        let mut byte = [0];
        let read = fs::File::open(&self.path).and_then(|file| file.read_exact_at(&mut byte, at));
        read.is_ok() && byte == [flipped]
    }
}

/// Damages some file under `dir`, but none of these. Of a file that is flipped in, a byte that is not zero: files are made
/// larger than what is in them. `None`: there is no other file.
fn damage(dir: &Path, what: What, but: &[PathBuf], rng: &mut StdRng) -> Result<Option<Damaged>> {
    let mut files = files_under(dir)?;
    files.retain(|(path, bytes)| *bytes > 0 && !but.contains(path));
    if files.is_empty() {
        return Ok(None);
    }
    let (path, bytes) = files.swap_remove(rng.random_range(0..files.len()));
    let name = path.strip_prefix(dir).unwrap_or(&path).display().to_string();
    let doing = || format!("damaging {}", path.display());
    match what {
        What::Remove => {
            fs::remove_file(&path).doing(doing)?;
            Ok(Some(Damaged { told: format!("{name} was removed"), path, byte: None }))
        }
        What::Flip => {
            let file = fs::File::options().read(true).write(true).open(&path).doing(doing)?;
            let (mut at, mut byte) = (0, [0]);
            for _ in 0..TRIES {
                at = rng.random_range(0..bytes);
                file.read_exact_at(&mut byte, at).doing(doing)?;
                if byte != [0] {
                    break;
                }
            }
            let bit = rng.random_range(0..8);
            byte[0] ^= 1 << bit;
            file.write_all_at(&byte, at).doing(doing)?;
            file.sync_all().doing(doing)?;
            let told = format!("bit {bit} of byte {at} of {name} was flipped");
            Ok(Some(Damaged { path, told, byte: Some((at, byte[0])) }))
        }
    }
}

/// The data files under a directory with their sizes, in order; not the logs that people read.
fn files_under(dir: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let doing = || format!("listing {}", dir.display());
    let mut found = Vec::new();
    let mut directories = vec![dir.to_owned()];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(&next).doing(doing)? {
            let entry = entry.doing(doing)?;
            let (path, metadata) = (entry.path(), entry.metadata().doing(doing)?);
            if metadata.is_dir() {
                directories.push(path);
            } else if path.extension().is_none_or(|extension| extension != "log") {
                found.push((path, metadata.len()));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn one_bit_is_flipped_or_one_file_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        let (data, empty) = (dir.path().join("log/data"), dir.path().join("empty"));
        fs::write(&data, [vec![0; 50], vec![1; 50]].concat()).unwrap();
        fs::write(&empty, "").unwrap();
        fs::write(dir.path().join("lake.log"), vec![0; 100_000]).unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        let flip = damage(dir.path(), What::Flip, &[], &mut rng).unwrap().unwrap();
        assert!(flip.told.contains("log/data") && flip.is_there(), "{}", flip.told);
        let before = [vec![0; 50], vec![1; 50]].concat();
        let flipped: u32 = fs::read(&data).unwrap().iter().zip(&before).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(flipped, 1);
        fs::write(&data, &before).unwrap();
        assert!(!flip.is_there());
        assert!(damage(dir.path(), What::Remove, std::slice::from_ref(&data), &mut rng).unwrap().is_none());
        let removed = damage(dir.path(), What::Remove, &[], &mut rng).unwrap().unwrap();
        assert!(!data.exists() && empty.exists() && !removed.is_there());
        assert!(damage(dir.path(), What::Remove, &[], &mut rng).unwrap().is_none());
        fs::write(&data, "anew").unwrap();
        assert!(removed.is_there());
    }

    #[test]
    fn the_kernel_says_whether_a_file_was_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        assert!(Reads::of(&path).unwrap().is_none());
        fs::write(&path, "x").unwrap();
        let reads = Reads::of(&path).unwrap().unwrap();
        fs::write(&path, "y").unwrap();
        assert!(!reads.any(), "it was written, and not read");
        assert_eq!(fs::read(&path).unwrap(), b"y");
        assert!(reads.any());
    }

    #[test]
    fn damage_that_nobody_meets_shows_nothing() {
        let traces = |ended: bool, was_read, is_there| Traces { serves: !ended, ended, was_read, is_there };
        assert_eq!(traces(false, false, true).met(What::Flip), None, "a bit in a file that nobody reads");
        assert_eq!(traces(false, false, false).met(What::Remove), None, "a file that nobody misses");
        let met = |traces: Traces, what| traces.met(what).unwrap();
        assert!(met(traces(true, false, false), What::Remove).contains("does not start"));
        assert!(met(traces(false, true, true), What::Flip).contains("read the file"));
        assert!(met(traces(false, true, false), What::Flip).contains("wrote over"));
        assert!(met(traces(false, false, true), What::Remove).contains("made the file anew"));
    }
}
