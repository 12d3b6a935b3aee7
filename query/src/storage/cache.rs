//! Parsed table metadata, by location. Everything here is immutable, so an entry is never wrong, only dropped when room
//! is needed. Many that ask for the same location at the same time cause one read.
//!
//! The entries of a manifest inherit their sequence number and their snapshot from the list that names it, and not every list says the
//! same of one manifest: that of a transaction has another sequence number once COMMIT makes it anew on what others have written
//! meanwhile. Manifests are therefore kept by what their entries inherit, too.
//!
//! Half of the bytes for manifests, a quarter each for metadata.json and manifest lists. Manifests are kept [`Packed`], and weigh what
//! they take. Of the others, what is weighed is the size of the object times a factor for what it takes once parsed. What weighs more
//! than there is room for is not kept.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use datafusion::common::runtime::SpawnedTask;
use futures::FutureExt;
use iceberg::io::FileIO;
use iceberg::spec::{Manifest, ManifestFile, ManifestList, Snapshot, TableMetadata, ViewMetadata};
use moka::future::Cache;

use super::Storage;
use super::io::LakeIo;
use super::packed::Packed;
use crate::error::{Error, Result, words_of_panic};
use crate::table::{sound, view};

/// What a parsed object takes, against its size on disk (Avro and JSON are compact; maps and strings are not).
const PARSED_FACTOR: u64 = 6;

type Weighed<T> = Cache<String, (Arc<T>, u32)>;

/// Caches of parsed metadata, bounded in bytes.
#[derive(Debug, Clone)]
pub struct MetadataCache {
    storage: Arc<Storage>,
    file_io: FileIO,
    tables: Weighed<TableMetadata>,
    lists: Weighed<ManifestList>,
    manifests: Weighed<Packed>,
    views: Weighed<ViewMetadata>,
}

impl MetadataCache {
    pub fn new(storage: Arc<Storage>, capacity_bytes: u64) -> Self {
        let file_io = LakeIo::new(storage.clone()).file_io();
        let quarter = capacity_bytes / 4;
        // Views are small, and few.
        let views = weighed(capacity_bytes / 100);
        Self {
            storage,
            file_io,
            tables: weighed(quarter),
            lists: weighed(quarter),
            manifests: weighed(2 * quarter),
            views,
        }
    }

    /// The table metadata at `location`.
    ///
    /// # Errors
    /// `NotFound` if there is no such object: a pointer that was read long ago may lead to one removed since.
    pub async fn table(&self, location: &str) -> Result<Arc<TableMetadata>> {
        let load = async {
            let bytes = self.storage.read(location).await?;
            let gzip = bytes.starts_with(&[0x1f, 0x8b]);
            let metadata: TableMetadata = match gzip {
                true => TableMetadata::read_from(&self.file_io, location)
                    .await
                    .map_err(|e| unreadable(location, e.into()))?,
                false => table_from(&bytes).map_err(|e| {
                    unreadable(location, Error::corrupt(format!("not the metadata of an Iceberg table: {e}")))
                })?,
            };
            Ok((Arc::new(metadata), weight(bytes.len() as u64)))
        };
        get(&self.tables, location, load).await
    }

    /// What it takes now, about, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tables.weighted_size() + self.lists.weighted_size() + self.manifests.weighted_size()
    }

    /// Puts metadata that this node has just committed.
    pub async fn put_table(&self, location: &str, metadata: Arc<TableMetadata>, bytes: usize) {
        self.tables.insert(location.to_owned(), (metadata, weight(bytes as u64))).await;
    }

    /// The metadata of the view at `location`.
    ///
    /// # Errors
    /// As [`view::read`].
    pub async fn view(&self, location: &str) -> Result<Arc<ViewMetadata>> {
        let load = async { Ok((Arc::new(view::read(&self.storage, location).await?), weight(0))) };
        get(&self.views, location, load).await
    }

    /// The manifests of `snapshot`.
    pub async fn manifest_list(&self, metadata: &TableMetadata, snapshot: &Snapshot) -> Result<Arc<ManifestList>> {
        let location = snapshot.manifest_list();
        let load = async {
            let bytes = self.storage.read(location).await?;
            let list = ManifestList::parse_with_version(&bytes, metadata.format_version())
                .map_err(|e| unreadable(location, e.into()))?;
            Ok((Arc::new(list), weight(bytes.len() as u64)))
        };
        get(&self.lists, location, load).await
    }

    /// Whether a manifest's entries are here.
    pub fn has_manifest(&self, file: &ManifestFile) -> bool {
        self.manifests.contains_key(&manifest_key(file))
    }

    /// A manifest's entries, with what they inherit from its place in the list.
    pub async fn manifest(&self, file: &ManifestFile) -> Result<Manifest> {
        // Boxed, as every load: many wait for manifests, and hold what they wait for.
        let packed = Box::pin(self.packed(file)).await?;
        there(&file.manifest_path, async move { packed.manifest() }).await
    }

    /// The same as they are kept.
    pub async fn packed(&self, file: &ManifestFile) -> Result<Arc<Packed>> {
        let location = file.manifest_path.as_str();
        let load = async {
            let (of, io) = (file.clone(), self.file_io.clone());
            there(location, async move {
                let manifest = of.load_manifest(&io).await?;
                let packed = Packed::new(&manifest)?;
                let schema = serde_json::to_vec(manifest.metadata().schema()).map_or(0, |json| json.len());
                let weight = packed.bytes() as u64 + u64::from(weight(schema as u64));
                Ok((Arc::new(packed), u32::try_from(weight).unwrap_or(u32::MAX)))
            })
            .await
        };
        get_as(&self.manifests, &manifest_key(file), location, load).await
    }
}

/// What the entries of a manifest are kept by: its location, and what they inherit.
fn manifest_key(file: &ManifestFile) -> String {
    format!("{}@{}@{}", file.manifest_path, file.sequence_number, file.added_snapshot_id)
}

/// Does it in a task: decoding takes longer than reading, and manifests that are asked for together are decoded on several cores.
async fn there<T: Send + 'static>(
    location: &str,
    decoding: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let decoded = SpawnedTask::spawn(decoding).join_unwind().await;
    decoded.map_err(Error::internal).flatten().map_err(|e| unreadable(location, e))
}

fn unreadable(location: &str, error: Error) -> Error {
    error.while_doing(format_args!("reading {location}"))
}

fn weighed<T: Send + Sync + 'static>(capacity_bytes: u64) -> Weighed<T> {
    Cache::builder().max_capacity(capacity_bytes).weigher(|_, (_, weight)| *weight).build()
}

fn weight(bytes: u64) -> u32 {
    u32::try_from(bytes.saturating_mul(PARSED_FACTOR).max(1024)).unwrap_or(u32::MAX)
}

/// Table metadata from JSON.
fn table_from(json: &[u8]) -> serde_json::Result<TableMetadata> {
    serde_json::from_slice(json).or_else(|error| {
        let mended = serde_json::from_slice(json).ok().and_then(sound::without_void_of_gone);
        mended.and_then(|mended| serde_json::from_value(mended).ok()).ok_or(error)
    })
}

async fn get<T: Send + Sync + 'static>(
    cache: &Weighed<T>,
    location: &str,
    load: impl Future<Output = Result<(Arc<T>, u32)>>,
) -> Result<Arc<T>> {
    get_as(cache, location, location, load).await
}

/// [`get`] of what is kept by more than the location that it is read from.
async fn get_as<T: Send + Sync + 'static>(
    cache: &Weighed<T>,
    key: &str,
    location: &str,
    load: impl Future<Output = Result<(Arc<T>, u32)>>,
) -> Result<Arc<T>> {
    // A parser that panics has met something damaged.
    let guarded = async {
        AssertUnwindSafe(load).catch_unwind().await.unwrap_or_else(|panic| {
            let damaged = Error::corrupt(format!("it is damaged ({})", words_of_panic(&*panic)));
            Err(unreadable(location, damaged))
        })
    };
    match cache.try_get_with_by_ref(key, Box::pin(guarded)).await {
        Ok((value, _)) => Ok(value),
        Err(error) => Err(Error::clone(&error)),
    }
}

#[cfg(test)]
mod tests {
    use iceberg::spec::ManifestWriterBuilder;

    use super::*;
    use crate::config::{Config, Options, S3Config};
    use crate::storage::packed::tests::{described, metadata};
    use crate::table::version::MANIFEST_TARGET_BYTES;

    #[test]
    fn there_is_room_for_a_manifest_of_the_size_that_merging_aims_at() {
        let warehouse = Some("file:///nowhere".to_owned());
        let config = Config::new(Options { warehouse, ..Options::default() }).unwrap();
        let storage = Storage::new(config.warehouse, S3Config::default());
        // As a node's tables have it.
        let cache = MetadataCache::new(storage, config.metadata_cache_bytes / 2);
        let room = cache.manifests.policy().max_capacity().unwrap();
        let files = 1000;
        let packed = Packed::new(&Manifest::new(metadata(), (0..files).map(described).collect())).unwrap();
        // Even if each entry took no more than a hundred bytes of it.
        let most = MANIFEST_TARGET_BYTES.unsigned_abs() / 100 / u64::from(files.unsigned_abs());
        assert!(packed.bytes() as u64 * most <= room, "{room} bytes");
    }

    #[tokio::test]
    async fn entries_inherit_from_the_list_that_they_are_asked_for_by() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::new(format!("file://{}", dir.path().display()), S3Config::default());
        let output = LakeIo::new(storage.clone()).output(&format!("{}/m.avro", storage.warehouse()));
        let cache = MetadataCache::new(storage, 64 << 20);
        let of = metadata();
        let builder = ManifestWriterBuilder::new(output, None, of.schema().clone(), of.partition_spec().clone());
        let mut writer = builder.build_v3_data();
        // Less than 0: inherited.
        writer.add_file(described(1).data_file().clone(), -1).unwrap();
        let written = writer.write_manifest_file().await.unwrap();
        for (sequence_number, added_snapshot_id) in [(2, 5), (9, 5), (9, 6), (2, 5)] {
            let listed = ManifestFile { sequence_number, added_snapshot_id, ..written.clone() };
            let manifest = cache.manifest(&listed).await.unwrap();
            let [entry] = manifest.entries() else { panic!("{manifest:?}") };
            let inherited = (entry.sequence_number(), entry.file_sequence_number, entry.snapshot_id());
            assert_eq!(inherited, (Some(sequence_number), Some(sequence_number), Some(added_snapshot_id)));
            assert!(cache.has_manifest(&listed));
        }
    }
}
