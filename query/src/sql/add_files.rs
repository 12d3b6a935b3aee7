//! add_files: Parquet files that are there already become data files of a table, where they lie and as they are.
//!
//! ```text
//! a file, or a directory -> its Parquet files -> for each: footer, columns, partition, counts and bounds -> one append
//! ```
//! - Columns are found as a scan would find them ([`Rules`]): by field id, or by name where a file has no ids. Then the table
//!   gets a name mapping (`schema.name-mapping.default`), if it has none. What could not be read, and a column or a part of one that
//!   the table does not have, is refused before anything is committed. So is a file where only some have ids: what has none would be
//!   missing to whoever reads it by them, as all engines do.
//! - All rows of a file must be in one partition. The values are those of the directories (`day=2026-01-01/`) for columns that the
//!   table is partitioned by as they are, and that the file does not have; else they follow from the file's bounds.
//! - A file that is in the table already is refused.
//!
//! The files stay where they are, also when the table is dropped: those outside of its location no clean-up removes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use arrow::datatypes::{DataType, FieldRef, Fields, Schema};
use datafusion::common::ScalarValue;
use datafusion::execution::cache::cache_manager::FileMetadataCache;
use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{
    DataFile, Datum, Literal, NestedFieldRef, Operation, PartitionField, Struct, TableMetadata, TableMetadataBuilder,
    Transform, Type,
};
use object_store::{ObjectMeta, ObjectStore};
use parquet::arrow::parquet_to_arrow_schema;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::scan::adapter::{NAME_MAPPING, Rules, has_ids, parts_of};
use crate::scan::{footer, plan};
use crate::storage::io::LakeIo;
use crate::table::commit::{self, Proposal};
use crate::table::conflict::{Isolation, Reads, Scope};
use crate::table::stats::{self, NanCounter};
use crate::table::types::{arrow_schema, field_id};
use crate::table::version::{self, Edit, Removed};
use crate::table::writer::DataFiles;
use crate::table::{Table, Tables, layout, sound};

/// Most files that are added at once.
const MAX_FILES: usize = 10_000;
/// Footers read at a time.
const FOOTERS_IN_FLIGHT: usize = 8;
/// How a directory says that a value is null.
const HIVE_NULL: &str = "__HIVE_DEFAULT_PARTITION__";
/// A bound of text with so many bytes may have been cut.
const CUT_TEXT_BYTES: usize = 64;

/// Adds the Parquet files at `source`, or with `dry_run` only checks them. Returns how many there are.
///
/// # Errors
/// `NotFound` if there is none; `AlreadyExists` for one that is in the table; `Invalid` and `NotSupported`, naming the file, for one that
/// does not fit.
pub async fn add_files(
    tables: &Arc<Tables>,
    footers: &FileMetadataCache,
    table: &Table,
    source: &str,
    dry_run: bool,
    deadline: Instant,
) -> Result<u64> {
    table.check_writable()?;
    let work = async {
        let named = with_name_mapping(table)?;
        let adopter = Adopter::new(&named)?;
        let listed = list(tables, source).await?;
        let snapshot = table.metadata.current_snapshot().map(AsRef::as_ref);
        let there = plan::files(&tables.cache, table, snapshot, None).await?.files;
        let there: HashSet<&str> = there.iter().map(|file| file.data_file().file_path()).collect();
        if let Some(twice) = listed.iter().find(|file| there.contains(file.location.as_str())) {
            return Err(Error::already_exists(format!("{} is in table {} already", twice.location, table.ident)));
        }
        let mut described = Vec::with_capacity(listed.len());
        for file in &listed {
            described.push(adopter.describe(footers, file));
        }
        futures::stream::iter(described).buffered(FOOTERS_IN_FLIGHT).try_collect().await
    };
    let files: Vec<DataFile> = tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| {
        Err(Error::deadline(format!("looking at the files at {source}: not done in time; nothing was committed")))
    })?;
    let count = files.len() as u64;
    if dry_run {
        return Ok(count);
    }
    let paths: Arc<HashSet<String>> = Arc::new(files.iter().map(|file| file.file_path().to_owned()).collect());
    let scope = {
        let paths = paths.clone();
        Scope::Files(Arc::new(move |file: &DataFile| paths.contains(file.file_path())))
    };
    // Two may add the same file.
    let reads = Reads {
        snapshot: table.metadata.current_snapshot_id(),
        scope,
        files: paths,
        isolation: Isolation::Serializable,
        only_deletes: false,
    };
    let (tables, table) = (tables.clone(), table.clone());
    let owner = tables.clone();
    owner
        .owned(async move {
            let io = LakeIo::new(tables.storage.clone());
            let (operation, removed) = (Operation::Append, Removed::Nothing);
            let mut change = version::write_change(&io, &table.metadata, operation, &files, removed).await?;
            tables.will_answer(count);
            change.notes.extend(tables.scope.notes());
            let edit: Edit = Arc::new(|base: &TableMetadata, builder: TableMetadataBuilder| {
                match base.properties().contains_key(NAME_MAPPING) {
                    true => Ok(builder),
                    false => {
                        let mapping = name_mapping(base.current_schema().as_struct().fields()).to_string();
                        Ok(builder.set_properties([(NAME_MAPPING.to_owned(), mapping)].into())?)
                    }
                }
            });
            let proposal = Proposal { edit: Some(edit), ..Proposal::change(change, Some(reads), &table.metadata) };
            // None of the files is ours to remove if nothing comes of it.
            let none = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
            commit::commit(&tables, &table, proposal, none, deadline).await.map(|_| count)
        })
        .await
}

/// The table as it is once files without ids are in it.
fn with_name_mapping(table: &Table) -> Result<Table> {
    if table.metadata.properties().contains_key(NAME_MAPPING) {
        return Ok(table.clone());
    }
    let mapping = name_mapping(table.metadata.current_schema().as_struct().fields()).to_string();
    let builder = table.metadata.as_ref().clone().into_builder(None);
    let named = builder.set_properties([(NAME_MAPPING.to_owned(), mapping)].into())?.build()?;
    Ok(Table { metadata: Arc::new(named.metadata), ..table.clone() })
}

/// The names of columns and their parts, each with its id.
fn name_mapping(fields: &[NestedFieldRef]) -> Value {
    let of = |field: &NestedFieldRef, name: &str| {
        let parts = match field.field_type.as_ref() {
            Type::Primitive(_) => json!([]),
            Type::Struct(parts) => name_mapping(parts.fields()),
            Type::List(list) => json!([part(&list.element_field, "element")]),
            Type::Map(map) => json!([part(&map.key_field, "key"), part(&map.value_field, "value")]),
        };
        json!({ "field-id": field.id, "names": [name], "fields": parts })
    };
    fields.iter().map(|field| of(field, &field.name)).collect()
}

/// A name mapping with the names that columns have now beside those that they had.
///
/// # Errors
/// `Corrupt` for a mapping that is none.
pub fn extend_name_mapping(mapping: &str, fields: &[NestedFieldRef]) -> Result<String> {
    let corrupt = |e: serde_json::Error| Error::corrupt(format!("the property {NAME_MAPPING} is no name mapping: {e}"));
    let mut mapping: Value = serde_json::from_str(mapping).map_err(corrupt)?;
    extend(&mut mapping, name_mapping(fields));
    Ok(mapping.to_string())
}

fn extend(mapping: &mut Value, now: Value) {
    let (Some(mapped), Value::Array(now)) = (mapping.as_array_mut(), now) else { return };
    for mut field in now {
        // A name is one column's: that of the one which had it first, in the files that are there.
        let taken = |name: &Value, but: &Value| {
            let has = |other: &Value| other["names"].as_array().is_some_and(|names| names.contains(name));
            mapped.iter().any(|other| other["field-id"] != *but && has(other))
        };
        let id = field["field-id"].clone();
        let names: Vec<Value> = field["names"].as_array().into_iter().flatten().cloned().collect();
        let names: Vec<Value> = names.into_iter().filter(|name| !taken(name, &id)).collect();
        match mapped.iter_mut().find(|other| other["field-id"] == id) {
            Some(known) => {
                if let Some(had) = known["names"].as_array_mut() {
                    had.extend(names.into_iter().filter(|name| !had.contains(name)).collect::<Vec<_>>());
                }
                let parts = field["fields"].take();
                match known.get_mut("fields") {
                    Some(fields) if fields.is_array() => extend(fields, parts),
                    _ => known["fields"] = parts,
                }
            }
            None => {
                field["names"] = names.into();
                mapped.push(field);
            }
        }
    }
}

/// A part that has its name from what it is.
fn part(field: &NestedFieldRef, name: &str) -> Value {
    let mut named = name_mapping(std::slice::from_ref(field));
    named[0]["names"] = json!([name]);
    named[0].take()
}

/// A file that is to be added.
struct Found {
    location: String,
    store: Arc<dyn ObjectStore>,
    meta: ObjectMeta,
    /// What its directories say, by name.
    directories: HashMap<String, Option<String>>,
}

/// The Parquet files at a location: itself, or those in the directory and below. Hidden ones, and what engines leave beside data,
/// are passed over.
async fn list(tables: &Tables, source: &str) -> Result<Vec<Found>> {
    let source = source.trim_end_matches('/');
    let root = tables.storage.resolve(source)?;
    let failed = |e| Error::object_store("listing", source, &e);
    let mut found = Vec::new();
    if source.ends_with(".parquet") {
        match object_store::ObjectStoreExt::head(root.store.as_ref(), &root.path).await {
            Ok(meta) => found.push((String::new(), meta)),
            // A directory may have such a name.
            Err(object_store::Error::NotFound { .. }) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    let prefix = root.path.to_string();
    let mut listed = root.store.list(Some(&root.path));
    while let Some(meta) = listed.try_next().await.map_err(failed)? {
        let path = meta.location.to_string();
        let Some(rest) = path.strip_prefix(&prefix).filter(|rest| rest.starts_with('/')) else { continue };
        let hidden =
            rest.split('/').any(|part| part.starts_with('.') || (part.starts_with('_') && !part.contains('=')));
        if rest.ends_with(".parquet") && !hidden {
            found.push((rest.to_owned(), meta));
        }
        if found.len() > MAX_FILES {
            return Err(Error::invalid(format!("{source} has more than {MAX_FILES} files: add them in parts")));
        }
    }
    if found.is_empty() {
        return Err(Error::not_found(format!("there are no Parquet files at {source}")));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let located = found.into_iter().map(|(rest, meta)| {
        // Of a single file the directories that it is in.
        let directories = if rest.is_empty() { source.to_owned() } else { rest.clone() };
        let pairs = directories.split('/').filter_map(|part| part.split_once('='));
        let value = |value: &str| (value != HIVE_NULL).then(|| unescape(value));
        Found {
            location: format!("{source}{rest}"),
            store: root.store.clone(),
            meta,
            directories: pairs.map(|(name, text)| (unescape(name), value(text))).collect(),
        }
    });
    Ok(located.collect())
}

/// Names of directories have some characters as `%` and two hexadecimal digits.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Looks at files for one table.
struct Adopter<'a> {
    table: &'a Table,
    rules: Arc<Rules>,
    columns: Arc<Schema>,
}

impl<'a> Adopter<'a> {
    fn new(table: &'a Table) -> Result<Self> {
        let schema = table.metadata.current_schema();
        let columns = arrow_schema(schema)?;
        let rules = Arc::new(Rules::new(table, schema, columns.as_ref(), &[])?);
        Ok(Self { table, rules, columns })
    }

    async fn describe(&self, footers: &FileMetadataCache, file: &Found) -> Result<DataFile> {
        let described = self.try_describe(footers, file).await;
        described.map_err(|e| match e.message.contains(&file.location) {
            true => e,
            false => e.while_doing(format_args!("adding {}", file.location)),
        })
    }

    async fn try_describe(&self, footers: &FileMetadataCache, file: &Found) -> Result<DataFile> {
        let metadata = &self.table.metadata;
        let schema = metadata.current_schema();
        let footer = footer::read(file.store.as_ref(), &file.meta, footers, false).await?;
        let parquet = footer.file_metadata();
        let stored = parquet_to_arrow_schema(parquet.schema_descr(), parquet.key_value_metadata());
        let stored = Arc::new(stored.map_err(|e| Error::corrupt(e.to_string()))?);
        let spec = metadata.default_partition_spec();
        let mut constants = HashMap::new();
        for field in spec.fields().iter().filter(|field| field.transform == Transform::Identity) {
            if let Some(value) = self.value_in_directories(file, field)? {
                constants.insert(field.source_id, value);
            }
        }
        let by_ids = stored.fields().iter().any(has_ids);
        if by_ids && let Some(column) = without_id(stored.fields(), "") {
            return Err(Error::invalid(format!(
                "its column {column} has no field id, and others have: write the file without any, as COPY does, or with all"
            )));
        }
        let columns = self.rules.check_file(self.columns.clone(), stored, constants.clone())?;
        // By which other names columns go without ids is for the table's name mapping to say.
        check_known(by_ids.then_some(metadata.as_ref()), &columns, schema.as_struct().fields(), "")?;
        let mut leaves = Vec::new();
        leaf_ids(&columns, &mut leaves);
        let bounded: HashSet<i32> = columns
            .iter()
            .filter_map(|column| {
                let id = field_id(column)?;
                let wanted = self.columns.fields().iter().find(|wanted| field_id(wanted) == Some(id))?;
                kept_alike(column.data_type(), wanted.data_type()).then_some(id)
            })
            .collect();
        let (location, nans) = (&file.location, NanCounter::default());
        let mut described = stats::describe(location, file.meta.size, schema, &footer, &leaves, &bounded, nans);
        described.partition_spec_id(spec.spec_id());
        let build = |described: &iceberg::spec::DataFileBuilder| {
            described.build().map_err(|e| Error::internal(format!("describing {location}: {e}")))
        };
        let plain = build(&described)?;
        for field in schema.as_struct().fields().iter().filter(|field| field.required) {
            let given = constants.get(&field.id).is_some_and(|value| !value.is_null());
            let nested = !field.field_type.is_primitive();
            if !given && !nested && plain.null_value_counts().get(&field.id) != Some(&0) {
                return Err(Error::invalid(format!(
                    "column {} is NOT NULL, and of the file it is not known that it has a value in every row",
                    field.name
                )));
            }
        }
        let has = |id: i32| columns.iter().any(|column| field_id(column) == Some(id));
        let values = spec.fields().iter().map(|field| match constants.get(&field.source_id) {
            Some(constant) if !has(field.source_id) => self.literal(field, constant),
            _ => partition_value(&plain, field),
        });
        let partition: Struct = values.collect::<Result<Vec<Option<Literal>>>>()?.into_iter().collect();
        build(described.partition(partition))
    }

    /// What the file's directories say about a column that the table is partitioned by.
    fn value_in_directories(&self, file: &Found, field: &PartitionField) -> Result<Option<ScalarValue>> {
        let schema = self.table.metadata.current_schema();
        let Some(column) = schema.as_struct().field_by_id(field.source_id) else { return Ok(None) };
        let given = file.directories.get(&column.name).or_else(|| file.directories.get(&field.name));
        let Some(given) = given else { return Ok(None) };
        let data_type = self.columns.field_with_name(&column.name).map_err(Error::internal)?.data_type();
        let value = match given {
            Some(text) => ScalarValue::try_from_string(text.clone(), data_type),
            None => ScalarValue::try_from(data_type),
        };
        let wrong = |e| Error::invalid(format!("the directory {}={given:?} is no {data_type}: {e}", column.name));
        value.map(Some).map_err(wrong)
    }

    fn literal(&self, field: &PartitionField, value: &ScalarValue) -> Result<Option<Literal>> {
        let schema = self.table.metadata.current_schema();
        let primitive = schema.as_struct().field_by_id(field.source_id);
        let primitive = primitive.and_then(|column| column.field_type.as_primitive_type());
        let primitive = primitive.ok_or_else(|| Error::internal(format!("no column for partition {}", field.name)))?;
        Ok(layout::datum(&value.to_array()?, 0, primitive)?.map(Literal::from))
    }
}

/// The first column, or part of one, that has no id.
fn without_id<'a>(columns: impl IntoIterator<Item = &'a FieldRef>, within: &str) -> Option<String> {
    columns.into_iter().find_map(|column| {
        let path = format!("{within}{}", column.name());
        match field_id(column) {
            Some(_) => without_id(parts_of(column.data_type()), &format!("{path}.")),
            None => Some(path),
        }
    })
}

/// Whether each column of a file is one of these of the table, and so are its parts: under a name that it has or had in this `history`,
/// if that matters.
fn check_known<'a>(
    history: Option<&TableMetadata>,
    columns: impl IntoIterator<Item = &'a FieldRef>,
    known: &[NestedFieldRef],
    within: &str,
) -> Result<()> {
    for column in columns {
        let path = format!("{within}{}", column.name());
        let of_table = field_id(column).and_then(|id| known.iter().find(|field| field.id == id));
        let Some(field) = of_table else { return Err(Error::invalid(format!("the table has no column {path}"))) };
        if let Some(history) = history
            && field.name != *column.name()
            && field_was_never(history, field.id, column.name())
        {
            return Err(Error::invalid(format!(
                "its column {path} has the id {} of the table's column {within}{}",
                field.id, field.name
            )));
        }
        check_parts(history, column, field, &path)?;
    }
    Ok(())
}

/// The same of the parts of a column that is the table's `field`.
fn check_parts(history: Option<&TableMetadata>, column: &FieldRef, field: &NestedFieldRef, path: &str) -> Result<()> {
    let within = format!("{path}.");
    let parts = parts_of(column.data_type());
    let by_place = match field.field_type.as_ref() {
        Type::Primitive(_) => return Ok(()),
        Type::Struct(fields) => return check_known(history, parts, fields.fields(), &within),
        // Writers call these as they please.
        Type::List(list) => vec![&list.element_field],
        Type::Map(map) => vec![&map.key_field, &map.value_field],
    };
    for (part, field) in parts.into_iter().zip(by_place) {
        let path = format!("{within}{}", part.name());
        if field_id(part) != Some(field.id) {
            return Err(Error::invalid(format!("its column {path} does not have the table's id {}", field.id)));
        }
        check_parts(history, part, field, &path)?;
    }
    Ok(())
}

/// Whether a column, or a part of one, with this id never had this name.
fn field_was_never(metadata: &TableMetadata, id: i32, name: &str) -> bool {
    let mut named = metadata.schemas_iter().filter_map(|schema| schema.field_by_id(id));
    !named.any(|field| field.name == name)
}

/// The value of a partition field that all rows of a file have, from the bounds of its column.
fn partition_value(file: &DataFile, field: &PartitionField) -> Result<Option<Literal>> {
    let id = field.source_id;
    let unknown = |why: &str| {
        Err(Error::invalid(format!(
            "in which partition its rows are, by {} ({}), does not follow: {why}",
            field.name, field.transform
        )))
    };
    if field.transform == Transform::Void {
        return Ok(None);
    }
    let nulls = file.null_value_counts().get(&id).copied();
    if nulls == Some(file.record_count()) {
        return Ok(None);
    }
    if nulls != Some(0) {
        return unknown("some values may be null");
    }
    let (Some(lower), Some(upper)) = (file.lower_bounds().get(&id), file.upper_bounds().get(&id)) else {
        return unknown("the file has no bounds of the column that lake can rely on");
    };
    let cut = |bound: &Datum| bound.to_bytes().is_ok_and(|bytes| bytes.len() >= CUT_TEXT_BYTES);
    let function = sound::function(field.transform)?;
    let (first, last) = (function.of(lower)?, function.of(upper)?);
    let in_order = !matches!(field.transform, Transform::Bucket(_));
    match first == last && (in_order || lower == upper) && !cut(lower) && !cut(upper) {
        true => Ok(first.map(Literal::from)),
        false => unknown("they are in several"),
    }
}

/// The ids of the leaves, in the order of the file.
fn leaf_ids(fields: &Fields, into: &mut Vec<Option<i32>>) {
    for field in fields {
        match field.data_type() {
            DataType::Struct(parts) => leaf_ids(parts, into),
            DataType::Map(entries, _) => leaf_ids(&Fields::from(vec![entries.clone()]), into),
            DataType::List(part)
            | DataType::LargeList(part)
            | DataType::ListView(part)
            | DataType::LargeListView(part)
            | DataType::FixedSizeList(part, _) => leaf_ids(&Fields::from(vec![part.clone()]), into),
            _ => into.push(field_id(field)),
        }
    }
}

/// Whether a file's statistics are the bytes that lake would write for such a column.
fn kept_alike(stored: &DataType, wanted: &DataType) -> bool {
    use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Utf8, Utf8View};
    match (stored, wanted) {
        (Utf8 | LargeUtf8 | Utf8View, Utf8View) | (Binary | LargeBinary | BinaryView, BinaryView) => true,
        (stored, wanted) => stored == wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_unescaped() {
        for (text, plain) in [("a%3Ab", "a:b"), ("100%", "100%"), ("%zz%2", "%zz%2"), ("%C3%BC", "ü"), ("", "")] {
            assert_eq!(unescape(text), plain);
        }
    }

    #[test]
    fn a_name_mapping_keeps_old_names_and_gets_new_ones() {
        let column = |id, name: &str| {
            let long = Type::Primitive(iceberg::spec::PrimitiveType::Long);
            Arc::new(iceberg::spec::NestedField::optional(id, name, long))
        };
        let first = name_mapping(&[column(1, "a"), column(2, "b")]).to_string();
        // a is called c now, and another column a.
        let extended = extend_name_mapping(&first, &[column(1, "c"), column(2, "b"), column(3, "a")]).unwrap();
        let mapping: Value = serde_json::from_str(&extended).unwrap();
        let names: Vec<&Value> = mapping.as_array().unwrap().iter().map(|field| &field["names"]).collect();
        assert_eq!(names, [&json!(["a", "c"]), &json!(["b"]), &json!([])]);
        assert!(extend_name_mapping("{", &[]).is_err());
    }
}
