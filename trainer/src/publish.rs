//! Publishing: writes a complete checkpoint folder for each weight version and informs the service and the inference
//! engines.
//!
//! This is separate from saving: saved checkpoints are for the trainer's restart and contain the optimizer, and
//! published versions are for everyone else. Training continues meanwhile. It passes a copy of the weights to a task,
//! which writes the folder, makes the engines load it, informs the service once and removes old folders. If weights
//! arrive while an older version is being published, they wait, and newer weights replace those that wait.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

use crate::{
    checkpoint::{self, CheckpointError, WriteOptions},
    engine::Engines,
    model::Parameters,
    service::{Service, ServiceError},
    state::remove_hidden,
};

/// Settings of publishing.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Folder of the versions.
    pub folder: PathBuf,
    /// Checkpoint whose configuration and tokenizer are copied.
    pub base: PathBuf,
    /// Number of the newest versions that stay on disk.
    pub keep: usize,
    /// Longest time that a version waits for engines before the service is informed.
    pub engine_wait: Duration,
}

/// Publishes in the background.
#[derive(Debug)]
pub struct Publisher {
    jobs: watch::Sender<Option<Arc<Job>>>,
    newest: watch::Receiver<Lineage>,
    engines: Arc<Engines>,
    options: PublishOptions,
    task: JoinHandle<Result<(), PublishError>>,
}

/// Weights to publish.
#[derive(Debug)]
struct Job {
    /// The task takes the weights, so that the copy is freed when the folder is written.
    parameters: Mutex<Option<Parameters>>,
    step: i64,
}

/// Why a version is not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The folder of the version cannot be written.
    #[error("version {version} cannot be written")]
    Write {
        /// The version.
        version: i64,
        /// The cause.
        source: CheckpointError,
    },
    /// A file operation failed.
    #[error("cannot {what} {}", folder.display())]
    Folder {
        /// The operation.
        what: &'static str,
        /// The folder.
        folder: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The task ended unexpectedly.
    #[error("publishing ended")]
    Task(#[source] tokio::task::JoinError),
    /// The service refused the version.
    #[error(transparent)]
    Service(#[from] ServiceError),
}

impl Publisher {
    /// Removes partial folders that killed trainers have left in `folder`. No other trainer may be publishing there.
    pub fn remove_partial(folder: &Path) -> Result<(), PublishError> {
        remove_hidden(folder, checkpoint::PARTIAL).map_err(failed("remove partial versions from", folder))
    }

    /// Starts the task. `newest` is the version that the service knows already.
    #[must_use]
    pub fn start(
        runtime: &Handle,
        service: Service,
        options: PublishOptions,
        engines: Engines,
        newest: Lineage,
    ) -> Self {
        let engines = Arc::new(engines);
        let (jobs, told) = watch::channel(None);
        let (published, newest) = watch::channel(newest);
        let task = Task { service, options: options.clone(), engines: Arc::clone(&engines), published };
        Self { jobs, newest, engines, options, task: runtime.spawn(task.run(told)) }
    }

    /// The newest version that the service has accepted.
    #[must_use]
    pub fn newest(&self) -> Lineage {
        *self.newest.borrow()
    }

    /// Publishes the weights after `step`, and replaces weights that still wait. An error belongs to an earlier
    /// version.
    pub fn publish(&mut self, runtime: &Handle, parameters: &Parameters, step: i64) -> Result<(), PublishError> {
        if self.task.is_finished() {
            return runtime.block_on(join(&mut self.task));
        }
        let parameters = Mutex::new(Some(parameters.copy_to_cpu()));
        self.jobs.send_replace(Some(Arc::new(Job { parameters, step })));
        Ok(())
    }

    /// Makes engines load the version that the service knows already, because they may have been started since then.
    pub async fn tell_engines_again(&self) {
        let newest = self.newest();
        let folder = folder_of(&self.options.folder, newest.version);
        if let Ok(folder) = std::fs::canonicalize(folder) {
            self.engines.load(&folder, newest.version, Duration::ZERO).await;
        }
    }

    /// Waits until all weights that were passed are published. No more weights can be passed after that.
    pub async fn finish(&mut self) -> Result<(), PublishError> {
        let closed = watch::channel(None).0;
        drop(std::mem::replace(&mut self.jobs, closed));
        join(&mut self.task).await?;
        self.engines.settle(self.options.engine_wait).await;
        Ok(())
    }

    /// Abandons what is not published yet, and continues every paused engine that answers within `wait`.
    pub async fn abandon(self, wait: Duration) {
        self.task.abort();
        self.engines.release(wait).await;
    }
}

async fn join(task: &mut JoinHandle<Result<(), PublishError>>) -> Result<(), PublishError> {
    task.await.unwrap_or_else(|error| Err(PublishError::Task(error)))
}

/// The task behind a [`Publisher`].
struct Task {
    service: Service,
    options: PublishOptions,
    engines: Arc<Engines>,
    published: watch::Sender<Lineage>,
}

impl Task {
    async fn run(self, mut jobs: watch::Receiver<Option<Arc<Job>>>) -> Result<(), PublishError> {
        while jobs.changed().await.is_ok() {
            let Some(job) = jobs.borrow_and_update().clone() else { continue };
            let parameters = job.parameters.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(parameters) = parameters {
                self.publish(parameters, job.step).await?;
            }
        }
        Ok(())
    }

    async fn publish(&self, parameters: Parameters, step: i64) -> Result<(), PublishError> {
        let newest = *self.published.borrow();
        let next = Lineage { version: newest.version + 1, step, ..newest };
        let folder = folder_of(&self.options.folder, next.version);
        let (base, target) = (self.options.base.clone(), folder.clone());
        tokio::task::spawn_blocking(move || write(&parameters, &base, &target, next.version))
            .await
            .map_err(PublishError::Task)??;
        let folder = std::fs::canonicalize(&folder).map_err(failed("find", &folder))?;
        // The engines are first, so that they have the version before agents learn of it.
        self.engines.load(&folder, next.version, self.options.engine_wait).await;
        self.service.publish(next.version, next.step, file_uri(&folder), next.epoch).await?;
        self.published.send_replace(next);
        tracing::info!(policy.version = next.version, step = next.step, folder = %folder.display(), "published");
        self.prune(next.version)
    }

    /// Removes folders that are neither new nor needed. Agents that are still loading an old version retry and find a
    /// newer one.
    fn prune(&self, newest: i64) -> Result<(), PublishError> {
        let mut versions: Vec<(i64, PathBuf)> = std::fs::read_dir(&self.options.folder)
            .map_err(failed("list", &self.options.folder))?
            .filter_map(|entry| version_of(&entry.ok()?.path()))
            .filter(|(version, _)| *version <= newest)
            .collect();
        versions.sort_unstable_by_key(|(version, _)| std::cmp::Reverse(*version));
        for (_, folder) in versions.into_iter().skip(self.options.keep.max(1)) {
            std::fs::remove_dir_all(&folder).map_err(failed("remove", &folder))?;
        }
        Ok(())
    }
}

fn write(parameters: &Parameters, base: &Path, target: &Path, version: i64) -> Result<(), PublishError> {
    // A version of an abandoned lineage; its successor uses the same number.
    if target.exists() {
        std::fs::remove_dir_all(target).map_err(failed("remove", target))?;
    }
    checkpoint::write(parameters, base, target, &WriteOptions::default())
        .map_err(|source| PublishError::Write { version, source })
}

fn folder_of(folder: &Path, version: i64) -> PathBuf {
    folder.join(format!("v{version:06}"))
}

/// The identity of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lineage {
    /// Number of the version.
    pub version: i64,
    /// Optimizer step after which the weights were taken.
    pub step: i64,
    /// Lineage of the trainer.
    pub epoch: i64,
}

fn failed<'a>(what: &'static str, folder: &'a Path) -> impl FnOnce(std::io::Error) -> PublishError + 'a {
    move |source| PublishError::Folder { what, folder: folder.to_owned(), source }
}

fn version_of(folder: &Path) -> Option<(i64, PathBuf)> {
    let version = folder.file_name()?.to_str()?.strip_prefix('v')?.parse().ok()?;
    Some((version, folder.to_owned()))
}

/// A `file://` URI, with escapes for characters that a URI cannot contain (RFC 3986).
fn file_uri(path: &Path) -> String {
    use std::{fmt::Write as _, os::unix::ffi::OsStrExt as _};
    let mut uri = String::from("file://");
    for &byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            uri.push(byte.into());
        } else {
            let _ = write!(uri, "%{byte:02X}");
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_uris_escape_what_they_must() {
        assert_eq!(file_uri(Path::new("/runs/a b/v000001")), "file:///runs/a%20b/v000001");
    }

    #[test]
    fn only_folders_of_versions_are_counted() {
        assert_eq!(version_of(Path::new("/x/v000012")).map(|(version, _)| version), Some(12));
        assert_eq!(version_of(Path::new("/x/.checkpoint-3")), None);
        assert_eq!(version_of(Path::new("/x/notes")), None);
    }
}
