//! The limits of the contract (semantics, section 1). Over a limit: `InvalidArgument` that names it.

/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 4 << 10;
/// Largest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Most compares and operations in one transaction, counted together over both branches.
pub const MAX_TXN_OPS: usize = 1024;
/// Largest transaction, in bytes of its keys and values.
pub const MAX_TXN_BYTES: usize = 8 << 20;
/// Most keys in one BatchGet.
pub const MAX_BATCH_GET_KEYS: usize = 1024;
/// Most entries in one page of a listing, and in one list operation inside a transaction.
pub const MAX_PAGE_ENTRIES: usize = 1000;
/// A page ends once its keys and values reach this many bytes.
pub const MAX_PAGE_BYTES: usize = 1 << 20;

/// Keys under this prefix are lake's own: every write to one is covered by a compare on that very key.
pub const GUARDED_PREFIX: &str = "/lake/";
/// Keys under this prefix are the users' own and may be written blindly.
pub const USER_PREFIX: &str = "/kv/";
