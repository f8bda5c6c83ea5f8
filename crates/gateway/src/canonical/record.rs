//! The part of a request that is stored with a call.

use serde::{Deserialize, Serialize};

use super::{defaults::Defaults, key::Hash, message::CanonicalMessage};
use crate::{json, request::Message};

/// What the request of one call adds to the history of its session.
///
/// Its JSON is stored with the call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The number of an earlier call that begins with the same messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) after: Option<u32>,
    /// How many messages of that call, its answer included, the request begins with.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) shared: u32,
    /// A digest of the tools and of the arguments of the template.
    pub(super) head: Hash,
    /// The defaults of the tools, unless an earlier call has the same tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) defaults: Option<Defaults>,
    /// The ids of the tool calls in the messages.
    #[serde(default = "no_ids", skip_serializing_if = "has_no_ids")]
    pub(super) ids: Hash,
    /// Who sent the request, if the agent says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) agent: Option<Hash>,
    /// The call that the request continues, if its prompt begins with the ids of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) continues: Option<u32>,
    /// Whether nothing says which of several equal answers the request continues.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) has_siblings: bool,
    /// The messages behind the shared ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) messages: Vec<CanonicalMessage>,
    /// The ids of the tool calls in these messages and those that results name, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) links: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn no_ids() -> Hash {
    Hash::NO_IDS
}

fn has_no_ids(ids: &Hash) -> bool {
    *ids == Hash::NO_IDS
}

impl Record {
    /// The record of a request whose prompt begins with the ids of this call, if it does with those of one.
    #[must_use]
    pub fn continuing(self, call: Option<u32>) -> Self {
        Self { continues: call, has_siblings: self.has_siblings && call.is_none(), ..self }
    }

    /// The earlier call that begins with the same messages.
    #[must_use]
    pub fn after(&self) -> Option<u32> {
        self.after
    }

    /// Makes the messages of the request, given those of the call that it follows with its answer. Only texts are made
    /// again. `None` if there is something else.
    #[must_use]
    pub fn messages(&self, mut before: Vec<Message>) -> Option<Vec<Message>> {
        before.truncate(self.shared as usize);
        let mut links = self.links.iter().cloned();
        for message in &self.messages {
            before.push(message.restored(&mut links)?);
        }
        (links.next().is_none() && before.len() == self.shared as usize + self.messages.len()).then_some(before)
    }

    /// The JSON that is stored.
    #[must_use]
    pub fn to_json(&self) -> String {
        json::text(self)
    }

    /// Reads what [`Self::to_json`] wrote.
    pub fn from_json(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}
