//! What was said in the calls of sessions, so that it can be told why a prompt does not continue an earlier call.

use forebay_domain::ids::PolicyName;

/// Reads the messages of recorded calls, and the text of ids.
pub trait Conversations: Send + Sync + 'static {
    /// The calls of one policy in a session. They are added in the order of their numbers.
    fn begin(&self) -> Box<dyn Conversation>;
    /// The text of ids with its special tokens; none if the tokenizer of the policy's model is not known.
    fn text(&self, policy: &PolicyName, ids: &[i32]) -> Option<String>;
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
}

impl Conversation for NoConversations {
    fn add(&mut self, _seq: u32, _request: &str, _response: &str) {}

    fn cause(&self, _nearest: u32, _seq: u32, _after: Option<u32>) -> Option<&'static str> {
        None
    }
}
