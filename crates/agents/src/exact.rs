//! The mode exact: the service renders prompts and sends ids.

use std::time::{SystemTime, UNIX_EPOCH};

use forebay_gateway::{
    DialectError, Request, Upstream, UpstreamError,
    cancel::Cancellation,
    canonical::Continued,
    exact::{Bounds, Difference, ExactError, Family, Renderer, RendererOptions},
    system::LaterSystem,
    upstream::{EngineKind, ExactPrompt, probe::probe_request},
};

use crate::configured::{ExactConfig, FamilyConfig};

/// The tokenizer and the template of an engine's model.
#[derive(Debug)]
pub(crate) struct Exact {
    renderer: Renderer,
    /// What the engine is probed with.
    probe: (Request, Vec<i32>),
}

impl Exact {
    /// Reads the files and tests them. Prompts are those that an engine of this kind would render.
    pub(crate) fn load(name: &str, config: &ExactConfig, kind: EngineKind) -> Result<Self, String> {
        let family = match &config.family {
            FamilyConfig::Named(name) => Family::named(name)
                .ok_or_else(|| format!("family {name:?} is not known: name `qwen`, or its tokens"))?,
            FamilyConfig::Given { stops, close, trims } => {
                Family { stops: stops.clone(), close: close.clone(), trims: trims.clone() }
            }
        };
        let options = RendererOptions {
            tokenizer: config.tokenizer.clone(),
            template: config.template.clone(),
            family,
            special_tokens_in_text: config.special_tokens_in_text,
            kind,
        };
        let renderer = Renderer::load(&options).map_err(|error| error.to_string())?;
        let found = renderer.self_test();
        if !found.has_tools {
            tracing::warn!(upstream.name = name, "the chat template has no place for results of tools");
        }
        if let Some(difference) = &found.difference {
            tracing::info!(
                upstream.name = name,
                before = difference.before,
                after = difference.after,
                "the chat template changes earlier messages; the mode exact keeps them as they were"
            );
        }
        let request = probe_request();
        let prompt = renderer.prompt(&request, 0, None, &Cancellation::default());
        let prompt = prompt.map_err(|error| error.to_string())?;
        Ok(Self { renderer, probe: (request, prompt.ids) })
    }

    /// The ids of a request's prompt, and how many special tokens the texts have that were rendered. `None` if there would
    /// be more than `tokens_max` ids. This takes long for long prompts, and takes bytes of memory with `memory`.
    pub(crate) fn prompt(
        &self,
        request: &Request,
        clock_s: i64,
        continued: Option<&Continued>,
        tokens_max: usize,
        cancellation: &Cancellation,
        memory: &dyn Fn(usize) -> bool,
    ) -> Result<Option<(Vec<i32>, u64)>, DialectError> {
        let bounds = Bounds { tokens_max, cancellation, memory };
        match self.renderer.prompt_within(request, clock_s, continued, bounds) {
            Ok(prompt) => Ok(Some((prompt.ids, prompt.special_tokens))),
            Err(ExactError::TooManyTokens { .. }) => Ok(None),
            Err(error) => {
                tracing::debug!(error = %error, "a prompt cannot be rendered");
                Err(DialectError::from(&error))
            }
        }
    }

    /// The text of ids without special tokens.
    pub(crate) fn text(&self, ids: &[i32]) -> String {
        self.renderer.decode(ids)
    }

    /// The text of ids with special tokens.
    pub(crate) fn whole_text(&self, ids: &[i32]) -> String {
        self.renderer.decode_whole(ids)
    }

    /// What becomes of system messages behind the first message.
    pub(crate) fn later_system(&self) -> LaterSystem {
        self.renderer.self_test().later_system
    }

    /// The request that an engine is probed with, and the ids of its prompt.
    pub(crate) fn probe(&self) -> (&Request, &[i32]) {
        (&self.probe.0, &self.probe.1)
    }

    /// What is wrong if the engine does not render as this service does. Prompts that the engine does not tell are taken for
    /// right.
    pub(crate) async fn compare(&self, upstream: &Upstream, model: &str) -> Result<Option<String>, UpstreamError> {
        // Templates that print the date print today's.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for request in self.renderer.odd_conversations() {
            let own = self.renderer.prompt(&request, now.as_secs() as i64, None, &Cancellation::default());
            let Ok(own) = own else { continue };
            for ids in upstream.rendered(model, &request).await? {
                if let Some(Difference { before, after }) = self.renderer.difference(&own.ids, &ids) {
                    return Ok(Some(format!(
                        "the engine renders {after:?} where the service renders {before:?}; name the files of the \
                         engine's model in `tokenizer` and `template`, and start the engine without \
                         --default-chat-template-kwargs and --chat-template-content-format"
                    )));
                }
            }
        }
        Ok(None)
    }

    /// What an engine is sent in place of messages.
    pub(crate) fn ids<'a>(&'a self, ids: &'a [i32], text: &'a (dyn Fn(&[i32]) -> String + Sync)) -> ExactPrompt<'a> {
        ExactPrompt { ids, stop_ids: self.renderer.stop_ids(), text }
    }
}
