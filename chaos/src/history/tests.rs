use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use super::file::{self, ParseError};
use super::*;

fn history(text: &str) -> History {
    file::parse(text, None).unwrap_or_else(|e| panic!("{e}")).1
}

fn refusal(text: &str) -> String {
    file::parse(text, None).unwrap_err().to_string()
}

#[test]
fn invocations_are_joined_to_their_ends() {
    let history = history(
        "{:type :invoke, :f :write, :value [7 1], :process 0}
         {:type :invoke, :f :read, :value [7 nil], :process 1}
         {:type :info, :f :start-kill, :value \"n1\", :process :nemesis}
         {:type :info, :f :write, :value [7 1], :process 0, :error :timeout}
         {:type :ok, :f :read, :value [7 1], :process 1, :revision 12}
         {:type :invoke, :f :cas, :value [7 [1 2]], :process 1}
         {:type :fail, :f :cas, :value [7 [1 2]], :process 1}
         {:type :invoke, :f :cas, :value [7 [nil 2]], :process 2}",
    );
    let seen: Vec<_> = history.calls().iter().map(|c| (c.process, c.invoked, c.ended, c.outcome)).collect();
    let expected = [
        (0, 0, Some(3), Outcome::Unknown),
        (1, 1, Some(4), Outcome::Ok),
        (1, 5, Some(6), Outcome::Fail),
        (2, 7, None, Outcome::Unknown),
    ];
    assert_eq!(seen, expected);
    let read = &history.calls()[1];
    assert_eq!(history.action(read), &Action::Register(Register::Read { key: 7.into(), value: Some(1) }));
    assert_eq!(history.revision(read), Some(12));
    assert_eq!(history.operations()[3].error.as_deref(), Some(":timeout"));
    assert_eq!(history.faults().next().unwrap().1.name, "kill");
}

#[test]
fn registers_and_sets_without_keys_are_those_of_key_0() {
    let knossos = history(
        "[{:process 0, :type :invoke, :f :write, :value 3}
          {:process 0, :type :ok, :f :write, :value 3}
          {:process 0, :type :invoke, :f :cas, :value [3 4]}
          {:process 0, :type :ok, :f :cas, :value [3 4]}
          {:process 0, :type :invoke, :f :read, :value nil}
          {:process 0, :type :ok, :f :read, :value 4}]",
    );
    let actions: Vec<_> = knossos.calls().iter().map(|c| knossos.action(c).clone()).collect();
    let key = || Key::Number(0);
    let expected = [
        Register::Write { key: key(), value: 3 },
        Register::Cas { key: key(), from: Some(3), to: 4 },
        Register::Read { key: key(), value: Some(4) },
    ];
    assert_eq!(actions, expected.map(Action::Register));
    let set = history(
        "{:process 0, :type :invoke, :f :read, :value nil}
         {:process 0, :type :ok, :f :read, :value #{1 2}}
         {:process 0, :type :invoke, :f :add, :value 3}",
    );
    assert_eq!(set.action(&set.calls()[0]), &Action::Set(Set::Read { key: key(), elements: Some(vec![1, 2]) }));
}

#[test]
fn transactions_of_elle_are_read_with_and_without_a_name() {
    for f in ["", ":f :txn, "] {
        let text = format!("{{:process 0, :type :invoke, {f}:value [[:append :x 1] [:r :y nil]]}}");
        let history = history(&text);
        let steps = vec![Append::Append { key: "x".into(), value: 1 }, Append::Read { key: "y".into(), list: None }];
        assert_eq!(history.operations()[0].action, Action::Append(steps));
    }
}

#[test]
fn what_is_no_history_is_refused_with_its_place() {
    let read = "{:type :invoke, :f :read, :value nil, :process 0}\n";
    assert_eq!(
        refusal(&read.repeat(2)),
        "line 2: not a history: operation 1 of process 0 is invoked before the one before it has ended"
    );
    let info = "{:type :info, :f :read, :value nil, :process 0}\n";
    assert!(
        refusal(&[read, info, read].concat())
            .contains("operation 2 of process 0 is invoked by a process that is spent")
    );
    assert!(
        refusal(&[read, info, info].concat()).contains("line 3: not a history: operation 2 of process 0 ends a second")
    );
    assert!(refusal(info).contains("ends without having been invoked"));
    assert!(refusal("{:type :invoke, :f :read, :value nil}").contains("line 1, column 1: :process is a number"));
    assert!(
        refusal("{:type :done, :f :read, :process 1}").contains(":type is :invoke, :ok, :fail or :info, not :done")
    );
    let mixed =
        "{:type :invoke, :f :write, :value [1 2], :process 1}\n  {:type :invoke, :f :add, :value 1, :process 2}"
            .to_owned();
    assert_eq!(refusal(&mixed), "line 2, column 3: :add of the workload register: it has :read, :write and :cas");
    assert!(
        refusal("{:type :invoke, :f :write, :value [1 :x], :process 1}")
            .contains("a whole number was expected, not :x")
    );
    assert!(matches!(file::parse("", None), Err(ParseError::UnknownWorkload)));
    assert!(refusal("[{:type :invoke, :f :read, :value nil, :process 0}").contains("is not closed"));
    assert!(refusal("[] 1").contains("more follows"));
}

#[test]
fn every_workload_is_found_by_its_name() {
    for workload in Workload::ALL {
        assert_eq!(workload.name().parse(), Ok(workload));
    }
    assert!("registers".parse::<Workload>().unwrap_err().to_string().contains("there are: register, set,"));
}

fn keys() -> impl Strategy<Value = Key> {
    prop_oneof![any::<i64>().prop_map(Key::Number), "[a-z]{1,4}".prop_map(|name| Key::from(name.as_str()))]
}

/// Revisions, ids, times: EDN has no whole numbers beyond 2^63.
fn numbers() -> impl Strategy<Value = u64> {
    0..=i64::MAX as u64
}

fn actions(workload: Workload) -> BoxedStrategy<Action> {
    let value = any::<i64>;
    let values = || option::of(vec(any::<i64>(), 0..4));
    let by_key = || btree_map(keys(), any::<i64>(), 0..4);
    let changes = || btree_map(keys(), option::of(any::<i64>()), 0..4);
    match workload {
        Workload::Register => prop_oneof![
            (keys(), option::of(value())).prop_map(|(key, value)| Register::Read { key, value }),
            (keys(), value()).prop_map(|(key, value)| Register::Write { key, value }),
            (keys(), option::of(value()), value()).prop_map(|(key, from, to)| Register::Cas { key, from, to }),
        ]
        .prop_map(Action::Register)
        .boxed(),
        Workload::Set => prop_oneof![
            (keys(), value()).prop_map(|(key, element)| Set::Add { key, element }),
            (keys(), values()).prop_map(|(key, elements)| Set::Read { key, elements }),
        ]
        .prop_map(Action::Set)
        .boxed(),
        Workload::Append => {
            let step = prop_oneof![
                (keys(), value()).prop_map(|(key, value)| Append::Append { key, value }),
                (keys(), values()).prop_map(|(key, list)| Append::Read { key, list }),
            ];
            vec(step, 0..4).prop_map(Action::Append).boxed()
        }
        Workload::Bank => prop_oneof![
            by_key().prop_map(|balances| Bank::Open { balances }),
            (keys(), keys(), value()).prop_map(|(from, to, amount)| Bank::Transfer { from, to, amount }),
            option::of(by_key()).prop_map(|balances| Bank::Read { balances }),
        ]
        .prop_map(Action::Bank)
        .boxed(),
        Workload::Watch => prop_oneof![
            changes().prop_map(|changes| Watch::Change { changes }),
            (numbers(), numbers()).prop_map(|(watcher, after)| Watch::Open { watcher, after }),
            (numbers(), option::of(changes())).prop_map(|(watcher, changes)| Watch::Next { watcher, changes }),
            (numbers(), option::of(by_key())).prop_map(|(watcher, entries)| Watch::List { watcher, entries }),
            option::of(by_key()).prop_map(|entries| Watch::Final { entries }),
        ]
        .prop_map(Action::Watch)
        .boxed(),
        Workload::Lock => prop_oneof![
            (keys(), option::of(numbers())).prop_map(|(lock, fence)| Lock::Acquire { lock, fence }),
            (keys(), numbers()).prop_map(|(lock, fence)| Lock::Release { lock, fence }),
            (keys(), numbers(), value()).prop_map(|(lock, fence, value)| Lock::Write { lock, fence, value }),
            (keys(), option::of(value())).prop_map(|(lock, value)| Lock::Read { lock, value }),
        ]
        .prop_map(Action::Lock)
        .boxed(),
        Workload::Idempotency => prop_oneof![
            (keys(), value()).prop_map(|(key, id)| Idempotency::Apply { key, id }),
            (keys(), option::of(numbers())).prop_map(|(key, count)| Idempotency::Count { key, count }),
        ]
        .prop_map(Action::Idempotency)
        .boxed(),
        Workload::Session => prop_oneof![
            (numbers(), keys(), value()).prop_map(|(session, key, value)| Session::Write { session, key, value }),
            (numbers(), keys(), option::of(value())).prop_map(|(session, key, value)| Session::Read {
                session,
                key,
                value
            }),
        ]
        .prop_map(Action::Session)
        .boxed(),
        Workload::Table => tables().prop_map(Action::Table).boxed(),
        Workload::MultiTable => prop_oneof![
            by_key().prop_map(|balances| Accounts::Open { balances }),
            (keys(), keys(), value()).prop_map(|(from, to, amount)| Accounts::Move { from, to, amount }),
            (option::of(by_key()), option::of(by_key()), option::of(numbers()))
                .prop_map(|(balances, versions, stale_ms)| Accounts::Read { balances, versions, stale_ms }),
        ]
        .prop_map(Action::Accounts)
        .boxed(),
        Workload::Catalog => catalogs().prop_map(Action::Catalog).boxed(),
        Workload::Hot => hots().prop_map(Action::Hot).boxed(),
        Workload::Upkeep => hots().prop_map(Action::Upkeep).boxed(),
        Workload::Cached => prop_oneof![
            (keys(), value()).prop_map(|(table, number)| Cached::Write { table, number }),
            (option::of(by_key()), option::of(numbers()))
                .prop_map(|(values, stale_ms)| Cached::Read { values, stale_ms }),
        ]
        .prop_map(Action::Cached)
        .boxed(),
    }
}

fn hots() -> impl Strategy<Value = Hot> {
    let odd = || btree_map(keys(), any::<i64>(), 0..4);
    let whole = || option::of(vec(any::<i64>(), 0..4));
    prop_oneof![
        (keys(), any::<i64>()).prop_map(|(table, number)| Hot::Append { table, number }),
        (keys(), any::<i64>(), numbers(), whole(), odd()).prop_map(|(table, number, kept_ms, whole, odd)| Hot::Past {
            table,
            number,
            kept_ms,
            whole,
            odd
        }),
        (keys(), whole(), odd(), option::of(numbers())).prop_map(|(table, whole, odd, stale_ms)| Hot::Read {
            table,
            whole,
            odd,
            stale_ms
        }),
        (keys(), option::of(numbers())).prop_map(|(table, count)| Hot::Snapshots { table, count }),
        (keys(), prop_oneof![Just(Chore::Pack), Just(Chore::Expire), Just(Chore::Sweep), Just(Chore::Purge)])
            .prop_map(|(table, what)| Hot::Chore { table, what }),
        (keys(), option::of(vec((numbers(), numbers(), numbers(), "[a-z\"-]{0,8}"), 0..4))).prop_map(
            |(table, line)| {
                let fenced = |(sequence, shard, fence, worker)| Fenced { sequence, shard, fence, worker };
                Hot::Fences { table, line: line.map(|line| line.into_iter().map(fenced).collect()) }
            }
        ),
        (keys(), option::of(vec(worked(), 0..4))).prop_map(|(table, chores)| Hot::Worked { table, chores }),
    ]
}

fn worked() -> impl Strategy<Value = Worked> {
    let who = (numbers(), numbers(), "[a-z\"-]{0,8}", "[a-z_]{0,8}");
    (who, numbers(), option::of(numbers()), option::of(numbers())).prop_map(
        |((shard, fence, worker, what), began_ms, acted_ms, ended_ms)| Worked {
            shard,
            fence,
            worker,
            what,
            began_ms,
            acted_ms,
            ended_ms,
        },
    )
}

fn catalogs() -> impl Strategy<Value = Catalog> {
    let ddl = prop_oneof![
        keys().prop_map(|schema| Ddl::CreateSchema { schema }),
        (keys(), any::<bool>()).prop_map(|(schema, cascade)| Ddl::DropSchema { schema, cascade }),
        (keys(), any::<i64>()).prop_map(|(table, number)| Ddl::Create { table, number }),
        (keys(), keys()).prop_map(|(from, to)| Ddl::Rename { from, to }),
        (keys(), any::<bool>()).prop_map(|(table, purge)| Ddl::Drop { table, purge }),
        keys().prop_map(|table| Ddl::Undrop { table }),
    ];
    prop_oneof![
        4 => ddl.prop_map(Catalog::Ddl),
        1 => keys().prop_map(|path| Catalog::Claim { path }),
        1 => keys().prop_map(|path| Catalog::Unclaim { path }),
        2 => (option::of(vec(keys(), 0..4)), option::of(btree_map(keys(), any::<i64>(), 0..4)))
            .prop_map(|(schemas, tables)| Catalog::Tree { schemas, tables }),
    ]
}

fn tables() -> impl Strategy<Value = Table> {
    let change = prop_oneof![Just(Change::Insert), Just(Change::Update), Just(Change::Merge), Just(Change::Delete)];
    let write = (change, keys(), any::<i64>(), any::<i64>(), any::<bool>());
    let rows = option::of(btree_map(any::<i64>(), vec(any::<i64>(), 0..4), 0..4));
    let shared = option::of(btree_map(any::<i64>(), vec(vec(any::<i64>(), 0..4), 0..3), 0..4));
    let snapshot = (numbers(), any::<i64>(), option::of(any::<i64>()), option::of(any::<i64>()))
        .prop_map(|(sequence, id, parent, number)| Snapshot { sequence, id, parent, number });
    prop_oneof![
        write.prop_map(|(change, table, id, number, once)| Table::Write(Write { change, table, id, number, once })),
        (keys(), rows, option::of(any::<i64>()), option::of(numbers()))
            .prop_map(|(table, rows, snapshot, stale_ms)| Table::Read { table, rows, snapshot, stale_ms }),
        (keys(), option::of(vec(snapshot, 0..4))).prop_map(|(table, snapshots)| Table::Line { table, snapshots }),
        (keys(), any::<i64>(), any::<i64>()).prop_map(|(table, row, number)| Table::Push { table, row, number }),
        (keys(), any::<i64>(), any::<bool>()).prop_map(|(table, row, on)| Table::Turn { table, row, on }),
        (keys(), shared, option::of(numbers())).prop_map(|(table, rows, stale_ms)| Table::Shared {
            table,
            rows,
            stale_ms
        }),
    ]
}

fn faults() -> impl Strategy<Value = Fault> {
    let phase = prop_oneof![Just(Phase::Start), Just(Phase::Stop)];
    let installation = option::of(prop_oneof![
        any::<String>().prop_map(Installation::Installed),
        any::<String>().prop_map(Installation::Skipped),
        any::<String>().prop_map(Installation::Failed),
    ]);
    ("[a-z]{1,6}(-[a-z]{1,6})?", phase, any::<String>(), installation)
        .prop_map(|(name, phase, target, installation)| Fault { name, phase, target, installation })
}

fn operations(workload: Workload) -> impl Strategy<Value = Operation> {
    let by = prop_oneof![
        4 => (numbers(), actions(workload)).prop_map(|(process, action)| (Process::Client(process), action)),
        1 => faults().prop_map(|fault| (Process::Nemesis, Action::Fault(fault))),
    ];
    let kind = prop_oneof![Just(Kind::Invoke), Just(Kind::Ok), Just(Kind::Fail), Just(Kind::Info)];
    let number = || option::of(numbers());
    let text = || option::of(any::<String>());
    (by, kind, numbers(), number(), number(), text(), text()).prop_map(
        |((process, action), kind, time_ns, revision, peer, refusal, error)| {
            let operation = Operation::new(process, kind, time_ns, action);
            Operation { revision, peer, refusal, error, ..operation }
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        (workload, operation) in prop::sample::select(&Workload::ALL[..])
            .prop_flat_map(|workload| (Just(workload), operations(workload)))
    ) {
        let edn = encode::operation(&operation);
        prop_assert_eq!(decode::operation(&edn, workload, 0), Ok(operation));
    }
}

#[test]
fn a_history_is_written_and_read_again() {
    let write = Action::Register(Register::Write { key: 3.into(), value: 4 });
    let operations = vec![
        Operation::new(Process::Client(2), Kind::Invoke, 10, write.clone()).at_peer(3),
        Operation::new(Process::Client(2), Kind::Info, 25, write).because("no answer within 1 s"),
    ];
    let history = History::new(operations).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file::FILE_NAME);
    file::write(&path, history.operations()).unwrap();
    assert_eq!(file::read(&path, None).unwrap(), (Workload::Register, history));
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.starts_with("{:type :invoke, :f :write, :value [3 4], :process 2, :time 10, :index 0, :peer 3}\n"),
        "{text}"
    );
    let missing = file::read(&dir.path().join("none.edn"), None).unwrap_err().to_string();
    assert!(missing.contains("none.edn"), "{missing}");
}
