//! The service as the trainer sees it: one policy, and calls that wait until they are answered.
//!
//! Separate from the loop so that the loop says what it does and this what to do about a service that is away: a
//! trainer has nothing better to do than to wait for it, because every call here may be repeated.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use forebay_client::{
    Client, ClientError, ClientOptions, RetryPolicy,
    wire::{
        AckRequest, ApiKey, BatchDescriptor, CheckpointRequest, NackRequest, PolicyStatus, ResumeRequest,
        ResumeResponse, VersionRequest,
    },
};

/// Pause after a call that was already repeated with back-off in vain.
const PAUSE: Duration = Duration::from_secs(2);

/// Characters of a reason; the service takes 1,024 bytes.
const REASON_CHARS_MAX: usize = 250;

/// One policy of a Forebay service.
#[derive(Clone, Debug)]
pub struct Service {
    client: Client,
    policy: String,
    consumer: String,
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
    /// The service does not know the policy.
    #[error(
        "the service has no policy `{0}`: create it with PUT /policies/{0}, or start its agents first where `auto_create` is on"
    )]
    UnknownPolicy(String),
}

impl Service {
    /// A policy of the service at `url`; `consumer` names this trainer in leases.
    pub fn new(url: &str, policy: &str, consumer: &str, credentials: &Credentials) -> Result<Self, ServiceError> {
        Ok(Self {
            client: Client::with_options(url, &credentials.options()?)?.with_retry(RetryPolicy::default()),
            policy: policy.to_owned(),
            consumer: consumer.to_owned(),
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
            Err(ServiceError::Client(refused)) if refused.kind() == Some("lease-lost") => Ok(()),
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

    /// Makes a call until it is answered.
    pub(crate) async fn patiently<T, F>(&self, name: &str, mut call: impl FnMut() -> F) -> Result<T, ServiceError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        loop {
            match call().await {
                Ok(answer) => return Ok(answer),
                Err(error) if is_passing(&error) => {
                    tracing::warn!(call = name, %error, "the service does not answer; trying again");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) if error.kind() == Some("superseded") => {
                    return Err(ServiceError::Superseded(self.policy.clone()));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether the same call may succeed later.
fn is_passing(error: &ClientError) -> bool {
    match error {
        ClientError::Transport(_) | ClientError::Truncated { .. } => true,
        ClientError::Refused(problem) => matches!(problem.status, 408 | 429 | 500..),
        ClientError::Unexpected { status, .. } => *status >= 500,
        _ => false,
    }
}
