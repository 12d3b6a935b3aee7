//! Metadata that is there already, made a table. A table has one name: two would change it without each other's knowledge,
//! and what one of them refers to would be an orphan to the other.
//!
//! ```text
//!   no other has the uuid? -> claim the uuid's turn -> still none? -> create, or swap; ends the claim
//!        | `Registered`          | `NotYourTurn`          | `Registered`
//! ```
//! The claim keeps two of them apart; a table that there is commits by its turns as well, but is found by the first look.
//! Over a store that changes one key at a time, where nobody has turns, two that register at the same moment may both do.

use std::time::Instant;

use lake_proto::kv::Revision;
use uuid::Uuid;

use super::error::Result;
use super::names::TABLES;
use super::pointers::Kind;
use super::{Catalog, CatalogError, TableIdent, TablePointer, Versioned};
use crate::store::{Applied, ReadOptions};

impl Catalog {
    /// Creates a table of metadata that is there already, or puts it in the place of what `table` is at the revision
    /// `expected`. No table of another name may have its uuid.
    ///
    /// # Errors
    /// `Registered`, `NotYourTurn` while somebody else has claimed the turn of that uuid, those of
    /// [`Catalog::create_table`] or [`Catalog::swap_table`]. Only one whose outcome is unknown may leave a claim behind.
    pub async fn register_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        expected: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.check_nameless(table, new.uuid, deadline).await?;
        let claim = self.claim_turn(new.uuid, Uuid::new_v4(), deadline).await?;
        if claim.is_none() && self.store.capabilities().multi_key {
            let turn = self.turn(new.uuid, deadline).await?.unwrap_or(0);
            return Err(CatalogError::NotYourTurn { table: table.clone(), turn, resent: false });
        }
        let made = self.register_in_turn(table, new, expected, claim, deadline).await;
        // Of what was as asked for already the claim is still there, too.
        let is_known = made.as_ref().err().is_none_or(|error| error.applied() == Applied::No);
        if let Some(claim) = claim.filter(|_| is_known) {
            // Whoever waits for it ends it otherwise.
            let _ = self.end_turn(new.uuid, claim, deadline).await;
        }
        made
    }

    async fn register_in_turn(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        expected: Option<Revision>,
        claim: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.check_nameless(table, new.uuid, deadline).await?;
        match expected {
            None => self.create(Kind::Table, table, new, claim, deadline).await,
            Some(expected) => self.swap_table(table, expected, new, claim, deadline).await,
        }
    }

    /// Checks that no table but `table` has this uuid.
    async fn check_nameless(&self, table: &TableIdent, uuid: Uuid, deadline: Instant) -> Result<()> {
        let own = table.key();
        let read = self.store.list_all(TABLES, ReadOptions::default(), deadline).await?;
        for entry in read.value.iter().filter(|entry| entry.key != own) {
            // A damaged one does not say whose it is, and is not what keeps another from being brought back.
            let Ok(there) = serde_json::from_slice::<TablePointer>(&entry.value) else { continue };
            if there.uuid == uuid {
                let other = TableIdent::from_key(&entry.key).unwrap_or_else(|| table.clone());
                return Err(CatalogError::Registered(other));
            }
        }
        Ok(())
    }
}
