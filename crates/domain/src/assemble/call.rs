//! One call to an inference engine, as its agent or its session tells of it.

use forebay_wire::VersionSpan;

use super::paths::Position;

/// One call to an inference engine.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Its place in time among the calls of its set: a call that ended earlier has a smaller number. No two calls have
    /// the same one.
    pub ended: u64,
    /// The call whose ids precede `prompt`; none if `prompt` is the whole prompt.
    pub after: Option<After>,
    /// The ids of the prompt, or those behind `after`.
    pub prompt: &'a [i32],
    /// The sampled ids.
    pub ids: &'a [i32],
    /// Log-probabilities of `ids`, as many as there are ids.
    pub logprobs: Option<&'a [f32]>,
    /// Spans of weight versions that tile `ids`.
    pub versions: Option<&'a [VersionSpan]>,
    /// Whether the last id is a stop token. The next prompt may have another id in its place.
    pub stopped_on_token: bool,
    /// Who made the call, if the agent says so.
    pub agent: Option<&'a str>,
    /// Whether the agent received the answer.
    pub delivered: bool,
    /// Whether an earlier attempt made the call and the last one was not answered with it.
    pub abandoned: bool,
    /// How often the client has made this call before, by its own account.
    pub retry_count: u32,
    /// Its reward, if it has one of its own.
    pub reward: Option<f64>,
    /// The name of the state in which the agent made it.
    pub state_key: Option<&'a str>,
}

/// What precedes the ids of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// The index of a call: its prompt and then its ids.
    pub call: usize,
    /// Whether the last of these ids is left out.
    pub trimmed: bool,
}

/// Where the ids of a call end in the tree of paths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) prompt: Position,
    /// Before the last sampled id.
    pub(super) trimmed: Position,
    /// After the last sampled id.
    pub(super) full: Position,
}
