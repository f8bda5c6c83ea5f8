//! `POST /v1/chat/completions`: messages in, a message out.

use std::{
    sync::{Arc, LazyLock},
    time::Instant,
};

use axum::{body::Body, extract::State, response::Response};
use forebay_gateway::template::Value as Ordered;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    super::{
        Dialect,
        model::ServedModel,
        request::Request,
        text::{Conversation, Parts, Text},
    },
    Refusal, Site, body,
    completion::{Completion, Shown},
    generate::{self, ALTERNATIVES_MAX, OneOrMore},
    stream,
};

/// The fields of the body. Other fields are ignored, unless they are in [`NEUTRAL`] or [`REFUSED`].
#[derive(Debug, Deserialize)]
pub(super) struct ChatBody {
    model: Option<String>,
    #[serde(default)]
    messages: Vec<Ordered>,
    /// The prompt in place of the messages.
    input_ids: Option<Vec<i64>>,
    tools: Option<Ordered>,
    tool_choice: Option<Value>,
    #[serde(default)]
    chat_template_kwargs: Option<Ordered>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    stop: Option<OneOrMore>,
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    seed: Option<i64>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    rid: Option<String>,
    request_id: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_prompt_token_ids: Option<bool>,
    return_token_ids: Option<bool>,
    return_meta_info: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Fields that are accepted with the value that changes nothing.
const NEUTRAL: [(&str, f64); 6] = [
    ("n", 1.0),
    ("min_p", 0.0),
    ("min_tokens", 0.0),
    ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0),
    ("repetition_penalty", 1.0),
];

/// Fields that change what is drawn, and that are not implemented. Null, false and empty values change nothing.
const REFUSED: [&str; 8] =
    ["logit_bias", "regex", "ebnf", "json_schema", "guided_json", "guided_regex", "continue_final_message", "prefill"];

pub(super) async fn chat(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let started = Instant::now();
    let mut body: ChatBody = body::read(&site, body).await?;
    let dialect = site.app.dialect;
    body.check(dialect)?;
    let model = site.model(body.model.as_deref())?;
    let (prompt, has_begun_reasoning) = body.prompt(model)?;
    let stops = OneOrMore::texts(body.stop.take())?;
    let has_tools = body.has_tools();
    let separates = model.text().is_some_and(|text| text.separates_reasoning());
    let completion = Completion {
        dialect,
        model: model.name().to_owned(),
        text: model.text().map(Arc::clone),
        prompt: prompt.clone(),
        started,
        shown: body.shown(dialect),
    };
    let request = body.request(prompt, model)?;
    let rid = request.rid.clone();
    let parts = Parts::new(separates, has_begun_reasoning, has_tools);
    let (ticket, output) = model.submit(request, stops)?;
    if body.stream == Some(true) {
        let with_usage = body.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
        let mut chunks = completion.chunks(rid, parts, with_usage);
        return Ok(stream::respond(ticket, output, move |output| chunks.next(output)));
    }
    Ok(body::json(&completion.whole(&rid, parts, &stream::collect(ticket, output).await?)))
}

impl ChatBody {
    fn check(&self, dialect: Dialect) -> Result<(), Refusal> {
        for (key, neutral) in NEUTRAL {
            let value = self.others.get(key).unwrap_or(&Value::Null);
            let is_neutral = value.is_null() || value.as_f64().is_some_and(|value| (value - neutral).abs() < 1e-9);
            if !is_neutral {
                return Err(Refusal::Invalid { param: key, message: format!("{value} is not supported") });
            }
        }
        for key in REFUSED {
            let value = self.others.get(key).unwrap_or(&Value::Null);
            let is_empty = matches!(value, Value::Null | Value::Bool(false))
                || value.as_object().is_some_and(Map::is_empty)
                || value.as_str().is_some_and(str::is_empty);
            if !is_empty {
                return Err(Refusal::Invalid { param: key, message: "it is not supported".to_owned() });
            }
        }
        let format = self.others.get("response_format").unwrap_or(&Value::Null);
        if !format.is_null() && format["type"] != "text" {
            let message = "only text is supported".to_owned();
            return Err(Refusal::Invalid { param: "response_format", message });
        }
        let returns = [
            ("return_prompt_token_ids", self.return_prompt_token_ids),
            ("return_token_ids", self.return_token_ids),
            ("return_meta_info", self.return_meta_info),
        ];
        for (param, value) in returns {
            // The same as in SGLang, so that a client that works here works there.
            if dialect == Dialect::Sglang && self.stream == Some(true) && value == Some(true) {
                let message = "it is not supported together with `stream`".to_owned();
                return Err(Refusal::Invalid { param, message });
            }
        }
        if self.top_logprobs.is_some_and(|count| count > ALTERNATIVES_MAX) {
            let message = format!("it must be at most {ALTERNATIVES_MAX}");
            return Err(Refusal::Invalid { param: "top_logprobs", message });
        }
        Ok(())
    }

    /// Whether the model is shown tools. `tool_choice` can only hide them: nothing forces the model to call one.
    fn has_tools(&self) -> bool {
        let is_some = |tools: &Ordered| tools.len().is_some_and(|count| count > 0);
        self.tools.as_ref().is_some_and(is_some) && self.tool_choice.as_ref().is_none_or(|choice| choice != "none")
    }

    /// The ids of the prompt, and whether it ends in the middle of reasoning.
    fn prompt(&self, model: &ServedModel) -> Result<(Vec<i64>, bool), Refusal> {
        let invalid = |param, message: &str| Err(Refusal::Invalid { param, message: message.to_owned() });
        if let Some(ids) = &self.input_ids {
            let end = model.text().map(|text| text.decode(&ids[ids.len().saturating_sub(8)..], false));
            return Ok((ids.clone(), end.is_some_and(|end| begins_reasoning(&end))));
        }
        if self.messages.is_empty() {
            return invalid("messages", "there must be at least one, or `input_ids`");
        }
        let Some(text) = model.text() else {
            return invalid("messages", "the checkpoint has no tokenizer; send `input_ids`");
        };
        self.render(text)
    }

    fn render(&self, text: &Text) -> Result<(Vec<i64>, bool), Refusal> {
        let mut variables = Vec::new();
        if let Some(given) = self.chat_template_kwargs.as_ref().filter(|given| !given.is_none()) {
            let keys = given
                .try_iter()
                .map_err(|error| Refusal::Invalid { param: "chat_template_kwargs", message: error.to_string() })?;
            variables.extend(keys.map(|key| (key.to_string(), given.get_item(&key).unwrap_or_default())));
        }
        let tools = self.tools.clone().filter(|_| self.has_tools());
        let messages = self.messages.clone();
        let conversation = Conversation {
            messages,
            tools,
            variables,
            clock_s: started_s(),
            opens_answer: true,
            ..Conversation::default()
        };
        let refused = |message| Refusal::Invalid { param: "messages", message };
        let prompt = text.render(&conversation).map_err(|error| refused(error.to_string()))?;
        let ids = text.encode(&prompt, false).map_err(refused)?;
        Ok((ids, begins_reasoning(&prompt)))
    }

    fn request(&self, prompt: Vec<i64>, model: &ServedModel) -> Result<Request, Refusal> {
        let mut stop_tokens = self.stop_token_ids.clone().unwrap_or_default();
        if self.ignore_eos != Some(true) {
            stop_tokens.extend(model.end_tokens());
        }
        // Without a number the answer may fill the context, to which it is shortened.
        let new_tokens_max = self.max_completion_tokens.or(self.max_tokens).unwrap_or(usize::MAX);
        if new_tokens_max == 0 {
            return Err(Refusal::Invalid { param: "max_tokens", message: "it must be at least 1".to_owned() });
        }
        Ok(Request {
            rid: generate::rid(self.rid.clone().or_else(|| self.request_id.clone()))?,
            prompt,
            sampling: generate::sampling(self.temperature, self.top_p, self.top_k, stop_tokens, new_tokens_max)?,
            seed: self.seed.map_or_else(rand::random, |seed| seed as u64),
            score_from: None,
            alternatives: if self.logprobs == Some(true) { self.top_logprobs.unwrap_or(0) } else { 0 },
        })
    }

    fn shown(&self, dialect: Dialect) -> Shown {
        let token_ids = self.return_token_ids == Some(true);
        Shown {
            logprobs: self.logprobs == Some(true),
            alternatives: self.top_logprobs.unwrap_or(0) > 0,
            token_ids,
            // vLLM has one field for both.
            prompt_token_ids: self.return_prompt_token_ids == Some(true) || (dialect == Dialect::Vllm && token_ids),
            meta_info: self.return_meta_info == Some(true),
        }
    }
}

/// When the first prompt was rendered, in seconds since 1970. A prompt must not change at midnight.
fn started_s() -> i64 {
    static STARTED: LazyLock<i64> = LazyLock::new(|| jiff::Timestamp::now().as_second());
    *STARTED
}

/// Some templates begin the reasoning themselves.
fn begins_reasoning(prompt: &str) -> bool {
    prompt.trim_end().ends_with("<think>")
}
