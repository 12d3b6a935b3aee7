//! A history as tools take it that know one object only: Knossos and elle-cli judge one register, one set, one bank. Keys are
//! taken off, one history each; what those tools have no word for is left out, and so is what the nemesis did.
//!
//! A process does one thing at a time, so that a part of a history is one, too.

use std::collections::BTreeMap;

use super::action::{Action, Bank, Key, Register, Set};
use super::edn::Edn;
use super::operation::Operation;
use super::{History, Workload, encode};

/// No tool from elsewhere has a model of what the clients did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("only histories of registers, sets, lists and banks can be split for other tools, not of the workload {0}")]
pub struct NoModel(pub Workload);

/// The histories, by what each is of: a name that can be a file's.
///
/// # Errors
/// There is no model of them elsewhere.
pub fn split(workload: Workload, history: &History) -> Result<BTreeMap<String, Vec<Edn>>, NoModel> {
    if !matches!(workload, Workload::Register | Workload::Set | Workload::Append | Workload::Bank) {
        return Err(NoModel(workload));
    }
    let mut of: BTreeMap<Option<&Key>, Vec<Edn>> = BTreeMap::new();
    for operation in history.operations() {
        let key = match &operation.action {
            Action::Register(Register::Read { key, .. } | Register::Write { key, .. } | Register::Cas { key, .. })
            | Action::Set(Set::Add { key, .. } | Set::Read { key, .. }) => Some(key),
            Action::Append(_) | Action::Bank(Bank::Transfer { .. } | Bank::Read { .. }) => None,
            _ => continue,
        };
        let part = of.entry(key).or_default();
        part.push(alone(operation, key.is_some(), part.len()));
    }
    let named = of.into_iter().enumerate().map(|(n, (key, part))| {
        let name = match key {
            None => workload.to_string(),
            Some(Key::Number(number)) => format!("{workload}-{number}"),
            // Two names may differ only in what no file's name has.
            Some(Key::Name(name)) => format!("{workload}-{n}-{}", plain(name)),
        };
        (name, part)
    });
    Ok(named.collect())
}

/// The operation at its place in a part, and, if so, without its key.
fn alone(operation: &Operation, is_keyed: bool, place: usize) -> Edn {
    let Edn::Map(entries) = encode::operation(operation) else { return Edn::Nil };
    let changed = entries.into_iter().map(|(name, value)| {
        let value = match (&name, value) {
            (Edn::Keyword(name), Edn::Vector(mut keyed)) if is_keyed && name == "value" && keyed.len() == 2 => {
                keyed.swap_remove(1)
            }
            (Edn::Keyword(name), _) if name == "index" => Edn::Int(i64::try_from(place).unwrap_or(i64::MAX)),
            (_, value) => value,
        };
        (name, value)
    });
    Edn::Map(changed.collect())
}

fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect()
}
