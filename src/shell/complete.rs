//! Completion of what is typed: keywords, names of schemas and tables, commands. Pure, but for the names, which are read when
//! the prompt begins and after each change.

use std::sync::{Arc, Mutex, PoisonError};

use rustyline::completion::Completer;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

use super::statements::{Inside, split};

/// Most names that are kept.
pub const MAX_NAMES: usize = 10_000;
/// Most candidates that are offered.
const MAX_CANDIDATES: usize = 200;

const KEYWORDS: &[&str] = &[
    "ADD",
    "ALL",
    "ALTER",
    "ANALYZE",
    "AND",
    "AS",
    "ASC",
    "BETWEEN",
    "BIGINT",
    "BOOLEAN",
    "BY",
    "CALL",
    "CASE",
    "CAST",
    "COLUMN",
    "COMMENT",
    "CREATE",
    "CROSS",
    "DATE",
    "DECIMAL",
    "DELETE",
    "DESC",
    "DESCRIBE",
    "DISTINCT",
    "DOUBLE",
    "DROP",
    "ELSE",
    "END",
    "EXCEPT",
    "EXISTS",
    "EXPLAIN",
    "EXTRACT",
    "FALSE",
    "FOR",
    "FROM",
    "FULL",
    "GROUP",
    "HAVING",
    "IF",
    "IN",
    "INNER",
    "INSERT",
    "INT",
    "INTERSECT",
    "INTERVAL",
    "INTO",
    "IS",
    "JOIN",
    "LEFT",
    "LIKE",
    "LIMIT",
    "MATCHED",
    "MERGE",
    "NOT",
    "NULL",
    "NULLS",
    "OF",
    "OFFSET",
    "ON",
    "OR",
    "ORDER",
    "OUTER",
    "OVER",
    "OVERWRITE",
    "PARTITION",
    "PARTITIONED",
    "RENAME",
    "REPLACE",
    "RIGHT",
    "SCHEMA",
    "SCHEMAS",
    "SELECT",
    "SET",
    "SHOW",
    "SORTED",
    "TABLE",
    "TABLES",
    "TBLPROPERTIES",
    "THEN",
    "TIME",
    "TIMESTAMP",
    "TO",
    "TRUE",
    "TRUNCATE",
    "UNION",
    "UNSET",
    "UPDATE",
    "USING",
    "VALUES",
    "VARCHAR",
    "VERSION",
    "WHEN",
    "WHERE",
    "WITH",
];
const COMMANDS: &[&str] = &["\\d", "\\i", "\\l", "\\limit", "\\timing", "\\x", "\\?", "\\q"];
/// What stands before a name.
const BEFORE_NAMES: &[&str] =
    &["FROM", "JOIN", "INTO", "UPDATE", "TABLE", "DESCRIBE", "USING", "OVERWRITE", "SCHEMA", "\\D"];

/// The names that can be completed: as they are typed.
#[derive(Debug, Clone, Default)]
pub struct Names(Arc<Mutex<Vec<String>>>);

impl Names {
    /// Takes the place of those known so far: schema and name of each table.
    pub fn set(&self, tables: &[(String, String)]) {
        let mut names = Vec::new();
        for (schema, table) in tables.iter().take(MAX_NAMES) {
            match schema.as_str() {
                "default" => names.push(as_typed(table)),
                _ => {
                    names.push(format!("{}.", as_typed(schema)));
                    names.push(format!("{}.{}", as_typed(schema), as_typed(table)));
                }
            }
        }
        names.sort_unstable();
        names.dedup();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }
}

/// Quoted where SQL would take it for another name.
fn as_typed(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    match plain {
        true => name.to_owned(),
        false => format!("\"{}\"", name.replace('"', "\"\"")),
    }
}

/// What could stand where the cursor is: from which byte on, and the candidates for what is there.
pub fn complete(line: &str, cursor: usize, names: &[String]) -> (usize, Vec<String>) {
    let before = line.get(..cursor).unwrap_or(line);
    let start = before
        .rfind(|c: char| !(c.is_alphanumeric() || "_.$\\\"".contains(c)))
        .map_or(0, |place| place + before[place..].chars().next().map_or(1, char::len_utf8));
    let word = &before[start..];
    let inside = split(before).inside;
    if inside == Inside::Text || inside == Inside::Comment {
        return (cursor, Vec::new());
    }
    let begins = |candidate: &str| {
        candidate.get(..word.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(word))
            || candidate
                .strip_prefix('"')
                .is_some_and(|name| name.get(..word.len()).is_some_and(|b| b.eq_ignore_ascii_case(word)))
    };
    if word.starts_with('\\') {
        let commands = COMMANDS.iter().filter(|command| begins(command) && start == 0);
        return (start, commands.map(|command| (*command).to_owned()).collect());
    }
    let last = before[..start].split_whitespace().next_back().unwrap_or_default().to_uppercase();
    let wants_name = BEFORE_NAMES.contains(&last.as_str());
    let mut candidates: Vec<String> = names.iter().filter(|name| begins(name)).cloned().collect();
    let names_alone = wants_name && !candidates.is_empty();
    if !word.is_empty() && !names_alone {
        let lower = word.chars().all(|c| !c.is_uppercase());
        let keywords = KEYWORDS.iter().filter(|keyword| begins(keyword));
        candidates.extend(keywords.map(|keyword| if lower { keyword.to_lowercase() } else { (*keyword).to_owned() }));
    } else if !wants_name && word.is_empty() {
        candidates.clear();
    }
    candidates.truncate(MAX_CANDIDATES);
    (start, candidates)
}

/// For the line editor.
#[derive(Debug, Default)]
pub struct Completion {
    pub names: Names,
}

impl Completer for Completion {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let names = self.names.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(complete(line, pos, &names))
    }
}

impl Hinter for Completion {
    type Hint = String;
}

impl Highlighter for Completion {}

impl Validator for Completion {}

impl Helper for Completion {}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        let names = Names::default();
        let table = |schema: &str, table: &str| (schema.to_owned(), table.to_owned());
        names.set(&[
            table("default", "orders"),
            table("default", "Order Items"),
            table("tpch", "orders"),
            table("tpch", "lineitem"),
        ]);
        names.0.lock().unwrap().clone()
    }

    fn completed(line: &str) -> Vec<String> {
        let (start, candidates) = complete(line, line.len(), &names());
        candidates.into_iter().map(|candidate| format!("{}{candidate}", &line[..start])).collect()
    }

    #[test]
    fn keywords_and_names_are_completed() {
        for (line, expected) in [
            ("sel", vec!["select"]),
            ("SEL", vec!["SELECT"]),
            ("select * from or", vec!["select * from \"Order Items\"", "select * from orders"]),
            (
                "select * from tp",
                vec!["select * from tpch.", "select * from tpch.lineitem", "select * from tpch.orders"],
            ),
            ("select * from tpch.l", vec!["select * from tpch.lineitem"]),
            ("select x from \"Or", vec!["select x from \"Order Items\""]),
            ("\\l", vec!["\\l", "\\limit"]),
            ("\\d tpch.li", vec!["\\d tpch.lineitem"]),
            ("select 'or", vec![]),
            ("select /* or", vec![]),
            ("select ", vec![]),
            ("select 1 whe", vec!["select 1 when", "select 1 where"]),
            ("ü", vec![]),
        ] {
            assert_eq!(completed(line), expected, "{line}");
        }
        assert_eq!(completed("select * from ").len(), names().len());
        assert_eq!(complete("selü", 4, &[]).1, Vec::<String>::new(), "in the middle of a character");
    }
}
