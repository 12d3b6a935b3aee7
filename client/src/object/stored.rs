//! The object of a key: a header, the ids of the last changes, the value.

use bytes::{BufMut, Bytes, BytesMut};
use lake_proto::kv::{KeyValue, Revision};
use object_store::UpdateVersion;
use uuid::Uuid;

/// What the object of an entry begins with.
const MAGIC: &[u8; 8] = b"LAKEKV01";
/// Magic, count, revision of creation, version. The ids of the last changes follow, the newest first.
pub(super) const HEADER_BYTES: usize = 8 + 8 + 8 + 8;
/// Changes of a key whose ids are kept.
pub(super) const IDS_KEPT: usize = 16;
pub(super) const ID_BYTES: usize = 16;

/// The object of a key, as it was read.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    /// Of the key's changes, deletes too.
    pub(super) count: Revision,
    /// Of the last changes, the newest first.
    pub(super) ids: Vec<Uuid>,
    /// `None`: deleted.
    pub(super) entry: Option<KeyValue>,
    pub(super) version: UpdateVersion,
}

impl Stored {
    pub(super) fn encode(count: Revision, ids: &[Uuid], entry: Option<&KeyValue>) -> Bytes {
        let value = entry.map_or(&[][..], |entry| &entry.value);
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + ids.len() * ID_BYTES + value.len());
        bytes.put_slice(MAGIC);
        bytes.put_u64(count);
        bytes.put_u64(entry.map_or(0, |entry| entry.create_revision));
        // An entry has a version from 1 on: 0 is a key that was deleted.
        bytes.put_u64(entry.map_or(0, |entry| entry.version));
        ids.iter().for_each(|id| bytes.put_slice(id.as_bytes()));
        bytes.put_slice(value);
        bytes.freeze()
    }

    pub(super) fn decode(key: &str, bytes: &Bytes, version: UpdateVersion) -> Result<Self, &'static str> {
        const SHORT: &str = "it is too short";
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(SHORT)?;
        if &header[..8] != MAGIC {
            return Err("it begins with something else");
        }
        let number = |at: usize| header[at..at + 8].try_into().map(u64::from_be_bytes).map_err(|_| SHORT);
        let (count, create_revision, times) = (number(8)?, number(16)?, number(24)?);
        let ids_bytes = ids_kept(count) * ID_BYTES;
        let ids = rest.get(..ids_bytes).ok_or(SHORT)?;
        let ids = ids.chunks(ID_BYTES).map(|id| Uuid::from_slice(id).map_err(|_| SHORT)).collect::<Result<_, _>>()?;
        let entry = (times > 0).then(|| KeyValue {
            key: key.to_owned(),
            value: bytes.slice(HEADER_BYTES + ids_bytes..),
            version: times,
            create_revision,
            mod_revision: count,
            lease: None,
        });
        Ok(Self { count, ids, entry, version })
    }

    /// The id of the change that raised the key's count to this; `None`: it is not named any more.
    pub(super) fn id_of(&self, count: Revision) -> Option<Uuid> {
        let age = self.count.checked_sub(count)?;
        self.ids.get(usize::try_from(age).ok()?).copied()
    }
}

/// Of how many changes an entry names the ids.
pub(super) fn ids_kept(count: Revision) -> usize {
    usize::try_from(count).unwrap_or(IDS_KEPT).min(IDS_KEPT)
}
