use proptest::prelude::*;

use super::{Edn, MAX_DEPTH, Reader};

fn one(text: &str) -> Edn {
    let mut reader = Reader::new(text);
    let (_, value) = reader.next_value().unwrap_or_else(|e| panic!("{text}: {e}")).unwrap();
    assert_eq!(reader.next_value().unwrap(), None, "{text}");
    value
}

fn refusal(text: &str) -> String {
    let mut reader = Reader::new(text);
    loop {
        match reader.next_value() {
            Ok(Some(_)) => continue,
            Ok(None) => panic!("{text:?} is read without an error"),
            Err(error) => return error.to_string(),
        }
    }
}

#[test]
fn what_histories_of_other_tools_hold_is_read() {
    assert_eq!(one("[1, -2 +3 4N]"), Edn::Vector([1, -2, 3, 4].map(Edn::Int).into()));
    assert_eq!(one("(1 2)"), Edn::Vector([1, 2].map(Edn::Int).into()));
    assert_eq!(one("#{:a}"), Edn::Set(vec![Edn::keyword("a")]));
    assert_eq!(one("2.5M"), Edn::Float(2.5));
    assert_eq!(one("-1e3"), Edn::Float(-1000.0));
    assert_eq!(one("; first\n nil #_ {:not read} ; last"), Edn::Nil);
    assert_eq!(one("#jepsen.history.Op{:f :read}"), Edn::Map(vec![(Edn::keyword("f"), Edn::keyword("read"))]));
    assert_eq!(one("#inst \"2026-11-30\""), Edn::Text("2026-11-30".into()));
    assert_eq!(one(r#""a\"\\\nb\u00e4\ud83d\ude00""#), Edn::Text("a\"\\\nb\u{e4}\u{1f600}".into()));
    assert_eq!(one("clojure.core/read"), Edn::Symbol("clojure.core/read".into()));
}

#[test]
fn what_is_no_edn_is_refused_with_its_place() {
    assert_eq!(refusal("{:a 1}\n{:b [1 2}"), "line 2, column 9: a closing bracket without its opening one");
    assert_eq!(refusal("\n  [1 2"), "line 2, column 3: no ']' closes what opens here");
    assert_eq!(refusal("ä \"b"), "line 1, column 3: no '\"' closes the string that opens here");
    assert_eq!(refusal("{:a}"), "line 1, column 1: a map whose last key has no value");
    assert_eq!(
        refusal("[1] 12345678901234567890"),
        "line 1, column 5: \"12345678901234567890\" is no number, or one beyond 64 bits"
    );
    assert!(refusal("1x").contains("is no number"));
    for text in [r#""\q""#, r#""\u12""#, r#""\ud800\u0041""#, r#""\udc00""#, r#""\ud800""#, ":", "#", "]", "\\a", "#_"]
    {
        refusal(text);
    }
}

#[test]
fn the_depth_is_bounded() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    one(&nested(MAX_DEPTH));
    for text in [nested(1_000_000), "#_".repeat(1_000_000), "#a ".repeat(1_000_000)] {
        assert!(refusal(&text).contains("inside each other"));
    }
}

fn values() -> impl Strategy<Value = Edn> {
    let name = "[a-z][a-z0-9-]{0,8}";
    let leaf = prop_oneof![
        Just(Edn::Nil),
        any::<bool>().prop_map(Edn::Bool),
        any::<i64>().prop_map(Edn::Int),
        any::<f64>().prop_filter("a number", |f| f.is_finite()).prop_map(Edn::Float),
        any::<String>().prop_map(Edn::Text),
        name.prop_map(Edn::Keyword),
        name.prop_filter("no word of the notation", |n| !["nil", "true", "false"].contains(&n.as_str()))
            .prop_map(Edn::Symbol),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Edn::Vector),
            prop::collection::vec(inner.clone(), 0..6).prop_map(Edn::Set),
            prop::collection::vec((inner.clone(), inner), 0..6).prop_map(Edn::Map),
        ]
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(value in values()) {
        let text = value.to_string();
        prop_assert!(!text.contains('\n'));
        prop_assert_eq!(one(&text), value);
    }

    #[test]
    fn nothing_that_is_read_ends_in_a_panic(text in r#"[\[\]{}()#_:;"\\a-f0-9eNM.ud\n -]{0,40}"#) {
        let mut reader = Reader::new(&text);
        while let Ok(Some(_)) = reader.next_value() {}
    }
}
