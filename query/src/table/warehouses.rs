//! The warehouses that a node knows, and where a new table or view is to live.
//!
//! A node learns of warehouses by a watch, and where it matters by a look: before it chooses a place, and before it reads
//! from a bucket that it does not know. So a table never lands in the wrong place, and in the steady state nothing is asked.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iceberg::spec::TableMetadata;
use lake_client::catalog::{Namespace, TableIdent};
use lake_client::follow::Told;
use lake_client::warehouse;
use uuid::Uuid;

use super::{Tables, catalog_error, sound};
use crate::error::{Error, Result};
use crate::storage::Storage;

/// How long a look for changes may take, and the pause after one that failed.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
/// From one look for an unknown bucket to the next.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A uuid as text.
const UUID_CHARS: usize = 36;

/// Where something new is to live, but for its uuid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place(String);

impl Place {
    /// Names may hold what paths should not; the uuid keeps locations apart anyway. No level of a namespace ends as tables' locations
    /// do: none of these lies in another.
    pub fn new(root: &str, ident: &TableIdent) -> Self {
        let clean = |name: &str| -> String {
            let safe = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
            name.chars().take(64).map(safe).collect()
        };
        let level = |level: &String| {
            let level = clean(level);
            let ends_in_uuid = level.len() >= UUID_CHARS && Uuid::try_parse(&level[level.len() - UUID_CHARS..]).is_ok();
            if ends_in_uuid { level + "_" } else { level }
        };
        let namespace: Vec<String> = ident.namespace.levels().iter().map(level).collect();
        Self(format!("{root}/{}/{}", namespace.join("/"), clean(&ident.name)))
    }

    /// The location of the table or view with this uuid.
    pub fn of(&self, uuid: Uuid) -> String {
        format!("{}-{uuid}", self.0)
    }
}

/// When a node last looked for a bucket that it did not know; whoever looks holds it.
#[derive(Debug, Clone, Default)]
pub struct LastLook(Arc<tokio::sync::Mutex<Option<Instant>>>);

impl Tables {
    /// Where a table or view of this name is to live that is made now.
    ///
    /// # Errors
    /// The metadata cannot be reached; `Invalid` if the place of its warehouse is this node's own, or nothing new may have the name.
    pub async fn new_place(&self, ident: &TableIdent, deadline: Instant) -> Result<Place> {
        // Before anything is written there; the catalog decides.
        ident.check_new().map_err(|e| catalog_error("naming something new", e))?;
        self.learn_warehouses(deadline).await?;
        Ok(Place::new(&self.storage.root_of(&ident.namespace)?, ident))
    }

    /// Learns of the warehouses as they are now.
    ///
    /// # Errors
    /// The metadata cannot be reached, or what it says is damaged.
    pub async fn learn_warehouses(&self, deadline: Instant) -> Result<()> {
        let now = self.metadata.warehouses(deadline).await;
        self.storage.learn(now.map_err(|e| catalog_error("looking up the warehouses", e))?);
        Ok(())
    }

    /// Whether there is a warehouse of this name, besides the node's own.
    ///
    /// # Errors
    /// As [`Tables::learn_warehouses`].
    pub async fn has_warehouse(&self, name: &str, deadline: Instant) -> Result<bool> {
        let known = || self.storage.warehouses().profiles.contains_key(name);
        if known() {
            return Ok(true);
        }
        if Namespace::new([name]).is_err() {
            return Ok(false);
        }
        self.learn_warehouses(deadline).await?;
        Ok(known())
    }

    /// Looks for the warehouse of a location that the node does not know, or must not open, or waits for who does so already.
    ///
    /// # Errors
    /// As [`Tables::learn_warehouses`].
    pub(crate) async fn find_bucket(&self, location: &str, deadline: Instant) -> Result<()> {
        let unknown = || {
            let bucket = warehouse::bucket(location);
            self.storage.refuses(location) || bucket.is_some_and(|bucket| !self.storage.knows_bucket(bucket))
        };
        if !unknown() {
            return Ok(());
        }
        // Where no answer comes in time, what is done with the location says what is wrong.
        let looking = tokio::time::timeout_at(deadline.into(), self.last_look.0.lock()).await;
        let Ok(mut last) = looking else { return Ok(()) };
        if !unknown() || last.is_some_and(|last| last.elapsed() < LOOK_AGAIN) {
            return Ok(());
        }
        *last = Some(Instant::now());
        self.learn_warehouses(deadline).await
    }

    /// Checks that a client may name this location: it is in a warehouse, or the node does not keep to those.
    ///
    /// # Errors
    /// `Invalid`: begins with `what`; as [`Tables::learn_warehouses`].
    pub(crate) async fn check_place(&self, what: &str, location: &str, deadline: Instant) -> Result<()> {
        self.find_bucket(location, deadline).await?;
        if !self.storage.may_be_named(location) {
            return Err(Error::invalid(format!(
                "{what}: {location} is outside of every warehouse; what a table is made of is in the table's own location or in a \
                 warehouse, unless allow_local_files in the configuration of this node says otherwise"
            )));
        }
        Storage::check_location(location).map_err(|e| e.while_doing(what))
    }

    /// Checks metadata that comes in, of which only what is new since `base`: that it is sound ([`sound`]), and that what it names lies
    /// where it may.
    ///
    /// # Errors
    /// `Invalid`, with what is wrong; as [`Tables::learn_warehouses`].
    pub(crate) async fn check_incoming(
        &self,
        next: &TableMetadata,
        base: Option<&TableMetadata>,
        deadline: Instant,
    ) -> Result<()> {
        sound::check(next, base)?;
        for (what, location) in sound::places(next, base) {
            self.check_place(&what, &location, deadline).await?;
        }
        Ok(())
    }

    /// Learns of every change of the warehouses, until it is dropped.
    pub async fn follow_warehouses(&self) -> Infallible {
        let Some(mut changes) = self.metadata.follow_warehouses() else { return std::future::pending().await };
        loop {
            let told = match changes.next().await {
                Ok(Told::Changes(changes)) if changes.changes.is_empty() => continue,
                Ok(_) => self.learn_warehouses(Instant::now() + LOOK_WITHIN).await,
                Err(error) => Err(crate::Error::unavailable(error)),
            };
            if let Err(error) = told {
                tracing::debug!(%error, "looking after the warehouses failed");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use lake_client::cache::CacheConfig;
    use lake_client::memory::MemoryStore;
    use lake_client::metadata::Metadata;
    use lake_client::store::{Capabilities, Committed, Error, MetaStore, Page, Read, ReadOptions, SharedStore};
    use lake_client::warehouse::{Profile, S3};
    use lake_proto::kv::{KeyValue, Txn};

    use super::*;
    use crate::config::S3Config;
    use crate::storage::Storage;

    /// Takes a while to say which warehouses there are.
    #[derive(Debug)]
    struct Slow(SharedStore);

    #[async_trait]
    impl MetaStore for Slow {
        fn capabilities(&self) -> Capabilities {
            Capabilities { watch: false, ..self.0.capabilities() }
        }

        async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
            if key == "/lake/warehouses" {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.0.get(key, options, by).await
        }

        async fn batch_get(
            &self,
            keys: &[String],
            options: ReadOptions,
            by: Instant,
        ) -> Result<Read<Vec<KeyValue>>, Error> {
            self.0.batch_get(keys, options, by).await
        }

        async fn list(
            &self,
            prefix: &str,
            page: Option<&str>,
            limit: u32,
            options: ReadOptions,
            by: Instant,
        ) -> Result<Read<Page>, Error> {
            self.0.list(prefix, page, limit, options, by).await
        }

        async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
            self.0.commit(txn, by).await
        }
    }

    #[tokio::test]
    async fn who_comes_while_a_bucket_is_looked_for_waits_for_what_is_found() {
        let by = Instant::now() + Duration::from_secs(60);
        let store = MemoryStore::shared();
        let there = S3 { endpoint: Some("http://s3".into()), ..S3::default() };
        let profile = Profile::new("s3://b/p", Some(there)).unwrap();
        lake_client::Catalog::new(store.clone()).create_warehouse("w", &profile, by).await.unwrap();
        let storage = Storage::new("file:///nowhere", S3Config::default());
        let metadata = Metadata::new(Arc::new(Slow(store)), CacheConfig::default());
        let tables = Tables::new(storage.clone(), 1 << 20, metadata, 1 << 20);
        let knows = || async {
            tables.find_bucket("s3://b/p/t/metadata/1.json", by).await.unwrap();
            storage.knows_bucket("b")
        };
        assert_eq!(tokio::join!(knows(), knows(), knows()), (true, true, true));
    }

    #[test]
    fn no_location_lies_in_another() {
        let ident = |levels: &[&str], name: &str| {
            TableIdent::new(Namespace::new(levels.iter().copied()).unwrap(), name).unwrap()
        };
        let at = |ident: &TableIdent, uuid: Uuid| Place::new("file:///w", ident).of(uuid);
        let uuid = Uuid::from_u128(7);
        let table = at(&ident(&["n"], "t"), uuid);
        assert_eq!(table, format!("file:///w/n/t-{uuid}"));
        // A namespace that is called as the last part of the table's location, also once what is too long is cut off.
        let long = format!("{}t-{uuid}", "x".repeat(26));
        for (level, name) in [(format!("t-{uuid}"), "t"), (format!("{long}more"), &*format!("{}t", "x".repeat(26)))] {
            let table = at(&ident(&["n"], name), uuid);
            let inner = at(&ident(&["n", &level], "u"), Uuid::from_u128(8));
            assert!(!inner.starts_with(&format!("{table}/")), "{inner} is in {table}");
        }
        // Names that are written alike have a uuid each.
        let [one, two] = [at(&ident(&["a.b"], "t"), uuid), at(&ident(&["a_b"], "t"), Uuid::from_u128(8))];
        assert_eq!(one.replace(&uuid.to_string(), ""), two.replace(&Uuid::from_u128(8).to_string(), ""));
        assert_ne!(one, two);
    }
}
