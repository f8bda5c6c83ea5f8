//! More bodies at once than the budget has room for: it is never exceeded, and the process stays near it.

use std::{num::NonZero, sync::Arc};

use bytes::Bytes;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinSet,
};

use crate::support::{process::Service, torture};

/// Tokens of a body: 8 MB as text.
const TOKENS: usize = 445_000;

/// What the service holds of bodies at once when nothing else is configured.
const BUDGET_BYTES: usize = 192 << 20;

/// What a connection may keep beside the bodies that are paid for: its buffer, which is as large as a head may be and
/// also takes what is read of a refused body before it is thrown away.
const CONNECTION_BYTES: usize = 64 << 10;

/// Work on a body beside its text, in multiples of that: columns as they grow, and what is packed from them. It is done
/// for as many bodies at once as there are cores.
const WORK: usize = 3;

/// What is left, found by measurement: 30 MiB of an idle process, pages of the database, and what the allocator keeps for
/// threads that freed it. All of it came to 20 to 40 MiB in a release build and to 80 to 120 MiB in a debug build.
const FIXED_BYTES: usize = 128 << 20;

/// What a body lacks until all are there, so that all of the budget is in use at once.
const TAIL_BYTES: usize = 16;

/// A whole body but for its rollout's name, which stands in front.
fn rest() -> Bytes {
    let noise = |index: usize| (index * 2_654_435_761) % 1_000_003;
    let list = |of: &dyn Fn(usize) -> String| (1..TOKENS).map(of).collect::<Vec<_>>().join(",");
    let tokens = list(&|index| (noise(index) % 128_000).to_string());
    let mask = list(&|index| u8::from(!noise(index).is_multiple_of(7)).to_string());
    let logprobs = list(&|index| format!("-{:.6}", noise(index) as f64 / 400_000.0));
    let segment = format!(r#"{{"tokens":[1,{tokens}],"loss_mask":[{mask}],"logprobs":[{logprobs}]}}"#);
    format!(r#""status":"completed","reward":1.0,"segments":[{segment}]}}"#).into()
}

/// One post: its head, the name of its rollout, and the bytes that all posts share.
struct Post {
    start: String,
    rest: Bytes,
}

impl Post {
    fn new(number: usize, rest: Bytes) -> Self {
        let name = name(number);
        let length = name.len() + rest.len();
        let head = "POST /trajectories HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        Self { start: format!("{head}content-length: {length}\r\n\r\n{name}"), rest }
    }

    /// Sends all but the end; less, where the service refuses and closes.
    async fn begin(&self, stream: &mut TcpStream) {
        if stream.write_all(self.start.as_bytes()).await.is_ok() {
            let _ = stream.write_all(&self.rest[..self.rest.len() - TAIL_BYTES]).await;
        }
    }

    async fn end(&self, stream: &mut TcpStream) {
        let _ = stream.write_all(&self.rest[self.rest.len() - TAIL_BYTES..]).await;
    }
}

/// The start of a body, as long for every number.
fn name(number: usize) -> String {
    format!(r#"{{"rollout_id":"flood-{number:06}","#)
}

/// The head of an answer.
struct Head {
    status: u16,
    retry_after: bool,
}

async fn answer(stream: &mut TcpStream) -> Head {
    let (mut read, mut buffer) = (Vec::new(), [0; 4_096]);
    loop {
        let count = stream.read(&mut buffer).await.expect("the answer comes before the end");
        read.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&read);
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a head has a status");
            return Head { status, retry_after: head.to_ascii_lowercase().contains("\r\nretry-after: ") };
        }
        assert!(count > 0, "closed without an answer");
    }
}

/// What all connections of a flood have in common.
#[derive(Clone)]
struct Flood {
    address: Arc<str>,
    rest: Bytes,
    answers: mpsc::UnboundedSender<Head>,
    /// Whether bodies may end.
    may_end: watch::Receiver<bool>,
}

impl Flood {
    /// Posts, and once more where that was refused; the connections, so that they stay open.
    async fn post(mut self, number: usize) -> Vec<TcpStream> {
        let post = Post::new(number, self.rest.clone());
        let mut first = self.connect().await;
        post.begin(&mut first).await;
        let early = tokio::select! {
            head = answer(&mut first) => Some(head),
            _ = self.may_end.wait_for(|may| *may) => None,
        };
        if let Some(head) = early {
            self.tell(head);
            // Again, when room comes free little by little.
            self.may_end.wait_for(|may| *may).await.expect("the test waits for all");
            let mut second = self.connect().await;
            post.begin(&mut second).await;
            post.end(&mut second).await;
            self.tell(answer(&mut second).await);
            return vec![first, second];
        }
        post.end(&mut first).await;
        self.tell(answer(&mut first).await);
        vec![first]
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&*self.address).await.expect("the kernel accepts")
    }

    fn tell(&self, head: Head) {
        self.answers.send(head).expect("the test waits for all answers");
    }
}

/// As many connections as descriptors allow: where a process may have only 1,024, other tests need some, too.
fn connections() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("the kernel tells the limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("files are limited");
    let soft = line.split_whitespace().nth(3).and_then(|limit| limit.parse::<u64>().ok());
    // "unlimited" is no number.
    if soft.is_some_and(|soft| soft <= 4_096) { 500 } else { 1_000 }
}

async fn get(service: &Service, path: &str) -> String {
    let response = crate::support::http().get(format!("{}{path}", service.url)).send().await;
    response.expect("the service answers").text().await.expect("text")
}

async fn body_bytes_in_flight(service: &Service) -> usize {
    let metrics = get(service, "/metrics").await;
    let value = metrics.lines().find_map(|line| line.strip_prefix("forebay_body_bytes_in_flight "));
    value.and_then(|value| value.parse().ok()).expect("the service counts the bytes of bodies")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resident_memory_stays_within_the_budget() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    // A busy machine may take long to read the heads of a thousand connections, and they end silently when it does.
    std::fs::write(&config, "[limits]\nheader_timeout_s = 300\n").expect("the file is written");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    let service = Service::start_with(&database, &["--config", config.to_str().expect("the path is text")], &[]).await;
    let (connections, rest) = (connections(), rest());
    let body_bytes = name(0).len() + rest.len();
    assert!(body_bytes > 8_000_000, "{body_bytes}");
    // Bodies are paid for by the kibibyte.
    let fit = BUDGET_BYTES / body_bytes.next_multiple_of(1 << 10);

    let before = service.peak_bytes();
    let (answers, mut answered) = mpsc::unbounded_channel();
    let (end, may_end) = watch::channel(false);
    let flood = Flood { address: service.url.trim_start_matches("http://").into(), rest, answers, may_end };
    let mut posts: JoinSet<_> = (0..connections).map(|number| flood.clone().post(number)).collect();
    // None can end, so exactly those that fit are let in, whatever the order.
    for _ in fit..connections {
        let head = answered.recv().await.expect("every post is answered");
        assert_eq!((head.status, head.retry_after), (503, true), "refused, and told to come back");
    }
    assert_eq!(body_bytes_in_flight(&service).await, fit * body_bytes.next_multiple_of(1 << 10));
    let held = service.peak_bytes();

    end.send_replace(true);
    drop(flood);
    let (mut stored, mut refused) = (0, 0);
    while let Some(head) = answered.recv().await {
        match head.status {
            201 => stored += 1,
            503 if head.retry_after => refused += 1,
            status => panic!("unexpected answer: {status}"),
        }
    }
    assert_eq!(stored + refused, connections);
    assert!(stored >= fit, "who is let in is stored");
    let peak = service.peak_bytes();
    let mut open = Vec::new();
    while let Some(post) = posts.join_next().await {
        open.push(post.expect("a post does not panic"));
    }
    assert_eq!(body_bytes_in_flight(&service).await, 0, "bytes are still paid for");
    let stats: Value = serde_json::from_str(&get(&service, "/stats").await).expect("JSON");
    assert_eq!(stats["conserved"], true, "{stats}");

    let mib = |bytes: u64| bytes >> 20;
    let outcome = format!(
        "{fit} bodies of {body_bytes} bytes at once, {stored} stored; resident {} MiB idle, {} MiB with the budget full, \
         {} MiB at most",
        mib(before),
        mib(held),
        mib(peak)
    );
    torture::report("resident memory, connections that post 8 MB at once", connections, &outcome);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get).min(fit);
    let bound = BUDGET_BYTES + connections * CONNECTION_BYTES + cores * WORK * body_bytes + FIXED_BYTES;
    assert!(peak < bound as u64, "{outcome}, and may be {} MiB", bound >> 20);
    service.kill().await;
}
