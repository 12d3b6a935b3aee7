//! Values in Clojure's notation (<https://github.com/edn-format/edn>), as much of it as histories use.
//!
//! Tags are dropped and their values kept, so that records (`#jepsen.history.Op{...}`) read as maps. Ratios and
//! namespaced maps are not known.

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::{Error, Reader};

/// Values inside each other, at most.
pub const MAX_DEPTH: usize = 64;

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub enum Edn {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    /// Without its colon.
    Keyword(String),
    Symbol(String),
    /// `[...]` and `(...)`.
    Vector(Vec<Edn>),
    Set(Vec<Edn>),
    Map(Vec<(Edn, Edn)>),
}

impl Edn {
    /// The keyword of this name.
    pub fn keyword(name: &str) -> Edn {
        Edn::Keyword(name.to_owned())
    }

    /// What a map holds under a keyword.
    pub fn get(&self, name: &str) -> Option<&Edn> {
        match self {
            Edn::Map(entries) => {
                entries.iter().find(|(k, _)| matches!(k, Edn::Keyword(k) if k == name)).map(|(_, v)| v)
            }
            _ => None,
        }
    }

    /// The number, if it is one without a fraction.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Edn::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The elements of a vector or set.
    pub fn as_elements(&self) -> Option<&[Edn]> {
        match self {
            Edn::Vector(elements) | Edn::Set(elements) => Some(elements),
            _ => None,
        }
    }
}
