//! `lake chaos check`: a history's verdict.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lake_chaos::check::append::Model;
use lake_chaos::check::{self, Budget, Options};
use lake_chaos::history::{History, Workload, file, split};
use lake_chaos::report::record;

use super::print::{self, Format};

/// Longest time that judging may be given, in seconds.
const MAX_SECONDS: u64 = 24 * 60 * 60;

/// Options of `lake chaos check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A history in Jepsen's format: one EDN map a line; or a run's directory, which holds history.edn, and what was asked for
    history: PathBuf,
    /// What the clients did [default: as the operations' names tell]
    #[arg(long)]
    workload: Option<Workload>,
    #[command(flatten)]
    judging: Judging,
    /// Also write it into this directory, made for it, as tools take it that know one register, set or bank: a history each
    #[arg(long, value_name = "DIR")]
    split: Option<PathBuf>,
    /// How the verdict is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// How a history is judged.
#[derive(Debug, Clone, clap::Args)]
pub struct Judging {
    /// What is expected of transactions over lists
    #[arg(long, value_enum, default_value_t = Expected::StrictSerializable)]
    model: Expected,
    /// Seconds that searches may take; what is not decided by then is unknown
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    search_time: u64,
    /// Steps that the search on each key may take; a million of them need some hundred megabytes
    #[arg(long, value_name = "STEPS", default_value_t = Budget::STEPS)]
    search_steps: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Expected {
    StrictSerializable,
    Serializable,
}

impl Judging {
    /// As the checkers take it. The time begins now.
    ///
    /// # Errors
    /// The time is out of range.
    pub fn options(&self) -> Result<Options> {
        let range = 1..=MAX_SECONDS;
        ensure!(range.contains(&self.search_time), "--search-time is 1 to {MAX_SECONDS} s, not {}", self.search_time);
        let model = match self.model {
            Expected::StrictSerializable => Model::StrictSerializable,
            Expected::Serializable => Model::Serializable,
        };
        Ok(Options {
            budget: Budget::new(self.search_steps, Duration::from_secs(self.search_time)),
            model,
            drift: false,
        })
    }
}

/// Judges a history, or a run by all that its directory has, and prints what was found. Gives the exit code.
///
/// # Errors
/// The file cannot be read, or is no history; it cannot be split, or not be written where it should.
pub fn run(args: &Args) -> Result<u8> {
    let (path, record) = match args.history.is_dir() {
        true => (args.history.join(file::FILE_NAME), record::read(&args.history)?),
        false => (args.history.clone(), None),
    };
    let (workload, history) = file::read(&path, args.workload.or(record.as_ref().map(|record| record.workload)))?;
    if let Some(dir) = &args.split {
        write_split(workload, &history, dir)?;
    }
    let options = args.judging.options()?;
    let outcomes = match &record {
        Some(record) => check::judge_run(workload, &history, &record.run(), &options),
        None => check::judge_history(workload, &history, &options),
    };
    print::verdict(workload, &outcomes, args.format)
}

fn write_split(workload: Workload, history: &History, dir: &Path) -> Result<()> {
    let parts = split::split(workload, history)?;
    fs::create_dir(dir).with_context(|| format!("making {} for the parts of the history", dir.display()))?;
    for (name, operations) in parts {
        let path = dir.join(format!("{name}.edn"));
        let doing = || format!("writing {}", path.display());
        let mut file = BufWriter::new(File::create(&path).with_context(doing)?);
        operations.iter().try_for_each(|operation| writeln!(file, "{operation}")).with_context(doing)?;
        file.flush().with_context(doing)?;
    }
    Ok(())
}
