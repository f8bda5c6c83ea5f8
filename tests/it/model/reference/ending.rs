//! The end of a session: its calls become rollouts, in the same step.

use forebay_wire::{SessionAssembly, SessionState, Status};

use super::{
    Outcome, Reference,
    assembling::{self, Assembled},
    ingest::Room,
    sessions::{OfPolicy, Session},
};
use crate::model::view::{Aborting, Answer, Body, Ended, Ending, Finishing, Post, Receipt, Refused, SessionNumber};

/// The reason of a session that the sweep ended.
const EXPIRED: &str = "session-expired";

impl Reference {
    /// Finishes sessions, all or none.
    pub(super) fn finish(&mut self, finishes: &[Finishing]) -> Outcome {
        let wanted = finishes.iter().map(|finish| (finish.session, Ending::Finish(finish.clone())));
        self.end_all(&wanted.collect::<Vec<_>>()).map(Answer::Ended)
    }

    pub(super) fn abort(&mut self, abort: &Aborting) -> Outcome {
        self.end_all(&[(abort.session, Ending::Abort(abort.clone()))]).map(Answer::Ended)
    }

    fn end_all(&mut self, wanted: &[(Option<SessionNumber>, Ending)]) -> Result<Vec<Ended>, Refused> {
        let mut numbers = Vec::new();
        for (owner, (session, ending)) in wanted.iter().enumerate() {
            let number = session.filter(|number| self.sessions.contains_key(number)).ok_or(Refused::Unknown)?;
            self.sessions[&number].ended_by(number, ending)?;
            if let Ending::Finish(finish) = ending
                && let Some(other) = finish.rewards.keys().find(|policy| !self.sessions[&number].has(**policy))
            {
                let place = if wanted.len() == 1 { String::new() } else { format!("/{owner}") };
                return Err(Refused::Invalid(format!("{place}/rewards/policy-{other}")));
            }
            numbers.push(number);
        }
        // A request opens parked sessions, and they stay so if the end is refused.
        for (&number, (_, ending)) in numbers.iter().zip(wanted) {
            if self.sessions[&number].state == SessionState::Parked && !matches!(ending, Ending::Expire { .. }) {
                self.open_parked(number);
            }
        }
        // Calls in flight are cancelled, and stay so if the end is refused.
        for &number in &numbers {
            if self.sessions[&number].is_live() {
                self.in_flight
                    .values_mut()
                    .filter(|call| call.session == number)
                    .for_each(|call| call.cancelled = true);
            }
        }
        self.mark_delivered();
        let (mut bundle, mut owners, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for (owner, (number, (_, ending))) in numbers.iter().zip(wanted).enumerate() {
            let session = &self.sessions[number];
            if session.is_live() {
                let (posts, assembly) = self.assemble(session, ending)?;
                owners.extend(posts.iter().map(|_| owner));
                ends.push((owner, posts.len(), assembly));
                bundle.extend(posts);
            }
        }
        let mut after = self.clone();
        let mut receipts = Vec::new();
        let lacked = self.lacked(bundle.iter().map(|(post, _)| post));
        for (index, (post, room)) in bundle.iter().enumerate() {
            let receipt = after.post_one((self, &lacked), index, post, *room);
            receipts.push(receipt.map_err(|refused| of_session(refused, &owners, wanted.len()))?);
        }
        let mut rest = receipts.into_iter();
        for (owner, posts, assembly) in ends {
            let receipts = rest.by_ref().take(posts).collect();
            after.write_end(numbers[owner], &wanted[owner].1, receipts, assembly);
        }
        // What had ended before is answered as it was then.
        let is_new = |number: &SessionNumber| self.sessions[number].is_live();
        let ended = numbers.iter().map(|number| after.sessions[number].ended(*number, !is_new(number))).collect();
        *self = after;
        Ok(ended)
    }

    /// The rollouts of a session, and what becomes of its calls.
    fn assemble(&self, session: &Session, ending: &Ending) -> Result<(Vec<(Post, Room)>, SessionAssembly), Refused> {
        let is_current = |of: &&OfPolicy| of.run == self.policies[of.policy].run;
        let (current, reset): (Vec<&OfPolicy>, Vec<&OfPolicy>) = session.policies.iter().partition(is_current);
        if let (Ending::Finish(_), Some(reset)) = (ending, reset.first()) {
            return Err(Refused::SessionReset(format!("policy-{}", reset.policy)));
        }
        let keeps = match ending {
            Ending::Finish(_) => true,
            Ending::Abort(abort) => abort.keep,
            Ending::Expire { .. } => false,
        };
        let assemble = |of: &&OfPolicy| {
            if keeps && !session.calls.is_empty() {
                session.assembled(of.policy, self.policies[of.policy].rules.retries)
            } else {
                dropped_whole(session, of)
            }
        };
        let assembled: Vec<Assembled> = current.iter().map(assemble).collect();
        assert_eq!(session.outgrown(&assembled), None, "of {session:?}");
        let mut totals = SessionAssembly::default();
        for one in assembled.iter().chain(&reset.iter().map(|of| dropped_whole(session, of)).collect::<Vec<_>>()) {
            assembling::add(&mut totals, &one.totals);
        }
        if let Ending::Finish(finish) = ending
            && !matches!(finish.status, Some(Status::Aborted | Status::Failed))
            && assembled.iter().all(|one| one.segments.is_empty() && !one.sampled_nothing)
        {
            return Err(Refused::NoTurns);
        }
        if *ending == (Ending::Expire { posts: false }) {
            return Ok((Vec::new(), totals));
        }
        let post = |(of, assembled): (&OfPolicy, Assembled)| {
            // Room that was given back is not reserved any more.
            let is_reserved = of.reserved_until.is_some_and(|until| until > self.now);
            let room = if is_reserved { Room::Reserved } else { Room::Unreserved };
            (Self::rollout(session, of, ending, assembled), room)
        };
        Ok((current.into_iter().zip(assembled).map(post).collect(), totals))
    }

    /// A policy without segments has an aborted rollout, so that its group does not wait for it, unless all of its answers
    /// are empty.
    fn rollout(session: &Session, of: &OfPolicy, ending: &Ending, assembled: Assembled) -> Post {
        let (mut status, mut reward) = (Status::Aborted, None);
        if let Ending::Finish(finish) = ending {
            let is_failure = matches!(finish.status, Some(Status::Aborted | Status::Failed));
            if is_failure || assembled.sampled_nothing || !assembled.segments.is_empty() {
                status = finish.status.unwrap_or(if session.full { Status::Truncated } else { Status::Completed });
                reward = finish.rewards.get(&of.policy).copied().or(finish.reward);
            }
        }
        let (version, segments) = (Some(of.version), assembled.segments.into());
        let body = Body { status, reward, version, segments, execution: session.opening.execution };
        let group_size = session.opening.group.map(|_| of.group_size);
        Post { policy: of.policy, rollout: session.opening.rollout, group: session.opening.group, group_size, body }
    }

    fn write_end(&mut self, number: SessionNumber, ending: &Ending, receipts: Vec<Receipt>, assembly: SessionAssembly) {
        let now = self.now;
        let current = |of: &&OfPolicy| of.run == self.policies[of.policy].run;
        let rules = self.sessions[&number].policies.iter().filter(current).map(|of| &self.policies[of.policy].rules);
        let settled_s = rules.clone().map(|rules| rules.settled_s).max().unwrap_or(0);
        let tombstone_s = rules.map(|rules| rules.tombstone_s).max().unwrap_or(0);
        let session = self.session_mut(number);
        (session.state, session.reason) = match ending {
            Ending::Finish(_) => (SessionState::Finished, None),
            Ending::Abort(abort) => (SessionState::Aborted, Some(reason(abort.reason))),
            Ending::Expire { .. } => (SessionState::Expired, Some(EXPIRED.to_owned())),
        };
        (session.due_at, session.ended_at) = (None, Some(now));
        (session.end, session.outcome) = (Some(ending.clone()), Some((receipts, assembly)));
        (session.purge_at, session.forget_at) = (Some(now + settled_s), Some(now + settled_s + tombstone_s));
        session.policies.iter_mut().for_each(|of| of.reserved_until = None);
    }

    /// The sweep ends what is due: first what was due first. A session with calls in flight is not idle.
    pub(super) fn expire_sessions(&mut self) {
        let now = self.now;
        let due = |(number, session): (&SessionNumber, &Session)| {
            session.due_at.filter(|due_at| *due_at <= now).map(|due_at| (due_at, *number))
        };
        let mut sessions: Vec<(i64, SessionNumber)> = self.sessions.iter().filter_map(due).collect();
        sessions.sort_unstable();
        for (_, number) in sessions {
            if self.is_busy(number) {
                continue;
            }
            if self.can_park(number) {
                let session = self.session_mut(number);
                (session.state, session.due_at) = (SessionState::Parked, Some(session.expires_at));
                session.parked_at = now;
                continue;
            }
            let expire = |posts| [(Some(number), Ending::Expire { posts })];
            if self.end_all(&expire(true)).is_err() {
                // For example, another rollout with its id was posted meanwhile.
                self.end_all(&expire(false)).expect("without rollouts, nothing can be refused");
            }
        }
    }

    /// Whether an idle session may be resumed.
    fn can_park(&self, number: SessionNumber) -> bool {
        let session = &self.sessions[&number];
        let is_current = |of: &OfPolicy| of.run == self.policies[of.policy].run;
        session.state == SessionState::Open
            && self.now < session.expires_at
            && session.attempt < session.max_attempts
            && session.policies.iter().all(is_current)
    }

    fn is_busy(&self, number: SessionNumber) -> bool {
        let has_calls = self.in_flight.values().any(|call| call.session == number);
        has_calls && self.now < self.sessions[&number].expires_at
    }

    /// What a sweep at this time would do to sessions.
    pub(super) fn due_sessions(&self) -> Vec<&'static str> {
        let at_hand = |at: Option<i64>| at.is_some_and(|at| at <= self.now);
        let mut due = Vec::new();
        for (number, session) in &self.sessions {
            let is_due = at_hand(session.due_at);
            let posted = |of: &OfPolicy| self.rollout_named(of.policy, session.opening.rollout).is_some();
            due.extend((is_due && self.is_busy(*number)).then_some("session, busy"));
            due.extend((is_due && self.can_park(*number)).then_some("session, parked"));
            let is_idle = is_due && self.now < session.expires_at && !self.can_park(*number);
            due.extend((is_idle && session.state == SessionState::Parked).then_some("session, room needed"));
            due.extend((is_idle && session.state == SessionState::Open).then_some("session, idle"));
            due.extend((is_due && self.now >= session.expires_at).then_some("session, too old"));
            due.extend((is_due && session.policies.iter().any(posted)).then_some("session, posted"));
            due.extend(at_hand(session.purge_at).then_some("session, purge"));
            due.extend((session.purged && at_hand(session.forget_at)).then_some("session, forget"));
        }
        due.sort_unstable();
        due.dedup();
        due
    }

    /// Rows of sessions go after their calls and keys.
    pub(super) fn forget_sessions(&mut self) {
        let now = self.now;
        self.sessions.retain(|_, session| !(session.purged && session.forget_at.is_some_and(|at| at <= now)));
    }

    pub(super) fn purge_sessions(&mut self) {
        let now = self.now;
        for session in self.sessions.values_mut().filter(|session| session.purge_at.is_some_and(|at| at <= now)) {
            (session.purge_at, session.purged) = (None, true);
        }
    }
}

impl Session {
    /// Refuses a request to end a session that another request has ended.
    fn ended_by(&self, number: SessionNumber, ending: &Ending) -> Result<(), Refused> {
        let state = match ending {
            Ending::Finish(_) => SessionState::Finished,
            Ending::Abort(_) => SessionState::Aborted,
            Ending::Expire { .. } => SessionState::Expired,
        };
        match &self.end {
            None => Ok(()),
            Some(_) if self.state != state => Err(Refused::SessionEnded(self.state)),
            Some(end) if end == ending => Ok(()),
            Some(_) => Err(Refused::EndConflict(self.state)),
        }
        .inspect(|()| assert!(self.is_live() || self.outcome.is_some(), "session {number} has an outcome"))
    }

    fn ended(&self, session: SessionNumber, duplicate: bool) -> Ended {
        let (receipts, assembly) = self.outcome.clone().expect("it has ended");
        Ended { session, state: self.state, reason: self.reason.clone(), duplicate, receipts, assembly }
    }
}

/// The totals of a policy whose segments are not kept.
fn dropped_whole(session: &Session, of: &OfPolicy) -> Assembled {
    let (calls, sampled) = (session.calls_of(of.policy).count() as u64, session.sampled(of.policy));
    let mut totals = SessionAssembly { calls, sampled_tokens: sampled, ..SessionAssembly::default() };
    (totals.dropped.aborted, totals.dropped_tokens.aborted) = (calls, sampled);
    Assembled { totals, ..Assembled::default() }
}

/// A refusal names the session of the request, not the rollout of the bundle.
fn of_session(refused: Refused, owners: &[usize], sessions: usize) -> Refused {
    match refused {
        Refused::Invalid(pointer) => {
            let (index, rest) = pointer[1..].split_once('/').expect("the pointer names a rollout");
            let owner = owners[index.parse::<usize>().expect("the pointer names a rollout")];
            Refused::Invalid(if sessions == 1 { format!("/{rest}") } else { format!("/{owner}/{rest}") })
        }
        Refused::RolloutConflict { index, verdict } => Refused::RolloutConflict { index: owners[index], verdict },
        Refused::GroupSizeConflict { index, size } => Refused::GroupSizeConflict { index: owners[index], size },
        other => other,
    }
}

/// The text of an abort's reason.
pub(crate) fn reason(number: usize) -> String {
    format!("reason-{number}")
}
