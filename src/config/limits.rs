//! The table `[limits]`: what one process is willing to hold, and how long it waits.

use std::time::Duration;

use forebay_client::wire::Violation;
use serde::Deserialize;

use crate::{
    api::{BodyLimits, ByteBudgets},
    buffer::trajectory::TrajectoryLimits,
    server::ServerLimits,
};

/// Seconds of a day: a longer time for one request is a typing error, and far longer ones cannot be added to a clock.
const SECONDS_MAX: u64 = 86_400;

/// Connections, and waiters: more than a process has descriptors for, and fewer than a semaphore counts.
const CONNECTIONS_MAX: u64 = 1_000_000;

/// The most that `body_bytes` may be. A rollout is one value in the database, which has less than 10^9 bytes in SQLite,
/// and a text of it is one value of an Arrow column, which has less than 2^31; unpacked it is half as long again.
const BODY_BYTES_MAX: u64 = 512 << 20;

/// Bytes of a budget: 1 TiB, more than a machine has memory, and what 2^30 permits of a kilobyte count.
const BUDGET_BYTES_MAX: u64 = 1 << 40;

/// Tokens of a trajectory: offsets of Arrow's lists have 31 bits.
const TOKENS_MAX: u64 = i32::MAX as u64;

/// Segments of a trajectory: each is a row of its samples.
const SEGMENTS_MAX: u64 = 1 << 20;

/// Policies: far more than a service can have rules in memory for.
const POLICIES_MAX: u64 = 1_000_000;

/// Limits that are checked against others, which may be wrong themselves.
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
    look_ms: u64,
    stall_timeout_s: u64,
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
            look_ms: 500,
            stall_timeout_s: 60,
            shutdown_s: 30,
        }
    }
}

impl Limits {
    pub(super) fn check(&self, violations: &mut Vec<Violation>) {
        let is_complete = !violations.iter().any(|violation| violation.pointer.starts_with("/limits"));
        let mut within = |name: &str, value: u64, min: u64, max: u64| {
            let pointer = format!("/limits/{name}");
            // Beside a value that could not be read, what is related to it cannot be judged.
            let is_judged = is_complete || !RELATED.contains(&pointer.as_str());
            if is_judged && value < min {
                violations.push(Violation { pointer, detail: format!("must be at least {min}, is {value}") });
            } else if value > max {
                violations.push(Violation { pointer, detail: format!("must be at most {max}, is {value}") });
            }
        };
        within("header_timeout_s", self.header_timeout_s, 1, SECONDS_MAX);
        within("body_bytes", self.body_bytes, 1_024, BODY_BYTES_MAX);
        within("stall_timeout_s", self.stall_timeout_s, 1, SECONDS_MAX);
        within("body_timeout_s", self.body_timeout_s, 1, SECONDS_MAX);
        within("shutdown_s", self.shutdown_s, 0, SECONDS_MAX);
        // A compressed body is held twice: as sent, and expanded.
        within("inflight_bytes", self.inflight_bytes, self.body_bytes.saturating_mul(2), BUDGET_BYTES_MAX);
        // The longest control body and the longest page of a list, a few of each at once.
        within("control_bytes", self.control_bytes, 4 << 20, BUDGET_BYTES_MAX);
        // The rows of one rollout are read at once: stored, unpacked, as rows and as an answer.
        within("samples_bytes", self.samples_bytes, self.body_bytes.saturating_mul(4), BUDGET_BYTES_MAX);
        within("trajectory_tokens", self.trajectory_tokens, 1, TOKENS_MAX);
        within("trajectory_segments", self.trajectory_segments, 1, SEGMENTS_MAX);
        within("metadata_bytes", self.metadata_bytes, 0, BODY_BYTES_MAX);
        within("policies", self.policies, 1, POLICIES_MAX);
        within("waiters", self.waiters, 1, CONNECTIONS_MAX / 3);
        within("waiters_per_key", self.waiters_per_key, 1, CONNECTIONS_MAX);
        within("look_ms", self.look_ms, 1, SECONDS_MAX * 1_000);
        // Who waits for a batch or a version holds a connection: acks and heartbeats need some that are free.
        within("connections", self.connections, self.waiters.saturating_mul(3), CONNECTIONS_MAX);
    }

    pub(super) fn server(&self) -> ServerLimits {
        ServerLimits {
            connections_max: self.connections as usize,
            header_timeout: Duration::from_secs(self.header_timeout_s),
            stall_timeout: Duration::from_secs(self.stall_timeout_s),
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

    pub(super) fn trajectories(&self) -> TrajectoryLimits {
        TrajectoryLimits {
            tokens_max: self.trajectory_tokens as usize,
            segments_max: self.trajectory_segments as usize,
            metadata_bytes_max: self.metadata_bytes as usize,
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

    pub(super) fn look_every(&self) -> Duration {
        Duration::from_millis(self.look_ms)
    }
}
