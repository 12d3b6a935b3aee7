//! Leases, scopes and sessions as plain values (semantics, sections 4 to 6).

use std::fmt;

use crate::kv::{Invalid, Revision};
use crate::limits::*;
use crate::v1;

/// A lease. The id is its fence: the revision at which it was granted, never used twice.
pub type LeaseId = u64;
/// A session: the revision at which it was opened.
pub type SessionId = u64;

/// Who holds a scope.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScopeOwner {
    /// The scope ends with the lease.
    Lease(LeaseId),
    /// The scope stays until a transaction releases it.
    Procedure(String),
}

impl ScopeOwner {
    /// Checks the limits.
    ///
    /// # Errors
    /// A procedure id that is empty or too long.
    pub fn validate(&self) -> Result<(), Invalid> {
        match self {
            ScopeOwner::Procedure(id) if id.is_empty() || id.len() > MAX_HOLDER_BYTES => {
                Err(Invalid::ProcedureId { id: id.chars().take(64).collect() })
            }
            _ => Ok(()),
        }
    }

    /// An owner that must be there.
    pub(crate) fn required(owner: Option<v1::ScopeOwner>) -> Result<Self, Invalid> {
        owner.ok_or(Invalid::Missing("scope's owner"))?.try_into()
    }
}

impl fmt::Display for ScopeOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScopeOwner::Lease(id) => write!(f, "lease {id}"),
            ScopeOwner::Procedure(id) => write!(f, "procedure {id}"),
        }
    }
}

/// A claim on a path of the hierarchy (semantics, section 6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    pub path: String,
    pub owner: ScopeOwner,
    /// The revision at which it was acquired.
    pub fence: Revision,
    /// The leader's wall clock when that was proposed, in milliseconds since 1970. Information only.
    pub acquired_unix_ms: u64,
}

/// Which request of a session a mutation is (semantics, section 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub session: SessionId,
    /// From 1, by 1, per session.
    pub sequence: u64,
    /// Results of sequences below are forgotten.
    pub lowest_unanswered: u64,
}

impl Stamp {
    /// Checks that the numbers can be.
    ///
    /// # Errors
    /// A number of 0, or a sequence below the lowest unanswered.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.session == 0 || self.lowest_unanswered == 0 || self.sequence < self.lowest_unanswered {
            return Err(Invalid::Stamp {
                session: self.session,
                sequence: self.sequence,
                lowest: self.lowest_unanswered,
            });
        }
        Ok(())
    }
}

/// Checks a scope's path: `/`, or parts each behind a `/`, none empty, at most [`MAX_SCOPE_DEPTH`].
///
/// # Errors
/// When it is none, or longer than a key may be.
pub fn validate_scope_path(path: &str) -> Result<(), Invalid> {
    let parts = match path.strip_prefix('/') {
        Some("") => return Ok(()),
        Some(parts) if path.len() <= MAX_KEY_BYTES => parts,
        _ => return Err(Invalid::ScopePath { path: path.chars().take(64).collect() }),
    };
    if parts.split('/').any(str::is_empty) || parts.split('/').count() > MAX_SCOPE_DEPTH {
        return Err(Invalid::ScopePath { path: path.chars().take(64).collect() });
    }
    Ok(())
}

/// Checks a lease's time to live.
///
/// # Errors
/// Outside [`LEASE_TTL_MS`].
pub fn validate_lease_ttl(ttl_ms: u64) -> Result<(), Invalid> {
    validate_ttl("lease", ttl_ms, LEASE_TTL_MS)
}

/// Checks a session's time to live.
///
/// # Errors
/// Outside [`SESSION_TTL_MS`].
pub fn validate_session_ttl(ttl_ms: u64) -> Result<(), Invalid> {
    validate_ttl("session", ttl_ms, SESSION_TTL_MS)
}

fn validate_ttl(what: &'static str, ttl_ms: u64, (min_ms, max_ms): (u64, u64)) -> Result<(), Invalid> {
    if (min_ms..=max_ms).contains(&ttl_ms) { Ok(()) } else { Err(Invalid::Ttl { what, ttl_ms, min_ms, max_ms }) }
}

/// Checks the words that say who holds a lease or a session.
///
/// # Errors
/// When they are too long.
pub fn validate_holder(holder: &str) -> Result<(), Invalid> {
    if holder.len() > MAX_HOLDER_BYTES {
        return Err(Invalid::Holder { what: "the holder's name", len: holder.len() });
    }
    Ok(())
}

// ---- to and from the wire -------------------------------------------------------------------------------------

impl From<ScopeOwner> for v1::ScopeOwner {
    fn from(owner: ScopeOwner) -> Self {
        use v1::scope_owner::Owner as Wire;
        let owner = match owner {
            ScopeOwner::Lease(id) => Wire::Lease(id),
            ScopeOwner::Procedure(id) => Wire::Procedure(id),
        };
        v1::ScopeOwner { owner: Some(owner) }
    }
}

impl TryFrom<v1::ScopeOwner> for ScopeOwner {
    type Error = Invalid;

    fn try_from(owner: v1::ScopeOwner) -> Result<Self, Invalid> {
        use v1::scope_owner::Owner as Wire;
        Ok(match owner.owner.ok_or(Invalid::Missing("scope's owner"))? {
            Wire::Lease(id) => ScopeOwner::Lease(id),
            Wire::Procedure(id) => ScopeOwner::Procedure(id),
        })
    }
}

impl From<Scope> for v1::Scope {
    fn from(scope: Scope) -> Self {
        v1::Scope {
            path: scope.path,
            owner: Some(scope.owner.into()),
            fence: scope.fence,
            acquired_unix_ms: scope.acquired_unix_ms,
        }
    }
}

impl TryFrom<v1::Scope> for Scope {
    type Error = Invalid;

    fn try_from(scope: v1::Scope) -> Result<Self, Invalid> {
        Ok(Scope {
            path: scope.path,
            owner: ScopeOwner::required(scope.owner)?,
            fence: scope.fence,
            acquired_unix_ms: scope.acquired_unix_ms,
        })
    }
}

impl From<Stamp> for v1::Stamp {
    fn from(s: Stamp) -> Self {
        v1::Stamp { session: s.session, sequence: s.sequence, lowest_unanswered: s.lowest_unanswered }
    }
}

impl From<v1::Stamp> for Stamp {
    fn from(s: v1::Stamp) -> Self {
        Stamp { session: s.session, sequence: s.sequence, lowest_unanswered: s.lowest_unanswered }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_paths_have_no_empty_parts() {
        for good in ["/", "/a", "/a/b c/ü"] {
            assert_eq!(validate_scope_path(good), Ok(()), "{good}");
        }
        let deep = "/a".repeat(MAX_SCOPE_DEPTH + 1);
        for bad in ["", "a", "//", "/a/", "/a//b", deep.as_str()] {
            assert!(matches!(validate_scope_path(bad), Err(Invalid::ScopePath { .. })), "{bad}");
        }
    }

    #[test]
    fn stamps_count_from_one() {
        let stamp = |session, sequence, lowest_unanswered| Stamp { session, sequence, lowest_unanswered }.validate();
        assert_eq!(stamp(1, 1, 1), Ok(()));
        assert_eq!(stamp(9, 300, 45), Ok(()));
        for (session, sequence, lowest) in [(0, 1, 1), (1, 1, 0), (1, 1, 2)] {
            assert!(stamp(session, sequence, lowest).is_err());
        }
    }

    #[test]
    fn times_to_live_have_bounds() {
        assert_eq!(validate_lease_ttl(1000), Ok(()));
        assert!(validate_lease_ttl(999).is_err() && validate_lease_ttl(60_001).is_err());
        assert!(validate_session_ttl(4_999).is_err() && validate_session_ttl(3_600_000).is_ok());
    }
}
