//! What is served: Flight SQL, and the calls of Flight that Flight SQL does not speak of.
//!
//! - PollFlightInfo: a query runs while its client polls, or stays away ([`super::polls`]).
//! - GetSchema: what GetFlightInfo says of the rows.
//! - DoAction: with the cookie of a transaction that is begun or ended ([`super::cookies`]).
//! - DoExchange: for parts of queries that other nodes coordinate ([`crate::distributed`]).

use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest, PollInfo, SchemaResult, Ticket,
};
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};

use super::SCHEMA_HEADER;
use super::cookies::Change;
use super::service::LakeFlight;
use crate::distributed::service::Parts;

/// See the module.
#[derive(Clone)]
pub struct Served {
    pub flight: LakeFlight,
    /// What other nodes ask for.
    pub parts: Parts,
}

type Result<T> = std::result::Result<Response<T>, Status>;

#[tonic::async_trait]
impl FlightService for Served {
    type HandshakeStream = <LakeFlight as FlightService>::HandshakeStream;
    type ListFlightsStream = <LakeFlight as FlightService>::ListFlightsStream;
    type DoGetStream = <LakeFlight as FlightService>::DoGetStream;
    type DoPutStream = <LakeFlight as FlightService>::DoPutStream;
    type DoActionStream = <LakeFlight as FlightService>::DoActionStream;
    type ListActionsStream = <LakeFlight as FlightService>::ListActionsStream;
    type DoExchangeStream = <LakeFlight as FlightService>::DoExchangeStream;

    async fn handshake(&self, request: Request<Streaming<HandshakeRequest>>) -> Result<Self::HandshakeStream> {
        self.flight.handshake(request).await
    }

    async fn list_flights(&self, request: Request<Criteria>) -> Result<Self::ListFlightsStream> {
        self.flight.list_flights(request).await
    }

    async fn get_flight_info(&self, request: Request<FlightDescriptor>) -> Result<FlightInfo> {
        self.flight.get_flight_info(request).await
    }

    async fn poll_flight_info(&self, request: Request<FlightDescriptor>) -> Result<PollInfo> {
        self.flight.poll(request).await
    }

    async fn get_schema(&self, mut request: Request<FlightDescriptor>) -> Result<SchemaResult> {
        request.metadata_mut().insert(SCHEMA_HEADER, MetadataValue::from_static("1"));
        let info = self.flight.get_flight_info(request).await?;
        Ok(info.map(|info| SchemaResult { schema: info.schema }))
    }

    async fn do_get(&self, request: Request<Ticket>) -> Result<Self::DoGetStream> {
        self.flight.do_get(request).await
    }

    async fn do_put(&self, request: Request<Streaming<FlightData>>) -> Result<Self::DoPutStream> {
        self.flight.do_put(request).await
    }

    async fn do_action(&self, request: Request<Action>) -> Result<Self::DoActionStream> {
        let cookie = Change::of(&request);
        cookie.told(self.flight.do_action(request).await?).await
    }

    async fn list_actions(&self, request: Request<Empty>) -> Result<Self::ListActionsStream> {
        self.flight.list_actions(request).await
    }

    async fn do_exchange(&self, request: Request<Streaming<FlightData>>) -> Result<Self::DoExchangeStream> {
        match Parts::concerns(request.metadata()) {
            true => self.parts.exchange(request).await,
            false => self.flight.do_exchange(request).await,
        }
    }
}
