//! What upkeep needs besides statements where a run's tables are files of this machine: sweeps for orphans take files that are days old, and a
//! run takes a minute. So files are made to look old, except those that a statement under way may have written; and among them is
//! one that is an orphan for certain.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How old files are made to look: sweeps ask for a day at least.
const DAYS: Duration = Duration::from_secs(4 * 86_400);
/// How deep directories of a table go, at most.
const MAX_DEPTH: u32 = 4;

/// The directories that may have a table's files, by its name: behind it is a uuid, and whoever has lost the race to make the table has
/// left one, too.
///
/// # Errors
/// They cannot be looked for.
pub(super) fn locations(warehouse: &Path, schema: &str, table: &str) -> io::Result<Vec<PathBuf>> {
    let begins = format!("{table}-");
    let all: Vec<fs::DirEntry> = fs::read_dir(warehouse.join(schema))?.collect::<io::Result<_>>()?;
    let own = all.iter().filter(|entry| entry.file_name().to_string_lossy().starts_with(&begins));
    Ok(own.map(fs::DirEntry::path).collect())
}

/// Puts an orphan there, and has all files look old that are older than this. One that goes meanwhile is nobody's any more.
///
/// # Errors
/// A file cannot be written, or its time not be set.
pub(super) fn age(locations: &[PathBuf], older_than: Duration, number: i64) -> io::Result<()> {
    let now = SystemTime::now();
    for location in locations {
        let orphan = location.join("metadata").join(format!("orphan-{number}.avro"));
        fs::write(&orphan, "nobody refers to it")?;
        make_old(&orphan, now)?;
        walk(location, now, older_than, MAX_DEPTH)?;
    }
    Ok(())
}

fn walk(dir: &Path, now: SystemTime, older_than: Duration, depth: u32) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let aged = match entry.metadata() {
            Ok(metadata) if metadata.is_dir() && depth > 0 => walk(&entry.path(), now, older_than, depth - 1),
            Ok(metadata) if metadata.is_file() => {
                let age = now.duration_since(metadata.modified()?).unwrap_or_default();
                if age > older_than && age < DAYS / 2 { make_old(&entry.path(), now) } else { Ok(()) }
            }
            Ok(_) => Ok(()),
            Err(e) => Err(e),
        };
        match aged {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn make_old(file: &Path, now: SystemTime) -> io::Result<()> {
    File::options().write(true).open(file)?.set_modified(now - DAYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_any_statement_looks_days_old_and_there_is_an_orphan() {
        let warehouse = tempfile::tempdir().unwrap();
        let table = warehouse.path().join("chaos/hot_1-uuid");
        for dir in ["data", "metadata"] {
            fs::create_dir_all(table.join(dir)).unwrap();
        }
        fs::create_dir(warehouse.path().join("chaos/hot_11-uuid")).unwrap();
        let (old, new) = (table.join("data/old.parquet"), table.join("data/new.parquet"));
        for file in [&old, &new] {
            fs::write(file, "rows").unwrap();
        }
        let minute = Duration::from_secs(60);
        File::options().write(true).open(&old).unwrap().set_modified(SystemTime::now() - minute).unwrap();
        let found = locations(warehouse.path(), "chaos", "hot_1").unwrap();
        assert_eq!(found, [table.clone()]);
        assert!(locations(warehouse.path(), "chaos", "hot_2").unwrap().is_empty());
        age(&found, minute / 2, 7).unwrap();
        let age = |file: &Path| file.metadata().unwrap().modified().unwrap().elapsed().unwrap();
        assert!(age(&old) >= DAYS && age(&new) < minute);
        assert!(age(&table.join("metadata/orphan-7.avro")) >= DAYS);
    }
}
