//! What is wrong with a value, in the words of JSON instead of those of the parser's types.

/// Characters of a value that an explanation quotes.
const QUOTED_CHARS_MAX: usize = 64;

/// A message of the parser as a sentence for who wrote the JSON.
pub(super) fn explain(message: &str) -> String {
    let strip = |prefix: &str| message.strip_prefix(prefix);
    if let Some(rest) = strip("invalid type: ").or_else(|| strip("invalid value: ")) {
        // What was found may quote the same words: the last ones are the parser's.
        if let Some((found, expected)) = rest.rsplit_once(", expected ") {
            return format!("must be {}, not {}", expectation(expected), finding(found));
        }
    }
    if let Some((length, expected)) = strip("invalid length ").and_then(|rest| rest.split_once(", expected ")) {
        return format!("must be {}, and has {length}", expectation(expected));
    }
    if let Some((found, expected)) = strip("unknown variant `").and_then(|rest| rest.rsplit_once("`, expected ")) {
        return format!("`{}` is none of its values: {}", quoted(found), names(expected));
    }
    if let Some(rest) = strip("unknown field `") {
        return match rest.rsplit_once("`, expected ") {
            Some((found, expected)) => {
                format!("unknown field `{}`: the fields here are {}", quoted(found), names(expected))
            }
            None => {
                format!("unknown field `{}`: there are no fields here", quoted(rest.split('`').next().unwrap_or(rest)))
            }
        };
    }
    if let Some(field) = strip("missing field ") {
        return format!("the field {field} is missing");
    }
    if let Some(field) = strip("duplicate field ") {
        return format!("duplicate field {field}: a field may be there only once");
    }
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "must be a whole number".to_owned()
        }
        "number too large to fit in target type" => "the number is too large".to_owned(),
        "number too small to fit in target type" => "the number is too small".to_owned(),
        "number out of range" => "the number is out of range".to_owned(),
        "recursion limit exceeded" => "the value is nested too deeply".to_owned(),
        "trailing characters" => "something follows the value".to_owned(),
        "expected value" => "a value is missing here".to_owned(),
        _ if message.starts_with("EOF while parsing") => "the text ends before the value does".to_owned(),
        _ => message.to_owned(),
    }
}

/// What a value must be.
fn expectation(expected: &str) -> String {
    let plain = match expected {
        "f32" | "f64" => "a number",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number of at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "a string" | "string" | "a borrowed string" | "str" => "a text",
        "a boolean" | "bool" => "true or false",
        "a sequence" | "sequence" => "an array",
        "a map" | "map" => "an object",
        "string or map" | "variant identifier" => "one of its names",
        "unit" | "null" => "null",
        _ if expected.starts_with("struct ") => "an object",
        // Spans of versions, which are arrays of a fixed length.
        _ if expected.starts_with("tuple struct ") => {
            let (_, length) = expected.rsplit_once(" with ").unwrap_or(("", "all its elements"));
            return format!("an array of {length}");
        }
        _ if expected.starts_with("a tuple of size ") => {
            return expected.replacen("a tuple of size", "an array with as many entries as", 1);
        }
        _ => expected,
    };
    plain.to_owned()
}

/// What a value is.
fn finding(found: &str) -> String {
    if let Some(text) = found.strip_prefix("string \"").and_then(|text| text.strip_suffix('"')) {
        return format!("the text \"{}\"", quoted(text));
    }
    let number = ["integer `", "floating point `", "boolean `"].iter().find_map(|prefix| found.strip_prefix(prefix));
    if let Some(number) = number {
        return number.trim_end_matches('`').to_owned();
    }
    let plain = match found {
        "sequence" => "an array",
        "map" | "enum" => "an object",
        "unit value" | "Option value" => "null",
        _ => return quoted(found),
    };
    plain.to_owned()
}

/// Names as the parser lists them, without its own words.
fn names(expected: &str) -> &str {
    expected.strip_prefix("one of ").unwrap_or(expected)
}

fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use forebay_client::wire::{AckRequest, BatchState, Object, PolicyRules, Segment};
    use serde::de::DeserializeOwned;

    use super::*;

    fn explained<T: DeserializeOwned + std::fmt::Debug>(text: &str) -> String {
        let error = serde_json::from_str::<T>(text).expect_err("the value is wrong").to_string();
        explain(error.split(" at line ").next().expect("there is a message"))
    }

    #[test]
    fn explanations_speak_of_json() {
        assert_eq!(explained::<f32>("\"a\""), "must be a number, not the text \"a\"");
        assert_eq!(explained::<f32>("null"), "must be a number, not null");
        assert_eq!(explained::<u32>("-1"), "must be a whole number from 0 to 4294967295, not -1");
        assert_eq!(explained::<i64>("1.5"), "must be a whole number, not 1.5");
        assert_eq!(explained::<bool>("[]"), "must be true or false, not an array");
        assert_eq!(explained::<Vec<u8>>("{}"), "must be an array, not an object");
        assert_eq!(explained::<String>("true"), "must be a text, not true");
        assert_eq!(explained::<Object<AckRequest>>("[1]"), "must be an object, not an array");
        assert_eq!(explained::<AckRequest>("{\"lease\": \"a\"}"), "the field `step` is missing");
        assert!(
            explained::<BatchState>("\"lost\"").starts_with("`lost` is none of its values: `leased`, `returned`, ")
        );
        let unknown = explained::<PolicyRules>("{\"grup\": 1}");
        assert!(unknown.starts_with("unknown field `grup`: the fields here are `require`, `group`, "), "{unknown}");
        assert_eq!(
            explained::<PolicyRules>("{\"group\": {\"on_drop\": \"x\"}}"),
            "`x` is none of its values: `refill` or `shrink`"
        );
        assert_eq!(explained::<[u8; 2]>("[1]"), "must be an array of length 2, and has 1");
    }

    #[test]
    fn explanations_name_no_type_of_the_implementation() {
        let values = ["null", "true", "-1", "1.5", "1e99", "\"x, expected f32\"", "[]", "{}", "[[]]", "{\"a\":1}"];
        let fields = ["tokens", "loss_mask", "logprobs", "versions", "kind", "response_length", "values"];
        for (field, value) in fields.iter().flat_map(|field| values.map(|value| (field, value))) {
            let text = format!("{{\"tokens\": [1, 2], \"loss_mask\": [1], \"{field}\": {value}}}");
            let Err(error) = serde_json::from_str::<Segment>(&text) else { continue };
            let error = error.to_string();
            let explained = explain(error.split(" at line ").next().expect("there is a message"));
            let own = explained.replace("\"x, expected f32\"", "");
            for word in [
                "f32", "f64", "u8", "u32", "i32", "i64", "struct", "enum", "variant", "sequence", " map", "tuple",
                "expected", "invalid",
            ] {
                assert!(!own.contains(word), "{field}: {value}: {own}");
            }
        }
    }
}
