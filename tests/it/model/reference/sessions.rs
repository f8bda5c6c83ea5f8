//! Sessions while they are open: room is reserved, and calls are recorded.

use forebay_wire::{GroupState, Retries, SessionAssembly, SessionState};

use super::{
    Outcome, Reference,
    assembling::{self, Assembled},
};
use crate::model::view::{
    AgentCall, Answer, Ending, GroupName, InFlightNumber, KeyPick, Opening, PolicyNumber, Receipt, Recorded, Refused,
    SessionNumber, SessionPolicyView, SessionView, TurnView,
};

/// The most segments of a rollout, and so of a session.
pub(crate) const SEGMENTS_MAX: u64 = 4;
/// The most tokens of a rollout, and so of a session.
pub(crate) const TOKENS_MAX: u64 = 200;
/// The most calls of a session that are in flight at once.
pub(crate) const IN_FLIGHT_MAX: usize = 2;
/// Seconds for which room stays reserved after a session should have expired.
const GRACE_S: i64 = 3_600;
/// Seconds for which a parked session keeps its room although somebody waits for room.
const PARKED_STAYS_S: i64 = 300;
/// Number of posts per place of a group for which room need not be asked.
const POSTS_PER_PLACE: u64 = 4;

/// A session.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    pub(crate) opening: Opening,
    pub(crate) policies: Vec<OfPolicy>,
    pub(crate) state: SessionState,
    pub(super) reason: Option<String>,
    pub(crate) calls: Vec<Stored>,
    /// The most segments and tokens that the calls can become.
    ///
    /// Not specified: how these are counted, and that a call without ids counts as the one that continues another one.
    /// Here a call that is the first to continue another one adds its tail to a segment, and every other call adds a
    /// segment. [`Self::outgrown`] checks that the segments are never more.
    pub(super) bounds: (u64, u64),
    /// Calls that another call continues.
    continued: Vec<u32>,
    pub(crate) full: bool,
    pub(super) opened_at: i64,
    pub(super) last_call_at: Option<i64>,
    pub(super) expires_at: i64,
    pub(super) due_at: Option<i64>,
    /// When it was parked last.
    pub(super) parked_at: i64,
    pub(super) ended_at: Option<i64>,
    /// The attempt that is under way, and the most attempts.
    pub(crate) attempt: u32,
    pub(super) max_attempts: u32,
    /// How it ended.
    pub(crate) end: Option<Ending>,
    pub(super) outcome: Option<(Vec<Receipt>, SessionAssembly)>,
    pub(super) purge_at: Option<i64>,
    pub(super) forget_at: Option<i64>,
    /// Whether its calls and keys are gone.
    pub(super) purged: bool,
}

/// A policy of a session.
#[derive(Clone, Debug)]
pub(crate) struct OfPolicy {
    pub(crate) policy: PolicyNumber,
    pub(crate) run: i64,
    pub(super) version: i64,
    pub(super) group_size: u32,
    /// When the reserved room is given back; none if it was used or given back.
    pub(super) reserved_until: Option<i64>,
}

/// A recorded call.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) policy: PolicyNumber,
    pub(crate) sent: AgentCall,
    /// The attempt that made it.
    attempt: u32,
    /// Whether it is marked as delivered or as lost; none if neither is stored.
    pub(super) delivered: Option<bool>,
}

/// A call in flight.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub(crate) session: SessionNumber,
    attempt: u32,
    /// The policies of the session, which may be forgotten before the call ends.
    policies: Vec<PolicyNumber>,
    /// What the session had the most of when the call began.
    full: Option<&'static str>,
    /// Whether a request that ends the session no longer waits for it.
    pub(super) cancelled: bool,
}

impl Session {
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state, SessionState::Open | SessionState::Parked | SessionState::Finishing)
    }

    pub(super) fn has(&self, policy: PolicyNumber) -> bool {
        self.policies.iter().any(|of| of.policy == policy)
    }

    pub(super) fn group(&self) -> GroupName {
        group(&self.opening)
    }

    /// The calls of a policy, with their numbers.
    pub(super) fn calls_of(&self, policy: PolicyNumber) -> impl Iterator<Item = (u32, &Stored)> {
        let numbered = self.calls.iter().enumerate().map(|(place, call)| (place as u32 + 1, call));
        numbered.filter(move |(_, call)| call.policy == policy)
    }

    pub(super) fn sampled(&self, policy: PolicyNumber) -> u64 {
        self.calls_of(policy).map(|(_, call)| call.sent.ids.len() as u64).sum()
    }

    /// Whether an agent is at work, or may soon be again.
    pub(super) fn has_agent(&self, now: i64) -> bool {
        self.is_live() && (self.state != SessionState::Parked || self.parked_at + PARKED_STAYS_S > now)
    }

    /// The version of its oldest token, or that of its opening.
    pub(super) fn oldest_version(&self, of: &OfPolicy) -> i64 {
        let sampled = self.calls_of(of.policy).flat_map(|(_, call)| &call.sent.versions).map(|span| span.0);
        sampled.min().unwrap_or(of.version)
    }

    /// The segments of a policy's calls.
    pub(super) fn assembled(&self, policy: PolicyNumber, retries: Retries) -> Assembled {
        // Of any policy.
        let last = self.calls.iter().map(|call| call.attempt).max();
        let calls: Vec<(&AgentCall, bool, bool)> = self
            .calls_of(policy)
            .map(|(seq, call)| (&call.sent, self.counts_as_delivered(seq, call), Some(call.attempt) < last))
            .collect();
        assembling::assemble(&calls, retries)
    }

    /// A call of which it is not known counts, unless its agent sent the prompt again.
    fn counts_as_delivered(&self, seq: u32, call: &Stored) -> bool {
        let is_repeat = |(later, other): (u32, &Stored)| {
            later > seq && (other.sent.agent, &other.sent.prompt) == (call.sent.agent, &call.sent.prompt)
        };
        call.delivered.unwrap_or_else(|| !self.calls_of(call.policy).any(is_repeat))
    }

    /// Which bound the segments exceed, none of which may happen.
    pub(super) fn outgrown(&self, assembled: &[Assembled]) -> Option<String> {
        let segments = assembled.iter().flat_map(|one| &one.segments);
        let tokens: u64 = segments.clone().map(|segment| segment.tokens.len() as u64).sum();
        let found = (segments.count() as u64, tokens);
        let fits = found.0 <= self.bounds.0 && found.1 <= self.bounds.1;
        (!fits).then(|| format!("{found:?} segments and tokens are more than {:?}", self.bounds))
    }

    /// The call of the policy that a prompt is the first to continue, and the number of ids that both begin with.
    fn continues(&self, policy: PolicyNumber, prompt: &[i32]) -> Option<(u32, usize)> {
        let mut found: Option<(u32, usize, bool)> = None;
        for (seq, call) in self.calls_of(policy) {
            let full = [&call.sent.prompt[..], &call.sent.ids].concat();
            let whole = full.len() - 1;
            let matched = if call.sent.ids.is_empty() {
                None
            } else if prompt.starts_with(&full) {
                Some((full.len(), true))
            } else if call.sent.stopped
                && call.sent.ids.len() > 1
                && prompt.len() > whole
                && prompt[..whole] == full[..whole]
            {
                Some((whole, false))
            } else {
                None
            };
            // The longest one, rather a whole call than one without its stop token, and then the first.
            if let Some((length, is_whole)) = matched
                && found.is_none_or(|(_, best, was_whole)| (length, is_whole) > (best, was_whole))
            {
                found = Some((seq, length, is_whole));
            }
        }
        found.map(|(seq, length, _)| (seq, length)).filter(|(seq, _)| !self.continued.contains(seq))
    }
}

fn group(opening: &Opening) -> GroupName {
    opening.group.map_or(GroupName::Alone(opening.rollout), GroupName::Named)
}

impl Reference {
    /// Everything that would be refused at the end is refused here. The policies are asked in order.
    pub(super) fn open(&mut self, opening: &Opening) -> Outcome {
        for &policy in &opening.policies {
            let run = self.policies[policy].run;
            let same = |session: &&Session| {
                session.opening.rollout == opening.rollout
                    && session.policies.iter().any(|of| of.policy == policy && of.run == run)
            };
            let found = self.sessions.iter().find(|(_, session)| same(session));
            if let Some((&session, known)) = found {
                // The size of the group belongs to the group.
                let same = Opening { group_size: known.opening.group_size, ..opening.clone() } == known.opening;
                return if !same {
                    Err(Refused::SessionConflict)
                } else if matches!(known.state, SessionState::Open | SessionState::Parked) {
                    Ok(Answer::Opened { session, duplicate: true, expires_at: known.expires_at })
                } else {
                    Err(Refused::SessionEnded(known.state))
                };
            }
        }
        let mut policies = Vec::new();
        let expires_at = self.now + opening.ttl_s;
        let mut max_attempts = u32::MAX;
        for (index, &policy) in opening.policies.iter().enumerate() {
            let checked = self.check_opening(opening, index, policy);
            if checked == Err(Refused::NoRoom) {
                self.release_parked(policy);
            }
            let group_size = checked?;
            max_attempts = max_attempts.min(self.policies[policy].rules.max_attempts);
            let (run, version) = (self.policies[policy].run, self.policies[policy].version);
            policies.push(OfPolicy { policy, run, version, group_size, reserved_until: Some(expires_at + GRACE_S) });
        }
        let session = self.opened;
        self.opened += 1;
        let new = Session {
            opening: opening.clone(),
            policies,
            state: SessionState::Open,
            reason: None,
            calls: Vec::new(),
            bounds: (0, 0),
            continued: Vec::new(),
            full: false,
            opened_at: self.now,
            last_call_at: None,
            expires_at,
            due_at: Some(expires_at.min(self.now + opening.idle_s)),
            parked_at: 0,
            ended_at: None,
            attempt: 1,
            max_attempts,
            end: None,
            outcome: None,
            purge_at: None,
            forget_at: None,
            purged: false,
        };
        self.sessions.insert(session, new);
        Ok(Answer::Opened { session, duplicate: false, expires_at })
    }

    /// The session that has been parked longest gives up its room to whoever was refused, if it had some time.
    fn release_parked(&mut self, policy: PolicyNumber) {
        let now = self.now;
        let may_go = |(_, session): &(&SessionNumber, &mut Session)| {
            session.state == SessionState::Parked && session.has(policy) && session.parked_at + PARKED_STAYS_S <= now
        };
        let parked = self.sessions.iter_mut().filter(may_go);
        if let Some((_, session)) = parked.min_by_key(|(number, session)| (session.parked_at, **number)) {
            session.due_at = session.due_at.min(Some(now));
        }
    }

    /// The agent of a session is started again.
    pub(super) fn resume_session(&mut self, session: Option<SessionNumber>, after: Option<u32>) -> Outcome {
        let number = session.filter(|number| self.sessions.contains_key(number)).ok_or(Refused::Unknown)?;
        let known = &self.sessions[&number];
        if !matches!(known.state, SessionState::Open | SessionState::Parked) {
            return Err(Refused::SessionEnded(known.state));
        }
        if known.expires_at <= self.now {
            return Err(Refused::SessionEnded(SessionState::Expired));
        }
        if let Some(reset) = known.policies.iter().find(|of| of.run != self.policies[of.policy].run) {
            return Err(Refused::SessionReset(format!("policy-{}", reset.policy)));
        }
        if after.is_some_and(|after| after != known.attempt) {
            return Err(Refused::AttemptOver);
        }
        if known.attempt >= known.max_attempts {
            return Err(Refused::NoAttemptsLeft);
        }
        for call in self.in_flight.values_mut().filter(|call| call.session == number) {
            call.cancelled = true;
        }
        let known = self.open_parked(number);
        known.attempt += 1;
        Ok(Answer::Attempt { attempt: known.attempt })
    }

    /// Its agent is at work.
    pub(super) fn open_parked(&mut self, number: SessionNumber) -> &mut Session {
        let now = self.now;
        let session = self.session_mut(number);
        session.state = SessionState::Open;
        session.due_at = Some(session.expires_at.min(now + session.opening.idle_s));
        session
    }

    /// Returns the size of the group.
    fn check_opening(&mut self, opening: &Opening, index: usize, policy: PolicyNumber) -> Result<u32, Refused> {
        if let Some(known) = self.rollout_named(policy, opening.rollout) {
            return Err(Refused::RolloutConflict { index, verdict: known.verdict });
        }
        let live: Vec<u32> = self.live_sizes(policy, group(opening));
        let found = self.group_named(policy, group(opening)).map(|number| &self.groups[&number]);
        let rules = found.map_or(&self.policies[policy].rules, |group| &group.rules);
        let is_open = found.is_some_and(|group| group.state == GroupState::Open);
        let size = found.map(|group| group.size).or(live.iter().max().copied());
        if let (Some(size), Some(stated)) = (size, opening.group_size)
            && size != stated
        {
            return Err(Refused::GroupSizeConflict { index, size });
        }
        if opening.group.is_none() && rules.size > 1 {
            return Err(Refused::Invalid("/group_id".to_owned()));
        }
        let size = size.or(opening.group_size).unwrap_or(rules.size);
        // A group that has begun is always completed.
        let has_begun = is_open || !live.is_empty();
        // All of its places are taken while some of its rollouts wait for scores.
        let number = self.group_named(policy, group(opening));
        if is_open && number.is_some_and(|number| self.filled(number).is_some()) {
            self.give_back_expired(policy);
            return Err(Refused::NoRoom);
        }
        if has_begun && (live.len() as u64) < u64::from(size) * POSTS_PER_PLACE {
            return Ok(size);
        }
        // More sessions of a group that has begun are no new group.
        if has_begun {
            self.give_back_expired(policy);
            let goes_on = !self.nothing_goes_on(policy, group(opening));
            return if goes_on { Err(Refused::NoRoom) } else { Ok(size) };
        }
        self.give_back_expired(policy);
        if self.has_room(policy, group(opening), size) { Ok(size) } else { Err(Refused::NoRoom) }
    }

    /// Sizes of a group, as its live sessions were opened with them.
    fn live_sizes(&self, policy: PolicyNumber, group: GroupName) -> Vec<u32> {
        let run = self.policies[policy].run;
        let live = self.sessions.values().filter(|session| session.is_live() && session.group() == group);
        let of_policy = live.flat_map(|session| &session.policies).filter(|of| of.policy == policy && of.run == run);
        of_policy.map(|of| of.group_size).collect()
    }

    /// The number of rollouts of a policy that room is reserved for.
    pub(super) fn reserved(&self, policy: PolicyNumber) -> usize {
        let all = self.sessions.values().flat_map(|session| &session.policies);
        all.filter(|of| of.policy == policy && of.reserved_until.is_some()).count()
    }

    pub(super) fn give_back_expired(&mut self, policy: PolicyNumber) {
        let now = self.now;
        self.give_back(policy, |until| until <= now);
    }

    pub(super) fn give_back_all(&mut self, policy: PolicyNumber) {
        self.give_back(policy, |_| true);
    }

    fn give_back(&mut self, policy: PolicyNumber, is_due: impl Fn(i64) -> bool) {
        for of in self.sessions.values_mut().flat_map(|session| &mut session.policies) {
            if of.policy == policy && of.reserved_until.is_some_and(&is_due) {
                of.reserved_until = None;
            }
        }
    }

    /// An agent begins a call.
    pub(super) fn begin(&mut self, session: Option<SessionNumber>, key: KeyPick) -> Result<InFlightNumber, Refused> {
        let owner = match key {
            KeyPick::Own(_) => session,
            KeyPick::Of(owner) => Some(owner),
            KeyPick::Forged => None,
        };
        let known = owner.and_then(|owner| self.sessions.get(&owner)).filter(|known| !known.purged);
        let Some(known) = known.filter(|_| owner == session) else { return Err(Refused::UnknownSessionKey) };
        let number = session.expect("it is known");
        if !matches!(known.state, SessionState::Open | SessionState::Parked) {
            return Err(Refused::SessionEnded(known.state));
        }
        if known.expires_at <= self.now {
            return Err(Refused::SessionEnded(SessionState::Expired));
        }
        if known.state == SessionState::Parked {
            self.open_parked(number);
        }
        let known = &self.sessions[&number];
        let full = [
            ("calls", known.calls.len() as u32 >= known.opening.max_calls),
            ("segments", known.bounds.0 >= SEGMENTS_MAX),
            ("tokens", known.bounds.1 >= TOKENS_MAX),
        ];
        let full = full.into_iter().find(|(_, is_full)| *is_full).map(|(what, _)| what);
        if self.in_flight.values().filter(|call| call.session == number).count() >= IN_FLIGHT_MAX {
            return Err(Refused::SessionBusy);
        }
        let call = self.begun;
        self.begun += 1;
        let (policies, attempt) = (known.opening.policies.clone(), known.attempt);
        self.in_flight.insert(call, InFlight { session: number, attempt, policies, full, cancelled: false });
        Ok(call)
    }

    /// A call in flight ends.
    pub(super) fn end_call(&mut self, call: InFlightNumber, sent: Option<&AgentCall>) -> Answer {
        let Some(call) = self.in_flight.remove(&call) else { return Answer::Refused(Refused::Unknown) };
        let recorded = sent.map_or(Ok(Recorded::Gone), |sent| self.record(&call, sent));
        Answer::Call { recorded, cancelled: call.cancelled }
    }

    fn record(&mut self, call: &InFlight, sent: &AgentCall) -> Result<Recorded, Refused> {
        let Some(policy) = sent.policy else { return Ok(Recorded::Forwarded) };
        if !call.policies.contains(&policy) {
            return Err(Refused::UnknownModel);
        }
        let number = call.session;
        if sent.retries > 0 {
            self.mark_delivered();
        }
        let Some(known) = self.sessions.get(&number) else {
            // What the call was told when it began still holds.
            return Err(call.full.map_or(Refused::Unknown, Refused::SessionFull));
        };
        let attempt = call.attempt;
        let repeats =
            |call: &Stored| call.sent.body == sent.body && call.sent.retries < sent.retries && call.attempt == attempt;
        let replayed = known.calls.iter().position(|call| repeats(call) && call.delivered != Some(true));
        if let Some(place) = replayed.filter(|_| sent.retries > 0 && !known.purged) {
            let seq = place as u32 + 1;
            self.delivered.insert((number, seq), sent.delivered);
            return Ok(Recorded::Replayed { seq });
        }
        if let Some(what) = call.full {
            let is_live = known.is_live();
            self.session_mut(number).full |= is_live;
            return Err(Refused::SessionFull(what));
        }
        if known.attempt != attempt {
            return Err(Refused::AttemptOver);
        }
        if !known.is_live() {
            return Err(Refused::SessionEnded(known.state));
        }
        let whole = (sent.prompt.len() + sent.ids.len()) as u64;
        let continues = known.continues(policy, &sent.prompt);
        let (segments, tokens) = match continues {
            _ if sent.ids.is_empty() => (0, 0),
            Some((_, shared)) => (0, whole - shared as u64),
            None => (1, whole),
        };
        let full = [
            ("calls", known.calls.len() as u32 >= known.opening.max_calls),
            ("segments", known.bounds.0 + segments > SEGMENTS_MAX),
            ("tokens", known.bounds.1 + tokens > TOKENS_MAX),
        ];
        let now = self.now;
        let known = self.session_mut(number);
        if let Some((what, _)) = full.into_iter().find(|(_, is_full)| *is_full) {
            known.full = true;
            return Err(Refused::SessionFull(what));
        }
        known.calls.push(Stored { policy, sent: sent.clone(), attempt, delivered: None });
        known.continued.extend(continues.map(|(seq, _)| seq));
        known.bounds = (known.bounds.0 + segments, known.bounds.1 + tokens);
        known.last_call_at = Some(now);
        known.due_at = Some(known.expires_at.min(now + known.opening.idle_s));
        if known.state == SessionState::Parked {
            known.state = SessionState::Open;
        }
        let seq = known.calls.len() as u32;
        self.delivered.insert((number, seq), sent.delivered);
        Ok(Recorded::New { seq })
    }

    /// Calls are marked in the store with the next request that needs it. A restart in between loses the marks.
    pub(super) fn mark_delivered(&mut self) {
        for ((session, seq), is_delivered) in std::mem::take(&mut self.delivered) {
            let call = self.sessions.get_mut(&session).and_then(|known| known.calls.get_mut(seq as usize - 1));
            if let Some(call) = call {
                call.delivered = Some(is_delivered || call.delivered == Some(true));
            }
        }
    }

    /// What the process knows and the store does not is lost.
    pub(super) fn forget_process(&mut self) {
        self.in_flight.clear();
        self.delivered.clear();
    }

    pub(super) fn session_mut(&mut self, session: SessionNumber) -> &mut Session {
        self.sessions.get_mut(&session).expect("sessions are referred to while they are there")
    }

    /// The calls of a session, and what becomes of them by the rules as they are now.
    pub(super) fn turns(&mut self, session: Option<SessionNumber>) -> Outcome {
        let number = session.filter(|number| self.sessions.contains_key(number)).ok_or(Refused::Unknown)?;
        self.mark_delivered();
        let session = &self.sessions[&number];
        let mut turns = Vec::new();
        for of in session.policies.iter().filter(|_| !session.purged) {
            let assembled = session.assembled(of.policy, self.policies[of.policy].rules.retries);
            let numbers: Vec<u32> = session.calls_of(of.policy).map(|(seq, _)| seq).collect();
            for (place, &seq) in numbers.iter().enumerate() {
                let divergence = assembled.breaks[place].map(|(nearest, position)| (numbers[nearest], position));
                turns.push(TurnView { seq, outcome: assembled.outcomes[place], divergence });
            }
        }
        turns.sort_by_key(|turn| turn.seq);
        Ok(Answer::Turns(turns))
    }

    pub(super) fn session_views(&self, policy: PolicyNumber) -> Vec<SessionView> {
        let views =
            self.sessions.iter().filter(|(_, session)| session.has(policy)).map(|(number, session)| SessionView {
                session: *number,
                rollout: session.opening.rollout,
                state: session.state,
                reason: session.reason.clone(),
                policies: session
                    .policies
                    .iter()
                    .map(|of| SessionPolicyView {
                        policy: of.policy,
                        run: of.run,
                        version: of.version,
                        group_size: of.group_size,
                        calls: session.calls_of(of.policy).count() as u32,
                        sampled: session.sampled(of.policy),
                    })
                    .collect(),
                calls: session.calls.len() as u32,
                bounds: session.bounds,
                full: session.full,
                opened_at: session.opened_at,
                last_call_at: session.last_call_at,
                expires_at: session.expires_at,
                due_at: session.due_at,
                ended_at: session.ended_at,
                attempt: session.attempt,
                max_attempts: session.max_attempts,
                outcome: session.outcome.clone(),
            });
        views.collect()
    }
}
