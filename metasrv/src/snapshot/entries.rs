//! A snapshot's record of an entry, read and written where it lies: nearly all records are of entries, and what passes through a
//! message of its own on the way has memory of its own for its key and its value, which costs more than all else.
//!
//! What is written is byte for byte what a [`v1::SnapshotRecord`](lake_proto::v1::SnapshotRecord) is encoded to. What is read is only
//! what has the form in which it is written; anything else is for the message's decoder to judge.

use lake_proto::kv::Revision;
use prost::encoding::{decode_varint, encode_varint, encoded_len_varint};

use crate::state::restore::EntryRef;

/// `entry` of the record: field 3, a message.
const ENTRY: u8 = 3 << 3 | 2;
/// `key` and `value` of that: fields 1 and 2, texts or bytes.
const KEY: u8 = 1 << 3 | 2;
const VALUE: u8 = 2 << 3 | 2;
/// `version`, `create_revision`, `mod_revision` and `lease`: fields 3 to 6, numbers.
const NUMBERS: [u8; 4] = [3 << 3, 4 << 3, 5 << 3, 6 << 3];

fn numbers(entry: &EntryRef<'_>) -> [Revision; 4] {
    [entry.version, entry.create_revision, entry.mod_revision, entry.lease.unwrap_or(0)]
}

/// Adds the record of an entry. What is empty or 0 is left out.
pub fn encode(entry: &EntryRef<'_>, out: &mut Vec<u8>) {
    let texts = [(KEY, entry.key.as_bytes()), (VALUE, entry.value)];
    let texts = || texts.into_iter().filter(|(_, text)| !text.is_empty());
    let numbers = || NUMBERS.into_iter().zip(numbers(entry)).filter(|(_, number)| *number != 0);
    let of_texts: usize = texts().map(|(_, text)| 1 + encoded_len_varint(text.len() as u64) + text.len()).sum();
    let of_numbers: usize = numbers().map(|(_, number)| 1 + encoded_len_varint(number)).sum();
    out.push(ENTRY);
    encode_varint((of_texts + of_numbers) as u64, out);
    for (field, text) in texts() {
        out.push(field);
        encode_varint(text.len() as u64, out);
        out.extend_from_slice(text);
    }
    for (field, number) in numbers() {
        out.push(field);
        encode_varint(number, out);
    }
}

/// The entry that a record holds, if it has the form in which it is written.
pub fn decode(record: &[u8]) -> Option<EntryRef<'_>> {
    let mut rest = record;
    if !begins(&mut rest, ENTRY) || decode_varint(&mut rest).ok()? != rest.len() as u64 {
        return None;
    }
    let key = text(&mut rest, KEY)?;
    let value = text(&mut rest, VALUE)?;
    let mut numbers = [0; 4];
    for (field, number) in NUMBERS.into_iter().zip(&mut numbers) {
        if begins(&mut rest, field) {
            *number = decode_varint(&mut rest).ok()?;
        }
    }
    let [version, create_revision, mod_revision, lease] = numbers;
    let key = std::str::from_utf8(key).ok()?;
    let lease = Some(lease).filter(|lease| *lease != 0);
    rest.is_empty().then_some(EntryRef { key, value, version, create_revision, mod_revision, lease })
}

/// Takes a field's number and kind, if it is that which comes next.
fn begins(rest: &mut &[u8], field: u8) -> bool {
    match rest.strip_prefix(&[field]) {
        Some(behind) => {
            *rest = behind;
            true
        }
        None => false,
    }
}

/// Takes a text, which is empty where it is left out. `None`: it does not end.
fn text<'a>(rest: &mut &'a [u8], field: u8) -> Option<&'a [u8]> {
    if !begins(rest, field) {
        return Some(&[]);
    }
    let len = usize::try_from(decode_varint(rest).ok()?).ok()?;
    let (text, behind) = rest.split_at_checked(len)?;
    *rest = behind;
    Some(text)
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::KeyValue;
    use lake_proto::v1;
    use lake_proto::v1::snapshot_record::Record;
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 0..300_u64, any::<u64>()]
    }

    fn entry() -> impl Strategy<Value = KeyValue> {
        let value = proptest::collection::vec(any::<u8>(), 0..400);
        (".{0,80}", value, number(), number(), number(), number()).prop_map(
            |(key, value, version, create_revision, mod_revision, lease)| {
                let lease = Some(lease).filter(|lease| *lease != 0);
                KeyValue { key, value: value.into(), version, create_revision, mod_revision, lease }
            },
        )
    }

    fn as_message(entry: &KeyValue) -> Vec<u8> {
        v1::SnapshotRecord { record: Some(Record::Entry(entry.clone().into())) }.encode_to_vec()
    }

    proptest! {
        #[test]
        fn a_record_is_the_same_bytes_as_the_message(entry in entry()) {
            let mut bytes = b"before".to_vec();
            encode(&EntryRef::of(&entry), &mut bytes);
            prop_assert_eq!(&bytes[6..], as_message(&entry));
            prop_assert_eq!(decode(&bytes[6..]), Some(EntryRef::of(&entry)));
        }

        /// Whatever is read here is read so by the message's decoder, too.
        #[test]
        fn nothing_is_read_that_the_message_is_not(
            entry in entry(),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in proptest::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = as_message(&entry);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Some(read) = decode(&bytes) {
                let message = v1::SnapshotRecord::decode(&bytes[..]);
                let Some(Record::Entry(entry)) = message.unwrap().record else { panic!("it is none") };
                let entry = KeyValue::from(entry);
                prop_assert_eq!(read, EntryRef::of(&entry));
            }
        }
    }

    #[test]
    fn what_has_another_form_is_left_to_the_message() {
        let entry = KeyValue {
            key: "/kv/a".into(),
            value: "v".into(),
            version: 1,
            create_revision: 2,
            mod_revision: 3,
            lease: None,
        };
        let good = as_message(&entry);
        assert!(decode(&good).is_some());
        let lease = v1::snapshot_record::Lease { id: 1, ..v1::snapshot_record::Lease::default() };
        let other = v1::SnapshotRecord { record: Some(Record::Lease(lease)) }.encode_to_vec();
        for bytes in [&other[..], &[], &good[..good.len() - 1], &[&good[..], &[0x20, 1]].concat()] {
            assert_eq!(decode(bytes), None, "{bytes:?}");
        }
    }
}
