//! How a session is to end: requests to finish or abort it, and its expiry.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use forebay_domain::{
    clock::Timestamp,
    formats::canonical::escape,
    formats::{
        canonical::{ContentDigest, Hasher, check_json},
        codes,
    },
    ids::{PolicyName, SessionId, check_name},
    reasons,
    refusal::Refusal,
    session::{Session, SessionOutcome, WAIT_MS_MAX},
    states::SessionState,
};
use forebay_wire::{self as wire, Violation};

use crate::Buffer;

/// A session that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    pub session_id: SessionId,
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    /// Whether it had ended before.
    pub duplicate: bool,
    /// The answer of the request that ended it.
    pub outcome: SessionOutcome,
}

/// How long a finish waits for calls in flight, if it does not say.
const WAIT_MS: u64 = 5_000;

/// A request to finish a session, valid in itself.
#[derive(Clone, Debug)]
pub struct Finish {
    pub(super) session_id: SessionId,
    pub(super) sent: Arc<wire::SessionFinish>,
    pub(super) rewards: BTreeMap<PolicyName, f64>,
    content: ContentDigest,
}

/// A request to end a session without a reward, valid in itself.
#[derive(Clone, Debug)]
pub struct Abort {
    pub session_id: SessionId,
    /// Why.
    pub reason: String,
    /// Whether the trajectories have segments.
    pub keep: bool,
    /// The attempt that it ends, if it says so.
    pub attempt: Option<u32>,
}

impl Finish {
    /// Checks a request; a refusal has every violation.
    pub fn parse(buffer: &Buffer, sent: wire::SessionFinish) -> Result<Self, Refusal> {
        let session_id = sent.session_id.parse().map_err(|_| Refusal::Unknown("the session"))?;
        let mut violations = Vec::new();
        let mut require = |holds: bool, pointer: &str, detail: String| {
            if !holds {
                violations.push(Violation { pointer: pointer.to_owned(), detail });
            }
        };
        require(sent.reward.is_none_or(f64::is_finite), "/reward", "must be finite".to_owned());
        let wait = sent.wait_ms.is_none_or(|wait_ms| wait_ms <= WAIT_MS_MAX);
        require(wait, "/wait_ms", format!("must be at most {WAIT_MS_MAX}"));
        let mut rewards = BTreeMap::new();
        for (policy, reward) in &sent.rewards {
            require(reward.is_finite(), &format!("/rewards/{}", escape(policy)), "must be finite".to_owned());
            match PolicyName::parse(policy) {
                Ok(policy) => drop(rewards.insert(policy, *reward)),
                Err(error) => require(false, &format!("/rewards/{}", escape(policy)), error.to_string()),
            }
        }
        for (call, reward) in &sent.turn_rewards {
            require(reward.is_finite(), &format!("/turn_rewards/{}", escape(call)), "must be finite".to_owned());
        }
        for (call, state_key) in &sent.turn_state_keys {
            if let Err(detail) = check_name(state_key) {
                require(false, &format!("/turn_state_keys/{}", escape(call)), detail);
            }
        }
        let mut metadata = None;
        if let Some(raw) = &sent.metadata {
            let max = buffer.options.limits.metadata_bytes_max;
            require(raw.get().len() <= max, "/metadata", format!("must be at most {max} bytes"));
            match check_json(&buffer.options.limits.lone_surrogates.stored(raw)) {
                Ok(json) => {
                    require(raw.get().trim_start().starts_with('{'), "/metadata", "must be an object".to_owned());
                    metadata = Some(json.digest);
                }
                Err(detail) => require(false, "/metadata", detail),
            }
        }
        if !violations.is_empty() {
            return Err(Refusal::Invalid(violations));
        }
        let content = digest(&sent, metadata);
        Ok(Self { session_id, sent: Arc::new(sent), rewards, content })
    }

    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.session_id
    }

    /// Refuses rewards of policies that the session does not have.
    fn check(&self, session: &Session) -> Result<(), Refusal> {
        let is_known = |name: &PolicyName| session.policies.iter().any(|policy| policy.policy.public() == *name);
        match self.rewards.keys().find(|name| !is_known(name)) {
            Some(name) => Err(Refusal::invalid(format!("/rewards/{name}"), "the session has no such policy")),
            None => Ok(()),
        }
    }
}

impl Abort {
    /// Checks a request.
    pub fn parse(session_id: SessionId, sent: wire::AbortRequest) -> Result<Self, Refusal> {
        let wire::AbortRequest { reason, keep, attempt } = sent;
        check_name(&reason).map_err(|detail| Refusal::invalid("/reason", detail))?;
        Ok(Self { session_id, reason, keep, attempt })
    }
}

fn digest(sent: &wire::SessionFinish, metadata: Option<ContentDigest>) -> ContentDigest {
    let mut hasher = Hasher::default();
    hasher.text("finish");
    hasher.option(sent.reward, |hasher, reward| hasher.float(reward + 0.0));
    for components in [&sent.rewards, &sent.reward_components] {
        hasher.int(components.len() as i64);
        for (name, value) in components {
            hasher.text(name);
            hasher.float(*value + 0.0);
        }
    }
    hasher.option(sent.status, |hasher, status| hasher.tag(codes::of_status(status)));
    hasher.option(metadata, Hasher::digest);
    // Without them, the digest is the one that versions without them stored.
    if !sent.turn_rewards.is_empty() {
        hasher.text("turn_rewards");
        for (call, reward) in &sent.turn_rewards {
            hasher.text(call);
            hasher.float(*reward + 0.0);
        }
    }
    if !sent.turn_state_keys.is_empty() {
        hasher.text("turn_state_keys");
        for (call, state_key) in &sent.turn_state_keys {
            hasher.text(call);
            hasher.text(state_key);
        }
    }
    hasher.finish()
}

/// How a session ends.
#[derive(Clone)]
pub(super) enum How {
    Finish(Finish),
    Abort {
        reason: String,
        keep: bool,
        attempt: Option<u32>,
    },
    /// `posts` says whether its rollouts are posted.
    Expire {
        posts: bool,
    },
}

/// A session to end.
#[derive(Clone)]
pub(super) struct Ending {
    pub(super) session_id: SessionId,
    pub(super) how: How,
}

impl Ending {
    pub(super) fn state(&self) -> SessionState {
        match self.how {
            How::Finish(_) => SessionState::Finished,
            How::Abort { .. } => SessionState::Aborted,
            How::Expire { .. } => SessionState::Expired,
        }
    }

    pub(super) fn reason(&self) -> Option<String> {
        match &self.how {
            How::Finish(_) => None,
            How::Abort { reason, .. } => Some(reason.clone()),
            How::Expire { .. } => Some(reasons::SESSION_EXPIRED.to_owned()),
        }
    }

    pub(super) fn content(&self) -> ContentDigest {
        let mut hasher = Hasher::default();
        match &self.how {
            How::Finish(finish) => return finish.content,
            How::Abort { reason, keep, .. } => {
                hasher.text("abort");
                hasher.text(reason);
                hasher.tag(u8::from(*keep));
            }
            How::Expire { .. } => hasher.text("expire"),
        }
        hasher.finish()
    }

    /// The attempt that the request ends, if it says so.
    fn attempt(&self) -> Option<u32> {
        match &self.how {
            How::Finish(finish) => finish.sent.attempt,
            How::Abort { attempt, .. } => *attempt,
            How::Expire { .. } => None,
        }
    }

    pub(super) fn keeps_segments(&self) -> bool {
        match self.how {
            How::Finish(_) => true,
            How::Abort { keep, .. } => keep,
            How::Expire { .. } => false,
        }
    }

    /// The finish, if it says something of calls.
    pub(super) fn of_calls(&self) -> Option<&wire::SessionFinish> {
        let How::Finish(finish) = &self.how else { return None };
        let says = !finish.sent.turn_rewards.is_empty() || !finish.sent.turn_state_keys.is_empty();
        says.then_some(&*finish.sent)
    }

    pub(super) fn wait(&self) -> Duration {
        let ms = match &self.how {
            How::Finish(finish) => finish.sent.wait_ms.unwrap_or(WAIT_MS),
            How::Abort { .. } | How::Expire { .. } => 0,
        };
        Duration::from_millis(ms)
    }

    /// Refuses what can be refused without reading the calls.
    pub(super) fn check(&self, session: &Session, now: Timestamp) -> Result<(), Refusal> {
        self.ended(session)?;
        match &self.how {
            How::Finish(finish) => finish.check(session),
            // A call may have been recorded since the session was due.
            How::Expire { .. } if session.due_at.is_some_and(|due_at| due_at > now) => Err(Refusal::SessionChanged),
            How::Abort { .. } | How::Expire { .. } => Ok(()),
        }
    }

    /// The answer if the session has ended before by the same request; none if it has not ended. Refused if the request
    /// ends another attempt, or if another request ended the session.
    pub(super) fn ended(&self, session: &Session) -> Result<Option<Ended>, Refusal> {
        if session.state.is_live() {
            let other = self.attempt().filter(|attempt| *attempt != session.attempt);
            let refused = other.map(|of| Refusal::AttemptSuperseded { attempt: session.attempt, of });
            return refused.map_or(Ok(None), Err);
        }
        if session.state != self.state() {
            return Err(Refusal::SessionEnded(session.state));
        }
        if session.end != Some(self.content()) {
            return Err(Refusal::EndConflict(session.state));
        }
        let outcome = session.outcome.clone().ok_or(Refusal::SessionEnded(session.state))?;
        Ok(Some(Ended {
            session_id: session.session_id,
            state: session.state,
            reason: session.reason.clone(),
            duplicate: true,
            outcome,
        }))
    }
}
