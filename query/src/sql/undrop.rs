//! `UNDROP TABLE t`: a table that was dropped with PURGE is there again, while none of its files were deleted.

use datafusion::common::DataFusionError;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::Token;
use lake_client::catalog::TableIdent;

use super::catalog::ident;
use super::clauses::begins_with;
use super::ddl::table_reference;
use crate::error::{Error, Position, Result};

/// The table that is to be there again; `None` if the text is another statement.
///
/// # Errors
/// `Invalid`, with its place.
pub fn take(sql: &str) -> Result<Option<TableIdent>> {
    if !begins_with(sql, &["UNDROP"]) {
        return Ok(None);
    }
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(sql) else { return Ok(None) };
    parser.next_token();
    let at = parser.peek_token().span.start;
    let name = (|| -> Result<_, ParserError> {
        parser.expect_keyword(Keyword::TABLE)?;
        let name = parser.parse_object_name(false)?;
        let _ = parser.consume_token(&Token::SemiColon);
        parser.expect_token(&Token::EOF)?;
        Ok(name)
    })();
    let place = Some(Position { line: at.line, column: at.column });
    let name = name.map_err(|e| Error::from(DataFusionError::SQL(Box::new(e), None)).at(place))?;
    let table = table_reference(&name).and_then(|name| ident(&name));
    table.map(Some).map_err(|e| e.at(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_named() {
        let taken = |sql| take(sql).map(|table| table.map(|table| table.to_string()));
        assert_eq!(taken("UNDROP TABLE s.t;"), Ok(Some("s.t".to_owned())));
        assert_eq!(taken("undrop table \"T\""), Ok(Some("default.T".to_owned())));
        assert_eq!(taken("DROP TABLE t"), Ok(None));
        for wrong in ["UNDROP t", "UNDROP TABLE", "UNDROP TABLE a, b", "UNDROP TABLE a.b.c.d"] {
            assert!(take(wrong).is_err(), "{wrong}");
        }
    }
}
