//! Arrow types and Iceberg types.
//!
//! A table's columns have one Arrow type each, decided by its Iceberg type ([`arrow_schema`]); every field carries its
//! Iceberg id as `PARQUET:field_id`, which the Parquet writer puts into the files and the scan finds columns by.
//! The other way ([`iceberg_schema`]), Arrow types without an Iceberg counterpart are widened where nothing is lost
//! (small and unsigned integers, dictionaries) and refused, naming the column, where there is no such type.
//! Timestamps have microseconds, as Iceberg's format version 2 does; finer fractions are cut off.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, SchemaRef, TimeUnit};
use iceberg::spec::{self as ice, ListType, MapType, NestedField, NestedFieldRef, PrimitiveType, StructType, Type};

use crate::error::{Error, Result};

/// Metadata key of an Arrow field under which the Parquet crate keeps field ids.
pub const FIELD_ID: &str = "PARQUET:field_id";

/// The Iceberg id of an Arrow field.
pub fn field_id(field: &Field) -> Option<i32> {
    field.metadata().get(FIELD_ID)?.parse().ok()
}

/// The field without its id, and its parts without theirs.
pub fn without_ids(field: &FieldRef) -> FieldRef {
    let data_type = match field.data_type() {
        DataType::Struct(parts) => DataType::Struct(parts.iter().map(without_ids).collect()),
        DataType::List(part) => DataType::List(without_ids(part)),
        DataType::LargeList(part) => DataType::LargeList(without_ids(part)),
        DataType::ListView(part) => DataType::ListView(without_ids(part)),
        DataType::LargeListView(part) => DataType::LargeListView(without_ids(part)),
        DataType::FixedSizeList(part, size) => DataType::FixedSizeList(without_ids(part), *size),
        DataType::Map(entries, sorted) => DataType::Map(without_ids(entries), *sorted),
        other => other.clone(),
    };
    let mut field = field.as_ref().clone().with_data_type(data_type);
    field.metadata_mut().remove(FIELD_ID);
    Arc::new(field)
}

/// The Arrow schema of a table with this Iceberg schema.
pub fn arrow_schema(schema: &ice::Schema) -> Result<SchemaRef> {
    let fields = schema.as_struct().fields().iter().map(|field| arrow_field(field, true));
    Ok(Arc::new(Schema::new(fields.collect::<Result<Fields>>()?)))
}

/// The type in which rows have a column of this type.
///
/// # Errors
/// As [`arrow_schema`].
pub fn column_type(data_type: &Type) -> Result<DataType> {
    arrow_type(data_type, true)
}

fn arrow_field(field: &NestedFieldRef, top: bool) -> Result<FieldRef> {
    let data_type =
        arrow_type(&field.field_type, top).map_err(|e| e.while_doing(format_args!("column {}", field.name)))?;
    let metadata = HashMap::from([(FIELD_ID.to_string(), field.id.to_string())]);
    Ok(Arc::new(Field::new(&field.name, data_type, !field.required).with_metadata(metadata)))
}

/// `top`: columns themselves use view types, which scans fill without copying; nested ones do not.
fn arrow_type(data_type: &Type, top: bool) -> Result<DataType> {
    let utc = || Some("UTC".into());
    Ok(match data_type {
        Type::Primitive(primitive) => match primitive {
            PrimitiveType::Boolean => DataType::Boolean,
            PrimitiveType::Int => DataType::Int32,
            PrimitiveType::Long => DataType::Int64,
            PrimitiveType::Float => DataType::Float32,
            PrimitiveType::Double => DataType::Float64,
            PrimitiveType::Decimal { precision, scale } => {
                let too_big = || Error::corrupt(format!("decimal({precision}, {scale}) is not a valid type"));
                DataType::Decimal128(
                    u8::try_from(*precision).map_err(|_| too_big())?,
                    i8::try_from(*scale).map_err(|_| too_big())?,
                )
            }
            PrimitiveType::Date => DataType::Date32,
            PrimitiveType::Time => DataType::Time64(TimeUnit::Microsecond),
            PrimitiveType::Timestamp => DataType::Timestamp(TimeUnit::Microsecond, None),
            PrimitiveType::Timestamptz => DataType::Timestamp(TimeUnit::Microsecond, utc()),
            PrimitiveType::TimestampNs => DataType::Timestamp(TimeUnit::Nanosecond, None),
            PrimitiveType::TimestamptzNs => DataType::Timestamp(TimeUnit::Nanosecond, utc()),
            PrimitiveType::String if top => DataType::Utf8View,
            PrimitiveType::String => DataType::Utf8,
            PrimitiveType::Uuid => DataType::FixedSizeBinary(16),
            PrimitiveType::Fixed(size) => DataType::FixedSizeBinary(
                i32::try_from(*size).map_err(|_| Error::corrupt(format!("fixed[{size}] is not a valid type")))?,
            ),
            PrimitiveType::Binary if top => DataType::BinaryView,
            PrimitiveType::Binary => DataType::Binary,
        },
        Type::Struct(fields) => {
            let fields = fields.fields().iter().map(|field| arrow_field(field, false));
            DataType::Struct(fields.collect::<Result<Fields>>()?)
        }
        Type::List(list) => DataType::List(arrow_field(&list.element_field, false)?),
        Type::Map(map) => {
            let entry = [arrow_field(&map.key_field, false)?, arrow_field(&map.value_field, false)?];
            let entry = Field::new("key_value", DataType::Struct(entry.into_iter().collect()), false);
            DataType::Map(Arc::new(entry), false)
        }
    })
}

/// An Iceberg schema for a new table with these columns. The ids are provisional: creating the table assigns them.
///
/// # Errors
/// `Invalid` for a column whose type Iceberg does not have, and for names that occur twice.
pub fn iceberg_schema(schema: &Schema) -> Result<ice::Schema> {
    iceberg_schema_after(schema, 0)
}

/// [`iceberg_schema`] with ids that are all above `last_id`.
pub fn iceberg_schema_after(schema: &Schema, mut last_id: i32) -> Result<ice::Schema> {
    if schema.fields().is_empty() {
        return Err(Error::invalid("a table needs at least one column"));
    }
    let mut seen = std::collections::HashSet::new();
    for field in schema.fields() {
        if !seen.insert(field.name().to_lowercase()) {
            return Err(Error::invalid(format!("column {} is there twice", field.name())));
        }
    }
    let fields = schema.fields().iter().map(|field| iceberg_field(field, &mut last_id)).collect::<Result<Vec<_>>>()?;
    Ok(ice::Schema::builder().with_fields(fields).build()?)
}

/// A column for a table whose highest id is `last_id`, which is raised.
///
/// # Errors
/// As [`iceberg_schema`].
pub fn new_field(field: &Field, last_id: &mut i32) -> Result<NestedFieldRef> {
    iceberg_field(field, last_id)
}

fn iceberg_field(field: &Field, last_id: &mut i32) -> Result<NestedFieldRef> {
    *last_id += 1;
    let id = *last_id;
    let data_type =
        iceberg_type(field.data_type(), last_id).map_err(|e| e.while_doing(format_args!("column {}", field.name())))?;
    Ok(Arc::new(NestedField::new(id, field.name(), data_type, !field.is_nullable())))
}

fn iceberg_type(data_type: &DataType, last_id: &mut i32) -> Result<Type> {
    let none = |why: &str| Error::invalid(format!("there is no Iceberg type for {data_type}: {why}"));
    let primitive = match data_type {
        DataType::Boolean => PrimitiveType::Boolean,
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::UInt8 | DataType::UInt16 => PrimitiveType::Int,
        DataType::Int64 | DataType::UInt32 => PrimitiveType::Long,
        DataType::UInt64 => PrimitiveType::Decimal { precision: 20, scale: 0 },
        DataType::Float16 | DataType::Float32 => PrimitiveType::Float,
        DataType::Float64 => PrimitiveType::Double,
        DataType::Decimal32(precision, scale)
        | DataType::Decimal64(precision, scale)
        | DataType::Decimal128(precision, scale)
        | DataType::Decimal256(precision, scale) => match (*precision, u32::try_from(*scale)) {
            (precision @ 1..=38, Ok(scale)) if scale <= u32::from(precision) => {
                PrimitiveType::Decimal { precision: u32::from(precision), scale }
            }
            _ => return Err(none("a decimal has 1 to 38 digits and a scale from 0 to that")),
        },
        DataType::Date32 | DataType::Date64 => PrimitiveType::Date,
        DataType::Time32(_) | DataType::Time64(_) => PrimitiveType::Time,
        DataType::Timestamp(_, None) => PrimitiveType::Timestamp,
        DataType::Timestamp(_, Some(_)) => PrimitiveType::Timestamptz,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => PrimitiveType::String,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => PrimitiveType::Binary,
        DataType::FixedSizeBinary(size) => {
            PrimitiveType::Fixed(u64::try_from(*size).map_err(|_| none("its size is negative"))?)
        }
        DataType::Dictionary(_, values) => return iceberg_type(values, last_id),
        DataType::RunEndEncoded(_, values) => return iceberg_type(values.data_type(), last_id),
        DataType::Struct(fields) => {
            let fields = fields.iter().map(|field| iceberg_field(field, last_id)).collect::<Result<Vec<_>>>()?;
            return Ok(Type::Struct(StructType::new(fields)));
        }
        DataType::List(element)
        | DataType::LargeList(element)
        | DataType::ListView(element)
        | DataType::LargeListView(element)
        | DataType::FixedSizeList(element, _) => {
            *last_id += 1;
            let id = *last_id;
            let element_type = iceberg_type(element.data_type(), last_id)?;
            let element = NestedField::list_element(id, element_type, !element.is_nullable());
            return Ok(Type::List(ListType::new(Arc::new(element))));
        }
        DataType::Map(entries, _) => {
            let DataType::Struct(fields) = entries.data_type() else { return Err(none("a map without entries")) };
            let [key, value] = fields.as_ref() else { return Err(none("a map entry has a key and a value")) };
            *last_id += 2;
            let (key_id, value_id) = (*last_id - 1, *last_id);
            let key_type = iceberg_type(key.data_type(), last_id)?;
            let value_type = iceberg_type(value.data_type(), last_id)?;
            let key = NestedField::map_key_element(key_id, key_type);
            let value = NestedField::map_value_element(value_id, value_type, !value.is_nullable());
            return Ok(Type::Map(MapType::new(Arc::new(key), Arc::new(value))));
        }
        DataType::Null => return Err(none("give it a type with CAST(... AS ...)")),
        DataType::Interval(_) | DataType::Duration(_) => return Err(none("keep it as a number or text")),
        _ => return Err(none("cast it to one that Iceberg has")),
    };
    Ok(Type::Primitive(primitive))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_iceberg_type_comes_back() {
        let fields = [
            ("b", DataType::Boolean),
            ("i", DataType::Int32),
            ("l", DataType::Int64),
            ("f", DataType::Float32),
            ("d", DataType::Float64),
            ("n", DataType::Decimal128(12, 2)),
            ("day", DataType::Date32),
            ("t", DataType::Time64(TimeUnit::Microsecond)),
            ("ts", DataType::Timestamp(TimeUnit::Microsecond, None)),
            ("tz", DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))),
            ("s", DataType::Utf8View),
            ("x", DataType::BinaryView),
            ("h", DataType::FixedSizeBinary(16)),
        ];
        let schema = Schema::new(fields.map(|(name, data_type)| Field::new(name, data_type, name != "i")).to_vec());
        let back = arrow_schema(&iceberg_schema(&schema).unwrap()).unwrap();
        for (left, right) in schema.fields().iter().zip(back.fields()) {
            assert_eq!((left.data_type(), left.is_nullable()), (right.data_type(), right.is_nullable()));
        }
        let ids: Vec<_> = back.fields().iter().map(|field| field_id(field)).collect();
        assert_eq!(ids, (1..=13).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn nested_fields_have_ids_of_their_own() {
        let inner = Field::new("inner", DataType::Struct(vec![Field::new("a", DataType::Int8, true)].into()), true);
        let list = Field::new("list", DataType::LargeList(Arc::new(Field::new("item", DataType::Utf8, true))), true);
        let schema = iceberg_schema(&Schema::new(vec![inner, list])).unwrap();
        assert_eq!(schema.highest_field_id(), 4);
        let back = arrow_schema(&schema).unwrap();
        let DataType::List(element) = back.field(1).data_type() else { panic!() };
        assert_eq!(
            (element.name().as_str(), field_id(element), element.data_type()),
            ("element", Some(4), &DataType::Utf8)
        );
    }

    #[test]
    fn a_type_without_counterpart_names_its_column() {
        for data_type in [DataType::Null, DataType::Decimal256(60, 2), DataType::Duration(TimeUnit::Second)] {
            let error = iceberg_schema(&Schema::new(vec![Field::new("odd", data_type, true)])).unwrap_err();
            assert!(error.message.starts_with("column odd: there is no Iceberg type"), "{error}");
        }
        let twice = Schema::new(vec![Field::new("a", DataType::Int8, true), Field::new("A", DataType::Int8, true)]);
        assert!(iceberg_schema(&twice).unwrap_err().message.contains("twice"));
    }
}
