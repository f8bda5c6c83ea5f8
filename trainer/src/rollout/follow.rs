//! Follows the policy's version in the background, with long polls: a new one is known the moment it is published.

use std::time::Duration;

use forebay_client::wire::PolicyStatus;
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

use crate::service::{Service, ServiceError};

/// How long one poll waits. After it the policy is asked for once more: a trainer that went back and came forward
/// between two polls may have published the same number again.
const POLL: Duration = Duration::from_secs(30);

/// How soon a wish to stop is noticed.
const LOOK: Duration = Duration::from_millis(200);

/// Knows where a policy stands, until it is dropped.
#[derive(Debug)]
pub(super) struct Follower {
    status: watch::Receiver<Option<PolicyStatus>>,
    task: JoinHandle<ServiceError>,
}

impl Follower {
    /// Begins to follow the policy of `service`.
    pub(super) fn start(runtime: &Handle, service: Service) -> Self {
        let (sender, status) = watch::channel(None);
        let task = runtime.spawn(async move {
            loop {
                let seen = sender.borrow().as_ref().map(|status: &PolicyStatus| status.version);
                match look(&service, seen).await {
                    Ok(status) => sender.send_replace(Some(status)),
                    Err(error) => return error,
                };
            }
        });
        Self { status, task }
    }

    /// The latest status.
    pub(super) fn status(&mut self) -> Option<PolicyStatus> {
        self.status.borrow_and_update().clone()
    }

    /// Waits a moment, less if the status changes; returns whether it did. Fails when the service refuses to tell.
    pub(super) fn wait(&mut self, runtime: &Handle) -> Result<bool, ServiceError> {
        if self.task.is_finished() {
            // A task that was aborted or that panicked has no error to tell of.
            return runtime.block_on(&mut self.task).map_or(Ok(false), Err);
        }
        let changed = runtime.block_on(async { tokio::time::timeout(LOOK, self.status.changed()).await });
        Ok(matches!(changed, Ok(Ok(()))))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The status at once, or when it is no longer `seen`.
async fn look(service: &Service, seen: Option<i64>) -> Result<PolicyStatus, ServiceError> {
    if let Some(version) = seen {
        let wait_ms = POLL.as_millis() as u64;
        let poll = || service.client().wait_version_above(service.policy(), version, wait_ms);
        if let Some(status) = service.patiently("wait for a version", poll).await? {
            return Ok(status);
        }
    }
    service.status().await
}
