//! Work for scorers: what rollouts lack, leased until somebody gives it.

use super::{Outcome, Reference, Rollout};
use crate::model::view::{
    ATTEMPTS_MAX, Answer, PER_GROUP, PolicyNumber, Refused, SCORES, Score, ScoreLease, WORK_TTL_S, WorkView,
};

/// One piece of work.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) policy: PolicyNumber,
    group: usize,
    /// None for the whole group.
    rollout: Option<usize>,
    pub(crate) name: usize,
    since: i64,
    attempts: u32,
    lease: Option<Lease>,
    failed: bool,
    /// The first rollout that its holder was not given.
    seen: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) number: usize,
    request: Option<usize>,
    expires_at: i64,
}

/// A lease of work that was granted at some time.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) policy: PolicyNumber,
    pub(crate) name: usize,
    /// The rollouts that lacked the score then.
    pub(crate) rollouts: Vec<usize>,
}

impl Work {
    fn is_exhausted(&self) -> bool {
        self.attempts >= ATTEMPTS_MAX
    }

    fn end_attempt(&mut self) {
        self.attempts += 1;
        self.lease = None;
        self.failed = false;
    }
}

impl Reference {
    /// Makes work of what rollouts lack, and ends what nobody lacks any more. It follows every call.
    pub(super) fn update_work(&mut self) {
        let lacks = |rollout: &Rollout, name: usize| rollout.unscored_at.is_some() && rollout.scores[name].is_none();
        let rollouts = &self.rollouts;
        self.work.retain(|work| match work.rollout {
            Some(number) => rollouts.get(&number).is_some_and(|rollout| lacks(rollout, work.name)),
            None => rollouts.values().any(|rollout| rollout.group == work.group && lacks(rollout, work.name)),
        });
        let mut missing = Vec::new();
        for (number, rollout) in rollouts {
            for name in (0..SCORES.len()).filter(|name| lacks(rollout, *name)) {
                let about = (rollout.group, if name == PER_GROUP { None } else { Some(*number) }, name);
                let is_known = self.work.iter().any(|work| (work.group, work.rollout, work.name) == about);
                if !is_known && !missing.contains(&about) {
                    missing.push(about);
                }
            }
        }
        // That of rollouts is made before that of groups.
        missing.sort_by_key(|(group, rollout, _)| (rollout.is_none(), if rollout.is_none() { *group } else { 0 }));
        for (group, rollout, name) in missing {
            let of = &self.groups[&group];
            let half = of.rules.scored_s.map_or(0, |scored_s| self.now + scored_s / 2);
            let since = if rollout.is_some() { self.now } else { half.min(of.opened_at + of.rules.timeout_s) };
            let policy = of.policy;
            self.work.push(Work {
                policy,
                group,
                rollout,
                name,
                since,
                attempts: 0,
                lease: None,
                failed: false,
                seen: 0,
            });
        }
        let rollouts = &self.rollouts;
        for work in self.work.iter_mut().filter(|work| work.rollout.is_none() && work.lease.is_some()) {
            let mut given = rollouts.range(..work.seen).filter(|(_, rollout)| rollout.group == work.group);
            if !given.any(|(_, rollout)| lacks(rollout, work.name)) {
                (work.lease, work.failed) = (None, false);
            }
        }
        let filled: Vec<bool> = self.work.iter().map(|work| self.filled(work.group).is_some()).collect();
        for (work, is_filled) in self.work.iter_mut().zip(filled) {
            if work.rollout.is_none() && is_filled {
                work.since = work.since.min(self.now);
            }
            if work.failed {
                work.end_attempt();
            }
        }
    }

    /// A claim of a scorer.
    pub(super) fn lease_work(
        &mut self,
        policy: PolicyNumber,
        names: &[usize],
        max: usize,
        request: Option<usize>,
    ) -> Outcome {
        let is_of = |work: &Work| work.policy == policy;
        for name in names {
            let is_left = self.work.iter().any(|work| is_of(work) && work.name == *name);
            if self.policies[policy].rules.scored_s.is_none() && !is_left {
                return Err(Refused::Unknown);
            }
        }
        let now = self.now;
        let in_line = |found: &mut Vec<usize>, work: &[Work]| found.sort_by_key(|place| (work[*place].since, *place));
        let places = || 0..self.work.len();
        let is_held = |place: &usize| {
            let lease = self.work[*place].lease.as_ref().filter(|_| is_of(&self.work[*place]));
            names.contains(&self.work[*place].name)
                && lease.is_some_and(|lease| request.is_some() && lease.request == request && lease.expires_at > now)
        };
        let mut chosen: Vec<usize> = places().filter(is_held).collect();
        in_line(&mut chosen, &self.work);
        let held = !chosen.is_empty();
        if !held {
            let is_open = |place: &usize| {
                let work = &self.work[*place];
                let is_free = work.lease.is_none() && !work.is_exhausted();
                is_of(work) && names.contains(&work.name) && is_free && work.since <= now
            };
            chosen = places().filter(is_open).collect();
            in_line(&mut chosen, &self.work);
            chosen.truncate(max);
        }
        let mut items = Vec::new();
        for place in chosen {
            let number = self.work[place].lease.as_ref().map_or(self.grants_of_work.len(), |lease| lease.number);
            let work = &mut self.work[place];
            work.seen = self.arrivals;
            work.lease = Some(Lease { number, request, expires_at: now + WORK_TTL_S });
            let (work, is_new) = (work.clone(), number == self.grants_of_work.len());
            let members = self.rollouts.iter().filter(|(number, rollout)| match work.rollout {
                Some(only) => **number == only,
                None => rollout.group == work.group && super::VOTING.contains(&rollout.verdict),
            });
            let members: Vec<_> = members.map(|(_, rollout)| rollout).collect();
            let missing = |rollout: &&Rollout| {
                rollout.unscored_at.map_or(0, |_| rollout.scores.iter().filter(|score| score.is_none()).count())
            };
            let view = WorkView {
                lease: number,
                attempt: work.attempts + 1,
                name: work.name,
                group: self.groups[&work.group].name,
                rollouts: members.iter().map(|rollout| (rollout.name, missing(rollout))).collect(),
            };
            let lacks = |rollout: &&&Rollout| rollout.unscored_at.is_some() && rollout.scores[work.name].is_none();
            let rollouts = members.iter().filter(lacks).map(|rollout| rollout.name).collect();
            if is_new {
                self.grants_of_work.push(Grant { policy, name: work.name, rollouts });
            }
            items.push(view);
        }
        Ok(Answer::Work { held, items })
    }

    /// Heartbeats.
    pub(super) fn extend_work(&mut self, policy: PolicyNumber, leases: &[usize]) -> Answer {
        let now = self.now;
        let mut held = Vec::new();
        for number in leases {
            let of_policy = self.work.iter_mut().filter(|work| work.policy == policy);
            let mut alive = of_policy.filter_map(|work| work.lease.as_mut()).filter(|lease| lease.expires_at > now);
            let lease = alive.find(|lease| lease.number == *number);
            held.push(lease.is_some());
            if let Some(lease) = lease {
                lease.expires_at = now + WORK_TTL_S;
            }
        }
        Answer::Extended(held)
    }

    /// Exhausted work has its attempts again.
    pub(super) fn retry_work(&mut self, policy: PolicyNumber, name: usize) -> Answer {
        let exhausted = self.work.iter_mut().filter(|work| work.policy == policy && work.name == name);
        let mut retried = 0;
        for work in exhausted.filter(|work| work.is_exhausted()) {
            work.attempts = 0;
            retried += 1;
        }
        Answer::Retried(retried)
    }

    pub(super) fn expire_work(&mut self) {
        let now = self.now;
        for work in &mut self.work {
            if work.lease.as_ref().is_some_and(|lease| lease.expires_at <= now) {
                work.end_attempt();
            }
        }
    }

    /// The work of a score's lease, if that is alive.
    pub(super) fn held_work(&mut self, score: &Score, number: usize) -> Result<&mut Work, Refused> {
        let (now, group) = (self.now, self.rollouts[&number].group);
        let is_alive = |work: &&mut Work| {
            work.lease
                .as_ref()
                .is_some_and(|held| ScoreLease::Granted(held.number) == score.lease && held.expires_at > now)
        };
        let work = self.work.iter_mut().find(is_alive).ok_or(Refused::LeaseLost)?;
        let is_about = work.group == group && work.rollout.is_none_or(|only| only == number) && work.name == score.name;
        // Not specified: the pointer has the place of the score, and the operations name one lease.
        if is_about { Ok(work) } else { Err(Refused::Invalid(String::new())) }
    }
}

impl Work {
    pub(super) fn fail(&mut self) {
        self.failed = true;
    }
}
