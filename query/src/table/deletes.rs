//! Writing deletes: the rows of data files that are gone, as the table's format version has it.
//!
//! - Version 2: files of position deletes, which are Parquet with the columns `file_path` and `pos`, sorted by both. By default
//!   there is one for each data file: it names all that is known to be deleted from it by position, and takes the place of
//!   those that name this data file alone. With `write.delete.granularity` = `partition` there is one for each partition, which
//!   adds to those that are there.
//! - Version 3: a deletion vector for each data file, which takes the place of whatever was deleted from it by position. The
//!   vectors of one statement are in one Puffin file.
//!
//! The bounds of paths are whole, so that readers leave out what does not concern a data file ([`names`]). A delete file belongs
//! to the spec and the partition of the data files that it names.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringViewArray};
use iceberg::spec::{
    DataContentType, DataFile, DataFileBuilder, DataFileFormat, Datum, FormatVersion, NestedField, PrimitiveLiteral,
    PrimitiveType, Schema, Struct, TableMetadata, Type,
};
use roaring::RoaringTreemap;
use serde_json::json;
use uuid::Uuid;

use super::stats::{NanCounter, data_file};
use super::style::Style;
use super::types::arrow_schema;
use super::writer::{DataFiles, parquet_writer, write_failed};
use crate::error::{Error, Result};
use crate::storage::Storage;

/// Field id of the paths in a file of position deletes.
pub const PATH_ID: i32 = i32::MAX - 101;
/// Field id of the positions in a file of position deletes.
pub const POSITION_ID: i32 = i32::MAX - 102;
/// What begins the bitmap of a deletion vector.
pub const VECTOR_MAGIC: [u8; 4] = [0xd1, 0xd3, 0x39, 0x64];

/// Puffin's blob type for a deletion vector, and the field that it is of: a row's position.
const VECTOR_BLOB: &str = "deletion-vector-v1";
const VECTOR_FIELD: i32 = i32::MAX - 2;
const PUFFIN_MAGIC: [u8; 4] = *b"PFA1";
/// Rows of a position delete file that are handed to the writer at a time.
const BATCH_ROWS: usize = 8192;

/// How the rows of existing data files are changed: the table properties `write.<kind>.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// What is left of a data file is written anew.
    CopyOnWrite,
    /// The rows that go are named in a delete file.
    MergeOnRead,
}

impl Mode {
    /// What the table asks for of statements of this kind (`delete`, `update`, `merge`).
    ///
    /// # Errors
    /// `Invalid` for a word that is neither `copy-on-write` nor `merge-on-read`.
    pub fn of(metadata: &TableMetadata, kind: &str) -> Result<Self> {
        match property(metadata, &format!("write.{kind}.mode"), "copy-on-write", "merge-on-read")? {
            true => Ok(Mode::MergeOnRead),
            false => Ok(Mode::CopyOnWrite),
        }
    }
}

/// Which data files a file of position deletes is for: the table property `write.delete.granularity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    File,
    Partition,
}

impl Granularity {
    /// What the table asks for. A deletion vector is always of one file.
    ///
    /// # Errors
    /// `Invalid` for a word that is neither `file` nor `partition`.
    pub fn of(metadata: &TableMetadata) -> Result<Self> {
        let by_partition = property(metadata, "write.delete.granularity", "file", "partition")?;
        match by_partition && metadata.format_version() < FormatVersion::V3 {
            true => Ok(Granularity::Partition),
            false => Ok(Granularity::File),
        }
    }
}

/// Whether a property is the second of two words; the first is what it is unless it is set.
fn property(metadata: &TableMetadata, name: &str, first: &str, second: &str) -> Result<bool> {
    match metadata.properties().get(name).map(|value| value.to_ascii_lowercase()) {
        None => Ok(false),
        Some(value) if value == first => Ok(false),
        Some(value) if value == second => Ok(true),
        Some(other) => {
            Err(Error::invalid(format!("the table property {name} is {other:?}, and must be {first} or {second}")))
        }
    }
}

/// A delete file, or one of the vectors in a Puffin file: the path, and where in it.
pub type DeletePlace = (String, u64);

/// Which delete file an entry of a manifest means.
pub fn place(file: &DataFile) -> DeletePlace {
    let offset = file.content_offset().and_then(|offset| u64::try_from(offset).ok());
    (file.file_path().to_owned(), offset.unwrap_or(0))
}

/// Which data files a delete file may delete rows of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    One(String),
    /// Whose paths are between these, both included. The upper bound may be the beginning of a path.
    Between(String, String),
    Any,
}

impl Named {
    pub fn may_be(&self, path: &str) -> bool {
        match self {
            Named::One(named) => named == path,
            // A bound may have been cut, and the upper one by somebody who did not round it up.
            Named::Between(lower, upper) => {
                lower.as_str() <= path && (path <= upper.as_str() || path.starts_with(upper.as_str()))
            }
            Named::Any => true,
        }
    }
}

/// Which data files `delete` names, as far as the manifest says.
pub fn names(delete: &DataFile) -> Named {
    if delete.content_type() != DataContentType::PositionDeletes {
        return Named::Any;
    }
    if let Some(one) = delete.referenced_data_file() {
        return Named::One(one);
    }
    let bound = |datum: Option<&Datum>| match datum?.literal() {
        PrimitiveLiteral::String(path) => Some(path.clone()),
        _ => None,
    };
    let (lower, upper) = (delete.lower_bounds().get(&PATH_ID), delete.upper_bounds().get(&PATH_ID));
    match bound(lower).zip(bound(upper)) {
        Some((lower, upper)) => Named::Between(lower, upper),
        None => Named::Any,
    }
}

/// Rows that are gone from one data file.
#[derive(Debug)]
pub struct Deleted {
    pub data_file: String,
    /// Spec and partition of the data file.
    pub spec_id: i32,
    pub partition: Struct,
    /// At least one.
    pub positions: RoaringTreemap,
}

/// Writes delete files for a version of a table, and adds them to `into`. Each is durable then.
pub async fn write(
    storage: &Arc<Storage>,
    metadata: &TableMetadata,
    granularity: Granularity,
    mut deleted: Vec<Deleted>,
    into: &mut DataFiles,
) -> Result<()> {
    if deleted.is_empty() {
        return Ok(());
    }
    deleted.sort_by(|a, b| a.data_file.cmp(&b.data_file));
    into.deleted_from = Arc::new(deleted.iter().map(|of_file| of_file.data_file.clone()).collect());
    if metadata.format_version() >= FormatVersion::V3 {
        return write_vectors(storage, metadata, &deleted, into).await;
    }
    match granularity {
        Granularity::File => {
            for of_file in &deleted {
                write_positions(storage, metadata, &[of_file], into).await?;
            }
        }
        Granularity::Partition => {
            let mut by_partition: HashMap<(i32, &Struct), Vec<&Deleted>> = HashMap::new();
            for of_file in &deleted {
                by_partition.entry((of_file.spec_id, &of_file.partition)).or_default().push(of_file);
            }
            for group in by_partition.into_values() {
                write_positions(storage, metadata, &group, into).await?;
            }
        }
    }
    Ok(())
}

/// The columns of a file of position deletes.
fn positions_schema() -> Result<Schema> {
    let column = |id, name, data_type| Arc::new(NestedField::required(id, name, Type::Primitive(data_type)));
    let fields = [column(PATH_ID, "file_path", PrimitiveType::String), column(POSITION_ID, "pos", PrimitiveType::Long)];
    Ok(Schema::builder().with_fields(fields).build()?)
}

/// One file for data files of one partition, which are sorted by path.
async fn write_positions(
    storage: &Arc<Storage>,
    metadata: &TableMetadata,
    group: &[&Deleted],
    into: &mut DataFiles,
) -> Result<()> {
    let (Some(first), Some(last)) = (group.first(), group.last()) else { return Ok(()) };
    let schema = positions_schema()?;
    let columns = arrow_schema(&schema)?;
    let location = format!("{}/data/{}-deletes.parquet", metadata.location(), Uuid::now_v7());
    into.add_object(location.clone());
    let mut writer = parquet_writer(storage, &location, columns.clone(), &Style::plain()?)?;
    for of_file in group {
        let mut positions = of_file.positions.iter().peekable();
        while positions.peek().is_some() {
            let rows: Vec<i64> = positions
                .by_ref()
                .take(BATCH_ROWS)
                .map(|position| i64::try_from(position).map_err(|_| Error::internal(format!("a row {position}"))))
                .collect::<Result<_>>()?;
            let paths = StringViewArray::from_iter_values(std::iter::repeat_n(&of_file.data_file, rows.len()));
            let arrays: Vec<ArrayRef> = vec![Arc::new(paths), Arc::new(Int64Array::from(rows))];
            let batch = RecordBatch::try_new(columns.clone(), arrays).map_err(Error::internal)?;
            writer.write(&batch).await.map_err(|e| write_failed(&location, &e))?;
        }
    }
    let footer = writer.finish().await.map_err(|e| write_failed(&location, &e))?;
    storage.persist(&location).await?;
    let bytes = writer.bytes_written() as u64;
    let mut described = data_file(&location, bytes, &schema, &footer, NanCounter::default())?;
    let (mut lower, mut upper) = (HashMap::new(), HashMap::new());
    // Whole, whatever the footer has.
    lower.insert(PATH_ID, Datum::string(&first.data_file));
    upper.insert(PATH_ID, Datum::string(&last.data_file));
    if let [one] = group {
        let position = |position: Option<u64>| position.and_then(|p| i64::try_from(p).ok()).map(Datum::long);
        lower.extend(position(one.positions.min()).map(|position| (POSITION_ID, position)));
        upper.extend(position(one.positions.max()).map(|position| (POSITION_ID, position)));
        described.referenced_data_file(Some(one.data_file.clone()));
    }
    described.content(DataContentType::PositionDeletes).lower_bounds(lower).upper_bounds(upper);
    described.partition(first.partition.clone()).partition_spec_id(first.spec_id);
    let described = described.build().map_err(|e| Error::internal(format!("describing {location}: {e}")))?;
    into.deletes.push((first.spec_id, described));
    Ok(())
}

async fn write_vectors(
    storage: &Arc<Storage>,
    metadata: &TableMetadata,
    deleted: &[Deleted],
    into: &mut DataFiles,
) -> Result<()> {
    let location = format!("{}/data/{}-deletes.puffin", metadata.location(), Uuid::now_v7());
    into.add_object(location.clone());
    let mut puffin = PUFFIN_MAGIC.to_vec();
    let mut blobs = Vec::with_capacity(deleted.len());
    let mut places = Vec::with_capacity(deleted.len());
    for of_file in deleted {
        let vector = encode_vector(&of_file.positions)?;
        let (offset, length) = (puffin.len(), vector.len());
        blobs.push(json!({
            "type": VECTOR_BLOB,
            "fields": [VECTOR_FIELD],
            // Those of the snapshot, which is not known yet.
            "snapshot-id": -1,
            "sequence-number": -1,
            "offset": offset,
            "length": length,
            "properties": {
                "referenced-data-file": of_file.data_file,
                "cardinality": of_file.positions.len().to_string(),
            },
        }));
        places.push((offset as i64, length as i64));
        puffin.extend(vector);
    }
    let created_by = concat!("lake ", env!("CARGO_PKG_VERSION"));
    let footer = json!({ "blobs": blobs, "properties": { "created-by": created_by } }).to_string();
    let footer_bytes =
        u32::try_from(footer.len()).map_err(|_| Error::exhausted("too many deletion vectors at once"))?;
    puffin.extend(PUFFIN_MAGIC);
    puffin.extend(footer.as_bytes());
    puffin.extend(footer_bytes.to_le_bytes());
    // No flags: nothing is compressed.
    puffin.extend([0; 4]);
    puffin.extend(PUFFIN_MAGIC);
    let bytes = puffin.len() as u64;
    storage.write_new(&location, puffin.into()).await?;
    for (of_file, (offset, length)) in deleted.iter().zip(places) {
        let mut described = DataFileBuilder::default();
        described
            .content(DataContentType::PositionDeletes)
            .file_path(location.clone())
            .file_format(DataFileFormat::Puffin)
            .partition(of_file.partition.clone())
            .partition_spec_id(of_file.spec_id)
            .record_count(of_file.positions.len())
            .file_size_in_bytes(bytes)
            .referenced_data_file(Some(of_file.data_file.clone()))
            .content_offset(Some(offset))
            .content_size_in_bytes(Some(length));
        let described = described.build().map_err(|e| Error::internal(format!("describing {location}: {e}")))?;
        into.deletes.push((of_file.spec_id, described));
    }
    Ok(())
}

/// Length, magic, bitmap, and the checksum of magic and bitmap.
pub fn encode_vector(positions: &RoaringTreemap) -> Result<Vec<u8>> {
    let mut body = VECTOR_MAGIC.to_vec();
    positions.serialize_into(&mut body).map_err(|e| Error::internal(format!("encoding a deletion vector: {e}")))?;
    let length = u32::try_from(body.len()).map_err(|_| Error::exhausted("a deletion vector is longer than 4 GiB"))?;
    let mut vector = length.to_be_bytes().to_vec();
    let checksum = crc32fast::hash(&body);
    vector.extend(body);
    vector.extend(checksum.to_be_bytes());
    Ok(vector)
}

/// Delete files by the spec that they are of, in the order of specs.
pub fn by_spec(deletes: &[(i32, DataFile)]) -> BTreeMap<i32, Vec<&DataFile>> {
    let mut by_spec: BTreeMap<i32, Vec<&DataFile>> = BTreeMap::new();
    for (spec_id, file) in deletes {
        by_spec.entry(*spec_id).or_default().push(file);
    }
    by_spec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_paths_leave_out_only_what_is_certainly_not_named() {
        let between = |lower: &str, upper: &str| Named::Between(lower.into(), upper.into());
        assert!(between("s3://b/a", "s3://b/c").may_be("s3://b/b"));
        assert!(between("s3://b/da", "s3://b/da").may_be("s3://b/data.parquet"), "a bound that was cut");
        assert!(!between("s3://b/a", "s3://b/c").may_be("s3://b/d"));
        assert!(Named::Any.may_be("x") && Named::One("x".into()).may_be("x") && !Named::One("x".into()).may_be("xy"));
    }
}
