//! Finds the current weight version of a policy and loads it from its folder.
//!
//! This is separate from the worker because folders may disappear while they are read: the trainer keeps only the
//! newest few.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use forebay_client::wire::PolicyStatus;
use tch::Device;

use super::{Tokenizer, TokenizerError};
use crate::model::{ComputeKind, Decoder, LoadError};

/// A version as the service reports it. Run and epoch are part of its identity, because a trainer that resumes from an
/// earlier step uses the same version numbers again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Publication {
    /// The version number in the rollouts.
    pub(super) version: i64,
    run: i64,
    epoch: i64,
    uri: String,
}

/// A model that can play the task.
#[derive(Debug)]
pub(super) struct Weights {
    /// The version that it was loaded from.
    pub(super) publication: Publication,
    /// The model.
    pub(super) decoder: Decoder,
    /// Its tokenizer.
    pub(super) tokenizer: Tokenizer,
}

/// Why a published version could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
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
    /// Its model cannot be read.
    #[error("the model in {} cannot be loaded", folder.display())]
    Model {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        source: LoadError,
    },
    /// Its tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl Publication {
    /// Returns the current version of a policy, or `None` if no weights have been published.
    #[must_use]
    pub(super) fn current(status: &PolicyStatus) -> Option<Self> {
        let uri = status.version_uri.clone()?;
        Some(Self { version: status.version, run: status.run, epoch: status.epoch, uri })
    }

    /// Loads the version onto `device`.
    pub(super) fn load(&self, device: Device, compute: ComputeKind) -> Result<Weights, WeightsError> {
        let folder =
            folder_of(&self.uri).ok_or_else(|| WeightsError::Uri { version: self.version, uri: self.uri.clone() })?;
        let gone = || WeightsError::Gone(folder.clone());
        let identity = identity_of(&folder).map_err(|_| gone())?;
        let loaded = read(&folder, device, compute);
        // If files of the folder appeared or disappeared during the read, the folder is not one consistent version.
        if identity_of(&folder).ok() != Some(identity) {
            return Err(gone());
        }
        let (decoder, tokenizer) = loaded?;
        Ok(Weights { publication: self.clone(), decoder, tokenizer })
    }
}

fn read(folder: &Path, device: Device, compute: ComputeKind) -> Result<(Decoder, Tokenizer), WeightsError> {
    let tokenizer = Tokenizer::load(folder)?;
    let decoder = Decoder::load(folder, device, compute)
        .map_err(|source| WeightsError::Model { folder: folder.to_owned(), source })?;
    Ok((decoder, tokenizer))
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
    fn folder_that_is_not_there_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let uri = format!("file://{}/v000001", folder.path().display());
        let publication = Publication { version: 1, run: 1, epoch: 1, uri };
        let error = publication.load(Device::Cpu, ComputeKind::Float32).expect_err("there is nothing to load");
        assert!(matches!(error, WeightsError::Gone(_)), "{error}");
    }
}
