//! A query node of lake.
pub mod config;
pub mod error;
pub mod scan;
pub mod sql;
pub mod storage;
pub mod table;
