//! What the handlers of the facade know.

use crate::Facade;

/// The name of the protocol in the names of consumers.
pub(super) const NAME: &str = "slime";

/// Options of the facade.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlimeOptions {
    /// The most groups of one read, if the request does not name fewer.
    pub max_groups: Option<u32>,
    /// Which entry of a reward that is an object is the reward.
    pub reward_key: Option<String>,
}

/// The facade.
pub(super) type Slime = Facade<SlimeOptions>;
