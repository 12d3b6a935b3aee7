//! Makes the system's clocks, as a simulation's thread reads them, go with the simulation.
//!
//! Peers and clients read `lake_client::clock`; libraries below them do not. h2 forgets a stream that was reset after a
//! second of the monotonic clock, and answers a frame that comes later, so that a busy machine would change what is sent;
//! hyper writes the date into headers. All of them reach the clocks through the C library's `clock_gettime`.
//!
//! Other than `getrandom` ([`super::chance`]) that is no function to be defined by the program: servers read clocks all the
//! time, and nothing may stand in between there. Instead, the process of a simulation replaces the function's address where the
//! dynamic linker has put it for the program, in the part of its memory that is read-only since (`PT_GNU_RELRO`). Code outside
//! the program's own file is not reached: the C library itself, which reads no clock for a simulation.
//!
//! What it relies on: Linux, and a program that is linked dynamically with all its symbols bound at its start, as Rust does by
//! default. Where that is not so, [`follow`] says so, and there is no simulation.
//!
//! The clocks stand still within a step of the simulation. Threads that are no simulation's read the system's.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What the monotonic clocks show when a simulation begins.
const MONOTONIC: Duration = Duration::from_secs(1_000_000);

thread_local! {
    /// On a simulation's thread: what the wall clock shows when the simulation begins, and how long that is ago.
    static NOW: Cell<Option<(Duration, Duration)>> = const { Cell::new(None) };
}

/// The C library's function.
static SYSTEMS: AtomicUsize = AtomicUsize::new(0);

type ClockGettime = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> libc::c_int;

/// From now on the clocks that this thread reads show what [`set`] says. There is no way back.
///
/// # Errors
/// The program is not linked in the way that this needs.
pub fn follow(epoch: Duration) -> Result<(), String> {
    if std::env::var("LAKE_HAND").is_ok_and(|hand| hand == "real-clock") {
        return Ok(());
    }
    replace().map_err(|e| format!("replacing the clocks by the simulation's: {e}"))?;
    NOW.set(Some((epoch, Duration::ZERO)));
    let before = Instant::now();
    set(Duration::from_secs(1));
    let passed = before.elapsed();
    set(Duration::ZERO);
    if passed != Duration::from_secs(1) {
        return Err("replacing the clocks by the simulation's: they do not go with it".to_owned());
    }
    Ok(())
}

/// How long the simulation on this thread has been going on. Without [`follow`] nothing happens.
pub fn set(elapsed: Duration) {
    NOW.set(NOW.get().map(|(epoch, _)| (epoch, elapsed)));
}

/// Stands in for the C library's function.
unsafe extern "C" fn simulated(clock: libc::clockid_t, at: *mut libc::timespec) -> libc::c_int {
    // A thread that is ending has no such cell any more, and is no simulation's.
    let Some((epoch, elapsed)) = NOW.try_with(Cell::get).ok().flatten() else {
        let systems = SYSTEMS.load(Ordering::Relaxed);
        // SAFETY: it was stored before this function's address was put anywhere, and is the C library's function, which is
        // called as this one was.
        return unsafe { std::mem::transmute::<usize, ClockGettime>(systems)(clock, at) };
    };
    let shown = match clock {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE | libc::CLOCK_TAI => epoch + elapsed,
        _ => MONOTONIC + elapsed,
    };
    let shown =
        libc::timespec { tv_sec: shown.as_secs() as libc::time_t, tv_nsec: libc::c_long::from(shown.subsec_nanos()) };
    // SAFETY: the caller promises room for a timespec, as `clock_gettime(2)` asks for.
    unsafe { at.write(shown) };
    0
}

/// The program's own part of the memory, in whole pages, that the dynamic linker made read-only once it had filled it in.
fn filled_in() -> Option<(usize, usize)> {
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: libc::size_t, found: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the C library hands in a filled-in description, whose program headers are so many; `found` is the one of
        // the call below.
        let (info, found) = unsafe { (&*info, &mut *found.cast::<Option<(usize, usize)>>()) };
        // SAFETY: as above.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let relro = headers.iter().find(|header| header.p_type == libc::PT_GNU_RELRO);
        *found = relro.map(|header| {
            // SAFETY: it takes no address.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
            let from = info.dlpi_addr as usize + header.p_vaddr as usize;
            // As the dynamic linker does: a page that is only in part of it stays writable.
            (from / page * page, (from + header.p_memsz as usize) / page * page)
        });
        // The first one is the program.
        1
    }
    let mut found: Option<(usize, usize)> = None;
    // SAFETY: `look` is given `found`, which outlives the call, and nothing else uses it meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast()) };
    found.filter(|(from, to)| from < to)
}

fn replace() -> Result<(), String> {
    let systems = libc::clock_gettime as ClockGettime as usize;
    if SYSTEMS.swap(systems, Ordering::SeqCst) != 0 {
        return Err("they were before".to_owned());
    }
    let (from, to) = filled_in().ok_or("the program has no memory that its linker filled in")?;
    let protect = |protection| {
        // SAFETY: whole pages of the program's own memory, which nobody else changes the protection of.
        let done = unsafe { libc::mprotect(from as *mut libc::c_void, to - from, protection) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().to_string()) }
    };
    protect(libc::PROT_READ | libc::PROT_WRITE)?;
    let mut replaced = 0;
    for word in (from..to).step_by(size_of::<usize>()) {
        let word = word as *mut usize;
        // SAFETY: aligned, and in pages that are readable and writable. That nobody reads them at the same time cannot be had:
        // another thread's call finds the one address or the other, and both are functions that do what it asks for.
        unsafe {
            if word.read_volatile() == systems {
                word.write_volatile(simulated as ClockGettime as usize);
                replaced += 1;
            }
        }
    }
    protect(libc::PROT_READ)?;
    if replaced == 0 { Err("the program does not call the C library's function".to_owned()) } else { Ok(()) }
}
