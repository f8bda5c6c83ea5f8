//! JSON and values as Python writes them, because chat templates are written for Python.

use std::fmt::Write as _;

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

/// The options of Python's `json.dumps`, with the defaults that `transformers` gives them.
#[derive(Clone, Debug, Default)]
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    /// Number of spaces of each level; everything is on one line if absent.
    pub(super) indent: Option<usize>,
    /// Between entries, and between a key and its value.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// Writes a value as JSON.
    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut text = String::new();
        self.value(&mut text, value, 0)?;
        Ok(text)
    }

    fn value(&self, text: &mut String, value: &Value, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&number(value)),
            ValueKind::String => self.string(text, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut entries: Vec<(String, Value)> = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key.to_string(), value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|left, right| left.0.cmp(&right.0));
                }
                self.block(text, level, "{}", entries, |text, (key, value)| {
                    self.string(text, &key);
                    text.push_str(self.separators.as_ref().map_or(": ", |(_, colon)| colon.as_str()));
                    self.value(text, &value, level + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let entries: Vec<Value> = value.try_iter()?.collect();
                self.block(text, level, "[]", entries, |text, value| self.value(text, &value, level + 1))?;
            }
            kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn block<T>(
        &self,
        text: &mut String,
        level: usize,
        brackets: &str,
        entries: Vec<T>,
        mut write: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (open, close) = brackets.split_at(1);
        text.push_str(open);
        let is_empty = entries.is_empty();
        for (index, entry) in entries.into_iter().enumerate() {
            if index > 0 {
                let plain = if self.indent.is_some() { "," } else { ", " };
                text.push_str(self.separators.as_ref().map_or(plain, |(comma, _)| comma.as_str()));
            }
            self.new_line(text, level + 1);
            write(text, entry)?;
        }
        if !is_empty {
            self.new_line(text, level);
        }
        text.push_str(close);
        Ok(())
    }

    fn new_line(&self, text: &mut String, level: usize) {
        if let Some(indent) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn string(&self, text: &mut String, content: &str) {
        let quoted = serde_json::Value::from(content).to_string();
        if !self.ensure_ascii {
            text.push_str(&quoted);
            return;
        }
        for character in quoted.chars() {
            if character.is_ascii() {
                text.push(character);
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
    }
}

/// A value as Python's `str` writes it, where a template prints it.
pub(super) fn python_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Undefined => String::new(),
        _ => python_repr(value),
    }
}

fn python_repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let entries = keys.map(|key| {
                let entry = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", python_repr(&key), python_repr(&entry))
            });
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        ValueKind::Seq => {
            let entries = value.try_iter().into_iter().flatten().map(|entry| python_repr(&entry));
            format!("[{}]", entries.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// Python prefers single quotes.
fn quoted(content: &str) -> String {
    let quote = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    let mut text = String::from(quote);
    for character in content.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            character if character == quote => text.extend(['\\', character]),
            character if character.is_ascii_control() => {
                let _ = write!(text, "\\x{:02x}", u32::from(character));
            }
            character => text.push(character),
        }
    }
    text.push(quote);
    text
}

/// A number as Python's `repr` writes it: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if float == 0.0 || (1e-4..1e16).contains(&float.abs()) {
        return format!("{float:?}");
    }
    let text = format!("{float:e}");
    let (digits, exponent) = text.split_once('e').expect("the format has an exponent");
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).expect("it is JSON")
    }

    #[test]
    fn json_is_that_of_python() {
        let shown = value(r#"{"b": [1, 2.5, 1.0], "a": {"<&>'\"é": null, "t": true}, "e": {}, "n": []}"#);
        let compact = r#"{"b": [1, 2.5, 1.0], "a": {"<&>'\"é": null, "t": true}, "e": {}, "n": []}"#;
        assert_eq!(Dumps::default().write(&shown).expect("it can be written"), compact);
        let all = Dumps {
            ensure_ascii: true,
            indent: Some(2),
            separators: Some((",".to_owned(), ":".to_owned())),
            sort_keys: true,
        };
        // From json.dumps(..., ensure_ascii=True, indent=2, separators=(",", ":"), sort_keys=True).
        let pretty = "{\n  \"a\":{\n    \"<&>'\\\"\\u00e9\":null,\n    \"t\":true\n  },\n  \"b\":[\n    1,\n    2.5,\n    1.0\n  ],\n  \"e\":{},\n  \"n\":[]\n}";
        assert_eq!(all.write(&shown).expect("it can be written"), pretty);
        let astral = Dumps { ensure_ascii: true, ..Dumps::default() }.write(&value("\"😀\\u0007\"")).expect("a text");
        assert_eq!(astral, "\"\\ud83d\\ude00\\u0007\"");
        assert!(Dumps::default().write(&Value::UNDEFINED).is_err());
    }

    #[test]
    fn numbers_are_those_of_python() {
        for (json, expected) in [
            ("1", "1"),
            ("-7", "-7"),
            ("18446744073709551615", "18446744073709551615"),
            ("1.0", "1.0"),
            ("0.1", "0.1"),
            ("-0.0", "-0.0"),
            ("1e-4", "0.0001"),
            ("1e-5", "1e-05"),
            ("1.5e-7", "1.5e-07"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.25e100", "1.25e+100"),
        ] {
            assert_eq!(number(&value(json)), expected);
        }
    }

    #[test]
    fn printed_values_are_those_of_python() {
        for (json, expected) in [
            ("null", "None"),
            ("true", "True"),
            ("\"it's\"", "it's"),
            (r#"["it's", "a\nb", "\"", "'\""]"#, r#"["it's", 'a\nb', '"', '\'"']"#),
            (r#"{"a": [1, false], "b": {}}"#, "{'a': [1, False], 'b': {}}"),
        ] {
            assert_eq!(python_str(&value(json)), expected);
        }
    }
}
