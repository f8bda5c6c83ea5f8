//! Answers as they are stored with their calls.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use forebay_gateway::{
    Completion, Dialect,
    dialect::{ClientTools, Envelope},
};
use serde::{Deserialize, Serialize};

/// The answer as it is stored. The ids have columns of their own.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoredAnswer<'a> {
    pub(crate) id: Cow<'a, str>,
    pub(crate) created_s: u64,
    pub(crate) completion: Cow<'a, Completion>,
    /// The model as the agent named it.
    pub(crate) model: Cow<'a, str>,
    /// What the client calls the tools in it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tools: ClientTools,
    /// The bytes at the beginning of the request's first message that are instructions.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) instructions: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl StoredAnswer<'_> {
    /// The answer in another dialect's words, without the request that it answered.
    pub(crate) fn written(self, dialect: Dialect) -> Vec<u8> {
        let envelope = Envelope {
            id: self.id.into_owned(),
            created_s: self.created_s,
            model: self.model.into_owned(),
            stream_usage: false,
            tools: Arc::new(self.tools),
        };
        dialect.answer(&self.completion, &envelope)
    }
}
