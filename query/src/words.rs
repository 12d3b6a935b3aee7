//! What DataFusion says of a statement that cannot be planned, in words of SQL: which column, function or operator it is, the types
//! as SQL has them, and what was perhaps meant. Where in the statement it is, is found by these words ([`about`]).

use arrow::datatypes::{DataType, TimeUnit};
use datafusion::common::Column;
use datafusion::common::utils::datafusion_strsim::levenshtein;

/// Most names that an error lists.
const NAMES_SHOWN: usize = 20;
/// Most ways to call a function that an error lists.
const CALLS_SHOWN: usize = 4;

/// What DataFusion does not count.
const OTHER_WIDTH: &str = "the query has more or fewer columns than are to be inserted";
const COMPARISONS: [&str; 8] = ["IS NOT DISTINCT FROM", "IS DISTINCT FROM", "<=", ">=", "!=", "<", ">", "="];
const ARITHMETIC: [&str; 5] = ["+", "-", "*", "/", "%"];
const LOGICAL: [&str; 2] = ["AND", "OR"];

/// A type as SQL names it; one that it has no name for is named as Arrow does.
pub fn sql_type(of: &DataType) -> String {
    match of {
        DataType::Null => "NULL".to_owned(),
        DataType::Boolean => "BOOLEAN".to_owned(),
        DataType::Int8 => "TINYINT".to_owned(),
        DataType::Int16 => "SMALLINT".to_owned(),
        DataType::Int32 => "INT".to_owned(),
        DataType::Int64 => "BIGINT".to_owned(),
        DataType::UInt8 => "TINYINT UNSIGNED".to_owned(),
        DataType::UInt16 => "SMALLINT UNSIGNED".to_owned(),
        DataType::UInt32 => "INT UNSIGNED".to_owned(),
        DataType::UInt64 => "BIGINT UNSIGNED".to_owned(),
        DataType::Float32 => "REAL".to_owned(),
        DataType::Float64 => "DOUBLE".to_owned(),
        DataType::Decimal32(precision, scale)
        | DataType::Decimal64(precision, scale)
        | DataType::Decimal128(precision, scale)
        | DataType::Decimal256(precision, scale) => format!("DECIMAL({precision}, {scale})"),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => "VARCHAR".to_owned(),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => "BYTEA".to_owned(),
        DataType::FixedSizeBinary(bytes) => format!("BINARY({bytes})"),
        DataType::Date32 | DataType::Date64 => "DATE".to_owned(),
        DataType::Time32(_) | DataType::Time64(_) => "TIME".to_owned(),
        DataType::Timestamp(unit, zone) => {
            // A column without more has microseconds.
            let digits = match unit {
                TimeUnit::Nanosecond => "(9)",
                _ => "",
            };
            let zone = if zone.is_some() { " WITH TIME ZONE" } else { "" };
            format!("TIMESTAMP{digits}{zone}")
        }
        DataType::Interval(_) | DataType::Duration(_) => "INTERVAL".to_owned(),
        DataType::List(element) | DataType::LargeList(element) | DataType::FixedSizeList(element, _) => {
            format!("{}[]", sql_type(element.data_type()))
        }
        DataType::Struct(fields) => {
            let fields: Vec<String> = fields
                .iter()
                .map(|field| format!("{} {}", quoted(field.name()), sql_type(field.data_type())))
                .collect();
            format!("STRUCT<{}>", fields.join(", "))
        }
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(entry) if entry.len() == 2 => {
                format!("MAP({}, {})", sql_type(entry[0].data_type()), sql_type(entry[1].data_type()))
            }
            _ => of.to_string(),
        },
        DataType::Dictionary(_, values) => sql_type(values),
        other => other.to_string(),
    }
}

/// A type that DataFusion says a function takes or returns, as SQL names it; it has one name where Arrow has several.
pub fn type_of_function(text: &str) -> String {
    let is_end = |c: char| !c.is_ascii_alphanumeric();
    let as_in_arrow = |piece: &str| {
        let word = piece.trim_end_matches(is_end);
        let of_arrow = match word {
            "String" => "Utf8",
            "Date" => "Date32",
            "Time" => "Time64",
            "Decimal" => "Decimal128",
            other => other,
        };
        format!("{of_arrow}{}", &piece[word.len()..])
    };
    let arrow: String = text.split_inclusive(is_end).map(as_in_arrow).collect();
    arrow.parse::<DataType>().map_or_else(|_| text.to_owned(), |of| sql_type(&of))
}

/// A name as it is written in a statement.
pub fn quoted(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    match plain {
        true => name.to_owned(),
        false => format!("\"{}\"", name.replace('"', "\"\"")),
    }
}

/// Longer names are not compared: it takes as many steps as their lengths multiplied.
const MAX_COMPARED_BYTES: usize = 255;

/// The name that was perhaps meant.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_COMPARED_BYTES {
        return None;
    }
    let name = name.to_lowercase();
    let candidates = candidates.into_iter().filter(|candidate| candidate.len() <= MAX_COMPARED_BYTES);
    let far = |candidate: &&str| distance(&name, &candidate.to_lowercase());
    let near = candidates.min_by_key(far)?;
    let most = (name.chars().count() / 3).max(1);
    (far(&near) <= most).then_some(near)
}

/// How many letters one is from the other; letters that stand in another order count as one.
fn distance(a: &str, b: &str) -> usize {
    let sorted = |text: &str| {
        let mut letters: Vec<char> = text.chars().collect();
        letters.sort_unstable();
        letters
    };
    match a != b && sorted(a) == sorted(b) {
        true => 1,
        false => levenshtein(a, b),
    }
}

/// For the end of a sentence.
pub fn did_you_mean(name: Option<&str>) -> String {
    name.map(|name| format!("; did you mean {}?", quoted(name))).unwrap_or_default()
}

/// Of a column that no table of the statement has.
pub fn unknown_column(column: &Column, known: &[Column]) -> String {
    let name = match &column.relation {
        Some(table) => format!("{}.{}", quoted(table.table()), quoted(&column.name)),
        None => quoted(&column.name),
    };
    let mut names: Vec<&str> = Vec::new();
    for known in known {
        if !names.contains(&known.name.as_str()) && names.len() <= NAMES_SHOWN {
            names.push(&known.name);
        }
    }
    let meant =
        nearest(&column.name, known.iter().map(|known| known.name.as_str())).filter(|near| *near != column.name);
    let there = match names.len() {
        0 => String::new(),
        count => {
            let more = if count > NAMES_SHOWN { ", ..." } else { "" };
            let shown: Vec<String> = names.into_iter().take(NAMES_SHOWN).map(quoted).collect();
            format!(" (there are: {}{more})", shown.join(", "))
        }
    };
    format!("column {name} does not exist{}{there}", did_you_mean(meant))
}

/// Of a column that several tables of the statement have.
pub fn ambiguous(column: &Column) -> String {
    format!("column {} is ambiguous: several tables have it; write it as table.column", quoted(&column.name))
}

/// The same in words of SQL, if it is one of the common ones.
pub fn of(message: &str) -> Option<String> {
    unknown_function(message)
        .or_else(|| operands(message))
        .or_else(|| arguments(message))
        .or_else(|| counts(message))
        .or_else(|| conditions(message))
        .or_else(|| names(message))
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(within, _)| within)
}

fn behind<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    text.split_once(before).map(|(_, rest)| rest)
}

fn unknown_function(message: &str) -> Option<String> {
    let name = between(message, "Invalid function '", "'")?;
    let meant = between(message, "Did you mean '", "'").filter(|meant| nearest(name, [*meant]).is_some());
    Some(format!("function {name} does not exist{}", did_you_mean(meant)))
}

fn operands(message: &str) -> Option<String> {
    if let Some(rest) = behind(message, "Cannot infer common argument type for comparison operation ") {
        let (left, op, right) = sides(rest, &COMPARISONS)?;
        return Some(format!("{left} and {right} cannot be compared by {op}: cast one of them"));
    }
    if let Some(rest) = behind(message, "Cannot infer common argument type for logical boolean operation ") {
        let (left, op, right) = sides(rest, &LOGICAL)?;
        return Some(format!("{op} does not take {left} and {right}: both sides are conditions"));
    }
    if let Some(within) = between(message, "Cannot coerce arithmetic expression ", " to valid types") {
        let (left, op, right) = sides(within, &ARITHMETIC)?;
        return Some(format!("{op} does not take {left} and {right}: cast one of them"));
    }
    let types = between(message, "There isn't a common type to coerce ", " in ")?;
    let (left, right) = types.split_once(" and ")?;
    let op = between(message, " in ", " expression")?;
    Some(format!("{op} does not take {} and {}: both sides are texts", type_named(left), type_named(right)))
}

fn sides(text: &str, operators: &[&'static str]) -> Option<(String, &'static str, String)> {
    operators.iter().find_map(|op| {
        let (left, right) = text.split_once(&format!(" {op} "))?;
        Some((type_named(left), *op, type_named(right)))
    })
}

fn type_named(text: &str) -> String {
    let text = text.trim();
    text.parse::<DataType>().map_or_else(|_| text.to_owned(), |of| sql_type(&of))
}

fn arguments(message: &str) -> Option<String> {
    let call = between(message, "No function matches the given name and argument types '", "'. You might need")?;
    let (name, types) = call.split_once('(')?;
    let types: Vec<String> = parts(types.strip_suffix(')')?).into_iter().map(type_named).collect();
    let calls = behind(message, "Candidate functions:").unwrap_or_default();
    // What a function takes that looks at the types itself is not said.
    let is_said = |call: &&str| !call.is_empty() && !call.ends_with("(UserDefined)");
    let calls: Vec<&str> = calls.lines().map(str::trim).filter(is_said).take(CALLS_SHOWN).collect();
    let takes = if calls.is_empty() { String::new() } else { format!("; it takes {}", calls.join(", or ")) };
    Some(format!("function {name} does not take ({}){takes}", types.join(", ")))
}

/// The parts of a list of types, which may have commas of their own.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn counts(message: &str) -> Option<String> {
    if message.contains("Column count doesn't match insert query") {
        return Some(OTHER_WIDTH.to_owned());
    }
    let rest = behind(message, "Inconsistent data length across values list: got ")?;
    let (got, rest) = rest.split_once(" values in row ")?;
    let (row, expected) = rest.split_once(" but expected ")?;
    let row: usize = row.parse().ok()?;
    let expected = expected.trim();
    Some(format!("row {} of VALUES has {got} values, where {expected} are expected", row + 1))
}

fn conditions(message: &str) -> Option<String> {
    if let Some(rest) = behind(message, "Cannot create filter with non-boolean predicate '") {
        let (condition, of) = rest.split_once("' returning ")?;
        return Some(format!("the condition {condition} is of type {}, not BOOLEAN", type_named(of)));
    }
    let column = between(message, "column \"", "\" must appear in the GROUP BY clause")?;
    Some(format!("column {column} is neither in GROUP BY nor in an aggregate function"))
}

fn names(message: &str) -> Option<String> {
    let rest = behind(message, "require unique expression names but the expression \"")?;
    let (one, rest) = rest.split_once("\" at position ")?;
    let other = between(rest, " and \"", "\" at position ")?;
    Some(format!(
        "the columns {one} and {other} have one name: names must be unique here, so give one of them another, with AS"
    ))
}

/// Whether an error in these words is about how many columns are inserted.
pub fn is_of_width(message: &str) -> bool {
    message == OTHER_WIDTH
}

/// What an error in these words is about.
#[derive(Debug, PartialEq, Eq)]
pub enum About<'a> {
    /// A column or a function.
    Name(&'a str),
    Operator(&'a str),
}

/// What an error in these words is about, if there is a place to be found for it.
pub fn about(message: &str) -> Option<About<'_>> {
    if let Some(rest) = message.strip_prefix("column ").or_else(|| message.strip_prefix("function ")) {
        let ends = [" does not exist", " does not take", " is ambiguous", " is neither in"];
        let end = ends.into_iter().filter_map(|end| rest.find(end)).min()?;
        return Some(About::Name(&rest[..end]));
    }
    if let Some(op) = between(message, " cannot be compared by ", ":") {
        return Some(About::Operator(op));
    }
    let (op, _) = message.split_once(" does not take ")?;
    (!op.contains(' ')).then_some(About::Operator(op))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datafusion_is_put_into_words_of_sql() {
        for (said, words, subject) in [
            (
                "Invalid function 'uper'.\nDid you mean 'upper'?",
                "function uper does not exist; did you mean upper?",
                Some(About::Name("uper")),
            ),
            (
                "Invalid function 'frobnicate'.\nDid you mean 'concat'?",
                "function frobnicate does not exist",
                Some(About::Name("frobnicate")),
            ),
            (
                "Cannot infer common argument type for comparison operation Decimal128(3, 2) >= Boolean",
                "DECIMAL(3, 2) and BOOLEAN cannot be compared by >=: cast one of them",
                Some(About::Operator(">=")),
            ),
            (
                "Cannot coerce arithmetic expression Utf8View + Boolean to valid types",
                "+ does not take VARCHAR and BOOLEAN: cast one of them",
                Some(About::Operator("+")),
            ),
            (
                "Failed to coerce arguments to satisfy a call to 'substr' function: no. No function matches the given name and \
                 argument types 'substr(Boolean, Decimal128(3, 2))'. You might need to add explicit type casts.\n\tCandidate \
                 functions:\n\tsubstr(Any)\n\tsubstr(Any, Any)",
                "function substr does not take (BOOLEAN, DECIMAL(3, 2)); it takes substr(Any), or substr(Any, Any)",
                Some(About::Name("substr")),
            ),
            (
                "Inconsistent data length across values list: got 2 values in row 1 but expected 3",
                "row 2 of VALUES has 2 values, where 3 are expected",
                None,
            ),
            (
                "Cannot create filter with non-boolean predicate 't.a' returning Int64",
                "the condition t.a is of type BIGINT, not BOOLEAN",
                None,
            ),
        ] {
            let found = of(said).unwrap();
            assert_eq!(found, words);
            assert_eq!(about(&found), subject, "{words}");
        }
        assert_eq!(of("something else"), None);
    }

    #[test]
    fn types_of_functions_are_named_as_in_sql() {
        for (said, named) in [
            ("String", "VARCHAR"),
            ("Float64", "DOUBLE"),
            ("Decimal(38, 10)", "DECIMAL(38, 10)"),
            ("Date", "DATE"),
            ("Time(ns)", "TIME"),
            ("Timestamp(ns)", "TIMESTAMP(9)"),
            ("Timestamp(us, \"+TZ\")", "TIMESTAMP WITH TIME ZONE"),
            ("Interval(MonthDayNano)", "INTERVAL"),
            ("List(String)", "VARCHAR[]"),
            ("TABLE", "TABLE"),
        ] {
            assert_eq!(type_of_function(said), named);
        }
    }

    #[test]
    fn names_that_are_near_are_suggested() {
        let known = ["id", "Name", "price"].map(|name| Column::new(Some("t"), name));
        let column = |name: &str| unknown_column(&Column::new_unqualified(name), &known);
        assert_eq!(column("pric"), "column pric does not exist; did you mean price? (there are: id, \"Name\", price)");
        assert_eq!(
            column("pirce"),
            "column pirce does not exist; did you mean price? (there are: id, \"Name\", price)"
        );
        assert_eq!(
            column("name"),
            "column name does not exist; did you mean \"Name\"? (there are: id, \"Name\", price)"
        );
        assert_eq!(column("colour"), "column colour does not exist (there are: id, \"Name\", price)");
    }
}
