//! The line editor, on a thread of its own, because it blocks.
//!
//! The thread waits for a question, edits one line, answers, and waits again; so nothing is read from the terminal
//! while a statement runs. It ends when its owner is dropped; one that still waits for a key ends with the process,
//! which then gives the terminal back as it was ([`TerminalGuard`]).

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Event, EventContext, EventHandler, ExternalPrinter, KeyEvent,
    RepeatCount,
};

use super::complete::{Completion, Names};
use crate::console::Console;

/// Lines kept in the history file.
const MAX_HISTORY: usize = 1_000;

/// What came of a prompt.
#[derive(Debug)]
pub enum Line {
    Text(String),
    /// Ctrl-C, and whether anything had been typed.
    Interrupted {
        typed: bool,
    },
    /// Ctrl-D, or the terminal is gone.
    End,
    Failed(String),
}

enum Request {
    Line { prompt: String },
    Remember(String),
}

/// The editor.
pub struct Editor {
    requests: mpsc::Sender<Request>,
    lines: tokio::sync::mpsc::Receiver<Line>,
    console: Console,
    /// The cursor is in a line that is being edited.
    editing: bool,
    _terminal: TerminalGuard,
}

impl Editor {
    /// Starts the editor on standard input, which is a terminal.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn start(console: &Console, names: Names) -> Result<Self> {
        let terminal = TerminalGuard::take()?;
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)
            .and_then(|c| c.history_ignore_dups(true))
            .context("configuring the line editor")?
            .history_ignore_space(true)
            .completion_type(CompletionType::List)
            .build();
        let mut editor =
            rustyline::Editor::<Completion, DefaultHistory>::with_config(config).context("opening the terminal")?;
        editor.set_helper(Some(Completion { names }));
        let typed = Arc::new(AtomicBool::new(false));
        let look = EventHandler::Conditional(Box::new(LookAtLine { typed: typed.clone() }));
        editor.bind_sequence(KeyEvent::ctrl('C'), look);
        let history = history_file();
        if let Some(path) = &history {
            // The first start has no history yet.
            let _ = editor.load_history(path);
        }
        if let Ok(mut printer) = editor.create_external_printer() {
            console.send_to(move |text| {
                // A line that cannot be printed is in the log as well.
                let _ = printer.print(format!("{text}\n"));
            });
        }
        let (requests, received) = mpsc::channel();
        let (answers, lines) = tokio::sync::mpsc::channel(1);
        std::thread::Builder::new()
            .name("line-editor".to_owned())
            .spawn(move || {
                while let Ok(request) = received.recv() {
                    match request {
                        Request::Line { prompt } => {
                            let line = match editor.readline(&prompt) {
                                Ok(line) => Line::Text(line),
                                Err(ReadlineError::Interrupted) => {
                                    Line::Interrupted { typed: typed.load(Ordering::Relaxed) }
                                }
                                Err(ReadlineError::Eof) => Line::End,
                                Err(e) => Line::Failed(e.to_string()),
                            };
                            if answers.blocking_send(line).is_err() {
                                return;
                            }
                        }
                        Request::Remember(entry) => remember(&mut editor, history.as_deref(), &entry),
                    }
                }
            })
            .context("starting the line editor")?;
        Ok(Self { requests, lines, console: console.clone(), editing: false, _terminal: terminal })
    }

    /// Lets the user edit a line.
    pub async fn line(&mut self, prompt: &str) -> Line {
        if self.requests.send(Request::Line { prompt: prompt.to_owned() }).is_err() {
            return Line::End;
        }
        self.editing = true;
        let line = self.lines.recv().await.unwrap_or(Line::End);
        self.editing = false;
        line
    }

    /// Puts what was typed into the history.
    pub fn remember(&self, entry: String) {
        // Without its thread there is no prompt to remember it for.
        let _ = self.requests.send(Request::Remember(entry));
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        self.console.send_to_stderr();
        if self.editing {
            eprintln!();
        }
    }
}

/// Notes whether the line was empty when Ctrl-C was pressed, which the editor's error does not say.
struct LookAtLine {
    typed: Arc<AtomicBool>,
}

impl ConditionalEventHandler for LookAtLine {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        self.typed.store(!context.line().is_empty(), Ordering::Relaxed);
        Some(Cmd::Interrupt)
    }
}

fn remember(editor: &mut rustyline::Editor<Completion, DefaultHistory>, file: Option<&std::path::Path>, entry: &str) {
    if entry.trim().is_empty() {
        return;
    }
    // A history that cannot be kept is no reason to stop.
    let added = editor.add_history_entry(entry);
    if let (Ok(true), Some(path)) = (added, file) {
        let _ = editor.append_history(path);
    }
}

/// `$XDG_STATE_HOME/lake/history`, or the same under `~/.local/state`. `None` where there is no such place.
fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    let dir = state.join("lake");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("history"))
}

/// Gives the terminal back as it was, also if the editor is in the middle of a line when the process ends.
struct TerminalGuard {
    before: Termios,
}

impl TerminalGuard {
    fn take() -> Result<Self> {
        let before = tcgetattr(io::stdin()).context("asking for the terminal's settings")?;
        Ok(Self { before })
    }
}

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        // If it fails the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}
