//! Statements of a client that has a session: settings, operation ids and transactions.
//!
//! A node keeps no sessions. What one consists of ([`Settings`]) is the client's: it sends them with each statement, and takes
//! those that the answer brings. So a session lives on at another node, but for an open transaction, whose node its handle
//! names.
//!
//! ```text
//! BEGIN, COMMIT, ROLLBACK, SET    -> other settings
//! with a transaction              -> on its tables ([`super::transactions`])
//! a change with an operation id   -> once ([`super::once`])
//! INSERT, serialisable            -> a transaction of its own
//! anything else                   -> by itself
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, SchemaRef};
use datafusion::sql::sqlparser::ast::{
    Expr, Set, Statement, TransactionAccessMode, TransactionIsolationLevel, TransactionMode, Value,
};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::bound::Bound;
use super::statement::{Action, Command, normalize, refused};
use super::transactions::{End, Handle, MAX_STATEMENTS, Open, Transactions};
use super::{Engine, Planned, once};
use crate::distributed::{Mode, Policy};
use crate::error::{Error, Result};
use crate::table::Tables;
use crate::table::conflict::Isolation;
use crate::table::pins::Pins;
use crate::table::scope::{Once, Scope};

/// The setting with the operation id of what comes next.
const OPERATION_ID: &str = "lake.operation_id";
/// The setting with the isolation of INSERT, and of transactions that do not say it.
const ISOLATION: &str = "lake.isolation";
/// The setting that says whether queries are spread over several nodes.
const DISTRIBUTED: &str = "lake.distributed";

/// What a client's statements are run with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The handle of the open transaction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<String>,
    /// The operation id of the next change, or of the next transaction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// Whether INSERT, and transactions that do not say otherwise, are serialisable.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub serializable: bool,
    /// Whether queries are spread over several nodes, if it is not for the node to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distributed: Option<Mode>,
    /// Whether the client keeps what the answer brings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
}

impl Settings {
    /// Under which key the schema of an answer brings the settings that follow.
    pub const METADATA_KEY: &'static str = "lake.settings";

    fn handle(&self) -> Result<Option<Handle>> {
        self.transaction.as_deref().map(str::parse).transpose()
    }

    fn isolation(&self) -> Isolation {
        match self.serializable {
            true => Isolation::Serializable,
            false => Isolation::Snapshot,
        }
    }
}

/// A statement about the session itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionChange {
    Begin(Option<Isolation>),
    End(End),
    /// `None`: the next change has none.
    SetOperation(Option<String>),
    SetIsolation(Isolation),
    /// `None`: as the node is configured.
    SetDistributed(Option<Mode>),
}

impl SessionChange {
    pub fn command(&self) -> Command {
        match self {
            SessionChange::Begin(_) => Command::Begin,
            SessionChange::End(End::Commit) => Command::Commit,
            SessionChange::End(End::RollBack) => Command::Rollback,
            SessionChange::SetOperation(_) | SessionChange::SetIsolation(_) | SessionChange::SetDistributed(_) => {
                Command::Set
            }
        }
    }
}

/// What BEGIN, COMMIT, ROLLBACK and SET ask for; `None` for other statements.
///
/// # Errors
/// `NotSupported` for forms that lake does not have, `Invalid` for values that cannot be set.
pub fn parse(statement: &Statement) -> Result<Option<SessionChange>> {
    Ok(Some(match statement {
        Statement::StartTransaction { modes, modifier: None, statements, exception: None, .. }
            if statements.is_empty() =>
        {
            SessionChange::Begin(isolation_of(modes)?)
        }
        Statement::Commit { chain: false, modifier: None, .. } => SessionChange::End(End::Commit),
        Statement::Rollback { chain: false, savepoint: None } => SessionChange::End(End::RollBack),
        Statement::StartTransaction { .. } => return Err(refused("this form of BEGIN")),
        Statement::Commit { .. } => return Err(refused("this form of COMMIT")),
        Statement::Rollback { .. } => return Err(refused("ROLLBACK to a savepoint, or with AND CHAIN,")),
        Statement::Set(Set::SingleAssignment { scope: None, hivevar: false, variable, values }) => {
            let name: Vec<String> = variable.0.iter().filter_map(|part| part.as_ident().map(normalize)).collect();
            let name = name.join(".");
            let value = match values.as_slice() {
                [value] => value,
                _ => return Err(Error::invalid(format!("SET {name} takes one value"))),
            };
            set(&name, value)?
        }
        Statement::Set(_) => return Err(refused("this form of SET")),
        _ => return Ok(None),
    }))
}

fn set(name: &str, value: &Expr) -> Result<SessionChange> {
    if ![OPERATION_ID, ISOLATION, DISTRIBUTED].contains(&name) {
        return Err(Error::invalid(format!(
            "there is no setting {name}; there are {OPERATION_ID}, {ISOLATION} and {DISTRIBUTED}; nothing was done"
        )));
    }
    let text = match value {
        Expr::Value(value) => match &value.value {
            Value::SingleQuotedString(text) => Some(text.clone()),
            Value::Null => None,
            _ => return Err(Error::invalid(format!("SET {name} takes a text in single quotes, or DEFAULT"))),
        },
        Expr::Identifier(word) => match normalize(word).as_str() {
            "default" => None,
            word => Some(word.to_owned()),
        },
        _ => return Err(Error::invalid(format!("SET {name} takes a text in single quotes, or DEFAULT"))),
    };
    if name == OPERATION_ID {
        text.as_deref().map(once::check_id).transpose()?;
        return Ok(SessionChange::SetOperation(text));
    }
    if name == DISTRIBUTED {
        let mode = text.map(|text| text.to_ascii_lowercase().parse::<Mode>()).transpose();
        let mode = mode.map_err(|e| Error::invalid(format!("{DISTRIBUTED} is {e}")))?;
        return Ok(SessionChange::SetDistributed(mode));
    }
    match text.as_deref().map(str::to_ascii_lowercase).as_deref() {
        None | Some("snapshot") => Ok(SessionChange::SetIsolation(Isolation::Snapshot)),
        Some("serializable") => Ok(SessionChange::SetIsolation(Isolation::Serializable)),
        Some(other) => Err(Error::invalid(format!("{ISOLATION} is snapshot or serializable, not {other:?}"))),
    }
}

/// Weaker levels than snapshot are given as snapshot.
fn isolation_of(modes: &[TransactionMode]) -> Result<Option<Isolation>> {
    let mut isolation = None;
    for mode in modes {
        match mode {
            TransactionMode::IsolationLevel(TransactionIsolationLevel::Serializable) => {
                isolation = Some(Isolation::Serializable);
            }
            TransactionMode::IsolationLevel(_) => isolation = Some(Isolation::Snapshot),
            TransactionMode::AccessMode(TransactionAccessMode::ReadWrite) => {}
            TransactionMode::AccessMode(TransactionAccessMode::ReadOnly) => return Err(refused("BEGIN READ ONLY")),
        }
    }
    Ok(isolation)
}

/// Rows as they come.
pub type Rows = BoxStream<'static, Result<RecordBatch>>;

/// What a statement would return.
#[derive(Debug, Clone)]
pub struct Described {
    pub schema: SchemaRef,
    /// The age of the oldest pointer used because the metadata cluster is away.
    pub stale: Option<Duration>,
    /// What it takes, if its parameters have no values.
    pub parameters: Vec<Field>,
    /// The versions that a query reads, unless it is its transaction's to say.
    pub pins: Option<Arc<Pins>>,
}

/// What a change has come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub count: u64,
    /// What the next statements are run with, if that is other than before.
    pub settings: Option<Settings>,
}

/// Runs the statements of clients with sessions.
#[derive(Debug)]
pub struct Sessions {
    engine: Arc<Engine>,
    transactions: Arc<Transactions>,
}

impl Sessions {
    pub fn new(engine: Arc<Engine>, transactions: Arc<Transactions>) -> Self {
        Self { engine, transactions }
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub fn transactions(&self) -> &Arc<Transactions> {
        &self.transactions
    }

    /// The transaction of these settings, if it belongs to another node.
    ///
    /// # Errors
    /// `Invalid`: it is no transaction at all.
    pub fn elsewhere(&self, settings: &Settings) -> Result<Option<Handle>> {
        let handle = settings.handle()?;
        Ok(handle.filter(|handle| handle.node != self.transactions.node() && !self.transactions.has(handle)))
    }

    /// What kind of statement it is. Inside of a transaction, one that is none aborts it.
    ///
    /// # Errors
    /// Those of parsing.
    pub fn classify(&self, sql: &str, settings: &Settings) -> Result<Action> {
        let action = self.engine.classify(sql);
        if let (Err(error), Some(handle)) = (&action, settings.handle()?) {
            self.transactions.fail(&handle, error);
        }
        action
    }

    /// What a statement would return. Nothing is changed.
    ///
    /// # Errors
    /// Those of planning.
    pub async fn describe(&self, bound: &Bound, settings: &Settings, timeout: Option<Duration>) -> Result<Described> {
        let action = self.classify(&bound.sql, settings)?;
        if let Action::Session(change) = action {
            let schema = super::planning::count_schema(change.command());
            return Ok(Described { schema, stale: None, parameters: Vec::new(), pins: None });
        }
        let is_change = action.is_change();
        let (planned, is_staged) = match settings.handle()? {
            None => (self.engine.plan(bound, timeout).await?, false),
            Some(handle) => {
                let plan = |tables| async move { self.engine.plan_in(bound, timeout, &tables).await };
                (self.transactions.look(&handle, plan).await?, true)
            }
        };
        let Planned { schema, stale, parameters, pins, .. } = planned;
        Ok(Described { schema, stale, parameters, pins: (!is_change && !is_staged).then_some(pins) })
    }

    /// A statement was described, and its client is about to be handed a ticket by this id. What a change of a transaction has come to
    /// must be fetched before COMMIT.
    ///
    /// # Errors
    /// Those of [`Transactions::asked`].
    pub fn asked(&self, id: Uuid, sql: &str, settings: &Settings) -> Result<()> {
        let Some(handle) = settings.handle()? else { return Ok(()) };
        match self.classify(sql, settings)? {
            action if !action.is_change() || matches!(action, Action::Session(_)) => Ok(()),
            _ => self.transactions.asked(&handle, id, sql),
        }
    }

    /// Runs a query. Besides its rows: the age of the oldest pointer used because the metadata cluster is away.
    ///
    /// # Errors
    /// Those of [`Engine::query`]; inside of a transaction they abort it, also those in the stream.
    pub async fn query(
        &self,
        bound: &Bound,
        settings: &Settings,
        timeout: Option<Duration>,
    ) -> Result<(SchemaRef, Rows, Option<Duration>)> {
        let bound = &Bound { distributed: settings.distributed, ..bound.clone() };
        let Some(handle) = settings.handle()? else {
            let tables = self.engine.tables().clone();
            let Some(pins) = bound.pins.clone() else { return self.query_on(&tables, bound, timeout).await };
            let pinned = tables.within(Scope::Pinned(pins.clone()));
            return match self.query_on(&pinned, bound, timeout).await {
                Ok((schema, rows, stale)) => {
                    let rows = rows.or_else(move |error| {
                        let (pins, tables) = (pins.clone(), tables.clone());
                        async move { Err::<RecordBatch, Error>(pins.explain(&tables, error).await) }
                    });
                    Ok((schema, rows.boxed(), stale))
                }
                Err(error) => Err(pins.explain(&tables, error).await),
            };
        };
        let run = |tables| async move {
            let planned = self.engine.plan_in(bound, timeout, &tables).await?;
            self.engine.query(planned).await
        };
        let (schema, rows) = self.transactions.statement(&handle, bound.fingerprint()?, run).await?;
        let transactions = self.transactions.clone();
        let rows = rows.inspect(move |batch| {
            if let Err(error) = batch {
                transactions.fail(&handle, error);
            }
        });
        Ok((schema, rows.boxed(), None))
    }

    async fn query_on(
        &self,
        tables: &Arc<Tables>,
        bound: &Bound,
        timeout: Option<Duration>,
    ) -> Result<(SchemaRef, Rows, Option<Duration>)> {
        let planned = self.engine.plan_in(bound, timeout, tables).await?;
        let stale = planned.stale;
        let (schema, rows) = self.engine.query(planned).await?;
        Ok((schema, rows, stale))
    }

    /// Makes a change, of tables or of the session.
    ///
    /// # Errors
    /// The statement's.
    pub async fn change(&self, bound: &Bound, settings: &Settings, timeout: Option<Duration>) -> Result<Changed> {
        let deadline = self.engine.write_deadline(timeout);
        let action = self.classify(&bound.sql, settings)?;
        let handle = settings.handle()?;
        if bound.is_empty() && !matches!(action, Action::Session(_)) {
            return Ok(Changed { count: 0, settings: None });
        }
        let is_repeated = bound.len() > 1 && !self.engine.parameters_of(&bound.sql)?.1;
        if is_repeated && bound.len() > MAX_STATEMENTS as usize {
            return Err(Error::exhausted(format!(
                "{} rows of values are bound to a statement that is run for each, and at most {MAX_STATEMENTS} are allowed; nothing \
                 was done: load them into a table, and use that in one statement",
                bound.len()
            )));
        }
        // A client's own id, else its ticket's, where the store can keep an outcome with the change.
        let ticket = bound.ticket.filter(|_| self.engine.tables().metadata.capabilities().multi_key);
        let ticket = ticket.map(|id| id.to_string());
        let operation = match (&settings.operation, &ticket) {
            (Some(id), _) => Some((once::DOMAIN, id.as_str())),
            (None, Some(id)) => Some((once::TICKETS, id.as_str())),
            (None, None) => None,
        };
        let count = match (&action, handle) {
            (Action::Session(change), handle) => {
                let next = self.change_session(change, settings, handle, deadline).await?;
                return Ok(Changed { count: 0, settings: Some(next) });
            }
            (_, Some(handle)) => {
                let of = &handle;
                let run = |tables| async move {
                    if !may_be_staged(&action) {
                        let command = action.command().as_str();
                        return Err(Error::not_supported(format!(
                            "{command} inside of a transaction is not supported; nothing was done"
                        )));
                    }
                    let changing = self.transactions.changing(of);
                    let changed = self.change_rows(bound, is_repeated, deadline, &tables).await;
                    changing.ended();
                    changed
                };
                self.transactions.statement(&handle, bound.fingerprint()?, run).await?
            }
            (Action::ChangeRows(Command::Insert) | Action::CopyFrom(_), None) if settings.serializable => {
                self.in_transaction(Isolation::Serializable, bound, operation, deadline).await?
            }
            (action, None) if is_repeated => {
                if !may_be_staged(action) {
                    let command = action.command().as_str();
                    return Err(Error::not_supported(format!(
                        "several rows of values for {command} are not supported; nothing was done"
                    )));
                }
                self.in_transaction(Isolation::Snapshot, bound, operation, deadline).await?
            }
            (_, None) => match operation {
                Some(operation) => once::run(&self.engine, operation, bound, timeout).await?,
                None => {
                    let planned = self.engine.plan(bound, timeout).await?;
                    self.engine.change(planned).await?
                }
            },
        };
        // An operation id is for one change.
        let used = settings.operation.is_some() && settings.transaction.is_none();
        let next = used.then(|| Settings { operation: None, ..settings.clone() });
        Ok(Changed { count, settings: next })
    }

    async fn change_session(
        &self,
        change: &SessionChange,
        settings: &Settings,
        handle: Option<Handle>,
        deadline: Instant,
    ) -> Result<Settings> {
        if !settings.kept {
            let command = change.command().as_str();
            return Err(Error::not_supported(format!(
                "{command} needs a client that keeps a session, as lake's shell does; others begin and end transactions by the calls \
                 of their driver (autocommit off), and name an operation in the header {}; nothing was done",
                crate::flight::OPERATION_HEADER
            )));
        }
        let mut next = settings.clone();
        match (change, handle) {
            (SessionChange::Begin(_), Some(handle)) => {
                let error = Error::invalid("a transaction is open already");
                self.transactions.fail(&handle, &error);
                return Err(error);
            }
            (SessionChange::Begin(isolation), None) => {
                let isolation = isolation.unwrap_or(settings.isolation());
                let handle = self.transactions.begin(isolation, settings.operation.as_deref())?;
                (next.transaction, next.operation) = (Some(handle.to_string()), None);
            }
            (SessionChange::End(_), None) => {
                return Err(Error::invalid("there is no transaction to be ended: BEGIN begins one"));
            }
            (SessionChange::End(end), Some(handle)) => {
                self.transactions.end(&handle, *end, deadline).await?;
                next.transaction = None;
            }
            (SessionChange::SetOperation(_), Some(handle)) => {
                let error = Error::invalid("the operation id of a transaction is set before BEGIN");
                self.transactions.fail(&handle, &error);
                return Err(error);
            }
            (SessionChange::SetOperation(Some(_)), None) if !self.engine.tables().metadata.capabilities().multi_key => {
                return Err(Error::not_supported(
                    "an operation id needs a cluster: the metadata of library mode changes one key at a time, and keeps no outcome \
                     beside a table; nothing was done",
                ));
            }
            (SessionChange::SetOperation(id), None) => next.operation = id.clone(),
            (SessionChange::SetDistributed(Some(Mode::Auto | Mode::On)), _)
                if self.engine.distributed().is_some_and(|distributed| distributed.policy() == Policy::Off) =>
            {
                return Err(Error::denied(format!(
                    "SET {DISTRIBUTED}: this node spreads no query over others; distribute in its configuration allows it; \
                     nothing was done"
                )));
            }
            (SessionChange::SetDistributed(mode), _) => next.distributed = *mode,
            (SessionChange::SetIsolation(isolation), _) => next.serializable = *isolation == Isolation::Serializable,
        }
        Ok(next)
    }

    /// Makes a change on tables as somebody sees them, by the deadline: once, or once for each row of values.
    async fn change_rows(
        &self,
        bound: &Bound,
        is_repeated: bool,
        deadline: Instant,
        tables: &Arc<Tables>,
    ) -> Result<u64> {
        let mut count = 0;
        for row in 0..if is_repeated { bound.len() } else { 1 } {
            let left = deadline.saturating_duration_since(Instant::now());
            if is_repeated && left.is_zero() {
                return Err(Error::deadline(format!(
                    "the statement was run for {row} of {} rows of values when its time was over; nothing was committed",
                    bound.len()
                )));
            }
            let planned = match is_repeated {
                true => self.engine.plan_in(&bound.row(row), Some(left), tables).await?,
                false => self.engine.plan_in(bound, Some(left), tables).await?,
            };
            count += self.engine.change(planned).await?;
        }
        Ok(count)
    }

    /// A change that is a transaction of its own: INSERT that is made only if every table it has read is still as it was, or a
    /// statement with several rows of values.
    async fn in_transaction(
        &self,
        isolation: Isolation,
        bound: &Bound,
        operation: Option<(&'static str, &str)>,
        deadline: Instant,
    ) -> Result<u64> {
        let tables = self.engine.tables();
        let statement = bound.fingerprint()?;
        let is_repeated = bound.len() > 1 && !self.engine.parameters_of(&bound.sql)?.1;
        let operation = match operation {
            None => None,
            Some((domain, id)) => {
                once::check_id(id)?;
                let once = Arc::new(Once::new(domain, id, statement));
                if let Some(first) = once::find(&tables.writer, &once, deadline).await? {
                    return once::answer(&once, &first);
                }
                Some(once)
            }
        };
        let open = Open::new(isolation, operation.clone());
        let inserted = async {
            let count = self.change_rows(bound, is_repeated, deadline, &open.tables(tables)).await?;
            if let Some(operation) = &operation {
                operation.will_answer(count);
            }
            open.commit(tables, statement, deadline).await.map(|()| count)
        };
        match (inserted.await, &operation) {
            (inserted, None) => inserted,
            (inserted, Some(operation)) => once::settle(&tables.writer, operation, inserted, deadline).await,
        }
    }
}

/// What a transaction can hold back until it is committed.
fn may_be_staged(action: &Action) -> bool {
    matches!(action, Action::ChangeRows(_) | Action::CopyFrom(_) | Action::CopyTo { .. })
}

#[cfg(test)]
mod tests {
    use datafusion::sql::sqlparser::dialect::GenericDialect;
    use datafusion::sql::sqlparser::parser::Parser;

    use super::*;
    use crate::error::Kind;

    fn of(sql: &str) -> Result<Option<SessionChange>> {
        parse(&Parser::parse_sql(&GenericDialect {}, sql).unwrap()[0])
    }

    #[test]
    fn statements_about_the_session_are_understood() {
        for (sql, change) in [
            ("BEGIN", SessionChange::Begin(None)),
            ("BEGIN TRANSACTION ISOLATION LEVEL SERIALIZABLE", SessionChange::Begin(Some(Isolation::Serializable))),
            ("START TRANSACTION ISOLATION LEVEL READ COMMITTED", SessionChange::Begin(Some(Isolation::Snapshot))),
            ("COMMIT", SessionChange::End(End::Commit)),
            ("COMMIT WORK", SessionChange::End(End::Commit)),
            ("ROLLBACK", SessionChange::End(End::RollBack)),
            ("SET lake.operation_id = 'order 1'", SessionChange::SetOperation(Some("order 1".into()))),
            ("SET lake.operation_id = DEFAULT", SessionChange::SetOperation(None)),
            ("SET lake.isolation = serializable", SessionChange::SetIsolation(Isolation::Serializable)),
            ("SET LAKE.ISOLATION TO 'snapshot'", SessionChange::SetIsolation(Isolation::Snapshot)),
            ("SET lake.distributed = 'on'", SessionChange::SetDistributed(Some(Mode::On))),
            ("SET lake.distributed = off", SessionChange::SetDistributed(Some(Mode::Off))),
            ("SET lake.distributed = DEFAULT", SessionChange::SetDistributed(None)),
        ] {
            assert_eq!(of(sql), Ok(Some(change)), "{sql}");
        }
        assert_eq!(of("SELECT 1"), Ok(None));
        for (sql, kind) in [
            ("SET lake.operation_id = 'a/b'", Kind::Invalid),
            ("SET lake.isolation = 'dirty'", Kind::Invalid),
            ("SET lake.distributed = 'far'", Kind::Invalid),
            ("SET x = 1", Kind::Invalid),
            ("SET lake.nope = 'x'", Kind::Invalid),
            ("ROLLBACK TO SAVEPOINT a", Kind::NotSupported),
            ("BEGIN READ ONLY", Kind::NotSupported),
        ] {
            assert_eq!(of(sql).unwrap_err().kind, kind, "{sql}");
        }
    }
}
