//! Which kind of statement one is, or why lake refuses it.

use datafusion::common::TableReference;
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    ColumnOption, CommentDef, CreateTable, CreateTableOptions, FromTable, Ident, ObjectName, ObjectNamePart,
    ObjectType, SqlOption, Statement, TableFactor,
};

use super::{Action, Command, normalize, place, prepare, refused};
use crate::error::{Error, Result};
use crate::sql::{DEFAULT_SCHEMA, alter, column_types, files, session};
use crate::table::layout::Layout;

pub(super) fn classify(statement: &mut Parsed) -> Result<Action> {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(_) => return Ok(Action::Query),
        Parsed::CreateExternalTable(_) => return Err(refused("CREATE EXTERNAL TABLE")),
        Parsed::CopyTo(_) => return Err(refused("COPY")),
        Parsed::Reset(_) => return Err(refused("RESET")),
    };
    match statement {
        Statement::ShowColumns { show_options, .. } => {
            if let Some(ObjectName(parts)) = show_options.show_in.as_mut().and_then(|of| of.parent_name.as_mut()) {
                in_default_schema(parts);
            }
            Ok(Action::Query)
        }
        Statement::Query(_)
        | Statement::Explain { .. }
        | Statement::ExplainTable { .. }
        | Statement::ShowTables { .. }
        | Statement::ShowFunctions { .. }
        | Statement::ShowVariable { .. } => Ok(Action::Query),
        Statement::Insert(insert) => {
            if insert.partitioned.is_some() {
                return Err(refused("INSERT ... PARTITION (partitions follow from the values)"));
            }
            Ok(Action::ChangeRows(match insert.overwrite {
                true => Command::InsertOverwrite,
                false => Command::Insert,
            }))
        }
        Statement::Delete(delete) => match &delete.from {
            FromTable::WithFromKeyword(_) => Ok(Action::ChangeRows(Command::Delete)),
            // A word that is missing may be more than that one, as a condition.
            FromTable::WithoutKeyword(tables) => {
                let at = tables.first().and_then(|table| match &table.relation {
                    TableFactor::Table { name, .. } => name.0.first().and_then(|part| part.as_ident()).and_then(place),
                    _ => None,
                });
                Err(Error::invalid("syntax error: DELETE without FROM; nothing was done: write DELETE FROM").at(at))
            }
        },
        Statement::Update(_) => Ok(Action::ChangeRows(Command::Update)),
        Statement::Merge(_) => Ok(Action::ChangeRows(Command::Merge)),
        Statement::Truncate(_) => Ok(Action::ChangeRows(Command::Truncate)),
        Statement::CreateTable(table) => create_table(table),
        Statement::AlterTable(_) => Ok(Action::Alter(Command::AlterTable)),
        Statement::Call(_) => Ok(Action::Call),
        Statement::Comment { .. } => Ok(Action::Alter(Command::Comment)),
        Statement::Drop { object_type, names, cascade, purge, temporary, .. } => {
            if *object_type != ObjectType::Table {
                return Err(refused(&format!("DROP {object_type}")));
            }
            match (*cascade, *temporary, names.len()) {
                (true, ..) => Err(refused("DROP ... CASCADE")),
                (_, true, _) => Err(refused("DROP TEMPORARY")),
                (_, _, 1) => Ok(Action::DropTable { purge: *purge }),
                _ => Err(refused("DROP of several things at once")),
            }
        }
        other => match session::parse(other)? {
            Some(change) => Ok(Action::Session(change)),
            None => Err(refused(&leading_words(&other.to_string()))),
        },
    }
}

/// A table's name alone means one in the default schema. DataFusion would show the columns of all tables of that name.
fn in_default_schema(parts: &mut Vec<ObjectNamePart>) {
    let [ObjectNamePart::Identifier(table)] = parts.as_slice() else { return };
    if !files::is_file(&TableReference::bare(normalize(table))) {
        let schema = Ident { value: DEFAULT_SCHEMA.to_owned(), quote_style: Some('"'), span: table.span };
        parts.insert(0, ObjectNamePart::Identifier(schema));
    }
}

/// The words that name a statement.
fn leading_words(sql: &str) -> String {
    let mut words = sql.split(|c: char| !c.is_ascii_alphabetic() && c != '_').filter(|word| !word.is_empty());
    let first = words.next().unwrap_or("this statement").to_ascii_uppercase();
    match (first.as_str(), words.next()) {
        ("ALTER" | "CREATE" | "DROP" | "FOREIGN" | "PRIMARY" | "SHOW" | "START", Some(second)) => {
            format!("{first} {}", second.to_ascii_uppercase())
        }
        _ => first,
    }
}

fn create_table(table: &mut CreateTable) -> Result<Action> {
    let (mut not_null, mut defaults, mut comments) = (Vec::new(), Vec::new(), Vec::new());
    for column in &table.columns {
        column_types::check(column)?;
        for option in &column.options {
            match &option.option {
                ColumnOption::Null => {}
                ColumnOption::NotNull => not_null.push(normalize(&column.name)),
                ColumnOption::Comment(text) => comments.push((normalize(&column.name), text.clone())),
                ColumnOption::Default(value) => {
                    let mut value = value.clone();
                    prepare::floats_in(&mut value);
                    defaults.push((normalize(&column.name), value));
                }
                other => {
                    let words = leading_words(&other.to_string());
                    return Err(refused(&format!("{words} on column {}", column.name)).at(place(&column.name)));
                }
            }
        }
    }
    if let Some(constraint) = table.constraints.first() {
        return Err(refused(&format!("the constraint {constraint}")));
    }
    if table.or_replace && table.if_not_exists {
        return Err(Error::invalid("a table is either replaced, or left as it is IF NOT EXISTS"));
    }
    // Taken out, since DataFusion does not know what to do with them.
    for column in &mut table.columns {
        let is_known = |option: &ColumnOption| !matches!(option, ColumnOption::Default(_) | ColumnOption::Comment(_));
        column.options.retain(|option| is_known(&option.option));
    }
    let mut properties = match std::mem::replace(&mut table.table_options, CreateTableOptions::None) {
        CreateTableOptions::None => Default::default(),
        CreateTableOptions::With(options)
        | CreateTableOptions::Options(options)
        | CreateTableOptions::TableProperties(options) => alter::properties_of_new(&options)?,
        CreateTableOptions::Plain(options) => {
            for option in options {
                match option {
                    SqlOption::Comment(comment) => table.comment = Some(comment),
                    other => return Err(refused(&format!("the option {other}"))),
                }
            }
            Default::default()
        }
    };
    if let Some(CommentDef::WithEq(text) | CommentDef::WithoutEq(text)) = table.comment.take() {
        properties.insert(alter::COMMENT.to_owned(), text);
    }
    let as_query = table.query.is_some().then_some(not_null);
    let properties = properties.into_iter().collect();
    Ok(Action::CreateTable { as_query, layout: Layout::default(), properties, defaults, comments })
}
