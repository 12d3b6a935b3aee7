//! `system.procedures`: what the cluster's leader, or the janitor, does in steps, and has done lately; `system.dropped_tables`: those of its
//! purges that can still be called off, by `UNDROP TABLE`.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use lake_client::procedures::purge::{CHECK, PURGE_TABLE, Purge, RETAIN};
use lake_client::procedures::{Procedure, State};

use super::Engine;
use super::system::whole;
use crate::error::{Error, Result};

/// The procedures that there are.
///
/// # Errors
/// `Unavailable` without a leader, or where the store is not to be had.
pub async fn read(engine: &Engine, deadline: Instant) -> Result<RecordBatch> {
    rows(&listed(engine, "system.procedures", deadline).await?)
}

/// The tables that can be undropped.
///
/// # Errors
/// As [`read`].
pub async fn dropped(engine: &Engine, deadline: Instant) -> Result<RecordBatch> {
    dropped_rows(&listed(engine, "system.dropped_tables", deadline).await?)
}

async fn listed(engine: &Engine, name: &str, deadline: Instant) -> Result<Vec<Procedure>> {
    let procedures = engine.tables().metadata.procedures(deadline).await;
    procedures.map_err(|e| Error::unavailable(format!("reading {name}: {e}")))
}

/// A table that was dropped.
struct Dropped<'a> {
    schema: String,
    table: String,
    purge: Purge,
    procedure: &'a Procedure,
}

impl Dropped<'_> {
    fn of(procedure: &Procedure) -> Option<Dropped<'_>> {
        let record = &procedure.record;
        let can_be_cancelled = [RETAIN, CHECK].contains(&record.step.as_str());
        if record.kind != PURGE_TABLE || record.state != State::Active || !can_be_cancelled {
            return None;
        }
        let purge: Purge = record.data().ok()?;
        let (schema, table) = match purge.namespace.join(".") {
            // Of before levels were kept.
            none if none.is_empty() => purge.table.rsplit_once('.').unwrap_or(("", purge.table.as_str())),
            schema => purge.table.split_at_checked(schema.len()).unwrap_or(("", purge.table.as_str())),
        };
        let (schema, table) = (schema.to_owned(), table.strip_prefix('.').unwrap_or(table).to_owned());
        Some(Dropped { schema, table, purge, procedure })
    }

    /// Until when it certainly waits, in milliseconds of the wall clock of the node that has dropped it: the leader counts from
    /// when it has seen the purge, which is later. `None` once the waiting is over, or while no leader has seen it.
    fn until(&self) -> Option<u64> {
        let record = &self.procedure.record;
        let waits = record.due_ms?.checked_sub(record.accepted_ms?)?;
        (record.step == RETAIN).then(|| record.submitted_unix_ms.saturating_add(waits))
    }
}

fn dropped_rows(procedures: &[Procedure]) -> Result<RecordBatch> {
    let dropped: Vec<Dropped<'_>> = procedures.iter().filter_map(Dropped::of).collect();
    let text = |of: &dyn Fn(&Dropped<'_>) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(dropped.iter().map(of)))
    };
    let time = |of: &dyn Fn(&Dropped<'_>) -> Option<u64>| -> ArrayRef {
        let times: TimestampMillisecondArray = dropped.iter().map(|d| of(d).map(whole)).collect();
        Arc::new(times.with_timezone("UTC"))
    };
    let columns = [
        ("table_schema", text(&|d| d.schema.clone())),
        ("table_name", text(&|d| d.table.clone())),
        ("dropped", time(&|d| Some(d.procedure.record.submitted_unix_ms))),
        ("undroppable_until", time(&|d| d.until())),
        ("step", text(&|d| d.procedure.record.step.clone())),
        ("table_uuid", text(&|d| d.purge.uuid.to_string())),
        ("procedure", text(&|d| d.procedure.id.clone())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)))
        .map_err(|e| Error::internal(format!("listing the dropped tables: {e}")))
}

fn rows(procedures: &[Procedure]) -> Result<RecordBatch> {
    type Text = fn(&Procedure) -> &str;
    type Number = fn(&Procedure) -> u64;
    let texts: [(&str, Text); 6] = [
        ("id", |p| &p.id),
        ("kind", |p| &p.record.kind),
        ("subject", |p| &p.record.subject),
        ("state", |p| p.record.state.as_str()),
        ("step", |p| &p.record.step),
        ("note", |p| &p.record.note),
    ];
    let numbers: [(&str, Number); 2] = [("steps", |p| p.record.steps), ("failures", |p| u64::from(p.record.failures))];
    let times: [(&str, Number); 2] =
        [("submitted", |p| p.record.submitted_unix_ms), ("changed", |p| p.record.changed_unix_ms)];
    let mut fields = Vec::new();
    let mut columns: Vec<ArrayRef> = Vec::new();
    for (name, of) in texts {
        fields.push(Field::new(name, DataType::Utf8, false));
        columns.push(Arc::new(StringArray::from_iter_values(procedures.iter().map(of))));
    }
    for (name, of) in numbers {
        fields.push(Field::new(name, DataType::Int64, false));
        columns.push(Arc::new(Int64Array::from_iter_values(procedures.iter().map(|p| whole(of(p))))));
    }
    for (name, of) in times {
        let values = TimestampMillisecondArray::from_iter_values(procedures.iter().map(|p| whole(of(p))));
        fields.push(Field::new(name, DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())), false));
        columns.push(Arc::new(values.with_timezone("UTC")));
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| Error::internal(format!("listing the procedures: {e}")))
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::TimestampMillisecondType;
    use lake_client::catalog::{Namespace, TableIdent, TablePointer};
    use lake_client::procedures::purge::{DELETE, of_drop};

    use super::*;

    #[test]
    fn what_can_be_undropped_is_listed_with_its_time() {
        let pointer = TablePointer { uuid: uuid::Uuid::nil(), metadata_location: "x".into(), previous_location: None };
        let purge = |schema: &str, table: &str| {
            let ident = TableIdent::new(Namespace::new([schema]).unwrap(), table).unwrap();
            let (id, record) = of_drop(&ident, &pointer, 7, 1_000_000);
            Procedure { id, mod_revision: 9, record }
        };
        let mut waits = purge("a.b", "t");
        waits.record.accepted_ms = Some(500);
        waits.record.due_ms = Some(60_500);
        let mut late = purge("s", "late");
        late.record.step = DELETE.to_owned();
        let mut ended = purge("s", "back");
        ended.record.state = State::Cancelled;
        let rows = dropped_rows(&[waits, late, purge("s", "new"), ended]).unwrap();
        let names = |name: &str| -> Vec<String> {
            rows.column_by_name(name).unwrap().as_string::<i32>().iter().flatten().map(str::to_owned).collect()
        };
        assert_eq!(names("table_schema"), ["a.b", "s"]);
        assert_eq!(names("table_name"), ["t", "new"]);
        let until = rows.column_by_name("undroppable_until").unwrap().as_primitive::<TimestampMillisecondType>();
        assert_eq!(until.iter().collect::<Vec<_>>(), [Some(1_060_000), None]);
    }
}
