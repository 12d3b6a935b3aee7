//! A key and what the map holds under it, in one piece of memory: of a million small entries, pointers and the pieces'
//! own overhead would otherwise take as much as the values.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::sync::Arc;

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision};

use super::restore::EntryRef;

/// Values of at least this many bytes are handed out without copying them.
const SHARED_VALUE_BYTES: usize = 4 << 10;

/// An entry, in order of its key. Cheap to clone.
///
/// Layout: the key's length, the key, version, create revision, how far the mod revision is beyond it, lease (0: none), the
/// value. Numbers have seven bits a byte, the lowest first. The key comes first because it is what the map compares; the
/// numbers are packed because there are millions of them.
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

/// All that an entry holds, read in one go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts<'a> {
    pub key: &'a [u8],
    pub numbers: Numbers,
    pub value: &'a [u8],
}

impl<'a> Parts<'a> {
    pub(super) fn key(&self) -> &'a str {
        std::str::from_utf8(self.key).expect("it was made of a str")
    }

    /// Bytes of the key and the value.
    pub(super) fn size(&self) -> u64 {
        (self.key.len() + self.value.len()) as u64
    }
}

/// What an entry is put together in before it gets memory of its own.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<u8>);

impl Scratch {
    /// The entry of these parts.
    pub(super) fn entry(&mut self, key: &str, value: &[u8], numbers: Numbers) -> Entry {
        let Numbers { version, create_revision, mod_revision, lease } = numbers;
        let bytes = &mut self.0;
        bytes.clear();
        put_number(bytes, key.len() as u64);
        bytes.extend_from_slice(key.as_bytes());
        // Wrapping, and back: what a damaged snapshot says must not end the process before its hash is compared.
        let beyond = mod_revision.wrapping_sub(create_revision);
        for number in [version, create_revision, beyond, lease.unwrap_or(0)] {
            put_number(bytes, number);
        }
        bytes.extend_from_slice(value);
        Entry(Arc::from(&bytes[..]))
    }

    /// The entry of what was read or received.
    pub(super) fn entry_of(&mut self, entry: EntryRef<'_>) -> Entry {
        let EntryRef { key, value, version, create_revision, mod_revision, lease } = entry;
        self.entry(key, value, Numbers { version, create_revision, mod_revision, lease })
    }
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_number(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    while let Some((byte, rest)) = bytes.split_first() {
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
        shift += 7;
    }
    number
}

impl Entry {
    /// The key, and what is behind it.
    fn split(&self) -> (&[u8], &[u8]) {
        let mut rest = &self.0[..];
        // So it is with nearly every key, and every step of every search in the map comes here.
        if let Some((len, rest)) = rest.split_first()
            && *len < 0x80
        {
            return rest.split_at(usize::from(*len));
        }
        let len = take_number(&mut rest) as usize;
        rest.split_at(len)
    }

    pub(super) fn key_bytes(&self) -> &[u8] {
        self.split().0
    }

    /// All of it.
    pub(super) fn parts(&self) -> Parts<'_> {
        let (key, mut rest) = self.split();
        let version = take_number(&mut rest);
        let create_revision = take_number(&mut rest);
        let mod_revision = create_revision.wrapping_add(take_number(&mut rest));
        // Ids are revisions, and the first is 1.
        let lease = Some(take_number(&mut rest)).filter(|id| *id != 0);
        Parts { key, numbers: Numbers { version, create_revision, mod_revision, lease }, value: rest }
    }

    pub(super) fn key(&self) -> &str {
        std::str::from_utf8(self.key_bytes()).expect("it was made of a str")
    }

    pub(super) fn value(&self) -> &[u8] {
        self.parts().value
    }

    pub(super) fn mod_revision(&self) -> Revision {
        self.numbers().mod_revision
    }

    pub(super) fn numbers(&self) -> Numbers {
        self.parts().numbers
    }

    /// Bytes of the key and the value.
    pub(super) fn size(&self) -> u64 {
        self.parts().size()
    }

    /// As it lies here.
    pub(super) fn entry_ref(&self) -> EntryRef<'_> {
        let parts = self.parts();
        let Numbers { version, create_revision, mod_revision, lease } = parts.numbers;
        EntryRef { key: parts.key(), value: parts.value, version, create_revision, mod_revision, lease }
    }

    pub(super) fn key_value(&self) -> KeyValue {
        let parts = self.parts();
        let Numbers { version, create_revision, mod_revision, lease } = parts.numbers;
        let value = match parts.value {
            small if small.len() < SHARED_VALUE_BYTES => Bytes::copy_from_slice(small),
            large => Bytes::from_owner(self.0.clone()).slice(self.0.len() - large.len()..),
        };
        KeyValue { key: parts.key().to_owned(), value, version, create_revision, mod_revision, lease }
    }

    /// How many share it.
    #[cfg(test)]
    pub(super) fn shared_by(&self) -> usize {
        Arc::strong_count(&self.0)
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

    fn of(entry: &KeyValue) -> Entry {
        Scratch::default().entry_of(EntryRef::of(entry))
    }

    #[test]
    fn what_goes_in_comes_out() {
        let cases = [
            (0, 1, 1, u64::MAX, None),
            (10, 127, 128, 300, Some(7)),
            (127, 4096, 5, 5, None),
            (SHARED_VALUE_BYTES, 128, 16_383, 16_384, None),
            // No state holds this; a damaged file may.
            (20, 2, u64::MAX, 1, Some(1)),
            (20, 0, 1, 1, None),
            (1 << 20, 12, u64::MAX, u64::MAX, Some(u64::MAX)),
        ];
        for (value, key, create_revision, mod_revision, lease) in cases {
            let whole = KeyValue {
                key: "k".repeat(key),
                value: vec![5; value].into(),
                version: 1,
                create_revision,
                mod_revision,
                lease,
            };
            let entry = of(&whole);
            assert_eq!(entry.key_value(), whole);
            assert_eq!(entry.size(), (whole.key.len() + value) as u64);
            assert!(entry.is_same(&of(&whole)));
            assert!(!entry.is_same(&of(&KeyValue { version: 2, ..whole.clone() })));
            assert_eq!(entry, of(&KeyValue { version: 2, ..whole }), "in order of the key alone");
        }
    }
}
