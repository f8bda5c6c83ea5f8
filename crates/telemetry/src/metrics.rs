//! The metrics that `/metrics` exports. Each is declared once in this file, with its kind, its name, its labels and its
//! help, which is the doc comment of its field.
//!
//! Counters and histograms count what this process did. The states of the ledger are gauges that are read from the
//! tallies at each scrape, so that every replica reports the same values. The number of labels is bounded: labels are
//! route templates, policies, states and the reasons that rules name.

mod declare;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
    time::Duration,
};

use prometheus::{
    Encoder as _, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder,
};

use self::declare::declare;

/// The most policies with labels of their own. Policies get one when they first have traffic; the others share a label.
pub const POLICY_LABELS_MAX: usize = 256;

/// The most reasons with labels of their own.
const REASON_LABELS_MAX: usize = 256;

/// The most environments, over all policies, that have gauges.
pub const ENVIRONMENTS_MAX: usize = 1_024;

/// The most reward components, of a policy and over all policies, that have gauges.
const COMPONENTS_MAX: (usize, usize) = (16, 1_024);

/// The label shared by values beyond the bound.
const OTHER: &str = "_other";

const LATENCY_BUCKETS_S: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const SIZE_BUCKETS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
const STALENESS_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0];

/// The reasons for which callers are rejected.
const AUTH_FAILURES: [&str; 6] = ["missing", "invalid", "expired", "forbidden", "host", "origin"];

/// Types of parts that are left out of agents' calls, without the dates that some of them end with. An agent may name any
/// type.
const LEFT_OUT_KINDS: [&str; 30] = [
    "code_execution",
    "code_execution_tool_result",
    "code_interpreter",
    "code_interpreter_call",
    "compaction",
    "computer",
    "computer_use_preview",
    "context_compaction",
    "encrypted_content",
    "file_search",
    "file_search_call",
    "image_generation",
    "image_generation_call",
    "mcp",
    "mcp_call",
    "mcp_list_tools",
    "mcp_tool_result",
    "mcp_tool_use",
    "mcp_toolset",
    "redacted_thinking",
    "server_tool_use",
    "shell",
    "tool_search",
    "tool_search_call",
    "web_fetch",
    "web_fetch_tool_result",
    "web_search",
    "web_search_call",
    "web_search_preview",
    "web_search_tool_result",
];

const NATS_BUCKETS: &[f64] = &[0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0];
const AGE_BUCKETS_S: &[f64] = &[0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];

/// The names of all metrics.
#[cfg(test)]
pub(crate) const NAMES: [&[&str]; 5] =
    [HttpMetrics::NAMES, FlowMetrics::NAMES, LedgerMetrics::NAMES, SweepMetrics::NAMES, StoreMetrics::NAMES];

/// Every metric of the service.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests and responses.
    pub http: HttpMetrics,
    flow: FlowMetrics,
    ledger: LedgerMetrics,
    sweep: SweepMetrics,
    store: StoreMetrics,
    policies: LabelSet,
    reasons: LabelSet,
    /// The policies and environments whose gauges are set.
    environments: Mutex<BTreeSet<(String, String)>>,
    /// The policies and reward components whose gauges are set; no component stands for the reward itself.
    rewards: Mutex<BTreeSet<(String, Option<String>)>>,
}

declare! {
    /// The metrics of requests and responses.
    #[derive(Debug)]
    pub struct HttpMetrics {
        /// Requests answered.
        pub requests: IntCounterVec = "forebay_requests_total" ["method", "route", "status"],
        /// Seconds from a request's head to its response's head. Long polls include the wait.
        pub request_seconds: HistogramVec = "forebay_request_seconds" ["method", "route"] in LATENCY_BUCKETS_S,
        /// Bytes of request bodies as received, before decompression.
        pub request_bytes: IntCounterVec = "forebay_request_bytes_total" ["method", "route"],
        /// Bytes of response bodies as sent, after compression.
        pub response_bytes: IntCounterVec = "forebay_response_bytes_total" ["method", "route"],
        /// Requests in flight.
        requests_in_flight: IntGauge = "forebay_requests_in_flight",
        /// Bytes held for posts of trajectories and their responses (bounded by `limits.inflight_bytes`).
        pub body_bytes_in_flight: IntGauge = "forebay_body_bytes_in_flight",
        /// Bytes held for other request bodies and other long responses (bounded by `limits.control_bytes`).
        pub control_bytes_in_flight: IntGauge = "forebay_control_bytes_in_flight",
        /// Bytes held for pages of samples (bounded by `limits.samples_bytes`).
        pub samples_bytes_in_flight: IntGauge = "forebay_samples_bytes_in_flight",
        /// Requests refused, by problem type.
        refused: IntCounterVec = "forebay_problems_total" ["type"],
        /// Requests rejected because of their key, host or origin, by reason.
        auth_failures: IntCounterVec = "forebay_auth_failures_total" ["reason"],
        /// Requests waiting for a batch or a version.
        waiters: IntGauge = "forebay_waiters",
    }
}

declare! {
    /// The metrics of what happens to rollouts, groups and batches.
    #[derive(Debug)]
    struct FlowMetrics {
        /// Rollouts received, without duplicates, by their verdict at arrival.
        rollouts: IntCounterVec = "forebay_rollouts_total" ["policy", "verdict"],
        /// Rollouts recognised as already stored.
        duplicates: IntCounterVec = "forebay_duplicates_total" ["policy"],
        /// Scores posted, without duplicates; `applied` is `false` for those that came after the decision about their rollout.
        scores: IntCounterVec = "forebay_scores_total" ["policy", "applied"],
        /// Events of work for scorers, by event: granted, settled, reopened for rollouts that came meanwhile, failed, expired, or exhausted with its last attempt.
        score_work: IntCounterVec = "forebay_score_work_total" ["policy", "event"],
        /// Tokens of rollouts received.
        tokens_received: IntCounterVec = "forebay_tokens_received_total" ["policy"],
        /// Rollouts and groups dropped, by the rule that dropped them.
        dropped: IntCounterVec = "forebay_dropped_total" ["policy", "reason"],
        /// Groups decided.
        decided: IntCounterVec = "forebay_groups_decided_total" ["policy", "state"],
        /// Filter evaluations that failed. A filter that fails counts as not matching.
        filter_failures: IntCounterVec = "forebay_filter_failures_total" ["policy", "filter"],
        /// Filters that were not evaluated on a rollout, because the cost might have exceeded the budget.
        filters_over_budget: IntCounterVec = "forebay_filters_over_budget_total" ["policy", "filter"],
        /// Warnings in receipts of new rollouts, by warning.
        warnings: IntCounterVec = "forebay_ingest_warnings_total" ["policy", "warning"],
        /// Rollouts that agents asked to be admitted before they started, by outcome.
        admissions: IntCounterVec = "forebay_admissions_total" ["policy", "outcome"],
        /// Calls of agents that were recorded.
        session_calls: IntCounterVec = "forebay_session_calls_total" ["policy"],
        /// Sampled tokens of agents' calls that were recorded.
        session_tokens: IntCounterVec = "forebay_session_tokens_total" ["policy"],
        /// Recorded tokens that no segment of their ended session trains, by reason.
        session_tokens_dropped: IntCounterVec = "forebay_session_tokens_dropped_total" ["policy", "reason"],
        /// Prompts of ended sessions that differ from what was recorded before them, by cause.
        session_breaks: IntCounterVec = "forebay_session_breaks_total" ["policy", "cause"],
        /// Calls of agents that ended, by what they ended with: recorded, replayed (their client repeated them), resumed (an earlier attempt had made them), forwarded, or the code of an error.
        agent_calls: IntCounterVec = "forebay_agent_calls_total" ["dialect", "outcome"],
        /// Calls of agents in flight.
        agent_calls_in_flight: IntGauge = "forebay_agent_calls_in_flight",
        /// Bytes held for the bodies of agents' calls in flight (bounded by `sessions.inflight_bytes`).
        agent_call_bytes_in_flight: IntGauge = "forebay_agent_call_bytes_in_flight",
        /// Seconds that recording a call added to the time in which its engine sampled the answer. In the mode exact, they contain the request that parses the answer.
        agent_call_added_seconds: HistogramVec = "forebay_agent_call_added_seconds" ["dialect"] in LATENCY_BUCKETS_S,
        /// Recorded calls whose engine sampled under a grammar, so that their log-probabilities are not the policy's.
        agent_calls_constrained: IntCounterVec = "forebay_agent_calls_constrained_total" ["policy"],
        /// Parts of agents' calls that were left out because nothing here can run or read them, by type: once for each call.
        agent_parts_left_out: IntCounterVec = "forebay_agent_parts_left_out_total" ["kind"],
        /// Special tokens in texts of agents, in the mode exact.
        agent_special_tokens: IntCounterVec = "forebay_agent_special_tokens_total" ["policy"],
        /// Whether the answers of an inference engine can be recorded.
        upstream_ready: IntGaugeVec = "forebay_upstream_ready" ["upstream"],
        /// Seconds that inference engines took for answers.
        upstream_seconds: HistogramVec = "forebay_upstream_seconds" ["upstream"] in AGE_BUCKETS_S,
        /// Requests that inference engines did not answer, by failure.
        upstream_failures: IntCounterVec = "forebay_upstream_failures_total" ["upstream", "failure"],
        /// Calls that inference engines aborted, so that they were repeated.
        upstream_aborts: IntCounterVec = "forebay_upstream_aborts_total" ["upstream"],
        /// Recorded calls that were chosen for an audit, by outcome: equal, different, or why they were not compared.
        upstream_audits: IntCounterVec = "forebay_upstream_audits_total" ["upstream", "outcome"],
        /// How far recorded log-probabilities were from the engine's scores of the same ids, in nats: mean and worst of a call.
        upstream_audit_difference: HistogramVec = "forebay_upstream_audit_difference_nats" ["upstream", "of"] in NATS_BUCKETS,
        /// Rollouts of sessions that a teacher was asked to score, by outcome: scored, or why they were not.
        teacher_rollouts: IntCounterVec = "forebay_teacher_rollouts_total" ["policy", "outcome"],
        /// Seconds that teachers took to score all segments of a rollout, or to fail.
        teacher_seconds: HistogramVec = "forebay_teacher_seconds" ["policy"] in AGE_BUCKETS_S,
        /// Events of leases, by event.
        leases: IntCounterVec = "forebay_leases_total" ["policy", "event"],
        /// Tokens of batches leased.
        tokens_delivered: IntCounterVec = "forebay_tokens_delivered_total" ["policy"],
        /// Seconds that a request for a batch waited until it was granted.
        batch_wait_seconds: HistogramVec = "forebay_batch_wait_seconds" ["policy"] in LATENCY_BUCKETS_S,
        /// Staleness of new batches: how many versions the oldest trained token is behind.
        batch_staleness: HistogramVec = "forebay_batch_staleness_versions" ["policy"] in STALENESS_BUCKETS,
        /// Seconds from the cut of a batch to its ack.
        batch_age_seconds: HistogramVec = "forebay_batch_age_seconds" ["policy"] in AGE_BUCKETS_S,
    }
}

declare! {
    /// The gauges of the ledger, which are set at each scrape.
    #[derive(Debug)]
    struct LedgerMetrics {
        /// Rollouts by state.
        rollouts: IntGaugeVec = "forebay_ledger_rollouts" ["policy", "state"],
        /// Groups by state.
        groups: IntGaugeVec = "forebay_ledger_groups" ["policy", "state"],
        /// Batches by state.
        batches: IntGaugeVec = "forebay_ledger_batches" ["policy", "state"],
        /// Sessions of agents by state.
        sessions: IntGaugeVec = "forebay_ledger_sessions" ["policy", "state"],
        /// Rollouts ever received, without duplicates.
        received: IntGaugeVec = "forebay_ledger_received" ["policy"],
        /// Rollouts that are admitted and not yet posted.
        reserved: IntGaugeVec = "forebay_ledger_reserved_rollouts" ["policy"],
        /// Stored payload bytes of rollouts that are not yet trained.
        live_bytes: IntGaugeVec = "forebay_ledger_live_bytes" ["policy"],
        /// Rollouts whose producer sent no version, or whose engine did not say the version of every trained token.
        assumed_versions: IntGaugeVec = "forebay_ledger_assumed_versions" ["policy"],
        /// Rollouts received minus the sum of all states. Any value but 0 is a bug.
        unconserved: IntGaugeVec = "forebay_ledger_unconserved" ["policy"],
        /// Current weight version.
        policy_version: IntGaugeVec = "forebay_policy_version" ["policy"],
        /// Ready groups of environments that have shares in `batch.environments`, counted up to 1,000 or to a batch.
        environment_ready: IntGaugeVec = "forebay_environment_ready_groups" ["policy", "environment"],
        /// Groups of such an environment that the next batch waits for.
        environment_needed: IntGaugeVec = "forebay_environment_needed_groups" ["policy", "environment"],
        /// Mean reward of the kept rollouts of the newest batch.
        batch_reward: GaugeVec = "forebay_batch_reward_mean" ["policy"],
        /// Mean of a reward component over the kept rollouts of the newest batch that have it.
        batch_component: GaugeVec = "forebay_batch_component_mean" ["policy", "component"],
        /// Scrapes for which the ledger could not be read, so that its gauges are out of date.
        gauge_failures: IntCounter = "forebay_gauge_failures_total",
    }
}

declare! {
    /// The metrics of the sweep.
    #[derive(Debug)]
    struct SweepMetrics {
        /// Seconds of one sweep.
        seconds: Histogram = "forebay_sweep_seconds" in LATENCY_BUCKETS_S,
        /// Sweeps that failed.
        failures: IntCounter = "forebay_sweep_failures_total",
    }
}

declare! {
    /// The metrics of the store's commits.
    #[derive(Clone, Debug)]
    pub struct StoreMetrics {
        /// Seconds of one commit.
        commit_seconds: Histogram = "forebay_commit_seconds" in LATENCY_BUCKETS_S,
        /// Operations that shared one commit.
        commit_commands: Histogram = "forebay_commit_commands" in SIZE_BUCKETS,
        /// Commits that failed.
        commit_failures: IntCounter = "forebay_commit_failures_total",
        /// Size of the write-ahead log (SQLite).
        wal_bytes: IntGauge = "forebay_wal_bytes",
        /// Segment files (SQLite).
        segment_files: IntGauge = "forebay_segment_files",
        /// Bytes in segment files, with those that no row names.
        segment_bytes: IntGauge = "forebay_segment_bytes",
        /// Bytes in segment files that rows name.
        segment_live_bytes: IntGauge = "forebay_segment_live_bytes",
        /// Payloads that were moved: between the database and segment files, or out of sparse segment files.
        payloads_moved: IntCounter = "forebay_payloads_moved_total",
        /// Payloads in an object store that were read, by where they were found: `cache` is memory.
        object_payloads_read: IntCounterVec = "forebay_object_payloads_read_total" ["from"],
    }
}

impl StoreMetrics {
    /// A transaction ended.
    pub fn committed(&self, commands: usize, elapsed: Duration, succeeded: bool) {
        self.commit_seconds.observe(elapsed.as_secs_f64());
        self.commit_commands.observe(commands as f64);
        if !succeeded {
            self.commit_failures.inc();
        }
    }

    /// The segment files, their bytes, and the bytes that rows name.
    pub fn segment_files(&self, files: u64, bytes: u64, live_bytes: u64) {
        self.segment_files.set(files as i64);
        self.segment_bytes.set(bytes as i64);
        self.segment_live_bytes.set(live_bytes as i64);
    }

    /// Payloads were moved.
    pub fn payloads_moved(&self, payloads: usize) {
        self.payloads_moved.inc_by(payloads as u64);
    }

    /// Payloads of objects were read: so many from memory, and so many from the object store.
    pub fn object_payloads_read(&self, cached: usize, asked: usize) {
        for (from, payloads) in [("cache", cached), ("store", asked)] {
            if payloads > 0 {
                self.object_payloads_read.with_label_values(&[from]).inc_by(payloads as u64);
            }
        }
    }

    /// Size of the write-ahead log (SQLite).
    pub fn wal_bytes(&self, bytes: u64) {
        self.wal_bytes.set(bytes as i64);
    }
}

/// Holds a gauge one higher until it is dropped. It is also dropped, and the gauge lowered, when the future that holds
/// it is cancelled.
#[derive(Debug)]
pub struct Counted<'g>(&'g IntGauge);

impl<'g> Counted<'g> {
    fn enter(gauge: &'g IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A call of an agent that is counted in a gauge, until it is dropped.
#[derive(Debug)]
pub struct CallInFlight(IntGauge);

impl Drop for CallInFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The rewards of a batch, for the gauges of its policy.
#[derive(Clone, Debug, Default)]
pub struct Rewards {
    /// Mean over the kept rollouts.
    pub mean: Option<f64>,
    /// Mean of each component over the kept rollouts that have it.
    pub components: BTreeMap<String, f64>,
}

/// The ledger of one policy, for its gauges.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Rollouts by state.
    pub rollouts: BTreeMap<String, i64>,
    /// Groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Batches by state.
    pub batches: BTreeMap<String, i64>,
    /// Sessions by state.
    pub sessions: BTreeMap<String, i64>,
    /// Rollouts ever received, without duplicates.
    pub received: i64,
    /// Stored payload bytes of rollouts that are not yet trained.
    pub live_bytes: i64,
    /// Rollouts that are admitted and not yet posted.
    pub reserved: i64,
    /// Rollouts with an assumed version.
    pub assumed_versions: i64,
    /// Rollouts received minus the sum of all states.
    pub unconserved: i64,
}

impl Ledger {
    /// Adds the ledger of another policy. `unconserved` is added as an absolute value, so that a surplus in one policy
    /// does not hide a loss in another.
    fn add(&mut self, other: &Self) {
        let families = [
            (&mut self.rollouts, &other.rollouts),
            (&mut self.groups, &other.groups),
            (&mut self.batches, &other.batches),
            (&mut self.sessions, &other.sessions),
        ];
        for (sums, counts) in families {
            for (state, count) in counts {
                *sums.entry(state.clone()).or_default() += count;
            }
        }
        self.received += other.received;
        self.live_bytes += other.live_bytes;
        self.reserved += other.reserved;
        self.assumed_versions += other.assumed_versions;
        self.unconserved += other.unconserved.abs();
    }
}

/// A bounded set of label values. Values get a label in the order of their first event.
#[derive(Debug)]
struct LabelSet {
    known: Mutex<BTreeSet<String>>,
    max: usize,
}

impl LabelSet {
    fn new(max: usize) -> Self {
        Self { known: Mutex::default(), max }
    }

    /// The label of a value: the value itself if it has a label or one is free, otherwise [`OTHER`].
    fn bound<'a>(&self, value: &'a str) -> &'a str {
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.contains(value) {
            return value;
        }
        if known.len() >= self.max || value == OTHER {
            return OTHER;
        }
        known.insert(value.to_owned());
        value
    }

    fn has(&self, value: &str) -> bool {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner).contains(value)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics, each at zero.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        #[cfg(target_os = "linux")]
        registry
            .register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))
            .expect("the process collector is registered once");
        let http = HttpMetrics::register(&registry);
        // The counters of a fixed set of reasons start at 0, so that the first event is visible as an increase.
        for reason in AUTH_FAILURES {
            http.auth_failures.with_label_values(&[reason]);
        }
        Self {
            http,
            flow: FlowMetrics::register(&registry),
            ledger: LedgerMetrics::register(&registry),
            sweep: SweepMetrics::register(&registry),
            store: StoreMetrics::register(&registry),
            policies: LabelSet::new(POLICY_LABELS_MAX),
            reasons: LabelSet::new(REASON_LABELS_MAX),
            environments: Mutex::default(),
            rewards: Mutex::default(),
            registry,
        }
    }

    /// The metrics that a store updates.
    #[must_use]
    pub fn store(&self) -> StoreMetrics {
        self.store.clone()
    }

    /// A new rollout was stored.
    pub fn received(&self, policy: &str, verdict: &str, tokens: u64) {
        let policy = self.policies.bound(policy);
        self.flow.rollouts.with_label_values(&[policy, verdict]).inc();
        self.flow.tokens_received.with_label_values(&[policy]).inc_by(tokens);
    }

    /// A rollout was recognised as already stored.
    pub fn duplicate(&self, policy: &str) {
        self.flow.duplicates.with_label_values(&[self.policies.bound(policy)]).inc();
    }

    /// A score was stored.
    pub fn scored(&self, policy: &str, applied: bool) {
        let applied = if applied { "true" } else { "false" };
        self.flow.scores.with_label_values(&[self.policies.bound(policy), applied]).inc();
    }

    /// Work for scorers was leased, or its lease ended.
    pub fn score_work(&self, policy: &str, event: &str, items: u64) {
        if items > 0 {
            self.flow.score_work.with_label_values(&[self.policies.bound(policy), event]).inc_by(items);
        }
    }

    /// A rule dropped a rollout or a group.
    pub fn dropped(&self, policy: &str, reason: &str) {
        self.dropped_many(policy, reason, 1);
    }

    /// A rule dropped `count` rollouts or groups.
    pub fn dropped_many(&self, policy: &str, reason: &str, count: u64) {
        if count > 0 {
            let labels = [self.policies.bound(policy), self.reasons.bound(reason)];
            self.flow.dropped.with_label_values(&labels).inc_by(count);
        }
    }

    /// Counts a request that waits for a batch or a version, until the result is dropped.
    #[must_use]
    pub fn waiting(&self) -> Counted<'_> {
        Counted::enter(&self.http.waiters)
    }

    /// Counts a request in flight, until the result is dropped.
    #[must_use]
    pub fn serving(&self) -> Counted<'_> {
        Counted::enter(&self.http.requests_in_flight)
    }

    /// A group was decided.
    pub fn decided(&self, policy: &str, state: &str) {
        self.flow.decided.with_label_values(&[self.policies.bound(policy), state]).inc();
    }

    /// A filter could not be evaluated.
    pub fn filter_failed(&self, policy: &str, filter: &str) {
        self.flow.filter_failures.with_label_values(&[self.policies.bound(policy), self.reasons.bound(filter)]).inc();
    }

    /// A filter was not evaluated, because its cost might have exceeded the budget.
    pub fn filter_over_budget(&self, policy: &str, filter: &str) {
        self.flow
            .filters_over_budget
            .with_label_values(&[self.policies.bound(policy), self.reasons.bound(filter)])
            .inc();
    }

    /// A rollout was accepted with a warning of this name, one of a fixed set.
    pub fn warned(&self, policy: &str, warning: &str) {
        self.flow.warnings.with_label_values(&[self.policies.bound(policy), warning]).inc();
    }

    /// A request was refused with a problem of this type, one of a fixed set.
    pub fn refused(&self, kind: &str) {
        self.http.refused.with_label_values(&[kind]).inc();
    }

    /// A caller was rejected because of its key, host or origin. The reason is one of a fixed set.
    pub fn auth_failed(&self, reason: &str) {
        self.http.auth_failures.with_label_values(&[reason]).inc();
    }

    /// Something happened to a lease: granted, held, redelivered, acked, nacked, expired, revoked.
    pub fn lease(&self, policy: &str, event: &str, count: u64) {
        self.flow.leases.with_label_values(&[self.policies.bound(policy), event]).inc_by(count);
    }

    /// An admission was answered: `granted` of `asked` rollouts were admitted.
    pub fn admitted(&self, policy: &str, granted: u32, asked: u32) {
        let policy = self.policies.bound(policy);
        self.flow.admissions.with_label_values(&[policy, "granted"]).inc_by(granted.into());
        self.flow.admissions.with_label_values(&[policy, "refused"]).inc_by((asked - granted).into());
    }

    /// A call of an agent was recorded.
    pub fn call_recorded(&self, policy: &str, tokens: u64) {
        let policy = self.policies.bound(policy);
        self.flow.session_calls.with_label_values(&[policy]).inc();
        self.flow.session_tokens.with_label_values(&[policy]).inc_by(tokens);
    }

    /// A call of an agent ended with an outcome, one of a fixed set.
    pub fn call_ended(&self, dialect: &str, outcome: &str) {
        self.flow.agent_calls.with_label_values(&[dialect, outcome]).inc();
    }

    /// Counts a call of an agent in flight, until the result is dropped.
    #[must_use]
    pub fn call_begins(&self) -> CallInFlight {
        self.flow.agent_calls_in_flight.inc();
        CallInFlight(self.flow.agent_calls_in_flight.clone())
    }

    /// The gauge of the bytes of agents' calls in flight.
    pub fn agent_call_bytes_in_flight(&self) -> IntGauge {
        self.flow.agent_call_bytes_in_flight.clone()
    }

    /// Recording a call added this time to that of its engine.
    pub fn call_added(&self, dialect: &str, time: Duration) {
        self.flow.agent_call_added_seconds.with_label_values(&[dialect]).observe(time.as_secs_f64());
    }

    /// A call was recorded whose engine sampled under a grammar.
    pub fn call_constrained(&self, policy: &str) {
        self.flow.agent_calls_constrained.with_label_values(&[self.policies.bound(policy)]).inc();
    }

    /// Parts of this type were left out of a call.
    pub fn part_left_out(&self, kind: &str) {
        let known = LEFT_OUT_KINDS.into_iter().find(|known| *known == kind);
        self.flow.agent_parts_left_out.with_label_values(&[known.unwrap_or(OTHER)]).inc();
    }

    /// The texts of a call have special tokens of the model.
    pub fn special_tokens(&self, policy: &str, tokens: u64) {
        self.flow.agent_special_tokens.with_label_values(&[self.policies.bound(policy)]).inc_by(tokens);
    }

    /// Whether an engine of the configuration is ready.
    pub fn upstream_ready(&self, upstream: &str, ready: bool) {
        self.flow.upstream_ready.with_label_values(&[upstream]).set(ready.into());
    }

    /// An engine answered a call, which it had aborted before.
    pub fn engine_answered(&self, upstream: &str, time: Duration, aborts: u32) {
        self.flow.upstream_seconds.with_label_values(&[upstream]).observe(time.as_secs_f64());
        if aborts > 0 {
            self.flow.upstream_aborts.with_label_values(&[upstream]).inc_by(aborts.into());
        }
    }

    /// An engine did not answer a call. The failure is one of a fixed set.
    pub fn engine_failed(&self, upstream: &str, failure: &str) {
        self.flow.upstream_failures.with_label_values(&[upstream, failure]).inc();
    }

    /// A recorded call was chosen for an audit. The outcome is one of a fixed set.
    pub fn audited(&self, upstream: &str, outcome: &str) {
        self.flow.upstream_audits.with_label_values(&[upstream, outcome]).inc();
    }

    /// The recorded log-probabilities of a call are so many nats from the engine's scores.
    pub fn audit_differs(&self, upstream: &str, mean: f64, worst: f64) {
        for (of, nats) in [("mean", mean), ("worst", worst)] {
            self.flow.upstream_audit_difference.with_label_values(&[upstream, of]).observe(nats);
        }
    }

    /// A teacher was asked to score a rollout of a session. The outcome is one of a fixed set.
    pub fn taught(&self, policy: &str, outcome: &str, time: Duration) {
        let policy = self.policies.bound(policy);
        self.flow.teacher_rollouts.with_label_values(&[policy, outcome]).inc();
        self.flow.teacher_seconds.with_label_values(&[policy]).observe(time.as_secs_f64());
    }

    /// A session ended. `dropped` has the tokens that it does not train, by reason, and `breaks` the causes of its breaks,
    /// each one of a fixed set.
    pub fn session_ended(&self, policy: &str, dropped: &[(&str, u64)], breaks: &[&'static str]) {
        let policy = self.policies.bound(policy);
        for (reason, tokens) in dropped.iter().filter(|(_, tokens)| *tokens > 0) {
            self.flow.session_tokens_dropped.with_label_values(&[policy, *reason]).inc_by(*tokens);
        }
        for cause in breaks {
            self.flow.session_breaks.with_label_values(&[policy, *cause]).inc();
        }
    }

    /// A batch was granted after a wait.
    pub fn granted(&self, policy: &str, waited: Duration, tokens: u64, staleness: i64) {
        let policy = self.policies.bound(policy);
        self.flow.batch_wait_seconds.with_label_values(&[policy]).observe(waited.as_secs_f64());
        self.flow.tokens_delivered.with_label_values(&[policy]).inc_by(tokens);
        self.flow.batch_staleness.with_label_values(&[policy]).observe(staleness as f64);
    }

    /// A batch was acked `age_s` seconds after it was cut.
    pub fn acked(&self, policy: &str, age_s: f64) {
        self.flow.batch_age_seconds.with_label_values(&[self.policies.bound(policy)]).observe(age_s);
    }

    /// A sweep ended.
    pub fn swept(&self, elapsed: Duration, succeeded: bool) {
        self.sweep.seconds.observe(elapsed.as_secs_f64());
        if !succeeded {
            self.sweep.failures.inc();
        }
    }

    /// The gauges of the ledger could not be set for a scrape.
    pub fn ledger_not_read(&self) {
        self.ledger.gauge_failures.inc();
    }

    /// Sets the gauges of the ledgers of the policies that have traffic.
    ///
    /// Policies get labels in this order. Policies beyond the bound are added up under a shared label.
    pub fn ledgers<'l>(&self, ledgers: impl Iterator<Item = (&'l str, Ledger)>) {
        let mut others: Option<Ledger> = None;
        for (policy, ledger) in ledgers {
            let label = self.policies.bound(policy);
            if label == OTHER {
                others.get_or_insert_default().add(&ledger);
            } else {
                self.set_ledger(label, &ledger);
            }
        }
        if let Some(others) = others {
            self.set_ledger(OTHER, &others);
        }
    }

    fn set_ledger(&self, policy: &str, ledger: &Ledger) {
        let families = [
            (&self.ledger.rollouts, &ledger.rollouts),
            (&self.ledger.groups, &ledger.groups),
            (&self.ledger.batches, &ledger.batches),
            (&self.ledger.sessions, &ledger.sessions),
        ];
        for (gauges, counts) in families {
            for (state, &count) in counts {
                gauges.with_label_values(&[policy, state.as_str()]).set(count);
            }
        }
        self.ledger.received.with_label_values(&[policy]).set(ledger.received);
        self.ledger.live_bytes.with_label_values(&[policy]).set(ledger.live_bytes);
        self.ledger.reserved.with_label_values(&[policy]).set(ledger.reserved);
        self.ledger.assumed_versions.with_label_values(&[policy]).set(ledger.assumed_versions);
        self.ledger.unconserved.with_label_values(&[policy]).set(ledger.unconserved);
    }

    /// Sets the gauge of a policy's version. Policies without any traffic have no label. The shared label has no
    /// version, because versions of several policies cannot be added.
    pub fn version(&self, policy: &str, version: i64) {
        let has_label = if version > 0 { self.policies.bound(policy) == policy } else { self.policies.has(policy) };
        if has_label && policy != OTHER {
            self.ledger.policy_version.with_label_values(&[policy]).set(version);
        }
    }

    /// Sets the gauges of environments that have shares: policy, environment, ready groups and needed groups. The gauges
    /// of others are removed, because their rules are gone.
    pub fn environments(&self, found: &[(String, String, i64, i64)]) {
        let families = [&self.ledger.environment_ready, &self.ledger.environment_needed];
        let mut shown = self.environments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = std::mem::take(&mut *shown);
        for (policy, environment, ready, needed) in found.iter().take(ENVIRONMENTS_MAX) {
            for (gauges, groups) in families.into_iter().zip([*ready, *needed]) {
                gauges.with_label_values(&[policy, environment]).set(groups);
            }
            shown.insert((policy.clone(), environment.clone()));
        }
        for (policy, environment) in before.difference(&shown) {
            for gauges in families {
                // It fails only if the gauge is gone already.
                drop(gauges.remove_label_values(&[policy, environment]));
            }
        }
    }

    /// Whether a policy has a label of its own.
    #[must_use]
    pub fn has_label(&self, policy: &str) -> bool {
        policy != OTHER && self.policies.has(policy)
    }

    /// Sets the gauges of rewards to those of the newest batch of each policy. The gauges of rewards that no newest batch
    /// has are removed.
    pub fn rewards(&self, found: &[(String, Rewards)]) {
        let mut shown = self.rewards.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = std::mem::take(&mut *shown);
        let (each_max, mut left) = COMPONENTS_MAX;
        for (policy, Rewards { mean, components }) in found {
            if let Some(mean) = mean {
                self.ledger.batch_reward.with_label_values(&[policy]).set(*mean);
                shown.insert((policy.clone(), None));
            }
            for (component, mean) in components.iter().take(each_max.min(left)) {
                self.ledger.batch_component.with_label_values(&[policy, component]).set(*mean);
                shown.insert((policy.clone(), Some(component.clone())));
                left -= 1;
            }
        }
        for gone in before.difference(&shown) {
            // Removing fails only if the gauge is gone already.
            drop(match gone {
                (policy, None) => self.ledger.batch_reward.remove_label_values(&[policy]),
                (policy, Some(component)) => self.ledger.batch_component.remove_label_values(&[policy, component]),
            });
        }
    }

    /// All metrics in the Prometheus text format.
    pub fn render(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
