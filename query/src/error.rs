//! The one error of the crate: what kind it is (what a caller can do about it), what happened in words, and where in
//! the statement, when that is known.
//!
//! Errors travel: they are raised deep in the storage or commit code, pass through DataFusion wrapped as an external
//! error, are unwrapped again here, and leave the node as a Flight status ([`crate::flight`]).

use std::fmt;

use datafusion::common::{DataFusionError, SchemaError};

use crate::words;

/// A place in a statement, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub line: u64,
    pub column: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl std::str::FromStr for Position {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (line, column) = text.split_once(':').unwrap_or((text, "1"));
        Ok(Position { line: line.parse()?, column: column.parse()? })
    }
}

/// What can be done about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The statement or the configuration is wrong: correct it.
    Invalid,
    /// lake cannot do this yet. Nothing was done.
    NotSupported,
    /// A namespace, table or file does not exist.
    NotFound,
    /// A namespace or table exists already.
    AlreadyExists,
    /// The statement is not allowed here.
    Denied,
    /// Another writer was in the way until the deadline. Nothing was committed: run it again.
    Conflict,
    /// The metadata cluster could not be reached. Nothing was committed: run it again later.
    Unavailable,
    /// Whether the change was committed could not be found out: look before running it again.
    Unknown,
    /// The deadline passed. Nothing was committed.
    Deadline,
    /// A bound of this node is reached (memory, statements, a full disk): try later, or with less.
    Exhausted,
    /// A file is damaged or not what the metadata says it is.
    Corrupt,
    /// Reading or writing objects failed.
    Storage,
    /// The caller went away.
    Cancelled,
    /// A defect of lake.
    Internal,
}

/// Kinds by name. A defect is whatever has none of these.
const KIND_NAMES: [(Kind, &str); 13] = [
    (Kind::Invalid, "invalid"),
    (Kind::NotSupported, "not-supported"),
    (Kind::NotFound, "not-found"),
    (Kind::AlreadyExists, "already-exists"),
    (Kind::Denied, "denied"),
    (Kind::Conflict, "conflict"),
    (Kind::Unavailable, "unavailable"),
    (Kind::Unknown, "unknown-outcome"),
    (Kind::Deadline, "deadline"),
    (Kind::Exhausted, "exhausted"),
    (Kind::Corrupt, "corrupt"),
    (Kind::Storage, "storage"),
    (Kind::Cancelled, "cancelled"),
];

impl Kind {
    /// As it is told to others and kept.
    pub fn as_str(self) -> &'static str {
        KIND_NAMES.iter().find(|(kind, _)| *kind == self).map_or("internal", |(_, name)| name)
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Self {
        KIND_NAMES.iter().find(|(_, known)| *known == name).map_or(Kind::Internal, |(kind, _)| *kind)
    }
}

/// An error with its kind, its words and its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    pub position: Option<Position>,
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! constructors {
    ($($name:ident => $kind:ident),* $(,)?) => {
        $(pub fn $name(message: impl fmt::Display) -> Self {
            Self::new(Kind::$kind, message)
        })*
    };
}

impl Error {
    pub fn new(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), position: None }
    }

    constructors! {
        invalid => Invalid, not_supported => NotSupported, not_found => NotFound, already_exists => AlreadyExists,
        denied => Denied, conflict => Conflict, unavailable => Unavailable, unknown => Unknown, deadline => Deadline,
        exhausted => Exhausted, corrupt => Corrupt, storage => Storage, cancelled => Cancelled, internal => Internal,
    }

    pub fn at(mut self, position: Option<Position>) -> Self {
        self.position = self.position.or(position);
        self
    }

    /// The same error with what was being done in front.
    pub fn while_doing(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// An error that ended a change. Unless the commit has said what it knows, nothing was committed.
    pub fn of_a_change(mut self) -> Self {
        if self.kind != Kind::Unknown && !self.message.contains("committed") {
            self.message.push_str("; nothing was committed");
        }
        self
    }

    /// For passing through DataFusion; [`From<DataFusionError>`] finds it again.
    pub fn into_datafusion(self) -> DataFusionError {
        DataFusionError::External(Box::new(self))
    }

    /// An error of the object store while `doing` something to `location`.
    pub fn object_store(doing: &str, location: &str, error: &object_store::Error) -> Self {
        let mut text = with_sources(error);
        if text.contains(TIMED_OUT) {
            text.push_str(
                "; no answer came in time: s3_request_timeout_ms says how long a request may take, s3_connect_timeout_ms how long \
                 connecting",
            );
        }
        let kind = match error {
            object_store::Error::NotFound { .. } => Kind::NotFound,
            _ if is_disk_full(&text) => Kind::Exhausted,
            _ => Kind::Storage,
        };
        Self::new(kind, format!("{doing} {location}: {text}"))
    }
}

/// What is said of a request to an object store whose time is over.
const TIMED_OUT: &str = "operation timed out";

/// What DataFusion says when spill files take more than they may.
const SPILL_LIMIT: &str = "disk space during the spilling process has exceeded";

/// What is said of a regular expression that is none, or too large.
const REGEX: [&str; 2] = ["regex parse error", "Compiled regex exceeds size limit"];

fn is_disk_full(text: &str) -> bool {
    text.contains("No space left on device") || text.contains("os error 28") || text.contains("Disk quota exceeded")
}

/// An error's words and those of what caused it, each once.
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        source = cause.source();
    }
    text
}

/// What a panic said.
pub fn words_of_panic(panic: &(dyn std::any::Any + Send)) -> &str {
    let words = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    words.unwrap_or("no message")
}

impl From<iceberg::Error> for Error {
    fn from(error: iceberg::Error) -> Self {
        let text = with_sources(&error);
        match error.kind() {
            iceberg::ErrorKind::DataInvalid => Error::corrupt(text),
            iceberg::ErrorKind::FeatureUnsupported => Error::not_supported(text),
            _ if is_disk_full(&text) => Error::exhausted(text),
            _ => Error::storage(text),
        }
    }
}

impl From<DataFusionError> for Error {
    fn from(error: DataFusionError) -> Self {
        let position = error
            .diagnostic()
            .and_then(|diagnostic| diagnostic.span)
            .map(|span| Position { line: span.start.line, column: span.start.column })
            .filter(|position| position.line > 0);
        if let Some(ours) = find_ours(&error) {
            return ours.clone().at(position);
        }
        let message = error.strip_backtrace();
        classify(&error, &message).at(position)
    }
}

/// Our own error, if one caused this.
fn find_ours(error: &DataFusionError) -> Option<&Error> {
    let mut current: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = current {
        if let Some(ours) = cause.downcast_ref::<Error>() {
            return Some(ours);
        }
        let inner = match cause.downcast_ref::<DataFusionError>() {
            Some(DataFusionError::External(inner)) => Some(inner.as_ref() as &(dyn std::error::Error + 'static)),
            Some(DataFusionError::Shared(inner)) => Some(inner.as_ref() as &(dyn std::error::Error + 'static)),
            Some(DataFusionError::ArrowError(inner, _)) => match inner.as_ref() {
                arrow::error::ArrowError::ExternalError(inner) => {
                    Some(inner.as_ref() as &(dyn std::error::Error + 'static))
                }
                other => Some(other as &(dyn std::error::Error + 'static)),
            },
            _ => None,
        };
        current = inner.or_else(|| cause.source());
    }
    None
}

fn classify(error: &DataFusionError, message: &str) -> Error {
    if message.contains(SPILL_LIMIT) {
        return Error::exhausted(
            "the statement's spill files need more room than spill_limit_bytes allows; raise it or ask for less",
        );
    }
    match error {
        DataFusionError::Diagnostic(_, inner) | DataFusionError::Context(_, inner) => classify(inner, message),
        DataFusionError::Shared(inner) => classify(inner, message),
        DataFusionError::Collection(errors) => match errors.first() {
            Some(first) => classify(first, &first.strip_backtrace()),
            None => Error::internal(message),
        },
        DataFusionError::SQL(error, _) => {
            let text = error.to_string();
            let text = text.trim_start_matches("sql parser error: ");
            let (text, position) = split_position(text);
            Error::invalid(format!("syntax error: {text}")).at(position)
        }
        DataFusionError::SchemaError(schema, _) => match schema.as_ref() {
            SchemaError::FieldNotFound { field, valid_fields } => {
                Error::not_found(words::unknown_column(field, valid_fields))
            }
            SchemaError::AmbiguousReference { field } if field.relation.is_none() => {
                Error::invalid(words::ambiguous(field))
            }
            _ => Error::invalid(tidy(message)),
        },
        DataFusionError::Plan(_) => Error::invalid(words::of(message).unwrap_or_else(|| tidy(message))),
        DataFusionError::Configuration(_) => Error::invalid(tidy(message)),
        DataFusionError::NotImplemented(_) => {
            Error::not_supported(tidy(message).replacen("This feature is not implemented: ", "not supported yet: ", 1))
        }
        DataFusionError::ResourcesExhausted(_) => {
            Error::exhausted(format!("{}; raise memory_limit_bytes or ask for less", tidy(message)))
        }
        DataFusionError::ObjectStore(inner) => Error::object_store("reading", "an object", inner),
        DataFusionError::ParquetError(inner) => match unread(inner) {
            Some(error) => Error::object_store("reading", "an object", error),
            None => Error::corrupt(tidy(message)),
        },
        DataFusionError::IoError(_) if is_disk_full(message) => Error::exhausted(tidy(message)),
        DataFusionError::IoError(_) => Error::storage(tidy(message)),
        DataFusionError::ArrowError(inner, _) => match inner.as_ref() {
            arrow::error::ArrowError::ParquetError(_) => Error::corrupt(tidy(message)),
            _ => Error::invalid(tidy(message)),
        },
        DataFusionError::External(_) if REGEX.iter().any(|said| message.contains(said)) => {
            Error::invalid(tidy(message))
        }
        DataFusionError::Execution(_) => Error::invalid(words::of(message).unwrap_or_else(|| tidy(message))),
        _ => Error::internal(tidy(message)),
    }
}

/// What the store said, if a file could not be read and is there: that says nothing of what is in it.
fn unread<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a object_store::Error> {
    let mut current = Some(error);
    while let Some(cause) = current {
        if let Some(error) = cause.downcast_ref::<object_store::Error>() {
            return Some(error).filter(|error| !matches!(error, object_store::Error::NotFound { .. }));
        }
        current = cause.source();
    }
    None
}

/// Without the names of DataFusion's own error classes.
fn tidy(message: &str) -> String {
    // What was being done, as its own words name it, and then the error.
    let mut text = message.rsplit_once("\ncaused by\n").map_or(message, |(_, cause)| cause);
    for prefix in [
        "Error during planning: ",
        "Schema error: ",
        "Execution error: ",
        "External error: ",
        "Arrow error: ",
        "Optimizer rule 'type_coercion' failed",
        "caused by",
        "type_coercion",
    ] {
        text = text.trim_start();
        text = text.strip_prefix(prefix).unwrap_or(text);
    }
    text.trim().to_string()
}

/// Takes ` at Line: 3, Column: 7` off the end of a parser's message.
fn split_position(text: &str) -> (String, Option<Position>) {
    let Some((head, tail)) = text.rsplit_once(" at Line: ") else { return (text.to_string(), None) };
    let mut numbers =
        tail.split(", Column: ").map(|part| part.trim_matches(|c: char| !c.is_ascii_digit()).parse().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(line), Some(column)) => (head.to_string(), Some(Position { line, column })),
        _ => (text.to_string(), None),
    }
}

#[cfg(test)]
mod tests {
    use datafusion::parquet::errors::ParquetError;

    use super::*;

    #[test]
    fn a_file_that_could_not_be_read_is_not_damaged() {
        let generic = object_store::Error::Generic { store: "S3", source: "connection reset".into() };
        let gone = object_store::Error::NotFound { path: "a.parquet".to_owned(), source: "404".into() };
        for (error, kind) in [(generic, Kind::Storage), (gone, Kind::Corrupt)] {
            let error = Error::from(DataFusionError::from(ParquetError::External(Box::new(error))));
            assert_eq!(error.kind, kind, "{error}");
        }
        let damaged = Error::from(DataFusionError::from(ParquetError::General("no magic".to_owned())));
        assert_eq!(damaged.kind, Kind::Corrupt, "{damaged}");
    }

    #[test]
    fn our_error_survives_datafusion() {
        let ours = Error::conflict("another writer").at(Some(Position { line: 2, column: 3 }));
        let wrapped = DataFusionError::Context("running".into(), Box::new(ours.clone().into_datafusion()));
        assert_eq!(Error::from(wrapped), ours);
        let arrow = arrow::error::ArrowError::ExternalError(Box::new(ours.clone().into_datafusion()));
        assert_eq!(Error::from(DataFusionError::ArrowError(Box::new(arrow), None)), ours);
    }

    #[test]
    fn the_place_is_taken_off_a_syntax_error() {
        let (text, position) = split_position("Expected: an expression, found: FROM at Line: 3, Column: 17");
        assert_eq!(text, "Expected: an expression, found: FROM");
        assert_eq!(position, Some(Position { line: 3, column: 17 }));
        assert_eq!(split_position("odd at Line: x").1, None);
    }

    #[test]
    fn the_names_of_datafusions_own_parts_are_left_out() {
        let said = "Optimizer rule 'simplify_expressions' failed\ncaused by\nArrow error: Cast error: Cannot cast string 'abc'";
        assert_eq!(tidy(said), "Cast error: Cannot cast string 'abc'");
    }
}
