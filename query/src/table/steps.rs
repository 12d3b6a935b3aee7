//! Where a test may have the process killed, so that a crash is tried between each two steps and not only where chance
//! puts it: `LAKE_QUERY_DIE_AT` names a file, and a process that comes to the step named in it kills itself. Only a build with the feature
//! `failpoints` does, which lake's tests ask for, and no package has.

/// This step has been reached.
#[cfg(not(feature = "failpoints"))]
pub const fn reached(_: &str) {}

/// This step has been reached. Without the variable nothing happens.
#[cfg(feature = "failpoints")]
pub fn reached(step: &str) {
    static FILE: std::sync::OnceLock<Option<std::path::PathBuf>> = std::sync::OnceLock::new();
    let Some(file) = FILE.get_or_init(|| std::env::var_os("LAKE_QUERY_DIE_AT").map(Into::into)) else { return };
    if std::fs::read_to_string(file).is_ok_and(|named| named.trim() == step) {
        let me = rustix::process::getpid();
        // Where that is refused, the test waits in vain and says so.
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    }
}
