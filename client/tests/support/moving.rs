//! Moving everything from one store to another.

use std::time::Instant;

use lake_client::memory::MemoryStore;
use lake_client::store::MetaStore;
use lake_client::transfer::{self, Existing};
use lake_proto::limits::MAX_VALUE_BYTES;

use crate::support::PATIENCE;

/// Moves many entries, small and large, from a store in memory to this one and back to a file.
pub async fn filled_and_read_again(target: &dyn MetaStore) {
    let soon = || Instant::now() + PATIENCE;
    let memory = MemoryStore::new();
    for n in 0..400u32 {
        memory.cas(&format!("/kv/many/{n:04}"), None, n.to_string().into(), soon()).await.unwrap();
    }
    for n in 0..20u8 {
        memory.cas(&format!("/lake/large/{n:02}"), None, vec![n; MAX_VALUE_BYTES].into(), soon()).await.unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let (data, again) = (dir.path().join("data"), dir.path().join("again"));
    let exported = transfer::export(&memory, "memory", &data, PATIENCE, &|_| {}).await.unwrap();
    let imported = transfer::import(&data, target, Existing::Refuse, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!((imported.written, imported.verified), (420, exported.sum));
    let twice = transfer::import(&data, target, Existing::Refuse, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!((twice.written, twice.there), (0, 420));
    let back = transfer::export(target, "the target", &again, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!(back.sum, exported.sum);
    assert_eq!(back.header.revision.is_some(), target.capabilities().consistent_listing);
}
