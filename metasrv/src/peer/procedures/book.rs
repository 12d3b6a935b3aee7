//! The procedures that there are, and which of them are in hand, as a pure value of one leadership.
//!
//! It is read from the state as a whole, whenever something under the prefix was changed; what the leader itself
//! commits is put in as it is committed. One that is in hand is left alone until it is put back. No clock is read here.

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::time::Instant;

use lake_client::procedures::{Procedure, Record, State, id_of};
use lake_proto::kv::{KeyValue, Revision};

use super::machine::{Cancel, Pace, Turn, turn};

#[derive(Debug)]
struct Known {
    revision: Revision,
    record: Record,
    in_hand: bool,
    /// Nothing is tried before.
    not_before: Option<Instant>,
}

/// What the leader knows of procedures.
#[derive(Debug, Default)]
pub struct Book {
    known: BTreeMap<String, Known>,
    /// The one that was begun last: those behind it come first, so that none waits for ever.
    begun: String,
}

/// What a look at the book says.
#[derive(Debug, Default, PartialEq)]
pub struct Look {
    /// What is to be begun: in order of the ids, from behind the one that was begun last.
    pub begin: Vec<(Procedure, Turn)>,
    /// One waits to be accepted, and the clock was not saved lately.
    pub accepts: bool,
    /// What is old enough to be forgotten.
    pub forget: Vec<(String, Revision)>,
    /// Something waits for the cluster's clock.
    pub waits_for_clock: bool,
}

/// What a look goes by.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    pub at: Instant,
    pub clock_ms: u64,
    /// Whether procedures can be accepted: the clock was saved lately.
    pub accepts: bool,
    /// How many may be begun.
    pub room: usize,
}

impl Book {
    /// Reads what there is: only what it does not know, since there may be many and each step changes one. With more than are looked at a
    /// parent may come behind its children, which it holds: the entry of one that is not among them is had by `get`, from its id.
    pub fn read(&mut self, entries: impl IntoIterator<Item = KeyValue>, get: impl Fn(&str) -> Option<KeyValue>) {
        let mut before = std::mem::take(&mut self.known);
        for entry in entries {
            self.read_one(&entry, &mut before);
        }
        let going_on = self.known.values().filter(|known| !known.record.state.is_ended());
        let parents: HashSet<&str> = going_on.filter_map(|known| known.record.parent.as_deref()).collect();
        let behind: Vec<String> =
            parents.into_iter().filter(|id| !self.known.contains_key(*id)).map(str::to_owned).collect();
        for entry in behind.iter().filter_map(|id| get(id)) {
            self.read_one(&entry, &mut before);
        }
        // One in hand that is gone is put back, and then not found again.
        self.known.extend(before.into_iter().filter(|(_, known)| known.in_hand));
    }

    fn read_one(&mut self, entry: &KeyValue, before: &mut BTreeMap<String, Known>) {
        let unchanged = |known: &Known| known.in_hand || known.revision == entry.mod_revision;
        let known = id_of(&entry.key).and_then(|id| before.remove_entry(id)).filter(|(_, known)| unchanged(known));
        if let Some((id, known)) = known {
            self.known.insert(id, known);
            return;
        }
        // What somebody else has put there is no procedure.
        let Some(Procedure { id, mod_revision, record }) = Procedure::of(entry) else { return };
        self.known.insert(id, Known { revision: mod_revision, record, in_hand: false, not_before: None });
    }

    /// What can be begun now. `waits` says of one whether it waits for those that it is the parent of: it is left alone until they have
    /// ended. `holds` says whether they wait for it: they are accepted and cancelled, and otherwise left alone until it has come further,
    /// or has ended.
    pub fn look(
        &self,
        now: Now,
        pace: &Pace,
        cancel: impl Fn(&Record) -> Cancel,
        waits: impl Fn(&Record) -> bool,
        holds: impl Fn(&Record) -> bool,
    ) -> Look {
        let mut look = Look::default();
        let going_on = self.known.values().filter(|known| !known.record.state.is_ended());
        let parents: HashSet<&str> = going_on.filter_map(|known| known.record.parent.as_deref()).collect();
        let has_children = |id: &str, record: &Record| {
            record.state == State::Active && !record.cancel && parents.contains(id) && waits(record)
        };
        let goes_on = |id: &&&str| {
            self.known.get(**id).is_some_and(|known| !known.record.state.is_ended() && holds(&known.record))
        };
        let holding: HashSet<&str> = parents.iter().filter(goes_on).copied().collect();
        let is_held = |record: &Record| record.parent.as_deref().is_some_and(|parent| holding.contains(parent));
        let surplus = self.surplus(pace);
        let behind = self.known.range::<str, _>((Bound::Excluded(self.begun.as_str()), Bound::Unbounded));
        let before = self.known.range::<str, _>((Bound::Unbounded, Bound::Included(self.begun.as_str())));
        for (id, known) in behind.chain(before) {
            let is_later = known.not_before.is_some_and(|until| now.at < until);
            let is_due = known.record.due_ms.is_none_or(|due| due <= now.clock_ms);
            look.waits_for_clock |= known.record.state.is_ended()
                || known.record.state == State::Active && (!is_due || known.record.deadline_ms.is_some());
            if known.in_hand || is_later || has_children(id, &known.record) {
                continue;
            }
            let begin = match turn(&known.record, now.clock_ms, pace, || cancel(&known.record)) {
                Turn::Wait(_) if surplus.contains(id.as_str()) => Turn::Forget,
                other => other,
            };
            match begin {
                Turn::Wait(_) => {}
                Turn::Execute if is_held(&known.record) => {}
                Turn::Forget => look.forget.push((id.clone(), known.revision)),
                Turn::Accept if !now.accepts => look.accepts = true,
                begin if look.begin.len() < now.room => {
                    let procedure =
                        Procedure { id: id.clone(), mod_revision: known.revision, record: known.record.clone() };
                    look.begin.push((procedure, begin));
                }
                _ => {}
            }
        }
        look
    }

    /// Those that have ended and are more than are remembered, the oldest ones.
    fn surplus(&self, pace: &Pace) -> HashSet<&str> {
        let dated = self.known.iter().filter_map(|(id, known)| Some((known.record.ended_ms?, id.as_str())));
        let mut dated: Vec<(u64, &str)> = dated.collect();
        let surplus = dated.len().saturating_sub(pace.most_ended);
        if surplus > 0 {
            dated.sort_unstable();
        }
        dated.into_iter().take(surplus).map(|(_, id)| id).collect()
    }

    /// One is in hand from now on.
    pub fn take(&mut self, id: &str) {
        if let Some(known) = self.known.get_mut(id) {
            known.in_hand = true;
            self.begun = id.to_owned();
        }
    }

    /// One is put back, as it was committed, and is not tried before a time.
    pub fn put_back(&mut self, id: &str, revision: Revision, record: Record, not_before: Option<Instant>) {
        self.known.insert(id.to_owned(), Known { revision, record, in_hand: false, not_before });
    }

    /// One is put back, and nobody knows what is in the map now: it is to be read again.
    pub fn put_back_unknown(&mut self, id: &str, not_before: Instant) {
        if let Some(known) = self.known.get_mut(id) {
            known.in_hand = false;
            known.not_before = Some(not_before);
        }
    }

    /// These were deleted.
    pub fn forgotten(&mut self, ids: &[(String, Revision)]) {
        for (id, revision) in ids {
            if self.known.get(id).is_some_and(|known| known.revision == *revision) {
                self.known.remove(id);
            }
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// How many are active, and how many poisoned.
    pub fn counts(&self) -> (u64, u64) {
        let of = |state| self.known.values().filter(|known| known.record.state == state).count() as u64;
        (of(State::Active), of(State::Poisoned))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lake_client::clock;
    use lake_client::procedures::{kept, key};

    use super::*;

    fn entry(id: &str, revision: Revision, record: &Record) -> KeyValue {
        KeyValue {
            key: key(id),
            value: record.to_bytes(),
            version: 1,
            create_revision: 1,
            mod_revision: revision,
            lease: None,
        }
    }

    fn active() -> Record {
        Record { accepted_ms: Some(0), ..Record::new("k", "s", "first", kept(&()), 0) }
    }

    fn now(room: usize) -> Now {
        Now { at: clock::now(), clock_ms: 1000, accepts: true, room }
    }

    /// Those at the step `joins` wait for their children, and for those at the step `holds` their children do.
    fn looked(book: &Book, now: Now, pace: &Pace) -> Look {
        book.look(now, pace, |_| Cancel::Now, |record| record.step == "joins", |record| record.step == "holds")
    }

    fn begun(book: &Book, now: Now) -> Vec<String> {
        looked(book, now, &Pace::default()).begin.into_iter().map(|(p, _)| p.id).collect()
    }

    #[test]
    fn one_in_hand_is_left_alone_and_there_is_a_bound() {
        let mut book = Book::default();
        book.read((1..=3).map(|n| entry(&format!("p{n}"), n, &active())), |_| None);
        assert_eq!(begun(&book, now(2)), ["p1", "p2"]);
        book.take("p1");
        assert_eq!(begun(&book, now(9)), ["p2", "p3"]);
        // It was changed meanwhile; and p2 is gone.
        book.read([entry("p1", 7, &Record { cancel: true, ..active() }), entry("p3", 3, &active())], |_| None);
        assert_eq!(begun(&book, now(9)), ["p3"]);
        let later = now(9).at + Duration::from_secs(5);
        book.put_back_unknown("p1", later);
        assert_eq!(begun(&book, now(9)), ["p3"], "not before its time");
        assert_eq!(begun(&book, Now { at: later, ..now(9) }), ["p3", "p1"], "the one that was begun last comes last");
        book.read([entry("p1", 7, &Record { cancel: true, ..active() })], |_| None);
        assert_eq!(begun(&book, now(9)), ["p1"], "what was changed does not wait");
        book.put_back("p1", 8, active(), Some(later));
        assert_eq!(begun(&book, now(9)), Vec::<String>::new());
        assert_eq!(book.counts(), (1, 0));
    }

    #[test]
    fn what_has_not_changed_is_not_read_again() {
        let mut book = Book::default();
        book.read([entry("p1", 1, &active()), entry("p2", 2, &active())], |_| None);
        // Nobody could read this one any more, and nobody has to: its revision is known.
        let unread = KeyValue { value: "unread".into(), ..entry("p1", 1, &active()) };
        book.read([unread.clone(), entry("p2", 3, &Record { state: State::Poisoned, ..active() })], |_| None);
        assert_eq!((book.counts(), begun(&book, now(9))), ((1, 1), vec!["p1".to_owned()]));
        book.read([KeyValue { mod_revision: 4, ..unread }], |_| None);
        assert_eq!(book.counts(), (0, 0), "what was put in its place is no procedure, and the other one is gone");
    }

    #[test]
    fn what_is_submitted_waits_until_the_clock_is_saved() {
        let mut book = Book::default();
        book.read([entry("p", 1, &Record::new("k", "s", "first", kept(&()), 0))], |_| None);
        let look = looked(&book, Now { accepts: false, ..now(9) }, &Pace::default());
        assert!(look.accepts && look.begin.is_empty());
        assert_eq!(begun(&book, now(9)), ["p"]);
    }

    #[test]
    fn a_parent_waits_until_its_children_have_ended() {
        let mut book = Book::default();
        let parent = Record { step: "joins".to_owned(), ..active() };
        let child = |state| Record { parent: Some("p".to_owned()), state, ended_ms: Some(1000), ..active() };
        let with = |parent: &Record, states: [State; 2]| {
            let [one, other] = states.map(child);
            [entry("c1", 1, &one), entry("c2", 2, &other), entry("p", 3, parent)]
        };
        for left in [State::Active, State::Poisoned] {
            book.read(with(&parent, [State::Done, left]), |_| None);
            assert!(!begun(&book, now(9)).contains(&"p".to_owned()), "{left:?}");
        }
        let cancelled = Record { cancel: true, ..parent.clone() };
        for (parent, states) in [
            (&cancelled, [State::Active, State::Active]),
            (&active(), [State::Active, State::Active]),
            (&parent, [State::Done, State::Failed]),
        ] {
            let mut book = Book::default();
            book.read(with(parent, states), |_| None);
            assert!(begun(&book, now(9)).contains(&"p".to_owned()), "{parent:?} {states:?}");
        }
    }

    #[test]
    fn children_wait_until_their_parent_has_come_further_or_has_ended() {
        let mut book = Book::default();
        let child = Record { parent: Some("p".to_owned()), ..active() };
        let others = Record { parent: Some("q".to_owned()), ..active() };
        let mut with = |child: &Record, parent: Record| {
            // What has the same revision is not read again.
            book.read([], |_| None);
            book.read([entry("c", 1, child), entry("d", 2, &others), entry("p", 3, &parent)], |_| None);
            begun(&book, now(9))
        };
        let holds = |state| Record { step: "holds".to_owned(), state, ended_ms: Some(1000), ..active() };
        assert_eq!(with(&child, holds(State::Active)), ["d", "p"]);
        assert_eq!(with(&child, holds(State::Poisoned)), ["d"], "it may yet go on");
        assert_eq!(with(&child, holds(State::Failed)), ["c", "d"]);
        assert_eq!(with(&child, active()), ["c", "d", "p"], "it has come further");
        let cancelled = Record { cancel: true, ..child.clone() };
        assert_eq!(with(&cancelled, holds(State::Active)), ["c", "d", "p"]);
        let submitted = Record { accepted_ms: None, ..child.clone() };
        assert_eq!(with(&submitted, holds(State::Active)), ["c", "d", "p"], "its retention time begins");

        // Of more than are looked at, the parent was not listed.
        let mut book = Book::default();
        let parent = |id: &str| (id == "p").then(|| entry("p", 3, &holds(State::Active)));
        book.read([entry("c", 1, &child), entry("d", 2, &others)], parent);
        assert_eq!(begun(&book, now(9)), ["d", "p"], "it is known all the same, and holds its child");
        // Waiting is not forgotten with the next reading.
        let later = now(9).at + Duration::from_secs(5);
        book.put_back("p", 3, holds(State::Active), Some(later));
        book.read([entry("c", 1, &child), entry("d", 2, &others)], parent);
        assert_eq!(begun(&book, now(9)), ["d"]);
        book.read([entry("d", 2, &others)], parent);
        assert_eq!(book.len(), 1, "nobody names it any more");
    }

    #[test]
    fn history_has_an_age_and_a_number() {
        let mut book = Book::default();
        let ended = |at| Record { state: State::Done, ended_ms: Some(at), ..active() };
        let pace = Pace { most_ended: 2, history: Duration::from_millis(950), ..Pace::default() };
        book.read((0..5).map(|n| entry(&format!("p{n}"), n + 1, &ended(40 + n * 10))), |_| None);
        let look = looked(&book, now(9), &pace);
        let forgotten: Vec<&str> = look.forget.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(forgotten, ["p0", "p1", "p2"], "two are too old, and there are three too many");
        assert!(look.waits_for_clock);
        book.forgotten(&look.forget);
        let look = looked(&book, now(9), &pace);
        assert!(look.forget.is_empty() && look.waits_for_clock);
        book.forgotten(&[("p3".to_owned(), 1)]);
        assert_eq!(book.known.len(), 2, "it was changed since");
        let poisoned = Record { state: State::Poisoned, ..active() };
        book.read([entry("p", 1, &poisoned)], |_| None);
        assert_eq!(looked(&book, now(9), &pace), Look::default());
        assert_eq!(book.counts(), (0, 1));
    }
}
