//! Between openraft and the rest: its types, its log and state machine, its network.
//!
//! - [`types`]: the type configuration, commands and members;
//! - [`wire`]: these to and from the .proto messages;
//! - [`log_store`]: openraft's log storage over [`crate::log`];
//! - [`state_machine`]: openraft's state machine over [`crate::state::State`] and [`crate::snapshot`];
//! - [`network`]: calls to the other peers; [`append_stream`]: appends to one of them, many under way at once.

mod append_stream;
pub mod log_store;
pub mod network;
pub mod state_machine;
pub mod types;
pub mod wire;
