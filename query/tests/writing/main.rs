//! Statements that change rows and tables: what they leave, what other engines see of it, and what happens when two writers
//! meet.

#[path = "../common/mod.rs"]
mod common;

mod conflicts;
mod hot;
mod model;
mod partitions;
mod procedures;
mod rows;
mod table;
mod tables;
