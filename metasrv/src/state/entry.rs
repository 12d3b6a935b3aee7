//! A key and what the map holds under it, in one piece of memory: of a million small entries, pointers and the pieces'
//! own overhead would otherwise take as much as the values.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::sync::Arc;

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision};

/// Values of at least this many bytes are handed out without copying them.
const SHARED_VALUE_BYTES: usize = 4 << 10;
const HEADER_BYTES: usize = 4 * 8 + 4;

/// An entry, in order of its key. Cheap to clone.
///
/// Layout: version, create revision, mod revision, lease (0: none), length of the key, key, value; little endian.
#[derive(Clone)]
pub(super) struct Entry(Arc<[u8]>);

/// What an entry holds beside key and value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    pub version: u64,
    pub create_revision: Revision,
    pub mod_revision: Revision,
    pub lease: Option<LeaseId>,
}

impl Entry {
    pub(super) fn new(key: &str, value: &[u8], numbers: Numbers) -> Self {
        let Numbers { version, create_revision, mod_revision, lease } = numbers;
        let mut header = [0; HEADER_BYTES];
        for (n, number) in [version, create_revision, mod_revision, lease.unwrap_or(0)].into_iter().enumerate() {
            header[8 * n..8 * n + 8].copy_from_slice(&number.to_le_bytes());
        }
        header[32..].copy_from_slice(&(key.len() as u32).to_le_bytes());
        Self([&header, key.as_bytes(), value].concat().into())
    }

    pub(super) fn of(entry: &KeyValue) -> Self {
        let KeyValue { key, value, version, create_revision, mod_revision, lease } = entry;
        let (version, create_revision, mod_revision, lease) = (*version, *create_revision, *mod_revision, *lease);
        Self::new(key, value, Numbers { version, create_revision, mod_revision, lease })
    }

    fn number(&self, n: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[8 * n..8 * n + 8]);
        u64::from_le_bytes(bytes)
    }

    fn key_end(&self) -> usize {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[32..HEADER_BYTES]);
        HEADER_BYTES + u32::from_le_bytes(bytes) as usize
    }

    fn key_bytes(&self) -> &[u8] {
        &self.0[HEADER_BYTES..self.key_end()]
    }

    pub(super) fn key(&self) -> &str {
        std::str::from_utf8(self.key_bytes()).expect("it was made of a str")
    }

    pub(super) fn value(&self) -> &[u8] {
        &self.0[self.key_end()..]
    }

    pub(super) fn mod_revision(&self) -> Revision {
        self.number(2)
    }

    pub(super) fn lease(&self) -> Option<LeaseId> {
        // Ids are revisions, and the first is 1.
        Some(self.number(3)).filter(|id| *id != 0)
    }

    pub(super) fn numbers(&self) -> Numbers {
        Numbers {
            version: self.number(0),
            create_revision: self.number(1),
            mod_revision: self.mod_revision(),
            lease: self.lease(),
        }
    }

    /// Bytes of the key and the value.
    pub(super) fn size(&self) -> u64 {
        (self.0.len() - HEADER_BYTES) as u64
    }

    pub(super) fn key_value(&self) -> KeyValue {
        let Numbers { version, create_revision, mod_revision, lease } = self.numbers();
        let value = match self.value() {
            small if small.len() < SHARED_VALUE_BYTES => Bytes::copy_from_slice(small),
            _ => Bytes::from_owner(self.0.clone()).slice(self.key_end()..),
        };
        KeyValue { key: self.key().to_owned(), value, version, create_revision, mod_revision, lease }
    }

    /// Whether everything in it is the same, and not only the key.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.key_value().fmt(f)
    }
}

impl Borrow<[u8]> for Entry {
    fn borrow(&self) -> &[u8] {
        self.key_bytes()
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key_bytes() == other.key_bytes()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key_bytes().cmp(other.key_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        for (value, lease) in [(0, None), (10, Some(7)), (SHARED_VALUE_BYTES, None), (1 << 20, Some(u64::MAX))] {
            let whole = KeyValue {
                key: format!("/kv/ü{value}"),
                value: vec![5; value].into(),
                version: 1,
                create_revision: 2,
                mod_revision: u64::MAX,
                lease,
            };
            let entry = Entry::of(&whole);
            assert_eq!(entry.key_value(), whole);
            assert_eq!(entry.size(), (whole.key.len() + value) as u64);
            assert!(entry.is_same(&Entry::of(&whole)));
            assert!(!entry.is_same(&Entry::of(&KeyValue { version: 2, ..whole.clone() })));
            assert_eq!(entry, Entry::of(&KeyValue { version: 2, ..whole }), "in order of the key alone");
        }
    }
}
