//! The clocks that clients and peers read, in one place.
//!
//! What passes is measured on tokio's clock, which is the system's monotonic one until a runtime's is paused: in a simulation
//! time goes on only as the simulation says, and everything that asks here goes with it. The wall clock is only ever shown
//! to people; a simulation sets another one with [`set_wall`].
//!
//! Nothing else in lake-client and lake-metasrv reads a clock (clippy.toml refuses it).

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

static WALL: OnceLock<fn() -> Duration> = OnceLock::new();

/// Now.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// How long ago that was; zero if it is yet to come.
pub fn since(at: Instant) -> Duration {
    now().saturating_duration_since(at)
}

/// The wall clock: time since 1970.
#[allow(clippy::disallowed_methods, reason = "this is where it is read")]
pub fn wall() -> Duration {
    match WALL.get() {
        Some(wall) => wall(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    }
}

/// Has [`wall`] ask this from now on, for the rest of the process. The first one counts.
pub fn set_wall(wall: fn() -> Duration) {
    // Somebody else's, who came first, is as good.
    let _ = WALL.set(wall);
}
