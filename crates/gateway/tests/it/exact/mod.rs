//! The mode exact: prompts of ids that the gateway renders.

mod aborts;
mod calls;
mod endpoints;
mod fields;
mod forged;
mod habits;
mod rendered;
mod renderer;
mod special;
mod streaming;

use std::sync::Arc;

use forebay_fake_engine::{EngineKind, FakeEngine, IdFault, model::logprob, tokenizer};
use forebay_gateway::{
    Completion, Dialect, Request, Upstream, UpstreamError,
    cancel::Cancellation,
    canonical::{Canonical, Paths, Record},
    exact::{ExactError, Family, Prompt, Renderer, RendererOptions},
    upstream::{
        Answered, EngineCall, ExactPrompt, Parsers, SpecialTokensInText, Streaming, UpstreamOptions,
        probe::{Verdict, probe_request},
    },
};
use serde_json::{Value, json};

use crate::support::{answer, call, options, parsed};

/// The end of the fake engine's answers.
fn family() -> Family {
    Family { stops: vec!["<|im_end|>".to_owned()], close: Some("<|im_end|>".to_owned()), trims: Vec::new() }
}

/// The fake engine's tokenizer with its template, or with another one.
fn renderer_with(template: Option<&str>, family: Family) -> Result<Renderer, ExactError> {
    renderer_of(template, family, SpecialTokensInText::Allow, |_| {})
}

/// The same for another kind of engine than SGLang.
fn renderer_for(kind: EngineKind, template: Option<&str>) -> Result<Renderer, ExactError> {
    renderer_like(template, family(), |options| options.kind = kind, |_| {})
}

/// The same with another treatment of special tokens, and a tokenizer that was changed.
fn renderer_of(
    template: Option<&str>,
    family: Family,
    special_tokens_in_text: SpecialTokensInText,
    change: impl FnOnce(&mut Value),
) -> Result<Renderer, ExactError> {
    renderer_like(template, family, |options| options.special_tokens_in_text = special_tokens_in_text, change)
}

fn renderer_like(
    template: Option<&str>,
    family: Family,
    set: impl FnOnce(&mut RendererOptions),
    change: impl FnOnce(&mut Value),
) -> Result<Renderer, ExactError> {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    FakeEngine::write_model(folder.path()).expect("the folder can be written to");
    if let Some(template) = template {
        std::fs::write(folder.path().join("other.jinja"), template).expect("the folder can be written to");
    }
    let mut file = tokenizer::file();
    change(&mut file);
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).expect("the folder can be written to");
    let mut options = RendererOptions {
        tokenizer: folder.path().join("tokenizer.json"),
        template: template.map(|_| folder.path().join("other.jinja")),
        family,
        special_tokens_in_text: SpecialTokensInText::Allow,
        kind: EngineKind::Sglang,
    };
    set(&mut options);
    Renderer::load(&options)
}

fn renderer() -> Renderer {
    renderer_with(None, family()).expect("the fake engine's model can be rendered")
}

/// A session of an agent in the mode exact, as the service keeps it.
struct Session {
    renderer: Arc<Renderer>,
    upstream: Upstream,
    paths: Paths,
    rows: Vec<(String, Completion)>,
}

const KINDS: [EngineKind; 2] = [EngineKind::Sglang, EngineKind::Vllm];

/// What takes the ids of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    /// SGLang's chat endpoint.
    Chat,
    /// `/generate` of an SGLang whose chat endpoint does not.
    Generate,
    /// vLLM's endpoint of ids.
    Vllm,
}

const ENDPOINTS: [Endpoint; 3] = [Endpoint::Chat, Endpoint::Generate, Endpoint::Vllm];

/// The parsers of the fake engine.
fn parsers() -> Parsers {
    Parsers { tool_call: Some("qwen25".to_owned()), reasoning: Some("qwen3".to_owned()) }
}

impl Session {
    async fn start(kind: EngineKind) -> (FakeEngine, Self) {
        let engine = FakeEngine::start(kind).await;
        let renderer = renderer_for(kind, None).expect("the fake engine's model can be rendered");
        let session = Self::of(options(kind, &[&engine]), Arc::new(renderer));
        (engine, session)
    }

    async fn start_at(endpoint: Endpoint) -> (FakeEngine, Self) {
        match endpoint {
            Endpoint::Chat => Self::start(EngineKind::Sglang).await,
            Endpoint::Vllm => Self::start(EngineKind::Vllm).await,
            Endpoint::Generate => {
                let engine = FakeEngine::start(EngineKind::Sglang).await;
                engine.switch(|switches| switches.id_fault = IdFault::NoneInChat);
                let options = UpstreamOptions { parsers: Some(parsers()), ..options(EngineKind::Sglang, &[&engine]) };
                let session = Self::of(options, Arc::new(renderer()));
                assert_eq!(session.probe().await, Verdict::Ready);
                (engine, session)
            }
        }
    }

    async fn probe(&self) -> Verdict {
        let request = probe_request();
        let prompt = self.renderer.prompt(&request, 0, None, &Cancellation::default()).expect("it can be rendered");
        let text = |ids: &[i32]| self.renderer.decode(ids);
        let exact = ExactPrompt { ids: &prompt.ids, stop_ids: self.renderer.stop_ids(), text: &text };
        self.upstream.probe_exact("fake", &request, exact).await
    }

    fn of(options: UpstreamOptions, renderer: Arc<Renderer>) -> Self {
        let upstream = Upstream::new(options).expect("the options are usable");
        Self { renderer, upstream, paths: Paths::default(), rows: Vec::new() }
    }

    fn prompt(&self, request: &Request) -> Prompt {
        let continued = self.paths.continued(&Canonical::of(request));
        self.renderer
            .prompt(request, 0, continued.as_ref(), &Cancellation::default())
            .expect("the request can be rendered")
    }

    /// A call, recorded under the next number. Also what it continues.
    async fn call(&mut self, request: &Request) -> Result<(Answered, Option<u32>), UpstreamError> {
        self.call_with(request, &|| 7).await
    }

    /// A call whose answer is sent while it is sampled, and which is not recorded.
    async fn streamed(&self, request: &Request, streaming: &Streaming) -> Result<Answered, UpstreamError> {
        let prompt = self.prompt(request);
        let text = |ids: &[i32]| self.renderer.decode(ids);
        let exact = ExactPrompt { ids: &prompt.ids, stop_ids: self.renderer.stop_ids(), text: &text };
        let version = &|| 7;
        let engine_call = EngineCall { exact: Some(exact), version, streaming: Some(streaming), ..call(request) };
        self.upstream.complete(&engine_call).await
    }

    async fn call_with(
        &mut self,
        request: &Request,
        version: &(dyn Fn() -> i64 + Sync),
    ) -> Result<(Answered, Option<u32>), UpstreamError> {
        let prompt = self.prompt(request);
        let text = |ids: &[i32]| self.renderer.decode(ids);
        let exact = ExactPrompt { ids: &prompt.ids, stop_ids: self.renderer.stop_ids(), text: &text };
        let engine_call = EngineCall { exact: Some(exact), version: &version, ..call(request) };
        let answered = self.upstream.complete(&engine_call).await?;
        let completion = &answered.completion;
        assert_eq!(completion.prompt_tokens, prompt.ids);
        let record = self.paths.history().record(&Canonical::of(request));
        self.rows.push((record.to_json(), completion.clone()));
        let seq = self.rows.len() as u32;
        assert!(self.add(seq));
        Ok((answered, prompt.continues))
    }

    fn add(&mut self, seq: u32) -> bool {
        let (record, completion) = &self.rows[seq as usize - 1];
        let record = Record::from_json(record).expect("it is a record");
        let added = self.paths.add(seq, &record, &completion.prompt_tokens, &completion.tokens, &completion.message);
        added.expect("the record fits")
    }

    /// Builds the calls anew from what is stored.
    fn restart(&mut self) {
        self.paths = Paths::default();
        for seq in 1..=self.rows.len() as u32 {
            assert!(self.add(seq));
        }
    }
}

/// All ids of a call.
fn path(completion: &Completion) -> Vec<i32> {
    [&completion.prompt_tokens[..], &completion.tokens].concat()
}

/// Panics unless each sampled id has the log-probability of its true context.
fn check_logprobs(completion: &Completion) {
    let mut context = completion.prompt_tokens.clone();
    assert_eq!(completion.tokens.len(), completion.logprobs.len());
    for (&token, &value) in completion.tokens.iter().zip(&completion.logprobs) {
        assert!((value - logprob(&context, token, 0.8)).abs() < 1e-6);
        context.push(token);
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}])
}

/// A request with a tool.
fn with_tools(messages: &Value) -> Request {
    parsed(Dialect::Chat, &json!({"model": "m", "messages": messages, "tools": tools()}))
}

/// An answer as the agent receives it.
fn received(completion: &Completion) -> Value {
    answer(Dialect::Chat, completion)["choices"][0]["message"].take()
}
