//! The table `[sessions]`: where agents reach their sessions, how much a session may record, and how long it lasts.

use std::time::Duration;

use axum::http::HeaderValue;
use forebay_agents::{AgentOptions, audits::AuditOptions};
use forebay_bounds::budget::Budget;
use forebay_domain::session::{SessionLimits, TTL_S_MAX};
use forebay_wire::Violation;
use serde::Deserialize;

use super::check_listen;

/// The largest value of `max_calls`. All calls of a session are listed in one answer and assembled together.
const CALLS_MAX: u64 = 65_536;

/// The largest value of `max_session_bytes`. A session is held in memory while it is assembled.
const BYTES_MAX: u64 = 4 << 30;

/// The largest value of `max_in_flight`: more than an agent has sub-agents.
const IN_FLIGHT_MAX: u64 = 4_096;

/// The most bytes of one call: more than a prompt of any model. One call can hold so much of `inflight_bytes`.
const CALL_BYTES_MAX: usize = 32 << 20;

/// The largest value of `inflight_bytes` and of `inflight_answer_bytes`: 1 TiB, more memory than a machine has.
const INFLIGHT_BYTES_MAX: u64 = 1 << 40;

/// The largest value of `hold_s`: a day.
const HOLD_S_MAX: u64 = 86_400;

/// The largest value of `keep_alive_s`: proxies close connections that are silent for longer.
const KEEP_ALIVE_S_MAX: u64 = 300;

/// The largest value of `audit_tokens`: more than any context.
const AUDIT_TOKENS_MAX: u64 = 1 << 24;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Sessions {
    pub(super) listen: Option<String>,
    public_url: Option<String>,
    allowed_origins: Vec<String>,
    inflight_bytes: u64,
    inflight_answer_bytes: u64,
    hold_s: u64,
    keep_alive_s: u64,
    max_calls: u64,
    max_session_bytes: u64,
    max_in_flight: u64,
    ttl_s: u64,
    idle_s: u64,
    audit: f64,
    audit_tokens: u64,
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            listen: None,
            public_url: None,
            allowed_origins: Vec::new(),
            inflight_bytes: 256 << 20,
            inflight_answer_bytes: 256 << 20,
            hold_s: 540,
            keep_alive_s: 10,
            max_calls: 1_024,
            max_session_bytes: 256 << 20,
            max_in_flight: 32,
            ttl_s: 86_400,
            idle_s: 1_800,
            audit: 0.001,
            audit_tokens: 1_024,
        }
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
            ("inflight_bytes", self.inflight_bytes, 1 << 10, INFLIGHT_BYTES_MAX),
            ("inflight_answer_bytes", self.inflight_answer_bytes, 1 << 20, INFLIGHT_BYTES_MAX),
            ("hold_s", self.hold_s, 1, HOLD_S_MAX),
            ("keep_alive_s", self.keep_alive_s, 1, KEEP_ALIVE_S_MAX),
            ("audit_tokens", self.audit_tokens, 1, AUDIT_TOKENS_MAX),
        ] {
            let detail = match value {
                value if value < min => format!("must be at least {min}, but is {value}"),
                value if value > max => format!("must be at most {max}, but is {value}"),
                _ => continue,
            };
            violations.push(Violation { pointer: format!("/sessions/{name}"), detail });
        }
        if !(0.0..=1.0).contains(&self.audit) {
            let detail = format!("must be a share from 0 to 1, but is {}", self.audit);
            violations.push(Violation { pointer: "/sessions/audit".to_owned(), detail });
        }
        if let Some(Err(detail)) = self.listen.as_deref().map(check_listen) {
            violations.push(Violation { pointer: "/sessions/listen".to_owned(), detail });
        }
        for (index, origin) in self.allowed_origins.iter().enumerate() {
            if !is_origin(origin) {
                let detail = format!("`{origin}` is not an origin such as http://localhost:3000, without a path");
                violations.push(Violation { pointer: format!("/sessions/allowed_origins/{index}"), detail });
            }
        }
        if let Some(url) = &self.public_url
            && !is_base_url(url)
        {
            let detail = format!("`{url}` is not a URL such as https://forebay.example/agents, without a query");
            violations.push(Violation { pointer: "/sessions/public_url".to_owned(), detail });
        }
    }

    /// The address that agents are told, without a slash at its end.
    pub(super) fn public_url(&self) -> Option<String> {
        self.public_url.as_ref().map(|url| url.trim_end_matches('/').to_owned())
    }

    /// Checks what depends on the limit of one body.
    pub(super) fn check_budget(&self, body_bytes_max: usize, violations: &mut Vec<Violation>) {
        let bytes = body_bytes_max.min(CALL_BYTES_MAX);
        if self.inflight_bytes < bytes as u64 {
            let detail = format!("must be at least {bytes}, the bytes of one call");
            violations.push(Violation { pointer: "/sessions/inflight_bytes".to_owned(), detail });
        }
    }

    pub(super) fn calls(&self, body_bytes_max: usize, read_timeout: Duration) -> AgentOptions {
        AgentOptions {
            body_bytes_max: body_bytes_max.min(CALL_BYTES_MAX),
            inflight_bytes_max: self.inflight_bytes as usize,
            read_timeout,
            keep_alive: Duration::from_secs(self.keep_alive_s),
            hold: Duration::from_secs(self.hold_s),
            audit: AuditOptions { share: self.audit, tokens_max: self.audit_tokens as usize },
            origins: self.allowed_origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()).collect(),
        }
    }

    /// The budget that the engines share.
    pub(super) fn answers(&self) -> Budget {
        Budget::new(self.inflight_answer_bytes as usize)
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

/// Whether a text is an origin as browsers write it.
fn is_origin(text: &str) -> bool {
    reqwest::Url::parse(text).is_ok_and(|url| url.origin().is_tuple() && url.origin().ascii_serialization() == text)
}

/// Whether a text is a URL to which paths can be appended.
fn is_base_url(text: &str) -> bool {
    reqwest::Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    })
}
