//! Where messages for the user go while something else has the terminal: below a progress bar, above a prompt.

use std::fmt;
use std::io::{self, IsTerminal};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

type Sink = Box<dyn FnMut(&str) + Send>;

/// Lines for the user, on standard error unless something else has it.
#[derive(Clone)]
pub struct Console {
    sink: Arc<Mutex<Sink>>,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

impl Default for Console {
    fn default() -> Self {
        Self { sink: Arc::new(Mutex::new(Box::new(to_stderr))) }
    }
}

impl Console {
    /// Says something.
    pub fn say(&self, text: impl AsRef<str>) {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        sink(text.as_ref());
    }

    /// From now on lines go here.
    pub fn send_to(&self, sink: impl FnMut(&str) + Send + 'static) {
        *self.sink.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(sink);
    }

    /// From now on lines go to standard error again.
    pub fn send_to_stderr(&self) {
        self.send_to(to_stderr);
    }

    /// Shows what is being done until dropped: with a spinner on a terminal, as plain lines elsewhere.
    pub fn progress(&self) -> Progress {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            let below = bar.clone();
            self.send_to(move |text| below.println(text));
            bar
        });
        Progress { console: self.clone(), bar }
    }
}

fn to_stderr(text: &str) {
    eprintln!("{text}");
}

/// What is being done.
#[derive(Debug)]
pub struct Progress {
    console: Console,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// It has been going on for so long already.
    pub fn since(&self, already: Duration) {
        if let Some(bar) = &self.bar {
            // The same bar: what is shown is shared.
            drop(bar.clone().with_elapsed(already));
        }
    }

    /// The step that begins.
    pub fn step(&self, text: impl Into<String>) {
        match &self.bar {
            Some(bar) => bar.set_message(text.into()),
            None => self.console.say(text.into()),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            self.console.send_to_stderr();
            bar.finish_and_clear();
        }
    }
}
