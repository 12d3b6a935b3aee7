//! Making a store of a bucket or of a directory, and the trial whether conditional puts are honoured.

use std::fs::File;
use std::path::Path as FsPath;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig, UpdateVersion};
use uuid::Uuid;

use super::failure::{is_final, is_lost, is_precondition, late, refused};
use super::local::{LOCK_FILE, make_dir};
use super::{ObjectMetaStore, Swaps};
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Applied, Error};

impl ObjectMetaStore {
    /// The store under `root` of an object store, which must honour conditional puts: that is tried here, on an object of
    /// its own, since there are services that ignore the conditions.
    ///
    /// # Errors
    /// `Refused` if the object store overwrites against a condition; `Unavailable` if it does not answer by the deadline.
    pub async fn open(objects: Arc<dyn ObjectStore>, root: &str, deadline: Instant) -> Result<Self, Error> {
        let root = Path::parse(root).map_err(|e| refused("opening a metadata store", e))?;
        let name = format!("{objects}, under {root:?}");
        let this = Self { objects, root, name, swaps: Swaps::Conditional, listings: Mutex::default() };
        this.prove_conditions(deadline).await?;
        Ok(this)
    }

    /// The store under `root` of an S3 bucket, with what the environment says of the service (`AWS_ENDPOINT_URL`,
    /// `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and so on).
    ///
    /// # Errors
    /// `Refused` for settings that make no sense; as [`ObjectMetaStore::open`].
    pub async fn s3(bucket: &str, root: &str, deadline: Instant) -> Result<Self, Error> {
        Self::s3_as(AmazonS3Builder::from_env(), bucket, root, deadline).await
    }

    /// The same with settings of the caller's.
    ///
    /// # Errors
    /// As it.
    pub async fn s3_as(settings: AmazonS3Builder, bucket: &str, root: &str, deadline: Instant) -> Result<Self, Error> {
        // What is tried again is tried here, where it is known what an earlier attempt may have done.
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let mut builder = settings.with_bucket_name(bucket).with_retry(retry);
        if builder.get_config_value(&AmazonS3ConfigKey::Endpoint).is_some_and(|url| url.starts_with("http://")) {
            builder = builder.with_allow_http(true);
        }
        let objects = builder.build().map_err(|e| refused(&format!("opening bucket {bucket}"), e))?;
        Self::open(Arc::new(objects), root, deadline).await
    }

    /// The store in a directory of the local file system, made if it is not there. Several processes of this machine may
    /// use it at once; over a network file system the lock is as good as that system's.
    ///
    /// # Errors
    /// `Refused` if it cannot be made or opened.
    pub fn local(dir: impl AsRef<FsPath>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let doing = format!("opening the metadata store in {}", dir.display());
        let dir = std::path::absolute(dir).map_err(|e| refused(&doing, e))?;
        make_dir(&dir).map_err(|e| refused(&doing, e))?;
        File::options().create(true).append(true).open(dir.join(LOCK_FILE)).map_err(|e| refused(&doing, e))?;
        let dir = dir.canonicalize().map_err(|e| refused(&doing, e))?;
        let files = Arc::new(LocalFileSystem::new_with_prefix(&dir).map_err(|e| refused(&doing, e))?);
        let name = dir.display().to_string();
        let swaps = Swaps::Locked { dir, files: files.clone() };
        Ok(Self { objects: files, root: Path::default(), name, swaps, listings: Mutex::default() })
    }

    /// Whether a directory has been opened as a store before.
    pub fn is_in(dir: impl AsRef<FsPath>) -> bool {
        dir.as_ref().join(LOCK_FILE).is_file()
    }

    async fn prove_conditions(&self, deadline: Instant) -> Result<(), Error> {
        let doing = "trying whether conditional puts are honoured";
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        loop {
            attempts += 1;
            match self.honours_conditions(deadline).await {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    let message = format!(
                        "{} overwrites an object against If-None-Match or If-Match, or refuses one that should pass: use a service \
                         that honours them",
                        self.name
                    );
                    return Err(refused(doing, message));
                }
                Err(e) if is_final(&e) => return Err(refused(doing, e)),
                Err(e) if !backoff.wait(deadline).await => {
                    return Err(self.unavailable(doing, started, attempts, &e, Applied::No));
                }
                Err(_) => {}
            }
        }
    }

    /// Tries it on an object of its own.
    async fn honours_conditions(&self, deadline: Instant) -> object_store::Result<bool> {
        let path = self.root.clone().join(format!("probe-{}", Uuid::new_v4()));
        let put = async |mode| {
            let options = PutOptions { mode, ..PutOptions::default() };
            let put = self.objects.put_opts(&path, Bytes::from_static(b"probe").into(), options);
            tokio::time::timeout_at(deadline.into(), put).await.unwrap_or_else(|_| Err(late()))
        };
        let first = put(PutMode::Create).await?;
        let second = put(PutMode::Create).await;
        let other = UpdateVersion { e_tag: Some("\"00000000000000000000000000000000\"".to_owned()), version: None };
        let third = put(PutMode::Update(other)).await;
        let fourth = put(PutMode::Update(first.into())).await;
        // Left behind it is harmless.
        let deleted = tokio::time::timeout_at(deadline.into(), self.objects.delete(&path)).await;
        if let Err(e) = deleted.unwrap_or_else(|_| Err(late())) {
            tracing::warn!(object = %path, "an object that was written for a trial could not be removed: {e}");
        }
        let honoured = is_lost(&second) && is_lost(&third) && fourth.is_ok();
        match [second, third, fourth].into_iter().find_map(|put| put.err().filter(|e| !is_precondition(e))) {
            Some(e) if !honoured => Err(e),
            _ => Ok(honoured),
        }
    }
}
