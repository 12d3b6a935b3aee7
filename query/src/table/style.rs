//! How the Parquet files of a table are written, as its properties say (Iceberg's, that lake honours):
//!
//! - `write.parquet.compression-codec`: `zstd` unless set, `snappy`, `gzip`, `lz4` or `uncompressed`; `brotli` and `lzo`, which lake does
//!   not write, are written as zstd;
//! - `write.parquet.compression-level`: of zstd (1 to 22, 3 unless set) and gzip (0 to 9, 6 unless set);
//! - which columns have bloom filters ([`super::bloom`]).

use iceberg::spec::TableMetadata;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterPropertiesBuilder;

use super::bloom::BloomFilters;
use crate::error::{Error, Result};

const CODEC: &str = "write.parquet.compression-codec";
const LEVEL: &str = "write.parquet.compression-level";
const ZSTD_LEVEL: i32 = 3;
const GZIP_LEVEL: u32 = 6;

/// See the module.
#[derive(Debug, Clone)]
pub struct Style {
    compression: Compression,
    filters: BloomFilters,
}

impl Style {
    /// Of a table's data files.
    ///
    /// # Errors
    /// `Invalid`, with the property's name, for a value that it cannot have.
    pub fn of(metadata: &TableMetadata) -> Result<Self> {
        let properties = metadata.properties();
        let level = properties.get(LEVEL).map(String::as_str);
        let codec = properties.get(CODEC).map(|codec| codec.to_ascii_lowercase());
        let compression = match codec.as_deref() {
            None | Some("zstd") => Compression::ZSTD(zstd(level)?),
            // The level is of what is not written.
            Some("brotli" | "lzo") => Compression::ZSTD(zstd(None)?),
            Some("gzip") => Compression::GZIP(gzip(level)?),
            Some("snappy") => Compression::SNAPPY,
            Some("lz4") => Compression::LZ4,
            Some("uncompressed" | "none") => Compression::UNCOMPRESSED,
            Some(other) => return Err(wrong(CODEC, other, "zstd, snappy, gzip, lz4 or uncompressed")),
        };
        Ok(Self { compression, filters: BloomFilters::of(metadata)? })
    }

    /// Of files that no table says anything of.
    ///
    /// # Errors
    /// A defect.
    pub fn plain() -> Result<Self> {
        Ok(Self { compression: Compression::ZSTD(zstd(None)?), filters: BloomFilters::default() })
    }

    /// Has a writer write so.
    pub fn add_to(&self, properties: WriterPropertiesBuilder) -> WriterPropertiesBuilder {
        self.filters.add_to(properties.set_compression(self.compression))
    }
}

fn zstd(level: Option<&str>) -> Result<ZstdLevel> {
    let number = level.map_or(Ok(ZSTD_LEVEL), str::parse).ok();
    let valid = number.and_then(|number| ZstdLevel::try_new(number).ok());
    valid.ok_or_else(|| wrong(LEVEL, level.unwrap_or_default(), "a number from 1 to 22 for zstd"))
}

fn gzip(level: Option<&str>) -> Result<GzipLevel> {
    let number = level.map_or(Ok(GZIP_LEVEL), str::parse).ok();
    let valid = number.and_then(|number| GzipLevel::try_new(number).ok());
    valid.ok_or_else(|| wrong(LEVEL, level.unwrap_or_default(), "a number from 0 to 9 for gzip"))
}

/// Of a property that makes no sense.
pub(super) fn wrong(property: &str, value: &str, must_be: &str) -> Error {
    Error::invalid(format!("the table property {property} is {value:?}, and must be {must_be}"))
}
