//! What columns cost: a batch of a mixture of experts with the experts of its tokens, uploaded and read back, whole and as the
//! eighth of the layers that one of eight ranks needs, beside the same bytes appended to a file and synced part by part.
//!
//! Service and clients are processes and tasks of one machine. `make bench NAME=columns` prints a table; nothing is
//! asserted.

#[path = "common/process.rs"]
mod process;

use std::{fs::File, io::Write as _, path::Path, sync::Arc, time::Instant};

use anyhow::Context as _;
use serde_json::{Value, json};

use self::process::Service;

/// Rollouts of a batch, and what each uploads: of 32,000 tokens the 8 experts of 48 layers, a byte each.
const UPLOADS: usize = 64;
const TOKENS: usize = 32_000;
const BYTES: usize = TOKENS * 48 * 8;

/// Uploads under way at a time.
const CLIENTS: usize = 8;

const ROUNDS: usize = 5;

/// What is appended before each sync: what a commit stores of the parts that come together.
const PART: usize = 4 << 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    forebay_client::install_tls_provider();
    let folder = tempfile::tempdir()?;
    let mut out = std::io::stdout();
    let service = Arc::new(Service::start(folder.path(), "columns", "").await?);
    let call = async |request: reqwest::RequestBuilder, body: Value| {
        anyhow::Ok(request.json(&body).send().await?.error_for_status()?.json::<Value>().await?)
    };
    let experts = json!({"dtype": "u8", "shape": [48, 8], "rows": "sequence", "required": true, "retention": "ack"});
    let rules = json!({"batch": {"groups": UPLOADS}, "columns": {"experts": experts}});
    call(service.http.put(format!("{}/policies/default", service.url)), rules).await?;
    let (mut stored, mut appended, mut read, mut eighth) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut answer_bytes, mut eighth_bytes) = (0, 0);
    for round in 0..ROUNDS {
        let bytes: Vec<_> = (0..UPLOADS).map(|upload| bytes::Bytes::from(noise(round * UPLOADS + upload))).collect();
        let digests: Vec<_> = bytes.iter().map(|bytes| blake3::hash(bytes).to_hex().to_string()).collect();
        appended.push(append(folder.path(), &bytes)?);
        let puts = bytes
            .iter()
            .zip(&digests)
            .map(|(bytes, digest)| service.http.put(format!("{}/columns/{digest}", service.url)).body(bytes.clone()));
        stored.push(timed(puts.collect(), BYTES).await?);
        for digest in &digests {
            let columns = json!({"experts": {"digest": digest, "bytes": BYTES}});
            let segment = json!({"tokens": vec![1; TOKENS], "loss_mask": vec![1; TOKENS - 1], "columns": columns});
            let rollout = json!({"reward": 1.0, "segments": [segment]});
            call(service.http.post(format!("{}/trajectories", service.url)), rollout).await?;
        }
        let batch = call(service.http.post(format!("{}/batches", service.url)), json!({})).await?;
        let samples =
            format!("{}/batches/{}/samples?messages=false&columns=experts", service.url, text(&batch, "batch_id"));
        let get = |url: String| service.http.get(url).header("accept", forebay_wire::ARROW_STREAM);
        let rate;
        (answer_bytes, rate) = received(get(samples.clone())).await?;
        read.push(rate);
        let rate;
        (eighth_bytes, rate) = received(get(format!("{samples}&inner=6:12"))).await?;
        eighth.push(rate);
        let ack = format!("{}/batches/{}/ack", service.url, text(&batch, "batch_id"));
        call(service.http.post(ack), json!({"lease": batch["lease"], "step": round + 1})).await?;
    }
    let [stored, appended, read, eighth] = [stored, appended, read, eighth].map(median);
    writeln!(
        out,
        "{UPLOADS} rollouts of {BYTES} bytes each, uploaded {CLIENTS} at a time; medians of {ROUNDS} rounds"
    )?;
    writeln!(out, "| | MB/s | of appended and synced |\n|---|---|---|")?;
    for (what, rate) in [
        ("appended to a file, synced every 4 MiB", appended),
        ("stored by the service", stored),
        ("read whole by one reader", read),
        ("read by one rank, 6 of the 48 layers: its bytes", eighth),
    ] {
        writeln!(out, "| {what} | {rate:.0} | {:.2} |", rate / appended)?;
    }
    writeln!(out, "\nbytes of the answers: {answer_bytes} whole, {eighth_bytes} for 6 of the 48 layers")?;
    writeln!(out, "most memory of the service: {} MiB", peak_bytes(service.process.id())? >> 20)?;
    Ok(())
}

/// Bytes that do not compress.
fn noise(seed: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    let mut bytes = Vec::with_capacity(BYTES + 8);
    while bytes.len() < BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(BYTES);
    bytes
}

/// Appends all of them to a new file. Returns millions of bytes a second.
fn append(folder: &Path, bytes: &[bytes::Bytes]) -> anyhow::Result<f64> {
    let path = folder.join("appended");
    let mut file = File::create(&path)?;
    let started = Instant::now();
    for part in bytes.iter().flat_map(|bytes| bytes.chunks(PART)) {
        file.write_all(part)?;
        file.sync_data()?;
    }
    let seconds = started.elapsed().as_secs_f64();
    std::fs::remove_file(path)?;
    Ok((bytes.len() * BYTES) as f64 / seconds / 1e6)
}

/// Sends requests, some at a time, each of which moves so many bytes. Returns millions of bytes a second.
async fn timed(requests: Vec<reqwest::RequestBuilder>, bytes: usize) -> anyhow::Result<f64> {
    let total = requests.len() * bytes;
    let started = Instant::now();
    let queue = Arc::new(std::sync::Mutex::new(requests));
    let clients = (0..CLIENTS).map(|_| {
        let queue = Arc::clone(&queue);
        tokio::spawn(async move {
            loop {
                let Some(request) = queue.lock().ok().and_then(|mut queue| queue.pop()) else { return anyhow::Ok(()) };
                let mut answer = request.send().await?.error_for_status()?;
                while answer.chunk().await?.is_some() {}
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await??;
    }
    Ok(total as f64 / started.elapsed().as_secs_f64() / 1e6)
}

/// Reads an answer. Returns its bytes, and millions of them a second.
async fn received(request: reqwest::RequestBuilder) -> anyhow::Result<(usize, f64)> {
    let started = Instant::now();
    let mut answer = request.send().await?.error_for_status()?;
    let mut bytes = 0;
    while let Some(part) = answer.chunk().await? {
        bytes += part.len();
    }
    Ok((bytes, bytes as f64 / started.elapsed().as_secs_f64() / 1e6))
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_default()
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// The most memory that a process has had.
fn peak_bytes(process: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("Linux says it")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}
