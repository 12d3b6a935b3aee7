use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::check::bars::End;
use crate::history::{Kind, Operation, Outcome as Ended, Process, file};

fn judged(text: &str) -> Outcome {
    check(&file::parse(text, None).unwrap().1, &Budget::default())
}

/// `(process, kind, action)` in order.
fn history(events: &[(u64, Kind, Register)]) -> History {
    let operations = events.iter().enumerate().map(|(i, (process, kind, action))| {
        Operation::new(Process::Client(*process), *kind, i as u64, Action::Register(action.clone()))
    });
    History::new(operations.collect()).unwrap()
}

#[test]
fn a_stale_read_is_shown_by_the_three_operations_that_prove_it() {
    let mut text = String::new();
    // Much that has nothing to do with it, before and after.
    let mut call = |process: usize, f: &str, value: &str, answer: &str| {
        text += &format!("{{:type :invoke, :f :{f}, :value [7 {value}], :process {process}}}\n");
        text += &format!("{{:type :ok, :f :{f}, :value [7 {answer}], :process {process}}}\n");
    };
    for i in 1..=50 {
        call(0, "write", &i.to_string(), &i.to_string());
        call(1, "read", "nil", &i.to_string());
    }
    call(0, "cas", "[50 51]", "[50 51]");
    call(2, "cas", "[51 52]", "[51 52]");
    call(3, "read", "nil", "51");
    call(3, "read", "nil", "52");
    call(0, "write", "53", "53");
    let outcome = judged(&text);
    assert!(matches!(&outcome.verdict, Verdict::Violation(why) if why.contains("key 7")), "{:?}", outcome.verdict);
    let labels: Vec<&str> = outcome.findings[0].bars.iter().map(|bar| bar.label.as_str()).collect();
    assert_eq!(labels, ["cas 7: 50 -> 51", "cas 7: 51 -> 52", "read 7 = 51"]);
    let explanation = outcome.findings[0].explanation.join("\n");
    assert!(explanation.contains("Then the key holds 52."), "{explanation}");
    assert!(explanation.contains("read 7 = 51 (process 3) must come next, but cannot: it read 51."), "{explanation}");
}

#[test]
fn an_unknown_write_may_come_late_or_never() {
    let late = "{:type :invoke, :f :write, :value [1 1], :process 0}
        {:type :info, :f :write, :value [1 1], :process 0}
        {:type :invoke, :f :write, :value [1 2], :process 1}
        {:type :ok, :f :write, :value [1 2], :process 1}
        {:type :invoke, :f :read, :value [1 nil], :process 1}
        {:type :ok, :f :read, :value [1 2], :process 1}
        {:type :invoke, :f :read, :value [1 nil], :process 1}
        {:type :ok, :f :read, :value [1 1], :process 1}\n";
    assert_eq!(judged(late).verdict, Verdict::Valid);
    // But not twice.
    let twice = "{:type :invoke, :f :read, :value [1 nil], :process 1}
        {:type :ok, :f :read, :value [1 2], :process 1}";
    let outcome = judged(&format!("{late}{twice}"));
    assert!(matches!(outcome.verdict, Verdict::Violation(_)));
    assert!(outcome.findings[0].bars.iter().any(|bar| bar.outcome == End::Unknown));
}

#[test]
fn a_write_that_failed_was_never_there() {
    let outcome = judged(
        "{:type :invoke, :f :write, :value [1 1], :process 0}
         {:type :fail, :f :write, :value [1 1], :process 0}
         {:type :invoke, :f :read, :value [1 nil], :process 1}
         {:type :ok, :f :read, :value [1 1], :process 1}",
    );
    assert!(matches!(outcome.verdict, Verdict::Violation(_)));
    assert_eq!(outcome.findings[0].bars.len(), 1);
}

#[test]
fn a_history_in_which_nothing_succeeded_is_not_valid() {
    let outcome = judged("{:type :invoke, :f :write, :value [1 1], :process 0}");
    assert!(matches!(outcome.verdict, Verdict::Unknown(_)));
}

#[test]
fn registers_that_nobody_looked_at_or_nobody_changed_are_not_valid() {
    let call = |process, action: Register| [(process, Kind::Invoke, action.clone()), (process, Kind::Ok, action)];
    let judged = |calls: &[[(u64, Kind, Register); 2]]| check(&history(&calls.concat()), &Budget::default()).verdict;
    let write = call(0, Register::Write { key: 1.into(), value: 3 });
    let read = |value| call(1, Register::Read { key: 1.into(), value });
    assert!(
        matches!(judged(std::slice::from_ref(&write)), Verdict::Unknown(why) if why.contains("looked at a register"))
    );
    assert!(matches!(judged(&[read(None)]), Verdict::Unknown(why) if why.contains("to be changed")));
    let before = [read(None), write.clone()];
    assert!(
        matches!(judged(&before), Verdict::Unknown(why) if why.contains("to be changed")),
        "nobody looked after it"
    );
    assert_eq!(judged(&[write, read(Some(3))]), Verdict::Valid);
}

#[test]
fn a_search_beyond_its_bounds_is_not_valid() {
    // Concurrent writes of which nothing says in which order they came, and a read that none of the orders gives.
    let write = |value| Register::Write { key: 1.into(), value };
    let read = |value| Register::Read { key: 1.into(), value };
    let mut events = Vec::new();
    (0..16).for_each(|process| events.push((process, Kind::Invoke, write(process as i64))));
    (0..16).for_each(|process| events.push((process, Kind::Ok, write(process as i64))));
    events.extend([(20, Kind::Invoke, read(None)), (20, Kind::Ok, read(Some(99)))]);
    let history = history(&events);
    let outcome = check(&history, &Budget::new(1000, Duration::from_secs(60)));
    assert!(matches!(&outcome.verdict, Verdict::Unknown(why) if why.contains("1 of 1 keys")), "{:?}", outcome.verdict);
    assert_eq!(outcome.figures["undecided keys"], 1);
    let no_time = check(&history, &Budget::new(1 << 12, Duration::ZERO));
    assert!(matches!(no_time.verdict, Verdict::Unknown(_)));
}

/// What a history says, judged by trying every order of all that may have happened.
fn judged_naively(history: &History) -> bool {
    type Open = Vec<(usize, Option<usize>, Touch)>;
    fn possible(open: &Open, state: Option<i64>) -> bool {
        let horizon = open.iter().filter_map(|(_, deadline, _)| *deadline).min();
        let Some(horizon) = horizon else { return true };
        (0..open.len()).any(|i| {
            let (invoked, _, action) = &open[i];
            let next = match action {
                Touch::Read(value) => (*value == state).then_some(state),
                Touch::Write(value) => Some(Some(*value)),
                Touch::Cas(from, to) => (*from == state).then_some(Some(*to)),
            };
            *invoked < horizon
                && next.is_some_and(|next| {
                    let mut rest = open.clone();
                    rest.remove(i);
                    possible(&rest, next)
                })
        })
    }
    let open = history.calls().iter().filter(|call| call.outcome != Ended::Fail).filter_map(|call| {
        let (_, action) = register(history, call)?;
        let unknown_read = call.outcome == Ended::Unknown && matches!(action, Touch::Read(_));
        (!unknown_read).then_some((call.invoked, call.happened_before(), action))
    });
    possible(&open.collect(), None)
}

/// Any history of a few clients on one key: some linearizable, some not.
fn any_history() -> impl Strategy<Value = History> {
    let value = 0..3i64;
    let action = prop_oneof![
        3 => prop::option::weighted(0.9, value.clone()).prop_map(|value| Register::Read { key: 1.into(), value }),
        2 => value.clone().prop_map(|value| Register::Write { key: 1.into(), value }),
        1 => (prop::option::weighted(0.8, value.clone()), value)
            .prop_map(|(from, to)| Register::Cas { key: 1.into(), from, to }),
    ];
    let kind = prop_oneof![5 => Just(Kind::Ok), 1 => Just(Kind::Fail), 1 => Just(Kind::Info)];
    // Each draw steps one client: it invokes what was drawn, or ends what it invoked before.
    prop::collection::vec((0..3usize, action, kind), 1..14).prop_map(|draws| {
        let mut open: [Option<Register>; 3] = [None, None, None];
        let mut process = [0, 1, 2];
        let mut events = Vec::new();
        for (client, action, kind) in draws {
            match open[client].take() {
                None => {
                    events.push((process[client], Kind::Invoke, action.clone()));
                    open[client] = Some(action);
                }
                Some(invoked) => {
                    events.push((process[client], kind, invoked));
                    process[client] += if kind == Kind::Info { 3 } else { 0 };
                }
            }
        }
        history(&events)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_search_finds_what_trying_everything_finds(history in any_history()) {
        let ended = history.calls().iter().filter(|call| call.outcome == Ended::Ok);
        let touches: Vec<Touch> = ended.filter_map(|call| Some(register(&history, call)?.1)).collect();
        let judged_something = touches.iter().any(|touch| matches!(touch, Touch::Read(Some(_)) | Touch::Cas(Some(_), _)));
        let outcome = check(&history, &Budget::default());
        match judged_naively(&history) {
            true if judged_something => prop_assert_eq!(outcome.verdict, Verdict::Valid),
            true => prop_assert!(matches!(outcome.verdict, Verdict::Unknown(_))),
            false => {
                prop_assert!(matches!(outcome.verdict, Verdict::Violation(_)));
                prop_assert!(!outcome.findings[0].bars.is_empty());
            }
        }
    }

    #[test]
    fn what_is_left_of_a_contradiction_is_one_by_itself(history in any_history()) {
        if judged_naively(&history) {
            return Ok(());
        }
        let keys = by_key(&history);
        let calls = &keys[&Key::from(1)];
        let part = Part::of(&history, calls);
        let budget = Budget::default();
        let Answer::Impossible(stuck) = search::search(&part, budget.next_search()) else { panic!() };
        let cut = part.until(stuck.horizon);
        prop_assert!(matches!(search::search(&cut, budget.next_search()), Answer::Impossible(_)));
        prop_assert!(!matches!(
            search::search(&part.until(stuck.horizon - 1), budget.next_search()),
            Answer::Impossible(_)
        ));
        let small = shrink::shrink(&cut, &budget);
        prop_assert!(matches!(search::trace(&small, budget.next_search()), Answer::Impossible(_)));
        // The bars alone, judged as a history of their own, are a contradiction as well.
        let bars: Vec<usize> = small.steps().map(|step| calls[step.call].invoked).collect();
        let alone: Vec<_> = history
            .calls()
            .iter()
            .filter(|call| bars.contains(&call.invoked))
            .flat_map(|call| [Some(call.invoked), call.ended].into_iter().flatten())
            .collect();
        let mut alone: Vec<Operation> = alone.into_iter().map(|i| history.operations()[i].clone()).collect();
        alone.sort_by_key(|operation| operation.index);
        prop_assert!(!judged_naively(&History::new(alone).unwrap()));
    }
}
