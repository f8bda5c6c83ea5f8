//! What uploads cost: as many bytes as a batch of a mixture of experts has, stored and read back, beside the same bytes
//! appended to a file and synced part by part, and beside an eighth of them read by range.
//!
//! Service and clients are processes and tasks of one machine. `make bench NAME=media` prints a table; nothing is
//! asserted.

#[path = "common/process.rs"]
mod process;

use std::{fs::File, io::Write as _, path::Path, sync::Arc, time::Instant};

use anyhow::Context as _;

use self::process::Service;

/// Uploads of a round, and bytes of each: 32,000 tokens with the 8 experts of 48 layers, a byte each.
const UPLOADS: usize = 24;
const BYTES: usize = 32_000 * 48 * 8;

/// Uploads and reads under way at a time.
const CLIENTS: usize = 8;

const ROUNDS: usize = 5;

/// What is appended before each sync: what a commit stores of the parts that come together.
const PART: usize = 4 << 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    forebay_client::install_tls_provider();
    let folder = tempfile::tempdir()?;
    let mut out = std::io::stdout();
    let service = Arc::new(Service::start(folder.path(), "media", "").await?);
    let (mut stored, mut appended, mut read, mut eighth) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let bytes: Vec<_> = (0..UPLOADS).map(|upload| bytes::Bytes::from(noise(round * UPLOADS + upload))).collect();
        let digests: Vec<_> = bytes.iter().map(|bytes| blake3::hash(bytes).to_hex().to_string()).collect();
        appended.push(append(folder.path(), &bytes)?);
        let puts = bytes.iter().zip(&digests).map(|(bytes, digest)| {
            let put = service.http.put(format!("{}/media/{digest}", service.url));
            put.header("content-type", "application/octet-stream").body(bytes.clone())
        });
        stored.push(timed(puts.collect(), BYTES).await?);
        let gets = |range: Option<String>| {
            let service = Arc::clone(&service);
            digests.iter().map(move |digest| {
                let get = service.http.get(format!("{}/media/{digest}", service.url));
                range.iter().fold(get, |get, range| get.header("range", range))
            })
        };
        read.push(timed(gets(None).collect(), BYTES).await?);
        eighth.push(timed(gets(Some(format!("bytes={}-{}", BYTES / 8, BYTES / 4 - 1))).collect(), BYTES / 8).await?);
    }
    let [stored, appended, read, eighth] = [stored, appended, read, eighth].map(median);
    writeln!(out, "{UPLOADS} uploads of {BYTES} bytes, {CLIENTS} at a time; medians of {ROUNDS} rounds")?;
    writeln!(out, "| | MB/s | of appended and synced |\n|---|---|---|")?;
    for (what, rate) in [
        ("appended to a file, synced every 4 MiB", appended),
        ("stored by the service", stored),
        ("read whole", read),
        ("read by range, an eighth of each", eighth),
    ] {
        writeln!(out, "| {what} | {rate:.0} | {:.2} |", rate / appended)?;
    }
    writeln!(out, "\nmost memory of the service: {} MiB", peak_bytes(service.process.id())? >> 20)?;
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
