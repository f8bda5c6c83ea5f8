//! Explains parse errors in terms of JSON or TOML instead of the parser's Rust types.

/// Words that differ between the formats.
#[derive(Clone, Copy)]
struct Words {
    /// What a set of named values is called.
    object: &'static str,
}

const JSON: Words = Words { object: "an object" };

const TOML: Words = Words { object: "a table" };

/// The most characters of a value that an explanation quotes.
const QUOTED_CHARS_MAX: usize = 64;

/// The explanation if the parser reports neither the allowed names nor the value found.
const ONE_OF_ITS_NAMES: &str = "must be one of the allowed names, written as text";

/// Explains a parser message to the author of JSON.
pub(crate) fn explain(message: &str) -> String {
    explain_in(JSON, message)
}

/// Explains a parser message to the author of TOML.
pub fn explain_toml(message: &str) -> String {
    explain_in(TOML, message)
}

/// Explains an error in JSON text, with its line and column.
pub(crate) fn explain_text(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let message = text.split(" at line ").next().unwrap_or(&text);
    format!("{} (line {}, column {})", explain(message), error.line(), error.column())
}

fn explain_in(words: Words, message: &str) -> String {
    if message == "invalid type: unit variant, expected string only" {
        return ONE_OF_ITS_NAMES.to_owned();
    }
    let strip = |prefix: &str| message.strip_prefix(prefix);
    if let Some(rest) = strip("invalid type: ").or_else(|| strip("invalid value: ")) {
        // The value found may contain the same words, so the split is at their last occurrence.
        if let Some((found, expected)) = rest.rsplit_once(", expected ") {
            return format!("must be {}, not {}", expectation(words, expected), finding(words, found));
        }
    }
    if let Some((length, expected)) = strip("invalid length ").and_then(|rest| rest.split_once(", expected ")) {
        return format!("must be {}, but has length {length}", expectation(words, expected));
    }
    if let Some((found, expected)) = strip("unknown variant `").and_then(|rest| rest.rsplit_once("`, expected ")) {
        return format!("`{}` is not one of the allowed values: {}", quoted(found), names(expected));
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
        return format!("duplicate field {field}: a field may appear only once");
    }
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "must be a whole number".to_owned()
        }
        "number too large to fit in target type" => "the number is too large".to_owned(),
        "number too small to fit in target type" => "the number is too small".to_owned(),
        "number out of range" => "the number is out of range".to_owned(),
        "recursion limit exceeded" => "the value is nested too deeply".to_owned(),
        "lone leading surrogate in hex escape" | "unexpected end of hex escape" => {
            "the text contains half of a surrogate pair, which is no character".to_owned()
        }
        "trailing characters" => "there is extra text after the value".to_owned(),
        "expected value" => "a value is missing here".to_owned(),
        "expected ident" => "must be true, false or null".to_owned(),
        "invalid number" => "the number is not a valid JSON number".to_owned(),
        // These messages are from the TOML parser, about a value that must be one of several names.
        "wanted exactly 1 element, found 0 elements"
        | "wanted exactly 1 element, more than 1 element"
        | "expected empty array"
        | "expected empty table" => ONE_OF_ITS_NAMES.to_owned(),
        _ if message.starts_with("expected table, found ") => ONE_OF_ITS_NAMES.to_owned(),
        _ if message.starts_with("EOF while parsing") => "the text ends before the value is complete".to_owned(),
        _ if message.starts_with("expected `") => {
            format!("{} is missing here", message.trim_start_matches("expected "))
        }
        _ => message.to_owned(),
    }
}

/// Describes what a value must be.
fn expectation(words: Words, expected: &str) -> String {
    let plain = match expected {
        "f32" | "f64" => "a number",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number of at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "a string" | "string" | "a borrowed string" | "str" => "text",
        "a boolean" | "bool" => "true or false",
        "a sequence" | "sequence" => "an array",
        "a map" | "map" => words.object,
        "string or map" | "string only" | "variant identifier" => "one of the allowed names",
        "unit" | "null" => "null",
        _ if expected.starts_with("struct ") => words.object,
        // These are spans of versions, which are arrays of a fixed length.
        _ if expected.starts_with("tuple struct ") => {
            let (_, length) = expected.rsplit_once(" with ").unwrap_or(("", "all its elements"));
            return format!("an array of {length}");
        }
        _ if expected.starts_with("a tuple of size ") => {
            return expected.replacen("a tuple of size", "an array of length", 1);
        }
        _ => expected,
    };
    plain.to_owned()
}

/// Describes the value that was found.
fn finding(words: Words, found: &str) -> String {
    if let Some(text) = found.strip_prefix("string \"").and_then(|text| text.strip_suffix('"')) {
        return format!("the text \"{}\"", quoted(text));
    }
    let number = ["integer `", "floating point `", "boolean `"].iter().find_map(|prefix| found.strip_prefix(prefix));
    if let Some(number) = number {
        return number.trim_end_matches('`').to_owned();
    }
    let plain = match found {
        "sequence" => "an array",
        "map" | "enum" => words.object,
        "unit value" | "Option value" => "null",
        _ => return quoted(found),
    };
    plain.to_owned()
}

/// The list of names in a parser message, without its introduction.
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
    use forebay_wire::{AckRequest, BatchState, Object, PolicyRules, Segment};
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
        assert_eq!(explained::<String>("true"), "must be text, not true");
        assert_eq!(explained::<Object<AckRequest>>("[1]"), "must be an object, not an array");
        assert_eq!(explained::<AckRequest>("{\"lease\": \"a\"}"), "the field `step` is missing");
        assert!(
            explained::<BatchState>("\"lost\"")
                .starts_with("`lost` is not one of the allowed values: `leased`, `returned`, ")
        );
        let unknown = explained::<PolicyRules>("{\"grup\": 1}");
        assert!(unknown.starts_with("unknown field `grup`: the fields here are `require`, `group`, "), "{unknown}");
        assert_eq!(
            explained::<PolicyRules>("{\"group\": {\"on_drop\": \"x\"}}"),
            "`x` is not one of the allowed values: `refill` or `shrink`"
        );
        assert_eq!(explained::<[u8; 2]>("[1]"), "must be an array of length 2, but has length 1");
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
