//! What a commit's requirements and updates make of a table's metadata. Pure: nothing is read or written here.
//!
//! The iceberg crate checks and applies; what it leaves to catalogs is here:
//! - A snapshot whose sequence number, or whose first row id, has been passed by another commit is a lost race, not a wrong
//!   request.
//! - A table's uuid and location are its catalog's.
//! - A table that is created by a commit keeps the ids the client has already written files with, while the crate's
//!   builder for new tables would assign its own.
//! - Metadata that the crate's code panics on is a wrong request, and nothing else.
//! - So is what it takes and lake cannot use ([`sound`]).

use std::panic::AssertUnwindSafe;

use iceberg::spec::{FormatVersion, MetadataLog, Schema, TableMetadata};
use iceberg::{ErrorKind, TableRequirement, TableUpdate};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use uuid::Uuid;

use super::error::{RestError, Result};
use super::request::unreadable;
use crate::table::sound;

/// Most requirements and updates of one commit.
const MAX_CHANGES: usize = 10_000;
/// The id before the first that a partition field gets.
const BEFORE_PARTITION_FIELDS: i64 = 999;

/// One table's part of a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    pub requirements: Vec<TableRequirement>,
    pub updates: Vec<TableUpdate>,
}

/// What a change makes of a version.
#[derive(Debug)]
pub enum Evolved {
    /// Nothing that is not so already.
    Unchanged,
    Next(Box<Next>),
}

/// The next version, not yet written.
#[derive(Debug)]
pub struct Next {
    pub metadata: TableMetadata,
    /// Metadata files that fell out of the metadata log.
    pub expired: Vec<MetadataLog>,
}

impl Change {
    /// Takes a change out of a request's body.
    ///
    /// # Errors
    /// 400, with the place of what is wrong.
    pub fn parse(body: &Value) -> Result<Self> {
        Ok(Self { requirements: entries(body, "requirements")?, updates: entries(body, "updates")? })
    }

    /// Whether the change creates its table.
    pub fn creates(&self) -> bool {
        self.requirements.contains(&TableRequirement::NotExist)
    }

    /// Checks the requirements against the table as it is; `None`: there is none.
    ///
    /// # Errors
    /// 409: one does not hold.
    pub fn check(&self, current: Option<&TableMetadata>) -> Result<()> {
        for requirement in &self.requirements {
            unpanicked("checking a requirement", || requirement.check(current))?
                .map_err(|e| RestError::lost(words(&e)))?;
        }
        Ok(())
    }

    /// Whether this very change was made already, and is sent again by something that got no answer: a version has the
    /// snapshots it adds, and the uuid it gives to what it creates. Both are the change's own.
    pub fn is_made(&self, current: &TableMetadata) -> bool {
        self.tells()
            && self.updates.iter().all(|update| match update {
                TableUpdate::AddSnapshot { snapshot } => current
                    .snapshot_by_id(snapshot.snapshot_id())
                    .is_some_and(|there| there.manifest_list() == snapshot.manifest_list()),
                TableUpdate::AssignUuid { uuid } => *uuid == current.uuid(),
                _ => true,
            })
    }

    /// Whether a later version tells if this change was made.
    pub fn tells(&self) -> bool {
        self.updates.iter().any(|update| match update {
            TableUpdate::AddSnapshot { .. } => true,
            TableUpdate::AssignUuid { .. } => self.creates(),
            _ => false,
        })
    }

    /// The version that follows `base`, which is at `base_location`.
    ///
    /// # Errors
    /// 400, with the place of the update that cannot be applied; 409 for a sequence number or row id that has been passed.
    pub fn apply(&self, base: &TableMetadata, base_location: &str) -> Result<Evolved> {
        self.catalogs_own(base)?;
        self.in_order(base)?;
        self.check_added(Some(base))?;
        let built = self.build(base, Some(base_location.to_owned()))?;
        Ok(match built.changes.is_empty() {
            true => Evolved::Unchanged,
            false => Evolved::Next(Box::new(Next { metadata: built.metadata, expired: built.expired_metadata_logs })),
        })
    }

    /// The first version of the table that this change creates; its location is where `locate` puts a table of that uuid.
    ///
    /// # Errors
    /// 400, with the place of what is missing or wrong.
    pub fn found(&self, locate: impl Fn(Uuid) -> String) -> Result<TableMetadata> {
        let uuid = self.updates.iter().find_map(|update| match update {
            TableUpdate::AssignUuid { uuid } => Some(*uuid),
            _ => None,
        });
        let uuid = uuid.unwrap_or_else(Uuid::new_v4);
        self.check_added(None)?;
        let base = self.foundation(uuid, &locate(uuid))?;
        self.catalogs_own(&base)?;
        self.in_order(&base)?;
        Ok(self.build(&base, None)?.metadata)
    }

    /// Checks what is added to a table, in words of the request; [`sound::check`] looks at what it makes of the table.
    ///
    /// # Errors
    /// 400, with the place of what is wrong.
    fn check_added(&self, base: Option<&TableMetadata>) -> Result<()> {
        // A column that several schemas have is one of a type that all of its types can be read as: the newest counts.
        let added = self.updates.iter().rev().filter_map(|update| match update {
            TableUpdate::AddSchema { schema } => Some(schema),
            _ => None,
        });
        let mut schemas: Vec<&Schema> = added.collect();
        if let Some(base) = base {
            schemas.push(base.current_schema());
            schemas.extend(base.schemas_iter().map(|schema| &**schema));
        }
        for (i, update) in self.updates.iter().enumerate() {
            let at = |field: &str| format!("updates[{i}].{field}");
            match update {
                TableUpdate::AddSchema { schema } => sound::check_schema(&at("schema"), schema),
                TableUpdate::AddSpec { spec } => sound::check_spec(&at("spec"), spec, &schemas),
                TableUpdate::AddSortOrder { sort_order } => sound::check_order(&at("sort-order"), sort_order, &schemas),
                _ => Ok(()),
            }
            .map_err(RestError::of_a_change)?;
        }
        Ok(())
    }

    /// Checks that nothing is changed that is not the client's to change.
    fn catalogs_own(&self, base: &TableMetadata) -> Result<()> {
        for (i, update) in self.updates.iter().enumerate() {
            let at = |field: &str| format!("updates[{i}].{field}");
            match update {
                TableUpdate::AssignUuid { uuid } if *uuid != base.uuid() => {
                    return Err(RestError::bad(&at("uuid"), format!("the table's is {}, and stays", base.uuid())));
                }
                TableUpdate::SetLocation { location } if location.trim_end_matches('/') != base.location() => {
                    return Err(RestError::bad(
                        &at("location"),
                        format!("the catalog chooses where a table lives; this one is at {}", base.location()),
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that each new snapshot comes after all there are: by its sequence number, and by the ids of its rows.
    ///
    /// # Errors
    /// 409: others have committed since it was made.
    pub fn in_order(&self, base: &TableMetadata) -> Result<()> {
        if base.format_version() == FormatVersion::V1 {
            return Ok(());
        }
        let mut last = base.last_sequence_number();
        for update in &self.updates {
            let TableUpdate::AddSnapshot { snapshot } = update else { continue };
            let sequence = snapshot.sequence_number();
            if sequence <= last {
                return Err(RestError::lost(format!(
                    "snapshot {} has sequence number {sequence}, and the table is at {last} already: another commit was \
                     first",
                    snapshot.snapshot_id()
                )));
            }
            last = sequence;
            let (first_row, next_row) = (snapshot.first_row_id(), base.next_row_id());
            if base.format_version() >= FormatVersion::V3 && first_row.is_some_and(|first| first < next_row) {
                return Err(RestError::lost(format!(
                    "snapshot {} has the row ids from {} on, and the table has given them up to {next_row} already: another \
                     commit was first",
                    snapshot.snapshot_id(),
                    first_row.unwrap_or_default()
                )));
            }
        }
        Ok(())
    }

    fn build(
        &self,
        base: &TableMetadata,
        base_location: Option<String>,
    ) -> Result<iceberg::spec::TableMetadataBuildResult> {
        let mut builder = base.clone().into_builder(base_location);
        for (i, update) in self.updates.iter().enumerate() {
            let field = format!("updates[{i}]");
            builder = unpanicked(&field, || update.clone().apply(builder))?.map_err(|e| refused(&field, &e))?;
        }
        unpanicked("updates", || builder.build())?.map_err(|e| refused("updates", &e))
    }

    /// A table as it would be before the updates that create it: with the schema, partition spec and sort order that they
    /// add first, under the ids that they give them.
    fn foundation(&self, uuid: Uuid, location: &str) -> Result<TableMetadata> {
        let (mut schema, mut spec, mut order, mut version) = (None, None, None, FormatVersion::V2 as u8);
        for update in &self.updates {
            match update {
                TableUpdate::AddSchema { schema: added } if schema.is_none() => schema = Some(to_json(added)?),
                TableUpdate::AddSpec { spec: added } if spec.is_none() => spec = Some(to_json(added)?),
                TableUpdate::AddSortOrder { sort_order } if order.is_none() => order = Some(to_json(sort_order)?),
                TableUpdate::UpgradeFormatVersion { format_version } => version = *format_version as u8,
                _ => {}
            }
        }
        let Some(schema) = schema else {
            return Err(RestError::bad("updates", "a table that is created needs an add-schema"));
        };
        let schema_id = schema.get("schema-id").and_then(Value::as_i64).unwrap_or(0);
        let mut spec = spec.unwrap_or_else(|| json!({"fields": []}));
        let mut last_partition_id = BEFORE_PARTITION_FIELDS;
        if spec.get("spec-id").is_none_or(Value::is_null) {
            spec["spec-id"] = json!(0);
        }
        for field in spec.get_mut("fields").and_then(Value::as_array_mut).into_iter().flatten() {
            match field.get("field-id").and_then(Value::as_i64) {
                Some(id) => last_partition_id = last_partition_id.max(id),
                None => {
                    last_partition_id += 1;
                    field["field-id"] = json!(last_partition_id);
                }
            }
        }
        let order = order.unwrap_or_else(|| json!({"order-id": 0, "fields": []}));
        let mut metadata = json!({
            "format-version": version,
            "table-uuid": uuid,
            "location": location,
            "last-updated-ms": 0,
            "last-column-id": highest_id(&schema),
            "current-schema-id": schema_id,
            "default-spec-id": spec["spec-id"],
            "last-partition-id": last_partition_id,
            "default-sort-order-id": order["order-id"],
            "sort-orders": [order],
            "properties": {},
        });
        match version {
            1 => {
                metadata["schema"] = schema.clone();
                metadata["partition-spec"] = spec["fields"].clone();
            }
            _ => {
                metadata["last-sequence-number"] = json!(0);
                if version >= FormatVersion::V3 as u8 {
                    metadata["next-row-id"] = json!(0);
                }
            }
        }
        metadata["schemas"] = json!([schema]);
        metadata["partition-specs"] = json!([spec]);
        let parsed = unpanicked("updates", || serde_json::from_value::<TableMetadata>(metadata))?;
        parsed.map_err(|e| RestError::bad("updates", format!("no table can be made of them: {e}")))
    }
}

/// The entries of a list in a request, each of which says where it is wrong.
pub fn entries<T: DeserializeOwned>(body: &Value, field: &str) -> Result<Vec<T>> {
    let list = match body.get(field) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(RestError::bad(field, "not a list")),
    };
    if list.len() > MAX_CHANGES {
        return Err(RestError::bad(field, format!("{} entries; one commit has at most {MAX_CHANGES}", list.len())));
    }
    let parse = |(i, entry): (usize, &Value)| {
        let field = format!("{field}[{i}]");
        let parsed = unpanicked(&field, || serde_json::from_value(entry.clone()))?;
        parsed.map_err(|e| unreadable(&field, &e))
    };
    list.iter().enumerate().map(parse).collect()
}

/// Runs code of the iceberg crate, which does not check everything it relies on.
///
/// # Errors
/// 400 if it panics: only what the request says can be the reason.
pub fn unpanicked<T>(field: &str, run: impl FnOnce() -> T) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(run))
        .map_err(|_| RestError::bad(field, "it contradicts itself or the table"))
}

/// The crate's refusal of something in a request.
pub fn refused(field: &str, error: &iceberg::Error) -> RestError {
    match error.kind() {
        ErrorKind::FeatureUnsupported => RestError::unsupported(format!("{field}: {}", words(error))),
        _ => RestError::bad(field, words(error)),
    }
}

/// The crate's words, without the name of the kind.
fn words(error: &iceberg::Error) -> String {
    let text = error.to_string();
    match text.split_once(" => ") {
        Some((_, words)) => words.to_owned(),
        None => text,
    }
}

fn to_json(value: &impl serde::Serialize) -> Result<Value> {
    unpanicked("updates", || serde_json::to_value(value))?.map_err(|e| RestError::bad("updates", e))
}

/// The highest id of a field anywhere in a schema's JSON.
fn highest_id(schema: &Value) -> i64 {
    match schema {
        Value::Object(map) => {
            let own = ["id", "element-id", "key-id", "value-id"].iter().filter_map(|name| map.get(*name)?.as_i64());
            let nested = map.iter().filter(|(name, _)| !name.ends_with("-default")).map(|(_, v)| highest_id(v));
            own.chain(nested).max().unwrap_or(0)
        }
        Value::Array(list) => list.iter().map(highest_id).max().unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(fields: Value) -> Value {
        json!({"type": "struct", "schema-id": 0, "fields": fields})
    }

    fn creation() -> Value {
        json!({
            "requirements": [{"type": "assert-create"}],
            "updates": [
                {"action": "assign-uuid", "uuid": Uuid::from_u128(7)},
                {"action": "upgrade-format-version", "format-version": 2},
                {"action": "add-schema", "schema": schema(json!([
                    {"id": 3, "name": "k", "type": "long", "required": true},
                    {"id": 9, "name": "l", "required": false,
                     "type": {"type": "list", "element-id": 12, "element": "string", "element-required": false}},
                ]))},
                {"action": "set-current-schema", "schema-id": -1},
                {"action": "add-spec", "spec": {"spec-id": 0, "fields": [
                    {"source-id": 3, "field-id": 1000, "name": "k_bucket", "transform": "bucket[4]"},
                ]}},
                {"action": "set-default-spec", "spec-id": -1},
                {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
                {"action": "set-default-sort-order", "sort-order-id": -1},
                {"action": "set-location", "location": "file:///w/t/"},
                {"action": "set-properties", "updates": {"a": "b"}},
            ],
        })
    }

    fn snapshot(id: i64, parent: Option<i64>, sequence: i64) -> Value {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
        let mut snapshot = json!({
            "snapshot-id": id, "sequence-number": sequence, "timestamp-ms": now,
            "manifest-list": format!("file:///w/t/metadata/snap-{id}.avro"), "schema-id": 0,
            "summary": {"operation": "append"},
        });
        if let Some(parent) = parent {
            snapshot["parent-snapshot-id"] = json!(parent);
        }
        json!([
            {"action": "add-snapshot", "snapshot": snapshot},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": id},
        ])
    }

    fn change(updates: Value) -> Change {
        Change::parse(&json!({"requirements": [], "updates": updates})).unwrap()
    }

    fn founded() -> TableMetadata {
        Change::parse(&creation()).unwrap().found(|_| "file:///w/t".into()).unwrap()
    }

    fn next(change: &Change, base: &TableMetadata) -> TableMetadata {
        match change.apply(base, "file:///w/t/metadata/0.json").unwrap() {
            Evolved::Next(next) => next.metadata,
            Evolved::Unchanged => panic!("nothing changed"),
        }
    }

    #[test]
    fn a_table_made_by_a_commit_keeps_the_ids_its_files_have() {
        let table = founded();
        assert_eq!(table.uuid(), Uuid::from_u128(7));
        assert_eq!(table.last_column_id(), 12);
        assert_eq!(table.current_schema().field_by_name("k").unwrap().id, 3);
        assert_eq!(table.default_partition_spec_id(), 0);
        assert_eq!(table.default_partition_spec().fields()[0].field_id, 1000);
        assert_eq!(table.partition_specs_iter().count(), 1);
        assert_eq!(table.properties()["a"], "b");
    }

    #[test]
    fn a_table_made_by_a_commit_may_have_rows_at_once() {
        let mut body = creation();
        let updates = body["updates"].as_array_mut().unwrap();
        updates.extend(snapshot(5, None, 1).as_array().unwrap().clone());
        let table = Change::parse(&body).unwrap().found(|_| "file:///w/t".into()).unwrap();
        assert_eq!((table.current_snapshot_id(), table.last_sequence_number()), (Some(5), 1));
    }

    #[test]
    fn what_is_missing_or_foreign_is_named() {
        let mut body = creation();
        body["updates"].as_array_mut().unwrap().remove(2);
        let error = Change::parse(&body).unwrap().found(|_| "file:///w/t".into()).unwrap_err();
        assert!(error.message.contains("there is no column with the id 3"), "{}", error.message);

        let elsewhere = Change::parse(&creation()).unwrap().found(|_| "file:///w/other".into()).unwrap_err();
        assert_eq!((elsewhere.status.as_u16(), &elsewhere.message[..19]), (400, "updates[8].location"));

        let table = founded();
        let refused = |updates: Value| change(updates).apply(&table, "0").unwrap_err();
        let moved = refused(json!([{"action": "set-location", "location": "file:///elsewhere"}]));
        assert!(moved.message.starts_with("updates[0].location"), "{}", moved.message);
        let other = refused(json!([{"action": "assign-uuid", "uuid": Uuid::from_u128(8)}]));
        assert!(other.message.starts_with("updates[0].uuid"), "{}", other.message);
        let back = refused(json!([{"action": "upgrade-format-version", "format-version": 1}]));
        assert_eq!((back.status.as_u16(), &back.message[..10]), (400, "updates[0]"));
        let unknown = refused(json!([{"action": "set-current-schema", "schema-id": 77}]));
        assert!(unknown.message.starts_with("updates[0]: "), "{}", unknown.message);
        for (body, field) in [
            (json!({"updates": [{"action": "add-schema"}]}), "updates[0]"),
            (json!({"updates": [{"action": "make-coffee"}]}), "updates[0]"),
            (json!({"updates": 3}), "updates"),
            (
                json!({"requirements": [{"type": "assert-create"}, {"type": "assert-ref-snapshot-id"}]}),
                "requirements[1]",
            ),
        ] {
            let error = Change::parse(&body).unwrap_err();
            assert!(error.message.starts_with(&format!("{field}: ")), "{}", error.message);
            assert_eq!(error.status.as_u16(), 400);
        }
    }

    #[test]
    fn a_passed_sequence_number_is_a_lost_race() {
        let first = next(&change(snapshot(1, None, 1)), &founded());
        let second = next(&change(snapshot(2, Some(1), 2)), &first);
        assert_eq!(second.last_sequence_number(), 2);
        for (parent, sequence) in [(Some(1), 2), (Some(1), 1), (None, 2)] {
            let lost = change(snapshot(3, parent, sequence)).apply(&second, "0").unwrap_err();
            assert_eq!((lost.status.as_u16(), lost.kind), (409, super::super::error::kind::COMMIT_FAILED));
        }
    }

    fn with_rows(id: i64, sequence: i64, rows: Option<(u64, u64)>) -> Value {
        let mut updates = snapshot(id, None, sequence);
        if let Some((first, added)) = rows {
            updates[0]["snapshot"]["first-row-id"] = json!(first);
            updates[0]["snapshot"]["added-rows"] = json!(added);
        }
        updates
    }

    #[test]
    fn in_version_3_each_snapshot_takes_the_next_row_ids() {
        let mut body = creation();
        body["updates"][1]["format-version"] = json!(3);
        let third = Change::parse(&body).unwrap().found(|_| "file:///w/t".into()).unwrap();
        assert_eq!((third.format_version(), third.next_row_id()), (FormatVersion::V3, 0));
        let first = next(&change(with_rows(1, 1, Some((0, 30)))), &third);
        assert_eq!((first.next_row_id(), first.current_snapshot().unwrap().row_range()), (30, Some((0, 30))));
        let passed = change(with_rows(2, 2, Some((29, 1)))).apply(&first, "0").unwrap_err();
        assert_eq!((passed.status.as_u16(), passed.kind), (409, super::super::error::kind::COMMIT_FAILED));
        // What is missing is no race.
        assert_eq!(change(with_rows(2, 2, None)).apply(&first, "0").unwrap_err().status.as_u16(), 400);
        assert_eq!(next(&change(with_rows(2, 2, Some((30, 0)))), &first).next_row_id(), 30);
        // What was written before has no ids; those of an upgraded table begin at 0.
        let older = next(&change(snapshot(1, None, 1)), &founded());
        let upgrade = json!([{"action": "upgrade-format-version", "format-version": 3}]);
        let upgraded = next(&change(upgrade), &older);
        assert_eq!((upgraded.format_version(), upgraded.next_row_id()), (FormatVersion::V3, 0));
        assert_eq!(next(&change(with_rows(2, 2, Some((0, 5)))), &upgraded).next_row_id(), 5);
    }

    #[test]
    fn requirements_that_do_not_hold_are_lost_races() {
        let table = next(&change(snapshot(1, None, 1)), &founded());
        let check = |requirement: Value, table: Option<&TableMetadata>| {
            let change = Change::parse(&json!({"requirements": [requirement], "updates": []})).unwrap();
            change.check(table).map_err(|e| e.status.as_u16())
        };
        for (holds, requirement) in [
            (false, json!({"type": "assert-create"})),
            (true, json!({"type": "assert-table-uuid", "uuid": Uuid::from_u128(7)})),
            (false, json!({"type": "assert-table-uuid", "uuid": Uuid::from_u128(8)})),
            (true, json!({"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 1})),
            (false, json!({"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2})),
            (false, json!({"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": null})),
            (true, json!({"type": "assert-ref-snapshot-id", "ref": "b", "snapshot-id": null})),
            (true, json!({"type": "assert-last-assigned-field-id", "last-assigned-field-id": 12})),
            (false, json!({"type": "assert-last-assigned-field-id", "last-assigned-field-id": 11})),
            (true, json!({"type": "assert-current-schema-id", "current-schema-id": 0})),
            (false, json!({"type": "assert-current-schema-id", "current-schema-id": 1})),
            (true, json!({"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1000})),
            (false, json!({"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 999})),
            (true, json!({"type": "assert-default-spec-id", "default-spec-id": 0})),
            (false, json!({"type": "assert-default-spec-id", "default-spec-id": 1})),
            (true, json!({"type": "assert-default-sort-order-id", "default-sort-order-id": 0})),
            (false, json!({"type": "assert-default-sort-order-id", "default-sort-order-id": 1})),
        ] {
            assert_eq!(check(requirement.clone(), Some(&table)).is_ok(), holds, "{requirement}");
        }
        assert_eq!(check(json!({"type": "assert-create"}), None), Ok(()));
        assert_eq!(check(json!({"type": "assert-current-schema-id", "current-schema-id": 0}), None), Err(409));
    }

    #[test]
    fn a_change_that_was_made_is_known_by_what_is_its_own() {
        let first = change(snapshot(1, None, 1));
        let table = next(&first, &founded());
        assert!(first.is_made(&table) && !first.is_made(&founded()));
        assert!(first.is_made(&next(&change(snapshot(2, Some(1), 2)), &table)), "others have gone on");
        let mut elsewhere = snapshot(1, None, 1);
        elsewhere[0]["snapshot"]["manifest-list"] = json!("file:///w/t/metadata/other.avro");
        assert!(!change(elsewhere).is_made(&table), "another's, by chance of the same id");
        let both: Vec<Value> = [snapshot(1, None, 1), snapshot(2, Some(1), 2)]
            .iter()
            .flat_map(|updates| updates.as_array().unwrap().clone())
            .collect();
        assert!(!change(json!(both)).is_made(&table), "half of it");
        let property = change(json!([{"action": "set-properties", "updates": {"a": "b"}}]));
        assert!(!property.is_made(&founded()), "it does not tell");
        assert!(Change::parse(&creation()).unwrap().is_made(&founded()));
    }

    #[test]
    fn what_cannot_be_used_is_named_by_its_place_in_the_request() {
        let fields = |of: Value| schema(json!([{"id": 3, "name": "k", "type": "long", "required": true}, of]));
        let decimal = fields(json!({"id": 20, "name": "d", "type": "decimal(99, 2)", "required": false}));
        let added = fields(json!({"id": 20, "name": "s", "type": "string", "required": false}));
        let spec = |source: i32, transform: &str| {
            json!({"action": "add-spec", "spec": {"fields": [
                {"source-id": source, "name": "x", "transform": transform}]}})
        };
        let order = |source: i32, transform: &str| {
            json!({"action": "add-sort-order", "sort-order": {"order-id": 1, "fields": [
                {"source-id": source, "transform": transform, "direction": "asc", "null-order": "nulls-first"}]}})
        };
        let of_new = |update: Value| json!([{"action": "add-schema", "schema": added}, update]);
        for (updates, at, word) in [
            (json!([{"action": "add-schema", "schema": decimal}]), "updates[0].schema, column d: ", "1 to 38"),
            (json!([{"action": "add-schema", "schema": schema(json!([]))}]), "updates[0].schema: ", "one column"),
            (json!([spec(3, "bucket[0]")]), "updates[0].spec, field x: ", "1 to 2147483647"),
            (json!([spec(9, "bucket[4]")]), "updates[0].spec, field x: ", "which is list"),
            (json!([spec(3, "truncate[2147483648]")]), "updates[0].spec, field x: ", "2147483647"),
            (json!([spec(77, "bucket[4]")]), "updates[0].spec, field x: ", "no column with the id 77"),
            (of_new(spec(20, "year")), "updates[1].spec, field x: ", "it takes date or timestamp"),
            (of_new(order(20, "hour")), "updates[1].sort-order, fields[0]: ", "it takes timestamp"),
            (json!([order(3, "truncate[0]")]), "updates[0].sort-order, fields[0]: ", "truncate[0]"),
            (json!([order(77, "identity")]), "updates[0].sort-order, fields[0]: ", "no column with the id 77"),
        ] {
            let error = change(updates.clone()).apply(&founded(), "0").unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.starts_with(at) && error.message.contains(word), "{updates}: {}", error.message);
            let mut body = creation();
            // What sets that as the default stays behind it.
            let (creates, more) = (body["updates"].as_array_mut().unwrap(), updates.as_array().unwrap());
            creates.splice(3..3, more.iter().cloned());
            let error = Change::parse(&body).unwrap().found(|_| "file:///w/t".into()).unwrap_err();
            assert!(error.status.as_u16() == 400 && error.message.contains(word), "{updates}: {}", error.message);
        }
        for wrong in ["bucket[-1]", "bucket[99999999999]", "truncate[]", "bucketful", "weekly"] {
            let error = Change::parse(&json!({"updates": [spec(3, wrong)]})).unwrap_err();
            assert!(error.status.as_u16() == 400 && error.message.contains(sound::TRANSFORMS), "{}", error.message);
        }
    }

    #[test]
    fn what_changes_nothing_is_no_commit() {
        let unchanged = change(json!([{"action": "set-location", "location": "file:///w/t"}]));
        assert!(matches!(unchanged.apply(&founded(), "0").unwrap(), Evolved::Unchanged));
    }
}
