//! Runs with a known answer for what judges the run and not its workload: how much was served, whether faults took effect,
//! what the peers are like in the end, and whether any ended by itself.

use lake_chaos::check::availability::{self, Limits};
use lake_chaos::check::{Death, Verdict, convergence, deaths, faults};
use lake_chaos::history::{Action, Fault, History, Installation, Kind, Operation, Phase, Process, Register, Workload};
use proptest::collection::vec;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
/// Seconds that a fault lasts at most, and in which all is well again behind it, as recovery is excused for five.
const FAULT: u64 = 8;
const RECOVERY: u64 = 4;

/// How a read of one second ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ended {
    Ok,
    Refused,
    Unknown,
}

fn fault(name: &str, phase: Phase, installation: Option<Installation>, time_ns: u64) -> Operation {
    let fault = Fault { name: name.into(), phase, target: "1".into(), installation };
    Operation::new(Process::Nemesis, Kind::Info, time_ns, Action::Fault(fault))
}

fn proof() -> Installation {
    Installation::Installed("pid 7 is gone".into())
}

/// A read each second that ends as told, under faults from one second to another.
fn served(ends: &[Ended], faults: &[(u64, u64)]) -> Verdict {
    let read = |value| Action::Register(Register::Read { key: 1.into(), value });
    let mut operations = Vec::new();
    for (second, end) in (0_u64..).zip(ends) {
        let at = second * SECOND;
        for (from, to) in faults {
            for (when, phase) in [(from, Phase::Start), (to, Phase::Stop)] {
                if *when == second {
                    operations.push(fault("kill", phase, None, at));
                    operations.push(fault("kill", phase, Some(proof()), at));
                }
            }
        }
        let process = Process::Client(second);
        operations.push(Operation::new(process, Kind::Invoke, at, read(None)));
        let (kind, refusal) = match end {
            Ended::Ok => (Kind::Ok, None),
            Ended::Refused => (Kind::Fail, Some("it is 3".to_owned())),
            Ended::Unknown => (Kind::Info, None),
        };
        let ended = Operation::new(process, kind, at + 1, read(Some(1)));
        operations.push(Operation { refusal, ..ended });
    }
    availability::check(&History::new(operations).unwrap(), &Limits::of(Workload::Register), 0).verdict
}

/// What is well between faults and may be anything under them: gaps between faults, how long each lasts, and how reads under
/// faults end. Behind the last there is a minute.
fn timeline() -> impl Strategy<Value = (Vec<Ended>, Vec<(u64, u64)>)> {
    let under = prop::sample::select(&[Ended::Ok, Ended::Refused, Ended::Unknown][..]);
    let calm = prop::sample::select(&[Ended::Ok, Ended::Ok, Ended::Refused][..]);
    vec((10_u64..20, 1..=FAULT, vec(under, (FAULT + RECOVERY) as usize), vec(calm, 20)), 1..6).prop_map(|parts| {
        let (mut ends, mut faults) = (Vec::new(), Vec::new());
        for (gap, lasts, under, calm) in parts {
            ends.extend(calm.into_iter().take(gap as usize));
            // Whatever came before, a kind of operation that never succeeds has shown nothing.
            ends.push(Ended::Ok);
            let from = ends.len() as u64;
            faults.push((from, from + lasts));
            ends.extend(under.into_iter().take((lasts + RECOVERY) as usize));
        }
        ends.extend(std::iter::repeat_n(Ended::Ok, 60));
        (ends, faults)
    })
}

fn peer(id: u64, hash: &str) -> convergence::Peer {
    convergence::Peer { id, state: Ok(convergence::State { applied: 9, hash: hash.into() }), excused: None }
}

/// Peers that agree, some of which are excused and away; two at least are not.
fn agreeing() -> impl Strategy<Value = convergence::Facts> {
    (vec(any::<bool>(), 0..5), 0..=convergence::LEADER_WITHIN_MS, 1_u64..100).prop_map(|(excused, ms, looked_for)| {
        let mut peers = vec![peer(1, "a"), peer(2, "a")];
        for (id, excused) in (3..).zip(excused) {
            let mut peer = peer(id, "a");
            if excused {
                peer.state = Err("refuses: its log is damaged".into());
                peer.excused = Some("its log was damaged".into());
            }
            peers.push(peer);
        }
        convergence::Facts { leader_after_ms: Some(ms), watched_ms: ms, peers, looked_for, ..Default::default() }
    })
}

fn death(peer: u64, signal: Option<i32>, excused: bool) -> Death {
    let excused = excused.then(|| "its log was damaged".to_owned());
    Death { peer, how: "ended".into(), signal, excused, ..Death::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_served_between_faults_is_enough((ends, faults) in timeline()) {
        prop_assert_eq!(served(&ends, &faults), Verdict::Valid);
    }

    #[test]
    fn what_never_comes_back_behind_a_fault_is_found((mut ends, faults) in timeline(), silent in 31_usize..60) {
        let from = faults.last().unwrap().1 as usize;
        let to = (from + silent + 1).min(ends.len());
        ends[from..to].fill(Ended::Unknown);
        let verdict = served(&ends, &faults);
        prop_assert!(matches!(verdict, Verdict::Violation(_)), "{:?}", verdict);
    }

    #[test]
    fn what_is_not_answered_without_a_fault_shows_too_little(ends in vec(any::<bool>(), 40..200)) {
        // More than one of ten is not answered, and never for long.
        let ends: Vec<Ended> = ends.iter().enumerate().map(|(at, also)| match at % 5 == 0 || (at % 5 == 1 && *also) {
            true => Ended::Unknown,
            false => Ended::Ok,
        }).collect();
        let verdict = served(&ends, &[]);
        prop_assert!(matches!(verdict, Verdict::Unknown(_)), "{:?}", verdict);
    }

    #[test]
    fn each_fault_must_begin_and_end_with_effect_once(tries in vec((0..3_usize, 0..3_u8, 0..3_u8), 0..20)) {
        let names = ["kill", "clock", "snapshot"];
        let as_told = |which: u8| match which {
            0 => proof(),
            1 => Installation::Skipped("there is no such peer".into()),
            _ => Installation::Failed("it went on".into()),
        };
        let mut operations = Vec::new();
        for (at, (name, start, stop)) in (0..).zip(&tries) {
            operations.push(fault(names[*name], Phase::Start, Some(as_told(*start)), at * SECOND));
            operations.push(fault(names[*name], Phase::Stop, Some(as_told(*stop)), at * SECOND + 1));
        }
        let asked: Vec<String> = names.map(str::to_owned).into();
        let verdict = faults::check(&History::new(operations).unwrap(), &asked).verdict;
        let shown = |which| tries.iter().any(|(name, start, stop)| (*name, *start, *stop) == (which, 0, 0));
        match (0..names.len()).all(shown) {
            true => prop_assert_eq!(verdict, Verdict::Valid),
            false => prop_assert!(matches!(verdict, Verdict::Unknown(_)), "{:?}", verdict),
        }
    }

    #[test]
    fn peers_that_agree_in_the_end_are_valid(facts in agreeing()) {
        prop_assert_eq!(convergence::check(&facts).verdict, Verdict::Valid);
    }

    #[test]
    fn what_is_wrong_in_the_end_is_found(mut facts in agreeing(), which in 0..6, late in 1_u64..100_000) {
        match which {
            0 => facts.leader_after_ms = Some(convergence::LEADER_WITHIN_MS + late),
            1 => (facts.leader_after_ms, facts.watched_ms) = (None, convergence::LEADER_WITHIN_MS + late),
            2 => facts.peers[1] = peer(2, "b"),
            3 => facts.peers[1].state = Err("connection refused".into()),
            4 => facts.query_nodes_away.push("query node 1 ended".into()),
            _ => facts.not_found.push("key 3: 7 was acknowledged, and 6 is there".into()),
        }
        let verdict = convergence::check(&facts).verdict;
        prop_assert!(matches!(verdict, Verdict::Violation(_)), "{:?}", verdict);
    }

    #[test]
    fn what_was_not_looked_at_in_the_end_is_unknown(mut facts in agreeing(), which in 0..3, early in 0..convergence::LEADER_WITHIN_MS) {
        match which {
            0 => (facts.leader_after_ms, facts.watched_ms) = (None, early),
            1 => facts.peers[1].state = Ok(convergence::State { applied: 8, hash: "b".into() }),
            _ => facts.looked_for = 0,
        }
        let verdict = convergence::check(&facts).verdict;
        prop_assert!(matches!(verdict, Verdict::Unknown(_)), "{:?}", verdict);
    }

    #[test]
    fn who_ends_by_itself_is_found_and_who_is_ended_shows_nothing(
        excused in vec((1_u64..5, prop::sample::select(&[None, Some(6), Some(9), Some(11)][..])), 0..6),
        by_itself in prop::option::of(prop::sample::select(&[None, Some(6), Some(11)][..])),
        from_outside in prop::option::of(prop::sample::select(&[1, 2, 9, 15][..])),
    ) {
        let mut all: Vec<Death> = excused.into_iter().map(|(peer, signal)| death(peer, signal, true)).collect();
        all.extend(by_itself.map(|signal| death(7, signal, false)));
        all.extend(from_outside.map(|signal| death(8, Some(signal), false)));
        let verdict = deaths::check(&all).verdict;
        match (by_itself, from_outside) {
            (Some(_), _) => prop_assert!(matches!(verdict, Verdict::Violation(_)), "{:?}", verdict),
            (None, Some(_)) => prop_assert!(matches!(verdict, Verdict::Unknown(_)), "{:?}", verdict),
            (None, None) => prop_assert_eq!(verdict, Verdict::Valid),
        }
    }
}
