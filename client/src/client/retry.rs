//! Whether and when a call is repeated. Separate from the calls, so that the rule is in one place.

use std::time::Duration;

use super::error::{ClientError, TransportError};

/// How often and how long a call is repeated: exponential back-off with full jitter.
///
/// The pause before attempt n + 1 is random between zero and the least of `first_pause * 2^(n - 1)` and `pause_max`.
/// Where the service says `Retry-After` with 429 or 503, in seconds or as a date, that comes on top: it asked for at least so much, and many
/// clients were told the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts, the first included; 0 counts as 1.
    pub attempts_max: u32,
    /// Longest pause after the first attempt.
    pub first_pause: Duration,
    /// Longest pause that the back-off grows to.
    pub pause_max: Duration,
    /// Longest sum of pauses of one call. A call that would have to wait longer fails at once.
    pub pause_total_max: Duration,
}

impl RetryPolicy {
    /// One attempt.
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
            tracing::debug!(attempts, pause_ms = pause.as_millis() as u64, error = %failure.error, "call is repeated");
            tokio::time::sleep(pause).await;
            attempts += 1;
        }
    }

    /// The pause after `attempts` attempts; `jitter` is random in [0, 1).
    fn pause(&self, attempts: u32, retry_after: Option<Duration>, jitter: f64) -> Duration {
        let growth = 2_u32.saturating_pow(attempts.saturating_sub(1));
        let back_off = self.first_pause.saturating_mul(growth).min(self.pause_max);
        retry_after.unwrap_or_default().saturating_add(back_off.mul_f64(jitter))
    }
}

impl Default for RetryPolicy {
    /// Ten attempts over about twelve seconds of pauses: enough for a restart of the service.
    fn default() -> Self {
        Self {
            attempts_max: 10,
            first_pause: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
            pause_total_max: Duration::from_mins(1),
        }
    }
}

/// What the contract says about a call that is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// The service recognises it, or it changes nothing.
    Always,
    /// It would take effect again, or be refused as if it had not taken effect.
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

/// What a failed attempt may have done to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing: it was not begun, and may be later.
    NotBegun,
    /// Nobody knows.
    Unknown,
    /// It was answered, and a repeat would be answered alike.
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
            // The next handshake would end alike.
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
