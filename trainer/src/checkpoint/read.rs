//! Reads a checkpoint: finds the file and position of each tensor, then reads the tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Kind, Tensor};

use super::{CheckpointError, INDEX_FILE, SINGLE_FILE, failed, kind_of};
use crate::model::ParameterSpec;

/// Longest header that is accepted; the library of the format has the same limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The tensors of one checkpoint, whose headers have been read.
#[derive(Debug)]
pub struct Reader {
    tensors: BTreeMap<String, Location>,
}

#[derive(Debug)]
struct Location {
    path: PathBuf,
    /// Where the data of the file begin, in bytes.
    data_start: u64,
    info: TensorInfo,
}

impl Reader {
    /// Reads the headers of all weights in `folder`.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let mut tensors = BTreeMap::new();
        for path in weight_files(folder)? {
            let (data_start, header) = read_header(&path)?;
            for (name, info) in header.tensors() {
                tensors.insert(name, Location { path: path.clone(), data_start, info: info.clone() });
            }
        }
        Ok(Self { tensors })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The type that a tensor is stored in.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.get(name).map(|location| location.info.dtype)
    }

    /// Reads a tensor of shape `shape`, as float32 on the CPU.
    pub fn read(&self, name: &str, shape: &[i64]) -> Result<Tensor, CheckpointError> {
        let location = self.tensors.get(name).ok_or_else(|| CheckpointError::Missing(name.into()))?;
        let found: Vec<i64> = location.info.shape.iter().map(|&size| size as i64).collect();
        if found != shape {
            return Err(CheckpointError::Shape { name: name.into(), found, expected: shape.into() });
        }
        let kind = kind_of(name, location.info.dtype)?;
        let bytes = location.read().map_err(failed("read", &location.path))?;
        Tensor::f_from_data_size(&bytes, shape, kind)
            .and_then(|stored| stored.f_to_kind(Kind::Float))
            .map_err(|source| CheckpointError::Convert { name: name.into(), source })
    }

    /// Refuses tensors that are not in `specs`; `ignore_head` allows a language head that
    /// the model does not use.
    pub(crate) fn refuse_unexpected(&self, specs: &[ParameterSpec], ignore_head: bool) -> Result<(), CheckpointError> {
        let expected: BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let unexpected = self.names().find(|name| {
            // Old checkpoints store the frequencies, which can be computed from the configuration.
            let known = name.ends_with(".rotary_emb.inv_freq") || (ignore_head && *name == "lm_head.weight");
            !known && !expected.contains(name)
        });
        match unexpected {
            None => Ok(()),
            Some(name) => Err(CheckpointError::Unexpected(name.into())),
        }
    }
}

impl Location {
    fn read(&self) -> std::io::Result<Vec<u8>> {
        let (start, end) = self.info.data_offsets;
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.data_start + start as u64))?;
        let mut bytes = vec![0; end - start];
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// The single file of weights, or all files that the index names.
fn weight_files(folder: &Path) -> Result<BTreeSet<PathBuf>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let path = folder.join(INDEX_FILE);
    let single = folder.join(SINGLE_FILE);
    if single.exists() || !path.exists() {
        return Ok([single].into());
    }
    let json = std::fs::read(&path).map_err(failed("read", &path))?;
    let index: Index = serde_json::from_slice(&json)
        .map_err(|error| CheckpointError::Index { path: path.clone(), reason: error.to_string() })?;
    let mut files = BTreeSet::new();
    for file in index.weight_map.into_values() {
        // A name that contains a folder could point outside the checkpoint.
        if Path::new(&file).file_name() != Some(file.as_ref()) {
            return Err(CheckpointError::Index { path, reason: format!("{file:?} is not the name of a file") });
        }
        files.insert(folder.join(file));
    }
    Ok(files)
}

/// Returns where the data of a safetensors file begin, and its header.
fn read_header(path: &Path) -> Result<(u64, Metadata), CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: path.to_owned(), reason };
    let mut file = File::open(path).map_err(failed("open", path))?;
    let file_bytes = file.metadata().map_err(failed("read", path))?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed("read", path))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(damaged(format!("its header is {length} bytes long")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(failed("read", path))?;
    let header: Metadata = serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
    let data_start = 8 + length;
    let expected = data_start + header.data_len() as u64;
    if file_bytes != expected {
        return Err(damaged(format!("it has {file_bytes} bytes, and its header describes {expected}")));
    }
    Ok((data_start, header))
}
