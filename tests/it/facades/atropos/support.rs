//! Calls of Atropos' clients.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{TestApp, with};

pub(super) const CONFIG: &str = "[facades]\natropos = \"127.0.0.1:0\"";

/// The facade of a service.
pub(super) struct Server<'a> {
    app: &'a mut TestApp,
}

impl<'a> Server<'a> {
    /// Starts the facade.
    pub(super) async fn of(app: &'a mut TestApp) -> Self {
        app.reconfigure(CONFIG).await;
        Self::running(app)
    }

    /// The facade, which is configured already.
    pub(super) fn running(app: &'a mut TestApp) -> Self {
        Self { app }
    }

    pub(super) fn app(&self) -> &TestApp {
        self.app
    }

    pub(super) fn url(&self) -> String {
        url(self.app)
    }

    pub(super) async fn restart(&mut self) {
        self.app.restart().await;
    }

    pub(super) async fn get(&self, path: &str) -> Value {
        get(self.app, path).await
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> Value {
        post(self.app, path, body).await
    }

    pub(super) async fn text(&self, path: &str) -> String {
        let answer = self.app.http.get(format!("{}{path}", self.url())).send().await.expect("answered");
        assert_eq!(answer.status(), 200);
        answer.text().await.expect("the answer arrives")
    }

    /// A call that is refused, with its body.
    pub(super) async fn refused(&self, path: &str, body: Value, status: u16) -> Value {
        let method = if path == "/status-env" { Method::GET } else { Method::POST };
        let request = self.app.http.request(method, format!("{}{path}", self.url())).json(&body);
        let answer = request.send().await.expect("answered");
        assert_eq!(answer.status(), status);
        answer.json().await.expect("the answer is JSON")
    }

    /// A trainer registers. Returns the answer as text, because its number is larger than the JSON library can hold.
    pub(super) async fn register(&self, batch_size: u32) -> String {
        let trainer = json!({
            "wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 512,
            "checkpoint_dir": "/tmp/c", "save_checkpoint_interval": 10, "starting_step": 3, "num_steps": 1000,
        });
        let request = self.app.http.post(format!("{}/register", self.url())).json(&trainer);
        let answer = request.send().await.expect("answered");
        assert_eq!(answer.status(), 200);
        answer.text().await.expect("the answer arrives")
    }

    /// A trainer registers and asks for its first batch, so that environments can register.
    pub(super) async fn start(&self, batch_size: u32) {
        self.register(batch_size).await;
        assert_eq!(self.get("/batch").await, json!({"batch": null}));
    }

    pub(super) async fn register_environment(&self, name: &str, group_size: u32, more: Value) -> Value {
        let environment = json!({
            "max_token_length": 512, "desired_name": name, "weight": 1.0, "group_size": group_size,
        });
        self.post("/register-env", with(environment, more)).await
    }

    pub(super) async fn environment_status(&self, env_id: i64) -> Value {
        let request = self.app.http.get(format!("{}/status-env", self.url())).json(&json!({"env_id": env_id}));
        let answer = request.send().await.expect("answered");
        assert_eq!(answer.status(), 200);
        answer.json().await.expect("the answer is JSON")
    }

    /// The groups of the next batch; none if there is no batch.
    pub(super) async fn batch(&self) -> Vec<Value> {
        batch(self.app).await
    }
}

pub(super) fn url(app: &TestApp) -> String {
    app.facades["atropos"].clone()
}

pub(super) async fn get(app: &TestApp, path: &str) -> Value {
    let answer = app.http.get(format!("{}{path}", url(app))).send().await.expect("answered");
    assert_eq!(answer.status(), 200);
    answer.json().await.expect("the answer is JSON")
}

pub(super) async fn post(app: &TestApp, path: &str, body: Value) -> Value {
    let answer = app.http.post(format!("{}{path}", url(app))).json(&body).send().await.expect("answered");
    let status = answer.status();
    let text = answer.text().await.expect("the answer arrives");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).expect("the answer is JSON")
}

pub(super) async fn batch(app: &TestApp) -> Vec<Value> {
    match get(app, "/batch").await["batch"].take() {
        Value::Array(groups) => groups,
        other => {
            assert!(other.is_null(), "{other}");
            Vec::new()
        }
    }
}

/// A scored group with sequences of its own.
pub(super) fn scored(seed: usize, sequences: usize) -> Value {
    let tokens: Vec<Vec<usize>> = (0..sequences).map(|at| vec![1, 10 + seed, 100 + at, 7]).collect();
    let masks: Vec<Vec<i64>> =
        tokens.iter().map(|tokens| vec![-100, -100, tokens[2] as i64, tokens[3] as i64]).collect();
    let logprobs: Vec<[f64; 4]> = (0..sequences).map(|at| [1.0, 1.0, -0.5, -0.25 * at as f64]).collect();
    let scores: Vec<f64> = (0..sequences).map(|at| at as f64).collect();
    json!({"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs})
}

/// The sequences of the groups of a batch.
pub(super) fn sequences(batch: &[Value]) -> usize {
    batch.iter().map(|group| group["tokens"].as_array().map_or(0, Vec::len)).sum()
}

/// The seeds of the groups of a batch.
pub(super) fn seeds(batch: &[Value]) -> Vec<i64> {
    batch.iter().map(|group| group["tokens"][0][1].as_i64().expect("a token") - 10).collect()
}
