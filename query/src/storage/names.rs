//! What partition fields are called in manifests.
//!
//! Avro takes names of letters, digits and `_` only, and so a manifest has the field `s.a` as `s_x2Ea`, while the partition spec in its
//! head still says `s.a`. The iceberg crate does not know of that: it finds no values under the name that the head says, and writes
//! names as they are, so that nobody can read the manifest. So it is given both as they are in the manifest. Nor does it read a manifest of a
//! spec with a void field whose column was dropped: it is shown one.

use std::borrow::Cow;
use std::collections::HashSet;

use bytes::Bytes;
use iceberg::spec::PartitionSpec;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::table::sound;

/// What every Avro file begins with.
const MAGIC: &[u8] = b"Obj\x01";
/// The entry of a manifest's head that has the fields of its partition spec.
const SPEC: &[u8] = b"partition-spec";
/// And the one with the table's schema.
const SCHEMA: &[u8] = b"schema";

/// A name as a manifest has it, by the rule that the other engines follow.
pub fn in_manifest(name: &str) -> String {
    let mut made = String::with_capacity(name.len());
    for (i, c) in name.chars().enumerate() {
        match c {
            '_' | 'a'..='z' | 'A'..='Z' => made.push(c),
            '0'..='9' if i > 0 => made.push(c),
            '0'..='9' => made.extend(['_', c]),
            _ => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| made.push_str(&format!("_x{unit:X}"))),
        }
    }
    made
}

/// A partition spec as a manifest has it.
///
/// # Errors
/// `Internal` if it cannot be made.
pub fn spec_in_manifest(spec: &PartitionSpec) -> Result<PartitionSpec> {
    if spec.fields().iter().all(|field| in_manifest(&field.name) == field.name) {
        return Ok(spec.clone());
    }
    let failed = |e| Error::internal(format!("naming the fields of partition spec {}: {e}", spec.spec_id()));
    let mut json = serde_json::to_value(spec).map_err(failed)?;
    if let Some(fields) = json.get_mut("fields").and_then(Value::as_array_mut) {
        rename(fields);
    }
    serde_json::from_value(json).map_err(failed)
}

/// An Avro file whose head names partition fields as its schema does, and has a column for each. What is no manifest is as it was.
pub fn settled(file: Bytes) -> Bytes {
    match settle(&file) {
        Some(settled) => settled.into(),
        None => file,
    }
}

/// `None` where there is nothing to settle.
fn settle(file: &[u8]) -> Option<Vec<u8>> {
    let mut rest = file.strip_prefix(MAGIC)?;
    let mut head: Vec<(&[u8], Cow<'_, [u8]>)> = Vec::new();
    loop {
        let entries = long(&mut rest)?;
        if entries == 0 {
            break;
        }
        if entries < 0 {
            // The size of the entries in bytes, with which they could be skipped.
            long(&mut rest)?;
        }
        for _ in 0..entries.unsigned_abs() {
            head.push((chunk(&mut rest)?, chunk(&mut rest)?.into()));
        }
    }
    let json = |key: &[u8]| {
        let (at, (_, value)) = head.iter().enumerate().find(|(_, (found, _))| *found == key)?;
        Some((at, serde_json::from_slice::<Value>(value).ok()?))
    };
    let (spec_at, mut spec) = json(SPEC)?;
    let is_odd = |field: &Value| {
        let text = |key: &str| field.get(key).and_then(Value::as_str);
        text("transform") == Some("void") || text("name").is_some_and(|name| in_manifest(name) != name)
    };
    if !spec.as_array()?.iter().any(is_odd) {
        return None;
    }
    let (schema_at, mut schema) = json(SCHEMA)?;
    let added = add_columns(spec.as_array()?, &mut schema);
    if !rename(spec.as_array_mut()?) && !added {
        return None;
    }
    for (at, value) in [(spec_at, spec), (schema_at, schema)] {
        head.get_mut(at)?.1 = serde_json::to_vec(&value).ok()?.into();
    }
    let mut settled = MAGIC.to_vec();
    put_length(head.len(), &mut settled);
    for part in head.iter().flat_map(|(key, value)| [*key, value.as_ref()]) {
        put_length(part.len(), &mut settled);
        settled.extend(part);
    }
    put_length(0, &mut settled);
    settled.extend(rest);
    Some(settled)
}

/// Gives the schema a column for each void field whose own is gone: such fields are null. Whether there are any.
fn add_columns(spec: &[Value], schema: &mut Value) -> bool {
    let mut ids = HashSet::new();
    sound::ids_in(schema, &mut ids);
    let Some(columns) = schema.get_mut("fields").and_then(Value::as_array_mut) else { return false };
    let gone =
        spec.iter().filter(|field| sound::is_void_of_gone(field, &ids)).filter_map(|field| field.get("source-id"));
    let before = columns.len();
    // Whatever bounds there are of the column, they are bytes.
    columns.extend(gone.map(|id| json!({"id": id, "name": format!("gone-{id}"), "required": false, "type": "binary"})));
    columns.len() > before
}

/// Whether there was something to rename.
fn rename(fields: &mut [Value]) -> bool {
    let mut renamed = false;
    for name in fields.iter_mut().filter_map(|field| field.get_mut("name")) {
        let made = name.as_str().map(in_manifest);
        if let Some(made) = made.filter(|made| name.as_str() != Some(made)) {
            *name = made.into();
            renamed = true;
        }
    }
    renamed
}

/// A number of Avro's, off the front of `rest`.
fn long(rest: &mut &[u8]) -> Option<i64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, more) = rest.split_first()?;
        *rest = more;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value >> 1) as i64 ^ -((value & 1) as i64));
        }
    }
    None
}

/// Bytes with their length before them, off the front of `rest`.
fn chunk<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(long(rest)?).ok()?;
    let (chunk, more) = rest.split_at_checked(length)?;
    *rest = more;
    Some(chunk)
}

fn put_length(length: usize, into: &mut Vec<u8>) {
    let mut value = (length as u64) << 1;
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_other_engines_write_them() {
        for (name, expected) in [
            ("day", "day"),
            ("s.a", "s_x2Ea"),
            ("b c_trunc", "b_x20c_trunc"),
            ("9lives9", "_9lives9"),
            ("ü", "_xFC"),
            ("😎", "_xD83D_xDE0E"),
        ] {
            assert_eq!(in_manifest(name), expected);
        }
    }

    /// With a schema that has these columns besides.
    fn manifest(name: &str, more: &str) -> Vec<u8> {
        let spec = format!(
            r#"[{{"field-id":1000,"name":"{name}","source-id":1,"transform":"identity"}},{{"field-id":1001,"name":"v","source-id":2,"transform":"void"}}]"#
        );
        let schema =
            format!(r#"{{"fields":[{{"id":1,"name":"a","required":false,"type":"int"}}{more}],"type":"struct"}}"#);
        let mut file = MAGIC.to_vec();
        put_length(3, &mut file);
        for (key, value) in [("schema", schema.as_str()), ("partition-spec", spec.as_str()), ("content", "data")] {
            for text in [key, value] {
                put_length(text.len(), &mut file);
                file.extend(text.as_bytes());
            }
        }
        file.push(0);
        file.extend([7; 40]);
        file
    }

    #[test]
    fn a_head_says_what_the_schema_says() {
        let there = r#",{"id":2,"name":"b","required":false,"type":"int"}"#;
        let stands_in = r#",{"id":2,"name":"gone-2","required":false,"type":"binary"}"#;
        let odd = manifest("s.a", there);
        assert_eq!(settled(odd.clone().into()), manifest("s_x2Ea", there));
        assert_eq!(settled(manifest("day", there).into()), manifest("day", there));
        assert_eq!(settled(manifest("day", "").into()), manifest("day", stands_in));
        assert_eq!(settled(manifest("s.a", "").into()), manifest("s_x2Ea", stands_in));
        for end in 0..odd.len() - 48 {
            // However short: then it is for others to say what is wrong.
            let cut = odd[..end].to_vec();
            assert_eq!(settled(cut.clone().into()), cut);
        }
        for other in [&b"PAR1"[..], b"", b"Obj\x01", b"Obj\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"] {
            assert_eq!(settled(other.to_vec().into()), other);
        }
    }
}
