//! What procedures do: one [`Kind`] each, found by the name in the record.
//!
//! A kind decides and tells workers; it holds nothing, so that whoever leads next goes on with the record alone. One
//! that this build does not know is left alone, for a leader that does.

use async_trait::async_trait;
use lake_client::procedures::{Procedure, Record};

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
