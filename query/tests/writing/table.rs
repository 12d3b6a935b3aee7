//! A table as another engine would see it: its metadata, read past the query node.

use std::time::{Duration, Instant};

use iceberg::io::FileIO;
use iceberg::spec::{DataFile, ManifestList, ManifestStatus, TableMetadata};
use lake_client::Catalog;
use lake_client::catalog::{TableIdent, TablePointer, Versioned};

use crate::common::Cluster;

pub async fn pointer(cluster: &Cluster, name: &str) -> Versioned<TablePointer> {
    let ident = TableIdent::new("default".parse().unwrap(), name).unwrap();
    let catalog = Catalog::new(cluster.store.clone());
    catalog.load_table(&ident, Instant::now() + Duration::from_secs(10)).await.unwrap().unwrap()
}

pub async fn metadata(cluster: &Cluster, name: &str) -> TableMetadata {
    let location = pointer(cluster, name).await.value.metadata_location;
    TableMetadata::read_from(&FileIO::new_with_fs(), &location).await.unwrap()
}

/// An entry of a manifest of the current snapshot.
#[derive(Debug)]
pub struct Entry {
    pub status: ManifestStatus,
    pub snapshot: i64,
    pub sequence: i64,
    pub file_sequence: i64,
    pub rows: u64,
}

/// What the current snapshot's manifests name.
pub async fn entries(metadata: &TableMetadata) -> Vec<Entry> {
    let io = FileIO::new_with_fs();
    let Some(snapshot) = metadata.current_snapshot() else { return Vec::new() };
    let list = std::fs::read(snapshot.manifest_list().strip_prefix("file://").unwrap()).unwrap();
    let list = ManifestList::parse_with_version(&list, metadata.format_version()).unwrap();
    let mut entries = Vec::new();
    for file in list.entries() {
        let manifest = file.load_manifest(&io).await.unwrap();
        entries.extend(manifest.entries().iter().map(|entry| Entry {
            status: entry.status(),
            snapshot: entry.snapshot_id().unwrap(),
            sequence: entry.sequence_number().unwrap(),
            file_sequence: entry.file_sequence_number.unwrap(),
            rows: entry.record_count(),
        }));
    }
    entries
}

/// The live files of the current snapshot, of data and of deletes.
pub async fn files(metadata: &TableMetadata) -> Vec<DataFile> {
    let io = FileIO::new_with_fs();
    let Some(snapshot) = metadata.current_snapshot() else { return Vec::new() };
    let list = std::fs::read(snapshot.manifest_list().strip_prefix("file://").unwrap()).unwrap();
    let mut files = Vec::new();
    for file in ManifestList::parse_with_version(&list, metadata.format_version()).unwrap().entries() {
        let manifest = file.load_manifest(&io).await.unwrap();
        let alive = manifest.entries().iter().filter(|entry| entry.is_alive());
        files.extend(alive.map(|entry| entry.data_file().clone()));
    }
    files
}

/// The summary of the current snapshot.
pub fn summary(metadata: &TableMetadata, name: &str) -> Option<String> {
    metadata.current_snapshot().unwrap().summary().additional_properties.get(name).cloned()
}

/// The operation of the current snapshot.
pub fn operation(metadata: &TableMetadata) -> String {
    metadata.current_snapshot().unwrap().summary().operation.as_str().to_owned()
}

/// Plays another engine that sets a property.
pub async fn set_property(cluster: &Cluster, name: &str, key: &str, value: &str) {
    let current = pointer(cluster, name).await;
    let location = current.value.metadata_location.clone();
    let builder = metadata(cluster, name).await.into_builder(Some(location.clone()));
    let changed =
        builder.set_properties([(key.to_owned(), value.to_owned())].into()).unwrap().build().unwrap().metadata;
    let new_location = location.replace(".metadata.json", "-set.metadata.json");
    std::fs::write(new_location.strip_prefix("file://").unwrap(), serde_json::to_vec(&changed).unwrap()).unwrap();
    let uuid = current.value.uuid;
    let pointer = TablePointer { uuid, metadata_location: new_location, previous_location: Some(location) };
    let ident = TableIdent::new("default".parse().unwrap(), name).unwrap();
    let catalog = Catalog::new(cluster.store.clone());
    let deadline = Instant::now() + Duration::from_secs(10);
    catalog.swap_table(&ident, current.mod_revision, &pointer, None, deadline).await.unwrap();
}
