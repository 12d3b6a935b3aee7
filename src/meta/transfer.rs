//! `lake meta export` and `lake meta import`: everything that a metadata store holds, into a data file or into another
//! store. How it is moved is in [`lake_client::transfer`].

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use lake_client::store::SharedStore;
use lake_client::transfer::file::{Described, Sum};
use lake_client::transfer::{self, Between, Error, Existing, Imported, Progress, Step};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{Format, moment, or_dash, print, print_json, size};
use super::{EXIT_NO, EXIT_UNKNOWN};
use crate::columns::columns;
use crate::place;

/// How long one call to a store may take unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is told how far it is.
const TOLD_EVERY: Duration = Duration::from_secs(5);

/// Where entries come from, or go to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// The cluster that `--at` and so on name.
    Cluster,
    Store(place::Place),
    DataFile(PathBuf),
}

fn place(text: &str) -> Result<Place, String> {
    match text {
        "" => Err(format!("it is a data file, cluster, {}", place::PLACES)),
        "cluster" => Ok(Place::Cluster),
        text if text.contains("://") => match text.parse() {
            Ok(store) => Ok(Place::Store(store)),
            Err(_) => Err(format!("it is a data file, cluster, {}", place::PLACES)),
        },
        path => Ok(Place::DataFile(path.into())),
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cluster => f.write_str("cluster"),
            Self::Store(store) => write!(f, "{store}"),
            Self::DataFile(path) => write!(f, "{}", path.display()),
        }
    }
}

/// What both commands are told.
#[derive(Debug, clap::Args)]
struct How {
    /// What is done with keys that the target holds: it may hold none but those that a stopped import of the same data left
    /// there (refuse); they stay as they are (keep); those that are moved get the new values (replace)
    #[arg(long, value_enum, default_value_t = IfThere::Refuse)]
    existing: IfThere,
    /// How the outcome is printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum IfThere {
    Refuse,
    Keep,
    Replace,
}

/// Options of `lake meta export`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Stores: cluster (that of --at), lake://HOST:PORT,..., etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX (settings from AWS_*
variables), file:///DIRECTORY. Anything else is the path of a data file.
Keys that hang on leases are left out. --timeout-secs is for each call [default: 60].

Examples:
  lake meta export everything.data
  lake meta export --from etcd://127.0.0.1:2379/lake everything.data
  lake meta export s3://bucket/metadata")]
pub struct ExportArgs {
    /// Where to: a data file (nothing may be there yet) or a store
    #[arg(value_parser = place)]
    to: Place,
    /// The store that is read
    #[arg(long, value_name = "STORE", default_value = "cluster", value_parser = place)]
    from: Place,
    #[command(flatten)]
    how: How,
}

/// Options of `lake meta import`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Stores: cluster (that of --at), lake://HOST:PORT,..., etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX (settings from AWS_*
variables), file:///DIRECTORY. Anything else is the path of a data file.
Exit code 3: the target is not empty; 4: a part was written: repeat it. --timeout-secs is for each call [default: 60].

Examples:
  lake meta import everything.data
  lake meta import everything.data --to etcd://127.0.0.1:2379/lake
  lake meta import file:///data/metadata --at 127.0.0.1:9191")]
pub struct ImportArgs {
    /// Where from: a data file or a store
    #[arg(value_parser = place)]
    from: Place,
    /// The store that is filled
    #[arg(long, value_name = "STORE", default_value = "cluster", value_parser = place)]
    to: Place,
    #[command(flatten)]
    how: How,
}

/// Does what was asked.
///
/// # Errors
/// Nothing was written to a store: what is wrong with either end.
pub async fn export(cluster: &Cluster, args: ExportArgs) -> Result<u8> {
    run(cluster, args.from, args.to, args.how).await
}

/// Does what was asked.
///
/// # Errors
/// As [`export`].
pub async fn import(cluster: &Cluster, args: ImportArgs) -> Result<u8> {
    run(cluster, args.from, args.to, args.how).await
}

async fn run(cluster: &Cluster, from: Place, to: Place, how: How) -> Result<u8> {
    let existing = match how.existing {
        IfThere::Refuse => Existing::Refuse,
        IfThere::Keep => Existing::Keep,
        IfThere::Replace => Existing::Replace,
    };
    let patience = cluster.timeout_or(TIMEOUT);
    let told = Mutex::new(Instant::now());
    let tell = |progress| tell(&told, progress);
    if from == to {
        bail!("{from} is to be moved to itself");
    }
    let moved = match (&from, &to) {
        (Place::DataFile(_), Place::DataFile(_)) => bail!("{from} and {to} are both data files: copy the file"),
        (_, Place::DataFile(path)) => {
            if existing != Existing::Refuse {
                bail!("--existing is for stores: a data file is never changed");
            }
            let source = open(cluster, &from, patience).await?;
            let exported = transfer::export(source.as_ref(), &from.to_string(), path, patience, &tell).await;
            match exported {
                Ok(file) => {
                    exported_is(how.format, &from, &to, &file)?;
                    return Ok(0);
                }
                Err(e) => Err(e),
            }
        }
        (Place::DataFile(path), _) => {
            let target = open(cluster, &to, patience).await?;
            transfer::import(path, target.as_ref(), existing, patience, &tell).await
        }
        (_, _) => {
            let (source, target) = (open(cluster, &from, patience).await?, open(cluster, &to, patience).await?);
            let between = Between::new(&std::env::temp_dir());
            match transfer::export(source.as_ref(), &from.to_string(), between.path(), patience, &tell).await {
                Ok(_) => transfer::import(between.path(), target.as_ref(), existing, patience, &tell).await,
                Err(e) => Err(e),
            }
        }
    };
    match moved {
        Ok(imported) => {
            imported_is(how.format, &from, &to, &imported)?;
            Ok(0)
        }
        Err(e @ Error::NotEmpty { .. }) => {
            eprintln!(
                "lake: {to}: {e}. Nothing was written. With --existing keep the keys that are there stay as they are, with \
                 --existing replace those that are moved get the new values"
            );
            Ok(EXIT_NO)
        }
        Err(e @ Error::Stopped { .. }) => {
            eprintln!("lake: {to}: {e}\nWhat was written stays there: run the same command again to go on.");
            Ok(EXIT_UNKNOWN)
        }
        Err(Error::Store(e)) => Err(e.into()),
        Err(e) => Err(e.into()),
    }
}

async fn open(cluster: &Cluster, place: &Place, patience: Duration) -> Result<SharedStore> {
    match place {
        Place::Cluster => Ok(Arc::new(cluster.store()?)),
        Place::Store(store @ place::Place::Cluster(_)) => store.open(cluster.secret()?, patience).await,
        Place::Store(store) => store.open(None, patience).await,
        Place::DataFile(path) => bail!("{} is a data file and no store", path.display()),
    }
}

/// Says now and then how far it is.
fn tell(told: &Mutex<Instant>, progress: Progress) {
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
    if told.elapsed() < TOLD_EVERY {
        return;
    }
    *told = Instant::now();
    let what = match progress.step {
        Step::Reading => "read",
        Step::LookingAtTarget => "looked for in the target",
        Step::Writing => "written",
        Step::Comparing => "compared",
    };
    let of = progress.of.map(|of| format!(" of {of}")).unwrap_or_default();
    eprintln!("lake: {}{of} entries {what}", progress.entries);
}

fn hash(sum: &Sum) -> String {
    format!("{:032x}", sum.hash)
}

fn revision(file: &Described) -> String {
    match file.header.revision {
        Some(revision) => revision.to_string(),
        None => "none: what was changed meanwhile is there as it was or as it is".to_owned(),
    }
}

fn left_out(file: &Described) -> String {
    match file.left_out {
        0 => "nothing".to_owned(),
        count => format!("{count} keys that hang on leases"),
    }
}

fn exported_is(format: Format, from: &Place, to: &Place, file: &Described) -> Result<()> {
    match format {
        Format::Table => print(&columns(vec![
            ["from".to_owned(), from.to_string()],
            ["to".to_owned(), to.to_string()],
            ["revision".to_owned(), revision(file)],
            ["entries".to_owned(), format!("{} ({})", file.sum.entries, size(file.sum.bytes))],
            ["hash".to_owned(), hash(&file.sum)],
            ["left out".to_owned(), left_out(file)],
        ])),
        Format::Json => print_json(&json!({ "from": from.to_string(), "to": to.to_string(), "data": described(file) })),
    }
}

fn described(file: &Described) -> Value {
    json!({
        "from": file.header.from,
        "revision": file.header.revision,
        "made_unix_ms": file.header.made_unix_ms,
        "made_by": file.header.made_by,
        "entries": file.sum.entries,
        "bytes": file.sum.bytes,
        "hash": hash(&file.sum),
        "left_out": file.left_out,
    })
}

fn imported_is(format: Format, from: &Place, to: &Place, imported: &Imported) -> Result<()> {
    let file = &imported.file;
    match format {
        Format::Table => {
            let some = |count: u64| or_dash(Some(count).filter(|count| *count > 0));
            print(&columns(vec![
                ["from".to_owned(), from.to_string()],
                ["to".to_owned(), to.to_string()],
                ["data".to_owned(), format!("of {}, from {}", moment(file.header.made_unix_ms), file.header.from)],
                ["revision".to_owned(), revision(file)],
                ["left out".to_owned(), left_out(file)],
                ["written".to_owned(), imported.written.to_string()],
                ["replaced".to_owned(), some(imported.replaced)],
                ["were there".to_owned(), some(imported.there)],
                ["kept".to_owned(), some(imported.kept)],
                ["others".to_owned(), some(imported.others)],
                ["verified".to_owned(), format!("{} ({})", imported.verified.entries, size(imported.verified.bytes))],
                ["hash".to_owned(), hash(&imported.verified)],
            ]))
        }
        Format::Json => print_json(&json!({
            "from": from.to_string(),
            "to": to.to_string(),
            "data": described(file),
            "written": imported.written,
            "replaced": imported.replaced,
            "were_there": imported.there,
            "kept": imported.kept,
            "others": imported.others,
            "verified": { "entries": imported.verified.entries, "bytes": imported.verified.bytes, "hash": hash(&imported.verified) },
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        let store = |text: &str| Place::Store(text.parse().unwrap());
        for (text, expected) in [
            ("cluster", Place::Cluster),
            ("./cluster", Place::DataFile("./cluster".into())),
            ("a/b.data", Place::DataFile("a/b.data".into())),
            ("lake://a:1,b:2", store("lake://a:1,b:2")),
            ("file:///d/e", store("file:///d/e")),
        ] {
            assert_eq!(place(text), Ok(expected.clone()), "{text}");
            assert_eq!(place(&expected.to_string()), Ok(expected), "{text}: it is told as it is written");
        }
        for wrong in ["", "lake://", "file://d", "gs://b/x"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
