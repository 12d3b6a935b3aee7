//! What `lake up` and `lake standalone` have in common: options, the sample, and what happens once the cluster serves.

pub mod sample;

use std::path::PathBuf;

use anyhow::Result;
use lake_chaos::manifest::Entry;

use self::sample::Sample;
use crate::columns::columns;
use crate::console::Console;
use crate::endpoints::DEFAULT_DIR;
use crate::logging::LogArgs;
use crate::shell::{Ended, Shell, ShellArgs};
use crate::signals::{EXIT_INTERRUPTED, Interrupts};

/// Options of a cluster on this machine.
#[derive(Debug, clap::Args)]
pub struct LocalArgs {
    /// Where everything is kept
    #[arg(long, default_value = DEFAULT_DIR, value_name = "PATH")]
    pub dir: PathBuf,
    /// Tables to load at the first start: tpch:SCALE, or none [default: tpch:0.01]
    #[arg(long, value_name = "SAMPLE")]
    pub sample: Option<Sample>,
    /// No prompt: serve until SIGINT or SIGTERM, also without a terminal
    #[arg(long, conflicts_with_all = ["command", "file"])]
    pub no_shell: bool,
    #[command(flatten)]
    pub shell: ShellArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

impl LocalArgs {
    /// Loads the sample, prints where everything is, and runs what was asked for. Gives the exit code.
    ///
    /// # Errors
    /// The query nodes cannot be reached, the sample cannot be loaded, or what is to be run cannot be read.
    pub async fn serve(
        &self,
        entries: impl Fn() -> Vec<Entry>,
        endpoints: Vec<String>,
        console: &Console,
        interrupts: &mut Interrupts,
    ) -> Result<u8> {
        let prepare = async {
            let progress = console.progress();
            progress.step("connecting to the query node");
            sample::load(&self.dir, self.sample, &endpoints, &progress).await?;
            Shell::connect(endpoints, None, self.shell.format).await
        };
        let mut shell = tokio::select! {
            shell = prepare => shell?,
            () = interrupts.next() => return Ok(EXIT_INTERRUPTED),
        };
        eprint!("{}", table(&entries()));
        if self.no_shell {
            eprintln!("serving until SIGINT or SIGTERM");
            interrupts.next().await;
            return Ok(0);
        }
        shell.run(&self.shell, console, interrupts).await.map(exit_code)
    }
}

/// What a shell's end is to whoever started this process.
pub fn exit_code(ended: Ended) -> u8 {
    match ended {
        Ended::Well => 0,
        Ended::Failed => 1,
        Ended::Interrupted => EXIT_INTERRUPTED,
    }
}

/// Who runs where, for people.
fn table(entries: &[Entry]) -> String {
    let header = ["ROLE", "ID", "PID", "ADDRESS", "DATA DIRECTORY"].map(str::to_owned);
    let rows = entries.iter().map(|entry| {
        let addresses: Vec<String> = entry.addresses.iter().map(|(name, at)| format!("{name}={at}")).collect();
        [
            entry.role.to_string(),
            entry.id.to_string(),
            entry.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            addresses.join(" "),
            entry.data_dir.display().to_string(),
        ]
    });
    columns(std::iter::once(header).chain(rows).collect())
}
