//! What the comparison of the peers' states has found about this one ([`super::agreement`]), kept beside its data so that a
//! restart knows it, too.
//!
//! ```text
//!   odd     a majority of the voters holds another state: this directory is never started again
//!   alarm   no majority of the voters holds one state: the peer starts, and writes nothing
//! ```
//!
//! Each file holds what is to be said, and is there or not there as a whole. Nobody but a person removes one.
//!
//! Failure cases: a file that cannot be written is told and changes nothing else: the process still stops. One that is there
//! counts, whatever is in it.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::files;

/// The names of the files.
pub(crate) const ODD: &str = "odd";
pub(crate) const ALARM: &str = "alarm";

/// Where it is kept. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Verdicts {
    /// None where nothing outlives the process.
    dir: Option<PathBuf>,
}

impl Verdicts {
    /// Beside the data of this directory.
    pub fn in_dir(dir: &Path) -> Self {
        Self { dir: Some(dir.to_owned()) }
    }

    /// Nowhere.
    pub fn unkept() -> Self {
        Self { dir: None }
    }

    /// Why this directory must not be started, if that is so.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn odd(&self) -> Result<Option<String>, Error> {
        self.read(ODD)
    }

    /// Why nothing is to be written, if that is so.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn alarm(&self) -> Result<Option<String>, Error> {
        self.read(ALARM)
    }

    fn read(&self, name: &str) -> Result<Option<String>, Error> {
        let Some(path) = self.dir.as_ref().map(|dir| dir.join(name)) else { return Ok(None) };
        match std::fs::read(&path) {
            Ok(what) => {
                let what = String::from_utf8_lossy(&what).trim().to_owned();
                Ok(Some(format!("{what} ({} says so)", path.display())))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(format!("reading {}", path.display()))(e)),
        }
    }

    /// Keeps a verdict, durably. Blocks.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn note(&self, name: &str, what: &str) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let (path, temporary) = (dir.join(name), dir.join(format!("{name}.new")));
        let mut file = File::create(&temporary)?;
        writeln!(file, "{what}")?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        files::sync_dir(dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_there_for_whoever_starts_next() {
        let dir = tempfile::tempdir().unwrap();
        let verdicts = Verdicts::in_dir(dir.path());
        assert_eq!((verdicts.odd().unwrap(), verdicts.alarm().unwrap()), (None, None));
        verdicts.note(ODD, "it is the odd one").unwrap();
        let again = Verdicts::in_dir(dir.path());
        assert!(again.odd().unwrap().unwrap().starts_with("it is the odd one ("));
        assert_eq!(again.alarm().unwrap(), None);
        std::fs::write(dir.path().join(ALARM), [0xff]).unwrap();
        assert!(again.alarm().unwrap().is_some(), "whatever is in it");
        Verdicts::unkept().note(ODD, "nobody").unwrap();
        assert_eq!(Verdicts::unkept().odd().unwrap(), None);
    }
}
