//! Files named in SQL: `SELECT * FROM '/data/x.parquet'`, `'x.csv'` or `'x.json'`, a glob, a directory, or
//! `s3://bucket/x.parquet`.
//!
//! Inside of the warehouse every file may be read; elsewhere only where the configuration says so, because a query node may be
//! able to read files that its callers should not. The same holds for writing ([`super::copy`]).
//!
//! Every Parquet file's footer is read while planning, one after the other by name, so that a damaged file is an error that
//! names it. Columns and types of CSV and JSON are those of the first rows of each file. JSON is one object a line.
//!
//! What COPY says of a file besides its name ([`FileOptions`]) is part of the name by which the statement's catalog has it
//! ([`named`], [`split`]): no name that is written in SQL holds the character between them.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use datafusion::catalog::TableProvider;
use datafusion::common::TableReference;
use datafusion::datasource::file_format::FileFormat;
use datafusion::datasource::file_format::csv::CsvFormat;
use datafusion::datasource::file_format::json::JsonFormat;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl};
use datafusion::sql::sqlparser::ast::Value;
use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore};
use serde::{Deserialize, Serialize};
use url::Url;

use super::Engine;
use super::statement::refused;
use crate::error::{Error, Kind, Result};
use crate::scan::footer;

/// Most files that one name may stand for.
const MAX_FILES: usize = 10_000;
/// Files looked into at a time, while planning.
const LOOKS_IN_FLIGHT: usize = 8;
/// Between a file's name and what else is said of it.
const SEPARATOR: char = '\u{1f}';

/// What a file is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Parquet,
    Csv,
    Json,
}

/// Which endings of names mean which format, and how CSV's values are separated there.
const ENDINGS: [(&str, Format, Option<u8>); 6] = [
    (".parquet", Format::Parquet, None),
    (".csv", Format::Csv, None),
    (".tsv", Format::Csv, Some(b'\t')),
    (".json", Format::Json, None),
    (".jsonl", Format::Json, None),
    (".ndjson", Format::Json, None),
];

/// Endings of compressed files.
const PACKED: [&str; 6] = [".gz", ".bz2", ".zst", ".xz", ".lz4", ".zip"];

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Parquet => "PARQUET",
            Format::Csv => "CSV",
            Format::Json => "JSON",
        })
    }
}

/// What is known of a file before it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOptions {
    pub format: Format,
    /// Of CSV: whether the first line has the names of columns; it has, unless said otherwise.
    pub header: Option<bool>,
    /// Of CSV: what is between values; a comma, unless said otherwise.
    pub delimiter: Option<u8>,
    pub quote: Option<u8>,
    /// Of CSV: what stands for NULL; nothing at all, unless said otherwise.
    pub null: Option<String>,
    /// Of CSV: every column is read as text.
    #[serde(default)]
    pub as_text: bool,
    /// Of COPY TO: a file that is there already is replaced.
    #[serde(default)]
    pub overwrite: bool,
}

impl FileOptions {
    /// What a name says.
    pub fn of(name: &str) -> Self {
        let name = name.to_ascii_lowercase();
        let ending = ENDINGS.iter().find(|(ending, ..)| name.ends_with(ending));
        let (format, delimiter) =
            ending.map_or((Format::Parquet, None), |(_, format, delimiter)| (*format, *delimiter));
        Self { format, header: None, delimiter, quote: None, null: None, as_text: false, overwrite: false }
    }

    /// Why nothing should be written under this name, whose ending says that something else is in it; `is_said` is whether a format is.
    pub fn misnamed(&self, name: &str, is_said: bool) -> Option<Error> {
        let lower = name.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        let is_packed = PACKED.iter().any(|ending| lower.ends_with(ending));
        if is_packed && (!is_said || self.format != Format::Parquet) {
            return Some(refused(&format!("writing a compressed file but Parquet's own, as {name} is named,")));
        }
        let is_known = ENDINGS.iter().any(|(ending, ..)| lower.ends_with(ending));
        (!is_said && !is_known && lower.contains('.')).then(|| {
            Error::invalid(format!(
                "the ending of {name} says no format that lake writes; nothing was done: add (FORMAT parquet), (FORMAT csv) or (FORMAT \
                 json)"
            ))
        })
    }

    /// # Errors
    /// `Invalid` for a value that cannot be meant; `NotSupported` for an option that there is not.
    pub fn set(&mut self, key: &str, value: Option<String>) -> Result<()> {
        let text = value.clone().unwrap_or_default();
        let byte = || match text.as_bytes() {
            [byte] => Ok(*byte),
            _ => Err(Error::invalid(format!("the option {key} takes one character, not {text:?}"))),
        };
        let flag = || match text.to_ascii_lowercase().as_str() {
            "" | "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(Error::invalid(format!("the option {key} is true or false, not {text:?}"))),
        };
        match key {
            "format" => {
                self.format = match text.to_ascii_lowercase().as_str() {
                    "parquet" => Format::Parquet,
                    "csv" => Format::Csv,
                    "json" | "ndjson" => Format::Json,
                    _ => return Err(refused(&format!("the format {text}"))),
                };
            }
            "header" => self.header = Some(flag()?),
            "overwrite" => self.overwrite = flag()?,
            "delimiter" | "delim" | "sep" => self.delimiter = Some(byte()?),
            "quote" => self.quote = Some(byte()?),
            "null" | "nullstr" => self.null = Some(text),
            other => return Err(refused(&format!("the option {other}"))),
        }
        let of_csv = self.header.is_some() || self.delimiter.is_some() || self.quote.is_some() || self.null.is_some();
        match self.format {
            Format::Parquet | Format::Json if of_csv && !["format", "overwrite"].contains(&key) => {
                Err(Error::invalid(format!("the option {key} is for CSV, and not for {}", self.format)))
            }
            _ => Ok(()),
        }
    }

    /// As DataFusion's COPY takes them.
    ///
    /// # Errors
    /// None today.
    pub fn for_writing(&self) -> Result<Vec<(String, Value)>> {
        let text = |byte: u8| char::from(byte).to_string();
        let options = [
            ("format.has_header", (self.format == Format::Csv).then(|| self.header.unwrap_or(true).to_string())),
            ("format.delimiter", self.delimiter.filter(|_| self.format == Format::Csv).map(text)),
            ("format.quote", self.quote.map(text)),
            ("format.null_value", self.null.clone()),
        ];
        let some = options.into_iter().filter_map(|(key, value)| Some((key, value?)));
        Ok(some.map(|(key, value)| (key.to_owned(), Value::SingleQuotedString(value))).collect())
    }

    fn csv(&self) -> CsvFormat {
        CsvFormat::default()
            .with_has_header(self.header.unwrap_or(true))
            .with_delimiter(self.delimiter.unwrap_or(b','))
            .with_quote(self.quote.unwrap_or(b'"'))
    }
}

/// The name by which a statement's catalog has a file of which more is known.
pub fn named(path: &str, options: &FileOptions) -> String {
    match serde_json::to_string(options) {
        Ok(options) => format!("{path}{SEPARATOR}{options}"),
        Err(_) => path.to_owned(),
    }
}

/// What [`named`] put together.
pub fn split(name: &str) -> (&str, FileOptions) {
    let known = name.split_once(SEPARATOR).and_then(|(path, json)| Some((path, serde_json::from_str(json).ok()?)));
    known.unwrap_or_else(|| (name, FileOptions::of(name)))
}

/// Whether a name in SQL means files. No table's name holds a slash.
pub fn is_file(table: &TableReference) -> bool {
    let name = table.table();
    let lower = name.to_ascii_lowercase();
    matches!(table, TableReference::Bare { .. })
        && (name.contains(['/', SEPARATOR]) || ENDINGS.iter().any(|(ending, ..)| lower.ends_with(ending)))
}

/// Where files are.
pub struct Place {
    listed: ListingTableUrl,
    /// What DataFusion knows the store by.
    pub url: Url,
    pub store: Arc<dyn ObjectStore>,
}

impl Place {
    /// Where it is in its store.
    pub fn path(&self) -> &object_store::path::Path {
        self.listed.prefix()
    }

    /// Whether it is a directory, and not a file.
    pub fn is_directory(&self) -> bool {
        self.listed.is_collection()
    }

    /// Whether what is written here, where nothing is, makes a directory: DataFusion takes a name without an ending for that of one.
    pub fn becomes_directory(&self) -> bool {
        !self.is_directory() && self.listed.file_extension().is_none()
    }

    /// The place that a path names, if this node may read and write there.
    ///
    /// # Errors
    /// `Denied`; `Invalid` for what is no path.
    pub fn of(engine: &Engine, path: &str) -> Result<Self> {
        let listed = parse(path)?;
        let location = location(&listed);
        let storage = &engine.tables().storage;
        if !storage.may_be_named(&location) {
            return Err(Error::denied(format!(
                "{path}: this node reads and writes no files outside of its warehouses; allow_local_files in its configuration \
                 allows it"
            )));
        }
        check_kind(path)?;
        let (url, store) = storage.url_and_store(&location)?;
        Ok(Self { listed, url, store })
    }

    /// The objects that are there, at most so many.
    ///
    /// # Errors
    /// The store's.
    pub async fn objects(&self, most: usize) -> Result<Vec<object_store::path::Path>> {
        let prefix = self.listed.prefix();
        let own = |found: &object_store::path::Path| match self.listed.is_collection() {
            true => found.prefix_matches(prefix),
            false => found == prefix,
        };
        let failed = |e| Error::object_store("listing", prefix.as_ref(), &e);
        if !self.listed.is_collection() {
            use object_store::ObjectStoreExt;
            return match self.store.head(prefix).await {
                Ok(found) => Ok(vec![found.location]),
                Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
                Err(error) => Err(failed(error)),
            };
        }
        let found = self.store.list(Some(prefix)).map_ok(|found| found.location);
        let found = found.try_filter(|found| futures::future::ready(own(found))).take(most);
        found.try_collect().await.map_err(failed)
    }
}

/// The files that `name` stands for, as one table.
pub async fn table(engine: &Engine, name: &str) -> Result<Arc<dyn TableProvider>> {
    let (path, options) = split(name);
    let reading = |e: Error| e.while_doing(format_args!("reading {path}"));
    let place = Place::of(engine, path).map_err(reading)?;
    let state = &engine.template;
    state.runtime_env().register_object_store(&place.url, place.store.clone());
    let ending = match options.format {
        Format::Parquet => ".parquet",
        Format::Csv => ".csv",
        Format::Json => ".json",
    };
    let ending = if place.listed.is_collection() { ending } else { "" };
    let listed: Vec<ObjectMeta> = place
        .listed
        .list_all_files(state, place.store.as_ref(), ending)
        .await
        .map_err(|e| reading(e.into()))?
        .take(MAX_FILES + 1)
        .try_collect()
        .await
        .map_err(|e| reading(e.into()))?;
    if listed.is_empty() {
        return Err(Error::not_found(format!("there are no {} files at {path}", options.format)));
    }
    if listed.len() > MAX_FILES {
        return Err(Error::invalid(format!("{path} stands for more than {MAX_FILES} files")));
    }
    let format: Arc<dyn FileFormat> = match options.format {
        Format::Parquet => Arc::new(ParquetFormat::default()),
        Format::Csv => Arc::new(options.csv()),
        Format::Json => Arc::new(JsonFormat::default()),
    };
    let footers = state.runtime_env().cache_manager.get_file_metadata_cache();
    let kind = options.format;
    let schemas: Vec<Schema> = futures::stream::iter(listed)
        .map(|file| {
            let (format, store, footers) = (&format, &place.store, footers.as_ref());
            async move {
                if options_are_parquet(format) {
                    // With its page index: DataFusion reads what it does not find in the cache, and checks nothing.
                    let read = footer::read(store.as_ref(), &file, footers, true).await;
                    read.map_err(|e| unnamed(path, e))?;
                }
                let schema = format.infer_schema(state, store, std::slice::from_ref(&file)).await;
                schema.map(Arc::unwrap_or_clone).map_err(|e| match options_are_parquet(format) {
                    true => footer::damaged(&file, Error::from(e)),
                    false => unread(&file, kind, &Error::from(e)),
                })
            }
        })
        .buffered(LOOKS_IN_FLIGHT)
        .try_collect()
        .await?;
    let schema = Schema::try_merge(schemas)
        .map_err(|e| Error::invalid(format!("the files at {path} do not have the same columns: {e}")))?;
    let schema = match options.as_text {
        true => as_text(&schema),
        false => schema,
    };
    let options = ListingOptions::new(format).with_file_extension(ending);
    let config = ListingTableConfig::new(place.listed).with_listing_options(options).with_schema(Arc::new(schema));
    Ok(Arc::new(ListingTable::try_new(config)?))
}

/// An error of a file that was read as Parquet as its name says nothing else: which may be all that is wrong with it.
fn unnamed(path: &str, mut error: Error) -> Error {
    let lower = path.to_ascii_lowercase();
    let is_known = ENDINGS.iter().any(|(ending, ..)| lower.ends_with(ending));
    if error.kind != Kind::Corrupt || is_known {
        return error;
    }
    error.message.push_str(match PACKED.iter().any(|ending| lower.ends_with(ending)) {
        true => "; its name says nothing else than Parquet to lake, which reads no compressed CSV or JSON: unpack it first",
        false => {
            "; its name says no format, so it was read as Parquet: CSV has a name that ends in .csv or .tsv, JSON one in .json, \
             .jsonl or .ndjson, and COPY FROM takes (FORMAT csv)"
        }
    });
    error
}

/// An error that says of a file of text that it cannot be understood.
fn unread(file: &ObjectMeta, format: Format, why: &Error) -> Error {
    let hint = match format {
        Format::Json => " (JSON is one object a line)",
        Format::Csv | Format::Parquet => "",
    };
    Error::corrupt(format!("/{} is damaged or not {format}{hint}: {why}", file.location))
}

fn options_are_parquet(format: &Arc<dyn FileFormat>) -> bool {
    format.get_ext() == "parquet"
}

fn as_text(schema: &Schema) -> Schema {
    let fields = schema.fields().iter().map(|field| Field::new(field.name(), DataType::Utf8, true));
    Schema::new(fields.collect::<Vec<_>>())
}

/// A pipe would be waited for, a device has no end, and where a link leads to nothing the link itself would be written over.
fn check_kind(name: &str) -> Result<()> {
    let path = name.strip_prefix("file://").unwrap_or(name);
    let itself = path.trim_end_matches('/');
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => {
            Err(Error::invalid(format!("{name} is neither a file nor a directory")))
        }
        Err(_) if std::fs::symlink_metadata(itself).is_ok_and(|found| found.is_symlink()) => {
            let to = std::fs::read_link(itself).unwrap_or_default();
            Err(Error::invalid(format!(
                "{name} is a symbolic link to {}, which cannot be reached; nothing was read or written: name that place itself, or \
                 remove the link",
                to.display()
            )))
        }
        // What is not there, and what is elsewhere, is found out by reading it.
        _ => Ok(()),
    }
}

/// A directory is one also without the slash at its end.
fn parse(name: &str) -> Result<ListingTableUrl> {
    let path = match name.strip_prefix("file://") {
        Some(path) => Some(path),
        None => (!name.contains("://")).then_some(name),
    };
    let is_dir = !name.ends_with('/') && path.is_some_and(|path| Path::new(path).is_dir());
    let name = if is_dir { format!("{name}/") } else { name.to_owned() };
    Ok(ListingTableUrl::parse(name)?)
}

/// Some location in the store that the files are in.
fn location(url: &ListingTableUrl) -> String {
    match url.scheme() {
        "file" => format!("file:///{}", url.prefix()),
        _ => format!("{}{}", url.object_store().as_str(), url.prefix()),
    }
}
