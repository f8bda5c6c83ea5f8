//! How much structure a JSON text has, counted before anything is built of it.
//!
//! A value takes many more bytes in memory than in a text: `{},` is three bytes, and a message is more than a hundred. So
//! a body with more than [`VALUES_MAX`] values is refused, and each value has a price ([`price`]) in the budget of bytes.
//! One pass over the text counts, without memory of its own.

use crate::{dialect::error::DialectError, request::Request};

/// The most values of a body: elements of arrays, entries of objects, and these themselves. The arguments of all tool calls,
/// which are JSON in texts, may have as many again. A conversation of a million tokens has about a tenth as many.
pub const VALUES_MAX: usize = 1 << 18;

/// The most arrays and objects inside each other. The libraries that build values refuse more than 128.
pub const DEPTH_MAX: usize = 100;

/// What a value costs in a budget besides its text, in bytes. So a call takes at most eight times its price: the test
/// `a_call_takes_at_most_eight_times_its_price` measures it.
const VALUE_BYTES: usize = 48;

/// What a value of a document costs besides its text. A converter may build several values for one.
const DOCUMENT_VALUE_BYTES: usize = 96;

/// What a number in an array of a document costs besides its text. Most are read into columns.
const NUMBER_BYTES: usize = 8;

/// What is counted of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Structure {
    pub(crate) values: usize,
    pub(crate) depth: usize,
    /// The values of JSON in texts, such as the arguments of tool calls.
    pub(crate) values_in_texts: usize,
    /// The values that are numbers in arrays.
    numbers: usize,
}

impl Structure {
    /// Counts. If the text is no JSON, the counts mean nothing, and the parser refuses it.
    pub(crate) fn of(json: &[u8]) -> Self {
        Self::count(json.iter().copied())
    }

    fn count(mut bytes: impl Iterator<Item = u8>) -> Self {
        let (mut found, mut open) = (Self { values: 1, ..Self::default() }, 0_usize);
        // Whether an element of an array, or the name of an entry, comes next.
        let mut begins = false;
        while let Some(byte) = bytes.next() {
            if byte.is_ascii_whitespace() {
                continue;
            }
            found.numbers += usize::from(begins && matches!(byte, b'-' | b'0'..=b'9'));
            begins = matches!(byte, b',' | b'[');
            match byte {
                b'"' => found.values_in_texts += values_in(&mut Text(&mut bytes)),
                b',' => found.values += 1,
                b'[' | b'{' => {
                    found.values += 1;
                    open += 1;
                    found.depth = found.depth.max(open);
                }
                b']' | b'}' => open = open.saturating_sub(1),
                _ => {}
            }
        }
        found
    }
}

/// The values of a text, if it is an array or an object. Texts in it do not count.
fn values_in<I: Iterator<Item = u8>>(text: &mut I) -> usize {
    let Some(first) = text.next() else { return 0 };
    let (mut values, is_json) = (0, matches!(first, b'[' | b'{'));
    while let Some(byte) = text.next() {
        match byte {
            b'"' if is_json => while Text(text).next().is_some() {},
            b',' | b'[' | b'{' if is_json => values += 1,
            _ => {}
        }
    }
    values
}

/// The bytes of a text until its closing quote, without the escapes of quotes and backslashes. Of other escapes only the
/// letter is left.
struct Text<'a, I>(&'a mut I);

impl<I: Iterator<Item = u8>> Iterator for Text<'_, I> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        match self.0.next()? {
            b'"' => None,
            b'\\' => self.0.next(),
            byte => Some(byte),
        }
    }
}

/// The bytes that the body of a call takes from a budget.
#[must_use]
pub fn price(body: &[u8]) -> usize {
    let Structure { values, values_in_texts, .. } = Structure::of(body);
    body.len() + VALUE_BYTES * (values.min(VALUES_MAX) + values_in_texts.min(VALUES_MAX))
}

/// The bytes that a document with columns of numbers takes from a budget. It may have any number of values.
#[must_use]
pub fn price_with_columns(document: &[u8]) -> usize {
    let Structure { values, values_in_texts, numbers, .. } = Structure::of(document);
    document.len() + DOCUMENT_VALUE_BYTES * (values - numbers + values_in_texts) + NUMBER_BYTES * numbers
}

/// Refuses a body with more structure than allowed.
pub(crate) fn check(body: &[u8]) -> Result<(), DialectError> {
    let Structure { values, depth, .. } = Structure::of(body);
    if values > VALUES_MAX {
        let why = format!("has {values} values and may have {VALUES_MAX}: send fewer messages, parts and tools");
        return Err(DialectError::invalid("body", why));
    }
    if depth > DEPTH_MAX {
        let why = format!("has {depth} arrays and objects inside each other and may have {DEPTH_MAX}");
        return Err(DialectError::invalid("body", why));
    }
    Ok(())
}

/// Refuses a request whose tool calls have arguments with more structure than allowed.
pub(crate) fn check_arguments(request: &Request) -> Result<(), DialectError> {
    let calls = request.messages.iter().flat_map(|message| &message.tool_calls);
    let values: usize = calls.map(|call| values_in(&mut call.arguments.trim_start().bytes())).sum();
    if values > VALUES_MAX {
        let why = format!("have tool calls whose arguments have {values} values in all and may have {VALUES_MAX}");
        return Err(DialectError::invalid("messages", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_levels_are_counted_outside_of_texts() {
        for (json, values, depth, values_in_texts, numbers) in [
            ("0", 1, 0, 0, 0),
            (r#""a[,{\"[,""#, 1, 0, 0, 0),
            ("[]", 2, 1, 0, 0),
            ("[0, -1.5e9,\n2]", 4, 1, 0, 3),
            (r#"{"a":0,"b":1}"#, 3, 1, 0, 0),
            (r#"["","",[]]"#, 5, 2, 0, 0),
            // An empty array counts as if it had a value.
            (r#"{"a,":[{"b":"\\"},[[]]]}"#, 7, 4, 0, 0),
            (r#"["[0,0]","{\"a\":\"x,\\\",\\\\\",\"b\":0}","a,b",0]"#, 5, 1, 2, 1),
        ] {
            let expected = Structure { values, depth, values_in_texts, numbers };
            assert_eq!(Structure::of(json.as_bytes()), expected, "{json}");
        }
        assert_eq!(price(b"[0,0]"), 5 + 3 * VALUE_BYTES);
        assert_eq!(price(br#"["[0,0]"]"#), 9 + 3 * VALUE_BYTES);
        assert_eq!(price_with_columns(b"[0,0]"), 5 + DOCUMENT_VALUE_BYTES + 2 * NUMBER_BYTES);
    }
}
