//! PARTITIONED BY and SORTED BY of CREATE TABLE, which the parser does not know in the form that they have here.
//!
//! They are taken out of the text, with spaces in their place, so that places in the rest stay what they are.

use std::ops::Range;

use datafusion::sql::sqlparser::ast::{
    Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments, ObjectName, OrderByExpr, Value,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};
use iceberg::spec::Transform;

use super::statement::{check_text, normalize};
use crate::error::{Error, Position, Result};
use crate::table::layout::{Layout, SortColumn};

/// The text without the clauses, and what they say.
///
/// # Errors
/// `Invalid`, with its place, for a clause that cannot be understood.
pub fn take_layout(sql: &str) -> Result<(String, Layout)> {
    let mut layout = Layout::default();
    let mut text = sql.to_owned();
    // What is no SQL at all the parser tells best.
    let Ok(tokens) = Tokenizer::new(&GenericDialect {}, sql).tokenize_with_location() else {
        return Ok((text, layout));
    };
    let tokens: Vec<&TokenWithSpan> =
        tokens.iter().filter(|token| !matches!(token.token, Token::Whitespace(_) | Token::EOF)).collect();
    let is = |i: usize, keyword: Keyword| matches!(tokens.get(i).map(|t| &t.token), Some(Token::Word(w)) if w.keyword == keyword);
    let table = match is(1, Keyword::OR) {
        true => 3,
        false => 1,
    };
    if !is(0, Keyword::CREATE) || !is(table, Keyword::TABLE) {
        return Ok((text, layout));
    }
    let mut depth = 0;
    let mut i = table;
    while i < tokens.len() {
        match &tokens[i].token {
            Token::LParen => depth += 1,
            Token::RParen => depth -= 1,
            Token::Word(word) if depth == 0 && word.quote_style.is_none() => {
                let partitioned = word.value.eq_ignore_ascii_case("partitioned");
                let sorted = word.value.eq_ignore_ascii_case("sorted");
                if word.keyword == Keyword::AS {
                    break;
                }
                if (partitioned || sorted)
                    && is(i + 1, Keyword::BY)
                    && tokens.get(i + 2).is_some_and(|token| token.token == Token::LParen)
                {
                    let close = closing(&tokens, i + 2).ok_or_else(|| at(tokens[i], "the clause has no end".into()))?;
                    let inner = &sql[offset(sql, tokens[i + 2].span.end)..offset(sql, tokens[close].span.start)];
                    let wrong = |e: ParserError| at(tokens[i], e.to_string());
                    match partitioned {
                        true => layout.partition = partition_columns(inner, wrong)?,
                        false => layout.sort = sort_columns(inner, wrong)?,
                    }
                    blank(&mut text, offset(sql, tokens[i].span.start)..offset(sql, tokens[close].span.end));
                    i = close;
                }
            }
            _ => {}
        }
        i += 1;
    }
    Ok((text, layout))
}

/// A table that is to be laid out otherwise from now on: `ALTER TABLE [IF EXISTS] t SET PARTITIONED BY (...)`, or
/// `SET SORTED BY (...)`. What is written already stays as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlterLayout {
    pub table: ObjectName,
    pub if_exists: bool,
    /// One of the two.
    pub layout: Layout,
    pub partition: bool,
}

/// The statement as that; `None` if it is another.
///
/// # Errors
/// `Invalid` for a clause that cannot be understood.
pub fn alter_layout(sql: &str) -> Result<Option<AlterLayout>> {
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(sql) else { return Ok(None) };
    if !parser.parse_keywords(&[Keyword::ALTER, Keyword::TABLE]) {
        return Ok(None);
    }
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let Ok(table) = parser.parse_object_name(false) else { return Ok(None) };
    if !parser.parse_keyword(Keyword::SET) {
        return Ok(None);
    }
    let partition = match parser.next_token().token {
        Token::Word(word) if word.value.eq_ignore_ascii_case("partitioned") => true,
        Token::Word(word) if word.value.eq_ignore_ascii_case("sorted") => false,
        _ => return Ok(None),
    };
    let wrong = |e: ParserError| Error::invalid(format!("how the table is to be laid out cannot be understood: {e}"));
    let mut list = || -> Result<(Vec<Expr>, Vec<OrderByExpr>), ParserError> {
        parser.expect_keyword(Keyword::BY)?;
        parser.expect_token(&Token::LParen)?;
        let mut layout = (Vec::new(), Vec::new());
        if !parser.consume_token(&Token::RParen) {
            match partition {
                true => layout.0 = parser.parse_comma_separated(|parser| parser.parse_expr())?,
                false => layout.1 = parser.parse_comma_separated(|parser| parser.parse_order_by_expr())?,
            }
            parser.expect_token(&Token::RParen)?;
        }
        let _ = parser.consume_token(&Token::SemiColon);
        parser.expect_token(&Token::EOF)?;
        Ok(layout)
    };
    let (columns, order) = list().map_err(wrong)?;
    let partition_columns = columns.iter().map(partition_column).collect::<Result<_>>()?;
    let sort = order.into_iter().map(sort_column).collect::<Result<_>>()?;
    Ok(Some(AlterLayout { table, if_exists, layout: Layout { partition: partition_columns, sort }, partition }))
}

fn at(token: &TokenWithSpan, why: String) -> Error {
    let Location { line, column } = token.span.start;
    Error::invalid(format!("how the table is to be laid out cannot be understood: {why}"))
        .at(Some(Position { line, column }))
}

/// The parenthesis that closes the one at `open`.
fn closing(tokens: &[&TokenWithSpan], open: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.token {
            Token::LParen => depth += 1,
            Token::RParen if depth == 1 => return Some(i),
            Token::RParen => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The byte that a place begins at.
/// Whether the first word of a text is one of these, in capitals: asked before a long text is taken apart.
pub(super) fn begins_with(sql: &str, words: &[&str]) -> bool {
    let mut rest = sql.trim_start();
    loop {
        let comment = match rest.get(..2) {
            Some("--") => rest.find('\n').map(|end| end + 1),
            Some("/*") => rest.find("*/").map(|end| end + 2),
            _ => break,
        };
        rest = comment.and_then(|end| rest.get(end..)).unwrap_or_default().trim_start();
    }
    let first = rest.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
    words.iter().any(|word| first.eq_ignore_ascii_case(word))
}

pub(super) fn offset(sql: &str, place: Location) -> usize {
    let line: usize = sql.split_inclusive('\n').take((place.line as usize).saturating_sub(1)).map(str::len).sum();
    let rest = sql.get(line..).unwrap_or_default();
    line + rest.chars().take((place.column as usize).saturating_sub(1)).map(char::len_utf8).sum::<usize>()
}

pub(super) fn blank(text: &mut String, range: Range<usize>) {
    let blanked: String = text[range.clone()].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect();
    text.replace_range(range, &blanked);
}

fn parse_list<T>(
    text: &str,
    one: for<'a, 'b> fn(&'a mut Parser<'b>) -> Result<T, ParserError>,
) -> Result<Vec<T>, ParserError> {
    let mut parser = Parser::new(&GenericDialect {}).try_with_sql(text)?;
    let parsed = parser.parse_comma_separated(one)?;
    parser.expect_token(&Token::EOF)?;
    Ok(parsed)
}

fn partition_columns(text: &str, wrong: impl Fn(ParserError) -> Error) -> Result<Vec<(String, Transform)>> {
    parse_list(text, |parser| parser.parse_expr()).map_err(wrong)?.iter().map(partition_column).collect()
}

fn partition_column(expr: &Expr) -> Result<(String, Transform)> {
    transformed(expr, "partitioned")
}

/// A column or a part of structs, as the table's schema has it: `s.a`.
fn path(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Identifier(column) => Some(normalize(column)),
        Expr::CompoundIdentifier(parts) => Some(parts.iter().map(normalize).collect::<Vec<_>>().join(".")),
        _ => None,
    }
}

/// What a table is `laid` out by.
fn transformed(expr: &Expr, laid: &str) -> Result<(String, Transform)> {
    let odd = || {
        Error::invalid(format!(
            "a table is {laid} by columns, and bucket(n, c), truncate(n, c), year(c), month(c), day(c) or hour(c), not by {expr}"
        ))
    };
    if let Some(column) = path(expr) {
        return Ok((column, Transform::Identity));
    }
    match expr {
        Expr::Function(Function { name, args: FunctionArguments::List(list), .. }) => {
            let mut column = None;
            let mut number = None;
            for arg in &list.args {
                let FunctionArg::Unnamed(FunctionArgExpr::Expr(arg)) = arg else { return Err(odd()) };
                match arg {
                    arg if column.is_none() && path(arg).is_some() => column = path(arg),
                    Expr::Value(value) if number.is_none() => match &value.value {
                        Value::Number(text, _) => number = Some(text.parse::<u32>().map_err(|_| odd())?),
                        _ => return Err(odd()),
                    },
                    _ => return Err(odd()),
                }
            }
            let column = column.ok_or_else(odd)?;
            let transform = match (name.to_string().to_ascii_lowercase().as_str(), number) {
                ("identity", None) => Transform::Identity,
                ("bucket", Some(n @ 1..)) => Transform::Bucket(n),
                ("truncate", Some(n @ 1..)) => Transform::Truncate(n),
                ("year" | "years", None) => Transform::Year,
                ("month" | "months", None) => Transform::Month,
                ("day" | "days", None) => Transform::Day,
                ("hour" | "hours", None) => Transform::Hour,
                ("void", None) => Transform::Void,
                _ => return Err(odd()),
            };
            Ok((column, transform))
        }
        _ => Err(odd()),
    }
}

/// What rows are sorted by: `a, bucket(16, b) DESC NULLS LAST`.
///
/// # Errors
/// `Invalid` for what is none.
pub fn sort_order(text: &str) -> Result<Vec<SortColumn>> {
    check_text(text)?;
    sort_columns(text, |e| Error::invalid(format!("the order {text:?} cannot be understood: {e}")))
}

fn sort_columns(text: &str, wrong: impl Fn(ParserError) -> Error) -> Result<Vec<SortColumn>> {
    let columns = parse_list(text, |parser| parser.parse_order_by_expr()).map_err(wrong)?;
    columns.into_iter().map(sort_column).collect()
}

fn sort_column(order: OrderByExpr) -> Result<SortColumn> {
    let (name, transform) = transformed(&order.expr, "sorted")?;
    if transform == Transform::Void {
        return Err(Error::invalid(format!("void({name}) is nothing that rows can be sorted by")));
    }
    let descending = order.options.asc == Some(false);
    // As in Iceberg: with the smallest values.
    let nulls_first = order.options.nulls_first.unwrap_or(!descending);
    Ok(SortColumn { name, transform, descending, nulls_first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clauses_are_taken_out_and_places_stay() {
        let sql = "CREATE OR REPLACE TABLE t (a INT, \"partitioned\" INT)\n  PARTITIONED BY (A, bucket(4, b), day(c))\nSORTED BY (a DESC, b) AS SELECT 1";
        let (text, layout) = take_layout(sql).unwrap();
        assert_eq!(text.len(), sql.len());
        assert_eq!(text.find("AS SELECT"), sql.find("AS SELECT"));
        assert!(!text.contains("BY") && text.contains("\"partitioned\" INT"), "{text}");
        let column = |name: &str, transform| (name.to_owned(), transform);
        assert_eq!(
            layout.partition,
            [column("a", Transform::Identity), column("b", Transform::Bucket(4)), column("c", Transform::Day)]
        );
        let order: Vec<_> = layout.sort.iter().map(|c| (c.name.as_str(), c.descending, c.nulls_first)).collect();
        assert_eq!(order, [("a", true, false), ("b", false, true)]);
        let sort = sort_order("bucket(16, s.id) DESC, days(\"At\"), truncate(2, c) NULLS LAST").unwrap();
        let order: Vec<_> = sort.iter().map(|c| (c.name.as_str(), c.transform, c.nulls_first)).collect();
        assert_eq!(
            order,
            [
                ("s.id", Transform::Bucket(16), false),
                ("At", Transform::Day, true),
                ("c", Transform::Truncate(2), false)
            ]
        );
        for wrong in ["a + 1", "void(a)", "bucket(a)", "nothing(a)"] {
            assert!(sort_order(wrong).is_err(), "{wrong}");
        }
        for same in ["SELECT 1", "CREATE TABLE t AS SELECT count(*) OVER (PARTITION BY a) FROM u", "CREATE TABLE 'x"] {
            assert_eq!(take_layout(same).unwrap(), (same.to_owned(), Layout::default()));
        }
        let error = take_layout("CREATE TABLE t (a INT)\nPARTITIONED BY (a + 1)").unwrap_err();
        assert!(error.message.contains("not by a + 1"), "{error}");
        let alter = alter_layout("ALTER TABLE s.t SET PARTITIONED BY (day(a), b);").unwrap().unwrap();
        assert_eq!((alter.table.to_string().as_str(), alter.partition, alter.layout.partition.len()), ("s.t", true, 2));
        let alter = alter_layout("alter table if exists t set sorted by ()").unwrap().unwrap();
        assert!(alter.if_exists && !alter.partition && alter.layout == Layout::default());
        assert_eq!(alter_layout("ALTER TABLE t SET TBLPROPERTIES ('a' = 'b')").unwrap(), None);
        assert!(alter_layout("ALTER TABLE t SET SORTED BY a").is_err());
        for wrong in ["bucket(a)", "bucket(0, a)", "year(3, a)", "", "a b"] {
            assert!(take_layout(&format!("CREATE TABLE t (a INT) PARTITIONED BY ({wrong})")).is_err(), "{wrong}");
        }
    }
}
