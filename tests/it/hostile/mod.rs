//! Hostile clients on raw sockets. The service does not exit or hang, sends no unexpected 5xx, and holds nothing for
//! them once they are gone.
//!
//! These tests are separate from those of the API, because a client library refuses to send such requests.

mod bodies;
mod bombs;
mod connections;
mod ids;
mod json;
mod log;
mod smuggling;
mod starving;

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::support::{Backend, TestApp, eventually, rollout, text};

/// Far longer than any timeout in the tests, also on a busy machine. A test that waits this long for an answer has
/// found a hang.
const PATIENCE: Duration = Duration::from_mins(2);

/// Timeouts of one second, so that a client that never finishes is cut off within the test.
const IMPATIENT: &str = "[limits]\nheader_timeout_s = 1\nbody_timeout_s = 1";

/// An answer as it arrived on the socket.
#[derive(Debug)]
struct RawAnswer {
    status: u16,
    body: Vec<u8>,
}

impl RawAnswer {
    /// The type of a problem.
    #[track_caller]
    fn problem(&self) -> String {
        let problem: Value = serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{} {:?} is no problem", self.status, String::from_utf8_lossy(&self.body)));
        text(&problem["type"]).to_owned()
    }
}

/// A connection that can send any bytes.
struct Raw(TcpStream);

impl Raw {
    async fn connect(app: &TestApp) -> Self {
        Self::to(app.url.trim_start_matches("http://")).await
    }

    /// Connects to another listener of the service.
    async fn to(address: &str) -> Self {
        Self(TcpStream::connect(address).await.expect("the kernel accepts"))
    }

    /// Connects and sends the bytes.
    async fn sending(app: &TestApp, bytes: impl AsRef<[u8]>) -> Self {
        let mut raw = Self::connect(app).await;
        raw.send(bytes).await;
        raw
    }

    /// Sends the bytes, or as many as the server still accepts.
    async fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let sent = tokio::time::timeout(PATIENCE, self.0.write_all(bytes.as_ref())).await;
        sent.expect("the server reads or closes").is_ok()
    }

    /// Closes the sending direction.
    async fn half_close(&mut self) {
        let _ = self.0.shutdown().await;
    }

    /// Resets the connection instead of closing it.
    fn reset(self) {
        self.0.set_zero_linger().expect("a socket can be told to reset");
    }

    /// The next answer, with the length that its head names; `None` if the server closed the connection first.
    async fn answer(&mut self) -> Option<RawAnswer> {
        tokio::time::timeout(PATIENCE, self.read_answer()).await.expect("the server answers or closes")
    }

    async fn read_answer(&mut self) -> Option<RawAnswer> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.ok()?);
        }
        let head = String::from_utf8(head).expect("a head is text");
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("the first line has a status");
        let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
        let headers: BTreeMap<String, String> = lines.filter_map(header).collect();
        let length = headers.get("content-length").map_or(0, |length| length.parse().expect("a length is a number"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await.ok()?;
        Some(RawAnswer { status: status.parse().expect("a status is a number"), body })
    }

    /// Reads until the server closes the connection, which it must do.
    async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset ends the connection too.
        let _ = tokio::time::timeout(PATIENCE, self.0.read_to_end(&mut rest)).await.expect("the server closes");
        rest
    }

    /// The only answer on this connection, which ends after it.
    async fn last_answer(&mut self) -> RawAnswer {
        let answer = self.answer().await.expect("the server answers before it closes");
        assert_eq!(self.rest().await, b"", "nothing follows the answer");
        answer
    }
}

/// The head of a post of JSON, without its end.
fn post_head(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
}

/// A whole post of JSON.
fn post(path: &str, body: &str) -> String {
    format!("{}content-length: {}\r\n\r\n{body}", post_head(path), body.len())
}

/// Checks that the service is unaffected: it holds nothing, never failed, answers, and its totals are consistent.
async fn unharmed(app: TestApp) {
    eventually("an idle service", || async {
        let metrics = app.metrics().await;
        let shows = |line: &str| metrics.lines().any(|found| found == line);
        // The scrape is a request too.
        [
            "body_bytes_in_flight 0",
            "control_bytes_in_flight 0",
            "samples_bytes_in_flight 0",
            "requests_in_flight 1",
            "waiters 0",
        ]
        .iter()
        .all(|gauge| shows(&format!("forebay_{gauge}")))
    })
    .await;
    let metrics = app.metrics().await;
    let failed = |line: &&str| line.starts_with("forebay_requests_total") && line.contains("status=\"500\"");
    assert_eq!(metrics.lines().find(failed), None, "a request failed by the service's own fault");
    app.accept(rollout("afterwards", 1.0)).await;
    app.finish().await;
}

/// The service with timeouts of one second. It uses SQLite, which needs no server; these tests do not depend on the
/// store.
async fn impatient() -> TestApp {
    impatient_with(IMPATIENT).await
}

/// A service that closes idle connections after a second.
async fn impatient_with(config: &str) -> TestApp {
    let mut app = TestApp::start_with(Backend::Sqlite, config).await;
    // Nothing is sent on a connection that the service may be about to close.
    app.http = reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("the client has no odd settings");
    app
}
