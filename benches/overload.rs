//! Ingest at ten times its peak load: which share of the peak is still stored, how long leases and acks take meanwhile,
//! and how soon the peak is reached again.
//!
//! The clients repeat refused posts at once, as a retry storm does. `cargo bench -p forebay --bench overload` prints a
//! table; nothing is asserted.

mod common;

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use self::common::{body, forebay, median, template};

/// Number of connections that reach the peak.
const CONNECTIONS: usize = 32;

/// How many times more connections the overload has.
const TIMES: usize = 10;

const PHASE: Duration = Duration::from_secs(8);

/// Length of the slices in which a phase is counted.
const SLICE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Counts {
    stored: AtomicU64,
    refused: AtomicU64,
    stop: AtomicBool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (url, stop) = forebay(&format!("sqlite:{}", folder.path().join("bench.db").display())).await?;
    let template = Arc::new(template());
    let mut out = std::io::stdout();
    let peak = phase(&url, &template, CONNECTIONS).await?;
    writeln!(out, "{CONNECTIONS} connections: {peak}")?;
    let flood = phase(&url, &template, TIMES * CONNECTIONS).await?;
    writeln!(out, "{} connections: {flood}", TIMES * CONNECTIONS)?;
    let after = phase(&url, &template, CONNECTIONS).await?;
    writeln!(out, "{CONNECTIONS} connections again: {after}")?;
    let recovered = after.slices.iter().position(|&stored| stored >= 0.9 * peak.stored);
    writeln!(
        out,
        "goodput in the flood: {:.2} of the peak; 90% of the peak again after {}",
        flood.stored / peak.stored,
        recovered.map_or("more than this phase".to_owned(), |slice| format!(
            "{:.1} s",
            SLICE.as_secs_f64() * (slice + 1) as f64
        )),
    )?;
    let _ = stop.send(());
    Ok(())
}

/// The measurements of one phase.
struct Phase {
    /// Bodies per second that were stored: the median over the slices.
    stored: f64,
    slices: Vec<f64>,
    refused: u64,
    /// Milliseconds that each lease with its ack took, sorted.
    leases_ms: Vec<f64>,
    resident_mib: f64,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = |share: f64| self.leases_ms.get((share * (self.leases_ms.len() as f64 - 1.0)) as usize).copied();
        write!(
            f,
            "{:.0} bodies/s stored, {} refused, lease and ack p50 {:.1} ms, p99 {:.1} ms ({} of them), {:.0} MiB resident",
            self.stored,
            self.refused,
            at(0.5).unwrap_or(f64::NAN),
            at(0.99).unwrap_or(f64::NAN),
            self.leases_ms.len(),
            self.resident_mib,
        )
    }
}

async fn phase(url: &str, template: &Arc<Vec<String>>, connections: usize) -> anyhow::Result<Phase> {
    let counts = Arc::new(Counts::default());
    let client = reqwest::Client::new();
    let agents: Vec<_> = (0..connections)
        .map(|_| {
            tokio::spawn(agent(
                client.clone(),
                format!("{url}/trajectories"),
                Arc::clone(template),
                Arc::clone(&counts),
            ))
        })
        .collect();
    let trainer = tokio::spawn(trainer(url.to_owned(), Arc::clone(&counts)));
    let started = Instant::now();
    let (mut slices, mut before) = (Vec::new(), 0);
    while started.elapsed() < PHASE {
        tokio::time::sleep(SLICE).await;
        let stored = counts.stored.load(Ordering::Relaxed);
        slices.push((stored - before) as f64 / SLICE.as_secs_f64());
        before = stored;
    }
    let resident_mib = resident_mib()?;
    counts.stop.store(true, Ordering::Relaxed);
    for agent in agents {
        agent.await??;
    }
    let mut leases_ms = trainer.await??;
    leases_ms.sort_by(f64::total_cmp);
    let refused = counts.refused.load(Ordering::Relaxed);
    Ok(Phase { stored: median(&mut slices.clone()), slices, refused, leases_ms, resident_mib })
}

/// Posts one body after the other, and repeats a refused body at once.
async fn agent(
    client: reqwest::Client,
    url: String,
    template: Arc<Vec<String>>,
    counts: Arc<Counts>,
) -> anyhow::Result<()> {
    while !counts.stop.load(Ordering::Relaxed) {
        let body = body(&template);
        let sent = client.post(&url).header("content-type", "application/json").body(body).send().await;
        // The service may refuse a body and close the connection while the client still sends it.
        let status = match sent {
            Ok(response) => response.status().as_u16(),
            Err(_) => 503,
        };
        match status {
            201 => counts.stored.fetch_add(1, Ordering::Relaxed),
            429 | 503 => counts.refused.fetch_add(1, Ordering::Relaxed),
            status => anyhow::bail!("unexpected answer {status}"),
        };
    }
    Ok(())
}

/// Leases and acks one batch after the other. Returns the milliseconds of each pair.
async fn trainer(url: String, counts: Arc<Counts>) -> anyhow::Result<Vec<f64>> {
    let client = reqwest::Client::new();
    let mut took = Vec::new();
    let mut step = 0;
    while !counts.stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        let request = client.post(format!("{url}/batches")).json(&json!({"consumer": "bench"}));
        let response = request.send().await.context("the server does not answer")?;
        if response.status() != 201 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        let batch: Value = response.json().await?;
        step += 1;
        let id = batch["batch_id"].as_str().context("a batch has an id")?;
        let ack = json!({"lease": batch["lease"], "step": step});
        let response = client.post(format!("{url}/batches/{id}/ack")).json(&ack).send().await?;
        anyhow::ensure!(response.status() == 200, "{}", response.status());
        took.push(started.elapsed().as_secs_f64() * 1e3);
    }
    Ok(took)
}

/// Resident memory of this process, which runs both the service and the clients.
fn resident_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("only Linux tells")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS")).context("it is there")?;
    let kib: f64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kib / 1024.0)
}
