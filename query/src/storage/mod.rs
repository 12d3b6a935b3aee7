//! Objects: data files, manifests and table metadata, on the local file system or S3.
//!
//! One layer serves everybody: [`Storage`] turns a location (`file:///a/b`, `s3://bucket/a/b`) into an object store and
//! a path, DataFusion's scans use the same stores, and [`io::LakeIo`] gives them to the iceberg crate.
//!
//! What holds:
//! - Objects are only ever created, never replaced by another: every name carries a fresh uuid. Creation is conditional, but for data
//!   files, whose sendings all have the same bytes.
//! - A request may be done after whoever sent it has given up and sent it again ([`unanswered`]): nothing that counts is hurt by that.
//! - Nothing counts before [`Storage::persist`] returned: on `file://` the file and the directories that lead to it
//!   are synced to disk. A pointer is swapped only after that.
//! - Locations are taken literally: Iceberg paths are never percent-decoded.
//! - Keys and secrets reach neither log nor error.
//! - An upload that is given up is aborted ([`uploads`]), and one whose process has died once the sweep finds it ([`abandoned`]).
//! - A bucket is reached as its warehouse says, or as the node's own configuration does.
//! - A node that keeps to its warehouses opens nothing outside of them, on disk or in a bucket, whatever the metadata of a table names
//!   ([`Storage::refuses`]): its keys may open more than its clients may.
//!
//! Limits: metadata objects of at most [`MAX_METADATA_BYTES`]; at most [`MAX_BUCKETS`] buckets at a time.

pub mod abandoned;
pub mod cache;
mod columns;
pub mod io;
pub mod names;
mod outside;
pub mod packed;
mod unanswered;
pub mod uploads;

use std::collections::HashMap;
use std::path::{Path as FsPath, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use datafusion::execution::object_store::ObjectStoreUrl;
use lake_client::catalog::Namespace;
use lake_client::warehouse::{self, SecretRef, Warehouses};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreExt, RetryConfig};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use url::Url;

use crate::config::{Credential, S3Config};
use crate::error::{Error, Kind, Result};
use uploads::TidyUploads;

/// Largest metadata object (metadata.json, manifest list, manifest) that is read.
pub const MAX_METADATA_BYTES: u64 = 512 << 20;
/// Most buckets that are open at a time.
pub const MAX_BUCKETS: usize = 64;

/// The region where none is named, as object_store has it.
const DEFAULT_REGION: &str = "us-east-1";
/// How long a request to S3 is tried again.
const RETRY_FOR: Duration = Duration::from_secs(30);
/// How long one attempt to write to the warehouse may take at start ...
const CHECK_ATTEMPT: Duration = Duration::from_secs(15);
/// ... and how many there are.
const CHECK_ATTEMPTS: usize = 3;

/// The one spelling of a location that engines spell in several ways: `s3a://b/x` is `s3://b/x`, `file:/x` and `/x` are `file:///x`.
pub fn canonical(location: &str) -> String {
    if let Some(rest) = location.strip_prefix("s3a://") {
        return format!("s3://{rest}");
    }
    match location.strip_prefix("file:").unwrap_or(location) {
        path if path.starts_with('/') && !path.starts_with("//") => format!("file://{path}"),
        _ => location.to_owned(),
    }
}

/// How S3 is reached, with no bucket named: what the configuration says, and else the environment.
pub fn s3_settings(config: &S3Config) -> AmazonS3Builder {
    let mut builder = AmazonS3Builder::from_env().with_virtual_hosted_style_request(!config.path_style);
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint).with_allow_http(endpoint.starts_with("http://"));
    }
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    if let (Some(key), Some(secret)) = (&config.access_key, &config.secret_key) {
        builder = builder.with_access_key_id(key.expose()).with_secret_access_key(secret.expose());
    }
    for (key, timeout) in timeouts(config) {
        builder = builder.with_config(AmazonS3ConfigKey::Client(key), timeout);
    }
    builder
}

/// The time-outs that the configuration says something about, as object_store takes them.
fn timeouts(config: &S3Config) -> impl Iterator<Item = (ClientConfigKey, String)> {
    let said =
        [(ClientConfigKey::Timeout, config.request_timeout), (ClientConfigKey::ConnectTimeout, config.connect_timeout)];
    said.into_iter().filter_map(|(key, timeout)| Some((key, format!("{}ms", timeout?.as_millis()))))
}

/// The object stores, by location.
#[derive(Debug)]
pub struct Storage {
    warehouse: String,
    s3: S3Config,
    local: Arc<LocalFileSystem>,
    /// The other warehouses. Changed only while `buckets` is locked.
    warehouses: RwLock<Arc<Warehouses>>,
    buckets: Mutex<HashMap<String, Bucket>>,
    /// Whether nothing is opened but what is in warehouses.
    keeps_to_warehouses: AtomicBool,
    /// What makes the requests to S3, whoever wants them: a connection is served by the runtime that has opened it. `None` where
    /// the storage was made outside of one.
    io: Option<Handle>,
    /// Uploads that are being aborted.
    uploads: TaskTracker,
    /// Metadata objects read so far.
    metadata_reads: AtomicU64,
    /// Directories whose own entry in their parent is known to be on disk.
    durable_dirs: Mutex<std::collections::HashSet<PathBuf>>,
    dir_syncs: Arc<DirSyncs>,
}

/// A bucket that is open.
#[derive(Debug, Clone)]
struct Bucket {
    store: Arc<dyn ObjectStore>,
    /// What that is over.
    s3: AmazonS3,
    region: String,
}

/// Syncs of directories: those who wait for one share the next.
#[derive(Debug, Default)]
struct DirSyncs(Mutex<HashMap<PathBuf, Arc<DirSync>>>);

#[derive(Debug, Default)]
struct DirSync {
    /// How many have begun.
    begun: AtomicU64,
    /// The number of the last one that went well, held while one is under way.
    done: Mutex<u64>,
}

impl DirSyncs {
    /// Returns once the directory, as it is now, is on disk. Blocks.
    fn sync(&self, dir: &FsPath) -> std::io::Result<()> {
        let of_dir = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() > MAX_DURABLE_DIRS {
                all.clear();
            }
            all.entry(dir.to_path_buf()).or_default().clone()
        };
        // One that begins later has what is in the directory now.
        let before = of_dir.begun.load(Ordering::SeqCst);
        let mut done = of_dir.done.lock().unwrap_or_else(PoisonError::into_inner);
        if *done <= before {
            let number = of_dir.begun.fetch_add(1, Ordering::SeqCst) + 1;
            std::fs::File::open(dir)?.sync_all()?;
            *done = number;
        }
        Ok(())
    }
}

/// A location, taken apart.
#[derive(Debug, Clone)]
pub struct Object {
    pub store: Arc<dyn ObjectStore>,
    pub path: Path,
    /// What DataFusion knows the store by.
    pub url: ObjectStoreUrl,
}

impl Storage {
    pub fn new(warehouse: impl Into<String>, s3: S3Config) -> Arc<Self> {
        Arc::new(Self {
            warehouse: warehouse.into(),
            s3,
            local: Arc::new(LocalFileSystem::new()),
            warehouses: RwLock::default(),
            buckets: Mutex::default(),
            keeps_to_warehouses: AtomicBool::new(false),
            io: Handle::try_current().ok(),
            uploads: TaskTracker::new(),
            metadata_reads: AtomicU64::new(0),
            durable_dirs: Mutex::default(),
            dir_syncs: Arc::default(),
        })
    }

    /// URI under which tables are created, without a trailing slash.
    pub fn warehouse(&self) -> &str {
        &self.warehouse
    }

    /// The other warehouses, as far as this node knows.
    pub fn warehouses(&self) -> Arc<Warehouses> {
        self.warehouses.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes note of the other warehouses. What is older than what is known changes nothing.
    pub fn learn(&self, now: Warehouses) {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.warehouses();
        if now.revision < before.revision {
            return;
        }
        if now.profiles != before.profiles {
            buckets.retain(|bucket, _| profile_of(&now, bucket) == profile_of(&before, bucket));
        }
        *self.warehouses.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(now);
    }

    /// Under which URI what is made in a namespace is to live.
    ///
    /// # Errors
    /// `Invalid` if its warehouse has the place of this node's own.
    pub fn root_of(&self, namespace: &Namespace) -> Result<String> {
        let warehouses = self.warehouses();
        let Some(profile) = warehouses.of(namespace) else { return Ok(self.warehouse.clone()) };
        let own = &self.warehouse;
        if warehouse::overlap(&profile.root, own) {
            return Err(Error::invalid(format!(
                "{namespace}: the root of its warehouse, {}, and this node's own, {own}, overlap; give the warehouse another",
                profile.root
            )));
        }
        if profile.s3.is_some() && profile.bucket() == warehouse::bucket(own) {
            return Err(Error::invalid(format!(
                "{namespace}: the root of its warehouse, {}, is in the bucket of this node's own, which is reached as the node \
                 is configured: let the warehouse not say how",
                profile.root
            )));
        }
        Ok(profile.root.clone())
    }

    /// Whether a location is inside of a warehouse that this node knows.
    pub fn is_in_warehouse(&self, location: &str) -> bool {
        !location.split('/').any(|part| part == "..")
            && (warehouse::is_under(location, &self.warehouse)
                || self.warehouses().profiles.values().any(|profile| profile.holds(location)))
    }

    /// From now on only what is in warehouses is opened, whatever the metadata of a table names.
    pub fn keep_to_warehouses(&self) {
        self.keeps_to_warehouses.store(true, Ordering::Relaxed);
    }

    /// Whether a client may name this place: in a warehouse, or anywhere if the node does not keep to those.
    pub fn may_be_named(&self, location: &str) -> bool {
        !self.keeps_to_warehouses.load(Ordering::Relaxed)
            || self.is_in_warehouse(location)
            || self.is_in_warehouse(&canonical(location))
    }

    /// Whether it is a file of this machine, or an object in a bucket, outside of every warehouse that this node knows, and those are
    /// not to be had.
    pub fn refuses(&self, location: &str) -> bool {
        if !self.keeps_to_warehouses.load(Ordering::Relaxed) || self.is_in_warehouse(location) {
            return false;
        }
        let spelled = canonical(location);
        (spelled.starts_with("file:") || spelled.starts_with("s3://")) && !self.is_in_warehouse(&spelled)
    }

    /// Whether a warehouse says how a bucket is reached, as far as this node knows.
    pub fn knows_bucket(&self, bucket: &str) -> bool {
        warehouse::bucket(&self.warehouse) == Some(bucket)
            || self.warehouses().profiles.values().any(|profile| profile.bucket() == Some(bucket))
    }

    /// How clients reach the objects at a location, in the words of the REST protocol. No secrets.
    pub fn client_config(&self, location: &str) -> std::collections::BTreeMap<String, String> {
        let mut config = std::collections::BTreeMap::new();
        let Some(bucket) = warehouse::bucket(location) else { return config };
        let warehouses = self.warehouses();
        let (endpoint, region, path_style) = match self.other_s3(&warehouses, bucket) {
            Some(s3) => (&s3.endpoint, &s3.region, s3.path_style),
            None => (&self.s3.endpoint, &self.s3.region, self.s3.path_style),
        };
        let mut set = |name: &str, value: String| config.insert(name.to_owned(), value);
        if let Some(endpoint) = endpoint {
            set("s3.endpoint", endpoint.clone());
        }
        if let Some(region) = region {
            set("s3.region", region.clone());
            set("client.region", region.clone());
        }
        set("s3.path-style-access", path_style.to_string());
        config
    }

    /// The keys that a node was given for the objects at a location; `None` where it was given none, and is known to the store
    /// in another way.
    ///
    /// # Errors
    /// `Invalid`, with where a secret was looked for.
    pub fn keys(&self, location: &str) -> Result<Option<(Credential, Credential)>> {
        let Some(bucket) = warehouse::bucket(location) else { return Ok(None) };
        let warehouses = self.warehouses();
        let reached = match self.other_s3(&warehouses, bucket) {
            Some(s3) => reached(bucket, s3, &self.s3)?,
            None if self.knows_bucket(bucket) => self.s3.clone(),
            None => return Ok(None),
        };
        Ok(reached.access_key.zip(reached.secret_key))
    }

    /// How another warehouse says that this bucket is reached.
    fn other_s3<'a>(&self, warehouses: &'a Warehouses, bucket: &str) -> Option<&'a warehouse::S3> {
        match warehouse::bucket(&self.warehouse) == Some(bucket) {
            true => None,
            false => profile_of(warehouses, bucket),
        }
    }

    /// Writes and removes a small object, so that a wrong warehouse is found at start and not at the first INSERT. A request
    /// that hangs, as one does at a service that is just starting, is made again: at most [`CHECK_ATTEMPTS`] times.
    ///
    /// # Errors
    /// Names the warehouse and what failed.
    pub async fn check(&self) -> Result<()> {
        self.check_patiently(CHECK_ATTEMPT).await
    }

    async fn check_patiently(&self, attempt: Duration) -> Result<()> {
        let unusable =
            |e: Error| Error::new(e.kind, format!("the warehouse {} cannot be written: {e}", self.warehouse));
        let mut unanswered = Vec::new();
        while unanswered.len() < CHECK_ATTEMPTS {
            let location = format!("{}/.lake-check-{}", self.warehouse, uuid::Uuid::new_v4());
            let write_and_remove = async {
                self.write_new(&location, Bytes::from_static(b"lake")).await?;
                self.delete(&location).await
            };
            if let Ok(done) = tokio::time::timeout(attempt, write_and_remove).await {
                done.map_err(unusable)?;
                self.discard(&unanswered).await;
                return Ok(());
            }
            tracing::warn!(%location, "no answer within {} s to writing and removing a small object", attempt.as_secs_f32());
            unanswered.push(location);
        }
        let seconds = attempt.as_secs_f32();
        Err(unusable(Error::storage(format!("no answer within {seconds} s, {CHECK_ATTEMPTS} times in a row"))))
    }

    /// Takes a location apart.
    ///
    /// # Errors
    /// `Invalid` for a scheme lake does not know, and for what cannot be a path; `Denied` for what is refused ([`Storage::refuses`]).
    pub fn resolve(&self, location: &str) -> Result<Object> {
        match self.refuses(location) {
            true => Err(Error::denied(format!(
                "location {location}: this node reads and writes no files outside of its warehouses; a warehouse whose root it is under, or \
                 allow_local_files in its configuration, allows it"
            ))),
            false => self.take_apart(location),
        }
    }

    fn take_apart(&self, location: &str) -> Result<Object> {
        match Self::parse(location)? {
            (Some((bucket, url)), path) => Ok(Object { store: self.bucket(bucket)?.store, path, url }),
            (None, path) => Ok(Object { store: self.local.clone(), path, url: ObjectStoreUrl::local_filesystem() }),
        }
    }

    /// Checks that there can be an object at a location.
    ///
    /// # Errors
    /// `Invalid`, as [`Storage::resolve`].
    pub fn check_location(location: &str) -> Result<()> {
        match Self::parse(location)?.1.as_ref().is_empty() {
            true => Err(Error::invalid(format!("location {location}: it names no object"))),
            false => Ok(()),
        }
    }

    /// A location's bucket with its URL, which files of this machine have not, and the path in it.
    fn parse(location: &str) -> Result<(Option<(&str, ObjectStoreUrl)>, Path)> {
        let wrong = |why: String| Error::invalid(format!("location {location}: {why}"));
        let parse = |path: &str| Path::parse(path).map_err(|e| wrong(e.to_string()));
        if let Some(rest) = location.strip_prefix("s3://").or_else(|| location.strip_prefix("s3a://")) {
            let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
            let scheme = &location[..location.len() - rest.len()];
            let url = ObjectStoreUrl::parse(format!("{scheme}{bucket}")).map_err(|e| wrong(e.to_string()))?;
            return Ok((Some((bucket, url)), parse(path)?));
        }
        let path = match location.split_once("://") {
            Some(("file", path)) => path,
            Some((scheme, _)) => return Err(wrong(format!("the scheme {scheme} is not supported; use file or s3"))),
            None => location.strip_prefix("file:").unwrap_or(location),
        };
        if !path.starts_with('/') {
            return Err(wrong("not an absolute path".into()));
        }
        Ok((None, parse(path)?))
    }

    fn bucket(&self, bucket: &str) -> Result<Bucket> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = buckets.get(bucket) {
            return Ok(open.clone());
        }
        if buckets.len() >= MAX_BUCKETS {
            return Err(Error::exhausted(format!("bucket {bucket}: {MAX_BUCKETS} buckets are in use already")));
        }
        let warehouses = self.warehouses();
        let config = match self.other_s3(&warehouses, bucket) {
            Some(s3) => reached(bucket, s3, &self.s3)?,
            None => self.s3.clone(),
        };
        let mut builder = s3_settings(&config)
            .with_retry(RetryConfig { max_retries: 5, retry_timeout: RETRY_FOR, ..RetryConfig::default() })
            .with_bucket_name(bucket);
        if let Some(io) = &self.io {
            builder = builder.with_http_connector(outside::Outside(io.clone()));
        }
        let region = builder.get_config_value(&AmazonS3ConfigKey::Region).unwrap_or_else(|| DEFAULT_REGION.to_owned());
        let s3 =
            builder.build().map_err(|e| Error::object_store("opening the bucket", &format!("s3://{bucket}"), &e))?;
        let mut store: Arc<dyn ObjectStore> = Arc::new(s3.clone());
        if let Some(io) = &self.io {
            store = Arc::new(TidyUploads::new(store, io.clone(), self.uploads.clone()));
        }
        let open = Bucket { store, s3, region };
        buckets.insert(bucket.to_owned(), open.clone());
        Ok(open)
    }

    /// Waits for uploads that are being aborted.
    pub async fn close(&self) {
        self.uploads.close();
        self.uploads.wait().await;
    }

    /// How many metadata objects have been read. Those that a cache has are not read again.
    pub fn metadata_reads(&self) -> u64 {
        self.metadata_reads.load(Ordering::Relaxed)
    }

    /// Reads a metadata object whole.
    pub async fn read(&self, location: &str) -> Result<Bytes> {
        self.metadata_reads.fetch_add(1, Ordering::Relaxed);
        let object = self.resolve(location)?;
        if object.path.as_ref().is_empty() {
            return Err(Error::invalid(format!("location {location}: it names no object")));
        }
        let failed = |e| Error::object_store("reading", location, &e);
        let result = object.store.get(&object.path).await.map_err(failed)?;
        let size = result.meta.size;
        if size > MAX_METADATA_BYTES {
            return Err(Error::corrupt(format!(
                "reading {location}: {size} bytes is more than metadata has (at most {MAX_METADATA_BYTES})"
            )));
        }
        result.bytes().await.map_err(failed)
    }

    /// Creates an object and makes it durable.
    ///
    /// # Errors
    /// An object that exists already is never overwritten.
    pub async fn write_new(&self, location: &str, bytes: Bytes) -> Result<()> {
        let object = self.resolve(location)?;
        unanswered::create(&*object.store, &object.path, bytes)
            .await
            .map_err(|e| Error::object_store("writing", location, &e))?;
        self.persist(location).await
    }

    /// What the clock shows that dates the objects in this directory: by a small object, which is removed again.
    ///
    /// # Errors
    /// It cannot be written, dated or removed.
    pub async fn clock(&self, directory: &str) -> Result<SystemTime> {
        let location = format!("{directory}/.lake-clock-{}", uuid::Uuid::new_v4());
        self.write_new(&location, Bytes::from_static(b"lake")).await?;
        let object = self.resolve(&location)?;
        let dated = object.store.head(&object.path).await;
        self.delete(&location).await?;
        let dated = dated.map_err(|e| Error::object_store("dating", &location, &e))?;
        Ok(SystemTime::from(dated.last_modified))
    }

    /// Returns once an object that was written whole survives a power cut. S3 acknowledges nothing less; on a local
    /// file system the file and the directories that lead to it are synced.
    pub async fn persist(&self, location: &str) -> Result<()> {
        let Some(path) = self.local_path(location)? else { return Ok(()) };
        let known = {
            let durable = self.durable_dirs.lock().unwrap_or_else(PoisonError::into_inner);
            path.parent().is_some_and(|dir| durable.contains(dir))
        };
        let syncs = self.dir_syncs.clone();
        let dirs = tokio::task::spawn_blocking(move || sync_to_disk(&path, known, &syncs))
            .await
            .map_err(|e| Error::internal(format!("syncing {location}: {e}")))?
            .map_err(|e| {
                let error = object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(e) };
                Error::object_store("syncing to disk", location, &error)
            })?;
        let mut durable = self.durable_dirs.lock().unwrap_or_else(PoisonError::into_inner);
        if durable.len() > MAX_DURABLE_DIRS {
            durable.clear();
        }
        durable.extend(dirs);
        Ok(())
    }

    fn local_path(&self, location: &str) -> Result<Option<PathBuf>> {
        let object = self.resolve(location)?;
        match object.url == ObjectStoreUrl::local_filesystem() {
            false => Ok(None),
            true => self
                .local
                .path_to_filesystem(&object.path)
                .map(Some)
                .map_err(|e| Error::object_store("finding", location, &e)),
        }
    }

    /// Makes a directory, where there are directories: some writers of other engines expect a table's to be there.
    pub async fn prepare_directory(&self, location: &str) -> Result<()> {
        let Some(path) = self.local_path(location)? else { return Ok(()) };
        tokio::fs::create_dir_all(&path).await.map_err(|e| {
            let error = object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(e) };
            Error::object_store("making the directory", location, &error)
        })
    }

    /// Removes an object; one that does not exist is fine.
    pub async fn delete(&self, location: &str) -> Result<()> {
        let object = self.resolve(location)?;
        let removed = unanswered::remove(&*object.store, &object.path).await;
        removed.map_err(|e| Error::object_store("removing", location, &e))
    }

    /// Removes the directories of these objects, and those above, that are left empty, down from `root`, which goes as well. Where there
    /// are no directories nothing happens; one that somebody uses meanwhile stays.
    pub async fn remove_empty_directories(&self, locations: &[&str], root: &str) -> Result<()> {
        let Some(root) = self.local_path(root)? else { return Ok(()) };
        let mut directories = std::collections::BTreeSet::new();
        for location in locations {
            let Some(path) = self.local_path(location)? else { continue };
            directories.extend(path.parent().map(FsPath::to_path_buf));
        }
        let removed = tokio::task::spawn_blocking(move || {
            for directory in directories.iter().rev() {
                let inside = directory.ancestors().take_while(|above| above.starts_with(&root));
                // The first that is not empty ends it; one that is gone already does not.
                for directory in inside {
                    match std::fs::remove_dir(directory) {
                        Ok(()) => {}
                        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                        Err(_) => break,
                    }
                }
            }
        });
        removed.await.map_err(|e| Error::internal(format!("removing empty directories: {e}")))
    }

    /// Removes objects of a commit that certainly did not happen. What cannot be removed is left for the sweep.
    pub async fn discard(&self, locations: &[String]) {
        for location in locations {
            self.discard_one(location).await;
        }
    }

    /// The same of what nothing refers to any more, until then. How many are gone.
    pub async fn discard_until(&self, locations: &[String], deadline: Instant) -> usize {
        let mut gone = 0;
        let all = async {
            for location in locations {
                gone += usize::from(self.discard_one(location).await);
            }
        };
        // The next sweep finds the rest.
        let _ = tokio::time::timeout_at(deadline.into(), all).await;
        gone
    }

    /// Whether it is gone.
    async fn discard_one(&self, location: &str) -> bool {
        match self.delete(location).await {
            Err(error) if error.kind != Kind::NotFound => {
                tracing::warn!(%location, %error, "an unused object could not be removed; the orphan sweep will find it");
                false
            }
            _ => true,
        }
    }

    /// The stores behind `locations`, for DataFusion's registry.
    pub fn url_and_store(&self, location: &str) -> Result<(Url, Arc<dyn ObjectStore>)> {
        let object = self.take_apart(location)?;
        let url: &Url = object.url.as_ref();
        Ok((url.clone(), object.store))
    }
}

/// How the warehouses say that a bucket is reached: those that share one agree.
fn profile_of<'a>(warehouses: &'a Warehouses, bucket: &str) -> Option<&'a warehouse::S3> {
    warehouses.profiles.values().find(|profile| profile.bucket() == Some(bucket))?.s3.as_ref()
}

/// The configuration that a profile stands for, with its secrets, beside what this node's own says of time-outs.
///
/// # Errors
/// `Invalid`, with where a secret was looked for.
fn reached(bucket: &str, s3: &warehouse::S3, own: &S3Config) -> Result<S3Config> {
    let secret = |field: &str, reference: &Option<SecretRef>| match reference {
        None => Ok(None),
        Some(SecretRef::File(path)) => Credential::from_file(field, FsPath::new(path)).map(Some),
        Some(SecretRef::Env(name)) => match std::env::var(name) {
            Ok(value) if !value.is_empty() => Ok(Some(Credential::new(value))),
            _ => Err(Error::invalid(format!("{field}: the environment variable {name} of this node is not set"))),
        },
    };
    let opened = |e: Error| e.while_doing(format_args!("opening the bucket {bucket} as its warehouse says"));
    Ok(S3Config {
        endpoint: s3.endpoint.clone(),
        region: s3.region.clone(),
        path_style: s3.path_style,
        access_key: secret("s3-access-key", &s3.access_key).map_err(opened)?,
        secret_key: secret("s3-secret-key", &s3.secret_key).map_err(opened)?,
        request_timeout: own.request_timeout,
        connect_timeout: own.connect_timeout,
    })
}

/// Most directories remembered as durable. Forgetting them costs a few syncs.
const MAX_DURABLE_DIRS: usize = 100_000;

/// Syncs the file, its directory, and, unless those are `known` to be durable, the directories above.
fn sync_to_disk(path: &FsPath, known: bool, syncs: &DirSyncs) -> std::io::Result<Vec<PathBuf>> {
    std::fs::File::open(path)?.sync_all()?;
    let mut synced = Vec::new();
    for dir in path.ancestors().skip(1) {
        match syncs.sync(dir) {
            Ok(()) => synced.push(dir.to_path_buf()),
            // The file's own directory must be synced. One far above that may not be read is not ours.
            Err(_) if synced.len() > 1 => break,
            Err(e) => return Err(e),
        }
        if known {
            break;
        }
    }
    Ok(synced)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Credential;

    fn local(dir: &FsPath) -> Arc<Storage> {
        Storage::new(format!("file://{}", dir.display()), S3Config::default())
    }

    #[tokio::test]
    async fn objects_are_created_read_and_removed_but_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let storage = local(dir.path());
        storage.check().await.unwrap();
        let location = format!("{}/a b/%20/ü.json", storage.warehouse());
        storage.write_new(&location, Bytes::from_static(b"one")).await.unwrap();
        assert!(dir.path().join("a b/%20/ü.json").exists(), "paths are literal");
        assert_eq!(storage.read(&location).await.unwrap(), "one");
        storage.write_new(&location, Bytes::from_static(b"two")).await.unwrap_err();
        assert_eq!(storage.read(&location).await.unwrap(), "one");
        storage.delete(&location).await.unwrap();
        storage.delete(&location).await.unwrap();
        assert_eq!(storage.read(&location).await.unwrap_err().kind, Kind::NotFound);
    }

    #[test]
    fn a_location_has_one_spelling() {
        for (location, spelled) in [
            ("s3://b/x", "s3://b/x"),
            ("s3a://b/x", "s3://b/x"),
            ("file:///x/y", "file:///x/y"),
            ("file:/x/y", "file:///x/y"),
            ("/x/y", "file:///x/y"),
            ("hdfs://x", "hdfs://x"),
        ] {
            assert_eq!(canonical(location), spelled);
        }
    }

    #[tokio::test]
    async fn a_warehouse_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let error = local(&dir.path().join("file/warehouse")).check().await.unwrap_err();
        assert!(error.message.contains("file/warehouse cannot be written"), "{error}");
    }

    /// An S3 service that leaves the first requests without an answer, and takes every further one.
    async fn hanging_service(hanging: usize) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut hung = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                if hung.len() < hanging {
                    hung.push(stream);
                    continue;
                }
                tokio::spawn(async move {
                    let mut request = [0; 64 << 10];
                    while stream.read(&mut request).await.is_ok_and(|n| n > 0) {
                        let body = "<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>";
                        let head = "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nConnection: close\r\nContent-Length";
                        let answer = format!("{head}: {}\r\n\r\n{body}", body.len());
                        let _ = stream.write_all(answer.as_bytes()).await;
                        let _ = stream.shutdown().await;
                    }
                });
            }
        });
        endpoint
    }

    #[tokio::test]
    async fn a_warehouse_that_does_not_answer_is_asked_again_and_then_named() {
        let attempt = Duration::from_secs(2);
        let at = async |hanging| at(hanging_service(hanging).await).check_patiently(attempt).await;
        at(1).await.unwrap();
        let error = at(usize::MAX).await.unwrap_err();
        assert!(error.message.contains("s3://bucket/warehouse cannot be written: no answer within 2 s"), "{error}");
    }

    /// An S3 service that answers so many requests with this status, and every further one with an object.
    async fn failing_service(failing: usize, status: &'static str) -> (String, Arc<AtomicU64>) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicU64::new(0));
        let requests = asked.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let number = requests.fetch_add(1, Ordering::Relaxed);
                let answer = match (number as usize) < failing {
                    true => format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"),
                    false => "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nLast-Modified: Tue, 01 Dec 2026 00:00:00 GMT\r\n\
                              Connection: close\r\nContent-Length: 4\r\n\r\nlake"
                        .to_owned(),
                };
                let mut request = [0; 64 << 10];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        (endpoint, asked)
    }

    fn at(endpoint: String) -> Arc<Storage> {
        with_timeout(endpoint, None)
    }

    fn with_timeout(endpoint: String, request_timeout: Option<Duration>) -> Arc<Storage> {
        let config = S3Config {
            endpoint: Some(endpoint),
            region: Some("x".into()),
            access_key: Some(Credential::new("key")),
            secret_key: Some(Credential::new("secret")),
            path_style: true,
            request_timeout,
            ..S3Config::default()
        };
        Storage::new("s3://bucket/warehouse", config)
    }

    #[tokio::test]
    async fn a_request_has_the_time_that_is_configured_and_what_is_safe_is_sent_again() {
        let location = "s3://bucket/warehouse/t/metadata/x.json";
        let within = Some(Duration::from_millis(300));
        let storage = with_timeout(hanging_service(1).await, within);
        storage.write_new(location, Bytes::from_static(b"lake")).await.unwrap();
        let storage = with_timeout(hanging_service(1).await, within);
        storage.delete(location).await.unwrap();
        // As object_store removes: once.
        let object = with_timeout(hanging_service(usize::MAX).await, within).resolve(location).unwrap();
        let error = object.store.delete(&object.path).await.unwrap_err();
        let error = Error::object_store("removing", location, &error);
        assert!(error.message.contains("s3_request_timeout_ms"), "{error}");
    }

    #[tokio::test]
    async fn a_store_that_throttles_is_asked_again_and_one_that_refuses_is_named() {
        let location = "s3://bucket/warehouse/t/metadata/x.json";
        for status in ["503 Slow Down", "500 Internal Server Error"] {
            let (endpoint, asked) = failing_service(2, status).await;
            assert_eq!(at(endpoint).read(location).await.unwrap(), "lake", "{status}");
            assert_eq!(asked.load(Ordering::Relaxed), 3, "{status}");
        }
        // With an end.
        let (endpoint, asked) = failing_service(usize::MAX, "503 Slow Down").await;
        let error = at(endpoint).read(location).await.unwrap_err();
        assert_eq!(error.kind, Kind::Storage);
        assert!(error.message.contains(location) && error.message.contains("503"), "{error}");
        assert_eq!(asked.load(Ordering::Relaxed), 6, "once, and five times again");
        // What will not change by asking again is not asked again.
        let (endpoint, asked) = failing_service(usize::MAX, "403 Forbidden").await;
        let error = at(endpoint).read(location).await.unwrap_err();
        assert!(error.message.contains(location), "{error}");
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        // Bound, so that it is nobody else's, and nobody listens there.
        let nobody = tokio::net::TcpSocket::new_v4().unwrap();
        nobody.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let endpoint = format!("http://{}", nobody.local_addr().unwrap());
        let error = at(endpoint).read(location).await.unwrap_err();
        assert!(error.kind == Kind::Storage && error.message.contains(location), "{error}");
    }

    #[test]
    fn those_who_wait_for_a_directory_share_a_sync() {
        const WAITING: u64 = 16;
        let dir = tempfile::tempdir().unwrap();
        let syncs = DirSyncs::default();
        syncs.sync(dir.path()).unwrap();
        let of_dir = syncs.0.lock().unwrap()[dir.path()].clone();
        std::thread::scope(|scope| {
            let held = of_dir.done.lock().unwrap();
            let waiting: Vec<_> = (0..WAITING).map(|_| scope.spawn(|| syncs.sync(dir.path()).unwrap())).collect();
            // Each holds the directory's entry once it has looked it up.
            while (Arc::strong_count(&of_dir) as u64) < WAITING + 2 {
                std::thread::yield_now();
            }
            drop(held);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let begun = of_dir.begun.load(Ordering::SeqCst);
        assert!(begun > 1 && begun < 1 + WAITING, "{begun} syncs");
        syncs.sync(dir.path()).unwrap();
        assert_eq!(of_dir.begun.load(Ordering::SeqCst), begun + 1, "nobody was before it");
        assert!(syncs.sync(&dir.path().join("gone")).is_err());
    }

    #[test]
    fn locations_are_told_apart() {
        let storage = Storage::new("s3://b/p", S3Config { region: Some("x".into()), ..S3Config::default() });
        let object = storage.resolve("s3://b/p/x.parquet").unwrap();
        assert_eq!((object.path.as_ref(), object.url.as_str()), ("p/x.parquet", "s3://b/"));
        assert!(storage.resolve("gs://b/x").unwrap_err().message.contains("gs"));
        assert!(storage.resolve("relative/x").is_err());
        assert!(storage.resolve("file:///a/../b").is_err());
    }

    #[test]
    fn only_what_is_in_warehouses_is_opened_where_nothing_else_may_be() {
        let storage = Storage::new("s3://b/p", S3Config { region: Some("x".into()), ..S3Config::default() });
        let others =
            ["s3://b/px/y", "s3://b/y", "s3a://b/y", "s3://c/p/x", "file:///x", "file:/x", "/x", "s3://b/p/../y"];
        assert!(others.iter().all(|location| !storage.refuses(location)));
        storage.keep_to_warehouses();
        for location in others {
            let error = storage.resolve(location).unwrap_err();
            assert!(error.kind == Kind::Denied && error.message.contains(location), "{error}");
            assert!(error.message.contains("allow_local_files"), "{error}");
        }
        for location in ["s3://b/p/x", "s3a://b/p/t/data/x.parquet"] {
            storage.resolve(location).unwrap();
        }
        let root = lake_client::warehouse::Profile::new("s3://c/p", None).unwrap();
        storage.learn(Warehouses { revision: 1, profiles: [("w".to_owned(), root)].into(), ..Warehouses::default() });
        storage.resolve("s3://c/p/x").unwrap();
        assert!(storage.refuses("s3://c/q/x"));
    }
}
