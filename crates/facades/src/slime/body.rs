//! Bodies with options, which clients write in several forms.

use forebay_api::http::{
    body::{parse, stopped},
    problem::Failure,
};
use serde_json::value::RawValue;

use crate::object::Object;

/// The text of a JSON body.
pub(super) fn text(bytes: &[u8]) -> Result<&str, Failure> {
    // Only the error needs the general parser, which says where it is.
    let refused = |_| parse::<Box<RawValue>>(bytes).err().unwrap_or_else(stopped);
    serde_json::from_slice::<&RawValue>(bytes).map(|raw| raw.get().trim()).map_err(refused)
}

/// The options in a body, which may also be absent or null.
pub(super) fn options(bytes: &[u8]) -> Result<Object<'_>, Failure> {
    if bytes.is_empty() {
        return Ok(Object::default());
    }
    match text(bytes)? {
        "null" => Ok(Object::default()),
        text => Object::of(text).ok_or_else(|| Failure::invalid("", "must be an object")),
    }
}

/// A number from 1 to `max`, which may be written as a text. None if it is absent, null or an empty text.
pub(super) fn number(options: &Object<'_>, key: &str, max: u32) -> Result<Option<u32>, Failure> {
    let Some(sent) = options.get(key) else { return Ok(None) };
    let text: String = serde_json::from_str(sent).unwrap_or_else(|_| sent.to_owned());
    if text.is_empty() {
        return Ok(None);
    }
    let number = text.trim().parse::<u32>().ok().filter(|number| (1..=max).contains(number));
    number.map(Some).ok_or_else(|| Failure::invalid(format!("/{key}"), format!("must be an integer from 1 to {max}")))
}
