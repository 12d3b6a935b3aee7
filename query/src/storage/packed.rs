//! The entries of a manifest in little memory, to be kept.
//!
//! An entry as the iceberg crate has it takes some 2 kB: texts, six maps, values in enums. Here each of its fields is a column
//! over all entries of the manifest ([`super::columns`]), a tenth of that. What planning looks at of each file (whether it is there, its
//! partition, its bounds) is read where it stands; an entry is put together ([`Packed::entry`]) when it is wanted as a whole.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use iceberg::spec::{
    DataContentType, DataFile, DataFileBuilder, DataFileFormat, Datum, Literal, Manifest, ManifestEntry,
    ManifestEntryRef, ManifestMetadata, ManifestStatus, PrimitiveLiteral, PrimitiveType, Struct,
};

use super::columns::{Numbers, Texts, Values, bytes, text};
use crate::error::{Error, Result};

const FORMATS: [DataFileFormat; 4] =
    [DataFileFormat::Avro, DataFileFormat::Orc, DataFileFormat::Parquet, DataFileFormat::Puffin];

/// A column for each of some of the table's columns, by ascending id.
type ById<T> = Vec<(i32, T)>;

/// A manifest.
#[derive(Debug)]
pub struct Packed {
    metadata: ManifestMetadata,
    len: usize,
    status: Numbers,
    snapshot_id: Numbers,
    sequence_number: Numbers,
    file_sequence_number: Numbers,
    content: Numbers,
    path: Texts,
    format: Numbers,
    /// By field of the partition.
    partition: Vec<Values>,
    records: Numbers,
    size: Numbers,
    column_sizes: ById<Numbers>,
    value_counts: ById<Numbers>,
    null_counts: ById<Numbers>,
    nan_counts: ById<Numbers>,
    lower: ById<(PrimitiveType, Values)>,
    upper: ById<(PrimitiveType, Values)>,
    key_metadata: Texts,
    split_offsets: Texts,
    equality_ids: Texts,
    sort_order_id: Numbers,
    first_row_id: Numbers,
    referenced: Texts,
    content_offset: Numbers,
    content_size: Numbers,
}

impl Packed {
    /// # Errors
    /// `Corrupt` if a column has bounds, or the partition values, of several types; `Exhausted` with more than 4 GiB of anything.
    pub fn new(manifest: &Manifest) -> Result<Self> {
        let entries = manifest.entries();
        let of_files = || entries.iter().map(|entry| entry.data_file());
        let fields = of_files().map(|file| file.partition().fields().len()).max().unwrap_or(0);
        if of_files().any(|file| file.partition().fields().len() != fields) {
            return Err(Error::corrupt("its partitions differ in the number of their fields"));
        }
        let partition = (0..fields).map(|index| {
            let values = of_files().map(|file| match &file.partition().fields()[index] {
                None => Ok(None),
                Some(Literal::Primitive(value)) => Ok(Some(value)),
                Some(_) => Err(Error::corrupt("a partition has a nested value")),
            });
            Values::new(&values.collect::<Result<Vec<_>>>()?)
        });
        Ok(Self {
            metadata: manifest.metadata().clone(),
            len: entries.len(),
            status: numbers(entries, |entry| Some(entry.status() as i64)),
            snapshot_id: numbers(entries, |entry| entry.snapshot_id()),
            sequence_number: numbers(entries, |entry| entry.sequence_number()),
            file_sequence_number: numbers(entries, |entry| entry.file_sequence_number),
            content: numbers(entries, |entry| Some(entry.content_type() as i64)),
            path: texts(entries, |file| Some(file.file_path().as_bytes().into()))?,
            format: numbers(entries, |entry| place(entry.file_format())),
            partition: partition.collect::<Result<_>>()?,
            records: numbers(entries, |entry| Some(entry.record_count().cast_signed())),
            size: numbers(entries, |entry| Some(entry.file_size_in_bytes().cast_signed())),
            column_sizes: counts(entries, DataFile::column_sizes),
            value_counts: counts(entries, DataFile::value_counts),
            null_counts: counts(entries, DataFile::null_value_counts),
            nan_counts: counts(entries, DataFile::nan_value_counts),
            lower: bounds(entries, DataFile::lower_bounds)?,
            upper: bounds(entries, DataFile::upper_bounds)?,
            key_metadata: texts(entries, |file| file.key_metadata().map(Cow::Borrowed))?,
            split_offsets: texts(entries, |file| Some(flat(file.split_offsets()?.iter().map(|at| at.to_le_bytes()))))?,
            equality_ids: texts(entries, |file| Some(flat(file.equality_ids()?.iter().map(|id| id.to_le_bytes()))))?,
            sort_order_id: numbers(entries, |entry| entry.data_file().sort_order_id().map(i64::from)),
            first_row_id: numbers(entries, |entry| entry.data_file().first_row_id()),
            referenced: texts(entries, |file| Some(file.referenced_data_file()?.into_bytes().into()))?,
            content_offset: numbers(entries, |entry| entry.data_file().content_offset()),
            content_size: numbers(entries, |entry| entry.data_file().content_size_in_bytes()),
        })
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn is_alive(&self, at: usize) -> bool {
        self.status.get(at) != Some(ManifestStatus::Deleted as i64)
    }

    pub fn is_of_data(&self, at: usize) -> bool {
        self.content.get(at) == Some(DataContentType::Data as i64)
    }

    pub fn is_encrypted(&self, at: usize) -> bool {
        self.key_metadata.get(at).is_some_and(|key| !key.is_empty())
    }

    pub fn records(&self, at: usize) -> u64 {
        self.records.get(at).unwrap_or(0).cast_unsigned()
    }

    /// The value of a field of the partition.
    pub fn partition_value(&self, at: usize, field: usize) -> Option<PrimitiveLiteral> {
        self.partition.get(field)?.get(at).ok()?
    }

    /// Whether a field of the partition is null.
    pub fn partition_is_null(&self, at: usize, field: usize) -> bool {
        self.partition.get(field).is_some_and(|values| !values.has(at))
    }

    /// The lower bound of the column with this id, and its type.
    pub fn lower(&self, at: usize, id: i32) -> Option<(&PrimitiveType, PrimitiveLiteral)> {
        let (data_type, values) = of(&self.lower, id)?;
        Some((data_type, values.get(at).ok()??))
    }

    pub fn upper(&self, at: usize, id: i32) -> Option<(&PrimitiveType, PrimitiveLiteral)> {
        let (data_type, values) = of(&self.upper, id)?;
        Some((data_type, values.get(at).ok()??))
    }

    pub fn null_count(&self, at: usize, id: i32) -> Option<u64> {
        of(&self.null_counts, id)?.get(at).map(i64::cast_unsigned)
    }

    pub fn nan_count(&self, at: usize, id: i32) -> Option<u64> {
        of(&self.nan_counts, id)?.get(at).map(i64::cast_unsigned)
    }

    /// An entry as it was.
    ///
    /// # Errors
    /// `Internal` if there is none, or what was kept of it is none.
    pub fn entry(&self, at: usize) -> Result<ManifestEntry> {
        if at >= self.len {
            return Err(lost());
        }
        let needed = |numbers: &Numbers| numbers.get(at).ok_or_else(lost);
        let small = |number: i64| i32::try_from(number).map_err(|_| lost());
        let maps = |counts: &ById<Numbers>| -> HashMap<i32, u64> {
            let there = |(id, numbers): &(i32, Numbers)| Some((*id, numbers.get(at)?.cast_unsigned()));
            counts.iter().filter_map(there).collect()
        };
        let datums = |bounds: &ById<(PrimitiveType, Values)>| -> Result<HashMap<i32, Datum>> {
            let there = |(id, (data_type, values)): &(i32, (PrimitiveType, Values))| {
                let literal = values.get(at).transpose()?;
                let datum = |literal| Ok(Datum::try_from_bytes(&bytes(&literal), data_type.clone())?);
                Some(literal.and_then(datum).map(|datum| (*id, datum)))
            };
            bounds.iter().filter_map(there).collect()
        };
        let owned = |texts: &Texts| texts.get(at).map(Cow::into_owned);
        let mut file = DataFileBuilder::default();
        let partition = self.partition.iter().map(|values| Ok(values.get(at)?.map(Literal::Primitive)));
        let format = usize::try_from(needed(&self.format)?).ok().and_then(|place| FORMATS.get(place));
        file.content(DataContentType::try_from(small(needed(&self.content)?)?)?)
            .file_path(text(owned(&self.path).ok_or_else(lost)?)?)
            .file_format(*format.ok_or_else(lost)?)
            .partition(partition.collect::<Result<Struct>>()?)
            .partition_spec_id(self.metadata.partition_spec().spec_id())
            .record_count(needed(&self.records)?.cast_unsigned())
            .file_size_in_bytes(needed(&self.size)?.cast_unsigned())
            .column_sizes(maps(&self.column_sizes))
            .value_counts(maps(&self.value_counts))
            .null_value_counts(maps(&self.null_counts))
            .nan_value_counts(maps(&self.nan_counts))
            .lower_bounds(datums(&self.lower)?)
            .upper_bounds(datums(&self.upper)?)
            .key_metadata(owned(&self.key_metadata))
            .split_offsets(owned(&self.split_offsets).map(|flat| split(&flat, i64::from_le_bytes)))
            .equality_ids(owned(&self.equality_ids).map(|flat| split(&flat, i32::from_le_bytes)))
            .first_row_id(self.first_row_id.get(at))
            .referenced_data_file(owned(&self.referenced).map(text).transpose()?)
            .content_offset(self.content_offset.get(at))
            .content_size_in_bytes(self.content_size.get(at));
        if let Some(id) = self.sort_order_id.get(at) {
            file.sort_order_id(small(id)?);
        }
        Ok(ManifestEntry {
            status: ManifestStatus::try_from(small(needed(&self.status)?)?)?,
            snapshot_id: self.snapshot_id.get(at),
            sequence_number: self.sequence_number.get(at),
            file_sequence_number: self.file_sequence_number.get(at),
            data_file: file.build().map_err(Error::internal)?,
        })
    }

    /// All of it as it was.
    ///
    /// # Errors
    /// As [`Packed::entry`].
    pub fn manifest(&self) -> Result<Manifest> {
        let entries = (0..self.len).map(|at| self.entry(at)).collect::<Result<Vec<_>>>()?;
        Ok(Manifest::new(self.metadata.clone(), entries))
    }

    /// What it takes in memory, about, in bytes; its schema aside.
    pub fn bytes(&self) -> usize {
        let numbers = [
            &self.status,
            &self.snapshot_id,
            &self.sequence_number,
            &self.file_sequence_number,
            &self.content,
            &self.format,
            &self.records,
            &self.size,
            &self.sort_order_id,
            &self.first_row_id,
            &self.content_offset,
            &self.content_size,
        ];
        let texts = [&self.path, &self.key_metadata, &self.split_offsets, &self.equality_ids, &self.referenced];
        let counts = [&self.column_sizes, &self.value_counts, &self.null_counts, &self.nan_counts];
        let counts = counts.into_iter().flatten().map(|(_, column)| size_of::<(i32, Numbers)>() + column.bytes());
        let bounds = self.lower.iter().chain(&self.upper);
        let bounds = bounds.map(|(_, (_, column))| size_of::<(i32, PrimitiveType, Values)>() + column.bytes());
        let partition = self.partition.iter().map(|column| size_of::<Values>() + column.bytes());
        size_of::<Self>()
            + numbers.into_iter().map(Numbers::bytes).sum::<usize>()
            + texts.into_iter().map(Texts::bytes).sum::<usize>()
            + counts.sum::<usize>()
            + bounds.sum::<usize>()
            + partition.sum::<usize>()
    }
}

fn numbers(entries: &[ManifestEntryRef], of: impl Fn(&ManifestEntry) -> Option<i64>) -> Numbers {
    Numbers::new(&entries.iter().map(|entry| of(entry)).collect::<Vec<_>>())
}

fn texts<'a>(entries: &'a [ManifestEntryRef], of: impl Fn(&'a DataFile) -> Option<Cow<'a, [u8]>>) -> Result<Texts> {
    Texts::new(&entries.iter().map(|entry| of(entry.data_file())).collect::<Vec<_>>())
}

fn ids<'a, T: 'a>(maps: impl Iterator<Item = &'a HashMap<i32, T>>) -> BTreeSet<i32> {
    maps.flat_map(|map| map.keys().copied()).collect()
}

fn counts(entries: &[ManifestEntryRef], of: fn(&DataFile) -> &HashMap<i32, u64>) -> ById<Numbers> {
    let column = |id| (id, numbers(entries, |entry| of(entry.data_file()).get(&id).copied().map(u64::cast_signed)));
    ids(entries.iter().map(|entry| of(entry.data_file()))).into_iter().map(column).collect()
}

fn bounds(
    entries: &[ManifestEntryRef],
    of: fn(&DataFile) -> &HashMap<i32, Datum>,
) -> Result<ById<(PrimitiveType, Values)>> {
    let column = |id| {
        let datums: Vec<_> = entries.iter().map(|entry| of(entry.data_file()).get(&id)).collect();
        let mut types = datums.iter().flatten().map(|datum| datum.data_type());
        let of_first = types.next().ok_or_else(lost)?;
        if types.any(|data_type| data_type != of_first) {
            return Err(Error::corrupt(format!("it has bounds of several types for the column with the id {id}")));
        }
        let literals: Vec<_> = datums.iter().map(|datum| datum.map(Datum::literal)).collect();
        Ok((id, (of_first.clone(), Values::new(&literals)?)))
    };
    ids(entries.iter().map(|entry| of(entry.data_file()))).into_iter().map(column).collect()
}

fn of<T>(columns: &[(i32, T)], id: i32) -> Option<&T> {
    let at = columns.binary_search_by_key(&id, |(id, _)| *id).ok()?;
    columns.get(at).map(|(_, column)| column)
}

fn place(format: DataFileFormat) -> Option<i64> {
    FORMATS.iter().position(|other| *other == format).and_then(|place| i64::try_from(place).ok())
}

fn flat<'a, const N: usize>(numbers: impl Iterator<Item = [u8; N]>) -> Cow<'a, [u8]> {
    numbers.flatten().collect::<Vec<_>>().into()
}

fn split<T, const N: usize>(flat: &[u8], number: fn([u8; N]) -> T) -> Vec<T> {
    flat.as_chunks::<N>().0.iter().copied().map(number).collect()
}

fn lost() -> Error {
    Error::internal("an entry of a manifest was not kept whole")
}

#[cfg(test)]
pub mod tests {
    use std::sync::Arc;

    use iceberg::spec::{FormatVersion, ManifestContentType, NestedField, PartitionSpec, Schema, Transform, Type};

    use super::*;

    pub fn metadata() -> ManifestMetadata {
        let columns =
            [(1, "p", PrimitiveType::Int), (2, "id", PrimitiveType::Long), (3, "name", PrimitiveType::String)];
        let columns = columns.map(|(id, name, of)| Arc::new(NestedField::optional(id, name, Type::Primitive(of))));
        let schema = Arc::new(Schema::builder().with_fields(columns).build().unwrap());
        let spec = PartitionSpec::builder(schema.clone()).with_spec_id(3);
        let spec = spec.add_partition_field("p", "p", Transform::Identity).unwrap().build().unwrap();
        ManifestMetadata::builder()
            .schema(schema)
            .schema_id(0)
            .partition_spec(spec)
            .format_version(FormatVersion::V3)
            .content(ManifestContentType::Data)
            .build()
    }

    /// A data file as lake describes one.
    pub fn described(number: i32) -> ManifestEntry {
        let nth = u64::from(number.unsigned_abs());
        let all = |count: u64| HashMap::from([1, 2, 3].map(|id| (id, count)));
        let sizes = HashMap::from([1, 2, 3].map(|id: i32| (id, (16 << 20) + nth * u64::from(id.unsigned_abs()))));
        let name = u128::from(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let bounds = |of_id: i64, name: &str| {
            HashMap::from([(1, Datum::int(number % 50)), (2, Datum::long(of_id)), (3, Datum::string(name))])
        };
        let mut file = DataFileBuilder::default();
        file.content(DataContentType::Data)
            .file_path(format!("s3://bucket/warehouse/default/t-0123456789/data/{name:032x}.parquet"))
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::from_iter([Some(Literal::int(number % 50))]))
            .partition_spec_id(3)
            .record_count(100_000 + nth)
            .file_size_in_bytes((64 << 20) - nth * 77)
            .column_sizes(sizes)
            .value_counts(all(100_000))
            .null_value_counts(all(0))
            .lower_bounds(bounds(i64::from(number) * 100_000, "aardvark"))
            .upper_bounds(bounds(i64::from(number) * 100_000 + 99_999, "zyzzyva"))
            .split_offsets(Some(vec![4]));
        ManifestEntry {
            status: ManifestStatus::Added,
            snapshot_id: Some(i64::MAX - 5),
            sequence_number: Some(7),
            file_sequence_number: Some(7),
            data_file: file.build().unwrap(),
        }
    }

    #[test]
    fn entries_come_back_as_they_were() {
        let mut bare = DataFileBuilder::default();
        bare.content(DataContentType::Data)
            .file_path(String::new())
            .file_format(DataFileFormat::Avro)
            .partition(Struct::from_iter([None]))
            .partition_spec_id(3)
            .record_count(u64::MAX)
            .file_size_in_bytes(0);
        let bare = ManifestEntry {
            status: ManifestStatus::Deleted,
            snapshot_id: None,
            sequence_number: None,
            file_sequence_number: None,
            data_file: bare.build().unwrap(),
        };
        let decimal = |unscaled: i128| {
            Datum::try_from_bytes(&unscaled.to_be_bytes(), PrimitiveType::Decimal { precision: 38, scale: 2 }).unwrap()
        };
        let mut deletes = DataFileBuilder::default();
        deletes
            .content(DataContentType::EqualityDeletes)
            .file_path("s3://bücket/x".to_owned())
            .file_format(DataFileFormat::Puffin)
            .partition(Struct::from_iter([Some(Literal::int(-1))]))
            .partition_spec_id(3)
            .record_count(0)
            .file_size_in_bytes(u64::MAX)
            .nan_value_counts([(9, u64::MAX)].into())
            .lower_bounds(
                [(4, decimal(-1)), (5, Datum::bool(true)), (6, Datum::double(-0.5)), (7, Datum::fixed([1, 2]))].into(),
            )
            .upper_bounds([(4, decimal(i128::MAX)), (8, Datum::uuid(uuid::Uuid::max())), (10, Datum::date(-3))].into())
            .key_metadata(Some(vec![0, 255]))
            .split_offsets(Some(vec![i64::MAX, 0]))
            .equality_ids(Some(vec![-1, 7]))
            .sort_order_id(2)
            .first_row_id(Some(i64::MAX))
            .referenced_data_file(Some("s3://bücket/y".to_owned()))
            .content_offset(Some(4))
            .content_size_in_bytes(Some(40));
        let deletes = ManifestEntry {
            status: ManifestStatus::Existing,
            snapshot_id: Some(i64::MIN),
            sequence_number: Some(0),
            file_sequence_number: None,
            data_file: deletes.build().unwrap(),
        };
        let mixed = vec![described(1), bare.clone(), deletes.clone(), described(2)];
        for entries in [vec![], vec![bare], vec![deletes], mixed, (0..300).map(described).collect()] {
            let manifest = Manifest::new(metadata(), entries);
            let packed = Packed::new(&manifest).unwrap();
            assert_eq!(packed.manifest().unwrap(), manifest);
            for (at, entry) in manifest.entries().iter().enumerate() {
                let file = entry.data_file();
                assert_eq!(packed.is_alive(at), entry.is_alive());
                assert_eq!(packed.is_of_data(at), entry.content_type() == DataContentType::Data);
                assert_eq!(packed.is_encrypted(at), file.key_metadata().is_some_and(|key| !key.is_empty()));
                assert_eq!(packed.records(at), file.record_count());
                assert_eq!(packed.partition_is_null(at, 0), file.partition().fields()[0].is_none());
                let partition = packed.partition_value(at, 0).map(Literal::Primitive);
                assert_eq!(partition, file.partition().fields()[0]);
                for id in 1..12 {
                    let known = |datum: Option<&Datum>| datum.map(|of| (of.data_type().clone(), of.literal().clone()));
                    let read = |bound: Option<(&PrimitiveType, _)>| bound.map(|(of, value)| (of.clone(), value));
                    assert_eq!(read(packed.lower(at, id)), known(file.lower_bounds().get(&id)));
                    assert_eq!(read(packed.upper(at, id)), known(file.upper_bounds().get(&id)));
                    assert_eq!(packed.null_count(at, id).as_ref(), file.null_value_counts().get(&id));
                    assert_eq!(packed.nan_count(at, id).as_ref(), file.nan_value_counts().get(&id));
                }
            }
            assert!(packed.entry(manifest.entries().len()).is_err());
        }
    }

    #[test]
    fn a_hundred_thousand_files_take_no_more_than_20_mb() {
        let packed = Packed::new(&Manifest::new(metadata(), (0..2000).map(described).collect())).unwrap();
        assert!(packed.bytes() * 50 <= 20_000_000, "{} bytes of 2,000 files", packed.bytes());
    }
}
