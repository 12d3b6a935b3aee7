//! ALTER TABLE and COMMENT: what they ask for, and what becomes of a table's metadata.
//!
//! Columns keep their ids, so files written before read right under the new names and types; a new column has an id that none
//! ever had. An alteration is applied to whatever version is current when it is committed; where it does not fit that one,
//! it is refused there.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{Field, FieldRef};
use datafusion::common::ScalarValue;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{DdlStatement, LogicalPlan};
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    AlterColumnOperation, AlterTable, AlterTableOperation, ColumnDef, ColumnOption, CommentObject, DataType, Expr,
    Ident, MySQLColumnPosition, ObjectName, ObjectNamePart, SqlOption, Statement, Value,
    helpers::stmt_create_table::CreateTableBuilder,
};
use iceberg::spec::{FormatVersion, Schema, TableMetadata, TableMetadataBuilder};

use super::columns::{Columns, shown};
use super::procedures::constant;
use super::statement::{normalize, place, refused};
use super::{add_files, column_types};
use crate::error::{Error, Result};
use crate::scan::adapter::NAME_MAPPING;
use crate::table::FORMAT_VERSION;
use crate::table::layout::Layout;
use crate::table::version::Edit;

/// Properties that say what the metadata says elsewhere.
const RESERVED: [&str; 10] = [
    FORMAT_VERSION,
    "uuid",
    "snapshot-count",
    "current-snapshot-id",
    "current-snapshot-summary",
    "current-snapshot-timestamp-ms",
    "current-schema",
    "default-partition-spec",
    "default-sort-order",
    "location",
];

/// The property that a table's comment is kept in.
pub const COMMENT: &str = "comment";

/// One thing that is to be altered. Names of columns are paths ([`super::columns`]).
#[derive(Debug, Clone)]
pub enum Alteration {
    AddColumn {
        /// Its name is a path.
        column: FieldRef,
        required: bool,
        comment: Option<String>,
        default: Option<ScalarValue>,
        place: Option<Place>,
        if_not_exists: bool,
    },
    DropColumn {
        name: String,
        if_exists: bool,
    },
    RenameColumn {
        from: String,
        to: String,
    },
    MoveColumn {
        name: String,
        place: Place,
    },
    SetType {
        name: String,
        column: FieldRef,
    },
    DropNotNull {
        name: String,
    },
    /// What rows hold from now on that are written without a value.
    SetDefault {
        name: String,
        value: Option<ScalarValue>,
    },
    CommentColumn {
        name: String,
        comment: Option<String>,
    },
    SetProperties(HashMap<String, String>),
    RemoveProperties {
        names: Vec<String>,
        if_exists: bool,
    },
    /// The table has this format version from now on.
    Upgrade(FormatVersion),
    /// Partitioning of what is written from now on.
    SetPartition(Layout),
    /// Order of what is written from now on.
    SetOrder(Layout),
}

/// Where a column goes, among those beside it.
#[derive(Debug, Clone)]
pub enum Place {
    First,
    After(String),
}

impl Place {
    fn of(position: &MySQLColumnPosition) -> Self {
        match position {
            MySQLColumnPosition::First => Place::First,
            MySQLColumnPosition::After(name) => Place::After(normalize(name)),
        }
    }
}

/// What a statement asks for.
///
/// # Errors
/// `NotSupported`, by name, for what lake does not do.
pub async fn alterations(state: &SessionState, alter: &AlterTable) -> Result<Vec<Alteration>> {
    if alter.only || alter.location.is_some() || alter.on_cluster.is_some() || alter.table_type.is_some() {
        return Err(refused("this form of ALTER TABLE"));
    }
    let mut alterations = Vec::new();
    for operation in &alter.operations {
        alterations.extend(alteration(state, operation).await?);
    }
    Ok(alterations)
}

async fn alteration(state: &SessionState, operation: &AlterTableOperation) -> Result<Vec<Alteration>> {
    Ok(match operation {
        AlterTableOperation::AddColumn { if_not_exists, column_def, column_position, .. } => {
            let (mut comment, mut default, mut required) = (None, None, false);
            for option in &column_def.options {
                match &option.option {
                    ColumnOption::Null => {}
                    ColumnOption::Comment(text) => comment = Some(text.clone()),
                    ColumnOption::NotNull => required = true,
                    ColumnOption::Default(value) => default = Some(constant(state, value).await?),
                    other => return Err(refused(&format!("{other} on a column")).at(place(&column_def.name))),
                }
            }
            if required && default.as_ref().is_none_or(ScalarValue::is_null) {
                let words = "a column that is NOT NULL and that existing rows do not have";
                return Err(refused(words).at(place(&column_def.name)));
            }
            let place = column_position.as_ref().map(Place::of);
            let column = column(state, column_def).await?;
            vec![Alteration::AddColumn { column, required, comment, default, place, if_not_exists: *if_not_exists }]
        }
        AlterTableOperation::DropColumn { column_names, if_exists, drop_behavior: None, .. } => {
            let drop = |name| Alteration::DropColumn { name: normalize(name), if_exists: *if_exists };
            column_names.iter().map(drop).collect()
        }
        AlterTableOperation::RenameColumn { old_column_name, new_column_name } => {
            vec![Alteration::RenameColumn { from: normalize(old_column_name), to: normalize(new_column_name) }]
        }
        // As ALTER COLUMN ... FIRST and AFTER are parsed.
        AlterTableOperation::ModifyColumn {
            col_name,
            data_type: DataType::Unspecified,
            column_position: Some(position),
            ..
        } => vec![Alteration::MoveColumn { name: normalize(col_name), place: Place::of(position) }],
        AlterTableOperation::AlterColumn { column_name, op } => {
            let name = normalize(column_name);
            match op {
                AlterColumnOperation::DropNotNull => vec![Alteration::DropNotNull { name }],
                AlterColumnOperation::SetNotNull => {
                    let why = "rows of earlier versions, to which the table can go back, may have none";
                    let what = format!("column {} cannot become NOT NULL: {why}", shown(&name));
                    return Err(Error::invalid(what).at(place(column_name)));
                }
                AlterColumnOperation::SetDefault { value } => {
                    let value = constant(state, value).await?;
                    vec![Alteration::SetDefault { name, value: Some(value).filter(|value| !value.is_null()) }]
                }
                AlterColumnOperation::DropDefault => vec![Alteration::SetDefault { name, value: None }],
                AlterColumnOperation::SetDataType { data_type, using: None, .. } => {
                    let definition =
                        ColumnDef { name: column_name.clone(), data_type: data_type.clone(), options: Vec::new() };
                    vec![Alteration::SetType { name, column: column(state, &definition).await? }]
                }
                other => return Err(refused(&format!("ALTER COLUMN ... {other}")).at(place(column_name))),
            }
        }
        AlterTableOperation::SetTblProperties { table_properties } => {
            // UNSET comes as values in parentheses: false for IF EXISTS.
            let unset = |option: &SqlOption| match option {
                SqlOption::KeyValue { key, value: Expr::Nested(value) } => {
                    Some((key.value.clone(), **value == Expr::value(Value::Boolean(false))))
                }
                _ => None,
            };
            match table_properties.iter().map(unset).collect::<Option<Vec<_>>>() {
                Some(unset) if !unset.is_empty() => {
                    let if_exists = unset.iter().all(|(_, if_exists)| *if_exists);
                    vec![Alteration::RemoveProperties {
                        names: unset.into_iter().map(|(name, _)| name).collect(),
                        if_exists,
                    }]
                }
                _ => properties_of_altered(table_properties)?,
            }
        }
        other => {
            let text = other.to_string();
            let words: Vec<&str> = text.split(' ').take(2).collect();
            return Err(refused(&format!("ALTER TABLE ... {}", words.join(" "))));
        }
    })
}

/// What SET TBLPROPERTIES of a table asks for, which may upgrade it.
fn properties_of_altered(options: &[SqlOption]) -> Result<Vec<Alteration>> {
    let mut properties = properties_of_new(options)?;
    let upgrade = match properties.remove(FORMAT_VERSION).as_deref() {
        None => None,
        Some("1") => Some(FormatVersion::V1),
        Some("2") => Some(FormatVersion::V2),
        Some("3") => Some(FormatVersion::V3),
        Some(other) => return Err(Error::invalid(format!("{FORMAT_VERSION} is {other:?}, and must be 2 or 3"))),
    };
    Ok(upgrade.map(Alteration::Upgrade).into_iter().chain([Alteration::SetProperties(properties)]).collect())
}

/// What COMMENT ON asks for, and of which table.
///
/// # Errors
/// `NotSupported` for comments on other things than tables and columns.
pub fn comment(object: &CommentObject, name: &ObjectName, text: Option<String>) -> Result<(ObjectName, Alteration)> {
    match object {
        CommentObject::Table => {
            let alteration = match text {
                Some(text) => Alteration::SetProperties([(COMMENT.to_owned(), text)].into()),
                None => Alteration::RemoveProperties { names: vec![COMMENT.to_owned()], if_exists: true },
            };
            Ok((name.clone(), alteration))
        }
        CommentObject::Column => {
            let mut parts = name.0.clone();
            let column = parts.pop().and_then(|part| part.as_ident().cloned());
            let (Some(column), false) = (column, parts.is_empty()) else {
                return Err(Error::invalid("COMMENT ON COLUMN names a table and a column: t.c"));
            };
            Ok((ObjectName(parts), Alteration::CommentColumn { name: normalize(&column), comment: text }))
        }
        other => Err(refused(&format!("COMMENT ON {other}"))),
    }
}

/// `'key' = 'value'` pairs.
///
/// # Errors
/// `Invalid` for a value that is no literal, and for a reserved name.
pub fn properties(options: &[SqlOption]) -> Result<HashMap<String, String>> {
    let properties = pairs(options)?;
    properties.keys().try_for_each(|name| check_property(name))?;
    Ok(properties)
}

/// [`properties`] of a table, which may say in which format version it is.
///
/// # Errors
/// As [`properties`].
pub fn properties_of_new(options: &[SqlOption]) -> Result<HashMap<String, String>> {
    let properties = pairs(options)?;
    properties.keys().filter(|name| *name != FORMAT_VERSION).try_for_each(|name| check_property(name))?;
    Ok(properties)
}

fn pairs(options: &[SqlOption]) -> Result<HashMap<String, String>> {
    let mut properties = HashMap::new();
    for option in options {
        let SqlOption::KeyValue { key, value } = option else {
            return Err(Error::invalid(format!("{option} is not a property: write 'key' = 'value'")));
        };
        let text = match value {
            Expr::Value(value) => match &value.value {
                Value::SingleQuotedString(text) | Value::Number(text, _) => text.clone(),
                Value::Boolean(value) => value.to_string(),
                _ => return Err(Error::invalid(format!("property {key}: {value} is no text, number or boolean"))),
            },
            other => return Err(Error::invalid(format!("property {key}: {other} is no text, number or boolean"))),
        };
        properties.insert(key.value.clone(), text);
    }
    Ok(properties)
}

fn check_property(name: &str) -> Result<()> {
    match RESERVED.contains(&name) {
        true => Err(Error::invalid(format!("property {name} is not set but follows from what the table is"))),
        false => Ok(()),
    }
}

/// The column that a definition means, with the type that DataFusion gives it.
async fn column(state: &SessionState, definition: &ColumnDef) -> Result<FieldRef> {
    column_types::check(definition)?;
    let name = ObjectName(vec![ObjectNamePart::Identifier(Ident::new("columns"))]);
    let options = Vec::new();
    let definition = ColumnDef { name: definition.name.clone(), data_type: definition.data_type.clone(), options };
    let create = CreateTableBuilder::new(name).columns(vec![definition]).build();
    let plan = state.statement_to_plan(Parsed::Statement(Box::new(Statement::CreateTable(create)))).await?;
    match plan {
        LogicalPlan::Ddl(DdlStatement::CreateMemoryTable(create)) => {
            let schema = create.input.schema().as_arrow().clone();
            let field = schema.fields().first().ok_or_else(|| Error::internal("a column without a type"))?;
            Ok(Arc::new(Field::new(field.name(), field.data_type().clone(), true)))
        }
        _ => Err(Error::internal("a column definition was planned as something else")),
    }
}

/// The edit that makes the alterations, in order.
pub fn edit(alterations: Vec<Alteration>) -> Edit {
    Arc::new(move |base, builder| apply(&alterations, base, builder))
}

fn apply(
    alterations: &[Alteration],
    base: &TableMetadata,
    mut builder: TableMetadataBuilder,
) -> Result<TableMetadataBuilder> {
    let schema = base.current_schema();
    let mut columns = Columns::new(base);
    for alteration in alterations {
        match alteration {
            Alteration::AddColumn { column, required, comment, default, place, if_not_exists } => {
                if *if_not_exists && columns.find(column.name()).is_ok() {
                    continue;
                }
                let mut field = columns.new_field(column)?;
                field.doc = comment.clone();
                field.required = *required;
                if let Some(value) = default {
                    field.write_default = columns.default(&field, value)?;
                    field.initial_default = field.write_default.clone();
                }
                columns.add(column.name(), field, place.as_ref())?;
            }
            Alteration::DropColumn { name, if_exists } => match columns.find(name) {
                Err(_) if *if_exists => {}
                _ => columns.drop(name)?,
            },
            Alteration::RenameColumn { from, to } => columns.rename(from, to)?,
            Alteration::MoveColumn { name, place } => columns.move_to(name, place)?,
            Alteration::SetType { name, column } => columns.set_type(name, column)?,
            Alteration::DropNotNull { name } => columns.change(name, &mut |field| {
                field.required = false;
                Ok(())
            })?,
            Alteration::SetDefault { name, value } => {
                let default = match value {
                    Some(value) => columns.default(columns.find(name)?, value)?,
                    None => None,
                };
                columns.change(name, &mut |field| {
                    field.write_default = default.clone();
                    Ok(())
                })?;
            }
            Alteration::CommentColumn { name, comment } => columns.change(name, &mut |field| {
                field.doc = comment.clone();
                Ok(())
            })?,
            Alteration::SetProperties(properties) => {
                let changed = properties.iter().filter(|(name, value)| base.properties().get(*name) != Some(value));
                builder = builder.set_properties(changed.map(|(k, v)| (k.clone(), v.clone())).collect())?;
            }
            Alteration::RemoveProperties { names, if_exists } => {
                let (there, missing): (Vec<_>, Vec<_>) =
                    names.iter().cloned().partition(|name| base.properties().contains_key(name));
                if let (Some(name), false) = (missing.first(), *if_exists) {
                    return Err(Error::not_found(format!("the table has no property {name}")));
                }
                builder = builder.remove_properties(&there)?;
            }
            Alteration::Upgrade(version) => {
                let current = base.format_version();
                if *version < current {
                    return Err(Error::invalid(format!(
                        "the table has format version {} and cannot go back to {}: an upgrade is for good",
                        current as u8, *version as u8
                    )));
                }
                builder = builder.upgrade_format_version(*version)?;
            }
            Alteration::SetPartition(layout) => {
                let spec = layout.spec(schema)?;
                let current = base.default_partition_spec().fields().iter();
                let same = current.map(|field| (field.source_id, field.transform));
                let wanted = spec.fields().iter().map(|field| (field.source_id, field.transform));
                if !same.eq(wanted) {
                    builder = builder.add_default_partition_spec(spec)?;
                }
            }
            Alteration::SetOrder(layout) => {
                let order = layout.order(schema)?;
                if order.fields != base.default_sort_order().fields {
                    builder = builder.add_sort_order(order)?.set_default_sort_order(-1)?;
                }
            }
        }
    }
    if columns.fields == schema.as_struct().fields() {
        return Ok(builder);
    }
    if let Some(mapping) = base.properties().get(NAME_MAPPING) {
        let mapping = add_files::extend_name_mapping(mapping, &columns.fields)?;
        builder = builder.set_properties([(NAME_MAPPING.to_owned(), mapping)].into())?;
    }
    let changed = Schema::builder()
        .with_schema_id(base.schemas_iter().map(|schema| schema.schema_id()).max().unwrap_or(0) + 1)
        .with_fields(columns.fields)
        .with_identifier_field_ids(columns.identifiers)
        .build()?;
    Ok(builder.add_current_schema(changed)?)
}
