//! The state that a trainer needs to continue exactly where it was: weights, optimizer and step.
//!
//! ```text
//! checkpoints/step-00000040/
//!     model/                  a complete Hugging Face checkpoint, float32
//!     critic/                 likewise, where there is a critic
//!     average/                likewise, the policy's averaged weights, where an average is kept
//!     optimizer.safetensors   first and second moments of both, and averages, by parameter name
//!     trainer.json            step, format, BLAKE3 digest of every other file
//! ```
//!
//! A checkpoint appears complete or not at all: it is written to a hidden folder, synced to the disk, and then renamed.
//! Its digests are checked before it is used. Random numbers need no state of their own, because they are drawn from
//! the seed and the step.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{
    checkpoint::{self, CheckpointError, Storage, WriteOptions},
    model::Parameters,
};

/// Number of this layout.
const FORMAT: u32 = 1;

const MODEL: &str = "model";
const CRITIC: &str = "critic";
const OPTIMIZER: &str = "optimizer.safetensors";
const AVERAGE: &str = "average";
const ABOUT: &str = "trainer.json";

/// Beginning of the name of a checkpoint that is being written.
const PARTIAL: &str = ".partial-";

/// The checkpoints of one trainer.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

/// One complete checkpoint on disk.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Optimizer step.
    pub step: i64,
    /// Number of optimizer updates. Steps whose batches train nothing have no update.
    pub optimizer_steps: i64,
    folder: PathBuf,
}

/// The contents of a checkpoint to write.
#[derive(Debug)]
pub struct State<'a> {
    /// Optimizer step.
    pub step: i64,
    /// Weights, and the checkpoint whose configuration and tokenizer are copied.
    pub model: (&'a Parameters, &'a Path),
    /// The same for the critic.
    pub critic: Option<(&'a Parameters, &'a Path)>,
    /// Averaged weights of the policy, if an average is kept.
    pub average: Option<Parameters>,
    /// Number of optimizer updates.
    pub optimizer_steps: i64,
    /// Tensors of the optimizers, by name.
    pub optimizer: Vec<(String, Tensor)>,
}

#[derive(Serialize, Deserialize)]
struct About {
    format: u32,
    step: i64,
    optimizer_steps: i64,
    /// Digests of the files, by path in the folder. Checkpoints of older trainers without digests can still be read.
    #[serde(default)]
    digests: BTreeMap<String, String>,
}

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file operation failed.
    #[error("cannot {what} {}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The weights cannot be written or read.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// The optimizer's moments cannot be written or read.
    #[error("the optimizer's state in {} cannot be used", path.display())]
    Optimizer {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: tch::TchError,
    },
    /// The newest checkpoint is damaged.
    #[error("the newest checkpoint is damaged: {} {reason}. {way_back}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
        /// What the user can do.
        way_back: String,
    },
    /// Another version of the trainer wrote it.
    #[error("{} has format {found}, this trainer reads {FORMAT}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The format number of the checkpoint.
        found: u32,
    },
}

impl Checkpoints {
    /// Opens the checkpoints below `folder`, of which the newest `keep` are kept.
    #[must_use]
    pub fn new(folder: PathBuf, keep: usize) -> Self {
        Self { folder, keep: keep.max(1) }
    }

    /// Returns the newest checkpoint, if there is one, after checking its digests.
    pub fn latest(&self) -> Result<Option<Checkpoint>, StateError> {
        let mut all = self.all()?;
        let Some((step, folder)) = all.pop() else { return Ok(None) };
        match open(step, folder.clone()) {
            Err(StateError::Damaged { path, reason, .. }) => {
                let whole = all.into_iter().rev().find(|(step, folder)| open(*step, folder.clone()).is_ok());
                let way_back = way_back(&folder, whole.map(|(step, _)| step));
                Err(StateError::Damaged { path, reason, way_back })
            }
            opened => opened.map(Some),
        }
    }

    /// Step of the oldest checkpoint that is kept. No restart can ask for batches that were acked at or before it.
    pub fn oldest_step(&self) -> Result<Option<i64>, StateError> {
        Ok(self.all()?.first().map(|(step, _)| *step))
    }

    /// Removes partial folders that killed trainers have left. No other trainer may be saving here.
    pub fn remove_partial(&self) -> Result<(), StateError> {
        remove_hidden(&self.folder, PARTIAL).map_err(failed("remove partial checkpoints from", &self.folder))
    }

    /// Every complete checkpoint, oldest first.
    fn all(&self) -> Result<Vec<(i64, PathBuf)>, StateError> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("list", &self.folder)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let folder = entry.map_err(failed("list", &self.folder))?.path();
            let step = folder.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
            found.extend(step.map(|step| (step, folder)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Writes a checkpoint durably and removes checkpoints that are too old.
    pub fn save(&self, state: &State<'_>) -> Result<(), StateError> {
        let target = self.folder.join(format!("step-{:08}", state.step));
        if target.exists() {
            // This is the same step of the same lineage, because no run continues from an older checkpoint while this one exists.
            return Ok(());
        }
        fs::create_dir_all(&self.folder).map_err(failed("create", &self.folder))?;
        let partial = tempfile::Builder::new()
            .prefix(PARTIAL)
            .tempdir_in(&self.folder)
            .map_err(failed("create a folder in", &self.folder))?;
        let exact = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
        checkpoint::write(state.model.0, state.model.1, &partial.path().join(MODEL), &exact)?;
        if let Some((parameters, base)) = state.critic {
            checkpoint::write(parameters, base, &partial.path().join(CRITIC), &exact)?;
        }
        if let Some(average) = &state.average {
            checkpoint::write(average, state.model.1, &partial.path().join(AVERAGE), &exact)?;
        }
        write_optimizer(&partial.path().join(OPTIMIZER), &state.optimizer)?;
        let about = About {
            format: FORMAT,
            step: state.step,
            optimizer_steps: state.optimizer_steps,
            digests: digests(partial.path()).map_err(failed("read", partial.path()))?,
        };
        let path = partial.path().join(ABOUT);
        let text = serde_json::to_vec_pretty(&about).map_err(io::Error::from).map_err(failed("write", &path))?;
        fs::write(&path, text).map_err(failed("write", &path))?;
        sync(&path)?;
        sync(partial.path())?;
        fs::rename(partial.path(), &target).map_err(failed("rename to", &target))?;
        let _renamed = partial.keep();
        sync(&self.folder)?;
        let mut all = self.all()?;
        all.truncate(all.len().saturating_sub(self.keep));
        for (_, old) in all {
            fs::remove_dir_all(&old).map_err(failed("remove", &old))?;
        }
        Ok(())
    }
}

impl Checkpoint {
    /// The folder of the checkpoint.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The weights, as a checkpoint of their own.
    #[must_use]
    pub fn model(&self) -> PathBuf {
        self.folder.join(MODEL)
    }

    /// The critic's weights, if there is a critic.
    #[must_use]
    pub fn critic(&self) -> Option<PathBuf> {
        Some(self.folder.join(CRITIC)).filter(|folder| folder.exists())
    }

    /// The optimizers' tensors, by name.
    pub fn optimizer(&self, device: Device) -> Result<Vec<(String, Tensor)>, StateError> {
        let path = self.folder.join(OPTIMIZER);
        let tensors = Tensor::read_safetensors(&path).map_err(|source| StateError::Optimizer { path, source })?;
        Ok(tensors.into_iter().map(|(name, tensor)| (name, tensor.to_device(device))).collect())
    }
}

/// Opens a checkpoint after checking its files against their digests.
fn open(step: i64, folder: PathBuf) -> Result<Checkpoint, StateError> {
    let damaged =
        |path: &Path, reason: String| StateError::Damaged { path: path.to_owned(), reason, way_back: String::new() };
    let path = folder.join(ABOUT);
    let text = fs::read(&path).map_err(|error| damaged(&path, format!("cannot be read ({error})")))?;
    let about: About =
        serde_json::from_slice(&text).map_err(|error| damaged(&path, format!("cannot be parsed ({error})")))?;
    if about.format != FORMAT {
        return Err(StateError::Format { path, found: about.format });
    }
    for (name, digest) in &about.digests {
        let path = folder.join(name);
        let found = digest_of(&path).map_err(|error| damaged(&path, format!("cannot be read ({error})")))?;
        if found != *digest {
            return Err(damaged(&path, "has changed since it was written: its digest differs".to_owned()));
        }
    }
    Ok(Checkpoint { step, optimizer_steps: about.optimizer_steps, folder })
}

fn way_back(damaged: &Path, whole: Option<i64>) -> String {
    let damaged = damaged.display();
    match whole {
        Some(step) => format!(
            "The checkpoint of step {step} is whole: move {damaged} to another place and start again. Training goes on \
             from step {step}, and the batches that were acked since come back"
        ),
        None => format!(
            "No other checkpoint here is whole: put a copy in its place, or move {damaged} to another place and start \
             again with --force, from the base model and with the batches that can still be delivered"
        ),
    }
}

/// Digests of all files below `folder`, by their path in it.
fn digests(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).expect("it was found below the folder");
            found.insert(name.to_string_lossy().into_owned(), digest_of(&path)?);
        }
    }
    Ok(found)
}

fn digest_of(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Removes the folders in `folder` whose names begin with `prefix`.
pub(crate) fn remove_hidden(folder: &Path, prefix: &str) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            tracing::info!(folder = %entry.path().display(), "removing a partial folder that a killed trainer left");
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn write_optimizer(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), StateError> {
    let on_cpu: Vec<(&str, Tensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.to_device(Device::Cpu).contiguous())).collect();
    Tensor::write_safetensors(&on_cpu, path)
        .map_err(|source| StateError::Optimizer { path: path.to_owned(), source })?;
    sync(path)
}

fn sync(path: &Path) -> Result<(), StateError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(failed("sync", path))
}

fn failed<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> StateError + 'a {
    move |source| StateError::File { what, path: path.to_owned(), source }
}
