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

use reqwest::header::{self, HeaderValue};
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
    /// File that contains the engine's API key. Space around the key is ignored.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// Environment variable that contains the engine's API key.
    #[serde(default)]
    pub key_env: Option<String>,
}

impl EngineConfig {
    /// An engine without an API key, and with the defaults.
    #[must_use]
    pub fn new(kind: EngineKind, url: String) -> Self {
        let pause = PauseMode::default();
        Self { kind, url, timeout_s: default_timeout_s(), pause, key_file: None, key_env: None }
    }

    /// Reads the engine's API key. Returns the header that carries it, or `None` if no key is configured.
    pub fn authorization(&self) -> Result<Option<HeaderValue>, KeyError> {
        let (from, text) = match (&self.key_file, &self.key_env) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => return Err(KeyError::Twice),
            (Some(path), None) => {
                let text = std::fs::read_to_string(path);
                let text = text.map_err(|source| KeyError::Read { path: path.clone(), source })?;
                (format!("the file {}, the `key_file` of an engine,", path.display()), text)
            }
            (None, Some(name)) => {
                let text = std::env::var(name).map_err(|_| KeyError::Unset(name.clone()))?;
                (format!("the environment variable {name}, the `key_env` of an engine,"), text)
            }
        };
        let key = text.trim();
        if key.is_empty() {
            return Err(KeyError::Empty(from));
        }
        let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| KeyError::Characters(from))?;
        // The debug output of a sensitive value does not contain it.
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// Why the API key of an engine cannot be used. The messages never contain the key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// There are two sources.
    #[error("an engine has both `key_file` and `key_env`: leave one of them out")]
    Twice,
    /// The file cannot be read as text.
    #[error("cannot read {}, the `key_file` of an engine", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The environment variable does not exist, or is not text.
    #[error("the environment variable {0}, the `key_env` of an engine, is not set")]
    Unset(String),
    /// There is no key.
    #[error("{0} is empty")]
    Empty(String),
    /// The key cannot be sent in a header.
    #[error("{0} contains a line break or another character that a header cannot carry")]
    Characters(String),
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
    /// Reads the keys of the configured engines and starts a task for each engine; there may be none.
    pub fn start(runtime: &Handle, told: Vec<EngineConfig>) -> Result<Self, KeyError> {
        Self::with_pause(runtime, told, PAUSE)
    }

    /// The same with another first pause between attempts.
    pub fn with_pause(runtime: &Handle, told: Vec<EngineConfig>, pause: Duration) -> Result<Self, KeyError> {
        forebay_client::install_tls_provider();
        let http = reqwest::Client::new();
        let keys: Vec<_> = told.iter().map(EngineConfig::authorization).collect::<Result<_, _>>()?;
        let workers = told.into_iter().zip(keys).map(|(config, authorization)| {
            let url = config.url.trim_end_matches('/').to_owned();
            let timeout = Duration::from_secs(config.timeout_s);
            let (http, kind, mode) = (http.clone(), config.kind, config.pause);
            let engine = Engine { http, kind, url, authorization, timeout, mode, pause };
            let (wanted, told) = watch::channel(None);
            let (report, progress) = watch::channel(Progress::default());
            let task = runtime.spawn(engine.clone().run(told, report));
            Worker { engine, wanted, progress, task }
        });
        Ok(Self { workers: workers.collect() })
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
    /// The header with the API key.
    authorization: Option<HeaderValue>,
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
        let request = match &self.authorization {
            Some(value) => request.header(header::AUTHORIZATION, value.clone()),
            None => request,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineConfig {
        EngineConfig::new(EngineKind::Sglang, "http://127.0.0.1:30000".to_owned())
    }

    #[test]
    fn keys_are_read_from_files_and_variables() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let in_file = |name: &str, text: Option<&str>| {
            let path = folder.path().join(name);
            if let Some(text) = text {
                std::fs::write(&path, text).expect("the folder can be written to");
            }
            EngineConfig { key_file: Some(path), ..engine() }
        };
        let in_variable = |name: &str| EngineConfig { key_env: Some(name.to_owned()), ..engine() };
        let read = |config: EngineConfig| config.authorization().expect("the key is usable");
        assert_eq!(read(engine()), None);
        let value = read(in_file("good", Some("  sk-1\n"))).expect("there is a key");
        assert_eq!(value, "Bearer sk-1");
        assert!(!format!("{value:?}").contains("sk-1"), "logs do not contain the key");
        let path = std::env::var("PATH").expect("every process has a PATH");
        assert_eq!(read(in_variable("PATH")).expect("there is a key"), format!("Bearer {}", path.trim()));

        let twice = EngineConfig { key_env: Some("PATH".to_owned()), ..in_file("good", None) };
        for (config, expected) in [
            (twice, "both `key_file` and `key_env`"),
            (in_file("empty", Some(" \n")), "is empty"),
            (in_file("lines", Some("sk-1\nsk-2")), "line break"),
            (in_file("missing", None), "missing, the `key_file`"),
            (in_variable("FOREBAY_NO_SUCH_VARIABLE"), "FOREBAY_NO_SUCH_VARIABLE, the `key_env`"),
        ] {
            let error = config.authorization().expect_err("there is no usable key").to_string();
            assert!(error.contains(expected) && !error.contains("sk-"), "{error}");
        }
    }
}
