//! `lake meta` against clusters of real peers, through the real binary. Each module reads like an operator's session.

mod common;
mod coordination;
mod keys;
mod members;
mod status;
mod transfer;
mod warehouse;
mod watch;
