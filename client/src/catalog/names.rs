//! Namespaces and tables by name, and the keys and the paths of scopes that their names make.
//!
//! A name is one part of a key: it is not empty, and holds neither `/` nor a control character, so that no two names make one key
//! and none makes another kind's. What is new is not called `.` or `..` either, which the paths of URLs and files have a meaning for: a client
//! of HTTP would ask for something else. What has such a name from before can be read, renamed and dropped.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

use super::CatalogError;

/// Keys of namespaces begin so.
pub(crate) const NAMESPACES: &str = "/lake/catalog/";
/// Keys of pointers begin so.
pub(crate) const TABLES: &str = "/lake/table/";
/// Keys of what says which table has a uuid begin so.
const NAMED: &str = "/lake/named/";
/// The key of what says that there is such a key for every table.
pub(super) const ALL_NAMED: &str = "/lake/named/all";
/// Keys of views begin so.
const VIEWS: &str = "/lake/view/";
/// Paths of scopes on what is in the catalog begin so.
const SCOPES: &str = "/catalog";
/// Joins the levels of a nested namespace in a key. No name may hold it.
const LEVEL_SEPARATOR: char = '\u{1f}';
/// Longest name of a namespace level or table, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Deepest nesting of namespaces.
const MAX_LEVELS: usize = 16;

/// A namespace: one or more levels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Vec<String>);

impl Namespace {
    /// A namespace of these levels.
    ///
    /// # Errors
    /// [`CatalogError::InvalidName`] if there is no level, too many, or one is not a valid name.
    pub fn new(levels: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, CatalogError> {
        let levels: Vec<String> = levels.into_iter().map(Into::into).collect();
        if levels.is_empty() || levels.len() > MAX_LEVELS {
            return Err(CatalogError::InvalidName {
                name: levels.join("."),
                why: format!("a namespace has 1 to {MAX_LEVELS} levels"),
            });
        }
        for level in &levels {
            validate_name(level)?;
        }
        Ok(Self(levels))
    }

    /// The levels, outermost first.
    pub fn levels(&self) -> &[String] {
        &self.0
    }

    /// Whether there may be a new namespace of this name.
    ///
    /// # Errors
    /// [`CatalogError::InvalidName`].
    pub fn check_new(&self) -> Result<(), CatalogError> {
        self.0.last().map_or(Ok(()), |level| check_new_name(level))
    }

    fn encoded(&self) -> String {
        self.0.join(&LEVEL_SEPARATOR.to_string())
    }

    fn decode(encoded: &str) -> Result<Self, CatalogError> {
        Self::new(encoded.split(LEVEL_SEPARATOR))
    }

    /// The namespace whose properties are under this key.
    pub(crate) fn from_key(key: &str) -> Result<Self, CatalogError> {
        Self::decode(key.strip_prefix(NAMESPACES).unwrap_or(key))
    }

    pub(crate) fn key(&self) -> String {
        format!("{NAMESPACES}{}", self.encoded())
    }

    /// What the keys of all that is in it start with.
    pub(crate) fn contents(&self) -> [String; 3] {
        [self.table_prefix(), self.view_prefix(), self.nested_prefix()]
    }

    /// What the keys of all namespaces nested in this one start with.
    pub(crate) fn nested_prefix(&self) -> String {
        format!("{}{LEVEL_SEPARATOR}", self.key())
    }

    pub(crate) fn table_prefix(&self) -> String {
        format!("{TABLES}{}/", self.encoded())
    }

    pub(crate) fn view_prefix(&self) -> String {
        format!("{VIEWS}{}/", self.encoded())
    }

    /// The path of scopes on it.
    pub(crate) fn scope_path(&self) -> String {
        format!("{SCOPES}/{}", self.0.join("/"))
    }

    /// The namespace that this one is nested in.
    pub fn parent(&self) -> Option<Namespace> {
        (self.0.len() > 1).then(|| Namespace(self.0[..self.0.len() - 1].to_vec()))
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

impl FromStr for Namespace {
    type Err = CatalogError;

    /// Levels separated by dots.
    fn from_str(s: &str) -> Result<Self, CatalogError> {
        Self::new(s.split('.'))
    }
}

/// A table by namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableIdent {
    pub namespace: Namespace,
    pub name: String,
}

impl TableIdent {
    /// # Errors
    /// [`CatalogError::InvalidName`] if `name` is not a valid name.
    pub fn new(namespace: Namespace, name: impl Into<String>) -> Result<Self, CatalogError> {
        let name = name.into();
        validate_name(&name)?;
        Ok(Self { namespace, name })
    }

    /// Whether there may be a new table or view of this name.
    ///
    /// # Errors
    /// [`CatalogError::InvalidName`].
    pub fn check_new(&self) -> Result<(), CatalogError> {
        check_new_name(&self.name)
    }

    pub(crate) fn key(&self) -> String {
        format!("{}{}", self.namespace.table_prefix(), self.name)
    }

    pub(crate) fn view_key(&self) -> String {
        format!("{}{}", self.namespace.view_prefix(), self.name)
    }

    pub(super) fn scope_path(&self) -> String {
        format!("{}/{}", self.namespace.scope_path(), self.name)
    }

    /// The table whose pointer is under this key.
    pub(crate) fn from_key(key: &str) -> Option<Self> {
        let (namespace, name) = key.strip_prefix(TABLES)?.split_once('/')?;
        Self::new(Namespace::decode(namespace).ok()?, name).ok()
    }
}

impl fmt::Display for TableIdent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.namespace, self.name)
    }
}

/// The key of what says which table has this uuid.
pub(crate) fn named_key(uuid: Uuid) -> String {
    format!("{NAMED}{uuid}")
}

/// Whether it can be a level of a namespace, a table, or what else is one part of a key.
pub(super) fn validate_name(name: &str) -> Result<(), CatalogError> {
    let why = if name.is_empty() {
        "a name is not empty".to_owned()
    } else if name.len() > MAX_NAME_BYTES {
        format!("a name has at most {MAX_NAME_BYTES} bytes")
    } else if name.contains('/') || name.chars().any(char::is_control) {
        "a name holds no '/' and no control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(CatalogError::InvalidName { name: name.chars().take(64).collect(), why })
}

/// Whether something new may have a name, which is a valid one.
fn check_new_name(name: &str) -> Result<(), CatalogError> {
    match name {
        "." | ".." => Err(CatalogError::InvalidName {
            name: name.to_owned(),
            why: "a name is not '.' or '..', which mean something else in a path".to_owned(),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_break_keys_are_refused() {
        for name in ["", "a/b", "a\u{1f}b", "a\nb", &"x".repeat(256)] {
            assert!(matches!(Namespace::new([name]), Err(CatalogError::InvalidName { .. })), "{name:?}");
        }
        assert!(Namespace::new([""; 0]).is_err());
        assert!(Namespace::new(vec!["x"; 17]).is_err());
        assert_eq!("a.b".parse::<Namespace>().unwrap().levels(), ["a", "b"]);
    }
}
