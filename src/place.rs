//! Where metadata is, as people write it: a cluster's peers, or a store that needs no process of lake's.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use lake_client::etcd::EtcdStore;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use lake_client::store::SharedStore;

/// A metadata store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A metadata cluster's peers.
    Cluster(Vec<String>),
    Etcd {
        endpoints: Vec<String>,
        root: String,
    },
    Bucket {
        bucket: String,
        root: String,
    },
    Directory(PathBuf),
}

/// How a place is written.
pub const PLACES: &str = "lake://HOST:PORT,..., etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX or file:///DIRECTORY";

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is none of {PLACES}");
        let endpoints =
            |list: &str| list.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect::<Vec<_>>();
        let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
        let (first, root) = rest.split_once('/').unwrap_or((rest, ""));
        let root = root.trim_end_matches('/');
        match (scheme, first) {
            ("lake", first) if !first.is_empty() && root.is_empty() => Ok(Self::Cluster(endpoints(first))),
            ("etcd", first) if !first.is_empty() => {
                let root = if root.is_empty() { String::new() } else { format!("/{root}") };
                Ok(Self::Etcd { endpoints: endpoints(first), root })
            }
            ("s3", bucket) if !bucket.is_empty() => {
                Ok(Self::Bucket { bucket: bucket.to_owned(), root: root.to_owned() })
            }
            ("file", "") if rest.len() > 1 => Ok(Self::Directory(rest.into())),
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cluster(endpoints) => write!(f, "lake://{}", endpoints.join(",")),
            Self::Etcd { endpoints, root } => write!(f, "etcd://{}{root}", endpoints.join(",")),
            Self::Bucket { bucket, root } => write!(f, "s3://{bucket}/{root}"),
            Self::Directory(path) => write!(f, "file://{}", path.display()),
        }
    }
}

impl Place {
    /// As a list of endpoints says it, which may be the parts of one that was split at its commas.
    ///
    /// # Errors
    /// It has a scheme and is no place.
    pub fn of_list(list: &[String]) -> Result<Self, String> {
        let text = list.join(",");
        if text.contains("://") { text.parse() } else { Ok(Self::Cluster(list.to_vec())) }
    }

    /// The store that is there. Of a bucket the environment says the settings (`AWS_*`); it is tried within `patience`.
    ///
    /// # Errors
    /// What is wrong with it, or that this build has none of its kind.
    pub async fn open(&self, secret: Option<Secret>, patience: Duration) -> Result<SharedStore> {
        Ok(match self {
            Self::Cluster(endpoints) => {
                let config = RemoteConfig { endpoints: endpoints.clone(), secret };
                Arc::new(RemoteStore::connect(config)?)
            }
            Self::Etcd { endpoints, root } => Arc::new(EtcdStore::connect(endpoints.clone(), root)?),
            Self::Bucket { .. } | Self::Directory(_) => objects(self, patience).await?,
        })
    }
}

#[cfg(feature = "store-object")]
async fn objects(place: &Place, patience: Duration) -> Result<SharedStore> {
    use lake_client::object::ObjectMetaStore;
    Ok(match place {
        Place::Bucket { bucket, root } => {
            Arc::new(ObjectMetaStore::s3(bucket, root, std::time::Instant::now() + patience).await?)
        }
        Place::Directory(path) => Arc::new(ObjectMetaStore::local(path)?),
        _ => anyhow::bail!("{place} is no object store"),
    })
}

#[cfg(not(feature = "store-object"))]
async fn objects(place: &Place, _: Duration) -> Result<SharedStore> {
    anyhow::bail!("{place}: this build of lake has no object stores; build it with `--features store-object`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        let of = |endpoints: &[&str]| endpoints.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        let etcd = |root: &str| Place::Etcd { endpoints: of(&["a:1", "b:2"]), root: root.into() };
        let bucket = |root: &str| Place::Bucket { bucket: "b".into(), root: root.into() };
        for (text, expected) in [
            ("lake://a:1,b:2", Place::Cluster(of(&["a:1", "b:2"]))),
            ("etcd://a:1,b:2", etcd("")),
            ("etcd://a:1,b:2/", etcd("")),
            ("etcd://a:1,b:2/x/y/", etcd("/x/y")),
            ("s3://b", bucket("")),
            ("s3://b/x/y", bucket("x/y")),
            ("file:///d/e", Place::Directory("/d/e".into())),
        ] {
            assert_eq!(text.parse(), Ok(expected.clone()), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected.clone()), "{text}: it is told as it is written");
            let parts: Vec<_> = text.split(',').map(str::to_owned).collect();
            assert_eq!(Place::of_list(&parts), Ok(expected), "{text}, split at its commas");
        }
        assert_eq!(Place::of_list(&of(&["a:1", "b:2"])), Ok(Place::Cluster(of(&["a:1", "b:2"]))));
        for wrong in [
            "",
            "a:1",
            "lake://",
            "lake://a:1/x",
            "etcd:///x",
            "s3:///x",
            "file://",
            "file:///",
            "file://d",
            "gs://b/x",
        ] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}
