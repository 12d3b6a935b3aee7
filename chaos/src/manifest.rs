//! `cluster.json`: a list with one object per process, for tools, tests and people.
//!
//! ```json
//! [{"role": "metasrv", "id": 1, "pid": 4711, "log_file": "/data/metasrv-1/lake.log", "data_dir": "/data/metasrv-1",
//!   "addresses": {"grpc": "127.0.0.1:10001", "raft": "127.0.0.1:10002"}}]
//! ```
//! `pid` is null while the process is down. The file is replaced as a whole, so that a reader sees one state or the
//! next; it stays when the cluster stops, so that the next start takes the same ports.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::process::{ProcessName, Role};
use crate::{Error, IoContext, Result};

/// Its name in the cluster's directory.
pub const FILE_NAME: &str = "cluster.json";

/// One process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub role: Role,
    pub id: u64,
    /// Absent while it is down.
    pub pid: Option<u32>,
    pub log_file: PathBuf,
    pub data_dir: PathBuf,
    /// `host:port` by what is served there: `grpc`, `raft`, `http`, `flight`, `rest`.
    pub addresses: BTreeMap<String, String>,
}

impl Entry {
    /// The process's name.
    pub fn name(&self) -> ProcessName {
        ProcessName { role: self.role, id: self.id }
    }
}

/// Reads `<dir>/cluster.json`; `None` if there is none.
///
/// # Errors
/// The file cannot be read or is no manifest.
pub fn read(dir: &Path) -> Result<Option<Vec<Entry>>> {
    let path = dir.join(FILE_NAME);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).doing(|| format!("reading {}", path.display())),
    };
    serde_json::from_slice(&text).map(Some).map_err(|e| Error::Directory {
        dir: path,
        problem: format!("not a list of processes as lake writes it ({e}); remove the file if nothing runs there"),
    })
}

/// Replaces `<dir>/cluster.json`.
///
/// # Errors
/// What the file system refused.
pub fn write(dir: &Path, entries: &[Entry]) -> Result<()> {
    let path = dir.join(FILE_NAME);
    let next = dir.join(format!("{FILE_NAME}.next"));
    let mut text = serde_json::to_vec_pretty(entries)
        .map_err(|e| Error::Directory { dir: path.clone(), problem: format!("cannot be written as JSON: {e}") })?;
    text.push(b'\n');
    // Not synced: after a power loss there is no process that it could speak of.
    File::create(&next)
        .and_then(|mut file| file.write_all(&text))
        .and_then(|()| fs::rename(&next, &path))
        .doing(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let entry = Entry {
            role: Role::Metasrv,
            id: 1,
            pid: Some(4711),
            log_file: "/data/metasrv-1/lake.log".into(),
            data_dir: "/data/metasrv-1".into(),
            addresses: BTreeMap::from([("grpc".into(), "127.0.0.1:10001".into())]),
        };
        let down = Entry { role: Role::Query, pid: None, ..entry.clone() };
        write(dir.path(), &[entry.clone(), down.clone()]).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(vec![entry, down]));
        let text = fs::read_to_string(dir.path().join(FILE_NAME)).unwrap();
        assert!(text.contains(r#""role": "metasrv""#) && text.contains(r#""pid": null"#), "{text}");
    }

    #[test]
    fn a_file_of_something_else_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE_NAME), "{}").unwrap();
        let message = read(dir.path()).unwrap_err().to_string();
        assert!(message.contains(FILE_NAME) && message.contains("remove the file"), "{message}");
    }
}
