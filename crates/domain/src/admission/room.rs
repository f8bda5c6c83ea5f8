//! Which requests for room are granted: the decision without the store.
//!
//! Room is granted for as many rollouts as a trainer reaches while they are fresh. That alone can stop training for
//! ever: if the room is full of rollouts of incomplete groups, or of groups that cannot be a batch without another
//! environment, no batch can be formed, so no room becomes free. Therefore:
//!
//! - A missing place of a group that has begun always gets room.
//! - A new group that is named is opened only if all of its places fit.
//! - Room is kept for an environment whose minimum share the next batch lacks, and this environment gets it always.
//! - If no batch is being trained, none can be formed, and nobody is at work who can change that, then the next request
//!   is granted.

use std::collections::{BTreeMap, BTreeSet};

use forebay_wire::StalenessAction;

use super::Backlog;
use crate::rules::Rules;

/// Posts per place after which a group with `refill` is decided with the rollouts that it has.
pub const POSTS_PER_PLACE_MAX: u32 = 4;

/// After this part of `group.timeout_s`, an unused admission no longer counts as somebody at work: a worker that was
/// killed does not give its room back. If the worker is only slow, then at most this many groups are started too many.
pub const PATIENCE_PART: u64 = 8;

/// If nothing else can go on, room is granted and groups are opened beyond the bounds of the backlog, but not beyond this
/// many times these bounds. Agents that never complete a group would otherwise fill the disk.
pub const BACKLOGS_MAX: u64 = 2;

/// The rule that no trainer can satisfy: a quota of the service.
pub const QUOTA: &str = "quota";

/// A request for room.
#[derive(Clone, Debug)]
pub struct Asked<'a> {
    /// The number of rollouts.
    pub rollouts: u32,
    /// Their group, if the request names it.
    pub group: Option<AskedGroup>,
    /// Their environment, if the request names it.
    pub environment: Option<&'a str>,
}

/// The group of a request.
#[derive(Clone, Copy, Debug)]
pub struct AskedGroup {
    /// Its places.
    pub size: u32,
    /// How many of them rollouts may still take.
    pub missing: u32,
    /// Rollouts of the group that room is reserved for.
    pub reserved: u64,
    /// Whether it is open, or room is reserved for one of its rollouts.
    pub has_begun: bool,
}

/// A group that has begun and is not decided.
#[derive(Clone, Debug, Default)]
pub struct BegunGroup {
    /// The label of its environment; empty if it has none.
    pub environment: String,
    /// Places that no rollout has taken.
    pub missing: u64,
    /// Rollouts of the group that room is reserved for.
    pub reserved: u64,
}

/// An environment with a minimum share of the batches.
#[derive(Clone, Debug)]
pub struct Share {
    /// Its label.
    pub environment: String,
    /// Groups that the next batch has of it at least.
    pub needed: u64,
    /// Its ready groups.
    pub ready: u64,
}

/// What is ready for the next batch.
#[derive(Clone, Debug, Default)]
pub struct NextBatch {
    pub ready_groups: u64,
    /// Environments with a minimum share.
    pub shares: Vec<Share>,
    /// Whether another batch is leased or has come back.
    pub is_in_training: bool,
}

/// Recent rollouts of a policy: at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recent {
    /// The number of rollouts.
    pub rollouts: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// What a policy has, as far as it decides about room.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// Work that is not yet trained.
    pub backlog: Backlog,
    /// Recent rollouts, if batches are bounded by tokens.
    pub recent: Option<Recent>,
    /// Whether a batch was trained whose version is not published.
    pub is_version_due: bool,
    /// Groups that have begun and are not decided.
    pub begun: Vec<BegunGroup>,
    /// Unused room of admissions that name no group, by the labels of their environments.
    pub unnamed: BTreeMap<String, u64>,
    /// Of this room, what was reserved lately. The rest is probably that of workers that were killed.
    pub unnamed_lately: u64,
    /// What is ready for the next batch.
    pub next: NextBatch,
    /// The environments of open sessions and of room that was reserved lately and is not yet used: somebody is at work
    /// there. An empty label stands for an unknown one.
    pub at_work: BTreeSet<String>,
}

/// Why a request gets no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// Further rollouts would be too old when a trainer reaches them.
    Fresh(Backlog),
    /// The backlog is full.
    Backlog(Backlog),
    /// The room for rollouts that evaluate the policy is full.
    Evaluation(Backlog),
    /// There is less room than a new group has places.
    WholeGroup {
        /// The places.
        size: u32,
        /// The room that is left.
        free: u64,
    },
    /// What room is left is kept for an environment.
    MinimumShare(String),
    /// Room is reserved for all places of the group as often as rollouts may be posted for them.
    GroupPlaces(u32),
    /// All places of the group are taken, by rollouts of which some wait for scores.
    GroupFull(u32),
    /// A team has as many open sessions as its quota allows.
    Quota {
        /// The policies of the team.
        policies: String,
        /// The most sessions.
        sessions: u32,
    },
}

impl NoRoom {
    /// The rule's name.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Fresh(_) => "staleness",
            Self::Backlog(_) => "backlog",
            Self::Evaluation(_) => "evaluation",
            Self::WholeGroup { .. } => "whole-group",
            Self::MinimumShare(_) => "minimum-share",
            Self::GroupPlaces(_) => "group-places",
            Self::GroupFull(_) => "group-full",
            Self::Quota { .. } => QUOTA,
        }
    }

    /// The reason, and what ends it.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Fresh(Backlog { rollouts, reserved, .. }) => format!(
                "{rollouts} rollouts wait for a trainer and {reserved} are under way, which is as many as a trainer reaches \
                 while they are fresh (`staleness.max`); room becomes free when it trains a batch"
            ),
            Self::Backlog(Backlog { rollouts, reserved, .. }) => format!(
                "{rollouts} rollouts wait for a trainer and {reserved} are under way, which is as many as \
                 `backlog.max_ready_rollouts` allows; room becomes free when a trainer trains a batch"
            ),
            Self::Evaluation(Backlog { rollouts, reserved, .. }) => format!(
                "{reserved} rollouts that evaluate the policy are under way and {rollouts} wait for scores, which is as many as \
                 `admissions.eval` allows; room becomes free when one of them is decided"
            ),
            Self::WholeGroup { size, free } => format!(
                "a new group is opened only if all of its {size} places fit, and room for {free} is left; missing places \
                 of groups that have begun always get room"
            ),
            Self::MinimumShare(environment) => format!(
                "the room that is left is kept for the environment `{environment}`, whose `min_share` the next batch lacks"
            ),
            Self::GroupPlaces(size) => format!(
                "room is reserved for each of the {size} places of the group {POSTS_PER_PLACE_MAX} times; the room that is \
                 not used expires"
            ),
            Self::GroupFull(size) => format!(
                "all {size} places of the group are taken, by rollouts of which some wait for scores; a place becomes free \
                 if one of them is dropped"
            ),
            Self::Quota { policies, sessions } => format!(
                "{sessions} sessions of policies that match `{policies}` are open, which is the most that a quota of this \
                 service allows; room becomes free when one of them ends"
            ),
        }
    }
}

impl AskedGroup {
    /// Room for the missing places of a group that has begun.
    fn grant(&self, rollouts: u32) -> Result<u32, NoRoom> {
        if self.missing == 0 {
            return Err(NoRoom::GroupFull(self.size));
        }
        let places = u64::from(self.size) * u64::from(POSTS_PER_PLACE_MAX);
        let left = places.saturating_sub(self.reserved);
        let granted = u64::from(rollouts.min(self.missing)).min(left);
        if granted > 0 { Ok(granted as u32) } else { Err(NoRoom::GroupPlaces(self.size)) }
    }
}

impl Asked<'_> {
    /// The grant, if the request is for missing places of a group that has begun.
    #[must_use]
    pub fn grant_begun(&self) -> Option<u32> {
        self.group.filter(|group| group.has_begun).and_then(|group| group.grant(self.rollouts).ok())
    }

    /// The grant, if it depends only on the backlog.
    #[must_use]
    pub fn grant_at_once(&self, rules: &Rules, backlog: Backlog, is_version_due: bool) -> Option<u32> {
        let is_simple = self.group.is_none() && rules.batch.max_tokens.is_none() && rules.batch.environments.is_empty();
        let fits = || u64::from(self.rollouts) <= capacity(rules, backlog, None, is_version_due);
        (is_simple && fits()).then_some(self.rollouts)
    }

    fn is_of(&self, environment: &str) -> bool {
        self.environment == Some(environment)
    }
}

impl Standing {
    /// For how many rollouts room is granted: at least one.
    pub fn decide(&self, rules: &Rules, asked: &Asked<'_>) -> Result<u32, NoRoom> {
        let decided = match &asked.group {
            Some(group) if group.has_begun => group.grant(asked.rollouts),
            Some(group) => self.grant_new_group(rules, asked, group.size),
            None => self.grant_unnamed(rules, asked),
        };
        decided.or_else(|rule| self.grant_when_nothing_goes_on(rules, asked).ok_or(rule))
    }

    fn grant_new_group(&self, rules: &Rules, asked: &Asked<'_>, size: u32) -> Result<u32, NoRoom> {
        let granted = asked.rollouts.min(size);
        let free = self.capacity(rules).saturating_sub(self.uncovered());
        let kept = self.kept_from(rules, asked);
        if asked.environment.is_some_and(|environment| self.lacks(rules, environment) > 0) {
            return Ok(granted);
        }
        match free.checked_sub(size.into()) {
            Some(rest) => match kept.filter(|(places, _)| rest < *places) {
                None => Ok(granted),
                Some((_, environment)) => Err(NoRoom::MinimumShare(environment)),
            },
            None if free == 0 => Err(self.full(rules)),
            None => Err(NoRoom::WholeGroup { size, free }),
        }
    }

    /// What a request that names no group is for is not known. It may be for a new group, as far as there is room for its
    /// rollouts, or for missing places that nobody else has reserved lately.
    fn grant_unnamed(&self, rules: &Rules, asked: &Asked<'_>) -> Result<u32, NoRoom> {
        let capacity = self.capacity(rules);
        let kept = self.kept_from(rules, asked);
        let free = capacity.saturating_sub(kept.as_ref().map_or(0, |(places, _)| *places));
        let lacking = asked.environment.map_or(0, |environment| self.lacks(rules, environment));
        let granted = u64::from(asked.rollouts).min(free.max(lacking)) as u32;
        if granted < asked.rollouts && self.may_be_missing_places(rules, asked.rollouts) {
            return Ok(asked.rollouts);
        }
        match kept {
            _ if granted > 0 => Ok(granted),
            Some((_, environment)) if capacity > 0 => Err(NoRoom::MinimumShare(environment)),
            _ => Err(self.full(rules)),
        }
    }

    /// Whether a request that names no group may be for the missing places of one group.
    fn may_be_missing_places(&self, rules: &Rules, rollouts: u32) -> bool {
        let rollouts = u64::from(rollouts);
        let left = self.uncovered().saturating_sub(self.unnamed_lately);
        let started = self.backlog.rollouts + self.backlog.reserved;
        rollouts <= left
            && self.begun.iter().any(|group| rollouts <= group.missing)
            && started < rules.backlog.max_ready_rollouts
    }

    /// The last resort: if no batch can be formed and nobody is known to be at work, then whoever asks is alive, and a
    /// group of his brings the next batch nearer. One group at a time is started in this way.
    fn grant_when_nothing_goes_on(&self, rules: &Rules, asked: &Asked<'_>) -> Option<u32> {
        let helps = self.next.lacks_any(rules) || self.next.lacks_minimum(asked.environment);
        if self.next.is_in_training || self.is_somebody_helping(rules) || !helps {
            return None;
        }
        match &asked.group {
            Some(group) if group.has_begun => Some(asked.rollouts.min(group.missing)).filter(|granted| *granted > 0),
            _ if self.backlog.rollouts + self.backlog.reserved >= BACKLOGS_MAX * rules.backlog.max_ready_rollouts => {
                None
            }
            group => Some(asked.rollouts.min(group.as_ref().map_or(rules.group.size, |group| group.size))),
        }
    }

    /// Whether somebody is at work who may bring the next batch nearer. If it lacks only a minimum, workers of other
    /// environments go on and cannot help, so nobody may wait for them.
    fn is_somebody_helping(&self, rules: &Rules) -> bool {
        let helps = |label: &String| label.is_empty() || self.next.lacks_minimum(Some(label));
        self.at_work.iter().any(|label| self.next.lacks_any(rules) || helps(label))
    }

    fn capacity(&self, rules: &Rules) -> u64 {
        capacity(rules, self.backlog, self.recent, self.is_version_due)
    }

    /// The bound that is reached.
    fn full(&self, rules: &Rules) -> NoRoom {
        let started = self.backlog.rollouts + self.backlog.reserved;
        if started >= rules.backlog.max_ready_rollouts {
            NoRoom::Backlog(self.backlog)
        } else {
            NoRoom::Fresh(self.backlog)
        }
    }

    /// Missing places of groups that have begun for which no room is reserved.
    fn uncovered(&self) -> u64 {
        self.begun.iter().map(|group| group.missing.saturating_sub(group.reserved)).sum()
    }

    /// The room that is kept for environments other than that of the request, and one of them. A request that names no
    /// environment may be for each of them.
    fn kept_from(&self, rules: &Rules, asked: &Asked<'_>) -> Option<(u64, String)> {
        asked.environment?;
        let others = self.next.shares.iter().filter(|share| !asked.is_of(&share.environment));
        let lacking = others.map(|share| (self.lacks(rules, &share.environment), &share.environment));
        lacking.filter(|(places, _)| *places > 0).fold(None, |kept, (places, environment)| match kept {
            None => Some((places, environment.clone())),
            Some((before, first)) => Some((before + places, first)),
        })
    }

    /// The places for which an environment must begin groups, so that the next batch has its minimum.
    fn lacks(&self, rules: &Rules, environment: &str) -> u64 {
        let Some(share) = self.next.shares.iter().find(|share| share.environment == environment) else { return 0 };
        let begun = self.begun.iter().filter(|group| group.environment == environment).count() as u64;
        let places = share.lacking().saturating_sub(begun) * u64::from(rules.group.size);
        places.saturating_sub(self.unnamed.get(environment).copied().unwrap_or(0))
    }
}

impl NextBatch {
    /// Whether training waits for a group of an environment; the label is empty for groups without one. While a batch is
    /// in training, room becomes free when it is trained, so only a minimum is waited for.
    #[must_use]
    pub fn waits_for(&self, rules: &Rules, environment: &str) -> bool {
        self.lacks_minimum(Some(environment)) || (!self.is_in_training && self.lacks_any(rules))
    }

    /// Counts a group that became ready.
    pub fn add_ready(&mut self, environment: &str) {
        self.ready_groups += 1;
        self.shares.iter_mut().filter(|share| share.environment == environment).for_each(|share| share.ready += 1);
    }

    /// Whether it lacks groups of any environment, beside those that it lacks of environments with a minimum.
    fn lacks_any(&self, rules: &Rules) -> bool {
        let lacking: u64 = self.shares.iter().map(Share::lacking).sum();
        self.ready_groups + lacking < u64::from(rules.batch.groups)
    }

    /// Whether it lacks groups of an environment with a minimum; none may be each of them.
    fn lacks_minimum(&self, environment: Option<&str>) -> bool {
        let is_own = |share: &&Share| environment.is_none_or(|own| own == share.environment);
        self.shares.iter().filter(is_own).any(|share| share.lacking() > 0)
    }
}

impl Share {
    /// Groups that the next batch lacks.
    fn lacking(&self) -> u64 {
        self.needed.saturating_sub(self.ready)
    }
}

/// The number of rollouts that may still be started. Rollouts started beyond it would be over the staleness bound, or
/// over the backlog, before a trainer reaches them.
///
/// `(staleness.max + 1) * batch - (open + ready + leased + returned + reserved)`, and at most the room that is left below
/// `backlog.max_ready_rollouts`. A batch has `batch.groups` groups of `group.size` rollouts, or fewer if `batch.max_tokens`
/// is reached before: it is complete when another group would exceed that bound, so this group is counted, too.
///
/// Where nothing may be lost (`staleness.action = "wait"`), a batch that was trained takes its room until its version is
/// published. Rollouts that began in this room would be of the version before, which has one batch less before it is too
/// old. Room for one batch is left in any case, for trainers that publish seldom.
#[must_use]
pub fn capacity(rules: &Rules, backlog: Backlog, recent: Option<Recent>, is_version_due: bool) -> u64 {
    let size = u64::from(rules.group.size);
    let by_tokens = rules.batch.max_tokens.zip(recent).map_or(u64::MAX, |(bound, recent)| {
        let of_group = u128::from(recent.tokens.max(1)) * u128::from(size);
        let groups = u128::from(bound) * u128::from(recent.rollouts) / of_group;
        u64::try_from(groups).unwrap_or(u64::MAX).saturating_add(1).saturating_mul(size)
    });
    let batch = rules.batch_rollouts().min(by_tokens);
    let is_over = is_version_due && rules.staleness.action == StalenessAction::Wait;
    let batches = |max: u32| (u64::from(max) + u64::from(!is_over)).max(1);
    let fresh = rules.staleness.max.map_or(u64::MAX, |max| batches(max).saturating_mul(batch));
    fresh.min(rules.backlog.max_ready_rollouts).saturating_sub(backlog.rollouts + backlog.reserved)
}
