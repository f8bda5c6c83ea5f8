//! Reading JSON with errors that have pointers, and lists of such errors.

use std::{borrow::Cow, collections::BTreeMap, fmt::Write as _};

use forebay_wire::{Object, Violation, replace_lone_surrogates};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::format::{Imported, Note};

/// The most violations reported for one document.
pub(crate) const VIOLATIONS_MAX: usize = 100;

/// The entries of an object, not parsed further.
pub(crate) type Fields<'d> = BTreeMap<String, &'d RawValue>;

/// The document as text of whole characters.
pub(crate) fn characters<'d>(text: &'d [u8], imported: &mut Imported) -> Result<Cow<'d, str>, Vec<Violation>> {
    let text = replace_lone_surrogates(utf8(text)?);
    imported.note(Note::SurrogateReplaced, u64::from(matches!(text, Cow::Owned(_))));
    Ok(text)
}

fn utf8(text: &[u8]) -> Result<&str, Vec<Violation>> {
    std::str::from_utf8(text).map_err(|_| vec![violation("", "the document is not UTF-8 text")])
}

/// Reads the entries of a document, which must be an object.
pub(crate) fn fields(text: &[u8]) -> Result<Fields<'_>, Vec<Violation>> {
    let text = utf8(text)?;
    serde_json::from_str(text).map_err(|error| vec![violation("", explain(&error))])
}

/// The document as one value, not parsed further.
pub(crate) fn whole(text: &[u8]) -> Result<&RawValue, Vec<Violation>> {
    serde_json::from_slice(text).map_err(|error| vec![violation("", explain(&error))])
}

/// Reads a value at a place of a document. Errors have pointers into the document.
pub(crate) fn parse<'d, T: Deserialize<'d>>(at: &str, text: &'d str) -> Result<T, Violation> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let place = pointer(error.path());
        let text = error.inner().to_string();
        // The path of a missing field is that of its object.
        let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let field = missing.map(|field| format!("/{}", escape(field))).unwrap_or_default();
        violation(format!("{at}{place}{field}"), explain(error.inner()))
    })
}

/// Reads an object at a place of a document.
pub(crate) fn object<T: DeserializeOwned>(at: &str, text: &RawValue) -> Result<T, Violation> {
    parse(at, text.get()).map(|Object(value)| value)
}

/// The value at a JSON pointer, not parsed.
pub(crate) fn value_at<'d>(text: &'d RawValue, pointer: &str) -> Option<&'d RawValue> {
    let mut value = text;
    for token in pointer.strip_prefix('/')?.split('/') {
        let token = token.replace("~1", "/").replace("~0", "~");
        value = if value.get().starts_with('[') {
            let mut items: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
            let index: usize = token.parse().ok()?;
            (index < items.len()).then(|| items.swap_remove(index))?
        } else {
            let mut entries: Fields<'_> = serde_json::from_str(value.get()).ok()?;
            entries.remove(&token)?
        };
    }
    Some(value)
}

/// JSON of plain data.
pub(crate) fn raw(value: &impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).expect("plain data is JSON")
}

pub(crate) fn violation(pointer: impl Into<String>, detail: impl Into<String>) -> Violation {
    Violation { pointer: pointer.into(), detail: detail.into() }
}

/// A JSON pointer's reference token (RFC 6901).
pub(crate) fn escape(token: &str) -> String {
    token.replace('~', "~0").replace('/', "~1")
}

/// The violations that were found in a document, bounded in number.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<Violation>);

impl Problems {
    pub(crate) fn push(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        self.add(violation(pointer, detail));
    }

    pub(crate) fn add(&mut self, violation: Violation) {
        if self.0.len() < VIOLATIONS_MAX {
            self.0.push(violation);
        }
    }

    pub(crate) fn require(&mut self, holds: bool, pointer: &str, detail: &str) {
        if !holds {
            self.push(pointer, detail);
        }
    }

    /// Takes an entry out of an object and reads it. `null` is the same as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, fields: &mut Fields<'_>, base: &str, name: &str) -> Option<T> {
        let value = fields.remove(name)?;
        match parse::<Option<T>>(&format!("{base}/{}", escape(name)), value.get()) {
            Ok(value) => value,
            Err(violation) => {
                self.add(violation);
                None
            }
        }
    }

    /// The violations, or the value if there are none.
    pub(crate) fn or<T>(self, value: T) -> Result<T, Vec<Violation>> {
        if self.0.is_empty() { Ok(value) } else { Err(self.0) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Violation> for Problems {
    fn from(violation: Violation) -> Self {
        Self(vec![violation])
    }
}

fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => {
                let _ = write!(pointer, "/{index}");
            }
            Segment::Map { key } => {
                let _ = write!(pointer, "/{}", escape(key));
            }
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    pointer
}

/// The message of a parse error in terms of JSON.
fn explain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let message = text.split(" at line ").next().unwrap_or(&text);
    if !error.is_data() {
        return format!("is not JSON: {message} (column {})", error.column());
    }
    if let Some((found, expected)) =
        message.strip_prefix("invalid type: ").and_then(|rest| rest.rsplit_once(", expected "))
    {
        let expected = match expected {
            "i32" | "i64" | "u32" | "u64" => "a whole number",
            "f32" | "f64" => "a number",
            "a map" => "an object",
            "a sequence" => "an array",
            other if other.starts_with("struct ") => "an object",
            other => other,
        };
        return format!("must be {expected}, not {found}");
    }
    match message.strip_prefix("missing field ") {
        Some(_) => "is missing".to_owned(),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_finds_a_value() {
        let text = RawValue::from_string(r#"{"extra":{"a/b":[{"r":0.5}],"s":"x"}}"#.to_owned()).expect("it is JSON");
        let found = |pointer| value_at(&text, pointer).map(RawValue::get);
        assert_eq!(found("/extra/a~1b/0/r"), Some("0.5"));
        assert_eq!(found("/extra/s"), Some("\"x\""));
        for absent in ["/extra/a~1b/1", "/extra/a~1b/-", "/nothing", "/extra/s/0", ""] {
            assert_eq!(found(absent), None, "{absent}");
        }
    }

    #[test]
    fn errors_name_the_place() {
        let error = parse::<Vec<Vec<i32>>>("/ids", "[[1],[2,\"x\"]]").expect_err("a text is no number");
        assert_eq!(
            (error.pointer.as_str(), error.detail.as_str()),
            ("/ids/1/1", "must be a whole number, not string \"x\"")
        );
        let missing = parse::<Violation>("/a", r#"{"pointer":""}"#).expect_err("a field is missing");
        assert_eq!((missing.pointer.as_str(), missing.detail.as_str()), ("/a/detail", "is missing"));
    }
}
