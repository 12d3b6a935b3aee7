//! Lines put together to statements and commands. Pure.

use super::command::{self, Command};
use super::statements::{self, Inside};

/// Longest statement, in bytes.
const MAX_STATEMENT_BYTES: usize = 16 << 20;

/// Something to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Item {
    Statement(String),
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
}

impl Input {
    /// Whether nothing is begun.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Takes in a line; gives what is complete with it.
    pub fn feed(&mut self, line: &str) -> Vec<Item> {
        if self.buffer.is_empty() {
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
            *self = Self::default();
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
        let items = split.complete.iter().map(|s| Item::Statement((*s).to_owned())).collect();
        self.buffer = if split.has_rest() { split.rest.to_owned() } else { String::new() };
        items
    }

    /// The statement that the end of the input ends.
    ///
    /// # Errors
    /// It ends inside of something.
    pub fn finish(self) -> Result<Option<String>, String> {
        let split = statements::split(&self.buffer);
        let open = match split.inside {
            Inside::Statement => return Ok(split.has_rest().then(|| split.rest.to_owned())),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(text: &str) -> Item {
        Item::Statement(text.to_owned())
    }

    #[test]
    fn lines_become_statements() {
        let mut input = Input::default();
        assert_eq!(input.feed("select 1; select"), [statement("select 1")]);
        assert!(!input.is_empty());
        assert_eq!(input.feed("\\q"), [Item::Command(Command::Quit)]);
        // Inside a text, what looks like a command is none.
        assert_eq!(input.feed("'"), []);
        assert_eq!(input.feed("\\d"), []);
        assert_eq!(input.feed("';"), [statement("select\n'\n\\d\n'")]);
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
        assert_eq!(finish("select 1"), (0, Ok(Some("select 1".to_owned()))));
        assert_eq!(finish("select 1; -- done"), (1, Ok(None)));
        assert_eq!(finish(""), (0, Ok(None)));
        for open in ["select 'a", "select \"a", "select /* a"] {
            assert!(finish(open).1.unwrap_err().contains("ends inside of"), "{open}");
        }
    }

    #[test]
    fn a_statement_is_bounded() {
        let mut input = Input::default();
        input.feed("select");
        assert!(matches!(input.feed(&" ".repeat(MAX_STATEMENT_BYTES))[..], [Item::Wrong(_)]));
        assert!(input.is_empty());
    }
}
