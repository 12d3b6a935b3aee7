//! A bucket of an S3 service, in memory: as much of one as tables need. Each node goes to it through a door of its own, for as long as
//! it lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use arrow::temporal_conversions::timestamp_s_to_datetime;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::{CONTENT_RANGE, ETAG, IF_NONE_MATCH, LAST_MODIFIED, RANGE};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::Response;
use tokio_util::sync::CancellationToken;
use url::form_urlencoded;

const NAME: &str = "lake-test";
/// What its clock shows at first, in seconds since 1970.
const BEGIN: i64 = 1_790_000_000;

/// How long a node lives: so many calls, to the bucket and to the metadata together.
#[derive(Debug)]
pub struct Life {
    left: AtomicI64,
    over: CancellationToken,
}

impl Life {
    /// One without an end.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { left: AtomicI64::new(i64::MAX), over: CancellationToken::new() })
    }

    /// It ends at the call behind so many.
    pub fn ends_after(&self, calls: i64) {
        self.left.store(calls, Ordering::SeqCst);
    }

    /// Before a call: one that comes when it is over is never made, and never answered.
    pub async fn call(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) <= 0 {
            self.over.cancel();
            std::future::pending::<()>().await;
        }
    }

    pub fn is_over(&self) -> bool {
        self.over.is_cancelled()
    }

    pub async fn until_over(&self) {
        self.over.cancelled().await;
    }
}

#[derive(Debug, Default)]
pub struct Bucket {
    objects: Mutex<BTreeMap<String, Object>>,
    /// By how many seconds its clock has gone on.
    gone_on: AtomicI64,
}

#[derive(Debug, Clone)]
struct Object {
    bytes: Bytes,
    modified: i64,
}

#[derive(Debug, Clone)]
struct Door {
    bucket: Arc<Bucket>,
    life: Arc<Life>,
}

/// The location of a key.
pub fn location(key: &str) -> String {
    format!("s3://{NAME}/{key}")
}

impl Bucket {
    /// A door for a node: the endpoint it goes to.
    pub async fn door(self: &Arc<Self>, life: &Arc<Life>) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let door = Door { bucket: self.clone(), life: life.clone() };
        let router = Router::new().fallback(pass).layer(DefaultBodyLimit::disable()).with_state(door);
        tokio::spawn(async move { axum::serve(listener, router).await });
        endpoint
    }

    /// The locations that begin so.
    pub fn locations(&self, prefix: &str) -> BTreeSet<String> {
        let objects = self.objects.lock().unwrap();
        objects.keys().map(|key| location(key)).filter(|location| location.starts_with(prefix)).collect()
    }

    /// What is at a location.
    pub fn read(&self, at: &str) -> Bytes {
        let objects = self.objects.lock().unwrap();
        let object = objects.iter().find(|(key, _)| location(key) == at);
        object.unwrap_or_else(|| panic!("{at} is gone")).1.bytes.clone()
    }

    /// Time passes.
    pub fn go_on(&self, hours: i64) {
        self.gone_on.fetch_add(hours * 3600, Ordering::SeqCst);
    }

    fn answer(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Response {
        let key = uri.path().trim_start_matches('/').strip_prefix(NAME).expect("a request to another bucket");
        let key = key.trim_start_matches('/');
        assert!(!key.contains('%'), "{key} would have to be decoded");
        let query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned();
        let query: HashMap<String, String> = query.collect();
        let now = BEGIN + self.gone_on.load(Ordering::SeqCst);
        let mut objects = self.objects.lock().unwrap();
        match (method.as_str(), key) {
            ("GET", "") if query.contains_key("uploads") => ok("<ListMultipartUploadsResult/>".to_owned()),
            ("GET", "") => {
                let prefix = query.get("prefix").map_or("", String::as_str);
                let listed = objects.iter().filter(|(key, _)| key.starts_with(prefix)).map(|(key, object)| {
                    let (size, modified) = (object.bytes.len(), shown(object.modified, "%Y-%m-%dT%H:%M:%SZ"));
                    format!(
                        "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{modified}</LastModified>\
                         <ETag>\"1\"</ETag></Contents>"
                    )
                });
                ok(format!("<ListBucketResult>{}</ListBucketResult>", listed.collect::<String>()))
            }
            ("POST", "") if query.contains_key("delete") => {
                let asked = String::from_utf8(body.to_vec()).unwrap();
                let keys = asked.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>"));
                let deleted = keys.map(|(key, _)| {
                    objects.remove(key);
                    format!("<Deleted><Key>{key}</Key></Deleted>")
                });
                ok(format!("<DeleteResult>{}</DeleteResult>", deleted.collect::<String>()))
            }
            ("PUT", key) if query.is_empty() => {
                if headers.contains_key(IF_NONE_MATCH) && objects.contains_key(key) {
                    return status(StatusCode::PRECONDITION_FAILED);
                }
                objects.insert(key.to_owned(), Object { bytes: body, modified: now });
                Response::builder().header(ETAG, "\"1\"").body(Body::empty()).unwrap()
            }
            ("GET" | "HEAD", key) => match objects.get(key) {
                Some(object) => object.answer(headers),
                None => status(StatusCode::NOT_FOUND),
            },
            ("DELETE", key) => {
                objects.remove(key);
                status(StatusCode::NO_CONTENT)
            }
            _ => status(StatusCode::BAD_REQUEST),
        }
    }
}

impl Object {
    fn answer(&self, headers: &HeaderMap) -> Response {
        let modified = shown(self.modified, "%a, %d %b %Y %H:%M:%S GMT");
        let answer = Response::builder().header(ETAG, "\"1\"").header(LAST_MODIFIED, modified);
        let size = self.bytes.len();
        let answer = match headers.get(RANGE) {
            None => answer.body(Body::from(self.bytes.clone())),
            Some(range) => {
                let (first, last) = range.to_str().unwrap().strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                let last: Option<usize> = last.parse().ok();
                let range = match first.parse() {
                    Ok(first) => first..last.map_or(size, |last| size.min(last + 1)),
                    Err(_) => size - last.unwrap().min(size)..size,
                };
                let said = format!("bytes {}-{}/{size}", range.start, range.end - 1);
                let part = Body::from(self.bytes.slice(range));
                answer.status(StatusCode::PARTIAL_CONTENT).header(CONTENT_RANGE, said).body(part)
            }
        };
        answer.unwrap()
    }
}

async fn pass(State(door): State<Door>, method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    door.life.call().await;
    door.bucket.answer(&method, &uri, &headers, body)
}

fn shown(seconds: i64, format: &str) -> String {
    timestamp_s_to_datetime(seconds).unwrap().format(format).to_string()
}

fn ok(text: String) -> Response {
    Response::new(Body::from(text))
}

fn status(status: StatusCode) -> Response {
    Response::builder().status(status).body(Body::empty()).unwrap()
}
