//! Who lost a race comes back in turn.
//!
//! ```text
//!   commit: 409 --> lost --load--> in line --> has the turn: told the newest version --commit--> made
//!                     | LOST_FOR      | WAIT           | TURN_WITHIN
//!                     v               v                v
//!                  as any other    as any other    the turn has passed
//! ```
//! A commit that is refused since others have committed is built anew by its client: that loads the table, and comes
//! again. Where many do, one of them is made and the others have built in vain, so that with more writers there are
//! fewer commits. So the load of who has just lost waits for its turn, first come, first served; and while it has the
//! turn, which is a claim in the metadata ([`lake_client::catalog`]), nobody else's commit comes between what it was
//! told and what it makes of it. Nothing but time rests on it: who is not known here, or does not come back, is served
//! as ever, and compare-and-set decides.
//!
//! A client is known by its connection. Behind something that sends the requests of many through one, a turn may be
//! another's, who does not want it: it costs the other writers of that table [`TURN_WITHIN`].
//!
//! One turn in [`ROOM_ONE_IN`] begins with a pause in which those who are not in line come to their own: commits that
//! conflict with nothing, SQL's, and other nodes'.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lake_client::catalog::TableIdent;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::Rest;
use crate::table::commit::{TURN_POLL, await_turn};
use crate::table::queue::{CommitQueues, Turn};

/// How long a client that has lost is expected back. Clients wait longer and longer before they do: PyIceberg at last
/// 0.8 s, and the Java client at first less.
const LOST_FOR: Duration = Duration::from_secs(10);
/// Most clients and tables that are remembered so; more are served as any other.
const MAX_LOST: usize = 4096;
/// Most loads that wait, of all tables together: they take up requests that the node serves.
const MAX_WAITING: usize = 96;
/// How long a load waits for its turn at most: as many turns as there are writers who come back, and less than clients wait for
/// an answer (DuckDB 30 s, others longer). Whoever is let go without a turn has probably lost again.
const WAIT: Duration = Duration::from_secs(20);
/// How long a turn lasts in which nothing is committed.
const TURN_WITHIN: Duration = Duration::from_secs(1);
/// After one turn in so many there is room for others ...
const ROOM_ONE_IN: u32 = 4;
/// ... for as long as it takes them to notice.
const ROOM: Duration = TURN_POLL.saturating_mul(4);

/// Who sends a request: the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Client(SocketAddr);

impl Client {
    /// The one at the other end.
    pub fn at(address: SocketAddr) -> Self {
        Self(address)
    }
}

type Key = (Client, TableIdent);

/// The turn of a client that has been told a table's newest version.
#[derive(Debug)]
pub struct Held {
    pub table: Uuid,
    /// In the metadata.
    pub claim: u64,
    number: u64,
    /// The next in line waits for this to be dropped.
    _place: Turn,
}

#[derive(Debug, Default)]
struct State {
    lost: HashMap<Key, Instant>,
    held: HashMap<Key, Held>,
    /// Turns so far.
    turns: u64,
}

/// Those who have lost, those in line, and those whose turn it is.
#[derive(Debug, Clone)]
pub struct Comebacks {
    state: Arc<Mutex<State>>,
    line: CommitQueues,
    waiting: Arc<Semaphore>,
}

impl Default for Comebacks {
    fn default() -> Self {
        Self { state: Arc::default(), line: CommitQueues::default(), waiting: Arc::new(Semaphore::new(MAX_WAITING)) }
    }
}

impl Comebacks {
    /// A client's commit to a table was refused, since others have committed.
    pub fn lost(&self, client: Option<Client>, table: &TableIdent) {
        let Some(client) = client else { return };
        let now = Instant::now();
        let mut state = self.lock();
        if state.lost.len() >= MAX_LOST {
            state.lost.retain(|_, at| now.duration_since(*at) < LOST_FOR);
        }
        if state.lost.len() < MAX_LOST {
            state.lost.insert((client, table.clone()), now);
        }
    }

    /// The turn of a client to commit to a table, which is over with this commit.
    pub fn turn(&self, client: Option<Client>, table: &TableIdent) -> Option<Held> {
        self.lock().held.remove(&(client?, table.clone()))
    }

    /// The claim of who has the turn of a table on this node.
    pub fn claim(&self, table: Uuid) -> Option<u64> {
        self.lock().held.values().find(|held| held.table == table).map(|held| held.claim)
    }

    /// Whether somebody waits for a turn of a table, has it, or is committing in it.
    pub fn is_awaited(&self, table: Uuid) -> bool {
        self.line.is_taken(table)
    }

    /// Whether a client is expected back, which it then is no longer.
    fn is_back(&self, key: &Key) -> bool {
        self.lock().lost.remove(key).is_some_and(|at| at.elapsed() < LOST_FOR)
    }

    fn hold(&self, key: Key, table: Uuid, claim: u64, place: Turn) -> u64 {
        let mut state = self.lock();
        state.turns += 1;
        let number = state.turns;
        state.held.insert(key, Held { table, claim, number, _place: place });
        number
    }

    /// Takes back the turn of this number, if nothing came of it.
    fn take_back(&self, key: &Key, number: u64) -> Option<Held> {
        let mut state = self.lock();
        let still = state.held.get(key).is_some_and(|held| held.number == number);
        still.then(|| state.held.remove(key)).flatten()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rest {
    /// Has a client wait for its turn that has lost a race for this table and now loads it again. Without one, for
    /// whatever reason, it is served as any other.
    pub(super) async fn come_back(&self, client: Option<Client>, ident: &TableIdent, deadline: Instant) {
        let Some(client) = client else { return };
        let key = (client, ident.clone());
        if !self.comebacks.is_back(&key) {
            return;
        }
        let Ok(_waits) = self.comebacks.waiting.clone().try_acquire_owned() else { return };
        let until = deadline.min(Instant::now() + WAIT);
        let Ok(Some(there)) = self.tables.metadata.read_table(ident, until).await else { return };
        let table = there.value.uuid;
        let Some(place) = self.comebacks.line.enter(table, until).await else { return };
        if rand::random_ratio(1, ROOM_ONE_IN) {
            tokio::time::sleep(ROOM).await;
        }
        let Some(claim) = self.claim(table, until).await else { return };
        let number = self.comebacks.hold(key.clone(), table, claim, place);
        let (comebacks, tables) = (self.comebacks.clone(), self.tables.clone());
        self.tables.tasks.spawn(async move {
            tokio::time::sleep(TURN_WITHIN).await;
            let Some(unused) = comebacks.take_back(&key, number) else { return };
            // Without this, who waits for it does so.
            let _ = tables.writer.end_turn(unused.table, unused.claim, Instant::now() + TURN_WITHIN).await;
        });
    }

    /// Claims a table's next turn as soon as nobody else has it.
    async fn claim(&self, table: Uuid, until: Instant) -> Option<u64> {
        let claimant = Uuid::new_v4();
        while Instant::now() < until {
            if let Some(claim) = self.tables.writer.claim_turn(table, claimant, until).await.ok()? {
                return Some(claim);
            }
            // Where nobody has turns there is none to wait for.
            let other = self.tables.metadata.turn(table, until).await.ok()?;
            match other {
                Some(other) if !await_turn(&self.tables, table, other, until).await => return None,
                Some(_) => {}
                None if !self.tables.metadata.capabilities().multi_key => return None,
                None => {}
            }
        }
        None
    }

    /// Ends a client's turn without a commit.
    pub(super) async fn give_up(&self, client: Option<Client>, ident: &TableIdent, deadline: Instant) {
        let Some(held) = self.comebacks.turn(client, ident) else { return };
        // Whoever waits for it does so otherwise.
        let _ = self.tables.writer.end_turn(held.table, held.claim, deadline).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(port: u16) -> Option<Client> {
        Some(Client(([127, 0, 0, 1], port).into()))
    }

    #[tokio::test]
    async fn one_is_expected_back_once_and_has_one_turn() {
        let comebacks = Comebacks::default();
        let table = TableIdent::new("n".parse().unwrap(), "t").unwrap();
        let other = TableIdent::new("n".parse().unwrap(), "u").unwrap();
        let key = |port| (client(port).unwrap(), table.clone());
        comebacks.lost(client(1), &table);
        comebacks.lost(None, &table);
        assert!(!comebacks.is_back(&key(2)) && !comebacks.is_back(&(client(1).unwrap(), other.clone())));
        assert!(comebacks.is_back(&key(1)) && !comebacks.is_back(&key(1)));

        let far = Instant::now() + Duration::from_secs(60);
        let uuid = Uuid::new_v4();
        let place = comebacks.line.enter(uuid, far).await.unwrap();
        let number = comebacks.hold(key(1), uuid, 7, place);
        assert!(comebacks.is_awaited(uuid) && !comebacks.is_awaited(Uuid::nil()));
        assert!(comebacks.line.enter(uuid, Instant::now()).await.is_none(), "the next in line waits");
        assert_eq!((comebacks.claim(uuid), comebacks.claim(Uuid::nil())), (Some(7), None));
        assert!(comebacks.turn(client(2), &table).is_none() && comebacks.turn(client(1), &other).is_none());
        let held = comebacks.turn(client(1), &table).unwrap();
        assert!(held.claim == 7 && comebacks.is_awaited(uuid), "until its commit is made");
        drop(held);
        assert!(comebacks.take_back(&key(1), number).is_none(), "it was used");
        let place = comebacks.line.enter(uuid, far).await.unwrap();
        let second = comebacks.hold(key(1), uuid, 8, place);
        assert!(comebacks.take_back(&key(1), number).is_none(), "another turn");
        assert!(comebacks.take_back(&key(1), second).is_some());
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let comebacks = Comebacks::default();
        for n in 0..=MAX_LOST {
            let table = TableIdent::new("n".parse().unwrap(), format!("t{n}")).unwrap();
            comebacks.lost(client(1), &table);
        }
        assert_eq!(comebacks.lock().lost.len(), MAX_LOST);
    }
}
