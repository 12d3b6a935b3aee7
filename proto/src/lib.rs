//! lake's protocol: the generated gRPC code ([`v1`]), the plain types it stands for, and the limits of the contract.
//!
//! No I/O and no policy live here. In reading order:
//! - [`limits`]: every size and count the contract names, in one place;
//! - [`kv`]: keys, entries, compares, operations and transactions as plain values, validated when they come off the wire;
//! - [`coordination`]: leases, scopes and sessions as plain values;
//! - [`watch`]: changes as a watch brings them;
//! - [`status`]: how an error travels in a gRPC status: its kind, whether it may have been applied, who leads;
//! - [`codec`]: how messages become bytes.

pub mod codec;
pub mod coordination;
pub mod kv;
pub mod limits;
pub mod status;
pub mod watch;

/// The code generated from `proto/lake/v1/*.proto`.
#[allow(missing_docs, clippy::doc_markdown, clippy::large_enum_variant)]
pub mod v1 {
    tonic::include_proto!("lake.v1");
}

/// The code generated from `proto/etcdserverpb/kv.proto`: the part of etcd's API that lake uses.
#[cfg(feature = "etcd")]
#[allow(missing_docs, clippy::doc_markdown, clippy::large_enum_variant)]
pub mod etcd {
    tonic::include_proto!("etcdserverpb");
}

/// The gRPC metadata key that carries the cluster secret, as `Bearer <secret>`.
pub const SECRET_METADATA_KEY: &str = "authorization";

/// The gRPC metadata key that names the cluster a request is meant for. A peer of another cluster refuses it: an address
/// may have come to belong to one since the caller learnt it.
pub const CLUSTER_METADATA_KEY: &str = "lake-cluster-id";

/// Largest gRPC message either side accepts, in bytes: the largest transaction (8 MiB) with room for its framing.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Largest message of a watch, in bytes: one change is never divided, and the end of many leases at once can delete more
/// than a transaction could. A change is kept only up to 64 MiB; this leaves room for its framing.
pub const MAX_WATCH_MESSAGE_BYTES: usize = 96 << 20;
