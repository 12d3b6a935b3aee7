//! The cluster secret: read from a file or given by the environment, never printed.

use std::fmt;
use std::path::Path;

/// A secret that does not show itself in logs and messages.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Shortest secret accepted, in bytes.
    pub const MIN_BYTES: usize = 16;

    /// # Errors
    /// If it is too short, or holds anything but printable ASCII without spaces (it travels in a header).
    pub fn new(secret: impl Into<String>) -> Result<Self, String> {
        let secret = secret.into();
        if secret.len() < Self::MIN_BYTES {
            return Err(format!(
                "the cluster secret has {} bytes; it needs at least {}",
                secret.len(),
                Self::MIN_BYTES
            ));
        }
        if !secret.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("the cluster secret may hold printable ASCII characters only, and no spaces".to_owned());
        }
        Ok(Self(secret))
    }

    /// Reads it from a file; white space at the end is not part of it.
    ///
    /// # Errors
    /// A message that names the file.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("reading the cluster secret from {}: {e}", path.display()))?;
        Self::new(text.trim_end()).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The value of the `authorization` header that proves knowledge of it.
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether an `authorization` header holds this secret. Takes the same time wherever they differ.
    pub fn matches_bearer(&self, header: &[u8]) -> bool {
        let expected = self.bearer();
        let expected = expected.as_bytes();
        let differing = header.len() ^ expected.len();
        let bytes =
            expected.iter().enumerate().fold(0u8, |acc, (i, b)| acc | (b ^ header.get(i).copied().unwrap_or(0)));
        differing == 0 && bytes == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_compared_whole_and_never_shown() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        assert!(secret.matches_bearer(b"Bearer 0123456789abcdef"));
        for wrong in ["", "Bearer ", "Bearer 0123456789abcdeF", "Bearer 0123456789abcdef0", "0123456789abcdef"] {
            assert!(!secret.matches_bearer(wrong.as_bytes()), "{wrong}");
        }
        assert_eq!(format!("{secret:?}"), "Secret(***)");
        assert!(Secret::new("short").is_err());
        assert!(Secret::new("has a space in it").is_err());
    }
}
