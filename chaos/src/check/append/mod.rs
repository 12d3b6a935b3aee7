//! Transactions over lists that only grow: do they depend on each other in a circle?
//!
//! The method of Elle (Kingsbury and Alvaro, 2020). Since lists only grow, what is read tells in which order they grew
//! ([`observed`]), and with it which transaction must come before which ([`graph`]): ww, it appended before; wr, it
//! wrote what the other read; rw, it did not see what the other wrote; realtime, it ended before the other began. A
//! circle is a contradiction, and its kinds of edges name it after Adya ([`cycle`]):
//!
//! | name | a circle of | breaks |
//! |---|---|---|
//! | G0 | ww | read uncommitted |
//! | G1a, G1b | no circle: a read of what was aborted, of half a transaction | read committed |
//! | G1c | ww, wr | read committed |
//! | G-single | these and one rw: a read that skews | snapshot isolation |
//! | G2 | these and several rw: a write that skews | serializability |
//! | ...-realtime | these and realtime | strict serializability |
//!
//! An unknown transaction counts as soon as somebody read what it appended. What nobody read has no place in the order
//! but comes after what was read, if its transaction succeeded.

mod cycle;
mod graph;
mod observed;
#[cfg(test)]
mod tests;

use self::graph::Graph;
use self::observed::Observed;
use super::Verdict;
use super::outcome::{Findings, Outcome};
use crate::history::History;

/// Its name in results.
pub const NAME: &str = "transactions";

/// What is expected of the transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Model {
    /// They have an order, and it agrees with what ended before what began.
    #[default]
    StrictSerializable,
    /// They have an order.
    Serializable,
}

/// Judges all transactions of a history.
pub fn check(history: &History, model: Model) -> Outcome {
    let mut findings = Findings::default();
    let observed = match Observed::of(history, &mut findings) {
        Ok(observed) => observed,
        Err(why) => return Outcome::new(NAME, Verdict::Unknown(why)),
    };
    let graph = Graph::of(&observed, model == Model::StrictSerializable);
    cycle::find(&observed, &graph, &mut findings);
    let succeeded = observed.succeeded();
    let otherwise = match succeeded {
        _ if observed.reads == 0 => Verdict::Unknown("no transaction that read a list succeeded".into()),
        _ if observed.orders.iter().all(|order| order.is_empty()) => {
            Verdict::Unknown("nothing that was appended was ever read".into())
        }
        _ => Verdict::Valid,
    };
    findings
        .conclude(NAME, otherwise)
        .with("transactions", succeeded)
        .with("unknown transactions seen", observed.transactions.len() - succeeded)
        .with("reads", observed.reads)
        .with("dependencies", graph.edge_count())
}
