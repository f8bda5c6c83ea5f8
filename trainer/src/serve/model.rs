//! A served model: checks requests against it, accepts them within its bounds, and exchanges its weights.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;
use tch::Device;
use tokio::sync::{Mutex as AsyncMutex, mpsc, oneshot};

use super::{
    Limits, ModelSource,
    admission::Admission,
    output::Output,
    request::{Request, Ticket},
    routes::Refusal,
    runner::{Command, Commands, Gauges, OtherShape, Runner, Weights},
    sequence::Accepted,
};
use crate::{
    engine::PauseMode,
    model::{ComputeKind, InferenceModel, LoadError},
};

/// Seconds after which a refused request may be sent again.
const RETRY_AFTER_S: u64 = 1;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its checkpoint cannot be loaded.
    #[error("the model `{name}` cannot be loaded")]
    Load {
        /// The model.
        name: String,
        /// The cause.
        source: LoadError,
    },
    /// The caches have no room for a single sequence.
    #[error("--cache-mib has room for {tokens} tokens of the model `{name}`, and it needs room for 2 or more")]
    Cache {
        /// The model.
        name: String,
        /// Number of tokens that fit.
        tokens: usize,
    },
    /// The operating system refused to start a thread.
    #[error("cannot start a thread for the model `{name}`")]
    Thread {
        /// The model.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// Why weights were not loaded. The model keeps its old ones.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpdateError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    OtherShape(#[from] OtherShape),
    #[error("the thread of the model has ended")]
    Ended,
}

/// A model that requests can name.
#[derive(Debug)]
pub(super) struct ServedModel {
    name: String,
    vocabulary: i64,
    /// Longest sequence in tokens.
    context: usize,
    /// Number of tokens that the caches may hold.
    cache_tokens: usize,
    /// Unix time of the start, in seconds.
    created: u64,
    /// Tokens that end a sequence unless the request says otherwise.
    end_tokens: Vec<i64>,
    device: Device,
    compute: ComputeKind,
    limits: Limits,
    admission: Arc<Admission>,
    commands: Commands,
    gauges: Arc<Gauges>,
    /// Ready when the thread has ended.
    thread: AsyncMutex<oneshot::Receiver<()>>,
    /// The checkpoint of the current weights.
    folder: Mutex<PathBuf>,
    /// Held while weights are loaded, so that two updates follow each other.
    update: AsyncMutex<()>,
    next_id: AtomicU64,
}

impl ServedModel {
    /// Loads the model and starts its thread.
    pub(super) fn open(
        source: &ModelSource,
        limits: Limits,
        device: Device,
        compute: ComputeKind,
    ) -> Result<Self, OpenError> {
        let name = source.name.clone();
        let model = InferenceModel::load(&source.folder, device, compute)
            .map_err(|source| OpenError::Load { name: name.clone(), source })?;
        let config = model.config();
        let cache_tokens = limits.cache_tokens(&model);
        if cache_tokens < 2 {
            return Err(OpenError::Cache { name, tokens: cache_tokens });
        }
        let trained = config.max_position_embeddings as usize;
        let bounds = [limits.context.unwrap_or(trained), trained, cache_tokens, limits.tokens];
        let context = bounds.into_iter().min().expect("there are four");
        let vocabulary = config.vocab_size;
        let end_tokens = end_tokens(&source.folder, &config.end_tokens);
        let weights = Weights { model, version: source.version.as_str().into() };
        let (commands, gauges, thread) =
            Runner::start(&name, weights, limits).map_err(|source| OpenError::Thread { name: name.clone(), source })?;
        tracing::info!(model = name, folder = %source.folder.display(), context, cache_tokens, "serving a model");
        Ok(Self {
            name,
            vocabulary,
            context,
            cache_tokens,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            end_tokens,
            device,
            compute,
            limits,
            admission: Admission::new(limits.running + limits.queue, limits.tokens),
            commands,
            gauges,
            thread: AsyncMutex::new(thread),
            folder: Mutex::new(source.folder.clone()),
            update: AsyncMutex::new(()),
            next_id: AtomicU64::new(0),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn context(&self) -> usize {
        self.context
    }

    pub(super) fn cache_tokens(&self) -> usize {
        self.cache_tokens
    }

    pub(super) fn created(&self) -> u64 {
        self.created
    }

    pub(super) fn end_tokens(&self) -> &[i64] {
        &self.end_tokens
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Number of tokens that accepted requests may reach.
    pub(super) fn accepted_tokens(&self) -> usize {
        self.admission.tokens()
    }

    /// The checkpoint of the current weights.
    pub(super) fn folder(&self) -> PathBuf {
        self.folder.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Accepts a request, or says why not. An answer that would exceed the context is shortened to it.
    pub(super) fn submit(&self, mut request: Request) -> Result<(Ticket, Output), Refusal> {
        self.check(&request)?;
        let room = self.context - request.prompt.len();
        request.sampling.new_tokens_max = request.sampling.new_tokens_max.min(room);
        let tokens = request.prompt.len() + request.sampling.new_tokens_max;
        let permit = self.admission.admit(tokens).ok_or(Refusal::Overloaded { retry_after_s: RETRY_AFTER_S })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // The channel holds at most the tokens of one answer, which are bounded.
        let (events, receiver) = mpsc::unbounded_channel();
        self.commands.send(Command::Submit(Box::new(Accepted { id, request, events, permit })));
        Ok((Ticket::new(id, receiver, self.commands.clone()), Output::new(self.gauges.version())))
    }

    fn check(&self, request: &Request) -> Result<(), Refusal> {
        let invalid = |param, message| Err(Refusal::Invalid { param, message });
        if request.prompt.is_empty() {
            return invalid("input_ids", "the prompt is empty".to_owned());
        }
        if let Some(id) = request.prompt.iter().find(|id| !(0..self.vocabulary).contains(*id)) {
            return invalid("input_ids", format!("{id} is not in the vocabulary of {} tokens", self.vocabulary));
        }
        // A sequence that is only scored may fill the context.
        let needed = request.prompt.len() + usize::from(request.sampling.new_tokens_max > 0);
        if needed > self.context {
            return Err(Refusal::ContextLength { context: self.context, prompt: request.prompt.len() });
        }
        if let Some(id) = request.sampling.stop_tokens.iter().find(|id| !(0..self.vocabulary).contains(*id)) {
            return invalid("stop_token_ids", format!("{id} is not in the vocabulary of {} tokens", self.vocabulary));
        }
        Ok(())
    }

    pub(super) fn abort(&self, rid: Option<String>) {
        self.commands.send(Command::Abort(rid));
    }

    /// Pauses. When this returns, no token is drawn until [`ServedModel::resume`].
    pub(super) async fn pause(&self, mode: PauseMode) -> Result<(), Refusal> {
        self.command(|done| Command::Pause(mode, done)).await
    }

    pub(super) async fn resume(&self) -> Result<(), Refusal> {
        self.command(Command::Continue).await
    }

    pub(super) async fn flush(&self) -> Result<(), Refusal> {
        self.command(Command::Flush).await
    }

    /// Aborts everything, for the end of the server.
    pub(super) fn stop(&self) {
        self.commands.send(Command::Stop);
    }

    /// Waits until the thread has ended.
    pub(super) async fn ended(&self) {
        let _ = (&mut *self.thread.lock().await).await;
    }

    /// Loads the checkpoint in `folder`, and draws with it from the next token on. Meanwhile the old weights draw.
    pub(super) async fn update(&self, folder: &Path, version: Option<String>) -> Result<Arc<str>, UpdateError> {
        let _turn = self.update.lock().await;
        let (path, device, compute) = (folder.to_owned(), self.device, self.compute);
        let loading = tokio::task::spawn_blocking(move || InferenceModel::load(&path, device, compute));
        let model = loading.await.map_err(|_| UpdateError::Ended)??;
        let version: Arc<str> = version.map_or_else(|| self.gauges.version(), Into::into);
        let weights = Box::new(Weights { model, version: Arc::clone(&version) });
        let (done, exchanged) = oneshot::channel();
        self.commands.send(Command::Exchange(weights, done));
        exchanged.await.map_err(|_| UpdateError::Ended)??;
        folder.clone_into(&mut self.folder.lock().unwrap_or_else(PoisonError::into_inner));
        tracing::info!(model = self.name, weight_version = %version, folder = %folder.display(), "loaded weights");
        Ok(version)
    }

    async fn command(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) -> Result<(), Refusal> {
        let (done, is_done) = oneshot::channel();
        self.commands.send(command(done));
        is_done.await.map_err(|_| Refusal::Failed)
    }
}

/// The end tokens of a checkpoint: those of `config.json`, and those of `generation_config.json`, which often has more.
fn end_tokens(folder: &Path, configured: &[i64]) -> Vec<i64> {
    let text = std::fs::read(folder.join("generation_config.json")).unwrap_or_default();
    let generation: Value = serde_json::from_slice(&text).unwrap_or_default();
    let more: Vec<i64> = match &generation["eos_token_id"] {
        Value::Array(ids) => ids.iter().filter_map(Value::as_i64).collect(),
        id => id.as_i64().into_iter().collect(),
    };
    let mut ids: Vec<i64> = configured.iter().copied().chain(more).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
