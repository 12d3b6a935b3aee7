//! Tests that take something of their process for themselves: [`damage`] counts every panic of the process, and must do so
//! before a log is first opened (a log puts a hook of its own in front); [`mutations`] counts memory with an allocator of
//! its own. Neither can share a process with `tests/it/`, and neither opens what disturbs the other.

mod damage;
#[path = "../it/support/directories.rs"]
mod directories;
#[path = "../it/support/log_oracle.rs"]
mod log_oracle;
mod mutations;
#[path = "../../fuzz/src/seeds.rs"]
mod seeds;
