//! One operation on whoever leads: attempt after attempt, until it is answered, refused, or its time is over.
//!
//! What a failed attempt means is decided here and nowhere else ([`classify`]): whether it may have been applied, whether
//! another one can help, and where to go then. An operation that may have been applied is sent again only if its rules
//! ([`Rules`]) say what makes that harmless.
//!
//! Limits: the caller's deadline; one attempt at a time, of [`ATTEMPT_TIMEOUT`] unless its rules give it all the time.

use std::future::Future;
use std::time::{Duration, Instant};

use lake_proto::status;
use lake_proto::v1::error_detail::{Applied as WireApplied, Kind};
use tonic::{Code, Status};

use super::RemoteStore;
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Applied, Error, InVain};

/// Hints followed at once, one after the other. While the leadership moves, two peers may name each other.
const MAX_REDIRECTS: u32 = 3;
/// How long one attempt may take before another peer is tried.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);

/// What may be done with an operation that may have been applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resend {
    /// It is sent again, and an answer that was lost leaves no doubt: it changes nothing, or nothing that its caller asks
    /// about.
    Freely,
    /// It is not sent again.
    Never,
    /// It is sent again: the second time it does nothing, or nothing that matters.
    Harmless,
    /// It is sent again: it carries a stamp, so that the answer is that of the first time (semantics, section 4).
    ExactlyOnce,
}

/// How often an operation may be attempted, and for how long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub resend: Resend,
    /// The longest that one attempt may take; `None`: until the deadline.
    pub attempt: Option<Duration>,
    /// While another change of the membership is under way, it waits instead of failing.
    pub waits_its_turn: bool,
}

impl Rules {
    /// It reads.
    pub const READ: Self = Self { resend: Resend::Freely, ..Self::RESENDABLE };
    /// Sending it twice is harmless.
    pub const RESENDABLE: Self =
        Self { resend: Resend::Harmless, attempt: Some(ATTEMPT_TIMEOUT), waits_its_turn: false };
    /// It is not sent again once it may have been applied.
    pub const ONCE: Self = Self { resend: Resend::Never, ..Self::RESENDABLE };
    /// It carries a stamp.
    pub const STAMPED: Self = Self { resend: Resend::ExactlyOnce, ..Self::RESENDABLE };
    /// A change of the membership: it takes its time, and may be asked for again.
    pub const CHANGE: Self = Self { attempt: None, ..Self::RESENDABLE };
    /// One that waits for those before it.
    pub const QUEUED_CHANGE: Self = Self { waits_its_turn: true, ..Self::CHANGE };
}

/// What became of one attempt that brought no answer.
pub(super) struct Failure {
    pub applied: Applied,
    /// Whether another attempt can help.
    pub retry: bool,
    /// The peer said who leads.
    pub redirected: bool,
    /// The connection is of no use any more.
    pub broken: bool,
    pub status: Status,
}

impl Failure {
    /// One that no other attempt can mend, and that changed nothing.
    pub fn fatal(status: Status) -> Self {
        Self { applied: Applied::No, retry: false, redirected: false, broken: false, status }
    }

    /// No answer came within `timeout`. A caller in a hurry says nothing of the connection, which others share: only
    /// a peer that was silent for the whole time of an attempt is connected to anew.
    pub fn silent(timeout: Duration) -> Self {
        let status = Status::deadline_exceeded(format!("no answer within {:.1} s", timeout.as_secs_f64()));
        Self { broken: timeout >= ATTEMPT_TIMEOUT, ..classify(status) }
    }

    /// What the peer says is wrong; `None` if it is not a lake peer's own word.
    pub fn kind(&self) -> Option<Kind> {
        status::detail(&self.status).map(|detail| detail.kind())
    }

    /// Whether it tells what the first sending of a stamped request came to: refusals of the state machine are kept, as
    /// results are.
    fn is_first_result(&self) -> bool {
        status::detail(&self.status).is_some_and(|detail| detail.kept)
    }
}

/// A peer that is asked whether it leads or not.
#[derive(Debug, Clone)]
pub(super) struct At {
    pub endpoint: std::sync::Arc<str>,
    /// An attempt that failed is not repeated.
    pub once: bool,
}

/// The attempts of one operation: how many, since when, until when.
pub(super) struct Attempts {
    pub doing: String,
    pub started: Instant,
    pub deadline: Instant,
    pub count: u32,
    /// What the last one failed with.
    pub last: String,
    backoff: Backoff,
}

impl Attempts {
    pub fn new(doing: &str, deadline: Instant) -> Self {
        Self {
            doing: doing.to_owned(),
            started: clock::now(),
            deadline,
            count: 0,
            last: "the deadline was over before the first attempt ended".to_owned(),
            backoff: Backoff::default(),
        }
    }

    pub fn remaining(&self) -> Option<Duration> {
        self.deadline.checked_duration_since(clock::now()).filter(|d| !d.is_zero())
    }

    /// Backs off. False: the deadline comes first.
    pub async fn wait(&mut self) -> bool {
        self.backoff.wait(self.deadline).await
    }
}

impl RemoteStore {
    /// One operation. The answer comes with whether an earlier attempt may have been applied.
    pub(super) async fn on_leader<T, F>(
        &self,
        doing: &str,
        deadline: Instant,
        rules: Rules,
        send: impl Fn(String, Duration) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        self.on_peer(None, &mut Attempts::new(doing, deadline), rules, send).await
    }

    /// The same on the peer at an endpoint and no other; `None`: on whoever leads. The only place where an operation is
    /// attempted again. `attempts` may have been made before, of a request that certainly was not applied.
    pub(super) async fn on_peer<T, F>(
        &self,
        at: Option<&At>,
        attempts: &mut Attempts,
        rules: Rules,
        send: impl Fn(String, Duration) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut in_doubt = false;
        let mut redirects = 0;
        loop {
            let address = match at {
                Some(at) => Some(at.endpoint.to_string()),
                None => self.leader_address(attempts).await,
            };
            let Some(address) = address else {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            };
            attempts.count += 1;
            let Some(remaining) = attempts.remaining() else {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            };
            let began = clock::now();
            let timeout = rules.attempt.map_or(remaining, |longest| remaining.min(longest));
            let failure = match tokio::time::timeout(timeout, send(address.clone(), timeout)).await {
                Ok(Ok(answer)) => return Ok((answer, in_doubt)),
                Ok(Err(status)) => classify(status),
                Err(_) => Failure::silent(timeout),
            };
            attempts.last = format!("{address}: {}", describe(&failure.status));
            tracing::debug!(
                doing = attempts.doing,
                attempt = attempts.count,
                error = attempts.last,
                "an attempt failed"
            );
            in_doubt |= failure.applied == Applied::Unknown && rules.resend != Resend::Freely;
            if rules.resend == Resend::ExactlyOnce && failure.is_first_result() {
                in_doubt = false;
            }
            let queued = rules.waits_its_turn && failure.kind() == Some(Kind::ChangeUnderWay);
            if !failure.retry && !queued {
                return Err(self.ended(attempts, &failure, in_doubt));
            }
            match at {
                // Also before giving up: the next call must not go to the same silent peer.
                None if !queued => self.inner.after_failure(&address, began, &failure),
                None => {}
                // That it cannot answer says nothing of who leads.
                Some(_) if failure.broken => self.inner.lock().forget_connection(&address),
                Some(_) => {}
            }
            if in_doubt && rules.resend == Resend::Never || at.is_some_and(|at| at.once) {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            }
            if failure.redirected && at.is_none() && redirects < MAX_REDIRECTS {
                redirects += 1;
                continue;
            }
            redirects = 0;
            if !attempts.wait().await {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            }
        }
    }

    /// The same for a read, on the peer that reads go to.
    pub(super) async fn read<T, F>(
        &self,
        doing: String,
        deadline: Instant,
        send: impl Fn(String, Duration) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let at = self.reads_at.as_ref();
        match self.on_peer(at, &mut Attempts::new(&doing, deadline), Rules::READ, send).await {
            Ok((answer, _)) => Ok(answer),
            Err(mut error) => {
                if let (Some(at), Error::Unavailable { endpoints, .. }) = (at, &mut error) {
                    *endpoints = vec![at.endpoint.to_string()];
                }
                Err(error)
            }
        }
    }

    /// Where to send the next attempt: to the leader known, or found by asking. `None` when the time is up.
    pub(super) async fn leader_address(&self, attempts: &mut Attempts) -> Option<String> {
        loop {
            attempts.remaining()?;
            if let Some(address) = self.inner.leader() {
                return Some(address);
            }
            let asked = tokio::time::timeout_at(attempts.deadline.into(), self.inner.ask()).await;
            if self.inner.lock().view.leader().is_some() {
                continue;
            }
            if let Ok(Some(why)) = asked {
                attempts.last = why;
            }
            attempts.count += 1;
            if !attempts.wait().await {
                return None;
            }
        }
    }

    pub(super) fn unavailable(&self, attempts: &Attempts, applied: Applied) -> Error {
        self.in_vain(attempts).unavailable(self.endpoints(), applied)
    }

    pub(super) fn in_vain(&self, attempts: &Attempts) -> InVain {
        InVain {
            doing: attempts.doing.clone(),
            attempts: attempts.count,
            elapsed: clock::since(attempts.started),
            leader: self.inner.lock().view.leading(),
            last: attempts.last.clone(),
        }
    }

    /// The error of an operation whose last attempt no other attempt can mend.
    fn ended(&self, attempts: &Attempts, failure: &Failure, in_doubt: bool) -> Error {
        let in_vain = InVain { last: describe(&failure.status), ..self.in_vain(attempts) };
        match in_doubt && !matches!(failure.kind(), Some(Kind::Internal) | None) {
            true => in_vain.in_doubt(),
            false => ended(in_vain, failure, in_doubt),
        }
    }
}

fn applied(in_doubt: bool) -> Applied {
    if in_doubt { Applied::Unknown } else { Applied::No }
}

/// A request that had not left when the time that its answer may take, which is this, was nearly over, and never will.
#[derive(Debug, thiserror::Error)]
#[error("it could not be sent within {:.1} s", .0.as_secs_f64())]
pub(super) struct NotSent(pub Duration);

impl From<NotSent> for Status {
    fn from(not_sent: NotSent) -> Self {
        let mut status = Status::deadline_exceeded(not_sent.to_string());
        status.set_source(std::sync::Arc::new(not_sent));
        status
    }
}

/// What a failed attempt means.
pub(super) fn classify(status: Status) -> Failure {
    let Some(detail) = status::detail(&status) else {
        // Not a lake peer's own words: the transport's, or a proxy's.
        let refused = matches!(status.code(), Code::Unimplemented | Code::InvalidArgument | Code::Unauthenticated);
        let (never_sent, late) = transport_error(&status);
        let applied = if refused || never_sent { Applied::No } else { Applied::Unknown };
        return Failure { applied, retry: !refused, redirected: false, broken: !late, status };
    };
    let applied = match detail.applied() {
        WireApplied::NotApplied => Applied::No,
        WireApplied::Unknown => Applied::Unknown,
    };
    let kind = detail.kind();
    let retry = matches!(kind, Kind::NotLeader | Kind::Unavailable | Kind::Overloaded);
    let redirected = kind == Kind::NotLeader && detail.leader.is_some_and(|l| !l.grpc_address.is_empty());
    Failure { applied, retry, redirected, broken: false, status }
}

/// Whether the request never left, because no connection could be made or took it on, and whether its caller was in too much of
/// a hurry for that, or for an answer, to say something of the connection.
pub(crate) fn transport_error(status: &Status) -> (bool, bool) {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if let Some(late) = error.downcast_ref::<NotSent>() {
            return (true, late.0 < ATTEMPT_TIMEOUT);
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return (matches!(io.kind(), std::io::ErrorKind::ConnectionRefused), false);
        }
        if error.is::<tonic::ConnectError>() {
            return (true, false);
        }
        if error.is::<tonic::TimeoutExpired>() {
            return (false, true);
        }
        source = error.source();
    }
    (false, false)
}

/// The innermost reason of a status, which says more than tonic's "transport error".
pub(crate) fn describe(status: &Status) -> String {
    let mut reason = match status.message() {
        "" if status.code() == Code::Unimplemented => "something else than a metadata peer answers there".to_owned(),
        "" => status.code().description().to_owned(),
        message => message.to_owned(),
    };
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        reason = error.to_string();
        source = error.source();
    }
    reason
}

/// The error of an attempt that no other attempt can mend, which was the last of these.
pub(super) fn ended(in_vain: InVain, failure: &Failure, in_doubt: bool) -> Error {
    let message = in_vain.told();
    let doing = in_vain.doing;
    match failure.kind() {
        Some(Kind::SnapshotExpired) => Error::SnapshotExpired { doing, message },
        Some(Kind::Compacted) => {
            let oldest = status::detail(&failure.status).map_or(0, |detail| detail.oldest_revision);
            Error::Compacted { doing, oldest, message }
        }
        Some(Kind::SessionExpired) => Error::SessionExpired { doing, message },
        Some(Kind::Internal) | None => Error::Internal { doing, message, applied: applied(in_doubt) },
        Some(_) => Error::Refused { doing, message },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use lake_proto::v1;

    use super::*;
    use crate::remote::RemoteConfig;
    use crate::store::Leader;

    #[test]
    fn what_another_attempt_can_mend_is_tried_again_and_nothing_else() {
        let failed = |kind, applied| classify(status::status(kind, applied, "why"));
        for kind in [Kind::NotLeader, Kind::Unavailable, Kind::Overloaded] {
            assert!(failed(kind, WireApplied::NotApplied).retry, "{kind:?}");
        }
        for kind in [
            Kind::InvalidArgument,
            Kind::LimitReached,
            Kind::QuotaExceeded,
            Kind::SessionExpired,
            Kind::SnapshotExpired,
            Kind::Compacted,
        ] {
            let failure = failed(kind, WireApplied::NotApplied);
            assert!(!failure.retry && failure.applied == Applied::No, "{kind:?}");
            let error = ended(vain(&failure), &failure, false);
            let typed = match kind {
                Kind::SessionExpired => matches!(error, Error::SessionExpired { .. }),
                Kind::SnapshotExpired => matches!(error, Error::SnapshotExpired { .. }),
                Kind::Compacted => matches!(error, Error::Compacted { .. }),
                _ => matches!(error, Error::Refused { .. }),
            };
            assert!(typed && error.applied() == Applied::No, "{error}");
            let told = error.to_string();
            assert!(told.contains("why (3 attempts in 1.2 s, no leader known in term 6)"), "{told}");
        }
        assert_eq!(failed(Kind::Unavailable, WireApplied::Unknown).applied, Applied::Unknown);
        let proxy = classify(Status::unavailable("a proxy said so"));
        assert!(proxy.retry && proxy.broken && proxy.applied == Applied::Unknown);
        let elsewhere = classify(Status::unimplemented(""));
        assert!(!elsewhere.retry && elsewhere.applied == Applied::No, "nothing there ran it");
        let error = ended(vain(&elsewhere), &elsewhere, false).to_string();
        assert!(error.contains("something else than a metadata peer"), "{error}");
        assert!(error.contains("3 attempts in 1.2 s, no leader known in term 6"), "{error}");
    }

    /// Three attempts, of which the last one ended so.
    fn vain(failure: &Failure) -> InVain {
        InVain {
            doing: "a test".to_owned(),
            attempts: 3,
            elapsed: Duration::from_millis(1200),
            leader: Leader::Unknown { term: 6 },
            last: describe(&failure.status),
        }
    }

    #[test]
    fn a_caller_in_a_hurry_does_not_take_the_connection_from_the_others() {
        let hurried = Failure::silent(Duration::from_millis(50));
        assert!(!hurried.broken && hurried.retry && hurried.applied == Applied::Unknown);
        assert!(Failure::silent(ATTEMPT_TIMEOUT).broken);
        for (within, broken) in [(Duration::from_millis(50), false), (ATTEMPT_TIMEOUT, true)] {
            let unsent = classify(NotSent(within).into());
            assert!(unsent.retry && unsent.applied == Applied::No && unsent.broken == broken, "{within:?}");
        }
    }

    #[tokio::test]
    async fn peers_that_name_each_other_are_not_asked_without_end() {
        let endpoints = vec!["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
        let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
        let member = |id: u64| v1::Member { id, grpc_address: format!("127.0.0.1:{id}"), ..v1::Member::default() };
        store.inner.lock().view.learn(5, Some(&member(1)));
        let asked = AtomicU32::new(0);
        let send = async |address: String, _| {
            asked.fetch_add(1, Ordering::SeqCst);
            let other = if address.ends_with(":1") { 2 } else { 1 };
            let hint = v1::ErrorDetail {
                kind: Kind::NotLeader as i32,
                term: 5,
                leader: Some(member(other)),
                ..Default::default()
            };
            Err::<(), _>(status::with_detail(hint, "another peer leads"))
        };
        let deadline = clock::now() + Duration::from_millis(300);
        let error = store.on_leader("a test", deadline, Rules::RESENDABLE, send).await.unwrap_err();
        assert!(error.is_unavailable() && error.applied() == Applied::No, "{error}");
        // Ten pauses or so fit into that time.
        assert!(asked.load(Ordering::SeqCst) < 100, "{asked:?}");
    }

    #[tokio::test]
    async fn a_leader_that_has_too_much_to_do_is_not_asked_about() {
        let endpoints = vec!["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
        let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
        let member = v1::Member { id: 1, grpc_address: "127.0.0.1:1".to_owned(), ..v1::Member::default() };
        store.inner.lock().view.learn(5, Some(&member));
        let asked = AtomicU32::new(0);
        let send = async |address: String, _| {
            assert!(address.ends_with(":1"), "{address}");
            match asked.fetch_add(1, Ordering::SeqCst) {
                0..3 => Err(status::status(Kind::Overloaded, WireApplied::NotApplied, "too much")),
                _ => Ok(()),
            }
        };
        let deadline = clock::now() + Duration::from_secs(30);
        let (_, in_doubt) = store.on_leader("a test", deadline, Rules::STAMPED, send).await.unwrap();
        assert!(!in_doubt && asked.load(Ordering::SeqCst) == 4);
        let view = &store.inner.lock().view;
        assert_eq!(view.leader().map(|leader| leader.id), Some(1));
        assert_eq!(view.question(clock::now()).wait, Duration::ZERO);
    }

    /// What comes of an operation whose attempts fail so, one after the other. What a quota refuses, the state machine keeps.
    async fn after(rules: Rules, failures: &[(Kind, WireApplied)]) -> Error {
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None });
        let store = store.unwrap();
        let member = v1::Member { id: 1, grpc_address: "127.0.0.1:1".to_owned(), ..v1::Member::default() };
        let asked = AtomicU32::new(0);
        let send = async |_, _| {
            let n = asked.fetch_add(1, Ordering::SeqCst) as usize;
            let (kind, applied) = failures[n];
            // What failed is asked again all the same.
            store.inner.lock().view.learn(5 + n as u64, Some(&member));
            let detail = v1::ErrorDetail {
                kind: kind as i32,
                applied: applied as i32,
                kept: kind == Kind::QuotaExceeded,
                term: 6 + n as u64,
                leader: Some(v1::Member { grpc_address: "127.0.0.1:2".to_owned(), ..member.clone() }),
                ..Default::default()
            };
            Err::<(), _>(status::with_detail(detail, "why"))
        };
        store.inner.lock().view.learn(4, Some(&member));
        store.on_leader("a test", clock::now() + Duration::from_secs(60), rules, send).await.unwrap_err()
    }

    #[tokio::test]
    async fn a_refusal_after_a_lost_answer_leaves_the_doubt() {
        use WireApplied::{NotApplied, Unknown};
        for kind in [Kind::SessionExpired, Kind::InvalidArgument, Kind::WrongIdentity, Kind::LimitReached] {
            let error = after(Rules::STAMPED, &[(Kind::Unavailable, Unknown), (kind, NotApplied)]).await;
            assert!(matches!(error, Error::InDoubt { attempts: 2, .. }), "{kind:?}: {error:?}");
            assert_eq!(error.applied(), Applied::Unknown);
        }
        let once = after(Rules::ONCE, &[(Kind::Unavailable, Unknown)]).await;
        assert!(once.is_unavailable() && once.applied() == Applied::Unknown, "{once:?}");
    }

    #[tokio::test]
    async fn a_read_whose_answer_was_lost_leaves_no_doubt() {
        use WireApplied::{NotApplied, Unknown};
        // A page's snapshot is held by the peer that gave the page before, which died.
        let expired = after(Rules::READ, &[(Kind::Unavailable, Unknown), (Kind::SnapshotExpired, NotApplied)]).await;
        assert!(matches!(expired, Error::SnapshotExpired { .. }), "{expired:?}");
        let refused = after(Rules::READ, &[(Kind::Unavailable, Unknown), (Kind::InvalidArgument, NotApplied)]).await;
        assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    }

    #[tokio::test]
    async fn a_refusal_that_is_the_first_result_of_a_stamped_request_leaves_none() {
        let failures = [(Kind::Unavailable, WireApplied::Unknown), (Kind::QuotaExceeded, WireApplied::NotApplied)];
        let stamped = after(Rules::STAMPED, &failures).await;
        assert!(matches!(stamped, Error::Refused { .. }), "{stamped:?}");
        let unstamped = after(Rules::RESENDABLE, &failures).await;
        assert_eq!(unstamped.applied(), Applied::Unknown, "{unstamped:?}");
    }
}
