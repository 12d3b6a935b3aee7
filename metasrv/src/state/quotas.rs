//! Limits on the bytes of keys and values, of the whole map and under prefixes.
//!
//! A transaction that would leave more than a quota where there was less is refused; one that shrinks, or changes in
//! place, always passes, so that deletes work at the limit.

use std::sync::Arc;

use super::command::Refusal;
use super::hash::{self, StateHash};

/// Quotas at once.
pub const MAX_QUOTAS: usize = 64;
/// The whole map's, until another is set.
pub const DEFAULT_QUOTA_BYTES: u64 = 4 << 30;

/// What may lie under a prefix, and what does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    pub limit_bytes: u64,
    pub used_bytes: u64,
}

impl Quota {
    /// Whether it is time to warn: four fifths are used.
    pub fn is_nearly_full(&self) -> bool {
        self.used_bytes >= self.limit_bytes - self.limit_bytes / 5
    }
}

/// All quotas by prefix; the empty one is the whole map's. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Quotas {
    /// In order of their prefixes. Few, and the whole map's is almost always the only one.
    by_prefix: Arc<Vec<(Arc<str>, Quota)>>,
}

impl Quotas {
    pub fn len(&self) -> usize {
        self.by_prefix.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, Quota)> {
        self.by_prefix.iter().map(|(prefix, quota)| (&**prefix, *quota))
    }

    pub fn contains(&self, prefix: &str) -> bool {
        self.find(prefix).is_ok()
    }

    /// What lies under a prefix that has a limit.
    pub fn used_bytes(&self, prefix: &str) -> Option<u64> {
        self.find(prefix).ok().map(|at| self.by_prefix[at].1.used_bytes)
    }

    fn find(&self, prefix: &str) -> Result<usize, usize> {
        self.by_prefix.binary_search_by(|(held, _)| (**held).cmp(prefix))
    }

    /// Sets or lifts a limit; `used_bytes` is what lies under the prefix now.
    pub fn set(&mut self, prefix: &str, limit_bytes: Option<u64>, used_bytes: u64, hash: &mut StateHash) {
        let found = self.find(prefix);
        let quotas = Arc::make_mut(&mut self.by_prefix);
        if let Ok(at) = found {
            let (_, old) = quotas.remove(at);
            hash.remove(hash::quota(prefix, old.limit_bytes));
        }
        if let Some(limit_bytes) = limit_bytes {
            hash.add(hash::quota(prefix, limit_bytes));
            let (Ok(at) | Err(at)) = found;
            quotas.insert(at, (prefix.into(), Quota { limit_bytes, used_bytes }));
        }
    }

    /// There is more under a key, which is taken as it lies in an entry: every write comes here.
    pub fn grown(&mut self, key: &[u8], bytes: u64) {
        self.each(key, |quota| quota.used_bytes += bytes);
    }

    /// There is less.
    pub fn shrunk(&mut self, key: &[u8], bytes: u64) {
        self.each(key, |quota| quota.used_bytes -= bytes);
    }

    fn each(&mut self, key: &[u8], change: impl Fn(&mut Quota)) {
        for (prefix, quota) in Arc::make_mut(&mut self.by_prefix) {
            if key.starts_with(prefix.as_bytes()) {
                change(quota);
            }
        }
    }

    /// Refuses what would grow by these amounts beyond a limit. `growth` has each key's, which may be negative. It takes a search
    /// in the map for each key, and is not asked where there is room for the most that they can be together.
    pub fn check<'a>(&self, most: u64, growth: impl Iterator<Item = (&'a str, i64)> + Clone) -> Result<(), Refusal> {
        for (prefix, quota) in self.by_prefix.iter() {
            if quota.used_bytes.saturating_add(most) <= quota.limit_bytes {
                continue;
            }
            let grows: i64 = growth.clone().filter(|(key, _)| key.starts_with(&**prefix)).map(|(_, bytes)| bytes).sum();
            if grows > 0 && quota.used_bytes.saturating_add_signed(grows) > quota.limit_bytes {
                return Err(Refusal::QuotaExceeded {
                    prefix: prefix.to_string(),
                    limit: quota.limit_bytes,
                    used: quota.used_bytes,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_asked_for_only_where_the_most_it_can_be_does_not_fit() {
        let mut quotas = Quotas::default();
        quotas.set("", Some(100), 60, &mut StateHash::default());
        quotas.set("/kv/a", Some(30), 10, &mut StateHash::default());
        let never = [()].into_iter().map(|()| -> (&'static str, i64) { panic!("it fits whatever is there") });
        assert_eq!(quotas.check(20, never), Ok(()));
        let growth = |bytes| [("/kv/a/1", bytes), ("/kv/b", 15)].into_iter();
        assert_eq!(quotas.check(36, growth(20)), Ok(()));
        let refused = |prefix: &str, limit, used| Err(Refusal::QuotaExceeded { prefix: prefix.into(), limit, used });
        assert_eq!(quotas.check(36, growth(21)), refused("/kv/a", 30, 10));
        assert_eq!(quotas.check(41, growth(26)), refused("", 100, 60));
        assert_eq!(quotas.check(1_000, growth(-15)), Ok(()), "it only changes in place");
        assert_eq!(quotas.check(u64::MAX, growth(20)), Ok(()));
    }
}
