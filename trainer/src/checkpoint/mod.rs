//! Checkpoints as folders in the layout of Hugging Face: `config.json`, the tokenizer,
//! and the weights in one or more safetensors files.
//!
//! A [`Reader`] takes single tensors out of such a folder; [`write()`] makes a new folder
//! from an old one and changed weights. Both hold one tensor at a time.

use std::io;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensorError};
use tch::Kind;

mod read;
mod write;

pub use read::Reader;
pub(crate) use write::PARTIAL;
pub use write::{Storage, WriteOptions, write};

/// The weights of a checkpoint that is not sharded.
const SINGLE_FILE: &str = "model.safetensors";
/// Which shard holds which tensor.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Why a checkpoint could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The index of the shards is damaged.
    #[error("{path} is not an index of shards: {reason}")]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// A safetensors file is damaged.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// The model has a tensor that the checkpoint does not.
    #[error("the checkpoint lacks tensor `{0}`")]
    Missing(String),
    /// The checkpoint has a tensor that the model does not.
    #[error("the checkpoint has tensor `{0}`, which its model does not use")]
    Unexpected(String),
    /// A tensor has another shape than the model's.
    #[error("tensor `{name}` has shape {found:?} and should have {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the checkpoint.
        found: Vec<i64>,
        /// The shape in the model.
        expected: Vec<i64>,
    },
    /// A tensor has a type other than f32, bf16 and f16.
    #[error("tensor `{name}` is stored as {dtype:?}; supported are F32, BF16 and F16")]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: Dtype,
    },
    /// A tensor is not finite in the type that it would be written in. Nothing was written.
    #[error("tensor `{name}` holds numbers that are not finite as {dtype:?}: it is not written")]
    NotFinite {
        /// The tensor.
        name: String,
        /// The type.
        dtype: Dtype,
    },
    /// A checkpoint never replaces one that is there.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// The library could not write a shard.
    #[error("cannot write {path}")]
    Serialize {
        /// The file.
        path: PathBuf,
        /// What the library says.
        source: SafeTensorError,
    },
    /// libtorch could not convert a tensor.
    #[error("cannot convert tensor `{name}`")]
    Convert {
        /// The tensor.
        name: String,
        /// What libtorch says.
        source: tch::TchError,
    },
}

/// Adds to an error of the system what was tried with which file.
fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { action, path, source }
}

/// libtorch's name of a type that weights are stored in.
fn kind_of(name: &str, dtype: Dtype) -> Result<Kind, CheckpointError> {
    match dtype {
        Dtype::F32 => Ok(Kind::Float),
        Dtype::BF16 => Ok(Kind::BFloat16),
        Dtype::F16 => Ok(Kind::Half),
        dtype => Err(CheckpointError::Type { name: name.into(), dtype }),
    }
}
