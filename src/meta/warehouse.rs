//! `lake meta warehouse`: places for tables besides the one that query nodes are configured with.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use lake_client::Catalog;
use lake_client::catalog::CatalogError;
use lake_client::procedures::calls::unix_ms;
use lake_client::warehouse::{Holdings, Profile, S3, SecretRef, WarehouseError};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{FormatArgs, escaped};
use crate::columns::columns;

/// The commands of `lake meta warehouse`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The warehouses, and where they are
    List(ListArgs),
    /// Make a warehouse, and the namespace of its name
    #[command(after_help = CREATE_HELP)]
    Create(ProfileArgs),
    /// Say anew where a warehouse is and how it is reached, whole; what it has stays where it is
    #[command(after_help = CHANGE_HELP)]
    Change(ProfileArgs),
    /// Remove a warehouse with nothing in it; objects stay. With --purge, have all go that is in it
    #[command(after_help = REMOVE_HELP)]
    Remove(RemoveArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The warehouse `lake` is that of the query nodes' own configuration, and is not listed.

Example:
  lake meta warehouse list --format json")]
pub struct ListArgs {
    #[command(flatten)]
    format: FormatArgs,
}

const CREATE_HELP: &str = "\
Engines name the warehouse when they connect (`warehouse=archive`); for SQL in lake it is the schema of that name, and
`archive.sales` a schema in it. Secrets are named, never given: every query node finds them in its own environment or files.

Examples:
  lake meta warehouse create local --root file:///srv/tables
  lake meta warehouse create archive --root s3://archive/lake --s3-endpoint http://s3.rack2:8333 --s3-region us-east-1 \\
    --s3-path-style --s3-access-key file:/etc/lake/archive-key --s3-secret-key file:/etc/lake/archive-secret";

const CHANGE_HELP: &str = "\
What is not said is not so any more. Query nodes follow within a moment.

Example:
  lake meta warehouse change archive --root s3://archive/lake --s3-endpoint http://s3.rack3:8333 --s3-path-style";

#[derive(Debug, clap::Args)]
pub struct ProfileArgs {
    /// Its name
    name: String,
    /// Where its tables are: file:///dir, or s3://bucket/prefix
    #[arg(long, value_name = "URI")]
    root: String,
    /// S3 endpoint, for other services than AWS
    #[arg(long, value_name = "URL")]
    s3_endpoint: Option<String>,
    /// S3 region
    #[arg(long, value_name = "REGION")]
    s3_region: Option<String>,
    /// Address buckets by path, not by host name
    #[arg(long)]
    s3_path_style: bool,
    /// Where query nodes find the access key: env:NAME or file:/path
    #[arg(long, value_name = "WHERE", value_parser = secret)]
    s3_access_key: Option<SecretRef>,
    /// Where query nodes find the secret key: env:NAME or file:/path
    #[arg(long, value_name = "WHERE", value_parser = secret)]
    s3_secret_key: Option<SecretRef>,
    #[command(flatten)]
    format: FormatArgs,
}

const REMOVE_HELP: &str = "\
With --purge the command returns once that is begun, and the leader goes on: tables, views and schemas are dropped at once, their files
are deleted after the retention time, and then the warehouse goes. Until then nothing can be made in it.

Examples:
  lake meta warehouse remove archive
  lake meta warehouse remove archive --purge --dry-run
  lake meta warehouse remove archive --purge";

#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// Its name
    name: String,
    /// Drop all that is in it, and delete the files of its tables
    #[arg(long)]
    purge: bool,
    /// Only say how much that is
    #[arg(long, requires = "purge")]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
}

impl Command {
    /// Whether it changes nothing.
    pub fn only_reads(&self) -> bool {
        match self {
            Self::List(_) => true,
            Self::Remove(args) => args.dry_run,
            Self::Create(_) | Self::Change(_) => false,
        }
    }
}

fn secret(text: &str) -> Result<SecretRef, String> {
    text.parse()
}

impl ProfileArgs {
    /// # Errors
    /// Says what is wrong with which option.
    fn profile(&self) -> Result<Profile> {
        let s3 = S3 {
            endpoint: self.s3_endpoint.clone(),
            region: self.s3_region.clone(),
            path_style: self.s3_path_style,
            access_key: self.s3_access_key.clone(),
            secret_key: self.s3_secret_key.clone(),
        };
        let says_nothing = s3 == S3::default();
        Profile::new(&self.root, (!says_nothing).then_some(s3)).map_err(|why| anyhow!("warehouse {}: {why}", self.name))
    }
}

/// Does what was asked.
///
/// # Errors
/// As every call; the name or the place is taken.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    let catalog = Catalog::new(Arc::new(cluster.store()?));
    let by = cluster.deadline();
    match command {
        Command::List(args) => {
            let there = catalog.warehouses(by).await.map_err(|e| told(e.into()))?.profiles;
            args.format.print(
                || {
                    let mut rows = vec![["WAREHOUSE", "ROOT", "S3"].map(str::to_owned)];
                    rows.extend(there.iter().map(|(name, p)| [escaped(name), escaped(&p.root), s3_words(p)]));
                    columns(rows)
                },
                || there.iter().map(|(name, profile)| document(name, profile)).collect(),
            )?;
        }
        Command::Create(args) => {
            let profile = args.profile()?;
            catalog.create_warehouse(&args.name, &profile, by).await.map_err(told)?;
            args.format.print(
                || format!("warehouse {} is at {}\n", escaped(&args.name), escaped(&profile.root)),
                || document(&args.name, &profile),
            )?;
        }
        Command::Change(args) => {
            let profile = args.profile()?;
            catalog.change_warehouse(&args.name, &profile, by).await.map_err(told)?;
            args.format.print(
                || format!("warehouse {} is at {} from now on\n", escaped(&args.name), escaped(&profile.root)),
                || document(&args.name, &profile),
            )?;
        }
        Command::Remove(args) if args.dry_run => {
            let all = catalog.holdings(&args.name, by).await.map_err(told)?;
            args.format.print(
                || {
                    let Holdings { tables, views, namespaces } = all;
                    let name = escaped(&args.name);
                    format!(
                        "warehouse {name} would go with {tables} tables, {views} views, {namespaces} nested schemas\n"
                    )
                },
                || json!({ "warehouse": args.name, "removed": false, "dry_run": true, "would_drop": all }),
            )?;
        }
        Command::Remove(args) if args.purge => {
            let id = catalog.submit_warehouse_purge(&args.name, unix_ms(), by).await.map_err(told)?;
            args.format.print(
                || format!("warehouse {} is being purged: lake meta proc wait {id}\n", escaped(&args.name)),
                || json!({ "warehouse": args.name, "removed": false, "procedure": id }),
            )?;
        }
        Command::Remove(args) => {
            catalog.remove_warehouse(&args.name, by).await.map_err(told)?;
            args.format.print(
                || format!("warehouse {} is no more; its objects stay\n", escaped(&args.name)),
                || json!({ "warehouse": args.name, "removed": true }),
            )?;
        }
    }
    Ok(0)
}

/// The store's own error, by which the exit code is chosen, if it is one.
fn told(error: WarehouseError) -> anyhow::Error {
    match error {
        WarehouseError::Catalog(CatalogError::Store(error)) => error.into(),
        other => other.into(),
    }
}

fn s3_words(profile: &Profile) -> String {
    let Some(s3) = &profile.s3 else {
        return if profile.bucket().is_some() { "as the query nodes say".to_owned() } else { String::new() };
    };
    let part = |name: &str, value: &Option<String>| value.as_ref().map(|value| format!("{name}={}", escaped(value)));
    let secret = |name: &str, value: &Option<SecretRef>| value.as_ref().map(|value| format!("{name}={value}"));
    let parts = [
        part("endpoint", &s3.endpoint),
        part("region", &s3.region),
        s3.path_style.then(|| "path-style".to_owned()),
        secret("access-key", &s3.access_key),
        secret("secret-key", &s3.secret_key),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn document(name: &str, profile: &Profile) -> Value {
    let mut document = json!({ "warehouse": name, "root": profile.root });
    if let Some(s3) = &profile.s3 {
        document["s3"] = json!(s3);
    }
    document
}
