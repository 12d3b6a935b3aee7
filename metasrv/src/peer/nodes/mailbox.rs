//! Instructions to nodes, and their answers, as a value that streams and those who wait share.
//!
//! ```text
//!   sent -> on the stream -> answered          (the waiter is told what)
//!      |          |--------> not in time       (the waiter goes; an answer that comes later is dropped)
//!      `----------+--------> the stream closed (the waiter is told at once)
//! ```
//!
//! A node's box is the one of the stream on which its process was admitted last. Instructions of one box keep their order; a
//! one-way message is an instruction that nobody waits for. An answer counts only on the stream on which its instruction
//! went out. Whether an instruction whose waiter was told that the node is gone was carried out is not known: what it asks
//! for must bear to be asked for again.
//!
//! Limits: [`MAX_UNSENT`] instructions of one box that are not on the stream yet, [`MAX_WAITED_FOR`] that an answer is waited for.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_client::clock;
use lake_proto::v1;
use lake_proto::v1::instruction_answer::Outcome;
use tokio::sync::{mpsc, oneshot};

use crate::log::lock;

/// Instructions of one box that are not on the stream yet.
pub const MAX_UNSENT: usize = 64;
/// Instructions of one box that an answer is waited for.
pub const MAX_WAITED_FOR: usize = 256;
/// Largest payload of an instruction, and of its answer, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// Why an instruction was not carried out, as far as the leader knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotDone {
    #[error("node {node} has no stream to this leader")]
    NotConnected { node: String },
    #[error("node {node} has {MAX_UNSENT} instructions unsent or {MAX_WAITED_FOR} unanswered, which is the most")]
    Full { node: String },
    #[error("node {node} went before it answered; whether it was done is unknown")]
    Gone { node: String },
    #[error("node {node} did not answer within {} ms; whether it was done is unknown", .within.as_millis())]
    Late { node: String, within: Duration },
    #[error("node {node}: {why}")]
    Refused { node: String, why: String },
}

#[derive(Debug)]
struct Letterbox {
    stream: u64,
    outgoing: mpsc::Sender<v1::Instruction>,
    waited_for: HashMap<u64, oneshot::Sender<Outcome>>,
}

#[derive(Debug, Default)]
struct Inner {
    last_id: u64,
    boxes: HashMap<String, Letterbox>,
}

/// The boxes of all nodes.
#[derive(Debug, Default)]
pub struct Mailbox {
    inner: Mutex<Inner>,
}

/// Forgets that somebody waits.
struct Wait<'a> {
    mailbox: &'a Mailbox,
    node: &'a str,
    id: u64,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if let Some(letterbox) = lock(&self.mailbox.inner).boxes.get_mut(self.node) {
            letterbox.waited_for.remove(&self.id);
        }
    }
}

impl Mailbox {
    /// A process was admitted on a stream: what is sent to the node goes there from now on. Nothing changes if it does already.
    pub fn open(&self, node: &str, stream: u64, outgoing: &mpsc::Sender<v1::Instruction>) {
        let mut inner = lock(&self.inner);
        if inner.boxes.get(node).is_some_and(|letterbox| letterbox.stream == stream) {
            return;
        }
        let letterbox = Letterbox { stream, outgoing: outgoing.clone(), waited_for: HashMap::new() };
        // Those who wait for the process before see its box go.
        inner.boxes.insert(node.to_owned(), letterbox);
    }

    /// A stream has closed: whoever waits for an answer on it is told.
    pub fn close(&self, node: &str, stream: u64) {
        let mut inner = lock(&self.inner);
        if inner.boxes.get(node).is_some_and(|letterbox| letterbox.stream == stream) {
            inner.boxes.remove(node);
        }
    }

    /// An answer came on a stream. False: nobody waits for it there.
    pub fn answered(&self, node: &str, stream: u64, answer: v1::InstructionAnswer) -> bool {
        let mut inner = lock(&self.inner);
        let letterbox = inner.boxes.get_mut(node).filter(|letterbox| letterbox.stream == stream);
        let waiter = letterbox.and_then(|letterbox| letterbox.waited_for.remove(&answer.id));
        let outcome = answer.outcome.unwrap_or_else(|| Outcome::Failed("it answered with nothing".to_owned()));
        waiter.is_some_and(|waiter| waiter.send(outcome).is_ok())
    }

    /// Sends an instruction that nobody waits for.
    ///
    /// # Errors
    /// NotConnected, Full: it was not sent.
    pub fn tell(&self, node: &str, kind: &str, payload: Bytes) -> Result<(), NotDone> {
        let mut inner = lock(&self.inner);
        let instruction = v1::Instruction { id: 0, kind: kind.to_owned(), payload, within_ms: 0 };
        inner.of(node)?.send(node, instruction)
    }

    /// Sends an instruction to every node that has a stream. Says how many it is on the way to.
    pub fn tell_all(&self, kind: &str, payload: &Bytes) -> usize {
        let inner = lock(&self.inner);
        let sent = inner.boxes.iter().filter(|(node, letterbox)| {
            let instruction = v1::Instruction { id: 0, kind: kind.to_owned(), payload: payload.clone(), within_ms: 0 };
            letterbox.send(node, instruction).is_ok()
        });
        sent.count()
    }

    /// Sends an instruction, and waits for the answer until `deadline`.
    ///
    /// # Errors
    /// NotConnected, Full: it was not sent. Gone, Late: unknown. Refused: the node's own words.
    pub async fn ask(&self, node: &str, kind: &str, payload: Bytes, deadline: Instant) -> Result<Bytes, NotDone> {
        let within = deadline.saturating_duration_since(clock::now());
        let (answer, answered) = oneshot::channel();
        let id = {
            let mut inner = lock(&self.inner);
            let id = inner.last_id + 1;
            let letterbox = inner.of(node)?;
            if letterbox.waited_for.len() >= MAX_WAITED_FOR {
                return Err(NotDone::Full { node: node.to_owned() });
            }
            let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
            letterbox.send(node, v1::Instruction { id, kind: kind.to_owned(), payload, within_ms })?;
            letterbox.waited_for.insert(id, answer);
            inner.last_id = id;
            id
        };
        let _wait = Wait { mailbox: self, node, id };
        let node = || node.to_owned();
        match tokio::time::timeout_at(deadline.into(), answered).await {
            Ok(Ok(Outcome::Done(answer))) => Ok(answer),
            Ok(Ok(Outcome::Failed(why))) => Err(NotDone::Refused { node: node(), why }),
            Ok(Err(_)) => Err(NotDone::Gone { node: node() }),
            Err(_) => Err(NotDone::Late { node: node(), within }),
        }
    }

    /// How many answers are waited for.
    pub fn waited_for(&self) -> usize {
        lock(&self.inner).boxes.values().map(|letterbox| letterbox.waited_for.len()).sum()
    }
}

impl Inner {
    fn of(&mut self, node: &str) -> Result<&mut Letterbox, NotDone> {
        self.boxes.get_mut(node).ok_or_else(|| NotDone::NotConnected { node: node.to_owned() })
    }
}

impl Letterbox {
    fn send(&self, node: &str, instruction: v1::Instruction) -> Result<(), NotDone> {
        self.outgoing.try_send(instruction).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => NotDone::Full { node: node.to_owned() },
            mpsc::error::TrySendError::Closed(_) => NotDone::NotConnected { node: node.to_owned() },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn done(id: u64) -> v1::InstructionAnswer {
        v1::InstructionAnswer { id, outcome: Some(Outcome::Done(Bytes::from_static(b"ok"))) }
    }

    fn asks(mailbox: &Arc<Mailbox>, kind: &str) -> tokio::task::JoinHandle<Result<Bytes, NotDone>> {
        let (mailbox, kind, deadline) = (mailbox.clone(), kind.to_owned(), clock::now() + SOON);
        tokio::spawn(async move { mailbox.ask("n", &kind, Bytes::new(), deadline).await })
    }

    #[tokio::test(start_paused = true)]
    async fn answers_come_to_those_who_wait_and_to_nobody_else() {
        let mailbox = Arc::new(Mailbox::default());
        let nobody = mailbox.ask("n", "ping", Bytes::new(), clock::now() + SOON).await;
        assert!(matches!(nobody, Err(NotDone::NotConnected { .. })));
        let (outgoing, mut sent) = mpsc::channel(MAX_UNSENT);
        mailbox.open("n", 1, &outgoing);
        mailbox.tell("n", "first", Bytes::new()).unwrap();
        let waits = asks(&mailbox, "second");
        assert_eq!(sent.recv().await.map(|i| (i.id, i.kind)), Some((0, "first".to_owned())));
        let second = sent.recv().await.unwrap();
        assert_eq!(second.kind, "second");
        assert!(!mailbox.answered("n", 2, done(second.id)), "that is another stream's");
        assert!(mailbox.answered("n", 1, done(second.id)));
        assert_eq!(waits.await.unwrap(), Ok(Bytes::from_static(b"ok")));
        assert!(!mailbox.answered("n", 1, done(second.id)), "once");

        let waits = asks(&mailbox, "late");
        let late = sent.recv().await.unwrap();
        assert!(matches!(waits.await.unwrap(), Err(NotDone::Late { .. })));
        assert!(!mailbox.answered("n", 1, done(late.id)), "late answers are dropped");
        assert_eq!(mailbox.waited_for(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waits_for_a_node_that_goes_is_told_at_once() {
        let mailbox = Arc::new(Mailbox::default());
        let (outgoing, mut sent) = mpsc::channel(MAX_UNSENT);
        let began = clock::now();
        for (stream, ends) in [(1, true), (2, false)] {
            mailbox.open("n", stream, &outgoing);
            let waits = asks(&mailbox, "ping");
            sent.recv().await.unwrap();
            mailbox.close("n", 77);
            assert_eq!(mailbox.waited_for(), 1, "another stream's end is not this one's");
            match ends {
                true => mailbox.close("n", stream),
                false => mailbox.open("n", 3, &outgoing),
            }
            assert!(matches!(waits.await.unwrap(), Err(NotDone::Gone { .. })));
        }
        assert_eq!(clock::since(began), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_box_is_bounded() {
        let mailbox = Mailbox::default();
        let (outgoing, _sent) = mpsc::channel(2);
        mailbox.open("n", 1, &outgoing);
        assert_eq!(mailbox.tell_all("a", &Bytes::new()), 1);
        mailbox.tell("n", "a", Bytes::new()).unwrap();
        assert!(matches!(mailbox.tell("n", "a", Bytes::new()), Err(NotDone::Full { .. })));
        let asked = mailbox.ask("n", "a", Bytes::new(), clock::now() + SOON).await;
        assert!(matches!(asked, Err(NotDone::Full { .. })));
        assert_eq!((mailbox.tell_all("a", &Bytes::new()), mailbox.waited_for()), (0, 0));
    }
}
