//! What foreign protocols remember besides data, and what they ask about the line of ready groups.

/// A state and its revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FacadeState {
    /// 1 for the first one, and one more with every change.
    pub revision: u64,
    /// JSON.
    pub body: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyGroup {
    /// Label of its environment.
    pub environment: Option<String>,
    /// Rows of its samples.
    pub samples: u64,
}
