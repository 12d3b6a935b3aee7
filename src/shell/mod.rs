//! The SQL shell of `lake up`, `lake standalone` and `lake sql`: statements in, results out.
//!
//! Results go to standard output, everything else (errors, notices, counts, times, the prompt's help) to standard
//! error, so that output can be piped. In reading order:
//!
//! - [`statements`]: where a statement ends;
//! - [`command`]: the backslash commands;
//! - [`input`]: lines put together to statements and commands;
//! - [`table`], [`output`]: a result as a table, CSV or JSON; [`telling`]: what is shown until it is there;
//! - [`caret`]: an error under its place in the statement;
//! - [`complete`], [`editor`]: what completes a line, and the line editor, on a thread of its own.

mod caret;
mod command;
mod complete;
mod editor;
mod input;
mod output;
mod statements;
mod table;
mod telling;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lake_client::secret::Secret;
use lake_query::client::{SqlClient, SqlError};
use tokio::io::{AsyncBufReadExt, BufReader};
use uuid::Uuid;

use self::command::Command;
use self::complete::Names;
use self::editor::{Editor, Line};
use self::input::{Input, Item};
use self::telling::Telling;
use crate::console::Console;
use crate::signals::Interrupts;

pub use self::output::Format;

/// Rows printed of a result at the prompt, unless told otherwise.
const DEFAULT_LIMIT: usize = 1_000;
/// Most files that are run one from within the other.
const MAX_INCLUDED: usize = 16;
/// How long reading the names for completion, or a table's properties for `\d`, may take.
const NAMES_WITHIN: Duration = Duration::from_secs(10);
/// How long a connection to a query node may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long rolling back may take at the end.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// What to run, if not a prompt.
#[derive(Debug, Clone, clap::Args)]
pub struct ShellArgs {
    /// Run these statements, print what they return, and exit; the exit code tells whether they succeeded
    #[arg(short = 'c', value_name = "SQL")]
    pub command: Vec<String>,
    /// Run the statements in this file, and exit
    #[arg(short = 'f', value_name = "FILE", conflicts_with = "command")]
    pub file: Option<PathBuf>,
    /// How results are printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

/// How a run of statements ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// All of them succeeded, or the user has quit.
    Well,
    /// One failed; its error has been printed.
    Failed,
    /// The user stopped it.
    Interrupted,
}

/// A connection to the query nodes, and how to print what comes from them.
pub struct Shell {
    endpoints: Vec<String>,
    secret: Option<Secret>,
    client: SqlClient,
    /// The node failed to answer: connect anew, to whichever does, before the next statement.
    reconnect: bool,
    format: Format,
    limit: Option<usize>,
    timing: bool,
    /// Each row is printed as lines.
    expanded: bool,
    /// Files that are being run, one from within the other.
    included: usize,
    /// What the prompt completes, once there is one.
    names: Option<Names>,
}

impl Shell {
    /// Connects to the first of `endpoints` that answers.
    ///
    /// # Errors
    /// None does.
    pub async fn connect(endpoints: Vec<String>, secret: Option<Secret>, format: Format) -> Result<Self> {
        let client = connect(&endpoints, secret.as_ref()).await?;
        Ok(Self {
            endpoints,
            secret,
            client,
            reconnect: false,
            format,
            limit: None,
            timing: true,
            expanded: false,
            included: 0,
            names: None,
        })
    }

    /// Runs what `args` say: statements, a file, what comes from a pipe, or a prompt.
    ///
    /// # Errors
    /// The file or standard input cannot be read, standard output cannot be written. Failed statements are no error here.
    pub async fn run(&mut self, args: &ShellArgs, console: &Console, interrupts: &mut Interrupts) -> Result<Ended> {
        let ended = self.run_all(args, console, interrupts).await;
        self.leave().await;
        ended
    }

    /// Rolls back the transaction that is open at the end: nobody can go on with it.
    async fn leave(&self) {
        if self.client.settings().transaction.is_none() {
            return;
        }
        match self.client.query("ROLLBACK", Some(LEAVE_TIMEOUT)).await {
            Ok(_) => eprintln!("the open transaction was rolled back"),
            Err(e) => eprintln!("the open transaction is rolled back by its node later: {e}"),
        }
    }

    async fn run_all(&mut self, args: &ShellArgs, console: &Console, interrupts: &mut Interrupts) -> Result<Ended> {
        if let Some(path) = &args.file {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            return self.run_text(&text, Some(&path.display().to_string()), interrupts).await;
        }
        if !args.command.is_empty() {
            for text in &args.command {
                match self.run_text(text, None, interrupts).await? {
                    Ended::Well => {}
                    other => return Ok(other),
                }
            }
            return Ok(Ended::Well);
        }
        match io::stdin().is_terminal() {
            true => self.prompt(console, interrupts).await,
            false => self.run_standard_input(interrupts).await,
        }
    }

    /// `file`: where the text is from.
    async fn run_text(&mut self, text: &str, file: Option<&str>, interrupts: &mut Interrupts) -> Result<Ended> {
        let mut input = Input::default();
        for line in text.lines() {
            for item in input.feed(line) {
                match self.run_item(item, file, interrupts).await? {
                    Some(Ended::Well) => return Ok(Ended::Well),
                    Some(other) => return Ok(other),
                    None => {}
                }
            }
        }
        self.run_rest(input, file, interrupts).await
    }

    async fn run_standard_input(&mut self, interrupts: &mut Interrupts) -> Result<Ended> {
        let mut input = Input::default();
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        loop {
            let line = tokio::select! {
                line = lines.next_line() => line.context("reading statements from standard input")?,
                () = interrupts.next() => return Ok(Ended::Interrupted),
            };
            let Some(line) = line else { break };
            for item in input.feed(&line) {
                if let Some(ended) = self.run_item(item, None, interrupts).await? {
                    return Ok(ended);
                }
            }
        }
        self.run_rest(input, None, interrupts).await
    }

    /// The last statement of a text needs no semicolon.
    async fn run_rest(&mut self, input: Input, file: Option<&str>, interrupts: &mut Interrupts) -> Result<Ended> {
        let item = match input.finish() {
            Ok(None) => return Ok(Ended::Well),
            Ok(Some((statement, line))) => Item::Statement(statement, line),
            Err(message) => Item::Wrong(message),
        };
        Ok(self.run_item(item, file, interrupts).await?.unwrap_or(Ended::Well))
    }

    /// Runs one item of a script. `Some` if that was the end of it.
    async fn run_item(&mut self, item: Item, file: Option<&str>, interrupts: &mut Interrupts) -> Result<Option<Ended>> {
        Ok(match item {
            Item::Statement(sql, line) => {
                let origin = file.map(|file| (file, line));
                Some(self.statement(&sql, origin, interrupts).await?).filter(|e| *e != Ended::Well)
            }
            Item::Command(Command::Quit) => Some(Ended::Well),
            Item::Command(command) => Some(self.command(command, interrupts).await?).filter(|e| *e != Ended::Well),
            Item::Wrong(message) => {
                match file {
                    Some(file) => eprintln!("error: {file}: {message}"),
                    None => eprintln!("error: {message}"),
                }
                Some(Ended::Failed)
            }
        })
    }

    async fn prompt(&mut self, console: &Console, interrupts: &mut Interrupts) -> Result<Ended> {
        self.limit = Some(DEFAULT_LIMIT);
        eprintln!("lake {}, at {}. \\? for help, \\q to quit.", env!("CARGO_PKG_VERSION"), self.client.endpoint());
        let names = Names::default();
        let mut editor = Editor::start(console, names.clone())?;
        self.names = Some(names);
        self.learn_names();
        let mut input = Input::default();
        loop {
            let prompt = match (input.is_empty(), self.client.settings().transaction.is_some()) {
                (true, false) => "lake> ",
                (true, true) => "lake*> ",
                (false, _) => "   -> ",
            };
            let line = editor.line(prompt).await;
            match line {
                Line::Text(line) => {
                    if !input.is_empty() && command::is_word(&line) {
                        eprintln!("{}", command::NOT_ENDED);
                    }
                    let items = input.feed(&line);
                    if input.is_empty() {
                        editor.remember(input.take_history());
                    }
                    for item in items {
                        // What failed was reported; the prompt goes on.
                        match item {
                            Item::Command(Command::Quit) => return Ok(Ended::Well),
                            other => {
                                self.run_item(other, None, interrupts).await?;
                            }
                        }
                    }
                }
                Line::Interrupted { typed: false } if input.is_empty() => return Ok(Ended::Well),
                Line::Interrupted { .. } => input = Input::default(),
                Line::End => return Ok(Ended::Well),
                Line::Failed(why) => bail!("reading from the terminal: {why}"),
            }
        }
    }

    async fn command(&mut self, command: Command, interrupts: &mut Interrupts) -> Result<Ended> {
        match command {
            Command::Tables => self.statement("SHOW TABLES", None, interrupts).await,
            Command::Describe(table) => {
                let ended = self.statement(&format!("DESCRIBE {table}"), None, interrupts).await?;
                if ended == Ended::Well {
                    self.tell_properties(&table).await;
                }
                Ok(ended)
            }
            Command::Schemas => self.statement("SHOW SCHEMAS", None, interrupts).await,
            Command::Include(file) => self.include(&file, interrupts).await,
            Command::Expanded => {
                self.expanded = !self.expanded;
                eprintln!("a row is printed as {}", if self.expanded { "lines" } else { "a line" });
                Ok(Ended::Well)
            }
            Command::Timing => {
                self.timing = !self.timing;
                eprintln!("elapsed times are {}", if self.timing { "shown" } else { "not shown" });
                Ok(Ended::Well)
            }
            Command::Limit(limit) => {
                self.limit = limit;
                match limit {
                    Some(rows) => eprintln!("at most {rows} rows of a result are printed"),
                    None => eprintln!("every row of a result is printed"),
                }
                Ok(Ended::Well)
            }
            Command::Help => {
                eprintln!("{}", command::HELP);
                Ok(Ended::Well)
            }
            Command::Quit => Ok(Ended::Well),
        }
    }

    /// Runs a file from within a prompt or another file.
    async fn include(&mut self, file: &str, interrupts: &mut Interrupts) -> Result<Ended> {
        if self.included >= MAX_INCLUDED {
            eprintln!(
                "error: {file} is not run: {MAX_INCLUDED} files are being run already, one from within the other"
            );
            return Ok(Ended::Failed);
        }
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(e) => {
                eprintln!("error: reading {file}: {e}");
                return Ok(Ended::Failed);
            }
        };
        self.included += 1;
        // Boxed: what runs a file may run another one.
        let ended = Box::pin(self.run_text(&text, Some(file), interrupts)).await;
        self.included -= 1;
        ended
    }

    /// What a table says of itself besides its columns, for people. A view, or a file, says nothing.
    async fn tell_properties(&self, table: &str) {
        // An error would abort a transaction, and for programs it would be a second result.
        if self.format != Format::Table || self.client.settings().transaction.is_some() {
            return;
        }
        let sql = format!("SHOW TBLPROPERTIES {table}");
        if let Ok(batches) = self.client.query(&sql, Some(NAMES_WITHIN)).await {
            let lines = output::pairs(&batches).into_iter().map(|(property, value)| format!("{property}: {value}\n"));
            // Whoever reads no further has seen enough.
            let _ = io::stdout().write_all(lines.collect::<String>().as_bytes());
        }
    }

    /// `origin`: the file that it is in, and the line that it begins in.
    async fn statement(
        &mut self,
        sql: &str,
        origin: Option<(&str, u64)>,
        interrupts: &mut Interrupts,
    ) -> Result<Ended> {
        if self.reconnect {
            match connect(&self.endpoints, self.secret.as_ref()).await {
                Ok(client) => {
                    client.resume(self.client.settings());
                    (self.client, self.reconnect) = (client, false);
                }
                Err(e) => {
                    eprintln!("error: {e:#}");
                    return Ok(Ended::Failed);
                }
            }
        }
        let started = Instant::now();
        // A Ctrl-C from before is not meant for this statement.
        interrupts.forget();
        let ran = tokio::select! {
            ran = self.execute(sql, started) => ran,
            () = interrupts.next() => {
                eprintln!("the statement was cancelled; if it changes something, look whether it did");
                return Ok(Ended::Interrupted);
            }
        };
        match ran {
            Ok(()) => Ok(Ended::Well),
            Err(output::Failure::Sql(e)) => {
                self.reconnect = e.code == tonic::Code::Unavailable || e.kind == lake_query::Kind::Unknown;
                eprintln!("{}", caret::render(&e.message, sql, e.position.map(|p| (p.line, p.column)), origin));
                Ok(Ended::Failed)
            }
            // Whoever read the output has seen enough.
            Err(output::Failure::Output(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(Ended::Interrupted),
            Err(output::Failure::Output(e)) => Err(e).context("writing to standard output"),
            Err(output::Failure::Show(e)) => {
                eprintln!("error: {e:#}");
                Ok(Ended::Failed)
            }
        }
    }

    /// Has the names of tables read in the background, for completion; beside the session, which this is no part of.
    fn learn_names(&self) {
        let Some(names) = self.names.clone() else { return };
        let (endpoint, secret) = ([self.client.endpoint().to_owned()], self.secret.clone());
        // It ends by itself, soon; without names only keywords are completed.
        tokio::spawn(async move {
            let sql =
                format!("SELECT table_schema, table_name FROM information_schema.tables LIMIT {}", complete::MAX_NAMES);
            let Ok(client) = SqlClient::connect(&endpoint, secret.as_ref()).await else { return };
            if let Ok(batches) = client.query(&sql, Some(NAMES_WITHIN)).await {
                names.set(&output::pairs(&batches));
            }
        });
    }

    async fn execute(&self, sql: &str, started: Instant) -> Result<(), output::Failure> {
        let mut telling = Telling::since(started);
        let id = Uuid::new_v4();
        let answer = self.client.execute_as(id, sql, None);
        let rows = telling.until_answered(answer, async || self.client.so_far(id).await).await?;
        let is_change = rows.command.is_some();
        for notice in &rows.notices {
            telling.end();
            eprintln!("note: {notice}");
        }
        let mut out = io::stdout();
        let summary = output::print(rows, self.format, self.limit, self.expanded, &mut out, &mut telling).await?;
        out.flush()?;
        telling.end();
        eprintln!("{}", summary.describe(self.timing.then(|| started.elapsed())));
        if is_change {
            self.learn_names();
        }
        Ok(())
    }
}

async fn connect(endpoints: &[String], secret: Option<&Secret>) -> Result<SqlClient> {
    let connecting = SqlClient::connect(endpoints, secret);
    let connected: Result<SqlClient, SqlError> = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected,
        Err(_) => bail!("no query node answers at {} within {} s", endpoints.join(", "), CONNECT_TIMEOUT.as_secs()),
    };
    Ok(connected?)
}
