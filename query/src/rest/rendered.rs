//! Versions of tables as they are written and sent: their JSON, by location. A version does not change, and writing one that has
//! many snapshots as JSON takes longer than all else that a load does; so what was written once is sent again as it is.
//!
//! Bounded in bytes, [`CAPACITY_BYTES`]: what is not here is written anew.

use bytes::Bytes;
use iceberg::spec::TableMetadata;
use moka::sync::Cache;

use crate::error::Result;
use crate::table::version;

/// Most bytes that are kept.
const CAPACITY_BYTES: u64 = 32 << 20;

#[derive(Debug, Clone)]
pub struct Rendered(Cache<String, Bytes>);

impl Default for Rendered {
    fn default() -> Self {
        Self::of(CAPACITY_BYTES)
    }
}

impl Rendered {
    fn of(capacity_bytes: u64) -> Self {
        let weight = |location: &String, json: &Bytes| u32::try_from(location.len() + json.len()).unwrap_or(u32::MAX);
        Self(Cache::builder().max_capacity(capacity_bytes).weigher(weight).build())
    }

    /// Keeps what was written to a location.
    pub fn keep(&self, location: &str, json: Bytes) {
        self.0.insert(location.to_owned(), json);
    }

    /// The version at a location as JSON.
    ///
    /// # Errors
    /// It cannot be written as JSON, which is a defect.
    pub fn json(&self, location: &str, metadata: &TableMetadata) -> Result<Bytes> {
        if let Some(json) = self.0.get(location) {
            return Ok(json);
        }
        let json = Bytes::from(version::to_json(metadata)?);
        self.keep(location, json.clone());
        Ok(json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_a_bound() {
        let rendered = Rendered::of(10_000);
        for n in 0..100 {
            rendered.keep(&format!("file:///t/{n}.json"), Bytes::from(vec![b' '; 1_000]));
        }
        rendered.0.run_pending_tasks();
        assert!(rendered.0.weighted_size() <= 10_000, "{}", rendered.0.weighted_size());
        assert!((1..10).contains(&rendered.0.entry_count()), "{}", rendered.0.entry_count());
    }
}
