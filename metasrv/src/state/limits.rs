//! The limits of the state: nothing is evicted, no command takes longer than it may, and changes are kept for as long as they have to
//! be.

use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, Condition, Op, Txn};

use super::command::{Action, Outcome, Refusal};
use super::properties::{same, through_a_file};
use super::reference::Reference;
use super::{MAX_LEASES, State};

#[test]
fn at_the_limits_nothing_more_begins_and_nothing_is_evicted() {
    let mut state = State::default();
    let act = |state: &mut State, action: Action| state.apply(1, &action.unstamped());
    let lease = || Action::GrantLease { ttl_ms: 1000, holder: String::new() };
    let session = || Action::OpenSession { ttl_ms: 5000, holder: String::new() };
    for _ in 0..MAX_LEASES {
        assert!(matches!(act(&mut state, lease()), Outcome::Granted { .. }));
    }
    for _ in 0..super::sessions::MAX_SESSIONS {
        assert!(matches!(act(&mut state, session()), Outcome::Granted { .. }));
    }
    for n in 1..super::quotas::MAX_QUOTAS {
        let quota = Action::SetQuota { prefix: format!("/kv/{n}/"), bytes: Some(1) };
        assert!(matches!(act(&mut state, quota), Outcome::Set { .. }));
    }
    let acquire = |n: usize| {
        let (path, owner) = (format!("/{n}"), ScopeOwner::Procedure("p".into()));
        let when = vec![Compare::scope_free(path.clone(), Some(owner.clone()))];
        Action::Txn(Txn { when, then: vec![Op::AcquireScope { path, owner }], ..Txn::default() })
    };
    for n in 0..super::scopes::MAX_SCOPES {
        assert!(matches!(act(&mut state, acquire(n)), Outcome::Txn(result) if result.succeeded));
    }
    let full = state.clone();
    let refused = [
        (lease(), "leases"),
        (session(), "sessions"),
        (acquire(super::scopes::MAX_SCOPES), "scopes"),
        (Action::SetQuota { prefix: "/kv/more/".into(), bytes: Some(1) }, "quotas"),
    ];
    for (action, kind) in refused {
        let outcome = act(&mut state, action);
        assert!(matches!(outcome, Outcome::Refused(Refusal::TooMany { what, .. }) if what == kind), "{outcome:?}");
        assert_eq!(state, full);
    }
    // What is there already can still be changed, and room that is made can be used.
    assert!(matches!(act(&mut state, acquire(5)), Outcome::Txn(result) if result.succeeded));
    act(&mut state, Action::SetQuota { prefix: "/kv/1/".into(), bytes: Some(2) });
    act(&mut state, Action::RevokeLease { lease: 1 });
    assert!(matches!(act(&mut state, lease()), Outcome::Granted { .. }));
}

/// Puts this many keys under a prefix, a thousand at a time.
fn fill(state: &mut State, prefix: &str, thousands: usize) {
    for thousand in 0..thousands {
        let then = (0..1000).map(|n| Op::put(format!("{prefix}{thousand}/{n}"), "")).collect();
        state.run(1, &Txn { then, ..Txn::default() });
    }
}

#[test]
fn compares_look_at_no_more_than_they_may() {
    let mut state = State::default();
    fill(&mut state, "/kv/a/", 101);
    let filled = state.revision();
    fill(&mut state, "/kv/b/", 102);
    assert!(state.changes().oldest() > filled + 1, "the changes behind it are not all kept");
    let unchanged = |key: &str, since| Compare { key: key.into(), condition: Condition::PrefixUnchangedSince(since) };
    let run = |state: &mut State, when: Vec<Compare>| {
        let before = state.clone();
        let outcome = state.apply(1, &Action::Txn(Txn { when, ..Txn::default() }).unstamped());
        assert_eq!(*state, before);
        match outcome {
            Outcome::Txn(result) => Some(result.succeeded),
            Outcome::Refused(Refusal::ComparesTooMuch { limit: 100_000 }) => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(run(&mut state, vec![unchanged("/kv/a/", filled)]), None, "101,000 entries, and nothing else to go by");
    let now = state.revision();
    assert_eq!(run(&mut state, vec![unchanged("", now); 1000]), Some(true), "no change since");
    assert_eq!(run(&mut state, vec![unchanged("/kv/a/7/", filled); 90]), Some(true), "90,090 entries");
    assert_eq!(run(&mut state, vec![unchanged("/kv/a/7/", filled); 110]), None);
    assert_eq!(run(&mut state, vec![unchanged("/kv/a/", now - 20); 4]), Some(true), "80,004 changes");
    assert_eq!(run(&mut state, vec![unchanged("/kv/b/", now - 1)]), Some(false));
    state.run(1, &Txn { then: vec![Op::put("/kv/c/1", "")], ..Txn::default() });
    state.run(1, &Txn { then: vec![Op::delete("/kv/c/1")], ..Txn::default() });
    assert_eq!(run(&mut state, vec![unchanged("/kv/c/", now)]), Some(true), "what is gone is not newer");

    let owner = || ScopeOwner::Procedure("p".into());
    for n in 0..1001 {
        let path = format!("/{n}");
        let when = vec![Compare::scope_free(path.clone(), Some(owner()))];
        let acquire = Txn { when, then: vec![Op::AcquireScope { path, owner: owner() }], ..Txn::default() };
        assert!(state.run(1, &acquire).succeeded);
    }
    let free = |owner| Compare::scope_free("/", Some(owner));
    assert_eq!(run(&mut state, vec![free(owner()); 99]), Some(true));
    assert_eq!(run(&mut state, vec![free(owner()); 100]), None);
    assert_eq!(run(&mut state, vec![free(ScopeOwner::Procedure("q".into())); 100]), Some(false));
}

#[test]
fn a_lease_takes_no_more_with_it_than_it_may() {
    let mut state = State::default();
    let grant = Action::GrantLease { ttl_ms: 1000, holder: "a holder".into() };
    let Outcome::Granted { id } = state.apply(1, &grant.unstamped()) else { panic!() };
    let hang = |from: usize, count: usize| {
        let op = |n| Op::Put { key: format!("/kv/{n}"), value: "".into(), return_previous: false, lease: Some(id) };
        let when = vec![Compare { key: String::new(), condition: Condition::LeaseAlive(id) }];
        Action::Txn(Txn { when, then: (from..from + count).map(op).collect(), ..Txn::default() }).unstamped()
    };
    let done = |outcome: &Outcome| matches!(outcome, Outcome::Txn(result) if result.succeeded);
    let refused = |outcome: &Outcome| {
        matches!(outcome, Outcome::Refused(Refusal::TooMany { what: "keys and scopes on one lease", limit: 10_000 }))
    };
    for n in 0..10 {
        assert!(done(&state.apply(1, &hang(n * 1000, 999 + usize::from(n > 0)))));
    }
    let owner = ScopeOwner::Lease(id);
    let acquire = |path: &str| {
        let when = vec![Compare::scope_free(path, Some(owner.clone()))];
        let then = vec![Op::AcquireScope { path: path.into(), owner: owner.clone() }];
        Action::Txn(Txn { when, then, ..Txn::default() }).unstamped()
    };
    assert!(done(&state.apply(1, &acquire("/a"))));
    assert_eq!(state.lease_hanging(id), 10_000);
    let full = state.clone();
    assert!(refused(&state.apply(1, &acquire("/b"))) && refused(&state.apply(1, &hang(999, 1))));
    assert_eq!(state, full);
    assert!(done(&state.apply(1, &hang(0, 900))) && done(&state.apply(1, &acquire("/a"))), "what hangs on it already");
    assert!(state.run(1, &Txn { then: vec![Op::delete("/kv/5")], ..Txn::default() }).succeeded);
    assert!(done(&state.apply(1, &hang(999, 1))), "there is room again");
    state.apply(1, &Action::RevokeLease { lease: id }.unstamped());
    assert_eq!((state.len(), state.counts()), (0, (0, 0, 0)));
    assert_eq!(state.written_bytes(), state.written_bytes_counted());
}

#[test]
fn a_transaction_that_would_return_too_much_is_refused_and_changes_nothing() {
    let (mut state, mut reference) = (State::default(), Reference::default());
    let mut run = |then: Vec<Op>| {
        let command = Action::Txn(Txn { then, ..Txn::default() }).unstamped();
        let before = state.clone();
        let outcome = state.apply(1, &command);
        assert_eq!(outcome, reference.apply(1, &command));
        same(&state, &reference);
        let refused = matches!(outcome, Outcome::Refused(Refusal::AnswerTooLarge { .. }));
        assert!(!refused || state == before);
        refused
    };
    let large = vec![7; 1 << 20];
    assert!(!run(vec![Op::put("/kv/large", large.clone())]));
    let get = || Op::Get { key: "/kv/large".into() };
    assert!(!run(vec![get(); 7]) && run(vec![get(); 8]), "with their keys, eight are too many");
    let delete = |key: &str| Op::Delete { key: key.into(), return_previous: true };
    assert!(run([vec![get(); 7], vec![delete("/kv/large")]].concat()));
    assert!(!run([vec![delete("/kv/large")], vec![get(); 100]].concat()), "there is nothing more to return");
    // What the transaction itself writes counts as well.
    assert!(run([vec![Op::put("/kv/large", large)], vec![get(); 8]].concat()));
}

#[test]
fn the_last_hundred_thousand_changes_are_kept() {
    let mut state = State::default();
    let mut transaction = |count: usize| {
        let then = (0..count).map(|n| Op::put(format!("/kv/{n}"), "")).collect();
        state.run(1, &Txn { then, ..Txn::default() });
        (state.changes().oldest(), state.changes().iter().map(|c| c.events().len()).sum::<usize>())
    };
    for n in 1..=100 {
        assert_eq!(transaction(1000), (1, n * 1000));
    }
    assert_eq!(transaction(1), (2, 99_001), "a change goes as a whole");
    assert_eq!(transaction(999), (2, 100_000));
    assert_eq!(transaction(1), (3, 99_001));
}

#[test]
fn changes_are_trimmed_by_their_bytes_as_the_reference_does_it() {
    let (mut state, mut reference) = (State::default(), Reference::default());
    for n in 0..90 {
        let big = vec![n as u8; if n % 7 == 0 { 10 } else { 1 << 20 }];
        let then = vec![Op::put(format!("/kv/{}", n % 5), big), Op::delete(format!("/kv/{}", (n + 2) % 5))];
        let command = Action::Txn(Txn { then, ..Txn::default() }).unstamped();
        assert_eq!(state.apply(1, &command), reference.apply(1, &command));
        same(&state, &reference);
    }
    assert!(reference.compacted > 5);
    assert_eq!(through_a_file(&state), state);
}
