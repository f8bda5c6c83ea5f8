//! The reasons that the service itself gives for what becomes of rollouts, groups, batches and sessions.
//!
//! They are in one list because the names of filters are reasons, too: a filter with the name of one of them is refused.

/// Defines the constants and the list of all of them.
macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $text;)*

        /// All reasons.
        pub const ALL: &[&str] = &[$($name),*];
    };
}

reasons! {
    /// A rollout without a reward that no filter masked.
    NO_REWARD = "no-reward";
    /// A rollout that arrived after its group was decided.
    GROUP_DECIDED = "group-decided";
    /// A rollout that arrived when all places of its group were taken, by rollouts that may still be dropped.
    GROUP_FULL = "group-full";
    /// A rollout that lacked a required score at its timeout, or when its group was closed.
    UNSCORED = "unscored";
    /// A group with too few rollouts at its timeout, at a close, or when its places were used up.
    INCOMPLETE = "incomplete";
    /// A group with too few rollouts when its posts were used up.
    EXHAUSTED = "exhausted";
    /// A group without a kept rollout.
    ALL_MASKED = "all-masked";
    /// The group of a rollout that evaluates its policy, once that is decided: nothing of it is trained.
    EVALUATED = "evaluated";
    /// A group or batch of a run that was ended.
    RESET = "reset";
    /// A group or batch that a forced resume discarded, because its payloads are purged.
    LINEAGE_GAP = "lineage-gap";
    /// A group or batch whose deliveries are used up.
    MAX_DELIVERIES = "max-deliveries";
    /// A batch whose lease was ended by too many resumes.
    MAX_RESUMES = "max-resumes";
    /// A group or batch with a payload that does not match its digest.
    DAMAGED = "damaged";
    /// A session that the sweep ended.
    SESSION_EXPIRED = "session-expired";
    /// How groups that callers discarded are counted. The reasons that callers give are free text and cannot be labels.
    BY_HAND = "by-hand";
    /// How groups over the staleness bound are counted.
    STALE = "stale";
    /// Not given as a reason. It is in the list because a filter of this name would look like the state.
    QUARANTINED = "quarantined";
}
