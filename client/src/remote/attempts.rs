//! One operation on whoever leads: attempt after attempt, until it is answered, refused, or its time is over.
//!
//! What a failed attempt means is decided here and nowhere else ([`classify`]): whether it may have been applied, whether
//! another one can help, and where to go then. An operation that may have been applied is sent again only if its rules
//! ([`Rules`]) say what makes that harmless.
//!
//! Limits: the caller's deadline; one attempt at a time, of [`ATTEMPT_TIMEOUT`] unless its rules give it all the time.

#[cfg(test)]
mod tests;

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
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);

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
    /// A change of the membership, or of who has shards: it takes its time, and may be asked for again.
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
            let asked = tokio::time::timeout_at(attempts.deadline.into(), self.inner.ask_unless_known()).await;
            if self.inner.lock().view.leader().is_some() {
                continue;
            }
            match asked {
                Ok(Some(why)) => attempts.last = why,
                // No time for an answer: what came of the question before says more.
                Err(_) if attempts.count == 0 => {
                    if let Some(why) = self.inner.why_in_vain() {
                        attempts.last = format!("no leader was found in time; when the peers were last asked: {why}");
                    }
                }
                Ok(None) | Err(_) => {}
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
