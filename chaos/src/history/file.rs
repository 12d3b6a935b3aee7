//! `history.edn`: one operation a line. Also reads all operations in one vector, and values over several lines.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::edn::{self, Edn, Reader};
use super::history::{History, Malformed};
use super::operation::Operation;
use super::workload::Workload;
use super::{decode, encode};

/// Its name in a run's directory.
pub const FILE_NAME: &str = "history.edn";
/// The longest history that is read, in bytes: some ten million operations.
pub const MAX_BYTES: u64 = 1 << 30;

/// Why a text is no history.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// It is no EDN, or no operation of the workload.
    #[error(transparent)]
    Edn(#[from] edn::Error),
    /// Its operations do not follow on each other.
    #[error("line {line}: {source}")]
    Malformed { line: usize, source: Malformed },
    /// It is a history, but of which workload it does not say.
    #[error("no operation tells which workload this is: name it with --workload")]
    UnknownWorkload,
}

/// Why a file could not be read as a history.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("reading {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} has {bytes} bytes, more than the {MAX_BYTES} that are read at most: judge a part of it", .path.display())]
    TooLong { path: PathBuf, bytes: u64 },
    #[error("{}: {source}", .path.display())]
    Parse { path: PathBuf, source: ParseError },
}

/// Reads a text. Without a workload the first operation that betrays one decides.
///
/// # Errors
/// The line, and the column where there is one, of what is wrong.
pub fn parse(text: &str, workload: Option<Workload>) -> Result<(Workload, History), ParseError> {
    let workload = match workload {
        Some(workload) => workload,
        None => betrayed(text)?,
    };
    let (mut operations, mut starts) = (Vec::new(), Vec::new());
    each(text, |reader, start, value| {
        let place = operations.len() as u64;
        operations.push(decode::operation(&value, workload, place).map_err(|what| reader.error_at(start, what))?);
        starts.push(start);
        Ok(true)
    })?;
    let history = History::new(operations).map_err(|source| {
        let line = Reader::new(text).error_at(starts[source.index], "").line;
        ParseError::Malformed { line, source }
    })?;
    Ok((workload, history))
}

/// Reads a file, as [`parse`] does.
///
/// # Errors
/// The file cannot be read, is too long, or is no history.
pub fn read(path: &Path, workload: Option<Workload>) -> Result<(Workload, History), ReadError> {
    let io = |source| ReadError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    if bytes > MAX_BYTES {
        return Err(ReadError::TooLong { path: path.to_owned(), bytes });
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(io)?;
    parse(&text, workload).map_err(|source| ReadError::Parse { path: path.to_owned(), source })
}

/// Writes one operation as a line.
///
/// # Errors
/// What the writer refused.
pub fn write_operation(to: &mut impl Write, operation: &Operation) -> io::Result<()> {
    writeln!(to, "{}", encode::operation(operation))
}

/// Writes operations into a new file, as they are: whether they are a history is for whoever reads it.
///
/// # Errors
/// What the file system refused.
pub fn write(path: &Path, operations: &[Operation]) -> io::Result<()> {
    let mut to = BufWriter::new(File::create(path)?);
    operations.iter().try_for_each(|operation| write_operation(&mut to, operation))?;
    to.flush()
}

fn betrayed(text: &str) -> Result<Workload, ParseError> {
    let (mut workload, mut reads) = (None, false);
    each(text, |_, _, value| {
        workload = decode::hint(&value);
        reads |= matches!(value.get("f"), Some(Edn::Keyword(f)) if f == "read");
        Ok(workload.is_none())
    })?;
    // Nothing but reads of single values: a register that nobody wrote to.
    workload.or(reads.then_some(Workload::Register)).ok_or(ParseError::UnknownWorkload)
}

/// Gives every operation with the byte at which it begins, until `take` says that it has enough.
fn each(
    text: &str,
    mut take: impl FnMut(&Reader<'_>, usize, Edn) -> Result<bool, edn::Error>,
) -> Result<(), edn::Error> {
    let mut reader = Reader::new(text);
    let in_vector = reader.step_into_vector()?;
    loop {
        if in_vector && reader.step_out_of_vector()? {
            return match reader.next_value()? {
                None => Ok(()),
                Some((start, _)) => Err(reader.error_at(start, "more follows after the vector of all operations")),
            };
        }
        match reader.next_value()? {
            Some((start, value)) => {
                if !take(&reader, start, value)? {
                    return Ok(());
                }
            }
            None if in_vector => return Err(reader.error_at(text.len(), "the vector of all operations is not closed")),
            None => return Ok(()),
        }
    }
}
