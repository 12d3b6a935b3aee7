//! What a terminal is told of a statement that takes long: for how long it has, how many rows have come or were changed, what its node
//! waits for, and how to stop it.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use lake_query::client::SoFar;

use crate::console::{Console, Progress};

/// How often a change is asked how far it has come.
const ASKED_EVERY: Duration = Duration::from_secs(1);
/// How long nothing comes before it is told.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// See the module. What is shown goes when this is dropped.
#[derive(Debug)]
pub struct Telling {
    started: Instant,
    /// Since when the terminal has seen nothing of it.
    silent: Instant,
    /// Whether there is a terminal to tell.
    terminal: bool,
    /// Whether rows go to the same terminal.
    shared: bool,
    shown: Option<Progress>,
}

impl Telling {
    /// Of a statement that was begun then.
    pub fn since(started: Instant) -> Self {
        let (terminal, shared) = (io::stderr().is_terminal(), io::stdout().is_terminal());
        Self { started, silent: started, terminal, shared, shown: None }
    }

    /// Waits for what comes next, once so many rows have come.
    pub async fn during<T>(&mut self, rows: usize, work: impl Future<Output = T>) -> T {
        self.telling(words(rows, None), work).await
    }

    async fn telling<T>(&mut self, words: String, work: impl Future<Output = T>) -> T {
        if !self.terminal {
            return work.await;
        }
        let mut work = std::pin::pin!(work);
        let left = TOLD_AFTER.saturating_sub(self.silent.elapsed());
        if self.shown.is_none()
            && !left.is_zero()
            && let Ok(done) = tokio::time::timeout(left, &mut work).await
        {
            return done;
        }
        let shown = self.shown.get_or_insert_with(|| {
            let progress = Console::default().progress();
            progress.since(self.started.elapsed());
            progress
        });
        shown.step(words);
        work.await
    }

    /// Waits for a statement's answer, which to a change comes once that is made. `ask`: how far it has come.
    pub async fn until_answered<T>(
        &mut self,
        work: impl Future<Output = T>,
        ask: impl AsyncFn() -> Option<SoFar>,
    ) -> T {
        let mut work = std::pin::pin!(work);
        let (mut rows, mut waits) = (0, None);
        loop {
            let words = words(rows, waits.as_deref());
            if let Ok(done) = self.telling(words, tokio::time::timeout(ASKED_EVERY, &mut work)).await {
                return done;
            }
            // Not before there is anybody to be told.
            if self.shown.is_some() {
                let told = tokio::select! {
                    biased;
                    done = &mut work => return done,
                    told = ask() => told,
                };
                if let Some(told) = told {
                    (rows, waits) = (usize::try_from(told.rows).unwrap_or(usize::MAX), told.waits);
                }
            }
        }
    }

    /// What comes is printed: it takes the place of what is shown, if it goes to the same terminal.
    pub fn make_way(&mut self) {
        if self.shared {
            (self.shown, self.silent) = (None, Instant::now());
        }
    }

    /// Nothing is shown any more.
    pub fn end(&mut self) {
        self.shown = None;
    }
}

fn words(rows: usize, waits: Option<&str>) -> String {
    let rows = match (rows, waits) {
        (0, None) => "running; ".to_owned(),
        (0, Some(_)) => String::new(),
        (rows, _) => format!("{rows} rows so far; "),
    };
    let waits = waits.map(|waits| format!("{waits}; ")).unwrap_or_default();
    format!("{rows}{waits}Ctrl-C stops it")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_change_is_asked_how_far_it_has_come_once_somebody_is_told() {
        let asked = AtomicU64::new(0);
        let ask = async || Some(SoFar { rows: asked.fetch_add(1, Ordering::Relaxed), waits: None });
        let now = Instant::now();
        let mut telling = Telling { started: now, silent: now, terminal: true, shared: false, shown: None };
        telling.until_answered(tokio::time::sleep(TOLD_AFTER / 2), &ask).await;
        assert_eq!(asked.load(Ordering::Relaxed), 0, "it did not take long");
        telling.shown = Some(Console::default().progress());
        telling.until_answered(tokio::time::sleep(ASKED_EVERY * 7 / 2), &ask).await;
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        let mut nobody = Telling { started: now, silent: now, terminal: false, shared: false, shown: None };
        nobody.until_answered(tokio::time::sleep(ASKED_EVERY * 7 / 2), &ask).await;
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn what_is_waited_for_is_told_beside_the_rows() {
        assert_eq!(words(0, None), "running; Ctrl-C stops it");
        assert_eq!(words(7, None), "7 rows so far; Ctrl-C stops it");
        assert_eq!(words(0, Some("nobody answers")), "nobody answers; Ctrl-C stops it");
        assert_eq!(words(7, Some("nobody answers")), "7 rows so far; nobody answers; Ctrl-C stops it");
    }
}
