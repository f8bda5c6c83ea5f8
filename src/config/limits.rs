//! The table `[limits]`: how much one process holds, and how long it waits.

use std::time::Duration;

use forebay_api::http::{body::BodyLimits, budgets::ByteBudgets};
use forebay_domain::{surrogates::LoneSurrogates, trajectory::TrajectoryLimits};
use forebay_wire::Violation;
use serde::Deserialize;

use crate::server::ServerLimits;

/// The longest timeout: a day. A longer time for one request is a typing error, and very long times overflow a clock.
const SECONDS_MAX: u64 = 86_400;

/// The most connections and waiters: more than a process has file descriptors, and fewer than a semaphore can count.
const CONNECTIONS_MAX: u64 = 1_000_000;

/// The largest value of `body_bytes`. A rollout is one value in the database, which must have less than 10^9 bytes in
/// SQLite, and its text is one value of an Arrow column, which must have less than 2^31 bytes. An unpacked rollout is
/// half as large again as its body.
const BODY_BYTES_MAX: u64 = 512 << 20;

/// The largest byte budget: 1 TiB. It is more memory than a machine has, and 2^30 permits of one KiB can count it.
pub(super) const BUDGET_BYTES_MAX: u64 = 1 << 40;

/// The most tokens of a trajectory: the offsets of Arrow lists have 31 bits.
const TOKENS_MAX: u64 = i32::MAX as u64;

/// The most segments of a trajectory. Each segment is a row of the samples.
const SEGMENTS_MAX: u64 = 1 << 20;

/// The most policies: far more than the rules that fit in memory.
const POLICIES_MAX: u64 = 1_000_000;

/// Limits whose check depends on other limits, which may themselves be invalid.
const RELATED: [&str; 3] = ["/limits/inflight_bytes", "/limits/samples_bytes", "/limits/connections"];

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Limits {
    connections: u64,
    header_timeout_s: u64,
    body_bytes: u64,
    body_timeout_s: u64,
    inflight_bytes: u64,
    control_bytes: u64,
    samples_bytes: u64,
    trajectory_tokens: u64,
    trajectory_segments: u64,
    metadata_bytes: u64,
    policies: u64,
    waiters: u64,
    waiters_per_key: u64,
    waiter_poll_interval_ms: u64,
    stall_timeout_s: u64,
    drain_s: u64,
    shutdown_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4_096,
            header_timeout_s: 10,
            body_bytes: 64 << 20,
            body_timeout_s: 120,
            inflight_bytes: 192 << 20,
            control_bytes: 32 << 20,
            samples_bytes: 256 << 20,
            trajectory_tokens: 2_000_000,
            trajectory_segments: 4_096,
            metadata_bytes: 256 << 10,
            policies: 1_024,
            waiters: 1_024,
            waiters_per_key: 512,
            waiter_poll_interval_ms: 500,
            stall_timeout_s: 60,
            drain_s: 0,
            shutdown_s: 30,
        }
    }
}

impl Limits {
    pub(super) fn check(&self, violations: &mut Vec<Violation>) {
        let is_complete = !violations.iter().any(|violation| violation.pointer.starts_with("/limits"));
        let mut within = |name: &str, value: u64, min: u64, max: u64| {
            let pointer = format!("/limits/{name}");
            // If any limit could not be read, limits that depend on other limits are not reported, because the error
            // may only be a consequence.
            let is_judged = is_complete || !RELATED.contains(&pointer.as_str());
            if is_judged && value < min {
                violations.push(Violation { pointer, detail: format!("must be at least {min}, but is {value}") });
            } else if value > max {
                violations.push(Violation { pointer, detail: format!("must be at most {max}, but is {value}") });
            }
        };
        within("header_timeout_s", self.header_timeout_s, 1, SECONDS_MAX);
        within("body_bytes", self.body_bytes, 1_024, BODY_BYTES_MAX);
        within("stall_timeout_s", self.stall_timeout_s, 1, SECONDS_MAX);
        within("body_timeout_s", self.body_timeout_s, 1, SECONDS_MAX);
        within("drain_s", self.drain_s, 0, SECONDS_MAX);
        within("shutdown_s", self.shutdown_s, 0, SECONDS_MAX);
        // A compressed body is held twice: as received and decompressed.
        within("inflight_bytes", self.inflight_bytes, self.body_bytes.saturating_mul(2), BUDGET_BYTES_MAX);
        // The budget must hold a few of the largest control bodies and of the largest list pages at the same time.
        within("control_bytes", self.control_bytes, 4 << 20, BUDGET_BYTES_MAX);
        // The rows of one rollout are read together and held four times: as stored, unpacked, as rows and as the
        // response.
        within("samples_bytes", self.samples_bytes, self.body_bytes.saturating_mul(4), BUDGET_BYTES_MAX);
        within("trajectory_tokens", self.trajectory_tokens, 1, TOKENS_MAX);
        within("trajectory_segments", self.trajectory_segments, 1, SEGMENTS_MAX);
        within("metadata_bytes", self.metadata_bytes, 0, BODY_BYTES_MAX);
        within("policies", self.policies, 1, POLICIES_MAX);
        within("waiters", self.waiters, 1, CONNECTIONS_MAX / 4);
        within("waiters_per_key", self.waiters_per_key, 1, CONNECTIONS_MAX);
        within("waiter_poll_interval_ms", self.waiter_poll_interval_ms, 1, SECONDS_MAX * 1_000);
        // A request that waits for a batch, a version or work holds a connection, and acks and heartbeats need free ones.
        within("connections", self.connections, self.waiters.saturating_mul(4), CONNECTIONS_MAX);
    }

    pub(super) fn server(&self) -> ServerLimits {
        ServerLimits {
            connections_max: self.connections as usize,
            header_timeout: Duration::from_secs(self.header_timeout_s),
            stall_timeout: Duration::from_secs(self.stall_timeout_s),
            drain: Duration::from_secs(self.drain_s),
            shutdown_timeout: Duration::from_secs(self.shutdown_s),
        }
    }

    pub(super) fn bodies(&self) -> BodyLimits {
        BodyLimits {
            body_bytes_max: self.body_bytes as usize,
            budgets: ByteBudgets {
                posts: self.inflight_bytes as usize,
                control: self.control_bytes as usize,
                samples: self.samples_bytes as usize,
            },
            read_timeout: Duration::from_secs(self.body_timeout_s),
        }
    }

    pub(super) fn trajectories(&self, lone_surrogates: LoneSurrogates) -> TrajectoryLimits {
        TrajectoryLimits {
            tokens_max: self.trajectory_tokens as usize,
            segments_max: self.trajectory_segments as usize,
            metadata_bytes_max: self.metadata_bytes as usize,
            lone_surrogates,
        }
    }

    pub(super) fn policies_max(&self) -> u32 {
        self.policies as u32
    }

    pub(super) fn waiters_max(&self) -> usize {
        self.waiters as usize
    }

    pub(super) fn waiters_per_caller_max(&self) -> usize {
        self.waiters_per_key as usize
    }

    pub(super) fn waiter_poll_interval(&self) -> Duration {
        Duration::from_millis(self.waiter_poll_interval_ms)
    }
}
