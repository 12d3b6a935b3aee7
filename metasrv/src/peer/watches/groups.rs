//! Who watches what, and what is to be told to whom: pure, but for the channels that wake watchers.
//!
//! Watchers of one prefix are a group, in shards of at most [`SHARD`], which are woken together. A change is looked up by
//! the beginnings of its keys, one hash for each length of prefix in use. It is put down once for a group; each of the
//! group's shards takes its place in one queue, first come, first served. The shard's turn makes of all that was put down
//! since its last turn one message; shards of the same group that are as far get the same one.
//!
//! What is put down for one group is bounded by [`MESSAGE_BYTES`]: beyond it the shards are only told to look at the kept
//! changes themselves.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use lake_proto::kv::Revision;
use lake_proto::v1;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::message::{self, Message};
use super::pace::UNCHANGED_AFTER;
use super::{MESSAGE_BYTES, SCAN_EVENTS};
use crate::state::changes::Change;

/// Watchers that are woken together: so many messages are handed out before whoever else has something to do has a turn.
pub const SHARD: usize = 16;
/// Signals that a watcher may be behind before it has to look at the kept changes.
const SIGNALS: usize = 8;

/// Wakes a shard's watchers.
#[derive(Debug, Clone)]
pub struct Signal {
    /// Every change under the prefix after this revision ...
    pub after: Revision,
    /// ... up to this one is in the message.
    pub upto: Revision,
    pub what: What,
}

/// What a signal brings.
#[derive(Debug, Clone)]
pub enum What {
    /// A message for all; gone when it was not taken in time.
    Message { message: Weak<Message>, first: Option<Revision> },
    /// Look at the kept changes.
    Look,
}

impl Signal {
    fn of(message: &Arc<Message>) -> Self {
        let what = What::Message { message: Arc::downgrade(message), first: message.first };
        Self { after: message.after, upto: message.upto, what }
    }
}

/// What a watcher whose next revision is `next` does with a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Has seen all that it tells.
    Skip,
    /// Takes the message as it is.
    Take,
    /// Looks at the kept changes: the message begins too late, or before what it still wants.
    Look,
}

impl Signal {
    /// What a watcher does with it.
    pub fn place(&self, next: Revision) -> Place {
        match self.what {
            // That the peer still follows may be told again.
            What::Message { first: None, .. } if self.after < next && self.upto + 1 == next => Place::Take,
            _ if self.upto < next => Place::Skip,
            What::Message { first, .. } if self.after < next && first.is_none_or(|first| first >= next) => Place::Take,
            _ => Place::Look,
        }
    }
}

/// A watcher's membership.
pub struct Joined {
    pub prefix: Arc<str>,
    pub shard: u64,
    pub signals: broadcast::Receiver<Signal>,
}

/// A signal that is due.
pub struct Due {
    pub to: broadcast::Sender<Signal>,
    pub watchers: usize,
    pub signal: Signal,
    /// Must be kept for the watchers to find it.
    pub message: Option<Arc<Message>>,
}

#[derive(Debug)]
struct Shard {
    signals: broadcast::Sender<Signal>,
    watchers: usize,
    /// Told everything up to here.
    told: Revision,
    told_at: Instant,
    queued: bool,
}

#[derive(Debug, Default)]
struct Group {
    shards: BTreeMap<u64, Shard>,
    /// Shards in the queue.
    waiting: usize,
    /// Changes under the prefix that some shard has yet to be told of.
    pending: Vec<Change>,
    pending_bytes: u64,
    pending_events: usize,
    /// Changes up to this revision were not put down.
    left_out: Revision,
    /// The newest change under the prefix.
    newest: Revision,
    /// What the shard before was given.
    prepared: Weak<Message>,
}

impl Group {
    fn told_all(&mut self) {
        self.pending = vec![];
        (self.pending_bytes, self.pending_events) = (0, 0);
    }
}

/// All watchers of one peer.
#[derive(Debug, Default)]
pub struct Groups {
    by_prefix: HashMap<Arc<str>, Group>,
    /// How many prefixes of each length there are.
    lengths: BTreeMap<usize, usize>,
    /// Shards that have something to be told.
    queue: VecDeque<(Arc<str>, u64)>,
    /// All shards, the one whose mark is due next first.
    marks: VecDeque<(Arc<str>, u64)>,
    /// The mark that the shard before was given.
    mark: Weak<Message>,
    watchers: usize,
    next_shard: u64,
    /// Changes up to this revision have been put down.
    position: Revision,
}

impl Groups {
    pub fn watchers(&self) -> usize {
        self.watchers
    }

    pub fn position(&self) -> Revision {
        self.position
    }

    /// Whether any shard has something to be told.
    pub fn waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// One more watcher.
    pub fn join(&mut self, prefix: &str, now: Instant) -> Joined {
        let prefix = match self.by_prefix.get_key_value(prefix) {
            Some((prefix, _)) => prefix.clone(),
            None => {
                let prefix: Arc<str> = prefix.into();
                self.by_prefix.insert(prefix.clone(), Group::default());
                *self.lengths.entry(prefix.len()).or_default() += 1;
                prefix
            }
        };
        let group = self.by_prefix.entry(prefix.clone()).or_default();
        self.watchers += 1;
        if let Some((id, shard)) = group.shards.iter_mut().find(|(_, shard)| shard.watchers < SHARD) {
            shard.watchers += 1;
            return Joined { prefix, shard: *id, signals: shard.signals.subscribe() };
        }
        self.next_shard += 1;
        let (sender, signals) = broadcast::channel(SIGNALS);
        let shard = Shard { signals: sender, watchers: 1, told: self.position, told_at: now, queued: false };
        group.shards.insert(self.next_shard, shard);
        self.marks.push_back((prefix.clone(), self.next_shard));
        Joined { prefix, shard: self.next_shard, signals }
    }

    /// One watcher less.
    pub fn leave(&mut self, prefix: &str, shard: u64) {
        let Some(group) = self.by_prefix.get_mut(prefix) else { return };
        let Some(left) = group.shards.get_mut(&shard) else { return };
        self.watchers -= 1;
        left.watchers -= 1;
        if left.watchers > 0 {
            return;
        }
        if left.queued {
            group.waiting -= 1;
        }
        group.shards.remove(&shard);
        if group.waiting == 0 {
            group.told_all();
        }
        if group.shards.is_empty() {
            self.by_prefix.remove(prefix);
            if let Some(count) = self.lengths.get_mut(&prefix.len()) {
                *count -= 1;
                if *count == 0 {
                    self.lengths.remove(&prefix.len());
                }
            }
        }
        if self.by_prefix.is_empty() {
            // Whoever comes next finds no traces.
            self.clear();
        }
    }

    /// Ends all watchers' channels.
    pub fn clear(&mut self) {
        *self = Self { next_shard: self.next_shard, position: self.position, ..Self::default() };
    }

    /// Puts down a change, which is newer than all before.
    pub fn put_down(&mut self, change: &Change) {
        if change.revision <= self.position {
            return;
        }
        let mut last: Option<&str> = None;
        for event in change.events() {
            let key = event.key();
            // Keys come in order: most of a transaction's lie under the same prefixes as the key before.
            let same = last.map_or(0, |last| common(last, key));
            last = Some(key);
            for &len in self.lengths.keys().take_while(|len| **len <= key.len()) {
                if len <= same && len > 0 {
                    continue;
                }
                if !key.is_char_boundary(len) {
                    continue;
                }
                if let Some((prefix, group)) = get_with_prefix(&mut self.by_prefix, &key[..len]) {
                    put_down(&mut self.queue, &prefix, group, change);
                }
            }
        }
        self.position = change.revision;
    }

    /// There was nothing else up to this revision.
    pub fn moved(&mut self, revision: Revision) {
        self.position = self.position.max(revision);
    }

    /// Changes up to this revision are no longer kept: everybody has to look.
    pub fn jumped(&mut self, revision: Revision) {
        for (prefix, group) in &mut self.by_prefix {
            group.told_all();
            group.left_out = revision;
            group.newest = revision;
            enqueue(&mut self.queue, prefix, group);
        }
        self.moved(revision);
    }

    /// What the shard whose turn it is, is to be told.
    pub fn next_due(&mut self, now: Instant, header: impl Fn(Revision) -> v1::ResponseHeader) -> Option<Due> {
        loop {
            let (prefix, id) = self.queue.pop_front()?;
            let Some(group) = self.by_prefix.get_mut(&prefix) else { continue };
            let Some(shard) = group.shards.get_mut(&id).filter(|shard| shard.queued) else { continue };
            shard.queued = false;
            group.waiting -= 1;
            let message = if shard.told < group.left_out {
                None
            } else {
                let prepared = group.prepared.upgrade();
                let fits = |message: &Arc<Message>| message.after == shard.told && message.upto >= group.newest;
                let message = prepared.filter(fits).unwrap_or_else(|| {
                    let new = group.pending.iter().filter(|change| change.revision > shard.told);
                    let changes = new.filter_map(|change| message::under(change, &prefix)).collect();
                    Arc::new(Message::new(header(self.position), changes, shard.told, self.position))
                });
                group.prepared = Arc::downgrade(&message);
                Some(message)
            };
            let signal = match &message {
                Some(message) => Signal::of(message),
                None => Signal { after: shard.told, upto: self.position, what: What::Look },
            };
            shard.told = signal.upto;
            shard.told_at = now;
            let due = Due { to: shard.signals.clone(), watchers: shard.watchers, signal, message };
            if group.waiting == 0 {
                group.told_all();
            }
            return Some(due);
        }
    }

    /// Shards in the round of marks.
    pub fn in_round(&self) -> usize {
        self.marks.len()
    }

    /// Looks at the shard whose turn in the round of marks it is. `None`: it needs no mark now.
    pub fn next_mark(
        &mut self,
        now: Instant,
        interval: Duration,
        header: impl Fn(Revision) -> v1::ResponseHeader,
    ) -> Option<Due> {
        let (prefix, id) = self.marks.pop_front()?;
        let shard = self.by_prefix.get_mut(&prefix).and_then(|group| group.shards.get_mut(&id))?;
        self.marks.push_back((prefix, id));
        let silent = now.saturating_duration_since(shard.told_at);
        let news = shard.told < self.position;
        if shard.queued || silent < interval || (!news && silent < interval * UNCHANGED_AFTER) {
            return None;
        }
        let prepared = self.mark.upgrade().filter(|mark| mark.after == shard.told && mark.upto == self.position);
        let message = prepared
            .unwrap_or_else(|| Arc::new(Message::new(header(self.position), vec![], shard.told, self.position)));
        self.mark = Arc::downgrade(&message);
        shard.told = self.position;
        shard.told_at = now;
        let (to, watchers) = (shard.signals.clone(), shard.watchers);
        Some(Due { to, watchers, signal: Signal::of(&message), message: Some(message) })
    }
}

/// Length of what two keys have in common.
fn common(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}

fn get_with_prefix<'a>(groups: &'a mut HashMap<Arc<str>, Group>, prefix: &str) -> Option<(Arc<str>, &'a mut Group)> {
    let prefix = groups.get_key_value(prefix)?.0.clone();
    let group = groups.get_mut(&prefix)?;
    Some((prefix, group))
}

fn put_down(queue: &mut VecDeque<(Arc<str>, u64)>, prefix: &Arc<str>, group: &mut Group, change: &Change) {
    // Under the empty prefix every event leads here.
    if group.newest == change.revision {
        return;
    }
    group.newest = change.revision;
    group.pending_bytes += message::size(change);
    group.pending_events += change.events().len();
    if group.pending_bytes > MESSAGE_BYTES || group.pending_events > SCAN_EVENTS {
        group.told_all();
        group.left_out = change.revision;
    } else {
        group.pending.push(change.clone());
    }
    enqueue(queue, prefix, group);
}

fn enqueue(queue: &mut VecDeque<(Arc<str>, u64)>, prefix: &Arc<str>, group: &mut Group) {
    for (id, shard) in group.shards.iter_mut().filter(|(_, shard)| !shard.queued) {
        shard.queued = true;
        group.waiting += 1;
        queue.push_back((prefix.clone(), *id));
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};
    use lake_proto::watch::Changes;
    use prost::Message as _;

    use super::*;
    use crate::state::State;

    fn header(revision: Revision) -> v1::ResponseHeader {
        v1::ResponseHeader { revision, ..v1::ResponseHeader::default() }
    }

    /// A state whose changes go to the groups.
    #[derive(Default)]
    struct Fed {
        state: State,
        groups: Groups,
    }

    impl Fed {
        fn write(&mut self, keys: &[&str], len: usize) -> Revision {
            let then = keys.iter().map(|key| Op::put(*key, vec![1; len])).collect();
            self.state.run(1, &Txn { then, ..Txn::default() });
            let changes: Vec<_> = self.state.changes().from(self.groups.position() + 1).unwrap().cloned().collect();
            for change in &changes {
                self.groups.put_down(change);
            }
            self.state.revision()
        }

        /// Tells everybody everything that is due.
        fn tell(&mut self) -> Vec<Arc<Message>> {
            let mut kept = vec![];
            while let Some(due) = self.groups.next_due(Instant::now(), header) {
                kept.extend(due.message);
                assert!(due.to.send(due.signal).is_ok());
            }
            kept
        }
    }

    fn received(joined: &mut Joined) -> Vec<Revision> {
        let mut revisions = vec![];
        while let Ok(signal) = joined.signals.try_recv() {
            let What::Message { message, .. } = signal.what else { panic!("told to look") };
            let response = v1::WatchResponse::decode(message.upgrade().unwrap().encoded()).unwrap();
            revisions.extend(Changes::try_from(response).unwrap().changes.iter().map(|change| change.revision));
        }
        revisions
    }

    #[test]
    fn a_change_reaches_every_prefix_it_lies_under_once() {
        let mut fed = Fed::default();
        let prefixes = ["", "/", "/kv/", "/kv/a", "/kv/a/", "/kv/aé", "/kv/b/1", "/kv/a/1/longer than the key", "x"];
        let mut joined: Vec<_> = prefixes.iter().map(|prefix| fed.groups.join(prefix, Instant::now())).collect();
        let keys = ["/kv/a/1", "/kv/aé", "/kv/aè", "/kv/b/1", "/kv/b/12", "/kv/c"];
        for key in keys {
            fed.write(&[key], 1);
        }
        let many = fed.write(&keys, 1);
        let _kept = fed.tell();
        for (prefix, joined) in prefixes.iter().zip(&mut joined) {
            let mut expected: Vec<_> =
                (1..).zip(keys).filter(|(_, key)| key.starts_with(prefix)).map(|(revision, _)| revision).collect();
            if !expected.is_empty() {
                expected.push(many);
            }
            assert_eq!(received(joined), expected, "{prefix:?}");
        }
    }

    #[test]
    fn watchers_of_a_prefix_share_one_message_across_their_shards() {
        let mut fed = Fed::default();
        let mut joined: Vec<_> = (0..3 * SHARD).map(|_| fed.groups.join("/kv/", Instant::now())).collect();
        let late = fed.write(&["/kv/a"], 1);
        fed.write(&["/kv/b"], 1);
        let kept = fed.tell();
        assert_eq!(kept.len(), 3, "one for each shard");
        assert!(kept.iter().all(|message| Arc::ptr_eq(message, &kept[0])));
        for joined in &mut joined {
            assert_eq!(received(joined), [late, late + 1]);
        }
        assert!(fed.groups.by_prefix["/kv/"].pending.is_empty());
    }

    #[test]
    fn what_is_too_large_to_share_has_to_be_looked_up() {
        let mut fed = Fed::default();
        let mut joined = fed.groups.join("/kv/", Instant::now());
        for _ in 0..20 {
            fed.write(&["/kv/a"], 100 << 10);
        }
        assert!(fed.groups.by_prefix["/kv/"].pending_bytes <= MESSAGE_BYTES);
        assert!(fed.tell().is_empty());
        let signal = joined.signals.try_recv().unwrap();
        assert_eq!((signal.after, signal.upto, signal.place(1)), (0, 20, Place::Look));
        let small = fed.write(&["/kv/a"], 1);
        let _kept = fed.tell();
        assert_eq!(received(&mut joined), [small], "what comes later is shared again");
        fed.groups.jumped(100);
        assert!(fed.tell().is_empty());
        assert_eq!(joined.signals.try_recv().unwrap().place(small + 1), Place::Look);
        assert_eq!(fed.groups.position(), 100);
    }

    #[test]
    fn who_leaves_leaves_nothing_behind() {
        let mut fed = Fed::default();
        let all: Vec<_> = (0..300).map(|i| fed.groups.join(&format!("/kv/{}", i % 3), Instant::now())).collect();
        fed.write(&["/kv/0", "/kv/1"], 1);
        for (left, joined) in all.iter().enumerate() {
            assert_eq!(fed.groups.watchers(), 300 - left);
            fed.groups.leave(&joined.prefix, joined.shard);
        }
        fed.groups.leave("/kv/0", 1);
        let groups = &fed.groups;
        assert!(groups.by_prefix.is_empty() && groups.lengths.is_empty() && groups.watchers() == 0);
        assert!(groups.queue.is_empty() && groups.marks.is_empty());
    }

    #[test]
    fn marks_tell_progress_to_those_that_heard_nothing() {
        let mut fed = Fed::default();
        let interval = Duration::from_secs(1);
        let start = Instant::now();
        let mut quiet = fed.groups.join("/kv/quiet/", start);
        let mut busy = fed.groups.join("/kv/busy/", start);
        let revision = fed.write(&["/kv/busy/1"], 1);
        let marks = |fed: &mut Fed, at: Duration| {
            let now = start + at;
            let due: Vec<_> = (0..2).filter_map(|_| fed.groups.next_mark(now, interval, header)).collect();
            due.into_iter()
                .map(|due| (due.signal.upto, due.to.send(due.signal).unwrap(), due.message))
                .collect::<Vec<_>>()
        };
        assert!(marks(&mut fed, Duration::from_millis(999)).is_empty());
        let told = marks(&mut fed, interval);
        assert_eq!((told.len(), told[0].0), (1, revision), "a shard with changes to come gets those");
        let signal = quiet.signals.try_recv().unwrap();
        assert_eq!(
            (signal.place(1), signal.place(revision + 1), signal.place(revision + 2)),
            (Place::Take, Place::Take, Place::Skip)
        );
        let _kept = fed.tell();
        assert_eq!(received(&mut busy), [revision]);
        assert!(marks(&mut fed, 5 * interval).is_empty(), "nothing new");
        assert_eq!(marks(&mut fed, 12 * interval).len(), 2, "but the peer still follows");
    }

    #[test]
    fn a_watcher_takes_what_follows_its_place_and_looks_otherwise() {
        let place = |after, upto, first: Option<Revision>, next| {
            Signal { after, upto, what: What::Message { message: Weak::new(), first } }.place(next)
        };
        assert_eq!(place(10, 20, Some(15), 11), Place::Take);
        assert_eq!(place(10, 20, Some(15), 13), Place::Take, "the message has nothing that it has seen");
        assert_eq!(place(10, 20, Some(15), 16), Place::Look, "the message begins before its place");
        assert_eq!(place(10, 20, Some(15), 10), Place::Look, "a message is missing in between");
        assert_eq!(place(10, 20, Some(15), 21), Place::Skip);
        assert_eq!(place(10, 20, Some(20), 20), Place::Take);
        assert_eq!(place(10, 20, None, 16), Place::Take);
        assert_eq!(place(10, 20, None, 10), Place::Look);
        assert_eq!(place(20, 20, None, 21), Place::Take);
        assert_eq!(place(20, 20, None, 22), Place::Skip);
    }
}
