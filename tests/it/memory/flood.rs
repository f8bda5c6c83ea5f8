//! More concurrent bodies than the budget has room for: the budget is never exceeded, and the memory of the process
//! stays near it.

use std::{num::NonZero, sync::Arc};

use bytes::Bytes;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinSet,
};

use crate::support::{endure, eventually, process::Service};

/// Tokens of a body, which is 8 MB of text.
const TOKENS: usize = 445_000;

/// The default budget for the bodies of concurrent requests.
const BUDGET_BYTES: usize = 192 << 20;

/// Memory of a connection outside the budget: its buffer. It is as large as the largest head, and also holds the parts
/// of a refused body until they are discarded.
const CONNECTION_BYTES: usize = 64 << 10;

/// Memory for the work on a body besides its text, as a multiple of the text: growing columns, and the packed payload.
/// The service works on as many bodies at once as there are cores.
const WORK: usize = 3;

/// Other memory beyond that of the idle process: pages of the database, and what the allocator keeps for the threads
/// that freed it. glibc has up to eight heaps per core and keeps the end of each, so this varies from run to run with
/// the number of threads that took part: debug builds had 350 to 390 MiB at most, where 483 MiB are allowed.
const KEPT_BYTES: usize = 128 << 20;

/// Bytes that are withheld from every body until all bodies have arrived, so that the whole budget is in use at once.
const TAIL_BYTES: usize = 16;

/// A whole body without its rollout id, which comes first.
fn rest() -> Bytes {
    let noise = |index: usize| (index * 2_654_435_761) % 1_000_003;
    let list = |of: &dyn Fn(usize) -> String| (1..TOKENS).map(of).collect::<Vec<_>>().join(",");
    let tokens = list(&|index| (noise(index) % 128_000).to_string());
    let mask = list(&|index| u8::from(!noise(index).is_multiple_of(7)).to_string());
    let logprobs = list(&|index| format!("-{:.6}", noise(index) as f64 / 400_000.0));
    let segment = format!(r#"{{"tokens":[1,{tokens}],"loss_mask":[{mask}],"logprobs":[{logprobs}]}}"#);
    format!(r#""status":"completed","reward":1.0,"segments":[{segment}]}}"#).into()
}

/// One post: its head, its rollout id, and the bytes that all posts share.
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

    /// Sends everything but the withheld end. Sends less if the service refuses the post and closes the connection.
    async fn begin(&self, stream: &mut TcpStream) {
        if stream.write_all(self.start.as_bytes()).await.is_ok() {
            let _ = stream.write_all(&self.rest[..self.rest.len() - TAIL_BYTES]).await;
        }
    }

    async fn end(&self, stream: &mut TcpStream) {
        let _ = stream.write_all(&self.rest[self.rest.len() - TAIL_BYTES..]).await;
    }
}

/// The start of a body; it has the same length for every number.
fn name(number: usize) -> String {
    format!(r#"{{"rollout_id":"flood-{number:06}","#)
}

/// The head of an answer.
struct Head {
    status: u16,
    retry_after: bool,
}

/// The head of the answer; none if the connection ends before it.
async fn answer(stream: &mut TcpStream) -> Option<Head> {
    let (mut read, mut buffer) = (Vec::new(), [0; 4_096]);
    loop {
        let count = stream.read(&mut buffer).await.ok().filter(|count| *count > 0)?;
        read.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&read);
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a head has a status");
            return Some(Head { status, retry_after: head.to_ascii_lowercase().contains("\r\nretry-after: ") });
        }
    }
}

/// State that all connections of a flood share.
#[derive(Clone)]
struct Flood {
    address: Arc<str>,
    rest: Bytes,
    answers: mpsc::UnboundedSender<Option<Head>>,
    /// Whether the withheld ends of the bodies may be sent.
    may_end: watch::Receiver<bool>,
}

impl Flood {
    /// Posts each body, and repeats those that were refused once. Returns the connections, so that they stay open.
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
            // The refused bodies are posted again while the budget is released little by little.
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

    fn tell(&self, head: Option<Head>) {
        self.answers.send(head).expect("the test waits for all answers");
    }
}

/// Opens as many connections as the limit of file descriptors permits. Where it is only 1,024, some are left for other
/// tests.
fn connections() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("the kernel tells the limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("files are limited");
    let soft = line.split_whitespace().nth(3).and_then(|limit| limit.parse::<u64>().ok());
    // "unlimited" is not a number.
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
    // A busy machine may need long to read the heads of a thousand connections, and closes connections without an
    // answer when it does.
    std::fs::write(&config, "[limits]\nheader_timeout_s = 300\n").expect("the file is written");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    let service = Service::start_with(&database, &["--config", config.to_str().expect("the path is text")], &[]).await;
    let (connections, rest) = (connections(), rest());
    let body_bytes = name(0).len() + rest.len();
    assert!(body_bytes > 8_000_000, "{body_bytes}");
    // The budget is counted in kibibytes. Large bodies of one caller leave a quarter of it free.
    let whole = body_bytes.next_multiple_of(1 << 10);
    let fit = BUDGET_BYTES / 4 * 3 / whole;

    let before = service.peak_bytes();
    let (answers, mut answered) = mpsc::unbounded_channel();
    let (end, may_end) = watch::channel(false);
    let flood = Flood { address: service.url.trim_start_matches("http://").into(), rest, answers, may_end };
    let mut posts: JoinSet<_> = (0..connections).map(|number| flood.clone().post(number)).collect();
    // No body can end yet. Those that find no room are refused, until the others have all their bytes.
    let (mut admitted, mut fullest) = (connections, 0);
    loop {
        while let Ok(head) = answered.try_recv() {
            let head = head.expect("every post is answered");
            // A busy machine may need longer than a body that is not finished may stand still.
            let is_slow = head.status == 408;
            assert!(is_slow || (head.status, head.retry_after) == (503, true), "refused, and told to come back");
            admitted -= 1;
        }
        let held = body_bytes_in_flight(&service).await;
        assert!(held <= BUDGET_BYTES / 4 * 3, "{held} bytes");
        fullest = fullest.max(held);
        if admitted <= fit && held == admitted * whole {
            break;
        }
    }
    assert!(
        fullest > fit / 2 * whole,
        "bodies used {fullest} bytes of the budget, and {fit} of {whole} bytes have room"
    );
    let held = service.peak_bytes();

    end.send_replace(true);
    drop(flood);
    let (mut stored, mut refused, mut lost) = (0, 0, 0);
    while let Some(answer) = answered.recv().await {
        match answer.map(|head| (head.status, head.retry_after)) {
            Some((201, _)) => stored += 1,
            Some((503, true) | (408, _)) => refused += 1,
            Some((status, _)) => panic!("unexpected answer: {status}"),
            // The service reads the rest of a refused body for ten seconds. If a busy machine needs longer, the
            // connection is reset, and the answer may be lost.
            None => lost += 1,
        }
    }
    assert_eq!(stored + refused + lost, connections);
    assert!(lost <= connections / 10, "{lost} posts were not answered");
    assert!(stored >= admitted, "who is let in is stored");
    let peak = service.peak_bytes();
    let mut open = Vec::new();
    while let Some(post) = posts.join_next().await {
        open.push(post.expect("a post does not panic"));
    }
    // The last answers may have arrived before their bytes were given back.
    eventually("a budget that is free", || async { body_bytes_in_flight(&service).await == 0 }).await;
    let stats: Value = serde_json::from_str(&get(&service, "/stats").await).expect("JSON");
    assert_eq!(stats["conserved"], true, "{stats}");

    let (mib, full) = (|bytes: u64| bytes >> 20, fullest / whole);
    let outcome = format!(
        "{full} bodies of {body_bytes} bytes at once, {stored} stored; resident {} MiB idle, {} MiB with the budget full, \
         {} MiB at most",
        mib(before),
        mib(held),
        mib(peak)
    );
    endure::report("resident memory, connections that post 8 MB at once", connections, &outcome);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get).min(fit);
    let bound = BUDGET_BYTES + connections * CONNECTION_BYTES + cores * WORK * body_bytes + KEPT_BYTES;
    assert!(peak < before + bound as u64, "{outcome}, and may be {} MiB", mib(before + bound as u64));
    service.kill().await;
}
