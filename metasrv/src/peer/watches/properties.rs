//! Watchers against the obvious: every change that was made, filtered by prefix and revision.
//!
//! Random writes, large ones among them; a hub that puts down late, tells shard by shard, forgets messages, or jumps over
//! changes; watchers that join anywhere, leave, hear their signals late or not at all, and have no room for what they hear. Whatever the order: each is told
//! its changes once, in order and whole, no progress is told before what it covers, and when all is quiet nothing is missing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use lake_proto::kv::{Op, Revision, Txn};
use lake_proto::v1;
use lake_proto::watch::Changes;
use proptest::prelude::*;
use prost::Message as _;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::Instant;

use super::groups::{Groups, Joined, Signal};
use super::message::Message;
use super::pace::MARK_EVERY;
use super::position::Position;
use crate::state::State;

const KEYS: [&str; 8] = ["/kv/a", "/kv/a/1", "/kv/a/2", "/kv/aé", "/kv/b", "/kv/b/1", "/kv/c", "/lake/x"];
const PREFIXES: [&str; 7] = ["", "/kv/", "/kv/a", "/kv/a/", "/kv/aé", "/kv/b/1", "/none/"];
const INTERVAL: Duration = Duration::from_millis(110);

#[derive(Debug, Clone)]
enum Step {
    /// Each key is put, or deleted if it is there and the number is odd.
    Write(Vec<(usize, u8)>, bool),
    PutDown,
    Jump,
    /// So many shards have their turn; the messages are kept, or gone at once.
    Tell(usize, bool),
    Forget,
    /// So many milliseconds pass, and so many shards are looked at for a mark.
    Mark(u64, usize),
    /// At a prefix, so many revisions ago or ahead; as many as that.
    Join(usize, i64, usize),
    Leave(usize),
    /// One of them hears so many signals; there is room for what they say, or it has to read that again.
    Hear(usize, usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let keys = || prop::collection::vec((0..KEYS.len(), any::<u8>()), 1..6);
    prop_oneof![
        8 => (keys(), prop::bool::weighted(0.1)).prop_map(|(keys, large)| Step::Write(keys, large)),
        6 => Just(Step::PutDown),
        1 => Just(Step::Jump),
        6 => (1..6usize, prop::bool::weighted(0.8)).prop_map(|(shards, kept)| Step::Tell(shards, kept)),
        1 => Just(Step::Forget),
        3 => (0..1500u64, 1..8usize).prop_map(|(millis, shards)| Step::Mark(millis, shards)),
        3 => (0..PREFIXES.len(), -4..3i64, 1..24usize).prop_map(|(prefix, from, count)| Step::Join(prefix, from, count)),
        1 => any::<usize>().prop_map(Step::Leave),
        8 => (any::<usize>(), 1..12usize, prop::bool::weighted(0.8))
            .prop_map(|(who, signals, room)| Step::Hear(who, signals, room)),
    ]
}

/// A change as it was made: its keys in order, each with whether it is there afterwards.
type Made = (Revision, Vec<(String, bool)>);

struct Watcher {
    shard: u64,
    signals: Receiver<Signal>,
    position: Position,
    from: Revision,
    told: Vec<Made>,
    told_at: Option<Instant>,
}

struct World {
    state: State,
    there: BTreeSet<usize>,
    made: Vec<Made>,
    groups: Groups,
    kept: Vec<Arc<Message>>,
    watchers: Vec<Watcher>,
    now: Instant,
}

fn header(revision: Revision) -> v1::ResponseHeader {
    v1::ResponseHeader { revision, ..v1::ResponseHeader::default() }
}

impl World {
    fn new() -> Self {
        Self {
            state: State::default(),
            there: BTreeSet::new(),
            made: vec![],
            groups: Groups::default(),
            kept: vec![],
            watchers: vec![],
            now: Instant::now(),
        }
    }

    fn write(&mut self, keys: &[(usize, u8)], large: bool) {
        let keys: std::collections::BTreeMap<usize, u8> = keys.iter().copied().collect();
        let (mut then, mut events) = (vec![], vec![]);
        for (key, number) in keys {
            let deletes = number % 2 == 1 && self.there.remove(&key);
            if deletes {
                then.push(Op::delete(KEYS[key]));
            } else {
                self.there.insert(key);
                then.push(Op::put(KEYS[key], vec![number; if large { 200 << 10 } else { 1 }]));
            }
            events.push((KEYS[key].to_owned(), !deletes));
        }
        events.sort();
        self.state.run(1, &Txn { then, ..Txn::default() });
        self.made.push((self.state.revision(), events));
    }

    fn put_down(&mut self) {
        for change in self.state.changes().from(self.groups.position() + 1).unwrap() {
            self.groups.put_down(change);
        }
        self.groups.moved(self.state.revision());
    }

    fn tell(&mut self, shards: usize, keep: bool) {
        for _ in 0..shards {
            let Some(due) = self.groups.next_due(self.now, header) else { return };
            self.kept.extend(due.message.filter(|_| keep));
            assert!(due.to.send(due.signal).is_ok(), "a shard has watchers");
        }
    }

    fn mark(&mut self, shards: usize) {
        for _ in 0..shards.min(self.groups.in_round()) {
            if let Some(due) = self.groups.next_mark(self.now, INTERVAL, header) {
                self.kept.extend(due.message);
                assert!(due.to.send(due.signal).is_ok(), "a shard has watchers");
            }
        }
    }

    /// As [`super::Watches::watch`] does it.
    fn join(&mut self, prefix: &str, from: i64) {
        if self.groups.watchers() == 0 {
            self.groups.moved(self.state.revision());
        }
        let Joined { prefix, shard, signals } = self.groups.join(prefix, self.now);
        let from = (self.state.revision() as i64 + 1 + from).max(1) as Revision;
        let position = Position::new(prefix, from);
        self.watchers.push(Watcher { shard, signals, position, from, told: vec![], told_at: None });
    }

    fn leave(&mut self, who: usize) {
        if !self.watchers.is_empty() {
            let gone = self.watchers.swap_remove(who % self.watchers.len());
            self.groups.leave(gone.position.prefix(), gone.shard);
        }
    }

    /// As [`super::Watcher::next`] does it, for as long as there is something to hear.
    fn hear(&mut self, who: usize, signals: usize, room: bool) {
        let Some(count) = self.watchers.len().checked_sub(1) else { return };
        let watcher = &mut self.watchers[who % (count + 1)];
        let mut left = signals;
        loop {
            if watcher.position.is_behind() {
                if let Some(found) = watcher.position.look(&self.state, self.now).expect("everything is kept") {
                    let message = Message::new(header(0), found.changes, found.after, found.upto);
                    watcher.take(&message, &self.made, self.now);
                }
                continue;
            }
            if left == 0 {
                return;
            }
            left -= 1;
            let before = watcher.position.next();
            match watcher.signals.try_recv() {
                Ok(signal) => match watcher.position.signalled(signal, self.now) {
                    Some(message) if room => watcher.take(&message, &self.made, self.now),
                    Some(_) => watcher.position.step_back(before),
                    None => {}
                },
                Err(TryRecvError::Lagged(_)) => watcher.position.missed(),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Closed) => panic!("it has not left"),
            }
        }
    }

    fn quiet(&mut self) {
        self.put_down();
        while self.groups.waiting() {
            self.tell(1, true);
        }
        for who in 0..self.watchers.len() {
            self.hear(who, usize::MAX, true);
        }
    }
}

impl Watcher {
    /// What it should have been told up to a revision.
    fn expected(&self, made: &[Made], upto: Revision) -> Vec<Made> {
        let prefix = self.position.prefix();
        let of_it = made.iter().filter(|(revision, _)| (self.from..=upto).contains(revision));
        let under = of_it.map(|(revision, events)| {
            (*revision, events.iter().filter(|(key, _)| key.starts_with(&**prefix)).cloned().collect::<Vec<_>>())
        });
        under.filter(|(_, events)| !events.is_empty()).collect()
    }

    fn take(&mut self, message: &Message, made: &[Made], now: Instant) {
        let response = v1::WatchResponse::decode(message.encoded()).unwrap();
        let Changes { changes, progress, .. } = Changes::try_from(response).unwrap();
        if changes.is_empty() {
            let early = self.told_at.is_some_and(|at| now.duration_since(at) < MARK_EVERY);
            assert!(!early, "progress alone comes too often");
        }
        self.told_at = Some(now);
        for change in changes {
            let events = change.events.into_iter().map(|event| (event.key, event.entry.is_some()));
            self.told.push((change.revision, events.collect()));
        }
        assert_eq!(self.told, self.expected(made, progress), "what is told up to revision {progress}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_watcher_is_told_what_filtering_all_changes_would_tell_it(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Write(keys, large) => world.write(&keys, large),
                Step::PutDown => world.put_down(),
                Step::Jump => world.groups.jumped(world.state.revision()),
                Step::Tell(shards, kept) => world.tell(shards, kept),
                Step::Forget => world.kept.clear(),
                Step::Mark(millis, shards) => {
                    world.now += Duration::from_millis(millis);
                    world.mark(shards);
                }
                Step::Join(prefix, from, count) => (0..count).for_each(|_| world.join(PREFIXES[prefix], from)),
                Step::Leave(who) => world.leave(who),
                Step::Hear(who, signals, room) => world.hear(who, signals, room),
            }
        }
        world.quiet();
        let last = world.state.revision();
        for watcher in &world.watchers {
            prop_assert_eq!(&watcher.told, &watcher.expected(&world.made, last));
        }
        let everybody = world.watchers.len();
        prop_assert_eq!(world.groups.watchers(), everybody);
        (0..everybody).for_each(|_| world.leave(0));
        prop_assert!(!world.groups.waiting() && world.groups.in_round() == 0);
    }
}
