//! Which transaction must come before which.

use std::collections::{HashMap, HashSet};

use super::observed::Observed;
use crate::history::Outcome;

/// Kinds of edges, as bits, so that a set of kinds is a mask.
pub(super) const WW: u8 = 1;
pub(super) const WR: u8 = 2;
pub(super) const RW: u8 = 4;
pub(super) const REALTIME: u8 = 8;

/// One dependency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dependency {
    pub to: u32,
    pub kind: u8,
    pub key: u32,
    /// The element on account of which it is: appended later (ww, rw) or read (wr).
    pub value: i64,
}

/// Transactions and what they depend on. Nodes beyond the transactions stand for "everything appended to this key that
/// nobody read", of which only the beginning is known: an edge to one goes on to each of those appends.
#[derive(Debug)]
pub(super) struct Graph {
    /// Where each node's edges begin, and at last where all end.
    starts: Vec<u32>,
    edges: Vec<Dependency>,
    pub transactions: usize,
}

impl Graph {
    /// All dependencies of what happened.
    pub fn of(observed: &Observed<'_>, realtime: bool) -> Graph {
        let transactions = observed.transactions.len();
        let mut list: Vec<(u32, Dependency)> = Vec::new();
        let unread = Unread::of(observed);
        unread.add_own_edges(&mut list);
        for (key, order) in observed.orders.iter().enumerate() {
            let key = key as u32;
            for pair in order.windows(2) {
                let [Some(before), Some(after)] = [pair[0], pair[1]].map(|v| observed.writers.get(&(key, v))) else {
                    continue;
                };
                list.push((*before as u32, Dependency { to: *after as u32, kind: WW, key, value: pair[1] }));
            }
            if let Some(writer) = order.last().and_then(|last| observed.writers.get(&(key, *last))) {
                unread.add_edges(*writer as u32, key, WW, &mut list);
            }
        }
        for (reader, transaction) in observed.transactions.iter().enumerate() {
            for &(key, read) in &transaction.reads {
                let order = observed.orders[key as usize];
                if !order.starts_with(read) {
                    continue;
                }
                let writer = |value: i64| observed.writers.get(&(key, value)).map(|writer| *writer as u32);
                let reader = reader as u32;
                if let Some((writer, value)) = read.last().and_then(|&value| Some((writer(value)?, value))) {
                    list.push((writer, Dependency { to: reader, kind: WR, key, value }));
                }
                match order.get(read.len()) {
                    Some(&value) => {
                        list.extend(writer(value).map(|to| (reader, Dependency { to, kind: RW, key, value })));
                    }
                    None => unread.add_edges(reader, key, RW, &mut list),
                }
            }
        }
        if realtime {
            add_realtime(observed, &mut list);
        }
        list.retain(|(from, dependency)| *from != dependency.to);
        Graph::from_list(transactions, transactions + unread.appends.len(), list)
    }

    fn from_list(transactions: usize, nodes: usize, mut list: Vec<(u32, Dependency)>) -> Graph {
        list.sort_by_key(|(from, d)| (*from, d.to, d.kind, d.key, d.value));
        list.dedup_by_key(|(from, d)| (*from, d.to, d.kind));
        let mut starts = vec![0; nodes + 1];
        list.iter().for_each(|(from, _)| starts[*from as usize + 1] += 1);
        (1..starts.len()).for_each(|node| starts[node] += starts[node - 1]);
        Graph { starts, edges: list.into_iter().map(|(_, dependency)| dependency).collect(), transactions }
    }

    /// How many nodes there are.
    pub fn node_count(&self) -> usize {
        self.starts.len() - 1
    }

    /// How many dependencies there are.
    pub fn edge_count(&self) -> usize {
        self.edges.len()
    }

    /// What must come after a node.
    pub fn from(&self, node: u32) -> &[Dependency] {
        &self.edges[self.starts[node as usize] as usize..self.starts[node as usize + 1] as usize]
    }
}

/// By key, what was appended by transactions that succeeded, and read by nobody: it comes after all that was read. Each
/// such key has a node of its own, the first of them after all transactions.
struct Unread {
    first_node: u32,
    /// The place among the nodes, by key.
    places: HashMap<u32, u32>,
    /// By place: the key, and who appended what.
    appends: Vec<(u32, Vec<(u32, i64)>)>,
}

impl Unread {
    fn of(observed: &Observed<'_>) -> Unread {
        let read: HashSet<(u32, i64)> = (observed.orders.iter().enumerate())
            .flat_map(|(key, order)| order.iter().map(move |value| (key as u32, *value)))
            .collect();
        let first_node = observed.transactions.len() as u32;
        let mut unread = Unread { first_node, places: HashMap::new(), appends: Vec::new() };
        for (writer, transaction) in observed.transactions.iter().enumerate() {
            if transaction.call.outcome != Outcome::Ok {
                continue;
            }
            for &(key, value) in transaction.appends.iter().filter(|append| !read.contains(append)) {
                let place = *unread.places.entry(key).or_insert(unread.appends.len() as u32) as usize;
                unread.appends.resize_with(unread.appends.len().max(place + 1), || (key, Vec::new()));
                unread.appends[place].1.push((writer as u32, value));
            }
        }
        unread
    }

    /// From each node to those who appended.
    fn add_own_edges(&self, list: &mut Vec<(u32, Dependency)>) {
        for (place, (key, appends)) in self.appends.iter().enumerate() {
            let from = self.first_node + place as u32;
            list.extend(appends.iter().map(|&(to, value)| (from, Dependency { to, kind: WW, key: *key, value })));
        }
    }

    /// From a transaction to all unread appends to a key but its own.
    fn add_edges(&self, from: u32, key: u32, kind: u8, list: &mut Vec<(u32, Dependency)>) {
        let Some(&place) = self.places.get(&key) else { return };
        let appends = &self.appends[place as usize].1;
        if appends.iter().all(|(writer, _)| *writer != from) {
            list.push((from, Dependency { to: self.first_node + place, kind, key, value: 0 }));
        } else {
            // By way of the node it would come back to itself.
            list.extend(appends.iter().map(|&(to, value)| (from, Dependency { to, kind, key, value })));
        }
    }
}

/// What ended before something else began, without what follows from the rest: from each transaction only to those that
/// began before another one that began after it had ended.
fn add_realtime(observed: &Observed<'_>, list: &mut Vec<(u32, Dependency)>) {
    let transactions = &observed.transactions;
    let mut ends: Vec<(usize, usize)> = (transactions.iter().enumerate())
        .filter_map(|(at, transaction)| Some((transaction.call.happened_before()?, at)))
        .collect();
    ends.sort_unstable();
    let mut ends = ends.into_iter().peekable();
    let mut latest: Vec<usize> = Vec::new();
    for (at, transaction) in transactions.iter().enumerate() {
        while let Some((_, ended)) = ends.next_if(|(place, _)| *place < transaction.call.invoked) {
            let invoked = transactions[ended].call.invoked;
            latest.retain(|&before| transactions[before].call.ended.is_none_or(|end| end > invoked));
            latest.push(ended);
        }
        list.extend(
            latest
                .iter()
                .map(|&before| (before as u32, Dependency { to: at as u32, kind: REALTIME, key: 0, value: 0 })),
        );
    }
}
