//! What anybody may do with procedures, on any store that has a leader who runs them: all of it is reading and
//! compare-and-set of their entries.

use std::time::{Duration, Instant};

use lake_proto::coordination::Scope;
use lake_proto::kv::Revision;

use super::{PROCEDURES, Procedure, Record, State, key, note};
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Applied, Error, InVain, Leader, MetaStore, Read, ReadOptions};

/// How often a procedure that is waited for is looked at, at most.
const LOOK: Duration = Duration::from_millis(200);

/// What came of submitting a procedure.
#[derive(Debug, Clone, PartialEq)]
pub enum Submitted {
    /// It is there since this revision.
    New(Revision),
    /// There is one of this id already.
    Known(Box<Procedure>),
    /// These scopes stand in its way; nothing was done.
    Taken(Vec<Scope>),
}

/// What came of asking for a change of a procedure.
#[derive(Debug, Clone, PartialEq)]
pub enum Asked {
    /// It is as it now is.
    Now(Box<Procedure>),
    /// There is none of this id.
    NotFound,
    /// That cannot be asked for in the state that it is in; nothing was done.
    NotNow(Box<Procedure>),
}

/// What becomes of a poisoned procedure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clear {
    /// It goes on with the step at which it stands.
    Retry,
    /// It ends as failed, and its scopes go.
    GiveUp,
}

/// All procedures, in order of their ids.
///
/// # Errors
/// The store's.
pub async fn list(
    store: &dyn MetaStore,
    options: ReadOptions,
    deadline: Instant,
) -> Result<Read<Vec<Procedure>>, Error> {
    let read = store.list_all(PROCEDURES, options, deadline).await?;
    Ok(Read { revision: read.revision, value: read.value.iter().filter_map(Procedure::of).collect() })
}

/// One of them.
///
/// # Errors
/// The store's.
pub async fn get(store: &dyn MetaStore, id: &str, deadline: Instant) -> Result<Option<Procedure>, Error> {
    let read = store.get(&key(id), ReadOptions::default(), deadline).await?;
    Ok(read.value.as_ref().and_then(Procedure::of))
}

/// Submits a procedure by itself. Asked for again, it changes nothing.
///
/// # Errors
/// `Refused` over a limit; the store's.
pub async fn submit(store: &dyn MetaStore, id: &str, record: &Record, deadline: Instant) -> Result<Submitted, Error> {
    super::validate_id(id).and_then(|()| record.validate()).map_err(|invalid| Error::Refused {
        doing: format!("submitting procedure {id}"),
        message: invalid.to_string(),
    })?;
    let committed = store.commit(record.submission(id), deadline).await?;
    let result = committed.result;
    if result.succeeded {
        return Ok(Submitted::New(result.revision));
    }
    match result.observed.iter().find(|entry| entry.key == key(id)).and_then(Procedure::of) {
        Some(known) => Ok(Submitted::Known(Box::new(known))),
        None => Ok(Submitted::Taken(result.conflicts)),
    }
}

/// Waits until a procedure has ended, or is poisoned. `None`: there is none of this id. The last that was seen, when
/// the deadline comes first.
///
/// # Errors
/// The store's.
pub async fn wait(store: &dyn MetaStore, id: &str, deadline: Instant) -> Result<Option<Procedure>, Error> {
    let mut last = None;
    loop {
        let had = deadline.saturating_duration_since(clock::now());
        let seen = match (get(store, id, deadline).await, last) {
            (Ok(Some(seen)), _) => seen,
            (Ok(None), _) => return Ok(None),
            (Err(e), Some(last)) if e.is_of_a_last_look(had) => return Ok(Some(last)),
            (Err(e), _) => return Err(e),
        };
        if seen.record.state != State::Active || clock::now() + LOOK >= deadline {
            return Ok(Some(seen));
        }
        last = Some(seen);
        tokio::time::sleep(LOOK).await;
    }
}

/// Asks for a procedure to be cancelled. Whether it still can be is the leader's to say: in its state and its note.
///
/// # Errors
/// The store's.
pub async fn cancel(store: &dyn MetaStore, id: &str, deadline: Instant) -> Result<Asked, Error> {
    change(store, id, deadline, |record| {
        (record.state == State::Active).then(|| Record { cancel: true, ..record.clone() })
    })
    .await
}

/// Clears a poisoned procedure.
///
/// # Errors
/// The store's.
pub async fn clear(store: &dyn MetaStore, id: &str, how: Clear, deadline: Instant) -> Result<Asked, Error> {
    change(store, id, deadline, |record| {
        if record.state != State::Poisoned {
            return None;
        }
        let cleared = Record { failures: 0, deadline_ms: None, changed_unix_ms: unix_ms(), ..record.clone() };
        Some(match how {
            Clear::Retry => Record { state: State::Active, note: String::new(), ..cleared },
            Clear::GiveUp => {
                Record { state: State::Failed, note: note(format!("given up: {}", record.note)), ..cleared }
            }
        })
    })
    .await
}

/// Milliseconds since 1970, for people.
pub fn unix_ms() -> u64 {
    u64::try_from(clock::wall().as_millis()).unwrap_or(u64::MAX)
}

async fn change(
    store: &dyn MetaStore,
    id: &str,
    deadline: Instant,
    to: impl Fn(&Record) -> Option<Record>,
) -> Result<Asked, Error> {
    let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
    // An attempt whose answer was lost.
    let mut sent: Option<Record> = None;
    let in_doubt = |attempts, last: String| {
        let (doing, elapsed) = (format!("changing procedure {id}"), clock::since(started));
        InVain { doing, attempts, elapsed, leader: Leader::Without, last }.in_doubt()
    };
    let failed = |error: Error, sent: &Option<Record>, attempts| match sent {
        Some(_) if error.applied() == Applied::No => in_doubt(attempts, error.to_string()),
        _ => error,
    };
    loop {
        attempts += 1;
        let seen = get(store, id, deadline).await.map_err(|e| failed(e, &sent, attempts))?;
        let Some(seen) = seen else { return Ok(Asked::NotFound) };
        if sent.as_ref() == Some(&seen.record) {
            return Ok(Asked::Now(Box::new(seen)));
        }
        let Some(record) = to(&seen.record) else {
            return Ok(match sent {
                // It may have been done, and have gone on from there.
                Some(_) => Asked::Now(Box::new(seen)),
                None => Asked::NotNow(Box::new(seen)),
            });
        };
        if record == seen.record {
            return Ok(Asked::Now(Box::new(seen)));
        }
        let committed = store.commit(record.change(id, seen.mod_revision), deadline).await;
        let committed = committed.map_err(|e| failed(e, &sent, attempts))?;
        if committed.result.succeeded {
            let mod_revision = committed.result.revision;
            return Ok(Asked::Now(Box::new(Procedure { mod_revision, record, ..seen })));
        }
        if committed.resent {
            sent = Some(record);
        }
        // The leader was first: what it made of it decides.
        if !backoff.wait(deadline).await {
            return match sent {
                Some(_) => Err(in_doubt(attempts, "it was changed by others".to_owned())),
                None => Ok(Asked::NotNow(Box::new(seen))),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::faulty::{FaultyStore, soon};
    use crate::memory::MemoryStore;

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_told_what_was_seen_last_though_the_last_look_comes_too_late() {
        let store = FaultyStore::default();
        let record = Record::new("k", "s", "first", super::super::kept(&()), 1);
        submit(&store, "p", &record, soon()).await.unwrap();
        store.slow_gets.store(true, Ordering::SeqCst);
        // Deadlines before, in the middle of and behind a look.
        for more in 0..250 {
            let by = clock::now() + Duration::from_millis(500 + more);
            let seen = wait(&store, "p", by).await.unwrap_or_else(|e| panic!("{more} ms more: {e}"));
            assert_eq!(seen.unwrap().record.state, State::Active);
        }
        // Nothing was ever seen.
        let by = clock::now() + Duration::from_millis(10);
        assert!(wait(&store, "p", by).await.unwrap_err().is_unavailable());
    }

    #[tokio::test]
    async fn a_change_whose_answer_was_lost_is_known_for_ones_own() {
        let store = FaultyStore::default();
        let record = Record::new("k", "s", "first", super::super::kept(&()), 1);
        let Submitted::New(revision) = submit(&store, "p", &record, soon()).await.unwrap() else { panic!() };
        let poisoned = Record { state: State::Poisoned, ..record };
        store.commit(poisoned.change("p", revision), soon()).await.unwrap();
        store.lose_answers.store(1, Ordering::SeqCst);
        let asked = clear(&store, "p", Clear::Retry, soon()).await.unwrap();
        let Asked::Now(now) = asked else { panic!("{asked:?}") };
        assert_eq!(now.record.state, State::Active);

        // By the time it is looked at again it has gone on from there.
        let poisoned_at = store.commit(poisoned.change("p", now.mod_revision), soon()).await.unwrap().result.revision;
        let gone_on = Record { failures: 3, ..now.record };
        *store.overtakes.lock().unwrap() = Some(gone_on.change("p", poisoned_at));
        let asked = clear(&store, "p", Clear::Retry, soon()).await.unwrap();
        assert!(matches!(&asked, Asked::Now(now) if now.record == gone_on), "{asked:?}");

        // There is no time for another look.
        let seen = get(&store, "p", soon()).await.unwrap().unwrap();
        let poisoned_at = store.commit(poisoned.change("p", seen.mod_revision), soon()).await.unwrap().result.revision;
        let noted = Record { note: "why".into(), ..poisoned };
        *store.overtakes.lock().unwrap() = Some(noted.change("p", poisoned_at));
        let unknown = clear(&store, "p", Clear::Retry, clock::now()).await.unwrap_err();
        assert!(matches!(unknown, Error::InDoubt { .. }), "{unknown}");
    }

    #[tokio::test]
    async fn a_procedure_is_submitted_once_and_asked_to_change() {
        let store = MemoryStore::new();
        let record = Record::new("k", "s", "first", super::super::kept(&()), 1);
        let submit = |record: Record| {
            let store = &store;
            async move { submit(store, "p", &record, soon()).await.unwrap() }
        };
        assert!(matches!(submit(record.clone()).await, Submitted::New(_)));
        let other = Record { subject: "other".into(), ..record.clone() };
        assert!(matches!(submit(other).await, Submitted::Known(known) if known.record == record));
        assert_eq!(list(&store, ReadOptions::default(), soon()).await.unwrap().value.len(), 1);

        assert_eq!(cancel(&store, "nobody", soon()).await.unwrap(), Asked::NotFound);
        assert!(matches!(cancel(&store, "p", soon()).await.unwrap(), Asked::Now(p) if p.record.cancel));
        assert!(matches!(cancel(&store, "p", soon()).await.unwrap(), Asked::Now(_)), "asked for again");
        assert!(matches!(clear(&store, "p", Clear::Retry, soon()).await.unwrap(), Asked::NotNow(_)));

        let seen = get(&store, "p", soon()).await.unwrap().unwrap();
        let poisoned = Record { state: State::Poisoned, failures: 9, note: "why".into(), ..seen.record };
        store.commit(poisoned.change("p", seen.mod_revision), soon()).await.unwrap();
        assert!(matches!(cancel(&store, "p", soon()).await.unwrap(), Asked::NotNow(_)));
        let waited = wait(&store, "p", soon()).await.unwrap().unwrap();
        assert_eq!(waited.record.state, State::Poisoned);
        let Asked::Now(again) = clear(&store, "p", Clear::Retry, soon()).await.unwrap() else { panic!() };
        assert_eq!((again.record.state, again.record.failures), (State::Active, 0));
        store.commit(poisoned.change("p", again.mod_revision), soon()).await.unwrap();
        let Asked::Now(over) = clear(&store, "p", Clear::GiveUp, soon()).await.unwrap() else { panic!() };
        assert_eq!((over.record.state, over.record.note.as_str()), (State::Failed, "given up: why"));
        assert_eq!(wait(&store, "nobody", soon()).await.unwrap(), None);
    }
}
