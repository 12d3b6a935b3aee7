//! A new cluster from a saved snapshot (semantics, section 10).

use std::path::Path;

use super::blocking;
use super::found::{NewCluster, found};
use super::saved::{self, Saved};
use crate::error::Error;

/// Makes the directory of a cluster of one, peer `peer_id`, that begins with what a saved snapshot holds.
///
/// # Errors
/// The file cannot be used, or the directory exists or cannot be made.
pub async fn restore(file: &Path, dir: &Path, peer_id: u64) -> Result<(Saved, NewCluster), Error> {
    if dir.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: dir.to_owned() });
    }
    let path = file.to_owned();
    let saved = blocking(move || saved::read(&path)).await??;
    let made = found(dir, peer_id, &saved.applied, 0).await?;
    Ok((saved, made))
}
