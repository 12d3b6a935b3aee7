//! Writers that write down what they were told of each change, a watcher that does so too, and whether the cluster's own
//! history says the same. That is followed from the start: what else is written meanwhile may be more than changes are kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lake_client::remote::RemoteStore;
use lake_client::store::{Applied, MetaStore};
use lake_proto::kv::Revision;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

use super::hurt::{previous, put};
use super::{PATIENCE, eventually};

const PREFIX: &str = "/kv/ledger/";
/// For a change that is to get through.
const PATIENT: Duration = PATIENCE;

/// How late after its deadline a call ends at most. On a machine that stands still for a while each writer's call is later once.
const LATE: Duration = Duration::from_secs(3);
/// How often that may be so.
const LATE_ONCE_IN: usize = 10;

/// What a writer was told of one change.
#[derive(Debug, Clone, PartialEq)]
enum Told {
    /// Done, at this revision, in the place of what was changed at that one.
    Done(Revision, Option<Revision>),
    NotApplied,
    Unknown,
}

#[derive(Debug, Default)]
struct Counts {
    done: AtomicU64,
    not_applied: AtomicU64,
    unknown: AtomicU64,
    /// Of all of them, those that ended later than they may.
    late: AtomicU64,
}

/// Changes in order, each a revision, a key and its value.
type History = Vec<(Revision, String, String)>;

/// Writers, each with a client and a key of its own, a watcher, and one whom no fault meets.
pub struct Ledger {
    direct: RemoteStore,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    writers: Vec<tokio::task::JoinHandle<Vec<(String, String, Told)>>>,
    /// Up to where the watchers watch, once that is known.
    until: watch::Sender<Revision>,
    watcher: tokio::task::JoinHandle<History>,
    happened: tokio::task::JoinHandle<History>,
}

/// How the changes ended, and how many of those in doubt were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Judged {
    pub done: usize,
    pub not_applied: usize,
    pub unknown: usize,
    pub unknown_and_made: usize,
}

impl Ledger {
    /// Half of the writers are patient, half in a hurry: those see errors. No fault meets `direct`, which says what has
    /// happened. Nothing has been changed after `since` yet.
    pub fn start(stores: Vec<RemoteStore>, watcher: RemoteStore, direct: RemoteStore, since: Revision) -> Self {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let spawn = |(writer, store): (usize, RemoteStore)| {
            let (stop, counts) = (stop.clone(), counts.clone());
            tokio::spawn(write(writer, store, stop, counts))
        };
        let writers = stores.into_iter().enumerate().map(spawn).collect();
        let (until, known) = watch::channel(Revision::MAX);
        let follow = |store: RemoteStore, known| tokio::spawn(async move { history(&store, since + 1, known).await });
        let (watcher, happened) = (follow(watcher, known.clone()), follow(direct.clone(), known));
        Self { direct, stop, counts, writers, until, watcher, happened }
    }

    /// Changes that were done so far.
    pub fn done(&self) -> u64 {
        self.counts.done.load(Ordering::Relaxed)
    }

    /// Changes so far that were said not to have been made.
    pub fn not_applied(&self) -> u64 {
        self.counts.not_applied.load(Ordering::Relaxed)
    }

    /// Waits for so many more changes to be done.
    pub async fn grows_by(&self, n: u64) {
        let wanted = self.done() + n;
        eventually("more changes to be done", async || (self.done() >= wanted).then_some(())).await;
    }

    /// Stops the writers, and holds what they and the watcher were told against what happened.
    pub async fn judge(self) -> Judged {
        self.stop.store(true, Ordering::Relaxed);
        let mut told = Vec::new();
        let writers = self.writers.len();
        for writer in self.writers {
            told.push(writer.await.unwrap());
        }
        let (late, calls) = (self.counts.late.load(Ordering::Relaxed), told.iter().map(Vec::len).sum::<usize>());
        let most = (calls / LATE_ONCE_IN).max(2 * writers);
        assert!(late as usize <= most, "{late} of {calls} calls ended more than {LATE:?} after their deadlines");
        let ends = put("/kv/ledger-ends", "");
        let until = self.direct.commit(ends, Instant::now() + PATIENCE).await.unwrap().result.revision;
        self.until.send_replace(until);
        // What was given up may be done at any time after that.
        let up_to = async |watcher: tokio::task::JoinHandle<History>| {
            let history = tokio::time::timeout(PATIENCE, watcher).await.expect("a watcher in time").unwrap();
            history.into_iter().filter(|change| change.0 <= until).collect::<History>()
        };
        let happened = up_to(self.happened).await;
        assert!(up_to(self.watcher).await == happened, "the watcher was told something else than happened");
        let mut made: BTreeMap<(String, String), Vec<Revision>> = BTreeMap::new();
        let mut of_key: BTreeMap<String, Vec<Revision>> = BTreeMap::new();
        for (revision, key, value) in happened {
            made.entry((key.clone(), value)).or_default().push(revision);
            of_key.entry(key).or_default().push(revision);
        }
        let mut judged = Judged { done: 0, not_applied: 0, unknown: 0, unknown_and_made: 0 };
        for (key, value, told) in told.into_iter().flatten() {
            let revisions = made.remove(&(key.clone(), value.clone())).unwrap_or_default();
            match told {
                Told::Done(revision, replaced) => {
                    assert_eq!(revisions, [revision], "{value} of {key} was acknowledged: lost, or doubled");
                    let before = of_key[&key].iter().rev().find(|at| **at < revision).copied();
                    assert_eq!(replaced, before, "{value} of {key} replaced something else than it was told");
                    judged.done += 1;
                }
                Told::NotApplied => {
                    assert!(revisions.is_empty(), "{value} of {key} was said not to be made, and is at {revisions:?}");
                    judged.not_applied += 1;
                }
                Told::Unknown => {
                    assert!(revisions.len() < 2, "{value} of {key} was made at {revisions:?}");
                    judged.unknown += 1;
                    judged.unknown_and_made += revisions.len();
                }
            }
        }
        assert!(made.is_empty(), "nobody has written {made:?}");
        judged
    }
}

/// Every change of the writers' keys from a revision up to the one that `until` says in the end.
async fn history(store: &RemoteStore, from: Revision, until: watch::Receiver<Revision>) -> History {
    let mut history = Vec::new();
    let mut changes = store.watch(PREFIX, from).unwrap();
    let mut progress = 0;
    while progress < *until.borrow() {
        let message = changes.next().await.unwrap().unwrap();
        progress = message.progress;
        for change in message.changes {
            for event in change.events {
                let value = event.entry.map(|entry| String::from_utf8(entry.value.to_vec()).unwrap());
                history.push((change.revision, event.key, value.expect("nobody deletes")));
            }
        }
    }
    history
}

async fn write(
    writer: usize,
    store: RemoteStore,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
) -> Vec<(String, String, Told)> {
    let key = format!("{PREFIX}{writer}");
    let mut rng = StdRng::seed_from_u64(writer as u64);
    let mut all = Vec::new();
    for n in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let patience = if writer.is_multiple_of(2) { PATIENT } else { Duration::from_millis(rng.random_range(5..300)) };
        let value = n.to_string();
        let began = Instant::now();
        let ended = store.commit(put(&key, &value), began + patience).await;
        counts.late.fetch_add(u64::from(began.elapsed() > patience + LATE), Ordering::Relaxed);
        let told = match ended {
            Ok(done) => {
                assert!(done.result.succeeded && !done.resent, "{done:?}");
                counts.done.fetch_add(1, Ordering::Relaxed);
                Told::Done(done.result.revision, previous(&done).map(|entry| entry.mod_revision))
            }
            Err(error) => {
                assert!(patience < PATIENT, "a change that had {PATIENT:?}: {error}");
                let message = error.to_string();
                for said in ["attempts in", "leader", &key] {
                    assert!(message.contains(said), "{said:?} is missing from {message:?}");
                }
                let (told, count) = match error.applied() {
                    Applied::No => (Told::NotApplied, &counts.not_applied),
                    Applied::Unknown => (Told::Unknown, &counts.unknown),
                };
                count.fetch_add(1, Ordering::Relaxed);
                told
            }
        };
        all.push((key.clone(), value, told));
    }
    all
}
