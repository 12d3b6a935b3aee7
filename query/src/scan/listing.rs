//! What a table's metadata says, as tables: `"t$snapshots"`, `"t$history"`, `"t$refs"`, `"t$manifests"`, `"t$files"`,
//! `"t$entries"`, `"t$partitions"`, `"t$properties"`, `"t$create"`. Columns are named as Spark names them, as far as both have them.
//!
//! A listing is made when it is scanned, from metadata that is in the cache or read into it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use arrow::array::builder::{
    BooleanBuilder, Int32Builder, Int64Builder, ListBuilder, MapBuilder, StringBuilder, TimestampMicrosecondBuilder,
};
use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::temporal_conversions::{timestamp_ns_to_datetime, timestamp_us_to_datetime};
use async_trait::async_trait;
use datafusion::catalog::{MemTable, Session, TableProvider};
use datafusion::common::Result as DfResult;
use datafusion::datasource::TableType;
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::ExecutionPlan;
use iceberg::spec::{
    DataContentType, DataFile, Datum, Literal, ManifestContentType, ManifestEntryRef, ManifestFile, ManifestStatus,
    PrimitiveLiteral, PrimitiveType, SnapshotRef,
};

use super::as_of::refs_json;
use super::spelled;
use crate::error::{Error, Result};
use crate::table::{Table, Tables};

/// A bound as text.
fn readable(bound: &Datum) -> String {
    moment(bound.data_type(), bound.literal()).unwrap_or_else(|| bound.to_human_string())
}

/// A timestamp as text. The iceberg crate's own panics for fractions of seconds before 1970.
fn moment(of: &PrimitiveType, value: &PrimitiveLiteral) -> Option<String> {
    let PrimitiveLiteral::Long(value) = value else { return None };
    let (at, zone) = match of {
        PrimitiveType::Timestamp => (timestamp_us_to_datetime(*value)?, ""),
        PrimitiveType::Timestamptz => (timestamp_us_to_datetime(*value)?, " UTC"),
        PrimitiveType::TimestampNs => (timestamp_ns_to_datetime(*value)?, ""),
        PrimitiveType::TimestamptzNs => (timestamp_ns_to_datetime(*value)?, " UTC"),
        _ => return None,
    };
    Some(format!("{at}{zone}"))
}

/// What is listed of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    Snapshots,
    History,
    Refs,
    Manifests,
    Files,
    Entries,
    Partitions,
    /// What SHOW TBLPROPERTIES shows, of the current version.
    Properties,
    /// What SHOW CREATE TABLE shows, of the current version.
    Create,
    /// What SHOW CREATE VIEW shows of a view. A table has none.
    CreateView,
}

impl Listing {
    /// By what stands behind the `$`.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "snapshots" => Listing::Snapshots,
            "history" => Listing::History,
            "refs" => Listing::Refs,
            "manifests" => Listing::Manifests,
            "files" => Listing::Files,
            "entries" => Listing::Entries,
            "partitions" => Listing::Partitions,
            "properties" => Listing::Properties,
            "create" => Listing::Create,
            "create_view" => Listing::CreateView,
            _ => return None,
        })
    }

    /// The columns of such a listing.
    pub fn schema(self) -> SchemaRef {
        let (long, int, text) = (DataType::Int64, DataType::Int32, DataType::Utf8);
        let at = || DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        let file = || {
            let (long, int, text) = (DataType::Int64, DataType::Int32, DataType::Utf8);
            let by_column = |value: DataType| map_type(DataType::Int32, value);
            vec![
                ("content", int.clone()),
                ("file_path", text.clone()),
                ("file_format", text.clone()),
                ("spec_id", int.clone()),
                ("partition", text.clone()),
                ("record_count", long.clone()),
                ("file_size_in_bytes", long.clone()),
                ("column_sizes", by_column(DataType::Int64)),
                ("value_counts", by_column(DataType::Int64)),
                ("null_value_counts", by_column(DataType::Int64)),
                ("nan_value_counts", by_column(DataType::Int64)),
                ("lower_bounds", by_column(DataType::Utf8)),
                ("upper_bounds", by_column(DataType::Utf8)),
                ("split_offsets", list_type(DataType::Int64)),
                ("equality_ids", list_type(DataType::Int32)),
                ("sort_order_id", int.clone()),
                ("referenced_data_file", text),
                ("content_offset", long.clone()),
                ("content_size_in_bytes", long),
            ]
        };
        let columns = match self {
            Listing::Snapshots => vec![
                ("committed_at", at()),
                ("snapshot_id", long.clone()),
                ("parent_id", long.clone()),
                ("sequence_number", long),
                ("operation", text.clone()),
                ("manifest_list", text.clone()),
                ("summary", map_type(text.clone(), text)),
            ],
            Listing::History => vec![
                ("made_current_at", at()),
                ("snapshot_id", long.clone()),
                ("parent_id", long),
                ("is_current_ancestor", DataType::Boolean),
            ],
            Listing::Refs => vec![
                ("name", text.clone()),
                ("type", text),
                ("snapshot_id", long.clone()),
                ("max_reference_age_in_ms", long.clone()),
                ("min_snapshots_to_keep", int),
                ("max_snapshot_age_in_ms", long),
            ],
            Listing::Manifests => vec![
                ("content", int.clone()),
                ("path", text.clone()),
                ("length", long.clone()),
                ("partition_spec_id", int),
                ("sequence_number", long.clone()),
                ("added_snapshot_id", long.clone()),
                ("added_files_count", long.clone()),
                ("existing_files_count", long.clone()),
                ("deleted_files_count", long.clone()),
                ("added_rows_count", long.clone()),
                ("existing_rows_count", long.clone()),
                ("deleted_rows_count", long),
            ],
            Listing::Files => file(),
            Listing::Entries => {
                let own = vec![
                    ("status", int),
                    ("snapshot_id", long.clone()),
                    ("sequence_number", long.clone()),
                    ("file_sequence_number", long),
                ];
                own.into_iter().chain(file()).collect()
            }
            Listing::Partitions => vec![
                ("partition", text),
                ("spec_id", int),
                ("record_count", long.clone()),
                ("file_count", long.clone()),
                ("total_data_file_size_in_bytes", long.clone()),
                ("position_delete_record_count", long.clone()),
                ("position_delete_file_count", long.clone()),
                ("equality_delete_record_count", long.clone()),
                ("equality_delete_file_count", long),
            ],
            Listing::Properties => vec![("property", text.clone()), ("value", text)],
            Listing::Create | Listing::CreateView => vec![("create_statement", text)],
        };
        let fields = columns.into_iter().map(|(name, data_type)| Field::new(name, data_type, true));
        Arc::new(Schema::new(fields.collect::<Vec<_>>()))
    }
}

fn map_type(key: DataType, value: DataType) -> DataType {
    let entry = vec![Field::new("keys", key, false), Field::new("values", value, true)];
    DataType::Map(Arc::new(Field::new("entries", DataType::Struct(entry.into()), false)), false)
}

fn list_type(element: DataType) -> DataType {
    DataType::List(Arc::new(Field::new_list_field(element, true)))
}

/// A listing of one version of a table.
pub struct ListingTable {
    tables: Arc<Tables>,
    table: Table,
    /// Of which files, entries, manifests and partitions are listed.
    snapshot: Option<SnapshotRef>,
    listing: Listing,
    schema: SchemaRef,
}

impl fmt::Debug for ListingTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ListingTable({:?} of {})", self.listing, self.table.ident)
    }
}

impl ListingTable {
    pub fn new(tables: Arc<Tables>, table: Table, snapshot: Option<SnapshotRef>, listing: Listing) -> Self {
        Self { tables, table, snapshot, listing, schema: listing.schema() }
    }

    async fn rows(&self) -> Result<RecordBatch> {
        let columns = match self.listing {
            Listing::Snapshots => self.snapshots(),
            Listing::History => self.history(),
            Listing::Refs => self.refs()?,
            Listing::Manifests => self.manifests(&self.manifest_files().await?),
            Listing::Files => {
                let live = self.entries().await?.into_iter().filter(|(_, entry)| entry.is_alive()).collect::<Vec<_>>();
                self.files(&live)
            }
            Listing::Entries => {
                let entries = self.entries().await?;
                let mut columns = entry_columns(&entries);
                columns.extend(self.files(&entries));
                columns
            }
            Listing::Partitions => self.partitions(&self.entries().await?),
            Listing::Properties => {
                let properties = spelled::properties(&self.table);
                vec![
                    texts(properties.keys().map(|key| Some(key.as_str()))),
                    texts(properties.values().map(|value| Some(value.as_str()))),
                ]
            }
            Listing::Create => vec![texts(std::iter::once(Some(spelled::create_statement(&self.table)?.as_str())))],
            Listing::CreateView => {
                return Err(Error::invalid(format!(
                    "{} is a table, and no view: SHOW CREATE TABLE shows how it is made",
                    self.table.ident
                )));
            }
        };
        RecordBatch::try_new(self.schema.clone(), columns)
            .map_err(|e| Error::internal(format!("listing the {:?} of table {}: {e}", self.listing, self.table.ident)))
    }

    fn snapshots(&self) -> Vec<ArrayRef> {
        let mut snapshots: Vec<&SnapshotRef> = self.table.metadata.snapshots().collect();
        snapshots.sort_by_key(|snapshot| (snapshot.sequence_number(), snapshot.timestamp_ms()));
        let mut summaries = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
        for snapshot in &snapshots {
            let properties: BTreeMap<_, _> = snapshot.summary().additional_properties.iter().collect();
            for (key, value) in properties {
                summaries.keys().append_value(key);
                summaries.values().append_value(value);
            }
            // Keys and values are as many: it cannot fail.
            let _ = summaries.append(true);
        }
        let of = |pick: &dyn Fn(&SnapshotRef) -> Option<i64>| longs(snapshots.iter().map(|s| pick(s)));
        vec![
            times(snapshots.iter().map(|s| s.timestamp_ms())),
            of(&|s| Some(s.snapshot_id())),
            of(&|s| s.parent_snapshot_id()),
            of(&|s| Some(s.sequence_number())),
            texts(snapshots.iter().map(|s| Some(s.summary().operation.as_str()))),
            texts(snapshots.iter().map(|s| Some(s.manifest_list()))),
            Arc::new(summaries.finish()),
        ]
    }

    fn history(&self) -> Vec<ArrayRef> {
        let metadata = &self.table.metadata;
        let mut ancestors = std::collections::HashSet::new();
        let mut next = metadata.current_snapshot_id();
        while let Some(id) = next.filter(|id| ancestors.insert(*id)) {
            next = metadata.snapshot_by_id(id).and_then(|snapshot| snapshot.parent_snapshot_id());
        }
        let history = metadata.history();
        let parent = |id| metadata.snapshot_by_id(id).and_then(|snapshot| snapshot.parent_snapshot_id());
        let mut is_ancestor = BooleanBuilder::new();
        history.iter().for_each(|entry| is_ancestor.append_value(ancestors.contains(&entry.snapshot_id)));
        vec![
            times(history.iter().map(|entry| entry.timestamp_ms())),
            longs(history.iter().map(|entry| Some(entry.snapshot_id))),
            longs(history.iter().map(|entry| parent(entry.snapshot_id))),
            Arc::new(is_ancestor.finish()),
        ]
    }

    fn refs(&self) -> Result<Vec<ArrayRef>> {
        let refs = refs_json(&self.table)?;
        let number = |key: &'static str| longs(refs.iter().map(|(_, reference)| reference[key].as_i64()));
        let keep = refs.iter().map(|(_, reference)| i32::try_from(reference["min-snapshots-to-keep"].as_i64()?).ok());
        Ok(vec![
            texts(refs.iter().map(|(name, _)| Some(name.as_str()))),
            texts(refs.iter().map(|(_, reference)| reference["type"].as_str())),
            number("snapshot-id"),
            number("max-ref-age-ms"),
            ints(keep),
            number("max-snapshot-age-ms"),
        ])
    }

    async fn manifest_files(&self) -> Result<Vec<ManifestFile>> {
        match &self.snapshot {
            Some(snapshot) => {
                let list = self.tables.cache.manifest_list(&self.table.metadata, snapshot).await?;
                Ok(list.entries().to_vec())
            }
            None => Ok(Vec::new()),
        }
    }

    fn manifests(&self, manifests: &[ManifestFile]) -> Vec<ArrayRef> {
        let count = |pick: fn(&ManifestFile) -> Option<u32>| {
            longs(manifests.iter().map(|manifest| pick(manifest).map(i64::from)))
        };
        let rows =
            |pick: fn(&ManifestFile) -> Option<u64>| longs(manifests.iter().map(|manifest| long(pick(manifest)?)));
        vec![
            ints(manifests.iter().map(|manifest| {
                Some(match manifest.content {
                    ManifestContentType::Data => 0,
                    ManifestContentType::Deletes => 1,
                })
            })),
            texts(manifests.iter().map(|manifest| Some(manifest.manifest_path.as_str()))),
            longs(manifests.iter().map(|manifest| Some(manifest.manifest_length))),
            ints(manifests.iter().map(|manifest| Some(manifest.partition_spec_id))),
            longs(manifests.iter().map(|manifest| Some(manifest.sequence_number))),
            longs(manifests.iter().map(|manifest| Some(manifest.added_snapshot_id))),
            count(|manifest| manifest.added_files_count),
            count(|manifest| manifest.existing_files_count),
            count(|manifest| manifest.deleted_files_count),
            rows(|manifest| manifest.added_rows_count),
            rows(|manifest| manifest.existing_rows_count),
            rows(|manifest| manifest.deleted_rows_count),
        ]
    }

    /// Every entry with its spec, in the order of the manifests.
    async fn entries(&self) -> Result<Vec<(i32, ManifestEntryRef)>> {
        let mut entries = Vec::new();
        for manifest in self.manifest_files().await? {
            let loaded = self.tables.cache.manifest(&manifest).await?;
            entries.extend(loaded.entries().iter().map(|entry| (manifest.partition_spec_id, entry.clone())));
        }
        Ok(entries)
    }

    fn partition(&self, spec_id: i32, file: &DataFile) -> Option<String> {
        let metadata = &self.table.metadata;
        let spec = metadata.partition_spec_by_id(spec_id)?;
        let values = spec.fields().iter().zip(file.partition().fields()).map(|(field, value)| {
            let source = metadata.schemas_iter().find_map(|schema| schema.field_by_id(field.source_id));
            let result = source.and_then(|source| field.transform.result_type(&source.field_type).ok());
            let text = result.map(|result| {
                let at = match (result.as_primitive_type(), value) {
                    (Some(of), Some(Literal::Primitive(value))) => moment(of, value),
                    _ => None,
                };
                at.unwrap_or_else(|| field.transform.to_human_string(&result, value.as_ref()))
            });
            format!("{}={}", field.name, text.unwrap_or_else(|| "?".into()))
        });
        Some(values.collect::<Vec<_>>().join("/"))
    }

    fn files(&self, entries: &[(i32, ManifestEntryRef)]) -> Vec<ArrayRef> {
        let files = || entries.iter().map(|(_, entry)| entry.data_file());
        let counts = |pick: fn(&DataFile) -> &HashMap<i32, u64>| {
            let mut maps = MapBuilder::new(None, Int32Builder::new(), Int64Builder::new());
            for file in files() {
                for (id, value) in pick(file).iter().collect::<BTreeMap<_, _>>() {
                    maps.keys().append_value(*id);
                    maps.values().append_option(long(*value));
                }
                let _ = maps.append(true);
            }
            Arc::new(maps.finish()) as ArrayRef
        };
        let bounds = |pick: fn(&DataFile) -> &HashMap<i32, Datum>| {
            let mut maps = MapBuilder::new(None, Int32Builder::new(), StringBuilder::new());
            for file in files() {
                let sorted: BTreeMap<i32, String> =
                    pick(file).iter().map(|(id, bound)| (*id, readable(bound))).collect();
                for (id, bound) in sorted {
                    maps.keys().append_value(id);
                    maps.values().append_value(bound);
                }
                let _ = maps.append(true);
            }
            Arc::new(maps.finish()) as ArrayRef
        };
        let partitions: Vec<Option<String>> =
            entries.iter().map(|(spec_id, entry)| self.partition(*spec_id, entry.data_file())).collect();
        let formats: Vec<String> = files().map(|file| file.file_format().to_string()).collect();
        let referenced: Vec<Option<String>> = files().map(DataFile::referenced_data_file).collect();
        let mut offsets = ListBuilder::new(Int64Builder::new());
        let mut equality = ListBuilder::new(Int32Builder::new());
        for file in files() {
            let split = file.split_offsets();
            offsets.values().append_slice(split.unwrap_or_default());
            offsets.append(split.is_some());
            let ids = file.equality_ids();
            equality.values().append_slice(ids.as_deref().unwrap_or_default());
            equality.append(ids.is_some());
        }
        vec![
            ints(files().map(|file| Some(content(file)))),
            texts(files().map(|file| Some(file.file_path()))),
            texts(formats.iter().map(|format| Some(format.as_str()))),
            ints(entries.iter().map(|(spec_id, _)| Some(*spec_id))),
            texts(partitions.iter().map(Option::as_deref)),
            longs(files().map(|file| long(file.record_count()))),
            longs(files().map(|file| long(file.file_size_in_bytes()))),
            counts(DataFile::column_sizes),
            counts(DataFile::value_counts),
            counts(DataFile::null_value_counts),
            counts(DataFile::nan_value_counts),
            bounds(DataFile::lower_bounds),
            bounds(DataFile::upper_bounds),
            Arc::new(offsets.finish()),
            Arc::new(equality.finish()),
            ints(files().map(DataFile::sort_order_id)),
            texts(referenced.iter().map(Option::as_deref)),
            longs(files().map(DataFile::content_offset)),
            longs(files().map(DataFile::content_size_in_bytes)),
        ]
    }

    fn partitions(&self, entries: &[(i32, ManifestEntryRef)]) -> Vec<ArrayRef> {
        /// Data, then position deletes, then equality deletes: rows and files.
        #[derive(Default)]
        struct Sums {
            rows: [u64; 3],
            files: [u64; 3],
            data_bytes: u64,
        }
        let mut sums: BTreeMap<(i32, String), Sums> = BTreeMap::new();
        for (spec_id, entry) in entries.iter().filter(|(_, entry)| entry.is_alive()) {
            let file = entry.data_file();
            let partition = self.partition(*spec_id, file).unwrap_or_default();
            let sum = sums.entry((*spec_id, partition)).or_default();
            let kind = match file.content_type() {
                DataContentType::Data => 0,
                DataContentType::PositionDeletes => 1,
                DataContentType::EqualityDeletes => 2,
            };
            sum.rows[kind] += file.record_count();
            sum.files[kind] += 1;
            if kind == 0 {
                sum.data_bytes += file.file_size_in_bytes();
            }
        }
        let column = |pick: fn(&Sums) -> u64| longs(sums.values().map(|sum| long(pick(sum))));
        vec![
            texts(sums.keys().map(|(_, partition)| Some(partition.as_str()))),
            ints(sums.keys().map(|(spec_id, _)| Some(*spec_id))),
            column(|sum| sum.rows[0]),
            column(|sum| sum.files[0]),
            column(|sum| sum.data_bytes),
            column(|sum| sum.rows[1]),
            column(|sum| sum.files[1]),
            column(|sum| sum.rows[2]),
            column(|sum| sum.files[2]),
        ]
    }
}

fn entry_columns(entries: &[(i32, ManifestEntryRef)]) -> Vec<ArrayRef> {
    let status = |entry: &ManifestEntryRef| match entry.status() {
        ManifestStatus::Existing => 0,
        ManifestStatus::Added => 1,
        ManifestStatus::Deleted => 2,
    };
    vec![
        ints(entries.iter().map(|(_, entry)| Some(status(entry)))),
        longs(entries.iter().map(|(_, entry)| entry.snapshot_id())),
        longs(entries.iter().map(|(_, entry)| entry.sequence_number())),
        longs(entries.iter().map(|(_, entry)| entry.file_sequence_number)),
    ]
}

/// As manifests number it.
fn content(file: &DataFile) -> i32 {
    match file.content_type() {
        DataContentType::Data => 0,
        DataContentType::PositionDeletes => 1,
        DataContentType::EqualityDeletes => 2,
    }
}

fn long(value: u64) -> Option<i64> {
    i64::try_from(value).ok()
}

fn longs(values: impl Iterator<Item = Option<i64>>) -> ArrayRef {
    let mut column = Int64Builder::new();
    values.for_each(|value| column.append_option(value));
    Arc::new(column.finish())
}

fn ints(values: impl Iterator<Item = Option<i32>>) -> ArrayRef {
    let mut column = Int32Builder::new();
    values.for_each(|value| column.append_option(value));
    Arc::new(column.finish())
}

fn texts<'a>(values: impl Iterator<Item = Option<&'a str>>) -> ArrayRef {
    let mut column = StringBuilder::new();
    values.for_each(|value| column.append_option(value));
    Arc::new(column.finish())
}

fn times(millis: impl Iterator<Item = i64>) -> ArrayRef {
    let mut column = TimestampMicrosecondBuilder::new().with_timezone("UTC");
    millis.for_each(|millis| column.append_option(millis.checked_mul(1000)));
    Arc::new(column.finish())
}

#[async_trait]
impl TableProvider for ListingTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::View
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        let rows = self.rows().await.map_err(Error::into_datafusion)?;
        MemTable::try_new(self.schema.clone(), vec![vec![rows]])?.scan(state, projection, filters, limit).await
    }
}
