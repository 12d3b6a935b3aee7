//! The state by examples.

use lake_proto::coordination::{LeaseId, ScopeOwner, SessionId, Stamp};
use lake_proto::kv::{Compare, Condition, Expected, Op, OpResult, Txn, TxnResult};
use lake_proto::limits::SESSION_WINDOW;

use super::State;
use super::changes::{Change, Compacted};
use super::command::{Action, Command, Outcome, Refusal};
use super::entry::Entry;
use super::restore::{Numbers, Part, StateBuilder};

impl State {
    /// Runs a transaction outside of any session.
    pub(crate) fn run(&mut self, term: u64, txn: &Txn) -> TxnResult {
        match self.apply(term, &Action::Txn(txn.clone()).unstamped()) {
            Outcome::Txn(result) => result,
            other => panic!("a transaction was answered with {other:?}"),
        }
    }
}

fn put(key: &str, value: &'static str) -> Txn {
    Txn { then: vec![Op::put(key, value)], ..Txn::default() }
}

#[test]
fn every_build_begins_with_the_same_state() {
    // What is changed here changes what old logs give: peers of two builds that apply one would not agree. It takes a command.
    let state = State::default();
    assert_eq!(state.numbers(), Numbers { revision: 0, feature_level: 1, compacted: 0 });
    assert_eq!(state.parts().collect::<Vec<_>>(), [Part::Quota { prefix: String::new(), bytes: 4 << 30 }]);
}

#[test]
fn a_deleted_and_recreated_key_is_not_the_old_one() {
    let mut state = State::default();
    let first = state.run(1, &Txn::cas("/lake/a", Expected::Absent, "1"));
    assert!(first.succeeded);
    assert!(state.run(1, &Txn::cas_delete("/lake/a", first.revision)).succeeded);
    let second = state.run(1, &Txn::cas("/lake/a", Expected::Absent, "1"));
    assert!(second.succeeded && second.revision > first.revision);
    let stale = state.run(1, &Txn::cas("/lake/a", Expected::ModRevision(first.revision), "2"));
    assert!(!stale.succeeded);
    assert_eq!(stale.observed[0].mod_revision, second.revision);
    assert_eq!(stale.observed[0].version, 1, "a new life of the key starts again at version 1");
}

#[test]
fn a_put_builds_on_what_is_there_by_then_and_not_on_what_its_compare_found() {
    let mut state = State::default();
    state.run(1, &put("/kv/a", "1"));
    let mut after = |revision, then, key: &str| {
        let txn = Txn { then, ..Txn::cas("/kv/a", Expected::ModRevision(revision), "") };
        assert!(state.run(1, &txn).succeeded);
        state.get(key).map(|entry| (entry.version, entry.create_revision, entry.mod_revision))
    };
    assert_eq!(after(1, vec![Op::put("/kv/a", "2"), Op::put("/kv/a", "3")], "/kv/a"), Some((3, 1, 2)));
    assert_eq!(after(2, vec![Op::delete("/kv/a"), Op::put("/kv/a", "4")], "/kv/a"), Some((1, 3, 3)));
    assert_eq!(after(3, vec![Op::put("/kv/b", "1")], "/kv/b"), Some((1, 4, 4)));
    assert_eq!(after(3, vec![Op::put("/kv/a", "5")], "/kv/a"), Some((2, 3, 5)));
}

#[test]
fn a_clone_copies_no_entry_and_a_write_behind_it_the_nodes_on_its_way() {
    let mut state = State::default();
    for thousand in 0..20 {
        let then = (0..1000).map(|n| Op::put(format!("/kv/{thousand:02}{n:03}"), "1")).collect();
        state.run(1, &Txn { then, ..Txn::default() });
    }
    let shares = |state: &State| state.entries.0.iter().map(Entry::shared_by).sum::<usize>();
    let before = shares(&state);
    let held: Vec<State> = (0..100).map(|_| state.clone()).collect();
    assert_eq!(shares(&state), before);
    state.run(1, &put("/kv/10500", "2"));
    // There are three on it, of up to 64 entries, and the last one is shared by the map and its change.
    let copied = shares(&state) - before;
    assert!((20..=3 * 64 + 2).contains(&copied), "{copied} entries of 20,000");
    assert!(held.iter().all(|held| held.get("/kv/10500").is_some_and(|entry| entry.value == "1")));
}

#[test]
fn a_command_that_changes_nothing_raises_no_revision() {
    let mut state = State::default();
    state.run(1, &put("/kv/a", "1"));
    assert_eq!(state.run(1, &Txn { then: vec![Op::delete("/kv/none")], ..Txn::default() }).revision, 1);
    assert_eq!(state.run(1, &Txn { then: vec![Op::Get { key: "/kv/a".into() }], ..Txn::default() }).revision, 1);
    assert_eq!(state.run(1, &put("/kv/a", "1")).revision, 2, "a put is a change, also to the same value");
}

#[test]
fn operations_see_those_before_them_and_share_one_revision() {
    let mut state = State::default();
    let result = state.run(
        1,
        &Txn {
            then: vec![
                Op::put("/kv/a", "1"),
                Op::Put { key: "/kv/a".into(), value: "2".into(), return_previous: true, lease: None },
                Op::put("/kv/b", "3"),
                Op::List { prefix: "/kv/".into(), limit: 1 },
                Op::delete("/kv/b"),
                Op::Get { key: "/kv/b".into() },
            ],
            ..Txn::default()
        },
    );
    assert_eq!(result.revision, 1);
    let OpResult::Put { previous: Some(previous) } = &result.results[1] else { panic!("{result:?}") };
    assert_eq!((&previous.value[..], previous.version, previous.mod_revision), (&b"1"[..], 1, 1));
    let OpResult::List { entries, more: true } = &result.results[3] else { panic!("{result:?}") };
    assert_eq!((entries.len(), &entries[0].value[..]), (1, &b"2"[..]));
    assert_eq!(result.results[4], OpResult::Delete { deleted: true, previous: None });
    assert_eq!(result.results[5], OpResult::Get { entry: None });
    assert_eq!(state.get("/kv/a").map(|e| (e.version, e.create_revision)), Some((2, 1)));
}

#[test]
fn prefix_compares_and_the_entry_term() {
    let mut state = State::default();
    let when = |key: &str, condition| Txn {
        when: vec![Compare { key: key.into(), condition }],
        then: vec![Op::put("/kv/x", "x")],
        otherwise: vec![],
    };
    assert!(state.clone().run(1, &when("/kv/t/", Condition::PrefixEmpty)).succeeded);
    state.run(1, &put("/kv/t/a", "1"));
    state.run(1, &put("/kv/tb", "1"));
    let failed = state.clone().run(1, &when("/kv/t/", Condition::PrefixEmpty));
    assert!(!failed.succeeded);
    assert_eq!(failed.observed.len(), 1, "/kv/tb does not lie under /kv/t/");
    assert!(state.clone().run(1, &when("/kv/t/", Condition::PrefixUnchangedSince(1))).succeeded);
    assert!(!state.clone().run(1, &when("/kv/t", Condition::PrefixUnchangedSince(1))).succeeded);
    assert!(state.clone().run(7, &when("", Condition::EntryTerm(7))).succeeded);
    assert!(!state.clone().run(8, &when("", Condition::EntryTerm(7))).succeeded);
}

#[test]
fn lists_in_a_transaction_are_bounded_in_bytes() {
    let mut state = State::default();
    for i in 0..20 {
        let big = vec![0u8; 1 << 20];
        state.run(1, &Txn { then: vec![Op::put(format!("/kv/{i:02}"), big)], ..Txn::default() });
    }
    let lists = vec![Op::List { prefix: "/kv/".into(), limit: 1000 }; 20];
    let result = state.run(1, &Txn { then: lists, ..Txn::default() });
    let held: usize = result
        .results
        .iter()
        .map(|r| match r {
            OpResult::List { entries, more: true } => entries.len(),
            other => panic!("every list must say that there is more: {other:?}"),
        })
        .sum();
    assert!((20..=28).contains(&held), "{held} entries of 1 MiB; one per list is always returned");
}

// ---- leases, scopes, sessions, changes, quotas --------------------------------------------------------------------

fn act(state: &mut State, action: Action) -> Outcome {
    state.apply(1, &action.unstamped())
}

fn grant(state: &mut State) -> LeaseId {
    let outcome = act(state, Action::GrantLease { ttl_ms: 5_000, holder: "a test".into() });
    let Outcome::Granted { id } = outcome else { panic!("{outcome:?}") };
    id
}

fn open_session(state: &mut State) -> SessionId {
    let outcome = act(state, Action::OpenSession { ttl_ms: 60_000, holder: "a test".into() });
    let Outcome::Granted { id } = outcome else { panic!("{outcome:?}") };
    id
}

/// Every way to say what a state holds agrees with a state put together from its parts.
fn rebuilt(state: &State) -> State {
    let mut builder = StateBuilder::new(state.numbers());
    for part in state.parts() {
        builder.add(part).unwrap();
    }
    builder.build()
}

#[test]
fn a_state_that_is_put_together_has_leaves_that_are_full() {
    let mut state = State::default();
    for thousand in 0..20 {
        let then = (0..1000).map(|n| Op::put(format!("/kv/{thousand:02}{n:03}"), "1")).collect();
        state.run(1, &Txn { then, ..Txn::default() });
    }
    let restored = rebuilt(&state);
    assert_eq!(restored, state);
    assert_eq!(restored.digest(), state.digest());
    // A write copies the leaf that its key is in: each entry there is then shared once more.
    let shares = |state: &State| state.entries.0.iter().map(Entry::shared_by).collect::<Vec<_>>();
    let copied = |mut state: State| {
        let (held, before) = (state.clone(), shares(&state));
        state.run(1, &put("/kv/10500", "2"));
        let after = shares(&held);
        before.iter().zip(&after).skip(10_400).take(200).filter(|(before, after)| after > before).count()
    };
    let (split, full) = (copied(state), copied(restored));
    assert!(split <= 44 && full >= 56, "of 64: {split} where they came in order, {full} put together");
}

#[test]
fn a_change_of_one_key_is_kept_where_the_changes_are() {
    assert!(size_of::<Change>() <= 32, "{} bytes, of which 100,000 may be kept", size_of::<Change>());
    let mut state = State::default();
    state.run(1, &put("/kv/a", "1"));
    state.run(1, &Txn { then: vec![Op::put("/kv/b", "1"), Op::delete("/kv/a")], ..Txn::default() });
    state.run(1, &Txn { then: vec![Op::delete("/kv/b")], ..Txn::default() });
    let changed = |change: &Change| change.events().iter().map(|e| (e.key().to_owned(), e.is_put())).collect();
    let kept: Vec<Vec<(String, bool)>> = state.changes().from(1).unwrap().map(changed).collect();
    let [a, b] = ["/kv/a", "/kv/b"].map(str::to_owned);
    assert_eq!(kept, [vec![(a.clone(), true)], vec![(a, false), (b.clone(), true)], vec![(b, false)]]);
    assert_eq!(state, rebuilt(&state));
}

#[test]
fn a_lease_takes_its_keys_and_scopes_with_it() {
    let mut state = State::default();
    let lease = grant(&mut state);
    assert_eq!(lease, 1, "the id is the revision");
    let owner = ScopeOwner::Lease(lease);
    let done = state.run(
        1,
        &Txn {
            when: vec![Compare::lease_alive(lease), Compare::scope_free("/t", Some(owner.clone()))],
            then: vec![
                Op::put_leased("/kv/a", "1", lease),
                Op::put_leased("/kv/b", "1", lease),
                Op::AcquireScope { path: "/t".into(), owner },
            ],
            ..Txn::default()
        },
    );
    assert_eq!(done.results[2], OpResult::AcquireScope { fence: 2 });
    // A key put again without the lease no longer hangs on it.
    state.run(1, &Txn { then: vec![Op::put("/kv/b", "2")], ..Txn::default() });
    assert_eq!(state.leases(0).map(|l| l.keys).collect::<Vec<_>>(), [1]);
    assert_eq!(state, rebuilt(&state));

    assert_eq!(
        act(&mut state, Action::ExpireLeases { leases: vec![lease], term: 2 }),
        Outcome::Ended { revision: 3, existed: false },
        "a deposed leader's step"
    );
    assert_eq!(
        act(&mut state, Action::ExpireLeases { leases: vec![lease, 99], term: 1 }),
        Outcome::Ended { revision: 4, existed: true }
    );
    assert_eq!((state.get("/kv/a"), state.get("/kv/b").is_some(), state.counts()), (None, true, (0, 0, 0)));
    let last = state.changes().from(4).unwrap().collect::<Vec<_>>();
    assert_eq!(last.len(), 1);
    assert_eq!(last[0].events().iter().map(|e| (e.key(), e.key_value())).collect::<Vec<_>>(), [("/kv/a", None)]);

    let zombie =
        Txn { when: vec![Compare::lease_alive(lease)], then: vec![Op::put("/kv/c", "late")], ..Txn::default() };
    assert!(!state.run(1, &zombie).succeeded);
    assert_eq!(state, rebuilt(&state));
}

#[test]
fn a_scope_in_the_way_is_named_and_a_takeover_has_a_higher_fence() {
    let mut state = State::default();
    let acquire = |path: &str, owner: &ScopeOwner| Txn {
        when: vec![Compare::scope_free(path, Some(owner.clone()))],
        then: vec![Op::AcquireScope { path: path.into(), owner: owner.clone() }],
        ..Txn::default()
    };
    let (one, two) = (ScopeOwner::Procedure("one".into()), ScopeOwner::Procedure("two".into()));
    let first = state.run(1, &acquire("/a/b", &one));
    assert_eq!(first.results, [OpResult::AcquireScope { fence: 1 }]);
    let again = state.run(1, &acquire("/a/b", &one));
    assert_eq!((again.revision, &again.results), (1, &first.results), "it is held already, since the first time");
    let refused = state.run(1, &acquire("/a", &two));
    assert!(!refused.succeeded);
    assert_eq!(refused.conflicts.iter().map(|s| (s.path.as_str(), &s.owner)).collect::<Vec<_>>(), [("/a/b", &one)]);
    assert!(state.run(1, &acquire("/a/bc", &two)).succeeded);
    assert_eq!(state, rebuilt(&state));

    let release = Txn { then: vec![Op::ReleaseScope { path: "/a/b".into(), owner: one }], ..Txn::default() };
    assert_eq!(state.run(1, &release).results, [OpResult::ReleaseScope { released: true }]);
    assert_eq!(state.run(1, &release).results, [OpResult::ReleaseScope { released: false }]);
    let taken = state.run(1, &acquire("/a", &two));
    assert!(matches!(taken.results[0], OpResult::AcquireScope { fence } if fence > 1), "{taken:?}");

    let dead = ScopeOwner::Lease(77);
    assert!(!state.run(1, &acquire("/z", &dead)).succeeded, "a lease that is not alive owns nothing");
}

#[test]
fn a_repeated_request_gets_the_first_answer_and_changes_nothing() {
    let mut state = State::default();
    let session = open_session(&mut state);
    let put = |sequence, lowest_unanswered, value: &'static str| Command {
        stamp: Some(Stamp { session, sequence, lowest_unanswered }),
        proposed_unix_ms: 0,
        action: Action::Txn(Txn { then: vec![Op::put("/kv/a", value)], ..Txn::default() }),
    };
    let second = state.apply(1, &put(2, 1, "2"));
    let first = state.apply(1, &put(1, 1, "1"));
    assert_ne!(first, second, "requests run in the order they come");
    assert_eq!(state, rebuilt(&state));
    let before = state.clone();
    assert_eq!(state.apply(1, &put(2, 1, "2")), second);
    assert_eq!(state.apply(1, &put(1, 1, "1")), first);
    assert_eq!(state, before);

    // What the client was answered is forgotten, and never run again.
    state.apply(1, &put(3, 3, "3"));
    assert_eq!(state.apply(1, &put(2, 1, "2")), Outcome::Refused(Refusal::SequenceAnswered { sequence: 2 }));
    assert_eq!(
        state.apply(1, &put(3 + SESSION_WINDOW, 3, "4")),
        Outcome::Refused(Refusal::WindowFull { sequence: 3 + SESSION_WINDOW })
    );
    assert_eq!(state.get("/kv/a").unwrap().value, "3");

    act(&mut state, Action::CloseSession { session });
    assert_eq!(state.apply(1, &put(3, 3, "3")), Outcome::Refused(Refusal::SessionExpired { session }));
    assert_eq!(state.apply(1, &put(9, 3, "9")), Outcome::Refused(Refusal::SessionExpired { session }));
    assert_eq!(state, rebuilt(&state));
}

#[test]
fn a_large_answer_is_kept_as_branch_revision_and_mod_revisions() {
    let mut state = State::default();
    state.run(1, &put("/kv/big", Box::leak("x".repeat(8 << 10).into_boxed_str())));
    let session = open_session(&mut state);
    let command = Command {
        stamp: Some(Stamp { session, sequence: 1, lowest_unanswered: 1 }),
        proposed_unix_ms: 0,
        action: Action::Txn(Txn {
            then: vec![Op::Put { key: "/kv/big".into(), value: "y".into(), return_previous: true, lease: None }],
            ..Txn::default()
        }),
    };
    let Outcome::Txn(first) = state.apply(1, &command) else { panic!() };
    assert_eq!(first.reduced, None);
    let Outcome::Txn(again) = state.apply(1, &command) else { panic!() };
    assert_eq!((again.revision, again.succeeded, again.results.len()), (first.revision, true, 0));
    assert_eq!(again.reduced.unwrap().mod_revisions, [1]);
}

#[test]
fn changes_are_one_event_per_key_and_trimmed_alike() {
    let mut state = State::default();
    state.run(
        1,
        &Txn {
            then: vec![
                Op::put("/kv/b", "1"),
                Op::put("/kv/a", "1"),
                Op::put("/kv/b", "2"),
                Op::put("/kv/gone", "1"),
                Op::delete("/kv/gone"),
            ],
            ..Txn::default()
        },
    );
    let seen: Vec<_> = state.changes().from(1).unwrap().flat_map(|c| c.events().to_vec()).collect();
    assert_eq!(seen.iter().map(|e| e.key()).collect::<Vec<_>>(), ["/kv/a", "/kv/b"]);
    assert_eq!(seen[1].key_value().unwrap().value, "2");

    let big = "x".repeat(1 << 20);
    for _ in 0..70 {
        state.run(1, &Txn { then: vec![Op::put("/kv/big", big.clone())], ..Txn::default() });
    }
    let oldest = state.changes().oldest();
    assert!(oldest > 1 && oldest < state.revision(), "{oldest}");
    assert_eq!(state.changes().from(oldest - 1).err(), Some(Compacted { oldest }));
    assert_eq!(state.changes().from(oldest).unwrap().next().unwrap().revision, oldest);
    assert_eq!(state.changes().from(state.revision() + 5).unwrap().count(), 0, "the future has not happened yet");
    assert_eq!(state, rebuilt(&state));
}

#[test]
fn at_a_quota_nothing_grows_and_deletes_work() {
    let mut state = State::default();
    act(&mut state, Action::SetQuota { prefix: "/kv/t/".into(), bytes: Some(20) });
    let outcome = |state: &mut State, key: &str, len: usize| {
        act(state, Action::Txn(Txn { then: vec![Op::put(key, vec![0; len])], ..Txn::default() }))
    };
    assert!(matches!(outcome(&mut state, "/kv/t/a", 13), Outcome::Txn(_)), "exactly at the limit");
    let before = state.clone();
    assert_eq!(
        outcome(&mut state, "/kv/t/b", 1),
        Outcome::Refused(Refusal::QuotaExceeded { prefix: "/kv/t/".into(), limit: 20, used: 20 })
    );
    assert_eq!(state, before);
    assert!(matches!(outcome(&mut state, "/kv/u", 100), Outcome::Txn(_)), "elsewhere there is room");
    assert!(matches!(outcome(&mut state, "/kv/t/a", 13), Outcome::Txn(_)), "in place");
    assert!(state.run(1, &Txn { then: vec![Op::delete("/kv/t/a")], ..Txn::default() }).succeeded);
    assert!(matches!(outcome(&mut state, "/kv/t/b", 13), Outcome::Txn(_)));
    let quota = state.quotas().find(|(prefix, _)| *prefix == "/kv/t/").unwrap().1;
    assert!(quota.used_bytes == 20 && quota.is_nearly_full());
    assert_eq!(state, rebuilt(&state));
    act(&mut state, Action::SetQuota { prefix: "/kv/t/".into(), bytes: None });
    assert!(matches!(outcome(&mut state, "/kv/t/c", 100), Outcome::Txn(_)));
}

#[test]
fn the_feature_level_only_rises() {
    let mut state = State::default();
    assert_eq!(
        act(&mut state, Action::SetFeatureLevel { level: 1, term: 1 }),
        Outcome::Refused(Refusal::FeatureLevel { level: 1 })
    );
    let before = state.clone();
    let asked_in_another_term = Action::SetFeatureLevel { level: 2, term: 7 };
    assert_eq!(act(&mut state, asked_in_another_term), Outcome::Ended { revision: 0, existed: false });
    assert_eq!(state, before);
    assert_eq!(act(&mut state, Action::SetFeatureLevel { level: 2, term: 1 }), Outcome::Set { revision: 1 });
    assert_eq!(state.feature_level(), 2);
}

#[test]
fn once_much_is_kept_further_results_are_kept_without_what_they_hold() {
    let mut state = State::default();
    let revision = state.run(1, &Txn { then: vec![Op::put("/kv/a", vec![7; 3900])], ..Txn::default() }).revision;
    let get = |session, sequence, lowest_unanswered| Command {
        stamp: Some(Stamp { session, sequence, lowest_unanswered }),
        proposed_unix_ms: 0,
        action: Action::Txn(Txn { then: vec![Op::Get { key: "/kv/a".into() }], ..Txn::default() }),
    };
    let mut sessions = Vec::new();
    for _ in 0..70 {
        let opened = act(&mut state, Action::OpenSession { ttl_ms: 5000, holder: String::new() });
        let Outcome::Granted { id } = opened else { panic!("{opened:?}") };
        (1..=256).for_each(|sequence| drop(state.apply(1, &get(id, sequence, 1))));
        sessions.push(id);
    }
    let again = |state: &mut State, session, sequence| match state.apply(1, &get(session, sequence, 1)) {
        Outcome::Txn(result) => result,
        other => panic!("{other:?}"),
    };
    assert!(again(&mut state, sessions[0], 256).reduced.is_none());
    let reduced = again(&mut state, sessions[69], 256);
    assert_eq!((reduced.succeeded, reduced.results.len()), (true, 0));
    assert!(reduced.reduced.unwrap().mod_revisions.is_empty() && reduced.revision > revision);
    assert_eq!(state, rebuilt(&state));
    // What a client has been answered makes room.
    let first = state.apply(1, &get(sessions[69], 257, 257));
    for session in &sessions[..2] {
        state.apply(1, &get(*session, 257, 257));
    }
    assert_eq!(state.apply(1, &get(sessions[69], 258, 257)), first);
    assert!(again(&mut state, sessions[69], 258).reduced.is_none());
}
