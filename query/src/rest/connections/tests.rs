use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::*;
use crate::rest::metrics::Metrics;

const HOUR: Duration = Duration::from_secs(3600);
/// How long anything may take that comes by itself.
const PATIENCE: Duration = Duration::from_secs(120);
const BOUNDS: Bounds = Bounds { connections: 8, head_within: HOUR, idle: HOUR };

fn connections(bounds: Bounds) -> Arc<Connections> {
    Arc::new(Connections::new(bounds, Metrics::new().unwrap().connections))
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it comes by itself")
}

/// What comes until the server closes the connection.
async fn rest_of(stream: &mut TcpStream) -> String {
    let mut received = Vec::new();
    // A connection with bytes that nobody has read is closed by a reset.
    let _ = in_time(stream.read_to_end(&mut received)).await;
    String::from_utf8_lossy(&received).into_owned()
}

/// A server that answers each request once there is a permit for it.
struct Server {
    address: SocketAddr,
    begun: Arc<Semaphore>,
    permits: Arc<Semaphore>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(bounds: Bounds) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (begun, permits, stop) =
            (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)), CancellationToken::new());
        let answer = {
            let (begun, permits) = (begun.clone(), permits.clone());
            move |_: SocketAddr, _: Request| {
                let (begun, permits) = (begun.clone(), permits.clone());
                async move {
                    begun.add_permits(1);
                    permits.acquire().await.unwrap().forget();
                    Response::new("answered".into())
                }
            }
        };
        let serving = tokio::spawn(serve(listener, connections(bounds), answer, stop.clone()));
        Self { address, begun, permits, stop, serving }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection whose request is being answered.
    async fn asked(&self) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        in_time(self.begun.acquire()).await.unwrap().forget();
        stream
    }
}

#[tokio::test]
async fn serving_ends_although_connections_are_open_and_what_is_served_is_answered() {
    let server = Server::start(BOUNDS).await;
    let mut idle = server.asked().await;
    server.permits.add_permits(1);
    let mut answer = Vec::new();
    while !answer.ends_with(b"answered") {
        assert_ne!(in_time(idle.read_buf(&mut answer)).await.unwrap(), 0);
    }
    let mut silent = server.connect().await;
    let mut within = server.connect().await;
    within.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
    let mut served = server.asked().await;
    server.stop.cancel();
    for stream in [&mut idle, &mut silent, &mut within] {
        assert_eq!(rest_of(stream).await, "");
    }
    assert!(!server.serving.is_finished(), "one is still served");
    server.permits.add_permits(1);
    assert!(rest_of(&mut served).await.ends_with("answered"));
    in_time(server.serving).await.unwrap();
}

#[tokio::test]
async fn http2_has_its_limits_and_its_first_head_a_time() {
    let server = Server::start(Bounds { head_within: Duration::from_millis(300), ..BOUNDS }).await;
    let mut stream = server.connect().await;
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings].concat()).await.unwrap();
    let mut head = [0; 9];
    in_time(stream.read_exact(&mut head)).await.unwrap();
    assert_eq!((head[0], head[1], head[3]), (0, 0, 4), "its settings");
    let mut told = vec![0; usize::from(head[2])];
    in_time(stream.read_exact(&mut told)).await.unwrap();
    let told: Vec<(u16, u32)> = told
        .chunks(6)
        .map(|pair| (u16::from_be_bytes([pair[0], pair[1]]), u32::from_be_bytes(pair[2..].try_into().unwrap())))
        .collect();
    assert!(told.contains(&(3, MAX_STREAMS)) && told.contains(&(6, MAX_HEAD_BYTES as u32)), "{told:?}");
    rest_of(&mut stream).await;
}

#[tokio::test]
async fn a_connection_is_idle_from_its_answer_on() {
    // Nothing but the answer's end begins the time: the head came at once, and its time is long.
    let server = Server::start(Bounds { idle: Duration::from_millis(300), ..BOUNDS }).await;
    let mut stream = server.asked().await;
    server.permits.add_permits(1);
    assert!(rest_of(&mut stream).await.ends_with("answered"));
}

#[tokio::test]
async fn what_is_idle_makes_room_and_what_is_served_does_not() {
    let server = Server::start(Bounds { connections: 3, ..BOUNDS }).await;
    let mut silent = server.connect().await;
    let mut answered = server.asked().await;
    server.permits.add_permits(1);
    let mut answer = Vec::new();
    while !answer.ends_with(b"answered") {
        assert_ne!(in_time(answered.read_buf(&mut answer)).await.unwrap(), 0);
    }
    let mut served = server.asked().await;
    // Every place is taken, and nothing else would make one free: the bounds are an hour.
    let (mut fourth, mut fifth) = (server.asked().await, server.asked().await);
    for stream in [&mut silent, &mut answered] {
        assert_eq!(rest_of(stream).await, "");
    }
    server.permits.add_permits(3);
    for stream in [&mut served, &mut fourth, &mut fifth] {
        let mut answer = Vec::new();
        while !answer.ends_with(b"answered") {
            assert_ne!(in_time(stream.read_buf(&mut answer)).await.unwrap(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_over_http2_that_has_come_is_answered_though_its_connection_was_to_make_room() {
    async fn answered(stream: &mut tokio::io::DuplexStream) {
        let mut answer = Vec::new();
        while !answer.windows(8).any(|part| part == b"answered") {
            assert_ne!(in_time(stream.read_buf(&mut answer)).await.unwrap(), 0, "closed: {answer:?}");
        }
    }
    let connection = connections(BOUNDS).open();
    let (mut near, far) = tokio::io::duplex(1 << 10);
    let answer = |_: SocketAddr, _: Request| async { Response::new("answered".into()) };
    let client = SocketAddr::from(([127, 0, 0, 1], 1));
    let serving = tokio::spawn(connection.clone().run(far, None, client, answer, CancellationToken::new()));
    // HEADERS, the last and only ones of their stream: GET http://x/.
    let request = |stream: u8| [&[0, 0, 6, 1, 5, 0, 0, 0, stream][..], b"\x82\x86\x84\x41\x01x"].concat();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    near.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &request(1)[..]].concat()).await.unwrap();
    answered(&mut near).await;
    tokio::time::advance(SPARED_HTTP2).await;
    // It is there before the server looks again whether it is to make room.
    near.write_all(&request(3)).await.unwrap();
    connection.make_room();
    assert!(connection.lock().makes_room);
    answered(&mut near).await;
    drop(near);
    in_time(serving).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_begun_to_come_is_not_closed_to_make_room_nor_as_idle() {
    let idle = Duration::from_secs(90);
    for http2 in [false, true] {
        let (mut near, mut stream) = timed(Bounds { idle, ..BOUNDS });
        let connection = stream.connection.clone();
        drop(Served::new(&connection, http2));
        tokio::time::advance(SPARED_HTTP2).await;
        connection.make_room();
        assert!(connection.lock().makes_room);
        // Of a request that had come by then the first part is read, and the next one looked for.
        near.write_all(b"x").await.unwrap();
        let mut byte = [0];
        stream.read_exact(&mut byte).await.unwrap();
        let next = tokio::time::timeout(SPARED / 2, stream.read_exact(&mut byte)).await;
        assert!(next.is_err(), "the rest is waited for, over HTTP/2: {http2}");
        connection.make_room();
        assert!(!connection.lock().makes_room, "chosen before it came, over HTTP/2: {http2}");
        drop(Served::new(&connection, http2));
        connection.make_room();
        assert!(!connection.lock().makes_room, "answered just now, over HTTP/2: {http2}");
    }

    // The same at the end of its time over HTTP/2; but what comes then does not go on and on.
    let (mut near, mut stream) = timed(Bounds { idle, ..BOUNDS });
    let mut byte = [0];
    drop(Served::new(&stream.connection, true));
    let answered = Instant::now();
    tokio::time::advance(idle - SPARED / 4).await;
    let drips = async {
        while near.write_all(b"x").await.is_ok() {
            tokio::time::sleep(SPARED / 2).await;
        }
    };
    let ended = async { while stream.read_exact(&mut byte).await.is_ok() {} };
    tokio::select! {
        () = drips => unreachable!("it does not end"),
        () = ended => {}
    }
    assert_eq!(answered.elapsed().as_secs(), (idle + SPARED).as_secs());
}

/// A stream whose client is the other one.
fn timed(bounds: Bounds) -> (tokio::io::DuplexStream, Timed<tokio::io::DuplexStream>) {
    let (near, far) = tokio::io::duplex(16);
    (near, Timed::new(far, connections(bounds).open()))
}

#[tokio::test(start_paused = true)]
async fn a_client_has_its_time_for_each_thing_and_the_server_as_much_as_it_takes() {
    let (head, idle) = (Duration::from_secs(20), Duration::from_secs(90));
    let (mut near, mut stream) = timed(Bounds { head_within: head, idle, ..BOUNDS });
    let began = Instant::now();
    let mut byte = [0];
    // A head that goes on and on has no more time than one that does not.
    tokio::time::advance(idle - Duration::from_secs(1)).await;
    let drips = async {
        while near.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
    };
    let ended = async {
        loop {
            if let Err(error) = stream.read_exact(&mut byte).await {
                break error;
            }
        }
    };
    let error = tokio::select! {
        () = drips => unreachable!("it does not end"),
        error = ended => error,
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert_eq!((Instant::now() - began).as_secs(), (idle + head).as_secs() - 1);

    let (mut near, mut stream) = timed(Bounds { head_within: head, idle, ..BOUNDS });
    let connection = stream.connection.clone();
    near.write_all(b"x").await.unwrap();
    stream.read_exact(&mut byte).await.unwrap();
    let served = Served::new(&connection, false);
    let waited = tokio::time::timeout(HOUR, stream.read_exact(&mut byte)).await;
    assert!(waited.is_err(), "what takes the server's time is not the client's");
    drop(served);
    let answered = Instant::now();
    let untaken = stream.write_all(&[0; 17]).await.unwrap_err();
    assert_eq!((untaken.kind(), (Instant::now() - answered).as_secs()), (io::ErrorKind::TimedOut, idle.as_secs()));
}

#[tokio::test(start_paused = true)]
async fn the_longest_idle_makes_room_and_none_whose_request_or_answer_is_on_its_way() {
    let connections = connections(BOUNDS);
    let [idle, later, within, served, untaken] = std::array::from_fn(|_| connections.open());
    within.received();
    let _served = Served::new(&served, false);
    untaken.written(false);
    let told = || [&idle, &later, &within, &served, &untaken].map(|connection| connection.lock().makes_room);
    connections.close_longest_idle();
    assert_eq!(told(), [false; 5], "it may be about to ask");
    tokio::time::advance(SPARED / 2).await;
    drop(Served::new(&later, false));
    tokio::time::advance(SPARED / 2).await;
    connections.close_longest_idle();
    connections.close_longest_idle();
    assert_eq!(told(), [true, false, false, false, false]);
    tokio::time::advance(SPARED).await;
    connections.close_longest_idle();
    connections.close_longest_idle();
    assert_eq!(told(), [true, true, false, false, false]);
    untaken.written(true);
    drop(Served::new(&idle, true));
    tokio::time::advance(SPARED).await;
    connections.close_longest_idle();
    connections.close_longest_idle();
    assert_eq!(told(), [false, true, false, false, true], "over HTTP/2 it is spared for longer");
    drop((idle, later, within, untaken));
    assert_eq!(connections.lock().all.len(), 1, "what is closed is forgotten");
}
