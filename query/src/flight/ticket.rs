//! What tickets and prepared statements hold: the statement itself, with what it is run with, so that no node has to remember it.
//!
//! Of tickets there are three kinds:
//! - a *statement* as a client writes it, which any client of lake's may: it says no more than a command would;
//! - a *plan*, which GetFlightInfo makes: it also holds the versions that the query was planned on. These name objects to be
//!   read, so it is signed ([`super::keys`]). Any node redeems it, until it expires ([`LIFETIME`]): before what it names may be removed,
//!   since no snapshot expires for [`HELD_FOR`] after it was current, unless a table asks for less ([`crate::table::maintenance::HELD`]).
//!   A change is made once by its id, whichever nodes are asked ([`crate::sql::once::TICKETS`]);
//! - the *name* of a query that is polled ([`super::polls`]): what runs, or has run, at the node that it says. Signed as well: a
//!   node sends on to another what concerns it.
//!
//! ```text
//! statement: JSON [0 values]                values of the parameters, as a stream of Arrow's IPC format
//! plan:      1 id-of-the-key tag JSON [0 values]
//! name:      2 id-of-the-key tag JSON
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow_flight::Ticket;
use arrow_flight::sql::{ProstMessageExt, TicketStatementQuery};
use bytes::Bytes;
use prost::Message;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::keys::TicketKeys;
use crate::error::{Error, Result};
use crate::outcomes::now_ms;
use crate::sql::bound::{self, Bound};
use crate::sql::session::Settings;
use crate::table::maintenance::HELD_FOR;
use crate::table::orphans::ORPHAN_AGE_LEAST;
use crate::table::pins::Pins;

/// How long a plan may be redeemed.
pub const LIFETIME: Duration = Duration::from_secs(10 * 60);
const _: () = assert!(
    LIFETIME.as_secs() < HELD_FOR.as_secs() && HELD_FOR.as_secs() < ORPHAN_AGE_LEAST.as_secs(),
    "what a plan names may be removed before it expires"
);
/// What a plan begins with; JSON does not.
const PLAN: u8 = 1;
/// What the name of a polled query begins with.
const POLLED: u8 = 2;
/// What separates JSON, which never holds it, from values.
const VALUES: u8 = 0;

/// A statement to be run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatementTicket {
    /// The operation: a change is made once per id.
    pub id: Uuid,
    pub sql: String,
    /// The deadline asked for when the ticket was made, for clients that say it only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What it is run with.
    #[serde(default)]
    pub settings: Settings,
    /// Values of its parameters.
    #[serde(skip)]
    pub parameters: Option<RecordBatch>,
}

impl StatementTicket {
    /// A ticket for a new operation.
    pub fn new(sql: impl Into<String>) -> Self {
        Self { id: Uuid::new_v4(), sql: sql.into(), timeout_ms: None, settings: Settings::default(), parameters: None }
    }

    /// As the handle of a prepared statement.
    ///
    /// # Errors
    /// `Internal`: it cannot be written.
    pub fn to_handle(&self) -> Result<Bytes> {
        with_values(self, self.parameters.as_ref()).map(Bytes::from)
    }

    /// From a handle.
    ///
    /// # Errors
    /// `Invalid`: it is none of lake's.
    pub fn from_handle(handle: &[u8]) -> Result<Self> {
        let (mut ticket, parameters): (Self, _) =
            read(handle).map_err(|_| Error::invalid("the ticket was not made by lake"))?;
        ticket.parameters = parameters;
        Ok(ticket)
    }

    /// As it travels in DoGet.
    ///
    /// # Errors
    /// `Internal`: it cannot be written.
    pub fn encode(&self) -> Result<Ticket> {
        self.to_handle().map(in_ticket)
    }

    /// What is to be planned.
    pub fn bound(&self) -> Bound {
        Bound { sql: self.sql.clone(), parameters: self.parameters.clone(), ..Bound::default() }
    }
}

/// What GetFlightInfo has planned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub statement: StatementTicket,
    expires_ms: u64,
    /// The versions that a query reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pins: Option<Arc<Pins>>,
    /// How old the oldest pointer was that was used because the metadata cluster was away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_ms: Option<u64>,
}

impl Plan {
    /// A plan that expires after [`LIFETIME`].
    pub fn new(statement: StatementTicket, pins: Option<Arc<Pins>>, stale: Option<Duration>) -> Self {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Self { statement, expires_ms: now_ms().saturating_add(millis(LIFETIME)), pins, stale_ms: stale.map(millis) }
    }

    /// Until when it may be redeemed, in milliseconds since 1970.
    pub fn expires_ms(&self) -> u64 {
        self.expires_ms
    }

    /// As it travels in DoGet.
    ///
    /// # Errors
    /// Those of [`TicketKeys::sign`].
    pub async fn encode(&self, keys: &TicketKeys, deadline: Instant) -> Result<Ticket> {
        let message = with_values(self, self.statement.parameters.as_ref())?;
        signed(PLAN, &message, keys, deadline).await
    }
}

/// The name of a query that is polled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polled {
    /// The operation.
    pub id: Uuid,
    /// The node that runs it, as others reach it.
    pub node: String,
}

impl Polled {
    /// As it travels in DoGet, and in the descriptor that it is polled by.
    ///
    /// # Errors
    /// Those of [`TicketKeys::sign`].
    pub async fn encode(&self, keys: &TicketKeys, deadline: Instant) -> Result<Ticket> {
        signed(POLLED, &with_values(self, None)?, keys, deadline).await
    }

    /// From the handle within a ticket; `None`: it is of another kind.
    ///
    /// # Errors
    /// `Invalid`: it was not made by lake, or was changed.
    pub async fn of(handle: &[u8], keys: &TicketKeys, deadline: Instant) -> Result<Option<Self>> {
        let Some((&POLLED, signed)) = handle.split_first() else { return Ok(None) };
        let message = keys.verify(signed, deadline).await?;
        let (polled, _) = read(message).map_err(|e| e.while_doing(format_args!("reading a ticket")))?;
        Ok(Some(polled))
    }
}

/// What a ticket asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Asked {
    Statement(StatementTicket),
    Plan(Plan),
}

impl Asked {
    /// From the handle within a ticket that is to be redeemed.
    ///
    /// # Errors
    /// `Invalid`: it was not made by lake, was changed, or has expired.
    pub async fn decode(handle: &[u8], keys: &TicketKeys, deadline: Instant) -> Result<Self> {
        let asked = Self::of(handle, keys, deadline).await?;
        if let Self::Plan(plan) = &asked
            && plan.expires_ms < now_ms()
        {
            return Err(Error::invalid(format!(
                "the ticket has expired: it may be redeemed for {} minutes; plan the query again",
                LIFETIME.as_secs() / 60
            )));
        }
        Ok(asked)
    }

    /// The same of a ticket that may have expired: what was begun by it may still be running.
    ///
    /// # Errors
    /// `Invalid`: it was not made by lake, or was changed.
    pub async fn of(handle: &[u8], keys: &TicketKeys, deadline: Instant) -> Result<Self> {
        let Some((&PLAN, signed)) = handle.split_first() else {
            return StatementTicket::from_handle(handle).map(Self::Statement);
        };
        let message = keys.verify(signed, deadline).await?;
        let (mut plan, parameters): (Plan, _) =
            read(message).map_err(|e| e.while_doing(format_args!("reading a ticket")))?;
        plan.statement.parameters = parameters;
        Ok(Self::Plan(plan))
    }

    /// The statement.
    pub fn statement(&self) -> &StatementTicket {
        match self {
            Asked::Statement(statement) | Asked::Plan(Plan { statement, .. }) => statement,
        }
    }

    /// What is to be planned.
    pub fn bound(&self) -> Bound {
        match self {
            Asked::Statement(statement) => statement.bound(),
            Asked::Plan(plan) => {
                Bound { pins: plan.pins.clone(), ticket: Some(plan.statement.id), ..plan.statement.bound() }
            }
        }
    }
}

async fn signed(kind: u8, message: &[u8], keys: &TicketKeys, deadline: Instant) -> Result<Ticket> {
    let mut handle = vec![kind];
    handle.extend(keys.sign(message, deadline).await?);
    Ok(in_ticket(handle.into()))
}

fn in_ticket(handle: Bytes) -> Ticket {
    let command = TicketStatementQuery { statement_handle: handle };
    Ticket { ticket: command.as_any().encode_to_vec().into() }
}

fn with_values(what: &impl Serialize, values: Option<&RecordBatch>) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(what).map_err(|e| Error::internal(format!("making a ticket: {e}")))?;
    if let Some(values) = values {
        bytes.push(VALUES);
        bytes.extend(bound::to_bytes(values)?);
    }
    Ok(bytes)
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Option<RecordBatch>)> {
    let end = bytes.iter().position(|byte| *byte == VALUES);
    let (json, values) = match end {
        Some(end) => (&bytes[..end], Some(bound::from_bytes(&bytes[end + 1..])?)),
        None => (bytes, None),
    };
    let read = serde_json::from_slice(json).map_err(|e| Error::invalid(e.to_string()))?;
    Ok((read, values))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use arrow_flight::sql::{Any, Command};
    use lake_client::memory::MemoryStore;
    use lake_client::store::SharedStore;

    use super::*;
    use crate::error::Kind;

    fn handle(ticket: &Ticket) -> Bytes {
        let any = Any::decode(&*ticket.ticket).unwrap();
        match Command::try_from(any).unwrap() {
            Command::TicketStatementQuery(ticket) => ticket.statement_handle,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn tickets_come_back_and_plans_are_signed() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let keys = TicketKeys::new(store);
        let soon = Instant::now() + Duration::from_secs(10);
        let column: ArrayRef = Arc::new(Int64Array::from(vec![7]));
        let parameters = Some(RecordBatch::try_from_iter([("a", column)]).unwrap());
        let statement = StatementTicket { parameters, ..StatementTicket::new("SELECT '\0', ?") };
        let ticket = handle(&statement.encode().unwrap());
        assert_eq!(Asked::decode(&ticket, &keys, soon).await, Ok(Asked::Statement(statement.clone())));
        let plan = Plan::new(statement, Some(Arc::default()), Some(Duration::from_secs(3)));
        let ticket = handle(&plan.encode(&keys, soon).await.unwrap());
        assert_eq!(Asked::decode(&ticket, &keys, soon).await, Ok(Asked::Plan(plan.clone())));
        let mut forged = ticket.to_vec();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(Asked::decode(&forged, &keys, soon).await.unwrap_err().kind, Kind::Invalid);
        let unsigned = with_values(&plan, None).unwrap();
        assert_eq!(Asked::decode(&unsigned, &keys, soon).await.unwrap_err().kind, Kind::Invalid);
        let past = Plan { expires_ms: now_ms() - 1, ..plan };
        let ticket = handle(&past.encode(&keys, soon).await.unwrap());
        let error = Asked::decode(&ticket, &keys, soon).await.unwrap_err();
        assert!(error.message.contains("expired"), "{error}");
        assert_eq!(Asked::of(&ticket, &keys, soon).await, Ok(Asked::Plan(past)), "what it began can be cancelled");
        assert_eq!(Asked::decode(b"", &keys, soon).await.unwrap_err().kind, Kind::Invalid);
    }

    #[tokio::test]
    async fn the_name_of_a_polled_query_is_signed_and_no_plan() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let keys = TicketKeys::new(store);
        let soon = Instant::now() + Duration::from_secs(10);
        let polled = Polled { id: Uuid::new_v4(), node: "there:1".to_owned() };
        let ticket = handle(&polled.encode(&keys, soon).await.unwrap());
        assert_eq!(Polled::of(&ticket, &keys, soon).await, Ok(Some(polled)));
        assert_eq!(Asked::decode(&ticket, &keys, soon).await.unwrap_err().kind, Kind::Invalid);
        let mut forged = ticket.to_vec();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(Polled::of(&forged, &keys, soon).await.unwrap_err().kind, Kind::Invalid);
        let statement = handle(&StatementTicket::new("SELECT 1").encode().unwrap());
        assert_eq!(Polled::of(&statement, &keys, soon).await, Ok(None));
    }
}
