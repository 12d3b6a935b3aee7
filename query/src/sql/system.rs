//! The tables of the schema `system`, which show the cluster: they are read from the leader when a statement names them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::catalog::{MemTable, TableProvider};
use datafusion::common::TableReference;
use lake_client::drains;
use lake_client::nodes::NodeStatus;
use lake_client::shards::ShardStatus;

use super::{CATALOG, Engine, system_procedures};
use crate::error::{Error, Result};

/// The schema of what is the cluster's own.
pub const SYSTEM: &str = "system";
const NODES: &str = "nodes";
const PROCEDURES: &str = "procedures";
const SHARDS: &str = "shards";
/// What can be undropped.
pub const DROPPED: &str = "dropped_tables";

/// All of them.
pub const NAMES: [&str; 4] = [DROPPED, NODES, PROCEDURES, SHARDS];

/// Whether a name is one of these tables.
pub fn is_system(table: &TableReference) -> bool {
    table.schema() == Some(SYSTEM)
        && table.catalog().is_none_or(|catalog| catalog == CATALOG)
        && NAMES.contains(&table.table())
}

/// The table of that name, as it is now.
///
/// # Errors
/// `Unavailable` without a leader; `NotSupported` where there is no cluster.
pub async fn table(engine: &Engine, name: &str, deadline: Instant) -> Result<Arc<dyn TableProvider>> {
    let batch = match name {
        PROCEDURES => system_procedures::read(engine, deadline).await?,
        DROPPED => system_procedures::dropped(engine, deadline).await?,
        _ => of_cluster(engine, name, deadline).await?,
    };
    Ok(Arc::new(MemTable::try_new(batch.schema(), vec![vec![batch]])?))
}

/// What only the leader of a cluster knows.
async fn of_cluster(engine: &Engine, name: &str, deadline: Instant) -> Result<RecordBatch> {
    let Some(cluster) = &engine.cluster else {
        return Err(Error::not_supported(format!(
            "{SYSTEM}.{name} lists the {name} of a metadata cluster of several processes; here one process is all there is, or the \
             metadata is in a store without a leader"
        )));
    };
    let failed = |e| Error::unavailable(format!("reading {SYSTEM}.{name}: {e}"));
    match name {
        SHARDS => shard_rows(&cluster.shards(deadline).await.map_err(failed)?.value.shards),
        _ => {
            let drained = drains::list(cluster, deadline).await.map_err(failed)?;
            node_rows(&cluster.nodes(deadline).await.map_err(failed)?.value, &drained)
        }
    }
}

fn node_rows(nodes: &[NodeStatus], drained: &[String]) -> Result<RecordBatch> {
    type Text = fn(&NodeStatus) -> Option<String>;
    type Number = fn(&NodeStatus) -> Option<i64>;
    let texts: [(&str, Text); 7] = [
        ("node", |n| Some(n.node.clone())),
        ("state", |n| Some(n.state().as_str().to_owned())),
        ("roles", |n| Some(n.info.roles.join(","))),
        ("flight_address", |n| address(&n.info.flight_address)),
        ("rest_address", |n| address(&n.info.rest_address)),
        ("version", |n| Some(n.info.version.clone())),
        ("process", |n| Some(n.process.clone())),
    ];
    let numbers: [(&str, Number); 11] = [
        ("epoch", |n| Some(whole(n.epoch))),
        ("lease", |n| Some(whole(n.lease))),
        ("lease_left_ms", |n| n.remaining.map(millis)),
        ("silent_ms", |n| n.silent.map(millis)),
        ("running_statements", |n| n.load.as_ref().map(|load| i64::from(load.running_statements))),
        ("cache_bytes", |n| n.load.as_ref().map(|load| whole(load.cache_bytes))),
        ("cpu_millicores", |n| n.load.as_ref().map(|load| i64::from(load.cpu_millicores))),
        ("observed_revision", |n| n.load.as_ref().map(|load| whole(load.observed_revision))),
        ("cores", |n| n.load.as_ref().map(|_| i64::from(n.info.cores))),
        ("memory_bytes", |n| n.load.as_ref().map(|_| whole(n.info.memory_bytes))),
        ("max_statements", |n| n.load.as_ref().map(|_| i64::from(n.info.max_statements))),
    ];
    let mut fields = Vec::new();
    let mut columns: Vec<ArrayRef> = Vec::new();
    for (name, of) in texts {
        fields.push(Field::new(name, DataType::Utf8, true));
        columns.push(Arc::new(nodes.iter().map(of).collect::<StringArray>()));
    }
    for (name, of) in numbers {
        fields.push(Field::new(name, DataType::Int64, true));
        columns.push(Arc::new(nodes.iter().map(of).collect::<Int64Array>()));
    }
    fields.push(Field::new("drained", DataType::Boolean, true));
    let drained = nodes.iter().map(|node| Some(drained.contains(&node.node)));
    columns.push(Arc::new(drained.collect::<BooleanArray>()));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| Error::internal(format!("listing the nodes: {e}")))
}

fn shard_rows(shards: &[ShardStatus]) -> Result<RecordBatch> {
    let number =
        |of: fn(&ShardStatus) -> Option<i64>| -> ArrayRef { Arc::new(shards.iter().map(of).collect::<Int64Array>()) };
    let text = |of: fn(&ShardStatus) -> Option<String>| -> ArrayRef {
        Arc::new(shards.iter().map(of).collect::<StringArray>())
    };
    let rounded = |suspicion: f64| (suspicion * 1000.0).round() / 1000.0;
    let suspicion: ArrayRef = Arc::new(shards.iter().map(|s| s.suspicion.map(rounded)).collect::<Float64Array>());
    let state = |s: &ShardStatus| Some(if s.remaining.is_some() { "held" } else { "lost" }.to_owned());
    let columns = [
        ("shard", number(|s| Some(i64::from(s.shard)))),
        ("state", text(state)),
        ("node", text(|s| Some(s.route.node.clone()))),
        ("followers", text(|s| Some(s.route.followers.join(",")))),
        ("fence", number(|s| Some(whole(s.fence)))),
        ("lease", number(|s| Some(whole(s.route.lease)))),
        ("lease_left_ms", number(|s| s.remaining.map(millis))),
        ("suspicion", suspicion),
        ("reason", text(|s| Some(s.route.reason.clone()))),
    ];
    let fields: Vec<_> =
        columns.iter().map(|(name, column)| Field::new(*name, column.data_type().clone(), true)).collect();
    let columns = columns.into_iter().map(|(_, column)| column).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| Error::internal(format!("listing the shards: {e}")))
}

fn address(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

pub(super) fn whole(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::Float64Type;
    use lake_client::shards::Route;

    use super::*;

    #[test]
    fn a_suspicion_is_rounded() {
        let shard = |suspicion| ShardStatus { shard: 0, route: Route::default(), fence: 1, remaining: None, suspicion };
        let rows = shard_rows(&[shard(Some(4.08e-15)), shard(Some(1.23456)), shard(None)]).unwrap();
        let shown: Vec<_> = rows.column_by_name("suspicion").unwrap().as_primitive::<Float64Type>().iter().collect();
        assert_eq!(shown, [Some(0.0), Some(1.235), None]);
    }
}
