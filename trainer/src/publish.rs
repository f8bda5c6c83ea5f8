//! Publishing: a complete checkpoint folder for each weight version, known to the service and to inference engines.
//!
//! Separate from saving: what is saved is for this trainer's restart and holds the optimizer, what is published is for
//! everybody else. A folder is complete before anybody hears of it, and the newest few are kept.

use std::path::{Path, PathBuf};

use tokio::runtime::Handle;

use crate::{
    checkpoint::{self, CheckpointError, WriteOptions},
    engine::{EngineConfig, Engines},
    model::Parameters,
    service::{Service, ServiceError},
};

/// Where versions are published.
#[derive(Debug)]
pub struct Publisher {
    folder: PathBuf,
    /// Checkpoint whose configuration and tokenizer go along.
    base: PathBuf,
    keep: usize,
    engines: Engines,
}

/// Why a version is not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Its folder cannot be written.
    #[error("version {version} cannot be written")]
    Write {
        /// The version.
        version: i64,
        /// Why.
        source: CheckpointError,
    },
    /// A file operation failed.
    #[error("cannot {what} {}", folder.display())]
    Folder {
        /// What was tried.
        what: &'static str,
        /// On which folder.
        folder: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The service refuses it.
    #[error(transparent)]
    Service(#[from] ServiceError),
}

impl Publisher {
    /// Publishes below `folder`, with the companions of the checkpoint `base`; the newest `keep` versions stay.
    #[must_use]
    pub fn new(folder: PathBuf, base: PathBuf, keep: usize, engines: Vec<EngineConfig>) -> Self {
        Self { folder, base, keep: keep.max(1), engines: Engines::new(engines) }
    }

    /// Publishes the weights after `step` as `version` of lineage `epoch`.
    pub fn publish(
        &self,
        runtime: &Handle,
        service: &Service,
        parameters: &Parameters,
        lineage: Lineage,
    ) -> Result<PathBuf, PublishError> {
        let Lineage { version, step, epoch } = lineage;
        let target = self.folder.join(format!("v{version:06}"));
        self.write(parameters, &target, version)?;
        let target = std::fs::canonicalize(&target).map_err(failed("find", &target))?;
        // Engines first: when agents hear of the version, it is there.
        runtime.block_on(self.engines.load(&target, version));
        let uri = file_uri(&target);
        runtime.block_on(service.publish(version, step, uri, epoch))?;
        self.prune(version)?;
        Ok(target)
    }

    fn write(&self, parameters: &Parameters, target: &Path, version: i64) -> Result<(), PublishError> {
        // A version of a lineage that was given up; its successor takes its number.
        if target.exists() {
            std::fs::remove_dir_all(target).map_err(failed("remove", target))?;
        }
        checkpoint::write(parameters, &self.base, target, &WriteOptions::default())
            .map_err(|source| PublishError::Write { version, source })
    }

    /// Removes what is neither new nor needed: agents that still load an old version look again and find a newer one.
    fn prune(&self, newest: i64) -> Result<(), PublishError> {
        let mut versions: Vec<(i64, PathBuf)> = std::fs::read_dir(&self.folder)
            .map_err(failed("list", &self.folder))?
            .filter_map(|entry| version_of(&entry.ok()?.path()))
            .filter(|(version, _)| *version <= newest)
            .collect();
        versions.sort_unstable_by_key(|(version, _)| std::cmp::Reverse(*version));
        for (_, folder) in versions.into_iter().skip(self.keep) {
            std::fs::remove_dir_all(&folder).map_err(failed("remove", &folder))?;
        }
        Ok(())
    }
}

/// What a version is of.
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

/// `file://` with what a URI cannot hold as it is escaped (RFC 3986).
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
