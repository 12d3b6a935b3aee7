//! What the writers of a statement hold, counted in the statement's memory.
//!
//! A writer has one file open, whatever the number of partitions, and of that one row group, encoded. Where it would hold more than the
//! writers' part of the statement's memory, or than there is left, the row group ends early and goes to the store: files are as large as
//! ever, with smaller row groups. No smaller than [`LEAST_BYTES`]: that much a writer takes whether it is there or not. Not counted are
//! the bytes of a row group that are on their way to the store.

use std::sync::Arc;

use datafusion::execution::memory_pool::{MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation};

use super::writer::ROW_GROUP_BYTES;

/// What writers hold is this part of what a statement may, at most.
pub const MEMORY_PART: usize = 4;
/// A row group that takes less memory goes on.
const LEAST_BYTES: usize = 8 << 20;

/// The memory of one writer, given back when it is dropped.
#[derive(Debug)]
pub struct WriterMemory {
    held: MemoryReservation,
    /// Held also while less is needed.
    set_aside: usize,
    most: usize,
}

impl WriterMemory {
    /// For one of so many writers of a statement that has this memory.
    pub fn new(statement: &Arc<dyn MemoryPool>, writers: usize) -> Self {
        let most = match statement.memory_limit() {
            MemoryLimit::Finite(bytes) => bytes / MEMORY_PART / writers.max(1),
            MemoryLimit::Infinite | MemoryLimit::Unknown => usize::MAX,
        };
        Self { held: MemoryConsumer::new("a data file").register(statement), set_aside: 0, most }
    }

    /// The same with a whole row group's set aside; `None` if that is not left.
    pub fn with_a_row_group(mut self) -> Option<Self> {
        self.held.try_grow(ROW_GROUP_BYTES).ok()?;
        self.set_aside = ROW_GROUP_BYTES;
        Some(self)
    }

    /// Takes note of what an open row group takes. Whether it may go on.
    pub(super) fn allows(&self, bytes: usize) -> bool {
        let is_little = bytes < LEAST_BYTES;
        if (is_little || bytes <= self.most) && self.held.try_resize(bytes.max(self.set_aside)).is_ok() {
            return true;
        }
        if is_little {
            self.ended(bytes);
        }
        is_little
    }

    /// Takes note of what is held once a row group has ended.
    pub(super) fn ended(&self, bytes: usize) {
        self.held.resize(bytes.max(self.set_aside));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use arrow::array::{RecordBatch, StringArray};
    use arrow::datatypes::{DataType, Field};
    use datafusion::execution::memory_pool::{GreedyMemoryPool, UnboundedMemoryPool};
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::table::writer::DataWriter;

    const MIB: usize = 1 << 20;

    fn writer(dir: &Path) -> DataWriter {
        let columns = vec![Field::new("s", DataType::Utf8, true)];
        let properties = [("write.parquet.compression-codec", "uncompressed")];
        DataWriter::in_dir(dir, columns, &properties, TaskTracker::new(), 1 << 30).unwrap()
    }

    /// About 2 MiB.
    fn batch(number: usize) -> RecordBatch {
        let rows = (0..2048).map(|row| Some(format!("{:01024}", number * 2048 + row)));
        RecordBatch::try_from_iter([("s", Arc::new(StringArray::from_iter(rows)) as _)]).unwrap()
    }

    #[tokio::test]
    async fn a_row_group_ends_where_there_is_no_more_memory() {
        // The row groups of 24 MiB of rows, and what was held at most.
        let write = async |statement: Arc<dyn MemoryPool>| {
            let dir = tempfile::tempdir().unwrap();
            let mut writer = writer(dir.path()).within(WriterMemory::new(&statement, 1));
            let mut most = 0;
            for number in 0..12 {
                writer.write(&batch(number)).await.unwrap();
                most = most.max(statement.reserved());
            }
            let files = writer.finish().await.unwrap();
            assert_eq!((files.rows, files.files.len(), statement.reserved()), (12 * 2048, 1, 0));
            let file = std::fs::File::open(files.files[0].file_path().strip_prefix("file://").unwrap()).unwrap();
            (SerializedFileReader::new(file).unwrap().metadata().num_row_groups(), most)
        };
        let (groups, held) = write(Arc::new(UnboundedMemoryPool::default())).await;
        assert!(groups == 1 && held > 20 * MIB, "{groups} row groups, {held} bytes");
        // A quarter is the writers'.
        let (groups, held) = write(Arc::new(GreedyMemoryPool::new(48 * MIB))).await;
        assert!(groups > 1 && held <= 12 * MIB, "{groups} row groups, {held} bytes");
        // Others hold nearly all.
        let statement: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(1024 * MIB));
        let others = MemoryConsumer::new("others").register(&statement);
        others.grow(1023 * MIB);
        let memory = WriterMemory::new(&statement, 1);
        assert!(memory.allows(LEAST_BYTES - 1), "as much is taken in any case");
        assert_eq!(statement.reserved(), 1023 * MIB + LEAST_BYTES - 1);
        assert!(!memory.allows(LEAST_BYTES));
        memory.ended(0);
        assert_eq!(statement.reserved(), 1023 * MIB);
        others.free();
        assert!(memory.allows(256 * MIB) && !memory.allows(256 * MIB + 1));
        drop(memory);
        assert_eq!(statement.reserved(), 0);
    }

    #[test]
    fn what_is_set_aside_stays_so_until_the_writer_ends() {
        let statement: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(2 * ROW_GROUP_BYTES - 1));
        let one = WriterMemory::new(&statement, 2).with_a_row_group().unwrap();
        assert!(WriterMemory::new(&statement, 2).with_a_row_group().is_none());
        assert!(one.allows(MIB));
        one.ended(0);
        assert_eq!(statement.reserved(), ROW_GROUP_BYTES);
        drop(one);
        assert_eq!(statement.reserved(), 0);
    }
}
