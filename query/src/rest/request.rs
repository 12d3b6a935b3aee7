//! One request, taken apart: path, query, headers and body, each with its limit.

use std::time::Instant;

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use lake_client::catalog::{Namespace, TableIdent};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use url::form_urlencoded;

use super::comeback::Client;
use super::endpoint::Captures;
use super::error::{RestError, Result, json_response};
use super::once::Key;
use crate::table::sound;

/// Deepest nesting of JSON in a body: of a schema's types, mostly.
pub const MAX_DEPTH: usize = 64;
/// Joins the levels of a namespace in a path, once decoded.
const LEVEL_SEPARATOR: char = '\u{1f}';
/// Names on a page, unless the client says otherwise ...
const PAGE_SIZE: usize = 1_000;
/// ... and at most.
const MAX_PAGE_SIZE: usize = 10_000;

/// A request that is being served.
#[derive(Debug)]
pub struct Call {
    pub captures: Captures,
    pub query: Vec<(String, String)>,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub deadline: Instant,
    /// By which a request that is sent again is known.
    pub key: Option<Key>,
    /// The warehouse that it is about, unless that is the node's own: namespaces are told and named without that level.
    pub warehouse: Option<String>,
    /// Who sent it.
    pub client: Option<Client>,
}

/// A name in a body.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identifier {
    pub namespace: Vec<String>,
    pub name: String,
}

impl Call {
    /// A parameter of the query, if it is there.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(at, _)| at == name).map(|(_, value)| value.as_str())
    }

    /// The namespace that the path names.
    pub fn namespace(&self) -> Result<Namespace> {
        self.levels(self.captures.get("namespace"), "namespace")
    }

    /// A namespace out of a path or a query, its levels joined.
    pub fn levels(&self, text: &str, field: &str) -> Result<Namespace> {
        self.namespace_of(text.split(LEVEL_SEPARATOR).map(str::to_owned).collect(), field)
    }

    /// A namespace out of a body.
    pub fn namespace_of(&self, levels: Vec<String>, field: &str) -> Result<Namespace> {
        // Judged without the warehouse, of which the client knows nothing.
        let named = Namespace::new(levels).map_err(|e| RestError::bad(field, e))?;
        match &self.warehouse {
            None => Ok(named),
            Some(warehouse) => {
                let levels = std::iter::once(warehouse).chain(named.levels());
                Namespace::new(levels).map_err(|e| RestError::bad(field, e))
            }
        }
    }

    /// The table or view that a body names.
    pub fn identifier(&self, named: Identifier, field: &str) -> Result<TableIdent> {
        let namespace = self.namespace_of(named.namespace, &format!("{field}.namespace"))?;
        table_of(namespace, named.name, &format!("{field}.name"))
    }

    /// The namespace that the warehouse is, if it is not the node's own.
    pub fn root(&self) -> Result<Option<Namespace>> {
        let root = self.warehouse.as_ref().map(|warehouse| Namespace::new([warehouse]));
        root.transpose().map_err(|e| RestError::bad("prefix", e))
    }

    /// A namespace's levels as the client knows them.
    pub fn told<'a>(&self, namespace: &'a Namespace) -> &'a [String] {
        &namespace.levels()[usize::from(self.warehouse.is_some())..]
    }

    /// The table that the path names.
    pub fn table(&self) -> Result<TableIdent> {
        table_of(self.namespace()?, self.captures.get("table").to_owned(), "table")
    }

    /// The view that the path names.
    pub fn view(&self) -> Result<TableIdent> {
        table_of(self.namespace()?, self.captures.get("view").to_owned(), "view")
    }

    /// Checks that a body which names what it is about names what the path does.
    ///
    /// # Errors
    /// 400.
    pub fn names(&self, body: &Value, ident: &TableIdent) -> Result<()> {
        let Some(named) = body.get("identifier").filter(|named| !named.is_null()) else { return Ok(()) };
        let named = self.identifier(part(named.clone(), "identifier")?, "identifier")?;
        match named == *ident {
            true => Ok(()),
            false => Err(RestError::bad("identifier", format!("it is {named}, and {ident} in the path"))),
        }
    }

    /// The page that is asked for of what a namespace holds.
    pub fn identifiers(&self, namespace: &Namespace, names: Vec<String>) -> Result<Response> {
        let (page, next) = self.page(names, String::clone)?;
        let levels = self.told(namespace);
        let identifiers: Vec<_> = page.iter().map(|name| json!({"namespace": levels, "name": name})).collect();
        let body = json!({"identifiers": identifiers, "next-page-token": next});
        Ok(json_response(StatusCode::OK, body.to_string()))
    }

    /// The body's JSON.
    ///
    /// # Errors
    /// 400, with what is wrong where.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        if depth(&self.body) > MAX_DEPTH {
            return Err(RestError::bad("body", format!("nested deeper than {MAX_DEPTH} levels")));
        }
        serde_json::from_slice(&self.body).map_err(|e| RestError::bad("body", e))
    }

    /// The page of these names, which are sorted, that is asked for, and the token of the next. A client that asks for no
    /// page gets all of them.
    pub fn page<T>(&self, mut names: Vec<T>, name: impl Fn(&T) -> String) -> Result<(Vec<T>, Option<String>)> {
        let (size, token) = (self.parameter("pageSize"), self.parameter("pageToken"));
        if size.is_none() && token.is_none() {
            return Ok((names, None));
        }
        let size = match size {
            None => PAGE_SIZE,
            Some(text) => match text.parse::<usize>() {
                Ok(size) if size > 0 => size.min(MAX_PAGE_SIZE),
                _ => return Err(RestError::bad("pageSize", format!("{text:?} is no number above 0"))),
            },
        };
        // A token is the last name of the page before: any node knows what comes next.
        if let Some(last) = token.filter(|token| !token.is_empty()) {
            names.retain(|one| name(one).as_str() > last);
        }
        let more = names.len() > size;
        names.truncate(size);
        let next = names.last().filter(|_| more).map(name);
        Ok((names, next))
    }
}

/// A table's name out of a path or a body.
pub fn table_of(namespace: Namespace, name: String, field: &str) -> Result<TableIdent> {
    TableIdent::new(namespace, name).map_err(|e| RestError::bad(field, e))
}

/// A query's parameters.
pub fn query(text: &str) -> Vec<(String, String)> {
    form_urlencoded::parse(text.as_bytes()).into_owned().collect()
}

/// A part of a body that has a type of the iceberg crate.
pub fn part<T: DeserializeOwned>(value: Value, field: &str) -> Result<T> {
    super::evolve::unpanicked(field, || serde_json::from_value(value))?.map_err(|e| unreadable(field, &e))
}

/// What cannot be read as what it should be; of a transform, which says nothing of it, with what there is.
pub fn unreadable(field: &str, error: &serde_json::Error) -> RestError {
    let words = error.to_string();
    match words.contains("transform") && words.contains("invalid") {
        true => RestError::bad(field, format!("{words}; {}", sound::TRANSFORMS)),
        false => RestError::bad(field, words),
    }
}

/// How deep the brackets of a JSON text nest.
fn depth(text: &[u8]) -> usize {
    let (mut now, mut deepest, mut in_string, mut escaped) = (0usize, 0, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                now += 1;
                deepest = deepest.max(now);
            }
            b'}' | b']' => now = now.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn call(text: &str, body: &str) -> Call {
        Call {
            captures: Captures::default(),
            query: query(text),
            headers: HeaderMap::new(),
            body: Bytes::copy_from_slice(body.as_bytes()),
            deadline: Instant::now() + Duration::from_secs(1),
            key: None,
            warehouse: None,
            client: None,
        }
    }

    #[test]
    fn pages_follow_each_other_to_the_end() {
        let names = || ["a", "b", "c", "d", "e"].map(str::to_owned).to_vec();
        let page = |text: &str| call(text, "").page(names(), String::clone).unwrap();
        assert_eq!(page(""), (names(), None));
        assert_eq!(page("pageToken="), (names(), None));
        assert_eq!(page("pageSize=2"), (vec!["a".into(), "b".into()], Some("b".into())));
        assert_eq!(page("pageSize=2&pageToken=b"), (vec!["c".into(), "d".into()], Some("d".into())));
        assert_eq!(page("pageSize=2&pageToken=d"), (vec!["e".into()], None));
        assert_eq!(page("pageSize=5"), (names(), None));
        for wrong in ["0", "-1", "x", ""] {
            let text = format!("pageSize={wrong}");
            assert_eq!(call(&text, "").page(names(), String::clone).unwrap_err().status.as_u16(), 400);
        }
    }

    #[test]
    fn a_body_is_bounded_in_depth() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(call("", &nested(MAX_DEPTH)).json::<Value>().is_ok());
        let error = call("", &nested(MAX_DEPTH + 1)).json::<Value>().unwrap_err();
        assert!(error.message.contains("nested deeper"), "{}", error.message);
        assert!(call("", &nested(1_000_000)).json::<Value>().is_err());
        assert_eq!(depth(br#"{"a": "[[[\"[[[", "b": [1, {"c": 2}]}"#), 3);
    }

    #[test]
    fn wrong_names_say_where() {
        let own = call("", "");
        assert_eq!(own.levels("a\u{1f}b", "namespace").unwrap().levels(), ["a", "b"]);
        assert!(own.levels("a//b", "parent").unwrap_err().message.starts_with("parent: "));
        let identifier = Identifier { namespace: vec!["a".into()], name: "a/b".into() };
        assert!(own.identifier(identifier, "source").unwrap_err().message.starts_with("source.name: "));
    }

    #[test]
    fn names_in_a_warehouse_are_told_without_it() {
        let there = Call { warehouse: Some("w".into()), ..call("", "") };
        let namespace = there.levels("a\u{1f}b", "namespace").unwrap();
        assert_eq!(namespace.levels(), ["w", "a", "b"]);
        assert_eq!(there.told(&namespace), ["a", "b"]);
        assert!(there.namespace_of(vec![], "namespace").is_err());
    }
}
