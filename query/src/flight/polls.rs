//! Statements that are polled (PollFlightInfo): run by the node, whether their client stays or not, until their answer is fetched.
//!
//! It is so for every PollFlightInfo of a statement, without a header that asks for it: Flight's specification says that the call starts the
//! query, and who wants a query to run as its rows are taken has GetFlightInfo, which stays as it is. Commands about the catalog,
//! and statements about the session (BEGIN, COMMIT, SET), are answered at once as GetFlightInfo answers them.
//!
//! ```text
//! PollFlightInfo(command)    -> planned, registered -> running --- ended within `FIRST_WAIT` or later ---> kept | made | failed
//! PollFlightInfo(name)       -> waits up to `LATER_WAIT` for the end; each poll begins `KEPT_FOR` anew
//! running                    -> info (of a change with its ticket, of a query with none), the name, a progress if known, when it expires
//! kept    (a query)          -> info with the name as ticket; DoGet reads the spool ([`super::spool`])
//! made    (a change)         -> info with the ticket of its plan, which any node knows the outcome of
//! failed                     -> the error, as the status of each poll
//! fetched to the end | CancelFlightInfo | not polled for `KEPT_FOR` | shutdown -> gone, and its bytes are given back
//! ```
//! The name ([`super::ticket::Polled`]) is signed and says the node; another node sends polls and DoGet on to it, once. It is the descriptor to
//! poll by, the descriptor within the info, by which CancelFlightInfo knows a query that runs, and the ticket of what was kept.
//!
//! The deadline is that of `lake-timeout-ms`, else the configuration's: `grpc-timeout` is that of a call, which returns before it.
//!
//! Bounds: `MAX_POLLED` statements, of which those that hold nothing any more make room, the longest unpolled first; half of
//! `spill_limit_bytes`; `KEPT_FOR`; admission, for what runs; who fetches and takes nothing for `KEPT_FOR` loses the rows with an error,
//! and never sees an end too early.
//!
//! Failures:
//! - the node stops: a query fails with `Unavailable`, run it elsewhere; a change goes on to its end, as others do;
//! - the node is dead: `Unavailable`, naming it: a query's rows are lost, a change's ticket tells at any node and makes it once;
//! - the node was started anew, or the statement is gone: `NotFound`, with what may have become of it;
//! - the answer to the first poll is lost: the statement runs without a client; a query expires, and a change that was asked for
//!   anew is made again, unless it had an operation id (`lake-operation-id`);
//! - a client stays away: a query is cancelled after `KEPT_FOR`, a change goes on.
