//! `lake chaos report`: a run's results and page, made again from its files.

use std::path::PathBuf;

use anyhow::Result;
use lake_chaos::report::{self, page};

use super::check::Judging;
use super::print::{self, Format};

/// Options of `lake chaos report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The run's directory: it holds history.edn, and run.json and samples.jsonl if lake made it
    run: PathBuf,
    #[command(flatten)]
    judging: Judging,
    /// How the verdict is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// Judges a run and writes its results.json and report.html. Gives the exit code.
///
/// # Errors
/// A file cannot be read, is not what it should be, or cannot be written.
pub fn run(args: &Args) -> Result<u8> {
    let results = report::build(&args.run, &args.judging.options()?)?;
    let code = print::verdict(results.workload, &results.checks, args.format)?;
    if args.format == Format::Text {
        println!("{}", args.run.join(page::FILE_NAME).display());
    }
    Ok(code)
}
