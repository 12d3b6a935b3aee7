//! Which files a version of a table consists of, from its manifests. Whatever cannot be read correctly yet is refused
//! here, by name.

use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{DataContentType, DataFileFormat, ManifestContentType, ManifestEntryRef, ManifestFile};

use crate::error::{Error, Result};
use crate::storage::cache::MetadataCache;
use crate::table::Table;

/// Manifests read at a time.
const MANIFESTS_IN_FLIGHT: usize = 16;

/// The live data files of the current snapshot.
pub async fn files(cache: &MetadataCache, table: &Table) -> Result<Vec<ManifestEntryRef>> {
    let Some(snapshot) = table.metadata.current_snapshot() else { return Ok(Vec::new()) };
    let refused = |what: &str| Error::not_supported(format!("table {} cannot be read yet: {what}", table.ident));
    if snapshot.encryption_key_id().is_some() {
        return Err(refused("it is encrypted"));
    }
    let list = cache.manifest_list(&table.metadata, snapshot).await?;
    for manifest in list.entries() {
        if manifest.key_metadata.is_some() {
            return Err(refused("it is encrypted"));
        }
        if manifest.content == ManifestContentType::Deletes && has_live_files(manifest) {
            return Err(refused("it has delete files (rows were deleted or updated without rewriting their files)"));
        }
    }
    let mut loads = Vec::new();
    for manifest in list.entries() {
        if manifest.content == ManifestContentType::Data && has_live_files(manifest) {
            loads.push(cache.manifest(manifest));
        }
    }
    let manifests: Vec<_> = futures::stream::iter(loads)
        .buffered(MANIFESTS_IN_FLIGHT)
        .try_collect()
        .await
        .map_err(|e: Error| e.while_doing(format_args!("planning table {}", table.ident)))?;
    let mut files = Vec::new();
    for entry in manifests.iter().flat_map(|manifest| manifest.entries()).filter(|entry| entry.is_alive()) {
        let file = entry.data_file();
        if file.content_type() != DataContentType::Data {
            return Err(refused("a data manifest names a delete file"));
        }
        if file.file_format() != DataFileFormat::Parquet {
            return Err(refused(&format!("{} is not a Parquet file", file.file_path())));
        }
        if file.key_metadata().is_some_and(|key| !key.is_empty()) {
            return Err(refused("it is encrypted"));
        }
        files.push(entry.clone());
    }
    Ok(files)
}

/// Counts may be missing, in tables of format version 1. Then the manifest has to be opened.
fn has_live_files(manifest: &ManifestFile) -> bool {
    manifest.added_files_count != Some(0) || manifest.existing_files_count != Some(0)
}
