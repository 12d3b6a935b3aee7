//! What procedures do: one [`Kind`] each, found by the name in the record.
//!
//! A kind decides and tells workers; it holds nothing, so that whoever leads next goes on with the record alone. One
//! that this build does not know is left alone, for a leader that does.

use async_trait::async_trait;
use lake_client::procedures::calls::Clear;
use lake_client::procedures::{Procedure, Record, State};

use super::drop_namespace::DropNamespace;
use super::machine::{Cancel, Outcome, Pace, Terms};
use super::purge::PurgeTable;
use super::purge_warehouse::PurgeWarehouse;
use super::upkeep::Upkeep;
use crate::peer::member::Member;

/// A kind of procedure.
#[async_trait]
pub trait Kind: Send + Sync {
    /// The name in the records.
    fn name(&self) -> &'static str;

    /// When it is to begin, and to have ended.
    fn terms(&self, record: &Record, pace: &Pace) -> Terms;

    /// Whether it can be cancelled, at the step at which it stands.
    fn cancel(&self, record: &Record) -> Cancel;

    /// Whether nothing is done for it, at the step at which it stands, until the procedures that it has submitted have ended.
    fn waits_for_children(&self, _: &Record) -> bool {
        false
    }

    /// Whether the procedures that it has submitted wait, at the step at which it stands, until it has come further or has ended.
    fn holds_children(&self, _: &Record) -> bool {
        false
    }

    /// Carries out the step at which it stands, which bears to be carried out again, also while it still is elsewhere.
    async fn execute(&self, member: &Member, procedure: &Procedure) -> Outcome;
}

const KINDS: [&dyn Kind; 4] = [&PurgeTable, &DropNamespace, &PurgeWarehouse, &Upkeep];

/// The kind of a procedure, if this build knows it.
pub fn of(record: &Record) -> Option<&'static dyn Kind> {
    KINDS.into_iter().find(|kind| kind.name() == record.kind)
}

/// What a leader of this build says of a kind that it does not know.
const UNKNOWN: Cancel = Cancel::TooLate("this build does not know its kind, and leaves it alone");

/// Whether a procedure could be cancelled as it stands, and what would come of asking.
pub fn would_cancel(record: &Record) -> (bool, String) {
    match of(record).map_or(UNKNOWN, |kind| kind.cancel(record)) {
        _ if record.state != State::Active => (false, format!("it is {}", record.state.as_str())),
        Cancel::Now => (true, "it ends as cancelled".to_owned()),
        Cancel::Back(step) => (true, format!("what was done is undone, from step {step} on")),
        Cancel::TooLate(why) => (false, format!("it goes on: {why}")),
    }
}

/// Whether a procedure could be cleared as it stands, and what would come of it.
pub fn would_clear(record: &Record, how: Clear) -> (bool, String) {
    let poisoned = record.state == State::Poisoned;
    let would = match how {
        _ if !poisoned => format!("it is {}, not poisoned", record.state.as_str()),
        Clear::Retry => format!("it goes on with step {}", record.step),
        Clear::GiveUp => format!("it ends as failed, and {} scopes go", record.scopes.len()),
    };
    (poisoned, would)
}
