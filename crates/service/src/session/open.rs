//! Opens a session. What ingest would refuse at its end is refused here, before the agent has worked for hours.

use std::{collections::BTreeMap, sync::Arc};

use forebay_domain::{
    clock::Timestamp,
    formats::canonical::{ContentDigest, Hasher},
    ids::{AdmissionId, PolicyName, RolloutId, SessionId, check_name},
    ingest::new_rollout::NewRollout,
    refusal::Refusal,
    session::{ANY_MODEL, MODELS_MAX, NewSession, SessionKey, SessionKeyHash, SessionLimits, SessionSpec, TTL_S_MAX},
    trajectory::{Trajectory, VIOLATIONS_MAX},
};
use forebay_wire::{self as wire, Status, Violation};
use tracing::instrument;

use crate::{Buffer, error::BufferError, session::teacher};

/// A request for a session that is valid in itself.
#[derive(Clone)]
pub struct OpenSession {
    spec: Arc<SessionSpec>,
    content: ContentDigest,
    /// A rollout without segments for each policy, in the order of their names.
    probes: Arc<Vec<NewRollout>>,
    max_calls: u32,
    ttl_s: u64,
    idle_s: u64,
}

/// A session that is open. The key cannot be read again.
#[derive(Clone, Debug)]
pub struct Opened {
    pub session_id: SessionId,
    /// A key for the calls of the agent.
    pub key: SessionKey,
    /// Id of the rollout of each policy.
    pub rollout_id: String,
    /// Whether it was opened before.
    pub duplicate: bool,
    /// The attempt that the key belongs to.
    pub attempt: u32,
    /// The most attempts.
    pub max_attempts: u32,
    /// When it expires at the latest.
    pub expires_at: Timestamp,
}

impl OpenSession {
    /// Checks a request; a refusal has every violation.
    pub fn parse(buffer: &Buffer, sent: wire::SessionRequest) -> Result<Self, Refusal> {
        let limits = &buffer.options.sessions;
        let mut violations = Vec::new();
        let models = models(&sent, &mut violations);
        check_numbers(&sent, limits, &mut violations);
        let rollout_id = sent.rollout_id.clone().unwrap_or_else(|| RolloutId::mint().to_string());
        let policies: std::collections::BTreeSet<&String> = models.values().flatten().collect();
        let mut probes = Vec::with_capacity(policies.len());
        for policy in policies {
            let probe = wire::Trajectory {
                policy: Some(policy.clone()),
                rollout_id: Some(rollout_id.clone()),
                group_id: sent.group_id.clone(),
                group_size: sent.group_size,
                environment: sent.environment.clone(),
                execution_id: sent.execution_id.clone(),
                status: Status::Aborted,
                sampling: sent.sampling,
                metadata: sent.metadata.clone(),
                purpose: sent.purpose,
                suite: sent.suite.clone(),
                task: sent.task.clone(),
                ..wire::Trajectory::default()
            };
            match Trajectory::parse(probe, &buffer.options.limits) {
                Ok(trajectory) => probes.push(NewRollout::pack(trajectory)),
                // The policies differ only in their names, which were checked.
                Err(found) => {
                    violations.extend(found);
                    break;
                }
            }
        }
        violations.truncate(VIOLATIONS_MAX);
        if !violations.is_empty() {
            return Err(Refusal::Invalid(violations));
        }
        let max_calls = sent.max_calls.unwrap_or(limits.calls_max);
        let (ttl_s, idle_s) = (sent.ttl_s.unwrap_or(limits.ttl_s), sent.idle_s.unwrap_or(limits.idle_s));
        let content = digest(&sent, &models, &probes);
        let spec = SessionSpec {
            models,
            rollout_id,
            group_id: sent.group_id,
            environment: sent.environment,
            execution_id: sent.execution_id,
            sampling: sent.sampling,
            metadata: sent.metadata,
            purpose: sent.purpose,
            suite: sent.suite,
            task: sent.task,
        };
        Ok(Self { spec: Arc::new(spec), content, probes: Arc::new(probes), max_calls, ttl_s, idle_s })
    }

    /// What is asked for.
    #[must_use]
    pub fn spec(&self) -> &SessionSpec {
        &self.spec
    }

    /// The policies whose rollouts the session records.
    pub fn policies(&self) -> impl Iterator<Item = &PolicyName> {
        self.probes.iter().map(|probe| &probe.policy)
    }
}

impl Buffer {
    /// Opens a session and reserves room for its rollouts. Repeated with the same rollout and content, it only creates
    /// another key.
    #[instrument(level = "debug", skip_all)]
    pub async fn open_session(&self, open: OpenSession) -> Result<Opened, BufferError> {
        teacher::check(self, &open).await?;
        let key = SessionKey::mint();
        let now = self.clock.now();
        let new = NewSession {
            session_id: SessionId::mint(),
            key: SessionKeyHash::of(key.reveal()),
            content: open.content,
            spec: Arc::clone(&open.spec),
            probes: Arc::clone(&open.probes),
            admissions: open.probes.iter().map(|_| AdmissionId::mint()).collect(),
            max_calls: open.max_calls,
            idle_s: open.idle_s,
            expires_at: now.plus_seconds(open.ttl_s),
            quotas: Arc::clone(&self.options.quotas),
            now,
        };
        let opened = loop {
            match self.store.write(new.clone()).await? {
                // Each round creates one policy, or fails.
                Err(Refusal::UnknownPolicy(name)) => self.create(&name).await?,
                answer => break answer?,
            }
        };
        Ok(Opened {
            session_id: opened.session_id,
            key,
            rollout_id: open.spec.rollout_id.clone(),
            duplicate: opened.duplicate,
            attempt: opened.attempt,
            max_attempts: opened.max_attempts,
            expires_at: opened.expires_at,
        })
    }
}

/// The policies that the model names stand for.
fn models(sent: &wire::SessionRequest, violations: &mut Vec<Violation>) -> BTreeMap<String, Option<String>> {
    let mut refuse = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    if sent.models.is_empty() {
        let policy = sent.policy.clone().unwrap_or_else(|| PolicyName::default().to_string());
        if let Err(error) = PolicyName::parse(&policy) {
            refuse("/policy".to_owned(), error.to_string());
            return BTreeMap::new();
        }
        return BTreeMap::from([(ANY_MODEL.to_owned(), Some(policy))]);
    }
    if sent.policy.is_some() {
        refuse("/policy".to_owned(), "must be absent if `models` is given".to_owned());
    }
    if sent.models.len() > MODELS_MAX {
        refuse("/models".to_owned(), format!("must have at most {MODELS_MAX} entries"));
        return BTreeMap::new();
    }
    let mut models = BTreeMap::new();
    for (name, model) in &sent.models {
        let at = format!("/models/{}", name.replace('~', "~0").replace('/', "~1"));
        if let Err(detail) = check_name(name) {
            refuse(at.clone(), format!("its name {detail}"));
        }
        match model.policy.as_deref().map(PolicyName::parse).transpose() {
            Ok(_) => {
                models.insert(name.clone(), model.policy.clone());
            }
            Err(error) => refuse(format!("{at}/policy"), error.to_string()),
        }
    }
    if models.len() == sent.models.len() && models.values().all(Option::is_none) {
        refuse("/models".to_owned(), "must name a policy for at least one model".to_owned());
    }
    models
}

fn check_numbers(sent: &wire::SessionRequest, limits: &SessionLimits, violations: &mut Vec<Violation>) {
    for (pointer, value, max) in [
        ("/ttl_s", sent.ttl_s, TTL_S_MAX),
        ("/idle_s", sent.idle_s, TTL_S_MAX),
        ("/max_calls", sent.max_calls.map(u64::from), limits.calls_max.into()),
    ] {
        if value.is_some_and(|value| !(1..=max).contains(&value)) {
            violations.push(Violation { pointer: pointer.to_owned(), detail: format!("must be 1 to {max}") });
        }
    }
}

/// The digest of what the producer asked for. The size of the group is not part of it, because it belongs to the group.
fn digest(
    sent: &wire::SessionRequest,
    models: &BTreeMap<String, Option<String>>,
    probes: &[NewRollout],
) -> ContentDigest {
    let mut hasher = Hasher::default();
    hasher.int(probes.len() as i64);
    for probe in probes {
        hasher.digest(probe.content);
    }
    hasher.int(models.len() as i64);
    for (name, policy) in models {
        hasher.text(name);
        hasher.option(policy.as_deref(), Hasher::text);
    }
    for number in [sent.ttl_s, sent.idle_s, sent.max_calls.map(u64::from)] {
        hasher.option(number, |hasher, number| hasher.int(number as i64));
    }
    hasher.finish()
}
