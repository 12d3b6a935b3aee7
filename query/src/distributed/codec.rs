//! What a plan consists of besides DataFusion's own: scans of tables ([`wire`]), and what makes joins give way ([`yielding`]).
//! Anything else is refused, and nothing left out.

use std::fmt;
use std::sync::Arc;

use datafusion::common::{Result as DfResult, not_impl_err};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};

use crate::error::Error;
use crate::scan::wire;
use crate::sql::yielding;
use crate::table::Tables;

/// Writes scans for other nodes, and reads theirs.
pub struct ScanCodec {
    tables: Arc<Tables>,
}

impl ScanCodec {
    pub fn new(tables: Arc<Tables>) -> Self {
        Self { tables }
    }
}

impl fmt::Debug for ScanCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScanCodec")
    }
}

impl PhysicalExtensionCodec for ScanCodec {
    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        task: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        if let Some(node) = yielding::decode(bytes, inputs)? {
            return Ok(node);
        }
        wire::decode(bytes, &self.tables.storage, &self.tables.deletes, task, converter).map_err(Error::into_datafusion)
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        to: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> DfResult<()> {
        if let Some(encoded) = yielding::encode(node.as_ref()) {
            to.extend_from_slice(encoded);
            return Ok(());
        }
        match wire::of_table(node.as_ref()) {
            Some((scan, source)) => wire::encode(scan, source, converter, to).map_err(Error::into_datafusion),
            None => not_impl_err!("{} cannot be sent to another node", node.name()),
        }
    }
}
