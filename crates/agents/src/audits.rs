//! Audits of recorded calls: the engine that sampled a call scores the same ids, and what it reports now is compared with
//! what it reported then.
//!
//! A probe judges an engine by a few tokens of its own. An audit judges what was recorded: it finds log-probabilities of
//! another temperature or of other weights, and those of another request of the batch. It begins behind the call, which
//! does not wait for it, and is given up when the service stops.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use forebay_bounds::budget::Share;
use forebay_domain::{
    ids::{PolicyName, SessionId},
    session::SessionPolicy,
};
use forebay_gateway::{
    Completion,
    upstream::{EngineKind, Range, Scoring, probe::LogprobScale},
};
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument as _;

use crate::{Agents, asking::published, call::Call, sampling::widened, scoring::SCORE_TIMEOUT, upstreams::Route};

/// What an audit takes of the budget for each id: the id and its log-probability, the request, and the scores.
const ID_BYTES: usize = 48;

/// An engine that computes in 16 bits reports slightly other values when it reads ids than when it sampled them. Reports of
/// trainers that compute with another program than the engine, which differs more, are means of 0.011 nats (Qwen3-4B, vLLM
/// and SGLang: vllm-project/vime#64) and 0.03 (Qwen2.5-0.5B: ServiceNow/Fast-LLM#525), and 0.3 in the worst place of a text
/// (Qwen3-1.7B: vllm-project/vllm#18352).
const MEAN_MAX: f64 = 0.05;
const WORST_MAX: f64 = 1.0;

/// How often one engine is warned about.
const WARN_EVERY: Duration = Duration::from_mins(1);

/// Which calls are audited.
#[derive(Clone, Copy, Debug)]
pub struct AuditOptions {
    /// The share of recorded calls.
    pub share: f64,
    /// The most ids for which an engine computes logits in an audit.
    pub tokens_max: usize,
}

/// A call that will be audited once it is recorded.
pub(crate) struct Audit {
    agents: Agents,
    route: Arc<Route>,
    session: SessionId,
    policy: PolicyName,
    version: i64,
    temperature: f64,
    ids: Vec<i32>,
    prompt_len: usize,
    logprobs: Vec<f32>,
    _place: OwnedSemaphorePermit,
    _share: Share,
}

/// How far the recorded log-probabilities of a call are from the engine's scores.
struct Difference {
    mean: f64,
    worst: f64,
}

impl Call {
    /// The audit of a completed call, if it is in the sample.
    pub(crate) fn audit(&self, route: &Arc<Route>, policy: &SessionPolicy, completion: &Completion) -> Option<Audit> {
        if completion.tokens.is_empty() || rand::random::<f64>() >= self.agents.options().audit.share {
            return None;
        }
        let audit = self.comparable(route, policy, completion);
        audit.map_err(|reason| self.agents.metrics().audited(route.name(), reason)).ok()
    }

    /// The audit of a call. An error is the reason why there is none.
    fn comparable(
        &self,
        route: &Arc<Route>,
        policy: &SessionPolicy,
        completion: &Completion,
    ) -> Result<Audit, &'static str> {
        let kind = route.upstream.options().kind;
        if kind == EngineKind::Openai {
            return Err("unsupported");
        }
        // The scores are not those under the grammar.
        if self.request.constrained() {
            return Err("constrained");
        }
        let [span] = completion.spans.as_slice() else { return Err("version") };
        let ids = [&completion.prompt_tokens[..], &completion.tokens].concat();
        // SGLang computes logits only where they are asked for, vLLM for all ids.
        let computed = if kind == EngineKind::Sglang { completion.tokens.len() } else { ids.len() };
        if computed > self.agents.options().audit.tokens_max {
            return Err("too-long");
        }
        let place = Arc::clone(&route.audits.places).try_acquire_owned().map_err(|_| "dropped")?;
        let share = self.agents.0.bytes.take(ID_BYTES * ids.len()).map_err(|_| "dropped")?;
        Ok(Audit {
            agents: self.agents.clone(),
            route: Arc::clone(route),
            session: self.permit.session_id(),
            policy: policy.policy.clone(),
            version: span.version,
            temperature: widened(self.permit.sampling().temperature),
            prompt_len: completion.prompt_tokens.len(),
            logprobs: completion.logprobs.clone(),
            ids,
            _place: place,
            _share: share,
        })
    }
}

impl Audit {
    /// Audits the call, which is recorded, in a task of its own. It ends when the service stops.
    pub(crate) fn begin(self) {
        let mut draining = self.agents.draining();
        let auditing = async move {
            tokio::select! {
                biased;
                () = async { drop(draining.wait_for(|draining| *draining).await) } => {}
                Ok(outcome) | Err(outcome) = self.run() => self.agents.metrics().audited(self.route.name(), outcome),
            }
        };
        tokio::spawn(auditing.in_current_span());
    }

    /// Compares once it is this audit's turn. An error is the reason why it could not.
    async fn run(&self) -> Result<&'static str, &'static str> {
        let _turn = self.route.audits.turn.acquire().await.map_err(|_| "dropped")?;
        // Other weights than those that sampled the call would score it otherwise.
        self.check_version().await?;
        let ranges = tokio::time::timeout(SCORE_TIMEOUT, self.rescore()).await.unwrap_or(Err("failed"))?;
        self.check_version().await?;
        let difference = Difference::of(&self.logprobs, &ranges);
        self.agents.metrics().audit_differs(self.route.name(), difference.mean, difference.worst);
        if difference.mean <= MEAN_MAX && difference.worst <= WORST_MAX {
            return Ok("equal");
        }
        self.warn(&difference);
        Ok("different")
    }

    async fn check_version(&self) -> Result<(), &'static str> {
        let now = published(&self.agents, self.session, &self.policy).await;
        if now == Some(self.version) { Ok(()) } else { Err("version") }
    }

    async fn rescore(&self) -> Result<Vec<Range>, &'static str> {
        let is_one = (self.temperature - 1.0).abs() < f64::EPSILON;
        // At temperature 1 it does not matter whether scores contain it.
        let scale = if is_one {
            LogprobScale::Scaled
        } else {
            self.route.scale_of_scores().await.map_err(|fault| failed(&fault))?
        };
        let scoring = Scoring {
            ids: &self.ids,
            prompt_len: self.prompt_len,
            temperature: self.temperature,
            model: &self.route.model,
            session: &self.session.to_string(),
            // SGLang aborts all requests whose id begins with the given one.
            rid: &format!("{:016x}-audit", rand::random::<u64>()),
        };
        let ranges = self.route.upstream.rescore(&scoring, &scale).await.map_err(|error| failed(&error))?;
        ranges.ok_or("temperature")
    }

    fn warn(&self, difference: &Difference) {
        let mut warned = self.route.audits.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            return;
        }
        *warned = Some(Instant::now());
        tracing::warn!(
            upstream.name = self.route.name(),
            session.id = %self.session,
            policy.name = %self.policy,
            audit.mean_nats = difference.mean,
            audit.worst_nats = difference.worst,
            "recorded log-probabilities are not those that the engine reports for the same ids"
        );
    }
}

fn failed(error: &dyn std::fmt::Display) -> &'static str {
    tracing::debug!(error = %error, "an engine did not score a call that is audited");
    "failed"
}

impl Difference {
    fn of(recorded: &[f32], ranges: &[Range]) -> Self {
        let distances = recorded.iter().zip(ranges).map(|(recorded, range)| range.distance(*recorded));
        let (sum, worst) = distances.fold((0.0, 0.0_f64), |(sum, worst), each| (sum + each, worst.max(each)));
        Self { mean: sum / recorded.len().max(1) as f64, worst }
    }
}
