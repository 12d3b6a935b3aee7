//! A value, or a document, from the command line, a file or standard input. Never more than its limit.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use lake_proto::limits::MAX_VALUE_BYTES;

/// What stands for standard input where a file is asked for.
const STDIN: &str = "-";

/// Where a value comes from.
#[derive(Debug, Clone, clap::Args)]
pub struct ValueArgs {
    /// The value, byte for byte
    #[arg(required_unless_present = "file", allow_hyphen_values = true)]
    value: Option<OsString>,
    /// Take the value from this file instead, byte for byte; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "value")]
    file: Option<PathBuf>,
}

impl ValueArgs {
    /// The value.
    ///
    /// # Errors
    /// The file cannot be read, or has more bytes than a value can have.
    pub fn read(self) -> Result<Bytes> {
        match (self.value, self.file) {
            (Some(value), _) => Ok(value.into_vec().into()),
            (None, Some(file)) => Ok(read(&file, MAX_VALUE_BYTES, "a value")?.into()),
            (None, None) => bail!("no value is given"),
        }
    }
}

/// All of a file, or of standard input.
///
/// # Errors
/// It cannot be read, or has more than `limit` bytes; `what` says of what that is the limit.
pub fn read(file: &Path, limit: usize, what: &str) -> Result<Vec<u8>> {
    let name = if file == Path::new(STDIN) { "standard input".to_owned() } else { file.display().to_string() };
    let source: Box<dyn Read> = match file == Path::new(STDIN) {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(File::open(file).with_context(|| format!("opening {name}"))?),
    };
    let mut bytes = Vec::new();
    source.take(limit as u64 + 1).read_to_end(&mut bytes).with_context(|| format!("reading {name}"))?;
    if bytes.len() > limit {
        bail!("{name} has more than {limit} bytes, which is the most that {what} may have");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_byte_for_byte_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("value");
        std::fs::write(&file, [0xff, 0, b'\n']).unwrap();
        assert_eq!(read(&file, 3, "a value").unwrap(), [0xff, 0, b'\n']);
        let message = format!("{:#}", read(&file, 2, "a value").unwrap_err());
        assert!(message.contains("value has more than 2 bytes"), "{message}");
        let missing = format!("{:#}", read(&dir.path().join("nothing"), 2, "a value").unwrap_err());
        assert!(missing.contains("nothing"), "{missing}");
    }
}
