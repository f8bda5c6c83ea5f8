//! The inference engine of the demo: chat completions over the tables, with the token ids that vLLM answers. The service
//! needs no other engine to record sessions.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::table::{self, END, Table};

/// The tables that answer, by the names of their policies.
#[derive(Clone)]
pub(super) struct Engine {
    tables: Arc<RwLock<BTreeMap<String, Arc<Table>>>>,
    /// How long an answer takes on average.
    think: Duration,
}

/// A request, as far as the engine uses it. It samples at temperature 1.
#[derive(Deserialize)]
struct ChatRequest {
    model: String,
    messages: Vec<Message>,
    max_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    /// Text. The service may send it in parts.
    content: Value,
}

impl Engine {
    pub(super) fn new(think: Duration) -> Self {
        Self { tables: Arc::default(), think }
    }

    /// Loads the weights of a policy.
    pub(super) fn load(&self, policy: &str, table: Table) {
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.insert(policy.to_owned(), Arc::new(table));
    }

    fn table(&self, policy: &str) -> Option<Arc<Table>> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner).get(policy).cloned()
    }

    /// Answers until the future is dropped.
    pub(super) async fn serve(self, listener: TcpListener) -> std::io::Result<()> {
        let router = Router::new()
            .route("/v1/chat/completions", post(complete))
            .route("/v1/models", get(models))
            .route("/health", get(|| async { Json(json!({})) }))
            .with_state(self);
        axum::serve(listener, router).await
    }
}

async fn models(State(engine): State<Engine>) -> Json<Value> {
    let tables = engine.tables.read().unwrap_or_else(PoisonError::into_inner);
    let models = tables.keys().map(|name| json!({"id": name, "object": "model", "max_model_len": 1024}));
    Json(json!({"object": "list", "data": models.collect::<Vec<_>>()}))
}

async fn complete(
    State(engine): State<Engine>,
    Json(request): Json<ChatRequest>,
) -> Result<Json<Value>, (StatusCode, Json<Value>)> {
    let Some(table) = engine.table(&request.model) else {
        let message = format!("there is no model {:?}", request.model);
        return Err((StatusCode::NOT_FOUND, Json(json!({"error": {"message": message}}))));
    };
    // Some answers take much longer than others, as with real models.
    let pause = -(1.0 - rand::random::<f64>()).ln();
    tokio::time::sleep(engine.think.mul_f64(pause)).await;
    let prompt = prompt(&request.messages);
    let (answer, logprob) = table.sample(&prompt, rand::random());
    // The end of an answer is certain.
    let mut sampled = vec![(answer, logprob), (END, 0.0)];
    let max_tokens = request.max_tokens.unwrap_or(usize::MAX);
    let finish = if sampled.len() > max_tokens { "length" } else { "stop" };
    sampled.truncate(max_tokens);
    let ids: Vec<i32> = sampled.iter().map(|(id, _)| *id).collect();
    let entry = |&(id, logprob): &(i32, f32)| json!({"token": table::decode(&[id]), "logprob": logprob, "bytes": null, "top_logprobs": []});
    let content: Vec<Value> = sampled.iter().map(entry).collect();
    Ok(Json(json!({
        "id": "chatcmpl-demo", "object": "chat.completion", "created": 0, "model": request.model,
        "prompt_token_ids": prompt,
        "choices": [{
            "index": 0, "finish_reason": finish, "stop_reason": null, "token_ids": ids,
            "message": {"role": "assistant", "content": table::decode(&[answer])},
            "logprobs": {"content": content},
        }],
        "usage": {
            "prompt_tokens": prompt.len(), "completion_tokens": ids.len(), "total_tokens": prompt.len() + ids.len(),
        },
    })))
}

/// The chat template: an answer continues the prompt that it was sampled behind, so that a conversation is one segment.
fn prompt(messages: &[Message]) -> Vec<i32> {
    let mut text = String::new();
    for message in messages {
        text += if message.role == "assistant" { "<agent>" } else { "<user>" };
        match &message.content {
            Value::String(content) => text += content,
            Value::Array(parts) => text.extend(parts.iter().filter_map(|part| part["text"].as_str())),
            _ => {}
        }
        text += "<end>";
    }
    table::encode(&(text + "<agent>"))
}
