//! Rows of polled queries on disk, until they are fetched.
//!
//! They are in the node's directory for spill files, as a stream of Arrow's IPC format in a file of each query, and count within
//! `spill_limit_bytes` with what statements spill. All spools together may have half of that ([`Spools::new`]), so that what nobody fetches
//! leaves room for statements that run. A file goes, and its bytes are given back, once neither its statement nor somebody who reads it
//! holds it; what a node leaves that dies goes when it is started again.

use std::fmt;
use std::io::BufWriter;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use datafusion::common::DataFusionError;
use datafusion::execution::{DiskManager, SpillFile, SpillWriter};
use futures::{Stream, TryStreamExt};

use crate::error::{Error, Result};

/// The spools of a node.
pub struct Spools {
    disk: Arc<DiskManager>,
    /// Bytes of all of them.
    held: Arc<AtomicU64>,
    max_bytes: u64,
}

impl fmt::Debug for Spools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spools").field("held", &self.held).field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

/// What a query has returned.
pub struct Spool {
    /// Of its rows.
    pub schema: SchemaRef,
    /// How many there are.
    pub rows: u64,
    /// How old the oldest pointer was that was used because the metadata cluster is away.
    pub stale: Option<Duration>,
    file: Arc<dyn SpillFile>,
    room: Room,
}

impl fmt::Debug for Spool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spool").field("rows", &self.rows).field("room", &self.room).finish_non_exhaustive()
    }
}

/// Bytes of one of them, which are given back when this is dropped.
#[derive(Debug)]
struct Room {
    of: Arc<AtomicU64>,
    bytes: u64,
}

/// One that is being written.
struct Writing {
    ipc: StreamWriter<BufWriter<Box<dyn SpillWriter>>>,
    file: Arc<dyn SpillFile>,
    room: Room,
    max_bytes: u64,
    rows: u64,
}

impl Spools {
    /// None yet. Together they may have half of what spill files may.
    pub fn new(disk: Arc<DiskManager>) -> Self {
        let max_bytes = disk.max_temp_directory_size() / 2;
        Self { disk, held: Arc::default(), max_bytes }
    }

    /// How many bytes they have, on disk.
    pub fn bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Keeps rows, all of them, as they come.
    ///
    /// # Errors
    /// `Exhausted`: they need more room than there is; those of the rows; the disk's. Nothing is kept then.
    pub async fn keep(
        &self,
        schema: SchemaRef,
        stale: Option<Duration>,
        rows: impl Stream<Item = Result<RecordBatch>> + Send,
    ) -> Result<Spool> {
        let file = self.disk.create_tmp_file("keeping the rows of a polled query")?;
        let writer = file.open_writer()?;
        let room = Room { of: self.held.clone(), bytes: 0 };
        let ipc = StreamWriter::try_new_buffered(writer, &schema).map_err(|e| failed(e, WRITING))?;
        let mut writing = Writing { ipc, file, room, max_bytes: self.max_bytes, rows: 0 };
        let mut rows = pin!(rows);
        while let Some(batch) = rows.try_next().await? {
            writing = apart(move || writing.append(&batch)).await?;
        }
        let Writing { file, room, rows, .. } = apart(move || writing.finish()).await?;
        Ok(Spool { schema, rows, stale, file, room })
    }
}

impl Writing {
    fn append(mut self, batch: &RecordBatch) -> Result<Self> {
        self.ipc.write(batch).map_err(|e| failed(e, WRITING))?;
        self.rows += batch.num_rows() as u64;
        self.counted()
    }

    fn finish(mut self) -> Result<Self> {
        self.ipc.finish().map_err(|e| failed(e, WRITING))?;
        self.counted()
    }

    /// What was written so far is within what may be.
    fn counted(mut self) -> Result<Self> {
        let bytes = self.file.size().unwrap_or_default();
        match self.room.grow(bytes, self.max_bytes) {
            true => Ok(self),
            false => Err(Error::exhausted(format!(
                "the rows of polled queries that wait on this node need more than {} bytes, which is half of spill_limit_bytes and all \
                 that they may; raise it, fetch or cancel what waits, or run this one by GetFlightInfo, whose rows are kept nowhere",
                self.max_bytes
            ))),
        }
    }
}

impl Room {
    /// Takes as many bytes as that in all, if they are left; else none more than before.
    fn grow(&mut self, bytes: u64, max: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let add = |held: u64| held.checked_add(more).filter(|all| *all <= max);
        let taken = self.of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok();
        if taken {
            self.bytes += more;
        }
        taken
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Spool {
    /// How many bytes it has, on disk.
    pub fn bytes(&self) -> u64 {
        self.room.bytes
    }

    /// Its rows, in the order they came. It is there for as long as somebody reads it.
    ///
    /// # Errors
    /// In the stream: the disk's. After one it ends.
    pub fn read(self: Arc<Self>) -> impl Stream<Item = Result<RecordBatch>> + Send + 'static {
        let opened = async move {
            let bytes = self.file.read_stream()?;
            Ok::<_, Error>(futures::stream::try_unfold(
                (self, bytes, StreamDecoder::new(), Buffer::default()),
                |(spool, mut bytes, mut decoder, mut rest)| async move {
                    loop {
                        let batch = decoder.decode(&mut rest).map_err(|e| failed(e, READING))?;
                        if let Some(batch) = batch {
                            return Ok::<_, Error>(Some((batch, (spool, bytes, decoder, rest))));
                        }
                        match bytes.try_next().await? {
                            Some(chunk) => rest = Buffer::from(chunk),
                            None => {
                                decoder.finish().map_err(|e| failed(e, READING))?;
                                return Ok(None);
                            }
                        }
                    }
                },
            ))
        };
        futures::stream::once(opened).try_flatten()
    }
}

const WRITING: &str = "keeping the rows of a polled query on disk";
const READING: &str = "reading the rows of a polled query from disk";

fn failed(error: ArrowError, doing: &str) -> Error {
    // What the disk says is about the disk, and not about what the client has asked for.
    let error = match error {
        ArrowError::IoError(_, error) => DataFusionError::IoError(error),
        other => DataFusionError::from(other),
    };
    Error::from(error).while_doing(doing)
}

/// Does what waits for the disk where nobody else waits for it.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(Error::internal(format!("{WRITING}: {e}"))))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
    use futures::StreamExt;

    use super::*;
    use crate::error::Kind;

    fn batch(rows: i64) -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
        RecordBatch::try_from_iter([("x", column)]).unwrap()
    }

    #[tokio::test]
    async fn rows_are_kept_within_a_limit_and_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let files = || walk(dir.path());
        let disk = DiskManagerBuilder::default()
            .with_mode(DiskManagerMode::Directories(vec![dir.path().to_owned()]))
            .with_max_temp_directory_size(1 << 20)
            .build()
            .unwrap();
        let disk = Arc::new(disk);
        let spools = Spools::new(disk.clone());
        let keep = async |batches: Vec<Result<RecordBatch>>| {
            spools.keep(batch(0).schema(), None, futures::stream::iter(batches)).await
        };
        let spool = Arc::new(keep(vec![Ok(batch(20_000)), Ok(batch(0)), Ok(batch(20_000))]).await.unwrap());
        assert_eq!((spool.rows, files()), (40_000, 1));
        assert!(spool.bytes() > 320_000 && spools.bytes() == spool.bytes(), "{spools:?}");
        // What is over the limit leaves nothing, nor does what fails.
        let error = keep(vec![Ok(batch(40_000)); 2]).await.unwrap_err();
        assert!(error.kind == Kind::Exhausted && error.message.contains("spill_limit_bytes"), "{error}");
        let error = keep(vec![Ok(batch(10)), Err(Error::cancelled("enough"))]).await.unwrap_err();
        assert_eq!(error.kind, Kind::Cancelled);
        assert_eq!((spools.bytes(), files()), (spool.bytes(), 1));
        let empty = Arc::new(keep(Vec::new()).await.unwrap());
        assert_eq!(empty.read().count().await, 0);
        let mut reading = Box::pin(spool.clone().read());
        assert_eq!(reading.next().await.unwrap().unwrap(), batch(20_000));
        drop(spool);
        // It is there for as long as it is read.
        let rest: Vec<RecordBatch> = reading.try_collect().await.unwrap();
        assert_eq!(rest.iter().map(RecordBatch::num_rows).sum::<usize>(), 20_000);
        assert_eq!((spools.bytes(), disk.used_disk_space(), files()), (0, 0, 0));
    }

    /// How many files there are.
    fn walk(dir: &std::path::Path) -> usize {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| if path.is_dir() { walk(&path) } else { 1 }).sum()
    }
}
