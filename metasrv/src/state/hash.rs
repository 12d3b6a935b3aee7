//! The incremental hash of the replicated state (semantics, section 1).
//!
//! The hash of a set is the sum of its items' hashes, so that an item is put in or taken out in constant time and order
//! does not matter. It finds defects and damaged memory, not an adversary. What is hashed, and how, belongs to the
//! feature level: two builds that hash differently must not run at one level.

use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::Revision;
use twox_hash::XxHash3_128;

use super::entry::{Entry, Parts};

/// The hash of everything in a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateHash(u128);

/// The hash of one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item(u128);

impl StateHash {
    pub fn add(&mut self, item: Item) {
        self.0 = self.0.wrapping_add(item.0);
    }

    pub fn remove(&mut self, item: Item) {
        self.0 = self.0.wrapping_sub(item.0);
    }

    /// With the numbers that are not items.
    pub fn digest(self, numbers: [u64; 3]) -> u128 {
        self.0.wrapping_add(item(Tag::Numbers, [], numbers).0)
    }
}

/// What kind of item it is: so that no two kinds can be taken for each other.
#[derive(Clone, Copy)]
enum Tag {
    Numbers = 1,
    Entry,
    Lease,
    Scope,
    Session,
    SessionLowest,
    Kept,
    Changed,
    Deleted,
    Quota,
    Peer,
}

/// Texts are hashed one by one, so that moving a byte from one to the next gives another hash.
fn item<const T: usize, const N: usize>(tag: Tag, texts: [&[u8]; T], numbers: [u64; N]) -> Item {
    const MAX: usize = 8 + 2 * 16 + 4 * 8;
    let mut bytes = [0u8; MAX];
    bytes[0] = tag as u8;
    let mut at = 8;
    let mut put = |part: &[u8]| {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    for text in texts {
        put(&XxHash3_128::oneshot(text).to_be_bytes());
    }
    for number in numbers {
        put(&number.to_be_bytes());
    }
    Item(XxHash3_128::oneshot(&bytes[..at]))
}

pub(super) fn entry(entry: &Parts<'_>) -> Item {
    let n = entry.numbers;
    let numbers = [n.version, n.create_revision, n.mod_revision, n.lease.unwrap_or(0)];
    item(Tag::Entry, [entry.key, entry.value], numbers)
}

pub(super) fn lease(id: u64, ttl_ms: u64, holder: &str) -> Item {
    item(Tag::Lease, [holder.as_bytes()], [id, ttl_ms])
}

pub(super) fn scope(path: &str, owner: &ScopeOwner, fence: Revision, acquired_unix_ms: u64) -> Item {
    match owner {
        ScopeOwner::Lease(id) => item(Tag::Scope, [path.as_bytes()], [*id, fence, acquired_unix_ms]),
        ScopeOwner::Procedure(id) => item(Tag::Scope, [path.as_bytes(), id.as_bytes()], [0, fence, acquired_unix_ms]),
    }
}

pub(super) fn session(id: u64, ttl_ms: u64, holder: &str) -> Item {
    item(Tag::Session, [holder.as_bytes()], [id, ttl_ms])
}

pub(super) fn session_lowest(id: u64, lowest: u64) -> Item {
    item(Tag::SessionLowest, [], [id, lowest])
}

pub(super) fn kept(session: u64, sequence: u64, outcome: &[u8]) -> Item {
    item(Tag::Kept, [outcome], [session, sequence])
}

pub(super) fn event(revision: Revision, key: &str, e: Option<&Entry>) -> Item {
    match e {
        Some(e) => item(Tag::Changed, [key.as_bytes(), &entry(&e.parts()).0.to_be_bytes()], [revision]),
        None => item(Tag::Deleted, [key.as_bytes()], [revision]),
    }
}

pub(super) fn quota(prefix: &str, bytes: u64) -> Item {
    item(Tag::Quota, [prefix.as_bytes()], [bytes])
}

pub(super) fn peer(id: u64, incarnation: &str, removed: bool) -> Item {
    item(Tag::Peer, [incarnation.as_bytes()], [id, u64::from(removed)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::entry::Numbers;

    #[test]
    fn order_does_not_matter_and_what_is_taken_out_is_gone() {
        let (a, b) = (lease(1, 2, "x"), quota("/kv/", 3));
        let mut one = StateHash::default();
        one.add(a);
        one.add(b);
        let mut other = StateHash::default();
        other.add(b);
        other.add(a);
        assert_eq!(one, other);
        other.remove(a);
        assert_ne!(one, other);
        other.remove(b);
        assert_eq!(other, StateHash::default());
    }

    #[test]
    fn fields_are_kept_apart() {
        assert_ne!(item(Tag::Entry, [b"ab", b"c"], []), item(Tag::Entry, [b"a", b"bc"], []));
        assert_ne!(lease(1, 2, ""), session(1, 2, ""));
        assert_ne!(session_lowest(1, 2), session_lowest(2, 1));
    }

    #[test]
    fn the_hash_is_the_same_in_every_build() {
        // Peers of different builds compare these: a change needs a new feature level.
        assert_eq!(lease(7, 10_000, "node 3").0, GOLDEN);
    }

    #[test]
    fn large_values_have_the_same_hash_on_every_processor() {
        // As the reference implementation has them. Above 240 bytes it depends on the processor how they are worked out.
        let golden = [
            (256, 297_161_267_521_942_803_744_183_838_942_357_488_190),
            (300, 318_740_792_310_376_902_477_833_342_312_264_706_782),
            (5_000, 312_796_376_541_434_683_638_267_717_895_007_427_716),
            (1 << 20, 248_602_757_861_799_966_248_119_183_972_228_349_798),
        ];
        let numbers = Numbers { version: 2, create_revision: 5, mod_revision: 9, lease: None };
        for (len, golden) in golden {
            let value: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            assert_eq!(entry(&Parts { key: b"/kv/a", numbers, value: &value }).0, golden, "{len} bytes");
        }
    }

    const GOLDEN: u128 = 44_966_161_729_482_175_566_751_054_171_706_249_984;
}
