//! Readers of bodies, made public for the test that measures their memory.
//!
//! It is separate from the handlers because they need a store. Nothing else uses this module, and it is not part of the
//! public API.

use forebay_wire::Trajectory;

use crate::{atropos, slime};

/// The rollout of an item of slime; none if it is refused.
#[must_use]
pub fn slime(body: &[u8]) -> Option<Trajectory> {
    slime::rollout(body)
}

/// The rollouts of a scored group of Atropos, and what its price is besides that of the body; none if it is refused.
#[must_use]
pub fn atropos(body: &[u8]) -> Option<(Vec<Trajectory>, usize)> {
    atropos::rollouts(body)
}
