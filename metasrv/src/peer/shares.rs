//! What all callers of a peer share, in parts that no caller can take from the others.
//!
//! Connections, commands in flight, their bytes, reads that wait, listings and snapshots that are held, watches, streams,
//! the bytes of answers on them that are not taken ([`super::untaken`]) and states that are being saved each have a limit for
//! the whole peer ([`Pool`]); so have the leases, sessions and scopes that the state holds ([`super::ledger`]).
//! A caller is a connection, and belongs to the host that it comes from. Nobody may take more than is still free:
//!
//! - the connections of a host together no more than what is free of the pool: alone a host gets half, and of `n` hosts that
//!   want everything each gets one part in `n + 1`;
//! - a connection no more than what its host may still take, and that of three quarters only: alone it gets a quarter of the
//!   pool, and of `n` greedy ones of one host each gets one part in `2n + 1` of these quarters. The rest of what the host may
//!   take is for connections that have little ([`LITTLE`]).
//!
//! So whoever causes the overload is told so at once, and who asks for little gets in. What is in is done in the order in which
//! it came, so that nobody waits for more than the pool's limit of others. A part of each pool ([`OWN`]) is left to what the
//! peer itself has to do.
//!
//! Hosts are told apart by their addresses, and so are connections. Where all callers come through one proxy, that is one
//! host, and its connections share as those of one host do.
//!
//! Limits: as many entries as there are connections.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use crate::log::lock;

/// One part in so many of a pool is kept for the peer itself.
const OWN: usize = 16;
/// A connection that has less than one part in so many of a pool has little.
const LITTLE: usize = 256;
/// With fewer entries than this nobody looks for those that are gone.
const FEW: usize = 64;

/// What can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    Commands,
    CommandBytes,
    Reads,
    Listings,
    Snapshots,
    Watches,
    Connections,
    PeerConnections,
    Probes,
    Streams,
    Saves,
    Leases,
    Sessions,
    Scopes,
    AnswerBytes,
}

const RESOURCES: usize = 15;

/// How much of each resource is taken.
#[derive(Debug, Default)]
struct Taken([AtomicUsize; RESOURCES]);

impl Taken {
    fn of(&self, resource: Resource) -> &AtomicUsize {
        &self.0[resource as usize]
    }
}

#[derive(Debug)]
struct Connection {
    host: Arc<Taken>,
    taken: Taken,
}

/// Who asks for something. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Caller(Option<Arc<Connection>>);

impl Caller {
    /// The peer's own process.
    pub fn own() -> Self {
        Self(None)
    }
}

/// One call: who makes it, and until when it has to be answered.
#[derive(Debug, Clone)]
pub struct Call {
    pub caller: Caller,
    pub deadline: Instant,
}

impl Call {
    /// The process itself calls.
    pub fn own(deadline: Instant) -> Self {
        Self { caller: Caller::own(), deadline }
    }
}

/// The callers that there are. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Callers(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    hosts: HashMap<IpAddr, Weak<Taken>>,
    connections: HashMap<SocketAddr, Weak<Connection>>,
    /// At so many entries those that are gone are looked for.
    look_at: usize,
}

impl Callers {
    /// Whoever is at the other end of a connection. All whose address is not known are one caller.
    pub fn at(&self, address: Option<SocketAddr>) -> Caller {
        let address = address.unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let mut known = lock(&self.0);
        if let Some(connection) = known.connections.get(&address).and_then(Weak::upgrade) {
            return Caller(Some(connection));
        }
        known.forget_the_gone();
        let ip = address.ip().to_canonical();
        let host = known.hosts.get(&ip).and_then(Weak::upgrade).unwrap_or_default();
        known.hosts.insert(ip, Arc::downgrade(&host));
        let connection = Arc::new(Connection { host, taken: Taken::default() });
        known.connections.insert(address, Arc::downgrade(&connection));
        Caller(Some(connection))
    }
}

impl Known {
    fn forget_the_gone(&mut self) {
        if self.connections.len() < self.look_at.max(FEW) {
            return;
        }
        self.connections.retain(|_, connection| connection.strong_count() > 0);
        self.hosts.retain(|_, host| host.strong_count() > 0);
        self.look_at = 2 * self.connections.len();
    }
}

/// What a peer has of one resource. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Pool {
    resource: Resource,
    limit: usize,
    taken: Arc<AtomicUsize>,
}

/// Why nothing is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Everything is taken.
    Full,
    /// The connection has its part.
    Connection,
    /// The connections of the host have their part.
    Host,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refused::Full => "all callers together",
            Refused::Connection => "this connection",
            Refused::Host => "the connections of this host",
        })
    }
}

impl Held {
    /// Whether this caller took it; with `host`, whether any connection of its host did.
    pub fn is_of(&self, caller: &Caller, host: bool) -> bool {
        match (&self.caller.0, &caller.0) {
            (Some(one), Some(other)) if host => Arc::ptr_eq(&one.host, &other.host),
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        }
    }
}

/// Something taken, until it is dropped.
#[derive(Debug)]
pub struct Held {
    pool: Pool,
    caller: Caller,
    amount: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let resource = self.pool.resource;
        self.pool.taken.fetch_sub(self.amount, Ordering::Relaxed);
        if let Some(connection) = &self.caller.0 {
            connection.taken.of(resource).fetch_sub(self.amount, Ordering::Relaxed);
            connection.host.of(resource).fetch_sub(self.amount, Ordering::Relaxed);
        }
    }
}

impl Pool {
    /// So much of it.
    pub fn new(resource: Resource, limit: usize) -> Self {
        Self { resource, limit, taken: Arc::default() }
    }

    /// How much is taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes some for a caller. Who has less than its part gets all that it asks for, if there is so much.
    ///
    /// # Errors
    /// Who has its part already.
    pub fn take(&self, caller: &Caller, amount: usize) -> Result<Held, Refused> {
        let before = self.taken.fetch_add(amount, Ordering::Relaxed);
        if let Err(refused) = self.check(caller, amount, before) {
            self.taken.fetch_sub(amount, Ordering::Relaxed);
            return Err(refused);
        }
        Ok(self.held(caller, amount))
    }

    /// Whether a caller would get so much now.
    ///
    /// # Errors
    /// Who would not.
    pub fn room(&self, caller: &Caller, amount: usize) -> Result<(), Refused> {
        self.check(caller, amount, self.taken())
    }

    /// Notes what a caller has already, however much that is.
    pub fn note(&self, caller: &Caller, amount: usize) -> Held {
        self.taken.fetch_add(amount, Ordering::Relaxed);
        self.held(caller, amount)
    }

    fn held(&self, caller: &Caller, amount: usize) -> Held {
        if let Some(connection) = &caller.0 {
            connection.taken.of(self.resource).fetch_add(amount, Ordering::Relaxed);
            connection.host.of(self.resource).fetch_add(amount, Ordering::Relaxed);
        }
        Held { pool: self.clone(), caller: caller.clone(), amount }
    }

    /// The pool's own limit is kept to; what a caller has may change while it is looked at, by what others begin then.
    fn check(&self, caller: &Caller, amount: usize, taken: usize) -> Result<(), Refused> {
        let Some(connection) = &caller.0 else {
            return if taken.saturating_add(amount) <= self.limit { Ok(()) } else { Err(Refused::Full) };
        };
        let others = self.limit - self.limit / OWN;
        let of_host = connection.host.of(self.resource).load(Ordering::Relaxed);
        let of_connection = connection.taken.of(self.resource).load(Ordering::Relaxed);
        let has_little = of_connection < self.limit / LITTLE;
        let free = others.saturating_sub(taken);
        let left_for_much = (others - others / 4).saturating_sub(taken).saturating_sub(of_host);
        if free < amount {
            Err(Refused::Full)
        } else if of_host >= free {
            Err(Refused::Host)
        } else if !has_little && of_connection >= left_for_much {
            Err(Refused::Connection)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(callers: &Callers, host: u8, port: u16) -> Caller {
        callers.at(Some(SocketAddr::from(([10, 0, 0, host], port))))
    }

    /// Takes one after the other, the callers in turn, until nobody gets any more. How much each got.
    fn greedy(pool: &Pool, callers: &[Caller]) -> (Vec<usize>, Vec<Held>) {
        let (mut got, mut held) = (vec![0; callers.len()], Vec::new());
        loop {
            let before = held.len();
            for (n, caller) in callers.iter().enumerate() {
                if let Ok(one) = pool.take(caller, 1) {
                    got[n] += 1;
                    held.push(one);
                }
            }
            if held.len() == before {
                return (got, held);
            }
        }
    }

    #[test]
    fn one_connection_gets_a_quarter_and_one_host_half() {
        let (pool, callers) = (Pool::new(Resource::Commands, 4096), Callers::default());
        let (got, held) = greedy(&pool, &[at(&callers, 1, 1)]);
        assert_eq!(got, [960], "of 3,840 that are not the peer's own");
        assert_eq!(pool.take(&at(&callers, 1, 1), 1).unwrap_err(), Refused::Connection);
        let (_, more_held) = greedy(&pool, &(2..=100).map(|port| at(&callers, 1, port)).collect::<Vec<_>>());
        assert_eq!(pool.taken(), 1920);
        assert_eq!(pool.take(&at(&callers, 1, 1), 1).unwrap_err(), Refused::Host);
        drop((held, more_held));
        assert_eq!(pool.taken(), 0);
        assert_eq!(greedy(&pool, &[at(&callers, 1, 1)]).0, [960], "what was given back can be taken again");
    }

    #[test]
    fn greedy_ones_that_come_together_get_the_same_and_one_that_comes_later_gets_in() {
        let (pool, callers) = (Pool::new(Resource::Commands, 4096), Callers::default());
        let (got, held) = greedy(&pool, &(1..=10).map(|port| at(&callers, 1, port)).collect::<Vec<_>>());
        assert!(got.iter().all(|got| (136..=138).contains(got)), "one part in 21 of 2,880 each: {got:?}");
        drop(held);
        // One after the other, each takes what it can.
        let held: Vec<_> = (1..=20).map(|port| greedy(&pool, &[at(&callers, 1, port)])).collect();
        assert!(held.iter().all(|(got, _)| got[0] >= 16), "none got less than a little");
        let (same_host, _held_too) = greedy(&pool, &[at(&callers, 1, 999)]);
        assert!(same_host[0] >= 16, "{same_host:?}");
        let (elsewhere, _) = greedy(&pool, &[at(&callers, 2, 1)]);
        assert!(elsewhere[0] > 250, "{elsewhere:?}");
    }

    #[test]
    fn many_greedy_hosts_leave_something_to_one_more_and_to_the_peer_itself() {
        let (pool, callers) = (Pool::new(Resource::Commands, 4096), Callers::default());
        let crowd = (1..=20).flat_map(|host| (1..=3).map(move |port| (host, port)));
        let crowd: Vec<_> = crowd.map(|(host, port)| at(&callers, host, port)).collect();
        let (_, _held) = greedy(&pool, &crowd);
        let (one_more, _held_too) = greedy(&pool, &[at(&callers, 99, 1)]);
        assert!(one_more[0] >= 16, "{one_more:?}");
        let own: Vec<_> = std::iter::from_fn(|| pool.take(&Caller::own(), 1).ok()).collect();
        assert!(own.len() >= 256, "{}", own.len());
        assert_eq!((pool.taken(), pool.take(&Caller::own(), 1).unwrap_err()), (4096, Refused::Full));
        assert_eq!(pool.take(&at(&callers, 100, 1), 1).unwrap_err(), Refused::Full);
    }

    #[test]
    fn large_amounts_count_by_their_size() {
        let (pool, callers) = (Pool::new(Resource::CommandBytes, 4096), Callers::default());
        let caller = at(&callers, 1, 1);
        let _held = (pool.take(&caller, 900).unwrap(), pool.take(&caller, 900).unwrap());
        assert_eq!(pool.take(&caller, 1).unwrap_err(), Refused::Connection);
        assert!(pool.take(&at(&callers, 1, 2), 900).is_ok());
        assert!(pool.take(&at(&callers, 2, 1), 900).is_ok());
        assert_eq!(pool.take(&at(&callers, 2, 1), 2041).unwrap_err(), Refused::Full, "there is not so much");
    }

    #[test]
    fn of_two_one_host_gets_one() {
        let (pool, callers) = (Pool::new(Resource::Saves, 2), Callers::default());
        let first = pool.take(&at(&callers, 1, 1), 1).unwrap();
        assert_eq!(pool.take(&at(&callers, 1, 2), 1).unwrap_err(), Refused::Host);
        let _second = pool.take(&at(&callers, 2, 1), 1).unwrap();
        assert_eq!(pool.take(&at(&callers, 3, 1), 1).unwrap_err(), Refused::Full);
        drop(first);
        assert!(pool.take(&at(&callers, 3, 1), 1).is_ok());
    }

    #[test]
    fn what_somebody_has_already_counts_though_it_is_more_than_its_part() {
        let (pool, callers) = (Pool::new(Resource::Leases, 100), Callers::default());
        let much = at(&callers, 1, 1);
        let held = pool.note(&much, 60);
        assert_eq!(pool.take(&much, 1).unwrap_err(), Refused::Host);
        assert!(pool.take(&at(&callers, 2, 1), 1).is_ok());
        assert_eq!((pool.room(&much, 1), pool.room(&at(&callers, 2, 1), 1)), (Err(Refused::Host), Ok(())));
        drop(held);
        assert!(pool.take(&much, 1).is_ok() && pool.taken() == 0);
    }

    #[test]
    fn who_is_gone_is_forgotten_and_who_is_there_is_known_again() {
        let callers = Callers::default();
        let stays = at(&callers, 1, 1);
        for port in 2..10_000 {
            at(&callers, (port % 200) as u8, port);
        }
        let known = lock(&callers.0);
        assert!(known.connections.len() <= 2 * FEW && known.hosts.len() <= 2 * FEW);
        drop(known);
        let again = at(&callers, 1, 1);
        assert!(Arc::ptr_eq(stays.0.as_ref().unwrap(), again.0.as_ref().unwrap()));
        let nobody = [callers.at(None), callers.at(None)].map(|caller| caller.0.unwrap());
        assert!(Arc::ptr_eq(&nobody[0], &nobody[1]));
    }
}
