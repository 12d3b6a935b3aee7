//! A query node of lake: Iceberg tables on object storage, SQL over them served as Arrow Flight SQL, and the Iceberg REST
//! catalog for every other engine.
//!
//! A node keeps nothing that matters: what is committed is in the metadata cluster (a pointer per table) and in the
//! warehouse (immutable objects). Any number of nodes serve the same tables.
//!
//! What holds:
//! - never wrong rows: a table state that cannot be read correctly yet is refused by name;
//! - never a lost row: files are written and durable before the pointer is swapped, a lost race is built anew on the
//!   new version, an unknown outcome is looked up, and an error says whether anything was committed;
//! - a query on a table whose pointer is cached and fresh needs no metadata call;
//! - everything is bounded: memory, statements, caches, queues, deadlines.
//!
//! In reading order:
//! - [`config`]: options, and the configuration they make;
//! - [`error`]: the one error, by what can be done about it; [`words`]: what DataFusion says, in words of SQL;
//! - [`storage`]: objects on a file system or S3, and the cache of parsed metadata;
//! - [`table`]: Iceberg tables: types, data files, versions, and the commit;
//! - [`scan`]: a table version as DataFusion reads it, and INSERT's sink;
//! - [`outcomes`]: what is kept of operations that a client may ask for again;
//! - [`sql`]: a statement from text to rows or a change; [`progress`]: how far it has come;
//! - [`distributed`]: one query over many nodes;
//! - [`flight`]: how statements come in;
//! - [`rest`]: the Iceberg REST catalog;
//! - [`upkeep`]: what is done to tables from time to time, by the worker that has their shard;
//! - [`janitor`]: the same without a metadata cluster;
//! - [`cluster`]: what the leader is told of this process, and has it do; [`chores`]: those of it that touch objects;
//! - [`probes`]: what the node says of itself over HTTP;
//! - [`node`]: all of it started, served and stopped;
//! - [`client`]: the other end, for the shell and tests;
//! - [`planted`]: bugs on purpose, in builds that are to have one.

pub mod chores;
pub mod client;
pub mod cluster;
pub mod config;
pub mod distributed;
pub mod error;
pub mod flight;
pub mod janitor;
pub mod node;
pub mod outcomes;
pub mod planted;
pub mod probes;
pub mod progress;
pub mod rest;
pub mod scan;
pub mod sql;
pub mod storage;
pub mod table;
pub mod upkeep;
pub mod words;

pub use config::{Config, Options};
pub use error::{Error, Kind, Position};
pub use node::QueryNode;
