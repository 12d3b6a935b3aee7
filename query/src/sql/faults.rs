//! Which expression it was: errors of single rows (division by zero, overflow, a value that is none of a type) come from deep
//! within the execution, without a word of where. The statement's expressions that can fail so are remembered when it is
//! planned, and named when one has: with its place, if there is only one.

use std::ops::ControlFlow;

use datafusion::sql::parser::{CopyToSource, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{
    BinaryOperator, CastKind, Expr, Spanned, Statement, UnaryOperator, Value, ValueWithSpan, visit_expressions,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use crate::error::{Error, Kind, Position};
use crate::words::{self, About};

/// Most expressions of a kind that are told apart.
const MOST: usize = 4;
/// Most expressions whose operators are remembered.
const MOST_OPERATORS: usize = 64;
/// Longest text of an expression that is shown.
const LONGEST: usize = 60;

/// How a row can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Division,
    Overflow,
    Cast,
    /// A regular expression that is none.
    Pattern,
    /// A timestamp with which is not computed.
    Time,
}

const ALL: [Fault; 5] = [Fault::Division, Fault::Overflow, Fault::Cast, Fault::Pattern, Fault::Time];

impl Fault {
    /// What the execution says of it.
    fn of(message: &str) -> Option<Self> {
        let lower = message.to_ascii_lowercase();
        let says = |words: &str| lower.contains(words);
        if says("regular expression") || says("regex ") {
            Some(Fault::Pattern)
        } else if says("date_bin()")
            || (says("timestamp ") && lower.ends_with(" out of range") && !says("is out of range"))
        {
            Some(Fault::Time)
        } else if says("divide by zero") {
            Some(Fault::Division)
        } else if says("overflow") {
            Some(Fault::Overflow)
        } else if ["cannot cast", "can't cast", "error parsing", "too large to store", "is out of range"]
            .into_iter()
            .any(says)
        {
            Some(Fault::Cast)
        } else {
            None
        }
    }

    fn can_be(self, expr: &Expr) -> bool {
        match (self, expr) {
            (Fault::Division, Expr::BinaryOp { op, .. }) => {
                matches!(op, BinaryOperator::Divide | BinaryOperator::Modulo)
            }
            (Fault::Overflow, Expr::BinaryOp { op, .. }) => matches!(
                op,
                BinaryOperator::Plus | BinaryOperator::Minus | BinaryOperator::Multiply | BinaryOperator::Divide
            ),
            (Fault::Overflow, Expr::UnaryOp { op, .. }) => *op == UnaryOperator::Minus,
            (Fault::Cast, Expr::Cast { kind, .. }) => matches!(kind, CastKind::Cast | CastKind::DoubleColon),
            (Fault::Pattern, Expr::Function(function)) => {
                function.name.to_string().to_ascii_lowercase().starts_with("regexp_")
            }
            (Fault::Pattern, Expr::BinaryOp { op, .. }) => matches!(
                op,
                BinaryOperator::PGRegexMatch
                    | BinaryOperator::PGRegexIMatch
                    | BinaryOperator::PGRegexNotMatch
                    | BinaryOperator::PGRegexNotIMatch
            ),
            (Fault::Pattern, Expr::SimilarTo { .. } | Expr::RLike { .. }) => true,
            (Fault::Time, Expr::Function(function)) => {
                function.name.to_string().to_ascii_lowercase().starts_with("date_")
            }
            _ => false,
        }
    }
}

/// The expressions of a statement that can fail for a row.
#[derive(Debug, Default)]
pub struct Faults {
    known: Vec<(Fault, String, Option<Position>)>,
    /// The table whose columns' types values are cast to.
    target: Option<String>,
    /// Operators that may not take what is on their sides, with all of the expression.
    operators: Vec<(String, String, Option<Position>)>,
    /// Comparisons with texts that are written out, which may have to be something else, with these texts.
    compared: Vec<(Vec<String>, String, Option<Position>)>,
    /// The statement's text.
    sql: String,
}

impl Faults {
    pub fn of(statement: &Parsed, sql: &str) -> Self {
        let mut faults = Self { sql: sql.to_owned(), ..Self::default() };
        let visit = |expr: &Expr| {
            if let Expr::BinaryOp { op, .. } = expr {
                faults.add_operator(op, expr);
            }
            let texts = texts_compared(expr);
            if !texts.is_empty() && faults.compared.len() < MOST_OPERATORS {
                let (text, place) = shown(expr);
                faults.compared.push((texts, text, place));
            }
            for fault in ALL {
                if fault.can_be(expr) {
                    faults.add(fault, expr);
                }
            }
            ControlFlow::<()>::Continue(())
        };
        // Every expression is visited: nothing breaks off.
        let _ = match statement {
            Parsed::Statement(statement) => visit_expressions(statement.as_ref(), visit),
            Parsed::CopyTo(copy) => match &copy.source {
                CopyToSource::Query(query) => visit_expressions(query.as_ref(), visit),
                CopyToSource::Relation(_) => ControlFlow::Continue(()),
            },
            _ => ControlFlow::Continue(()),
        };
        if let Parsed::Statement(statement) = statement {
            faults.target = match statement.as_ref() {
                Statement::Insert(insert) => Some(insert.table.to_string()),
                Statement::Update(update) => Some(update.table.relation.to_string()),
                Statement::Merge(merge) => Some(merge.table.to_string()),
                _ => None,
            };
        }
        faults
    }

    fn add(&mut self, fault: Fault, expr: &Expr) {
        if self.known.iter().filter(|(other, ..)| *other == fault).count() > MOST {
            return;
        }
        let (text, place) = shown(expr);
        self.known.push((fault, text, place));
    }

    fn add_operator(&mut self, op: &BinaryOperator, expr: &Expr) {
        let op = match op {
            BinaryOperator::NotEq => "!=".to_owned(),
            other => other.to_string(),
        };
        let same = self.operators.iter().filter(|(other, ..)| *other == op).count();
        if same <= MOST && self.operators.len() < MOST_OPERATORS {
            let (text, place) = shown(expr);
            self.operators.push((op, text, place));
        }
    }

    /// The error, with the place of what it names.
    fn place(&self, error: Error) -> Error {
        if error.position.is_some() {
            return error;
        }
        let op = match words::about(&error.message) {
            Some(About::Name(name)) => {
                let place = place_of(&self.sql, name);
                return error.at(place);
            }
            Some(About::Operator(op)) => op,
            None => return error,
        };
        let candidates: Vec<_> = self.operators.iter().filter(|(other, ..)| other == op).collect();
        let (message, place) = match candidates.as_slice() {
            [(_, text, place)] => (format!("{} (in {text})", error.message), *place),
            some if !some.is_empty() && some.len() <= MOST => {
                let texts: Vec<&str> = some.iter().map(|(_, text, _)| text.as_str()).collect();
                (format!("{} (in one of: {})", error.message, texts.join("; ")), None)
            }
            _ => return error,
        };
        Error { message, ..error }.at(place)
    }

    /// The error, with what it is about.
    pub fn explain(&self, error: Error) -> Error {
        let error = self.place(error);
        let fault = match error.kind {
            Kind::Invalid => Fault::of(&error.message),
            _ => None,
        };
        let Some(fault) = fault else { return error };
        let known = self.known.iter().filter(|(other, ..)| *other == fault);
        let mut known: Vec<(&str, Option<Position>)> = known.map(|(_, text, place)| (text.as_str(), *place)).collect();
        let is_named = |text: &String| error.message.contains(&format!("'{text}'"));
        let compared = self.compared.iter().filter(|(texts, ..)| fault == Fault::Cast && texts.iter().any(is_named));
        let compared: Vec<(&str, Option<Position>)> =
            compared.map(|(_, text, place)| (text.as_str(), *place)).take(MOST + 1).collect();
        let assigned = match (fault, &self.target) {
            (Fault::Cast, Some(table)) if compared.is_empty() => Some(format!("a value for a column of {table}")),
            _ => None,
        };
        known.extend(compared);
        let (message, place) = match (known.as_slice(), assigned) {
            ([], Some(assigned)) => (format!("{} ({assigned})", error.message), None),
            ([(text, _)], Some(assigned)) => (format!("{} (in {text}, or {assigned})", error.message), None),
            (some, Some(assigned)) if some.len() <= MOST => {
                let texts: Vec<&str> = some.iter().map(|(text, _)| *text).collect();
                (format!("{} (in one of: {}; or {assigned})", error.message, texts.join("; ")), None)
            }
            ([], None) => return error,
            ([(text, place)], None) => (format!("{} (in {text})", error.message), *place),
            (some, None) if some.len() <= MOST => {
                let texts: Vec<&str> = some.iter().map(|(text, _)| *text).collect();
                (format!("{} (in one of: {})", error.message, texts.join("; ")), None)
            }
            _ => return error,
        };
        Error { message, ..error }.at(place)
    }
}

/// The texts that something is compared with in this expression.
fn texts_compared(expr: &Expr) -> Vec<String> {
    let texts = |of: &[&Expr]| -> Vec<String> {
        let text = |expr: &&Expr| match expr {
            Expr::Value(ValueWithSpan { value: Value::SingleQuotedString(text), .. }) if text.len() <= LONGEST => {
                Some(text.clone())
            }
            _ => None,
        };
        of.iter().filter_map(text).take(MOST_OPERATORS).collect()
    };
    match expr {
        Expr::BinaryOp { left, right, .. } => texts(&[left.as_ref(), right.as_ref()]),
        Expr::Between { expr, low, high, .. } => texts(&[expr.as_ref(), low.as_ref(), high.as_ref()]),
        Expr::InList { expr, list, .. } => {
            texts(&std::iter::once(expr.as_ref()).chain(list).take(MOST_OPERATORS).collect::<Vec<_>>())
        }
        Expr::InSubquery { expr, .. } => texts(&[expr.as_ref()]),
        _ => Vec::new(),
    }
}

/// An expression and its place, as an error tells them.
fn shown(expr: &Expr) -> (String, Option<Position>) {
    let mut text = expr.to_string();
    if text.chars().count() > LONGEST {
        text = text.chars().take(LONGEST).chain("...".chars()).collect();
    }
    let start = expr.span().start;
    (text, (start.line > 0).then_some(Position { line: start.line, column: start.column }))
}

/// Where a statement first has the last part of a name.
fn place_of(sql: &str, name: &str) -> Option<Position> {
    let name = name.rsplit('.').next().unwrap_or(name).trim_matches('"');
    let tokens = Tokenizer::new(&GenericDialect {}, sql).tokenize_with_location().ok()?;
    let found = tokens.into_iter().find(|token| match &token.token {
        Token::Word(word) => match word.quote_style {
            Some(_) => word.value == name,
            None => word.value.eq_ignore_ascii_case(name),
        },
        _ => false,
    })?;
    Some(Position { line: found.span.start.line, column: found.span.start.column })
}

#[cfg(test)]
mod tests {
    use datafusion::sql::parser::DFParser;

    use super::*;

    fn of(sql: &str) -> Faults {
        Faults::of(&DFParser::parse_sql(sql).unwrap()[0], sql)
    }

    #[test]
    fn the_expression_is_named() {
        let faults = of("SELECT a + 1,\n  10 / x FROM t");
        let error = faults.explain(Error::invalid("Divide by zero error"));
        assert_eq!(error.message, "Divide by zero error (in 10 / x)");
        assert_eq!(error.position, Some(Position { line: 2, column: 3 }));
        let several = of("UPDATE t SET a = b / c WHERE d % e = 1").explain(Error::invalid("Divide by zero error"));
        assert_eq!(several.message, "Divide by zero error (in one of: b / c; d % e)");
        assert_eq!(several.position, None);
        let cast = of("SELECT CAST(a AS BIGINT), TRY_CAST(b AS INT)").explain(Error::invalid("Cannot cast string 'x'"));
        assert_eq!(cast.message, "Cannot cast string 'x' (in CAST(a AS BIGINT))");
        let error = of("SELECT a\nFROM t WHERE b <> c AND d = 'x'")
            .explain(Error::invalid("BIGINT and BOOLEAN cannot be compared by !=: cast one of them"));
        assert_eq!(error.message, "BIGINT and BOOLEAN cannot be compared by !=: cast one of them (in b <> c)");
        assert_eq!(error.position, Some(Position { line: 2, column: 14 }));
        let name = of("INSERT INTO t (a,\n \"B\") SELECT b, \"B\" FROM t")
            .explain(Error::not_found("column \"B\" does not exist"));
        assert_eq!(name.position, Some(Position { line: 2, column: 2 }));
        let other = Error::invalid("table t does not exist");
        assert_eq!(faults.explain(other.clone()), other);
        let assigned =
            of("INSERT INTO s.t SELECT a FROM u").explain(Error::invalid("Can't cast value 3e9 to type Int32"));
        assert_eq!(assigned.message, "Can't cast value 3e9 to type Int32 (a value for a column of s.t)");
        let either = of("UPDATE t SET a = CAST(b AS INT)").explain(Error::invalid("Cannot cast string 'x'"));
        assert_eq!(either.message, "Cannot cast string 'x' (in CAST(b AS INT), or a value for a column of t)");
        let written = of("SELECT a\nFROM t WHERE b = 'x' AND a = 'abc'")
            .explain(Error::invalid("Cannot cast string 'abc' to value of Int32 type"));
        assert_eq!(written.message, "Cannot cast string 'abc' to value of Int32 type (in a = 'abc')");
        assert_eq!(written.position, Some(Position { line: 2, column: 26 }));
        let listed = of("DELETE FROM t WHERE a IN (1, 'y')").explain(Error::invalid("Cannot cast string 'y'"));
        assert_eq!(listed.message, "Cannot cast string 'y' (in a IN (1, 'y'))");
        let pattern = of("SELECT regexp_replace(a, '(', b) FROM t").explain(Error::invalid("regex parse error: ("));
        assert_eq!(pattern.message, "regex parse error: ( (in regexp_replace(a, '(', b))");
        let many = of("SELECT 1/a, 2/a, 3/a, 4/a, 5/a, 6/a").explain(Error::invalid("Divide by zero error"));
        assert_eq!(many.message, "Divide by zero error");
    }
}
