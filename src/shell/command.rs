//! Commands of the shell itself, which begin with a backslash. Pure.

/// What `\?` says.
pub const HELP: &str = "\
Statements end with a semicolon and may span lines.
  \\d             the tables
  \\d TABLE       a table's columns, what it is partitioned and sorted by, and its properties
  \\l             the schemas
  \\i FILE        run the statements in a file
  \\x             print each row as lines, a value on each, or no longer
  \\limit N|off   print at most N rows of a result
  \\timing        show elapsed times, or no longer
  \\?             this help
  \\q             quit (also Ctrl-D, and Ctrl-C at an empty prompt)
Tab completes keywords and names. Ctrl-C drops the statement being typed, or stops the one that runs.";

/// A command of the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Tables,
    Describe(String),
    Schemas,
    Timing,
    /// Runs a file.
    Include(String),
    Expanded,
    /// `None`: every row.
    Limit(Option<usize>),
    Help,
    Quit,
}

/// What is said of [`is_word`] in the midst of a statement.
pub const NOT_ENDED: &str = "this line was taken as a part of the statement: a semicolon ends it, Ctrl-C drops it; \\q and \\? are taken anywhere";

/// Whether a line is a command only where no statement has begun.
pub fn is_word(line: &str) -> bool {
    let line = line.trim();
    ["quit", "exit", "help"].iter().any(|word| line.eq_ignore_ascii_case(word))
}

/// Reads a line as a command, if it is meant to be one.
///
/// # Errors
/// What is wrong with it, for the user.
pub fn parse(line: &str) -> Option<Result<Command, String>> {
    let line = line.trim().trim_end_matches(';').trim_end();
    if line.eq_ignore_ascii_case("quit") || line.eq_ignore_ascii_case("exit") {
        return Some(Ok(Command::Quit));
    }
    if line.eq_ignore_ascii_case("help") {
        return Some(Ok(Command::Help));
    }
    let line = line.strip_prefix('\\')?;
    let (name, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let argument = argument.trim();
    let command = match (name, argument) {
        ("d" | "dt", "") => Command::Tables,
        ("d", table) => Command::Describe(table.to_owned()),
        ("l", "") => Command::Schemas,
        ("timing", "") => Command::Timing,
        ("x", "") => Command::Expanded,
        ("i", "") => return Some(Err("\\i takes the name of a file".to_owned())),
        ("i", file) => {
            let unquoted = file.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
            Command::Include(unquoted.unwrap_or(file).to_owned())
        }
        ("limit", "off") => Command::Limit(None),
        ("limit", rows) => match rows.parse() {
            Ok(rows) if rows > 0 => Command::Limit(Some(rows)),
            _ => return Some(Err("\\limit takes a number of rows above 0, or off".to_owned())),
        },
        ("?" | "h" | "help", _) => Command::Help,
        ("q" | "quit", "") => Command::Quit,
        ("l" | "timing" | "x" | "q" | "quit" | "dt", _) => return Some(Err(format!("\\{name} takes no argument"))),
        _ => return Some(Err(format!("there is no command \\{name}; \\? lists them"))),
    };
    Some(Ok(command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_with_their_arguments() {
        for (line, expected) in [
            ("\\d", Command::Tables),
            (" \\d tpch.lineitem; ", Command::Describe("tpch.lineitem".into())),
            ("\\l", Command::Schemas),
            ("\\timing", Command::Timing),
            ("\\x", Command::Expanded),
            ("\\i a.sql", Command::Include("a.sql".into())),
            ("\\i 'my file.sql';", Command::Include("my file.sql".into())),
            ("\\limit 50", Command::Limit(Some(50))),
            ("\\limit off", Command::Limit(None)),
            ("\\?", Command::Help),
            ("\\q", Command::Quit),
            ("help", Command::Help),
            ("exit", Command::Quit),
            ("QUIT;", Command::Quit),
        ] {
            assert_eq!(parse(line), Some(Ok(expected)), "{line}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_and_sql_is_left_alone() {
        for wrong in ["\\y", "\\x on", "\\i", "\\limit", "\\limit 0", "\\limit many", "\\q now", "\\"] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong}");
        }
        assert_eq!(parse("select 1;"), None);
        assert_eq!(parse("exit_code"), None);
        assert!(is_word(" Exit ") && is_word("help") && !is_word("exit_code"));
        assert_eq!(parse(""), None);
    }
}
