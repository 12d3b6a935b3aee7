//! The sweep: what lies in a table's location and nothing of the table refers to.
//!
//! What holds: listed first, then the pointer is read; what is younger than [`ORPHAN_AGE_LEAST`] by the store's clock is left alone. It ends
//! at its deadline, and says how far it came: what is gone is not found again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::TryStreamExt;
use lake_client::catalog::TableIdent;
use object_store::ObjectStore;

use super::maintenance::reachable;
use super::{Tables, catalog_error};
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use crate::storage::abandoned::Abandoned;
use crate::storage::canonical;

/// How old a file must be to be taken for an orphan, unless said otherwise ...
pub const ORPHAN_AGE: Duration = Duration::from_secs(72 * 3600);
/// ... and at least: a younger one may belong to a statement that is running.
pub const ORPHAN_AGE_LEAST: Duration = Duration::from_secs(24 * 3600);

/// Orphans that are removed before it is looked again whose it is to do that.
const REMOVED_AT_A_TIME: usize = 100;

/// Removes, or with `dry_run` only counts and logs, what is in the table's location, that nothing of the table refers to,
/// and that is older than `older_than` by the store's clock. So are uploads to S3 that began before that and were not completed; where they
/// cannot be listed they stay, and the log says so.
///
/// Where it is done under guards they are looked at before each [`REMOVED_AT_A_TIME`] files; those may still go when it is another's to do,
/// which finds fewer. Returns how many are gone, or were found.
///
/// # Errors
/// `Conflict` once it is another's to do, and `Deadline`, both with how many are gone: the others are found when it is called again.
/// `NotSupported` if another table lives in the location as well: what that one refers to would look like an orphan.
pub async fn remove_orphan_files(
    tables: &Arc<Tables>,
    ident: &TableIdent,
    older_than: Duration,
    dry_run: bool,
    deadline: Instant,
) -> Result<u64> {
    let find = async {
        let doing = format!("looking up table {ident}");
        // Listed first: what is written after that is in no list, and what was written before is known to the pointer that is
        // read then, or too young.
        let current = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?;
        let current = current.ok_or_else(|| Error::not_found(format!("table {ident} does not exist")))?;
        let location = tables.cache.table(&current.value.metadata_location).await?.location().to_owned();
        lives_alone(tables, ident, &location, deadline).await?;
        let (listed, uploads) = old_objects(tables, &location, older_than).await?;
        let current = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?;
        let current = current.ok_or_else(|| Error::not_found(format!("table {ident} does not exist")))?;
        let metadata = tables.cache.table(&current.value.metadata_location).await?;
        if metadata.location() != location {
            return Err(Error::conflict(format!("table {ident} was moved or replaced meanwhile; run it again")));
        }
        let mut known = reachable(&tables.cache, &metadata, metadata.snapshots().map(AsRef::as_ref)).await?;
        if planted::has(Bug::SweptLive) {
            known.clear();
        }
        known.insert(current.value.metadata_location.clone());
        known.extend(current.value.previous_location.clone());
        known.extend(metadata.metadata_log().iter().map(|entry| entry.metadata_file.clone()));
        known.extend(metadata.statistics_iter().map(|file| file.statistics_path.clone()));
        known.extend(metadata.partition_statistics_iter().map(|file| file.statistics_path.clone()));
        let known = known.iter().map(|location| tables.storage.resolve(location).map(|object| object.path.to_string()));
        let known: HashSet<String> = known.collect::<Result<_>>()?;
        let orphans = listed.into_iter().filter(|(path, _)| !known.contains(path)).map(|(_, url)| url);
        Ok((location, orphans.collect::<Vec<_>>(), uploads))
    };
    let (location, orphans, uploads) = tokio::time::timeout_at(deadline.into(), find).await.unwrap_or_else(|_| {
        Err(Error::deadline(format!("looking for orphans of table {ident}: not done in time; nothing was removed")))
    })?;
    for orphan in &orphans {
        tracing::info!(table = %ident, location = %orphan, dry_run, "an orphan");
    }
    for upload in &uploads {
        tracing::info!(table = %ident, path = %upload.path, dry_run, "an upload that nobody completes");
    }
    if !dry_run {
        return remove(tables, ident, &location, (&orphans, &uploads), deadline).await;
    }
    Ok((orphans.len() + uploads.len()) as u64)
}

/// Removes orphans and aborts uploads for as long as [`may_go_on`] says. How many are gone.
async fn remove(
    tables: &Tables,
    ident: &TableIdent,
    location: &str,
    (orphans, uploads): (&[String], &[Abandoned]),
    deadline: Instant,
) -> Result<u64> {
    let all = orphans.len() + uploads.len();
    let mut gone = 0;
    let so_far = |gone: usize| format!("removing orphans of table {ident}, {gone} of {all} are gone");
    for some in orphans.chunks(REMOVED_AT_A_TIME) {
        may_go_on(tables, so_far(gone), deadline).await?;
        gone += tables.storage.discard_until(some, deadline).await;
    }
    for some in uploads.chunks(REMOVED_AT_A_TIME) {
        may_go_on(tables, so_far(gone), deadline).await?;
        gone += tables.storage.abort_uploads(location, some, deadline).await?;
    }
    if gone < all {
        // The last ones have perhaps taken what was left of the time; else the store does not give them up, and the log says so.
        may_go_on(tables, so_far(gone), deadline).await?;
    }
    Ok(gone as u64)
}

/// Whether there is time, and the guards hold, which no commit carries here.
async fn may_go_on(tables: &Tables, so_far: String, deadline: Instant) -> Result<()> {
    let asked = tables.asks();
    let checked = match Instant::now() < deadline {
        true => tables.writer.check_guards(deadline).await.map_err(|e| catalog_error("looking whose it is to do", e)),
        false => Err(Error::deadline("there is no more time; call it again for the rest, or with a longer deadline")),
    };
    checked.map_err(|e| e.while_doing(so_far))?;
    tables.held(asked);
    Ok(())
}

/// Refuses if another table's location, or its current metadata, is inside this one or around it. One whose metadata cannot be
/// read is an error, too.
async fn lives_alone(tables: &Tables, ident: &TableIdent, location: &str, deadline: Instant) -> Result<()> {
    let directory = |location: &str| format!("{}/", canonical(location.trim_end_matches('/')));
    let own = directory(location);
    for (_, idents) in tables.list(deadline).await? {
        for other in idents.iter().filter(|other| *other != ident) {
            let doing = format!("looking up table {other}, which may share the location of table {ident}");
            let pointer = tables.metadata.read_table(other, deadline).await.map_err(|e| catalog_error(&doing, e))?;
            let Some(pointer) = pointer else { continue };
            let file = &pointer.value.metadata_location;
            let metadata = tables.cache.table(file).await.map_err(|e| e.while_doing(&doing))?;
            let theirs = directory(metadata.location());
            if canonical(file).starts_with(&own) || theirs.starts_with(&own) || own.starts_with(&theirs) {
                return Err(Error::not_supported(format!(
                    "removing orphans of table {ident}: table {other} lives in {location} as well, and its files would look like \
                     orphans; nothing was removed"
                )));
            }
        }
    }
    Ok(())
}

/// The objects under a location that are old enough: their paths in the store, and their locations. And the uploads that are.
async fn old_objects(
    tables: &Tables,
    location: &str,
    older_than: Duration,
) -> Result<(Vec<(String, String)>, Vec<Abandoned>)> {
    let root = tables.storage.resolve(location)?;
    let failed = |e| Error::object_store("listing", location, &e);
    // The clock that counts is the one that dates the objects.
    let now = tables.storage.clock(&format!("{location}/metadata")).await?;
    let listed: Vec<_> = root.store.list(Some(&root.path)).try_collect().await.map_err(failed)?;
    let old = listed.into_iter().filter(|object| {
        let modified = SystemTime::from(object.last_modified);
        now.duration_since(modified).is_ok_and(|age| age >= older_than)
    });
    let prefix: &str = root.path.as_ref();
    let located = old.filter_map(|object| {
        let path = object.location.to_string();
        let rest = path.strip_prefix(prefix)?.to_owned();
        Some((path, format!("{location}{rest}")))
    });
    let located = located.collect();
    let Some(before) = now.checked_sub(older_than) else { return Ok((located, Vec::new())) };
    let uploads = tables.storage.abandoned_uploads(location, Some(before)).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "uploads that were not completed, if there are any, stay");
        Vec::new()
    });
    Ok((located, uploads))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use lake_client::cache::CacheConfig;
    use lake_client::memory::MemoryStore;
    use lake_client::metadata::Metadata;

    use super::*;
    use crate::config::{Credential, S3Config};
    use crate::error::Kind;
    use crate::storage::Storage;

    /// An S3 service that removes so many objects, and does not answer after that. Where it is.
    async fn serve(removing: usize) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let answer = move || {
            let asked = asked.clone();
            async move {
                if asked.fetch_add(1, Ordering::Relaxed) >= removing {
                    std::future::pending::<()>().await;
                }
                "<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>"
            }
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        endpoint
    }

    #[tokio::test]
    async fn removing_ends_when_its_time_is_over_and_says_how_far_it_came() {
        let ident = TableIdent::new("default".parse().unwrap(), "t").unwrap();
        let orphans: Vec<String> = (0..5).map(|n| format!("s3://bucket/warehouse/t/data/{n}.parquet")).collect();
        let removing = async |removing: usize, within: Duration| {
            let config = S3Config {
                endpoint: Some(serve(removing).await),
                region: Some("x".into()),
                access_key: Some(Credential::new("key")),
                secret_key: Some(Credential::new("secret")),
                path_style: true,
                ..S3Config::default()
            };
            let metadata = Metadata::new(Arc::new(MemoryStore::new()), CacheConfig::default());
            let tables = Tables::new(Storage::new("s3://bucket/warehouse", config), 1 << 20, metadata, 1 << 20);
            let deadline = Instant::now() + within;
            remove(&tables, &ident, "s3://bucket/warehouse/t", (&orphans, &[]), deadline).await
        };
        assert_eq!(removing(5, Duration::from_secs(60)).await.unwrap(), 5);
        for (removed, within) in [(3, Duration::from_secs(2)), (5, Duration::ZERO)] {
            let error = removing(removed, within).await.unwrap_err();
            assert_eq!(error.kind, Kind::Deadline, "{error}");
            let (gone, _) = error.message.split_once(" of 5 are gone").unwrap_or_else(|| panic!("{error}"));
            let gone: usize = gone.rsplit(' ').next().unwrap().parse().unwrap();
            assert!(gone <= removed && (gone == 0 || !within.is_zero()), "{error}");
        }
    }
}
