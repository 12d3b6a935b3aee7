//! [`Storage`] as the iceberg crate wants it: its `Storage` trait, so that its manifest readers and writers work on
//! the very same objects.
//!
//! The crate asks for implementations that serde can carry to other processes. lake never does that: what comes out of
//! a deserialiser has no storage behind it and says so.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use iceberg::io::{
    FileIO, FileIOBuilder, FileMetadata, FileRead, FileWrite, InputFile, OutputFile, StorageConfig, StorageFactory,
};
use object_store::ObjectStoreExt;
use serde::{Deserialize, Serialize};

use super::{Object, Storage, names};
use crate::error::Error;

/// The storage that the iceberg crate reads and writes metadata through.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LakeIo {
    #[serde(skip)]
    storage: Option<Arc<Storage>>,
}

impl LakeIo {
    pub fn new(storage: Arc<Storage>) -> Self {
        Self { storage: Some(storage) }
    }

    /// A file at `location` to be created.
    pub fn output(&self, location: &str) -> OutputFile {
        OutputFile::new(Arc::new(self.clone()), location.to_owned())
    }

    /// This storage as the crate's entry point.
    pub fn file_io(&self) -> FileIO {
        FileIOBuilder::new(Arc::new(self.clone())).build()
    }

    fn storage(&self) -> iceberg::Result<&Arc<Storage>> {
        self.storage.as_ref().ok_or_else(|| {
            iceberg::Error::new(iceberg::ErrorKind::Unexpected, "a storage from another process has no objects")
        })
    }

    fn object(&self, path: &str) -> iceberg::Result<Object> {
        self.storage()?.resolve(path).map_err(into_iceberg)
    }
}

fn into_iceberg(error: Error) -> iceberg::Error {
    iceberg::Error::new(iceberg::ErrorKind::Unexpected, error.message)
}

#[typetag::serde]
impl StorageFactory for LakeIo {
    fn build(&self, _: &StorageConfig) -> iceberg::Result<Arc<dyn iceberg::io::Storage>> {
        Ok(Arc::new(self.clone()))
    }
}

#[async_trait]
#[typetag::serde]
impl iceberg::io::Storage for LakeIo {
    async fn exists(&self, path: &str) -> iceberg::Result<bool> {
        let object = self.object(path)?;
        match object.store.head(&object.path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(into_iceberg(Error::object_store("looking for", path, &e))),
        }
    }

    async fn metadata(&self, path: &str) -> iceberg::Result<FileMetadata> {
        let object = self.object(path)?;
        match object.store.head(&object.path).await {
            Ok(meta) => Ok(FileMetadata { size: meta.size }),
            Err(e) => Err(into_iceberg(Error::object_store("looking at", path, &e))),
        }
    }

    async fn read(&self, path: &str) -> iceberg::Result<Bytes> {
        self.storage()?.read(path).await.map(names::settled).map_err(into_iceberg)
    }

    async fn reader(&self, path: &str) -> iceberg::Result<Box<dyn FileRead>> {
        Ok(Box::new(Reader { object: self.object(path)?, location: path.to_owned() }))
    }

    async fn write(&self, path: &str, bytes: Bytes) -> iceberg::Result<()> {
        self.storage()?.write_new(path, bytes).await.map_err(into_iceberg)
    }

    async fn writer(&self, path: &str) -> iceberg::Result<Box<dyn FileWrite>> {
        Ok(Box::new(Writer {
            storage: self.storage()?.clone(),
            location: path.to_owned(),
            buffer: Some(BytesMut::new()),
        }))
    }

    async fn delete(&self, path: &str) -> iceberg::Result<()> {
        self.storage()?.delete(path).await.map_err(into_iceberg)
    }

    async fn delete_prefix(&self, path: &str) -> iceberg::Result<()> {
        Err(iceberg::Error::new(
            iceberg::ErrorKind::FeatureUnsupported,
            format!("removing everything under {path}: lake removes objects by name only"),
        ))
    }

    async fn delete_stream(&self, mut paths: BoxStream<'static, String>) -> iceberg::Result<()> {
        while let Some(path) = paths.next().await {
            iceberg::io::Storage::delete(self, &path).await?;
        }
        Ok(())
    }

    fn new_input(&self, path: &str) -> iceberg::Result<InputFile> {
        Ok(InputFile::new(Arc::new(self.clone()), path.to_owned()))
    }

    fn new_output(&self, path: &str) -> iceberg::Result<OutputFile> {
        Ok(self.output(path))
    }
}

struct Reader {
    object: Object,
    location: String,
}

#[async_trait]
impl FileRead for Reader {
    async fn read(&self, range: Range<u64>) -> iceberg::Result<Bytes> {
        let bytes = self.object.store.get_range(&self.object.path, range).await;
        bytes.map_err(|e| into_iceberg(Error::object_store("reading", &self.location, &e)))
    }
}

/// Collects a metadata file, which the crate's writers hold in memory anyway, and creates it whole.
struct Writer {
    storage: Arc<Storage>,
    location: String,
    buffer: Option<BytesMut>,
}

#[async_trait]
impl FileWrite for Writer {
    async fn write(&mut self, bytes: Bytes) -> iceberg::Result<()> {
        match &mut self.buffer {
            Some(buffer) => buffer.extend_from_slice(&bytes),
            None => return Err(closed(&self.location)),
        }
        Ok(())
    }

    async fn close(&mut self) -> iceberg::Result<()> {
        let buffer = self.buffer.take().ok_or_else(|| closed(&self.location))?;
        self.storage.write_new(&self.location, buffer.freeze()).await.map_err(into_iceberg)
    }
}

fn closed(location: &str) -> iceberg::Error {
    iceberg::Error::new(iceberg::ErrorKind::Unexpected, format!("writing {location}: it is closed already"))
}
