//! How the scans of a query are divided: over how many nodes, which files to which, and which node has which task.
//!
//! The nodes of a query are settled when it is planned, in the order in which they are to have its largest table ([`preferred`]). A
//! task of a stage has the node of its own number: so no two tasks of a stage meet on one node, and the files of a scan go
//! to the node that they prefer. Files larger than a node's part are cut into ranges of bytes; a row group belongs to the range
//! that it begins in, as DataFusion has it.

use std::sync::Arc;

use async_trait::async_trait;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{Result as DfResult, exec_err};
use datafusion::datasource::listing::{FileRange, PartitionedFile};
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfig, FileScanConfigBuilder};
use datafusion::datasource::source::DataSourceExec;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion_distributed::{
    DesiredTaskCountEvent, DesiredTaskCountEventResponse, DesiredTaskCountHandler, DistributedLeafExec,
    RouteTasksEvent, RouteTasksEventResponse, RouteTasksHandler, ScaleUpLeafNodeEvent, ScaleUpLeafNodeEventResponse,
    ScaleUpLeafNodeHandler,
};
use url::Url;
use uuid::Uuid;

use super::peers::shared_out;
use crate::scan::wire;

/// Smallest range that a file is cut into, in bytes: less is not worth a footer that is read twice.
const LEAST_RANGE_BYTES: u64 = 1 << 20;
/// What one task of a scan reads at least, in bytes, unless everything is to be spread.
const TASK_BYTES: u64 = 32 << 20;

/// What a query reads.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reads {
    pub bytes: u64,
    pub files: usize,
    /// Where the files of the largest scan are ...
    pub largest: Option<String>,
    /// ... and of which table they are.
    pub table: Option<Uuid>,
}

/// What a plan reads; `None`: something other than tables, which is not to be had on another node.
pub fn reads(plan: &Arc<dyn ExecutionPlan>) -> Option<Reads> {
    let (mut reads, mut most, mut all_tables) = (Reads::default(), 0, true);
    let visited = plan.apply(|node| {
        if !node.children().is_empty() || node.is::<EmptyExec>() {
            return Ok(TreeNodeRecursion::Continue);
        }
        match wire::of_table(node.as_ref()).filter(|(scan, _)| wire::can_travel(scan)) {
            Some((scan, source)) => {
                let bytes = bytes_of(scan);
                reads.bytes = reads.bytes.saturating_add(bytes);
                reads.files += files_of(scan).count();
                if bytes > most {
                    most = bytes;
                    reads.largest = files_of(scan).next().and_then(wire::location).map(directory);
                    reads.table = source.table();
                }
                Ok(TreeNodeRecursion::Continue)
            }
            None => {
                all_tables = false;
                Ok(TreeNodeRecursion::Stop)
            }
        }
    });
    (visited.is_ok() && all_tables && reads.files > 0).then_some(reads)
}

/// The same for every file of a table.
fn directory(location: &str) -> String {
    location.rsplit_once('/').map_or(location, |(directory, _)| directory).to_owned()
}

fn files_of(scan: &FileScanConfig) -> impl Iterator<Item = &PartitionedFile> {
    scan.file_groups.iter().flat_map(|group| group.iter())
}

fn length(file: &PartitionedFile) -> u64 {
    match &file.range {
        Some(range) => u64::try_from(range.end.saturating_sub(range.start)).unwrap_or(0),
        None => file.object_meta.size,
    }
}

fn bytes_of(scan: &FileScanConfig) -> u64 {
    files_of(scan).map(length).sum()
}

/// The nodes of one query.
#[derive(Debug, Clone)]
pub struct Spread {
    pub nodes: Arc<[Url]>,
    /// Whether small scans are spread as well.
    pub everything: bool,
}

#[async_trait]
impl DesiredTaskCountHandler for Spread {
    async fn handle(&self, event: DesiredTaskCountEvent<'_>) -> Option<DfResult<DesiredTaskCountEventResponse>> {
        let (scan, _) = wire::of_table(event.plan.as_ref())?;
        let tasks = match self.everything {
            true => self.nodes.len(),
            false => {
                usize::try_from(bytes_of(scan).div_ceil(TASK_BYTES)).unwrap_or(usize::MAX).clamp(1, self.nodes.len())
            }
        };
        Some(Ok(DesiredTaskCountEventResponse::desired(tasks)))
    }
}

impl ScaleUpLeafNodeHandler for Spread {
    fn handle(&self, event: ScaleUpLeafNodeEvent<'_>) -> Option<DfResult<ScaleUpLeafNodeEventResponse>> {
        let (scan, _) = wire::of_table(event.plan.as_ref())?;
        let Some(nodes) = self.nodes.get(..event.task_count) else {
            return Some(exec_err!("a scan in {} tasks over {} nodes", event.task_count, self.nodes.len()));
        };
        let partitions = event.session_config.target_partitions().max(1);
        let scans = divide(scan, nodes, partitions);
        let scans = scans.into_iter().map(|groups| {
            let scan = FileScanConfigBuilder::from(scan.clone()).with_file_groups(groups).build();
            DataSourceExec::from_data_source(scan) as Arc<dyn ExecutionPlan>
        });
        let leaf = DistributedLeafExec::try_new(event.plan.clone(), scans);
        Some(leaf.map(|leaf| ScaleUpLeafNodeEventResponse::new(Arc::new(leaf))))
    }
}

impl RouteTasksHandler for Spread {
    fn handle(&self, event: RouteTasksEvent<'_>) -> Option<DfResult<RouteTasksEventResponse>> {
        Some(match self.nodes.get(..event.task_count) {
            Some(nodes) => Ok(RouteTasksEventResponse::new(nodes.to_vec())),
            None => exec_err!("a stage of {} tasks over {} nodes", event.task_count, self.nodes.len()),
        })
    }
}

/// The files of a scan for each of the nodes, in groups: as many for each, and at most `partitions`.
fn divide(scan: &FileScanConfig, nodes: &[Url], partitions: usize) -> Vec<Vec<FileGroup>> {
    let part = bytes_of(scan).div_ceil((nodes.len() * partitions).max(1) as u64).max(LEAST_RANGE_BYTES);
    let pieces: Vec<PartitionedFile> = files_of(scan).flat_map(|file| cut(file, part)).collect();
    let named: Vec<(&str, u64)> =
        pieces.iter().map(|piece| (wire::location(piece).unwrap_or_default(), length(piece))).collect();
    let given = shared_out(nodes, &named);
    let groups = given.iter().map(Vec::len).max().unwrap_or(0).clamp(1, partitions);
    given
        .iter()
        .map(|of_node| {
            let mut files: Vec<(u64, Vec<PartitionedFile>)> = vec![(0, Vec::new()); groups];
            for index in of_node {
                // There is at least one.
                if let Some(smallest) = files.iter_mut().min_by_key(|(bytes, files)| (*bytes, files.len())) {
                    smallest.0 += named[*index].1;
                    smallest.1.push(pieces[*index].clone());
                }
            }
            files.into_iter().map(|(_, files)| FileGroup::new(files)).collect()
        })
        .collect()
}

/// A file in pieces of about so many bytes, which together are all of it.
fn cut(file: &PartitionedFile, part: u64) -> Vec<PartitionedFile> {
    let (start, bytes) = match &file.range {
        Some(range) => (range.start, length(file)),
        None => (0, file.object_meta.size),
    };
    let count = bytes.div_ceil(part.max(1)).max(1);
    let Ok(end) = i64::try_from(bytes).map(|bytes| start.saturating_add(bytes)) else { return vec![file.clone()] };
    if count == 1 {
        return vec![file.clone()];
    }
    let step = i64::try_from(bytes.div_ceil(count)).unwrap_or(i64::MAX).max(1);
    let mut pieces = Vec::new();
    let mut from = start;
    while from < end {
        let to = from.saturating_add(step).min(end);
        let mut piece = file.clone();
        piece.range = Some(FileRange { start: from, end: to });
        pieces.push(piece);
        from = to;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_a_file_are_all_of_it() {
        let file = PartitionedFile::new("a", 1000);
        for part in [1, 7, 300, 333, 334, 999, 1000, 5000] {
            let pieces = cut(&file, part);
            assert_eq!(pieces.iter().map(length).sum::<u64>(), 1000, "{part}");
            let mut next = 0;
            for range in pieces.iter().filter_map(|piece| piece.range.as_ref()) {
                assert_eq!(range.start, next);
                assert!(range.end > range.start);
                next = range.end;
            }
            assert!(pieces.len() == 1 || next == 1000);
        }
        let mut middle = PartitionedFile::new("a", 1000);
        middle.range = Some(FileRange { start: 100, end: 900 });
        let ranges: Vec<_> = cut(&middle, 400).into_iter().filter_map(|piece| piece.range).collect();
        assert_eq!(ranges.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>(), [(100, 500), (500, 900)]);
        assert_eq!(cut(&PartitionedFile::new("empty", 0), 10).len(), 1);
    }
}
