//! Flight SQL on the wire: what drivers do, the official ADBC driver from Python, and what a node shows of itself.

mod adbc;
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../rest/http.rs"]
mod http;
mod node;
#[path = "../rest/python.rs"]
mod python;
mod statements;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../client/tests/support/mod.rs"]
mod support;
mod tickets;

use arrow::array::RecordBatch;
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::{FlightInfo, Ticket};
use futures::TryStreamExt;
use tonic::transport::{Channel, Endpoint};

use crate::common::Cluster;

/// A client that knows nothing of lake's.
async fn flight_sql(cluster: &Cluster, node: usize) -> FlightSqlServiceClient<Channel> {
    let uri = format!("http://{}", cluster.nodes[node].flight_address());
    FlightSqlServiceClient::new(Endpoint::from_shared(uri).unwrap().connect().await.unwrap())
}

fn ticket(info: &FlightInfo) -> Ticket {
    info.endpoint[0].ticket.clone().unwrap()
}

/// All the rows of a ticket.
async fn redeem(client: &mut FlightSqlServiceClient<Channel>, ticket: Ticket) -> Result<Vec<RecordBatch>, String> {
    let rows = client.do_get(ticket).await.map_err(|e| e.to_string())?;
    rows.try_collect().await.map_err(|e| e.to_string())
}
