//! Answers that their callers have not taken yet: bytes, of which all callers of a peer share one pool.
//!
//! A message of a stream counts while it waits for its connection, and every piece of an answer while the connection has it and has
//! not written it ([`crate::services::counting`]): of a caller that does not read that is some pieces of each stream. Nobody can take
//! those back; so it is what comes next that has no room, of those who have their part already ([`super::shares`]):
//!
//! - further reads, writes and watches, also as requests on streams, are refused at once;
//! - what has been read for a call, or for a request on a stream, by then is not answered, but that there is no room for it: it can
//!   be read again;
//! - any other answer ends its call or its stream, and a watcher's next message its stream. A watcher waits a little first, since
//!   a place in the changes takes no memory, and many of one host may be told of one large change at once.
//!
//! What is counted is what is in memory, but for some KiB of each call: messages are encoded into memory of their size
//! ([`lake_proto::codec`]), and a stream keeps nothing of what its connection has written ([`crate::services::framed`]). What a
//! generated stream has (keeping alive, heartbeats, a state that is saved) is put together in a buffer that stays: twice its largest
//! message, of some KiB, of an instruction's 1 MiB, or of a chunk of a state and one record.
//!
//! Limits: [`MAX_BYTES`], and a message for each thread, which are let in at the same moment. What has up to [`FEW_BYTES`] counts
//! and is always let in: it takes no more than the call that it answers, of which there is a limit. So does what keeps somebody
//! alive, whatever it has. How long a caller may take nothing is not limited.

use lake_proto::v1::error_detail::Kind;

use super::failure::Failure;
use super::shares::{Caller, Held, Pool, Refused, Resource};

/// Bytes of all messages that are not taken.
pub const MAX_BYTES: usize = 256 << 20;
/// A message of so many bytes is always let in.
pub const FEW_BYTES: usize = 4 << 10;

/// The pool. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Untaken(Pool);

impl Default for Untaken {
    fn default() -> Self {
        Self::of(MAX_BYTES)
    }
}

impl Untaken {
    /// One of so many bytes.
    pub fn of(limit: usize) -> Self {
        Self(Pool::new(Resource::AnswerBytes, limit))
    }

    /// How many bytes are not taken.
    pub fn bytes(&self) -> usize {
        self.0.taken()
    }

    /// Counts so many bytes until what this gives is dropped.
    pub fn note(&self, caller: &Caller, bytes: usize) -> Held {
        self.0.note(caller, bytes)
    }

    /// Whether there is room for a message.
    ///
    /// # Errors
    /// Overloaded: there is none.
    pub fn room(&self, caller: &Caller, bytes: usize) -> Result<(), Failure> {
        if bytes <= FEW_BYTES {
            return Ok(());
        }
        self.0.room(caller, bytes).map_err(overloaded)
    }

    /// Whether a caller may ask for more.
    ///
    /// # Errors
    /// Overloaded: it has its part of what is not taken.
    pub fn may_ask(&self, caller: &Caller) -> Result<(), Failure> {
        self.0.room(caller, 1).map_err(overloaded)
    }
}

fn overloaded(refused: Refused) -> Failure {
    let what = format!(
        "{refused} has as many bytes of answers that it has not taken as it may have, of {} MiB: read what has been answered, \
         then ask again",
        MAX_BYTES >> 20
    );
    Failure::new(Kind::Overloaded, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::shares::Callers;

    #[test]
    fn who_has_its_part_gets_small_messages_only_and_another_gets_large_ones() {
        let (untaken, callers) = (Untaken::of(1 << 20), Callers::default());
        let [greedy, modest] = [1, 2].map(|port| callers.at(Some(([10, 0, 0, 1], port).into())));
        let mut held = Vec::new();
        let refused = loop {
            match untaken.room(&greedy, FEW_BYTES + 1) {
                Ok(()) => held.push(untaken.note(&greedy, FEW_BYTES + 1)),
                Err(refused) => break refused,
            }
        };
        assert!(((200 << 10)..(300 << 10)).contains(&untaken.bytes()), "a quarter, not {}", untaken.bytes());
        assert!(refused.kind == Kind::Overloaded && refused.message.starts_with("this connection"), "{refused:?}");
        assert_eq!(untaken.may_ask(&greedy).unwrap_err(), refused);
        untaken.room(&greedy, FEW_BYTES).unwrap();
        let before = untaken.bytes();
        held.push(untaken.note(&greedy, FEW_BYTES));
        assert_eq!(untaken.bytes(), before + FEW_BYTES, "it counts");

        untaken.may_ask(&modest).unwrap();
        untaken.room(&modest, 100 << 10).unwrap();
        drop(held);
        assert_eq!(untaken.bytes(), 0);
        untaken.may_ask(&greedy).unwrap();
    }
}
