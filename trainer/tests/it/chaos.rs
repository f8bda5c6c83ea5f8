//! A proxy that damages answers of the service: other pages, bodies that are cut off, wrong types, no answer at all.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use tokio::net::TcpListener;

use crate::support::{TestService, forward, http, noise, record, tiny_model, train_to_the_end};

const STEPS: u64 = 12;

const POLICIES: &str = r#"
    [policy_defaults]
    require = ["tokens", "logprobs"]
    group = { size = 2 }
    batch = { groups = 2 }
    retention = { settled_s = 86400 }
"#;

/// What the trainer gets in place of the service's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nonsense {
    /// An HTML page of a proxy, with status 200.
    Page,
    /// An HTML page of a proxy, with status 404.
    NotFoundPage,
    /// A proxy that demands authentication.
    Unauthorized,
    /// A gateway that does not reach the service.
    BadGateway,
    /// JSON of another service.
    WrongTypes,
    /// An answer without a body.
    Empty,
    /// The service's answer without its last line.
    WithoutTail,
    /// The service's answer, cut off in the middle.
    Cut,
    /// No answer, for as long as the trainer waits.
    Silence,
}

const ALL: [Nonsense; 9] = [
    Nonsense::Page,
    Nonsense::NotFoundPage,
    Nonsense::Unauthorized,
    Nonsense::BadGateway,
    Nonsense::WrongTypes,
    Nonsense::Empty,
    Nonsense::WithoutTail,
    Nonsense::Cut,
    Nonsense::Silence,
];

/// Chooses by number and path which calls are damaged, and how.
type Choose = dyn Fn(usize, &str) -> Option<Nonsense> + Send + Sync;

struct Way {
    target: String,
    http: reqwest::Client,
    calls: AtomicUsize,
    wrong: AtomicUsize,
    choose: Box<Choose>,
}

struct Proxy {
    url: String,
    way: Arc<Way>,
}

impl Proxy {
    async fn start(
        service: &TestService,
        choose: impl Fn(usize, &str) -> Option<Nonsense> + Send + Sync + 'static,
    ) -> Self {
        let way = Arc::new(Way {
            target: service.url.clone(),
            http: http(),
            calls: AtomicUsize::new(0),
            wrong: AtomicUsize::new(0),
            choose: Box::new(choose),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let router = Router::new().fallback(pass).with_state(Arc::clone(&way));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, way }
    }

    fn wrong(&self) -> usize {
        self.way.wrong.load(Ordering::SeqCst)
    }
}

async fn pass(State(way): State<Arc<Way>>, request: Request) -> Response {
    let call = way.calls.fetch_add(1, Ordering::SeqCst);
    let path = request.uri().path().to_owned();
    let Some(nonsense) = (way.choose)(call, &path) else { return forward(&way.http, &way.target, request).await };
    way.wrong.fetch_add(1, Ordering::SeqCst);
    let page = [(header::CONTENT_TYPE, "text/html")];
    match nonsense {
        Nonsense::Page => (page, "<html>Sign in</html>").into_response(),
        Nonsense::NotFoundPage => (StatusCode::NOT_FOUND, page, "<html>Not here</html>").into_response(),
        Nonsense::Unauthorized => (StatusCode::UNAUTHORIZED, page, "<html>Who is it?</html>").into_response(),
        Nonsense::BadGateway => (StatusCode::BAD_GATEWAY, page, "<html>Bad gateway</html>").into_response(),
        Nonsense::WrongTypes => ([(header::CONTENT_TYPE, "application/json")], "{\"batch_id\": 7}\n").into_response(),
        Nonsense::Empty => StatusCode::OK.into_response(),
        Nonsense::WithoutTail | Nonsense::Cut => {
            // The service handles the call; only its answer is damaged.
            let answer = forward(&way.http, &way.target, request).await;
            damage(answer, nonsense).await
        }
        Nonsense::Silence => std::future::pending().await,
    }
}

async fn damage(answer: Response, nonsense: Nonsense) -> Response {
    let (mut parts, body) = answer.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.expect("the service answers whole bodies");
    parts.headers.remove(header::CONTENT_LENGTH);
    let lines: Vec<&[u8]> = body.split_inclusive(|&byte| byte == b'\n').collect();
    if nonsense == Nonsense::WithoutTail && lines.len() > 1 {
        let kept = lines[..lines.len() - 1].concat();
        return Response::from_parts(parts, Body::from(kept));
    }
    broken(body.slice(..body.len() / 2))
}

/// A success whose body ends with an error after `bytes`.
fn broken(bytes: Bytes) -> Response {
    let parts = [Ok(bytes), Err(std::io::Error::other("the connection breaks"))];
    Response::new(Body::from_stream(futures::stream::iter(parts)))
}

fn write_config(folder: &Path, server: &str, silence_s: u64, extra: &str) -> String {
    let config = format!(
        r#"
        server = "{server}"
        model = "{}"
        output = "{}"
        steps = {STEPS}
        device = "cpu"
        silence_s = {silence_s}
        checkpoint = {{ every = 4 }}
        publish = {{ every = 3 }}
        schedule = {{ peak = 1e-3 }}
        {extra}
        "#,
        tiny_model().display(),
        folder.join("run").display()
    );
    let path = folder.join("trainer.toml");
    std::fs::write(&path, config).expect("a temporary file can be written");
    path.display().to_string()
}

fn weights(folder: &Path) -> Vec<u8> {
    let file = folder.join(format!("run/checkpoints/step-{STEPS:08}/model/model.safetensors"));
    std::fs::read(file).expect("the last step is saved")
}

/// Trains through a proxy that damages the calls that `choose` names, and compares the result with that of an
/// undisturbed run.
async fn ends_as_undisturbed(choose: impl Fn(usize, &str) -> Option<Nonsense> + Send + Sync + 'static) {
    let (undisturbed, disturbed) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let service = TestService::start(POLICIES).await;
    record(&service.client, 2 * STEPS, 2).await;
    train_to_the_end(&["train", "--config", &write_config(undisturbed.path(), &service.url, 1, "")]).await;
    service.stop().await;

    let service = TestService::start(POLICIES).await;
    record(&service.client, 2 * STEPS, 2).await;
    let proxy = Proxy::start(&service, choose).await;
    train_to_the_end(&["train", "--config", &write_config(disturbed.path(), &proxy.url, 1, "")]).await;
    assert!(proxy.wrong() > 0, "nothing went wrong on the way");
    let quarantined = service.client.groups("default", &[("state", "quarantined")]).await.expect("it answers");
    assert_eq!(quarantined.groups.len(), 0, "no group is at fault");
    let batches = service.client.batches("default", &[]).await.expect("it answers").batches;
    let steps: Vec<Option<i64>> = batches.iter().map(|batch| batch.step).collect();
    assert_eq!(steps, (1..=STEPS as i64).map(Some).collect::<Vec<_>>(), "every batch is trained once, in order");
    assert!(service.client.stats().await.expect("it answers").conserved);
    service.stop().await;
    assert!(weights(undisturbed.path()) == weights(disturbed.path()), "the weights differ");
}

fn is_samples(path: &str) -> bool {
    path.ends_with("/samples")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_in_place_of_samples_blames_no_batch() {
    let reads = AtomicUsize::new(0);
    ends_as_undisturbed(move |_, path| {
        if !is_samples(path) {
            return None;
        }
        // Two of three answers are damaged, with every kind of damage in turn.
        let read = reads.fetch_add(1, Ordering::SeqCst);
        (read % 3 != 2).then(|| ALL[(read / 3 * 2 + read % 3) % ALL.len()])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_on_any_call_ends_no_trainer() {
    ends_as_undisturbed(|call, _| {
        // The damaged calls include the first calls after a start.
        (noise(call as u64 * 7 + 3) < 0.4).then(|| ALL[(noise(call as u64 * 7 + 4) * ALL.len() as f64) as usize])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tail_that_is_missing_is_noticed() {
    let reads = AtomicUsize::new(0);
    ends_as_undisturbed(move |_, path| {
        (is_samples(path) && reads.fetch_add(1, Ordering::SeqCst).is_multiple_of(2)).then_some(Nonsense::WithoutTail)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_that_lasts_longer_than_a_lease_costs_no_batch() {
    let service = TestService::start(&format!("{POLICIES}    lease = {{ ttl_s = 3 }}\n")).await;
    record(&service.client, 2 * STEPS, 2).await;
    let reads = AtomicUsize::new(0);
    let proxy = Proxy::start(&service, move |_, path| {
        (is_samples(path) && reads.fetch_add(1, Ordering::SeqCst) < 2).then_some(Nonsense::Silence)
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    // Two silences of two seconds outlast the lease.
    let config = write_config(folder.path(), &proxy.url, 2, "data = { lease_ttl_s = 3 }");
    let arguments = ["train", "--config", &config];
    let ended = train_to_the_end(&arguments);
    tokio::time::timeout(Duration::from_mins(1), ended).await.expect("the silence ends for the trainer");
    assert_eq!(proxy.wrong(), 2);
    let batches = service.client.batches("default", &[]).await.expect("it answers").batches;
    let delivered: Vec<(u32, Option<i64>)> = batches.iter().map(|batch| (batch.attempt, batch.step)).collect();
    let once: Vec<_> = (1..=STEPS as i64).map(|step| (1, Some(step))).collect();
    assert_eq!(delivered, once, "every batch is trained under its first lease");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_repeated_for_a_bounded_time_and_the_error_names_the_service() {
    let service = TestService::start(POLICIES).await;
    record(&service.client, 4, 2).await;
    let proxy = Proxy::start(&service, |_, path| is_samples(path).then_some(Nonsense::Page)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let config = write_config(folder.path(), &proxy.url, 1, "patience_s = 1");
    let output = crate::support::trainer(&["train", "--config", &config]).output().await.expect("the binary starts");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(told.contains(&format!("gave up on `samples` at {}", proxy.url)), "{told}");
    let quarantined = service.client.groups("default", &[("state", "quarantined")]).await.expect("it answers");
    assert_eq!(quarantined.groups.len(), 0);
    service.stop().await;
}
