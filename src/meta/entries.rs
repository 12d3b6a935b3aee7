//! Entries printed page by page, so that a long listing takes no more memory than a page.
//!
//! As JSON it is one document, written as its parts come: one that ends in an error has no end, and no reader takes it for
//! whole.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::MAX_PAGE_ENTRIES;
use serde_json::{Value, json};

use super::output::{Format, entries_table, entry_json, escaped, or_dash, stream};
use crate::columns::columns;

/// Entries printed unless told otherwise.
const DEFAULT_LIMIT: u64 = 1000;

/// How much of a listing is printed.
#[derive(Debug, Clone, clap::Args)]
pub struct LimitArgs {
    /// Print at most so many entries; 0: all of them
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LIMIT)]
    pub limit: u64,
}

/// How an entry is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Its key and what kind of value it has.
    Key,
    /// All of it.
    Value,
}

/// What was not printed, because that would have been more than the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum More {
    /// What this page, and those behind it, have.
    Page(String),
    /// There may be more under the prefixes.
    Elsewhere,
}

/// A document of entries that is being printed.
#[derive(Debug)]
pub struct Printer {
    format: Format,
    detail: Detail,
    printed: u64,
    revisions: BTreeSet<Revision>,
}

impl Printer {
    /// Begins a document.
    ///
    /// # Errors
    /// Standard output does not take it.
    pub fn begin(format: Format, detail: Detail) -> Result<Self> {
        if format == Format::Json {
            stream(b"{\n  \"entries\": [")?;
        }
        Ok(Self { format, detail, printed: 0, revisions: BTreeSet::new() })
    }

    /// How many entries it has so far.
    pub fn printed(&self) -> u64 {
        self.printed
    }

    /// Prints more entries, read at a revision.
    ///
    /// # Errors
    /// Standard output does not take them.
    pub fn entries(&mut self, revision: Revision, entries: &[KeyValue]) -> Result<()> {
        self.revisions.insert(revision);
        let text: String = match self.format {
            Format::Json => {
                let lines = entries.iter().zip(self.printed..).map(|(entry, n)| {
                    let comma = if n == 0 { "" } else { "," };
                    format!("{comma}\n    {}", self.json(entry))
                });
                lines.collect()
            }
            Format::Table => self.table(entries),
        };
        self.printed += entries.len() as u64;
        stream(text.as_bytes())
    }

    fn json(&self, entry: &KeyValue) -> Value {
        let mut value = entry_json(entry);
        if self.detail == Detail::Key
            && let Some(object) = value.as_object_mut()
        {
            object.retain(|name, _| !name.starts_with("value"));
            object.insert("value_bytes".to_owned(), json!(entry.value.len()));
        }
        value
    }

    fn table(&self, entries: &[KeyValue]) -> String {
        let table = match self.detail {
            Detail::Value => entries_table(entries),
            Detail::Key => keys_table(entries),
        };
        match self.printed {
            0 => table,
            // The heading stands above the first page.
            _ => table.split_once('\n').map(|(_, rows)| rows.to_owned()).unwrap_or_default(),
        }
    }

    /// Ends the document: whether there is more, and the keys that were asked for and are not there.
    ///
    /// # Errors
    /// Standard output does not take it.
    pub fn end(self, more: Option<More>, missing: &[String]) -> Result<()> {
        if self.format == Format::Json {
            let revision = if self.revisions.len() == 1 { self.revisions.first() } else { None };
            let next_page = match &more {
                Some(More::Page(page)) => Some(page),
                Some(More::Elsewhere) | None => None,
            };
            let members = [
                ("revision", json!(revision)),
                ("more", json!(more.is_some())),
                ("next_page", json!(next_page)),
                ("missing", json!(missing)),
            ];
            let members: String = members.iter().map(|(name, value)| format!(",\n  \"{name}\": {value}")).collect();
            let end = if self.printed == 0 { "" } else { "\n  " };
            return stream(format!("{end}]{members}\n}}\n").as_bytes());
        }
        for key in missing {
            eprintln!("lake: there is no key {key:?}");
        }
        match more {
            None => {}
            Some(More::Elsewhere) => eprintln!("lake: there may be more than these {}: raise --limit", self.printed),
            Some(More::Page(page)) => eprintln!(
                "lake: there are more than these {}. For a minute the next ones, of the same revision, are had with \
                 --page {page:?}; all of them with --limit 0",
                self.printed
            ),
        }
        Ok(())
    }
}

fn keys_table(entries: &[KeyValue]) -> String {
    let mut rows = vec![["KEY", "REVISION", "VERSION", "LEASE", "BYTES"].map(str::to_owned)];
    rows.extend(entries.iter().map(|entry| {
        [
            escaped(&entry.key),
            entry.mod_revision.to_string(),
            entry.version.to_string(),
            or_dash(entry.lease),
            entry.value.len().to_string(),
        ]
    }));
    columns(rows)
}

/// Prints what lies under a prefix, from a page on, up to a limit (0: all). Gives the page behind it, if there is more.
///
/// # Errors
/// As every read; SnapshotExpired if the pages are not held any more.
pub async fn print_prefix(
    printer: &mut Printer,
    store: &RemoteStore,
    prefix: &str,
    mut page: Option<String>,
    limit: u64,
    options: ReadOptions,
    deadline: impl Fn() -> Instant,
) -> Result<Option<String>> {
    let mut left = if limit == 0 { u64::MAX } else { limit };
    loop {
        let wanted = left.min(MAX_PAGE_ENTRIES as u64) as u32;
        let read = store.list(prefix, page.as_deref(), wanted, options, deadline()).await?;
        printer.entries(read.revision, &read.value.entries)?;
        left -= (read.value.entries.len() as u64).min(left);
        page = read.value.next;
        if page.is_none() || left == 0 {
            return Ok(page);
        }
    }
}
