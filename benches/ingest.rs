//! Durable ingest of a group of 8 x 2,000 tokens as one JSON bundle, beside the ceiling of a handler that only drains.
//!
//! Both are driven by the same client on the same cores, in turn, so that their ratio holds when the machine's speed
//! drifts. `cargo bench -p forebay --bench ingest [-- ROUNDS]` prints the median of each; nothing is asserted.

mod common;

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use axum::{Router, body::Body, routing::post};
use http_body_util::BodyExt as _;
use tokio::{net::TcpListener, sync::oneshot};

use self::common::{ROLLOUTS, TOKENS, body, forebay, median, template};

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
        body(&template).len() / 1_000
    )?;
    let (mut ceiling, mut durable) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        ceiling.push(drive(&drain, &template).await?);
        durable.push(drive(&format!("{forebay}/trajectories"), &template).await?);
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

/// Bodies per second over one round.
async fn drive(url: &str, template: &[String]) -> anyhow::Result<f64> {
    let client = reqwest::Client::new();
    let started = Instant::now();
    let lanes = (0..CONNECTIONS).map(|_| async {
        let mut bodies = 0_u64;
        while started.elapsed() < ROUND {
            let body = body(template);
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
