//! The trainer's client of the service: one policy, and calls that are repeated until they are answered.
//!
//! This is separate from the loop, so that the loop contains the steps and this module the handling of an unreachable
//! service. Only a problem document is a refusal by the service itself. Any other failure (no connection, a proxy's
//! page, a body that is cut off, a status without a problem document) says nothing about the call. The call is then
//! repeated with back-off, which is safe for every call here, until the configured patience is used up.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use forebay_client::{
    Client, ClientError, ClientOptions, RetryPolicy, SILENCE_TIMEOUT,
    wire::{
        AckRequest, ApiKey, BatchDescriptor, CheckpointRequest, NackRequest, PolicyStatus, ResumeRequest,
        ResumeResponse, VersionRequest,
    },
};

/// Pause after the first failed attempt; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two attempts, so that a service that is back is noticed within seconds.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Patience with answers that are not the service's, before the service has answered once. In this case the URL or the
/// key is probably wrong.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// Problem types that mean that the request did not reach its target.
const MISROUTED: [&str; 3] = ["no-such-route", "method-not-allowed", "not-acceptable"];

/// Problem types that mean that a batch cannot be read.
const ABOUT_THE_BATCH: [&str; 4] = ["not-found", "batch-state", "purged", "damaged"];

/// Maximum number of characters of a reason; the service accepts 1,024 bytes.
const REASON_CHARS_MAX: usize = 250;

/// One policy of a Forebay service.
#[derive(Clone, Debug)]
pub struct Service {
    client: Client,
    url: String,
    policy: String,
    consumer: String,
    patience: Patience,
    /// Whether the service has answered a call.
    reached: Arc<AtomicBool>,
}

/// How long calls to the service are repeated.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time for which a call is repeated before it fails.
    pub call: Duration,
    /// Time without a byte after which an attempt counts as failed.
    pub silence: Duration,
}

impl Patience {
    /// Repeats calls without a time limit.
    pub const ENDLESS: Self = Self { call: Duration::MAX, silence: SILENCE_TIMEOUT };
}

/// How the trainer authenticates itself, and which certificates it trusts. The key is never printed.
#[derive(Clone, Debug, Default, serde::Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct Credentials {
    /// Key for the service; prefer the environment variable, because `ps` shows arguments
    #[arg(long, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    pub key: Option<ApiKey>,
    /// Certificate authority (PEM) of the service's certificate, instead of the system's
    #[arg(long, env = "FOREBAY_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Certificate and private key (PEM), for a service that requires a client certificate
    #[arg(long, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    pub identity: Option<PathBuf>,
}

impl Credentials {
    /// Returns these options, completed by the others where these are absent.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self { key: self.key.or(others.key), ca: self.ca.or(others.ca), identity: self.identity.or(others.identity) }
    }

    fn options(&self, silence: Duration) -> Result<ClientOptions, ServiceError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| ServiceError::Credentials { path: path.to_owned(), source })
        };
        Ok(ClientOptions {
            key: self.key.clone(),
            ca_pem: self.ca.as_deref().map(read).transpose()?,
            identity_pem: self.identity.as_deref().map(read).transpose()?,
            silence_timeout: silence,
        })
    }
}

/// The result of an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acked {
    /// The step has consumed the batch: the weights may be updated.
    Consumed,
    /// The lease was lost: another trainer may train on the batch, and its gradients are discarded.
    Lost,
}

/// Why the trainer cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The client refuses to make the call, or the service refuses it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A certificate cannot be read.
    #[error("cannot read {}", path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Another trainer has resumed this policy.
    #[error("another trainer has taken over policy `{0}`: its resume began a newer epoch")]
    Superseded(String),
    /// The buffer has settled steps that are missing in this trainer's last checkpoint.
    #[error(
        "the last checkpoint here is of {step}, but the service has settled later steps of policy `{policy}`: \
         restore a later checkpoint, or start again with --force to continue with the \
         batches that can still be delivered"
    )]
    LineageGap {
        /// Step of the last checkpoint, or `nothing`.
        step: String,
        /// The policy.
        policy: String,
    },
    /// The service did not answer for longer than the configured patience, or something else answered in its place.
    #[error("gave up on `{call}` at {url} after {seconds} s without an answer from the service")]
    GaveUp {
        /// The call.
        call: &'static str,
        /// Base URL of the service.
        url: String,
        /// Time since the first attempt.
        seconds: u64,
        /// The last failure.
        source: ClientError,
    },
    /// The service does not know the policy.
    #[error(
        "the service has no policy `{0}`: create it with PUT /policies/{0}, or start its agents first where `auto_create` is on"
    )]
    UnknownPolicy(String),
}

impl Service {
    /// Creates a client for a policy of the service at `url`; `consumer` names this trainer in leases.
    ///
    /// A failing call is repeated for as long as `patience` allows.
    pub fn new(
        url: &str,
        policy: &str,
        consumer: &str,
        credentials: &Credentials,
        patience: Patience,
    ) -> Result<Self, ServiceError> {
        Ok(Self {
            // Only this module repeats calls. Repeats by the client would not appear in the log.
            client: Client::with_options(url, &credentials.options(patience.silence)?)?.with_retry(RetryPolicy::none()),
            url: url.to_owned(),
            policy: policy.to_owned(),
            consumer: consumer.to_owned(),
            patience,
            reached: Arc::default(),
        })
    }

    /// The underlying client, for calls that are not repeated here.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Name of the policy.
    #[must_use]
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Name of this trainer in leases.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// Time without a byte after which an attempt counts as failed.
    #[must_use]
    pub fn silence_timeout(&self) -> Duration {
        self.patience.silence
    }

    /// Returns the status of the policy.
    pub async fn status(&self) -> Result<PolicyStatus, ServiceError> {
        let status = self.patiently("status", || self.client.policy(&self.policy)).await?;
        status.ok_or_else(|| ServiceError::UnknownPolicy(self.policy.clone()))
    }

    /// Resumes from the checkpoint of `step`, or without a checkpoint if it is `None`. The trainer uses the epoch in
    /// the answer from then on.
    pub async fn resume(&self, step: Option<i64>, force: bool) -> Result<ResumeResponse, ServiceError> {
        let request = ResumeRequest { step, force: force.then_some(true), epoch: None };
        let answer = self.patiently("resume", || self.client.resume(&self.policy, &request)).await;
        answer.map_err(|error| match error {
            ServiceError::Client(refused) if refused.kind() == Some("lineage-gap") => ServiceError::LineageGap {
                step: step.map_or_else(|| "nothing".to_owned(), |step| format!("step {step}")),
                policy: self.policy.clone(),
            },
            other => other,
        })
    }

    /// Reports that optimizer step `step` consumed the batch.
    pub async fn ack(&self, batch: &BatchDescriptor, step: i64) -> Result<Acked, ServiceError> {
        let lease = batch.lease.clone().ok_or_else(|| ClientError::NoLease { batch_id: batch.batch_id.clone() })?;
        let request = AckRequest { lease, step, epoch: Some(batch.epoch) };
        match self.patiently("ack", || self.client.ack(&batch.batch_id, &request)).await {
            Ok(_) => Ok(Acked::Consumed),
            Err(ServiceError::Client(refused)) if refused.kind() == Some("lease-lost") => Ok(Acked::Lost),
            Err(error) => Err(error),
        }
    }

    /// Gives a batch back; the named groups are quarantined. A lease that is already lost is no error.
    pub async fn nack(
        &self,
        batch: &BatchDescriptor,
        reason: &str,
        groups: Option<Vec<String>>,
    ) -> Result<(), ServiceError> {
        let lease = batch.lease.clone().ok_or_else(|| ClientError::NoLease { batch_id: batch.batch_id.clone() })?;
        let reason = Some(reason.chars().take(REASON_CHARS_MAX).collect());
        let request = NackRequest { lease, reason, groups, epoch: Some(batch.epoch) };
        match self.patiently("nack", || self.client.nack(&batch.batch_id, &request)).await {
            Ok(_) => Ok(()),
            // The lease is over in any case. A repeat of a call whose answer was lost is refused in the same way.
            Err(ServiceError::Client(refused))
                if refused.kind() == Some("lease-lost") || blames_the_batch(&refused) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Reports that step `step` is saved durably.
    pub async fn checkpointed(&self, step: i64, epoch: i64) -> Result<(), ServiceError> {
        let request = CheckpointRequest { step, force: None, epoch: Some(epoch) };
        self.patiently("checkpoint", || self.client.checkpoint(&self.policy, &request)).await.map(drop)
    }

    /// Publishes the weights after step `step` as version `version`, stored at `uri`.
    pub async fn publish(&self, version: i64, step: i64, uri: String, epoch: i64) -> Result<(), ServiceError> {
        let request = VersionRequest { version, step: Some(step), uri: Some(uri), epoch: Some(epoch), force: None };
        self.patiently("publish", || self.client.publish(&self.policy, &request)).await.map(drop)
    }

    /// Repeats a call until the service answers it, for as long as the patience lasts.
    pub(crate) async fn patiently<T, F>(
        &self,
        name: &'static str,
        mut call: impl FnMut() -> F,
    ) -> Result<T, ServiceError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match call().await {
                Ok(answer) => {
                    self.reached.store(true, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) if error.kind() == Some("superseded") => {
                    return Err(ServiceError::Superseded(self.policy.clone()));
                }
                Err(error) if is_decided(&error) => return Err(error.into()),
                Err(error) => error,
            };
            if began.elapsed() >= self.patience_with(&error) {
                let seconds = began.elapsed().as_secs();
                return Err(ServiceError::GaveUp { call: name, url: self.url.clone(), seconds, source: error });
            }
            tracing::warn!(
                call = name,
                url = self.url,
                error = crate::chain(&error),
                "the service did not answer; trying again"
            );
            let asked = error.problem().and_then(|problem| problem.retry_after_s).map_or(pause, Duration::from_secs);
            tokio::time::sleep(asked.clamp(pause, PAUSE_MAX)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn patience_with(&self, error: &ClientError) -> Duration {
        let misdirected = match error {
            ClientError::Unexpected { status, .. } => *status < 500,
            ClientError::Refused(problem) => !matches!(problem.status, 408 | 429 | 500..),
            other => matches!(other, ClientError::Malformed { .. }),
        };
        if misdirected && !self.reached.load(Ordering::Relaxed) {
            self.patience.call.min(START_PATIENCE)
        } else {
            self.patience.call
        }
    }
}

/// Whether the service has decided on the call, so that a repeat would get the same answer.
fn is_decided(error: &ClientError) -> bool {
    match error {
        ClientError::Refused(problem) => {
            let is_passing = matches!(problem.status, 401 | 403 | 407 | 408 | 421 | 429 | 500..);
            problem.kind == "damaged" || !(is_passing || MISROUTED.contains(&problem.kind.as_str()))
        }
        // A certificate may be renewed while trainers run. Each attempt logs what is wrong with it.
        ClientError::Transport(_)
        | ClientError::Certificate(_)
        | ClientError::Unexpected { .. }
        | ClientError::Malformed { .. }
        | ClientError::Truncated { .. }
        | ClientError::Undelimited
        | ClientError::Incomplete { .. } => false,
        ClientError::Encode(_)
        | ClientError::BaseUrl { .. }
        | ClientError::Key
        | ClientError::Tls(_)
        | ClientError::NoLease { .. } => true,
    }
}

/// Whether the service says that the batch itself cannot be read, and not only that the transfer failed.
pub(crate) fn blames_the_batch(error: &ClientError) -> bool {
    error.kind().is_some_and(|kind| ABOUT_THE_BATCH.contains(&kind))
}
