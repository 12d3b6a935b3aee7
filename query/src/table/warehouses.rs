//! The warehouses that a node knows, and where a new table or view is to live.
//!
//! A node learns of warehouses by a watch, and where it matters by a look: before it chooses a place, and before it reads
//! from a bucket that it does not know. So a table never lands in the wrong place, and in the steady state nothing is asked.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::catalog::{Namespace, TableIdent};
use lake_client::follow::Told;
use lake_client::warehouse;
use uuid::Uuid;

use super::{Tables, catalog_error};
use crate::error::Result;

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

/// When a node last looked for a bucket that it did not know.
#[derive(Debug, Clone, Default)]
pub struct LastLook(Arc<Mutex<Option<Instant>>>);

impl LastLook {
    fn is_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() >= LOOK_AGAIN);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

impl Tables {
    /// Where a table or view of this name is to live that is made now.
    ///
    /// # Errors
    /// The metadata cannot be reached; `Invalid` if the place of its warehouse is this node's own.
    pub async fn new_place(&self, ident: &TableIdent, deadline: Instant) -> Result<Place> {
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

    /// Looks for the warehouse of a location in a bucket that the node does not know.
    ///
    /// # Errors
    /// As [`Tables::learn_warehouses`].
    pub(crate) async fn find_bucket(&self, location: &str, deadline: Instant) -> Result<()> {
        let unknown = warehouse::bucket(location).is_some_and(|bucket| !self.storage.knows_bucket(bucket));
        match unknown && self.last_look.is_due() {
            true => self.learn_warehouses(deadline).await,
            false => Ok(()),
        }
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
    use super::*;

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
