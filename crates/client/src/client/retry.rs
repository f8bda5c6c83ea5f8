//! Decides whether and when a call is repeated. It is separate from the calls, so that the rule is in one place.

use std::time::Duration;

use super::error::{ClientError, TransportError};

/// How often and for how long a call is repeated, with exponential back-off and full jitter.
///
/// The pause before attempt n + 1 is random between zero and the smaller of `first_pause * 2^(n - 1)` and `pause_max`.
/// If the service sends `Retry-After` with a 429 or 503, in seconds or as a date, that time is added: the service asked
/// for at least this wait, and many clients received the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Number of attempts, including the first; 0 counts as 1.
    pub attempts_max: u32,
    /// Longest pause after the first attempt.
    pub first_pause: Duration,
    /// Upper bound of each pause as the back-off grows.
    pub pause_max: Duration,
    /// Upper bound of the sum of all pauses of one call. A call that would have to wait longer fails at once.
    pub pause_total_max: Duration,
}

impl RetryPolicy {
    /// Makes only one attempt.
    #[must_use]
    pub fn none() -> Self {
        Self { attempts_max: 1, ..Self::default() }
    }

    pub(super) async fn run<T, F>(&self, repeat: Repeat, mut attempt: impl FnMut() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let mut attempts = 1;
        let mut paused = Duration::ZERO;
        loop {
            let failure = match attempt().await {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            let pause = self.pause(attempts, failure.retry_after, rand::random());
            paused = paused.saturating_add(pause);
            if !repeat.allows(failure.effect) || attempts >= self.attempts_max || paused > self.pause_total_max {
                return Err(failure.error);
            }
            tracing::debug!(attempts, pause_ms = pause.as_millis() as u64, error = %failure.error, "repeating the call");
            tokio::time::sleep(pause).await;
            attempts += 1;
        }
    }

    /// Returns the pause after `attempts` attempts; `jitter` is random in [0, 1).
    fn pause(&self, attempts: u32, retry_after: Option<Duration>, jitter: f64) -> Duration {
        let growth = 2_u32.saturating_pow(attempts.saturating_sub(1));
        let back_off = self.first_pause.saturating_mul(growth).min(self.pause_max);
        retry_after.unwrap_or_default().saturating_add(back_off.mul_f64(jitter))
    }
}

impl Default for RetryPolicy {
    /// Ten attempts, with pauses of about twelve seconds in total: enough for the service to restart.
    fn default() -> Self {
        Self {
            attempts_max: 10,
            first_pause: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
            pause_total_max: Duration::from_mins(1),
        }
    }
}

/// Whether a call may be sent again when its outcome is unknown, according to the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// The service recognises the repeat, or the call changes nothing.
    Always,
    /// A repeat would take effect a second time, or would be refused although the first attempt took effect.
    UnlessBegun,
}

impl Repeat {
    pub(super) fn allows(self, effect: Effect) -> bool {
        match effect {
            Effect::NotBegun => true,
            Effect::Unknown => self == Self::Always,
            Effect::Final => false,
        }
    }
}

/// What the service may have done before an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The service did not begin the call, and a repeat may succeed.
    NotBegun,
    /// It is unknown whether the service processed the call.
    Unknown,
    /// The service answered, and a repeat would receive the same answer.
    Final,
}

/// A failed attempt.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: ClientError,
    pub(super) effect: Effect,
    pub(super) retry_after: Option<Duration>,
}

impl Failure {
    pub(super) fn new(error: ClientError, effect: Effect) -> Self {
        Self { error, effect, retry_after: None }
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        let effect = if error.is_builder() {
            Effect::Final
        } else if error.is_connect() {
            Effect::NotBegun
        } else {
            Effect::Unknown
        };
        let error = TransportError::from(error);
        match error.certificate() {
            // The next handshake would fail in the same way.
            Some(why) => Self::new(ClientError::Certificate(why), Effect::Final),
            None => Self::new(ClientError::Transport(error), effect),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_doubles_up_to_its_bound() {
        let policy = RetryPolicy::default();
        let longest = |attempts| policy.pause(attempts, None, 1.0).as_millis();
        assert_eq!([1, 2, 3, 6, 7, 1_000].map(longest), [100, 200, 400, 3_200, 5_000, 5_000]);
    }

    #[test]
    fn pauses_are_random_from_zero_up() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.pause(3, None, 0.0), Duration::ZERO);
        assert_eq!(policy.pause(3, None, 0.5), Duration::from_millis(200));
    }

    #[test]
    fn no_pause_is_shorter_than_the_service_asked_for() {
        let policy = RetryPolicy::default();
        let asked = Duration::from_secs(7);
        assert_eq!(policy.pause(1, Some(asked), 0.0), asked);
        assert!(policy.pause(1, Some(asked), 0.9) > asked);
        assert_eq!(policy.pause(1, Some(Duration::MAX), 0.9), Duration::MAX);
    }
}
