//! A stub service for tests that sends prepared answers, byte for byte.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde::Serialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use super::{Client, RetryPolicy};
use crate::wire::{BatchDescriptor, BatchState, PROBLEM_JSON, VersionRange};

/// An answer that ends in the middle of its body.
pub(crate) const BROKEN: &str =
    "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";

/// No answer, on a connection that stays open.
pub(crate) const HANG: &str = "";

/// Serves one request per connection. Request n gets answer n; requests after the last answer get the last answer
/// again.
pub(crate) struct Stub {
    base_url: String,
    requests: Arc<Mutex<Vec<String>>>,
    answered: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

impl Stub {
    pub(crate) async fn start(answers: impl IntoIterator<Item = String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let address = listener.local_addr().expect("the listener is bound");
        let answers: Vec<String> = answers.into_iter().collect();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        let (count, answered) = watch::channel(0);
        let task = tokio::spawn(async move {
            let mut hanging = Vec::new();
            while let Ok((mut connection, _)) = listener.accept().await {
                let request = read_request(&mut connection).await;
                let number = {
                    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.push(request);
                    seen.len()
                };
                let Some(answer) = answers.get(number - 1).or(answers.last()) else { return };
                // A closed connection is no error here: some tests make the client hang up.
                let _ = connection.write_all(answer.as_bytes()).await;
                if answer == HANG {
                    hanging.push(connection);
                }
                count.send_replace(number);
            }
        });
        Self { base_url: format!("http://{address}"), requests, answered, task }
    }

    /// A client with short pauses between attempts.
    pub(crate) fn client(&self) -> Client {
        let quick = RetryPolicy { attempts_max: 3, first_pause: Duration::from_millis(1), ..RetryPolicy::default() };
        Client::new(&self.base_url).expect("the stub's URL is plain").with_retry(quick)
    }

    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Requests received so far: head and body.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until this many requests are answered.
    pub(crate) async fn answered(&self, requests: usize) {
        self.answered.clone().wait_for(|count| *count >= requests).await.expect("the stub runs as long as the test");
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An answer with a JSON body.
pub(crate) fn json(status: u16, body: &impl Serialize) -> String {
    with_body(status, "application/json", "", &serde_json::to_string(body).expect("wire types are plain data"))
}

/// A problem document. Each of the `headers` ends with a line break.
pub(crate) fn problem(status: u16, kind: &str, headers: &str) -> String {
    let body = format!(r#"{{"type":"{kind}","title":"Refused","status":{status},"detail":"for the test"}}"#);
    with_body(status, PROBLEM_JSON, headers, &body)
}

/// A complete answer with any body.
pub(crate) fn with_body(status: u16, media: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Stub\r\nconnection: close\r\ncontent-type: {media}\r\ncontent-length: {length}\r\n\
        {headers}\r\n{body}"
    )
}

/// A minimal batch.
pub(crate) fn batch(batch_id: &str, lease: Option<&str>) -> BatchDescriptor {
    BatchDescriptor {
        acked_at: None,
        waited_ms: 0,
        held_ms: None,
        batch_id: batch_id.to_owned(),
        state: BatchState::Leased,
        lease: lease.map(str::to_owned),
        consumer: None,
        epoch: 1,
        policy: "default".to_owned(),
        expires_at: Some("2026-01-01T00:00:00Z".to_owned()),
        expires_in_ms: Some(600_000),
        attempt: 1,
        step: None,
        reason: None,
        groups: 1,
        rollouts: 1,
        samples: 1,
        tokens: 3,
        policy_version: VersionRange { current: 0, min: None, max: None },
        metrics: BTreeMap::new(),
        samples_url: format!("/batches/{batch_id}/samples"),
        shards: None,
        created_at: "2026-01-01T00:00:00Z".to_owned(),
    }
}

/// Reads the head of a request and as many bytes of body as it announces.
async fn read_request(connection: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut chunk = [0; 4_096];
    loop {
        if let Some(head) = text.windows(4).position(|window| window == b"\r\n\r\n")
            && text.len() >= head + 4 + announced(&text[..head])
        {
            break;
        }
        match connection.read(&mut chunk).await {
            Ok(read @ 1..) => text.extend_from_slice(&chunk[..read]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn announced(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok()).unwrap_or(0)
}
