//! Inference engines that load each published version: `SGLang`, over its HTTP interface.
//!
//! An engine is paused, its cache of keys and values of the old weights emptied, the new weights loaded from disk, and
//! the engine continued: always continued, whatever failed in between. An engine that fails keeps its old weights and
//! is told of the next version; agents see which weights answered them from the engine itself.

use std::{path::Path, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Time for one call: weights of many gigabytes are read from disk.
const TIMEOUT: Duration = Duration::from_mins(10);

/// Attempts of each call.
const ATTEMPTS: u32 = 5;

/// Pause after the first failed attempt; it doubles.
const PAUSE: Duration = Duration::from_millis(500);

/// An inference engine to tell about new weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Which interface it speaks.
    pub kind: EngineKind,
    /// Its base URL, e.g. `http://127.0.0.1:30000`.
    pub url: String,
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
    /// It was not reached, or its answer broke off.
    #[error("{call} at {url} was not answered")]
    Transport {
        /// Path of the call.
        call: &'static str,
        /// The engine.
        url: String,
        /// Why.
        source: reqwest::Error,
    },
    /// It answered with a failure.
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

/// Tells engines about versions.
#[derive(Clone, Debug)]
pub struct Engines {
    http: reqwest::Client,
    told: Vec<EngineConfig>,
    pause: Duration,
}

impl Engines {
    /// The engines that were configured; may be none.
    #[must_use]
    pub fn new(told: Vec<EngineConfig>) -> Self {
        forebay_client::install_tls_provider();
        Self { http: reqwest::Client::new(), told, pause: PAUSE }
    }

    /// The same with another first pause between attempts.
    #[must_use]
    pub fn with_pause(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// Has every engine load version `version` from `folder`, all at once. Those that failed are logged and returned.
    pub async fn load(&self, folder: &Path, version: i64) -> Vec<EngineError> {
        let loads = self.told.iter().map(|engine| self.load_one(engine, folder, version));
        let failed: Vec<EngineError> =
            futures::future::join_all(loads).await.into_iter().filter_map(Result::err).collect();
        for error in &failed {
            tracing::error!(policy.version = version, error = %crate::chain(error), "an engine keeps its old weights");
        }
        failed
    }

    async fn load_one(&self, engine: &EngineConfig, folder: &Path, version: i64) -> Result<(), EngineError> {
        let EngineKind::Sglang = engine.kind;
        let load = async {
            self.call(engine, "/pause_generation", Some(json!({}))).await?;
            self.call(engine, "/flush_cache", None).await?;
            let weights = json!({"model_path": folder, "weight_version": version.to_string()});
            self.call(engine, "/update_weights_from_disk", Some(weights)).await
        };
        let loaded = load.await;
        // Also after a failure: an engine that stays paused would stop every agent.
        self.call(engine, "/continue_generation", Some(json!({}))).await.and(loaded)
    }

    /// One call, repeated while it fails in a way that may pass. All of them may be repeated.
    async fn call(&self, engine: &EngineConfig, call: &'static str, body: Option<Value>) -> Result<(), EngineError> {
        let mut pause = self.pause;
        for attempt in 1.. {
            match self.attempt(engine, call, body.as_ref()).await {
                Err(error) if attempt < ATTEMPTS => {
                    tracing::debug!(%error, attempt, "an engine is asked again");
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                outcome => return outcome,
            }
        }
        unreachable!("the last attempt returns")
    }

    async fn attempt(
        &self,
        engine: &EngineConfig,
        call: &'static str,
        body: Option<&Value>,
    ) -> Result<(), EngineError> {
        let target = format!("{}{call}", engine.url.trim_end_matches('/'));
        let request = match body {
            Some(body) => self.http.post(target).json(body),
            None => self.http.get(target),
        };
        let transport = |source| EngineError::Transport { call, url: engine.url.clone(), source };
        let response = request.timeout(TIMEOUT).send().await.map_err(transport)?;
        let status = response.status();
        let body = response.text().await.map_err(transport)?;
        // SGLang answers 200 with `success: false` where the weights do not fit.
        let says_no = serde_json::from_str::<Value>(&body).is_ok_and(|answer| answer["success"] == false);
        if status.is_success() && !says_no {
            return Ok(());
        }
        let body = body.chars().take(500).collect();
        Err(EngineError::Refused { call, url: engine.url.clone(), status: status.as_u16(), body })
    }
}
