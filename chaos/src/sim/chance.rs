//! Makes chance follow from a seed, for the whole process.
//!
//! Everything that is random in peers and clients comes from `getrandom(2)` in the end: the keys of std's hash maps, which of
//! several ready branches tokio's `select!` takes, rand's thread generators (openraft's election timeouts, waits with
//! jitter, identifiers). All of them reach it through the C library's symbol `getrandom`: std links to it, and the crate
//! getrandom (0.3 and 0.4) looks it up by name. This module defines that symbol; the dynamic linker prefers a program's own.
//! Without a seed it passes the call on to the kernel.
//!
//! What it relies on: Linux with glibc. What it does not reach: code that makes the system call itself (the crate getrandom
//! 0.2, which only TLS uses). That it works is a test's business: a seed run twice must leave the same trace.
//!
//! Each thread draws its own sequence, so that a simulation on a thread of its own is not disturbed by others.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// 0: none was set.
static SEED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Words drawn by this thread.
    static DRAWN: Cell<u64> = const { Cell::new(0) };
}

/// From now on everything random in this process follows from the seed. There is no way back.
pub fn follow(seed: u64) {
    SEED.store(word(seed, u64::MAX) | 1, Ordering::SeqCst);
}

/// A word of the sequence of a seed: SplitMix64.
fn word(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Stands in for the C library's function.
///
/// # Safety
/// As `getrandom(2)`: `buffer` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut libc::c_void, length: libc::size_t, flags: libc::c_uint) -> libc::ssize_t {
    let seed = SEED.load(Ordering::Relaxed);
    if seed == 0 {
        // SAFETY: the caller's promise is the one that the system call asks for.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) as libc::ssize_t };
    }
    if length == 0 {
        return 0;
    }
    // SAFETY: the caller promises that there is room for `length` bytes; they are only written.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<std::mem::MaybeUninit<u8>>(), length) };
    for chunk in bytes.chunks_mut(8) {
        let n = DRAWN.get();
        DRAWN.set(n.wrapping_add(1));
        for (byte, drawn) in chunk.iter_mut().zip(word(seed, n).to_le_bytes()) {
            byte.write(drawn);
        }
    }
    length as libc::ssize_t
}
