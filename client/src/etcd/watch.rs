//! A watch of everything in etcd, as one of a prefix.

use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_proto::etcd as wire;
use lake_proto::etcd::event::EventType;
use lake_proto::kv::Revision;
use lake_proto::watch::{Change, Changes, Event};

use super::answers::{entry, unreadable};
use crate::clock;
use crate::remote::attempts::describe;
use crate::store::{Applied, Error, InVain, Leader};

/// How often progress is told that no change comes with, at most.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// A watch of etcd's.
pub(super) struct Watching {
    pub(super) stream: tonic::Streaming<wire::WatchResponse>,
    /// What it answered when it was opened.
    pub(super) first: Option<wire::WatchResponse>,
    pub(super) from_now: bool,
    /// The change that the next message may go on with.
    pub(super) unfinished: Option<Change>,
    /// The revision up to which everything has come, whatever it was about.
    pub(super) seen: Revision,
    /// The progress that was told last, and when.
    pub(super) told: Revision,
    pub(super) told_at: Instant,
    /// Where the keys lie that are told of.
    pub(super) under: (Bytes, Bytes),
    pub(super) root: String,
    pub(super) endpoints: Vec<String>,
    pub(super) doing: String,
    pub(super) since: Instant,
}

impl Watching {
    pub(super) async fn next(&mut self) -> Result<Changes, Error> {
        loop {
            let response = match self.first.take() {
                Some(first) => first,
                None => {
                    let quiet_until = (self.told_at + PROGRESS_EVERY).into();
                    let message = tokio::select! {
                        message = self.stream.message() => message,
                        () = tokio::time::sleep_until(quiet_until), if self.seen > self.told => {
                            return Ok(self.tell(Vec::new()));
                        }
                    };
                    match message {
                        Ok(Some(response)) => response,
                        Ok(None) => return Err(self.unavailable("etcd ended the stream".to_owned())),
                        Err(status) => return Err(self.unavailable(describe(&status))),
                    }
                }
            };
            if response.compact_revision > 0 {
                let oldest = response.compact_revision.unsigned_abs();
                return Err(Error::compacted(&self.doing, oldest));
            }
            if response.canceled {
                return Err(Error::Refused { doing: self.doing.clone(), message: response.cancel_reason });
            }
            let (created, at_once, more) = (response.created, revision(&response), response.fragment);
            let mut changes: Vec<Change> = self.unfinished.take().into_iter().collect();
            // Of the last event, whatever it is about.
            let mut last = None;
            for event in response.events {
                let (at, event) = self.event(event).map_err(|what| unreadable(&self.doing, what))?;
                last = Some(at);
                match (event, changes.last_mut()) {
                    (None, _) => {}
                    (Some(event), Some(change)) if change.revision == at => change.events.push(event),
                    (Some(event), _) => changes.push(Change { revision: at, events: vec![event] }),
                }
            }
            if more {
                self.unfinished = changes.pop_if(|change| last.is_none_or(|last| change.revision == last));
            }
            match last {
                // More of it may follow.
                Some(last) if more => self.seen = last.saturating_sub(1),
                // Later ones may be on their way, whatever the header says.
                Some(last) => self.seen = last,
                // What lies before the watch began has been told to somebody else.
                None if created && !self.from_now => self.seen = 0,
                None if !more => self.seen = self.seen.max(at_once),
                None => {}
            }
            if !changes.is_empty() || created && self.from_now {
                return Ok(self.tell(changes));
            }
        }
    }

    fn tell(&mut self, mut changes: Vec<Change>) -> Changes {
        for change in &mut changes {
            change.events.sort_by(|one, other| one.key.cmp(&other.key));
        }
        (self.told, self.told_at) = (self.seen, clock::now());
        Changes { changes, progress: self.seen }
    }

    /// The revision of an event, and what is told of it, if it is about a key that is watched.
    fn event(&self, event: wire::Event) -> Result<(Revision, Option<Event>), String> {
        let deleted = event.r#type() == EventType::Delete;
        let found = event.kv.ok_or("an event has no key")?;
        let at = u64::try_from(found.mod_revision).map_err(|_| "an event has a revision below 0")?;
        if found.key < self.under.0 || found.key >= self.under.1 {
            return Ok((at, None));
        }
        let found = entry(&self.root, found)?;
        let key = found.key.clone();
        Ok((at, Some(Event { key, entry: (!deleted).then_some(found) })))
    }

    fn unavailable(&self, last: String) -> Error {
        let (doing, elapsed) = (self.doing.clone(), clock::since(self.since));
        let in_vain = InVain { doing, attempts: 1, elapsed, leader: Leader::Without, last };
        in_vain.unavailable(self.endpoints.clone(), Applied::No)
    }
}

pub(super) fn revision(response: &wire::WatchResponse) -> Revision {
    response.header.as_ref().map_or(0, |header| header.revision.unsigned_abs())
}
