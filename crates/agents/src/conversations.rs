//! What was said in the recorded calls of a session: why prompts do not continue earlier calls, for the reports about
//! sessions, and the conversation that a rollout is kept with.

use forebay_domain::ids::PolicyName;
use forebay_gateway::canonical::{self, History, Record};
use forebay_service::{
    conversations::{Conversation, Conversations},
    session::texts::CallText,
};
use serde_json::value::RawValue;

use crate::{histories, upstreams::Upstreams};

impl Conversations for Upstreams {
    fn begin(&self) -> Box<dyn Conversation> {
        Box::new(Compared(History::default()))
    }

    fn text(&self, policy: &PolicyName, ids: &[i32]) -> Option<String> {
        let route = self.of_policy(policy).ok()?;
        Some(route.exact.as_ref()?.whole_text(ids))
    }

    fn follows(&self, request: &str) -> Option<u32> {
        Record::from_json(request).ok()?.after()
    }

    fn messages(&self, calls: &[CallText]) -> Option<Box<RawValue>> {
        let read = |call: &CallText| {
            let record = Record::from_json(&call.request).map_err(|error| error.to_string())?;
            let answer = histories::message(&call.response).map_err(|error| error.to_string())?;
            Ok((record, answer))
        };
        let read: Result<Vec<_>, String> = calls.iter().map(read).collect();
        read.map(canonical::chat_messages)
            .inspect_err(|error| tracing::error!(error, "the messages of a stored call cannot be read"))
            .ok()
    }
}

/// The calls of one policy in a session. It is bounded in calls and messages.
struct Compared(History);

impl Conversation for Compared {
    fn add(&mut self, seq: u32, request: &str, response: &str) {
        let added = match (Record::from_json(request), histories::message(response)) {
            (Ok(record), Ok(message)) => {
                self.0.add(seq, &record, &message).map(drop).map_err(|error| error.to_string())
            }
            (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        };
        if let Err(error) = added {
            tracing::error!(error, call.seq = seq, "the stored request of a call cannot be compared");
        }
    }

    fn cause(&self, nearest: u32, seq: u32, after: Option<u32>) -> Option<&'static str> {
        Some(self.0.cause_between(nearest, seq, after)?.as_str())
    }
}
