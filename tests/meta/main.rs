//! `lake meta` against clusters of real peers, through the real binary. Each module reads like an operator's session.

mod bench;
mod common;
mod coordination;
#[cfg(feature = "store-object")]
#[path = "../../client/tests/support/etcd.rs"]
mod etcd;
mod keys;
mod members;
mod status;
#[cfg(feature = "store-object")]
#[path = "../../client/tests/support/mod.rs"]
mod support;
mod transfer;
#[cfg(feature = "store-object")]
mod transfer_pairs;
mod warehouse;
mod watch;
