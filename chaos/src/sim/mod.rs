//! The deterministic simulation: a whole metadata cluster, its clients, network, disks and time in one process, decided by a
//! seed. The same seed does the same again, so that what it finds can be looked at for as long as it takes.
//!
//! Everything but the world around it is what runs on servers: the peers' services and state machine, openraft, the client.
//! The world is given to them: connections by [`net`], over turmoil's network; time by tokio's paused clock, which peers and
//! clients read through `lake_client::clock`; the clocks that libraries read by [`clock`]; disks by
//! `lake_metasrv::log::memory`, with a model of what a crash loses (and snapshots in files, written in one go); chance by
//! [`chance`].
//!
//! In reading order:
//! - [`plan`]: what follows from a seed; [`minimise`]: a smaller plan that fails in the same way;
//! - [`invariants`]: what must hold at every step, pure; [`model`]: what commands must do, pure; [`observer`]: how both are seen;
//!   [`trace`]: what happened, a line each;
//! - [`host`]: a peer in the simulation; [`load`]: the clients; [`run`]: one simulation from beginning to verdict;
//! - [`report`]: what came of it; [`children`]: many of them, each in a process of its own.
//!
//! Each simulation runs in its own process: statics (tokio's and openraft's counters, planted bugs) are fresh, a panic or a
//! hang is one seed's, and both its time and its memory are bounded.

pub mod chance;
pub mod children;
mod clock;
mod host;
pub mod invariants;
mod load;
pub mod minimise;
mod model;
mod net;
mod observer;
pub mod plan;
pub mod report;
pub mod run;
mod trace;
