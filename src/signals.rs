//! What asks this process to stop: signals, and the end of its parent.

use std::io::Read;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// How long a process may take to stop once its parent is gone, unless it needs longer; then it just ends.
pub const ORPHAN_GRACE: Duration = Duration::from_secs(15);

/// Ctrl-C, for those who take it as something else than "stop" while a prompt is open.
#[derive(Debug)]
pub struct Interrupts {
    signal: Signal,
}

impl Interrupts {
    /// From now on SIGINT does not end the process.
    ///
    /// # Errors
    /// The system refuses.
    pub fn listen() -> Result<Self> {
        Ok(Self { signal: listen(SignalKind::interrupt())? })
    }

    /// The next one. Cancel-safe.
    pub async fn next(&mut self) {
        if self.signal.recv().await.is_none() {
            std::future::pending().await
        }
    }

    /// Drops those that came before now.
    pub fn forget(&mut self) {
        let mut context = TaskContext::from_waker(Waker::noop());
        while matches!(self.signal.poll_recv(&mut context), Poll::Ready(Some(()))) {}
    }
}

/// SIGTERM and SIGHUP: stop, whatever is going on.
#[derive(Debug)]
pub struct Termination {
    terminate: Signal,
    hang_up: Signal,
}

/// The number that shells give to a process that a signal ended, for SIGINT and SIGTERM.
pub const EXIT_INTERRUPTED: u8 = 130;
pub const EXIT_TERMINATED: u8 = 143;

impl Termination {
    /// From now on these signals do not end the process.
    ///
    /// # Errors
    /// The system refuses.
    pub fn listen() -> Result<Self> {
        Ok(Self { terminate: listen(SignalKind::terminate())?, hang_up: listen(SignalKind::hangup())? })
    }

    /// The next one. Cancel-safe.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

/// Everything that asks a server to stop.
#[derive(Debug)]
pub struct StopRequests {
    interrupts: Interrupts,
    termination: Termination,
    /// Becomes true at the end of standard input.
    orphaned: watch::Receiver<bool>,
}

impl StopRequests {
    /// Listens from now on. With `exit_with_parent`, the end of standard input is the end of whoever started this
    /// process: it is asked to stop, and ended if it does not within [`ORPHAN_GRACE`].
    ///
    /// # Errors
    /// The system refuses.
    pub fn listen(exit_with_parent: bool) -> Result<Self> {
        Self::listen_within(exit_with_parent.then_some(ORPHAN_GRACE))
    }

    /// The same of a process that may take so long to stop.
    ///
    /// # Errors
    /// As [`Self::listen`].
    pub fn listen_within(orphan_grace: Option<Duration>) -> Result<Self> {
        let (parent_gone, orphaned) = watch::channel(false);
        if let Some(grace) = orphan_grace {
            std::thread::Builder::new()
                .name("parent".to_owned())
                .spawn(move || {
                    await_end_of_input();
                    parent_gone.send_replace(true);
                    std::thread::sleep(grace);
                    tracing::error!("did not stop within {} s of its parent's end", grace.as_secs());
                    std::process::exit(1);
                })
                .context("watching for the end of the parent process")?;
        }
        Ok(Self { interrupts: Interrupts::listen()?, termination: Termination::listen()?, orphaned })
    }

    /// The next request: what asks for it. Cancel-safe.
    pub async fn next(&mut self) -> &'static str {
        let orphaned = async {
            if self.orphaned.wait_for(|gone| *gone).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.interrupts.next() => "an interrupt",
            () = self.termination.next() => "a signal",
            () = orphaned => "the end of its parent",
        }
    }
}

/// Returns when nobody holds the other end of standard input any longer. What is written there is not for us.
fn await_end_of_input() {
    let mut ignored = [0; 512];
    let mut input = std::io::stdin().lock();
    loop {
        match input.read(&mut ignored) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).with_context(|| format!("listening for signal {}", kind.as_raw_value()))
}
