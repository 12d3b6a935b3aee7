//! What nodes say to each other about the parts of a query: over DoExchange of Arrow Flight, beside what clients ask for.
//!
//! ```text
//! request                                                     answer
//! [Plan] plan, then nothing until the query ends              [Accepted], then nothing until the request ends
//! [Rows] nothing more                                         schema and rows, in Flight's form; at last [Ended] or [Failed]
//! ```
//! Requests carry JSON as the command of their descriptor, and what is encoded by DataFusion as their body; answers carry JSON as
//! application metadata. Only [`Answer::Ended`] ends rows, with their number: an answer that stops without it was cut off.

use arrow_flight::{FlightData, FlightDescriptor};
use bytes::Bytes;
use datafusion_distributed::TaskKey;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Kind, Result};

/// Says of a DoExchange that it is about a part of a query, and who asks: signed ([`super::token`]).
pub const TOKEN_HEADER: &str = "lake-part-bin";

/// A part of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Task {
    pub query: Uuid,
    pub stage: usize,
    pub number: usize,
}

impl From<TaskKey> for Task {
    fn from(key: TaskKey) -> Self {
        Self { query: key.query_id, stage: key.stage_id, number: key.task_number }
    }
}

/// How the rows of a part are divided among those who ask for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Head {
    AsTheyAre,
    /// All of them to each.
    Broadcast {
        partitions: usize,
    },
    /// By the partitioning in the request's body.
    Partitioned,
}

/// A request's first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// The plan in the body is this part's, which lasts as long as the request.
    Plan {
        task: Task,
        /// Of how many in its stage.
        tasks: usize,
        /// The node that is asked, as it is named in the plan.
        node: String,
    },
    /// Rows of a part whose plan the node has, or is about to have.
    Rows { task: Task, partition: usize, head: Head },
}

/// What comes back besides rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Accepted,
    /// These were all.
    Ended {
        rows: u64,
    },
    Failed {
        kind: String,
        message: String,
    },
}

impl Call {
    /// As it is sent.
    ///
    /// # Errors
    /// `Internal`: it cannot be written.
    pub fn write(&self, body: Vec<u8>) -> Result<FlightData> {
        let json =
            serde_json::to_vec(self).map_err(|e| Error::internal(format!("asking for a part of a query: {e}")))?;
        let descriptor = FlightDescriptor::new_cmd(json);
        Ok(FlightData { flight_descriptor: Some(descriptor), data_body: body.into(), ..FlightData::default() })
    }

    /// From what was sent, with its body.
    ///
    /// # Errors
    /// `Invalid`: it is nothing that a node says.
    pub fn read(data: FlightData) -> Result<(Self, Bytes)> {
        let call = data.flight_descriptor.as_ref().and_then(|descriptor| serde_json::from_slice(&descriptor.cmd).ok());
        let call = call.ok_or_else(|| Error::invalid("this is no request of a query node of this version"))?;
        Ok((call, data.data_body))
    }
}

impl Answer {
    pub fn failed(error: &Error) -> Self {
        Answer::Failed { kind: error.kind.as_str().to_owned(), message: error.message.clone() }
    }

    /// As it is sent. What cannot be written is nothing, which whoever waits for an answer takes for a failure.
    pub fn write(&self) -> FlightData {
        let json = serde_json::to_vec(self).unwrap_or_default();
        FlightData { app_metadata: json.into(), ..FlightData::default() }
    }

    /// What a message says, if it does not bring rows.
    ///
    /// # Errors
    /// `Internal`: it is nothing that a node says; an error that it tells of.
    pub fn read(data: &FlightData) -> Result<Option<Self>> {
        if !data.data_header.is_empty() {
            return Ok(None);
        }
        match serde_json::from_slice(&data.app_metadata) {
            Ok(Answer::Failed { kind, message }) => Err(Error::new(Kind::named(&kind), message)),
            Ok(answer) => Ok(Some(answer)),
            Err(e) => Err(Error::internal(format!("an answer about a part of a query cannot be read: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back() {
        let task = Task { query: Uuid::new_v4(), stage: 3, number: 1 };
        let calls = [
            Call::Plan { task, tasks: 2, node: "http://a:1/".into() },
            Call::Rows { task, partition: 4, head: Head::Broadcast { partitions: 8 } },
            Call::Rows { task, partition: 4, head: Head::Partitioned },
        ];
        for call in calls {
            let sent = call.write(b"body".to_vec()).unwrap();
            assert_eq!(Call::read(sent).unwrap(), (call, Bytes::from_static(b"body")));
        }
        assert_eq!(Task::from(TaskKey { query_id: task.query, stage_id: 3, task_number: 1 }), task);
        for answer in [Answer::Accepted, Answer::Ended { rows: 5 }] {
            assert_eq!(Answer::read(&answer.write()), Ok(Some(answer)));
        }
        let error = Error::exhausted("too much");
        assert_eq!(Answer::read(&Answer::failed(&error).write()), Err(error));
        assert_eq!(Call::read(FlightData::default()).unwrap_err().kind, Kind::Invalid);
        assert_eq!(
            Answer::read(&FlightData::default()).unwrap_err().kind,
            Kind::Internal,
            "an end is said, not guessed"
        );
        let rows = FlightData { data_header: Bytes::from_static(b"x"), ..FlightData::default() };
        assert_eq!(Answer::read(&rows), Ok(None));
    }
}
