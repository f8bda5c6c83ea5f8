//! What becomes of the calls of an agent to its inference engine, from which the service assembles segments.

use serde::{Deserialize, Serialize};

/// What became of posted turns. Calls that are in segments and calls that were dropped are together all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Assembly {
    /// Number of turns.
    pub calls: u32,
    /// Number of segments that were assembled.
    pub segments: u32,
    /// Number of prompts that share more than 64 ids with an earlier turn and then differ from what was recorded. Each
    /// of them begins a segment that a client which repeats its history exactly would not need.
    pub breaks: u32,
    /// Turns that are in no segment, by reason.
    pub dropped: DroppedCalls,
    /// Sampled stop tokens that are not trained, because the next prompt has another id in their place.
    pub trimmed: u32,
}

/// Turns that are in no segment, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DroppedCalls {
    /// Turns without tokens.
    pub empty: u32,
    /// Turns that were not delivered and that no other turn continues.
    pub undelivered: u32,
    /// Turns that no other turn continues, and whose prompt the same agent sent again.
    pub retry: u32,
}
