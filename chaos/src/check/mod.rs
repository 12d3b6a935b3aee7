//! Judging a history: pure functions from what clients saw to a verdict.
//!
//! A checker looks for proof that the system broke its promise. It says [`Verdict::Violation`] only with such a proof,
//! and names the operations that are it; [`Verdict::Valid`] only if there was something to judge and all of it held;
//! otherwise [`Verdict::Unknown`], with the reason. A run's verdict is the worst of its checkers'.
//!
//! - [`verdict`]: the three verdicts and the exit codes; [`outcome`]: what one checker found; [`bars`]: operations as
//!   people see them;
//! - one module per promise: [`linear`] (registers), [`append`] (transactions over lists), [`set`], [`bank`],
//!   [`watch`], [`lock`], [`idempotency`], [`session`], [`table`] (rows through SQL; [`shared`]: those that clients share), [`accounts`] (transactions
//!   over several tables), [`catalog`] (schemas and tables through SQL), [`cached`] (nodes without metadata),
//!   [`hot`] (appends that are merged), [`fences`] (workers' upkeep beside them); [`refusals`], [`answers`]: of any of them;
//! - whatever the workload: [`availability`], [`faults`] (those asked for took effect), [`deaths`] (peers that ended by
//!   themselves), [`convergence`] (after healing);
//! - [`judge_history`], [`judge_run`]: which checkers judge which workload.
//!
//! Cost: all but [`linear`] and [`append`] are about linear in the history. `linear` searches, within a [`Budget`].

pub mod accounts;
mod answers;
pub mod append;
pub mod availability;
pub mod bank;
pub mod bars;
mod budget;
pub mod cached;
pub mod catalog;
pub mod convergence;
pub mod deaths;
pub mod faults;
pub mod fences;
pub mod hot;
pub mod idempotency;
mod judge;
pub mod linear;
pub mod lock;
pub mod outcome;
pub mod refusals;
pub mod session;
pub mod set;
mod shared;
pub mod table;
pub mod verdict;
pub mod watch;

pub use bars::{Bar, Edge};
pub use budget::Budget;
pub use deaths::Death;
pub use judge::{Options, Run, judge_history, judge_run, verdict};
pub use outcome::{Finding, Outcome};
pub use verdict::{HARNESS_ERROR, Verdict};
