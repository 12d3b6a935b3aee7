//! How long a run on an existing cluster may take to end once somebody has asked for it: the sum of its own bounds. Whoever ends it before
//! that leaves the cluster hurt. It takes so long only where every command hangs; mostly it is a few seconds.
//!
//! ```text
//!   what is looked at before it begins, or: the command under way, and the clients' operations
//!   everything is mended (once more if this program has a bug)  ->  peers have a leader, query nodes serve  ->  all is read
//!   what the run has made is removed  ->  logs are collected  ->  it is judged
//! ```

use std::time::Duration;

use super::heal::{LOOK_FOR_LEADER, SAME_WITHIN};
use super::hosts::{CLEAN_WITHIN, SERVES_WITHIN};
use super::pulse::MAX_LOST;
use super::schemas::{ASK_WITHIN, DROPPED_WITHIN};
use super::whose::KNOWN_WITHIN;
use super::{GRACE, HURRIED_READ_WITHIN};
use crate::check::Budget;
use crate::hosts::{COMMAND_WITHIN, Hosts, MEND};
use crate::probe::ASK_TIMEOUT;

/// For what has no bound of its own: files that are written.
const BESIDE: Duration = Duration::from_secs(60);

/// See the module. `operation_timeout`: how long one operation of the run's clients may take.
pub fn ends_within(hosts: &Hosts, operation_timeout: Duration) -> Duration {
    let processes = u32::try_from(hosts.all().len()).unwrap_or(u32::MAX);
    let commands = |each: usize| COMMAND_WITHIN * u32::try_from(each).unwrap_or(u32::MAX).saturating_mul(processes);
    // Of peers and query nodes whether they serve, of schemas whether they are there; keys are listed, and some written.
    let looked_at = ASK_TIMEOUT * (processes + 1) + KNOWN_WITHIN + ASK_WITHIN + CLEAN_WITHIN * 2;
    let interrupted = COMMAND_WITHIN + operation_timeout + GRACE;
    let mended = commands(2 * MEND.len());
    let healed = LOOK_FOR_LEADER + MAX_LOST + SERVES_WITHIN + HURRIED_READ_WITHIN + SAME_WITHIN + MAX_LOST;
    let removed = DROPPED_WITHIN + CLEAN_WITHIN * 2 + commands(1);
    looked_at + interrupted + mended + healed + removed + Budget::TIME + BESIDE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_end_is_shorter_than_the_commands_that_are_run_in_it() {
        let of = |peers: u32| {
            let peers = (1..=peers).map(|id| format!("[[peers]]\nid = {id}\naddress = \"db{id}:9191\"\n"));
            let hosts: Hosts = toml::from_str(&format!("{}[commands]\n", peers.collect::<String>())).unwrap();
            ends_within(&hosts, Duration::from_secs(3))
        };
        let one = COMMAND_WITHIN * u32::try_from(MEND.len()).unwrap();
        assert!(of(1) > COMMAND_WITHIN + one + HURRIED_READ_WITHIN + DROPPED_WITHIN);
        assert!(of(32) > of(1) + one * 31);
    }
}
