//! Why a request does not continue a call that it should have continued. `key` finds it, and a history reports it.

/// Why a request does not continue a call: what differs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BreakCause {
    /// The reasoning of an answer was dropped or changed.
    Reasoning,
    /// The arguments of a tool call are the same JSON in another spelling, or with the defaults of the tool's schema.
    Arguments,
    /// All messages are the same. The template or the tokenizer writes them in other ids than the model sampled.
    Tokens,
    /// The tools, the arguments of the template, or a system message.
    System,
    /// The content of a message.
    Rewrite,
    /// Several answers are equal to what the agent sent, and nothing says which of them it continues.
    Siblings,
}

impl BreakCause {
    /// All causes.
    pub const ALL: [Self; 6] =
        [Self::Reasoning, Self::Arguments, Self::Tokens, Self::System, Self::Rewrite, Self::Siblings];

    /// The name, as a label of metrics and in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning",
            Self::Arguments => "arguments",
            Self::Tokens => "tokens",
            Self::System => "system",
            Self::Rewrite => "rewrite",
            Self::Siblings => "siblings",
        }
    }
}
