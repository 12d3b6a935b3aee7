//! Checksums of pages: of every page of a Parquet file that lake writes the header has the CRC-32 of what follows it, so that a byte
//! which changes later makes an error of the read that meets it, and no wrong row.
//!
//! The parquet crate looks at such checksums and writes none. While a row group is open it hands each finished page to a store: first
//! the header, then the body as it will be in the file (levels and values, compressed or not). [`Chunks`] makes those stores, and they
//! put the checksum of the body into the header. That makes the header a few bytes longer than the crate believes, so that before a
//! column goes into the file ([`append`]) its sizes and the places of its pages are worked out anew from what the store holds.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use parquet::arrow::arrow_writer::{ArrowColumnWriter, PageKey, PageStore, PageStoreArgs, PageStoreFactory};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::writer::SerializedRowGroupWriter;

use crate::scan::thrift::{I32, Walker};

/// Fields of a page header, by their ids.
mod field {
    pub const PAGE_TYPE: i16 = 1;
    pub const COMPRESSED_BYTES: i16 = 3;
    pub const CHECKSUM: i16 = 4;
}

/// Of a page header's type.
const DICTIONARY_PAGE: i64 = 2;
/// The most that a checksum takes in a header: the field's beginning, and 32 bits, seven in a byte.
const MOST_ADDED: usize = 6;

/// A page as it will be in the file.
#[derive(Debug)]
struct Page {
    header: Bytes,
    body: Bytes,
    /// By how many bytes the header is longer than the crate believes.
    added: usize,
}

impl Page {
    fn bytes(&self) -> usize {
        self.header.len() + self.body.len()
    }
}

/// The pages of one column of an open row group.
#[derive(Debug, Default)]
struct Chunk {
    /// Of the page whose body comes next.
    header: Option<Bytes>,
    dictionary: Option<Page>,
    data: Vec<Page>,
    /// What it holds in memory.
    bytes: usize,
}

impl Chunk {
    /// Takes the next blob: a header, or the body of the header before it.
    fn put(&mut self, blob: Bytes) -> Result<()> {
        let Some(header) = self.header.take() else {
            self.bytes += blob.len();
            self.header = Some(blob);
            return Ok(());
        };
        let summed = with_checksum(&header, crc32fast::hash(&blob));
        let Summed { header: summed, is_dictionary } = summed.ok_or_else(|| defect("a page's header is none"))?;
        let added = summed.len() - header.len();
        self.bytes += added + blob.len();
        let page = Page { header: summed.into(), body: blob, added };
        match is_dictionary {
            false => self.data.push(page),
            true if self.dictionary.is_none() => self.dictionary = Some(page),
            true => return Err(defect("a column has two dictionaries")),
        }
        Ok(())
    }

    /// What the crate says of the column, but with the sizes that it has, and with the places that its pages have in it: the dictionary
    /// is the first.
    fn described(&self, close: ColumnCloseResult) -> Result<ColumnCloseResult> {
        let ColumnCloseResult { metadata, mut offset_index, .. } = close;
        let data_at = self.dictionary.as_ref().map_or(0, Page::bytes);
        let mut end = data_at;
        let mut added = self.dictionary.as_ref().map_or(0, |page| page.added);
        let mut locations = offset_index.as_mut().map(|index| index.page_locations.as_mut_slice());
        if locations.as_ref().is_some_and(|locations| locations.len() != self.data.len()) {
            return Err(defect("pages are missing, or too many"));
        }
        for (number, page) in self.data.iter().enumerate() {
            if let Some(location) = locations.as_mut().and_then(|locations| locations.get_mut(number)) {
                location.offset = i64::try_from(end)?;
                location.compressed_page_size = i32::try_from(page.bytes())?;
            }
            end += page.bytes();
            added += page.added;
        }
        let (bytes, added) = (i64::try_from(end)?, i64::try_from(added)?);
        if self.header.is_some() || metadata.compressed_size() + added != bytes {
            return Err(defect("the pages of a column have another size than it"));
        }
        let uncompressed = metadata.uncompressed_size() + added;
        let metadata = metadata
            .into_builder()
            .set_total_compressed_size(bytes)
            .set_total_uncompressed_size(uncompressed)
            .set_dictionary_page_offset(self.dictionary.is_some().then_some(0))
            .set_data_page_offset(i64::try_from(data_at)?)
            .build()?;
        Ok(ColumnCloseResult { metadata, offset_index, bytes_written: end as u64, ..close })
    }

    /// All of it, in the order of the file.
    fn into_blobs(self) -> VecDeque<Bytes> {
        let pages = self.dictionary.into_iter().chain(self.data);
        pages.flat_map(|page| [page.header, page.body]).collect()
    }
}

/// A column's pages, which its writer adds to and this module takes.
#[derive(Debug, Clone, Default)]
pub struct SharedChunk(Arc<Mutex<Chunk>>);

impl SharedChunk {
    fn lock(&self) -> MutexGuard<'_, Chunk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageStore for SharedChunk {
    fn put(&mut self, value: Bytes) -> Result<PageKey> {
        self.lock().put(value)?;
        // Nobody asks for a page by it.
        Ok(PageKey::new(0))
    }

    fn take(&mut self, _: PageKey) -> Result<Bytes> {
        Err(defect("a page was asked for by its key"))
    }

    fn memory_size(&self) -> usize {
        self.lock().bytes
    }
}

/// Makes the stores of the columns of row groups.
#[derive(Debug, Default)]
pub struct Chunks(Mutex<Vec<SharedChunk>>);

impl Chunks {
    /// Those that were made since, in the order of the columns.
    pub fn take(&self) -> Vec<SharedChunk> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PageStoreFactory for Chunks {
    fn create(&self, _: &PageStoreArgs<'_>) -> Result<Box<dyn PageStore>> {
        let chunk = SharedChunk::default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(chunk.clone());
        Ok(Box::new(chunk))
    }
}

/// Ends a column, whose pages are in `chunk`, and adds it to a row group of the file.
///
/// # Errors
/// Those of encoding, and defects.
pub fn append<W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    column: ArrowColumnWriter,
    chunk: &SharedChunk,
) -> Result<()> {
    let mut ended = column.close()?;
    let close = ended.close_mut();
    // Bloom filters and indexes are large: they are moved.
    let close = ColumnCloseResult {
        bytes_written: close.bytes_written,
        rows_written: close.rows_written,
        metadata: close.metadata.clone(),
        bloom_filter: close.bloom_filter.take(),
        column_index: close.column_index.take(),
        offset_index: close.offset_index.take(),
    };
    drop(ended);
    let chunk = std::mem::take(&mut *chunk.lock());
    let close = chunk.described(close)?;
    let pages = Pages { bytes: close.bytes_written, blobs: Mutex::new(Some(chunk.into_blobs())) };
    group.append_column(&pages, close)
}

/// The pages of a column on their way into the file.
struct Pages {
    bytes: u64,
    blobs: Mutex<Option<VecDeque<Bytes>>>,
}

impl Length for Pages {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Pages {
    type T = Blobs;

    /// Once, and from the beginning.
    fn get_read(&self, start: u64) -> Result<Blobs> {
        let blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        blobs.filter(|_| start == 0).map(Blobs).ok_or_else(|| defect("a column was read in another way"))
    }

    fn get_bytes(&self, _: u64, _: usize) -> Result<Bytes> {
        Err(defect("a part of a column was read"))
    }
}

/// Each is let go once it was read.
struct Blobs(VecDeque<Bytes>);

impl Read for Blobs {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(blob) = self.0.front_mut() {
            if blob.is_empty() {
                self.0.pop_front();
                continue;
            }
            let bytes = blob.len().min(into.len());
            into[..bytes].copy_from_slice(&blob.split_to(bytes));
            return Ok(bytes);
        }
        Ok(0)
    }
}

/// A header with a checksum.
struct Summed {
    header: Vec<u8>,
    is_dictionary: bool,
}

/// The header of a page with the checksum of its body. One that has a checksum keeps it. `None`: these bytes are no header.
fn with_checksum(header: &[u8], checksum: u32) -> Option<Summed> {
    let mut walker = Walker::new(header);
    let (mut page_type, mut before, mut has_checksum) = (None, None, false);
    walker.fields(|walker, id, kind| {
        match id {
            field::PAGE_TYPE if kind == I32 => page_type = Some(walker.int()?),
            _ => walker.skip(kind)?,
        }
        has_checksum |= id == field::CHECKSUM;
        if id == field::COMPRESSED_BYTES {
            before = Some(header.len() - walker.left());
        }
        Some(())
    })?;
    let is_dictionary = page_type? == DICTIONARY_PAGE;
    if has_checksum {
        return Some(Summed { header: header.to_vec(), is_dictionary });
    }
    let (before, after) = header.split_at_checked(before?)?;
    let (&next, rest) = after.split_first()?;
    let mut summed = Vec::with_capacity(header.len() + MOST_ADDED);
    summed.extend_from_slice(before);
    // A field begins with how far its id is from the one before, and its type.
    summed.push((1 << 4) | I32);
    let signed = checksum.cast_signed();
    let mut zigzag = ((signed << 1) ^ (signed >> 31)).cast_unsigned();
    while zigzag >= 0x80 {
        summed.push(zigzag.to_le_bytes()[0] | 0x80);
        zigzag >>= 7;
    }
    summed.push(zigzag.to_le_bytes()[0]);
    // The field behind it is one nearer now, unless its id is written out, or there is none.
    summed.push(if next >> 4 == 0 { next } else { next - (1 << 4) });
    summed.extend_from_slice(rest);
    Some(Summed { header: summed, is_dictionary })
}

fn defect(what: &str) -> ParquetError {
    ParquetError::General(format!("a defect in adding checksums: {what}"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::scan::thrift::{Kind, STRUCT};

    const DATA_PAGE: i64 = 0;
    const DATA_PAGE_V2: i64 = 3;

    /// What a page's header says, and how long it is.
    #[derive(Debug, Default, PartialEq)]
    pub struct Header {
        pub bytes: usize,
        pub page_type: i64,
        pub body_bytes: usize,
        pub checksum: Option<u32>,
    }

    /// The header that `bytes` begin with.
    pub fn header(bytes: &[u8]) -> Option<Header> {
        let mut header = Header::default();
        let mut walker = Walker::new(bytes);
        walker.fields(|walker, id, kind| {
            match id {
                field::PAGE_TYPE => header.page_type = walker.int()?,
                field::COMPRESSED_BYTES => header.body_bytes = usize::try_from(walker.int()?).ok()?,
                field::CHECKSUM => header.checksum = Some(i32::try_from(walker.int()?).ok()?.cast_unsigned()),
                _ => walker.skip(kind)?,
            }
            Some(())
        })?;
        header.bytes = bytes.len() - walker.left();
        Some(header)
    }

    /// Each field of a header with the bytes of its value.
    fn fields(header: &[u8]) -> Vec<(i16, Kind, Vec<u8>)> {
        let mut fields = Vec::new();
        let mut walker = Walker::new(header);
        let walked = walker.fields(|walker, id, kind| {
            let start = header.len() - walker.left();
            walker.skip(kind)?;
            fields.push((id, kind, header[start..header.len() - walker.left()].to_vec()));
            Some(())
        });
        assert!(walked.is_some() && walker.left() == 0, "{header:02x?}");
        fields
    }

    fn int(into: &mut Vec<u8>, value: i64) {
        let mut zigzag = ((value << 1) ^ (value >> 63)).cast_unsigned();
        while zigzag >= 0x80 {
            into.push(zigzag.to_le_bytes()[0] | 0x80);
            zigzag >>= 7;
        }
        into.push(zigzag.to_le_bytes()[0]);
    }

    /// A struct of so many numbers, and after them these bytes.
    fn numbers(of: std::ops::RangeInclusive<usize>, rest: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..rand::random_range(of) {
            bytes.push(0x15);
            int(&mut bytes, i64::from(rand::random::<i32>()));
        }
        bytes.extend(rest);
        bytes.push(0);
        bytes
    }

    /// As the format says, with random numbers; `far`: ids are written out.
    fn random_header(page_type: i64, far: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for value in [page_type, i64::from(rand::random::<u16>()), i64::from(rand::random::<u16>())] {
            bytes.push(0x15);
            int(&mut bytes, value);
        }
        let (id, of) = match page_type {
            // Perhaps with statistics: how many nulls, and the largest value.
            DATA_PAGE if rand::random() => (5, numbers(4..=4, &[0x1c, 0x36, 0x02, 0x28, 0x01, b'x', 0x00])),
            DATA_PAGE => (5, numbers(4..=4, &[])),
            // Perhaps whether it is sorted.
            DICTIONARY_PAGE => (7, numbers(2..=2, if rand::random() { &[0x12][..] } else { &[] })),
            _ => (8, numbers(6..=6, if rand::random() { &[0x11][..] } else { &[] })),
        };
        match far {
            true => {
                bytes.push(STRUCT);
                int(&mut bytes, id);
            }
            false => bytes.push((u8::try_from(id - 3).unwrap() << 4) | STRUCT),
        }
        bytes.extend(of);
        bytes.push(0);
        bytes
    }

    #[test]
    fn a_header_gets_a_checksum_and_keeps_the_rest() {
        let edges = [0, 1, 63, 64, 0x7fff_ffff, 0x8000_0000, u32::MAX];
        for checksum in edges.into_iter().chain((0..500).map(|_| rand::random())) {
            for page_type in [DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2] {
                let plain = random_header(page_type, rand::random());
                let summed = with_checksum(&plain, checksum).unwrap();
                assert_eq!(summed.is_dictionary, page_type == DICTIONARY_PAGE);
                let read = header(&summed.header).unwrap();
                assert_eq!((read.checksum, read.bytes), (Some(checksum), summed.header.len()), "{plain:02x?}");
                assert!((2..=MOST_ADDED).contains(&(summed.header.len() - plain.len())));
                let mut rest = fields(&summed.header);
                assert_eq!((rest.remove(3).0, rest), (field::CHECKSUM, fields(&plain)));
                let again = with_checksum(&summed.header, !checksum).unwrap();
                assert_eq!(again.header, summed.header, "one that is there stays");
                for end in 0..plain.len() {
                    assert!(with_checksum(&plain[..end], checksum).is_none(), "cut at {end}: {plain:02x?}");
                }
            }
        }
        assert!(with_checksum(&[0x15, 0x00, 0x15, 0x02, 0x00], 1).is_none(), "without the body's size");
    }
}
