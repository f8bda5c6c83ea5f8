//! A served model: checks requests against it, accepts them within its bounds, and exchanges its weights.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;
use tch::Device;
use tokio::sync::{Mutex as AsyncMutex, mpsc, oneshot};

use super::{
    Limits,
    admission::Admission,
    output::Output,
    request::{Request, Ticket},
    routes::Refusal,
    runner::{Command, Commands, Gauges, OtherShape, Runner, Weights},
    sequence::Accepted,
    text::{Text, TextError},
};
use crate::{
    engine::PauseMode,
    model::{ComputeKind, InferenceModel, LoadError},
};

/// Seconds after which a request may be sent again that was refused because the model is busy.
const BUSY_RETRY_AFTER_S: u64 = 1;

/// The same if the model has no weights yet.
const ABSENT_RETRY_AFTER_S: u64 = 5;

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
    /// Its tokenizer or its chat template cannot be read.
    #[error("the text of the model `{name}` cannot be loaded")]
    Text {
        /// The model.
        name: String,
        /// The cause.
        source: TextError,
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
    #[error("the model follows the policy `{0}` and loads only its versions")]
    Follows(String),
    #[error("the thread of the model has ended")]
    Ended,
}

/// How all models are served.
#[derive(Clone, Debug)]
pub(super) struct Hosting {
    pub(super) limits: Limits,
    pub(super) device: Device,
    pub(super) compute: ComputeKind,
    /// Receives the name of a model whose thread has ended.
    pub(super) ended: mpsc::UnboundedSender<String>,
}

/// A name that requests can use. A model that follows a policy has no weights before their first version.
#[derive(Debug)]
pub(super) struct Slot {
    name: String,
    /// The policy that it follows.
    policy: Option<String>,
    model: OnceLock<ServedModel>,
}

impl Slot {
    pub(super) fn new(name: String, policy: Option<String>) -> Self {
        Self { name, policy, model: OnceLock::new() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The model, if it has weights.
    pub(super) fn model(&self) -> Result<&ServedModel, Refusal> {
        let absent = || Refusal::NoWeights { model: self.name.clone(), retry_after_s: ABSENT_RETRY_AFTER_S };
        self.model.get().ok_or_else(absent)
    }

    pub(super) fn fill(&self, model: ServedModel) {
        assert!(self.model.set(model).is_ok(), "a model is started once");
    }

    /// Loads the checkpoint in `folder`, and draws with it from the next token on. Meanwhile the old weights draw.
    pub(super) async fn update(&self, folder: &Path, version: Option<String>) -> Result<Arc<str>, UpdateError> {
        if let Some(policy) = &self.policy {
            return Err(UpdateError::Follows(policy.clone()));
        }
        self.model.get().ok_or(UpdateError::Ended)?.update(folder, version).await
    }
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
    /// Its tokenizer and its chat template. All weights of a model have the same.
    text: Option<Arc<Text>>,
    device: Device,
    compute: ComputeKind,
    limits: Limits,
    admission: Arc<Admission>,
    commands: Commands,
    gauges: Arc<Gauges>,
    /// The checkpoint of the current weights.
    folder: Mutex<PathBuf>,
    /// Held while weights are loaded, so that two updates follow each other.
    update: AsyncMutex<()>,
    next_id: AtomicU64,
}

impl ServedModel {
    /// Loads the checkpoint in `folder` and starts a model with it.
    pub(super) fn open(name: &str, folder: &Path, version: &str, hosting: &Hosting) -> Result<Self, OpenError> {
        let model = InferenceModel::load(folder, hosting.device, hosting.compute)
            .map_err(|source| OpenError::Load { name: name.to_owned(), source })?;
        Self::start(name, Weights { model, version: version.into() }, folder, hosting)
    }

    /// Starts the thread of a model, with weights that were loaded from `folder`.
    pub(super) fn start(name: &str, weights: Weights, folder: &Path, hosting: &Hosting) -> Result<Self, OpenError> {
        let Hosting { limits, device, compute, .. } = *hosting;
        let config = weights.model.config();
        let cache_tokens = limits.cache_tokens(&weights.model);
        if cache_tokens < 2 {
            return Err(OpenError::Cache { name: name.to_owned(), tokens: cache_tokens });
        }
        let trained = config.max_position_embeddings as usize;
        let bounds = [limits.context.unwrap_or(trained), trained, cache_tokens, limits.tokens];
        let context = bounds.into_iter().min().expect("there are four");
        let vocabulary = config.vocab_size;
        let end_tokens = end_tokens(folder, &config.end_tokens);
        let text = Text::load(folder).map_err(|source| OpenError::Text { name: name.to_owned(), source })?;
        let version = Arc::clone(&weights.version);
        let (commands, gauges) = Runner::start(name, weights, limits, hosting.ended.clone())
            .map_err(|source| OpenError::Thread { name: name.to_owned(), source })?;
        let shown = folder.display();
        tracing::info!(model = name, weight_version = %version, folder = %shown, context, cache_tokens, "serving a model");
        Ok(Self {
            name: name.to_owned(),
            vocabulary,
            context,
            cache_tokens,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            end_tokens,
            text: text.map(Arc::new),
            device,
            compute,
            limits,
            admission: Admission::new(limits.running + limits.queue, limits.tokens),
            commands,
            gauges,
            folder: Mutex::new(folder.to_owned()),
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

    pub(super) fn text(&self) -> Option<&Arc<Text>> {
        self.text.as_ref()
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

    /// Accepts a request, or says why not. An answer that would exceed the context is shortened to it. The output ends
    /// where its text contains one of `stops`.
    pub(super) fn submit(&self, mut request: Request, stops: Vec<String>) -> Result<(Ticket, Output), Refusal> {
        self.check(&request)?;
        if self.text.is_none() && !stops.is_empty() {
            let message = "the checkpoint has no tokenizer; use `stop_token_ids`".to_owned();
            return Err(Refusal::Invalid { param: "stop", message });
        }
        let room = self.context - request.prompt.len();
        request.sampling.new_tokens_max = request.sampling.new_tokens_max.min(room);
        let tokens = request.prompt.len() + request.sampling.new_tokens_max;
        let permit = self.admission.admit(tokens).ok_or(Refusal::Overloaded { retry_after_s: BUSY_RETRY_AFTER_S })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // The channel holds at most the tokens of one answer, which are bounded.
        let (events, receiver) = mpsc::unbounded_channel();
        self.commands.send(Command::Submit(Box::new(Accepted { id, request, events, permit })));
        Ok((
            Ticket::new(id, receiver, self.commands.clone()),
            Output::new(self.gauges.version(), self.text.clone(), stops),
        ))
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

    async fn update(&self, folder: &Path, version: Option<String>) -> Result<Arc<str>, UpdateError> {
        let _turn = self.update.lock().await;
        let (path, device, compute) = (folder.to_owned(), self.device, self.compute);
        let loading = tokio::task::spawn_blocking(move || InferenceModel::load(&path, device, compute));
        let model = loading.await.map_err(|_| UpdateError::Ended)??;
        let version: Arc<str> = version.map_or_else(|| self.gauges.version(), Into::into);
        self.exchange(Weights { model, version: Arc::clone(&version) }, folder).await?;
        Ok(version)
    }

    /// Draws with weights that were loaded from `folder`, from the next token on.
    pub(super) async fn exchange(&self, weights: Weights, folder: &Path) -> Result<(), UpdateError> {
        let version = Arc::clone(&weights.version);
        let (done, exchanged) = oneshot::channel();
        self.commands.send(Command::Exchange(Box::new(weights), done));
        exchanged.await.map_err(|_| UpdateError::Ended)??;
        folder.clone_into(&mut self.folder.lock().unwrap_or_else(PoisonError::into_inner));
        tracing::info!(model = self.name, weight_version = %version, folder = %folder.display(), "loaded weights");
        Ok(())
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
