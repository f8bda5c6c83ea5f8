//! Scores that come after their rollouts.

use std::collections::BTreeSet;

use forebay_wire::Verdict;

use super::{Outcome, Reference, Rollout, ingest};
use crate::model::view::{Answer, Refused, SCORES, Score, ScoreLease};

impl Rollout {
    /// What was given to a rollout that never gets all of its scores counts for nothing.
    pub(super) fn withdraw_scores(&mut self) {
        for name in 0..SCORES.len() {
            if let Some(value) = self.scores[name].take() {
                self.scores_after[name] = Some(value);
                self.score_leases_after[name] = self.score_leases[name].take();
            }
        }
    }
}

impl Reference {
    /// A rollout is judged with the last of its scores, and its group is decided if that waited only for it.
    pub(super) fn score(&mut self, sent: &[Score]) -> Outcome {
        let mut after = self.clone();
        let mut put = Vec::with_capacity(sent.len());
        for score in sent {
            put.push(after.put_score(*score)?);
        }
        let complete = |rollout: &Rollout| rollout.unscored_at.is_some() && rollout.scores.iter().all(Option::is_some);
        let judged: BTreeSet<usize> =
            put.iter().map(|(number, ..)| *number).filter(|number| complete(&after.rollouts[number])).collect();
        let groups: BTreeSet<usize> = judged.iter().map(|number| after.rollouts[number].group).collect();
        for number in judged {
            after.judge_scored(number);
        }
        for group in groups {
            if let Some(cause) = after.cause_to_decide(group) {
                after.decide(group, cause);
            }
        }
        *self = after;
        let scored = |(number, duplicate, applied): &(usize, bool, bool)| {
            (*applied, self.receipt(&self.rollouts[number], *duplicate))
        };
        Ok(Answer::Scored(put.iter().map(scored).collect()))
    }

    /// Adds a score to a rollout: its number, whether it was there before, and whether it counts.
    fn put_score(&mut self, score: Score) -> Result<(usize, bool, bool), Refused> {
        let run = self.policies[score.policy].run;
        let is_named =
            |rollout: &Rollout| (rollout.policy, rollout.run, rollout.name) == (score.policy, run, score.rollout);
        let number = self.rollouts.iter().find(|(_, rollout)| is_named(rollout)).map(|(number, _)| *number);
        let number = number.ok_or(Refused::Unknown)?;
        let rollout = &self.rollouts[&number];
        let waits = rollout.unscored_at.is_some();
        let (counted, after) = (rollout.scores[score.name], rollout.scores_after[score.name]);
        let is_repeat = |stored: Option<u8>, lease: Option<usize>| {
            let is_its_lease = match score.lease {
                ScoreLease::None => true,
                ScoreLease::Granted(own) => Some(own) == lease,
                ScoreLease::NeverGranted => false,
            };
            stored.is_some() && stored == score.value && is_its_lease
        };
        let counts = is_repeat(counted, rollout.score_leases[score.name]);
        if counts || is_repeat(after, rollout.score_leases_after[score.name]) {
            return Ok((number, true, counts));
        }
        if score.lease != ScoreLease::None {
            let work = self.held_work(&score, number)?;
            if score.value.is_none() {
                work.fail();
                return Ok((number, false, false));
            }
        }
        if waits && counted.is_some() && !score.replace {
            return Err(Refused::ScoreConflict);
        }
        let rollout = self.rollouts.get_mut(&number).expect("it was found");
        let (scores, leases) = if waits {
            (&mut rollout.scores, &mut rollout.score_leases)
        } else {
            (&mut rollout.scores_after, &mut rollout.score_leases_after)
        };
        scores[score.name] = score.value;
        leases[score.name] = if let ScoreLease::Granted(lease) = score.lease { Some(lease) } else { None };
        Ok((number, false, waits))
    }

    fn judge_scored(&mut self, number: usize) {
        let rollout = &self.rollouts[&number];
        let judged = rollout.scores[0];
        let (verdict, reason) = ingest::judge(&self.groups[&rollout.group].rules, &rollout.body, judged);
        self.make_final(number, verdict, reason);
    }

    /// Makes the verdict of a rollout final.
    fn make_final(&mut self, number: usize, verdict: Verdict, reason: Option<&str>) {
        let rollout = self.rollouts.get_mut(&number).expect("it was found");
        rollout.unscored_at = None;
        rollout.verdict = verdict;
        rollout.reason = reason.map(str::to_owned);
        if verdict != Verdict::Kept {
            rollout.trained_versions = None;
        }
        let (policy, group) = (rollout.policy, rollout.group);
        let waits = |rollout: &Rollout| rollout.group == group && rollout.unscored_at.is_some();
        if !self.rollouts.values().any(waits) {
            // The group has its own deadline again.
            let now = self.now;
            let group = self.group_mut(group);
            group.deadline_at = Some((group.opened_at + group.rules.timeout_s).max(now));
        }
        if verdict == Verdict::Dropped {
            self.count_dropped(policy, reason.expect("drops have a reason"));
        }
    }

    /// Drops the rollouts of a group whose time to be scored is over.
    pub(super) fn drop_unscored_of(&mut self, group: usize, now: i64) {
        let is_due = |at: Option<i64>| at.is_some_and(|at| at <= now);
        let due = self.rollouts.iter().filter(|(_, rollout)| rollout.group == group && is_due(rollout.unscored_at));
        for number in due.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.rollouts.get_mut(&number).expect("it was found").withdraw_scores();
            self.make_final(number, Verdict::Dropped, Some("unscored"));
        }
    }

    /// Group after group, in the order in which their first rollouts are due.
    pub(super) fn drop_unscored(&mut self) {
        let due =
            self.rollouts.iter().filter_map(|(number, rollout)| Some((rollout.unscored_at?, *number, rollout.group)));
        let mut due: Vec<_> = due.filter(|(at, ..)| *at <= self.now).collect();
        due.sort_unstable();
        for (.., group) in due {
            if self
                .rollouts
                .values()
                .any(|rollout| rollout.group == group && rollout.unscored_at.is_some_and(|at| at <= self.now))
            {
                self.drop_unscored_of(group, self.now);
                if let Some(cause) = self.cause_to_decide(group) {
                    self.decide(group, cause);
                }
            }
        }
    }
}
