//! The service as the trainer sees it: one policy, and calls that wait until they are answered.
//!
//! Separate from the loop so that the loop says what it does and this what to do when the service is not reached. Only a
//! problem document is the service's own refusal. Whatever else comes back (no connection, a proxy's page, a body that
//! is cut off, a status without a problem document) says nothing about the call: the call is repeated with back-off,
//! which every call here allows, until the configured patience is used up.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use forebay_client::{
    Client, ClientError, ClientOptions, RetryPolicy,
    wire::{
        AckRequest, ApiKey, BatchDescriptor, CheckpointRequest, NackRequest, PolicyStatus, ResumeRequest,
        ResumeResponse, VersionRequest,
    },
};

/// Pause after the first call that failed; it doubles with every further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two attempts: a service that is back is noticed within seconds.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Patience with answers that are not the service's before it has answered once: then the URL or the key is likely wrong.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// Problem types that say that the request did not reach what it was meant for.
const MISROUTED: [&str; 3] = ["no-such-route", "method-not-allowed", "not-acceptable"];

/// Problem types with which the service says that a batch cannot be read.
const ABOUT_THE_BATCH: [&str; 4] = ["not-found", "batch-state", "purged", "damaged"];

/// Characters of a reason; the service takes 1,024 bytes.
const REASON_CHARS_MAX: usize = 250;

/// One policy of a Forebay service.
#[derive(Clone, Debug)]
pub struct Service {
    client: Client,
    url: String,
    policy: String,
    consumer: String,
    patience: Duration,
    /// Whether the service has answered a call.
    reached: Arc<AtomicBool>,
}

/// How the trainer proves who it is, and whom it believes. Printed without the key.
#[derive(Clone, Debug, Default, serde::Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct Credentials {
    /// A key of the service; in the variable rather than here, where `ps` shows it
    #[arg(long, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    pub key: Option<ApiKey>,
    /// Authority (PEM) of the service's certificate, instead of the system's
    #[arg(long, env = "FOREBAY_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Certificate and private key (PEM) for a service that demands them
    #[arg(long, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    pub identity: Option<PathBuf>,
}

impl Credentials {
    /// These, and the others where these say nothing.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self { key: self.key.or(others.key), ca: self.ca.or(others.ca), identity: self.identity.or(others.identity) }
    }

    fn options(&self) -> Result<ClientOptions, ServiceError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| ServiceError::Credentials { path: path.to_owned(), source })
        };
        Ok(ClientOptions {
            key: self.key.clone(),
            ca_pem: self.ca.as_deref().map(read).transpose()?,
            identity_pem: self.identity.as_deref().map(read).transpose()?,
        })
    }
}

/// What became of an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acked {
    /// The batch is consumed by the step: the weights may move.
    Consumed,
    /// The lease was lost: somebody else may train the batch, and its gradients are discarded.
    Lost,
}

/// Why the trainer cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The client refuses to make the call, or the service refuses what it asks.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A certificate cannot be read.
    #[error("cannot read {}", path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another trainer has resumed this policy.
    #[error("another trainer has taken over policy `{0}`: its resume began a newer epoch")]
    Superseded(String),
    /// The buffer has settled steps that this trainer's last checkpoint does not hold.
    #[error(
        "the last checkpoint here is of {step}, but the service has settled later steps of policy `{policy}`: \
         restore a later checkpoint, or start again with --force to go on with what can still be delivered"
    )]
    LineageGap {
        /// Step of the last checkpoint, or `nothing`.
        step: String,
        /// The policy.
        policy: String,
    },
    /// The service was not reached for longer than the configured patience, or something else answered in its place.
    #[error("gave up on `{call}` at {url} after {seconds} s without an answer of the service")]
    GaveUp {
        /// What was asked.
        call: &'static str,
        /// Base URL of the service.
        url: String,
        /// Time since the first attempt.
        seconds: u64,
        /// What came back last.
        source: ClientError,
    },
    /// The service does not know the policy.
    #[error(
        "the service has no policy `{0}`: create it with PUT /policies/{0}, or start its agents first where `auto_create` is on"
    )]
    UnknownPolicy(String),
}

impl Service {
    /// A policy of the service at `url`; `consumer` names this trainer in leases.
    ///
    /// A call is repeated for `patience` before it fails.
    pub fn new(
        url: &str,
        policy: &str,
        consumer: &str,
        credentials: &Credentials,
        patience: Duration,
    ) -> Result<Self, ServiceError> {
        Ok(Self {
            // Attempts are counted in one place, here: the client's own would hide from the log for how long it is away.
            client: Client::with_options(url, &credentials.options()?)?.with_retry(RetryPolicy::none()),
            url: url.to_owned(),
            policy: policy.to_owned(),
            consumer: consumer.to_owned(),
            patience,
            reached: Arc::default(),
        })
    }

    /// The client below, for calls that need no patience.
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

    /// Where the policy stands.
    pub async fn status(&self) -> Result<PolicyStatus, ServiceError> {
        let status = self.patiently("status", || self.client.policy(&self.policy)).await?;
        status.ok_or_else(|| ServiceError::UnknownPolicy(self.policy.clone()))
    }

    /// Starts from the checkpoint of `step`; `None` starts from nothing. The answer's epoch is the one to go on with.
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

    /// The batch was consumed by optimizer step `step`.
    pub async fn ack(&self, batch: &BatchDescriptor, step: i64) -> Result<Acked, ServiceError> {
        let lease = batch.lease.clone().ok_or_else(|| ClientError::NoLease { batch_id: batch.batch_id.clone() })?;
        let request = AckRequest { lease, step, epoch: Some(batch.epoch) };
        match self.patiently("ack", || self.client.ack(&batch.batch_id, &request)).await {
            Ok(_) => Ok(Acked::Consumed),
            Err(ServiceError::Client(refused)) if refused.kind() == Some("lease-lost") => Ok(Acked::Lost),
            Err(error) => Err(error),
        }
    }

    /// Gives a batch back; named groups are quarantined. A lease that is lost anyway is no error.
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
            // The lease is over in any case; a repeat of a call whose answer was lost is refused like this.
            Err(ServiceError::Client(refused))
                if refused.kind() == Some("lease-lost") || blames_the_batch(&refused) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Step `step` is saved durably.
    pub async fn checkpointed(&self, step: i64, epoch: i64) -> Result<(), ServiceError> {
        let request = CheckpointRequest { step, force: None, epoch: Some(epoch) };
        self.patiently("checkpoint", || self.client.checkpoint(&self.policy, &request)).await.map(drop)
    }

    /// The weights after step `step` are version `version`, found at `uri`.
    pub async fn publish(&self, version: i64, step: i64, uri: String, epoch: i64) -> Result<(), ServiceError> {
        let request = VersionRequest { version, step: Some(step), uri: Some(uri), epoch: Some(epoch) };
        self.patiently("publish", || self.client.publish(&self.policy, &request)).await.map(drop)
    }

    /// Makes a call until the service answers it, for as long as the patience lasts.
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
                "no answer of the service; trying again"
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
            self.patience.min(START_PATIENCE)
        } else {
            self.patience
        }
    }
}

/// Whether the service has decided on the call, so that the same call would be answered alike.
fn is_decided(error: &ClientError) -> bool {
    match error {
        ClientError::Refused(problem) => {
            let is_passing = matches!(problem.status, 401 | 403 | 407 | 408 | 421 | 429 | 500..);
            problem.kind == "damaged" || !(is_passing || MISROUTED.contains(&problem.kind.as_str()))
        }
        // A certificate is renewed while trainers run; each attempt warns what is wrong with it.
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

/// Whether the service says that the batch, and not the way to it, is what cannot be read.
pub(crate) fn blames_the_batch(error: &ClientError) -> bool {
    error.kind().is_some_and(|kind| ABOUT_THE_BATCH.contains(&kind))
}
