//! The parts of an answer's text: reasoning, content and tool calls, in the form of Qwen's models.
//!
//! ```text
//! <think>
//! reasoning
//! </think>
//!
//! content
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```
//!
//! The text may arrive in any pieces. Text that may turn out to belong to a tag is held back.

use serde::Deserialize;
use serde_json::value::RawValue;

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// A part of an answer, or the next piece of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Part {
    Reasoning(String),
    Content(String),
    Call {
        name: String,
        /// JSON, as the model wrote it.
        arguments: String,
    },
}

/// Divides a text that arrives in pieces.
#[derive(Debug)]
pub(in super::super) struct Parts {
    /// Text that no part was made of yet.
    rest: String,
    place: Place,
    has_tools: bool,
    /// Whether space is dropped before the next text.
    drops_space: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At the beginning, where reasoning may begin.
    Start,
    Reasoning,
    Content,
    Call,
}

impl Parts {
    /// `reasoning` separates reasoning from content; `has_begun` says that the prompt has begun the reasoning.
    pub(in super::super) fn new(reasoning: bool, has_begun: bool, has_tools: bool) -> Self {
        let place = match (reasoning, has_begun) {
            (true, true) => Place::Reasoning,
            (true, false) => Place::Start,
            (false, _) => Place::Content,
        };
        Self { rest: String::new(), place, has_tools, drops_space: place == Place::Reasoning }
    }

    /// Adds text, and returns what it completes.
    pub(in super::super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.rest.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Returns what was held back, at the end of the text.
    pub(in super::super) fn finish(&mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.rest);
        let mut parts = Vec::new();
        match self.place {
            Place::Reasoning => push(&mut parts, Part::Reasoning, rest.trim_end()),
            // A call that was cut is no call.
            Place::Call => push(&mut parts, Part::Content, &format!("{CALL}{rest}")),
            Place::Start | Place::Content => push(&mut parts, Part::Content, &rest),
        }
        parts
    }

    /// Makes parts of the rest up to the next tag. Returns whether there may be more.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.drops_space {
            self.rest = self.rest.trim_start().to_owned();
            self.drops_space = self.rest.is_empty();
        }
        match self.place {
            Place::Start => {
                let begun = self.rest.trim_start();
                if let Some(after) = begun.strip_prefix(THINK) {
                    self.rest = after.to_owned();
                    self.go_to(Place::Reasoning);
                } else if THINK.starts_with(begun) {
                    return false;
                } else {
                    self.place = Place::Content;
                }
                true
            }
            Place::Reasoning => self.text_until(parts, THINK_END, Place::Content, Part::Reasoning),
            Place::Content if self.has_tools => self.text_until(parts, CALL, Place::Call, Part::Content),
            Place::Content => {
                push(parts, Part::Content, &std::mem::take(&mut self.rest));
                false
            }
            Place::Call => {
                let Some(end) = self.rest.find(CALL_END) else { return false };
                let inner = self.rest[..end].to_owned();
                self.rest.drain(..end + CALL_END.len());
                self.go_to(Place::Content);
                match call(&inner) {
                    Some(call) => parts.push(call),
                    None => push(parts, Part::Content, &format!("{CALL}{inner}{CALL_END}")),
                }
                true
            }
        }
    }

    /// Makes a part of the text before `tag`, without the space at its end.
    fn text_until(&mut self, parts: &mut Vec<Part>, tag: &str, next: Place, make: fn(String) -> Part) -> bool {
        if let Some(end) = self.rest.find(tag) {
            push(parts, make, self.rest[..end].trim_end());
            self.rest.drain(..end + tag.len());
            self.go_to(next);
            return true;
        }
        let told = self.rest.len() - held(&self.rest, tag);
        push(parts, make, &self.rest[..told]);
        self.rest.drain(..told);
        false
    }

    fn go_to(&mut self, place: Place) {
        self.place = place;
        self.drops_space = true;
    }
}

fn push(parts: &mut Vec<Part>, make: fn(String) -> Part, text: &str) {
    if !text.is_empty() {
        parts.push(make(text.to_owned()));
    }
}

/// Number of bytes at the end of `text` that may be the beginning of `tag`, with the space before them.
fn held(text: &str, tag: &str) -> usize {
    let begun = (1..tag.len()).rev().find(|&length| text.ends_with(&tag[..length])).unwrap_or(0);
    let kept = text[..text.len() - begun].trim_end();
    text.len() - kept.len()
}

/// A call, if the text between the tags is one.
fn call(text: &str) -> Option<Part> {
    #[derive(Deserialize)]
    struct Call<'text> {
        name: String,
        #[serde(borrow)]
        arguments: Option<&'text RawValue>,
    }
    let call: Call<'_> = serde_json::from_str(text.trim()).ok()?;
    let arguments = call.arguments.map_or("{}", RawValue::get);
    // Some models write the arguments as JSON in a text.
    let arguments = serde_json::from_str::<String>(arguments).unwrap_or_else(|_| arguments.to_owned());
    Some(Part::Call { name: call.name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Divides a text that arrives in pieces of `size` characters. Neighbouring parts of one kind are joined.
    fn divide(text: &str, size: usize, mut parts: Parts) -> Vec<Part> {
        let characters: Vec<char> = text.chars().collect();
        let mut found: Vec<Part> =
            characters.chunks(size).flat_map(|piece| parts.push(&piece.iter().collect::<String>())).collect();
        found.extend(parts.finish());
        let mut joined: Vec<Part> = Vec::new();
        for part in found {
            match (joined.last_mut(), part) {
                (Some(Part::Content(text)), Part::Content(more))
                | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    fn content(text: &str) -> Part {
        Part::Content(text.to_owned())
    }

    fn reasoning(text: &str) -> Part {
        Part::Reasoning(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> Part {
        Part::Call { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    #[test]
    fn parts_are_the_same_however_the_text_arrives() {
        let cases: [(&str, Vec<Part>); 9] = [
            ("plain text \n", vec![content("plain text \n")]),
            ("<think>\nwhy\n\nso\n</think>\n\nyes", vec![reasoning("why\n\nso"), content("yes")]),
            ("<think>\n\n</think>\n\nyes", vec![content("yes")]),
            ("<think>cut", vec![reasoning("cut")]),
            (
                "<think>t</think>I call.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":  \"<tool\"}}\n</tool_call>\n\
                 <tool_call>{\"name\":\"g\"}</tool_call>\n",
                vec![reasoning("t"), content("I call."), call("f", "{\"a\":  \"<tool\"}"), call("g", "{}")],
            ),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>after",
                vec![call("f", "{\"a\": 1}"), content("after")],
            ),
            ("a <tool_call>not JSON</tool_call> b", vec![content("a<tool_call>not JSON</tool_call>b")]),
            ("a <tool_call>{\"name\"", vec![content("a<tool_call>{\"name\"")]),
            ("1 < 2 <to", vec![content("1 < 2 <to")]),
        ];
        for (text, expected) in cases {
            for size in [1, 2, 3, 7, 1_000] {
                assert_eq!(divide(text, size, Parts::new(true, false, true)), expected, "{text} in pieces of {size}");
            }
        }
    }

    #[test]
    fn only_what_was_asked_for_is_separated() {
        let text = "<think>a</think><tool_call>{\"name\": \"f\"}</tool_call>";
        assert_eq!(divide(text, 3, Parts::new(false, false, false)), [content(text)]);
        let begun = divide("\nwhy</think>yes", 2, Parts::new(true, true, false));
        assert_eq!(begun, [reasoning("why"), content("yes")]);
    }

    #[test]
    fn text_that_belongs_to_no_tag_is_not_held_back() {
        let mut parts = Parts::new(true, false, true);
        assert_eq!(parts.push("Hello "), [content("Hello")]);
        assert_eq!(parts.push("wor<"), [content(" wor")]);
        assert_eq!(parts.push("ld"), [content("<ld")]);
    }
}
