//! Log injection: whatever a client sends, one event is one line.

use forebay_wire::ARROW_STREAM;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    arrow::{columns, stream},
    support::{group, process::Service},
};

/// A line that looks like the service's own, after a line break and a colour code.
const FORGED: &str = "\r\n2026-01-01T00:00:00Z ERROR forged: \u{1b}[31mall is lost\u{1b}[0m\u{9b}31m\u{85}\u{2028}";

/// Sends the forged line in every field where a client may put text.
async fn inject(url: &str) {
    let http = crate::support::http();
    for field in ["rollout_id", "group_id", "policy", "environment", "execution_id", "admission_id", "status", FORGED] {
        let body = json!({"status": "aborted", "reward": 1, (field): FORGED});
        let _ = http.post(format!("{url}/trajectories")).json(&body).send().await.expect("the service answers");
    }
    for (path, body) in [
        ("/batches", json!({"consumer": FORGED, "request_id": FORGED, "policy": FORGED})),
        ("/groups/discard", json!({"policy": "default", "group_id": "g", "reason": FORGED})),
        ("/batches/0190a5a0-0000-7000-8000-000000000000/ack", json!({"lease": FORGED, "step": 1})),
    ] {
        let _ = http.post(format!("{url}{path}")).json(&body).send().await.expect("the service answers");
    }
    let rules = json!({"filter": [{"name": FORGED, "scope": "rollout", "when": FORGED, "action": "drop"}]});
    let _ = http.put(format!("{url}/policies/default")).json(&rules).send().await.expect("the service answers");
    let version = json!({"version": 1, "uri": FORGED});
    let _ =
        http.put(format!("{url}/policies/default/version")).json(&version).send().await.expect("the service answers");
    let encoded = FORGED.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat();
    for path in ["policies", "batches", "nope", "groups?group_id=", "trajectories?nope="] {
        let joint = if path.ends_with('=') { "" } else { "/" };
        let _ = http.get(format!("{url}/{path}{joint}{encoded}")).send().await.expect("the service answers");
    }
    // Heads that no client library would write.
    let heads: [&[u8]; 5] = [
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nuser-agent: \x1b[31m forged \x1b[0m\r\nx-request-id: \x1b[31mforged\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-request-id: a forged ERROR\r\nx: \xff\x85\r\n\r\n",
        b"GET /\x1b[31mforged HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x1b[31mFORGED /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /nope\nERROR forged HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ];
    for head in heads {
        let mut stream = tokio::net::TcpStream::connect(url.trim_start_matches("http://")).await.expect("it accepts");
        stream.write_all(head).await.expect("the head is sent");
        stream.shutdown().await.expect("the stream ends");
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
}

async fn log_of(format: &str) -> Vec<String> {
    // At this level the service logs everything that it can log about a request.
    let service =
        Service::start_with("sqlite::memory:", &["--log", format], &[("RUST_LOG", "debug,hyper=trace,sqlx=trace")])
            .await;
    inject(&service.url).await;
    service.terminate().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_event_stays_one_line_of_json() {
    let log = log_of("json").await;
    assert!(log.len() > 50, "the log is about the requests");
    for line in &log {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line:?} is not an event"));
        assert!(event["timestamp"].is_string() && event["level"].is_string(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_event_stays_one_line_of_text() {
    let log = log_of("text").await;
    assert!(log.len() > 50, "the log is about the requests");
    for line in &log {
        let time = line.split(' ').next().unwrap_or_default();
        assert!(
            time.starts_with("20") && time.ends_with('Z') && !time.starts_with("2026-01-01T"),
            "{line:?} is forged"
        );
        assert!(
            !line.chars().any(|character| character.is_control() && character != '\t'),
            "{line:?} has control characters"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_arrow_leaves_nothing_but_events_in_the_log() {
    let service = Service::try_start("sqlite::memory:", &[("RUST_LOG", "info")]).await.expect("it serves");
    let http = crate::support::http();
    let whole = group("a", &[1.0, 0.0]);
    let whole = stream(&[columns(whole.as_array().expect("a group is an array"))]);
    for place in 0..whole.len() {
        let mut body = whole.clone();
        // Lengths and offsets that point outside the data and make the format's reader panic.
        body[place] ^= 0x81;
        let post = http.post(format!("{}/trajectories", service.url)).header("content-type", ARROW_STREAM).body(body);
        let status = post.send().await.expect("the service answers").status().as_u16();
        assert!(status < 500, "byte {place}: {status}");
    }
    let log = service.terminate().await;
    for line in &log {
        serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{line:?} is not an event"));
    }
    assert!(log.iter().all(|line| !line.contains("panicked")), "a malformed body is no bug of the service");
    let refused = log.iter().filter(|line| line.contains("\"malformed\""));
    assert!((1..whole.len()).contains(&refused.count()), "refusals are logged, and sampled");
}
