//! `lake meta txn`: a transaction from a JSON document ([`super::txn_document`]).

use std::path::PathBuf;

use anyhow::Result;
use lake_client::store::MetaStore;
use lake_proto::limits::MAX_TXN_BYTES;

use super::cluster::Cluster;
use super::output::print_json;
use super::{EXIT_NO, EXIT_UNKNOWN, txn_document, value};

/// JSON takes more room than what it says: base64 a third more, a control character six times as much.
const MAX_DOCUMENT_BYTES: usize = 8 * MAX_TXN_BYTES;

/// Options of `lake meta txn`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = r#"The document has `when` (compares), `then` and `otherwise` (operations), each a list that may be left out:

  {"when":      [{"key": "/kv/a", "mod_revision": 17}, {"key": "/kv/b", "absent": true}],
   "then":      [{"put": {"key": "/kv/a", "value": "1"}}, {"delete": {"key": "/kv/c"}}],
   "otherwise": [{"get": {"key": "/kv/a"}}]}

Compares, one condition each:
  {"key": K, "absent": true}               {"prefix": P, "empty": true}
  {"key": K, "mod_revision": R}            {"prefix": P, "unchanged_since": R}
  {"key": K, "create_revision": R}         {"path": P, "scope_free": true, "owner": O}   (owner may be left out)
  {"key": K, "version": N}                 {"lease_alive": L}
  {"key": K, "value": TEXT}                {"entry_term": T}
Operations:
  {"put": {"key": K, "value": TEXT, "lease": L, "return_previous": true}}   (the last two may be left out)
  {"delete": {"key": K, "return_previous": true}}
  {"get": {"key": K}}
  {"list": {"prefix": P, "limit": N}}
  {"acquire_scope": {"path": P, "owner": O}}
  {"release_scope": {"path": P, "owner": O}}
TEXT is UTF-8; "value_base64" in the place of "value" takes any bytes. An owner O is {"lease": L} or {"procedure": ID}.
The answer is JSON: branch, revision, results in the order of the operations, and what failed compares found.

Exit codes: 0 `then` ran, 3 `otherwise` ran, 1 nothing was done, 4 it is unknown what was done.

Examples:
  lake meta txn move.json
  echo '{"then": [{"put": {"key": "/kv/a", "value": "1"}}]}' | lake meta txn -"#
)]
pub struct Args {
    /// The document; - is standard input
    #[arg(value_name = "FILE")]
    document: PathBuf,
}

/// Runs the transaction and prints what it did.
///
/// # Errors
/// The document cannot be read, or means nothing; as every change.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let document = value::read(&args.document, MAX_DOCUMENT_BYTES, "the document of a transaction")?;
    let txn = txn_document::parse(&document)?;
    let committed = cluster.store()?.commit(txn, cluster.deadline()).await?;
    print_json(&txn_document::answer(&committed))?;
    Ok(match (committed.result.succeeded, committed.resent) {
        (true, _) => 0,
        (false, false) => EXIT_NO,
        (false, true) => EXIT_UNKNOWN,
    })
}
