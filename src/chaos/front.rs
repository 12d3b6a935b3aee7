//! The client that fault runs speak SQL with: the shell's.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use async_trait::async_trait;
use futures::TryStreamExt;
use lake_chaos::sql::{Answer, Failure, Front, Session, Statement, Value, What};
use lake_client::secret::Secret;
use lake_query::client::{SqlClient, SqlError};
use lake_query::error::Kind;
use lake_query::sql::session::Settings;

/// Flight SQL, as lake's own client speaks it, to nodes that may have a secret.
pub fn front(secret: Option<Secret>) -> Option<Arc<dyn Front>> {
    Some(Arc::new(FlightSql(secret)))
}

#[derive(Debug)]
struct FlightSql(Option<Secret>);

#[async_trait]
impl Front for FlightSql {
    async fn connect(&self, endpoint: &str) -> Result<Box<dyn Session>, Failure> {
        let client = SqlClient::connect(&[endpoint.to_owned()], self.0.as_ref()).await.map_err(failure)?;
        Ok(Box::new(FlightSession(client)))
    }
}

#[derive(Debug)]
struct FlightSession(SqlClient);

#[async_trait]
impl Session for FlightSession {
    async fn run(&mut self, statement: &Statement) -> Result<Answer, Failure> {
        // As SET lake.operation_id would, without a way to the node of its own.
        self.0.resume(Settings { operation: statement.operation.clone(), ..self.0.settings() });
        let rows = self.0.execute(&statement.sql, Some(statement.timeout)).await.map_err(failure)?;
        let stale = rows.stale;
        let batches: Vec<RecordBatch> = rows.try_collect().await.map_err(failure)?;
        let mut all: Vec<Vec<Value>> = Vec::new();
        for batch in &batches {
            let columns = batch.columns().iter().map(values).collect::<Result<Vec<_>, _>>()?;
            let row = |row: usize| columns.iter().map(|column: &Vec<Value>| column[row].clone()).collect::<Vec<_>>();
            all.extend((0..batch.num_rows()).map(row));
        }
        Ok(Answer { rows: all, stale })
    }

    fn transaction(&self) -> Option<String> {
        self.0.settings().transaction
    }

    fn set_transaction(&mut self, handle: Option<String>) {
        self.0.resume(Settings { transaction: handle, ..self.0.settings() });
    }
}

/// A column's values: texts, or whatever else as whole numbers.
fn values(column: &ArrayRef) -> Result<Vec<Value>, Failure> {
    let is_text = matches!(column.data_type(), DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let wanted = if is_text { DataType::Utf8 } else { DataType::Int64 };
    let column = cast(column, &wanted).map_err(|e| Failure {
        what: What::Unknown,
        kind: "unreadable".to_owned(),
        message: format!("reading a column of type {}: {e}", column.data_type()),
    })?;
    let value = |row: usize| match (column.is_null(row), is_text) {
        (true, _) => Value::Null,
        (false, true) => Value::Text(column.as_string::<i32>().value(row).to_owned()),
        (false, false) => Value::Int(column.as_primitive::<Int64Type>().value(row)),
    };
    Ok((0..column.len()).map(value).collect())
}

/// What an error says of the change that it ended.
fn failure(error: SqlError) -> Failure {
    let what = match error.kind {
        // Without the secret nothing is run.
        _ if error.code == tonic::Code::Unauthenticated => What::Refused,
        Kind::Conflict => What::Conflict,
        Kind::Invalid | Kind::NotSupported | Kind::NotFound | Kind::AlreadyExists | Kind::Denied => What::Refused,
        Kind::Unavailable | Kind::Deadline | Kind::Exhausted | Kind::Corrupt | Kind::Storage => What::NotServed,
        Kind::Unknown | Kind::Cancelled | Kind::Internal => What::Unknown,
    };
    Failure { what, kind: error.kind.as_str().to_owned(), message: error.message }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, StringViewArray};

    use super::*;

    #[test]
    fn values_are_numbers_or_texts() {
        let numbers: ArrayRef = Arc::new(Int32Array::from(vec![Some(3), None]));
        assert_eq!(values(&numbers).unwrap(), [Value::Int(3), Value::Null]);
        let texts: ArrayRef = Arc::new(StringViewArray::from(vec![Some("chaos 7"), None]));
        assert_eq!(values(&texts).unwrap(), [Value::Text("chaos 7".to_owned()), Value::Null]);
    }

    #[test]
    fn an_error_says_whether_anything_was_committed() {
        let said = |kind| {
            let message = "no".to_owned();
            failure(SqlError { message, position: None, code: tonic::Code::Unknown, kind }).what
        };
        assert_eq!(said(Kind::Conflict), What::Conflict);
        assert_eq!(said(Kind::Unavailable), What::NotServed);
        assert_eq!(said(Kind::NotFound), What::Refused);
        assert_eq!(said(Kind::Unknown), What::Unknown);
        let (message, code) = ("no".to_owned(), tonic::Code::Unauthenticated);
        assert_eq!(failure(SqlError { message, position: None, code, kind: Kind::Internal }).what, What::Refused);
    }
}
