//! Changes as a watch brings them, as plain values (semantics, section 7).

use crate::kv::{Invalid, KeyValue, Revision};
use crate::v1;

/// What one message of a watch holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// In revision order; none: only the progress is told.
    pub changes: Vec<Change>,
    /// Every change under the prefix up to this revision has been told: go on from the one after it.
    pub progress: Revision,
}

/// What one transaction changed under the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub revision: Revision,
    /// One per key, in key order.
    pub events: Vec<Event>,
}

/// What a transaction left under one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub key: String,
    /// `None`: deleted.
    pub entry: Option<KeyValue>,
}

impl TryFrom<v1::WatchResponse> for Changes {
    type Error = Invalid;

    fn try_from(r: v1::WatchResponse) -> Result<Self, Invalid> {
        let changes = r.changes.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?;
        Ok(Changes { changes, progress: r.progress_revision })
    }
}

impl TryFrom<v1::Change> for Change {
    type Error = Invalid;

    fn try_from(c: v1::Change) -> Result<Self, Invalid> {
        if c.events.is_empty() {
            return Err(Invalid::Missing("change's events"));
        }
        let event = |e: v1::Event| Event { key: e.key, entry: e.entry.map(Into::into) };
        Ok(Change { revision: c.revision, events: c.events.into_iter().map(event).collect() })
    }
}
