//! Requests that get no answer: their time is over, or the connection went away. Such a request may have been done, and may still be done
//! much later, behind others that were sent after it.
//!
//! object_store sends no conditional put and no removal again then, and of a put that it does send again, after a 503 or a connection that
//! was closed, it only tells what came of the last sending: that there is such an object already, which may be what the first has made.
//! Every object of lake has a name that no other ever has (but for what COPY writes, whose names are its user's), so here both are sent
//! again, and
//! - what is there with the very same bytes was made by another sending of the same put: it counts as created;
//! - a put that is done late makes nothing where another sending has made the object; where none has it leaves one that nothing names, for
//!   the sweep;
//! - a removal that is done late finds what it was to remove, or nothing.
//!
//! Limits: [`MOST_AGAIN`] times again, none of them later than [`RETRY_FOR`] after the first.

use std::time::Duration;

use bytes::Bytes;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, Result};
use tokio::time::{Instant, sleep};

use super::RETRY_FOR;

/// How often a request that got no answer is sent again.
const MOST_AGAIN: u32 = 5;
/// How long it waits before that; twice as long each further time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Whether a request got no answer, so that nobody knows whether it was, or will be, done.
fn is_unanswered(error: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return matches!(http.kind(), HttpErrorKind::Timeout | HttpErrorKind::Interrupted);
        }
        cause = error.source();
    }
    false
}

/// How often and for how long a request has been sent.
struct Sendings {
    began: Instant,
    again: u32,
}

impl Sendings {
    fn begin() -> Self {
        Self { began: Instant::now(), again: 0 }
    }

    /// Waits before the next one. False: there is none.
    async fn go_on(&mut self) -> bool {
        let pause = FIRST_PAUSE * 2u32.pow(self.again);
        if self.again >= MOST_AGAIN || self.began.elapsed() + pause >= RETRY_FOR {
            return false;
        }
        self.again += 1;
        sleep(pause).await;
        true
    }
}

/// Creates an object under a name that is its own.
///
/// # Errors
/// The store's; `AlreadyExists` for another object of that name.
pub async fn create(store: &dyn ObjectStore, path: &Path, bytes: Bytes) -> Result<()> {
    let mut sendings = Sendings::begin();
    loop {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let error = match store.put_opts(path, bytes.clone().into(), options).await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        let may_go_on = match &error {
            Error::AlreadyExists { .. } => match is_this(store, path, &bytes).await {
                Ok(Some(true)) => return Ok(()),
                // S3 refuses one of two that are under way at once (409) before the other has made anything.
                Ok(None) => true,
                Ok(Some(false)) | Err(_) => false,
            },
            error => is_unanswered(error),
        };
        if !may_go_on || !sendings.go_on().await {
            return Err(error);
        }
    }
}

/// Whether an object has these bytes; `None`: there is none.
async fn is_this(store: &dyn ObjectStore, path: &Path, bytes: &Bytes) -> Result<Option<bool>> {
    match store.get(path).await {
        Ok(there) if there.meta.size != bytes.len() as u64 => Ok(Some(false)),
        Ok(there) => Ok(Some(there.bytes().await? == bytes)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes an object; one that does not exist is fine.
///
/// # Errors
/// The store's.
pub async fn remove(store: &dyn ObjectStore, path: &Path) -> Result<()> {
    let mut sendings = Sendings::begin();
    loop {
        let error = match store.delete(path).await {
            Ok(()) | Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => error,
        };
        if !is_unanswered(&error) || !sendings.go_on().await {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fmt;
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use futures::StreamExt;
    use futures::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions, PutPayload,
        PutResult,
    };

    use super::*;

    /// What becomes of a request that changes something.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        /// It is done and not answered.
        Unanswered,
        /// It is not answered, and done behind the next one.
        Overdue,
        /// It is never done.
        Lost,
        /// It is refused before anything is there, as one of two at once.
        Crossed,
    }

    /// A store whose next changes have these fates; all further ones go well.
    #[derive(Debug, Clone, Default)]
    struct Store(Arc<Inner>);

    #[derive(Debug, Default)]
    struct Inner {
        objects: InMemory,
        fates: Mutex<VecDeque<Fate>>,
        overdue: Mutex<Vec<(Path, Option<PutPayload>)>>,
        asked: Mutex<usize>,
    }

    impl fmt::Display for Store {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a store")
        }
    }

    fn timed_out() -> Error {
        let late = HttpError::new(HttpErrorKind::Timeout, std::io::Error::other("operation timed out"));
        Error::Generic { store: "S3", source: Box::new(late) }
    }

    impl Store {
        fn with(fates: &[Fate]) -> Self {
            Self(Arc::new(Inner { fates: Mutex::new(fates.iter().copied().collect()), ..Inner::default() }))
        }

        /// A change, `None` for a removal.
        async fn change(&self, path: &Path, put: Option<PutPayload>) -> Result<Option<PutResult>> {
            *self.0.asked.lock().unwrap() += 1;
            let fate = self.0.fates.lock().unwrap().pop_front();
            match fate {
                Some(Fate::Unanswered) => {
                    let _ = self.made(path, put).await;
                    return Err(timed_out());
                }
                Some(Fate::Overdue) => {
                    self.0.overdue.lock().unwrap().push((path.clone(), put));
                    return Err(timed_out());
                }
                Some(Fate::Lost) => return Err(timed_out()),
                Some(Fate::Crossed) => {
                    let (path, source) = (path.to_string(), "409 Conflict".into());
                    return Err(Error::AlreadyExists { path, source });
                }
                None => {}
            }
            let made = self.made(path, put).await;
            self.come_due().await;
            made
        }

        async fn made(&self, path: &Path, put: Option<PutPayload>) -> Result<Option<PutResult>> {
            match put {
                Some(payload) => {
                    let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
                    self.0.objects.put_opts(path, payload, options).await.map(Some)
                }
                None => self.0.objects.delete(path).await.map(|()| None),
            }
        }

        /// What is overdue is done.
        async fn come_due(&self) {
            let due = std::mem::take(&mut *self.0.overdue.lock().unwrap());
            for (path, put) in due {
                let _ = self.made(&path, put).await;
            }
        }

        fn asked(&self) -> usize {
            *self.0.asked.lock().unwrap()
        }
    }

    #[async_trait]
    impl ObjectStore for Store {
        async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
            assert_eq!(opts.mode, PutMode::Create, "nothing is overwritten");
            let put = self.change(location, Some(payload)).await?;
            Ok(put.expect("a put has a result"))
        }

        async fn put_multipart_opts(
            &self,
            location: &Path,
            opts: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.0.objects.put_multipart_opts(location, opts).await
        }

        async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
            self.0.objects.get_opts(location, options).await
        }

        fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
            let store = self.clone();
            let removed = locations.then(move |path| {
                let store = store.clone();
                async move {
                    let path = path?;
                    store.change(&path, None).await?;
                    Ok(path)
                }
            });
            removed.boxed()
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.0.objects.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.0.objects.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.0.objects.copy_opts(from, to, options).await
        }
    }

    async fn there(store: &Store, path: &Path) -> Option<Bytes> {
        match store.0.objects.get(path).await {
            Ok(object) => Some(object.bytes().await.unwrap()),
            Err(_) => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_created_by_a_sending_without_an_answer_is_no_conflict() {
        let (path, bytes) = (Path::from("w/t/metadata/1.json"), Bytes::from_static(b"version 1"));
        for fates in [
            &[Fate::Unanswered][..],
            &[Fate::Overdue],
            &[Fate::Lost],
            &[Fate::Crossed],
            &[Fate::Lost, Fate::Overdue, Fate::Unanswered],
            &[Fate::Crossed, Fate::Unanswered],
        ] {
            let store = Store::with(fates);
            create(&store, &path, bytes.clone()).await.unwrap_or_else(|e| panic!("{fates:?}: {e}"));
            store.come_due().await;
            assert_eq!(there(&store, &path).await.unwrap(), bytes, "{fates:?}");
            assert_eq!(store.asked(), fates.len() + 1, "{fates:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_object_of_that_name_is_a_conflict_whatever_was_answered() {
        let path = Path::from("w/t/metadata/1.json");
        for fates in [&[] as &[Fate], &[Fate::Unanswered], &[Fate::Lost, Fate::Overdue]] {
            let store = Store::with(fates);
            store.0.objects.put(&path, "version A".into()).await.unwrap();
            for other in ["version B", "another"] {
                let error = create(&store, &path, Bytes::from_static(other.as_bytes())).await.unwrap_err();
                assert!(matches!(error, Error::AlreadyExists { .. }), "{fates:?}: {error}");
                assert_eq!(there(&store, &path).await.unwrap(), "version A");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_never_answers_is_given_up() {
        let path = Path::from("w/t/metadata/1.json");
        let store = Store::with(&[Fate::Overdue; 20]);
        let error = create(&store, &path, Bytes::from_static(b"version 1")).await.unwrap_err();
        assert!(is_unanswered(&error), "{error}");
        assert_eq!(store.asked(), 1 + MOST_AGAIN as usize);
        // What was given up may still be done: then it is there once, under a name that nothing refers to.
        store.come_due().await;
        assert_eq!(store.0.objects.list(None).count().await, 1);
        let refused = Error::NotSupported { source: "no".into() };
        assert!(!is_unanswered(&refused));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_removed_late_is_what_was_to_go() {
        let (path, other) = (Path::from("w/t/data/1.parquet"), Path::from("w/t/data/2.parquet"));
        for fates in [&[Fate::Unanswered][..], &[Fate::Overdue], &[Fate::Lost, Fate::Overdue]] {
            let store = Store::with(fates);
            for path in [&path, &other] {
                store.0.objects.put(path, "rows".into()).await.unwrap();
            }
            remove(&store, &path).await.unwrap_or_else(|e| panic!("{fates:?}: {e}"));
            store.come_due().await;
            assert!(there(&store, &path).await.is_none() && there(&store, &other).await.is_some(), "{fates:?}");
            assert_eq!(store.asked(), fates.len() + 1, "{fates:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_request_is_sent_again_once_its_time_is_over() {
        let mut sendings = Sendings::begin();
        assert!(sendings.go_on().await);
        sleep(RETRY_FOR).await;
        assert!(!sendings.go_on().await);
    }
}
