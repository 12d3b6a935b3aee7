//! A process that stands still does not notice that its supervisor is gone, and would stand there for ever. The kernel has it go on
//! where whoever inherits it is of another session; where it is of the same, as in a container whose first process is a shell, nobody
//! does. So a small process waits beside it for the supervisor's end.

use std::process::Stdio;

use tokio::process::{Child, Command};

/// SIGCONT for `$0` once standard input ends.
const SCRIPT: &str = "cat; kill -CONT $0";

/// Has a child of this process go on when this process ends, however it ends. Whoever drops it has it go on by themselves.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Killed when it is dropped, before its standard input ends.
    _child: Child,
}

impl Guard {
    /// Of the child with this pid.
    ///
    /// # Errors
    /// There is no `sh`, or it cannot be started.
    pub(crate) fn of(pid: u32) -> std::io::Result<Self> {
        let mut shell = Command::new("sh");
        shell.args(["-c", SCRIPT, &pid.to_string()]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Of its own group: a Ctrl-C is not for it.
        Ok(Self { _child: shell.process_group(0).kill_on_drop(true).spawn()? })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::probe;

    async fn await_state(pid: u32, what: &str, is_so: impl Fn(char) -> bool) {
        let state = || async {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|e| e.to_string())?;
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
            if is_so(state) { Ok(()) } else { Err(format!("its state is {state}")) }
        };
        probe::until(what, Duration::from_secs(20), state).await.unwrap();
    }

    #[tokio::test]
    async fn what_stands_still_goes_on_when_its_supervisor_ends() {
        let mut sleeper = Command::new("sleep").arg("1000").kill_on_drop(true).spawn().unwrap();
        let pid = sleeper.id().unwrap();
        let mut guard = Guard::of(pid).unwrap();
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::STOP).unwrap();
        await_state(pid, "sleep to stand still", |state| state == 'T').await;
        // As the kernel closes it at this process's end.
        drop(guard._child.stdin.take());
        await_state(pid, "sleep to go on", |state| state != 'T').await;
        sleeper.kill().await.unwrap();
    }
}
