//! The answers to changes of transactions, until they are handed out.
//!
//! A driver asks for a change and fetches its answer apart, so that its user may go on, and COMMIT, without having seen what became
//! of it. A change that was asked for and not run keeps COMMIT away ([`Transactions::asked`]); one whose client goes away before its
//! answer is handed out is cancelled, and aborts the transaction, as one that fails.

use std::sync::Arc;

use futures::StreamExt;
use uuid::Uuid;

use super::rows::FlightStream;
use super::running::Running;
use crate::error::{Error, Result};
use crate::sql::session::Settings;
use crate::sql::statement::Command;
use crate::sql::transactions::{Handle, Transactions, shortened};

/// An answer that is due. Dropped before it was [given](Answering::given), it aborts its transaction.
#[derive(Debug)]
pub struct Answering {
    transactions: Arc<Transactions>,
    running: Running,
    id: Uuid,
    what: String,
    /// `None`: of no transaction, or settled.
    of: Option<Handle>,
}

impl Answering {
    /// That of a change, which runs by `id`.
    ///
    /// # Errors
    /// `Invalid`: the settings name no transaction of lake's.
    pub fn new(
        transactions: Arc<Transactions>,
        running: Running,
        id: Uuid,
        command: Command,
        sql: &str,
        settings: &Settings,
    ) -> Result<Self> {
        let of: Option<Handle> = match command {
            // Of the session: they change nothing in a transaction, and how it ends can be asked for again.
            Command::Begin | Command::Commit | Command::Rollback | Command::Set => None,
            _ => settings.transaction.as_deref().map(str::parse::<Handle>).transpose()?,
        };
        Ok(Self { transactions, running, id, what: shortened(sql), of })
    }

    /// The change was made, and the client is told.
    pub fn given(mut self) {
        if let Some(handle) = self.of.take() {
            self.transactions.fetched(&handle, self.id);
        }
    }

    /// The client is told why it was not made, which has aborted the transaction or done nothing.
    pub fn refused(mut self) {
        self.of = None;
    }

    /// The answer, given once all of it was taken.
    pub fn hand_out(self, answer: FlightStream) -> FlightStream {
        let last = async move {
            self.given();
            None
        };
        Box::pin(answer.chain(futures::stream::once(last).filter_map(std::future::ready)))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(handle) = &self.of {
            let why = format!("its client gave up a change before the answer was handed out: {}", self.what);
            // First, so that nothing of it begins any more.
            self.transactions.fail(handle, &Error::cancelled(why));
            self.running.cancel(self.id);
        }
    }
}
