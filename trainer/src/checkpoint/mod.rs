//! Checkpoints as folders in the layout of Hugging Face: `config.json`, the tokenizer,
//! and the weights in one or more safetensors files.
//!
//! A [`Reader`] reads single tensors from such a folder. [`write()`] makes a new folder from an old one and changed
//! weights. Both keep only one tensor in memory at a time.

use std::io;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensorError};
use tch::Kind;

mod read;
mod write;

pub use read::Reader;
pub(crate) use write::PARTIAL;
pub use write::{Storage, WriteOptions, write};

/// File of the weights of a checkpoint that is not sharded.
const SINGLE_FILE: &str = "model.safetensors";
/// File that maps each tensor to its shard.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Why a checkpoint could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The index of the shards is damaged.
    #[error("{path} is not an index of shards: {reason}")]
    Index {
        /// The file.
        path: PathBuf,
        /// The error in it.
        reason: String,
    },
    /// A safetensors file is damaged.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The error in it.
        reason: String,
    },
    /// The model has a tensor that the checkpoint does not.
    #[error("the checkpoint lacks tensor `{0}`")]
    Missing(String),
    /// The checkpoint has a tensor that the model does not.
    #[error("the checkpoint has tensor `{0}`, which its model does not use")]
    Unexpected(String),
    /// A tensor has another shape than the model's.
    #[error("tensor `{name}` has shape {found:?} but the model needs {expected:?}")]
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
    /// A tensor contains NaN or infinity in the type of the file. Nothing was written.
    #[error("tensor `{name}` contains NaN or infinity when converted to {dtype:?}, so the checkpoint was not written")]
    NotFinite {
        /// The tensor.
        name: String,
        /// The type.
        dtype: Dtype,
    },
    /// The target exists. A checkpoint never replaces another one.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// The library could not write a shard.
    #[error("cannot write {path}")]
    Serialize {
        /// The file.
        path: PathBuf,
        /// The error of the library.
        source: SafeTensorError,
    },
    /// libtorch could not convert a tensor.
    #[error("cannot convert tensor `{name}`")]
    Convert {
        /// The tensor.
        name: String,
        /// The error of libtorch.
        source: tch::TchError,
    },
}

/// Adds the operation and the file to an error of the operating system.
fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { action, path, source }
}

/// libtorch's name for a type in which weights are stored.
fn kind_of(name: &str, dtype: Dtype) -> Result<Kind, CheckpointError> {
    match dtype {
        Dtype::F32 => Ok(Kind::Float),
        Dtype::BF16 => Ok(Kind::BFloat16),
        Dtype::F16 => Ok(Kind::Half),
        dtype => Err(CheckpointError::Type { name: name.into(), dtype }),
    }
}
