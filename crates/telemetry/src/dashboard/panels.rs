//! The panels of the dashboard, as a table: each has a doc comment, which is its description, a title, a look, a unit,
//! and queries with their names in the legend.
//!
//! Separate from how panels are drawn, so that each is one entry, as metrics are.

use super::{Look, Panel, Row};

/// Makes the table. A line in brackets has panels of the same width.
macro_rules! rows {
    ($($row:literal $([$(
        $(#[doc = $about:literal])+
        $title:literal = $Look:ident $(($($colour:literal),+))? in $unit:literal { $($query:expr => $legend:literal,)+ }
    )+])+)+) => {
        &[$(Row {
            title: $row,
            lines: &[$(&[$(Panel {
                look: Look::$Look $(($($colour),+))?,
                title: $title,
                unit: $unit,
                about: concat!($($about),+).trim_ascii_start(),
                queries: &[$(($query, $legend)),+],
            }),+]),+],
        }),+]
    };
}

pub(super) const ROWS: &[Row] = rows! {
    "At a glance"
    [
        /// Processes whose last scrape succeeded.
        "Replicas up" = Alarm("red", "green") in "none" {
            r#"sum(up{job="forebay"})"# => "",
        }
        /// Rollouts received less the sum of all states. Any value other than 0 is a bug in Forebay.
        "Unconserved rollouts" = Alarm("green", "red") in "none" {
            r#"sum(max by (policy) (abs(forebay_ledger_unconserved{policy=~"$policy"})))"# => "",
        }
        /// Decided groups that wait for a batch.
        "Groups ready" = Number("blue") in "none" {
            r#"sum (max by (policy) (forebay_ledger_groups{policy=~"$policy", state="ready"}))"# => "",
        }
        /// Batches that trainers have leased.
        "Batches leased" = Number("blue") in "none" {
            r#"sum (max by (policy) (forebay_ledger_batches{policy=~"$policy", state="leased"}))"# => "",
        }
        /// Not delivered until an operator readmits or discards them.
        "Rollouts in quarantine" = Alarm("green", "orange") in "none" {
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="quarantined"}))"# => "",
        }
        /// Current version of every policy.
        "Weight version" = Number("blue") in "none" {
            r#"max by (policy) (forebay_policy_version{policy=~"$policy"})"# => "{{policy}}",
        }
    ]

    "Throughput in and out"
    [
        /// New rollouts per second: kept and masked ones join groups, dropped and late ones do not. Duplicates were
        /// already stored and changed nothing.
        "Rollouts received by verdict" = Stack in "si:rollouts/s" {
            r#"sum by (verdict) (rate(forebay_rollouts_total{policy=~"$policy"}[$__rate_interval]))"# => "{{verdict}}",
            r#"sum(rate(forebay_duplicates_total{policy=~"$policy"}[$__rate_interval]))"# => "duplicate",
        }
        /// Tokens of rollouts received, and of batches leased. A batch that is delivered again counts again.
        "Tokens in and out" = Lines in "si:tokens/s" {
            r#"sum(rate(forebay_tokens_received_total{policy=~"$policy"}[$__rate_interval]))"# => "in",
            r#"sum(rate(forebay_tokens_delivered_total{policy=~"$policy"}[$__rate_interval]))"# => "out",
        }
        /// Bytes of request and answer bodies as sent, compressed or not, of all policies.
        "Body bytes in and out" = Lines in "Bps" {
            "sum(rate(forebay_request_bytes_total[$__rate_interval]))" => "in",
            "sum(rate(forebay_response_bytes_total[$__rate_interval]))" => "out",
        }
    ]

    "From received to trained"
    [
        /// Every rollout received is in exactly one state, here or on the right. Rollouts whose ledger rows have
        /// expired are only counted as forgotten.
        "Where the rollouts are" = Bars in "si:rollouts" {
            r#"sum (max by (policy) (forebay_ledger_received{policy=~"$policy"}))"# => "received",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="open"}))"# => "open",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="ready"}))"# => "ready",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="leased"}))"# => "leased",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="returned"}))"# => "returned",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="trained"}))"# => "trained",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="checkpointed"}))"# => "checkpointed",
        }
        /// Rollouts that will not be trained (quarantined ones may be readmitted), and forgotten ones, whose ledger
        /// rows have expired, trained or not.
        "Rollouts not trained or forgotten" = Bars in "si:rollouts" {
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="dropped"}))"# => "dropped",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="late"}))"# => "late",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="discarded"}))"# => "discarded",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="stale"}))"# => "stale",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="quarantined"}))"# => "quarantined",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="forgotten"}))"# => "forgotten",
        }
        /// Open groups wait for rollouts; ready groups wait for a batch. Batched, stale and discarded groups are no
        /// longer counted when their ledger rows expire.
        "Groups by state" = Lines in "si:groups" {
            r#"sum by (state) (max by (policy, state) (forebay_ledger_groups{policy=~"$policy"}))"# => "{{state}}",
        }
    ]
    [
        /// Groups per second that became ready or were discarded.
        "Groups decided" = Stack in "si:groups/s" {
            r#"sum by (state) (rate(forebay_groups_decided_total{policy=~"$policy"}[$__rate_interval]))"# => "{{state}}",
        }
        /// Stored payload bytes of rollouts that are not yet trained. At backlog.max_bytes new groups are refused with
        /// 429.
        "Backlog" = Lines in "bytes" {
            r#"max by (policy) (forebay_ledger_live_bytes{policy=~"$policy"})"# => "{{policy}}",
        }
    ]

    "Drops"
    [
        /// Rollouts and groups dropped per second, by filter or built-in reason. A group counts once, whatever its
        /// size.
        "Drops by reason" = Stack in "si:drops/s" {
            r#"sum by (reason) (rate(forebay_dropped_total{policy=~"$policy"}[$__rate_interval]))"# => "{{reason}}",
        }
        /// Dropped and late rollouts in all that arrived, by policy.
        "Share of rollouts dropped" = Lines in "percentunit" {
            r#"sum by (policy) (rate(forebay_rollouts_total{policy=~"$policy", verdict=~"dropped|late"}[$__rate_interval])) / sum by (policy) (rate(forebay_rollouts_total{policy=~"$policy"}[$__rate_interval]))"# => "{{policy}}",
        }
        /// Filters per second that could not be evaluated on a rollout or group, and therefore did not match; and
        /// warnings per second in the receipts of new rollouts, by their names.
        "Filter failures and warnings" = Lines in "cps" {
            r#"sum by (policy, filter) (rate(forebay_filter_failures_total{policy=~"$policy"}[$__rate_interval]))"# => "{{policy}} {{filter}}",
            r#"sum by (policy, filter) (rate(forebay_filters_over_budget_total{policy=~"$policy"}[$__rate_interval]))"# => "{{policy}} {{filter}} over budget",
            r#"sum by (policy, warning) (rate(forebay_ingest_warnings_total{policy=~"$policy"}[$__rate_interval]))"# => "{{policy}} {{warning}}",
        }
    ]

    "Staleness"
    [
        /// Versions that the oldest trained token of a batch is behind the current version at delivery.
        "Staleness of new batches" = Lines in "si:versions" {
            r#"histogram_quantile(0.5, sum by (le) (rate(forebay_batch_staleness_versions_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p50",
            r#"histogram_quantile(0.9, sum by (le) (rate(forebay_batch_staleness_versions_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p90",
            r#"histogram_quantile(0.99, sum by (le) (rate(forebay_batch_staleness_versions_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p99",
        }
        /// Batches delivered, by how many versions their oldest trained token is behind.
        "Distribution of staleness" = Heatmap in "si:versions" {
            r#"sum by (le) (increase(forebay_batch_staleness_versions_bucket{policy=~"$policy"}[$__rate_interval]))"# => "{{le}}",
        }
        /// Rollouts whose producer sent no weight version, or whose engine did not say it, so that the current one was
        /// assumed, and rollouts that went stale before they were delivered.
        "Assumed versions and stale rollouts" = Lines in "si:rollouts" {
            r#"sum (max by (policy) (forebay_ledger_assumed_versions{policy=~"$policy"}))"# => "assumed version",
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="stale"}))"# => "stale",
        }
    ]

    "Waiting for batches"
    [
        /// Seconds that a trainer's request waited until a batch was granted. Long waits mean that agents are slower
        /// than the trainer. Requests that ended without a batch do not count.
        "Wait for a batch" = Lines in "s" {
            r#"histogram_quantile(0.5, sum by (policy, le) (rate(forebay_batch_wait_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "{{policy}} p50",
            r#"histogram_quantile(0.99, sum by (policy, le) (rate(forebay_batch_wait_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "{{policy}} p99",
        }
        /// Batches leased per second, including repeated deliveries.
        "Batches granted" = Lines in "si:batches/s" {
            r#"sum by (policy) (rate(forebay_batch_wait_seconds_count{policy=~"$policy"}[$__rate_interval]))"# => "{{policy}}",
        }
        /// Requests that wait for a batch now, of all policies.
        "Requests waiting" = Lines in "none" {
            "sum by (instance) (forebay_waiters)" => "{{instance}}",
        }
        /// Groups that environments lack until the next batch has their min_share; empty without shares. GET
        /// /policies/{p} shows their ready and open groups.
        "Environments waited for" = Lines in "none" {
            r#"max by (policy, environment) (forebay_environment_needed_groups{policy=~"$policy"}) - max by (policy, environment) (forebay_environment_ready_groups{policy=~"$policy"}) > 0"# => "{{policy}} {{environment}}",
        }
    ]

    "Leases"
    [
        /// Events of leases per second. Expired and redelivered leases mean that trainers crash or take longer than
        /// lease.ttl_s.
        "Lease events" = Lines in "si:leases/s" {
            r#"sum by (event) (rate(forebay_leases_total{policy=~"$policy"}[$__rate_interval]))"# => "{{event}}",
        }
        /// Seconds from the cut of a batch to its ack, including failed deliveries.
        "Age of batches at ack" = Lines in "s" {
            r#"histogram_quantile(0.5, sum by (le) (rate(forebay_batch_age_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p50",
            r#"histogram_quantile(0.99, sum by (le) (rate(forebay_batch_age_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p99",
        }
        /// Leased batches are with trainers, returned ones wait to be leased again, trained ones for the checkpoint
        /// that settles them.
        "Batches by state" = Lines in "si:batches" {
            r#"sum by (state) (max by (policy, state) (forebay_ledger_batches{policy=~"$policy"}))"# => "{{state}}",
        }
        /// Rollouts, groups and batches that wait for an operator.
        "Quarantined" = Lines in "none" {
            r#"sum (max by (policy) (forebay_ledger_rollouts{policy=~"$policy", state="quarantined"}))"# => "rollouts",
            r#"sum (max by (policy) (forebay_ledger_groups{policy=~"$policy", state="quarantined"}))"# => "groups",
            r#"sum (max by (policy) (forebay_ledger_batches{policy=~"$policy", state="quarantined"}))"# => "batches",
        }
    ]

    "Store"
    [
        /// Transactions per second, including failed ones.
        "Commits" = Lines in "si:commits/s" {
            "sum by (instance) (rate(forebay_commit_seconds_count[$__rate_interval]))" => "{{instance}}",
        }
        /// Seconds of one commit; every answer to a write waits for one.
        "Commit time" = Lines in "s" {
            "histogram_quantile(0.5, sum by (le) (rate(forebay_commit_seconds_bucket[$__rate_interval])))" => "p50",
            "histogram_quantile(0.99, sum by (le) (rate(forebay_commit_seconds_bucket[$__rate_interval])))" => "p99",
        }
        /// Operations that shared one commit and its fsync, on average. At 64 a commit is full. Always 1 on Postgres.
        "Operations per commit" = Lines in "none" {
            "sum by (instance) (rate(forebay_commit_commands_sum[$__rate_interval])) / sum by (instance) (rate(forebay_commit_commands_count[$__rate_interval]))" => "{{instance}}",
        }
    ]
    [
        /// Size of SQLite's log at the last commit. It is truncated at 64 MiB unless a reader still needs it; 0 on
        /// Postgres.
        "Write-ahead log" = Lines in "bytes" {
            "max by (instance) (forebay_wal_bytes)" => "{{instance}}",
        }
        /// Commits and sweeps per second that failed. Callers of a failed commit are answered 503 and repeat.
        "Failed commits and sweeps" = Lines in "cps" {
            "sum(rate(forebay_commit_failures_total[$__rate_interval]))" => "commits",
            "sum(rate(forebay_sweep_failures_total[$__rate_interval]))" => "sweeps",
        }
        /// Seconds of one sweep; leases expire and groups time out in sweeps, four a second.
        "Sweep time" = Lines in "s" {
            "histogram_quantile(0.5, sum by (le) (rate(forebay_sweep_seconds_bucket[$__rate_interval])))" => "p50",
            "histogram_quantile(0.99, sum by (le) (rate(forebay_sweep_seconds_bucket[$__rate_interval])))" => "p99",
        }
    ]

    "HTTP"
    [
        /// Requests answered per second, of all policies.
        "Requests by route" = Lines in "reqps" {
            "sum by (method, route) (rate(forebay_requests_total[$__rate_interval]))" => "{{method}} {{route}}",
        }
        /// Requests answered per second, of all policies.
        "Requests by status" = Stack in "reqps" {
            "sum by (status) (rate(forebay_requests_total[$__rate_interval]))" => "{{status}}",
        }
        /// Seconds from a request's head to its answer's head. Routes that long-poll are left out: their waits are not
        /// latency.
        "Latency p99 by route" = Lines in "s" {
            r#"histogram_quantile(0.99, sum by (method, route, le) (rate(forebay_request_seconds_bucket{route!~"/batches|/policies/.policy."}[$__rate_interval])))"# => "{{method}} {{route}}",
        }
    ]
    [
        /// Requests refused per second, by the type of the problem document. Single lines that a bulk answer refuses do
        /// not count.
        "Problems by type" = Stack in "cps" {
            "sum by (type) (rate(forebay_problems_total[$__rate_interval]))" => "{{type}}",
            "sum by (reason) (rate(forebay_auth_failures_total[$__rate_interval]))" => "not let in: {{reason}}",
        }
        /// Requests being served now, including long polls.
        "Requests in flight" = Lines in "none" {
            "sum by (instance) (forebay_requests_in_flight)" => "{{instance}}",
        }
        /// Bytes of the budgets in use: posts and their answers (limits.inflight_bytes), other calls
        /// (limits.control_bytes), samples (limits.samples_bytes), calls of agents (sessions.inflight_bytes). At their
        /// limits the first two are answered 503, and readers of samples and agents wait.
        "Bytes held for clients" = Lines in "bytes" {
            "sum by (instance) (forebay_body_bytes_in_flight)" => "posts, {{instance}}",
            "sum by (instance) (forebay_control_bytes_in_flight)" => "other calls, {{instance}}",
            "sum by (instance) (forebay_samples_bytes_in_flight)" => "samples, {{instance}}",
            "sum by (instance) (forebay_agent_call_bytes_in_flight)" => "calls of agents, {{instance}}",
        }
    ]

    "Process"
    [
        /// CPU cores in use.
        "CPU" = Lines in "none" {
            r#"sum by (instance) (rate(process_cpu_seconds_total{job="forebay"}[$__rate_interval]))"# => "{{instance}}",
        }
        /// Resident memory.
        "Memory" = Lines in "bytes" {
            r#"max by (instance) (process_resident_memory_bytes{job="forebay"})"# => "{{instance}}",
        }
        /// Open file descriptors, and the most that may be open.
        "File descriptors" = Lines in "none" {
            r#"max by (instance) (process_open_fds{job="forebay"})"# => "{{instance}}",
            r#"max by (instance) (process_max_fds{job="forebay"})"# => "{{instance}} limit",
        }
    ]

    "Sessions of agents"
    [
        /// Sessions of agents whose calls are recorded.
        "Sessions by state" = Lines in "si:batches" {
            r#"sum by (state) (max by (policy, state) (forebay_ledger_sessions{policy=~"$policy"}))"# => "{{state}}",
        }
        /// Sampled tokens of recorded calls, and those that no segment trains, by reason.
        "Recorded tokens" = Lines in "si:batches" {
            r#"sum (rate(forebay_session_tokens_total{policy=~"$policy"}[$__rate_interval]))"# => "recorded",
            r#"sum by (reason) (rate(forebay_session_tokens_dropped_total{policy=~"$policy"}[$__rate_interval]))"# => "{{reason}}",
        }
        /// Recorded calls, and prompts that differ from what was recorded before them, by what differs first:
        /// reasoning, arguments of tool calls, tokens, the system prompt or tools, or another message.
        "Recorded calls and breaks" = Lines in "si:batches" {
            r#"sum (rate(forebay_session_calls_total{policy=~"$policy"}[$__rate_interval]))"# => "calls",
            r#"sum by (cause) (rate(forebay_session_breaks_total{policy=~"$policy"}[$__rate_interval]))"# => "breaks: {{cause}}",
        }
    ]
    [
        /// How calls ended: recorded, replayed, resumed (in a later attempt of a session), forwarded, or the code of an error.
        "Calls of agents by outcome" = Lines in "si:batches" {
            "sum by (dialect, outcome) (rate(forebay_agent_calls_total[$__rate_interval]))" => "{{dialect}} {{outcome}}",
            "sum (forebay_agent_calls_in_flight)" => "in flight",
        }
        /// Seconds that recording a call adds to the time in which its engine samples the answer. In the mode exact,
        /// they contain the request that parses the answer.
        "Time added to calls" = Lines in "s" {
            "histogram_quantile(0.5, sum by (le) (rate(forebay_agent_call_added_seconds_bucket[$__rate_interval])))" => "p50",
            "histogram_quantile(0.99, sum by (le) (rate(forebay_agent_call_added_seconds_bucket[$__rate_interval])))" => "p99",
        }
        /// Whether the answers of each engine can be recorded (1), what engines did not answer, and calls that they
        /// aborted.
        "Inference engines" = Lines in "short" {
            "min by (upstream) (forebay_upstream_ready)" => "ready: {{upstream}}",
            "sum by (upstream, failure) (rate(forebay_upstream_failures_total[$__rate_interval]))" => "{{upstream}}: {{failure}}",
            "sum by (upstream) (rate(forebay_upstream_aborts_total[$__rate_interval]))" => "{{upstream}}: aborts",
        }
    ]
    [
        /// Rollouts of sessions that a teacher was asked to score, by outcome. If one is not scored, its finish is
        /// refused and can be repeated.
        "Rollouts scored by teachers" = Lines in "si:batches" {
            r#"sum by (outcome) (rate(forebay_teacher_rollouts_total{policy=~"$policy"}[$__rate_interval]))"# => "{{outcome}}",
        }
        /// Time that teachers took for all segments of a rollout.
        "Time of teachers" = Lines in "s" {
            r#"histogram_quantile(0.5, sum by (le) (rate(forebay_teacher_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p50",
            r#"histogram_quantile(0.99, sum by (le) (rate(forebay_teacher_seconds_bucket{policy=~"$policy"}[$__rate_interval])))"# => "p99",
        }
        /// How far the log-probabilities of audited calls are from what their engine reports for the same ids, in nats
        /// (90% of calls are below), and how many audited calls differ too much.
        "Recorded log-probabilities against the engines' scores" = Lines in "short" {
            "histogram_quantile(0.9, sum by (upstream, of, le) (rate(forebay_upstream_audit_difference_nats_bucket[$__rate_interval])))" => "{{upstream}}: {{of}}",
            "sum by (upstream, outcome) (rate(forebay_upstream_audits_total[$__rate_interval]))" => "{{upstream}}: {{outcome}} per second",
        }
    ]

    "Rewards"
    [
        /// Of its kept rollouts.
        "Mean reward of the newest batch" = SignedLines in "none" {
            r#"max by (policy) (forebay_batch_reward_mean{policy=~"$policy"})"# => "{{policy}}",
        }
        /// Of its kept rollouts that have the component. A reward that rises while such a part falls is not what you
        /// want.
        "Means of reward components in the newest batch" = SignedLines in "none" {
            r#"max by (policy, component) (forebay_batch_component_mean{policy=~"$policy"})"# => "{{policy}} {{component}}",
        }
    ]
};
