//! The metrics that `/metrics` exports. All names and labels are in this file.
//!
//! Counters and histograms count what this process did. The states of the ledger are gauges that are read from the
//! tallies at each scrape, so that every replica reports the same values. The number of labels is bounded: labels are
//! route templates, policies, states and the reasons that rules name.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
    time::Duration,
};

use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// The most policies with labels of their own. Policies get one when they first have traffic; the others share a label.
const POLICY_LABELS_MAX: usize = 256;

/// The most reasons with labels of their own.
const REASON_LABELS_MAX: usize = 256;

/// The label shared by values beyond the bound.
const OTHER: &str = "_other";

const LATENCY_BUCKETS_S: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const SIZE_BUCKETS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
const STALENESS_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0];

/// The reasons for which callers are rejected.
const AUTH_FAILURES: [&str; 6] = ["missing", "invalid", "expired", "forbidden", "host", "origin"];

/// Every metric of the service.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests by route template, method and status.
    pub requests: IntCounterVec,
    /// Seconds from the request's head to the response's head.
    pub request_seconds: HistogramVec,
    /// Bytes of request bodies as received, before decompression.
    pub request_bytes: IntCounterVec,
    /// Bytes of responses as sent.
    pub response_bytes: IntCounterVec,
    requests_in_flight: IntGauge,
    /// Bytes held for posts of trajectories and their responses.
    pub body_bytes_in_flight: IntGauge,
    /// Bytes held for other request bodies and responses.
    pub control_bytes_in_flight: IntGauge,
    /// Bytes held for pages of samples.
    pub samples_bytes_in_flight: IntGauge,
    rollouts: IntCounterVec,
    duplicates: IntCounterVec,
    tokens_received: IntCounterVec,
    dropped: IntCounterVec,
    decided: IntCounterVec,
    filter_failures: IntCounterVec,
    filters_over_budget: IntCounterVec,
    warnings: IntCounterVec,
    refused: IntCounterVec,
    admissions: IntCounterVec,
    auth_failures: IntCounterVec,
    leases: IntCounterVec,
    tokens_delivered: IntCounterVec,
    batch_wait_seconds: HistogramVec,
    group_staleness: HistogramVec,
    lease_age_seconds: HistogramVec,
    waiters: IntGauge,
    ledger_rollouts: IntGaugeVec,
    ledger_groups: IntGaugeVec,
    ledger_batches: IntGaugeVec,
    ledger_received: IntGaugeVec,
    ledger_live_bytes: IntGaugeVec,
    ledger_reserved: IntGaugeVec,
    ledger_assumed_versions: IntGaugeVec,
    ledger_unconserved: IntGaugeVec,
    policy_version: IntGaugeVec,
    sweep_seconds: Histogram,
    sweep_failures: IntCounter,
    /// Scrapes for which the ledger's gauges could not be updated.
    pub gauge_failures: IntCounter,
    store: StoreMetrics,
    policies: LabelSet,
    reasons: LabelSet,
}

/// The metrics of the store's commits.
#[derive(Clone, Debug)]
pub struct StoreMetrics {
    commit_seconds: Histogram,
    commit_commands: Histogram,
    commit_failures: IntCounter,
    wal_bytes: IntGauge,
}

impl StoreMetrics {
    fn register(r: &Registrar<'_>) -> Self {
        Self {
            commit_seconds: r.histogram("forebay_commit_seconds", "Seconds of one commit.", LATENCY_BUCKETS_S),
            commit_commands: r.histogram("forebay_commit_commands", "Operations that shared one commit.", SIZE_BUCKETS),
            commit_failures: r.counter("forebay_commit_failures_total", "Commits that failed."),
            wal_bytes: r.gauge("forebay_wal_bytes", "Size of the write-ahead log (SQLite)."),
        }
    }

    /// A transaction ended.
    pub(crate) fn committed(&self, commands: usize, elapsed: Duration, succeeded: bool) {
        self.commit_seconds.observe(elapsed.as_secs_f64());
        self.commit_commands.observe(commands as f64);
        if !succeeded {
            self.commit_failures.inc();
        }
    }

    /// Size of the write-ahead log (SQLite).
    pub(crate) fn wal_bytes(&self, bytes: u64) {
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

/// The ledger of one policy, for its gauges.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Rollouts by state.
    pub rollouts: BTreeMap<String, i64>,
    /// Groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Batches by state.
    pub batches: BTreeMap<String, i64>,
    /// Rollouts ever received, without duplicates.
    pub received: i64,
    /// Stored payload bytes of rollouts that are not yet trained.
    pub live_bytes: i64,
    /// Rollouts that are admitted and not yet posted.
    pub reserved: i64,
    /// Rollouts whose producer sent no version.
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

/// Registers metrics whose names and buckets are constants of this file.
struct Registrar<'r>(&'r Registry);

impl Registrar<'_> {
    fn add<C: prometheus::core::Collector + Clone + 'static>(&self, collector: prometheus::Result<C>) -> C {
        let collector = collector.expect("names, labels and buckets are constants and valid");
        self.0.register(Box::new(collector.clone())).expect("every name is registered once");
        collector
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::new(name, help))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    /// Registers a counter for each of a fixed set of values. All counters start at 0, so that the first event is
    /// visible as an increase.
    fn counters_of(&self, name: &str, help: &str, label: &str, values: &[&str]) -> IntCounterVec {
        let counters = self.counters(name, help, &[label]);
        for value in values {
            counters.with_label_values(&[*value]);
        }
        counters
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::new(name, help))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
    }

    fn histograms(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
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
    #[expect(clippy::too_many_lines, reason = "a list with an entry for each metric")]
    pub fn new() -> Self {
        let registry = Registry::new();
        let r = Registrar(&registry);
        let route = &["method", "route"];
        let policy = &["policy"];
        let by_state = &["policy", "state"];
        let by_reason = &["policy", "reason"];
        #[cfg(target_os = "linux")]
        registry
            .register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))
            .expect("the process collector is registered once");
        Self {
            requests: r.counters("forebay_requests_total", "Requests answered.", &["method", "route", "status"]),
            request_seconds: r.histograms(
                "forebay_request_seconds",
                "Seconds from a request's head to its response's head. Long polls include the wait.",
                LATENCY_BUCKETS_S,
                route,
            ),
            request_bytes: r.counters(
                "forebay_request_bytes_total",
                "Bytes of request bodies as received, before decompression.",
                route,
            ),
            response_bytes: r.counters(
                "forebay_response_bytes_total",
                "Bytes of response bodies as sent, after compression.",
                route,
            ),
            requests_in_flight: r.gauge("forebay_requests_in_flight", "Requests in flight."),
            body_bytes_in_flight: r.gauge(
                "forebay_body_bytes_in_flight",
                "Bytes held for posts of trajectories and their responses (bounded by limits.inflight_bytes).",
            ),
            control_bytes_in_flight: r.gauge(
                "forebay_control_bytes_in_flight",
                "Bytes held for other request bodies and other long responses (bounded by limits.control_bytes).",
            ),
            samples_bytes_in_flight: r.gauge(
                "forebay_samples_bytes_in_flight",
                "Bytes held for pages of samples (bounded by limits.samples_bytes).",
            ),
            rollouts: r.counters(
                "forebay_rollouts_total",
                "Rollouts received, without duplicates.",
                &["policy", "verdict"],
            ),
            duplicates: r.counters("forebay_duplicates_total", "Rollouts recognised as already stored.", policy),
            tokens_received: r.counters("forebay_tokens_received_total", "Tokens of rollouts received.", policy),
            dropped: r.counters(
                "forebay_dropped_total",
                "Rollouts and groups dropped, by the rule that dropped them.",
                by_reason,
            ),
            decided: r.counters("forebay_groups_decided_total", "Groups decided.", by_state),
            filter_failures: r.counters(
                "forebay_filter_failures_total",
                "Filter evaluations that failed. A filter that fails counts as not matching.",
                &["policy", "filter"],
            ),
            filters_over_budget: r.counters(
                "forebay_filters_over_budget_total",
                "Filters that were not evaluated on a rollout, because the cost might have exceeded the budget.",
                &["policy", "filter"],
            ),
            warnings: r.counters(
                "forebay_ingest_warnings_total",
                "Warnings in receipts of new rollouts, by warning.",
                &["policy", "warning"],
            ),
            refused: r.counters("forebay_problems_total", "Requests refused, by problem type.", &["type"]),
            admissions: r.counters(
                "forebay_admissions_total",
                "Rollouts that agents asked to be admitted before they started, by outcome.",
                &["policy", "outcome"],
            ),
            auth_failures: r.counters_of(
                "forebay_auth_failures_total",
                "Requests rejected because of their key, host or origin, by reason.",
                "reason",
                &AUTH_FAILURES,
            ),
            leases: r.counters("forebay_leases_total", "Events of leases, by event.", &["policy", "event"]),
            tokens_delivered: r.counters("forebay_tokens_delivered_total", "Tokens of batches leased.", policy),
            batch_wait_seconds: r.histograms(
                "forebay_batch_wait_seconds",
                "Seconds that a request for a batch waited until it was granted.",
                LATENCY_BUCKETS_S,
                policy,
            ),
            group_staleness: r.histograms(
                "forebay_batch_staleness_versions",
                "Staleness of new batches: how many versions the oldest trained token is behind.",
                STALENESS_BUCKETS,
                policy,
            ),
            lease_age_seconds: r.histograms(
                "forebay_batch_age_seconds",
                "Seconds from the cut of a batch to its ack.",
                &[0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0],
                policy,
            ),
            waiters: r.gauge("forebay_waiters", "Requests waiting for a batch or a version."),
            ledger_rollouts: r.gauges("forebay_ledger_rollouts", "Rollouts by state.", by_state),
            ledger_groups: r.gauges("forebay_ledger_groups", "Groups by state.", by_state),
            ledger_batches: r.gauges("forebay_ledger_batches", "Batches by state.", by_state),
            ledger_received: r.gauges("forebay_ledger_received", "Rollouts ever received, without duplicates.", policy),
            ledger_reserved: r.gauges(
                "forebay_ledger_reserved_rollouts",
                "Rollouts that are admitted and not yet posted.",
                policy,
            ),
            ledger_live_bytes: r.gauges(
                "forebay_ledger_live_bytes",
                "Stored payload bytes of rollouts that are not yet trained.",
                policy,
            ),
            ledger_assumed_versions: r.gauges(
                "forebay_ledger_assumed_versions",
                "Rollouts whose producer sent no version.",
                policy,
            ),
            ledger_unconserved: r.gauges(
                "forebay_ledger_unconserved",
                "Rollouts received minus the sum of all states. Any value but 0 is a bug.",
                policy,
            ),
            policy_version: r.gauges("forebay_policy_version", "Current weight version.", policy),
            sweep_seconds: r.histogram("forebay_sweep_seconds", "Seconds of one sweep.", LATENCY_BUCKETS_S),
            sweep_failures: r.counter("forebay_sweep_failures_total", "Sweeps that failed."),
            gauge_failures: r.counter(
                "forebay_gauge_failures_total",
                "Scrapes for which the ledger could not be read, so that its gauges are out of date.",
            ),
            store: StoreMetrics::register(&r),
            policies: LabelSet::new(POLICY_LABELS_MAX),
            reasons: LabelSet::new(REASON_LABELS_MAX),
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
        self.rollouts.with_label_values(&[policy, verdict]).inc();
        self.tokens_received.with_label_values(&[policy]).inc_by(tokens);
    }

    /// A rollout was recognised as already stored.
    pub fn duplicate(&self, policy: &str) {
        self.duplicates.with_label_values(&[self.policies.bound(policy)]).inc();
    }

    /// A rule dropped a rollout or a group.
    pub fn dropped(&self, policy: &str, reason: &str) {
        self.dropped_many(policy, reason, 1);
    }

    /// A rule dropped `count` rollouts or groups.
    pub fn dropped_many(&self, policy: &str, reason: &str, count: u64) {
        if count > 0 {
            let labels = [self.policies.bound(policy), self.reasons.bound(reason)];
            self.dropped.with_label_values(&labels).inc_by(count);
        }
    }

    /// Counts a request that waits for a batch or a version, until the result is dropped.
    #[must_use]
    pub fn waiting(&self) -> Counted<'_> {
        Counted::enter(&self.waiters)
    }

    /// Counts a request in flight, until the result is dropped.
    #[must_use]
    pub fn serving(&self) -> Counted<'_> {
        Counted::enter(&self.requests_in_flight)
    }

    /// A group was decided.
    pub fn decided(&self, policy: &str, state: &str) {
        self.decided.with_label_values(&[self.policies.bound(policy), state]).inc();
    }

    /// A filter could not be evaluated.
    pub fn filter_failed(&self, policy: &str, filter: &str) {
        self.filter_failures.with_label_values(&[self.policies.bound(policy), self.reasons.bound(filter)]).inc();
    }

    /// A filter was not evaluated, because its cost might have exceeded the budget.
    pub fn filter_over_budget(&self, policy: &str, filter: &str) {
        self.filters_over_budget.with_label_values(&[self.policies.bound(policy), self.reasons.bound(filter)]).inc();
    }

    /// A rollout was accepted with a warning of this name, one of a fixed set.
    pub fn warned(&self, policy: &str, warning: &str) {
        self.warnings.with_label_values(&[self.policies.bound(policy), warning]).inc();
    }

    /// A request was refused with a problem of this type, one of a fixed set.
    pub fn refused(&self, kind: &str) {
        self.refused.with_label_values(&[kind]).inc();
    }

    /// A caller was rejected because of its key, host or origin. The reason is one of a fixed set.
    pub fn auth_failed(&self, reason: &str) {
        self.auth_failures.with_label_values(&[reason]).inc();
    }

    /// Something happened to a lease: granted, held, redelivered, acked, nacked, expired, revoked.
    pub fn lease(&self, policy: &str, event: &str, count: u64) {
        self.leases.with_label_values(&[self.policies.bound(policy), event]).inc_by(count);
    }

    /// An admission was answered: `granted` of `asked` rollouts were admitted.
    pub fn admitted(&self, policy: &str, granted: u32, asked: u32) {
        let policy = self.policies.bound(policy);
        self.admissions.with_label_values(&[policy, "granted"]).inc_by(granted.into());
        self.admissions.with_label_values(&[policy, "refused"]).inc_by((asked - granted).into());
    }

    /// A batch was granted after a wait.
    pub fn granted(&self, policy: &str, waited: Duration, tokens: u64, staleness: i64) {
        let policy = self.policies.bound(policy);
        self.batch_wait_seconds.with_label_values(&[policy]).observe(waited.as_secs_f64());
        self.tokens_delivered.with_label_values(&[policy]).inc_by(tokens);
        self.group_staleness.with_label_values(&[policy]).observe(staleness as f64);
    }

    /// A batch was acked `age_s` seconds after it was cut.
    pub fn acked(&self, policy: &str, age_s: f64) {
        self.lease_age_seconds.with_label_values(&[self.policies.bound(policy)]).observe(age_s);
    }

    /// A sweep ended.
    pub fn swept(&self, elapsed: Duration, succeeded: bool) {
        self.sweep_seconds.observe(elapsed.as_secs_f64());
        if !succeeded {
            self.sweep_failures.inc();
        }
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
            (&self.ledger_rollouts, &ledger.rollouts),
            (&self.ledger_groups, &ledger.groups),
            (&self.ledger_batches, &ledger.batches),
        ];
        for (gauges, counts) in families {
            for (state, &count) in counts {
                gauges.with_label_values(&[policy, state.as_str()]).set(count);
            }
        }
        self.ledger_received.with_label_values(&[policy]).set(ledger.received);
        self.ledger_live_bytes.with_label_values(&[policy]).set(ledger.live_bytes);
        self.ledger_reserved.with_label_values(&[policy]).set(ledger.reserved);
        self.ledger_assumed_versions.with_label_values(&[policy]).set(ledger.assumed_versions);
        self.ledger_unconserved.with_label_values(&[policy]).set(ledger.unconserved);
    }

    /// Sets the gauge of a policy's version. Policies without any traffic have no label. The shared label has no
    /// version, because versions of several policies cannot be added.
    pub fn version(&self, policy: &str, version: i64) {
        let has_label = if version > 0 { self.policies.bound(policy) == policy } else { self.policies.has(policy) };
        if has_label && policy != OTHER {
            self.policy_version.with_label_values(&[policy]).set(version);
        }
    }

    /// All metrics in the Prometheus text format.
    pub fn render(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
