//! Follows the policy's version in the background with long polls, so that a new version is known as soon as it is
//! published.

use std::time::Duration;

use forebay_client::wire::PolicyStatus;
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

use crate::{
    published,
    service::{Service, ServiceError},
};

/// How often the stop flag is checked.
const LOOK: Duration = Duration::from_millis(200);

/// Follows the status of a policy until it is dropped.
#[derive(Debug)]
pub(super) struct Follower {
    status: watch::Receiver<Option<PolicyStatus>>,
    task: JoinHandle<ServiceError>,
}

impl Follower {
    /// Starts to follow the policy of `service`.
    pub(super) fn start(runtime: &Handle, service: Service) -> Self {
        let (sender, status) = watch::channel(None);
        let task = runtime.spawn(async move {
            loop {
                let seen = sender.borrow().as_ref().map(|status: &PolicyStatus| status.version);
                match published::status(&service, seen).await {
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

    /// Waits a moment, or less if the status changes. Returns whether it changed. Fails if the service refuses the
    /// poll.
    pub(super) fn wait(&mut self, runtime: &Handle) -> Result<bool, ServiceError> {
        if self.task.is_finished() {
            // A task that was aborted or that panicked returns no error to report.
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
