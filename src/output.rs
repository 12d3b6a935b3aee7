//! What is told on standard output and of errors.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use serde_json::Value;

/// Prints to standard output. Whoever reads it may have seen enough before the end.
///
/// # Errors
/// It cannot be written for other reasons.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("writing to standard output"),
        _ => Ok(()),
    }
}

/// Prints JSON to standard output, as [`print`] does.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// An error with its causes, each told once: many errors tell their cause themselves.
pub fn told(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |told, cause| match cause.to_string() {
        cause if told.contains(&cause) => told,
        cause => format!("{told}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::{fmt, io};

    use super::*;

    #[derive(Debug)]
    struct TellsItsCause(io::Error);

    impl fmt::Display for TellsItsCause {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "reading x: {}", self.0)
        }
    }

    impl Error for TellsItsCause {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn each_cause_is_told_once() {
        let cause = || io::Error::from(ErrorKind::NotFound);
        let error = anyhow::Error::from(TellsItsCause(cause())).context("judging y");
        assert_eq!(told(&error), format!("judging y: reading x: {}", cause()));
        assert_eq!(told(&anyhow::Error::from(cause())), cause().to_string());
    }
}
