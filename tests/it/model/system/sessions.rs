//! Sessions of the real buffer: the calls of agents go through the same functions as those of the listener of sessions,
//! without HTTP and without an engine.

use std::{collections::BTreeMap, time::Duration};

use forebay_domain::{
    ids::SessionId,
    session::{Session, SessionFilter, SessionOutcome},
};
use forebay_service::{
    error::BufferError,
    session::{
        ending::{self, Abort, Finish},
        open::OpenSession,
        record::{CallPermit, NewCall},
    },
};
use forebay_wire::{self as wire, AbortRequest, SessionAssembly, SessionFinish, SessionModel, SessionRequest};
use futures::FutureExt as _;

use super::{ALL, System, policy_name, refused};
use crate::model::{
    names,
    operation::POLICIES,
    reference::reason,
    view::{
        Aborting, AgentCall, Answer, Call, Ended, Finishing, GroupName, InFlightNumber, KeyPick, Opening, PolicyNumber,
        Receipt, Recorded, Refused, SessionNumber, SessionPolicyView, SessionView, TurnView,
    },
};
use crate::sessions::begin_call;

/// The model whose calls are forwarded and not recorded.
const FROZEN: &str = "frozen";

impl System {
    pub(super) async fn answer_for_session(&mut self, call: &Call) -> Result<Answer, BufferError> {
        match call {
            Call::OpenSession(opening) => self.open_session(opening).await,
            Call::ResumeSession { session, after } => {
                let opened = self.buffer.resume_session(self.session_id(*session), *after).await?;
                // The keys before permit nothing more.
                self.sessions[session.expect("it was resumed")].1 = vec![opened.key];
                Ok(Answer::Attempt { attempt: opened.attempt })
            }
            Call::Record { session, key, sent } => {
                let permit = self.permit(*session, *key).await?;
                self.begun += 1;
                self.end_call(permit, Some(sent)).await
            }
            Call::Begin { session, key } => {
                let permit = self.permit(*session, *key).await?;
                let call: InFlightNumber = self.begun;
                self.begun += 1;
                self.in_flight.insert(call, permit);
                Ok(Answer::Begun { call })
            }
            Call::Answered { call, sent } => match self.in_flight.remove(call) {
                Some(permit) => self.end_call(permit, sent.as_ref()).await,
                None => Ok(Answer::Refused(Refused::Unknown)),
            },
            Call::Finish(finishes) => {
                let finishes = finishes.iter().map(|finish| Finish::parse(&self.buffer, self.finish_of(finish)));
                let ended = self.buffer.finish_sessions(finishes.collect::<Result<_, _>>()?).await?;
                Ok(self.ended(ended))
            }
            Call::Abort(Aborting { session, reason: number, keep }) => {
                let request = AbortRequest { reason: reason(*number), keep: *keep, attempt: None };
                let ended = self.buffer.abort_session(Abort::parse(self.session_id(*session), request)?).await?;
                Ok(self.ended(vec![ended]))
            }
            Call::Turns { session } => {
                let turns = self.buffer.session_turns(self.session_id(*session)).await?;
                let turns = turns.into_iter().map(|turn| TurnView {
                    seq: turn.call.seq,
                    outcome: turn.outcome.as_str(),
                    divergence: turn.divergence.map(|found| (found.nearest, found.position)),
                });
                Ok(Answer::Turns(turns.collect()))
            }
            _ => unreachable!("the others were answered before"),
        }
    }

    async fn open_session(&mut self, opening: &Opening) -> Result<Answer, BufferError> {
        let model = |policy: Option<PolicyNumber>| SessionModel {
            policy: policy.map(|policy| policy_name(policy).to_string()),
        };
        let models = opening.policies.iter().map(|policy| (model_name(Some(*policy)), model(Some(*policy))));
        let request = SessionRequest {
            models: models.chain([(FROZEN.to_owned(), model(None))]).collect(),
            rollout_id: Some(self.names.rollout(opening.rollout).to_owned()),
            group_id: opening.group.map(|group| self.names.named_group(group).to_owned()),
            group_size: opening.group_size,
            environment: opening.group.and_then(|group| names::environment_of(GroupName::Named(group))),
            execution_id: opening.execution.map(|number| names::execution_id(number).to_string()),
            ttl_s: Some(opening.ttl_s as u64),
            idle_s: Some(opening.idle_s as u64),
            max_calls: Some(opening.max_calls),
            ..SessionRequest::default()
        };
        let opened = self.buffer.open_session(OpenSession::parse(&self.buffer, request)?).await?;
        let known = self.sessions.iter().position(|(id, _)| *id == opened.session_id);
        let session = known.unwrap_or_else(|| {
            self.sessions.push((opened.session_id, Vec::new()));
            self.sessions.len() - 1
        });
        self.sessions[session].1.push(opened.key);
        Ok(Answer::Opened { session, duplicate: opened.duplicate, expires_at: self.seconds(opened.expires_at) })
    }

    async fn permit(&self, session: Option<SessionNumber>, key: KeyPick) -> Result<CallPermit, BufferError> {
        let of = |session: SessionNumber, nth: usize| {
            let keys = &self.sessions[session].1;
            keys[nth % keys.len()].reveal().to_owned()
        };
        let key = match (key, session) {
            (KeyPick::Own(nth), Some(session)) => of(session, nth),
            (KeyPick::Of(owner), _) => of(owner, 0),
            (KeyPick::Own(_), None) | (KeyPick::Forged, _) => "forged".to_owned(),
        };
        self.buffer.session_for_call(Some(self.session_id(session)), &key, Duration::ZERO).await
    }

    async fn end_call(&self, permit: CallPermit, sent: Option<&AgentCall>) -> Result<Answer, BufferError> {
        let cancelled = permit.cancelled().now_or_never().is_some();
        let recorded = match sent {
            None => Ok(Recorded::Gone),
            Some(sent) => match self.record(&permit, sent).await {
                Err(BufferError::Refused(refusal)) => Err(refused(refusal)),
                recorded => Ok(recorded?),
            },
        };
        Ok(Answer::Call { recorded, cancelled })
    }

    /// A repeated request is answered with the recorded answer, if there is one.
    async fn record(&self, permit: &CallPermit, sent: &AgentCall) -> Result<Recorded, BufferError> {
        let model = model_name(sent.policy);
        let Some(policy) = permit.policy(&model)? else { return Ok(Recorded::Forwarded) };
        let policy = policy.policy.clone();
        let answer = format!("{{\"body\":{}}}", sent.body);
        let replayed = begin_call(&self.buffer, permit, [sent.body; 32], sent.retries).await?;
        let (recorded, answered) = if let Some(found) = replayed {
            assert_eq!(found.response, answer, "the answer is that to the same request");
            (found.call, Recorded::Replayed { seq: found.call.seq })
        } else {
            let call = NewCall {
                policy,
                agent: sent.agent.map(|agent| format!("agent-{agent}")),
                dialect: "chat".to_owned(),
                model,
                prompt: sent.prompt.clone(),
                ids: sent.ids.clone(),
                logprobs: sent.logprobs.iter().copied().map(names::logprob).collect(),
                versions: sent.versions.clone(),
                finish_reason: "stop".to_owned(),
                stopped_on_token: sent.stopped,
                body_digest: [sent.body; 32],
                retry_count: sent.retries,
                response: answer,
                ..NewCall::default()
            };
            let recorded = self.buffer.record_call(permit, call).await?;
            (recorded, Recorded::New { seq: recorded.seq })
        };
        if sent.delivered {
            self.buffer.mark_delivered(recorded.call_pk);
        }
        Ok(answered)
    }

    fn finish_of(&self, finish: &Finishing) -> SessionFinish {
        let halves = |halves: u8| f64::from(halves) / 2.0;
        let rewards = finish.rewards.iter().map(|(policy, reward)| (policy_name(*policy).to_string(), halves(*reward)));
        SessionFinish {
            session_id: self.session_id(finish.session).to_string(),
            reward: finish.reward.map(halves),
            rewards: rewards.collect::<BTreeMap<_, _>>(),
            status: finish.status,
            wait_ms: Some(0),
            ..SessionFinish::default()
        }
    }

    fn ended(&self, ended: Vec<ending::Ended>) -> Answer {
        let ended = ended.into_iter().map(|ended| {
            let (receipts, assembly) = self.outcome(&ended.outcome);
            Ended {
                session: self.session_number(ended.session_id),
                state: ended.state.into(),
                reason: ended.reason,
                duplicate: ended.duplicate,
                receipts,
                assembly,
            }
        });
        Answer::Ended(ended.collect())
    }

    fn outcome(&self, outcome: &SessionOutcome) -> (Vec<Receipt>, SessionAssembly) {
        assert_conserved(&outcome.assembly);
        let receipt = |receipt: &wire::Receipt| Receipt {
            verdict: receipt.verdict,
            reason: receipt.reason.clone(),
            duplicate: receipt.duplicate,
            scoring: receipt.scoring.len(),
            group: self.names.group_name(&receipt.group_id),
            state: receipt.group.state,
            arrived: receipt.group.arrived,
            size: receipt.group.size,
        };
        (outcome.receipts.iter().map(receipt).collect(), outcome.assembly)
    }

    fn session_id(&self, session: Option<SessionNumber>) -> SessionId {
        session.map_or_else(SessionId::mint, |session| self.sessions[session].0)
    }

    fn session_number(&self, session: SessionId) -> SessionNumber {
        self.sessions.iter().position(|(id, _)| *id == session).expect("no session is opened but by a request")
    }

    pub(super) async fn session_views(&self, policy: PolicyNumber) -> Result<Vec<SessionView>, BufferError> {
        let filter = SessionFilter { policy: policy_name(policy), limit: ALL, ..SessionFilter::default() };
        let sessions = self.buffer.sessions(filter).await?.entries;
        Ok(sessions.iter().map(|session| self.session_view(session)).collect())
    }

    fn session_view(&self, session: &Session) -> SessionView {
        let policies = session.policies.iter().map(|of| SessionPolicyView {
            policy: (0..POLICIES).find(|number| policy_name(*number) == of.policy).expect("policies are numbered"),
            run: of.run.0,
            version: of.version.0,
            group_size: of.group_size,
            calls: of.calls,
            sampled: of.sampled,
        });
        SessionView {
            session: self.session_number(session.session_id),
            rollout: self.names.rollout_number(&session.spec.rollout_id),
            state: session.state.into(),
            reason: session.reason.clone(),
            policies: policies.collect(),
            calls: session.calls,
            bounds: (session.segments, session.tokens),
            full: session.is_full,
            opened_at: self.seconds(session.opened_at),
            last_call_at: session.last_call_at.map(|at| self.seconds(at)),
            expires_at: self.seconds(session.expires_at),
            due_at: session.due_at.map(|at| self.seconds(at)),
            ended_at: session.ended_at.map(|at| self.seconds(at)),
            attempt: session.attempt,
            max_attempts: session.max_attempts,
            outcome: session.outcome.as_ref().map(|outcome| self.outcome(outcome)),
        }
    }
}

fn model_name(policy: Option<PolicyNumber>) -> String {
    policy.map_or(FROZEN.to_owned(), |policy| format!("model-{policy}"))
}

/// Every call and every sampled token is trained, or dropped with a reason.
fn assert_conserved(assembly: &SessionAssembly) {
    let dropped = &assembly.dropped_tokens;
    let tokens = dropped.empty + dropped.undelivered + dropped.retry + dropped.abandoned + dropped.aborted;
    let accounted = assembly.trained_tokens + assembly.trimmed + tokens;
    assert_eq!(accounted, assembly.sampled_tokens, "tokens are lost: {assembly:?}");
}
