//! A small file system in memory, to be filled up.

use std::path::{Path, PathBuf};

use super::mount::{mount_tmpfs, unmount};
use crate::{IoContext, Result};

/// Mounted until dropped.
#[derive(Debug)]
pub struct SmallDisk {
    mounted: PathBuf,
}

impl SmallDisk {
    /// An empty one of so many bytes at `mounted`.
    ///
    /// # Errors
    /// Not root.
    pub fn mount_at(mounted: &Path, bytes: u64) -> Result<Self> {
        std::fs::create_dir_all(mounted).doing(|| format!("making {}", mounted.display()))?;
        mount_tmpfs(bytes, mounted)?;
        Ok(Self { mounted: mounted.to_owned() })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        unmount(&self.mounted);
    }
}
