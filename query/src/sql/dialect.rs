//! The SQL that is parsed: the parser's general dialect, with operators that bind as they do in PostgreSQL.
//!
//! As the parser has it, `IS [NOT] DISTINCT FROM` takes for its right side all that follows, ANDs and ORs as well: a condition would
//! mean another one, without a word. LIKE binds weaker than `=` there, IN and BETWEEN no stronger, `||` as `*` does, and `->` and its
//! kind weaker than comparisons.
//!
//! Bitwise operators stay as they are: `&` binds stronger than `^` (exclusive or), `<<` and `>>`, and those stronger than `|`.

use std::any::TypeId;

use datafusion::sql::sqlparser::ast::Expr;
use datafusion::sql::sqlparser::dialect::{Dialect, GenericDialect, Precedence};
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::Token;

/// How strongly `||` binds: less than `+`, more than what compares.
const CONCATENATES: u8 = 25;
/// Most operators in a row, each on what is left of it, that IS DISTINCT FROM takes on its left without parentheses: the parser has
/// them copied.
const MOST_ON_THE_LEFT: usize = 200;

/// The dialect of lake.
#[derive(Debug)]
pub struct LakeDialect;

/// What the general dialect answers, asked of it: all that it does not leave at the default.
macro_rules! as_in_general {
    ($($question:ident)*) => {
        $(fn $question(&self) -> bool {
            GenericDialect.$question()
        })*
    };
}

impl Dialect for LakeDialect {
    // To the parser it is the general one.
    fn dialect(&self) -> TypeId {
        TypeId::of::<GenericDialect>()
    }

    fn is_delimited_identifier_start(&self, ch: char) -> bool {
        GenericDialect.is_delimited_identifier_start(ch)
    }

    fn is_identifier_start(&self, ch: char) -> bool {
        GenericDialect.is_identifier_start(ch)
    }

    fn is_identifier_part(&self, ch: char) -> bool {
        GenericDialect.is_identifier_part(ch)
    }

    fn prec_value(&self, prec: Precedence) -> u8 {
        match prec {
            Precedence::Like => GenericDialect.prec_value(Precedence::Between),
            Precedence::Eq => GenericDialect.prec_value(Precedence::Like),
            other => GenericDialect.prec_value(other),
        }
    }

    fn get_next_precedence(&self, parser: &Parser) -> Option<Result<u8, ParserError>> {
        match &parser.peek_token_ref().token {
            Token::StringConcat => Some(Ok(CONCATENATES)),
            Token::Tilde
            | Token::TildeAsterisk
            | Token::ExclamationMarkTilde
            | Token::ExclamationMarkTildeAsterisk
            | Token::DoubleTilde
            | Token::DoubleTildeAsterisk
            | Token::ExclamationMarkDoubleTilde
            | Token::ExclamationMarkDoubleTildeAsterisk
            | Token::Arrow
            | Token::LongArrow
            | Token::HashArrow
            | Token::HashLongArrow
            | Token::AtArrow
            | Token::ArrowAt
            | Token::HashMinus
            | Token::AtQuestion
            | Token::AtAt => Some(Ok(self.prec_value(Precedence::Pipe))),
            _ => None,
        }
    }

    fn parse_infix(&self, parser: &mut Parser, left: &Expr, precedence: u8) -> Option<Result<Expr, ParserError>> {
        let is_not = match parser.parse_keywords(&[Keyword::IS, Keyword::DISTINCT, Keyword::FROM]) {
            true => false,
            false => match parser.parse_keywords(&[Keyword::IS, Keyword::NOT, Keyword::DISTINCT, Keyword::FROM]) {
                true => true,
                false => return None,
            },
        };
        if std::iter::successors(Some(left), |expr| on_the_left(expr)).nth(MOST_ON_THE_LEFT).is_some() {
            let words = "Too many operators before IS DISTINCT FROM: put some in parentheses, or use a subquery";
            return Some(Err(ParserError::ParserError(words.to_owned())));
        }
        Some(parser.parse_subexpr(precedence).map(|right| {
            let (left, right) = (Box::new(left.clone()), Box::new(right));
            match is_not {
                true => Expr::IsNotDistinctFrom(left, right),
                false => Expr::IsDistinctFrom(left, right),
            }
        }))
    }

    as_in_general! {
        supports_unicode_string_literal supports_partition_by_after_order_by supports_array_join_syntax supports_group_by_expr
        supports_group_by_with_modifier supports_left_associative_joins_without_parens supports_connect_by supports_match_recognize
        supports_pipe_operator supports_start_transaction_modifier supports_window_function_null_treatment_arg
        supports_dictionary_syntax supports_window_clause_named_window_reference supports_parenthesized_set_variables
        supports_select_wildcard_except support_map_literal_syntax allow_extract_custom allow_extract_single_quotes
        supports_extract_comma_syntax supports_create_view_comment_syntax supports_parens_around_table_factor
        supports_values_as_table_factor supports_create_index_with_clause supports_explain_with_utility_options supports_limit_comma
        supports_update_order_by supports_from_first_select supports_projection_trailing_commas
        supports_asc_desc_in_column_definition supports_try_convert supports_bitwise_shift_operators supports_comment_on
        supports_load_extension supports_named_fn_args_with_assignment_operator supports_struct_literal supports_empty_projections
        supports_nested_comments supports_multiline_comment_hints supports_user_host_grantee supports_string_escape_constant
        supports_array_typedef_with_brackets supports_match_against supports_set_names supports_comma_separated_set_assignments
        supports_filter_during_aggregation supports_select_wildcard_exclude supports_data_type_signed_suffix
        supports_interval_options supports_quote_delimited_string supports_select_wildcard_replace supports_select_wildcard_ilike
        supports_select_wildcard_rename supports_optimize_table supports_install supports_detach supports_prewhere supports_with_fill
        supports_limit_by supports_interpolate supports_settings supports_select_format supports_comment_optimizer_hint
        supports_constraint_keyword_without_name supports_key_column_option supports_comma_separated_trim supports_cte_without_as
        supports_select_item_multi_column_alias supports_xml_expressions
    }
}

/// What an operator that stands behind, or between, has on its left.
fn on_the_left(expr: &Expr) -> Option<&Expr> {
    match expr {
        Expr::BinaryOp { left, .. } | Expr::AnyOp { left, .. } | Expr::AllOp { left, .. } => Some(left),
        Expr::IsDistinctFrom(left, _) | Expr::IsNotDistinctFrom(left, _) => Some(left),
        Expr::IsNull(of)
        | Expr::IsNotNull(of)
        | Expr::IsTrue(of)
        | Expr::IsNotTrue(of)
        | Expr::IsFalse(of)
        | Expr::IsNotFalse(of)
        | Expr::IsUnknown(of)
        | Expr::IsNotUnknown(of) => Some(of),
        Expr::Like { expr, .. }
        | Expr::ILike { expr, .. }
        | Expr::SimilarTo { expr, .. }
        | Expr::RLike { expr, .. }
        | Expr::Between { expr, .. }
        | Expr::InList { expr, .. }
        | Expr::InSubquery { expr, .. }
        | Expr::InUnnest { expr, .. }
        | Expr::IsNormalized { expr, .. }
        | Expr::Cast { expr, .. }
        | Expr::UnaryOp { expr, .. } => Some(expr),
        Expr::AtTimeZone { timestamp, .. } => Some(timestamp),
        Expr::JsonAccess { value, .. } => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use datafusion::sql::sqlparser::ast::{Value, visit_expressions_mut};

    use super::*;

    fn parsed(dialect: &dyn Dialect, sql: &str) -> Result<Expr, ParserError> {
        let mut parser = Parser::new(dialect).try_with_sql(sql)?;
        let expr = parser.parse_expr()?;
        parser.expect_token(&Token::EOF)?;
        Ok(expr)
    }

    #[test]
    fn operators_bind_as_with_these_parentheses() {
        for (sql, means) in [
            ("a IS DISTINCT FROM b AND c", "(a IS DISTINCT FROM b) AND c"),
            ("a IS NOT DISTINCT FROM b OR c AND d", "(a IS NOT DISTINCT FROM b) OR (c AND d)"),
            ("NOT a IS DISTINCT FROM b AND c", "(NOT (a IS DISTINCT FROM b)) AND c"),
            ("x OR a IS DISTINCT FROM b AND c OR d", "(x OR ((a IS DISTINCT FROM b) AND c)) OR d"),
            ("a + 1 IS DISTINCT FROM b + 1 AND c", "((a + 1) IS DISTINCT FROM (b + 1)) AND c"),
            ("a IS DISTINCT FROM b = c AND d", "(a IS DISTINCT FROM (b = c)) AND d"),
            ("a = b IS DISTINCT FROM c", "(a = b) IS DISTINCT FROM c"),
            ("a IS DISTINCT FROM NULL IS NULL", "(a IS DISTINCT FROM NULL) IS NULL"),
            ("a LIKE b = c", "(a LIKE b) = c"),
            ("a = b LIKE c || d", "a = (b LIKE (c || d))"),
            ("a = b IN (1)", "a = (b IN (1))"),
            ("a <> b NOT BETWEEN c AND d", "a <> (b NOT BETWEEN c AND d)"),
            ("a BETWEEN b AND c = d", "(a BETWEEN b AND c) = d"),
            ("a BETWEEN b AND c AND d", "(a BETWEEN b AND c) AND d"),
            ("a || b + c || d", "(a || (b + c)) || d"),
            ("a = b || c", "a = (b || c)"),
            ("a = b ~ c", "a = (b ~ c)"),
            ("a -> b = c", "(a -> b) = c"),
            ("a @> b IS NULL AND c", "((a @> b) IS NULL) AND c"),
            ("NOT a = b IS NULL", "NOT ((a = b) IS NULL)"),
            ("- a::INT * b", "(- (a::INT)) * b"),
            ("a + b AT TIME ZONE c", "a + (b AT TIME ZONE c)"),
            ("a | b & c", "a | (b & c)"),
        ] {
            let unnested = |sql: &str| {
                let mut expr = parsed(&LakeDialect, sql).unwrap();
                let _ = visit_expressions_mut(&mut expr, |expr| {
                    if let Expr::Nested(inner) = expr {
                        *expr = std::mem::replace(inner.as_mut(), Expr::value(Value::Null));
                    }
                    ControlFlow::<()>::Continue(())
                });
                expr
            };
            assert_eq!(unnested(sql), unnested(means), "{sql}");
        }
    }

    #[test]
    fn all_else_is_parsed_as_by_the_general_dialect() {
        for sql in [
            "EXTRACT('year' FROM a)",
            "U&'\\0041' || E'a\\n' || Q'[x]'",
            "{'a': 1}",
            "MAP {'a': 1}",
            "STRUCT(1 AS a)",
            "TRIM(a, 'x')",
            "a << 1 >> 2",
            "TRY_CONVERT(INT, a)",
            "f(a => 1, b := 2)",
            "sum(a) FILTER (WHERE b)",
            "first_value(a IGNORE NULLS) OVER (w)",
            "(SELECT * EXCEPT (a), * EXCLUDE b FROM t)",
            "(FROM t)",
            "(SELECT a, FROM t LIMIT 1, 2)",
            "(SELECT a FROM t |> WHERE a > 1)",
            "`a b`.c#d",
            "a /* b /* c */ */",
            "(SELECT 1 FROM (VALUES (1)) AS v GROUP BY GROUPING SETS ((a), ()))",
        ] {
            assert_eq!(parsed(&LakeDialect, sql), parsed(&GenericDialect, sql), "{sql}");
        }
    }

    #[test]
    fn a_left_side_is_bounded() {
        let chain = |operators: usize| format!("a{} IS DISTINCT FROM b", " + a".repeat(operators));
        assert!(parsed(&LakeDialect, &chain(MOST_ON_THE_LEFT - 1)).is_ok());
        assert!(parsed(&LakeDialect, &chain(MOST_ON_THE_LEFT)).unwrap_err().to_string().contains("parentheses"));
        let many = " IS DISTINCT FROM b".repeat(MOST_ON_THE_LEFT + 2);
        assert!(parsed(&LakeDialect, &format!("a{many}")).is_err());
    }
}
