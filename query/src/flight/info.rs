//! What the server says of itself: GetSqlInfo and GetXdbcTypeInfo.

use std::collections::BTreeMap;

use arrow_flight::sql::metadata::{
    SqlInfoData, SqlInfoDataBuilder, XdbcTypeInfo, XdbcTypeInfoData, XdbcTypeInfoDataBuilder,
};
use arrow_flight::sql::{
    Nullable, Searchable, SqlInfo, SqlNullOrdering, SqlSupportedCaseSensitivity, SqlTransactionIsolationLevel,
    XdbcDataType, XdbcDatetimeSubcode,
};

use crate::error::{Error, Result};
use crate::sql::MAX_STATEMENT_BYTES;

/// What the server can do.
///
/// # Errors
/// `Internal`: it cannot be written.
pub fn sql_info() -> Result<SqlInfoData> {
    let mut info = SqlInfoDataBuilder::new();
    info.append(SqlInfo::FlightSqlServerName, "lake");
    info.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
    info.append(SqlInfo::FlightSqlServerArrowVersion, "1.3");
    info.append(SqlInfo::FlightSqlServerReadOnly, false);
    info.append(SqlInfo::FlightSqlServerSql, true);
    info.append(SqlInfo::FlightSqlServerSubstrait, false);
    // Transactions, without savepoints.
    info.append(SqlInfo::FlightSqlServerTransaction, 1i32);
    info.append(SqlInfo::FlightSqlServerCancel, true);
    info.append(SqlInfo::FlightSqlServerBulkIngestion, true);
    // For who names the transaction in the command, or keeps cookies ([`super::cookies`]).
    info.append(SqlInfo::FlightSqlServerIngestTransactionsSupported, true);
    info.append(SqlInfo::SqlIdentifierCase, SqlSupportedCaseSensitivity::SqlCaseSensitivityLowercase as i32);
    info.append(
        SqlInfo::SqlQuotedIdentifierCase,
        SqlSupportedCaseSensitivity::SqlCaseSensitivityCaseInsensitive as i32,
    );
    info.append(SqlInfo::SqlIdentifierQuoteChar, "\"");
    info.append(SqlInfo::SqlAllTablesAreSelectable, true);
    info.append(SqlInfo::SqlNullOrdering, SqlNullOrdering::SqlNullsSortedHigh as i32);
    info.append(SqlInfo::SqlSearchStringEscape, "\\");
    info.append(SqlInfo::SqlSupportsColumnAliasing, true);
    info.append(SqlInfo::SqlNullPlusNullIsNull, true);
    info.append(SqlInfo::SqlSupportsConvert, BTreeMap::<i32, Vec<i32>>::new());
    info.append(SqlInfo::SqlSupportsExpressionsInOrderBy, true);
    info.append(SqlInfo::SqlSupportsOrderByUnrelated, true);
    info.append(SqlInfo::SqlSupportsLikeEscapeClause, true);
    info.append(SqlInfo::SqlSupportsNonNullableColumns, true);
    info.append(SqlInfo::SqlSchemaTerm, "schema");
    info.append(SqlInfo::SqlProcedureTerm, "procedure");
    info.append(SqlInfo::SqlCatalogTerm, "catalog");
    info.append(SqlInfo::SqlCatalogAtStart, true);
    info.append(SqlInfo::SqlSelectForUpdateSupported, false);
    info.append(SqlInfo::SqlStoredProceduresSupported, true);
    info.append(SqlInfo::SqlCorrelatedSubqueriesSupported, true);
    info.append(SqlInfo::SqlMaxStatementLength, i64::try_from(MAX_STATEMENT_BYTES).unwrap_or(i64::MAX));
    info.append(
        SqlInfo::SqlDefaultTransactionIsolation,
        SqlTransactionIsolationLevel::SqlTransactionRepeatableRead as i32,
    );
    info.append(SqlInfo::SqlTransactionsSupported, true);
    info.append(SqlInfo::SqlDataDefinitionCausesTransactionCommit, false);
    info.append(SqlInfo::SqlDataDefinitionsInTransactionsIgnored, false);
    info.append(SqlInfo::SqlBatchUpdatesSupported, true);
    info.append(SqlInfo::SqlSavepointsSupported, false);
    info.append(SqlInfo::SqlNamedParametersSupported, false);
    info.build().map_err(|e| Error::internal(format!("describing the server: {e}")))
}

/// The types that columns of tables have.
///
/// # Errors
/// `Internal`: they cannot be written.
pub fn type_info() -> Result<XdbcTypeInfoData> {
    use XdbcDataType::{
        XdbcBigint, XdbcBinary, XdbcBit, XdbcDate, XdbcDecimal, XdbcDouble, XdbcInteger, XdbcReal, XdbcTime,
        XdbcTimestamp, XdbcVarbinary, XdbcVarchar,
    };
    use XdbcDatetimeSubcode::{
        XdbcSubcodeTime, XdbcSubcodeTimestamp, XdbcSubcodeTimestampWithTimezone, XdbcSubcodeYear,
    };
    // Name, type, digits or characters, what literals begin with, parameters, the kind of time.
    type Row =
        (&'static str, XdbcDataType, i32, Option<&'static str>, &'static [&'static str], Option<XdbcDatetimeSubcode>);
    let types: [Row; 13] = [
        ("BIGINT", XdbcBigint, 19, None, &[], None),
        ("BINARY", XdbcBinary, i32::MAX, Some("X'"), &["length"], None),
        ("BOOLEAN", XdbcBit, 1, None, &[], None),
        ("DATE", XdbcDate, 10, Some("DATE '"), &[], Some(XdbcSubcodeYear)),
        ("DECIMAL", XdbcDecimal, 38, None, &["precision", "scale"], None),
        ("DOUBLE", XdbcDouble, 15, None, &[], None),
        ("INT", XdbcInteger, 10, None, &[], None),
        ("REAL", XdbcReal, 7, None, &[], None),
        ("TIME", XdbcTime, 15, Some("TIME '"), &[], Some(XdbcSubcodeTime)),
        ("TIMESTAMP", XdbcTimestamp, 26, Some("TIMESTAMP '"), &[], Some(XdbcSubcodeTimestamp)),
        (
            "TIMESTAMP WITH TIME ZONE",
            XdbcTimestamp,
            32,
            Some("TIMESTAMP '"),
            &[],
            Some(XdbcSubcodeTimestampWithTimezone),
        ),
        ("VARBINARY", XdbcVarbinary, i32::MAX, Some("X'"), &[], None),
        ("VARCHAR", XdbcVarchar, i32::MAX, Some("'"), &[], None),
    ];
    let mut info = XdbcTypeInfoDataBuilder::new();
    for (name, data_type, size, prefix, parameters, subcode) in types {
        let is_number = prefix.is_none() && data_type != XdbcBit;
        let parameters: Vec<String> = parameters.iter().map(|parameter| (*parameter).to_owned()).collect();
        info.append(XdbcTypeInfo {
            type_name: name.to_owned(),
            data_type,
            column_size: Some(size),
            literal_prefix: prefix.map(str::to_owned),
            literal_suffix: prefix.map(|_| "'".to_owned()),
            create_params: (!parameters.is_empty()).then_some(parameters),
            nullable: Nullable::NullabilityNullable,
            case_sensitive: data_type == XdbcVarchar,
            searchable: Searchable::Full,
            unsigned_attribute: is_number.then_some(false),
            fixed_prec_scale: false,
            auto_increment: Some(false),
            local_type_name: Some(name.to_owned()),
            minimum_scale: (data_type == XdbcDecimal).then_some(0),
            maximum_scale: (data_type == XdbcDecimal).then_some(38),
            sql_data_type: match subcode {
                Some(_) => XdbcDataType::XdbcDatetime,
                None => data_type,
            },
            datetime_subcode: subcode,
            num_prec_radix: is_number.then_some(10),
            interval_precision: None,
        });
    }
    info.build().map_err(|e| Error::internal(format!("describing the types: {e}")))
}
