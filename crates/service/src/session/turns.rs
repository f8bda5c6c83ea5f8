//! What becomes of the calls of a session: segments, and the turns that producers look at.

use std::{borrow::Cow, sync::Arc};

use forebay_bounds::work;
use forebay_domain::{
    assemble::{After, Assembly, Call, CallSet, NoBeginning, breaks::Break, retries::DropReason},
    ids::{PolicyName, SessionId},
    ingest::new_rollout::Marks,
    refusal::Refusal,
    rules::Rules,
    session::StoredCall,
    turn_calls::{self, TurnCalls},
    warnings::delivered_dropped,
};
use forebay_store::{error::StoreError, ops::session::FindSession};
use forebay_wire::{Retries, Segment, SessionAssembly};
use serde_json::value::RawValue;
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    policies,
    session::{
        breaks::{self, CallBreak},
        calls::{SaidOfCalls, SessionCalls, circular, one_of_few},
        delivery,
    },
};

/// Ids that are shown on both sides of a break.
const BREAK_IDS: usize = 16;

/// The segments of one policy, and what became of its calls.
#[derive(Debug, Default)]
pub(super) struct Assembled {
    pub(super) segments: Vec<Segment>,
    pub(super) totals: SessionAssembly,
    pub(super) marks: Marks,
    /// The number of the last trained call; none without segments.
    pub(super) last: Option<u32>,
    /// The conversation that ended with it, if the rules of the policy keep it.
    pub(super) messages: Option<Box<RawValue>>,
    /// Where prompts do not continue the calls that they should have continued.
    pub(super) breaks: Vec<CallBreak>,
}

/// A recorded call, as producers read it.
#[derive(Clone, Debug)]
pub struct Turn {
    pub call: StoredCall,
    /// What became of it.
    pub outcome: CallOutcome,
    /// Where its prompt differs from an earlier call that it should have continued.
    pub divergence: Option<Divergence>,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It is in a segment.
    Trained,
    /// It is in no segment.
    Dropped(DropReason),
}

impl CallOutcome {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trained => "trained",
            Self::Dropped(reason) => reason_name(reason),
        }
    }
}

/// Where the prompt of a call differs from an earlier call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Number of the earlier call.
    pub nearest: u32,
    /// The number of ids that both begin with.
    pub position: usize,
    /// The next ids of the earlier call.
    pub expected: Vec<i32>,
    /// The next ids of the prompt.
    pub found: Vec<i32>,
    /// What differs first between the messages, one of a fixed set.
    pub cause: &'static str,
    /// The text of `expected`, if the tokenizer is known.
    pub expected_text: Option<String>,
    /// The text of `found`, if the tokenizer is known.
    pub found_text: Option<String>,
}

pub(super) fn reason_name(reason: DropReason) -> &'static str {
    match reason {
        DropReason::Empty => "empty",
        DropReason::Undelivered => "undelivered",
        DropReason::Retry => "retry",
        DropReason::Abandoned => "abandoned",
    }
}

impl SessionCalls {
    /// Assembles the calls of a policy, with what is said of them. This takes milliseconds for long
    /// sessions, so async workers must not call it.
    pub(super) fn assemble(
        &self,
        policy: &PolicyName,
        retries: Retries,
        said: &SaidOfCalls,
    ) -> Result<Assembled, NoBeginning> {
        let of_policy = OfPolicy::new(self, policy);
        let calls = of_policy.calls(said)?;
        let assembly = calls.assemble(retries);
        let segments: Vec<Segment> = assembly.chains.iter().map(|chain| calls.segment(chain)).collect();
        let breaks = assembly.breaks.iter().map(|found| of_policy.call_break(policy, found)).collect();
        let mut trained = assembly.chains.iter().flat_map(|chain| &chain.calls);
        let last =
            assembly.chains.iter().filter_map(|chain| chain.calls.last()).map(|&call| of_policy.stored[call].seq);
        let last = last.max();
        let totals = of_policy.totals(&assembly, &segments);
        let of_turns =
            turn_calls::of_assembly(&assembly, &segments, |call| of_policy.stored[call].columns.id.as_deref());
        let marks = Marks {
            version_assumed: trained.any(|&call| of_policy.stored[call].columns.version_assumed),
            sampled_nothing: totals.sampled_tokens == 0 && of_policy.delivered.contains(&true),
            delivered_dropped: delivered_dropped(totals.dropped.retry, retries),
            of_session: Vec::new(),
            turn_calls: of_turns.map(|ids| Arc::new(TurnCalls::Recorded(ids))),
        };
        Ok(Assembled { segments, totals, marks, last, messages: None, breaks })
    }

    /// The calls of a policy, and the breaks among them. The causes of the breaks are not known yet.
    fn turns(&self, policy: &PolicyName, retries: Retries) -> Result<(Vec<Turn>, Vec<CallBreak>), NoBeginning> {
        let of_policy = OfPolicy::new(self, policy);
        let assembly = of_policy.calls(&SaidOfCalls::default())?.assemble(retries);
        let mut turns: Vec<Turn> = of_policy
            .stored
            .iter()
            .map(|&call| Turn { call: call.clone(), outcome: CallOutcome::Trained, divergence: None })
            .collect();
        for (call, reason) in &assembly.dropped {
            turns[*call].outcome = CallOutcome::Dropped(*reason);
        }
        for found in &assembly.breaks {
            let (call, nearest) = (of_policy.stored[found.call], of_policy.stored[found.nearest]);
            let next = |path: Vec<i32>| path.into_iter().skip(found.position).take(BREAK_IDS).collect();
            let whole = nearest.prompt + nearest.columns.ids.len();
            turns[found.call].divergence = Some(Divergence {
                nearest: nearest.seq,
                position: found.position,
                expected: next(self.path(nearest, whole)),
                found: next(self.prompt(call)),
                cause: "",
                expected_text: None,
                found_text: None,
            });
        }
        let breaks = assembly.breaks.iter().map(|found| of_policy.call_break(policy, found)).collect();
        Ok((turns, breaks))
    }
}

/// The calls of one policy.
struct OfPolicy<'a> {
    stored: Vec<&'a StoredCall>,
    /// What precedes the ids of each prompt, and these ids.
    prompts: Vec<(Option<After>, Cow<'a, [i32]>)>,
    /// The place of each call in time.
    places: Vec<u64>,
    /// Whether each call counts as delivered.
    delivered: Vec<bool>,
    /// The last attempt of the session that made a call. One that made none gave nothing up.
    attempt: u32,
}

impl<'a> OfPolicy<'a> {
    fn new(all: &'a SessionCalls, policy: &PolicyName) -> Self {
        let stored: Vec<&StoredCall> = all.calls.iter().filter(|call| call.policy == *policy).collect();
        let after = |call: &StoredCall| {
            let parent = stored.binary_search_by_key(&call.parent?, |call| call.seq).ok()?;
            let (parent_call, shared) = (stored[parent], call.shared);
            let path = parent_call.prompt + parent_call.columns.ids.len();
            let trimmed = shared + 1 == path && !parent_call.columns.ids.is_empty();
            (shared == path || trimmed).then_some(After { call: parent, trimmed })
        };
        let prompts = stored.iter().map(|&call| match after(call) {
            Some(after) => (Some(after), Cow::Borrowed(&call.columns.tail[..])),
            // The prompt ends within what it shares with another call, or is a whole prompt.
            None => (None, Cow::Owned(all.prompt(call))),
        });
        let prompts = prompts.collect();
        let mut order: Vec<usize> = (0..stored.len()).collect();
        order.sort_by_key(|&call| (stored[call].ended_at, stored[call].seq));
        let mut places = vec![0; stored.len()];
        for (place, call) in order.into_iter().enumerate() {
            places[call] = place as u64;
        }
        let delivered = delivery::counts(all, &stored);
        let attempt = all.calls.iter().map(|call| call.used_in).max().unwrap_or_default();
        Self { stored, prompts, places, delivered, attempt }
    }

    fn calls<'s>(&'s self, said: &'s SaidOfCalls) -> Result<CallSet<'s>, NoBeginning> {
        let with_places = self.stored.iter().zip(&self.prompts).zip(&self.places).zip(&self.delivered);
        let calls = with_places.map(|(((stored, (after, prompt)), place), delivered)| Call {
            ended: *place,
            after: *after,
            prompt,
            ids: &stored.columns.ids,
            logprobs: Some(&stored.columns.logprobs),
            versions: Some(&stored.columns.versions),
            stopped_on_token: stored.head.stopped_on_token,
            agent: stored.head.agent.as_deref(),
            delivered: *delivered,
            abandoned: stored.used_in < self.attempt,
            retry_count: stored.head.retry_count,
            reward: said.rewards.get(&stored.seq).copied(),
            state_key: said.states.get(&stored.seq).map(String::as_str),
        });
        CallSet::new(calls.collect())
    }

    fn call_break(&self, policy: &PolicyName, found: &Break) -> CallBreak {
        CallBreak {
            policy: policy.clone(),
            call: self.stored[found.call].seq,
            nearest: self.stored[found.nearest].seq,
            after: found.parent.map(|parent| self.stored[parent].seq),
        }
    }

    fn totals(&self, assembly: &Assembly, segments: &[Segment]) -> SessionAssembly {
        let sampled = |call: usize| self.stored[call].columns.ids.len() as u64;
        let mut totals = SessionAssembly {
            calls: self.stored.len() as u64,
            segments: segments.len() as u64,
            breaks: assembly.breaks.len() as u64,
            sampled_tokens: (0..self.stored.len()).map(sampled).sum(),
            trained_tokens: segments.iter().flat_map(|segment| &segment.loss_mask).map(|&bit| u64::from(bit)).sum(),
            trimmed: assembly.trimmed as u64,
            ..SessionAssembly::default()
        };
        for &(call, reason) in &assembly.dropped {
            let count = |dropped: &mut forebay_wire::SessionDropped, number: u64| match reason {
                DropReason::Empty => dropped.empty += number,
                DropReason::Undelivered => dropped.undelivered += number,
                DropReason::Retry => dropped.retry += number,
                DropReason::Abandoned => dropped.abandoned += number,
            };
            count(&mut totals.dropped, 1);
            count(&mut totals.dropped_tokens, sampled(call));
        }
        totals
    }
}

/// Adds the totals of another policy.
pub(super) fn add(totals: &mut SessionAssembly, other: &SessionAssembly) {
    totals.calls += other.calls;
    totals.segments += other.segments;
    totals.breaks += other.breaks;
    totals.sampled_tokens += other.sampled_tokens;
    totals.trained_tokens += other.trained_tokens;
    totals.trimmed += other.trimmed;
    for (sum, other) in [(&mut totals.dropped, &other.dropped), (&mut totals.dropped_tokens, &other.dropped_tokens)] {
        sum.empty += other.empty;
        sum.undelivered += other.undelivered;
        sum.retry += other.retry;
        sum.abandoned += other.abandoned;
        sum.aborted += other.aborted;
    }
}

/// The current rules of a policy.
pub(super) async fn rules(buffer: &Buffer, policy: &PolicyName) -> Result<Arc<Rules>, BufferError> {
    Ok(policies::existing_policy(buffer, policy).await?.rules)
}

/// The rule of a policy about repeated calls.
async fn retries(buffer: &Buffer, policy: &PolicyName) -> Result<Retries, BufferError> {
    Ok(rules(buffer, policy).await?.sessions.retries)
}

impl Buffer {
    /// The recorded calls of a session, and what becomes of them.
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn session_turns(&self, session_id: SessionId) -> Result<Vec<Turn>, BufferError> {
        let session = self.store.read(FindSession(session_id)).await?.ok_or(Refusal::Unknown("the session"))?;
        let mut policies = Vec::with_capacity(session.policies.len());
        for policy in &session.policies {
            policies.push((policy.policy.clone(), retries(self, &policy.policy).await?));
        }
        self.flush_delivered().await?;
        let _few = one_of_few().await?;
        let calls = Arc::new(SessionCalls::read(self, session.session_pk).await?);
        let listing = {
            let calls = Arc::clone(&calls);
            move || {
                let (mut turns, mut breaks) = (Vec::with_capacity(calls.calls.len()), Vec::new());
                for (policy, retries) in policies {
                    let (of_policy, found) = calls.turns(&policy, retries)?;
                    turns.extend(of_policy);
                    breaks.extend(found);
                }
                turns.sort_by_key(|turn| turn.call.seq);
                Ok::<_, NoBeginning>((turns, breaks))
            }
        };
        let listed = work::on_thread(listing).await.map_err(|_| StoreError::Closed)?;
        let (mut turns, breaks) = listed.map_err(|_| circular(session_id))?;
        let causes = breaks::causes(self, session.session_pk, &calls, &breaks).await?;
        for (found, cause) in breaks.iter().zip(causes) {
            let at = turns.binary_search_by_key(&found.call, |turn| turn.call.seq);
            let turn = at.ok().and_then(|at| turns.get_mut(at));
            if let Some(divergence) = turn.and_then(|turn| turn.divergence.as_mut()) {
                divergence.cause = cause;
                divergence.expected_text = self.conversations.text(&found.policy, &divergence.expected);
                divergence.found_text = self.conversations.text(&found.policy, &divergence.found);
            }
        }
        Ok(turns)
    }
}
