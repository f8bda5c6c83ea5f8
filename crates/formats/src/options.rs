//! What a caller says about all rollouts of a source. It is the same for the command and the endpoint.

/// The most tokens of the segments of one rollout, if the caller sets no other bound. Branches repeat what they share, so
/// segments may be much larger than their document.
pub const ROLLOUT_TOKENS_MAX: usize = 64 << 20;

/// What a caller says about all rollouts of a source. Each entry takes precedence over what the source says.
#[derive(Clone, Debug)]
pub struct Options {
    /// The policy of the rollouts.
    pub policy: Option<String>,
    /// The label of their environment.
    pub environment: Option<String>,
    /// The size of their groups.
    pub group_size: Option<u32>,
    /// The weight version that generated them.
    pub policy_version: Option<i64>,
    /// Text before every group id and rollout id. It keeps the ids of two sources apart that count from 0.
    pub prefix: Option<String>,
    /// JSON pointer to the reward in a record.
    pub reward_at: Option<String>,
    /// JSON pointer to the group id in a record.
    pub group_at: Option<String>,
    /// JSON pointer to the rollout id in a record.
    pub rollout_at: Option<String>,
    /// The most tokens of the segments of one rollout.
    pub tokens_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: None,
            environment: None,
            group_size: None,
            policy_version: None,
            prefix: None,
            reward_at: None,
            group_at: None,
            rollout_at: None,
            tokens_max: ROLLOUT_TOKENS_MAX,
        }
    }
}

impl Options {
    /// Checks the pointers, and returns the name of the first entry that is none, with the reason.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        let pointers = [("reward_at", &self.reward_at), ("group_at", &self.group_at), ("rollout_at", &self.rollout_at)];
        let wrong =
            pointers.into_iter().find(|(_, pointer)| pointer.as_ref().is_some_and(|text| !text.starts_with('/')));
        wrong.map_or(Ok(()), |(name, _)| Err((name, "must be a JSON pointer, e.g. /extra/reward")))
    }
}
