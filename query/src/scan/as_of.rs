//! Earlier versions of a table: which snapshot is meant, and which columns it has.

use std::fmt;

use arrow::compute::kernels::cast_utils::string_to_timestamp_nanos;
use iceberg::spec::{SchemaRef, SnapshotRef};

use crate::error::{Error, Result};
use crate::table::Table;

/// An earlier version, as a statement names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AsOf {
    /// A snapshot's id, or the name of a branch or a tag.
    Version(String),
    /// What was current at a time, in UTC unless it says otherwise.
    Timestamp(String),
}

impl fmt::Display for AsOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AsOf::Version(version) => write!(f, "FOR VERSION AS OF {version}"),
            AsOf::Timestamp(time) => write!(f, "FOR TIMESTAMP AS OF {time}"),
        }
    }
}

impl AsOf {
    /// The snapshot, and the columns that it is read with: those of its own time, but for a branch, which goes on, those of
    /// today.
    ///
    /// # Errors
    /// `NotFound` for what the table does not have (any more), `Invalid` for what is no time.
    pub fn find(&self, table: &Table) -> Result<(SnapshotRef, SchemaRef)> {
        let metadata = &table.metadata;
        let none = |why: String| Error::not_found(format!("table {} has no version {self}: {why}", table.ident));
        let columns_of = |snapshot: &SnapshotRef| snapshot.schema(metadata).map_err(Error::from);
        match self {
            AsOf::Version(version) => {
                if let Some(snapshot) = metadata.snapshot_for_ref(version) {
                    let columns = match refs(table)?.iter().any(|(name, is_branch)| name == version && *is_branch) {
                        true => metadata.current_schema().clone(),
                        false => columns_of(snapshot)?,
                    };
                    return Ok((snapshot.clone(), columns));
                }
                let Ok(id) = version.parse::<i64>() else {
                    return Err(none(format!("{version} is neither a snapshot's id nor a branch or a tag")));
                };
                let snapshot = metadata.snapshot_by_id(id);
                let snapshot = snapshot.ok_or_else(|| none("there is no such snapshot, or it has expired".into()))?;
                Ok((snapshot.clone(), columns_of(snapshot)?))
            }
            AsOf::Timestamp(text) => {
                let nanos = string_to_timestamp_nanos(text)
                    .map_err(|e| Error::invalid(format!("FOR TIMESTAMP AS OF {text}: this is no time: {e}")))?;
                let millis = nanos.div_euclid(1_000_000);
                let current = metadata.history().iter().rfind(|entry| entry.timestamp_ms() <= millis);
                let current = current.ok_or_else(|| none("as far as is known, it had no rows yet".into()))?;
                let snapshot = metadata.snapshot_by_id(current.snapshot_id);
                let snapshot = snapshot.ok_or_else(|| none(format!("snapshot {} has expired", current.snapshot_id)))?;
                Ok((snapshot.clone(), columns_of(snapshot)?))
            }
        }
    }
}

/// The table's branches and tags: their names, and whether it is a branch.
pub fn refs(table: &Table) -> Result<Vec<(String, bool)>> {
    let refs = refs_json(table)?;
    let is_branch = |reference: &serde_json::Value| reference["type"] == "branch";
    Ok(refs.into_iter().map(|(name, reference)| (name, is_branch(&reference))).collect())
}

/// The table's branches and tags as the metadata has them, by name. The crate shows them no other way.
pub fn refs_json(table: &Table) -> Result<Vec<(String, serde_json::Value)>> {
    let json = serde_json::to_value(table.metadata.as_ref())
        .map_err(|e| Error::internal(format!("reading the references of table {}: {e}", table.ident)))?;
    let refs = json.get("refs").and_then(serde_json::Value::as_object).cloned().unwrap_or_default();
    Ok(refs.into_iter().collect())
}
