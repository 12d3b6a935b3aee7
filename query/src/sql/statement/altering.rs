//! Forms of ALTER TABLE that the parser does not know.

use datafusion::common::DataFusionError;
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::helpers::attached_token::AttachedToken;
use datafusion::sql::sqlparser::ast::{
    AlterTable, AlterTableOperation, DataType, Expr, Ident, MySQLColumnPosition, ObjectName, SqlOption, Statement,
    Value,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::{Token, TokenWithSpan, Tokenizer, Word};

use super::normalize;
use crate::error::{Error, Result};
use crate::sql::columns::SEPARATOR;
use crate::sql::dialect::LakeDialect;

/// `ALTER TABLE t UNSET TBLPROPERTIES ('a')`, which the parser does not know, as `SET TBLPROPERTIES ('a' = NULL)`.
pub(super) fn unset_properties(sql: &str) -> Option<Parsed> {
    let mut parser = Parser::new(&GenericDialect {}).try_with_sql(sql).ok()?;
    if !parser.parse_keywords(&[Keyword::ALTER, Keyword::TABLE]) {
        return None;
    }
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false).ok()?;
    if !parser.parse_keywords(&[Keyword::UNSET, Keyword::TBLPROPERTIES]) {
        return None;
    }
    let silent = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let keys = parser.parse_parenthesized(|parser| parser.parse_comma_separated(Parser::parse_literal_string)).ok()?;
    let _ = parser.consume_token(&Token::SemiColon);
    if parser.peek_token().token != Token::EOF {
        return None;
    }
    let value = Expr::value(match silent {
        true => Value::Boolean(false),
        false => Value::Null,
    });
    let unset =
        |key| SqlOption::KeyValue { key: Ident::with_quote('\'', key), value: Expr::Nested(Box::new(value.clone())) };
    let operation = AlterTableOperation::SetTblProperties { table_properties: keys.into_iter().map(unset).collect() };
    Some(alter_table(name, if_exists, vec![operation]))
}

/// `ALTER TABLE t ALTER COLUMN a FIRST`, or `AFTER b`, which the parser does not know, as `MODIFY COLUMN a FIRST` without a type.
pub(super) fn move_column(sql: &str) -> Option<Parsed> {
    let mut parser = Parser::new(&GenericDialect {}).try_with_sql(sql).ok()?;
    if !parser.parse_keywords(&[Keyword::ALTER, Keyword::TABLE]) {
        return None;
    }
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false).ok()?;
    if !parser.parse_keyword(Keyword::ALTER) {
        return None;
    }
    let _ = parser.parse_keyword(Keyword::COLUMN);
    let path = parser.parse_object_name(false).ok()?;
    let position = match parser.parse_one_of_keywords(&[Keyword::FIRST, Keyword::AFTER])? {
        Keyword::FIRST => MySQLColumnPosition::First,
        _ => MySQLColumnPosition::After(parser.parse_identifier().ok()?),
    };
    let _ = parser.consume_token(&Token::SemiColon);
    if parser.peek_token().token != Token::EOF {
        return None;
    }
    let parts: Vec<&Ident> = path.0.iter().map(|part| part.as_ident()).collect::<Option<_>>()?;
    let names: Vec<String> = parts.iter().map(|part| normalize(part)).collect();
    let mut col_name = Ident::with_quote('"', names.join(&SEPARATOR.to_string()));
    col_name.span = parts.first()?.span.union(&parts.last()?.span);
    let operation = AlterTableOperation::ModifyColumn {
        col_name,
        data_type: DataType::Unspecified,
        options: Vec::new(),
        column_position: Some(position),
    };
    Some(alter_table(name, if_exists, vec![operation]))
}

/// ALTER TABLE of parts of columns (`a.b`), for which the parser expects one name: they become one, with [`SEPARATOR`] in it.
pub(super) fn alter_parts(sql: &str) -> Result<Option<Parsed>> {
    // What is no SQL at all the parser tells best.
    let Ok(tokens) = Tokenizer::new(&GenericDialect {}, sql).tokenize_with_location() else { return Ok(None) };
    let mut tokens: Vec<TokenWithSpan> =
        tokens.into_iter().filter(|token| !matches!(token.token, Token::Whitespace(_))).collect();
    let is = |tokens: &[TokenWithSpan], i: usize, keywords: &[Keyword]| matches!(tokens.get(i).map(|t| &t.token), Some(Token::Word(w)) if w.quote_style.is_none() && keywords.contains(&w.keyword));
    if !is(&tokens, 0, &[Keyword::ALTER]) || !is(&tokens, 1, &[Keyword::TABLE]) {
        return Ok(None);
    }
    let mut found = false;
    let mut i = 2;
    while i < tokens.len() {
        let begins = is(&tokens, i, &[Keyword::ADD, Keyword::DROP, Keyword::ALTER, Keyword::RENAME]);
        i += 1;
        // A table may be called like that.
        if !begins || tokens[i - 2].token == Token::Period || tokens.get(i).is_some_and(|t| t.token == Token::Period) {
            continue;
        }
        while is(&tokens, i, &[Keyword::COLUMN, Keyword::IF, Keyword::NOT, Keyword::EXISTS]) {
            i += 1;
        }
        let (mut names, mut end) = (Vec::new(), i);
        while let Some(Token::Word(word)) = tokens.get(end).map(|token| &token.token) {
            names.push(match word.quote_style {
                Some(_) => word.value.clone(),
                None => word.value.to_lowercase(),
            });
            end += 1;
            match tokens.get(end).map(|token| &token.token) {
                Some(Token::Period) => end += 1,
                _ => break,
            }
        }
        if names.len() > 1 {
            let value = names.join(&SEPARATOR.to_string());
            let path = Token::Word(Word { value, quote_style: Some('"'), keyword: Keyword::NoKeyword });
            let span = tokens[i].span.union(&tokens[end - 1].span);
            tokens.splice(i..end, [TokenWithSpan { token: path, span }]);
            found = true;
        }
    }
    if !found {
        return Ok(None);
    }
    let wrong = |e| Error::from(DataFusionError::SQL(Box::new(e), None));
    let mut parser = Parser::new(&LakeDialect).with_tokens_with_locations(tokens);
    let statement = parser.parse_statement().map_err(wrong)?;
    let _ = parser.consume_token(&Token::SemiColon);
    parser.expect_token(&Token::EOF).map_err(wrong)?;
    Ok(Some(Parsed::Statement(Box::new(statement))))
}

pub(super) fn alter_table(name: ObjectName, if_exists: bool, operations: Vec<AlterTableOperation>) -> Parsed {
    Parsed::Statement(Box::new(Statement::AlterTable(AlterTable {
        name,
        if_exists,
        only: false,
        operations,
        location: None,
        on_cluster: None,
        table_type: None,
        end_token: AttachedToken::empty(),
    })))
}
