//! The service in this process, recorded trajectories, and the trainer as a process that can be killed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use forebay::{
    config::{AgentsConfig, Config},
    server::{AgentServer, FacadeServer, Server},
};
use forebay_agents::{Agents, upstreams::Upstreams};
use forebay_api::{agent_urls::AgentUrls, http::guard::Access};
use forebay_client::{
    Client,
    wire::{Segment, Status, Trajectory},
};
use forebay_domain::clock::AnchoredClock;
use forebay_service::{Buffer, keyring::Keyring};
use forebay_store as store;
use forebay_telemetry::metrics::Metrics;
use forebay_trainer::{
    config::TrainConfig,
    train::{TrainError, train},
};
use tokio::{
    net::TcpListener,
    process::{Child, Command},
    sync::{Notify, oneshot},
};

/// A small checkpoint with random weights.
pub(crate) fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen2-tied/checkpoint")
}

/// Token ids that every golden checkpoint knows.
pub(crate) const VOCABULARY: u64 = 64;

/// A Forebay service over real HTTP.
pub(crate) struct TestService {
    pub(crate) url: String,
    pub(crate) client: Client,
    /// The addresses of the facades, by the names of their protocols.
    pub(crate) facades: BTreeMap<&'static str, String>,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl TestService {
    /// Starts on a fresh database, with this configuration of policies.
    pub(crate) async fn start(config: &str) -> Self {
        Self::start_on("sqlite::memory:", config).await
    }

    /// Starts on a database.
    pub(crate) async fn start_on(database: &str, config: &str) -> Self {
        let config = Config::parse(config).expect("the test's configuration is valid");
        let metrics = Arc::new(Metrics::new());
        let store = store::open(database, metrics.store()).await.expect("the store opens");
        let clock = Arc::new(AnchoredClock::new());
        let buffer =
            Buffer::start(store.clone(), Arc::clone(&clock) as _, Arc::clone(&metrics), config.buffer, config.policies)
                .await
                .expect("the store can be used");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let (stop, stopped) = oneshot::channel();
        let keyring = Keyring::start(store, clock, false).await.expect("the keys can be read");
        let access = Access { keyring: Arc::new(keyring), hosts: Arc::new([]) };
        let server = Server::new(listener, buffer.clone(), Arc::clone(&metrics), config.bodies, config.server, access)
            .expect("a listener has an address");
        let server = match config.agents {
            None => server,
            Some(agents) => server.with_agents(Some(agent_server(agents, buffer, metrics).await)),
        };
        let mut facades = Vec::new();
        for config in config.facades {
            let listener = TcpListener::bind(&config.listen).await.expect("a port is free");
            let address = listener.local_addr().expect("a listener has an address");
            facades.push(FacadeServer { listener, address, config });
        }
        let urls = facades.iter().map(|facade| (facade.config.protocol.name(), format!("http://{}", facade.address)));
        let urls = urls.collect();
        let server = server.with_facades(facades);
        let task = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            let _ = server.run(stopped).await;
        });
        let client = Client::new(&url).expect("the URL is valid");
        Self { url, client, facades: urls, stop: Some(stop), task }
    }

    /// Stops the service. A database in memory is lost with it.
    pub(crate) async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let _ = self.task.await;
    }
}

/// The listener of agents.
async fn agent_server(config: AgentsConfig, buffer: Buffer, metrics: Arc<Metrics>) -> AgentServer {
    let upstreams = Upstreams::load(config.upstreams).expect("the engine's address is valid");
    let listener = TcpListener::bind(config.listen).await.expect("a port is free");
    let address = listener.local_addr().expect("a listener has an address");
    AgentServer {
        listener,
        agents: Agents::new(buffer, upstreams.clone(), metrics, config.options),
        upstreams,
        urls: AgentUrls { public: config.public_url, address, is_encrypted: false },
    }
}

/// A number in [0, 1) that depends only on `place`, so that tests have varied data and are reproducible.
pub(crate) fn noise(place: u64) -> f64 {
    let mixed = place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed ^ (mixed >> 32)) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A trajectory as an agent may have recorded it. Lengths of prompts and responses vary, and some tokens are masked.
pub(crate) fn recorded(group: u64, member: u64) -> Trajectory {
    let place = group * 1_000 + member * 100;
    let prompt = 3 + group % 4;
    let response = 4 + (group + member) % 5;
    let tokens = (0..prompt + response).map(|t| (noise(place + t) * VOCABULARY as f64) as i32).collect();
    let loss_mask: Vec<u8> = (0..response).map(|t| u8::from(t != 1)).collect();
    let logprobs = (0..response).map(|t| -4.2 + (noise(place + 50 + t) * 0.2) as f32).collect();
    Trajectory {
        rollout_id: Some(format!("r{group}-{member}")),
        group_id: Some(format!("g{group}")),
        policy_version: Some(0),
        status: Status::Completed,
        reward: Some((noise(place + 99) * 4.0).floor()),
        segments: vec![Segment {
            tokens,
            values: Some(loss_mask.iter().map(|_| 0.1).collect()),
            teacher_logprobs: Some(loss_mask.iter().map(|_| -3.0).collect()),
            loss_mask,
            logprobs: Some(logprobs),
            ..Segment::default()
        }],
        ..Trajectory::default()
    }
}

/// Posts whole groups in order.
pub(crate) async fn record(client: &Client, groups: u64, size: u64) {
    for group in 0..groups {
        let bundle: Vec<Trajectory> = (0..size).map(|member| recorded(group, member)).collect();
        client.post_bundle(&bundle).await.expect("the bundle is accepted");
    }
}

/// The trainer's binary, with its arguments.
pub(crate) fn trainer(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-trainer"));
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    // One thread, because sums of floats depend on how they are split.
    command.env("OMP_NUM_THREADS", "1").env("RUST_LOG", "warn");
    command
}

/// Runs the trainer until it ends. It must end without an error.
pub(crate) async fn train_to_the_end(arguments: &[&str]) {
    let output = trainer(arguments).output().await.expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Trains in this process. A trainer that continues although it should have failed is stopped after a minute and then
/// returns success, so that the test fails.
pub(crate) async fn run(config: TrainConfig) -> Result<(), TrainError> {
    let began = Instant::now();
    let stop = move || began.elapsed() > Duration::from_mins(1);
    tokio::task::spawn_blocking(move || train(&config, false, &stop)).await.expect("the trainer does not panic")
}

/// A proxy between a trainer and the service. It holds the call at which the trainer is to be killed.
pub(crate) struct Gate {
    pub(crate) url: String,
    state: Arc<GateState>,
}

struct GateState {
    target: String,
    http: reqwest::Client,
    calls: AtomicUsize,
    /// Number of the call that is never answered.
    fatal: AtomicUsize,
    reached: Notify,
}

/// Whether the call at which the trainer is killed takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Killed {
    /// The call never reaches the service.
    Before,
    /// The service handles the call, but its answer never reaches the trainer.
    After,
}

impl Gate {
    pub(crate) async fn start(service: &TestService, killed: Killed) -> Self {
        let state = Arc::new(GateState {
            target: service.url.clone(),
            http: http(),
            calls: AtomicUsize::new(0),
            fatal: AtomicUsize::new(usize::MAX),
            reached: Notify::new(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let router = Router::new().fallback(move |state, request| pass(state, request, killed));
        let router = router.with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, state }
    }

    /// Lets `calls` more calls pass and kills the trainer at the next one. Returns false if the trainer ended before.
    pub(crate) async fn kill_after(&self, calls: usize, mut process: Child) -> bool {
        self.state.fatal.store(self.state.calls.load(Ordering::SeqCst) + calls + 1, Ordering::SeqCst);
        tokio::select! {
            () = self.state.reached.notified() => {
                process.kill().await.expect("the process can be killed");
                true
            }
            _ = process.wait() => false,
        }
    }
}

async fn pass(State(gate): State<Arc<GateState>>, request: Request, killed: Killed) -> Response {
    let fatal = gate.calls.fetch_add(1, Ordering::SeqCst) + 1 == gate.fatal.load(Ordering::SeqCst);
    let never = async {
        gate.reached.notify_one();
        std::future::pending::<Response>().await
    };
    if fatal && killed == Killed::Before {
        return never.await;
    }
    let answer = forward(&gate.http, &gate.target, request).await;
    if fatal { never.await } else { answer }
}

/// Forwards a call to the service at `target` and returns the complete answer.
pub(crate) async fn forward(http: &reqwest::Client, target: &str, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.expect("the trainer sends whole bodies");
    let target = format!("{target}{}", parts.uri);
    let mut forwarded = http.request(parts.method, target).body(body);
    for name in [axum::http::header::CONTENT_TYPE, axum::http::header::ACCEPT] {
        if let Some(value) = parts.headers.get(&name) {
            forwarded = forwarded.header(name, value);
        }
    }
    let Ok(answer) = forwarded.send().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let (status, kind) = (answer.status(), answer.headers().get(axum::http::header::CONTENT_TYPE).cloned());
    let Ok(bytes) = answer.bytes().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let mut response = Response::builder().status(status);
    if let Some(kind) = kind {
        response = response.header(axum::http::header::CONTENT_TYPE, kind);
    }
    response.body(Body::from(bytes)).expect("what came can be passed on")
}

/// An HTTP client. The TLS provider must be installed before reqwest creates one.
pub(crate) fn http() -> reqwest::Client {
    forebay_client::install_tls_provider();
    reqwest::Client::new()
}
