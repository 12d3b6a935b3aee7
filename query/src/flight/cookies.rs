//! The open transaction of a client's session, as a cookie.
//!
//! Bulk ingest names its transaction in the command. ADBC's driver leaves that out, so that its rows would be committed at once with
//! autocommit off. No node remembers sessions; so BeginTransaction sets a cookie that holds the transaction's id, EndTransaction takes
//! it away, and an ingest that names no transaction belongs to the one of its cookie, at any node.
//!
//! A client that keeps no cookies is recognized by nothing: many clients may share a connection and a secret, and nothing is guessed.

use arrow_flight::flight_service_server::FlightService;
use arrow_flight::sql::{ActionBeginTransactionResult, ActionEndTransactionRequest, Any};
use arrow_flight::{Action, Result as ActionResult};
use bytes::Bytes;
use futures::TryStreamExt;
use prost::Message;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::service::LakeFlight;
use super::transactions::{BEGIN, END};

/// The header that cookies come in.
pub const HEADER: &str = "cookie";
/// The cookie that holds the id of a transaction.
pub const TRANSACTION: &str = "lake-transaction";

type Answer = Response<<LakeFlight as FlightService>::DoActionStream>;

/// The transaction of the client's session, if it keeps cookies and has one open.
pub fn transaction(headers: &MetadataMap) -> Option<Bytes> {
    let lines = headers.get_all(HEADER).iter().filter_map(|line| line.to_str().ok());
    let mut cookies = lines.flat_map(|line| line.split(';')).filter_map(|cookie| cookie.trim().split_once('='));
    let (_, id) = cookies.find(|(name, id)| *name == TRANSACTION && !id.is_empty())?;
    Some(Bytes::copy_from_slice(id.trim_matches('"').as_bytes()))
}

/// What an action does to the cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Nothing,
    Set,
    Remove,
}

impl Change {
    /// That of this action, once it is done. The end of another transaction than the cookie's leaves that.
    pub fn of(request: &Request<Action>) -> Self {
        let Action { r#type, body } = request.get_ref();
        let ended = || Any::decode(body.clone()).ok()?.unpack::<ActionEndTransactionRequest>().ok()?;
        match r#type.as_str() {
            BEGIN => Self::Set,
            END => match (transaction(request.metadata()), ended()) {
                (Some(id), Some(ended)) if ended.transaction_id == id => Self::Remove,
                _ => Self::Nothing,
            },
            _ => Self::Nothing,
        }
    }

    /// The answer to the action, with what it says of the cookie.
    ///
    /// # Errors
    /// The action's own; `Internal`: the answer holds no transaction.
    pub async fn told(self, answer: Answer) -> Result<Answer, Status> {
        let (mut headers, results, extensions) = answer.into_parts();
        let (cookie, results) = match self {
            Self::Nothing => (None, results),
            Self::Remove => (Some(format!("{TRANSACTION}=; Max-Age=0")), results),
            Self::Set => {
                let results: Vec<ActionResult> = results.try_collect().await?;
                let begun = results.first().and_then(|result| Any::decode(result.body.clone()).ok());
                let begun = begun.and_then(|any| any.unpack::<ActionBeginTransactionResult>().ok()?);
                let id = begun.as_ref().and_then(|begun| std::str::from_utf8(&begun.transaction_id).ok());
                let cookie = id.map(|id| format!("{TRANSACTION}={id}"));
                (cookie, Box::pin(futures::stream::iter(results.into_iter().map(Ok))) as _)
            }
        };
        if let Some(cookie) = cookie {
            let value = cookie.parse().map_err(|e| Status::internal(format!("setting the cookie {cookie:?}: {e}")))?;
            headers.insert("set-cookie", value);
        }
        Ok(Response::from_parts(headers, results, extensions))
    }
}

#[cfg(test)]
mod tests {
    use arrow_flight::sql::ProstMessageExt;

    use super::*;

    fn with(cookies: &[&'static str]) -> MetadataMap {
        let mut headers = MetadataMap::new();
        for cookie in cookies {
            headers.append(HEADER, tonic::metadata::MetadataValue::from_static(cookie));
        }
        headers
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        for (cookies, id) in [
            (&[][..], None),
            (&["a=b; lake-transaction="], None),
            (&["lake-transaction=x@[::1]:9"], Some("x@[::1]:9")),
            (&["a=b; c", "d=e;lake-transaction=\"x@h:9\"; f=g"], Some("x@h:9")),
        ] {
            assert_eq!(transaction(&with(cookies)).as_deref(), id.map(str::as_bytes), "{cookies:?}");
        }
    }

    #[test]
    fn only_the_end_of_its_transaction_removes_the_cookie() {
        let ends = |id: &'static str, cookies: &[&'static str]| {
            let body = ActionEndTransactionRequest { transaction_id: id.into(), action: 1 }.as_any().encode_to_vec();
            let mut request = Request::new(Action::new(END, body));
            *request.metadata_mut() = with(cookies);
            Change::of(&request)
        };
        assert_eq!(ends("x@h:9", &["lake-transaction=x@h:9"]), Change::Remove);
        assert_eq!(ends("x@h:9", &["lake-transaction=y@h:9"]), Change::Nothing);
        assert_eq!(ends("x@h:9", &[]), Change::Nothing);
        assert_eq!(Change::of(&Request::new(Action::new(BEGIN, Bytes::new()))), Change::Set);
        assert_eq!(Change::of(&Request::new(Action::new("CancelFlightInfo", Bytes::new()))), Change::Nothing);
    }
}
