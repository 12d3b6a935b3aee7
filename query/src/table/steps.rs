//! Where a test may have the process killed, so that a crash is tried between each two steps and not only where chance
//! puts it: `LAKE_QUERY_DIE_AT` names a file, and a process that comes to the step named in it kills itself.

use std::path::PathBuf;
use std::sync::OnceLock;

/// The variable.
const VARIABLE: &str = "LAKE_QUERY_DIE_AT";

/// This step has been reached. Without the variable nothing happens.
pub fn reached(step: &str) {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(file) = FILE.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from)) else { return };
    if std::fs::read_to_string(file).is_ok_and(|named| named.trim() == step) {
        let me = rustix::process::getpid();
        // Where that is refused, the test waits in vain and says so.
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    }
}
