//! What there is: the entries of a store and those of a file, in key order, and one beside the other.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::MAX_PAGE_ENTRIES;

use super::file::{FileError, Reading, Sum};
use super::{Error, Progress, Step, Tell, blocking};
use crate::clock;
use crate::store::{self, MetaStore, ReadOptions};

/// The entries of a store, in key order.
pub(super) struct Listed<'a> {
    store: &'a dyn MetaStore,
    patience: Duration,
    entries: std::vec::IntoIter<KeyValue>,
    /// `None`: the first page was not read; `Some(None)`: the last one was.
    page: Option<Option<String>>,
    /// Of the last page.
    pub(super) revision: Option<Revision>,
}

impl<'a> Listed<'a> {
    pub(super) fn new(store: &'a dyn MetaStore, patience: Duration) -> Self {
        Self { store, patience, entries: Vec::new().into_iter(), page: None, revision: None }
    }

    pub(super) async fn next(&mut self) -> Result<Option<KeyValue>, store::Error> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            let page = match &self.page {
                None => None,
                Some(Some(page)) => Some(page.as_str()),
                Some(None) => return Ok(None),
            };
            let (limit, by) = (MAX_PAGE_ENTRIES as u32, clock::now() + self.patience);
            let read = self.store.list("", page, limit, ReadOptions::default(), by).await?;
            self.entries = read.value.entries.into_iter();
            self.page = Some(read.value.next);
            self.revision = Some(read.revision);
        }
    }

    /// What is left of the page.
    pub(super) fn rest(&mut self) -> Vec<KeyValue> {
        std::mem::take(&mut self.entries).collect()
    }
}

/// The entries of a file, in key order.
pub(super) struct Entries {
    /// `None` while it reads.
    reading: Option<Reading>,
    entries: std::vec::IntoIter<(String, Bytes)>,
}

impl Entries {
    pub(super) async fn open(path: &Path) -> Result<Self, FileError> {
        let path = path.to_owned();
        let reading = blocking(move || Reading::open(&path)).await?;
        Ok(Self { reading: Some(reading), entries: Vec::new().into_iter() })
    }

    pub(super) async fn next(&mut self) -> Result<Option<(String, Bytes)>, FileError> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            let Some(mut reading) = self.reading.take() else { return Ok(None) };
            let (reading, some) = blocking(move || reading.next_batch().map(|some| (reading, some))).await?;
            let Some(some) = some else { return Ok(None) };
            (self.reading, self.entries) = (Some(reading), some.into_iter());
        }
    }
}

/// A key that is not as in the file.
#[derive(Debug, Clone)]
pub(super) struct Differing {
    pub(super) key: String,
    pub(super) what: &'static str,
}

#[derive(Debug, Default)]
pub(super) struct Those {
    pub(super) count: u64,
    pub(super) first: Option<Differing>,
}

impl Those {
    fn add(&mut self, key: &str, what: &'static str) {
        self.count += 1;
        self.first.get_or_insert_with(|| Differing { key: key.to_owned(), what });
    }
}

/// A store beside a file.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// Entries that are the same in both.
    pub(super) sum: Sum,
    pub(super) missing: Those,
    pub(super) other: Those,
    pub(super) extra: Those,
}

const NOT_IN_DATA: &str = "is not in the data";

pub(super) async fn compare(
    path: &Path,
    store: &dyn MetaStore,
    patience: Duration,
    step: Step,
    tell: Tell<'_>,
) -> Result<Compared, Error> {
    let (mut file, mut listed) = (Entries::open(path).await?, Listed::new(store, patience));
    let (mut wanted, mut found) = (file.next().await?, listed.next().await?);
    let mut compared = Compared::default();
    loop {
        match (&wanted, &found) {
            (None, None) => return Ok(compared),
            (Some((key, value)), Some(entry)) if *key == entry.key => {
                match is_same(entry, value) {
                    true => compared.sum.add(key, value),
                    false if entry.lease.is_some() => compared.other.add(key, "hangs on a lease"),
                    false => compared.other.add(key, "has another value than the data"),
                }
                (wanted, found) = (file.next().await?, listed.next().await?);
            }
            (None, Some(entry)) => {
                compared.extra.add(&entry.key, NOT_IN_DATA);
                found = listed.next().await?;
            }
            (Some((key, _)), Some(entry)) if *key > entry.key => {
                compared.extra.add(&entry.key, NOT_IN_DATA);
                found = listed.next().await?;
            }
            (Some((key, _)), _) => {
                compared.missing.add(key, "is missing");
                wanted = file.next().await?;
            }
        }
        let entries = compared.sum.entries + compared.other.count + compared.missing.count;
        if entries % MAX_PAGE_ENTRIES as u64 == 0 {
            tell(Progress { step, entries, of: None });
        }
    }
}

pub(super) fn is_same(entry: &KeyValue, value: &Bytes) -> bool {
    entry.value == *value && entry.lease.is_none()
}
