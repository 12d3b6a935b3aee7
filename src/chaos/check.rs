//! `lake chaos check`: a history's verdict.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use lake_chaos::check::append::Model;
use lake_chaos::check::{self, Budget, Options};
use lake_chaos::history::{Workload, file};

use super::print::{self, Format};

/// Longest time that judging may be given, in seconds.
const MAX_SECONDS: u64 = 24 * 60 * 60;

/// Options of `lake chaos check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A history in Jepsen's format: one EDN map a line
    history: PathBuf,
    /// What the clients did [default: as the operations' names tell]
    #[arg(long)]
    workload: Option<Workload>,
    #[command(flatten)]
    judging: Judging,
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

/// Judges a history and prints what was found. Gives the exit code.
///
/// # Errors
/// The file cannot be read, or is no history.
pub fn run(args: &Args) -> Result<u8> {
    let (workload, history) = file::read(&args.history, args.workload)?;
    let outcomes = check::judge_history(workload, &history, &args.judging.options()?);
    print::verdict(workload, &outcomes, args.format)
}
