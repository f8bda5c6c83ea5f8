//! What an engine says of its model before it is called: which engine it is, how long its context is, and whether the
//! model is an adapter.
//!
//! vLLM and SGLang list their models in the same shape, and each writes its own name into it.

use std::time::Duration;

use serde::Deserialize;

use super::{client::Upstream, kind::EngineKind, options::UpstreamOptions};

const MODELS: &str = "/v1/models";

/// How long an engine has for its list. A paused engine has it, too.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The largest list that is read: thousands of adapters.
const BYTES_MAX: usize = 1 << 20;

#[derive(Debug, Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    owned_by: Option<String>,
    /// The model that an adapter belongs to.
    parent: Option<String>,
    max_model_len: Option<u64>,
}

/// What a list says against the configuration.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Contradiction {
    pub(super) problem: String,
    pub(super) remedy: String,
}

impl Upstream {
    /// Whether the engine lists the model as an adapter of another model. False if it has no list.
    pub async fn serves_adapter(&self, model: &str) -> bool {
        for worker in 0..self.options.urls.len() {
            if let Some(models) = self.models(worker).await {
                return models.find(model).is_some_and(|found| found.parent.is_some());
            }
        }
        false
    }

    /// What a worker says against the configuration, if anything. Engines need not have a list.
    pub(super) async fn contradiction(&self, model: &str, worker: usize) -> Option<Contradiction> {
        self.models(worker).await?.contradiction(model, &self.options)
    }

    async fn models(&self, worker: usize) -> Option<Models> {
        let reading = self.transport.get(worker, MODELS, BYTES_MAX);
        let body = tokio::time::timeout(TIMEOUT, reading).await.ok()??;
        serde_json::from_slice(&body).ok()
    }
}

impl Models {
    fn find(&self, model: &str) -> Option<&Model> {
        self.data.iter().find(|found| found.id == model)
    }

    fn contradiction(&self, model: &str, options: &UpstreamOptions) -> Option<Contradiction> {
        // SGLang answers to any name.
        let found = self.find(model).or(self.data.first())?;
        let says = match (options.kind, found.owned_by.as_deref()) {
            (EngineKind::Sglang, Some("vllm")) => Some(("sglang", "vllm")),
            (EngineKind::Vllm, Some("sglang")) => Some(("vllm", "sglang")),
            _ => None,
        };
        if let Some((configured, name)) = says {
            return Some(Contradiction {
                problem: format!("`kind` is {configured:?}, but the engine says that it is {name}"),
                remedy: format!("set kind = {name:?}"),
            });
        }
        // An adapter has the context of its model.
        let base = found.parent.as_deref().and_then(|parent| self.find(parent));
        let context = found.max_model_len.or_else(|| base?.max_model_len)?;
        let configured = options.context_tokens.filter(|configured| u64::from(*configured) > context)?;
        Some(Contradiction {
            problem: format!("`context_tokens` is {configured}, but the engine's context has {context} tokens"),
            remedy: format!(
                "set context_tokens = {context}, or start the engine with a longer context (vLLM: --max-model-len, \
                 SGLang: --context-length)"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What vLLM 0.32.0 answers, without the permissions, and an adapter as it lists it.
    const VLLM: &str = r#"{"object":"list","data":[
        {"id":"qwen","object":"model","created":1795804796,"owned_by":"vllm","root":"qwen","parent":null,
         "max_model_len":4096,"permission":[{"id":"modelperm-9c2c","object":"model_permission","group":null}]},
        {"id":"math","object":"model","created":1795804796,"owned_by":"vllm","root":"/adapters/math","parent":"qwen",
         "max_model_len":null,"permission":[]}]}"#;

    #[test]
    fn the_list_of_vllm_is_read() {
        let models: Models = serde_json::from_str(VLLM).expect("a list");
        let options = |kind, context_tokens| {
            let options = UpstreamOptions::new("x", kind, ["http://a"]).expect("a usable URL");
            UpstreamOptions { context_tokens: Some(context_tokens), ..options }
        };
        for model in ["qwen", "math"] {
            assert_eq!(models.contradiction(model, &options(EngineKind::Vllm, 4_096)), None);
            let found = models.contradiction(model, &options(EngineKind::Vllm, 4_097)).expect("it is too large");
            assert!(found.remedy.contains("context_tokens = 4096"), "{found:?}");
            let found = models.contradiction(model, &options(EngineKind::Sglang, 1)).expect("it is no SGLang");
            assert_eq!(found.remedy, "set kind = \"vllm\"");
        }
        assert!(models.find("math").is_some_and(|model| model.parent.is_some()));
        assert!(models.find("qwen").is_some_and(|model| model.parent.is_none()));
    }
}
