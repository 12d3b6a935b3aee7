//! Bloom filters in data files, for the columns that a table's properties name, as Iceberg has them:
//!
//! - `write.parquet.bloom-filter-enabled.column.<column>`: `true`,
//! - `write.parquet.bloom-filter-fpp.column.<column>`: how often a value that is not there may look as if it were, of all that are
//!   asked for; 0.01 unless set,
//! - `write.parquet.bloom-filter-max-bytes`: how large the filter of a column of a row group may be; 1 MiB unless set. One of fewer
//!   values is folded to what they need.
//!
//! Properties outlive columns: those of a column that is not there, or is nested, mean nothing.

use iceberg::spec::TableMetadata;
use parquet::file::properties::{BloomFilterProperties, WriterPropertiesBuilder};
use parquet::schema::types::ColumnPath;

use super::style::wrong;
use super::writer::ROW_GROUP_ROWS;
use crate::error::{Error, Result};

const ENABLED: &str = "write.parquet.bloom-filter-enabled.column.";
const FPP: &str = "write.parquet.bloom-filter-fpp.column.";
const MAX_BYTES: &str = "write.parquet.bloom-filter-max-bytes";
const DEFAULT_FPP: f64 = 0.01;
const DEFAULT_MAX_BYTES: u64 = 1 << 20;
/// Parquet's smallest filter.
const LEAST_BYTES: u64 = 32;
/// What the filters of all columns take together at most: they are held while a row group is written.
const MOST_BYTES: u64 = 64 << 20;

/// The filters of a table's data files.
#[derive(Debug, Clone, Default)]
pub struct BloomFilters {
    columns: Vec<(String, BloomFilterProperties)>,
}

impl BloomFilters {
    /// Those that the table asks for.
    ///
    /// # Errors
    /// `Invalid`, with the property's name, for a value that it cannot have.
    pub fn of(metadata: &TableMetadata) -> Result<Self> {
        let properties = metadata.properties();
        let mut names = Vec::new();
        for field in metadata.current_schema().as_struct().fields() {
            let property = format!("{ENABLED}{}", field.name);
            let Some(value) = properties.get(&property).filter(|_| field.field_type.is_primitive()) else { continue };
            match value.to_ascii_lowercase().as_str() {
                "true" => names.push(field.name.clone()),
                "false" => {}
                _ => return Err(wrong(&property, value, "true or false")),
            }
        }
        let max_bytes = match properties.get(MAX_BYTES).filter(|_| !names.is_empty()) {
            None => DEFAULT_MAX_BYTES,
            Some(text) => match text.parse::<u64>() {
                Ok(bytes) if bytes >= LEAST_BYTES => bytes,
                _ => return Err(wrong(MAX_BYTES, text, "a number of bytes, 32 or more")),
            },
        };
        let max_bytes = max_bytes.min(MOST_BYTES / names.len().max(1) as u64).max(LEAST_BYTES);
        let mut columns = Vec::with_capacity(names.len());
        for name in names {
            let property = format!("{FPP}{name}");
            let fpp = match properties.get(&property) {
                None => DEFAULT_FPP,
                Some(text) => match text.parse::<f64>() {
                    Ok(fpp) if fpp > 0.0 && fpp < 1.0 => fpp,
                    _ => return Err(wrong(&property, text, "above 0 and below 1")),
                },
            };
            let filter = BloomFilterProperties::builder().with_fpp(fpp).with_max_ndv(most_values(max_bytes, fpp));
            columns.push((name, filter.try_build().map_err(|e| Error::internal(e.to_string()))?));
        }
        Ok(Self { columns })
    }

    /// Has a writer make them.
    pub fn add_to(&self, mut properties: WriterPropertiesBuilder) -> WriterPropertiesBuilder {
        for (name, filter) in &self.columns {
            let column = ColumnPath::new(vec![name.clone()]);
            properties = properties.set_column_bloom_filter_properties(column, filter.clone());
        }
        properties
    }
}

/// For how many values a filter is made that takes at most so many bytes: what Parquet makes of a number of values (its filters
/// have 8 bits for each, and as many bytes as a power of two), the other way round.
fn most_values(max_bytes: u64, fpp: f64) -> u64 {
    let bytes = 1u64 << max_bytes.max(LEAST_BYTES).ilog2();
    let values = -(bytes as f64) * (1.0 - fpp.powf(1.0 / 8.0)).ln();
    (values as u64).clamp(1, ROW_GROUP_ROWS as u64)
}

#[cfg(test)]
mod tests {
    use parquet::bloom_filter::Sbbf;

    use super::*;

    #[test]
    fn a_filter_is_no_larger_than_it_may_be() {
        for max_bytes in [128, 1000, 1024, 1 << 20, 5 << 20] {
            for fpp in [1e-300, 1e-16, 0.0001, 0.01, 0.5, 0.999_999_9] {
                let values = most_values(max_bytes, fpp);
                let mut written = Vec::new();
                Sbbf::new_with_ndv_fpp(values, fpp).unwrap().write(&mut written).unwrap();
                // The header has some 20 bytes.
                assert!(written.len() as u64 <= max_bytes + 32, "{max_bytes} {fpp}: {values}, {}", written.len());
            }
        }
        assert_eq!(most_values(DEFAULT_MAX_BYTES, DEFAULT_FPP), 866_455);
    }
}
