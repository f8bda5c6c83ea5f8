//! Versions that a trainer has published: who is told of them, and how their folders are read.
//!
//! This is separate from those who load them, the [agent](crate::rollout) and the [inference server](crate::serve),
//! because folders may disappear while they are read: the trainer keeps only the newest few.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use forebay_client::wire::PolicyStatus;

use crate::service::{Service, ServiceError};

/// How long one poll waits. After that the policy itself is fetched: if a trainer resumed from an earlier step and
/// published again between two polls, the version number may be the same.
const POLL: Duration = Duration::from_secs(30);

/// A version as the service reports it. Run and epoch are part of its identity, because a trainer that resumes from an
/// earlier step uses the same version numbers again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Publication {
    /// The version number in the rollouts.
    pub(crate) version: i64,
    run: i64,
    epoch: i64,
    uri: String,
}

/// Why the folder of a version could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The folder does not exist, or was replaced while it was read: the version is no longer current, or its folder is
    /// on another machine.
    #[error("{} is gone", .0.display())]
    Gone(PathBuf),
    /// The version's URI is not a folder.
    #[error("version {version} is at `{uri}`, and only file:// folders can be loaded")]
    Uri {
        /// The version.
        version: i64,
        /// URI of the version.
        uri: String,
    },
}

/// Returns the status of a policy at once, or, if it is that of version `seen`, once it has changed.
pub(crate) async fn status(service: &Service, seen: Option<i64>) -> Result<PolicyStatus, ServiceError> {
    if let Some(version) = seen {
        let wait_ms = POLL.as_millis() as u64;
        let poll = || service.client().wait_version_above(service.policy(), version, wait_ms);
        if let Some(status) = service.patiently("wait for a version", poll).await? {
            return Ok(status);
        }
    }
    service.status().await
}

impl Publication {
    /// Returns the current version of a policy, or `None` if no weights have been published.
    #[must_use]
    pub(crate) fn current(status: &PolicyStatus) -> Option<Self> {
        let uri = status.version_uri.clone()?;
        Some(Self { version: status.version, run: status.run, epoch: status.epoch, uri })
    }

    /// Reads the version's folder. The result is that of `read`, unless the folder was not one consistent version.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Path) -> T) -> Result<T, FolderError> {
        let folder =
            folder_of(&self.uri).ok_or_else(|| FolderError::Uri { version: self.version, uri: self.uri.clone() })?;
        let gone = || FolderError::Gone(folder.clone());
        let identity = identity_of(&folder).map_err(|_| gone())?;
        let result = read(&folder);
        // The folder may have been removed, and another one made in its place, during the read.
        if identity_of(&folder).ok() != Some(identity) {
            return Err(gone());
        }
        Ok(result)
    }
}

/// Identifies a folder: the value stays the same as long as the folder exists, and differs for its successor at the
/// same path.
fn identity_of(folder: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(folder).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The folder that a `file://` URI names on this machine (RFC 8089).
fn folder_of(uri: &str) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt as _;

    let rest = uri.strip_prefix("file://")?;
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    if !path.starts_with('/') {
        return None;
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.get(..2).and_then(|digits| str::from_utf8(digits).ok())?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    Some(std::ffi::OsString::from_vec(bytes).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_uris_name_folders() {
        let folder = |uri| folder_of(uri).map(|folder| folder.display().to_string());
        assert_eq!(folder("file:///runs/a%20b/v000001").as_deref(), Some("/runs/a b/v000001"));
        assert_eq!(folder("file://localhost/runs/v1").as_deref(), Some("/runs/v1"));
        for uri in ["s3://bucket/v1", "/runs/v1", "file://elsewhere/runs/v1", "file:///a%2", "file:///a%zz"] {
            assert_eq!(folder(uri), None, "{uri}");
        }
    }

    #[test]
    fn folder_that_is_not_there_or_is_replaced_is_gone() {
        let parent = tempfile::tempdir().expect("a temporary folder can be made");
        let folder = parent.path().join("v000001");
        let publication = Publication { version: 1, run: 1, epoch: 1, uri: format!("file://{}", folder.display()) };
        let absent = publication.read(|_| ()).expect_err("there is nothing to read");
        assert!(matches!(absent, FolderError::Gone(_)), "{absent}");
        fs::create_dir(&folder).expect("the parent is there");
        publication.read(|_| ()).expect("it is there");
        let replaced = publication.read(|path| {
            // The old folder still exists, so that its successor cannot have its number.
            fs::rename(path, parent.path().join("old")).expect("it is there");
            fs::create_dir(path).expect("the parent is there");
        });
        assert!(matches!(replaced, Err(FolderError::Gone(_))));
    }
}
