//! Writes a checkpoint. The new folder appears complete or not at all.
//!
//! The files are written to a hidden folder beside the target and synced to the disk, and then the folder is renamed. A
//! crash leaves at most the hidden folder behind.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use safetensors::{Dtype, SafeTensorError, View};
use tch::{Device, Kind, Tensor};

use super::{CheckpointError, INDEX_FILE, Reader, SINGLE_FILE, failed, kind_of};
use crate::model::Parameters;

/// Larger files of a source are not copied, because they are weights in another format. The largest tokenizers have
/// about 35 MB.
const COMPANION_BYTES_MAX: u64 = 256 << 20;

/// Endings of the names of files that contain weights or an index of weights.
const WEIGHT_FILE_ENDS: &[&str] = &[".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"];

/// Beginning of the name of a checkpoint that is being written.
pub(crate) const PARTIAL: &str = ".checkpoint-";

/// The type in which weights are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Each tensor keeps its type from the source. A tensor that the source lacks gets the type of the source's first
    /// tensor.
    AsSource,
    /// All tensors as f32, exactly as they are in training.
    Float32,
}

/// How to write a checkpoint.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// The type of the weights.
    pub storage: Storage,
    /// Upper bound of a weight file in bytes; a tensor that would exceed it goes to the next file.
    pub shard_bytes_max: u64,
}

impl Default for WriteOptions {
    /// Types as in the source, in files of at most 4 GiB, which all common file systems and uploads accept.
    fn default() -> Self {
        Self { storage: Storage::AsSource, shard_bytes_max: 4 << 30 }
    }
}

/// Writes `parameters` as a new checkpoint `target`. `config.json`, the tokenizer and all other companions are copied
/// unchanged from the checkpoint `source`.
///
/// Fails with [`CheckpointError::Exists`] if `target` exists.
pub fn write(
    parameters: &Parameters,
    source: &Path,
    target: &Path,
    options: &WriteOptions,
) -> Result<(), CheckpointError> {
    if target.exists() {
        return Err(CheckpointError::Exists(target.into()));
    }
    let parent = match target.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent).map_err(failed("create", parent))?;
    let partial = tempfile::Builder::new()
        .prefix(PARTIAL)
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(parent)
        .map_err(failed("create a folder in", parent))?;

    copy_companions(source, partial.path())?;
    let entries = plan(parameters, &Reader::open(source)?, options.storage)?;
    if let Some(entry) = entries.iter().find(|entry| !entry.is_finite()) {
        return Err(CheckpointError::NotFinite { name: entry.name.into(), dtype: entry.dtype });
    }
    write_weights(entries, partial.path(), options.shard_bytes_max)?;
    sync(partial.path())?;

    fs::rename(partial.path(), target).map_err(failed("rename to", target))?;
    // The folder has been renamed, so its guard has nothing to remove.
    let _renamed = partial.keep();
    sync(parent)
}

fn copy_companions(source: &Path, target: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(source).map_err(failed("list", source))? {
        let path = entry.map_err(failed("list", source))?.path();
        let Some(name) = path.file_name() else { continue };
        // Links are followed, because the cache of a hub consists of links.
        let metadata = fs::metadata(&path).map_err(failed("read", &path))?;
        let lossy = name.to_string_lossy();
        let weights = WEIGHT_FILE_ENDS.iter().any(|end| lossy.ends_with(end));
        if weights || !metadata.is_file() || metadata.len() > COMPANION_BYTES_MAX {
            continue;
        }
        let copy = target.join(name);
        let copied = File::open(&path).and_then(|mut from| {
            let mut to = File::create(&copy)?;
            io::copy(&mut from, &mut to)?;
            to.sync_all()
        });
        copied.map_err(failed("copy", &path))?;
    }
    Ok(())
}

/// A tensor to write, which is converted when its bytes are needed.
struct Entry<'parameters> {
    name: &'parameters str,
    tensor: &'parameters Tensor,
    dtype: Dtype,
    kind: Kind,
    shape: Vec<usize>,
}

impl Entry<'_> {
    /// Checks the numbers after conversion too, because the type of the file may have a smaller range than float32.
    fn is_finite(&self) -> bool {
        self.tensor.detach().to_kind(self.kind).isfinite().all().int64_value(&[]) == 1
    }
}

impl View for &Entry<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let stored = self.tensor.detach().to_device(Device::Cpu).to_kind(self.kind).contiguous();
        let mut bytes = vec![0; self.data_len()];
        stored.copy_data_u8(&mut bytes, stored.numel());
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.numel() * self.dtype.bitsize() / 8
    }
}

fn plan<'parameters>(
    parameters: &'parameters Parameters,
    source: &Reader,
    storage: Storage,
) -> Result<Vec<Entry<'parameters>>, CheckpointError> {
    let fallback = parameters.iter().find_map(|(name, _)| source.dtype(name)).unwrap_or(Dtype::F32);
    let mut entries = Vec::with_capacity(parameters.len());
    for (name, tensor) in parameters.iter() {
        let dtype = match storage {
            Storage::Float32 => Dtype::F32,
            Storage::AsSource => source.dtype(name).unwrap_or(fallback),
        };
        let shape = tensor.size().iter().map(|&size| size as usize).collect();
        entries.push(Entry { name, tensor, dtype, kind: kind_of(name, dtype)?, shape });
    }
    Ok(entries)
}

fn write_weights(entries: Vec<Entry<'_>>, folder: &Path, shard_bytes_max: u64) -> Result<(), CheckpointError> {
    let total_bytes: u64 = entries.iter().map(|entry| (&entry).data_len() as u64).sum();
    let shards = into_shards(entries, shard_bytes_max);
    if let [shard] = shards.as_slice() {
        return write_shard(shard, &folder.join(SINGLE_FILE));
    }
    let mut weight_map = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
        write_shard(shard, &folder.join(&file))?;
        weight_map.extend(shard.iter().map(|entry| (entry.name, file.clone())));
    }
    let index = serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": weight_map });
    let path = folder.join(INDEX_FILE);
    fs::write(&path, format!("{index:#}\n")).map_err(failed("write", &path))?;
    sync(&path)
}

/// Splits the list into shards of at most `bytes_max`, or of one tensor that is larger.
fn into_shards(entries: Vec<Entry<'_>>, bytes_max: u64) -> Vec<Vec<Entry<'_>>> {
    let mut shards: Vec<Vec<Entry<'_>>> = vec![Vec::new()];
    let mut bytes = 0;
    for entry in entries {
        let more = (&entry).data_len() as u64;
        if bytes > 0 && bytes + more > bytes_max {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        shards.last_mut().expect("there is one from the start").push(entry);
    }
    shards
}

fn write_shard(shard: &[Entry<'_>], path: &Path) -> Result<(), CheckpointError> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let views = shard.iter().map(|entry| (entry.name, entry));
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
        SafeTensorError::IoError(source) => CheckpointError::Io { action: "write", path: path.into(), source },
        source => CheckpointError::Serialize { path: path.into(), source },
    })?;
    // The library creates files that only their owner can read. All other files here can be read by others.
    copy_mode(&path.with_file_name("config.json"), path).map_err(failed("open to others", path))?;
    sync(path)
}

fn copy_mode(from: &Path, to: &Path) -> io::Result<()> {
    fs::set_permissions(to, fs::metadata(from)?.permissions())
}

/// Waits until the contents of a file, or the entries of a folder, are on the disk.
fn sync(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(failed("sync", path))
}
