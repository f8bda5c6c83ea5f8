//! What `/metrics` exports: one struct, every name and label in one place.
//!
//! Counters and histograms are this process's; states of the ledger are gauges read from the tallies when scraped, so
//! that every replica reports the same. Labels are bounded: route templates, policies, states, and reasons that rules
//! name.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
    time::Duration,
};

use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// Distinct policies with traffic that get labels of their own; the others are counted together.
const POLICY_LABELS_MAX: usize = 256;

/// Distinct reasons that get labels of their own.
const REASON_LABELS_MAX: usize = 256;

/// Label of what is beyond its bound.
const OTHER: &str = "_other";

const LATENCY_BUCKETS_S: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const SIZE_BUCKETS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
const STALENESS_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0];

/// Why callers are not let in.
const AUTH_FAILURES: [&str; 6] = ["missing", "invalid", "expired", "forbidden", "host", "origin"];

/// Every metric of the service.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests by route template, method and status.
    pub requests: IntCounterVec,
    /// Seconds from the request's head to the answer's head.
    pub request_seconds: HistogramVec,
    /// Bytes of request bodies as received, before decompression.
    pub request_bytes: IntCounterVec,
    /// Bytes of answers as sent.
    pub response_bytes: IntCounterVec,
    requests_in_flight: IntGauge,
    /// Bytes of posts of trajectories and of their answers being held.
    pub body_bytes_in_flight: IntGauge,
    /// Bytes of other bodies and answers being held.
    pub control_bytes_in_flight: IntGauge,
    /// Bytes of pages of samples being held.
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
    /// Scrapes whose ledger gauges are those of the scrape before.
    pub gauge_failures: IntCounter,
    store: StoreMetrics,
    policies: LabelSet,
    reasons: LabelSet,
}

/// What the store reports of its commits.
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

/// One of a number of things that go on; leaves the count however it ends, also when its future is dropped.
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
#[derive(Clone, Copy, Debug)]
pub struct Ledger<'l> {
    /// The policy.
    pub policy: &'l str,
    /// Counts by state.
    pub tallies: &'l BTreeMap<String, i64>,
    /// Rollouts received less the sum of all states.
    pub unconserved: i64,
}

/// A bounded set of label values, given out in the order in which something happened to them.
#[derive(Debug)]
struct LabelSet {
    known: Mutex<BTreeSet<String>>,
    max: usize,
}

impl LabelSet {
    fn new(max: usize) -> Self {
        Self { known: Mutex::default(), max }
    }

    /// The label of a value: itself where it has a label or one is free.
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

    /// Counters of a fixed set, all of them there from the start, so that the first event is an increase.
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
    /// All metrics, at zero.
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
                "Seconds from a request's head to its answer's head; long polls include the wait.",
                LATENCY_BUCKETS_S,
                route,
            ),
            request_bytes: r.counters("forebay_request_bytes_total", "Body bytes received, as sent.", route),
            response_bytes: r.counters("forebay_response_bytes_total", "Body bytes answered, as sent.", route),
            requests_in_flight: r.gauge("forebay_requests_in_flight", "Requests being served."),
            body_bytes_in_flight: r.gauge(
                "forebay_body_bytes_in_flight",
                "Bytes of posts of trajectories and of their answers being held (limits.inflight_bytes).",
            ),
            control_bytes_in_flight: r.gauge(
                "forebay_control_bytes_in_flight",
                "Bytes of other bodies, and of other long answers, being held (limits.control_bytes).",
            ),
            samples_bytes_in_flight: r.gauge(
                "forebay_samples_bytes_in_flight",
                "Bytes of pages of samples being held (limits.samples_bytes).",
            ),
            rollouts: r.counters(
                "forebay_rollouts_total",
                "Rollouts received, without duplicates.",
                &["policy", "verdict"],
            ),
            duplicates: r.counters("forebay_duplicates_total", "Rollouts recognised as already stored.", policy),
            tokens_received: r.counters("forebay_tokens_received_total", "Tokens of rollouts received.", policy),
            dropped: r.counters("forebay_dropped_total", "Rollouts and groups taken out, by rule.", by_reason),
            decided: r.counters("forebay_groups_decided_total", "Groups decided.", by_state),
            filter_failures: r.counters(
                "forebay_filter_failures_total",
                "Filters that could not be evaluated and did not match.",
                &["policy", "filter"],
            ),
            filters_over_budget: r.counters(
                "forebay_filters_over_budget_total",
                "Filters that were not evaluated on a rollout, because that might have cost more than it may.",
                &["policy", "filter"],
            ),
            warnings: r.counters(
                "forebay_ingest_warnings_total",
                "Warnings in receipts of new rollouts, by their names.",
                &["policy", "warning"],
            ),
            refused: r.counters("forebay_problems_total", "Requests refused, by problem type.", &["type"]),
            admissions: r.counters(
                "forebay_admissions_total",
                "Rollouts that room was asked for before they started.",
                &["policy", "outcome"],
            ),
            auth_failures: r.counters_of(
                "forebay_auth_failures_total",
                "Requests refused because of who asked: by its key, its host or its origin.",
                "reason",
                &AUTH_FAILURES,
            ),
            leases: r.counters("forebay_leases_total", "What became of leases.", &["policy", "event"]),
            tokens_delivered: r.counters("forebay_tokens_delivered_total", "Tokens of batches leased.", policy),
            batch_wait_seconds: r.histograms(
                "forebay_batch_wait_seconds",
                "Seconds that a request for a batch waited until it was granted.",
                LATENCY_BUCKETS_S,
                policy,
            ),
            group_staleness: r.histograms(
                "forebay_batch_staleness_versions",
                "Versions that the oldest trained token of a new batch is behind.",
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
                "Rollouts that room is reserved for and that are not posted.",
                policy,
            ),
            ledger_live_bytes: r.gauges(
                "forebay_ledger_live_bytes",
                "Stored payload bytes of what is not yet trained.",
                policy,
            ),
            ledger_assumed_versions: r.gauges(
                "forebay_ledger_assumed_versions",
                "Rollouts whose producer sent no version.",
                policy,
            ),
            ledger_unconserved: r.gauges(
                "forebay_ledger_unconserved",
                "Rollouts received less the sum of all states: anything but 0 is a bug.",
                policy,
            ),
            policy_version: r.gauges("forebay_policy_version", "Current weight version.", policy),
            sweep_seconds: r.histogram("forebay_sweep_seconds", "Seconds of one sweep.", LATENCY_BUCKETS_S),
            sweep_failures: r.counter("forebay_sweep_failures_total", "Sweeps that failed."),
            gauge_failures: r.counter(
                "forebay_gauge_failures_total",
                "Scrapes for which the ledger could not be read: its gauges are older.",
            ),
            store: StoreMetrics::register(&r),
            policies: LabelSet::new(POLICY_LABELS_MAX),
            reasons: LabelSet::new(REASON_LABELS_MAX),
            registry,
        }
    }

    /// The part that a store reports to.
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

    /// A rollout was recognised.
    pub fn duplicate(&self, policy: &str) {
        self.duplicates.with_label_values(&[self.policies.bound(policy)]).inc();
    }

    /// A rule took out a rollout or group.
    pub fn dropped(&self, policy: &str, reason: &str) {
        self.dropped_many(policy, reason, 1);
    }

    /// A rule took out so many rollouts or groups.
    pub fn dropped_many(&self, policy: &str, reason: &str, count: u64) {
        if count > 0 {
            let labels = [self.policies.bound(policy), self.reasons.bound(reason)];
            self.dropped.with_label_values(&labels).inc_by(count);
        }
    }

    /// Counts one who waits for a batch or a version, until the answer is dropped.
    #[must_use]
    pub fn waiting(&self) -> Counted<'_> {
        Counted::enter(&self.waiters)
    }

    /// Counts a request being served, until the answer is dropped.
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

    /// A filter was not evaluated, because that might have cost too much.
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

    /// A request was refused because of who asked; the reason is one of a fixed set.
    pub fn auth_failed(&self, reason: &str) {
        self.auth_failures.with_label_values(&[reason]).inc();
    }

    /// Something happened to a lease: granted, held, redelivered, acked, nacked, expired, revoked.
    pub fn lease(&self, policy: &str, event: &str, count: u64) {
        self.leases.with_label_values(&[self.policies.bound(policy), event]).inc_by(count);
    }

    /// Room was granted, as much as asked for or less.
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

    /// A batch was acked so long after its cut.
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

    /// States of the ledgers of policies with traffic, as of now.
    ///
    /// Policies get labels in this order; those beyond the bound are added up under a common label.
    pub fn ledgers<'l>(&self, ledgers: impl Iterator<Item = Ledger<'l>>) {
        let mut others: BTreeMap<String, i64> = BTreeMap::new();
        // A surplus in one policy must not hide what another has lost.
        let mut others_unconserved = 0;
        let mut any_others = false;
        for Ledger { policy, tallies, unconserved } in ledgers {
            let label = self.policies.bound(policy);
            if label == OTHER {
                any_others = true;
                others_unconserved += unconserved.abs();
                for (name, value) in tallies {
                    *others.entry(name.clone()).or_default() += value;
                }
            } else {
                self.set_ledger(label, tallies, unconserved);
            }
        }
        if any_others {
            self.set_ledger(OTHER, &others, others_unconserved);
        }
    }

    fn set_ledger(&self, policy: &str, tallies: &BTreeMap<String, i64>, unconserved: i64) {
        for (name, &value) in tallies {
            match name.split_once('.') {
                Some(("rollout", state)) => self.ledger_rollouts.with_label_values(&[policy, state]).set(value),
                Some(("group", state)) => self.ledger_groups.with_label_values(&[policy, state]).set(value),
                Some(("batch", state)) => self.ledger_batches.with_label_values(&[policy, state]).set(value),
                _ => {}
            }
        }
        let value = |name: &str| tallies.get(name).copied().unwrap_or(0);
        self.ledger_received.with_label_values(&[policy]).set(value("received"));
        self.ledger_live_bytes.with_label_values(&[policy]).set(value("live_bytes"));
        self.ledger_reserved.with_label_values(&[policy]).set(value("reserved"));
        self.ledger_assumed_versions.with_label_values(&[policy]).set(value("assumed_version"));
        self.ledger_unconserved.with_label_values(&[policy]).set(unconserved);
    }

    /// A policy's version, as of now. Policies without traffic of any kind have no label, and versions of several
    /// policies have no sum.
    pub fn version(&self, policy: &str, version: i64) {
        let has_label = if version > 0 { self.policies.bound(policy) == policy } else { self.policies.has(policy) };
        if has_label && policy != OTHER {
            self.policy_version.with_label_values(&[policy]).set(version);
        }
    }

    /// Everything in Prometheus' text format.
    pub fn render(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
