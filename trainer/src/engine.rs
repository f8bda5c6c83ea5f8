//! Inference engines that load each published version: `SGLang`, over its HTTP interface.
//!
//! Each engine has a task of its own, so that one that hangs delays neither training nor the others. The task brings its
//! engine to the newest version that it was told of: pause, empty the cache of keys and values of the old weights, load
//! from disk, continue. An engine is continued whatever failed before, again and again until it answers, because an
//! engine that stays paused stops every agent. Nobody waits for an engine whose last load failed: it is tried again with
//! back-off and catches up with the version that is the newest by then.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

/// Timeout of a call that loads nothing.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout of the last attempt to continue an engine when the trainer ends.
const LAST_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of attempts of a call that is answered with a failure: `SGLang` refuses to empty its cache while requests
/// run.
const ATTEMPTS: u32 = 5;

/// Pause after the first failed attempt; it doubles with each attempt.
const PAUSE: Duration = Duration::from_millis(500);

/// Longest pause between attempts to reach an engine that failed.
const PAUSE_MAX: Duration = Duration::from_mins(1);

const CONTINUE: &str = "/continue_generation";
const UPDATE: &str = "/update_weights_from_disk";

/// An inference engine that loads new weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// The interface of the engine.
    pub kind: EngineKind,
    /// Its base URL, e.g. `http://127.0.0.1:30000`.
    pub url: String,
    /// Seconds that loading may take: many gigabytes of weights are read from disk.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
    /// What happens to requests that run when a version is loaded.
    #[serde(default)]
    pub pause: PauseMode,
}

/// What a pause does to the running requests of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// They end with the tokens that they have. This is what engines do that know no other mode.
    #[default]
    Abort,
    /// They wait, and their caches of keys and values are computed again.
    Retract,
    /// They wait, and keep their caches.
    InPlace,
}

fn default_timeout_s() -> u64 {
    600
}

/// Interfaces of inference engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// `SGLang`'s `/pause_generation`, `/flush_cache`, `/update_weights_from_disk`, `/continue_generation`.
    Sglang,
}

/// Why an engine does not have the new weights.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The engine could not be reached, did not answer in time, or its answer broke off.
    #[error("{call} at {url} was not answered")]
    Transport {
        /// Path of the call.
        call: &'static str,
        /// The engine.
        url: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// The engine answered with a failure.
    #[error("{call} at {url} failed with status {status}: {body}")]
    Refused {
        /// Path of the call.
        call: &'static str,
        /// The engine.
        url: String,
        /// HTTP status.
        status: u16,
        /// Beginning of the answer.
        body: String,
    },
}

impl EngineError {
    /// Whether the engine would refuse the same weights again.
    fn is_about_the_weights(&self) -> bool {
        matches!(self, Self::Refused { call: UPDATE, status: ..500, .. })
    }
}

/// Informs engines about new versions.
#[derive(Debug)]
pub struct Engines {
    workers: Vec<Worker>,
}

/// The task of one engine, as the others see it.
#[derive(Debug)]
struct Worker {
    engine: Engine,
    wanted: watch::Sender<Option<Wanted>>,
    progress: watch::Receiver<Progress>,
    task: JoinHandle<()>,
}

/// A version to load.
#[derive(Clone, Debug)]
struct Wanted {
    folder: PathBuf,
    version: i64,
}

/// The state of an engine.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Version that the engine has loaded.
    loaded: Option<i64>,
    /// Version that was tried last.
    tried: Option<i64>,
    /// Whether the last load failed. The next one is then not waited for.
    is_failing: bool,
    /// Whether the engine refused the weights. The same weights are then not tried again.
    has_refused: bool,
    /// Whether the engine is between pause and continue.
    is_busy: bool,
}

impl Engines {
    /// Starts a task for each configured engine; there may be none.
    #[must_use]
    pub fn start(runtime: &Handle, told: Vec<EngineConfig>) -> Self {
        Self::with_pause(runtime, told, PAUSE)
    }

    /// The same with another first pause between attempts.
    #[must_use]
    pub fn with_pause(runtime: &Handle, told: Vec<EngineConfig>, pause: Duration) -> Self {
        forebay_client::install_tls_provider();
        let http = reqwest::Client::new();
        let workers = told.into_iter().map(|config| {
            let url = config.url.trim_end_matches('/').to_owned();
            let timeout = Duration::from_secs(config.timeout_s);
            let engine = Engine { http: http.clone(), kind: config.kind, url, timeout, mode: config.pause, pause };
            let (wanted, told) = watch::channel(None);
            let (report, progress) = watch::channel(Progress::default());
            let task = runtime.spawn(engine.clone().run(told, report));
            Worker { engine, wanted, progress, task }
        });
        Self { workers: workers.collect() }
    }

    /// Makes every engine load version `version` from `folder`, all at the same time. Waits at most `wait` for the
    /// engines without a failure; the others catch up later.
    pub async fn load(&self, folder: &Path, version: i64, wait: Duration) {
        let well: Vec<&Worker> = self.workers.iter().filter(|worker| !worker.progress.borrow().is_failing).collect();
        for worker in &self.workers {
            worker.wanted.send_replace(Some(Wanted { folder: folder.to_owned(), version }));
        }
        let tried = well.iter().map(|worker| worker.until(|progress| progress.tried >= Some(version)));
        if tokio::time::timeout(wait, futures::future::join_all(tried)).await.is_err() {
            for worker in well.iter().filter(|worker| worker.progress.borrow().tried < Some(version)) {
                let engine = &worker.engine.url;
                tracing::warn!(
                    engine,
                    policy.version = version,
                    "an engine has not loaded the version in time; it will catch up"
                );
            }
        }
    }

    /// Waits at most `wait` until every engine has loaded the newest version or has refused it. Logs the engines that
    /// then have an older version.
    pub async fn settle(&self, wait: Duration) {
        let settled = self.workers.iter().map(|worker| {
            let newest = worker.newest();
            worker.until(move |progress| {
                let has_refused = progress.has_refused && progress.tried >= newest;
                !progress.is_busy && (progress.loaded >= newest || has_refused)
            })
        });
        let _ = tokio::time::timeout(wait, futures::future::join_all(settled)).await;
        for worker in &self.workers {
            let loaded = worker.progress.borrow().loaded;
            if loaded < worker.newest() {
                tracing::error!(
                    engine = worker.engine.url,
                    policy.version = loaded,
                    "an engine does not have the newest version"
                );
            }
        }
    }

    /// Gives engines that are being updated the time `wait` to finish, and then continues those that are still paused.
    pub async fn release(&self, wait: Duration) {
        let idle = self.workers.iter().map(|worker| worker.until(|progress| !progress.is_busy));
        let _ = tokio::time::timeout(wait, futures::future::join_all(idle)).await;
        let paused = self.workers.iter().filter(|worker| worker.progress.borrow().is_busy).map(|worker| async {
            worker.task.abort();
            if let Err(error) = worker.engine.attempt(CONTINUE, Some(&json!({})), LAST_TIMEOUT).await {
                let engine = &worker.engine.url;
                tracing::error!(
                    engine,
                    error = crate::chain(&error),
                    "an engine may still be paused: continue it by hand"
                );
            }
        });
        futures::future::join_all(paused).await;
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.task.abort();
        }
    }
}

impl Worker {
    fn newest(&self) -> Option<i64> {
        self.wanted.borrow().as_ref().map(|wanted| wanted.version)
    }

    async fn until(&self, holds: impl FnMut(&Progress) -> bool) {
        // The task ends with the runtime alone.
        let _ = self.progress.clone().wait_for(holds).await;
    }
}

/// One engine.
#[derive(Clone, Debug)]
struct Engine {
    http: reqwest::Client,
    kind: EngineKind,
    url: String,
    timeout: Duration,
    mode: PauseMode,
    /// First pause between two attempts.
    pause: Duration,
}

impl Engine {
    async fn run(self, mut wanted: watch::Receiver<Option<Wanted>>, progress: watch::Sender<Progress>) {
        let mut pause = self.pause;
        let mut tries_again = false;
        loop {
            let told = wanted.changed();
            if !tries_again {
                if told.await.is_err() {
                    return;
                }
            } else if tokio::time::timeout(pause, told).await.is_ok_and(|told| told.is_err()) {
                return;
            } else {
                pause = (pause * 2).min(PAUSE_MAX);
            }
            let Some(next) = wanted.borrow_and_update().clone() else { continue };
            match self.bring_to(&next, &progress).await {
                Ok(()) => (pause, tries_again) = (self.pause, false),
                Err(error) => tries_again = !error.is_about_the_weights(),
            }
        }
    }

    /// Loads a version, and continues the engine whether the load succeeded or not.
    async fn bring_to(&self, next: &Wanted, progress: &watch::Sender<Progress>) -> Result<(), EngineError> {
        progress.send_modify(|progress| progress.is_busy = true);
        let loaded = self.load(next).await;
        let mut continued = self.attempt(CONTINUE, Some(&json!({})), self.short()).await;
        if let Some(error) = loaded.as_ref().err().or(continued.as_ref().err()) {
            let (engine, error) = (&self.url, crate::chain(error));
            tracing::error!(
                engine,
                policy.version = next.version,
                error,
                "an engine did not load the version and keeps its old weights"
            );
        }
        progress.send_modify(|progress| {
            progress.tried = Some(next.version);
            progress.is_failing = loaded.is_err() || continued.is_err();
            progress.has_refused = loaded.as_ref().is_err_and(EngineError::is_about_the_weights);
            progress.loaded = if loaded.is_ok() { Some(next.version) } else { progress.loaded };
        });
        let mut pause = self.pause;
        while let Err(error) = continued {
            tracing::warn!(engine = self.url, error = crate::chain(&error), "an engine may be paused; continuing it");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
            continued = self.attempt(CONTINUE, Some(&json!({})), self.short()).await;
        }
        progress.send_modify(|progress| {
            progress.is_busy = false;
            progress.is_failing = loaded.is_err();
        });
        loaded
    }

    async fn load(&self, next: &Wanted) -> Result<(), EngineError> {
        let EngineKind::Sglang = self.kind;
        self.call("/pause_generation", Some(json!({"mode": self.mode})), self.short()).await?;
        // SGLang refuses to empty its cache while requests keep theirs.
        if self.mode != PauseMode::InPlace {
            self.call("/flush_cache", None, self.short()).await?;
        }
        let weights = json!({"model_path": next.folder, "weight_version": next.version.to_string()});
        self.call(UPDATE, Some(weights), self.timeout).await
    }

    fn short(&self) -> Duration {
        self.timeout.min(CALL_TIMEOUT)
    }

    /// Makes one call and repeats it while it is answered with a failure. A call without an answer is not repeated,
    /// because the engine hangs.
    async fn call(&self, call: &'static str, body: Option<Value>, timeout: Duration) -> Result<(), EngineError> {
        let mut pause = self.pause;
        for attempt in 1.. {
            match self.attempt(call, body.as_ref(), timeout).await {
                // Loading is not repeated here, because the engine would stay paused for longer.
                Err(error @ EngineError::Refused { .. }) if attempt < ATTEMPTS && call != UPDATE => {
                    tracing::debug!(%error, attempt, "a call to an engine failed; repeating it");
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                outcome => return outcome,
            }
        }
        unreachable!("the last attempt returns")
    }

    async fn attempt(&self, call: &'static str, body: Option<&Value>, timeout: Duration) -> Result<(), EngineError> {
        let target = format!("{}{call}", self.url);
        let request = match body {
            Some(body) => self.http.post(target).json(body),
            None => self.http.get(target),
        };
        let transport = |source| EngineError::Transport { call, url: self.url.clone(), source };
        let response = request.timeout(timeout).send().await.map_err(transport)?;
        let status = response.status();
        let body = response.text().await.map_err(transport)?;
        // SGLang answers 200 with `success: false` if the weights do not match its model.
        let says_no = serde_json::from_str::<Value>(&body).is_ok_and(|answer| answer["success"] == false);
        if status.is_success() && !says_no {
            return Ok(());
        }
        let body = body.chars().take(500).collect();
        Err(EngineError::Refused { call, url: self.url.clone(), status: status.as_u16(), body })
    }
}
