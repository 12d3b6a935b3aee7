//! The part of planning that computes: from a statement whose tables are known to its plan.
//!
//! It is done at once, on the threads that plans are executed by ([`super::computing`]): the optimiser evaluates whatever is constant. It
//! asks the metadata nothing, but where a statement reads a listing of what there is.
//!
//! How large a plan may be is limited: views are in it wherever they are named, so that few words can make a plan without end (the text's
//! own limits: [`super::statement`]).

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::tree_node::{TreeNodeRecursion, TreeNodeVisitor};
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::execution::context::SQLOptions;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{LogicalPlan, LogicalPlanBuilder, PlanType, ToStringifiedPlan, WriteOp, ident, lit};
use datafusion::sql::parser::Statement as ParsedStatement;
use datafusion::sql::sqlparser::ast::Statement;

use super::catalog::{self, Found};
use super::ddl::{self, Ddl};
use super::faults::Faults;
use super::statement::{self, Action, Command};
use super::{Work, dml, files, headings, procedures, values, views};
use crate::distributed::{Distributed, Mode};
use crate::error::{Error, Result};
use crate::words;

/// Most operators of a plan.
const MAX_OPERATORS: usize = 10_000;
/// Most operators above each other.
const MAX_DEPTH: usize = 1_000;

/// A statement, and what it takes to plan it.
pub(super) struct Part {
    /// The session of its own.
    pub state: SessionState,
    pub parsed: ParsedStatement,
    pub action: Action,
    /// What its names mean.
    pub found: Found,
    pub faults: Arc<Faults>,
    pub sql: String,
    /// How many parameters have no values.
    pub unbound: usize,
    /// How its client asks for it to be spread.
    pub asked: Option<Mode>,
    pub distributed: Option<Arc<Distributed>>,
}

/// What has come of it.
pub(super) struct Done {
    pub schema: SchemaRef,
    pub parameters: Vec<Field>,
    pub state: SessionState,
    pub work: Work,
    pub spread: Option<Box<(Mode, LogicalPlan)>>,
}

impl Part {
    /// # Errors
    /// Those of planning, in words of the statement.
    pub async fn plan(self) -> Result<Done> {
        let Part { state, parsed, action, found, faults, sql, unbound, asked, distributed } = self;
        let (mut schema, mut parameters) = (count_schema(action.command()), Vec::new());
        let mut spread = None;
        let work = match action {
            Action::Alter(_) => {
                let ddl = ddl::plan_alter(&state, &parsed).await;
                Work::Ddl(Box::new(ddl.map_err(|e| found.explain(e))?))
            }
            Action::AlterLayout(alter) => Work::Ddl(Box::new(ddl::plan_layout(*alter).map_err(|e| found.explain(e))?)),
            Action::Schema(statement) => Work::Ddl(Box::new(Ddl::Schema(*statement))),
            Action::UndropTable(ident) => Work::Ddl(Box::new(Ddl::UndropTable(ident))),
            Action::View(statement) => {
                let plan = match statement.has_query() {
                    true => Some(state.statement_to_plan(parsed).await.map_err(|e| found.explain(e.into()))?),
                    false => None,
                };
                if let Some(plan) = &plan {
                    check_size(plan)?;
                }
                let change = views::plan(*statement, plan.as_ref().map(|plan| (plan, &found.views)))?;
                Work::Ddl(Box::new(Ddl::View(Box::new(change))))
            }
            Action::Call => {
                let nothing = || Error::internal("CALL of nothing");
                let ParsedStatement::Statement(statement) = &parsed else { return Err(nothing()) };
                let Statement::Call(call) = statement.as_ref() else { return Err(nothing()) };
                Work::Call(Box::new(procedures::plan(&state, call).await?))
            }
            action => {
                let parsed = match &action {
                    Action::CopyFrom(copy) => {
                        let columns = found.columns(copy.source()).await?;
                        statement::parse(&state, &copy.insert(Some(&columns)))?.0
                    }
                    _ => parsed,
                };
                let mut comments = Vec::new();
                if let ParsedStatement::Statement(statement) = &parsed
                    && let Statement::ExplainTable { table_name, .. } = statement.as_ref()
                {
                    comments = found.comments(table_name).await;
                }
                let plan = match headings::plan(&state, parsed).await {
                    Ok(plan) => plan,
                    Err(error) => {
                        let error = found.explain(error.into());
                        return Err(match words::is_of_width(&error.message) {
                            true => found.widths(&state, &sql, error).await,
                            false => faults.explain(error),
                        });
                    }
                };
                check_size(&plan)?;
                let plan = values::without_ids(plan)?;
                if unbound > 0 {
                    parameters = parameter_fields(&plan, unbound)?;
                }
                match action {
                    Action::Query => {
                        check_reads_only(&plan)?;
                        let mut plan = described(explained(plan)?, comments)?;
                        spread = distributed.and_then(|distributed| spread_as(&distributed, asked, &plan));
                        if unbound == 0 {
                            plan = state.optimize(&plan).map_err(|e| faults.explain(e.into()))?;
                        }
                        schema = Arc::new(plan.schema().as_arrow().clone());
                        Work::Query(Box::new(plan))
                    }
                    Action::CopyTo { overwrite } => Work::CopyTo { plan: Box::new(plan), overwrite },
                    Action::ChangeRows(_) | Action::CopyFrom(_) => {
                        check_dml(&plan)?;
                        let LogicalPlan::Dml(dml) = plan else {
                            return Err(Error::internal("a change without a target"));
                        };
                        Work::ChangeRows(Box::new(dml))
                    }
                    action => {
                        let defaults = ddl::defaults(&state, &action).await.map_err(|e| found.explain(e))?;
                        let state = (unbound == 0).then_some(&state);
                        let ddl = ddl::plan(plan, &action, defaults, state);
                        Work::Ddl(Box::new(ddl.map_err(|e| faults.explain(found.explain(e)))?))
                    }
                }
            }
        };
        Ok(Done { schema, parameters, state, work, spread })
    }
}

/// How a query is to be spread, if it may be.
fn spread_as(distributed: &Distributed, asked: Option<Mode>, plan: &LogicalPlan) -> Option<Box<(Mode, LogicalPlan)>> {
    let mode = distributed.policy().mode(asked);
    (mode != Mode::Off && distributed.peers().may_be_some()).then(|| Box::new((mode, plan.clone())))
}

/// # Errors
/// `Invalid`: a plan is too large.
pub(super) fn check_size(plan: &LogicalPlan) -> Result<()> {
    let mut size = Size::default();
    plan.visit_with_subqueries(&mut size)?;
    match size.operators > MAX_OPERATORS || size.deepest > MAX_DEPTH {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "the statement comes to more than {MAX_OPERATORS} operators, or to more than {MAX_DEPTH} of them above each other, where \
             views count wherever they are named; nothing was done: take it apart, or write a part of it into a table"
        ))),
    }
}

/// How large a plan is, as far as it may be.
#[derive(Default)]
struct Size {
    operators: usize,
    depth: usize,
    deepest: usize,
}

impl<'n> TreeNodeVisitor<'n> for Size {
    type Node = LogicalPlan;

    fn f_down(&mut self, _: &'n LogicalPlan) -> DfResult<TreeNodeRecursion> {
        self.operators += 1;
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        Ok(match self.operators > MAX_OPERATORS || self.depth > MAX_DEPTH {
            true => TreeNodeRecursion::Stop,
            false => TreeNodeRecursion::Continue,
        })
    }

    fn f_up(&mut self, _: &'n LogicalPlan) -> DfResult<TreeNodeRecursion> {
        self.depth -= 1;
        Ok(TreeNodeRecursion::Continue)
    }
}

/// EXPLAIN of a statement that changes rows shows how they are found.
fn explained(plan: LogicalPlan) -> Result<LogicalPlan> {
    match plan {
        LogicalPlan::Explain(mut explain) => {
            if let LogicalPlan::Dml(dml) = explain.plan.as_ref()
                && dml::changes_rows(dml)
            {
                let plan = dml::explain(dml)?;
                explain.stringified_plans = vec![plan.to_stringified(PlanType::InitialLogicalPlan)];
                explain.plan = Arc::new(plan);
            }
            Ok(LogicalPlan::Explain(explain))
        }
        plan => Ok(plan),
    }
}

/// The one-row answer to a change.
pub(super) fn count_schema(command: Command) -> SchemaRef {
    let metadata = [(Command::METADATA_KEY.to_owned(), command.as_str().to_owned())].into();
    Arc::new(Schema::new(vec![Field::new("count", DataType::Int64, false)]).with_metadata(metadata))
}

/// What the parameters of a plan may be: of type Null where nothing says.
fn parameter_fields(plan: &LogicalPlan, count: usize) -> Result<Vec<Field>> {
    let known = plan.get_parameter_types()?;
    let field = |i: usize| {
        let name = format!("${i}");
        let data_type = known.get(&name).cloned().flatten().unwrap_or(DataType::Null);
        Field::new(name, data_type, true)
    };
    Ok((1..=count).map(field).collect())
}

/// DESCRIBE tells the types that SQL has, and the comments.
fn described(plan: LogicalPlan, comments: Vec<Option<String>>) -> Result<LogicalPlan> {
    let LogicalPlan::DescribeTable(table) = plan else { return Ok(plan) };
    let mut comments = comments.into_iter();
    let rows = table.schema.fields().iter().map(|field| {
        let null = if field.is_nullable() { "YES" } else { "NO" };
        let comment = lit(ScalarValue::Utf8(comments.next().flatten()));
        vec![lit(field.name().as_str()), lit(words::sql_type(field.data_type())), lit(null), comment]
    });
    let named = ["column_name", "data_type", "is_nullable", "comment"].into_iter().enumerate();
    let named = named.map(|(i, name)| ident(format!("column{}", i + 1)).alias(name));
    Ok(LogicalPlanBuilder::values(rows.collect())?.project(named)?.build()?)
}

/// Nothing that begins as a query may turn out to change something.
pub(super) fn check_reads_only(plan: &LogicalPlan) -> Result<()> {
    if matches!(plan, LogicalPlan::Explain(_)) {
        // Shows the plan of what it explains, and runs nothing.
        return Ok(());
    }
    let reads = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    reads.verify_plan(plan).map_err(|_| {
        Error::not_supported(match plan {
            LogicalPlan::Analyze(_) => "EXPLAIN ANALYZE of a statement that changes something is not supported yet",
            _ => "a query that changes something (SELECT INTO, data-modifying WITH) is not supported yet",
        })
    })
}

/// Only rows of tables: DataFusion would also write into a file named in SQL.
fn check_dml(plan: &LogicalPlan) -> Result<()> {
    let LogicalPlan::Dml(dml) = plan else {
        return Err(Error::not_supported("this form of the statement is not supported yet; nothing was done"));
    };
    if dml.op == WriteOp::Insert(InsertOp::Replace) {
        return Err(Error::not_supported(
            "REPLACE INTO is not supported; MERGE INTO says by which columns rows are the same",
        ));
    }
    if files::is_file(&dml.table_name) {
        return Err(Error::not_supported(format!(
            "writing into the file {} is not supported yet",
            dml.table_name.table()
        )));
    }
    catalog::ident(&dml.table_name).map(|_| ())
}
