//! What the metadata of a table must be for lake to read and write the table. Looked at where metadata comes in: what a client of the
//! REST catalog asks for, what a statement makes, what is registered. Pure: nothing is read here.
//!
//! Of a version that follows another only what is new is looked at: a table whose metadata came in before, and is not sound, can be read,
//! dropped and put right.

use std::collections::HashSet;
use std::sync::Arc;

use iceberg::spec::{
    Datum, NestedFieldRef, PartitionSpec, PrimitiveLiteral, PrimitiveType, Schema, SchemaRef, SortOrder, StructType,
    TableMetadata, Transform, Type, UnboundPartitionSpec,
};
use iceberg::transform::{BoxedTransformFunction, create_transform_function};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::storage::canonical;

/// Highest number of buckets, width of a truncation, and length of a fixed type: in Java, where the format comes from, they are ints.
const MAX_WIDTH: u32 = i32::MAX as u32;
/// Which transforms there are, for who asks for another.
pub const TRANSFORMS: &str =
    "there are identity, year, month, day, hour, void, bucket[N] and truncate[W], with N and W from 1 to 2147483647";
const DAY_MICROS: i64 = 24 * 3600 * 1_000_000;
/// Most digits of a decimal.
const MAX_PRECISION: u32 = 38;
/// Properties that say where engines write a table's files.
const PATHS: [&str; 4] =
    ["write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path"];

/// Checks a table's metadata; of a version that follows `base` only what is new in it.
///
/// # Errors
/// `Invalid`: names what is wrong, and says what is allowed.
pub fn check(next: &TableMetadata, base: Option<&TableMetadata>) -> Result<()> {
    let mut schemas: Vec<&SchemaRef> = next.schemas_iter().collect();
    schemas.sort_by_key(|schema| schema.schema_id());
    for schema in &schemas {
        let id = schema.schema_id();
        if base.and_then(|base| base.schema_by_id(id)).is_none_or(|old| !same(old, schema)) {
            check_schema(&format!("schema {id}"), schema)?;
        }
    }
    // A spec or an order that is not used any more may be of columns that were dropped since.
    let current: [&Schema; 1] = [next.current_schema()];
    let ever: Vec<&Schema> = current.into_iter().chain(schemas.iter().map(|schema| &***schema)).collect();
    for spec in next.partition_specs_iter() {
        let id = spec.spec_id();
        let is_default = id == next.default_partition_spec_id();
        let becomes_default = is_default && base.is_some_and(|base| base.default_partition_spec_id() != id);
        let old = base.and_then(|base| base.partition_spec_by_id(id));
        if becomes_default || old.is_none_or(|old| !same(old, spec)) {
            let at = format!("partition spec {id}");
            match is_default {
                true => check_columns(&at, of_spec(spec), &current, true)?,
                false => check_columns(&at, of_spec(spec), &ever, false)?,
            }
        }
    }
    for order in next.sort_orders_iter() {
        let id = order.order_id;
        let is_default = id == next.default_sort_order_id();
        let becomes_default = is_default && base.is_some_and(|base| base.default_sort_order_id() != id);
        let old = base.and_then(|base| base.sort_order_by_id(id));
        if becomes_default || old.is_none_or(|old| !same(old, order)) {
            let at = format!("sort order {id}");
            match is_default {
                true => check_columns(&at, of_order(order), &current, true)?,
                false => check_columns(&at, of_order(order), &ever, false)?,
            }
        }
    }
    check_snapshots(next, base)
}

fn same<T: PartialEq>(one: &Arc<T>, other: &Arc<T>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

/// The schemas that snapshots were written with are there.
fn check_snapshots(next: &TableMetadata, base: Option<&TableMetadata>) -> Result<()> {
    for snapshot in next.snapshots() {
        let (id, Some(schema)) = (snapshot.snapshot_id(), snapshot.schema_id()) else { continue };
        if next.schema_by_id(schema).is_some() {
            continue;
        }
        if base.is_some_and(|base| base.schema_by_id(schema).is_some()) {
            return Err(Error::invalid(format!(
                "schema {schema}: it cannot be removed while snapshot {id}, which was written with it, is there; let the snapshot \
                 expire first"
            )));
        }
        if base.and_then(|base| base.snapshot_by_id(id)).is_none_or(|old| old.schema_id() != Some(schema)) {
            let mut there: Vec<i32> = next.schemas_iter().map(|schema| schema.schema_id()).collect();
            there.sort_unstable();
            return Err(Error::invalid(format!("snapshot {id}: schema-id is {schema}, and the table has {there:?}")));
        }
    }
    Ok(())
}

/// Checks a schema: it has columns, and each has a type that there is.
///
/// # Errors
/// `Invalid`: begins with `at`, and names the column.
pub fn check_schema(at: &str, schema: &Schema) -> Result<()> {
    if schema.as_struct().fields().is_empty() {
        return Err(Error::invalid(format!("{at}: it has no columns, and a table needs at least one column")));
    }
    check_struct(at, "", schema.as_struct())
}

fn check_struct(at: &str, parent: &str, of: &StructType) -> Result<()> {
    of.fields().iter().try_for_each(|field| check_field(at, parent, field))
}

fn check_field(at: &str, parent: &str, field: &NestedFieldRef) -> Result<()> {
    let name = match parent {
        "" => field.name.clone(),
        parent => format!("{parent}.{}", field.name),
    };
    let wrong = |why: String| Err(Error::invalid(format!("{at}, column {name}: {why}")));
    match &*field.field_type {
        Type::Primitive(PrimitiveType::Decimal { precision, scale })
            if !(1..=MAX_PRECISION).contains(precision) || scale > precision =>
        {
            wrong(format!(
                "decimal({precision}, {scale}) is no type; the precision is from 1 to {MAX_PRECISION}, the scale from 0 to the \
                 precision"
            ))
        }
        Type::Primitive(PrimitiveType::Fixed(length)) if !(1..=u64::from(MAX_WIDTH)).contains(length) => {
            wrong(format!("fixed[{length}] is no type; the length is from 1 to {MAX_WIDTH}"))
        }
        Type::Primitive(_) => Ok(()),
        Type::Struct(parts) if parts.fields().is_empty() => {
            wrong("a struct without fields, which Parquet cannot hold; it needs at least one".to_owned())
        }
        Type::Struct(parts) => check_struct(at, &name, parts),
        Type::List(list) => check_field(at, &name, &list.element_field),
        Type::Map(map) => {
            check_field(at, &name, &map.key_field)?;
            check_field(at, &name, &map.value_field)
        }
    }
}

/// One field of a partition spec or a sort order: what it is called, the id of its column, and what is done with that.
type Of<'a> = (&'a str, i32, Transform);

fn of_spec(spec: &PartitionSpec) -> impl Iterator<Item = Of<'_>> {
    spec.fields().iter().map(|field| (field.name.as_str(), field.source_id, field.transform))
}

fn of_order(order: &SortOrder) -> impl Iterator<Item = Of<'_>> {
    order.fields.iter().map(|field| ("", field.source_id, field.transform))
}

/// Checks a partition spec that is asked for: its columns are in one of these schemas, of which the first that has one counts.
///
/// # Errors
/// `Invalid`: begins with `at`, and names the field.
pub fn check_spec(at: &str, spec: &UnboundPartitionSpec, schemas: &[&Schema]) -> Result<()> {
    let fields = spec.fields().iter().map(|field| (field.name.as_str(), field.source_id, field.transform));
    check_columns(at, fields, schemas, true)
}

/// Checks a sort order that is asked for, as [`check_spec`] does a partition spec.
///
/// # Errors
/// As [`check_spec`].
pub fn check_order(at: &str, order: &SortOrder, schemas: &[&Schema]) -> Result<()> {
    check_columns(at, of_order(order), schemas, true)
}

fn check_columns<'a>(
    at: &str,
    fields: impl Iterator<Item = Of<'a>>,
    schemas: &[&Schema],
    must_be_there: bool,
) -> Result<()> {
    for (i, (name, source, transform)) in fields.enumerate() {
        let field = if name.is_empty() { format!("{at}, fields[{i}]") } else { format!("{at}, field {name}") };
        // Orders are in no manifest.
        let fits = if name.is_empty() { misfit } else { part_misfit };
        let column = schemas.iter().find_map(|schema| schema.field_by_id(source));
        let why = match column {
            Some(column) => fits(transform, &column.field_type)
                .map(|why| format!("{transform} of column {}, which is {}: {why}", column.name, column.field_type)),
            None if must_be_there => Some(format!("there is no column with the id {source}, its source-id")),
            None => wrong_width(transform),
        };
        if let Some(why) = why {
            return Err(Error::invalid(format!("{field}: {why}")));
        }
    }
    Ok(())
}

/// Why a transform cannot be had of columns of a type, if so: what it takes.
pub fn misfit(transform: Transform, data_type: &Type) -> Option<String> {
    if let Some(why) = wrong_width(transform) {
        return Some(why);
    }
    let takes = match transform {
        Transform::Void | Transform::Unknown => return None,
        _ if transform.result_type(data_type).is_ok() => return None,
        Transform::Identity => "anything but a struct, list or map",
        Transform::Bucket(_) => "int, long, decimal, date, time, timestamp, string, uuid, fixed or binary",
        Transform::Truncate(_) => "int, long, decimal, string or binary",
        Transform::Year | Transform::Month | Transform::Day => "date or timestamp",
        Transform::Hour => "timestamp",
    };
    Some(format!("it takes {takes}"))
}

/// Why a table cannot be partitioned by a transform of columns of a type, if so.
pub fn part_misfit(transform: Transform, data_type: &Type) -> Option<String> {
    let nanos = matches!(data_type, Type::Primitive(PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs));
    match transform {
        // The iceberg crate writes such values into manifests, and does not take them back.
        Transform::Identity if nanos => Some(
            "lake reads no manifests that hold timestamps with nanoseconds: partition by hour, day or bucket of it"
                .to_owned(),
        ),
        _ => misfit(transform, data_type),
    }
}

fn wrong_width(transform: Transform) -> Option<String> {
    let (Transform::Bucket(width) | Transform::Truncate(width)) = transform else { return None };
    let fits = (1..=MAX_WIDTH).contains(&width);
    (!fits).then(|| format!("{transform} is no transform; its number is from 1 to {MAX_WIDTH}"))
}

/// What a transform does with values.
#[derive(Debug)]
pub struct Function {
    transform: Transform,
    function: BoxedTransformFunction,
}

impl Function {
    /// What it makes of a value.
    ///
    /// # Errors
    /// Where the value is of a type that the transform does not take, or the result of none.
    pub fn of(&self, value: &Datum) -> Result<Option<Datum>> {
        if self.transform == Transform::Identity {
            return Ok(Some(value.clone()));
        }
        let micros = match (value.data_type(), value.literal()) {
            (PrimitiveType::Timestamp | PrimitiveType::Timestamptz, PrimitiveLiteral::Long(micros)) => Some(*micros),
            // Nanoseconds count as the microsecond that they are in. The crate rounds those before 1970 up, into another bucket.
            (PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs, PrimitiveLiteral::Long(nanos)) => {
                Some(nanos.div_euclid(1000))
            }
            _ => None,
        };
        Ok(match (self.transform, micros) {
            // The crate has the last second of a day before 1970 in the next day.
            (Transform::Day, Some(micros)) => {
                Some(Datum::date(i32::try_from(micros.div_euclid(DAY_MICROS)).map_err(Error::internal)?))
            }
            (_, Some(micros)) => self.function.transform_literal(&Datum::timestamp_micros(micros))?,
            (_, None) => self.function.transform_literal(value)?,
        })
    }
}

/// What a transform does with values. One that is not sound would have the iceberg crate divide by 0.
///
/// # Errors
/// `NotSupported` for a transform that is not known, or not sound: it is in metadata that came in before that was looked at.
pub fn function(transform: Transform) -> Result<Function> {
    match wrong_width(transform) {
        Some(why) => Err(Error::not_supported(why)),
        None => {
            let function = create_transform_function(&transform).map_err(Error::not_supported)?;
            Ok(Function { transform, function })
        }
    }
}

/// Where a table's metadata says that files of it are, outside of its own location: what that is, and the place. Of a version that follows
/// `base` only what is new in it.
pub fn places(next: &TableMetadata, base: Option<&TableMetadata>) -> Vec<(String, String)> {
    let own = canonical(next.location().trim_end_matches('/'));
    let is_own = |place: &str| {
        let place = canonical(place);
        let rest = place.strip_prefix(own.as_str()).filter(|rest| rest.is_empty() || rest.starts_with('/'));
        rest.is_some_and(|rest| rest.split('/').all(|part| part != ".."))
    };
    let mut places: Vec<(String, String)> = Vec::new();
    let mut add = |what: String, place: &str, old: Option<&str>| {
        if old != Some(place) && !is_own(place) {
            places.push((what, place.to_owned()));
        }
    };
    for snapshot in next.snapshots() {
        let id = snapshot.snapshot_id();
        let old = base.and_then(|base| base.snapshot_by_id(id));
        add(format!("snapshot {id}, manifest-list"), snapshot.manifest_list(), old.map(|old| old.manifest_list()));
    }
    for file in next.statistics_iter() {
        let old = base.and_then(|base| base.statistics_for_snapshot(file.snapshot_id));
        let what = format!("statistics of snapshot {}, statistics-path", file.snapshot_id);
        add(what, &file.statistics_path, old.map(|old| old.statistics_path.as_str()));
    }
    for file in next.partition_statistics_iter() {
        let old = base.and_then(|base| base.partition_statistics_for_snapshot(file.snapshot_id));
        let what = format!("partition statistics of snapshot {}, statistics-path", file.snapshot_id);
        add(what, &file.statistics_path, old.map(|old| old.statistics_path.as_str()));
    }
    for name in PATHS {
        if let Some(place) = next.properties().get(name) {
            let old = base.and_then(|base| base.properties().get(name));
            add(format!("property {name}"), place, old.map(String::as_str));
        }
    }
    places
}

/// Metadata that the iceberg crate cannot read, because the default partition spec has void fields of columns that were dropped, as a table
/// has that was of format version 1: with a default spec of the other fields. The spec stays, for the files that are of it. `None` for any
/// other.
pub fn without_void_of_gone(mut metadata: Value) -> Option<Value> {
    let number = |of: &Value, key: &str| of.get(key).and_then(Value::as_i64);
    let schema_id = number(&metadata, "current-schema-id")?;
    let mut schemas = metadata.get("schemas")?.as_array()?.iter();
    let mut ids = HashSet::new();
    ids_in(schemas.find(|schema| number(schema, "schema-id") == Some(schema_id))?, &mut ids);
    let spec_id = number(&metadata, "default-spec-id")?;
    let specs = metadata.get_mut("partition-specs")?.as_array_mut()?;
    let default = specs.iter().find(|spec| number(spec, "spec-id") == Some(spec_id))?;
    let fields = default.get("fields")?.as_array()?;
    let kept: Vec<Value> = fields.iter().filter(|field| !is_void_of_gone(field, &ids)).cloned().collect();
    if kept.len() == fields.len() {
        return None;
    }
    let kept = Value::from(kept);
    let there = specs.iter().find(|spec| spec.get("fields") == Some(&kept)).and_then(|spec| number(spec, "spec-id"));
    let id = match there {
        Some(id) => id,
        None => {
            let id = specs.iter().filter_map(|spec| number(spec, "spec-id")).max()? + 1;
            specs.push(json!({"spec-id": id, "fields": kept}));
            id
        }
    };
    metadata["default-spec-id"] = id.into();
    Some(metadata)
}

/// Whether a field of a partition spec, as JSON, is void, and its column none of these.
pub fn is_void_of_gone(field: &Value, columns: &HashSet<i64>) -> bool {
    let source = field.get("source-id").and_then(Value::as_i64);
    field.get("transform").and_then(Value::as_str) == Some("void") && source.is_some_and(|id| !columns.contains(&id))
}

/// The ids of all columns, and parts of them, of a schema as JSON.
pub fn ids_in(schema: &Value, into: &mut HashSet<i64>) {
    match schema {
        Value::Array(parts) => parts.iter().for_each(|part| ids_in(part, into)),
        Value::Object(entries) => {
            let ids =
                ["id", "element-id", "key-id", "value-id"].into_iter().filter_map(|key| entries.get(key)?.as_i64());
            into.extend(ids);
            entries.values().for_each(|part| ids_in(part, into));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What makes sound metadata unsound.
    type Damage = Box<dyn FnOnce(&mut Value)>;

    fn metadata(change: impl FnOnce(&mut Value)) -> TableMetadata {
        let mut metadata = json!({
            "format-version": 2, "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1", "location": "file:///w/t",
            "last-updated-ms": 0, "last-sequence-number": 1, "last-column-id": 4, "last-partition-id": 1000,
            "current-schema-id": 1, "default-spec-id": 0, "default-sort-order-id": 0, "properties": {},
            "schemas": [
                {"type": "struct", "schema-id": 0, "fields": [
                    {"id": 1, "name": "k", "type": "long", "required": true},
                    {"id": 2, "name": "gone", "type": "date", "required": false}]},
                {"type": "struct", "schema-id": 1, "fields": [
                    {"id": 1, "name": "k", "type": "long", "required": true},
                    {"id": 3, "name": "s", "type": "string", "required": false},
                    {"id": 4, "name": "d", "type": "double", "required": false}]},
            ],
            "partition-specs": [
                {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "b", "transform": "bucket[4]"}]},
                {"spec-id": 1, "fields": [{"source-id": 2, "field-id": 1001, "name": "y", "transform": "year"}]},
            ],
            "sort-orders": [
                {"order-id": 0, "fields": []},
                {"order-id": 1, "fields": [
                    {"source-id": 2, "transform": "day", "direction": "asc", "null-order": "nulls-first"}]},
            ],
            "snapshots": [{
                "snapshot-id": 7, "sequence-number": 1, "timestamp-ms": 1, "schema-id": 0,
                "manifest-list": "file:///w/t/metadata/snap-7.avro", "summary": {"operation": "append"}}],
            "current-snapshot-id": 7,
        });
        change(&mut metadata);
        serde_json::from_value(metadata).unwrap()
    }

    #[test]
    fn what_lake_cannot_use_is_refused_by_name() {
        let sound = metadata(|_| {});
        check(&sound, None).unwrap();
        let typed = |t: &'static str| move |m: &mut Value| m["schemas"][1]["fields"][1]["type"] = json!(t);
        let by = |place: &'static str, source: i32, transform: &'static str| {
            move |m: &mut Value| {
                let field = m.pointer_mut(place).unwrap();
                (field["source-id"], field["transform"]) = (json!(source), json!(transform));
            }
        };
        let sorted_by = |source: i32, transform: &'static str| {
            move |m: &mut Value| {
                m["default-sort-order-id"] = json!(1);
                by("/sort-orders/1/fields/0", source, transform)(m);
            }
        };
        let (spec, unused) = ("/partition-specs/0/fields/0", "/partition-specs/1/fields/0");
        let cases: Vec<(Damage, &[&str])> = vec![
            (Box::new(typed("decimal(99, 2)")), &["schema 1, column s", "decimal(99, 2)", "1 to 38"]),
            (Box::new(typed("decimal(0, 0)")), &["decimal(0, 0)"]),
            (Box::new(typed("decimal(3, 4)")), &["decimal(3, 4)", "0 to the precision"]),
            (Box::new(typed("fixed[0]")), &["fixed[0]", "1 to 2147483647"]),
            (Box::new(typed("fixed[2147483648]")), &["fixed[2147483648]"]),
            (
                Box::new(|m| {
                    m["schemas"][1]["fields"][2]["type"] = json!({"type": "list", "element-id": 9, "element": "decimal(40, 1)", "element-required": false});
                }),
                &["schema 1, column d.element", "decimal(40, 1)"],
            ),
            (
                Box::new(|m| m["schemas"][1]["fields"][2]["type"] = json!({"type": "struct", "fields": []})),
                &["schema 1, column d", "at least one"],
            ),
            (Box::new(|m| m["schemas"][0]["fields"] = json!([])), &["schema 0", "at least one column"]),
            (Box::new(by(spec, 1, "bucket[0]")), &["partition spec 0, field b", "bucket[0]", "1 to 2147483647"]),
            (Box::new(by(spec, 3, "truncate[0]")), &["truncate[0]"]),
            (Box::new(by(spec, 1, "bucket[2147483648]")), &["bucket[2147483648]"]),
            (Box::new(by(unused, 4, "bucket[4]")), &["column d, which is double", "it takes int, long"]),
            (Box::new(by(unused, 2, "bucket[0]")), &["partition spec 1, field y", "bucket[0]"]),
            (Box::new(sorted_by(3, "year")), &["sort order 1, fields[0]", "year of column s", "date or timestamp"]),
            (Box::new(sorted_by(1, "truncate[0]")), &["truncate[0]"]),
            (Box::new(sorted_by(2, "day")), &["sort order 1, fields[0]", "no column with the id 2"]),
            (Box::new(|m| m["snapshots"][0]["schema-id"] = json!(5)), &["snapshot 7", "schema-id is 5", "[0, 1]"]),
        ];
        for (change, words) in cases {
            let wrong = metadata(change);
            let error = check(&wrong, None).unwrap_err();
            assert_eq!(error.kind, crate::error::Kind::Invalid);
            for word in words {
                assert!(error.message.contains(word), "{word}: {error}");
            }
            assert!(check(&wrong, Some(&sound)).is_err(), "{error}");
            // What came in before can be gone on from.
            check(&wrong, Some(&wrong)).unwrap();
        }
    }

    #[test]
    fn a_schema_that_a_snapshot_was_written_with_stays() {
        let sound = metadata(|_| {});
        let without = metadata(|m| {
            m["schemas"].as_array_mut().unwrap().remove(0);
        });
        let error = check(&without, Some(&sound)).unwrap_err();
        assert!(error.message.contains("schema 0") && error.message.contains("snapshot 7"), "{error}");
        let neither = metadata(|m| {
            m["schemas"].as_array_mut().unwrap().remove(0);
            m["snapshots"] = json!([]);
            m["current-snapshot-id"] = json!(-1);
        });
        check(&neither, Some(&sound)).unwrap();
    }

    #[test]
    fn a_transform_that_is_not_sound_is_not_computed() {
        for wrong in [Transform::Bucket(0), Transform::Truncate(0), Transform::Bucket(u32::MAX)] {
            assert_eq!(function(wrong).unwrap_err().kind, crate::error::Kind::NotSupported);
        }
        function(Transform::Bucket(1)).unwrap();
    }

    #[test]
    fn times_before_1970_are_in_the_day_and_the_bucket_that_they_are_in() {
        let day = function(Transform::Day).unwrap();
        for (millis, expected) in
            [(-86_400_500, -2), (-86_400_000, -1), (-500, -1), (0, 0), (86_399_999, 0), (86_400_000, 1)]
        {
            for value in [Datum::timestamp_micros(millis * 1000), Datum::timestamptz_nanos(millis * 1_000_000)] {
                assert_eq!(day.of(&value).unwrap(), Some(Datum::date(expected)), "{value}");
            }
        }
        let bucket = function(Transform::Bucket(1000)).unwrap();
        let of_micros = |micros| bucket.of(&Datum::timestamp_micros(micros)).unwrap();
        assert_eq!(bucket.of(&Datum::timestamp_nanos(-1)).unwrap(), of_micros(-1));
        assert_eq!(bucket.of(&Datum::timestamp_nanos(1_999)).unwrap(), of_micros(1));
        assert_ne!(of_micros(-1), of_micros(0));
    }

    #[test]
    fn places_are_told_that_are_not_the_tables_own() {
        let sound = metadata(|_| {});
        assert!(places(&sound, None).is_empty());
        let elsewhere = metadata(|m| {
            m["snapshots"][0]["manifest-list"] = json!("file:///etc/passwd");
            m["statistics"] = json!([{"snapshot-id": 7, "statistics-path": "file:///w/t/../x", "file-size-in-bytes": 9,
                "file-footer-size-in-bytes": 3, "blob-metadata": []}]);
            m["partition-statistics"] =
                json!([{"snapshot-id": 7, "statistics-path": "file:///w/tt/p", "file-size-in-bytes": 9}]);
            m["properties"] = json!({"write.data.path": "s3://other/d", "write.metadata.path": "file:/w/t/"});
        });
        let told: Vec<String> = places(&elsewhere, None).into_iter().map(|(_, place)| place).collect();
        assert_eq!(told, ["file:///etc/passwd", "file:///w/t/../x", "file:///w/tt/p", "s3://other/d"]);
        assert_eq!(places(&elsewhere, Some(&sound)).len(), 4);
        assert!(places(&elsewhere, Some(&elsewhere)).is_empty(), "they came in before");
    }
}
