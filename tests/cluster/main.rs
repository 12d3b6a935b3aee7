//! Clusters of real processes, as a user or an operator meets them. Each module reads like a session.
//!
//! Tests that hurt processes run one at a time ([`common::alone`]): on two cores, five processes of one cluster and five
//! of another would measure each other.

mod away;
mod bad_input;
mod balancer;
mod clocks;
mod common;
mod docs;
mod engines;
#[path = "../../client/tests/support/etcd.rs"]
mod etcd;
mod first_start;
mod hot;
mod leader_dies;
mod library;
mod nodes;
mod object_storage;
mod packages;
mod power;
mod purge;
#[path = "../../query/tests/rest/python.rs"]
mod python;
mod quick_start;
mod race;
mod rescue;
#[path = "../../client/tests/support/s3.rs"]
mod s3;
mod shards;
#[path = "../../client/tests/support/mod.rs"]
mod support;
