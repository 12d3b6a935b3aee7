//! `lake meta settings`: what the cluster as a whole is told: quotas; and its feature level, which it settles by itself.

use anyhow::Result;
use lake_client::remote::coordination::Quota;
use lake_client::store::ReadOptions;
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{FormatArgs, escaped, size};
use super::peers::{Answer, ask_all, statuses};
use crate::columns::columns;

/// The commands of `lake meta settings`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The quotas with what is used of them, and the feature level
    Show(ShowArgs),
    /// Limit the bytes of keys and values, of the whole map or under a prefix
    Quota(QuotaArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The feature level is raised by the leader itself once every member supports a higher one; it never goes back.

Example:
  lake meta settings show")]
pub struct ShowArgs {
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
At the limit what would grow is refused, and deletes still work. From four fifths on `lake meta status` says so.

Examples:
  lake meta settings quota --bytes 8GiB
  lake meta settings quota --prefix /kv/team-a/ --bytes 64MiB
  lake meta settings quota --prefix /kv/team-a/ --unlimited")]
pub struct QuotaArgs {
    /// What the keys begin with; empty: the whole map
    #[arg(long, value_name = "PREFIX", default_value = "")]
    prefix: String,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct LimitArgs {
    /// The limit in bytes, or with a unit: KiB, MiB, GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    bytes: Option<u64>,
    /// No limit
    #[arg(long)]
    unlimited: bool,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        matches!(self, Self::Show(_))
    }
}

/// Does what was asked.
///
/// # Errors
/// As every call.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Show(args) => show(cluster, args).await,
        Command::Quota(args) => quota(cluster, args).await,
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, unit)))
        .unwrap_or((text, 1));
    let number: Option<u64> = number.trim_end().parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(unit));
    bytes.ok_or_else(|| "it is a number of bytes, or one with KiB, MiB or GiB".to_owned())
}

async fn show(cluster: &Cluster, args: ShowArgs) -> Result<u8> {
    let quotas = cluster.store()?.quotas(ReadOptions::default(), cluster.deadline()).await?.value;
    let answers = ask_all(cluster.endpoints()?, cluster.secret()?.as_ref()).await;
    let level = statuses(&answers).map(|s| s.feature_level).max();
    args.format.print(
        || {
            let mut text = table(&quotas);
            if let Some(level) = level {
                text.push_str(&format!("feature level {level}; {}\n", supported(&answers)));
            }
            text
        },
        || {
            let quota = |quota: &Quota| {
                json!({ "prefix": quota.prefix, "limit_bytes": quota.limit_bytes, "used_bytes": quota.used_bytes })
            };
            let peer = |answer: &Answer| {
                let status = answer.status.as_ref().ok();
                json!({
                    "id": answer.id(),
                    "address": answer.endpoint,
                    "feature_level": status.map(|s| s.feature_level),
                    "supported_feature_level": status.map(|s| s.supported_feature_level),
                })
            };
            json!({
                "quotas": quotas.iter().map(quota).collect::<Value>(),
                "feature_level": level,
                "peers": answers.iter().map(peer).collect::<Value>(),
            })
        },
    )?;
    Ok(0)
}

fn table(quotas: &[Quota]) -> String {
    let mut rows = vec![["QUOTA OF", "LIMIT", "USED", ""].map(str::to_owned)];
    rows.extend(quotas.iter().map(|quota| {
        let share = quota.used_bytes as f64 / quota.limit_bytes.max(1) as f64 * 100.0;
        [
            if quota.prefix.is_empty() { "the whole map".to_owned() } else { escaped(&quota.prefix) },
            size(quota.limit_bytes),
            size(quota.used_bytes),
            format!("{share:.1} %"),
        ]
    }));
    columns(rows)
}

/// Which levels the peers' builds support.
fn supported(answers: &[Answer]) -> String {
    let peers = answers.iter().filter_map(|answer| {
        let status = answer.status.as_ref().ok()?;
        Some(format!("peer {} supports {}", answer.id()?, status.supported_feature_level))
    });
    peers.collect::<Vec<_>>().join(", ")
}

async fn quota(cluster: &Cluster, args: QuotaArgs) -> Result<u8> {
    let limit = args.limit.bytes.filter(|_| !args.limit.unlimited);
    cluster.store()?.set_quota(&args.prefix, limit, cluster.deadline()).await?;
    let of = if args.prefix.is_empty() { "the whole map".to_owned() } else { escaped(&args.prefix) };
    args.format.print(
        || match limit {
            Some(limit) => format!("the quota of {of} is {}\n", size(limit)),
            None => format!("{of} has no quota any more\n"),
        },
        || json!({ "prefix": args.prefix, "limit_bytes": limit }),
    )?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_units() {
        assert_eq!(
            [bytes("17"), bytes("2KiB"), bytes("3 MiB"), bytes("1GiB")],
            [Ok(17), Ok(2048), Ok(3 << 20), Ok(1 << 30)]
        );
        for wrong in ["", "KiB", "-1", "1.5GiB", "1MB", "99999999999999GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
