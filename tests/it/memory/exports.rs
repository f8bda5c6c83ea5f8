//! Exports of several sizes: neither the service nor the command holds more of a larger one.

use std::process::Stdio;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tokio::{io::AsyncReadExt as _, process::Command};

use crate::support::{
    endure,
    process::{Service, peak_bytes_of},
    rollout, with,
};

/// Rollouts of the smaller export, which fill a row group of a Parquet file; the larger one has four times as many.
const ROLLOUTS: usize = 64;

/// Bytes of the messages of a rollout.
const MESSAGE_BYTES: usize = 1 << 20;

/// The most memory that an export may take. Peaks of 55 to 140 MiB were seen for either size: they depend on what arrives
/// while a row group is encoded or a reader is slow, so they cannot be compared with each other. One that held the larger
/// export would take 192 MiB more, and 120 MiB more for a Parquet file, so 210 MiB at least.
const PEAK_BYTES_MAX: u64 = 192 << 20;

/// Posts rollouts with texts that do not compress to nothing, so that files are large, too.
async fn post(service: &Service, range: std::ops::Range<usize>) {
    let mut random = StdRng::seed_from_u64(endure::seed());
    let noise: Vec<u8> = (0..MESSAGE_BYTES).map(|_| random.random_range(b'a'..=b'z')).collect();
    let noise = String::from_utf8(noise).expect("letters are text");
    for index in range {
        let (end, start) = noise.split_at(index * 2_053);
        let messages = json!([{"role": "user", "content": format!("{index}{start}{end}")}]);
        let body = with(rollout(&format!("r{index}"), 1.0), json!({"messages": messages}));
        let request = crate::support::http().post(format!("{}/trajectories", service.url)).json(&body);
        assert_eq!(request.send().await.expect("the service answers").status(), 201);
    }
}

/// Exports to a pipe. Returns the bytes that were written and the peak memory of the command.
async fn export(service: &Service, format: &str) -> (usize, u64) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["export", "--format", format, "--url", &service.url, "--output", "-"]);
    // glibc's malloc keeps freed memory for each of its arenas, as many as threads have met. That is not held rollouts.
    command.env("MALLOC_ARENA_MAX", "1");
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut output = process.stdout.take().expect("it is a pipe");
    let id = process.id().expect("it runs");
    let (mut written, mut peak) = (0, 0);
    let mut part = vec![0; 1 << 18];
    loop {
        // The last bytes are more than a pipe holds, so the command has not ended when its memory is read.
        peak = peak_bytes_of(id).unwrap_or(peak);
        match output.read(&mut part).await.expect("the pipe can be read") {
            0 => break,
            read => written += read,
        }
    }
    let ended = process.wait_with_output().await.expect("it ends");
    assert!(ended.status.success(), "{format}: {}", String::from_utf8_lossy(&ended.stderr));
    (written, peak)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_export_of_four_times_as_much_is_not_held_in_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = Service::start(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
    let mut peaks: Vec<Vec<u64>> = Vec::new();
    for range in [0..ROLLOUTS, ROLLOUTS..4 * ROLLOUTS] {
        let rollouts = range.end;
        post(&service, range).await;
        let mut found = Vec::new();
        for format in ["parquet", "ndjson", "forebay"] {
            let (written, peak) = export(&service, format).await;
            assert!(written > rollouts * MESSAGE_BYTES / 2, "{format}: {written} bytes");
            found.push(peak);
        }
        found.push(service.peak_bytes());
        peaks.push(found);
    }
    let mib = |peaks: &[u64]| peaks.iter().map(|peak| (peak >> 20).to_string()).collect::<Vec<_>>().join(", ");
    let outcome = format!(
        "MiB as parquet, ndjson, forebay, and of the service: {}; four times as many: {}",
        mib(&peaks[0]),
        mib(&peaks[1])
    );
    endure::report("rollouts of 1 MiB, exported", ROLLOUTS, &outcome);
    assert!(peaks.iter().flatten().all(|peak| *peak < PEAK_BYTES_MAX), "{outcome}");
    service.kill().await;
}
