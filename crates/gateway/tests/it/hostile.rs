//! Bodies that no client means to send.

use forebay_gateway::{Dialect, DialectError, Request, structure::DEPTH_MAX};
use proptest::{prelude::*, sample::Index};

use crate::{bodies, support::field_of};

/// What a mutation puts into a body.
const PIECES: [&str; 16] = [
    "null",
    "{}",
    "[]",
    "\"\"",
    "0",
    "-1",
    "1e999",
    "true",
    "\\ud800",
    "\"",
    "{",
    "[",
    ",",
    "\u{1F642}",
    "\0",
    "[[[[[[[[",
];

/// What a mutation puts in the place of a value.
const VALUES: [&str; 9] = ["null", "{}", "[]", "\"\"", "0", "-1", "true", "[[]]", "[{}]"];

fn check(dialect: Dialect, body: &[u8]) -> Result<(), TestCaseError> {
    match dialect.parse(body).and_then(Request::recorded) {
        Err(DialectError::Invalid { field, why } | DialectError::Unsupported { field, why }) => {
            prop_assert!(!field.is_empty() && !why.is_empty(), "an error names the field and the reason");
        }
        // A body of Responses may name an answer that is not there.
        Err(DialectError::NotFound { what }) if dialect == Dialect::Responses => prop_assert!(!what.is_empty()),
        Err(other) => return Err(TestCaseError::fail(format!("parsing cannot fail with {other}"))),
        Ok(request) => prop_assert!(!request.messages.is_empty()),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_body_makes_a_parser_panic(
        which in any::<Index>(),
        edits in proptest::collection::vec((any::<Index>(), any::<Index>(), 0_usize..12), 1..6),
    ) {
        let bodies = bodies::all();
        let chosen = which.get(&bodies);
        let mut bytes = chosen.body.to_string().into_bytes();
        for (place, piece, cut) in edits {
            let start = place.index(bytes.len() + 1);
            let end = (start + cut).min(bytes.len());
            bytes.splice(start..end, piece.get(&PIECES).bytes());
        }
        check(chosen.dialect, &bytes)?;
    }

    #[test]
    fn a_value_of_another_type_names_its_field(
        which in any::<Index>(),
        place in any::<Index>(),
        piece in any::<Index>(),
    ) {
        let bodies = bodies::all();
        let chosen = which.get(&bodies);
        let mut body = chosen.body.clone();
        let pointers = pointers(&body, "");
        let value: &str = piece.get::<&str>(&VALUES);
        let target = body.pointer_mut(place.get::<String>(&pointers)).expect("the pointer is of this body");
        *target = serde_json::from_str(value).expect("the value is JSON");
        check(chosen.dialect, body.to_string().as_bytes())?;
    }
}

/// The pointers of all values in a body.
pub(crate) fn pointers(value: &serde_json::Value, at: &str) -> Vec<String> {
    let children: Vec<(String, &serde_json::Value)> = match value {
        serde_json::Value::Object(map) => map.iter().map(|(key, value)| (format!("{at}/{key}"), value)).collect(),
        serde_json::Value::Array(list) => {
            list.iter().enumerate().map(|(index, value)| (format!("{at}/{index}"), value)).collect()
        }
        _ => Vec::new(),
    };
    let below = children.into_iter().flat_map(|(at, value)| pointers(value, &at));
    std::iter::once(at.to_owned()).chain(below).collect()
}

#[test]
fn a_deep_body_is_no_stack_overflow() {
    let nested = |levels: usize| {
        let deep = "[".repeat(levels) + &"]".repeat(levels);
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],"deep":{deep}}}"#);
        Dialect::Chat.parse(body.as_bytes())
    };
    let request = nested(DEPTH_MAX - 1).expect("what is not interpreted may be deep");
    assert_eq!(request.other.len(), 1);
    for levels in [DEPTH_MAX, 1_000_000] {
        let refused = nested(levels).expect_err("libraries would refuse it later");
        assert_eq!(field_of(&refused), ("body", 400));
    }
}
