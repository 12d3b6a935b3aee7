//! `FOR VERSION AS OF` and `FOR TIMESTAMP AS OF` behind a table's name, and names of listings such as `"t$files"`.
//!
//! The parser does not know these clauses. They are taken out of a statement's text before it is parsed ([`take`]), each
//! replaced in its place, and at its length, by a clause of another database that the parser does know and that means
//! nothing here; and put back after ([`put`]): then they are part of the table's name, which the statement's catalog takes
//! apart again ([`Name`]).

use std::borrow::Cow;
use std::ops::ControlFlow;

use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{Ident, ObjectNamePart, TableAlias, TableFactor, VisitMut, VisitorMut};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};

use super::statement::normalize;
use crate::error::{Error, Position, Result};
use crate::scan::as_of::AsOf;
use crate::scan::listing::Listing;

const VERSION: &str = " FOR VERSION AS OF ";
const TIMESTAMP: &str = " FOR TIMESTAMP AS OF ";

/// What a table's name in a statement's catalog means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name<'a> {
    pub table: &'a str,
    pub listing: Option<Listing>,
    pub as_of: Option<AsOf>,
}

impl<'a> Name<'a> {
    pub fn parse(name: &'a str) -> Self {
        let (name, as_of) = if let Some((name, version)) = name.split_once(VERSION) {
            (name, Some(AsOf::Version(version.to_owned())))
        } else if let Some((name, time)) = name.split_once(TIMESTAMP) {
            (name, Some(AsOf::Timestamp(time.to_owned())))
        } else {
            (name, None)
        };
        let listing = name.rsplit_once('$').and_then(|(table, kind)| Some((table, Listing::named(kind)?)));
        match listing {
            Some((table, listing)) if !table.is_empty() => Self { table, listing: Some(listing), as_of },
            _ => Self { table: name, listing: None, as_of },
        }
    }
}

/// The text without clauses that name earlier versions, and these.
///
/// # Errors
/// `Invalid`, with its place, for a clause that does not name a version.
pub fn take(sql: &str) -> Result<(Cow<'_, str>, Vec<AsOf>)> {
    // What cannot be split into words is an error of the parser's.
    let is_there = sql.to_ascii_uppercase().contains("FOR");
    let Some(tokens) =
        is_there.then(|| Tokenizer::new(&GenericDialect {}, sql).tokenize_with_location().ok()).flatten()
    else {
        return Ok((Cow::Borrowed(sql), Vec::new()));
    };
    let words: Vec<&TokenWithSpan> = tokens.iter().filter(|t| !matches!(t.token, Token::Whitespace(_))).collect();
    let mut chars: Vec<char> = sql.chars().collect();
    let lines = line_starts(&chars);
    let mut found = Vec::new();
    for (index, first) in words.iter().enumerate() {
        let word = |offset: usize| word(words.get(index + offset));
        if (word(0).as_deref(), word(2).as_deref(), word(3).as_deref()) != (Some("FOR"), Some("AS"), Some("OF")) {
            continue;
        }
        let text = |offset: usize| match words.get(index + offset).map(|t| (&t.token, t.span.end)) {
            Some((Token::SingleQuotedString(text), end)) => Some((text.clone(), end)),
            _ => None,
        };
        let number = || match words.get(index + 4).map(|t| (&t.token, t.span.end)) {
            Some((Token::Number(digits, _), end)) => Some((digits.clone(), end)),
            _ => None,
        };
        let at = Position { line: first.span.start.line, column: first.span.start.column };
        let (as_of, end) = match word(1).as_deref() {
            Some("VERSION" | "SYSTEM_VERSION") => {
                let (version, end) = text(4).or_else(number).ok_or_else(|| {
                    let what =
                        "FOR VERSION AS OF takes a snapshot's id, or the name of a branch or tag in single quotes";
                    Error::invalid(what).at(Some(at))
                })?;
                (AsOf::Version(version), end)
            }
            Some("TIMESTAMP" | "SYSTEM_TIME") => {
                let literal = || word(4).filter(|word| word == "TIMESTAMP").and_then(|_| text(5));
                let (time, end) = text(4).or_else(literal).ok_or_else(|| {
                    let what = "FOR TIMESTAMP AS OF takes a time in single quotes, such as '2026-11-30 12:00:00'";
                    Error::invalid(what).at(Some(at))
                })?;
                (AsOf::Timestamp(time), end)
            }
            _ => continue,
        };
        let place = offset(&lines, first.span.start).zip(offset(&lines, end));
        let (start, end) = place.ok_or_else(|| Error::internal("a word of the statement has no place in it"))?;
        let instead = format!("PARTITION(v{})", found.len());
        replace(&mut chars, start, end, &instead);
        found.push(as_of);
    }
    match found.is_empty() {
        true => Ok((Cow::Borrowed(sql), found)),
        false => Ok((Cow::Owned(chars.into_iter().collect()), found)),
    }
}

fn word(token: Option<&&TokenWithSpan>) -> Option<String> {
    match &token?.token {
        Token::Word(word) if word.quote_style.is_none() => Some(word.value.to_ascii_uppercase()),
        _ => None,
    }
}

fn line_starts(chars: &[char]) -> Vec<usize> {
    let after = chars.iter().enumerate().filter(|(_, c)| **c == '\n').map(|(i, _)| i + 1);
    std::iter::once(0).chain(after).collect()
}

fn offset(lines: &[usize], place: Location) -> Option<usize> {
    let line = usize::try_from(place.line.checked_sub(1)?).ok()?;
    Some(lines.get(line)? + usize::try_from(place.column.checked_sub(1)?).ok()?)
}

/// Puts `instead`, which is shorter, where `chars[start..end]` are. Lines stay lines, so that places behind stay right, but
/// for a line that ends among the clause's first words.
fn replace(chars: &mut [char], start: usize, end: usize, instead: &str) {
    for place in chars[start..end].iter_mut().filter(|place| **place != '\n') {
        *place = ' ';
    }
    for (place, c) in chars[start..end].iter_mut().zip(instead.chars()) {
        *place = c;
    }
}

/// Puts what [`take`] took into the names of the tables behind which it stood.
///
/// # Errors
/// `Invalid` if one stood elsewhere.
pub fn put(statement: &mut Parsed, taken: Vec<AsOf>) -> Result<()> {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(explain) => return put(&mut explain.statement, taken),
        _ if taken.is_empty() => return Ok(()),
        _ => return Err(Error::invalid("this statement cannot be about an earlier version of a table")),
    };
    let mut renaming = Renaming { taken, put: 0 };
    if let ControlFlow::Break(error) = statement.visit(&mut renaming) {
        return Err(error);
    }
    match renaming.put == renaming.taken.len() {
        true => Ok(()),
        false => Err(Error::invalid("FOR VERSION AS OF and FOR TIMESTAMP AS OF stand behind the name of a table")),
    }
}

struct Renaming {
    taken: Vec<AsOf>,
    put: usize,
}

impl VisitorMut for Renaming {
    type Break = Error;

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<Error> {
        let TableFactor::Table { name, alias, partitions, .. } = factor else { return ControlFlow::Continue(()) };
        if partitions.is_empty() {
            return ControlFlow::Continue(());
        }
        let number = match partitions.as_slice() {
            [one] => one.value.strip_prefix('v').and_then(|number| number.parse::<usize>().ok()),
            _ => None,
        };
        let (Some(as_of), Some(ObjectNamePart::Identifier(last))) =
            (number.and_then(|number| self.taken.get(number)), name.0.last_mut())
        else {
            return ControlFlow::Break(Error::not_supported("PARTITION (...) behind a table's name is not supported"));
        };
        if alias.is_none() {
            *alias = Some(TableAlias { explicit: true, name: last.clone(), columns: Vec::new(), at: None });
        }
        let value = format!("{} {as_of}", normalize(last));
        *last = Ident { value, quote_style: Some('"'), span: last.span };
        partitions.clear();
        self.put += 1;
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use datafusion::common::TableReference;
    use datafusion::execution::session_state::SessionStateBuilder;

    use super::super::statement;
    use super::*;
    use crate::error::Kind;

    #[test]
    fn versions_are_taken_from_the_text_and_put_into_names() {
        let state = SessionStateBuilder::new_with_default_features().build();
        let sql = "SELECT nope, t.a\n FROM t FOR VERSION AS OF 12 JOIN s.\"U\" FOR\n VERSION AS OF 'a tag' AS u ON true, \
                   w for timestamp as of timestamp '2026-01-01', \"x$files\"";
        let (parsed, _) = statement::parse(&state, sql).unwrap();
        let mut names: Vec<String> =
            state.resolve_table_references(&parsed).unwrap().iter().map(|name| name.table().to_owned()).collect();
        names.sort();
        assert_eq!(
            names,
            ["U FOR VERSION AS OF a tag", "t FOR VERSION AS OF 12", "w FOR TIMESTAMP AS OF 2026-01-01", "x$files"]
        );
        let name = Name::parse("U FOR VERSION AS OF a tag");
        assert_eq!((name.table, name.as_of), ("U", Some(AsOf::Version("a tag".into()))));
        let name = Name::parse("x$files FOR TIMESTAMP AS OF 2026-01-01");
        assert_eq!((name.table, name.listing), ("x", Some(Listing::Files)));
        assert_eq!(Name::parse("x$y").table, "x$y", "an ordinary name");
        let place = statement::position_of(&parsed, &TableReference::bare("t FOR VERSION AS OF 12"));
        assert_eq!(place, Some(Position { line: 2, column: 7 }));
    }

    #[test]
    fn what_names_no_version_is_refused_with_its_place() {
        let state = SessionStateBuilder::new_with_default_features().build();
        for (sql, words) in [
            ("SELECT * FROM t FOR VERSION AS OF now()", "takes a snapshot's id"),
            ("SELECT * FROM t FOR TIMESTAMP AS OF 5", "takes a time"),
            ("SELECT * FROM t PARTITION (p1)", "PARTITION"),
            ("SELECT * FROM (SELECT 1) FOR VERSION AS OF 1", "parse"),
        ] {
            let error = statement::parse(&state, sql).unwrap_err();
            let is_said = error.message.contains(words) || words == "parse";
            assert!(is_said && matches!(error.kind, Kind::Invalid | Kind::NotSupported), "{sql}: {error}");
        }
        let quoted = "SELECT 'FOR VERSION AS OF 5' AS x";
        assert_eq!(take(quoted).unwrap(), (Cow::Borrowed(quoted), Vec::new()));
    }
}
