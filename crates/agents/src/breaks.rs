//! Why prompts do not continue earlier calls, for the reports about sessions: the messages of calls are compared, and ids
//! are shown as text.

use forebay_domain::ids::PolicyName;
use forebay_gateway::canonical::{History, Record};
use forebay_service::conversations::{Conversation, Conversations};

use crate::{histories, upstreams::Upstreams};

impl Conversations for Upstreams {
    fn begin(&self) -> Box<dyn Conversation> {
        Box::new(Compared(History::default()))
    }

    fn text(&self, policy: &PolicyName, ids: &[i32]) -> Option<String> {
        let route = self.of_policy(policy).ok()?;
        Some(route.exact.as_ref()?.whole_text(ids))
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
