//! CREATE SCHEMA, ALTER SCHEMA and DROP SCHEMA, with properties.
//!
//! A schema has no other name later: what is in it is filed under its name. DROP SCHEMA ... CASCADE drops a schema with its
//! tables and views in one transaction of the metadata; if that is more than one allows, or with PURGE, by a procedure of the cluster's
//! leader. A schema with others nested in it is dropped by neither.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Instant;

use datafusion::sql::sqlparser::ast::ObjectName;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::Token;
use lake_client::catalog::{CatalogError, Namespace};
use lake_client::procedures::drop_namespace::{DROP, NamespaceDrop, RESTORE};
use lake_client::procedures::{Procedure, State};
use lake_client::store;

use super::alter;
use super::catalog::{INFORMATION_SCHEMA, namespace};
use super::clauses::begins_with;
use super::statement::{Command, normalize, refused};
use super::{CATALOG, DEFAULT_SCHEMA};
use crate::error::{Error, Position, Result};
use crate::outcomes::now_ms;
use crate::table::{Tables, catalog_error};

/// A statement about a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchemaStatement {
    Create { name: Namespace, if_not_exists: bool, properties: BTreeMap<String, String> },
    Alter { name: Namespace, if_exists: bool, set: BTreeMap<String, String>, unset: BTreeSet<String> },
    Drop { name: Namespace, if_exists: bool, cascade: bool, purge: bool },
}

impl SchemaStatement {
    pub fn command(&self) -> Command {
        match self {
            SchemaStatement::Create { .. } => Command::CreateSchema,
            SchemaStatement::Alter { .. } => Command::AlterSchema,
            SchemaStatement::Drop { .. } => Command::DropSchema,
        }
    }
}

/// The statement about a schema that a text is; `None` if it is another.
///
/// # Errors
/// `Invalid`, with its place; `NotSupported` for what schemas cannot do.
pub fn take(sql: &str) -> Result<Option<SchemaStatement>> {
    if !begins_with(sql, &["CREATE", "ALTER", "DROP"]) {
        return Ok(None);
    }
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(sql) else { return Ok(None) };
    let start = parser.parse_one_of_keywords(&[Keyword::CREATE, Keyword::ALTER, Keyword::DROP]);
    let Some(start) = start.filter(|_| parser.parse_one_of_keywords(&[Keyword::SCHEMA, Keyword::DATABASE]).is_some())
    else {
        return Ok(None);
    };
    let at = parser.peek_token().span.start;
    let taken = match start {
        Keyword::CREATE => create(&mut parser),
        Keyword::ALTER => alter_schema(&mut parser),
        _ => drop_schema(&mut parser),
    };
    let place = Some(Position { line: at.line, column: at.column });
    match taken {
        Ok(Ok(taken)) => Ok(Some(taken)),
        Ok(Err(error)) => Err(error.at(place)),
        Err(error) => Err(Error::from(datafusion::common::DataFusionError::SQL(Box::new(error), None)).at(place)),
    }
}

type Taken = Result<Result<SchemaStatement>, ParserError>;

fn create(parser: &mut Parser<'_>) -> Taken {
    let if_not_exists = parser.parse_keywords(&[Keyword::IF, Keyword::NOT, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    let mut properties = HashMap::new();
    loop {
        if parser.parse_keyword(Keyword::COMMENT) {
            let _ = parser.consume_token(&Token::Eq);
            properties.insert(alter::COMMENT.to_owned(), parser.parse_literal_string()?);
            continue;
        }
        match some_properties(parser)? {
            None => break,
            Some(Ok(more)) => properties.extend(more),
            Some(Err(error)) => return Ok(Err(error)),
        }
    }
    ended(parser)?;
    let properties = properties.into_iter().collect();
    Ok(named(&name).map(|name| SchemaStatement::Create { name, if_not_exists, properties }))
}

fn alter_schema(parser: &mut Parser<'_>) -> Taken {
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    let (mut set, mut unset) = (BTreeMap::new(), BTreeSet::new());
    match parser.expect_one_of_keywords(&[Keyword::SET, Keyword::UNSET, Keyword::RENAME])? {
        Keyword::SET => match some_properties(parser)? {
            None => return parser.expected("TBLPROPERTIES", parser.peek_token()),
            Some(Ok(properties)) => set.extend(properties),
            Some(Err(error)) => return Ok(Err(error)),
        },
        Keyword::UNSET => {
            if parser.parse_one_of_keywords(&PROPERTIES).is_none() && !other_word(parser) {
                return parser.expected("TBLPROPERTIES", parser.peek_token());
            }
            let names =
                parser.parse_parenthesized(|parser| parser.parse_comma_separated(Parser::parse_literal_string))?;
            unset.extend(names);
        }
        _ => {
            return Ok(Err(Error::not_supported(
                "a schema keeps its name, because what is in it is filed under that; nothing was done: CREATE SCHEMA makes another \
                 one, and ALTER TABLE ... RENAME TO moves tables into it",
            )));
        }
    }
    ended(parser)?;
    Ok(named(&name).map(|name| SchemaStatement::Alter { name, if_exists, set, unset }))
}

fn drop_schema(parser: &mut Parser<'_>) -> Taken {
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    let cascade = parser.parse_one_of_keywords(&[Keyword::CASCADE, Keyword::RESTRICT]) == Some(Keyword::CASCADE);
    let purge = parser.parse_keyword(Keyword::PURGE);
    if parser.peek_token().token == Token::Comma {
        return Ok(Err(refused("DROP of several schemas at once")));
    }
    ended(parser)?;
    if purge && !cascade {
        return Ok(Err(refused("DROP SCHEMA ... PURGE without CASCADE")));
    }
    Ok(named(&name).and_then(|name| match cascade && name.to_string() == DEFAULT_SCHEMA {
        true => Err(Error::invalid(format!(
            "{DEFAULT_SCHEMA} is the schema of every name without one, and is not dropped with all that is in it; nothing was done: \
             drop its tables and views by their names"
        ))),
        false => Ok(SchemaStatement::Drop { name, if_exists, cascade, purge }),
    }))
}

const PROPERTIES: [Keyword; 2] = [Keyword::TBLPROPERTIES, Keyword::WITH];

/// `PROPERTIES` and `DBPROPERTIES`, as other engines say.
fn other_word(parser: &mut Parser<'_>) -> bool {
    let is = matches!(parser.peek_token().token, Token::Word(word) if word.quote_style.is_none()
        && ["PROPERTIES", "DBPROPERTIES"].contains(&word.value.to_ascii_uppercase().as_str()));
    if is {
        parser.next_token();
    }
    is
}

fn some_properties(parser: &mut Parser<'_>) -> Result<Option<Result<HashMap<String, String>>>, ParserError> {
    if parser.parse_one_of_keywords(&PROPERTIES).is_none() && !other_word(parser) {
        return Ok(None);
    }
    parser.expect_token(&Token::LParen)?;
    let options = parser.parse_comma_separated(Parser::parse_sql_option)?;
    parser.expect_token(&Token::RParen)?;
    Ok(Some(alter::properties(&options)))
}

fn ended(parser: &mut Parser<'_>) -> Result<(), ParserError> {
    let _ = parser.consume_token(&Token::SemiColon);
    parser.expect_token(&Token::EOF).map(drop)
}

/// The schema that a name means; levels are parts, or within one.
fn named(name: &ObjectName) -> Result<Namespace> {
    let parts: Option<Vec<String>> = name.0.iter().map(|part| part.as_ident().map(normalize)).collect();
    let parts = parts.ok_or_else(|| Error::invalid(format!("{name} is not a name for a schema")))?;
    let parts = match parts.as_slice() {
        [catalog, rest @ ..] if catalog == CATALOG && !rest.is_empty() => rest,
        all => all,
    };
    let joined = parts.join(".");
    if joined == INFORMATION_SCHEMA {
        return Err(Error::invalid(format!("{joined} is the name of a schema that is always there")));
    }
    namespace(&joined)
}

/// Makes the change. Returns how many tables and views were dropped with a schema.
///
/// # Errors
/// `AlreadyExists`, `NotFound`, `Invalid` (not empty), and the metadata's.
pub async fn run(tables: &Tables, statement: SchemaStatement, deadline: Instant) -> Result<u64> {
    let writer = tables.recording()?;
    let (done, doing, missing_is_fine) = match &statement {
        SchemaStatement::Create { name, properties, if_not_exists } => {
            match writer.create_namespace(name, properties.clone(), deadline).await {
                Err(CatalogError::NamespaceExists(_)) if *if_not_exists => return Ok(0),
                done => (done.map(|()| 0), format!("creating schema {name}"), false),
            }
        }
        SchemaStatement::Alter { name, set, unset, if_exists } => {
            let done = writer.update_namespace(name, unset, set, deadline).await;
            (done.map(|_| 0), format!("changing schema {name}"), *if_exists)
        }
        SchemaStatement::Drop { name, if_exists, cascade: false, .. } => {
            let done = writer.drop_namespace(name, deadline).await;
            (done.map(|()| 0), format!("dropping schema {name}"), *if_exists)
        }
        SchemaStatement::Drop { name, if_exists, purge, .. } => {
            let doing = format!("dropping schema {name} and what is in it");
            let in_steps = tables.metadata.runs_procedures();
            let at_once = match *purge && in_steps {
                true => None,
                // The janitor sees to the files.
                false => Some(writer.drop_namespace_and_contents(name, purge.then(now_ms), deadline).await),
            };
            let is_more = matches!(at_once, None | Some(Err(CatalogError::Store(store::Error::Refused { .. }))));
            let done = match at_once {
                Some(done) if !(is_more && in_steps) => done,
                // With PURGE, or of more than one transaction can do.
                _ => match writer.drop_namespace_in_steps(name, *purge, now_ms(), deadline).await {
                    Ok((id, last)) => return dropped(&doing, &id, last),
                    Err(error) => Err(error),
                },
            };
            (done, doing, *if_exists)
        }
    };
    match done {
        Err(CatalogError::NamespaceNotFound(_)) if missing_is_fine => Ok(0),
        done => done.map_err(|e| catalog_error(&doing, e)),
    }
}

/// What the procedure has come to that drops a schema.
fn dropped(doing: &str, id: &str, last: Option<Procedure>) -> Result<u64> {
    let goes_on = |how: &str| {
        Error::unknown(format!(
            "{doing}: procedure {id} {how}, and had not ended by the deadline; system.procedures shows how far it is"
        ))
    };
    let record = last.ok_or_else(|| goes_on("goes on with it"))?.record;
    let dropping = record.data::<NamespaceDrop>().map_err(|why| Error::internal(format!("{doing}: {why}")))?;
    match record.state {
        State::Active if record.step == DROP => Err(goes_on("goes on with it")),
        State::Active if record.step == RESTORE => Err(goes_on("was cancelled and undoes it")),
        State::Active | State::Done => Ok(dropping.dropped),
        state => {
            let NamespaceDrop { dropped, restored, purge, .. } = dropping;
            let ended = format!(
                "{doing}: procedure {id} is {}, {dropped} tables and views were dropped, {restored} of them are there again: {}",
                state.as_str(),
                record.note
            );
            let back = match purge {
                true => "SHOW DROPPED TABLES lists the tables, and UNDROP TABLE has one back while its files are there",
                false => {
                    "files of tables stay, and CALL system.register_table of its newest metadata file has one back"
                }
            };
            Err(match dropped.saturating_sub(restored) {
                0 => Error::conflict(format!("{ended}; nothing of the schema is gone")),
                gone => Error::unknown(format!("{ended}; {gone} stay dropped: SHOW TABLES lists what is left; {back}")),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use lake_client::procedures::drop_namespace::{PURGES, of_namespace};
    use lake_client::procedures::{Record, kept};

    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_drop_that_stays_half_done_does_not_say_that_nothing_was() {
        let told = |state, step: &str, purge, (gone, back)| {
            let (id, record) = of_namespace(&"s".parse().unwrap(), 3, purge, 0);
            let now = NamespaceDrop { dropped: gone, restored: back, ..record.data().unwrap() };
            let record = Record { state, step: step.to_owned(), note: "why".to_owned(), data: kept(&now), ..record };
            dropped("dropping schema s", &id, Some(Procedure { id: id.clone(), mod_revision: 9, record }))
        };
        assert_eq!(dropped("dropping schema s", "p", None).unwrap_err().kind, Kind::Unknown);
        for (step, restored) in [(DROP, 0), (RESTORE, 100)] {
            let goes_on = told(State::Active, step, true, (200, restored)).unwrap_err();
            assert!(goes_on.kind == Kind::Unknown && goes_on.message.contains("system.procedures"), "{goes_on}");
        }
        assert_eq!(told(State::Active, PURGES, true, (200, 0)), Ok(200));
        assert_eq!(told(State::Done, DROP, false, (200, 0)), Ok(200));
        for state in [State::Failed, State::Cancelled, State::Poisoned] {
            let undone = told(state, RESTORE, true, (200, 200)).unwrap_err();
            assert_eq!(undone.kind, Kind::Conflict, "{undone}");
            for (purge, way) in [(true, "UNDROP TABLE"), (false, "system.register_table")] {
                let half = told(state, DROP, purge, (200, 30)).unwrap_err().of_a_change();
                let words = ["170 stay dropped", way, "why"];
                assert!(half.kind == Kind::Unknown && words.iter().all(|w| half.message.contains(w)), "{half}");
                assert!(!half.message.contains("nothing"), "{half}");
            }
        }
    }

    #[test]
    fn statements_about_schemas_are_understood() {
        let name = |name: &str| name.parse::<Namespace>().unwrap();
        let properties = [("a".to_owned(), "b".to_owned()), ("comment".to_owned(), "words".to_owned())];
        for sql in [
            "CREATE SCHEMA IF NOT EXISTS lake.s COMMENT 'words' WITH ('a' = 'b')",
            "create database if not exists S dbproperties ('a' = 'b', 'comment' = 'words');",
        ] {
            let properties = properties.clone().into();
            let expected = SchemaStatement::Create { name: name("s"), if_not_exists: true, properties };
            assert_eq!(take(sql).unwrap(), Some(expected), "{sql}");
        }
        let drop = SchemaStatement::Drop { name: name("a.b"), if_exists: true, cascade: true, purge: false };
        assert_eq!(take("DROP SCHEMA IF EXISTS a.b CASCADE").unwrap(), Some(drop));
        let drop = SchemaStatement::Drop { name: name("a"), if_exists: false, cascade: true, purge: true };
        assert_eq!(take("DROP SCHEMA a CASCADE PURGE").unwrap(), Some(drop));
        let unset = [("x".to_owned())].into();
        let alter = SchemaStatement::Alter { name: name("s"), if_exists: false, set: BTreeMap::new(), unset };
        assert_eq!(take("ALTER SCHEMA s UNSET TBLPROPERTIES ('x')").unwrap(), Some(alter));
        assert_eq!(take("DROP TABLE s").unwrap(), None);
        for (sql, kind) in [
            ("ALTER SCHEMA s RENAME TO t", Kind::NotSupported),
            ("CREATE SCHEMA information_schema", Kind::Invalid),
            ("CREATE SCHEMA s s", Kind::Invalid),
            ("DROP SCHEMA a, b", Kind::NotSupported),
            ("DROP SCHEMA a PURGE", Kind::NotSupported),
            ("DROP SCHEMA default CASCADE", Kind::Invalid),
            ("DROP SCHEMA IF EXISTS lake.\"default\" CASCADE PURGE", Kind::Invalid),
        ] {
            assert_eq!(take(sql).unwrap_err().kind, kind, "{sql}");
        }
    }
}
