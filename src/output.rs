//! What is told on standard output and of errors.

use std::io::{ErrorKind, Write};

use anyhow::Result;
use serde_json::Value;

/// So many of something: `1 table`, `2 tables`.
pub fn counted(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// Prints to standard output. Whoever reads it may have seen enough before the end: what was done stays done.
///
/// # Errors
/// It cannot be written for other reasons.
pub fn print(text: &str) -> Result<()> {
    match stream(text.as_bytes()) {
        Err(error) if is_unread(&error) => Ok(()),
        printed => printed,
    }
}

/// Prints a JSON document over several lines.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// Prints a part of something long, which ends when nobody reads it any more.
///
/// # Errors
/// It cannot be written; [`is_unread`] tells whether that is because nobody reads it.
pub fn stream(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|source| Unprinted { source }.into())
}

/// Standard output does not take what is to be printed.
#[derive(Debug)]
struct Unprinted {
    source: std::io::Error,
}

impl std::fmt::Display for Unprinted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("writing to standard output")
    }
}

impl std::error::Error for Unprinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Whether an error says that standard output did not take something.
pub fn is_unprinted(error: &anyhow::Error) -> bool {
    error.is::<Unprinted>()
}

/// Whether an error says that nobody reads standard output any more.
pub fn is_unread(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Unprinted>().is_some_and(|e| e.source.kind() == ErrorKind::BrokenPipe)
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
