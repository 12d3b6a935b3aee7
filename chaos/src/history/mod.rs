//! What the clients of a run saw: every operation as it began and as it ended, in one order.
//!
//! Jepsen's semantics. A client process does one thing at a time: it records an [`Kind::Invoke`], and then how that
//! ended: [`Kind::Ok`], it happened; [`Kind::Fail`], it did not; [`Kind::Info`], nobody knows, and it may still happen
//! at any later time. After an `Info` the process is spent, and its client goes on under a new number. The order of the
//! list is the real-time order: whatever ended before something else began stands before it. Times are for people.
//!
//! - [`operation`]: one event of a history; [`action`]: what it was about, typed by workload; [`fault`]: what the
//!   nemesis did; [`workload`]: the names of the workloads;
//! - [`history`]: the whole, with each invocation joined to its end;
//! - [`edn`]: values in Clojure's notation; [`encode`], [`decode`]: operations in it; [`file`]: `history.edn`;
//!   [`split`]: the same for tools that know single registers.
//!
//! Invariant: a [`History`] is well formed. What is not is refused, never judged.

pub mod action;
pub mod decode;
pub mod edn;
pub mod encode;
pub mod fault;
pub mod file;
#[allow(clippy::module_inception)]
pub mod history;
pub mod operation;
pub mod split;
#[cfg(test)]
mod tests;
pub mod workload;

pub use action::{
    Accounts, Action, Append, Bank, Cached, Catalog, Change, Chore, Ddl, Fenced, Hot, Idempotency, Key, Lock, Register,
    Session, Set, Snapshot, Table, Watch, Worked, Write,
};
pub use fault::{Fault, Installation, Phase};
pub use history::{Call, History, Malformed, Outcome};
pub use operation::{Kind, Operation, Process};
pub use workload::Workload;
