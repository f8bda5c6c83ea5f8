//! The domain: from a posted trajectory to an acknowledged batch. No HTTP, no SQL.
//!
//! One file per stage, in the order in which a rollout meets them:
//!
//! 1. [`trajectory`]: validate. 2. [`ingest`]: filter, take a place in a group. 3. [`finalize`]: decide the group.
//! 4. [`batch`]: cut. 5. [`lease`], [`samples`]: deliver. 6. [`lineage`]: settle, resume. 7. [`sweep`]: what time does.
//!
//! What waits at another replica is woken through [`replicas`].
//!
//! Decisions are pure functions; [`Buffer`] carries them to the [`Store`], which applies them under its locks.

pub mod admission;
pub mod advantage;
pub mod batch;
pub mod canonical;
mod columns;
pub mod doctor;
pub mod doubt;
pub mod filter;
pub mod finalize;
pub mod ids;
pub mod ingest;
pub mod judging;
pub mod lease;
pub mod ledger;
pub mod lineage;
pub mod payload;
pub mod policies;
pub mod refusal;
pub mod replicas;
pub mod rule_changes;
pub mod rules;
pub mod samples;
pub mod seal;
mod service_time;
pub mod shard;
pub mod staleness;
pub mod sweep;
pub mod trajectory;
pub mod upkeep;
mod waiters;
mod wake;
pub mod weights;

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use self::{
    admission::{Backlog, Gates, Room},
    doubt::Warning,
    finalize::{Cause, GroupOutcome, GroupSnapshot},
    ids::{PolicyName, Version},
    ingest::{GroupFill, NewRollout, RolloutDecision},
    judging::{Expected, Question},
    refusal::{BufferError, Refusal},
    replicas::Replicas,
    rules::Rules,
    trajectory::TrajectoryLimits,
    waiters::Waiters,
    wake::Wakers,
};
use crate::{
    clock::{Clock, Timestamp},
    metrics::Metrics,
    store::{Decide, ExistingPolicy, Health, RulesWritten, Store, StoreError, WriteRules},
};

/// What an operator sets of the buffer.
#[derive(Clone, Debug)]
pub struct BufferOptions {
    /// Bounds of one trajectory.
    pub limits: TrajectoryLimits,
    /// Requests that may wait for a batch at once, and as many others for a version.
    pub waiters_max: usize,
    /// Requests of one caller that may wait for a batch at once, and as many others for a version.
    pub waiters_per_caller_max: usize,
    /// Longest that a waiter goes without looking, on average.
    pub look_every: Duration,
    /// Policies that do not exist are created with `policy_defaults` by the first rollout or admission of a producer.
    pub auto_create: bool,
    /// Rules of `default` and of policies created on demand.
    pub policy_defaults: Arc<Rules>,
    /// Policies that callers may create, those that exist included.
    pub policies_max: u32,
}

/// The rollout buffer: everything that the service can do, whoever asks.
#[derive(Clone)]
pub struct Buffer {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    options: Arc<BufferOptions>,
    wakers: Arc<Wakers>,
    /// None where a database belongs to one process.
    replicas: Option<Arc<Replicas>>,
    batch_waiters: Arc<Waiters>,
    version_waiters: Arc<Waiters>,
    decide: Arc<dyn Decide>,
    expected: Arc<Expected>,
    health: watch::Receiver<Health>,
}

impl Buffer {
    /// A buffer on an open store. The policies given are created where they do not exist, and `default` always.
    ///
    /// The database is the truth for rules: where a given policy exists with other rules, that is logged.
    pub async fn start(
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        metrics: Arc<Metrics>,
        options: BufferOptions,
        policies: Vec<(PolicyName, Arc<Rules>)>,
    ) -> Result<Self, StoreError> {
        let waiters = |awaited| Arc::new(Waiters::new(awaited, options.waiters_max, options.waiters_per_caller_max));
        let buffer = Self {
            batch_waiters: waiters("a batch"),
            version_waiters: waiters("a version"),
            wakers: Arc::new(Wakers::new(options.look_every)),
            replicas: store.peers().map(|peers| Arc::new(Replicas::new(peers))),
            health: store.health(),
            store,
            clock,
            metrics,
            options: Arc::new(options),
            decide: Arc::new(Decisions::default()),
            expected: Arc::default(),
        };
        buffer.start_clock().await?;
        for (name, rules) in policies {
            buffer.seed(name, rules).await?;
        }
        let default = PolicyName::default();
        buffer.write_seed(default, Arc::clone(&buffer.options.policy_defaults)).await?;
        Ok(buffer)
    }

    /// Ends all waits, so that their requests are answered before the service stops.
    pub fn stop_waiting(&self) {
        self.wakers.close();
    }

    /// Whether it is worth reading what is to be stored.
    #[must_use]
    pub fn takes_work(&self) -> bool {
        *self.health.borrow() == Health::Writable
    }

    /// Waits until nothing that the store says can be trusted any more. Never answers while it can.
    pub async fn broken(&self) {
        let mut health = self.health.clone();
        if health.wait_for(|health| *health == Health::Broken).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Answers when the store can write.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.store.ping().await
    }

    /// Bounds of one trajectory.
    #[must_use]
    pub fn trajectory_limits(&self) -> &TrajectoryLimits {
        &self.options.limits
    }

    /// The store, for tests and diagnosis.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The current time, as every decision sees it.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    async fn seed(&self, name: PolicyName, rules: Arc<Rules>) -> Result<(), StoreError> {
        let written = self.write_seed(name.clone(), Arc::clone(&rules)).await?;
        if matches!(written, RulesWritten::Existed(existing) if **existing != **rules) {
            tracing::warn!(
                policy.name = %name,
                "the configuration differs from the database, which is the truth for rules: PUT /policies/{name} replaces them"
            );
        }
        Ok(())
    }

    /// Writes a policy that the operator's file names, unless it exists.
    async fn write_seed(&self, policy: PolicyName, rules: Arc<Rules>) -> Result<RulesWritten, StoreError> {
        let now = self.clock.now();
        let seed = WriteRules { policy, rules, existing: ExistingPolicy::Keep, policies_max: None, now };
        let written = self.store.write_rules(seed).await?;
        written.map_err(|refusal| StoreError::Corrupt(format!("a policy without a bound is refused: {refusal}")))
    }

    /// Creates a policy for the first work that a producer hands in, where that is allowed. Whoever only looks, and a
    /// trainer, creates none: a name that is misspelt there would exist from then on.
    async fn create(&self, name: &PolicyName) -> Result<(), BufferError> {
        if !self.options.auto_create {
            return Err(Refusal::UnknownPolicy(name.clone()).into());
        }
        let create = WriteRules {
            policy: name.clone(),
            rules: Arc::clone(&self.options.policy_defaults),
            existing: ExistingPolicy::Keep,
            policies_max: Some(self.options.policies_max),
            now: self.clock.now(),
        };
        if matches!(self.store.write_rules(create).await??, RulesWritten::Created) {
            tracing::info!(policy.name = %name, "policy created on demand");
        }
        Ok(())
    }
}

/// The decisions of this crate, as the store calls them.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    gates: Gates,
}

impl Decide for Decisions {
    fn admits(&self, policy: &PolicyName, rules: &Rules, backlog: Backlog, bundle: Backlog) -> Result<(), Refusal> {
        if !bundle.is_below(&rules.backlog) {
            return Err(Refusal::BundleOverBacklog(policy.clone()));
        }
        if !self.gates.is_open(policy, rules, backlog) || !(backlog + bundle).is_below(&rules.backlog) {
            return Err(Refusal::BacklogFull(policy.clone()));
        }
        Ok(())
    }

    fn check(&self, rules: &Rules, new: &NewRollout, room: Room) -> Result<(), Refusal> {
        ingest::check(rules, new, room)
    }

    fn question(&self, rules: &Arc<Rules>, new: &NewRollout, room: Room, current: Version) -> Option<Question> {
        ingest::question(rules, new, room, current)
    }

    fn rollout(
        &self,
        rules: &Rules,
        new: &NewRollout,
        room: Room,
        current: Version,
        group: GroupFill,
    ) -> Option<RolloutDecision> {
        ingest::decide(rules, new, room, current, group)
    }

    fn warnings(&self, new: &NewRollout, decision: &RolloutDecision, current: Version) -> Vec<Warning> {
        ingest::warnings(new, decision, current)
    }

    fn group(&self, rules: &Rules, group: &GroupSnapshot, cause: Cause, now: Timestamp) -> GroupOutcome {
        finalize::decide(rules, group, cause, now)
    }
}
