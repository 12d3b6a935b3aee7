//! The cluster's clock: how long leaders have been on duty, all of them together, as a pure value.
//!
//! Procedures wait for hours and days, longer than a leader may lead, and no wall clock is to be believed. So the
//! leader counts on its own monotonic clock, from where the map says that the count stood, and now and then puts it
//! into the map. What was counted since the last time is lost with the leader: the clock runs a little late, and never
//! early. Only where procedures wait for it is it kept up.

use std::time::{Duration, Instant};

use lake_proto::kv::{Compare, Expected, KeyValue, Op, Revision, Txn};

/// Where the map keeps it: milliseconds, as decimal digits.
pub const KEY: &str = "/lake/clock";

/// The clock, as the leader of one term counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterClock {
    saved_ms: u64,
    /// Of the entry; `None`: there is none yet.
    revision: Option<Revision>,
    /// When it stood at `saved_ms`.
    at: Instant,
    /// When that was known to be in the map: it may take a while until it is.
    known: Instant,
}

impl ClusterClock {
    /// Goes on from what the map says.
    pub fn from_entry(entry: Option<&KeyValue>, now: Instant) -> Self {
        let text = entry.and_then(|entry| std::str::from_utf8(&entry.value).ok());
        // Something else in its place counts as nothing counted: what waits waits longer.
        let saved_ms = text.and_then(|text| text.parse().ok()).unwrap_or(0);
        Self { saved_ms, revision: entry.map(|entry| entry.mod_revision), at: now, known: now }
    }

    /// What it shows, in milliseconds.
    pub fn now_ms(&self, now: Instant) -> u64 {
        self.saved_ms.saturating_add(millis(now.saturating_duration_since(self.at)))
    }

    /// How much was counted since it was saved.
    pub fn unsaved(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.at)
    }

    /// Whether it was seen in the map within this time. However long commits take, there is such a time behind each.
    pub fn was_saved_within(&self, time: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.known) < time
    }

    /// What saves it as it now is; and what it is once that is known to be committed, at the revision that comes of it.
    pub fn save(&self, now: Instant) -> (Txn, impl FnOnce(Revision, Instant) -> Self + use<>) {
        let saved_ms = self.now_ms(now);
        let expected = self.revision.map_or(Expected::Absent, Expected::ModRevision);
        let then = vec![Op::put(KEY, saved_ms.to_string())];
        let txn = Txn { when: vec![Compare::expected(KEY, expected)], then, otherwise: vec![] };
        (txn, move |revision, known| Self { saved_ms, revision: Some(revision), at: now, known })
    }
}

/// In milliseconds.
pub fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use lake_client::clock;

    use super::*;

    #[test]
    fn a_new_leader_goes_on_from_what_was_saved_and_is_never_early() {
        let (start, s) = (clock::now(), Duration::from_secs);
        let first = ClusterClock::from_entry(None, start);
        assert_eq!((first.now_ms(start), first.now_ms(start + s(30))), (0, 30_000));
        let (txn, saved) = first.save(start + s(30));
        assert_eq!(txn.then, [Op::put(KEY, "30000")]);
        assert_eq!(txn.when, [Compare::absent(KEY)]);
        // Its commit took four seconds, which count.
        let first = saved(7, start + s(34));
        assert_eq!((first.now_ms(start + s(50)), first.unsaved(start + s(50))), (50_000, s(20)));
        let is_fresh = |at: u64| first.was_saved_within(s(2), start + s(at));
        assert!(is_fresh(34) && is_fresh(35) && !is_fresh(36), "a slow commit is no reason to save it again");
        assert_eq!(first.save(start + s(60)).0.when, [Compare::mod_revision(KEY, 7)]);

        let entry = |value: &'static str| KeyValue {
            key: KEY.to_owned(),
            value: value.into(),
            version: 1,
            create_revision: 7,
            mod_revision: 7,
            lease: None,
        };
        let next = ClusterClock::from_entry(Some(&entry("30000")), start + s(100));
        assert_eq!(next.now_ms(start + s(101)), 31_000, "what the first leader did not save is lost");
        assert_eq!(ClusterClock::from_entry(Some(&entry("noon")), start).now_ms(start), 0);
    }
}
