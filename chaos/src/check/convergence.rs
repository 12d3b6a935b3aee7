//! Once everything is healed: do the peers agree again, and is all that was acknowledged still there?
//!
//! The runner looks and writes down the [`Facts`]; what they mean is said here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::outcome::{Finding, Findings, Outcome};
use super::verdict::Verdict;

/// Its name in results.
pub const NAME: &str = "convergence";
/// How long the peers may take to agree on a leader, in milliseconds.
pub const LEADER_WITHIN_MS: u64 = 10_000;
/// Where the machine stood still for so long meanwhile, who did not come back shows nothing, in milliseconds.
pub const STOOD_STILL_MS: u64 = 10_000;

/// What the runner saw after it had ended all faults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Milliseconds from healing until all peers named the same leader; none if they did not while they were watched. Those in which the
    /// machine stood still are not among them.
    pub leader_after_ms: Option<u64>,
    /// How long they were watched, in milliseconds; the same.
    pub watched_ms: u64,
    /// For how long in all the machine stood still, in milliseconds, while peers and query nodes were waited for.
    #[serde(default)]
    pub stood_still_ms: u64,
    pub peers: Vec<Peer>,
    /// Query nodes that did not serve again; each in a few words.
    #[serde(default)]
    pub query_nodes_away: Vec<String>,
    /// Acknowledged writes that were looked for.
    pub looked_for: u64,
    /// Of these, what was not found as it must be; each in a few words.
    pub not_found: Vec<String>,
}

/// One peer after healing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub id: u64,
    /// What it answered; else why it did not.
    pub state: Result<State, String>,
    /// Why it need not be there: it was removed, or refuses to serve because of a fault that it must not survive.
    pub excused: Option<String>,
}

/// What a peer has applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The log index at which the hash was taken.
    pub applied: u64,
    /// Of the replicated state at that index.
    pub hash: String,
}

/// Judges what was seen.
pub fn check(facts: &Facts) -> Outcome {
    let mut findings = Findings::default();
    let mut add = |kind: &str, what: String| findings.add(kind, || Finding::new(kind, what, Vec::new()));
    match facts.leader_after_ms {
        Some(ms) if ms <= LEADER_WITHIN_MS => {}
        Some(ms) => add("late leader", format!("the peers agreed on a leader only {ms} ms after all faults had ended")),
        None if facts.watched_ms >= LEADER_WITHIN_MS => {
            add(
                "no leader",
                format!("{} ms after all faults had ended the peers had no common leader", facts.watched_ms),
            );
        }
        None => {}
    }
    let had_time = facts.stood_still_ms < STOOD_STILL_MS;
    let mut hashes: BTreeMap<u64, Vec<(u64, &str)>> = BTreeMap::new();
    for peer in facts.peers.iter().filter(|peer| peer.excused.is_none()) {
        match &peer.state {
            // Nothing is the same of all peers, and says nothing.
            Ok(state) if state.hash.is_empty() => {}
            Ok(state) => hashes.entry(state.applied).or_default().push((peer.id, &state.hash)),
            Err(why) if had_time => add("peer gone", format!("peer {} did not come back: {why}", peer.id)),
            Err(_) => {}
        }
    }
    for (applied, peers) in &hashes {
        if peers.iter().any(|(_, hash)| *hash != peers[0].1) {
            let hashes: Vec<String> = peers.iter().map(|(id, hash)| format!("peer {id} {hash}")).collect();
            add("states differ", format!("at index {applied} the peers' states differ: {}", hashes.join(", ")));
        }
    }
    for what in facts.query_nodes_away.iter().filter(|_| had_time) {
        add("query node gone", format!("after all faults had ended a query node did not come back: {what}"));
    }
    for what in &facts.not_found {
        add("acknowledged and gone", what.clone());
    }
    // At one index: two halves that each agree are no cluster that does.
    let compared = hashes.values().map(Vec::len).filter(|peers| *peers > 1).max().unwrap_or(0);
    let expected = facts.peers.iter().filter(|peer| peer.excused.is_none()).count();
    let otherwise = if facts.leader_after_ms.is_none() {
        let Facts { watched_ms, stood_still_ms, .. } = facts;
        Verdict::Unknown(format!(
            "the peers were watched for {watched_ms} ms only, besides {stood_still_ms} in which this machine stood still, and had no leader yet"
        ))
    } else if let (false, Some(what)) = (had_time, away(facts)) {
        Verdict::Unknown(format!("{what}, but this machine stood still for {} ms", facts.stood_still_ms))
    } else if expected == 0 {
        Verdict::Unknown("there was no peer left that had to agree with anybody".into())
    } else if expected > 1 && compared < expected {
        Verdict::Unknown(format!("the hashes of {compared} of {expected} peers could be compared at one index"))
    } else if facts.looked_for == 0 {
        Verdict::Unknown("no acknowledged write was looked for after healing".into())
    } else {
        Verdict::Valid
    };
    let mut outcome = findings.conclude(NAME, otherwise).with("peers compared", compared);
    if facts.stood_still_ms > 0 {
        outcome.figures.insert("machine stood still for ms".into(), facts.stood_still_ms);
    }
    outcome.figures.insert("writes looked for".into(), facts.looked_for);
    outcome.figures.extend(facts.leader_after_ms.map(|ms| ("one leader after ms".to_owned(), ms)));
    outcome
}

/// Who is not back, in a few words.
fn away(facts: &Facts) -> Option<String> {
    let peers = facts.peers.iter().filter(|peer| peer.excused.is_none());
    let mut gone = peers.filter_map(|peer| Some(format!("peer {}: {}", peer.id, peer.state.as_ref().err()?)));
    gone.next().or_else(|| facts.query_nodes_away.first().cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        let peer = |id, hash: &str| Peer { id, state: Ok(State { applied: 9, hash: hash.into() }), excused: None };
        Facts {
            leader_after_ms: Some(700),
            watched_ms: 700,
            stood_still_ms: 0,
            peers: vec![peer(1, "a"), peer(2, "a"), peer(3, "a")],
            query_nodes_away: vec![],
            looked_for: 5,
            not_found: vec![],
        }
    }

    fn with(change: impl FnOnce(&mut Facts)) -> Verdict {
        let mut facts = facts();
        change(&mut facts);
        check(&facts).verdict
    }

    #[test]
    fn a_query_node_that_does_not_come_back_is_a_violation() {
        let verdict = with(|f| f.query_nodes_away = vec!["query node 2 ended with exit code 101".into()]);
        assert!(matches!(&verdict, Verdict::Violation(what) if what.contains("query node 2")), "{verdict:?}");
    }

    #[test]
    fn peers_that_agree_are_valid() {
        assert_eq!(with(|_| ()), Verdict::Valid);
        let excused = |f: &mut Facts| {
            f.peers[2].state = Err("refuses: log.db is damaged".into());
            f.peers[2].excused = Some("its log was damaged".into());
        };
        assert_eq!(with(excused), Verdict::Valid);
    }

    #[test]
    fn what_contradicts_the_promise_is_a_violation() {
        let changes: [fn(&mut Facts); 5] = [
            |f| f.leader_after_ms = Some(10_001),
            |f| (f.leader_after_ms, f.watched_ms) = (None, 10_000),
            |f| f.peers[1].state = Ok(State { applied: 9, hash: "b".into() }),
            |f| f.peers[1].state = Err("connection refused".into()),
            |f| f.not_found.push("key 3: 7 was acknowledged, 6 is there".into()),
        ];
        for change in changes {
            let verdict = with(change);
            assert!(matches!(verdict, Verdict::Violation(_)), "{verdict:?}");
        }
    }

    #[test]
    fn what_was_not_looked_at_is_unknown() {
        let changes: [fn(&mut Facts); 8] = [
            |f| (f.leader_after_ms, f.watched_ms) = (None, 100),
            |f| (f.peers[1].state, f.stood_still_ms) = (Err("it does not answer".into()), STOOD_STILL_MS),
            |f| {
                f.query_nodes_away = vec!["query node 2 does not serve within 40 s".into()];
                f.stood_still_ms = STOOD_STILL_MS;
            },
            |f| f.peers[1].state = Ok(State { applied: 8, hash: "a".into() }),
            |f| f.peers.iter_mut().for_each(|peer| peer.state = Ok(State { applied: 0, hash: String::new() })),
            |f| f.peers.iter_mut().for_each(|peer| peer.excused = Some("its log was damaged".into())),
            // Two that agree lag behind three that agree.
            |f| {
                let behind = State { applied: 8, hash: "b".into() };
                f.peers.extend([4, 5].map(|id| Peer { id, state: Ok(behind.clone()), excused: None }));
            },
            |f| f.looked_for = 0,
        ];
        for change in changes {
            let verdict = with(change);
            assert!(matches!(verdict, Verdict::Unknown(_)), "{verdict:?}");
        }
    }
}
