//! Halves of surrogate pairs in texts: what is left of an emoji that a program has cut in the middle.
//!
//! A half is no character, so no database, no Arrow column and no tokenizer can hold it. A program that cuts texts does not
//! see what it did, and a refusal would end its rollout.

use std::borrow::Cow;

use forebay_wire::{self as wire, replace_lone_surrogates};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::warnings::Warning;

/// What becomes of a half of a surrogate pair in a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoneSurrogates {
    /// It becomes U+FFFD, with a warning.
    #[default]
    Replace,
    /// What contains it is refused.
    Refuse,
}

impl LoneSurrogates {
    pub fn stored(self, json: &RawValue) -> Cow<'_, RawValue> {
        match (self, replace_lone_surrogates(json.get())) {
            (Self::Replace, Cow::Owned(text)) => {
                Cow::Owned(RawValue::from_string(text).expect("escapes of JSON are replaced by others"))
            }
            _ => Cow::Borrowed(json),
        }
    }

    /// Makes the free JSON of a trajectory what is stored of it.
    pub fn replace(self, sent: &mut wire::Trajectory) -> Option<Warning> {
        let mut replaced = Vec::new();
        for (name, held) in [("messages", &mut sent.messages), ("metadata", &mut sent.metadata)] {
            let Some(Cow::Owned(stored)) = held.as_deref().map(|json| self.stored(json)) else { continue };
            *held = Some(stored);
            replaced.push(name);
        }
        (!replaced.is_empty()).then(|| warning(&replaced.join(" and ")))
    }
}

/// The warning about halves in these texts.
pub fn warning(texts: &str) -> Warning {
    let detail =
        format!("{texts} contained halves of surrogate pairs, which are no characters; each is stored as U+FFFD");
    Warning::new("lone-surrogates", detail)
}
