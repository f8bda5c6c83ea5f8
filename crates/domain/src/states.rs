//! The states of groups, batches and rollouts: their meaning, and who moves them from which state to which.
//!
//! Separate from the stages, because every stage reads states that other stages set. The types on the wire have the
//! same names and are converted here. A method that moves a state returns `None` if the move is not allowed. The
//! statement that stores the move repeats the condition in its `WHERE` clause.
//!
//! Every `match` on a state names all variants, so adding a state gives a list of compiler errors. A test compares the
//! names with the CHECK constraints of both databases.
//!
//! Each state says when payloads and rows are deleted. "Purged" means that the payloads are deleted, and that the other
//! rows, the tombstones, are deleted `retention.tombstone_s` later. "Kept" means that nothing is deleted in this state.

use std::fmt;

use forebay_wire::{self as wire, Settle};

/// Declares an enum whose variants have a name, which SQL, tallies, metrics and the wire share.
macro_rules! named_states {
    ($(#[$about:meta])* $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $enum { $($(#[$doc])* $variant,)+ }

        impl $enum {
            /// All variants, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The name in SQL, in tallies and metrics, and on the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// The variant with this name.
            #[must_use]
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|variant| variant.as_str() == name)
            }
        }

        impl fmt::Display for $enum {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl From<$enum> for wire::$enum {
            fn from(state: $enum) -> Self {
                match state { $($enum::$variant => Self::$variant,)+ }
            }
        }

        impl From<wire::$enum> for $enum {
            fn from(state: wire::$enum) -> Self {
                match state { $(wire::$enum::$variant => Self::$variant,)+ }
            }
        }
    };
}

named_states! {
    /// What was decided about a rollout: when it arrived, or when it got the last score that it had to wait for. Until then
    /// it is `kept`. Afterwards it never changes.
    Verdict {
        /// The rollout takes a place in its group, counts in the advantages and is trained. Its rows go with its group.
        Kept = "kept",
        /// The rollout takes a place and counts in the advantages, and none of its tokens are trained. A filter with
        /// the action `mask` gives this verdict. Its rows go with its group.
        Masked = "masked",
        /// A filter with the action `drop` matched, or the rollout has no reward and no filter masked it. Its payload
        /// is stored only if `retention.dropped_s` is not 0. Its rows go with its group.
        Dropped = "dropped",
        /// The group was decided before the rollout arrived. Payload and rows go as for `dropped`.
        Late = "late",
    }
}

impl Verdict {
    /// Whether the rollout takes a place in its group and is delivered with it.
    #[must_use]
    pub const fn takes_place(self) -> bool {
        match self {
            Self::Kept | Self::Masked => true,
            Self::Dropped | Self::Late => false,
        }
    }
}

named_states! {
    GroupState {
        /// The group takes rollouts.
        ///
        /// Ingest opens a group with its first rollout. A decision (complete, no places or posts left, overdue, closed
        /// by a caller) makes it `ready` or `discarded`. A discard by a caller, a reset and, for groups of earlier
        /// runs, the sweep make it `discarded`. Its rows are kept.
        Open = "open",
        /// The group is decided and waits for a batch.
        ///
        /// A decision, the split of its batch or a readmission from quarantine makes a group `ready`. A claim makes it
        /// `batched` or, over the staleness bound, `stale`. A discard by a caller, a reset and, for groups of earlier
        /// runs, the sweep make it `discarded`. Its rows are kept.
        Ready = "ready",
        /// The group is part of a batch, whose state says more.
        ///
        /// A claim that cuts a batch makes its groups `batched`. The split of the batch makes them `ready` or
        /// `quarantined`. A reset, unless the batch is trained, and a forced resume that discards the batch make them
        /// `discarded`. When their payloads and rows are deleted depends on the state of the batch.
        Batched = "batched",
        /// The group was over the staleness bound when it would have been put into a batch. Final.
        ///
        /// A claim makes a group `stale`. Its payloads are purged after `retention.dropped_s`.
        Stale = "stale",
        /// A decision, a caller or the end of a run discarded the group, with a reason. Final.
        ///
        /// A decision, a discard by a caller, a reset, a forced resume or the sweep makes a group `discarded`. Its
        /// payloads are purged after `retention.dropped_s`. If a forced resume discarded it, they were purged before.
        Discarded = "discarded",
        /// A trainer or the check of a payload found the group unusable, or the deliveries of its batch were used up
        /// when that was split.
        ///
        /// The split of its batch makes a group `quarantined`. A readmission makes it `ready`. A discard by a caller
        /// and a reset make it `discarded`. Its rows are kept.
        Quarantined = "quarantined",
    }
}

impl GroupState {
    /// Whether new rollouts take places in the group.
    #[must_use]
    pub const fn is_open(self) -> bool {
        match self {
            Self::Open => true,
            Self::Ready | Self::Batched | Self::Stale | Self::Discarded | Self::Quarantined => false,
        }
    }

    /// The state after a move; none if the move is not allowed.
    #[must_use]
    pub const fn after(self, by: GroupMove) -> Option<Self> {
        use GroupMove as M;
        match self {
            Self::Open => match by {
                M::Accept => Some(Self::Ready),
                M::Reject | M::Discard | M::Straggle | M::Reset => Some(Self::Discarded),
                M::Cut | M::GoStale | M::PutBack | M::Quarantine | M::Readmit | M::GiveUp => None,
            },
            Self::Ready => match by {
                M::Cut => Some(Self::Batched),
                M::GoStale => Some(Self::Stale),
                M::Discard | M::Straggle | M::Reset => Some(Self::Discarded),
                M::Accept | M::Reject | M::PutBack | M::Quarantine | M::Readmit | M::GiveUp => None,
            },
            Self::Batched => match by {
                M::PutBack => Some(Self::Ready),
                M::Quarantine => Some(Self::Quarantined),
                M::Reset | M::GiveUp => Some(Self::Discarded),
                M::Accept | M::Reject | M::Cut | M::GoStale | M::Readmit | M::Discard | M::Straggle => None,
            },
            Self::Quarantined => match by {
                M::Readmit => Some(Self::Ready),
                M::Discard | M::Reset => Some(Self::Discarded),
                M::Accept | M::Reject | M::Cut | M::GoStale | M::PutBack | M::Quarantine | M::Straggle | M::GiveUp => {
                    None
                }
            },
            Self::Stale | Self::Discarded => None,
        }
    }
}

/// What moves a group to another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupMove {
    /// A decision (stage 3) makes the group ready.
    Accept,
    /// A decision (stage 3) discards the group.
    Reject,
    /// A claim cuts a batch that the group is part of.
    Cut,
    /// A claim finds the group over the staleness bound.
    GoStale,
    /// The group's batch is split because of other groups.
    PutBack,
    /// The group's batch is split because of the group, or after its last delivery.
    Quarantine,
    /// An operator readmits the quarantined groups of a split batch.
    Readmit,
    /// A caller of the API discards the group.
    Discard,
    /// The sweep, or the decision of an overdue group, finds that a reset has ended the group's run.
    Straggle,
    /// A reset ends the group's run.
    Reset,
    /// A forced resume gives up the lineage that trained the group's batch, whose payloads are purged.
    GiveUp,
}

named_states! {
    /// The state of a batch. Its row is deleted with the tombstone of the last group that it carried.
    BatchState {
        /// A trainer holds the batch until its lease expires.
        ///
        /// A claim makes a batch `leased`. An ack makes it `trained`, or `checkpointed` if the policy settles with the
        /// ack. A nack, an expiry, a resume and a restore make it `returned`, and the last failed delivery or the last
        /// resume that the policy allows makes it `quarantined`. A nack that names groups and a damaged payload make
        /// it `split`. A reset makes it `discarded`. Its rows are kept.
        Leased = "leased",
        /// The batch waits for its next delivery, and is delivered before any new batch.
        ///
        /// The end of its lease without an ack, a readmission, or a resume to before the step of its ack makes a batch
        /// `returned`. A claim makes it `leased`, a damaged payload `split`, a reset `discarded`. Its rows are kept.
        Returned = "returned",
        /// The batch is acked by a step that no checkpoint covers.
        ///
        /// An ack makes a batch `trained`. A checkpoint, or a resume from its step or a later one, makes it
        /// `checkpointed`. A resume from an earlier step makes it `returned`, or `discarded` if the resume is forced
        /// and the payloads are purged. Payloads are purged `retention.trained_s` after the ack. Tombstones are kept
        /// until the batch is settled or its run has ended.
        Trained = "trained",
        /// The batch is settled.
        ///
        /// A checkpoint, a resume, or an ack if the policy settles with the ack makes a batch `checkpointed`. A forced
        /// resume from an earlier step makes it `returned`. Payloads are purged `retention.settled_s` after it is
        /// settled.
        Checkpointed = "checkpointed",
        /// The deliveries of the batch, or the resumes that may end its leases, are used up.
        ///
        /// The last failed delivery, or the last resume, makes a batch `quarantined`. A readmission makes it
        /// `returned`, a reset `discarded`. Its rows are kept.
        Quarantined = "quarantined",
        /// The batch was dissolved: each of its groups now has a state of its own. Final.
        ///
        /// A nack that names groups, or a damaged payload, makes a batch `split`. Its row is kept as long as the rows
        /// of its groups.
        Split = "split",
        /// The groups of the batch were discarded with it. Final.
        ///
        /// A reset, or a forced resume, makes a batch `discarded`. Its row is kept as long as the rows of its groups.
        Discarded = "discarded",
    }
}

impl BatchState {
    /// Whether an optimizer step has consumed the batch.
    #[must_use]
    pub const fn is_acked(self) -> bool {
        match self {
            Self::Trained | Self::Checkpointed => true,
            Self::Leased | Self::Returned | Self::Quarantined | Self::Split | Self::Discarded => false,
        }
    }

    /// The state after a move; none if the move is not allowed.
    #[must_use]
    pub const fn after(self, by: BatchMove) -> Option<Self> {
        use BatchMove as M;
        match self {
            Self::Leased => match by {
                M::Return => Some(Self::Returned),
                M::UseUp => Some(Self::Quarantined),
                M::Ack(Settle::Checkpoint) => Some(Self::Trained),
                M::Ack(Settle::Ack) => Some(Self::Checkpointed),
                M::Split => Some(Self::Split),
                M::Reset => Some(Self::Discarded),
                M::Lease | M::Settle | M::BringBack | M::Readmit | M::GiveUp => None,
            },
            Self::Returned => match by {
                M::Lease => Some(Self::Leased),
                M::Split => Some(Self::Split),
                M::Reset => Some(Self::Discarded),
                M::Return | M::UseUp | M::Ack(_) | M::Settle | M::BringBack | M::Readmit | M::GiveUp => None,
            },
            Self::Trained => match by {
                M::Settle => Some(Self::Checkpointed),
                M::BringBack => Some(Self::Returned),
                M::GiveUp => Some(Self::Discarded),
                M::Lease | M::Return | M::UseUp | M::Ack(_) | M::Split | M::Readmit | M::Reset => None,
            },
            Self::Checkpointed => match by {
                M::BringBack => Some(Self::Returned),
                M::Lease
                | M::Return
                | M::UseUp
                | M::Ack(_)
                | M::Settle
                | M::Split
                | M::Readmit
                | M::GiveUp
                | M::Reset => None,
            },
            Self::Quarantined => match by {
                M::Readmit => Some(Self::Returned),
                M::Reset => Some(Self::Discarded),
                M::Lease | M::Return | M::UseUp | M::Ack(_) | M::Settle | M::BringBack | M::Split | M::GiveUp => None,
            },
            Self::Split | Self::Discarded => None,
        }
    }
}

/// What moves a batch to another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchMove {
    /// A claim delivers a batch that came back.
    Lease,
    /// A lease ends without an ack: by expiry, nack, resume or restore.
    Return,
    /// A lease ends without an ack, and it was the last one that the policy's rules allow.
    UseUp,
    /// An ack by the holder of the lease, under the policy's rule for settling.
    Ack(Settle),
    /// A checkpoint of the step that consumed the batch or of a later one, or a resume from there.
    Settle,
    /// A resume from an earlier step than the one that consumed the batch.
    BringBack,
    /// A nack names groups of the batch, or a payload of the batch is damaged.
    Split,
    /// An operator readmits the batch.
    Readmit,
    /// A forced resume gives up the lineage that trained the batch, whose payloads are purged.
    GiveUp,
    /// A reset ends the batch's run.
    Reset,
}

named_states! {
    /// The state of a rollout. It is not stored: [`rollout_state`] derives it. The sum over all states, plus the
    /// rollouts whose tombstones were deleted, is the number of rollouts received.
    RolloutState {
        /// In an open group, with a place and without a score that the rules require.
        Scoring = "scoring",
        /// In an open group.
        Open = "open",
        /// In a ready group.
        Ready = "ready",
        /// In a leased batch.
        Leased = "leased",
        /// In a batch that came back.
        Returned = "returned",
        /// In a batch acked by a step that is not settled.
        Trained = "trained",
        /// In a settled batch.
        Checkpointed = "checkpointed",
        /// In a discarded group.
        Discarded = "discarded",
        /// In a stale group.
        Stale = "stale",
        /// In a quarantined group or batch.
        Quarantined = "quarantined",
        /// A rule refused it at ingest.
        Dropped = "dropped",
        /// It arrived after its group was decided.
        Late = "late",
    }
}

impl RolloutState {
    /// Whether the rollout waits to be trained, so that it counts in its policy's backlog and its payload bytes count
    /// as live.
    #[must_use]
    pub const fn is_live(self) -> bool {
        match self {
            Self::Scoring | Self::Open | Self::Ready | Self::Leased | Self::Returned => true,
            Self::Trained
            | Self::Checkpointed
            | Self::Discarded
            | Self::Stale
            | Self::Quarantined
            | Self::Dropped
            | Self::Late => false,
        }
    }
}

/// The state of a rollout, from its verdict, the state of its group and the state of the batch that its group is part
/// of.
///
/// None if these contradict each other: a group that is part of a batch needs a batch that still has its groups, and only
/// a kept rollout of an open group lacks a score.
#[must_use]
pub const fn rollout_state(
    verdict: Verdict,
    lacks_scores: bool,
    group: GroupState,
    batch: Option<BatchState>,
) -> Option<RolloutState> {
    match verdict {
        Verdict::Kept if lacks_scores => match group {
            GroupState::Open => Some(RolloutState::Scoring),
            GroupState::Ready
            | GroupState::Batched
            | GroupState::Stale
            | GroupState::Discarded
            | GroupState::Quarantined => None,
        },
        Verdict::Masked | Verdict::Dropped | Verdict::Late if lacks_scores => None,
        Verdict::Kept | Verdict::Masked => members_state(group, batch),
        Verdict::Dropped => Some(RolloutState::Dropped),
        Verdict::Late => Some(RolloutState::Late),
    }
}

named_states! {
    SessionState {
        /// The agent makes calls.
        ///
        /// In: opening; a call or a resume, from `parked`. Out: a finish makes it `finishing`; an abort makes it
        /// `aborted`; the sweep makes it `parked` or `expired`. Rows stay.
        Open = "open",
        /// The agent has made no call for `idle_s`, and may be started again. It keeps its room until another rollout
        /// needs it.
        ///
        /// In: the sweep. Out: a call or a resume makes it `open`; the others as from `open`. Rows stay.
        Parked = "parked",
        /// A finish has begun: no new call is accepted, and calls in flight may still be recorded.
        ///
        /// In: a finish. Out: the same finish, or a repeat of it, makes it `finished`; an abort makes it `aborted`; the
        /// sweep makes it `expired`. Rows stay.
        Finishing = "finishing",
        /// Its trajectories were ingested. Final.
        ///
        /// In: a finish. Calls and keys go after `retention.settled_s`, the row `retention.tombstone_s` later.
        Finished = "finished",
        /// A caller ended it without a reward, or a reset ended a run of its policies. Final.
        ///
        /// In: an abort, a finish after a reset. Rows go as for `finished`.
        Aborted = "aborted",
        /// It made no call for too long and had no attempts left, its room was needed while it was parked, or it lasted
        /// too long. Final.
        ///
        /// In: the sweep. Rows go as for `finished`.
        Expired = "expired",
    }
}

impl SessionState {
    /// Whether calls may still be recorded.
    #[must_use]
    pub const fn is_live(self) -> bool {
        match self {
            Self::Open | Self::Parked | Self::Finishing => true,
            Self::Finished | Self::Aborted | Self::Expired => false,
        }
    }

    /// Whether agents may make calls. The first call of a parked session opens it.
    #[must_use]
    pub const fn takes_calls(self) -> bool {
        match self {
            Self::Open | Self::Parked => true,
            Self::Finishing | Self::Finished | Self::Aborted | Self::Expired => false,
        }
    }
}

/// The state of the kept and masked rollouts of a group; see [`rollout_state`].
#[must_use]
pub const fn members_state(group: GroupState, batch: Option<BatchState>) -> Option<RolloutState> {
    match group {
        GroupState::Open => Some(RolloutState::Open),
        GroupState::Ready => Some(RolloutState::Ready),
        GroupState::Stale => Some(RolloutState::Stale),
        GroupState::Discarded => Some(RolloutState::Discarded),
        GroupState::Quarantined => Some(RolloutState::Quarantined),
        GroupState::Batched => match batch {
            Some(BatchState::Leased) => Some(RolloutState::Leased),
            Some(BatchState::Returned) => Some(RolloutState::Returned),
            Some(BatchState::Trained) => Some(RolloutState::Trained),
            Some(BatchState::Checkpointed) => Some(RolloutState::Checkpointed),
            Some(BatchState::Quarantined) => Some(RolloutState::Quarantined),
            Some(BatchState::Discarded) => Some(RolloutState::Discarded),
            Some(BatchState::Split) | None => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const GROUP_MOVES: [GroupMove; 11] = [
        GroupMove::Accept,
        GroupMove::Reject,
        GroupMove::Cut,
        GroupMove::GoStale,
        GroupMove::PutBack,
        GroupMove::Quarantine,
        GroupMove::Readmit,
        GroupMove::Discard,
        GroupMove::Straggle,
        GroupMove::Reset,
        GroupMove::GiveUp,
    ];

    const BATCH_MOVES: [BatchMove; 11] = [
        BatchMove::Lease,
        BatchMove::Return,
        BatchMove::UseUp,
        BatchMove::Ack(Settle::Checkpoint),
        BatchMove::Ack(Settle::Ack),
        BatchMove::Settle,
        BatchMove::BringBack,
        BatchMove::Split,
        BatchMove::Readmit,
        BatchMove::GiveUp,
        BatchMove::Reset,
    ];

    #[test]
    fn only_final_states_are_never_left() {
        let is_final = |state: &&GroupState| GROUP_MOVES.iter().all(|by| state.after(*by).is_none());
        let groups: Vec<&GroupState> = GroupState::ALL.iter().filter(is_final).collect();
        assert_eq!(groups, [&GroupState::Stale, &GroupState::Discarded]);
        let is_final = |state: &&BatchState| BATCH_MOVES.iter().all(|by| state.after(*by).is_none());
        let batches: Vec<&BatchState> = BatchState::ALL.iter().filter(is_final).collect();
        assert_eq!(batches, [&BatchState::Split, &BatchState::Discarded]);
    }

    #[test]
    fn every_state_but_the_first_is_reached() {
        for to in GroupState::ALL.iter().filter(|state| **state != GroupState::Open) {
            let reaches = |from: &GroupState| GROUP_MOVES.iter().any(|by| from.after(*by) == Some(*to));
            assert!(GroupState::ALL.iter().any(reaches), "{to}");
        }
        for to in BatchState::ALL {
            let reaches = |from: &BatchState| BATCH_MOVES.iter().any(|by| from.after(*by) == Some(*to));
            assert!(BatchState::ALL.iter().any(reaches), "{to}");
        }
    }

    /// The arrows between states in one of the diagrams of ARCHITECTURE.md.
    fn drawn(of: &str) -> BTreeSet<(&'static str, &'static str)> {
        let document = include_str!("../../../ARCHITECTURE.md");
        let (_, diagram) = document.split_once(&format!("state \"{of}\" as ")).expect("the diagram is there");
        let (diagram, _) = diagram.split_once("```").expect("a diagram ends");
        let arrows = diagram.lines().filter_map(|line| line.split_once(':')?.0.trim().split_once(" --> "));
        arrows.filter(|(from, _)| *from != "[*]").collect()
    }

    #[test]
    fn the_diagrams_show_all_moves_and_no_others() {
        let groups = GroupState::ALL
            .iter()
            .flat_map(|from| GROUP_MOVES.iter().filter_map(|by| Some((from.as_str(), from.after(*by)?.as_str()))));
        assert_eq!(drawn("groups"), groups.collect());
        let batches = BatchState::ALL
            .iter()
            .flat_map(|from| BATCH_MOVES.iter().filter_map(|by| Some((from.as_str(), from.after(*by)?.as_str()))));
        assert_eq!(drawn("batches"), batches.collect());
    }

    #[test]
    fn what_is_trained_or_final_is_not_live() {
        let live: Vec<&RolloutState> = RolloutState::ALL.iter().filter(|state| state.is_live()).collect();
        let expected = [
            RolloutState::Scoring,
            RolloutState::Open,
            RolloutState::Ready,
            RolloutState::Leased,
            RolloutState::Returned,
        ];
        assert_eq!(live, expected.iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_rollout_stands_where_its_verdict_its_group_and_its_batch_put_it() {
        for group in GroupState::ALL {
            assert_eq!(rollout_state(Verdict::Dropped, false, *group, None), Some(RolloutState::Dropped));
            assert_eq!(rollout_state(Verdict::Late, false, *group, None), Some(RolloutState::Late));
            let scoring = rollout_state(Verdict::Kept, true, *group, None);
            assert_eq!(scoring, group.is_open().then_some(RolloutState::Scoring));
            assert_eq!(rollout_state(Verdict::Masked, true, *group, None), None);
        }
        let batched = |batch| rollout_state(Verdict::Kept, false, GroupState::Batched, batch);
        assert_eq!(batched(Some(BatchState::Quarantined)), Some(RolloutState::Quarantined));
        assert_eq!([batched(None), batched(Some(BatchState::Split))], [None, None]);
        // The state of the batch that a group was removed from does not matter.
        let ready = rollout_state(Verdict::Masked, false, GroupState::Ready, Some(BatchState::Split));
        assert_eq!(ready, Some(RolloutState::Ready));
    }
}
