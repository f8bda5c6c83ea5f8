//! The buffer: everything that the service can do, independent of the transport. No HTTP, no SQL.
//!
//! What becomes of rollouts is decided in [`forebay_domain`]; here is what needs a store, a clock and other tasks. What a
//! [`Buffer`] can do is in the file of its stage, each operation in a span of its own:
//!
//! - [`admission`], [`ingest`], [`lease`], [`reading`], [`samples`], [`lineage`], [`sweep`], in the order in which a rollout
//!   passes them; [`session`] records the calls of agents, for which [`teachers`] and [`conversations`] are the connections
//!   to models. [`scores`] come later, and [`evals`] are of rollouts that only measure.
//! - [`blobs`] are uploaded once, and rollouts name them.
//! - [`policies`]: their rules. [`looking`]: everything that only reads.
//! - [`waiting`]: who waits for what. [`service_time`]: the clock that replicas share.
//! - [`keyring`]: the keys of the store, kept in memory.

pub mod admission;

pub mod blobs;
pub mod ingest;

pub mod session;

pub mod conversations;
pub mod engines;
pub mod teachers;

pub mod lease;

pub mod reading;

pub mod evals;
pub mod samples;
pub mod scores;

pub mod payloads;

pub mod lineage;

pub mod sweep;

pub mod policies;
pub mod unused_rules;

pub mod looking;
pub mod waiting;

pub mod service_time;

pub mod error;
pub mod facades;
pub mod keyring;

use std::{ops::Deref, sync::Arc, time::Duration};

use forebay_domain::{
    admission::Gates,
    clock::{Clock, Timestamp},
    evaluation::LastSeenRules,
    health::Health,
    ids::{CallerId, PolicyName},
    policies::{ExistingPolicy, RulesWritten, WriteRules},
    quotas::Quotas,
    refusal::Refusal,
    rules::Rules,
    session::SessionLimits,
    trajectory::TrajectoryLimits,
};
use forebay_store::{Store, error::StoreError, ops::evals::OpenEvaluations};
use forebay_telemetry::metrics::Metrics;
use tokio::sync::watch;

use crate::{
    conversations::{Conversations, NoConversations},
    error::BufferError,
    looking::{insight, journal::Noticed},
    session::{delivery::Delivered, in_flight::InFlight, record::PathCache},
    teachers::{NoTeachers, Teachers},
    waiting::{consumers::WaitingConsumers, replicas::Replicas, waiter_slots::WaiterSlots, wakers::Wakers},
};

/// The buffer's part of the configuration.
#[derive(Clone, Debug)]
pub struct BufferOptions {
    /// Bounds of one trajectory.
    pub limits: TrajectoryLimits,
    /// How many requests may wait for a batch at once, how many others for a version, and how many for work.
    pub waiters_max: usize,
    /// How many requests of one caller may wait for a batch at once, how many others for a version, and how many for work.
    pub waiters_per_caller_max: usize,
    /// Time between two polls of a waiter, on average.
    pub waiter_poll_interval: Duration,
    /// Whether the first rollout or admission of a producer creates a policy that does not exist, with
    /// `policy_defaults`.
    pub auto_create: bool,
    /// Rules of `default` and of policies created on demand.
    pub policy_defaults: Arc<Rules>,
    /// Bounds of the policies of all teams, and of single ones.
    pub quotas: Arc<Quotas>,
    /// Bounds of sessions.
    pub sessions: SessionLimits,
}

/// The rollout buffer: everything that the service can do, independent of the transport.
#[derive(Clone)]
pub struct Buffer {
    /// Behind one pointer, because every request clones several handles.
    parts: Arc<Parts>,
    /// Who does what is done with this handle, for the journal.
    acting: Option<CallerId>,
}

/// What all handles of a buffer share.
#[derive(Clone)]
pub struct Parts {
    store: Arc<Store>,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    options: Arc<BufferOptions>,
    wakers: Arc<Wakers>,
    /// None if the database belongs to one process.
    replicas: Option<Arc<Replicas>>,
    batch_waiters: Arc<WaiterSlots>,
    version_waiters: Arc<WaiterSlots>,
    work_waiters: Arc<WaiterSlots>,
    waiting_consumers: Arc<WaitingConsumers>,
    noticed: Arc<Noticed>,
    gates: Arc<Gates>,
    last_seen_rules: Arc<LastSeenRules>,
    in_flight: Arc<InFlight>,
    call_paths: Arc<PathCache>,
    delivered: Arc<Delivered>,
    health: watch::Receiver<Health>,
    teachers: Arc<dyn Teachers>,
    conversations: Arc<dyn Conversations>,
    insights: Arc<insight::Insights>,
    uploads: Arc<blobs::Uploads>,
}

impl Deref for Buffer {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Buffer {
    /// Starts a buffer on an open store. The given policies are created where they do not exist; `default` always
    /// exists.
    ///
    /// The rules in the database take precedence. If a given policy already exists with other rules, a warning is
    /// logged.
    pub async fn start(
        store: Arc<Store>,
        clock: Arc<dyn Clock>,
        metrics: Arc<Metrics>,
        options: BufferOptions,
        policies: Vec<(PolicyName, Arc<Rules>)>,
    ) -> Result<Self, StoreError> {
        let waiters =
            |awaited| Arc::new(WaiterSlots::new(awaited, options.waiters_max, options.waiters_per_caller_max));
        let parts = Parts {
            batch_waiters: waiters("a batch"),
            version_waiters: waiters("a version"),
            work_waiters: waiters("work"),
            waiting_consumers: Arc::default(),
            noticed: Arc::default(),
            wakers: Arc::new(Wakers::new(options.waiter_poll_interval)),
            replicas: store.peers().map(|peers| Arc::new(Replicas::new(peers))),
            health: store.health(),
            store,
            clock,
            metrics,
            options: Arc::new(options),
            gates: Arc::default(),
            last_seen_rules: Arc::default(),
            in_flight: Arc::default(),
            call_paths: Arc::new(session::record::path_cache()),
            delivered: Arc::default(),
            teachers: Arc::new(NoTeachers),
            conversations: Arc::new(NoConversations),
            insights: Arc::default(),
            uploads: Arc::default(),
        };
        let buffer = Self { parts: Arc::new(parts), acting: None };
        service_time::start_clock(&buffer).await?;
        for (name, rules) in policies {
            buffer.seed(name, rules).await?;
        }
        let default = PolicyName::default();
        buffer.write_seed(default, Arc::clone(&buffer.options.policy_defaults)).await?;
        Ok(buffer)
    }

    /// The same buffer, with the inference engines of sessions: teachers for their segments, and what reads the messages
    /// of their calls.
    #[must_use]
    pub fn with_engines(self, engines: Arc<impl Teachers + Conversations>) -> Self {
        let parts = Arc::unwrap_or_clone(self.parts);
        Self { parts: Arc::new(Parts { teachers: Arc::clone(&engines) as _, conversations: engines, ..parts }), ..self }
    }

    /// The same buffer with another bound of the metadata of a rollout, for protocols that store columns there.
    #[must_use]
    pub fn with_metadata_max(&self, bytes: usize) -> Self {
        let limits = TrajectoryLimits { metadata_bytes_max: bytes, ..self.options.limits };
        let options = Arc::new(BufferOptions { limits, ..BufferOptions::clone(&self.options) });
        Self { parts: Arc::new(Parts { options, ..Parts::clone(self) }), acting: self.acting.clone() }
    }

    /// Whether there is a teacher with this name.
    #[must_use]
    pub fn has_teacher(&self, name: &str) -> bool {
        self.teachers.knows(name)
    }

    /// Ends all waits, so that their requests are answered before the service stops.
    pub fn stop_waiting(&self) {
        self.wakers.close();
    }

    /// Whether the store can write, so that it is worth reading the body of a request.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        *self.health.borrow() == Health::Writable
    }

    /// Whether the database can write. Without an object store for the payloads, leases and acks still go on.
    #[must_use]
    pub fn is_database_writable(&self) -> bool {
        matches!(*self.health.borrow(), Health::Writable | Health::WithoutPayloads)
    }

    /// Waits until the store can no longer be trusted. Does not return before that.
    pub async fn broken(&self) {
        let mut health = self.health.clone();
        if health.wait_for(|health| *health == Health::Broken).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns when the database can write.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.store.ping().await
    }

    /// The same buffer for a caller, whom the journal names.
    #[must_use]
    pub fn acting_for(&self, caller: Option<CallerId>) -> Self {
        Self { acting: caller, parts: Arc::clone(&self.parts) }
    }

    /// Bounds of one trajectory.
    #[must_use]
    pub fn trajectory_limits(&self) -> &TrajectoryLimits {
        &self.options.limits
    }

    /// The store, for tests and diagnosis.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The current service time, which all decisions use.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    async fn seed(&self, name: PolicyName, rules: Arc<Rules>) -> Result<(), StoreError> {
        let written = self.write_seed(name.clone(), Arc::clone(&rules)).await?;
        if matches!(written, RulesWritten::Existed(existing) if **existing != **rules) {
            tracing::warn!(
                policy.name = %name,
                "the rules in the database apply, and the configuration has others; PUT /policies/{name} replaces them"
            );
        }
        Ok(())
    }

    /// Writes a policy from the configuration, unless it exists.
    async fn write_seed(&self, policy: PolicyName, rules: Arc<Rules>) -> Result<RulesWritten, StoreError> {
        let now = self.clock.now();
        let seed = WriteRules { policy, rules, existing: ExistingPolicy::Keep, quotas: None, by: None, now };
        let written = self.store.write(seed).await?;
        written.map_err(|refusal| StoreError::Corrupt(format!("a policy of the configuration was refused: {refusal}")))
    }

    /// Creates a policy for the first work of a producer, if the configuration allows that. Reads and calls of a
    /// trainer create none, because a misspelt name would then create a policy.
    async fn create(&self, name: &PolicyName) -> Result<(), BufferError> {
        if name.is_evaluations() {
            let policy = name.public();
            if !self.store.write(OpenEvaluations { policy: policy.clone(), now: self.clock.now() }).await? {
                Box::pin(self.create(&policy)).await?;
                self.store.write(OpenEvaluations { policy, now: self.clock.now() }).await?;
            }
            return Ok(());
        }
        if !self.options.auto_create {
            return Err(Refusal::UnknownPolicy(name.clone()).into());
        }
        let create = WriteRules {
            policy: name.clone(),
            rules: Arc::clone(&self.options.policy_defaults),
            existing: ExistingPolicy::Keep,
            quotas: Some(Arc::clone(&self.options.quotas)),
            by: None,
            now: self.clock.now(),
        };
        if matches!(self.store.write(create).await??, RulesWritten::Created) {
            tracing::info!(policy.name = %name, "policy created on demand");
        }
        Ok(())
    }
}
