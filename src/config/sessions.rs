//! The table `[sessions]`: how much a session may record, and how long it lasts.

use forebay_client::wire::Violation;
use serde::Deserialize;

use crate::buffer::session::{SessionLimits, TTL_S_MAX};

/// The largest value of `max_calls`. All calls of a session are listed in one answer and assembled together.
const CALLS_MAX: u64 = 65_536;

/// The largest value of `max_session_bytes`. A session is held in memory while it is assembled.
const BYTES_MAX: u64 = 4 << 30;

/// The largest value of `max_in_flight`: more than an agent has sub-agents.
const IN_FLIGHT_MAX: u64 = 4_096;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Sessions {
    max_calls: u64,
    max_session_bytes: u64,
    max_in_flight: u64,
    ttl_s: u64,
    idle_s: u64,
}

impl Default for Sessions {
    fn default() -> Self {
        Self { max_calls: 1_024, max_session_bytes: 256 << 20, max_in_flight: 32, ttl_s: 86_400, idle_s: 1_800 }
    }
}

impl Sessions {
    pub(super) fn check(&self, violations: &mut Vec<Violation>) {
        for (name, value, min, max) in [
            ("max_calls", self.max_calls, 1, CALLS_MAX),
            ("max_session_bytes", self.max_session_bytes, 1 << 10, BYTES_MAX),
            ("max_in_flight", self.max_in_flight, 1, IN_FLIGHT_MAX),
            ("ttl_s", self.ttl_s, 1, TTL_S_MAX),
            ("idle_s", self.idle_s, 1, TTL_S_MAX),
        ] {
            let detail = match value {
                value if value < min => format!("must be at least {min}, but is {value}"),
                value if value > max => format!("must be at most {max}, but is {value}"),
                _ => continue,
            };
            violations.push(Violation { pointer: format!("/sessions/{name}"), detail });
        }
    }

    pub(super) fn limits(&self) -> SessionLimits {
        SessionLimits {
            calls_max: self.max_calls.min(CALLS_MAX) as u32,
            bytes_max: self.max_session_bytes,
            in_flight_max: self.max_in_flight.min(IN_FLIGHT_MAX) as u32,
            ttl_s: self.ttl_s,
            idle_s: self.idle_s,
        }
    }
}
