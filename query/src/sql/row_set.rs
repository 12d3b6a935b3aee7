//! Rows by file and position, as a statement finds them.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::execution::memory_pool::MemoryReservation;
use roaring::RoaringTreemap;

use crate::error::{Error, Result};

/// Rows by file and position: a bit for each row of a file that has any.
pub(super) struct RowSet {
    rows_of: Arc<HashMap<String, u64>>,
    marked: HashMap<String, Marked>,
}

/// The rows of one file.
struct Marked {
    words: Vec<u64>,
    count: u64,
}

impl RowSet {
    pub fn new(rows_of: Arc<HashMap<String, u64>>) -> Self {
        Self { rows_of, marked: HashMap::new() }
    }

    /// `false` if the row is there already.
    pub fn add(&mut self, file: &str, position: i64, memory: &MemoryReservation) -> Result<bool> {
        let rows = self.rows_of.get(file).copied().unwrap_or(0);
        let Some(row) = u64::try_from(position).ok().filter(|row| *row < rows) else {
            return Err(Error::corrupt(format!(
                "{file} has a row {position}, and by the table's metadata {rows} rows"
            )));
        };
        if !self.marked.contains_key(file) {
            let words = rows.div_ceil(64) as usize;
            memory.try_grow(words * size_of::<u64>() + file.len())?;
            self.marked.insert(file.to_owned(), Marked { words: vec![0; words], count: 0 });
        }
        let Some(marked) = self.marked.get_mut(file) else { return Ok(false) };
        let (word, bit) = ((row / 64) as usize, 1 << (row % 64));
        let is_new = marked.words[word] & bit == 0;
        marked.words[word] |= bit;
        marked.count += u64::from(is_new);
        Ok(is_new)
    }

    pub fn contains(&self, file: &str, position: i64) -> bool {
        let word = self.marked.get(file).and_then(|marked| marked.words.get((position / 64) as usize));
        word.is_some_and(|word| word >> (position % 64) & 1 == 1)
    }

    pub fn count(&self, file: &str) -> u64 {
        self.marked.get(file).map_or(0, |marked| marked.count)
    }

    /// The positions of a file's rows.
    pub fn positions(&self, file: &str) -> RoaringTreemap {
        let words = self.marked.get(file).map(|marked| marked.words.as_slice()).unwrap_or_default();
        let bits = words.iter().zip(0_u64..).flat_map(|(word, index)| {
            let set = (0..64).filter(move |bit| word >> bit & 1 == 1);
            set.map(move |bit| index * 64 + bit)
        });
        bits.collect()
    }
}
