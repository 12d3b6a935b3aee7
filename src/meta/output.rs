//! What the commands print: for people, where nothing that is stored can disturb a terminal, and as JSON, where nothing is
//! lost.
//!
//! | stored bytes | for people                                        | JSON                            |
//! |--------------|---------------------------------------------------|---------------------------------|
//! | UTF-8        | as they are; what cannot be seen is escaped        | `"value": "..."`                |
//! | other        | `0x` and hexadecimal digits                       | `"value_base64": "..."`         |
//! | many         | the first of them, and how many there are         | all of them                     |

pub use crate::output::{print, print_json, stream};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lake_client::store::Committed;
use lake_proto::coordination::{Scope, ScopeOwner};
use lake_proto::kv::KeyValue;
use serde_json::{Map, Value, json};

use super::EXIT_NO;
use crate::columns::columns;

/// The longest part of a value that a table shows, in characters.
const SHOWN_CHARS: usize = 80;
/// The last millisecond that has a date of four digits.
const MAX_UNIX_MS: u64 = 253_402_300_799_999;

/// How an answer is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
}

/// The option that says how an answer is printed.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct FormatArgs {
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

impl FormatArgs {
    /// Prints one or the other.
    ///
    /// # Errors
    /// As [`print`].
    pub fn print(self, table: impl FnOnce() -> String, json: impl FnOnce() -> Value) -> Result<()> {
        match self.format {
            Format::Table => print(&table()),
            Format::Json => print_json(&json()),
        }
    }

    /// Prints an answer that is yes or no. Gives the exit code.
    ///
    /// # Errors
    /// As [`print`].
    pub fn answer(self, yes: bool, table: impl FnOnce() -> String, json: impl FnOnce() -> Value) -> Result<u8> {
        self.print(table, json)?;
        Ok(if yes { 0 } else { EXIT_NO })
    }
}

// ---- bytes for people -----------------------------------------------------------------------------------------

/// Text whose invisible characters are escaped.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\'' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    shown
}

/// A value, whole.
pub fn shown(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) => escaped(text),
        Err(_) => hexadecimal(value),
    }
}

/// A value for a table: its beginning, if it is long.
pub fn shortened(value: &[u8]) -> String {
    let text = match std::str::from_utf8(value) {
        Ok(text) => escaped(&text.chars().take(SHOWN_CHARS + 1).collect::<String>()),
        Err(_) => hexadecimal(&value[..value.len().min(SHOWN_CHARS)]),
    };
    if text.chars().count() <= SHOWN_CHARS {
        return text;
    }
    format!("{}... ({} bytes)", text.chars().take(SHOWN_CHARS).collect::<String>(), value.len())
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut digits = "0x".to_owned();
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(digits, "{byte:02x}");
    }
    digits
}

/// What a table shows where there may be nothing.
pub fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

/// A number of bytes.
pub fn size(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => {
            let tenths = (u128::from(bytes) * 10 + u128::from(unit) / 2) / u128::from(unit);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
        None => format!("{bytes} B"),
    }
}

/// A moment of the wall clock, in UTC.
pub fn moment(unix_ms: u64) -> String {
    if unix_ms > MAX_UNIX_MS {
        return format!("{unix_ms} ms after 1970");
    }
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(unix_ms)).to_string()
}

// ---- what is stored -------------------------------------------------------------------------------------------

/// A value, whole, and the name under which it stands in JSON.
pub fn value_json(value: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(value) {
        Ok(text) => ("value", text.to_owned()),
        Err(_) => ("value_base64", STANDARD.encode(value)),
    }
}

/// An entry as JSON.
pub fn entry_json(entry: &KeyValue) -> Value {
    let mut object = Map::new();
    object.insert("key".to_owned(), json!(entry.key));
    let (name, value) = value_json(&entry.value);
    object.insert(name.to_owned(), json!(value));
    object.insert("version".to_owned(), json!(entry.version));
    object.insert("create_revision".to_owned(), json!(entry.create_revision));
    object.insert("mod_revision".to_owned(), json!(entry.mod_revision));
    object.insert("lease".to_owned(), json!(entry.lease));
    Value::Object(object)
}

/// Several of them.
pub fn entries_json(entries: &[KeyValue]) -> Value {
    entries.iter().map(entry_json).collect()
}

/// Bytes out of their base64.
///
/// # Errors
/// It is none.
pub fn from_base64(text: &str) -> Result<Vec<u8>> {
    STANDARD.decode(text).context("not base64")
}

/// Entries with their values, for people.
pub fn entries_table(entries: &[KeyValue]) -> String {
    let mut rows = vec![["KEY", "REVISION", "VERSION", "LEASE", "VALUE"].map(str::to_owned)];
    rows.extend(entries.iter().map(|entry| {
        [
            escaped(&entry.key),
            entry.mod_revision.to_string(),
            entry.version.to_string(),
            or_dash(entry.lease),
            shortened(&entry.value),
        ]
    }));
    columns(rows)
}

/// Who holds a scope, as JSON.
pub fn owner_json(owner: &ScopeOwner) -> Value {
    match owner {
        ScopeOwner::Lease(id) => json!({ "lease": id }),
        ScopeOwner::Procedure(id) => json!({ "procedure": id }),
    }
}

/// A scope as JSON.
pub fn scope_json(scope: &Scope) -> Value {
    json!({
        "path": scope.path,
        "owner": owner_json(&scope.owner),
        "fence": scope.fence,
        "acquired_unix_ms": scope.acquired_unix_ms,
        "acquired": moment(scope.acquired_unix_ms),
    })
}

/// What a transaction did, as JSON, without the results of its operations.
pub fn committed_json(committed: &Committed) -> Map<String, Value> {
    let result = &committed.result;
    let mut object = Map::new();
    object.insert("succeeded".to_owned(), json!(result.succeeded));
    object.insert("revision".to_owned(), json!(result.revision));
    object.insert("resent".to_owned(), json!(committed.resent));
    object.insert("observed".to_owned(), entries_json(&result.observed));
    object.insert("conflicts".to_owned(), result.conflicts.iter().map(scope_json).collect());
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: &[u8]) -> KeyValue {
        KeyValue {
            key: "/kv/a".to_owned(),
            value: value.to_vec().into(),
            version: 2,
            create_revision: 3,
            mod_revision: 4,
            lease: None,
        }
    }

    #[test]
    fn nothing_that_is_stored_reaches_a_terminal_as_a_command() {
        assert_eq!(shown("größe \"x\"".as_bytes()), "größe \"x\"");
        assert_eq!(shown(b"a\n\x1b[2J\t"), "a\\n\\u{1b}[2J\\t");
        assert_eq!(shown("\u{202e}".as_bytes()), "\\u{202e}");
        assert_eq!(shown(&[0xff, 0x00, 0x10]), "0xff0010");
        assert_eq!(escaped("/kv/a\r"), "/kv/a\\r");
    }

    #[test]
    fn long_values_are_cut_and_say_so() {
        assert_eq!(shortened(&[b'x'; 80]), "x".repeat(80));
        assert_eq!(shortened(&[b'x'; 81]), format!("{}... (81 bytes)", "x".repeat(80)));
        assert_eq!(shortened("ü".repeat(100).as_bytes()), format!("{}... (200 bytes)", "ü".repeat(80)));
        let binary = shortened(&[0xfe; 1 << 20]);
        assert!(binary.starts_with("0xfefe") && binary.ends_with("... (1048576 bytes)"), "{binary}");
        assert!(binary.chars().count() < 120);
        // Of four bytes each: what is looked at ends in the middle of none.
        assert!(shortened("🦆".repeat(100).as_bytes()).starts_with("🦆🦆"));
    }

    #[test]
    fn json_keeps_every_byte() {
        assert_eq!(entry_json(&entry(b"text\n"))["value"], "text\n");
        let binary = entry_json(&entry(&[0xff, 0x00]));
        assert_eq!(binary["value"], Value::Null);
        assert_eq!(from_base64(binary["value_base64"].as_str().unwrap()).unwrap(), [0xff, 0x00]);
        assert_eq!(binary["lease"], Value::Null);
        assert!(from_base64("/+").is_err());
    }

    #[test]
    fn sizes_and_moments_are_for_people() {
        assert_eq!([size(0), size(1023), size(1024), size(1536)], ["0 B", "1023 B", "1.0 KiB", "1.5 KiB"]);
        assert_eq!([size(4 << 30), size(u64::MAX)], ["4.0 GiB", "16777216.0 TiB"]);
        assert_eq!(moment(1_796_000_000_000), "2026-11-30T00:53:20Z");
        assert_eq!(moment(u64::MAX), format!("{} ms after 1970", u64::MAX));
    }
}
