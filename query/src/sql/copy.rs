//! COPY: rows of a file into a table, and of a table or a query into a file.
//!
//! `COPY t FROM 'file'` is an INSERT: columns of Parquet and JSON go by name, those of CSV in order; what is written in CSV is
//! text, and is read as the column's type. `COPY t TO 'file'` writes a file that is not there yet, unless it is to be replaced, or
//! into a directory that has none, as which a name without an ending counts; what a failed one has written is removed. What is written has no field ids: columns of tables have
//! some, computed ones none, and to whoever reads the file they would be those of another table.
//!
//! Which files may be read and written: [`files`].

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::{SchemaRef, UInt64Type};
use datafusion::common::DFSchema;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{LogicalPlan, Projection};
use datafusion::sql::parser::{CopyToSource, CopyToStatement, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{Ident, ObjectName, Statement};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::{Token, TokenWithSpan};
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::Engine;
use super::clauses::{begins_with, blank, offset};
use super::computing;
use super::files::{self, FileOptions, Format};
use super::statement::refused;
use crate::error::{Error, Kind, Position, Result};
use crate::table::types;

/// The largest object that S3 copies at once.
const COPIED_WHOLE: u64 = 5 << 30;
/// A larger one comes through this node in such parts, two of them in memory; and goes in no more than the 10,000 that an upload may
/// have, since it was written in smaller ones.
const PART: u64 = 16 << 20;

/// COPY t FROM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyFrom {
    table: ObjectName,
    columns: Vec<Ident>,
    /// The files, as a table's name.
    source: String,
    by_name: bool,
}

/// COPY ... TO, but for its query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyTo {
    target: String,
    options: FileOptions,
}

/// A COPY, as it was taken from a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Copy {
    From(CopyFrom),
    /// With the query's text, each word in its place.
    To(CopyTo, String),
}

/// The COPY that a text is; `None` if it is another statement.
///
/// # Errors
/// `Invalid`, with its place; `NotSupported` for options that lake does not have.
pub fn take(sql: &str) -> Result<Option<Copy>> {
    if !begins_with(sql, &["COPY"]) {
        return Ok(None);
    }
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(sql) else { return Ok(None) };
    parser.next_token();
    let at = parser.peek_token().span.start;
    match copy(&mut parser, sql) {
        Ok(taken) => taken.map(Some),
        Err(error) => {
            let error = Error::from(datafusion::common::DataFusionError::SQL(Box::new(error), None));
            Err(error.at(Some(Position { line: at.line, column: at.column })))
        }
    }
}

fn copy(parser: &mut Parser<'_>, sql: &str) -> Result<Result<Copy>, ParserError> {
    if parser.peek_token().token == Token::LParen {
        let query = inner(parser, sql)?;
        parser.expect_keyword(Keyword::TO)?;
        return Ok(target(parser)?.map(|to| Copy::To(to, query)));
    }
    let table = parser.parse_object_name(false)?;
    let mut columns = Vec::new();
    if parser.consume_token(&Token::LParen) {
        columns = parser.parse_comma_separated(Parser::parse_identifier)?;
        parser.expect_token(&Token::RParen)?;
    }
    if parser.parse_keyword(Keyword::TO) {
        let names: Vec<String> = columns.iter().map(ToString::to_string).collect();
        let names = if names.is_empty() { "*".to_owned() } else { names.join(", ") };
        return Ok(target(parser)?.map(|to| Copy::To(to, format!("SELECT {names} FROM {table}"))));
    }
    parser.expect_keyword(Keyword::FROM)?;
    let (path, options, _) = match file(parser)? {
        Ok(file) => file,
        Err(error) => return Ok(Err(error)),
    };
    if options.overwrite {
        return Ok(Err(Error::invalid(
            "the option overwrite is for COPY TO; INSERT OVERWRITE replaces the rows of a table",
        )));
    }
    let by_name = options.format != Format::Csv;
    let options = FileOptions { as_text: !by_name, ..options };
    Ok(Ok(Copy::From(CopyFrom { table, columns, source: files::named(&path, &options), by_name })))
}

/// The text in parentheses that comes next, with all before it blanked.
fn inner(parser: &mut Parser<'_>, sql: &str) -> Result<String, ParserError> {
    let start = offset(sql, parser.next_token().span.end);
    let mut depth = 1;
    loop {
        let token = parser.next_token();
        match token.token {
            Token::LParen => depth += 1,
            Token::RParen => depth -= 1,
            Token::EOF => return parser.expected("the end of the query", token),
            _ => {}
        }
        if depth == 0 {
            let mut text = sql[..offset(sql, token.span.start)].to_owned();
            blank(&mut text, 0..start);
            return Ok(text);
        }
    }
}

fn target(parser: &mut Parser<'_>) -> Result<Result<CopyTo>, ParserError> {
    Ok(file(parser)?.and_then(|(target, options, is_said)| match options.misnamed(&target, is_said) {
        Some(error) => Err(error),
        None => Ok(CopyTo { target, options }),
    }))
}

/// A path and options, up to the end, and whether they say a format.
fn file(parser: &mut Parser<'_>) -> Result<Result<(String, FileOptions, bool)>, ParserError> {
    let path = match parser.next_token() {
        TokenWithSpan { token: Token::SingleQuotedString(path), .. } => path,
        other => return parser.expected("a path in single quotes", other),
    };
    let mut options = FileOptions::of(&path);
    let mut is_said = parser.parse_keywords(&[Keyword::STORED, Keyword::AS]);
    if is_said {
        let format = parser.parse_identifier()?.value;
        if let Err(error) = options.set("format", Some(format)) {
            return Ok(Err(error));
        }
    }
    let _ = parser.parse_one_of_keywords(&[Keyword::WITH, Keyword::OPTIONS]);
    if parser.consume_token(&Token::LParen) {
        let set = parser.parse_comma_separated(|parser| {
            let key = match parser.next_token().token {
                Token::Word(word) => word.value,
                Token::SingleQuotedString(text) => text,
                other => return Err(ParserError::ParserError(format!("{other} is no option"))),
            };
            let _ = parser.consume_token(&Token::Eq);
            let value = match parser.peek_token().token {
                Token::Comma | Token::RParen => None,
                _ => Some(match parser.next_token().token {
                    Token::SingleQuotedString(text) => text,
                    Token::Word(word) => word.value,
                    other => return Err(ParserError::ParserError(format!("{other} is no value of an option"))),
                }),
            };
            Ok((key, value))
        })?;
        parser.expect_token(&Token::RParen)?;
        for (key, value) in set {
            is_said |= key.eq_ignore_ascii_case("format");
            if let Err(error) = options.set(&key.to_ascii_lowercase(), value) {
                return Ok(Err(error));
            }
        }
    }
    let _ = parser.consume_token(&Token::SemiColon);
    parser.expect_token(&Token::EOF)?;
    Ok(Ok((path, options, is_said)))
}

impl CopyFrom {
    /// The files, as a table's name.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// As the INSERT that it is, of a file with these columns; before they are known, of all.
    pub fn insert(&self, columns: Option<&SchemaRef>) -> String {
        let source = Ident::with_quote('"', &self.source);
        let quote = |name: &str| Ident::with_quote('"', name).to_string();
        let own: Vec<String> = match (columns, self.columns.as_slice()) {
            (Some(columns), []) if self.by_name => columns.fields().iter().map(|field| quote(field.name())).collect(),
            _ => self.columns.iter().map(ToString::to_string).collect(),
        };
        let into = if own.is_empty() { String::new() } else { format!(" ({})", own.join(", ")) };
        let null = files::split(&self.source).1.null;
        let select = match (columns, null) {
            // All of it is text, and the reader takes nothing but an empty value for NULL.
            (Some(columns), Some(null)) if !self.by_name => {
                let null = null.replace('\'', "''");
                let names = columns.fields().iter().map(|field| quote(field.name()));
                names.map(|name| format!("nullif({name}, '{null}') AS {name}")).collect::<Vec<_>>().join(", ")
            }
            _ if self.by_name && !own.is_empty() => own.join(", "),
            _ => "*".to_owned(),
        };
        format!("INSERT INTO {}{into} SELECT {select} FROM {source} AS copied", self.table)
    }
}

impl CopyTo {
    /// Whether a file that is there already is to be replaced.
    pub fn overwrites(&self) -> bool {
        self.options.overwrite
    }

    /// The statement, as DataFusion has it.
    ///
    /// # Errors
    /// `Invalid` if what is to be copied is no query; `NotSupported`.
    pub fn statement(&self, query: Parsed) -> Result<Parsed> {
        let Parsed::Statement(statement) = query else { return Err(refused("COPY of EXPLAIN")) };
        let Statement::Query(query) = *statement else {
            return Err(Error::invalid("COPY writes the rows of a query or of a table"));
        };
        Ok(Parsed::CopyTo(CopyToStatement {
            source: CopyToSource::Query(query),
            target: self.target.clone(),
            partitioned_by: Vec::new(),
            stored_as: Some(self.options.format.to_string()),
            options: self.options.for_writing()?,
        }))
    }
}

/// Writes the file. Returns how many rows. `overwrite`: one that is there already is replaced.
///
/// # Errors
/// `Denied`; `AlreadyExists`; those of the query, and of the store.
pub async fn run(
    engine: &Engine,
    state: &SessionState,
    plan: &LogicalPlan,
    overwrite: bool,
    deadline: Instant,
) -> Result<u64> {
    let LogicalPlan::Copy(copy) = plan else { return Err(Error::internal("COPY was planned as something else")) };
    let mut columns = copy.input.schema().fields().iter();
    let nested = columns.find(|column| column.data_type().is_nested());
    if let Some(column) = nested.filter(|_| copy.file_type.get_ext() == "csv") {
        return Err(Error::not_supported(format!(
            "CSV has no lists, structs or maps, as column {} is one; nothing was written: use FORMAT parquet or json",
            column.name()
        )));
    }
    let doing = format!("writing {}", copy.output_url);
    let mut copy = copy.clone();
    let mut target = files::Place::of(engine, &copy.output_url).map_err(|e| e.while_doing(&doing))?;
    state.runtime_env().register_object_store(&target.url, target.store.clone());
    let mut there = target.objects(1).await.map_err(|e| e.while_doing(&doing))?;
    if there.is_empty() && target.becomes_directory() {
        target = files::Place::of(engine, &format!("{}/", copy.output_url)).map_err(|e| e.while_doing(&doing))?;
        there = target.objects(1).await.map_err(|e| e.while_doing(&doing))?;
    }
    if target.is_directory() && !copy.output_url.ends_with('/') {
        copy.output_url.push('/');
    }
    let replaces = !there.is_empty();
    if replaces && (!overwrite || target.is_directory()) {
        return Err(Error::already_exists(format!(
            "{doing}: it is there already, and only a file is replaced, where the option overwrite asks for that; nothing was \
             written"
        )));
    }
    // What is replaced stays until all of the new one is written: DataFusion completes the file of a query that fails, too.
    let beside = replaces.then(|| beside(&copy.output_url));
    let place = match &beside {
        None => None,
        Some(path) => {
            copy.output_url = path.clone();
            Some(files::Place::of(engine, path).map_err(|e| e.while_doing(&doing))?)
        }
    };
    let plan = LogicalPlan::Copy(copy);
    let write = async {
        let own = state.clone();
        let part = async move {
            let plan = optimized(&own, &plan)?;
            Ok::<_, Error>(own.query_planner().create_physical_plan(&plan, &own).await?)
        };
        let physical = computing::planning(state, part).await??;
        let batches: Result<Vec<_>, _> = computing::execute(&physical, state.task_ctx())?.try_collect().await;
        let batches = batches.map_err(|e| super::name_files(e.into(), &physical))?;
        let counts = batches.first().and_then(|batch| batch.column(0).as_primitive_opt::<UInt64Type>());
        Ok(counts.filter(|counts| !counts.is_empty()).map_or(0, |counts| counts.value(0)))
    };
    let mut written = tokio::time::timeout_at(deadline.into(), write)
        .await
        .unwrap_or_else(|_| Err(Error::deadline("the rows were not written before the deadline")));
    if let (Ok(_), Some(new)) = (&written, &place) {
        // Not renamed: where that is a copy and a removal, a failed removal would say that nothing was replaced.
        let whole = if target.url.scheme() == "file" { u64::MAX } else { COPIED_WHOLE };
        match put_in_place(&*target.store, new.path(), target.path(), [whole, PART], deadline).await {
            Ok(()) => remove(new).await,
            Err(error) => written = Err(error),
        }
    }
    if written.is_err() {
        // It was not there before: whatever is there now is of this statement.
        remove(place.as_ref().unwrap_or(&target)).await;
    }
    written.map_err(|e: Error| match e.kind {
        Kind::Denied => e,
        _ => e.while_doing(doing),
    })
}

/// The plan as the session optimises it, whose columns have no field ids: the writer takes its schema from the plan that it is above.
/// Only afterwards, because the optimiser would make that schema again.
fn optimized(state: &SessionState, plan: &LogicalPlan) -> Result<LogicalPlan> {
    let LogicalPlan::Copy(mut copy) = state.optimize(plan)? else {
        return Err(Error::internal("COPY was optimised to something else"));
    };
    let schema = copy.input.schema();
    let columns = schema.iter().map(|(of, column)| (of.cloned(), types::without_ids(column))).collect();
    let schema = DFSchema::new_with_metadata(columns, schema.metadata().clone())?;
    let rows = Projection::new_from_schema(copy.input.clone(), Arc::new(schema));
    copy.input = Arc::new(LogicalPlan::Projection(rows));
    Ok(LogicalPlan::Copy(copy))
}

/// Copies an object to where another may be, which stays until all of it is there. One larger than `whole` bytes goes through this
/// node, in parts of `part`.
///
/// # Errors
/// The store's; `Deadline` if parts are left then.
pub async fn put_in_place(
    store: &dyn ObjectStore,
    from: &Path,
    to: &Path,
    [whole, part]: [u64; 2],
    deadline: Instant,
) -> Result<()> {
    let failed =
        |error: object_store::Error| Error::object_store("putting the new file in its place", to.as_ref(), &error);
    let size = store.head(from).await.map_err(failed)?.size;
    if size <= whole {
        return store.copy(from, to).await.map_err(failed);
    }
    let mut upload = store.put_multipart(to).await.map_err(failed)?;
    let mut end = part.min(size);
    let mut read = store.get_range(from, 0..end).await.map_err(failed)?;
    while !read.is_empty() {
        if Instant::now() >= deadline {
            return Err(Error::deadline("the new file was not in its place before the deadline; the old one is there"));
        }
        let start = end;
        end = (start + part).min(size);
        let put = upload.put_part(read.into());
        let next = async {
            match start < end {
                true => store.get_range(from, start..end).await,
                false => Ok(Bytes::new()),
            }
        };
        (_, read) = futures::try_join!(put, next).map_err(failed)?;
    }
    upload.complete().await.map(drop).map_err(failed)
}

/// The place of a new file until it takes that of another: beside it, under a name that no listing shows.
fn beside(path: &str) -> String {
    let at = path.rfind('/').map_or(0, |slash| slash + 1);
    format!("{}.lake-{}-{}", &path[..at], uuid::Uuid::new_v4(), &path[at..])
}

/// Removes what a failed COPY has written.
async fn remove(target: &files::Place) {
    let left = match target.objects(usize::MAX).await {
        Ok(left) => left,
        Err(error) => return tracing::warn!(%error, "what a COPY has written beside could not be found"),
    };
    for path in left {
        if let Err(error) = target.store.delete(&path).await {
            tracing::warn!(%path, %error, "what a COPY has written beside could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::memory::InMemory;

    use super::*;

    #[tokio::test]
    async fn what_is_too_large_to_be_copied_at_once_goes_in_parts() {
        let (store, from, to) = (InMemory::new(), Path::from("new"), Path::from("old"));
        let later = Instant::now() + Duration::from_secs(600);
        for size in [1, 5, 6, 7, 12, 13] {
            let bytes: Vec<u8> = (0..size).collect();
            store.put(&to, "old".into()).await.unwrap();
            store.put(&from, bytes.clone().into()).await.unwrap();
            let late = put_in_place(&store, &from, &to, [0, 6], Instant::now()).await.unwrap_err();
            assert_eq!(late.kind, Kind::Deadline);
            assert_eq!(store.get(&to).await.unwrap().bytes().await.unwrap(), "old", "{size}: it stays");
            put_in_place(&store, &from, &to, [0, 6], later).await.unwrap();
            assert_eq!(store.get(&to).await.unwrap().bytes().await.unwrap(), bytes);
        }
        put_in_place(&store, &from, &to, [13, 6], Instant::now()).await.unwrap();
    }

    #[test]
    fn copies_are_understood() {
        let Some(Copy::From(copy)) = take("COPY s.t (a, \"B\") FROM '/x.csv' (HEADER false, DELIMITER ';')").unwrap()
        else {
            panic!()
        };
        let (path, options) = files::split(copy.source());
        assert_eq!(
            (path, options.header, options.delimiter, options.as_text),
            ("/x.csv", Some(false), Some(b';'), true)
        );
        assert!(copy.insert(None).starts_with("INSERT INTO s.t (a, \"B\") SELECT * FROM \"/x.csv"));
        let Some(Copy::To(to, query)) = take("COPY (SELECT (1) AS x) TO 'y' STORED AS JSON;").unwrap() else {
            panic!()
        };
        assert_eq!((to.target.as_str(), to.options.format, query.trim()), ("y", Format::Json, "SELECT (1) AS x"));
        let Some(Copy::To(_, query)) = take("COPY t (a) TO '/d/y.parquet'").unwrap() else { panic!() };
        assert_eq!(query, "SELECT a FROM t");
        assert_eq!(take("SELECT 'COPY'").unwrap(), None);
        for wrong in [
            "COPY t",
            "COPY t FROM x",
            "COPY (SELECT 1 TO 'x'",
            "COPY t FROM 'x.csv' (NOPE one)",
            "COPY t TO 'x' STORED AS AVRO",
        ] {
            assert!(take(wrong).is_err(), "{wrong}");
        }
    }
}
