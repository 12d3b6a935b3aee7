//! Damage to the files of one peer: a bit flipped, or a file gone. The peer must find it, or be none the worse for it; if it
//! cannot go on it is replaced, as an operator would.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use lake_proto::v1::status_response::Stage;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, named};
use super::{Done, Nemesis, members, process};
use crate::process::ProcessName;
use crate::{Error, IoContext, Result, probe};

/// How long a peer may take to serve with its damage, before it is taken for lost.
const SERVES_WITHIN: Duration = Duration::from_secs(8);
/// And how long it then has to go on serving.
const GOES_ON: Duration = Duration::from_secs(1);
/// How often a byte that is not zero is looked for in a file.
const TRIES: usize = 1000;

/// What is done to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// One bit is another.
    Flip,
    /// It is gone.
    Remove,
}

/// Damages one file of one peer.
pub struct Damage {
    what: What,
    damaged: Option<u64>,
}

impl Damage {
    pub fn new(what: What) -> Self {
        Self { what, damaged: None }
    }
}

#[async_trait]
impl Nemesis for Damage {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let id = match field.claim_one(rng).await {
            Ok(id) => id,
            Err(why) => return Done::failed("nobody", why),
        };
        self.damaged = Some(id);
        let what = self.what;
        let damaged = async {
            process::kill(field, id).await?;
            let name = ProcessName::metasrv(id);
            let proof = damage(&field.cluster.entry(name)?.data_dir, what, rng)?;
            // It must not go on as if nothing had happened, and may refuse to go on at all.
            field.lose(id, &proof);
            // Started now, so that it meets the damage while the others are under load. It may refuse.
            let serves = field.cluster.start_one(name).await.is_ok();
            Ok::<_, Error>(format!("{proof}; {}", if serves { "it started" } else { "it does not start" }))
        };
        match damaged.await {
            Ok(proof) => Done::installed(named(&[id]), proof),
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

/// Damages some file under `dir`, and says how. Of a file that is flipped in, a byte that is not zero: files are made larger
/// than what is in them.
fn damage(dir: &Path, what: What, rng: &mut StdRng) -> Result<String> {
    let mut files = files_under(dir)?;
    files.retain(|(_, bytes)| *bytes > 0);
    if files.is_empty() {
        return Err(Error::Directory { dir: dir.to_owned(), problem: "there is nothing in it to damage".to_owned() });
    }
    let (path, bytes) = &files[rng.random_range(0..files.len())];
    let name = path.strip_prefix(dir).unwrap_or(path).display();
    let doing = || format!("damaging {}", path.display());
    match what {
        What::Remove => {
            fs::remove_file(path).doing(doing)?;
            Ok(format!("{name} was removed"))
        }
        What::Flip => {
            let file = fs::File::options().read(true).write(true).open(path).doing(doing)?;
            let (mut at, mut byte) = (0, [0]);
            for _ in 0..TRIES {
                at = rng.random_range(0..*bytes);
                file.read_exact_at(&mut byte, at).doing(doing)?;
                if byte != [0] {
                    break;
                }
            }
            let bit = rng.random_range(0..8);
            byte[0] ^= 1 << bit;
            file.write_all_at(&byte, at).doing(doing)?;
            file.sync_all().doing(doing)?;
            Ok(format!("bit {bit} of byte {at} of {name} was flipped"))
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
        let how = damage(dir.path(), What::Flip, &mut rng).unwrap();
        assert!(how.contains("log/data"), "{how}");
        let before = [vec![0; 50], vec![1; 50]].concat();
        let flipped: u32 = fs::read(&data).unwrap().iter().zip(&before).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(flipped, 1);
        damage(dir.path(), What::Remove, &mut rng).unwrap();
        assert!(!data.exists() && empty.exists());
        assert!(damage(dir.path(), What::Remove, &mut rng).is_err());
    }
}
