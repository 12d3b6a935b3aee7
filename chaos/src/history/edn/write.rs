//! Values to text, on one line.

use std::fmt::{self, Display, Formatter, Write};

use super::Edn;

impl Display for Edn {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Edn::Nil => f.write_str("nil"),
            Edn::Bool(value) => write!(f, "{value}"),
            Edn::Int(number) => write!(f, "{number}"),
            // Rust writes whole numbers without a point only in Display.
            Edn::Float(number) => write!(f, "{number:?}"),
            Edn::Text(text) => write_text(f, text),
            Edn::Keyword(name) => write!(f, ":{name}"),
            Edn::Symbol(name) => f.write_str(name),
            Edn::Vector(elements) => write_all(f, "[", elements, "]"),
            Edn::Set(elements) => write_all(f, "#{", elements, "}"),
            Edn::Map(entries) => {
                f.write_char('{')?;
                for (i, (key, value)) in entries.iter().enumerate() {
                    write!(f, "{}{key} {value}", if i == 0 { "" } else { ", " })?;
                }
                f.write_char('}')
            }
        }
    }
}

fn write_all(f: &mut Formatter<'_>, open: &str, elements: &[Edn], close: &str) -> fmt::Result {
    f.write_str(open)?;
    for (i, element) in elements.iter().enumerate() {
        write!(f, "{}{element}", if i == 0 { "" } else { " " })?;
    }
    f.write_str(close)
}

fn write_text(f: &mut Formatter<'_>, text: &str) -> fmt::Result {
    f.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' => f.write_str("\\\"")?,
            '\\' => f.write_str("\\\\")?,
            '\n' => f.write_str("\\n")?,
            '\r' => f.write_str("\\r")?,
            '\t' => f.write_str("\\t")?,
            c if c.is_control() => write!(f, "\\u{:04x}", c as u32)?,
            c => f.write_char(c)?,
        }
    }
    f.write_char('"')
}
