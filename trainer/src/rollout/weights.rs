//! Loads a published version for playing: its model and its tokenizer.

use std::path::{Path, PathBuf};

use tch::Device;

use super::{Tokenizer, TokenizerError};
use crate::{
    model::{ComputeKind, Decoder, LoadError},
    published::{FolderError, Publication},
};

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
    /// Its folder cannot be read.
    #[error(transparent)]
    Folder(#[from] FolderError),
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

impl Weights {
    /// Loads a version onto `device`.
    pub(super) fn load(publication: &Publication, device: Device, compute: ComputeKind) -> Result<Self, WeightsError> {
        let (decoder, tokenizer) = publication.read(|folder| read(folder, device, compute))??;
        Ok(Self { publication: publication.clone(), decoder, tokenizer })
    }
}

fn read(folder: &Path, device: Device, compute: ComputeKind) -> Result<(Decoder, Tokenizer), WeightsError> {
    let tokenizer = Tokenizer::load(folder)?;
    let decoder = Decoder::load(folder, device, compute)
        .map_err(|source| WeightsError::Model { folder: folder.to_owned(), source })?;
    Ok((decoder, tokenizer))
}
