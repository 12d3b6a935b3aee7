//! The columns of a table while they are altered, and the parts of them: `a.b` is the field b of the struct a, `a.element` what the
//! list a consists of, `a.key` and `a.value` what the map a does. A field of the structs in a list or a map goes without these
//! words as well, where it is added (`a.b` for a list of structs).
//!
//! What Iceberg allows is allowed: ids stay, and rows that are there read the same under the new names and types.

use std::sync::Arc;

use arrow::datatypes::Field;
use datafusion::common::ScalarValue;
use iceberg::spec::{
    FormatVersion, ListType, Literal, MapType, NestedField, NestedFieldRef, PrimitiveLiteral, PrimitiveType, Schema,
    StructType, TableMetadata, Type,
};

use super::alter::Place;
use crate::error::{Error, Result};
use crate::table::{layout, numbers, types};

/// Between the names in a path, where one name is expected. No name holds it.
pub const SEPARATOR: char = '\u{1f}';

/// A path for people to read.
pub fn shown(path: &str) -> String {
    path.replace(SEPARATOR, ".")
}

/// The columns, and what must be known of the table.
pub struct Columns<'a> {
    pub fields: Vec<NestedFieldRef>,
    pub identifiers: Vec<i32>,
    pub last_id: i32,
    pub base: &'a TableMetadata,
}

impl<'a> Columns<'a> {
    pub fn new(base: &'a TableMetadata) -> Self {
        let schema = base.current_schema();
        Self {
            fields: schema.as_struct().fields().to_vec(),
            identifiers: schema.identifier_field_ids().collect(),
            last_id: base.last_column_id(),
            base,
        }
    }

    /// The column or part at a path.
    pub fn find(&self, path: &str) -> Result<&NestedFieldRef> {
        let missing = || Error::not_found(format!("the table has no column {}", shown(path)));
        let mut names = path.split(SEPARATOR);
        let first = names.next().unwrap_or_default();
        let mut found = self.fields.iter().find(|field| field.name == first).ok_or_else(missing)?;
        for name in names {
            found = match found.field_type.as_ref() {
                Type::Primitive(_) => None,
                Type::Struct(parts) => parts.fields().iter().find(|field| field.name == name),
                Type::List(list) => (name == "element").then_some(&list.element_field),
                Type::Map(map) if name == "key" => Some(&map.key_field),
                Type::Map(map) => (name == "value").then_some(&map.value_field),
            }
            .ok_or_else(missing)?;
        }
        Ok(found)
    }

    /// Changes the columns, or the fields of the struct at a path.
    fn change_fields(
        &mut self,
        parent: &str,
        change: &mut dyn FnMut(&mut Vec<NestedFieldRef>) -> Result<()>,
    ) -> Result<()> {
        if parent.is_empty() {
            return change(&mut self.fields);
        }
        self.change(parent, &mut |field| change_parts(field, change))
    }

    /// Changes the column or part at a path.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for the key of a map, which stays what it is.
    pub fn change(&mut self, path: &str, change: &mut dyn FnMut(&mut NestedField) -> Result<()>) -> Result<()> {
        self.find(path)?;
        let names: Vec<&str> = path.split(SEPARATOR).collect();
        let [first, rest @ ..] = names.as_slice() else { return Ok(()) };
        let place = self.fields.iter().position(|field| field.name == *first);
        let place = place.ok_or_else(|| Error::not_found(format!("the table has no column {first}")))?;
        self.fields[place] = changed(&self.fields[place], rest, change)?;
        Ok(())
    }

    /// Adds a column, or a field to the structs at a path.
    pub fn add(&mut self, path: &str, field: NestedField, place: Option<&Place>) -> Result<()> {
        let (parent, name) = path.rsplit_once(SEPARATOR).unwrap_or(("", path));
        let field = Arc::new(field);
        self.change_fields(parent, &mut |fields| {
            check_free(fields, path, name, None)?;
            let at = place.map_or(Ok(fields.len()), |place| place_among(fields, path, place))?;
            fields.insert(at, field.clone());
            Ok(())
        })
    }

    /// Moves a column, or a field of a struct, among those beside it.
    pub fn move_to(&mut self, path: &str, place: &Place) -> Result<()> {
        self.find(path)?;
        let (parent, name) = self.parent_of(path, "moved")?;
        self.change_fields(parent, &mut |fields| {
            let Some(from) = fields.iter().position(|field| field.name == name) else { return Ok(()) };
            let field = fields.remove(from);
            // It is not beside itself.
            let at = place_among(fields, path, place)?;
            fields.insert(at, field);
            Ok(())
        })
    }

    /// A new field under the highest ids so far, by the last name of its path.
    pub fn new_field(&mut self, column: &Field) -> Result<NestedField> {
        let name = column.name().rsplit(SEPARATOR).next().unwrap_or_default();
        types::new_field(&column.clone().with_name(name), &mut self.last_id).map(Arc::unwrap_or_clone)
    }

    pub fn drop(&mut self, path: &str) -> Result<()> {
        let mut ids = Vec::new();
        ids_within(self.find(path)?, &mut ids);
        let refused = |why: &str| Err(Error::invalid(format!("column {} cannot be dropped: {why}", shown(path))));
        if self.base.default_partition_spec().fields().iter().any(|field| ids.contains(&field.source_id)) {
            return refused("the table is partitioned by it");
        }
        if self.base.default_sort_order().fields.iter().any(|field| ids.contains(&field.source_id)) {
            return refused("the table is sorted by it");
        }
        if self.identifiers.iter().any(|id| ids.contains(id)) {
            return refused("it identifies rows");
        }
        let (parent, name) = self.parent_of(path, "dropped")?;
        self.change_fields(parent, &mut |fields| {
            if fields.len() == 1 {
                return refused("it is the only one");
            }
            fields.retain(|field| field.name != name);
            Ok(())
        })
    }

    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.find(from)?;
        let (parent, name) = self.parent_of(from, "renamed")?;
        self.change_fields(parent, &mut |fields| {
            let at = fields.iter().position(|field| field.name == name);
            check_free(fields, to, to, at)?;
            if let Some(at) = at {
                Arc::make_mut(&mut fields[at]).name = to.to_owned();
            }
            Ok(())
        })
    }

    /// Path and name within it, of a column or a field of a struct.
    fn parent_of<'p>(&self, path: &'p str, done: &str) -> Result<(&'p str, &'p str)> {
        let Some((parent, name)) = path.rsplit_once(SEPARATOR) else { return Ok(("", path)) };
        match self.find(parent)?.field_type.as_ref() {
            Type::Struct(_) => Ok((parent, name)),
            of => {
                let path = shown(path);
                Err(Error::invalid(format!("{path} cannot be {done}: it is a part of {of}, and not of a struct")))
            }
        }
    }

    pub fn set_type(&mut self, path: &str, column: &Field) -> Result<()> {
        let mut unused = 0;
        let wanted = types::new_field(column, &mut unused)?;
        self.change(path, &mut |field| {
            let (from, to) = (field.field_type.as_ref(), wanted.field_type.as_ref());
            if !is_promotion(from, to) {
                return Err(Error::invalid(format!(
                    "column {} is {from} and cannot become {to}: int becomes long, float double, and a decimal one of more \
                     digits and the same scale",
                    shown(path)
                )));
            }
            field.field_type = wanted.field_type.clone();
            for default in [&mut field.initial_default, &mut field.write_default] {
                *default = default.take().map(|value| promoted(value, to));
            }
            Ok(())
        })
    }

    /// The value as the default of a column of this type.
    ///
    /// # Errors
    /// `NotSupported` before format version 3 and for nested columns; `Invalid` for a value that does not fit.
    pub fn default(&self, field: &NestedField, value: &ScalarValue) -> Result<Option<Literal>> {
        let name = &field.name;
        if self.base.format_version() < FormatVersion::V3 {
            return Err(Error::not_supported(format!(
                "a default for column {name} needs a table of format version 3, and this one has {} (WITH ('format-version' = '3') behind \
                 CREATE TABLE's columns says so, and ALTER TABLE ... SET TBLPROPERTIES ('format-version' = '3') upgrades it)",
                self.base.format_version() as u8
            )));
        }
        let Some(primitive) = field.field_type.as_primitive_type() else {
            return Err(Error::not_supported(format!("a default for column {name}, which is {}", field.field_type)));
        };
        let alone = Schema::builder().with_fields([Arc::new(field.clone())]).build()?;
        let wanted = types::arrow_schema(&alone)?;
        let fits = numbers::cast(value, wanted.field(0).data_type());
        let fits = fits.map_err(|e| Error::invalid(format!("the default of column {name}: {e}")))?;
        let literal = layout::datum(&fits.to_array()?, 0, primitive)?.map(Literal::from);
        // Some values come out of the metadata otherwise than they went in.
        let mut kept = field.clone();
        kept.write_default = literal.clone();
        let back = serde_json::to_string(&kept).and_then(|json| serde_json::from_str::<NestedField>(&json));
        match back.is_ok_and(|back| back.write_default == literal) {
            true => Ok(literal),
            false => Err(Error::not_supported(format!("the default {value} of column {name} cannot be kept exactly"))),
        }
    }
}

/// At which place of these fields a column at `path`, which is none of them, is to be.
fn place_among(fields: &[NestedFieldRef], path: &str, place: &Place) -> Result<usize> {
    match place {
        Place::First => Ok(0),
        Place::After(before) => {
            let at = fields.iter().position(|field| field.name == *before).map(|at| at + 1);
            at.ok_or_else(|| Error::not_found(format!("there is no column {before} beside {}", shown(path))))
        }
    }
}

/// Names that differ in case only would be one to most engines.
fn check_free(fields: &[NestedFieldRef], path: &str, name: &str, but: Option<usize>) -> Result<()> {
    let taken = |(i, field): (usize, &NestedFieldRef)| Some(i) != but && field.name.eq_ignore_ascii_case(name);
    match fields.iter().enumerate().any(taken) {
        true => Err(Error::already_exists(format!("the table has a column {} already", shown(path)))),
        false => Ok(()),
    }
}

/// The field with another one at a path below it.
fn changed(
    field: &NestedFieldRef,
    path: &[&str],
    change: &mut dyn FnMut(&mut NestedField) -> Result<()>,
) -> Result<NestedFieldRef> {
    let mut field = field.as_ref().clone();
    let Some((name, rest)) = path.split_first() else {
        change(&mut field)?;
        return Ok(Arc::new(field));
    };
    let changed_type = match field.field_type.as_ref() {
        Type::Struct(parts) => {
            let part = |part: &NestedFieldRef| match part.name == *name {
                true => changed(part, rest, change),
                false => Ok(part.clone()),
            };
            Type::Struct(StructType::new(parts.fields().iter().map(part).collect::<Result<_>>()?))
        }
        Type::List(list) => Type::List(ListType::new(changed(&list.element_field, rest, change)?)),
        Type::Map(map) if *name == "value" => {
            Type::Map(MapType::new(map.key_field.clone(), changed(&map.value_field, rest, change)?))
        }
        Type::Map(_) => return Err(Error::invalid(format!("the keys of the map {} stay what they are", field.name))),
        Type::Primitive(_) => return Err(Error::not_found(format!("column {} has no part {name}", field.name))),
    };
    field.field_type = Box::new(changed_type);
    Ok(Arc::new(field))
}

/// Changes the fields of a struct, or of the structs that a list or the values of a map consist of.
fn change_parts(field: &mut NestedField, change: &mut dyn FnMut(&mut Vec<NestedFieldRef>) -> Result<()>) -> Result<()> {
    let within = |part: &NestedFieldRef, change: &mut dyn FnMut(&mut Vec<NestedFieldRef>) -> Result<()>| {
        let mut part = part.as_ref().clone();
        change_parts(&mut part, change)?;
        Ok::<_, Error>(Arc::new(part))
    };
    let changed = match field.field_type.as_ref() {
        Type::Struct(parts) => {
            let mut parts = parts.fields().to_vec();
            change(&mut parts)?;
            Type::Struct(StructType::new(parts))
        }
        Type::List(list) => Type::List(ListType::new(within(&list.element_field, change)?)),
        Type::Map(map) => Type::Map(MapType::new(map.key_field.clone(), within(&map.value_field, change)?)),
        other => return Err(Error::invalid(format!("column {} is {other}, and has no fields", field.name))),
    };
    *field.field_type = changed;
    Ok(())
}

/// The ids of a field and of all its parts.
fn ids_within(field: &NestedField, into: &mut Vec<i32>) {
    into.push(field.id);
    match field.field_type.as_ref() {
        Type::Primitive(_) => {}
        Type::Struct(parts) => parts.fields().iter().for_each(|part| ids_within(part, into)),
        Type::List(list) => ids_within(&list.element_field, into),
        Type::Map(map) => [&map.key_field, &map.value_field].into_iter().for_each(|part| ids_within(part, into)),
    }
}

/// A default as it is kept of a column of the type that its column gets.
fn promoted(default: Literal, to: &Type) -> Literal {
    match (default, to) {
        (Literal::Primitive(PrimitiveLiteral::Int(value)), Type::Primitive(PrimitiveType::Long)) => {
            Literal::long(value)
        }
        (Literal::Primitive(PrimitiveLiteral::Float(value)), Type::Primitive(PrimitiveType::Double)) => {
            Literal::double(value.0)
        }
        (default, _) => default,
    }
}

/// Types under which what is written already reads the same.
fn is_promotion(from: &Type, to: &Type) -> bool {
    let (Type::Primitive(from), Type::Primitive(to)) = (from, to) else { return false };
    match (from, to) {
        (from, to) if from == to => true,
        (PrimitiveType::Int, PrimitiveType::Long) | (PrimitiveType::Float, PrimitiveType::Double) => true,
        (PrimitiveType::Decimal { precision: p, scale: s }, PrimitiveType::Decimal { precision: q, scale: t }) => {
            p <= q && s == t
        }
        _ => false,
    }
}
