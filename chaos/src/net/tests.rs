//! Real connections through real links.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use super::condition::{AtMessage, Condition, Cut, When};
use super::partition;
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
const CLIENTS_TO_1: Path = (Node::Clients, Node::Peer(1));
const BACK_FROM_1: Path = (Node::Peer(1), Node::Clients);

/// A peer that sends back what it gets, in upper case, behind a fabric.
async fn echo() -> (Arc<Fabric>, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let fabric = Fabric::open_with(&[1, 2], &[1], 7).await.unwrap();
    fabric.set_targets(1, &address, &address);
    let server = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            connections.spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                    buffer[..n].make_ascii_uppercase();
                    if stream.write_all(&buffer[..n]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (fabric, server)
}

async fn connect(fabric: &Fabric) -> TcpStream {
    TcpStream::connect(fabric.address(Node::Clients, Node::Peer(1)).unwrap()).await.unwrap()
}

async fn say(stream: &mut TcpStream, what: &str) {
    stream.write_all(what.as_bytes()).await.unwrap();
}

async fn hear(stream: &mut TcpStream, bytes: usize) -> String {
    let mut heard = vec![0; bytes];
    timeout(PATIENCE, stream.read_exact(&mut heard)).await.expect("nothing came").unwrap();
    String::from_utf8(heard).unwrap()
}

/// Waits until something has been held on a path.
async fn held(fabric: &Fabric, path: Path) -> Counts {
    let seen = || async {
        let counts = fabric.counts()[&path];
        if counts.held_bytes + counts.held_connections > 0 { Ok(counts) } else { Err("nothing held".to_owned()) }
    };
    crate::probe::until("something to be held", PATIENCE, seen).await.unwrap()
}

/// Another process, which says hello to the peer once it is told to.
fn query_node(fabric: &Fabric) -> std::process::Child {
    let address = fabric.address(Node::Clients, Node::Peer(1)).unwrap();
    let (host, port) = address.split_once(':').unwrap();
    let patience = PATIENCE.as_secs();
    let script = format!(
        "read -r go; exec 3<>/dev/tcp/{host}/{port}; echo hello >&3; read -r -t {patience} answer <&3; echo \"$answer\""
    );
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", &script]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    bash.spawn().unwrap()
}

#[tokio::test]
async fn a_query_node_is_cut_off_by_the_link_that_clients_go_on_using() {
    let (fabric, server) = echo().await;
    let mut node = query_node(&fabric);
    fabric.set_process(1, Some(node.id()));
    let there = (Node::Query(1), Node::Peer(1));
    fabric.set(partition::cut(&[there, (there.1, there.0)], Cut::Silent));
    std::io::Write::write_all(&mut node.stdin.take().unwrap(), b"go\n").unwrap();
    held(&fabric, there).await;
    let mut stream = connect(&fabric).await;
    say(&mut stream, "abc").await;
    assert_eq!(hear(&mut stream, 3).await, "ABC");
    fabric.set(Conditions::new());
    let output = tokio::task::spawn_blocking(move || node.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(output.stdout, b"HELLO\n");
    let counts = fabric.counts();
    assert_eq!((counts[&there].passed_bytes, counts[&CLIENTS_TO_1].held_bytes), (6, 0));
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_sound_link_carries_both_ways_and_closes_in_order() {
    let (fabric, server) = echo().await;
    let mut stream = connect(&fabric).await;
    let much = "abc".repeat(200_000);
    let (mut read, mut write) = stream.split();
    let (sent, heard) = tokio::join!(
        async {
            write.write_all(much.as_bytes()).await.unwrap();
            write.shutdown().await
        },
        async {
            let mut heard = String::new();
            timeout(PATIENCE, read.read_to_string(&mut heard)).await.unwrap().unwrap();
            heard
        }
    );
    sent.unwrap();
    assert_eq!(heard, much.to_uppercase());
    let counts = fabric.counts();
    assert_eq!(counts[&CLIENTS_TO_1].passed_bytes, much.len() as u64);
    assert_eq!(counts[&BACK_FROM_1].passed_bytes, much.len() as u64);
    let untouched = Counts { passed_bytes: much.len() as u64, ..Counts::default() };
    assert_eq!(counts[&CLIENTS_TO_1], untouched);
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_silent_cut_holds_what_is_sent_and_heals() {
    let (fabric, server) = echo().await;
    let mut stream = connect(&fabric).await;
    say(&mut stream, "one").await;
    assert_eq!(hear(&mut stream, 3).await, "ONE");
    fabric.set(partition::cut(&[CLIENTS_TO_1], Cut::Silent));
    say(&mut stream, "two").await;
    assert_eq!(held(&fabric, CLIENTS_TO_1).await.held_bytes, 3);
    let mut other = connect(&fabric).await;
    say(&mut other, "new").await;
    fabric.set(Conditions::new());
    assert_eq!(hear(&mut stream, 3).await, "TWO");
    assert_eq!(hear(&mut other, 3).await, "NEW");
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_path_is_cut_one_way() {
    let (fabric, server) = echo().await;
    let mut stream = connect(&fabric).await;
    say(&mut stream, "one").await;
    assert_eq!(hear(&mut stream, 3).await, "ONE");
    fabric.set(partition::cut(&[BACK_FROM_1], Cut::Silent));
    say(&mut stream, "two").await;
    // It arrived, and the answer does not.
    assert_eq!(held(&fabric, BACK_FROM_1).await.held_bytes, 3);
    assert_eq!(fabric.counts()[&CLIENTS_TO_1].held_bytes, 0);
    fabric.set(Conditions::new());
    assert_eq!(hear(&mut stream, 3).await, "TWO");
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_reset_ends_connections_and_refuses_new_ones() {
    let (fabric, server) = echo().await;
    let mut stream = connect(&fabric).await;
    say(&mut stream, "one").await;
    assert_eq!(hear(&mut stream, 3).await, "ONE");
    fabric.set(partition::cut(&[CLIENTS_TO_1], Cut::Reset));
    let ended = timeout(PATIENCE, stream.read(&mut [0; 8])).await.expect("the connection lives");
    assert!(ended.is_err(), "{ended:?}");
    let mut refused = connect(&fabric).await;
    let ended = timeout(PATIENCE, refused.read(&mut [0; 8])).await.expect("the connection lives");
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    assert!(fabric.counts()[&CLIENTS_TO_1].resets >= 2);
    fabric.set(Conditions::new());
    let mut stream = connect(&fabric).await;
    say(&mut stream, "two").await;
    assert_eq!(hear(&mut stream, 3).await, "TWO");
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn who_is_refused_is_told_so_until_the_path_is_sound_again() {
    let (fabric, server) = echo().await;
    let mut stream = connect(&fabric).await;
    say(&mut stream, "one").await;
    assert_eq!(hear(&mut stream, 3).await, "ONE");
    fabric.set(partition::cut(&[CLIENTS_TO_1], Cut::Refuse));
    let ended = timeout(PATIENCE, stream.read(&mut [0; 8])).await.expect("the connection lives");
    assert!(ended.is_err(), "{ended:?}");
    let address = fabric.address(Node::Clients, Node::Peer(1)).unwrap();
    let connect = || async {
        let connected = TcpStream::connect(&address).await;
        connected.map_or_else(|e| Ok(e.kind()), |_| Err("somebody listens".to_owned()))
    };
    let refused = crate::probe::until("a refusal", PATIENCE, connect).await.unwrap();
    assert_eq!(refused, std::io::ErrorKind::ConnectionRefused);
    fabric.set(Conditions::new());
    let connect = || async { TcpStream::connect(&address).await.map_err(|e| e.to_string()) };
    let mut stream = crate::probe::until("somebody to listen", PATIENCE, connect).await.unwrap();
    say(&mut stream, "two").await;
    assert_eq!(hear(&mut stream, 3).await, "TWO");
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_connection_breaks_before_a_message_or_after_it() {
    let (fabric, server) = echo().await;
    // What a client says first, and then a message of three bytes.
    let preface = "p".repeat(24);
    let message = "\0\0\x03\0\0\0\0\0\x01abc";
    for when in [When::Before, When::After] {
        fabric.set(Conditions::new());
        let mut stream = connect(&fabric).await;
        say(&mut stream, &preface).await;
        assert_eq!(hear(&mut stream, preface.len()).await, preface.to_uppercase());
        let before = fabric.counts()[&CLIENTS_TO_1];
        let condition = Condition { at_message: Some(AtMessage { chance: 1.0, when }), ..Condition::default() };
        fabric.set(Conditions::from([(CLIENTS_TO_1, condition.clone())]));
        say(&mut stream, message).await;
        let ended = timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await.expect("the connection lives");
        assert!(ended.is_err(), "{ended:?}");
        let now = fabric.counts()[&CLIENTS_TO_1];
        assert_eq!(now.done_by(&condition, &before), 1);
        let arrives = if when == When::After { message.len() } else { 0 };
        assert_eq!(now.passed_bytes - before.passed_bytes, arrives as u64);
    }
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn delay_and_a_slow_line_make_late_and_keep_order() {
    let (fabric, server) = echo().await;
    let slow =
        Condition { delay: Duration::from_millis(30), jitter: Duration::from_millis(30), ..Condition::default() };
    fabric.set(Conditions::from([(CLIENTS_TO_1, slow)]));
    let mut stream = connect(&fabric).await;
    let started = Instant::now();
    for part in ["aa", "bb", "cc"] {
        say(&mut stream, part).await;
    }
    assert_eq!(hear(&mut stream, 6).await, "AABBCC");
    assert!(started.elapsed() >= Duration::from_millis(30), "{:?}", started.elapsed());
    assert!(fabric.counts()[&CLIENTS_TO_1].late_chunks > 0);
    assert_eq!(fabric.counts()[&CLIENTS_TO_1].lost_chunks, 0);
    let narrow = Condition { bytes_per_s: Some(1000), ..Condition::default() };
    fabric.set(Conditions::from([(BACK_FROM_1, narrow)]));
    let started = Instant::now();
    say(&mut stream, &"x".repeat(100)).await;
    hear(&mut stream, 100).await;
    assert!(started.elapsed() >= Duration::from_millis(100), "{:?}", started.elapsed());
    fabric.close().await;
    server.abort();
}

/// What stands in a queue for a narrow line must not go on waiting once the line is sound again, nor what is sent then.
#[tokio::test]
async fn nothing_is_late_once_a_line_is_sound_again() {
    let (fabric, server) = echo().await;
    let narrow = Condition { bytes_per_s: Some(10), ..Condition::default() };
    fabric.set(Conditions::from([(CLIENTS_TO_1, narrow)]));
    let mut stream = connect(&fabric).await;
    // 1000 s of it.
    say(&mut stream, &"x".repeat(10_000)).await;
    let late = || async {
        let late = fabric.counts()[&CLIENTS_TO_1].late_chunks;
        if late > 0 { Ok(()) } else { Err("nothing was late".to_owned()) }
    };
    crate::probe::until("something to be late", PATIENCE, late).await.unwrap();
    fabric.set(Conditions::new());
    assert_eq!(hear(&mut stream, 10_000).await, "X".repeat(10_000));
    say(&mut stream, "after").await;
    assert_eq!(hear(&mut stream, 5).await, "AFTER");
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn what_is_held_back_is_overtaken_by_another_connection() {
    let (fabric, server) = echo().await;
    let (mut first, mut second) = (connect(&fabric).await, connect(&fabric).await);
    for stream in [&mut first, &mut second] {
        say(stream, "sound").await;
        assert_eq!(hear(stream, 5).await, "SOUND");
    }
    let reordered = Condition { reorder: 1.0, ..Condition::default() };
    fabric.set(Conditions::from([(CLIENTS_TO_1, reordered)]));
    let mut overtaken = async || {
        for stream in [&mut first, &mut second] {
            say(stream, "ab").await;
        }
        for stream in [&mut first, &mut second] {
            assert_eq!(hear(stream, 2).await, "AB", "order within a connection is kept");
        }
        fabric.counts()[&CLIENTS_TO_1].overtaken_chunks
    };
    // Both are held back; the first to have waited long enough passes the other, unless the machine lets it go before the other
    // one is there.
    let mut times = 0;
    while overtaken().await == 0 {
        times += 1;
        assert!(times < 50, "nothing was ever overtaken");
    }
    fabric.set(Conditions::new());
    let before = fabric.counts()[&CLIENTS_TO_1].overtaken_chunks;
    assert_eq!(overtaken().await, before);
    fabric.close().await;
    server.abort();
}

#[tokio::test]
async fn a_peer_that_is_down_refuses() {
    let (fabric, server) = echo().await;
    server.abort();
    let _ = server.await;
    let mut stream = connect(&fabric).await;
    let ended = timeout(PATIENCE, stream.read(&mut [0; 8])).await.expect("the connection lives");
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    // Nobody has said where peer 2 is.
    let mut nowhere = TcpStream::connect(fabric.address(Node::Peer(1), Node::Peer(2)).unwrap()).await.unwrap();
    let ended = timeout(PATIENCE, nowhere.read(&mut [0; 8])).await.expect("the connection lives");
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    fabric.close().await;
}

#[test]
fn conditions_combine_to_the_worse() {
    let cut = partition::cut(&[CLIENTS_TO_1], Cut::Silent);
    let slow = Condition { delay: Duration::from_millis(5), ..Condition::default() };
    let both = combine(&cut, &Conditions::from([(CLIENTS_TO_1, slow.clone()), (BACK_FROM_1, slow.clone())]));
    assert_eq!(both[&CLIENTS_TO_1].cut, Some(Cut::Silent));
    assert_eq!(both[&CLIENTS_TO_1].delay, slow.delay);
    assert_eq!(both[&BACK_FROM_1], slow);
}
