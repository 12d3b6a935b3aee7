//! Nodes know each other by the keys that tickets are signed with ([`TicketKeys`]), which only nodes of this lake can read: whoever
//! coordinates a query signs a token for it, and every request about a part of it carries that.
//!
//! ```text
//! 2 "part" | id of the statement (16 bytes) | when it expires, in milliseconds since 1970 (8 bytes, big-endian)
//! ```
//! The message of a ticket is JSON, which does not begin so: neither is ever taken for the other. With a secret configured, every
//! request needs that as well.

use std::time::{Duration, Instant};

use tonic::metadata::{BinaryMetadataValue, MetadataMap};
use uuid::Uuid;

use super::message::TOKEN_HEADER;
use crate::error::{Error, Result};
use crate::flight::keys::TicketKeys;
use crate::outcomes::now_ms;

const PREFIX: &[u8] = b"\x02part";
/// How much longer than its query a token is good: clocks differ.
const SLACK: Duration = Duration::from_secs(10 * 60);

/// Makes the header with a token for a statement, which ends by `deadline`.
///
/// # Errors
/// Those of [`TicketKeys::sign`].
pub async fn sign(keys: &TicketKeys, statement: Uuid, deadline: Instant) -> Result<MetadataMap> {
    let lasts = deadline.saturating_duration_since(Instant::now()) + SLACK;
    let expires = now_ms().saturating_add(u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
    let message = [PREFIX, statement.as_bytes(), &expires.to_be_bytes()].concat();
    let signed = keys.sign(&message, deadline).await?;
    let mut headers = MetadataMap::new();
    headers.insert_bin(TOKEN_HEADER, BinaryMetadataValue::from_bytes(&signed));
    Ok(headers)
}

/// The statement that a request is about.
///
/// # Errors
/// `Denied`: it was not signed by a node of this lake, or too long ago; the metadata's.
pub async fn verify(keys: &TicketKeys, headers: &MetadataMap, deadline: Instant) -> Result<Uuid> {
    let denied = || {
        Error::denied(
            "parts of queries are for the query nodes of this lake alone; ask for a whole query, by a statement",
        )
    };
    let signed = headers.get_bin(TOKEN_HEADER).and_then(|value| value.to_bytes().ok()).ok_or_else(denied)?;
    let message = match keys.verify(&signed, deadline).await {
        Err(error) if error.kind == crate::error::Kind::Invalid => return Err(denied()),
        verified => verified?,
    };
    let rest = message.strip_prefix(PREFIX).ok_or_else(denied)?;
    let (statement, rest) = rest.split_first_chunk::<16>().ok_or_else(denied)?;
    let expires = u64::from_be_bytes(rest.try_into().map_err(|_| denied())?);
    if expires < now_ms() {
        return Err(denied());
    }
    Ok(Uuid::from_bytes(*statement))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lake_client::memory::MemoryStore;

    use super::*;
    use crate::error::Kind;

    #[tokio::test]
    async fn only_nodes_of_one_lake_know_each_other() {
        let soon = Instant::now() + Duration::from_secs(10);
        let store: lake_client::store::SharedStore = Arc::new(MemoryStore::new());
        let (one, other) = (TicketKeys::new(store.clone()), TicketKeys::new(store));
        let stranger = TicketKeys::new(Arc::new(MemoryStore::new()));
        let statement = Uuid::new_v4();
        let headers = sign(&one, statement, soon).await.unwrap();
        assert_eq!(verify(&other, &headers, soon).await, Ok(statement));
        assert_eq!(verify(&stranger, &headers, soon).await.unwrap_err().kind, Kind::Denied);
        assert_eq!(verify(&one, &MetadataMap::new(), soon).await.unwrap_err().kind, Kind::Denied);
        let signed = async |message: &[u8]| {
            let signed = one.sign(message, soon).await.unwrap();
            let mut headers = MetadataMap::new();
            headers.insert_bin(TOKEN_HEADER, BinaryMetadataValue::from_bytes(&signed));
            verify(&one, &headers, soon).await
        };
        for wrong in
            [&b"{}"[..], PREFIX, &[PREFIX, &[0; 16], &[0; 8]].concat(), &[PREFIX, &[0; 16], &[255; 9]].concat()]
        {
            assert_eq!(signed(wrong).await.unwrap_err().kind, Kind::Denied, "{wrong:?}");
        }
        assert_eq!(signed(&[PREFIX, &[0; 16], &[255; 8]].concat()).await, Ok(Uuid::nil()));
    }
}
