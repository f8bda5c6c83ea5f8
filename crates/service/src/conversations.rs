//! What was said in the calls of sessions: for the rollouts that are kept with their messages, and to tell why a prompt
//! does not continue an earlier call.

use forebay_domain::ids::PolicyName;
use serde_json::value::RawValue;

use crate::session::texts::CallText;

/// Reads the messages of recorded calls, and the text of ids.
pub trait Conversations: Send + Sync + 'static {
    /// The calls of one policy in a session. They are added in the order of their numbers.
    fn begin(&self) -> Box<dyn Conversation>;
    /// The text of ids with its special tokens; none if the tokenizer of the policy's model is not known.
    fn text(&self, policy: &PolicyName, ids: &[i32]) -> Option<String>;
    /// The number of the earlier call with whose messages a request begins. `request` is the part of it that is kept, as
    /// JSON.
    fn follows(&self, request: &str) -> Option<u32>;
    /// The messages of the last of these calls and its answer, as a JSON array of chat messages. Each call but the first
    /// follows the one before it. None if they cannot be read.
    fn messages(&self, calls: &[CallText]) -> Option<Box<RawValue>>;
}

/// The messages of the calls of one policy in a session.
pub trait Conversation: Send {
    /// Adds a call: the part of its request that is kept, and its response, both as JSON.
    fn add(&mut self, seq: u32, request: &str, response: &str);
    /// What differs first between the messages of the call `nearest` with its answer, and those of the call `seq`. The
    /// messages of `after` with its answer are not compared, because both have their ids. One of a fixed set; none if it
    /// is not known.
    fn cause(&self, nearest: u32, seq: u32, after: Option<u32>) -> Option<&'static str>;
}

/// Reads nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoConversations;

impl Conversations for NoConversations {
    fn begin(&self) -> Box<dyn Conversation> {
        Box::new(Self)
    }

    fn text(&self, _policy: &PolicyName, _ids: &[i32]) -> Option<String> {
        None
    }

    fn follows(&self, _request: &str) -> Option<u32> {
        None
    }

    fn messages(&self, _calls: &[CallText]) -> Option<Box<RawValue>> {
        None
    }
}

impl Conversation for NoConversations {
    fn add(&mut self, _seq: u32, _request: &str, _response: &str) {}

    fn cause(&self, _nearest: u32, _seq: u32, _after: Option<u32>) -> Option<&'static str> {
        None
    }
}
