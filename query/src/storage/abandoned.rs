//! Uploads in parts that whoever began them has not lived to complete, or to abort ([`super::uploads`]): S3 keeps the parts, invisibly
//! and paid for.
//!
//! object_store aborts uploads and does not list them. The one request that does is made here, signed by its signer.
//!
//! What holds: where ages count, an upload of which the store does not say when it began is never old enough.
//! Limits: [`MOST_PAGES`] answers of at most 1,000 uploads each.

use std::time::{Duration, Instant, SystemTime};

use arrow::compute::kernels::cast_utils::string_to_timestamp_nanos;
use axum::http::{Method, Uri};
use datafusion::execution::object_store::ObjectStoreUrl;
use futures::StreamExt;
use object_store::ClientOptions;
use object_store::aws::{AmazonS3, AwsAuthorizer};
use object_store::client::{HttpClient, HttpConnector, HttpRequest, HttpRequestBody, ReqwestConnector};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::signer::Signer;

use super::{Storage, outside, timeouts};
use crate::error::{Error, Result};

/// Answers with uploads that are asked for at a time.
const MOST_PAGES: usize = 100;
/// Uploads that are aborted at a time.
const ABORTED_AT_A_TIME: usize = 16;
/// Of an answer that is none, so much is told.
const TOLD_BYTES: usize = 500;

/// An upload that was not completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    /// What it would have been.
    pub path: Path,
    pub id: String,
    /// `None`: the store does not say.
    pub began: Option<SystemTime>,
}

/// The uploads of a bucket.
#[derive(Debug)]
struct Uploads {
    s3: AmazonS3,
    client: HttpClient,
    region: String,
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "uploads", source: source.into() }
}

impl Uploads {
    /// Those under a prefix; with a time only those that began before it.
    async fn abandoned(&self, prefix: &str, before: Option<SystemTime>) -> object_store::Result<Vec<Abandoned>> {
        let is_old = |upload: &Abandoned| before.is_none_or(|before| upload.began.is_some_and(|began| began < before));
        let mut found = Vec::new();
        let mut after = None;
        for _ in 0..MOST_PAGES {
            let page = self.page(prefix, after.as_ref()).await?;
            let uploads = uploads_in(&page).filter(|(key, _)| key.starts_with(prefix));
            found.extend(uploads.map(|(_, upload)| upload).filter(is_old));
            let next = next_in(&page);
            if next.is_none() || next == after {
                break;
            }
            after = next;
        }
        Ok(found)
    }

    /// Aborts these, until then. How many are gone.
    async fn abort(&self, uploads: &[Abandoned], deadline: Instant) -> usize {
        let mut gone = 0;
        let all = async {
            let aborts: Vec<_> = uploads.iter().map(|upload| self.abort_one(upload)).collect();
            let mut aborts = futures::stream::iter(aborts).buffer_unordered(ABORTED_AT_A_TIME);
            while let Some(is_gone) = aborts.next().await {
                gone += usize::from(is_gone);
            }
        };
        // The next sweep finds the rest.
        let _ = tokio::time::timeout_at(deadline.into(), all).await;
        gone
    }

    /// Whether it is gone.
    async fn abort_one(&self, Abandoned { path, id, .. }: &Abandoned) -> bool {
        match self.s3.abort_multipart(path, id).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => true,
            Err(error) => {
                tracing::warn!(%path, %error, "an upload that nobody completes could not be aborted");
                false
            }
        }
    }

    /// An answer with uploads, from behind this key and id on.
    async fn page(&self, prefix: &str, after: Option<&(String, String)>) -> object_store::Result<String> {
        // Only for where the bucket is.
        let mut url = self.s3.signed_url(Method::GET, &Path::default(), Duration::from_secs(60)).await?;
        let bucket = url.path().trim_end_matches('/').to_owned();
        url.set_path(&bucket);
        url.set_query(None);
        url.query_pairs_mut().append_pair("uploads", "").append_pair("prefix", prefix);
        if let Some((key, id)) = after {
            url.query_pairs_mut().append_pair("key-marker", key).append_pair("upload-id-marker", id);
        }
        let credential = self.s3.credentials().get_credential().await?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = Uri::try_from(url.as_str()).map_err(failed)?;
        AwsAuthorizer::new(&credential, "s3", &self.region).authorize(&mut request, None);
        let (parts, body) = self.client.execute(request).await.map_err(failed)?.into_parts();
        let body = body.bytes().await.map_err(failed)?;
        let text = String::from_utf8_lossy(&body);
        match parts.status.is_success() {
            true => Ok(text.into_owned()),
            false => Err(failed(format!("{}: {}", parts.status, text.chars().take(TOLD_BYTES).collect::<String>()))),
        }
    }
}

/// What stands between the first pair of these tags.
fn within<'a>(xml: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{tag}>"))?;
    rest.split_once(&format!("</{tag}>")).map(|(text, _)| text)
}

/// The same, as what it means.
fn text_of(xml: &str, tag: &str) -> Option<String> {
    let mut text = within(xml, tag)?.to_owned();
    for (written, meant) in [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#34;", "\""),
        ("&apos;", "'"),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ] {
        text = text.replace(written, meant);
    }
    Some(text)
}

/// The uploads of an answer, with their keys.
fn uploads_in(page: &str) -> impl Iterator<Item = (String, Abandoned)> {
    page.split("<Upload>").skip(1).filter_map(|upload| {
        let upload = upload.split("</Upload>").next()?;
        let (key, id) = (text_of(upload, "Key")?, text_of(upload, "UploadId")?);
        let began = within(upload, "Initiated").and_then(|text| string_to_timestamp_nanos(text).ok());
        let began = began.and_then(|nanos| u64::try_from(nanos).ok());
        let began = began.map(|nanos| SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos));
        Some((key.clone(), Abandoned { path: Path::parse(key).ok()?, id, began }))
    })
}

/// Behind which key and id the next answer begins; `None`: this is the last one.
fn next_in(page: &str) -> Option<(String, String)> {
    within(page, "IsTruncated").filter(|text| *text == "true")?;
    Some((text_of(page, "NextKeyMarker")?, text_of(page, "NextUploadIdMarker").unwrap_or_default()))
}

impl Storage {
    /// The uploads below a location that were not completed, with a time only those that began before it, by the store's clock. None where
    /// objects are not uploaded in parts.
    ///
    /// # Errors
    /// They cannot be listed, as where the node is not allowed to do that.
    pub async fn abandoned_uploads(&self, location: &str, before: Option<SystemTime>) -> Result<Vec<Abandoned>> {
        let object = self.resolve(location)?;
        if object.url == ObjectStoreUrl::local_filesystem() {
            return Ok(Vec::new());
        }
        let doing = |e| Error::object_store("listing uploads that were not completed below", location, &e);
        let uploads = self.uploads_of(location)?;
        uploads.abandoned(&format!("{}/", object.path), before).await.map_err(doing)
    }

    /// Aborts uploads below a location, until then. What cannot be aborted, or not in time, is left for the next sweep. How many are gone.
    pub async fn abort_uploads(&self, location: &str, uploads: &[Abandoned], deadline: Instant) -> Result<usize> {
        if uploads.is_empty() {
            return Ok(0);
        }
        Ok(self.uploads_of(location)?.abort(uploads, deadline).await)
    }

    fn uploads_of(&self, location: &str) -> Result<Uploads> {
        let bucket = lake_client::warehouse::bucket(location);
        let bucket = bucket.ok_or_else(|| Error::invalid(format!("location {location}: it names no bucket")))?;
        let opened = self.bucket(bucket)?;
        // Whether without TLS is the bucket's own to refuse.
        let mut options = ClientOptions::new().with_allow_http(true);
        for (key, timeout) in timeouts(&self.s3) {
            options = options.with_config(key, timeout);
        }
        let client = match &self.io {
            Some(io) => outside::Outside(io.clone()).connect(&options),
            None => ReqwestConnector::default().connect(&options),
        };
        let client = client.map_err(|e| Error::object_store("opening the bucket of", location, &e))?;
        Ok(Uploads { s3: opened.s3, client, region: opened.region })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use object_store::aws::AmazonS3Builder;
    use object_store::client::{HttpError, HttpResponse, HttpService};

    use super::*;
    use crate::config::S3Config;

    /// An S3 service that has uploads, in two answers, and says what else it was asked. One of them it never ends to abort.
    #[derive(Debug, Clone, Default)]
    struct Service(Arc<Mutex<Vec<String>>>);

    const FIRST: &str = "<?xml version=\"1.0\"?><ListMultipartUploadsResult xmlns=\"x\"><Bucket>b</Bucket><KeyMarker></KeyMarker>\
        <NextKeyMarker>w/t/data/b&amp;c</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker><IsTruncated>true</IsTruncated>\
        <Upload><Key>w/t/data/a.parquet</Key><UploadId>1</UploadId><Initiator><ID>i</ID></Initiator>\
        <Initiated>2026-11-01T00:00:00.000Z</Initiated></Upload>\
        <Upload><Key>w/t/data/b&amp;c</Key><UploadId>2</UploadId><Initiated>2026-11-01T00:00:01Z</Initiated></Upload>\
        <Upload><Key>w/t2/data/of-another</Key><UploadId>3</UploadId><Initiated>2026-11-01T00:00:00Z</Initiated></Upload>\
        </ListMultipartUploadsResult>";
    const LAST: &str = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>\
        <Upload><Key>w/t/data/young</Key><UploadId>4</UploadId><Initiated>2026-12-01T00:00:00.000Z</Initiated></Upload>\
        <Upload><Key>w/t/data/of-no-age</Key><UploadId>5</UploadId></Upload></ListMultipartUploadsResult>";

    #[async_trait]
    impl HttpService for Service {
        async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
            assert!(request.headers().contains_key("authorization"), "it is signed");
            let asked = format!("{} {}", request.method(), request.uri());
            let answer = match asked.contains("key-marker=w%2Ft%2Fdata%2Fb%26c&upload-id-marker=2") {
                true => LAST,
                false if request.method() == Method::GET => FIRST,
                false => "",
            };
            let hangs = asked.ends_with("uploadId=hangs");
            self.0.lock().unwrap().push(asked);
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok(HttpResponse::new(answer.to_owned().into()))
        }
    }

    impl HttpConnector for Service {
        fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
            Ok(HttpClient::new(self.clone()))
        }
    }

    fn uploads(service: &Service) -> Uploads {
        let s3 = AmazonS3Builder::new()
            .with_endpoint("http://s3.test")
            .with_allow_http(true)
            .with_bucket_name("b")
            .with_region("r")
            .with_access_key_id("key")
            .with_secret_access_key("secret")
            .with_http_connector(service.clone())
            .build()
            .unwrap();
        Uploads { s3, client: HttpClient::new(service.clone()), region: "r".to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn aborting_ends_when_its_time_is_over() {
        let service = Service::default();
        let upload = |id: &str| Abandoned { path: Path::from("w/t/x"), id: id.to_owned(), began: None };
        // As many hang as are aborted at a time: behind them none has its turn.
        let mut some: Vec<_> = (0..3).map(|id| upload(&id.to_string())).collect();
        some.extend((0..ABORTED_AT_A_TIME).map(|_| upload("hangs")));
        some.extend((3..9).map(|id| upload(&id.to_string())));
        let soon = Instant::now() + Duration::from_secs(30);
        assert_eq!(uploads(&service).abort(&some, soon).await, 3);
        assert_eq!(service.0.lock().unwrap().len(), 3 + ABORTED_AT_A_TIME);
        assert_eq!(uploads(&service).abort(&some[..3], soon).await, 3);
    }

    #[tokio::test]
    async fn old_uploads_of_a_table_are_found_and_aborted_and_no_others() {
        let service = Service::default();
        let uploads = uploads(&service);
        let old = SystemTime::UNIX_EPOCH
            + Duration::from_nanos(string_to_timestamp_nanos("2026-11-28T00:00:00Z").unwrap().unsigned_abs());
        let ids = |found: &[Abandoned]| found.iter().map(|upload| upload.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&uploads.abandoned("w/t/", None).await.unwrap()), ["1", "2", "4", "5"]);
        service.0.lock().unwrap().clear();
        let found = uploads.abandoned("w/t/", Some(old)).await.unwrap();
        assert_eq!(ids(&found), ["1", "2"]);
        assert_eq!(found[1].path.as_ref(), "w/t/data/b&c");
        assert_eq!(uploads.abort(&found[..1], Instant::now() + Duration::from_secs(60)).await, 1);
        let asked = service.0.lock().unwrap();
        assert_eq!(
            asked.as_slice(),
            [
                "GET http://s3.test/b?uploads=&prefix=w%2Ft%2F",
                "GET http://s3.test/b?uploads=&prefix=w%2Ft%2F&key-marker=w%2Ft%2Fdata%2Fb%26c&upload-id-marker=2",
                "DELETE http://s3.test/b/w/t/data/a.parquet?uploadId=1",
            ]
        );
    }

    #[tokio::test]
    async fn where_nothing_is_uploaded_in_parts_nothing_is_there_to_abort() {
        let storage = Storage::new("file:///nowhere".to_owned(), S3Config::default());
        let found = storage.abandoned_uploads("file:///nowhere/t/", None).await.unwrap();
        assert_eq!(storage.abort_uploads("file:///nowhere/t/", &found, Instant::now()).await.unwrap(), 0);
    }
}
