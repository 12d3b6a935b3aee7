//! An error with the place in the statement that it is about. Pure.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// How much of a long line is shown on either side of the place, in characters.
const CONTEXT_CHARS: usize = 50;

/// The error's message, and below it the line of the statement with a caret under the place. `line` and `column` count
/// from 1, the column in characters; without a place, or with one that is not in the statement, the message alone. `origin`: the file
/// that the statement is in, and the line that it begins in; then lines are the file's.
pub fn render(message: &str, statement: &str, place: Option<(u64, u64)>, origin: Option<(&str, u64)>) -> String {
    let alone = || match origin {
        Some((file, first)) => format!("error: {message}\n{file}:{first}: the statement that begins here"),
        None => format!("error: {message}"),
    };
    let Some((line, column)) = place else { return alone() };
    let (Some(line_index), Some(column)) = (index(line), index(column)) else { return alone() };
    let Some(text) = statement.lines().nth(line_index) else { return alone() };
    let chars: Vec<char> = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if column > chars.len() {
        return alone();
    }
    let from = column.saturating_sub(CONTEXT_CHARS);
    let to = (column + CONTEXT_CHARS).min(chars.len());
    let place = match origin {
        Some((file, first)) => format!("{file}:{}", line.saturating_add(first).saturating_sub(1)),
        None => format!("LINE {line}"),
    };
    let label = format!("{place}: {}", if from > 0 { "..." } else { "" });
    let before: usize = chars[from..column].iter().map(|c| c.width().unwrap_or(0)).sum();
    format!(
        "error: {message}\n{label}{}{}\n{:indent$}^",
        chars[from..to].iter().collect::<String>(),
        if to < chars.len() { "..." } else { "" },
        "",
        indent = label.width() + before,
    )
}

fn index(from_one: u64) -> Option<usize> {
    usize::try_from(from_one).ok()?.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(statement: &str, line: u64, column: u64) -> String {
        render("no such table", statement, Some((line, column)), None)
    }

    #[test]
    fn the_caret_is_under_the_place() {
        assert_eq!(at("select *\nfrom nope", 2, 6), "error: no such table\nLINE 2: from nope\n             ^");
        assert_eq!(at("selekt", 1, 1), "error: no such table\nLINE 1: selekt\n        ^");
        // The end of the statement is a place too.
        assert_eq!(at("select", 1, 7), "error: no such table\nLINE 1: select\n              ^");
        // Wide characters take two columns; a tab is shown as one.
        assert_eq!(at("\t'日本' x", 1, 7), "error: no such table\nLINE 1:  '日本' x\n                ^");
    }

    #[test]
    fn a_long_line_is_cut_on_both_sides() {
        let statement = format!("select {} from nope where {}", "a, ".repeat(100), "b".repeat(200));
        let column = statement.find("nope").unwrap() as u64 + 1;
        let rendered = at(&statement, 1, column);
        let lines: Vec<&str> = rendered.lines().collect();
        assert!(lines[1].starts_with("LINE 1: ...") && lines[1].ends_with("..."), "{rendered}");
        assert_eq!(lines[1].find("nope"), lines[2].find('^'), "{rendered}");
    }

    #[test]
    fn a_place_outside_the_statement_is_left_out() {
        for (line, column) in [(0, 1), (1, 0), (3, 1), (1, 99), (u64::MAX, u64::MAX)] {
            assert_eq!(at("select", line, column), "error: no such table");
        }
        assert_eq!(render("gone", "select", None, None), "error: gone");
    }

    #[test]
    fn lines_of_a_file_are_the_files() {
        let from = Some(("a.sql", 40));
        let expected = "error: no\na.sql:41: from nope\n               ^";
        assert_eq!(render("no", "select *\nfrom nope", Some((2, 6)), from), expected);
        assert_eq!(render("no", "select", None, from), "error: no\na.sql:40: the statement that begins here");
    }
}
