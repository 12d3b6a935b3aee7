//! Histories as tools from elsewhere read them: by a reader of EDN that is not lake's own, and held against what Knossos,
//! Elle and jepsen.history expect of one.

use std::collections::BTreeMap;

use clojure_reader::edn::{self, Edn};
use lake_chaos::check::{self, Options, judge_history};
use lake_chaos::history::{Action, Key, Kind, Operation, Process, Set, file};

/// What a map holds under a keyword.
fn get<'a>(map: &'a Edn, name: &str) -> Option<&'a Edn<'a>> {
    let Edn::Map(entries) = map else { panic!("no map: {map:?}") };
    entries.iter().find(|(key, _)| matches!(key, Edn::Key(key) if key == name)).map(|(_, value)| value)
}

fn keyword<'a>(value: &'a Edn) -> &'a str {
    let Edn::Key(name) = value else { panic!("no keyword: {value:?}") };
    name
}

fn elements<'a>(value: &'a Edn) -> &'a [Edn<'a>] {
    let Edn::Vector(elements) = value else { panic!("no vector: {value:?}") };
    elements
}

fn number(value: &Edn) -> i64 {
    let Edn::Int(number) = value else { panic!("no number: {value:?}") };
    *number
}

/// All operations of a file, one after the other, as Knossos's and elle-cli's `read-history` take them from a text that
/// begins with a map.
fn read(text: &str) -> Vec<Edn<'_>> {
    assert!(text.starts_with('{'), "{}", &text[..text.len().min(80)]);
    let (mut rest, mut operations) = (text, Vec::new());
    while !rest.trim().is_empty() {
        let (operation, more) = edn::read(rest).unwrap_or_else(|e| panic!("operation {}: {e:?}", operations.len()));
        // A `nil` would be the end of the file to them.
        assert_ne!(operation, Edn::Nil);
        operations.push(operation);
        rest = more;
    }
    operations
}

/// Holds a history against what those tools expect of any, and of the models that they have.
#[track_caller]
pub fn assert_readable(text: &str) {
    let operations = read(text);
    assert!(!operations.is_empty());
    let mut open: BTreeMap<i64, &Edn> = BTreeMap::new();
    let mut spent: Vec<i64> = Vec::new();
    let mut last_time = 0;
    for (index, operation) in operations.iter().enumerate() {
        let field = |name: &str| get(operation, name).unwrap_or_else(|| panic!("no :{name} in {operation:?}"));
        let kind = keyword(field("type"));
        let (f, value) = (keyword(field("f")), field("value"));
        // jepsen.history takes indices for dense, and times for monotonic.
        assert_eq!(number(field("index")), index as i64);
        assert!(number(field("time")) >= last_time, "{operation:?}");
        last_time = number(field("time"));
        let process = match field("process") {
            Edn::Key(name) => {
                assert_eq!((name.as_ref(), kind), ("nemesis", "info"), "{operation:?}");
                continue;
            }
            process => number(process),
        };
        assert!(!spent.contains(&process), "process {process} goes on after an :info: {operation:?}");
        assert_value(f, kind, value);
        match kind {
            "invoke" => assert!(open.insert(process, operation).is_none(), "two at once: {operation:?}"),
            "ok" | "fail" | "info" => {
                let began = open.remove(&process).unwrap_or_else(|| panic!("it never began: {operation:?}"));
                assert_eq!(keyword(get(began, "f").unwrap()), f);
                assert_same(f, get(began, "value").unwrap(), value);
                if kind == "info" {
                    spent.push(process);
                }
            }
            other => panic!("no :type is :{other}"),
        }
    }
}

/// Values are as the models take them: cas-register and set (with the key before, as jepsen.independent has it), list-append,
/// bank. Others are of lake's own workloads.
fn assert_value(f: &str, kind: &str, value: &Edn) {
    let is_number_or_nil = |value: &Edn| matches!(value, Edn::Int(_) | Edn::Nil);
    match (f, value) {
        ("read", Edn::Vector(keyed)) => {
            assert_eq!(keyed.len(), 2, "{value:?}");
            // A vector, if what was read has an element twice.
            assert!(is_number_or_nil(&keyed[1]) || matches!(keyed[1], Edn::Set(_) | Edn::Vector(_)), "{value:?}");
        }
        ("read", Edn::Map(balances)) => assert!(balances.values().all(|balance| matches!(balance, Edn::Int(_)))),
        ("read", nothing) => assert_eq!((nothing, kind == "ok"), (&Edn::Nil, false)),
        ("write" | "add", keyed) => assert!(matches!(elements(keyed), [_, Edn::Int(_)]), "{value:?}"),
        ("cas", keyed) => {
            let [_, pair] = elements(keyed) else { panic!("{value:?}") };
            assert!(matches!(elements(pair), [from, Edn::Int(_)] if is_number_or_nil(from)), "{value:?}");
        }
        ("transfer", transfer) => {
            assert!(["from", "to"].iter().all(|name| get(transfer, name).is_some()));
            assert!(number(get(transfer, "amount").unwrap()) > 0);
        }
        ("txn", steps) => {
            for step in elements(steps) {
                let [what, _, value] = elements(step) else { panic!("{step:?}") };
                match keyword(what) {
                    "append" => assert!(matches!(value, Edn::Int(_)), "{step:?}"),
                    "r" if kind == "ok" => assert!(elements(value).iter().all(|value| matches!(value, Edn::Int(_)))),
                    "r" => assert_eq!(value, &Edn::Nil, "only an answer tells what was read"),
                    other => panic!("no step is a :{other}"),
                }
            }
        }
        _ => {}
    }
}

/// What an operation was asked for is also what it is about in the end.
fn assert_same(f: &str, asked: &Edn, answered: &Edn) {
    match f {
        "write" | "add" | "cas" | "transfer" => assert_eq!(asked, answered),
        "txn" => {
            let about = |steps: &Edn| -> Vec<String> {
                elements(steps).iter().map(|step| format!("{:?}", &elements(step)[..2])).collect()
            };
            assert_eq!(about(asked), about(answered));
        }
        _ => {}
    }
}

#[test]
fn a_text_that_is_no_history_of_theirs_is_noticed() {
    let invoke = "{:type :invoke, :f :read, :value [1 nil], :process 0, :time 1, :index 0}\n";
    let ok = "{:type :ok, :f :read, :value [1 3], :process 0, :time 2, :index 1}\n";
    assert_readable(&format!("{invoke}{ok}"));
    let wrong = [
        ok.to_owned(),
        format!("{invoke}{}", ok.replace(":index 1", ":index 2")),
        format!("{invoke}{}", ok.replace(":ok", ":okay")),
        format!("{invoke}{}", ok.replace("[1 3]", "[1 :x]")),
        format!("{invoke}{}", ok.replace(":process 0", ":process 1")),
        format!("{invoke}{}", ok.replace("}", "")),
        format!("{invoke}{}{}", ok.replace(":ok", ":info"), invoke.replace(":index 0", ":index 2")),
    ];
    for text in wrong {
        assert!(std::panic::catch_unwind(|| assert_readable(&text)).is_err(), "{text}");
    }
}

/// What an honest system cannot answer is a history for others as well.
#[test]
fn a_set_that_was_read_with_an_element_twice_can_be_read_by_others() {
    let add = Action::Set(Set::Add { key: Key::from(1), element: 7 });
    let read = |elements| Action::Set(Set::Read { key: Key::from(1), elements });
    let events =
        [(Kind::Invoke, add.clone()), (Kind::Ok, add), (Kind::Invoke, read(None)), (Kind::Ok, read(Some(vec![7, 7])))];
    let mut text = Vec::new();
    for (index, (kind, action)) in (0..).zip(events) {
        let operation = Operation { index, ..Operation::new(Process::Client(0), kind, index, action) };
        file::write_operation(&mut text, &operation).unwrap();
    }
    let text = String::from_utf8(text).unwrap();
    assert_readable(&text);
    let (workload, history) = file::parse(&text, None).unwrap();
    let outcomes = judge_history(workload, &history, &Options::default());
    assert_eq!(outcomes[0].findings[0].kind, "twice", "{}", check::verdict(&outcomes));
}
