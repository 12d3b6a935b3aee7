//! Statements that change rows and tables: what they leave, what other engines see of it, and what happens when two writers
//! meet.

#[path = "../common/mod.rs"]
mod common;

mod adopt;
mod asked_upkeep;
mod bucket;
mod conflicts;
mod hot;
mod killed;
mod merge_on_read;
mod model;
mod nested;
mod partitions;
mod procedures;
mod purge;
mod rows;
mod sessions;
mod table;
mod tables;
mod upkeep;
