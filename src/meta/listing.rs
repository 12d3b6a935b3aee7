//! Keys and values from a stopped peer's directory, each with whether it is certain.

use lake_metasrv::rescue::reading::Reading;
use lake_metasrv::state::State;
use lake_proto::kv::KeyValue;
use serde_json::{Value, json};

use super::summary::{value, value_json};
use crate::columns::columns;

/// Some keys, and how certain each is.
pub struct Listing {
    /// What the key holds; none: it is deleted in what may not be committed.
    keys: Vec<(String, Option<KeyValue>, Certainty)>,
    pub more: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Certainty {
    Committed,
    /// An entry that may never have been committed wrote it, or deleted it.
    Open,
}

/// The keys of the state that all of the log gives, each compared with what is certain.
pub fn listing(reading: &Reading, prefix: &str, limit: usize) -> Listing {
    let none = State::default();
    let certain = reading.committed.as_ref().map_or(&none, |applied| &applied.state);
    let replayed = reading.replayed.as_ref().map_or(&none, |applied| &applied.state);
    merge(certain, replayed, prefix, limit)
}

fn merge(certain: &State, replayed: &State, prefix: &str, limit: usize) -> Listing {
    let all = |state: &State| state.list(prefix, None, limit.saturating_add(1), usize::MAX).entries;
    let mut keys: Vec<(String, Option<KeyValue>, Certainty)> = Vec::new();
    for entry in all(replayed) {
        let same = certain.get(&entry.key).as_ref() == Some(&entry);
        let certainty = if same { Certainty::Committed } else { Certainty::Open };
        keys.push((entry.key.clone(), Some(entry), certainty));
    }
    let deleted = all(certain).into_iter().filter(|entry| replayed.get(&entry.key).is_none());
    keys.extend(deleted.map(|entry| (entry.key, None, Certainty::Open)));
    keys.sort_by(|a, b| a.0.cmp(&b.0));
    let more = keys.len() > limit;
    keys.truncate(limit);
    Listing { keys, more }
}

pub fn listing_table(listing: &Listing) -> String {
    let mut rows = vec![["KEY", "VERSION", "MOD REVISION", "COMMITTED", "VALUE"].map(str::to_owned)];
    rows.extend(listing.keys.iter().map(|(key, entry, certainty)| {
        let certain = match certainty {
            Certainty::Committed => "yes",
            Certainty::Open => "not certain",
        };
        match entry {
            Some(entry) => [
                key.clone(),
                entry.version.to_string(),
                entry.mod_revision.to_string(),
                certain.to_owned(),
                value(&entry.value),
            ],
            None => [key.clone(), "-".to_owned(), "-".to_owned(), certain.to_owned(), "(deleted)".to_owned()],
        }
    }));
    let mut text = columns(rows);
    if listing.more {
        text.push_str("there are more keys: raise --limit, or name a longer prefix\n");
    }
    text
}

pub fn listing_json(listing: &Listing) -> Value {
    let keys = listing.keys.iter().map(|(key, entry, certainty)| {
        let mut one =
            json!({ "key": key, "committed": *certainty == Certainty::Committed, "deleted": entry.is_none() });
        if let Some(entry) = entry {
            let (name, text) = value_json(&entry.value);
            one[name] = text.into();
            one["version"] = entry.version.into();
            one["create_revision"] = entry.create_revision.into();
            one["mod_revision"] = entry.mod_revision.into();
            one["lease"] = entry.lease.into();
        }
        one
    });
    Value::Array(keys.collect())
}

#[cfg(test)]
mod tests {
    use lake_metasrv::state::command::Action;
    use lake_proto::kv::{Op, Txn};

    use super::*;

    #[test]
    fn a_listing_says_what_may_never_have_been_committed() {
        let mut certain = State::default();
        let run = |state: &mut State, op| {
            state.apply(1, &Action::Txn(Txn { then: vec![op], ..Txn::default() }).unstamped());
        };
        for key in ["/kv/a", "/kv/b", "/kv/c", "/other"] {
            run(&mut certain, Op::put(key, "1"));
        }
        let mut replayed = certain.clone();
        run(&mut replayed, Op::put("/kv/b", "2"));
        run(&mut replayed, Op::delete("/kv/c"));
        run(&mut replayed, Op::put("/kv/d", "3"));
        let told = merge(&certain, &replayed, "/kv/", 10);
        let brief: Vec<_> = told
            .keys
            .iter()
            .map(|(key, entry, c)| (key.as_str(), entry.as_ref().map(|e| e.value.to_vec()), *c))
            .collect();
        assert_eq!(
            brief,
            [
                ("/kv/a", Some(b"1".to_vec()), Certainty::Committed),
                ("/kv/b", Some(b"2".to_vec()), Certainty::Open),
                ("/kv/c", None, Certainty::Open),
                ("/kv/d", Some(b"3".to_vec()), Certainty::Open),
            ]
        );
        let text = listing_table(&told);
        assert!(text.contains("/kv/c  -") && text.contains("not certain  (deleted)"), "{text}");
        let two = merge(&certain, &replayed, "/kv/", 2);
        assert_eq!((two.keys.len(), two.more), (2, true));
        assert!(listing_table(&two).contains("--limit"));
    }
}
