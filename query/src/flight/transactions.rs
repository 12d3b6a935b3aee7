//! Transactions over Flight SQL, and what a request is run with.
//!
//! A client with a session of its own sends its settings in the header [`SETTINGS_HEADER`]; others name a transaction by its id
//! in the command, and an operation and an isolation in headers.
//!
//! A transaction is held by one node, which its id names. A request that reaches another one is sent on there as it came, once,
//! with the caller's own token. If that node cannot be reached, ending the transaction is settled here: by what is kept of it,
//! or by leaving that it was rolled back ([`crate::sql::transactions`]). Anything else has to wait for the node.

use std::time::Duration;

use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::sql::server::PeekableFlightDataStream;
use arrow_flight::sql::{
    ActionBeginTransactionResult, ActionEndTransactionRequest, DoPutUpdateResult, EndTransaction, ProstMessageExt,
};
use arrow_flight::{Action, FlightDescriptor, FlightInfo, Ticket};
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use tokio::sync::mpsc;
use tonic::metadata::{BinaryMetadataValue, MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::rows::FlightStream;
use super::status::from_error;
use super::{FORWARDED_HEADER, ISOLATION_HEADER, OPERATION_HEADER, SCHEMA_HEADER, TIMEOUT_HEADER, cookies, timeout_of};
use crate::error::{Error, Result};
use crate::sql::once;
use crate::sql::session::{Sessions, Settings};
use crate::sql::transactions::{End, Handle};
use crate::table::conflict::Isolation;

/// The settings of the client's session.
pub const SETTINGS_HEADER: &str = "lake-settings-bin";
/// The action that begins a transaction.
pub const BEGIN: &str = "BeginTransaction";
/// The action that ends one.
pub const END: &str = "EndTransaction";
/// How long sending on a request may take before it is given up.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Puts the settings of a session into a request.
///
/// # Errors
/// `Internal`: they cannot be written.
pub fn put_settings(settings: &Settings, headers: &mut MetadataMap) -> Result<()> {
    let json = serde_json::to_vec(settings).map_err(|e| Error::internal(format!("writing the settings: {e}")))?;
    headers.insert_bin(SETTINGS_HEADER, BinaryMetadataValue::from_bytes(&json));
    Ok(())
}

/// What a request is run with: `known` (of its ticket), unless its headers or its transaction say otherwise.
///
/// # Errors
/// `Invalid`: a header or the transaction's id is nothing that lake understands.
pub fn settings_of(headers: &MetadataMap, transaction: Option<&[u8]>, known: Settings) -> Result<Settings> {
    let mut settings = match headers.get_bin(SETTINGS_HEADER) {
        None => known,
        Some(value) => {
            let json = value.to_bytes().ok();
            let settings = json.and_then(|json| serde_json::from_slice(&json).ok());
            settings.ok_or_else(|| Error::invalid(format!("the header {SETTINGS_HEADER} was not made by lake")))?
        }
    };
    if let Some(id) = transaction.filter(|id| !id.is_empty()) {
        let id = std::str::from_utf8(id).map_err(|_| Error::invalid("this is no transaction of lake's"))?;
        settings.transaction = Some(id.to_owned());
    }
    let text = |name: &str| match headers.get(name).map(|value| value.to_str()) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text)),
        Some(Err(_)) => Err(Error::invalid(format!("the header {name} holds characters that are not ASCII"))),
    };
    if let Some(id) = text(OPERATION_HEADER)? {
        once::check_id(id)?;
        settings.operation = Some(id.to_owned());
    }
    match text(ISOLATION_HEADER)? {
        None => {}
        Some("serializable") => settings.serializable = true,
        Some("snapshot") => settings.serializable = false,
        Some(other) => {
            return Err(Error::invalid(format!(
                "the header {ISOLATION_HEADER} is snapshot or serializable, not {other:?}"
            )));
        }
    }
    Ok(settings)
}

/// BeginTransaction.
///
/// # Errors
/// Those of [`crate::sql::transactions::Transactions::begin`].
pub fn begin(sessions: &Sessions, headers: &MetadataMap) -> Result<ActionBeginTransactionResult, Status> {
    let begin = || -> Result<Handle> {
        let settings = settings_of(headers, None, Settings::default())?;
        let isolation = if settings.serializable { Isolation::Serializable } else { Isolation::Snapshot };
        sessions.transactions().begin(isolation, settings.operation.as_deref())
    };
    let handle = begin().map_err(|e| from_error(&e))?;
    Ok(ActionBeginTransactionResult { transaction_id: handle.to_string().into() })
}

/// EndTransaction.
///
/// # Errors
/// Those of [`crate::sql::transactions::Transactions::end`].
pub async fn end(
    sessions: &Sessions,
    request: ActionEndTransactionRequest,
    headers: &MetadataMap,
) -> Result<(), Status> {
    let refused = |e: Error| from_error(&e);
    let end = match EndTransaction::try_from(request.action) {
        Ok(EndTransaction::Commit) => End::Commit,
        Ok(EndTransaction::Rollback) => End::RollBack,
        _ => return Err(refused(Error::invalid("a transaction is ended by Commit or Rollback"))),
    };
    let settings = settings_of(headers, Some(&request.transaction_id), Settings::default()).map_err(refused)?;
    if let Some(elsewhere) = Elsewhere::of(sessions, &settings, headers).map_err(refused)? {
        match elsewhere.connect().await {
            Ok(mut node) => {
                let action = Action { r#type: END.to_owned(), body: request.as_any().encode_to_vec().into() };
                let answer = node.do_action(carry(headers, action)).await?;
                return answer.into_inner().try_for_each(|_| futures::future::ok(())).await;
            }
            Err(error) => tracing::info!(%error, "the node of a transaction is away: how it ends is settled here"),
        }
    }
    let handle: Handle = settings.transaction.as_deref().unwrap_or_default().parse().map_err(refused)?;
    let deadline = sessions.engine().write_deadline(timeout_of(headers));
    sessions.transactions().end(&handle, end, deadline).await.map_err(refused)
}

/// A node that holds the transaction of a request.
pub struct Elsewhere(Handle);

impl Elsewhere {
    /// The other node, if the request concerns one and was not sent on already.
    ///
    /// # Errors
    /// `Invalid`: the settings name no transaction of lake's.
    pub fn of(sessions: &Sessions, settings: &Settings, headers: &MetadataMap) -> Result<Option<Self>> {
        let forwarded = headers.contains_key(FORWARDED_HEADER);
        Ok(sessions.elsewhere(settings)?.filter(|_| !forwarded).map(Self))
    }

    /// # Errors
    /// `Unavailable`, naming the node.
    pub async fn connect(&self) -> Result<FlightServiceClient<Channel>> {
        let node = &self.0.node;
        let away = |why: String| {
            Error::unavailable(format!(
                "{node}, the query node of transaction {}, cannot be reached: {why}; nothing was done: COMMIT or ROLLBACK \
                 settles how it ends, at any node",
                self.0.id
            ))
        };
        connect(node).await.map_err(away)
    }

    /// The answer of that node to a ticket.
    ///
    /// # Errors
    /// That node's.
    pub async fn get(
        &self,
        mut node: FlightServiceClient<Channel>,
        headers: &MetadataMap,
        ticket: Ticket,
    ) -> Result<Response<FlightStream>, Status> {
        let answer = node.do_get(carry(headers, ticket)).await?;
        Ok(answer.map(|stream| Box::pin(stream) as FlightStream))
    }

    /// The answer of that node to GetFlightInfo.
    ///
    /// # Errors
    /// That node's.
    pub async fn info(
        &self,
        headers: &MetadataMap,
        descriptor: FlightDescriptor,
    ) -> Result<Response<FlightInfo>, Status> {
        let mut node = self.connect().await.map_err(|e| from_error(&e))?;
        node.get_flight_info(carry(headers, descriptor)).await
    }

    /// The count that the node answers to rows which are ingested. They go there as they come; what is held of them here is a message
    /// and what HTTP/2 lets be under way.
    ///
    /// # Errors
    /// That node's, and the client's stream's.
    pub async fn put(&self, headers: &MetadataMap, rows: PeekableFlightDataStream) -> Result<i64, Status> {
        let mut node = self.connect().await.map_err(|e| from_error(&e))?;
        let (broke, mut broken) = mpsc::channel(1);
        // What ends is committed. Where the client's stream fails, the other goes on without an end, until the call is given up.
        let rows = rows.filter_map(move |data| {
            let broke = broke.clone();
            async move {
                match data {
                    Ok(data) => Some(data),
                    Err(status) => {
                        let _ = broke.send(status).await;
                        std::future::pending().await
                    }
                }
            }
        });
        let answer = tokio::select! {
            biased;
            Some(status) = broken.recv() => return Err(status),
            answer = node.do_put(carry(headers, rows)) => answer?,
        };
        let result = answer.into_inner().try_next().await?;
        let result = result.and_then(|result| DoPutUpdateResult::decode(result.app_metadata).ok());
        result.map(|result| result.record_count).ok_or_else(no_count)
    }
}

/// A connection to another node.
///
/// # Errors
/// Why it cannot be reached, in words.
pub async fn connect(node: &str) -> Result<FlightServiceClient<Channel>, String> {
    match tokio::time::timeout(CONNECT_WITHIN, crate::client::open(node)).await {
        Ok(Ok(channel)) => Ok(FlightServiceClient::new(channel)
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)),
        Ok(Err(error)) => Err(crate::error::with_sources(&error)),
        Err(_) => Err("it does not answer".to_owned()),
    }
}

/// A request as it is sent on to another node.
pub fn carry<T>(headers: &MetadataMap, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let carried = request.metadata_mut();
    for name in [
        "authorization",
        "grpc-timeout",
        cookies::HEADER,
        TIMEOUT_HEADER,
        OPERATION_HEADER,
        ISOLATION_HEADER,
        SCHEMA_HEADER,
    ] {
        for value in headers.get_all(name) {
            carried.append(name, value.clone());
        }
    }
    if let Some(value) = headers.get_bin(SETTINGS_HEADER) {
        carried.insert_bin(SETTINGS_HEADER, value.clone());
    }
    carried.insert(FORWARDED_HEADER, MetadataValue::from_static("1"));
    request
}

/// The answer to a change is something else.
pub fn no_count() -> Status {
    Status::internal("the node of the transaction did not answer with a count")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn settings_come_from_tickets_headers_and_commands() {
        let kept =
            Settings { operation: Some("Übung 1".into()), serializable: true, kept: true, ..Settings::default() };
        let mut headers = MetadataMap::new();
        put_settings(&kept, &mut headers).unwrap();
        assert_eq!(settings_of(&headers, None, Settings::default()), Ok(kept.clone()));
        headers.insert(OPERATION_HEADER, MetadataValue::from_static("a"));
        headers.insert(ISOLATION_HEADER, MetadataValue::from_static("snapshot"));
        let settings = settings_of(&headers, Some(b"x@y"), Settings::default()).unwrap();
        let told = (settings.operation.as_deref(), settings.transaction.as_deref(), settings.serializable);
        assert_eq!(told, (Some("a"), Some("x@y"), false));
        assert_eq!(settings_of(&MetadataMap::new(), Some(b""), kept.clone()), Ok(kept));
        headers.insert(ISOLATION_HEADER, MetadataValue::from_static("dirty"));
        assert_eq!(settings_of(&headers, None, Settings::default()).unwrap_err().kind, Kind::Invalid);
    }
}
