//! A greedy caller and a modest one: the first is told that it asks for too much, the second does not notice.

use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster, eventually, kind, why};
use futures::StreamExt;
use lake_metasrv::config::Config;
use lake_metasrv::peer::untaken::MAX_BYTES;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::pipeline_request::Request as Wanted;
use lake_proto::v1::pipeline_response::Response as Got;
use lake_proto::v1::sessions_client::SessionsClient;
use lake_proto::v1::watch_client::WatchClient;
use lake_proto::{MAX_MESSAGE_BYTES, MAX_WATCH_MESSAGE_BYTES};
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// How many requests there are on each of the greedy caller's connections, and how many connections.
const REQUESTS: u64 = 1000;
const GREEDY: u64 = 8;
/// Requests of the modest one at once.
const MODEST: u64 = 10;

/// A leader that keeps its lead for as long as a test takes, though no quorum answers it.
fn patient(config: &mut Config) {
    config.timing.election_timeout_min = Duration::from_secs(59);
    config.timing.election_timeout_max = Duration::from_secs(60);
}

fn put(key: String) -> Wanted {
    let txn = Txn { then: vec![Op::put(key, "1")], ..Txn::default() };
    Wanted::Txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None })
}

fn get() -> Wanted {
    Wanted::Get(v1::GetRequest { key: "/kv/a".to_owned(), options: None })
}

/// One connection with requests on one stream. How each was answered is told as it comes; the stream ends with the last.
struct Caller {
    answers: mpsc::UnboundedReceiver<Result<(), Kind>>,
    /// Of those that have come.
    refused: u64,
    done: u64,
    task: JoinHandle<()>,
    asks: mpsc::Sender<v1::PipelineRequests>,
}

impl Caller {
    async fn new(cluster: &TestCluster, leader: u64) -> Self {
        let (asks, requests) = mpsc::channel(4);
        let mut kv = cluster.kv(leader);
        let (told, answers) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            let mut responses = kv.pipeline(ReceiverStream::new(requests)).await.unwrap().into_inner();
            while let Some(Ok(message)) = responses.next().await {
                for response in message.responses {
                    let answer = match response.response.unwrap() {
                        Got::Error(error) => Err(error.detail.unwrap().kind()),
                        _ => Ok(()),
                    };
                    let _ = told.send(answer);
                }
            }
        });
        Self { answers, refused: 0, done: 0, task, asks }
    }

    async fn ask(&self, count: u64, wanted: impl Fn(u64) -> Wanted) {
        let requests =
            (0..count).map(|id| v1::PipelineRequest { id, timeout_ms: 120_000, request: Some(wanted(id)) }).collect();
        self.asks.send(v1::PipelineRequests { requests }).await.unwrap();
    }

    /// Takes note of what has come.
    fn look(&mut self) {
        while let Ok(answer) = self.answers.try_recv() {
            match answer {
                Ok(()) => self.done += 1,
                Err(Kind::Overloaded) => self.refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
}

async fn end(callers: Vec<Caller>) {
    for caller in callers {
        drop(caller.asks);
        caller.task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_greedy_caller_is_refused_and_a_modest_one_gets_in() {
    let mut cluster = TestCluster::founded(3, patient).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    for id in &followers {
        cluster.stop(*id).await;
    }
    let in_flight = || cluster.running[&leader].peer().member().unwrap().in_flight() as u64;

    // Nothing is committed now: all that is taken in stays in flight.
    let mut greedy = Vec::new();
    for n in 0..GREEDY {
        let caller = Caller::new(&cluster, leader).await;
        caller.ask(REQUESTS, |id| put(format!("/kv/greedy/{n}/{id}"))).await;
        greedy.push(caller);
    }
    let all = REQUESTS * GREEDY;
    let greedy = tokio::sync::Mutex::new(greedy);
    let refused = eventually("everything to be taken in or refused", async || {
        let mut greedy = greedy.lock().await;
        greedy.iter_mut().for_each(Caller::look);
        let refused: u64 = greedy.iter().map(|caller| caller.refused).sum();
        (refused + in_flight() == all).then_some(refused)
    })
    .await;
    let taken = all - refused;
    assert!(taken >= 1000 && refused >= 1000, "{taken} taken in, {refused} refused");

    // What is refused waits for nothing: not for its deadline, which is later than anybody waits here, nor for those in flight.
    {
        let mut greedy = greedy.lock().await;
        let one = &mut greedy[0];
        for n in 0..20 {
            one.ask(1, |_| put(format!("/kv/greedy/more/{n}"))).await;
            let answer = tokio::time::timeout(PATIENCE, one.answers.recv()).await.expect("an answer");
            assert_eq!((answer.unwrap(), in_flight()), (Err(Kind::Overloaded), taken));
        }
    }

    let modest = Caller::new(&cluster, leader).await;
    modest.ask(MODEST, |id| put(format!("/kv/modest/{id}"))).await;
    let modest = tokio::sync::Mutex::new(modest);
    eventually("the modest one's to be taken in", async || {
        let mut modest = modest.lock().await;
        modest.look();
        assert_eq!(modest.refused, 0);
        (in_flight() == taken + MODEST).then_some(())
    })
    .await;

    for id in followers {
        cluster.start(id).await;
    }
    let (mut modest, mut greedy) = (modest.into_inner(), greedy.into_inner());
    let by = Instant::now() + 4 * PATIENCE;
    while modest.done < MODEST || greedy.iter().map(|caller| caller.done).sum::<u64>() < taken {
        modest.look();
        greedy.iter_mut().for_each(Caller::look);
        assert_eq!(modest.refused, 0);
        assert!(Instant::now() < by, "{} of the modest one's are done", modest.done);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    greedy.push(modest);
    end(greedy).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_a_greedy_caller_keep_nobody_elses_out() {
    let mut cluster = TestCluster::founded(3, patient).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    // Rounds end without a quorum after a while, and their readers wait for another one: all that are let in stay.
    let mut greedy = Vec::new();
    for _ in 0..3 * GREEDY {
        let caller = Caller::new(&cluster, leader).await;
        caller.ask(REQUESTS, |_| get()).await;
        greedy.push(caller);
    }
    let greedy = tokio::sync::Mutex::new(greedy);
    eventually("most to be refused", async || {
        let mut greedy = greedy.lock().await;
        greedy.iter_mut().for_each(Caller::look);
        (greedy.iter().map(|caller| caller.refused).sum::<u64>() > 3 * GREEDY * REQUESTS / 2).then_some(())
    })
    .await;
    // A modest one is let in: what it is told, in the end, is that no quorum answers.
    let kv = cluster.kv(leader);
    for _ in 0..20 {
        let refused = why(async || {
            let mut request = tonic::Request::new(v1::GetRequest { key: "/kv/a".to_owned(), options: None });
            request.set_timeout(Duration::from_millis(200));
            kv.clone().get(request).await
        });
        assert_eq!(refused.await, Kind::Unavailable);
    }
    for caller in greedy.into_inner() {
        caller.task.abort();
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_that_wait_for_what_never_comes_are_bounded_and_keep_nobody_out() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let never = || {
        let options = v1::ReadOptions {
            consistency: v1::read_options::Consistency::Local as i32,
            min_revision: 1 << 60,
            ..v1::ReadOptions::default()
        };
        Wanted::Get(v1::GetRequest { key: "/kv/a".to_owned(), options: Some(options) })
    };
    let mut greedy = Vec::new();
    for _ in 0..GREEDY {
        let caller = Caller::new(&cluster, 1).await;
        caller.ask(REQUESTS, |_| never()).await;
        greedy.push(caller);
    }
    let greedy = tokio::sync::Mutex::new(greedy);
    // A host may have half of the 8,192 that there are.
    eventually("half of them to be refused", async || {
        let mut greedy = greedy.lock().await;
        greedy.iter_mut().for_each(Caller::look);
        (greedy.iter().map(|caller| caller.refused).sum::<u64>() > GREEDY * REQUESTS / 2).then_some(())
    })
    .await;
    // One that asks for little gets in, and is told when its time is over.
    let kv = cluster.kv(1);
    let refused = why(async || {
        let Wanted::Get(get) = never() else { unreachable!() };
        let mut request = tonic::Request::new(get);
        request.set_timeout(Duration::from_millis(200));
        kv.clone().get(request).await
    });
    assert_eq!(refused.await, Kind::Unavailable);
    assert!(cluster.get(1, "/kv/a").await.is_some(), "what is there already is read");
    for caller in greedy.into_inner() {
        caller.task.abort();
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_a_greedy_caller_leave_room_for_another_on_the_same_host() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let open = async |mut sessions: SessionsClient<Channel>| {
        let request = v1::OpenSessionRequest { ttl_ms: 3_600_000, holder: String::new() };
        sessions.open(request).await.map(|opened| opened.into_inner().id)
    };
    let greedy = SessionsClient::new(cluster.channel(1));
    let (mut opened, mut refused) = (Vec::new(), None);
    // A connection may have a quarter of the 10,000 that there are, or a little less.
    while refused.is_none() && opened.len() < 5_000 {
        for answer in futures::future::join_all((0..128).map(|_| open(greedy.clone()))).await {
            match answer {
                Ok(id) => opened.push(id),
                Err(status) => refused = Some(status),
            }
        }
    }
    let refused = refused.expect("somebody has its part");
    assert!(opened.len() > 1_500 && kind(&refused) == Kind::Overloaded, "{} opened, then {refused:?}", opened.len());
    assert!(refused.message().starts_with("this connection has as many sessions as it may have"), "{refused:?}");
    open(SessionsClient::new(cluster.channel(1))).await.unwrap();

    // It may open some again once it has closed enough: more than what it got beyond its part while many were opened at once, which
    // depends on how many were on their way then. With half of its part it is within it in any case.
    let mut opens_again = false;
    while !opens_again && opened.len() > 1_000 {
        for id in opened.drain(..100) {
            let close = v1::CloseSessionRequest { id };
            assert!(greedy.clone().close(close).await.unwrap().into_inner().existed);
        }
        opens_again = open(greedy.clone()).await.is_ok();
    }
    assert!(opens_again, "none is opened beside {}", opened.len());

    // More in one message than a stream may have in flight: each would have to be answered.
    let requests = (0..1_025).map(|id| v1::PipelineRequest { id, timeout_ms: 1_000, request: Some(get()) }).collect();
    let (asks, messages) = mpsc::channel(1);
    asks.send(v1::PipelineRequests { requests }).await.unwrap();
    let mut answers = cluster.kv(1).pipeline(ReceiverStream::new(messages)).await.unwrap().into_inner();
    let refused = answers.message().await.unwrap_err();
    assert!(kind(&refused) == Kind::InvalidArgument && refused.message().contains("1025 requests"), "{refused:?}");
    cluster.stop_all().await;
}

/// Eight MiB that are read or watched at once.
const LARGE: u64 = 8;

fn large_keys() -> Vec<String> {
    (0..LARGE).map(|n| format!("/kv/large/{n}")).collect()
}

async fn put_large(cluster: &TestCluster) -> u64 {
    let value = bytes::Bytes::from(vec![7; (1 << 20) - 64]);
    let then = large_keys().into_iter().map(|key| Op::put(key, value.clone())).collect();
    cluster.commit(Txn { then, ..Txn::default() }).await.revision
}

/// A connection on which one stream that nobody reads does not stop the others.
fn roomy(cluster: &TestCluster) -> Channel {
    let address = format!("http://{}", cluster.configs[&1].listen);
    let endpoint = Channel::from_shared(address).unwrap();
    endpoint.initial_connection_window_size(16 << 20).initial_stream_window_size(64 << 10).connect_lazy()
}

/// One stream of requests, and its answers, which nobody reads unless asked to.
struct Stream {
    asks: mpsc::Sender<v1::PipelineRequests>,
    answers: tonic::Streaming<v1::PipelineResponses>,
}

impl Stream {
    async fn open(channel: &Channel) -> Self {
        let (asks, requests) = mpsc::channel(1);
        let mut kv = KvClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let answers = kv.pipeline(ReceiverStream::new(requests)).await.unwrap().into_inner();
        Self { asks, answers }
    }

    async fn ask(&self, wanted: impl IntoIterator<Item = Wanted>) {
        let of = |(id, request)| v1::PipelineRequest { id, timeout_ms: 120_000, request: Some(request) };
        let requests = (1..).zip(wanted).map(of).collect();
        self.asks.send(v1::PipelineRequests { requests }).await.unwrap();
    }

    /// So many answers.
    async fn answers(&mut self, count: usize) -> Vec<Result<Got, Kind>> {
        let mut all = Vec::new();
        while all.len() < count {
            let message = tokio::time::timeout(PATIENCE, self.answers.message()).await.expect("an answer in time");
            all.extend(message.unwrap().expect("the stream goes on").responses.into_iter().map(|answer| {
                match answer.response.unwrap() {
                    Got::Error(error) => Err(error.detail.unwrap().kind()),
                    answer => Ok(answer),
                }
            }));
        }
        all
    }
}

// Each thread may let something in at the same moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_a_caller_does_not_take_are_bounded_and_others_get_theirs() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    put_large(&cluster).await;
    let untaken = cluster.running[&1].peer().untaken.clone();
    let all_large = || Wanted::BatchGet(v1::BatchGetRequest { keys: large_keys(), options: None });
    // What one connection may have alone: a quarter of what is not the peer's own.
    let part = (MAX_BYTES - MAX_BYTES / 16) / 4;

    let mut modest = Stream::open(&cluster.channel(1)).await;
    modest.ask([all_large()]).await;
    let one = modest.answers.message().await.unwrap().expect("an answer").encoded_len();

    let greedy = roomy(&cluster);
    let mut unread = [Stream::open(&greedy).await, Stream::open(&greedy).await];
    let [mut third, mut fourth] = [Stream::open(&greedy).await, Stream::open(&greedy).await];
    for stream in &unread {
        stream.ask((0..LARGE).map(|_| all_large())).await;
    }
    // A refusal has some hundred bytes; frames have a few.
    eventually("its part to be taken, and more to be refused", async || {
        let bytes = untaken.bytes();
        assert!(bytes < 2 * part, "{bytes} bytes");
        (bytes >= part && bytes % one > 100).then_some(())
    })
    .await;

    // Whatever it asks for now is refused at once, and not begun.
    third.ask([get(), put("/kv/refused".to_owned())]).await;
    assert!(third.answers(2).await.iter().all(|answer| matches!(answer, Err(Kind::Overloaded))));
    assert!(cluster.get(1, "/kv/refused").await.is_none());
    // So many refusals have no room either, and nothing is in doubt.
    fourth.ask((0..64).map(|_| get())).await;
    let ended = tokio::time::timeout(PATIENCE, fourth.answers.message()).await.expect("an end in time").unwrap_err();
    assert_eq!(kind(&ended), Kind::Overloaded, "{ended:?}");
    let (kv, watch) = (KvClient::new(greedy.clone()), WatchClient::new(greedy.clone()));
    let request = || v1::WatchRequest { prefix: "/kv/large/".to_owned(), from_revision: 0 };
    assert_eq!(why(async || watch.clone().watch(request()).await).await, Kind::Overloaded);
    let a = || v1::GetRequest { key: "/kv/a".to_owned(), options: None };
    assert_eq!(why(async || kv.clone().get(a()).await).await, Kind::Overloaded);
    // Another connection of the same host gets what it asks for.
    modest.ask([all_large(), put("/kv/modest".to_owned())]).await;
    assert!(modest.answers(2).await.iter().all(Result::is_ok));

    // Once it reads, it finds what there was room for, and that there was none for the rest.
    let mut done = 0;
    for stream in &mut unread {
        for answer in stream.answers(LARGE as usize).await {
            match answer {
                Ok(Got::BatchGet(got)) if got.entries.len() as u64 == LARGE => done += 1,
                Ok(other) => panic!("{other:?}"),
                Err(kind) => assert_eq!(kind, Kind::Overloaded),
            }
        }
    }
    assert!((LARGE..2 * LARGE).contains(&done), "{done} answers of 8 MiB");
    eventually("all to be taken", async || (untaken.bytes() == 0).then_some(())).await;
    third.ask([get()]).await;
    assert!(third.answers(1).await[0].is_ok());
    drop((unread, third, fourth));

    // Calls that are all let in before any is answered: each waits for the next revision.
    let mut kv = KvClient::new(roomy(&cluster)).max_decoding_message_size(MAX_MESSAGE_BYTES);
    kv.get(a()).await.unwrap();
    let options = v1::ReadOptions {
        consistency: v1::read_options::Consistency::Local as i32,
        min_revision: cluster.put("/kv/a", "2").await + 1,
        ..v1::ReadOptions::default()
    };
    let mut calls: Vec<_> = (0..3 * LARGE)
        .map(|_| {
            let (mut kv, options) = (kv.clone(), Some(options));
            let mut request = tonic::Request::new(v1::BatchGetRequest { keys: large_keys(), options });
            request.set_timeout(PATIENCE);
            Box::pin(async move { kv.batch_get(request).await })
        })
        .collect();
    // Each is sent, and not read from.
    for call in &mut calls {
        assert!(futures::poll!(call).is_pending());
    }
    kv.get(a()).await.unwrap();
    cluster.put("/kv/a", "3").await;
    eventually("its part to be taken", async || (untaken.bytes() >= part).then_some(())).await;
    // Behind those that are not done yet.
    for _ in 0..3 {
        modest.ask([all_large()]).await;
        assert!(modest.answers(1).await[0].is_ok());
    }
    assert!(untaken.bytes() < 2 * part, "{} bytes", untaken.bytes());
    let answered = futures::future::join_all(calls).await;
    let done = answered.iter().filter(|answer| answer.is_ok()).count() as u64;
    assert!((1..3 * LARGE).contains(&done), "{done} answers of 8 MiB");
    assert!(answered.iter().filter_map(|answer| answer.as_ref().err()).all(|status| kind(status) == Kind::Overloaded));
    drop((answered, modest));
    eventually("all to be taken", async || (untaken.bytes() == 0).then_some(())).await;

    // Watchers that do not read, and one that does.
    let member = cluster.running[&1].peer().member().unwrap();
    let mut watchers = Vec::new();
    for channel in std::iter::repeat_n(roomy(&cluster), 12).chain([cluster.channel(1)]) {
        let mut client = WatchClient::new(channel).max_decoding_message_size(MAX_WATCH_MESSAGE_BYTES);
        let mut stream = client.watch(request()).await.unwrap().into_inner();
        stream.message().await.unwrap().expect("a first mark");
        watchers.push(stream);
    }
    let mut reads = watchers.pop().unwrap();
    let revision = put_large(&cluster).await;
    let told = async |stream: &mut tonic::Streaming<v1::WatchResponse>| {
        loop {
            let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("a message in time")?;
            let message = message.expect("the stream goes on");
            if message.progress_revision >= revision {
                let events: usize = message.changes.iter().map(|change| change.events.len()).sum();
                return Ok::<_, tonic::Status>(events as u64);
            }
        }
    };
    assert_eq!(told(&mut reads).await.unwrap(), LARGE);
    eventually("slow ones to be cut off", async || (member.watches.watchers() < 13).then_some(())).await;
    assert!((part..2 * part).contains(&untaken.bytes()), "{} bytes", untaken.bytes());
    let mut cut_off = 0;
    for stream in &mut watchers {
        match told(stream).await {
            Ok(events) => assert_eq!(events, LARGE),
            Err(status) => {
                assert!(kind(&status) == Kind::Overloaded && status.message().contains("cut off"), "{status:?}");
                cut_off += 1;
            }
        }
    }
    assert!((1..=5).contains(&cut_off), "{cut_off} of 12 were cut off");
    drop((watchers, reads));
    eventually("all to be taken", async || (untaken.bytes() == 0).then_some(())).await;
    cluster.stop_all().await;
}
