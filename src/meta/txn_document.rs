//! The JSON document that `lake meta txn` takes, and the one that it prints.
//!
//! ```json
//! {
//!   "when":      [{"key": "/kv/a", "mod_revision": 17}, {"key": "/kv/b", "absent": true}],
//!   "then":      [{"put": {"key": "/kv/a", "value": "1"}}, {"delete": {"key": "/kv/c"}}],
//!   "otherwise": [{"get": {"key": "/kv/a"}}]
//! }
//! ```
//! A compare has one condition. An operation is an object with one member. A value is `value`, which is text, or
//! `value_base64`. What has a name that is not known is refused: a guard that was misspelt would guard nothing.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use lake_client::store::Committed;
use lake_proto::coordination::{LeaseId, ScopeOwner};
use lake_proto::kv::{Compare, Condition, Op, OpResult, Revision, Txn};
use lake_proto::limits::MAX_PAGE_ENTRIES;
use serde::Deserialize;
use serde_json::{Value, json};

use super::output::{committed_json, entries_json, entry_json, from_base64};

/// A transaction, as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TxnDocument {
    when: Vec<CompareDocument>,
    then: Vec<OpDocument>,
    otherwise: Vec<OpDocument>,
}

/// A compare: what it is about, and one condition.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CompareDocument {
    // What it is about.
    key: Option<String>,
    prefix: Option<String>,
    path: Option<String>,
    // Of a key.
    absent: Option<bool>,
    mod_revision: Option<Revision>,
    create_revision: Option<Revision>,
    version: Option<u64>,
    value: Option<String>,
    value_base64: Option<String>,
    // Of a prefix.
    empty: Option<bool>,
    unchanged_since: Option<Revision>,
    // Of a path.
    scope_free: Option<bool>,
    owner: Option<OwnerDocument>,
    // Of nothing else.
    lease_alive: Option<LeaseId>,
    entry_term: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum OwnerDocument {
    Lease(LeaseId),
    Procedure(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum OpDocument {
    Put(PutDocument),
    Delete(DeleteDocument),
    Get(KeyDocument),
    List(ListDocument),
    AcquireScope(ScopeDocument),
    ReleaseScope(ScopeDocument),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PutDocument {
    key: String,
    value: Option<String>,
    value_base64: Option<String>,
    lease: Option<LeaseId>,
    #[serde(default)]
    return_previous: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeleteDocument {
    key: String,
    #[serde(default)]
    return_previous: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyDocument {
    key: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListDocument {
    prefix: String,
    limit: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeDocument {
    path: String,
    owner: OwnerDocument,
}

/// Reads a document.
///
/// # Errors
/// It is no JSON, has a member that means nothing, or a compare without exactly one condition; the message says where.
pub fn parse(document: &[u8]) -> Result<Txn> {
    const DOING: &str = "the transaction cannot be read";
    let shape: Value = serde_json::from_slice(document).context(DOING)?;
    objects_only(&shape).context(DOING)?;
    let document: TxnDocument = serde_json::from_slice(document).context(DOING)?;
    let compares = document.when.into_iter().enumerate();
    let when = compares.map(|(n, compare)| compare.read().with_context(|| format!("when[{n}]")));
    let then = document.then.into_iter().enumerate();
    let then = then.map(|(n, op)| op.read().with_context(|| format!("then[{n}]")));
    let otherwise = document.otherwise.into_iter().enumerate();
    let otherwise = otherwise.map(|(n, op)| op.read().with_context(|| format!("otherwise[{n}]")));
    Ok(Txn {
        when: when.collect::<Result<_>>()?,
        then: then.collect::<Result<_>>()?,
        otherwise: otherwise.collect::<Result<_>>()?,
    })
}

/// Lists stand for the three parts and nowhere else: what reads objects would take one for an object's members in order.
fn objects_only(document: &Value) -> Result<()> {
    fn no_list(value: &Value) -> bool {
        match value {
            Value::Array(_) => false,
            Value::Object(members) => members.values().all(no_list),
            _ => true,
        }
    }
    let Value::Object(members) = document else { bail!("it is no object") };
    for (name, member) in members {
        let items = member.as_array().map_or(std::slice::from_ref(member), Vec::as_slice);
        if let Some(n) = items.iter().position(|item| !no_list(item)) {
            bail!("{name}[{n}]: there is a list where an object or a text goes");
        }
    }
    Ok(())
}

impl CompareDocument {
    fn read(self) -> Result<Compare> {
        let about = [("key", self.key), ("prefix", self.prefix), ("path", self.path)];
        let mut about = about.into_iter().filter_map(|(name, text)| text.map(|text| (name, text)));
        let subject = about.next();
        if let (Some((one, _)), Some((other, _))) = (&subject, about.next()) {
            bail!("a compare is about a {one} or about a {other}, not about both");
        }
        let only_true = |name: &str, value: Option<bool>| match value {
            Some(false) => bail!("{name} can be true only"),
            value => Ok(value),
        };
        let value = value(self.value, self.value_base64)?;
        let owner = self.owner.map(OwnerDocument::read);
        let scope_free = only_true("scope_free", self.scope_free)?;
        if owner.is_some() && scope_free.is_none() {
            bail!("an owner goes with scope_free");
        }
        let conditions = [
            ("absent", "key", only_true("absent", self.absent)?.map(|_| Condition::Absent)),
            ("mod_revision", "key", self.mod_revision.map(Condition::ModRevision)),
            ("create_revision", "key", self.create_revision.map(Condition::CreateRevision)),
            ("version", "key", self.version.map(Condition::Version)),
            ("value", "key", value.map(Condition::Value)),
            ("empty", "prefix", only_true("empty", self.empty)?.map(|_| Condition::PrefixEmpty)),
            ("unchanged_since", "prefix", self.unchanged_since.map(Condition::PrefixUnchangedSince)),
            ("scope_free", "path", scope_free.map(|_| Condition::ScopeFree(owner))),
            ("lease_alive", "", self.lease_alive.map(Condition::LeaseAlive)),
            ("entry_term", "", self.entry_term.map(Condition::EntryTerm)),
        ];
        let names = conditions.each_ref().map(|(name, ..)| *name).join(", ");
        let mut given = conditions.into_iter().filter_map(|(name, of, c)| c.map(|condition| (name, of, condition)));
        let Some((name, of, condition)) = given.next() else {
            bail!("there is no condition; one of: {names}");
        };
        if let Some((other, ..)) = given.next() {
            bail!("a compare has one condition, and this one has {name} and {other}: write two");
        }
        match subject {
            None if of.is_empty() => Ok(Compare { key: String::new(), condition }),
            Some((about, key)) if about == of => Ok(Compare { key, condition }),
            Some((about, _)) if of.is_empty() => bail!("{name} is not about a {about}"),
            Some((about, _)) => bail!("{name} is about a {of}, and here is a {about}"),
            None => bail!("{name} is about a {of}, and there is none"),
        }
    }
}

impl OwnerDocument {
    fn read(self) -> ScopeOwner {
        match self {
            Self::Lease(id) => ScopeOwner::Lease(id),
            Self::Procedure(id) => ScopeOwner::Procedure(id),
        }
    }
}

impl OpDocument {
    fn read(self) -> Result<Op> {
        Ok(match self {
            Self::Put(put) => {
                let Some(value) = value(put.value, put.value_base64)? else {
                    bail!("a put has a value, or a value_base64");
                };
                Op::Put { key: put.key, value, return_previous: put.return_previous, lease: put.lease }
            }
            Self::Delete(delete) => Op::Delete { key: delete.key, return_previous: delete.return_previous },
            Self::Get(get) => Op::Get { key: get.key },
            Self::List(list) => Op::List { prefix: list.prefix, limit: list.limit.unwrap_or(MAX_PAGE_ENTRIES as u32) },
            Self::AcquireScope(scope) => Op::AcquireScope { path: scope.path, owner: scope.owner.read() },
            Self::ReleaseScope(scope) => Op::ReleaseScope { path: scope.path, owner: scope.owner.read() },
        })
    }
}

fn value(text: Option<String>, base64: Option<String>) -> Result<Option<Bytes>> {
    match (text, base64) {
        (Some(_), Some(_)) => bail!("a value is value or value_base64, not both"),
        (Some(text), None) => Ok(Some(text.into())),
        (None, Some(base64)) => Ok(Some(from_base64(&base64).context("value_base64")?.into())),
        (None, None) => Ok(None),
    }
}

/// What a transaction did.
pub fn answer(committed: &Committed) -> Value {
    let mut json = committed_json(committed);
    let branch = if committed.result.succeeded { "then" } else { "otherwise" };
    json.insert("branch".to_owned(), json!(branch));
    json.insert("results".to_owned(), committed.result.results.iter().map(result_json).collect());
    Value::Object(json)
}

fn result_json(result: &OpResult) -> Value {
    let entry = |entry: &Option<_>| entry.as_ref().map_or(Value::Null, entry_json);
    match result {
        OpResult::Put { previous } => json!({ "put": { "previous": entry(previous) } }),
        OpResult::Delete { deleted, previous } => {
            json!({ "delete": { "deleted": deleted, "previous": entry(previous) } })
        }
        OpResult::Get { entry: found } => json!({ "get": { "entry": entry(found) } }),
        OpResult::List { entries, more } => json!({ "list": { "entries": entries_json(entries), "more": more } }),
        OpResult::AcquireScope { fence } => json!({ "acquire_scope": { "fence": fence } }),
        OpResult::ReleaseScope { released } => json!({ "release_scope": { "released": released } }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_compare_and_operation_can_be_written() {
        let txn = parse(
            br#"{
                "when": [
                    {"key": "/kv/a", "absent": true},
                    {"key": "/kv/a", "mod_revision": 1},
                    {"key": "/kv/a", "create_revision": 2},
                    {"key": "/kv/a", "version": 3},
                    {"key": "/kv/a", "value": "v"},
                    {"key": "/kv/a", "value_base64": "/wA="},
                    {"prefix": "/kv/", "empty": true},
                    {"prefix": "", "unchanged_since": 4},
                    {"path": "/c/n", "scope_free": true},
                    {"path": "/c/n", "scope_free": true, "owner": {"lease": 5}},
                    {"lease_alive": 5},
                    {"entry_term": 6}
                ],
                "then": [
                    {"put": {"key": "/kv/a", "value": ""}},
                    {"put": {"key": "/kv/b", "value_base64": "/wA=", "lease": 5, "return_previous": true}},
                    {"delete": {"key": "/kv/a", "return_previous": true}},
                    {"acquire_scope": {"path": "/c/n", "owner": {"procedure": "p"}}},
                    {"release_scope": {"path": "/c/n", "owner": {"lease": 5}}}
                ],
                "otherwise": [{"get": {"key": "/kv/a"}}, {"list": {"prefix": "/kv/"}}, {"list": {"prefix": "", "limit": 7}}]
            }"#,
        )
        .unwrap();
        let of_a = |condition| Compare { key: "/kv/a".into(), condition };
        assert_eq!(
            txn.when,
            [
                of_a(Condition::Absent),
                of_a(Condition::ModRevision(1)),
                of_a(Condition::CreateRevision(2)),
                of_a(Condition::Version(3)),
                of_a(Condition::Value("v".into())),
                of_a(Condition::Value(vec![0xff, 0].into())),
                Compare::prefix_empty("/kv/"),
                Compare { key: String::new(), condition: Condition::PrefixUnchangedSince(4) },
                Compare::scope_free("/c/n", None),
                Compare::scope_free("/c/n", Some(ScopeOwner::Lease(5))),
                Compare::lease_alive(5),
                Compare { key: String::new(), condition: Condition::EntryTerm(6) },
            ]
        );
        let procedure = ScopeOwner::Procedure("p".into());
        assert_eq!(
            txn.then,
            [
                Op::put("/kv/a", ""),
                Op::Put { key: "/kv/b".into(), value: vec![0xff, 0].into(), return_previous: true, lease: Some(5) },
                Op::Delete { key: "/kv/a".into(), return_previous: true },
                Op::AcquireScope { path: "/c/n".into(), owner: procedure },
                Op::ReleaseScope { path: "/c/n".into(), owner: ScopeOwner::Lease(5) },
            ]
        );
        assert_eq!(
            txn.otherwise,
            [
                Op::Get { key: "/kv/a".into() },
                Op::List { prefix: "/kv/".into(), limit: 1000 },
                Op::List { prefix: String::new(), limit: 7 },
            ]
        );
        assert_eq!(parse(b"{}").unwrap(), Txn::default());
    }

    #[test]
    fn what_means_nothing_is_refused_and_the_place_is_named() {
        for (document, why) in [
            ("", "EOF"),
            ("[]", "cannot be read: it is no object"),
            (r#"{"when": [["/kv/a", true]]}"#, "when[0]: there is a list"),
            (r#"{"then": [{"get": {"key": "a"}}, {"get": ["a"]}]}"#, "then[1]: there is a list"),
            (r#"{"when": [], "if": []}"#, "unknown field `if`"),
            (r#"{"when": [{"key": "/kv/a"}]}"#, "when[0]: there is no condition; one of: absent, mod_revision"),
            (r#"{"when": [{"key": "/kv/a", "absent": true, "version": 1}]}"#, "absent and version: write two"),
            (r#"{"when": [{"key": "/kv/a", "absent": false}]}"#, "absent can be true only"),
            (r#"{"when": [{"key": "/kv/a", "mod_rev": 1}]}"#, "unknown field `mod_rev`"),
            (r#"{"when": [{"absent": true}]}"#, "absent is about a key, and there is none"),
            (r#"{"when": [{"prefix": "/kv/", "absent": true}]}"#, "about a key, and here is a prefix"),
            (r#"{"when": [{"key": "/kv/a", "lease_alive": 1}]}"#, "lease_alive is not about a key"),
            (r#"{"when": [{"key": "a", "prefix": "b", "empty": true}]}"#, "not about both"),
            (r#"{"when": [{"key": "a", "version": 1, "owner": {"lease": 1}}]}"#, "an owner goes with scope_free"),
            (r#"{"when": [{"key": "a", "version": -1}]}"#, "line 1 column"),
            (r#"{"then": [{"get": {"key": "a"}}, {"put": {"key": "a"}}]}"#, "then[1]: a put has a value"),
            (r#"{"then": [{"put": {"key": "a", "value": "", "value_base64": ""}}]}"#, "not both"),
            (
                r#"{"otherwise": [{"put": {"key": "a", "value_base64": "?"}}]}"#,
                "otherwise[0]: value_base64: not base64",
            ),
            (r#"{"then": [{"move": {"key": "a"}}]}"#, "unknown variant `move`, expected one of `put`"),
            (r#"{"then": [{"get": {"key": "a"}, "delete": {"key": "a"}}]}"#, "line 1 column"),
        ] {
            let message = format!("{:#}", parse(document.as_bytes()).unwrap_err());
            assert!(message.contains(why), "{document}: {message}");
        }
    }
}
