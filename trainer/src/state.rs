//! What a trainer needs to go on exactly where it was: weights, optimizer, step.
//!
//! ```text
//! checkpoints/step-00000040/
//!     model/                  a complete Hugging Face checkpoint, float32
//!     critic/                 likewise, where there is a critic
//!     optimizer.safetensors   first and second moments of both, by parameter name
//!     trainer.json            step, format
//! ```
//!
//! A checkpoint appears whole or not at all: it is written aside, reaches the disk, and is then renamed. Random numbers
//! need no state of their own: they are drawn from the seed and the step.

use std::{
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
const ABOUT: &str = "trainer.json";

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
    /// Updates of the optimizer: batches that train nothing are steps without one.
    pub optimizer_steps: i64,
    folder: PathBuf,
}

/// What is written.
#[derive(Debug)]
pub struct State<'a> {
    /// Optimizer step.
    pub step: i64,
    /// Weights, and the checkpoint whose configuration and tokenizer go along.
    pub model: (&'a Parameters, &'a Path),
    /// Likewise of the critic.
    pub critic: Option<(&'a Parameters, &'a Path)>,
    /// Updates of the optimizer.
    pub optimizer_steps: i64,
    /// Tensors of the optimizers, by name.
    pub optimizer: Vec<(String, Tensor)>,
}

#[derive(Serialize, Deserialize)]
struct About {
    format: u32,
    step: i64,
    optimizer_steps: i64,
}

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file operation failed.
    #[error("cannot {what} {}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The weights cannot be written or read.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// The moments cannot be written or read.
    #[error("the optimizer's state in {} cannot be used", path.display())]
    Optimizer {
        /// The file.
        path: PathBuf,
        /// Why.
        source: tch::TchError,
    },
    /// Another version of the trainer wrote it.
    #[error("{} has format {found}, this trainer reads {FORMAT}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its number.
        found: u32,
    },
}

impl Checkpoints {
    /// Checkpoints below `folder`, of which the newest `keep` stay.
    #[must_use]
    pub fn new(folder: PathBuf, keep: usize) -> Self {
        Self { folder, keep: keep.max(1) }
    }

    /// The newest one, if there is any.
    pub fn latest(&self) -> Result<Option<Checkpoint>, StateError> {
        let Some((step, folder)) = self.all()?.into_iter().next_back() else { return Ok(None) };
        let path = folder.join(ABOUT);
        let text = fs::read(&path).map_err(failed("read", &path))?;
        let about: About = serde_json::from_slice(&text).map_err(io::Error::from).map_err(failed("read", &path))?;
        if about.format != FORMAT {
            return Err(StateError::Format { path, found: about.format });
        }
        Ok(Some(Checkpoint { step, optimizer_steps: about.optimizer_steps, folder }))
    }

    /// Every complete one, oldest first.
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

    /// Writes a checkpoint durably and removes those that are too old.
    pub fn save(&self, state: &State<'_>) -> Result<(), StateError> {
        let target = self.folder.join(format!("step-{:08}", state.step));
        if target.exists() {
            // The same step of the same lineage: nothing goes on from an older checkpoint while this one is there.
            return Ok(());
        }
        fs::create_dir_all(&self.folder).map_err(failed("create", &self.folder))?;
        let partial = tempfile::Builder::new()
            .prefix(".partial-")
            .tempdir_in(&self.folder)
            .map_err(failed("create a folder in", &self.folder))?;
        let exact = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
        checkpoint::write(state.model.0, state.model.1, &partial.path().join(MODEL), &exact)?;
        if let Some((parameters, base)) = state.critic {
            checkpoint::write(parameters, base, &partial.path().join(CRITIC), &exact)?;
        }
        write_optimizer(&partial.path().join(OPTIMIZER), &state.optimizer)?;
        let about = About { format: FORMAT, step: state.step, optimizer_steps: state.optimizer_steps };
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
