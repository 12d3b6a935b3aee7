//! As much of an HTTP client as these tests need: one request per connection, or one connection for several.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How long an answer may take: longer than a node takes for one.
const WITHIN: Duration = Duration::from_secs(120);

/// Where requests go, and what they all carry.
#[derive(Debug, Clone)]
pub struct Http {
    pub address: SocketAddr,
    pub headers: Vec<(String, String)>,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    fn of(head: &[u8], body: Vec<u8>) -> Self {
        let mut lines = std::str::from_utf8(head).unwrap().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.filter_map(|line| line.split_once(": ")).map(|(n, v)| (n.to_owned(), v.to_owned()));
        Self { status, headers: headers.collect(), body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The type and the message of an error.
    pub fn error(&self) -> (String, String) {
        let json = self.json();
        assert_eq!(json["error"]["code"], self.status, "{json}");
        let text = |name: &str| json["error"][name].as_str().unwrap().to_owned();
        (text("type"), text("message"))
    }

    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    #[track_caller]
    pub fn refused(self, status: u16, kind: &str) -> String {
        let answer = self.expect(status);
        let (told, message) = answer.error();
        assert_eq!(told, kind, "{message}");
        message
    }
}

impl Http {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, headers: Vec::new() }
    }

    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut with = self.clone();
        with.headers.push((name.to_owned(), value.to_owned()));
        with
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, b"").await
    }

    pub async fn head(&self, path: &str) -> Answer {
        self.send("HEAD", path, b"").await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send("DELETE", path, b"").await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send("POST", path, body.to_string().as_bytes()).await
    }

    pub async fn send(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        self.exchange(&self.request(method, path, body, "close")).await
    }

    fn request(&self, method: &str, path: &str, body: &[u8], connection: &str) -> Vec<u8> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: {connection}\r\n", self.address);
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        [head.as_bytes(), body].concat()
    }

    /// Sends these bytes, and reads what comes back. A server that has answered need not read all of a request.
    pub async fn exchange(&self, request: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let (mut reading, mut writing) = stream.split();
        let mut received = Vec::new();
        let both = async { tokio::join!(writing.write_all(request), reading.read_to_end(&mut received)) };
        // What went wrong shows in what was received.
        let _ = tokio::time::timeout(WITHIN, both).await.expect("the server ends the connection");
        let end = head_of(&received).expect("an answer");
        Answer::of(&received[..end], received[end..].to_vec())
    }

    /// A connection that is kept.
    pub async fn session(&self) -> Session {
        Session { http: self.clone(), stream: TcpStream::connect(self.address).await.unwrap() }
    }
}

/// One connection, for one request after the other.
#[derive(Debug)]
pub struct Session {
    http: Http,
    stream: TcpStream,
}

impl Session {
    pub async fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, b"").await
    }

    pub async fn post(&mut self, path: &str, body: Value) -> Answer {
        self.send("POST", path, body.to_string().as_bytes()).await
    }

    /// What comes until the server ends the connection.
    pub async fn rest(mut self) -> Vec<u8> {
        let mut received = Vec::new();
        self.stream.read_to_end(&mut received).await.unwrap();
        received
    }

    pub async fn send(&mut self, method: &str, path: &str, body: &[u8]) -> Answer {
        tokio::time::timeout(WITHIN, self.exchange(method, path, body)).await.expect("the server answers")
    }

    async fn exchange(&mut self, method: &str, path: &str, body: &[u8]) -> Answer {
        self.stream.write_all(&self.http.request(method, path, body, "keep-alive")).await.unwrap();
        let mut received = Vec::new();
        let end = loop {
            if let Some(end) = head_of(&received) {
                break end;
            }
            assert_ne!(self.stream.read_buf(&mut received).await.unwrap(), 0, "closed without an answer");
        };
        let body = received.split_off(end);
        let mut answer = Answer::of(&received, body);
        let length: usize = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
        while answer.body.len() < length {
            assert_ne!(self.stream.read_buf(&mut answer.body).await.unwrap(), 0, "closed within an answer");
        }
        answer
    }
}

/// Where the head of an answer ends, once it has come.
fn head_of(received: &[u8]) -> Option<usize> {
    received.windows(4).position(|w| w == b"\r\n\r\n").map(|at| at + 4)
}
