//! Structured logs: to a file of bounded size in the data directory, or to standard error.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Name of the log in a data directory.
pub const FILE_NAME: &str = "lake.log";
/// Size at which a log file is put aside, as `lake.log.1`, for a new one. The one put aside before goes.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// What libraries say at their info level is of no use to an operator.
/// openraft repeats several times a second that a peer is away.
const QUIET: &str = "openraft=warn,openraft::core::heartbeat=error,openraft::replication=error,openraft::engine=error,\
                     openraft::core::raft_core=error,sled=warn,h2=warn,hyper=warn,tower=warn,datafusion=warn,rustyline=warn";

/// How a line looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Options of every process that logs.
#[derive(Debug, Clone, clap::Args)]
pub struct LogArgs {
    /// How much is logged: error, warn, info, debug, trace, or directives like info,lake_query=debug
    #[arg(long, env = "LAKE_LOG", default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
    /// How a line of the log looks
    #[arg(long, env = "LAKE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log to standard error, not to lake.log in the data directory
    #[arg(long)]
    pub log_stderr: bool,
}

/// Begins to log, to `<dir>/lake.log` unless standard error was asked for. Panics are logged from now on.
///
/// # Errors
/// The level is none, or the file cannot be opened.
pub fn start(args: &LogArgs, dir: &Path) -> Result<()> {
    match args.log_stderr {
        true => install(args, Mutex::new(Lossy::new(io::stderr()))),
        false => install(args, Mutex::new(Lossy::new(LogFile::open(dir)?))),
    }
}

fn install<W>(args: &LogArgs, writer: W) -> Result<()>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let directives = format!("{QUIET},{}", args.log_level);
    let filter = EnvFilter::try_new(&directives)
        .with_context(|| format!("log_level: {:?} is no level like info, and no list of directives", args.log_level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(writer);
    // They would go to standard error, and printing there panics when that fails too.
    let builder = builder.log_internal_errors(false);
    let installed = match args.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    installed.map_err(|e| anyhow!("starting to log: {e}"))?;
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!(%panic, backtrace = %std::backtrace::Backtrace::force_capture(), "a defect: a task panicked");
        default_hook(panic);
    }));
    Ok(())
}

/// A log that cannot be written, on a full disk for one, must not stop what it tells of: lines are lost, counted, and
/// the next one that can be written says so.
#[derive(Debug)]
struct Lossy<W> {
    writer: W,
    lost: u64,
    last_error: Option<io::Error>,
}

impl<W: Write> Lossy<W> {
    fn new(writer: W) -> Self {
        Self { writer, lost: 0, last_error: None }
    }

    fn try_write(&mut self, line: &[u8]) -> io::Result<()> {
        if let Some(error) = &self.last_error {
            // The line that failed may have been cut in its middle.
            self.writer.write_all(format!("\n{} lines of the log are lost: {error}\n", self.lost).as_bytes())?;
            (self.lost, self.last_error) = (0, None);
        }
        self.writer.write_all(line)
    }
}

impl<W: Write> Write for Lossy<W> {
    /// Takes a whole line. Never fails.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.try_write(line) {
            self.lost += 1;
            self.last_error = Some(error);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // What cannot be flushed shows at the next line.
        let _ = self.writer.flush();
        Ok(())
    }
}

/// A file that is put aside when it is full.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LogFile {
    fn open(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("making the directory {}", dir.display()))?;
        let path = dir.join(FILE_NAME);
        let (file, bytes) = append_to(&path).with_context(|| format!("opening the log {}", path.display()))?;
        Ok(Self { path, file, bytes })
    }

    fn put_aside(&mut self) -> io::Result<()> {
        fs::rename(&self.path, self.path.with_extension("log.1"))?;
        (self.file, self.bytes) = append_to(&self.path)?;
        Ok(())
    }
}

fn append_to(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.bytes >= MAX_FILE_BYTES {
            self.put_aside()?;
        }
        let written = self.file.write(line)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_written_loses_lines_and_says_so_later() {
        /// Fails while it is full.
        struct Disk {
            full: bool,
            text: Vec<u8>,
        }
        impl Write for Disk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                if self.full {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.text.write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut log = Lossy::new(Disk { full: false, text: Vec::new() });
        log.write_all(b"one\n").unwrap();
        log.writer.full = true;
        log.write_all(b"two\n").unwrap();
        log.write_all(b"three\n").unwrap();
        log.writer.full = false;
        log.write_all(b"four\n").unwrap();
        log.write_all(b"five\n").unwrap();
        let text = String::from_utf8(log.writer.text).unwrap();
        assert!(text.starts_with("one\n\n2 lines of the log are lost: "), "{text}");
        assert!(text.ends_with("\nfour\nfive\n"), "{text}");
    }

    #[test]
    fn a_full_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogFile::open(dir.path()).unwrap();
        log.write_all(b"first\n").unwrap();
        drop(log);
        let mut log = LogFile::open(dir.path()).unwrap();
        log.bytes = MAX_FILE_BYTES;
        log.write_all(b"second\n").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("lake.log.1")).unwrap(), "first\n");
        assert_eq!(fs::read_to_string(dir.path().join("lake.log")).unwrap(), "second\n");
        assert_eq!(log.bytes, 7);
    }
}
