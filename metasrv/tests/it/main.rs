//! What only whole peers show: clusters of them in this process, peers as processes that are killed, directories that are
//! damaged, rescued or on a disk whose power is cut.
//!
//! One binary, because linking is most of what a test binary costs. Peers that run as processes of their own are this
//! binary again, told by the environment which peer to be ([`support::processes`]). What takes something of a process for
//! itself alone is not here but in `tests/alone/`.

mod addresses;
mod agreement;
mod cluster;
mod conformance;
mod crash;
mod embedded;
mod exactly_once;
mod faults;
mod full_disk;
mod guards;
mod held_snapshots;
mod herd;
mod http;
mod lease_kills;
mod leases;
mod listings;
mod membership;
mod membership_kills;
mod nodes;
mod overload;
mod power_cut;
mod procedures;
mod refusals;
mod rescue;
mod rescue_directories;
mod sessions;
mod settings;
mod shards;
mod snapshot_turns;
mod succession;
mod support;
mod watch;
mod watch_load;
