//! As much of an HTTP client as these tests need: one request per connection.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

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
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.exchange(&[head.as_bytes(), body].concat()).await
    }

    /// Sends these bytes, and reads what comes back. A server that has answered need not read all of a request.
    pub async fn exchange(&self, request: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let (mut reading, mut writing) = stream.split();
        let mut received = Vec::new();
        let (_, _) = tokio::join!(writing.write_all(request), reading.read_to_end(&mut received));
        let end = received.windows(4).position(|w| w == b"\r\n\r\n").expect("an answer");
        let head = std::str::from_utf8(&received[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.filter_map(|line| line.split_once(": ")).map(|(n, v)| (n.to_owned(), v.to_owned()));
        Answer { status, headers: headers.collect(), body: received[end + 4..].to_vec() }
    }
}
