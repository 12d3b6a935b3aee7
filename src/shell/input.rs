//! Lines put together to statements and commands. Pure.

use super::command::{self, Command};
use super::statements::{self, Inside};

/// Longest statement, in bytes.
const MAX_STATEMENT_BYTES: usize = 16 << 20;

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// With the line that it begins in, of all that were typed, from 1.
    Statement(String, u64),
    Command(Command),
    /// A command that is none, or a statement that is too long.
    Wrong(String),
}

/// What has been typed and is not ended yet.
#[derive(Debug, Default)]
pub struct Input {
    buffer: String,
    /// Everything since the input was last empty.
    history: String,
    /// How many lines were taken in.
    lines: u64,
    /// The line that the buffer begins in, from 1.
    first: u64,
}

impl Input {
    /// Whether nothing is begun.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Takes in a line; gives what is complete with it.
    pub fn feed(&mut self, line: &str) -> Vec<Item> {
        self.lines += 1;
        if self.buffer.is_empty() {
            self.first = self.lines;
            self.history.clear();
            if let Some(command) = command::parse(line) {
                self.history.push_str(line);
                return vec![command.map_or_else(Item::Wrong, Item::Command)];
            }
        }
        // No SQL has it, but within quotes and comments: so one can look something up, or quit, in the midst of a statement.
        if line.trim_start().starts_with('\\')
            && matches!(statements::split(&self.buffer).inside, Inside::Statement)
            && let Some(command) = command::parse(line)
        {
            return vec![command.map_or_else(Item::Wrong, Item::Command)];
        }
        if self.buffer.len() + line.len() > MAX_STATEMENT_BYTES {
            *self = Self { lines: self.lines, ..Self::default() };
            return vec![Item::Wrong(format!("a statement may have at most {MAX_STATEMENT_BYTES} bytes"))];
        }
        for text in [&mut self.buffer, &mut self.history] {
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(line);
        }
        // Nothing ends without one, and looking costs time in a long statement.
        if !line.contains(';') && self.buffer.len() > line.len() {
            return Vec::new();
        }
        let split = statements::split(&self.buffer);
        let line = |part: &str| self.first + lines_before(&self.buffer, part);
        let items = split.complete.iter().copied().map(|s| Item::Statement(s.to_owned(), line(s))).collect();
        let first = line(split.rest);
        let rest = if split.has_rest() { split.rest.to_owned() } else { String::new() };
        (self.buffer, self.first) = (rest, first);
        items
    }

    /// The statement that the end of the input ends, and the line that it begins in.
    ///
    /// # Errors
    /// It ends inside of something.
    pub fn finish(self) -> Result<Option<(String, u64)>, String> {
        let split = statements::split(&self.buffer);
        let line = self.first + lines_before(&self.buffer, split.rest);
        let open = match split.inside {
            Inside::Statement => return Ok(split.has_rest().then(|| (split.rest.to_owned(), line))),
            Inside::Text => "a string (')",
            Inside::Name => "a quoted name (\")",
            Inside::Comment => "a comment (/*)",
        };
        Err(format!("the input ends inside of {open}"))
    }

    /// What was typed since the input was last empty, for the history.
    pub fn take_history(&mut self) -> String {
        std::mem::take(&mut self.history)
    }
}

/// How many lines of a text end before a part of it.
fn lines_before(text: &str, part: &str) -> u64 {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    text.as_bytes().iter().take(start).filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(text: &str, line: u64) -> Item {
        Item::Statement(text.to_owned(), line)
    }

    #[test]
    fn lines_become_statements() {
        let mut input = Input::default();
        assert_eq!(input.feed("select 1; select"), [statement("select 1", 1)]);
        assert!(!input.is_empty());
        assert_eq!(input.feed("\\q"), [Item::Command(Command::Quit)]);
        // Inside a text, what looks like a command is none.
        assert_eq!(input.feed("'"), []);
        assert_eq!(input.feed("\\d"), []);
        assert_eq!(input.feed("';"), [statement("select\n'\n\\d\n'", 1)]);
        assert!(input.is_empty());
        assert_eq!(input.take_history(), "select 1; select\n'\n\\d\n';");
        assert_eq!(input.feed("\\d"), [Item::Command(Command::Tables)]);
        assert_eq!(input.take_history(), "\\d");
        assert!(matches!(input.feed("\\nope")[..], [Item::Wrong(_)]));
        assert_eq!(input.feed("-- nothing"), []);
        assert!(input.is_empty());
    }

    #[test]
    fn the_end_ends_a_statement() {
        let finish = |text: &str| {
            let mut input = Input::default();
            let items = input.feed(text).len();
            (items, input.finish())
        };
        assert_eq!(finish("select 1"), (0, Ok(Some(("select 1".to_owned(), 1)))));
        assert_eq!(finish("select 1; -- done"), (1, Ok(None)));
        assert_eq!(finish(""), (0, Ok(None)));
        for open in ["select 'a", "select \"a", "select /* a"] {
            assert!(finish(open).1.unwrap_err().contains("ends inside of"), "{open}");
        }
    }

    #[test]
    fn statements_know_their_lines() {
        let mut input = Input::default();
        let text = "-- first\n\\timing\nselect 1; select\n2;\n\n  select 3;select 4;\n select\n 5";
        let items: Vec<Item> = text.lines().flat_map(|line| input.feed(line)).collect();
        let expected =
            [statement("select 1", 3), statement("select\n2", 3), statement("select 3", 6), statement("select 4", 6)];
        assert_eq!(items, [&[Item::Command(Command::Timing)][..], &expected[..]].concat());
        assert_eq!(input.finish(), Ok(Some(("select\n 5".to_owned(), 7))));
    }

    #[test]
    fn a_statement_is_bounded() {
        let mut input = Input::default();
        input.feed("select");
        assert!(matches!(input.feed(&" ".repeat(MAX_STATEMENT_BYTES))[..], [Item::Wrong(_)]));
        assert!(input.is_empty());
    }
}
