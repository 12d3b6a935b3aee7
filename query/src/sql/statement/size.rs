//! How large a statement's expressions may be.
//!
//! Brackets nest as deep as the parser allows. But a row of operators is a level of a tree for each of them, and such a tree is walked,
//! copied and dropped recursively, here and in DataFusion: where the stack ended, the process would. And where a word of SQL's own stands
//! before a bracket, as in `CAST(`, and what follows cannot be parsed, the parser tries once more with a function of that name: each
//! within another doubles the work. So both are counted before anything is made of them.

use std::collections::HashMap;
use std::ops::ControlFlow;

use datafusion::sql::parser::{CopyToSource, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{Query, TableFactor, Visit, Visitor};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use super::normalize;
use crate::error::{Error, Result};

/// Most operators between commas, those in brackets included; most UNIONs and their like as well.
pub const MAX_OPERATORS: usize = 2_000;
/// Most brackets within each other behind words of SQL's own.
pub const MAX_SPECIAL: usize = 16;
/// Most tables and queries that a statement names or has.
pub const MAX_TABLES: usize = 1_000;

/// # Errors
/// `Invalid`: there are more than [`MAX_OPERATORS`] or [`MAX_SPECIAL`].
pub fn check_text(sql: &str) -> Result<()> {
    // Each operator has a character of its own, and what it stands between, another.
    let brackets = || sql.bytes().filter(|byte| *byte == b'(').count();
    if sql.len() < 2 * MAX_OPERATORS && brackets() <= MAX_SPECIAL {
        return Ok(());
    }
    // What cannot be taken apart is nothing that can be parsed.
    let Ok(tokens) = Tokenizer::new(&GenericDialect {}, sql).tokenize() else { return Ok(()) };
    let mut outer: Vec<Within> = Vec::new();
    let mut within = Within::default();
    // Of a name, or of what is taken out of a value.
    let mut dots = 0;
    let mut special = 0;
    let mut behind_special = false;
    for token in tokens {
        let opens_special = behind_special && token == Token::LParen;
        match &token {
            Token::Whitespace(_) => {}
            Token::Word(word) => behind_special = is_special(word.keyword),
            _ => behind_special = false,
        }
        match &token {
            Token::Period => dots += 1,
            Token::Word(_) | Token::Whitespace(_) => {}
            _ => dots = 0,
        }
        match token {
            Token::LParen | Token::LBrace => {
                special += usize::from(opens_special);
                outer.push(std::mem::replace(&mut within, Within { special: opens_special, ..Within::default() }));
            }
            Token::LBracket => {
                within.operators += 1;
                outer.push(std::mem::take(&mut within));
            }
            Token::RParen | Token::RBracket | Token::RBrace => {
                let inner = within.most();
                special -= usize::from(within.special);
                within = outer.pop().unwrap_or_default();
                within.operators += inner;
            }
            Token::Comma | Token::SemiColon => {
                within.before = within.before.max(within.operators);
                within.operators = 0;
            }
            Token::Word(word) => match word.keyword {
                Keyword::UNION | Keyword::EXCEPT | Keyword::INTERSECT | Keyword::MINUS => within.sets += 1,
                keyword => within.operators += usize::from(is_operator(keyword)),
            },
            Token::Whitespace(_)
            | Token::Number(..)
            | Token::SingleQuotedString(_)
            | Token::DoubleQuotedString(_)
            | Token::HexStringLiteral(_)
            | Token::Placeholder(_)
            | Token::Period
            | Token::EOF => {}
            _ => within.operators += 1,
        }
        if special > MAX_SPECIAL {
            return Err(Error::invalid(format!(
                "the statement has CAST(...), NOT (...), TRIM(...) and the like nested more than {MAX_SPECIAL} deep; nothing was done"
            )));
        }
        if within.most().max(dots) > MAX_OPERATORS {
            return Err(Error::invalid(format!(
                "the statement has more than {MAX_OPERATORS} operators in a row (AND, OR, +, UNION and the like); nothing was done: \
                 IN (...), VALUES or a table takes any number of values"
            )));
        }
    }
    Ok(())
}

/// What was counted between two brackets.
#[derive(Default)]
struct Within {
    /// Since the last comma.
    operators: usize,
    /// Most between two commas before.
    before: usize,
    sets: usize,
    /// Behind a word of SQL's own.
    special: bool,
}

impl Within {
    fn most(&self) -> usize {
        self.before.max(self.operators) + self.sets
    }
}

fn is_operator(keyword: Keyword) -> bool {
    matches!(
        keyword,
        Keyword::AND
            | Keyword::OR
            | Keyword::XOR
            | Keyword::NOT
            | Keyword::IS
            | Keyword::IN
            | Keyword::BETWEEN
            | Keyword::LIKE
            | Keyword::ILIKE
            | Keyword::RLIKE
            | Keyword::REGEXP
            | Keyword::MATCH
            | Keyword::SIMILAR
            | Keyword::MEMBER
            | Keyword::OVERLAPS
            | Keyword::OPERATOR
            | Keyword::DIV
            | Keyword::AT
            | Keyword::COLLATE
            | Keyword::NOTNULL
    )
}

/// Whether the parser tries two ways with what is in brackets behind it.
fn is_special(keyword: Keyword) -> bool {
    matches!(
        keyword,
        Keyword::ARRAY
            | Keyword::CASE
            | Keyword::CAST
            | Keyword::CEIL
            | Keyword::CONVERT
            | Keyword::CURRENT_DATE
            | Keyword::CURRENT_TIME
            | Keyword::CURRENT_TIMESTAMP
            | Keyword::EXISTS
            | Keyword::EXTRACT
            | Keyword::FLOOR
            | Keyword::INTERVAL
            | Keyword::LAMBDA
            | Keyword::LOCALTIME
            | Keyword::LOCALTIMESTAMP
            | Keyword::MATCH
            | Keyword::NOT
            | Keyword::OVERLAY
            | Keyword::POSITION
            | Keyword::SAFE_CAST
            | Keyword::STRUCT
            | Keyword::SUBSTR
            | Keyword::SUBSTRING
            | Keyword::TRIM
            | Keyword::TRY_CAST
            | Keyword::TRY_CONVERT
    )
}

/// # Errors
/// `Invalid`: there are more than [`MAX_TABLES`].
pub fn check_tables(statement: &Parsed) -> Result<()> {
    let mut counted = Tables { of: vec![0], ..Tables::default() };
    let within = match statement {
        Parsed::Statement(statement) => statement.visit(&mut counted),
        Parsed::Explain(explain) => return check_tables(&explain.statement),
        Parsed::CopyTo(copy) => match &copy.source {
            CopyToSource::Query(query) => query.visit(&mut counted),
            CopyToSource::Relation(_) => ControlFlow::Continue(()),
        },
        _ => ControlFlow::Continue(()),
    };
    match within {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::invalid(format!(
            "the statement has more than {MAX_TABLES} tables and queries, where those of WITH count wherever it is named; nothing was \
             done: take it apart, or write a part of it into a table"
        ))),
    }
}

/// Counts tables and queries. A query of WITH is planned once, and then is a part of the plan wherever its name is.
#[derive(Default)]
struct Tables {
    /// How many the queries have in which the visitor is.
    of: Vec<usize>,
    /// Queries of WITH that were not visited yet.
    names: HashMap<*const Query, String>,
    /// How many those have that were.
    with: HashMap<String, usize>,
}

impl Tables {
    fn add(&mut self, count: usize) -> ControlFlow<()> {
        let Some(of) = self.of.last_mut() else { return ControlFlow::Continue(()) };
        *of = of.saturating_add(count);
        match *of > MAX_TABLES {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

impl Visitor for Tables {
    type Break = ();

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        for cte in query.with.iter().flat_map(|with| &with.cte_tables) {
            self.names.insert(std::ptr::from_ref(cte.query.as_ref()), normalize(&cte.alias.name));
        }
        self.of.push(0);
        self.add(1)
    }

    fn post_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        let count = self.of.pop().unwrap_or_default();
        match self.names.remove(&std::ptr::from_ref(query)) {
            None => self.add(count),
            Some(name) => {
                // Of two of one name, the larger: which is meant is not looked at.
                let known = self.with.entry(name).or_default();
                *known = count.max(*known);
                ControlFlow::Continue(())
            }
        }
    }

    fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<()> {
        let count = match table {
            TableFactor::Table { name, .. } => match name.0.as_slice() {
                [part] => part.as_ident().and_then(|name| self.with.get(&normalize(name))).copied(),
                _ => None,
            },
            _ => None,
        };
        self.add(count.unwrap_or(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_counted_where_they_add_up() {
        let many = |part: &str, count: usize| part.repeat(count);
        for sql in [
            format!("SELECT 1{}", many("+1", MAX_OPERATORS)),
            format!("SELECT {}1", many("a=1 OR ", MAX_OPERATORS / 2)),
            format!("INSERT INTO t VALUES (0){}", many(", (1 + 1, - 1)", MAX_OPERATORS)),
            format!("SELECT a IN (0{})", many(", 1", 2 * MAX_OPERATORS)),
            format!("SELECT 1{}", many(" UNION ALL SELECT a + 1, 2", MAX_OPERATORS - 1)),
            format!("SELECT '{}'", many("+1", MAX_OPERATORS + 1)),
            format!("SELECT t.a{}", many(", t.a", MAX_OPERATORS)),
            format!("SELECT {}1{}", many("CAST(", MAX_SPECIAL), many(" AS INT)", MAX_SPECIAL)),
            format!("SELECT TRIM(a){}", many(", TRIM(a)", MAX_SPECIAL)),
        ] {
            check_text(&sql).unwrap_or_else(|error| panic!("{error}: {sql:.60}"));
        }
        for sql in [
            format!("SELECT 1{}", many("+1", MAX_OPERATORS + 1)),
            format!("SELECT {}1", many("a=1 OR ", MAX_OPERATORS / 2 + 1)),
            format!("SELECT f((1{}){})", many("+1", MAX_OPERATORS / 2 + 1), many("+1", MAX_OPERATORS / 2)),
            format!("SELECT (1{}, 2), 3", many("+1", MAX_OPERATORS + 1)),
            format!("SELECT a{}", many("[1]", MAX_OPERATORS + 1)),
            format!("SELECT a[1]{}", many(".a", MAX_OPERATORS + 1)),
            format!("SELECT a{}", many("::int", MAX_OPERATORS + 1)),
            format!("SELECT a{}", many(" IS NULL", MAX_OPERATORS + 1)),
            format!("SELECT 1{}", many(" UNION SELECT 1, 2", MAX_OPERATORS + 1)),
        ] {
            let error = check_text(&sql).unwrap_err();
            assert!(error.message.contains("operators in a row"), "{error}");
        }
        // Parsed, these would not come to an end.
        for word in ["CAST", "not ", "Trim", "substring", "EXISTS /* */"] {
            let error = check_text(&format!("SELECT {}1", many(&format!("{word}("), MAX_SPECIAL + 1))).unwrap_err();
            assert!(error.message.contains("nested more than 16 deep"), "{error}");
        }
    }
}
