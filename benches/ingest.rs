//! Durable ingest of a group of 8 x 2,000 tokens as one JSON bundle, beside the ceiling of a handler that only drains.
//!
//! Both are driven by the same client on the same cores, in turn, so that their ratio holds when the machine's speed
//! drifts. `cargo bench -p forebay --bench ingest [-- ROUNDS]` prints the median of each; nothing is asserted.

use std::{
    fmt::Write as _,
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use axum::{Router, body::Body, routing::post};
use forebay::{
    access::keyring::Keyring, api::Access, buffer::Buffer, clock::AnchoredClock, config::Config, metrics::Metrics,
    server::Server, store,
};
use http_body_util::BodyExt as _;
use tokio::{net::TcpListener, sync::oneshot};

const ROLLOUTS: usize = 8;
const TOKENS: usize = 2_000;
const CONNECTIONS: usize = 32;
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 5;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Cargo passes flags of its own.
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(ROUNDS);
    let folder = tempfile::tempdir()?;
    let (drain, _drain_stop) = drain_only().await?;
    let (forebay, stop) = forebay(&format!("sqlite:{}", folder.path().join("bench.db").display())).await?;
    let template = template();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "body: {ROLLOUTS} x {TOKENS} tokens, {} kB of JSON; {CONNECTIONS} connections",
        body(&template, 0).len() / 1_000
    )?;
    let (mut ceiling, mut durable) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        ceiling.push(drive(&drain, &template).await?);
        durable.push(drive(&forebay, &template).await?);
        writeln!(
            out,
            "round {round}: drain only {:.0} bodies/s, durable {:.0} bodies/s",
            ceiling[round - 1],
            durable[round - 1]
        )?;
    }
    let (ceiling, durable) = (median(&mut ceiling), median(&mut durable));
    writeln!(
        out,
        "median: durable {durable:.0} bodies/s ({:.2} million tokens/s), {:.2} of the drain-only ceiling {ceiling:.0}",
        durable * (ROLLOUTS * TOKENS) as f64 / 1e6,
        durable / ceiling
    )?;
    let _ = stop.send(());
    Ok(())
}

async fn drain_only() -> anyhow::Result<(String, oneshot::Sender<()>)> {
    let drain = |mut body: Body| async move { while let Some(Ok(_)) = body.frame().await {} };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/trajectories", listener.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let router = Router::new().route("/trajectories", post(drain));
    tokio::spawn(async move {
        let stopped = async {
            let _ = stopped.await;
        };
        axum::serve(listener, router).with_graceful_shutdown(stopped).await
    });
    Ok((url, stop))
}

async fn forebay(database: &str) -> anyhow::Result<(String, oneshot::Sender<()>)> {
    let config = Config::parse(
        "[policy_defaults]\nbacklog = { max_ready_rollouts = 1_000_000_000, max_bytes = 1_000_000_000_000 }",
    )?;
    let metrics = Arc::new(Metrics::new());
    let store = store::open(database, metrics.store()).await?;
    let buffer =
        Buffer::start(store, Arc::new(AnchoredClock::new()), Arc::clone(&metrics), config.buffer, config.policies)
            .await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/trajectories", listener.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let keyring = Arc::new(Keyring::start(buffer.clone(), false).await?);
    let access = Access { keyring, hosts: Arc::new([]) };
    let server = Server::new(listener, buffer, metrics, config.bodies, config.server, access)?;
    tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    Ok((url, stop))
}

/// Bodies per second over one round.
async fn drive(url: &str, template: &[String]) -> anyhow::Result<f64> {
    static NEXT_GROUP: AtomicU64 = AtomicU64::new(0);
    forebay_client::install_tls_provider();
    let client = reqwest::Client::new();
    let started = Instant::now();
    let lanes = (0..CONNECTIONS).map(|_| async {
        let mut bodies = 0_u64;
        while started.elapsed() < ROUND {
            let body = body(template, NEXT_GROUP.fetch_add(1, Ordering::Relaxed));
            let request = client.post(url).header("content-type", "application/json").body(body);
            let response = request.send().await.context("the server does not answer")?;
            let status = response.status();
            let text = response.text().await?;
            anyhow::ensure!(status.is_success(), "{status}: {text}");
            bodies += 1;
        }
        anyhow::Ok(bodies)
    });
    let bodies: u64 = futures::future::try_join_all(lanes).await?.into_iter().sum();
    Ok(bodies as f64 / started.elapsed().as_secs_f64())
}

/// The parts of a rollout after its ids: numbers as Python prints them.
fn template() -> Vec<String> {
    let rollout = |rollout: usize| {
        let (mut tokens, mut mask, mut logprobs) = (String::from("1"), String::new(), String::new());
        for index in 0..TOKENS - 1 {
            let noise = (index * 2_654_435_761 + rollout * 40_503) % 1_000_003;
            let comma = if index == 0 { "" } else { ", " };
            let _ = write!(tokens, ", {}", noise % 128_000);
            let _ = write!(mask, "{comma}{}", u8::from(!noise.is_multiple_of(7)));
            let _ = write!(logprobs, "{comma}{}", f64::from(-(noise as f32) / 400_000.0));
        }
        format!(
            r#""group_size": {ROLLOUTS}, "status": "completed", "reward": {}, "segments": [{{"tokens": [{tokens}], "loss_mask": [{mask}], "logprobs": [{logprobs}]}}]}}"#,
            rollout % 2
        )
    };
    (0..ROLLOUTS).map(rollout).collect()
}

fn body(template: &[String], group: u64) -> String {
    let mut body = String::with_capacity(template.iter().map(|part| part.len() + 64).sum());
    for (rollout, part) in template.iter().enumerate() {
        let separator = if rollout == 0 { '[' } else { ',' };
        let _ = write!(body, r#"{separator}{{"rollout_id": "g{group}-{rollout}", "group_id": "g{group}", {part}"#);
    }
    body.push(']');
    body
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
