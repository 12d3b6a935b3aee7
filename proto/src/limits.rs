//! The limits of the contract (semantics, section 1). Over a limit: `InvalidArgument` that names it.

/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 4 << 10;
/// Largest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Most operations in one transaction, counted together over both branches; and most compares.
pub const MAX_TXN_OPS: usize = 1024;
/// Largest transaction, in bytes of its keys and values.
pub const MAX_TXN_BYTES: usize = 8 << 20;
/// Most keys in one BatchGet.
pub const MAX_BATCH_GET_KEYS: usize = 1024;
/// Most entries in one page of a listing, and in one list operation inside a transaction.
pub const MAX_PAGE_ENTRIES: usize = 1000;
/// A page ends once its keys and values reach this many bytes.
pub const MAX_PAGE_BYTES: usize = 1 << 20;

/// How many entries a page has at most for which so many were asked; 0 asks for as many as there can be.
pub fn page_limit(asked: u32) -> usize {
    match asked {
        0 => MAX_PAGE_ENTRIES,
        asked => (asked as usize).min(MAX_PAGE_ENTRIES),
    }
}

/// Keys under this prefix are lake's own: every write to one is covered by a compare on that very key.
pub const GUARDED_PREFIX: &str = "/lake/";
/// Keys under this prefix are the users' own and may be written blindly.
pub const USER_PREFIX: &str = "/kv/";

/// Most parts in a scope's path.
pub const MAX_SCOPE_DEPTH: usize = 32;
/// Longest name of a lease's or session's holder, and longest procedure id, in bytes.
pub const MAX_HOLDER_BYTES: usize = 256;
/// Shortest and longest time to live of a lease, in milliseconds (semantics, section 5).
pub const LEASE_TTL_MS: (u64, u64) = (1_000, 60_000);
/// Shortest and longest time a session may be silent, in milliseconds.
pub const SESSION_TTL_MS: (u64, u64) = (5_000, 3_600_000);
/// Requests of one session in flight (semantics, section 4).
pub const SESSION_WINDOW: u64 = 256;
/// Leases, sessions or scopes named in one message, and in one page of them.
pub const MAX_IDS: usize = 1000;
