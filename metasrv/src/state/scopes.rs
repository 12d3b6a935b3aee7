//! Scopes: claims on paths of the hierarchy (semantics, section 6).
//!
//! At any time no two live scopes of different owners are equal, or one the other's ancestor. `/a/b` and `/a/bc` are
//! neither.

use std::ops::Bound;
use std::sync::Arc;

use imbl::OrdMap;
use lake_proto::coordination::{Scope, ScopeOwner};
use lake_proto::kv::Revision;

use super::hash::{self, StateHash};
use crate::planted::{self, Bug};

/// Live scopes at once.
pub const MAX_SCOPES: usize = 100_000;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    owner: ScopeOwner,
    fence: Revision,
    acquired_unix_ms: u64,
}

/// The live scopes. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Scopes {
    by_path: OrdMap<Arc<str>, Held>,
    /// Bytes of the paths, and of the names of procedures that own them.
    bytes: u64,
}

impl Scopes {
    pub fn len(&self) -> usize {
        self.by_path.len()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn is_held(&self, path: &str) -> bool {
        self.by_path.contains_key(path)
    }

    /// The owners of what is equal to `path`, of its ancestors and of its descendants.
    pub fn owners<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a ScopeOwner> + 'a {
        self.related(path).map(|(_, held)| &held.owner)
    }

    /// The scopes of other owners that are equal to `path`, its ancestors or its descendants, as far as they are found by
    /// looking at `left`, which counts down.
    pub fn conflicts<'a>(
        &'a self,
        path: &'a str,
        owner: Option<&'a ScopeOwner>,
        left: &'a mut usize,
    ) -> impl Iterator<Item = Scope> + 'a {
        self.related(path)
            .take_while(move |_| {
                let looks = *left > 0;
                *left = left.saturating_sub(1);
                looks
            })
            .filter(move |(_, held)| owner != Some(&held.owner))
            .map(|(path, held)| held.scope(path))
    }

    fn related<'a>(&'a self, path: &'a str) -> impl Iterator<Item = (&'a Arc<str>, &'a Held)> + 'a {
        let ancestors = ancestors(path).filter_map(|ancestor| self.by_path.get_key_value(ancestor));
        let below = if path == "/" { path.to_owned() } else { format!("{path}/") };
        let descendants = self
            .by_path
            .range::<_, str>((Bound::Excluded(below.as_str()), Bound::Unbounded))
            .take_while(move |(path, _)| path.starts_with(&below) && !planted::has(Bug::DescendantsIgnored));
        ancestors.chain(self.by_path.get_key_value(path)).chain(descendants)
    }

    /// Claims a path that is free for the owner; the fence of an earlier claim of the same owner stays.
    pub fn acquire(
        &mut self,
        path: &str,
        owner: &ScopeOwner,
        fence: Revision,
        acquired_unix_ms: u64,
        hash: &mut StateHash,
    ) -> Acquired {
        if let Some(held) = self.by_path.get(path) {
            return Acquired::Already(held.fence);
        }
        let held = Held { owner: owner.clone(), fence, acquired_unix_ms };
        hash.add(held.item(path));
        self.bytes += held.bytes(path);
        self.by_path.insert(Arc::from(path), held);
        Acquired::New
    }

    /// Lets a path go, if this owner holds it.
    pub fn release(&mut self, path: &str, owner: &ScopeOwner, hash: &mut StateHash) -> bool {
        match self.by_path.get(path) {
            Some(held) if held.owner == *owner => {
                hash.remove(held.item(path));
                self.bytes -= held.bytes(path);
                self.by_path.remove(path);
                true
            }
            _ => false,
        }
    }

    /// The scopes whose path begins with a prefix, behind a path, in order.
    pub fn list<'a>(&'a self, prefix: &'a str, after: &'a str) -> impl Iterator<Item = Scope> + 'a {
        let start = if after >= prefix && !after.is_empty() { Bound::Excluded(after) } else { Bound::Included(prefix) };
        self.by_path
            .range::<_, str>((start, Bound::Unbounded))
            .take_while(move |(path, _)| path.starts_with(prefix))
            .map(|(path, held)| held.scope(path))
    }
}

/// Whether a path was claimed anew.
pub(super) enum Acquired {
    New,
    /// Since this fence.
    Already(Revision),
}

impl Held {
    fn scope(&self, path: &str) -> Scope {
        Scope {
            path: path.to_owned(),
            owner: self.owner.clone(),
            fence: self.fence,
            acquired_unix_ms: self.acquired_unix_ms,
        }
    }

    fn bytes(&self, path: &str) -> u64 {
        let owner = match &self.owner {
            ScopeOwner::Lease(_) => 0,
            ScopeOwner::Procedure(id) => id.len(),
        };
        (path.len() + owner) as u64
    }

    fn item(&self, path: &str) -> hash::Item {
        hash::scope(path, &self.owner, self.fence, self.acquired_unix_ms)
    }
}

/// `/`, `/a`, `/a/b` for `/a/b/c`.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let root = (path != "/").then_some("/");
    root.into_iter().chain(path.match_indices('/').filter(|(at, _)| *at > 0).map(|(at, _)| &path[..at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(paths: &[(&str, u64)]) -> (Scopes, StateHash) {
        let (mut scopes, mut hash) = (Scopes::default(), StateHash::default());
        for (path, lease) in paths {
            scopes.acquire(path, &ScopeOwner::Lease(*lease), 1, 0, &mut hash);
        }
        (scopes, hash)
    }

    #[test]
    fn equal_ancestor_and_descendant_conflict_and_neighbours_do_not() {
        let (scopes, _) = held(&[("/a/b", 1)]);
        for (path, free) in [
            ("/a/b", false),
            ("/a", false),
            ("/", false),
            ("/a/b/c", false),
            ("/a/bc", true),
            ("/a/a", true),
            ("/b", true),
        ] {
            let is_free = |owner| scopes.conflicts(path, owner, &mut 100).next().is_none();
            assert_eq!(is_free(Some(&ScopeOwner::Lease(2))), free, "{path}");
            assert_eq!(is_free(None), free, "{path}");
            assert!(is_free(Some(&ScopeOwner::Lease(1))), "{path}: one's own");
        }
        let (scopes, _) = held(&[("/", 1)]);
        for path in ["/", "/x", "/x/y"] {
            assert_eq!(scopes.conflicts(path, None, &mut 100).count(), 1, "{path}");
        }
    }

    #[test]
    fn only_the_owner_releases_and_nothing_is_left() {
        let (mut scopes, mut hash) = held(&[("/a", 1)]);
        assert!(!scopes.release("/a", &ScopeOwner::Lease(2), &mut hash));
        assert!(!scopes.release("/b", &ScopeOwner::Lease(1), &mut hash));
        assert!(scopes.release("/a", &ScopeOwner::Lease(1), &mut hash));
        assert_eq!((scopes.len(), hash), (0, StateHash::default()));
    }

    #[test]
    fn ancestors_of_a_path() {
        assert_eq!(ancestors("/a/b/c").collect::<Vec<_>>(), ["/", "/a", "/a/b"]);
        assert_eq!(ancestors("/a").collect::<Vec<_>>(), ["/"]);
        assert_eq!(ancestors("/").count(), 0);
    }
}
