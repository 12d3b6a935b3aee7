//! Which cluster a tool talks to: `--at`, else an environment variable, else `./lake-data/cluster.json`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use lake_chaos::{Role, manifest};
use lake_client::secret::Secret;

/// Where `lake up` keeps a cluster unless told otherwise.
pub const DEFAULT_DIR: &str = "./lake-data";

/// What tools need to reach a cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct At {
    /// Where the cluster is reached: its peers, for commands about metadata [default: LAKE_META], or its query nodes, for those that
    /// run SQL [default: LAKE_QUERY]; without the variable what ./lake-data/cluster.json says
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',', global = true)]
    at: Vec<String>,
    /// A file that holds the cluster secret
    #[arg(long, env = "LAKE_SECRET_FILE", value_name = "FILE", global = true)]
    secret_file: Option<PathBuf>,
}

impl At {
    /// The endpoints of peers or query nodes.
    ///
    /// # Errors
    /// None is given, or one is not `host:port`.
    pub fn endpoints(&self, role: Role) -> Result<Vec<String>> {
        let (variable, other, others) = match role {
            Role::Metasrv => ("LAKE_META", "LAKE_QUERY", "query nodes"),
            Role::Query => ("LAKE_QUERY", "LAKE_META", "peers"),
        };
        let value = std::env::var(variable).ok();
        let is_mistaken = self.at.is_empty() && value.is_none() && std::env::var_os(other).is_some();
        match resolve(&self.at, variable, value.as_deref(), Path::new(DEFAULT_DIR), role) {
            Err(error) if is_mistaken => bail!("{error:#} ({other}, which is set, names {others})"),
            endpoints => endpoints,
        }
    }

    /// The cluster's secret, if one is given.
    ///
    /// # Errors
    /// The file cannot be read, or holds none.
    pub fn secret(&self) -> Result<Option<Secret>> {
        let secret = self.secret_file.as_deref().map(Secret::from_file).transpose();
        secret.map_err(|e| anyhow::anyhow!("secret_file: {e}"))
    }
}

fn resolve(at: &[String], variable: &str, value: Option<&str>, dir: &Path, role: Role) -> Result<Vec<String>> {
    if !at.is_empty() {
        return checked(at.iter().map(String::as_str), "--at");
    }
    if let Some(value) = value.filter(|v| !v.trim().is_empty()) {
        return checked(value.split(','), variable);
    }
    let ask = format!("say where the cluster is with --at host:port, or set {variable}");
    let manifest = dir.join(manifest::FILE_NAME);
    let Some(entries) = manifest::read(dir)? else {
        bail!("there is no {}: {ask}, or start a cluster here with `lake up`", manifest.display());
    };
    let of_role: Vec<_> = entries.iter().filter(|e| e.role == role).collect();
    if of_role.is_empty() {
        bail!("{} has no {role} process: {ask}", manifest.display());
    }
    if of_role.iter().all(|e| e.pid.is_none()) {
        bail!("{} says that nothing runs: start it with `lake up`, or {ask}", manifest.display());
    }
    let service = match role {
        Role::Metasrv => "grpc",
        Role::Query => "flight",
    };
    let addresses = of_role.iter().filter_map(|e| e.addresses.get(service)).map(String::as_str);
    checked(addresses, &manifest.display().to_string())
}

fn checked<'a>(endpoints: impl Iterator<Item = &'a str>, source: &str) -> Result<Vec<String>> {
    let endpoints = endpoints.map(str::trim).filter(|e| !e.is_empty()).map(|endpoint| {
        let (host, port) = endpoint.rsplit_once(':').context("there is no port")?;
        port.parse::<u16>().context("the port is no number")?;
        if host.is_empty() || host.contains("//") {
            bail!("the host is missing or is a URL");
        }
        Ok(endpoint.to_owned())
    });
    let endpoints: Vec<String> =
        endpoints.collect::<Result<_>>().with_context(|| format!("{source}: not a list of host:port"))?;
    if endpoints.is_empty() {
        bail!("{source}: no endpoint is given; write host:port,host:port");
    }
    Ok(endpoints)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn entry(role: Role, pid: Option<u32>) -> manifest::Entry {
        let address = |service: &str| (service.to_owned(), format!("127.0.0.1:{}", 10_000 + service.len()));
        manifest::Entry {
            role,
            id: 1,
            pid,
            log_file: "l".into(),
            data_dir: "d".into(),
            addresses: BTreeMap::from([address("grpc"), address("raft"), address("flight")]),
        }
    }

    #[test]
    fn the_flag_wins_over_the_variable_and_that_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |at: &[&str], value, role| {
            let at: Vec<String> = at.iter().map(|s| (*s).to_owned()).collect();
            resolve(&at, "LAKE_META", value, dir.path(), role).map_err(|e| format!("{e:#}"))
        };
        let missing = at(&[], None, Role::Metasrv).unwrap_err();
        assert!(missing.contains("lake up") && missing.contains("LAKE_META"), "{missing}");
        manifest::write(dir.path(), &[entry(Role::Metasrv, None), entry(Role::Query, Some(1))]).unwrap();
        assert!(at(&[], None, Role::Metasrv).unwrap_err().contains("nothing runs"));
        assert_eq!(at(&[], Some(""), Role::Query).unwrap(), ["127.0.0.1:10006"]);
        assert_eq!(at(&[], Some("a:1, b:2"), Role::Query).unwrap(), ["a:1", "b:2"]);
        assert_eq!(at(&["c:3"], Some("a:1"), Role::Query).unwrap(), ["c:3"]);
    }

    #[test]
    fn what_is_no_endpoint_is_refused_with_where_it_was_given() {
        for wrong in ["host", "host:port", ":1", "http://host:1", ","] {
            let message = format!("{:#}", checked(wrong.split(','), "--at").unwrap_err());
            assert!(message.starts_with("--at:"), "{message}");
        }
    }
}
