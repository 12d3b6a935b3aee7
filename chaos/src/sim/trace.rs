//! What happened in a simulation, a line each: a hash of all of it, and its end. The whole of it goes to a file if one is
//! given.
//!
//! Two runs of a seed are the same if their hashes are. Lines are about what happens above gRPC: entries, votes, snapshots,
//! leaders, faults, what clients asked and were answered.

use std::collections::VecDeque;
use std::fs::File;
use std::hash::Hasher;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Lines of the end that are kept.
pub const TAIL_LINES: usize = 60;

/// FNV-1a: the same everywhere and always.
#[derive(Debug, Clone, Copy)]
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The trace under way.
#[derive(Debug, Default)]
pub struct Trace {
    hash: Fnv,
    lines: u64,
    tail: VecDeque<String>,
    file: Option<BufWriter<File>>,
}

impl Trace {
    /// Written to a file as well.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn into_file(path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: Some(BufWriter::new(File::create(path)?)), ..Self::default() })
    }

    /// One more line, at a time of the simulation in milliseconds.
    pub fn line(&mut self, at_ms: u64, what: &str) {
        let line = format!("{:>7}.{:03} {what}", at_ms / 1000, at_ms % 1000);
        self.hash.write(line.as_bytes());
        self.hash.write(b"\n");
        self.lines += 1;
        if let Some(file) = &mut self.file
            && let Err(e) = writeln!(file, "{line}")
        {
            tracing::warn!("writing the trace: {e}");
            self.file = None;
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    /// Of all lines so far.
    pub fn hash(&self) -> u64 {
        self.hash.finish()
    }

    /// How many there are.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// The last of them.
    pub fn tail(&self) -> Vec<String> {
        self.tail.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_counts_and_the_last_are_kept() {
        let of = |n: u64| {
            let mut trace = Trace::default();
            (0..n).for_each(|i| trace.line(i, "x"));
            trace
        };
        let (one, two) = (of(100), of(100));
        assert_eq!((one.hash(), one.lines()), (two.hash(), 100));
        assert_ne!(one.hash(), of(101).hash());
        assert_eq!(one.tail().len(), TAIL_LINES);
        assert!(one.tail()[0].ends_with("0.040 x"), "{}", one.tail()[0]);
    }
}
