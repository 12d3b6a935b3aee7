//! Every fuzz target of metasrv ([`lake_metasrv::fuzzing`]) in one binary, because linking is most of what each would cost.
//!
//! - `LAKE_FUZZ_TARGET=command fuzz CORPUS...` fuzzes that one;
//! - `LAKE_FUZZ_SEEDS=DIR fuzz` writes what to begin with, a directory for each target, and ends.

#![no_main]

mod seeds;

use std::path::Path;
use std::sync::OnceLock;

use lake_metasrv::fuzzing::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn begin() {
    if let Some(dir) = std::env::var_os("LAKE_FUZZ_SEEDS") {
        write_seeds(Path::new(&dir)).expect("writing the seeds");
        std::process::exit(0);
    }
    let wanted = std::env::var("LAKE_FUZZ_TARGET").unwrap_or_default();
    let Some(target) = TARGETS.into_iter().find(|(name, _)| *name == wanted) else {
        let names = TARGETS.map(|(name, _)| name).join(", ");
        eprintln!("LAKE_FUZZ_TARGET={wanted}: there is no such target; there are {names}");
        std::process::exit(2);
    };
    CHOSEN.get_or_init(|| target);
}

fn write_seeds(dir: &Path) -> std::io::Result<()> {
    for (name, target) in TARGETS {
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir)?;
        for (n, input) in seeds::of(name).iter().enumerate() {
            assert!(target(input), "{name}: a valid input is not understood");
            std::fs::write(dir.join(format!("seed-{n}")), input)?;
        }
    }
    Ok(())
}

fuzz_target!(
    init: begin(),
    |input: &[u8]| {
        if let Some((_, target)) = CHOSEN.get() {
            target(input);
        }
    }
);
