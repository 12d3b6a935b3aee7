//! Uploads in parts end with whoever makes them.
//!
//! What has been uploaded of an object that is never completed is kept by S3, invisibly and paid for, until somebody aborts the
//! upload. A statement that fails or is cancelled drops what it writes with, wherever it is: so an upload that is dropped before
//! it was completed is aborted. (One whose very beginning is cancelled, before its id is known, cannot be.)

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

/// A store whose uploads are aborted when they are dropped.
#[derive(Debug)]
pub struct TidyUploads {
    store: Arc<dyn ObjectStore>,
    io: Handle,
    /// Those that are being aborted.
    tasks: TaskTracker,
}

impl TidyUploads {
    /// Aborts by tasks of `io`, which `tasks` knows.
    pub fn new(store: Arc<dyn ObjectStore>, io: Handle, tasks: TaskTracker) -> Self {
        Self { store, io, tasks }
    }
}

impl fmt::Display for TidyUploads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.store, f)
    }
}

#[async_trait]
impl ObjectStore for TidyUploads {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.store.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload {
            of: Some(upload),
            location: location.clone(),
            io: self.io.clone(),
            tasks: self.tasks.clone(),
        }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.store.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.store.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.store.rename_opts(from, to, options).await
    }
}

/// An upload, until it is completed or aborted.
#[derive(Debug)]
struct Upload {
    of: Option<Box<dyn MultipartUpload>>,
    location: Path,
    io: Handle,
    tasks: TaskTracker,
}

fn ended() -> object_store::Error {
    object_store::Error::Generic { store: "uploads", source: "the upload has ended".into() }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        match &mut self.of {
            Some(upload) => upload.put_part(data),
            None => Box::pin(std::future::ready(Err(ended()))),
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let upload = self.of.as_mut().ok_or_else(ended)?;
        let put = upload.complete().await?;
        self.of = None;
        Ok(put)
    }

    async fn abort(&mut self) -> Result<()> {
        let mut upload = self.of.take().ok_or_else(ended)?;
        upload.abort().await
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(mut upload) = self.of.take() else { return };
        let location = self.location.clone();
        let abort = async move {
            // It may have been completed without an answer: then there is none any more, and the sweep for orphans finds the object.
            if let Err(error) = upload.abort().await {
                tracing::warn!(%location, %error, "an upload that nobody completes could not be aborted");
            }
        };
        self.tasks.spawn_on(abort, &self.io);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use object_store::ObjectStoreExt;
    use object_store::buffered::BufWriter;
    use object_store::memory::InMemory;
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// Counts the uploads that are aborted, and completes none if it is not to.
    #[derive(Debug)]
    struct Counted {
        of: Box<dyn MultipartUpload>,
        aborted: Arc<AtomicUsize>,
        completes: bool,
    }

    #[async_trait]
    impl MultipartUpload for Counted {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            self.of.put_part(data)
        }

        async fn complete(&mut self) -> Result<PutResult> {
            match self.completes {
                true => self.of.complete().await,
                false => Err(ended()),
            }
        }

        async fn abort(&mut self) -> Result<()> {
            self.aborted.fetch_add(1, Ordering::SeqCst);
            self.of.abort().await
        }
    }

    #[tokio::test]
    async fn an_upload_that_is_not_completed_is_aborted_once() {
        let (store, aborted, tasks) = (InMemory::new(), Arc::new(AtomicUsize::new(0)), TaskTracker::new());
        let begin = async |completes| {
            let of = store.put_multipart(&Path::from("x")).await.unwrap();
            let of: Box<dyn MultipartUpload> = Box::new(Counted { of, aborted: aborted.clone(), completes });
            Upload { of: Some(of), location: Path::from("x"), io: Handle::current(), tasks: tasks.clone() }
        };
        let mut completed = begin(true).await;
        completed.put_part("a".into()).await.unwrap();
        completed.complete().await.unwrap();
        drop(completed);
        let mut by_hand = begin(true).await;
        by_hand.abort().await.unwrap();
        drop(by_hand);
        tasks.close();
        tasks.wait().await;
        assert_eq!(aborted.load(Ordering::SeqCst), 1);
        for (completes, ask) in [(true, false), (false, true)] {
            let mut upload = begin(completes).await;
            upload.put_part("b".into()).await.unwrap();
            if ask {
                upload.complete().await.unwrap_err();
            }
        }
        tasks.wait().await;
        assert_eq!(aborted.load(Ordering::SeqCst), 3);
    }

    #[tokio::test]
    async fn a_writer_that_is_dropped_aborts_and_one_that_ends_writes() {
        let tasks = TaskTracker::new();
        let store: Arc<dyn ObjectStore> =
            Arc::new(TidyUploads::new(Arc::new(InMemory::new()), Handle::current(), tasks.clone()));
        let write = async |name: &str, end: bool| {
            let mut writer = BufWriter::with_capacity(store.clone(), Path::from(name), 1);
            writer.write_all(&[7; 100]).await.unwrap();
            if end {
                writer.shutdown().await.unwrap();
            }
        };
        write("whole", true).await;
        write("half", false).await;
        tasks.close();
        tasks.wait().await;
        assert_eq!(store.get(&Path::from("whole")).await.unwrap().bytes().await.unwrap().len(), 100);
        assert!(store.get(&Path::from("half")).await.is_err());
    }
}
