//! What a client is told when the metadata does not answer: that nothing was done only where that is so, and that the outcome is
//! unknown only where it is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use lake_client::Error;
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Committed, SharedStore};
use lake_proto::kv::{Op, Txn};
use serde_json::{Value, json};

use crate::common::store::{Through, Way, unavailable};
use crate::http::{Answer, Http};
use crate::wire::{TABLES, schema, set, with_table};
use crate::{over, rest};

/// What happens to the next change of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    NotSent,
    /// It is made, or not, and no answer comes.
    NoAnswer {
        made: bool,
        /// And nothing can be asked any more, either.
        away: bool,
    },
}

#[derive(Debug, Default)]
struct Faults {
    next: Mutex<Option<Fault>>,
    away: AtomicBool,
}

#[async_trait::async_trait]
impl Way for Faults {
    async fn call(&self, _: &str, _: Instant) -> Result<(), Error> {
        match self.away.load(Ordering::SeqCst) {
            true => Err(unavailable(Applied::No)),
            false => Ok(()),
        }
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let of_table = |op: &Op| matches!(op, Op::Put { key, .. } if key.starts_with("/lake/table/"));
        let fault = match txn.then.iter().any(of_table) {
            true => self.next.lock().unwrap().take(),
            false => None,
        };
        match fault {
            None => store.commit(txn, by).await,
            Some(Fault::NotSent) => Err(unavailable(Applied::No)),
            Some(Fault::NoAnswer { made, away }) => {
                if made {
                    store.commit(txn, by).await?;
                }
                self.away.store(away, Ordering::SeqCst);
                Err(unavailable(Applied::Unknown))
            }
        }
    }
}

const FAULTS: [Fault; 5] = [
    Fault::NotSent,
    Fault::NoAnswer { made: true, away: false },
    Fault::NoAnswer { made: false, away: false },
    Fault::NoAnswer { made: true, away: true },
    Fault::NoAnswer { made: false, away: true },
];

/// Checks what was told of a change that met this fault. Returns whether it must have been made.
fn told(answer: Answer, fault: Fault) -> bool {
    match fault {
        Fault::NotSent => {
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            answer.refused(503, "ServiceUnavailableException");
            false
        }
        // The node finds out, or does it again.
        Fault::NoAnswer { away: false, .. } => {
            answer.expect(200);
            true
        }
        Fault::NoAnswer { made, away: true } => {
            assert_eq!(answer.header("retry-after"), None, "{answer:?}");
            let message = answer.refused(500, "CommitStateUnknownException");
            assert!(message.contains("unknown"), "{message}");
            made
        }
    }
}

/// Sends a change that meets this fault.
async fn hurt(store: &Through<Faults>, rest: &Http, path: &str, body: Value, fault: Fault) -> Answer {
    *store.next.lock().unwrap() = Some(fault);
    let answer = rest.post(path, body).await;
    assert_eq!(*store.next.lock().unwrap(), None, "{fault:?} was met");
    store.away.store(false, Ordering::SeqCst);
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_a_change_is_told_as_it_is() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Faults::default() });
    let cluster = over(store.clone(), 1, |options| options).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let table = format!("{TABLES}/t");
    let versions = async || {
        let metadata = rest.get(&table).await.expect(200).json()["metadata"].clone();
        (metadata["metadata-log"].as_array().map_or(0, Vec::len), metadata["properties"].clone())
    };
    for (n, fault) in FAULTS.into_iter().enumerate() {
        let name = format!("p{n}");
        let (before, _) = versions().await;
        let answer = hurt(&store, &rest, &table, json!({"updates": [set(&name, "1")]}), fault).await;
        let made = told(answer, fault);
        let (after, properties) = versions().await;
        assert_eq!(
            (after - before, properties.get(&name).is_some()),
            (usize::from(made), made),
            "{fault:?}: once or not"
        );

        let name = format!("t{n}");
        let answer = hurt(&store, &rest, TABLES, json!({"name": name, "schema": schema()}), fault).await;
        // A creation whose answer is lost is looked for, and is not made again: it may still be on its way.
        match fault {
            Fault::NoAnswer { made: false, .. } => {
                answer.refused(500, "CommitStateUnknownException");
                rest.head(&format!("{TABLES}/{name}")).await.expect(404);
            }
            _ => {
                let made = told(answer, fault);
                rest.head(&format!("{TABLES}/{name}")).await.expect(if made { 204 } else { 404 });
            }
        }
    }
}
