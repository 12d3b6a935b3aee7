//! Uploads in parts end with whoever makes them.
//!
//! What has been uploaded of an object that is never completed is kept by S3, invisibly and paid for, until somebody aborts the
//! upload. A statement that fails or is cancelled drops what it writes with, wherever it is: so an upload that is dropped before
//! it was completed is aborted. (One whose very beginning is cancelled, before its id is known, cannot be.)
//!
//! An upload may be completed without an answer; whoever asks for that again is told by some stores that there is no such upload. Then it is
//! looked what is there: another object than when the upload began, of as many bytes as were uploaded, is what it has made.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
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
        // First, so that an upload that has begun is known at once to whom it belongs.
        let before = self.store.head(location).await;
        let upload = self.store.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload {
            of: Some(upload),
            store: self.store.clone(),
            before: match before {
                Ok(object) => Before::Object(Box::new(object)),
                Err(Error::NotFound { .. }) => Before::Nothing,
                Err(_) => Before::Unknown,
            },
            bytes: 0,
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

/// What was there when an upload began.
#[derive(Debug)]
enum Before {
    Nothing,
    Object(Box<ObjectMeta>),
    /// It could not be found out.
    Unknown,
}

/// An upload, until it is completed or aborted.
#[derive(Debug)]
struct Upload {
    of: Option<Box<dyn MultipartUpload>>,
    store: Arc<dyn ObjectStore>,
    before: Before,
    /// How many have been given to it.
    bytes: u64,
    location: Path,
    io: Handle,
    tasks: TaskTracker,
}

/// The object that an upload has made there, if it has.
async fn made(store: &dyn ObjectStore, location: &Path, before: &Before, bytes: u64) -> Option<ObjectMeta> {
    let there = store.head(location).await.ok()?;
    let is_new = match before {
        Before::Nothing => true,
        Before::Object(before) => **before != there,
        Before::Unknown => false,
    };
    (is_new && there.size == bytes).then_some(there)
}

fn ended() -> object_store::Error {
    object_store::Error::Generic { store: "uploads", source: "the upload has ended".into() }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.bytes += data.content_length() as u64;
        match &mut self.of {
            Some(upload) => upload.put_part(data),
            None => Box::pin(std::future::ready(Err(ended()))),
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let upload = self.of.as_mut().ok_or_else(ended)?;
        let put = match upload.complete().await {
            Err(error @ Error::NotFound { .. }) => {
                match made(&*self.store, &self.location, &self.before, self.bytes).await {
                    Some(ObjectMeta { e_tag, version, .. }) => PutResult { e_tag, version },
                    None => return Err(error),
                }
            }
            put => put?,
        };
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
        let (store, aborted, tasks) = (Arc::new(InMemory::new()), Arc::new(AtomicUsize::new(0)), TaskTracker::new());
        let begin = async |completes| {
            let of = store.put_multipart(&Path::from("x")).await.unwrap();
            let of: Box<dyn MultipartUpload> = Box::new(Counted { of, aborted: aborted.clone(), completes });
            Upload {
                of: Some(of),
                store: store.clone(),
                before: Before::Nothing,
                bytes: 0,
                location: Path::from("x"),
                io: Handle::current(),
                tasks: tasks.clone(),
            }
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

    /// An upload that says that there is no such upload when it is completed, which it may have been.
    #[derive(Debug)]
    struct Forgotten {
        of: Box<dyn MultipartUpload>,
        is_made: bool,
    }

    #[async_trait]
    impl MultipartUpload for Forgotten {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            self.of.put_part(data)
        }

        async fn complete(&mut self) -> Result<PutResult> {
            if self.is_made {
                self.of.complete().await?;
            }
            Err(Error::NotFound { path: "x".into(), source: "NoSuchUpload".into() })
        }

        async fn abort(&mut self) -> Result<()> {
            self.of.abort().await
        }
    }

    #[tokio::test]
    async fn an_upload_that_was_completed_without_an_answer_is_complete() {
        let path = Path::from("x");
        let complete = async |is_made, old: Option<&'static str>| {
            let store = Arc::new(InMemory::new());
            if let Some(old) = old {
                store.put(&path, old.into()).await.unwrap();
            }
            let before = match store.head(&path).await {
                Ok(there) => Before::Object(Box::new(there)),
                Err(_) => Before::Nothing,
            };
            let of = Box::new(Forgotten { of: store.put_multipart(&path).await.unwrap(), is_made });
            let (io, tasks) = (Handle::current(), TaskTracker::new());
            let location = path.clone();
            let mut upload = Upload { of: Some(of), store: store.clone(), before, bytes: 0, location, io, tasks };
            upload.put_part("new".into()).await.unwrap();
            upload.complete().await
        };
        for old in [None, Some("old"), Some("an old one")] {
            assert!(complete(true, old).await.is_ok(), "over {old:?}");
            assert!(complete(false, old).await.is_err(), "over {old:?}");
        }
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
