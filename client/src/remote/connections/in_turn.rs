//! Who leads, asked by one who can wait: a node whose stream to the leader ended, of which there may be a thousand.
//!
//! First the peer that led is asked: it may lead still, where only a connection broke, or know its successor. Then one of the
//! others, which may wait until it knows of another leader than that. So a leader that dies costs one question for each who asks like this,
//! and everybody else asks all peers at once ([`Inner::ask`]).
//!
//! Limits: one question at a time, two in all. Failure cases: a peer that does not answer, or knows no leader, is one that was asked in
//! vain; who then still knows of none asks like everybody else. So does at once who is told to leave meanwhile, and is waited for.

use std::time::Duration;

use rand::Rng;
use tokio_util::sync::CancellationToken;

use super::super::flight::Flight;
use super::super::leader::{AWAITED_FOR, Question, Round};
use super::Inner;

/// How long the peer that led may take to answer: if it lives, it has nothing else to wait for.
const LED_ANSWERS_WITHIN: Duration = Duration::from_millis(150);

impl Inner {
    /// Asks so, unless a leader is known or being asked for, and until `told_to_leave`. `led` is where the one that was lost was reached.
    pub async fn ask_in_turn(&self, led: &str, told_to_leave: &CancellationToken) {
        tokio::select! {
            biased;
            () = told_to_leave.cancelled() => {}
            () = self.ask_two(led) => {}
        }
    }

    async fn ask_two(&self, led: &str) {
        let (under_way, besides) = {
            let shared = self.lock();
            if shared.view.leader().is_some() {
                return;
            }
            (shared.asking.as_ref().and_then(Flight::join), shared.view.lost())
        };
        if let Some(round) = under_way {
            // What came of it is in the view.
            round.outcome().await;
            return;
        }
        let at_once = Question { wait: Duration::ZERO, besides: None };
        let answered = tokio::time::timeout(LED_ANSWERS_WITHIN, self.finds(led, at_once)).await;
        if answered.unwrap_or(false) {
            return;
        }
        let mut others = self.endpoints();
        others.retain(|endpoint| endpoint != led);
        if !others.is_empty() {
            let one = others.swap_remove(rand::rng().random_range(0..others.len()));
            self.finds(&one, Question { wait: AWAITED_FOR, besides }).await;
        }
    }

    /// Asks one peer. Says whether a leader is known then, whoever has named it.
    async fn finds(&self, address: &str, question: Question) -> bool {
        let answer = self.ask_one(address, question, true).await;
        match answer.and_then(|(address, answer)| self.of_our_cluster(address, answer)) {
            Ok(answer) => {
                let mut round = Round::new(1);
                round.answer(Some(answer));
                self.learn(round);
            }
            Err(why) => tracing::debug!("asking who leads: {why}"),
        }
        self.lock().view.leader().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use bytes::Bytes;
    use lake_proto::v1;
    use lake_proto::v1::cluster_server::{Cluster, ClusterServer};
    use lake_proto::v1::nodes_server::{Nodes, NodesServer};
    use lake_proto::v1::watch_server::{Watch, WatchServer};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::{Request, Response, Status, Streaming};

    use super::*;
    use crate::clock;
    use crate::remote::node::{Node, NodeKeeper};
    use crate::remote::{RemoteConfig, RemoteStore};

    #[derive(Debug)]
    struct Idle;

    #[async_trait]
    impl Node for Idle {
        fn info(&self) -> v1::NodeInfo {
            v1::NodeInfo::default()
        }

        fn load(&self) -> v1::NodeLoad {
            v1::NodeLoad::default()
        }

        async fn carry_out(&self, _: &str, _: Bytes) -> Result<Bytes, String> {
            Err("it does nothing".to_owned())
        }
    }

    /// A peer that keeps the questions. It says who leads, if it knows, and answers heartbeats: as one that leads no more from the first
    /// on, that one.
    #[derive(Debug, Clone, Default)]
    struct Asked {
        id: u64,
        /// Who has led before that.
        before: Option<v1::Member>,
        is_over: Arc<AtomicBool>,
        leader: Option<v1::Member>,
        /// It never answers who leads.
        silent: bool,
        members: Arc<Mutex<Vec<v1::Member>>>,
        questions: Arc<Mutex<Vec<v1::LeaderRequest>>>,
    }

    #[tonic::async_trait]
    impl Nodes for Asked {
        type HeartbeatStream = ReceiverStream<Result<v1::LeaderMessage, Status>>;

        async fn heartbeat(
            &self,
            request: Request<Streaming<v1::NodeMessage>>,
        ) -> Result<Response<Self::HeartbeatStream>, Status> {
            let (sender, answers) = mpsc::channel(1);
            let (mut messages, epoch) = (request.into_inner(), self.id);
            let leads = self.leader.as_ref().is_some_and(|leader| leader.id == self.id);
            if self.is_over.swap(true, Ordering::SeqCst) && !leads {
                return Err(Status::unavailable("it leads no more"));
            }
            tokio::spawn(async move {
                while let Ok(Some(message)) = messages.message().await {
                    let Some(v1::node_message::Message::Heartbeat(beat)) = message.message else { continue };
                    let tenure = v1::NodeTenure {
                        epoch,
                        lease: 1,
                        lease_ms: 10_000,
                        interval_ms: 3_000,
                        ..v1::NodeTenure::default()
                    };
                    let outcome = Some(v1::heartbeat_answer::Outcome::Tenure(tenure));
                    let answer = v1::HeartbeatAnswer { sequence: beat.sequence, outcome };
                    let message = Some(v1::leader_message::Message::Answer(answer));
                    if sender.send(Ok(v1::LeaderMessage { message })).await.is_err() || !leads {
                        return;
                    }
                }
            });
            Ok(Response::new(ReceiverStream::new(answers)))
        }

        async fn list(&self, _: Request<v1::ListNodesRequest>) -> Result<Response<v1::ListNodesResponse>, Status> {
            unreachable!()
        }

        async fn instruct(&self, _: Request<v1::InstructRequest>) -> Result<Response<v1::InstructResponse>, Status> {
            unreachable!()
        }
    }

    #[tonic::async_trait]
    impl Cluster for Asked {
        async fn leader(&self, request: Request<v1::LeaderRequest>) -> Result<Response<v1::LeaderResponse>, Status> {
            self.questions.lock().unwrap().push(request.into_inner());
            if self.silent {
                std::future::pending::<()>().await;
            }
            let (term, leader) = match self.is_over.load(Ordering::SeqCst) {
                true => (6, self.leader.clone()),
                false => (5, self.before.clone()),
            };
            let (peer_id, members) = (self.id, self.members.lock().unwrap().clone());
            Ok(Response::new(v1::LeaderResponse { peer_id, term, leader, members, ..v1::LeaderResponse::default() }))
        }

        async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
            unreachable!()
        }

        async fn init(&self, _: Request<v1::InitRequest>) -> Result<Response<v1::InitResponse>, Status> {
            unreachable!()
        }

        async fn join(&self, _: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
            unreachable!()
        }

        async fn promote(&self, _: Request<v1::PromoteRequest>) -> Result<Response<v1::PromoteResponse>, Status> {
            unreachable!()
        }

        async fn remove(&self, _: Request<v1::RemoveRequest>) -> Result<Response<v1::RemoveResponse>, Status> {
            unreachable!()
        }

        async fn replace(&self, _: Request<v1::ReplaceRequest>) -> Result<Response<v1::ReplaceResponse>, Status> {
            unreachable!()
        }

        async fn transfer_leadership(
            &self,
            _: Request<v1::TransferLeadershipRequest>,
        ) -> Result<Response<v1::TransferLeadershipResponse>, Status> {
            unreachable!()
        }
    }

    #[tonic::async_trait]
    impl Watch for Asked {
        type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;

        /// Nothing changes, which is told all the time.
        async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            let (sender, messages) = mpsc::channel(1);
            let members = self.members.clone();
            tokio::spawn(async move {
                loop {
                    let membership = members.lock().unwrap().len() as u64;
                    let header = Some(v1::ResponseHeader { membership, ..v1::ResponseHeader::default() });
                    let message = v1::WatchResponse { header, progress_revision: 5, ..v1::WatchResponse::default() };
                    if sender.send(Ok(message)).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            Ok(Response::new(ReceiverStream::new(messages)))
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_only_watches_learns_of_new_members() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap().into_std().unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let member = |id: u64, address: &str| v1::Member { id, grpc_address: address.to_owned(), ..Default::default() };
        let peer = Asked { id: 1, before: Some(member(1, &address)), ..Asked::default() };
        // It ends with all of its connections.
        let cluster = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let served = peer.clone();
        cluster.spawn(async move {
            let incoming = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
            let (leads, watches) = (ClusterServer::new(served.clone()), WatchServer::new(served));
            tonic::transport::Server::builder()
                .add_service(leads)
                .add_service(watches)
                .serve_with_incoming(incoming)
                .await
        });
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![address.clone()], secret: None }).unwrap();
        let mut watch = store.watch("/kv/", 6).unwrap();
        watch.next().await.unwrap().unwrap();
        // No call is made that would ask, and they would be asked for much later.
        store.inner.lock().members_due = Some(clock::now() + Duration::from_secs(3600));
        *peer.members.lock().unwrap() = vec![member(1, &address), member(2, "127.0.0.1:1")];
        let patience = clock::now() + Duration::from_secs(30);
        while store.inner.endpoints().len() < 2 {
            assert!(clock::now() < patience, "the watch does not ask");
            watch.next().await.unwrap().unwrap();
        }
        // The peer goes away: the members are asked for long before they would be.
        let far = clock::now() + Duration::from_secs(3600);
        store.inner.lock().members_due = Some(far);
        cluster.shutdown_background();
        while store.inner.lock().members_due == Some(far) {
            assert!(clock::now() < patience, "what a lost peer may mean is not looked at");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_only_watches_finds_another_leader_once_the_one_it_knew_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let member = |id: u64, address: &str| v1::Member { id, grpc_address: address.to_owned(), ..Default::default() };
        let peer = Asked { id: 2, before: Some(member(2, &address)), ..Asked::default() };
        *peer.members.lock().unwrap() = vec![member(2, &address), member(3, "127.0.0.1:3")];
        let server = tonic::transport::Server::builder()
            .add_service(ClusterServer::new(peer.clone()))
            .add_service(WatchServer::new(peer.clone()));
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![address.clone()], secret: None }).unwrap();
        {
            // Nobody is there, and has been told of as the leader of the term before.
            let mut shared = store.inner.lock();
            shared.view.learn(4, Some(&member(1, "127.0.0.1:1")));
            store.inner.learn_members(&mut shared, vec![member(1, "127.0.0.1:1")]);
            shared.members_due = None;
        }
        // No call is made that would find out.
        let mut watch = store.watch("/kv/", 6).unwrap();
        let patience = clock::now() + Duration::from_secs(30);
        while store.inner.endpoints() != [address.clone(), "127.0.0.1:3".to_owned()] {
            assert!(clock::now() < patience, "the watch asks nobody else: {:?}", store.inner.endpoints());
            watch.next().await.unwrap().unwrap();
        }
        assert_eq!(store.inner.lock().view.leader().map(|leader| leader.id), Some(2));
        server.abort();
    }

    /// A node whose stream the first of three peers ends, since the second leads now. Says what the first was asked, and what
    /// the others were. With `finds_it` it had to ask who leads before that stream, too.
    async fn loses_its_leader(
        the_first_knows: bool,
        finds_it: bool,
    ) -> (Vec<v1::LeaderRequest>, Vec<v1::LeaderRequest>) {
        let mut listeners = Vec::new();
        for _ in 0..3 {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let endpoints: Vec<String> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
        let member =
            |id: u64, address: &str| v1::Member { id, grpc_address: address.to_owned(), ..v1::Member::default() };
        let leader = member(2, &endpoints[1]);
        let (mut peers, mut servers, is_over) = (Vec::new(), Vec::new(), Arc::new(AtomicBool::new(false)));
        for (id, listener) in (1..).zip(listeners) {
            let leader = Some(leader.clone()).filter(|_| id != 1 || the_first_knows);
            let (before, is_over) = (Some(member(1, &endpoints[0])), is_over.clone());
            let peer = Asked { id, before, is_over, leader, ..Asked::default() };
            let server = tonic::transport::Server::builder()
                .add_service(ClusterServer::new(peer.clone()))
                .add_service(NodesServer::new(peer.clone()));
            servers.push(tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener))));
            peers.push(peer);
        }
        let store = RemoteStore::connect(RemoteConfig { endpoints: endpoints.clone(), secret: None }).unwrap();
        {
            let mut shared = store.inner.lock();
            if !finds_it {
                shared.view.learn(5, Some(&member(1, &endpoints[0])));
            }
            // So that they are not asked for meanwhile.
            store.inner.learn_members(&mut shared, vec![]);
        }
        let keeper = NodeKeeper::start(store, "n", Arc::new(Idle));
        let patience = clock::now() + Duration::from_secs(30);
        while keeper.tenure().is_none_or(|tenure| tenure.epoch != leader.id) {
            assert!(clock::now() < patience, "it does not come to its leader: {:?}", keeper.last_failure());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        servers.iter().for_each(tokio::task::JoinHandle::abort);
        let mut asked = peers.iter().map(|peer| peer.questions.lock().unwrap().clone());
        (asked.next().unwrap(), asked.flatten().collect())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_node_that_loses_its_leader_asks_one_peer_at_a_time() {
        let (knows, knows_nothing, finds_it) =
            tokio::join!(loses_its_leader(true, false), loses_its_leader(false, false), loses_its_leader(false, true));
        let at_once = v1::LeaderRequest::default();
        let waits = v1::LeaderRequest { wait_ms: 1000, besides_id: 1, besides_term: 5 };
        // Where nothing runs in time, another one is asked as well.
        assert!(knows.0 == [at_once] && knows.1.len() <= 1, "{knows:?}");
        assert_eq!(knows_nothing, (vec![at_once], vec![waits]));
        // It is not taken for one that was named since that stream: then all of them are asked at once.
        let for_another = |mut asked: Vec<v1::LeaderRequest>| {
            asked.retain(|question| question.besides_id != 0);
            asked
        };
        assert_eq!((for_another(finds_it.0), for_another(finds_it.1)), (vec![], vec![waits]));
    }

    #[tokio::test]
    async fn a_node_that_is_told_to_leave_does_not_wait_for_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let peer = Asked { id: 1, silent: true, ..Asked::default() };
        let server = tonic::transport::Server::builder().add_service(ClusterServer::new(peer.clone()));
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![address], secret: None }).unwrap();
        let told = CancellationToken::new();
        // Nobody is there.
        let asking = store.inner.ask_in_turn("127.0.0.1:1", &told);
        let patience = clock::now() + Duration::from_secs(30);
        let is_told = async {
            while peer.questions.lock().unwrap().is_empty() {
                assert!(clock::now() < patience, "nobody is asked");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // From here on time passes only where somebody waits for it.
            tokio::time::pause();
            told.cancel();
            tokio::time::Instant::now()
        };
        let ((), told_at) = tokio::join!(asking, is_told);
        assert_eq!(told_at.elapsed(), Duration::ZERO, "it waited for the answer, or until that was late");
        server.abort();
    }
}
