//! What a watcher is sent, encoded; and reading it off the kept changes: pure.

use bytes::Bytes;
use lake_proto::codec::{HEAD_BYTES, framed};
use lake_proto::kv::Revision;
use lake_proto::v1;

use super::{MESSAGE_BYTES, SCAN_EVENTS};
use crate::planted::{self, Bug};
use crate::state::State;
use crate::state::changes::{Change, Compacted};

/// One message of a watch ([`v1::WatchResponse`]), as it goes over every connection that it goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Every change under the prefix after this revision ...
    pub after: Revision,
    /// ... up to this one is in it.
    pub upto: Revision,
    /// The first revision that changed something; `None` for a progress mark.
    pub first: Option<Revision>,
    /// Its head before it.
    pub framed: Bytes,
}

impl Message {
    /// Encodes changes under a prefix.
    pub fn new(header: v1::ResponseHeader, changes: Vec<v1::Change>, after: Revision, upto: Revision) -> Self {
        let first = changes.first().map(|change| change.revision);
        let response = v1::WatchResponse { header: Some(header), changes, progress_revision: upto };
        Self { after, upto, first, framed: framed(&response) }
    }

    /// The message alone.
    pub fn encoded(&self) -> Bytes {
        self.framed.slice(HEAD_BYTES..)
    }
}

/// What a change did under a prefix.
pub fn under(change: &Change, prefix: &str) -> Option<v1::Change> {
    if planted::has(Bug::LostEvent) && change.revision.is_multiple_of(100) {
        return None;
    }
    let here = change.events().iter().filter(|event| event.key().starts_with(prefix));
    let events: Vec<_> =
        here.map(|event| v1::Event { key: event.key().to_owned(), entry: event.key_value().map(Into::into) }).collect();
    (!events.is_empty()).then_some(v1::Change { revision: change.revision, events })
}

/// Bytes of keys and values in a change.
pub fn size(change: &Change) -> u64 {
    change.events().iter().map(crate::state::changes::Event::size).sum()
}

/// What one look at the kept changes found.
#[derive(Debug, PartialEq)]
pub struct Look {
    pub changes: Vec<v1::Change>,
    /// How far it got: everything under the prefix up to this revision is in `changes`.
    pub upto: Revision,
}

/// Reads the changes under `prefix` from the revision `next` on, which the state has reached: all up to the state's
/// revision, or [`SCAN_EVENTS`] events or [`MESSAGE_BYTES`], and one more change.
///
/// # Errors
/// When some are no longer kept.
pub fn look(state: &State, prefix: &str, next: Revision) -> Result<Look, Compacted> {
    let (mut scanned, mut bytes) = (0, 0);
    let mut found = Look { changes: vec![], upto: state.revision() };
    for change in state.changes().from(next)? {
        if scanned >= SCAN_EVENTS || bytes >= MESSAGE_BYTES {
            found.upto = change.revision - 1;
            break;
        }
        scanned += change.events().len();
        if let Some(here) = under(change, prefix) {
            bytes += size(change);
            found.changes.push(here);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;

    fn run(state: &mut State, then: Vec<Op>) {
        state.run(1, &Txn { then, ..Txn::default() });
    }

    /// Everything under a prefix, look by look.
    fn all(state: &State, prefix: &str, mut next: Revision) -> (Vec<v1::Change>, usize) {
        let (mut changes, mut looks) = (vec![], 0);
        while next <= state.revision() {
            let found = look(state, prefix, next).unwrap();
            assert!(found.upto >= next, "each look gets on");
            assert!(found.changes.iter().all(|c| c.revision >= next && c.revision <= found.upto));
            changes.extend(found.changes);
            next = found.upto + 1;
            looks += 1;
        }
        (changes, looks)
    }

    #[test]
    fn a_transaction_is_whole_and_only_what_lies_under_the_prefix() {
        let mut state = State::default();
        run(&mut state, vec![Op::put("/kv/a/1", "1"), Op::put("/kv/b/1", "1"), Op::put("/kv/a/2", "1")]);
        run(&mut state, vec![Op::put("/kv/b/1", "2")]);
        run(&mut state, vec![Op::delete("/kv/a/1")]);
        let (changes, looks) = all(&state, "/kv/a/", 1);
        assert_eq!(looks, 1);
        assert_eq!(changes.iter().map(|c| (c.revision, c.events.len())).collect::<Vec<_>>(), [(1, 2), (3, 1)]);
        assert_eq!(changes[1].events[0].entry, None);
        assert_eq!(all(&state, "/kv/a/", 2).0.len(), 1);
        assert_eq!(all(&state, "", 1).0.len(), 3);
        assert_eq!(all(&state, "/kv/c", 1), (vec![], 1));
    }

    #[test]
    fn a_long_way_is_gone_in_bounded_steps() {
        let mut state = State::default();
        for i in 0..3 * SCAN_EVENTS {
            run(&mut state, vec![Op::put(format!("/kv/{}", i % 7), "1")]);
        }
        let (changes, looks) = all(&state, "/kv/3", 1);
        assert_eq!((changes.len(), looks), (3 * SCAN_EVENTS / 7, 3));

        let large = vec![7; 1 << 20];
        for i in 0..8 {
            run(&mut state, vec![Op::put(format!("/kv/large/{i}"), large.clone())]);
        }
        let (changes, looks) = all(&state, "/kv/large/", 3 * SCAN_EVENTS as u64);
        assert_eq!((changes.len(), looks), (8, 8), "a message ends once it is large");
    }

    #[test]
    fn what_is_no_longer_kept_is_told_with_the_oldest_that_is() {
        let mut state = State::default();
        let large = vec![7; 1 << 20];
        for i in 0..70 {
            run(&mut state, vec![Op::put(format!("/kv/{}", i % 3), large.clone())]);
        }
        let oldest = state.changes().oldest();
        assert!(oldest > 1);
        assert_eq!(look(&state, "/kv/", oldest - 1), Err(Compacted { oldest }));
        assert_eq!(all(&state, "/kv/", oldest).0.len() as u64, 71 - oldest);
    }
}
