//! Warehouses: namespaces whose tables live in a place of their own.
//!
//! Every query node is configured with the warehouse `lake`, where the tables of most namespaces live. Besides it there may
//! be up to [`MAX_WAREHOUSES`] more. Each is a namespace of one level, and what is in it, or in a namespace nested in it,
//! is stored under the root that its [`Profile`] names.
//!
//! ```text
//! /lake/warehouses         all profiles, by name
//! /lake/catalog/<name>     the namespace, made and dropped in the same transaction as its profile
//! ```
//! One key holds all profiles, so that no two warehouses can take the same place at the same time: what a new one is
//! compared with is what its transaction compares. That also bounds them.
//!
//! A profile names secrets, by the file or the environment variable in which query nodes find them; it never holds them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use lake_proto::kv::{Compare, Op, Revision, Txn};
use serde::{Deserialize, Serialize};

use crate::catalog::{Catalog, CatalogError, MAX_RACES, Namespace, claimed, encode, find};
use crate::procedures::purge_warehouse::of_warehouse;
use crate::store::ReadOptions;

/// The warehouse of every node's own configuration.
pub const DEFAULT: &str = "lake";
/// Most warehouses besides [`DEFAULT`].
pub const MAX_WAREHOUSES: usize = 256;
/// Longest root, endpoint, region or reference, in bytes.
const MAX_TEXT_BYTES: usize = 1024;
/// The key of all profiles.
pub(crate) const KEY: &str = "/lake/warehouses";

/// Where a warehouse's tables are, and how they are reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// `file:///dir` or `s3://bucket/prefix`, without a slash at the end.
    pub root: String,
    /// How S3 is reached, where it is not as the nodes' own configuration says. Only with a root on S3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3>,
}

/// How S3 is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct S3 {
    /// A URL; AWS without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Whether buckets are named in the path, not in the host's name.
    #[serde(default)]
    pub path_style: bool,
    /// Where query nodes find the access key ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_key: Option<SecretRef>,
    /// ... and the secret key. Both, or neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key: Option<SecretRef>,
}

/// Where a secret is found on every query node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SecretRef {
    /// In this environment variable.
    Env(String),
    /// In this file, by its absolute path: its first line.
    File(String),
}

impl FromStr for SecretRef {
    type Err = String;

    /// `env:NAME` or `file:/path`.
    fn from_str(text: &str) -> Result<Self, String> {
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match text.split_once(':') {
            _ if text.len() > MAX_TEXT_BYTES => Err(format!("it is longer than {MAX_TEXT_BYTES} bytes")),
            Some(("env", variable)) if !variable.is_empty() && variable.chars().all(name) => {
                Ok(Self::Env(variable.to_owned()))
            }
            Some(("file", path)) if path.starts_with('/') => Ok(Self::File(path.to_owned())),
            // Not repeated: it may be the secret itself.
            _ => Err("say where query nodes find it, as env:NAME or file:/path, and not what it is".to_owned()),
        }
    }
}

impl TryFrom<String> for SecretRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SecretRef> for String {
    fn from(reference: SecretRef) -> Self {
        reference.to_string()
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(variable) => write!(f, "env:{variable}"),
            Self::File(path) => write!(f, "file:{path}"),
        }
    }
}

impl Profile {
    /// A profile of this root.
    ///
    /// # Errors
    /// Says what is wrong with which part.
    pub fn new(root: &str, s3: Option<S3>) -> Result<Self, String> {
        let root = root_uri(root).map_err(|why| format!("root: {root:?} {why}"))?;
        if !root.starts_with("s3://") {
            return match s3 {
                None => Ok(Self { root, s3: None }),
                Some(_) => Err(format!("root: {root} is not on S3, and how S3 is reached was told")),
            };
        }
        if let Some(s3) = &s3 {
            for (field, text) in [("s3-endpoint", &s3.endpoint), ("s3-region", &s3.region)] {
                if text.as_ref().is_some_and(|text| text.is_empty() || text.len() > MAX_TEXT_BYTES) {
                    return Err(format!("{field}: it has 1 to {MAX_TEXT_BYTES} bytes"));
                }
            }
            let is_url = |text: &String| text.starts_with("http://") || text.starts_with("https://");
            if let Some(endpoint) = s3.endpoint.as_ref().filter(|endpoint| !is_url(endpoint)) {
                return Err(format!("s3-endpoint: {endpoint:?} is not a URL; it begins with http:// or https://"));
            }
            if s3.endpoint.as_ref().is_some_and(|endpoint| endpoint.contains('@')) {
                return Err("s3-endpoint: it must hold no name or password".to_owned());
            }
            if s3.access_key.is_some() != s3.secret_key.is_some() {
                return Err("s3-access-key and s3-secret-key go together".to_owned());
            }
        }
        Ok(Self { root, s3 })
    }

    /// The bucket of the root, if it is on S3.
    pub fn bucket(&self) -> Option<&str> {
        bucket(&self.root)
    }

    /// Whether a location is under the root.
    pub fn holds(&self, location: &str) -> bool {
        is_under(location, &self.root)
    }
}

/// The bucket of a location, if it is on S3; some engines write `s3a://`.
pub fn bucket(location: &str) -> Option<&str> {
    let rest = location.strip_prefix("s3://").or_else(|| location.strip_prefix("s3a://"))?;
    Some(rest.split_once('/').map_or(rest, |(bucket, _)| bucket))
}

/// Whether a location is inside of a root.
pub fn is_under(location: &str, root: &str) -> bool {
    location.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'))
}

/// Whether one of two roots is the other, or inside of it.
pub fn overlap(one: &str, other: &str) -> bool {
    one == other || is_under(one, other) || is_under(other, one)
}

/// The root of a warehouse as it is kept: `file:///dir` or `s3://bucket/prefix`, without a slash at the end.
///
/// # Errors
/// Says what is wrong, to be read behind the text.
pub fn root_uri(text: &str) -> Result<String, String> {
    let wrong = |why: &str| Err(format!("{why}; use file:///dir or s3://bucket/prefix"));
    if text.len() > MAX_TEXT_BYTES {
        return Err(format!("is longer than {MAX_TEXT_BYTES} bytes"));
    }
    let trimmed = text.trim_end_matches('/');
    let (scheme, path) = match trimmed.split_once("://") {
        Some((scheme @ ("file" | "s3"), path)) => (scheme, path),
        Some((scheme, _)) => return wrong(&format!("has the scheme {scheme}, which is not supported")),
        None if trimmed == "file:" || trimmed == "s3:" => return wrong("names no place"),
        None => return wrong("is not a URI"),
    };
    let parts = match scheme {
        "file" if !path.starts_with('/') => return wrong("names a host"),
        "file" => &path[1..],
        _ if path.split('/').next().is_none_or(str::is_empty) => return wrong("names no bucket"),
        _ => path,
    };
    match parts.split('/').any(|part| matches!(part, "" | "." | "..")) {
        true => wrong("must hold neither . nor .. nor an empty part"),
        false => Ok(trimmed.to_owned()),
    }
}

/// The warehouses that there are, besides [`DEFAULT`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warehouses {
    pub profiles: BTreeMap<String, Profile>,
    /// The state of the metadata that this is of.
    pub revision: Revision,
    /// Of the key; 0: there is none.
    pub mod_revision: Revision,
}

impl Warehouses {
    /// The profile of the warehouse that a namespace is in; `None`: it is in [`DEFAULT`].
    pub fn of(&self, namespace: &Namespace) -> Option<&Profile> {
        self.profiles.get(namespace.levels().first()?)
    }

    /// The profiles with one more, or with one in the place of another.
    fn with(&self, name: &str, profile: &Profile) -> Result<BTreeMap<String, Profile>, String> {
        let mut profiles = self.profiles.clone();
        profiles.remove(name);
        if profiles.len() >= MAX_WAREHOUSES {
            return Err(format!("there are {MAX_WAREHOUSES} warehouses already, which is the limit"));
        }
        for (other, there) in &profiles {
            if overlap(&there.root, &profile.root) {
                return Err(format!(
                    "its root {} and that of warehouse {other}, {}, overlap",
                    profile.root, there.root
                ));
            }
            if let Some(bucket) = profile.bucket().filter(|bucket| there.bucket() == Some(*bucket))
                && there.s3 != profile.s3
            {
                return Err(format!(
                    "warehouse {other} is in the bucket {bucket} too, and reaches it otherwise: the two must agree"
                ));
            }
        }
        profiles.insert(name.to_owned(), profile.clone());
        Ok(profiles)
    }

    fn unchanged(&self) -> Compare {
        match self.mod_revision {
            0 => Compare::absent(KEY),
            revision => Compare::mod_revision(KEY, revision),
        }
    }
}

/// Why a warehouse was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WarehouseError {
    #[error("warehouse {name}: {why}; nothing was changed")]
    Refused { name: String, why: String },
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}

/// How much is in a warehouse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Holdings {
    pub tables: usize,
    pub views: usize,
    /// Nested in its own.
    pub namespaces: usize,
}

/// What is asked of a warehouse.
#[derive(Debug, Clone, Copy)]
enum Wish<'a> {
    Create(&'a Profile),
    Change(&'a Profile),
    Remove,
}

impl Catalog {
    /// The warehouses that there are.
    ///
    /// # Errors
    /// The store's; `Damaged`.
    pub async fn warehouses(&self, deadline: Instant) -> Result<Warehouses, CatalogError> {
        let read = self.store().get(KEY, ReadOptions::default(), deadline).await?;
        let Some(entry) = read.value else {
            return Ok(Warehouses { revision: read.revision, ..Warehouses::default() });
        };
        let profiles = serde_json::from_slice(&entry.value)
            .map_err(|e| CatalogError::Damaged { what: "the warehouses".to_owned(), why: e.to_string() })?;
        Ok(Warehouses { profiles, revision: read.revision, mod_revision: entry.mod_revision })
    }

    /// Makes a warehouse, and the namespace of its name.
    ///
    /// # Errors
    /// `Refused` if the name is taken, or its place is another's.
    pub async fn create_warehouse(
        &self,
        name: &str,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<(), WarehouseError> {
        self.change_warehouses(name, Wish::Create(profile), deadline).await
    }

    /// Gives a warehouse another profile. What it has stays where it is: so the root stays in its bucket, or on files.
    ///
    /// # Errors
    /// `Refused` if there is none, or its place is another's.
    pub async fn change_warehouse(
        &self,
        name: &str,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<(), WarehouseError> {
        self.change_warehouses(name, Wish::Change(profile), deadline).await
    }

    /// Removes a warehouse with nothing in it, and its namespace. Objects stay.
    ///
    /// # Errors
    /// `Refused` if there is none; `NamespaceNotEmpty`.
    pub async fn remove_warehouse(&self, name: &str, deadline: Instant) -> Result<(), WarehouseError> {
        self.change_warehouses(name, Wish::Remove, deadline).await
    }

    /// How much is in a warehouse, and would go with it.
    ///
    /// # Errors
    /// `Refused` if there is none; the store's.
    pub async fn holdings(&self, name: &str, deadline: Instant) -> Result<Holdings, WarehouseError> {
        if !self.warehouses(deadline).await?.profiles.contains_key(name) {
            return Err(WarehouseError::Refused { name: name.to_owned(), why: "it does not exist".to_owned() });
        }
        let mut all = Holdings::default();
        let is_in = |namespace: &Namespace| namespace.levels().first().is_some_and(|level| level == name);
        for namespace in self.list_namespaces(deadline).await?.into_iter().filter(is_in) {
            all.namespaces += usize::from(namespace.levels().len() > 1);
            match (self.list_tables(&namespace, deadline).await, self.list_views(&namespace, deadline).await) {
                (Ok(tables), Ok(views)) => {
                    all.tables += tables.len();
                    all.views += views.len();
                }
                // Dropped in between.
                (Err(CatalogError::NamespaceNotFound(_)), _) | (_, Err(CatalogError::NamespaceNotFound(_))) => {}
                (Err(error), _) | (_, Err(error)) => return Err(error.into()),
            }
        }
        Ok(all)
    }

    /// Has the cluster's leader drop all that is in a warehouse, have the files of its tables deleted, and remove it
    /// ([`crate::procedures::purge_warehouse`]). Returns the id of the procedure, which has begun with that.
    ///
    /// # Errors
    /// `Refused` if there is none; `ScopeHeld`, as while it is being purged already; the store's.
    pub async fn submit_warehouse_purge(
        &self,
        name: &str,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<String, WarehouseError> {
        let refused = |why: String| Err(WarehouseError::Refused { name: name.to_owned(), why });
        for _ in 0..MAX_RACES {
            let known = self.warehouses(deadline).await?;
            if !known.profiles.contains_key(name) {
                return refused("it does not exist".to_owned());
            }
            let (id, record) = of_warehouse(name, known.mod_revision, now_unix_ms)?;
            let mut txn = record.submission(&id);
            txn.when.push(known.unchanged());
            let committed = self.store().commit(txn, deadline).await.map_err(CatalogError::from)?;
            // By an attempt of ours whose answer was lost: another's of the same moment holds the scope.
            let is_there = find(&committed.result.observed, &crate::procedures::key(&id)).is_some();
            if committed.result.succeeded || committed.resent && is_there {
                return Ok(id);
            }
            claimed(&committed.result)?;
        }
        refused(format!("others changed the warehouses {MAX_RACES} times in between; try again"))
    }

    async fn change_warehouses(&self, name: &str, wish: Wish<'_>, deadline: Instant) -> Result<(), WarehouseError> {
        let mut in_doubt = false;
        let changed = self.change_warehouses_noting(name, wish, &mut in_doubt, deadline).await;
        changed.map_err(|error| match error {
            WarehouseError::Refused { why, .. } if in_doubt => {
                CatalogError::InDoubt { met: format!("warehouse {name}: {why}") }.into()
            }
            WarehouseError::Catalog(error) => error.after_doubt(in_doubt).into(),
            refused => refused,
        })
    }

    /// The same. Says whether an attempt whose answer was lost may have been applied.
    async fn change_warehouses_noting(
        &self,
        name: &str,
        wish: Wish<'_>,
        in_doubt: &mut bool,
        deadline: Instant,
    ) -> Result<(), WarehouseError> {
        let refused = |why: String| Err(WarehouseError::Refused { name: name.to_owned(), why });
        let namespace = Namespace::new([name])?;
        if name == DEFAULT {
            return refused("it is the warehouse of the query nodes' own configuration".to_owned());
        }
        let key = namespace.key();
        for _ in 0..MAX_RACES {
            let known = self.warehouses(deadline).await?;
            let mut when = vec![known.unchanged()];
            when.extend(self.unclaimed(namespace.scope_path()));
            let mut then = Vec::new();
            let profiles = match (known.profiles.get(name), wish) {
                (Some(there), Wish::Create(wanted) | Wish::Change(wanted)) if *in_doubt && there == wanted => {
                    return Ok(());
                }
                (None, Wish::Remove) if *in_doubt => return Ok(()),
                // Either others were first, or they have undone it: what they did stays.
                _ if *in_doubt => return refused("others have changed the warehouses in between".to_owned()),
                (Some(_), Wish::Create(_)) => return refused("it exists already".to_owned()),
                (None, Wish::Change(_) | Wish::Remove) => return refused("it does not exist".to_owned()),
                (None, Wish::Create(profile)) => {
                    namespace.check_new()?;
                    when.push(Compare::absent(&key));
                    then.push(Op::put(&key, Namespace::without_properties(&key)?));
                    known.with(name, profile)
                }
                (Some(there), Wish::Change(profile)) => {
                    if there.bucket() != profile.bucket() {
                        let why = format!("what it has is under {}: another place needs another warehouse", there.root);
                        return refused(why);
                    }
                    known.with(name, profile)
                }
                (Some(_), Wish::Remove) => {
                    // Without its namespace it is half of a warehouse, and goes as well.
                    if let Some(entry) = self
                        .store()
                        .get(&key, ReadOptions::default(), deadline)
                        .await
                        .map_err(CatalogError::from)?
                        .value
                    {
                        when.push(Compare::mod_revision(&key, entry.mod_revision));
                        then.push(Op::delete(&key));
                    }
                    when.extend(namespace.contents().iter().map(Compare::prefix_empty));
                    let mut profiles = known.profiles.clone();
                    profiles.remove(name);
                    Ok(profiles)
                }
            };
            let profiles = match profiles {
                Ok(profiles) => profiles,
                Err(why) => return refused(why),
            };
            then.push(Op::put(KEY, encode(&profiles, KEY)?));
            let committed = self.store().commit(Txn { when, then, otherwise: vec![] }, deadline).await;
            let committed = committed.map_err(CatalogError::from)?;
            if committed.result.succeeded {
                return Ok(());
            }
            let observed = &committed.result.observed;
            // Every change writes the profiles: as they were, none was applied.
            let is_as_before = find(observed, KEY).map_or(0, |entry| entry.mod_revision) == known.mod_revision;
            *in_doubt |= committed.resent && !is_as_before;
            claimed(&committed.result)?;
            if matches!(wish, Wish::Create(_)) && !*in_doubt && find(observed, &key).is_some() {
                return refused(format!("there is a namespace {name}, and a warehouse is one of its own"));
            }
            if matches!(wish, Wish::Remove)
                && observed.iter().any(|entry| namespace.contents().iter().any(|prefix| entry.key.starts_with(prefix)))
            {
                return Err(CatalogError::NamespaceNotEmpty(namespace).into());
            }
        }
        refused(format!("others changed the warehouses {MAX_RACES} times in between; try again"))
    }

    /// The compare that a namespace is no warehouse, for a transaction that drops it.
    ///
    /// # Errors
    /// `IsWarehouse`; the store's.
    pub(crate) async fn no_warehouse(
        &self,
        namespace: &Namespace,
        deadline: Instant,
    ) -> Result<Option<Compare>, CatalogError> {
        if namespace.parent().is_some() {
            return Ok(None);
        }
        let known = self.warehouses(deadline).await?;
        match known.of(namespace) {
            Some(_) => Err(CatalogError::IsWarehouse(namespace.clone())),
            None => Ok(Some(known.unchanged())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock;
    use crate::memory::MemoryStore;

    fn soon() -> Instant {
        clock::now() + Duration::from_secs(5)
    }

    fn on_s3(root: &str, endpoint: &str) -> Profile {
        let s3 = S3 { endpoint: Some(endpoint.to_owned()), path_style: true, ..S3::default() };
        Profile::new(root, Some(s3)).unwrap()
    }

    #[test]
    fn a_root_is_a_place_of_its_own() {
        assert_eq!(root_uri("file:///a/b/").unwrap(), "file:///a/b");
        assert_eq!(root_uri("s3://b").unwrap(), "s3://b");
        assert_eq!([bucket("s3://b/x"), bucket("s3a://b/x"), bucket("file:///b")], [Some("b"), Some("b"), None]);
        for wrong in [
            "",
            "/",
            "/a",
            "file:///",
            "file://host/a",
            "s3://",
            "s3:///a",
            "hdfs://a/b",
            "file:///a/../b",
            "s3://b//c",
        ] {
            assert!(root_uri(wrong).is_err(), "{wrong}");
        }
        assert!(overlap("s3://b/a", "s3://b/a/c") && overlap("s3://b", "s3://b/a") && overlap("s3://b", "s3://b"));
        assert!(!overlap("s3://b/a", "s3://b/ab") && !overlap("s3://b/a", "file:///b/a"));
    }

    #[test]
    fn a_profile_holds_no_secrets() {
        for wrong in ["AKIAEXAMPLE", "env:A B", "file:relative", "env:$(x)"] {
            let error = wrong.parse::<SecretRef>().unwrap_err();
            assert!(!error.contains(wrong), "{error}");
        }
        assert!("env:".parse::<SecretRef>().is_err() && "".parse::<SecretRef>().is_err());
        assert_eq!("env:KEY_1".parse::<SecretRef>().unwrap().to_string(), "env:KEY_1");
        let one = S3 { access_key: Some(SecretRef::Env("A".into())), ..S3::default() };
        assert!(Profile::new("s3://b/p", Some(one)).unwrap_err().contains("go together"));
        assert!(Profile::new("file:///b/p", Some(S3::default())).is_err());
        let with_password = S3 { endpoint: Some("http://a:b@c".into()), ..S3::default() };
        assert!(Profile::new("s3://b", Some(with_password)).is_err());
    }

    #[tokio::test]
    async fn a_warehouse_and_its_namespace_come_and_go_together() {
        let catalog = Catalog::new(MemoryStore::shared());
        let profile = on_s3("s3://b/p", "http://s3");
        catalog.create_warehouse("w", &profile, soon()).await.unwrap();
        let namespace = Namespace::new(["w"]).unwrap();
        assert!(catalog.namespace_exists(&namespace, soon()).await.unwrap());
        let known = catalog.warehouses(soon()).await.unwrap();
        assert_eq!(known.of(&Namespace::new(["w", "n"]).unwrap()), Some(&profile));
        assert_eq!(known.of(&Namespace::new(["n", "w"]).unwrap()), None);
        let error = catalog.drop_namespace(&namespace, soon()).await.unwrap_err();
        assert_eq!(error, CatalogError::IsWarehouse(namespace.clone()));
        let error = catalog.drop_namespace_and_contents(&namespace, None, soon()).await.unwrap_err();
        assert_eq!(error, CatalogError::IsWarehouse(namespace.clone()));
        let nested = Namespace::new(["w", "n"]).unwrap();
        catalog.create_namespace(&nested, BTreeMap::new(), soon()).await.unwrap();
        let error = catalog.remove_warehouse("w", soon()).await.unwrap_err();
        assert_eq!(error, WarehouseError::Catalog(CatalogError::NamespaceNotEmpty(namespace.clone())));
        catalog.drop_namespace(&nested, soon()).await.unwrap();
        catalog.remove_warehouse("w", soon()).await.unwrap();
        assert!(!catalog.namespace_exists(&namespace, soon()).await.unwrap());
        assert!(catalog.warehouses(soon()).await.unwrap().profiles.is_empty());
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        let error = catalog.create_warehouse("w", &profile, soon()).await.unwrap_err();
        assert!(error.to_string().contains("there is a namespace w"), "{error}");
        catalog.drop_namespace(&namespace, soon()).await.unwrap();
    }

    #[tokio::test]
    async fn no_warehouse_takes_anothers_place() {
        let catalog = Catalog::new(MemoryStore::shared());
        let create = async |name: &str, profile: Profile| catalog.create_warehouse(name, &profile, soon()).await;
        create("w", on_s3("s3://b/p", "http://s3")).await.unwrap();
        create("x", on_s3("s3://b/q", "http://s3")).await.unwrap();
        for (name, profile, why) in [
            ("w", on_s3("s3://c", "http://s3"), "exists already"),
            (DEFAULT, on_s3("s3://c", "http://s3"), "own configuration"),
            ("y", on_s3("s3://b/p/in", "http://s3"), "overlap"),
            ("y", on_s3("s3://b", "http://s3"), "overlap"),
            ("y", on_s3("s3://b/r", "http://other"), "must agree"),
        ] {
            let error = create(name, profile).await.unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        let moved = catalog.change_warehouse("x", &on_s3("s3://c/q", "http://s3"), soon()).await.unwrap_err();
        assert!(moved.to_string().contains("another place needs another warehouse"), "{moved}");
        catalog.change_warehouse("x", &on_s3("s3://b/q2", "http://s3"), soon()).await.unwrap();
        let missing = catalog.change_warehouse("z", &on_s3("s3://c", "http://s3"), soon()).await.unwrap_err();
        assert!(missing.to_string().contains("does not exist"), "{missing}");
    }

    #[tokio::test]
    async fn of_those_that_take_one_place_at_once_one_gets_it() {
        let catalog = Catalog::new(MemoryStore::shared());
        let profile = on_s3("s3://b/p", "http://s3");
        let names: Vec<String> = (0..8).map(|i| format!("w{i}")).collect();
        let all = names.iter().map(|name| catalog.create_warehouse(name, &profile, soon()));
        let made = futures::future::join_all(all).await.into_iter().filter(Result::is_ok).count();
        assert_eq!((made, catalog.warehouses(soon()).await.unwrap().profiles.len()), (1, 1));
    }
}
