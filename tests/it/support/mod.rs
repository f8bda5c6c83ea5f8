//! `TestApp`: the real service with a real socket and a real store, and a clock that the test moves.

pub(crate) mod endure;
mod pooler;
mod postgres;
pub(crate) mod process;
mod proxy;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use forebay::{
    config::Config,
    server::{AgentServer, FacadeServer, Server},
    tls::Tls,
};
use forebay_agents::{Agents, upstreams::Upstreams};
use forebay_api::{agent_urls::AgentUrls, http::guard::Access};
use forebay_client::{Client, wire::KeyRequest};
use forebay_domain::{
    access::key::NewKey,
    clock::{Clock, Timestamp},
};
use forebay_fake_engine::{EngineKind, FakeEngine};
use forebay_service::{
    Buffer,
    keyring::{self, Keyring},
    looking::doctor,
};
use forebay_store::{self as store, Store};
use forebay_telemetry::metrics::Metrics;
use forebay_wire::Role;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection as _;
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

pub(crate) use pooler::Pooler;
pub(crate) use postgres::{Cluster, drop_database, empty, fresh_database, without_autovacuum};
pub(crate) use proxy::Proxy;

/// Which database a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
}

/// Runs each test on both stores, and checks the tallies against the rows when it ends. `if IS_WANTED;` before the tests
/// makes them tests of the long runs: `on_both_stores! { if crate::support::endure::is_long; async fn ... }`.
macro_rules! on_both_stores {
    (if $is_wanted:path; $($tests:tt)*) => { $crate::support::on_both_stores! { @ $is_wanted; $($tests)* } };
    (@ $is_wanted:path; $( $(#[$meta:meta])* async fn $name:ident($app:ident: TestApp) $body:block )*) => {
        $( $(#[$meta])* async fn $name($app: &mut $crate::support::TestApp) $body )*

        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if !$is_wanted() {
                        return;
                    }
                    let mut app = $crate::support::TestApp::start($crate::support::Backend::Sqlite).await;
                    super::$name(&mut app).await;
                    app.finish().await;
                }
            )*
        }

        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if !$is_wanted() {
                        return;
                    }
                    let mut app = $crate::support::TestApp::start($crate::support::Backend::Postgres).await;
                    super::$name(&mut app).await;
                    app.finish().await;
                }
            )*
        }
    };
    ($($tests:tt)*) => { $crate::support::on_both_stores! { @ $crate::support::endure::is_any; $($tests)* } };
}
pub(crate) use on_both_stores;

/// A clock that stands still until the test moves it.
#[derive(Debug)]
pub(crate) struct TestClock(AtomicI64);

impl TestClock {
    pub(crate) fn advance_s(&self, seconds: f64) {
        self.0.fetch_add((seconds * 1e6) as i64, Ordering::SeqCst);
    }
}

impl Default for TestClock {
    fn default() -> Self {
        // 2026-01-01T00:00:00Z
        Self(AtomicI64::new(1_767_225_600_000_000))
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// The running service.
pub(crate) struct TestApp {
    pub(crate) clock: Arc<TestClock>,
    pub(crate) url: String,
    pub(crate) http: reqwest::Client,
    pub(crate) buffer: Buffer,
    pub(crate) keyring: Arc<Keyring>,
    keys: Arc<Store>,
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) database: String,
    config: String,
    running: Option<Running>,
    /// The inference engine of the sessions.
    pub(crate) engine: Arc<FakeEngine>,
    /// Where agents connect.
    pub(crate) agents: SocketAddr,
    /// The addresses of the facades, by the names of their protocols.
    pub(crate) facades: BTreeMap<&'static str, String>,
    /// Whether the test damaged the database directly.
    damaged: bool,
    /// Whether `finish` removes the database, because it is neither in the folder nor used by others.
    removes_database: bool,
    _folder: tempfile::TempDir,
}

struct Launched {
    url: String,
    agents: SocketAddr,
    facades: BTreeMap<&'static str, String>,
    buffer: Buffer,
    keyring: Arc<Keyring>,
    keys: Arc<Store>,
    tls: Option<Arc<Tls>>,
    running: Running,
}

struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// An answer whose body has been read.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) json: Value,
}

impl Answer {
    /// Checks the status and returns the body.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "unexpected answer: {}", self.json);
        self.json
    }

    /// Checks status and type, and returns the body of the problem.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, kind: &str) -> Value {
        let problem = self.expect(status);
        assert_eq!(problem["type"], kind, "unexpected problem: {problem}");
        problem
    }

    /// The pointers of a problem's violations.
    #[track_caller]
    pub(crate) fn pointers(self, status: u16) -> Vec<String> {
        let problem = self.expect(status);
        let errors = problem["errors"].as_array().expect("a problem about the body lists its errors");
        errors.iter().map(|error| error["pointer"].as_str().expect("pointers are text").to_owned()).collect()
    }
}

impl TestApp {
    /// Starts the service on a new database with the default configuration.
    pub(crate) async fn start(backend: Backend) -> Self {
        Self::start_with(backend, "").await
    }

    /// Starts the service on an existing database.
    pub(crate) async fn start_on(database: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        Self::launch(database.to_owned(), "", folder).await
    }

    /// Starts the service on a new database.
    pub(crate) async fn start_with(backend: Backend, config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let database = match backend {
            Backend::Sqlite => format!("sqlite:{}", folder.path().join("forebay.db").display()),
            Backend::Postgres => fresh_database().await,
        };
        let removes_database = matches!(backend, Backend::Postgres);
        Self { removes_database, ..Self::launch(database, config, folder).await }
    }

    async fn launch(database: String, config: &str, folder: tempfile::TempDir) -> Self {
        let engine = Arc::new(FakeEngine::start(EngineKind::Sglang).await);
        Self::launch_with(database, config, folder, Arc::default(), engine).await
    }

    async fn launch_with(
        database: String,
        config: &str,
        folder: tempfile::TempDir,
        clock: Arc<TestClock>,
        engine: Arc<FakeEngine>,
    ) -> Self {
        let launched = launch(&database, config, &clock, &engine).await;
        let Launched { url, agents, facades, buffer, keyring, keys, tls, running } = launched;
        Self {
            clock,
            url,
            http: http(),
            buffer,
            keyring,
            keys,
            tls,
            database,
            config: config.to_owned(),
            running: Some(running),
            engine,
            agents,
            facades,
            damaged: false,
            removes_database: false,
            _folder: folder,
        }
    }

    /// Stops gracefully and starts again on the same database.
    pub(crate) async fn restart(&mut self) {
        self.stop().await;
        let launched = launch(&self.database, &self.config, &self.clock, &self.engine).await;
        (self.url, self.buffer, self.running) = (launched.url, launched.buffer, Some(launched.running));
        (self.keyring, self.keys, self.tls) = (launched.keyring, launched.keys, launched.tls);
        (self.agents, self.facades) = (launched.agents, launched.facades);
    }

    /// Restarts with another configuration.
    pub(crate) async fn reconfigure(&mut self, config: &str) {
        config.clone_into(&mut self.config);
        self.restart().await;
    }

    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = running.stop.send(());
            running.task.await.expect("the server stops without a panic");
        }
    }

    /// Checks that the tallies agree with the rows and that nothing was lost, then stops, and removes the database.
    pub(crate) async fn finish(mut self) {
        self.check_books().await;
        self.stop().await;
        if self.removes_database {
            drop_database(&self.database).await;
        }
    }

    /// Checks totals, structure and contents with the doctor. It must find nothing after a test that only used the API,
    /// and must find the damage that a test made directly in the database.
    pub(crate) async fn check_books(&self) {
        let diagnosis = doctor::examine(self.buffer.store(), |_| {}).await.expect("the store can be read");
        let findings: Vec<&str> = diagnosis.findings().collect();
        assert_eq!(findings.is_empty(), !self.damaged, "{findings:#?}");
    }

    /// A client as an agent or a trainer in Rust would use it.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.url).expect("the test's address is a URL")
    }

    /// Moves the clock and sweeps.
    pub(crate) async fn pass_s(&self, seconds: f64) {
        self.clock.advance_s(seconds);
        self.buffer.sweep().await.expect("the store can be swept");
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        let mut request = self.http.request(method, format!("{}{path}", self.url));
        if let Some(body) = body {
            request = request.json(&body);
        }
        read(request.send().await.expect("the server answers")).await
    }

    /// Creates a key directly in the database and returns it with its secret. The key works at once.
    pub(crate) async fn key(&self, role: Role, policies: &[&str]) -> String {
        let policies = policies.iter().map(|&glob| glob.to_owned()).collect();
        let request = KeyRequest { name: format!("test {role}"), role, policies: Some(policies), expires_in_s: None };
        let (key, secret) = NewKey::mint(request, self.clock.now()).expect("the request is valid");
        keyring::create(&self.keys, key).await.expect("the store takes keys");
        self.keyring.reload().await.expect("the store can be read");
        secret.reveal().to_owned()
    }

    /// Makes a call with a key.
    pub(crate) async fn call_as(&self, key: &str, method: Method, path: &str, body: Option<Value>) -> Answer {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(&body);
        }
        read(request.send().await.expect("the server answers")).await
    }

    pub(crate) async fn get_as(&self, key: &str, path: &str) -> Answer {
        self.call_as(key, Method::GET, path, None).await
    }

    pub(crate) async fn post_as(&self, key: &str, path: &str, body: Value) -> Answer {
        self.call_as(key, Method::POST, path, Some(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, Some(body)).await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> Answer {
        self.call(Method::PUT, path, Some(body)).await
    }

    /// Posts a body unchanged.
    pub(crate) async fn post_raw(&self, path: &str, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Answer {
        let mut request = self.http.post(format!("{}{path}", self.url)).body(body.into());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        read(request.send().await.expect("the server answers")).await
    }

    /// Posts a trajectory or a bundle, which must be accepted.
    #[track_caller]
    pub(crate) fn accept(&self, body: Value) -> impl Future<Output = Value> {
        let answer = self.post("/trajectories", body);
        async move {
            let answer = answer.await;
            assert!(answer.status.is_success(), "unexpected answer: {}", answer.json);
            answer.json
        }
    }

    /// Writes the rules of a policy.
    pub(crate) async fn rules(&self, policy: &str, rules: Value) {
        let answer = self.put(&format!("/policies/{policy}"), rules).await;
        assert!(answer.status.is_success(), "unexpected answer: {}", answer.json);
    }

    /// Leases the next batch of `default`, which must exist.
    pub(crate) async fn lease(&self) -> Value {
        self.lease_with(json!({})).await
    }

    /// Leases a batch, which must exist.
    pub(crate) async fn lease_with(&self, request: Value) -> Value {
        self.post("/batches", request).await.expect(201)
    }

    pub(crate) async fn ack(&self, batch: &Value, step: i64) -> Answer {
        let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
        self.post(&path, json!({"lease": batch["lease"], "step": step})).await
    }

    pub(crate) async fn nack(&self, batch: &Value, groups: &[&str]) -> Answer {
        let path = format!("/batches/{}/nack", text(&batch["batch_id"]));
        self.post(&path, json!({"lease": batch["lease"], "reason": "test", "groups": groups})).await
    }

    pub(crate) async fn batch(&self, batch: &Value) -> Value {
        self.get(&format!("/batches/{}", text(&batch["batch_id"]))).await.expect(200)
    }

    /// The rows of a batch.
    pub(crate) async fn samples(&self, batch: &Value) -> Vec<Value> {
        let url = format!("{}{}", self.url, text(&batch["samples_url"]));
        let response = self.http.get(url).send().await.expect("the server answers");
        assert_eq!(response.status(), 200);
        let body = response.text().await.expect("the stream ends well");
        body.lines().map(|line| serde_json::from_str(line).expect("every line is a row")).collect()
    }

    /// Returns the samples of a batch as answered to these headers: the content coding and the bytes.
    pub(crate) async fn samples_as(&self, batch: &Value, headers: &[(&str, &str)]) -> (String, Vec<u8>) {
        let url = format!("{}{}", self.url, text(&batch["samples_url"]));
        let request = headers.iter().fold(self.http.get(url), |request, (name, value)| request.header(*name, *value));
        let answer = request.send().await.expect("the server answers");
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["vary"], "accept, accept-encoding");
        let coding = answer.headers().get("content-encoding").and_then(|value| value.to_str().ok());
        let coding = coding.unwrap_or_default().to_owned();
        (coding, answer.bytes().await.expect("the stream ends well").into())
    }

    /// The group ids of a batch, in order and once each.
    pub(crate) async fn group_ids(&self, batch: &Value) -> Vec<String> {
        let mut groups: Vec<String> = Vec::new();
        for row in self.samples(batch).await {
            let group = text(&row["group_id"]).to_owned();
            if groups.last() != Some(&group) {
                groups.push(group);
            }
        }
        groups
    }

    /// A rollout's story.
    pub(crate) async fn story(&self, rollout_id: &str) -> Value {
        self.get(&format!("/trajectories?rollout_id={rollout_id}")).await.expect(200)
    }

    pub(crate) async fn resume(&self, step: Option<i64>) -> Value {
        self.post("/policies/default/resume", json!({"step": step})).await.expect(200)
    }

    pub(crate) async fn checkpoint(&self, step: i64) -> Value {
        self.post("/policies/default/checkpoints", json!({"step": step})).await.expect(200)
    }

    pub(crate) async fn publish(&self, version: i64) -> Answer {
        self.put("/policies/default/version", json!({"version": version})).await
    }

    /// Another replica of the service on the same database (Postgres).
    pub(crate) async fn replica(&self) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let (clock, engine) = (Arc::clone(&self.clock), Arc::clone(&self.engine));
        Self::launch_with(self.database.clone(), &self.config, folder, clock, engine).await
    }

    /// Changes the database directly, in a way that the doctor has to find.
    pub(crate) async fn damage(&mut self, sql: &'static str) -> u64 {
        self.damaged = true;
        self.tamper(sql).await
    }

    /// Changes the database directly. Returns the number of rows that changed.
    pub(crate) async fn tamper(&self, sql: &'static str) -> u64 {
        if self.database.starts_with("sqlite") {
            let mut connection = sqlx::SqliteConnection::connect(&self.database).await.expect("the file opens");
            sqlx::query(sql).execute(&mut connection).await.expect("the statement is valid").rows_affected()
        } else {
            let mut connection = sqlx::PgConnection::connect(&self.database).await.expect("the server accepts");
            sqlx::query(sql).execute(&mut connection).await.expect("the statement is valid").rows_affected()
        }
    }

    /// Reads one value directly from the database.
    pub(crate) async fn read_value(&self, sql: String) -> i64 {
        let sql = sqlx::AssertSqlSafe(sql);
        if self.database.starts_with("sqlite") {
            let mut connection = sqlx::SqliteConnection::connect(&self.database).await.expect("the file opens");
            sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect("the statement is valid")
        } else {
            let mut connection = sqlx::PgConnection::connect(&self.database).await.expect("the server accepts");
            sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect("the statement is valid")
        }
    }

    /// `/metrics` as text, from a service that needs a key.
    pub(crate) async fn metrics_as_admin(&self) -> String {
        let key = self.key(Role::Admin, &["*"]).await;
        let request = self.http.get(format!("{}/metrics", self.url)).bearer_auth(key);
        request.send().await.expect("the server answers").text().await.expect("metrics are text")
    }

    /// `/metrics` as text.
    pub(crate) async fn metrics(&self) -> String {
        let response = self.http.get(format!("{}/metrics", self.url)).send().await.expect("the server answers");
        response.text().await.expect("metrics are text")
    }
}

async fn launch(database: &str, config: &str, clock: &Arc<TestClock>, engine: &FakeEngine) -> Launched {
    let config = with_agents(config, engine);
    let config = config.as_str();
    let config = Config::parse(config).expect("the test's configuration is valid");
    let metrics = Arc::new(Metrics::new());
    let store = store::open(database, metrics.store()).await.expect("the store opens");
    let buffer =
        Buffer::start(store.clone(), Arc::clone(clock) as _, Arc::clone(&metrics), config.buffer, config.policies)
            .await
            .expect("the store can be used");
    let agents = config.agents.expect("every test has a listener for agents");
    let upstreams = Upstreams::load(agents.upstreams).expect("the engine's address is valid");
    let buffer = buffer.with_engines(Arc::new(upstreams.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let keys = store;
    let keyring = Keyring::start(Arc::clone(&keys), Arc::clone(clock) as _, config.access.required);
    let keyring = keyring.await.expect("the keys can be read");
    let keyring = Arc::new(keyring);
    let access = Access { keyring: Arc::clone(&keyring), hosts: config.access.hosts.into() };
    let tls = config.tls.map(|files| Arc::new(Tls::load(files).expect("the test's certificates are valid")));
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}", listener.local_addr().expect("a listener has an address"));
    let (stop, stopped) = oneshot::channel();
    let calls = TcpListener::bind(agents.listen).await.expect("a port is free");
    let address = calls.local_addr().expect("a listener has an address");
    let agents = AgentServer {
        listener: calls,
        agents: Agents::new(buffer.clone(), upstreams.clone(), Arc::clone(&metrics), agents.options),
        upstreams,
        urls: AgentUrls { public: agents.public_url, address, is_encrypted: tls.is_some() },
    };
    let mut facades = Vec::new();
    for facade in config.facades {
        let listener = TcpListener::bind(&facade.listen).await.expect("a port is free");
        let address = listener.local_addr().expect("a listener has an address");
        facades.push(FacadeServer { listener, address, config: facade });
    }
    let facade_urls =
        facades.iter().map(|facade| (facade.config.protocol.name(), format!("{scheme}://{}", facade.address)));
    let facade_urls = facade_urls.collect();
    let server = Server::new(listener, buffer.clone(), metrics, config.bodies, config.server, access)
        .expect("a listener has an address")
        .with_tls(tls.clone())
        .with_agents(Some(agents))
        .with_tokenizers(config.tokenizers)
        .with_facades(facades);
    let task = tokio::spawn(async move {
        let _ = server.run(async { drop(stopped.await) }).await;
    });
    Launched { url, agents: address, facades: facade_urls, buffer, keyring, keys, tls, running: Running { stop, task } }
}

/// A configuration with a listener for agents, also for a service of its own process, and with the test's engine unless it names engines.
pub(crate) fn with_agents(config: &str, engine: &FakeEngine) -> String {
    let mut tables: toml::Table = toml::from_str(config).expect("the test's configuration is TOML");
    if !tables.contains_key("upstream") {
        let mut upstream = toml::Table::new();
        upstream.insert("name".to_owned(), "fake".into());
        upstream.insert("kind".to_owned(), "sglang".into());
        upstream.insert("urls".to_owned(), toml::Value::Array(vec![engine.url().into()]));
        for names in ["policies", "models"] {
            upstream.insert(names.to_owned(), toml::Value::Array(vec!["*".into()]));
        }
        tables.insert("upstream".to_owned(), toml::Value::Array(vec![upstream.into()]));
    }
    let sessions = tables.entry("sessions").or_insert_with(|| toml::Table::new().into());
    let sessions = sessions.as_table_mut().expect("[sessions] is a table");
    sessions.entry("listen").or_insert_with(|| "127.0.0.1:0".into());
    // An audit is a call of the engine, which tests of other calls do not expect.
    sessions.entry("audit").or_insert_with(|| 0.0.into());
    tables.to_string()
}

/// Makes a client with TLS. reqwest's own constructor needs a default cryptography provider for the process.
pub(crate) fn http() -> reqwest::Client {
    forebay_client::install_tls_provider();
    // The service closes a connection that was idle for 10 s. A request that is sent on it at that moment would fail, and
    // some tests wait just as long.
    reqwest::Client::builder().pool_idle_timeout(Duration::from_secs(5)).build().expect("the options are valid")
}

async fn read(response: reqwest::Response) -> Answer {
    let status = response.status();
    let body = response.bytes().await.expect("the answer arrives whole");
    let json = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap_or(Value::Null) };
    Answer { status, json }
}

/// Returns a text field of an answer.
#[track_caller]
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not text"))
}

/// A completed rollout with one segment of one prompt and two response tokens.
pub(crate) fn rollout(rollout_id: &str, reward: f64) -> Value {
    json!({
        "rollout_id": rollout_id,
        "status": "completed",
        "reward": reward,
        "segments": [{"tokens": [1, 2, 3], "loss_mask": [1, 1], "logprobs": [-0.5, -0.25]}],
    })
}

/// A rollout of a group; ids are `group-index`.
pub(crate) fn member(group_id: &str, index: usize, reward: f64) -> Value {
    let mut rollout = rollout(&format!("{group_id}-{index}"), reward);
    rollout["group_id"] = group_id.into();
    rollout
}

/// A whole group as a bundle, one rollout per reward.
pub(crate) fn group(group_id: &str, rewards: &[f64]) -> Value {
    let members = rewards.iter().enumerate().map(|(index, &reward)| {
        let mut member = member(group_id, index, reward);
        member["group_size"] = rewards.len().into();
        member
    });
    Value::Array(members.collect())
}

/// Messages with an image as a data URL.
pub(crate) fn with_image(image: &[u8]) -> Value {
    use base64::Engine as _;
    let url = format!("data:image/png;base64,{}", base64::prelude::BASE64_STANDARD.encode(image));
    json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]})
}

/// A value with fields replaced or added.
pub(crate) fn with(mut value: Value, fields: Value) -> Value {
    let (Value::Object(target), Value::Object(fields)) = (&mut value, fields) else {
        panic!("only objects have fields");
    };
    target.extend(fields);
    value
}

/// Waits until a condition holds that another task brings about. Fails after two minutes, because the time depends on
/// the load of the machine.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let deadline = tokio::time::Instant::now() + Duration::from_mins(2);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not come about");
        tokio::task::yield_now().await;
    }
}
