//! What tickets and prepared statements hold: the statement itself, so that no node has to remember it.

use arrow_flight::Ticket;
use arrow_flight::sql::{ProstMessageExt, TicketStatementQuery};
use prost::Message;
use serde::{Deserialize, Serialize};
use tonic::Status;
use uuid::Uuid;

use crate::sql::session::Settings;

/// A statement to be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl StatementTicket {
    /// A ticket for a new operation.
    pub fn new(sql: impl Into<String>) -> Self {
        Self { id: Uuid::new_v4(), sql: sql.into(), timeout_ms: None, settings: Settings::default() }
    }

    /// As it travels in DoGet.
    pub fn encode(&self) -> Result<Ticket, Status> {
        let handle = serde_json::to_vec(self).map_err(|e| Status::internal(format!("making a ticket: {e}")))?;
        let command = TicketStatementQuery { statement_handle: handle.into() };
        Ok(Ticket { ticket: command.as_any().encode_to_vec().into() })
    }

    /// From the handle within a ticket.
    pub fn decode(handle: &[u8]) -> Result<Self, Status> {
        serde_json::from_slice(handle).map_err(|_| Status::invalid_argument("the ticket was not made by lake"))
    }
}
