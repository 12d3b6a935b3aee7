//! Text to values: recursive descent, with a bound on its depth.

use super::{Edn, MAX_DEPTH};

/// Where a text stops being EDN, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {what}")]
pub struct Error {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    pub what: String,
}

/// Reads values one after the other.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    text: &'a str,
    /// In bytes; always between two characters.
    at: usize,
}

impl<'a> Reader<'a> {
    /// Begins at the start of a text.
    pub fn new(text: &'a str) -> Self {
        Reader { text, at: 0 }
    }

    /// The next value, and the byte at which it begins; `None` at the end.
    ///
    /// # Errors
    /// What stands there is no value.
    pub fn next_value(&mut self) -> Result<Option<(usize, Edn)>, Error> {
        self.skip_blank(0)?;
        let start = self.at;
        match self.peek() {
            None => Ok(None),
            Some(_) => Ok(Some((start, self.value(0)?))),
        }
    }

    /// If a vector or list begins here, steps into it, so that its elements are read one by one.
    ///
    /// # Errors
    /// What stands before it is not blank.
    pub fn step_into_vector(&mut self) -> Result<bool, Error> {
        self.skip_blank(0)?;
        let begins = matches!(self.peek(), Some('[' | '('));
        self.at += usize::from(begins);
        Ok(begins)
    }

    /// If the vector that was stepped into ends here, steps out of it.
    ///
    /// # Errors
    /// What stands before its end is not blank.
    pub fn step_out_of_vector(&mut self) -> Result<bool, Error> {
        self.skip_blank(0)?;
        let ends = matches!(self.peek(), Some(']' | ')'));
        self.at += usize::from(ends);
        Ok(ends)
    }

    /// An error at a byte of the text.
    pub fn error_at(&self, byte: usize, what: impl Into<String>) -> Error {
        let before = &self.text[..byte.min(self.text.len())];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Error {
            line: before.bytes().filter(|b| *b == b'\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            what: what.into(),
        }
    }

    fn error(&self, what: impl Into<String>) -> Error {
        self.error_at(self.at, what)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    /// Skips white space, commas, comments and discarded values.
    fn skip_blank(&mut self, depth: usize) -> Result<(), Error> {
        loop {
            let rest = &self.text[self.at..];
            let blank = rest.len() - rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',').len();
            self.at += blank;
            let rest = &rest[blank..];
            if rest.starts_with(';') {
                self.at += rest.find('\n').unwrap_or(rest.len());
            } else if rest.starts_with("#_") {
                self.at += 2;
                self.value(depth + 1)?;
            } else {
                return Ok(());
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Edn, Error> {
        if depth > MAX_DEPTH {
            return Err(self.error(format!("more than {MAX_DEPTH} values inside each other")));
        }
        self.skip_blank(depth)?;
        let start = self.at;
        match self.peek() {
            None => Err(self.error("the text ends where a value was expected")),
            Some('[') => self.after(1).elements(']', depth, start).map(Edn::Vector),
            Some('(') => self.after(1).elements(')', depth, start).map(Edn::Vector),
            Some('{') => self.after(1).map(depth, start),
            Some('"') => self.after(1).text(start).map(Edn::Text),
            Some(':') => self.after(1).name(start).map(|name| Edn::Keyword(name.to_owned())),
            Some('\\') => Err(self.error("characters (\\c) are not known here")),
            Some('#') if self.text[start..].starts_with("#{") => {
                self.after(2).elements('}', depth, start).map(Edn::Set)
            }
            // The tag of a record or of a literal; what it stands before is read as it is.
            Some('#') => {
                self.after(1).name(start)?;
                self.value(depth + 1)
            }
            Some(']' | ')' | '}') => Err(self.error("a closing bracket without its opening one")),
            Some(_) => self.atom(start),
        }
    }

    fn after(&mut self, bytes: usize) -> &mut Self {
        self.at += bytes;
        self
    }

    fn elements(&mut self, close: char, depth: usize, start: usize) -> Result<Vec<Edn>, Error> {
        let mut elements = Vec::new();
        loop {
            self.skip_blank(depth)?;
            match self.peek() {
                None => return Err(self.error_at(start, format!("no {close:?} closes what opens here"))),
                Some(c) if c == close => {
                    self.at += c.len_utf8();
                    return Ok(elements);
                }
                Some(_) => elements.push(self.value(depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize, start: usize) -> Result<Edn, Error> {
        let elements = self.elements('}', depth, start)?;
        if elements.len() % 2 == 1 {
            return Err(self.error_at(start, "a map whose last key has no value"));
        }
        let mut entries = Vec::with_capacity(elements.len() / 2);
        let mut elements = elements.into_iter();
        while let (Some(key), Some(value)) = (elements.next(), elements.next()) {
            entries.push((key, value));
        }
        Ok(Edn::Map(entries))
    }

    fn text(&mut self, start: usize) -> Result<String, Error> {
        let mut text = String::new();
        loop {
            let at = self.at;
            match self.take() {
                None => return Err(self.error_at(start, "no '\"' closes the string that opens here")),
                Some('"') => return Ok(text),
                Some('\\') => text.push(match self.take() {
                    Some('t') => '\t',
                    Some('r') => '\r',
                    Some('n') => '\n',
                    Some('b') => '\u{8}',
                    Some('f') => '\u{c}',
                    Some('u') => self.unicode(at)?,
                    Some(c @ ('"' | '\\')) => c,
                    _ => return Err(self.error_at(at, "an escape that is not known")),
                }),
                Some(c) => text.push(c),
            }
        }
    }

    /// What follows `\u`: four digits, and the second half if they are the first half of a pair.
    fn unicode(&mut self, start: usize) -> Result<char, Error> {
        let first = self.four_digits(start)?;
        if !(0xd800..0xdc00).contains(&first) {
            return char::from_u32(first).ok_or_else(|| self.error_at(start, "half of a character"));
        }
        if !self.text[self.at..].starts_with("\\u") {
            return Err(self.error_at(start, "half of a character"));
        }
        self.at += 2;
        let second = self.four_digits(start)?;
        match second {
            0xdc00..0xe000 => char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)),
            _ => None,
        }
        .ok_or_else(|| self.error_at(start, "half of a character"))
    }

    fn four_digits(&mut self, start: usize) -> Result<u32, Error> {
        let digits = self.text.get(self.at..self.at + 4).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let number = digits.and_then(|d| u32::from_str_radix(d, 16).ok());
        self.at += 4 * usize::from(number.is_some());
        number.ok_or_else(|| self.error_at(start, "\\u without four hexadecimal digits"))
    }

    /// Characters up to the next blank or bracket; at least one.
    fn name(&mut self, start: usize) -> Result<&'a str, Error> {
        let rest = &self.text[self.at..];
        let ends = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '"' | '[' | ']' | '(' | ')' | '{' | '}');
        let name = &rest[..rest.find(ends).unwrap_or(rest.len())];
        self.at += name.len();
        match name.is_empty() {
            true => Err(self.error_at(start, "a name was expected")),
            false => Ok(name),
        }
    }

    fn atom(&mut self, start: usize) -> Result<Edn, Error> {
        let name = self.name(start)?;
        let numeric = name.trim_start_matches(['-', '+']).starts_with(|c: char| c.is_ascii_digit());
        Ok(match name {
            "nil" => Edn::Nil,
            "true" => Edn::Bool(true),
            "false" => Edn::Bool(false),
            _ if numeric => self.number(name, start)?,
            _ => Edn::Symbol(name.to_owned()),
        })
    }

    fn number(&self, name: &str, start: usize) -> Result<Edn, Error> {
        // `N` and `M` mark numbers of any size; those that fit are taken as they are.
        let digits = name.strip_suffix(['N', 'M']).unwrap_or(name);
        match (digits.parse(), digits.parse()) {
            (Ok(int), _) if !name.ends_with('M') => Ok(Edn::Int(int)),
            (Err(_), Ok(float)) if digits.contains(['.', 'e', 'E']) => Ok(Edn::Float(float)),
            (Ok(int), _) => Ok(Edn::Float(int as f64)),
            _ => Err(self.error_at(start, format!("{name:?} is no number, or one beyond 64 bits"))),
        }
    }
}
