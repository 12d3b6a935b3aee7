//! A short run of what `metasrv/fuzz/` runs for long: every decoder on mutated inputs and on random
//! bytes. The number of cases is fixed, `LAKE_TEST_SEED` repeats a run, `LAKE_MUTATIONS` makes it longer.
//!
//! Besides what [`lake_metasrv::fuzzing`] checks, memory is watched: no length in the input may make a decoder take more
//! than its input explains.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lake_metasrv::fuzzing::TARGETS;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::seeds;

/// The largest buffer that a length alone may cause: a snapshot's largest record.
const MAX_UNEXPLAINED_BYTES: usize = 4 << 20;
/// Bytes of memory that a byte of input may cost: a few bytes on the wire can stand for an empty operation.
const MAX_EXPANSION: usize = 2_000;

struct Counting;

thread_local! {
    static HELD: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

// SAFETY: everything is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = HELD.try_with(|held| {
            let (now, peak) = held.get();
            let now = now.wrapping_add(layout.size());
            held.set((now, peak.max(now)));
        });
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _ = HELD.try_with(|held| {
            let (now, peak) = held.get();
            held.set((now.saturating_sub(layout.size()), peak));
        });
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How much more memory `work` held at its height than before.
fn height(work: impl FnOnce() -> bool) -> (bool, usize) {
    let (before, _) = HELD.get();
    HELD.set((before, before));
    let result = work();
    (result, HELD.get().1 - before)
}

#[test]
fn decoders_come_back_whatever_they_are_given() {
    let seed: u64 = std::env::var("LAKE_TEST_SEED").map_or_else(|_| rand::random(), |s| s.parse().unwrap());
    let cases = std::env::var("LAKE_MUTATIONS").map_or(4_000, |n| n.parse().unwrap());
    println!("LAKE_TEST_SEED={seed}");
    for (name, target) in TARGETS {
        let mut rng = StdRng::seed_from_u64(seed);
        let corpus = seeds::of(name);
        for input in &corpus {
            assert!(target(input), "{name}: a valid input is not understood");
        }
        let mut understood = 0;
        for case in 0..cases {
            let input = if rng.random_ratio(1, 10) {
                (0..rng.random_range(0..300)).map(|_| rng.random()).collect()
            } else {
                mutated(&corpus, &mut rng)
            };
            let (meant_something, bytes) = height(|| {
                std::panic::catch_unwind(|| target(&input)).unwrap_or_else(|_| {
                    panic!("{name}, case {case} of seed {seed}: a panic; the input is {input:02x?}")
                })
            });
            understood += usize::from(meant_something);
            assert!(
                bytes <= MAX_UNEXPLAINED_BYTES + input.len() * MAX_EXPANSION,
                "{name}, case {case} of seed {seed}: {bytes} bytes of memory for an input of {}",
                input.len()
            );
        }
        println!("{name}: {understood} of {cases} inputs meant something");
        // Inputs that are all turned away at the door would show nothing.
        if name != "snapshot" {
            assert!(understood >= cases / 100, "{name}: only {understood} of {cases} inputs meant something");
        }
    }
}

fn mutated(corpus: &[Vec<u8>], rng: &mut StdRng) -> Vec<u8> {
    let mut input = corpus[rng.random_range(0..corpus.len())].clone();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..=input.len());
        match rng.random_range(0..8) {
            0 => input.truncate(at),
            1 => input.insert(at, rng.random()),
            2 => {
                // A part of another.
                let other = &corpus[rng.random_range(0..corpus.len())];
                let from = rng.random_range(0..=other.len());
                let until = (from + rng.random_range(0..64)).min(other.len());
                input.splice(at..at, other[from..until].iter().copied());
            }
            3 => {
                // A number at its limits, as a varint.
                let number: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
                let keep = rng.random_range(1..=number.len());
                input.splice(at..at, number[number.len() - keep..].iter().copied());
            }
            4 if at < input.len() => drop(input.remove(at)),
            5 if at + 8 <= input.len() => input[at..at + 8].fill(if rng.random() { 0xff } else { 0 }),
            _ if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
            _ => input.push(rng.random()),
        }
    }
    input
}
