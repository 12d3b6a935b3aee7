//! Tables as other engines leave them, made by hand: any schema, partition spec, delete file and sequence number.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
use iceberg::io::FileIO;
use iceberg::spec::{
    DataContentType, DataFile, DataFileBuilder, DataFileFormat, FormatVersion, MAIN_BRANCH, ManifestFile, ManifestList,
    ManifestListWriter, ManifestWriterBuilder, NestedField, Operation, PrimitiveType, Schema, Snapshot, SortOrder,
    Struct, Summary, TableMetadata, TableMetadataBuilder, Type, UnboundPartitionSpec,
};
use lake_client::Catalog;
use lake_client::catalog::{TableIdent, TablePointer};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use uuid::Uuid;

use crate::common::Cluster;

pub const FIELD_ID: &str = "PARQUET:field_id";
/// Rows in a row group: few, so that files have several.
const ROW_GROUP_ROWS: usize = 100;

pub fn ident(name: &str) -> TableIdent {
    TableIdent::new("default".parse().unwrap(), name).unwrap()
}

pub fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub fn optional(id: i32, name: &str, primitive: PrimitiveType) -> Arc<NestedField> {
    Arc::new(NestedField::optional(id, name, Type::Primitive(primitive)))
}

pub fn schema(id: i32, fields: impl IntoIterator<Item = Arc<NestedField>>) -> Schema {
    Schema::builder().with_schema_id(id).with_fields(fields).build().unwrap()
}

/// An Arrow field with an Iceberg id.
pub fn with_id(field: Field, id: i32) -> Field {
    field.with_metadata(HashMap::from([(FIELD_ID.to_owned(), id.to_string())]))
}

/// A batch of columns with ids.
pub fn batch(columns: Vec<(i32, &str, ArrayRef)>) -> RecordBatch {
    let fields: Vec<Field> = columns
        .iter()
        .map(|(id, name, array)| with_id(Field::new(*name, array.data_type().clone(), true), *id))
        .collect();
    let arrays = columns.into_iter().map(|(.., array)| array).collect();
    RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), arrays).unwrap()
}

/// What a commit adds: a file, and under which spec, partition and, if it is not the commit's, data sequence number.
pub struct Added {
    pub file: DataFileBuilder,
    pub spec_id: i32,
    pub sequence_number: Option<i64>,
}

impl Added {
    pub fn spec(mut self, spec_id: i32, partition: Struct) -> Self {
        self.spec_id = spec_id;
        self.file.partition(partition);
        self
    }

    pub fn with(mut self, change: impl FnOnce(&mut DataFileBuilder)) -> Self {
        change(&mut self.file);
        self
    }
}

/// A table that somebody else writes.
pub struct Foreign<'a> {
    cluster: &'a Cluster,
    pub metadata: TableMetadata,
    pub location: String,
    files: usize,
}

impl<'a> Foreign<'a> {
    /// A new table, `default.<name>`.
    pub async fn create(
        cluster: &'a Cluster,
        name: &str,
        version: FormatVersion,
        schema: Schema,
        spec: UnboundPartitionSpec,
        properties: &[(&str, &str)],
    ) -> Self {
        let root = format!("file://{}/warehouse/foreign/{name}", cluster.dir.path().display());
        let properties = properties.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let order = SortOrder::unsorted_order();
        let built = TableMetadataBuilder::new(schema.clone(), spec, order, root.clone(), version, properties);
        let mut json = serde_json::to_value(built.unwrap().build().unwrap().metadata).unwrap();
        // The builder numbers columns anew, level by level.
        json["schemas"][0] = serde_json::to_value(&schema).unwrap();
        json["last-column-id"] = schema.highest_field_id().into();
        let metadata: TableMetadata = serde_json::from_value(json).unwrap();
        let location = format!("{root}/metadata/00000.metadata.json");
        let path = path_of(&location);
        std::fs::create_dir_all(std::path::Path::new(path).parent().unwrap()).unwrap();
        std::fs::create_dir_all(path_of(&format!("{root}/data"))).unwrap();
        std::fs::write(path, serde_json::to_vec(&metadata).unwrap()).unwrap();
        let catalog = Catalog::new(cluster.store.clone());
        let _ = catalog.create_namespace(&ident(name).namespace, Default::default(), deadline()).await;
        let pointer =
            TablePointer { uuid: metadata.uuid(), metadata_location: location.clone(), previous_location: None };
        catalog.create_table(&ident(name), &pointer, deadline()).await.unwrap();
        Self { cluster, metadata, location, files: 0 }
    }

    /// Changes the metadata and swaps the pointer.
    pub async fn change(&mut self, name: &str, change: impl FnOnce(TableMetadataBuilder) -> TableMetadataBuilder) {
        let builder = self.metadata.clone().into_builder(Some(self.location.clone()));
        self.metadata = change(builder).build().unwrap().metadata;
        let next = format!("{}/metadata/{}.metadata.json", self.metadata.location(), Uuid::now_v7());
        std::fs::write(path_of(&next), serde_json::to_vec(&self.metadata).unwrap()).unwrap();
        let catalog = Catalog::new(self.cluster.store.clone());
        let current = catalog.load_table(&ident(name), deadline()).await.unwrap().unwrap();
        let pointer = TablePointer {
            uuid: self.metadata.uuid(),
            metadata_location: next.clone(),
            previous_location: Some(std::mem::replace(&mut self.location, next)),
        };
        catalog.swap_table(&ident(name), current.mod_revision, &pointer, None, deadline()).await.unwrap();
    }

    /// Writes a Parquet file as it is given, and describes it as a data file without statistics.
    pub fn data(&mut self, batch: &RecordBatch) -> Added {
        self.data_with(batch, |properties| properties)
    }

    /// The same, written otherwise.
    pub fn data_with(
        &mut self,
        batch: &RecordBatch,
        change: impl FnOnce(WriterPropertiesBuilder) -> WriterPropertiesBuilder,
    ) -> Added {
        self.files += 1;
        let location = format!("{}/data/{:05}.parquet", self.metadata.location(), self.files);
        self.parquet(&location, batch, DataContentType::Data, change(row_groups()))
    }

    /// Deletes rows by file and position.
    pub fn positions(&mut self, deleted: &[(&str, i64)]) -> Added {
        let mut deleted = deleted.to_vec();
        deleted.sort_unstable();
        let required = |name, data_type, id| with_id(Field::new(name, data_type, false), id);
        let schema = ArrowSchema::new(vec![
            required("file_path", DataType::Utf8, i32::MAX - 101),
            required("pos", DataType::Int64, i32::MAX - 102),
        ]);
        let paths = StringArray::from_iter_values(deleted.iter().map(|(path, _)| *path));
        let places = Int64Array::from_iter_values(deleted.iter().map(|(_, place)| *place));
        let batch = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(paths), Arc::new(places)]).unwrap();
        self.files += 1;
        let location = format!("{}/data/{:05}-deletes.parquet", self.metadata.location(), self.files);
        self.parquet(&location, &batch, DataContentType::PositionDeletes, row_groups())
    }

    /// Deletes rows by the values of the batch's columns.
    pub fn equality(&mut self, batch: &RecordBatch) -> Added {
        self.files += 1;
        let location = format!("{}/data/{:05}-deletes.parquet", self.metadata.location(), self.files);
        let ids = batch.schema().fields().iter().map(|field| field.metadata()[FIELD_ID].parse().unwrap()).collect();
        self.parquet(&location, batch, DataContentType::EqualityDeletes, row_groups()).with(|file| {
            file.equality_ids(Some(ids));
        })
    }

    /// Deletes the rows at these positions of one file, by a deletion vector.
    pub fn vector(&mut self, of: &str, deleted: &[u64]) -> Added {
        let positions: roaring::RoaringTreemap = deleted.iter().copied().collect();
        let mut body = vec![0xd1, 0xd3, 0x39, 0x64];
        positions.serialize_into(&mut body).unwrap();
        let mut vector = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
        vector.extend(&body);
        vector.extend(crc32fast::hash(&body).to_be_bytes());
        let footer = serde_json::json!({ "blobs": [{
            "type": "deletion-vector-v1", "fields": [i32::MAX - 2], "snapshot-id": -1, "sequence-number": -1,
            "offset": 4, "length": vector.len(),
            "properties": { "referenced-data-file": of, "cardinality": deleted.len().to_string() },
        }], "properties": {} })
        .to_string();
        let mut puffin = b"PFA1".to_vec();
        puffin.extend(&vector);
        puffin.extend(b"PFA1");
        puffin.extend(footer.as_bytes());
        puffin.extend(u32::try_from(footer.len()).unwrap().to_le_bytes());
        puffin.extend([0; 4]);
        puffin.extend(b"PFA1");
        self.files += 1;
        let location = format!("{}/data/{:05}.puffin", self.metadata.location(), self.files);
        std::fs::write(path_of(&location), &puffin).unwrap();
        let mut file = describe(&location, DataContentType::PositionDeletes, deleted.len() as u64, puffin.len() as u64);
        file.file_format(DataFileFormat::Puffin)
            .referenced_data_file(Some(of.to_owned()))
            .content_offset(Some(4))
            .content_size_in_bytes(Some(i64::try_from(vector.len()).unwrap()));
        Added { file, spec_id: self.metadata.default_partition_spec_id(), sequence_number: None }
    }

    fn parquet(
        &self,
        location: &str,
        batch: &RecordBatch,
        content: DataContentType,
        properties: WriterPropertiesBuilder,
    ) -> Added {
        let options = ArrowWriterOptions::new().with_properties(properties.build()).with_skip_arrow_metadata(true);
        let file = std::fs::File::create(path_of(location)).unwrap();
        let mut writer = ArrowWriter::try_new_with_options(file, batch.schema(), options).unwrap();
        writer.write(batch).unwrap();
        writer.close().unwrap();
        let bytes = std::fs::metadata(path_of(location)).unwrap().len();
        let file = describe(location, content, batch.num_rows() as u64, bytes);
        Added { file, spec_id: self.metadata.default_partition_spec_id(), sequence_number: None }
    }

    /// Commits files as one snapshot of the main branch.
    pub async fn commit(&mut self, name: &str, added: Vec<Added>) -> i64 {
        let io = FileIO::new_with_fs();
        let parent = self.metadata.current_snapshot().cloned();
        let snapshot_id = i64::try_from(self.metadata.snapshots().len()).unwrap() + 1000;
        let sequence_number = self.metadata.next_sequence_number();
        let at = |name: &str| format!("{}/metadata/{name}", self.metadata.location());
        let mut manifests: Vec<ManifestFile> = Vec::new();
        type WithSequence = Vec<(DataFile, Option<i64>)>;
        let mut by_spec: HashMap<(bool, i32), WithSequence> = HashMap::new();
        for added in added {
            let file = added.file.build().unwrap();
            let is_data = file.content_type() == DataContentType::Data;
            by_spec.entry((is_data, added.spec_id)).or_default().push((file, added.sequence_number));
        }
        for ((is_data, spec_id), files) in by_spec {
            let spec = self.metadata.partition_spec_by_id(spec_id).unwrap().as_ref().clone();
            let output = io.new_output(at(&format!("{}.avro", Uuid::now_v7()))).unwrap();
            let schema = self.metadata.current_schema().clone();
            let builder = ManifestWriterBuilder::new(output, Some(snapshot_id), schema, spec);
            let v3 = self.metadata.format_version() == FormatVersion::V3;
            let mut writer = match (is_data, v3) {
                (true, false) => builder.build_v2_data(),
                (false, false) => builder.build_v2_deletes(),
                (true, true) => builder.build_v3_data(),
                (false, true) => builder.build_v3_deletes(),
            };
            for (file, sequence) in files {
                match sequence {
                    Some(sequence) => writer.add_existing_file(file, snapshot_id, sequence, Some(sequence)).unwrap(),
                    None => writer.add_file(file, -1).unwrap(),
                }
            }
            manifests.push(writer.write_manifest_file().await.unwrap());
        }
        if let Some(parent) = &parent {
            let before = std::fs::read(path_of(parent.manifest_list())).unwrap();
            let before = ManifestList::parse_with_version(&before, self.metadata.format_version()).unwrap();
            manifests.extend(before.consume_entries());
        }
        let list_location = at(&format!("list-{}.avro", Uuid::now_v7()));
        let output = io.new_output(&list_location).unwrap().writer().await.unwrap();
        let parent_id = parent.as_ref().map(|parent| parent.snapshot_id());
        let mut list = match self.metadata.format_version() {
            FormatVersion::V3 => {
                let next_row_id = self.metadata.next_row_id();
                ManifestListWriter::v3(output, snapshot_id, parent_id, sequence_number, Some(next_row_id))
            }
            _ => ManifestListWriter::v2(output, snapshot_id, parent_id, sequence_number),
        };
        list.add_manifests(manifests.into_iter()).unwrap();
        list.close().await.unwrap();
        let timestamp_ms = parent.as_ref().map_or(self.metadata.last_updated_ms(), |p| p.timestamp_ms()) + 1000;
        let snapshot = Snapshot::builder()
            .with_snapshot_id(snapshot_id)
            .with_parent_snapshot_id(parent_id)
            .with_sequence_number(sequence_number)
            .with_timestamp_ms(timestamp_ms)
            .with_manifest_list(list_location)
            .with_schema_id(self.metadata.current_schema_id())
            .with_summary(Summary { operation: Operation::Overwrite, additional_properties: HashMap::new() });
        let snapshot = match self.metadata.format_version() {
            FormatVersion::V3 => snapshot.with_row_range(self.metadata.next_row_id(), 1000).build(),
            _ => snapshot.build(),
        };
        self.change(name, |builder| builder.set_branch_snapshot(snapshot, MAIN_BRANCH).unwrap()).await;
        snapshot_id
    }
}

fn row_groups() -> WriterPropertiesBuilder {
    WriterProperties::builder().set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
}

fn describe(location: &str, content: DataContentType, rows: u64, bytes: u64) -> DataFileBuilder {
    let mut file = DataFileBuilder::default();
    file.content(content)
        .file_path(location.to_owned())
        .file_format(DataFileFormat::Parquet)
        .partition(Struct::empty())
        .record_count(rows)
        .file_size_in_bytes(bytes);
    file
}

pub fn location_of(added: &Added) -> String {
    added.file.clone().build().unwrap().file_path().to_owned()
}

pub fn path_of(location: &str) -> &str {
    location.strip_prefix("file://").unwrap()
}
